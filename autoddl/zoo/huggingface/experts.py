"""Configurations of mixtures of experts: Mixtral, Qwen-MoE, DeepSeek-MoE, V2 and V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoddl.costmodel.limits import MAX_SIZES

from ..mixtures import Mixture
from .causal import common_sizes
from .config import Config

__all__ = ["DEFAULTS", "READERS"]

_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "head_dim": None}
_MIXTRAL = {
    **_COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_QWEN2_MOE = {
    **_COMMON,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "qkv_bias": True,
}
_DEEPSEEK = {
    **_COMMON,
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "num_experts_per_tok": None,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_V3 = {
    **_DEEPSEEK,
    **_LATENT,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "max_position_embeddings": 4096,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
}

#: The defaults of each ``model_type``; None: derived from other fields, or has to be given.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN2_MOE,
    "deepseek": _DEEPSEEK,
    "deepseek_v2": {**_DEEPSEEK, **_LATENT},
    "deepseek_v3": _DEEPSEEK_V3,
}


def _common(config: Config) -> dict[str, Any]:
    config.refuse("hidden_act", "silu", "swish")
    config.note_rotary()
    return {
        **common_sizes(config),
        "intermediate": config.count("intermediate_size", "intermediate"),
        "activation": "silu",
        "per_token": _given(config, "num_experts_per_tok"),
    }


def _grouped_heads(config: Config) -> dict[str, Any]:
    return {
        "kv_heads": config.count("num_key_value_heads", "kv_heads"),
        "head_dim": config.count("head_dim", "head_dim"),
    }


def _mixtral(config: Config) -> Mixture:
    common = _common(config)
    config.note_window("sliding_window", "all layers")
    num = _given(config, "num_local_experts")
    return Mixture(**common, **_grouped_heads(config), experts=num, expert_width=common["intermediate"])


def _qwen2_moe(config: Config) -> Mixture:
    common = _common(config)
    config.refuse("decoder_sparse_step", 1)
    config.refuse("mlp_only_layers", [], None)
    return Mixture(
        **common,
        **_grouped_heads(config),
        qkv_bias=config.flag("qkv_bias"),
        experts=_given(config, "num_experts"),
        expert_width=_given(config, "moe_intermediate_size"),
        shared_width=_given(config, "shared_expert_intermediate_size"),
        has_shared_gate=True,
        renormalises=config.flag("norm_topk_prob"),
    )


def _deepseek(config: Config) -> Mixture:
    common = _common(config)
    config.refuse("moe_layer_freq", 1)
    config.refuse("attention_bias", False)
    config.refuse("scoring_func", "sigmoid" if config.kind == "deepseek_v3" else "softmax")
    width = _given(config, "moe_intermediate_size")
    sizes: dict[str, Any] = {
        "experts": _given(config, "n_routed_experts"),
        "expert_width": width,
        "shared_width": config.count("n_shared_experts", "heads", minimum=0) * width,
        "dense_layers": config.count("first_k_dense_replace", "layers", minimum=0),
        "renormalises": config.flag("norm_topk_prob"),
    }
    if config.kind == "deepseek":
        return Mixture(**common, **sizes, kv_heads=config.count("num_key_value_heads", "kv_heads"))
    scaling = config.get("routed_scaling_factor")
    if isinstance(scaling, bool) or not isinstance(scaling, (int, float)) or not 0 < scaling <= 1000:
        raise config.fault("routed_scaling_factor", scaling, "a number above 0, at most 1000")
    if config.get("topk_method") != "greedy":
        sizes.update(groups=_given(config, "n_group"), groups_per_token=_given(config, "topk_group"))
    return Mixture(
        **common,
        **sizes,
        sigmoid=config.kind == "deepseek_v3",
        scaling=round(1000 * scaling),
        query_rank=config.count("q_lora_rank", "width") if config.get("q_lora_rank") is not None else 0,
        latent_rank=_given(config, "kv_lora_rank"),
        head_dim=_given(config, "qk_nope_head_dim"),
        rotary_dim=_given(config, "qk_rope_head_dim"),
        value_dim=_given(config, "v_head_dim"),
    )


def _given(config: Config, name: str) -> int:
    """Return a number that has no default, or that has one and is not null."""
    number = config.count(name, "intermediate")
    if not number:
        raise config.fault(name, None, f"a whole number from 1 to {MAX_SIZES['intermediate']}")
    return number


#: The family and the reader of each ``model_type``.
READERS: Mapping[str, tuple[str, Any]] = {
    "mixtral": ("moe", _mixtral),
    "qwen2_moe": ("moe", _qwen2_moe),
    "deepseek": ("moe", _deepseek),
    "deepseek_v2": ("moe", _deepseek),
    "deepseek_v3": ("moe", _deepseek),
}
