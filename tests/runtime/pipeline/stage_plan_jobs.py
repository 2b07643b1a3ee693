"""What the ranks do in the tests of stages with plans; run by ranks, never collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import GPT, MLP, initialize
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.ranks.wire import measure, measure_baseline
from autoddl.pipelines.runtime.stage.model import PlannedModel

flow = load_oneflow()


def module_of(case: Mapping[str, Any]) -> Any:
    """With parameters frozen whose names begin as ``frozen`` says; with values of each rank's own where ``differing`` is set."""
    sizes = case["sizes"]
    if case["model"] == "mlp":
        module = MLP(sizes)
    else:
        shape = (sizes.layers, sizes.width, sizes.heads, sizes.vocabulary, sizes.num_positions)
        module = GPT(*shape, inner=sizes.mlp_width, tied=sizes.tied)
    for name, parameter in initialize(
        module, seed=3 + case.get("differing", 0) * flow.env.get_rank()
    ).named_parameters():
        parameter.requires_grad_(not name.startswith(case.get("frozen", ())))
    return module


class Data:
    """Micro-batches of random samples by their number, the same everywhere."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case

    def __call__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rng, sizes, rows = np.random.default_rng([7, number]), self.case["sizes"], self.case["rows"]
        if self.case["model"] == "mlp":
            inputs = rng.standard_normal((rows, sizes[0])).astype(np.float32)
            return inputs, rng.standard_normal((rows, sizes[-1])).astype(np.float32)
        inputs, targets = rng.integers(0, sizes.vocabulary, (2, rows, sizes.sequence))
        return inputs, targets


def optimizer(name: str, rate: float, options: Mapping[str, Any] | None = None) -> Any:
    return lambda parameters: getattr(flow.optim, name)(parameters, lr=rate, **(options or {}))


def trainer_of(case: Mapping[str, Any]) -> PipelineTrainer:
    model = PlannedModel(module_of(case), case["graph"], case["stages"])
    return PipelineTrainer(model, case["schedule"], optimizer(*case["optimizer"]), Data(case))


def train(cases: Sequence[Mapping[str, Any]]) -> list[Any]:
    """For each case: the reports of its runs, this rank's parameters after them, and what all ranks sent in the last run."""
    results, baseline = [], None
    for case in cases:
        trainer = trainer_of(case)
        reports = [trainer.run() for _ in range(case.get("runs", 1) - 1)]
        if case.get("counts"):
            baseline = baseline or measure_baseline()
            report, traffic = measure(trainer.run, baseline)
        else:
            report, traffic = trainer.run(), None
        results.append(([*reports, report], trainer.parameters(), traffic and traffic.payload_bytes))
    return results


def train_whole(case: Mapping[str, Any]) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The plain module in one process: the mean loss of each micro-batch, the parameters, and what they were before."""
    module, data, period = module_of(case), Data(case), case["period"]
    parameters = dict(module.named_parameters())
    initial = {name: np.array(value.numpy()) for name, value in parameters.items()}
    optimize = optimizer(*case["optimizer"])([value for value in parameters.values() if value.requires_grad])
    losses = []
    for begin in range(0, case["num_micro_batches"], period):
        numbers = range(begin, min(begin + period, case["num_micro_batches"]))
        optimize.zero_grad()
        for number in numbers:
            loss = module(*map(flow.tensor, data(number)))
            losses.append(float(loss.numpy()))
            (loss / len(numbers)).backward()
        optimize.step()
    return losses, {name: np.array(value.numpy()) for name, value in parameters.items()}, initial


def micro_batches(case: Mapping[str, Any], num: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first micro-batches."""
    return [Data(case)(number) for number in range(num)]


def train_in_turn(cases: Sequence[Mapping[str, Any]], directory: Path) -> dict[str, np.ndarray]:
    """A run of each case, each from the checkpoint of the one before."""
    for number, case in enumerate(cases):
        trainer = trainer_of(case)
        assert trainer.restore(directory) == (number > 0) and trainer.num_updates == number
        trainer.run()
        trainer.save(directory)
    return trainer.parameters()


def refusals(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each case the message of the UserError."""
    messages = []
    for case in cases:
        try:
            trainer_of(case)
        except UserError as error:
            messages.append(str(error))
    return messages
