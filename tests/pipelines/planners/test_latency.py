"""DAPPLE's latency formulas against the simulator."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.pipelines.generators import generate
from autoddl.pipelines.planners.dapple import simulated_latency
from autoddl.pipelines.planners.latency import (
    StageCost,
    corrected_latency,
    latency,
    printed_latency,
    printed_pivot,
)

times = st.floats(0.01, 10.0)


@st.composite
def chains(draw: st.DrawFn) -> list[StageCost]:
    """Computation stages with communication stages between them."""
    chain = [StageCost(draw(times), draw(times), draw(times))]
    for _ in range(draw(st.integers(0, 4))):
        chain.append(StageCost(draw(times), draw(times), duplex=True))
        chain.append(StageCost(draw(times), draw(times), draw(times)))
    return chain


def simulation(chain: list[StageCost], num_micro_batches: int, policy: str = "A") -> float:
    schedule = generate(
        "1f1b",
        num_stages=(len(chain) + 1) // 2,
        num_micro_batches=num_micro_batches,
        policy=policy,
        width=2,
        all_reduce="eager",
    )
    return simulated_latency(schedule, chain)


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(1, 12), st.sampled_from("AB"))
def test_the_estimate_never_exceeds_the_simulation(chain, num_micro_batches, policy) -> None:
    assert latency(chain, num_micro_batches) <= simulation(chain, num_micro_batches, policy) * (1 + 1e-9)


@given(chains(), st.integers(1, 12))
def test_the_estimate_is_the_longest_of_its_chains(chain, num_micro_batches) -> None:
    # Written out as the formula stands, where the code folds from the last stage on.
    longest = max(
        sum(a.forward_s for a in chain[:s])
        + sum(a.both_s for a in chain[s : q + 1])
        + (num_micro_batches - 1) * (max(chain[q].forward_s, chain[q].backward_s) if q % 2 else chain[q].both_s)
        + chain[s].all_reduce_s
        for q in range(len(chain))
        for s in range(q + 1)
    )
    assert latency(chain, num_micro_batches) == pytest.approx(longest)


@given(times, times, times, st.integers(1, 20))
def test_a_single_stage_shows_the_misprint(forward, backward, all_reduce, num_micro_batches) -> None:
    chain = [StageCost(forward, backward, all_reduce)]
    exact = num_micro_batches * (forward + backward) + all_reduce
    assert simulation(chain, num_micro_batches) == pytest.approx(exact)
    assert latency(chain, num_micro_batches) == pytest.approx(exact)
    assert corrected_latency(chain, num_micro_batches) == pytest.approx(exact)
    # At the pivot the printed formula subtracts the backward that a timeline adds: twice B too little.
    assert printed_latency(chain, num_micro_batches) == pytest.approx(exact - 2 * backward)


@given(chains(), st.integers(1, 12))
def test_the_corrected_latency_has_the_pivots_work_in_it(chain, num_micro_batches) -> None:
    pivot = chain[printed_pivot(chain, num_micro_batches)]
    assert corrected_latency(chain, num_micro_batches) >= num_micro_batches * pivot.both_s * (1 - 1e-12)
    # As printed it is below 0 where one micro-batch's backward takes longer than its forward and the all-reduce.
    assert printed_latency([StageCost(1.0, 5.0, 2.0)], 1) == -2.0


@given(times, times, st.integers(1, 6), st.integers(1, 20))
def test_equal_stages_without_communication_are_exact(forward, backward, num_stages, num_micro_batches) -> None:
    free = StageCost(0.0, 0.0, duplex=True)
    chain = [StageCost(forward, backward), *[free, StageCost(forward, backward)] * (num_stages - 1)]
    exact = (num_micro_batches + num_stages - 1) * (forward + backward)
    assert latency(chain, num_micro_batches) == pytest.approx(exact)
    assert simulation(chain, num_micro_batches) == pytest.approx(exact)


def test_the_pivot_moves_to_the_slow_stage() -> None:
    fast, slow = StageCost(1.0, 2.0), StageCost(2.0, 4.0)
    assert printed_pivot([fast, fast, fast], 8) == 2
    assert printed_pivot([fast, slow, fast], 8) == 1
    assert printed_pivot([slow, fast, fast], 8) == 0
    # With 2 micro-batches, 6 at stage 0 is not more than 3 at stage 2 and 3 between them.
    assert printed_pivot([slow, fast, fast], 2) == 2


def test_hand_worked_three_stages() -> None:
    # F, B = (1, 2), (2, 4), (1, 2), all-reduce 5 at stage 0 and 1 at stage 2; M = 4, pivot 1.
    chain = [StageCost(1, 2, 5), StageCost(2, 4), StageCost(1, 2, 1)]
    # T_w = 1 + 2, T_s = 3 * 6; printed ends: s=0: 5 + 2 + 4; s=1: -4; s=2: 1 - 4 - 2.
    assert printed_latency(chain, 4) == 3 + 18 + 11
    # Corrected ends: s=0: 5 + 2 + 4; s=1: 0 + 4; s=2: 1 - 0.
    assert corrected_latency(chain, 4) == 3 + 18 + 11
    assert latency(chain, 4) == 32


def test_how_far_the_estimate_is_off() -> None:
    """On random unequal stages without communication, policy A: the worst of 300 is 1.14 times the estimate."""
    draw = random.Random(7)
    worst = 1.0
    for _ in range(300):
        num_stages, num_micro_batches = draw.randint(2, 6), draw.randint(1, 16)
        chain = []
        for _ in range(num_stages):
            forward = draw.uniform(0.5, 2.0)
            chain += [
                StageCost(forward, 2 * forward, draw.choice([0.0, draw.uniform(0, 4)])),
                StageCost(0, 0, duplex=True),
            ]
        chain.pop()
        worst = max(worst, simulation(chain, num_micro_batches) / latency(chain, num_micro_batches))
    assert 1.0 < worst < 1.2
