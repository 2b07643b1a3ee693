"""What a rank does in the tests of the functions of layers and of optimizers; run by ranks, never collected."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.pipelines.runtime import layers
from autoddl.pipelines.runtime.backend import Backend, backend_of, type_name
from autoddl.pipelines.runtime.comm.layouts import Layout
from autoddl.pipelines.runtime.dropouts import Dropout
from autoddl.pipelines.runtime.facts import OwnModule
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.replay import functions as replayed
from autoddl.pipelines.runtime.runningstats import RunningStatistics
from autoddl.pipelines.runtime.statements import EPILOGUES
from autoddl.pipelines.runtime.stepping import Ranks
from autoddl.pipelines.runtime.updates import are_finite, step_masters

sys.path.insert(0, str(Path(__file__).parent))  # ranks load this file by its path, not as a part of a package
from references import GOALS, IMAGES, ROWS, SAMPLES, TARGETS, TOKENS, VOCABULARY, draw

flow = load_oneflow()
Tensor = Any
_ALONE = Layout((1, 1, 1))


def _linear(backend: Backend) -> OwnModule:
    """A user's module, whose weight is given with each call."""
    return OwnModule(flow.nn.Linear(16, 20, bias=False), ["weight"])


def _calls(ranks: Ranks) -> Mapping[str, Callable[..., Tensor]]:
    """The cases of `references` as layers call them, by name."""
    backend, of = ranks.backend, layers._FUNCTIONS
    goals = backend.tensor(GOALS)

    def norm(centred: bool) -> Callable[..., Tensor]:
        return lambda x, weight, bias=None: of["normalise"](x, weight, bias, x.shape[-1], centred, 1e-5, (), ranks)

    def attend_changed(x: Tensor, biases: Tensor) -> Tensor:
        """Factors, biases of the heads, and the later positions hidden."""
        two, half = (backend.tensor(np.full((1,) * 5, number), backend.compute) for number in (2.0, 0.5))
        is_later = backend.tensor(~np.tri(ROWS, dtype=bool)[None, None, None])
        is_earlier = backend.tensor(np.tri(ROWS, dtype=bool)[None, None, None])
        changes = [
            ("multiply", two, 0.0),
            ("add", biases / 2, 0.0),
            ("subtract", -biases / 2, 0.0),
            ("multiply", half, 0.0),
        ]
        changes += [("fill", is_later, -1e4), ("keep", is_earlier, -1e4)]
        return of["attend_changed"](x, ranks, 2, 2, 4, changes, theta=100.0)

    def gate(x: Tensor) -> Tensor:
        return flow.cat(list(of["split_gate"](x)), dim=-1)

    return {
        **{name: of[name] for name in ("add", "multiply", "matmul", "elu", "tanh_gelu", "quick_gelu")},
        "summa_product": lambda x, w: of["summa_product"](x, w, (), (), ranks, False),
        "run_module": lambda x, w: of["run_module"](_linear(backend), [x], [x.shape[1:]], [w], True),
        "attend": lambda x: of["attend"](x, ranks, 2, 2, 4, False),
        "attend, causal and rotary": lambda x: of["attend"](x, ranks, 2, 2, 4, True, 100.0),
        "attend, neighbours turned": lambda x: of["attend"](
            x, ranks, 2, 2, 4, True, 100.0, turned=2, is_of_neighbours=True
        ),
        "attend, fused in two blocks": lambda x: of["attend"](x, ranks, 2, 2, 4, True, is_fused=True),
        "attend_changed": attend_changed,
        "own_heads": lambda x: of["own_heads"](x, [1, 1, 4, 3, 5], _ALONE, 4, ranks),
        "among_zeros": lambda table: of["among_zeros"](table, _ALONE, 4, ranks),
        "normalise": norm(True),
        "normalise, not centred": norm(False),
        "cross_entropy": lambda x: of["cross_entropy"](x, TARGETS, _ALONE, ranks, ROWS),
        "mean_error": lambda x: of["mean_error"](x, goals, ranks, True),
        "mean_error, absolute": lambda x: of["mean_error"](x, goals, ranks, False),
        "lookup": lambda table: of["lookup"](TOKENS, table, _ALONE, ranks, VOCABULARY, ROWS),
        "positions": lambda table: of["positions"](table, SAMPLES, _ALONE, ranks, ROWS),
        "convolve": lambda x, w, b: of["convolve"](x, 5, w, b, {"padding": 1}),
        "add_to_channels": of["add_to_channels"],
        "pool_windows": lambda x: of["pool_windows"](x, (2, 5), 2, 1, 0, True),
        "pool_windows, means": lambda x: of["pool_windows"](x, (2, 5), 3, 2, 1, False),
        "normalise_batch": lambda x, w, b: of["normalise_batch"](x, w, b, RunningStatistics(2), _ALONE, ranks, True),
        "normalise_batch, synchronised": lambda x: of["normalise_batch"](
            x, None, None, RunningStatistics(2), _ALONE, ranks, True, True
        ),
        "image_data": lambda: of["image_data"](IMAGES, _ALONE, ranks),
        "concat_grouped": lambda *parts: of["concat_grouped"](parts, (2, 1, 1)),
        "concat_heads": lambda *parts: of["concat_heads"](parts, 2),
        "split_gate": gate,
        "data": lambda: of["data"](GOALS, _ALONE, ranks, ROWS),
        **{name: _epilogue(name) for name in EPILOGUES.values() if "." in name},
    }


