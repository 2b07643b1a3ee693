"""Every rule of the validator, by breaking it; and schedules that block on every transfer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.pipelines.communication import Transfer, timeline_order
from autoddl.pipelines.generators import families, generate
from autoddl.pipelines.grid import from_csv
from autoddl.pipelines.schedule import Kind, Schedule, parse_task
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times
from autoddl.pipelines.validate import InvalidScheduleError, validate


def edited(schedule: Schedule, worker: int, edit) -> Schedule:
    """The schedule with one worker's list of texts changed in place by ``edit``."""
    texts = [str(task) for task in schedule.workers[worker]]
    edit(texts)
    workers = list(schedule.workers)
    workers[worker] = tuple(parse_task(text) for text in texts)
    return replace(schedule, workers=tuple(workers))


def swap(first, second):
    def edit(texts):
        i, j = texts.index(first), texts.index(second)
        texts[i], texts[j] = texts[j], texts[i]

    return edit


def drop(text):
    return lambda texts: texts.remove(text)


def put(text, before):
    return lambda texts: texts.insert(texts.index(before), text)


def change(old, new):
    def edit(texts):
        texts[texts.index(old)] = new

    return edit


ONE = dict(num_stages=3, num_micro_batches=4)
CHIMERA = dict(num_stages=4, num_micro_batches=4)


@pytest.mark.parametrize(
    ("name", "options", "worker", "edit", "reason", "marked"),
    [
        ("1f1b", ONE, 1, drop("1F2"), "forward 1F2 is missing on worker 1", ">?<"),
        ("1f1b", ONE, 1, drop("1B2"), "backward 1B2 is missing on worker 1", ">?<"),
        ("1f1b", ONE, 1, drop("1U0"), "update 1U0 is missing on worker 1", ">?<"),
        ("1f1b", ONE, 1, put("1F2", "1B0"), "forward 1F2 is done twice", ">1F2<"),
        ("1f1b", ONE, 1, put("1B0", "1B1"), "backward 1B0 is done twice", ">1B0<"),
        ("1f1b", ONE, 1, put("1U0", "1B3"), "update 1U0 is done twice", ">1U0<"),
        ("1f1b", ONE, 1, change("1F2", "1F9"), "task 1F9 of worker 1 names a micro-batch or update that does", ">1F9<"),
        ("1f1b", ONE, 1, change("1U0", "1U1"), "task 1U1 of worker 1 names a micro-batch or update that", ">1U1<"),
        ("1f1b", ONE, 1, change("1F2", "7F2"), "task 7F2 of worker 1 names a stage that does not exist", ">7F2<"),
        ("1f1b", ONE, 1, change("1F2", "1:1F2"), "task 1:1F2 of worker 1 names a pipeline that does not", ">1:1F2<"),
        ("1f1b", ONE, 1, change("1F2", "2F2"), "task 2F2 is on worker 1, its stage is on 2", ">2F2<"),
        ("1f1b", ONE, 1, swap("1F0", "1B0"), "task 1B0 comes before 1F0, which it needs", ">1B0<"),
        ("1f1b", ONE, 2, swap("2B3", "2U0"), "task 2U0 comes before 2B3, which it needs", ">2U0<"),
        ("1f1b", ONE, 1, put("1A0", "1U0"), "all-reduce 1A0 is of a stage that has a single replica", ">1A0<"),
        ("1f1b", ONE, 0, swap("0F0", "0F1"), None, None),  # harmless: stage 1 waits
        ("1f1b", ONE, 1, swap("1B0", "1F2"), None, None),  # harmless: one more forward first
        ("1f1b", ONE, 0, swap("0B0", "0F3"), None, None),
        ("1f1b", ONE, 0, swap("0F1", "0B0"), "deadlock: worker 0 at 0B0, worker 1 at 1F1", ">0B0<"),
        ("chimera", CHIMERA, 0, drop("0A0"), "all-reduce 0A0 is missing on worker 0", ">?<"),
        ("chimera", CHIMERA, 0, put("0A0", "0B0"), "all-reduce 0A0 is done twice", ">0A0<"),
        ("chimera", CHIMERA, 0, swap("0B1", "0A0"), "task 0A0 comes before 0B1, which it needs", ">0A0<"),
        ("chimera", CHIMERA, 0, swap("0A0", "0U0"), "task 0U0 comes before 0A0, which it needs", ">0U0<"),
        ("chimera", CHIMERA, 1, swap("1A0", "1:2A0"), "deadlock: worker 1 at 1:2U0, worker 2 at 2U0", None),
        ("chimera", CHIMERA, 0, change("1:3F2", "1:3F1"), "task .* runs micro-batch 1 through a second pipeline", None),
        ("zero-bubble", ONE, 0, swap("0I0", "0W0"), "task 0W0 comes before 0I0, which it needs", ">0W0<"),
        ("zero-bubble", ONE, 0, drop("0W0"), "weight part of backward 0W0 is missing on worker 0", ">?<"),
        ("1f1b", dict(ONE, recompute=True), 1, drop("1R1"), "recomputes, but recomputation 1R1 is missing", ">?<"),
        (
            "1f1b",
            dict(ONE, recompute=True),
            1,
            swap("1R1", "1B1"),
            "task 1B1 comes before 1R1, which it needs",
            ">1B1<",
        ),
        (
            "pipedream",
            dict(ONE, iterations=1),
            2,
            swap("2U0", "2F1"),
            "task 2F1 uses version 1 .* before update 0",
            None,
        ),
        ("pipedream-2bw", dict(ONE, iterations=3), 0, swap("0U0", "0F9"), "task 0F9 uses version 1", ">0F9<"),
        (
            "1f1b",
            dict(ONE, iterations=2),
            0,
            swap("0U0", "0F4"),
            "task 0F4 uses version 1 .* update 0 has made",
            ">0F4<",
        ),
        ("wpipe", dict(num_stages=2, num_micro_batches=2), 0, swap("2U0", "2F2"), "task 2F2 uses version 1", ">2F2<"),
    ],
)
def test_rules(name, options, worker, edit, reason, marked):
    schedule = edited(generate(name, **options), worker, edit)
    if reason is None:
        validate(schedule)
        return
    with pytest.raises(InvalidScheduleError, match=reason) as caught:
        validate(schedule)
    message = str(caught.value)
    first, *grid = message.splitlines()
    assert first == caught.value.reason
    assert len(grid) == min(schedule.num_workers, 17)
    if marked:
        row = next(line for line in grid if line.strip().startswith(f"worker {worker} "))
        assert marked in row


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(delays=(0, 0)), "delays has 2 entries, must have 3"),
        (dict(delays=(0, -1, 0)), "delays are .* must be at least 0"),
        (dict(widths=(1, 0, 1)), "widths are .* must be at least 1"),
        (dict(update_period=0), "update_period is 0"),
        (dict(num_micro_batches=0), "num_micro_batches is 0"),
        (dict(num_micro_batches=5), "no task works on micro-batch 4"),
        (dict(placement=((0, 1),)), "pipeline 0 places 2 stages, the model has 3"),
        (dict(placement=((0, 1, 5),)), "pipeline 0 places stage 2 on worker 5, there are 3"),
        (dict(placement=((0, 1, 2), (0, 2, 1))), r"two pipelines place stage 0 on one worker: \[0, 0\]"),
        (dict(activation_limits=(3.0, 1.0, 1.0)), "worker 1 holds the activations of 2 micro-batches .* limit is 1"),
    ],
)
def test_headers(changes, reason):
    with pytest.raises(InvalidScheduleError, match=reason):
        validate(replace(generate("1f1b", **ONE), **changes))


