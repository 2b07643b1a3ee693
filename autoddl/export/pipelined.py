"""A plan with a pipeline as one readable Python file that needs OneFlow alone.

heading             what it is, what it is predicted to cost, how to run it
ranks               the workers, the stages on them, mesh axes, the figures of the schedule
model               a class for each repeated block and one for each stage: parameters with their SBP, every step with its price
schedule            what each worker does, and what it sends when: words, in one order for all of them (:mod:`.scheduletext`)
library             the runtime's own engine, which carries them out; passes, layers, layouts and collectives
main                trains some steps
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.pipeline.holding import hold
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

#: What a file uses while it is loaded.
_FIRST = ("Axis", "Ranks")


def pipeline_text(plan: PlanFile, model: str = "") -> str:
    """The file.

    Args:
        model: ``FILE.py:FUNCTION`` that makes the plain model, where it is none that is built in.

    Raises:
        UserError: the plan has a layer or a schedule that cannot be written, or its model is not built in and nothing makes it; it
            is named.
    """
    built_in = built_in_of(plan.graph, model)
    check_graph(plan.graph)
    return assembled(_Writer(plan, plan.evaluation, built_in, model).draft())


class _Writer:
    """One file in the making."""

    def __init__(self, plan: PlanFile, pipeline: Evaluation, built_in: BuiltIn | None, model: str):
        self.plan, self.pipeline, self.built_in, self.model = plan, pipeline, built_in, model
        self.schedule: Schedule = pipeline.schedule
        self.stages = stage_plans(plan)
        self.layouts = stage_layouts(plan.graph, self.stages)
        self.ranks = RankMap(self.schedule.widths)
        hold(self.schedule, plan.workload.micro_batch, self.layouts)  # refuses what does not divide
        self.shared = SharedWeights(plan.graph, self.stages)
        self.axes: dict[Axis, str] = {}
        self.names = Names(RESERVED)
        self.scenes = [self._scene(number) for number in range(plan.num_stages)]

    def draft(self) -> FileDraft:
        """All parts of the file that are its own."""
        classes = class_texts([self._class(number, scene) for number, scene in enumerate(self.scenes)])
        shared = self.shared.text()
        columns, joint = [one.columns for one in self.layouts], [one.is_joint for one in self.layouts]
        after = [
            frame_text(self.schedule),
            boundaries_text(self.plan.graph, self.stages, columns, self.pipeline),
            *([shared] if shared else []),
            instructions_text(self.pipeline, joint, self.shared.tied),
        ]
        names = [f"Stage{number}" for number in range(self.plan.num_stages)]
        num_updates = self.schedule.num_updates
        return FileDraft(
            heading=self._heading(),
            num_ranks=self.ranks.num_ranks,
            ranks=self._workers(),
            first=_FIRST,
            sections=(("", (self._constants(),)), ("The model", tuple(classes)), ("The schedule", tuple(after))),
            main=templates.pipeline_main(self.scenes[0], names, num_updates, bool(shared), self.model),
        )

    # ---- Stages ------------------------------------------------------------------------------------------------------

    def _scene(self, number: int) -> Scene:
        """A stage, on the devices of one worker."""
        figures, choice = self.pipeline.stages[number], self.pipeline.configuration.stages[number]
        strategies = dict(choice.strategies)
        if number:
            strategies[ENTRY] = entry_strategy(self.plan.graph, self.stages, number)
        copies = {}
        for layer in figures.graph.layers:
            for parameter in self.plan.graph[layer.name].parameters:
                owner = self.shared.owners.get(parameter.name, parameter.name)
                if owner != parameter.name:
                    copies[parameter.name] = owner
        workload = replace(self.plan.workload, recompute=choice.recompute == "layers")
        return Scene(
            graph=figures.graph.graph,
            cluster=self.pipeline.configuration.mesh_of(number).devices(self.plan.cluster),
            workload=workload,
            strategies=strategies,
            assessed={found.layer.name: found for found in figures.assessment.layers},
            built_in=self.built_in,
            names=self.names,
            axes=self.axes,
            is_stage=True,
            copies=copies,
        )

    def _class(self, number: int, scene: Scene) -> ClassOfLayers:
        figures = self.pipeline.stages[number]
        layers = figures.graph.layers
        again = f", run again {format_seconds(figures.recompute_s)}" if figures.recompute_s else ""
        result = "the mean loss" if number == self.plan.num_stages - 1 else "what the next stage takes"
        what = (
            f"{plain_text(layers[0].name)} to {plain_text(layers[-1].name)}: {result}.\n\n"
            f"    A micro-batch: forward {format_seconds(figures.forward_s)}, backward {format_seconds(figures.backward_s)}"
            f"{again}; a step: sums of gradients {format_seconds(figures.all_reduce_s)}.\n    "
        )
        return ClassOfLayers(scene, f"Stage{number}", what, {ENTRY: "entering"} if number else {})

    # ---- Ranks and figures -------------------------------------------------------------------------------------------

    def _heading(self) -> str:
        plan, pipeline, cluster, workload = self.plan, self.pipeline, self.plan.cluster, self.plan.workload
        spec = pipeline.configuration.schedule
        origin = self.built_in.family if self.built_in else self.model
        precision = (
            ""
            if workload.precision == "float32"
            else f" (of {workload.precision} precision; this file runs in float32)"
        )
        lines = [
            f"Model    {plan.graph.name} ({origin}): {plan.graph.num_parameters:,} parameters",
            f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
            f"Pipeline {spec.label}: {plan.num_stages} stages on {self.schedule.num_workers} workers",
            f"Step     {workload.batch} {plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}",
            f"Price    {format_seconds(pipeline.step_s)} a step{precision}; of the busiest worker "
            f"{format_seconds(pipeline.compute_s)} compute,",
            f"         {format_seconds(pipeline.inner_communication_s)} communication inside its stages, "
            f"{format_seconds(pipeline.exposed_communication_s)} exposed between them, {format_seconds(pipeline.bubble_s)} bubble;",
            f"         each rank sends up to {format_bytes(pipeline.sent_bytes)} and needs up to "
            f"{format_bytes(pipeline.memory_bytes)}",
            *self._note_on_replicas(),
            f"Plan     graph {plan.graph.hash}",
            f"         cluster {cluster.hash}",
            *(f"Note     {note}" for note in plan.graph.notes),
        ]
        return "\n".join([templates.PIPELINE_DOCSTRING, *map(comment, lines)])

    def _note_on_replicas(self) -> list[str]:
        count = self.schedule.num_pipelines
        if count == 1:
            return []
        return [
            f"Prices   of a step are below those of all its micro-batches; each of the {count} pipelines has a share of these"
        ]

    def _workers(self) -> str:
        """The placements."""
        mesh, cluster = self.pipeline.configuration.mesh, self.plan.cluster
        devices = [mesh.ranks(cluster, worker) for worker in range(self.schedule.num_workers)]
        lines = [comment("The ranks of each worker: the placement of the parameters of its stages.")]
        if any(list(self.ranks.ranks_of(worker)) != list(own) for worker, own in enumerate(devices)):
            lines.append(
                comment(
                    "The plan has them on the devices in brackets, counted node by node; `autoddl launch` puts them there."
                )
            )
        lines.append("WORKERS = [")
        for worker, own in enumerate(devices):
            ranks = self.ranks.ranks_of(worker)
            there = "" if list(ranks) == list(own) else f" [{' '.join(map(str, own))}]"
            stages = ", ".join(
                f"{stage}{f' of pipeline {pipeline}' if self.schedule.num_pipelines > 1 else ''}"
                for pipeline, stage in self.schedule.stages_on(worker)
            )
            needs = format_bytes(self.pipeline.memory[worker])
            remark = comment(f"worker {worker}{there}: stage {stages}; {needs} a rank")
            start = f"{ranks.start}, " if ranks.start else ""
            lines.append(f"    range({start}{ranks.stop}),  {remark}")
        lines += [
            "]",
            "JOB_RANK = flow.env.get_rank()",
            "WORKER = next(worker for worker, ranks in enumerate(WORKERS) if JOB_RANK in ranks)",
            comment("The ranks of this one's worker, counted from 0."),
            "RANKS = Ranks(len(WORKERS[WORKER]), WORKERS[WORKER][0])",
        ]
        return "\n".join([*lines, SBP_NAMES])

    def _constants(self) -> str:
        joint = [str(stage) for stage, layout in enumerate(self.layouts) if layout.is_joint]
        lines = []
        if self.axes:
            lines.append(comment("The axes of a worker's ranks that collectives run along."))
            lines += axis_lines(self.axes.items(), max(self.schedule.widths))
        lines += [
            comment("Samples of a micro-batch, and in how many slots it is worked on."),
            f"MICRO_BATCH, SLOTS = {self.plan.workload.micro_batch}, {slots_per_micro_batch(self.schedule)}",
            comment("Stages whose ranks communicate with each other while they compute."),
            f"JOINT_STAGES: set[int] = {'{' + ', '.join(joint) + '}' if joint else 'set()'}",
        ]
        return "\n".join(lines)
