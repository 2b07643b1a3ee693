"""The rows of an arc of the cut graph: the ways to run one stage of given units that can be of use.

:func:`load_rows` searches them (:mod:`.stage_search`).  Most rows belong to stages that are on no long path: any of them is good
enough.  So an arc with many rows begins with a few *coarse* ones (:func:`coarse`).  A coarse row stands for several rows of the
same layouts at the sides: its seconds and bytes are the least of theirs.  A selection that is below a threshold only because of
coarse rows is searched again with more of them (:meth:`Arc.finer`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autoddl.search.dominance import TooManyError

from .block_counts import numbers_of_blocks
from .space import SOME_BLOCKS
from .stage_search import RowFilter, StageFront, concatenated_fronts

if TYPE_CHECKING:
    from .cut_graph import CutGraph

__all__ = ["Arc", "coarse", "load_rows"]

#: Largest number of rows that are not made coarse.
_MAX_FINE = 60
#: Factor by which the number of coarse rows grows.
_GROWTH = 4
_NONE = np.zeros(0)
#: The rows of a stage that cannot be run.
_NO_ROWS = StageFront(np.zeros((0, 4)), _NONE, _NONE, np.zeros((0, 0)), _NONE, _NONE, ())


@dataclass(frozen=True, eq=False)
class Arc:
    """The rows of an arc: ways to run one stage of given units.

    Attributes:
        rows: The rows.
        entry, exit: Per row the numbers of the layouts in which the stage takes and leaves its tensors (numbers of
            :meth:`.cut_graph.CutGraph.side_layouts`); -1 where the layout does not matter.
    """

    rows: StageFront
    entry: np.ndarray
    exit: np.ndarray

    def finer(self) -> Arc | None:
        """The arc with more of its rows; None if it has all of them."""
        return None


@dataclass(frozen=True, eq=False)
class CoarseArc(Arc):
    """An arc with coarse rows.

    Attributes:
        all_rows: The arc with the rows themselves.
        weights: Weights of the seconds forward, backward, of recomputation and of all-reduce, and of a byte.
        num_parts: Number of coarse rows, unless more are needed to have one for each pair of layouts.
    """

    all_rows: Arc
    weights: np.ndarray
    num_parts: int

    def finer(self) -> Arc:
        return coarse(self.all_rows, self.weights, _GROWTH * self.num_parts)


def coarse(arc: Arc, weights: np.ndarray, num_parts: int = 1) -> Arc:
    """Return an arc with few rows; the arc itself if it has few rows.

    At first the rows of each pair of layouts are one part.  The part whose rows differ the most, in the weighted sum of their
    seconds and bytes, is divided into two, until there are as many parts as wanted.  A part is executed as its row of the least
    weighted sum.

    Args:
        arc: The arc with the rows themselves.
        weights: Weights of the seconds forward, backward, of recomputation and of all-reduce, and of a byte.
        num_parts: Number of rows, unless more are needed to have one for each pair of layouts.
    """
    rows = arc.rows
    if len(rows) <= max(_MAX_FINE, num_parts):
        return arc
    values = np.column_stack([rows.times, rows.memory]) * weights
    sides = np.unique(np.column_stack([arc.entry, arc.exit]), axis=0, return_inverse=True)[1].ravel()
    parts: list[tuple[float, int, np.ndarray]] = []

    def put(part: np.ndarray) -> None:
        heapq.heappush(parts, (-float(np.ptp(values[part], axis=0).sum()), int(part[0]), part))

    for side in range(int(sides.max()) + 1):
        put(np.flatnonzero(sides == side))
    while len(parts) < num_parts and parts[0][0] < 0:
        _, _, part = heapq.heappop(parts)
        own = values[part]
        widest = own[:, int(np.ptp(own, axis=0).argmax())]
        is_less = widest < (widest.min() + widest.max()) / 2
        put(part[is_less])
        put(part[~is_less])
    costs = values.sum(axis=1)
    chosen = np.array([part[int(costs[part].argmin())] for _, _, part in parts])
    # Rows keep their order, in which their origins are known.
    order = np.argsort(chosen)
    members = [parts[number][2] for number in order.tolist()]

    def least(figures: np.ndarray) -> np.ndarray:
        return np.stack([figures[part].min(axis=0) for part in members])

    of_parts = replace(
        rows.only(chosen[order]),
        times=least(rows.times),
        memory=least(rows.memory),
        buffer=least(rows.buffer),
        shared=least(rows.shared),
    )
    return CoarseArc(of_parts, arc.entry[chosen[order]], arc.exit[chosen[order]], arc, weights, len(parts))


def load_rows(
    cut_graph: CutGraph, stage: int, first: int, stop: int, wanted: Sequence[RowFilter], has_sides: bool
) -> Arc:
    """Search the rows of an arc within the memory limit.

    If they are too many, their memory counts as the least of the stage.

    Args:
        cut_graph: The cut graph.
        stage, first, stop: The arc.
        wanted: Thresholds that the rows must be within.
        has_sides: Whether rows of different entry and exit layouts are distinguished.  If not, the arc has fewer rows, and its
            transfers count as the least.

    Raises:
        TooManyError: The stage has too many rows.
    """
    try:
        parts = _rows_by_way(cut_graph, stage, first, stop, wanted, has_sides, has_memory=True)
    except TooManyError:
        parts = _rows_by_way(cut_graph, stage, first, stop, wanted, has_sides, has_memory=False)
    rows = concatenated_fronts(parts) if parts else _NO_ROWS
    any_layout = np.full(len(rows), -1)
    entry = exit_ = any_layout
    if parts and has_sides:
        entry, exit_ = cut_graph.side_layouts(rows)
        if stage == cut_graph.num_stages - 1:
            exit_ = any_layout  # no stage follows
    return Arc(rows, entry, exit_)


def _rows_by_way(
    cut_graph: CutGraph,
    stage: int,
    first: int,
    stop: int,
    wanted: Sequence[RowFilter],
    has_sides: bool,
    has_memory: bool,
) -> list[StageFront]:
    """Return the rows of an arc for each way of recomputation; arguments as of :func:`load_rows` and
    :meth:`.stage_search.StageSearch.rows`."""
    search, passes, demand = cut_graph.stage_searches[stage], cut_graph.passes[stage], cut_graph.stage_demands[stage]
    limit, is_shared = cut_graph.limit_bytes, not cut_graph.has_one_stage_per_worker
    ways = [way for way in cut_graph.recomputations_of(stage) if way != SOME_BLOCKS]
    if len(ways) < len(cut_graph.recomputations_of(stage)):
        ways += numbers_of_blocks(search, first, stop, passes, demand, wanted, limit)
    found = (
        search.rows(first, stop, way, passes, demand, wanted, limit, is_shared, has_sides, has_memory) for way in ways
    )
    return [rows for rows in found if rows is not None and len(rows)]
