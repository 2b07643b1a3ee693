"""Precision compression of tensors: what comes out is near enough, or exactly what went in. Needs no OneFlow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autoddl.pipelines.runtime.pipeline.compression import (
    decode,
    encode,
    has_rest,
    num_words,
    num_words_of_rest,
)


def there_and_back(values) -> tuple[np.ndarray, bool]:
    """What arrives, and whether it was compressed; the sizes are as announced."""
    values = np.asarray(values, dtype=np.float32)
    first, rest = encode(values)
    assert first.dtype == np.int32 and len(first) == num_words(values.size)
    assert has_rest(first) == (rest is not None)
    assert rest is None or (rest.dtype == np.int32 and len(rest) == num_words_of_rest(values.size))
    return decode(first, rest, values.size), rest is None


singles = st.floats(width=32)
shapes = st.integers(0, 9)


@given(arrays(np.float32, shapes, elements=singles))
def test_near_or_exact(values):
    """Compressed: within 11 bits of each value, or 39 of the largest, no value lost. In full: the same bits, whatever they are."""
    arrived, is_compressed = there_and_back(values)
    if not is_compressed:
        assert (arrived.view(np.uint32) == values.view(np.uint32)).all()
        return
    assert np.isfinite(values).all()
    exact, error = values.astype(np.float64), np.abs(arrived.astype(np.float64) - values)
    largest = np.abs(exact).max(initial=0.0)
    assert (error <= np.maximum(np.abs(exact) * 2.0**-11, largest * 2.0**-39)).all()
    assert ((arrived == 0) == (values == 0)).all()


@given(
    arrays(np.int16, shapes, elements=st.integers(-2047, 2047)),
    st.integers(-110, 110),
    st.integers(0, 8),
)
def test_values_of_11_bits_come_back_as_they_were(numbers, exponent, spread):
    """Whatever their common power of two, and with different ones too, as long as all are near the largest."""
    powers = exponent - np.arange(len(numbers)) % (spread + 1)
    values = np.ldexp(numbers.astype(np.float32), powers).astype(np.float32)
    arrived, is_compressed = there_and_back(values)
    assert is_compressed and (arrived == values).all()


@pytest.mark.parametrize(
    ("values", "is_compressed"),
    [
        ([3.4e38, -1e30], True),  # beyond half precision's 65,504: the scaler takes care of that
        ([3.401993e38], False),  # it would round up to 2^128
        ([3.4e38, 1.0], False),  # the 1 would become 0
        ([1e-40, 3e-42], True),  # no normal numbers in single precision either
        ([1.0, 2.0**-38], True),
        ([1.0, 2.0**-40], False),
        ([1.0, 0.0, -0.0], True),
        ([np.inf, 1.0], False),
        ([np.nan], False),
        ([], True),
    ],
)
def test_what_needs_full_precision(values, is_compressed):
    assert there_and_back(values)[1] == is_compressed


def test_worked_by_hand():
    """max = 6 = 0.75 * 2^3, so e = 3 and the factor 2^12: 6 becomes 24,576 and 1 becomes 4,096, halves 0x7600 and 0x6C00."""
    first, rest = encode(np.array([6.0, 1.0], dtype=np.float32))
    assert rest is None and first.tolist() == [3, 0x6C00_7600]
    first, rest = encode(np.array([np.inf, 1.5], dtype=np.float32))  # 0x7F800000, 0x3FC00000
    assert first.tolist() == [-(2**31), 0x3FC0_7F80] and rest is not None and rest.tolist() == [0]
