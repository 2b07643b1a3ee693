"""Opaque layers, of which only the shapes are known.

They are split along the samples only.  The forward pass reads the input and writes the output once; the backward pass takes
twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layer import Layer, Parameter
from ..localwork import elementwise
from .kind import Body, LayerKind, LayerQuantities, Splitting

__all__ = ["Opaque", "opaque"]


class Opaque(LayerKind):
    """A layer of which only the shapes are known."""

    name = "opaque"
    splitting = Splitting.SAMPLES
    is_opaque = True
    colour = "#ead1dc"

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        after, after_backward = quantities.epilogue()
        work = elementwise(quantities.input_bytes + quantities.output_bytes)
        kept = quantities.input_bytes + quantities.kept_bytes
        return Body((), (), work + after, 2 * work + after_backward, kept_bytes=kept)


def opaque(
    name: str,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    *,
    parameters: Sequence[Parameter] = (),
    flops: float = 0.0,
    kept_elements: int = 0,
    modules: Sequence[str] | None = None,
) -> Layer:
    """Make an opaque layer.

    Args:
        name: of the layer.
        input_shape, output_shape: per sample.
        parameters: trained tensors.
        flops: forward FLOPs per sample, for display; they are not priced.
        kept_elements: elements per sample that are kept for the backward pass besides the input.
        modules: the module paths that it stands for; by default its name.
    """
    return Layer(
        name=name,
        kind="opaque",
        input_shape=input_shape,
        output_shape=output_shape,
        parameters=tuple(parameters),
        flops=flops,
        kept_elements=kept_elements,
        modules=(name,) if modules is None else tuple(modules),
    )
