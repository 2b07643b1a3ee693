"""Opaque layers, of which only the shapes and the FLOPs of their products are known.

They are split along the samples only.  The forward pass reads the input and writes the output once, and its products take
``flops / p0`` FLOPs per sample of the micro-batch; the backward pass takes twice as long, as that of a linear layer: one product
each for the gradients of input and weight.

The FLOPs are those of several kernels if the layer is a loop: an LSTM of S time steps, i input features and h hidden ones computes
two products per time step, (1 x i)(i x 4h) and (1 x h)(h x 4h) for one sample.  So it has 2 S products of 2 S 4h (i + h) FLOPs in
total.  Small products reach a smaller part of the peak FLOP/s than large ones (:mod:`autoddl.costmodel.cluster`), which is why
their number counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layer import Layer, Parameter
from ..localwork import LocalWork
from .kind import Body, LayerKind, LayerQuantities, Splitting

__all__ = ["Opaque", "opaque"]


class Opaque(LayerKind):
    """A layer of which only the shapes and the FLOPs are known."""

    name = "opaque"
    optional_attributes = frozenset({"products"})
    splitting = Splitting.SAMPLES
    is_opaque = True
    colour = "#ead1dc"

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        layer = quantities.layer
        after, after_backward = quantities.epilogue()
        products = layer.attributes.get("products", 1) if layer.flops else 0
        work = LocalWork(
            launches=max(products, 1),
            flops=quantities.samples * layer.flops / quantities.p0,
            nbytes=quantities.input_bytes + quantities.output_bytes,
            products=products,
        )
        kept = quantities.input_bytes + quantities.kept_bytes
        return Body((), (), work + after, 2 * work + after_backward, kept_bytes=kept)


def opaque(
    name: str,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    *,
    parameters: Sequence[Parameter] = (),
    flops: float = 0.0,
    products: int = 0,
    kept_elements: int = 0,
    modules: Sequence[str] | None = None,
) -> Layer:
    """Make an opaque layer.

    Args:
        name: of the layer.
        input_shape, output_shape: per sample.
        parameters: trained tensors.
        flops: forward FLOPs per sample, of matrix products.
        products: number of kernels in the forward pass that compute them; 0: one, or none if there are no FLOPs.
        kept_elements: elements per sample that are kept for the backward pass besides the input.
        modules: the module paths that it stands for; by default its name.
    """
    return Layer(
        name=name,
        kind="opaque",
        input_shape=input_shape,
        output_shape=output_shape,
        attributes={"products": products} if products else {},
        parameters=tuple(parameters),
        flops=flops,
        kept_elements=kept_elements,
        modules=(name,) if modules is None else tuple(modules),
    )
