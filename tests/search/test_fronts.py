"""Fronts of tables of vectors, against all choices one by one.

Numbers are whole and small, so that sums are exact and ties are many.
"""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.costmodel.table import ClassCosts
from autoddl.search.dominance import TooManyError
from autoddl.search.fronts import Guide, VectorEdge, VectorTable, front, least, least_choices

COMPONENTS = 3


@st.composite
def vector_tables(draw: st.DrawFn, keyed: bool = True) -> VectorTable:
    """Up to 5 variables of up to 4 options, edges between any of them, 0 to 2 keys."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    pairs = draw(st.lists(st.sampled_from(list(combinations(range(len(counts)), 2))), max_size=6)) if counts[1:] else []
    edges = []
    for first, second in pairs:
        source, target = (first, second) if dice.random() < 0.5 else (second, first)
        parts = []
        for component in dice.permutation(COMPONENTS)[: dice.integers(1, 3)].tolist():
            shape = dice.integers(1, 4, size=2)
            between = dice.integers(0, 6, size=shape).astype(float)
            between[dice.random(shape) < 0.15] = math.inf
            rows, columns = (dice.integers(0, n, size=counts[v]) for n, v in zip(shape, (source, target)))
            parts.append((component, ClassCosts(between, rows, columns)))
        edges.append(VectorEdge(source, target, tuple(parts)))
    some = dice.permutation(len(counts))[: dice.integers(0, 3)].tolist() if keyed else []
    return VectorTable(
        tuple(dice.integers(0, 6, size=(n, COMPONENTS)).astype(float) for n in counts),
        tuple(dice.integers(0, 6, size=n).astype(float) for n in counts),
        tuple(edges),
        tuple((v, dice.integers(0, 2, size=counts[v])) for v in some),
    )


def every_choice(table: VectorTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All choices with their sums and sizes, added up one by one; those with a forbidden pair left out."""
    choices, sums, sizes = [], [], []
    for choice in product(*(range(len(of_one)) for of_one in table.sums)):
        total = np.zeros(COMPONENTS)
        for variable, option in enumerate(choice):
            total = total + table.sums[variable][option]
        for edge in table.edges:
            for component, costs in edge.parts:
                total[component] += costs.at(choice[edge.source], choice[edge.target])
        if np.isfinite(total).all():
            choices.append(choice)
            sums.append(total)
            sizes.append(max(size[option] for size, option in zip(table.sizes, choice)))
    count = len(table.sums)
    return np.array(choices).reshape(-1, count), np.array(sums).reshape(-1, COMPONENTS), np.array(sizes)


def seen(table: VectorTable, choices: np.ndarray) -> list[tuple[int, ...]]:
    """The classes of the keys of each choice."""
    return [tuple(int(classes[choice[v]]) for v, classes in table.keys) for choice in choices]


weights = st.tuples(*[st.integers(0, 3)] * COMPONENTS)


@settings(max_examples=150, deadline=None)
@given(vector_tables(), st.lists(weights, min_size=1, max_size=4))
def test_least_is_the_least_of_all_choices(table: VectorTable, wanted: list[tuple[int, ...]]) -> None:
    _, sums, _ = every_choice(table)
    found = least(table, np.array(wanted, dtype=float))
    assert found.shape == (len(wanted),)
    for one, value in zip(wanted, found.tolist()):
        # A forbidden pair is forbidden for all weights of its component.
        assert value == (sums @ np.array(one)).min(initial=math.inf)
    choices = least_choices(table, np.array(wanted, dtype=float))
    assert len(choices) == (len(wanted) if len(sums) else 0)
    if len(choices):
        of_choices, _ = table.evaluate(choices)
        assert [float(np.array(one) @ row) for one, row in zip(wanted, of_choices)] == found.tolist()


