"""Models by name, and families by size.

GPT-2: Radford et al. 2019 (HuggingFace's ``gpt2*``). GPT-3: Brown et al. 2020, table 2.1; where the sizes of that table are
inconsistent (XL's 24 heads of 128 are not 2048 wide, 13B's 40 heads of 128 not 5140), the nearest consistent sizes are used.
BERT: Devlin et al. 2018. ``gpt2-64`` and ``bert-48``: Li and Hoefler, "Chimera". LLaMA: Touvron et al. 2023 and the model cards
of LLaMA 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

from .decoders import decoder
from .encoders import distilbert, vit
from .mixtures import MIXTURES, mixture, sized_mixture
from .t5 import t5
from .transformers import Transformer, bert, gpt, llama, pad_vocabulary

__all__ = ["BUILDERS", "FAMILIES", "TRANSFORMERS", "build_transformer", "sized_transformer"]

FAMILIES: dict[str, Callable[[Transformer], LayerGraph]] = {"gpt": gpt, "bert": bert, "llama": llama, "moe": mixture}
#: The functions that make graphs, by family. Sizes of families that are not in `FAMILIES` are read from HuggingFace configurations.
BUILDERS: dict[str, Callable[[Any], LayerGraph]] = {
    **FAMILIES,
    "decoder": decoder,
    "distilbert": distilbert,
    "t5": t5,
    "vit": vit,
}

GPT_VOCABULARY = 50257
BERT_VOCABULARY = 30522
LLAMA_VOCABULARY = 32000
LLAMA3_VOCABULARY = 128256


def _gpt(name: str, layers: int, width: int, heads: int, sequence: int, **others: Any) -> Transformer:
    return Transformer(name, layers, width, heads, sequence, GPT_VOCABULARY, **{"positions": sequence, **others})


def _bert(name: str, layers: int, width: int, heads: int, sequence: int = 512, **others: Any) -> Transformer:
    return Transformer(name, layers, width, heads, sequence, BERT_VOCABULARY, positions=512, **others)


def _llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    intermediate: int,
    *,
    sequence: int = 2048,
    vocabulary: int = LLAMA_VOCABULARY,
    kv_heads: int = 0,
    tied: bool = False,
) -> Transformer:
    return Transformer(
        name,
        layers,
        width,
        heads,
        sequence,
        vocabulary,
        intermediate=intermediate,
        kv_heads=kv_heads,
        activation="silu",
        tied=tied,
    )


_CATALOGUE: tuple[tuple[str, tuple[Transformer, ...]], ...] = (
    (
        "gpt",
        (
            _gpt("gpt2", 12, 768, 12, 1024),
            _gpt("gpt2-medium", 24, 1024, 16, 1024),
            _gpt("gpt2-large", 36, 1280, 20, 1024),
            _gpt("gpt2-xl", 48, 1600, 25, 1024),
            # 1,389,327,360 parameters: width 1280 with an untied output projection matches them.
            _gpt("gpt2-64", 64, 1280, 20, 632, positions=1024, tied=False),
            _gpt("gpt3-small", 12, 768, 12, 2048),
            _gpt("gpt3-medium", 24, 1024, 16, 2048),
            _gpt("gpt3-large", 24, 1536, 16, 2048),
            _gpt("gpt3-xl", 24, 2048, 16, 2048),
            _gpt("gpt3-2.7b", 32, 2560, 32, 2048),
            _gpt("gpt3-6.7b", 32, 4096, 32, 2048),
            _gpt("gpt3-13b", 40, 5120, 40, 2048),
            _gpt("gpt3-175b", 96, 12288, 96, 2048),
        ),
    ),
    (
        "bert",
        (
            _bert("bert-base", 12, 768, 12),
            _bert("bert-large", 24, 1024, 16),
            # 669,790,012 parameters with pooler, next-sentence head and an untied decoder.
            _bert("bert-48", 48, 1024, 16, 128, tied=False),
        ),
    ),
    (
        "llama",
        (
            _llama("llama-7b", 32, 4096, 32, 11008),
            _llama("llama-13b", 40, 5120, 40, 13824),
            _llama("llama-33b", 60, 6656, 52, 17920),
            _llama("llama-65b", 80, 8192, 64, 22016),
            _llama("llama2-7b", 32, 4096, 32, 11008, sequence=4096),
            _llama("llama2-13b", 40, 5120, 40, 13824, sequence=4096),
            _llama("llama2-70b", 80, 8192, 64, 28672, sequence=4096, kv_heads=8),
            _llama("llama3-8b", 32, 4096, 32, 14336, sequence=8192, vocabulary=LLAMA3_VOCABULARY, kv_heads=8),
            _llama("llama3-70b", 80, 8192, 64, 28672, sequence=8192, vocabulary=LLAMA3_VOCABULARY, kv_heads=8),
            _llama("llama3-405b", 126, 16384, 128, 53248, sequence=8192, vocabulary=LLAMA3_VOCABULARY, kv_heads=8),
            _llama("llama3-1b", 16, 2048, 32, 8192, sequence=8192, vocabulary=LLAMA3_VOCABULARY, kv_heads=8, tied=True),
            _llama("llama3-3b", 28, 3072, 24, 8192, sequence=8192, vocabulary=LLAMA3_VOCABULARY, kv_heads=8, tied=True),
        ),
    ),
    ("moe", MIXTURES),
)

#: Family and sizes by name; vocabularies as published.
TRANSFORMERS: dict[str, tuple[str, Transformer]] = {
    model.name: (family, model) for family, models in _CATALOGUE for model in models
}


def _default_heads(name: str, width: int) -> int:
    """Heads of 128; of 64 if the model is narrower than 2048 or 128 does not divide the width; one head below a width of 64."""
    for head_dim in (128, 64) if width >= 2048 else (64,):
        if width % head_dim == 0:
            return width // head_dim
    if width < 64:
        return 1
    raise UserError(
        f"{name}: width {width} is not a multiple of 64, so there is no usual number of heads; give heads=N, or a width "
        f"such as {-(-width // 64) * 64}"
    )


def _default_llama_inner(width: int) -> int:
    """LLaMA's rule: two thirds of 4 * width, rounded up to a multiple of 256.

    >>> _default_llama_inner(4096)
    11008
    """
    return -(-(8 * width // 3) // 256) * 256


def sized_transformer(family: str, layers: int, width: int, heads: int | None, sequence: int | None) -> Transformer:
    """The sizes of ``family:LAYERSxWIDTH``: 2048 tokens (BERT: 512), the family's own vocabulary.

    Raises:
        UserError: the width does not divide into heads.
    """
    name = f"{family}:{layers}x{width}"
    for what, value in (("layers", layers), ("width", width)):
        if value < 1:
            raise UserError(f"{name}: {what} is {value}, should be at least 1")
    heads = _default_heads(name, width) if heads is None else heads
    if family == "gpt":
        return _gpt(name, layers, width, heads, sequence or 2048, positions=0)
    if family == "bert":
        length = sequence or 512
        return replace(_bert(name, layers, width, heads), sequence=length, positions=max(length, 512))
    model = _llama(name, layers, width, heads, _default_llama_inner(width), sequence=sequence or 2048)
    return sized_mixture(model) if family == "moe" else model


def build_transformer(
    family: str,
    model: Any,
    *,
    heads: int | None,
    sequence: int | None,
    vocabulary: int | None,
    dropout: bool | None = None,
    capacity_factor: float | None = None,
) -> LayerGraph:
    """The graph of a model, with the vocabulary padded.

    Args:
        family: a key of `BUILDERS`.
        model: its sizes.
        heads: instead of the model's own; None: unchanged.
        sequence: instead of the model's own; None: unchanged.
        vocabulary: instead of the model's own; None: unchanged.
        dropout: whether it has dropouts; None: unchanged.
        capacity_factor: slots of an expert as a multiple of its share of a balanced load; None: unchanged.

    Raises:
        UserError: the sizes are inconsistent, or the model has no such size.
    """
    given: dict[str, Any] = {"heads": heads, "sequence": sequence, "vocabulary": vocabulary, "dropout": dropout}
    given["capacity_factor"] = capacity_factor
    changes = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in fields(model)}
    for name, value in changes.items():
        if name not in known:
            raise UserError(f"{name}={value} does not apply to {model.name}, which has no {name}")
    if heads is not None and "kv_heads" in known and model.kv_heads:
        changes["kv_heads"] = min(model.kv_heads, heads)
    model = replace(model, **changes)
    if "vocabulary" not in known:
        return BUILDERS[family](model)
    padded = pad_vocabulary(model.vocabulary)
    graph = BUILDERS[family](replace(model, vocabulary=padded))
    if padded == model.vocabulary:
        return graph
    note = f"the vocabulary of {model.vocabulary} is padded to {padded}, a multiple of 128, so that it splits evenly"
    return replace(graph, notes=(*graph.notes, note))
