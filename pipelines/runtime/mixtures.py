"""Mixtures of experts as plain OneFlow modules, as a user would write them (:mod:`autoddl.zoo.mixtures`).

The experts compute every token, and results that the router did not choose, or that found no slot, count nothing.  This is slow but
plain: the ranks' way through slots (:mod:`routing`) is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import HOST
from .load import load_oneflow
from .model_constants import ROTARY_BASE
from .models import (
    Llama,
    LlamaAttention,
    LlamaBiases,
    LlamaMLP,
    RMSNorm,
    causal_mask,
    merge_heads,
    nn,
    split_heads,
)
from .models import _attend as attend
from .models import _rotate as rotate

flow = load_oneflow()
functional: Any = flow.nn.functional

__all__ = ["ExpertSizes", "LatentSizes", "MixtureOfExperts"]


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a block's experts; see :class:`autoddl.zoo.mixtures.Mixture`."""

    experts: int
    per_token: int
    width: int
    capacity: int
    renormalises: bool = True
    sigmoid: bool = False
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    shared_width: int = 0
    has_shared_gate: bool = False


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of latent attention; see :class:`autoddl.zoo.mixtures.Mixture`."""

    query_rank: int
    latent_rank: int
    head_dim: int
    rotary_dim: int
    value_dim: int


class Experts(nn.Module):
    """Gated MLPs, of which a router's logits choose some for every token."""

    def __init__(self, width: int, sizes: ExpertSizes):
        super().__init__()
        num, inner = sizes.experts, sizes.width
        self.sizes = sizes
        self.gate_proj = nn.Parameter(flow.zeros(num, inner, width, device=HOST.device))
        self.up_proj = nn.Parameter(flow.zeros(num, inner, width, device=HOST.device))
        self.down_proj = nn.Parameter(flow.zeros(num, width, inner, device=HOST.device))

    def forward(self, x: Any, logits: Any) -> Any:
        sizes = self.sizes
        scores = flow.sigmoid(logits) if sizes.sigmoid else functional.softmax(logits, dim=-1)
        chosen, kept = choices(scores.detach().numpy(), sizes)
        shares = scores * flow.tensor(chosen, dtype=scores.dtype, device=x.device)
        if sizes.renormalises:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        shares = shares * flow.tensor(kept, dtype=scores.dtype, device=x.device) * sizes.scaling
        y = flow.zeros_like(x)
        for i in range(sizes.experts):
            gate, up = (flow.matmul(x, weight[i], transpose_b=True) for weight in (self.gate_proj, self.up_proj))
            result = flow.matmul(functional.silu(gate) * up, self.down_proj[i], transpose_b=True)
            y = y + shares[..., i : i + 1] * result
        return y


def choices(scores: np.ndarray, sizes: ExpertSizes) -> tuple[np.ndarray, np.ndarray]:
    """Return ones for the experts that each token chooses, and for those with a slot: (samples, rows, experts) each."""
    chosen, kept = np.zeros(scores.shape, np.float32), np.zeros(scores.shape, np.float32)
    for sample, of_sample in enumerate(scores):
        used = [0] * sizes.experts
        ranked = [_ranked(of_token, sizes) for of_token in of_sample.tolist()]
        for choice in range(sizes.per_token):
            for token, experts in enumerate(ranked):
                expert = experts[choice]
                chosen[sample, token, expert] = 1
                kept[sample, token, expert] = used[expert] < sizes.capacity
                used[expert] += 1
    return chosen, kept


