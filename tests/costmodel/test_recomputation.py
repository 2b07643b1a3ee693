"""Ways of recomputation on whole models: what is run again, what is kept, and what it costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.recomputation import RECOMPUTATIONS
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import ATTENTIONS, Workload
from autoddl.pipelines.joint import chain_of
from autoddl.search.options import Options, recomputations
from autoddl.zoo import Transformer, bert, gpt, llama, mlp, vgg

MODELS = {
    "gpt": gpt(Transformer("gpt", 3, 32, 4, 8, 64)),
    "dropout": gpt(Transformer("dropout", 3, 32, 4, 8, 64, dropout=True)),
    "bert": bert(Transformer("bert", 2, 32, 4, 8, 64)),
    "llama": llama(Transformer("llama", 2, 32, 4, 8, 64, kv_heads=2)),
}
CLUSTER = load_cluster("dgx-a100").resized(2, 2).with_links(latency_s=1e-6, bandwidth=1e9)


def assessed(graph: LayerGraph, strategies: dict[str, Strategy], recompute: str, attention: str) -> Assessment:
    workload = Workload(16, 8, "mixed", recompute=recompute, attention=attention)
    return assess(graph, CLUSTER, workload, strategies)


def drawn(graph: LayerGraph, cluster: Cluster, dice: random.Random) -> dict[str, Strategy]:
    """Some strategies between which all redistributions exist."""
    problem = PriceBook(graph, cluster, Workload(1, 1, "mixed")).problem(16, 8)
    while True:
        choice = tuple(dice.randrange(len(costs)) for costs in problem.table.cost)
        if problem.table.evaluate(choice) < float("inf"):
            return problem.strategies(choice)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_more_recomputation_takes_longer_and_keeps_less(model: str, attention: str) -> None:
    graph, dice = MODELS[model], random.Random(model)
    for _ in range(5):
        strategies = drawn(graph, CLUSTER, dice)
        found = {way: assessed(graph, strategies, way, attention) for way in RECOMPUTATIONS}
        for objective in ("step", "communication"):
            costs = [found[way].cost(objective) for way in RECOMPUTATIONS]
            assert costs == sorted(costs)
        kept = {way: sum(layer.work.kept_bytes for layer in one.layers) for way, one in found.items()}
        assert kept["none"] >= kept["selective"] >= kept["layers"] >= kept["blocks"]
        states = {sum(layer.work.state_bytes for layer in one.layers) for one in found.values()}
        assert len(states) == 1


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_blocks_keep_their_input_and_run_again_one_at_a_time(model: str, attention: str) -> None:
    graph, dice = MODELS[model], random.Random(model)
    strategies = drawn(graph, CLUSTER, dice)
    plain, again = (assessed(graph, strategies, way, attention).layers for way in ("none", "blocks"))
    # What one block keeps without recomputation.
    one_block = sum(one.work.kept_bytes for one in plain if one.layer.block and one.layer.block_index == 0)
    assert sum(one.work.recomputed_bytes for one in again) == pytest.approx(one_block)
    begun = set()
    for before, after in zip(plain, again):
        layer = before.layer
        assert (after.work.state_bytes, after.work.forward) == (before.work.state_bytes, before.work.forward)
        if not layer.block:  # embedding, head and loss
            assert after == before
            continue
        assert after.backward_compute_s == pytest.approx(before.backward_compute_s + before.forward_compute_s)
        repeated = before.forward_communication_s  # with the redistributions that precede the layer
        assert after.backward_communication_s == pytest.approx(before.backward_communication_s + repeated)
        # 8 samples, on 4 devices, of 2 bytes.
        is_first_of_block = layer.block_index not in begun
        begun.add(layer.block_index)
        assert after.work.kept_bytes == (8 * layer.input_elements * 2 / 4 if is_first_of_block else 0)
    assert len(begun) == 1 + max(layer.block_index for layer in graph.layers)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_the_first_blocks_alone_are_run_again(model: str, attention: str) -> None:
    """Layers of the first K blocks are as with ``blocks``, all others as with ``none``; one block's activations are made again."""
    graph, dice = MODELS[model], random.Random(model)
    strategies = drawn(graph, CLUSTER, dice)
    plain, again = (assessed(graph, strategies, way, attention).layers for way in ("none", "blocks"))
    (num_blocks,) = graph.block_runs
    for count in range(1, num_blocks + 2):
        some = assessed(graph, strategies, f"blocks:{count}", attention).layers
        for before, after, one in zip(plain, again, some):
            is_again = one.layer.block and one.layer.block_index < count
            expected = after if is_again else before
            assert replace(one, work=None) == replace(expected, work=None)
            assert one.work.kept_bytes == expected.work.kept_bytes
            assert one.work.backward == expected.work.backward
        made_again = (sum(one.work.recomputed_bytes for one in layers) for layers in (some, again))
        assert next(made_again) == pytest.approx(next(made_again))


