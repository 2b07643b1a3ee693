"""Cross entropy of logits that may be split along the vocabulary.

Forward, each row's maxima are all-gathered, then its sum of exponentials and its target's logit are all-reduced, in float32.
Backward is local: the probabilities take the place of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from ..collectives import Collective, Step, gather_steps
from ..layer import Layer
from ..localwork import elementwise
from .kind import STATISTIC_BYTES, Body, Frame, LayerKind

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Loss", "loss"]


class Loss(LayerKind):
    """The cross entropy at the end of a model."""

    name = "loss"
    attributes = ("vocabulary",)
    # It is the last thing that runs forward and the first that runs backward: nothing is gained by running it again.
    is_recomputed = False

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        return {"vocabulary": layer.input_shape[-1]}

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        return layer.attributes["vocabulary"] % (strategy.p1 * strategy.p2) == 0

    def work(self, frame: Frame, is_first: bool) -> Body:
        axes = frame.strategy.axes(1)
        s = prod(axis.size for axis in axes)
        maxima = gather_steps(axes, frame.rows * s * STATISTIC_BYTES)
        sums = tuple(Step(Collective.ALL_REDUCE, axis, frame.rows * 2 * STATISTIC_BYTES) for axis in reversed(axes))
        return Body(
            forward=(*maxima, *sums),
            backward=(),
            forward_work=elementwise(3 * frame.input_bytes),
            backward_work=elementwise(2 * frame.input_bytes),
            kept_bytes=frame.input_bytes,
        )


def loss(name: str, rows: int, vocabulary: int) -> Layer:
    """Cross entropy of each row's logits."""
    return Layer(
        name=name,
        kind="loss",
        input_shape=(rows, vocabulary),
        output_shape=(rows, 1),
        attributes={"vocabulary": vocabulary},
    )
