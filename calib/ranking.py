"""How well predicted times rank strategies: statistics of predicted against measured times.

- *Spearman*: the rank correlation of predicted and measured times.
- *Ceiling*: the measurements agree with themselves only so well: the rank correlation of odd and even rounds.  A prediction
  cannot be asked for more than about that.
- *Pairs*: of all pairs whose measured times are more than 10 % apart, how many the prediction puts in the right order.
- *Regret*: how much longer the strategy of the smallest predicted time takes than the fastest one measured.
- *Floor*: what measurements regret of themselves: the fastest strategy of the odd rounds, in the even ones, and the reverse.

A strategy's measured time is that of its fastest round: what comes between, on a shared machine, only lengthens a round, by
anything, and rounds of one strategy differ by more than strategies do.  The *error*, of predicted times in themselves, is
relative to the robust centre of the rounds (:func:`autoddl.calib.robust.location`), which is what calibration fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from .robust import location

__all__ = ["Score", "fastest", "pair_accuracy", "regret", "score", "spearman"]

#: Pairs closer than this are left out of the accuracy.
APART = 0.1


@dataclass(frozen=True)
class Score:
    """How well predictions rank (module docstring); ``error`` is the median of |predicted - measured| / measured.

    Ceiling and floor are nan with a single round.
    """

    spearman: float
    ceiling: float
    pairs: float
    num_pairs: int
    regret: float
    floor: float
    error: float


def score(predicted: Sequence[float], measured: np.ndarray) -> Score:
    """The score of predictions.

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
    """Of each strategy's rounds, shape (strategies, rounds)."""
    return measured.min(axis=1)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The rank correlation, ties sharing their mean rank; 0 where one of them is constant."""
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
    """The regret of one half of the rounds' fastest strategy in the other half; nan with a single round."""
    if measured.shape[1] < 2:
        return float("nan")
    odd, even = _halves(measured)
    return (regret(odd, even) + regret(even, odd)) / 2


def _halves(measured: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return fastest(measured[:, 0::2]), fastest(measured[:, 1::2])


def pair_accuracy(predicted: np.ndarray, measured: np.ndarray, apart: float = APART) -> tuple[float, int]:
    """The fraction of pairs in the right order, and how many pairs are more than ``apart`` apart; 1 where there are none."""
    i, j = np.triu_indices(len(measured), 1)
    low, high = np.minimum(measured[i], measured[j]), np.maximum(measured[i], measured[j])
    counted = high > low * (1 + apart)
    right = (predicted[i] < predicted[j]) == (measured[i] < measured[j])
    # Equal predictions say nothing: half a point.
    points = np.where(predicted[i] == predicted[j], 0.5, right)
    return (float(points[counted].mean()) if counted.any() else 1.0), int(counted.sum())


def regret(predicted: np.ndarray, measured: np.ndarray) -> float:
    """How much longer the predicted best takes than the measured best, relative."""
    return float(measured[int(np.argmin(predicted))] / measured.min() - 1)
