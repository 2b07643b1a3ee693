"""Layers with their costs: the one place that knows what a layer of each kind computes and keeps.

Shapes are per sample, (rows, features) everywhere but in convolutions.  A multiply-add counts as two FLOPs; only matrix
products count, since all else is bound by memory bandwidth.

==========  ==============================  ===================================================================
kind        forward FLOPs per sample        elements that the backward pass keeps besides the layer's input
==========  ==============================  ===================================================================
linear      2 rows in out                   by its epilogue, see :data:`KEPT_PER_ELEMENT`
attention   4 S S heads head_dim            heads S S: the probabilities (causal attention is not halved: dense
                                            kernels compute all of it)
norm        0                               rows * statistics: mean and inverse deviation (RMS norm: the latter)
conv2d      2 out_elements in k k           by its epilogue
loss        0                               0: the probabilities take the place of the logits
opaque      what it is given                what it is given
others      0                               0
==========  ==============================  ===================================================================

A fused layer stands for several modules that read the same tensor: attention's query, key and value projections, or gate
and up projection of a gated MLP.  Its features are ordered by group (a group is a key-value head with its query heads;
gate and up alternate), so that an even split of the features gives whole heads, and pairs of gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoddl.costmodel.graph import Layer, LayerGraph, Parameter

__all__ = [
    "BLOCK_INPUT",
    "KEPT_PER_ELEMENT",
    "GraphBuilder",
    "add",
    "attention",
    "conv2d",
    "embedding",
    "kept_by_epilogue",
    "linear",
    "loss",
    "norm",
    "opaque",
    "position",
]

#: What the backward pass of an element-wise operation keeps, per element of its result: 0 where the result itself is enough
#: (it is the next layer's input), 1 for the argument, 2 for the factors of a product; dropout keeps a mask of bytes.
KEPT_PER_ELEMENT: Mapping[str, float] = {
    **dict.fromkeys(("relu", "sigmoid", "tanh"), 0),
    **dict.fromkeys(("cast", "negative", "reduce_sum", "scalar_add", "scalar_div", "scalar_mul", "sub", "sum"), 0),
    "dropout": 0.25,
    "gelu": 1,
    "silu": 1,
    "quick_gelu": 1,
    "mse_loss": 1,
    "mul": 2,
}

#: Epilogue operations that halve the features: they take gate and up apart.
GATES = frozenset({"mul"})


def kept_by_epilogue(epilogue: Iterable[str], elements: int) -> int:
    """Elements kept by the backward pass of element-wise operations on ``elements`` elements (unknown ones: 1 each)."""
    return math.ceil(sum(KEPT_PER_ELEMENT.get(operation, 1) for operation in epilogue) * elements)


def _dense_parameters(
    parts: Sequence[tuple[str, int]], in_features: int, bias: bool, tied_to: str | None
) -> tuple[Parameter, ...]:
    parameters = []
    for module, width in parts:
        parameters.append(Parameter(f"{module}.weight", (width, in_features), tied_to))
        if bias:
            parameters.append(Parameter(f"{module}.bias", (width,)))
    return tuple(parameters)


def linear(
    name: str,
    rows: int,
    in_features: int,
    out_features: int,
    *,
    bias: bool = True,
    epilogue: Sequence[str] = (),
    parts: Sequence[tuple[str, int]] | None = None,
    tied_to: str | None = None,
) -> Layer:
    """A dense layer; with a gated epilogue such as ("silu", "mul") its output is half as wide as the product.

    Args:
        name: of the layer; of the module too, unless there are parts.
        rows: per sample.
        in_features, out_features: of the product.
        bias: whether it has one (each part has one, where there are parts).
        epilogue: element-wise operations that follow.
        parts: (module, its out_features) of fused modules, in the order of their features.
        tied_to: the layer whose weight this one shares.
    """
    parts = ((name, out_features),) if parts is None else tuple(parts)
    width = out_features // 2 if GATES & set(epilogue) else out_features
    return Layer(
        name=name,
        kind="linear",
        input_shape=(rows, in_features),
        output_shape=(rows, width),
        attributes={"in_features": in_features, "out_features": out_features},
        parameters=_dense_parameters(parts, in_features, bias, tied_to),
        epilogue=tuple(epilogue),
        flops=2.0 * rows * in_features * out_features,
        kept_elements=kept_by_epilogue(epilogue, rows * width),
        modules=tuple(module for module, _ in parts),
    )


def embedding(name: str, rows: int, vocabulary: int, features: int) -> Layer:
    """A table that is looked up, once per row."""
    return Layer(
        name=name,
        kind="embedding",
        input_shape=(rows,),
        output_shape=(rows, features),
        attributes={"vocabulary": vocabulary, "features": features},
        parameters=(Parameter(f"{name}.weight", (vocabulary, features)),),
        modules=(name,),
    )


def position(name: str, rows: int, positions: int, features: int) -> Layer:
    """A table whose first ``rows`` rows go to every sample."""
    return Layer(
        name=name,
        kind="position",
        input_shape=(rows,),
        output_shape=(rows, features),
        attributes={"positions": positions, "features": features},
        parameters=(Parameter(f"{name}.weight", (positions, features)),),
        modules=(name,),
    )


def attention(
    name: str, sequence: int, heads: int, head_dim: int, *, kv_heads: int | None = None, causal: bool, module: str = ""
) -> Layer:
    """softmax(q k^T) v: reads q, k and v side by side, (S, (heads + 2 kv_heads) head_dim), gives (S, heads head_dim)."""
    kv_heads = heads if kv_heads is None else kv_heads
    return Layer(
        name=name,
        kind="attention",
        input_shape=(sequence, (heads + 2 * kv_heads) * head_dim),
        output_shape=(sequence, heads * head_dim),
        attributes={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "causal": int(causal)},
        flops=4.0 * sequence * sequence * heads * head_dim,
        kept_elements=heads * sequence * sequence,
        modules=(module or name,),
    )


def norm(name: str, rows: int, features: int, *, statistics: int = 2, bias: bool | None = None) -> Layer:
    """Layer norm (two statistics per row; weight and bias) or RMS norm (one; weight alone)."""
    bias = statistics == 2 if bias is None else bias
    names = ("weight", "bias") if bias else ("weight",)
    return Layer(
        name=name,
        kind="norm",
        input_shape=(rows, features),
        output_shape=(rows, features),
        attributes={"features": features, "statistics": statistics},
        parameters=tuple(Parameter(f"{name}.{parameter}", (features,)) for parameter in names),
        kept_elements=rows * statistics,
        modules=(name,),
    )


def add(name: str, shape: tuple[int, ...]) -> Layer:
    """The element-wise sum of two or more tensors of one shape."""
    return Layer(name=name, kind="add", input_shape=shape, output_shape=shape)


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
    """A convolution with a square kernel on (channels, height, width)."""
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


def loss(name: str, rows: int, vocabulary: int) -> Layer:
    """Cross entropy of each row's logits."""
    return Layer(
        name=name,
        kind="loss",
        input_shape=(rows, vocabulary),
        output_shape=(rows, 1),
        attributes={"vocabulary": vocabulary},
    )


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
    """Anything else."""
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


