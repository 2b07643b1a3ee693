"""What the ranks do in the tests of mixed precision, with the types that stand in on CPU ranks; run by ranks, never collected."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.devices import CPU
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.backend import Backend, backend_of
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.shards import HeldWeight
from autoddl.pipelines.runtime.stage.model import PlannedModel
from autoddl.pipelines.runtime.updates import step_masters

sys.path.insert(0, str(Path(__file__).parent))  # ranks load this file by its path, not as a part of a package
from stage_plan_jobs import Data, module_of, optimizer

flow = load_oneflow()
MIXED = backend_of("mixed", CPU)


class SameData(Data):
    """The first micro-batch, again and again: then a skipped step changes nothing."""

    def __call__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return super().__call__(0)


def trainer_of(case: Mapping[str, Any], scale: float, backend: Backend = MIXED) -> PipelineTrainer:
    model = PlannedModel(module_of(case), case["graph"], case["stages"])
    make, data = optimizer(*case["optimizer"]), (SameData if case.get("same") else Data)(case)
    return PipelineTrainer(model, case["schedule"], make, data, backend=backend, loss_scale=scale, keep_gradients=True)


def train(case: Mapping[str, Any], scales_before: Sequence[float | None]) -> dict[str, Any]:
    """Train; return the parameters, the losses, the scale after each run, and the number of skipped updates.

    Args:
        case: The model, its plan and its schedule.
        scales_before: Scale of the loss of each run; None: the one that the run before has left.
    """
    trainer = trainer_of(case, scales_before[0])
    losses, scales = [], []
    for scale in scales_before:
        trainer.scaler.scale = scale or trainer.scaler.scale
        losses.append(trainer.run().losses)
        scales.append(trainer.scaler.scale)
    return {
        "parameters": trainer.parameters(),
        "gradients": trainer.gradients(0),
        "losses": losses,
        "scales": scales,
        "skipped": trainer.scaler.num_skipped,
    }


def train_whole(case: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The parameters after an update of the plain module in single precision, in one process."""
    module, data = module_of(case), Data(case)
    parameters = dict(module.named_parameters())
    optimize, num = optimizer(*case["optimizer"])(list(parameters.values())), case["num_micro_batches"]
    for number in range(num):
        inputs, targets = data(number)
        (module(flow.tensor(inputs), flow.tensor(targets)) / num).backward()
    optimize.step()
    return {name: np.array(value.numpy()) for name, value in parameters.items()}


def resumed(case: Mapping[str, Any], scale: float, directory: Path) -> list[dict[str, Any]]:
    """A run, a checkpoint and another run; then the second run again from the checkpoint, by a trainer with another scale."""
    found = []
    for is_first in (True, False):
        trainer = trainer_of(case, scale if is_first else 2.0)
        if is_first:
            trainer.run()
            trainer.save(directory)
        else:
            assert trainer.restore(directory)
        before = trainer.scaler.state()
        trainer.run()
        found.append({"before": before, "after": trainer.scaler.state(), "parameters": trainer.parameters()})
    return found


