"""Built-in models by their sizes, and which one a layer graph is.

A plan carries a graph, not the name of a family: :func:`recognise` reads the sizes off the graph, builds the family's graph of
these sizes, and accepts it where the two are the same to the last field.  So a graph that was extracted from a module or read
from a ``config.json`` is recognised too, wherever it is one that could have been built here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from .feedforward import VGG_FEATURES, mlp, vgg
from .named import FAMILIES
from .transformers import Transformer

__all__ = ["BuiltIn", "Perceptron", "Pictures", "recognise"]


@dataclass(frozen=True)
class Perceptron:
    """The sizes of a multi-layer perceptron: the widths of its input, its hidden layers and its output."""

    widths: tuple[int, ...]


@dataclass(frozen=True)
class Pictures:
    """The sizes of a VGG."""

    depth: int
    image: int = 224
    classes: int = 1000
    hidden: int = 4096


Sizes = Union[Transformer, Perceptron, Pictures]


@dataclass(frozen=True)
class BuiltIn:
    """A model of one of the families ``gpt``, ``bert``, ``llama``, ``mlp`` and ``vgg``."""

    family: str
    sizes: Sizes

    def graph(self) -> LayerGraph:
        """Its layer graph.

        Raises:
            UserError: the sizes do not fit together.
        """
        if isinstance(self.sizes, Perceptron):
            return mlp(self.sizes.widths)
        if isinstance(self.sizes, Pictures):
            sizes = self.sizes
            return vgg(sizes.depth, image=sizes.image, classes=sizes.classes, hidden=sizes.hidden)
        return FAMILIES[self.family](self.sizes)


def recognise(graph: LayerGraph) -> BuiltIn | None:
    """The built-in model whose graph this is; None where there is none."""
    layers = {layer.name: layer for layer in graph.layers}
    for family, read in _READERS.items():
        try:
            found = BuiltIn(family, read(graph, layers))
            if found.graph().hash == graph.hash:
                return found
        except (KeyError, IndexError, UserError):
            continue  # not of this family: a layer that it has is missing, or the sizes are none of its own
    return None


def _mlp(graph: LayerGraph, layers: Mapping[str, Layer]) -> Perceptron:
    first = graph.layers[0].attributes["in_features"]
    return Perceptron((first, *(layer.attributes["out_features"] for layer in graph.layers)))


def _vgg(graph: LayerGraph, layers: Mapping[str, Layer]) -> Pictures:
    num_convolutions = sum(layer.kind == "conv2d" for layer in graph.layers)
    depths = {sum(isinstance(entry, int) for entry in entries): depth for depth, entries in VGG_FEATURES.items()}
    return Pictures(
        depths[num_convolutions],
        image=layers["features.0"].input_shape[-1],
        classes=layers["classifier.6"].attributes["out_features"],
        hidden=layers["classifier.0"].attributes["out_features"],
    )


def _gpt(graph: LayerGraph, layers: Mapping[str, Layer]) -> Transformer:
    tokens, inner = layers["wte"], layers["h.0.mlp.c_fc"]
    return Transformer(
        graph.name,
        layers=_num_blocks(graph),
        width=tokens.features,
        heads=layers["h.0.attn"].attributes["heads"],
        sequence=tokens.rows,
        vocabulary=tokens.attributes["vocabulary"],
        intermediate=inner.attributes["out_features"],
        positions=layers["wpe"].attributes["positions"],
        activation=inner.epilogue[0],
        tied=_is_tied(layers["lm_head"]),
    )


def _bert(graph: LayerGraph, layers: Mapping[str, Layer]) -> Transformer:
    tokens, inner = layers["embeddings.word_embeddings"], layers["encoder.layer.0.intermediate.dense"]
    return Transformer(
        graph.name,
        layers=_num_blocks(graph),
        width=tokens.features,
        heads=layers["encoder.layer.0.attention.self"].attributes["heads"],
        sequence=tokens.rows,
        vocabulary=tokens.attributes["vocabulary"],
        intermediate=inner.attributes["out_features"],
        positions=layers["embeddings.position_embeddings"].attributes["positions"],
        types=layers["embeddings.token_type_embeddings"].attributes["vocabulary"],
        activation=inner.epilogue[0],
        tied=_is_tied(layers["cls.predictions.decoder"]),
    )


def _llama(graph: LayerGraph, layers: Mapping[str, Layer]) -> Transformer:
    tokens, attend = layers["embed_tokens"], layers["layers.0.self_attn"].attributes
    down, gate = layers["layers.0.mlp.down_proj"], layers["layers.0.mlp.gate_proj+up_proj"]
    return Transformer(
        graph.name,
        layers=_num_blocks(graph),
        width=tokens.features,
        heads=attend["heads"],
        sequence=tokens.rows,
        vocabulary=tokens.attributes["vocabulary"],
        intermediate=down.attributes["in_features"],
        kv_heads=attend["kv_heads"],
        head_dim=attend["head_dim"],
        activation=gate.epilogue[0],
        tied=_is_tied(layers["lm_head"]),
        qkv_bias=_has_bias(layers["layers.0.self_attn.q_proj+k_proj+v_proj"]),
        output_bias=_has_bias(layers["layers.0.self_attn.o_proj"]),
        mlp_bias=_has_bias(down),
    )


def _num_blocks(graph: LayerGraph) -> int:
    return 1 + max(layer.block_index for layer in graph.layers)


def _is_tied(layer: Layer) -> bool:
    return any(parameter.tied_to is not None for parameter in layer.parameters)


def _has_bias(layer: Layer) -> bool:
    return any(len(parameter.shape) == 1 for parameter in layer.parameters)


_READERS: Mapping[str, Callable[[LayerGraph, Mapping[str, Layer]], Sizes]] = {
    "gpt": _gpt,
    "bert": _bert,
    "llama": _llama,
    "vgg": _vgg,
    "mlp": _mlp,
}
