"""Strategies: how many there are, which divide, where their axes lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.strategy import Strategy, data_parallel, enumerate_strategies, transposed
from autoddl.costmodel.strategygroup import group_strategies
from autoddl.zoo.layers import add, attention, conv2d, embedding, linear, loss, norm, position

WIDE = linear("fc", 1, 2**20, 2**20)


def count(layer: Layer, *level_sizes: int, **options: bool) -> int:
    strategies = list(enumerate_strategies(layer, level_sizes, **options))
    assert len(set(strategies)) == len(strategies)
    assert all(tuple(a * b * c for a, b, c in strategy.splits) == level_sizes for strategy in strategies)
    return len(strategies)


@pytest.mark.parametrize(
    ("level_sizes", "expected"),
    [
        ((1,), 1),
        ((2,), 3),
        ((128,), 36),  # 2^7 in three: (7 + 2 choose 2)
        ((4096,), 91),  # (12 + 2 choose 2)
        ((128, 8), 360),  # 36 * (3 + 2 choose 2)
    ],
)
def test_counts(level_sizes, expected):
    assert count(WIDE, *level_sizes) == expected


def test_counts_against_enumeration():
    for size in (6, 12, 36):
        triples = [t for t in product(range(1, size + 1), repeat=3) if t[0] * t[1] * t[2] == size]
        wide = linear("fc", 1, size * 5, size * 7)
        assert {s.splits[0] for s in enumerate_strategies(wide, (size,))} == set(triples)


def test_layers_without_a_product_have_no_p2():
    shape = (4, 2**10)
    for layer in (norm("n", *shape), add("a", shape), attention("t", 4, 1024, 1, causal=True), loss("l", *shape)):
        assert len({s.splits for s in enumerate_strategies(layer, (128,))}) == 8
        assert all(strategy.p2 == 1 for strategy in enumerate_strategies(layer, (128,)))
        assert not Strategy(((2, 1, 64),)).divides(layer)


def test_convolutions_split_channels_and_rows():
    """28 splits of 64 = 2^6 channels over 64 devices; up to 8 x 8 ranks share 8 x 8 pixels, none if the output lies elsewhere.

    8 strips of 8 pixels have boundaries of 8, 4 x 2 tiles of 4 + 2; 4 x 4 tiles of 2 + 2, for 16 ranks; 8 x 4 of 2 + 1, and
    8 x 8 of 1 + 1. From 4 x 2 tiles on strips have longer boundaries, or do not divide the image.
    """
    wide = conv2d("c", (64, 8, 8), 64, kernel_size=3, padding=1)
    offered = list(enumerate_strategies(wide, (64,)))
    assert len({s.splits for s in offered}) == 28
    # p0 = 2^k has min(k, 3) numbers of ranks that share an image of 8 rows, with 7 - k splits of the rest.
    assert sum(bool(s.positions and not s.columns) for s in offered) == sum(min(k, 3) * (7 - k) for k in range(1, 7))
    assert {s.tiles for s in offered if s.columns} == {(4, 2), (4, 4), (8, 4), (8, 8)}
    assert sum(bool(s.columns) for s in offered) == sum((k - 2) * (7 - k) for k in range(3, 7))
    assert not any(s.positions for s in enumerate_strategies(conv2d("c", (64, 8, 8), 64, kernel_size=3), (64,)))
    assert {s.splits[0] for s in enumerate_strategies(conv2d("c", (3, 8, 8), 64, kernel_size=3, padding=1), (4,))} == {
        (4, 1, 1)
    }


def test_whole_heads():
    eight = attention("t", 4, 8, 64, causal=True)
    assert {s.splits[0] for s in enumerate_strategies(eight, (16,))} == {(16, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1)}
    grouped = attention("t", 4, 8, 64, kv_heads=2, causal=True)
    assert {s.splits[0] for s in enumerate_strategies(grouped, (16,)) if not s.key_copies} == {(16, 1, 1), (8, 2, 1)}
    copied = {s.splits[0]: s.key_copies for s in enumerate_strategies(grouped, (16,)) if s.key_copies}
    assert copied == {(4, 4, 1): (2,), (2, 8, 1): (4,)}  # 4 / 2 and 8 / 2 ranks use the same key and value


def test_features_divide():
    """12 -> 20 over 4: input and output are evenly split over p1 p2 around the product."""
    offered = {s.splits[0] for s in enumerate_strategies(linear("fc", 1, 12, 20), (8,))}
    assert offered == {(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (2, 1, 4)}
    gated = linear("up", 1, 16, 8, epilogue=("silu", "mul"))  # its output has 4 features
    assert max(s.p1 * s.p2 for s in enumerate_strategies(gated, (8,))) == 4
    vocabulary = {s.splits[0] for s in enumerate_strategies(embedding("e", 4, 9, 4), (2,))}
    assert vocabulary == {(2, 1, 1), (1, 2, 1)}  # 9 rows of the table do not split in two
    assert {s.splits[0] for s in enumerate_strategies(loss("l", 4, 9), (6,))} == {(6, 1, 1), (2, 3, 1)}
    assert {s.splits[0] for s in enumerate_strategies(position("p", 4, 4, 6), (4,))} == {(4, 1, 1), (2, 2, 1)}
    assert list(enumerate_strategies(linear("fc", 1, 7, 7), (2,))) == [data_parallel((2,))]


def test_summa_is_offered_where_both_sides_are_split():
    plain = set(enumerate_strategies(WIDE, (4, 2)))
    summa = set(enumerate_strategies(WIDE, (4, 2), summa=True)) - plain
    meshes = {(a, b) for a in (1, 2, 4) for b in (1, 2) if 1 < a * b < 8}
    assert {(s.splits[0][0], s.splits[1][0]) for s in summa} == meshes
    assert all(s.summa and s.p2 == 1 and s.p0 > 1 and s.p1 > 1 for s in summa)
    assert count(linear("fc", 1, 2**10, 2**10, tied_to="wte"), 4, summa=True) == count(WIDE, 4)
    # The weight's rows divide over r, its columns over c.
    assert count(linear("fc", 1, 6, 6), 4, summa=True) == 1 + 2 + 1


@pytest.mark.parametrize(
    ("layer", "splits"),
    [
        (WIDE, (2, 2, 2)),
        (norm("n", 4, 8), (2, 4, 1)),
        (embedding("e", 4, 8, 8), (2, 4, 1)),
        (add("a", (4, 8)), (2, 4, 1)),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_summa_is_for_linear_layers_on_two_axes(layer, splits):
    assert not Strategy((splits,), summa=True).divides(layer)


def test_transposed():
    strategy = Strategy(((2, 3, 5), (1, 4, 2)))
    assert transposed(strategy) == Strategy(((2, 5, 3), (1, 2, 4)))
    assert transposed(transposed(strategy)) == strategy
    assert transposed(strategy).rows_and_features == strategy.rows_and_features == ((2, 15), (1, 8))


def test_products_over_levels_and_text():
    strategy = Strategy(((2, 3, 5), (1, 4, 2)))
    assert (strategy.p0, strategy.p1, strategy.p2, strategy.num_devices) == (2, 12, 10, 240)
    assert str(strategy) == "(2,3,5) | (1,4,2)"
    assert str(Strategy(((2, 2, 1),), summa=True)) == "(2,2,1) summa"
    assert data_parallel((4, 2)) == Strategy(((4, 1, 1), (2, 1, 1)))


def test_axes():
    """30 x 8 ranks; p2 innermost in each level."""
    strategy = Strategy(((2, 3, 5), (1, 4, 2)))
    assert strategy.axes(0) == (Axis(2, 120, 0),)
    assert strategy.axes(1) == (Axis(3, 40, 0), Axis(4, 2, 1))
    assert strategy.axes(2) == (Axis(5, 8, 0), Axis(2, 1, 1))
    # An embedding's p1 and p2 change places in the mesh: its table lies like the transposed matrix of a linear layer.
    table, matrix = strategy, transposed(strategy)
    assert [table.axes(which, embedding=True) for which in (0, 1, 2)] == [matrix.axes(which) for which in (0, 2, 1)]


def test_gathering_p1_and_scattering_p2_are_steps_of_the_canonical_layout():
    """The canonical features of (p0, p1 p2): p2's digits are the most significant, so that after a gather over p1 a rank has one
    slice of d_in; and p2's digits are missing from an output that is split over p1 alone."""
    strategy = Strategy(((2, 2, 3),))
    layout = strategy.activations
    p1, p2 = strategy.axes(1)[0], strategy.axes(2)[0]
    feature_axes = [axis for axis, state in zip(layout.axes, layout.states) if str(state) == "S(1)"]
    covered = [p2 if p2.stride <= axis.stride < p2.stride * p2.size else p1 for axis in feature_axes]
    assert covered == sorted(covered, key=lambda axis: axis is p1)


