"""The passes from schedules to ranks' programs; none of them needs OneFlow."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.errors import UserError
from autoddl.pipelines import Kind, Schedule, Times, generate, parse_task, simulate_one_stream
from autoddl.pipelines.communication import Transfer
from autoddl.pipelines.memory import weight_versions
from autoddl.pipelines.runtime.pipeline.actions import Drop, Message, Receive, Reduce, Rest, Run, Send, Update
from autoddl.pipelines.runtime.pipeline.dryrun import ProgramError, check_programs
from autoddl.pipelines.runtime.pipeline.holding import make_holding
from autoddl.pipelines.runtime.pipeline.local import local_actions
from autoddl.pipelines.runtime.pipeline.lowering import lower
from autoddl.pipelines.runtime.pipeline.order import communication, messages
from autoddl.pipelines.runtime.pipeline.slots import RankMap

from ...pipelines.random_times import random_times

FAMILIES = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("1f1b", {"policy": "B"}),
    ("gems", {}),
    ("chimera", {}),
    ("chimera", {"num_pipelines": 4}),
    ("chimera", {"concatenation": "doubling"}),
    ("chimera", {"concatenation": "halving"}),
    ("chimera", {"all_reduce": "eager"}),
    ("grouped-gpipe", {}),
    ("interleaved-1f1b", {}),
    ("zero-bubble", {}),
    ("zero-bubble", {"policy": "H2"}),
    ("pipedream", {}),
    ("pipedream-2bw", {}),
    ("wpipe", {}),
]


def schedules(num_stages: int = 4, num_micro_batches: int = 8, **options):
    return [
        pytest.param(
            generate(name, num_stages=num_stages, num_micro_batches=num_micro_batches, **own, **options),
            id="-".join([name, *map(str, own.values())]),
        )
        for name, own in FAMILIES
    ]


def texts(actions) -> list[str]:
    return [str(action) for action in actions]


# ---- Slots and pieces --------------------------------------------------------------------------------------------------


def test_ranks_of_workers():
    ranks = RankMap((1, 4, 2))
    assert [list(ranks.ranks_of(worker)) for worker in range(3)] == [[0], [1, 2, 3, 4], [5, 6]]
    assert [ranks.worker_of(rank) for rank in range(7)] == [0, 1, 1, 1, 1, 2, 2]
    assert [ranks.rows_of(rank, 4) for rank in (0, 2, 6)] == [range(0, 4), range(1, 2), range(2, 4)]


def runs_of(schedule: Schedule, worker: int) -> dict[str, Run]:
    return {
        str(task): action for task, own in local_actions(schedule)[worker] for action in own if isinstance(action, Run)
    }


def test_a_forward_is_cut_as_its_backwards_take_it():
    doubling = generate("chimera", num_stages=2, num_micro_batches=4, concatenation="doubling")
    pair = runs_of(doubling, 0)["0F0+1"]
    assert (pair.first_slot, pair.slots_per_piece) == (0, (1, 1))
    halving = generate("chimera", num_stages=2, num_micro_batches=4, concatenation="halving")
    runs = runs_of(halving, 0)
    assert (runs["0F0"].first_slot, runs["0F0"].slots_per_piece) == (0, (1, 1))
    runs = runs_of(generate("chimera", num_stages=2, num_micro_batches=1, concatenation="halving", iterations=2), 0)
    assert (runs["0F1"].first_slot, runs["0F1"].slots_per_piece) == (2, (1, 1))
    assert (runs["0B1b"].first_slot, runs["0B1b"].slots_per_piece) == (3, (1,))
    plain = runs_of(generate("1f1b", num_stages=2, num_micro_batches=4), 0)
    assert (plain["0F3"].first_slot, plain["0F3"].slots_per_piece) == (3, (1,))


# ---- Weight versions ---------------------------------------------------------------------------------------------------


def test_versions_of_2bw():
    """Period 2 and one update of delay: version 0 serves periods 0 and 1, and so outlives the first update."""
    schedule = generate("pipedream-2bw", num_stages=2, num_micro_batches=2, iterations=3)
    weights = [str(a) for _, own in local_actions(schedule)[1] for a in own if not isinstance(a, Run)]
    assert weights == ["update 1U0 keep", "drop 1v0", "update 1U1 keep", "drop 1v1", "update 1U2"]
    versions = {str(t): a.version for t, own in local_actions(schedule)[1] for a in own if isinstance(a, Run)}
    assert versions == {f"1{kind}{m}": max(0, m // 2 - 1) for m in range(6) for kind in "FB"}


@pytest.mark.parametrize("schedule", schedules(iterations=5))
def test_as_many_copies_as_the_memory_model_says(schedule):
    """Replaying updates and drops: every version that is read is there, and there are never more than predicted."""
    for worker, aligned in enumerate(local_actions(schedule)):
        alive = {key: {0} for key in schedule.stages_on(worker)}
        peak = {key: 1 for key in alive}
        for task, own in aligned:
            key = (task.pipeline, task.stage)
            for action in own:
                if isinstance(action, Run):
                    assert action.version in alive[key]
                elif isinstance(action, Update):
                    assert task.micro_batch == max(alive[key])
                    alive[key].add(task.micro_batch + 1)
                    if not action.keeps:
                        alive[key].remove(task.micro_batch)
                else:
                    assert isinstance(action, Drop)
                    alive[action.pipeline, action.stage].remove(action.version)
                peak[key] = max(peak[key], len(alive[key]))
        assert all(len(versions) == 1 for versions in alive.values())
        predicted = weight_versions(schedule)
        assert peak == {key: predicted[key] for key in alive}


# ---- Messages ----------------------------------------------------------------------------------------------------------


def test_split_and_concatenation():
    def of(widths, task, source, destination):
        holding = make_holding(generate("1f1b", num_stages=2, num_micro_batches=4, width=widths), 4)
        transfer = Transfer(parse_task(task), source, destination, 0.0)
        return [str(Send(m)) for m in messages(transfer, holding)]

    assert of((1, 1), "0F3", 0, 1) == ["send 0F3 to 1"]
    assert of((1, 2), "0F3", 0, 1) == ["send 0F3[0:2] to 1", "send 0F3[2:4] to 2"]
    assert of((2, 1), "0F3", 0, 1) == ["send 0F3[0:2] to 2", "send 0F3[2:4] to 2"]
    assert of((2, 2), "1B3", 1, 0) == ["send 1B3[0:2] to 0", "send 1B3[2:4] to 1"]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_every_row_goes_once_to_where_it_is_wanted(left, right, factor):
    rows = left * right * factor
    ranks = RankMap((left, right))
    holding = make_holding(generate("1f1b", num_stages=2, num_micro_batches=1, width=(left, right)), rows)
    sent = messages(Transfer(parse_task("0F0"), 0, 1, 0.0), holding)
    arrived = Counter((m.destination, row) for m in sent for row in range(m.first_row, m.first_row + m.num_rows))
    assert arrived == Counter((rank, row) for rank in ranks.ranks_of(1) for row in ranks.rows_of(rank, rows))
    assert all(set(range(m.first_row, m.first_row + m.num_rows)) <= set(ranks.rows_of(m.source, rows)) for m in sent)
    if left == right:
        assert len(sent) == left


# ---- Programs ----------------------------------------------------------------------------------------------------------


def test_a_program_to_read():
    """Chimera on two stages: stage 0's sum is issued once both replicas are complete, beside what is left to compute."""
    lowered = lower(generate("chimera", num_stages=2, num_micro_batches=2), 4)
    assert texts(lowered.programs[0]) == [
        "run 0F0 v0",
        "send 0F0 to 1",
        "receive 1:0F1 from 1",
        "receive 1B0 from 1",  # rank 1 is ahead, since 0F0 was sent first: 1B0 travels before 1:1B1
        "run 1:1F1 v0",
        "run 1:1B1 v0",
        "send 1:1B1 to 1",
        "run 0B0 v0",
        "reduce 1A0 of (0 1)",
        "reduce 0A0 of (0 1)",
        "update 1:1U0",
        "update 0U0",
    ]


