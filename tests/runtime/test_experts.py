"""Experts on real ranks: loss, gradients, steps and bytes of every way to divide them, with tokens that are dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.zoo.mixtures import Mixture, mixture

from .test_applied import Case, check_pass

SIZES = Mixture(
    "moe",
    layers=1,
    width=64,
    heads=8,
    sequence=16,
    vocabulary=128,
    kv_heads=8,
    intermediate=64,
    activation="silu",
    tied=False,
    experts=8,
    per_token=2,
    expert_width=32,
    capacity_factor=1.0,
)
#: Softmax shares that are not renormalised; a first dense block; shared experts.
DEEP = replace(SIZES, layers=2, dense_layers=1, shared_width=64, renormalises=False, experts=4)
#: Sigmoid shares, of two of four groups, times 2.5.
GROUPED = replace(SIZES, sigmoid=True, scaling=2500, groups=4, groups_per_token=2)


def case_of(sizes, splits, experts=(), batch=8, zero=0, **workload):
    """All layers at the splits; the experts divided."""
    graph = mixture(sizes)
    strategies = dict.fromkeys((layer.name for layer in graph.layers), Strategy(splits))
    for layer in graph.layers:
        if layer.kind == "experts":
            strategies[layer.name] = Strategy(splits, experts=experts, zero=zero)
        assert strategies[layer.name].divides(layer), layer.name
    return Case("moe", sizes, graph, strategies, Workload(batch, batch, "float32", **workload))


CASES = {
    "1": case_of(DEEP, ((1, 1, 1),)),
    "2 copies": case_of(SIZES, ((2, 1, 1),)),
    "2 features": case_of(DEEP, ((1, 2, 1),)),
    "2 experts": case_of(SIZES, ((2, 1, 1),), (2,)),
    "4 experts": case_of(DEEP, ((4, 1, 1),), (4,)),
    "2 experts, 2 copies": case_of(GROUPED, ((4, 1, 1),), (2,)),
    "2 experts, 2 copies, zero 2": case_of(SIZES, ((4, 1, 1),), (2,), zero=2),
    "2 experts, 2 features": case_of(DEEP, ((2, 2, 1),), (2,)),
    "2 x 2 experts": case_of(SIZES, ((2, 1, 1), (2, 1, 1)), (2, 2)),
    "2 nodes of 2 experts": case_of(GROUPED, ((2, 1, 1), (2, 1, 1)), (1, 2)),
    "2 nodes of 2 features": case_of(SIZES, ((2, 1, 1), (1, 2, 1)), (2, 1)),
    "2 experts, recomputed": case_of(SIZES, ((2, 1, 1),), (2,), recompute="layers"),
    "2 experts, blocks recomputed": case_of(DEEP, ((2, 1, 1),), (2,), recompute="blocks"),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_at_every_division(ranks, name):
    check_pass(CASES[name], ranks)


def test_bytes_on_8_ranks(counted_ranks):
    sizes = replace(SIZES, sequence=64, width=128, expert_width=64)
    check_pass(case_of(sizes, ((4, 2, 1),), (2,)), counted_ranks, counts_pass=True)
