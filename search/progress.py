"""Progress of a search: a callback, and a tqdm bar that is one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .result import relative_gap

__all__ = ["Progress", "progress_bar", "progress_text", "silent"]

#: Called now and then with the incumbent's cost [s], a valid lower bound [s] and the evaluations so far.  Without a plan the cost
#: is infinite; without a bound that is not a positive number.
Progress = Callable[[float, float, int], None]


def silent(cost: float, lower_bound: float, evaluations: int) -> None:
    """The default: say nothing."""


def progress_text(cost: float, lower_bound: float) -> str:
    """What is known so far, in words, and nothing of what is not.

    >>> progress_text(2.0, 1.5)
    'incumbent 2 s, bound 1.5 s, gap 25.00%'
    >>> progress_text(float("inf"), 1.5)
    'no plan yet, bound 1.5 s'
    >>> progress_text(2.0, 0.0)
    'incumbent 2 s'
    """
    said = [f"incumbent {cost:.6g} s" if math.isfinite(cost) else "no plan yet"]
    if lower_bound >= cost and math.isfinite(cost):
        lower_bound = cost  # nothing that is open is better
    if math.isfinite(lower_bound) and (lower_bound > 0 or lower_bound == cost):
        said.append(f"bound {lower_bound:.6g} s")
        if math.isfinite(cost):
            said.append(f"gap {relative_gap(cost, lower_bound):.2%}")
    return ", ".join(said)


@contextmanager
def progress_bar(description: str, *, disable: bool | None = None) -> Iterator[Progress]:
    """A bar on stderr that shows evaluations, incumbent, bound and gap.

    ``disable=None`` keeps quiet where stderr is not a terminal, ``True`` always.
    """
    if disable or (disable is None and not sys.stderr.isatty()):
        yield silent
        return
    from tqdm import tqdm  # only here: a plan without a bar starts sooner

    with tqdm(desc=description, unit=" evaluations", unit_scale=True, disable=disable, leave=False) as bar:

        def show(cost: float, lower_bound: float, evaluations: int) -> None:
            bar.set_postfix_str(progress_text(cost, lower_bound), refresh=False)
            # A search in several parts counts each from 0: a bar does not go back.
            bar.update(max(0, evaluations - bar.n))

        yield show
