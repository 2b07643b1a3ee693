"""What a layer is built from, and what it is given when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy

from .stepping import Stepper

__all__ = ["Batch", "LayerSetting"]


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
    def num_parts(self) -> int:
        """Into how many blocks the features are cut."""
        return self.strategy.p1 * self.strategy.p2
