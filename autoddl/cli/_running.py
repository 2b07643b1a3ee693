"""Runs one command: its arguments read, its outputs checked, and whatever goes wrong told in one line and an exit code.

Codes, of every command: 0 done; 1 a rank failed, or a verification is off; 2 what the user gave, which a place that cannot be
written to is too; 128 + N ended by signal N, as shells have it (130 Ctrl-C; 141 the reader of the output has gone); 70 our own
fault.  Errors that name their own code have it as ``exit_code``.
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

__all__ = ["INTERRUPTED", "OUR_FAULT", "USERS_FAULT", "report", "run_command"]

USERS_FAULT, OUR_FAULT, INTERRUPTED = UserError.exit_code, 70, 128 + signal.SIGINT
#: What a system says of a place: it is full, may not be written to, has a name that is too long, or is broken.
_OF_PLACES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
_OUTPUTS = {"output": "-o", "picture": "--picture"}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line; takes ``-5GB/s`` for a value, not for an option."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._words: list[str] = []
        self.register("type", int, whole_option)
        self.register("type", float, number_option)
        self._negative_number_matcher = re.compile(r"-\.?[0-9].*")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse makes an empty list of ``--stages=--``.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._of_command(getattr(parsed, "command", None)).refuse(unknown)
        return parsed

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Say that there are no such arguments, and which option may be meant."""
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        hints = (did_you_mean(option, self._option_string_actions) for option in options)
        hint = next(filter(None, hints), "")
        self._exit(f"unrecognized arguments: {' '.join(words)}{hint and '; ' + hint}")

    def error(self, message: str) -> NoReturn:
        if "are required" in message:  # --clutser says more than that --cluster is missing
            unknown = next(filter(self._is_unknown, self._words), None)
            if unknown is not None:
                self.refuse([unknown])
        self._exit(message)

    def _exit(self, message: str) -> NoReturn:
        self.exit(USERS_FAULT, f"autoddl: {one_line(message)} (see {self.prog} --help)\n")

    def _is_unknown(self, word: str) -> bool:
        name = word.partition("=")[0]
        return (
            len(name) > 2 and name.startswith("--") and not any(o.startswith(name) for o in self._option_string_actions)
        )

    def _of_command(self, command: str | None) -> _Parser:
        """The parser of a command; this one where there is none."""
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
    """Prints the version; looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from .. import __version__

        print(f"autoddl {__version__}")
        parser.exit()


def parser_of(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``argv`` begins with; of all commands where it begins with none."""
    parser = _Parser(prog="autoddl", description="Proven-optimal SBP layouts and pipeline schedules for large models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = sorted(info.name for info in pkgutil.iter_modules(cli.__path__) if not info.name.startswith("_"))
    # The other commands need not be loaded to run one.
    for command in [argv[0]] if argv and argv[0] in commands else commands:
        importlib.import_module(f"autoddl.cli.{command}").add_parser(subparsers)
    return parser


def run_command(
    argv: Sequence[str], working: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> int:
    """Run one command; the exit code.

    Args:
        working: entered while the command itself runs.
    """
    try:
        try:
            arguments = parser_of(argv).parse_args(argv)
            _check_outputs(arguments)
            with working():
                code: int = importlib.import_module(f"autoddl.cli.{arguments.command}").run(arguments)
                sys.stdout.flush()
        except SystemExit as exit:  # after --help, or what there was to say has been said
            sys.stdout.flush()
            code = exit.code if isinstance(exit.code, int) else 0
        return code
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("AUTODDL_TRACEBACK") and _code_of(error) == OUR_FAULT:
            raise
        return report(error)


def report(error: BaseException) -> int:
    """Say in one line on stderr what went wrong; the exit code."""
    code = _code_of(error)
    message = _message_of(error, code)
    if message:
        # What ranks say of themselves is no input: their errors, and the places of their logs, are shown in full.
        shown = one_line(in_options(message)) if isinstance(error, UserError) else printable(message)
        print(f"autoddl: {shown}", file=sys.stderr)
    return code


def _code_of(error: BaseException) -> int:
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OF_PLACES):
        return USERS_FAULT
    return USERS_FAULT if _is_nowhere() else OUR_FAULT


def _message_of(error: BaseException, code: int) -> str:
    if code == OUR_FAULT:
        kind = type(error).__name__
        return f"internal error, please report it: {kind}: {error} (AUTODDL_TRACEBACK=1 shows more)"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "out of memory: this takes more than the machine has, or than a limit leaves (ulimit -v)"
    if isinstance(error, OSError) and not hasattr(error, "exit_code") and error.errno in _OF_PLACES:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}"
    if not hasattr(error, "exit_code"):
        return "the current folder has been removed; change to one that exists"
    return str(error)


def _is_nowhere() -> bool:
    """Whether the current folder has been removed, where anything that needs it fails."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse to write over what is read: a plan, a model, measurements. Found out before anything is computed."""
    outputs = {name: getattr(arguments, name) for name in _OUTPUTS if getattr(arguments, name, None)}
    if not outputs:
        return
    from autoddl.costmodel.writing import is_same_file

    for name, path in outputs.items():
        for other, value in _paths(arguments):
            if other == name or not is_same_file(path, value):
                continue
            if other in outputs:
                raise UserError(f"{_OUTPUTS[name]} and {_OUTPUTS[other]} are the same file {path}; name another one")
            if os.path.isfile(value):
                raise UserError(f"{_OUTPUTS[name]} {path} is the input {value}; name another file to write to")


def _paths(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """What may be the path of a file among the arguments."""
    for name, value in vars(arguments).items():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, str) and each and name != "command":
                yield name, each
                if ".py:" in each:
                    yield name, each.rpartition(":")[0]
