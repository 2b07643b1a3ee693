"""The sweep over settings: micro-batches, and whether activations are recomputed.

A *setting* is a micro-batch (any divisor of the batch) and whether to recompute activations.  The planner chooses it, unless the
user gives it.  The sweep over all settings is a best-first search.  It is exact, because every setting is settled by a valid
lower bound on its cost.  There are three lower bounds, each sharper than the previous one and a hundred times as expensive:

1. separable: redistributions are free, and the layers only share the memory limit (:mod:`autoddl.search.separable`);
2. bracket: the Lagrangian dual by elimination, which also finds a plan (:func:`autoddl.search.bracket`);
3. the search itself.

A priority queue holds all settings by their best known bounds.  The setting of least bound is removed, its next bound is computed,
and it is put back, until the least bound in the queue is not below the cost of the best plan.  The best baseline is the first plan.

A bound of one setting may hold for another one, because more micro-batches and recomputation reduce only memory, not cost:

    cost of (M, recompute) at strategies x  =  M fixed(x) + batch slope(x) + once(x),     fixed >= 0

where each way of recomputation repeats at least as much as the one before it (none, selective, layers, blocks; blocks:K is
between none and blocks, and repeats more the greater K is), and a micro-batch that divides another one allows a subset of its
strategies (4 does not divide 6: p0 = 4 is possible for 4 samples, not for 6).  So without the memory limit, the optimum does not
decrease from a micro-batch to its divisors, or with recomputation.  The first does not hold if a redistribution may become cheaper
with smaller micro-batches (:attr:`autoddl.costmodel.pricing.PriceBook.may_shrink`), or if ranks share samples of the smaller one
and a strategy has no counterpart at the larger one (:meth:`autoddl.costmodel.pricing.PriceBook.grows_from`).

**Numbers of recomputed blocks.**  The ways blocks:K of a micro-batch begin as one setting, for all K from k to k'.  At any
strategies the time is at least that of blocks:k, and the memory is at least that of blocks:k'.  So the table with the costs of
blocks:k and the memory of blocks:k' bounds all of them.  When its bracket does not settle it, it is divided in two halves.  The
bracket's choice becomes a plan with the least K at which it fits.

When a stop is requested (:mod:`autoddl.costmodel.stopping`), the remaining settings keep their best known bounds, and the plan is
the best choice found so far by a search, a bracket or a baseline.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import why_not_executable
from autoddl.costmodel.problem import Problem
from autoddl.costmodel.recomputation import contains, first_blocks, least_fitting, repeats_no_more, text_of, without
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_memory_limit
from autoddl.costmodel.workload import Workload

from . import Bracket, Result, Status, bracket, progress_bar, separable_bound, solve
from .comparison import BaselineFigures
from .options import (
    DEFAULT_TIME_LIMIT_S,
    Options,
    base_workload,
    is_tried,
    partial_recomputations,
)
from .pricebooks import PriceBooks, smallest_limit

__all__ = [
    "NOT_BETTER",
    "NOT_FITTING",
    "SAME",
    "BestPlan",
    "Candidate",
    "InfeasibleError",
    "NothingFoundError",
    "StartPlan",
    "Sweep",
    "is_offered",
]

#: Relative difference of costs below which two plans count as equally good.
SAME = 1e-9
#: How a setting is settled that needed no search.
NOT_BETTER, NOT_FITTING = "cannot be better", "does not fit"


@dataclass(frozen=True)
class Candidate:
    """One setting of the sweep, and how it was settled.

    Attributes:
        micro_batch, recompute: the setting; ``blocks:k-k'`` stands for several numbers of recomputed blocks.
        outcome: how its search ended, as text.
        cost: cost of its best plan [s]; inf if none was found.
        lower_bound: a valid lower bound on the cost of its plans [s].
    """

    micro_batch: int
    recompute: str
    outcome: str
    cost: float
    lower_bound: float


class InfeasibleError(UserError):
    """No plan fits the memory of the devices; the message gives the smallest sufficient memory.

    Attributes:
        least_bytes: this memory, per device.
    """

    def __init__(self, message: str, least_bytes: float = math.inf):
        super().__init__(message)
        self.least_bytes = least_bytes


class NothingFoundError(UserError):
    """No plan that fits was found before the search reached a limit of its own, though there may be one."""


@dataclass(frozen=True)
class BestPlan:
    """The best plan of the sweep.

    Attributes:
        problem: the search problem of its setting.
        result: the result of the search.
        taken_from: name of the baseline whose plan it is; empty if it is not one.
    """

    problem: Problem
    result: Result
    taken_from: str = ""


@dataclass(frozen=True, eq=False)
class _Setting:
    """A setting in the queue.

    Attributes:
        problem: its search problem; for several numbers of recomputed blocks the costs are those of the least number, and the
            memory is that of the greatest.
        bound: its best known lower bound [s].
        bracket: its bracket; None if it was not computed yet.
        counts: the numbers K, if the setting is blocks:K; else empty.
    """

    problem: Problem
    bound: float
    bracket: Bracket | None = None
    counts: range = range(0)

    @property
    def recompute(self) -> str:
        """The way of recomputation, or ``blocks:k-k'`` for several numbers of recomputed blocks."""
        return text_of(self.counts) if self.counts else self.problem.workload.recompute


