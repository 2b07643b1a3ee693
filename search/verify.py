"""The verifier of search results.  It shares no code with the solvers: it never sees their tables.

From the layer graph alone it recomputes cost and memory of the chosen strategies, and checks

1. every layer has a strategy that multiplies to the cluster and divides the layer and the micro-batch;
2. cost(strategies) is the cost that was reported, memory(strategies) the memory, and it fits the limit;
3. the lower bound is not above the cost; where optimality is claimed it is the cost, and not below a simple independent bound;
4. no change of a single layer (of tied layers together) gives a plan within the limit that is cheaper than the lower bound.

The simple bound: every layer at its own cheapest strategy, redistributions for nothing.
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
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.costmodel.strategy import Alike, Strategy, alike, enumerate_strategies, transposed
from autoddl.costmodel.workload import Workload

__all__ = ["Claim", "VerificationError", "verify"]

#: Sums of the same floats in another order differ by less than this.
_TOLERANCE = 1e-9


class VerificationError(UserError):
    """A search claimed something that is not so; the message says what."""


@dataclass(frozen=True)
class Claim:
    """What a search says of its answer (costs in seconds per step, memory in bytes)."""

    strategies: Mapping[str, Strategy]
    cost: float
    lower_bound: float
    memory_bytes: float
    optimal: bool
    memory_limit_bytes: float | None
    objective: str
    untied: bool = False
    summa: bool = False


def verify(
    graph: LayerGraph, cluster: Cluster, workload: Workload, claim: Claim, single_changes: bool = True
) -> Assessment:
    """Check a claim (see the module's docstring) and return the assessment that it was checked against.

    ``single_changes=False`` leaves out check 4, which looks at every option of every layer.

    Raises:
        VerificationError: the claim does not hold.
    """
    assert claim.objective in OBJECTIVES
    truth = assess(graph, cluster, workload, claim.strategies)
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
    if single_changes:
        _check_single_changes(graph, cluster, workload, claim, truth)
    return truth


def _agree(what: str, claimed: float, true: float, relative: float, absolute: float = 0.0) -> None:
    if not math.isclose(claimed, true, rel_tol=relative, abs_tol=absolute):
        raise VerificationError(f"{what}: claimed {claimed!r}, recomputed {true!r}")


def _cost_of(
    graph: LayerGraph, cluster: Cluster, workload: Workload, name: str, strategy: Strategy | Alike, objective: str
) -> Any:
    """One layer's own cost per step, without redistributions (of many strategies at once: an array)."""
    work = layer_work(graph[name], strategy, cluster, workload, workload.micro_batch, not graph.inputs(name))
    communication = sum(cluster.time(step) for step in (*work.forward, *work.backward))
    per_micro_batch = (
        communication if objective == "communication" else communication + work.forward_s + work.backward_s
    )
    return workload.num_micro_batches * per_micro_batch + sum(cluster.time(step) for step in work.gradient)


def _offered(graph: LayerGraph, cluster: Cluster, workload: Workload, name: str, summa: bool) -> list[Strategy]:
    options = enumerate_strategies(graph[name], cluster.level_sizes, summa)
    return [strategy for strategy in options if workload.micro_batch % strategy.p0 == 0]


def _simple_bound(graph: LayerGraph, cluster: Cluster, workload: Workload, claim: Claim) -> float:
    known: dict[object, float] = {}
    total = 0.0
    for layer in graph.layers:
        key = (layer.signature(), not graph.inputs(layer.name))
        if key not in known:
            offered = _offered(graph, cluster, workload, layer.name, claim.summa)
            known[key] = min(
                float(np.min(_cost_of(graph, cluster, workload, layer.name, group, claim.objective)))
                for group in alike(offered, cluster.sized_levels)
            )
        total += known[key]
    return total


def _groups(graph: LayerGraph, untied: bool) -> list[list[str]]:
    """Layers that change together."""
    groups: dict[object, list[str]] = {}
    owner: dict[str, object] = {}
    for layer in graph.layers:
        shared = next((p.tied_to for p in layer.parameters if p.tied_to), None)
        key: object = (
            owner[shared] if shared else (layer.block, layer.role) if layer.block and not untied else layer.name
        )
        owner[layer.name] = key
        groups.setdefault(key, []).append(layer.name)
    return list(groups.values())


def _check_single_changes(
    graph: LayerGraph, cluster: Cluster, workload: Workload, claim: Claim, truth: Assessment
) -> None:
    """Claim 4, by differences: what the changed layers and the edges at them cost before and after."""
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
        first = graph[names[0]]
        before = sum(_cost_of(graph, cluster, workload, n, claim.strategies[n], claim.objective) for n in names)
        before += edges_cost(names, claim.strategies)
        for option in _offered(graph, cluster, workload, names[0], claim.summa and len(names) == 1):
            changed = {n: option if graph[n].kind == first.kind or option.summa else transposed(option) for n in names}
            if any(not strategy.divides(graph[n]) for n, strategy in changed.items()):
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
    # Two bytes of rounding per layer separate the solver's memory from this one.
    return assess(graph, cluster, workload, strategies).memory_bytes + 2 * len(graph.layers) <= limit
