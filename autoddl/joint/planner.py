"""The joint planner: pipeline and SBP together, or the plan of a paper's planner; with the runner-ups of every family.

1. Without a pipeline (D = 1) the existing planner is exact: its plan is a member of the space, and the first incumbent.
2. A first, narrow search (1F1B, each setting's best cut) finds a good incumbent; then the whole space is searched (:mod:`.search`).
3. The families that people use are planned for comparison: pure SBP, data parallelism, Megatron's stages under 1F1B, and what the
   planners of DAPPLE, Chimera and WPipe decide (:mod:`.papers`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes
from autoddl.costmodel.workload import Workload

from ..planner import USABLE_MEMORY, InfeasibleError, Planned, base_workload, make_plan
from .configuration import RECOMPUTATIONS, Configuration, PipelineSchedule, StageChoice
from .cutting import Chain, chain_of
from .evaluation import Evaluation, evaluate
from .fixed import megatron
from .interiors import Need
from .meshes import StageMesh, stage_meshes
from .papers import PLANNERS, paper_plans
from .result import Considered, FamilyFigures, JointOptions, JointPlan
from .search import Explored, Explorer
from .space import MOST_CUTS, divisors

__all__ = ["DEFAULT_TIME_LIMIT_S", "plan_jointly"]

#: Seconds of processor time for the search of pipelines where no limit is given.
DEFAULT_TIME_LIMIT_S = 30.0
#: The parts of it after which the first, narrow search and that near its plan end, and what Megatron's family may take.
_NARROW, _NEAR, _FAMILY = 0.6, 0.9, 0.2
#: How many of a paper's plans are looked at for one that fits.
_MOST_PAPER_PLANS = 16

Report = Callable[[float, float, int], None]


def _silent(best_s: float, bound_s: float, simulated: int) -> None:
    """No progress."""


@dataclass
class _Job:
    """What all steps share."""

    graph: LayerGraph
    cluster: Cluster
    options: JointOptions
    chain: Chain
    workload: Workload
    limit_bytes: float
    report: Report

    @property
    def recomputations(self) -> tuple[str, ...]:
        wish = self.options.base.recompute
        return RECOMPUTATIONS if wish is None else RECOMPUTATIONS[1:] if wish else RECOMPUTATIONS[:1]

    @property
    def time_limit_s(self) -> float:
        limit = self.options.base.time_limit_s
        return DEFAULT_TIME_LIMIT_S if limit is None else limit

    def explorer(self) -> Explorer:
        return Explorer(self.chain, self.cluster, self.workload, self.limit_bytes, self.recomputations)


def plan_jointly(graph: LayerGraph, cluster: Cluster, options: JointOptions, report: Report = _silent) -> JointPlan:
    """The best pipeline with the best strategies inside its stages, and why.

    Args:
        report: told the best step so far, the least open bound and the number of simulations.

    Raises:
        InfeasibleError: nothing fits the memory limit.
        UserError: an option is out of range, or does not apply to joint plans.
    """
    start = time.perf_counter()
    _check(options)
    base = options.base
    limit = USABLE_MEMORY * cluster.device.memory_bytes if base.memory_limit_bytes is None else base.memory_limit_bytes
    workload = base_workload(cluster, base, recompute=False)
    if base.micro_batch is not None:
        replace(workload, micro_batch=base.micro_batch)  # refuses one that does not divide
    job = _Job(graph, cluster, options, chain_of(graph), workload, limit, report)
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


def _without_pipeline(job: _Job) -> tuple[Planned | None, UserError | None]:
    try:
        return make_plan(job.graph, job.cluster, job.options.base), None
    except InfeasibleError as fault:
        return None, fault
    except UserError as fault:
        return None, fault


def _whole_mesh(cluster: Cluster) -> StageMesh:
    return StageMesh(cluster.num_nodes, cluster.devices_per_node)


def _one_stage(job: _Job, planned: Planned) -> Evaluation:
    """The existing planner's plan as a pipeline of one stage."""
    workload = planned.workload
    recompute = "layers" if workload.recompute else "none"
    spec = PipelineSchedule("1f1b", 1, workload.num_micro_batches)
    stage = StageChoice(job.chain.num_units, recompute, planned.strategies)
    return evaluate(job.chain, job.cluster, Configuration(_whole_mesh(job.cluster), spec, workload, (stage,)))


# ---- The whole space ---------------------------------------------------------------------------------------------------