@dataclass(frozen=True)
class StartPlan:
    """A plan that the user gives as the first one of the search.

    Attributes:
        name: what to call it, such as the path of its file.
        workload, strategies: of the plan.
    """

    name: str
    workload: Workload
    strategies: Mapping[str, Strategy]


@dataclass(frozen=True)
class _KnownPlan:
    """A feasible plan that a baseline, a bracket or another search gave.

    Attributes:
        cost: seconds per training step.
        workload, strategies: of the plan.
        name: of the baseline; empty for a plan of a bracket.
    """

    cost: float
    workload: Workload
    strategies: Mapping[str, Strategy]
    name: str = ""

    @property
    def setting(self) -> tuple[int, str]:
        return self.workload.micro_batch, self.workload.recompute


def is_offered(name: str, strategies: Mapping[str, Strategy], graph: LayerGraph, options: Options) -> bool:
    """Whether a baseline of this name, with these strategies, is part of the search space of the options."""
    return (name != "summa" or options.summa) and not why_not_executable(options.executor, graph, strategies)


def _cheapest(figures: Sequence[BaselineFigures], graph: LayerGraph, options: Options) -> _KnownPlan | None:
    """The best baseline among those that are part of the search space."""
    plans = [
        _KnownPlan(one.assessment.cost(options.objective), one.workload, one.strategies, one.name)
        for one in figures
        if one.assessment is not None
        and one.workload is not None
        and is_offered(one.name, one.strategies, graph, options)
    ]
    return min(plans, key=lambda plan: plan.cost, default=None)


def _just_above(cost: float) -> float:
    """A cutoff that plans of this cost (which may be 0) are below."""
    return cost * (1 + SAME) + 1e-15


