"""Bounds of joint plans are below what the simulator says; needs are what generated schedules need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoddl.joint.bounds import bound_class, bounds_of_cuts, micro_batches_of, refined_bound, sums_of_cuts
from autoddl.joint.needs import needs_of, read_off
from autoddl.joint.space import cuts, schedules
from autoddl.pipelines.generators import GeneratorError
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.timeline import steady_state
from autoddl.pipelines.times import Times


@dataclass
class Interior:
    """As far as bounds look at one."""

    forward_s: float
    backward_s: float
    recompute_s: float
    all_reduce_s: float

    @property
    def busy_s(self):
        return self.forward_s + self.backward_s + self.recompute_s


seconds = st.floats(0.01, 10.0)
interiors = st.builds(Interior, seconds, seconds, st.sampled_from([0.0, 0.5, 3.0]), st.floats(0.0, 20.0))


def every_schedule(depth, count, stale=True):
    for spec in schedules(depth, count, 64, stale):
        try:
            schedule = spec.schedule(2, (False,) * spec.num_stages)
        except GeneratorError:
            continue
        yield spec, schedule


def simulated(spec, schedule, stages):
    # Both parts of a split backward pass go through the whole stage; the first stage's input part has nothing to do.
    split = [spec.name == "zero-bubble" and s > 0 for s in range(len(stages))]
    times = Times.of(
        len(stages),
        forward=[one.forward_s for one in stages],
        backward=[one.backward_s * (2 if twice else 1) for one, twice in zip(stages, split)],
        backward_input=[one.backward_s * twice for one, twice in zip(stages, split)],
        recompute=[one.recompute_s for one in stages],
        all_reduce=[one.all_reduce_s for one in stages],
    )
    timeline = simulate(schedule, times)
    if spec.synchronous:
        return timeline.makespan
    return steady_state(timeline).period * spec.num_micro_batches / schedule.update_period


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([2, 4]), st.integers(1, 9), st.lists(interiors, min_size=16, max_size=16), st.booleans())
def test_refined_bounds_are_below_the_simulation(depth, count, drawn, again):
    compared = 0
    for spec, _ in every_schedule(depth, count, stale=False):
        stages = drawn[: spec.num_stages]
        if not again:
            stages = [Interior(one.forward_s, one.backward_s, 0.0, one.all_reduce_s) for one in stages]
        recomputing = tuple(one.recompute_s > 0 for one in stages)
        schedule = spec.schedule(2, recomputing)
        bound = refined_bound(spec, stages, needs_of(spec).in_flight)
        assert bound <= simulated(spec, schedule, stages) * (1 + 1e-9), spec
        compared += 1
    assert compared >= 5


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.integers(1, 6),
    st.lists(seconds, min_size=6, max_size=6),
    st.floats(0.34, 0.5),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4),
)
@example(4, 6, [2.0, 1.0, 1.0, 1.0, 3.0, 0.5], 0.5, [0.5] * 4)  # half a micro-batch goes back in half the time
def test_bounds_of_cuts_are_below_the_simulation(depth, count, busy, share, speeds):
    """Forwards take ``share`` of a unit's time, all-reduces nothing; workers of schedules in one direction are unequal."""
    for spec, schedule in every_schedule(depth, count, stale=False):
        rows = cuts(len(busy), spec.num_stages)
        if not len(rows):
            continue
        equal = spec.num_pipelines > 1
        of_stages = [np.array(busy) * (1.0 if equal else speeds[s % depth]) for s in range(spec.num_stages)]
        sums = sums_of_cuts(rows, of_stages)
        wholes = {part: part * sums for part in micro_batches_of(depth, count, spec.num_pipelines)}
        bounds = bounds_of_cuts(sums, wholes, count, depth, bound_class(spec))
        for row, bound in list(zip(rows, bounds))[:4]:
            stops = np.cumsum(row)
            work = [units[stop - size : stop].sum() for units, size, stop in zip(of_stages, row, stops)]
            stages = [Interior(share * one, (1 - share) * one, 0.0, 0.0) for one in work]
            assert bound <= simulated(spec, schedule, stages) * (1 + 1e-9), (spec, row)


def test_the_bound_of_even_1f1b_is_its_makespan():
    """(N + D - 1)(F + B) = (6 + 3) * 3, and with an all-reduce of 5 at stage 0, which nothing hides, 32."""
    spec = next(spec for spec in schedules(4, 6, 8, False) if spec.label == "1f1b (A)")
    stages = [Interior(1.0, 2.0, 0.0, 0.0)] * 4
    assert refined_bound(spec, stages, needs_of(spec).in_flight) == pytest.approx(27.0)
    stages = [Interior(1.0, 2.0, 0.0, 5.0), *stages[1:]]
    assert refined_bound(spec, stages, needs_of(spec).in_flight) == pytest.approx(32.0)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_needs_are_those_of_the_generated_schedule(depth):
    compared = 0
    for count in (1, 5, 24, 70):
        for spec, schedule in every_schedule(depth, count):
            assert needs_of(spec) == read_off(schedule), spec
            compared += 1
    assert compared > 25


def test_pipelines_get_the_micro_batches_of_the_generated_schedule():
    for depth, count in ((2, 3), (4, 6), (4, 9), (8, 21)):
        for spec, schedule in every_schedule(depth, count, stale=False):
            if spec.num_pipelines > 1:
                forwards = [
                    task for tasks in schedule.workers for task in tasks if task.kind.letter == "F" and task.stage == 0
                ]
                done = [sum(t.part.size for t in forwards if t.pipeline == p) for p in range(spec.num_pipelines)]
                assert done == list(micro_batches_of(depth, count, spec.num_pipelines)), spec


def test_every_cut_of_a_short_chain_and_uneven_ones_of_a_long_chain():
    assert sorted(map(tuple, cuts(5, 3).tolist())) == [(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1)]
    long = cuts(96, 8)
    assert (long.sum(axis=1) == 96).all() and (long >= 1).all()
    assert len({tuple(row) for row in long.tolist()}) == len(long)
    inner = long[:, 1:-1]
    assert (inner.max(axis=1) - inner.min(axis=1) <= 1).all()
    assert (12,) * 8 in set(map(tuple, long.tolist())) and len(cuts(3, 4)) == 0


def test_cuts_of_unequal_workers_are_in_proportion_to_their_devices():
    rows = cuts(96, 5, (8, 16, 16, 16, 8))
    assert (rows.sum(axis=1) == 96).all() and len({tuple(row) for row in rows.tolist()}) == len(rows)
    assert [12, 24, 24, 24, 12] in rows.tolist()
    inner = rows[:, 1:-1]
    assert (inner.max(axis=1) - inner.min(axis=1) <= 1).all()
    for row, widths in ((cuts(96, 4, (1, 2, 4, 1)), (2, 4)), (cuts(96, 4, (1, 3, 3, 1)), (3, 3))):
        left = row[:, 1] + row[:, 2]
        assert (abs(row[:, 1] - left * widths[0] / sum(widths)) < 1).all() and len(row) > 10