def _searched(job: _Job, whole: Planned | None, fault: UserError | None, start: float) -> JointPlan:
    base, explorer, begin = job.options.base, job.explorer(), time.process_time()
    alone = None if whole is None else _one_stage(job, whole)
    known = math.inf if alone is None else alone.step_s
    stale = job.options.allow_stale
    notes: tuple[str, ...] = ()
    if stale and job.chain.shares_weights:
        notes = ("layers share a weight, so asynchronous schedules are left out",)
    narrow = explorer.explore(
        explorer.settings(base.micro_batch, False, lambda spec: spec.name == "1f1b" and spec.num_workers > 1),
        known,
        begin + _NARROW * job.time_limit_s,
        one_cut=True,
        report=job.report,
    )
    best = narrow.best or alone
    near = _near(job, explorer, narrow.best, stale, begin + _NEAR * job.time_limit_s)
    best = near or best
    wide = explorer.explore(
        explorer.settings(base.micro_batch, stale, lambda spec: spec.num_workers > 1),
        math.inf if best is None else best.step_s,
        begin + job.time_limit_s,
        report=job.report,
    )
    best = wide.best or best
    if best is None:
        if not wide.finished:
            raise UserError(
                f"no plan of {job.graph.name} that fits was found within {job.time_limit_s:g} s; raise --time-limit"
            )
        raise _infeasible(job, explorer, whole, fault)
    lower = min(best.step_s, wide.lower_bound_s)
    if whole is not None:
        lower = min(lower, whole.lower_bound)
    optimal = lower >= best.step_s * (1 - 1e-9)
    families = tuple(_families(job, whole, alone, fault, explorer))
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
    )


def _near(job: _Job, explorer: Explorer, best: Evaluation | None, stale: bool, deadline: float) -> Evaluation | None:
    """The best of all schedules on the mesh of a good plan, at its micro-batch, half and twice that, if one is better."""
    if best is None:
        return None
    mesh, size = best.configuration.mesh, best.configuration.workload.micro_batch
    everything = explorer.settings(job.options.base.micro_batch, stale, lambda spec: spec.num_workers > 1)
    settings = [one for one in everything if one.mesh == mesh and one.micro_batch in (size / 2, size, 2 * size)]
    return explorer.explore(settings, best.step_s, deadline, one_cut=True, report=job.report).best


def _considered(job: _Job, narrow: Explored, wide: Explored, explorer: Explorer, whole: Planned | None) -> Considered:
    sizes = "every micro-batch" if job.options.base.micro_batch is None else "the given micro-batch"
    stale = "every schedule, asynchronous ones too" if job.options.allow_stale else "every synchronous schedule"
    every = "all cuts" if _has_all_cuts(job) else "even and uneven cuts"
    again = " / ".join(job.recomputations)
    alone = 0 if whole is None else len(whole.candidates)
    return Considered(
        space=f"{stale}, every mesh of a stage, {sizes}, {every}, recomputation {again}, exact SBP inside each stage",
        configurations=wide.configurations + alone,
        settings=wide.settings + alone,
        ruled_out_by_memory=wide.out_of_memory,
        ruled_out_by_bound=wide.settings - len(wide.opened),
        simulated=narrow.simulated + wide.simulated,
        stage_searches=explorer.num_searches,
    )


def _has_all_cuts(job: _Job) -> bool:
    """Whether the space has every cut of the chain, for every number of workers."""
    depths = {mesh.num_workers(job.cluster) for mesh in stage_meshes(job.cluster)}
    return all(math.comb(job.chain.num_units - 1, depth - 1) <= MOST_CUTS for depth in depths)


def _infeasible(job: _Job, explorer: Explorer, whole: Planned | None, fault: UserError | None) -> UserError:
    """The error that nothing fits, with the least memory that an even pipeline, or none, would do with."""
    least = math.inf
    for mesh in stage_meshes(job.cluster):
        depth = mesh.num_workers(job.cluster)
        if not 1 <= depth <= job.chain.num_units:
            continue
        size = next(size for size in divisors(job.workload.batch) if size >= 1)
        if job.options.base.micro_batch is not None:
            size = job.options.base.micro_batch
        count = job.workload.batch // size
        each, extra = divmod(job.chain.num_units, depth)
        cut = [each + (s >= depth - extra) for s in range(depth)]
        fullest, first = 0.0, 0
        for s, units in enumerate(cut):
            need = Need(float(min(depth - s, count)), 1, math.inf)
            try:
                fullest = max(
                    fullest,
                    min(
                        explorer.interiors(mesh).smallest_memory(first, first + units, size, need, recompute)
                        for recompute in job.recomputations
                    ),
                )
            except UserError as error:
                fullest, fault = math.inf, fault or error
                break
            first += units
        least = min(least, fullest)
    if not math.isfinite(least):
        return fault or UserError(f"no stage of {job.graph.name} divides over the devices of {job.cluster.name}")
    return InfeasibleError(
        f"no plan of {job.graph.name} fits {format_bytes(job.limit_bytes)} per device on {job.cluster.num_devices} devices, "
        f"with a pipeline or without; the smallest memory that would do is {format_bytes(least)} ({least / 2**30:.4g} GiB)"
    )


