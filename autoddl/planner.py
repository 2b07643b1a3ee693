"""The planner: from a layer graph and a cluster to the best plan, its certificate and its baselines.

Besides the strategies it chooses the micro-batch (any divisor of the batch) and whether to recompute, where these are not given.
The sweep over them is exact: for every candidate a lower bound on its cost is known before it is searched, because more
micro-batches, and recomputation, never make anything cheaper but memory.

    cost of (M, recompute) at strategies x  =  M fixed(x) + batch slope(x) + once(x),     fixed >= 0

and a micro-batch that divides another one offers a subset of its strategies (but 4 does not divide 6: p0 = 4 is possible for 4
samples, not for 6).  So without the memory limit the optimum grows from a micro-batch to its divisors.  A candidate whose optimum
without the limit is not below the best plan so far is settled without a search, and all that divide it with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook, Problem
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes
from autoddl.costmodel.workload import Workload
from autoddl.search import METHODS, Result, Status, lower_bound, progress_bar, solve
from autoddl.search.baselines import BASELINES, Baseline, baselines
from autoddl.search.verify import Claim, verify

__all__ = ["BaselineFigures", "Candidate", "InfeasibleError", "Options", "Planned", "make_plan"]

#: Samples per device and step where no batch is given.
DEFAULT_BATCH_PER_DEVICE = 8
#: The part of a device's memory that a plan may fill where no limit is given.
USABLE_MEMORY = 0.9


class InfeasibleError(UserError):
    """No plan fits the memory of the devices; the message gives the smallest memory that would do."""


@dataclass(frozen=True)
class Options:
    """What the user asks of the planner.

    Attributes:
        batch: samples per step over all devices; 8 per device where it is None.
        micro_batch: samples per pass over all devices; chosen where it is None.
        method: the search, one of ``autoddl.search.METHODS``.
        objective: ``step`` or ``communication``.
        memory_limit_bytes: per device; 9/10 of the device's memory where it is None: the rest is left to the framework, its
            kernels' workspaces and fragmentation.
        precision: of the cluster's device; its default where it is None.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        recompute: always (True), never (False), or whatever is better (None).
        untied: a choice of its own for every repetition of a block.
        summa: offer Summa meshes to linear layers.
        seed: of the random methods.
        evaluations, time_limit_s: budgets of one search; the method's own where they are None.
        quiet: no progress bar.
    """

    batch: int | None = None
    micro_batch: int | None = None
    method: str = "exact"
    objective: str = "step"
    memory_limit_bytes: float | None = None
    precision: str | None = None
    optimizer: str = "adam"
    recompute: bool | None = None
    untied: bool = False
    summa: bool = False
    seed: int = 0
    evaluations: int | None = None
    time_limit_s: float | None = None
    quiet: bool = True


@dataclass(frozen=True)
class Candidate:
    """One micro-batch size with or without recomputation, and how it was settled."""

    micro_batch: int
    recompute: bool
    outcome: str
    cost: float
    lower_bound: float


@dataclass(frozen=True)
class BaselineFigures:
    """The best member of a baseline's family, or why none is feasible."""

    name: str
    infeasible: str | None = None
    mesh: str = ""
    workload: Workload | None = None
    strategies: dict[str, Strategy] = field(default_factory=dict)
    assessment: Assessment | None = None


