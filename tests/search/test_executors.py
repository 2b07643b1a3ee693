"""Plans for the executor ``graph`` against a brute force over all assignments that it can execute.

The brute force enumerates factors of the levels' sizes, finds mesh axes by itself, and prices through ``assess`` alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, product
from math import inf, prod

import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.costmodel.strategy import Strategy, transposed
from autoddl.costmodel.workload import Workload
from autoddl.search import METHODS
from autoddl.search.executorcost import AllStrategies, executor_note
from autoddl.search.planner import InfeasibleError, Options, Planned, make_plan
from autoddl.search.verify import Claim, VerificationError, verify
from autoddl.zoo import Transformer, gpt, mlp
from autoddl.zoo.layers import GraphBuilder, embedding, linear, norm

from ..stops import StopAfter

#: Slow links between few devices: meshes of three axes are often best.
NODES = load_cluster("dgx-a100").resized(2, 4).with_links(latency_s=1e-7, bandwidth=1e9)
SLOW_NODES = replace(NODES, links=(replace(NODES.links[0], bandwidth=1e8), NODES.links[1]))


def tied() -> LayerGraph:
    """A table that is also the matrix of the head, with a matrix between them."""
    builder = GraphBuilder("tied", "row")
    table = builder.add(embedding("wte", 1, 64, 32))
    norm_ = builder.add(norm("norm", 1, 32), table)
    builder.add(linear("head", 1, 32, 64, bias=False, tied_to="wte"), norm_)
    return builder.build()


GRAPHS = {"square": mlp([256, 256, 256]), "wide": mlp([64, 4096, 64]), "tied": tied()}

# ---- Brute force ---------------------------------------------------------------------------------------------------------------


def axes_of(strategy: Strategy) -> list[tuple[str, int]]:
    """Runs of equal roles among the factors that are not 1, with their products: samples are split by p0, features by p1 and p2."""
    factors = [f for p0, p1, p2 in strategy.splits for f in (("samples", p0), ("features", p1), ("features", p2))]
    runs = groupby((factor for factor in factors if factor[1] > 1), key=lambda factor: factor[0])
    return [(role, prod(size for _, size in run)) for role, run in runs]


def runs_in_a_graph(strategy: Strategy) -> bool:
    shares = strategy.summa or strategy.positions or strategy.key_copies
    return not shares and min(strategy.p1, strategy.p2) == 1 and len(axes_of(strategy)) <= 2


def run_together(strategies) -> bool:
    """At most one mesh of two axes; beside it only the mesh of its outer role alone."""
    meshes = [axes_of(strategy) for strategy in strategies]
    double, single = [mesh for mesh in meshes if len(mesh) == 2], [mesh for mesh in meshes if len(mesh) == 1]
    if not double:
        return True
    return all(mesh == double[0] for mesh in double) and all(mesh[0][0] == double[0][0][0] for mesh in single)


def assignments(graph: LayerGraph, cluster: Cluster, workload: Workload, is_graph: bool, summa: bool):
    """Every assignment of strategies: all triples of factors of each level, for each layer that has its own weight."""

    def triples(size: int) -> list[tuple[int, int, int]]:
        numbers = range(1, size + 1)
        return [(a, b, c) for a, b, c in product(numbers, numbers, numbers) if a * b * c == size]

    def allowed(strategy: Strategy) -> bool:
        return not is_graph or runs_in_a_graph(strategy)

    everything = [Strategy(splits) for splits in product(*map(triples, cluster.level_sizes))]
    everything += [replace(s, summa=True) for s in everything if summa and s.p0 > 1 and s.p1 > 1 and s.p2 == 1]
    shared = {parameter.tied_to: layer for layer in graph.layers for parameter in layer.parameters if parameter.tied_to}
    owners = [layer for layer in graph.layers if layer not in shared.values()]
    offered = []
    for layer in owners:
        options = [
            (strategy,)
            for strategy in everything
            if workload.micro_batch % strategy.p0 == 0
            and strategy.divides(layer)
            and allowed(strategy)
            and not (strategy.summa and layer.name in shared)
        ]
        if layer.name in shared:
            partner = shared[layer.name]
            pairs = [(strategy, transposed(strategy)) for (strategy,) in options]
            options = [pair for pair in pairs if pair[1].divides(partner) and allowed(pair[1])]
        offered.append(options)
    for chosen in product(*offered):
        strategies = {}
        for layer, strategy in zip(owners, chosen):
            strategies[layer.name] = strategy[0]
            if len(strategy) == 2:
                strategies[shared[layer.name].name] = strategy[1]
        if not is_graph or run_together(strategies.values()):
            yield strategies


def brute_force(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    is_graph: bool,
    objective: str = "step",
    summa: bool = False,
) -> list[tuple[float, float]]:
    """(cost, memory) of every possible assignment."""
    found = []
    for strategies in assignments(graph, cluster, workload, is_graph, summa):
        try:
            done = assess(graph, cluster, workload, strategies)
        except UserError:
            continue
        found.append((done.cost(objective), done.memory_bytes))
    return found


def least(found: list[tuple[float, float]], limit: float) -> float:
    return min((cost for cost, memory in found if memory <= limit), default=inf)


def planned(graph: LayerGraph, cluster: Cluster, limit: float = 2**50, **options) -> Planned:
    asked = {"batch": 256, "micro_batch": 256, "recompute": False, "summa": False, "precision": "float32", **options}
    return make_plan(graph, cluster, Options(executor="graph", memory_limit_bytes=limit, **asked))


@pytest.mark.parametrize("objective", ["step", "communication"])
@pytest.mark.parametrize("cluster", [NODES, SLOW_NODES], ids=["even", "slow"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_plan_is_the_best_that_can_be_executed(name, cluster, objective):
    """Without a limit, and with three that bind more and more; and so is the best plan of all strategies."""
    graph, workload = GRAPHS[name], Workload(256, 256, "float32")
    restricted = brute_force(graph, cluster, workload, True, objective)
    everything = brute_force(graph, cluster, workload, False, objective)
    smallest, largest = min(memory for _, memory in restricted), max(memory for _, memory in restricted)
    for limit in (2 * largest, *(smallest * (largest / smallest) ** part for part in (0.5, 0.2, 0.001))):
        # Solvers round every layer's memory up to whole bytes.
        limit += 3 * len(graph.layers)
        plan = planned(graph, cluster, limit, objective=objective)
        assert plan.optimal and plan.cost == pytest.approx(least(restricted, limit), rel=1e-9)
        assert plan.all_strategies.optimal
        assert plan.all_strategies.cost == pytest.approx(least(everything, limit), rel=1e-9)
        assert plan.notes == (executor_note(plan.options, plan.cost, True, plan.all_strategies),)
        assert all(map(runs_in_a_graph, plan.strategies.values())) and run_together(plan.strategies.values())
        verify(graph, cluster, plan.workload, claim_of(plan))


def claim_of(plan: Planned, **changes) -> Claim:
    honest = Claim(
        plan.strategies,
        plan.cost,
        plan.lower_bound,
        plan.assessment.memory_bytes,
        plan.optimal,
        plan.memory_limit_bytes,
        plan.options.objective,
        untied=plan.options.untied,
        summa=plan.options.summa,
        executor=plan.options.executor,
    )
    return replace(honest, **changes)


def test_some_of_these_plans_cost_and_some_do_not():
    costs = {name: [] for name in GRAPHS}
    for name, graph in GRAPHS.items():
        for cluster in (NODES, SLOW_NODES):
            plan = planned(graph, cluster)
            costs[name].append(plan.cost / plan.all_strategies.cost - 1)
    every = [cost for found in costs.values() for cost in found]
    assert max(every) > 0.01 and min(every) < 1e-9, costs


def test_all_micro_batches_with_and_without_recomputation():
    graph, cluster, limit = GRAPHS["wide"], SLOW_NODES, 2.2e6
    found, everything = inf, inf
    for recompute in ("none", "layers"):  # there are no blocks, and no attention
        for micro_batch in (1, 2, 4, 8):
            workload = Workload(8, micro_batch, "float32", "adam", recompute)
            found = min(found, least(brute_force(graph, cluster, workload, True), limit))
            everything = min(everything, least(brute_force(graph, cluster, workload, False, summa=True), limit))
    plan = planned(graph, cluster, limit, batch=8, micro_batch=None, recompute=None, summa=True)
    assert found < inf and plan.optimal and plan.cost == pytest.approx(found, rel=1e-9)
    assert plan.all_strategies.cost == pytest.approx(everything, rel=1e-9)


# ---- Methods, stops, memory ----------------------------------------------------------------------------------------------------

GPT = gpt(Transformer("gpt", 2, 48, 12, 8, 96))


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_chooses_what_can_be_executed(method, untied):
    graph = GRAPHS["wide"] if method == "exhaustive" else GPT
    plan = planned(graph, NODES, method=method, untied=untied, seed=3, summa=True)
    assert all(map(runs_in_a_graph, plan.strategies.values())) and run_together(plan.strategies.values())
    assert not any(strategy.summa for strategy in plan.strategies.values())
    exact = planned(graph, NODES, untied=untied, summa=True)
    assert exact.cost <= plan.cost * (1 + 1e-9) and plan.lower_bound <= exact.cost * (1 + 1e-9)
    assert exact.all_strategies.cost == pytest.approx(plan.all_strategies.cost, rel=1e-9)
    assert plan.left_out.startswith("left out are what nn.Graph does not execute at its price: Summa, ")


def test_a_book_offers_what_can_be_executed_and_no_more():
    workload = Workload(16, 16, "float32")
    books = {
        executor: PriceBook(GPT, NODES, workload, executor=executor, summa=True) for executor in ("eager", "graph")
    }
    for all_options, options in zip(books["eager"].variables, books["graph"].variables):
        kept = [
            option
            for number, option in enumerate(all_options.options)
            if not option.summa
            and all(runs_in_a_graph(all_options.strategy(name, number)) for name in all_options.layers)
        ]
        assert list(options.options) == kept and 0 < len(kept) < len(all_options.options)


#: Where activations fill the memory, Summa meshes, which keep nothing twice, need the least of it.
SUMMA_FITS, LOCAL = mlp([64, 64, 64]), load_cluster("local-cpu").resized(1, 4)


def test_where_only_other_plans_fit_the_error_says_so():
    workload = Workload(256, 256, "float32")
    executable, everything = (
        min(memory for _, memory in brute_force(SUMMA_FITS, LOCAL, workload, is_graph, summa=True))
        for is_graph in (True, False)
    )
    assert everything < executable - 1000
    fixed = Options(batch=256, micro_batch=256, recompute=False, precision="float32", executor="graph")

    def error_of(limit: float) -> str:
        with pytest.raises(InfeasibleError) as error:
            make_plan(SUMMA_FITS, LOCAL, replace(fixed, memory_limit_bytes=limit))
        return str(error.value)

    between = (everything + executable) / 2
    message = error_of(between)
    assert message.endswith("with executor='graph', but a plan of all strategies fits: leave out executor='graph'")
    named = float(message.split("memory_limit_bytes=")[1].split(")")[0])
    assert executable <= named <= executable + 10 and "\n" not in message
    assert make_plan(SUMMA_FITS, LOCAL, replace(fixed, memory_limit_bytes=between, executor="eager")).optimal
    assert make_plan(SUMMA_FITS, LOCAL, replace(fixed, memory_limit_bytes=named)).optimal
    message = error_of(everything / 2)
    one, other = (float(part.split(")")[0]) for part in message.split("memory_limit_bytes=")[1:])
    assert (one, other) == (named, pytest.approx(everything, abs=10)) and message.endswith(" without it")


def test_where_both_need_as_much_the_error_is_the_same():
    messages = []
    for executor in ("eager", "graph"):
        with pytest.raises(InfeasibleError) as error:
            options = Options(batch=8, memory_limit_bytes=1000, recompute="layers", executor=executor, summa=False)
            make_plan(GPT, LOCAL, options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_a_stop_leaves_the_cost_unknown():
    """Whenever it comes; the plan is the best one if it comes in the search over all strategies."""
    graph = GRAPHS["square"]
    options, stop = Options(batch=16, executor="graph"), Stop()
    whole, counter = make_plan(graph, NODES, options), StopAfter(10**9)
    make_plan(graph, NODES, options, stop=counter)
    notes = set()
    for asks in (0.3, 0.6, 0.8, 0.9, 0.97, 0.99):
        try:
            plan = make_plan(graph, NODES, options, stop=StopAfter(int((10**9 - counter.left) * asks)))
        except StopRequestedError:
            continue
        assert plan.is_interrupted and plan.lower_bound <= whole.cost * (1 + 1e-9) <= plan.cost * (1 + 2e-9)
        (note,) = plan.notes
        if plan.all_strategies is None:
            assert note == "executor graph may cost time: the search was interrupted before it searched all strategies"
        else:
            assert plan.optimal and plan.all_strategies.lower_bound <= whole.all_strategies.cost * (1 + 1e-9)
            assert note == executor_note(options, plan.cost, True, plan.all_strategies)
        notes.add(note)
    assert len(notes) > 1
    stop.request()
    plan = make_plan(graph, NODES, options, known=whole.baselines, stop=stop)
    assert plan.notes == () and plan.all_strategies is None  # the call that knew the baselines has the note


@pytest.mark.parametrize(
    ("cost", "optimal", "everything", "note"),
    [
        (1.0, True, AllStrategies(1.0, 1.0), "costs nothing against all strategies (1 s per step)"),
        (1.0, True, AllStrategies(0.8, 0.8), "costs 25.0% against all strategies (800 ms per step)"),
        (1.0, True, AllStrategies(0.9999, 0.9999), "costs less than 0.1% against all strategies (1000 ms per step)"),
        (
            1.0,
            True,
            AllStrategies(0.8, 0.5),
            "costs 25.0% against the best plan found of all strategies (800 ms per step), at most 100.0%: not proven",
        ),
        (
            1.0,
            False,
            AllStrategies(0.8, 0.0),
            "(the best plan found) costs 25.0% against the best plan found of all strategies (800 ms per step): not proven",
        ),
        (0.0, True, AllStrategies(0.0, 0.0), "costs nothing against all strategies (0 s per step)"),
    ],
)
def test_notes(cost, optimal, everything, note):
    assert executor_note(Options(executor="graph"), cost, optimal, everything) == f"executor graph {note}"


def test_a_layer_without_a_strategy_that_can_be_executed_is_named():
    """3 rows of 4 features on 2 x 6 devices: p0 = 3 lies between the halves of the 4 devices that share the features."""
    cluster = load_cluster("dgx-a100").resized(2, 6)
    assert make_plan(mlp([4, 4]), cluster, Options(batch=3)).optimal
    with pytest.raises(
        UserError, match=r"fc1 .*micro-batch of 3 rows and that executor='graph' can execute; "
    ) as error:
        make_plan(mlp([4, 4]), cluster, Options(batch=3, executor="graph"))
    assert "\n" not in str(error.value)


def test_an_unknown_executor():
    with pytest.raises(UserError, match=r"^executor 'lazy' is not one of eager, graph$"):
        make_plan(GPT, NODES, Options(executor="lazy"))


# ---- The verifier --------------------------------------------------------------------------------------------------------------


def test_the_verifier_refuses_what_the_executor_cannot_execute():
    graph = GRAPHS["square"]
    plan = make_plan(graph, SLOW_NODES, Options(batch=256, micro_batch=256, recompute=False, summa=False))
    honest = claim_of(plan)
    verify(graph, SLOW_NODES, plan.workload, honest)
    bad = next(name for name, strategy in plan.strategies.items() if not runs_in_a_graph(strategy))
    with pytest.raises(VerificationError, match=rf"executor 'graph' cannot execute {bad} at "):
        verify(graph, SLOW_NODES, plan.workload, replace(honest, executor="graph"))


def test_the_verifier_of_all_strategies_refuses_a_plan_that_is_only_the_best_for_the_executor():
    graph = GRAPHS["square"]
    plan = planned(graph, SLOW_NODES)
    assert plan.cost > plan.all_strategies.cost * 1.001
    verify(graph, SLOW_NODES, plan.workload, claim_of(plan))
    with pytest.raises(VerificationError, match="brings the cost to"):
        verify(graph, SLOW_NODES, plan.workload, claim_of(plan, executor="eager"))
