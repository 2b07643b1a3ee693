"""Readers of the configurations of decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..decoders import Decoder, DecoderNames
from ..transformers import Transformer
from .config import Config

__all__ = ["DEFAULTS", "READERS", "common_sizes"]

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN2 = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_GEMMA = {
    **_LLAMA,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_SMALL_NAMES = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}

#: Defaults of the configuration classes.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _SMALL_NAMES,
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **_GEMMA2,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "phi3": {
        **_LLAMA,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
    },
    "phi": {
        **_LLAMA,
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
    "stablelm": {
        **_LLAMA,
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "partial_rotary_factor": 0.25,
    },
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    "gptj": {
        **_SMALL_NAMES,
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
        "tie_word_embeddings": False,
    },
    "gpt_neo": {
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "intermediate_size": None,
        "window_size": 256,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    "gpt_bigcode": {**_SMALL_NAMES, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    "opt": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": None,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    "bloom": {
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": 2048,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "num_kv_heads": None,
        "ffn_hidden_size": None,
        "num_ln_in_parallel_attn": None,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "activation": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}

_NEOX = DecoderNames(
    tokens="embed_in",
    attend="attention",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="final_layer_norm",
    head="embed_out",
)
_PHI = DecoderNames(
    output="self_attn.dense", norms=("input_layernorm",), up=("mlp.fc1",), down="mlp.fc2", final_norm="final_layernorm"
)
_GPT = DecoderNames(
    tokens="wte",
    blocks="h",
    attend="attn",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    norms=("ln_1",),
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    final_norm="ln_f",
)
_GPT_NEO = replace(
    _GPT,
    attend="attn.attention",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    output="attn.attention.out_proj",
    norms=("ln_1", "ln_2"),
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    positions="wpe",
)
_BIGCODE = replace(_GPT_NEO, attend="attn", qkv=("attn.c_attn",), output="attn.c_proj")
_OPT = DecoderNames(
    output="self_attn.out_proj",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    up=("fc1",),
    down="fc2",
    final_norm="final_layer_norm",
    positions="embed_positions",
)
_BLOOM = replace(
    _NEOX,
    tokens="word_embeddings",
    blocks="h",
    attend="self_attention",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    final_norm="ln_f",
    head="lm_head",
    embedding_norm="word_embeddings_layernorm",
)
_FALCON = replace(_BLOOM, embedding_norm="")
_SANDWICH = DecoderNames(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
)


def common_sizes(config: Config) -> dict[str, Any]:
    """The sizes whose fields have the names that most configurations use."""
    return {
        "name": config.name,
        "layers": config.count("num_hidden_layers", "layers"),
        "width": config.count("hidden_size", "width"),
        "heads": config.count("num_attention_heads", "heads"),
        "sequence": config.count("max_position_embeddings", "sequence"),
        "vocabulary": config.count("vocab_size", "vocabulary"),
        "tied": config.flag("tie_word_embeddings"),
    }


def _llama_sizes(config: Config) -> dict[str, Any]:
    """The sizes of configurations like LLaMA's, without biases."""
    config.note_rotary()
    return {
        **common_sizes(config),
        "intermediate": config.count("intermediate_size", "intermediate"),
        "kv_heads": config.count("num_key_value_heads", "kv_heads"),
        "head_dim": config.count("head_dim", "head_dim"),
        "activation": config.activation("hidden_act"),
    }


def _small_names(config: Config) -> dict[str, Any]:
    """The sizes of configurations with GPT-2's names of fields."""
    config.refuse("add_cross_attention", False)
    width = config.count("n_embd", "width")
    return {
        "name": config.name,
        "layers": config.count("n_layer", "layers"),
        "width": width,
        "heads": config.count("n_head", "heads"),
        "sequence": config.count("n_positions", "sequence"),
        "vocabulary": config.count("vocab_size", "vocabulary"),
        "intermediate": config.count("n_inner", "intermediate") or 4 * width,
        "activation": config.activation("activation_function"),
        "tied": config.flag("tie_word_embeddings"),
    }


def _gpt2(config: Config) -> Transformer:
    sizes = _small_names(config)
    return Transformer(**sizes, positions=sizes["sequence"])


