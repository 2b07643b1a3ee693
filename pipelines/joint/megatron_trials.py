"""Trials of pipelines by Megatron's rule, to note that a pipeline is faster than the plan without one, or fits where that does not.

Some plans of the family "Megatron + 1F1B" are evaluated, in the order of the rule of Narayanan et al. (SC'21, takeaways 1 to 3):

1.  The model is split over as few devices as memory allows (tensor parallel degree x number of stages).
2.  Among equal splits, tensor parallelism inside nodes is preferred to stages.
3.  The rest of the devices are data parallel.
4.  Micro-batches are small.

Stages have equal shares of the model's FLOPs.  Finally the micro-batch of the best plan is doubled as long as that is faster.

The plans are members of the space of ``--pipeline auto``, so the step of a faster one is an upper bound on the step that the search
of that space finds.  If no trial is faster, there may still be a faster pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import Deadline, Stop
from autoddl.costmodel.units import format_seconds
from autoddl.search.baselines import divided, megatron
from autoddl.search.planner import InfeasibleError, Options, make_plan

from ..planners import Clock
from .configuration import Configuration, PipelineSchedule, StageChoice
from .evaluation import Evaluation, evaluate, evaluate_unpipelined
from .fewer_blocks import with_fewer_blocks
from .job import PlanningJob, job_of
from .meshes import StageMesh, stage_meshes
from .partition import Chain, chain_of
from .result import JointOptions, PlanResult, unpipelined
from .rivals import RIVAL_FAMILIES, describe, describe_common_strategy
from .space import SOME_BLOCKS
from .start import Start, start_note, start_problem

__all__ = ["NOTE", "megatron_trials", "plan_alone"]

#: The beginning of the note that a pipeline is faster.
NOTE = "a pipeline takes "

#: Largest number of evaluated plans.  A count ends the trials, so that the same command prints the same on every machine.
_MAX_PLANS = 14
#: Seconds of processor time after which the trials end anyway: ten times the time for 126 layers on 4,096 devices.
_LIMIT_S = 15.0
#: Largest number of passes of micro-batches through stages of an evaluated plan, which limits the time of its simulation.
_MAX_PASSES = 4096
#: Smallest relative improvement of the step that counts as faster.
_MIN_IMPROVEMENT = 1e-3


def plan_alone(
    graph: LayerGraph,
    cluster: Cluster,
    options: Options,
    stop: Stop | None = None,
    start: Start | None = None,
) -> PlanResult:
    """Plan without a pipeline, by :func:`autoddl.search.planner.make_plan`; add a note if trials find a faster pipeline.

    Args:
        graph: The model.
        cluster: The devices and their network.
        options: The options of the planner without pipelines.
        stop: Ends planning early with the best plan so far.
        start: A plan of the user, which is the first incumbent if it is in the space; else a note says why it is not.

    Raises:
        StopRequestedError: the stop was requested before any plan was known.
        InfeasibleError: no plan without a pipeline fits the memory limit; the message says whether a trial fits.
        UserError: an option is out of range.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> from autoddl.zoo import resolve_model
    >>> cluster = load_cluster("gcp-a100").resized(1, 2)
    >>> result = plan_alone(resolve_model("mlp:64,64"), cluster, Options(batch=8))
    >>> result.status, result.notes
    ('optimal', ())
    """
    stop = stop or Stop()
    outside = "" if start is None else start_problem(start, graph, cluster)
    if start is not None and start.has_pipeline:
        outside = outside or "it has a pipeline, which pipeline='auto' searches"
    try:
        first = None if start is None or outside else start.without_pipeline
        made = make_plan(graph, cluster, options, stop=stop, start=first)
        planned = unpipelined(made)
    except InfeasibleError as error:
        if _faster_pipeline(graph, cluster, options, math.inf, stop) is None:
            raise
        raise InfeasibleError(f"{error}; with a pipeline it fits: pipeline='auto'") from None
    if start is not None:
        planned = replace(planned, notes=(_start_note(planned, start, outside or made.start_fault), *planned.notes))
    pipeline = _faster_pipeline(graph, cluster, options, planned.evaluation.step_s, stop)
    # The trials of an interrupted run are incomplete: return the plan without their note.
    if pipeline is None or stop.is_requested:
        return planned
    return replace(planned, notes=(*planned.notes, _note(pipeline, planned.evaluation.step_s)))


def _start_note(planned: PlanResult, start: Start, fault: str) -> str:
    """The note on the plan of the user, with its step."""
    if fault:
        return start_note(start.name, fault, None)
    own, chosen = start.without_pipeline, planned.workload
    workload = replace(chosen, micro_batch=own.workload.micro_batch, recompute=own.workload.recompute)
    first = evaluate_unpipelined(chain_of(planned.graph), planned.cluster, workload, own.strategies)
    return start_note(start.name, "", first.step_s)


def _faster_pipeline(
    graph: LayerGraph, cluster: Cluster, options: Options, known_s: float, stop: Stop
) -> Evaluation | None:
    """The best trial, if it is faster than ``known_s``; None if the options exclude joint plans."""
    # Trials compare steps, and joint plans have only one method and one executor.
    if (
        options.objective != "step"
        or options.method != "exact"
        or options.executor != EAGER
        or cluster.num_devices == 1
    ):
        return None
    job = job_of(graph, cluster, JointOptions(options), stop=stop)
    limit_s = _LIMIT_S if options.time_limit_s is None else min(_LIMIT_S, options.time_limit_s)
    return megatron_trials(job, known_s, Clock(limit_s, stop))


def _note(pipeline: Evaluation, step_s: float) -> str:
    saving = 1 - pipeline.step_s / step_s
    percent = f"{saving:.0%}" if saving >= 0.1 else f"{saving:.1%}"
    plan = f"{RIVAL_FAMILIES[0].title}, {describe(pipeline)}{describe_common_strategy(pipeline)}"
    return f"{NOTE}{format_seconds(pipeline.step_s)}, {percent} less, at least ({plan}); pipeline='auto' searches all of them"


def megatron_trials(job: PlanningJob, known_s: float, deadline: Deadline) -> Evaluation | None:
    """Evaluate some pipelines by Megatron's rule.

    Args:
        job: The planning job.
        known_s: Step of the best plan known so far; infinite if none is known.
        deadline: When to end the trials with the best plan so far.

    Returns:
        The best plan that fits the memory limit and is faster than ``known_s``, or the first plan that fits if ``known_s`` is
        infinite; None if there is no such plan.
    """
    trials = _Trials(job, known_s, deadline)
    for layout in _layouts(job):
        if trials.is_over:
            break
        trials.add(layout, _first_micro_batch(job, layout))
    if job.options.base.micro_batch is None:
        while trials.double_micro_batch():
            pass
    return trials.best


# ---- Layouts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The split of the model over the devices: equal workers with one stage each, tensor parallel inside.

    Attributes:
        mesh: Devices of each worker.
        num_stages: Number of stages.
        model_parallel: Tensor parallel degree inside each worker; the rest of its devices are data parallel.
    """

    mesh: StageMesh
    num_stages: int
    model_parallel: int

    @property
    def data_parallel(self) -> int:
        """The data-parallel degree inside each worker."""
        return self.mesh.num_devices // self.model_parallel


