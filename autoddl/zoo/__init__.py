"""Models that need no OneFlow: built-in families, HuggingFace configurations, saved graphs.

:func:`resolve_model` returns the layer graph of a model given by name, sizes or file; :func:`gpt`, :func:`bert`, :func:`llama`,
:func:`vgg` and :func:`mlp` build graphs from sizes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoddl.costmodel.documents import load_json
from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.graph import LayerGraph, graph_from_document
from autoddl.costmodel.limits import MAX_LAYERS, MAX_MLP_WIDTH, MAX_SIZES
from autoddl.costmodel.reading import shown_path
from autoddl.costmodel.suggestions import closest, did_you_mean

from .feedforward import VGG_FEATURES, mlp, vgg
from .huggingface import HUGGINGFACE_TYPES, sequence_note, transformer_from_config
from .layers import batch_norm_note
from .named import FAMILIES, TRANSFORMERS, build_transformer, sized_transformer
from .residual import RESNET_BLOCKS, resnet
from .transformers import Transformer, bert, gpt, llama, pad_vocabulary

#: The samples whose statistics batch norms use.
BATCH_NORMS = ("local", "all")
#: Largest capacity factor of experts: with as many slots as tokens, none is dropped.
MAX_CAPACITY_FACTOR = 1024

__all__ = [
    "Transformer",
    "bert",
    "gpt",
    "is_oneflow_model",
    "known_models",
    "llama",
    "mlp",
    "pad_vocabulary",
    "resnet",
    "resolve_model",
    "vgg",
    "with_batch_norms",
]

_FUNCTION = re.compile(r".+\.py:\w+")
_SIZED = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
FORMS = (
    *(f"{family}:LAYERSxWIDTH" for family in FAMILIES),
    "mlp:WIDTH,WIDTH,...",
    "a config.json of HuggingFace",
    "a saved graph",
    "FILE.py:FUNCTION",
)


def known_models() -> tuple[str, ...]:
    """The names of all built-in models."""
    return (*TRANSFORMERS, *(f"vgg{depth}" for depth in VGG_FEATURES), *(f"resnet{depth}" for depth in RESNET_BLOCKS))


def is_oneflow_model(text: str) -> bool:
    """Whether ``text`` is ``FILE.py:FUNCTION``, which has to be extracted with OneFlow.

    >>> is_oneflow_model("model.py:build"), is_oneflow_model("gpt2")
    (True, False)
    """
    return _FUNCTION.fullmatch(text) is not None


def resolve_model(
    text: str,
    *,
    heads: int | None = None,
    sequence: int | None = None,
    vocabulary: int | None = None,
    dropout: bool = False,
    capacity_factor: float | None = None,
    batch_norm: str | None = None,
) -> LayerGraph:
    """The layer graph of a model.

    Args:
        text: a name (``gpt2-xl``, ``vgg13``), sizes (``gpt:24x1024``, ``mlp:4096,1024,10``), a HuggingFace ``config.json`` or
            its folder, a saved graph, or ``FILE.py:FUNCTION``.
        heads: number of attention heads of a built-in transformer, instead of the model's own.
        sequence: tokens per sample of a built-in transformer, instead of the model's own.  The own one of a ``config.json`` is
            the longest that it allows; a note in the graph says so.
        vocabulary: size of its vocabulary, instead of the model's own. It is always padded to a multiple of 128; a note in the
            graph says so.
        dropout: whether a built-in transformer has dropouts.
        capacity_factor: slots of an expert of a mixture, as a multiple of its share of the tokens if the load is balanced, instead
            of the model's own.
        batch_norm: the samples whose statistics batch norms use, instead of those that the model says: ``local`` for those of each
            device, ``all``.

    Raises:
        UserError: the model is unknown, a file is malformed, or an option does not apply.
    """
    sizes_given = {"heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    if batch_norm is not None:
        graph = resolve_model(
            text,
            heads=heads,
            sequence=sequence,
            vocabulary=vocabulary,
            dropout=dropout,
            capacity_factor=capacity_factor,
        )
        return with_batch_norms(graph, batch_norm)
    options: dict[str, Any] = {**sizes_given, "dropout": True if dropout else None, "capacity_factor": capacity_factor}
    if capacity_factor is not None and not 0 < capacity_factor <= MAX_CAPACITY_FACTOR:
        raise UserError(f"capacity_factor={capacity_factor:g} should be more than 0 and at most {MAX_CAPACITY_FACTOR}")
    for option, value in sizes_given.items():
        if value is not None and not 1 <= value <= MAX_SIZES[option]:
            raise UserError(f"{option}={value} should be a whole number from 1 to {MAX_SIZES[option]}")
    if text in TRANSFORMERS:
        family, model = TRANSFORMERS[text]
        return build_transformer(family, model, **options)
    family, colon, sizes = text.partition(":")
    if colon and family in FAMILIES:
        model = sized_transformer(family, *_layers_and_width(text, sizes), heads, sequence)
        return build_transformer(family, model, **options)
    if text and not is_oneflow_model(text) and (text.endswith(".json") or os.sep in text or os.path.exists(text)):
        return _from_file(text, options)
    graph = _fixed_model(text, family if colon else "", sizes)
    _check_no_options(text, options)
    return graph


def with_batch_norms(graph: LayerGraph, samples: str) -> LayerGraph:
    """A graph whose batch norms use the statistics of ``local`` samples, or of ``all``.

    Raises:
        UserError: the word is another one, or the model has no batch norm.
    """
    if samples not in BATCH_NORMS:
        raise UserError(f"batch_norm={quote(samples)} should be one of {', '.join(BATCH_NORMS)}")
    if not any(layer.kind == "batch_norm" for layer in graph.layers):
        raise UserError(f"batch_norm={samples}: {graph.name} has no batch norm; leave it out")
    layers = tuple(
        replace(layer, attributes={**layer.attributes, "synchronised": int(samples == "all")})
        if layer.kind == "batch_norm"
        else layer
        for layer in graph.layers
    )
    notes = tuple(note for note in graph.notes if note != batch_norm_note(note.partition(":")[0]))
    return replace(graph, layers=layers, notes=notes if samples == "all" else (*notes, batch_norm_note("batch norms")))


def _fixed_model(text: str, family: str, sizes: str) -> LayerGraph:
    """The graph of a model to which no option applies."""
    if is_oneflow_model(text):
        from ..extraction import extract_from_file  # imports OneFlow

        return extract_from_file(text)
    if family == "mlp":
        return mlp(_mlp_widths(text, sizes))
    for name, make, depths in (("vgg", vgg, VGG_FEATURES), ("resnet", resnet, RESNET_BLOCKS)):
        for depth in depths:
            if text == f"{name}{depth}":
                return make(depth)  # type: ignore[operator]
    raise _unknown(text)


def _check_no_options(text: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise UserError(
                f"{option}={value} does not apply to {quote(text)}; it is for built-in transformers and config.json files"
            )


def _layers_and_width(text: str, sizes: str) -> tuple[int, int]:
    match = _SIZED.fullmatch(sizes)
    if match is None:
        raise UserError(f"model {quote(text)} should be {text.partition(':')[0]}:LAYERSxWIDTH, such as gpt:24x1024")
    return int(match[1]), int(match[2])


def _mlp_widths(text: str, sizes: str) -> list[int]:
    widths = []
    entries = sizes.split(",")
    if len(entries) > MAX_LAYERS:
        raise UserError(f"model mlp has {len(entries):,} widths, should have at most {MAX_LAYERS:,}")
    for entry in entries:
        if not _NUMBER.fullmatch(entry) or int(entry) > MAX_MLP_WIDTH:
            raise UserError(
                f"model {quote(text)}: width {quote(entry)} should be a whole number from 1 to {MAX_MLP_WIDTH}, "
                "as in mlp:4096,1024,10"
            )
        widths.append(int(entry))
    return widths


def _from_file(text: str, options: Mapping[str, Any]) -> LayerGraph:
    """The graph of a saved graph or of a HuggingFace configuration."""
    # os.path instead of Path: Path.exists raises OSError for texts longer than a file name may be.
    path = Path(text, "config.json") if os.path.isdir(text) else Path(text)
    value = load_json(path)
    where = shown_path(path)
    if isinstance(value, dict) and "model_type" in value:
        return _from_config(value, where, options)
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: holds no JSON object, as saved graphs and the config.json of a HuggingFace model are"
        )
    if "format" in value:
        graph = graph_from_document(value, where)
        _check_no_options(text, options)
        return graph
    raise UserError(
        f"{where}: has neither a 'format', which saved graphs have, nor a 'model_type', which the config.json of a "
        f"HuggingFace model has (one of {', '.join(HUGGINGFACE_TYPES)})"
    )


def _from_config(value: Mapping[str, Any], where: str, options: Mapping[str, Any]) -> LayerGraph:
    """The graph of a HuggingFace configuration, with notes on what it leaves out and what the user did not choose."""
    model = transformer_from_config(value, where)
    graph = build_transformer(model.family, model.sizes, **options)
    note = sequence_note(value, model.sizes) if options["sequence"] is None else None
    notes = (*graph.notes, *model.notes_for(options["sequence"]), *(() if note is None else (note,)))
    return replace(graph, notes=notes)


def _unknown(text: str) -> UserError:
    known = known_models()
    family, colon, sizes = text.partition(":")
    likely = closest(family, (*FAMILIES, "mlp")) if colon else None
    hint = did_you_mean(text, known) if likely is None else f"did you mean '{likely}:{sizes}'?"
    return UserError(
        f"model {quote(text)} is unknown; {hint}{' ' if hint else ''}known are {', '.join((*known, *FORMS))}"
    )
