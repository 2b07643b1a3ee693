"""What ranks say: in a file per rank as it is, and line by line, with the rank's name before it, wherever the user looks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

__all__ = ["RankOutput"]


class RankOutput:
    """Takes the ranks' output.

    A place that cannot be written to (a full disk, a read-only folder, another job's files) is no reason to end a job: from then on
    nothing is kept.

    Args:
        folder: for the files ``rank<k>.log``.
        hosts: the name of each rank's host, "" where it need not be said.
        show: takes a line for the terminal.
        warn: takes what is to be said when the files cannot be written, once.
    """

    def __init__(
        self, folder: Path, hosts: Mapping[int, str], show: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._show, self._warn = show, warn
        self._prefixes = {rank: f"[rank {rank} @{host}]" if host else f"[rank {rank}]" for rank, host in hosts.items()}
        self._rests = dict.fromkeys(hosts, "")
        self._files: dict[int, IO[bytes]] = {}
        self._is_kept = True
        self._is_shown = True

    def path(self, rank: int) -> Path | None:
        """Where the output of a rank is kept, None where it is not."""
        path = self._folder / f"rank{rank}.log"
        return path if self._is_kept and path.exists() else None

    def write(self, rank: int, text: str) -> None:
        """Some of a rank's output, as it came."""
        if self._is_kept:
            self._keep(rank, text)
        *lines, self._rests[rank] = (self._rests[rank] + text).split("\n")
        for line in lines:
            self._show_line(rank, line)

    def _keep(self, rank: int, text: str) -> None:
        path = self._folder / f"rank{rank}.log"
        try:
            if rank not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files[rank] = path.open("ab", buffering=0)
                _claim(self._files[rank])
            rest = memoryview(text.encode(errors="replace"))
            while rest:
                rest = rest[os.write(self._files[rank].fileno(), rest) :]
        except OSError as error:
            self._is_kept = False
            self._close()
            reason = "another job is writing it" if error.errno == errno.EWOULDBLOCK else error.strerror
            self._warn(f"{path} cannot be written ({reason}): the ranks' output is shown, but no longer kept in files")

    def finish(self) -> None:
        """Show what was not ended by a new line."""
        for rank, rest in self._rests.items():
            if rest:
                self._rests[rank] = ""
                self._show_line(rank, rest)
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # some file systems say only now that they are full
                file.close()
        self._files.clear()

    def _show_line(self, rank: int, line: str) -> None:
        if not self._is_shown:
            return
        shown = line.rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
        try:
            self._show(f"{self._prefixes[rank]} {shown}" if shown else self._prefixes[rank])
        except BaseException:
            self._is_shown = False  # that ends the job, and must not hinder its end
            raise


def _claim(file: IO[bytes]) -> None:
    """Keep other launches from writing a file as long as it is open.

    Raises:
        BlockingIOError: one of them does.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have no locks
        pass
