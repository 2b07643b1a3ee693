"""Samples to train on: passages of a text, and random ones like an example. Needs no OneFlow; exported files have these too."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["MASK", "TextTask", "following_bytes", "like", "masked_bytes", "text_task"]

#: The token behind all bytes.
MASK = 256
_MASKED_SHARE = 0.15
_NOT_COUNTED = -100  # a target that cross entropy leaves out


def following_bytes(
    rng: np.random.Generator, text: np.ndarray, samples: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Passages of a text, given as its bytes, and the bytes that follow them: (samples, rows) each."""
    tokens = passages(rng, text, samples, rows + 1)
    return tokens[:, :-1], tokens[:, 1:]


def masked_bytes(rng: np.random.Generator, text: np.ndarray, samples: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Passages with 15 % of their bytes masked, and targets of which only these count.

    As many in every row, so that rows count alike. Of these 80 % are the mask, 10 % any byte and 10 % as they were.
    """
    tokens = passages(rng, text, samples, rows)
    order = rng.random(tokens.shape).argsort(axis=1)
    chosen = order < max(1, round(_MASKED_SHARE * rows))
    luck = rng.random(tokens.shape)
    others = rng.integers(0, MASK, tokens.shape)
    inputs = np.where(chosen & (luck < 0.8), MASK, np.where(chosen & (luck >= 0.9), others, tokens))
    return inputs, np.where(chosen, tokens, _NOT_COUNTED)


class TextTask(NamedTuple):
    """What a model learns from a text.

    Attributes:
        samples: Draws samples of a text, `following_bytes` or `masked_bytes`.
        num_tokens: Number of tokens that samples consist of: the smallest possible vocabulary.
    """

    samples: Callable[[np.random.Generator, np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]
    num_tokens: int


def text_task(family: str) -> TextTask:
    """Return what the models of a built-in family learn from a text: BERT predicts masked bytes, the others the next byte."""
    return TextTask(masked_bytes, MASK + 1) if family == "bert" else TextTask(following_bytes, MASK)


def passages(rng: np.random.Generator, text: np.ndarray, samples: int, length: int) -> np.ndarray:
    """(samples, length): bytes at random places of a text."""
    begins = rng.integers(0, len(text) - length + 1, samples)
    return np.stack([text[begin : begin + length] for begin in begins]).astype(np.int64)


def like(example: np.ndarray, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """Random samples in the range of an example's: normal with its mean and deviation, or integers between its extremes."""
    shape = (num_samples, *example.shape[1:])
    if np.issubdtype(example.dtype, np.floating):
        return (example.mean() + example.std() * rng.standard_normal(shape)).astype(example.dtype)
    if example.dtype == np.bool_:
        return rng.random(shape) < example.mean()
    return rng.integers(example.min(), example.max() + 1, size=shape, dtype=example.dtype)
