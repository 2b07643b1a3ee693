"""The cost table: the one instance that every search algorithm works on.

A table is a pairwise model over *variables*.  A variable is a layer, or a group of layers tied to one choice
(the same layer of every transformer block).  Choosing strategy ``x_i`` for every variable ``i`` costs

    cost(x)   = sum_i cost_i[x_i] + sum_(i,j) edge_ij[x_i, x_j]                 seconds per training step
    memory(x) = sum_i memory_i[x_i] + max_i buffer_i[x_i]                      bytes on each device

``memory_i`` is what stays (parameters, gradients, optimizer states, activations); ``buffer_i`` is transient (a gathered
input, an unreduced output): only the largest one is alive at a time, hence the maximum.  An entry of ``inf`` in an edge is
a pair of strategies between which no redistribution exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["ByClass", "CostTable", "Edge"]


@dataclass(frozen=True, eq=False)
class ByClass:
    """Costs of pairs of options that depend on a class of each alone: option a of class ``rows[a]`` beside option b of class
    ``columns[b]`` costs ``between[rows[a], columns[b]]`` [s].

    A linear layer of 360 strategies has some 30 layouts around it: the searches work on the classes, and only those that ask for
    :attr:`matrix` see one cost per pair of options.
    """

    between: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @cached_property
    def matrix(self) -> np.ndarray:
        """The cost of every pair of options, shape (options of source, options of target)."""
        return self.between[self.rows[:, None], self.columns[None, :]]

    def at(self, a: int, b: int) -> float:
        """The cost of one pair of options."""
        return float(self.between[self.rows[a], self.columns[b]])


@dataclass(frozen=True, eq=False)
class Edge:
    """Redistribution costs between two variables, as a matrix or by classes of options.

    Edges between equal pairs of layers share one object of costs: algorithms may recognise it by identity.
    """

    source: int
    target: int
    costs: np.ndarray | ByClass

    @property
    def cost(self) -> np.ndarray:
        """``cost[a, b]`` [s], shape (options of source, options of target)."""
        return self.costs.matrix if isinstance(self.costs, ByClass) else self.costs

    @property
    def shape(self) -> tuple[int, ...]:
        """(options of source, options of target)."""
        costs = self.costs
        return (len(costs.rows), len(costs.columns)) if isinstance(costs, ByClass) else costs.shape

    def at(self, a: int, b: int) -> float:
        """The cost of one pair of options."""
        costs = self.costs
        return costs.at(a, b) if isinstance(costs, ByClass) else float(costs[a, b])


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs [s], memory [bytes] and buffers [bytes] of every option of every variable, and the edges between them.

    ``cost[i]``, ``memory[i]`` and ``buffer[i]`` are float64 vectors with one entry per option of variable ``i``; memory and
    buffers hold whole numbers of bytes (exact in float64).  Source and target of an edge differ, and no two edges join
    the same pair of variables in the same direction; parallel and self edges are folded by whoever builds the table.
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
        """How many assignments there are (a Python int: it exceeds 64 bits soon)."""
        return math.prod(len(costs) for costs in self.cost)

    @cached_property
    def _alike(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[tuple[ByClass | np.ndarray, np.ndarray]]]:
        """(costs, variables) and (costs, ends) of variables and edges that share theirs: repeated blocks have few that do not."""
        variables: dict[int, tuple[np.ndarray, list[int]]] = {}
        for i, costs in enumerate(self.cost):
            variables.setdefault(id(costs), (costs, []))[1].append(i)
        edges: dict[int, tuple[ByClass | np.ndarray, list[tuple[int, int]]]] = {}
        for edge in self.edges:
            edges.setdefault(id(edge.costs), (edge.costs, []))[1].append((edge.source, edge.target))
        return (
            [(costs, np.array(members)) for costs, members in variables.values()],
            [(between, np.array(ends).T) for between, ends in edges.values()],
        )

    def evaluate(self, choice: tuple[int, ...]) -> float:
        """The cost [s] of one assignment: the sum rounded once, so that the order of edges does not matter."""
        chosen = np.array(choice, dtype=np.intp)
        parts: list[float] = []
        variables, edges = self._alike
        for costs, members in variables:
            parts += costs[chosen[members]].tolist()
        for between, ends in edges:
            rows, columns = chosen[ends]
            if isinstance(between, ByClass):
                parts += between.between[between.rows[rows], between.columns[columns]].tolist()
            else:
                parts += between[rows, columns].tolist()
        return math.fsum(parts)

    def peak_memory(self, choice: tuple[int, ...]) -> float:
        """The bytes that one assignment needs on each device."""
        resident = sum(float(memory[x]) for memory, x in zip(self.memory, choice))
        return resident + max((float(buffer[x]) for buffer, x in zip(self.buffer, choice)), default=0.0)
