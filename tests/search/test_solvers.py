from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.table import CostTable, Edge
from autoddl.search import METHODS, Result, SearchError, Status, exact, exhaustive, lower_bound, smallest_memory, solve
from autoddl.search.milp import solve_milp

from .instances import Truth, block_chain, brute_force, memory_limits, random_table, tables

HEURISTICS = ("coordinate-descent", "metropolis-hastings", "random")


def limit_of(table: CostTable, where: float | None) -> float | None:
    """A limit between the smallest and the largest peak memory of any choice."""
    if where is None:
        return None
    low = sum(float(memory.min()) for memory in table.memory)
    high = sum(float(memory.max()) for memory in table.memory) + max(float(buffer.max()) for buffer in table.buffer)
    return max(1.0, math.floor(low + where * (high - low)))


def check(table: CostTable, limit: float | None, truth: Truth, result: Result, tolerance: float = 1e-9) -> None:
    """Check the claims of a result of any method."""
    allowed = tolerance * max(abs(truth.cost), 1e-3) if math.isfinite(truth.cost) else 0.0
    assert result.space_size == math.prod(len(costs) for costs in table.cost)
    assert result.memory_limit_bytes == limit
    assert result.lower_bound <= truth.cost + allowed, "the bound is above the optimum"
    assert (result.status is Status.INFEASIBLE) == (result.smallest_memory_bytes is not None)
    if result.choice is None:
        assert result.cost == math.inf and math.isnan(result.memory_bytes)
    else:
        assert all(0 <= x < len(costs) for x, costs in zip(result.choice, table.cost))
        assert result.cost == pytest.approx(table.evaluate(result.choice), rel=1e-12)
        assert result.memory_bytes == table.peak_memory(result.choice)
        assert limit is None or result.memory_bytes <= limit
        assert truth.cost - allowed <= result.cost, "cheaper than the optimum"
    if result.status is Status.INFEASIBLE:
        assert truth.cost == math.inf and result.choice is None and result.lower_bound == math.inf
        assert result.smallest_memory_bytes == truth.smallest_memory
    if result.optimal:
        assert result.choice is not None and result.gap <= 1e-9
        assert result.cost <= truth.cost + allowed, "claimed optimal, but is not"


@given(tables(largest_space=200), memory_limits())
@settings(max_examples=20, deadline=None)
def test_brute_force_is_every_assignment(table: CostTable, where: float | None) -> None:
    limit = limit_of(table, where)
    best = smallest = math.inf
    for choice in itertools.product(*(range(len(costs)) for costs in table.cost)):
        cost, memory = table.evaluate(choice), table.peak_memory(choice)
        if math.isfinite(cost):
            smallest = min(smallest, memory)
            best = min(best, cost) if limit is None or memory <= limit else best
    truth = brute_force(table, limit)
    assert truth.cost == pytest.approx(best, rel=1e-12) and truth.smallest_memory == smallest


@given(tables(), memory_limits())
@settings(max_examples=120, deadline=None)
def test_exact_agrees_with_brute_force(table: CostTable, where: float | None) -> None:
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    result = exact(table, memory_limit=limit)
    check(table, limit, truth, result)
    assert result.status is (Status.OPTIMAL if math.isfinite(truth.cost) else Status.INFEASIBLE)


@given(tables(), memory_limits())
@settings(max_examples=50, deadline=None)
def test_exhaustive_agrees_with_brute_force(table: CostTable, where: float | None) -> None:
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    result = exhaustive(table, memory_limit=limit)
    check(table, limit, truth, result)
    assert result.evaluations == table.space_size
    assert result.status is (Status.OPTIMAL if math.isfinite(truth.cost) else Status.INFEASIBLE)


@given(tables(largest_space=300), memory_limits())
@settings(max_examples=25, deadline=None)
def test_integer_program_agrees_with_brute_force(table: CostTable, where: float | None) -> None:
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    result = solve_milp(table, memory_limit=limit)
    check(table, limit, truth, result, tolerance=1e-6)
    assert result.status is (Status.OPTIMAL if math.isfinite(truth.cost) else Status.INFEASIBLE)


@pytest.mark.slow
@given(tables(), memory_limits(), st.sampled_from(HEURISTICS), st.integers(0, 3), st.integers(1, 200))
@settings(max_examples=75, deadline=None)
def test_heuristics_keep_what_they_promise(
    table: CostTable, where: float | None, method: str, seed: int, budget: int
) -> None:
    limit = limit_of(table, where)
    result = solve(table, method=method, memory_limit=limit, seed=seed, evaluations=budget)
    check(table, limit, brute_force(table, limit), result)
    assert result.evaluations <= budget
    again = solve(table, method=method, memory_limit=limit, seed=seed, evaluations=budget)
    assert (again.choice, again.cost, again.lower_bound, again.evaluations, again.status) == (
        result.choice,
        result.cost,
        result.lower_bound,
        result.evaluations,
        result.status,
    )


