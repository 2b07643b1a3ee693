"""A search that is stopped returns its best choice so far, which fits, and a valid bound."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.stopping import Deadline, Stop, StopRequestedError
from autoddl.costmodel.table import CostTable
from autoddl.search import METHODS, Result, Status, bracket, exact, lower_bound, smallest_memory, solve
from autoddl.search.milp import solve_milp

from ..stops import StopAfter
from .instances import Truth, block_chain, brute_force, memory_limits, random_table, tables
from .test_solvers import check, limit_of


def check_stopped(
    table: CostTable, limit: float | None, truth: Truth, result: Result, stop: StopAfter, tolerance: float = 1e-9
) -> None:
    """Its claims hold, and its status is INTERRUPTED unless it has a proof."""
    if result.status is Status.INTERRUPTED:
        assert stop.has_fired and "interrupted" in result.message
        assert result.choice is not None or result.cost == math.inf
    check(table, limit, truth, result, tolerance)


@given(tables(), memory_limits(), st.sampled_from(sorted(METHODS)), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_whenever_a_search_is_stopped_its_claims_hold(
    table: CostTable, where: float | None, method: str, asks: int
) -> None:
    limit, stop = limit_of(table, where), StopAfter(asks)
    result = solve(table, method=method, memory_limit=limit, stop=stop)
    check_stopped(table, limit, brute_force(table, limit), result, stop)
    if not stop.has_fired:
        whole = solve(table, method=method, memory_limit=limit)
        assert (result.status, result.choice, result.lower_bound) == (whole.status, whole.choice, whole.lower_bound)


@given(tables(largest_space=300), memory_limits(), st.integers(0, 4))
@settings(max_examples=20, deadline=None)
def test_claims_of_a_stopped_integer_program_hold(table: CostTable, where: float | None, asks: int) -> None:
    limit, stop = limit_of(table, where), StopAfter(asks)
    result = solve_milp(table, memory_limit=limit, stop=stop)
    check_stopped(table, limit, brute_force(table, limit), result, stop, tolerance=1e-6)


@given(tables(), memory_limits(), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_stopped_bounds_hold_and_can_be_continued(table: CostTable, where: float | None, asks: int) -> None:
    limit, stop = limit_of(table, where), StopAfter(asks)
    truth = brute_force(table, limit)
    known = bracket(table, limit, stop=stop)
    allowed = 1e-9 * max(abs(truth.cost), 1e-3) if math.isfinite(truth.cost) else 0.0
    assert known.bound <= truth.cost + allowed and known.cost >= truth.cost - allowed
    assert (known.choice is None) == (known.cost == math.inf)
    if known.choice is not None:
        assert table.evaluate(known.choice) == pytest.approx(known.cost, rel=1e-12)
        assert limit is None or table.peak_memory(known.choice) <= limit
    assert exact(table, memory_limit=limit, known=known).status is (
        Status.OPTIMAL if math.isfinite(truth.cost) else Status.INFEASIBLE
    )
    assert lower_bound(table, limit, StopAfter(asks)) == known.bound


def test_the_later_it_is_stopped_the_smaller_the_gap() -> None:
    table = block_chain(24)
    least, _ = smallest_memory(table)
    limit = math.floor(least + 0.3 * (exact(table).memory_bytes - least))
    optimum = exact(table, memory_limit=limit).cost
    gaps, asks = [], 1
    while not gaps or gaps[-1] > 0:
        stop = StopAfter(asks)
        result = exact(table, memory_limit=limit, stop=stop)
        assert result.status is (Status.OPTIMAL if result.gap == 0 else Status.INTERRUPTED)
        assert result.lower_bound <= optimum * (1 + 1e-9) and result.cost >= optimum * (1 - 1e-9)
        gaps.append(result.gap)
        asks *= 2
    assert len(gaps) > 3 and gaps == sorted(gaps, reverse=True)


def test_the_least_memory_is_exact_or_unknown() -> None:
    table = random_table(3, [4] * 5, [(0, 1), (1, 2), (2, 3), (3, 4)], large_buffers=True)
    least = smallest_memory(table)
    with pytest.raises(StopRequestedError):
        smallest_memory(table, StopAfter(0))
    result = exact(table, memory_limit=1, stop=StopAfter(0))
    assert result.status is Status.INTERRUPTED and result.lower_bound == math.inf and result.choice is None
    assert smallest_memory(table, StopAfter(1000)) == least


#: A wide graph, which takes HiGHS minutes; in a process of its own, with which HiGHS ends.
LEFT = """
import math, threading, time
import numpy as np
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.table import CostTable, Edge
from autoddl.search import Status, lower_bound
from autoddl.search.milp import solve_milp

rng = np.random.default_rng(5)
costs, zeros = tuple(rng.random((40, 12))), (np.zeros(12),) * 40
edges = tuple(Edge(i, j, rng.random((12, 12))) for i in range(40) for j in range(i))
table, stop = CostTable(tuple(f"v{i}" for i in range(40)), costs, zeros, zeros, edges), Stop()

def request_when_it_runs():
    while not any(thread.name == "HiGHS" for thread in threading.enumerate()):
        time.sleep(0.01)
    stop.request()

asking = threading.Thread(target=request_when_it_runs)
asking.start()
start = time.perf_counter()
result = solve_milp(table, time_limit=60.0, stop=stop)
assert time.perf_counter() - start < 55 and result.status is Status.INTERRUPTED
assert result.lower_bound <= result.cost and math.isfinite(lower_bound(table))
print("left")
"""


@pytest.mark.slow
def test_a_running_integer_program_is_abandoned() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def test_a_deadline_knows_both_time_and_stop() -> None:
    now, stop = [10.0], Stop()
    deadline = Deadline(4.0, stop, timer=lambda: now[0])
    half = deadline.part(0.5)
    assert not deadline.is_over and deadline.left_s == 4.0 and half.left_s == 2.0
    now[0] = 12.0
    assert half.is_over and not deadline.is_over and half.stopped and not deadline.stopped
    stop.request()
    assert deadline.is_over and deadline.stopped and deadline.left_s == 2.0
    assert not Deadline().is_over and Deadline().left_s == math.inf
