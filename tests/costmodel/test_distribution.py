"""SBP states and distributions: their text, their slices, the canonical layout."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.distribution import Distribution, canonical, prime_factors
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.sbp import Broadcast, PartialSum, Split, dual, parse_state

D = Distribution.parse
STATES = st.one_of(st.builds(Split, st.integers(0, 3)), st.just(Broadcast()), st.just(PartialSum()))


@st.composite
def distributions(draw, max_dim: int = 3, permuted: bool = True) -> Distribution:
    """One to three levels of up to three axes; inside a level they may cut in any order."""
    states = st.one_of(st.builds(Split, st.integers(0, max_dim)), st.just(Broadcast()), st.just(PartialSum()))
    axis = st.tuples(st.sampled_from([1, 2, 3, 4]), states)
    levels = draw(st.lists(st.lists(axis, max_size=3), min_size=1, max_size=3))
    plain = Distribution.on_mesh(levels)
    order: list[int] = []
    for level in range(len(levels)):
        members = [i for i, own in enumerate(plain.axes) if own.level == level]
        order += draw(st.permutations(members)) if permuted else members
    return Distribution(tuple(plain.axes[i] for i in order), tuple(plain.states[i] for i in order))


# ------------------------------------------------------------------------------------------------------------------- text


@given(STATES)
def test_states_print_and_parse(state):
    assert parse_state(str(state)) == state


def test_states_by_hand():
    assert [str(state) for state in (Split(0), Split(12), Broadcast(), PartialSum())] == ["S(0)", "S(12)", "B", "P"]
    assert parse_state(" S1 ") == parse_state("S(1)") == Split(1)
    assert [dual(state) for state in (Split(2), Broadcast(), PartialSum())] == [Split(2), PartialSum(), Broadcast()]


@pytest.mark.parametrize("text", ["", "S", "S(-1)", "S(1", "b", "S0 B", "S9999999999", "S\u0663", "S(1))"])
def test_invalid_states(text):
    with pytest.raises(UserError, match=r"is not one of S0, S1, \.\.\., B, P"):
        parse_state(text)


@given(distributions())
@settings(max_examples=100)
def test_distributions_print_and_parse(distribution):
    read = D(str(distribution))
    assert read.without_unit_axes() == distribution.without_unit_axes()
    assert str(read) == str(distribution)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("(S0:4, B:2, S1:8)", [(4, 16, 0), (2, 8, 0), (8, 1, 0)]),
        ("(S0:2, S1:4 | S0:2, S1:4)", [(2, 32, 0), (4, 8, 0), (2, 4, 1), (4, 1, 1)]),
        ("(S0:2@4, S1:2@1, S1:2@2)", [(2, 4, 0), (2, 1, 0), (2, 2, 0)]),
        ("( | P:2)", [(2, 1, 1)]),
        ("()", []),
    ],
)
def test_text_of_the_docstring(text, axes):
    distribution = D(text)
    assert [(axis.size, axis.stride, axis.level) for axis in distribution.axes] == axes
    assert str(distribution) == text
    assert D(text.replace(" ", "")) == distribution
    assert D(text.replace("S0", "S(0)").replace("S1", "S(1)")) == distribution


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S0:4", "not of the form (S0:4, B:2, S1:8)"),
        ("(S0)", "'S0' is not of the form STATE:SIZE"),
        ("(S0:0)", "'S0:0' is not of the form STATE:SIZE"),
        ("(S0:-2)", "is not of the form STATE:SIZE"),
        ("(S0:2,,B:2)", "'' is not of the form STATE:SIZE"),
        ("(X:2)", "SBP state 'X'"),
        ("(S0:2@3)", "stride @3 of the axis of size 2 should be @1"),
        ("(S0:2@1, B:2@1)", "should be @2"),
        ("(S0:2@4, B:2@1)", "should be @2"),
        ("(S0:" + "9" * 5000 + ")", "is not of the form STATE:SIZE"),
    ],
)
def test_invalid_distributions(text, message):
    with pytest.raises(UserError) as error:
        D(text)
    assert message in str(error.value) and "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------- slices


@given(distributions(max_dim=1), st.tuples(st.integers(1, 3), st.integers(1, 3)))
@settings(max_examples=60, deadline=None)
def test_slices_tile_the_tensor(distribution, extra):
    """Every element lies on exactly as many ranks as the axes that do not split have members; each rank holds as much."""
    shape = tuple(size * more for size, more in zip(distribution.split_sizes(2), extra))
    held = np.zeros(shape, int)
    for rank in range(distribution.num_ranks):
        part = held[distribution.slices(rank, shape)]
        assert part.shape == distribution.local_shape(shape)
        part += 1
    others = [a.size for a, state in zip(distribution.axes, distribution.states) if not isinstance(state, Split)]
    assert (held == prod(others)).all()


def test_slices_by_hand():
    """8 ranks as 2 x 2 x 2; rank 5 = (1, 0, 1)."""
    in_rank_order = D("(S0:2, S1:2, S1:2)")
    assert in_rank_order.block(5, 2) == (1, 0b01)
    assert in_rank_order.slices(5, (4, 8)) == (slice(2, 4), slice(2, 4))
    # The innermost axis cuts first: it takes the most significant digit.
    innermost_first = D("(S0:2@4, S1:2@1, S1:2@2)")
    assert innermost_first.block(5, 2) == (1, 0b10)
    assert innermost_first.slices(5, (4, 8)) == (slice(2, 4), slice(4, 6))
    # Copies and summands have the whole of the dimension.
    assert D("(P:2, B:2, S0:2)").slices(5, (4, 8)) == (slice(2, 4), slice(0, 8))
    # Two axes of different levels on one dimension: the outer one cuts first.
    assert D("(S0:2 | S0:4)").slices(5, (16, 1)) == (slice(10, 12), slice(0, 1))


def test_shapes_that_do_not_divide():
    with pytest.raises(UserError, match=r"dimension 1 of shape \(4, 6\) does not divide into the 4 slices of \(S1:4\)"):
        D("(S1:4)").local_shape((4, 6))
    with pytest.raises(UserError, match=r"\(S2:4\) splits dimension 2, the tensor has 2 dimensions"):
        D("(S2:4)").local_shape((4, 6))


@given(distributions())
def test_duals(distribution):
    assert distribution.dual().dual() == distribution
    assert distribution.dual().split_sizes(4) == distribution.split_sizes(4)
    assert str(D("(S0:2, B:3, P:4)").dual()) == "(S0:2, P:3, B:4)"


# -------------------------------------------------------------------------------------------------------- canonical layout


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        # 8 ranks, rows over the outer 2; features over 4 = 2 x 2, stride 1 before stride 2.
        (((2, 4),), "(S0:2@4, S1:2@1, S1:2@2)"),
        (((1, 8),), "(S1:2@1, S1:2@2, S1:2@4)"),
        (((4, 2),), "(S0:4, S1:2)"),
        (((8, 1),), "(S0:8)"),
        # 12 = 2 x 2 x 3 in rank order: the innermost axis is the 3, and it cuts first.
        (((1, 12),), "(S1:3@1, S1:2@3, S1:2@6)"),
        (((2, 6),), "(S0:2@6, S1:3@1, S1:2@3)"),
        # Levels one after the other: the nodes cut rows and features before the devices do.
        (((2, 2), (2, 2)), "(S0:2, S1:2 | S0:2, S1:2)"),
        (((1, 4), (1, 2)), "(S1:2@2, S1:2@4 | S1:2@1)"),
        (((1, 1), (2, 1)), "( | S0:2)"),
        (((1, 1),), "()"),
    ],
)
def test_canonical_by_hand(levels, text):
    assert str(canonical(levels)) == text


def test_canonical_slices_by_hand():
    """(p0, s) = (2, 4), tensor 4 x 8: rank 1 (i = 0, feature digits 0 then 1) holds columns 4, 5: most significant digit 1."""
    layout = canonical(((2, 4),))
    columns = [layout.slices(rank, (4, 8))[1].start for rank in range(8)]
    assert columns == [0, 4, 2, 6, 0, 4, 2, 6]
    rows = [layout.slices(rank, (4, 8))[0].start for rank in range(8)]
    assert rows == [0, 0, 0, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("size", [1, 2, 6, 8, 12, 30])
def test_canonical_splits_evenly_over_all_ranks(size):
    for p0 in (d for d in range(1, size + 1) if size % d == 0):
        layout = canonical(((p0, size // p0),))
        assert layout.num_ranks == size
        assert layout.split_sizes(2) == (p0, size // p0)
        assert len({layout.block(rank, 2) for rank in range(size)}) == size
        for across in (c for c in range(1, p0 + 1) if p0 % c == 0):
            tiles = canonical(((p0, size // p0, across),))
            assert tiles.split_sizes(3) == (p0 // across, size // p0, across)
            assert len({tiles.block(rank, 3) for rank in range(size)}) == size


@given(st.integers(1, 100_000))
def test_prime_factors(number):
    factors = prime_factors(number)
    assert prod(factors) == number
    assert list(factors) == sorted(factors)
    assert all(all(p % d for d in range(2, int(p**0.5) + 1)) and p > 1 for p in factors)
