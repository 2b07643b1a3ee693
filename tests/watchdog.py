"""A test that hangs is ended, with the stacks of all processes that it started, and fails.

pytest-timeout says how long a test may take (``timeout`` in pyproject.toml, or the mark of a test) and when; what happens then
is said here. A thread of the test's process

1. writes the stacks of all threads of its process,
2. has every process below it that handles SIGUSR1 (ranks do, see `autoddl.pipelines.runtime.ranks.rank`) write its own into
   its log,
3. adds the state of each such process and the end of its log,
4. kills them, and ends the process of the test.

pytest-xdist then reports the test as failed and replaces the worker; the text becomes part of that report. Where no worker runs the
test (``-n 0``) the text goes to stderr and the run ends.

A main thread that keeps Python's global lock while it hangs (in C++) keeps that thread from running too. faulthandler, which needs
no lock, then ends the process some time later, with the stacks of that process alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

__all__ = ["Watchdog", "descendants"]

#: faulthandler waits so much longer than the thread, in parts of the limit.
_GRACE = 0.2
#: How long processes have to write their stacks; they are done once nothing was written for `_QUIET_SECONDS`.
_ANSWER_SECONDS = 20.0
_QUIET_SECONDS = 0.5
#: How long all the writing may take before faulthandler ends it.
_REPORT_SECONDS = 60.0
_TAIL_BYTES = 8000


class Watchdog:
    """Ends this process once a test has taken too long.

    Args:
        output: where the text goes; the process keeps it open.
    """

    def __init__(self, output: IO[bytes]):
        self._output = output
        self._timer: threading.Timer | None = None

    def watch(self, test: str, limit_s: float) -> None:
        """Begin: the test may take ``limit_s``."""
        self.rest()
        self._timer = threading.Timer(limit_s, self._expire, (test, limit_s))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later((1 + _GRACE) * limit_s, exit=True, file=self._output)

    def rest(self) -> None:
        """The test is over."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, test: str, limit_s: float) -> None:
        faulthandler.dump_traceback_later(_REPORT_SECONDS, exit=True, file=self._output)
        children = list(descendants(os.getpid()))
        try:
            self._say(f"\n{test} took more than {limit_s:g} s. Process {os.getpid()}, which runs it, stands at:\n\n")
            faulthandler.dump_traceback(file=self._output)
            _ask_for_stacks([pid for pid in children if _handles(pid, signal.SIGUSR1)])
            for pid in children:
                self._say(_description(pid))
        finally:
            for pid in reversed(children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(1)

    def _say(self, text: str) -> None:
        self._output.write(text.encode(errors="replace"))
        self._output.flush()


def descendants(pid: int) -> Iterator[int]:
    """The processes below a process, each before those that it started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    left = sorted(children.get(pid, ()))
    while left:
        first = left.pop(0)
        yield first
        left[:0] = sorted(children.get(first, ()))


def _ask_for_stacks(pids: Sequence[int]) -> None:
    """Have processes write into their logs where their threads stand, and wait until all have done so."""
    before = sizes = {pid: _log_size(pid) for pid in pids}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    asked = changed = time.monotonic()
    while time.monotonic() - asked < _ANSWER_SECONDS:
        time.sleep(0.05)
        now = {pid: _log_size(pid) for pid in pids}
        if now != sizes:
            sizes, changed = now, time.monotonic()
        have_all_answered = all(sizes[pid] != before[pid] for pid in pids)
        if have_all_answered and time.monotonic() - changed > _QUIET_SECONDS:
            return


def _log(pid: int) -> Path | None:
    """The file that the stderr of a process goes to, if it is one."""
    with contextlib.suppress(OSError):
        log = Path(os.readlink(f"/proc/{pid}/fd/2"))
        return log if log.is_file() else None
    return None


def _log_size(pid: int) -> int:
    log = _log(pid)
    return log.stat().st_size if log else 0


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; others would be ended by it."""
    try:
        return bool(int(_status(pid)["SigCgt"], 16) >> (number - 1) & 1)
    except OSError:
        return False


def _description(pid: int) -> str:
    """What a process is, its state, and the end of the file that its stderr goes to."""
    try:
        folder, status = Path(f"/proc/{pid}"), _status(pid)
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:300]
        names = dict(e.split("=", 1) for e in (folder / "environ").read_text(errors="replace").split("\0") if "=" in e)
    except OSError:
        return f"\n== process {pid} has ended meanwhile\n"
    rank = f", rank {names['RANK']}" if "RANK" in names else ""
    text = f"\n== process {pid}{rank}, {status.get('State', '?')}: {command}\n"
    if log := _log(pid):
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text += f"-- the end of {log}:\n" + file.read().decode(errors="replace")
    return text
