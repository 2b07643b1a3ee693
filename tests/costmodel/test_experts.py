"""The work of layers of experts by hand.  float32: 4 bytes per element."""

from __future__ import annotations

import pytest

from autoddl.costmodel.graph import Place
from autoddl.costmodel.kinds.experts import capacity_of, experts
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.strategy import Choices, Strategy, enumerate_strategies
from autoddl.costmodel.workload import Workload

#: 4 experts of 32 -> 64 -> 32, 2 of them per token; 10 slots of each for the 16 tokens of a sample.
LAYER = experts("experts", 16, 32, 64, num=4, per_token=2, capacity=capacity_of(1.25, 2, 16, 4))
PARAMETERS = 4 * 3 * 32 * 64


def work(strategy, zero=0):
    return layer_work(LAYER, strategy, Workload(8, 8, "float32"), 8, Place())


def brief(steps):
    return [(step.collective.value, step.axis.size, step.axis.stride, step.nbytes) for step in steps]


def test_divided_experts_at_four_by_two():
    """(4,2,1), 2 parts: 2 samples on a rank. Logits 2 * 16 * 4 * 4 = 512 bytes; slots 2 * 4 * 10 = 80 of 32 * 4 = 128 bytes,
    10240, of which a rank of p1 = 2 sends half. The parts are the inner ranks of p0 (stride 2), the copies the outer ones."""
    done = work(Strategy(((4, 2, 1),), experts=(2,)))
    there = [
        ("all-gather", 2, 1, 512),
        ("all-to-all", 2, 2, 5120),
        ("all-gather", 2, 1, 10240),
        ("reduce-scatter", 2, 1, 10240),
        ("all-to-all", 2, 2, 5120),
    ]
    assert brief(done.forward) == there
    assert brief(done.backward) == [*there[1:], ("reduce-scatter", 2, 1, 512)]
    assert brief(done.gradient) == [("all-reduce", 2, 4, PARAMETERS / 4 * 4)]
    # 8 samples * 40 slots, 3 products of 2 * 32 * 64, over 8 ranks; twice as many in the backward pass.
    assert done.forward_work.flops == 8 * 40 * 3 * 2 * 32 * 64 / 8
    assert done.backward_work.flops == 2 * done.forward_work.flops
    # Twice the logits; gathered slots; three results of 80 * 64 / 2; the chosen results, 2 of 16 features for each of 32 tokens.
    assert done.kept_bytes == 2 * 512 + 10240 + 3 * 80 * 32 * 4 + 32 * 2 * 16 * 4


def test_whole_experts_gather_tokens_not_slots():
    """(2,2,1): 4 samples on a rank, 4 * 16 * 32 * 4 = 8192 bytes of tokens, 1024 of logits."""
    done = work(Strategy(((2, 2, 1),)))
    there = [("all-gather", 2, 1, 1024), ("all-gather", 2, 1, 8192), ("reduce-scatter", 2, 1, 8192)]
    assert brief(done.forward) == there
    assert brief(done.backward) == [
        ("all-gather", 2, 1, 8192),
        ("reduce-scatter", 2, 1, 8192),
        ("reduce-scatter", 2, 1, 1024),
    ]
    assert brief(done.gradient) == [("all-reduce", 2, 2, PARAMETERS / 2 * 4)]


def test_tokens_travel_level_by_level():
    """2 x 2 parts on two levels of 2 ranks: 2 samples on a rank, 80 slots of 128 bytes; no copies, no gradient sums."""
    done = work(Strategy(((2, 1, 1), (2, 1, 1)), experts=(2, 2)))
    assert brief(done.forward) == [("all-to-all", 2, stride, 10240) for stride in (2, 1, 1, 2)]
    assert done.gradient == ()
    assert done.parameter_bytes == PARAMETERS / 4 * 4


def test_copies_divide_states():
    """(8,1,1), 2 parts, 4 copies: they divide what two parts hold; with 8 parts there is nothing to divide."""
    whole = work(Strategy(((8, 1, 1),), experts=(2,)))
    divided = work(Strategy(((8, 1, 1),), experts=(2,), zero=1))
    assert brief(divided.gradient) == [
        ("reduce-scatter", 4, 2, PARAMETERS / 2 * 4),
        ("all-gather", 4, 2, PARAMETERS / 2 * 4),
    ]
    assert whole.state_bytes - divided.state_bytes == pytest.approx(
        PARAMETERS / 2 * Workload(8, 8, "float32").optimizer_bytes_per_parameter * 3 / 4
    )


def test_every_division_that_divides_is_offered():
    """4 experts on 2 x 4 ranks: parts divide p0 on each level, and their number divides 4."""
    found = set(enumerate_strategies(LAYER, (2, 4)))
    assert len(found) == len(list(enumerate_strategies(LAYER, (2, 4))))
    expected = {
        (a, b, c, d)
        for a in (1, 2)
        for b in (1, 2, 4)
        for c in (1, 2, 4)
        for d in (1, 2, 4)
        if a % c == 0 and b % d == 0 and 4 % (c * d) == 0 and 4 % (2 // a * (4 // b)) == 0
    }
    assert {(*(split[0] for split in s.splits), *(s.experts or (1, 1))) for s in found} == expected
    divided = list(enumerate_strategies(LAYER, (2, 2), choices=Choices((0, 1, 2, 3))))
    assert {s.zero for s in divided if s.copies > 1} == {0, 1, 2} and all(s.zero == 0 for s in divided if s.copies == 1)


def test_strategies_say_their_experts():
    strategy = Strategy(((2, 1, 1), (4, 2, 1)), experts=(1, 4))
    assert str(strategy) == "(2,1,1) | (4,2,1) experts 1x4"
    assert strategy.document() == {"strategy": [[2, 1, 1], [4, 2, 1]], "experts": [1, 4]}
    assert strategy.copies == 2
    for wrong in ((1, 8), (2,), (1, 3), (1, 1)):
        assert not Strategy(strategy.splits, experts=wrong).divides(LAYER)
