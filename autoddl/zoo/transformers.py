"""GPT, BERT and LLaMA, layer by layer; layers have the names of the corresponding HuggingFace modules.

The vocabulary is used as given. Callers pad a vocabulary that should split over many devices (:func:`pad_vocabulary`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.limits import MAX_SIZES

from .layers import (
    BLOCK_INPUT,
    GraphBuilder,
    add,
    attention,
    embedding,
    linear,
    loss,
    norm,
    position,
)

__all__ = ["Transformer", "bert", "gpt", "llama", "pad_vocabulary"]

VOCABULARY_MULTIPLE = 128


def pad_vocabulary(vocabulary: int) -> int:
    """The next multiple of 128, so that the token table and the logits split over many devices.

    >>> pad_vocabulary(50257)
    50304
    """
    return -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer, for all three families.

    Attributes:
        name: of the model.
        layers: number of blocks.
        width: features of the residual stream.
        heads: query heads.
        sequence: tokens per sample.
        vocabulary: rows of the token table.
        intermediate: features inside the MLP; 0: 4 * width.
        kv_heads: key-value heads (LLaMA); 0: as many as query heads.
        head_dim: features per head (LLaMA); 0: width / heads.
        positions: rows of the position table (GPT, BERT); 0: as long as the sequence.
        types: rows of the token type table (BERT).
        activation: of the MLP.
        tied: whether the output projection is the token table.
        qkv_bias: whether the query, key and value projections have biases (LLaMA and similar models; GPT and BERT always do).
        output_bias: whether the output projection of the attention has a bias (the same).
        mlp_bias: whether the projections of the MLP have biases (the same).
        dropout: whether there are dropouts: of the sum of the embeddings, of the attention's probabilities, and of what a block
            adds to the residual stream.
    """

    name: str
    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    intermediate: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    positions: int = 0
    types: int = 2
    activation: str = "gelu"
    tied: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        for field, largest in MAX_SIZES.items():
            value = getattr(self, field)
            if field in ("layers", "width", "heads", "sequence", "vocabulary", "types") and value < 1:
                raise UserError(f"{self.name}: {field} is {value}, should be at least 1")
            if not 0 <= value <= largest:
                raise UserError(f"{self.name}: {field} is {value}, should be at most {largest}")
        if not self.head_dim and self.width % self.heads:
            raise UserError(
                f"{self.name}: width {self.width} does not divide into {self.heads} heads; "
                f"heads should be a divisor of the width, such as {_closest_divisor(self.width, self.heads)}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise UserError(
                f"{self.name}: {self.heads} heads do not divide among {self.kv_heads} key-value heads; kv_heads should "
                f"be a divisor of the heads, such as {_closest_divisor(self.heads, self.kv_heads)}"
            )
        if 0 < self.positions < self.sequence:
            raise UserError(
                f"{self.name}: sequence {self.sequence} is longer than the {self.positions} positions of the model; "
                f"it should be at most {self.positions}"
            )

    @property
    def mlp_width(self) -> int:
        """Features inside the MLP."""
        return self.intermediate or 4 * self.width

    @property
    def drop(self) -> tuple[str, ...]:
        """The epilogue of layers that a dropout follows."""
        return ("dropout",) if self.dropout else ()

    @property
    def num_positions(self) -> int:
        """Rows of the position table."""
        return self.positions or self.sequence


