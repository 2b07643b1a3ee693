"""The process that ends hosts when whoever made them has ended, however that happened: ``python ending.py NAMESPACE ...``.

A namespace is named as ``/proc/PID/ns/net`` links to it.  Lines on standard input name folders of control groups.  When standard
input ends, all processes in the namespaces are killed until there are none, and then the control groups are removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PATIENCE_S = 30.0


def processes_in(namespaces: Sequence[str]) -> set[int]:
    """The processes in these network namespaces."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "net") in namespaces:
                    found.add(int(entry.name))
    return found


def end(namespaces: Sequence[str], control_groups: Sequence[str]) -> None:
    """Kill all processes in the namespaces, and remove the control groups."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := processes_in(namespaces) - {os.getpid()}) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for folder in control_groups:
        while time.monotonic() < deadline:  # the kernel empties them a little later
            try:
                os.rmdir(folder)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)


def main() -> None:
    """Wait for the end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end(sys.argv[1:], [line.strip() for line in sys.stdin])


if __name__ == "__main__":
    main()
