"""The result of a verification: measured and expected values, and the verdict.

Bytes are compared at three levels:

==================  ==============================================================================================
level               measured
==================  ==============================================================================================
layer               by the network, phase by phase, for one slot (a micro-batch, or half of one if the schedule
                    divides micro-batches into halves), one stage after the other
between stages      by the ranks that send tensors to other stages, all boundaries together
run                 by the network, for a whole run of the schedule
==================  ==============================================================================================

The network's counts may deviate from the prediction by `wire.BYTES_TOLERANCE` (relative) plus `wire.NOISE_BYTES` for each rank and
reading, since the bytes of barriers vary.  The communication steps that the ranks record must be exactly the predicted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.ranks.wire import BYTES_TOLERANCE
from autoddl.pipelines.schedule import Schedule

from .scaling import Change

__all__ = [
    "LayerCheck",
    "PhaseCheck",
    "StageCheck",
    "Tolerance",
    "ValueCheck",
    "Verification",
    "largest_error",
    "total_of",
]


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed errors.

    Attributes:
        values: Relative error of losses, gradients and parameters.
        noise_bytes: Absolute error of the bytes of one reading.
        relative_bytes: Error of bytes relative to the prediction, in addition to ``noise_bytes``.
    """

    values: float
    noise_bytes: float
    relative_bytes: float = BYTES_TOLERANCE

    def allows(self, phase: PhaseCheck) -> bool:
        """Return whether the bytes that were sent agree with the prediction; True if bytes were not counted.

        >>> tolerance = Tolerance(values=1e-5, noise_bytes=400, relative_bytes=0.03)
        >>> tolerance.allows(PhaseCheck(predicted_bytes=10_000, sent_bytes=10_700))
        True
        >>> tolerance.allows(PhaseCheck(predicted_bytes=10_000, sent_bytes=10_800))
        False
        """
        if phase.sent_bytes is None:
            return True
        allowed = self.relative_bytes * phase.predicted_bytes + self.noise_bytes * phase.num_readings
        excess = phase.sent_bytes - phase.predicted_bytes
        return excess <= allowed and (phase.may_be_less or -excess <= allowed)

    def resolves(self, phase: PhaseCheck) -> bool:
        """Return whether a phase sends enough bytes that the noise of the readings is within `relative_bytes`."""
        return self.relative_bytes * phase.predicted_bytes >= self.noise_bytes * phase.num_readings


@dataclass(frozen=True)
class PhaseCheck:
    """The traffic of all ranks in one phase.

    Attributes:
        predicted_bytes: Bytes that the cost model predicts.
        sent_bytes: Bytes that were counted, less those that have no price.  None if bytes were not counted.
        missing: Predicted steps that did not run on at least one rank.
        unexpected: Steps that ran on at least one rank and were not predicted.
        num_readings: Number of readings of the counters whose sum ``sent_bytes`` is.  Each reading has its own noise.
        may_be_less: Whether fewer bytes are right: OneFlow's compiler gathers a tensor only once for several readers.
    """

    predicted_bytes: float
    sent_bytes: float | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    num_readings: int = 1
    may_be_less: bool = False

    @property
    def deviation(self) -> float | None:
        """Relative deviation of the sent bytes from the predicted ones; None if none were counted or none are predicted."""
        if self.sent_bytes is None or not self.predicted_bytes:
            return None
        return self.sent_bytes / self.predicted_bytes - 1

    def faults(self, where: str, tolerance: Tolerance) -> list[str]:
        """Return one sentence for each disagreement; ``where`` names the phase in these sentences."""
        sentences = []
        if self.missing:
            sentences.append(f"{where}: {self.missing[0]} is priced but did not run" + _more(self.missing))
        if self.unexpected:
            sentences.append(f"{where}: {self.unexpected[0]} ran but is not priced" + _more(self.unexpected))
        if not tolerance.allows(self):
            sentences.append(
                f"{where}: {self.sent_bytes:,.0f} bytes were sent, {self.predicted_bytes:,.0f} are predicted"
            )
        return sentences

    def document(self) -> dict[str, Any]:
        """Return the check as part of a JSON document."""
        return {
            "predicted_bytes": self.predicted_bytes,
            "sent_bytes": self.sent_bytes,
            "missing_steps": list(self.missing),
            "unexpected_steps": list(self.unexpected),
        }


def total_of(phases: Sequence[PhaseCheck]) -> PhaseCheck:
    """Return the sum of the bytes of several phases, without their steps."""
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
    """The comparison of one parameter, or of its gradient, with the single-device reference.

    Attributes:
        name: Name of the parameter.
        error: Largest relative error of all ranks.
        rank: Rank that has this error.
    """

    name: str
    error: float
    rank: int

    def is_off(self, tolerance: Tolerance) -> bool:
        """Return whether the error is above the tolerance or not a number."""
        return not self.error <= tolerance.values


@dataclass(frozen=True)
class LayerCheck:
    """The traffic of one layer.

    Attributes:
        name: Name of the layer.
        kind: Kind of the layer.
        block: Name of the repeated block that the layer is part of, or "".
        role: Name of the layer within its block, or "".
        strategy: Strategy of the layer.
        phases: ``forward`` and ``backward`` of one slot, and ``gradient`` of one step.  Pipelines have no phase ``gradient``: other
            stages and replicas take part in their sums of gradients.
        parameters: Names of the layer's parameters, without those that are tied to another layer's.
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
        return total_of(list(self.phases.values()))

    def faults(self, where: str, tolerance: Tolerance) -> list[str]:
        """Return one sentence for each disagreement of the layer's traffic; ``where`` names the layer in these sentences."""
        sentences = []
        for name, phase in self.phases.items():
            sentences += phase.faults(f"{where}, {name}", tolerance)
        return sentences + self.total.faults(f"{where}, in all", tolerance)


