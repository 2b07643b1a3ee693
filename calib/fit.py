"""Fitting the cost model's parameters to samples.

1. Samples of one measurement become a *point*: the robust centre of its repetitions.  Samples that were taken while other
   processes used the machine are left out where enough others are left.
2. Each form of :mod:`forms` is fitted to the points of a network level (:mod:`robust`: non-negative, relative, blind to outliers).
3. Cross-validation chooses: all points of one message size are held out in turn and predicted from the other sizes.  The form
   with the fewest parameters is taken whose error is not worse than the best one's by more than the standard error of the
   difference, nor by a tenth of it.
4. Bootstrap: repetitions are drawn again within each point, and points get random weights of mean 1 (Rubin's Bayesian
   bootstrap: no draw loses all large messages); what the fits of all draws spread over is the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.errors import UserError

from .forms import FORMS, Form, Key, Point, scopes
from .measurements import COLLECTIVES, Sample
from .robust import location, nonnegative_fit

__all__ = ["Choice", "HeldOut", "LevelFit", "fit_level", "fit_parameters", "held_out", "points_of", "predict"]

#: How many times the parameters are fitted to resampled points.
DRAWS = 100
#: Errors that differ by less than this are equal: no clock and no ring is that regular.
NEGLIGIBLE = 0.002
#: Samples count as undisturbed up to this fraction of foreign CPU time ...
UNDISTURBED = 0.05
#: ... and others are left out where a measurement has so many undisturbed ones.
ENOUGH = 5


@dataclass(frozen=True)
class HeldOut:
    """What was predicted of a point from other message sizes alone."""

    point: Point
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return abs(self.predicted_s - self.point.seconds) / self.point.seconds


@dataclass(frozen=True)
class Choice:
    """A form that was tried: its number of parameters, and its errors on held-out message sizes, point by point."""

    form: Form
    num_parameters: int
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))


@dataclass(frozen=True)
class LevelFit:
    """A network level's parameters.

    Attributes:
        level: its name.
        form: what was chosen.
        parameters: the fit, in seconds and seconds per byte.
        draws: for each parameter the fits to resampled points; the k-th draws of all belong together.
        held_out: every point predicted from other sizes, at the chosen form.
        choices: all forms that were tried.
        transfer, transfer_draws: latency and slowness of point-to-point messages, where they were measured.
        points: everything that was fitted.
    """

    level: str
    form: Form
    parameters: Mapping[Key, float]
    draws: Mapping[Key, np.ndarray]
    held_out: tuple[HeldOut, ...]
    choices: tuple[Choice, ...]
    transfer: Mapping[Key, float]
    transfer_draws: Mapping[Key, np.ndarray]
    points: tuple[Point, ...]

    def interval(self, key: Key, share: float = 0.95) -> tuple[float, float]:
        """The central interval of the draws."""
        draws = self.draws[key] if key in self.draws else self.transfer_draws[key]
        low, high = np.quantile(draws, [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)


def points_of(samples: Sequence[Sample], level: str) -> list[Point]:
    """The points of a level, in the order in which their first samples came."""
    groups: dict[object, list[Sample]] = {}
    for sample in samples:
        if sample.level == level and sample.collective in COLLECTIVES:
            groups.setdefault(sample.setting, []).append(sample)
    found = []
    for members in groups.values():
        first = members[0]
        times = undisturbed([(sample.seconds, sample.foreign) for sample in members])
        found.append(
            Point(
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
    """The seconds of (seconds, foreign) pairs that no other process disturbed; the less disturbed half where those are too few."""
    quiet = [seconds for seconds, foreign in samples if foreign <= UNDISTURBED]
    if len(quiet) >= ENOUGH:
        return np.array(quiet)
    limit = max(UNDISTURBED, float(np.median([foreign for _, foreign in samples])))
    return np.array([seconds for seconds, foreign in samples if foreign <= limit])


def fit_level(points: Sequence[Point], level: str, seed: int = 0, forms: Sequence[Form] = FORMS) -> LevelFit:
    """Choose a form for a level and fit it.

    Raises:
        UserError: there are no collectives among the points, or some were measured at one message size alone.
    """
    transfers = [point for point in points if point.collective == TRANSFER]
    rings = [point for point in points if point.collective != TRANSFER]
    if not rings:
        raise UserError(f"no samples of collectives on the {level} level; measure all-reduce, all-gather and the like")
    _check_sizes(rings, level)
    choices = [_choice(form, rings) for form in forms]
    chosen = _chosen(choices)
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


def predict(parameters: Mapping[Key, float], form: Form, points: Sequence[Point]) -> np.ndarray:
    """Seconds of points; nan where the parameters do not cover a point's collective or group size."""
    seconds = np.full(len(points), math.nan)
    for scope in scopes(form, points, is_fit=False):
        if any(key in parameters for key in scope.keys):
            values = np.array([parameters.get(key, 0.0) for key in scope.keys])
            seconds[scope.points] = scope.columns @ values
    return seconds


