"""The best plans of the families of plans that people use, for comparison with the joint plan.

- *Without a pipeline*: the best SBP plan, and data parallelism.
- *Megatron recipe*: the best of the uniform pipelines that people publish (:mod:`.recipe_trials`), interleaved or not.
- *Megatron + 1F1B*: equal workers; all layers of a stage follow one mesh of data and model parallelism.
- *The schedules of the papers*, with data-parallel stages, as in the papers.  Each is planned over all numbers of workers,
  micro-batches, cuts and options (Chimera: number of pipelines, concatenation); DAPPLE also over workers with unequal numbers of
  devices.

The best plan of a family and its lower bound come from the joint search, restricted to the family.  The plan that the paper's own
planner chooses from a linear profile (:mod:`.paper_planners`) is a member of the family; its step is reported in addition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import Deadline, StopRequestedError
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.units import format_bytes
from autoddl.search.planner import InfeasibleError, Planned

from ..planners import Clock
from .configuration import Configuration, PipelineSchedule, StageChoice
from .evaluation import Evaluation, evaluate
from .explorer import Explorer
from .fewer_blocks import with_fewer_blocks
from .job import PlanningJob
from .meshes import StageMesh
from .paper_planners import PLANNERS, paper_plans
from .result import Rival
from .search import explore
from .space import SOME_BLOCKS
from .stage_search import MakeStages, megatron_stages, replicated_stages

__all__ = [
    "RECIPE",
    "RIVAL_FAMILIES",
    "SHARE_OF_FAMILIES",
    "Family",
    "cheaper",
    "describe",
    "describe_common_strategy",
    "describe_stop",
    "paper_plan",
    "plan_rivals",
]

#: Title of the row of the best recipe.
RECIPE = "Megatron recipe"
#: Share of the time limit for the searches of all families together.
SHARE_OF_FAMILIES = 0.1
#: Share of the time limit for the planner of each paper, and its least seconds of processor time when the limit is over.
_SHARE_OF_PAPER, _LEAST_TIME_OF_PAPER_S = 0.02, 0.3
#: Seconds of processor time, at least, in which a family may find a plan if none is known, even if the time limit is shorter.
_TIME_FOR_FIRST_S = 10.0
#: Stands for the trials by Megatron's rule in :attr:`Family.contains`.
_TRIALS = "trials"
#: Largest number of plans of a paper's planner that are evaluated to find one that fits.
_MAX_PAPER_PLANS = 16


@dataclass(frozen=True)
class Family:
    """A family of pipelines: its schedules, and the strategies of its stages.

    Attributes:
        title: Title of the family's row.
        schedules: Names of the schedules.
        make_stages: Constructor of the searches of stages, which determines the offered strategies.
        uneven: Whether workers may have unequal numbers of devices.
        paper: Name of the planner of the family's paper in :data:`.paper_planners.PLANNERS`; None if there is none.
        policies: Allowed policies of the warm-up of 1F1B.
        stale: Whether the schedules are asynchronous.
        weight: Share of the time of all families, relative to the weights of the others.
        contains: Title of an earlier family whose plans all belong to this family too, or :data:`_TRIALS`; None if there is none.
    """

    title: str
    schedules: tuple[str, ...]
    make_stages: MakeStages = replicated_stages
    uneven: bool = False
    paper: str | None = None
    policies: tuple[str, ...] = ("A", "B")
    stale: bool = False
    weight: int = 1
    contains: str | None = None

    def allows(self, spec: PipelineSchedule) -> bool:
        """Whether a schedule belongs to the family."""
        if spec.num_workers == 1 or spec.name not in self.schedules:
            return False
        return spec.name != "1f1b" or dict(spec.options)["policy"] in self.policies


#: The families of pipelines that the joint plan is compared with, in the order of their rows.
RIVAL_FAMILIES = (
    Family("Megatron + 1F1B", ("1f1b",), megatron_stages, policies=("A",), weight=8, contains=_TRIALS),
    Family("1F1B", ("1f1b",)),
    Family("DAPPLE", ("1f1b",), uneven=True, paper="dapple", contains="1F1B"),
    Family("Chimera", ("chimera",), paper="chimera", weight=3),
    Family("GPipe", ("gpipe",)),
    Family("interleaved 1F1B", ("interleaved-1f1b",)),
    Family("GEMS", ("gems",)),
    Family("PipeDream", ("pipedream",), stale=True),
    Family("PipeDream-2BW", ("pipedream-2bw",), stale=True),
    Family("WPipe", ("wpipe",), paper="wpipe", stale=True),
)


def describe(evaluation: Evaluation) -> str:
    """Describe a plan in a few words: schedule, stages, micro-batch and recomputation."""
    configuration = evaluation.configuration
    spec, size = configuration.schedule, configuration.workload.micro_batch
    recomputations = {stage.recompute for stage in configuration.stages} - {"none"}
    recomputed = f", recomputed ({' and '.join(sorted(recomputations))})" if recomputations else ""
    workload = f"micro-batch {size}{recomputed}"
    if spec.num_workers == 1:
        return workload
    return f"{spec.label}, {spec.num_stages} stages of {configuration.mesh}, {workload}"


def plan_rivals(
    job: PlanningJob,
    unpipelined: Planned | None,
    one_stage: Evaluation | None,
    error: UserError | None,
    explorer: Explorer,
    tried: tuple[Evaluation | None, Evaluation | None],
    clock: Clock,
    best: Evaluation | None,
) -> Iterator[tuple[Rival, Evaluation | None]]:
    """Plan the rivals one after the other: the plans without a pipeline, then the best plan of each family.

    Args:
        job: The planning job.
        unpipelined: The best plan without a pipeline; None if there is none.
        one_stage: The same plan as a pipeline of one stage.
        error: Why there is no plan without a pipeline.
        explorer: An explorer of the job, whose tables the searches of the families may share.
        tried: The best plan of the trials by Megatron's rule (:mod:`.megatron_trials`), and the best recipe; None if none fits.
        clock: The time limit of the whole search.
        best: The best plan that is known, which may be of no family; None if none is known.

    Yields:
        The row of the family, and its best plan (None if there is none).
    """
    if one_stage is None or unpipelined is None:
        yield Rival("pure SBP", infeasible=str(error)), None
    else:
        lower = min(unpipelined.lower_bound, one_stage.step_s) if job.options.base.objective == "step" else None
        yield Rival.of("pure SBP", one_stage, describe(one_stage), lower_bound_s=lower), one_stage
    yield _data_parallel(job)
    trial, recipe = tried
    if recipe is not None:
        how = f"{describe(recipe)}{describe_common_strategy(recipe)}"
        yield Rival.of(RECIPE, recipe, how, lower_bound_s=None), recipe
    offered = [family for family in RIVAL_FAMILIES if not family.stale or job.options.allow_stale]
    time_per_weight_s = SHARE_OF_FAMILIES * job.time_limit_s / sum(family.weight for family in offered)
    has_plan = any(plan is not None for plan in (best, one_stage, trial))
    found: dict[str | None, Evaluation | None] = {None: None, _TRIALS: trial}
    for family in RIVAL_FAMILIES:
        if family not in offered:
            yield Rival(family.title, infeasible="asynchronous; offered with allow_stale=True"), None
            continue
        deadline = Clock(min(family.weight * time_per_weight_s, clock.left_s), job.stop)
        own = None if best is None else _member_like(job, family, best)
        known = cheaper(found[family.contains], own, job.options.base.objective)
        # As long as no plan is known, the time of the whole search may be used to find one; for a family without a plan, its share
        # of what is left.
        left_s = clock.left_s * family.weight / sum(other.weight for other in offered[offered.index(family) :])
        patience_s = left_s if has_plan else max(clock.left_s, _TIME_FOR_FIRST_S)
        patience = Clock(patience_s, job.stop) if known is None else None
        rival, plan = _pipeline(job, family, explorer, deadline, patience, clock, known)
        has_plan, found[family.title] = has_plan or plan is not None, plan
        yield rival, plan


def _pipeline(
    job: PlanningJob,
    family: Family,
    explorer: Explorer,
    deadline: Deadline,
    patience: Deadline | None,
    clock: Clock,
    known: Evaluation | None,
) -> tuple[Rival, Evaluation | None]:
    """The best plan of a family of pipelines: from the joint search within the family, or from the planner of its paper.

    Args:
        job: The planning job.
        family: The family.
        explorer: An explorer whose tables the search may share.
        deadline: When to end the search.
        patience: When to end it as long as it has found no plan; None for the deadline.
        clock: The time limit of the whole search.  When it is over, a paper's planner still has some time.
        known: A plan of the family that is known; None if there is none.
    """
    own = job.explorer(family.make_stages, explorer)
    settings = own.settings(job.options.base.micro_batch, family.stale, family.allows, family.uneven)
    objective = job.options.base.objective
    known_s = math.inf if known is None else known.cost(objective)
    explored = explore(own, settings, known_s, deadline, patience=patience)
    best, note, paper_step_s = cheaper(explored.best, known, objective), "", None
    if family.paper is not None:
        paper_s = min(_SHARE_OF_PAPER * job.time_limit_s, max(clock.left_s, _LEAST_TIME_OF_PAPER_S))
        own_clock = Clock(paper_s, job.stop)
        try:
            plan = paper_plan(job, family.paper, own_clock)
        except (UserError, StopRequestedError):
            pass
        else:
            paper_step_s, note = plan.step_s if objective == "step" else None, describe_stop(own_clock)
            best = cheaper(best, plan, objective)
    if best is None:
        reason = "no such plan fits the memory limit"
        if not explored.is_finished:
            ended = "before the search was interrupted" if job.stop.is_requested else "within the time limit"
            reason = f"none was found {ended}"
        elif explored.num_settings == explored.num_impossible:
            reason = "none of its schedules has stages that divide over the devices"
        return Rival(family.title, infeasible=reason), None
    strategy = describe_common_strategy(best) if family.make_stages is megatron_stages else ""
    # The search bounds the objective, which is a bound on the step only if the step is the objective.
    lower = min(explored.lower_bound_s, best.step_s) if objective == "step" else None
    how = f"{describe(best)}{strategy}{note}"
    return Rival.of(family.title, best, how, lower_bound_s=lower, paper_step_s=paper_step_s), best


def _member_like(job: PlanningJob, family: Family, plan: Evaluation) -> Evaluation | None:
    """The plan with replicated stages, if that is a plan of the family and fits: what a search need not find again."""
    configuration = plan.configuration
    is_like = family.allows(configuration.schedule) and (family.uneven or isinstance(configuration.mesh, StageMesh))
    if not is_like or family.make_stages is not replicated_stages:
        return None
    stages = []
    for number, stage in enumerate(configuration.stages):
        strategy = data_parallel(configuration.mesh_of(number).devices(job.cluster).level_sizes)
        stages.append(replace(stage, strategies=dict.fromkeys(stage.strategies, strategy)))
    try:
        member = evaluate(job.chain, job.cluster, replace(configuration, stages=tuple(stages)))
    except UserError:
        return None
    return member if member.memory_bytes <= job.limit_bytes else None


def cheaper(one: Evaluation | None, other: Evaluation | None, objective: str) -> Evaluation | None:
    """The plan of the lower cost; the first if both cost the same."""
    if one is None or other is None:
        return one or other
    return other if other.cost(objective) < one.cost(objective) else one


def describe_stop(clock: Clock) -> str:
    """Describe why a planner stopped early; empty if it did not."""
    if clock.stop.is_requested:
        return "; interrupted"
    return f"; its planner stopped after {clock.limit_s:g} s" if clock.stopped else ""


def _data_parallel(job: PlanningJob) -> tuple[Rival, Evaluation | None]:
    """The best plan of pure data parallelism over all devices, by trying all micro-batches and ways of recomputation."""
    name = "data parallel"
    mesh = StageMesh.whole(job.cluster)
    strategy = data_parallel(mesh.devices(job.cluster).level_sizes)
    given, best, reason = job.options.base.micro_batch, None, ""
    least_bytes = math.inf
    for size in divisors(job.workload.batch) if given is None else [given]:
        if size % strategy.p0:
            continue
        for recompute in job.recomputations:
            if recompute in (SOME_BLOCKS, "stage"):
                continue  # without a pipeline nothing is recomputed as a whole
            workload = replace(job.workload, micro_batch=size, recompute=recompute)
            spec = PipelineSchedule("1f1b", 1, workload.num_micro_batches)
            stage = StageChoice(job.chain.num_units, recompute, {layer.name: strategy for layer in job.graph.layers})
            try:
                evaluation = evaluate(job.chain, job.cluster, Configuration(mesh, spec, workload, (stage,)))
            except UserError as error:
                reason = reason or str(error)
                continue
            if evaluation.memory_bytes > job.limit_bytes:
                least_bytes = min(least_bytes, evaluation.memory_bytes)
                continue
            evaluation = with_fewer_blocks(job.chain, evaluation, job.limit_bytes, job.recomputations)
            if best is None or evaluation.step_s < best.step_s:
                best = evaluation
    if best is not None:
        return Rival.of(name, best, f"dp {strategy.p0}, {describe(best)}", lower_bound_s=best.step_s), best
    if math.isfinite(least_bytes):
        reason = f"needs {format_bytes(least_bytes)} per device, over the limit of {format_bytes(job.limit_bytes)}"
    return Rival(name, infeasible=reason or f"the batch does not divide over {strategy.p0} devices"), None


def describe_common_strategy(evaluation: Evaluation) -> str:
    """Describe the mesh of a plan in which all layers follow one rule, such as ``, dp 2 x mp 4``: the strategy of the first matrix
    product; empty if there is none."""
    linear = next((layer for layer in evaluation.layers if kind_of(layer.layer.kind).is_matmul), None)
    if linear is None:
        return ""
    strategy = linear.strategy
    return f", dp {strategy.p0} x mp {strategy.p1 * strategy.p2}"


def paper_plan(job: PlanningJob, name: str, clock: Clock) -> Evaluation:
    """Return the best plan of a paper's planner that fits the memory limit.

    Args:
        job: The planning job.
        name: Name of the planner in :data:`.paper_planners.PLANNERS`.
        clock: When the planner stops with the plans it has found so far.

    Raises:
        InfeasibleError: all plans exceed the memory limit.
        UserError: the planner has no plan for these numbers.
        StopRequestedError: a stop was requested before there was a plan.
    """
    base = job.options.base
    if name == "wpipe" and job.chain.shares_weights:
        raise UserError("layers share a weight, whose copies asynchronous stages would update at different times")
    clock.stop.check()
    plans = paper_plans(
        name, job.chain, job.cluster, job.workload, job.limit_bytes, base.recompute, base.micro_batch, clock
    )
    least_bytes, first_error = math.inf, None
    for plan in plans[:_MAX_PAPER_PLANS]:
        try:
            evaluation = evaluate(job.chain, job.cluster, plan.configuration)
        except UserError as error:
            first_error = first_error or error
            continue
        if evaluation.memory_bytes <= job.limit_bytes:
            return evaluation
        least_bytes = min(least_bytes, evaluation.memory_bytes)
    if math.isfinite(least_bytes):
        raise InfeasibleError(
            f"its plans need {format_bytes(least_bytes)} per device, over the limit of {format_bytes(job.limit_bytes)}"
        )
    raise first_error or UserError(f"no {PLANNERS[name]} plan for {job.cluster.num_devices} devices")
