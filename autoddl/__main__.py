"""The command line: ``autoddl COMMAND ...`` or ``python -m autoddl COMMAND ...``.

Every module of :mod:`autoddl.cli` is a command: ``add_parser(subparsers)`` describes its arguments, ``run(arguments)`` runs it and
returns the exit code.  What a user got wrong ends here as one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from autoddl.costmodel.errors import UserError, one_line

from . import cli
from .cli._options import number_option, whole_option

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line; takes ``-5GB/s`` for a value, not for an option."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.register("type", int, whole_option)
        self.register("type", float, number_option)
        self._negative_number_matcher = re.compile(r"-\.?[0-9].*")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse makes an empty list of ``--stages=--``.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"autoddl: {one_line(message)} (see {self.prog} --help)\n")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``argv`` begins with; of all commands where it begins with none."""
    parser = _Parser(prog="autoddl", description="Proven-optimal SBP layouts and pipeline schedules for large models.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = sorted(info.name for info in pkgutil.iter_modules(cli.__path__) if not info.name.startswith("_"))
    # The other commands need not be loaded to run one.
    for command in [argv[0]] if argv and argv[0] in commands else commands:
        importlib.import_module(f"autoddl.cli.{command}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv).parse_args(argv)
    try:
        code = importlib.import_module(f"autoddl.cli.{arguments.command}").run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(2, str(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except BrokenPipeError:
        # The reader has gone (a pager, head): nothing is left to be said, and nothing to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except MemoryError:
        return _fail(70, "out of memory")
    except Exception as error:
        if os.environ.get("AUTODDL_TRACEBACK"):
            raise
        return _fail(
            70, f"internal error, please report it: {type(error).__name__}: {error} (AUTODDL_TRACEBACK=1 shows more)"
        )


def _fail(code: int, message: str) -> int:
    print(f"autoddl: {one_line(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
