"""Writes a plan with a pipeline as one readable Python file that needs OneFlow but not AutoDDL.

Parts of the file, in order:

    docstring           how to read and start the file; model, cluster, schedule and predicted price as comments
    plan                workers and their stages, mesh axes, micro-batch size
    model               a class for each kind of repeated block, and one for each stage: parameters with SBP, priced steps
    schedule            placement of the stages, tensors between them, instructions of each worker (:mod:`.scheduletext`)
    library             the definitions that these parts call, copied from the runtime: its engine, layers, layouts, collectives
    main                data, training loop, command line
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.pipeline.holding import make_holding
from autoddl.pipelines.runtime.pipeline.slots import RankMap, slots_per_micro_batch
from autoddl.pipelines.runtime.pipeline.stage_plans import entry_strategy, stage_layouts
from autoddl.pipelines.schedule import Schedule

from ..staging import stage_plans
from ..zoo.builtin import BuiltIn
from . import templates
from .assembling import RESERVED, SBP_NAMES, FileDraft, assembled, axis_lines, built_in_of, check_graph
from .classes import ClassOfLayers, class_texts
from .scene import Scene
from .scheduletext import boundaries_text, frame_text, instructions_text
from .sharedweights import SharedWeights
from .source import Names, comment, plain_text

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["pipeline_text"]


def pipeline_text(plan: PlanFile, model: str = "") -> str:
    """Return the text of the file.

    Args:
        plan: a plan of several stages.
        model: ``FILE.py:FUNCTION`` that makes the plain model; may be empty if the model is a built-in one.

    Raises:
        UserError: a layer or the schedule of the plan cannot be written, or the model is not a built-in one and ``model`` is empty.
    """
    built_in = built_in_of(plan.graph, model)
    check_graph(plan.graph)
    return assembled(_PipelineWriter(plan, built_in, model).draft())


class _PipelineWriter:
    """Writes the file of one plan.

    Attributes:
        stages: the plan of each stage, for the runtime.
        layouts: layout of the input and the output of each stage.
        ranks: the ranks of each worker.
        shared: weights that several stages hold.
        axes: names of mesh axes in the file; all stages share them.
        names: identifiers of the file; all stages share them.
        scenes: the stages, as the writers of classes need them.
    """

    def __init__(self, plan: PlanFile, built_in: BuiltIn | None, model: str):
        self.plan, self.built_in, self.model = plan, built_in, model
        self.pipeline: Evaluation = plan.evaluation
        self.schedule: Schedule = self.pipeline.schedule
        self.stages = stage_plans(plan)
        self.layouts = stage_layouts(plan.graph, self.stages)
        self.ranks = RankMap(self.schedule.widths)
        make_holding(
            self.schedule, plan.workload.micro_batch, self.layouts
        )  # raises UserError if rows or columns do not divide
        self.shared = SharedWeights(plan.graph, self.stages)
        self.axes: dict[Axis, str] = {}
        self.names = Names(RESERVED)
        self.scenes = [self._scene(number) for number in range(plan.num_stages)]

    def draft(self) -> FileDraft:
        """Return the parts of the file that are written for this plan."""
        classes = class_texts([self._class(number, scene) for number, scene in enumerate(self.scenes)])
        shared = self.shared.text()
        columns = [layout.columns for layout in self.layouts]
        is_joint = [layout.is_joint for layout in self.layouts]
        schedule_texts = [
            frame_text(self.schedule),
            boundaries_text(self.plan.graph, self.stages, columns, self.pipeline),
            *([shared] if shared else []),
            instructions_text(self.pipeline, is_joint, self.shared.sharing_stages),
        ]
        class_names = tuple(f"Stage{number}" for number in range(self.plan.num_stages))
        calls = templates.PipelineCalls(class_names, self.schedule.num_updates, bool(shared))
        return FileDraft(
            heading=self._heading(),
            num_ranks=self.ranks.num_ranks,
            plan=f"{self._workers()}\n{self._constants()}",
            sections=(("The model", tuple(classes)), ("The schedule", tuple(schedule_texts))),
            main=templates.main_text(self.scenes[0], self.model, calls),
        )

    # ---- Stages ------------------------------------------------------------------------------------------------------

    def _scene(self, number: int) -> Scene:
        """Return a stage as the writers of classes need it."""
        figures, choice = self.pipeline.stages[number], self.pipeline.configuration.stages[number]
        strategies = dict(choice.strategies)
        if number:
            strategies[ENTRY] = entry_strategy(self.plan.graph, self.stages, number)
        copies = {}
        for layer in figures.graph.layers:
            for parameter in self.plan.graph[layer.name].parameters:
                stored_name = self.shared.stored_names.get(parameter.name, parameter.name)
                if stored_name != parameter.name:
                    copies[parameter.name] = stored_name
        workload = replace(self.plan.workload, recompute=choice.recompute == "layers")
        return Scene(
            graph=figures.graph.graph,
            cluster=self.pipeline.configuration.mesh_of(number).devices(self.plan.cluster),
            workload=workload,
            strategies=strategies,
            assessed={assessed.layer.name: assessed for assessed in figures.assessment.layers},
            built_in=self.built_in,
            names=self.names,
            axes=self.axes,
            is_stage=True,
            copies=copies,
        )

    def _class(self, number: int, scene: Scene) -> ClassOfLayers:
        figures = self.pipeline.stages[number]
        layers = figures.graph.layers
        recomputation = f", recomputation {format_seconds(figures.recompute_s)}" if figures.recompute_s else ""
        result = "the mean loss" if number == self.plan.num_stages - 1 else "the input of the next stage"
        docstring = (
            f"Layers {plain_text(layers[0].name)} to {plain_text(layers[-1].name)}. Returns {result}.\n\n"
            f"    Per micro-batch: forward {format_seconds(figures.forward_s)}, backward {format_seconds(figures.backward_s)}"
            f"{recomputation}. Per step: gradient sums {format_seconds(figures.all_reduce_s)}.\n    "
        )
        return ClassOfLayers(scene, f"Stage{number}", docstring, {ENTRY: "stage_input"} if number else {})

    # ---- Ranks and figures -------------------------------------------------------------------------------------------

    def _heading(self) -> str:
        """Return the docstring of the file, and comments on model, cluster, schedule, batch, price and origin of the plan."""
        plan, pipeline, cluster, workload = self.plan, self.pipeline, self.plan.cluster, self.plan.workload
        spec = pipeline.configuration.schedule
        origin = self.built_in.family if self.built_in else self.model
        precision = (
            ""
            if workload.precision == "float32"
            else f" (in {workload.precision} precision; this file computes in float32)"
        )
        lines = [
            f"Model    {plan.graph.name} ({origin}): {plan.graph.num_parameters:,} parameters",
            f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
            f"Pipeline {spec.label}: {plan.num_stages} stages on {self.schedule.num_workers} workers",
            f"Step     {workload.batch} {plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}",
            f"Price    {format_seconds(pipeline.step_s)} per step{precision}; on the busiest worker "
            f"{format_seconds(pipeline.compute_s)} compute,",
            f"         {format_seconds(pipeline.inner_communication_s)} communication inside its stages, "
            f"{format_seconds(pipeline.exposed_communication_s)} exposed communication between stages,",
            f"         {format_seconds(pipeline.bubble_s)} bubble;",
            f"         each rank sends up to {format_bytes(pipeline.sent_bytes)} and needs up to "
            f"{format_bytes(pipeline.memory_bytes)}",
            *self._note_on_replicas(),
            f"Plan     graph {plan.graph.hash}",
            f"         cluster {cluster.hash}",
            *(f"Note     {note}" for note in plan.graph.notes),
        ]
        return "\n".join([templates.PIPELINE_DOCSTRING, *map(comment, lines)])

    def _note_on_replicas(self) -> list[str]:
        """Return a remark on the prices per step of layers, for schedules with several pipelines."""
        count = self.schedule.num_pipelines
        if count == 1:
            return []
        return [
            f"         prices per step below are for all micro-batches; each of the {count} pipelines runs a part of them"
        ]

    def _workers(self) -> str:
        """Return the definitions of the workers and of this rank's place among them."""
        mesh, cluster = self.pipeline.configuration.mesh, self.plan.cluster
        devices = [mesh.ranks(cluster, worker) for worker in range(self.schedule.num_workers)]
        lines = [comment("The ranks of each worker. The parameters of its stages are placed on them.")]
        if any(list(self.ranks.ranks_of(worker)) != list(used) for worker, used in enumerate(devices)):
            lines.append(
                comment(
                    "In brackets: the devices of the plan, numbered node by node; `autoddl launch` starts the ranks there."
                )
            )
        lines.append("WORKERS = [")
        for worker, used in enumerate(devices):
            ranks = self.ranks.ranks_of(worker)
            shown_devices = "" if list(ranks) == list(used) else f" [{' '.join(map(str, used))}]"
            stages = ", ".join(
                f"{stage}{f' of pipeline {pipeline}' if self.schedule.num_pipelines > 1 else ''}"
                for pipeline, stage in self.schedule.stages_on(worker)
            )
            memory = format_bytes(self.pipeline.worker_memory_bytes[worker])
            remark = comment(f"worker {worker}{shown_devices}: stage {stages}; {memory} of memory per rank")
            start = f"{ranks.start}, " if ranks.start else ""
            lines.append(f"    range({start}{ranks.stop}),  {remark}")
        lines += [
            "]",
            "JOB_RANK = flow.env.get_rank()",
            "WORKER = next(worker for worker, ranks in enumerate(WORKERS) if JOB_RANK in ranks)",
            comment("The ranks of this rank's worker, numbered from 0."),
            "RANKS = Ranks(len(WORKERS[WORKER]), WORKERS[WORKER][0])",
        ]
        return "\n".join([*lines, SBP_NAMES])

    def _constants(self) -> str:
        """Return the other constants of the plan. The classes have to be written before: they determine the mesh axes."""
        joint = [str(stage) for stage, layout in enumerate(self.layouts) if layout.is_joint]
        lines = []
        if self.axes:
            lines.append(
                comment("Mesh axes that collectives of a worker run along, and the groups of ranks along each.")
            )
            lines += axis_lines(self.axes.items(), max(self.schedule.widths))
        lines += [
            comment(
                "Number of samples of a micro-batch, and of the slots that it is divided into: 2 if tasks run half of it."
            ),
            f"MICRO_BATCH, SLOTS = {self.plan.workload.micro_batch}, {slots_per_micro_batch(self.schedule)}",
            comment("Stages whose ranks communicate with each other while they compute."),
            f"JOINT_STAGES: set[int] = {'{' + ', '.join(joint) + '}' if joint else 'set()'}",
        ]
        return "\n".join(lines)