def _llama(config: Config) -> Transformer:
    bias = config.flag("attention_bias")
    sizes = _llama_sizes(config)
    if config.kind == "mistral":
        config.note_window("sliding_window", "all layers")
    if config.kind == "qwen2" and config.flag("use_sliding_window"):
        config.note_window("sliding_window", "the later layers")
    return Transformer(
        **sizes, qkv_bias=bias or config.kind == "qwen2", output_bias=bias, mlp_bias=config.flag("mlp_bias")
    )


def _phi3(config: Config) -> Transformer:
    sizes = _llama_sizes(config)
    config.note_window("sliding_window", "all layers")
    config.note_partial_rotary(config.get("partial_rotary_factor"))
    return Transformer(**sizes)


def _gemma(config: Config) -> Transformer:
    bias = config.flag("attention_bias")
    sizes = _llama_sizes(config)
    if config.get("hidden_activation") is not None:
        sizes["activation"] = config.activation("hidden_activation")
    config.notes.append(_SCALED)
    return Transformer(**sizes, qkv_bias=bias, output_bias=bias)


_SCALED = "the multiplication of the token embeddings by the square root of the width is left out"


def _gemma2(config: Config) -> Decoder:
    bias = config.flag("attention_bias")
    sizes = {**_llama_sizes(config), "activation": config.activation("hidden_activation")}
    config.notes.append(_SCALED)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field) is not None:
            config.notes.append(f"soft-capping ({field}) is left out")
    is_third = config.kind == "gemma3_text"
    config.note_window("sliding_window", "five of six layers" if is_third else "every second layer")
    return Decoder(**sizes, names=_SANDWICH, qkv_bias=bias, output_bias=bias, query_key_norm=is_third)


def _qwen3(config: Config) -> Decoder:
    bias = config.flag("attention_bias")
    sizes = _llama_sizes(config)
    if config.flag("use_sliding_window"):
        config.note_window("sliding_window", "the later layers")
    return Decoder(**sizes, names=DecoderNames(), qkv_bias=bias, output_bias=bias, query_key_norm=True)


def _stablelm(config: Config) -> Decoder:
    config.refuse("qk_layernorm", False)
    config.refuse("use_parallel_residual", False)
    config.note_partial_rotary(config.get("partial_rotary_factor"))
    biases: dict[str, Any] = {"qkv_bias": config.flag("use_qkv_bias"), "norm_bias": True}
    return Decoder(**_llama_sizes(config), names=DecoderNames(), statistics=2, **biases)


#: Layer norms and biases of all projections of the blocks.
_WITH_BIASES: Mapping[str, Any] = {
    "statistics": 2,
    "norm_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
}


def _phi(config: Config) -> Decoder:
    config.refuse("qk_layernorm", False)
    config.note_partial_rotary(config.get("partial_rotary_factor"))
    return Decoder(**_llama_sizes(config), **_WITH_BIASES, names=_PHI, parallel=True, head_bias=True)


def _gpt_neox(config: Config) -> Decoder:
    config.note_rotary()
    config.note_partial_rotary(config.get("rotary_pct"))
    bias = config.flag("attention_bias")
    return Decoder(
        **common_sizes(config),
        **{**_WITH_BIASES, "qkv_bias": bias, "output_bias": bias},
        names=_NEOX,
        intermediate=config.count("intermediate_size", "intermediate"),
        activation=config.activation("hidden_act"),
        parallel=config.flag("use_parallel_residual"),
    )


def _gptj(config: Config) -> Decoder:
    sizes = _small_names(config)
    rotated = config.count("rotary_dim", "head_dim")
    if rotated * sizes["heads"] != sizes["width"]:
        config.note_partial_rotary(rotated)
    return Decoder(**sizes, names=_GPT, statistics=2, norm_bias=True, mlp_bias=True, head_bias=True, parallel=True)


