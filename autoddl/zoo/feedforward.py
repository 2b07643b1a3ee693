"""Multi-layer perceptrons and the VGG family."""

from __future__ import annotations

from collections.abc import Sequence

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

from .layers import GraphBuilder, conv2d, linear, loss, pool

__all__ = ["VGG_FEATURES", "mlp", "vgg"]

#: Channels of the convolutions, "M" for max pooling (Simonyan and Zisserman 2014, table 1: A, B, D, E).
VGG_FEATURES: dict[int, tuple[int | str, ...]] = {
    11: (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    13: (64, 64, "M", 128, 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    16: (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
    19: (64, 64, "M", 128, 128, "M", *(256,) * 4, "M", *(512,) * 4, "M", *(512,) * 4, "M"),
}


def mlp(widths: Sequence[int]) -> LayerGraph:
    """A perceptron of len(widths) - 1 linear layers without bias, with relu between them and a mean-squared-error loss.

    >>> [layer.name for layer in mlp([64, 32, 16]).layers]
    ['fc1', 'fc2']

    Raises:
        UserError: there are fewer than two widths, or one is not positive.
    """
    if len(widths) < 2:
        raise UserError(f"mlp: widths {list(widths)} should be at least two, those of the input and the output")
    for width in widths:
        if width < 1:
            raise UserError(f"mlp: width {width} should be at least 1")
    builder = GraphBuilder("mlp:" + ",".join(map(str, widths)), "row")
    last = len(widths) - 2
    source: tuple[str, ...] = ()
    for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
        epilogue = ("mse_loss",) if i == last else ("relu",)
        source = (builder.add(linear(f"fc{i + 1}", 1, fan_in, fan_out, bias=False, epilogue=epilogue), *source),)
    return builder.build()


def vgg(depth: int, *, image: int = 224, classes: int = 1000, hidden: int = 4096) -> LayerGraph:
    """VGG without batch norm, on square images; modules are numbered as torchvision's.

    Args:
        depth: 11, 13, 16 or 19.
        image: pixels along each side.
        classes: number of outputs of the last layer.
        hidden: features of the two dense layers before it.

    Raises:
        UserError: there is no VGG of that depth, or the images are too small for its five poolings.
    """
    if depth not in VGG_FEATURES:
        raise UserError(f"vgg{depth} is unknown; there are {', '.join(f'vgg{d}' for d in VGG_FEATURES)}")
    if image < 32:
        raise UserError(f"vgg{depth}: images of {image} pixels are too small, they should be at least 32 wide")
    builder = GraphBuilder(f"vgg{depth}", "image")
    shape = (3, image, image)
    source: tuple[str, ...] = ()
    module = 0
    for entry in VGG_FEATURES[depth]:
        name = f"features.{module}"
        if isinstance(entry, int):
            layer = conv2d(name, shape, entry, kernel_size=3, padding=1, epilogue=("relu",))
            module += 2  # the relu is a module of its own
        else:
            layer = pool(name, shape, kernel_size=2)
            module += 1
        source = (builder.add(layer, *source),)
        shape = (layer.output_shape[0], layer.output_shape[1], layer.output_shape[2])
    flat = shape[0] * shape[1] * shape[2]
    end = builder.chain(
        source[0],
        [
            linear("classifier.0", 1, flat, hidden, epilogue=("relu",)),
            linear("classifier.3", 1, hidden, hidden, epilogue=("relu",)),
            linear("classifier.6", 1, hidden, classes),
        ],
    )
    builder.add(loss("loss", 1, classes), end)
    return builder.build(["dropout is left out: it neither communicates nor computes anything to speak of"])
