"""Planners stop when their time is over, with the best plan until then, and say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.planners import (
    Clock,
    Patience,
    PlannerError,
    ProfiledWorkload,
    StageConstraints,
    plan_chimera,
    plan_dapple,
    plan_wpipe,
)
from autoddl.pipelines.profile import load_profile

WORKLOAD = ProfiledWorkload(load_profile("bert-48"), load_cluster("v100-a"), 64)


class Counting(Clock):
    """Over after so many questions, however long these take."""

    def __init__(self, questions: int) -> None:
        super().__init__(3.0)
        self.left = questions

    @property
    def is_over(self) -> bool:
        self.left -= 1
        self.stopped = self.stopped or self.left < 0
        return self.stopped


PLANNERS: dict[str, Callable[[Clock], float]] = {
    "dapple": lambda clock: plan_dapple(WORKLOAD, shape=StageConstraints(widths=(8, 8)), clock=clock).plan.simulated_s,
    "chimera": lambda clock: plan_chimera(WORKLOAD, clock=clock).plan.simulated_s,
    "wpipe": lambda clock: plan_wpipe(WORKLOAD, clock=clock).plan.period_s,
}


@pytest.mark.parametrize("name", PLANNERS)
def test_more_time_is_never_worse_and_enough_is_all(name: str) -> None:
    plan, unlimited = PLANNERS[name], Clock()
    best = plan(unlimited)
    assert not unlimited.stopped
    clock = Counting(0)
    with pytest.raises(PlannerError, match=r"of .* was found within 3 s; give it more time"):
        plan(clock)
    assert clock.stopped
    found, questions = [], 1
    while not found or clock.stopped:
        clock = Counting(questions)
        try:
            found.append(plan(clock))
        except PlannerError:
            assert clock.stopped
            found.append(float("inf"))
        questions *= 4
    assert found == sorted(found, reverse=True) and found[-1] == best
    assert len(set(found)) > 1


def test_processor_time_runs_out() -> None:
    clock = Clock(0.0)
    sum(range(200_000))
    assert clock.is_over and clock.stopped
    assert not Clock(1e6).is_over


def test_stages_in_order_take_the_devices_one_after_another() -> None:
    result = plan_dapple(WORKLOAD, shape=StageConstraints(in_order=True))
    for plan in result.simulated:
        devices = [device for stage in plan.stages for device in stage.devices]
        assert devices == list(range(16))


def test_patience_with_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts as long again as the last better result took, and longer until the first one if that is allowed."""
    now = 100.0
    monkeypatch.setattr("time.process_time", lambda: now)
    patience, late = Patience(10.0, 2.0), Patience(10.0, 2.0, until_first_s=30.0)
    assert (patience.left_s, late.left_s) == (10.0, 30.0)
    now += 0.5
    patience.renew()
    assert patience.left_s == 2.0 - 0.5  # at least 2 s in all
    now += 1.0
    patience.renew()
    assert patience.left_s == 1.5  # as long again
    now += 13.5  # 15 s in all: after the limit, but before the first better result of the second one
    assert patience.is_over and not late.is_over
    late.renew()
    assert late.is_over
