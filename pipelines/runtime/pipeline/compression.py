"""Compression of messages to half precision: the automatic precision compression of WPipe.

Source: Yang et al., "Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training".

**Encoding.** A tensor x is scaled by a power of two, which is exact, so that its largest magnitude lies in [2^14, 2^15). The result
is rounded to half precision h (11 significant bits, magnitudes from 2^-24 to 65,504). The receiver computes y, which replaces x:

    2^(e-1) <= max |x| < 2^e        h = half(2^(15-e) x)        y = 2^(e-15) h

No value overflows. The error of every value is bounded by

    |y - x| <= max(2^-11 |x|, 2^-39 max |x|)

A tensor is sent in full precision if rounding would turn a non-zero value (less than about 2^-39 of the largest) into zero, or if a
value is not finite before or after rounding (the largest values of single precision round up to 2^128). Tensors whose type is not
single precision are never compressed.

**Message format.** A tensor is sent as 32-bit words. They are sent in two parts, because the receiver must know how many words to
receive before it knows whether the tensor was compressed:

==========  ================================================  ==================================================
part        compressed                                        in full precision
==========  ================================================  ==================================================
first       e, then h, two in a word                          `FULL`, then the upper 16 bits of every x
rest        nothing                                           the lower 16 bits of every x
==========  ================================================  ==================================================

So a compressed tensor takes half of its bytes plus one word, and a tensor in full precision takes all of its bytes plus one word.
The first part is sent when the tensor would be sent without compression. The rest, if there is one, is sent when the receiver needs
it (see `order`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["FULL", "Encoded", "decode", "encode", "has_rest", "num_words", "num_words_of_rest"]

#: Word that a message has in place of e if its tensor is in full precision.
FULL = -(2**31)
#: Exponent t of the scaled tensor: its largest magnitude is less than 2^t.
_SCALED_EXPONENT = 15
#: Largest possible e: single precision ends below 2^128.
_MAX_EXPONENT = 128


class Encoded(NamedTuple):
    """The message of a tensor.

    Attributes:
        first: First part, an int32 vector.
        rest: Second part, an int32 vector; None if the tensor is compressed.
    """

    first: np.ndarray
    rest: np.ndarray | None


def num_words(num_values: int) -> int:
    """Return the number of words of the first part of a message.

    >>> num_words(3)
    3
    """
    return 1 + num_words_of_rest(num_values)


def num_words_of_rest(num_values: int) -> int:
    """Return the number of words of the second part of a message in full precision."""
    return (num_values + 1) // 2


def encode(values: np.ndarray) -> Encoded:
    """Encode an array of single precision and any shape, compressed if its values allow it.

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
    """Return whether the message with this first part has a second part."""
    return int(first[0]) == FULL


def decode(first: np.ndarray, rest: np.ndarray | None, num_values: int) -> np.ndarray:
    """Return the values of a message as a vector of single precision.

    Args:
        first: First part.
        rest: Second part, None if there is none.
        num_values: Number of values of the tensor.
    """
    halves = first[1:].view(np.uint16)[:num_values]
    if rest is None:
        return np.ldexp(halves.view(np.float16).astype(np.float32), int(first[0]) - _SCALED_EXPONENT)
    bits = halves.astype(np.uint32) << 16 | rest.view(np.uint16)[:num_values]
    return bits.view(np.float32)


def _compressed(flat: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Return e and h of a vector; None if it needs full precision."""
    largest = max(abs(float(flat.max(initial=0.0))), abs(float(flat.min(initial=0.0))))
    if not np.isfinite(largest):
        return None
    _, exponent = np.frexp(largest)
    half = np.ldexp(flat, _SCALED_EXPONENT - int(exponent)).astype(np.float16)
    if exponent == _MAX_EXPONENT and np.abs(half).max() == 2**_SCALED_EXPONENT:  # y would be 2^128, which is infinite
        return None
    if _count_nonzero(half, np.uint16) != _count_nonzero(flat, np.uint32):  # a value was rounded to zero
        return None
    return int(exponent), half


def _count_nonzero(values: np.ndarray, bits: type[np.unsignedinteger]) -> int:
    """Return the number of non-zero values.

    This is 10 to 40 times as fast as ``np.count_nonzero`` of floats: a value is zero if no bit except the sign is set.

    Args:
        values: Floats.
        bits: Unsigned integer type of the same size.
    """
    return int(np.count_nonzero(values.view(bits) << 1))


def _words(halves: np.ndarray, header: int | None) -> np.ndarray:
    """Pack 16-bit values into 32-bit words, after a header word if there is one."""
    num_header_words = 0 if header is None else 1
    words = np.zeros(num_header_words + num_words_of_rest(len(halves)), dtype=np.int32)
    if header is not None:
        words[0] = header
    words[num_header_words:].view(np.uint16)[: len(halves)] = halves
    return words
