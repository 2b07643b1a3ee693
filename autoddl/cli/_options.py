"""Options that several commands have, and messages of the library with its arguments named as options of the command line."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import LARGEST_OPTION, MOST_DIGITS
from autoddl.costmodel.reading import is_whole, parse_figure

if TYPE_CHECKING:
    from ..text.tables import Text

__all__ = ["add_edited", "add_wide", "by_option", "number_option", "show", "terminal_width", "whole_option"]

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
    *("max_in_flight", "max_restarts", "micro_batches", "policy", "profile_batch", "seed", "ssh", "stages"),
    *("stall_timeout", "start_timeout", "timeout", "tolerance", "warm_up", "width", "widths"),
)
_OPTIONS = {
    **{name: f"--{name.replace('_', '-')}" for name in _ARGUMENTS},
    "num_stages": "--stages",
    "num_micro_batches": "--micro-batches",
    "num_pipelines": "--pipelines",
    "micro_batch_rows": "--micro-batch",
}
_NAMES = "|".join(_OPTIONS)
_UNMISTAKABLE = "|".join(name for name in _OPTIONS if "_" in name)
#: Names that are no words wherever they are; those that are where they begin a message, or are listed as options.
_ARGUMENT = re.compile(rf"(?<!['\w])(?:{_UNMISTAKABLE})(?![\w'])|^(?:{_NAMES})(?= (?:\S+ )?(?:is|has|cannot) )")
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
    print("\n".join([text.fitted(terminal_width(arguments)), *more]))


@contextlib.contextmanager
def by_option() -> Iterator[None]:
    """Within it the message of a user error says ``--stages`` for ``num_stages``, ``--warm-up`` for ``warm_up``, and so on."""
    try:
        yield
    except UserError as error:
        raise UserError(_by_option(str(error))) from None


def whole_option(text: str) -> int:
    """The type of options that are whole numbers: stricter than ``int`` (:mod:`autoddl.costmodel.reading`).

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    word = text.strip()
    digits = word[1:] if word[:1] in ("-", "+") else word
    if not is_whole(digits):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a whole number of at most {MOST_DIGITS} digits")
    return -int(digits) if word.startswith("-") else int(digits)


def number_option(text: str) -> float:
    """The type of options that are numbers: finite ones.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    value = parse_figure(text)
    if not abs(value) <= LARGEST_OPTION:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a number of at most {LARGEST_OPTION:g}")
    return value


def _by_option(message: str) -> str:
    listed = _LISTED.sub(lambda names: ", ".join(_OPTIONS[name] for name in names[0].split(", ")), message)
    return _ARGUMENT.sub(lambda name: _OPTIONS[name[0]], listed)
