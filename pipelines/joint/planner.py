"""The joint planner: pipeline and SBP together, or the plan of a paper's planner; with the runner-ups of every family.

1. Without a pipeline (D = 1) the existing planner is exact: its plan is a member of the space.
2. A good plan early: what promises most in the whole space is looked at.
3. The families that people use are planned, each for itself (:mod:`.families`).  Their plans are members of the space, too: the
   best of all is the first incumbent, so that no plan is slower than a row of its own table.
4. The whole space is searched (:mod:`.search`) for what is better.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.stopping import Stop, StopRequestedError, TimedStop
from autoddl.costmodel.units import counted, format_bytes, format_memory_limit
from autoddl.search.planner import InfeasibleError, Planned, make_plan

from ..planners import Clock
from .evaluation import Evaluation, evaluate_unpipelined
from .explorer import Explorer
from .families import PIPELINES, families_of, paper_plan, stopped
from .job import DEFAULT_TIME_LIMIT_S, PlanningJob, Report, job_of, no_report
from .least_memory import least_memory
from .megatron_trials import megatron_trials
from .meshes import has_all_divisions
from .paper_planners import PLANNERS
from .result import Considered, JointOptions, PlanResult, Rival
from .search import Explored, Search
from .space import MAX_PASSES

__all__ = ["DEFAULT_TIME_LIMIT_S", "plan_jointly"]

#: The part of the time limit for the plan without a pipeline.
_WITHOUT = 0.2
#: The part of it for trials of what people use, and for a good plan early.
_TRIALS, _EARLY = 0.01, 0.15
#: The part of it for the least memory that would do, where nothing fits.
_MIN_MEMORY = 0.5


class _NotFoundError(UserError):
    """There may be a plan, but the time was over before one was found."""


def plan_jointly(
    graph: LayerGraph,
    cluster: Cluster,
    options: JointOptions,
    report: Report = no_report,
    stop: Stop | None = None,
) -> PlanResult:
    """The best pipeline with the best strategies inside its stages, and why.

    Args:
        report: told the best step so far, the least open bound and the number of simulations.
        stop: when it is requested, the best plan until then is the answer (see :func:`autoddl.search.planner.make_plan`).

    Raises:
        StopRequestedError: the stop was requested before any plan was known.
        InfeasibleError: nothing fits the memory limit.
        UserError: an option is out of range, or does not apply to joint plans.
    """
    start = time.perf_counter()
    _check(options)
    job = job_of(graph, cluster, options, report, stop)
    clock = Clock(job.time_limit_s, job.stop)
    whole, fault = _without_pipeline(job)
    if options.pipeline != "auto":
        return _by_paper(job, whole, fault, start)
    return _searched(job, whole, fault, clock, start)


def _check(options: JointOptions) -> None:
    base = options.base
    if options.pipeline != "auto" and options.pipeline not in PLANNERS:
        raise UserError(f"pipeline {options.pipeline!r} is not one of auto, {', '.join(PLANNERS)}")
    if options.pipeline == "wpipe" and not options.allow_stale:
        raise UserError(
            "pipeline wpipe is asynchronous: its first stages compute with older weights; add allow_stale=True"
        )
    if base.method != "exact":
        raise UserError(f"method {base.method!r} is for plans without a pipeline; joint plans are searched by exact")


# ---- Without a pipeline ------------------------------------------------------------------------------------------------


def _without_pipeline(job: PlanningJob) -> tuple[Planned | None, UserError | None]:
    try:
        stop = TimedStop(Clock(_WITHOUT * job.time_limit_s, job.stop))
        return make_plan(job.graph, job.cluster, job.options.base, stop=stop), None
    except StopRequestedError:
        job.stop.check()
        return None, _NotFoundError("none was found within its time")
    except InfeasibleError as fault:
        return None, fault
    except UserError as fault:
        return None, fault


def _one_stage(job: PlanningJob, planned: Planned) -> Evaluation:
    """The existing planner's plan as a pipeline of one stage."""
    return evaluate_unpipelined(job.chain, job.cluster, planned.workload, planned.strategies)


