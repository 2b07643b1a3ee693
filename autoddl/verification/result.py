"""What a verification found: numbers beside the numbers that they should be, and the verdict.

Layers send while they compute: that is counted layer by layer, of one slot (a micro-batch, or half of one where the schedule works
on halves), one stage after the other.  What goes between stages is counted by those that send it, boundaries together; everything
in a whole run of the schedule, on the wire.

Bytes on the wire are judged to `wire.BYTES_TOLERANCE` and, since barriers are not quite constant, `wire.NOISE_BYTES` per rank and
reading.  The steps that ran are judged exactly: they are recorded by what executes them, the bytes are counted by the network; both
have to agree with the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.wire import BYTES_TOLERANCE
from autoddl.pipelines.schedule import Schedule

from .scaling import Change

__all__ = [
    "LayerCheck",
    "PhaseCheck",
    "StageCheck",
    "Tolerance",
    "ValueCheck",
    "Verification",
    "together",
    "worst",
]


@dataclass(frozen=True)
class Tolerance:
    """How far a plan may be off: ``values`` relative to one device, bytes relative to the prediction and in all."""

    values: float
    noise_bytes: float
    relative_bytes: float = BYTES_TOLERANCE

    def allows(self, phase: PhaseCheck) -> bool:
        """Whether the bytes that were sent count as those that are predicted."""
        if phase.sent_bytes is None:
            return True
        slack = self.relative_bytes * phase.predicted_bytes + self.noise_bytes * phase.num_readings
        return abs(phase.sent_bytes - phase.predicted_bytes) <= slack

    def resolves(self, phase: PhaseCheck) -> bool:
        """Whether so few bytes can be told from their prediction to `relative_bytes`, for all the noise."""
        return self.relative_bytes * phase.predicted_bytes >= self.noise_bytes * phase.num_readings


@dataclass(frozen=True)
class PhaseCheck:
    """What all ranks together send in one phase.

    Attributes:
        predicted_bytes: the price.
        sent_bytes: counted, less the headers; None where nothing was counted.
        missing, unexpected: steps that should have run and did not, and the other way round, on any rank.
        num_readings: how many readings of the counters ``sent_bytes`` is the sum of; each has its noise.
    """

    predicted_bytes: float
    sent_bytes: float | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    num_readings: int = 1

    @property
    def deviation(self) -> float | None:
        """Sent over predicted, less one; None where there is nothing to compare."""
        if self.sent_bytes is None or not self.predicted_bytes:
            return None
        return self.sent_bytes / self.predicted_bytes - 1

    def faults(self, where: str, tolerance: Tolerance) -> list[str]:
        """What is off, in sentences."""
        found = []
        if self.missing:
            found.append(f"{where}: {self.missing[0]} is priced but did not run" + _more(self.missing))
        if self.unexpected:
            found.append(f"{where}: {self.unexpected[0]} ran but is not priced" + _more(self.unexpected))
        if not tolerance.allows(self):
            found.append(f"{where}: {self.sent_bytes:,.0f} bytes were sent, {self.predicted_bytes:,.0f} are predicted")
        return found

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "predicted_bytes": self.predicted_bytes,
            "sent_bytes": self.sent_bytes,
            "missing_steps": list(self.missing),
            "unexpected_steps": list(self.unexpected),
        }


def together(phases: Sequence[PhaseCheck]) -> PhaseCheck:
    """The bytes of several phases, as one."""
    sent = [phase.sent_bytes for phase in phases]
    return PhaseCheck(
        sum(phase.predicted_bytes for phase in phases),
        None if None in sent else sum(value or 0.0 for value in sent),
        num_readings=sum(phase.num_readings for phase in phases),
    )


def _more(steps: Sequence[str]) -> str:
    return f" (and {len(steps) - 1} more)" if len(steps) > 1 else ""


@dataclass(frozen=True)
class ValueCheck:
    """A tensor against one device's: the largest relative error of all ranks, and the rank that has it."""

    name: str
    error: float
    rank: int

    def is_off(self, tolerance: Tolerance) -> bool:
        """Whether it differs, or is no number."""
        return not self.error <= tolerance.values


