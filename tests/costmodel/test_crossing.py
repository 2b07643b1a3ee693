"""Messages between two meshes: checked element by element on arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.crossing import Piece, crossing
from autoddl.costmodel.distribution import Distribution, canonical
from autoddl.costmodel.errors import UserError

SHAPE = (24, 24)
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 2, 2)]


@st.composite
def distributions(draw):
    mesh = draw(st.sampled_from(MESHES))
    states = [draw(st.sampled_from(["S0", "S1", "B"])) for _ in mesh]
    return Distribution.parse("(" + ", ".join(f"{state}:{size}" for state, size in zip(states, mesh)) + ")")


@st.composite
def canonical_layouts(draw):
    return canonical(((draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4, 6]))),))


def test_by_hand():
    """The table of the module's docstring."""
    pieces = crossing(Distribution.parse("(S0:2)"), Distribution.parse("(S0:2, S1:2)"), (4, 4))
    assert [(p.source, p.destination, *p.block) for p in pieces] == [
        (0, 0, range(2), range(2)),
        (0, 1, range(2), range(2, 4)),
        (1, 2, range(2, 4), range(2)),
        (1, 3, range(2, 4), range(2, 4)),
    ]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("(B:2)", "(S0:1)", [(0, 0, range(2)), (1, 0, range(2, 4))]),  # two holders send half each
        ("(S0:1)", "(B:2)", [(0, 0, range(4)), (0, 1, range(4))]),  # every rank receives a copy
        ("(B:2)", "(B:2)", [(0, 0, range(4)), (1, 1, range(4))]),  # each holder serves one
        ("(B:2)", "(B:3)", [(0, 0, range(4)), (1, 1, range(4)), (0, 2, range(4))]),
        ("(B:3)", "(B:2)", [(0, 0, range(2)), (2, 0, range(2, 4)), (1, 1, range(4))]),
    ],
)
def test_holders_share_the_load(source, target, expected):
    pieces = crossing(Distribution.parse(source), Distribution.parse(target), (4,))
    assert [(p.source, p.destination, p.block[0]) for p in pieces] == expected


@settings(deadline=None)
@given(st.one_of(distributions(), canonical_layouts()), st.one_of(distributions(), canonical_layouts()))
def test_every_element_arrives_once_and_was_there(source, target):
    """The pieces, cut out of the blocks of their sources, are exactly the blocks of the destinations, without duplicates."""
    tensor = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    arrived = [np.full(SHAPE, -1) for _ in range(target.num_ranks)]
    for piece in crossing(source, target, SHAPE):
        held = np.full(SHAPE, -1)
        held[source.slices(piece.source, SHAPE)] = tensor[source.slices(piece.source, SHAPE)]
        part = np.ix_(*piece.block)
        assert (held[part] >= 0).all() and (arrived[piece.destination][part] == -1).all()
        arrived[piece.destination][part] = held[part]
    for rank, found in enumerate(arrived):
        wanted = np.full(SHAPE, -1)
        wanted[target.slices(rank, SHAPE)] = tensor[target.slices(rank, SHAPE)]
        np.testing.assert_array_equal(found, wanted)


@settings(deadline=None)
@given(distributions(), distributions())
def test_holders_of_one_block_send_equal_parts(source, target):
    """Ranks that hold the same block send equal amounts, up to rounding, if there are enough destinations or elements."""
    sent = Counter(dict.fromkeys(range(source.num_ranks), 0))
    for piece in crossing(source, target, SHAPE):
        sent[piece.source] += piece.num_elements
    local = np.prod(target.local_shape(SHAPE))
    by_block: dict[tuple[int, ...], list[int]] = {}
    for rank in range(source.num_ranks):
        by_block.setdefault(source.block(rank, 2), []).append(sent[rank])
    assert all(max(loads) - min(loads) <= local for loads in by_block.values())
    assert sum(sent.values()) == local * target.num_ranks


@pytest.mark.parametrize("p", [1, 2, 4])
def test_equal_layouts_go_rank_to_rank(p):
    layout = canonical(((2, p),))
    assert [(x.source, x.destination) for x in crossing(layout, layout, (8, 8))] == [(r, r) for r in range(2 * p)]


def test_refusals():
    with pytest.raises(UserError, match=r"dimension 0 of shape \(3, 2\) does not divide into the 2 slices of \(S0:2\)"):
        crossing(Distribution.parse("(S0:2)"), Distribution.parse("(S0:1)"), (3, 2))
    with pytest.raises(UserError, match=r"\(P:2\) has partial sums, reduce them first"):
        crossing(Distribution.parse("(P:2)"), Distribution.parse("(S0:1)"), (4, 2))


def test_num_elements():
    assert Piece(0, 0, (range(2, 5), range(4))).num_elements == 12
