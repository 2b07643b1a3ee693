"""Robust location, and robust non-negative least squares.

Both are M-estimators with Tukey's biweight: with residuals r in units of c s (s a robust scale),

    weight(r) = (1 - r^2)^2 for |r| < 1, else 0

so that gross outliers have no weight.  They would shift a mean, and even a median, since all are on one side.  c = 4.685 keeps 95 %
of the efficiency of least squares under normal noise (Huber & Ronchetti 2009).

**Regression.**  The model is t = X theta with theta >= 0 and relative noise.  The residuals are t / (X theta) - 1, relative to the
*prediction* (if they were relative to the measurement, noise in the weights would bias all parameters down).  The solution is by
iteratively reweighted least squares:

    theta <- argmin over theta >= 0 of  sum_i w_i ((x_i theta - t_i) / (x_i theta_before))^2      (scipy.optimize.nnls)
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import nnls

__all__ = ["location", "nonnegative_fit"]

_BIWEIGHT = 4.685
_HUBER = 1.345
#: Factor from the median absolute deviation to the standard deviation, for normal noise.
_MAD = 1.4826
#: Fraction of repetitions that `location` starts from, and half the width of this core of a normal distribution in deviations.
_CORE = 0.4
_CORE_WIDTH = 0.524


def location(values: np.ndarray) -> np.ndarray:
    """The robust centre of each row of ``values``, shape (rows, repetitions) -> (rows,); the mean of one or two repetitions.

    The iteration starts in the shortest interval that contains two fifths of the row, whose length gives the scale.  Disturbances
    only lengthen repetitions, and may affect most of them.

    >>> location(np.array([1.0, 1.01, 0.99, 1.0, 9.0])).round(2)
    array([1.])
    """
    ordered = np.sort(np.atleast_2d(np.asarray(values, dtype=float)), axis=1)
    num_rows, count = ordered.shape
    if count < 3:
        return ordered.mean(axis=1)
    inside = max(2, math.ceil(_CORE * count))
    lengths = ordered[:, inside - 1 :] - ordered[:, : count - inside + 1]
    first = np.argmin(lengths, axis=1)
    rows = np.arange(num_rows)
    centre = 0.5 * (ordered[rows, first] + ordered[rows, first + inside - 1])
    scale = np.maximum(lengths[rows, first] / (2 * _CORE_WIDTH), 0.01 * centre)
    for _ in range(30):
        residuals = (ordered - centre[:, None]) / (_BIWEIGHT * scale[:, None])
        weights = np.clip(1 - residuals**2, 0, None) ** 2
        total = weights.sum(axis=1)
        moved = np.where(total > 0, (weights * ordered).sum(axis=1) / np.maximum(total, 1e-300), centre)
        is_settled = np.all(np.abs(moved - centre) <= 1e-5 * np.abs(centre))
        centre = moved
        if is_settled:
            break
    return centre


def nonnegative_fit(
    features: np.ndarray, seconds: np.ndarray, weights: np.ndarray | None = None, least_scale: float = 0.1
) -> np.ndarray:
    """Solve seconds = features @ theta for theta >= 0, robustly (see the module's docstring).

    Args:
        features: non-negative, shape (points, parameters).
        seconds: positive, shape (points,).
        weights: prior weights, shape (points,); by default 1.
        least_scale: lower bound of the scale of relative residuals; residuals below 4.685 times this are never outliers.

    Returns:
        theta, shape (parameters,).
    """
    prior = np.ones(len(seconds)) if weights is None else np.asarray(weights, dtype=float)
    # Scale the columns (messages, bytes), which differ by many orders of magnitude.
    units = np.maximum((features / seconds[:, None]).max(axis=0), 1e-300)
    scaled = features / units
    theta = _solve(scaled, seconds, prior, seconds)
    for iteration in range(50):
        predicted = np.maximum(scaled @ theta, 1e-3 * seconds)
        residuals = seconds / predicted - 1
        scale = max(_MAD * float(np.median(np.abs(residuals))), least_scale)
        if iteration < 5:  # Huber's weights first: their objective is convex, so the start does not matter
            robust = np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(residuals), 1e-300))
        else:
            robust = np.clip(1 - (residuals / (_BIWEIGHT * scale)) ** 2, 0, None) ** 2
        if not np.any(robust * prior > 0):
            break
        before, theta = theta, _solve(scaled, seconds, prior * robust, predicted)
        if iteration > 5 and np.allclose(theta, before, rtol=1e-7, atol=0):
            break
    return theta / units


def _solve(features: np.ndarray, seconds: np.ndarray, weights: np.ndarray, relative_to: np.ndarray) -> np.ndarray:
    root = np.sqrt(weights) / relative_to
    return nnls(features * root[:, None], seconds * root)[0]
