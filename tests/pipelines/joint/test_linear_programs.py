"""The dual simplex method and certain bounds of linear programs, against SciPy's solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import csr_matrix

from autoddl.pipelines.joint.dual_simplex import DualSimplex
from autoddl.pipelines.joint.linear_program import LinearProgram


def random_rows(dice: np.random.Generator, count: int, variables: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of activities with their ranges: some limit variables, and some are lower bounds on the last variable."""
    rows = dice.integers(-3, 4, (count, variables)) * (dice.random((count, variables)) < 0.7)
    rows[:, -1] = dice.random(count) < 0.6
    of_theta = rows[:, -1] > 0
    low = dice.integers(-6, 3, count).astype(float)
    high = low + dice.integers(0, 6, count)
    high[of_theta] = np.inf
    low[~of_theta & (dice.random(count) < 0.3)] = -np.inf
    return rows.astype(float), low, high


def reference(rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> OptimizeResult:
    """SciPy's solution of the program of :class:`DualSimplex`."""
    variables = rows.shape[1]
    both = np.vstack([rows, -rows])
    most = np.concatenate([high[variables:], -low[variables:]])
    limits = np.isfinite(most)
    return linprog(
        np.eye(variables)[-1],
        A_ub=both[limits],
        b_ub=most[limits],
        bounds=np.column_stack([low[:variables], high[:variables]]),
        method="highs",
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(1, 12))
def test_the_simplex_method_solves_one_program_after_another(seed: int, variables: int, count: int) -> None:
    dice = np.random.default_rng(seed)
    simplex = DualSimplex(variables)
    rows, row_low, row_high = np.zeros((0, variables)), np.zeros(0), np.zeros(0)
    for _ in range(8):
        if dice.random() < 0.6:
            new, new_low, new_high = random_rows(dice, int(dice.integers(1, count + 1)), variables)
            simplex.add_rows(new)
            rows = np.vstack([rows, new])
            row_low, row_high = np.append(row_low, new_low), np.append(row_high, new_high)
        elif len(rows):
            dropped = np.flatnonzero(dice.random(len(rows)) < 0.3)
            dice.shuffle(dropped)
            simplex.drop_rows(dropped)
            rows, row_low, row_high = (np.delete(one, dropped, axis=0) for one in (rows, row_low, row_high))
        least = dice.integers(-2, 3, variables).astype(float)
        most = least + dice.integers(0, 4, variables)
        least[-1], most[-1] = -50.0, 50.0
        low, high = np.append(least, row_low), np.append(most, row_high)
        expected = reference(rows, low, high)
        found = simplex.minimise(low, high, np.inf)
        if expected.status == 2:
            assert found is None
            continue
        assert expected.status == 0 and found is not None
        bound, x = found
        # Random costs of up to 2e-7 for each unit of a variable.
        assert expected.fun - 1e-4 <= bound <= expected.fun + 1e-9
        activities = np.append(x, rows @ x)
        assert (activities >= low - 1e-6).all() and (activities <= high + 1e-6).all()
        assert x[-1] == pytest.approx(expected.fun, abs=1e-4)
        assert simplex.minimise(low, high, expected.fun - 1e-3) is None
        assert simplex.minimise(low, high, expected.fun + 1e-3) is not None


def test_a_bound_that_equals_the_cutoff_is_certain() -> None:
    """theta is at least x + 2 y for x + y = 3 and y >= 1/3: 3 + 1/3, which no solver's tolerance may make less."""
    simplex = DualSimplex(3)
    simplex.add_rows(np.array([[1.0, 1.0, 0.0], [-1.0, -2.0, 1.0]]))
    low, high = np.array([0.0, 1 / 3, 0.0, 3.0, 0.0]), np.array([3.0, 3.0, 10.0, 3.0, np.inf])
    least = 3 + 1 / 3
    assert simplex.minimise(low, high, least * (1 - 1e-12)) is None
    found = simplex.minimise(low, high, least * (1 + 1e-12))
    assert found is not None and found[0] == pytest.approx(least, rel=1e-14)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 8), st.floats(0.0, 0.5))
def test_a_certain_bound_holds_for_any_dual_values(seed: int, variables: int, count: int, noise: float) -> None:
    dice = np.random.default_rng(seed)
    low = dice.integers(-3, 3, variables).astype(float)
    high = low + dice.integers(0, 4, variables)
    inside = low + dice.random(variables) * (high - low)
    rows, equal_rows = (dice.integers(-3, 4, (number, variables)).astype(float) for number in (count, 1))
    program = LinearProgram(
        objective=dice.integers(-3, 4, variables).astype(float),
        rows=csr_matrix(rows),
        most=rows @ inside + dice.random(count),
        equal_rows=csr_matrix(equal_rows),
        equal=equal_rows @ inside,
        ranges=np.column_stack([low, high]),
    )
    solution = program.solved()
    assert solution is not None
    assert program.certain_least(solution) == pytest.approx(solution.fun, abs=1e-9)
    solution.ineqlin.marginals = solution.ineqlin.marginals + noise * dice.standard_normal(count)
    solution.eqlin.marginals = solution.eqlin.marginals + noise * dice.standard_normal(1)
    assert program.certain_least(solution) <= solution.fun + 1e-9


def test_a_program_without_a_solution() -> None:
    one = csr_matrix(np.ones((1, 1)))
    program = LinearProgram(np.ones(1), one, np.zeros(1), one, np.ones(1), np.array([[0.0, 5.0]]))
    assert program.solved() is None
