"""Linear layers, d_in -> d_out: a matrix product (AutoDDL, Section 3).

With T rows of one micro-batch, a bytes of an element, and n as in :mod:`autoddl.costmodel.collectives`:

===========  ================================  =============================  ==========================
phase        step                              axis                           n [bytes]
===========  ================================  =============================  ==========================
forward      all-gather the input              p1                             T d_in a / (P0 P2)
forward      reduce-scatter the output         p2                             T d_out a / (P0 P1)
backward     all-gather the output's gradient  p2                             T d_out a / (P0 P1)
backward     reduce-scatter the input's        p1                             T d_in a / (P0 P2)
once         all-reduce the weight's           p0                             d_in d_out a / (P1 P2)
===========  ================================  =============================  ==========================

The first layer of a model reads its data directly: it gathers no input and computes no gradient for it.  The bias is added to
the evenly split output; its gradient is reduced together with the weight's.  A sample takes 2 rows d_in d_out FLOPs in the forward
pass and twice as many in the backward pass, one product each for the gradients of input and weight.

**Summa**, mesh r x c: each of the three products O = I W, dI = dO W', dW = I' dO communicates two operands along rows or
columns, in rank-k steps with the total volume of an all-gather or reduce-scatter.  Weights are communicated for every
micro-batch.

**FP8.**  The factors of the products are rounded to 8 bits: the input in the forward pass, the output's gradient in the
backward pass. The rounded input is kept for the backward pass, in place of the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..collectives import gather_steps, scatter_steps
from ..layer import Layer, Parameter
from ..localwork import LocalWork, elementwise
from ..sbp import Broadcast, PartialSum, Split
from .epilogue import GATES, kept_by_epilogue
from .kind import Body, LayerKind, LayerQuantities, Number, Splitting, States, independent_rows

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Linear", "linear", "output_width"]


def output_width(layer: Layer, weight: Parameter) -> int:
    """Return the number of output features of one of a linear layer's weights, (out, in) or, if it is transposed, (in, out)."""
    return weight.shape[1 if layer.attributes.get("transposed") else 0]


class Linear(LayerKind):
    """A matrix product with a weight."""

    name = "linear"
    attributes = ("in_features", "out_features")
    optional_attributes = frozenset({"transposed"})
    splitting = Splitting.PRODUCT
    has_summa = True
    gathers_inputs = True
    gathers_weights = True
    reads_weights_again = True
    follows_groups = True
    colour = "#cfe3f5"

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        return {"in_features": layer.input_shape[-1]}

    def shape_text(self, layer: Layer) -> str:
        return f"{layer.attributes['in_features']} -> {layer.attributes['out_features']}"

    def shares_weights_with(self, other: LayerKind) -> bool:
        return other.name in ("linear", "embedding")

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        s = strategy.p1 * strategy.p2
        attributes = layer.attributes
        return not (attributes["in_features"] % s or attributes["out_features"] % s or layer.features % s)

    def offers_summa(self, layer: Layer, strategy: Strategy) -> bool:
        return layer.attributes["in_features"] % strategy.p0 == 0

    @property
    def states(self) -> tuple[States, States, States]:
        return (Split(0), Broadcast(), Split(1)), (Broadcast(), Split(1), Split(0)), (Split(0), Split(1), PartialSum())

    def positions(self, layer: Layer) -> int:
        return independent_rows(layer)

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        return _summa(quantities, is_first) if quantities.strategy.summa else _product(quantities, is_first)


def _product(quantities: LayerQuantities, is_first: bool) -> Body:
    attributes, strategy = quantities.layer.attributes, quantities.strategy
    d_in, d_out = attributes["in_features"], attributes["out_features"]
    input_bytes = quantities.rows * d_in * quantities.itemsize / quantities.p2
    output_bytes = quantities.rows * d_out * quantities.itemsize / quantities.p1
    p1, p2 = strategy.axes(1), strategy.axes(2)
    gather = () if is_first else gather_steps(p1, input_bytes)
    scatter = scatter_steps(p2, output_bytes)
    gather_gradient = gather_steps(p2, output_bytes)
    scatter_gradient = () if is_first else scatter_steps(p1, input_bytes)
    product = quantities.matmul(quantities.rows, d_in / quantities.p2, d_out / quantities.p1)
    after, after_backward = quantities.epilogue()
    gathers_again = quantities.regathers and bool(gather)
    # Copied activations behind the product are split as its output features are.
    is_copied = quantities.workload.activations == "copied"
    kept_bytes = quantities.kept_bytes * quantities.p2 if is_copied else quantities.kept_bytes
    return Body(
        forward=(*gather, *scatter),
        backward=(*(gather if gathers_again else ()), *gather_gradient, *scatter_gradient),
        forward_work=product + _rounding(quantities, input_bytes) + after,
        backward_work=(1 if is_first else 2) * product + _rounding(quantities, output_bytes) + after_backward,
        # The gathered input is kept, unless the backward pass gathers it again.
        kept_bytes=(input_bytes / quantities.p1 if gathers_again else input_bytes) * _kept_part(quantities)
        + kept_bytes,
        buffer_bytes=(input_bytes if p1 else 0.0) + (output_bytes if p2 else 0.0),
        # The backward pass needs the product itself only if the epilogue keeps it.
        forward_steps_to_repeat=None if quantities.layer.keeps_own else gather,
    )