@settings(max_examples=250, deadline=None)
@given(
    vector_tables(),
    st.lists(st.tuples(weights, st.floats(0.0, 1.0)), max_size=2),
    st.none() | st.tuples(st.integers(0, COMPONENTS - 1), st.floats(-0.1, 1.2)),
)
def test_the_front_is_that_of_all_choices(
    table: VectorTable, guided: list[tuple[tuple[int, ...], float]], bounded: tuple[int, float] | None
) -> None:
    choices, sums, sizes = every_choice(table)
    assume(len(choices))

    def between(values: np.ndarray, where: float) -> float:
        return float(math.floor(values.min() + where * (values.max() - values.min())))

    fits, compared, limit = np.ones(len(choices), dtype=bool), list(range(COMPONENTS)), None
    if bounded is not None:
        component, where = bounded
        peaks = sums[:, component] + sizes
        limit = component, between(peaks, where)
        fits &= peaks <= limit[1]
        # Below a limit, smaller values are not better.
        compared.remove(component)
        guided = [(tuple(w * (c != component) for c, w in enumerate(one)), where) for one, where in guided]
    guides = [Guide(one, between(sums @ np.array(one), where)) for one, where in guided]
    for guide in guides:
        fits &= sums @ np.array(guide.weights) <= guide.threshold

    found = front(table, guides, limit)
    known = {tuple(choice): row for row, choice in enumerate(choices.tolist())}
    rows = np.array([known[tuple(choice)] for choice in found.choices.tolist()], dtype=int)
    assert fits[rows].all()
    assert (sums[rows] == found.sums).all() and (sizes[rows] == found.sizes).all()

    of_all, of_found = seen(table, choices), seen(table, found.choices)
    for row in np.flatnonzero(fits).tolist():
        same = [other for other, key in zip(rows.tolist(), of_found) if key == of_all[row]]
        below = [other for other in same if (sums[other] <= sums[row])[compared].all()]
        assert below, "what nothing beats is left out"
    if limit is None:
        # Options of a key variable may belong to more classes than its key distinguishes.
        ends = [v for v, _ in table.keys]
        for row, other in permutations(rows.tolist(), 2):
            assert (choices[row, ends] != choices[other, ends]).any() or (sums[other] > sums[row]).any(), "beaten"


@settings(max_examples=60, deadline=None)
@given(vector_tables(), st.integers(0, COMPONENTS - 1))
def test_the_least_peak_is_on_the_front_of_a_limit_that_binds(table: VectorTable, component: int) -> None:
    _, sums, sizes = every_choice(table)
    assume(len(sizes))
    peaks = sums[:, component] + sizes
    assert len(front(table, (), (component, float(peaks.min())))) > 0
    assert len(front(table, (), (component, float(peaks.min()) - 0.5))) == 0


@settings(max_examples=40, deadline=None)
@given(vector_tables(keyed=False), st.integers(1, 3))
def test_small_pieces_make_the_same_front(table: VectorTable, piece: int) -> None:
    """Rows of different chunks are compared with each other."""
    whole = front(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoddl.search.fronts._CHUNK", piece)
        again = front(table)
    assert sorted(map(tuple, whole.sums.tolist())) == sorted(map(tuple, again.sums.tolist()))


def test_too_many_rows() -> None:
    """Trading one component for the other in each of 6 variables at powers of two: all 2^6 choices are on the front."""
    sums = tuple(np.array([[0.0, 2.0**v], [2.0**v, 0.0]]) for v in range(6))
    table = VectorTable(sums, (np.zeros(2),) * 6, ())
    assert len(front(table)) == 64 and len(front(table, most_rows=64)) == 64
    with pytest.raises(TooManyError):
        front(table, most_rows=63)
    # a + b = 63 for each choice: a <= 10 and b <= 53 leave one.
    assert len(front(table, [Guide((1.0, 0.0), 10.0), Guide((0.0, 1.0), 53.0)], most_rows=63)) == 1


def test_a_stop_ends_it() -> None:
    stop = Stop()
    stop.request()
    with pytest.raises(StopRequestedError):
        front(VectorTable((np.zeros((2, 1)),), (np.zeros(2),), ()), stop=stop)
