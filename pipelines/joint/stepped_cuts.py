"""Cuts with steps: where the units do not divide evenly over the stages, whole blocks of consecutive stages have one unit more.

With 96 units on 64 stages, the even cut rounded to whole units alternates between 1 and 2.  Workers that run neighbouring stages at
the same time then wait for each other again and again.  They wait less if neighbours are equal: if, for instance, the stages of the
second and the fourth quarter have 2 units.  No local search finds this from the rounded cut, because it takes many moves together.

*Stepped cuts* divide the stages into 2, 4 or 8 equal blocks.  All stages of a block have the same number of units, q or q + 1, but
for at most one block in which only the first or the last stages have q + 1, whichever are next to a block that has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np

from ..pumping import PumpedGraph
from ..stepgraph import StepGraph
from .cut_graph import CutGraph
from .cut_regions import Cut, cut_at
from .cut_times import MAX_NODES, times_of_cuts

__all__ = ["best_stepped_cut", "stepped_sizes"]

#: Numbers of blocks.
_NUM_BLOCKS = (2, 4, 8)


def stepped_sizes(num_stages: int, num_units: int, max_count: int) -> list[tuple[int, ...]]:
    """Return the sizes of the stages of stepped cuts: all of 2 blocks, of 4 and of 8, up to the largest number with which there are
    at most ``max_count``; none if the units divide evenly.

    >>> stepped_sizes(4, 6, 10)
    [(2, 2, 1, 1), (1, 1, 2, 2), (2, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 2, 1, 2)]
    >>> stepped_sizes(6, 8, 10)  # of the 2 blocks, one has 2 units at two of its stages
    [(2, 2, 1, 1, 1, 1), (1, 1, 1, 1, 2, 2)]
    """
    few, rest = divmod(num_units, num_stages)
    found = dict[tuple[int, ...], None]()
    for num_blocks in _NUM_BLOCKS if rest else ():
        if num_stages % num_blocks:
            continue
        num_full, num_left = divmod(rest, num_stages // num_blocks)
        count = math.comb(num_blocks, num_full) * (num_blocks - num_full if num_left else 1)
        if len(found) + count > max_count:
            break
        for full in combinations(range(num_blocks), num_full):
            for partial in [b for b in range(num_blocks) if b not in full] if num_left else [-1]:
                found[tuple(_sizes(num_stages // num_blocks, num_blocks, few, full, partial, num_left))] = None
    return list(found)


def _sizes(
    num_stages: int, num_blocks: int, few: int, full: tuple[int, ...], partial: int, num_left: int
) -> Iterator[int]:
    """Iterate over the numbers of units of all stages.

    Args:
        num_stages: Stages of a block.
        num_blocks: Blocks.
        few: Units of most stages.
        full: Blocks whose stages all have one more.
        partial: The block in which some stages have one more; -1 for none.
        num_left: Number of these stages.
    """
    for block in range(num_blocks):
        if block in full:
            yield from [few + 1] * num_stages
        elif block != partial:
            yield from [few] * num_stages
        else:
            more, others = [few + 1] * num_left, [few] * (num_stages - num_left)
            at_start = block - 1 in full or (block + 1 not in full and block == 0)
            yield from more + others if at_start else others + more


def best_stepped_cut(cut_graph: CutGraph, graph: StepGraph | PumpedGraph, vectors: np.ndarray) -> Cut | None:
    """Return the stepped cut of the shortest step, with free redistributions; None if there is none, or if workers differ.

    Args:
        cut_graph: The cut graph of the setting.
        graph: The graph of its schedule.
        vectors: How each unit is run (:mod:`.cut_times`).
    """
    if len(set(cut_graph.setting.widths)) > 1:
        return None
    sizes = stepped_sizes(cut_graph.num_stages, cut_graph.num_units, MAX_NODES // graph.num_nodes)
    if not sizes:
        return None
    cuts = [cut_at(ends, cut_graph.num_units) for ends in np.cumsum(sizes, axis=1)[:, :-1].tolist()]
    steps = graph.steps(times_of_cuts(cut_graph, cuts, vectors))
    return cuts[int(steps.argmin())]
