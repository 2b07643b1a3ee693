"""Layer norm and RMS norm.

On split features the statistics of each row are all-reduced over p1 forward, and as many sums of the gradient backward, in float32.
Forward: one read for the statistics, one read and one write; backward: two reads for the sums, two reads and a write.
"""

from __future__ import annotations

from ..collectives import Collective, Step
from ..layer import Layer, Parameter
from ..localwork import elementwise
from .kind import STATISTIC_BYTES, Body, Frame, LayerKind

__all__ = ["Norm", "norm"]


class Norm(LayerKind):
    """A norm over the features of each row."""

    name = "norm"
    attributes = ("features", "statistics")

    def work(self, frame: Frame, is_first: bool) -> Body:
        statistics = frame.rows * frame.layer.attributes["statistics"] * STATISTIC_BYTES
        steps = tuple(Step(Collective.ALL_REDUCE, axis, statistics) for axis in reversed(frame.strategy.axes(1)))
        return Body(
            forward=steps,
            backward=steps,
            forward_work=elementwise(3 * frame.output_bytes),
            backward_work=elementwise(5 * frame.output_bytes),
            kept_bytes=frame.input_bytes,
        )


def norm(name: str, rows: int, features: int, *, statistics: int = 2, bias: bool | None = None) -> Layer:
    """Layer norm (two statistics per row; weight and bias) or RMS norm (one; weight alone)."""
    bias = statistics == 2 if bias is None else bias
    names = ("weight", "bias") if bias else ("weight",)
    return Layer(
        name=name,
        kind="norm",
        input_shape=(rows, features),
        output_shape=(rows, features),
        attributes={"features": features, "statistics": statistics},
        parameters=tuple(Parameter(f"{name}.{parameter}", (features,)) for parameter in names),
        kept_elements=rows * statistics,
        modules=(name,),
    )
