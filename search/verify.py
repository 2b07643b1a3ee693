"""The verifier of search results.  It shares no code with the solvers and does not use their tables.

From the layer graph it recomputes cost and memory of the chosen strategies, and checks that

1. every layer has a strategy of the size of the cluster that divides the layer and the micro-batch, and that the executor can
   execute;
2. the recomputed cost and memory equal the claimed ones, and the memory is within the limit;
3. the lower bound is not above the cost; for a claim of optimality, it equals the cost, and is not below a simple bound;
4. no change of a single layer (of tied layers together) gives a plan within the limit that is cheaper than the lower bound.

The simple bound is computed independently: every layer has its cheapest strategy, and redistributions are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, are_one_family, executes, shared_positions, why_not_executable
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.costmodel.strategy import (
    PLAIN,
    Choices,
    Strategy,
    enumerate_strategies,
    fitting,
    transposed,
)
from autoddl.costmodel.strategygroup import StrategyGroup, group_strategies
from autoddl.costmodel.workload import Workload

__all__ = ["Claim", "VerificationError", "verify"]

#: Relative difference of sums of the same floats in different orders.
_TOLERANCE = 1e-9


class VerificationError(UserError):
    """A claim of a search does not hold; the message says which."""


@dataclass(frozen=True)
class Claim:
    """The claim of a search about its result.

    Attributes:
        strategies: the strategy of each layer, by name.
        cost, lower_bound: seconds per training step.
        memory_bytes: peak memory per device.
        optimal: whether the cost is claimed to be optimal.
        memory_limit_bytes: limit on peak memory; None for no limit.
        objective: ``step`` or ``communication``.
        untied: whether repetitions of a block may have different strategies.
        summa: whether linear layers may have Summa meshes.
        executor: what executes the plan; strategies that it cannot execute are not offered.
    """

    strategies: Mapping[str, Strategy]
    cost: float
    lower_bound: float
    memory_bytes: float
    optimal: bool
    memory_limit_bytes: float | None
    objective: str
    untied: bool = False
    summa: bool = False
    executor: str = EAGER
    choices: Choices = PLAIN


def verify(
    graph: LayerGraph, cluster: Cluster, workload: Workload, claim: Claim, single_changes: bool = True
) -> Assessment:
    """Check a claim (see the module's docstring), and return the recomputed cost.

    Args:
        graph, cluster, workload: what the claim is about.
        claim: the claim.
        single_changes: whether to make check 4, which computes the cost of every option of every layer; it is left out if
            all-reduces overlap the backward pass, since the cost is then no sum over layers.

    Raises:
        VerificationError: the claim does not hold.
    """
    assert claim.objective in OBJECTIVES
    truth = assess(graph, cluster, workload, claim.strategies)
    refused = why_not_executable(claim.executor, graph, claim.strategies)
    if refused:
        raise VerificationError(refused)
    cost = truth.cost(claim.objective)
    _agree("cost", claim.cost, cost, _TOLERANCE)
    # Solvers round every layer's memory up to whole bytes.
    _agree("memory", claim.memory_bytes, truth.memory_bytes, _TOLERANCE, 2 * len(graph.layers))
    limit = claim.memory_limit_bytes
    if limit is not None and not truth.memory_bytes <= limit:
        raise VerificationError(f"memory {truth.memory_bytes:.0f} bytes is over the limit of {limit:.0f}")
    if not claim.lower_bound <= cost * (1 + _TOLERANCE):
        raise VerificationError(f"lower bound {claim.lower_bound!r} is above the cost {cost!r}")
    if claim.optimal:
        _agree("bound of an optimal result", claim.lower_bound, cost, 2 * _TOLERANCE)
        floor = _simple_bound(graph, cluster, workload, claim)
        if claim.lower_bound < floor * (1 - _TOLERANCE):
            raise VerificationError(f"lower bound {claim.lower_bound!r} is below the simple bound {floor!r}")
    if single_changes and workload.overlap == "none":
        _check_single_changes(graph, cluster, workload, claim, truth)
    return truth


def _agree(what: str, claimed: float, true: float, relative: float, absolute: float = 0.0) -> None:
    if not math.isclose(claimed, true, rel_tol=relative, abs_tol=absolute):
        raise VerificationError(f"{what}: claimed {claimed!r}, recomputed {true!r}")


def _cost_of(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    name: str,
    strategy: Strategy | StrategyGroup,
    objective: str,
) -> Any:
    """Cost of one layer per training step [s], without redistributions; for a group of strategies an array.

    If all-reduces overlap the backward pass, this is a lower bound: it counts the last bucket of gradients.
    """
    place = graph.place(name, workload.recompute)
    work = layer_work(graph[name], strategy, workload, workload.micro_batch, place)
    communication = cluster.exposed_part(work) * sum(cluster.time(step) for step in (*work.forward, *work.backward))
    per_step = workload.exposed_gradient_part * sum(cluster.time(step) for step in work.gradient)
    if objective != "communication":
        works = work.forward_work, work.backward_work
        communication = sum((cluster.local_time(local, workload.precision) for local in works), communication)
        per_step = per_step + cluster.local_time(work.update_work, workload.precision)
    return workload.num_micro_batches * communication + per_step


def _offered(
    graph: LayerGraph, cluster: Cluster, workload: Workload, name: str, claim: Claim, summa: bool
) -> list[Strategy]:
    place = graph.place(name, workload.recompute)
    options = enumerate_strategies(graph[name], cluster.level_sizes, summa, claim.choices, place)
    positions = shared_positions(claim.executor, graph[name])
    return [
        strategy
        for strategy in options
        if executes(claim.executor, graph[name], strategy)
        and graph.offers(name, strategy)
        and fitting(workload.micro_batch, strategy.p0, strategy.ranks_per_sample, positions)
    ]


def _simple_bound(graph: LayerGraph, cluster: Cluster, workload: Workload, claim: Claim) -> float:
    known: dict[object, float] = {}
    total = 0.0
    for layer in graph.layers:
        key = (layer.signature(), graph.place(layer.name, workload.recompute))
        if key not in known:
            offered = _offered(graph, cluster, workload, layer.name, claim, claim.summa)
            known[key] = min(
                float(np.min(_cost_of(graph, cluster, workload, layer.name, group, claim.objective)))
                for group in group_strategies(offered)
            )
        total += known[key]
    return total


def _groups(graph: LayerGraph, untied: bool) -> list[list[str]]:
    """The groups of tied layers, which change together."""
    groups: dict[object, list[str]] = {}  # by the layers' names, and by block and role
    for layer in graph.layers:
        shared: list[object] = [p.tied_to for p in layer.parameters if p.tied_to]
        keys = shared or ([(layer.block, layer.role)] if layer.block and not untied else [])
        names, *others = {id(groups[key]): groups[key] for key in keys if key in groups}.values() or [[]]
        names += [name for other in others for name in other]
        names.append(layer.name)
        groups.update(dict.fromkeys([*keys, *(names if others else [layer.name])], names))
    position = {layer.name: number for number, layer in enumerate(graph.layers)}
    return [
        sorted(names, key=position.__getitem__) for names in {id(names): names for names in groups.values()}.values()
    ]


def _check_single_changes(
    graph: LayerGraph, cluster: Cluster, workload: Workload, claim: Claim, truth: Assessment
) -> None:
    """Check 4, by the costs of the changed layers and their edges before and after."""
    consumers: dict[str, list[str]] = {layer.name: [] for layer in graph.layers}
    for source, target in graph.edges:
        consumers[source].append(target)
    cost = truth.cost(claim.objective)

    def edges_cost(names: list[str], strategies: Mapping[str, Strategy]) -> float:
        edges = {(p, name) for name in names for p in graph.inputs(name)} | {
            (n, c) for n in names for c in consumers[n]
        }
        total = 0.0
        for source, target in edges:
            repeat = graph.inputs(target).count(source)
            steps = edge_steps(graph[source], strategies[source], strategies[target], workload, workload.micro_batch)
            there_and_back = sum(cluster.time(step) + cluster.time(step.adjoint()) for step in steps)
            total += repeat * workload.num_micro_batches * there_and_back
        return total

    for names in _groups(graph, claim.untied):
        first_is_lookup = kind_of(graph[names[0]].kind).is_lookup
        before = sum(_cost_of(graph, cluster, workload, n, claim.strategies[n], claim.objective) for n in names)
        before += edges_cost(names, claim.strategies)
        for option in _offered(graph, cluster, workload, names[0], claim, claim.summa and len(names) == 1):
            alike = {n for n in names if option.summa or kind_of(graph[n].kind).is_lookup == first_is_lookup}
            changed = {n: option if n in alike else transposed(option) for n in names}
            if any(not (s.divides(graph[n]) and s.fits(graph[n], workload.micro_batch)) for n, s in changed.items()):
                continue
            if not are_one_family(claim.executor, {**claim.strategies, **changed}.values()):
                continue
            try:
                after = edges_cost(names, {**claim.strategies, **changed})
            except UserError:
                continue
            after += sum(_cost_of(graph, cluster, workload, n, s, claim.objective) for n, s in changed.items())
            changed_cost = cost - before + after
            slack = 1e-7 * max(cost, before, after)
            if changed_cost < claim.lower_bound - slack and _fits(graph, cluster, workload, claim, changed):
                raise VerificationError(
                    f"lower bound {claim.lower_bound!r}, but {names[0]} at {option} instead of "
                    f"{claim.strategies[names[0]]} brings the cost to {changed_cost!r}"
                )


def _fits(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    claim: Claim,
    changed: Mapping[str, Strategy],
) -> bool:
    limit = claim.memory_limit_bytes
    if limit is None:
        return True
    strategies = {**claim.strategies, **changed}
    # The solver's memory differs from this one by up to two bytes of rounding per layer.
    return assess(graph, cluster, workload, strategies).memory_bytes + 2 * len(graph.layers) <= limit
