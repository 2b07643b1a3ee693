"""The simulator against an independent longest path, against bounds, and against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.pipelines.critical import critical_path
from autoddl.pipelines.generators import generate
from autoddl.pipelines.grid import from_csv
from autoddl.pipelines.schedule import Kind, Part, Schedule, Task
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.timeline import Timeline, TimelineError, free_regions, steady_state
from autoddl.pipelines.times import Times, TimesError, replicate
from autoddl.pipelines.validate import validate


def halves_of(task: Task) -> list[int]:
    """The half micro-batches that a task covers."""
    first = 2 * task.micro_batch
    return {
        Part.WHOLE: [first, first + 1],
        Part.FIRST_HALF: [first],
        Part.SECOND_HALF: [first + 1],
        Part.PAIR: [first, first + 1, first + 2, first + 3],
    }[task.part]


def duration(task: Task, times: Times) -> float:
    size = len(halves_of(task)) / 2
    stage = task.stage
    return {
        Kind.FORWARD: size * times.forward[stage],
        Kind.BACKWARD: size * times.backward[stage],
        Kind.BACKWARD_INPUT: size * times.backward_input[stage],
        Kind.BACKWARD_WEIGHT: size * (times.backward[stage] - times.backward_input[stage]),
        Kind.RECOMPUTE: size * times.recompute[stage],
        Kind.ALL_REDUCE: times.all_reduce[stage],
        Kind.UPDATE: times.update[stage],
    }[task.kind]


def task_graph(schedule: Schedule, times: Times) -> nx.DiGraph:
    """The whole execution as a graph written from the rules alone; a node's time is the weight of the edges that leave it."""
    graph = nx.DiGraph()
    time: dict[object, float] = {"end": 0.0}
    output_of: dict[tuple, tuple] = {}
    for worker, index, task in schedule.tasks():
        node = (worker, index)
        is_reduce = task.kind is Kind.ALL_REDUCE
        time[node] = 0.0 if is_reduce else duration(task, times)
        if task.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            for half in halves_of(task):
                output_of["F" if task.kind is Kind.FORWARD else "B", task.stage, half] = node

    sends: dict[tuple, tuple] = {}
    last_on_link: dict[tuple[int, int], tuple] = {}
    last_on_stream: dict[int, tuple] = {}
    for worker, tasks in enumerate(schedule.workers):
        for index, task in enumerate(tasks):
            node = (worker, index)
            step = 1 if task.kind is Kind.FORWARD else -1
            neighbour = task.stage + step
            moves = task.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
            if moves and 0 <= neighbour < schedule.num_stages:
                target = schedule.placement[task.pipeline][neighbour]
                if target != worker:
                    send = ("send", *node)
                    boundary = min(task.stage, neighbour)
                    each = (times.transfer_forward if step > 0 else times.transfer_backward)[boundary]
                    time[send] = times.transfer_latency + each * len(halves_of(task)) / 2
                    sends[node] = send
                    graph.add_edge(node, send)
                    if (worker, target) in last_on_link:
                        graph.add_edge(last_on_link[worker, target], send)
                    last_on_link[worker, target] = send
            if task.kind is Kind.ALL_REDUCE:
                reduce = ("reduce", task.stage, task.micro_batch)
                time[reduce] = times.all_reduce[task.stage]
                graph.add_edge(node, reduce)
                if worker in last_on_stream:
                    graph.add_edge(last_on_stream[worker], reduce)
                last_on_stream[worker] = reduce
    for worker, index, task in schedule.tasks():
        node = (worker, index)
        graph.add_edge(node, "end")
        if index + 1 < len(schedule.workers[worker]):
            graph.add_edge(node, (worker, index + 1))
            if not times.overlap_transfers and node in sends:
                graph.add_edge(sends[node], (worker, index + 1))
        if task.kind is Kind.FORWARD and task.stage > 0:
            sources = {output_of["F", task.stage - 1, half] for half in halves_of(task)}
        elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and task.stage < schedule.num_stages - 1:
            sources = {output_of["B", task.stage + 1, half] for half in halves_of(task)}
        else:
            sources = set()
        for source in sources:
            graph.add_edge(sends.get(source, source), node)
        if task.kind is Kind.UPDATE and ("reduce", task.stage, task.micro_batch) in time:
            graph.add_edge(("reduce", task.stage, task.micro_batch), node)
    for node in time:
        if node != "end" and graph.has_node(node):
            graph.add_edge(node, "end")
    for source, _, attributes in graph.edges(data=True):
        attributes["weight"] = time[source]
    return graph


