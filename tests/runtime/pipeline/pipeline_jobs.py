"""What the ranks do in the tests of pipelines; run by ranks, never collected."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import GPT, MLP, Bert, Llama, initialize
from autoddl.pipelines.runtime.pipeline.chain import (
    ModuleChain,
    cut_into_stages,
    even_stage_sizes,
    module_chain_of,
    tied_stages,
)
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.pipeline.training_job import train_on_rank
from autoddl.pipelines.runtime.ranks.wire import measure, measure_baseline

flow = load_oneflow()
nn = flow.nn

GPT_SIZES = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 32, "positions": 8}
WIDTH = 12


def chain(model: str) -> ModuleChain:
    """``gpt`` (4 layers, tied), ``gpt-untied``, ``mlp`` (8), ``sequential`` (8, some without parameters), ``wide-range`` (8, every
    second one spreads magnitudes)."""
    if model.startswith("gpt"):
        return module_chain_of(initialize(GPT(**GPT_SIZES, tied=model == "gpt"), seed=3))
    if model == "mlp":
        return module_chain_of(initialize(MLP([WIDTH] * 9), seed=3))
    if model == "wide-range":
        return wide_range(4, WIDTH)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)]
    layers += [nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return module_chain_of(initialize(nn.Sequential(*layers), seed=3), loss=nn.functional.mse_loss)


class Spread(nn.Module):
    """Shrinks every other feature beyond what half precision can tell from 0 beside the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factors = flow.tensor(np.where(np.arange(width) % 2, np.float32(1e-15), np.float32(1)))

    def forward(self, x: Any) -> Any:
        return x * self.factors


def wide_range(num_pairs: int, width: int) -> ModuleChain:
    """What leaves a pair of layers has a wide range; what leaves it backwards, a product with a matrix, has not."""
    pairs = [(nn.Linear(width, width, bias=False), Spread(width)) for _ in range(num_pairs)]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    return module_chain_of(initialize(model, seed=3), loss=nn.functional.mse_loss)


class Data:
    """Micro-batches of random samples by their number, the same everywhere."""

    def __init__(self, model: str, num_rows: int) -> None:
        self.model, self.num_rows = model, num_rows

    def __call__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([7, number])
        if self.model.startswith("gpt"):
            shape = (2, self.num_rows, GPT_SIZES["positions"])
            inputs, targets = rng.integers(0, GPT_SIZES["vocabulary"], shape)
        else:
            inputs, targets = rng.standard_normal((2, self.num_rows, WIDTH)).astype(np.float32)
        return inputs, targets


def optimizer(name: str, rate: float) -> Any:
    options = {"momentum": 0.9} if name == "SGD" and rate < 0.1 else {}
    return lambda parameters: getattr(flow.optim, name)(parameters, lr=rate, **options)


def trainer_of(case: dict[str, Any]) -> PipelineTrainer:
    model = case["model"]
    data = Data(model, case["rows"])
    more = {"sizes": case.get("sizes"), "compress": case.get("compress", False)}
    return PipelineTrainer(chain(model), case["schedule"], optimizer(*case["optimizer"]), data, **more)


def refusals(cases: Sequence[dict[str, Any]]) -> list[str]:
    """For each case the message of the UserError."""
    messages = []
    for case in cases:
        try:
            trainer_of(case)
        except UserError as error:
            messages.append(str(error))
    return messages


def train(cases: Sequence[dict[str, Any]]) -> list[Any]:
    """For each case: the reports of its runs, and this rank's parameters after them."""
    results = []
    for case in cases:
        trainer = trainer_of(case)
        reports = [trainer.run() for _ in range(case.get("runs", 1))]
        results.append((reports, trainer.parameters()))
    return results


def learn(problems: Sequence[Any]) -> list[Any]:
    """For each of these `TrainingOptions` the report of its last run."""
    return [train_on_rank(options) for options in problems]