def test_the_cell_beyond_the_memory_bound_is_marked():
    with pytest.raises(InvalidScheduleError) as caught:
        generate("gpipe", num_stages=2, num_micro_batches=4, activation_limit=2)
    assert caught.value.cells == ((0, 2),)
    assert ">0F2<" in str(caught.value)
    generate("gpipe", num_stages=2, num_micro_batches=4, activation_limit=4)


def test_collectives_in_different_orders_deadlock():
    """Workers 1 and 2 share stages 1 and 2: launching their all-reduces in different orders hangs both."""
    schedule = generate("chimera", **CHIMERA, all_reduce="none")
    broken = edited(schedule, 2, swap("2A0", "1:1A0"))
    with pytest.raises(InvalidScheduleError, match=r"deadlock: worker 1 at 1:2U0, worker 2 at 2U0"):
        validate(broken)


def test_a_cycle_over_several_workers_names_all_of_them():
    text = "\n".join(
        [
            "# schedule,cycle",
            "# micro-batches,2",
            "# update-period,2",
            "# pipeline,0 1",
            "# pipeline,1 0",
            "worker 0,1:1F1,0F0,0B0,1:1B1,0A0,1:1A0,0U0,1:1U0",
            "worker 1,1F0,1:0F1,1B0,1:0B1,1:0A0,1A0,1:0U0,1U0",
        ]
    )
    with pytest.raises(InvalidScheduleError, match="deadlock: worker 0 at 1:1F1, worker 1 at 1F0 wait") as caught:
        validate(from_csv(text))
    assert ">1:1F1<" in str(caught.value) and ">1F0<" in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([family.name for family in families()]),
    st.randoms(use_true_random=False),
)
def test_a_random_swap_is_refused_or_executable(name, rng: random.Random):
    """Whatever the validator lets through runs to its end, with every task after what it needs."""
    schedule = generate(name, num_stages=4, num_micro_batches=4)
    worker = rng.randrange(4)
    tasks = list(schedule.workers[worker])
    i, j = rng.sample(range(len(tasks)), 2)
    tasks[i], tasks[j] = tasks[j], tasks[i]
    workers = list(schedule.workers)
    workers[worker] = tuple(tasks)
    changed = replace(schedule, workers=tuple(workers))
    try:
        validate(changed)
    except InvalidScheduleError:
        return
    timeline = simulate(changed, Times.of(changed.num_stages, forward=1, backward=2))
    ends = {task: timeline.ends[w][k] for w, k, task in changed.tasks()}
    starts = {task: timeline.starts[w][k] for w, k, task in changed.tasks()}
    for task, start in starts.items():
        if task.kind is Kind.FORWARD and task.stage:
            assert start >= ends[task._replace(stage=task.stage - 1)]
        if task.kind is Kind.BACKWARD:
            assert start >= ends[task._replace(kind=Kind.FORWARD)]
            if task.stage < changed.num_stages - 1:
                assert start >= ends[task._replace(stage=task.stage + 1)]