def test_blocks_are_counted_in_the_order_of_the_model() -> None:
    """Two kinds of blocks, as an encoder and a decoder: of 2 + 3 blocks the first three are both of one and one of the other."""
    layers = [
        Layer(
            f"{block}.{index}",
            "linear",
            (4,),
            (4,),
            {"in_features": 4, "out_features": 4},
            block=block,
            block_index=index,
        )
        for block, number in (("encoder", 2), ("decoder", 3))
        for index in range(number)
    ]
    edges = tuple((one.name, other.name) for one, other in zip(layers, layers[1:]))
    graph = LayerGraph("two kinds", "row", tuple(layers), edges)
    assert graph.block_runs == (2, 3) and graph.partial_block_counts == (range(1, 3), range(3, 5))
    again = [layer.name for layer in layers if graph.place(layer.name, "blocks:3").is_recomputed]
    assert again == ["encoder.0", "encoder.1", "decoder.0"]
    assert [graph.place(name, "blocks:3").repetitions for name in again] == [2, 2, 1]
    assert all(graph.place(layer.name, "blocks:5").is_recomputed for layer in layers)


@pytest.mark.parametrize("way", ["blocks:0", "blocks:", "blocks:1-2", "blocks:-1", "Blocks", "stage", ""])
def test_what_is_no_way_of_recomputation_is_refused(way: str) -> None:
    with pytest.raises(
        UserError, match="is not one of none, selective, layers, blocks, or blocks:K with a whole number"
    ):
        Workload(8, 8, recompute=way)


@pytest.mark.parametrize("model", MODELS)
def test_selective_recomputation_runs_the_core_of_attention_again(model: str) -> None:
    graph, dice = MODELS[model], random.Random(model)
    strategies = drawn(graph, CLUSTER, dice)
    plain, again = (assessed(graph, strategies, way, "dense").layers for way in ("none", "selective"))
    for before, after in zip(plain, again):
        if before.layer.kind != "attention":
            assert after == before
            continue
        # q, k and v alone; what was kept is there while the layer runs.
        assert after.work.kept_bytes == 8 * before.layer.input_elements * 2 / 4
        assert after.work.buffer_bytes == before.work.kept_bytes
        assert after.backward_compute_s == pytest.approx(before.backward_compute_s + before.forward_compute_s)


def test_the_end_of_a_model_without_blocks_is_not_run_again() -> None:
    """The loss follows at once: it is a layer of its own behind VGG's last one, a part of a perceptron's last layer."""
    for graph, ends in ((mlp([32, 64, 64, 32]), {"fc3"}), (vgg(11, image=32), {"classifier.6", "loss"})):
        assert {layer.name for layer in graph.layers if not graph.place(layer.name, "none").is_recomputed} == ends


@pytest.mark.parametrize(
    "graph", [mlp([64] * 6), vgg(11, image=32), MODELS["gpt"], gpt(Transformer("one", 1, 32, 4, 8, 64))]
)
def test_a_stage_runs_again_what_the_whole_model_does(graph: LayerGraph) -> None:
    """However it is cut: bounds of single units hold for the stages that they are parts of."""
    chain = chain_of(graph)
    for first in range(chain.num_units):
        for stop in range(first + 1, chain.num_units + 1):
            stage = chain.stage(first, stop)
            for layer in stage.layers:
                assert (
                    stage.graph.place(layer.name, "none").is_recomputed == graph.place(layer.name, "none").is_recomputed
                )


def test_ways_on_offer() -> None:
    """Selective recomputation saves something of dense attention only, recomputation of blocks needs equal ones."""
    offered = {
        (attention, untied): recomputations(Options(attention=attention, untied=untied), MODELS["gpt"])
        for attention in ATTENTIONS
        for untied in (False, True)
    }
    assert offered == {
        ("fused", False): ("none", "layers", "blocks"),
        ("fused", True): ("none", "layers"),
        ("dense", False): ("none", "selective", "layers", "blocks"),
        ("dense", True): ("none", "selective", "layers"),
    }
    for attention in ATTENTIONS:
        options = Options(attention=attention)
        assert recomputations(options, mlp([64, 64, 64])) == ("none", "layers")
        assert recomputations(Options(attention=attention, recompute=False), MODELS["gpt"]) == ("none",)
        assert "none" not in recomputations(Options(attention=attention, recompute=True), MODELS["gpt"])
    for way in RECOMPUTATIONS:
        assert recomputations(Options(recompute=way), MODELS["gpt"]) == (way,)
