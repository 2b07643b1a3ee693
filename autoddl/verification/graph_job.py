"""The jobs of the ranks that verify the graph executor.  Only ranks import this module, since it imports OneFlow.

**Gradients** are not visible in an ``nn.Graph`` with an optimizer.  So another graph takes one step of SGD with a learning rate so
large that the old values vanish beside the update: gradient = (old - new) / learning rate, to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autoddl.pipelines.runtime.backend import CPU, backend_of
from autoddl.pipelines.runtime.graph.executor import GraphExecutor
from autoddl.pipelines.runtime.graph.kept import KeptGraph
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.ranks.rank import report
from autoddl.pipelines.runtime.ranks.wire import Meter

from .rank_job import load_reference, make_model, relative_errors, step_data, with_prefix
from .running import loss_of, make_optimizer
from .task import ByteCounts, RankResult, VerificationTask, num_steps

__all__ = ["count_graph_again", "run_graph"]

flow: Any = load_oneflow()

#: Learning rate of the step that makes gradients visible; a power of two, so that it adds no rounding.
_GRADIENT_RATE = 2.0**24
#: Runs of an idle graph whose median is subtracted from counts.
_NUM_IDLE = 3


def run_graph(task: VerificationTask) -> RankResult:
    """Execute the plan in an ``nn.Graph`` on all ranks, compare it with the reference, and count the bytes of a step."""
    reference, executor, examples = _load(task)
    initial = with_prefix("initial", reference)
    meter = Meter() if task.counts_bytes else None
    losses, run_bytes = [], None
    total = num_steps(task.schedule)
    for step in range(total):
        report(f"step {step + 1} of {total}" + ("" if step else ", with compilation"))
        tensors = executor.tensors(*step_data(task, examples, step))
        # The first step compiles the graph, so the last one is counted.
        if meter is not None and step == total - 1:
            run_bytes, values = _count(meter, executor, tensors)
        else:
            values = executor.training_graph(*tensors).to_local().numpy()
        losses.append(float(np.mean(values, dtype=np.float64)))
    parameter_errors = relative_errors(executor.logical_values(), with_prefix("final", reference))
    # Gradients of the first step.
    report("gradients")
    executor.load_state_dict(initial)
    executor.set_optimizer(lambda parameters: flow.optim.SGD(parameters, lr=_GRADIENT_RATE))
    executor.train_step(*step_data(task, examples, 0))
    gradients = {
        name: (initial[name].astype(np.float64) - value) / _GRADIENT_RATE
        for name, value in executor.logical_values().items()
    }
    return RankResult(
        losses=tuple(losses),
        gradient_errors=relative_errors(gradients, with_prefix("gradient", reference)),
        parameter_errors=parameter_errors,
        sections=(),
        run_steps=(),
        boundary_bytes=0,
        run_bytes=run_bytes,
    )


def count_graph_again(task: VerificationTask) -> ByteCounts:
    """Count the bytes of a step again; the values are not compared."""
    _, executor, examples = _load(task)
    tensors = executor.tensors(*step_data(task, examples, 0))
    executor.training_graph(*tensors).to_local().numpy()  # compiles
    num_bytes, _ = _count(Meter(), executor, tensors)
    return ByteCounts((), num_bytes)


def _count(meter: Meter, executor: GraphExecutor, tensors: list[Any]) -> tuple[int, np.ndarray]:
    """Return the bytes that all ranks send in a step, less those of an ``nn.Graph`` without transfers; and the step's losses."""
    idle, zeros = _IdleGraph(), flow.zeros(flow.env.get_world_size(), placement=_all_ranks(), sbp=[flow.sbp.split(0)])
    idle(zeros).to_local().numpy()  # compiles
    meter(lambda: None)  # what was sent before belongs to no section
    own_bytes = [meter(lambda: idle(zeros).to_local().numpy())[1].payload_bytes for _ in range(_NUM_IDLE)]
    values, traffic = meter(lambda: executor.training_graph(*tensors).to_local().numpy())
    return traffic.payload_bytes - sorted(own_bytes)[_NUM_IDLE // 2], values


class _IdleGraph(KeptGraph):
    """A graph in which ranks compute and send nothing but what OneFlow sends to start every graph."""

    def build(self, x: Any) -> Any:
        return x * 2


def _all_ranks() -> Any:
    return flow.placement(CPU, list(range(flow.env.get_world_size())))


def _load(task: VerificationTask) -> tuple[Mapping[str, np.ndarray], GraphExecutor, tuple[np.ndarray, ...]]:
    """Return the results of the reference, the executor with the same initial values, and the example inputs."""
    reference = load_reference(task)
    module, examples = make_model(task)
    epsilon = float(reference["epsilon"])
    executor = GraphExecutor(
        module,
        task.graph,
        task.strategies,
        task.workload,
        backend_of(task.workload.precision, CPU),
        optimizer=lambda parameters: make_optimizer(task, parameters, epsilon),
        loss_of=None if task.graph.has_loss else loss_of,
    )
    executor.load_state_dict(with_prefix("initial", reference))
    return reference, executor, examples
