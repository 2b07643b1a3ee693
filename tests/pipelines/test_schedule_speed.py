"""Large schedules stay cheap. Processor time, because other processes may have the machine."""

from __future__ import annotations

import time

import pytest

from autoddl.pipelines.generators import generate
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_workers", "num_micro_batches", "limit_s"),
    [("1f1b", 64, 512, 2.0), ("chimera", 64, 512, 2.0), ("zero-bubble", 64, 512, 2.0), ("chimera", 128, 1000, 10.0)],
)
def test_large_schedules(name, num_workers, num_micro_batches, limit_s):
    begin = time.process_time()
    schedule = generate(name, num_stages=num_workers, num_micro_batches=num_micro_batches)
    timeline = simulate(schedule, Times.of(num_workers, forward=1, backward=2, transfer=0.1))
    assert time.process_time() - begin < limit_s
    assert timeline.makespan >= 3 * num_micro_batches
