"""Set and read the parameters of an annotated model by their names in the plain model, and make data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.pipelines.runtime.models import initial_value

from .parameters import all_parameters, renew_parameters


def initialize(model: Any, seed: int) -> None:
    """Set all parameters to the initial values that the built-in plain model has for a seed."""
    for stored in all_parameters(model):
        layout = stored.layout
        values = {name: initial_value(name, layout.source_shape(rows), seed) for name, rows in layout.sources}
        stored.assign(layout.joined(values))
    renew_parameters(model)


def load_plain_state(model: Any, state: Mapping[str, Any]) -> None:
    """Set all parameters from a ``state_dict`` of the plain model.

    Args:
        state: local tensors or arrays by name, the same on every rank.

    Raises:
        ValueError: a parameter is missing or has another shape.
    """
    for stored in all_parameters(model):
        parts = {}
        for name, rows in stored.layout.sources:
            if name not in state:
                raise ValueError(f"the state_dict lacks {name!r}")
            value = state[name]
            parts[name] = value if isinstance(value, np.ndarray) else value.detach().numpy()
            shape = stored.layout.source_shape(rows)
            if parts[name].shape != shape:
                raise ValueError(f"the state_dict's {name} has shape {parts[name].shape}, should have {shape}")
        stored.assign(stored.layout.joined(parts))
    renew_parameters(model)


def plain_state(model: Any, aliases: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the values of all parameters by their names in the plain model, on every rank. All ranks must call this.

    Args:
        aliases: further names of shared parameters, each with the name under which the value is stored.
    """
    values: dict[str, np.ndarray] = {}
    for stored in all_parameters(model):
        values.update(stored.parts(stored.logical()))
    return {**values, **{alias: values[name] for alias, name in aliases.items()}}


def random_tokens(rng: np.random.Generator, vocabulary: int, samples: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens and, as targets, the token that follows each; both of shape (samples, rows)."""
    tokens = rng.integers(vocabulary, size=(samples, rows + 1))
    return tokens[:, :-1], tokens[:, 1:]


def random_images(
    rng: np.random.Generator, shape: tuple[int, ...], classes: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return random images of shape (samples, *shape) and, as targets, random classes."""
    return rng.standard_normal((samples, *shape), dtype=np.float32), rng.integers(classes, size=samples)


def random_rows(rng: np.random.Generator, widths: tuple[int, int], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs and targets of a perceptron; ``widths`` are the features of its input and of its output."""
    inputs, targets = (rng.standard_normal((samples, width), dtype=np.float32) for width in widths)
    return inputs, targets


def read_text(path: str, rows: int, vocabulary: int, num_tokens: int) -> bytes:
    """Return the bytes of a text file to train on.

    Args:
        rows: number of tokens of a sample.
        vocabulary: size of the model's vocabulary.
        num_tokens: number of different tokens that samples of a text have.

    Raises:
        ValueError: the vocabulary is too small, or the text is not longer than a sample.
    """
    text = Path(path).read_bytes()
    if vocabulary < num_tokens:
        raise ValueError(f"a text needs a vocabulary of {num_tokens}, the model has {vocabulary}")
    if len(text) <= rows:
        raise ValueError(f"{path} has {len(text)} bytes, should have more than {rows}")
    return text
