"""A plan as one readable Python file that needs OneFlow alone.

    heading             what it is, what it is predicted to cost, how to run it
    ranks               the mesh and its axes
    model               a class for each repeated block and one for the model: parameters with their SBP, every step with its price
    library             what the model calls, in the runtime's own words: layers, layouts, collectives, as far as it needs them
    main                trains some steps

The statements are those that the runtime carries out for the same plan, so losses, bytes and times are too.
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

#: What a file uses while it is loaded.
_FIRST = ("Axis", "Ranks")


def oneflow_text(plan: PlanFile, model: str = "") -> str:
    """The file.

    Args:
        model: ``FILE.py:FUNCTION`` that makes the plain model, where it is none that is built in.

    Raises:
        UserError: the plan has a layer that cannot be written, or its model is not built in and nothing makes it; it is named.
    """
    if plan.num_stages > 1:
        from .pipelined import pipeline_text

        return pipeline_text(plan, model)
    built_in = built_in_of(plan.graph, model)
    check_graph(plan.graph)
    whole = _whole(plan)
    scene = Scene(
        plan.graph,
        whole.cluster,
        whole.workload,
        plan.strategies,
        {found.layer.name: found for found in whole.assessment.layers},
        built_in,
        Names(RESERVED),
    )
    what = "The model; ``model(inputs, targets)`` is the mean loss of a micro-batch, the same arrays on every rank."
    classes = class_texts([ClassOfLayers(scene, "Model", what)])
    return assembled(
        FileDraft(
            heading=_heading(plan, whole, built_in.family if built_in else model),
            num_ranks=scene.num_ranks,
            ranks=f"RANKS = Ranks({scene.num_ranks})\n{SBP_NAMES}",
            first=_FIRST,
            sections=(("", (_constants(scene),)), ("The model", tuple(classes))),
            main=templates.main(scene, model),
        )
    )


@dataclass(frozen=True)
class _Whole:
    """A plan of one stage: what runs on all devices, and its price."""

    cluster: Cluster
    workload: Workload
    assessment: Assessment


def _whole(plan: PlanFile) -> _Whole:
    configuration = plan.evaluation.configuration
    (choice,) = configuration.stages
    if choice.recompute == "stage":
        raise UserError(
            "the plan recomputes its stage as a whole, form='oneflow' writes recomputation layer by layer; "
            "plan with recompute=False"
        )
    workload = replace(plan.workload, recompute=choice.recompute == "layers")
    return _Whole(configuration.mesh_of(0).devices(plan.cluster), workload, plan.evaluation.stages[0].assessment)


def _heading(plan: PlanFile, whole: _Whole, origin: str) -> str:
    cluster, workload, assessment = plan.cluster, whole.workload, whole.assessment
    precision = (
        "" if workload.precision == "float32" else f" (of {workload.precision} precision; this file runs in float32)"
    )
    kept = ", activations recomputed" if workload.recompute else ""
    lines = [
        f"Model    {plan.graph.name} ({origin}): {plan.graph.num_parameters:,} parameters",
        f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
        f"Step     {workload.batch} {plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}{kept}",
        f"Price    {format_seconds(assessment.step_s)} a step{precision}: {format_seconds(assessment.compute_s)} compute, "
        f"{format_seconds(assessment.communication_s)} communication;",
        f"         each rank sends {format_bytes(assessment.sent_bytes)} and needs {format_bytes(assessment.memory_bytes)}",
        f"Plan     graph {plan.graph.hash}",
        f"         cluster {cluster.hash}",
        *(f"Note     {note}" for note in plan.graph.notes),
    ]
    return "\n".join([templates.DOCSTRING, *map(comment, lines)])


def _constants(scene: Scene) -> str:
    """The mesh, its axes (all that the classes have asked for), the workload."""
    mesh = scene.common_mesh
    lines = []
    if mesh is not None:
        lines += [
            comment("Parameters lie on this mesh; what each of its axes does to them is their SBP signature."),
            f"MESH = {scene.mesh_text}",
        ]
    if scene.axes:
        lines.append(comment("The axes that collectives run along."))
    lines += axis_lines(((axis, name) for axis, name in scene.axes.items()), scene.num_ranks)
    workload, aliases = scene.workload, aliases_of(scene.graph)
    lines += [
        f"BATCH, MICRO_BATCH = {workload.batch}, {workload.micro_batch}",
        comment("Parameters that are another one, by their names in the plain model."),
        f"ALIASES: dict[str, str] = {value_text(aliases)}",
    ]
    return "\n".join(lines)
