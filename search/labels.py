"""The optimum under a limit on resident memory, exactly: labels along the elimination DAG.

Let ``L = L(lambda*)`` be the maximum of the Lagrangian dual for the limit M.  For every choice x within the limit,

    cost(x) >= cost(x) + lambda* (memory(x) - M) = L + e(x),     e(x) >= 0 the *excess* of x,

so a choice of cost at most ``L + slack`` has an excess of at most ``slack``: only near-minimisers of the dual count, which are
few.  `best_within` finds the cheapest of them; where there is none, ``L + slack`` is a new lower bound, and the search goes on
with a larger slack until one is found or the slack reaches the incumbent.

A *label* is a partial choice inside one node of the elimination DAG: (cost, memory) for one assignment of the node's scope.
Labels of the inputs are joined for every local assignment; three rules keep them few:

* excess: inside + outside at lambda* (see `elimination`) is a lower bound on the excess of every completion. A local
  assignment that exceeds the slack is never joined; of an input's labels, sorted by excess, only those that fit are read.
* memory, and cost: the same with the weights (0, 1) against M and (1, 0) against ``L + slack``.
* dominance: of two labels for one assignment, the one that costs no less and needs no less memory goes. Costs within
  ``tolerance`` (a relative 1e-10 of L over all joins together) count as equal, so that sums in different order collapse.

Everything is done with arrays: a node's labels are sorted by (assignment, excess) and found by position (CSR).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .elimination import Leaf, Node, Plan, Weights

__all__ = ["LabelLimitError", "LabelSearch", "LabelStatistics"]


class LabelLimitError(Exception):
    """More labels than fit in memory."""


#: The most labels that one join may keep (about 50 bytes each), and how many rows it looks at in one go.
MAX_LABELS = 2_000_000
_CHUNK = 1 << 18
#: The total tolerance of dominance, relative to the dual bound.
TOTAL_TOLERANCE = 1e-10


@dataclass
class LabelStatistics:
    """Counts over all joins of one search."""

    labels: int = 0
    rows: int = 0
    rounds: int = 0


@dataclass(frozen=True, eq=False)
class _Guide:
    """One lower bound: the score of ``weights`` must be at most ``threshold``; inside and outside tables of every factor."""

    weights: Weights
    threshold: float
    inside: Sequence[np.ndarray]
    outside: Sequence[np.ndarray]

    def score(self, cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
        return self.weights.cost * cost + self.weights.memory * memory


@dataclass(frozen=True, eq=False)
class _Labels:
    """Labels of one factor, sorted by (assignment, excess); assignment a owns ``first[a]:first[a + 1]``."""

    first: np.ndarray
    cost: np.ndarray
    memory: np.ndarray
    excess: np.ndarray
    row: np.ndarray  #: of a node: the row of its last stage; of a domain: the domain's label
    stages: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()  #: (input, row of the stage before, label of the input)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Partial labels while inputs are joined: local assignment (position in the list of those alive), cost, memory."""

    at: np.ndarray
    cost: np.ndarray
    memory: np.ndarray


