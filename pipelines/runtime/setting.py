"""`LayerSetting`, which a layer is built from, and `Batch`, which it reads when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy

from .comm.layouts import Layout
from .runningstats import RunningStatistics
from .stepping import Stepper

__all__ = ["Batch", "LayerSetting"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of all ranks, which is the same on every rank.

    Attributes:
        inputs: The array that each input layer reads, by layer name; the first dimension is the samples.
        targets: Targets of the loss; None if the model has no loss.
        num_samples: Number of samples of all ranks.
        step: Number of the training pass, which seeds the dropouts; None in evaluation.
        arguments: All arguments of the model, in order: inputs and targets.
    """

    inputs: Mapping[str, np.ndarray]
    targets: np.ndarray | None
    num_samples: int
    step: int | None
    arguments: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class LayerSetting:
    """A layer under its strategy, on this rank.

    Attributes:
        graph: The layer graph.
        layer: The layer.
        strategy: The strategy of the layer.
        stepper: The ranks.
        module: The user's model.
        recompute: Whether only the evenly split input is kept for the backward pass.
        attention: How attention is computed, one of :data:`autoddl.costmodel.workload.ATTENTIONS`.
        is_in_block: Whether the backward pass runs the whole block of the layer again.
        is_mirrored: Whether the positions of all samples of the model are in mirrored order.
        statistics: The running statistics of batch norms with their layouts, by the path of the module; building adds to them.
    """

    graph: LayerGraph
    layer: Layer
    strategy: Strategy
    stepper: Stepper
    module: Any
    recompute: bool
    attention: str
    is_in_block: bool = False
    is_mirrored: bool = False
    statistics: dict[str, tuple[RunningStatistics, Layout]] = field(default_factory=dict)

    @property
    def num_parts(self) -> int:
        """Number of blocks that the features are split into."""
        return self.strategy.p1 * self.strategy.p2