def single_threaded(schedule: Schedule) -> bool:
    """Whether the schedule gets through when every worker has one thread and every transfer and collective blocks all
    its ends.

    Each worker's program is its compute and its share of :func:`timeline_order`; where in it a transfer stands
    follows from the simulated times alone.
    """
    times = Times.of(schedule.num_stages, forward=1, backward=1, backward_input=0.5, transfer=0.125, all_reduce=0.125)
    timeline = simulate(schedule, times)
    programs: list[list[tuple[float, int, object]]] = [[] for _ in schedule.workers]
    for worker, index, task in schedule.tasks():
        if task.kind is not Kind.ALL_REDUCE:
            programs[worker].append((timeline.starts[worker][index], 1, (worker, index)))
    order = timeline_order(schedule, timeline)
    ends_of: dict[int, tuple[int, ...]] = {}
    for number, item in enumerate(order):
        ends_of[number] = (item.source, item.destination) if isinstance(item, Transfer) else item.workers
        for worker in ends_of[number]:
            programs[worker].append((item.begins, 0, number))
    for program in programs:
        program.sort(key=lambda entry: entry[:2])
    position = [0] * len(programs)
    arrived: dict[int, int] = {}
    made: set[object] = set()
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            while position[worker] < len(program):
                entry = program[position[worker]][2]
                if isinstance(entry, tuple):
                    made.add(entry)
                elif arrived.get(entry, 0) < len(ends_of[entry]) and all(
                    position[other] < len(programs[other]) and programs[other][position[other]][2] == entry
                    for other in ends_of[entry]
                ):
                    item = order[entry]
                    if isinstance(item, Transfer):  # what is sent must have been computed
                        assert (item.source, schedule.workers[item.source].index(item.task)) in made
                    for other in ends_of[entry]:
                        position[other] += 1
                    arrived[entry] = len(ends_of[entry])
                    moved = True
                    continue
                else:
                    break
                position[worker] += 1
                moved = True
    return all(position[worker] == len(program) for worker, program in enumerate(programs))


@pytest.mark.parametrize("family", [family.name for family in families()])
@pytest.mark.parametrize("options", [dict(), dict(recompute=True), dict(width=2), dict(all_reduce="eager")], ids=str)
def test_no_deadlock_under_blocking_pairwise_sends(family, options):
    for num_micro_batches in (4, 8):
        assert single_threaded(generate(family, num_stages=4, num_micro_batches=num_micro_batches, **options))


@pytest.mark.parametrize("num_pipelines", [2, 4, 8])
def test_no_deadlock_of_chimera_under_blocking_pairwise_sends(num_pipelines):
    for num_micro_batches in (1, 3, 8, 11, 24):
        for concatenation in ("direct", "doubling", "halving"):
            schedule = generate(
                "chimera",
                num_stages=8,
                num_micro_batches=num_micro_batches,
                num_pipelines=num_pipelines,
                concatenation=concatenation,
            )
            assert single_threaded(schedule)
