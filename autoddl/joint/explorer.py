"""What the joint search knows of its settings and cuts: bounds, memory, interiors of stages, the simulated step.

A *setting* is a division of the devices, a schedule and a micro-batch; with a *cut* its stages are known, and with their
interiors it is a configuration.  Every stage is looked at on the mesh of its worker; what is found out of a mesh is shared by all
settings that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators import GeneratorError
from autoddl.pipelines.schedule import Schedule
from autoddl.pipelines.simulator import simulate

from .between import boundary_of, own_gradient_bytes, replicated_all_reduce_s, shared_seconds
from .bounds import bound_class, bounds_of_cuts, bounds_under_limit, micro_batches_of, sums_of_cuts
from .configuration import RECOMPUTATIONS, Configuration, PipelineSchedule, StageChoice, widths_of
from .cutting import ENTRY, Chain
from .evaluation import Evaluation, evaluate, step_of, times_of
from .interiors import Interior, Interiors, Need
from .meshes import Meshes, StageMesh, all_meshes, stage_meshes
from .needs import Needs, needs_of
from .space import cuts, divisors, schedules
from .units import Units

__all__ = ["SAME", "Explorer", "Setting"]

#: Steps that differ by less, relative, are the same.
SAME = 1e-9
#: Prices of a byte that bounds are taken at, in best steps per limit.
_PRICES = (0.2, 0.5, 0.05, 1.0, 2.0)


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
    def rows(self) -> tuple[tuple[StageMesh, int], ...]:
        """Of every stage, its rectangle and how often it is gone back through."""
        return tuple((mesh, self.schedule.backward_passes(stage)) for stage, mesh in enumerate(self.meshes))

    @cached_property
    def widths(self) -> tuple[int, ...] | None:
        """Devices of every stage; None where all have as many."""
        return None if isinstance(self.mesh, StageMesh) else tuple(mesh.num_devices for mesh in self.meshes)

    def cuts(self, num_units: int) -> np.ndarray:
        """The cuts of the space."""
        return cuts(num_units, self.schedule.num_stages, self.widths)


class _Timed(NamedTuple):
    """Seconds of a stage under its schedule."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    recompute_s: float
    all_reduce_s: float