FAMILIES = [
    ("gpipe", {}),
    ("grouped-gpipe", {"groups": 2}),
    ("1f1b", {"policy": "A"}),
    ("1f1b", {"policy": "B"}),
    ("gems", {}),
    ("pipedream", {"iterations": 2}),
    ("pipedream-2bw", {"iterations": 2}),
    ("chimera", {}),
    ("chimera", {"num_pipelines": 4}),
    ("chimera", {"concatenation": "doubling"}),
    ("chimera", {"concatenation": "halving"}),
    ("wpipe", {"iterations": 2}),
    ("interleaved-1f1b", {"groups": 2}),
    ("zero-bubble", {"policy": "H1"}),
    ("zero-bubble", {"policy": "H2"}),
]


@st.composite
def cases(draw):
    name, options = draw(st.sampled_from(FAMILIES))
    num_stages = 4 if options.get("num_pipelines") == 4 else draw(st.sampled_from([2, 4]))
    num_micro_batches = num_stages * draw(st.integers(1, 3))
    if name not in ("interleaved-1f1b", "pipedream-2bw", "wpipe"):
        num_micro_batches = draw(st.integers(1, 12))
    schedule = generate(
        name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        recompute=draw(st.booleans()),
        width=draw(st.sampled_from([1, 2])),
        all_reduce=draw(st.sampled_from(["none", "eager", "eager-sync-opt"])),
        **options,
    )
    stages = schedule.num_stages
    amount = st.floats(0.0, 5.0, allow_subnormal=False)

    def per(count):
        return draw(st.lists(amount, min_size=count, max_size=count))

    inputs = per(stages)
    times = Times.of(
        stages,
        forward=per(stages),
        backward=[a + b for a, b in zip(inputs, per(stages))],
        backward_input=inputs,
        recompute=per(stages),
        all_reduce=per(stages),
        update=per(stages),
        transfer=per(stages - 1),
        transfer_backward=per(stages - 1),
        transfer_latency=draw(amount),
        overlap_transfers=draw(st.booleans()),
    )
    return schedule, times


@settings(max_examples=60, deadline=None)
@given(cases())
def test_makespan_is_the_longest_path(case):
    schedule, times = case
    longest = nx.dag_longest_path_length(task_graph(schedule, times))
    timeline = simulate(schedule, times)
    assert timeline.makespan == pytest.approx(longest, rel=1e-9, abs=1e-12)
    busiest = max(
        sum(duration(task, times) for task in tasks if task.kind is not Kind.ALL_REDUCE) for tasks in schedule.workers
    )
    through = sum(times.forward) + sum(times.backward_input)  # of one micro-batch, whatever else waits
    assert timeline.makespan >= busiest * (1 - 1e-12)
    smallest = min(len(halves_of(task)) for _, _, task in schedule.tasks() if task.kind.is_compute) / 2
    assert timeline.makespan >= smallest * through * (1 - 1e-12)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_every_task_takes_its_time_and_workers_do_one_at_a_time(case):
    schedule, times = case
    timeline = simulate(schedule, times)
    for worker, tasks in enumerate(schedule.workers):
        now = 0.0
        for task, start, end in zip(tasks, timeline.starts[worker], timeline.ends[worker]):
            assert end - start == pytest.approx(duration(task, times), abs=1e-9)
            if task.kind is not Kind.ALL_REDUCE:
                assert start >= now - 1e-9
                now = end


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_critical_path_is_as_long_as_the_schedule(case):
    """Its tasks are in order, and without transfers their times add up to the makespan."""
    schedule, times = case
    still = replace(
        times,
        transfer_forward=(0.0,) * (schedule.num_stages - 1),
        transfer_backward=(0.0,) * (schedule.num_stages - 1),
        transfer_latency=0.0,
    )
    timeline = simulate(schedule, still)
    path = critical_path(timeline)
    total = sum(duration(task, still) for task in path.tasks)
    assert total == pytest.approx(timeline.makespan, rel=1e-6, abs=1e-9)
    with_transfers = simulate(schedule, times)
    assert sum(duration(task, times) for task in critical_path(with_transfers).tasks) <= with_transfers.makespan + 1e-6


