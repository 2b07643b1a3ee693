"""Executes a plan on the ranks of a verification.  Only ranks import this module, since it imports OneFlow.

Every plan is executed as ``autoddl train`` executes it: by a `PipelineTrainer`, of one stage for a plan without a pipeline.  The
module of `autoddl.apply` runs the same stage (:mod:`autoddl.pipelines.runtime.stage`), and compares itself with the user's module
in its first forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.pipelines.runtime import train_steps
from autoddl.pipelines.runtime.backend import HOST, backend_of
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.model_constants import LEARNING_RATES
from autoddl.pipelines.runtime.pipeline.report import RankReport
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.stage.model import PlannedModel
from autoddl.pipelines.runtime.stage.tracing import Measure, TracedSection

from .task import VerificationTask

__all__ = ["Arrays", "Data", "PlanRun", "loss_of", "make_optimizer"]

flow: Any = load_oneflow()

Arrays = dict[str, np.ndarray]
#: Returns the inputs of a step, and its targets if the model takes targets.
Data = Callable[[int], tuple[np.ndarray, ...]]


class PlanRun:
    """A plan in training, beginning with its initial values; a run is one run of the schedule.

    All ranks must make the same calls in the same order.

    Args:
        task: The task of the verification.
        module: The model as a local module, with the same initial values on every rank.
        data: Returns the data of a step.
        epsilon: Epsilon of Adam.
    """

    def __init__(self, task: VerificationTask, module: Any, data: Data, epsilon: float) -> None:
        self._schedule = task.schedule
        size, num_micro_batches = task.workload.micro_batch, task.workload.num_micro_batches
        data = functools.lru_cache(maxsize=2)(data)

        def micro_batch(number: int) -> tuple[np.ndarray, ...]:
            """Return the data of a micro-batch; ``number`` counts the micro-batches of all steps."""
            step, index = divmod(number, num_micro_batches)
            samples = slice(index * size, (index + 1) * size)
            return tuple(array[samples] for array in data(step))

        self._trainer = PipelineTrainer(
            PlannedModel(module, task.graph, task.stages),
            task.schedule,
            lambda parameters: make_optimizer(task, parameters, epsilon),
            micro_batch,
            loss_of=loss_of,
            keep_gradients=True,
            backend=backend_of(task.workload.precision, task.device),
        )
        self._report: RankReport | None = None

    def trace(self, measure: Measure | None) -> Sequence[TracedSection]:
        """Execute one slot in all stages, phase by phase, without a parameter update."""
        return self._trainer.trace(measure)

    def logging(self) -> AbstractContextManager[list[Step]]:
        """Return a context with a list, to which every communication step of this rank inside its stages is appended."""
        return self._trainer.logging()

    def run(self) -> None:
        """Execute the schedule once on the next batches, including the parameter updates."""
        self._report = self._trainer.run()

    def losses(self) -> list[float]:
        """Return the mean loss of each update of the last run; it is the same on every rank."""
        assert self._report is not None
        # Each rank has its own part of the mean loss of a micro-batch; sum the parts over all ranks.
        own_parts = []
        for update in range(self._schedule.num_updates):
            numbers = self._schedule.micro_batches_of(update)
            own_parts.append(sum(self._report.losses.get(number, 0.0) for number in numbers) / len(numbers))
        losses = HOST.tensor(own_parts, flow.float64)
        if flow.env.get_world_size() > 1:
            flow.comm.all_reduce(losses)
        return [float(loss) for loss in losses.numpy()]

    @property
    def boundary_bytes(self) -> int:
        """Bytes that this rank sent to other stages during the last run."""
        assert self._report is not None
        return self._report.bytes_sent

    def gradients(self, update: int) -> Arrays:
        """Return the gradients of an update of the last run, for the parameters that this rank holds.

        A tied parameter is included once, by its first name.
        """
        return self._trainer.gradients(update)

    def parameters(self) -> Arrays:
        """Return the newest values of the parameters that this rank holds, by the same names as the gradients."""
        return self._trainer.parameters()


# ---- Shared with the single-device reference -----------------------------------------------------------------------------


def loss_of(output: Any) -> Any:
    """Return the loss of what a model returns: the first single number; without one, the mean square of all elements."""
    tensors = list({id(tensor): tensor for tensor in _tensors_of(output) if tensor.is_floating_point()}.values())
    scalars = [tensor for tensor in tensors if tensor.numel() == 1]
    if scalars:
        return scalars[0].reshape(())
    squares = [(tensor * tensor).sum() for tensor in tensors]
    return sum(squares[1:], squares[0]) * (1.0 / sum(tensor.numel() for tensor in tensors))


def _tensors_of(value: Any) -> list[Any]:
    """Return all tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, flow.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors_of(part)]


def make_optimizer(task: VerificationTask, parameters: Any, epsilon: float) -> Any:
    """Return the optimizer of the task's workload, for the parameters that require gradients."""
    name = task.workload.optimizer
    options = {"eps": epsilon, "do_bias_correction": task.corrects_bias}
    return train_steps.make_optimizer(parameters, name, LEARNING_RATES[name], **options)
