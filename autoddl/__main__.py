"""The command line: ``autoddl COMMAND ...`` or ``python -m autoddl COMMAND ...``.

Every module of :mod:`autoddl.cli` is a command: ``add_parser(subparsers)`` describes its arguments, ``run(arguments)`` runs it and
returns the exit code.  What goes wrong ends in one line on stderr and an exit code: see :mod:`autoddl.cli._running`.

Nothing is imported here before `main` can take a Ctrl-C.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.

    Args:
        argv: the command and its arguments.  Without them those of this process are taken, and the process is taken to be there
            for this command alone: its standard streams and Ctrl-C are ours.
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
