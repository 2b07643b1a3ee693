"""The task that the launcher sends to the ranks, and the results that the ranks return.

These are plain values, which the launcher can create and read without OneFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.devices import CPU
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.pipelines.schedule import Schedule

from ..zoo.builtin import BuiltIn

__all__ = [
    "MIN_STEPS",
    "ByteCounts",
    "MeasuredSection",
    "RankResult",
    "ReferenceResult",
    "VerificationTask",
    "gradient_step",
    "num_steps",
]

#: Optimizer steps that a verification takes at least.
MIN_STEPS = 3


@dataclass(frozen=True)
class VerificationTask:
    """A fitted plan, and how the ranks run it.

    Attributes:
        graph: Layer graph of the model, after scaling.
        workload: Workload of one parameter update, after scaling.
        stages: Stages of the plan, in order; a single stage without a pipeline.
        schedule: Schedule that the ranks execute.
        built_in: The built-in model.  None if ``function`` returns the model.
        function: ``FILE.py:FUNCTION`` with an absolute path, which returns a module and example inputs.  "" for a built-in model.
        seed: Seed of the data and, for a built-in model, of the initial values.
        folder: Folder of the file with the results of the single-device reference.
        counts_bytes: Whether the ranks count the bytes that they send, which requires a network namespace of their own.
        corrects_bias: Whether Adam corrects the bias of its averages.  Inside nn.Graph, OneFlow computes 1 - beta^step in
            float32, which is off by 6e-5 in the first step; a reference in eager mode does not compute the same.
        device: Type of device of the ranks.
    """

    graph: LayerGraph
    workload: Workload
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    built_in: BuiltIn | None
    function: str
    seed: int
    folder: str
    counts_bytes: bool
    corrects_bias: bool = True
    device: str = CPU

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The strategies of all layers, by layer name."""
        return {name: strategy for stage in self.stages for name, strategy in stage.strategies.items()}


def num_steps(schedule: Schedule) -> int:
    """Return the number of optimizer steps of a verification: the smallest multiple of a run's updates of at least `MIN_STEPS`."""
    return -(-MIN_STEPS // schedule.num_updates) * schedule.num_updates


def gradient_step(schedule: Schedule) -> int:
    """Return the index, from 0, of the step whose gradients are compared.

    It is the first step of a synchronous schedule, and the last one of an asynchronous schedule, whose weights are the most stale.
    """
    return 0 if schedule.is_synchronous else num_steps(schedule) - 1


@dataclass(frozen=True)
class ReferenceResult:
    """The results of the single-device reference.

    Attributes:
        losses: Loss of each step.
        gradients: Names of the parameters that have gradients.
        parameters: Names of all parameters.
    """

    losses: tuple[float, ...]
    gradients: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class MeasuredSection:
    """One phase of one layer, as one rank measured it.

    Attributes:
        layer: Name of the layer.
        phase: ``forward``, ``backward`` or ``gradient``.
        steps: Communication steps that the rank executed, in order.
        payload_bytes: Bytes that all ranks sent, without headers.  None if bytes were not counted.
    """

    layer: str
    phase: str
    steps: tuple[Step, ...]
    payload_bytes: int | None


@dataclass(frozen=True)
class RankResult:
    """The results of one rank.

    A *run* executes the schedule once: one step of a synchronous schedule, or several steps of an asynchronous one.  A *slot* is
    the work of a stage on one micro-batch, or on half of one if the schedule divides micro-batches into halves.

    Attributes:
        losses: Mean loss over the batch of each step, as this rank computes it.
        gradient_errors: Relative errors of the gradients that this rank holds, by parameter name, in the compared step.
        parameter_errors: Relative errors of the parameters that this rank holds, by name, after the last step.
        sections: Phases of the layers of all stages, for one slot.  Phases of stages that the rank does not hold have no steps.
        run_steps: Communication steps inside stages that this rank took part in during the first run.
        boundary_bytes: Bytes that this rank sent to other stages during the first run.
        run_bytes: Bytes that all ranks sent during the first run.  None if bytes were not counted.
    """

    losses: tuple[float, ...]
    gradient_errors: Mapping[str, float]
    parameter_errors: Mapping[str, float]
    sections: tuple[MeasuredSection, ...]
    run_steps: tuple[Step, ...]
    boundary_bytes: int
    run_bytes: int | None


@dataclass(frozen=True)
class ByteCounts:
    """The bytes that all ranks sent, in another count.

    Attributes:
        section_bytes: Bytes of each section, in the order of `RankResult.sections`.
        run_bytes: Bytes of one run of the schedule.
    """

    section_bytes: tuple[int, ...]
    run_bytes: int
