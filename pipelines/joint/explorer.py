"""The data that the joint search computes once and shares between settings.

These are the searches of stages (per rectangle of devices), the memory demands and step graphs (per schedule), and the least
transfer times (per boundary).

A *setting* is a division of the devices, a schedule and a micro-batch.  A setting with a *cut* determines the stages; with a way of
recomputation and strategies for each stage it is a configuration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.pricing import PriceBook, price_together
from autoddl.costmodel.stopping import SlicedStop, Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..generators import GeneratorError
from ..periods import Insertions, insertions
from ..pumping import PumpedGraph, zones_between
from ..schedule import Schedule
from ..stepgraph import StepGraph
from ..tasktable import tabulate
from .boundary import least_crossing_s
from .bounds import Bound, homes, placement_of
from .configuration import RECOMPUTATIONS, Configuration, PipelineSchedule, StageChoice, recomputed_inside, widths_of
from .evaluation import Evaluation, evaluate
from .memory_demand import MemoryDemand, memory_demand_of
from .meshes import Meshes, StageMesh, all_meshes, stage_meshes
from .partition import Chain
from .space import schedules
from .stage_cost import Pricing, Replicas
from .stage_search import MakeStages, Passes, StageSearch

__all__ = ["RELATIVE_TOLERANCE", "Explorer", "Setting", "setting_of"]

#: Relative difference of steps that counts as equal.
RELATIVE_TOLERANCE = 1e-9
#: Number of cached step graphs; a graph of 10,000 tasks takes about 1 MiB.
_MAX_GRAPHS = 96
#: Number of passes of micro-batches through stages from which a schedule has a condensed graph.
_MIN_PASSES_TO_CONDENSE = 600
#: Micro-batches for each worker of the short schedules whose longest paths are repeated, and of others, the shortest first.
_MICRO_BATCHES_TO_PUMP, _MICRO_BATCHES_TO_CONDENSE = 3, (1, 2)
#: Number of longest paths per schedule that are kept for other settings with the same schedule.
_MAX_PATHS = 12
#: Number of bounds per schedule that are kept.
_MAX_BOUNDS = 3


@dataclass(frozen=True)
class Setting:
    """A division of the devices, a schedule and a micro-batch.

    Attributes:
        mesh: Devices of the workers.
        schedule: Arguments of the schedule; they include the number of micro-batches.
        micro_batch: Samples per micro-batch.
    """

    mesh: Meshes
    schedule: PipelineSchedule
    micro_batch: int

    @cached_property
    def meshes(self) -> tuple[StageMesh, ...]:
        """Per stage, the rectangle of its worker."""
        spec = self.schedule
        return tuple(self.mesh.mesh_of(spec.worker_of(stage)) for stage in range(spec.num_stages))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Per stage, the number of devices of its worker."""
        return tuple(mesh.num_devices for mesh in self.meshes)

    @cached_property
    def smallest_pass(self) -> int:
        """Samples of the smallest pass of the schedule: a micro-batch, or half of it; 0 if an odd micro-batch would be halved."""
        if not self.schedule.halves_backwards:
            return self.micro_batch
        return 0 if self.micro_batch % 2 else self.micro_batch // 2


def setting_of(configuration: Configuration) -> Setting:
    """Return the setting of a configuration."""
    return Setting(configuration.mesh, configuration.schedule, configuration.workload.micro_batch)


@dataclass(eq=False)
class ScheduleGraph:
    """The step graph of a schedule, and longest paths of it for the times of earlier plans.

    The schedule contains recomputation tasks for all stages.  For stages without recomputation these take no time, and so do not
    change the step.

    Attributes:
        graph: The step graph; None for asynchronous schedules, whose period is not a longest path.
        is_rough: Whether the graph misses the waiting of workers for each other while a schedule repeats.
        paths: Per path, how often it passes through each term (:class:`autoddl.pipelines.stepgraph.Terms`); the latest path first.
        bounds: The best linear bounds of settings, each with one vector of prices; the latest first.
    """

    graph: StepGraph | PumpedGraph | None
    is_rough: bool = False
    paths: list[np.ndarray] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    def remember_bound(self, bound: Bound) -> None:
        """Keep the best bound of a setting for other settings with this schedule."""
        self.bounds.insert(0, bound)
        del self.bounds[_MAX_BOUNDS:]

    def remember(self, path: np.ndarray) -> None:
        """Keep a path for other settings with this schedule."""
        if not any(np.array_equal(path, other) for other in self.paths):
            self.paths.insert(0, path)
            del self.paths[_MAX_PATHS:]