def _ranked(scores: list[float], sizes: ExpertSizes) -> list[int]:
    """Return the experts that a token can choose, the best first."""
    length = sizes.experts // sizes.groups
    best = sorted(range(sizes.groups), key=lambda g: -max(scores[g * length : (g + 1) * length]))
    is_open = set(best[: sizes.groups_per_token])
    return sorted((i for i in range(sizes.experts) if i // length in is_open), key=lambda i: -scores[i])


class ExpertMLP(nn.Module):
    """A router, its experts, and shared experts that every token goes through."""

    def __init__(self, width: int, sizes: ExpertSizes, activation: str):
        super().__init__()
        self.gate = nn.Linear(width, sizes.experts, bias=False)
        self.experts = Experts(width, sizes)
        if sizes.shared_width:
            self.shared_experts = LlamaMLP(width, sizes.shared_width, activation, bias=False)
        if sizes.has_shared_gate:
            self.shared_gate = nn.Linear(width, 1, bias=False)
        self.sizes = sizes

    def forward(self, x: Any) -> Any:
        y = self.experts(x, self.gate(x))
        if self.sizes.shared_width == 0:
            return y
        shared = self.shared_experts(x)
        if self.sizes.has_shared_gate:
            shared = shared * flow.sigmoid(self.shared_gate(x))
        return y + shared


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values are projected from low ranks, and whose heads share the rotated features of keys."""

    def __init__(self, width: int, heads: int, sizes: LatentSizes):
        super().__init__()
        self.heads, self.sizes = heads, sizes
        queries, rank = heads * (sizes.head_dim + sizes.rotary_dim), sizes.latent_rank
        if sizes.query_rank:
            self.q_a_proj = nn.Linear(width, sizes.query_rank, bias=False)
            self.q_a_layernorm = RMSNorm(sizes.query_rank)
            self.q_b_proj = nn.Linear(sizes.query_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(width, queries, bias=False)
        self.kv_a_proj = nn.Linear(width, rank, bias=False)
        self.kv_a_layernorm = RMSNorm(rank)
        self.kv_b_proj = nn.Linear(rank, heads * (sizes.head_dim + sizes.value_dim), bias=False)
        self.k_rope_proj = nn.Linear(width, sizes.rotary_dim, bias=False)
        self.o_proj = nn.Linear(heads * sizes.value_dim, width, bias=False)

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        size = self.sizes.head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.sizes.query_rank else self.q_proj(x)
        query = split_heads(q, self.heads)
        key_value = split_heads(self.kv_b_proj(self.kv_a_layernorm(self.kv_a_proj(x))), self.heads)
        shared = rotate(self.k_rope_proj(x).unsqueeze(1), cosine, sine)
        shared = shared.expand(x.shape[0], self.heads, x.shape[1], self.sizes.rotary_dim)
        query = flow.cat([query[..., :size], rotate(query[..., size:], cosine, sine)], dim=-1)
        key = flow.cat([key_value[..., :size], shared], dim=-1)
        attended = attend(query, key, key_value[..., size:], causal_mask(x.shape[1], x.device))
        return self.o_proj(merge_heads(attended))


class MixtureBlock(nn.Module):
    def __init__(self, width: int, attention: Any, mlp: Any):
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = mlp

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))


class MixtureOfExperts(Llama):
    """A LLaMA whose blocks have experts in place of MLPs, except for the first ones."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        inner: int,
        sizes: ExpertSizes,
        *,
        latent: LatentSizes | None = None,
        dense_layers: int = 0,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        activation: str = "silu",
        biases: LlamaBiases | None = None,
        tied: bool = False,
        theta: float = ROTARY_BASE,
    ):
        super().__init__(0, width, heads, vocabulary, inner, head_dim=head_dim, tied=tied, theta=theta)
        biases = biases or LlamaBiases()
        if latent:
            self.head_dim = latent.rotary_dim  # the features that are rotated

        def attention() -> Any:
            if latent:
                return LatentAttention(width, heads, latent)
            return LlamaAttention(width, heads, kv_heads or heads, self.head_dim, biases)

        self.layers = nn.ModuleList(
            [
                MixtureBlock(
                    width,
                    attention(),
                    LlamaMLP(width, inner, activation, biases.mlp)
                    if i < dense_layers
                    else ExpertMLP(width, sizes, activation),
                )
                for i in range(layers)
            ]
        )
