"""The families of plans that people use, planned for comparison.

Pure SBP, data parallelism, Megatron's equal stages under 1F1B, and what the planners of DAPPLE, Chimera and WPipe decide
(:mod:`.papers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.stopping import StopRequestedError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.planners import Clock

from ..planner import InfeasibleError, Planned
from .configuration import Configuration, PipelineSchedule, StageChoice
from .evaluation import Evaluation, evaluate
from .explorer import Explorer
from .fixed import megatron
from .job import Job
from .meshes import StageMesh
from .papers import PLANNERS, paper_plans
from .result import FamilyFigures
from .search import Explored, explore
from .space import divisors

__all__ = ["describe", "families_of", "figures_of", "paper_plan", "stopped", "whole_mesh"]

#: The parts of the time limit that Megatron's family, and each paper's planner, may take.
_MEGATRON, _PAPER = 0.2, 0.1
#: How many of a paper's plans are looked at for one that fits.
_MOST_PAPER_PLANS = 16


def whole_mesh(cluster: Cluster) -> StageMesh:
    """All devices."""
    return StageMesh(cluster.num_nodes, cluster.devices_per_node)


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


def figures_of(name: str, evaluation: Evaluation, description: str) -> FamilyFigures:
    """An evaluation as a row of the table."""
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


def families_of(
    job: Job, whole: Planned | None, alone: Evaluation | None, fault: UserError | None, explorer: Explorer | None
) -> Iterator[FamilyFigures]:
    """The best plan of each family, or why there is none.

    Args:
        whole, alone, fault: the plan without a pipeline, as it is and as one stage, or why there is none.
        explorer: of the same model and cluster, whose tables Megatron's family may share.
    """
    if alone is None:
        yield FamilyFigures("pure SBP", infeasible=str(fault))
    else:
        yield figures_of("pure SBP", alone, describe(alone))
    yield _data_parallel(job, whole)
    explored = _megatron(job, explorer)
    found = explored.best
    if found is None:
        why = "no such plan fits the memory limit" if explored.finished else f"none was found {_before(job)}"
        yield FamilyFigures("Megatron + 1F1B", infeasible=why)
    else:
        inner = _common_strategy(found)
        yield figures_of("Megatron + 1F1B", found, f"{describe(found)}{inner}")
    for name, title in PLANNERS.items():
        if name == "wpipe" and not job.options.allow_stale:
            yield FamilyFigures(title, infeasible="asynchronous; offered with --allow-stale")
            continue
        clock = Clock(_PAPER * job.time_limit_s, job.stop)
        try:
            plan = paper_plan(job, name, clock)
        except UserError as error:
            yield FamilyFigures(title, infeasible=str(error))
        except StopRequestedError:
            yield FamilyFigures(title, infeasible=f"none was found {_before(job)}")
        else:
            yield figures_of(title, plan, describe(plan) + stopped(clock))


def stopped(clock: Clock) -> str:
    """What is said of a plan whose planner's time was over."""
    if clock.stop.is_requested:
        return "; interrupted"
    return f"; stopped after {clock.limit_s:g} s" if clock.stopped else ""


def _before(job: Job) -> str:
    """When the search for a family's plan ended without one."""
    return "before the search was interrupted" if job.stop.is_requested else "within the time limit"


def _data_parallel(job: Job, whole: Planned | None) -> FamilyFigures:
    name = "data parallel"
    mesh = whole_mesh(job.cluster)
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
        return figures_of(name, best, f"dp {strategy.p0}, {describe(best)}")
    if math.isfinite(least):
        why = f"needs {format_bytes(least)} per device, over the limit of {format_bytes(job.limit_bytes)}"
    slices = f"the batch does not divide over {strategy.p0} devices"
    return FamilyFigures(name, infeasible=why or slices)


def _megatron(job: Job, like: Explorer | None) -> Explored:
    """The best plan of equal Megatron stages under 1F1B, each setting at its best cut."""
    explorer = Explorer(
        job.chain, job.cluster, job.workload, job.limit_bytes, job.recomputations, megatron, like, job.stop
    )
    settings = explorer.settings(
        job.options.base.micro_batch,
        False,
        lambda spec: spec.name == "1f1b" and dict(spec.options) != {"policy": "B"},
        uneven=False,
    )
    return explore(explorer, settings, deadline=Clock(_MEGATRON * job.time_limit_s, job.stop), one_cut=True)


def _common_strategy(evaluation: Evaluation) -> str:
    """The mesh of Megatron's stages: data and model parallel ways of the linear layers."""
    linear = next((one for one in evaluation.layers if one.layer.kind == "linear"), None)
    if linear is None:
        return ""
    strategy = linear.strategy
    return f", dp {strategy.p0} x mp {strategy.p1 * strategy.p2}"


def paper_plan(job: Job, name: str, clock: Clock) -> Evaluation:
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