class Sweep:
    """The search over micro-batches and recomputation (see the module's docstring).

    Args:
        books: the price books of the model on the cluster.
        options: what to search.
        limit: memory per device [bytes].
        figures: figures of the baselines.
        stop: ends the search early.
        known: a plan in the space, from another search, that a better one is looked for; None if there is none.
        start: a plan of the user; it is used like a baseline if it is in the space (:attr:`start_fault`).
        rival: cost of a plan outside the space [s]; the sweep ends when no plan of the space can cost less.

    Attributes:
        start_fault: why the plan of the user is not in the space; empty if it is, or if there is none.
    """

    def __init__(
        self,
        books: PriceBooks,
        options: Options,
        limit: float,
        figures: Sequence[BaselineFigures],
        stop: Stop,
        known: BestPlan | None = None,
        start: StartPlan | None = None,
        rival: float = math.inf,
    ):
        self.books, self.options, self.limit, self.stop, self.rival = books, options, limit, stop, rival
        self.graph, self.cluster = books.graph, books.cluster
        # The best baseline, and the cheapest plan of a baseline, a bracket or another search.
        self.baseline = self.known_plan = _cheapest(figures, self.graph, options)
        self.start_fault = ""
        if start is not None:
            try:
                plan = self._priced_start(start)
                if self.baseline is None or plan.cost < self.baseline.cost:
                    self.baseline = self.known_plan = plan
            except UserError as fault:
                self.start_fault = str(fault)
        if known is not None and known.result.choice is not None:
            plan = _KnownPlan(
                known.result.cost,
                known.problem.workload,
                known.problem.strategies(known.result.choice),
                known.taken_from,
            )
            if self.known_plan is None or plan.cost < self.known_plan.cost:
                self.known_plan = plan
        # Cutoff: a plan of about this cost exists, so only cheaper ones are searched.
        self.cutoff = math.inf if self.known_plan is None else _just_above(self.known_plan.cost)
        # Lower bounds without the memory limit, by setting.
        self.free: dict[tuple[int, str], float] = {}
        self.candidates: list[Candidate] = []
        self.best: BestPlan | None = None
        self.evaluations = 0
        self.search_s = 0.0
        self._is_whole = True  # whether every setting has been priced

    def _priced_start(self, start: StartPlan) -> _KnownPlan:
        """The plan of the user with its cost.

        Raises:
            UserError: it is not in the space.
        """
        options, own = self.options, start.workload
        if not is_tried(own.recompute, options, self.graph):
            raise UserError(f"recomputation {own.recompute} is not tried")
        workload = base_workload(self.cluster, options, own.recompute)
        if own.batch != workload.batch:
            raise UserError(f"its batch is {own.batch}, not {workload.batch}")
        if options.micro_batch not in (None, own.micro_batch):
            raise UserError(f"its micro-batch is {own.micro_batch}, not {options.micro_batch}")
        problem = self._problem(own.micro_batch, own.recompute)
        choice = problem.choice(start.strategies)
        cost, memory = problem.table.evaluate(choice), problem.table.peak_memory(choice)
        if memory > self.limit:
            raise UserError(f"it needs {format_bytes(memory)} per device, the limit is {format_bytes(self.limit)}")
        if not math.isfinite(cost):
            raise UserError("no redistribution exists between the layouts of some layers")
        return _KnownPlan(cost, problem.workload, start.strategies, start.name)

    @property
    def lower_bound(self) -> float:
        """A valid lower bound on the plans of all settings, after the sweep."""
        bounds = [candidate.lower_bound for candidate in self.candidates]
        return min(bounds) if self._is_whole else 0.0

    def run(self) -> BestPlan:
        """Settle every setting, the one of least bound first, and return the best plan.

        Raises:
            StopRequestedError: the stop was requested before any plan was known.
            UserError: no plan fits, or none was found.
        """
        settings = list(self._settings())
        queue = [(setting.bound, number) for number, setting in enumerate(settings)]
        heapq.heapify(queue)
        while queue and queue[0][0] < min(self.cutoff, self.rival) and not self.stop.is_requested:
            number = heapq.heappop(queue)[1]
            for sharper in self._sharpened(settings[number]):
                heapq.heappush(queue, (sharper.bound, len(settings)))
                settings.append(sharper)
        for bound, number in sorted(queue):
            left = NOT_BETTER if bound >= min(self.cutoff, self.rival) else str(Status.INTERRUPTED)
            self._record(settings[number], NOT_FITTING if bound == math.inf else left, bound)
        best = self._best(settings)
        if best is None:
            raise self._failure([setting.problem for setting in settings if len(setting.counts) < 2])
        return best

    def _best(self, settings: Sequence[_Setting]) -> BestPlan | None:
        """The best plan of the searches, or a plan of a baseline or bracket if that is better.

        A bracket's plan counts for the exact method, which it is a part of, and if a search was interrupted before it had a plan.
        For other methods it would hide their own result.
        """
        found, known_plan = self.best, self.known_plan
        if self.options.method != "exact" and (found is not None or not self.stop.is_requested):
            known_plan = self.baseline
        if known_plan is None or (found is not None and found.result.cost < _just_above(known_plan.cost)):
            return found
        return self._as_best(known_plan, settings)

    def plan_of_baseline(self) -> BestPlan | None:
        """The best baseline, or the plan of the user if that is better, as a plan of the space; None if there is none."""
        return None if self.baseline is None else self._as_best(self.baseline)

    def _as_best(self, known_plan: _KnownPlan, settings: Sequence[_Setting] = ()) -> BestPlan:
        """A known plan with the result of a search; it is recorded as a candidate if ``settings`` are given.

        Args:
            known_plan: the plan.
            settings: the settings of the sweep, whose problems are used again.
        """
        workload = known_plan.workload
        problem = next(
            (one.problem for one in settings if one.problem.workload == workload and len(one.counts) < 2), None
        )
        if problem is None:  # the stop came before its setting was priced
            problem = self._problem(workload.micro_batch, workload.recompute)
        choice = problem.choice(known_plan.strategies)
        cost = problem.table.evaluate(choice)
        status = Status.INTERRUPTED if self.stop.is_requested else Status.LIMIT_REACHED
        bound = 0.0
        if settings:
            settled = self._without(known_plan.setting)
            bound = 0.0 if settled is None else min(cost, settled.lower_bound)
            self._record(_Setting(problem, bound), str(status), bound, cost)
        result = Result(
            method=self.options.method,
            status=status,
            choice=choice,
            cost=cost,
            lower_bound=bound,
            memory_bytes=problem.table.peak_memory(choice),
            space_size=problem.table.space_size,
            evaluations=0,
            seconds=self.search_s,
            memory_limit_bytes=self.limit,
        )
        return BestPlan(problem, result, known_plan.name)

    def _settings(self) -> Iterator[_Setting]:
        """Every setting with its separable bound.

        Raises:
            UserError: no micro-batch divides.
        """
        fault, found = None, 0
        options = self.options
        for problem in self.books.problems(options, options.untied, options.summa, options.executor):
            if self.stop.is_requested:
                self._is_whole = False
                return
            if isinstance(problem, UserError):
                # Report the error of the first micro-batch, which has the most divisors, if no micro-batch is valid.
                fault = fault or problem
                continue
            with self._timed():
                bound = separable_bound(problem.layer_table, self.limit)
            found += 1
            yield _Setting(problem, bound)
            if problem.workload.recompute == "blocks":
                for counts in partial_recomputations(options, self.graph):
                    with self._timed():
                        yield self._partial_setting(problem.workload.micro_batch, counts)
        if not found and fault is not None:
            raise fault

    def _problem(self, micro_batch: int, recompute: str) -> Problem:
        """The search problem of a setting."""
        options, workload = self.options, base_workload(self.cluster, self.options, recompute)
        book = self.books.book(workload, options.untied, options.executor)
        return book.problem(workload.batch, micro_batch, options.objective, options.summa)

    def _partial_setting(self, micro_batch: int, counts: range, bound: float = -math.inf) -> _Setting:
        """The setting blocks:K for all numbers K of ``counts``, with its separable bound if that is above ``bound``."""
        problem = self._problem(micro_batch, first_blocks(counts[0]))
        if len(counts) > 1:
            least_memory = self._problem(micro_batch, first_blocks(counts[-1])).layer_table.memory
            problem = replace(problem, layer_table=replace(problem.layer_table, memory=least_memory))
        return _Setting(problem, max(bound, separable_bound(problem.layer_table, self.limit)), counts=counts)

    def _sharpened(self, setting: _Setting) -> tuple[_Setting, ...]:
        """The setting with its next bound, or its halves; nothing if it is settled."""
        counts, workload = setting.counts, setting.problem.workload
        if setting.bracket is not None and len(counts) > 1:
            half = len(counts) // 2
            with self._timed():
                halves = (counts[:half], counts[half:])
                return tuple(self._partial_setting(workload.micro_batch, part, setting.bound) for part in halves)
        if setting.bracket is not None:
            self._search(setting, setting.bracket)
            return ()
        inherited = self._free_bound(workload)
        if inherited > setting.bound:
            return (replace(setting, bound=inherited),)
        table = setting.problem.table
        with self._timed():
            known = bracket(table, self.limit, self.cutoff, self.stop)
        self.free[workload.micro_batch, workload.recompute] = known.free
        if known.choice is not None and known.cost < self.cutoff:
            self._offer(self._fitted(setting, known.choice), known.choice)
        return (replace(setting, bound=max(setting.bound, known.bound), bracket=known),)

    def _fitted(self, setting: _Setting, choice: tuple[int, ...]) -> Problem:
        """The problem of a setting in which a choice fits: of several numbers of recomputed blocks the least."""
        counts, micro_batch = setting.counts, setting.problem.workload.micro_batch
        if len(counts) < 2:
            return setting.problem

        def problem_of(count: int) -> Problem:
            return self._problem(micro_batch, first_blocks(count))

        def fits(count: int) -> bool:
            return problem_of(count).layer_table.peak_memory(choice) <= self.limit

        return problem_of(least_fitting(counts, fits))

    def _offer(self, problem: Problem, choice: tuple[int, ...]) -> None:
        """Keep a plan that fits, if it is the best one so far."""
        cost = problem.table.evaluate(choice)
        if self.known_plan is None or cost < self.known_plan.cost:
            self.known_plan = _KnownPlan(cost, problem.workload, problem.strategies(choice))
            self.cutoff = min(self.cutoff, _just_above(cost))

    def _free_bound(self, workload: Workload) -> float:
        """A lower bound without the memory limit, from the bounds of other settings."""
        size = workload.micro_batch
        return max(
            (
                free
                for (micro_batch, recompute), free in self.free.items()
                if repeats_no_more(recompute, workload.recompute)
                and (micro_batch == size or (micro_batch % size == 0 and self.books.grows_from(micro_batch, size)))
            ),
            default=-math.inf,
        )

    def _search(self, setting: _Setting, known: Bracket) -> None:
        options, problem = self.options, setting.problem
        with self._timed(), progress_bar(options.method, disable=True if options.quiet else None) as progress:
            result = solve(
                problem.table,
                method=options.method,
                memory_limit=self.limit,
                seed=options.seed,
                temperature=options.temperature_s,
                evaluations=options.evaluations,
                time_limit=DEFAULT_TIME_LIMIT_S if options.time_limit_s is None else options.time_limit_s,
                cutoff=self.cutoff,
                progress=progress,
                known=known,
                stop=self.stop,
            )
        # Exact does not count minimisers of relaxations; if one of these is the optimum, its count is 0.
        self.evaluations += max(result.evaluations, int(result.choice is not None))
        lower = max(setting.bound, result.lower_bound)
        if lower == math.inf:
            self._record(setting, NOT_FITTING, math.inf)
        elif result.choice is None:
            self._record(setting, NOT_BETTER if lower >= self.cutoff else str(result.status), lower)
        else:
            self._record(setting, str(result.status), lower, result.cost)
            if self.best is None or result.cost < self.best.result.cost:
                self.best = BestPlan(problem, result)
                self.cutoff = min(self.cutoff, result.cost)

    def _record(self, setting: _Setting, outcome: str, bound: float, cost: float = math.inf) -> None:
        micro_batch = setting.problem.workload.micro_batch
        self.candidates.append(Candidate(micro_batch, setting.recompute, outcome, cost, bound))

    def _without(self, setting: tuple[int, str]) -> Candidate | None:
        """Take a setting out of the candidates, and return how it was settled; None if it is not among them.

        If it was settled together with others, these stay candidates.
        """
        micro_batch, recompute = setting
        for number, one in enumerate(self.candidates):
            if one.micro_batch == micro_batch and contains(one.recompute, recompute):
                rest = [replace(one, recompute=way) for way in without(one.recompute, recompute)]
                self.candidates[number : number + 1] = rest
                return one
        return None

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the duration of the context to ``search_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.search_s += time.perf_counter() - start

    def _failure(self, problems: list[Problem]) -> UserError:
        """The error that says why there is no plan.

        Raises:
            StopRequestedError: the stop was requested before the reason was known.
        """
        self.stop.check()
        if any(candidate.lower_bound < math.inf for candidate in self.candidates):
            return NothingFoundError(
                f"the {self.options.method} search found no plan of {self.graph.name} that fits {format_bytes(self.limit)} per "
                "device before it reached its limit; use method='exact', or raise the limit"
            )
        least = smallest_limit(problems, self.stop)
        return InfeasibleError(
            f"no plan of {self.graph.name} fits {format_bytes(self.limit)} per device on {self.cluster.num_devices} devices; "
            f"the smallest memory that would do is {format_memory_limit(least)}",
            least,
        )
