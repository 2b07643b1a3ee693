"""Random numbers that depend on the seed, the pass and the place of an element alone, so that they do not depend on the plan.

An element has an index in the tensor of all samples. Its number is a hash of this index, of the name of the random operator (its
*stream*) and of the number of the training pass. The hash is splitmix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom
Number Generators).
So every rank draws for its own elements what one device draws for them.

A stream is named by the module that calls the operator, the type of the operator, and the number of earlier calls of this type in
a pass of this module: ``h.0.drop dropout 0``.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

__all__ = ["normal_at", "stream_name", "uniform_at"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_name(path: str, kind: str, number: int) -> str:
    """Return the name of a random operator: that of its module, its type, and the number of earlier ones."""
    return f"{path} {kind} {number}"


def uniform_at(index: np.ndarray, stream: str, step: int | None) -> np.ndarray:
    """Return random numbers from [0, 1) for elements with some indices.

    Args:
        index: Index of each element in the tensor of all samples.
        stream: Name of the random operator.
        step: Number of the training pass; None outside of training.
    """
    with np.errstate(over="ignore"):
        seed = np.uint64(crc32(stream.encode())) * _GOLDEN + np.uint64(0 if step is None else step)
        z = (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN + _mixed(seed)
        return np.asarray((_mixed(z) >> np.uint64(11)) * 2.0**-53)


def normal_at(index: np.ndarray, stream: str, step: int | None) -> np.ndarray:
    """Return normal random numbers for elements with some indices (Box and Muller); arguments as those of `uniform_at`."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform_at(index, f"{stream} radius", step)))
    return radius * np.cos(2.0 * np.pi * uniform_at(index, f"{stream} angle", step))


def _mixed(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
