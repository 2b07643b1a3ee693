"""What carries out a plan on ranks, as the verification needs it; imported by ranks only, since it needs OneFlow.

There are two kinds, since users have two: `AppliedRun`, the module of `autoddl.apply`, which users call, and which models without
a loss are allowed in; and `PipelineRun`, a `PipelineTrainer`, which trains by the plan's schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.pipeline.report import RankReport
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.stage.model import PlannedModel
from autoddl.pipelines.runtime.stage.tracing import Measure, TracedSection

from .task import VerificationTask

__all__ = ["AppliedRun", "Arrays", "Data", "PipelineRun", "PlanRun", "loss_of", "make_optimizer", "start_run"]

flow: Any = load_oneflow()

Arrays = dict[str, np.ndarray]
#: The inputs of a step, and its targets where the model takes them.
Data = Callable[[int], tuple[np.ndarray, ...]]


class PlanRun(Protocol):
    """A plan at its initial values; all ranks make the same calls in the same order."""

    def trace(self, measure: Measure | None) -> Sequence[TracedSection]:
        """One slot through all stages, phase by phase; nothing is updated."""

    def logging(self) -> AbstractContextManager[list[Step]]:
        """A list that grows by every step inside stages that this rank takes part in."""

    def run(self) -> None:
        """Carry out the schedule once, on the data that follows, with its updates."""

    def losses(self) -> list[float]:
        """The mean loss of each update of the last run, on every rank."""

    @property
    def boundary_bytes(self) -> int:
        """What this rank sent to other stages in the last run."""

    def gradients(self, update: int) -> Arrays:
        """What an update of the last run was made with, of the parameters that this rank holds, by their first names."""

    def parameters(self) -> Arrays:
        """The newest values, named so."""


def start_run(task: VerificationTask, module: Any, data: Data, epsilon: float) -> PlanRun:
    """The run that a plan is for.

    Args:
        module: the plain model at its initial values, the same on every rank.
        data: of each step.
        epsilon: of the optimizer.
    """
    return (AppliedRun if task.is_applied else PipelineRun)(task, module, data, epsilon)


class AppliedRun:
    """The module of `autoddl.apply`; a run is a step."""

    boundary_bytes = 0

    def __init__(self, task: VerificationTask, module: Any, data: Data, epsilon: float) -> None:
        self._task, self._data = task, data
        self._names = [name for name, _ in module.named_parameters()]
        self._applied: Any = AppliedModule(module, task.graph, task.strategies, task.workload)
        self._optimizer = make_optimizer(task, self._applied.parameters(), epsilon)
        self._num_steps, self._loss = 0, 0.0

    def trace(self, measure: Measure | None) -> Sequence[TracedSection]:
        part = tuple(array[: self._task.workload.micro_batch] for array in self._data(0))
        _, sections = self._applied.trace(*part, measure=measure)
        self._optimizer.zero_grad(set_to_none=True)
        return sections

    def logging(self) -> AbstractContextManager[list[Step]]:
        return self._applied.stepper.logging()

    def run(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)  # kept until now for `gradients`
        self._loss = self._applied.train_step(*self._data(self._num_steps), loss_of=loss_of)
        self._optimizer.step()
        self._num_steps += 1

    def losses(self) -> list[float]:
        return [self._loss]

    def gradients(self, update: int) -> Arrays:
        return self._named(self._applied.logical_gradients())

    def parameters(self) -> Arrays:
        return self._named({name: tensor.numpy() for name, tensor in self._applied.state_dict().items()})

    def _named(self, values: Mapping[str, np.ndarray]) -> Arrays:
        return {name: values[name] for name in self._names if name in values}


class PipelineRun:
    """A `PipelineTrainer`; a run is a run of the schedule."""

    def __init__(self, task: VerificationTask, module: Any, data: Data, epsilon: float) -> None:
        self._schedule = task.schedule
        size, per_step = task.workload.micro_batch, task.workload.num_micro_batches
        data = functools.lru_cache(maxsize=2)(data)

        def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
            step, place = divmod(number, per_step)
            inputs, targets = data(step)
            return inputs[place * size : (place + 1) * size], targets[place * size : (place + 1) * size]

        self._trainer = PipelineTrainer(
            PlannedModel(module, task.graph, task.stages),
            task.schedule,
            lambda parameters: make_optimizer(task, parameters, epsilon),
            batch,
            keep_gradients=True,
        )
        self._report: RankReport | None = None

    def trace(self, measure: Measure | None) -> Sequence[TracedSection]:
        return self._trainer.trace(measure)

    def logging(self) -> AbstractContextManager[list[Step]]:
        return self._trainer.logging()

    def run(self) -> None:
        self._report = self._trainer.run()

    def losses(self) -> list[float]:
        assert self._report is not None
        parts = []
        for update in range(self._schedule.num_updates):
            numbers = self._schedule.micro_batches_of(update)
            parts.append(sum(self._report.losses.get(number, 0.0) for number in numbers) / len(numbers))
        whole = flow.tensor(parts, dtype=flow.float64)
        if flow.env.get_world_size() > 1:
            flow.comm.all_reduce(whole)
        return [float(loss) for loss in whole.numpy()]

    @property
    def boundary_bytes(self) -> int:
        assert self._report is not None
        return self._report.bytes_sent

    def gradients(self, update: int) -> Arrays:
        return self._trainer.gradients(update)

    def parameters(self) -> Arrays:
        return self._trainer.parameters()


# ---- What one device does too --------------------------------------------------------------------------------------------


def loss_of(output: Any) -> Any:
    """The model's own loss; of a model without one the mean square of its output."""
    return output if output.ndim == 0 else (output * output).mean()


def make_optimizer(task: VerificationTask, parameters: Any, epsilon: float) -> Any:
    """The workload's."""
    trained = [p for p in parameters if p.requires_grad]
    if task.workload.optimizer == "adam":
        return flow.optim.Adam(trained, lr=1e-3, eps=epsilon)
    return flow.optim.SGD(trained, lr=0.01, momentum=0.9 if task.workload.optimizer == "momentum" else 0.0)
