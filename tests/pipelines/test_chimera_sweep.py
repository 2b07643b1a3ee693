"""Chimera for even D up to 32, every f that divides D/2 and every N from 1 to 4 D.

All cases up to D = 8 here; beyond that, of the D with the most divisors, the numbers of micro-batches at which the structure
changes. ``tests/bench/bench_schedules.py`` goes through all 3,888.
"""

from __future__ import annotations

import pytest

from autoddl.pipelines.generators import generate
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times

pytestmark = pytest.mark.slow


def pairs_of(num_stages):
    return [f for f in range(1, num_stages // 2 + 1) if num_stages // 2 % f == 0]


def micro_batches_of(num_stages):
    if num_stages <= 8:
        return range(1, 4 * num_stages + 1)
    units = (1, 2, 4) if num_stages <= 16 else (1, 2)
    edges = {k * num_stages + shift for k in units for shift in (-1, 0, 1)} | {1, 2, num_stages // 2}
    return sorted(n for n in edges if n <= 4 * num_stages)


def slots(num_stages, num_micro_batches, f):
    """The makespan in unit times: 2 D per whole unit, and behind the last one the stretch of one pipeline with
    ceil(r / 2f) micro-batches. At N = K D that is N (F + Bk) + D/f - 2."""
    units, rest = divmod(num_micro_batches, num_stages)
    if rest == 0:
        return 2 * num_micro_batches + num_stages // f - 2
    return 2 * num_stages * units + 2 * num_stages + 2 * -(-rest // (2 * f)) - 2


@pytest.mark.parametrize("num_stages", [*range(2, 13, 2), 16, 18, 24, 32])
def test_every_chimera_is_valid_and_idles_no_more_than_it_must(num_stages):
    unit = Times.of(num_stages, forward=1, backward=1)
    for f in pairs_of(num_stages):
        for n in micro_batches_of(num_stages):
            schedule = generate("chimera", num_stages=num_stages, num_micro_batches=n, num_pipelines=2 * f)
            timeline = simulate(schedule, unit)
            assert timeline.makespan == slots(num_stages, n, f), (num_stages, f, n)
            # Everything else is idle time: as much as the makespan leaves, and nothing is done twice.
            assert sum(timeline.busy) == 2 * n * num_stages


@pytest.mark.parametrize("num_stages", range(2, 17, 2))
def test_even_halves_take_d_forwards_and_d_plus_n_minus_2_backwards(num_stages):
    """Even N <= D with equal halves, Bk >= F; for f pairs, N/f in place of N."""
    for f in pairs_of(num_stages):
        for n in range(2 * f, num_stages + 1, 2 * f):
            schedule = generate("chimera", num_stages=num_stages, num_micro_batches=n, num_pipelines=2 * f)
            for forward, backward in ((1, 1), (1, 2), (1, 3), (2, 3)):
                times = Times.of(num_stages, forward=forward, backward=backward)
                expected = num_stages * forward + (num_stages + n // f - 2) * backward
                assert simulate(schedule, times).makespan == expected
