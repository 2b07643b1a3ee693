"""What dividing saves, in words and figures, and where weights and states lie, against what ranks store."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.sbp import Split
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.explain.savings import savings_of
from autoddl.pipelines.runtime.comm.layouts import layout_of
from autoddl.pipelines.runtime.comm.parameter_layouts import expert_layouts, linear_layouts
from autoddl.planfile import unpipelined_plan
from autoddl.zoo import mlp, resolve_model
from autoddl.zoo.layers import linear

CLUSTER = load_cluster("dgx-a100").resized(2, 4)
GIB = 2**30


def split_over(distribution):
    return prod(axis.size for axis, state in zip(distribution.axes, distribution.states) if isinstance(state, Split))


MESHES = (((2, 1, 1), (4, 1, 1)), ((2, 1, 1), (2, 2, 1)), ((1, 2, 1), (2, 1, 2)))


@pytest.mark.parametrize(
    ("splits", "zero", "hybrid"),
    [(splits, zero, False) for splits in MESHES for zero in range(4)]
    + [(splits, zero, True) for splits in MESHES[:2] for zero in (2, 3)],
)
def test_stored_layouts_are_those_of_ranks(splits, zero, hybrid):
    """The elements that a rank stores of a weight, and accumulates of its gradient, are what the printed SBP leaves of it."""
    layer, strategy = linear("fc", 4, 64, 32, bias=False), Strategy(splits, zero=zero, hybrid=hybrid)
    (layout,) = linear_layouts({"fc.weight": 32}, {}, 64, layout_of(layer, strategy))
    printed, own = strategy.sbp(layer), prod(layout.local_shape())
    copies = prod(axis.size for axis in layout.reduced)
    inner = prod(axis.size for axis in layout.inner)
    held = {"parameter": own // (inner if zero == 3 else 1), "gradient": own // (inner if zero > 1 else 1)}
    held["state"] = own // (copies if zero else 1)
    assert {name: 64 * 32 // split_over(printed[name]) for name in held} == held
    assert 64 * 32 // split_over(printed["weight"]) == own


def test_experts_are_a_part_of_the_samples_ranks():
    graph = resolve_model("moe:1x256", heads=4, sequence=64, vocabulary=512)
    layer = next(layer for layer in graph.layers if layer.kind == "experts")
    strategy = Strategy(((2, 1, 1), (4, 1, 1)), experts=(1, 4), zero=1)
    shapes = {p.name: p.shape for p in layer.parameters}
    layouts = expert_layouts(shapes, dict.fromkeys(shapes, 1), layout_of(layer, strategy))
    printed = strategy.sbp(layer)
    for layout in layouts:
        own = prod(layout.local_shape())
        assert prod(layout.shape) // split_over(printed["parameter"]) == own
        assert own // split_over(printed["state"]) * split_over(printed["parameter"]) == layout.shard_length


def plan_of(strategies, graph, batch=64, **workload):
    return unpipelined_plan(graph, CLUSTER, Workload(batch, batch, "mixed", **workload), strategies)


def test_savings_are_differences_of_two_plans():
    graph = mlp((4096, 8192, 4096))
    dp = ((2, 1, 1), (4, 1, 1))
    strategies = {"fc1": Strategy(dp, zero=1), "fc2": Strategy(dp, zero=3)}
    plan = plan_of(strategies, graph)
    ones, threes = sorted(savings_of(plan, 80 * GIB), key=lambda saving: saving.layers)
    for saving, name in ((ones, "fc1"), (threes, "fc2")):
        without = {**strategies, name: Strategy(dp)}
        other = assess(graph, CLUSTER, plan.workload, without)
        assert saving.layers == (name,) and saving.fits
        assert saving.saved_bytes == pytest.approx(other.memory_bytes - plan.evaluation.memory_bytes)
        assert saving.extra_s == pytest.approx(plan.evaluation.step_s - other.step_s)
    # 32 Mi weights: 12 bytes of states each, of which a device keeps an eighth.
    assert ones.saved_bytes == pytest.approx(2**25 * 12 * 7 / 8)
    assert ones.choice == "states split over 8 devices"
    assert threes.choice == "weights, gradients and states split over 8 devices" and threes.extra_s > 0
    assert f"a step takes {format_seconds(threes.extra_s)} more" in threes.sentence
    (tight, _) = sorted(savings_of(plan, plan.evaluation.memory_bytes), key=lambda saving: saving.layers)
    assert not tight.fits and "does not fit without it" in tight.sentence


def test_one_sentence_for_all_layers_of_a_choice():
    graph = mlp((1024,) * 5)
    dp = Strategy(((2, 1, 1), (4, 1, 1)))
    hybrid = replace(dp, zero=2, hybrid=True)
    strategies = {"fc1": hybrid, "fc2": replace(dp, zero=1), "fc3": replace(dp, zero=1), "fc4": dp}
    found = savings_of(plan_of(strategies, graph), 80 * GIB)
    assert [saving.layers for saving in found] == [("fc2", "fc3"), ("fc1",)]
    assert found[1].choice == "gradients and states split over 8 devices (gradients inside nodes)"


def test_inputs_gathered_again():
    graph = mlp((4096, 4096, 4096))
    p1 = Strategy(((2, 1, 1), (1, 4, 1)))
    plan = plan_of({"fc1": p1, "fc2": replace(p1, regathers=True)}, graph, batch=4096)
    (saving,) = savings_of(plan, 80 * GIB)
    # 2048 rows of 4096 numbers in half precision, of which a quarter is a device's own.
    assert saving.saved_bytes == pytest.approx(2048 * 4096 * 2 * 3 / 4) and saving.extra_s > 0
    assert saving.sentence.startswith("inputs gathered again in the backward pass: 12 MiB less; a step takes")
