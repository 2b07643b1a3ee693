"""A smaller table with the same optimum.

Two options of a variable whose rows are equal in every incident edge form a *class*.  A linear layer of 360 strategies has about
32 classes, since a redistribution depends only on how tokens and features are split.  So the edges are stored between classes, and
each class has a list of *labels* (cost, memory, buffer), its options.

A label a of class A is removed if another label b of the same variable, of class B, is never worse (dead-end elimination,
Goldstein's criterion, with memory):

    memory_b <= memory_a,  buffer_b <= buffer_a,  cost_b + sum_edges max_y (edge[B, y] - edge[A, y]) <= cost_a,

since then b can replace a in every assignment.  (Within one class this is plain dominance.)  Options of infinite cost and options
with a row of only ``inf`` are removed as well.

Everything is computed once per distinct input.  Equal blocks share their arrays, so 96 of them take as long as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Union

import numpy as np

from autoddl.costmodel.table import ClassCosts, CostTable

from .result import SearchError

__all__ = ["Domain", "Reduced", "check_table", "reduce_table"]

#: The costs of an edge.
_Costs = Union[np.ndarray, ClassCosts]


@dataclass(frozen=True, eq=False)
class Domain:
    """The labels of one variable, sorted by class; equal variables share one object.

    Attributes:
        first: the labels of class c are ``first[c]:first[c + 1]``, shape (classes + 1,).
        cost: seconds, shape (labels,).
        memory, buffer: resident and transient bytes, shape (labels,).
        option: index of the option in the original variable, shape (labels,).
    """

    first: np.ndarray
    cost: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray
    option: np.ndarray

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.first) - 1


@dataclass(frozen=True, eq=False)
class Reduced:
    """A reduced table.  Equal domains, and equal arrays of edges, are the same object.

    Attributes:
        domains: one per variable.
        edges: (i, j, costs of shape (classes of i, classes of j)) with i < j, at most one per pair.
    """

    domains: tuple[Domain, ...]
    edges: tuple[tuple[int, int, np.ndarray], ...]

    @cached_property
    def members(self) -> tuple[tuple[Domain, np.ndarray], ...]:
        """The distinct domains, each with its variables."""
        found: dict[Domain, list[int]] = {}
        for variable, domain in enumerate(self.domains):
            found.setdefault(domain, []).append(variable)
        return tuple((domain, np.array(variables)) for domain, variables in found.items())

    @property
    def empty(self) -> bool:
        """Whether some variable has no option left."""
        return any(domain.num_classes == 0 for domain in self.domains)


def check_table(table: CostTable) -> None:
    """Validate a table.

    Raises:
        SearchError: a variable has no options, a cost is nan or -inf, or memory is not a finite integer.
    """
    seen: set[int] = set()
    for name, cost, memory, buffer in zip(table.names, table.cost, table.memory, table.buffer):
        if not len(cost):
            raise SearchError(
                f"variable {name!r} of the cost table has no options; every layer needs at least one strategy"
            )
        if {id(cost), id(memory), id(buffer)} <= seen:
            continue
        seen.update((id(cost), id(memory), id(buffer)))
        if not (cost > -np.inf).all():
            raise SearchError(
                f"variable {name!r} of the cost table has a cost that is nan or -inf; costs are seconds or inf"
            )
        for column, values in (("memory", memory), ("buffer", buffer)):
            if not (np.isfinite(values).all() and (values == np.floor(values)).all()):
                raise SearchError(
                    f"variable {name!r} of the cost table has a {column} that is not a whole number of bytes"
                )
    for edge in table.edges:
        if id(edge.costs) not in seen:
            seen.add(id(edge.costs))
            distinct = edge.costs.class_costs if isinstance(edge.costs, ClassCosts) else edge.costs
            if not (distinct > -np.inf).all():
                pair = f"{table.names[edge.source]!r} -> {table.names[edge.target]!r}"
                raise SearchError(
                    f"edge {pair} of the cost table has a cost that is nan or -inf; costs are seconds or inf"
                )


def reduce_table(table: CostTable) -> Reduced:
    """Reduce a table: find classes, remove dominated labels, merge parallel edges.  The time is linear in its distinct arrays."""
    rows = _RowClasses()
    incident: list[list[tuple[_Costs, int]]] = [[] for _ in table.names]
    for edge in table.edges:
        incident[edge.source].append((edge.costs, 0))
        incident[edge.target].append((edge.costs, 1))

    domains: list[Domain] = []
    representatives: list[np.ndarray] = []
    by_key: dict[tuple, tuple[Domain, np.ndarray]] = {}
    intern = _Intern()
    for i in range(len(table.names)):
        vectors = (table.cost[i], table.memory[i], table.buffer[i])
        sides = sorted(incident[i], key=lambda item: (id(item[0]), item[1]))
        key = (*map(id, vectors), *((id(costs), side) for costs, side in sides))
        if key not in by_key:
            domain, kept = _reduce_variable(*vectors, [rows.of(costs, side) for costs, side in sides])
            by_key[key] = intern.domain(domain), kept
        domain, kept = by_key[key]
        domains.append(domain)
        representatives.append(kept)

    merged: dict[tuple[int, int], list[tuple[_Costs, bool]]] = {}
    for edge in table.edges:
        flipped = edge.source > edge.target
        pair = (edge.target, edge.source) if flipped else (edge.source, edge.target)
        merged.setdefault(pair, []).append((edge.costs, flipped))
    arrays: dict[tuple, np.ndarray] = {}
    edges = []
    for (i, j), parts in merged.items():
        key = (id(representatives[i]), id(representatives[j]), *((id(costs), flipped) for costs, flipped in parts))
        if key not in arrays:
            ends = representatives[i], representatives[j]
            whole = sum(_select(costs, *ends[::-1]).T if flipped else _select(costs, *ends) for costs, flipped in parts)
            arrays[key] = intern.array(np.asarray(whole))
        edges.append((i, j, arrays[key]))
    return Reduced(tuple(domains), tuple(edges))


def _select(costs: _Costs, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The costs of some options of the source and some of the target, shape (sources, targets)."""
    if isinstance(costs, ClassCosts):
        return costs.class_costs[costs.rows[sources][:, None], costs.columns[targets][None, :]]
    return costs[sources[:, None], targets[None, :]]


