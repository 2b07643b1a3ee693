"""The simulation with one communication stream per worker: against its rules, and against times worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.errors import UserError
from autoddl.pipelines import Kind, Times, generate, one_stream, simulate, simulate_one_stream

from .random_times import random_times
from .test_simulator import duration, halves_of

FAMILIES = (
    ("gpipe", {}),
    ("1f1b", {"policy": "B"}),
    ("interleaved-1f1b", {}),
    ("zero-bubble", {}),
    ("gems", {}),
    ("chimera", {}),
    ("chimera", {"concatenation": "doubling"}),
    ("chimera", {"all_reduce": "eager"}),
    ("pipedream", {}),
    ("wpipe", {"iterations": 2}),
)
#: Of rounding.
LITTLE = 1e-9


def test_the_two_directions_of_a_worker_share_its_stream():
    """Chimera on two stages, all durations 1.  Both first forwards end at 1, and both outputs travel between the same two workers:
    at [1, 2] and [2, 3].  The second forward and backward follow at [2, 4] and [3, 5], their gradients travel at [4, 5] and [5, 6],
    and the last backward ends at 7.  With links of their own, all of this takes place in [0, 6]."""
    schedule = generate("chimera", num_stages=2, num_micro_batches=2)
    times = Times.of(2, forward=1, backward=1, transfer=1)
    assert simulate(schedule, times).makespan == 6
    timeline = simulate_one_stream(schedule, times)
    assert timeline.makespan == 7
    assert sorted(timeline.departures[worker].tolist()[0] for worker in (0, 1)) == [1, 2]


def test_joint_computations_hold_the_stream():
    """GPipe on two stages, two micro-batches, all durations 1.  The stream of worker 0 has F0 [0, 1], its output [1, 2], F1 [2, 3],
    its output [3, 4]; worker 1 has F0 [2, 3], F1 [4, 5], a backward [5, 6], its output [6, 7], the other one [7, 8], its output
    [8, 9]; the last backward of worker 0 ends at 10.  If the computations need no stream, it ends at 8."""
    schedule = generate("gpipe", num_stages=2, num_micro_batches=2)
    times = Times.of(2, forward=1, backward=1, transfer=1)
    assert simulate_one_stream(schedule, times).makespan == simulate(schedule, times).makespan == 8
    timeline = simulate_one_stream(schedule, times, joint_stages=(0, 1))
    assert timeline.makespan == 10
    assert timeline.starts[0].tolist()[:2] == [0, 2] and timeline.starts[1].tolist()[:2] == [2, 4]


def test_the_shorter_one_of_two_orders_is_taken():
    """WPipe, one unit of time per boundary: the order of free links and that of list scheduling differ, in either direction."""
    shares = []
    for transfer in (0.2, 1.0):
        schedule = generate("wpipe", num_stages=4, num_micro_batches=8, iterations=3)
        times = Times.of(schedule.num_stages, forward=1, backward=2, transfer=transfer)
        shares.append(simulate_one_stream(schedule, times).makespan / simulate(schedule, times).makespan)
    assert 1 < shares[0] < shares[1] < 1.25


def test_joint_computations_overtake_where_workers_are_hardly_idle():
    """Interleaved 1F1B with short transfers: a worker that waited for each message would take half as long again."""
    schedule = generate("interleaved-1f1b", num_stages=4, num_micro_batches=32, groups=4)
    times = Times.of(schedule.num_stages, forward=0.25, backward=0.5, transfer=0.02)
    joint, free = simulate_one_stream(schedule, times, range(schedule.num_stages)), simulate(schedule, times)
    assert 1.05 < joint.makespan / free.makespan < 1.2


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(FAMILIES), st.integers(2, 6), st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False)
)
def test_timelines_follow_the_rules(family, num_stages, num_micro_batches, has_joint, generator):
    """No worker and no stream does two things at once; nothing begins before what it needs; no order beats free links."""
    name, options = family
    try:
        schedule = generate(name, num_stages=num_stages, num_micro_batches=num_micro_batches, **options)
    except UserError:
        return

    stages = schedule.num_stages
    times = random_times(stages, generator)
    joint = {stage for stage in range(stages) if has_joint and generator.random() < 0.5}
    timeline = simulate_one_stream(schedule, times, joint)
    streams = [[] for _ in schedule.workers]
    arrival, sums, launches = {}, {}, {}
    rows = [
        (worker, task, *(float(column[worker][index]) for column in (timeline.starts, timeline.ends)), index)
        for worker, index, task in schedule.tasks()
    ]
    for worker, task, start, end, index in rows:
        departure, arrived = float(timeline.departures[worker][index]), float(timeline.arrivals[worker][index])
        if task.kind is Kind.ALL_REDUCE:
            assert end - start == pytest.approx(times.all_reduce[task.stage])
            assert sums.setdefault((task.stage, task.micro_batch), (start, end)) == (start, end)
            before = [
                rows_end for w, t, _, rows_end, i in rows if w == worker and i < index and t.kind < Kind.ALL_REDUCE
            ]
            launches.setdefault((task.stage, task.micro_batch), []).append(max(before, default=0.0))
            streams[worker].append((start, end))
            continue
        assert end - start == pytest.approx(duration(task, times))
        if task.stage in joint and task.kind < Kind.ALL_REDUCE:
            streams[worker].append((start, end))
        destination = schedule.destination_of(task)
        if destination is not None and destination != worker:
            boundary = task.stage - (task.kind is not Kind.FORWARD)
            per_whole = (times.transfer_forward if task.kind is Kind.FORWARD else times.transfer_backward)[boundary]
            expected = times.transfer_latency + per_whole * len(halves_of(task)) / 2
            assert departure >= end - LITTLE and arrived - departure == pytest.approx(expected)
            streams[worker].append((departure, arrived))
            streams[destination].append((departure, arrived))
        if task.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            for half in halves_of(task):
                arrival[task.kind is Kind.FORWARD, task.stage, half] = arrived
    for key, (start, _) in sums.items():
        assert start >= max(launches[key]) - LITTLE
    for _, task, start, _, _ in rows:
        if task.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            is_forward = task.kind is Kind.FORWARD
            neighbour = task.stage + (-1 if is_forward else 1)
            if 0 <= neighbour < stages:
                assert all(start >= arrival[is_forward, neighbour, half] - LITTLE for half in halves_of(task))
        if task.kind is Kind.UPDATE and (task.stage, task.micro_batch) in sums:
            assert start >= sums[task.stage, task.micro_batch][1] - LITTLE
    computing = [
        [(start, end) for w, task, start, end, _ in rows if w == worker and task.kind is not Kind.ALL_REDUCE]
        for worker in range(schedule.num_workers)
    ]
    for spans in (*streams, *computing):
        spans.sort()
        assert all(second[0] >= first[1] - LITTLE for first, second in zip(spans, spans[1:]))
    assert timeline.makespan >= simulate(schedule, times).makespan - LITTLE


def test_an_order_that_lacks_a_message_is_refused():
    schedule, times = generate("gpipe", num_stages=2, num_micro_batches=1), Times.of(2, transfer=1)
    problem = one_stream._Problem(schedule, times, ())
    with pytest.raises(RuntimeError, match="the order of communication contradicts schedule gpipe"):
        one_stream._in_order(problem, [])
