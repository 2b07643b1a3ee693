"""Options and output that several commands share, and the names of arguments in messages.

The library names arguments as Python does: ``pipeline='auto'``, ``allow_stale=True``, ``time_limit_s``.  The command line replaces
these names by its options: in errors by `in_options` (called in :mod:`._running`), and in tables and texts by `fitted`, which
replaces only names with a value.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.devices import DEVICE_TYPES
from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_DIGITS, MAX_OPTION
from autoddl.costmodel.reading import is_whole, parse_figure

if TYPE_CHECKING:
    from ..api.results import Result
    from ..text.tables import Text

__all__ = [
    "add_connection",
    "add_device",
    "add_edited",
    "add_family_options",
    "add_json",
    "add_log_dir",
    "add_memory_limit",
    "add_plan",
    "add_quiet",
    "add_wide",
    "fitted",
    "in_options",
    "memory_limit_bytes",
    "number_option",
    "print_document",
    "print_result",
    "show",
    "terminal_width",
    "variables_option",
    "whole_numbers_option",
    "whole_option",
]

#: Arguments of functions whose option has the same name, with dashes.
_SAME_NAME = (
    "activation_limit",
    "all_reduce",
    "allow_stale",
    "checkpoints",
    "concatenation",
    "every",
    "full_size",
    "grace",
    "groups",
    "host_timeout",
    "iterations",
    "max_in_flight",
    "max_restarts",
    "micro_batches",
    "policy",
    "profile_batch",
    "seed",
    "ssh",
    "stages",
    "stall_timeout",
    "start",
    "start_timeout",
    "steps",
    "timeout",
    "tolerance",
    "warm_up",
    "width",
    "widths",
)
#: The option of each argument that is replaced even without a value.
_OPTION_OF_NAME = {
    **{name: f"--{name.replace('_', '-')}" for name in _SAME_NAME},
    "num_stages": "--stages",
    "num_micro_batches": "--micro-batches",
    "num_pipelines": "--pipelines",
    "micro_batch_rows": "--micro-batch",
    "slurm_options": "--slurm-option",
    "temperature_s": "--temperature",
}
#: Options of ``name=value`` whose name differs from that of the argument.
_OTHER_NAME = {"bucket_bytes": "--bucket", "form": "--to", "directory": "--chdir", "num_pipelines": "--pipelines"}
#: Options of ``name=value`` whose value differs from that of the argument.
_OTHER_VALUE = {
    "objective='communication'": "--communication-only",
    "recompute=False": "--recompute never",
    "recompute=True": "--recompute always",
}
#: Arguments that are replaced in the form ``name=value``.
_ASSIGNABLE = (
    *_OPTION_OF_NAME,
    *_OTHER_NAME,
    "attention",
    "batch",
    "device",
    "devices_per_node",
    "dropout",
    "edited",
    "executor",
    "gradients",
    "heads",
    "interleave",
    "log_dir",
    "master_address",
    "memory_limit_bytes",
    "method",
    "micro_batch",
    "model",
    "nodes",
    "objective",
    "optimizer",
    "overlap",
    "pipeline",
    "pp",
    "precision",
    "python",
    "ranks",
    "recompute",
    "attention",
    "gradients",
    "zero",
    "activations",
    "overlap",
    "schedule",
    "sequence",
    "sequence_parallel",
    "sizes",
    "slurm",
    "summa",
    "text",
    "tp",
    "untied",
    "vocabulary",
    "zero",
)
#: ``name=value``, and ``time_limit_s`` with or without a value.
_ASSIGNMENT = re.compile(rf"(?<![\w'./-])(?:({'|'.join(_ASSIGNABLE)})=('[^']*'|[\w.,:/+-]*\w)|time_limit_s\b)")
_NAMES = "|".join(_OPTION_OF_NAME)
_NAMES_WITH_UNDERSCORE = "|".join(name for name in _OPTION_OF_NAME if "_" in name)
#: Names with an underscore anywhere, since these are no English words; other names only at the beginning, before "is" or the like.
_NAME = re.compile(
    rf"(?<!['\w./-])(?:{_NAMES_WITH_UNDERSCORE})(?![\w'/]|\.\w)|^(?:{_NAMES})(?= (?:\S+ )?(?:is|has|cannot) )"
)
#: Names in the error of a schedule family that lacks an option, which lists the options that the family has.
_LISTED_NAMES = re.compile(rf"(?<= has no option )(?:{_NAMES})(?=; )|(?<=; it has )(?:{_NAMES})(?:, (?:{_NAMES}))*$")


# ---- Options that several commands share ---------------------------------------------------------------------------------


def add_plan(parser: argparse.ArgumentParser, name: str = "plan", metavar: str = "PLAN.json") -> None:
    """Add the argument that names a plan file."""
    parser.add_argument(name, metavar=metavar, help="a plan file, written by `autoddl plan -o`")


def add_edited(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--edited`` of commands that read plans."""
    parser.add_argument(
        "--edited",
        action="store_true",
        help="accept a plan that was edited after planning: compute its figures anew, and drop the claims of the search "
        "(optimality, bounds, baselines, trust)",
    )


