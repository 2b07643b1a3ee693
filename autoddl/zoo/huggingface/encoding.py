"""Readers of the configurations of encoders, and of T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoddl.costmodel.limits import MAX_SIZES

from ..encoders import VisionTransformer
from ..t5 import T5
from ..transformers import Transformer
from .config import ACTIVATIONS, Config

__all__ = ["DEFAULTS", "READERS"]

_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "is_decoder": False,
}
_ROBERTA = {**_BERT, "vocab_size": 50265, "pad_token_id": 1}

#: Defaults of the configuration classes.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": {**_ROBERTA, "vocab_size": 30522},
    "distilbert": {
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "n_layers": 6,
        "n_heads": 12,
        "dim": 768,
        "hidden_dim": 3072,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    "t5": {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": None,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "feed_forward_proj": "relu",
        "n_positions": 512,
        "tie_word_embeddings": True,
    },
    "vit": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "qkv_bias": True,
        "id2label": None,
        "num_labels": None,
    },
}


def _bert(config: Config) -> Transformer:
    config.refuse("add_cross_attention", False)
    config.refuse("is_decoder", False)
    config.refuse("position_embedding_type", "absolute")
    positions = config.count("max_position_embeddings", "sequence")
    sequence = positions
    if config.kind != "bert":  # RoBERTa's positions begin after the padding token
        pad = config.count("pad_token_id", "vocabulary", minimum=0)
        sequence = positions - pad - 1
        if sequence < 1:
            raise config.fault("max_position_embeddings", positions, f"at least {pad + 2}: {pad + 1} are never used")
    return Transformer(
        name=config.name,
        layers=config.count("num_hidden_layers", "layers"),
        width=config.count("hidden_size", "width"),
        heads=config.count("num_attention_heads", "heads"),
        sequence=sequence,
        positions=positions,
        vocabulary=config.count("vocab_size", "vocabulary"),
        intermediate=config.count("intermediate_size", "intermediate"),
        types=config.count("type_vocab_size", "types"),
        activation=config.activation("hidden_act"),
        tied=config.flag("tie_word_embeddings"),
    )


def _distilbert(config: Config) -> Transformer:
    positions = config.count("max_position_embeddings", "sequence")
    return Transformer(
        name=config.name,
        layers=config.count("n_layers", "layers"),
        width=config.count("dim", "width"),
        heads=config.count("n_heads", "heads"),
        sequence=positions,
        positions=positions,
        vocabulary=config.count("vocab_size", "vocabulary"),
        intermediate=config.count("hidden_dim", "intermediate"),
        activation=config.activation("activation"),
        tied=config.flag("tie_word_embeddings"),
    )


def _t5(config: Config) -> T5:
    value = config.get("feed_forward_proj")
    words = value.split("-") if isinstance(value, str) else []
    gated = words[:1] == ["gated"] and len(words) == 2
    activation = ACTIVATIONS.get(words[-1]) if gated or len(words) == 1 else None
    if activation is None:
        known = ", ".join(ACTIVATIONS)
        raise config.fault("feed_forward_proj", value, f"one of {known}, or one of them after 'gated-'")
    layers = config.count("num_layers", "layers")
    return T5(
        name=config.name,
        layers=layers,
        decoder_layers=config.count("num_decoder_layers", "layers") or layers,
        width=config.count("d_model", "width"),
        heads=config.count("num_heads", "heads"),
        head_dim=config.count("d_kv", "head_dim"),
        intermediate=config.count("d_ff", "intermediate"),
        sequence=config.count("n_positions", "sequence"),
        vocabulary=config.count("vocab_size", "vocabulary"),
        buckets=config.count("relative_attention_num_buckets", "positions"),
        activation=activation,
        gated=gated,
        tied=config.flag("tie_word_embeddings"),
    )


def _vit(config: Config) -> VisionTransformer:
    config.notes.append("the pooler, which the classifier does not read, is left out")
    return VisionTransformer(
        name=config.name,
        layers=config.count("num_hidden_layers", "layers"),
        width=config.count("hidden_size", "width"),
        heads=config.count("num_attention_heads", "heads"),
        intermediate=config.count("intermediate_size", "intermediate"),
        image=config.count("image_size", "width"),
        patch=config.count("patch_size", "width"),
        channels=config.count("num_channels", "width"),
        classes=_num_classes(config),
        activation=config.activation("hidden_act"),
        qkv_bias=config.flag("qkv_bias"),
    )


def _num_classes(config: Config) -> int:
    """The entries of id2label, or num_labels; 1000 as of ImageNet if there is neither, with a note."""
    labels = config.get("id2label")
    if labels is not None:
        if not isinstance(labels, dict) or not 1 <= len(labels) <= MAX_SIZES["vocabulary"]:
            raise config.fault("id2label", labels, "an object with an entry for each class")
        return len(labels)
    classes = config.count("num_labels", "vocabulary")
    if not classes:
        config.notes.append("the classifier has 1,000 classes; the configuration has neither id2label nor num_labels")
    return classes or 1000


#: Family (:data:`autoddl.zoo.named.BUILDERS`) and reader of each ``model_type``.
READERS: Mapping[str, tuple[str, Any]] = {
    "bert": ("bert", _bert),
    "roberta": ("bert", _bert),
    "xlm-roberta": ("bert", _bert),
    "distilbert": ("distilbert", _distilbert),
    "t5": ("t5", _t5),
    "vit": ("vit", _vit),
}