def test_the_critical_path_of_one_micro_batch():
    timeline = simulate(generate("gpipe", num_stages=2, num_micro_batches=1), Times.of(2, forward=1, backward=1))
    path = critical_path(timeline)
    assert [str(task) for task in path.tasks if task.kind.is_compute] == ["0F0", "1F0", "1B0", "0B0"]
    assert (path.forward, path.backward) == (2, 2)


def test_the_critical_path_needs_the_transfers():
    timeline = simulate(generate("gpipe", num_stages=2, num_micro_batches=1), Times.of(2))
    measured = Timeline(timeline.schedule, timeline.starts, timeline.ends)
    with pytest.raises(TimelineError, match="needs the transfers' times"):
        critical_path(measured)


def test_pairs_that_meet_single_micro_batches():
    """Stage 0 forwards a pair and stage 1 single micro-batches; backward, stage 1 does the pair and stage 0 the single
    ones. And the other way round, where a task has two producers."""
    head = "# schedule,mixed\n# micro-batches,2\n# update-period,2\n# pipeline,0 1\n"
    fan_out = from_csv(head + "worker 0,0F0+1,0B0,0B1,0U0\nworker 1,1F0,1F1,1B0+1,1U0\n")
    fan_in = from_csv(head + "worker 0,0F0,0F1,0B0+1,0U0\nworker 1,1F0+1,1B0,1B1,1U0\n")
    times = Times.of(2, forward=1, backward=2, transfer=0.25)
    for schedule, starts in (
        # The pair takes 2 and 0.5 to get there; its backward 4 and 0.5 back.
        (fan_out, ([0, 9.0, 11.0, 13.0], [2.5, 3.5, 4.5, 8.5])),
        # The second forward arrives at 2.25, the pair then takes 2; backwards end at 6.25 and 8.25 and arrive 0.25
        # later.
        (fan_in, ([0, 1, 8.5, 12.5], [2.25, 4.25, 6.25, 8.25])),
    ):
        validate(schedule)
        timeline = simulate(schedule, times)
        assert tuple(row.tolist() for row in timeline.starts) == starts
        longest = nx.dag_longest_path_length(task_graph(schedule, times))
        assert timeline.makespan == pytest.approx(longest)


# Chimera's paper: makespans at N = D, (D, F = Bk, Bk = 2F).
MAKESPANS = {
    "gpipe": {4: (14, 21), 6: (22, 33), 8: (30, 45)},
    "1f1b": {4: (14, 21), 6: (22, 33), 8: (30, 45)},
    "chimera": {4: (10, 16), 6: (16, 26), 8: (22, 36)},
}


@pytest.mark.parametrize("name", MAKESPANS)
@pytest.mark.parametrize("num_stages", [4, 6, 8])
def test_makespans_of_the_papers_comparison(name, num_stages):
    schedule = generate(name, num_stages=num_stages, num_micro_batches=num_stages)
    found = tuple(
        simulate(schedule, Times.of(num_stages, forward=1, backward=backward)).makespan for backward in (1, 2)
    )
    assert found == MAKESPANS[name][num_stages]


def test_makespans_of_chimera_with_four_pipelines():
    schedule = generate("chimera", num_stages=8, num_micro_batches=8, num_pipelines=4)
    assert simulate(schedule, Times.of(8, forward=1, backward=1)).makespan == 18
    assert simulate(schedule, Times.of(8, forward=1, backward=2)).makespan == 28


