"""Runs one command: parses its arguments, checks its output files, and reports errors as one line and an exit code.

Exit codes of all commands:

- 0: success
- 1: a rank failed, a verification found a difference, or plans differ with ``diff --exit-code``
- 2: an error of the user, or a file that cannot be written
- 70: an internal error
- 128 + N: ended by signal N, as in shells (130: Ctrl-C; 141: the reader of the output has closed the pipe)

An exception can set its exit code as its attribute ``exit_code``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

from autoddl.costmodel.errors import UserError, one_line, printable
from autoddl.costmodel.suggestions import did_you_mean

from .. import cli
from ._options import in_options, number_option, whole_option

__all__ = ["INTERNAL_ERROR", "INTERRUPTED", "USER_ERROR", "parser_of", "report", "run_command"]

#: Exit codes.
USER_ERROR, INTERNAL_ERROR, INTERRUPTED = UserError.exit_code, 70, 128 + signal.SIGINT
#: Errors of the system that the user can solve: a full disk, missing permissions, a name that is too long, exhausted limits.
_SYSTEM_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)
#: Options that name output files, by the attribute of the parsed arguments.
_OUTPUTS = {"output": "-o", "picture": "--picture"}


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, with a hint for misspelled options, and accepts values such as ``-5GB/s``."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._words: list[str] = []
        self.register("type", int, whole_option)
        self.register("type", float, number_option)
        self._negative_number_matcher = re.compile(r"-\.?[0-9].*")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse would parse ``--stages=--`` as an empty list.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._parser_of_command(getattr(parsed, "command", None)).refuse(unknown)
        return parsed

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Report unknown arguments and the option that may be meant, and exit."""
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        hints = (did_you_mean(option, self._option_string_actions) for option in options)
        hint = next(filter(None, hints), "")
        self._exit(f"unrecognized arguments: {' '.join(words)}{hint and '; ' + hint}")

    def error(self, message: str) -> NoReturn:
        if "are required" in message:  # a misspelled --clutser explains more than the missing --cluster
            unknown = next(filter(self._is_unknown, self._words), None)
            if unknown is not None:
                self.refuse([unknown])
        self._exit(message)

    def _exit(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"autoddl: {one_line(message)} (see {self.prog} --help)\n")

    def _is_unknown(self, word: str) -> bool:
        name = word.partition("=")[0]
        if not name.startswith("--") or name == "--":
            return False
        return not any(option.startswith(name) for option in self._option_string_actions)

    def _parser_of_command(self, command: str | None) -> _Parser:
        """Return the parser of a command, or this parser if there is no such command."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                return cast("_Parser", action.choices[command])
        return self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        hint = did_you_mean(str(value), known)
        raise argparse.ArgumentError(
            action, f"invalid choice: {str(value)!r}{hint and '; ' + hint} (choose from {', '.join(known)})"
        )


class _Version(argparse.Action):
    """Prints the version, which is looked up only if it is printed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from .. import __version__

        print(f"autoddl {__version__}")
        parser.exit()


def parser_of(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the command that ``argv`` begins with; if it begins with no command, of all commands."""
    parser = _Parser(
        prog="autoddl",
        description="Find, prove, run and export the fastest way to train a large model on a cluster: SBP layouts of all layers, "
        "and pipeline schedules. `autoddl COMMAND --help` describes the options of a command.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    commands = sorted(info.name for info in pkgutil.iter_modules(cli.__path__) if not info.name.startswith("_"))
    # Only the command that runs is imported.
    for command in [argv[0]] if argv and argv[0] in commands else commands:
        importlib.import_module(f"autoddl.cli.{command}").add_parser(subparsers)
    return parser


def run_command(
    argv: Sequence[str], working: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The command and its arguments.
        working: Returns a context that is entered while the command itself runs, after its arguments were parsed.
    """
    try:
        try:
            arguments = parser_of(argv).parse_args(argv)
            _check_outputs(arguments)
            with working():
                code: int = importlib.import_module(f"autoddl.cli.{arguments.command}").run(arguments)
                sys.stdout.flush()
        except SystemExit as exit:  # after --help, or after an error that was reported
            sys.stdout.flush()
            code = exit.code if isinstance(exit.code, int) else 0
        return code
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("AUTODDL_TRACEBACK") and _code_of(error) == INTERNAL_ERROR:
            raise
        return report(error)


def report(error: BaseException) -> int:
    """Report an error in one line on stderr and return its exit code."""
    code = _code_of(error)
    message = _message_of(error, code)
    if message:
        # Errors of ranks are printed in full, with the paths of their logs; messages that quote user input are shortened.
        line = one_line(in_options(message)) if isinstance(error, UserError) else printable(message)
        print(f"autoddl: {line}", file=sys.stderr)
    return code


def _code_of(error: BaseException) -> int:
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SYSTEM_ERRORS):
        return USER_ERROR
    return USER_ERROR if _is_current_folder_gone() else INTERNAL_ERROR


def _message_of(error: BaseException, code: int) -> str:
    if code == INTERNAL_ERROR:
        kind = type(error).__name__
        return f"internal error, please report it: {kind}: {error} (AUTODDL_TRACEBACK=1 shows more)"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "out of memory: the command needs more than the machine has, or than a limit allows (ulimit -v)"
    if isinstance(error, OSError) and not hasattr(error, "exit_code") and error.errno in _SYSTEM_ERRORS:
        filename = f"{error.filename}: " if error.filename else ""
        return f"{filename}{error.strerror}"
    if not hasattr(error, "exit_code"):
        return "the current folder has been removed; change to one that exists"
    return str(error)


def _is_current_folder_gone() -> bool:
    """Return whether the current folder was removed, so that any access to it fails."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse an output file that is also an input file, or that another option names, before anything is computed."""
    outputs = {name: getattr(arguments, name) for name in _OUTPUTS if getattr(arguments, name, None)}
    if not outputs:
        return
    from autoddl.costmodel.writing import is_same_file

    for name, path in outputs.items():
        for other, value in _possible_paths(arguments):
            if other == name or not is_same_file(path, value):
                continue
            if other in outputs:
                raise UserError(f"{_OUTPUTS[name]} and {_OUTPUTS[other]} are the same file {path}; name another one")
            if os.path.isfile(value):
                raise UserError(f"{_OUTPUTS[name]} {path} is the input {value}; name another file to write to")


def _possible_paths(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield name and value of all arguments that may be the path of a file."""
    for name, value in vars(arguments).items():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, str) and each and name != "command":
                yield name, each
                if ".py:" in each:
                    yield name, each.rpartition(":")[0]
