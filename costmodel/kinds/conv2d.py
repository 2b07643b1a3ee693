"""Convolutions: products of the windows of an image with a kernel, split like those of linear layers.

The weight has out_channels x in_channels kernels of k x k: p1 splits the output's channels, p2 the input's.  With N images of
H x W pixels in one micro-batch, H' x W' of them in the output, a bytes of an element, and n as in
:mod:`autoddl.costmodel.collectives`:

===========  ================================  =============================  ==================================
phase        step                              axis                           n [bytes]
===========  ================================  =============================  ==================================
forward      all-gather the input's channels   p1                             N H W in_channels a / (P0 P2)
forward      shift the halo's rows             r ranks below each other       rows (W / c) in_channels a / P2
forward      shift the halo's columns          c ranks side by side           columns (H / r + rows) in_channels a / P2
forward      reduce-scatter the output         p2                             N H' W' out_channels a / (P0 P1)
backward     all-gather the output's gradient  p2                             N H' W' out_channels a / (P0 P1)
backward     shift the halo's gradient         the same                       as many
backward     reduce-scatter the input's        p1                             N H W in_channels a / (P0 P2)
once         all-reduce the weight's           p0                             in_channels out_channels k k a / (P1 P2)
===========  ================================  =============================  ==================================

A layer that reads the data itself reads the channels and pixels that it needs.  The *halo* (:mod:`.sharing`) is exchanged once
samples no longer divide over p0, and r c ranks share each image.

The work is a matrix product of (pixels x in_channels k k) by (in_channels k k x out_channels).  The gathered input and the halo are
kept for the backward pass; only recomputation gathers them again.  Kernels are few (those of a ResNet-50 have 24 million elements,
its activations 11 million for each image), so they can be divided up to gradients and states (``zero`` of at most 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..collectives import gather_steps, scatter_steps
from ..layer import Layer, Parameter
from ..sbp import Broadcast, PartialSum, Split
from .epilogue import kept_by_epilogue
from .kind import Body, LayerQuantities, Splitting, States
from .sharing import ImageKind, halo_steps

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Conv2d", "conv2d"]


class Conv2d(ImageKind):
    """A convolution with a square kernel."""

    name = "conv2d"
    attributes = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
    may_be_zero = frozenset({"padding"})
    splitting = Splitting.PRODUCT
    colour = "#cfe3f5"

    def shape_text(self, layer: Layer) -> str:
        attributes = layer.attributes
        kernel = attributes["kernel_size"]
        return f"{attributes['in_channels']} -> {attributes['out_channels']} channels, {kernel}x{kernel}"

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        parts = strategy.p1 * strategy.p2
        return not (layer.attributes["in_channels"] % parts or layer.attributes["out_channels"] % parts)

    @property
    def states(self) -> tuple[States, States, States]:
        return (Split(0), Broadcast(), Split(1)), (Broadcast(), Split(0), Split(1)), (Split(0), Split(1), PartialSum())

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        layer, attributes, strategy = quantities.layer, quantities.layer.attributes, quantities.strategy
        input_bytes = quantities.samples * layer.input_elements * quantities.itemsize / (quantities.p0 * quantities.p2)
        output_bytes = (
            quantities.samples * layer.output_elements * quantities.itemsize / (quantities.p0 * quantities.p1)
        )
        p1, p2 = strategy.axes(1), strategy.axes(2)
        gather = () if is_first else gather_steps(p1, input_bytes)
        steps, halo_bytes = halo_steps(quantities, input_bytes)
        shifts = () if is_first else steps
        taps = attributes["in_channels"] * attributes["kernel_size"] ** 2
        pixels = quantities.samples * layer.output_elements / attributes["out_channels"] / quantities.p0
        product = quantities.matmul(pixels, taps / quantities.p2, attributes["out_channels"] / quantities.p1)
        after, after_backward = quantities.epilogue()
        return Body(
            forward=(*gather, *shifts, *scatter_steps(p2, output_bytes)),
            backward=(*gather_steps(p2, output_bytes), *shifts, *(() if is_first else scatter_steps(p1, input_bytes))),
            forward_work=product + after,
            backward_work=(1 if is_first else 2) * product + after_backward,
            kept_bytes=input_bytes + halo_bytes + quantities.kept_bytes,
            buffer_bytes=(input_bytes if p1 else 0.0) + (output_bytes if p2 else 0.0),
            forward_steps_to_repeat=None if layer.keeps_own else (*gather, *shifts),
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
