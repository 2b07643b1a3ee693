"""Strategies of a model to run on ranks: the optimum, the baselines, and others spread over the range of predicted costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import Problem
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search import solve
from autoddl.search.baselines import baselines

__all__ = ["RankedStrategy", "spread_strategies"]

#: Number of random assignments to choose from.
_DRAWN = 4000
#: Largest space that is enumerated instead.
_ENUMERATED = 4096


@dataclass(frozen=True)
class RankedStrategy:
    """A strategy for every layer, and the prediction of the cost model for one training step.

    Attributes:
        name: for tables.
        strategies: the strategy of each layer, by name.
        communication_s, step_s: predicted seconds of communication and of the whole step.
    """

    name: str
    strategies: Mapping[str, Strategy]
    communication_s: float
    step_s: float


def spread_strategies(
    graph: LayerGraph, cluster: Cluster, workload: Workload, count: int, seed: int = 0
) -> list[RankedStrategy]:
    """The optimum, the baselines that divide the model, and others.

    The predicted communication times of the others are spread evenly on a logarithmic scale.

    Args:
        graph, cluster, workload: what the strategies are for.
        count: number of strategies; fewer are returned if there are not so many.
        seed: of the random assignments.

    Raises:
        UserError: no assignment is possible on the cluster's devices, or ``count`` is less than 2.
    """
    if count < 2:
        raise UserError(f"{count} strategies cannot be ranked; it takes at least 2")
    problem = PriceBook(graph, cluster, workload, untied=True).problem(
        workload.batch, workload.micro_batch, "communication"
    )
    named: dict[tuple[int, ...], str] = {}
    step = PriceBook(graph, cluster, workload, untied=True).problem(workload.batch, workload.micro_batch, "step")
    for what, instance in (("least communication", problem), ("fastest step", step)):
        choice = solve(instance.table, method="exact", time_limit=30.0).choice
        if choice is not None:
            named.setdefault(tuple(choice), what)
    for baseline in baselines(graph, cluster.level_sizes):
        try:
            choice = problem.choice(baseline.strategies)
        except UserError:
            continue  # it does not divide this model
        named.setdefault(choice, f"{baseline.name} {baseline.mesh}")
    choices = _choices(problem, seed)
    if not choices:
        raise UserError(f"{graph.name} has no plan of finite cost on {cluster.num_devices} devices")
    kept = [choice for choice in named if math.isfinite(problem.table.evaluate(choice))]
    others = [choice for choice in choices if choice not in named]
    kept += _spread(others, np.array([problem.table.evaluate(c) for c in others]), count - len(kept))
    result = []
    for number, choice in enumerate(kept):
        strategies = problem.strategies(choice)
        assessment = assess(graph, cluster, workload, strategies)
        name = named.get(choice, f"strategy {number}")
        result.append(RankedStrategy(name, strategies, assessment.communication_s, assessment.step_s))
    return result


def _choices(problem: Problem, seed: int) -> list[tuple[int, ...]]:
    """All assignments, or random ones of a large space; assignments of infinite cost are left out."""
    table = problem.table
    sizes = [len(costs) for costs in table.cost]
    if table.space_size <= _ENUMERATED:
        found = [tuple(map(int, index)) for index in np.ndindex(*sizes)]
    else:
        rng = np.random.default_rng(seed)
        found = []
        for _ in range(_DRAWN):
            # Most layers share one layout: independent random layouts would cost more than any plan worth comparing.
            found.append(_random_choice(problem, sizes, rng))
        found = list(dict.fromkeys(found))
    return [choice for choice in found if math.isfinite(table.evaluate(choice))]


def _random_choice(problem: Problem, sizes: list[int], rng: np.random.Generator) -> tuple[int, ...]:
    """One layout (p0, s) for all layers that can have it, except that each layer is random with a random probability."""
    layouts = [
        [variable.strategy(variable.layers[0], option).rows_and_features for option in range(size)]
        for variable, size in zip(problem.variables, sizes)
    ]
    everything = sorted({layout for own in layouts for layout in own})
    common = everything[rng.integers(len(everything))]
    own_way = rng.random() ** 2
    choice = []
    for own in layouts:
        fitting = [i for i, layout in enumerate(own) if layout == common]
        if not fitting or rng.random() < own_way:
            choice.append(int(rng.integers(len(own))))
        else:
            choice.append(fitting[rng.integers(len(fitting))])
    return tuple(choice)


def _spread(choices: list[tuple[int, ...]], costs: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """``count`` of the choices, whose costs are spread as evenly as possible on a logarithmic scale."""
    if count <= 0:
        return []
    if len(choices) <= count:
        return choices
    # A choice without communication has no logarithm.
    logs = np.log(np.maximum(costs, 1e-9))
    free = np.ones(len(choices), dtype=bool)
    kept = []
    for target in np.linspace(logs.min(), logs.max(), count):
        distance = np.where(free, np.abs(logs - target), np.inf)
        i = int(np.argmin(distance))
        free[i] = False
        kept.append(choices[i])
    return kept
