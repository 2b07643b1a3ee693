"""The times of cuts by their units, with free redistributions, and a local search for a cut of a short step.

Here *vectors* say how each unit is run at each stage: the seconds of its forward pass, backward pass, recomputation and all-reduce,
its bytes, and the bytes that it exchanges with another stage; shape (stages, units, 6)
(:meth:`.cut_graph.CutGraph.cheapest_units`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pumping import PumpedGraph
from ..stepgraph import StepGraph
from .cut_graph import CutGraph
from .cut_regions import Cut, cut_at
from .explorer import RELATIVE_TOLERANCE

__all__ = ["MAX_NODES", "locally_improved", "times_of_counts", "times_of_cuts", "times_of_even_cut"]

#: Number of nodes of schedule graphs that may be evaluated at once to compare cuts, or rows.
MAX_NODES = 2_000_000
#: Largest number of units that the local search moves, and of nodes of schedule graphs that it evaluates, if it moves several.
_MAX_MOVES, _MAX_NODES_OF_MOVES = 12, 4 * MAX_NODES


def times_of_cuts(cut_graph: CutGraph, cuts: Sequence[Cut], vectors: np.ndarray) -> np.ndarray:
    """Return the least seconds of every term at each cut.

    Args:
        cut_graph: The cut graph of the setting.
        cuts: The cuts.
        vectors: How each unit is run.

    Returns:
        Shape (terms, cuts), terms in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
    """
    terms = cut_graph.terms
    sums = np.concatenate([np.zeros((cut_graph.num_stages, 1, 6)), np.cumsum(vectors, axis=1)], axis=1)
    ends, stages = np.array(cuts), np.arange(cut_graph.num_stages)
    of_stages = sums[stages, ends[:, :, 1]] - sums[stages, ends[:, :, 0]]
    times = np.zeros((terms.count, len(cuts)))
    for number, part in enumerate(terms.of_stages):
        times[part] = of_stages[:, :, number].T
    times[terms.all_reduce][[0, -1]] += cut_graph.exchange[1] * of_stages[:, [0, -1], 5].max(axis=1)
    for boundary in stages[1:] - 1:
        transfer = cut_graph.least_transfers_at(boundary)[ends[:, boundary, 1]]
        times[terms.transfer_forward.start + boundary] = transfer
        times[terms.transfer_backward.start + boundary] = transfer
    return times


def times_of_counts(cut_graph: CutGraph, counts: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the least seconds of every term for numbers of units, which may be fractional.

    Args:
        cut_graph: The cut graph of the setting.
        counts: Number of units of each run at each stage, shape (stages, runs).
        vectors: How each unit is run.

    Returns:
        Shape (terms,), terms in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
    """
    runs = cut_graph.runs
    of_stages = np.einsum("sr,src->sc", counts, vectors[:, runs.first])
    transfers = runs.base + (runs.slopes * np.cumsum(counts, axis=0)[:-1]).sum(axis=1)
    return _times(cut_graph, of_stages, transfers) + cut_graph.fixed_times


def times_of_even_cut(cut_graph: CutGraph, vectors: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the times of all terms at the even fractional cut, and whether this cut fits the memory limit.

    At the even cut every stage has units, also parts of units, in proportion to the devices of its worker.

    Args:
        cut_graph: The cut graph of the setting.
        vectors: How each unit is run.
    """
    widths = cut_graph.setting.widths
    ends = np.concatenate([[0.0], np.cumsum(widths)]) / sum(widths) * cut_graph.num_units
    units = np.arange(cut_graph.num_units)
    overlap = np.minimum(ends[1:, None], units + 1) - np.maximum(ends[:-1, None], units)
    of_stages = np.einsum("su,suc->sc", np.maximum(overlap, 0.0), vectors)
    boundaries = np.clip(np.round(ends[1:-1]).astype(int), 1, cut_graph.num_units - 1)
    crossing = [cut_graph.least_transfer(boundary, unit) for boundary, unit in enumerate(boundaries.tolist())]
    most = max(sum(float(of_stages[stage, 4]) for _, stage in held) for held in cut_graph.demand.homes)
    return _times(cut_graph, of_stages, crossing), most <= cut_graph.limit_bytes


def _times(cut_graph: CutGraph, of_stages: np.ndarray, transfers: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the seconds of every term but fixed ones, from the vectors of the stages, shape (stages, 6), and the transfers over
    the boundaries in one direction."""
    terms = cut_graph.terms
    times = np.zeros(terms.count)
    for number, part in enumerate(terms.of_stages):
        times[part] = of_stages[:, number]
    times[terms.all_reduce][[0, -1]] += cut_graph.exchange[1] * of_stages[[0, -1], 5].max()
    times[terms.transfer_forward] = times[terms.transfer_backward] = transfers
    return times


def locally_improved(cut_graph: CutGraph, graph: StepGraph | PumpedGraph, cut: Cut, vectors: np.ndarray) -> Cut:
    """Improve a cut by local search: move one unit at a time from a stage to another one, as long as the step gets shorter.

    Args:
        cut_graph: The cut graph of the setting.
        graph: The graph of its schedule.
        cut: The cut to begin with.
        vectors: How each unit is run.
    """
    best_s = float(graph.steps(times_of_cuts(cut_graph, [cut], vectors))[0])
    sizes, units = np.array([stop - first for first, stop in cut]), np.eye(len(cut), dtype=int)
    spent = 0
    for _ in range(_MAX_MOVES):
        cut_graph.explorer.stop.check()
        pairs = _pairs(sizes, graph.num_nodes)
        if spent and spent + len(pairs) * graph.num_nodes > _MAX_NODES_OF_MOVES:
            break
        spent += len(pairs) * graph.num_nodes
        moved = [sizes - units[giver] + units[taker] for giver, taker in pairs if sizes[giver] > 1]
        if not moved:
            break
        stops = np.cumsum(moved, axis=1)
        cuts = np.stack([stops - moved, stops], axis=2)
        steps = graph.steps(times_of_cuts(cut_graph, cuts.tolist(), vectors))
        least = int(steps.argmin())
        if steps[least] >= best_s * (1 - RELATIVE_TOLERANCE):
            break
        best_s, sizes = float(steps[least]), np.array(moved[least])
    return cut_at(np.cumsum(sizes).tolist()[:-1], cut_graph.num_units)


def _pairs(sizes: np.ndarray, num_nodes: int) -> list[tuple[int, int]]:
    """The pairs of stages between which a unit may move in a local search: all; or if there are many, those of neighbours, or those
    of stages beside a step, which has another number of units on its other side.

    Args:
        sizes: Number of units of each stage.
        num_nodes: Number of nodes of the schedule's graph.
    """
    stages = range(len(sizes))
    pairs = [(giver, taker) for giver in stages for taker in stages if giver != taker]
    if len(pairs) * num_nodes <= MAX_NODES:
        return pairs
    is_step = np.concatenate([[True], np.diff(sizes) != 0, [True]])
    is_beside = is_step[:-1] | is_step[1:]
    of_neighbours = [(giver, taker) for giver, taker in pairs if abs(giver - taker) == 1]
    of_steps = [(giver, taker) for giver, taker in pairs if is_beside[giver] and is_beside[taker]]
    return min(of_neighbours, of_steps, key=len)
