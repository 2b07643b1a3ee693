"""What the launcher gives to ranks and what they give back; plain values, made and read without OneFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.pipelines.schedule import Schedule

from ..zoo.builtin import BuiltIn

__all__ = [
    "NUM_STEPS",
    "Counted",
    "MeasuredSection",
    "Reference",
    "Shard",
    "VerificationTask",
    "gradient_step",
    "num_steps",
]

#: Steps of the optimizer that are taken at least.
NUM_STEPS = 3


@dataclass(frozen=True)
class VerificationTask:
    """What is to be run.

    Attributes:
        graph, workload, stages, schedule: the plan, as it fits the machine; the workload is that of one update.
        is_applied: whether the module of `autoddl.apply` runs it; otherwise a `PipelineTrainer` does.
        built_in: the model; None where ``function`` makes it.
        function: ``FILE.py:FUNCTION``, with an absolute path, which returns a module and example inputs; "" without one.
        seed: of initial values (of a built-in model) and data.
        folder: where one device's results are kept for the ranks.
        counts_bytes: whether the ranks have a network of their own.
    """

    graph: LayerGraph
    workload: Workload
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    is_applied: bool
    built_in: BuiltIn | None
    function: str
    seed: int
    folder: str
    counts_bytes: bool

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """Of all layers, by name."""
        return {name: strategy for stage in self.stages for name, strategy in stage.strategies.items()}


def num_steps(schedule: Schedule) -> int:
    """The steps after which parameters are compared: `NUM_STEPS`, or as many more as the last run of the schedule has."""
    return -(-NUM_STEPS // schedule.num_updates) * schedule.num_updates


def gradient_step(schedule: Schedule) -> int:
    """The step, counted from 0, whose gradients are compared: of an asynchronous schedule the last one, whose weights are the most
    stale."""
    return 0 if schedule.is_synchronous else num_steps(schedule) - 1


@dataclass(frozen=True)
class Reference:
    """One device: the loss of each step, and the names of the parameters, of those with gradients too."""

    losses: tuple[float, ...]
    gradients: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class MeasuredSection:
    """One phase of one layer on one rank.

    Attributes:
        steps: those that ran, in order.
        payload_bytes: what all ranks sent; None where nothing was counted.
    """

    layer: str
    phase: str
    steps: tuple[Step, ...]
    payload_bytes: int | None


@dataclass(frozen=True)
class Shard:
    """One rank's findings.

    A *run* carries out the schedule once: one step, or some of them where the schedule is asynchronous.

    Attributes:
        losses: of each step, the mean over its batch as this rank knows it.
        gradient_errors: of the parameters that this rank holds, in the step that is compared; relative to one device's.
        parameter_errors: after the last step.
        sections: the phases of all layers of all stages, for one slot (a micro-batch, or half of one where the schedule works on
            halves); those of other stages without steps.
        run_steps: the communication inside stages that this rank took part in, in the first run.
        boundary_bytes: what it sent to other stages in that run.
        run_bytes: what all ranks sent in it; None where nothing was counted.
    """

    losses: tuple[float, ...]
    gradient_errors: Mapping[str, float]
    parameter_errors: Mapping[str, float]
    sections: tuple[MeasuredSection, ...]
    run_steps: tuple[Step, ...]
    boundary_bytes: int
    run_bytes: int | None


@dataclass(frozen=True)
class Counted:
    """What all ranks sent: in each section of a slot, in the order of `Shard.sections`, and in a run."""

    section_bytes: tuple[int, ...]
    run_bytes: int
