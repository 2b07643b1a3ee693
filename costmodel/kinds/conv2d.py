"""Convolutions, split along the samples only, without communication.

The work is a matrix product of (pixels x in_channels k k) by (in_channels k k x out_channels) for kernel size k.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layer import Layer, Parameter
from .epilogue import kept_by_epilogue
from .kind import Body, LayerKind, LayerQuantities, Splitting

__all__ = ["Conv2d", "conv2d"]


class Conv2d(LayerKind):
    """A convolution with a square kernel."""

    name = "conv2d"
    attributes = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
    may_be_zero = frozenset({"padding"})
    splitting = Splitting.SAMPLES
    colour = "#cfe3f5"

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        layer, attributes = quantities.layer, quantities.layer.attributes
        taps = attributes["in_channels"] * attributes["kernel_size"] ** 2
        pixels = quantities.samples * layer.output_elements / attributes["out_channels"] / quantities.p0
        product = quantities.matmul(pixels, taps, attributes["out_channels"])
        after, after_backward = quantities.epilogue()
        return Body(
            forward=(),
            backward=(),
            forward_work=product + after,
            backward_work=(1 if is_first else 2) * product + after_backward,
            kept_bytes=quantities.input_bytes + quantities.kept_bytes,
        )


def conv2d(
    name: str,
    input_shape: tuple[int, int, int],
    out_channels: int,
    *,
    kernel_size: int,
    stride: int = 1,
    padding: int = 0,
    bias: bool = True,
    epilogue: Sequence[str] = (),
) -> Layer:
    """Make a convolution layer with a square kernel.

    Args:
        name: of the layer and its module.
        input_shape: (channels, height, width).
        out_channels: number of output channels.
        kernel_size, stride, padding: as of ``nn.Conv2d``.
        bias: whether it has a bias.
        epilogue: element-wise operations that follow.
    """
    in_channels, height, width = input_shape
    spatial = tuple((length + 2 * padding - kernel_size) // stride + 1 for length in (height, width))
    elements = out_channels * spatial[0] * spatial[1]
    parameters = [Parameter(f"{name}.weight", (out_channels, in_channels, kernel_size, kernel_size))]
    if bias:
        parameters.append(Parameter(f"{name}.bias", (out_channels,)))
    return Layer(
        name=name,
        kind="conv2d",
        input_shape=input_shape,
        output_shape=(out_channels, *spatial),
        attributes={
            "in_channels": in_channels,
            "out_channels": out_channels,
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
        },
        parameters=tuple(parameters),
        epilogue=tuple(epilogue),
        flops=2.0 * elements * in_channels * kernel_size**2,
        kept_elements=kept_by_epilogue(epilogue, elements),
        modules=(name,),
    )
