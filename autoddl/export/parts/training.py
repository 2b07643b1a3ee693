"""Plain values in and out of an annotated model, and training it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from autoddl.pipelines.runtime.models import initial_value

from .parameters import all_parameters


def initialize(model: Any, seed: int) -> None:
    """Begin with the values that the plain model begins with."""
    for stored in all_parameters(model):
        others = stored.layout.shape[1:]
        parts = [initial_value(name, (rows, *others), seed) for name, rows in stored.layout.sources]
        stored.assign(np.concatenate(parts))


def load_plain_state(model: Any, state: Mapping[str, Any]) -> None:
    """Take the values of a plain model's ``state_dict`` (local tensors or arrays), the same on every rank."""
    for stored in all_parameters(model):
        parts = []
        for name, rows in stored.layout.sources:
            if name not in state:
                raise ValueError(f"the state_dict lacks {name!r}")
            value = state[name]
            parts.append(value if isinstance(value, np.ndarray) else value.detach().numpy())
            shape = (rows, *stored.layout.shape[1:])
            if parts[-1].shape != shape:
                raise ValueError(f"the state_dict's {name} has shape {parts[-1].shape}, should have {shape}")
        stored.assign(np.concatenate(parts).astype(np.float32))


def plain_state(model: Any, aliases: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The values by the plain model's names, on every rank; all ranks call."""
    values: dict[str, np.ndarray] = {}
    for stored in all_parameters(model):
        values.update(stored.parts(stored.logical()))
    return {**values, **{alias: values[name] for alias, name in aliases.items()}}


def train_step(model: Any, inputs: np.ndarray, targets: np.ndarray, micro_batch: int) -> float:
    """Forward and backward passes of a whole batch, the same on every rank, in micro-batches; its mean loss.

    Gradients are those of the mean loss; they are summed over the ranks once, with the last micro-batch.
    """
    if len(inputs) % micro_batch:
        raise ValueError(f"a batch of {len(inputs)} does not divide into micro-batches of {micro_batch}")
    num, total = len(inputs) // micro_batch, 0.0
    for i in range(num):
        part = slice(i * micro_batch, (i + 1) * micro_batch)
        loss = model(inputs[part], targets[part], sync=i == num - 1) / num
        loss.backward()
        total += float(loss.numpy())
    return total


def optimizer_of(model: Any, name: str, learning_rate: float) -> Any:
    """An optimizer of a model's parameters."""
    return optimizer_over(
        [one.tensor for one in all_parameters(model) if one.tensor.requires_grad], name, learning_rate
    )


def optimizer_over(parameters: Sequence[Any], name: str, learning_rate: float) -> Any:
    """SGD, with momentum or without, or Adam; element-wise, so that each rank does its own blocks."""
    if name == "adam":
        return flow.optim.Adam(parameters, lr=learning_rate)
    return flow.optim.SGD(parameters, lr=learning_rate, momentum=0.9 if name == "momentum" else 0.0)


def random_tokens(rng: np.random.Generator, vocabulary: int, samples: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the tokens that follow them."""
    tokens = rng.integers(vocabulary, size=(samples, rows + 1))
    return tokens[:, :-1], tokens[:, 1:]


def random_images(
    rng: np.random.Generator, shape: tuple[int, ...], classes: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images and classes."""
    return rng.standard_normal((samples, *shape), dtype=np.float32), rng.integers(classes, size=samples)


def random_rows(rng: np.random.Generator, widths: tuple[int, int], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a perceptron."""
    first, last = (rng.standard_normal((samples, width), dtype=np.float32) for width in widths)
    return first, last


def read_text(path: str, rows: int, vocabulary: int) -> bytes:
    """A text to train on, long enough."""
    text = Path(path).read_bytes()
    if vocabulary < 256:
        raise ValueError(f"a text needs a vocabulary of 256 (one for each byte), the model has {vocabulary}")
    if len(text) <= rows:
        raise ValueError(f"{path} has {len(text)} bytes, should have more than {rows}")
    return text
