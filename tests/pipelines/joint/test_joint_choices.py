"""The joint search against brute force over all choices of layers: divided parameters (ZeRO), inside nodes only or over all ranks,
regathered inputs, divided experts and shared positions.

The brute force enumerates and prices these choices by itself (:mod:`.brute_force_choices`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.graph import LayerGraph
from autoddl.pipelines.joint import StageMesh
from autoddl.pipelines.joint.job import job_of
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.stage_cost import Replicas
from autoddl.pipelines.joint.stage_search import Passes, StageDemand
from autoddl.zoo.layers import GraphBuilder, attention, embedding, experts, linear, loss, norm

from .brute_force import BruteForce
from .brute_force_instances import (
    UNLIMITED,
    Gpt,
    Instance,
    Machine,
    Solved,
    evaluated,
    judge,
    random_machine,
    solve,
    solved,
)
from .comparisons import without_rivals

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def no_comparison() -> Iterator[None]:
    """The families that a plan is compared with are not what is judged here."""
    with without_rivals():
        yield


# ---- Instances ---------------------------------------------------------------------------------------------------------

#: Nodes and devices of each.
SHAPES = {
    "perceptrons": ((1, 2), (2, 1), (1, 4), (2, 2)),
    "odd perceptrons": ((1, 3), (1, 4), (2, 2), (2, 2), (4, 1)),
    "nodes of two": ((3, 2),),
    "unequal workers": ((1, 3), (3, 1), (1, 4)),
    "layers that do not divide": ((1, 3), (3, 1), (1, 4), (2, 2)),
    "attention": ((1, 2), (1, 4), (2, 2)),
    "transformers": ((1, 2), (2, 1)),
    "odd transformers": ((1, 3), (3, 1)),
    "experts": ((1, 2), (2, 2)),
    "shared weights": ((1, 2), (1, 4), (2, 2)),
}
#: Parts of the way from the least memory to that of the best plan without a limit.
LIMITS = (None, None, 0.95, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2, 0.1, 0.0, -0.1)
#: Models whose samples have several rows.
SEQUENCES = ("attention", "transformers", "odd transformers", "experts")


def tied(vocabulary: int, width: int) -> LayerGraph:
    """A table that is also the matrix of the head, with a norm between them."""
    builder = GraphBuilder("tied", "row")
    end = builder.add(embedding("wte", 1, vocabulary, width))
    end = builder.add(norm("norm", 1, width), end)
    end = builder.add(linear("head", 1, width, vocabulary, bias=False, tied_to="wte"), end)
    builder.add(loss("loss", 1, vocabulary), end)
    return builder.build()


def alike(owner: str, width: int) -> LayerGraph:
    """Four products of one shape, the third one of which has the weight of the first or of the second one."""
    builder = GraphBuilder("alike", "row")
    end = builder.add(linear("first", 1, width, width, bias=False))
    end = builder.add(linear("second", 1, width, width, bias=False), end)
    end = builder.add(linear("third", 1, width, width, bias=False, tied_to=owner), end)
    builder.add(linear("last", 1, width, width, bias=False, epilogue=("mse_loss",)), end)
    return builder.build()


def attending(rows: int, heads: int) -> LayerGraph:
    """Causal attention between two products, over a table."""
    builder = GraphBuilder("attending", "sequence")
    end = builder.add(embedding("wte", rows, 16, 16))
    end = builder.add(linear("qkv", rows, 16, 48), end)
    end = builder.add(attention("attention", rows, heads, 16 // heads, causal=True), end)
    builder.add(linear("out", rows, 16, 16, epilogue=("mse_loss",)), end)
    return builder.build()


def attending_before_experts() -> LayerGraph:
    """Causal attention, and experts behind it, which may be in another stage."""
    builder = GraphBuilder("ordered", "sequence")
    end = builder.add(linear("qkv", 16, 16, 48))
    end = builder.add(attention("attention", 16, 1, 16, causal=True), end)
    end = builder.add(linear("out", 16, 16, 16), end)
    gate = builder.add(linear("gate", 16, 16, 4, bias=False), end)
    end = builder.add(experts("experts", 16, 16, 64, num=4, per_token=2, capacity=8), end, gate)
    builder.add(loss("loss", 16, 16), end)
    return builder.build()


def mixture(rows: int, inner: int, num: int) -> LayerGraph:
    """Two products, the second one of which chooses experts, and the experts."""
    builder = GraphBuilder("mixture", "sequence")
    up = builder.add(linear("up", rows, 16, 16, bias=False))
    gate = builder.add(linear("gate", rows, 16, num, bias=False), up)
    end = builder.add(experts("experts", rows, 16, inner, num=num, per_token=2, capacity=rows // 2), up, gate)
    end = builder.add(linear("down", rows, 16, 16), end)
    builder.add(loss("loss", rows, 16), end)
    return builder.build()


def random_choices(dice: random.Random, kind: str) -> Instance:
    """A problem with so many samples for each weight that dividing samples sends least, and parameters need most of the memory."""
    batch = dice.choice((8, 16, 64) if kind in SEQUENCES else (64, 128, 256))
    machine = random_machine(dice, "two levels", batch)
    nodes, devices = dice.choice(SHAPES[kind])
    between, inside = machine.links
    if dice.random() < 0.7:  # slow links between nodes
        between = inside[0] * dice.choice((1, 4)), inside[1] / dice.choice((4, 16, 64))
    machine = replace(machine, nodes=nodes, devices=devices, links=(between, inside))
    model: tuple[int, ...] | Gpt | LayerGraph
    if kind == "transformers":
        model = Gpt(dice.choice((2, 3)), 32, dice.choice((4, 16)), 64, dice.random() < 0.5)
    elif kind == "odd transformers":
        # Features that do not divide over 2 or 3 devices: only samples are split.
        model = Gpt(dice.choice((4, 5, 6)), 5, dice.choice((4, 16)), 35, dice.random() < 0.5, heads=5)
    elif kind == "attention":
        model = attending(dice.choice((4, 16)), dice.choice((2, 4)))
    elif kind == "shared weights":
        width = dice.choice((16, 64, 35))
        model = dice.choice((tied(dice.choice((16, 64, 256)), width), alike(dice.choice(("first", "second")), width)))
    elif kind == "experts":
        model = mixture(dice.choice((4, 16)), dice.choice((8, 256)), dice.choice((4, 6)))
    elif kind == "nodes of two":
        model = tuple(dice.choices((dice.choice((35, 65)), 125), k=dice.choice((4, 5))))
    elif kind == "layers that do not divide":
        batch = dice.choice((2, 3, 4))
        model = tuple(dice.choices((36, 72, 144, 35), k=dice.choice((3, 4, 5))))
    elif kind == "odd perceptrons":
        model = tuple(dice.choices((dice.choice((35, 65, 125)), 125), k=dice.choice((6, 7, 8))))
    else:
        unit = 3 if 3 in (nodes, devices) else 1
        model = tuple(unit * width for width in dice.choices((32, 64, 128, 256), k=dice.choice((3, 4, 5))))
    divisors = [size for size in range(1, batch + 1) if batch % size == 0 and batch // size <= 4]
    return Instance(
        model,
        machine,
        batch,
        micro_batch=dice.choice(divisors),
        recompute=dice.choice(("layers", "blocks", False) if kind == "odd transformers" else (None, False, False)),
        limit=dice.choice(LIMITS),
        zero="auto",
        activations="auto",
    )


# ---- The joint search --------------------------------------------------------------------------------------------------

#: Instances of each kind.
EXAMPLES = {
    "perceptrons": 6,
    "odd perceptrons": 4,
    "nodes of two": 5,
    "unequal workers": 4,
    "layers that do not divide": 8,
    "attention": 5,
    "transformers": 5,
    "odd transformers": 2,
    "experts": 5,
    "shared weights": 4,
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_joint_plan_is_the_best_of_all_choices(kind: str) -> None:
    """Plans with and without memory limits, beside all configurations with all choices of all layers."""

    @settings(max_examples=EXAMPLES[kind], phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(st.randoms(use_true_random=True))
    def check(dice: random.Random) -> None:
        judge(solved(dice, kind, random_choices))

    check()


def test_workers_of_one_device_exchange_gradients_of_a_shared_weight() -> None:
    """They have no gradients to all-reduce, but both ends of tied embeddings; the exchange decides which plan is the best."""
    judge(solved(random.Random(52682), "transformers", random_choices))


#: Random problems (kind, seed) whose best plan has a pipeline, and what is chosen there.
CHOSEN = (
    ("nodes of two", 31, {"zero1", "zero2", "zero3", "hybrid"}),
    ("nodes of two", 145, {"zero1", "zero2", "zero3", "hybrid"}),
    ("odd perceptrons", 26, {"zero1", "zero2"}),
    ("odd perceptrons", 28, {"zero1", "zero2", "zero3"}),
    ("attention", 1, {"zero1", "zero2", "zero3"}),
    ("attention", 3, {"zero1", "regathers"}),
    ("attention", 55, {"regathers"}),
    ("experts", 93, {"zero1", "experts 2"}),
)


@pytest.mark.parametrize(("kind", "seed", "words"), CHOSEN)
def test_best_pipelines_need_choices(kind: str, seed: int, words: set[str]) -> None:
    """With memory limits at which the best pipelines divide gradients, weights or experts, or gather inputs again."""
    instance = random_choices(random.Random(seed), kind)
    brute = BruteForce(instance.job)
    case = solve(instance, brute, brute.best())
    assert case.best is not None and len(case.best.rectangles) > 1
    assert {
        word for one in case.best.stages for strategy in one.strategies.values() for word in strategy.words
    } == words
    judge(case)


#: Seeds of problems whose best plan has the ends of a shared weight in two stages, and the stages of ZeRO that it has there.
SHARED = ((0, (1, 1)), (150, (0, 1)), (215, (1, 1)), (305, (0, 1)))


@pytest.mark.parametrize(("seed", "zeros"), SHARED)
def test_stages_divide_the_states_of_a_weight_that_they_share(seed: int, zeros: tuple[int, int]) -> None:
    """Both of the stages, or one of them."""
    instance = random_choices(random.Random(seed), "shared weights")
    brute = BruteForce(instance.job)
    case = solve(instance, brute, brute.best())
    assert case.best is not None
    homes = [next(one for one in case.best.stages if name in one.strategies) for name in brute.stages.tie]
    assert homes[0] is not homes[1]
    assert tuple(home.strategies[name].zero for home, name in zip(homes, brute.stages.tie)) == zeros
    judge(case)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_random_choices_cost_what_is_evaluated(kind: str) -> None:
    """Configurations of any schedules, cuts and ways that no others dominate."""

    @settings(max_examples=10, phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(st.randoms(use_true_random=True))
    def check(dice: random.Random) -> None:
        instance = random_choices(dice, kind)
        brute = BruteForce(instance.job)
        pipelines = [one for one in brute.settings() if one[1] is not None]
        for rectangles, family, size in dice.sample(pipelines, min(4, len(pipelines))):
            program = brute.program(rectangles, family, size)
            batches = list(brute.batches(rectangles, family, program, size, UNLIMITED))
            for batch in dice.sample(batches, min(4, len(batches))):
                one = batch.only(np.array([dice.randrange(len(batch.taken[0]))]))
                (step,) = program.makespans(brute.times(rectangles, family, program, one))
                found = brute.found(rectangles, family, program, size, one, 0, step)
                known = evaluated(instance.job, found)
                assert known.step_s == pytest.approx(found.step_s, rel=1e-9), f"{instance}: {found}"
                assert known.memory_bytes == pytest.approx(found.memory_bytes, rel=1e-9), f"{instance}: {found}"

    check()


@pytest.mark.parametrize(
    ("zero", "shares", "words"),
    [
        (0, True, ""),
        (1, True, ""),
        (2, False, "ZeRO 2 (without schedules that split or halve backward passes), "),
        (3, True, "ZeRO 3 (1 of weights that layers share; without schedules that split or halve backward passes), "),
        ("auto", False, "ZeRO 0 to 3 for every layer (at most 1 where backward passes are split or halved), "),
        (
            "auto",
            True,
            "ZeRO 0 to 3 for every layer (at most 1 of weights that layers share, and where backward passes are split or halved), ",
        ),
    ],
)
def test_certificate_says_what_is_divided(zero: int | str, shares: bool, words: str) -> None:
    """And what cannot be."""
    machine = Machine(1, 2, ((0.0, 1e9), (0.0, 1e10)), flops=1e10, memory_bandwidth=1e11, launch_s=0.0)
    instance = Instance(tied(16, 16) if shares else (16, 16, 16), machine, 4, 2, recompute=False, zero=zero)
    considered = plan_jointly(instance.graph, machine.cluster, instance.options(UNLIMITED)).considered
    assert (
        considered is not None
        and f"without Summa meshes (summa=True includes them), {words}one choice" in considered.space
    )


# ---- Faults that brute force has found -----------------------------------------------------------------------------------


def test_stage_with_both_ends_of_a_shared_weight_has_it_once() -> None:
    """A plan fits, whose first stage has a table and the head that shares it.  It was ruled out as if both were stored."""
    links = ((0.0, 171875000.0), (3.6175872e-05, 40625000.0))
    machine = Machine(2, 2, links, flops=1e10, memory_bandwidth=9218750000.0, launch_s=2.6738688e-07)
    instance = Instance(tied(16, 16), machine, 64, 64, recompute=False, zero="auto", activations="auto")
    best = BruteForce(instance.job).best(4904.3)
    assert best is not None and [one.stop - one.first for one in best.stages] == [3, 1]
    planned = plan_jointly(instance.graph, machine.cluster, instance.options(4904.3))
    assert planned.evaluation.memory_bytes <= 4904.3
    assert planned.lower_bound_s <= best.step_s * (1 + 1e-9)


def test_layer_that_does_not_divide_over_a_wide_worker_is_on_a_narrow_one() -> None:
    """One sample, and a product of odd features, which one device computes; two others share another product."""
    machine = Machine(1, 3, ((0.0, 1e9), (0.0, 1e10)), flops=1e10, memory_bandwidth=1e11, launch_s=0.0)
    for model in ((256, 256, 35, 35), (35, 35, 256, 256)):
        instance = Instance(model, machine, 4, 1, recompute=False)
        best = BruteForce(instance.job).best()
        assert best is not None and {one.num_devices for one in best.rectangles} == {1, 2}
        judge(Solved(instance, UNLIMITED, best, best))


def test_units_do_not_add_up_the_weights_that_one_recomputed_block_gathers() -> None:
    """A stage of five blocks needs at least what its units are said to need, where weights are divided (ZeRO 3)."""
    machine = Machine(2, 1, ((0.0, 1e9), (0.0, 1e9)), flops=1e10, memory_bandwidth=1e9, launch_s=0.0)
    instance = Instance(Gpt(7, 5, 4, 35, False, heads=5), machine, 2, 2, "blocks", zero="auto", activations="auto")
    explorer = job_of(instance.graph, machine.cluster, instance.options(UNLIMITED)).explorer()
    search, passes = explorer.stage_search(StageMesh(2, 1)), Passes(2, 2, Replicas())
    needed = search.least_memory(1, 6, "blocks", passes, StageDemand(1.0, 1), has_buffer=False)
    weights = np.array([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]])
    least = search.unit_bounds.least("blocks", passes.replicas, 2, 2, weights)
    assert least is not None and least[0, 1:6].sum() <= needed


def test_one_recomputed_block_gathers_its_weights_at_a_time() -> None:
    """The plan of the least memory divides the weights of recomputed blocks."""
    links = ((3.538944e-07, 234375000.0), (3.538944e-07, 937500000.0))
    machine = Machine(1, 3, links, flops=1e10, memory_bandwidth=7.75e9, launch_s=8.454144e-08)
    model = Gpt(4, 5, 4, 35, True, heads=5)
    instance = Instance(model, machine, 8, 4, "blocks", limit=0.0, zero="auto", activations="auto")
    brute = BruteForce(instance.job)
    judge(solve(instance, brute, brute.best()))


def test_no_stage_mirrors_positions_that_experts_of_another_stage_need_in_order() -> None:
    """Ranks that share the samples of causal attention change the order of positions in all stages."""
    machine = Machine(1, 4, ((0.0, 1e9), (0.0, 2e9)), flops=1e10, memory_bandwidth=1e10, launch_s=0.0)
    instance = Instance(attending_before_experts(), machine, 2, 1, recompute=False)
    brute = BruteForce(instance.job)
    judge(solve(instance, brute, brute.best()))