def state_bytes(case: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of what this rank keeps for its weights: masters, copies to compute with, gradient sums, optimizer states."""
    trainer = trainer_of(case, 1024.0)
    gradients = 0  # accumulated, before they are summed over the ranks
    work = trainer._work

    def size(tensors: Sequence[Any]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def compute(run: Any, x: Any, original: Any = work.compute) -> Any:
        nonlocal gradients
        y = original(run, x)
        sums = (of_update for replica in work.replicas.values() for of_update in replica._gradients.values())
        gradients = max(gradients, sum(map(size, sums)))
        return y

    work.compute = compute
    trainer.run()
    masters = copies = states = 0
    for replica in work.replicas.values():
        (leaves,) = replica._versions.values()
        kept = replica.optimizer.state_dict()["state"]
        for i, (parameter, leaf) in enumerate(zip(replica.parameters, leaves)):
            masters += size([parameter.tensor])
            copies += size([leaf.value if isinstance(leaf, HeldWeight) else leaf])
            states += size(list(kept[i].values()))
            assert not isinstance(leaf, HeldWeight) or leaf.shard.stride() == (0,)  # without memory of its own
    return {"masters": masters, "copies": copies, "gradients": gradients, "states": states}


def types(case: Mapping[str, Any]) -> dict[str, str]:
    """The types of the tensors that meet in a training pass, by what they are."""
    from autoddl.pipelines.runtime import layers, losses, norms

    seen: dict[str, set[str]] = {}

    def note(what: str, tensor: Any) -> Any:
        seen.setdefault(what, set()).add(str(tensor.dtype).rpartition(".")[2])
        return tensor

    trainer = trainer_of(case, 1024.0)
    product, root, logarithm = layers._FUNCTIONS["matmul"], flow.rsqrt, flow.log
    patched = {**layers._FUNCTIONS, "matmul": lambda x, w: note("product", product(note("x", x), note("weight", w)))}
    original, layers._FUNCTIONS = layers._FUNCTIONS, patched
    norms.flow.rsqrt = lambda x: root(note("variance", x))
    losses.flow.log = lambda x: logarithm(note("sum of exponentials", x))
    try:
        trainer = trainer_of(case, 1024.0)
        trainer.run()
    finally:
        layers._FUNCTIONS, norms.flow.rsqrt, losses.flow.log = original, root, logarithm
    (replica,) = trainer._work.replicas.values()
    for parameter in replica.parameters:
        note("master", parameter.tensor)
    for states in replica.optimizer.state_dict()["state"].values():
        if isinstance(states, dict):
            for state in states.values():
                note("optimizer state", state)
    return {what: ", ".join(sorted(names)) for what, names in seen.items()}


# ---- Applied modules ---------------------------------------------------------------------------------------------------


def train_applied(case: Mapping[str, Any], scale: float, steps: int, spoiled: Mapping[int, int]) -> dict[str, Any]:
    """Train by `AppliedModule`.

    Args:
        case: The model, with a plan of one stage.
        scale: Scale of the loss at first.
        steps: Number of steps.
        spoiled: Ranks on which a gradient is made infinite, by step.
    """
    (stage,), rows = case["stages"], case["rows"]
    workload = Workload(rows * case["num_micro_batches"], rows, MIXED_NAME)
    applied = AppliedModule(module_of(case), case["graph"], stage.strategies, workload, backend=MIXED)
    applied.scaler.scale = scale
    optimize = optimizer(*case["optimizer"])(applied.parameters())
    batch = [np.concatenate(arrays) for arrays in zip(*map(Data(case), range(case["num_micro_batches"])))]
    done, losses, values = [], [], []
    for step in range(steps):
        losses.append(applied.train_step(*batch))
        if spoiled.get(step) == flow.env.get_rank():
            next(iter(applied.parameters())).grad.to_local().mul_(float("inf"))
        done.append(applied.step(optimize))
        values.append({name: value.numpy() for name, value in applied.state_dict().items()})
    return {"done": done, "losses": losses, "values": values, "scaler": applied.scaler.state()}


MIXED_NAME = "mixed-cpu"


def steps_in_parts(sizes: Sequence[int], scale: float, num_steps: int) -> float:
    """The largest difference between Adam's masters after steps in parts, and after ordinary ones."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(size) for size in sizes]

    class Parameter:
        def __init__(self, value: np.ndarray) -> None:
            self.tensor = flow.nn.Parameter(flow.tensor(value))

        def set_gradient(self, gradient: Any) -> None:
            self.tensor.grad = gradient

    in_parts, ordinary = ([Parameter(value) for value in values] for _ in range(2))
    optimizers = [flow.optim.Adam([p.tensor for p in group], lr=0.1) for group in (in_parts, ordinary)]
    for _ in range(num_steps):
        gradients = [flow.tensor(rng.standard_normal(size).astype(np.float32)) for size in sizes]
        step_masters(optimizers[0], in_parts, [gradient * scale for gradient in gradients], scale)
        for parameter, gradient in zip(ordinary, gradients):
            parameter.tensor.grad = gradient.to(flow.float64)
        optimizers[1].step()
    return max(float((a.tensor - b.tensor).abs().max().numpy()) for a, b in zip(in_parts, ordinary))
