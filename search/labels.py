"""Label search: the exact optimum under a limit on resident memory, by labels on the elimination DAG.

Let ``L = L(lambda*)`` be the maximum of the Lagrangian dual for the limit M.  For every choice x within the limit,

    cost(x) >= cost(x) + lambda* (memory(x) - M) = L + e(x),     e(x) >= 0 the *excess* of x,

so a choice of cost at most ``L + slack`` has an excess of at most ``slack``.  Only near-minimisers of the dual remain, which are
few.  `best_within` finds the cheapest of them.  If there is none, ``L + slack`` is a new lower bound, and the search continues with
a larger slack until a choice is found or the slack reaches the incumbent.

A *label* is a partial choice inside one node of the elimination DAG: (cost, memory) for one assignment of the node's scope.
Labels of the inputs are joined for every local assignment.  Three rules keep their number small:

* excess: inside + outside at lambda* (see `elimination`) is a lower bound on the excess of every completion.  A local
  assignment that exceeds the slack is not joined.  An input's labels are sorted by excess, and only those that fit are read.
* memory and cost: the same with the weights (0, 1) against M, and (1, 0) against ``L + slack``.
* dominance: of two labels for one assignment, the one that costs no less and needs no less memory is removed.  Costs within
  ``tolerance`` (a relative 1e-10 of L over all joins together) count as equal, so that sums in different orders are merged.

All operations are on arrays.  A node's labels are sorted by (assignment, excess) and indexed by assignment (as in CSR).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoddl.costmodel.stopping import Deadline

from .elimination import Elimination, Leaf, Node, Weights
from .reduction import Domain

__all__ = ["LabelSearch", "LabelStatistics", "StoppedError"]


class StoppedError(Exception):
    """The deadline is over, or the search needs more labels than fit into memory."""


#: Largest number of labels that one join keeps (about 50 bytes each).
MAX_LABELS = 4_000_000
#: Number of rows that a join processes at once (they fit into the cache), and that it keeps before it removes dominated ones.
_CHUNK = 1 << 15
_UNSETTLED = 1 << 20
#: The root, which needs only the cheapest choice, joins labels up to this multiple of the slack.  So an incumbent is found with
#: a slack well below its own excess.
_ROOT_SLACK = 2.0
#: The total tolerance of dominance, relative to the dual bound.
TOTAL_TOLERANCE = 1e-10


@dataclass
class LabelStatistics:
    """Counts over all joins of one search.

    Attributes:
        labels: labels kept.
        rows: pairs of labels joined.
        rounds: values of the slack tried.
    """

    labels: int = 0
    rows: int = 0
    rounds: int = 0


@dataclass(frozen=True, eq=False)
class _Guide:
    """One lower bound: the score must be at most a threshold.

    Attributes:
        weights: of the score.
        threshold: the largest allowed score.
        inside, outside: tables of every factor.
    """

    weights: Weights
    threshold: float
    inside: Sequence[np.ndarray]
    outside: Sequence[np.ndarray]

    def score(self, cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
        return self.weights.cost * cost + self.weights.memory * memory


@dataclass(frozen=True, eq=False)
class _Labels:
    """Labels of one factor, sorted by (assignment, excess).

    Attributes:
        first: the labels of assignment a are ``first[a]:first[a + 1]``.
        cost, memory, excess: of each label [s, bytes, s].
        row: for a node, the row of its last stage; for a domain, the domain's label.
        stages: for each join (input, row of the previous stage, label of the input).
    """

    first: np.ndarray
    cost: np.ndarray
    memory: np.ndarray
    excess: np.ndarray
    row: np.ndarray
    stages: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()

    @cached_property
    def by_excess(self) -> tuple[float, np.ndarray]:
        """A span, and the key assignment + excess / span of each label: ascending, in [assignment, assignment + 1)."""
        span = 2 * max(float(self.excess.max()), 0.0) + float(np.finfo(float).tiny)
        owner = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        keys: np.ndarray = owner + np.clip(self.excess / span, 0.0, 0.75)
        return span, keys


@dataclass(frozen=True, eq=False)
class _Rows:
    """Partial labels while inputs are joined.

    Attributes:
        at: local assignment of each row, as an index into the list of those that remain.
        cost, memory: of each row [s, bytes].
    """

    at: np.ndarray
    cost: np.ndarray
    memory: np.ndarray


_NO_INDEX, _NO_NUMBER = np.zeros(0, dtype=np.intp), np.zeros(0)
_FIRST_NUMBER, _YES = np.zeros(1, dtype=np.intp), np.ones(1, dtype=bool)
_NOTHING = (_NO_INDEX, _NO_NUMBER, _NO_NUMBER, _NO_INDEX, _NO_INDEX)


class LabelSearch:
    """Searches one relaxation with growing slack.

    Args:
        plan: an exact elimination plan.
        multiplier: lambda*, the maximiser of the dual [s/byte].
        bound: the dual bound ``L(lambda*)`` [s].
        limit: limit on resident memory [bytes].
        max_buffer: largest buffer of an allowed option [bytes].
        deadline: when to end.
        only: for each domain a mask of allowed labels, to search for an incumbent among few options; None allows all.
    """

    def __init__(
        self,
        plan: Elimination,
        multiplier: float,
        bound: float,
        limit: float,
        max_buffer: float,
        deadline: Deadline,
        only: Mapping[Domain, np.ndarray] | None = None,
    ) -> None:
        assert plan.exact
        self.plan, self.bound, self.limit, self.deadline = plan, bound, limit, deadline
        self.statistics = LabelStatistics()
        self.rounding = 1e-12 * (abs(bound) + abs(multiplier) * abs(limit))
        self.tolerance = TOTAL_TOLERANCE * abs(bound) / plan.num_places
        self._tables = []
        for cost, memory in ((1.0, multiplier), (0.0, 1.0), (1.0, 0.0)):
            weights = Weights(cost, memory, max_buffer, only)
            inside = plan.upward(weights)
            self._tables.append((weights, inside, plan.downward(inside)))

    def best_within(self, slack: float, wanted: float) -> np.ndarray | None:
        """The labels (one per variable) of the cheapest choice found within the limit, or None.

        If its cost is at most ``bound + slack``, it is the optimum.  If it costs more, or there is none, every choice within the
        limit costs more than ``bound + slack``.  Such a choice may be found because the root joins labels whose excess exceeds the
        slack only in total; those that cost ``bound + wanted`` or more are ignored.

        Raises:
            StoppedError: the deadline is over, or there are too many labels.
        """
        (by_excess, *excess_tables), (by_memory, *memory_tables), (by_cost, *cost_tables) = self._tables
        dual = self.bound + by_excess.memory * self.limit
        guides = (
            _Guide(by_excess, dual + slack + self.rounding, *excess_tables),
            _Guide(by_memory, self.limit, *memory_tables),
            _Guide(by_cost, self.bound + slack + self.rounding, *cost_tables),
        )
        at_root = min(_ROOT_SLACK * slack, max(slack, wanted))
        wide = (
            _Guide(by_excess, dual + at_root + self.rounding, *excess_tables),
            guides[1],
            _Guide(by_cost, self.bound + at_root + self.rounding, *cost_tables),
        )
        self.statistics.rounds += 1
        labels: list[_Labels | None] = []
        root = len(self.plan.factors) - 1
        for number, factor in enumerate(self.plan.factors):
            if isinstance(factor, Node):
                labels.append(self._join(number, factor, labels, wide if number == root else guides, number == root))
            elif factor.domain is not None:
                labels.append(_domain_labels(factor, number, guides[0]))
            else:
                labels.append(None)
        best = labels[root]
        assert best is not None
        return self._trace(labels, int(best.cost.argmin())) if len(best.cost) else None

    def _join(
        self, number: int, node: Node, labels: Sequence[_Labels | None], guides: Sequence[_Guide], is_root: bool
    ) -> _Labels:
        """All labels of a node that may have a completion within the thresholds; for the root only the cheapest."""
        wholes = [(self.plan.join(node, guide.inside) + guide.outside[number]).ravel() for guide in guides]
        assignments = np.flatnonzero(
            np.logical_and.reduce([whole <= guide.threshold for whole, guide in zip(wholes, guides)])
        )
        coordinates = np.unravel_index(assignments, node.local) if node.local else ()
        size = math.prod(node.shape)
        fixed = np.zeros(len(assignments))
        # Least score of the inputs that are not joined yet and of the outside, for each guide and assignment.
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
            if last and is_root:
                rows, before, taken = _cheapest(rows, held, code, self.limit)
            else:
                # The first input's labels need no check of dominance.
                group = assignments % size if last else np.arange(len(assignments)) if step else None
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
        group: np.ndarray | None,
    ) -> tuple[_Rows, np.ndarray, np.ndarray]:
        """Join each row with the labels of one input.

        Args:
            rows: the rows.
            held: labels of the input.
            code: the input's assignment, for each local assignment.
            least: the input's least score, for each local assignment.
            caps: largest score, memory and cost after the join, for each local assignment.
            guide: the guide of the score.
            group: rows of equal groups are checked for dominance, for each local assignment; None for no check.

        Returns:
            The rows that remain, and the row and the label that each came from.
        """
        room = (caps[0] - least)[rows.at] - guide.score(rows.cost, rows.memory)
        start, count = _matches(held, code[rows.at], room)
        total = int(count.sum())
        self.statistics.rows += total
        ends = np.cumsum(count)
        sieve = _Sieve(group, total, _extremes(rows.memory) + _extremes(held.memory), self.tolerance)
        parts: list[tuple[np.ndarray, ...]] = []
        low = kept = settled = 0
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
            low = high
            if kept > _UNSETTLED + 2 * settled:
                parts = [self._settle(parts, group)]
                kept = settled = len(parts[0][0])
            if settled > MAX_LABELS or self.deadline.is_over:
                raise StoppedError
        at, cost, memory, before, taken = self._settle(parts, group) if parts else _NOTHING
        return _Rows(at, cost, memory), before, taken

    def _settle(self, parts: list[tuple[np.ndarray, ...]], group: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Concatenate the parts and remove dominated rows."""
        columns = [np.concatenate(column) for column in zip(*parts)]
        if group is None:
            return tuple(columns)
        at, cost, memory = columns[:3]
        keep = _undominated(group[at], cost, memory, self.tolerance)
        return tuple(column[keep] for column in columns)

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

    def _trace(self, labels: Sequence[_Labels | None], best: int) -> np.ndarray:
        """The label of each variable, from the root's label ``best`` down the stages of every node at all its places."""
        chosen = np.zeros(self.plan.num_variables, dtype=np.intp)
        at = {number: np.full(places.count, best) for number, places in self.plan.places.items()}
        for number, _, places in self.plan.walk():
            held = labels[number]
            assert held is not None
            row = held.row[at[number]]
            for position, before, taken in reversed(held.stages):
                behind, label = places.inputs[position], taken[row]
                row = before[row]
                if behind.places is not None:
                    at[behind.factor][behind.places] = label
                else:
                    leaf = labels[behind.factor]
                    assert leaf is not None and behind.variables is not None
                    chosen[behind.variables] = leaf.row[label]
        return chosen