def test_transfers_beside_compute_and_in_the_way():
    """Two stages, one micro-batch: 1 + 0.5 + 1 + 2 + 0.25 + 2. Two micro-batches: the second transfer waits for nothing."""
    one = generate("gpipe", num_stages=2, num_micro_batches=1)
    times = Times.of(2, forward=1, backward=2, transfer=0.5, transfer_backward=0.25)
    assert simulate(one, times).makespan == 6.75

    two = generate("gpipe", num_stages=2, num_micro_batches=2)
    overlapped = simulate(two, times)
    # Stage 1: forwards at 1.5 and 2.5, backwards 3.5 to 7.5; the last gradient arrives at 7.75, stage 0 ends at 9.75.
    assert overlapped.starts[1].tolist() == [1.5, 2.5, 3.5, 5.5, 7.5]
    assert overlapped.makespan == 9.75
    blocking = simulate(
        two, Times.of(2, forward=1, backward=2, transfer=0.5, transfer_backward=0.25, overlap_transfers=False)
    )
    # Stage 0's second forward begins at 1.5; stage 1's second at 3.0, its backwards at 4.0 and 6.25; its last
    # gradient leaves at 8.25 and arrives at 8.5, when both the update there and stage 0's last backward begin.
    assert blocking.starts[1].tolist() == [1.5, 3.0, 4.0, 6.25, 8.5]
    assert blocking.makespan == 10.5


def test_a_slow_link_carries_one_transfer_at_a_time():
    """F = 1, transfer = 3: the forwards reach stage 1 at 4, 7 and 10."""
    schedule = generate("gpipe", num_stages=2, num_micro_batches=3)
    timeline = simulate(schedule, Times.of(2, forward=1, backward=1, transfer=3))
    assert timeline.starts[1][:3].tolist() == [4, 7, 10]
    assert timeline.departures[0][:3].tolist() == [1, 4, 7]


def test_blocking_transfers_cost_what_the_performance_model_says():
    """T = (F + c) C_f + (Bk + c) C_b, but for the last stage, which sends no activation, and the first, no gradient."""
    num_stages, c = 8, 0.25
    schedule = generate("chimera", num_stages=num_stages, num_micro_batches=num_stages)
    inner = simulate(
        schedule, Times.of(num_stages, forward=1, backward=2, transfer=c, overlap_transfers=False)
    ).makespan
    model = (1 + c) * num_stages + (2 + c) * (2 * num_stages - 2)
    assert model - 4 * c <= inner <= model


@pytest.mark.parametrize(
    ("policy", "overlap", "expected"),
    [
        # Stage 3 is complete at 7 and stage 0 at 10 (on workers 0 and 3), stage 2 at 8 and stage 1 at 9 (on workers 1
        # and 2). After all compute: workers 0 and 3 reduce stage 3, then stage 0: 10 + 2 x 1.5.
        ("none", True, 13.0),
        # Eager: stage 3 from 7 to 8.5, stage 0 from 10 to 11.5; stage 2 from 8 to 9.5, then stage 1 until 11.
        ("eager", True, 11.5),
        # The same, but stage 2 is launched at 9, after the last backward of workers 1 and 2: stage 1 is done at 12.
        ("eager-sync-opt", True, 12.0),
        # In free regions: stage 3 gets the gap from 8 to 9 and 0.5 after 10, then stage 0 1.5: 12.
        ("eager", False, 12.0),
        ("none", False, 13.0),
    ],
)
def test_all_reduce_policies_by_hand(policy, overlap, expected):
    schedule = generate("chimera", num_stages=4, num_micro_batches=4, all_reduce=policy)
    times = Times.of(4, forward=1, backward=1, all_reduce=1.5, all_reduce_overlaps_compute=overlap)
    assert simulate(schedule, times).makespan == expected


