"""HuggingFace's ``config.json``: GPT-2, BERT, LLaMA and models of the same architectures.

A missing field has the default of HuggingFace's configuration class. Fields that do not change any shape are ignored; fields that
would make another architecture are errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from autoddl.costmodel.documents import show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.limits import MAX_SIZES
from autoddl.costmodel.suggestions import did_you_mean

from .mixtureconfigs import MIXTURE_TYPES, read_mixture
from .transformers import Transformer

__all__ = ["HUGGINGFACE_TYPES", "sequence_note", "sequence_note_of", "transformer_from_config"]

#: The beginning of the note on a sequence that the user did not give.
_SEQUENCE_NOTE = "the sequence is "
#: Longest name for which a similar known name is suggested.
_LONGEST_NAME = 60
#: Epilogues by HuggingFace's names of activations.
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_10": "gelu",
    "gelu_accurate": "gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class _Type:
    """A ``model_type``.

    Attributes:
        family: of built-in models.
        defaults: of its configuration class; None: derived from other fields.
    """

    family: str
    defaults: Mapping[str, Any]


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
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN2 = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_GPT2 = {
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

HUGGINGFACE_TYPES: Mapping[str, _Type] = {
    "gpt2": _Type("gpt", _GPT2),
    "bert": _Type("bert", _BERT),
    "roberta": _Type("bert", _ROBERTA),
    "xlm-roberta": _Type("bert", {**_ROBERTA, "vocab_size": 30522}),
    "llama": _Type("llama", _LLAMA),
    "mistral": _Type("llama", _MISTRAL),
    "qwen2": _Type("llama", _QWEN2),
    **{name: _Type("moe", defaults) for name, defaults in MIXTURE_TYPES.items()},
}

#: Other names that HuggingFace accepts for GPT-2's fields.
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


class _Config:
    """The fields of a configuration, with defaults; errors name the field and the values allowed."""

    def __init__(self, value: Mapping[str, Any], defaults: Mapping[str, Any], where: str):
        self._value, self._defaults, self._where = value, defaults, where

    def fault(self, name: str, value: Any, right: str) -> UserError:
        return UserError(f"{self._where}: {name} is {show_json(value)}, should be {right}")

    def get(self, name: str) -> Any:
        return self._value.get(name, self._defaults[name])

    def count(self, name: str, largest: int, minimum: int = 1) -> int:
        """A whole number; 0 for null if the default is null."""
        value = self.get(name)
        if value is None and self._defaults[name] is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= largest:
            raise self.fault(name, value, f"a whole number from {minimum} to {largest}")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.fault(name, value, "true or false")
        return value

    def activation(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.fault(name, value, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def refuse(self, name: str, *allowed: Any) -> None:
        """Raise an error if the field has none of the allowed values, which would make another architecture."""
        value = self.get(name)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise self.fault(name, value, f"{json.dumps(allowed[0])}: other architectures are not built in")


def transformer_from_config(value: Any, where: str) -> tuple[str, Transformer]:
    """Family and sizes of a parsed ``config.json``; the sequence is the longest that the model supports.

    Args:
        value: the parsed document.
        where: its path, for errors; the name of the model is derived from it.

    Raises:
        UserError: the model type is missing or unknown, or a field is of the wrong type or out of range.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: should be an object, the config.json of a HuggingFace model")
    kind = value.get("model_type")
    if kind is None:
        raise UserError(f"{where}: field 'model_type' is missing, should be one of {', '.join(HUGGINGFACE_TYPES)}")
    if not isinstance(kind, str) or kind not in HUGGINGFACE_TYPES:
        question = did_you_mean(str(kind), HUGGINGFACE_TYPES)
        hint = f" ({question})" if question else ""
        raise UserError(
            f"{where}: model_type is {show_json(kind)}, should be one of {', '.join(HUGGINGFACE_TYPES)}{hint}; "
            f"other models can be extracted from OneFlow: autoddl extract FILE.py:FUNCTION"
        )
    found = HUGGINGFACE_TYPES[kind]
    path = PurePath(where)
    name = (path.parent.name or path.stem) if path.name == "config.json" else path.stem
    config = _Config(_without_aliases(value) if kind == "gpt2" else value, found.defaults, where)
    try:
        return found.family, _READERS[found.family](name, kind, config)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(f"{where}: ") else f"{where}: {text}") from None


