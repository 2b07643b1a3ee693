"""Writes the top of an exported OneFlow file: how to read and start it, and the figures of the plan as comments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoddl.costmodel.devices import CPU, DEVICE_TYPES, DEVICE_VARIABLE, GPU
from autoddl.costmodel.precision import Precision
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.result import recomputed_text
from autoddl.pipelines.runtime.comm.handshake import NO_HANDSHAKE, handshake_of

from ..executors import execution_notes
from .source import comment, literal

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["backend_text", "heading_text", "settings_text"]

_DOCSTRING = '''"""A OneFlow @what@ annotated with an AutoDDL plan, and its training loop. Written by `autoddl export`.

The file needs OneFlow 0.9.0 and numpy, but not AutoDDL. Its parts are marked by lines `# ====`:

    Library: device, ranks, axes    the classes `Backend`, `Ranks` and `Axis`, which the next part uses
    The plan                        @plan@ of this plan
    The model                       a class for each kind of repeated block, and @classes@
@schedule@    The library                     functions and classes that @callers@, copied from AutoDDL's runtime
    Main                            data, training loop and command line

Parameters are OneFlow global tensors with the plan's placements and SBP signatures. Each rank computes with its own blocks of
them. Every communication step of a layer is a statement, with its predicted price as a comment: the time, and the bytes that
each rank sends. The backward pass runs the adjoint of each step, at the same price. Activations have the shape (samples, rows,
features); samples are split over the p0 ranks, features over the other ranks.
@pipeline@
The file can be edited like any model. Start it with

    python3 -m oneflow.distributed.launch --nproc_per_node RANKS_OF_A_NODE THIS_FILE.py --steps 10

or with any launcher that sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK.
"""'''
#: Words of the docstring of a file without a pipeline.
_OF_MODEL = {
    "what": "model",
    "plan": "ranks, mesh axes and batch size",
    "classes": "the class `Model`",
    "schedule": "",
    "callers": "the model calls",
    "pipeline": "",
}
#: Words of the docstring of a file with a pipeline.
_OF_PIPELINE = {
    "what": "pipeline",
    "plan": "workers, mesh axes and micro-batch size",
    "classes": "a class for each stage",
    "schedule": """\
    The schedule                    placement of the stages, tensors between them, and the instructions of each worker
""",
    "callers": "these parts call",
    "pipeline": """
The parameters of a stage are placed on the ranks of its worker. INSTRUCTIONS lists the tasks and messages of each worker, in
order.
""",
}


def heading_text(plan: PlanFile, origin: str) -> str:
    """Return the docstring of the file, and comments on model, cluster, schedule, batch, price and origin of the plan.

    Args:
        plan: the plan.
        origin: family of the built-in model, or the function that makes the plain model.
    """
    docstring = _DOCSTRING
    for name, words in (_OF_PIPELINE if plan.num_stages > 1 else _OF_MODEL).items():
        docstring = docstring.replace(f"@{name}@", words)
    cluster, workload, evaluation = plan.cluster, plan.workload, plan.evaluation
    lines = [
        f"Model    {plan.graph.name} ({origin}): {plan.graph.num_parameters:,} parameters",
        f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
        *(_schedule_lines(evaluation) if plan.num_stages > 1 else []),
        f"Step     {workload.batch} {plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}"
        f"{_recomputation(evaluation)}",
        *_price_lines(evaluation, workload.precision),
        f"Plan     graph {plan.graph.hash}",
        f"         cluster {cluster.hash}",
        *(f"Note     {note}" for note in (*plan.graph.notes, *execution_notes(plan.graph, workload))),
    ]
    return "\n".join([docstring, *map(comment, lines)])


def settings_text(plan: PlanFile) -> str:
    """Return the constants of device and types, which stand below the imports."""
    types = plan.workload.types
    lines = [
        comment(
            f"The type of device, {' or '.join(DEVICE_TYPES)}; --device or the variable {DEVICE_VARIABLE} replaces it for a run."
        ),
        f"DEVICE = {literal(GPU if plan.cluster.has_gpus else CPU)}",
        comment(
            "The types of activations and of weights in products; of stored weights, optimizer states and statistics;"
        ),
        comment(
            "and of gradient sums over ranks: flow.float16, flow.bfloat16 (from compute capability 8.0), flow.float32"
        ),
        f"TYPES = {_types_text(types)}",
    ]
    if types.has_masters:
        lines += [
            comment("The types on CPU ranks, which have no kernels for half precision."),
            f"CPU_TYPES = {_types_text(types.on_cpu())}",
            comment("Whether losses are scaled, so that small gradients do not become zero; float16 needs it."),
            f"SCALES_LOSSES = {types.scales_losses}",
        ]
    return "\n".join(lines)


def backend_text(plan: PlanFile) -> str:
    """Return the definition of ``BACKEND``, which the constants of the plan begin with."""
    words = ["DEVICE", "TYPES"]
    if plan.workload.types.has_masters:
        words += ["CPU_TYPES", "SCALES_LOSSES"]
    handshake = handshake_of(plan.cluster)
    if handshake != NO_HANDSHAKE:
        words.append(f"handshake={handshake!r}")
    return f"BACKEND = chosen_backend({', '.join(words)})"


def _types_text(types: Precision) -> str:
    return ", ".join(f"flow.{name}" for name in (types.compute, types.master, types.communication))


def _schedule_lines(evaluation: Evaluation) -> list[str]:
    schedule = evaluation.schedule
    label = evaluation.configuration.schedule.label
    return [f"Pipeline {label}: {schedule.num_stages} stages on {schedule.num_workers} workers"]


def _recomputation(evaluation: Evaluation) -> str:
    """Return a remark on the stages whose activations are recomputed; empty if there are none."""
    choices = evaluation.configuration.stages
    recomputed = [str(number) for number, choice in enumerate(choices) if choice.recompute != "none"]
    if not recomputed:
        return ""
    if len(recomputed) == len(choices):
        ways = {choice.recompute for choice in choices}
        return recomputed_text(ways.pop()) if len(ways) == 1 and ways != {"stage"} else ", activations recomputed"
    return f", activations of stage{'s' if len(recomputed) > 1 else ''} {', '.join(recomputed)} recomputed"


def _price_lines(evaluation: Evaluation, precision: str) -> list[str]:
    remark = "" if precision == "float32" else f" in {precision} precision"
    step, compute = format_seconds(evaluation.step_s), format_seconds(evaluation.compute_s)
    sent, memory = format_bytes(evaluation.sent_bytes), format_bytes(evaluation.memory_bytes)
    if len(evaluation.stages) == 1:
        communication = format_seconds(evaluation.communication_s)
        return [
            f"Price    {step} per step{remark}: {compute} compute, {communication} communication;",
            f"         each rank sends {sent} and needs {memory}",
        ]
    lines = [
        f"Price    {step} per step{remark}; on the busiest worker {compute} compute,",
        f"         {format_seconds(evaluation.inner_communication_s)} communication inside its stages, "
        f"{format_seconds(evaluation.exposed_communication_s)} exposed communication between stages,",
        f"         {format_seconds(evaluation.bubble_s)} bubble;",
        f"         each rank sends up to {sent} and needs up to {memory}",
    ]
    count = evaluation.schedule.num_pipelines
    if count > 1:
        lines.append(
            f"         prices per step below are for all micro-batches; each of the {count} pipelines runs a part of them"
        )
    return lines
