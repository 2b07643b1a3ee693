"""The Pareto front of a table of vectors, within limits.

Every option of a variable adds a vector (seconds forward, seconds backward, bytes, ...), and so does every pair of options at the
ends of an edge.  Every option also has a size, of which only the largest counts (buffers).  A choice is *dominated* if another one
with the same *keys* (the classes that are visible from outside of the table) is no more in any sum and no larger.  The *front* is
the set of choices that are not dominated.  Every monotone function of sums and size has an optimum in the front.

**Dynamic programming over a path decomposition.**  The variables are processed one by one, in an order that keeps few of them
*open* (processed, with a neighbour that is not).  A partial choice is a row: the classes of its open and key variables, its sums
and its largest size.  Dominated rows among those of equal classes are removed.

**Guides.**  Each guide, weights w >= 0 and a threshold, restricts the front to choices with w . sums <= threshold.  A pass from the
last variable to the first gives, for every assignment of the open variables, the least w . sums of the remaining variables.  So
every row that is kept can be completed within each single threshold.

Sums are of floats in different orders, so rows that differ by no more than a relative 1e-12 count as equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.table import ClassCosts

from .dominance import TOLERANCE, TooManyError, undominated

__all__ = [
    "Front",
    "Guide",
    "VectorEdge",
    "VectorTable",
    "front",
    "least",
    "least_choices",
]

#: Largest number of entries of a table over open variables, and of rows.
MAX_ENTRIES = 4_000_000
MAX_ROWS = 400_000
#: Number of candidate rows that are processed at once.
_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class VectorEdge:
    """The vectors of the pairs of options of two variables.

    Attributes:
        source, target: indices of the two variables.
        parts: (component, its values for all pairs); inf for a forbidden pair.
    """

    source: int
    target: int
    parts: tuple[tuple[int, ClassCosts], ...]


@dataclass(frozen=True, eq=False)
class VectorTable:
    """Vectors of options and of pairs of options.

    Attributes:
        sums: per variable, shape (options, components).
        sizes: per variable, shape (options,); only the largest size of a choice counts.
        edges: between different variables.
        keys: (variable, class of each of its options): choices are compared only if their classes are equal.
    """

    sums: tuple[np.ndarray, ...]
    sizes: tuple[np.ndarray, ...]
    edges: tuple[VectorEdge, ...]
    keys: tuple[tuple[int, np.ndarray], ...] = ()

    @property
    def num_components(self) -> int:
        """Length of the vectors."""
        return self.sums[0].shape[1]

    def evaluate(self, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums and sizes of choices, shape (rows, variables) -> (rows, components), (rows,)."""
        sums = np.sum([values[choices[:, v]] for v, values in enumerate(self.sums)], axis=0)
        for edge in self.edges:
            rows, columns = choices[:, edge.source], choices[:, edge.target]
            for component, costs in edge.parts:
                sums[:, component] += costs.class_costs[costs.rows[rows], costs.columns[columns]]
        sizes = np.max([sizes[choices[:, v]] for v, sizes in enumerate(self.sizes)], axis=0)
        return sums, np.asarray(sizes)

    @cached_property
    def steps(self) -> tuple[_Step, ...]:
        """The steps of the dynamic program, one per variable.

        Raises:
            TooManyError: a table over open variables would be too large.
        """
        return _decomposed(self)


@dataclass(frozen=True)
class Guide:
    """A restriction to choices with ``weights . sums <= threshold``.

    Attributes:
        weights: one number >= 0 per component.
        threshold: the largest allowed value.
    """

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
        """The front restricted to some rows."""
        return Front(self.choices[rows], self.sums[rows], self.sizes[rows])


