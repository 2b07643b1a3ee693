"""Boundaries in half precision: WPipe's automatic precision compression.

(Yang et al., "Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training".)

A tensor x is scaled by a power of two, which is exact, so that its largest magnitude lies in [2^14, 2^15), and rounded to half
precision (11 bits, from 2^-24 to 65,504):

    2^(e-1) <= max |x| < 2^e        h = half(2^(15-e) x)        y = 2^(e-15) h

No value overflows, and for every value

    |y - x| <= max(2^-11 |x|, 2^-39 max |x|)

The tensor is sent in full precision if rounding would turn a non-zero value into zero (one below about 2^-39 of the largest), or if
a value is not finite, before or after rounding (the largest values of single precision round up to 2^128). Tensors of other types
than single precision are never compressed.

**What is sent** is 32-bit words, in two parts, because the receiver has to know how many come before it knows the values:

==========  ================================================  ==================================================
part        compressed                                        in full precision
==========  ================================================  ==================================================
first       e, then h, two in a word                          `FULL`, then the upper 16 bits of every x
rest        nothing                                           the lower 16 bits of every x
==========  ================================================  ==================================================

So a compressed tensor takes half the bytes, one in full precision all of them, and either one more word. The first part is sent
when the tensor would be sent without compression; the rest, if there is one, when the receiver needs it (see `order`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["FULL", "Encoded", "decode", "encode", "has_rest", "num_words", "num_words_of_rest"]

#: Instead of e: the tensor is in full precision.
FULL = -(2**31)
_TOP = 15
_MAX_EXPONENT = 128  # e of the largest values of single precision


class Encoded(NamedTuple):
    """A tensor ready to be sent.

    Attributes:
        first: its first part.
        rest: its rest; None if the tensor is compressed.
    """

    first: np.ndarray
    rest: np.ndarray | None


def num_words(num_values: int) -> int:
    """Number of words of the first part of a tensor."""
    return 1 + num_words_of_rest(num_values)


def num_words_of_rest(num_values: int) -> int:
    """Number of words of the rest of a tensor in full precision."""
    return (num_values + 1) // 2


def encode(values: np.ndarray) -> Encoded:
    """Compress single-precision values of any shape.

    >>> encoded = encode(np.array([1.0, 0.5, -3.0], dtype=np.float32))
    >>> decode(encoded.first, encoded.rest, num_values=3).tolist()
    [1.0, 0.5, -3.0]
    """
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    compressed = _compressed(flat)
    if compressed is not None:
        exponent, half = compressed
        return Encoded(_words(half.view(np.uint16), exponent), None)
    bits = flat.view(np.uint32)
    upper, lower = (bits >> 16).astype(np.uint16), (bits & 0xFFFF).astype(np.uint16)
    return Encoded(_words(upper, FULL), _words(lower, None))


def has_rest(first: np.ndarray) -> bool:
    """Whether the tensor of this first part has a rest."""
    return int(first[0]) == FULL


def decode(first: np.ndarray, rest: np.ndarray | None, num_values: int) -> np.ndarray:
    """The values, in one dimension, that `encode` encoded."""
    parts = first[1:].view(np.uint16)[:num_values]
    if rest is None:
        return np.ldexp(parts.view(np.float16).astype(np.float32), int(first[0]) - _TOP)
    bits = parts.astype(np.uint32) << 16 | rest.view(np.uint16)[:num_values]
    return bits.view(np.float32)


def _compressed(flat: np.ndarray) -> tuple[int, np.ndarray] | None:
    """e and h; None if the values need full precision."""
    largest = max(abs(float(flat.max(initial=0.0))), abs(float(flat.min(initial=0.0))))
    if not np.isfinite(largest):
        return None
    _, exponent = np.frexp(largest)
    half = np.ldexp(flat, _TOP - int(exponent)).astype(np.float16)
    if exponent == _MAX_EXPONENT and np.abs(half).max() == 2**_TOP:  # 2^128 is infinite
        return None
    return (int(exponent), half) if _count_nonzero(half, np.uint16) == _count_nonzero(flat, np.uint32) else None


def _count_nonzero(values: np.ndarray, bits: type[np.unsignedinteger]) -> int:
    """As np.count_nonzero, 10 to 40 times as fast: zeros are the values without any bit except the sign."""
    return int(np.count_nonzero(values.view(bits) << 1))


def _words(halves: np.ndarray, header: int | None) -> np.ndarray:
    """16-bit values as 32-bit words, after a header."""
    begin = 0 if header is None else 1
    words = np.zeros(begin + num_words_of_rest(len(halves)), dtype=np.int32)
    if header is not None:
        words[0] = header
    words[begin:].view(np.uint16)[: len(halves)] = halves
    return words
