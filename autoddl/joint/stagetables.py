"""The stages of a model on one mesh as cost tables for the exact search; everything is worked out once, when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.pricing import PriceBook, Problem
from autoddl.costmodel.table import CostTable
from autoddl.costmodel.workload import Workload

from .cutting import Chain, Shape, StageGraph
from .meshes import StageMesh

__all__ = ["OptionBytes", "StageTables"]

#: By so much the samples are multiplied to tell bytes per sample from bytes that do not depend on samples.
_MANY = 2.0**20


@dataclass(frozen=True, eq=False)
class OptionBytes:
    """Of a variable's options, all of them: state, and kept bytes per sample."""

    state: np.ndarray
    kept: np.ndarray
    p0: np.ndarray


class StageTables:
    """Graphs, prices and tables of the stages of one model on one mesh.

    Args:
        workload: batch, precision and optimizer.
    """

    def __init__(self, chain: Chain, mesh: StageMesh, cluster: Cluster, workload: Workload):
        self.chain, self.mesh, self.workload = chain, mesh, workload
        self.devices = mesh.devices(cluster)
        self._graphs: dict[Shape, StageGraph] = {}
        self._books: dict[tuple[Shape, bool], PriceBook] = {}
        self._bytes: dict[tuple[Shape, bool], tuple[OptionBytes, ...]] = {}
        self._problems: dict[tuple[Shape, bool, int], Problem] = {}

    @cached_property
    def _seed(self) -> PriceBook:
        """A book that all others share their prices with."""
        graph = self.chain.stage(0, 1).graph
        return PriceBook(graph, self.devices, replace(self.workload, recompute=False))

    def graph(self, first: int, stop: int) -> StageGraph:
        """Of the first stage of this shape that was asked for."""
        shape = self.chain.shape(first, stop)
        if shape not in self._graphs:
            self._graphs[shape] = self.chain.stage(first, stop)
        return self._graphs[shape]

    def book(self, first: int, stop: int, layers_again: bool) -> PriceBook:
        key = (self.chain.shape(first, stop), layers_again)
        if key not in self._books:
            workload = replace(self.workload, recompute=layers_again)
            graph = self.graph(first, stop).graph
            self._books[key] = PriceBook(graph, self.devices, workload, like=self._seed)
        return self._books[key]

    def problem(self, first: int, stop: int, layers_again: bool, micro_batch: int) -> Problem:
        """The cost table of the whole batch in micro-batches.

        Raises:
            UserError: the micro-batch does not divide over any strategy of some layer.
        """
        key = (self.chain.shape(first, stop), layers_again, micro_batch)
        if key not in self._problems:
            book = self.book(first, stop, layers_again)
            self._problems[key] = book.problem(self.workload.batch, micro_batch)
        return self._problems[key]

    def bytes_of(self, first: int, stop: int, layers_again: bool) -> tuple[OptionBytes, ...]:
        """Per variable and option the state and what a sample keeps."""
        key = (self.chain.shape(first, stop), layers_again)
        if key not in self._bytes:
            book, few = self.book(first, stop, layers_again), self.mesh.num_devices
            many = int(few * _MANY)
            # Memory is affine in the samples; every strategy divides a sample for each device.
            low, high = (book.problem(number, number).alone.memory for number in (few, many))
            found = []
            for variable, small, large in zip(book.variables, low, high):
                kept = (large - small) / (many - few)
                p0 = np.array([strategy.p0 for strategy in variable.options])
                found.append(OptionBytes(small - few * kept, kept, p0))
            self._bytes[key] = tuple(found)
        return self._bytes[key]

    def limited_table(
        self, first: int, stop: int, layers_again: bool, micro_batch: int, alive: float, versions: int
    ) -> CostTable:
        """The cost table with the memory of ``alive`` micro-batches in flight and ``versions`` of the weights."""
        table = self.problem(first, stop, layers_again, micro_batch).table
        extra = (versions - 1) * self.workload.itemsize / self.workload.bytes_per_parameter
        memory: dict[tuple[int, int], np.ndarray] = {}
        columns = []
        for of_one, costs in zip(self.bytes_of(first, stop, layers_again), table.cost):
            kept = micro_batch % of_one.p0 == 0
            key = (id(costs), id(of_one.state))
            if key not in memory:
                state = of_one.state[kept] * (1 + extra)
                memory[key] = np.ceil(state + alive * micro_batch * of_one.kept[kept] - 1e-6)
            assert len(memory[key]) == len(costs)
            columns.append(memory[key])
        return replace(table, memory=tuple(columns))

    def input_bytes(self, first: int, stop: int, micro_batch: int) -> float:
        """Of the tensor that enters a stage, of one micro-batch on each device."""
        entry = self.graph(first, stop).entry
        elements = 0 if entry is None else entry.output_elements
        return micro_batch * elements * self.workload.itemsize / self.mesh.num_devices
