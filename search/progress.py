"""Progress of a search: the type of the callback, and a tqdm bar."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .result import relative_gap

__all__ = ["Progress", "progress_bar", "progress_text", "silent"]

#: Called from time to time with the cost of the incumbent [s], a valid lower bound [s] and the number of evaluations.  The cost is
#: infinite without an incumbent; the bound is zero, negative or -inf if nothing is known.
Progress = Callable[[float, float, int], None]


def silent(cost: float, lower_bound: float, evaluations: int) -> None:
    """The default callback, which does nothing."""


def progress_text(cost: float, lower_bound: float) -> str:
    """The state of a search as text, without values that are not known.

    >>> progress_text(2.0, 1.5)
    'incumbent 2 s, bound 1.5 s, gap 25.00%'
    >>> progress_text(float("inf"), 1.5)
    'no plan yet, bound 1.5 s'
    >>> progress_text(2.0, 0.0)
    'incumbent 2 s'
    """
    said = [f"incumbent {cost:.6g} s" if math.isfinite(cost) else "no plan yet"]
    if lower_bound >= cost and math.isfinite(cost):
        lower_bound = cost  # no open node is better
    if math.isfinite(lower_bound) and (lower_bound > 0 or lower_bound == cost):
        said.append(f"bound {lower_bound:.6g} s")
        if math.isfinite(cost):
            said.append(f"gap {relative_gap(cost, lower_bound):.2%}")
    return ", ".join(said)


@contextmanager
def progress_bar(description: str, *, disable: bool | None = None) -> Iterator[Progress]:
    """A bar on stderr that shows evaluations, incumbent, bound and gap.

    Args:
        description: the text before the bar.
        disable: whether to show no bar; None for no bar unless stderr is a terminal.
    """
    if disable or (disable is None and not sys.stderr.isatty()):
        yield silent
        return
    from tqdm import tqdm  # imported lazily: only a bar needs it

    with tqdm(desc=description, unit=" evaluations", unit_scale=True, disable=disable, leave=False) as bar:

        def show(cost: float, lower_bound: float, evaluations: int) -> None:
            bar.set_postfix_str(progress_text(cost, lower_bound), refresh=False)
            # Each part of a search counts from 0; the bar shows the maximum.
            bar.update(max(0, evaluations - bar.n))

        yield show