@given(tables(), memory_limits(), st.integers(1, 100))
@settings(max_examples=30, deadline=None)
def test_exhaustive_search_that_is_stopped_has_a_valid_bound(
    table: CostTable, where: float | None, budget: int
) -> None:
    limit = limit_of(table, where)
    result = exhaustive(table, memory_limit=limit, evaluations=budget)
    check(table, limit, brute_force(table, limit), result)
    assert result.evaluations <= budget


@given(tables())
@settings(max_examples=40, deadline=None)
def test_smallest_memory(table: CostTable) -> None:
    truth = brute_force(table, None)
    least, choice = smallest_memory(table)
    assert least == truth.smallest_memory
    if choice is None:
        assert least == math.inf
    else:
        assert table.peak_memory(choice) == least and math.isfinite(table.evaluate(choice))
        if least > 1:
            assert exact(table, memory_limit=least).choice is not None
            assert exact(table, memory_limit=least - 1).smallest_memory_bytes == least


@given(tables(), memory_limits())
@settings(max_examples=50, deadline=None)
def test_lower_bound_is_one(table: CostTable, where: float | None) -> None:
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    assert lower_bound(table, limit) <= truth.cost + 1e-9 * max(1e-3, abs(truth.cost) if truth.cost < math.inf else 0)
    unlimited = brute_force(table, None).cost
    assert lower_bound(table) == pytest.approx(unlimited, rel=1e-9)  # narrow graphs: elimination is exact


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
@settings(max_examples=4, deadline=None)
def test_wide_graphs_are_solved_by_the_integer_program(seed: int, where: float) -> None:
    """Graphs on which exact elimination would be too wide."""
    from autoddl.search import lagrangian

    # 10 variables all joined to each other, 4 classes each: elimination needs 4^9 entries.
    table = random_table(seed, [4] * 10, list(itertools.combinations(range(10), 2)), distinct=4)
    limit = limit_of(table, 0.3 + 0.5 * where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lagrangian, "MAX_ENTRIES", 4**4)
        patch.setattr(lagrangian, "MAX_RELAXED_ENTRIES", 4**3)
        assert not lagrangian.prepare(table).plan.exact
        bound = lower_bound(table, limit)
        by_program = exact(table, memory_limit=limit, time_limit=60)
    by_elimination = exact(table, memory_limit=limit)
    assert by_elimination.statistics["largest_bucket"] > 4**4 or by_elimination.statistics["labels"] == 0
    assert by_program.status is by_elimination.status
    assert by_program.cost == pytest.approx(by_elimination.cost, rel=1e-6)
    assert bound <= by_elimination.cost * (1 + 1e-9)


@given(tables(), memory_limits(), st.floats(0.5, 2.0))
@settings(max_examples=50, deadline=None)
def test_a_cutoff_ends_the_search_early_but_never_wrongly(table: CostTable, where: float | None, factor: float) -> None:
    limit = limit_of(table, where)
    truth = brute_force(table, limit)
    cutoff = factor * truth.cost if math.isfinite(truth.cost) else factor
    result = exact(table, memory_limit=limit, cutoff=cutoff)
    if truth.cost == math.inf:
        assert result.choice is None
    elif truth.cost < cutoff * (1 - 1e-9):
        assert result.optimal and result.cost == pytest.approx(truth.cost, rel=1e-9)
    else:
        assert result.lower_bound <= truth.cost * (1 + 1e-9)
        assert result.optimal or result.lower_bound >= cutoff * (1 - 1e-9)


def test_mini_buckets_bound_the_optimum() -> None:
    from autoddl.search import lagrangian

    for seed in range(20):
        table = random_table(seed, [4] * 6, list(itertools.combinations(range(6), 2)), distinct=4)
        limit = limit_of(table, 0.4)
        truth = brute_force(table, limit).cost
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lagrangian, "MAX_ENTRIES", 4**3)
            patch.setattr(lagrangian, "MAX_RELAXED_ENTRIES", 4**3)
            bound = lower_bound(table, limit)
        assert 0 < bound <= truth * (1 + 1e-9)


@pytest.mark.parametrize("where", [0.03, 0.1, 0.3, 0.6, 0.9])
def test_blocks_agree_with_the_integer_program(where: float) -> None:
    table = block_chain(4, options=12, classes=4, narrow=4)
    free = exact(table)
    least, _ = smallest_memory(table)
    limit = math.floor(least + where * (free.memory_bytes - least))
    result = exact(table, memory_limit=limit)
    program = solve_milp(table, memory_limit=limit)
    assert result.optimal and program.optimal
    assert result.cost == pytest.approx(program.cost, rel=1e-7)
    assert result.cost > free.cost


