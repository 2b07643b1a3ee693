"""Statistics of how well predicted times rank strategies.

- *Spearman*: rank correlation of predicted and measured times.
- *Ceiling*: rank correlation of the odd and the even rounds of the measurements, about the best that a prediction can reach.
- *Pairs*: fraction of pairs in the right order, among those whose measured times are more than 10 % apart.
- *Regret*: relative excess of the time of the predicted best strategy over that of the measured best.
- *Floor*: regret of the measurements themselves: the fastest strategy of the odd rounds, timed in the even ones, and vice versa.

The measured time of a strategy is that of its fastest round, since disturbances on a shared machine only lengthen rounds, and
rounds of one strategy may differ by more than strategies do.  The *error* of predicted times is relative to the robust centre of
the rounds (:func:`autoddl.calib.robust.location`), which is what calibration fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from .robust import location

__all__ = ["Score", "fastest", "pair_accuracy", "regret", "score", "spearman"]

#: Smallest relative difference of pairs that count.
APART = 0.1


@dataclass(frozen=True)
class Score:
    """Statistics of predictions (module docstring).

    Attributes:
        spearman, ceiling, regret, floor: as defined there; ceiling and floor are nan with a single round.
        pairs, num_pairs: fraction of pairs in the right order, and number of pairs that count.
        error: median of |predicted - measured| / measured.
    """

    spearman: float
    ceiling: float
    pairs: float
    num_pairs: int
    regret: float
    floor: float
    error: float


def score(predicted: Sequence[float], measured: np.ndarray) -> Score:
    """Compute the score of predictions.

    Args:
        predicted: seconds of each strategy.
        measured: seconds, shape (strategies, rounds).
    """
    times, centres = fastest(measured), location(measured)
    guess = np.asarray(predicted, dtype=float)
    accuracy, num_pairs = pair_accuracy(guess, times)
    return Score(
        spearman=spearman(guess, times),
        ceiling=ceiling(measured),
        pairs=accuracy,
        num_pairs=num_pairs,
        regret=regret(guess, times),
        floor=floor(measured),
        error=float(np.median(np.abs(guess - centres) / np.maximum(centres, 1e-12))),
    )


def fastest(measured: np.ndarray) -> np.ndarray:
    """The time of the fastest round of each strategy; shape (strategies, rounds) -> (strategies,)."""
    return measured.min(axis=1)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The rank correlation; ties share their mean rank.  0 if one of the arrays is constant.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    ranks = rankdata(a), rankdata(b)
    if np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def ceiling(measured: np.ndarray) -> float:
    """Spearman between the two halves of the rounds; nan with a single round."""
    if measured.shape[1] < 2:
        return float("nan")
    return spearman(*_halves(measured))


def floor(measured: np.ndarray) -> float:
    """The regret of the fastest strategy of one half of the rounds in the other half; nan with a single round."""
    if measured.shape[1] < 2:
        return float("nan")
    odd, even = _halves(measured)
    return (regret(odd, even) + regret(even, odd)) / 2


def _halves(measured: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return fastest(measured[:, 0::2]), fastest(measured[:, 1::2])


def pair_accuracy(predicted: np.ndarray, measured: np.ndarray, apart: float = APART) -> tuple[float, int]:
    """The fraction of pairs in the right order, and the number of pairs.

    Only pairs count whose measured times differ by more than the fraction ``apart``; the fraction is 1 if there are none.
    """
    i, j = np.triu_indices(len(measured), 1)
    low, high = np.minimum(measured[i], measured[j]), np.maximum(measured[i], measured[j])
    counted = high > low * (1 + apart)
    right = (predicted[i] < predicted[j]) == (measured[i] < measured[j])
    # Equal predictions count half.
    points = np.where(predicted[i] == predicted[j], 0.5, right)
    return (float(points[counted].mean()) if counted.any() else 1.0), int(counted.sum())


def regret(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Relative excess of the measured time of the predicted best over that of the measured best.

    >>> regret(np.array([1.0, 2.0]), np.array([3.0, 2.0]))
    0.5
    """
    return float(measured[int(np.argmin(predicted))] / measured.min() - 1)
