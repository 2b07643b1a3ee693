"""All choices of a table of vectors that no other choice beats in every component, within limits.

Every option of a variable adds a vector (seconds forward, seconds backward, bytes ...), every edge adds one for the pair of
options at its ends, and every option has a size of which only the largest counts (buffers).  A choice is *beaten* where another
one with the same *keys* (what the world outside of the table sees of it) is no more in any sum and no larger.  Whatever is
monotone in sums and size has its optimum among those that are not beaten: the *front*.

**Dynamic programming over a path decomposition.**  The variables are taken one after the other, in an order that keeps few of them
*open* (taken, with a neighbour that is not).  A partial choice is a row: the classes of its open variables and keys, its sums
and its largest size; of rows of equal classes the beaten ones go.

**Guides.**  For weights w >= 0 only choices with w . sums <= threshold are asked for.  One pass from the last variable to the first
gives, for every assignment of the open variables, the least w . sums that is still to come; so each row that is kept can be
completed within each single threshold.

Sums are of floats in different orders: of rows that differ by no more than a relative 1e-12 one stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.table import ByClass

__all__ = [
    "Front",
    "Guide",
    "TooManyError",
    "VectorEdge",
    "VectorTable",
    "front",
    "least",
    "least_choices",
    "undominated",
]

#: Entries of the largest table over open variables, and rows, that are worked with.
MOST_ENTRIES = 4_000_000
MOST_ROWS = 400_000
#: Candidates that are looked at in one go.
_CHUNK = 1 << 18
#: Relative difference of sums that counts as none.
_TOLERANCE = 1e-12


class TooManyError(Exception):
    """More entries or rows than are worked with."""


@dataclass(frozen=True, eq=False)
class VectorEdge:
    """What pairs of options add: component by component, by classes of the options at both ends; inf where a pair is forbidden."""

    source: int
    target: int
    parts: tuple[tuple[int, ByClass], ...]


@dataclass(frozen=True, eq=False)
class VectorTable:
    """Vectors of options and of pairs of options.

    Attributes:
        sums: per variable, shape (options, components).
        sizes: per variable, shape (options,): of a choice only the largest counts.
        edges: between different variables.
        keys: (variable, class of each of its options): what is seen from outside.
    """

    sums: tuple[np.ndarray, ...]
    sizes: tuple[np.ndarray, ...]
    edges: tuple[VectorEdge, ...]
    keys: tuple[tuple[int, np.ndarray], ...] = ()

    @property
    def num_components(self) -> int:
        return self.sums[0].shape[1]

    def evaluate(self, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums and sizes of choices, shape (rows, variables) -> (rows, components), (rows,)."""
        sums = np.sum([values[choices[:, v]] for v, values in enumerate(self.sums)], axis=0)
        for edge in self.edges:
            rows, columns = choices[:, edge.source], choices[:, edge.target]
            for component, costs in edge.parts:
                sums[:, component] += costs.between[costs.rows[rows], costs.columns[columns]]
        sizes = np.max([sizes[choices[:, v]] for v, sizes in enumerate(self.sizes)], axis=0)
        return sums, np.asarray(sizes)

    @cached_property
    def steps(self) -> tuple[_Step, ...]:
        """The variables in the order in which they are taken."""
        return _decomposed(self)


@dataclass(frozen=True)
class Guide:
    """Only choices with ``weights . sums <= threshold`` are wanted; ``weights`` has one number >= 0 per component."""

    weights: tuple[float, ...]
    threshold: float


@dataclass(frozen=True, eq=False)
class Front:
    """Choices, one row each.

    Attributes:
        choices: the option of each variable, shape (rows, variables).
        sums: shape (rows, components).
        sizes: shape (rows,).
    """

    choices: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def only(self, rows: np.ndarray) -> Front:
        """Some of the rows."""
        return Front(self.choices[rows], self.sums[rows], self.sizes[rows])


@dataclass(frozen=True, eq=False)
class _Options:
    """The options of a variable in the order of their classes, those left out that another one of the class stands in for."""

    number: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray
    of_class: np.ndarray
    first: np.ndarray

    @property
    def num_classes(self) -> int:
        return len(self.first)


@dataclass(frozen=True, eq=False)
class _Step:
    """One variable is taken.

    Attributes:
        variable: which.
        options: its options, in classes.
        before: the open variables until then.
        after: those that are open from then on.
        links: (position in ``before``, component, cost of every pair of classes: of the earlier variable, of this one).
        shape: the number of classes of each of ``before``.
    """

    variable: int
    options: _Options
    before: tuple[int, ...]
    after: tuple[int, ...]
    links: tuple[tuple[int, int, np.ndarray], ...]
    shape: tuple[int, ...]


