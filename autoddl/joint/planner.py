"""The joint planner: pipeline and SBP together, or the plan of a paper's planner; with the runner-ups of every family.

1. Without a pipeline (D = 1) the existing planner is exact: its plan is a member of the space, and the first incumbent.
2. First, narrow searches (1F1B, each setting's best cut; equal workers, then all) find a good incumbent, and another one looks at
   all schedules near it; then the whole space is searched (:mod:`.search`).
3. The families that people use are planned for comparison (:mod:`.families`).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.stopping import Deadline, Stop
from autoddl.costmodel.units import format_bytes, format_memory_limit
from autoddl.pipelines.planners import Clock

from ..planner import USABLE_MEMORY, InfeasibleError, Planned, base_workload, make_plan
from ..tables import counted
from .configuration import Configuration, PipelineSchedule, StageChoice
from .cutting import chain_of
from .evaluation import Evaluation, evaluate
from .explorer import Explorer
from .families import families_of, paper_plan, stopped, whole_mesh
from .job import DEFAULT_TIME_LIMIT_S, Job, Report, no_report
from .leastmemory import least_memory
from .meshes import all_meshes, has_all_divisions
from .papers import PLANNERS
from .result import Considered, JointOptions, JointPlan
from .search import Explored, explore
from .space import MOST_CUTS

__all__ = ["DEFAULT_TIME_LIMIT_S", "plan_jointly"]

#: The parts of the time limit after which the narrow searches end, of equal workers and of all, and that near their plan.
_EQUAL, _NARROW, _NEAR = 0.5, 0.6, 0.75
#: The part of it for the least memory that would do, where nothing fits.
_LEAST_MEMORY = 0.5


def plan_jointly(
    graph: LayerGraph,
    cluster: Cluster,
    options: JointOptions,
    report: Report = no_report,
    stop: Stop | None = None,
) -> JointPlan:
    """The best pipeline with the best strategies inside its stages, and why.

    Args:
        report: told the best step so far, the least open bound and the number of simulations.
        stop: when it is requested, the best plan until then is the answer (see :func:`autoddl.planner.make_plan`).

    Raises:
        StopRequestedError: the stop was requested before any plan was known.
        InfeasibleError: nothing fits the memory limit.
        UserError: an option is out of range, or does not apply to joint plans.
    """
    start = time.perf_counter()
    _check(options)
    base = options.base
    limit = USABLE_MEMORY * cluster.device.memory_bytes if base.memory_limit_bytes is None else base.memory_limit_bytes
    if not 0 < limit < math.inf:
        raise UserError(f"memory limit {limit / 2**30:g} GiB should be a finite number of more than 0")
    workload = base_workload(cluster, base, recompute=False)
    if base.micro_batch is not None:
        replace(workload, micro_batch=base.micro_batch)  # refuses one that does not divide
    job = Job(graph, cluster, options, chain_of(graph), workload, limit, report, stop or Stop())
    whole, fault = _without_pipeline(job)
    if options.pipeline != "auto":
        return _by_paper(job, whole, fault, start)
    return _searched(job, whole, fault, start)


def _check(options: JointOptions) -> None:
    base = options.base
    if options.pipeline != "auto" and options.pipeline not in PLANNERS:
        raise UserError(f"pipeline {options.pipeline!r} is not one of auto, {', '.join(PLANNERS)}")
    if options.pipeline == "wpipe" and not options.allow_stale:
        raise UserError(
            "pipeline wpipe is asynchronous: its first stages compute with older weights; add --allow-stale"
        )
    if base.method != "exact":
        raise UserError(f"method {base.method!r} is for plans without a pipeline; joint plans are searched by exact")
    for name, wish in (("untied", base.untied), ("summa", base.summa)):
        if wish:
            raise UserError(f"--{name} is for plans without a pipeline; leave it out, or leave out --pipeline")
    if base.objective != "step":
        raise UserError("--communication-only is for plans without a pipeline; a pipeline is planned for its step time")


# ---- Without a pipeline ------------------------------------------------------------------------------------------------


def _without_pipeline(job: Job) -> tuple[Planned | None, UserError | None]:
    try:
        return make_plan(job.graph, job.cluster, job.options.base, stop=job.stop), None
    except InfeasibleError as fault:
        return None, fault
    except UserError as fault:
        return None, fault


def _one_stage(job: Job, planned: Planned) -> Evaluation:
    """The existing planner's plan as a pipeline of one stage."""
    workload = planned.workload
    recompute = "layers" if workload.recompute else "none"
    spec = PipelineSchedule("1f1b", 1, workload.num_micro_batches)
    stage = StageChoice(job.chain.num_units, recompute, planned.strategies)
    return evaluate(job.chain, job.cluster, Configuration(whole_mesh(job.cluster), spec, workload, (stage,)))


# ---- The whole space ---------------------------------------------------------------------------------------------------