def test_sbp_of_the_paper():
    strategy = Strategy(((2, 4, 8),))
    texts = {name: str(layout) for name, layout in strategy.sbp(WIDE).items()}
    assert texts == {
        "input": "(S0:2, B:4, S1:8)",
        "weight": "(B:2, S1:4, S0:8)",
        "output": "(S0:2, S1:4, P:8)",
        **dict.fromkeys(("parameter", "gradient", "state"), "(B:2, S1:4, S0:8)"),
    }
    divided = {name: str(layout) for name, layout in replace(strategy, zero=2).sbp(WIDE).items()}
    assert divided == {**texts, **dict.fromkeys(("gradient", "state"), "(S0:2, S1:4, S0:8)")}
    assert strategy.sbp(norm("n", 4, 64))["weight"] is not None
    assert strategy.sbp(add("a", (4, 64)))["weight"] is None
    two = Strategy(((2, 1, 4), (1, 8, 1)))
    assert str(two.sbp(WIDE)["input"].without_unit_axes()) == "(S0:2, S1:4 | B:8)"


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3)


@st.composite
def offers(draw: st.DrawFn) -> list[Strategy]:
    """Some strategies of some layer."""
    sizes = draw(SIZES)
    every = list(enumerate_strategies(WIDE, sizes, summa=True)) + list(
        enumerate_strategies(linear("f", 1, 12, 24), sizes)
    )
    return draw(st.lists(st.sampled_from(every), min_size=1, max_size=40))


@given(offers())
@settings(max_examples=50, deadline=None)
def test_a_group_agrees_with_each_of_its_strategies(strategies):
    groups = list(group_strategies(strategies))
    assert sorted(int(i) for group in groups for i in group.indices) == list(range(len(strategies)))
    for group in groups:
        for place, index in enumerate(group.indices):
            one = strategies[index]
            assert group.summa == one.summa
            for name in ("p0", "p1", "p2", "panels"):
                assert getattr(group, name)[place] == getattr(one, name), name
            for which, transposes in product(range(3), (False, True)):
                theirs = group.axes(which, transposes)
                mine = one.axes(which, transposes)
                assert [axis.level for axis in theirs] == [axis.level for axis in mine]
                for of_all, of_one in zip(theirs, mine):
                    assert of_all.size[place] == of_one.size


@given(offers())
@settings(max_examples=30, deadline=None)
def test_there_are_no_more_groups_than_sequences_of_steps(strategies):
    """Strategies are in different groups only if their axes differ."""

    def steps_of(one: Strategy) -> object:
        return one.summa, tuple(tuple(n > 1 for n in split) for split in one.splits)

    assert len(list(group_strategies(strategies))) == len({steps_of(one) for one in strategies})