class _Intern:
    """Maps equal arrays and domains to one object."""

    def __init__(self) -> None:
        self._arrays: dict[tuple, np.ndarray] = {}
        self._domains: dict[tuple, Domain] = {}

    def array(self, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        return self._arrays.setdefault((array.shape, array.tobytes()), array)

    def domain(self, domain: Domain) -> Domain:
        columns = (domain.first, domain.cost, domain.memory, domain.buffer, domain.option)
        return self._domains.setdefault(tuple(column.tobytes() for column in columns), domain)


class _RowClasses:
    """The classes of equal rows (side 0) or columns (side 1) of the costs of edges; cached."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def of(self, costs: _Costs, side: int) -> tuple[np.ndarray, np.ndarray]:
        """(class of each row, the distinct rows, restricted to distinct columns)."""
        key = (id(costs), side)
        if key not in self._known:
            array = costs.class_costs if isinstance(costs, ClassCosts) else costs
            by_row, row_class = _distinct(array)
            # Columns are equal if they are equal in the distinct rows.
            by_column, column_class = _distinct(array[by_row].T)
            if isinstance(costs, ClassCosts):
                row_class, column_class = row_class[costs.rows], column_class[costs.columns]
            distinct = array[np.ix_(by_row, by_column)]
            self._known[id(costs), 0] = row_class, distinct
            self._known[id(costs), 1] = column_class, distinct.T
        return self._known[key]


def _distinct(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the first of each set of equal rows, and the set that each row belongs to."""
    contents = np.ascontiguousarray(array + 0.0)  # + 0.0 makes -0.0 and 0.0 the same bytes
    number: dict[bytes, int] = {}
    row_class = np.array([number.setdefault(row.tobytes(), len(number)) for row in contents], dtype=np.intp)
    first = np.unique(row_class, return_index=True)[1]
    return first, row_class


def _reduce_variable(
    cost: np.ndarray, memory: np.ndarray, buffer: np.ndarray, rows: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[Domain, np.ndarray]:
    """The domain of one variable, and for each of its classes an option of that class."""
    alive = np.isfinite(cost)
    for row_class, distinct in rows:
        alive &= np.isfinite(distinct).any(axis=1)[row_class]
    kept = np.flatnonzero(alive)
    keys = np.stack([row_class[kept] for row_class, _ in rows]) if rows else np.zeros((1, len(kept)), dtype=np.intp)
    if len(kept):
        label_class = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
        # Dominated labels of each class first: they are most, and all pairs of the others are compared.
        survivors = _best_of_classes(cost[kept], memory[kept], buffer[kept], label_class)
        kept, label_class = kept[survivors], label_class[survivors]
        representative = np.unique(label_class, return_index=True)[1]
        worst = np.zeros((len(representative),) * 2)
        for row_class, distinct in rows:
            worst += _largest_excess(distinct[row_class[kept[representative]]])
        survivors = _undominated(cost[kept], memory[kept], buffer[kept], worst[label_class[:, None], label_class])
        kept, label_class = kept[survivors], label_class[survivors]
        order = np.lexsort((kept, label_class))
        kept, label_class = kept[order], label_class[order]
        first = np.flatnonzero(np.r_[True, label_class[1:] != label_class[:-1]])
    else:
        first = np.zeros(0, dtype=np.intp)
    domain = Domain(np.r_[first, len(kept)], cost[kept], memory[kept], buffer[kept], kept)
    return domain, kept[first]


def _largest_excess(rows: np.ndarray) -> np.ndarray:
    """``[a, b] = max_y rows[b, y] - rows[a, y]`` over the y with finite ``rows[a, y]``."""
    excess = np.empty((len(rows), len(rows)))
    with np.errstate(invalid="ignore"):
        for a, row in enumerate(rows):
            difference = rows - row
            excess[a] = np.where(np.isnan(difference), -np.inf, difference).max(axis=1)  # nan is inf - inf
    return excess


def _best_of_classes(cost: np.ndarray, memory: np.ndarray, buffer: np.ndarray, label_class: np.ndarray) -> np.ndarray:
    """Ascending indices of the labels that no other label of their class can replace."""
    order = np.argsort(label_class, kind="stable")
    starts = np.flatnonzero(np.diff(label_class[order])) + 1
    survivors = [
        members[_undominated(cost[members], memory[members], buffer[members], 0.0)]
        for members in np.split(order, starts)
    ]
    return np.sort(np.concatenate(survivors))


def _undominated(cost: np.ndarray, memory: np.ndarray, buffer: np.ndarray, worst: np.ndarray | float) -> np.ndarray:
    """Indices of the labels that no other label can replace.

    Args:
        cost, memory, buffer: of the labels.
        worst: ``worst[a, b]`` is the largest excess of b's edges over a's; 0 within a class.
    """
    replaces = (cost[None, :] + worst <= cost[:, None]) & (memory[None, :] <= memory[:, None])
    replaces &= buffer[None, :] <= buffer[:, None]
    np.fill_diagonal(replaces, False)
    alive = np.ones(len(cost), dtype=bool)
    # Remove labels one at a time, each because of a label that remains: of two that can replace each other, one stays.
    for a in np.flatnonzero(replaces.any(axis=1))[::-1]:
        alive[a] = not (replaces[a] & alive).any()
    return np.flatnonzero(alive)