def _gpt_neo(config: Config) -> Decoder:
    width, positions = config.count("hidden_size", "width"), config.count("max_position_embeddings", "sequence")
    config.note_window("window_size", "the local ones of its layers")
    return Decoder(
        **{**_WITH_BIASES, "qkv_bias": False},
        name=config.name,
        layers=config.count("num_layers", "layers"),
        width=width,
        heads=config.count("num_heads", "heads"),
        sequence=positions,
        positions=positions,
        vocabulary=config.count("vocab_size", "vocabulary"),
        intermediate=config.count("intermediate_size", "intermediate") or 4 * width,
        names=_GPT_NEO,
        activation=config.activation("activation_function"),
        tied=config.flag("tie_word_embeddings"),
    )


def _gpt_bigcode(config: Config) -> Decoder:
    sizes = _small_names(config)
    kv_heads = 1 if config.flag("multi_query") else 0
    return Decoder(**sizes, **_WITH_BIASES, names=_BIGCODE, kv_heads=kv_heads, positions=sizes["sequence"])


def _opt(config: Config) -> Decoder:
    config.refuse("do_layer_norm_before", True)
    config.refuse("_remove_final_layer_norm", False)
    config.refuse("layer_norm_elementwise_affine", True)
    sizes = common_sizes(config)
    config.refuse("word_embed_proj_dim", sizes["width"], None)
    bias = config.flag("enable_bias")
    return Decoder(
        **sizes,
        names=_OPT,
        intermediate=config.count("ffn_dim", "intermediate"),
        positions=sizes["sequence"] + 2,  # the first two rows of the table are for padding
        activation=config.activation("activation_function"),
        statistics=2,
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def _bloom(config: Config) -> Decoder:
    width = config.count("hidden_size", "width")
    config.notes.append("the linear biases of attention (ALiBi) are left out")
    return Decoder(
        **_WITH_BIASES,
        name=config.name,
        layers=config.count("n_layer", "layers"),
        width=width,
        heads=config.count("n_head", "heads"),
        sequence=config.count("seq_length", "sequence"),
        vocabulary=config.count("vocab_size", "vocabulary"),
        intermediate=4 * width,
        names=_BLOOM,
        activation="gelu",
        tied=config.flag("tie_word_embeddings"),
    )


def _falcon(config: Config) -> Decoder:
    sizes = common_sizes(config)
    is_new, bias = config.flag("new_decoder_architecture"), config.flag("bias")
    parallel = is_new or config.flag("parallel_attn")
    if config.flag("alibi"):
        config.notes.append("the linear biases of attention (ALiBi) are left out")
    config.note_rotary()
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if is_new:
        kv_heads = config.count("num_kv_heads", "kv_heads") or sizes["heads"]
        config.refuse("num_ln_in_parallel_attn", 2, 1, None)
        norms = ("input_layernorm",) if config.get("num_ln_in_parallel_attn") == 1 else ("ln_attn", "ln_mlp")
    else:
        kv_heads = 1 if config.flag("multi_query") else sizes["heads"]
        norms = norms[:1] if parallel else norms
    return Decoder(
        **sizes,
        names=replace(_FALCON, norms=norms),
        kv_heads=kv_heads,
        intermediate=config.count("ffn_hidden_size", "intermediate") or 4 * sizes["width"],
        activation=config.activation("activation"),
        parallel=parallel,
        statistics=2,
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


#: Family (:data:`autoddl.zoo.named.BUILDERS`) and reader of each ``model_type``.
READERS: Mapping[str, tuple[str, Any]] = {
    "gpt2": ("gpt", _gpt2),
    "llama": ("llama", _llama),
    "mistral": ("llama", _llama),
    "qwen2": ("llama", _llama),
    "gemma": ("llama", _gemma),
    "phi3": ("llama", _phi3),
    "qwen3": ("decoder", _qwen3),
    "gemma2": ("decoder", _gemma2),
    "gemma3_text": ("decoder", _gemma2),
    "phi": ("decoder", _phi),
    "stablelm": ("decoder", _stablelm),
    "gpt_neox": ("decoder", _gpt_neox),
    "gptj": ("decoder", _gptj),
    "gpt_neo": ("decoder", _gpt_neo),
    "gpt_bigcode": ("decoder", _gpt_bigcode),
    "opt": ("decoder", _opt),
    "bloom": ("decoder", _bloom),
    "falcon": ("decoder", _falcon),
}