class Explorer:
    """Searches of one model on one cluster; what they find out of stages is shared.

    Args:
        workload: batch, precision and optimizer.
        limit_bytes: memory per device.
        recomputations: the ways that are allowed.
        make_interiors: how stages are searched; by default exactly.
        like: another explorer of the same model, cluster and workload, whose tables this one may share.
        stop: when it is requested, what is being worked out is given up by StopRequestedError; what is known stays.
    """

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        workload: Workload,
        limit_bytes: float,
        recomputations: tuple[str, ...] = RECOMPUTATIONS,
        make_interiors: Callable[..., Interiors] = Interiors,
        like: Explorer | None = None,
        stop: Stop | None = None,
    ):
        self.stop = stop or Stop()
        self.chain, self.cluster, self.workload = chain, cluster, workload
        self.limit_bytes, self.recomputations = limit_bytes, recomputations
        self._make, self._like = make_interiors, like
        self._interiors: dict[StageMesh, Interiors] = {}
        self._units: dict[StageMesh, Units] = like._units if like else {}
        self._bounds: dict[object, np.ndarray | None] = {}
        self._needs: dict[PipelineSchedule, Needs | None] = {}

    @property
    def num_searches(self) -> int:
        """Exact searches of a stage so far."""
        return sum(one.num_searches for one in self._interiors.values())

    def interiors(self, mesh: StageMesh) -> Interiors:
        if mesh not in self._interiors:
            like = None if self._like is None else self._like.interiors(mesh)
            self._interiors[mesh] = self._make(self.chain, mesh, self.cluster, self.workload, like, self.stop)
        return self._interiors[mesh]

    def units(self, mesh: StageMesh) -> Units:
        if mesh not in self._units:
            self._units[mesh] = Units(self.chain, self.interiors(mesh))
        return self._units[mesh]

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
                    if allowed(spec):
                        yield Setting(mesh, spec, size)

    def needs(self, setting: Setting) -> Needs | None:
        """What a setting's schedule asks of stages; None where there is no such schedule for its numbers."""
        if setting.schedule not in self._needs:
            try:
                self._needs[setting.schedule] = needs_of(setting.schedule)
            except GeneratorError:
                self._needs[setting.schedule] = None
        return self._needs[setting.schedule]

    # ----------------------------------------------------------------------------------------------------------- cuts

    def bounds_of_cuts(self, setting: Setting) -> np.ndarray | None:
        """What each of the setting's cuts takes at least; None where some layer has no strategy at all."""
        # Settings of one class come after one another, so that it is enough to remember the last one's.
        key = (setting.mesh, setting.micro_batch, bound_class(setting.schedule))
        if key not in self._bounds:
            self._bounds = {key: self._bounds_of_cuts(setting)}
        return self._bounds[key]

    def _bounds_of_cuts(self, setting: Setting) -> np.ndarray | None:
        spec, sums, busy = setting.schedule, {}, None
        rows = setting.cuts(self.chain.num_units)
        for part in set(micro_batches_of(spec.num_workers, spec.num_micro_batches, spec.num_pipelines)):
            of_stages = self._unit_costs(setting, part)
            if of_stages is None:
                return None
            sums[part] = sums_of_cuts(rows, [whole for _, whole in of_stages])
            busy = [one for one, _ in of_stages]
        assert busy is not None
        of = bound_class(spec)
        return bounds_of_cuts(sums_of_cuts(rows, busy), sums, spec.num_micro_batches, spec.num_workers, of)

    def _unit_costs(self, setting: Setting, count: int) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Per stage what all units would take there, without and with their all-reduces."""
        known: dict[tuple[StageMesh, int], tuple[np.ndarray, np.ndarray] | None] = {}
        for key in dict.fromkeys(setting.rows):
            self.stop.check()
            try:
                known[key] = self.units(key[0]).costs(setting.micro_batch, count, key[1])
            except UserError:  # some layer has no strategy at all on this mesh
                known[key] = None
            if known[key] is None:
                return None
        return [costs for costs in map(known.__getitem__, setting.rows) if costs is not None]

    def open_cuts(self, setting: Setting, best_s: float, one_cut: bool) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(bound, cut) of those that may fit and be better; with ``one_cut`` that of the least bound alone."""
        known = self.bounds_of_cuts(setting)
        if known is None or self.needs(setting) is None:
            return
        bounds = known.copy()
        rows = setting.cuts(self.chain.num_units)
        open_ones = np.flatnonzero(bounds < best_s * (1 - SAME))
        open_ones = open_ones[self._least_memory(setting, rows[open_ones]) <= self.limit_bytes]
        if not one_cut:
            open_ones = self._open_under_the_limit(setting, rows, open_ones, bounds, best_s)
        else:
            open_ones = open_ones[np.argsort(bounds[open_ones], kind="stable")[:1]]
        for index in open_ones.tolist():
            yield float(bounds[index]), tuple(rows[index].tolist())

    def _open_under_the_limit(
        self, setting: Setting, rows: np.ndarray, open_ones: np.ndarray, bounds: np.ndarray, best_s: float
    ) -> np.ndarray:
        """Which of the open cuts might still be better when memory has its price; raises their bounds."""
        spec, needs = setting.schedule, self.needs(setting)
        if not math.isfinite(best_s) or not spec.synchronous or not len(open_ones):
            return open_ones
        assert needs is not None
        costs = self._unit_costs(setting, 1)
        assert costs is not None
        for share in _PRICES:
            self.stop.check()
            mine = rows[open_ones]
            found = bounds_under_limit(
                mine,
                spec,
                [self.units(mesh) for mesh in setting.meshes],
                setting.micro_batch,
                list(zip(needs.in_flight, needs.versions)),
                needs.homes,
                self.recomputations,
                self.limit_bytes,
                share * best_s / self.limit_bytes,
                sums_of_cuts(mine, [busy for busy, _ in costs]),
            )
            bounds[open_ones] = np.maximum(bounds[open_ones], found)
            open_ones = open_ones[bounds[open_ones] < best_s * (1 - SAME)]
            if not len(open_ones):
                break
        return open_ones

    def least_memory(self, setting: Setting) -> np.ndarray | None:
        """The bytes that the fullest worker of each of the setting's cuts needs at least; None where no plan has the setting."""
        if self.bounds_of_cuts(setting) is None or self.needs(setting) is None:
            return None
        return self._least_memory(setting, setting.cuts(self.chain.num_units))

    def _least_memory(self, setting: Setting, rows: np.ndarray) -> np.ndarray:
        needs = self.needs(setting)
        assert needs is not None
        stops = np.cumsum(rows, axis=1)
        starts = stops - rows
        stages = [
            self.units(mesh).memory(
                starts[:, s],
                stops[:, s],
                setting.micro_batch,
                needs.in_flight[s],
                needs.versions[s],
                self.recomputations,
            )
            for s, mesh in enumerate(setting.meshes)
        ]
        workers = [np.sum([stages[stage] for _, stage in homes], axis=0) for homes in needs.homes]
        return np.max(workers, axis=0, initial=0.0) if workers else np.zeros(len(rows))

    # ---------------------------------------------------------------------------------------------------------- stages

    def stages(self, setting: Setting, cut: Sequence[int], cutoff: float = math.inf) -> tuple[Interior, ...] | None:
        """How the stages of a cut are run; None where one does not fit, or takes ``cutoff`` seconds or more by itself."""
        needs = self.needs(setting)
        assert needs is not None
        bounds = _bounds(cut)
        if any(len(homes) > 1 for homes in needs.homes):
            best = self.best_free(setting, cut)
            if best is None or self._fit_together(best, needs):
                return best
            # The objective of a stage that several workers share the micro-batches of is more than its part of the step.
            cutoff *= setting.schedule.num_pipelines
        budgets = [self.limit_bytes] * len(cut)
        for homes in needs.homes:
            for _, stage in homes:
                budgets[stage] = min(budgets[stage], self.limit_bytes / len(homes))
        of_stage = [Need(*row) for row in zip(needs.in_flight, needs.versions, budgets)]
        most: dict[object, Need] = {}
        shapes = [(mesh, self.chain.shape(*ends)) for mesh, ends in zip(setting.meshes, bounds)]
        for shape, need in zip(shapes, of_stage):
            other = most.get(shape, need)
            most[shape] = Need(
                max(need.in_flight, other.in_flight),
                max(need.versions, other.versions),
                min(need.budget_bytes, other.budget_bytes),
            )
        size, again = setting.micro_batch, self.recomputations
        of_mesh = [self.interiors(mesh) for mesh in setting.meshes]
        if any(
            interiors.is_hopeless(*ends, size, most[shape], again, cutoff)
            for interiors, ends, shape in zip(of_mesh, bounds, shapes)
        ):
            return None
        chosen = []
        for interiors, ends, shape, need in zip(of_mesh, bounds, shapes, of_stage):
            one = interiors.choose(*ends, size, need, most[shape], again, cutoff)
            if one is None:
                return None
            chosen.append(one)
        return tuple(chosen)

    def best_free(self, setting: Setting, cut: Sequence[int]) -> tuple[Interior, ...] | None:
        """Every stage's best without regard to memory: with as little recomputation as is allowed."""
        found = []
        for mesh, ends in zip(setting.meshes, _bounds(cut)):
            free = [self.interiors(mesh).free(*ends, recompute, setting.micro_batch) for recompute in self._cheapest]
            offered = [one for one in free if one is not None]
            if not offered:
                return None
            found.append(min(offered, key=lambda one: one.cost))
        return tuple(found)

    @property
    def _cheapest(self) -> tuple[str, ...]:
        """Nothing costs less than no recomputation."""
        return ("none",) if "none" in self.recomputations else self.recomputations

    def _fit_together(self, stages: Sequence[Interior], needs: Needs) -> bool:
        for homes in needs.homes:
            total = buffer = 0.0
            for _, stage in homes:
                need = Need(needs.in_flight[stage], needs.versions[stage], 0.0)
                total += stages[stage].memory(need) - stages[stage].buffer_bytes
                buffer = max(buffer, stages[stage].buffer_bytes)
            if total + buffer > self.limit_bytes:
                return False
        return True

    # -------------------------------------------------------------------------------------------------- configurations

    def configuration(self, setting: Setting, cut: Sequence[int], stages: Sequence[Interior]) -> Configuration:
        """A cut's stages by name."""
        choices = []
        recompute = all(one.recompute == "layers" for one in stages)
        workload = Workload(
            self.workload.batch, setting.micro_batch, self.workload.precision, self.workload.optimizer, recompute
        )
        for (first, stop), one in zip(_bounds(cut), stages):
            names = [layer.name for layer in self.chain.layers(first, stop)]
            if first:
                names.insert(0, ENTRY)
            choices.append(StageChoice(stop - first, one.recompute, dict(zip(names, one.strategies))))
        return Configuration(setting.mesh, setting.schedule, workload, tuple(choices))

    def simulated(self, setting: Setting, cut: Sequence[int], stages: Sequence[Interior]) -> float | None:
        """The step of a cut, by simulation of its schedule; None where the schedule's halves do not divide.

        The same as ``evaluation(...).step_s``, from what is known of the stages already.
        """
        spec, mesh, cluster = setting.schedule, setting.mesh, self.cluster
        if spec.halves_backwards:
            half, odd = divmod(setting.micro_batch, 2)
            if odd or any(half % strategy.p0 for one in stages for strategy in one.strategies):
                return None
        workload = replace(self.workload, micro_batch=setting.micro_batch)
        schedule = spec.schedule(widths_of(mesh), tuple(one.recompute == "stage" for one in stages))
        graphs = [self.interiors(one).tables.graph(*ends) for one, ends in zip(setting.meshes, _bounds(cut))]
        boundaries = [
            boundary_of(mesh, cluster, schedule, b, graph.exit, here.strategies[-1], there.strategies[0], workload)
            for b, (graph, here, there) in enumerate(zip(graphs, stages, stages[1:]))
        ]
        shares = {share.layer.name: share for one in stages for share in one.shares}
        stage_of = {name: s for s, graph in enumerate(graphs) for pair in graph.shared for name in pair[:1]}
        shared = shared_seconds(mesh, cluster, schedule, graphs, stage_of, shares, workload)
        timed = [
            _Timed(
                one.forward_s,
                spec.backward_passes(s) * one.backward_s,
                spec.input_passes(s) * one.backward_s,
                one.recompute_s,
                self._all_reduce_s(setting, schedule, s, one) + shared.get(s, 0.0),
            )
            for s, one in enumerate(stages)
        ]
        return step_of(spec, simulate(schedule, times_of(timed, boundaries)))

    def _all_reduce_s(self, setting: Setting, schedule: Schedule, stage: int, one: Interior) -> float:
        workers = tuple(replica.worker for replica in schedule.replicas_of(stage))
        if len(workers) == 1:
            return one.all_reduce_s
        link = setting.mesh.link_between(self.cluster, workers)
        devices = setting.meshes[stage].devices(self.cluster)
        return sum(
            share.count
            * replicated_all_reduce_s(share, len(workers), link, devices, own_gradient_bytes(share, self.workload))
            for share in one.shares
        )

    def evaluation(self, setting: Setting, cut: Sequence[int], stages: Sequence[Interior]) -> Evaluation:
        """A cut with all its figures, straight from the layer graph."""
        return evaluate(self.chain, self.cluster, self.configuration(setting, cut, stages))


def _bounds(cut: Sequence[int]) -> list[tuple[int, int]]:
    stops = np.cumsum(cut).tolist()
    return list(zip([0, *stops[:-1]], stops))
