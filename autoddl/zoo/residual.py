"""The ResNet family (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1).

Modules are named as torchvision's, and blocks of three convolutions have their stride in the 3 x 3 convolution, as there
("ResNet v1.5").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.layer import Layer

from .layers import GraphBuilder, add, batch_norm, batch_norm_note, conv2d, linear, loss, placed, pool

__all__ = ["RESNET_BLOCKS", "resnet"]

#: Number of blocks of the four groups, and of convolutions in a block, by depth.
RESNET_BLOCKS: dict[int, tuple[tuple[int, int, int, int], int]] = {
    18: ((2, 2, 2, 2), 2),
    34: ((3, 4, 6, 3), 2),
    50: ((3, 4, 6, 3), 3),
    101: ((3, 4, 23, 3), 3),
    152: ((3, 8, 36, 3), 3),
}
#: Output channels of a block of three convolutions, divided by those of its others.
EXPANSION = 4


def resnet(
    depth: int, *, image: int = 224, classes: int = 1000, width: int = 64, synchronised: bool = False
) -> LayerGraph:
    """ResNet on square images.

    Args:
        depth: 18, 34, 50, 101 or 152.
        image: pixels along each side.
        classes: number of outputs.
        width: channels of the first convolution.
        synchronised: whether batch norms have the statistics of the samples of all ranks, not of each rank's own.

    Raises:
        UserError: there is no ResNet of that depth, or the images are no multiple of 32 pixels.

    >>> f"{resnet(50).num_parameters:,}"
    '25,557,032'
    """
    if depth not in RESNET_BLOCKS:
        raise UserError(f"resnet{depth} is unknown; there are {', '.join(f'resnet{d}' for d in RESNET_BLOCKS)}")
    if image < 32 or image % 32:
        raise UserError(f"resnet{depth}: images of {image} pixels should be a multiple of 32 wide")
    counts, num_convolutions = RESNET_BLOCKS[depth]
    builder = _Builder(f"resnet{depth}", synchronised, num_convolutions)
    x = builder.stem(image, width)
    for group, count in enumerate(counts):
        for index in range(count):
            place = _Place(f"layer{group + 1}", index, count, has_first=not group and num_convolutions == 2)
            x = builder.block(place, x, width << group, 2 if group and not index else 1)
    channels, side, _ = builder.shape
    x = builder.add(pool("avgpool", builder.shape, kernel_size=side, maximum=False), x)
    x = builder.add(linear("fc", 1, channels, classes), x)
    builder.add(loss("loss", 1, classes), x)
    return builder.build([] if synchronised else [batch_norm_note("batch norms")])


@dataclass(frozen=True)
class _Place:
    """The place of a block in its group.

    The blocks of a group repeat each other, except for a first one that changes the shape of the image.

    Attributes:
        group: path of the group.
        index: index of the block.
        count: number of blocks of the group.
        has_first: whether the first block is like the others.
    """

    group: str
    index: int
    count: int
    has_first: bool

    def placed(self, layer: Layer) -> Layer:
        """A layer of the block, named by its role."""
        first = 0 if self.has_first else 1
        layer = placed(layer, self.group, self.index)
        if self.index < first or self.count - first < 2:
            return replace(layer, block="", block_index=0, role="")
        return replace(layer, block_index=self.index - first)


class _Builder(GraphBuilder):
    """Collects the layers of a ResNet.

    Attributes:
        shape: of the image that the last layer wrote.
    """

    shape: tuple[int, int, int]

    def __init__(self, name: str, synchronised: bool, num_convolutions: int):
        super().__init__(name, "image")
        self._synchronised, self._num_convolutions = synchronised, num_convolutions

    def stem(self, image: int, width: int) -> str:
        """Append the layers before the blocks; returns the last one's name."""
        first = conv2d("conv1", (3, image, image), width, kernel_size=7, stride=2, padding=3, bias=False)
        norm = batch_norm("bn1", first.output_shape, synchronised=self._synchronised, epilogue=("relu",))
        x = self.add(norm, self.add(first))
        layer = pool("maxpool", _image(norm.output_shape), kernel_size=3, stride=2, padding=1)
        self.shape = _image(layer.output_shape)
        return self.add(layer, x)

    def block(self, place: _Place, entry: str, width: int, stride: int) -> str:
        """Append a block that reads the layer ``entry``; returns the last layer's name."""
        convolutions: tuple[tuple[int, int, int], ...]  # (output channels, kernel, stride)
        if self._num_convolutions == 2:
            convolutions = (width, 3, stride), (width, 3, 1)
        else:
            convolutions = (width, 1, 1), (width, 3, stride), (width * EXPANSION, 1, 1)
        x, shape = entry, self.shape
        for number, (channels, kernel, step) in enumerate(convolutions, 1):
            epilogue = () if number == len(convolutions) else ("relu",)
            names = f"conv{number}", f"bn{number}"
            x, shape = self._convolution(place, names, x, shape, channels, kernel, step, epilogue)
        beside = entry
        if stride > 1 or shape != self.shape:
            names = "downsample.0", "downsample.1"
            beside, _ = self._convolution(place, names, entry, self.shape, shape[0], 1, stride, ())
        self.shape = shape
        return self.add(place.placed(add("add", shape, epilogue=("relu",))), x, beside)

    def _convolution(
        self,
        place: _Place,
        names: tuple[str, str],
        entry: str,
        shape: tuple[int, int, int],
        channels: int,
        kernel: int,
        stride: int,
        epilogue: tuple[str, ...],
    ) -> tuple[str, tuple[int, int, int]]:
        """Append a convolution and its batch norm; returns the norm's name and the shape of its output."""
        convolution = conv2d(
            names[0], shape, channels, kernel_size=kernel, stride=stride, padding=kernel // 2, bias=False
        )
        written = _image(convolution.output_shape)
        norm = batch_norm(names[1], written, synchronised=self._synchronised, epilogue=epilogue)
        x = self.add(place.placed(convolution), entry)
        return self.add(place.placed(norm), x), written


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = shape
    return channels, height, width
