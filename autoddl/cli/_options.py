"""Options that several commands have, and texts of the library with its arguments named as options of the command line.

The library names its arguments as Python does: ``pipeline='auto'``, ``allow_stale=True``, ``time_limit_s``.  What the command line
prints goes through one place each: errors through `in_options` (:mod:`._running`), tables and texts through `fitted`, which leaves
names without a value as they are.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
from typing import TYPE_CHECKING

from autoddl.costmodel.errors import quote
from autoddl.costmodel.limits import MAX_DIGITS, MAX_OPTION
from autoddl.costmodel.reading import is_whole, parse_figure

if TYPE_CHECKING:
    from ..text.tables import Text

__all__ = ["add_edited", "add_wide", "in_options", "number_option", "show", "terminal_width", "whole_option"]

#: Arguments of functions that options are named after.
_ARGUMENTS = (
    *(
        "activation_limit",
        "all_reduce",
        "checkpoints",
        "concatenation",
        "grace",
        "groups",
        "host_timeout",
        "iterations",
    ),
    *(
        "every",
        "max_in_flight",
        "max_restarts",
        "micro_batches",
        "policy",
        "profile_batch",
        "seed",
        "ssh",
        "stages",
        "steps",
    ),
    *("stall_timeout", "start_timeout", "timeout", "tolerance", "warm_up", "width", "widths"),
)
_OPTIONS = {
    **{name: f"--{name.replace('_', '-')}" for name in _ARGUMENTS},
    "num_stages": "--stages",
    "num_micro_batches": "--micro-batches",
    "num_pipelines": "--pipelines",
    "micro_batch_rows": "--micro-batch",
}
#: Options that have another name, or another value, than the argument that they give.
_RENAMED = {"form": "--to", "directory": "--chdir", "num_pipelines": "--pipelines"}
_ASSIGNED = (
    *_OPTIONS,
    *_RENAMED,
    *(
        "allow_stale",
        "devices_per_node",
        "edited",
        "heads",
        "log_dir",
        "master_address",
        "memory_limit_bytes",
        "method",
    ),
    *("micro_batch", "model", "nodes", "objective", "pipeline", "python", "ranks", "recompute", "schedule", "sequence"),
    *("sizes", "summa", "text", "untied"),
)
_VALUES = {
    "objective='communication'": "--communication-only",
    "recompute=False": "--recompute never",
    "recompute=True": "--recompute always",
}
#: An argument with its value, and one that needs none.
_GIVEN = re.compile(rf"(?<![\w'./-])(?:({'|'.join(_ASSIGNED)})=('[^']*'|[\w.,:/+-]*\w)|time_limit_s\b)")
_NAMES = "|".join(_OPTIONS)
_UNMISTAKABLE = "|".join(name for name in _OPTIONS if "_" in name)
#: Names that are no words wherever they are; those that are where they begin a message, or are listed as options.
_ARGUMENT = re.compile(
    rf"(?<!['\w./-])(?:{_UNMISTAKABLE})(?![\w'/]|\.\w)|^(?:{_NAMES})(?= (?:\S+ )?(?:is|has|cannot) )"
)
_LISTED = re.compile(rf"(?<= has no option )(?:{_NAMES})(?=; )|(?<=; it has )(?:{_NAMES})(?:, (?:{_NAMES}))*$")


def add_edited(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--edited``, of all commands that read plans."""
    parser.add_argument(
        "--edited",
        action="store_true",
        help="take a plan also if it was edited: compute its figures anew, and drop what was claimed of it (optimality, bounds, "
        "baselines, trust)",
    )


def add_wide(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--wide``, of all commands that print tables."""
    parser.add_argument(
        "--wide",
        action="store_true",
        help="print all columns of tables, however wide the terminal is (as into files and pipes)",
    )


def terminal_width(arguments: argparse.Namespace) -> int | None:
    """The columns that lines have to fit into; None where standard output is no terminal, or with ``--wide``."""
    if arguments.wide or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns or 80  # a terminal may not know its size


def show(text: Text, arguments: argparse.Namespace, *more: str) -> None:
    """Print a text as wide as it may be, and ``more`` lines."""
    print("\n".join([fitted(text, terminal_width(arguments)), *more]))


def fitted(text: Text, width: int | None) -> str:
    """A text with no line longer than ``width``, as the command line says it."""
    return text.replaced(lambda line: _GIVEN.sub(_option, line)).fitted(width, "--wide shows all")


def whole_option(text: str) -> int:
    """The type of options that are whole numbers: stricter than ``int`` (:mod:`autoddl.costmodel.reading`).

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    word = text.strip()
    digits = word[1:] if word[:1] in ("-", "+") else word
    if not is_whole(digits):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a whole number of at most {MAX_DIGITS} digits")
    return -int(digits) if word.startswith("-") else int(digits)


def number_option(text: str) -> float:
    """The type of options that are numbers: finite ones.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    value = parse_figure(text)
    if not abs(value) <= MAX_OPTION:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a number of at most {MAX_OPTION:g}")
    return value


def in_options(text: str) -> str:
    """An error of the library with its arguments named as options.

    >>> in_options("raise time_limit_s, or use pipeline='auto' with allow_stale=True")
    'raise --time-limit, or use --pipeline auto with --allow-stale'
    """
    text = _GIVEN.sub(_option, text)
    listed = _LISTED.sub(lambda names: ", ".join(_OPTIONS[name] for name in names[0].split(", ")), text)
    return _ARGUMENT.sub(lambda name: _OPTIONS[name[0]], listed)


def _option(given: re.Match[str]) -> str:
    """``name=value`` as an option."""
    if given[1] is None:
        return "--time-limit"
    name, value = given[1], given[2].strip("'")
    if given[0] in _VALUES:
        return _VALUES[given[0]]
    if name == "memory_limit_bytes":
        return f"--memory-limit {_gib(float(value)):.4g}"
    option = _RENAMED.get(name) or f"--{name.replace('_', '-')}"
    return option if value == "True" else f"{option} {value}"


def _gib(nbytes: float) -> float:
    """A memory limit in GiB, of four digits, which is at least as much."""
    gib = nbytes / 2**30
    digits = 3 - math.floor(math.log10(gib)) if gib > 0 else 0
    return math.ceil(gib * 10**digits) / 10**digits