def _decomposed(table: VectorTable) -> tuple[_Step, ...]:
    count = len(table.sums)
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for edge in table.edges:
        neighbours[edge.source].add(edge.target)
        neighbours[edge.target].add(edge.source)
    rows: list[list[np.ndarray]] = [[] for _ in range(count)]
    for edge in table.edges:
        for _, costs in edge.parts:
            rows[edge.source].append(costs.rows)
            rows[edge.target].append(costs.columns)
    for variable, classes in table.keys:
        rows[variable].append(classes)
    options = [_classified(sums, sizes, own) for sums, sizes, own in zip(table.sums, table.sizes, rows)]
    sizes = [one.num_classes for one in options]
    keyed = {variable for variable, _ in table.keys}
    order = _order(neighbours, sizes, keyed)
    position = {variable: place for place, variable in enumerate(order)}
    steps: list[_Step] = []
    before: tuple[int, ...] = ()
    for place, variable in enumerate(order):
        links = []
        for edge in table.edges:
            if variable not in (edge.source, edge.target):
                continue
            other = edge.target if edge.source == variable else edge.source
            if position[other] > place:
                continue
            for component, costs in edge.parts:
                mine, theirs = (one.number[one.first] for one in (options[variable], options[other]))
                if edge.source == variable:
                    between = costs.between[costs.rows[mine][:, None], costs.columns[theirs][None]].T
                else:
                    between = costs.between[costs.rows[theirs][:, None], costs.columns[mine][None]]
                links.append((before.index(other), component, np.ascontiguousarray(between)))
        held = (*before, variable)
        after = tuple(v for v in held if v in keyed or any(position[n] > place for n in neighbours[v]))
        shape = tuple(sizes[v] for v in before)
        if math.prod(shape) * sizes[variable] > MOST_ENTRIES:
            raise TooManyError
        steps.append(_Step(variable, options[variable], before, after, tuple(links), shape))
        before = after
    return tuple(steps)


def _order(neighbours: Sequence[set[int]], sizes: Sequence[int], keyed: set[int]) -> list[int]:
    """Greedy: next the variable that leaves the fewest assignments of open variables; of equal ones the first."""
    if len(sizes) > 64:  # a long chain is best taken as it comes
        return list(range(len(sizes)))
    order: list[int] = []
    taken: set[int] = set()
    frontier: set[int] = set()
    while len(order) < len(sizes):
        best: tuple[float, int, int] | None = None
        near = {n for v in taken for n in neighbours[v]} - taken
        for v in near or set(range(len(sizes))) - taken:
            done = taken | {v}
            held = {u for u in (frontier | {v}) if u in keyed or neighbours[u] - done}
            score = (math.prod(sizes[u] for u in held) * 1.0, -len(neighbours[v] & taken), v)
            if best is None or score < best:
                best = score
        assert best is not None
        v = best[2]
        taken.add(v)
        order.append(v)
        frontier = {u for u in (frontier | {v}) if u in keyed or neighbours[u] - taken}
    return order


def _classified(sums: np.ndarray, sizes: np.ndarray, rows: Sequence[np.ndarray]) -> _Options:
    if rows:
        of_class = np.unique(np.stack(rows, axis=1), axis=0, return_inverse=True)[1].ravel()
    else:
        of_class = np.zeros(len(sums), dtype=np.intp)
    kept = undominated(of_class, np.column_stack([sums, sizes]))
    kept = kept[np.argsort(of_class[kept], kind="stable")]
    first = np.flatnonzero(np.r_[True, np.diff(of_class[kept]) > 0])
    return _Options(kept, sums[kept], sizes[kept], of_class[kept], first)


