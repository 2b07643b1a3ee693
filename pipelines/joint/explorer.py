"""What the joint search knows of its settings, and shares between them: stages by rectangle, graphs and long paths by schedule.

A *setting* is a division of the devices, a schedule and a micro-batch; with a *cut* its stages are known, and with a way to run
each of these it is a configuration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..generators import GeneratorError
from ..periods import Insertions, insertions
from ..stepgraph import StepGraph
from .boundary import least_crossing_s
from .bounds import homes, placement_of
from .configuration import RECOMPUTATIONS, Configuration, PipelineSchedule, StageChoice, widths_of
from .evaluation import Evaluation, evaluate
from .memory_demand import MemoryDemand, memory_demand_of
from .meshes import Meshes, StageMesh, all_meshes, stage_meshes
from .partition import Chain
from .space import schedules
from .stage_cost import Pricing, Replicas
from .stage_search import MakeStages, Passes, StageSearch

__all__ = ["SAME", "Explorer", "Setting"]

#: Steps that differ by less, relative, are the same.
SAME = 1e-9
#: Graphs of schedules that are kept; one of 10,000 tasks takes about a MiB.
_MAX_GRAPHS = 96
#: Passes of a micro-batch through a stage from which on a schedule is looked at in short first.
_LONG = 2000
#: Long paths of a schedule that are tried on other settings that have it.
_MAX_PATHS = 12


@dataclass(frozen=True)
class Setting:
    """The devices of the workers, a schedule (with it the number of micro-batches) and a micro-batch."""

    mesh: Meshes
    schedule: PipelineSchedule
    micro_batch: int

    @cached_property
    def meshes(self) -> tuple[StageMesh, ...]:
        """Of every stage, the rectangle of its worker."""
        spec = self.schedule
        return tuple(self.mesh.mesh_of(spec.worker_of(stage)) for stage in range(spec.num_stages))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Of every stage, the devices of its worker."""
        return tuple(mesh.num_devices for mesh in self.meshes)

    @cached_property
    def part(self) -> int:
        """The samples of the smallest pass; 0 where a micro-batch cannot be halved as the schedule wants."""
        if not self.schedule.halves_backwards:
            return self.micro_batch
        return 0 if self.micro_batch % 2 else self.micro_batch // 2


@dataclass(eq=False)
class ScheduleGraph:
    """A schedule: its graph, and long paths that were met.

    Tasks that run forward passes again take no time where a stage is not recomputed, and change nothing then.

    Attributes:
        graph: None of an asynchronous one, whose period is no longest path.
        paths: how often each passes through every term (:class:`autoddl.pipelines.stepgraph.Terms`), the latest first.
    """

    graph: StepGraph | None
    paths: list[np.ndarray] = field(default_factory=list)

    def remember(self, path: np.ndarray) -> None:
        """Keep a path for other settings of this schedule."""
        if not any(np.array_equal(path, other) for other in self.paths):
            self.paths.insert(0, path)
            del self.paths[_MAX_PATHS:]