@dataclass(frozen=True, eq=False)
class _Options:
    """The options of a variable that no other option of their class dominates, in the order of classes.

    Attributes:
        number: index of each option in the variable.
        sums, sizes: as in :class:`VectorTable`.
        of_class: class of each option.
        first: index of the first option of each class.
    """

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
    """One step of the dynamic program, which processes one variable.

    Attributes:
        variable: its index.
        options: its options, in classes.
        before, after: the open and key variables before and after the step.
        links: (position in ``before``, component, values of all pairs of classes, shape (classes of the earlier variable, classes
            of this one)).
        shape: the number of classes of each variable of ``before``.
    """

    variable: int
    options: _Options
    before: tuple[int, ...]
    after: tuple[int, ...]
    links: tuple[tuple[int, int, np.ndarray], ...]
    shape: tuple[int, ...]

    @cached_property
    def joined_links(self) -> tuple[_JoinedLink, ...]:
        """The links, those to one earlier variable as one."""
        joined = []
        for at in dict.fromkeys(at for at, _, _ in self.links):
            components, costs = zip(*((component, costs) for place, component, costs in self.links if place == at))
            whole = np.stack(costs)
            is_forbidden = np.isinf(whole).any(axis=0).ravel()
            flat = np.where(np.isinf(whole), 0.0, whole).reshape(len(whole), -1)
            forbidden = is_forbidden if is_forbidden.any() else None
            joined.append(_JoinedLink(at, list(components), flat, forbidden, whole.shape[1:]))
        return tuple(joined)


class _JoinedLink(NamedTuple):
    """The links of a step to one earlier variable.

    Attributes:
        at: position of the earlier variable in ``before``.
        components: the components of which the pairs of classes have values.
        costs: their finite values, shape (components, pairs).
        forbidden: which pairs have no finite value; None if all have.
        shape: number of classes of the earlier variable and of the step's.
    """

    at: int
    components: list[int]
    costs: np.ndarray
    forbidden: np.ndarray | None
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
                    between = costs.class_costs[costs.rows[mine][:, None], costs.columns[theirs][None]].T
                else:
                    between = costs.class_costs[costs.rows[theirs][:, None], costs.columns[mine][None]]
                links.append((before.index(other), component, np.ascontiguousarray(between)))
        held = (*before, variable)
        after = tuple(v for v in held if v in keyed or any(position[n] > place for n in neighbours[v]))
        shape = tuple(sizes[v] for v in before)
        if math.prod(shape) * sizes[variable] > MAX_ENTRIES:
            raise TooManyError
        steps.append(_Step(variable, options[variable], before, after, tuple(links), shape))
        before = after
    return tuple(steps)


def _order(neighbours: Sequence[set[int]], sizes: Sequence[int], keyed: set[int]) -> list[int]:
    """A greedy order: each time the variable that leaves the fewest assignments of open variables."""
    if len(sizes) > 64:  # long graphs are chains of blocks, which are best processed in their own order
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


# ------------------------------------------------------------------------------------------- bounds on the remaining variables