# ---- The whole space ---------------------------------------------------------------------------------------------------


def _searched(
    job: PlanningJob, whole: Planned | None, fault: UserError | None, clock: Clock, start: float
) -> PlanResult:
    explorer = job.explorer()
    alone = None if whole is None else _one_stage(job, whole)
    stale = job.options.allow_stale
    notes: tuple[str, ...] = ()
    if stale and job.chain.shares_weights:
        notes = ("layers share a weight, so asynchronous schedules are left out",)
    best = alone
    if best is not None:
        job.report(_cost(job, best), _ideal_s(job), 0)
    if job.options.base.objective == "step":
        best = (
            megatron_trials(job, math.inf if best is None else best.step_s, Clock(_TRIALS * job.time_limit_s, job.stop))
            or best
        )
    everything = explorer.settings(job.options.base.micro_batch, stale, lambda spec: spec.num_workers > 1)
    search = Search(explorer, everything, math.inf if best is None else _cost(job, best), job.report)
    best = search.begin(Clock(_EARLY * job.time_limit_s, job.stop)) or best
    families: list[Rival] = []
    for figures, plan in families_of(job, whole, alone, fault, explorer):
        families.append(figures)
        if plan is not None and (best is None or _cost(job, plan) < _cost(job, best)):
            best = plan
            job.report(_cost(job, best), _ideal_s(job), len(families))
    if best is None:
        # Perhaps nothing fits: that is found out faster by looking at memory alone.
        enough, is_proven = _least_memory(job, explorer)
        if enough > job.limit_bytes * (1 + 1e-9) and is_proven:
            raise _infeasible(job, enough, is_proven, fault)
    wide = search.go_on(math.inf if best is None else _cost(job, best), clock)
    if wide.best is not None and (best is None or _cost(job, wide.best) < _cost(job, best)):
        best = wide.best
    if best is None:
        job.stop.check()
        if not wide.finished:
            raise UserError(
                f"no plan of {job.graph.name} that fits was found within {job.time_limit_s:g} s; raise time_limit_s"
            )
        raise _infeasible(job, *_least_memory(job, explorer), fault)
    families = [_bounded(job, row, wide) for row in families]
    cost = _cost(job, best)
    lower = min(wide.lower_bound_s, _bound_without(job, whole, fault))
    # A stop may come before there is a bound of every setting.
    lower = min(cost, max(lower, _ideal_s(job)))
    optimal = lower >= cost * (1 - 1e-9)
    return PlanResult(
        graph=job.graph,
        cluster=job.cluster,
        options=job.options,
        memory_limit_bytes=job.limit_bytes,
        evaluation=best,
        lower_bound_s=cost if optimal else lower,
        optimal=optimal,
        considered=_considered(job, wide, explorer, whole),
        rivals=tuple(families),
        search_s=time.perf_counter() - start,
        notes=notes,
        is_interrupted=job.stop.is_requested,
    )


def _bounded(job: PlanningJob, row: Rival, wide: Explored) -> Rival:
    """A row with the bound of the whole space, where it has a pipeline and that is above its own: a family is part of the space."""
    is_pipeline = row.name in {family.title for family in PIPELINES} and row.infeasible is None
    if not is_pipeline or job.options.base.objective != "step":
        return row
    return replace(row, lower_bound_s=max(row.lower_bound_s or 0.0, min(wide.lower_bound_s, row.step_s)))


def _cost(job: PlanningJob, plan: Evaluation) -> float:
    return plan.cost(job.options.base.objective)


def _bound_without(job: PlanningJob, whole: Planned | None, fault: UserError | None) -> float:
    """No plan without a pipeline costs less."""
    if whole is not None:
        return whole.lower_bound
    return 0.0 if isinstance(fault, _NotFoundError) else math.inf


