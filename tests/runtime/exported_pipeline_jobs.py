"""What the ranks do in the tests of exported pipelines; run by ranks, never collected."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import initialize
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.pipeline.transport import _communication_thread
from autoddl.pipelines.runtime.ranks.wire import Meter
from autoddl.pipelines.runtime.seededrandom import random_places, seeded_random
from autoddl.planfile import PlanFile
from autoddl.staging import planned_model
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.modules import build_module, make_batch

flow: Any = load_oneflow()
SEED, RATE = 3, 0.05


def module_of(path: str) -> Any:
    """A file as a module.

    It communicates in the runtime's thread. Threads of its own would end when the module is garbage collected, which happens at
    another moment on each rank (see `_communication_thread`).
    """
    spec = importlib.util.spec_from_file_location(f"_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    vars(module)["_communication_thread"] = _communication_thread
    return module


def train_both(built_in: BuiltIn, plan: PlanFile, file: str, num_runs: int) -> dict[str, Any]:
    """Some runs of the plan's schedule by the runtime and by the exported file, with the same values and data: of each run the
    losses and the bytes on the wire, and the final values of the stages that are here."""
    module = initialize(build_module(built_in), SEED)
    schedule, size = plan.evaluation.schedule, plan.workload.micro_batch

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = make_batch(built_in, size, np.random.default_rng([5, number]))
        return inputs, targets

    trainer = PipelineTrainer(
        planned_model(module, plan), schedule, lambda weights: flow.optim.SGD(weights, lr=RATE), batch
    )
    exported = module_of(file)
    pipeline = exported.build(SEED, "sgd", RATE)
    meter = Meter()
    found: dict[str, Any] = {"losses": ([], []), "bytes": ([], [])}
    for run in range(num_runs):
        later = functools.partial(_of_run, batch, run * schedule.num_micro_batches)
        meter(lambda: None)  # what was sent since the last step does not count
        report, traffic = meter(trainer.run)
        found["bytes"][0].append(traffic.payload_bytes)
        found["losses"][0].append([report.losses.get(number, 0.0) for number in range(schedule.num_micro_batches)])
        losses, traffic = meter(functools.partial(pipeline.run, later))
        found["bytes"][1].append(traffic.payload_bytes)
        found["losses"][1].append(losses.tolist())
    expected = trainer.parameters()
    values: dict[str, np.ndarray] = {}
    for replica in pipeline.replicas.values():
        values.update(exported.plain_state(replica.module, {}))
    found["names"] = sorted(values.keys() ^ expected.keys())
    found["errors"] = {
        name: float(np.linalg.norm(values[name] - whole) / max(0.1, np.linalg.norm(whole)))
        for name, whole in expected.items()
    }
    found["values"] = values
    return found


def _of_run(batch: Any, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """A micro-batch by its number in a run, of which ``first`` is the first one's."""
    return batch(first + number)


def run_as_script(file: str, arguments: Sequence[str]) -> tuple[str, str]:
    """The file's command on ranks that are there: what it prints, and why it fails."""
    exported, output = module_of(file), io.StringIO()
    with mock.patch("sys.argv", [file, *arguments]), contextlib.redirect_stdout(output):
        try:
            exported.main(exported.arguments())
        except ValueError as error:
            return output.getvalue(), str(error)
    return output.getvalue(), ""


def train_alone(built_in: BuiltIn, plan: PlanFile, num_steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same steps on one device, the first rank: losses and final values."""
    if flow.env.get_rank():
        return [], {}
    module = initialize(build_module(built_in), SEED)
    optimizer, per_step = flow.optim.SGD(module.parameters(), lr=RATE), plan.workload.num_micro_batches
    losses = []
    for step in range(num_steps):
        total = 0.0
        for number in range(step * per_step, (step + 1) * per_step):
            batch = make_batch(built_in, plan.workload.micro_batch, np.random.default_rng([5, number]))
            loss = module(*map(flow.tensor, batch)) / per_step
            loss.backward()
            total += float(loss.numpy())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, {name: value.numpy() for name, value in module.named_parameters()}


def train_users_stages(function: str, plan: PlanFile, file: str) -> dict[str, Any]:
    """A run of a user's model, by the runtime and by the exported file, from the user's own initial values: the losses of each,
    the first steps' mean loss of the plain model, and the largest difference of the final values that are here."""
    exported = module_of(file)
    flow.manual_seed(SEED)  # of the examples; initial values are the first rank's in any case
    plain, examples = exported.plain_model(*function.rsplit(":", 1))
    schedule = plan.evaluation.schedule

    def batch(number: int) -> tuple[np.ndarray, ...]:
        return exported.batch(5, number, examples)

    def drawing(steps: Sequence[int]) -> Any:
        return seeded_random(plain, random_places(plan.graph), steps)

    expected = exported.plain_loss(plain, [batch(number) for number in range(schedule.update_period)], drawing)
    pipeline = exported.build(0, "sgd", RATE, plain)
    trainer = PipelineTrainer(
        planned_model(plain, plan), schedule, lambda weights: flow.optim.SGD(weights, lr=RATE), batch
    )
    losses = pipeline.run(batch)
    report = trainer.run()
    wanted = trainer.parameters()
    values: dict[str, np.ndarray] = {}
    for replica in pipeline.replicas.values():
        values.update(exported.plain_state(replica.module, {}))
    return {
        "losses": losses.tolist(),
        "of_runtime": sum(report.losses.values()) / schedule.num_micro_batches,
        "of_plain": expected,
        "names": sorted(values.keys() ^ wanted.keys()),
        "errors": {name: float(np.abs(values[name] - whole).max()) for name, whole in wanted.items()},
    }