# ---- Families ----------------------------------------------------------------------------------------------------------


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


def _figures(name: str, evaluation: Evaluation, description: str) -> FamilyFigures:
    return FamilyFigures(
        name=name,
        description=description,
        step_s=evaluation.step_s,
        compute_s=evaluation.compute_s,
        communication_s=evaluation.inner_communication_s,
        exposed_communication_s=evaluation.exposed_communication_s,
        bubble_s=evaluation.bubble_s,
        memory_bytes=evaluation.memory_bytes,
    )


def _families(
    job: _Job, whole: Planned | None, alone: Evaluation | None, fault: UserError | None, explorer: Explorer | None
) -> Iterator[FamilyFigures]:
    if alone is None:
        yield FamilyFigures("pure SBP", infeasible=str(fault))
    else:
        yield _figures("pure SBP", alone, describe(alone))
    yield _data_parallel(job, whole)
    explored = _megatron(job, explorer)
    found = explored.best
    if found is None:
        why = "no such plan fits the memory limit" if explored.finished else "none was found within the time limit"
        yield FamilyFigures("Megatron + 1F1B", infeasible=why)
    else:
        inner = _common_strategy(found)
        yield _figures("Megatron + 1F1B", found, f"{describe(found)}{inner}")
    for name, title in PLANNERS.items():
        if name == "wpipe" and not job.options.allow_stale:
            yield FamilyFigures(title, infeasible="asynchronous; offered with --allow-stale")
            continue
        try:
            plan = _paper(job, name)
        except UserError as error:
            yield FamilyFigures(title, infeasible=str(error))
        else:
            yield _figures(title, plan, describe(plan))


def _data_parallel(job: _Job, whole: Planned | None) -> FamilyFigures:
    name = "data parallel"
    mesh = _whole_mesh(job.cluster)
    strategy = Strategy(tuple((size, 1, 1) for size in mesh.devices(job.cluster).level_sizes))
    wish, best, why = job.options.base.micro_batch, None, ""
    least = math.inf
    for size in divisors(job.workload.batch) if wish is None else [wish]:
        if size % strategy.p0:
            continue
        for recompute in job.recomputations:
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
        return _figures(name, best, f"dp {strategy.p0}, {describe(best)}")
    if math.isfinite(least):
        why = f"needs {format_bytes(least)} per device, over the limit of {format_bytes(job.limit_bytes)}"
    slices = f"the batch does not divide over {strategy.p0} devices"
    return FamilyFigures(name, infeasible=why or slices)


def _megatron(job: _Job, like: Explorer | None) -> Explored:
    """The best plan of equal Megatron stages under 1F1B, each setting at its best cut."""
    explorer = Explorer(job.chain, job.cluster, job.workload, job.limit_bytes, job.recomputations, megatron, like)
    settings = explorer.settings(
        job.options.base.micro_batch, False, lambda spec: spec.name == "1f1b" and dict(spec.options) != {"policy": "B"}
    )
    deadline = time.process_time() + _FAMILY * job.time_limit_s
    return explorer.explore(settings, deadline=deadline, one_cut=True)


def _common_strategy(evaluation: Evaluation) -> str:
    """The mesh of Megatron's stages: data and model parallel ways of the linear layers."""
    linear = next((one for one in evaluation.layers if one.layer.kind == "linear"), None)
    if linear is None:
        return ""
    strategy = linear.strategy
    return f", dp {strategy.p0} x mp {strategy.p1 * strategy.p2}"


# ---- The papers' planners ----------------------------------------------------------------------------------------------


def _paper(job: _Job, name: str) -> Evaluation:
    """The best of a paper's plans that fits.

    Raises:
        UserError: there is none.
    """
    base = job.options.base
    if name == "wpipe" and job.chain.shares_weights:
        raise UserError("layers share a weight, whose copies asynchronous stages would update at different times")
    plans = paper_plans(name, job.chain, job.cluster, job.workload, job.limit_bytes, base.recompute, base.micro_batch)
    least, fault = math.inf, None
    for plan in plans[:_MOST_PAPER_PLANS]:
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


def _by_paper(job: _Job, whole: Planned | None, fault: UserError | None, start: float) -> JointPlan:
    name = job.options.pipeline
    try:
        best = _paper(job, name)
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
        families=tuple(_families(job, whole, alone, fault, None)),
        search_s=time.perf_counter() - start,
    )


def _ideal_s(job: _Job) -> float:
    """All products of a step at the speed of all devices together: no plan is faster."""
    device = job.cluster.device
    speed = job.cluster.num_devices * device.peak_flops[job.workload.precision] * device.efficiency
    return 2 * job.graph.flops * job.workload.batch / speed
