"""Words of workers and the actions of their ranks: what is written is read back, and what is read gets through."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autoddl.costmodel.crossing import cuts_of
from autoddl.costmodel.distribution import canonical
from autoddl.costmodel.errors import UserError
from autoddl.pipelines import Schedule, Times, generate, simulate
from autoddl.pipelines.runtime.pipeline.actions import Action, Receive, Reduce, Send
from autoddl.pipelines.runtime.pipeline.dryrun import check_programs
from autoddl.pipelines.runtime.pipeline.holding import Holding, StageLayout, make_holding, rows_over
from autoddl.pipelines.runtime.pipeline.lowering import Lowered, lower_with_timeline
from autoddl.pipelines.runtime.pipeline.words import Crossing, WorkerWords, word_of

from .test_lowering import schedules


def times_of(schedule: Schedule) -> Times:
    return Times.of(
        schedule.num_stages, forward=1, backward=2, backward_input=1, transfer=0.3, all_reduce=0.5, update=0.1
    )


def of_workers(schedule: Schedule, joint: bool, tied: tuple[tuple[int, ...], ...]) -> Lowered:
    """As if every worker were one rank."""
    alone = rows_over(1)
    single = replace(schedule, widths=(1,) * schedule.num_workers)
    holding = Holding(single, 1, (StageLayout(alone, alone, 1, 1, joint),) * schedule.num_stages)
    return lower_with_timeline(holding, simulate(schedule, times_of(schedule)), tied=tied)


def reader(holding: Holding, joint: bool) -> WorkerWords:
    schedule, layouts = holding.schedule, holding.layouts
    assert layouts is not None
    crossings = [
        Crossing((holding.slot_rows, one.columns), cuts_of(one.leaving, 2), cuts_of(other.arriving, 2))
        for one, other in zip(layouts, layouts[1:])
    ]
    workers = [holding.ranks.ranks_of(worker) for worker in range(schedule.num_workers)]
    stages = range(schedule.num_stages) if joint else ()
    return WorkerWords(schedule, holding.slots_per_micro_batch, workers, crossings, stages)


def text_of(actions: tuple[Action, ...]) -> str:
    return " ".join(map(word_of, actions))


def tied_in(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    return ((0, schedule.num_stages - 1),) if schedule.is_synchronous else ()


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("schedule", schedules())
def test_actions_of_single_ranks_are_read_back(schedule, joint):
    lowered = of_workers(schedule, joint, tied_in(schedule))
    words = reader(lowered.holding, joint)
    for worker in range(schedule.num_workers):
        program = lowered.program(worker)
        found = words.program(text_of(program.actions), worker, worker)
        assert found.actions == program.actions
        assert (found.rank, found.worker, found.blocks) == (worker, worker, program.blocks)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("schedule", schedules(width=2))
def test_every_rank_has_its_share_of_a_word(schedule, joint):
    """Stages in turn with rows and with features split: the ranks' actions are those that the schedule is lowered to, and the
    dry run gets through them."""
    tied = tied_in(schedule)
    layouts = [canonical(((2 - stage % 2, 1 + stage % 2),)) for stage in range(schedule.num_stages)]
    own = [StageLayout(layout, layout, 4, 2, joint) for layout in layouts]
    if any((p, s + 1) in schedule.stages_on(w) for w in range(schedule.num_workers) for p, s in schedule.stages_on(w)):
        own = [replace(one, leaving=layouts[0], arriving=layouts[0]) for one in own]
    holding = make_holding(schedule, 8, own)
    lowered = lower_with_timeline(holding, simulate(schedule, times_of(schedule)), tied=tied)
    texts = [text_of(program) for program in of_workers(schedule, joint, tied).programs]
    words = reader(holding, joint)
    programs = []
    for rank, expected in enumerate(lowered.programs):
        worker = holding.ranks.worker_of(rank)
        found = words.program(texts[worker], worker, rank)
        assert Counter(found.actions) == Counter(expected)
        assert found.blocks == lowered.program(rank).blocks
        assert communication_in(found.actions) == communication_in(expected)
        programs.append(found.actions)
    check_programs(holding, programs)


def communication_in(actions: tuple[Action, ...]) -> list[Action]:
    """In the one order that all ranks keep to."""
    return [action for action in actions if isinstance(action, (Send, Receive, Reduce))]


@pytest.mark.parametrize("word", ["2X5", "2F5>", "F", "2F5>x", "0&A3", "2F", "K3"])
def test_what_is_no_word_is_named(word):
    lowered = of_workers(generate("1f1b", num_stages=2, num_micro_batches=2), False, ())
    with pytest.raises(UserError, match=r"is not a word for an action; words read like 2F5, 2F5>3") as raised:
        reader(lowered.holding, False).program(f"0F0 0B0 {word}", 0, 0)
    assert repr(word) in str(raised.value)


def test_a_forward_pass_without_a_backward_pass_is_named():
    lowered = of_workers(generate("1f1b", num_stages=2, num_micro_batches=2), False, ())
    with pytest.raises(UserError, match="'0F1' has no backward pass in the words of worker 0"):
        reader(lowered.holding, False).program("0F0 0F1 0B0", 0, 0)
