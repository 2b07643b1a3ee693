"""Options that several commands have, and messages of the library with its arguments named as options of the command line."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator

from autoddl.costmodel.errors import UserError

__all__ = ["add_edited", "by_option"]

_OPTIONS = {
    "num_stages": "--stages",
    "num_micro_batches": "--micro-batches",
    "num_pipelines": "--pipelines",
    "micro_batch_rows": "--micro-batch",
    **{name: f"--{name.replace('_', '-')}" for name in ("activation_limit", "all_reduce", "max_in_flight", "warm_up")},
    **{name: f"--{name}" for name in ("concatenation", "groups", "iterations", "policy", "width")},
}
_NAMES = "|".join(_OPTIONS)
_UNMISTAKABLE = "|".join(name for name in _OPTIONS if "_" in name)
#: Names that are no words wherever they are; those that are where they begin a message, or are listed as options.
_ARGUMENT = re.compile(rf"(?<!['\w])(?:{_UNMISTAKABLE})(?![\w'])|^(?:{_NAMES})(?= is | has )")
_LISTED = re.compile(rf"(?<= has no option )(?:{_NAMES})(?=; )|(?<=; it has )(?:{_NAMES})(?:, (?:{_NAMES}))*$")


def add_edited(parser: argparse.ArgumentParser) -> None:
    """Let a plan in that was edited."""
    parser.add_argument(
        "--edited",
        action="store_true",
        help="take a plan also if it was edited: compute its figures anew, and drop what was claimed of it (optimality, bounds, "
        "baselines, trust)",
    )


@contextlib.contextmanager
def by_option() -> Iterator[None]:
    """Within it the message of a user error says ``--stages`` for ``num_stages``, ``--warm-up`` for ``warm_up``, and so on."""
    try:
        yield
    except UserError as error:
        raise UserError(_by_option(str(error))) from None


def _by_option(message: str) -> str:
    listed = _LISTED.sub(lambda names: ", ".join(_OPTIONS[name] for name in names[0].split(", ")), message)
    return _ARGUMENT.sub(lambda name: _OPTIONS[name[0]], listed)