class LabelSearch:
    """Searches one dual-optimal relaxation with growing slack.

    Args: an exact plan, the multiplier lambda*, the dual bound ``L(lambda*)``, the limit on resident memory [bytes], and the
    largest buffer of an option that may be used [bytes].
    """

    def __init__(self, plan: Plan, multiplier: float, bound: float, limit: float, max_buffer: float) -> None:
        assert plan.exact
        self.plan, self.bound, self.limit = plan, bound, limit
        self.max_buffer = max_buffer
        self.statistics = LabelStatistics()
        self.scale = abs(bound) + abs(multiplier) * abs(limit)
        self.tolerance = TOTAL_TOLERANCE * abs(bound) / len(plan.occurrences)
        self._tables = []
        for weights in (
            Weights(1.0, multiplier, max_buffer),
            Weights(0.0, 1.0, max_buffer),
            Weights(1.0, 0.0, max_buffer),
        ):
            inside = plan.upward(weights)
            self._tables.append((weights, inside, plan.downward(inside)))

    def best_within(self, slack: float) -> list[int] | None:
        """The labels (one per variable) of the cheapest choice within the limit, if its excess is at most ``slack``.

        Its cost is the optimum if it is at most ``bound + slack``.  Raises: LabelLimitError
        """
        (by_excess, *excess_tables), (by_memory, *memory_tables), (by_cost, *cost_tables) = self._tables
        rounding = 1e-12 * self.scale
        lagrangian = self.bound + by_excess.memory * self.limit + slack + rounding
        guides = [
            _Guide(by_excess, lagrangian, *excess_tables),
            _Guide(by_memory, self.limit, *memory_tables),
            _Guide(by_cost, self.bound + slack + rounding, *cost_tables),
        ]
        self.statistics.rounds += 1
        labels: list[_Labels | None] = []
        for number, factor in enumerate(self.plan.factors):
            if isinstance(factor, Node):
                labels.append(self._join(number, factor, labels, guides))
            elif factor.domain is not None:
                labels.append(_domain_labels(factor, number, guides[0]))
            else:
                labels.append(None)
        root = labels[-1]
        assert root is not None
        if not len(root.cost):
            return None
        return self._trace(labels, int(root.cost.argmin()))

    def _join(self, number: int, node: Node, labels: Sequence[_Labels | None], guides: Sequence[_Guide]) -> _Labels:
        """All labels of a node that some completion within the thresholds may use."""
        wholes = [(self.plan.join(node, guide.inside) + guide.outside[number]).ravel() for guide in guides]
        assignments = np.flatnonzero(
            np.logical_and.reduce([whole <= guide.threshold for whole, guide in zip(wholes, guides)])
        )
        coordinates = np.unravel_index(assignments, node.local) if node.local else ()
        size = math.prod(node.shape)
        fixed = np.zeros(len(assignments))
        # What is still to be joined costs at least `rest`, at each assignment, by each guide.
        rest = [whole[assignments] for whole in wholes]
        joins = []
        for position, (child, axes) in enumerate(node.inputs):
            index = tuple(coordinates[axis] for axis in axes)
            held = labels[child]
            if held is not None:
                joins.append((len(held.cost), position, child, held, index))
                continue
            leaf = self.plan.factors[child]
            assert isinstance(leaf, Leaf) and leaf.array is not None
            fixed += leaf.array[index]
            for k, guide in enumerate(guides):
                rest[k] = rest[k] - guide.inside[child][index]
        rows = _Rows(np.arange(len(assignments)), fixed, np.zeros(len(assignments)))
        stages = []
        joins.sort(key=lambda join: join[:2])
        for step, (_, position, child, held, index) in enumerate(joins):
            shape = self.plan.factors[child].shape
            code = np.ravel_multi_index(index, shape) if shape else np.zeros(len(assignments), dtype=np.intp)
            for k, guide in enumerate(guides):
                rest[k] = rest[k] - guide.inside[child][index]
            caps = [guide.threshold - values for guide, values in zip(guides, rest)]
            last = step == len(joins) - 1
            group = assignments % size if last else np.arange(len(assignments))
            least = guides[0].inside[child][index]
            rows, before, taken = self._extend(rows, held, code, least, caps, guides[0], group)
            stages.append((position, before, taken))
        return self._finish(number, node, guides[0], assignments[rows.at] % size, rows, tuple(stages))

    def _extend(
        self,
        rows: _Rows,
        held: _Labels,
        code: np.ndarray,
        least: np.ndarray,
        caps: Sequence[np.ndarray],
        guide: _Guide,
        group: np.ndarray,
    ) -> tuple[_Rows, np.ndarray, np.ndarray]:
        """Join each row with the labels of one input; returns the rows left, and which row and label each came from.

        ``code``, ``least`` (the input's least score), ``caps`` (the most that score, memory and cost may come to) and
        ``group`` (within which dominance holds) are given per local assignment.
        """
        room = (caps[0] - least)[rows.at] - guide.score(rows.cost, rows.memory)
        start, count = _matches(held, code[rows.at], room)
        total = int(count.sum())
        self.statistics.rows += total
        ends = np.cumsum(count)
        sieve = _Sieve(group, total)
        parts = []
        low = kept = 0
        while low < len(count):
            base = int(ends[low - 1]) if low else 0
            high = max(low + 1, int(np.searchsorted(ends, base + _CHUNK, side="right")))
            before = np.repeat(np.arange(low, high), count[low:high])
            taken = np.arange(base, int(ends[high - 1])) + np.repeat(
                start[low:high] - (ends - count)[low:high], count[low:high]
            )
            at = rows.at[before]
            cost = rows.cost[before] + held.cost[taken]
            memory = rows.memory[before] + held.memory[taken]
            keep = np.flatnonzero((memory <= caps[1][at]) & (cost <= caps[2][at]))
            keep = keep[sieve.keep(at[keep], cost[keep], memory[keep])]
            parts.append((at[keep], cost[keep], memory[keep], before[keep], taken[keep]))
            kept += len(keep)
            if kept > MAX_LABELS:
                raise LabelLimitError
            low = high
        if not parts:
            nothing = np.zeros(0, dtype=np.intp)
            return _Rows(nothing, np.zeros(0), np.zeros(0)), nothing, nothing
        at, cost, memory, before, taken = (np.concatenate(column) for column in zip(*parts))
        keep = _undominated(group[at], cost, memory, self.tolerance)
        return _Rows(at[keep], cost[keep], memory[keep]), before[keep], taken[keep]

    def _finish(
        self,
        number: int,
        node: Node,
        guide: _Guide,
        code: np.ndarray,
        rows: _Rows,
        stages: tuple[tuple[int, np.ndarray, np.ndarray], ...],
    ) -> _Labels:
        """Sort a node's labels by (assignment of its scope, excess)."""
        excess = guide.score(rows.cost, rows.memory) - guide.inside[number].ravel()[code]
        order = np.lexsort((excess, code))
        first = np.searchsorted(code[order], np.arange(math.prod(node.shape) + 1))
        self.statistics.labels += len(order)
        return _Labels(first, rows.cost[order], rows.memory[order], excess[order], order, stages)

    def _trace(self, labels: Sequence[_Labels | None], best: int) -> list[int]:
        """Follow the stages of every place of the elimination tree down from the root's label."""
        plan = self.plan
        chosen = [0] * plan.num_variables
        at = [0] * len(plan.occurrences)
        at[-1] = best
        for place in range(len(plan.occurrences) - 1, -1, -1):
            occurrence = plan.occurrences[place]
            node, held = plan.factors[occurrence.factor], labels[occurrence.factor]
            assert isinstance(node, Node) and held is not None
            row = held.row[at[place]]
            for position, before, taken in reversed(held.stages):
                child, label = node.inputs[position][0], int(taken[row])
                row = before[row]
                if occurrence.producers[position] >= 0:
                    at[occurrence.producers[position]] = label
                else:
                    child_labels = labels[child]
                    assert child_labels is not None
                    chosen[occurrence.variable] = int(child_labels.row[label])
        return chosen