def test_the_middle_stages_of_eager_sync_opt_are_not_eager():
    """D = 4: worker 0 launches stage 3 before its last backwards (a bubble follows); worker 1 launches both at its end."""
    opt = generate("chimera", num_stages=4, num_micro_batches=4, all_reduce="eager-sync-opt")
    assert [str(task) for task in opt.workers[0]][6:] == ["1:3A0", "0B0", "0B1", "0A0", "1:3U0", "0U0"]
    assert [str(task) for task in opt.workers[1]][5:] == ["1B0", "1:2B3", "1B1", "1:2A0", "1A0", "1:2U0", "1U0"]
    eager = generate("chimera", num_stages=4, num_micro_batches=4, all_reduce="eager")
    assert [str(task) for task in eager.workers[1]][5:] == ["1B0", "1:2B3", "1:2A0", "1B1", "1A0", "1:2U0", "1U0"]


def test_free_regions_are_the_gaps_behind_a_stages_last_backward():
    """`d . d u U u U D . D`: worker 0 idles once after stage 3 of up, never after stage 0 of down."""
    schedule = generate("chimera", num_stages=4, num_micro_batches=4)
    regions = free_regions(simulate(schedule, Times.of(4, forward=1, backward=1)))
    assert schedule.stages_on(0) == ((0, 0), (1, 3))
    assert regions == ((0.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 0.0))


def test_all_reduces_in_free_regions_hide_no_more_than_there_is():
    """As the all-reduce grows by x beyond the free region, so does the end."""
    schedule = generate("chimera", num_stages=8, num_micro_batches=8)
    base = simulate(schedule, Times.of(8, forward=1, backward=2)).makespan

    def end(all_reduce):
        stages = [0.0] * 8
        stages[7] = all_reduce
        times = Times.of(8, forward=1, backward=2, all_reduce=stages, all_reduce_overlaps_compute=False)
        return simulate(schedule, times).makespan

    # Worker 0 after its last backward of stage 7: idle from 19 to 22 and three times 2 before each of B(1), B(2), B(3).
    region = free_regions(simulate(schedule, Times.of(8, forward=1, backward=2)))[0][1]
    assert region == 9
    assert end(region) == base
    assert end(region + 1) == base + 1
    assert end(region + 4) == base + 4


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(4, 4, 2), (4, 8, 2), (8, 8, 4), (6, 3, 2)]),
    st.sampled_from(["none", "eager", "eager-sync-opt"]),
    st.lists(st.floats(0.0, 4.0), min_size=8, max_size=8),
    st.floats(0.5, 3.0),
)
def test_all_reduces_in_free_regions_never_run_beside_compute(shape, policy, all_reduce, backward):
    """Each worker needs its compute and its all-reduces one after the other; with overlap it is never slower."""
    num_stages, num_micro_batches, num_pipelines = shape
    schedule = generate(
        "chimera",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_pipelines=num_pipelines,
        all_reduce=policy,
    )
    times = Times.of(num_stages, forward=1, backward=backward, all_reduce=all_reduce[:num_stages])
    beside = simulate(schedule, times).makespan
    alone = simulate(schedule, replace(times, all_reduce_overlaps_compute=False))
    assert alone.makespan >= beside * (1 - 1e-12)
    for worker, busy in enumerate(alone.busy):
        reduces = sum(times.all_reduce[stage] for _, stage in schedule.stages_on(worker))
        assert alone.makespan >= (busy + reduces) * (1 - 1e-12)


def test_iterations_of_a_synchronous_schedule_follow_each_other():
    """1F1B: stage 0 is the first to begin and the last to end, so iterations add up."""
    one = simulate(generate("1f1b", num_stages=4, num_micro_batches=8), Times.of(4)).makespan
    three = simulate(generate("1f1b", num_stages=4, num_micro_batches=8, iterations=3), Times.of(4)).makespan
    assert one == 33
    assert three == 3 * one


