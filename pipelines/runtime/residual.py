"""ResNet as a plain OneFlow module; see :mod:`.models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .load import load_oneflow

flow = load_oneflow()
nn: Any = flow.nn
functional: Any = flow.nn.functional

__all__ = ["ResNet"]

#: Output channels of a block of three convolutions, divided by those of its others.
_EXPANSION = 4


class Block(nn.Module):
    """Convolutions with batch norms, added to the input."""

    def __init__(self, entry: int, width: int, num_convolutions: int, stride: int, norm: Any):
        super().__init__()
        if num_convolutions == 2:
            sizes = (width, 3, stride), (width, 3, 1)
        else:
            sizes = (width, 1, 1), (width, 3, stride), (width * _EXPANSION, 1, 1)  # type: ignore[assignment]
        channels, self.num_convolutions = entry, num_convolutions
        for number, (out, kernel, step) in enumerate(sizes, 1):
            convolution = nn.Conv2d(channels, out, kernel, stride=step, padding=kernel // 2, bias=False)
            setattr(self, f"conv{number}", convolution)
            setattr(self, f"bn{number}", norm(out))
            channels = out
        self.downsample = None
        if stride > 1 or entry != channels:
            self.downsample = nn.Sequential(nn.Conv2d(entry, channels, 1, stride=stride, bias=False), norm(channels))

    def forward(self, x: Any) -> Any:
        y = x
        for number in range(1, self.num_convolutions + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            y = functional.relu(y) if number < self.num_convolutions else y
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """ResNet, with the names of torchvision's modules.

    Args:
        blocks: Number of blocks of each of the four groups.
        num_convolutions: Number of convolutions of a block, 2 or 3.
        classes: Number of outputs.
        width: Channels of the first convolution.
        synchronised: Whether batch norms have the statistics of the samples of all ranks.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        num_convolutions: int,
        classes: int = 1000,
        width: int = 64,
        synchronised: bool = False,
    ):
        super().__init__()
        norm = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        for group, count in enumerate(blocks):
            made = []
            for index in range(count):
                stride = 2 if group and not index else 1
                made.append(Block(channels, width << group, num_convolutions, stride, norm))
                channels = (width << group) * (1 if num_convolutions == 2 else _EXPANSION)
            setattr(self, f"layer{group + 1}", nn.Sequential(*made))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, inputs: Any, targets: Any) -> Any:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(inputs))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return functional.cross_entropy(self.fc(flow.flatten(self.avgpool(x), start_dim=1)), targets)
