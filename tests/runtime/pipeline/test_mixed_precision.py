"""Mixed precision with the types that stand in on CPU ranks: float32 in place of half precision, with float64 masters."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.workload import Workload
from autoddl.pipelines import generate
from autoddl.pipelines.joint import chain_of
from autoddl.pipelines.runtime.pipeline.actions import Agree, Update
from autoddl.pipelines.runtime.pipeline.lowering import lower
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.zoo.transformers import gpt

from .stage_plan_cases import FAMILIES, GPT, cut_layers, random_plan, strategy_of
from .test_sharding_on_ranks import divided
from .test_stage_plans_on_ranks import gpt_case, mlp_case

JOBS = Path(__file__).with_name("mixed_jobs.py")
TIMEOUT_S = 240
#: A scale at which gradients of single precision overflow, and one at which they do not.
TOO_LARGE, SAFE = 2.0**134, 2.0**20
FEW_FAMILIES = [("1f1b", {}), ("chimera", {}), ("zero-bubble", {}), ("pipedream-2bw", {}), ("pipedream", {})]


def two_stage_gpt(name: str, options: dict[str, Any], divides_states: bool = False, **more: Any) -> dict[str, Any]:
    """A GPT whose weights are shared by the first and the last stage, unless the schedule is asynchronous."""
    schedule = generate(name, num_stages=2, num_micro_batches=4, width=2, **options)
    sizes = GPT if schedule.is_synchronous else replace(GPT, tied=False)
    rng = random.Random(3)
    graph = gpt(sizes)
    halves = cut_layers(graph, ["h.1"])
    if divides_states:
        stages = [divided(half, graph, (2,), 1, False, "none") for half in halves]
    else:
        stages = [random_plan(half, 2, 2, rng) for half in halves]
    return gpt_case(schedule, stages, sizes, optimizer=("Adam", 0.01), **more)


def one_stage_gpt(**more: Any) -> dict[str, Any]:
    schedule = generate("gpipe", num_stages=1, num_micro_batches=2, width=4)
    sizes = replace(GPT, tied=False)
    stage = random_plan(gpt(sizes).layers, 4, 4, random.Random(5))
    return gpt_case(schedule, [stage], sizes, optimizer=("Adam", 0.01), num_micro_batches=2, **more)


@pytest.mark.parametrize(
    ("name", "options", "divides_states"),
    [*((name, options, False) for name, options in FEW_FAMILIES), ("1f1b", {}, True), ("chimera", {}, True)],
)
def test_steps_that_overflow_are_skipped_by_all_ranks(ranks, name, options, divides_states):
    """With the same data in every run, training whose first run is skipped comes to the same weights, bit by bit."""
    case = two_stage_gpt(name, options, divides_states, same=True)
    num_updates = case["schedule"].num_updates
    skipping = ranks(4).run(f"{JOBS}:train", case, [TOO_LARGE, SAFE, SAFE], timeout_s=TIMEOUT_S)
    others = ranks(4).run(f"{JOBS}:train", case, [SAFE, SAFE], timeout_s=TIMEOUT_S)
    for found, other in zip(skipping, others):
        assert found["scales"][0] == TOO_LARGE / 2**num_updates
        assert (found["skipped"], other["skipped"]) == (num_updates, 0)
        for parameter, value in found["parameters"].items():
            assert value.dtype == np.float64
            np.testing.assert_array_equal(value, other["parameters"][parameter])


@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_every_schedule_agrees_before_it_updates(name, options):
    """The lowered programs pass the dry run, and every update comes after the decision."""
    for num_stages, width in ((2, 1), (4, 2)):
        schedule = generate(name, num_stages=num_stages, num_micro_batches=4, width=width, **options)
        lowered = lower(schedule, 8, agrees=True)
        for program in lowered.programs:
            decided = set()
            for action in program:
                if isinstance(action, Agree):
                    decided.add((action.stage, action.update))
                elif isinstance(action, Update):
                    assert {(None, action.task.micro_batch), (action.task.stage, action.task.micro_batch)} & decided


def test_an_update_is_that_of_single_precision(ranks):
    """Gradients are unscaled: SGD, unlike Adam, depends on their length."""
    case = {**one_stage_gpt(), "optimizer": ("SGD", 0.5)}
    (wanted,) = ranks(1).run(f"{JOBS}:train_whole", case, timeout_s=TIMEOUT_S)
    for found in ranks(4).run(f"{JOBS}:train", case, [SAFE], timeout_s=TIMEOUT_S):
        for name, value in found["parameters"].items():
            assert np.linalg.norm(value - wanted[name]) <= 1e-5 * max(np.linalg.norm(wanted[name]), 1e-2), name


def test_checkpoints_hold_masters_and_the_scale(ranks, tmp_path):
    case = two_stage_gpt("1f1b", {})
    for first, again in ranks(4).run(f"{JOBS}:resumed", case, TOO_LARGE, tmp_path, timeout_s=TIMEOUT_S):
        assert first["before"] == again["before"] == {"scale": TOO_LARGE / 2, "num_good": 0, "num_skipped": 1}
        assert first["after"] == again["after"]
        for name, value in first["parameters"].items():
            assert value.dtype == np.float64
            np.testing.assert_array_equal(value, again["parameters"][name])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_keeps_the_bytes_that_are_priced(ranks, zero):
    """Adam: 4 + 4 bytes for the copy and the gradient, and 8 + 16 for the master and its states, of each of a rank's parameters.

    Of what the four ranks divide each keeps a quarter: what is gathered is of the compute type.
    """
    case = one_stage_gpt()
    (stage,), graph = case["stages"], case["graph"]
    if zero:
        (stage,) = case["stages"] = [divided(graph.layers, graph, (4,), zero, False, "none")]
    workload = Workload(8, 4, "mixed-cpu", "adam")
    assert workload.bytes_per_parameter == 4 + 4 + 8 + 16
    priced = sum(
        layer_work(layer, stage.strategies[layer.name], workload, 4, graph.place(layer.name, "none")).state_bytes
        for layer in graph.layers
    )
    for found in ranks(4).run(f"{JOBS}:state_bytes", case, timeout_s=TIMEOUT_S):
        assert sum(found.values()) == priced
        if not zero:
            assert found["masters"] == 2 * found["copies"] == 2 * found["gradients"] == found["states"] / 2


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_stages_keep_the_bytes_that_are_priced_of_a_weight_that_they_share(ranks, name):
    """Each stage divides the masters and states of its copy over its two ranks; in Chimera a rank has both stages."""
    graph, priced = gpt(GPT), []
    halves = cut_layers(graph, ["h.1"])
    stages = [divided(half, graph, (2,), 1, False, "none") for half in halves]
    schedule = generate(name, num_stages=2, num_micro_batches=2, width=2)
    workload = Workload(8, 4, "mixed-cpu", "adam")
    for number, stage in enumerate(stages):
        layers = chain_of(graph).stage(number, number + 1)
        assert all(stage.strategies[layer.name].zero == 1 for layer in layers.layers if layer.num_parameters)
        works = [
            layer_work(layer, stage.strategies[layer.name], workload, 4, layers.graph.place(layer.name, "none"))
            for layer in layers.layers
        ]
        priced.append(sum(work.state_bytes for work in works))
    case = gpt_case(schedule, stages, optimizer=("Adam", 0.01))
    for rank, found in enumerate(ranks(4).run(f"{JOBS}:state_bytes", case, timeout_s=TIMEOUT_S)):
        assert sum(found.values()) == (sum(priced) if name == "chimera" else priced[rank // 2])


def test_products_and_statistics_have_their_types(ranks):
    for found in ranks(4).run(f"{JOBS}:types", one_stage_gpt(), timeout_s=TIMEOUT_S):
        assert found == {
            **dict.fromkeys(("x", "weight", "product"), "float32"),
            **dict.fromkeys(("variance", "sum of exponentials", "master", "optimizer state"), "float64"),
        }


def test_an_applied_module_skips_a_step_if_any_rank_overflows(ranks):
    case = one_stage_gpt()
    results = ranks(4).run(f"{JOBS}:train_applied", case, SAFE, 4, {1: 2}, timeout_s=TIMEOUT_S)
    for found in results:
        assert found["done"] == [True, False, True, True]
        assert found["scaler"] == {"scale": SAFE / 2, "num_good": 2, "num_skipped": 1}
        first, second, third, _ = found["values"]
        for name, value in first.items():
            np.testing.assert_array_equal(value, second[name])
        assert any((third[name] != value).any() for name, value in second.items())
        # The loss of the step that follows a skipped one is the loss of that one.
        assert found["losses"][2] == pytest.approx(found["losses"][1], rel=1e-12)
        assert found["losses"][3] < found["losses"][2] < found["losses"][0]


def test_applied_modules_and_the_engine_take_the_same_steps(ranks):
    case = one_stage_gpt()
    engine = ranks(4).run(f"{JOBS}:train", case, [SAFE], timeout_s=TIMEOUT_S)
    applied = ranks(4).run(f"{JOBS}:train_applied", case, SAFE, 1, {}, timeout_s=TIMEOUT_S)
    for one, other in zip(engine, applied):
        for name, value in one["parameters"].items():
            np.testing.assert_allclose(value, other["values"][0][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [(5,), (1,) * 40, (100, 1, 1, 1), (3, 50, 2, 2, 40)])
def test_steps_in_parts_are_whole_steps(ranks, sizes):
    (difference,) = ranks(1).run(f"{JOBS}:steps_in_parts", sizes, 256.0, 3)
    assert difference < 1e-14


def test_a_perceptron_of_one_rank_overflows_too(ranks):
    schedule = generate("gpipe", num_stages=1, num_micro_batches=2)
    case = mlp_case(schedule, [StagePlan({f"fc{i}": strategy_of(1, 1, 1) for i in range(1, 5)})], same=True)
    (found,) = ranks(1).run(f"{JOBS}:train", case, [TOO_LARGE, None, None], timeout_s=TIMEOUT_S)
    assert found["skipped"] == 3 and found["scales"] == [TOO_LARGE / 2, TOO_LARGE / 4, TOO_LARGE / 8]
