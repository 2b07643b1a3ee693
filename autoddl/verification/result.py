"""What a verification found: numbers beside the numbers that they should be, and the verdict.

Bytes on the wire are judged to `wire.BYTES_TOLERANCE` and, since barriers are not quite constant, `wire.NOISE_BYTES` per rank and
reading.  The steps
that ran are judged exactly: they are recorded by what executes them, the bytes are counted by the network; both have to agree
with the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.wire import BYTES_TOLERANCE

from .scaling import Change

__all__ = [
    "LayerCheck",
    "PhaseCheck",
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


@dataclass(frozen=True)
class LayerCheck:
    """One layer.

    Attributes:
        phases: forward and backward of one micro-batch, gradient of one step.
        gradients, parameters: of its own parameters.
    """

    name: str
    kind: str
    block: str
    role: str
    strategy: Strategy
    phases: dict[str, PhaseCheck]
    gradients: tuple[ValueCheck, ...]
    parameters: tuple[ValueCheck, ...]

    @property
    def total(self) -> PhaseCheck:
        """All phases together."""
        return together(list(self.phases.values()))

    def faults(self, tolerance: Tolerance) -> list[str]:
        """What is off, in sentences."""
        found = []
        for name, phase in self.phases.items():
            found += phase.faults(f"{self.name}, {name}", tolerance)
        found += self.total.faults(f"{self.name}, in all", tolerance)
        for what, checks in (("gradient", self.gradients), ("value after training", self.parameters)):
            found += [
                f"{check.name}: the {what} on rank {check.rank} is off by {check.error:.1e}"
                for check in checks
                if not check.error <= tolerance.values
            ]
        return found


@dataclass(frozen=True)
class Verification:
    """A plan that ran.

    Attributes:
        model, levels: what the plan is for; (name, size) of each network level.
        workload, changes: as it ran, and what was scaled down for it.
        tolerance: what counts as equal.
        losses: of each step: one device's, and of all ranks the one that is farthest from it.
        layers: in order.
        step: what a whole training step sends.
        uncounted: why bytes were not counted; "" where they were.
        seconds: how long everything took.
    """

    model: str
    levels: tuple[tuple[str, int], ...]
    workload: Workload
    changes: tuple[Change, ...]
    tolerance: Tolerance
    losses: tuple[tuple[float, float], ...]
    layers: tuple[LayerCheck, ...]
    step: PhaseCheck
    uncounted: str
    notes: tuple[str, ...]
    seconds: float = 0.0

    @property
    def num_ranks(self) -> int:
        """How many ranks it ran on."""
        return self.layers[0].strategy.num_devices

    @property
    def loss_errors(self) -> tuple[float, ...]:
        """Of each step, relative."""
        return tuple(abs(found - expected) / max(abs(expected), 1e-30) for expected, found in self.losses)

    @property
    def gradients(self) -> tuple[ValueCheck, ...]:
        """Of all parameters."""
        return tuple(check for layer in self.layers for check in layer.gradients)

    @property
    def parameters(self) -> tuple[ValueCheck, ...]:
        """All of them, after the last step."""
        return tuple(check for layer in self.layers for check in layer.parameters)

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """What is off, in sentences; empty where the plan keeps its promises."""
        found = []
        for step, ((expected, value), error) in enumerate(zip(self.losses, self.loss_errors)):
            if not error <= self.tolerance.values:
                found.append(f"loss of step {step + 1}: {value:.8g}, should be {expected:.8g} (off by {error:.1e})")
        for layer in self.layers:
            found += layer.faults(self.tolerance)
        found += self.step.faults("a whole step", self.tolerance)
        return tuple(found)

    @property
    def are_bytes_off(self) -> bool:
        """Whether anything that was counted is not what was predicted."""
        phases = [phase for layer in self.layers for phase in (*layer.phases.values(), layer.total)]
        return not all(map(self.tolerance.allows, (*phases, self.step)))

    @property
    def is_right(self) -> bool:
        """Whether nothing is off."""
        return not self.faults


def worst(checks: Sequence[ValueCheck]) -> ValueCheck | None:
    """The largest error."""
    return max(checks, key=lambda check: check.error, default=None)
