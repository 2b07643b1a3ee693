"""Fitting a device's speed to timed matmuls and element-wise operations.

    t = (1 + e c) (launch + (F + F0) / rate + bytes / memory_bandwidth),        F = 2 m k n

as in :mod:`autoddl.costmodel.cluster`; e is the excess of ranks over cores.  F0 are the FLOPs of a product that reaches half of the
rate: small products, and the narrow ones that splitting leaves, use a device less well.  Products have a rate and an F0 for each
precision that clusters give the speed of (``float32``, ``mixed``); launch, memory bandwidth and crowding are common to all.  For a
given crowding c this is linear in launch, 1 / rate, F0 / rate and 1 / memory_bandwidth; c minimises the residuals, by a bounded
scalar search.

**With F0 or without.**  Cross-validation decides, as between the formulas of collectives (:mod:`.fit`): all samples of one shape
are held out in turn and predicted from the other shapes.  Element-wise operations have no F0.  Without them it could not be told
from the launch, and is not fitted.  Of several rates, each keeps its F0 only if the samples determine it: the 95 % interval of the
bootstrap lies above 0, and not above the FLOPs of the largest product of that rate.  A larger F0 would mean that no product reached
half of the rate, so that neither of the two was seen.  Otherwise F0 is 0, and the other parameters are fitted again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from autoddl.costmodel.cluster import excess
from autoddl.costmodel.precision import PRECISIONS, precision_of

from .fit import DRAWS, simplest, undisturbed
from .measurements import DEVICE_WORK, Sample
from .robust import location, nonnegative_fit

__all__ = ["DeviceFit", "HeldOutProduct", "fit_device", "half_speed_of", "product_term", "work_term"]

#: Largest crowding of the search.
_MAX_CROWDING = 10.0


@dataclass(frozen=True)
class HeldOutProduct:
    """The prediction of a product from the products of other shapes.

    Attributes:
        sample: the first sample of the product.
        seconds: its measured time.
        predicted_s: the predicted time.
    """

    sample: Sample
    seconds: float
    predicted_s: float

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s / self.seconds - 1)


@dataclass(frozen=True)
class DeviceFit:
    """The fitted parameters of a device.

    Attributes:
        parameters: launch [s], work of each rate [s/FLOP] (:func:`work_term`), F0 / rate of each rate [s] (:func:`product_term`; 0
            if products are predicted as well without it, or the samples do not determine it), memory [s/byte], crowding [1].
        rates: the precisions whose products were measured, as clusters give their speed.
        draws: bootstrap values of each parameter, shape (draws,).
        error: median of |predicted - measured| / measured.
        num_points: number of points fitted.
        held_out: prediction of each product from those of other shapes; empty if there are too few shapes.
    """

    parameters: Mapping[str, float]
    rates: tuple[str, ...]
    draws: Mapping[str, np.ndarray]
    error: float
    num_points: int
    held_out: tuple[HeldOutProduct, ...] = ()


def work_term(rate: str) -> str:
    """The name of the parameter of the FLOPs of products of a rate."""
    return f"work {rate}"


def product_term(rate: str) -> str:
    """The name of the parameter of the number of products of a rate."""
    return f"product {rate}"


def half_speed_of(fit: DeviceFit, rate: str) -> tuple[float, np.ndarray]:
    """Return F0 of a rate [FLOPs], and its bootstrap values of shape (draws,)."""
    value, draws = (
        values[product_term(rate)] / np.maximum(values[work_term(rate)], 1e-18)
        for values in (fit.parameters, fit.draws)
    )
    return float(value), np.asarray(draws)


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
    points = _Points(firsts, rates, seconds)
    half_speeds = rates if _is_better_with_half_speeds(points) else ()
    while True:
        fit = _bootstrapped(points.limited_to(half_speeds), repetitions, seed)
        determined = tuple(rate for rate in half_speeds if _is_determined(fit, rate, points.largest_flops(rate)))
        if determined == half_speeds:
            return fit
        half_speeds = determined


def _is_better_with_half_speeds(points: _Points) -> bool:
    """Whether held-out products are predicted better if every rate has an F0 (see the module's docstring)."""
    if all(first.collective == "matmul" for first in points.firsts):
        return False
    candidates = [points.limited_to(()), points]
    errors = [[one.error for one in _held_out(candidate)] for candidate in candidates]
    if not all(errors):
        return False
    return bool(simplest([int(one.features.any(axis=0).sum()) for one in candidates], errors))


def _is_determined(fit: DeviceFit, rate: str, largest_flops: float) -> bool:
    """Whether F0 of a rate, and its 95 % interval, lie above 0 and not above the FLOPs of the largest product."""
    value, draws = half_speed_of(fit, rate)
    low, high = np.quantile(draws, [0.025, 0.975])
    return bool(min(low, value) > 0 and max(high, value) <= largest_flops)


def _bootstrapped(points: _Points, repetitions: Sequence[np.ndarray], seed: int) -> DeviceFit:
    """Fit the parameters that the points have, and draw them from the repetitions of each point."""
    features, crowd, seconds, rates = points.features, points.crowd, points.seconds, points.rates
    parameters = _fit(features, crowd, seconds, np.ones(len(seconds)), (0.0, _MAX_CROWDING))
    # Draws search crowding near that of the fit, since the scalar search finds only local minima.
    around = (0.5 * parameters[-1], 1.5 * parameters[-1] + 0.1)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        drawn = np.array([float(location(rng.choice(times, size=len(times)))[0]) for times in repetitions])
        draws.append(_fit(features, crowd, drawn, rng.exponential(size=len(seconds)), around))
    predicted = _predicted(features, crowd, parameters)
    names = ("launch", *map(work_term, rates), *map(product_term, rates), "memory", "crowding")
    return DeviceFit(
        dict(zip(names, map(float, parameters))),
        rates,
        {name: np.array([draw[i] for draw in draws]) for i, name in enumerate(names)},
        float(np.median(np.abs(predicted / seconds - 1))),
        len(seconds),
        _held_out(points),
    )


class _Points:
    """The points that a device is fitted to.

    Args:
        firsts: a sample of each point.
        rates: the rates of the products among them.
        seconds: the time of each point, shape (points,).

    Attributes:
        features: launches; FLOPs, and then products, by rate; bytes; shape (points, 2 + 2 rates).
        crowd: the excess of ranks over cores, shape (points,).
    """

    def __init__(self, firsts: Sequence[Sample], rates: tuple[str, ...], seconds: np.ndarray):
        self.firsts, self.rates, self.seconds = firsts, rates, seconds
        self.crowd = np.array([excess(first.ranks_per_node, first.cores or None) for first in firsts])
        flops = np.array([[_flops(first) if _rate(first) == rate else 0.0 for first in firsts] for rate in rates])
        self.features = np.column_stack(
            [np.ones(len(firsts)), flops.T, (flops > 0).T.astype(float), [float(first.bytes) for first in firsts]]
        )

    def limited_to(self, half_speeds: Sequence[str]) -> _Points:
        """The same points, without the numbers of products of other rates: zero columns have zero parameters."""
        points = _Points(self.firsts, self.rates, self.seconds)
        for number, rate in enumerate(self.rates):
            if rate not in half_speeds:
                points.features[:, 1 + len(self.rates) + number] = 0.0
        return points

    def largest_flops(self, rate: str) -> float:
        """The FLOPs of the largest product of a rate."""
        return float(self.features[:, 1 + self.rates.index(rate)].max())


def _held_out(points: _Points) -> tuple[HeldOutProduct, ...]:
    """Predict the products of every shape from all other points; empty if some rate has fewer than four shapes."""
    is_product = np.array([first.collective == "matmul" for first in points.firsts])
    keys = [(_rate(first), first.shape) if own else None for first, own in zip(points.firsts, is_product)]
    shapes = [key for key in dict.fromkeys(keys) if key is not None]
    if any(sum(rate == own for own, _ in shapes) < 4 for rate in points.rates):
        return ()
    found = []
    for shape in shapes:
        test = np.array([key == shape for key in keys])
        train = ~test
        features, crowd, seconds = points.features[train], points.crowd[train], points.seconds[train]
        parameters = _fit(features, crowd, seconds, np.ones(len(seconds)), (0.0, _MAX_CROWDING))
        predicted = _predicted(points.features, points.crowd, parameters)
        found += [
            HeldOutProduct(points.firsts[i], float(points.seconds[i]), float(predicted[i]))
            for i in np.flatnonzero(test)
        ]
    return tuple(found)


def _rate(sample: Sample) -> str:
    return precision_of(sample.type).rate


def _rates(samples: Sequence[Sample]) -> tuple[str, ...]:
    """The rates of the matmuls among some samples, in the order of the precisions."""
    measured = {_rate(sample) for sample in samples if sample.collective == "matmul"}
    return tuple(rate for rate in dict.fromkeys(own.rate for own in PRECISIONS.values()) if rate in measured)


def _flops(sample: Sample) -> float:
    return 2.0 * float(np.prod(sample.product, dtype=float)) if sample.collective == "matmul" else 0.0


def _predicted(features: np.ndarray, crowd: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """The times of points by the formula; the last parameter is the crowding."""
    return np.asarray(features @ parameters[:-1] * (1 + crowd * parameters[-1]))


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
