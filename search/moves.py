"""Assignments that change one variable at a time, for the local searches.

A change of one variable affects only its own cost and its edges, so its cost is computed in O(degree).
"""

from __future__ import annotations

import math
import random
from functools import cached_property

import numpy as np

from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.table import CostTable

from .exact import smallest_memory

__all__ = ["Assignment", "random_start"]


class Assignment:
    """A choice with its cost and memory, updated with each change.

    Args:
        table: the cost table.
        choice: the option of each variable.
        memory_limit: bytes; None for no limit.
    """

    def __init__(self, table: CostTable, choice: tuple[int, ...], memory_limit: float | None = None):
        self.table = table
        self.limit = memory_limit
        self.choice = list(choice)
        self.neighbours: list[list[tuple[int, np.ndarray]]] = [[] for _ in table.names]
        for edge in table.edges:
            # Each row has the edge's costs of the variable's options, for one option of the neighbour.
            self.neighbours[edge.source].append((edge.target, edge.cost.T))
            self.neighbours[edge.target].append((edge.source, edge.cost))
        self.resident = sum(float(memory[x]) for memory, x in zip(table.memory, choice))
        self.buffers = [float(buffer[x]) for buffer, x in zip(table.buffer, choice)]
        self.largest = max(self.buffers, default=0.0)
        self.cost = table.evaluate(choice)

    def local_costs(self, variable: int) -> np.ndarray:
        """The cost of a variable and its edges for each of its options, with the others fixed; shape (options,)."""
        costs = self.table.cost[variable].copy()
        for other, rows in self.neighbours[variable]:
            costs += rows[self.choice[other]]
        return costs

    def difference(self, variable: int, option: int) -> float:
        """The change of the cost if a variable takes another option; NaN if both costs are infinite."""
        old, choice = self.choice[variable], self.choice
        own = self._own[variable]
        total = own[option] - own[old]
        for other, rows in self._rows[variable]:
            row = rows[choice[other]]
            total += row[option] - row[old]
        return total

    @cached_property
    def _own(self) -> list[list[float]]:
        """The variables' costs as lists: a single change is computed ten times as fast as with arrays."""
        known = {id(costs): costs.tolist() for costs in self.table.cost}
        return [known[id(costs)] for costs in self.table.cost]

    @cached_property
    def _rows(self) -> list[list[tuple[int, list[list[float]]]]]:
        known: dict[tuple[int, bool], list[list[float]]] = {}
        table: list[list[tuple[int, list[list[float]]]]] = [[] for _ in self.table.names]
        for edge in self.table.edges:
            for mine, other, transposed in ((edge.source, edge.target, True), (edge.target, edge.source, False)):
                key = (id(edge.cost), transposed)
                if key not in known:
                    known[key] = (edge.cost.T if transposed else edge.cost).tolist()
                table[mine].append((other, known[key]))
        return table

    def _largest_without(self, variable: int) -> float:
        if self.buffers[variable] < self.largest:
            return self.largest
        return max((buffer for i, buffer in enumerate(self.buffers) if i != variable), default=0.0)

    def fitting(self, variable: int) -> np.ndarray | None:
        """Which options of a variable fit the memory limit, shape (options,); None without a limit."""
        if self.limit is None:
            return None
        table, current = self.table, self.choice[variable]
        resident = self.resident - table.memory[variable][current] + table.memory[variable]
        return resident + np.maximum(self._largest_without(variable), table.buffer[variable]) <= self.limit

    def fits(self, variable: int, option: int) -> bool:
        """Whether one option of a variable fits the memory limit."""
        if self.limit is None:
            return True
        table, current = self.table, self.choice[variable]
        resident = self.resident - table.memory[variable][current] + table.memory[variable][option]
        return bool(resident + max(self._largest_without(variable), table.buffer[variable][option]) <= self.limit)

    def change(self, variable: int, option: int, difference: float) -> None:
        """Change a variable to an option; ``difference`` is the change of the cost."""
        table, current = self.table, self.choice[variable]
        self.resident += float(table.memory[variable][option] - table.memory[variable][current])
        others = self._largest_without(variable)
        self.buffers[variable] = float(table.buffer[variable][option])
        self.largest = max(others, self.buffers[variable])
        self.choice[variable] = option
        self.cost = self.cost + difference if math.isfinite(self.cost) else table.evaluate(tuple(self.choice))


def random_start(
    table: CostTable, generator: random.Random, memory_limit: float | None, stop: Stop
) -> tuple[int, ...] | None:
    """A random choice that fits the limit; None if nothing fits.

    If a random choice is too large, its variables are set one by one, in random order, to their options in the choice of least
    memory, until it fits.

    Raises:
        StopRequestedError: the stop was requested.
    """
    choice = [generator.randrange(len(costs)) for costs in table.cost]
    if memory_limit is None or table.peak_memory(tuple(choice)) <= memory_limit:
        return tuple(choice)
    least, smallest = smallest_memory(table, stop)
    if smallest is None or least > memory_limit:
        return None
    order = list(range(len(choice)))
    generator.shuffle(order)
    for variable in order:
        choice[variable] = smallest[variable]
        if table.peak_memory(tuple(choice)) <= memory_limit:
            break
    return tuple(choice)