@dataclass(frozen=True)
class LayerCheck:
    """One layer.

    Attributes:
        phases: forward and backward of one slot, gradient of one step; without the last one in pipelines, whose stages sum the
            gradients of all their layers as one vector.
        parameters: the names of its own parameters.
    """

    name: str
    kind: str
    block: str
    role: str
    strategy: Strategy
    phases: dict[str, PhaseCheck]
    parameters: tuple[str, ...]

    @property
    def total(self) -> PhaseCheck:
        """All phases together."""
        return together(list(self.phases.values()))

    def faults(self, where: str, tolerance: Tolerance) -> list[str]:
        """What is off in what it sends, in sentences."""
        found = []
        for name, phase in self.phases.items():
            found += phase.faults(f"{where}, {name}", tolerance)
        return found + self.total.faults(f"{where}, in all", tolerance)


@dataclass(frozen=True)
class StageCheck:
    """One stage: its layers, and the bytes that it is predicted to send in a run, while it computes and in sums of gradients."""

    layers: tuple[LayerCheck, ...]
    inside_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class Verification:
    """A plan that ran; one without a pipeline is one stage, whose schedule is one micro-batch after the other.

    Attributes:
        model, levels: what the plan is for; (name, size) of each network level of its cluster.
        schedule, workload, changes: as they ran, and what was scaled down for it; the workload is of one update.
        tolerance: what counts as equal.
        losses: of each step: one device's, and of all ranks the one that is farthest from it.
        gradient_step: the one whose gradients were compared, counted from 1.
        stages: in order.
        gradients, parameters: of all parameters, the worst rank of each.
        between: what goes between stages in a run.
        step: all bytes of a run: of a training step, or of `num_updates` of an asynchronous schedule.
        uncounted: why bytes were not counted; "" where they were.
        notes: for the reader.
        seconds: how long everything took.
    """

    model: str
    levels: tuple[tuple[str, int], ...]
    schedule: Schedule
    workload: Workload
    changes: tuple[Change, ...]
    tolerance: Tolerance
    losses: tuple[tuple[float, float], ...]
    gradient_step: int
    stages: tuple[StageCheck, ...]
    gradients: tuple[ValueCheck, ...]
    parameters: tuple[ValueCheck, ...]
    between: PhaseCheck
    step: PhaseCheck
    uncounted: str
    notes: tuple[str, ...]
    seconds: float = 0.0

    @property
    def num_ranks(self) -> int:
        """How many ranks it ran on."""
        return sum(self.schedule.widths)

    @property
    def layers(self) -> tuple[LayerCheck, ...]:
        """Of all stages."""
        return tuple(layer for stage in self.stages for layer in stage.layers)

    def gradients_of(self, layers: Sequence[LayerCheck]) -> tuple[ValueCheck, ...]:
        """Those of some layers' own parameters."""
        return _of(layers, self.gradients)

    def parameters_of(self, layers: Sequence[LayerCheck]) -> tuple[ValueCheck, ...]:
        """Some layers' own parameters."""
        return _of(layers, self.parameters)

    def is_off(self, layers: Sequence[LayerCheck]) -> bool:
        """Whether anything of some layers is off."""
        values = (*self.gradients_of(layers), *self.parameters_of(layers))
        return any(layer.faults("", self.tolerance) for layer in layers) or any(
            check.is_off(self.tolerance) for check in values
        )

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
        of_step, after = f"the gradient of step {self.gradient_step}", f"the value after {len(self.losses)} steps"
        for what, checks in ((of_step, self.gradients), (after, self.parameters)):
            found += [
                f"{check.name}: {what} on rank {check.rank} is off by {check.error:.1e}"
                for check in checks
                if check.is_off(self.tolerance)
            ]
        for number, stage in enumerate(self.stages):
            for layer in stage.layers:
                where = f"stage {number}, {layer.name}" if len(self.stages) > 1 else layer.name
                found += layer.faults(where, self.tolerance)
        found += self.between.faults("between stages", self.tolerance)
        num = self.schedule.num_updates
        whole = "a whole step" if num == 1 else f"a run of {counted(num, 'step')}"
        found += self.step.faults(whole, self.tolerance)
        return tuple(found)

    @property
    def are_bytes_off(self) -> bool:
        """Whether anything that was counted on the wire is not what was predicted."""
        phases = [phase for layer in self.layers for phase in (*layer.phases.values(), layer.total)]
        return not all(map(self.tolerance.allows, (*phases, self.step)))

    @property
    def is_right(self) -> bool:
        """Whether nothing is off."""
        return not self.faults


def _of(layers: Sequence[LayerCheck], checks: Sequence[ValueCheck]) -> tuple[ValueCheck, ...]:
    names = {name for layer in layers for name in layer.parameters}
    return tuple(check for check in checks if check.name in names)


def worst(checks: Sequence[ValueCheck]) -> ValueCheck | None:
    """The largest error."""
    return max(checks, key=lambda check: check.error, default=None)