def _domain_labels(leaf: Leaf, number: int, guide: _Guide) -> _Labels:
    domain = leaf.domain
    assert domain is not None
    label_class = np.repeat(np.arange(domain.num_classes), np.diff(domain.first))
    keep = np.flatnonzero(domain.buffer <= guide.weights.max_buffer)
    excess = guide.weights.score(domain)[keep] - guide.inside[number][label_class[keep]]
    order = np.lexsort((excess, label_class[keep]))
    keep = keep[order]
    first = np.searchsorted(label_class[keep], np.arange(domain.num_classes + 1))
    return _Labels(first, domain.cost[keep], domain.memory[keep], excess[order], keep)


def _matches(labels: _Labels, code: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row, the first label at its assignment ``code``, and how many have an excess of at most its ``room``.

    Found by one search: labels are sorted by assignment + excess / span, which lies in [assignment, assignment + 1).
    """
    if not len(labels.cost):
        return np.zeros(len(code), dtype=np.intp), np.zeros(len(code), dtype=np.intp)
    span = 2 * max(float(labels.excess.max()), 0.0) + np.finfo(float).tiny
    owner = np.repeat(np.arange(len(labels.first) - 1), np.diff(labels.first))
    keys = owner + np.clip(labels.excess / span, 0.0, 0.75)
    # 1e-9 of the span more than the room, for rounding: a label too many does no harm.
    last = np.searchsorted(keys, code + np.clip(room / span + 1e-9, 0.0, 0.9), side="right")
    start = labels.first[code]
    return start, np.maximum(last - start, 0)


class _Sieve:
    """Drops most dominated rows without sorting, while they come in chunks.

    Per group the range of memory is cut into cells; a row is dropped if a cell below its own holds a row that costs no more.
    """

    _CELLS = 256

    def __init__(self, group: np.ndarray, rows: int) -> None:
        self.active = rows > 4096
        if not self.active:
            return
        number, self.number = np.unique(group, return_inverse=True)
        self.cheapest = np.full((len(number), self._CELLS + 1), np.inf)
        self.low = math.inf

    def keep(self, at: np.ndarray, cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
        """Indices of the rows to keep."""
        if not self.active or not len(at):
            return np.arange(len(at))
        if self.low == math.inf:  # the first chunk sets the scale; rows outside it go to the outermost cells
            self.low = float(memory.min())
            self.per_byte = (self._CELLS - 1) / (float(memory.max()) - self.low + 1.0)
        # Cell 0 stays empty. The lowest cell's rows may lie anywhere below, the highest's anywhere above: both are in order.
        cell = np.clip((memory - self.low) * self.per_byte, 0, self._CELLS - 1).astype(np.intp)
        group = self.number[at]
        np.minimum.at(self.cheapest.reshape(-1), group * (self._CELLS + 1) + cell + 1, cost)
        best_below = np.minimum.accumulate(self.cheapest, axis=1)
        return np.flatnonzero(cost < best_below[group, cell])


def _undominated(group: np.ndarray, cost: np.ndarray, memory: np.ndarray, tolerance: float) -> np.ndarray:
    """Indices of the rows that no other of their group beats in memory and (within the tolerance) in cost."""
    if len(cost) < 2:
        return np.arange(len(cost))
    order = np.lexsort((cost, memory, group))
    group, cost = group[order], cost[order]
    if tolerance > 0:
        level = np.floor((cost - cost.min()) / tolerance)
    else:
        level = np.unique(cost, return_inverse=True)[1].astype(float)
    # Within each group, keep a row where its level is below all before it. Groups come in ascending order: shifting each
    # group below the one before lets one running minimum serve all. Both factors are exact integers in float64.
    number = np.cumsum(np.r_[0, group[1:] != group[:-1]])
    span = float(level.max()) + 1.0
    if span * (float(number[-1]) + 1.0) >= 2.0**53:
        level = np.unique(level, return_inverse=True)[1].astype(float)
        span = float(level.max()) + 1.0
    shifted = level - number * span
    smallest = np.minimum.accumulate(shifted)
    keep = np.r_[True, shifted[1:] < smallest[:-1]]
    return order[keep]
