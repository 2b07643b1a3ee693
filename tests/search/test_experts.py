"""Plans with divided experts against a brute force over all assignments of strategies, priced through ``assess`` alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, prod

import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search.planner import InfeasibleError, Options, make_plan
from autoddl.zoo.layers import GraphBuilder, experts, linear, loss

CLUSTER = load_cluster("dgx-a100").resized(2, 2).with_links(latency_s=1e-6, bandwidth=1e9)


def graph_of(rows, inner, num=4):
    builder = GraphBuilder("experts", "sequence")
    x = builder.add(linear("up", rows, 16, 16, bias=False))
    gate = builder.add(linear("gate", rows, 16, num, bias=False), x)
    end = builder.add(experts("experts", rows, 16, inner, num=num, per_token=2, capacity=rows // 2), x, gate)
    builder.add(loss("loss", rows, 16), end)
    return builder.build()


#: Large experts and few tokens; small experts and many tokens; experts of which not every number of ranks has as many.
GRAPHS = {"large": graph_of(8, 512), "small": graph_of(128, 8), "six": graph_of(8, 512, num=6)}


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def assignments(graph):
    """Every assignment of strategies without divided parameters."""
    triples = [(a, b, c) for a, b, c in product((1, 2), repeat=3) if a * b * c == 2]
    offered = []
    for layer in graph.layers:
        options = [Strategy(splits) for splits in product(triples, repeat=2)]
        options = [s for s in options if layer.kind == "linear" or s.p2 == 1]
        if layer.kind == "experts":
            options += [
                replace(s, experts=parts)
                for s in options
                for parts in product(*(divisors(split[0]) for split in s.splits))
                if prod(parts) > 1 and layer.attributes["experts"] % prod(parts) == 0
            ]
        offered.append([s for s in options if s.divides(layer)])
    for combination in product(*offered):
        yield dict(zip((layer.name for layer in graph.layers), combination))


@pytest.mark.parametrize("name", GRAPHS)
def test_no_assignment_is_better(name):
    """Without a limit, and with limits that make experts be divided."""
    graph, workload, found = GRAPHS[name], Workload(64, 16, "float32"), []
    for strategies in assignments(graph):
        try:
            assessment = assess(graph, CLUSTER, workload, strategies)
        except UserError:  # the samples do not divide
            continue
        found.append((assessment.step_s, assessment.memory_bytes))
    least, most = min(memory for _, memory in found), min(found)[1]
    used = set()
    for limit in (2 * most, *(least + (most - least) * part / 8 for part in (6, 3, 1, 0.2)), 0.99 * least):
        # A search rounds the memory of each layer up to whole bytes.
        best = min((step for step, memory in found if memory <= limit - 2 * len(graph.layers)), default=inf)
        loosest = min((step for step, memory in found if memory <= limit), default=inf)
        options = Options(
            batch=64,
            micro_batch=16,
            precision="float32",
            recompute=False,
            summa=False,
            zero=0,
            activations="kept",
            memory_limit_bytes=limit,
        )
        try:
            plan = make_plan(graph, CLUSTER, options)
        except InfeasibleError:
            assert best == inf
            continue
        assert plan.optimal
        assert loosest * (1 - 1e-9) <= plan.assessment.step_s <= best * (1 + 1e-9)
        used.add(plan.strategies["experts"].experts)
    assert any(used)
