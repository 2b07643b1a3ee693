"""What the ranks do in the tests of exported files; run by ranks, never collected."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.backend import HOST
from autoddl.pipelines.runtime.comm.handshake import Handshake
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import initialize
from autoddl.pipelines.runtime.ranks.wire import Meter
from autoddl.verification.rank_job import relative_errors
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.modules import build_module, make_batch

flow = load_oneflow()
SEED = 3
NUM_STEPS = 2  # what the first one leaves behind, an optimizer's moments, say, is used in the second


def module_of_file(path: str) -> Any:
    """The exported file as a module."""
    spec = importlib.util.spec_from_file_location("_exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def train_both(
    built_in: BuiltIn,
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    file: str,
    counts_bytes: bool,
) -> dict[str, Any]:
    """Some steps of the applied plan and of the exported file, with the same values and data."""
    plain = initialize(build_module(built_in), SEED)
    exported = module_of_file(file)
    batches = [make_batch(built_in, workload.batch, np.random.default_rng([5, step])) for step in range(NUM_STEPS)]
    for batch in batches:
        if batch[1].ndim == 2 and batch[1].dtype == np.int64:
            batch[1][:, 0] = -100  # targets that do not count
    backend = replace(HOST, handshake=Handshake(**vars(exported.BACKEND.handshake)))
    applied = AppliedModule(plain, graph, strategies, workload, backend=backend)
    return _compared(applied, exported, exported.build(seed=SEED), plain, batches, workload, counts_bytes)


def train_users(
    function: str,
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    file: str,
    counts_bytes: bool,
) -> dict[str, Any]:
    """The same for a user's model."""
    exported = module_of_file(file)
    flow.manual_seed(SEED)
    plain, examples = exported.plain_model(*function.rsplit(":", 1))
    batches = [
        tuple(exported.like(example, workload.batch, np.random.default_rng([5, step])) for example in examples)
        for step in range(NUM_STEPS)
    ]
    applied = AppliedModule(plain, graph, strategies, workload)
    model = exported.build(plain=plain)
    exported.check_against_plain(model, plain, [part[: workload.micro_batch] for part in batches[0]])
    return _compared(applied, exported, model, plain, batches, workload, counts_bytes)


def check_users(function: str, other: str, file: str) -> list[str | None]:
    """What the file says of the model that it was made for, and of another one with the same layers."""
    exported = module_of_file(file)
    said: list[str | None] = []
    for which in (function, other):
        flow.manual_seed(SEED)
        plain, examples = exported.plain_model(*which.rsplit(":", 1))
        model = exported.build(plain=plain)
        samples = [exported.like(example, exported.MICRO_BATCH, np.random.default_rng(0)) for example in examples]
        try:
            said.append(exported.check_against_plain(model, plain, samples))
        except ValueError as error:
            said.append(str(error))
    return said


def _compared(
    applied: Any, exported: Any, model: Any, plain: Any, batches: Any, workload: Workload, counts_bytes: bool
) -> dict[str, Any]:
    """Losses and bytes of each step (applied, exported), initial and final values."""
    initial = exported.plain_state(model, exported.ALIASES)
    reference = {name: tensor.numpy() for name, tensor in plain.state_dict().items()}
    found: dict[str, Any] = {
        "losses": ([], []),
        "bytes": ([], []),
        "initial": all(np.array_equal(value, reference[name]) for name, value in initial.items()),
        "names": sorted((initial.keys() - exported.ALIASES.keys()) ^ dict(plain.named_parameters()).keys()),
    }
    optimizers = [
        _optimizer(workload, applied.parameters()),
        _optimizer(workload, [stored.tensor for stored in exported.all_parameters(model)]),
    ]
    meter = Meter() if counts_bytes else None
    for inputs, targets in batches:
        if meter is not None:
            meter(lambda: None)  # what was sent since the last step does not count

        def run_applied(inputs: Any = inputs, targets: Any = targets) -> float:
            return applied.train_step(inputs, targets)

        def run_exported(inputs: Any = inputs, targets: Any = targets) -> float:
            parts = [slice(i, i + exported.MICRO_BATCH) for i in range(0, workload.batch, exported.MICRO_BATCH)]
            assert len(parts) == exported.NUM_MICRO_BATCHES
            return exported.train_step(model, [(inputs[part], targets[part]) for part in parts])

        for i, run in enumerate((run_applied, run_exported)):
            loss, traffic = (run(), None) if meter is None else meter(run)
            found["losses"][i].append(loss)
            if traffic is not None:
                found["bytes"][i].append(traffic.payload_bytes)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)  # adding to zeros sends bytes
    finals = {name: tensor.numpy() for name, tensor in applied.state_dict().items() if name in initial}
    found["finals"] = relative_errors(exported.plain_state(model, exported.ALIASES), finals)
    return found


def _optimizer(workload: Workload, parameters: Any) -> Any:
    if workload.optimizer == "adam":
        return flow.optim.Adam(parameters, lr=1e-3, eps=1e-3)
    return flow.optim.SGD(parameters, lr=0.05)


def load_state(file: str, seed: int) -> dict[str, Any]:
    """A model that takes the values of a plain one's state_dict, and gives them back; what it says of others."""
    exported = module_of_file(file)
    model = exported.build(seed=seed)
    state = {name: value + 1.0 for name, value in exported.plain_state(model, exported.ALIASES).items()}
    exported.load_plain_state(model, {name: flow.tensor(value) for name, value in state.items()})
    back = exported.plain_state(model, exported.ALIASES)
    first = next(iter(state))
    return {
        "same": all(np.array_equal(back[name], state[name]) for name in state),
        "lacks": _message(lambda: exported.load_plain_state(model, {n: v for n, v in state.items() if n != first})),
        "shape": _message(lambda: exported.load_plain_state(model, {**state, first: np.zeros((3, 3), np.float32)})),
        "first": first,
    }


def _message(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")
