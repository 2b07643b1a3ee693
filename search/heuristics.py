"""The heuristic searches of the AutoDDL paper: coordinate descent, Metropolis-Hastings, random.

They share a driver with a budget of evaluations and seconds, and the best choice so far.  At the end it computes a valid lower
bound by elimination; a choice that reaches the bound is proven optimal.  One *evaluation* is one choice whose cost was computed:
every candidate option of coordinate descent, every proposal of Metropolis-Hastings, every random sample.

**Coordinate descent.**  From a random start, sweep over the variables; each takes its best option with the others fixed, until a
sweep changes nothing.  Keep the best choice and restart.

**Metropolis-Hastings.**  The stationary distribution of the chain is P(S) ~ exp(-b Cost(S)).  A proposal changes one variable to
another of its options, all with the same probability.  It is accepted with probability min(1, P(new) / P(old)) =
min(1, exp(-b (Cost(new) - Cost(old)))), and never over the memory limit.  With a ``temperature`` [s], b = 1 / temperature is
constant, as in the paper.  Without one, the temperature falls geometrically over the budget (simulated annealing): from the median
change of the cost at the start, where most proposals are accepted, to a ten-thousandth of the cost.

**Random.**  Independent uniform choices, for comparison.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from autoddl.costmodel.stopping import Deadline, Stop, StopRequestedError
from autoddl.costmodel.table import CostTable

from .branching import lower_bound
from .exact import smallest_memory
from .moves import Assignment, random_start
from .outcomes import check_limits, infeasible, unless_stopped, unproven
from .progress import Progress, silent
from .result import PROOF_TOLERANCE, Result, SearchError, Status
from .separable import separable_bound

__all__ = ["acceptance", "chain", "coordinate_descent", "metropolis_hastings", "random_search"]

#: Default budget: evaluations per option of each variable.
_EVALUATIONS_PER_OPTION = 100
#: The last temperature of a chain, relative to its cost.
_COLD = 1e-4


class _BudgetSpentError(Exception):
    """The budget of evaluations or seconds is used up."""


class _Driver:
    """Budget, clock and incumbent."""

    def __init__(
        self,
        table: CostTable,
        memory_limit: float | None,
        evaluations: int | None,
        time_limit: float | None,
        progress: Progress,
        stop: Stop | None,
    ):
        check_limits(memory_limit=memory_limit, time_limit=time_limit, evaluations=evaluations)
        self.start = time.perf_counter()
        self.deadline = Deadline(time_limit, stop)
        self.table, self.memory_limit, self.progress = table, memory_limit, progress
        options = sum(len(costs) for costs in table.cost)
        self.budget = _EVALUATIONS_PER_OPTION * options if evaluations is None else evaluations
        self.used = 0
        self.cost = math.inf
        self.choice: tuple[int, ...] | None = None
        self._next_report = self.start + 0.2

    @property
    def left(self) -> int:
        """Number of evaluations left in the budget."""
        return self.budget - self.used

    def spend(self, count: int = 1) -> None:
        """Count evaluations before they are made.

        Raises:
            _BudgetSpentError: the budget does not allow them.
        """
        now = time.perf_counter()
        if count > self.left or self.deadline.is_over:
            raise _BudgetSpentError
        self.used += count
        if now >= self._next_report:
            self.progress(self.cost, -math.inf, self.used)
            self._next_report = now + 0.2

    def consider(self, cost: float, choice: list[int] | tuple[int, ...]) -> None:
        """Keep a choice if it is the best so far."""
        if cost < self.cost:
            self.cost, self.choice = cost, tuple(choice)

    def run(self, method: str, search: Callable[[], None]) -> Result:
        """Search until the budget is spent, and return the best choice with a bound."""
        table, stop = self.table, self.deadline.stop
        with contextlib.suppress(_BudgetSpentError, StopRequestedError):
            search()
        # After a stop, use the fast bound instead of the sharper one.
        bound_of = separable_bound if stop.is_requested else partial(lower_bound, stop=stop)
        bound = bound_of(table, self.memory_limit)
        if bound == math.inf or self.choice is None:
            least = unless_stopped(lambda stop: smallest_memory(table, stop)[0], stop)
            if bound == math.inf or (self.memory_limit is not None and least is not None and least > self.memory_limit):
                return infeasible(table, method, self.start, self.memory_limit, least, evaluations=self.used)
        cost = math.inf if self.choice is None else table.evaluate(self.choice)
        proven = cost <= bound + PROOF_TOLERANCE * abs(bound)
        return Result(
            method=method,
            status=Status.OPTIMAL if proven else unproven(self.deadline),
            choice=self.choice,
            cost=cost,
            lower_bound=min(bound, cost),
            memory_bytes=math.nan if self.choice is None else table.peak_memory(self.choice),
            space_size=table.space_size,
            evaluations=self.used,
            seconds=time.perf_counter() - self.start,
            memory_limit_bytes=self.memory_limit,
        )


def _heuristic(method: str) -> Callable[[Callable[[_Driver, int], None]], Callable[..., Result]]:
    """A decorator that makes a search of an algorithm, which is given a driver and a seed."""

    def searching(algorithm: Callable[[_Driver, int], None]) -> Callable[..., Result]:
        def search(
            table: CostTable,
            *,
            memory_limit: float | None = None,
            evaluations: int | None = None,
            time_limit: float | None = None,
            seed: int = 0,
            progress: Progress = silent,
            stop: Stop | None = None,
        ) -> Result:
            driver = _Driver(table, memory_limit, evaluations, time_limit, progress, stop)
            return driver.run(method, lambda: algorithm(driver, seed))

        search.__name__ = search.__qualname__ = algorithm.__name__
        search.__doc__ = f"{algorithm.__doc__}\n\n    Raises:\n        SearchError: a limit is not positive.\n    "
        return search

    return searching


@_heuristic("coordinate-descent")
def coordinate_descent(driver: _Driver, seed: int) -> None:
    """Coordinate descent with restarts (module docstring)."""
    table, limit, generator, stop = driver.table, driver.memory_limit, random.Random(seed), driver.deadline.stop
    while (start := random_start(table, generator, limit, stop)) is not None:
        driver.spend()
        current = Assignment(table, start, limit)
        driver.consider(current.cost, current.choice)
        unchanged, order = 0, list(range(len(start)))
        generator.shuffle(order)
        while unchanged < len(order):
            for variable in order:
                unchanged = 0 if _best_option(driver, current, variable) else unchanged + 1
                if unchanged == len(order):
                    break


def _best_option(driver: _Driver, current: Assignment, variable: int) -> bool:
    """Set a variable to its best option; returns whether the option changed."""
    costs = current.local_costs(variable)
    driver.spend(len(costs))
    fitting = current.fitting(variable)
    if fitting is not None:
        costs = np.where(fitting, costs, math.inf)
    old = current.choice[variable]
    option = int(costs.argmin())
    # Options of equal cost do not count as a change, so that the descent ends.
    if not costs[option] < costs[old] * (1 - 1e-14):
        return False
    current.change(variable, option, float(costs[option] - costs[old]))
    driver.consider(current.cost, current.choice)
    return True


def metropolis_hastings(
    table: CostTable,
    *,
    memory_limit: float | None = None,
    evaluations: int | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    temperature: float | None = None,
    progress: Progress = silent,
    stop: Stop | None = None,
) -> Result:
    """Metropolis-Hastings at a constant ``temperature`` [s], or simulated annealing without one (module docstring).

    Raises:
        SearchError: a limit or the temperature is not positive.
    """
    if temperature is not None and not 0 < temperature < math.inf:
        raise SearchError(f"temperature {temperature:g} should be a finite number of seconds of more than 0")
    driver = _Driver(table, memory_limit, evaluations, time_limit, progress, stop)
    return driver.run("metropolis-hastings", lambda: _walk(driver, seed, temperature))


def _walk(driver: _Driver, seed: int, temperature: float | None) -> None:
    """One chain from a random start until the budget is spent."""
    table, generator = driver.table, random.Random(seed)
    start = random_start(table, generator, driver.memory_limit, driver.deadline.stop)
    if start is None:
        return
    driver.spend()
    current = Assignment(table, start, driver.memory_limit)
    driver.consider(current.cost, current.choice)
    for accepted in chain(current, generator, driver.left, temperature):
        driver.spend()
        if accepted:
            driver.consider(current.cost, current.choice)


def acceptance(difference: float, temperature: float) -> float:
    """The probability to accept a change of the cost by ``difference`` [s]: min(1, exp(-difference / temperature)).

    >>> acceptance(-1.0, 2.0), round(acceptance(2.0, 2.0), 4), acceptance(1.0, 0.0)
    (1.0, 0.3679, 0.0)
    """
    # NaN is a move between two choices of infinite cost; accept it, to leave them.
    if not difference > 0:
        return 1.0
    return math.exp(-difference / temperature) if temperature > 0 else 0.0


def chain(current: Assignment, generator: random.Random, steps: int, temperature: float | None) -> Iterator[bool]:
    """Run a chain of ``steps`` proposals, which modifies ``current``; yields after each whether it was accepted.

    Args:
        current: the state of the chain.
        generator: of random numbers.
        steps: number of proposals.
        temperature: constant temperature [s]; None for annealing.
    """
    movable = [v for v, costs in enumerate(current.table.cost) if len(costs) > 1]
    cooling = _Cooling(steps) if temperature is None else None
    for _ in range(steps if movable else 0):
        variable = movable[generator.randrange(len(movable))]
        option = generator.randrange(len(current.table.cost[variable]) - 1)
        option += option >= current.choice[variable]  # skip the current option
        difference = current.difference(variable, option)
        now = cooling.next(difference, current.cost) if cooling else temperature
        better = not difference > 0
        accepted = better or (now is not None and now > 0 and generator.random() < acceptance(difference, now))
        accepted = accepted and current.fits(variable, option)
        if accepted:
            current.change(variable, option, difference)
        yield accepted


class _Cooling:
    """The annealing schedule of ``steps`` proposals (module docstring); 0 during the warm-up, which collects changes of cost."""

    def __init__(self, steps: int) -> None:
        self._steps, self._warm_up = steps, max(1, steps // 20)
        self._changes: list[float] = []
        self._temperature, self._growth = 0.0, 1.0

    def next(self, difference: float, cost: float) -> float:
        """The temperature [s] of the next proposal, which changes ``cost`` by ``difference``."""
        if len(self._changes) == self._warm_up:
            self._temperature *= self._growth
            return self._temperature
        self._changes.append(abs(difference))
        if len(self._changes) == self._warm_up:
            finite = [change for change in self._changes if math.isfinite(change)]
            self._temperature = float(np.median(finite)) if finite else 0.0
            cold = _COLD * cost
            if self._temperature > cold > 0:
                self._growth = (cold / self._temperature) ** (1 / max(1, self._steps - self._warm_up))
        return self._temperature


@_heuristic("random")
def random_search(driver: _Driver, seed: int) -> None:
    """Independent uniform choices; those over the memory limit count as evaluations as well."""
    table, limit, generator = driver.table, driver.memory_limit, np.random.default_rng(seed)
    while (count := min(4096, driver.left)) > 0:
        driver.spend(count)
        choices = np.stack([generator.integers(len(costs), size=count) for costs in table.cost])
        costs = sum(table.cost[v][x] for v, x in enumerate(choices))
        for edge in table.edges:
            costs = costs + edge.cost[choices[edge.source], choices[edge.target]]
        if limit is not None:
            resident = sum(table.memory[v][x] for v, x in enumerate(choices))
            buffer = np.max([table.buffer[v][x] for v, x in enumerate(choices)], axis=0)
            costs = np.where(resident + buffer <= limit, costs, math.inf)
        best = int(np.argmin(costs))
        driver.consider(float(costs[best]), [int(x) for x in choices[:, best]])