def test_equal_blocks_are_eliminated_once() -> None:
    counts = [exact(block_chain(blocks)).statistics["buckets"] for blocks in (12, 24, 48, 96, 192)]
    assert counts[-1] <= counts[0] + 10, (
        "the number of distinct buckets grows with the logarithm of the number of blocks"
    )
    assert all(later - earlier <= 4 for earlier, later in zip(counts, counts[1:]))


def test_work_under_a_limit_grows_slowly_with_the_number_of_blocks() -> None:
    def labels(blocks: int) -> float:
        table = block_chain(blocks)
        least, _ = smallest_memory(table)
        free = exact(table).memory_bytes
        result = exact(table, memory_limit=math.floor(least + 0.4 * (free - least)))
        assert result.optimal
        return result.statistics["labels"]

    assert labels(96) <= 16 * max(labels(12), 100)


def test_blocks_of_unshared_arrays_give_the_same() -> None:
    table = block_chain(6)
    copies = CostTable(
        table.names,
        tuple(costs.copy() for costs in table.cost),
        tuple(memory.copy() for memory in table.memory),
        tuple(buffer.copy() for buffer in table.buffer),
        tuple(Edge(edge.source, edge.target, edge.cost.copy()) for edge in table.edges),
    )
    assert exact(copies).cost == exact(table).cost
    assert exact(copies).statistics["buckets"] == exact(table).statistics["buckets"]


def test_a_time_limit_leaves_a_gap_that_holds() -> None:
    table = block_chain(24)
    least, _ = smallest_memory(table)
    limit = math.floor(least + 0.3 * (exact(table).memory_bytes - least))
    optimum = exact(table, memory_limit=limit)
    stopped = exact(table, memory_limit=limit, time_limit=1e-9)
    assert stopped.status is Status.LIMIT_REACHED
    assert stopped.lower_bound <= optimum.cost * (1 + 1e-9)
    assert stopped.choice is None or stopped.cost >= optimum.cost * (1 - 1e-9)
    assert "gap" in stopped.message


def test_parallel_and_opposed_edges_add_up() -> None:
    rng = np.random.default_rng(1)
    forth, back = rng.random((3, 4)), rng.random((4, 3))
    zeros = lambda size: np.zeros(size)  # noqa: E731
    table = CostTable(
        ("a", "b"),
        (zeros(3), zeros(4)),
        (zeros(3), zeros(4)),
        (zeros(3), zeros(4)),
        (Edge(0, 1, forth), Edge(1, 0, back)),
    )
    assert exact(table).cost == pytest.approx((forth + back.T).min(), rel=1e-12)


def test_no_variables() -> None:
    result = exact(CostTable((), (), (), (), ()))
    assert result.optimal and result.choice == () and result.cost == 0 and result.space_size == 1


def test_many_unconnected_variables() -> None:
    table = random_table(3, [5] * 60, [])
    limit = limit_of(table, 0.3)
    result = exact(table, memory_limit=limit)
    assert result.optimal
    program = solve_milp(table, memory_limit=limit)
    assert result.cost == pytest.approx(program.cost, rel=1e-7)


def test_a_hub_with_many_neighbours() -> None:
    table = random_table(4, [6] + [1, 2, 3] * 20, [(0, i) for i in range(1, 61)], distinct=3)
    limit = limit_of(table, 0.4)
    assert exact(table, memory_limit=limit).cost == pytest.approx(solve_milp(table, memory_limit=limit).cost, rel=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_invalid_limits_are_refused(method: str, limit: float) -> None:
    with pytest.raises(SearchError, match="memory limit"):
        solve(block_chain(1), method=method, memory_limit=limit)


def test_unknown_method() -> None:
    with pytest.raises(SearchError, match="annealing"):
        solve(block_chain(1), method="annealing")


@pytest.mark.parametrize("fault", ["nan cost", "nan edge", "infinite memory", "part of a byte", "no options"])
def test_tables_that_cannot_be_searched_are_refused(fault: str) -> None:
    table = random_table(5, [3, 3, 3], [(0, 1), (1, 2), (0, 2)])
    if fault == "nan cost":
        table.cost[1][0] = math.nan
    elif fault == "nan edge":
        table.edges[0].cost[1, 1] = math.nan
    elif fault == "infinite memory":
        table.memory[2][1] = math.inf
    elif fault == "part of a byte":
        table.memory[2][1] = 0.5
    else:
        table = random_table(5, [3, 0, 3], [(0, 1), (1, 2), (0, 2)])
    with pytest.raises(SearchError, match=r"v\d"):
        exact(table)
