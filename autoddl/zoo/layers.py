"""A builder of layer graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.add import add
from autoddl.costmodel.kinds.attention import attention
from autoddl.costmodel.kinds.batchnorm import batch_norm, batch_norm_note
from autoddl.costmodel.kinds.conv2d import conv2d
from autoddl.costmodel.kinds.embedding import embedding
from autoddl.costmodel.kinds.epilogue import KEPT_PER_ELEMENT, kept_by_epilogue
from autoddl.costmodel.kinds.experts import capacity_of, experts
from autoddl.costmodel.kinds.latent import latent_attention
from autoddl.costmodel.kinds.linear import linear
from autoddl.costmodel.kinds.loss import loss
from autoddl.costmodel.kinds.norm import norm
from autoddl.costmodel.kinds.opaque import opaque
from autoddl.costmodel.kinds.pool import pool
from autoddl.costmodel.kinds.position import position
from autoddl.costmodel.kinds.tokengate import token_gate
from autoddl.costmodel.layer import Layer

__all__ = [
    "BLOCK_INPUT",
    "KEPT_PER_ELEMENT",
    "GraphBuilder",
    "add",
    "attention",
    "batch_norm",
    "batch_norm_note",
    "capacity_of",
    "conv2d",
    "embedding",
    "experts",
    "kept_by_epilogue",
    "latent_attention",
    "linear",
    "loss",
    "norm",
    "opaque",
    "placed",
    "pool",
    "position",
    "token_gate",
]

#: In a block's template: the input of the block.
BLOCK_INPUT = ""


class GraphBuilder:
    """Collects layers in topological order, and the edges between them.

    Args:
        name: of the graph.
        sample: what one sample of the batch is: ``sequence``, ``image`` or ``row``.
    """

    def __init__(self, name: str, sample: str):
        self._name, self._sample = name, sample
        self._layers: list[Layer] = []
        self._edges: list[tuple[str, str]] = []

    def add(self, layer: Layer, *inputs: str) -> str:
        """Append a layer that reads the outputs of ``inputs``; returns its name."""
        self._layers.append(layer)
        self._edges.extend((source, layer.name) for source in inputs)
        return layer.name

    def chain(self, source: str, layers: Iterable[Layer]) -> str:
        """Append layers, each of which reads the previous one; returns the last one's name."""
        for layer in layers:
            source = self.add(layer, source)
        return source

    def repeat(
        self, block: str, count: int, template: Sequence[tuple[Layer, Sequence[str]]], source: str, start: int = 0
    ) -> str:
        """Append a block ``count`` times, each reading the previous one; returns the last layer's name.

        Args:
            block: the path of the container: repetition i is ``block.i``.
            count: number of repetitions.
            template: the block's layers, named by role, each with the roles that it reads.
            source: the layer that the first repetition reads.
            start: index of the first repetition.
        """
        for index in range(start, start + count):
            entry = source
            for layer, roles in template:
                inputs = (entry if role == BLOCK_INPUT else f"{block}.{index}.{role}" for role in roles)
                source = self.add(placed(layer, block, index), *inputs)
        return source

    def build(self, notes: Iterable[str] = ()) -> LayerGraph:
        """The graph."""
        return LayerGraph(self._name, self._sample, tuple(self._layers), tuple(self._edges), tuple(notes))


def placed(layer: Layer, block: str, index: int) -> Layer:
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