@pytest.mark.parametrize("width", [1, 2, (1, 2, 4, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_programs_do_all_that_the_schedule_says(recompute, width):
    for parameter in schedules(num_stages=4, width=width, recompute=recompute):
        (schedule,) = parameter.values
        tied = [(0, schedule.num_stages - 1)] if schedule.is_synchronous else []
        lowered = lower(schedule, 8, tied=tied)
        for rank, program in enumerate(lowered.programs):
            tasks = schedule.workers[lowered.ranks.worker_of(rank)]
            done = [action.task for action in program if isinstance(action, (Run, Update))]
            assert done == [task for task in tasks if task.kind is not Kind.ALL_REDUCE]
            launches = Counter((t.stage, t.micro_batch) for t in tasks if t.kind is Kind.ALL_REDUCE)
            reduces = [action for action in program if isinstance(action, Reduce)]
            assert Counter((a.stages[0], a.update) for a in reduces if len(a.stages) == 1) == launches
            assert all(rank in action.ranks and list(action.ranks) == sorted(action.ranks) for action in reduces)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("schedule", schedules())
def test_all_ranks_follow_one_order(schedule, compress):
    """Every rank's communication is a subsequence of one list of all of it."""
    lowered = lower(schedule, 8, compress=compress)
    times = Times.of(schedule.num_stages, forward=1, backward=1, backward_input=0.5, transfer=0.125, all_reduce=0.125)
    timeline = simulate_one_stream(schedule, times)
    order = communication(lowered.holding, timeline, local_actions(schedule), compress=compress)
    place = {entry: index for index, entry in enumerate(order)}
    for program in lowered.programs:
        own = [
            place[action.message if isinstance(action, (Send, Receive)) else action]
            for action in program
            if isinstance(action, (Send, Receive, Rest, Reduce))
        ]
        assert own == sorted(own)
    both = Counter(a.message for p in lowered.programs for a in p if isinstance(a, (Send, Receive)))
    assert set(both) == {entry for entry in order if isinstance(entry, Message)}
    assert set(both.values()) <= {2}
    rests = Counter(a.message for p in lowered.programs for a in p if isinstance(a, Rest))
    assert rests == (both if compress else {})


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(FAMILIES),
    st.integers(1, 3).map(lambda half: 2 * half),
    st.integers(1, 9),
    st.integers(1, 2),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_whatever_the_times_programs_get_through(family, num_stages, num_micro_batches, width, compress, generator):
    """Any family, any times: the order that they give passes the dry run (which `lower` makes)."""
    name, options = family
    try:
        schedule = generate(name, num_stages=num_stages, num_micro_batches=num_micro_batches, width=width, **options)
    except UserError:
        return

    times = random_times(schedule.num_stages, generator)
    lower(schedule, 4, times=times, compress=compress)


def test_second_parts_come_when_they_are_wanted():
    """The next activation's first part is on its way while the rank computes, whether or not the one before has a second part."""
    lowered = lower(generate("gpipe", num_stages=2, num_micro_batches=2), 4, compress=True)
    assert texts(lowered.programs[1]) == [
        "receive 0F0 from 0",
        "rest of 0F0, 0 to 1",
        "receive 0F1 from 0",
        "run 1F0 v0",
        "rest of 0F1, 0 to 1",
        "run 1F1 v0",
        "run 1B0 v0",
        "send 1B0 to 0",
        "rest of 1B0, 1 to 0",
        "run 1B1 v0",
        "send 1B1 to 0",
        "rest of 1B1, 1 to 0",
        "update 1U0",
    ]


def test_tied_weights_are_summed_before_the_first_update():
    schedule = generate("1f1b", num_stages=2, num_micro_batches=2, iterations=2)
    for program in lower(schedule, 2, tied=[(0, 1)]).programs:
        tail = [str(a) for a in program if isinstance(a, (Reduce, Update))]
        stage = "0" if "update 0U0" in tail else "1"
        assert tail == [
            "reduce 0&1A0 of (0 1)",
            f"update {stage}U0",
            "reduce 0&1A1 of (0 1)",
            f"update {stage}U1",
        ]


# ---- Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "wpipe"])
def test_tied_weights_need_one_moment_of_update(name):
    schedule = generate(name, num_stages=2, num_micro_batches=2)
    with pytest.raises(
        UserError, match=f"stages 0 and 1 share weights, which schedule {name} updates at different times"
    ):
        lower(schedule, 2, tied=[(0, 1)])


@pytest.mark.parametrize(("width", "concatenation", "multiple"), [(3, "direct", 3), (2, "halving", 4)])
def test_rows_must_divide(width, concatenation, multiple):
    schedule = generate("chimera", num_stages=2, num_micro_batches=4, width=width, concatenation=concatenation)
    with pytest.raises(UserError, match=f"micro_batch_rows is 2, .* give a multiple of {multiple}"):
        lower(schedule, 2)


def programs_of(name: str, **options):
    schedule = generate(name, num_stages=2, num_micro_batches=2, **options)
    lowered = lower(schedule, 2)
    return lowered.holding, [list(program) for program in lowered.programs]


def test_the_dry_run_finds_a_deadlock():
    """Rank 1 asks for the second activation first, while rank 0 waits to be rid of the first one."""
    holding, programs = programs_of("gpipe")
    check_programs(holding, programs)
    first, second = (index for index, action in enumerate(programs[1]) if str(action).startswith("receive"))
    assert second == first + 1
    programs[1][first : second + 1] = [programs[1][second], programs[1][first]]
    with pytest.raises(
        ProgramError, match="rank 0 waits in 'send 0F0 to 1' for rank 1, which is at 'receive 0F1 from 0'"
    ):
        check_programs(holding, programs)


def test_the_dry_run_finds_a_rank_that_never_comes():
    holding, programs = programs_of("gpipe")
    programs[1] = []
    with pytest.raises(ProgramError, match="rank 0 waits in 'send 0F0 to 1' for rank 1, which is at 'its end'"):
        check_programs(holding, programs)


@pytest.mark.parametrize("seed", range(5))
def test_the_dry_run_finds_a_computation_before_its_input(seed):
    holding, programs = programs_of("gpipe")
    program = programs[1]
    receives = [index for index, action in enumerate(program) if isinstance(action, Receive)]
    index = random.Random(seed).choice(receives)
    program.insert(len(program), program.pop(index))
    with pytest.raises(ProgramError, match=r"rank 1 reaches 'run 1F|waits in"):
        check_programs(holding, programs)


def test_the_dry_run_finds_a_computation_before_a_second_part():
    schedule = generate("gpipe", num_stages=2, num_micro_batches=2)
    lowered = lower(schedule, 2, compress=True)
    check_programs(lowered.holding, lowered.programs, compress=True)
    programs = [[action for action in program if str(action) != "rest of 0F0, 0 to 1"] for program in lowered.programs]
    with pytest.raises(ProgramError, match="rank 1 reaches 'run 1F0 v0' without its input"):
        check_programs(lowered.holding, programs, compress=True)


def test_the_dry_run_finds_an_update_before_its_sum():
    holding, programs = programs_of("chimera")
    for program in programs:
        updates = [action for action in program if isinstance(action, Update)]
        program[:] = (
            [a for a in program if not isinstance(a, (Update, Reduce))]
            + updates
            + [a for a in program if isinstance(a, Reduce)]
        )
    with pytest.raises(ProgramError, match=r"reaches 'update .*' without the sum of its gradients"):
        check_programs(holding, programs)


def test_an_invalid_schedule_is_not_lowered():
    schedule = generate("1f1b", num_stages=2, num_micro_batches=2)
    with pytest.raises(UserError, match="schedule 1f1b"):
        lower(replace(schedule, workers=schedule.workers[::-1]), 2)
