"""Runs an ``autoddl`` command that says when its search is somewhere:   interrupted_command.py MODULE:FUNCTION CALLS COMMAND ...

At so many calls of a function "searching" is written to stderr, and the call waits for a signal: the command cannot be done before
it is interrupted, however fast or busy the machine is.  With "CALLS+" it then writes "stopping", and waits for a second one.
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
from typing import Any

from autoddl.__main__ import main


def announce(name: str, calls: int, twice: bool) -> None:
    """Replace a function by one that announces, waits for a signal, and then does what it always does."""
    module, _, attribute = name.partition(":")
    home: Any = importlib.import_module(module)
    *classes, attribute = attribute.split(".")
    for one in classes:
        home = getattr(home, one)
    plain, left = getattr(home, attribute), [calls]

    def announcing(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            handler = signal.getsignal(signal.SIGINT)
            print("searching", file=sys.stderr, flush=True)
            while signal.getsignal(signal.SIGINT) is handler:  # the first signal gives the handlers back
                time.sleep(0.01)
            if twice:
                print("stopping", file=sys.stderr, flush=True)
                time.sleep(600)
        return plain(*arguments, **options)

    setattr(home, attribute, announcing)


if __name__ == "__main__":
    announce(sys.argv[1], int(sys.argv[2].rstrip("+")), sys.argv[2].endswith("+"))
    sys.exit(main(sys.argv[3:]))
