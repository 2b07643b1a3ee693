"""The schedule of a stage alone is that of 1F1B on one worker, whatever its length."""

from __future__ import annotations

import pytest

from autoddl.pipelines.generators import generate
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.single_stage import single_stage_schedule
from autoddl.pipelines.times import Times
from autoddl.pipelines.validate import validate


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_it_is_that_of_the_generator(num_micro_batches, recomputes):
    expected = generate("1f1b", num_stages=1, num_micro_batches=num_micro_batches, width=4, recompute=recomputes)
    found = single_stage_schedule(num_micro_batches, 4, recomputes)
    assert [tuple(tasks) for tasks in found.workers] == list(expected.workers)
    assert found.workers[0][1:-1] == expected.workers[0][1:-1] and found.workers[0][-1] == expected.workers[0][-1]
    for name in ("name", "num_stages", "num_micro_batches", "placement", "update_period", "delays", "widths"):
        assert getattr(found, name) == getattr(expected, name)
    validate(found)
    times = Times.of(1, forward=1.0, backward=2.0, recompute=1.0, all_reduce=5.0)
    assert simulate(found, times).makespan == simulate(expected, times).makespan


def test_it_has_as_many_micro_batches_as_it_likes():
    schedule = single_stage_schedule(2**40)
    assert schedule.num_tasks == 2**41 + 2 and str(schedule.workers[0][2**40]) == f"0F{2**39}"
    with pytest.raises(IndexError):
        schedule.workers[0][2**41 + 2]
