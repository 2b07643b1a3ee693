"""Fitting the parameters of network levels to samples.

1. The samples of one setting become a *point*, the robust centre of its repetitions.  Samples that other processes disturbed are
   left out if enough others remain.
2. Each form of :mod:`forms` is fitted to the points of a network level by robust non-negative least squares of relative
   residuals (:mod:`robust`).
3. Cross-validation chooses the form: all points of one message size are held out in turn and predicted from the other sizes.
   The chosen form has the fewest parameters among those whose mean error exceeds the best one's by at most the standard error of
   the difference and at most a tenth of the best error.
4. Bootstrap: repetitions are resampled within each point, and points get random weights of mean 1 (Rubin's Bayesian bootstrap, in
   which no draw loses all large messages).  The quantiles of the fits to all draws are the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.errors import UserError

from .forms import FORMS, Form, Key, MeasuredPoint, scopes
from .measurements import COLLECTIVES, Sample
from .robust import location, nonnegative_fit

__all__ = [
    "FormTrial",
    "HeldOut",
    "LevelFit",
    "fit_level",
    "fit_parameters",
    "held_out",
    "points_of",
    "predict",
    "simplest",
]

#: Number of bootstrap draws.
DRAWS = 100
#: Difference of relative errors that counts as equal; clocks and collectives are less regular than this.
NEGLIGIBLE = 0.002
#: Largest fraction of foreign CPU time of an undisturbed sample.
UNDISTURBED = 0.05
#: Number of undisturbed samples of a setting from which on disturbed ones are left out.
ENOUGH = 5


@dataclass(frozen=True)
class HeldOut:
    """The prediction of a point, by default from other message sizes only.

    Attributes:
        point: the point.
        predicted_s: the predicted time [s].
    """

    point: MeasuredPoint
    predicted_s: float

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s - self.point.seconds) / self.point.seconds


@dataclass(frozen=True)
class FormTrial:
    """A form that was compared.

    Attributes:
        form: the form.
        num_parameters: number of its parameters.
        errors: relative error of each point when its message size is held out.
    """

    form: Form
    num_parameters: int
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Median of the errors."""
        return float(np.median(self.errors))


