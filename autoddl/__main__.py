"""The command line: ``autoddl COMMAND ...`` or ``python -m autoddl COMMAND ...``.

Every public module of :mod:`autoddl.cli` is a command: ``add_parser(subparsers)`` adds its arguments, and ``run(arguments)`` runs
it and returns the exit code.  An error is reported as one line on stderr and as the exit code: see :mod:`autoddl.cli._running`.

This module imports nothing before `main` can handle Ctrl-C.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The command and its arguments.  If None, the arguments of this process are used, and the command takes over the
            standard streams and the Ctrl-C handler of the process.
    """
    try:
        from .cli import _process, _running

        return _process.run() if argv is None else _running.run_command(argv)
    except KeyboardInterrupt:  # during the first imports
        import sys

        print("autoddl: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    import sys

    sys.exit(main())
