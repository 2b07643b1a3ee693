"""Variable elimination, compiled once and evaluated for many weights.

Eliminating variable v from a sum of factors replaces all factors that contain v by one factor over v's neighbours,

    bucket(neighbours) = min over v of  sum of the factors that contain v.

After the last variable a number is left, the minimum of the whole sum (min-sum elimination, Dechter 1999).  The order of
elimination decides the sizes of the buckets.  It depends only on the graph, so it is compiled once into an `Elimination`, which is
then evaluated for different node costs: ``w_c cost + w_m memory`` for several weights, without options of large buffers.

*Sharing of equal blocks.*  Factors are numbered by content: two buckets that join the same factors in the same way are the same
`Node`, as in hash-consed expressions.  So the nodes form a DAG, with one node for the same layer of all 96 blocks of a
transformer.  The order maximises sharing: of the groups of variables with equal buckets, the one with the least work *per
variable* (table entries / size of the group) is eliminated next.  So chains of equal blocks are folded in pairs.

*Bounds for partial assignments.*  A pass from the root to the leaves computes the *outside* of each factor: the least cost of
everything else, for each assignment of the factor's scope (the minimum over all places of a shared node).  Inside + outside is a
lower bound for every assignment that contains this part; `labels` prunes with it.

*Wide graphs.*  If a bucket would exceed the cap, it is split, and each part is minimised over its own copy of v (mini-buckets).
Then the plan is not ``exact``; its minimum is a lower bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .reduction import Domain, Reduced

__all__ = ["Elimination", "Input", "Leaf", "Node", "Places", "Weights", "compile_plan"]


class _TooWideError(Exception):
    """Elimination would need a table larger than the cap."""


@dataclass(frozen=True)
class Weights:
    """The score of a label, ``cost * seconds + memory * bytes``, and the labels that are allowed.

    Attributes:
        cost, memory: the weights of cost [s] and memory [bytes].
        max_buffer: largest buffer of an allowed label [bytes].
        only: for each domain a mask of allowed labels; None allows all.
    """

    cost: float
    memory: float
    max_buffer: float = math.inf
    only: Mapping[Domain, np.ndarray] | None = None

    def allows(self, domain: Domain) -> np.ndarray:
        """Which labels of a domain are allowed, shape (labels,)."""
        within = domain.buffer <= self.max_buffer
        return within if self.only is None else within & self.only[domain]

    def score(self, domain: Domain) -> np.ndarray:
        """Scores of a domain's labels, ``inf`` for those not allowed, shape (labels,)."""
        return np.where(self.allows(domain), self.cost * domain.cost + self.memory * domain.memory, np.inf)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A factor of the table itself: a variable or an edge.

    Attributes:
        shape: number of classes of each variable of its scope.
        domain: the domain, for a variable.
        array: the costs, for an edge.
    """

    shape: tuple[int, ...]
    domain: Domain | None = None
    array: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Node:
    """A bucket: the sum of its inputs over local axes, minimised over the first of them.

    Attributes:
        local: sizes of the local axes.
        inputs: (factor number, the local axis of each of its axes).
        num_eliminated: number of leading axes that are eliminated.
    """

    local: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    num_eliminated: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes of its scope, those not eliminated."""
        return self.local[self.num_eliminated :]

    @cached_property
    def views(self) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """For each input (factor number, order of its axes, its shape among the local axes, its local axes).

        Small inputs come first, so that most of the sum is computed on small arrays.
        """
        found = []
        for number, axes in self.inputs:
            shape = [self.local[axis] if axis in axes else 1 for axis in range(len(self.local))]
            order = tuple(sorted(range(len(axes)), key=axes.__getitem__))
            found.append((number, order, tuple(shape), axes))
        return tuple(sorted(found, key=lambda view: math.prod(view[2])))

    def reduce(self, array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """Minimise an array over the local axes down to an input's axes, in the input's order of axes."""
        others = tuple(axis for axis in range(len(self.local)) if axis not in axes)
        order = sorted(range(len(axes)), key=axes.__getitem__)
        return np.min(array, axis=others).transpose(np.argsort(order)) if axes else np.min(array)


@dataclass(frozen=True, eq=False)
class Input:
    """One input of a node, at all places of the node in the elimination tree.

    Attributes:
        factor, axes: as in `Node.inputs`.
        places: for each place of the node, the index of the input's place; None for a leaf.
        variables: for each place, the variable whose domain it reads; None unless the factor is a domain.
    """

    factor: int
    axes: tuple[int, ...]
    places: np.ndarray | None
    variables: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Places:
    """The places of a node in the elimination tree.

    Attributes:
        count: number of places.
        inputs: the node's inputs at these places.
    """

    count: int
    inputs: tuple[Input, ...]


@dataclass(frozen=True, eq=False)
class Elimination:
    """A compiled elimination.

    Equal nodes are processed at all their places at once, so that no pass walks the whole tree.

    Attributes:
        factors: in topological order; the last one is the root.
        places: the places of each factor that is a node, by number.
        num_variables: number of variables of the table.
        exact: whether no bucket was split.
    """

    factors: tuple[Leaf | Node, ...]
    places: Mapping[int, Places]
    num_variables: int
    exact: bool

    @property
    def largest_bucket(self) -> int:
        """Number of entries of the largest table."""
        return max(math.prod(factor.local) for factor in self.factors if isinstance(factor, Node))

    @property
    def num_nodes(self) -> int:
        """Number of distinct buckets; it determines the work of one evaluation."""
        return len(self.places)

    @property
    def num_places(self) -> int:
        """Size of the elimination tree: number of buckets, including equal ones."""
        return sum(places.count for places in self.places.values())

    def walk(self) -> Iterator[tuple[int, Node, Places]]:
        """The nodes from the root to the leaves, as (number, node, places)."""
        for number in sorted(self.places, reverse=True):
            node = self.factors[number]
            assert isinstance(node, Node)
            yield number, node, self.places[number]

    def upward(self, weights: Weights) -> list[np.ndarray]:
        """The inside table of every factor: its minimum for each assignment of its scope.  The last is the overall minimum."""
        tables: list[np.ndarray] = []
        for factor in self.factors:
            if isinstance(factor, Node):
                joined = self.join(factor, tables)
                tables.append(joined.min(axis=tuple(range(factor.num_eliminated))) if factor.num_eliminated else joined)
            elif factor.domain is not None:
                score = weights.score(factor.domain)
                tables.append(np.minimum.reduceat(score, factor.domain.first[:-1]))
            else:
                assert factor.array is not None
                tables.append(factor.array if weights.cost == 1 else _scaled(factor.array, weights.cost))
        return tables

    def join(self, node: Node, tables: Sequence[np.ndarray]) -> np.ndarray:
        """The sum of a node's inputs on its local axes."""
        total = None
        for number, order, shape, _ in node.views:
            view = tables[number].transpose(order).reshape(shape)
            total = view if total is None else total + view
        if total is None:
            total = np.zeros(())
        return total if total.shape == node.local else np.broadcast_to(total, node.local)

    def best_eliminated(self, node: Node, tables: Sequence[np.ndarray], kept: np.ndarray) -> np.ndarray:
        """The values of a node's eliminated axes that minimise the sum of its inputs.

        Args:
            kept: values of the node's scope, shape (rows, axes of the scope).

        Returns:
            Values of the eliminated axes, shape (rows, eliminated axes).
        """
        num = node.num_eliminated
        sizes = node.local[:num]
        total = np.zeros((len(kept),) + (1,) * num)
        for number, _, shape, axes in node.views:
            fixed = [position for position, axis in enumerate(axes) if axis >= num]
            free = sorted((position for position, axis in enumerate(axes) if axis < num), key=axes.__getitem__)
            table = tables[number].transpose(fixed + free)
            part = table[tuple(kept[:, axes[position] - num] for position in fixed)]
            total = total + part.reshape((-1 if fixed else 1, *shape[:num]))
        best = np.broadcast_to(total, (len(kept), *sizes)).reshape(len(kept), -1).argmin(axis=1)
        return np.stack(np.unravel_index(best, sizes), axis=1)

    def downward(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outside table of every node: the least cost of everything else, for each assignment of its scope."""
        outside = [np.full(factor.shape, np.inf) for factor in self.factors]
        outside[-1] = np.zeros(())
        for number in range(len(self.factors) - 1, -1, -1):
            node = self.factors[number]
            if not isinstance(node, Node):
                continue
            inner = [(child, axes) for child, axes in node.inputs if isinstance(self.factors[child], Node)]
            if not inner:
                continue
            whole = self.join(node, tables) + outside[number]
            for child, axes in inner:
                with np.errstate(invalid="ignore"):
                    rest = node.reduce(whole, axes) - tables[child]
                rest = np.where(np.isfinite(tables[child]), rest, np.inf)
                outside[child] = np.minimum(outside[child], rest)
        return outside

    def decode(self, weights: Weights, tables: Sequence[np.ndarray]) -> np.ndarray:
        """A minimiser of the scores from their inside tables: the label of each variable.

        For an inexact plan it is a minimiser of the relaxation; each variable has the value of the copy that owns its cost.
        """
        labels = np.zeros(self.num_variables, dtype=np.intp)
        # The values of the scope of each node, at each of its places.
        scope = {
            number: np.zeros((places.count, len(self.factors[number].shape)), dtype=np.intp)
            for number, places in self.places.items()
        }
        for number, node, places in self.walk():
            values = scope[number]
            if node.num_eliminated:
                values = np.concatenate((self.best_eliminated(node, tables, values), values), axis=1)
            for behind in places.inputs:
                if behind.places is not None:
                    scope[behind.factor][behind.places] = values[:, behind.axes]
                elif behind.variables is not None:
                    best = _best_labels(self.factors[behind.factor], weights)
                    labels[behind.variables] = best[values[:, behind.axes[0]]]
        return labels


def _scaled(array: np.ndarray, weight: float) -> np.ndarray:
    """``weight * array``; a forbidden pair stays forbidden even at weight 0."""
    return np.where(np.isinf(array), np.inf, weight * np.where(np.isinf(array), 0.0, array))


def _best_labels(leaf: Leaf | Node, weights: Weights) -> np.ndarray:
    """The label of least score in each class."""
    assert isinstance(leaf, Leaf) and leaf.domain is not None
    score, first = weights.score(leaf.domain), leaf.domain.first
    return np.array([a + score[a:b].argmin() for a, b in zip(first[:-1], first[1:])])


#: A live factor during compilation: (factor number, its variables, its place in the tree; leaves have negative places).
_Live = tuple[int, tuple[int, ...], int]

#: The root eliminates the remaining variables at once when there are at most this many, with at most this many joint classes.
_ROOT_VARIABLES = 4
_ROOT_ENTRIES = 2**15


def compile_plan(reduced: Reduced, *, max_entries: int, relaxed_entries: int) -> Elimination:
    """Choose an elimination order and compile it.

    Args:
        reduced: the reduced table.
        max_entries: largest bucket of an exact plan.
        relaxed_entries: largest bucket of the relaxed plan that is made if no exact one is possible.
    """
    assert not reduced.empty
    for by_fill in (False, True):
        try:
            return _Compiler(reduced, max_entries, split=False, by_fill=by_fill).run()
        except _TooWideError:
            continue
    return _Compiler(reduced, relaxed_entries, split=True, by_fill=True).run()


class _Compiler:
    """The state of one compilation: live factors, the remaining graph, and groups of variables with equal buckets."""

    _LARGE_DEGREE = 12  # a variable of larger degree forms its own group, to save the time of comparing buckets

    def __init__(self, reduced: Reduced, max_entries: int, *, split: bool, by_fill: bool) -> None:
        self.max_entries, self.split, self.by_fill = max_entries, split, by_fill
        self.factors: list[Leaf | Node] = []
        # The places of the tree: the factor and the live inputs of each.
        self.tree: list[tuple[int, list[_Live]]] = []
        self.num_variables = len(reduced.domains)
        self.sizes = [domain.num_classes for domain in reduced.domains]
        # For each variable the live factors that contain it, with its position in their scopes.
        self.touching: list[dict[_Live, int]] = [{} for _ in reduced.domains]
        self.neighbours: list[set[int]] = [set() for _ in reduced.domains]
        self.scalars: list[_Live] = []
        self.node_number: dict[tuple, int] = {}
        self.exact = True
        self.leaves = 0
        self._add_leaves(reduced)
        self.group_of: dict[int, tuple] = {}
        self.groups: dict[tuple, dict[int, None]] = {}
        self.heap: list[tuple[tuple[float, float], int, tuple]] = []
        self.pushes = 0

    def _add_leaves(self, reduced: Reduced) -> None:
        number: dict[int, int] = {}
        for i, domain in enumerate(reduced.domains):
            if id(domain) not in number:
                number[id(domain)] = len(self.factors)
                self.factors.append(Leaf((domain.num_classes,), domain=domain))
            self._add_live((number[id(domain)], (i,), self._next_leaf()))
        for i, j, array in reduced.edges:
            # Variables of one class are left out of scopes, since numpy allows at most 32 axes.
            scope = tuple(v for v in (i, j) if self.sizes[v] > 1)
            if id(array) not in number:
                number[id(array)] = len(self.factors)
                array_of_scope = array.reshape([self.sizes[v] for v in scope])
                self.factors.append(Leaf(array_of_scope.shape, array=array_of_scope))
            self._add_live((number[id(array)], scope, self._next_leaf()))

    def _next_leaf(self) -> int:
        self.leaves += 1
        return -self.leaves

    def _add_live(self, live: _Live) -> None:
        scope = live[1]
        if not scope:
            self.scalars.append(live)
        for position, variable in enumerate(scope):
            self.touching[variable][live] = position
            self.neighbours[variable].update(other for other in scope if other != variable)

    def run(self) -> Elimination:
        for variable in range(self.num_variables):
            self._rescore(variable)
        left = set(range(self.num_variables))
        while len(left) > _ROOT_VARIABLES or math.prod(self.sizes[v] for v in left) > _ROOT_ENTRIES:
            score, _, group = heapq.heappop(self.heap)
            members = self.groups.get(group)
            if not members or self._score(group) != score:
                continue  # the group has changed; its current score is in the heap as well
            changed: set[int] = set()
            for variable in list(members):
                if variable not in changed:  # the buckets of neighbours of eliminated variables have changed
                    changed |= self._eliminate(variable)
                    left.discard(variable)
            for variable in sorted(changed):
                self._rescore(variable)
        self._add_root(sorted(left))
        return Elimination(tuple(self.factors), self._places(), self.num_variables, self.exact)

    def _rescore(self, variable: int) -> None:
        """Put a variable into the group of those with the same bucket."""
        self._leave_group(variable)
        neighbours = self.neighbours[variable]
        size = float(self.sizes[variable])
        for other in neighbours:
            size *= self.sizes[other]
        if len(neighbours) > self._LARGE_DEGREE:
            group: tuple = (size, math.inf, variable)
        else:
            pairs = sum(len(self.neighbours[other] & neighbours) for other in neighbours)
            fill = (len(neighbours) * (len(neighbours) - 1) - pairs) / 2
            group = (
                size,
                fill,
                variable if self.by_fill else _canonical(variable, _ordered(self.touching[variable]))[0],
            )
        self.group_of[variable] = group
        self.groups.setdefault(group, {})[variable] = None
        self._push(group)

    def _leave_group(self, variable: int) -> None:
        group = self.group_of.pop(variable, None)
        if group is not None:
            del self.groups[group][variable]
            if self.groups[group]:
                self._push(group)

    def _push(self, group: tuple) -> None:
        self.pushes += 1
        heapq.heappush(self.heap, (self._score(group), self.pushes, group))

    def _score(self, group: tuple) -> tuple[float, float]:
        size, fill, _ = group
        return (fill, size) if self.by_fill else (size / len(self.groups[group]), fill)

    def _eliminate(self, variable: int) -> set[int]:
        """Replace the factors that contain a variable by its bucket, and return the variables whose buckets change."""
        touching = _ordered(self.touching[variable])
        changed = self.neighbours[variable]
        self._leave_group(variable)
        for live in touching:
            for other in live[1]:
                del self.touching[other][live]
        for other in changed:
            self.neighbours[other].discard(variable)
        for part in self._parts(touching):
            inputs, scope = _canonical(variable, part)
            number = self._node(inputs, tuple(self.sizes[v] for v in scope), 1)
            self._add_live((number, scope[1:], self._occur(number, part)))
        return changed

    def _parts(self, touching: list[_Live]) -> list[list[_Live]]:
        """The factors as one bucket, or packed first-fit into mini-buckets below the cap."""
        scopes = {v for live in touching for v in live[1]}
        if math.prod(self.sizes[v] for v in scopes) <= self.max_entries:
            return [touching]
        if not self.split:
            raise _TooWideError
        self.exact = False
        parts: list[tuple[set[int], list[_Live]]] = []
        for live in sorted(touching, key=lambda live: -math.prod(self.sizes[v] for v in live[1])):
            for scope, members in parts:
                if math.prod(self.sizes[v] for v in scope | set(live[1])) <= self.max_entries:
                    scope.update(live[1])
                    members.append(live)
                    break
            else:
                parts.append((set(live[1]), [live]))
        return [[live for live in touching if live in members] for _, members in parts]

    def _occur(self, number: int, inputs: list[_Live]) -> int:
        """Record a place of a factor, and return its number in the tree."""
        self.tree.append((number, inputs))
        return len(self.tree) - 1

    def _places(self) -> dict[int, Places]:
        """The places of each node, from the recorded tree."""
        inputs_of: dict[int, list[list[_Live]]] = {}
        row: list[int] = []
        for number, inputs in self.tree:
            of_one = inputs_of.setdefault(number, [])
            row.append(len(of_one))
            of_one.append(inputs)
        found = {}
        for number, of_one in inputs_of.items():
            node = self.factors[number]
            assert isinstance(node, Node)
            behind = []
            for (child, axes), lives in zip(node.inputs, zip(*of_one)):
                leaf = self.factors[child]
                places = variables = None
                if isinstance(leaf, Node):
                    places = np.array([row[place] for _, _, place in lives])
                elif leaf.domain is not None:
                    variables = np.array([scope[0] for _, scope, _ in lives])
                behind.append(Input(child, axes, places, variables))
            found[number] = Places(len(of_one), tuple(behind))
        return found

    def _node(self, inputs: tuple, local: tuple[int, ...], num_eliminated: int) -> int:
        if (inputs, local) not in self.node_number:
            self.node_number[inputs, local] = len(self.factors)
            self.factors.append(Node(local, inputs, num_eliminated))
        return self.node_number[inputs, local]

    def _add_root(self, left: list[int]) -> None:
        """Join what is left: the last variables, and the minima of the other components of the graph.

        The minima are summed in pairs, so that equal components share nodes.
        """
        scalars = sorted(self.scalars, key=lambda live: live[0])
        while len(scalars) > 2:
            pairs = [self._sum(scalars[k : k + 2]) for k in range(0, len(scalars) - 1, 2)]
            scalars = pairs + scalars[len(scalars) - len(scalars) % 2 :]
        axis_of = {variable: axis for axis, variable in enumerate(left)}
        live_factors = scalars + list(dict.fromkeys(live for variable in left for live in self.touching[variable]))
        inputs = tuple((live[0], tuple(axis_of[v] for v in live[1])) for live in live_factors)
        number = len(self.factors)  # the root is a new node even if it equals another
        self.factors.append(Node(tuple(self.sizes[v] for v in left), inputs, len(left)))
        self._occur(number, live_factors)

    def _sum(self, pair: list[_Live]) -> _Live:
        number = self._node(tuple((live[0], ()) for live in pair), (), 0)
        return number, (), self._occur(number, pair)


def _ordered(touching: Mapping[_Live, int]) -> list[_Live]:
    """The factors that contain a variable, in the same order for equal buckets."""
    return [live for *_, live in sorted([(live[0], position, live[1], live) for live, position in touching.items()])]


def _canonical(variable: int, touching: list[_Live]) -> tuple[tuple, tuple[int, ...]]:
    """The inputs of a variable's bucket, in the order of ``touching``, and the variables of its local axes."""
    axis_of = {variable: 0}
    inputs = []
    for number, scope, _ in touching:
        for v in scope:
            if v not in axis_of:
                axis_of[v] = len(axis_of)
        inputs.append((number, tuple([axis_of[v] for v in scope])))
    return tuple(inputs), tuple(axis_of)
