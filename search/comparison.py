"""The best member of each baseline over micro-batches and recomputation, for comparison with a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.problem import Problem
from autoddl.costmodel.recomputation import least_fitting
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes
from autoddl.costmodel.workload import Workload

from .baselines import Baseline, baselines, family_names
from .options import Options, partial_recomputations
from .pricebooks import PriceBooks

__all__ = ["BaselineFigures", "baseline_figures"]

#: Why a family has no plan after a stop.
_INTERRUPTED = "the search was interrupted before it was looked at"


@dataclass(frozen=True)
class BaselineFigures:
    """The best member of a baseline's family, or the reason why none is feasible.

    Attributes:
        name: of the family.
        infeasible: the reason; None if there is a feasible member.
        mesh: mesh of the best member as text.
        workload: its workload, with its micro-batch and recomputation.
        strategies: the strategy of each layer, by name.
        assessment: its cost.
    """

    name: str
    infeasible: str | None = None
    mesh: str = ""
    workload: Workload | None = None
    strategies: dict[str, Strategy] = field(default_factory=dict)
    assessment: Assessment | None = None


def baseline_figures(books: PriceBooks, options: Options, limit: float, stop: Stop) -> Iterator[BaselineFigures]:
    """The best feasible member of every family, among those examined before the stop.

    Args:
        books: the price books of the model on the cluster.
        options: what may be chosen: micro-batches and recomputation. Layers are tied, and Summa meshes are offered.
        limit: memory per device [bytes].
        stop: ends the comparison early.
    """
    until = itertools.takewhile(lambda _: not stop.is_requested, books.problems(options, untied=False))
    problems = [problem for problem in until if isinstance(problem, Problem)]
    ranges = partial_recomputations(options, books.graph)
    members = list(baselines(books.graph, books.cluster.level_sizes, books.choices))
    for name in family_names(members):
        own = [member for member in members if member.name == name]
        yield _best_member(name, own, problems, partial(_fewest_blocks, books, ranges, limit), limit, stop)


def _fewest_blocks(
    books: PriceBooks, ranges: Sequence[range], limit: float, problem: Problem, choice: tuple[int, ...]
) -> Problem:
    """The problem with the fewest recomputed blocks in which a choice fits that fits if all blocks are recomputed."""

    def fits(count: int) -> bool:
        return books.with_blocks(problem, count).layer_table.peak_memory(choice) <= limit

    for counts in ranges:
        if fits(counts[-1]):
            return books.with_blocks(problem, least_fitting(counts, fits))
    return problem


def _best_member(
    name: str,
    members: list[Baseline],
    problems: list[Problem],
    with_fewest_blocks: Callable[[Problem, tuple[int, ...]], Problem],
    limit: float,
    stop: Stop,
) -> BaselineFigures:
    """The cheapest member of a family that fits, or the reason why none does."""
    why = "no mesh of this shape on these devices"
    least = math.inf
    fitting: list[tuple[float, int, Baseline, Problem]] = []
    for member, problem in itertools.product(members, problems):
        if stop.is_requested:
            why = _INTERRUPTED
            break
        try:
            choice = problem.choice(member.strategies)
        except UserError as fault:
            if least == math.inf:
                why = str(fault)
            continue
        memory = problem.layer_table.peak_memory(choice)
        if memory <= limit:
            if problem.workload.recompute == "blocks":
                problem = with_fewest_blocks(problem, choice)
            fitting.append((problem.layer_table.evaluate(choice), len(fitting), member, problem))
        elif memory < least:
            least = memory
            why = f"needs {format_bytes(memory)} per device, over the limit of {format_bytes(limit)}"
    best, cost = BaselineFigures(name, infeasible=why), math.inf
    # The cost of the layers alone is a lower bound, and tight for most members, which need no redistributions.
    for alone, _, member, problem in sorted(fitting, key=lambda one: one[:2]):
        if alone >= cost or (best.assessment is not None and stop.is_requested):
            break
        try:
            assessment = assess(problem.graph, problem.cluster, problem.workload, member.strategies)
        except UserError as fault:
            # No redistribution exists between the layouts of some layers.
            if best.assessment is None:
                best = BaselineFigures(name, infeasible=str(fault))
            continue
        if assessment.cost(problem.objective) < cost:
            cost = assessment.cost(problem.objective)
            best = BaselineFigures(name, None, member.mesh, problem.workload, member.strategies, assessment)
    return best
