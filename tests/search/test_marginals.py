"""Costs with one variable fixed to an option, against brute force."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.table import CostTable
from autoddl.search import exact, marginals
from autoddl.search.marginals import nearest

from .instances import block_chain, random_table, tables


def held(table: CostTable, memory_limit: float | None) -> list[np.ndarray]:
    """By brute force: the least cost of every variable and option."""
    limit = math.inf if memory_limit is None else memory_limit
    least = [np.full(len(costs), np.inf) for costs in table.cost]
    for choice in itertools.product(*(range(len(costs)) for costs in table.cost)):
        cost = table.evaluate(choice)
        if math.isfinite(cost) and table.peak_memory(choice) <= limit:
            for variable, option in enumerate(choice):
                least[variable][option] = min(least[variable][option], cost)
    return least


def limits_of(table: CostTable) -> list[float]:
    """Memory limits, in bytes and positive, from nothing fits to everything does."""
    choices = itertools.product(*(range(len(costs)) for costs in table.cost))
    peaks = sorted({table.peak_memory(choice) for choice in choices})
    limits = [peaks[0] - 1 or 0.5, *peaks[:: max(1, len(peaks) // 4)], peaks[-1]]
    return [limit for limit in limits if limit > 0] or [0.5]  # if nothing needs memory, any limit fits


@settings(max_examples=30, deadline=None)
@given(tables(largest_space=600))
def test_marginals_are_exact_without_a_limit(table):
    found = marginals(table)
    assert found.is_exact and found.multiplier == 0
    for mine, true in zip(found.free, held(table, None)):
        np.testing.assert_allclose(mine, true, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(tables(largest_space=600), st.integers(0, 20))
def test_marginals_bound_feasible_options_and_exclude_others(table, which):
    limits = limits_of(table)
    limit = limits[which % len(limits)]
    found = marginals(table, limit)
    for mine, free, true in zip(found.within, found.free, held(table, limit)):
        assert (mine <= true * (1 + 1e-9) + 1e-15).all()
        assert (mine >= free).all()
        # The bound is inf only if brute force finds no choice.
        assert np.isinf(true[np.isinf(mine)]).all()


@settings(max_examples=40, deadline=None)
@given(tables(largest_space=600), st.integers(0, 20), st.integers(1, 4))
def test_the_nearest_are_those_of_brute_force(table, which, count):
    limits = limits_of(table)
    limit = limits[which % len(limits)]
    best = exact(table, memory_limit=limit)
    if best.choice is None:
        return
    found = nearest(table, marginals(table, limit), best.choice, count)
    for variable, (mine, true) in enumerate(zip(found, held(table, limit))):
        others = sorted(cost for option, cost in enumerate(true) if option != best.choice[variable])
        expected = [cost for cost in others if math.isfinite(cost)][:count]
        np.testing.assert_allclose([one.cost for one in mine], expected, rtol=1e-9)
        for one in mine:
            assert one.is_exact and one.variable == variable
            assert one.choice is not None and one.choice[variable] == one.option != best.choice[variable]
            assert table.evaluate(one.choice) == pytest.approx(one.cost) == pytest.approx(true[one.option])
            assert table.peak_memory(one.choice) <= limit


def test_equal_blocks_are_distinguished():
    """Shared arrays make one factor of the elimination; each variable still has marginals of its own."""
    table = block_chain(2, linears=1, options=4, classes=2, narrow=2)
    assert len({id(costs) for costs in table.cost}) < len(table.cost)
    for mine, true in zip(marginals(table).free, held(table, None)):
        np.testing.assert_allclose(mine, true, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_that_is_not_optimal_has_negative_regrets(seed):
    table = random_table(seed, [4, 3, 4, 3], [(0, 1), (1, 2), (2, 3), (0, 3)])
    best = exact(table).choice
    worst = tuple(int(costs.argmax()) for costs in table.cost)
    assert best is not None
    for variable, (one, *_) in enumerate(nearest(table, marginals(table), worst, 1)):
        if best[variable] != worst[variable]:
            assert one.cost == pytest.approx(table.evaluate(best))
            assert one.cost < table.evaluate(worst)


def test_after_the_deadline_regrets_are_intervals():
    table = random_table(3, [5, 5, 5, 5], [(0, 1), (1, 2), (2, 3), (0, 3)])
    limit = 0.8 * max(limits_of(table))
    best = exact(table, memory_limit=limit)
    true = held(table, limit)
    found = nearest(table, marginals(table, limit), best.choice, 3, deadline=time.perf_counter() - 1)
    assert any(found)
    for variable, mine in enumerate(found):
        for one in mine:
            assert one.lower_bound <= true[variable][one.option] * (1 + 1e-9) <= one.cost * (1 + 2e-9)
            assert table.peak_memory(one.choice) <= limit


def test_a_known_optimum_is_a_floor():
    table = random_table(1, [4, 4, 4], [(0, 1), (1, 2)], levels=2)
    best = exact(table)
    found = nearest(table, marginals(table), best.choice, 3, floor=best.cost)
    for mine, true in zip(found, held(table, None)):
        assert all(one.lower_bound >= best.cost for one in mine)
        assert [one.cost for one in mine] == pytest.approx([true[one.option] for one in mine])


def test_only_what_was_asked_for_is_searched():
    table = random_table(2, [3, 3, 3], [(0, 1), (1, 2)])
    chosen = exact(table).choice
    assert chosen is not None
    whole = nearest(table, marginals(table), chosen, 2)
    assert nearest(table, marginals(table), chosen, 2, variables=(2, 0)) == (whole[2], whole[0])
    assert nearest(table, marginals(table), chosen, 0) == ((), (), ())