def _domain_labels(leaf: Leaf, number: int, guide: _Guide) -> _Labels:
    """The undominated labels of a domain, sorted by (class, excess)."""
    domain = leaf.domain
    assert domain is not None
    label_class = np.repeat(np.arange(domain.num_classes), np.diff(domain.first))
    keep = np.flatnonzero(guide.weights.allows(domain))
    excess = guide.weights.score(domain)[keep] - guide.inside[number][label_class[keep]]
    order = np.lexsort((excess, label_class[keep]))
    order = order[
        np.sort(_undominated(label_class[keep][order], domain.cost[keep][order], domain.memory[keep][order], 0.0))
    ]
    keep = keep[order]
    first = np.searchsorted(label_class[keep], np.arange(domain.num_classes + 1))
    return _Labels(first, domain.cost[keep], domain.memory[keep], excess[order], keep)


def _matches(labels: _Labels, code: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row, the first label at its assignment ``code`` and the number of labels with an excess of at most ``room``.

    One binary search finds them, since labels are sorted by their keys (:attr:`_Labels.by_excess`).
    """
    if not len(labels.cost):
        return np.zeros(len(code), dtype=np.intp), np.zeros(len(code), dtype=np.intp)
    span, keys = labels.by_excess
    # 1e-9 of the span is added for rounding: an additional label does no harm.
    last = np.searchsorted(keys, code + np.clip(np.clip(room, 0.0, span) / span + 1e-9, 0.0, 0.9), side="right")
    start = labels.first[code]
    return start, np.maximum(last - start, 0)


def _cheapest(rows: _Rows, held: _Labels, code: np.ndarray, limit: float) -> tuple[_Rows, np.ndarray, np.ndarray]:
    """The best pair of a row and a label at its assignment within the limit on memory.

    Labels of an assignment cost less the more memory they need, so the largest that fits is the best of each row.
    """
    nothing = _Rows(*_NOTHING[:3]), *_NOTHING[3:]
    if not len(rows.at) or not len(held.cost):
        return nothing
    owner = np.repeat(np.arange(len(held.first) - 1), np.diff(held.first))
    by_memory = np.lexsort((held.memory, owner))
    span = int(held.memory.max()) + 2
    keys = owner * span + held.memory[by_memory].astype(np.int64)
    room = np.clip(limit - rows.memory, -1, span - 2).astype(np.int64)
    row_code = code[rows.at]
    last = np.searchsorted(keys, row_code * span + room, side="right") - 1
    fits = np.flatnonzero((room >= 0) & (last >= held.first[row_code]))
    if not len(fits):
        return nothing
    taken = by_memory[last[fits]]
    total = rows.cost[fits] + held.cost[taken]
    best = int(total.argmin())
    before = fits[best : best + 1]
    taken = taken[best : best + 1]
    return _Rows(rows.at[before], total[best : best + 1], rows.memory[before] + held.memory[taken]), before, taken


def _extremes(values: np.ndarray) -> np.ndarray:
    """The least and the largest value."""
    return np.array([values.min(), values.max()]) if len(values) else np.zeros(2)


class _Sieve:
    """Removes most dominated rows without sorting, chunk by chunk.

    There are two tables per group.  First, the range of memory is divided into cells; a row is removed if a lower cell has a row
    that costs no more.  Second, a hash table holds the least cost for each exact memory; a row that costs as much (within the
    tolerance) is removed.  Equal memory is frequent, since equal layers may swap their options.
    """

    _CELLS = 2**19  #: in all groups together
    _SLOT_BITS = 18
    _HASH = np.uint64(0x9E3779B97F4A7C15)  #: 2^64 / golden ratio (Fibonacci hashing)

    def __init__(self, group: np.ndarray | None, rows: int, extremes: np.ndarray, tolerance: float) -> None:
        self.active = group is not None and rows > 4096
        if group is None or not self.active:
            return
        number, self.number = np.unique(group, return_inverse=True)
        self.cells = max(16, min(4096, self._CELLS // len(number), rows // len(number)))
        self.cheapest = np.full((len(number), self.cells + 1), np.inf)
        self.low, high = map(float, extremes)
        self.span = int(high - self.low) + 1
        self.tolerance = tolerance
        bits = min(self._SLOT_BITS, rows.bit_length())
        self.shift = np.uint64(64 - bits)
        self.slot_key = np.full(2**bits, -1)
        self.slot_cost = np.full(2**bits, np.inf)
        self.slot_row = np.zeros(2**bits, dtype=np.intp)

    def keep(self, at: np.ndarray, cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
        """Indices of the rows of a new chunk to keep."""
        if not self.active or not len(at):
            return np.arange(len(at))
        group, above = self.number[at], (memory - self.low).astype(np.int64)
        # Column c + 1 belongs to cell c, and column 0 stays empty: after accumulation, column c has the minimum below cell c.
        cell = (above * ((self.cells - 1) / self.span)).astype(np.intp) + group * (self.cells + 1)
        np.minimum.at(self.cheapest.reshape(-1), cell + 1, cost)
        below = np.minimum.accumulate(self.cheapest, axis=1).reshape(-1)
        keep = np.flatnonzero(cost < below[cell])
        if len(self.cheapest) * self.span >= 2**63:
            return keep
        return keep[self._first_of_its_memory(group[keep] * self.span + above[keep], cost[keep])]

    def _first_of_its_memory(self, key: np.ndarray, cost: np.ndarray) -> np.ndarray:
        """Indices of rows cheaper than all earlier ones with the same key (group and memory), one per key.

        Rows whose slot is used by another key are kept.
        """
        slot = ((key.view(np.uint64) * self._HASH) >> self.shift).astype(np.intp)
        free = self.slot_key[slot] < 0
        self.slot_key[slot[free]] = key[free]
        foreign = self.slot_key[slot] != key
        better = np.flatnonzero((cost < self.slot_cost[slot] - self.tolerance) & ~foreign)
        slot_better, cost_better = slot[better], cost[better]
        np.minimum.at(self.slot_cost, slot_better, cost_better)
        least = cost_better == self.slot_cost[slot_better]
        better, slot_better = better[least], slot_better[least]
        self.slot_row[slot_better] = better
        better = better[self.slot_row[slot_better] == better]
        return np.concatenate([np.flatnonzero(foreign), better])


def _undominated(group: np.ndarray, cost: np.ndarray, memory: np.ndarray, tolerance: float) -> np.ndarray:
    """Indices of the rows that no other row of their group dominates in memory and (within the tolerance) in cost."""
    if len(cost) < 2:
        return np.arange(len(cost))
    memory = memory.astype(np.int64)
    span = int(memory.max()) + 1
    if (int(group.max()) + 1) * span >= 2**63:
        group = np.unique(group, return_inverse=True)[1]
    key = group * span + memory
    order = np.argsort(key)
    key, group = key[order], group[order]
    cost = cost[order]
    level = np.floor((cost - cost.min()) / tolerance) if tolerance > 0 else cost
    # Within each group, keep a row if its level is below all earlier ones.  Shifting the levels of each group below those of the
    # previous group allows one running minimum for all groups.  Both factors are exact integers in float64.
    number = np.concatenate([_FIRST_NUMBER, np.cumsum(group[1:] != group[:-1])])
    if tolerance <= 0 or (float(level.max()) + 1.0) * (float(number[-1]) + 1.0) >= 2.0**53:
        level = np.unique(level, return_inverse=True)[1].astype(float)
    shifted = level - number * (float(level.max()) + 1.0)
    smallest = np.minimum.accumulate(shifted)
    keep = np.concatenate([_FIRST_NUMBER, 1 + np.flatnonzero(shifted[1:] < smallest[:-1])])
    # Rows of equal memory are in no particular order; the last one kept is the cheapest.
    keep = keep[np.concatenate([key[keep[1:]] != key[keep[:-1]], _YES])]
    return order[keep]
