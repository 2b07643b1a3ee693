"""Plans with divided parameters (ZeRO) and regathered inputs against a brute force over all assignments of strategies.

The brute force enumerates meshes and choices by itself, and prices through ``assess`` alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, prod

import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy, transposed
from autoddl.costmodel.workload import Workload
from autoddl.search.planner import InfeasibleError, Options, make_plan
from autoddl.zoo import mlp
from autoddl.zoo.layers import GraphBuilder, embedding, linear, loss, norm

NODES = load_cluster("dgx-a100").resized(2, 2).with_links(latency_s=1e-7, bandwidth=1e9)
#: Slow links between nodes, where dividing inside nodes pays.
SLOW = replace(NODES, links=(replace(NODES.links[0], bandwidth=5e7), NODES.links[1]))


def tied():
    """A table that is also the matrix of the head, with a norm between them."""
    builder = GraphBuilder("tied", "row")
    table = builder.add(embedding("wte", 1, 64, 32))
    end = builder.add(norm("norm", 1, 32), table)
    end = builder.add(linear("head", 1, 32, 64, bias=False, tied_to="wte"), end)
    builder.add(loss("loss", 1, 64), end)
    return builder.build()


def long():
    """Many rows for each weight, so that splitting samples sends least."""
    builder = GraphBuilder("long", "sequence")
    end = builder.add(embedding("wte", 256, 32, 64))
    builder.add(linear("fc", 256, 64, 64, epilogue=("mse_loss",)), end)
    return builder.build()


GRAPHS = {"wide": mlp([64, 512, 64]), "long": long(), "tied": tied()}


def choices_of(layer, strategy, is_shared):
    """All ways to divide a layer's parameters over p0 and to gather its input again over p1, with their defaults."""
    p0 = [split[0] for split in strategy.splits]
    shardings = [(0, False)]
    if prod(p0) > 1 and any(p.tied_to is None for p in layer.parameters):
        shardings.append((1, False))
        if not is_shared:
            highest = 3 if layer.kind in ("linear", "embedding", "position") else 2
            for zero in range(2, highest + 1):
                shardings += [(zero, False)] + ([(zero, True)] if min(p0) > 1 else [])
    regathers = [False, True] if layer.kind == "linear" and strategy.p1 > 1 and not is_shared else [False]
    for (zero, hybrid), again in product(shardings, regathers):
        yield replace(strategy, zero=zero, hybrid=hybrid, regathers=again)


def assignments(graph, cluster):
    """Every assignment of strategies without Summa meshes; of a shared weight both layers have one layout."""

    def triples(size):
        return [(a, b, c) for a, b, c in product(range(1, size + 1), repeat=3) if a * b * c == size]

    everything = [Strategy(splits) for splits in product(*map(triples, cluster.level_sizes))]
    owners = {p.tied_to for layer in graph.layers for p in layer.parameters if p.tied_to}
    free = [layer for layer in graph.layers if not any(p.tied_to for p in layer.parameters)]
    offered = [
        [
            chosen
            for strategy in everything
            if (strategy.p2 == 1 or layer.kind in ("linear", "embedding")) and strategy.divides(layer)
            for chosen in choices_of(layer, strategy, layer.name in owners)
        ]
        for layer in free
    ]
    for combination in product(*offered):
        strategies = {layer.name: strategy for layer, strategy in zip(free, combination)}
        for layer in graph.layers:
            for parameter in layer.parameters:
                if parameter.tied_to:
                    strategies[layer.name] = transposed(strategies[parameter.tied_to])
        if all(strategy.divides(graph[name]) for name, strategy in strategies.items()):
            yield {layer.name: strategies[layer.name] for layer in graph.layers}


@pytest.mark.parametrize("cluster", [NODES, SLOW], ids=["even", "slow"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_no_assignment_is_better(name, cluster, recompute):
    """Without a limit, and with limits at which dividing more begins to be needed."""
    graph = GRAPHS[name]
    workload = Workload(256, 64, "float32", recompute=recompute)
    found = []
    for strategies in assignments(graph, cluster):
        try:
            assessment = assess(graph, cluster, workload, strategies)
        except UserError:  # the samples do not divide
            continue
        found.append((assessment.step_s, assessment.memory_bytes))
    least, most = min(memory for _, memory in found), min(found)[1]
    used = set()
    for limit in (2 * most, *(least + (most - least) * part / 8 for part in (6, 4, 2, 1, 0.5)), 0.99 * least):
        # A search rounds the memory of each layer up to whole bytes.
        best = min((step for step, memory in found if memory <= limit - 2 * len(graph.layers)), default=inf)
        loosest = min((step for step, memory in found if memory <= limit), default=inf)
        options = Options(
            batch=256,
            micro_batch=64,
            precision="float32",
            recompute=recompute,
            zero="auto",
            activations="auto",
            summa=False,
            memory_limit_bytes=limit,
        )
        try:
            plan = make_plan(graph, cluster, options)
        except InfeasibleError:
            assert best == inf
            continue
        assert plan.optimal
        assert loosest * (1 - 1e-9) <= plan.assessment.step_s <= best * (1 + 1e-9)
        used |= {strategy.zero for strategy in plan.strategies.values()}
    if name == "long":
        assert used == {0, 1, 2, 3} if recompute == "none" else used > {0, 1}
