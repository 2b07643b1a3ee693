"""Set and read the parameters of an annotated model by their names in the plain model, make data, and train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from autoddl.pipelines.runtime.models import initial_value

from .parameters import all_parameters


def initialize(model: Any, seed: int) -> None:
    """Set all parameters to the initial values that the built-in plain model has for a seed."""
    for stored in all_parameters(model):
        other_dims = stored.layout.shape[1:]
        parts = [initial_value(name, (rows, *other_dims), seed) for name, rows in stored.layout.sources]
        stored.assign(np.concatenate(parts))


def load_plain_state(model: Any, state: Mapping[str, Any]) -> None:
    """Set all parameters from a ``state_dict`` of the plain model.

    Args:
        state: local tensors or arrays by name, the same on every rank.

    Raises:
        ValueError: a parameter is missing or has another shape.
    """
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
    """Return the values of all parameters by their names in the plain model, on every rank. All ranks must call this.

    Args:
        aliases: further names of shared parameters, each with the name under which the value is stored.
    """
    values: dict[str, np.ndarray] = {}
    for stored in all_parameters(model):
        values.update(stored.parts(stored.logical()))
    return {**values, **{alias: values[name] for alias, name in aliases.items()}}


def train_step(model: Any, inputs: np.ndarray, targets: np.ndarray, micro_batch: int) -> float:
    """Run the forward and backward passes of a batch, micro-batch by micro-batch, and return the mean loss.

    The gradients are those of the mean loss. They are summed over the ranks once, in the backward pass of the last micro-batch.

    Args:
        inputs: the inputs of the whole batch, the same on every rank.
        targets: the targets of the whole batch, the same on every rank.
        micro_batch: number of samples of a micro-batch.

    Raises:
        ValueError: the batch does not divide into micro-batches.
    """
    if len(inputs) % micro_batch:
        raise ValueError(f"a batch of {len(inputs)} does not divide into micro-batches of {micro_batch}")
    num_micro_batches, total = len(inputs) // micro_batch, 0.0
    for i in range(num_micro_batches):
        part = slice(i * micro_batch, (i + 1) * micro_batch)
        is_last = i == num_micro_batches - 1
        loss = model(inputs[part], targets[part], sync=is_last) / num_micro_batches
        loss.backward()
        total += float(loss.numpy())
    return total


def optimizer_of(model: Any, name: str, learning_rate: float) -> Any:
    """Return an optimizer of the parameters of a model that are trained; ``name`` as for `optimizer_over`."""
    tensors = [stored.tensor for stored in all_parameters(model)]
    return optimizer_over([tensor for tensor in tensors if tensor.requires_grad], name, learning_rate)


def optimizer_over(parameters: Sequence[Any], name: str, learning_rate: float) -> Any:
    """Return an optimizer of some parameters. Its updates are element-wise, so each rank updates its own blocks.

    Args:
        name: ``"adam"``, ``"momentum"`` (SGD with momentum 0.9) or ``"sgd"``.
    """
    if name == "adam":
        return flow.optim.Adam(parameters, lr=learning_rate)
    return flow.optim.SGD(parameters, lr=learning_rate, momentum=0.9 if name == "momentum" else 0.0)


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


def read_text(path: str, rows: int, vocabulary: int) -> bytes:
    """Return the bytes of a text file to train on.

    Args:
        rows: number of tokens of a sample.
        vocabulary: size of the model's vocabulary.

    Raises:
        ValueError: the vocabulary has fewer than 256 tokens, or the text is not longer than a sample.
    """
    text = Path(path).read_bytes()
    if vocabulary < 256:
        raise ValueError(f"a text needs a vocabulary of 256 (one for each byte), the model has {vocabulary}")
    if len(text) <= rows:
        raise ValueError(f"{path} has {len(text)} bytes, should have more than {rows}")
    return text
