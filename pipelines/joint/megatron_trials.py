"""Trials of pipelines by Megatron's rule: whether one is faster than the plan without a pipeline, or fits where that does not.

Some plans of the family "Megatron + 1F1B" are worked out with all their figures, in the order of its authors' rule (Narayanan et
al., SC'21, takeaways 1 to 3): as few ways to split the model as memory allows; among these rather layers, inside nodes, than
stages; the rest of the devices are data parallel; small micro-batches.  Stages have equal shares of the model's FLOPs.  The
micro-batch of the best is then doubled while that is better.

The plans are members of the space of ``--pipeline auto``, so that a faster one says what the search of it finds at least.  That
none of them is faster says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import Deadline, Stop
from autoddl.costmodel.units import format_seconds
from autoddl.search.baselines import megatron
from autoddl.search.planner import InfeasibleError, Options, make_plan

from ..planners import Clock
from .configuration import Configuration, PipelineSchedule, StageChoice
from .evaluation import Evaluation, evaluate
from .families import PIPELINES, common_strategy, describe
from .job import PlanningJob, job_of
from .meshes import StageMesh, stage_meshes
from .partition import Chain
from .result import JointOptions, PlanResult, unpipelined

__all__ = ["NOTE", "megatron_trials", "plan_alone"]

#: How the note begins.
NOTE = "a pipeline takes "

#: Number of plans that are evaluated at most. It ends the trials, so that the same command prints the same on every machine.
_MAX_PLANS = 14
#: Seconds of processor time after which the trials end anyway: ten times what they took for 126 layers on 4,096 devices.
_LIMIT_S = 15.0
#: Passes of micro-batches through stages beyond which a plan takes too long to be worked out.
_MAX_PASSES = 4096
#: The part of a step that is worth a note.
_WORTH = 1e-3


def plan_alone(graph: LayerGraph, cluster: Cluster, options: Options, stop: Stop | None = None) -> PlanResult:
    """The best plan without a pipeline, as :func:`autoddl.search.planner.make_plan` finds it; if trials find a pipeline that is
    faster, a note says so.

    Raises:
        StopRequestedError, UserError: those of ``make_plan``.
        InfeasibleError: nothing fits the memory limit without a pipeline; its message says if something does with one.
    """
    stop = stop or Stop()
    try:
        planned = unpipelined(make_plan(graph, cluster, options, stop=stop))
    except InfeasibleError as fault:
        if _trials_of(graph, cluster, options, math.inf, stop) is None:
            raise
        raise InfeasibleError(f"{fault}; with a pipeline it fits: pipeline='auto'") from None
    found = _trials_of(graph, cluster, options, planned.evaluation.step_s, stop)
    # An interrupt means the plan that is there.
    if found is None or stop.is_requested:
        return planned
    return replace(planned, notes=(*planned.notes, _note(found, planned.evaluation.step_s)))


def _trials_of(graph: LayerGraph, cluster: Cluster, options: Options, known_s: float, stop: Stop) -> Evaluation | None:
    # Only steps are compared, and joint plans are searched by one method.
    if options.objective != "step" or options.method != "exact" or cluster.num_devices == 1:
        return None
    job = job_of(graph, cluster, JointOptions(options), stop=stop)
    limit_s = _LIMIT_S if options.time_limit_s is None else min(_LIMIT_S, options.time_limit_s)
    return megatron_trials(job, known_s, Clock(limit_s, stop))


def _note(found: Evaluation, step_s: float) -> str:
    less = 1 - found.step_s / step_s
    part = f"{less:.0%}" if less >= 0.1 else f"{less:.1%}"
    what = f"{PIPELINES[0].title}, {describe(found)}{common_strategy(found)}"
    return f"{NOTE}{format_seconds(found.step_s)}, {part} less, at least ({what}); pipeline='auto' searches all of them"


def megatron_trials(job: PlanningJob, known_s: float, deadline: Deadline) -> Evaluation | None:
    """The best of some plans with a pipeline, if it fits and is faster than ``known_s``; any that fits where that is infinite."""
    trials = _Trials(job, known_s, deadline)
    for layout in _layouts(job):
        if trials.is_over:
            break
        trials.add(layout, _first_size(job, layout))
    if job.options.base.micro_batch is None:
        while trials.has_doubled():
            pass
    return trials.best


# ---- Layouts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Equal workers, and the ways in which each splits the layers of its stage; the rest of its devices are data parallel."""

    mesh: StageMesh
    num_stages: int
    model_parallel: int

    @property
    def data_parallel(self) -> int:
        return self.mesh.num_devices // self.model_parallel


