"""Brackets, and the search that continues from one, against brute force and a search from the start."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.table import CostTable
from autoddl.search import Status, bracket, exact, solve

from .instances import block_chain, brute_force, memory_limits, tables
from .test_solvers import check, limit_of


@given(tables(), memory_limits())
@settings(max_examples=40, deadline=None)
def test_a_bracket_holds_the_optimum(table: CostTable, where: float | None) -> None:
    limit = limit_of(table, where)
    truth, free = brute_force(table, limit), brute_force(table, None)
    found = bracket(table, limit)
    allowed = 1e-9 * max(abs(truth.cost), 1e-3) if math.isfinite(truth.cost) else 0.0
    assert found.bound <= truth.cost + allowed and truth.cost - allowed <= found.cost
    assert found.free == pytest.approx(free.cost, rel=1e-9, abs=1e-12)
    if math.isinf(found.bound):
        assert truth.cost == math.inf


@given(tables(), memory_limits(), st.floats(0.5, 1.5))
@settings(max_examples=40, deadline=None)
def test_a_search_continues_from_a_bracket(table: CostTable, where: float | None, part: float) -> None:
    """For any cutoff of the bracket, and for repeated use."""
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    known = bracket(table, limit, cutoff=part * truth.cost if math.isfinite(truth.cost) else math.inf)
    for _ in range(2):
        result = solve(table, memory_limit=limit, known=known)
        check(table, limit, truth, result)
        assert result.status is (Status.OPTIMAL if math.isfinite(truth.cost) else Status.INFEASIBLE)


@given(tables(), memory_limits(), st.floats(0.5, 1.5))
@settings(max_examples=30, deadline=None)
def test_with_a_cutoff_too(table: CostTable, where: float | None, part: float) -> None:
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    cutoff = part * truth.cost if math.isfinite(truth.cost) else 1.0
    result = solve(table, memory_limit=limit, cutoff=cutoff, known=bracket(table, limit))
    allowed = 1e-9 * max(abs(truth.cost), 1e-3) if math.isfinite(truth.cost) else 0.0
    if truth.cost < cutoff - allowed:
        assert result.optimal and result.cost == pytest.approx(truth.cost, rel=1e-9, abs=1e-12)
    else:
        assert result.lower_bound >= min(cutoff, truth.cost) - allowed


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("tightness", [0.3, 0.6])
def test_deep_tables(seed: int, tightness: float) -> None:
    """The bracket and the continued search do together the work of a search from the start."""
    table = block_chain(12, seed=seed)
    limit = limit_of(table, tightness)
    known = bracket(table, limit)
    anew, onward = exact(table, memory_limit=limit), solve(table, memory_limit=limit, known=known)
    assert anew.optimal and onward.optimal
    assert onward.cost == pytest.approx(anew.cost, rel=1e-9)
    assert known.bound <= onward.cost * (1 + 1e-9) and onward.cost <= known.cost * (1 + 1e-9)
