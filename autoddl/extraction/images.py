"""Convolutions, poolings and batch norms of a traced model as layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.layer import Layer

from ..zoo import layers as make
from .operators import Operator, OperatorGraph

__all__ = ["ImageLayer", "image_layer_of", "is_synchronised"]

#: Poolings of images.
POOLINGS = ("max_pool_2d", "avg_pool_2d", "adaptive_avg_pool2d")


@dataclass(frozen=True)
class ImageLayer:
    """The layer of one operator.

    Attributes:
        layer: the layer, without a name.
        source: the tensor that it reads.
        learned: the learned tensors that it reads.
    """

    layer: Layer
    source: str
    learned: tuple[str, ...] = ()


def image_layer_of(graph: OperatorGraph, op: Operator, is_image: Callable[[str], bool]) -> ImageLayer | None:
    """Return the layer of a convolution, a pooling or a batch norm; None for other operators, and if no kind of layer describes it.

    Args:
        graph: the operators.
        op: the operator.
        is_image: whether a tensor is raw data, or the image that a layer wrote.
    """
    if op.kind == "conv2d":
        return _convolution(graph, op)
    if op.kind in POOLINGS:
        return _pooling(graph, op, is_image)
    return _batch_norm(graph, op, is_image) if op.kind == "normalization" else None


def _convolution(graph: OperatorGraph, op: Operator) -> ImageLayer | None:
    """A convolution of one group, without dilation, with the same kernel size, stride and padding in both directions."""
    attributes = op.attributes
    source, weight = op.arguments["in"][0], op.arguments["weight"][0]
    lengths = [set(attributes[key]) for key in ("kernel_size", "strides", "padding_before", "dilation_rate")]
    is_square = all(len(values) == 1 for values in lengths)
    if not is_square or attributes["groups"] != 1 or lengths[3] != {1}:
        return None
    if attributes["data_format"] != "channels_first" or not graph.is_learned(weight):
        return None
    channels, height, width = graph.shapes[source][1:]
    kernel, stride, padding = (values.pop() for values in lengths[:3])
    layer = make.conv2d(
        "", (channels, height, width), attributes["filters"], kernel_size=kernel, stride=stride, padding=padding
    )
    if (graph.batch, *layer.output_shape) != graph.shapes[op.output]:
        return None
    return ImageLayer(layer, source, (weight, *op.arguments.get("bias", ())))


def _pooling(graph: OperatorGraph, op: Operator, is_image: Callable[[str], bool]) -> ImageLayer | None:
    """A pooling with square windows without dilation, all of which lie inside the padded image. Means count padding."""
    shape = graph.shapes[op.inputs[0]]
    if len(shape) != 4 or not is_image(op.inputs[0]):
        return None
    sizes = _windows(op, shape)
    if any(len(values) != 1 for values in sizes):
        return None
    kernel, stride, padding = (values.pop() for values in sizes)
    is_maximum = op.kind == "max_pool_2d"
    layer = make.pool("", shape[1:], kernel_size=kernel, stride=stride, padding=padding, maximum=is_maximum)
    if (graph.batch, *layer.output_shape) != graph.shapes[op.output] or graph.results_of([op]) != [op.output]:
        return None
    return ImageLayer(layer, op.inputs[0])


def _windows(op: Operator, shape: tuple[int, ...]) -> tuple[set[int], set[int], set[int]]:
    """The kernel sizes, strides and paddings of both directions; no strides if no kind of layer describes the windows."""
    attributes = op.attributes
    if op.kind == "adaptive_avg_pool2d":
        # As many windows as outputs, side by side.
        lengths = {length / out for length, out in zip(shape[2:], attributes["output_size"])}
        whole = {int(length) for length in lengths if length.is_integer()}
        return (whole, set(whole), {0}) if len(lengths) == len(whole) else (set(), set(), set())
    is_plain = attributes.get("data_format", "channels_first") == "channels_first"
    is_dilated = set(attributes.get("dilation", (1,))) != {1}
    is_mean_of_some = not attributes.get("count_include_pad", True) and any(attributes["padding"])
    if is_dilated or is_mean_of_some or not is_plain or attributes.get("divisor_override"):
        return set(), set(), set()
    return set(attributes["kernel_size"]), set(attributes["stride"]), set(attributes["padding"])


def _batch_norm(graph: OperatorGraph, op: Operator, is_image: Callable[[str], bool]) -> ImageLayer | None:
    """A batch norm over the channels of images, or over the features of rows."""
    source = op.arguments["x"][0]
    shape, module = graph.shapes[source], graph.modules.get(op.path)
    learned = (*op.arguments.get("gamma", ()), *op.arguments.get("beta", ()))
    is_affine = len(learned) == 2 and all(graph.is_learned(tensor) for tensor in learned)
    is_module = bool(op.path) and op.path in graph.leaves and hasattr(module, "running_mean")
    of_images = len(shape) == 4 and is_image(source)
    # Several rows of a sample in the first dimension are left to a program.
    of_rows = len(shape) == 2 and shape[0] == graph.batch
    if not is_module or op.attributes.get("axis") != 1 or not (of_images or of_rows):
        return None
    sample = shape[1:] if of_images else (1, shape[1])
    norm = make.batch_norm("", sample, synchronised=is_synchronised(module), affine=is_affine)
    return ImageLayer(norm, source, learned)


def is_synchronised(module: Any) -> bool:
    """Return whether a module is a batch norm with the statistics of the samples of all ranks."""
    return "SyncBatchNorm" in type(module).__name__
