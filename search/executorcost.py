"""What an executor costs: the best plan of all strategies, for comparison with the best plan that the executor can execute.

The search over all strategies is the exact one, under the same memory limit and with the same time limit.  It starts from the plan
of the executor, so it only looks for better ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoddl.costmodel.graph_meshes import EAGER
from autoddl.costmodel.problem import Problem
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.units import format_memory_limit, format_percent, format_seconds

from .options import Options
from .overlapped import Found
from .pricebooks import PriceBooks, smallest_limit
from .sweep import SAME, BestPlan, InfeasibleError

__all__ = ["AllStrategies", "best_of_all_strategies", "executor_note", "executor_note_start", "infeasible_for_executor"]


@dataclass(frozen=True)
class AllStrategies:
    """The best plan of all strategies.

    Attributes:
        cost: its cost [s per step].
        lower_bound: a lower bound [s] on the cost of all plans.
    """

    cost: float
    lower_bound: float

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that no plan is better."""
        return self.lower_bound >= self.cost * (1 - SAME)


def best_of_all_strategies(
    find: Callable[..., Found], options: Options, known: BestPlan, stop: Stop
) -> AllStrategies | None:
    """Search all strategies for a better plan than the one for the executor of the options.

    Args:
        find: the search, by the options and the argument ``known``.
        options: the options of the search for the executor.
        known: the plan for the executor.
        stop: ends the search early.

    Returns:
        The better plan, or the known one; None if the stop was requested before the search began.
    """
    if stop.is_requested:
        return None
    everything = replace(options, executor=EAGER, method="exact", temperature_s=None, evaluations=None)
    found = find(everything, known=known)
    cost = min(found.best.result.cost, known.result.cost)
    return AllStrategies(cost, min(found.lower_bound, cost))


def executor_note(options: Options, cost: float, optimal: bool, everything: AllStrategies | None) -> str:
    """The note that says what the executor costs.

    Args:
        options: the options of the search for the executor.
        cost: of the plan for the executor [s per step].
        optimal: whether this plan is proven the best one for the executor.
        everything: the best plan of all strategies; None if they were not searched.

    >>> executor_note(Options(executor="graph"), 0.0138414, True, AllStrategies(0.0138, 0.0138))
    'executor graph costs 0.3% against all strategies (13.8 ms per step)'
    >>> executor_note(Options(executor="graph"), 0.0138, True, AllStrategies(0.0138, 0.012))
    'executor graph costs nothing against the best plan found of all strategies (13.8 ms per step), at most 15.0%: not proven'
    """
    subject = executor_note_start(options.executor)
    if everything is None:
        return f"{subject} may cost time: the search was interrupted before it searched all strategies"
    if not optimal:
        subject += " (the best plan found)"
    costs = "costs nothing"
    if cost > everything.cost * (1 + SAME):
        costs = f"costs {format_percent(cost / everything.cost - 1)}"
    what = "of communication" if options.objective == "communication" else "per step"
    time = f"({format_seconds(everything.cost)} {what})"
    if everything.optimal:
        return f"{subject} {costs} against all strategies {time}"
    at_most = f", at most {format_percent(cost / everything.lower_bound - 1)}" if everything.lower_bound > 0 else ""
    return f"{subject} {costs} against the best plan found of all strategies {time}{at_most}: not proven"


def executor_note_start(executor: str) -> str:
    """How a note on the cost of an executor begins."""
    return f"executor {executor}"


def infeasible_for_executor(
    error: InfeasibleError, books: PriceBooks, options: Options, limit: float, stop: Stop
) -> InfeasibleError:
    """The error for an executor that cannot execute any plan that fits; it says whether a plan of all strategies fits.

    Args:
        error: the error of the search for the executor.
        books: the price books of the model on the cluster.
        options: the options of that search.
        limit: memory per device [bytes].
        stop: ends the search for the smallest memory early.

    Raises:
        StopRequestedError: the stop was requested before it was known whether a plan fits.
    """
    offered = books.problems(options, options.untied, options.summa)
    least = smallest_limit([problem for problem in offered if isinstance(problem, Problem)], stop)
    wish = f"executor={options.executor!r}"
    if str(error).endswith(format_memory_limit(least)):
        return error
    if least > limit:
        return InfeasibleError(f"{error} with {wish}, {format_memory_limit(least)} without it", error.least_bytes)
    text = f"{error} with {wish}, but a plan of all strategies fits: leave out {wish}"
    return InfeasibleError(text, error.least_bytes)
