"""What the ranks do in `bench_export`: steps by the runtime and by an exported file in turn, with the same values and data."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import initialize
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.pipeline.transport import _communication_thread
from autoddl.planfile import PlanFile
from autoddl.staging import planned_model
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.modules import build_module, make_batch

flow: Any = load_oneflow()
RATE = 0.01
#: Of one rank: the seconds of each repetition, by the runtime and by the file.
Seconds = tuple[list[float], list[float]]


class Norms(flow.nn.Module):
    """Layer norms, and a small loss behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = flow.nn.Sequential(*(flow.nn.LayerNorm(256) for _ in range(4)))
        self.head = flow.nn.Linear(256, 8)

    def forward(self, inputs: Any, targets: Any) -> Any:
        logits = self.head(self.norms(inputs))
        return flow.nn.functional.cross_entropy(logits.reshape(-1, 8), targets.reshape(-1))


def norms() -> tuple[Any, tuple[Any, Any]]:
    """The model as a user would give it."""
    flow.manual_seed(0)  # the same on every rank
    return Norms(), (flow.randn(8, 256, 256), flow.randint(0, 8, (8, 256)))


def run_users(function: str, plan: PlanFile, file: str, repeats: int, clock: str) -> Seconds:
    """A function of this file makes the model."""
    module, examples = globals()[function]()
    batch = [example.numpy() for example in examples]
    exported = _module_of(file)
    model = exported.build(plain=module)
    applied = AppliedModule(module, plan.graph, plan.strategies, plan.workload)
    return _measured(applied, exported, model, batch, repeats, clock)


def run_built_in(built_in: BuiltIn, plan: PlanFile, file: str, repeats: int, clock: str) -> Seconds:
    exported = _module_of(file)
    applied = AppliedModule(initialize(build_module(built_in), 0), plan.graph, plan.strategies, plan.workload)
    batch = make_batch(built_in, plan.workload.batch, np.random.default_rng(0))
    return _measured(applied, exported, exported.build(0), batch, repeats, clock)


def run_pipeline(built_in: BuiltIn, plan: PlanFile, file: str, repeats: int, clock: str) -> Seconds:
    """Whole runs of the schedule, each one step."""
    module = initialize(build_module(built_in), 0)
    inputs, targets = make_batch(built_in, plan.workload.micro_batch, np.random.default_rng(0))

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        return inputs, targets

    trainer = PipelineTrainer(
        planned_model(module, plan), plan.evaluation.schedule, lambda weights: flow.optim.SGD(weights, lr=RATE), batch
    )
    pipeline = _module_of(file).build(0, "sgd", RATE)
    return _in_turn(trainer.run, lambda: pipeline.run(batch), repeats, clock)


def _measured(applied: Any, exported: Any, model: Any, batch: Any, repeats: int, clock: str) -> Seconds:
    parameters = [stored.tensor for stored in exported.all_parameters(model)]

    def run_applied() -> float:
        for parameter in applied.parameters():
            parameter.grad = None
        return applied.train_step(*batch)

    def run_exported() -> float:
        for parameter in parameters:
            parameter.grad = None
        size = exported.MICRO_BATCH
        starts = range(0, len(batch[0]), size)
        return exported.train_step(model, [[part[start : start + size] for part in batch] for start in starts])

    losses = run_applied(), run_exported()
    assert abs(losses[1] / losses[0] - 1) < 1e-5, losses
    return _in_turn(run_applied, run_exported, repeats, clock)


def _in_turn(run_applied: Callable[[], Any], run_exported: Callable[[], Any], repeats: int, clock: str) -> Seconds:
    """``clock`` is a function of `time`."""
    seconds: Seconds = ([], [])
    now = getattr(time, clock)
    for number in range(repeats + 1):
        for which, run in enumerate((run_applied, run_exported)):
            flow.comm.barrier()
            started = now()
            run()
            flow._oneflow_internal.eager.Sync()
            if number:  # the first one warms up
                seconds[which].append(now() - started)
    return seconds


def _module_of(path: str) -> Any:
    """A file as a module, which communicates in the runtime's thread."""
    spec = importlib.util.spec_from_file_location("_exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module)["_communication_thread"] = _communication_thread
    return module
