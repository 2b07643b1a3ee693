"""Numbers as people read and type them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.units import format_memory_limit, format_ranges


def test_runs_of_numbers_are_joined() -> None:
    assert format_ranges([]) == ""
    assert [format_ranges(numbers) for numbers in ([0], [1, 2], range(8))] == ["0", "1-2", "0-7"]
    assert format_ranges([0, 2, 3, 4, 7]) == "0, 2-4, 7"


@given(st.sets(st.integers(0, 40)))
def test_ranges_read_back(numbers: set[int]) -> None:
    text = format_ranges(sorted(numbers))
    read = [range(int(first), int(last or first) + 1) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    assert [number for one in read for number in one] == sorted(numbers)


def test_a_limit_is_rounded_up() -> None:
    assert format_memory_limit(4.368 * 2**30) == "4.37 GiB (--memory-limit 4.368)"
    assert format_memory_limit(4.36801 * 2**30) == "4.37 GiB (--memory-limit 4.369)"
    assert format_memory_limit(2**20) == "1 MiB (--memory-limit 0.0009766)"


@given(st.floats(1, 2.0**50))
def test_a_limit_that_is_typed_is_enough_and_hardly_more(nbytes: float) -> None:
    typed = float(format_memory_limit(nbytes).split("--memory-limit ")[1].rstrip(")")) * 2**30
    assert nbytes * (1 - 1e-12) <= typed <= nbytes * 1.0011