def _searched(job: Job, whole: Planned | None, fault: UserError | None, start: float) -> JointPlan:
    base, explorer, clock = job.options.base, job.explorer(), Clock(job.time_limit_s, job.stop)
    alone = None if whole is None else _one_stage(job, whole)
    stale = job.options.allow_stale
    notes: tuple[str, ...] = ()
    if stale and job.chain.shares_weights:
        notes = ("layers share a weight, so asynchronous schedules are left out",)
    best, narrow = alone, 0
    for uneven, share in ((False, _EQUAL), (True, _NARROW)):
        found = explore(
            explorer,
            explorer.settings(
                base.micro_batch, False, lambda spec: spec.name == "1f1b" and spec.num_workers > 1, uneven
            ),
            math.inf if best is None else best.step_s,
            clock.part(share),
            one_cut=True,
            report=job.report,
        )
        best, narrow = found.best or best, narrow + found.simulated
    if best is not None and best is not alone:
        best = _near(job, explorer, best, stale, clock.part(_NEAR)) or best
    wide = explore(
        explorer,
        explorer.settings(base.micro_batch, stale, lambda spec: spec.num_workers > 1),
        math.inf if best is None else best.step_s,
        clock,
        report=job.report,
    )
    best = wide.best or best
    if best is None:
        job.stop.check()
        if not wide.finished:
            raise UserError(
                f"no plan of {job.graph.name} that fits was found within {job.time_limit_s:g} s; raise --time-limit"
            )
        raise _infeasible(job, explorer, whole, fault)
    lower = wide.lower_bound_s if whole is None else min(wide.lower_bound_s, whole.lower_bound)
    # A stop may come before there is a bound of every setting.
    lower = min(best.step_s, max(lower, _ideal_s(job)))
    optimal = lower >= best.step_s * (1 - 1e-9)
    families = tuple(families_of(job, whole, alone, fault, explorer))
    return JointPlan(
        graph=job.graph,
        cluster=job.cluster,
        options=job.options,
        memory_limit_bytes=job.limit_bytes,
        evaluation=best,
        lower_bound_s=best.step_s if optimal else lower,
        optimal=optimal,
        considered=_considered(job, narrow, wide, explorer, whole),
        families=families,
        search_s=time.perf_counter() - start,
        notes=notes,
        is_interrupted=job.stop.is_requested,
    )


def _near(job: Job, explorer: Explorer, best: Evaluation, stale: bool, deadline: Deadline) -> Evaluation | None:
    """The best of all schedules on the devices of a good plan, at its micro-batch, half and twice that, if one is better."""
    mesh, size = best.configuration.mesh, best.configuration.workload.micro_batch
    everything = explorer.settings(job.options.base.micro_batch, stale, lambda spec: spec.num_workers > 1)
    settings = [one for one in everything if one.mesh == mesh and one.micro_batch in (size / 2, size, 2 * size)]
    return explore(explorer, settings, best.step_s, deadline, one_cut=True, report=job.report).best


def _considered(job: Job, narrow: int, wide: Explored, explorer: Explorer, whole: Planned | None) -> Considered:
    sizes = "every micro-batch" if job.options.base.micro_batch is None else "the given micro-batch"
    stale = "every schedule, asynchronous ones too" if job.options.allow_stale else "every synchronous schedule"
    every = "all cuts" if _has_all_cuts(job) else "even and uneven cuts"
    devices = "workers of equal rectangles of devices, or of any that tile the cluster"
    if not has_all_divisions(job.cluster):
        devices = "workers of equal rectangles of devices, or equal but for the first and the last"
    again = " / ".join(job.recomputations)
    alone = 0 if whole is None else len(whole.candidates)
    return Considered(
        space=f"{devices} (bidirectional schedules: equal); {stale}, {sizes}, {every}, recomputation {again}, exact SBP "
        "inside each stage",
        configurations=wide.configurations + alone,
        settings=wide.settings + alone,
        ruled_out_by_memory=wide.out_of_memory,
        ruled_out_by_bound=wide.settings - len(wide.opened),
        simulated=narrow + wide.simulated,
        stage_searches=explorer.num_searches,
    )


def _has_all_cuts(job: Job) -> bool:
    """Whether the space has every cut of the chain, for every number of workers."""
    depths = {mesh.num_workers(job.cluster) for mesh in all_meshes(job.cluster)}
    return all(math.comb(job.chain.num_units - 1, depth - 1) <= MOST_CUTS for depth in depths)


def _infeasible(job: Job, explorer: Explorer, whole: Planned | None, fault: UserError | None) -> UserError:
    """The error that nothing fits, with the least memory that a plan would do with."""
    settings = explorer.settings(job.options.base.micro_batch, job.options.allow_stale, lambda spec: True)
    least, is_proven = least_memory(explorer, settings, Clock(_LEAST_MEMORY * job.time_limit_s, job.stop))
    if not math.isfinite(least):
        return fault or UserError(f"no stage of {job.graph.name} divides over the devices of {job.cluster.name}")
    told = format_memory_limit(least)
    enough = f"the smallest memory that would do is {told}" if is_proven else f"{told} would do"
    return InfeasibleError(
        f"no plan of {job.graph.name} fits {format_bytes(job.limit_bytes)} per device on "
        f"{counted(job.cluster.num_devices, 'device')}, with a pipeline or without; {enough}"
    )


# ---- The papers' planners ----------------------------------------------------------------------------------------------


def _by_paper(job: Job, whole: Planned | None, fault: UserError | None, start: float) -> JointPlan:
    name, clock = job.options.pipeline, Clock(job.time_limit_s, job.stop)
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
    return JointPlan(
        graph=job.graph,
        cluster=job.cluster,
        options=job.options,
        memory_limit_bytes=job.limit_bytes,
        evaluation=best,
        lower_bound_s=min(ideal, best.step_s),
        optimal=False,
        considered=considered,
        families=tuple(families_of(job, whole, alone, fault, None)),
        search_s=time.perf_counter() - start,
        notes=(f"the plan is the best that {PLANNERS[name]}'s planner found{stopped(clock)}",) if clock.stopped else (),
        is_interrupted=job.stop.is_requested,
    )


def _ideal_s(job: Job) -> float:
    """All products of a step at the speed of all devices together: no plan is faster."""
    device = job.cluster.device
    speed = job.cluster.num_devices * device.peak_flops[job.workload.precision] * device.efficiency
    return 2 * job.graph.flops * job.workload.batch / speed
