"""Cross entropy of logits that may be split along the vocabulary.

The forward pass all-gathers the maxima of each row, then all-reduces its sum of exponentials and the logit of its target, in
the master type.  The backward pass is local.  Logits, their probabilities in the master type, and during the backward pass the
gradient of the logits are in memory at the same time: three tensors in single precision (OneFlow: 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from ..collectives import Collective, Step, gather_steps
from ..layer import Layer
from ..localwork import elementwise
from .kind import Body, LayerKind, LayerQuantities, independent_rows

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Loss", "loss"]


class Loss(LayerKind):
    """The cross entropy at the end of a model."""

    name = "loss"
    attributes = ("vocabulary",)
    # Its backward pass follows its forward pass directly, so recomputation would save nothing.
    is_recomputed = False
    is_loss = True
    colour = "#f4cccc"

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        return {"vocabulary": layer.input_shape[-1]}

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        return layer.attributes["vocabulary"] % (strategy.p1 * strategy.p2) == 0

    def positions(self, layer: Layer) -> int:
        return independent_rows(layer)

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        axes = quantities.strategy.axes(1)
        s = prod(axis.size for axis in axes)
        maxima = gather_steps(axes, quantities.rows * s * quantities.statistic_bytes)
        sums = tuple(
            Step(Collective.ALL_REDUCE, axis, quantities.rows * 2 * quantities.statistic_bytes)
            for axis in reversed(axes)
        )
        return Body(
            forward=(*maxima, *sums),
            backward=(),
            forward_work=elementwise(3 * quantities.input_bytes),
            backward_work=elementwise(2 * quantities.input_bytes),
            kept_bytes=quantities.input_bytes
            + quantities.input_bytes * (quantities.statistic_bytes / quantities.itemsize),
            buffer_bytes=quantities.input_bytes,
        )


def loss(name: str, rows: int, vocabulary: int) -> Layer:
    """Make a loss layer, the cross entropy of the logits of ``rows`` rows per sample."""
    return Layer(
        name=name,
        kind="loss",
        input_shape=(rows, vocabulary),
        output_shape=(rows, 1),
        attributes={"vocabulary": vocabulary},
    )
