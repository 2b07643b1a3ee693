"""The families of plans that people use, each planned for itself.

Plans without a pipeline: SBP as it comes, and data parallelism.  Pipelines: Megatron's equal workers under 1F1B, all layers of
which follow one mesh of data and model parallelism; and the schedules of the papers, with stages that are replicated on the
devices of their workers, as the papers have them: each over all its numbers of workers, micro-batches, cuts and options
(Chimera: pipelines, concatenation), DAPPLE over workers of unequal numbers of devices, too.

The best of a family comes from the joint search restricted to it, with its gap; what the planner of its paper would have chosen
from its linear profile (:mod:`.paper_planners`) stands beside it, and is a plan of the family, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import StopRequestedError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes
from autoddl.search.planner import InfeasibleError, Planned

from ..planners import Clock
from .configuration import Configuration, PipelineSchedule, StageChoice
from .evaluation import Evaluation, evaluate
from .explorer import Explorer
from .job import PlanningJob
from .meshes import StageMesh
from .paper_planners import PLANNERS, paper_plans
from .result import Rival
from .search import explore
from .stage_search import MakeStages, megatron_stages, replicated_stages

__all__ = [
    "PIPELINES",
    "Family",
    "common_strategy",
    "describe",
    "families_of",
    "paper_plan",
    "stopped",
]

#: The part of the time limit that all families' searches may take together, and each paper's planner.
_FAMILIES, _PAPER = 0.1, 0.02
#: How many of a paper's plans are looked at for one that fits.
_MAX_PAPER_PLANS = 16


@dataclass(frozen=True)
class Family:
    """Schedules with a way to run their stages.

    Attributes:
        title: of its row.
        schedules: by name.
        make_stages: how their stages are run.
        uneven: workers of unequal numbers of devices, too.
        paper: the planner of its paper, if there is one here.
        policies: of 1F1B's warm-up.
        stale: it is asynchronous.
        weight: its part of the families' time, beside the others'.
    """

    title: str
    schedules: tuple[str, ...]
    make_stages: MakeStages = replicated_stages
    uneven: bool = False
    paper: str | None = None
    policies: tuple[str, ...] = ("A", "B")
    stale: bool = False
    weight: int = 1

    def allows(self, spec: PipelineSchedule) -> bool:
        """Whether a schedule is one of the family's."""
        if spec.num_workers == 1 or spec.name not in self.schedules:
            return False
        return spec.name != "1f1b" or dict(spec.options)["policy"] in self.policies


PIPELINES = (
    Family("Megatron + 1F1B", ("1f1b",), megatron_stages, policies=("A",), weight=8),
    Family("1F1B", ("1f1b",)),
    Family("DAPPLE", ("1f1b",), uneven=True, paper="dapple"),
    Family("Chimera", ("chimera",), paper="chimera", weight=3),
    Family("GPipe", ("gpipe",)),
    Family("interleaved 1F1B", ("interleaved-1f1b",)),
    Family("GEMS", ("gems",)),
    Family("PipeDream", ("pipedream",), stale=True),
    Family("PipeDream-2BW", ("pipedream-2bw",), stale=True),
    Family("WPipe", ("wpipe",), paper="wpipe", stale=True),
)


def describe(evaluation: Evaluation) -> str:
    """Stages, schedule, micro-batch and recomputation in a few words."""
    configuration = evaluation.configuration
    spec, size = configuration.schedule, configuration.workload.micro_batch
    again = {stage.recompute for stage in configuration.stages} - {"none"}
    recomputed = f", recomputed ({' and '.join(sorted(again))})" if again else ""
    passes = f"micro-batch {size}{recomputed}"
    if spec.num_workers == 1:
        return passes
    return f"{spec.label}, {spec.num_stages} stages of {configuration.mesh}, {passes}"


def families_of(
    job: PlanningJob, whole: Planned | None, alone: Evaluation | None, fault: UserError | None, explorer: Explorer
) -> Iterator[tuple[Rival, Evaluation | None]]:
    """The best plan of each family, or why there is none; and that plan.

    Args:
        whole, alone, fault: the plan without a pipeline, as it is and as one stage, or why there is none.
        explorer: of the same model and cluster, whose tables the families' searches may share.
    """
    if alone is None or whole is None:
        yield Rival("pure SBP", infeasible=str(fault)), None
    else:
        lower = min(whole.lower_bound, alone.step_s) if job.options.base.objective == "step" else None
        yield Rival.of("pure SBP", alone, describe(alone), lower_bound_s=lower), alone
    yield _data_parallel(job, whole)
    offered = [family for family in PIPELINES if not family.stale or job.options.allow_stale]
    share = _FAMILIES * job.time_limit_s / sum(family.weight for family in offered)
    best = alone
    for family in PIPELINES:
        if family not in offered:
            yield Rival(family.title, infeasible="asynchronous; offered with allow_stale=True"), None
            continue
        # Whatever the time limit is, there is an answer where the family that most people use has one.
        figures, found = _pipeline(job, family, explorer, family.weight * share, best is None or family is PIPELINES[0])
        best = found or best
        yield figures, found