def _rounds(quantities: LayerQuantities) -> bool:
    """Whether the factors of products are rounded to 8 bits."""
    return quantities.workload.types.rate == "fp8"


def _kept_part(quantities: LayerQuantities) -> float:
    """The part of an input that is kept for the backward pass: the factor as it was rounded."""
    return 1 / quantities.itemsize if _rounds(quantities) else 1.0


def _rounding(quantities: LayerQuantities, nbytes: Number) -> LocalWork:
    """The work of rounding a factor of ``nbytes``: it is read, and written twice, as it is and transposed."""
    return elementwise(nbytes * (1 + 2 / quantities.itemsize)) if _rounds(quantities) else LocalWork()


def _summa(quantities: LayerQuantities, is_first: bool) -> Body:
    attributes, strategy = quantities.layer.attributes, quantities.strategy
    d_in, d_out = attributes["in_features"], attributes["out_features"]
    rows, columns = strategy.axes(0), strategy.axes(1)
    c = quantities.p1
    input_bytes = quantities.rows * d_in * quantities.itemsize
    output_bytes = quantities.rows * d_out * quantities.itemsize
    weight_bytes = d_in * d_out * quantities.itemsize / c
    gather_input, gather_weight = gather_steps(columns, input_bytes), gather_steps(rows, weight_bytes)
    product = quantities.matmul(quantities.rows, d_in, d_out / c)
    after, after_backward = quantities.epilogue()
    for_input = () if is_first else (*gather_weight, *scatter_steps(columns, input_bytes))
    return Body(
        forward=(*gather_input, *gather_weight),
        backward=(*for_input, *gather_input, *scatter_steps(rows, weight_bytes)),
        forward_work=product + after,
        backward_work=(1 if is_first else 2) * product + after_backward,
        kept_bytes=quantities.input_bytes + quantities.kept_bytes,
        # One step holds panels of the operands: 1 / max(r, c) of input and weight.
        buffer_bytes=input_bytes / strategy.panels + weight_bytes / strategy.panels + output_bytes / c,
        forward_steps_to_repeat=None if quantities.layer.keeps_own else (),
    )


def _dense_parameters(
    parts: Sequence[tuple[str, int]], in_features: int, bias: bool, tied_to: str | None
) -> tuple[Parameter, ...]:
    parameters = []
    for module, width in parts:
        parameters.append(Parameter(f"{module}.weight", (width, in_features), tied_to))
        if bias:
            parameters.append(Parameter(f"{module}.bias", (width,)))
    return tuple(parameters)


def linear(
    name: str,
    rows: int,
    in_features: int,
    out_features: int,
    *,
    bias: bool = True,
    epilogue: Sequence[str] = (),
    parts: Sequence[tuple[str, int]] | None = None,
    tied_to: str | None = None,
) -> Layer:
    """Make a linear layer; with a gated epilogue such as ("silu", "mul") its output is half as wide as the product.

    Args:
        name: of the layer, and of the module unless ``parts`` are given.
        rows: rows per sample.
        in_features, out_features: of the product.
        bias: whether it has a bias (each part has one, if ``parts`` are given).
        epilogue: element-wise operations that follow.
        parts: (module, its out_features) of fused modules, in the order of their features.
        tied_to: name of the layer whose weight this one shares.
    """
    parts = ((name, out_features),) if parts is None else tuple(parts)
    width = out_features // 2 if GATES & set(epilogue) else out_features
    return Layer(
        name=name,
        kind="linear",
        input_shape=(rows, in_features),
        output_shape=(rows, width),
        attributes={"in_features": in_features, "out_features": out_features},
        parameters=_dense_parameters(parts, in_features, bias, tied_to),
        epilogue=tuple(epilogue),
        flops=2.0 * rows * in_features * out_features,
        kept_elements=kept_by_epilogue(epilogue, rows * width),
        modules=tuple(module for module, _ in parts),
    )