def what_is_wrong_with(problems: Sequence[Any]) -> list[str]:
    """The messages of those that cannot be loaded."""
    messages = []
    for problem in problems:
        try:
            problem.load(2, 0)
        except UserError as error:
            messages.append(str(error))
    return messages


def train_whole(case: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same model in one process, its layers one after the other: the mean loss of each micro-batch, and the parameters."""
    model, num, period = case["model"], case["num_micro_batches"], case["period"]
    whole, data = chain(model), Data(model, case["rows"])
    parameters = dict(whole.model.named_parameters())
    optimize = optimizer(*case["optimizer"])(list(parameters.values()))
    losses = []
    for begin in range(0, num, period):
        numbers = range(begin, min(begin + period, num))
        optimize.zero_grad()
        for number in numbers:
            x, targets = map(flow.tensor, data(number))
            for layer in whole.layers:
                x = layer.run(x)
            loss = whole.loss(x, targets)
            losses.append(float(loss.numpy()))
            (loss / len(numbers)).backward()
        optimize.step()
    return losses, {name: np.array(value.numpy()) for name, value in parameters.items()}


def train_delayed(case: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Gradient descent with old weights, written down as the papers' equations: the weights of all versions are kept, micro-batch m
    goes forward and back with version ``versions[m][s]`` of stage s, and w(t+1) = w(t) - lr (mean gradient of period t).

    Returns:
        the mean loss of each micro-batch, the weights after the last update, and what they would be without any delay.
    """
    versions, period, (_, rate) = case["versions"], case["period"], case["optimizer"]
    data = Data(case["model"], case["rows"])

    def train(delayed: bool) -> tuple[list[float], dict[str, np.ndarray]]:
        whole = chain(case["model"])
        parameters = dict(whole.model.named_parameters())
        num_stages, num_layers = len(versions[0]), len(whole.layers)
        assert num_layers % num_stages == 0
        stage_of = {name: int(name.split(".")[0]) // (num_layers // num_stages) for name in parameters}
        history = {name: [np.array(value.numpy())] for name, value in parameters.items()}
        losses = []
        for begin in range(0, case["num_micro_batches"], period):
            sums = {name: np.zeros_like(values[0]) for name, values in history.items()}
            for number in range(begin, begin + period):
                for name, parameter in parameters.items():
                    version = versions[number][stage_of[name]] if delayed else number // period
                    parameter.data.copy_(flow.tensor(history[name][version]))
                    parameter.grad = None
                x, targets = map(flow.tensor, data(number))
                loss = whole.loss(whole.model(x), targets)
                loss.backward()
                losses.append(float(loss.numpy()))
                for name, parameter in parameters.items():
                    sums[name] += parameter.grad.numpy() / period
            for name, values in history.items():
                values.append(values[-1] - np.float32(rate) * sums[name])
        return losses, {name: values[-1] for name, values in history.items()}

    losses, values = train(delayed=True)
    return losses, values, train(delayed=False)[1]


# ---- Counting ----------------------------------------------------------------------------------------------------------


class Alive:
    """Exists as long as autograd keeps the graph that it is in; knows how many do, and the most that ever did."""

    now = most = 0

    def __init__(self) -> None:
        Alive.now += 1
        Alive.most = max(Alive.most, Alive.now)

    def __del__(self) -> None:
        Alive.now -= 1


class Counted(nn.Module):
    """A linear layer whose graph, where there is one, holds an `Alive`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        if not y.requires_grad:
            return y
        alive = Alive()

        def backward(ctx: Any, dy: Any) -> Any:
            assert alive
            return dy.clone()

        apply = flow._oneflow_internal.autograd.AutogradFunctionBase.apply
        return apply("counted", lambda ctx, t: t.clone(), backward, y)


def count_alive(schedules: Sequence[Any]) -> list[tuple[float, int, int]]:
    """For each schedule: what the report says of activations, the most graphs that were really alive, and how many are left."""
    results = []
    for schedule in schedules:
        model = nn.Sequential(*[Counted(WIDTH) for _ in range(schedule.num_stages)])
        data = Data("sequential", 4)
        trainer = PipelineTrainer(module_chain_of(model, nn.functional.mse_loss), schedule, optimizer("SGD", 0.1), data)
        Alive.most = 0
        report = trainer.run()
        results.append((report.peak_activations, Alive.most, Alive.now))
    return results


def zeros(rows: int, width: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, width), dtype=np.float32), np.zeros((rows, width), dtype=np.float32)


def count_bytes(schedules: Sequence[Any], width: int, rows: int) -> list[tuple[int, int, int]]:
    """For each schedule: bytes that all ranks together really sent, and what this rank reports of its boundaries and sums."""
    results = []
    baseline = measure_baseline()
    for schedule in schedules:
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(schedule.num_stages)])
        trainer = PipelineTrainer(
            module_chain_of(model, nn.functional.mse_loss),
            schedule,
            optimizer("SGD", 0.1),
            functools.partial(zeros, rows, width),
        )
        report, traffic = measure(trainer.run, baseline)
        results.append((traffic.payload_bytes, report.bytes_sent, report.bytes_reduced))
    return results


def count_compressed_bytes(cases: Sequence[tuple[Any, bool]], width: int, rows: int) -> list[tuple[int, int, int, int]]:
    """For each schedule and whether its activations have a wide range: bytes that all ranks together really sent, and what this
    rank reports: bytes sent to neighbouring stages, bytes saved, messages in full precision."""
    results = []
    baseline = measure_baseline()
    generator = np.random.default_rng(1)
    inputs, targets = generator.standard_normal((2, rows, width)).astype(np.float32)
    for schedule, is_wide in cases:
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(schedule.num_stages)])
        narrow = module_chain_of(initialize(model, seed=3), nn.functional.mse_loss)
        chosen = wide_range(schedule.num_stages, width) if is_wide else narrow
        trainer = PipelineTrainer(
            chosen, schedule, optimizer("SGD", 0.1), lambda number: (inputs, targets), compress=True
        )
        report, traffic = measure(trainer.run, baseline)
        results.append((traffic.payload_bytes, report.bytes_sent, report.bytes_saved, report.num_uncompressed))
    return results


def be_killed(case: dict[str, Any], victim: int) -> None:
    """A rank that goes away in the middle of its second run."""
    trainer = trainer_of(case)
    trainer.run()
    if flow.env.get_rank() == victim:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        trainer.run()


def train_with_checkpoints(
    case: dict[str, Any], directory: Path, num_runs: int, restores: bool
) -> tuple[int, list[Any]]:
    """Runs with a checkpoint after each: how many updates there had been before, and the runs' reports."""
    trainer = trainer_of(case)
    assert trainer.restore(directory) == restores
    before, reports = trainer.num_updates, []
    for _ in range(num_runs):
        reports.append(trainer.run())
        trainer.save(directory)
    return before, reports


def chains_and_models() -> list[tuple[float, float, bool, dict[str, tuple[int, ...]]]]:
    """For each family: the loss of the model as it is, that of its chain in three stages, whether every parameter is in some stage,
    and those that are in several."""
    tokens = flow.tensor(np.random.default_rng(5).integers(0, 32, (2, 8)))
    features = flow.ones(3, WIDTH)
    families = [(GPT(2, 16, 2, 32, 8), tokens), (Bert(2, 16, 2, 32, 8), tokens), (MLP([WIDTH] * 4), features)]
    families.append((Llama(2, 16, 2, 32, 24), tokens))
    results = []
    for model, x in families:
        initialize(model, seed=2)
        names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
        stages = cut_into_stages(module_chain_of(model), even_stage_sizes(len(module_chain_of(model).layers), 3))
        wanted = float(model(x, x).numpy())
        y = x
        for stage in stages:
            y = stage.run(y, list(stage.initial_values().values()))
        covered = {name for stage in stages for name in stage.places} == set(names.values())
        results.append((wanted, float(stages[-1].loss(y, x).numpy()), covered, tied_stages(stages)))
    return results
