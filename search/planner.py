"""The planner: the best plan of a layer graph on a cluster, with a lower bound and baselines.

It sweeps over micro-batches and recomputation (:mod:`.sweep`), searches the strategies of all layers for each
(:func:`autoddl.search.solve`), and verifies the best plan against the layer graph (:mod:`.verify`).

When a stop is requested (:mod:`autoddl.costmodel.stopping`), the remaining settings keep their best known bounds, and the plan is
the best choice found so far by a search, a bracket or a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.costmodel.assessment import Assessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from . import Result, Status
from .comparison import BaselineFigures, baseline_figures
from .options import Options, memory_limit_of
from .sweep import SAME, Candidate, InfeasibleError, PriceBooks, Sweep
from .verify import Claim, verify

__all__ = ["BaselineFigures", "Candidate", "InfeasibleError", "Options", "Planned", "end_of", "make_plan"]


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
        if not self.options.summa:
            by = f" (the step of summa is {_percent(faster['summa'])} faster)" if "summa" in faster else ""
            said.append(f"Summa meshes are left out, summa=True includes them{by}")
        others = {name: by for name, by in faster.items() if name != "summa" or self.options.summa}
        if others and self.options.objective == "communication":
            name = max(others, key=others.__getitem__)
            said.append(f"the step of {name} is {_percent(others[name])} faster: leave out objective='communication'")
        return "; ".join(said)


def _percent(part: float) -> str:
    return f"{part:.1%}" if part >= 5e-4 else "less than 0.1%"


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
) -> Planned:
    """Find the best plan that the options allow, and verify it against the layer graph.

    The plan is never worse than a baseline of the same search space.

    Args:
        graph: the model.
        cluster: the machine.
        options: batch, method, limits and what else the user chose.
        with_baselines: whether to price the baselines, for comparison and as the first plan of the search.
        stop: when it is requested, the best plan so far is returned, with a valid bound.  Ctrl-C does not request it: without a
            handler, it raises `KeyboardInterrupt`, and there is no plan.
        known: figures of the baselines, if another call with the same options (but for the method) has computed them already.

    Raises:
        StopRequestedError: the stop was requested before any plan was known.
        InfeasibleError: nothing fits the memory limit.
        UserError: an option is out of range, or a layer does not divide over the cluster.
    """
    stop, limit = stop or Stop(), memory_limit_of(cluster, options)
    books = PriceBooks(graph, cluster)
    figures = tuple(known)
    if with_baselines and not figures:
        figures = tuple(baseline_figures(graph, cluster, books.problems(options, untied=False), limit, stop))
    sweep = Sweep(books, options, limit, figures, stop)
    best = sweep.run()
    choice = best.result.choice
    assert choice is not None
    strategies = best.problem.strategies(choice)
    lower = sweep.lower_bound
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
        # The same sum in another order may differ in its last digit: a bound is never above the figure that is printed.
        lower_bound=min(lower, best.result.cost, assessment.cost(options.objective)),
        optimal=optimal,
        strategies=strategies,
        assessment=assessment,
        candidates=tuple(sweep.candidates),
        baselines=figures,
        evaluations=sweep.evaluations,
        search_s=sweep.search_s,
        is_interrupted=stop.is_requested,
        taken_from=best.taken_from,
    )
