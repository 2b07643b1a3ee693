"""T5: an encoder and a decoder, whose cross attention reads the encoder's output.

Encoder and decoder are two repeated blocks. Every block of the decoder has a projection of the encoder's output to keys and values.
So the edges from the encoder's last norm to these projections price the redistribution of the encoder's output to each block.

The table of relative positions, (buckets, heads), is a parameter of self-attention in the first block of either stack; all
blocks of the stack add its biases to their scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.layer import Layer, Parameter

from .layers import GraphBuilder, add, attention, embedding, linear, loss, norm, placed

__all__ = ["T5", "t5"]


@dataclass(frozen=True)
class T5:
    """The sizes of a T5.

    Attributes:
        name: of the model.
        layers: number of blocks of the encoder.
        decoder_layers: number of blocks of the decoder.
        width: features of the residual stream.
        heads: attention heads.
        head_dim: features per head.
        intermediate: features inside the MLP.
        sequence: tokens per sample, of the encoder and of the decoder.
        vocabulary: rows of the token table, which encoder and decoder share.
        buckets: of relative positions.
        activation: of the MLP.
        gated: whether the MLP has a gate.
        tied: whether the output projection is the token table.
        dropout: whether there are dropouts, as in :class:`.transformers.Transformer`.
    """

    name: str
    layers: int
    decoder_layers: int
    width: int
    heads: int
    head_dim: int
    intermediate: int
    sequence: int
    vocabulary: int
    buckets: int = 32
    activation: str = "relu"
    gated: bool = False
    tied: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.sequence < 1:
            raise UserError(f"{self.name}: sequence is {self.sequence}, should be at least 1")

    @property
    def drop(self) -> tuple[str, ...]:
        """The epilogue of layers that a dropout follows."""
        return ("dropout",) if self.dropout else ()


class _Stack:
    """Adds the blocks of the encoder or of the decoder to a graph."""

    def __init__(self, builder: GraphBuilder, model: T5, path: str):
        self.builder, self.model, self.path = builder, model, path
        self.index = 0

    def add(self, layer: Layer, *inputs: str) -> str:
        return self.builder.add(placed(layer, f"{self.path}.block", self.index), *inputs)

    def norm(self, name: str, source: str) -> str:
        return self.add(norm(f"{name}.layer_norm", self.model.sequence, self.model.width, statistics=1), source)

    def project(self, name: str, features: str, source: str) -> str:
        """Projections of ``source`` to the ``features`` of "q+k+v", for attention."""
        model, width = self.model, self.model.heads * self.model.head_dim
        parts = [(f"{name}.{part}", width) for part in features.split("+")]
        layer = linear(f"{name}.{features}", model.sequence, model.width, len(parts) * width, parts=parts, bias=False)
        return self.add(layer, source)

    def finish(self, name: str, layer: Layer, source: str, *inputs: str) -> str:
        """Attention, its output projection and the residual sum."""
        model, (outer, inner) = self.model, name.rsplit(".", 1)
        attended = self.add(layer, *inputs)
        width = model.heads * model.head_dim
        output = linear(f"{outer}.{inner}.o", model.sequence, width, model.width, bias=False, epilogue=model.drop)
        projected = self.add(output, attended)
        return self.add(add(f"{outer}.add", (model.sequence, model.width)), source, projected)

    def self_attention(self, source: str, causal: bool) -> str:
        model, name = self.model, "layer.0.SelfAttention"
        qkv = self.project(name, "q+k+v", self.norm("layer.0", source))
        layer = attention(name, model.sequence, model.heads, model.head_dim, causal=causal, dropout=model.dropout)
        if self.index == 0:
            table = Parameter(f"{name}.relative_attention_bias.weight", (model.buckets, model.heads))
            layer = replace(layer, parameters=(table,))
        return self.finish(name, layer, source, qkv)

    def cross_attention(self, source: str, encoded: str) -> str:
        model, name = self.model, "layer.1.EncDecAttention"
        query = self.project(name, "q", self.norm("layer.1", source))
        keys = self.project(name, "k+v", encoded)
        layer = attention(
            name,
            model.sequence,
            model.heads,
            model.head_dim,
            causal=False,
            key_rows=model.sequence,
            dropout=model.dropout,
        )
        return self.finish(name, layer, source, query, keys)

    def mlp(self, sublayer: int, source: str) -> str:
        model, rows, outer = self.model, self.model.sequence, f"layer.{sublayer}"
        name = f"{outer}.DenseReluDense"
        inner, width = model.intermediate, model.width
        normed = self.norm(outer, source)
        if model.gated:
            parts = [(f"{name}.wi_0", inner), (f"{name}.wi_1", inner)]
            epilogue: tuple[str, ...] = (model.activation, "mul")
        else:
            parts, epilogue = [(f"{name}.wi", inner)], (model.activation,)
        label = f"{name}.wi_0+wi_1" if model.gated else f"{name}.wi"
        up = linear(label, rows, width, len(parts) * inner, parts=parts, bias=False, epilogue=(*epilogue, *model.drop))
        raised = self.add(up, normed)
        lowered = self.add(linear(f"{name}.wo", rows, inner, width, bias=False, epilogue=model.drop), raised)
        return self.add(add(f"{outer}.add", (rows, width)), source, lowered)

    def end(self, source: str) -> str:
        name = f"{self.path}.final_layer_norm"
        return self.builder.add(norm(name, self.model.sequence, self.model.width, statistics=1), source)


def t5(model: T5) -> LayerGraph:
    """T5 with its output projection and loss, one sample being a pair of sequences of equal length."""
    rows, width = model.sequence, model.width
    builder = GraphBuilder(model.name, "sequence")
    source = builder.add(embedding("shared", rows, model.vocabulary, width))
    encoder = _Stack(builder, model, "encoder")
    for encoder.index in range(model.layers):
        source = encoder.mlp(1, encoder.self_attention(source, causal=False))
    encoded = encoder.end(source)
    lookup = embedding("decoder.embed_tokens", rows, model.vocabulary, width)
    shared = tuple(replace(table, tied_to="shared") for table in lookup.parameters)
    source = builder.add(replace(lookup, parameters=shared))
    decoder = _Stack(builder, model, "decoder")
    for decoder.index in range(model.decoder_layers):
        source = decoder.cross_attention(decoder.self_attention(source, causal=True), encoded)
        source = decoder.mlp(2, source)
    tied_to = "shared" if model.tied else None
    builder.chain(
        decoder.end(source),
        [
            linear("lm_head", rows, width, model.vocabulary, bias=False, tied_to=tied_to),
            loss("loss", rows, model.vocabulary),
        ],
    )
    return builder.build(
        [
            "the sequences of encoder and decoder are equally long",
            "the biases of relative positions are added to the scores of all blocks without time or traffic of their own",
        ]
    )
