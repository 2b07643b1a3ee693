"""Jobs of `test_replay`: models of the benchmark on ranks, and single operators. Only ranks import this module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.extraction import extract
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.load import load_oneflow

# Ranks load this file by its path, not as a part of a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import zoo_models

flow: Any = load_oneflow()


def compared(names: list[str]) -> dict[str, str]:
    """Compare losses (or outputs) and gradients with those of the plain models, split along the batch; return the differences."""
    differences = {}
    for name in names:
        flow.manual_seed(0)  # the same model and examples on every rank
        differences[name] = _difference(*getattr(zoo_models, name)())
    return differences


def _difference(module: Any, inputs: Any) -> str:
    graph = extract(module, inputs)
    strategy = data_parallel((flow.env.get_world_size(),))
    strategies = {layer.name: strategy for layer in graph.layers}
    workload = Workload(len(inputs[0]), len(inputs[0]), "float32")
    applied = AppliedModule(module, graph, strategies, workload, check=True)
    rng = np.random.default_rng(0)
    try:
        values = applied(*(_shuffled(x.numpy(), rng) for x in inputs))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    values = values if isinstance(values, tuple) else (values,)
    return "" if all(np.isfinite(value.detach().numpy()).all() for value in values) else "not finite"


def _shuffled(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The samples in another order, the same on every rank."""
    return np.ascontiguousarray(x[rng.permutation(len(x))])


# ---- Single operators --------------------------------------------------------------------------------------------------------


class Operator(flow.nn.Module):
    """A function of a parameter times the input, and of integers."""

    def __init__(self, function: Any, shape: tuple[int, ...]):
        super().__init__()
        self.scale = flow.nn.Parameter(flow.rand(*shape[1:]) + 0.5)
        self.function = function

    def forward(self, x: Any, places: Any) -> Any:
        y = self.function(x * self.scale, places)
        return (y * y).mean() if y.ndim else y


def replayed(function: Any, shape: tuple[int, ...]) -> str:
    """Replay the operators of a function on one rank, and return how loss or gradient differ from the function's."""
    module = Operator(function, (1, *shape))
    graph = extract(module, (flow.rand(2, *shape), flow.zeros(2, shape[0], dtype=flow.int64)))
    strategies = {layer.name: data_parallel((1,)) for layer in graph.layers}
    applied = AppliedModule(module, graph, strategies, Workload(4, 4, "float32"), check=True)
    rng = np.random.default_rng(0)
    data = rng.random((4, *shape)).astype(np.float32) + 0.2, rng.integers(0, 6, (4, shape[0]))
    # The first pass compares the two on as few samples as possible; here on all of them.
    applied.train(False)
    module.train(False)
    try:
        loss = applied(*data)
    except UserError as error:
        return str(error)
    expected = module(*map(flow.tensor, data))
    loss.backward()
    expected.backward()
    (gradient,) = applied.logical_gradients().values()
    errors = [
        np.abs(actual - wanted).max() / max(np.abs(wanted).max(), 1e-6)
        for actual, wanted in ((loss.numpy(), expected.numpy()), (gradient, module.scale.grad.numpy()))
    ]
    return "" if max(errors) < 1e-4 else f"off by {max(errors):.1e}"


def refusals(module: Any, examples: Any, batches: list[Any]) -> list[str]:
    """Return the errors that an applied module on one rank has for batches."""
    graph = extract(module, examples)
    strategies = {layer.name: data_parallel((1,)) for layer in graph.layers}
    applied = AppliedModule(module, graph, strategies, Workload(4, 4, "float32"))
    words = []
    for batch in batches:
        try:
            applied(*batch)
        except UserError as error:
            words.append(str(error))
    return words


def main() -> None:
    """Print what differs in each of the operator cases, as one JSON line."""
    import operator_cases

    found = {}
    for table, shape in (("ROWS", (6, 8)), ("IMAGES", (6, 8, 8))):
        for name, function in getattr(operator_cases, table).items():
            found[f"{table} {name}"] = replayed(function, shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
