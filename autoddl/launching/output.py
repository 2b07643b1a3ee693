"""The output of ranks, unchanged in a file per rank and line by line on the terminal; and the messages of the launcher."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

__all__ = ["RankOutput", "write_line", "write_message"]


class RankOutput:
    """Writes the ranks' output to files and to the terminal.

    If a file cannot be written (a full disk, a read-only folder, another job's files), the job continues and no more output is kept
    in files.

    Args:
        folder: for the files ``rank<k>.log``.
        hosts: the name of each rank's host; "" if it need not be shown.
        show: prints a line on the terminal.
        warn: prints a warning, at most once, if the files cannot be written.
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
        """The file of a rank's output; None if there is none."""
        path = self._folder / f"rank{rank}.log"
        return path if self._is_kept and path.exists() else None

    def write(self, rank: int, text: str) -> None:
        """Write a piece of a rank's output."""
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
        """Show the last lines that did not end with a line break, and close the files."""
        for rank, rest in self._rests.items():
            if rest:
                self._rests[rank] = ""
                self._show_line(rank, rest)
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # some file systems report a full disk only now
                file.close()
        self._files.clear()

    def _show_line(self, rank: int, line: str) -> None:
        if not self._is_shown:
            return
        shown = line.rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
        try:
            self._show(f"{self._prefixes[rank]} {shown}" if shown else self._prefixes[rank])
        except BaseException:
            self._is_shown = False  # the error ends the job; showing more would fail again
            raise


def _claim(file: IO[bytes]) -> None:
    """Lock a file as long as it is open, so that no other launch writes it.

    Raises:
        BlockingIOError: another launch has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems do not support locks
        pass


def write_line(line: str) -> None:
    """Write a line of a rank to standard output."""
    # In one write: ranks that joined a job share a terminal, and `print` may write the end of the line separately.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write_message(text: str) -> None:
    """Write a message of the launcher to standard error, as one line."""
    sys.stderr.write(f"autoddl: {' '.join(text.split())}\n")
    sys.stderr.flush()