def _epilogue(name: str) -> Callable[..., Tensor]:
    owner, _, attribute = name.partition(".")
    return getattr({"flow": flow, "functional": flow.nn.functional}[owner], attribute)  # type: ignore[no-any-return]


def to_array(x: Tensor) -> np.ndarray:
    """The values of a tensor of any type in double precision. numpy has no bfloat16."""
    return np.array(x.detach().to(flow.float32 if x.dtype in (flow.float16, flow.bfloat16) else x.dtype).numpy(), float)


def evaluate(name: str, precision: str, device: str) -> dict[str, Any]:
    """A function forward and backward: its inputs as the compute type holds them, its output, and its gradients.

    Args:
        name: of a case of `references`.
        precision, device: where and in which types.
    """
    ranks = Ranks(1, backend_of(precision, device))
    leaves = [ranks.backend.tensor(x, ranks.backend.compute).requires_grad_(True) for x in draw(name)]
    y = _calls(ranks)[name](*[leaf * 1 for leaf in leaves])
    found = {"inputs": [to_array(leaf) for leaf in leaves], "output": to_array(y), "type": type_name(y.dtype)}
    if leaves:
        weights = ranks.backend.tensor(np.random.default_rng(5).standard_normal(tuple(y.shape)), y.dtype)
        y.backward(weights)
        found["weights"] = to_array(weights)
        found["gradients"] = [to_array(leaf.grad) for leaf in leaves]
        found["gradient types"] = sorted({type_name(leaf.grad.dtype) for leaf in leaves})
    return found


def untested() -> tuple[list[str], list[str]]:
    """Functions of layers without a case, and cases without a function; those of replayed programs are left out."""
    from references import CASES

    names = {name.partition(",")[0] for name in CASES}
    functions = {*layers._FUNCTIONS, *(name for name in EPILOGUES.values() if name)} - {*replayed.__all__}
    return sorted(functions - names), sorted(names - functions)


def drop(probability: float, precision: str, device: str) -> dict[str, Any]:
    """Two passes of a dropout with the same step, one with the next step, and the gradient of the first; by both functions."""
    ranks = Ranks(1, backend_of(precision, device))
    x = ranks.backend.tensor(np.full((64, 64), 2.0), ranks.backend.compute).requires_grad_(True)
    dropout, of, layout = Dropout(probability, "h.0"), layers._FUNCTIONS, Layout((1, 1, 1))
    places = np.arange(64)

    def apply(x: Tensor, step: int | None) -> Tensor:
        return of["apply_dropout"](x, dropout, step, ranks, layout, 64, (64,))

    first = apply(x * 1, 1)
    first.backward(flow.ones_like(first))
    return {
        "first": to_array(first),
        "again": to_array(of["bind_dropout"](dropout, 1, ranks, layout, 1, 64, 1)(x.detach(), places, places)),
        "next": to_array(apply(x.detach(), 2)),
        "evaluation": to_array(apply(x.detach(), None)),
        "gradient": to_array(x.grad),
    }


class _Master:
    """A weight of the master type."""

    def __init__(self, value: Tensor) -> None:
        self.tensor = flow.nn.Parameter(value)

    def set_gradient(self, gradient: Tensor | None) -> None:
        self.tensor.grad = gradient


def optimize(
    name: str, options: Mapping[str, Any], values: Sequence[np.ndarray], gradients: Sequence, scale: float, kind: tuple
) -> dict[str, Any]:
    """Steps of an optimizer on masters.

    Args:
        name, options: of the optimizer.
        values: of the weights before.
        gradients: of each step, for each weight.
        scale: of the gradients.
        kind: precision and device.
    """
    backend = backend_of(*kind)
    masters = [_Master(backend.tensor(value, backend.master)) for value in values]
    optimizer = getattr(flow.optim, name)([master.tensor for master in masters], **options)
    given = []
    for of_step in gradients:
        scaled = [backend.tensor(gradient * scale, backend.compute) for gradient in of_step]
        given.append([to_array(gradient) / scale for gradient in scaled])
        step_masters(optimizer, masters, scaled, scale)
    return {
        "values": [to_array(master.tensor) for master in masters],
        "types": sorted({type_name(master.tensor.dtype) for master in masters}),
        "gradients": given,
    }


def finite(rows: Sequence[Sequence[float]], precision: str, device: str) -> list[bool]:
    """Whether vectors of the compute type are found to be finite, each beside a finite one and a missing one."""
    backend = backend_of(precision, device)
    good = backend.tensor([1.0], backend.compute)
    return [are_finite([good, None, backend.tensor(list(row), backend.compute)]) for row in rows]
