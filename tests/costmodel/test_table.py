"""Cost tables: costs by classes of options, and the sums of an assignment, against plain loops."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.table import ClassCosts, CostTable, Edge


@st.composite
def by_class(draw: st.DrawFn) -> ClassCosts:
    """Any number of options of any number of classes, which may have none."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    values = st.one_of(st.floats(0, 1e3), st.just(math.inf))
    between = np.array(draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])))
    rows, columns = (draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=12)) for n in shape)
    return ClassCosts(between.reshape(shape), np.array(rows), np.array(columns))


@given(by_class())
@settings(max_examples=40, deadline=None)
def test_classes_are_the_matrix_that_they_stand_for(costs: ClassCosts) -> None:
    expected = np.array([[costs.class_costs[row, column] for column in costs.columns] for row in costs.rows])
    assert np.array_equal(costs.matrix, expected)
    edge, plain = Edge(0, 1, costs), Edge(0, 1, expected)
    assert edge.shape == plain.shape == expected.shape
    assert np.array_equal(edge.cost, plain.cost)
    for a, b in np.ndindex(*expected.shape):
        assert costs.at(a, b) == edge.at(a, b) == plain.at(a, b) == expected[a, b]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_an_assignment_costs_the_exact_sum(seed: int, num: int, shared: bool) -> None:
    """Rounded once, in whatever order variables and edges come, and whether or not they share their arrays."""
    rng = np.random.default_rng(seed)
    options = rng.integers(1, 6, num) if not shared else np.full(num, 4)
    one = [10.0 ** rng.uniform(-9, 3, options[0]) for _ in range(3)]
    cost, memory, buffer = (
        [of_one if shared else np.floor(1e6 * rng.random(n)) + (k == 0) * 1e-7 for n in options]
        for k, of_one in enumerate(one)
    )
    between = rng.random((2, 3))
    rows, columns = rng.integers(0, 2, 4), rng.integers(0, 3, 4)
    edges = []
    for i in range(num):
        for j in range(i + 1, num):
            if rng.random() < 0.6:
                classes = ClassCosts(between, rows, columns)
                whole = ClassCosts(rng.random((2, 2)), rng.integers(0, 2, options[i]), rng.integers(0, 2, options[j]))
                edges.append(Edge(i, j, classes if shared else whole if rng.random() < 0.5 else whole.matrix))
    names = tuple(f"v{i}" for i in range(num))
    table = CostTable(names, tuple(cost), tuple(memory), tuple(buffer), tuple(edges))
    choice = tuple(int(rng.integers(0, n)) for n in options)
    parts = [Fraction(float(cost[i][x])) for i, x in enumerate(choice)]
    parts += [Fraction(float(edge.cost[choice[edge.source], choice[edge.target]])) for edge in edges]
    assert table.evaluate(choice) == float(sum(parts))
    resident = sum(float(memory[i][x]) for i, x in enumerate(choice))
    largest = max(float(buffer[i][x]) for i, x in enumerate(choice))
    assert table.peak_memory(choice) == pytest.approx(resident + largest, rel=1e-15)
    order = rng.permutation(len(edges))
    again = CostTable(names, table.cost, table.memory, table.buffer, tuple(edges[k] for k in order))
    assert again.evaluate(choice) == table.evaluate(choice)


def test_an_impossible_pair_costs_infinitely_much() -> None:
    forbidden = ClassCosts(np.array([[0.0, math.inf]]), np.zeros(2, dtype=int), np.array([0, 1]))
    pair = (np.ones(2), np.ones(2))
    table = CostTable(("a", "b"), pair, pair, pair, (Edge(0, 1, forbidden),))
    assert table.evaluate((1, 0)) == 2.0
    assert table.evaluate((1, 1)) == math.inf
