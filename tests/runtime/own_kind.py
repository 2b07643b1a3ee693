"""A kind of layer that is not in the package, a gated linear unit: for the planner, for ranks, and as a OneFlow module; never
collected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.kind import Body, LayerKind, LayerQuantities
from autoddl.costmodel.kinds.registry import register
from autoddl.costmodel.layer import Layer
from autoddl.costmodel.localwork import elementwise
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime import statements
from autoddl.pipelines.runtime.kinds.registry import register as register_on_ranks
from autoddl.pipelines.runtime.load import is_available, load_oneflow
from autoddl.zoo.layers import GraphBuilder, linear

if is_available():
    flow = load_oneflow()

WIDTHS = 32, 64, 16


class Glu(LayerKind):
    """The even features of each row, times the sigmoid of the odd ones."""

    name = "glu"
    attributes = ("features",)

    def lengths(self, layer: Layer) -> dict[str, int]:
        return {"features": layer.output_shape[-1]}

    def layer_of(self, module: Any, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Layer | None:
        if type(module).__name__ != "GatedUnit":
            return None
        return Layer("", self.name, input_shape, output_shape, {"features": output_shape[-1]})

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        forward, backward = elementwise(3 * quantities.output_bytes), elementwise(5 * quantities.output_bytes)
        return Body((), (), forward, backward, kept_bytes=quantities.input_bytes)


def glu(x: Any) -> Any:
    """Pairs of features stand side by side, so that an even split of them keeps pairs together."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return pairs[..., 0] * flow.sigmoid(pairs[..., 1])


def program(context: statements.LayerContext) -> statements.LayerProgram:
    body = [statements.Call("glu", (statements.X,), computes=True), *statements.epilogue(context)]
    return statements.LayerProgram((), tuple(context.recomputable(("x",), body)))


def known() -> None:
    """Register it."""
    register(Glu())
    register_on_ranks("glu", program, [glu])


def graph() -> LayerGraph:
    """The layers of `Gated`."""
    inputs, hidden, outputs = WIDTHS
    builder = GraphBuilder("gated", "row")
    up = builder.add(linear("up", 1, inputs, 2 * hidden))
    unit = builder.add(Layer("glu", "glu", (1, 2 * hidden), (1, hidden), {"features": hidden}, modules=("glu",)), up)
    builder.add(linear("down", 1, hidden, outputs, epilogue=("mse_loss",)), unit)
    return builder.build()


def gated_module() -> Any:
    """Linear, gated linear unit, linear, and the mean square of a difference."""

    class GatedUnit(flow.nn.Module):
        def forward(self, x: Any) -> Any:
            return glu(x)

    class Gated(flow.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs, hidden, outputs = WIDTHS
            self.up, self.down = flow.nn.Linear(inputs, 2 * hidden), flow.nn.Linear(hidden, outputs)
            self.glu = GatedUnit()

        def forward(self, x: Any, targets: Any) -> Any:
            return flow.nn.functional.mse_loss(self.down(self.glu(self.up(x))), targets)

    return Gated()


def gated() -> Any:
    """The model as users name it, ``own_kind.py:gated``."""
    known()
    return gated_module(), tuple(flow.randn(8, width) for width in (WIDTHS[0], WIDTHS[-1]))


def run_pass(strategies: Mapping[str, Strategy], workload: Workload) -> tuple[float, float, dict[str, float]]:
    """On every rank: the loss of the applied module, of the plain one, and the largest differences of gradients."""
    from autoddl.pipelines.runtime.applied import AppliedModule
    from autoddl.pipelines.runtime.models import initialize

    known()
    module, rng = initialize(gated_module(), 1), np.random.default_rng(7)
    data = [rng.standard_normal((workload.batch, width)).astype(np.float32) for width in (WIDTHS[0], WIDTHS[-1])]
    reference = module(*map(flow.tensor, data))
    reference.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}
    applied = AppliedModule(module, graph(), strategies, workload)
    loss = applied(*data)
    loss.backward()
    found = applied.logical_gradients()
    errors = {name: float(np.abs(found[name] - own).max() / np.abs(own).max()) for name, own in gradients.items()}
    return float(loss.numpy()), float(reference.numpy()), errors
