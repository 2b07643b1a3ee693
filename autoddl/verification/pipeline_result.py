"""What the verification of a plan with a pipeline found: numbers beside the numbers that they should be, and the verdict.

Layers send while they compute: that is counted layer by layer, of one slot (a micro-batch, or half of one where the schedule works
on halves), one stage after the other.  What goes between stages is counted by those that send it, boundaries together; sums of
gradients with everything else, in a whole run of the schedule, on the wire.  A run is a step, or `NUM_STEPS` of them where the
schedule is asynchronous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan
from autoddl.pipelines.runtime.pipeline.stage_traffic import StageTraffic
from autoddl.pipelines.schedule import Schedule

from .result import LayerCheck, PhaseCheck, Tolerance, ValueCheck
from .scaling import Change
from .task import NUM_STEPS, Section

__all__ = ["PipelineShard", "PipelineVerification"]


@dataclass(frozen=True)
class PipelineShard:
    """One rank's findings.

    Attributes:
        losses: this rank's parts of each step's mean loss.
        gradient_errors, parameter_errors: of its stages' parameters, in the step that is compared and after the last one; relative
            to one device's.
        sections: the phases of all layers, of all stages; this rank's own with the steps that ran.
        boundary_bytes: that it sent to other stages in a run.
        step_bytes: what all ranks sent in a run; None where nothing was counted.
    """

    losses: tuple[float, ...]
    gradient_errors: Mapping[str, float]
    parameter_errors: Mapping[str, float]
    sections: tuple[Section, ...]
    boundary_bytes: int
    step_bytes: int | None


@dataclass(frozen=True)
class PipelineVerification:
    """What came of it.

    Attributes:
        model: its name.
        schedule, stages, workload, changes: as they ran, and what was scaled down for it; the workload is of one update.
        tolerance: what counts as equal.
        losses: of each step: one device's, and the ranks'.
        gradient_step: the one whose gradients were compared, counted from 1.
        layers: per stage, in order; ``phases`` are forward and backward.
        gradients, parameters: of everything, the worst rank of each.
        traffic: what a run is predicted to send.
        between, run: what goes between stages, and all bytes of a run.
        uncounted: why bytes were not counted; "" where they were.
        notes: for the reader.
        seconds: how long everything took.
    """

    model: str
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    workload: Workload
    changes: tuple[Change, ...]
    tolerance: Tolerance
    losses: tuple[tuple[float, float], ...]
    gradient_step: int
    layers: tuple[tuple[LayerCheck, ...], ...]
    gradients: tuple[ValueCheck, ...]
    parameters: tuple[ValueCheck, ...]
    traffic: StageTraffic
    between: PhaseCheck
    run: PhaseCheck
    uncounted: str
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def num_ranks(self) -> int:
        """How many ranks it ran on."""
        return sum(self.schedule.widths)

    @property
    def loss_errors(self) -> tuple[float, ...]:
        """Of each step, relative."""
        return tuple(abs(found - expected) / max(abs(expected), 1e-30) for expected, found in self.losses)

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """What is off, in sentences; empty where the plan keeps its promises."""
        found = []
        for step, ((expected, value), error) in enumerate(zip(self.losses, self.loss_errors)):
            if not error <= self.tolerance.values:
                found.append(f"loss of step {step + 1}: {value:.8g}, should be {expected:.8g} (off by {error:.1e})")
        of_step, after = f"the gradient of step {self.gradient_step}", f"the value after {NUM_STEPS} steps"
        for what, checks in ((of_step, self.gradients), (after, self.parameters)):
            found += [
                f"{check.name}: {what} on rank {check.rank} is off by {check.error:.1e}"
                for check in checks
                if not check.error <= self.tolerance.values
            ]
        for number, layers in enumerate(self.layers):
            for layer in layers:
                for name, phase in layer.phases.items():
                    found += phase.faults(f"stage {number}, {layer.name}, {name}", self.tolerance)
        found += self.between.faults("between stages", self.tolerance)
        found += self.run.faults("a run of the schedule", self.tolerance)
        return tuple(found)

    @property
    def are_bytes_off(self) -> bool:
        """Whether anything that was counted on the wire is not what was predicted."""
        phases = [phase for layers in self.layers for layer in layers for phase in layer.phases.values()]
        return not all(map(self.tolerance.allows, (*phases, self.run)))

    @property
    def is_right(self) -> bool:
        """Whether nothing is off."""
        return not self.faults

    def is_off(self, layers: Sequence[LayerCheck]) -> bool:
        """Whether anything of some layers is off."""
        names = {check.name for layer in layers for check in (*layer.gradients, *layer.parameters)}
        values = [check for check in (*self.gradients, *self.parameters) if check.name in names]
        sent = [phase for layer in layers for phase in layer.phases.values()]
        return any(not check.error <= self.tolerance.values for check in values) or any(
            phase.faults("", self.tolerance) for phase in sent
        )
