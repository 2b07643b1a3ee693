"""The separable bound, against brute force and against the linear program that it solves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from autoddl.costmodel.table import CostTable
from autoddl.search import separable_bound, separable_memory

from .instances import brute_force, memory_limits, random_table, tables
from .test_solvers import limit_of


@given(tables(), memory_limits())
@settings(max_examples=80, deadline=None)
def test_it_bounds_the_optimum_and_the_memory(table: CostTable, where: float | None) -> None:
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    bound = separable_bound(table, limit)
    if math.isfinite(truth.cost):
        assert bound <= truth.cost + 1e-9 * max(abs(truth.cost), 1e-3)
    assert separable_memory(table) <= brute_force(table, None).smallest_memory


def relaxation(table: CostTable, room: float) -> float:
    """The linear program: a mixture of options for every variable, at most ``room`` bytes in all."""
    finite = [np.isfinite(cost) for cost in table.cost]
    cost = np.concatenate([of_one[kept] for of_one, kept in zip(table.cost, finite)])
    memory = np.concatenate([of_one[kept] for of_one, kept in zip(table.memory, finite)])
    owner = np.repeat(np.arange(len(finite)), [int(kept.sum()) for kept in finite])
    one_each = (owner == np.arange(len(finite))[:, None]).astype(float)
    found = linprog(cost, A_ub=memory[None, :], b_ub=[room], A_eq=one_each, b_eq=np.ones(len(finite)))
    return float(found.fun) if found.status == 0 else math.inf


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 6), min_size=1, max_size=6), st.floats(-0.1, 1.1))
@settings(max_examples=60, deadline=None)
def test_it_is_the_linear_relaxation_of_a_table_without_edges(seed: int, sizes: list[int], where: float) -> None:
    table = random_table(seed, sizes, [])
    limit = limit_of(table, where)
    lowest = max(float(buffer[np.isfinite(cost)].min()) for buffer, cost in zip(table.buffer, table.cost))
    expected = relaxation(table, limit - lowest)
    assert separable_bound(table, limit) == pytest.approx(expected, rel=1e-7, abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.floats(0.0, 1.0))
@settings(max_examples=50, deadline=None)
def test_tied_and_untied_variables_have_the_same_bound(seed: int, count: int, where: float) -> None:
    one = random_table(seed, [5], [])
    untied = CostTable(tuple(map(str, range(count))), one.cost * count, one.memory * count, one.buffer * count, ())
    tied = replace(one, cost=(count * one.cost[0],), memory=(count * one.memory[0],))
    limit = limit_of(untied, where)
    assert separable_bound(untied, limit) == pytest.approx(separable_bound(tied, limit), rel=1e-12)
    assert separable_memory(untied) == separable_memory(tied)


def test_by_hand() -> None:
    """Two variables (memory, cost): a (0, 10), (4, 2); b (0, 6), (2, 5), (3, 0).  Room for 5 bytes of 7.

    Hull of a: 2 s per byte over 4 bytes.  Of b: (2, 5) lies above the line from (0, 6) to (3, 0); 2 s per byte over 3 bytes.
    16 - 2 * 5 = 6 s.  Buffers 1 and 2, of which the larger counts: the limit is 7.
    """
    memory = (np.array([0.0, 4.0]), np.array([0.0, 2.0, 3.0]))
    cost = (np.array([10.0, 2.0]), np.array([6.0, 5.0, 0.0]))
    table = CostTable(("a", "b"), cost, memory, (np.full(2, 1.0), np.full(3, 2.0)), ())
    assert separable_memory(table) == 2.0
    assert separable_bound(table, 7.0) == 6.0
    assert separable_bound(table, 9.0) == separable_bound(table) == 2.0
    assert separable_bound(table, 1.5) == math.inf


def test_without_an_option_of_finite_cost_there_is_no_choice() -> None:
    table = CostTable(("a",), (np.array([np.inf]),), (np.zeros(1),), (np.zeros(1),), ())
    assert separable_bound(table) == separable_bound(table, 1.0) == separable_memory(table) == math.inf
