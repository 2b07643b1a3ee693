"""The cost table: the problem instance of all search algorithms.

A table is a pairwise model over *variables*.  A variable is a layer, or a group of layers tied to one choice
(the same layer of every transformer block).  A choice of strategy ``x_i`` for every variable ``i`` costs

    cost(x)   = sum_i cost_i[x_i] + sum_(i,j) edge_ij[x_i, x_j]                 seconds per training step
    memory(x) = sum_i memory_i[x_i] + max_i buffer_i[x_i]                      bytes on each device

``memory_i`` is resident (parameters, gradients, optimizer states, activations).  ``buffer_i`` is transient (a gathered input, an
unreduced output): only one buffer is alive at a time, hence the maximum.  An entry ``inf`` in an edge means that no
redistribution exists between the two strategies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["ClassCosts", "CostTable", "Edge"]


@dataclass(frozen=True, eq=False)
class ClassCosts:
    """Costs of pairs of options that depend only on the classes (layouts) of the two options.

    Options a and b cost ``class_costs[rows[a], columns[b]]`` seconds.  A linear layer of 360 strategies has about 30 layouts, so
    the searches work on classes; :attr:`matrix` expands them.

    Attributes:
        class_costs: cost [s] of each pair of classes, shape (classes of source, classes of target).
        rows: class of each option of the source.
        columns: class of each option of the target.
    """

    class_costs: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @cached_property
    def matrix(self) -> np.ndarray:
        """The cost [s] of every pair of options, shape (options of source, options of target)."""
        return self.class_costs[self.rows[:, None], self.columns[None, :]]

    def at(self, a: int, b: int) -> float:
        """The cost of one pair of options."""
        return float(self.class_costs[self.rows[a], self.columns[b]])


@dataclass(frozen=True, eq=False)
class Edge:
    """Redistribution costs between two variables.

    Attributes:
        source, target: indices of the two variables.
        costs: the costs [s] as a matrix of options or by classes.  Edges between equal pairs of layers share one object, so that
            algorithms can recognise equal edges by identity.
    """

    source: int
    target: int
    costs: np.ndarray | ClassCosts

    @property
    def cost(self) -> np.ndarray:
        """``cost[a, b]`` [s], shape (options of source, options of target)."""
        return self.costs.matrix if isinstance(self.costs, ClassCosts) else self.costs

    @property
    def shape(self) -> tuple[int, ...]:
        """(options of source, options of target)."""
        costs = self.costs
        return (len(costs.rows), len(costs.columns)) if isinstance(costs, ClassCosts) else costs.shape

    def at(self, a: int, b: int) -> float:
        """The cost of one pair of options."""
        costs = self.costs
        return costs.at(a, b) if isinstance(costs, ClassCosts) else float(costs[a, b])


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs and memory of all options of all variables, and the edges between variables.

    Attributes:
        names: of the variables.
        cost: seconds per training step; ``cost[i]`` is a float64 array of shape (options of variable i,).
        memory: resident bytes, in the same shape; integers, which float64 holds exactly.
        buffer: transient bytes, in the same shape; integers.
        edges: at most one edge for each ordered pair of different variables.

    >>> options = np.array([1.0, 2.0]), np.array([2.0, 1.0])
    >>> edge = Edge(0, 1, np.array([[0.0, 3.0], [3.0, 0.0]]))
    >>> table = CostTable(("a", "b"), options, options, options, (edge,))
    >>> table.space_size, table.evaluate((0, 1)), table.peak_memory((0, 1))
    (4, 5.0, 3.0)
    """

    names: tuple[str, ...]
    cost: tuple[np.ndarray, ...]
    memory: tuple[np.ndarray, ...]
    buffer: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        count = len(self.names)
        assert len(self.cost) == len(self.memory) == len(self.buffer) == count
        for i in range(count):
            assert self.cost[i].shape == self.memory[i].shape == self.buffer[i].shape == (len(self.cost[i]),)
        for edge in self.edges:
            assert edge.source != edge.target
            assert edge.shape == (len(self.cost[edge.source]), len(self.cost[edge.target]))

    @cached_property
    def space_size(self) -> int:
        """Number of assignments (a Python int, since it may exceed 64 bits)."""
        return math.prod(len(costs) for costs in self.cost)

    @cached_property
    def _shared(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[tuple[ClassCosts | np.ndarray, np.ndarray]]]:
        """(costs, variables) of variables with the same cost array, and (costs, ends) of edges with the same costs.

        The graph of a model with repeated blocks has few of each.
        """
        variables: dict[int, tuple[np.ndarray, list[int]]] = {}
        for i, costs in enumerate(self.cost):
            variables.setdefault(id(costs), (costs, []))[1].append(i)
        edges: dict[int, tuple[ClassCosts | np.ndarray, list[tuple[int, int]]]] = {}
        for edge in self.edges:
            edges.setdefault(id(edge.costs), (edge.costs, []))[1].append((edge.source, edge.target))
        return (
            [(costs, np.array(members)) for costs, members in variables.values()],
            [(between, np.array(ends).T) for between, ends in edges.values()],
        )

    def evaluate(self, choice: tuple[int, ...]) -> float:
        """The cost [s] of one assignment.  The sum is rounded once, so that the order of edges does not matter."""
        chosen = np.array(choice, dtype=np.intp)
        parts: list[float] = []
        variables, edges = self._shared
        for costs, members in variables:
            parts += costs[chosen[members]].tolist()
        for between, ends in edges:
            rows, columns = chosen[ends]
            if isinstance(between, ClassCosts):
                parts += between.class_costs[between.rows[rows], between.columns[columns]].tolist()
            else:
                parts += between[rows, columns].tolist()
        return math.fsum(parts)

    def peak_memory(self, choice: tuple[int, ...]) -> float:
        """Peak bytes on each device under one assignment."""
        resident = sum(float(memory[x]) for memory, x in zip(self.memory, choice))
        return resident + max((float(buffer[x]) for buffer, x in zip(self.buffer, choice)), default=0.0)
