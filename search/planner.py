"""The planner: the best plan of a layer graph on a cluster, with a lower bound and baselines.

It sweeps over micro-batches and recomputation (:mod:`.sweep`), searches the strategies of all layers for each
(:func:`autoddl.search.solve`), and verifies the best plan against the layer graph (:mod:`.verify`).

When a stop is requested (:mod:`autoddl.costmodel.stopping`), the remaining settings keep their best known bounds, and the plan is
the best choice found so far by a search, a bracket or a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.assessment import Assessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, LEFT_OUT, families_of
from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_percent
from autoddl.costmodel.workload import Workload

from . import Result, Status
from .comparison import BaselineFigures, baseline_figures
from .executorcost import AllStrategies, best_of_all_strategies, executor_note, infeasible_for_executor
from .options import Options, memory_limit_of
from .overlapped import Found, best_overlapped
from .pricebooks import PriceBooks
from .sweep import (
    NOT_BETTER,
    SAME,
    BestPlan,
    Candidate,
    InfeasibleError,
    NothingFoundError,
    StartPlan,
    Sweep,
    is_offered,
)
from .verify import Claim, verify

__all__ = [
    "BaselineFigures",
    "Candidate",
    "InfeasibleError",
    "NothingFoundError",
    "Options",
    "Planned",
    "StartPlan",
    "end_of",
    "make_plan",
]


@dataclass(frozen=True)
class Planned:
    """The best plan that was found, with its certificate.

    Attributes:
        graph, cluster, options: the arguments of :func:`make_plan`.
        workload: batch, the chosen micro-batch and recomputation, precision and optimizer.
        memory_limit_bytes: the memory limit per device.
        result: the result of the search at the chosen setting.
        lower_bound: a lower bound [s] on the cost of the plans of all settings.
        optimal: whether the bound proves that no plan of any setting is better.
        strategies: the strategy of each layer, by name.
        assessment: time, bytes and memory of the plan and of each layer, recomputed by the verifier.
        candidates: how each setting was settled.
        baselines: the baselines' figures, for comparison.
        evaluations: number of assignments that the searches evaluated.
        search_s: duration of all searches.
        is_interrupted: whether a stop was requested, so that settings may have been left out.
        taken_from: name of the baseline whose plan this is, if no search found a better one; else empty.
        notes: remarks for the reader, in addition to those of the graph.
        start_fault: why the plan of the user, which the search was to start from, is not in the space; empty if it is.
        all_strategies: the best plan of all strategies, if the options restrict them to those of an executor; None if they do not,
            or if the search was interrupted before.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    options: Options
    memory_limit_bytes: float
    result: Result
    lower_bound: float
    optimal: bool
    strategies: dict[str, Strategy]
    assessment: Assessment
    candidates: tuple[Candidate, ...]
    baselines: tuple[BaselineFigures, ...]
    evaluations: int
    search_s: float
    is_interrupted: bool = False
    taken_from: str = ""
    notes: tuple[str, ...] = ()
    start_fault: str = ""
    all_strategies: AllStrategies | None = None

    @property
    def cost(self) -> float:
        """The value of the objective [s per step]."""
        return self.assessment.cost(self.options.objective)

    @property
    def status(self) -> str:
        """How the search ended, as its document says it."""
        return str(end_of(self.optimal, self.is_interrupted))

    @property
    def gap(self) -> float:
        """How much better another plan could be at most, relative to the cost of this one."""
        return 0.0 if self.optimal else max(0.0, (self.cost - self.lower_bound) / self.cost)

    @property
    def left_out(self) -> str:
        """Which faster plans the options excluded, and the option that includes them; empty if there are none."""
        said = []
        faster = {
            one.name: self.assessment.step_s / one.assessment.step_s - 1
            for one in self.baselines
            if one.assessment is not None and one.assessment.step_s < self.assessment.step_s * (1 - SAME)
        }
        if self.options.executor != EAGER:
            said.append(f"left out are {LEFT_OUT}")
            # What the executor costs against plans that it cannot execute is said by a note.
            strategies = {one.name: one.strategies for one in self.baselines}
            faster = {
                name: by for name, by in faster.items() if is_offered(name, strategies[name], self.graph, self.options)
            }
        elif not self.options.summa:
            by = f" (the step of summa is {format_percent(faster['summa'])} faster)" if "summa" in faster else ""
            said.append(f"Summa meshes are left out, summa=True includes them{by}")
        others = {name: by for name, by in faster.items() if name != "summa" or self.options.summa}
        if others and self.options.objective == "communication":
            name = max(others, key=others.__getitem__)
            said.append(
                f"the step of {name} is {format_percent(others[name])} faster: leave out objective='communication'"
            )
        return "; ".join(said)