def _closest_divisor(whole: int, wanted: int) -> int:
    divisors = [d for i in range(1, int(whole**0.5) + 1) if whole % i == 0 for d in (i, whole // i)]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def gpt(model: Transformer) -> LayerGraph:
    """GPT-2's decoder: pre-norm blocks, learned positions, gelu MLP, biases; the output may be tied to the token table."""
    rows, width, inner = model.sequence, model.width, model.mlp_width
    head_dim = width // model.heads
    builder = GraphBuilder(model.name, "sequence")
    tokens = builder.add(embedding("wte", rows, model.vocabulary, width))
    places = builder.add(position("wpe", rows, model.num_positions, width))
    entry = builder.add(add("embed", (rows, width), epilogue=model.drop), tokens, places)
    block = [
        (norm("ln_1", rows, width), [BLOCK_INPUT]),
        (linear("attn.c_attn", rows, width, 3 * width), ["ln_1"]),
        (attention("attn", rows, model.heads, head_dim, causal=True, dropout=model.dropout), ["attn.c_attn"]),
        (linear("attn.c_proj", rows, width, width, epilogue=model.drop), ["attn"]),
        (add("add_1", (rows, width)), [BLOCK_INPUT, "attn.c_proj"]),
        (norm("ln_2", rows, width), ["add_1"]),
        (linear("mlp.c_fc", rows, width, inner, epilogue=(model.activation,)), ["ln_2"]),
        (linear("mlp.c_proj", rows, inner, width, epilogue=model.drop), ["mlp.c_fc"]),
        (add("add_2", (rows, width)), ["add_1", "mlp.c_proj"]),
    ]
    end = builder.repeat("h", model.layers, block, entry)
    tied_to = "wte" if model.tied else None
    builder.chain(
        end,
        [
            norm("ln_f", rows, width),
            linear("lm_head", rows, width, model.vocabulary, bias=False, tied_to=tied_to),
            loss("loss", rows, model.vocabulary),
        ],
    )
    return builder.build()


def bert(model: Transformer) -> LayerGraph:
    """BERT's encoder with the masked-language-model head: post-norm blocks, full attention; the decoder may be tied.

    The pooler and the next-sentence head, which read one token of each sequence, are omitted.
    """
    rows, width, inner = model.sequence, model.width, model.mlp_width
    builder = GraphBuilder(model.name, "sequence")
    tables = [
        builder.add(embedding("embeddings.word_embeddings", rows, model.vocabulary, width)),
        builder.add(embedding("embeddings.token_type_embeddings", rows, model.types, width)),
        builder.add(position("embeddings.position_embeddings", rows, model.num_positions, width)),
    ]
    entry = builder.add(add("embeddings.embed", (rows, width), epilogue=model.drop), *tables)
    entry = builder.add(norm("embeddings.LayerNorm", rows, width), entry)
    attend = "attention.self"
    qkv = f"{attend}.query+key+value"
    parts = [(f"{attend}.{part}", width) for part in ("query", "key", "value")]
    block = [
        (linear(qkv, rows, width, 3 * width, parts=parts), [BLOCK_INPUT]),
        (attention(attend, rows, model.heads, width // model.heads, causal=False, dropout=model.dropout), [qkv]),
        (linear("attention.output.dense", rows, width, width, epilogue=model.drop), [attend]),
        (add("attention.output.add", (rows, width)), ["attention.output.dense", BLOCK_INPUT]),
        (norm("attention.output.LayerNorm", rows, width), ["attention.output.add"]),
        (
            linear("intermediate.dense", rows, width, inner, epilogue=(model.activation,)),
            ["attention.output.LayerNorm"],
        ),
        (linear("output.dense", rows, inner, width, epilogue=model.drop), ["intermediate.dense"]),
        (add("output.add", (rows, width)), ["output.dense", "attention.output.LayerNorm"]),
        (norm("output.LayerNorm", rows, width), ["output.add"]),
    ]
    end = builder.repeat("encoder.layer", model.layers, block, entry)
    head = "cls.predictions"
    tied_to = "embeddings.word_embeddings" if model.tied else None
    builder.chain(
        end,
        [
            linear(f"{head}.transform.dense", rows, width, width, epilogue=(model.activation,)),
            norm(f"{head}.transform.LayerNorm", rows, width),
            linear(f"{head}.decoder", rows, width, model.vocabulary, tied_to=tied_to),
            loss("loss", rows, model.vocabulary),
        ],
    )
    return builder.build(["the pooler and the next-sentence head (one token of each sequence) are left out"])


def llama(model: Transformer) -> LayerGraph:
    """LLaMA's decoder: pre-norm blocks with RMS norms, rotary positions, grouped key-value heads, gated MLP."""
    rows, width, inner = model.sequence, model.width, model.mlp_width
    kv_heads = model.kv_heads or model.heads
    head_dim = model.head_dim or width // model.heads
    queries, keys = model.heads * head_dim, kv_heads * head_dim
    attend, qkv, gate_up = "self_attn", "self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj"
    qkv_parts = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    gate_parts = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
    gated = (model.activation, "mul")
    attending = attention(attend, rows, model.heads, head_dim, kv_heads=kv_heads, causal=True, dropout=model.dropout)
    block = [
        (norm("input_layernorm", rows, width, statistics=1), [BLOCK_INPUT]),
        (
            linear(qkv, rows, width, queries + 2 * keys, parts=qkv_parts, bias=model.qkv_bias),
            ["input_layernorm"],
        ),
        (attending, [qkv]),
        (linear("self_attn.o_proj", rows, queries, width, bias=model.output_bias, epilogue=model.drop), [attend]),
        (add("add_1", (rows, width)), [BLOCK_INPUT, "self_attn.o_proj"]),
        (norm("post_attention_layernorm", rows, width, statistics=1), ["add_1"]),
        (
            linear(gate_up, rows, width, 2 * inner, parts=gate_parts, bias=model.mlp_bias, epilogue=gated),
            ["post_attention_layernorm"],
        ),
        (linear("mlp.down_proj", rows, inner, width, bias=model.mlp_bias, epilogue=model.drop), [gate_up]),
        (add("add_2", (rows, width)), ["add_1", "mlp.down_proj"]),
    ]
    builder = GraphBuilder(model.name, "sequence")
    entry = builder.add(embedding("embed_tokens", rows, model.vocabulary, width))
    end = builder.repeat("layers", model.layers, block, entry)
    tied_to = "embed_tokens" if model.tied else None
    builder.chain(
        end,
        [
            norm("norm", rows, width, statistics=1),
            linear("lm_head", rows, width, model.vocabulary, bias=False, tied_to=tied_to),
            loss("loss", rows, model.vocabulary),
        ],
    )
    return builder.build()
