"""Fitting a device's speed to timed matmuls and element-wise operations.

    t = (1 + e c) (launch + 2 m k n / rate + bytes / memory_bandwidth)

as in :mod:`autoddl.costmodel.cluster`; e is the excess of ranks over cores.  For a given crowding c this is linear in the three
other parameters; c minimises the residuals, by a bounded scalar search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from autoddl.costmodel.cluster import excess

from .fit import DRAWS, undisturbed
from .measurements import DEVICE_WORK, Sample
from .robust import location, nonnegative_fit

__all__ = ["DeviceFit", "fit_device"]

#: Largest crowding of the search.
_MAX_CROWDING = 10.0


@dataclass(frozen=True)
class DeviceFit:
    """The fitted parameters of a device.

    Attributes:
        parameters: launch [s], work [s/FLOP], memory [s/byte], crowding [1].
        draws: bootstrap values of each parameter, shape (draws,).
        error: median of |predicted - measured| / measured.
        num_points: number of points fitted.
    """

    parameters: Mapping[str, float]
    draws: Mapping[str, np.ndarray]
    error: float
    num_points: int


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
    flops = [2.0 * np.prod(first.product) if first.collective == "matmul" else 0.0 for first in firsts]
    features = np.stack(
        [np.ones(len(firsts)), np.array(flops), np.array([float(first.bytes) for first in firsts])], axis=1
    )
    crowd = np.array([excess(first.ranks_per_node, first.cores or None) for first in firsts])
    everything = np.ones(len(firsts))
    parameters = _fit(features, crowd, seconds, everything, (0.0, _MAX_CROWDING))
    # Draws search crowding near that of the fit, since the scalar search finds only local minima.
    around = (0.5 * parameters[3], 1.5 * parameters[3] + 0.1)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        drawn = np.array([float(location(rng.choice(times, size=len(times)))[0]) for times in repetitions])
        draws.append(_fit(features, crowd, drawn, rng.exponential(size=len(firsts)), around))
    predicted = features @ parameters[:3] * (1 + crowd * parameters[3])
    names = ("launch", "work", "memory", "crowding")
    return DeviceFit(
        dict(zip(names, map(float, parameters))),
        {name: np.array([draw[i] for draw in draws]) for i, name in enumerate(names)},
        float(np.median(np.abs(predicted / seconds - 1))),
        len(firsts),
    )


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
