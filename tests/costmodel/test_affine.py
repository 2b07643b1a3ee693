"""Affine functions, and what a formula of costs returns for them."""

from __future__ import annotations

import numpy as np
import pytest

from autoddl.costmodel.affine import VARIABLE, Affine, parts_of


def test_a_formula_of_numbers_gives_its_coefficients():
    sizes = np.array([1, 2, 4])

    def formula(x):
        return 3 * (2 * x + 5.0) / sizes - x * sizes + (7.0 - x)

    found = formula(VARIABLE)
    assert found.fixed == pytest.approx(15 / sizes + 7)
    assert found.slope == pytest.approx(6 / sizes - sizes - 1)
    for x in (0.0, 3.0):
        assert found.fixed + x * found.slope == pytest.approx(formula(x))


def test_a_slope_keeps_its_digits_beside_a_large_fixed_part():
    assert parts_of(1e9 + 1e-9 * VARIABLE) == (1e9, 1e-9)
    assert parts_of(5) == (5, 0.0)


def test_what_is_not_affine_is_refused():
    for formula in (lambda x: x * x, lambda x: 1 / x, lambda x: x / x, lambda x: np.ones(2) / x):
        with pytest.raises(TypeError):
            formula(VARIABLE)


def test_comparisons_are_those_of_large_values():
    assert VARIABLE > 5 and not Affine(0.0, 0.0) > 0 and Affine(1.0, 0.0) > 0
    assert list(Affine(0.0, np.array([0.0, 1.0])) > 0) == [False, True]
