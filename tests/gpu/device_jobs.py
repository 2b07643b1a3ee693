"""What ranks do in the tests of several devices; run by ranks, never collected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.pipelines.runtime.backend import Backend, backend_of
from autoddl.pipelines.runtime.comm import collectives
from autoddl.pipelines.runtime.comm.exchanging import exchange
from autoddl.pipelines.runtime.comm.mesh import RankAxis
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.peakmemory import PeakMemory
from autoddl.pipelines.runtime.stepping import Ranks
from autoddl.pipelines.runtime.timing import span_of
from autoddl.verification import rank_job, running
from autoddl.verification.task import RankResult, VerificationTask

flow = load_oneflow()
Tensor = Any
_HALVES = (flow.float16, flow.bfloat16)


def _tensor(values: np.ndarray, dtype: str, device: str) -> Tensor:
    return flow.tensor(values, dtype=getattr(flow, dtype), device=device)


def _array(x: Tensor) -> np.ndarray:
    return np.array((x.detach().to(flow.float32) if x.dtype in _HALVES else x.detach()).numpy())


def _rank() -> int:
    return int(flow.env.get_rank())


# ---- Communication -----------------------------------------------------------------------------------------------------------


def collect(calls: Sequence[tuple], dtype: str, device: str) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """For each call (operation, axis, dims, inputs, output gradients or None), one of each rank: its output and gradient."""
    results = []
    for operation, axis, dims, inputs, output_gradients in calls:
        x = _tensor(inputs[_rank()], dtype, device)
        x.requires_grad_(output_gradients is not None)
        y = getattr(collectives, operation)(x, axis, *dims)
        if output_gradients is not None:
            (y * 1).backward(_tensor(output_gradients[_rank()], dtype, device))
        results.append((_array(y), None if output_gradients is None else _array(x.grad)))
    return results


def exchange_ends(value: np.ndarray, gradient: np.ndarray, dtype: str, device: str) -> tuple[np.ndarray, np.ndarray]:
    """A matrix from shards of rows to shards of columns, and the gradient back; returns this rank's output and its gradient."""
    num = flow.env.get_world_size()
    ranks, axis = Ranks(num, Backend(device)), Axis(num, 1)
    x = _tensor(np.split(value, num, axis=0)[_rank()], dtype, device).requires_grad_(True)
    y = exchange(x * 1, ranks, ((axis,), ()), ((), (axis,)), (0, 1))
    y.backward(_tensor(np.split(gradient, num, axis=1)[_rank()], dtype, device))
    return _array(y), _array(x.grad)


def pass_around(values: Sequence[np.ndarray], dtype: str, device: str) -> np.ndarray:
    """Every rank sends its value to the next one, rank 0 first; returns what this rank got."""
    rank, num = _rank(), flow.env.get_world_size()
    mine = _tensor(values[rank], dtype, device)
    receive = functools.partial(collectives.receive, tuple(mine.shape), mine.dtype, (rank - 1) % num, device)
    if rank == 0:
        collectives.send(mine, 1)
        return _array(receive())
    got = receive()
    collectives.send(mine, (rank + 1) % num)
    return _array(got)


def seconds(num_bytes: int, dtype: str, device: str, num_repeats: int) -> dict[str, float]:
    """Median seconds of each collective over all ranks, of a logical tensor of so many bytes."""
    num = flow.env.get_world_size()
    axis = RankAxis(num, 1, num)
    whole = _tensor(np.ones((num * num, 1), np.float32), dtype, device)
    length = num_bytes // whole.element_size() // (num * num) * num
    whole = flow.ones(num, length, dtype=whole.dtype, device=device)
    shard = whole[:1].contiguous()
    calls: Mapping[str, Callable[[], Tensor]] = {
        "all-reduce": lambda: collectives.all_reduce(whole, axis),
        "all-gather": lambda: collectives.all_gather(shard, axis, 0),
        "reduce-scatter": lambda: collectives.reduce_scatter(whole, axis, 0),
        "all-to-all": lambda: collectives.all_to_all(shard, axis, 1, 0),
    }
    found = {}
    for name, call in calls.items():
        call()
        spans = [span_of(call, device, flow.comm.barrier) for _ in range(num_repeats)]
        found[name] = float(np.median(np.diff(spans)))
    return found


# ---- Plans -------------------------------------------------------------------------------------------------------------------


def run_plan(task: VerificationTask, loss_scale: float) -> RankResult:
    """As `rank_job.run_plan`, with a scale of the loss at which nothing overflows: a skipped step would change what is learned."""
    original = running.PipelineTrainer
    running.PipelineTrainer = functools.partial(original, loss_scale=loss_scale)
    try:
        return rank_job.run_plan(task)
    finally:
        running.PipelineTrainer = original


def _trainer(task: VerificationTask, first_step_again: int = 0) -> Any:
    """A trainer of a plan with stochastic gradient descent.

    Args:
        task: The plan.
        first_step_again: Number of steps that begin with the data of the first one.
    """
    module, examples = rank_job.make_model(task)
    size, per_step = task.workload.micro_batch, task.workload.num_micro_batches

    def data(number: int) -> tuple[np.ndarray, ...]:
        step, index = divmod(number, per_step)
        arrays = rank_job.step_data(task, examples, max(0, step - first_step_again))
        return tuple(array[index * size : (index + 1) * size] for array in arrays)

    return running.PipelineTrainer(
        running.PlannedModel(module, task.graph, task.stages),
        task.schedule,
        lambda parameters: running.make_optimizer(task, parameters, 1e-8),
        data,
        loss_of=running.loss_of,
        backend=backend_of(task.workload.precision, task.device),
    )


def train_with_overflow(task: VerificationTask, scales: Sequence[float], num_skipped: int) -> dict[str, Any]:
    """Runs of a plan, the first ``num_skipped`` of which overflow, on the data of the run after them.

    Args:
        task: The plan.
        scales: Scale of the loss before each run.
        num_skipped: Number of runs that overflow.
    """
    trainer = _trainer(task, num_skipped)
    after = []
    for scale in scales:
        trainer.scaler.scale = scale
        trainer.run()
        after.append(trainer.scaler.scale)
    return {"parameters": trainer.parameters(), "scales": after, "skipped": trainer.scaler.num_skipped}


def memory(task: VerificationTask, num_runs: int) -> tuple[int | None, list[float]]:
    """Train, and return the bytes that this rank needed on its device, and the losses that this rank knows."""
    backend = backend_of(task.workload.precision, task.device)
    ones = backend.tensor(np.ones(8, np.float32))
    Ranks(flow.env.get_world_size(), backend).reduce(
        ones * 1, _all_ranks()
    )  # what CUDA and NCCL need is no part of plans
    _array(flow.matmul(ones.reshape(1, 8), ones.reshape(8, 1)))  # nor is what cuBLAS needs
    peak = PeakMemory(task.device)
    trainer, losses = _trainer(task), list[float]()
    for _ in range(num_runs):
        losses += trainer.run().losses.values()
    return peak.read(), losses


def _all_ranks() -> list[Axis]:
    num = flow.env.get_world_size()
    return [Axis(num, 1)] if num > 1 else []
