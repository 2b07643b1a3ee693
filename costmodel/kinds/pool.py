"""Poolings of images: the largest or the mean element of each window, of every channel by itself.

Channels are split over p1, images over p0; ranks that share an image exchange halos as those of convolutions do (:mod:`.conv2d`).
The forward pass reads the input and writes the output, the backward pass takes twice as long.  Max pooling keeps the place of the
largest element of each window.  The mean of whole images ("global" or adaptive average pooling) is a window of the size of the
image.
"""

from __future__ import annotations

from ..layer import Layer
from ..localwork import elementwise
from .kind import Body, LayerQuantities
from .sharing import ImageKind, halo_steps

__all__ = ["Pool", "pool"]


class Pool(ImageKind):
    """A pooling with square windows."""

    name = "pool"
    attributes = ("kernel_size", "stride", "padding", "maximum")
    may_be_zero = frozenset({"padding", "maximum"})
    colour = "#ffffff"

    def shape_text(self, layer: Layer) -> str:
        word = "largest" if layer.attributes["maximum"] else "mean"
        return f"{word} of {layer.attributes['kernel_size']}x{layer.attributes['kernel_size']}"

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        steps, halo_bytes = halo_steps(quantities, quantities.input_bytes)
        shifts = () if is_first else steps
        work = elementwise(quantities.input_bytes + quantities.output_bytes)
        after, after_backward = quantities.epilogue()
        kept = quantities.input_bytes + halo_bytes + quantities.kept_bytes
        return Body(shifts, shifts, work + after, 2 * work + after_backward, kept_bytes=kept)


def pool(
    name: str,
    input_shape: tuple[int, int, int],
    *,
    kernel_size: int,
    stride: int | None = None,
    padding: int = 0,
    maximum: bool = True,
) -> Layer:
    """Make a pooling layer with square windows.

    Args:
        name: of the layer and its module.
        input_shape: (channels, height, width).
        kernel_size, stride, padding: as of ``nn.MaxPool2d``; the stride is the kernel's size by default.
        maximum: whether it takes the largest element, not the mean.
    """
    channels, *lengths = input_shape
    stride = kernel_size if stride is None else stride
    height, width = ((length + 2 * padding - kernel_size) // stride + 1 for length in lengths)
    return Layer(
        name=name,
        kind="pool",
        input_shape=input_shape,
        output_shape=(channels, height, width),
        attributes={"kernel_size": kernel_size, "stride": stride, "padding": padding, "maximum": int(maximum)},
        kept_elements=channels * height * width if maximum else 0,
        modules=(name,),
    )