@dataclass(frozen=True)
class LevelFit:
    """The fit of a network level.

    Attributes:
        level: name of the level.
        form: the chosen form.
        parameters: the fitted values, in seconds and seconds per byte.
        draws: bootstrap values of each parameter, shape (draws,); the k-th values of all belong to the same draw.
        held_out: prediction of every point from other message sizes, with the chosen form.
        choices: all forms that were compared.
        transfer, transfer_draws: the same as ``parameters`` and ``draws`` for point-to-point messages; empty if not measured.
        points: all points that were fitted.
    """

    level: str
    form: Form
    parameters: Mapping[Key, float]
    draws: Mapping[Key, np.ndarray]
    held_out: tuple[HeldOut, ...]
    choices: tuple[FormTrial, ...]
    transfer: Mapping[Key, float]
    transfer_draws: Mapping[Key, np.ndarray]
    points: tuple[MeasuredPoint, ...]

    def interval(self, key: Key, share: float = 0.95) -> tuple[float, float]:
        """The central interval of the draws that contains the fraction ``share`` of them."""
        draws = self.draws[key] if key in self.draws else self.transfer_draws[key]
        low, high = np.quantile(draws, [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)


def points_of(samples: Sequence[Sample], level: str) -> list[MeasuredPoint]:
    """The points of a level, in the order of their first samples."""
    groups: dict[object, list[Sample]] = {}
    for sample in samples:
        if sample.level == level and sample.collective in COLLECTIVES:
            groups.setdefault(sample.setting, []).append(sample)
    found = []
    for members in groups.values():
        first = members[0]
        times = undisturbed([(sample.seconds, sample.foreign) for sample in members])
        found.append(
            MeasuredPoint(
                first.collective,
                level,
                first.ranks,
                first.bytes,
                first.ranks_per_node,
                first.cores,
                first.stride,
                times,
                float(location(times)[0]),
            )
        )
    return found


def undisturbed(samples: Sequence[tuple[float, float]]) -> np.ndarray:
    """The seconds of undisturbed (seconds, foreign) pairs; if they are too few, those of the less disturbed half."""
    quiet = [seconds for seconds, foreign in samples if foreign <= UNDISTURBED]
    if len(quiet) >= ENOUGH:
        return np.array(quiet)
    limit = max(UNDISTURBED, float(np.median([foreign for _, foreign in samples])))
    return np.array([seconds for seconds, foreign in samples if foreign <= limit])


def fit_level(points: Sequence[MeasuredPoint], level: str, seed: int = 0, forms: Sequence[Form] = FORMS) -> LevelFit:
    """Choose a form for a level and fit it.

    Args:
        points: the points of the level.
        level: its name.
        seed: of the bootstrap.
        forms: the forms to compare.

    Raises:
        UserError: there are no collectives among the points, or one was measured at a single message size.
    """
    transfers = [point for point in points if point.collective == TRANSFER]
    rings = [point for point in points if point.collective != TRANSFER]
    if not rings:
        raise UserError(f"no samples of collectives on the {level} level; measure all-reduce, all-gather and the like")
    _check_sizes(rings, level)
    choices = [_choice(form, rings) for form in forms]
    chosen = choices[simplest([one.num_parameters for one in choices], [one.errors for one in choices])]
    rng = np.random.default_rng(seed)
    transfer: dict[Key, float] = {}
    transfer_draws: dict[Key, np.ndarray] = {}
    has_transfer = len({point.num_bytes for point in transfers}) > 1
    if has_transfer:
        form = FORMS[0] if not chosen.form.crowding else FORMS[1]
        transfer = fit_parameters(form, transfers)
        transfer_draws = _bootstrap(form, transfers, rng)
    return LevelFit(
        level=level,
        form=chosen.form,
        parameters=fit_parameters(chosen.form, rings),
        draws=_bootstrap(chosen.form, rings, rng),
        held_out=tuple(held_out(chosen.form, rings)),
        choices=tuple(choices),
        transfer=transfer,
        transfer_draws=transfer_draws,
        points=tuple(points),
    )


def predict(parameters: Mapping[Key, float], form: Form, points: Sequence[MeasuredPoint]) -> np.ndarray:
    """The predicted seconds of points, shape (points,); nan if there are no parameters for the collective or group size."""
    seconds = np.full(len(points), math.nan)
    for scope in scopes(form, points, is_fit=False):
        if any(key in parameters for key in scope.keys):
            values = np.array([parameters.get(key, 0.0) for key in scope.keys])
            seconds[scope.points] = scope.columns @ values
    return seconds


def held_out(form: Form, points: Sequence[MeasuredPoint]) -> list[HeldOut]:
    """Predict every point from the points of all other message sizes; sizes within a factor of 1.2 count as one."""
    result = []
    classes = _size_classes(points)
    for size in sorted(set(classes)):
        train = [point for point, own in zip(points, classes) if own != size]
        test = [point for point, own in zip(points, classes) if own == size]
        predicted = predict(fit_parameters(form, train), form, test)
        result += [HeldOut(point, float(seconds)) for point, seconds in zip(test, predicted) if not math.isnan(seconds)]
    return result


def _size_classes(points: Sequence[MeasuredPoint]) -> list[int]:
    numbers: dict[int, int] = {}
    last, count = 0, -1
    for size in sorted({point.num_bytes for point in points}):
        if size > 1.2 * last:
            last, count = size, count + 1
        numbers[size] = count
    return [numbers[point.num_bytes] for point in points]


def _check_sizes(points: Sequence[MeasuredPoint], level: str) -> None:
    sizes: dict[str, set[int]] = {}
    for point, size in zip(points, _size_classes(points)):
        sizes.setdefault(point.collective, set()).add(size)
    for collective, found in sizes.items():
        if len(found) < 2:
            only = next(point.num_bytes for point in points if point.collective == collective)
            raise UserError(
                f"all samples of {collective} on the {level} level have one message size ({only} bytes): latency and bandwidth "
                "cannot be separated; measure at least two sizes, or three to estimate the error of the fit, or for longer"
            )


def fit_parameters(
    form: Form, points: Sequence[MeasuredPoint], weights: np.ndarray | None = None, seconds: np.ndarray | None = None
) -> dict[Key, float]:
    """Fit the parameters of a form.

    Args:
        form: the form.
        points: the points.
        weights: weight of each point, for a resampled fit; by default 1.
        seconds: time of each point, for a resampled fit; by default its own.
    """
    own = np.array([point.seconds for point in points]) if seconds is None else seconds
    parameters: dict[Key, float] = {}
    for scope in scopes(form, points):
        prior = None if weights is None else weights[scope.points]
        parameters.update(zip(scope.keys, nonnegative_fit(scope.columns, own[scope.points], prior)))
    return parameters


def _choice(form: Form, points: Sequence[MeasuredPoint]) -> FormTrial:
    count = sum(len(scope.keys) for scope in scopes(form, points))
    predictions = held_out(form, points)
    by_point = {id(one.point): one.error for one in predictions}
    # A point that the form cannot predict counts with an error of 100 %.
    return FormTrial(form, count, tuple(by_point.get(id(point), 1.0) for point in points))


def simplest(num_parameters: Sequence[int], errors: Sequence[Sequence[float]]) -> int:
    """Return the number of the formula with the fewest parameters that is about as good as the best (see the module's docstring).

    Args:
        num_parameters: of each formula.
        errors: of each formula on the same held-out points, relative.

    >>> simplest([2, 5], [[0.050, 0.060], [0.050, 0.059]]), simplest([2, 5], [[0.5, 0.6], [0.05, 0.06]])
    (0, 1)
    """
    # Clip errors at 100 %: larger ones are equally useless.
    clipped = [np.minimum(own, 1.0) for own in errors]
    best = int(np.argmin([own.mean() for own in clipped]))
    for number in sorted(range(len(clipped)), key=lambda one: num_parameters[one]):
        worse = clipped[number] - clipped[best]
        doubt = worse.std() / math.sqrt(len(worse))
        if worse.mean() <= max(NEGLIGIBLE, min(doubt, 0.1 * clipped[best].mean())) or number == best:
            return number
    return best


def _bootstrap(form: Form, points: Sequence[MeasuredPoint], rng: np.random.Generator) -> dict[Key, np.ndarray]:
    centres = np.stack([_resampled(point.repetitions, rng) for point in points])
    draws: dict[Key, list[float]] = {}
    for k in range(DRAWS):
        weights = rng.exponential(size=len(points))
        for key, value in fit_parameters(form, points, weights, centres[:, k]).items():
            draws.setdefault(key, []).append(value)
    return {key: np.array(values) for key, values in draws.items()}


def _resampled(repetitions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Robust centres of resampled repetitions, shape (draws,)."""
    if len(repetitions) == 1:
        return np.repeat(repetitions, DRAWS)
    return location(rng.choice(repetitions, size=(DRAWS, len(repetitions))))
