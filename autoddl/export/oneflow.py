"""Writes a plan without a pipeline as one readable Python file that needs OneFlow but not AutoDDL.

Parts of the file, in order:

    docstring           how to read and start the file; model, cluster and predicted price as comments
    plan                ranks, mesh and mesh axes, batch size
    model               a class for each kind of repeated block, and one for the model: parameters with SBP, priced steps
    library             the definitions that the model calls, copied from the runtime: layers, layouts, collectives
    main                data, training loop, command line

The statements of the model are those that the runtime executes for the same plan, so losses and traffic are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoddl.costmodel.assessment import Assessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload

from . import templates
from .assembling import RESERVED, SBP_NAMES, FileDraft, aliases_of, assembled, axis_lines, built_in_of, check_graph
from .classes import ClassOfLayers, class_texts
from .scene import Scene
from .source import Names, comment, value_text

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["oneflow_text"]


def oneflow_text(plan: PlanFile, model: str = "") -> str:
    """Return the text of the file; a plan with a pipeline is written by :mod:`.pipelined`.

    Args:
        plan: any plan.
        model: ``FILE.py:FUNCTION`` that makes the plain model; may be empty if the model is a built-in one.

    Raises:
        UserError: a layer of the plan cannot be written, or the model is not a built-in one and ``model`` is empty.
    """
    if plan.num_stages > 1:
        from .pipelined import pipeline_text

        return pipeline_text(plan, model)
    built_in = built_in_of(plan.graph, model)
    check_graph(plan.graph)
    stage = _only_stage(plan)
    scene = Scene(
        graph=plan.graph,
        cluster=stage.cluster,
        workload=stage.workload,
        strategies=plan.strategies,
        assessed={assessed.layer.name: assessed for assessed in stage.assessment.layers},
        built_in=built_in,
        names=Names(RESERVED),
    )
    docstring = (
        "The model. ``model(inputs, targets)`` returns the mean loss of a micro-batch; all ranks pass the same arrays."
    )
    classes = class_texts([ClassOfLayers(scene, "Model", docstring)])
    return assembled(
        FileDraft(
            heading=_heading(plan, stage, built_in.family if built_in else model),
            num_ranks=scene.num_ranks,
            plan=_constants(scene),
            sections=(("The model", tuple(classes)),),
            main=templates.main_text(scene, model),
        )
    )


@dataclass(frozen=True)
class _OnlyStage:
    """The single stage of a plan without a pipeline.

    Attributes:
        cluster: devices of the stage.
        workload: the plan's, with the recomputation of the stage.
        assessment: price of the stage.
    """

    cluster: Cluster
    workload: Workload
    assessment: Assessment


def _only_stage(plan: PlanFile) -> _OnlyStage:
    configuration = plan.evaluation.configuration
    (choice,) = configuration.stages
    if choice.recompute == "stage":
        raise UserError(
            "the plan recomputes its stage as a whole, but form='oneflow' writes recomputation layer by layer; "
            "plan with recompute=False"
        )
    workload = replace(plan.workload, recompute=choice.recompute == "layers")
    return _OnlyStage(configuration.mesh_of(0).devices(plan.cluster), workload, plan.evaluation.stages[0].assessment)


def _heading(plan: PlanFile, stage: _OnlyStage, origin: str) -> str:
    """Return the docstring of the file, and comments on model, cluster, batch, price and origin of the plan.

    Args:
        origin: family of the built-in model, or the function that makes the plain model.
    """
    cluster, workload, assessment = plan.cluster, stage.workload, stage.assessment
    precision = (
        ""
        if workload.precision == "float32"
        else f" (in {workload.precision} precision; this file computes in float32)"
    )
    recomputation = ", activations recomputed" if workload.recompute else ""
    lines = [
        f"Model    {plan.graph.name} ({origin}): {plan.graph.num_parameters:,} parameters",
        f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
        f"Step     {workload.batch} {plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}"
        f"{recomputation}",
        f"Price    {format_seconds(assessment.step_s)} per step{precision}: {format_seconds(assessment.compute_s)} compute, "
        f"{format_seconds(assessment.communication_s)} communication;",
        f"         each rank sends {format_bytes(assessment.sent_bytes)} and needs {format_bytes(assessment.memory_bytes)}",
        f"Plan     graph {plan.graph.hash}",
        f"         cluster {cluster.hash}",
        *(f"Note     {note}" for note in plan.graph.notes),
    ]
    return "\n".join([templates.DOCSTRING, *map(comment, lines)])


def _constants(scene: Scene) -> str:
    """Return the constants of the plan. The classes have to be written before: they determine the mesh axes."""
    mesh = scene.common_mesh
    lines = [f"RANKS = Ranks({scene.num_ranks})", SBP_NAMES]
    if mesh is not None:
        lines += [
            comment("The mesh that parameters are placed on. An SBP signature has a state for each of its axes."),
            f"MESH = {scene.mesh_text}",
        ]
    if scene.axes:
        lines.append(comment("Mesh axes that collectives run along, and the groups of ranks along each."))
    lines += axis_lines(scene.axes.items(), scene.num_ranks)
    workload, aliases = scene.workload, aliases_of(scene.graph)
    lines += [
        comment("Number of samples of a micro-batch, and of micro-batches of a step."),
        f"MICRO_BATCH, NUM_MICRO_BATCHES = {workload.micro_batch}, {workload.num_micro_batches}",
        comment("Shared parameters: further names in the plain model, and the name under which the value is stored."),
        f"ALIASES: dict[str, str] = {value_text(aliases)}",
    ]
    return "\n".join(lines)
