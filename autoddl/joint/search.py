"""The joint search: best first over settings and cuts, by the bounds of :mod:`.bounds`, until no open one can be better.

1.  *Settings* (mesh, schedule, micro-batch) are bounded over all their cuts, from the cheapest strategies of single layers.
2.  A setting that is taken up is split in its *cuts*.
3.  A cut that is taken up has its stages searched (:mod:`.interiors`), under the memory that its schedule leaves each, and is
   bounded anew with what they really take.
4.  If that is still below the best plan, the schedule is simulated: its makespan is the configuration's step.

Whatever is left open when the bounds reach the best plan is worse, so the plan is optimal over the space of :mod:`.space`
with the stages' interiors of :mod:`.interiors`.  If the time limit comes first, the least open bound says how far it can be
from that.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators import GeneratorError
from autoddl.pipelines.schedule import Schedule
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times

from .bounds import UnitCosts, UnitDuals, UnitMemory, bound_class, bounds_of_cuts, micro_batches_of, refined_bound
from .configuration import RECOMPUTATIONS, Configuration, PipelineSchedule, StageChoice
from .cutting import ENTRY, Chain
from .evaluation import (
    Evaluation,
    boundary_of,
    evaluate,
    own_gradient_bytes,
    replicated_all_reduce_s,
    shared_seconds,
    step_of,
)
from .interiors import Interior, Interiors, Need
from .meshes import StageMesh, stage_meshes
from .needs import Needs, needs_of
from .space import cuts, divisors, num_cuts, schedules

__all__ = ["Explored", "Explorer", "Setting"]

_SAME = 1e-9
#: Prices of a byte that bounds are taken at, in best steps per limit.
_PRICES = (0.2, 0.5, 0.05, 1.0, 2.0)


@dataclass(frozen=True)
class Setting:
    """A mesh, a schedule (with it the number of micro-batches) and a micro-batch."""

    mesh: StageMesh
    schedule: PipelineSchedule
    micro_batch: int


@dataclass(frozen=True, order=True)
class _Node:
    """A setting that is open, or a cut of it, or that with its stages searched without (``fits``: with) regard to memory."""

    bound: float
    serial: int
    setting: Setting = field(compare=False)
    cut: tuple[int, ...] | None = field(default=None, compare=False)
    stages: tuple[Interior, ...] | None = field(default=None, compare=False)
    fits: bool = field(default=False, compare=False)


@dataclass
class Explored:
    """What a search found and counted."""

    best: Evaluation | None = None
    lower_bound_s: float = math.inf
    configurations: int = 0
    settings: int = 0
    out_of_memory: int = 0
    simulated: int = 0
    opened: set[Setting] = field(default_factory=set)
    fitting: set[Setting] = field(default_factory=set)
    finished: bool = True

    @property
    def optimal(self) -> bool:
        return self.best is not None and self.lower_bound_s >= self.best.step_s * (1 - _SAME)


class Explorer:
    """Searches of one model on one cluster; what they find out of stages is shared.

    Args:
        workload: batch, precision and optimizer.
        limit_bytes: memory per device.
        recomputations: the ways that are allowed.
        make_interiors: how stages are searched; by default exactly.
        like: another explorer of the same model, cluster and workload, whose tables this one may share.
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
    ):
        self.chain, self.cluster, self.workload = chain, cluster, workload
        self.limit_bytes, self.recomputations = limit_bytes, recomputations
        self._make, self._like = make_interiors, like
        self._interiors: dict[StageMesh, Interiors] = {}
        self._units: dict[StageMesh, UnitCosts] = like._units if like else {}
        self._memory: dict[StageMesh, UnitMemory] = {}
        self._duals: dict[StageMesh, UnitDuals] = {}
        self._needs: dict[PipelineSchedule, Needs | None] = {}

    @property
    def num_searches(self) -> int:
        """Exact searches of a stage so far."""
        return sum(one.num_searches for one in self._interiors.values())

    def interiors(self, mesh: StageMesh) -> Interiors:
        if mesh not in self._interiors:
            like = None if self._like is None else self._like.interiors(mesh)
            self._interiors[mesh] = self._make(self.chain, mesh, self.cluster, self.workload, like)
        return self._interiors[mesh]

    def units(self, mesh: StageMesh) -> UnitCosts:
        if mesh not in self._units:
            self._units[mesh] = UnitCosts(self.chain, self.interiors(mesh))
        return self._units[mesh]

    def memory(self, mesh: StageMesh) -> UnitMemory:
        if mesh not in self._memory:
            self._memory[mesh] = UnitMemory(self.chain, self.interiors(mesh))
        return self._memory[mesh]

    # ------------------------------------------------------------------------------------------------------- settings

    def settings(
        self, micro_batch: int | None, stale: bool, allowed: Callable[[PipelineSchedule], bool]
    ) -> Iterator[Setting]:
        """All settings of the space."""
        batch, num_units = self.workload.batch, self.chain.num_units
        # The copies of a shared weight would be updated at different times.
        stale = stale and not self.chain.shares_weights
        for mesh in stage_meshes(self.cluster):
            depth = mesh.num_workers(self.cluster)
            if depth > num_units:
                continue
            for size in divisors(batch) if micro_batch is None else [micro_batch]:
                for spec in schedules(depth, batch // size, num_units, stale):
                    if allowed(spec):
                        yield Setting(mesh, spec, size)

    def needs(self, setting: Setting) -> Needs | None:
        """None where the schedule cannot be generated for these numbers."""
        spec = setting.schedule
        if spec not in self._needs:
            try:
                self._needs[spec] = needs_of(spec)
            except GeneratorError:
                self._needs[spec] = None
        return self._needs[spec]

    # --------------------------------------------------------------------------------------------------------- search

    def explore(
        self,
        settings: Iterable[Setting],
        known_s: float = math.inf,
        deadline: float = math.inf,
        one_cut: bool = False,
        report: Callable[[float, float, int], None] = lambda best, bound, simulated: None,
    ) -> Explored:
        """The best configuration of these settings, if one is better than ``known_s``.

        Args:
            deadline: of ``time.process_time``, so that a busy machine does not change what is found.
            one_cut: look at each setting's cut of least bound alone.
            report: told the best step, the least open bound and the number of simulations.
        """
        found = Explored()
        heap = [_Node(bound, serial, setting) for serial, (bound, setting) in enumerate(self._bounded(settings, found))]
        heapq.heapify(heap)
        serials = itertools.count(len(heap))
        best_s = known_s
        while heap and heap[0].bound < best_s * (1 - _SAME):
            if time.process_time() > deadline:
                found.finished = False
                break
            node = heapq.heappop(heap)
            if node.cut is None:
                found.opened.add(node.setting)
                for bound, cut in self._cuts(node.setting, best_s, one_cut):
                    heapq.heappush(heap, _Node(bound, next(serials), node.setting, cut))
                continue
            if node.stages is None:
                finer = self._searched(node, best_s)
                if finer is not None and finer.bound < best_s * (1 - _SAME):
                    found.fitting.add(node.setting)
                    heapq.heappush(heap, replace(finer, serial=next(serials)))
                continue
            if not node.fits:
                finer = self._fitted(node, best_s)
                if finer is not None and finer.bound < best_s * (1 - _SAME):
                    heapq.heappush(heap, replace(finer, serial=next(serials)))
                continue
            step = self.simulated(node.setting, node.cut, node.stages)
            if step is None:
                continue
            found.simulated += 1
            if step < best_s:
                evaluation = self.evaluation(node.setting, node.cut, node.stages)
                best_s, found.best = evaluation.step_s, evaluation
            report(best_s, node.bound, found.simulated)
        found.lower_bound_s = min(best_s, heap[0].bound if heap else math.inf)
        found.out_of_memory = len(found.opened - found.fitting)
        return found

    def _searched(self, node: _Node, best_s: float) -> _Node | None:
        """With the stages' best interiors without regard to memory, which bound those that fit."""
        assert node.cut is not None
        stages = self._best_free(node.setting, node.cut)
        needs = self.needs(node.setting)
        if stages is None or needs is None:
            return None
        bound = refined_bound(node.setting.schedule, stages, needs.in_flight)
        return replace(node, bound=max(node.bound, bound), stages=stages)

    def _fitted(self, node: _Node, best_s: float) -> _Node | None:
        """With interiors that fit; None where there are none, or none that could be better than the best plan."""
        assert node.cut is not None
        stages = self.stages(node.setting, node.cut, best_s)
        needs = self.needs(node.setting)
        if stages is None or needs is None:
            return None
        bound = refined_bound(node.setting.schedule, stages, needs.in_flight)
        return replace(node, bound=max(node.bound, bound), stages=stages, fits=True)

    def _bounded(self, settings: Iterable[Setting], found: Explored) -> Iterator[tuple[float, Setting]]:
        known: dict[tuple[StageMesh, int, tuple[str, int, int]], float] = {}
        for setting in settings:
            mesh, spec, size = setting.mesh, setting.schedule, setting.micro_batch
            found.settings += 1
            found.configurations += num_cuts(self.chain.num_units, spec.num_stages)
            key = (mesh, size, bound_class(spec))
            if key not in known:
                rows = self._cut_bounds(setting)
                known[key] = math.inf if rows is None or not len(rows) else float(rows.min())
            if known[key] < math.inf:
                yield known[key], setting

    def _cut_bounds(self, setting: Setting) -> np.ndarray | None:
        spec = setting.schedule
        depth, count = spec.num_workers, spec.num_micro_batches
        busy, wholes = None, {}
        for part in set(micro_batches_of(depth, count, spec.num_pipelines)):
            try:
                costs = self.units(setting.mesh).at(setting.micro_batch, part)
            except UserError:  # some layer has no strategy at all on this mesh
                return None
            if costs is None:
                return None
            busy, wholes[part] = costs
        assert busy is not None
        rows = cuts(self.chain.num_units, spec.num_stages)
        return bounds_of_cuts(rows, busy, wholes, count, depth, bound_class(spec))

    def _cuts(self, setting: Setting, best_s: float, one_cut: bool) -> Iterator[tuple[float, tuple[int, ...]]]:
        bounds = self._cut_bounds(setting)
        if bounds is None or self.needs(setting) is None:
            return
        rows = cuts(self.chain.num_units, setting.schedule.num_stages)
        open_ones = np.flatnonzero(bounds < best_s * (1 - _SAME))
        open_ones = open_ones[self._may_fit(setting, rows[open_ones])]
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
        counts = micro_batches_of(spec.num_workers, spec.num_micro_batches, spec.num_pipelines)
        costs = self.units(setting.mesh).at(setting.micro_batch, 1)
        assert costs is not None
        sums = np.concatenate([[0.0], np.cumsum(costs[0])])
        fills = bound_class(spec)[0] == "fill"
        for share in _PRICES:
            mine = rows[open_ones]
            found = self.duals(setting.mesh).bounds_of_cuts(
                mine,
                setting.micro_batch,
                counts,
                needs.homes,
                list(zip(needs.in_flight, needs.versions)),
                self.recomputations,
                self.limit_bytes,
                share * best_s / self.limit_bytes,
                sums[np.cumsum(mine, axis=1) - mine] if fills else None,
            )
            bounds[open_ones] = np.maximum(bounds[open_ones], found)
            open_ones = open_ones[bounds[open_ones] < best_s * (1 - _SAME)]
            if not len(open_ones):
                break
        return open_ones

    def duals(self, mesh: StageMesh) -> UnitDuals:
        if mesh not in self._duals:
            self._duals[mesh] = UnitDuals(self.chain, self.interiors(mesh), self.memory(mesh))
        return self._duals[mesh]

    def _may_fit(self, setting: Setting, rows: np.ndarray) -> np.ndarray:
        """Which of the cuts might fit in memory."""
        needs, memory = self.needs(setting), self.memory(setting.mesh)
        assert needs is not None
        stops = np.cumsum(rows, axis=1)
        starts = stops - rows
        stages = [
            memory.of_stage(
                starts[:, s],
                stops[:, s],
                setting.micro_batch,
                needs.in_flight[s],
                needs.versions[s],
                self.recomputations,
            )
            for s in range(rows.shape[1])
        ]
        fits = np.ones(len(rows), dtype=bool)
        for homes in needs.homes:
            fits &= sum(stages[stage] for _, stage in homes) <= self.limit_bytes
        return fits

    # ---------------------------------------------------------------------------------------------------------- stages

    def stages(self, setting: Setting, cut: Sequence[int], cutoff: float = math.inf) -> tuple[Interior, ...] | None:
        """How the stages of a cut are run; None where one does not fit, or takes ``cutoff`` seconds or more by itself."""
        needs = self.needs(setting)
        assert needs is not None
        interiors = self.interiors(setting.mesh)
        bounds = _bounds(cut)
        shared = any(len(homes) > 1 for homes in needs.homes)
        if shared:
            best = self._best_free(setting, cut)
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
        shapes = [self.chain.shape(*ends) for ends in bounds]
        for shape, need in zip(shapes, of_stage):
            other = most.get(shape, need)
            most[shape] = Need(
                max(need.in_flight, other.in_flight),
                max(need.versions, other.versions),
                min(need.budget_bytes, other.budget_bytes),
            )
        size, again = setting.micro_batch, self.recomputations
        if any(interiors.is_hopeless(*ends, size, most[shape], again, cutoff) for ends, shape in zip(bounds, shapes)):
            return None
        chosen = []
        for ends, shape, need in zip(bounds, shapes, of_stage):
            one = interiors.choose(*ends, size, need, most[shape], again, cutoff)
            if one is None:
                return None
            chosen.append(one)
        return tuple(chosen)

    def _best_free(self, setting: Setting, cut: Sequence[int]) -> tuple[Interior, ...] | None:
        """Every stage's best without regard to memory: with as little recomputation as is allowed."""
        interiors = self.interiors(setting.mesh)
        found = []
        for ends in _bounds(cut):
            free = [interiors.free(*ends, recompute, setting.micro_batch) for recompute in self._cheapest]
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
        if dict(spec.options).get("concatenation") == "halving":
            half, odd = divmod(setting.micro_batch, 2)
            if odd or any(half % strategy.p0 for one in stages for strategy in one.strategies):
                return None
        workload = replace(self.workload, micro_batch=setting.micro_batch)
        schedule = spec.schedule(mesh.num_devices, tuple(one.recompute == "stage" for one in stages))
        interiors = self.interiors(mesh)
        graphs = [interiors.graph(*ends) for ends in _bounds(cut)]
        boundaries = [
            boundary_of(mesh, cluster, schedule, b, graph.exit, here.strategies[-1], there.strategies[0], workload)
            for b, (graph, here, there) in enumerate(zip(graphs, stages, stages[1:]))
        ]
        shares = {share.layer.name: share for one in stages for share in one.shares}
        stage_of = {name: s for s, graph in enumerate(graphs) for pair in graph.shared for name in pair[:1]}
        shared = shared_seconds(mesh, cluster, schedule, graphs, stage_of, shares, workload)
        times = Times.of(
            len(stages),
            forward=[one.forward_s for one in stages],
            backward=[one.backward_s for one in stages],
            backward_input=[one.backward_input_s for one in stages],
            recompute=[one.recompute_s for one in stages],
            all_reduce=[
                self._all_reduce_s(setting, schedule, s, one) + shared.get(s, 0.0) for s, one in enumerate(stages)
            ],
            transfer=[boundary.forward_s for boundary in boundaries],
            transfer_backward=[boundary.backward_s for boundary in boundaries],
        )
        return step_of(spec, simulate(schedule, times))

    def _all_reduce_s(self, setting: Setting, schedule: Schedule, stage: int, one: Interior) -> float:
        workers = tuple(replica.worker for replica in schedule.replicas_of(stage))
        if len(workers) == 1:
            return one.all_reduce_s
        mesh = setting.mesh
        link, devices = mesh.link_between(self.cluster, workers), mesh.devices(self.cluster)
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
