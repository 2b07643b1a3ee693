"""Stages whose parameters are divided among ranks (ZeRO), and whose products gather their inputs again, on CPU ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from autoddl.costmodel.graph import places_of
from autoddl.costmodel.layer import zero_of
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.generators import generate
from autoddl.pipelines.runtime.pipeline.stage_traffic import stage_traffic
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.transformers import gpt

from ..sent_bytes import Sent, check_sent
from .stage_plan_cases import FAMILIES, GPT, MLP_WIDTHS, cut_layers, random_plan, stage_layer, strategy_of
from .test_stage_plans_on_ranks import (
    JOBS,
    LARGE_GPT,
    MLP8_WIDTHS,
    STEPS,
    TIMEOUT_S,
    check_synchronous,
    gpt_case,
    mlp_case,
    plain,
    run,
)

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("levels", [(2,), (4,), (2, 2)])
def test_each_sharding_alone_and_mixed(ranks, levels):
    """One stage: every stage of ZeRO with both widths, with recomputation, and random mixtures."""
    graph = mlp(MLP_WIDTHS)
    num_ranks = 4 if levels != (2,) else 2
    schedule = generate("gpipe", num_stages=1, num_micro_batches=3, width=num_ranks)
    data_parallel = Strategy(tuple((size, 1, 1) for size in levels))
    cases = []
    for zero in (1, 2, 3):
        for hybrid in {False, zero > 1 and len(levels) > 1}:
            strategy = replace(data_parallel, zero=zero, hybrid=hybrid)
            for recompute in ("none", "layers"):
                plan = StagePlan({layer.name: strategy for layer in graph.layers if layer.num_parameters}, recompute)
                others = {layer.name: data_parallel for layer in graph.layers if not layer.num_parameters}
                cases.append(mlp_case(schedule, [replace(plan, strategies={**plan.strategies, **others})], runs=2))
    rng = random.Random(3)
    for _ in range(3):
        stage = random_plan(graph.layers, levels, 12, rng, divided_in=graph)
        cases.append(mlp_case(schedule, [stage], runs=STEPS))
    check_synchronous(ranks, cases)


def test_every_synchronous_schedule_with_divided_parameters(ranks):
    """Two stages of two ranks (four of GEMS and Chimera's doubling), with random choices of every layer."""
    rng, cases = random.Random(7), []
    for name, options in FAMILIES:
        schedule = generate(name, num_stages=2, num_micro_batches=4, width=2, **options)
        if not schedule.is_synchronous:
            continue
        depth = schedule.num_stages
        widths = MLP_WIDTHS if depth == 2 else MLP8_WIDTHS
        graph, each = mlp(widths), (len(widths) - 1) // depth
        stages = [
            random_plan(graph.layers[s * each : (s + 1) * each], 2, 12, rng, divided_in=graph) for s in range(depth)
        ]
        cases.append(mlp_case(schedule, stages, widths, runs=2))
    check_synchronous(ranks, cases)


@pytest.mark.parametrize("recompute", ["none", "layers", "blocks"])
def test_transformers_with_shared_weights(ranks, recompute):
    """One stage of 4 ranks, whose head shares the table's weight, and two stages, which share it with each other."""
    rng, graph = random.Random(11), gpt(GPT)
    cases = []
    one = generate("gpipe", num_stages=1, num_micro_batches=2, width=4)
    for _ in range(3):
        plan = random_plan(graph.layers, (2, 2), 4, rng, divided_in=graph, recompute=recompute)
        cases.append(gpt_case(one, [plan], runs=2))
    two = generate("1f1b", num_stages=2, num_micro_batches=4, width=2)
    halves = cut_layers(graph, ["h.1"])
    for _ in range(2):
        stages = [random_plan(half, 2, 4, rng, divided_in=graph, recompute=recompute) for half in halves]
        cases.append(gpt_case(two, stages, runs=2))
    check_synchronous(ranks, cases)


def test_stages_divide_the_states_of_a_weight_that_they_share(ranks):
    """Runs of every synchronous schedule; the table's shards end inside of its rows if three ranks divide it. It may be frozen."""
    cases = []
    for name, options in FAMILIES:
        schedule = generate(name, num_stages=2, num_micro_batches=4, width=2, **options)
        if not schedule.is_synchronous:
            continue
        sizes = replace(GPT, layers=schedule.num_stages)
        graph = gpt(sizes)
        parts = cut_layers(graph, [f"h.{number}" for number in range(1, schedule.num_stages)])
        cases.append(
            gpt_case(schedule, [divided(part, graph, (2,), 1, False, "none") for part in parts], sizes, runs=3)
        )
    graph = gpt(GPT)
    halves = cut_layers(graph, ["h.1"])
    for widths in ((3, 1), (1, 3)):
        schedule = generate("1f1b", num_stages=2, num_micro_batches=2, width=widths)
        stages = [divided(half, graph, (width,), 1, False, "none") for half, width in zip(halves, widths)]
        cases.append(gpt_case(schedule, stages, rows=6, runs=3))
        cases.append(gpt_case(schedule, stages, rows=6, runs=2, frozen=("wte",)))
    check_synchronous(ranks, cases)


#: Strategies of a table, and of the output projection that shares its weight with another stage.
SHARING = [
    (replace(strategy_of(2, 1, 1), zero=1), strategy_of(2, 1, 1)),
    (strategy_of(2, 1, 1), replace(strategy_of(2, 1, 1), zero=1)),
    (replace(strategy_of(2, 1, 1), zero=1), strategy_of(1, 2, 1)),
    (strategy_of(1, 1, 2), replace(strategy_of(2, 1, 1), zero=1)),
]


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_stages_store_a_shared_weight_in_different_ways(ranks, name):
    """One of the stages divides the states of the weight, the other one does not, or splits its rows or columns."""
    graph, cases = gpt(GPT), []
    halves = cut_layers(graph, ["h.1"])
    for strategies in SHARING:
        stages = [divided(half, graph, (2,), 1, False, "none") for half in halves]
        for number, layer in enumerate(("wte", "lm_head")):
            changed = {**stages[number].strategies, layer: strategies[number]}
            stages[number] = replace(stages[number], strategies=changed)
        cases.append(gpt_case(generate(name, num_stages=2, num_micro_batches=2, width=2), stages, runs=3))
    check_synchronous(ranks, cases)


def test_bytes_are_the_predicted_ones(counted_ranks):
    """One stage of 2 x 2 ranks with every stage of ZeRO, and two stages, which share a weight and whose replicas share the sums."""
    graph, cases = gpt(LARGE_GPT), []
    one = generate("gpipe", num_stages=1, num_micro_batches=2, width=4)
    for zero, hybrid, recompute in ((1, False, "none"), (2, True, "none"), (3, False, "blocks"), (3, True, "none")):
        plan = divided(graph.layers, graph, (2, 2), zero, hybrid, recompute)
        cases.append(gpt_case(one, [plan], LARGE_GPT, rows=8, counts=True))
    halves = cut_layers(graph, ["h.1"])
    for name, zeros in (("chimera", (3, 1)), ("1f1b", (1, 1)), ("1f1b", (1, 0))):
        schedule = generate(name, num_stages=2, num_micro_batches=2, width=2)
        stages = [divided(half, graph, (2,), zero, False, "none") for half, zero in zip(halves, zeros)]
        cases.append(gpt_case(schedule, stages, LARGE_GPT, rows=8, counts=True))

    def count() -> list[Sent]:
        found = []
        for case, (_, _, sent) in zip(cases, run(counted_ranks, cases)):
            predicted = stage_traffic(case["schedule"], case["graph"], case["stages"], case["rows"]).all
            name = "; ".join(sorted({str(s) for stage in case["stages"] for s in stage.strategies.values()}))
            found.append(Sent(name, sent, predicted.num_bytes, predicted.num_messages, relative=0.01, num_readings=0))
        return found

    check_sent(4, count(), count)


def divided(layers, graph, levels, zero, hybrid, recompute):
    """A data-parallel stage whose layers divide as much of their parameters as they can, up to a stage of ZeRO."""
    edges = [edge for edge in graph.edges if {*edge} <= {layer.name for layer in layers}]
    places = dict(zip((layer.name for layer in layers), places_of(layers, edges, graph, "none")))
    data_parallel = Strategy(tuple((size, 1, 1) for size in levels))
    strategies = {}
    for layer in layers:
        has_weights = stage_layer(layer, set(places)).num_parameters
        own = zero_of(layer, zero, places[layer.name]) if has_weights else 0
        strategies[layer.name] = replace(data_parallel, zero=own, hybrid=hybrid and own > 1)
    return StagePlan(strategies, recompute)


def test_checkpoints_can_be_resumed_at_another_division(ranks, tmp_path):
    """Training that is saved with some divisions and resumed with others equals one without interruption, with Adam."""
    rng, graph = random.Random(13), mlp(MLP_WIDTHS)
    layers, cases = graph.layers, []
    for name, cut in (("1f1b", 2), ("chimera", 3)):
        schedule = generate(name, num_stages=2, num_micro_batches=2, width=2)
        stages = [random_plan(part, 2, 12, rng, divided_in=graph) for part in (layers[:cut], layers[cut:])]
        cases.append(mlp_case(schedule, stages, optimizer=("Adam", 0.01), frozen=("fc2",)))
    assert {s.zero for case in cases for stage in case["stages"] for s in stage.strategies.values()} > {1}
    broken = ranks(4).run(f"{JOBS}:train_in_turn", cases, tmp_path, timeout_s=TIMEOUT_S)
    (wanted,) = ranks(1).run(f"{JOBS}:train_whole", {**plain(cases[0]), "num_micro_batches": 4}, timeout_s=TIMEOUT_S)
    for of_rank in broken:
        for name, value in of_rank.items():
            assert np.linalg.norm(value - wanted[1][name]) / np.linalg.norm(wanted[1][name]) < 1e-5


def test_shared_weights_can_be_resumed_at_another_division(ranks, tmp_path):
    """Checkpoints have whole weights and states: stages that divide those of a shared weight, then other stages, then one alone."""
    graph, momentum = gpt(GPT), ("SGD", 0.1, {"momentum": 0.9})
    halves, last = cut_layers(graph, ["h.1"]), cut_layers(graph, ["ln_f"])
    two = [divided(half, graph, (2,), 1, False, "none") for half in halves]
    three = [divided(half, graph, (width,), 1, False, "none") for half, width in zip(last, (3, 1))]
    cases = [
        gpt_case(
            generate(name, num_stages=len(stages), num_micro_batches=2, width=widths),
            stages,
            rows=12,
            optimizer=momentum,
        )
        for name, stages, widths in (
            ("1f1b", two, 2),
            ("gpipe", three, (3, 1)),
            ("chimera", two, 2),
            ("gpipe", [divided(graph.layers, graph, (4,), 3, False, "none")], 4),
        )
    ]
    broken = ranks(4).run(f"{JOBS}:train_in_turn", cases, tmp_path, timeout_s=TIMEOUT_S)
    (wanted,) = ranks(1).run(f"{JOBS}:train_whole", {**plain(cases[0]), "num_micro_batches": 8}, timeout_s=TIMEOUT_S)
    for of_rank in broken:
        for name, value in of_rank.items():
            assert np.linalg.norm(value - wanted[1][name]) <= 1e-5 * np.linalg.norm(wanted[1][name]), name