def end_of(optimal: bool, is_interrupted: bool) -> Status:
    """The status of a whole sweep: a plan that was proven optimal before an interrupt is optimal."""
    return Status.OPTIMAL if optimal else Status.INTERRUPTED if is_interrupted else Status.LIMIT_REACHED


def make_plan(
    graph: LayerGraph,
    cluster: Cluster,
    options: Options,
    with_baselines: bool = True,
    stop: Stop | None = None,
    known: Sequence[BaselineFigures] = (),
    start: StartPlan | None = None,
    rival: float = math.inf,
) -> Planned:
    """Find the best plan that the options allow, and verify it against the layer graph.

    The plan is never worse than a baseline of the same search space, nor than ``start``, if that is in the space.

    Args:
        graph: the model.
        cluster: the machine.
        options: batch, method, limits and what else the user chose.
        with_baselines: whether to price the baselines, for comparison and as the first plan of the search.
        stop: when it is requested, the best plan so far is returned, with a valid bound.  Ctrl-C does not request it: without a
            handler, it raises `KeyboardInterrupt`, and there is no plan.
        known: figures of the baselines, if another call with the same options (but for the method) has computed them already.
            That call has also found out what the executor costs, which is then not repeated.
        start: a plan of the user, which is the first incumbent if it is in the space.
        rival: cost of a plan outside the space: the search ends when none of the space can cost less.

    Raises:
        StopRequestedError: the stop was requested before any plan was known.
        InfeasibleError: nothing fits the memory limit.
        NothingFoundError: nothing was found before it was known that nothing costs less than ``rival``.
        UserError: an option is out of range, or a layer does not divide over the cluster.
    """
    stop, limit = stop or Stop(), memory_limit_of(cluster, options)
    books = PriceBooks(graph, cluster, choices=options.choices)
    figures = tuple(known)
    if with_baselines and not figures:
        figures = tuple(baseline_figures(books, options, limit, stop))
    is_restricted = options.executor != EAGER
    find = _Search(books, limit, figures, stop, rival if options.overlap == "none" else math.inf)
    try:
        found = find(options, start=start)
    except InfeasibleError as error:
        if not is_restricted:
            raise
        raise infeasible_for_executor(error, books, options, limit, stop) from None
    best, lower, choice = found.best, found.lower_bound, found.best.result.choice
    assert choice is not None
    strategies = best.problem.strategies(choice)
    optimal = lower >= best.result.cost * (1 - 1e-9)
    assessment = _verified(books, best, strategies, options, limit, optimal)
    cost, is_compared = assessment.cost(options.objective), is_restricted and not known
    everything = None
    if is_compared:
        all_books = PriceBooks(graph, cluster, choices=replace(options, executor=EAGER).choices)
        everything = best_of_all_strategies(_Search(all_books, limit, figures, stop), options, best, stop)
    return Planned(
        graph=graph,
        cluster=cluster,
        workload=best.problem.workload,
        options=options,
        memory_limit_bytes=limit,
        result=best.result,
        # The same sum in another order may differ in its last digit: a bound is never above the figure that is printed.
        lower_bound=min(lower, best.result.cost, cost),
        optimal=optimal,
        strategies=strategies,
        assessment=assessment,
        candidates=found.candidates,
        baselines=figures,
        evaluations=found.evaluations,
        search_s=found.search_s,
        is_interrupted=stop.is_requested,
        taken_from=best.taken_from,
        notes=(executor_note(options, cost, optimal, everything),) if is_compared else (),
        start_fault=found.start_fault,
        all_strategies=everything,
    )


def _verified(
    books: PriceBooks,
    best: BestPlan,
    strategies: Mapping[str, Strategy],
    options: Options,
    limit: float,
    optimal: bool,
) -> Assessment:
    """The figures of a plan that was found, after what the search says of it was verified against the layer graph.

    Args:
        books: the price books of the model on the cluster.
        best: the plan at its setting.
        strategies: the strategy of each layer, by name.
        options: what was searched.
        limit: memory per device [bytes].
        optimal: whether no plan of any setting is better.
    """
    claim = Claim(
        strategies=strategies,
        cost=best.result.cost,
        lower_bound=best.result.cost if optimal else best.result.lower_bound,
        memory_bytes=best.result.memory_bytes,
        optimal=optimal,
        memory_limit_bytes=limit,
        objective=options.objective,
        untied=options.untied,
        summa=options.summa,
        executor=options.executor,
        choices=options.choices,
    )
    return verify(books.graph, books.cluster, best.problem.workload, claim, single_changes=False)


