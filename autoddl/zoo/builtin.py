"""Built-in models by their sizes, and the recognition of their graphs.

A plan contains a graph, not the name of a family. :func:`recognise` reads the sizes from the graph, builds the family's graph of
these sizes, and accepts it if the two graphs are identical. So it also recognises a graph that was extracted from a module or read
from a ``config.json``, if a built-in family could have produced it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from .feedforward import VGG_FEATURES, mlp, vgg
from .mixtures import Mixture
from .named import FAMILIES
from .residual import RESNET_BLOCKS, resnet
from .transformers import Transformer

__all__ = ["BuiltIn", "MLPSizes", "ResNetSizes", "VGGSizes", "recognise"]


@dataclass(frozen=True)
class MLPSizes:
    """The sizes of a multi-layer perceptron.

    Attributes:
        widths: features of its input, its hidden layers and its output.
    """

    widths: tuple[int, ...]


@dataclass(frozen=True)
class VGGSizes:
    """The sizes of a VGG.

    Attributes:
        depth: 11, 13, 16 or 19.
        image: pixels along each side.
        classes: number of classes.
        hidden: features of the two dense layers before the last one.
    """

    depth: int
    image: int = 224
    classes: int = 1000
    hidden: int = 4096


@dataclass(frozen=True)
class ResNetSizes:
    """The sizes of a ResNet.

    Attributes:
        depth: 18, 34, 50, 101 or 152.
        image: pixels along each side.
        classes: number of classes.
        width: channels of the first convolution.
        synchronised: whether batch norms have the statistics of the samples of all ranks.
    """

    depth: int
    image: int = 224
    classes: int = 1000
    width: int = 64
    synchronised: bool = False


Sizes = Union[Transformer, MLPSizes, VGGSizes, ResNetSizes]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in model.

    Attributes:
        family: ``gpt``, ``bert``, ``llama``, ``moe``, ``mlp``, ``vgg`` or ``resnet``.
        sizes: its sizes.
    """

    family: str
    sizes: Sizes

    def graph(self) -> LayerGraph:
        """The layer graph of the model.

        Raises:
            UserError: the sizes are inconsistent.
        """
        if isinstance(self.sizes, MLPSizes):
            return mlp(self.sizes.widths)
        if isinstance(self.sizes, VGGSizes):
            sizes = self.sizes
            return vgg(sizes.depth, image=sizes.image, classes=sizes.classes, hidden=sizes.hidden)
        if isinstance(self.sizes, ResNetSizes):
            return resnet(**vars(self.sizes))
        return FAMILIES[self.family](self.sizes)


def recognise(graph: LayerGraph) -> BuiltIn | None:
    """The built-in model whose graph this is; None if there is none.

    >>> recognise(mlp((64, 32, 16)))
    BuiltIn(family='mlp', sizes=MLPSizes(widths=(64, 32, 16)))
    """
    layers = {layer.name: layer for layer in graph.layers}
    for family, read in _READERS.items():
        try:
            found = BuiltIn(family, read(graph, layers))
            if found.graph().hash == graph.hash:
                return found
        except (KeyError, IndexError, UserError):
            continue  # not of this family: a layer is missing, or the sizes are out of range
    return None


def _mlp(graph: LayerGraph, layers: Mapping[str, Layer]) -> MLPSizes:
    first = graph.layers[0].attributes["in_features"]
    return MLPSizes((first, *(layer.attributes["out_features"] for layer in graph.layers)))


def _vgg(graph: LayerGraph, layers: Mapping[str, Layer]) -> VGGSizes:
    num_convolutions = sum(layer.kind == "conv2d" for layer in graph.layers)
    depths = {sum(isinstance(entry, int) for entry in entries): depth for depth, entries in VGG_FEATURES.items()}
    return VGGSizes(
        depths[num_convolutions],
        image=layers["features.0"].input_shape[-1],
        classes=layers["classifier.6"].attributes["out_features"],
        hidden=layers["classifier.0"].attributes["out_features"],
    )


def _resnet(graph: LayerGraph, layers: Mapping[str, Layer]) -> ResNetSizes:
    counts = tuple(
        sum(name.startswith(f"layer{i + 1}.") and name.endswith(".add") for name in layers) for i in range(4)
    )
    depths = {blocks: depth for depth, blocks in RESNET_BLOCKS.items()}
    return ResNetSizes(
        depths[counts, 3 if "layer1.0.conv3" in layers else 2],  # type: ignore[index]
        image=layers["conv1"].input_shape[-1],
        classes=layers["fc"].attributes["out_features"],
        width=layers["conv1"].attributes["out_channels"],
        synchronised=bool(layers["bn1"].attributes["synchronised"]),
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


def _moe(graph: LayerGraph, layers: Mapping[str, Layer]) -> Mixture:
    end = f"layers.{_num_blocks(graph) - 1}"
    found = layers[f"{end}.mlp.experts"]
    attributes, tokens = found.attributes, layers["embed_tokens"]
    dense, shared = layers.get("layers.0.mlp.down_proj"), layers.get(f"{end}.mlp.shared_experts.down_proj")
    inner = attributes["inner"]
    attend = layers["layers.0.self_attn"].attributes
    if layers["layers.0.self_attn"].kind == "latent_attention":
        q_a = layers.get("layers.0.self_attn.q_a_proj")
        heads: dict[str, Any] = {
            "query_rank": q_a.features if q_a else 0,
            "latent_rank": layers["layers.0.self_attn.kv_a_proj"].features,
            "rotary_dim": attend["rotary_dim"],
            "value_dim": attend["value_dim"],
        }
    else:
        has_bias = _has_bias(layers["layers.0.self_attn.q_proj+k_proj+v_proj"])
        heads = {"kv_heads": attend["kv_heads"], "qkv_bias": has_bias}
    return Mixture(
        graph.name,
        layers=_num_blocks(graph),
        width=tokens.features,
        heads=attend["heads"],
        sequence=tokens.rows,
        vocabulary=tokens.attributes["vocabulary"],
        intermediate=dense.attributes["in_features"] if dense else inner,
        head_dim=attend["head_dim"],
        activation="silu",
        tied=_is_tied(layers["lm_head"]),
        experts=attributes["experts"],
        per_token=attributes["per_token"],
        expert_width=inner,
        shared_width=shared.attributes["in_features"] if shared else 0,
        has_shared_gate=f"{end}.mlp.shared_gate" in layers,
        dense_layers=sum(f"layers.{i}.mlp.down_proj" in layers for i in range(_num_blocks(graph))),
        renormalises=bool(attributes["renormalises"]),
        sigmoid=bool(attributes.get("sigmoid", 0)),
        scaling=attributes.get("scaling", 1000),
        groups=attributes.get("groups", 1),
        groups_per_token=attributes.get("groups_per_token", 1),
        # The smallest factor with this capacity, rounded so that it is not above it.
        capacity_factor=(attributes["capacity"] - 0.5) * attributes["experts"] / attributes["per_token"] / tokens.rows,
        **heads,
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
    "moe": _moe,
    "vgg": _vgg,
    "resnet": _resnet,
    "mlp": _mlp,
}