def _remaining(steps: Sequence[_Step], weights: np.ndarray, chosen: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """The least ``w . sums`` of the variables from each step on, for each assignment of the step's ``before``.

    Args:
        weights: shape (weights, components).
        chosen: gets, for each step from the last one on, the class of the step's variable that has the least; in the shape of the
            result.

    Returns:
        An array for each step, of shape (weights, classes of each variable of ``before``), and one of zeros for the end.
    """
    sizes = {step.variable: step.options.num_classes for step in steps}
    many = len(weights)
    found: list[np.ndarray] = [np.zeros([many, *(sizes[v] for v in steps[-1].after)])]
    for step in reversed(steps):
        held = (*step.before, step.variable)
        whole = found[-1].reshape([many, *(sizes[v] if v in step.after else 1 for v in held)])
        own = np.minimum.reduceat(weights @ step.options.sums.T, step.options.first, axis=1)
        whole = whole + own.reshape([many, *(1,) * len(step.before), -1])
        for link in step.joined_links:
            shape = [1] * len(held)
            shape[link.at], shape[-1] = link.shape
            part = weights[:, link.components] @ link.costs
            if link.forbidden is not None:
                part[:, link.forbidden] = np.inf
            whole = whole + part.reshape([many, *shape])
        whole_shape = (many, *(sizes[v] for v in held))
        if whole.shape != whole_shape:  # nothing depends on a variable any more
            whole = np.broadcast_to(whole, whole_shape)
        found.append(whole.min(axis=-1))
        if chosen is not None:
            chosen.append(whole.argmin(axis=-1))
    return found[::-1]


def least(table: VectorTable, weights: np.ndarray) -> np.ndarray:
    """The least ``w . sums`` of any choice, for each row w; inf if there is no choice.

    Args:
        table: the table.
        weights: shape (rows, components).

    Returns:
        An array of shape (rows,).

    Raises:
        TooManyError: a table over open variables would be too large.
    """
    return np.asarray(_remaining(table.steps, weights)[0])


def least_choices(table: VectorTable, weights: np.ndarray) -> np.ndarray:
    """A choice that minimises ``w . sums``, for each row w.

    Args:
        table: the table.
        weights: shape (rows, components).

    Returns:
        An array of shape (rows, variables), or (0, variables) if there is no choice.

    Raises:
        TooManyError: a table over open variables would be too large.
    """
    steps, many = table.steps, len(weights)
    chosen: list[np.ndarray] = []
    if not np.isfinite(_remaining(steps, weights, chosen)[0]).all():
        return np.zeros((0, len(steps)), dtype=np.intp)
    choices, rows = np.zeros((many, len(steps)), dtype=np.intp), np.arange(many)
    classes: dict[int, np.ndarray] = {}
    for step, least_class in zip(steps, reversed(chosen)):
        options, index = step.options, (rows, *(classes[v] for v in step.before))
        own = least_class[index]
        of_class = np.where(options.of_class == own[:, None], weights @ options.sums.T, np.inf)
        choices[:, step.variable], classes[step.variable] = options.number[of_class.argmin(axis=1)], own
    return choices


# ----------------------------------------------------------------------------------------------------------------- the front


@dataclass(frozen=True, eq=False)
class _Rows:
    """Partial choices.

    Attributes:
        classes: the class of each open variable, shape (rows, open variables).
        sums: shape (rows, components).
        sizes: the largest size so far, shape (rows,).
    """

    classes: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray


def front(
    table: VectorTable,
    guides: Sequence[Guide] = (),
    limit: tuple[int, float] | None = None,
    stop: Stop | None = None,
    most_rows: int = MAX_ROWS,
    is_shared: bool = False,
) -> Front:
    """The front of a table.

    Args:
        table: the table.
        guides: restrict the front.
        limit: (component, largest allowed sum of it plus the largest size).  If every choice is within the limit, component and
            size are not compared, unless ``is_shared``.
        stop: ends the computation early.
        most_rows: largest number of rows of a step.
        is_shared: whether others use a part of the limit, so that less is always better.

    Raises:
        TooManyError: more than ``most_rows`` rows are needed, or a table over open variables would be too large.
        StopRequestedError: the stop was requested.
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
    caps = [threshold + TOLERANCE * abs(threshold) for _, threshold in all_guides]
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
            rows, step, all_guides, caps, togo, compared, limit if bounded else None, most_rows, stop
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
    stop: Stop | None,
) -> tuple[_Rows, np.ndarray, np.ndarray]:
    """Extend all rows by each option of the step's variable; drop rows over a threshold or the limit, and dominated ones."""
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
            fits &= flat[:, component] + togo[-1].ravel()[code] + size <= most * (1 + TOLERANCE)
        chosen = np.flatnonzero(fits)
        columns = flat[chosen][:, compared]
        if limit is not None:
            columns = np.column_stack([columns, size[chosen]])
        chosen = chosen[undominated(code[chosen], columns, stop, 4 * most_rows - total)]
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
        best = undominated(code, columns, stop, most_rows)
        code, flat, size, parents, numbers = (column[best] for column in (code, flat, size, parents, numbers))
    if len(code) > most_rows:
        raise TooManyError
    new = np.zeros((len(code), len(kept_columns)), dtype=np.intp)
    if kept_columns:
        new[:] = np.column_stack(np.unravel_index(code, after_shape))
    return _Rows(new, flat, size), parents, numbers
