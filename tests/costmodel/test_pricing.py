"""The tables of the searches against the assessment of the layer graph, which uses no table."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, isfinite

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.overlap import OVERLAPS
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import OBJECTIVES, Problem
from autoddl.costmodel.recomputation import RECOMPUTATIONS
from autoddl.costmodel.strategy import PLAIN, Choices, Strategy, data_parallel
from autoddl.costmodel.workload import ACTIVATIONS, ATTENTIONS, GRADIENTS, Workload
from autoddl.zoo import Transformer, bert, gpt, llama, mlp, resolve_model, vgg
from autoddl.zoo.layers import BLOCK_INPUT, GraphBuilder, add, linear

MODELS = {
    "mlp": mlp([768, 384, 192, 96]),
    "gpt": gpt(Transformer("gpt", 3, 96, 12, 8, 768)),
    "gpt untied": gpt(Transformer("gpt", 2, 96, 12, 8, 768, tied=False)),
    "bert": bert(Transformer("bert", 2, 96, 12, 8, 768)),
    "llama": llama(Transformer("llama", 2, 96, 12, 8, 768, kv_heads=4)),
    "vgg": vgg(11, image=32),
}
CLUSTERS = {
    "8": load_cluster("dgx-a100").resized(1, 8),
    "12": load_cluster("piz-daint").resized(12),
    "2 x 4": load_cluster("gcp-a100").resized(2, 4),
    "3 x 2": load_cluster("v100-a").resized(3, 2),
    "1": load_cluster("local-cpu").resized(1, 1),
}
#: Reduce-scatters and all-gathers have different prices, so forward and backward differ.
CALIBRATED = replace(
    CLUSTERS["2 x 4"],
    links=tuple(
        replace(
            link,
            collectives={
                Collective.REDUCE_SCATTER: (3 * link.latency_s, link.bandwidth / 2),
                Collective.ALL_REDUCE: (link.latency_s, link.bandwidth * 1.5),
            },
        )
        for link in CLUSTERS["2 x 4"].links
    ),
)


#: What else a workload says.
MORE_WORDS = {
    "attention": ATTENTIONS,
    "gradients": GRADIENTS,
    "zero": (0, 1),
    "activations": ACTIVATIONS,
    "overlap": OVERLAPS,
    "bucket_bytes": (0, 5_000, 10**6),
}


def all_layers(problem, strategy_of):
    """The strategy of every layer of a problem, by name."""
    return {layer.name: strategy_of(layer) for layer in problem.graph.layers}


def agree(problem: Problem, choice: tuple[int, ...]) -> bool:
    """Whether the table has a finite cost for the choice; then it has to be the assessment's."""
    cost = problem.table.evaluate(choice)
    strategies = problem.strategies(choice)
    if not isfinite(cost):
        with pytest.raises(UserError):
            assess(problem.graph, problem.cluster, problem.workload, strategies)
        return False
    # Tables add up whole all-reduces; :mod:`autoddl.search.overlapped` knows what overlap hides of them.
    truth = replace(assess(problem.graph, problem.cluster, problem.workload, strategies), overlap="none")
    assert cost == pytest.approx(truth.cost(problem.objective), rel=1e-10)
    # Every layer's memory and the buffer are rounded up to whole bytes.
    memory = problem.table.peak_memory(choice)
    assert truth.memory_bytes <= memory <= truth.memory_bytes + len(problem.variables) + 1
    return True


def random_choice(problem: Problem, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(len(costs)) for costs in problem.table.cost)


@pytest.mark.parametrize("cluster", [*CLUSTERS.values(), CALIBRATED], ids=[*CLUSTERS, "calibrated"])
@pytest.mark.parametrize("model", MODELS)
def test_tables_are_the_assessment(model, cluster):
    rng = random.Random(f"{model} {cluster.name}")
    finite = 0
    for recompute in (*RECOMPUTATIONS, "blocks:1", "blocks:2"):
        precision, untied = rng.choice(list(cluster.device.peak_flops)), rng.random() < 0.5
        more = {name: rng.choice(words) for name, words in MORE_WORDS.items()}
        workload = Workload(1, 1, precision, rng.choice(["sgd", "adam"]), recompute, **more)
        choices = rng.choice((PLAIN, Choices((0, 1, 2, 3), regathers=True)))
        book = PriceBook(MODELS[model], cluster, workload, untied, summa=rng.random() < 0.5, choices=choices)
        batch = 12 * cluster.num_devices
        for micro_batch in (batch, batch // 2, batch // 3, cluster.num_devices):
            problem = book.problem(batch, micro_batch, rng.choice(OBJECTIVES))
            finite += sum(agree(problem, random_choice(problem, rng)) for _ in range(2))
    assert finite > 10


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10]))
@settings(max_examples=30, deadline=None)
def test_small_micro_batches_have_no_route_between_some_layouts(seed, micro_batch):
    """With few samples, routes differ from those of large tensors, or do not exist; the table agrees with the assessment."""
    rng = random.Random(seed)
    cluster = CLUSTERS[rng.choice(["12", "2 x 4", "3 x 2", "8"])]
    book = PriceBook(mlp([24 * rng.choice([1, 2, 5]), 24, 48, 24]), cluster, Workload(1, 1, "float32"), summa=True)
    problem = book.problem(4 * micro_batch, micro_batch)
    for _ in range(20):
        agree(problem, random_choice(problem, rng))


