"""Training samples: passages of a text, and random samples like an example. Needs no OneFlow. Exported files contain this code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["MASK", "TextTask", "following_bytes", "like", "masked_bytes", "text_task"]

#: The token of masked bytes: the first number that is not a byte.
MASK = 256
_MASKED_SHARE = 0.15
_IGNORED_TARGET = -100  # cross entropy ignores these targets


def following_bytes(
    rng: np.random.Generator, text: np.ndarray, samples: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw passages of a text, and the byte that follows each of their bytes.

    Args:
        rng: Random generator.
        text: The bytes of the text.
        samples: Number of passages.
        rows: Bytes per passage.

    Returns:
        Inputs and targets, each (samples, rows).
    """
    tokens = passages(rng, text, samples, rows + 1)
    return tokens[:, :-1], tokens[:, 1:]


def masked_bytes(rng: np.random.Generator, text: np.ndarray, samples: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw passages of which 15 % of the bytes are to be predicted, as in BERT.

    Of these bytes 80 % are replaced by `MASK`, 10 % by a random byte, and 10 % are unchanged. Every passage has the same number of
    them, so that all passages have the same weight in the loss. The other targets are ignored by cross entropy.

    Args:
        rng: Random generator.
        text: The bytes of the text.
        samples: Number of passages.
        rows: Bytes per passage.

    Returns:
        Inputs and targets, each (samples, rows).
    """
    tokens = passages(rng, text, samples, rows)
    order = rng.random(tokens.shape).argsort(axis=1)
    chosen = order < max(1, round(_MASKED_SHARE * rows))
    draws = rng.random(tokens.shape)
    random_bytes = rng.integers(0, MASK, tokens.shape)
    inputs = np.where(chosen & (draws < 0.8), MASK, np.where(chosen & (draws >= 0.9), random_bytes, tokens))
    return inputs, np.where(chosen, tokens, _IGNORED_TARGET)


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
    """Draw passages at random places of a text: (samples, length)."""
    begins = rng.integers(0, len(text) - length + 1, samples)
    return np.stack([text[begin : begin + length] for begin in begins]).astype(np.int64)


def like(example: np.ndarray, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """Draw random samples that resemble an example: normal with its mean and deviation, or integers between its extremes."""
    shape = (num_samples, *example.shape[1:])
    if np.issubdtype(example.dtype, np.floating):
        return (example.mean() + example.std() * rng.standard_normal(shape)).astype(example.dtype)
    if example.dtype == np.bool_:
        return rng.random(shape) < example.mean()
    return rng.integers(example.min(), example.max() + 1, size=shape, dtype=example.dtype)
