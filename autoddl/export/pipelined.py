"""Writes those parts of an exported OneFlow file that only plans of several stages have.

These are the workers and their stages, and the schedule: placement of the stages, tensors between them, and the instructions of
each worker (:mod:`.scheduletext`). :mod:`.oneflow` writes the rest of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.pipeline.holding import make_holding
from autoddl.pipelines.runtime.pipeline.slots import RankMap, slots_per_micro_batch
from autoddl.pipelines.runtime.pipeline.stage_plans import stage_layouts
from autoddl.pipelines.runtime.stage.plan import StagePlan, norm_parts

from .assembling import SBP_NAMES, axis_lines
from .classes import ClassOfLayers
from .scene import Scene
from .scheduletext import boundaries_text, frame_text, instructions_text
from .sharedweights import SharedWeights
from .source import comment, plain_text
from .templates import PipelineCalls

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["PipelineParts"]


class PipelineParts:
    """The parts of a file that only plans of several stages have.

    Args:
        plan: a plan of several stages.
        stages: the plan of each stage, for the runtime.
        shared: weights that several stages hold.

    Attributes:
        calls: what the training functions of the file depend on.

    Raises:
        UserError: the schedule of the plan cannot be written.
    """

    def __init__(self, plan: PlanFile, stages: Sequence[StagePlan], shared: SharedWeights):
        self._plan, self._stages, self._shared = plan, stages, shared
        self._pipeline, self._schedule = plan.evaluation, plan.evaluation.schedule
        slot_samples = plan.workload.micro_batch // slots_per_micro_batch(self._schedule)
        self._layouts = stage_layouts(plan.graph, stages, slot_samples)
        self._ranks = RankMap(self._schedule.widths)
        # Raises UserError if rows or columns do not divide.
        make_holding(self._schedule, plan.workload.micro_batch, self._layouts)
        names = tuple(f"Stage{number}" for number in range(plan.num_stages))
        are_divided = any(strategy.zero for stage in stages for strategy in stage.strategies.values())
        norms = norm_parts(plan.graph, {name: s for stage in stages for name, s in stage.strategies.items()})
        self.calls = PipelineCalls(names, self._schedule.num_updates, bool(shared.groups), are_divided, norms)

    def classes(self, scenes: Sequence[Scene]) -> list[ClassOfLayers]:
        """Return the classes of the stages."""
        return [self._class(number, scene) for number, scene in enumerate(scenes)]

    def _class(self, number: int, scene: Scene) -> ClassOfLayers:
        figures = self._pipeline.stages[number]
        layers = figures.graph.layers
        recomputation = f", recomputation {format_seconds(figures.recompute_s)}" if figures.recompute_s else ""
        result = "the mean loss" if number == self._plan.num_stages - 1 else "the input of the next stage"
        docstring = (
            f"Layers {plain_text(layers[0].name)} to {plain_text(layers[-1].name)}. Returns {result}.\n\n"
            f"    Per micro-batch: forward {format_seconds(figures.forward_s)}, backward {format_seconds(figures.backward_s)}"
            f"{recomputation}. Per step: gradient sums {format_seconds(figures.all_reduce_s)}.\n    "
        )
        return ClassOfLayers(scene, self.calls.stages[number], docstring, {ENTRY: "stage_input"} if number else {})

    def schedule_sections(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the part of the file with the schedule."""
        shared = self._shared.text()
        texts = (
            frame_text(self._schedule),
            boundaries_text(self._plan.graph, self._stages, self._layouts, self._pipeline),
            *([shared] if shared else []),
            instructions_text(
                self._pipeline,
                [layout.is_joint for layout in self._layouts],
                self._shared.sharing_stages,
                agrees=self._plan.workload.types.scales_losses,
            ),
        )
        return (("The schedule", texts),)

    def constants_text(self, scenes: Sequence[Scene]) -> str:
        """Return the constants of the plan. The classes have to be written before: they determine the mesh axes."""
        return f"{self._workers()}\n{self._sizes(scenes[0])}"

    def _workers(self) -> str:
        """Return the definitions of the workers and of this rank's place among them."""
        mesh, cluster = self._pipeline.configuration.mesh, self._plan.cluster
        devices = [mesh.ranks(cluster, worker) for worker in range(self._schedule.num_workers)]
        lines = [comment("The ranks of each worker. The parameters of its stages are placed on them.")]
        if any(list(self._ranks.ranks_of(worker)) != list(used) for worker, used in enumerate(devices)):
            lines.append(
                comment(
                    "In brackets: the devices of the plan, numbered node by node; `autoddl launch` starts the ranks there."
                )
            )
        lines.append("WORKERS = [")
        for worker, used in enumerate(devices):
            ranks = self._ranks.ranks_of(worker)
            shown_devices = "" if list(ranks) == list(used) else f" [{' '.join(map(str, used))}]"
            stages = ", ".join(
                f"{stage}{f' of pipeline {pipeline}' if self._schedule.num_pipelines > 1 else ''}"
                for pipeline, stage in self._schedule.stages_on(worker)
            )
            memory = format_bytes(self._pipeline.worker_memory_bytes[worker])
            remark = comment(f"worker {worker}{shown_devices}: stage {stages}; {memory} of memory per rank")
            start = f"{ranks.start}, " if ranks.start else ""
            lines.append(f"    range({start}{ranks.stop}),  {remark}")
        lines += [
            "]",
            "JOB_RANK = flow.env.get_rank()",
            "WORKER = next(worker for worker, ranks in enumerate(WORKERS) if JOB_RANK in ranks)",
            comment("The ranks of this rank's worker, numbered from 0."),
            "RANKS = Ranks(len(WORKERS[WORKER]), BACKEND, WORKERS[WORKER][0])",
        ]
        return "\n".join([*lines, SBP_NAMES])

    def _sizes(self, scene: Scene) -> str:
        """Return the other constants of the plan; all scenes have the same mesh axes."""
        joint = [str(stage) for stage, layout in enumerate(self._layouts) if layout.is_joint]
        lines = []
        if scene.axes:
            lines.append(
                comment("Mesh axes that collectives of a worker run along, and the groups of ranks along each.")
            )
            lines += axis_lines(scene.axes.items(), max(self._schedule.widths))
        lines += [
            comment(
                "Number of samples of a micro-batch, and of the slots that it is divided into: 2 if tasks run half of it."
            ),
            f"MICRO_BATCH, SLOTS = {self._plan.workload.micro_batch}, {slots_per_micro_batch(self._schedule)}",
            comment("Stages whose ranks communicate with each other while they compute."),
            f"JOINT_STAGES: set[int] = {'{' + ', '.join(joint) + '}' if joint else 'set()'}",
        ]
        return "\n".join(lines)
