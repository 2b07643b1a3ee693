"""Mixtures of experts: decoders like LLaMA's, whose MLPs are experts; by name and layer by layer.

A block is one of :func:`.transformers.llama`, with a router, experts (:mod:`autoddl.costmodel.kinds.experts`) and perhaps shared
experts, one gated MLP that every token goes through, in place of the MLP:

    norm -> router (linear) -> experts -> add          shared experts: norm -> gate and up -> down (-> token gate) -> add

The first blocks may have dense MLPs.  Sizes are those of the models' published ``config.json``; ``tests/zoo/test_mixtures.py`` has
their numbers of parameters, with sources.  Auxiliary losses that balance the load are left out; a note in the graph says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from .layers import (
    BLOCK_INPUT,
    GraphBuilder,
    add,
    attention,
    capacity_of,
    embedding,
    experts,
    latent_attention,
    linear,
    loss,
    norm,
    token_gate,
)
from .transformers import Transformer

__all__ = ["CAPACITY_FACTOR", "MIXTURES", "Mixture", "mixture", "sized_mixture"]

#: Slots of an expert as a multiple of the tokens that choose it if the load is balanced (GShard and Switch use 1.25 or 2).
CAPACITY_FACTOR = 1.25
#: Layers of a block's template, each with the roles that it reads.
Template = list[tuple[Layer, Sequence[str]]]


@dataclass(frozen=True)
class Mixture(Transformer):
    """The sizes of a mixture of experts.

    Attributes:
        experts: number of experts of a block.
        per_token: number of experts that a token chooses.
        expert_width: features inside an expert; ``intermediate`` are those inside a dense MLP.
        shared_width: features inside the shared experts together; 0: there are none.
        has_shared_gate: whether the shared experts' result is multiplied by the sigmoid of one more feature of the token.
        dense_layers: number of first blocks with dense MLPs.
        renormalises: whether the shares of a token's experts sum to 1.
        sigmoid: whether shares are sigmoids of the logits, not their softmax.
        scaling: thousandths of the factor of the shares.
        groups, groups_per_token: number of groups of experts, and of those from which a token can choose.
        query_rank: features of the low rank of queries of latent attention; 0: they have none.
        latent_rank: features of the low rank of keys and values; 0: attention is that of LLaMA. With latent attention,
            ``head_dim`` are the features of a query without position.
        rotary_dim: rotated features of a query, and of the key that all heads share.
        value_dim: features of a value.
        capacity_factor: see :func:`autoddl.costmodel.kinds.experts.capacity_of`.
    """

    experts: int = 8
    per_token: int = 2
    expert_width: int = 0
    shared_width: int = 0
    has_shared_gate: bool = False
    dense_layers: int = 0
    renormalises: bool = True
    sigmoid: bool = False
    scaling: int = 1000
    groups: int = 1
    groups_per_token: int = 1
    query_rank: int = 0
    latent_rank: int = 0
    rotary_dim: int = 0
    value_dim: int = 0
    capacity_factor: float = CAPACITY_FACTOR

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.per_token <= self.experts:
            raise UserError(
                f"{self.name}: a token chooses {self.per_token} of {self.experts} experts, should be 1 to all"
            )
        if not 0 <= self.dense_layers < self.layers:
            raise UserError(
                f"{self.name}: {self.dense_layers} of {self.layers} blocks are dense; at least one should have experts"
            )

    @property
    def capacity(self) -> int:
        """Slots of an expert for a sequence."""
        return capacity_of(self.capacity_factor, self.per_token, self.sequence, self.experts)


def mixture(model: Transformer) -> LayerGraph:
    """A decoder with experts."""
    assert isinstance(model, Mixture)
    rows, width = model.sequence, model.width
    builder = GraphBuilder(model.name, "sequence")
    end = builder.add(embedding("embed_tokens", rows, model.vocabulary, width))
    if model.dense_layers:
        template = [*_attention(model), *_mlp(model, "mlp", model.mlp_width), _sum(model, "mlp.down_proj")]
        end = builder.repeat("layers", model.dense_layers, template, end)
    template = [*_attention(model), *_experts(model)]
    end = builder.repeat("layers", model.layers - model.dense_layers, template, end, start=model.dense_layers)
    tied_to = "embed_tokens" if model.tied else None
    builder.chain(
        end,
        [
            norm("norm", rows, width, statistics=1),
            linear("lm_head", rows, width, model.vocabulary, bias=False, tied_to=tied_to),
            loss("loss", rows, model.vocabulary),
        ],
    )
    return builder.build(
        [
            f"experts have {model.capacity} slots for a sequence, {model.capacity_factor:g} times the tokens of a balanced load; "
            "choices beyond are dropped",
            "auxiliary losses that balance the load are left out",
        ]
    )


def _attention(model: Mixture) -> Template:
    """The layers of a block up to the norm before the MLP."""
    rows, width = model.sequence, model.width
    if model.latent_rank:
        return _latent_attention(model)
    kv_heads, head_dim = model.kv_heads or model.heads, model.head_dim or width // model.heads
    queries, keys = model.heads * head_dim, kv_heads * head_dim
    qkv = "self_attn.q_proj+k_proj+v_proj"
    parts = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    attending = attention(
        "self_attn", rows, model.heads, head_dim, kv_heads=kv_heads, causal=True, dropout=model.dropout
    )
    return [
        (norm("input_layernorm", rows, width, statistics=1), [BLOCK_INPUT]),
        (linear(qkv, rows, width, queries + 2 * keys, parts=parts, bias=model.qkv_bias), ["input_layernorm"]),
        (attending, [qkv]),
        (
            linear("self_attn.o_proj", rows, queries, width, bias=model.output_bias, epilogue=model.drop),
            ["self_attn"],
        ),
        (add("add_1", (rows, width)), [BLOCK_INPUT, "self_attn.o_proj"]),
        (norm("post_attention_layernorm", rows, width, statistics=1), ["add_1"]),
    ]


def _latent_attention(model: Mixture) -> Template:
    rows, width, heads, rank = model.sequence, model.width, model.heads, model.latent_rank
    queries, entry, path = heads * (model.head_dim + model.rotary_dim), "input_layernorm", "self_attn"
    template: Template = [(norm(entry, rows, width, statistics=1), [BLOCK_INPUT])]
    q = f"{path}.q_b_proj" if model.query_rank else f"{path}.q_proj"
    if model.query_rank:
        q_a, q_norm = f"{path}.q_a_proj", f"{path}.q_a_layernorm"
        template += [
            (linear(q_a, rows, width, model.query_rank, bias=False), [entry]),
            (norm(q_norm, rows, model.query_rank, statistics=1), [q_a]),
            (linear(q, rows, model.query_rank, queries, bias=False), [q_norm]),
        ]
    else:
        template.append((linear(q, rows, width, queries, bias=False), [entry]))
    kv_a, kv_norm, kv_b, shared = (f"{path}.{n}" for n in ("kv_a_proj", "kv_a_layernorm", "kv_b_proj", "k_rope_proj"))
    core = latent_attention(
        path, rows, heads, head_dim=model.head_dim, rotary_dim=model.rotary_dim, value_dim=model.value_dim
    )
    return [
        *template,
        (linear(kv_a, rows, width, rank, bias=False), [entry]),
        (norm(kv_norm, rows, rank, statistics=1), [kv_a]),
        (linear(kv_b, rows, rank, heads * (model.head_dim + model.value_dim), bias=False), [kv_norm]),
        (linear(shared, rows, width, model.rotary_dim, bias=False), [entry]),
        (core, [q, kv_b, shared]),
        (linear(f"{path}.o_proj", rows, heads * model.value_dim, width, bias=False), [path]),
        (add("add_1", (rows, width)), [BLOCK_INPUT, f"{path}.o_proj"]),
        (norm("post_attention_layernorm", rows, width, statistics=1), ["add_1"]),
    ]


def _mlp(model: Mixture, path: str, inner: int) -> Template:
    rows, width, gate_up = model.sequence, model.width, f"{path}.gate_proj+up_proj"
    parts = [(f"{path}.gate_proj", inner), (f"{path}.up_proj", inner)]
    gated = (model.activation, "mul")
    return [
        (
            linear(gate_up, rows, width, 2 * inner, parts=parts, bias=False, epilogue=gated),
            ["post_attention_layernorm"],
        ),
        (linear(f"{path}.down_proj", rows, inner, width, bias=False), [gate_up]),
    ]


def _sum(model: Mixture, *terms: str) -> tuple[Layer, Sequence[str]]:
    return add("add_2", (model.sequence, model.width)), ["add_1", *terms]


def _experts(model: Mixture) -> Template:
    rows, width = model.sequence, model.width
    options: dict[str, Any] = {"sigmoid": 1} if model.sigmoid else {}
    if model.scaling != 1000:
        options["scaling"] = model.scaling
    if model.groups > 1:
        options.update(groups=model.groups, groups_per_token=model.groups_per_token)
    layer = experts(
        "mlp.experts",
        rows,
        width,
        model.expert_width,
        num=model.experts,
        per_token=model.per_token,
        capacity=model.capacity,
        renormalises=model.renormalises,
        **options,
    )
    template: Template = [
        (linear("mlp.gate", rows, width, model.experts, bias=False), ["post_attention_layernorm"]),
        (layer, ["post_attention_layernorm", "mlp.gate"]),
    ]
    terms = ["mlp.experts"]
    if model.shared_width:
        template += _mlp(model, "mlp.shared_experts", model.shared_width)
        terms.append("mlp.shared_experts.down_proj")
    if model.has_shared_gate:
        template.append((token_gate("mlp.shared_gate", rows, width), ["post_attention_layernorm", terms.pop()]))
        terms.append("mlp.shared_gate")
    return [*template, _sum(model, *terms)]


def sized_mixture(model: Transformer) -> Mixture:
    """A mixture of the sizes of a LLaMA: every token goes to 2 of 8 experts, which are as large as its MLP."""
    fields = {name: getattr(model, name) for name in Transformer.__dataclass_fields__}
    return Mixture(**{**fields, "expert_width": model.mlp_width})


def _named(
    name: str,
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    *,
    sequence: int = 4096,
    **others: Any,
) -> Mixture:
    return Mixture(name, layers, width, heads, sequence, vocabulary, activation="silu", tied=False, **others)


def _deepseek(name: str, layers: int, width: int, heads: int, vocabulary: int, **others: Any) -> Mixture:
    """A DeepSeek with latent attention: all have these sizes of heads."""
    latent = {"head_dim": 128, "rotary_dim": 64, "value_dim": 128, "latent_rank": 512}
    return _named(name, layers, width, heads, vocabulary, **latent, **others)


_MIXTRAL = _named(
    "mixtral-8x7b", 32, 4096, 32, 32000, kv_heads=8, intermediate=14336, expert_width=14336, experts=8, per_token=2
)
#: Models by name: Mixtral (Jiang et al. 2024), with a sequence of 4096 as an example (they allow up to 32768 or 65536).
MIXTURES: tuple[Mixture, ...] = (
    _MIXTRAL,
    replace(
        _MIXTRAL,
        name="mixtral-8x22b",
        layers=56,
        width=6144,
        heads=48,
        intermediate=16384,
        expert_width=16384,
    ),
    _named(
        "deepseek-moe-16b",
        28,
        2048,
        16,
        102400,
        intermediate=10944,
        expert_width=1408,
        experts=64,
        per_token=6,
        shared_width=2816,
        dense_layers=1,
        renormalises=False,
    ),
    _named(
        "qwen1.5-moe-a2.7b",
        24,
        2048,
        16,
        151936,
        intermediate=5632,
        qkv_bias=True,
        experts=60,
        per_token=4,
        expert_width=1408,
        shared_width=5632,
        has_shared_gate=True,
        renormalises=False,
    ),
    _named(
        "qwen2-57b-a14b",
        28,
        3584,
        28,
        151936,
        kv_heads=4,
        intermediate=18944,
        qkv_bias=True,
        experts=64,
        per_token=8,
        expert_width=2560,
        shared_width=20480,
        has_shared_gate=True,
        renormalises=False,
    ),
    _deepseek(
        "deepseek-v2-lite",
        27,
        2048,
        16,
        102400,
        intermediate=10944,
        experts=64,
        per_token=6,
        expert_width=1408,
        shared_width=2816,
        dense_layers=1,
        renormalises=False,
    ),
    _deepseek(
        "deepseek-v2",
        60,
        5120,
        128,
        102400,
        query_rank=1536,
        intermediate=12288,
        experts=160,
        per_token=6,
        expert_width=1536,
        shared_width=3072,
        dense_layers=1,
        renormalises=False,
        scaling=16000,
        groups=8,
        groups_per_token=3,
    ),
    _deepseek(
        "deepseek-v3",
        61,
        7168,
        128,
        129280,
        query_rank=1536,
        intermediate=18432,
        experts=256,
        per_token=8,
        expert_width=2048,
        shared_width=2048,
        dense_layers=3,
        sigmoid=True,
        scaling=2500,
        groups=8,
        groups_per_token=4,
    ),
)