def test_zero_bubble_h2_has_no_bubble_between_iterations_and_h1_has():
    times = Times.of(4, forward=1, backward=2)
    lengths = {}
    for policy in ("H1", "H2"):
        for iterations in (1, 4):
            schedule = generate("zero-bubble", num_stages=4, num_micro_batches=8, policy=policy, iterations=iterations)
            lengths[policy, iterations] = simulate(schedule, times).makespan
    assert lengths["H2", 1] == 3 * 8 + 3
    assert lengths["H2", 4] == 4 * 3 * 8 + 3
    assert lengths["H1", 4] == 4 * (3 * 8 + 3)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "wpipe"])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_asynchronous_schedules_settle_without_bubbles(name, num_stages, extra):
    num_micro_batches = num_stages + extra
    schedule = generate(name, num_stages=num_stages, num_micro_batches=num_micro_batches, iterations=6)
    groups = schedule.num_stages // num_stages
    settled = steady_state(simulate(schedule, Times.of(schedule.num_stages, forward=1, backward=2)))
    assert settled.bubble_ratio == pytest.approx(0, abs=1e-12)
    assert settled.period == 3 * groups * schedule.update_period


def test_a_steady_state_needs_updates():
    schedule = generate("pipedream-2bw", num_stages=2, num_micro_batches=2, iterations=2)
    with pytest.raises(TimelineError, match="at least 3 updates, schedule pipedream-2bw has 2"):
        steady_state(simulate(schedule, Times.of(2)))


def test_replicated_stages_split_and_concatenate():
    """Widths 2:1 at times 4, 4: compute 2 and 4; the boundary is as wide as its narrower side, and re-sliced."""
    times = replicate(
        Times.of(2, forward=4, backward=8, transfer=1.0, transfer_backward=3.0), (2, 1), split=0.125, concat=0.25
    )
    assert times.forward == (2.0, 4.0)
    assert times.backward == (4.0, 8.0)
    assert times.backward_input == (2.0, 4.0)
    assert times.transfer_forward == (1.25,)  # many to one: concat
    assert times.transfer_backward == (3.125,)  # one to many: split
    equal = replicate(Times.of(2, transfer=1.0), (4, 4), split=0.125, concat=0.25)
    assert equal.transfer_forward == (0.25,)
    uneven = replicate(Times.of(2, transfer=6.0), (3, 2), split=0.125, concat=0.25)
    assert uneven.transfer_forward == (3.375,)  # many to many of unequal widths: both
    schedule = generate("1f1b", num_stages=2, num_micro_batches=2, width=(2, 1))
    assert schedule.num_replicas_of(0) == 2
    assert [str(task) for task in schedule.workers[0]][-2:] == ["0A0", "0U0"]
    assert [str(task) for task in schedule.workers[1]][-2:] == ["1B1", "1U0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [1, 2]}, "forward has 2 entries; give 3, the number of stages"),
        ({"transfer": [1, 2, 3]}, "transfer has 3 entries; give 2, the number of boundaries between stages"),
        ({"backward": -1}, r"backward\[0\] is -1.0; times are finite and not negative"),
        ({"forward": float("nan")}, r"forward\[0\] is nan"),
        ({"backward": 1, "backward_input": 2}, "backward_input of stage 0 is 2.0, more than the whole backward"),
        ({"transfer_latency": float("inf")}, r"transfer_latency\[0\] is inf"),
    ],
)
def test_times_that_make_no_sense(arguments, message):
    with pytest.raises(TimesError, match=message):
        Times.of(3, **arguments)


def test_times_of_another_model():
    schedule = generate("wpipe", num_stages=2, num_micro_batches=2)
    with pytest.raises(TimesError, match="the times are for 2 stages, the schedule wpipe has 4"):
        simulate(schedule, Times.of(2))


def test_bubble_ratios_count_idle_time():
    schedule = generate("gpipe", num_stages=2, num_micro_batches=2)
    timeline = simulate(schedule, Times.of(2, forward=[1, 2], backward=[1, 2]))
    # Worker 1 begins at 1 and works for 8, worker 0 works for 4; the end is at 1 + 8 + 1.
    assert timeline.makespan == 10
    assert timeline.busy == (4.0, 8.0)
    np.testing.assert_allclose(timeline.bubble_ratios, (0.6, 0.2))
    assert timeline.bubble_ratio == pytest.approx(0.4)