@dataclass(frozen=True)
class StageCheck:
    """The traffic of one stage.

    Attributes:
        layers: The layers of the stage.
        inside_bytes: Bytes that the stage is predicted to send in forward and backward passes during one run.
        gradient_bytes: Bytes that the stage is predicted to send to sum gradients during one run.
    """

    layers: tuple[LayerCheck, ...]
    inside_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    A plan without a pipeline has one stage, whose schedule executes the micro-batches one after the other.

    Attributes:
        model: Name of the model.
        levels: (name, size) of each network level of the plan's cluster.
        schedule: Schedule that the ranks executed.
        workload: Workload of one update, as the ranks executed it.
        changes: Sizes that were reduced for the verification.
        tolerance: Largest allowed errors.
        losses: For each step: the loss of the reference and, of the losses of all ranks, the one that is farthest from it.
        gradient_step: Number of the step whose gradients were compared, counted from 1.
        stages: Stages, in order.
        gradients: Largest error of the gradient of each parameter.
        parameters: Largest error of each parameter after the last step.
        between: Traffic between stages during one run.
        step: All traffic of one run: of one training step, or of `num_updates` steps of an asynchronous schedule.
        not_counted_because: Why bytes were not counted.  "" if they were counted.
        notes: Differences between the plan and its execution.
        seconds: Duration of the verification.
        executor: What executed the plan, one of `executors.EXECUTORS`.
        layers_not_counted_because: Why bytes of layers were not counted although those of the step may have been.  "" if they were.
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
    not_counted_because: str
    notes: tuple[str, ...]
    seconds: float = 0.0
    executor: str = "eager"
    layers_not_counted_because: str = ""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that executed the plan."""
        return sum(self.schedule.widths)

    @property
    def layers(self) -> tuple[LayerCheck, ...]:
        """The layers of all stages."""
        return tuple(layer for stage in self.stages for layer in stage.layers)

    def gradients_of(self, layers: Sequence[LayerCheck]) -> tuple[ValueCheck, ...]:
        """Return the gradient errors of the parameters of some layers."""
        return _checks_of(layers, self.gradients)

    def parameters_of(self, layers: Sequence[LayerCheck]) -> tuple[ValueCheck, ...]:
        """Return the errors of the parameters of some layers."""
        return _checks_of(layers, self.parameters)

    def is_off(self, layers: Sequence[LayerCheck]) -> bool:
        """Return whether the traffic, a gradient or a parameter of some layers is outside of the tolerance."""
        values = (*self.gradients_of(layers), *self.parameters_of(layers))
        return any(layer.faults("", self.tolerance) for layer in layers) or any(
            check.is_off(self.tolerance) for check in values
        )

    @property
    def loss_errors(self) -> tuple[float, ...]:
        """Relative error of the loss of each step."""
        return tuple(abs(loss - expected) / max(abs(expected), 1e-30) for expected, loss in self.losses)

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """One sentence for each disagreement; empty if the values and the traffic of the plan are right."""
        sentences = []
        # Losses.
        for step, ((expected, loss), error) in enumerate(zip(self.losses, self.loss_errors)):
            if not error <= self.tolerance.values:
                sentences.append(f"loss of step {step + 1}: {loss:.8g}, should be {expected:.8g} (off by {error:.1e})")
        # Gradients and parameters.
        of_step, after = f"the gradient of step {self.gradient_step}", f"the value after {len(self.losses)} steps"
        for description, checks in ((of_step, self.gradients), (after, self.parameters)):
            sentences += [
                f"{check.name}: {description} on rank {check.rank} is off by {check.error:.1e}"
                for check in checks
                if check.is_off(self.tolerance)
            ]
        # Traffic of layers, between stages, and of the whole run.
        for number, stage in enumerate(self.stages):
            for layer in stage.layers:
                where = f"stage {number}, {layer.name}" if len(self.stages) > 1 else layer.name
                sentences += layer.faults(where, self.tolerance)
        sentences += self.between.faults("between stages", self.tolerance)
        num_steps = self.schedule.num_updates
        run = "a whole step" if num_steps == 1 else f"a run of {counted(num_steps, 'step')}"
        sentences += self.step.faults(run, self.tolerance)
        return tuple(sentences)

    @property
    def are_bytes_off(self) -> bool:
        """Whether a count of the network disagrees with the prediction."""
        phases = [phase for layer in self.layers for phase in (*layer.phases.values(), layer.total)]
        return not all(map(self.tolerance.allows, (*phases, self.step)))

    @property
    def is_right(self) -> bool:
        """Whether all values and the traffic of the plan are right."""
        return not self.faults


def _checks_of(layers: Sequence[LayerCheck], checks: Sequence[ValueCheck]) -> tuple[ValueCheck, ...]:
    names = {name for layer in layers for name in layer.parameters}
    return tuple(check for check in checks if check.name in names)


def largest_error(checks: Sequence[ValueCheck]) -> ValueCheck | None:
    """Return the check with the largest error, or None if there is none."""
    return max(checks, key=lambda check: check.error, default=None)