def _pipeline(
    job: PlanningJob, family: Family, explorer: Explorer, share_s: float, until_found: bool
) -> tuple[Rival, Evaluation | None]:
    """The best of a family of pipelines, of what its search and its paper's planner find in their time.

    Args:
        until_found: nothing is known that fits: take the time that it takes to find something.
    """
    own = job.explorer(family.make_stages, explorer)
    settings = own.settings(job.options.base.micro_batch, family.stale, family.allows, family.uneven)
    explored = explore(own, settings, deadline=Clock(share_s, job.stop), until_found=until_found)
    best, said, paper_step_s = explored.best, "", None
    objective = job.options.base.objective
    if family.paper is not None:
        clock = Clock(_PAPER * job.time_limit_s, job.stop)
        try:
            planned = paper_plan(job, family.paper, clock)
        except (UserError, StopRequestedError):
            pass
        else:
            paper_step_s, said = planned.step_s if objective == "step" else None, stopped(clock)
            best = planned if best is None or planned.cost(objective) < best.cost(objective) else best
    if best is None:
        why = "no such plan fits the memory limit" if explored.is_finished else f"none was found {_before(job)}"
        if explored.is_finished and explored.num_settings == explored.num_impossible:
            why = "none of its schedules has stages that divide over the devices"
        return Rival(family.title, infeasible=why), None
    inner = common_strategy(best) if family.make_stages is megatron_stages else ""
    # The bound is of what is minimised; of a step it says something where that is the step.
    lower = min(explored.lower_bound_s, best.step_s) if objective == "step" else None
    how = f"{describe(best)}{inner}{said}"
    return Rival.of(family.title, best, how, lower_bound_s=lower, paper_step_s=paper_step_s), best


def stopped(clock: Clock) -> str:
    """What is said of a plan whose planner's time was over."""
    if clock.stop.is_requested:
        return "; interrupted"
    return f"; its planner stopped after {clock.limit_s:g} s" if clock.stopped else ""


def _before(job: PlanningJob) -> str:
    """When the search for a family's plan ended without one."""
    return "before the search was interrupted" if job.stop.is_requested else "within the time limit"


def _data_parallel(job: PlanningJob, whole: Planned | None) -> tuple[Rival, Evaluation | None]:
    name = "data parallel"
    mesh = StageMesh.whole(job.cluster)
    strategy = Strategy(tuple((size, 1, 1) for size in mesh.devices(job.cluster).level_sizes))
    wish, best, why = job.options.base.micro_batch, None, ""
    least = math.inf
    for size in divisors(job.workload.batch) if wish is None else [wish]:
        if size % strategy.p0:
            continue
        for recompute in job.recomputations:
            if recompute == "stage" and "layers" in job.recomputations:
                continue  # without a pipeline, layer by layer needs no more
            workload = replace(job.workload, micro_batch=size, recompute=recompute == "layers")
            spec = PipelineSchedule("1f1b", 1, workload.num_micro_batches)
            stage = StageChoice(job.chain.num_units, recompute, {layer.name: strategy for layer in job.graph.layers})
            try:
                evaluation = evaluate(job.chain, job.cluster, Configuration(mesh, spec, workload, (stage,)))
            except UserError as error:
                why = why or str(error)
                continue
            if evaluation.memory_bytes > job.limit_bytes:
                least = min(least, evaluation.memory_bytes)
            elif best is None or evaluation.step_s < best.step_s:
                best = evaluation
    if best is not None:
        return Rival.of(name, best, f"dp {strategy.p0}, {describe(best)}", lower_bound_s=best.step_s), best
    if math.isfinite(least):
        why = f"needs {format_bytes(least)} per device, over the limit of {format_bytes(job.limit_bytes)}"
    slices = f"the batch does not divide over {strategy.p0} devices"
    return Rival(name, infeasible=why or slices), None


def common_strategy(evaluation: Evaluation) -> str:
    """The mesh of Megatron's stages: data and model parallel ways of the linear layers."""
    linear = next((one for one in evaluation.layers if one.layer.kind == "linear"), None)
    if linear is None:
        return ""
    strategy = linear.strategy
    return f", dp {strategy.p0} x mp {strategy.p1 * strategy.p2}"


def paper_plan(job: PlanningJob, name: str, clock: Clock) -> Evaluation:
    """The best that fits of a paper's plans, of those that its planner finds before it is told to stop.

    Raises:
        UserError: there is none.
        StopRequestedError: a stop was requested before there was one.
    """
    base = job.options.base
    if name == "wpipe" and job.chain.shares_weights:
        raise UserError("layers share a weight, whose copies asynchronous stages would update at different times")
    clock.stop.check()
    plans = paper_plans(
        name, job.chain, job.cluster, job.workload, job.limit_bytes, base.recompute, base.micro_batch, clock
    )
    least, fault = math.inf, None
    for plan in plans[:_MAX_PAPER_PLANS]:
        try:
            evaluation = evaluate(job.chain, job.cluster, plan.configuration)
        except UserError as error:
            fault = fault or error
            continue
        if evaluation.memory_bytes <= job.limit_bytes:
            return evaluation
        least = min(least, evaluation.memory_bytes)
    if math.isfinite(least):
        raise InfeasibleError(
            f"its plans need {format_bytes(least)} per device, over the limit of {format_bytes(job.limit_bytes)}"
        )
    raise fault or UserError(f"no {PLANNERS[name]} plan for {job.cluster.num_devices} devices")
