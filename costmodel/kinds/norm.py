"""Layer norm and RMS norm.

With split features, the forward pass all-reduces the statistics of each row over p1, and the backward pass as many sums of the
gradient, in the master type. (Megatron-LM splits rows instead, or copies the tensors: then there is nothing to reduce.) The
forward pass reads the input for the statistics, reads it again and writes the output. The backward pass reads two tensors for
the sums, reads them again and writes the gradient.
"""

from __future__ import annotations

from ..collectives import Collective, Step
from ..layer import Layer, Parameter
from ..localwork import elementwise
from .kind import Body, LayerKind, LayerQuantities, independent_rows

__all__ = ["Norm", "norm"]


class Norm(LayerKind):
    """A norm over the features of each row."""

    name = "norm"
    attributes = ("features", "statistics")
    is_between = True
    colour = "#eeeeee"

    def positions(self, layer: Layer) -> int:
        return independent_rows(layer)

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        statistics = quantities.rows * quantities.layer.attributes["statistics"] * quantities.statistic_bytes
        # Only a device without all features of its rows has to exchange statistics.
        axes = quantities.strategy.axes(1) if quantities.workload.activations == "kept" else ()
        steps = tuple(Step(Collective.ALL_REDUCE, axis, statistics) for axis in reversed(axes))
        return Body(
            forward=steps,
            backward=steps,
            forward_work=elementwise(3 * quantities.output_bytes),
            backward_work=elementwise(5 * quantities.output_bytes),
            kept_bytes=quantities.input_bytes,
        )


def norm(name: str, rows: int, features: int, *, statistics: int = 2, bias: bool | None = None) -> Layer:
    """Make a layer norm (``statistics`` = 2 per row) or RMS norm (``statistics`` = 1).

    Args:
        name: of the layer and its module.
        rows, features: shape of a sample.
        statistics: number of statistics per row.
        bias: whether it has a bias besides its weight; by default layer norms have one.
    """
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