@dataclass(frozen=True)
class Planned:
    """The planner's answer.

    ``result`` is the search's at the chosen micro-batch; ``lower_bound`` and ``optimal`` speak of the whole sweep.
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

    @property
    def cost(self) -> float:
        """What was minimised, in seconds per step."""
        return self.assessment.cost(self.options.objective)

    @property
    def gap(self) -> float:
        """How much better another plan could be at most, relative to this one."""
        return 0.0 if self.optimal else max(0.0, (self.cost - self.lower_bound) / self.cost)


def make_plan(graph: LayerGraph, cluster: Cluster, options: Options, with_baselines: bool = True) -> Planned:
    """The best plan that the options allow, verified against the layer graph.

    Raises:
        InfeasibleError: nothing fits the memory limit.
        UserError: an option is out of range, or a layer does not divide over the cluster.
    """
    if options.method not in METHODS:
        raise UserError(f"method {options.method!r} is not one of {', '.join(METHODS)}")
    limit = options.memory_limit_bytes
    if limit is None:
        limit = USABLE_MEMORY * cluster.device.memory_bytes
    if options.time_limit_s is not None and not 0 < options.time_limit_s < math.inf:
        raise UserError(f"time limit {options.time_limit_s:g} should be a finite number of more than 0 s")
    if options.evaluations is not None and options.evaluations < 1:
        raise UserError(f"evaluations {options.evaluations} should be at least 1")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"seed {options.seed} should be a whole number of at least 0 and less than 2^63")
    if not 0 < limit < math.inf:
        raise UserError(f"memory limit {limit:g} should be a finite number of more than 0 bytes")
    sweep = _Sweep(graph, cluster, options, limit)
    best = sweep.run()
    choice = best.result.choice
    assert choice is not None
    strategies = best.problem.strategies(choice)
    lower = min(candidate.lower_bound for candidate in sweep.candidates)
    optimal = lower >= best.result.cost * (1 - 1e-9)
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
    )
    assessment = verify(graph, cluster, best.problem.workload, claim, single_changes=False)
    return Planned(
        graph=graph,
        cluster=cluster,
        workload=best.problem.workload,
        options=options,
        memory_limit_bytes=limit,
        result=best.result,
        lower_bound=min(lower, best.result.cost),
        optimal=optimal,
        strategies=strategies,
        assessment=assessment,
        candidates=tuple(sweep.candidates),
        baselines=tuple(_baseline_figures(graph, cluster, options, limit)) if with_baselines else (),
        evaluations=sweep.evaluations,
        search_s=sweep.search_s,
    )


@dataclass(frozen=True)
class _Found:
    problem: Problem
    result: Result


class _Sweep:
    """The search over micro-batches and recomputation (see the module's docstring)."""

    def __init__(self, graph: LayerGraph, cluster: Cluster, options: Options, limit: float):
        self.graph, self.cluster, self.options, self.limit = graph, cluster, options, limit
        self.candidates: list[Candidate] = []
        self.best: _Found | None = None
        self.smallest_memory = math.inf
        self.evaluations = 0
        self.search_s = 0.0
        self.fault: UserError | None = None

    def run(self) -> _Found:
        """Settle every candidate; the best plan."""
        for recompute in (False, True) if self.options.recompute is None else (self.options.recompute,):
            workload = base_workload(self.cluster, self.options, recompute)
            book = PriceBook(self.graph, self.cluster, workload, self.options.untied, self.options.summa)
            settled: list[int] = []
            for micro_batch in micro_batches(workload, self.options):
                if any(larger % micro_batch == 0 for larger in settled):
                    continue
                if not self._settle(book, workload.batch, micro_batch, recompute):
                    settled.append(micro_batch)
        if self.best is not None:
            return self.best
        if not self.candidates and self.fault is not None:
            raise self.fault
        if any(candidate.lower_bound < math.inf for candidate in self.candidates):
            raise UserError(
                f"the {self.options.method} search found no plan of {self.graph.name} that fits {format_bytes(self.limit)} per "
                "device before it reached its limit; use --method exact, or raise the limit"
            )
        raise InfeasibleError(
            f"no plan of {self.graph.name} fits {format_bytes(self.limit)} per device on {self.cluster.num_devices} devices; "
            f"the smallest memory that would do is {format_bytes(self.smallest_memory)} "
            f"({self.smallest_memory / 2**30:.4g} GiB)"
        )

    def _settle(self, book: PriceBook, batch: int, micro_batch: int, recompute: bool) -> bool:
        """Search one candidate; False where none whose micro-batch divides this one can be better."""
        try:
            problem = book.problem(batch, micro_batch, self.options.objective)
        except UserError as fault:
            # Kept for the case that no micro-batch divides: the first one, which divides the most.
            self.fault = self.fault or fault
            return True
        start = time.perf_counter()
        incumbent = self.best.result.cost if self.best else math.inf
        bound = lower_bound(problem.table)
        if bound >= incumbent:
            self.search_s += time.perf_counter() - start
            self.candidates.append(
                Candidate(micro_batch, recompute, "cannot be better, nor can its divisors", math.inf, bound)
            )
            return False
        result = self._solve(problem)
        self.search_s += time.perf_counter() - start
        self.evaluations += result.evaluations
        self.candidates.append(Candidate(micro_batch, recompute, str(result.status), result.cost, result.lower_bound))
        if result.status is Status.INFEASIBLE:
            self.smallest_memory = min(self.smallest_memory, result.smallest_memory_bytes or math.inf)
        elif result.cost < incumbent:
            self.best = _Found(problem, result)
        # Where the limit does not bind, its divisors cost at least as much.
        return not (result.optimal and result.cost <= bound * (1 + 1e-12))

    def _solve(self, problem: Problem) -> Result:
        options = self.options
        with progress_bar(options.method, disable=True if options.quiet else None) as progress:
            return solve(
                problem.table,
                method=options.method,
                memory_limit=self.limit,
                seed=options.seed,
                evaluations=options.evaluations,
                time_limit=options.time_limit_s,
                progress=progress,
            )


def base_workload(cluster: Cluster, options: Options, recompute: bool) -> Workload:
    """The workload that the options ask for, as one micro-batch of the whole batch."""
    batch = DEFAULT_BATCH_PER_DEVICE * cluster.num_devices if options.batch is None else options.batch
    precision = options.precision or cluster.default_precision
    return Workload(batch, batch, precision, options.optimizer, recompute)


def micro_batches(workload: Workload, options: Options) -> Iterator[int]:
    """The micro-batches to consider, largest first."""
    if options.micro_batch is not None:
        yield replace(workload, micro_batch=options.micro_batch).micro_batch
        return
    small = [number for number in range(1, math.isqrt(workload.batch) + 1) if workload.batch % number == 0]
    yield from (workload.batch // number for number in small)
    yield from (number for number in reversed(small) if number * number < workload.batch)


def _baseline_figures(graph: LayerGraph, cluster: Cluster, options: Options, limit: float) -> Iterator[BaselineFigures]:
    """The best feasible member of every family over micro-batches and recomputation."""
    problems = list(_tied_problems(graph, cluster, options))
    members = list(baselines(graph, cluster.level_sizes))
    for name in BASELINES:
        best: tuple[float, Baseline, Problem] | None = None
        why = "no mesh of this shape on these devices"
        least = math.inf
        for member in (member for member in members if member.name == name):
            for problem in problems:
                try:
                    choice = problem.choice(lambda layer, member=member: member.strategies[layer.name])  # type: ignore[misc]
                except UserError as fault:
                    if least == math.inf:
                        why = str(fault)
                    continue
                memory = problem.table.peak_memory(choice)
                cost = problem.table.evaluate(choice)
                if memory > limit:
                    if memory < least:
                        least = memory
                        why = f"needs {format_bytes(memory)} per device, over the limit of {format_bytes(limit)}"
                elif math.isfinite(cost) and (best is None or cost < best[0]):
                    best = (cost, member, problem)
        if best is None:
            yield BaselineFigures(name, infeasible=why)
            continue
        _, member, problem = best

        assessment = assess(graph, cluster, problem.workload, member.strategies)
        yield BaselineFigures(name, None, member.mesh, problem.workload, member.strategies, assessment)


def _tied_problems(graph: LayerGraph, cluster: Cluster, options: Options) -> Iterator[Problem]:
    for recompute in (False, True) if options.recompute is None else (options.recompute,):
        workload = base_workload(cluster, options, recompute)
        book = PriceBook(graph, cluster, workload, summa=True)
        for micro_batch in micro_batches(workload, options):
            try:
                yield book.problem(workload.batch, micro_batch, options.objective)
            except UserError:
                continue
