"""HuggingFace's ``config.json``.

A missing field has the default of HuggingFace's configuration class. Fields that do not change any shape are ignored, or noted if
what they say is left out; fields that would make another architecture are errors.

:mod:`.causal` reads decoders, :mod:`.experts` those with experts, :mod:`.encoding` encoders and T5. Their tables have the
defaults and readers by ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from autoddl.costmodel.documents import show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.suggestions import closest

from . import causal, encoding, experts
from .config import Config

__all__ = ["HUGGINGFACE_TYPES", "ConfigModel", "sequence_note", "sequence_note_of", "transformer_from_config"]

#: The beginning of the note on a sequence that the user did not give.
_SEQUENCE_NOTE = "the sequence is "
#: Other names that HuggingFace accepts for fields: an alias by its own name, by type.
_SMALL_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
ALIASES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode"), _SMALL_ALIASES),
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "bloom": {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "falcon": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"},
    "t5": {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "distilbert": {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
}
#: The fields that give the longest sequence.
_SEQUENCE_FIELDS = ("max_position_embeddings", "n_positions", "seq_length")
#: Types of another architecture whose names resemble that of a known type.
_OTHER_ARCHITECTURES = frozenset(
    {
        *(
            "albert",
            "camembert",
            "deberta",
            "deberta-v2",
            "electra",
            "roberta-prelayernorm",
            "mobilebert",
            "squeezebert",
        ),
        *("ministral", "mistral3", "mistral4", "llama4", "llama4_text", "mllama", "idefics", "olmo"),
        *(
            "qwen",
            "qwen3_moe",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen2_audio",
            "qwen3_next",
            "qwen3_vl",
            "qwen3_5",
        ),
        *("gemma3", "gemma3n", "gemma3n_text", "paligemma", "recurrent_gemma", "t5gemma", "vaultgemma", "gemma4"),
        *(
            "phimoe",
            "phi4",
            "phi4_multimodal",
            "phi4mm",
            "phi3_v",
            "mt5",
            "umt5",
            "longt5",
            "switch_transformers",
            "byt5",
        ),
        *("vit_mae", "vit_msn", "vit_hybrid", "vitdet", "deit", "dpt", "vilt", "dinov2", "vivit", "vits", "swin"),
        *("openai-gpt", "imagegpt", "gpt_neox_japanese", "gpt_oss", "gptsan-japanese", "gpt-sw3", "starcoder2"),
        *(
            "biogpt",
            "falcon_mamba",
            "falcon_h1",
            "stablelm_epoch",
            "codegen",
            "xlm",
            "xlm-roberta-xl",
            "xlnet",
            "mpt",
            "bros",
        ),
    }
)


@dataclass(frozen=True)
class _Type:
    """A ``model_type``.

    Attributes:
        family: of models, a key of :data:`autoddl.zoo.named.BUILDERS`.
        read: reads the sizes from a configuration.
        defaults: of its configuration class; None: derived from other fields.
    """

    family: str
    read: Callable[[Config], Any]
    defaults: Mapping[str, Any]

    @property
    def sequence_field(self) -> str | None:
        """The field that gives the longest sequence; None if the model reads no sequence."""
        return next((field for field in _SEQUENCE_FIELDS if field in self.defaults), None)


HUGGINGFACE_TYPES: Mapping[str, _Type] = {
    kind: _Type(family, read, module.DEFAULTS[kind])
    for module in (causal, encoding, experts)
    for kind, (family, read) in module.READERS.items()
}


class ConfigModel(NamedTuple):
    """A model that was read from a configuration.

    Attributes:
        family: a key of :data:`autoddl.zoo.named.BUILDERS`.
        sizes: what the function of the family takes.
        notes: what the graph leaves out, for any sequence.
        window: the sliding window that the graph leaves out, and the layers that have it; None if there is none.
    """

    family: str
    sizes: Any
    notes: tuple[str, ...]
    window: tuple[int, str] | None

    def notes_for(self, sequence: int | None) -> tuple[str, ...]:
        """What the graph leaves out.

        Args:
            sequence: tokens per sample; None for the model's own number.
        """
        if self.window is None:
            return self.notes
        window, layers = self.window
        if window >= (sequence or self.sizes.sequence):
            return self.notes
        return (
            *self.notes,
            f"the sliding window of {window:,} tokens on {layers} is left out: all earlier tokens are attended to",
        )


def transformer_from_config(value: Any, where: str) -> ConfigModel:
    """The model of a parsed ``config.json``; the sequence is the longest that the model supports.

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
        raise UserError(
            f"{where}: model_type is {show_json(kind)}, should be one of {', '.join(HUGGINGFACE_TYPES)}{_hint(str(kind))}; "
            f"other models can be extracted from OneFlow: autoddl extract FILE.py:FUNCTION"
        )
    found = HUGGINGFACE_TYPES[kind]
    path = PurePath(where)
    name = (path.parent.name or path.stem) if path.name == "config.json" else path.stem
    config = Config(_without_aliases(kind, value), found.defaults, name, kind, where)
    try:
        sizes = found.read(config)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(f"{where}: ") else f"{where}: {text}") from None
    return ConfigModel(found.family, sizes, tuple(config.notes), config.window)


