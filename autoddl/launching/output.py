"""What ranks say: in a file per rank as it is, and line by line, with the rank's name before it, wherever the user looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

__all__ = ["RankOutput"]


class RankOutput:
    """Takes the ranks' output.

    Args:
        folder: for the files ``rank<k>.log``.
        hosts: the name of each rank's host, "" where it need not be said.
        show: takes a line for the terminal.
    """

    def __init__(self, folder: Path, hosts: Mapping[int, str], show: Callable[[str], None]) -> None:
        self._folder = folder
        self._show = show
        self._prefixes = {rank: f"[rank {rank} @{host}]" if host else f"[rank {rank}]" for rank, host in hosts.items()}
        self._rests = dict.fromkeys(hosts, "")
        self._files: dict[int, IO[str]] = {}

    def path(self, rank: int) -> Path:
        """Where the output of a rank goes."""
        return self._folder / f"rank{rank}.log"

    def write(self, rank: int, text: str) -> None:
        """Some of a rank's output, as it came."""
        if rank not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[rank] = self.path(rank).open("a", encoding="utf-8", errors="replace", newline="")
        self._files[rank].write(text)
        self._files[rank].flush()
        *lines, self._rests[rank] = (self._rests[rank] + text).split("\n")
        for line in lines:
            self._show_line(rank, line)

    def finish(self) -> None:
        """Show what was not ended by a new line."""
        for rank, rest in self._rests.items():
            if rest:
                self._show_line(rank, rest)
                self._rests[rank] = ""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _show_line(self, rank: int, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
        self._show(f"{self._prefixes[rank]} {shown}" if shown else self._prefixes[rank])
