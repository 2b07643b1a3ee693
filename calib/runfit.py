"""The efficiency of a device that fits measured training steps.

The predicted step of a run is a sum of times of products, which are proportional to 1 / E for the efficiency E of products, and of
times that do not depend on it (memory traffic, kernel launches, communication):

    t(E) = a + b / E                                                                                                       (1)

This is exact as long as the longest path of the schedule is the same.  So two predictions, at two efficiencies, give a and b of a
run.  For a measured step m of the run, (1) gives the efficiency E = b / (m - a) at which the prediction is exact.

The efficiency of a *group* of runs (one kind of hardware with one kind of software) has the least mean of the relative errors
|t(E) - m| / m.  The mean is convex and piecewise linear in 1 / E, so that its minimum is at the efficiency of one of the runs.

The *leave-one-out* error predicts every run with the efficiency that fits the other runs of its group.  With a single run there are
no others: its error is that of the group's own efficiency before the fit, 1.

Efficiencies are relative to those of the cluster: a factor of both the efficiency of products and that inside attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FACTORS", "GroupFit", "RunTimes", "fit_group", "run_times"]

#: The efficiencies, relative to those of the cluster, at which a run is predicted to find a and b.
FACTORS = (0.8, 1.25)


@dataclass(frozen=True)
class RunTimes:
    """The step of a run as a function of the efficiency, formula (1), and the measured step.

    Attributes:
        fixed_s: a, seconds that do not depend on the efficiency.
        product_s: b, seconds that are inversely proportional to it.
        measured_s: m.
    """

    fixed_s: float
    product_s: float
    measured_s: float

    def step_s(self, efficiency: float) -> float:
        """The predicted step at an efficiency."""
        return self.fixed_s + self.product_s / efficiency

    def error(self, efficiency: float) -> float:
        """The relative error of the predicted step; positive if it is too slow."""
        return self.step_s(efficiency) / self.measured_s - 1

    @property
    def exact_efficiency(self) -> float | None:
        """The efficiency at which the prediction is exact; None if the measured step is shorter than its fixed part."""
        return self.product_s / (self.measured_s - self.fixed_s) if self.measured_s > self.fixed_s else None


def run_times(steps_s: tuple[float, float], measured_s: float) -> RunTimes:
    """Return the step of a run as a function of the efficiency.

    Args:
        steps_s: the predicted steps at the two :data:`FACTORS`.
        measured_s: the measured step.

    >>> run_times((1 + 4 / 0.8, 1 + 4 / 1.25), measured_s=5.0)
    RunTimes(fixed_s=1.0, product_s=4.0, measured_s=5.0)
    """
    low, high = FACTORS
    product_s = (steps_s[0] - steps_s[1]) / (1 / low - 1 / high)
    return RunTimes(round(steps_s[1] - product_s / high, 12), round(product_s, 12), measured_s)


@dataclass(frozen=True)
class GroupFit:
    """The efficiency that fits the runs of a group.

    Attributes:
        efficiency: relative to that of the cluster.
        mean_abs_error: mean of the relative errors at this efficiency.
        leave_one_out: mean of the relative errors of runs that are predicted with the efficiency of the others.
    """

    efficiency: float
    mean_abs_error: float
    leave_one_out: float


def fit_group(runs: Sequence[RunTimes]) -> GroupFit:
    """Fit the efficiency of a group of runs.

    >>> exact, slow = RunTimes(1.0, 4.0, 5.0), RunTimes(1.0, 4.0, 6.0)
    >>> fit = fit_group([exact, exact, slow])
    >>> fit.efficiency, round(fit.mean_abs_error, 4)
    (1.0, 0.0556)
    """
    efficiency = _best_efficiency(runs)
    errors = [abs(run.error(efficiency)) for run in runs]
    left_out = []
    for number, run in enumerate(runs):
        others = [*runs[:number], *runs[number + 1 :]]
        left_out.append(abs(run.error(_best_efficiency(others) if others else 1.0)))
    return GroupFit(efficiency, sum(errors) / len(errors), sum(left_out) / len(left_out))


def _best_efficiency(runs: Sequence[RunTimes]) -> float:
    """The efficiency of the least mean error; 1 if every measured step is shorter than its fixed part."""
    candidates = [run.exact_efficiency for run in runs]
    exact = sorted(efficiency for efficiency in candidates if efficiency is not None)
    return min(exact, key=lambda efficiency: sum(abs(run.error(efficiency)) for run in runs), default=1.0)
