"""Rows that no other row dominates, against comparisons of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.search.dominance import TOLERANCE, TooManyError, undominated


def expected(group: np.ndarray, values: np.ndarray) -> list[int]:
    """The rows that no other row of their group beats; of equal rows the first one."""

    def beats(a: int, b: int) -> bool:
        if group[a] != group[b] or (values[a] > values[b]).any():
            return False
        return bool((values[a] < values[b]).any()) or a < b

    return [b for b in range(len(group)) if not any(beats(a, b) for a in range(len(group)) if a != b)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 4)] * 3), max_size=40),
    st.integers(0, 3),
    st.sampled_from([1.0, 1e-6, 1e12]),
)
def test_rows_of_small_groups(rows: list[tuple[int, ...]], columns: int, scale: float) -> None:
    group = np.array([row[0] for row in rows], dtype=int)
    values = np.array([row[1 : columns + 1] for row in rows], dtype=float).reshape(len(rows), columns)
    assert undominated(group, values * scale).tolist() == expected(group, values)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.sampled_from([3, 30, 10**6]))
def test_rows_of_large_groups(seed: int, groups: int, columns: int, most: int) -> None:
    """Hundreds of rows in a group: several blocks of rows, with few dominated ones (opposite columns) or many, and equal ones."""
    dice = np.random.default_rng(seed)
    group, values = dice.integers(0, groups, 300), dice.integers(0, most, (300, columns)).astype(float)
    if columns > 1 and dice.random() < 0.5:
        values[:, 1] = most - values[:, 0]
    assert undominated(group, values).tolist() == expected(group, values)


def test_rows_that_differ_by_rounding_errors_are_equal() -> None:
    """In small groups, and in large ones."""
    near = 1 - TOLERANCE / 2
    for copies in (1, 50):
        group = np.repeat(np.arange(3), 2 * copies)
        values = np.tile([[1.0, near], [near, 1.0]], (3 * copies, 1))
        assert len(undominated(group, values)) == 3
        values = np.tile([[1.0, 0.5], [0.5, 1.0]], (3 * copies, 1))
        assert len(undominated(group, values)) == 6


def test_the_number_of_rows_is_limited() -> None:
    """Of n rows (i, n - i) all remain, in one group or in groups of two."""
    for group in (np.zeros(200, dtype=int), np.arange(200) // 2, np.arange(200) // 50):
        values = np.column_stack([np.arange(200.0), 200 - np.arange(200.0)])
        assert len(undominated(group, values, most_rows=200)) == 200
        with pytest.raises(TooManyError):
            undominated(group, values, most_rows=199)


def test_a_stop_ends_it() -> None:
    stop = Stop()
    stop.request()
    for rows in (2, 200):
        with pytest.raises(StopRequestedError):
            undominated(np.zeros(rows, dtype=int), np.ones((rows, 1)), stop)
