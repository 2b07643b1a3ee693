"""Element-wise sums, as in residual connections: two reads and one write in each pass, no communication.

The backward pass adds up the gradients from all consumers of an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..layer import Layer
from ..localwork import elementwise
from .epilogue import kept_by_epilogue
from .kind import Body, LayerQuantities
from .sharing import ImageKind

__all__ = ["Add", "add"]


class Add(ImageKind):
    """The element-wise sum of its inputs."""

    name = "add"
    is_between = True
    colour = "#ffffff"

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        after, after_backward = quantities.epilogue()
        work = elementwise(3 * quantities.output_bytes)
        return Body((), (), work + after, work + after_backward, kept_bytes=quantities.kept_bytes)


def add(name: str, shape: tuple[int, ...], *, epilogue: Sequence[str] = ()) -> Layer:
    """Make a layer that returns the element-wise sum of two or more tensors of one shape.

    Args:
        name: of the layer.
        shape: of a sample.
        epilogue: element-wise operations that follow.
    """
    kept = kept_by_epilogue(epilogue, prod(shape))
    return Layer(
        name=name, kind="add", input_shape=shape, output_shape=shape, epilogue=tuple(epilogue), kept_elements=kept
    )
