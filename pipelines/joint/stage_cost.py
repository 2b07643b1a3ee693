"""Cost tables of the stages of a model on one rectangle of devices.

The cost of a stage with given strategies is a vector (:data:`COMPONENTS`), the sum of the vectors of its layers and
redistributions.  The *sides* of a stage are two layouts: the one in which it needs its input, and the one in which it leaves its
output.  The rest of the pipeline depends on the vector and the sides only.  Tables are computed on first use and cached; equal
stages share one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.distribution import RowsAndFeatures
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.layer import zero_of
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import Phases, Variable
from autoddl.costmodel.strategy import PLAIN, Choices, Strategy
from autoddl.costmodel.strategygroup import StrategyGroup, group_strategies
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import Baseline, baselines
from autoddl.search.fronts import VectorEdge, VectorTable

from .boundary import replicated_all_reduce_s
from .configuration import recomputed_inside
from .meshes import StageMesh
from .partition import ENTRY, Chain, Shape, StageGraph

__all__ = ["COMPONENTS", "MEMORY", "Pricing", "Replicas", "StageTable", "StageTables"]

#: Components of a stage's vector: seconds of one forward pass and of one backward pass of a micro-batch; seconds per step of the
#: gradient all-reduce, of which only the least part counts that no backward pass hides, and of the optimizer step; bytes of state,
#: bytes that one micro-batch keeps for its backward pass, bytes of the activations of the block that is recomputed.  Further
#: components follow for each weight that is shared with another stage: the bytes of its gradient that a device exchanges.
COMPONENTS = ("forward", "backward", "gradient", "state", "kept", "recomputed")
#: The components that add up to the resident bytes, each times a factor.
MEMORY = slice(3, 6)


@dataclass(frozen=True)
class Replicas:
    """The workers that hold the weights of a stage; one worker in schedules with one pipeline.

    Attributes:
        count: Number of workers.
        share_nodes: Whether they are in the same nodes.
        runs_whole_passes: Whether each micro-batch has one backward pass; otherwise ``zero`` is at most 1.
    """

    count: int = 1
    share_nodes: bool = True
    runs_whole_passes: bool = True


@dataclass(frozen=True)
class Pricing:
    """The objective of stages and the offered strategies.

    Attributes:
        objective: ``step``, or ``communication`` alone.
        untied: Whether equal layers of repeated blocks may have different strategies.
        summa: Whether Summa meshes are offered.
        names: Names of the baselines (:mod:`autoddl.search.baselines`) whose strategies are offered; empty to offer all strategies.
        choices: What layers are offered besides splits.
    """

    objective: str = "step"
    untied: bool = False
    summa: bool = False
    names: tuple[str, ...] = ()
    choices: Choices = PLAIN


@dataclass(frozen=True, eq=False)
class StageTable:
    """The cost table of a stage.

    Attributes:
        graph: Layers of the stage.
        phases: Variables of the table and their options.
        table: Vectors with the components :data:`COMPONENTS`; sizes are buffer bytes; keys are the layouts of the sides.
        entry: Index of the variable that determines the input's layout; None for the first stage, which reads the data.
        exit: Index of the variable that determines the output's layout.
        entries: Layout of every class of the entry variable; empty for the first stage.
        exits: Layout of every class of the exit variable.
    """

    graph: StageGraph
    phases: Phases
    table: VectorTable
    entry: int | None
    exit: int
    entries: tuple[RowsAndFeatures, ...]
    exits: tuple[RowsAndFeatures, ...]

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategy of every layer, in the order of the stage's graph.

        Args:
            choice: Option of every variable.
        """
        strategies = {
            layer: variable.strategy(layer, int(option))
            for variable, option in zip(self.phases.variables, choice)
            for layer in variable.layers
        }
        return {layer.name: strategies[layer.name] for layer in self.graph.graph.layers}

    def sides(self, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The classes of the layouts at the sides: (entry, exit), each of shape (rows,).  The entry of the first stage is -1.

        Args:
            choices: Options of the variables; shape (rows, variables).
        """
        variables = self.phases.variables
        exits = variables[self.exit].option_set.layouts[1][choices[:, self.exit]]
        if self.entry is None:
            return np.full(len(choices), -1), exits
        return variables[self.entry].option_set.layouts[1][choices[:, self.entry]], exits


class StageTables:
    """Graphs, prices and cost tables of the stages of one model on one rectangle of devices.

    Args:
        chain: The model as a chain of units.
        mesh: The rectangle of devices.
        cluster: The devices and their network.
        workload: Batch, precision and optimizer.
        pricing: Objective and offered strategies.
    """

    def __init__(
        self, chain: Chain, mesh: StageMesh, cluster: Cluster, workload: Workload, pricing: Pricing | None = None
    ):
        self.chain, self.mesh, self.cluster, self.workload = chain, mesh, cluster, workload
        self.pricing = pricing or Pricing()
        self.devices = mesh.devices(cluster)
        self._graphs: dict[Shape, StageGraph] = {}
        self._books: dict[tuple[Shape, str, Choices], PriceBook] = {}
        self._tables: dict[tuple[Shape, str, int, int, Replicas], StageTable | None] = {}
        self._all_reduce_s: dict[object, np.ndarray] = {}
        self._divided: dict[object, np.ndarray] = {}
        self._members: dict[int, tuple[Baseline, ...]] = {}

    def _make_book(
        self, stage: StageGraph, recompute: str, share_with: PriceBook | None, choices: Choices
    ) -> PriceBook:
        workload = replace(self.workload, recompute=recomputed_inside(recompute))
        offered = None
        if self.pricing.names:
            offered = frozenset(
                strategy for baseline in self.members(stage) for strategy in baseline.strategies.values()
            )
        pricing = self.pricing
        return PriceBook(
            stage.graph,
            self.devices,
            workload,
            pricing.untied,
            pricing.summa,
            share_with,
            offered,
            choices=choices,
        )

    def members(self, stage: StageGraph) -> tuple[Baseline, ...]:
        """The baselines of a stage whose strategies are offered."""
        if id(stage) not in self._members:
            self._members[id(stage)] = tuple(
                baseline
                for baseline in baselines(stage.graph, self.devices.level_sizes)
                if baseline.name in self.pricing.names
            )
        return self._members[id(stage)]

    def graph(self, first: int, stop: int) -> StageGraph:
        """The graph of a stage.  Equal stages share the graph of the one that was requested first, with its layer names."""
        shape = self.chain.shape(first, stop)
        if shape not in self._graphs:
            self._graphs[shape] = self.chain.stage(first, stop)
        return self._graphs[shape]

    def book(self, first: int, stop: int, recompute: str, runs_whole_passes: bool = True) -> PriceBook:
        """The prices of a stage.

        Args:
            first, stop: The stage has the units ``first`` to ``stop - 1``.
            recompute: Way of recomputation, one of :data:`.configuration.RECOMPUTATIONS`.
            runs_whole_passes: As of :class:`Replicas`.

        Raises:
            UserError: a layer has no strategy on these devices.
        """
        choices = self.pricing.choices
        if not runs_whole_passes:
            choices = replace(choices, shardings=tuple(zero for zero in choices.shardings if zero < 2))
        key = (self.chain.shape(first, stop), recomputed_inside(recompute), choices)
        if key not in self._books:
            # All books share the prices of the first one.
            shared = next(iter(self._books.values()), None)
            self._books[key] = self._make_book(self.graph(first, stop), recompute, shared, choices)
        return self._books[key]

    def table(
        self, first: int, stop: int, recompute: str, micro_batch: int, part: int, replicas: Replicas
    ) -> StageTable | None:
        """The cost table of a stage for one micro-batch; None if some layer has no strategy.

        Args:
            first, stop, recompute: As in :meth:`book`.
            micro_batch: Samples per micro-batch.
            part: Samples of the smallest pass, which strategies must divide.
            replicas: Workers that hold the stage.
        """
        key = (self.chain.shape(first, stop), recomputed_inside(recompute), micro_batch, part, replicas)
        if key not in self._tables:
            self._tables[key] = self._make_table(first, stop, recompute, micro_batch, part, replicas)
        return self._tables[key]

    def _make_table(
        self, first: int, stop: int, recompute: str, micro_batch: int, part: int, replicas: Replicas
    ) -> StageTable | None:
        stage = self.graph(first, stop)
        try:
            book = self.book(first, stop, recompute, replicas.runs_whole_passes)
            phases = book.phases(micro_batch, self.pricing.objective, part)
        except UserError:
            return None
        # The vectors of all options.  The entry stands for the tensor that arrives: it costs nothing and keeps nothing.
        gradient = phases.gradient
        if replicas.count > 1:
            gradient = tuple(
                self.replicated(stage, variable, replicas, alone)
                for variable, alone in zip(phases.variables, phases.gradient)
            )
        exposed = self.workload.exposed_gradient_part
        once = tuple(exposed * reduce_s + update_s for reduce_s, update_s in zip(gradient, phases.update))
        components = zip(phases.forward, phases.backward, once, phases.state, phases.kept, phases.recomputed)
        shared = [self.shared_bytes(stage, variable) for variable in phases.variables]
        factors = [0.0 if variable.layers == (ENTRY,) else 1.0 for variable in phases.variables]
        sums = tuple(
            factor * np.column_stack([*columns, *nbytes])
            for factor, columns, nbytes in zip(factors, components, shared)
        )
        buffers = tuple(factor * buffer for factor, buffer in zip(factors, phases.buffer))
        edges = tuple(VectorEdge(e.source, e.target, ((0, e.forward), (1, e.backward))) for e in phases.edges)
        # The variables at the sides.  No stage follows the last one; one variable may be at both sides.
        variable_of = {name: i for i, variable in enumerate(phases.variables) for name in variable.layers}
        entry = variable_of[stage.graph.layers[0].name] if stage.has_entry else None
        exit_ = variable_of[stage.exit.name]
        sides = (entry, None if stop == self.chain.num_units else exit_)
        key_variables = dict.fromkeys(index for index in sides if index is not None)
        keys = tuple((index, phases.variables[index].option_set.layouts[1]) for index in key_variables)
        return StageTable(
            stage,
            phases,
            VectorTable(sums, buffers, edges, keys),
            entry,
            exit_,
            () if entry is None else phases.variables[entry].option_set.layouts[0],
            phases.variables[exit_].option_set.layouts[0],
        )

    def shared_bytes(self, stage: StageGraph, variable: Variable) -> list[np.ndarray]:
        """For each weight that the stage shares with another one, the gradient bytes that a device exchanges for every option of a
        variable; 0 if the weight belongs to another variable."""
        columns, has_shards = [], self.workload.exchanges_shards
        for name, _ in stage.shared:
            nbytes = np.zeros(len(variable.options))
            if name in variable.layers:
                for group in group_strategies(variable.strategies(name)):
                    updating = group.copies if has_shards and self._divides(stage, name, group) else 1
                    nbytes[group.indices] = gradient_bytes(stage.graph[name], group, self.workload) / updating
            columns.append(nbytes)
        return columns

    def _are_divided(self, stage: StageGraph, variable: Variable) -> np.ndarray:
        """Whether each option of a variable divides the optimizer states of its first layer, shape (options,)."""
        name = variable.layers[0]
        key = stage.graph[name].signature(), stage.graph.place(name, "none"), variable.option_set
        if key not in self._divided:
            divided = self._divided[key] = np.zeros(len(variable.options), dtype=bool)
            for group in variable.option_set.groups:
                divided[group.indices] = self._divides(stage, name, group)
        return self._divided[key]

    def _divides(self, stage: StageGraph, name: str, group: StrategyGroup) -> bool:
        """Whether strategies of a layer divide its optimizer states (ZeRO)."""
        place = stage.graph.place(name, "none")
        zero = zero_of(stage.graph[name], group.zero, place, self.workload.zero)
        return not group.summa and group.copies.max() > 1 and zero > 0

    def replicated(self, stage: StageGraph, variable: Variable, replicas: Replicas, alone: np.ndarray) -> np.ndarray:
        """Seconds per step of the gradient all-reduces of a variable's layers, inside a worker and over all workers that hold the
        stage; shape (options,).

        Args:
            stage: The stage.
            variable: A variable of the stage.
            replicas: The workers that hold it.
            alone: The seconds if one worker held it; of options that divide states they are the seconds inside each worker.
        """
        is_divided = self._are_divided(stage, variable)
        total = np.where(is_divided, alone, 0.0)
        for name in variable.layers:
            layer = stage.graph[name]
            key = (layer.signature(), name in variable.swapped, variable.option_set, replicas)
            if key not in self._all_reduce_s:
                link = self.cluster.links[1 if replicas.share_nodes else 0]
                seconds = self._all_reduce_s[key] = np.zeros(len(total))
                for group in group_strategies(variable.strategies(name)):
                    nbytes = gradient_bytes(layer, group, self.workload)
                    divided = () if is_divided[group.indices[0]] else None
                    seconds[group.indices] = replicated_all_reduce_s(
                        layer, group, replicas.count, link, self.devices, nbytes, divided
                    )
            total = total + self._all_reduce_s[key]
        return total

    def input_bytes(self, first: int, stop: int, micro_batch: int) -> float:
        """Bytes per device of the tensor that enters a stage, for one micro-batch."""
        elements = float(self.chain.entering_elements[first])
        return micro_batch * elements * self.workload.itemsize / self.mesh.num_devices


def gradient_bytes(layer: Layer, group: StrategyGroup, workload: Workload) -> np.ndarray:
    """Return the bytes of a layer's gradients on one device for each strategy of a group; shape (strategies,)."""
    parts = group.p1 * group.p2 * (group.p0 if group.summa else group.expert_parts)
    return np.asarray(layer.num_parameters / parts * workload.gradient_itemsize)
