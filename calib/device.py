"""Fitting a device's speed to timed matmuls and element-wise operations.

    t = (1 + e c) (launch + 2 m k n / rate + bytes / memory_bandwidth)

as in :mod:`autoddl.costmodel.cluster`; e is the excess of ranks over cores.  Products have a rate for each precision that clusters
give the speed of (``float32``, ``mixed``); launch, memory bandwidth and crowding are common to all.  For a given crowding c this is
linear in the other parameters; c minimises the residuals, by a bounded scalar search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from autoddl.costmodel.cluster import excess
from autoddl.costmodel.precision import PRECISIONS, precision_of

from .fit import DRAWS, undisturbed
from .measurements import DEVICE_WORK, Sample
from .robust import location, nonnegative_fit

__all__ = ["DeviceFit", "fit_device", "work_term"]

#: Largest crowding of the search.
_MAX_CROWDING = 10.0


@dataclass(frozen=True)
class DeviceFit:
    """The fitted parameters of a device.

    Attributes:
        parameters: launch [s], work of each rate [s/FLOP] (:func:`work_term`), memory [s/byte], crowding [1].
        rates: the precisions whose products were measured, as clusters give their speed.
        draws: bootstrap values of each parameter, shape (draws,).
        error: median of |predicted - measured| / measured.
        num_points: number of points fitted.
    """

    parameters: Mapping[str, float]
    rates: tuple[str, ...]
    draws: Mapping[str, np.ndarray]
    error: float
    num_points: int


def work_term(rate: str) -> str:
    """The name of the parameter of the products of a rate."""
    return f"work {rate}"


def fit_device(samples: Sequence[Sample], seed: int = 0) -> DeviceFit | None:
    """Fit the parameters of the device; None if fewer than three different matmuls were measured."""
    groups: dict[object, list[Sample]] = {}
    for sample in samples:
        if sample.collective in DEVICE_WORK:
            groups.setdefault(sample.setting, []).append(sample)
    members = list(groups.values())
    firsts = [group[0] for group in members]
    if sum(first.collective == "matmul" for first in firsts) < 3:
        return None
    repetitions = [undisturbed([(sample.seconds, sample.foreign) for sample in group]) for group in members]
    seconds = np.array([float(location(times)[0]) for times in repetitions])
    rates = _rates(firsts)
    work = [[_flops(first) if _rate(first) == rate else 0.0 for first in firsts] for rate in rates]
    features = np.array([[1.0] * len(firsts), *work, [float(first.bytes) for first in firsts]]).T
    crowd = np.array([excess(first.ranks_per_node, first.cores or None) for first in firsts])
    everything = np.ones(len(firsts))
    parameters = _fit(features, crowd, seconds, everything, (0.0, _MAX_CROWDING))
    # Draws search crowding near that of the fit, since the scalar search finds only local minima.
    around = (0.5 * parameters[-1], 1.5 * parameters[-1] + 0.1)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        drawn = np.array([float(location(rng.choice(times, size=len(times)))[0]) for times in repetitions])
        draws.append(_fit(features, crowd, drawn, rng.exponential(size=len(firsts)), around))
    predicted = features @ parameters[:-1] * (1 + crowd * parameters[-1])
    names = ("launch", *map(work_term, rates), "memory", "crowding")
    return DeviceFit(
        dict(zip(names, map(float, parameters))),
        rates,
        {name: np.array([draw[i] for draw in draws]) for i, name in enumerate(names)},
        float(np.median(np.abs(predicted / seconds - 1))),
        len(firsts),
    )


def _rate(sample: Sample) -> str:
    return precision_of(sample.type).rate


def _rates(samples: Sequence[Sample]) -> tuple[str, ...]:
    """The rates of the matmuls among some samples, in the order of the precisions."""
    measured = {_rate(sample) for sample in samples if sample.collective == "matmul"}
    return tuple(rate for rate in dict.fromkeys(own.rate for own in PRECISIONS.values()) if rate in measured)


def _flops(sample: Sample) -> float:
    return 2.0 * float(np.prod(sample.product, dtype=float)) if sample.collective == "matmul" else 0.0


def _fit(
    features: np.ndarray, crowd: np.ndarray, seconds: np.ndarray, weights: np.ndarray, bounds: tuple[float, float]
) -> np.ndarray:
    def at(crowding: float) -> np.ndarray:
        return nonnegative_fit(features * (1 + crowd * crowding)[:, None], seconds, weights)

    def unexplained(crowding: float) -> float:
        predicted = features @ at(crowding) * (1 + crowd * crowding)
        return float(np.sum(weights * np.minimum(np.abs(np.log(np.maximum(predicted, 1e-12) / seconds)), 1.0)))

    if not np.any(crowd > 0) or not np.any(crowd == 0):
        # Crowding cannot be separated from the other parameters.
        return np.append(at(0.0), 0.0)
    crowding = float(minimize_scalar(unexplained, bounds=bounds, method="bounded", options={"xatol": 2e-2}).x)
    return np.append(at(crowding), crowding)
