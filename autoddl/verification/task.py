"""What the launcher gives to ranks and what they give back; plain values, made and read without OneFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan
from autoddl.pipelines.schedule import Schedule

from ..zoo.builtin import BuiltIn

__all__ = ["NUM_STEPS", "Counted", "PipelineTask", "Reference", "Section", "Shard", "Task"]

#: Steps of the optimizer after which parameters are compared.
NUM_STEPS = 3


@dataclass(frozen=True)
class Task:
    """What is to be run.

    Attributes:
        graph, strategies, workload: the plan, as it fits the machine.
        built_in: the model; None where ``function`` makes it.
        function: ``FILE.py:FUNCTION``, with an absolute path, which returns a module and example inputs; "" without one.
        seed: of initial values (of a built-in model) and data.
        folder: where one device's results are kept for the ranks.
        counts_bytes: whether the ranks have a network of their own.
    """

    graph: LayerGraph
    strategies: Mapping[str, Strategy]
    workload: Workload
    built_in: BuiltIn | None
    function: str
    seed: int
    folder: str
    counts_bytes: bool


@dataclass(frozen=True)
class PipelineTask:
    """What ranks are given to run a plan with a pipeline.

    Attributes:
        task: how model and data are made; its batch is that of one update.
        schedule, stages: the pipeline.
        gradient_step: the step, counted from 0, whose gradients are compared.
    """

    task: Task
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    gradient_step: int


@dataclass(frozen=True)
class Reference:
    """One device: the loss of each step."""

    losses: tuple[float, ...]


@dataclass(frozen=True)
class Section:
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

    Attributes:
        losses: of each step.
        gradient_errors: of the first step, by parameter; relative to one device's.
        parameter_errors: after the last step.
        sections: the phases of all layers, for one micro-batch.
        step_steps: the communication of the first training step.
        step_bytes: what all ranks sent in it; None where nothing was counted.
    """

    losses: tuple[float, ...]
    gradient_errors: Mapping[str, float]
    parameter_errors: Mapping[str, float]
    sections: tuple[Section, ...]
    step_steps: tuple[Step, ...]
    step_bytes: int | None


@dataclass(frozen=True)
class Counted:
    """What all ranks sent: in each section of a micro-batch, in the order of `Shard.sections`, and in a training step."""

    section_bytes: tuple[int, ...]
    step_bytes: int
