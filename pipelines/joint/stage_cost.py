"""The stages of a model on one rectangle of devices, as tables of vectors; everything is worked out once, when it is asked for.

A stage at some strategies is a vector, which is a sum over its layers and redistributions (:data:`COMPONENTS`).  Its *sides*
are the layouts in which its first tensor is wanted and its last one left: what else the rest of a pipeline sees of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.layoutprices import Layout
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import Phases, Variable
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import Baseline, baselines
from autoddl.search.fronts import VectorEdge, VectorTable

from .boundary import replicated_all_reduce_s
from .meshes import StageMesh
from .partition import ENTRY, Chain, Shape, StageGraph

__all__ = ["COMPONENTS", "Pricing", "Replicas", "StageTable", "StageTables"]

#: Seconds of one micro-batch's forward and backward pass (one way through the stage each), of the gradients' all-reduce per step;
#: bytes of state, and what one micro-batch keeps.  Behind these: for every weight that is shared with another stage the bytes
#: of its gradient here.
COMPONENTS = ("forward", "backward", "gradient", "state", "kept")


@dataclass(frozen=True)
class Replicas:
    """Workers that hold a stage's weights together: how many, and whether in the same nodes; one alone in schemes of one
    pipeline."""

    count: int = 1
    share_nodes: bool = True


@dataclass(frozen=True)
class Pricing:
    """What stages are priced for, and which strategies are on offer.

    Attributes:
        objective: ``step``, or ``communication`` alone.
        untied: every repetition of a block has its own choice.
        summa: Summa meshes are on offer.
        names: of the baselines (:mod:`autoddl.search.baselines`) whose strategies alone are on offer; none: all strategies.
    """

    objective: str = "step"
    untied: bool = False
    summa: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class StageTable:
    """A stage's vectors.

    Attributes:
        graph: its layers.
        phases: what the table's numbers stand for.
        table: components as :data:`COMPONENTS`; sizes are buffers; keys are the sides' layouts.
        entries, exits: the layout of every class of the entry's (None: it reads the data) and the exit's variable.
    """

    graph: StageGraph
    phases: Phases
    table: VectorTable
    entry: int | None
    exit: int
    entries: tuple[Layout, ...]
    exits: tuple[Layout, ...]

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategy of every layer, in the order of the stage's graph."""
        found = {
            layer: variable.strategy(layer, int(option))
            for variable, option in zip(self.phases.variables, choice)
            for layer in variable.layers
        }
        return {layer.name: found[layer.name] for layer in self.graph.graph.layers}

    def sides(self, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The class of the entry's layout (-1 where it reads the data) and of the exit's, for rows of options."""
        variables = self.phases.variables
        exits = variables[self.exit].option_set.layouts[1][choices[:, self.exit]]
        if self.entry is None:
            return np.full(len(choices), -1), exits
        return variables[self.entry].option_set.layouts[1][choices[:, self.entry]], exits


class StageTables:
    """Graphs, prices and tables of the stages of one model on one rectangle.

    Args:
        workload: batch, precision and optimizer.
    """

    def __init__(
        self, chain: Chain, mesh: StageMesh, cluster: Cluster, workload: Workload, pricing: Pricing | None = None
    ):
        self.chain, self.mesh, self.cluster, self.workload = chain, mesh, cluster, workload
        self.pricing = pricing or Pricing()
        self.devices = mesh.devices(cluster)
        self._graphs: dict[Shape, StageGraph] = {}
        self._books: dict[tuple[Shape, bool], PriceBook] = {}
        self._tables: dict[tuple[Shape, bool, int, int, Replicas], StageTable | None] = {}
        self._replicated: dict[object, np.ndarray] = {}
        self._members: dict[int, tuple[Baseline, ...]] = {}

    @cached_property
    def _seed(self) -> PriceBook:
        """A book that all others share their prices with."""
        return self._book(self.graph(0, 1), False, None)

    def _book(self, stage: StageGraph, layers_again: bool, share_with: PriceBook | None) -> PriceBook:
        workload = replace(self.workload, recompute=layers_again)
        among = None
        if self.pricing.names:
            among = frozenset(strategy for one in self.members(stage) for strategy in one.strategies.values())
        return PriceBook(
            stage.graph, self.devices, workload, self.pricing.untied, self.pricing.summa, share_with, among
        )

    def members(self, stage: StageGraph) -> tuple[Baseline, ...]:
        """The baselines of a stage that are on offer."""
        if id(stage) not in self._members:
            every = baselines(stage.graph, self.devices.level_sizes)
            self._members[id(stage)] = tuple(one for one in every if one.name in self.pricing.names)
        return self._members[id(stage)]

    def graph(self, first: int, stop: int) -> StageGraph:
        """Of the first stage of this shape that was asked for."""
        shape = self.chain.shape(first, stop)
        if shape not in self._graphs:
            self._graphs[shape] = self.chain.stage(first, stop)
        return self._graphs[shape]

    def book(self, first: int, stop: int, layers_again: bool) -> PriceBook:
        """The prices of a stage.

        Raises:
            UserError: a layer has no strategy at all on these devices.
        """
        key = (self.chain.shape(first, stop), layers_again)
        if key not in self._books:
            self._books[key] = self._book(self.graph(first, stop), layers_again, self._seed)
        return self._books[key]

    def table(
        self, first: int, stop: int, layers_again: bool, micro_batch: int, part: int, replicas: Replicas
    ) -> StageTable | None:
        """A stage at one micro-batch; None where ``part`` of its samples do not divide over any strategy of some layer."""
        key = (self.chain.shape(first, stop), layers_again, micro_batch, part, replicas)
        if key not in self._tables:
            self._tables[key] = self._table(first, stop, layers_again, micro_batch, part, replicas)
        return self._tables[key]

    def _table(
        self, first: int, stop: int, layers_again: bool, micro_batch: int, part: int, replicas: Replicas
    ) -> StageTable | None:
        stage = self.graph(first, stop)
        try:
            phases = self.book(first, stop, layers_again).phases(micro_batch, self.pricing.objective, part)
        except UserError:
            return None
        gradient = phases.gradient
        if replicas.count > 1:
            gradient = tuple(self.replicated(stage, variable, replicas) for variable in phases.variables)
        own = [self._shared_bytes(stage, variable) for variable in phases.variables]
        columns = zip(phases.forward, phases.backward, gradient, phases.state, phases.kept)
        # What stands for the tensor that arrives takes and keeps nothing.
        costs = [0.0 if variable.layers == (ENTRY,) else 1.0 for variable in phases.variables]
        sums = tuple(cost * np.column_stack([*one, *shared]) for cost, one, shared in zip(costs, columns, own))
        buffers = tuple(cost * buffer for cost, buffer in zip(costs, phases.buffer))
        edges = tuple(VectorEdge(e.source, e.target, ((0, e.forward), (1, e.backward))) for e in phases.edges)
        owner = {name: i for i, variable in enumerate(phases.variables) for name in variable.layers}
        entry = owner[stage.graph.layers[0].name] if stage.has_entry else None
        exit_ = owner[stage.exit.name]
        # Nothing follows the last stage.  (One variable may be both sides.)
        sides = (entry, None if stop == self.chain.num_units else exit_)
        keyed = dict.fromkeys(place for place in sides if place is not None)
        keys = tuple((place, phases.variables[place].option_set.layouts[1]) for place in keyed)
        return StageTable(
            stage,
            phases,
            VectorTable(sums, buffers, edges, keys),
            entry,
            exit_,
            () if entry is None else phases.variables[entry].option_set.layouts[0],
            phases.variables[exit_].option_set.layouts[0],
        )

    def _shared_bytes(self, stage: StageGraph, variable: Variable) -> list[np.ndarray]:
        """For each weight that the stage shares with another one, the bytes of its gradient at every option."""
        found = []
        for here, _ in stage.shared:
            nbytes = np.zeros(len(variable.options))
            if here in variable.layers:
                nbytes += gradient_bytes(
                    stage.graph[here], (variable.strategy(here, k) for k in range(len(nbytes))), self.workload
                )
            found.append(nbytes)
        return found

    def replicated(self, stage: StageGraph, variable: Variable, replicas: Replicas) -> np.ndarray:
        """Seconds per step of a variable's all-reduces over its slices and over the workers that hold it, for every option."""
        total = np.zeros(len(variable.options))
        for name in variable.layers:
            layer = stage.graph[name]
            key = (layer.signature(), name in variable.swapped, variable.option_set, replicas)
            if key not in self._replicated:
                link = self.cluster.links[1 if replicas.share_nodes else 0]
                options = [variable.strategy(name, option) for option in range(len(total))]
                nbytes = gradient_bytes(layer, options, self.workload)
                self._replicated[key] = np.array(
                    [
                        replicated_all_reduce_s(layer, strategy, replicas.count, link, self.devices, own)
                        for strategy, own in zip(options, nbytes.tolist())
                    ]
                )
            total = total + self._replicated[key]
        return total

    def input_bytes(self, first: int, stop: int, micro_batch: int) -> float:
        """Of the tensor that enters a stage, of one micro-batch on each device."""
        elements = float(self.chain.entering[first])
        return micro_batch * elements * self.workload.itemsize / self.mesh.num_devices


def gradient_bytes(layer: Layer, strategies: Iterable[Strategy], workload: Workload) -> np.ndarray:
    """Of a layer's gradients on one device, for each strategy."""
    parts = np.array([s.num_devices if s.summa else s.p1 * s.p2 for s in strategies], dtype=float)
    return np.asarray(layer.num_parameters / parts * workload.itemsize)