@given(
    st.floats(0, 100), st.floats(1, 1e18), st.integers(0, 2**30), st.sampled_from(["mlp", "gpt"]), st.integers(0, 2**32)
)
@settings(max_examples=20, deadline=None)
def test_latency_does_not_swallow_bandwidth(latency_s, bandwidth, more, model, seed):
    """Slopes are differences of prices; they must be accurate for any latency."""
    cluster = CLUSTERS["2 x 4"].with_links(latency_s, bandwidth)
    batch = 8 * (1 + more)
    problem = PriceBook(MODELS[model], cluster, Workload(1, 1, "mixed")).problem(batch, batch, "communication")
    agree(problem, random_choice(problem, random.Random(seed)))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_affine_law(objective):
    """M micro-batches cost M fixed + batch slope + once: along M the table is a straight line."""
    book = PriceBook(MODELS["gpt"], CLUSTERS["2 x 4"], Workload(1, 1, "mixed"))
    tables = {num: book.problem(96 * 8, 96 * 8 // num, objective).table for num in (1, 2, 4)}
    for i in range(len(tables[1].cost)):
        one, two, four = (tables[num].cost[i][:3] for num in (1, 2, 4))
        np.testing.assert_allclose(four - one, 3 * (two - one), rtol=1e-6, atol=1e-12)
        assert (two >= one).all()
        np.testing.assert_allclose(
            tables[1].memory[i][:3] - tables[2].memory[i][:3],
            2 * (tables[2].memory[i][:3] - tables[4].memory[i][:3]),
            atol=4,
        )


def test_tying_sums_over_the_repetitions():
    graph, cluster, workload = MODELS["gpt"], CLUSTERS["8"], Workload(1, 1, "mixed")
    tied = PriceBook(graph, cluster, workload).problem(64, 64)
    untied = PriceBook(graph, cluster, workload, untied=True).problem(64, 64)
    by_layer = {layer: i for i, variable in enumerate(untied.variables) for layer in variable.layers}
    for i, variable in enumerate(tied.variables):
        members = sorted({by_layer[layer] for layer in variable.layers})
        np.testing.assert_allclose(tied.table.cost[i], sum(untied.table.cost[k] for k in members), rtol=1e-12)
        np.testing.assert_allclose(
            tied.table.memory[i], sum(untied.table.memory[k] for k in members), atol=len(members)
        )
        np.testing.assert_array_equal(tied.table.buffer[i], np.max([untied.table.buffer[k] for k in members], axis=0))
    # Equal repetitions share their arrays.
    fc = [untied.table.cost[by_layer[f"h.{k}.mlp.c_fc"]] for k in range(3)]
    assert fc[0] is fc[1] is fc[2]


def test_variables():
    tied = PriceBook(MODELS["gpt"], CLUSTERS["8"], Workload(1, 1, "mixed")).variables
    names = {variable.name: variable for variable in tied}
    assert names["h.*.attn.c_attn"].layers == tuple(f"h.{k}.attn.c_attn" for k in range(3))
    shared = names["wte = lm_head"]
    assert shared.swapped == {"lm_head"}
    option = shared.options.index(Strategy(((2, 4, 1),)))
    assert shared.strategy("wte", option) == Strategy(((2, 4, 1),))
    assert shared.strategy("lm_head", option) == Strategy(((2, 1, 4),))
    assert len(tied) == 3 + 9 + 2  # wte, wpe, embed; a block; ln_f and loss
    assert len(PriceBook(MODELS["gpt"], CLUSTERS["8"], Workload(1, 1, "mixed"), untied=True).variables) == 3 + 27 + 2
    assert len(PriceBook(MODELS["gpt untied"], CLUSTERS["8"], Workload(1, 1, "mixed")).variables) == 3 + 9 + 3


def test_a_shared_weight_has_one_layout():
    """Vocabulary over q ranks and features over r: the embedding's (p0, r, q) is the output projection's (p0, q, r)."""
    problem = PriceBook(MODELS["gpt"], CLUSTERS["8"], Workload(1, 1, "mixed")).problem(64, 64)
    rng = random.Random(0)
    for _ in range(20):
        strategies = problem.strategies(random_choice(problem, rng))
        table, matrix = strategies["wte"], strategies["lm_head"]
        assert [axis for axis in table.axes(1, embedding=True)] == list(matrix.axes(2))
        assert [axis for axis in table.axes(2, embedding=True)] == list(matrix.axes(1))


def test_samples_have_to_divide():
    book = PriceBook(mlp([64, 32, 16]), CLUSTERS["8"], Workload(1, 1, "float32"))
    assert {s.p0 for v in book.problem(8, 2).variables for s in v.options} == {1, 2}
    with pytest.raises(UserError) as error:
        PriceBook(mlp([7, 5]), CLUSTERS["8"], Workload(1, 1, "float32")).problem(12, 12)
    assert "fc1 (linear, 7 -> 5) has no strategy on 8 devices" in str(error.value)
    assert "micro-batch of 12 rows" in str(error.value)
    with pytest.raises(UserError, match="precision 'mixed' is not defined for"):
        PriceBook(mlp([64, 32]), load_cluster("piz-daint"), Workload(1, 1, "mixed"))


def test_choice():
    problem = PriceBook(MODELS["gpt"], CLUSTERS["8"], Workload(1, 1, "mixed")).problem(64, 64)
    everything = data_parallel((8,))
    choice = problem.choice(all_layers(problem, lambda layer: everything))
    assert set(problem.strategies(choice).values()) == {everything}
    with pytest.raises(UserError, match=r"h.0.attn .* does not divide by \(1,8,1\)"):
        problem.choice(
            all_layers(problem, lambda layer: Strategy(((1, 8, 1),)) if layer.kind == "attention" else everything)
        )
    with pytest.raises(UserError, match=r"h\.1\.mlp\.c_fc is tied to h\.0\.mlp\.c_fc"):
        problem.choice(
            all_layers(problem, lambda layer: Strategy(((4, 2, 1),)) if layer.name == "h.1.mlp.c_fc" else everything)
        )


def odd_blocks() -> LayerGraph:
    """Two repetitions of a block of three matrices, with a tensor that is used twice."""
    builder = GraphBuilder("odd", "row")
    start = builder.add(linear("in", 1, 24, 24))
    block = [
        (linear("a", 1, 24, 48), [BLOCK_INPUT]),
        (linear("b", 1, 48, 24), ["a"]),
        (linear("c", 1, 24, 24), ["b"]),
        (add("sum", (1, 24)), ["c", "c", BLOCK_INPUT]),
    ]
    builder.repeat("h", 2, block, start)
    return builder.build()


@pytest.mark.parametrize("untied", [False, True])
def test_parallel_edges_are_added_up(untied):
    rng = random.Random(0)
    for cluster in (CLUSTERS["2 x 4"], CLUSTERS["12"]):
        problem = PriceBook(odd_blocks(), cluster, Workload(1, 1, "float32"), untied).problem(48, 24)
        pairs = [(edge.source, edge.target) for edge in problem.table.edges]
        assert len(set(pairs)) == len(pairs)
        assert sum(agree(problem, random_choice(problem, rng)) for _ in range(30)) > 5


@pytest.mark.slow
def test_large_model_and_cluster():
    """GPT-3 175B on 128 x 8: the table agrees there too, and its space is what it should be."""
    graph = resolve_model("gpt3-175b")
    cluster: Cluster = load_cluster("dgx-a100").resized(128, 8)
    problem = PriceBook(graph, cluster, Workload(1, 1, "mixed"), untied=True).problem(1024, 1024)
    assert len(problem.variables) == 4 - 1 + 96 * 9 + 2
    assert len(problem.table.cost[problem.table.names.index("h.7.mlp.c_fc")]) == 360
    rng = random.Random(0)
    assert agree(problem, problem.choice(all_layers(problem, lambda layer: data_parallel((128, 8)))))
    for _ in range(2):
        agree(problem, random_choice(problem, rng))
    assert problem.table.evaluate(random_choice(problem, rng)) < inf
