"""Writes a plan as one readable Python file that needs OneFlow but not AutoDDL.

Parts of the file, in order:

    docstring           how to read and start the file; model, cluster and predicted price as comments (:mod:`.heading`)
    plan                ranks, mesh axes and sizes; for several stages, the workers
    model               a class for each kind of repeated block, and one for each stage: parameters with SBP, priced steps
    schedule            for several stages: placement, tensors between stages, instructions of each worker (:mod:`.pipelined`)
    library             the definitions that these parts call, copied from the runtime: layers, layouts, collectives
    main                data, training loop, command line (:mod:`.templates`)

A plan without a pipeline is a pipeline of one stage. Its file needs no engine and no schedule: the stage is the class ``Model``,
which sums its gradients itself, so that the file reads like a plain training script. The statements of the stages are those that
the runtime executes for the same plan, so losses and traffic are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.joint.configuration import recomputed_inside
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.stage.plan import StagePlan, entry_strategy, is_mirrored

from ..staging import stage_plans
from ..zoo.builtin import BuiltIn
from .assembling import RESERVED, SBP_NAMES, FileDraft, aliases_of, assembled, axis_lines, built_in_of, check_graph
from .classes import ClassOfLayers, class_texts
from .heading import backend_text, heading_text, settings_text
from .pipelined import PipelineParts
from .scene import ONE_STAGE, PIPELINE, Scene
from .sharedweights import SharedWeights
from .source import Names, comment, value_text
from .templates import main_text

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["oneflow_text"]


def oneflow_text(plan: PlanFile, model: str = "") -> str:
    """Return the text of the file.

    Args:
        plan: any plan.
        model: ``FILE.py:FUNCTION`` that makes the plain model; may be empty if the model is a built-in one.

    Raises:
        UserError: a layer or the schedule of the plan cannot be written, or the model is not a built-in one and ``model`` is empty.
    """
    built_in = built_in_of(plan.graph, model)
    check_graph(plan.graph)
    stages = stage_plans(plan)
    shared = SharedWeights(plan.graph, stages)
    parts = PipelineParts(plan, stages, shared) if plan.num_stages > 1 else _OneStageParts(plan)
    scenes = _scenes(plan, built_in, stages, shared)
    classes = class_texts(parts.classes(scenes))
    draft = FileDraft(
        heading=heading_text(plan, built_in.family if built_in else model),
        num_ranks=sum(plan.evaluation.schedule.widths),
        settings=settings_text(plan),
        plan=f"{backend_text(plan)}\n{parts.constants_text(scenes)}",  # after the classes, which determine the mesh axes
        sections=(("The model", tuple(classes)), *parts.schedule_sections()),
        main=main_text(scenes[0], model, parts.calls),
    )
    return assembled(draft)


def _scenes(
    plan: PlanFile, built_in: BuiltIn | None, stages: Sequence[StagePlan], shared: SharedWeights
) -> list[Scene]:
    """Return the stages of a plan as the writers of classes need them. They share identifiers and names of mesh axes."""
    names, axes = Names(RESERVED), dict[Axis, str]()
    scenes = []
    for number, choice in enumerate(plan.evaluation.configuration.stages):
        figures = plan.evaluation.stages[number]
        strategies = dict(choice.strategies)
        if number:
            strategies[ENTRY] = entry_strategy(plan.graph, stages, number)
        parameters = [p.name for layer in figures.graph.layers for p in plan.graph[layer.name].parameters]
        scenes.append(
            Scene(
                graph=figures.graph.graph,
                model=plan.graph,
                cluster=plan.evaluation.configuration.mesh_of(number).devices(plan.cluster),
                workload=replace(plan.workload, recompute=recomputed_inside(choice.recompute)),
                strategies=strategies,
                assessed={assessed.layer.name: assessed for assessed in figures.assessment.layers},
                built_in=built_in,
                names=names,
                axes=axes,
                form=PIPELINE if plan.num_stages > 1 else ONE_STAGE,
                is_mirrored=is_mirrored(plan.graph, plan.strategies),
                copies={name: shared.stored_names[name] for name in parameters if name in shared.stored_names},
            )
        )
    return scenes


class _OneStageParts:
    """The parts of a file that only plans of one stage have; the counterpart of `PipelineParts`."""

    calls = None

    def __init__(self, plan: PlanFile):
        (choice,) = plan.evaluation.configuration.stages
        if choice.recompute == "stage":
            raise UserError(
                "the plan recomputes its stage as a whole, but form='oneflow' writes recomputation of layers and blocks; "
                "plan with recompute=blocks, layers or none"
            )
        self._plan = plan

    def classes(self, scenes: Sequence[Scene]) -> list[ClassOfLayers]:
        """Return the class of the model."""
        docstring = "The model. ``model(inputs, targets)`` returns the mean loss of a micro-batch; all ranks pass the same arrays."
        return [ClassOfLayers(scenes[0], "Model", docstring)]

    def constants_text(self, scenes: Sequence[Scene]) -> str:
        """Return the constants of the plan. The classes have to be written before: they determine the mesh axes."""
        (scene,) = scenes
        lines = [f"RANKS = Ranks({scene.num_ranks}, BACKEND)", SBP_NAMES]
        if scene.common_mesh is not None:
            lines += [
                comment("The mesh that parameters are placed on. An SBP signature has a state for each of its axes."),
                f"MESH = {scene.mesh_text}",
            ]
        if scene.axes:
            lines.append(comment("Mesh axes that collectives run along, and the groups of ranks along each."))
        lines += axis_lines(scene.axes.items(), scene.num_ranks)
        workload, aliases = scene.workload, aliases_of(self._plan.graph)
        lines += [
            comment("Number of samples of a micro-batch, and of micro-batches of a step."),
            f"MICRO_BATCH, NUM_MICRO_BATCHES = {workload.micro_batch}, {workload.num_micro_batches}",
            comment(
                "Shared parameters: further names in the plain model, and the name under which the value is stored."
            ),
            f"ALIASES: dict[str, str] = {value_text(aliases)}",
        ]
        if workload.bucket_bytes:
            lines += [
                comment("Layers with fewer bytes of gradients sum them together, in vectors of at least so many."),
                f"BUCKET_BYTES = {workload.bucket_bytes}",
            ]
        return "\n".join(lines)

    def schedule_sections(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return nothing: a single stage needs no schedule."""
        return ()