#: In a block's template: the tensor that enters the block.
BLOCK_INPUT = ""


class GraphBuilder:
    """Collects layers, in topological order, with the edges that lead to them."""

    def __init__(self, name: str, sample: str):
        self._name, self._sample = name, sample
        self._layers: list[Layer] = []
        self._edges: list[tuple[str, str]] = []

    def add(self, layer: Layer, *inputs: str) -> str:
        """Append a layer that reads the outputs of ``inputs``; its name, for others to read."""
        self._layers.append(layer)
        self._edges.extend((source, layer.name) for source in inputs)
        return layer.name

    def chain(self, source: str, layers: Iterable[Layer]) -> str:
        """Append layers of which each reads the one before; the last one's name."""
        for layer in layers:
            source = self.add(layer, source)
        return source

    def repeat(self, block: str, count: int, template: Sequence[tuple[Layer, Sequence[str]]], source: str) -> str:
        """Append a block ``count`` times, each reading the one before; the last layer's name.

        Args:
            block: the path of the container: repetition i is ``block.i``.
            count: how often.
            template: the block's layers, named by role, each with the roles that it reads.
            source: what the first repetition reads.
        """
        for index in range(count):
            entry = source
            for layer, roles in template:
                inputs = (entry if role == BLOCK_INPUT else f"{block}.{index}.{role}" for role in roles)
                source = self.add(_placed(layer, block, index), *inputs)
        return source

    def build(self, notes: Iterable[str] = ()) -> LayerGraph:
        """The graph."""
        return LayerGraph(self._name, self._sample, tuple(self._layers), tuple(self._edges), tuple(notes))


def _placed(layer: Layer, block: str, index: int) -> Layer:
    """A template's layer as part of one repetition of its block."""
    prefix = f"{block}.{index}."
    return replace(
        layer,
        name=prefix + layer.name,
        parameters=tuple(replace(p, name=prefix + p.name) for p in layer.parameters),
        block=block,
        block_index=index,
        role=layer.name,
        modules=tuple(prefix + module for module in layer.modules),
    )
