"""Progress of a search: a callback, and a tqdm bar that is one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .result import relative_gap

__all__ = ["Progress", "progress_bar", "silent"]

#: Called now and then with the incumbent's cost [s], a valid lower bound [s] and the evaluations so far.
Progress = Callable[[float, float, int], None]


def silent(cost: float, lower_bound: float, evaluations: int) -> None:
    """The default: say nothing."""


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
            gap = relative_gap(cost, lower_bound)
            bar.set_postfix_str(f"incumbent {cost:.6g} s, bound {lower_bound:.6g} s, gap {gap:.2%}", refresh=False)
            bar.update(evaluations - bar.n)

        yield show