def add_wide(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--wide`` of commands that print tables."""
    parser.add_argument(
        "--wide",
        action="store_true",
        help="print all columns of tables, even if they are wider than the terminal (always done for files and pipes)",
    )


def add_json(parser: argparse.ArgumentParser, help: str = "print one JSON document instead of text") -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", action="store_true", help=help)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--quiet`` of commands that take long."""
    parser.add_argument("--quiet", action="store_true", help="show no progress on stderr")


def add_memory_limit(parser: argparse._ActionsContainer, default: str) -> None:
    """Add the option ``--memory-limit``; `memory_limit_bytes` converts its value."""
    parser.add_argument(
        "--memory-limit", type=float, metavar="GIB", help=f"memory limit per device, in GiB (default: {default})"
    )


def memory_limit_bytes(arguments: argparse.Namespace) -> float | None:
    """Return the memory limit per device in bytes; None if the option is not given."""
    return None if arguments.memory_limit is None else arguments.memory_limit * 2**30


def add_device(parser: argparse._ActionsContainer, default: str) -> None:
    """Add the option ``--device`` of commands that start ranks; ``default`` says which is taken without it."""
    parser.add_argument("--device", choices=DEVICE_TYPES, help=f"type of device of the ranks (default: {default})")


def add_log_dir(parser: argparse._ActionsContainer) -> None:
    """Add the option ``--log-dir`` of commands that start ranks on hosts."""
    parser.add_argument(
        "--log-dir", metavar="DIR", help="folder of the log files, one per rank (default: autoddl-logs/TIME)"
    )


def add_connection(parser: argparse._ActionsContainer) -> None:
    """Add the options of the connection to hosts: ``--python``, ``--ssh`` and ``--master-address``; None if not given."""
    parser.add_argument("--python", metavar="PATH", help="path of Python on the hosts (default: that of this Python)")
    parser.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="command that connects to hosts, with its options, such as 'ssh -p 2222' (default: ssh)",
    )
    parser.add_argument(
        "--master-address",
        metavar="HOST",
        help="address of the host of rank 0 (default: the address at which ssh reached it)",
    )