@dataclass(frozen=True)
class _Search:
    """Searches of one model on one cluster, called with different options.

    Attributes:
        books: the price books.
        limit: memory per device [bytes].
        figures: figures of the baselines.
        stop: ends the searches early.
        rival: cost of a plan outside the space, as for :class:`.sweep.Sweep`.
    """

    books: PriceBooks
    limit: float
    figures: Sequence[BaselineFigures]
    stop: Stop
    rival: float = math.inf

    def __call__(self, options: Options, known: BestPlan | None = None, start: StartPlan | None = None) -> Found:
        """Sweep over all settings, several times if all-reduces overlap the backward pass (:mod:`.overlapped`).

        Args:
            options: what to search.
            known, start: plans in the space, as for :class:`.sweep.Sweep`.

        Raises:
            StopRequestedError: the stop was requested before any plan was known.
            InfeasibleError: nothing fits the memory limit.
            UserError: a layer has no strategy in any family.
        """

        def sweep(books: PriceBooks) -> Found:
            return self._over_families(books, options, known, start)

        if options.overlap == "none":
            return sweep(self.books)
        return best_overlapped(self.books.graph, self.books.cluster, options, sweep)

    def _over_families(
        self, books: PriceBooks, options: Options, known: BestPlan | None, start: StartPlan | None
    ) -> Found:
        """Sweep every family of meshes of the executor; an eager one has a single family."""
        families = families_of(options.executor, books.cluster.num_devices)
        sweeps, found, faults = list[Sweep](), list[BestPlan](), list[UserError]()
        for executor in families:
            if self.stop.is_requested and found:
                break
            own = replace(options, executor=executor)
            sweep = Sweep(books, own, self.limit, self.figures, self.stop, known, start, self.rival)
            try:
                found.append(sweep.run())
                sweeps.append(sweep)
            except UserError as fault:
                faults.append(fault)
            except StopRequestedError:
                if not found:
                    raise
                break
        if not found:
            infeasible = [fault for fault in faults if isinstance(fault, InfeasibleError)]
            raise min(infeasible, key=lambda fault: fault.least_bytes) if infeasible else faults[0]
        is_whole = len(found) + len(faults) == len(families)
        lower = min(sweep.lower_bound for sweep in sweeps) if is_whole else 0.0
        best = min(found, key=lambda one: one.result.cost)
        if len(families) > 1:
            workload = best.problem.workload
            size = sum(books.space_size(workload, options.untied, executor) for executor in families)
            best = replace(best, result=replace(best.result, space_size=size))
        others = [sweep.plan_of_baseline() for sweep in sweeps] if options.overlap != "none" else []
        return Found(
            best=best,
            others=tuple(plan for plan in others if plan is not None),
            lower_bound=lower,
            candidates=_joined_candidates(sweeps),
            # With several families of meshes, it is in the space if it is in one of them.
            start_fault=min((sweep.start_fault for sweep in sweeps), key=bool),
            evaluations=sum(sweep.evaluations for sweep in sweeps),
            search_s=sum(sweep.search_s for sweep in sweeps),
        )


def _joined_candidates(sweeps: Sequence[Sweep]) -> tuple[Candidate, ...]:
    """The settings of all sweeps: of each setting the cheapest plan, or the bound of a family in which it was not searched."""
    by_setting: dict[tuple[int, str], list[Candidate]] = {}
    for candidate in (one for sweep in sweeps for one in sweep.candidates):
        by_setting.setdefault((candidate.micro_batch, candidate.recompute), []).append(candidate)
    joined = []
    for candidates in by_setting.values():
        cheapest = min(candidates, key=lambda one: one.cost)
        loosest = min(candidates, key=lambda one: one.lower_bound)
        if loosest.outcome == NOT_BETTER and loosest.lower_bound < cheapest.cost * (1 - SAME):
            joined.append(loosest)
        else:
            joined.append(replace(cheapest, lower_bound=loosest.lower_bound))
    return tuple(joined)