class _GraphKey(NamedTuple):
    """What a step graph depends on.

    Attributes:
        spec: The schedule.
        widths: Number of devices of the workers, which is the same for all or one number for each.
        recomputes: Whether stages are recomputed.
    """

    spec: PipelineSchedule
    widths: int | tuple[int, ...]
    recomputes: bool

    def schedule(self) -> Schedule:
        """The schedule itself."""
        return self.spec.schedule(self.widths, (self.recomputes,) * self.spec.num_stages, validates=False)


def _shortened(key: _GraphKey, multiple: int) -> _GraphKey | None:
    """A schedule with about ``multiple`` micro-batches for each worker: a whole number of periods less than the given one.  None if
    that is more than half of the micro-batches."""
    spec = key.spec
    least, period = multiple * spec.num_workers, spec.period
    count = least + (spec.num_micro_batches - least) % period
    if 2 * count > spec.num_micro_batches:
        return None
    return key._replace(spec=replace(spec, num_micro_batches=count))


class Explorer:
    """The shared data of all searches of one model on one cluster.

    Args:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        workload: Batch, precision and optimizer.
        limit_bytes: Memory limit per device.
        recomputations: Allowed ways of recomputation.
        pricing: Objective and offered strategies.
        make_stages: Constructor of the searches of stages; by default all strategies are offered.
        share_with: Another explorer of the same model, cluster, workload and pricing, whose tables this one may share.
        stop: When it is requested, the current computation raises StopRequestedError; finished results stay cached.
    """

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        workload: Workload,
        limit_bytes: float,
        recomputations: tuple[str, ...] = RECOMPUTATIONS,
        pricing: Pricing | None = None,
        make_stages: MakeStages = StageSearch,
        share_with: Explorer | None = None,
        stop: Stop | None = None,
    ):
        self.stop = SlicedStop(stop or Stop())
        self.chain, self.cluster, self.workload = chain, cluster, workload
        self.limit_bytes, self.recomputations = limit_bytes, recomputations
        self.pricing = pricing or Pricing()
        self._make, self._share_with = make_stages, share_with
        self._stages: dict[StageMesh, StageSearch] = {}
        self._demands: dict[PipelineSchedule, MemoryDemand | None] = share_with._demands if share_with else {}
        self._schedule_graphs: OrderedDict[object, ScheduleGraph] = (
            share_with._schedule_graphs if share_with else OrderedDict()
        )
        self._replicas: dict[object, tuple[Replicas, ...]] = share_with._replicas if share_with else {}
        self._transfers: dict[object, np.ndarray] = share_with._transfers if share_with else {}
        self._priced_units: set[tuple[str, bool]] = set()

    @property
    def num_searches(self) -> int:
        """Number of searches of stages so far."""
        return sum(stages.num_searches for stages in self._stages.values())

    def stage_search(self, mesh: StageMesh) -> StageSearch:
        """The search of all stages on one rectangle."""
        if mesh not in self._stages:
            share_with = None if self._share_with is None else self._share_with.stage_search(mesh)
            self._stages[mesh] = self._make(
                self.chain, mesh, self.cluster, self.workload, self.pricing, share_with, self.stop
            )
        return self._stages[mesh]

    def price_units(self, recompute: str, runs_whole_passes: bool = True) -> None:
        """Price the units of the model on all rectangles of devices of pipelines, which takes less time than one by one.

        Args:
            recompute: What the passes recompute (:func:`.configuration.recomputed_inside`).
            runs_whole_passes: As of :class:`.stage_cost.Replicas`.

        Raises:
            StopRequestedError: the stop was requested; what is known by then is kept.
        """
        key = recompute, runs_whole_passes
        if key in self._priced_units:
            return
        books: list[PriceBook] = []
        for mesh in self._rectangles:
            self.stop.check()
            books += self.stage_search(mesh).unit_bounds.books(*key)
        price_together(books, self.stop.check)
        self._priced_units.add(key)

    @cached_property
    def _rectangles(self) -> tuple[StageMesh, ...]:
        """The different rectangles of all divisions into two or more workers."""
        rectangles = (
            rectangle
            for mesh in all_meshes(self.cluster)
            if 1 < mesh.num_workers(self.cluster) <= self.chain.num_units
            for rectangle in ([mesh] if isinstance(mesh, StageMesh) else mesh.meshes)
        )
        return tuple(dict.fromkeys(rectangles))

    # ------------------------------------------------------------------------------------------------------- settings

    def settings(
        self, micro_batch: int | None, stale: bool, allowed: Callable[[PipelineSchedule], bool], uneven: bool = True
    ) -> Iterator[Setting]:
        """Iterate over the settings of the space, those with equal workers first.

        Args:
            micro_batch: Samples per micro-batch; None for every divisor of the batch.
            stale: Whether to include asynchronous schedules.
            allowed: Whether to include a schedule.
            uneven: Whether to include workers of unequal rectangles.
        """
        # Asynchronous stages would update the copies of a shared weight at different times.
        stale = stale and not self.chain.shares_weights
        for mesh in all_meshes(self.cluster) if uneven else stage_meshes(self.cluster):
            depth, equal = mesh.num_workers(self.cluster), isinstance(mesh, StageMesh)
            if depth > self.chain.num_units:
                continue
            for size in divisors(self.workload.batch) if micro_batch is None else [micro_batch]:
                for spec in schedules(depth, self.workload.batch // size, self.chain.num_units, stale, equal):
                    setting = Setting(mesh, spec, size)
                    is_executed = self.workload.zero < 2 or spec.runs_whole_passes
                    if setting.smallest_pass and is_executed and allowed(spec):
                        yield setting

    def memory_demand(self, spec: PipelineSchedule) -> MemoryDemand | None:
        """The memory demand of a schedule; None if the schedule cannot be generated."""
        if spec not in self._demands:
            try:
                self._demands[spec] = memory_demand_of(spec)
            except GeneratorError:
                self._demands[spec] = None
        return self._demands[spec]

    def schedule_graph(self, setting: Setting) -> ScheduleGraph:
        """The step graph of a setting's schedule, with recomputation tasks if recomputation of stages is allowed."""
        return self._whole_graph(self._graph_key(setting))

    def simpler_graph(self, setting: Setting) -> ScheduleGraph | None:
        """A step graph whose steps are lower bounds on those of a setting's schedule, and which is smaller, or shared with other
        settings; None if there is none.

        Long schedules that are periodic have a condensed graph (:mod:`autoddl.pipelines.pumping`, or else
        :mod:`autoddl.pipelines.periods`).  Schedules on workers of unequal widths count as if all of them reduced gradients: a
        worker of one device, which does not, updates its weights after its last task; a reduction begins no later.
        """
        own = self._graph_key(setting)
        key = own if isinstance(own.widths, int) else own._replace(widths=max(own.widths))
        condensed = self._condensed_graph(key)
        if condensed is not None:
            return condensed
        return None if key == own else self._whole_graph(key)

    def _whole_graph(self, key: _GraphKey) -> ScheduleGraph:
        return self._cached_graph(("whole", *key), lambda: self._make_graph(key, None))

    def _condensed_graph(self, key: _GraphKey) -> ScheduleGraph | None:
        """The condensed graph of a long schedule; None if the schedule is short itself or not periodic."""
        spec = key.spec
        if not spec.synchronous or spec.num_stages * spec.num_micro_batches < _MIN_PASSES_TO_CONDENSE:
            return None
        for multiple in (_MICRO_BATCHES_TO_PUMP, *_MICRO_BATCHES_TO_CONDENSE):
            is_pumped = multiple == _MICRO_BATCHES_TO_PUMP
            short = _shortened(key, multiple)
            if short is None:
                continue
            name = ("condensed", is_pumped, spec.num_micro_batches, *short)
            try:
                condensed = self._cached_graph(name, partial(self._make_condensed_graph, key, short, is_pumped))
            except GeneratorError:
                continue
            if condensed.graph is not None:
                return condensed
        return None

    def _make_condensed_graph(self, key: _GraphKey, short: _GraphKey, is_pumped: bool) -> ScheduleGraph:
        """The graph of a short schedule in which the tasks of a period are repeated as often as the given one has more of them.

        If ``is_pumped``, parts of its longest paths are repeated, too; no graph if nothing repeats in this way.
        """
        spec, period = short.spec, short.spec.period
        longer = short._replace(spec=replace(spec, num_micro_batches=spec.num_micro_batches + period))
        few, many = short.schedule(), longer.schedule()
        zones = zones_between(few, many) if is_pumped else None
        inserted = None if is_pumped and zones is None else insertions(few, many)
        if inserted is None:
            return ScheduleGraph(None)
        num_periods = (key.spec.num_micro_batches - spec.num_micro_batches) // period
        once = self._cached_graph(("added", *short), partial(self._make_graph, short, inserted)).graph
        assert isinstance(once, StepGraph)
        condensed = once.with_repeated_insertions(num_periods)
        if zones is None:
            return ScheduleGraph(condensed, is_rough=True)
        plain = self._whole_graph(short).graph
        assert isinstance(plain, StepGraph)
        return ScheduleGraph(PumpedGraph(condensed, plain, tabulate(few), zones, num_periods))

    def _make_graph(self, key: _GraphKey, inserted: Insertions | None) -> ScheduleGraph:
        spec = key.spec
        if not spec.synchronous:
            return ScheduleGraph(None)
        stages = range(spec.num_stages)
        passes = [spec.backward_passes(stage) for stage in stages]
        input_passes = [spec.input_passes(stage) for stage in stages]
        return ScheduleGraph(StepGraph(key.schedule(), passes, input_passes, inserted))

    def _graph_key(self, setting: Setting) -> _GraphKey:
        """What the step graph of a setting depends on.

        A schedule depends on the widths of the workers only by whether a worker has more than one device, because then its
        gradients are all-reduced.  So widths are capped at 2.
        """
        widths = widths_of(setting.mesh)
        capped = min(widths, 2) if isinstance(widths, int) else tuple(min(width, 2) for width in widths)
        return _GraphKey(setting.schedule, capped, "stage" in self.recomputations)

    def _cached_graph(self, key: object, make: Callable[[], ScheduleGraph]) -> ScheduleGraph:
        """The cached graph of a key, made if it is missing; the least recently used graphs are dropped."""
        if key not in self._schedule_graphs:
            self._schedule_graphs[key] = make()
            while len(self._schedule_graphs) > _MAX_GRAPHS:
                self._schedule_graphs.popitem(last=False)
        self._schedule_graphs.move_to_end(key)
        return self._schedule_graphs[key]

    def passes(self, setting: Setting) -> tuple[Passes, ...]:
        """Per stage, the samples of its passes and the workers that hold its weights."""
        spec = setting.schedule
        if spec.num_pipelines == 1:
            alone = Replicas(runs_whole_passes=spec.runs_whole_passes)
            return (Passes(setting.micro_batch, setting.smallest_pass, alone),) * spec.num_stages
        key = (setting.mesh, spec.num_pipelines, spec.runs_whole_passes)
        if key not in self._replicas:
            holders: list[list[int]] = [[] for _ in range(spec.num_stages)]
            for worker, stages in enumerate(homes(spec.num_workers, spec.groups, spec.num_pipelines)):
                for _, stage in stages:
                    holders[stage].append(worker)
            self._replicas[key] = tuple(
                Replicas(len(workers), setting.mesh.share_nodes(self.cluster, tuple(workers)), spec.runs_whole_passes)
                for workers in holders
            )
        return tuple(Passes(setting.micro_batch, setting.smallest_pass, replicas) for replicas in self._replicas[key])

    def least_transfers(self, setting: Setting) -> np.ndarray:
        """Lower bounds on the seconds of one transfer over every boundary, whatever the layouts.

        Returns:
            Shape (stages - 1, units + 1): entry (b, u) is for a cut whose stage b + 1 begins with unit u.
        """
        spec = setting.schedule
        placement = placement_of(spec.num_workers, spec.groups, spec.num_pipelines)
        key = (setting.mesh, setting.micro_batch, spec.groups, spec.num_pipelines)
        if key not in self._transfers:
            nbytes = setting.micro_batch * self.workload.itemsize * self.chain.entering_elements
            transfers = np.zeros((spec.num_stages - 1, self.chain.num_units + 1))
            known: dict[object, np.ndarray] = {}
            for b, ends in enumerate(zip(setting.meshes, setting.meshes[1:])):
                share_nodes = all(
                    setting.mesh.share_nodes(self.cluster, (workers[b], workers[b + 1])) for workers in placement
                )
                if (ends, share_nodes) not in known:
                    known[ends, share_nodes] = least_crossing_s(ends, self.cluster, share_nodes, nbytes)
                transfers[b] = known[ends, share_nodes]
            self._transfers[key] = transfers
        return self._transfers[key]

    # -------------------------------------------------------------------------------------------------- configurations

    def configuration(
        self, setting: Setting, cut: Sequence[int], stages: Sequence[tuple[str, Mapping[str, Strategy]]]
    ) -> Configuration:
        """Make a configuration.

        Args:
            setting: Its setting.
            cut: Number of units per stage.
            stages: Per stage, the way of recomputation and the strategies of its layers, in the order of the stage's graph.
        """
        first, choices = 0, []
        ways = {recompute for recompute, _ in stages}
        common = recomputed_inside(ways.pop()) if len(ways) == 1 else "none"
        workload = replace(self.workload, micro_batch=setting.micro_batch, recompute=common)
        for num_units, (recompute, strategies) in zip(cut, stages):
            # Equal stages share one table, so the keys of ``strategies`` may be the layers of another, equal stage.
            names = [layer.name for layer in self.chain.stage(first, first + num_units).graph.layers]
            choices.append(StageChoice(num_units, recompute, dict(zip(names, strategies.values()))))
            first += num_units
        return Configuration(setting.mesh, setting.schedule, workload, tuple(choices))

    def evaluation(self, configuration: Configuration) -> Evaluation:
        """Evaluate a configuration from the layer graph, independently of the shared tables."""
        return evaluate(self.chain, self.cluster, configuration)