def held_out(form: Form, points: Sequence[Point]) -> list[HeldOut]:
    """Every point, predicted from the points of all other message sizes (sizes within a factor of 1.2 count as one)."""
    result = []
    classes = _size_classes(points)
    for size in sorted(set(classes)):
        train = [point for point, own in zip(points, classes) if own != size]
        test = [point for point, own in zip(points, classes) if own == size]
        predicted = predict(fit_parameters(form, train), form, test)
        result += [HeldOut(point, float(seconds)) for point, seconds in zip(test, predicted) if not math.isnan(seconds)]
    return result


def _size_classes(points: Sequence[Point]) -> list[int]:
    numbers: dict[int, int] = {}
    last, count = 0, -1
    for size in sorted({point.num_bytes for point in points}):
        if size > 1.2 * last:
            last, count = size, count + 1
        numbers[size] = count
    return [numbers[point.num_bytes] for point in points]


def _check_sizes(points: Sequence[Point], level: str) -> None:
    sizes: dict[str, set[int]] = {}
    for point, size in zip(points, _size_classes(points)):
        sizes.setdefault(point.collective, set()).add(size)
    for collective, found in sizes.items():
        if len(found) < 2:
            only = next(point.num_bytes for point in points if point.collective == collective)
            raise UserError(
                f"all samples of {collective} on the {level} level have one message size ({only} bytes): latency and bandwidth "
                "cannot be told apart; measure two sizes at least, three or more to see how well they fit"
            )


def fit_parameters(
    form: Form, points: Sequence[Point], weights: np.ndarray | None = None, seconds: np.ndarray | None = None
) -> dict[Key, float]:
    """A form's parameters; ``weights`` and ``seconds`` replace the points' own in a resampled fit."""
    own = np.array([point.seconds for point in points]) if seconds is None else seconds
    parameters: dict[Key, float] = {}
    for scope in scopes(form, points):
        prior = None if weights is None else weights[scope.points]
        parameters.update(zip(scope.keys, nonnegative_fit(scope.columns, own[scope.points], prior)))
    return parameters


def _choice(form: Form, points: Sequence[Point]) -> Choice:
    count = sum(len(scope.keys) for scope in scopes(form, points))
    predictions = held_out(form, points)
    by_point = {id(one.point): one.error for one in predictions}
    # A point that a form cannot predict at all counts as wholly wrong.
    return Choice(form, count, tuple(by_point.get(id(point), 1.0) for point in points))


def _chosen(choices: Sequence[Choice]) -> Choice:
    """The smallest form that is as good as the best one (see the module's docstring)."""
    # Errors beyond 100 % are all the same: useless.
    clipped = [np.minimum(choice.errors, 1.0) for choice in choices]
    best = int(np.argmin([errors.mean() for errors in clipped]))
    for choice, errors in sorted(zip(choices, clipped), key=lambda pair: pair[0].num_parameters):
        worse = errors - clipped[best]
        doubt = worse.std() / math.sqrt(len(worse))
        if worse.mean() <= max(NEGLIGIBLE, min(doubt, 0.1 * clipped[best].mean())) or choice is choices[best]:
            return choice
    return choices[best]


def _bootstrap(form: Form, points: Sequence[Point], rng: np.random.Generator) -> dict[Key, np.ndarray]:
    centres = np.stack([_resampled(point.repetitions, rng) for point in points])
    draws: dict[Key, list[float]] = {}
    for k in range(DRAWS):
        weights = rng.exponential(size=len(points))
        for key, value in fit_parameters(form, points, weights, centres[:, k]).items():
            draws.setdefault(key, []).append(value)
    return {key: np.array(values) for key, values in draws.items()}


def _resampled(repetitions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Centres of as many repetitions, drawn again."""
    if len(repetitions) == 1:
        return np.repeat(repetitions, DRAWS)
    return location(rng.choice(repetitions, size=(DRAWS, len(repetitions))))
