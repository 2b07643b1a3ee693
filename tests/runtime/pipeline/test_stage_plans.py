"""Stages with SBP plans: programs, layouts at boundaries, weights that stages share and predicted bytes. Needs no OneFlow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.distribution import canonical
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.layer import Parameter
from autoddl.costmodel.strategy import Choices, data_parallel, enumerate_strategies
from autoddl.pipelines import Kind, Times, generate
from autoddl.pipelines.runtime.kinds.registry import parameter_layouts
from autoddl.pipelines.runtime.pipeline.actions import Message, Receive, Run, Send
from autoddl.pipelines.runtime.pipeline.dryrun import ProgramError, check_programs
from autoddl.pipelines.runtime.pipeline.holding import StageLayout
from autoddl.pipelines.runtime.pipeline.lowering import lower
from autoddl.pipelines.runtime.pipeline.shared_weights import weight_pieces
from autoddl.pipelines.runtime.pipeline.stage_plans import stage_layouts
from autoddl.pipelines.runtime.pipeline.stage_traffic import gradient_sums, stage_traffic
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.zoo import layers
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.layers import GraphBuilder, linear
from autoddl.zoo.transformers import gpt

from .stage_plan_cases import FAMILIES, GPT, MLP_WIDTHS, cut_layers, stage_layer, strategy_of

# ---- Programs ----------------------------------------------------------------------------------------------------------


def joint(num_ranks: int, p0: int, columns: int = 24) -> StageLayout:
    """A layout that splits rows p0 ways and columns over the remaining ranks, with communication during computations."""
    layout = canonical(((p0, num_ranks // p0),))
    return StageLayout(layout, layout, columns, p0, num_ranks > 1)


def texts(actions: Sequence[Any]) -> list[str]:
    return [str(action) for action in actions]


def test_a_program_to_read():
    """1F1B, with columns split in the first stage and rows in the second.

    Stage 1 receives 0F1 before it computes 1B0, although it needs 0F1 only later: stage 0 must have sent it before it receives 1B0.
    """
    lowered = lower(generate("1f1b", num_stages=2, num_micro_batches=2, width=2), 4, layouts=[joint(2, 1), joint(2, 2)])
    assert texts(lowered.programs[0]) == [
        "run 0F0 v0 of (0 1)",
        "send 0F0[0:2,0:12] to 2",
        "send 0F0[2:4,0:12] to 3",
        "run 0F1 v0 of (0 1)",
        "send 0F1[0:2,0:12] to 2",
        "send 0F1[2:4,0:12] to 3",
        "receive 1B0[0:2,0:12] from 2",
        "receive 1B0[2:4,0:12] from 3",
        "run 0B0 v0 of (0 1)",
        "receive 1B1[0:2,0:12] from 2",
        "receive 1B1[2:4,0:12] from 3",
        "run 0B1 v0 of (0 1)",
        "reduce 0A0 of (0 1)",
        "update 0U0",
    ]
    assert texts(lowered.programs[2])[:8] == [
        "receive 0F0[0:2,0:12] from 0",
        "receive 0F0[0:2,12:24] from 1",
        "run 1F0 v0 of (2 3)",
        "receive 0F1[0:2,0:12] from 0",
        "receive 0F1[0:2,12:24] from 1",
        "run 1B0 v0 of (2 3)",
        "send 1B0[0:2,0:12] to 0",
        "send 1B0[0:2,12:24] to 1",
    ]


def test_ranks_without_communication_inside_receive_early():
    """A stage of one rank receives as early as the order allows, even if the other stage has joint computations."""
    schedule = generate("gpipe", num_stages=2, num_micro_batches=3, width=(2, 1))
    alone = texts(lower(schedule, 4, layouts=[joint(2, 1), joint(1, 1)]).programs[2])
    assert alone[:3] == [
        f"receive 0F0[0:4,{a}:{a + 12}] from {r}" if a >= 0 else alone[2] for a, r in ((0, 0), (12, 1), (-1, 0))
    ]
    first_run = next(i for i, text in enumerate(alone) if text.startswith("run"))
    assert sum(text.startswith("receive") for text in alone[:first_run]) == 6
    assert not any(" of (" in text for text in alone if text.startswith("run"))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(FAMILIES),
    st.sampled_from([2, 4]),
    st.integers(1, 6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_programs_get_through_whatever_the_times(family, num_stages, num_micro_batches, compress, generator):
    """`lower`, with its dry run, succeeds for any family, widths, layouts and times (some of them zero).

    All ranks of a worker have the same computations in the same order, and each message has one sender and one receiver.
    """
    name, options = family
    try:
        bare = generate(name, num_stages=num_stages, num_micro_batches=num_micro_batches, **options)
    except UserError:
        return
    # Workers that hold the same stage are equally wide.
    classes: dict[int, int] = {}
    for worker in range(bare.num_workers):
        mates = {replica.worker for _, stage in bare.stages_on(worker) for replica in bare.replicas_of(stage)}
        classes[worker] = min([worker, *(classes[mate] for mate in mates if mate in classes)])
    by_class = {one: generator.choice([1, 2, 4]) for one in set(classes.values())}
    widths = tuple(by_class[classes[worker]] for worker in range(bare.num_workers))
    schedule = generate(name, num_stages=num_stages, num_micro_batches=num_micro_batches, width=widths, **options)
    layouts = []
    for stage in range(schedule.num_stages):
        width = widths[schedule.placement[0][stage]]
        layouts.append(joint(width, generator.choice([p for p in (1, 2, 4) if width % p == 0])))

    def some(count: int) -> list[float]:
        return [generator.choice([0.0, generator.uniform(0.05, 3)]) for _ in range(count)]

    stages = schedule.num_stages
    times = Times.of(
        stages, forward=some(stages), backward=some(stages), transfer=some(stages - 1), all_reduce=some(stages)
    )
    lowered = lower(schedule, 8, times=times, layouts=layouts, compress=compress)
    for worker in range(schedule.num_workers):
        together = {
            tuple(str(a) for a in lowered.programs[rank] if isinstance(a, Run))
            for rank in lowered.ranks.ranks_of(worker)
        }
        assert len(together) == 1
        assert all((" of (" in text) == (widths[worker] > 1) for text in together.pop())
    both = Counter(a.message for p in lowered.programs for a in p if isinstance(a, (Send, Receive)))
    assert set(both.values()) <= {2}


def test_everything_arrives():
    """The messages to each rank cover its block of every slot exactly once."""
    schedule = generate("chimera", num_stages=2, num_micro_batches=4, width=4, concatenation="halving")
    lowered = lower(schedule, 8, layouts=[joint(4, 2), joint(4, 1)])
    for rank, program in enumerate(lowered.programs):
        filled: dict[Any, np.ndarray] = {}
        for action in program:
            if isinstance(action, Receive):
                message: Message = action.message
                for slot in range(message.first_slot, message.first_slot + message.num_slots):
                    matrix = filled.setdefault((message.task, slot), np.zeros((4, 24), int))
                    columns = message.columns or range(24)
                    matrix[message.first_row : message.first_row + message.num_rows, columns.start : columns.stop] += 1
        for (task, _), matrix in filled.items():
            stage = task.stage + (1 if task.kind is Kind.FORWARD else -1)
            block = lowered.holding.block(rank, stage, is_leaving=task.kind is not Kind.FORWARD)
            wanted = np.zeros((4, 24), int)
            wanted[block.rows.start : block.rows.stop, block.columns.start : block.columns.stop] = 1
            np.testing.assert_array_equal(matrix, wanted)


def test_the_dry_run_finds_ranks_that_compute_in_another_order():
    lowered = lower(
        generate("gpipe", num_stages=2, num_micro_batches=2, width=2), 4, layouts=[joint(2, 1), joint(2, 1)]
    )
    programs = [list(program) for program in lowered.programs]
    check_programs(lowered.holding, programs)
    first, second = [i for i, action in enumerate(programs[1]) if isinstance(action, Run)][:2]
    programs[1][first], programs[1][second] = programs[1][second], programs[1][first]
    with pytest.raises(
        ProgramError, match=r"waits in 'run 0F0 v0 of \(0 1\)' for rank 1, which is at 'run 0F1 v0 of \(0 1\)'"
    ):
        check_programs(lowered.holding, programs)


def test_the_dry_run_finds_receives_that_hold_up_a_computation():
    """If ranks with joint computations received as early as others do, they would deadlock: before stage 0 has sent all, it would
    wait for 1B0."""
    lowered = lower(generate("1f1b", num_stages=2, num_micro_batches=2, width=2), 4, layouts=[joint(2, 1), joint(2, 1)])
    programs = [list(program) for program in lowered.programs]
    for rank in (0, 1):
        early = next(action for action in programs[rank] if isinstance(action, Receive))
        programs[rank].remove(early)
        programs[rank].insert(2, early)
    with pytest.raises(ProgramError, match="waits in"):
        check_programs(lowered.holding, programs)


def test_stages_in_a_row_on_one_worker_meet_in_one_layout():
    schedule = generate("interleaved-1f1b", num_stages=1, num_micro_batches=2, width=2, groups=2)
    assert schedule.placement == ((0, 0),)
    lowered = lower(schedule, 4, layouts=[joint(2, 2), joint(2, 2)])
    assert not any(isinstance(action, (Send, Receive)) for program in lowered.programs for action in program)
    with pytest.raises(
        UserError, match=r"worker 0 has stages 0 and 1, .* changes from \(S0:2\) to \(S1:2\); give both"
    ):
        lower(schedule, 4, layouts=[joint(2, 2), joint(2, 1)])


# ---- Stages of a graph -------------------------------------------------------------------------------------------------


def test_layouts_of_stages():
    graph = mlp(MLP_WIDTHS)
    first = StagePlan({"fc1": strategy_of(2, 1, 2), "fc2": strategy_of(1, 2, 2)})
    second = StagePlan({"fc3": strategy_of(2, 1, 1), "fc4": strategy_of(1, 1, 2)})
    layouts = stage_layouts(graph, [first, second])
    assert [str(layout.leaving) for layout in layouts] == ["(S1:2@1, S1:2@2)", "(S1:2)"]
    assert str(layouts[1].arriving) == "(S0:2)"
    assert [(layout.columns, layout.row_multiple, layout.is_joint) for layout in layouts] == [
        (24, 2, True),
        (24, 2, True),
    ]
    alone = StagePlan(dict.fromkeys(("fc1", "fc2"), strategy_of(2, 1, 1)))
    assert not stage_layouts(graph, [alone, second])[0].is_joint
    chosen = replace(second, entry=strategy_of(1, 2, 1))
    assert str(stage_layouts(graph, [first, chosen])[1].arriving) == "(S1:2)"


def test_stages_must_fit_the_graph():
    graph = gpt(GPT)
    halves = cut_layers(graph, ["h.1"])
    plans = [StagePlan({layer.name: strategy_of(1, 1, 1) for layer in half}) for half in halves]
    stage_layouts(graph, plans)
    inside = [
        StagePlan({layer.name: strategy_of(1, 1, 1) for layer in half})
        for half in cut_layers(graph, ["h.1.attn.c_proj"])
    ]
    wide = replace(plans[1], strategies={**plans[1].strategies, "loss": strategy_of(2, 1, 1)})
    for stages, message in (
        (plans[:1], "layer 'h.1.ln_1' is in no stage"),
        (plans[::-1], "stages should be all layers in their order"),
        (inside, r"between stages 0 and 1 pass 'h.1.attn' and 'h.0.add_2'; cut where one tensor passes"),
        ([plans[0], wide], r"stage 1 is for 1 ranks, loss \(loss, .*\) for 2"),
        (
            [plans[0], replace(plans[1], entry=strategy_of(2, 1, 1))],
            r"stage 1 is for 1 ranks, its entry \(2,1,1\) for 2",
        ),
    ):
        with pytest.raises(UserError, match=message):
            stage_layouts(graph, stages)


def test_both_vectors_of_a_shared_norm_are_sums_of_both_stages():
    """A norm that is used twice shares scale and shift, which have one size: neither is among the stage's own sums."""
    builder = GraphBuilder("shares", "row")
    first = builder.add(linear("first", 1, 8, 8))
    norm = layers.norm("norm", 1, 8, statistics=2)
    vectors = tuple(Parameter(f"norm.{name}", (8,)) for name in ("weight", "bias"))
    tied = tuple(replace(vector, tied_to="norm") for vector in vectors)
    before = builder.add(replace(norm, parameters=vectors), first)
    second = builder.add(linear("second", 1, 8, 8), before)
    builder.add(replace(norm, name="again", parameters=tied), second)
    graph = builder.build()
    stages = [
        StagePlan({name: data_parallel((2,)) for name in names}) for names in (["first", "norm"], ["second", "again"])
    ]
    for number in range(2):
        steps, others = gradient_sums(graph, stages, number, 1)
        # A product of 8 x 8 with a bias; and scale and shift, whose sums both stages exchange: 64 B from each of 2 ranks.
        assert sorted(step.nbytes for step in steps) == [4.0 * 2 * 8, 4.0 * (8 * 8 + 8)]
        assert others.num_bytes == 2 * 4.0 * 2 * 8


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(1,), (2,), (4,), (8,), (2, 2), (5,)]),
    st.sampled_from([(1,), (2,), (3,), (4,), (3, 2), (7,)]),
    st.randoms(use_true_random=False),
)
def test_every_element_of_a_shared_weight_is_sent_once(num_sources, num_destinations, generator):
    """An embedding and an output projection with any strategies: each rank receives every element that it updates exactly once,
    from a rank that has its sum. Shards (ZeRO 1) end inside of rows, and the last ones may be padded, or empty."""
    graph = gpt(replace(GPT, width=24, vocabulary=48))
    divisions = Choices((0, 1))
    layouts = []
    for name, sizes in (("wte", num_sources), ("lm_head", num_destinations)):
        layer = stage_layer(graph[name], {name})
        offered = list(enumerate_strategies(layer, sizes, choices=divisions, place=graph.place(name, "none")))
        (layout,) = parameter_layouts(graph, layer, generator.choice(offered))
        layouts.append(layout)
    for source, destination in (layouts, layouts[::-1]):
        whole = np.arange(1, 48 * 24 + 1).reshape(48, 24)
        stored = [source.stored(whole, rank).reshape(-1) for rank in range(source.num_ranks)]
        found = [np.zeros(prod(destination.stored_shape()), int) for _ in range(destination.num_ranks)]
        for piece in weight_pieces(source, destination):
            assert not piece.destination_places.take(found[piece.destination]).any()
            elements = piece.source_places.take(stored[piece.source])
            assert elements.shape == piece.shape and elements.all()
            piece.destination_places.put(found[piece.destination], elements)
        for rank, shard in enumerate(found):
            np.testing.assert_array_equal(shard, destination.stored(whole, rank).reshape(-1))


def test_traffic_by_hand():
    """Two layers of 8 x 8, one per stage; 3 micro-batches of 4 rows, in single precision.

    Stage 0 (1,1,2) reduce-scatters 4 x 8 elements over 2 ranks: 2 ranks x 1/2 x 128 bytes forward, and an all-gather of as much
    backward. Stage 1 (2,1,1) splits the rows and all-reduces 8 x 8 gradients once: 2 ranks x 2 x 1/2 x 256 bytes. Between the
    stages, 128 bytes are sent in each direction.
    """
    graph = mlp((8, 8, 8))
    stages = [StagePlan({"fc1": strategy_of(1, 1, 2)}), StagePlan({"fc2": strategy_of(2, 1, 1)})]
    schedule = generate("1f1b", num_stages=2, num_micro_batches=3, width=2)
    traffic = stage_traffic(schedule, graph, stages, 4)
    assert [sent.num_bytes for sent in traffic.inside] == [3 * 2 * (64 + 64), 0]
    assert [sent.num_bytes for sent in traffic.gradients] == [0, 512]
    assert [(sent.num_bytes, sent.num_messages) for sent in traffic.between] == [(3 * 2 * 128, 3 * 2 * 4)]
