"""A planner's result as a JSON document, with the same fields for all planners.

Common fields: ``planner``, ``profile``, ``cluster``, ``num_devices``, ``batch``, ``plan``, ``micro_batch``,
``num_micro_batches``, ``recompute``, ``stages`` (``layers``: their names, ``devices``: their numbers), ``latency_s`` (the
planner's own estimate), ``simulated_s``, ``samples_per_s`` (by simulation), ``speedup_over_dp`` (simulated latency of data
parallelism over the plan's; null if data parallelism does not fit in memory), ``memory_bytes`` (of the fullest device),
``status`` (``complete``, or ``interrupted``: the best plan found until then) and ``alternatives`` (other simulated plans).
Documents of DAPPLE also have ``corrected_latency_s``: the paper's formula with corrected ends of the stages (:mod:`.latency`).
Their stages also have ``forward_s`` and ``backward_s`` (of a micro-batch), ``all_reduce_s`` (of the gradients, per iteration),
``exposed_all_reduce_s`` (the part of it after the last backward), ``in_flight`` and ``memory_bytes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

from .chimera import ChimeraConfiguration, ChimeraResult
from .dapple import DapplePlan, DappleResult, evaluate
from .workload import PlannerError, ProfiledWorkload
from .wpipe import WPipeConfiguration, WPipeResult

__all__ = ["Result", "document_of"]

Result = Union[DappleResult, ChimeraResult, WPipeResult]
MAX_ALTERNATIVES = 10


def document_of(result: Result, workload: ProfiledWorkload, is_interrupted: bool = False) -> dict[str, Any]:
    """A planner's result as a JSON document (fields: module's docstring)."""
    document: dict[str, Any] = {
        "format": "autoddl-pipeline",
        "version": 1,
        "profile": workload.profile.name,
        "cluster": workload.cluster.name,
        "num_devices": workload.cluster.num_devices,
        "batch": workload.batch,
        "status": "interrupted" if is_interrupted else "complete",
    }
    if isinstance(result, DappleResult):
        document.update(_dapple(result, workload))
    elif isinstance(result, ChimeraResult):
        document.update(_chimera(result, workload))
    else:
        document.update(_wpipe(result, workload))
    simulated = document["simulated_s"]
    if not isinstance(result, DappleResult):
        parallel = _data_parallel_s(workload)
        document["speedup_over_dp"] = None if parallel is None else parallel / simulated
    document["samples_per_s"] = workload.batch / simulated
    return document


def _data_parallel_s(workload: ProfiledWorkload) -> float | None:
    try:
        return evaluate(workload, (), (workload.cluster.num_devices,)).simulated_s
    except PlannerError:
        return None


def _dapple(result: DappleResult, workload: ProfiledWorkload) -> dict[str, Any]:
    plan = result.plan
    stages = [
        {
            **_stage(workload, stage.first, stage.stop, stage.devices),
            "forward_s": stage.forward_s,
            "backward_s": stage.backward_s,
            "all_reduce_s": stage.all_reduce_s,
            "exposed_all_reduce_s": stage.exposed_all_reduce_s,
            "in_flight": stage.in_flight,
            "memory_bytes": stage.memory_bytes,
        }
        for stage in plan.stages
    ]
    return {
        "planner": "dapple",
        **_dapple_row(plan),
        "recompute": workload.recompute,
        "stages": stages,
        "speedup_over_dp": result.speedup_over_dp,
        "memory_bytes": max(stage.memory_bytes for stage in plan.stages),
        "corrected_latency_s": plan.corrected_latency_s,
        "alternatives": [_dapple_row(other) for other in result.simulated[1 : MAX_ALTERNATIVES + 1]],
    }


def _dapple_row(plan: DapplePlan) -> dict[str, Any]:
    return {
        "plan": plan.name,
        "split": [stage.stop - stage.first for stage in plan.stages],
        "micro_batch": plan.micro_batch,
        "num_micro_batches": plan.num_micro_batches,
        "policy": plan.policy,
        "latency_s": plan.latency_s,
        "simulated_s": plan.simulated_s,
    }


def _chimera(result: ChimeraResult, workload: ProfiledWorkload) -> dict[str, Any]:
    plan = result.plan
    return {
        "planner": "chimera",
        "stages": _stages(workload, plan.cuts, plan.placements),
        "plan_by_model": result.by_model.name,
        **_ranked([_chimera_row(one) for one in result.configurations]),
    }


def _chimera_row(plan: ChimeraConfiguration) -> dict[str, Any]:
    return {
        **_row(plan),
        "num_stages": plan.depth,
        "num_pipelines": plan.num_pipelines,
        "concatenation": plan.concatenation,
        "latency_s": plan.model_s,
        "simulated_s": plan.simulated_s,
    }


def _wpipe(result: WPipeResult, workload: ProfiledWorkload) -> dict[str, Any]:
    plan = result.plan
    return {
        "planner": "wpipe",
        "stages": _stages(workload, plan.cuts, plan.devices),
        **_ranked([_wpipe_row(one) for one in result.configurations]),
    }


def _wpipe_row(plan: WPipeConfiguration) -> dict[str, Any]:
    return {
        **_row(plan),
        "depth": plan.depth,
        "placement": plan.placement,
        "latency_s": plan.bound_s,
        "simulated_s": plan.period_s,
    }


def _row(plan: ChimeraConfiguration | WPipeConfiguration) -> dict[str, Any]:
    """The fields common to plans of equal stages."""
    return {
        "plan": plan.name,
        "width": plan.width,
        "micro_batch": plan.micro_batch,
        "num_micro_batches": plan.num_micro_batches,
        "recompute": plan.recompute,
        "memory_bytes": plan.memory_bytes,
    }


def _ranked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best plan's row, with the next ones as its alternatives."""
    return {**rows[0], "alternatives": rows[1 : MAX_ALTERNATIVES + 1]}


def _stages(
    workload: ProfiledWorkload, cuts: Sequence[int], devices: Sequence[tuple[int, ...]]
) -> list[dict[str, Any]]:
    return [_stage(workload, *layers, held) for layers, held in zip(zip(cuts, cuts[1:]), devices)]


def _stage(workload: ProfiledWorkload, first: int, stop: int, devices: Sequence[int]) -> dict[str, Any]:
    return {"layers": [layer.name for layer in workload.profile.layers[first:stop]], "devices": list(devices)}