def _hint(kind: str) -> str:
    """A suggestion for a mistyped name.

    A name with other letters or digits at its end is another architecture ("qwen3_moe", "phi4"), and so are those that are known
    to be one ("olmo").  So only a name is suggested that differs by one or two letters in its middle.

    >>> _hint("lama"), _hint("olmo"), _hint("qwen3_moe")
    (" (did you mean 'llama'?)", '', '')
    """
    likely = closest(kind, HUGGINGFACE_TYPES)
    if likely is None or kind.lower() in _OTHER_ARCHITECTURES or _digits(kind) != _digits(likely):
        return ""
    return f" (did you mean {likely!r}?)" if abs(len(kind) - len(likely)) <= 1 else ""


def _digits(text: str) -> str:
    return "".join(letter for letter in text if letter.isdigit())


def sequence_note(value: Mapping[str, Any], model: Any) -> str | None:
    """Return the note that the sequence is the longest that a configuration allows, since the user gave none.

    Args:
        value: the parsed ``config.json``, which :func:`transformer_from_config` has read.
        model: the sizes that were read from it.

    Returns:
        The note; None if the model reads no sequence.

    >>> config = {"model_type": "qwen2", "max_position_embeddings": 131072}
    >>> print(sequence_note(config, transformer_from_config(config, "config.json").sizes))
    the sequence is 131,072 tokens, max_position_embeddings of its configuration; sequence=N changes it
    """
    kind = value["model_type"]
    field = HUGGINGFACE_TYPES[kind].sequence_field
    if field is None:
        return None
    positions = value.get(field, HUGGINGFACE_TYPES[kind].defaults[field])
    # A type's own name of a field takes precedence over its aliases.
    alias = next((alias for alias, own in ALIASES.get(kind, {}).items() if own == field and alias in value), None)
    if alias is not None and field not in value:
        field, positions = alias, value[alias]
    source = f"{field} of its configuration" if field in value else f"{field} of {kind} by default"
    unused = f" ({positions:,}) less {positions - model.sequence}" if positions > model.sequence else ""
    return f"{_SEQUENCE_NOTE}{model.sequence:,} tokens, {source}{unused}; sequence=N changes it"


def sequence_note_of(graph: LayerGraph) -> str | None:
    """Return the note of :func:`sequence_note` among the notes of a graph; None if it has none."""
    return next((note for note in graph.notes if note.startswith(_SEQUENCE_NOTE)), None)


def _without_aliases(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    aliases = ALIASES.get(kind, {})
    return {**{own: value[alias] for alias, own in aliases.items() if alias in value}, **value}
