"""What a layer is built from, and what it is given when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy

from .detaching import detached
from .layouts import Layout, layout_of
from .load import load_oneflow
from .stepping import Stepper

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["Batch", "LayerSetting", "checkpoint", "find_module"]

Tensor = Any


@dataclass(frozen=True)
class Batch:
    """One micro-batch of all ranks, the same on every rank.

    Attributes:
        inputs: for each layer that reads the data itself, what it reads (samples in front).
        targets: what the loss compares with; None where the model ends without one.
        num_samples: in all.
        step: counts training passes (dropout draws by it); None outside of training.
    """

    inputs: Mapping[str, np.ndarray]
    targets: np.ndarray | None
    num_samples: int
    step: int | None


@dataclass(frozen=True)
class LayerSetting:
    """A layer at its strategy, on this rank.

    Attributes:
        graph, layer, strategy: what is to be run.
        stepper: the ranks.
        module: the user's model.
        recompute: whether only the evenly split input is kept for the backward pass.
    """

    graph: LayerGraph
    layer: Layer
    strategy: Strategy
    stepper: Stepper
    module: Any
    recompute: bool

    @property
    def is_first(self) -> bool:
        """Whether the layer reads the data itself."""
        return not self.graph.inputs(self.layer.name)

    @property
    def layout(self) -> Layout:
        """How the layer lies on the ranks."""
        return layout_of(self.layer, self.strategy)

    @property
    def num_parts(self) -> int:
        """Into how many blocks the features are cut."""
        return self.strategy.p1 * self.strategy.p2

    def held(self, length: int) -> np.ndarray:
        """This rank's block of ``length`` features."""
        return self.layout.blocks(length)[self.stepper.rank]

    def samples(self, value: np.ndarray, batch: Batch) -> np.ndarray:
        """This rank's samples."""
        return self.layout.samples(value, self.stepper.rank)

    def own_module(self) -> Any:
        """The module that the layer stands for; the first one, where it stands for several."""
        path = self.layer.modules[0] if self.layer.modules else self.layer.name
        found = find_module(self.module, path)
        if found is None:
            raise UserError(f"{self.layer.describe()}: the model has no module {path!r}")
        return found


def find_module(module: Any, path: str) -> Any:
    """The submodule at a path; None where there is none."""
    for part in path.split(".") if path else []:
        module = getattr(module, "_modules", {}).get(part)
        if module is None:
            return None
    return module


def checkpoint(function: Any, *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, of which only the tensors are kept: the backward pass runs it again first."""
    needed = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not needed or not flow.is_grad_enabled():
        return function(*tensors)
    kept = [detached(tensor) for tensor in tensors]

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        return function(*kept)

    def backward(ctx: Any, dy: Tensor) -> Any:
        with flow.enable_grad():
            leaves = [t.detach().requires_grad_(i in needed) for i, t in enumerate(kept)]
            y = function(*leaves)
        gradients = flow.autograd.grad([y], [leaves[i] for i in needed], [dy])
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    return _Function.apply("checkpoint", forward, backward, *(tensors[i] for i in needed))