class Explorer:
    """Searches of one model on one cluster; what they find out of stages is shared.

    Args:
        workload: batch, precision and optimizer.
        limit_bytes: memory per device.
        recomputations: the ways that are allowed.
        pricing: what stages are priced for.
        make_stages: how stages are run; by default at any strategies.
        share_with: another explorer of the same model, cluster, workload and pricing, whose tables this one may share.
        stop: when it is requested, what is being worked out is given up by StopRequestedError; what is known stays.
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
        self.stop = stop or Stop()
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

    @property
    def num_searches(self) -> int:
        """Fronts of stages so far."""
        return sum(one.num_searches for one in self._stages.values())

    def stages(self, mesh: StageMesh) -> StageSearch:
        """Of one rectangle."""
        if mesh not in self._stages:
            share_with = None if self._share_with is None else self._share_with.stages(mesh)
            self._stages[mesh] = self._make(
                self.chain, mesh, self.cluster, self.workload, self.pricing, share_with, self.stop
            )
        return self._stages[mesh]

    # ------------------------------------------------------------------------------------------------------- settings

    def settings(
        self, micro_batch: int | None, stale: bool, allowed: Callable[[PipelineSchedule], bool], uneven: bool = True
    ) -> Iterator[Setting]:
        """All settings of the space, those of equal workers first; without ``uneven`` these alone."""
        # The copies of a shared weight would be updated at different times.
        stale = stale and not self.chain.shares_weights
        for mesh in all_meshes(self.cluster) if uneven else stage_meshes(self.cluster):
            depth, equal = mesh.num_workers(self.cluster), isinstance(mesh, StageMesh)
            if depth > self.chain.num_units:
                continue
            for size in divisors(self.workload.batch) if micro_batch is None else [micro_batch]:
                for spec in schedules(depth, self.workload.batch // size, self.chain.num_units, stale, equal):
                    setting = Setting(mesh, spec, size)
                    if setting.part and allowed(spec):
                        yield setting

    def demand(self, spec: PipelineSchedule) -> MemoryDemand | None:
        """What a schedule asks of stages; None where there is no such schedule for its numbers."""
        if spec not in self._demands:
            try:
                self._demands[spec] = memory_demand_of(spec)
            except GeneratorError:
                self._demands[spec] = None
        return self._demands[spec]

    def schedule_graph(self, setting: Setting) -> ScheduleGraph:
        """The schedule of a setting, with tasks that run the forward passes of stages again where that is on offer."""
        return self._kept(("whole", *self._schedule_key(setting)), lambda: self._schedule_graph(setting, None))

    def condensed_graph(self, setting: Setting) -> ScheduleGraph | None:
        """A short schedule whose steps are lower bounds of a long one's (:mod:`autoddl.pipelines.periods`); None where the schedule
        is short itself, or does not repeat itself."""
        spec = setting.schedule
        if not spec.synchronous or spec.num_stages * spec.num_micro_batches < _LONG:
            return None
        for least in (spec.num_workers, 2 * spec.num_workers):
            period = spec.num_workers * (2 if dict(spec.options).get("concatenation") == "doubling" else 1)
            count = least + (spec.num_micro_batches - least) % period
            if 2 * count > spec.num_micro_batches:
                break
            short = replace(setting, schedule=replace(spec, num_micro_batches=count))
            key = ("condensed", spec.num_micro_batches, *self._schedule_key(short))
            times = (spec.num_micro_batches - count) // period
            try:
                found = self._kept(key, partial(self._condensed, short, period, times))
            except GeneratorError:
                continue
            if found.graph is not None:
                return found
        return None

    def _condensed(self, short: Setting, period: int, times: int) -> ScheduleGraph:
        """A short schedule with what it does for so many micro-batches added so often."""
        spec, alike, again = self._schedule_key(short)

        def added_once() -> ScheduleGraph:
            longer = replace(spec, num_micro_batches=spec.num_micro_batches + period)
            stages = (again,) * spec.num_stages
            added = insertions(spec.schedule(alike, stages), longer.schedule(alike, stages))
            return ScheduleGraph(None) if added is None else self._schedule_graph(short, added)

        once = self._kept(("added", *self._schedule_key(short)), added_once).graph
        return ScheduleGraph(None if once is None else once.with_repeated_insertions(times))

    def _schedule_graph(self, setting: Setting, added: Insertions | None) -> ScheduleGraph:
        spec, alike, again = self._schedule_key(setting)
        if not spec.synchronous:
            return ScheduleGraph(None)
        stages = range(spec.num_stages)
        schedule = spec.schedule(alike, (again,) * spec.num_stages)
        passes, before = [spec.backward_passes(s) for s in stages], [spec.input_passes(s) for s in stages]
        return ScheduleGraph(StepGraph(schedule, passes, before, added))

    def _schedule_key(self, setting: Setting) -> tuple[PipelineSchedule, int | tuple[int, ...], bool]:
        """What a setting's schedule depends on."""
        return setting.schedule, self._alike(setting), "stage" in self.recomputations

    def _alike(self, setting: Setting) -> int | tuple[int, ...]:
        """Which stages have replicas, which is all that counts of the numbers of devices."""
        widths = widths_of(setting.mesh)
        return min(widths, 2) if isinstance(widths, int) else tuple(min(width, 2) for width in widths)

    def _kept(self, key: object, make: Callable[[], ScheduleGraph]) -> ScheduleGraph:
        """A graph that was made before, or is made now; those that were not asked for for the longest time are forgotten."""
        if key not in self._schedule_graphs:
            self._schedule_graphs[key] = make()
            while len(self._schedule_graphs) > _MAX_GRAPHS:
                self._schedule_graphs.popitem(last=False)
        self._schedule_graphs.move_to_end(key)
        return self._schedule_graphs[key]

    def passes(self, setting: Setting) -> tuple[Passes, ...]:
        """What goes through every stage, and who holds it."""
        spec = setting.schedule
        if spec.num_pipelines == 1:
            return (Passes(setting.micro_batch, setting.part, Replicas()),) * spec.num_stages
        key = (setting.mesh, spec.num_pipelines)
        if key not in self._replicas:
            holders: list[list[int]] = [[] for _ in range(spec.num_stages)]
            for worker, held in enumerate(homes(spec.num_workers, spec.groups, spec.num_pipelines)):
                for _, stage in held:
                    holders[stage].append(worker)
            self._replicas[key] = tuple(
                Replicas(len(workers), setting.mesh.share_nodes(self.cluster, tuple(workers))) for workers in holders
            )
        return tuple(Passes(setting.micro_batch, setting.part, replicas) for replicas in self._replicas[key])

    def least_transfers(self, setting: Setting) -> np.ndarray:
        """The least seconds of every boundary where the stage behind it begins with a unit; shape (stages - 1, units + 1)."""
        spec = setting.schedule
        placement = placement_of(spec.num_workers, spec.groups, spec.num_pipelines)
        key = (setting.mesh, setting.micro_batch, spec.groups, spec.num_pipelines)
        if key not in self._transfers:
            nbytes = setting.micro_batch * self.workload.itemsize * self.chain.entering
            found = np.zeros((spec.num_stages - 1, self.chain.num_units + 1))
            known: dict[object, np.ndarray] = {}
            for b, ends in enumerate(zip(setting.meshes, setting.meshes[1:])):
                together = all(
                    setting.mesh.share_nodes(self.cluster, (workers[b], workers[b + 1])) for workers in placement
                )
                if (ends, together) not in known:
                    known[ends, together] = least_crossing_s(ends, self.cluster, together, nbytes)
                found[b] = known[ends, together]
            self._transfers[key] = found
        return self._transfers[key]

    # -------------------------------------------------------------------------------------------------- configurations

    def configuration(
        self, setting: Setting, cut: Sequence[int], stages: Sequence[tuple[str, Mapping[str, Strategy]]]
    ) -> Configuration:
        """A cut with a way to run each of its stages: way of recomputation, strategies in the order of the stage's graph."""
        first, choices = 0, []
        workload = Workload(
            self.workload.batch,
            setting.micro_batch,
            self.workload.precision,
            self.workload.optimizer,
            all(way == "layers" for way, _ in stages),
        )
        for units, (way, strategies) in zip(cut, stages):
            # Stages of one shape share a table: the names are those of the first of them.
            names = [layer.name for layer in self.chain.stage(first, first + units).graph.layers]
            choices.append(StageChoice(units, way, dict(zip(names, strategies.values()))))
            first += units
        return Configuration(setting.mesh, setting.schedule, workload, tuple(choices))

    def evaluation(self, configuration: Configuration) -> Evaluation:
        """A configuration with all its figures, straight from the layer graph."""
        return evaluate(self.chain, self.cluster, configuration)