def undominated(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Indices, ascending, of the rows that no other row of their group is no more than in every column (of equal ones the first).

    Args:
        group: shape (rows,), whole numbers from 0 on.
        values: shape (rows, columns), not negative.
    """
    if len(group) < 2:
        return np.arange(len(group))
    scale = values.max(axis=0)
    values = values[:, scale > 0]
    if not values.shape[1]:
        return np.sort(np.unique(group, return_index=True)[1])
    unit = values / scale[scale > 0]
    order = np.lexsort((unit.sum(axis=1), group))
    group, unit = group[order], unit[order]
    alive = np.arange(len(order))
    kept = []
    while len(alive):
        # The first of each group that is left is beaten by nothing: all before it is settled.
        leads = np.flatnonzero(np.r_[True, group[alive[1:]] != group[alive[:-1]]])
        kept.append(alive[leads])
        lead_of = np.repeat(leads, np.diff(np.r_[leads, len(alive)]))
        beaten = (unit[alive[lead_of]] <= unit[alive] + _TOLERANCE).all(axis=1)
        alive = alive[~beaten]
    return np.sort(order[np.concatenate(kept)])


# ----------------------------------------------------------------------------------------------------------- to be done yet


def _remaining(steps: Sequence[_Step], weights: np.ndarray) -> list[np.ndarray]:
    """For each step the least ``w . sums`` of all variables from it on, for each assignment of ``before``; a last 0.

    Args:
        weights: shape (weights, components); the answers have a first axis of that length, too.
    """
    sizes = {step.variable: step.options.num_classes for step in steps}
    many = len(weights)
    found: list[np.ndarray] = [np.zeros([many, *(sizes[v] for v in steps[-1].after)])]
    for step in reversed(steps):
        held = (*step.before, step.variable)
        whole = found[-1].reshape([many, *(sizes[v] if v in step.after else 1 for v in held)])
        own = np.minimum.reduceat(weights @ step.options.sums.T, step.options.first, axis=1)
        whole = whole + own.reshape([many, *(1,) * len(step.before), -1])
        for at, component, costs in step.links:
            shape = [1] * len(held)
            shape[at], shape[-1] = costs.shape
            part = weights[:, component, None, None] * np.where(np.isinf(costs), 0.0, costs)
            if np.isinf(costs).any():
                part = np.where(np.isinf(costs), np.inf, part)
            whole = whole + part.reshape([many, *shape])
        whole = np.broadcast_to(whole, [many, *(sizes[v] for v in held)])
        found.append(whole.min(axis=-1))
    return found[::-1]


def least(table: VectorTable, weights: np.ndarray) -> np.ndarray:
    """The least ``w . sums`` of any choice, for each row w; inf where there is none; shape (rows, components) -> (rows,).

    Raises:
        TooManyError
    """
    return np.asarray(_remaining(table.steps, weights)[0])


def least_choices(table: VectorTable, weights: np.ndarray) -> np.ndarray:
    """For each row w a choice whose ``w . sums`` is the least; shape (rows, components) -> (rows, variables); none where there is
    no choice at all.

    Raises:
        TooManyError
    """
    steps, many = table.steps, len(weights)
    remaining = _remaining(steps, weights)
    if not np.isfinite(remaining[0]).all():
        return np.zeros((0, len(steps)), dtype=np.intp)
    choices, rows = np.zeros((many, len(steps)), dtype=np.intp), np.arange(many)
    classes: dict[int, np.ndarray] = {}
    for step, togo in zip(steps, remaining[1:]):
        options = step.options
        of_class = np.zeros((many, options.num_classes))
        for at, component, costs in step.links:
            with np.errstate(invalid="ignore"):
                part = weights[:, component, None] * costs[classes[step.before[at]]]
            of_class += np.where(np.isnan(part), np.inf, part)
        index = [
            classes[v][:, None] if v != step.variable else np.arange(options.num_classes)[None] for v in step.after
        ]
        of_class += togo[tuple([rows[:, None], *index])]
        chosen = (weights @ options.sums.T + of_class[:, options.of_class]).argmin(axis=1)
        choices[:, step.variable], classes[step.variable] = options.number[chosen], options.of_class[chosen]
    return choices


# ----------------------------------------------------------------------------------------------------------------- the front


@dataclass(frozen=True, eq=False)
class _Rows:
    """Partial choices: the classes of the open variables (one column each), sums, the largest size so far."""

    classes: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray


def front(
    table: VectorTable,
    guides: Sequence[Guide] = (),
    limit: tuple[int, float] | None = None,
    stop: Stop | None = None,
    most_rows: int = MOST_ROWS,
    is_shared: bool = False,
) -> Front:
    """The front of a table.

    Args:
        guides: what choices are wanted.
        limit: (component, most that it may be together with the largest size); where every choice stays within it, component and
            size are no part of the comparison, else they are.
        is_shared: others want a part of the limit, too: less is always better.

    Raises:
        TooManyError: more rows would be needed than ``most_rows``.
        StopRequestedError
    """
    steps = table.steps
    num = table.num_components
    compared = list(range(num))
    all_guides = [(np.array(guide.weights, dtype=float), guide.threshold) for guide in guides]
    bounded = limit is not None
    if limit is not None:
        component, most = limit
        worst = sum(float(step.options.sums[:, component].max()) for step in steps)
        for step in steps:
            for _, part, costs in step.links:
                if part == component:
                    worst += float(costs.max(initial=0.0, where=np.isfinite(costs)))
        bounded = worst + max(float(step.options.sizes.max()) for step in steps) > most or is_shared
        if bounded:
            all_guides.append((np.eye(num)[component], most))
        else:
            compared.remove(component)
    if not all_guides:
        all_guides.append((np.zeros(num), 0.0))
    remaining = _remaining(steps, np.array([weights for weights, _ in all_guides]))
    caps = [threshold + _TOLERANCE * abs(threshold) for _, threshold in all_guides]
    if any(least_ > cap for least_, cap in zip(remaining[0], caps)):
        nothing = np.zeros((0, len(steps)), dtype=np.intp)
        return Front(nothing, np.zeros((0, num)), np.zeros(0))
    rows = _Rows(np.zeros((1, 0), dtype=np.intp), np.zeros((1, num)), np.zeros(1))
    trail: list[tuple[int, np.ndarray, np.ndarray]] = []
    for number, step in enumerate(steps):
        if stop is not None:
            stop.check()
        togo = list(remaining[number + 1])
        rows, parents, options = _extended(
            rows, step, all_guides, caps, togo, compared, limit if bounded else None, most_rows
        )
        trail.append((step.variable, parents, options))
    choices = np.zeros((len(rows.sizes), len(steps)), dtype=np.intp)
    at = np.arange(len(rows.sizes))
    for variable, parents, options in reversed(trail):
        choices[:, variable] = options[at]
        at = parents[at]
    return Front(choices, rows.sums, rows.sizes)


def _extended(
    rows: _Rows,
    step: _Step,
    guides: Sequence[tuple[np.ndarray, float]],
    caps: Sequence[float],
    togo: Sequence[np.ndarray],
    compared: list[int],
    limit: tuple[int, float] | None,
    most_rows: int,
) -> tuple[_Rows, np.ndarray, np.ndarray]:
    """All rows with each option of the step's variable, without those that are out of the question or beaten."""
    options = step.options
    held = (*step.before, step.variable)
    kept_columns = [held.index(v) for v in step.after]
    shape = [*step.shape, options.num_classes]
    after_shape = [shape[column] for column in kept_columns]
    parts: list[tuple[np.ndarray, ...]] = []
    total = 0
    per = max(1, _CHUNK // max(1, len(options.number)))
    for begin in range(0, len(rows.sizes), per):
        classes = rows.classes[begin : begin + per]
        sums = np.repeat(rows.sums[begin : begin + per, None, :], options.num_classes, axis=1)
        for at, component, costs in step.links:
            sums[:, :, component] += costs[classes[:, at]]
        with_option = sums[:, options.of_class] + options.sums[None]
        sizes = np.maximum(rows.sizes[begin : begin + per, None], options.sizes[None])
        states = np.empty((len(classes), len(options.number), len(kept_columns)), dtype=np.intp)
        for place, column in enumerate(kept_columns):
            states[:, :, place] = options.of_class[None] if column == len(held) - 1 else classes[:, column, None]
        code = (
            np.ravel_multi_index(tuple(states.reshape(-1, len(kept_columns)).T), after_shape)
            if kept_columns
            else np.zeros(with_option.shape[0] * with_option.shape[1], dtype=np.intp)
        )
        flat, size = with_option.reshape(-1, with_option.shape[2]), sizes.ravel()
        fits = np.isfinite(flat).all(axis=1)
        for (weights, _), cap, later in zip(guides, caps, togo):
            with np.errstate(invalid="ignore"):
                fits &= flat @ weights + later.ravel()[code] <= cap
        if limit is not None:
            component, most = limit
            fits &= flat[:, component] + togo[-1].ravel()[code] + size <= most * (1 + _TOLERANCE)
        chosen = np.flatnonzero(fits)
        columns = flat[chosen][:, compared]
        if limit is not None:
            columns = np.column_stack([columns, size[chosen]])
        chosen = chosen[undominated(code[chosen], columns)]
        parent, option = np.divmod(chosen, len(options.number))
        parts.append((code[chosen], flat[chosen], size[chosen], parent + begin, options.number[option]))
        total += len(chosen)
        if total > 4 * most_rows:
            raise TooManyError
    if not parts:
        nothing = np.zeros(0, dtype=np.intp)
        return _Rows(np.zeros((0, len(kept_columns)), dtype=np.intp), rows.sums[:0], rows.sizes[:0]), nothing, nothing
    code, flat, size, parents, numbers = (np.concatenate(column) for column in zip(*parts))
    if len(parts) > 1:
        columns = flat[:, compared]
        if limit is not None:
            columns = np.column_stack([columns, size])
        best = undominated(code, columns)
        code, flat, size, parents, numbers = (column[best] for column in (code, flat, size, parents, numbers))
    if len(code) > most_rows:
        raise TooManyError
    new = np.zeros((len(code), len(kept_columns)), dtype=np.intp)
    if kept_columns:
        new[:] = np.column_stack(np.unravel_index(code, after_shape))
    return _Rows(new, flat, size), parents, numbers
