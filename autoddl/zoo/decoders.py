"""Decoders beside GPT-2 and LLaMA: Qwen3, Gemma 2 and 3, Phi, GPT-NeoX, GPT-J, GPT-Neo, OPT, BLOOM, Falcon, StableLM, StarCoder.

A block is x + A(N(x)) followed by x + M(N(x)), or in parallel x + A(N(x)) + M(N'(x)), where A is attention, M the MLP, and N and N'
are norms, which may be the same one.  In a *sandwich*, norms also follow A and M.

Norms of queries and keys have one scale of head_dim elements each, for all heads.  They are parameters of the attention layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.layer import Layer, Parameter

from .layers import BLOCK_INPUT, GraphBuilder, add, attention, embedding, linear, loss, norm, position

__all__ = ["Decoder", "DecoderNames", "decoder"]

Template = list[tuple[Layer, list[str]]]


@dataclass(frozen=True)
class DecoderNames:
    """The names of the modules of a family; those of a block are relative to the block.

    Attributes:
        tokens: token table.
        blocks: list of blocks.
        attend: attention module.
        qkv: query, key and value projections; one name if they are one module.
        output: output projection of the attention.
        norms: norms before attention and MLP; one name if they are the same.
        up: first projections of the MLP: gate and up if it is gated.
        down: last projection of the MLP.
        final_norm: norm after the blocks.
        head: output projection.
        positions: table of learned positions.
        embedding_norm: norm of the embeddings.
        after: norms after attention and MLP in a sandwich.
    """

    tokens: str = "embed_tokens"
    blocks: str = "layers"
    attend: str = "self_attn"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    final_norm: str = "norm"
    head: str = "lm_head"
    positions: str = ""
    embedding_norm: str = ""
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder.

    Attributes:
        name: of the model.
        layers: number of blocks.
        width: features of the residual stream.
        heads: query heads.
        sequence: tokens per sample.
        vocabulary: rows of the token table.
        intermediate: features inside the MLP.
        names: of the modules; they also say whether there are learned positions, a gate, norms of the embeddings and a sandwich.
        kv_heads: key-value heads; 0: as many as query heads.
        head_dim: features per head; 0: width / heads.
        positions: rows of the table of learned positions.
        statistics: of the norms: 2 for layer norms, 1 for RMS norms.
        norm_bias: whether the norms have biases.
        activation: of the MLP.
        parallel: whether attention and MLP read the block's input in parallel.
        query_key_norm: whether queries and keys are normalised per head.
        tied: whether the output projection is the token table.
        qkv_bias, output_bias, mlp_bias, head_bias: whether these projections have biases.
        dropout: whether there are dropouts: of the sum of the embeddings, of the attention's probabilities, and of what a block
            adds to the residual stream.
    """

    name: str
    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    intermediate: int
    names: DecoderNames
    kv_heads: int = 0
    head_dim: int = 0
    positions: int = 0
    statistics: int = 1
    norm_bias: bool = False
    activation: str = "silu"
    parallel: bool = False
    query_key_norm: bool = False
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        if not self.head_dim and self.width % self.heads:
            raise UserError(
                f"{self.name}: width {self.width} does not divide into {self.heads} heads; "
                "heads should be a divisor of the width"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise UserError(
                f"{self.name}: {self.heads} heads do not divide among {self.kv_heads} key-value heads; kv_heads should be a "
                "divisor of the heads"
            )
        if 0 < self.positions < self.sequence:
            raise UserError(
                f"{self.name}: sequence {self.sequence} is longer than the {self.positions} positions of the model; "
                f"it should be at most {self.positions}"
            )

    @property
    def drop(self) -> tuple[str, ...]:
        """The epilogue of layers that a dropout follows."""
        return ("dropout",) if self.dropout else ()


def decoder(model: Decoder) -> LayerGraph:
    """The layer graph of a decoder with its output projection and loss."""
    names, rows, width = model.names, model.sequence, model.width
    builder = GraphBuilder(model.name, "sequence")
    entry = builder.add(embedding(names.tokens, rows, model.vocabulary, width))
    if names.positions:
        places = builder.add(position(names.positions, rows, model.positions, width))
        entry = builder.add(add("embed", (rows, width), epilogue=model.drop), entry, places)
    if names.embedding_norm:
        entry = builder.add(_norm(model, names.embedding_norm), entry)
    end = builder.repeat(names.blocks, model.layers, _block(model), entry)
    tied_to = names.tokens if model.tied else None
    builder.chain(
        end,
        [
            _norm(model, names.final_norm),
            linear(names.head, rows, width, model.vocabulary, bias=model.head_bias, tied_to=tied_to),
            loss("loss", rows, model.vocabulary),
        ],
    )
    return builder.build()


def _norm(model: Decoder, name: str) -> Layer:
    return norm(name, model.sequence, model.width, statistics=model.statistics, bias=model.norm_bias)


def _block(model: Decoder) -> Template:
    """The layers of a block, by role, each with the roles that it reads."""
    names, shape = model.names, (model.sequence, model.width)
    first, second = names.norms[0], names.norms[-1]
    block: Template = [(_norm(model, first), [BLOCK_INPUT])]
    attended = _attention_layers(model, block, first)
    if model.parallel:
        if second != first:
            block.append((_norm(model, second), [BLOCK_INPUT]))
        changed = _mlp_layers(model, block, second)
        block.append((add("add", shape), [BLOCK_INPUT, attended, changed]))
        return block
    block.append((add("add_1", shape), [BLOCK_INPUT, attended]))
    block.append((_norm(model, second), ["add_1"]))
    changed = _mlp_layers(model, block, second)
    block.append((add("add_2", shape), ["add_1", changed]))
    return block


def _attention_layers(model: Decoder, block: Template, source: str) -> str:
    """Append the layers of attention to a block; returns the role of the last one."""
    names, rows = model.names, model.sequence
    kv_heads, head_dim = model.kv_heads or model.heads, model.head_dim or model.width // model.heads
    queries, keys = model.heads * head_dim, kv_heads * head_dim
    features = queries + 2 * keys
    widths = [features] if len(names.qkv) == 1 else [queries, keys, keys]
    qkv = "+".join([names.qkv[0], *(name.rpartition(".")[2] for name in names.qkv[1:])])
    project = linear(qkv, rows, model.width, features, parts=list(zip(names.qkv, widths)), bias=model.qkv_bias)
    attend = attention(names.attend, rows, model.heads, head_dim, kv_heads=kv_heads, causal=True, dropout=model.dropout)
    if model.query_key_norm:
        scales = tuple(Parameter(f"{names.attend}.{which}_norm.weight", (head_dim,)) for which in ("q", "k"))
        attend = replace(attend, parameters=scales)
    output = linear(names.output, rows, queries, model.width, bias=model.output_bias, epilogue=model.drop)
    block += [(project, [source]), (attend, [qkv]), (output, [names.attend])]
    return _after(model, block, names.output, 0)


def _mlp_layers(model: Decoder, block: Template, source: str) -> str:
    """Append the layers of the MLP to a block; returns the role of the last one."""
    names, rows, inner = model.names, model.sequence, model.intermediate
    up = "+".join([names.up[0], *(name.rpartition(".")[2] for name in names.up[1:])])
    epilogue = (model.activation, "mul") if len(names.up) == 2 else (model.activation,)
    parts = [(name, inner) for name in names.up]
    first = linear(up, rows, model.width, len(parts) * inner, parts=parts, bias=model.mlp_bias, epilogue=epilogue)
    last = linear(names.down, rows, inner, model.width, bias=model.mlp_bias, epilogue=model.drop)
    block += [(first, [source]), (last, [up])]
    return _after(model, block, names.down, 1)


def _after(model: Decoder, block: Template, source: str, index: int) -> str:
    """Append the norm of a sandwich, if there is one; returns the role of the last layer."""
    if not model.names.after:
        return source
    name = model.names.after[index]
    block.append((_norm(model, name), [source]))
    return name