def _layouts(job: PlanningJob) -> Iterator[_Layout]:
    """The layouts whose parameters, gradients and optimizer states fit, in the order of the rule (see the module's docstring)."""
    cluster, layouts = job.cluster, []
    each = job.workload.bytes_per_parameter
    if _divides_states(job):
        each -= job.workload.optimizer_bytes_per_parameter  # of these, each replica has a part
    state_bytes = job.graph.num_parameters * each
    for mesh in stage_meshes(cluster):
        depth = mesh.num_workers(cluster)
        is_compact = mesh.nodes == 1 or mesh.devices_per_node == cluster.devices_per_node
        if not (is_compact and 2 <= depth <= job.chain.num_units):
            continue
        for model_parallel in divisors(mesh.devices(cluster).level_sizes[-1]):
            if state_bytes <= job.limit_bytes * depth * model_parallel:
                layouts.append(_Layout(mesh, depth, model_parallel))
    yield from sorted(layouts, key=lambda layout: (layout.num_stages * layout.model_parallel, -layout.model_parallel))


def _divides_states(job: PlanningJob) -> bool:
    """Whether the replicas of a stage divide optimizer states (Megatron-LM's distributed optimizer)."""
    return 1 in job.pricing.choices.shardings


def _first_micro_batch(job: PlanningJob, layout: _Layout) -> int:
    """The smallest micro-batch that the data-parallel degree divides and whose schedule has few enough passes; 0 if none has."""
    batch, given = job.workload.batch, job.options.base.micro_batch
    for size in divisors(batch) if given is None else [given]:
        if size % layout.data_parallel == 0 and layout.num_stages * (batch // size) <= _MAX_PASSES:
            return size
    return 0


def _balanced_cut(chain: Chain, num_stages: int) -> list[int]:
    """Cut a model into stages of about equal FLOPs.

    The cut behind stage s of S is where the FLOPs before it are nearest to s / S of all FLOPs.  For example, units of 3, 1, 1, 3
    FLOPs are cut into 2 stages behind the second unit, with 4 of 8 FLOPs before the cut.

    Returns:
        Number of units per stage, at least one each.
    """
    flops_until = np.cumsum(
        [sum(layer.flops for layer in chain.layers(unit, unit + 1)) for unit in range(chain.num_units)]
    )
    cuts = [0]
    for stage in range(1, num_stages):
        first, last = cuts[-1] + 1, chain.num_units - (num_stages - stage)
        errors = np.abs(flops_until[first - 1 : last] - flops_until[-1] * stage / num_stages)
        cuts.append(first + int(errors.argmin()))
    return [stop - start for start, stop in zip(cuts, [*cuts[1:], chain.num_units])]


# ---- Trials ------------------------------------------------------------------------------------------------------------


class _Trials:
    """The state of the trials: the best plan so far, and the number of plans left to evaluate.

    Args:
        job: The planning job.
        known_s: Step of the best plan known so far; infinite if none is known.
        deadline: When to end the trials.
    """

    def __init__(self, job: PlanningJob, known_s: float, deadline: Deadline):
        self.job, self.deadline = job, deadline
        self.best: Evaluation | None = None
        self._limit_s = known_s * (1 - _MIN_IMPROVEMENT)
        #: Layout and micro-batch of the best plan.
        self._best_key: tuple[_Layout, int] | None = None
        self._num_left = _MAX_PLANS
        #: Whether any plan that fits ends the trials.
        self._ends_with_first = known_s == math.inf

    @property
    def is_over(self) -> bool:
        """Whether the trials have ended."""
        return self.deadline.is_over or self._num_left <= 0 or (self._ends_with_first and self.best is not None)

    def add(self, layout: _Layout, micro_batch: int) -> None:
        """Evaluate a layout with a micro-batch, and with the first way of recomputation that fits the memory limit."""
        if not micro_batch or self._ideal_s(layout, micro_batch) >= self._limit_s:
            return
        for recompute in self.job.recomputations:
            if recompute in (SOME_BLOCKS, "stage"):
                continue  # not for the last stage; recomputation of blocks needs about as little memory
            if self.is_over:
                return
            self._num_left -= 1
            try:
                plan = evaluate(self.job.chain, self.job.cluster, self._configuration(layout, micro_batch, recompute))
            except UserError:  # the layout does not divide some layer
                return
            if plan.memory_bytes <= self.job.limit_bytes:
                plan = with_fewer_blocks(self.job.chain, plan, self.job.limit_bytes, self.job.recomputations)
                if plan.step_s < self._limit_s:
                    self.best, self._limit_s, self._best_key = plan, plan.step_s, (layout, micro_batch)
                return

    def double_micro_batch(self) -> bool:
        """Try the best plan with twice its micro-batch; return whether that is the new best plan."""
        if self._best_key is None or self.is_over:
            return False
        (layout, micro_batch), before = self._best_key, self.best
        if self.job.workload.batch % (2 * micro_batch) == 0:
            self.add(layout, 2 * micro_batch)
        return self.best is not before

    def _ideal_s(self, layout: _Layout, micro_batch: int) -> float:
        """The step if only arithmetic and the bubble took time: the arithmetic, times (N + D - 1) / N for N micro-batches."""
        count = self.job.workload.batch // micro_batch
        return self.job.arithmetic_s * (1 + (layout.num_stages - 1) / count)

    def _configuration(self, layout: _Layout, micro_batch: int, recompute: str) -> Configuration:
        job, sizes = self.job, layout.mesh.devices(self.job.cluster).level_sizes
        # (data parallel, model parallel) per network level: model parallel on the innermost level only.
        degrees = (*((size, 1) for size in sizes[:-1]), (sizes[-1] // layout.model_parallel, layout.model_parallel))
        workload = replace(job.workload, micro_batch=micro_batch)
        depth, first, stages = layout.num_stages, 0, []
        for num_units in _balanced_cut(job.chain, depth):
            graph = job.chain.stage(first, first + num_units).graph
            strategies = megatron(graph, degrees).strategies
            if _divides_states(job):
                strategies = divided(graph, strategies, 1)
            stages.append(StageChoice(num_units, recompute, strategies))
            first += num_units
        spec = PipelineSchedule("1f1b", depth, workload.num_micro_batches, (("policy", "A"),))
        return Configuration(layout.mesh, spec, workload, tuple(stages))