def _layouts(job: PlanningJob) -> Iterator[_Layout]:
    """Those whose parameters, gradients and optimizer states fit, in the order of the rule (see the module's docstring)."""
    cluster, found = job.cluster, []
    state = job.graph.num_parameters * job.workload.bytes_per_parameter
    for mesh in stage_meshes(cluster):
        depth = mesh.num_workers(cluster)
        is_compact = mesh.nodes == 1 or mesh.devices_per_node == cluster.devices_per_node
        if not (is_compact and 2 <= depth <= job.chain.num_units):
            continue
        for ways in divisors(mesh.devices(cluster).level_sizes[-1]):
            if state <= job.limit_bytes * depth * ways:
                found.append(_Layout(mesh, depth, ways))
    yield from sorted(found, key=lambda one: (one.num_stages * one.model_parallel, -one.model_parallel))


def _first_size(job: PlanningJob, layout: _Layout) -> int:
    """The micro-batch to begin with: a sample for each replica, or as many as keep the passes few; 0 where there is none."""
    batch, given = job.workload.batch, job.options.base.micro_batch
    sizes = divisors(batch) if given is None else [given]
    fitting = (
        size
        for size in sizes
        if size % layout.data_parallel == 0 and layout.num_stages * (batch // size) <= _MAX_PASSES
    )
    return next(fitting, 0)


def _level_cut(chain: Chain, num_stages: int) -> list[int]:
    """Units per stage, at least one: each cut is where the part of the FLOPs before it is nearest to its share.

    Units of 3, 1, 1, 3 FLOPs in 2 stages are cut behind the second one, where 4 of 8 are done.
    """
    done = np.cumsum([sum(layer.flops for layer in chain.layers(unit, unit + 1)) for unit in range(chain.num_units)])
    cuts = [0]
    for stage in range(1, num_stages):
        first, last = cuts[-1] + 1, chain.num_units - (num_stages - stage)
        misses = np.abs(done[first - 1 : last] - done[-1] * stage / num_stages)
        cuts.append(first + int(misses.argmin()))
    return [stop - start for start, stop in zip(cuts, [*cuts[1:], chain.num_units])]


# ---- Trials ------------------------------------------------------------------------------------------------------------


class _Trials:
    """Plans that are worked out, one after the other, and the best of them."""

    def __init__(self, job: PlanningJob, known_s: float, deadline: Deadline):
        self.job, self.deadline = job, deadline
        self.best: Evaluation | None = None
        self._limit_s = known_s * (1 - _WORTH)
        self._where: tuple[_Layout, int] | None = None
        self._left = _MAX_PLANS
        self._takes_any = known_s == math.inf

    @property
    def is_over(self) -> bool:
        """Whether to end: with what was looked for, or without it."""
        return self.deadline.is_over or self._left <= 0 or (self._takes_any and self.best is not None)

    def add(self, layout: _Layout, size: int) -> None:
        """Work out the plan of a layout and a micro-batch, with the first way to recompute that makes it fit."""
        if not size or self._ideal_s(layout, size) >= self._limit_s:
            return
        for way in self.job.recomputations:
            if self.is_over:
                return
            self._left -= 1
            try:
                found = evaluate(self.job.chain, self.job.cluster, self._configuration(layout, size, way))
            except UserError:  # a layer does not divide like this
                return
            if found.memory_bytes <= self.job.limit_bytes:
                if found.step_s < self._limit_s:
                    self.best, self._limit_s, self._where = found, found.step_s, (layout, size)
                return

    def has_doubled(self) -> bool:
        """Whether the best plan is better with twice its micro-batch; then that one is the best."""
        if self._where is None or self.is_over:
            return False
        (layout, size), before = self._where, self.best
        if self.job.workload.batch % (2 * size) == 0:
            self.add(layout, 2 * size)
        return self.best is not before

    def _ideal_s(self, layout: _Layout, size: int) -> float:
        """What the products and the bubble take: the forward pass and twice as much back, over N + D - 1 of N micro-batches."""
        job, count = self.job, self.job.workload.batch // size
        device = job.cluster.device
        speed = job.cluster.num_devices * device.peak_flops[job.workload.precision] * device.efficiency
        return 3 * job.graph.flops * job.workload.batch / speed * (1 + (layout.num_stages - 1) / count)

    def _configuration(self, layout: _Layout, size: int, way: str) -> Configuration:
        job, inner = self.job, layout.mesh.devices(self.job.cluster).level_sizes
        mesh = (*((outer, 1) for outer in inner[:-1]), (inner[-1] // layout.model_parallel, layout.model_parallel))
        workload = replace(job.workload, micro_batch=size, recompute=way == "layers")
        depth, first, stages = layout.num_stages, 0, []
        for units in _level_cut(job.chain, depth):
            graph = job.chain.stage(first, first + units).graph
            stages.append(StageChoice(units, way, megatron(graph, mesh).strategies))
            first += units
        spec = PipelineSchedule("1f1b", depth, workload.num_micro_batches, (("policy", "A"),))
        return Configuration(layout.mesh, spec, workload, tuple(stages))
