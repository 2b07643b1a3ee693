"""The verifier refuses every kind of false claim, and accepts every result of every method.

Optima come from a brute force over the layer graph that prices through ``assess`` alone: no table, no solver, no tied search.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, isfinite, nan

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.recomputation import RECOMPUTATIONS
from autoddl.costmodel.strategy import Strategy, data_parallel, enumerate_strategies, transposed
from autoddl.costmodel.workload import Workload
from autoddl.search import METHODS, Status, solve
from autoddl.search.verify import Claim, VerificationError, verify
from autoddl.zoo import Transformer, gpt, mlp
from autoddl.zoo.layers import BLOCK_INPUT, GraphBuilder, add, embedding, linear, norm

CLUSTER = load_cluster("dgx-a100").resized(2, 2)
#: Slow links: communication matters for layers as small as these.
SLOW = CLUSTER.with_links(latency_s=1e-7, bandwidth=1e7)


# ------------------------------------------------------------------------------------------------------------ brute force


def options_of(layer: Layer, cluster: Cluster, workload: Workload, summa: bool) -> list[Strategy]:
    offered = enumerate_strategies(layer, cluster.level_sizes, summa)
    return [strategy for strategy in offered if workload.micro_batch % strategy.p0 == 0]


def brute_force(
    graph: LayerGraph, cluster: Cluster, workload: Workload, objective: str, limit: float = inf, summa: bool = False
) -> tuple[float, float]:
    """(the least cost of all untied assignments within the limit, the least memory of any that is possible)."""
    free = [layer for layer in graph.layers if not any(p.tied_to for p in layer.parameters)]
    best, least = inf, inf
    for chosen in product(*(options_of(layer, cluster, workload, summa) for layer in free)):
        strategies = dict(zip((layer.name for layer in free), chosen))
        for layer in graph.layers:
            for parameter in layer.parameters:
                if parameter.tied_to is not None:
                    partner = strategies[parameter.tied_to]
                    alike = graph[parameter.tied_to].kind == layer.kind
                    strategies[layer.name] = partner if alike else transposed(partner)
        try:
            done = assess(graph, cluster, workload, strategies)
        except UserError:
            continue
        least = min(least, done.memory_bytes)
        if done.memory_bytes <= limit:
            best = min(best, done.cost(objective))
    return best, least


def claim_of(done: Assessment, objective: str = "step", **changes) -> Claim:
    """An honest claim of optimality for these strategies, with changes."""
    honest = Claim(
        strategies={layer.layer.name: layer.strategy for layer in done.layers},
        cost=done.cost(objective),
        lower_bound=done.cost(objective),
        memory_bytes=done.memory_bytes,
        optimal=True,
        memory_limit_bytes=None,
        objective=objective,
        untied=True,
    )
    return replace(honest, **changes)


# ----------------------------------------------------------------------------------------------------------- false claims


GRAPH = mlp([64, 32, 16])
WORKLOAD = Workload(16, 16, "float32")


@pytest.fixture(scope="module")
def optimum() -> Assessment:
    problem = PriceBook(GRAPH, SLOW, WORKLOAD, untied=True).problem(16, 16)
    result = solve(problem.table)
    done = assess(GRAPH, SLOW, WORKLOAD, problem.strategies(result.choice))
    assert done.step_s == pytest.approx(brute_force(GRAPH, SLOW, WORKLOAD, "step")[0], rel=1e-12)
    return done


def test_the_honest_claim_passes(optimum):
    assert verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum)) == optimum
    limited = claim_of(optimum, memory_limit_bytes=optimum.memory_bytes)
    assert verify(GRAPH, SLOW, WORKLOAD, limited) == optimum
    modest = claim_of(optimum, optimal=False, lower_bound=optimum.step_s / 2)
    assert verify(GRAPH, SLOW, WORKLOAD, modest) == optimum
    assert verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, optimal=False, lower_bound=-inf)) == optimum


@pytest.mark.parametrize("factor", [0, 0.5, 1 - 1e-6, 1 + 1e-6, 2, inf, -1, nan])
def test_a_false_cost(optimum, factor):
    cost = optimum.step_s * factor
    with pytest.raises(VerificationError, match="cost: claimed"):
        verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, cost=cost, lower_bound=cost))
    with pytest.raises(VerificationError, match="cost: claimed"):
        verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, cost=cost, optimal=False, lower_bound=0.0))


@pytest.mark.parametrize("factor", [0, 0.9, 1.1, inf, nan])
def test_false_memory(optimum, factor):
    with pytest.raises(VerificationError, match="memory: claimed"):
        verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, memory_bytes=optimum.memory_bytes * factor))


@pytest.mark.parametrize("limit", [0.0, 1.0, nan])
def test_memory_over_the_limit(optimum, limit):
    with pytest.raises(VerificationError, match="over the limit"):
        verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, memory_limit_bytes=limit))
    with pytest.raises(VerificationError, match="over the limit"):
        verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, memory_limit_bytes=optimum.memory_bytes - 1))


@pytest.mark.parametrize("factor", [1.001, 2, inf, nan])
def test_a_bound_above_the_cost(optimum, factor):
    for optimal in (True, False):
        with pytest.raises(VerificationError, match=r"lower bound .* is above the cost"):
            verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, lower_bound=factor * optimum.step_s, optimal=optimal))


@pytest.mark.parametrize("factor", [0.999, 0, -inf])
def test_optimality_with_a_gap(optimum, factor):
    with pytest.raises(VerificationError, match="bound of an optimal result"):
        verify(GRAPH, SLOW, WORKLOAD, claim_of(optimum, lower_bound=factor * optimum.step_s))


def test_a_false_claim_of_optimality():
    """Of all 100 or so assignments those that are best where no single layer can be changed pass; all others are refused."""
    best, _ = brute_force(GRAPH, SLOW, WORKLOAD, "step")
    refused = passed = 0
    options = [options_of(layer, SLOW, WORKLOAD, False) for layer in GRAPH.layers]
    for chosen in product(*options):
        done = assess(GRAPH, SLOW, WORKLOAD, dict(zip(("fc1", "fc2"), chosen)))
        better = min(
            assess(GRAPH, SLOW, WORKLOAD, {**dict(zip(("fc1", "fc2"), chosen)), name: other}).step_s
            for name, others in zip(("fc1", "fc2"), options)
            for other in others
        )
        if better < done.step_s * (1 - 1e-6):
            refused += 1
            with pytest.raises(VerificationError, match="brings the cost to"):
                verify(GRAPH, SLOW, WORKLOAD, claim_of(done))
            # Not only optimality is false, but any bound between the two.
            between = claim_of(done, optimal=False, lower_bound=(better + done.step_s) / 2)
            with pytest.raises(VerificationError, match="brings the cost to"):
                verify(GRAPH, SLOW, WORKLOAD, between)
            verify(GRAPH, SLOW, WORKLOAD, claim_of(done, optimal=False, lower_bound=best))
        else:
            passed += 1
            verify(GRAPH, SLOW, WORKLOAD, claim_of(done))
    assert refused > 50 and 1 <= passed < 10


def test_single_changes_respect_the_limit():
    """What is cheaper but does not fit is no counterexample; under a larger limit it is."""
    slow = CLUSTER.with_links(latency_s=1e-3, bandwidth=1e12)  # messages are expensive, memory is not
    options = [options_of(layer, slow, WORKLOAD, False) for layer in GRAPH.layers]
    everything = [assess(GRAPH, slow, WORKLOAD, dict(zip(("fc1", "fc2"), chosen))) for chosen in product(*options)]
    refused = 0
    for limit in sorted({done.memory_bytes for done in everything}):
        best = min((done for done in everything if done.memory_bytes <= limit), key=lambda done: done.step_s)
        verify(GRAPH, slow, WORKLOAD, claim_of(best, memory_limit_bytes=limit))
        try:
            verify(GRAPH, slow, WORKLOAD, claim_of(best, memory_limit_bytes=inf))
        except VerificationError as error:
            assert "brings the cost to" in str(error)
            refused += 1
    assert refused


def test_invalid_strategies():
    """Invalid strategies: too few devices, shapes that do not divide, shared weights with two layouts."""
    graph = gpt(Transformer("gpt", 1, 16, 4, 4, 32))
    everything = dict.fromkeys((layer.name for layer in graph.layers), data_parallel((2, 2)))
    done = assess(graph, CLUSTER, Workload(4, 4), everything)
    for name, strategy in [
        ("h.0.ln_1", Strategy(((1, 1, 2), (1, 1, 2)))),  # its statistics would never be added up
        ("h.0.ln_1", Strategy(((2, 1, 1), (1, 2, 1)), summa=True)),
        ("h.0.mlp.c_fc", Strategy(((1, 1, 1), (1, 1, 1)))),
        ("h.0.mlp.c_fc", Strategy(((4, 1, 1),))),
        ("h.0.mlp.c_fc", Strategy(((1, 2, 1), (1, 1, 2)), summa=True)),
        ("lm_head", Strategy(((1, 2, 1), (2, 1, 1)))),
    ]:
        with pytest.raises(UserError, match=name):
            verify(graph, CLUSTER, Workload(4, 4), claim_of(done, strategies={**everything, name: strategy}))
    missing = {name: strategy for name, strategy in everything.items() if name != "wpe"}
    with pytest.raises(UserError, match="layer 'wpe' has no strategy"):
        verify(graph, CLUSTER, Workload(4, 4), claim_of(done, strategies=missing))


def test_a_layer_that_needs_nothing():
    graph = LayerGraph("g", "row", (add("a", (1, 8)),), ())
    done = assess(graph, CLUSTER, Workload(4, 4), {"a": data_parallel((2, 2))})
    assert done.memory_bytes == 0 and done.cost("communication") == 0
    verify(graph, CLUSTER, Workload(4, 4), claim_of(done, "communication"))


# ------------------------------------------------------------------------------------------------------ all methods, honest


@st.composite
def small_graphs(draw: st.DrawFn) -> LayerGraph:
    """Chains with residual additions and long skips, norms between, sometimes a table shared by both ends."""
    width = draw(st.sampled_from([6, 8, 12]))
    builder = GraphBuilder("random", "row")
    tied = draw(st.booleans())
    first = embedding("wte", 1, 8, width) if tied else linear("fc0", 1, draw(st.sampled_from([4, 16])), width)
    produced = [builder.add(first)]
    for i in range(1, draw(st.integers(1, 3)) + 1):
        kind = draw(st.sampled_from(["linear", "linear", "norm", "add"]))
        if kind == "linear":
            produced.append(builder.add(linear(f"fc{i}", 1, width, width, epilogue=("gelu",)), produced[-1]))
        elif kind == "norm":
            produced.append(builder.add(norm(f"norm{i}", 1, width), produced[-1]))
        else:
            skipped = draw(st.sampled_from(produced))
            produced.append(builder.add(add(f"add{i}", (1, width)), produced[-1], skipped))
    if tied:
        builder.add(linear("head", 1, width, 8, bias=False, tied_to="wte"), produced[-1])
    return builder.build()


def solutions(graph, cluster, workload, objective, limit, untied=True, summa=False):
    problem = PriceBook(graph, cluster, workload, untied=untied, summa=summa).problem(
        workload.batch, workload.micro_batch, objective
    )
    for method in METHODS:
        yield method, problem, solve(problem.table, method=method, memory_limit=limit, evaluations=None, seed=1)


@pytest.mark.slow
@given(
    small_graphs(),
    st.sampled_from(["step", "communication"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 0.0, 0.2, 0.6, 1.0]),
    st.sampled_from(RECOMPUTATIONS),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_passes_and_the_exact_ones_are_the_brute_force(graph, objective, passes, tightness, recompute):
    cluster = SLOW.resized(1, 4) if len(graph.layers) > 3 else SLOW
    cluster = cluster.with_links(latency_s=1e-7, bandwidth=1e7)
    workload = Workload(12, 12 // passes, "float32", "adam", recompute)
    free, least = brute_force(graph, cluster, workload, objective)
    assume(isfinite(free))
    limit = None if tightness is None else least * (1 + tightness) + 2 * len(graph.layers)
    best = free if limit is None else brute_force(graph, cluster, workload, objective, limit)[0]
    for method, problem, result in solutions(graph, cluster, workload, objective, limit):
        if result.choice is None:
            # Only a method without proofs may return no choice.
            assert result.status is Status.LIMIT_REACHED and method not in ("exact", "exhaustive")
            continue
        if method in ("exact", "exhaustive"):
            assert result.optimal
            assert result.cost <= best * (1 + 1e-9) + 1e-18
        claim = Claim(
            strategies=problem.strategies(result.choice),
            cost=result.cost,
            lower_bound=result.lower_bound,
            memory_bytes=result.memory_bytes,
            optimal=result.optimal,
            memory_limit_bytes=limit,
            objective=objective,
            untied=True,
        )
        done = verify(graph, cluster, workload, claim)
        assert done.cost(objective) >= best * (1 - 1e-9)
        assert result.lower_bound <= best * (1 + 1e-9)


@given(small_graphs(), st.sampled_from([1, 2]))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_fits_less_than_the_least(graph, passes):
    cluster = SLOW.resized(1, 4).with_links(latency_s=1e-7, bandwidth=1e7)
    workload = Workload(12, 12 // passes, "float32")
    _, least = brute_force(graph, cluster, workload, "step")
    assume(isfinite(least))
    for method, _, result in solutions(graph, cluster, workload, "step", least * 0.9):
        assert result.choice is None
        if method in ("exact", "exhaustive"):
            assert result.status is Status.INFEASIBLE
            assert least <= result.smallest_memory_bytes <= least + 2 * len(graph.layers) + 1


def test_summa_and_tied_blocks():
    """A tied residual block: the optimum of the tied table passes as tied, Summa meshes offered or not."""
    builder = GraphBuilder("residual", "row")
    block = [
        (norm("norm", 1, 16), [BLOCK_INPUT]),
        (linear("up", 1, 16, 64, epilogue=("gelu",)), ["norm"]),
        (linear("down", 1, 64, 16), ["up"]),
        (add("sum", (1, 16)), [BLOCK_INPUT, "down"]),
    ]
    builder.repeat("h", 3, block, builder.add(linear("in", 1, 8, 16)))
    graph = builder.build()
    workload = Workload(16, 8, "float32")
    costs = {}
    for summa in (False, True):
        for method, problem, result in solutions(graph, SLOW, workload, "step", None, untied=False, summa=summa):
            claim = Claim(
                problem.strategies(result.choice),
                result.cost,
                result.lower_bound,
                result.memory_bytes,
                result.optimal,
                None,
                "step",
                untied=False,
                summa=summa,
            )
            verify(graph, SLOW, workload, claim)
            costs[method, summa] = result.cost
        assert costs["exact", summa] == min(cost for (_, offered), cost in costs.items() if offered == summa)
    assert costs["exact", True] <= costs["exact", False]
