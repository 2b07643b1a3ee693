"""Plans applied to modules on real ranks: loss, gradients, steps and bytes, training, checkpoints, refusals."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.collectives import all_reduce_steps, gather_steps
from autoddl.costmodel.graph import Layer, LayerGraph, Parameter
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import baselines
from autoddl.search.planner import Options, make_plan
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.layers import GraphBuilder, conv2d, linear, loss, opaque
from autoddl.zoo.transformers import Transformer, bert, gpt, llama

from .random_strategies import random_strategies
from .sent_bytes import Sent, check_sent

JOBS = Path(__file__).with_name("applied_jobs.py")
GPT = Transformer("gpt", layers=2, width=64, heads=8, sequence=16, vocabulary=128)
BERT = Transformer("bert", layers=1, width=64, heads=4, sequence=16, vocabulary=128)
LLAMA = Transformer(
    "llama",
    1,
    width=64,
    heads=8,
    sequence=16,
    vocabulary=128,
    kv_heads=4,
    intermediate=128,
    activation="silu",
    tied=False,
)
WIDTHS = (64, 128, 96, 32)


@dataclass(frozen=True)
class Case:
    """What is applied, with a cluster of the right shape to price it on (its speeds do not matter)."""

    model: str
    sizes: object
    graph: LayerGraph
    strategies: dict[str, Strategy]
    workload: Workload

    @property
    def arguments(self):
        return self.model, self.sizes, self.graph, self.strategies, self.workload

    @property
    def num_ranks(self):
        return next(iter(self.strategies.values())).num_devices

    def assessment(self):
        return assess(self.graph, cluster_of(self.strategies), self.workload, self.strategies)


def cluster_of(strategies):
    sizes = [p0 * p1 * p2 for p0, p1, p2 in next(iter(strategies.values())).splits]
    cluster = load_cluster("dgx-a100").resized(*((1, *sizes) if len(sizes) == 1 else sizes))
    return replace(cluster, device=replace(cluster.device, peak_flops={"float32": 1e12}))


def on(*splits, summa=False):
    return Strategy(splits, summa=summa)


def mlp_case(strategies, widths=WIDTHS, batch=8, **workload):
    chosen = {f"fc{i + 1}": strategy for i, strategy in enumerate(strategies)}
    return Case(
        "mlp", widths, mlp(widths), chosen, Workload(batch, workload.pop("micro_batch", batch), "float32", **workload)
    )


def random_case(model, sizes, level_sizes, seed, summa=False, **workload):
    """A random strategy for every layer that divides it; tied layers transposed."""
    graph = {"gpt": gpt, "bert": bert, "llama": llama}[model](sizes)
    strategies = random_strategies(graph, level_sizes, seed, summa)
    return Case(model, sizes, graph, strategies, Workload(8, 8, "float32", **workload))


def pictures_graph(classes, dropout=False, with_loss=True):
    builder = GraphBuilder("pictures", "image")
    end = builder.chain(
        builder.add(conv2d("features.0", (3, 16, 16), 8, kernel_size=3, padding=1, epilogue=("relu",))),
        [
            opaque("features.2", (8, 16, 16), (8, 8, 8)),
            conv2d("features.3", (8, 8, 8), 16, kernel_size=3, padding=1, epilogue=("relu",)),
            opaque("scale", (16, 8, 8), (16, 8, 8), parameters=[Parameter("scale.weight", (8,))]),
            linear("classifier.0", 1, 1024, 64, epilogue=("relu", "dropout") if dropout else ("relu",)),
            linear("classifier.3", 1, 64, classes),
        ],
    )
    if with_loss:
        builder.add(loss("loss", 1, classes), end)
    return builder.build()


def pictures_strategies(p):
    whole, half = on((p, 1, 1)), on((p // 2, 2, 1))
    chosen = dict.fromkeys(("features.0", "features.2", "features.3", "scale"), whole)
    return {**chosen, "classifier.0": on((1, p // 2, 2)), "classifier.3": on((p // 2, 1, 2)), "loss": half}


# ---- Against one device and against the price list ---------------------------------------------------------------------------


def counted(steps):
    return Counter((s.collective.value, s.axis.size, s.axis.stride, s.nbytes) for s in steps if s.axis.size > 1)


def expected_steps(case):
    """The priced steps of each phase of each layer."""
    return {
        (found.layer.name, phase): steps
        for found in case.assessment().layers
        for phase, steps in (
            ("forward", found.forward_steps),
            ("backward", found.backward_steps),
            ("gradient", found.work.gradient),
        )
    }


def unpriced(layer: Layer, strategy, phase, number_bytes=4.0):
    """What nobody prices: gathering a number of each rank for the loss, and Summa's sum of a bias's gradient over its rows."""
    if phase == "forward" and (layer.kind == "loss" or "mse_loss" in layer.epilogue):
        axes = [axis for which in range(1 if layer.kind == "loss" else 3) for axis in strategy.axes(which)]
        return counted(gather_steps(axes, number_bytes * math.prod(axis.size for axis in axes)))
    biases = [p for p in layer.parameters if len(p.shape) == 1]
    if strategy.summa and biases and phase == "gradient":
        nbytes = 4 * sum(p.num_elements for p in biases) / strategy.p1
        return counted(all_reduce_steps(strategy.axes(0), nbytes))
    return Counter()


def check_pass(case, ranks, counts_sections=False, counts_pass=False):
    """Loss and gradients within 1e-5 of one device, the steps of every phase those that were priced, and the bytes."""

    def run():
        return ranks(case.num_ranks).run(f"{JOBS}:run_pass", *case.arguments, counts_sections, counts_pass)

    results = run()
    check_values(case, results)
    if counts_sections or counts_pass:
        check_sent(case.num_ranks, sent_by(case, results), lambda: sent_by(case, run()))
    return results


def check_values(case, results):
    priced = expected_steps(case)
    for rank, result in enumerate(results):
        assert result["loss"] == pytest.approx(result["reference"], rel=1e-5)
        assert result["traced_loss"] == pytest.approx(result["reference"], rel=1e-5)
        for errors in (result["errors"], result["traced_errors"]):
            assert max(errors.values()) < 1e-5, (rank, max(errors.items(), key=lambda item: item[1]))
        ran = {key: Counter() for key in priced}
        for section in result["sections"]:
            ran[section["layer"], section["phase"]] += section["steps"]
        for (name, phase), steps in priced.items():
            extra = unpriced(case.graph[name], case.strategies[name], phase, float(case.workload.itemsize))
            assert ran[name, phase] - extra == counted(steps), (rank, name, phase)


def sent_by(case, results):
    """Wherever something was counted, beside the priced bytes."""
    n, found, priced = case.num_ranks, [], expected_steps(case)
    for parts in zip(*(result["sections"] for result in results)):
        if parts[0]["payload"] is not None:
            what = parts[0]["layer"], parts[0]["phase"]
            sent = n * sum(step.sent_bytes for step in priced[what])
            found.append(Sent(" ".join(what), parts[0]["payload"], sent, sum(part["messages"] for part in parts)))
    if results[0]["payload"] is not None:
        sent = n * sum(step.sent_bytes for steps in priced.values() for step in steps)
        found.append(Sent("a pass", results[0]["payload"], sent, sum(result["messages"] for result in results)))
    return found


MLP_STRATEGIES = {
    "2": (on((2, 1, 1)), on((1, 2, 1)), on((1, 1, 2))),
    "4": (on((4, 1, 1)), on((1, 2, 2)), on((2, 1, 2))),
    "4 read": (on((1, 2, 2)), on((2, 2, 1)), on((1, 1, 4))),
    "4 summa": (on((2, 2, 1), summa=True), on((1, 2, 2)), on((2, 2, 1), summa=True)),
    "2x2": (on((2, 1, 1), (1, 2, 1)), on((1, 1, 2), (1, 2, 1)), on((1, 2, 1), (2, 1, 1))),
    "8": (on((2, 2, 2)), on((1, 2, 4)), on((4, 1, 2))),
    "2x4 summa": (on((1, 2, 1), (1, 2, 2)), on((2, 1, 1), (2, 2, 1), summa=True), on((1, 1, 2), (2, 2, 1))),
}


@pytest.mark.parametrize("name", MLP_STRATEGIES)
def test_a_perceptron_of_mixed_strategies(ranks, name):
    case = mlp_case(MLP_STRATEGIES[name])
    check_pass(case, ranks)


def test_bytes_of_every_layer_forward_backward_and_of_gradients(counted_ranks):
    case = mlp_case(MLP_STRATEGIES["4"], widths=(256, 512, 384, 256), batch=256)

    def count():
        results = counted_ranks(4).run(f"{JOBS}:run_pass", *case.arguments, True, True)
        check_values(case, results)
        found = sent_by(case, results)
        # With messages of this size the raw bytes of the pass, nothing subtracted, are within 3 % too.
        total = 4 * sum(layer.sent_bytes for layer in case.assessment().layers)
        return [*found, Sent("a pass, raw", results[0]["payload"], total, num_readings=0)]

    check_sent(4, count(), count)


ONE_BLOCK = replace(GPT, layers=1)
TRANSFORMERS = {
    "gpt on 2": random_case("gpt", GPT, (2,), 1),
    "gpt on 2x2, recomputed": random_case("gpt", ONE_BLOCK, (2, 2), 3, recompute="blocks"),
    "gpt on 1, blocks recomputed": random_case("gpt", GPT, (1,), 2, recompute="blocks"),
    "gpt on 2, one block of two recomputed": random_case("gpt", GPT, (2,), 2, recompute="blocks:1"),
    "gpt on 2, attention recomputed": random_case("gpt", GPT, (2,), 5, recompute="selective", attention="dense"),
    "llama on 4, blocks recomputed": random_case("llama", LLAMA, (4,), 5, recompute="blocks"),
    "gpt on 4, summa": random_case("gpt", ONE_BLOCK, (4,), 4, summa=True),
    "bert on 2": random_case("bert", BERT, (2,), 7),
    "llama on 2": random_case("llama", LLAMA, (2,), 9),
    "llama on 4, recomputed": random_case("llama", replace(LLAMA, kv_heads=2), (4,), 9, recompute="layers"),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_at_random_strategies(ranks, name):
    case = TRANSFORMERS[name]
    results = check_pass(case, ranks)
    names = {p.name for layer in case.graph.layers for p in layer.parameters if not p.tied_to}
    if name == "llama on 4, recomputed":  # the 2 heads of keys do not divide over 4, their slices beside query heads do
        assert case.strategies["layers.0.self_attn.q_proj+k_proj+v_proj"].p1 == 4
    assert set(results[0]["names"]) == names


@pytest.mark.parametrize(
    ("which", "sizes", "level_sizes"),
    [("optimal", ONE_BLOCK, (4,)), ("optimal", ONE_BLOCK, (2, 2)), ("megatron", GPT, (2, 2))],
    ids=["optimal-(4,)", "optimal-(2, 2)", "megatron-(2, 2)"],
)
def test_gpt_at_optimal_and_megatron_plans(counted_ranks, which, sizes, level_sizes):
    graph = gpt(sizes)
    cluster = cluster_of({"": on(*((size, 1, 1) for size in level_sizes))})
    if which == "optimal":
        options = Options(batch=8, micro_batch=8, precision="float32", recompute=False, objective="communication")
        strategies = make_plan(graph, cluster, options).strategies
    else:
        members = [b for b in baselines(graph, level_sizes) if b.name == "megatron"]
        strategies = next(b.strategies for b in members if {s.p0 for s in b.strategies.values()} == {2})
    case = Case("gpt", sizes, graph, strategies, Workload(8, 8, "float32"))
    check_pass(case, counted_ranks, counts_pass=True)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_convolutions_and_the_unknown_split_samples(ranks, num_ranks):
    graph = pictures_graph(8)
    case = Case(
        "pictures",
        (8,),
        graph,
        pictures_strategies(num_ranks),
        Workload(8, 8, "float32", recompute="layers" if num_ranks == 4 else "none"),
    )
    check_pass(case, ranks)


# ---- Parameters ------------------------------------------------------------------------------------------------------------


def test_parameters_are_global_tensors_at_the_layouts_of_the_plan(ranks):
    case = mlp_case((on((4, 1, 1)), on((1, 2, 2)), on((2, 1, 2))))
    layouts = ranks(4).run(f"{JOBS}:run_pass", *case.arguments)[0]["layouts"]
    split0, split1, copy = "oneflow.sbp.split(dim=0)", "oneflow.sbp.split(dim=1)", "oneflow.sbp.broadcast"
    # On the mesh (2, 2) of all three strategies; OneFlow keeps weights as (out, in).
    assert layouts["fc1.weight"] == ((copy, copy), (128, 64))
    assert layouts["fc2.weight"] == ((split0, split1), (96, 128))
    assert layouts["fc3.weight"] == ((copy, split1), (32, 96))


OPTIMIZED = {
    "gpt": (random_case("gpt", ONE_BLOCK, (2,), 11), ["adamw"]),
    "gpt, blocks recomputed in 2 micro-batches": (
        replace(random_case("gpt", GPT, (2,), 11), workload=Workload(16, 8, "float32", recompute="blocks")),
        ["sgd"],
    ),
    "mlp": (mlp_case(MLP_STRATEGIES["2x2"], batch=16, micro_batch=8), ["sgd", "momentum", "adam", "adamw"]),
}


@pytest.mark.parametrize("name", OPTIMIZED)
def test_steps_of_optimizers(ranks, name):
    case, optimizers = OPTIMIZED[name]
    for result in ranks(case.num_ranks).run(f"{JOBS}:train", *case.arguments, optimizers):
        assert set(result) == set(optimizers)
        for optimizer, errors in result.items():
            assert max(errors.values()) < 1e-4, (optimizer, max(errors.items(), key=lambda item: item[1]))


def test_checkpoints_move_between_plans(ranks):
    first, second = random_case("bert", BERT, (4,), 12), random_case("bert", BERT, (2, 2), 13)
    for result in ranks(4).run(f"{JOBS}:move_between_plans", "bert", BERT, first.arguments[2:], second.arguments[2:]):
        assert result["names"][0] == result["names"][1]
        assert result["unchanged"]
        assert max(result["errors"].values()) < 1e-5
        assert result["lacks"] == "the state_dict lacks 'embeddings.word_embeddings.weight'"
        assert result["unknown"] == "the state_dict holds 'nonsense', which the model has not"
        assert "word_embeddings.weight has shape (3, 3), should have (128, 64)" in result["shape"]


def test_initial_values_are_the_first_ranks(ranks):
    case = mlp_case(MLP_STRATEGIES["4"])
    results = ranks(4).run(f"{JOBS}:own_initial_values", *case.arguments[1:])
    first = results[0][1]
    for rank, (state, own) in enumerate(results):
        assert np.array_equal(state, first)
        assert np.array_equal(own, first) == (rank == 0)


# ---- Passes ----------------------------------------------------------------------------------------------------------------


def test_gradients_of_micro_batches_are_summed_once(ranks):
    case = mlp_case(MLP_STRATEGIES["4"], batch=32, micro_batch=8)
    expected = Counter()
    for (_, phase), steps in expected_steps(case).items():
        for step, count in counted(steps).items():
            expected[step] += count * (1 if phase == "gradient" else 4)
    expected["all-gather", 2, 2, 8.0] += 4  # the means
    expected["all-gather", 2, 1, 16.0] += 4
    for result in ranks(4).run(f"{JOBS}:micro_batches", *case.arguments):
        assert result["steps"] == expected
        assert max(result["once"].values()) < 1e-5
        assert max(result["each"].values()) < 1e-5


def test_a_model_without_a_loss_gives_its_output_everywhere(ranks):
    graph = pictures_graph(8, with_loss=False)
    strategies = {name: s for name, s in pictures_strategies(4).items() if name != "loss"}
    for result in ranks(4).run(f"{JOBS}:outputs", (8,), graph, strategies, Workload(8, 8, "float32")):
        assert max(result["error"], result["no_grad"], result["checked"]) < 1e-5
        assert result["kept"]  # the comparison left the user's gradients and modes alone
        assert max(result["errors"].values()) < 1e-5
        assert max(result["traced_errors"].values()) < 1e-5


def test_dropout_is_repeated_by_recomputation_and_absent_outside_of_training(ranks):
    graph = pictures_graph(8, dropout=True)
    # Both dense layers, the first with a dropout, are one block.
    layers = [
        replace(layer, block="dense", role=layer.name) if layer.name.startswith("classifier") else layer
        for layer in graph.layers
    ]
    graph = replace(graph, layers=tuple(layers))
    for result in ranks(4).run(f"{JOBS}:drop", (8, 0.5), graph, pictures_strategies(4), Workload(8, 8, "float32")):
        (first, second), *again = result["losses"]
        assert len(again) == len(result["errors"]) == 2
        assert again == [pytest.approx([first, second], rel=1e-6)] * 2
        assert abs(first - second) > 1e-4  # another pass, another draw
        assert all(max(errors.values()) < 1e-5 for errors in result["errors"])
        assert result["eval"][0] == pytest.approx(result["eval"][1], rel=1e-5)


def test_what_does_not_fit_is_refused_with_the_difference_named(ranks):
    case = mlp_case(MLP_STRATEGIES["4"])
    found = ranks(4).run(f"{JOBS}:refusals", *case.arguments[1:])[3]
    assert found["shape"] == (
        "the plan was made for another model: parameter fc3.weight has shape (32, 96) in the plan, "
        "and (64, 96) in the model"
    )
    other = "the plan was made for another model: the model has parameter {}, which the plan does not contain"
    assert found["more"] == other.format("fc4.weight")
    assert found["extra"] == other.format("fc1.bias")
    assert "parameter fc2.weight has shape (96, 128) in the plan, and (32, 96) in the model" in found["shared"]
    assert found["ranks"] == "the plan is for 2 ranks, this job has 4"
    assert found["older"].startswith("the plan was made for another model than mlp:64,128,96,32: ")
    assert "fc1 (linear, 64 -> 128): the operation 'swirl' after it is not supported" in found["epilogue"]
    assert "the plan was made without dropout, but drop has p = 0.5" in found["dropout"]
    assert "the plan's graph does not compute what OtherPerceptron does: its loss is " in found["function"]
    assert "fc1 (linear, 64 -> 128): 6 samples do not divide into the 4 parts of strategy (4,1,1)" in found["samples"]
    assert found["arguments"] == "a forward pass takes the inputs and then the targets; it was given 1 argument(s)"
    assert found["feeds"] == "layer 'fc2' reads no input of the model; the layers that do are fc1"
    assert "not inside nn.Graph" in found["graph"]