def add_family_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of schedule families that `autoddl schedule` and `autoddl train` share."""
    parser.add_argument(
        "--pipelines",
        dest="num_pipelines",
        type=int,
        metavar="P",
        help="chimera: number of pipelines over both directions, an even number (default: 2)",
    )
    parser.add_argument("--concatenation", metavar="HOW", help="chimera: direct, doubling or halving")
    parser.add_argument("--policy", metavar="POLICY", help="1f1b: A or B; zero-bubble: H1 or H2")
    parser.add_argument(
        "--groups", type=int, metavar="G", help="grouped and interleaved schedules: number of stages per worker"
    )


# ---- Types of options ------------------------------------------------------------------------------------------------------


def whole_option(text: str) -> int:
    """Parse an option that is a whole number, more strictly than ``int`` (:mod:`autoddl.costmodel.reading`).

    Raises:
        argparse.ArgumentTypeError: If the text is not a whole number.
    """
    word = text.strip()
    digits = word[1:] if word[:1] in ("-", "+") else word
    if not is_whole(digits):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a whole number of at most {MAX_DIGITS} digits")
    return -int(digits) if word.startswith("-") else int(digits)


def whole_numbers_option(text: str) -> list[int]:
    """Parse an option that is a list of whole numbers, separated by commas.

    Raises:
        argparse.ArgumentTypeError: If a word is not a whole number.
    """
    return [whole_option(word) for word in text.split(",")]


def number_option(text: str) -> float:
    """Parse an option that is a finite number.

    Raises:
        argparse.ArgumentTypeError: If the text is not a number, or the number is too large.
    """
    value = parse_figure(text)
    if not abs(value) <= MAX_OPTION:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a number of at most {MAX_OPTION:g}")
    return value


# ---- Output ----------------------------------------------------------------------------------------------------------------


def print_document(document: Mapping[str, Any]) -> None:
    """Print a JSON document."""
    print(json.dumps(document, indent=1, allow_nan=False))


def print_result(result: Result, arguments: argparse.Namespace) -> None:
    """Print a result: as a JSON document with ``--json``, otherwise as text."""
    if arguments.json:
        print_document(result.document)
    else:
        show(result.text, arguments)


def terminal_width(arguments: argparse.Namespace) -> int | None:
    """Return the number of columns of the terminal; None with ``--wide``, or if standard output is not a terminal."""
    if arguments.wide or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns or 80  # a terminal may not know its size


def show(text: Text, arguments: argparse.Namespace, *more_lines: str) -> None:
    """Print a text, fitted into the terminal, and further lines."""
    print("\n".join([fitted(text, terminal_width(arguments)), *more_lines]))


def fitted(text: Text, width: int | None) -> str:
    """Return a text with options instead of ``name=value``, in lines of at most ``width`` characters."""
    return text.replaced(lambda line: _ASSIGNMENT.sub(_option, line)).fitted(width, "--wide shows all")


def in_options(message: str) -> str:
    """Return an error message of the library with options instead of arguments of functions.

    >>> in_options("raise time_limit_s, or use pipeline='auto' with allow_stale=True")
    'raise --time-limit, or use --pipeline auto with --allow-stale'
    """
    message = _ASSIGNMENT.sub(_option, message)
    message = _LISTED_NAMES.sub(
        lambda names: ", ".join(_OPTION_OF_NAME[name] for name in names[0].split(", ")), message
    )
    return _NAME.sub(lambda name: _OPTION_OF_NAME[name[0]], message)


def _option(assignment: re.Match[str]) -> str:
    """Return the option of a ``name=value``."""
    if assignment[1] is None:
        return "--time-limit"
    name, value = assignment[1], assignment[2].strip("'")
    if assignment[0] in _OTHER_VALUE:
        return _OTHER_VALUE[assignment[0]]
    if name == "memory_limit_bytes":
        return f"--memory-limit {_gib_rounded_up(float(value)):.4g}"
    option = _OTHER_NAME.get(name) or f"--{name.replace('_', '-')}"
    return option if value == "True" else f"{option} {value}"


def _gib_rounded_up(nbytes: float) -> float:
    """Return a memory limit in GiB, rounded up to four digits."""
    gib = nbytes / 2**30
    digits = 3 - math.floor(math.log10(gib)) if gib > 0 else 0
    return math.ceil(gib * 10**digits) / 10**digits


def variables_option(words: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of ``NAME=VALUE`` and of ``NAME``, whose value is that of this environment."""
    variables = {}
    for text in words:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {text!r} should be NAME=VALUE, or NAME for its value in this environment")
        if not equals and name not in os.environ:
            raise UserError(f"--env {name}: the variable is not set in this environment; give {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    return variables