def _considered(job: PlanningJob, wide: Explored, explorer: Explorer, whole: Planned | None) -> Considered:
    base = job.options.base
    sizes = "every micro-batch" if base.micro_batch is None else "the given micro-batch"
    stale = "every schedule, asynchronous ones too" if job.options.allow_stale else "every synchronous schedule"
    devices = "workers of equal rectangles of devices, or of any that tile the cluster"
    if not has_all_divisions(job.cluster):
        devices = "workers of equal rectangles of devices, or equal but for the first and the last"
    again = " / ".join(job.recomputations)
    summa = ", Summa meshes too" if base.summa else " without Summa meshes (summa=True includes them)"
    tied = (
        "a choice for every layer"
        if base.untied
        else "one choice for equal layers of a stage (untied=True: one for each)"
    )
    alone = 0 if whole is None else len(whole.candidates)
    return Considered(
        space=f"{devices} (bidirectional schedules: equal); {stale} of up to {MAX_PASSES:,} passes, {sizes}, every cut, "
        f"recomputation {again}, exact SBP inside each stage{summa}, {tied}",
        configurations=wide.configurations + alone,
        settings=wide.settings + alone,
        ruled_out_by_memory=wide.impossible,
        ruled_out_by_bound=wide.settings - wide.impossible - len(wide.opened),
        simulated=wide.simulated,
        stage_searches=explorer.num_searches,
    )


def _least_memory(job: PlanningJob, explorer: Explorer) -> tuple[float, bool]:
    """The bytes per device that a plan would do with, and whether none would do with less."""
    settings = explorer.settings(job.options.base.micro_batch, job.options.allow_stale, lambda spec: True)
    return least_memory(explorer, settings, Clock(_MIN_MEMORY * job.time_limit_s, job.stop))


def _infeasible(job: PlanningJob, least: float, is_proven: bool, fault: UserError | None) -> UserError:
    """The error that nothing fits, with the least memory that a plan would do with."""
    if not math.isfinite(least):
        return fault or UserError(f"no stage of {job.graph.name} divides over the devices of {job.cluster.name}")
    told = format_memory_limit(least)
    enough = f"the smallest memory that would do is {told}" if is_proven else f"{told} would do"
    return InfeasibleError(
        f"no plan of {job.graph.name} fits {format_bytes(job.limit_bytes)} per device on "
        f"{counted(job.cluster.num_devices, 'device')}, with a pipeline or without; {enough}"
    )


# ---- The papers' planners ----------------------------------------------------------------------------------------------


def _by_paper(job: PlanningJob, whole: Planned | None, fault: UserError | None, start: float) -> PlanResult:
    name, clock = job.options.pipeline, Clock(job.time_limit_s, job.stop)
    assert name is not None
    try:
        best = paper_plan(job, name, clock)
    except UserError as error:
        raise type(error)(f"{PLANNERS[name]}'s planner: {error}") from None
    alone = None if whole is None else _one_stage(job, whole)
    considered = Considered(
        space=f"what {PLANNERS[name]}'s planner chooses from: data-parallel stages",
        configurations=0,
        settings=0,
        ruled_out_by_memory=0,
        ruled_out_by_bound=0,
        simulated=1,
        stage_searches=0,
    )
    ideal = _ideal_s(job)
    return PlanResult(
        graph=job.graph,
        cluster=job.cluster,
        options=job.options,
        memory_limit_bytes=job.limit_bytes,
        evaluation=best,
        lower_bound_s=min(ideal, _cost(job, best)),
        optimal=False,
        considered=considered,
        rivals=tuple(figures for figures, _ in families_of(job, whole, alone, fault, job.explorer())),
        search_s=time.perf_counter() - start,
        notes=(f"the plan is the best that {PLANNERS[name]}'s planner found{stopped(clock)}",) if clock.stopped else (),
        is_interrupted=job.stop.is_requested,
    )


def _ideal_s(job: PlanningJob) -> float:
    """All products of a step at the speed of all devices together: no plan is faster."""
    if job.options.base.objective != "step":
        return 0.0
    device = job.cluster.device
    speed = job.cluster.num_devices * device.peak_flops[job.workload.precision] * device.efficiency
    return 2 * job.graph.flops * job.workload.batch / speed