def sequence_note(value: Mapping[str, Any], model: Transformer) -> str:
    """Return the note that the sequence is the longest that a configuration allows, since the user gave none.

    Args:
        value: the parsed ``config.json``, which :func:`transformer_from_config` has read.
        model: the sizes that were read from it.

    >>> config = {"model_type": "qwen2", "max_position_embeddings": 131072}
    >>> print(sequence_note(config, transformer_from_config(config, "config.json")[1]))
    the sequence is 131,072 tokens, max_position_embeddings of its configuration; sequence=N changes it
    """
    kind = value["model_type"]
    # Only GPT-2 has another name for the field; its own name takes precedence.
    field = "max_position_embeddings"
    if kind == "gpt2" and ("n_positions" in value or field not in value):
        field = "n_positions"
    source = f"{field} of its configuration" if field in value else f"{field} of {kind} by default"
    positions = model.positions or model.sequence
    unused = f" ({positions:,}) less {positions - model.sequence}" if positions > model.sequence else ""
    return f"{_SEQUENCE_NOTE}{model.sequence:,} tokens, {source}{unused}; sequence=N changes it"


def sequence_note_of(graph: LayerGraph) -> str | None:
    """Return the note of :func:`sequence_note` among the notes of a graph; None if it has none."""
    return next((note for note in graph.notes if note.startswith(_SEQUENCE_NOTE)), None)


def _without_aliases(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**{own: value[alias] for alias, own in GPT2_ALIASES.items() if alias in value}, **value}


def _gpt2(name: str, kind: str, config: _Config) -> Transformer:
    config.refuse("add_cross_attention", False)
    positions = config.count("n_positions", MAX_SIZES["sequence"])
    return Transformer(
        name=name,
        layers=config.count("n_layer", MAX_SIZES["layers"]),
        width=config.count("n_embd", MAX_SIZES["width"]),
        heads=config.count("n_head", MAX_SIZES["heads"]),
        sequence=positions,
        positions=positions,
        vocabulary=config.count("vocab_size", MAX_SIZES["vocabulary"]),
        intermediate=config.count("n_inner", MAX_SIZES["intermediate"]),
        activation=config.activation("activation_function"),
        tied=config.flag("tie_word_embeddings"),
    )


def _bert(name: str, kind: str, config: _Config) -> Transformer:
    config.refuse("add_cross_attention", False)
    config.refuse("is_decoder", False)
    config.refuse("position_embedding_type", "absolute")
    positions = config.count("max_position_embeddings", MAX_SIZES["sequence"])
    sequence = positions
    if kind != "bert":  # RoBERTa's positions begin after the padding token
        pad = config.count("pad_token_id", MAX_SIZES["vocabulary"], minimum=0)
        sequence = positions - pad - 1
        if sequence < 1:
            raise config.fault("max_position_embeddings", positions, f"at least {pad + 2}: {pad + 1} are never used")
    return Transformer(
        name=name,
        layers=config.count("num_hidden_layers", MAX_SIZES["layers"]),
        width=config.count("hidden_size", MAX_SIZES["width"]),
        heads=config.count("num_attention_heads", MAX_SIZES["heads"]),
        sequence=sequence,
        positions=positions,
        vocabulary=config.count("vocab_size", MAX_SIZES["vocabulary"]),
        intermediate=config.count("intermediate_size", MAX_SIZES["intermediate"]),
        types=config.count("type_vocab_size", MAX_SIZES["types"]),
        activation=config.activation("hidden_act"),
        tied=config.flag("tie_word_embeddings"),
    )


def _llama(name: str, kind: str, config: _Config) -> Transformer:
    attention_bias = config.flag("attention_bias")
    return Transformer(
        name=name,
        layers=config.count("num_hidden_layers", MAX_SIZES["layers"]),
        width=config.count("hidden_size", MAX_SIZES["width"]),
        heads=config.count("num_attention_heads", MAX_SIZES["heads"]),
        sequence=config.count("max_position_embeddings", MAX_SIZES["sequence"]),
        vocabulary=config.count("vocab_size", MAX_SIZES["vocabulary"]),
        intermediate=config.count("intermediate_size", MAX_SIZES["intermediate"]),
        kv_heads=config.count("num_key_value_heads", MAX_SIZES["kv_heads"]),
        head_dim=config.count("head_dim", MAX_SIZES["head_dim"]),
        activation=config.activation("hidden_act"),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or kind == "qwen2",
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
    )


_READERS = {"gpt": _gpt2, "bert": _bert, "llama": _llama, "moe": read_mixture}
