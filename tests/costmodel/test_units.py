"""Numbers as people read and type them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.units import MAX_RUNS, MAX_VALUES, abridged, format_memory_limit, format_ranges, format_values


def test_runs_of_numbers_are_joined() -> None:
    assert format_ranges([]) == ""
    assert [format_ranges(numbers) for numbers in ([0], [1, 2], range(8))] == ["0", "1-2", "0-7"]
    assert format_ranges([0, 2, 3, 4, 7]) == "0, 2-4, 7"


def read_ranges(text: str) -> list[int]:
    """What `format_ranges` wrote, without "..."."""
    text, _, repeated = text.partition(" of every ")
    read = [range(int(first), int(last or first) + 1) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    numbers = [number for one in read for number in one]
    if repeated:
        period, last = map(int, repeated.split(" up to "))
        numbers = sorted(n + k for n in numbers for k in range(0, last + 1, period) if n + k <= last)
    return numbers


@given(st.sets(st.integers(0, 40)))
def test_ranges_read_back(numbers: set[int]) -> None:
    text = format_ranges(sorted(numbers))
    if "..." in text:
        assert text.count(", ") == MAX_RUNS - 1 and text.endswith(f"{max(numbers)}")
    else:
        assert read_ranges(text) == sorted(numbers)


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(11, 30), st.integers(9, 200))
def test_what_repeats_is_shown_once(pattern: set[int], period: int, times: int) -> None:
    numbers = [start + k * period for k in range(times) for start in sorted(pattern)]
    text = format_ranges(numbers)
    assert " of every " in text and read_ranges(text) == numbers and len(text) < 60


def test_devices_of_large_clusters_are_short() -> None:
    # Replicas of a bidirectional pipeline of 8 workers on 2,048 devices; every other node of 8.
    assert format_ranges(sorted([*range(0, 2048, 8), *range(7, 2048, 8)])) == "0, 7 of every 8 up to 2047"
    assert format_ranges([n for n in range(2048) if n % 16 < 8]) == "0-7 of every 16 up to 2039"
    assert format_ranges([n * n for n in range(10)]) == "0-1, 4, 9, 16, 25, 36, ..., 81"


def test_values_of_many_workers_are_short() -> None:
    assert format_values([1, 2.5, 2.5]) == "1 2.5 2.5"
    assert format_values([4] * 1022 + [2, 1]) == "4 (1,022 times) 2 1"
    words = format_values(range(2048, 0, -1)).split()
    assert len(words) == MAX_VALUES and words[:2] == ["2048", "2047"] and words[-2:] == ["...", "1"]
    assert abridged(["0", "2", "4"], 3) == ["0", "2", "4"]


def test_a_limit_names_its_argument() -> None:
    assert format_memory_limit(4690104288) == "4.37 GiB (memory_limit_bytes=4690104288)"
    assert format_memory_limit(2**20 + 0.5) == "1 MiB (memory_limit_bytes=1048576.5)"
