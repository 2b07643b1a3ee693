"""Applied plans whose layers divide their parameters (ZeRO) and gather their inputs again, on ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.costmodel.strategy import Choices
from autoddl.costmodel.workload import Workload
from autoddl.zoo.transformers import bert, gpt, llama

from .random_strategies import random_strategies
from .test_applied import BERT, GPT, JOBS, LLAMA, Case, check_pass

CHOICES = Choices((0, 1, 2, 3), regathers=True)


def case_of(model, sizes, level_sizes, seed, batch=8, **workload):
    """A random strategy for every layer, among all divisions of its parameters."""
    graph = {"gpt": gpt, "bert": bert, "llama": llama}[model](sizes)
    strategies = random_strategies(graph, level_sizes, seed, choices=CHOICES)
    return Case(model, sizes, graph, strategies, Workload(batch, 8, "float32", **workload))


CASES = {
    "gpt on 4": case_of("gpt", GPT, (4,), 1),
    "gpt on 2 x 2": case_of("gpt", GPT, (2, 2), 2),
    "gpt on 2 x 2, blocks recomputed": case_of("gpt", GPT, (2, 2), 3, recompute="blocks"),
    "llama on 4, recomputed": case_of("llama", LLAMA, (4,), 4, recompute="layers"),
    "llama on 2": case_of("llama", replace(LLAMA, tied=True), (2,), 5),
    "bert on 2 x 2": case_of("bert", BERT, (2, 2), 6),
}


def test_the_cases_have_all_choices():
    strategies = {strategy for case in CASES.values() for strategy in case.strategies.values()}
    assert {strategy.zero for strategy in strategies} == {0, 1, 2, 3}
    assert {(strategy.zero, strategy.hybrid) for strategy in strategies} > {(2, True), (3, True)}
    assert any(strategy.regathers and strategy.zero == zero for strategy in strategies for zero in (2, 3))


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_steps(ranks, name):
    """Against one device; the steps of every phase of every layer are those that are priced."""
    check_pass(CASES[name], ranks)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_the_workload_says_of_all_layers(ranks, zero):
    graph = gpt(GPT)
    strategies = random_strategies(graph, (2, 2), 7)
    check_pass(Case("gpt", GPT, graph, strategies, Workload(8, 8, "float32", zero=zero)), ranks)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_steps_of_optimizers(ranks, num_micro_batches):
    """Three steps of AdamW and SGD end where one device ends, also if gradients of several micro-batches accumulate.

    In double precision, since Adam divides by small gradients.
    """
    case = case_of("gpt", GPT, (2, 2), 8, batch=8 * num_micro_batches)
    case = replace(case, workload=replace(case.workload, precision="float64"))
    for result in ranks(4).run(f"{JOBS}:train", *case.arguments, ["adamw", "sgd"], 3):
        for optimizer, errors in result.items():
            assert max(errors.values()) < 1e-5, (optimizer, max(errors.items(), key=lambda item: item[1]))


def test_groups_of_an_optimizer(ranks):
    """With decay for weights alone, another rate, and a frozen table; the head shares its weight with a table."""
    case = case_of("gpt", GPT, (2, 2), 8)
    case = replace(case, workload=replace(case.workload, precision="float64"))
    for result in ranks(4).run(f"{JOBS}:train_groups", *case.arguments, "wpe.weight"):
        for name in ("adamw", "momentum"):
            assert max(result[name].values()) < 1e-5, (name, max(result[name].items(), key=lambda item: item[1]))
        assert result["twice"].endswith("is in groups 0 and 1 of the optimizer; it should be in one")
        assert result["unknown"] == "group 0 of the optimizer has 'nothing', which is no parameter of the model"
        assert "which should be a parameter of the module that the plan was applied to" in result["foreign"]
        assert "which is no parameter of the applied module: make the optimizer of" in result["plain"]
        assert result["names"] == 2


def test_checkpoints_move_between_divisions(ranks):
    first, second = case_of("bert", BERT, (4,), 12), case_of("bert", BERT, (2, 2), 13)
    for result in ranks(4).run(f"{JOBS}:move_between_plans", "bert", BERT, first.arguments[2:], second.arguments[2:]):
        assert result["names"][0] == result["names"][1]
        assert result["unchanged"]
        assert max(result["errors"].values()) < 1e-5
