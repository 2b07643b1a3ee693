"""Threads that poll leave the cores to others.

While a rank of OneFlow waits for a message, threads of it ask again and again whether it has come, and call ``sched_yield`` in
between. On a host of its own that takes cores which nobody needs. Here all hosts share the cores of one machine: the threads of
ranks that wait take them from ranks that compute, and from threads that carry messages. In processes with this library,
``sched_yield`` sleeps for 50 us: a thread that waits takes a tenth of a core, and notices a message up to so much later.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["COMPILER", "polling_environment"]

COMPILER = "cc"


def polling_environment(folder: Path) -> dict[str, str]:
    """Compile the library in a folder; the environment variables of processes that load it."""
    library = folder / "polling.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}
