"""Pipelines whose stages have SBP plans of their own: programs, weights that stages share, values and bytes on real ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.distribution import canonical
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.strategy import Strategy, enumerate_strategies
from autoddl.pipelines import Kind, Schedule, Times, generate
from autoddl.pipelines.memory import peak_activations, peak_weight_versions
from autoddl.pipelines.runtime.launcher import RankPool
from autoddl.pipelines.runtime.layouts import parameter_layouts
from autoddl.pipelines.runtime.pipeline.actions import Message, Receive, Run, Send
from autoddl.pipelines.runtime.pipeline.dryrun import ProgramError, check_programs
from autoddl.pipelines.runtime.pipeline.holding import StageLayout
from autoddl.pipelines.runtime.pipeline.lowering import lower
from autoddl.pipelines.runtime.pipeline.report import PipelineReport, combine
from autoddl.pipelines.runtime.pipeline.shared_weights import weight_pieces
from autoddl.pipelines.runtime.pipeline.stage_plans import stage_layouts
from autoddl.pipelines.runtime.pipeline.stage_traffic import stage_traffic
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.transformers import Transformer, gpt

from ..sent_bytes import Sent, check_sent

JOBS = Path(__file__).with_name("stage_plan_jobs.py")
TIMEOUT_S = 240
STEPS = 2

FAMILIES = [
    ("gpipe", {}),
    ("gpipe", {"recompute": True}),
    ("1f1b", {}),
    ("1f1b", {"policy": "B"}),
    ("gems", {}),
    ("chimera", {}),
    ("chimera", {"concatenation": "doubling"}),
    ("chimera", {"concatenation": "halving"}),
    ("chimera", {"all_reduce": "eager", "recompute": True}),
    ("grouped-gpipe", {}),
    ("interleaved-1f1b", {}),
    ("zero-bubble", {}),
    ("pipedream", {}),
    ("pipedream-2bw", {}),
    ("wpipe", {}),
]
MLP_WIDTHS = (24, 48, 24, 48, 24)
LARGE_MLP_WIDTHS = (256, 512, 256, 512, 256)
MLP8_WIDTHS = (24, 48, 24, 48, 24, 48, 24, 48, 24)
GPT = Transformer("gpt", layers=2, width=16, heads=4, sequence=8, vocabulary=32)
LARGE_GPT = Transformer("gpt", layers=2, width=128, heads=4, sequence=16, vocabulary=128)

Ranks = Callable[[int], RankPool]
Graph = Any


def on(*splits: int) -> Strategy:
    return Strategy((splits,))  # type: ignore[arg-type]


def random_plan(layers: Sequence[Layer], num_ranks: int, rows: int, rng: random.Random, **options: Any) -> StagePlan:
    """Any strategy for every layer that it, and the rows, divide by."""
    chosen = {}
    for layer in layers:
        fitting = [one for one in enumerate_strategies(layer, (num_ranks,)) if rows % one.p0 == 0]
        chosen[layer.name] = rng.choice(fitting)
    return StagePlan(chosen, **options)


def pieces_of(graph: Graph, cuts: Sequence[str]) -> list[tuple[Layer, ...]]:
    """The layers from the first one whose name begins so on, and so on."""
    names = [layer.name for layer in graph.layers]
    starts = [0, *(next(i for i, name in enumerate(names) if name.startswith(cut)) for cut in cuts), len(names)]
    return [graph.layers[a:b] for a, b in zip(starts, starts[1:])]


# ---- Programs ----------------------------------------------------------------------------------------------------------


def joint(num_ranks: int, p0: int, columns: int = 24) -> StageLayout:
    layout = canonical(((p0, num_ranks // p0),))
    return StageLayout(layout, layout, columns, p0, num_ranks > 1)


def texts(actions: Sequence[Any]) -> list[str]:
    return [str(action) for action in actions]


def test_a_program_to_read():
    """1F1B, features split in the first stage and rows in the second. Stage 1 takes 0F1 in before it goes back, though it needs it
    later: stage 0 has to be rid of it before it takes 1B0 in."""
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
    """A stage of one rank asks for all it can at once, beside its computations; the other stage does not change that."""
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
    """Any family, any widths and layouts of stages, any times, zeros among them: the dry run (in `lower`) finds no deadlock, ranks
    of a stage compute together in one order, and all communication of every rank is in one order."""
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
    """The messages to each rank, put together, are its block of every slot, and nothing twice."""
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
    """What ranks without communication inside do, receive at once, would be a deadlock: 1B0 comes before stage 0 has sent all."""
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
    first = StagePlan({"fc1": on(2, 1, 2), "fc2": on(1, 2, 2)})
    second = StagePlan({"fc3": on(2, 1, 1), "fc4": on(1, 1, 2)})
    layouts = stage_layouts(graph, [first, second])
    assert [str(layout.leaving) for layout in layouts] == ["(S1:2@1, S1:2@2)", "(S1:2)"]
    assert str(layouts[1].arriving) == "(S0:2)"
    assert [(layout.columns, layout.row_parts, layout.is_joint) for layout in layouts] == [(24, 2, True), (24, 2, True)]
    alone = StagePlan(dict.fromkeys(("fc1", "fc2"), on(2, 1, 1)))
    assert not stage_layouts(graph, [alone, second])[0].is_joint
    chosen = replace(second, entry=on(1, 2, 1))
    assert str(stage_layouts(graph, [first, chosen])[1].arriving) == "(S1:2)"


def test_stages_are_a_graph_s():
    graph = gpt(GPT)
    halves = pieces_of(graph, ["h.1"])
    plans = [StagePlan({layer.name: on(1, 1, 1) for layer in half}) for half in halves]
    stage_layouts(graph, plans)
    inside = [StagePlan({layer.name: on(1, 1, 1) for layer in half}) for half in pieces_of(graph, ["h.1.attn.c_proj"])]
    wide = replace(plans[1], strategies={**plans[1].strategies, "loss": on(2, 1, 1)})
    for stages, message in (
        (plans[:1], "layer 'h.1.ln_1' is in no stage"),
        (plans[::-1], "stages should be all layers in their order"),
        (inside, r"between stages 0 and 1 pass 'h.1.attn' and 'h.0.add_2'; cut where one tensor passes"),
        ([plans[0], wide], r"stage 1 is for 1 ranks, loss \(loss, .*\) for 2"),
        ([plans[0], replace(plans[1], entry=on(2, 1, 1))], r"stage 1 is for 1 ranks, its entry \(2,1,1\) is not"),
    ):
        with pytest.raises(UserError, match=message):
            stage_layouts(graph, stages)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 4]), st.randoms(use_true_random=False))
def test_shared_weights_are_told_once(there, here, generator):
    """An embedding's table and an output projection at any strategies: every element that a rank holds comes to it once, from one
    that holds it."""
    graph = gpt(replace(GPT, width=24, vocabulary=48))
    layouts = []
    for name, num_ranks in (("wte", there), ("lm_head", here)):
        layer = graph[name]
        (layout,) = parameter_layouts(graph, layer, generator.choice(list(enumerate_strategies(layer, (num_ranks,)))))
        layouts.append(layout)
    for source, destination in (layouts, layouts[::-1]):
        whole = np.arange(48 * 24).reshape(48, 24)
        shards = [source.take(whole, rank) for rank in range(source.num_ranks)]
        found = [np.full(destination.local_shape(), -1) for _ in range(destination.num_ranks)]
        for piece in weight_pieces(source, destination):
            places = np.ix_(*piece.places_here)
            assert (found[piece.destination][places] == -1).all()
            found[piece.destination][places] = shards[piece.source][np.ix_(*piece.places_there)]
        for rank, shard in enumerate(found):
            np.testing.assert_array_equal(shard, destination.take(whole, rank))


def test_traffic_by_hand():
    """Two layers of 8 x 8, one a stage: 4 rows, 3 micro-batches, single precision. Stage 0 (1,1,2) scatters 4 x 8 over 2 ranks:
    2 ranks x 1/2 x 128 bytes forward and no more back but a gather of as much; stage 1 (2,1,1) splits the rows and sums 8 x 8
    gradients: 2 x 1/2 x 256 bytes x 2 ranks, once. Between them 128 bytes go there and back."""
    graph = mlp((8, 8, 8))
    stages = [StagePlan({"fc1": on(1, 1, 2)}), StagePlan({"fc2": on(2, 1, 1)})]
    schedule = generate("1f1b", num_stages=2, num_micro_batches=3, width=2)
    traffic = stage_traffic(schedule, graph, stages, 4, load_cluster("dgx-a100"))
    assert [sent.num_bytes for sent in traffic.inside] == [3 * 2 * (64 + 64), 0]
    assert [sent.num_bytes for sent in traffic.gradients] == [0, 512]
    assert [(sent.num_bytes, sent.num_messages) for sent in traffic.between] == [(3 * 2 * 128, 3 * 2 * 4)]


# ---- On ranks ----------------------------------------------------------------------------------------------------------


def mlp_case(
    schedule: Schedule, stages: Sequence[StagePlan], widths: Sequence[int] = MLP_WIDTHS, **more: Any
) -> dict[str, Any]:
    common = {"model": "mlp", "sizes": tuple(widths), "graph": mlp(widths), "stages": tuple(stages), "rows": 12}
    return {**common, "schedule": schedule, "optimizer": ("SGD", 20.0), **more}


def gpt_case(schedule: Schedule, stages: Sequence[StagePlan], sizes: Transformer = GPT, **more: Any) -> dict[str, Any]:
    common = {"model": "gpt", "sizes": sizes, "graph": gpt(sizes), "stages": tuple(stages), "rows": 4}
    return {**common, "schedule": schedule, "optimizer": ("SGD", 0.1), **more}


def run(
    ranks: Ranks, cases: Sequence[Mapping[str, Any]]
) -> list[tuple[list[PipelineReport], list[dict[str, np.ndarray]], int]]:
    """For each case the reports of its runs, each rank's parameters, and what was sent in the last run."""
    results = ranks(sum(cases[0]["schedule"].widths)).run(f"{JOBS}:train", cases, timeout_s=TIMEOUT_S)
    found = []
    for i, case in enumerate(cases):
        reports = [combine(case["schedule"], of_one) for of_one in zip(*(result[i][0] for result in results))]
        found.append((reports, [result[i][1] for result in results], results[0][i][2]))
    return found


def plain(case: Mapping[str, Any]) -> dict[str, Any]:
    """The case for one process."""
    schedule, runs = case["schedule"], case.get("runs", 1)
    wanted = {name: case[name] for name in ("model", "sizes", "rows", "optimizer", "frozen") if name in case}
    return {**wanted, "num_micro_batches": schedule.num_micro_batches * runs, "period": schedule.update_period}


def check(case: Mapping[str, Any], found: Any, losses: Sequence[float], wanted: Mapping[str, np.ndarray]) -> None:
    """Losses and parameters equal the reference on every rank; activations and versions are as many as predicted."""
    reports, parameters, _ = found
    assert [loss for report in reports for loss in report.losses] == pytest.approx(losses, rel=1e-5)
    assert {name for of_rank in parameters for name in of_rank} == set(wanted)
    assert np.isfinite(losses).all()
    for of_rank in parameters:
        for name, value in of_rank.items():
            size = float(np.linalg.norm(wanted[name]))
            if size > 1e-5:  # a key's bias is nothing but rounding errors
                assert np.linalg.norm(value - wanted[name]) / size < 1e-5, (case["schedule"].name, name)
    for report in reports:
        assert report.peak_activations == peak_activations(report.timeline.schedule)
        assert report.peak_versions == peak_weight_versions(report.timeline.schedule)


def check_synchronous(ranks: Ranks, cases: Sequence[Mapping[str, Any]]) -> None:
    """Against one process that trains the same micro-batches, and whether it learns at all."""
    known: dict[str, Any] = {}
    for case, found in zip(cases, run(ranks, cases)):
        key = str(plain(case))
        if key not in known:
            (known[key],) = ranks(1).run(f"{JOBS}:train_whole", plain(case), timeout_s=TIMEOUT_S)
        losses, wanted, initial = known[key]
        check(case, found, losses, wanted)
        changes = {name: float(np.linalg.norm(wanted[name] - initial[name])) for name in wanted}
        assert max(change / np.linalg.norm(wanted[name]) for name, change in changes.items() if change) > 1e-2
        frozen = [name for name in wanted if name.startswith(case.get("frozen", ()))]
        assert all(
            np.array_equal(of_rank[name], initial[name]) for of_rank in found[1] for name in frozen if name in of_rank
        )


def test_every_synchronous_schedule_on_two_stages_of_two_ranks(ranks):
    """One run of each; the other tests run some of them again and again."""
    rng, cases = random.Random(1), []
    for name, options in FAMILIES:
        schedule = generate(name, num_stages=2, num_micro_batches=4, width=2, **options)
        if not schedule.is_synchronous:
            continue
        depth = schedule.num_stages
        widths = MLP_WIDTHS if depth == 2 else MLP8_WIDTHS
        layers, each = mlp(widths).layers, (len(widths) - 1) // depth
        stages = [random_plan(layers[s * each : (s + 1) * each], 2, 12, rng) for s in range(depth)]
        cases.append(mlp_case(schedule, stages, widths))
    assert len(cases) == 12
    check_synchronous(ranks, cases)


@pytest.mark.parametrize("widths", [(1, 3), (3, 1)])
def test_unequal_widths_and_cuts(ranks, widths):
    rng, layers, cases = random.Random(2), mlp(MLP_WIDTHS).layers, []
    for name, options in (("1f1b", {}), ("gpipe", {"recompute": True}), ("zero-bubble", {})):
        cut = 3 if widths[0] == 3 else 1
        stages = [random_plan(layers[:cut], widths[0], 12, rng), random_plan(layers[cut:], widths[1], 12, rng)]
        schedule = generate(name, num_stages=2, num_micro_batches=3, width=widths, **options)
        cases.append(mlp_case(schedule, stages, runs=STEPS))
    check_synchronous(ranks, cases)


def test_transformers_with_weights_that_stages_share(ranks):
    """Token table and output projection, at strategies of their own; per-layer recomputation in one stage."""
    rng, cases = random.Random(3), []
    for name, options in (("1f1b", {}), ("chimera", {})):
        first, second = pieces_of(gpt(GPT), ["h.1"])
        stages = [random_plan(first, 2, 4, rng, recompute=name == "1f1b"), random_plan(second, 2, 4, rng)]
        cases.append(
            gpt_case(generate(name, num_stages=2, num_micro_batches=2, width=2, **options), stages, runs=STEPS)
        )
    check_synchronous(ranks, cases)


def test_frozen_parameters(ranks):
    """A table that both stages have, all of the first stage, one layer of it; recomputed too."""
    rng, cases = random.Random(8), []
    first, second = pieces_of(gpt(GPT), ["h.1"])
    halves = mlp(MLP_WIDTHS).layers[:2], mlp(MLP_WIDTHS).layers[2:]
    for name, options in (("1f1b", {"recompute": True}), ("chimera", {}), ("zero-bubble", {})):
        schedule = generate(name, num_stages=2, num_micro_batches=2, width=2, **options)
        for frozen in (("wte",), ("wte", "wpe", "h.0")):
            stages = [random_plan(first, 2, 4, rng), random_plan(second, 2, 4, rng)]
            cases.append(gpt_case(schedule, stages, runs=STEPS, frozen=frozen))
        stages = [random_plan(half, 2, 12, rng) for half in halves]
        cases.append(mlp_case(schedule, stages, runs=STEPS, frozen=("fc2",)))
    check_synchronous(ranks, cases)


def test_initial_values_are_the_first_ranks(ranks):
    layers = mlp(MLP_WIDTHS).layers
    stages = [StagePlan({layer.name: on(1, 2, 1) for layer in half}) for half in (layers[:2], layers[2:])]
    check_synchronous(
        ranks, [mlp_case(generate("1f1b", num_stages=2, num_micro_batches=2, width=2), stages, differing=1)]
    )


def test_eight_ranks(ranks):
    """Chimera on two stages of 2 x 2 ranks, and on four of 2; three stages of 2, 4 and 2."""
    rng, cases = random.Random(4), []
    first, second = pieces_of(gpt(GPT), ["h.1"])
    both = [StagePlan({layer.name: two_by_two(layer) for layer in half}) for half in (first, second)]
    cases.append(gpt_case(generate("chimera", num_stages=2, num_micro_batches=2, width=4), both))
    layers = mlp(MLP_WIDTHS).layers
    three = [random_plan(part, p, 12, rng) for part, p in zip((layers[:1], layers[1:3], layers[3:]), (2, 4, 2))]
    cases.append(mlp_case(generate("1f1b", num_stages=3, num_micro_batches=4, width=(2, 4, 2)), three))
    four = [random_plan([layer], 2, 12, rng) for layer in layers]
    cases.append(mlp_case(generate("chimera", num_stages=4, num_micro_batches=4, width=2), four))
    check_synchronous(ranks, cases)


def two_by_two(layer: Layer) -> Strategy:
    """Samples over 2, features over 2; products gather before some, and scatter behind others."""
    if layer.kind in ("linear", "embedding") and layer.name.endswith(("c_proj", "wte")):
        return on(2, 1, 2)
    return on(2, 2, 1)


def pipedream(stage: int, depth: int, number: int, period: int) -> int:
    """Every stage uses the weights that it had when the micro-batch came: D - 1 - s updates ago."""
    return max(0, number - (depth - 1 - stage))


def two_buffered(stage: int, depth: int, number: int, period: int) -> int:
    """One update late in all stages."""
    return max(0, number // period - 1)


def double_grouped(stage: int, depth: int, number: int, period: int) -> int:
    """WPipe: one update late in the first half of the stages only."""
    return max(0, number // period - (stage < depth // 2))


def test_asynchronous_schedules_have_their_update_semantics(ranks):
    """Against the papers' equations in numpy: w(t+1) = w(t) - rate * (mean gradient of period t), with the versions of theirs."""
    rng, cases, versions = random.Random(5), [], []
    for name, rule in (("pipedream", pipedream), ("pipedream-2bw", two_buffered), ("wpipe", double_grouped)):
        schedule = generate(
            name, num_stages=2, num_micro_batches=1 if name == "pipedream" else 2, width=2, iterations=6
        )
        depth = schedule.num_stages
        layers, each = mlp(MLP_WIDTHS).layers, 4 // depth
        stages = [random_plan(layers[s * each : (s + 1) * each], 2, 12, rng) for s in range(depth)]
        cases.append(mlp_case(schedule, stages, optimizer=("SGD", 5.0)))
        numbers, period = range(schedule.num_micro_batches), schedule.update_period
        versions.append([[rule(stage, depth, number, period) for stage in range(depth)] for number in numbers])
    found = run(ranks, cases)
    (batches,) = ranks(1).run(f"{JOBS}:micro_batches", plain(cases[0]), 20, timeout_s=TIMEOUT_S)
    ((_, _, initial),) = ranks(1).run(
        f"{JOBS}:train_whole", {**plain(cases[0]), "num_micro_batches": 0}, timeout_s=TIMEOUT_S
    )
    for case, of_case, of_stage in zip(cases, found, versions):
        losses, wanted = descend(case, batches, initial, of_stage)
        check(case, of_case, losses, wanted)
        undelayed = [[number // case["schedule"].update_period] * len(of_stage[0]) for number in range(len(of_stage))]
        _, otherwise = descend(case, batches, initial, undelayed)
        assert max(np.linalg.norm(wanted[n] - otherwise[n]) / np.linalg.norm(wanted[n]) for n in wanted) > 1e-4


def descend(
    case: Mapping[str, Any],
    batches: Sequence[Any],
    initial: Mapping[str, np.ndarray],
    versions: Sequence[Sequence[int]],
) -> tuple[list[float], dict[str, np.ndarray]]:
    """An MLP with mean squared errors, trained with old weights: the loss of each micro-batch, and the weights in the end."""
    stage_of = {f"{name}.weight": s for s, plan in enumerate(case["stages"]) for name in plan.strategies}
    names, (_, rate), period = sorted(initial), case["optimizer"], case["schedule"].update_period
    history = [{name: value.astype(np.float64) for name, value in initial.items()}]
    losses = []
    for begin in range(0, len(versions), period):
        sums = {name: np.zeros_like(value) for name, value in history[0].items()}
        for number in range(begin, begin + period):
            weights = {name: history[versions[number][stage_of[name]]][name] for name in names}
            x, targets = batches[number]
            inputs = []
            for name in names:
                inputs.append(x)
                x = x @ weights[name].T
                x = x if name == names[-1] else np.maximum(x, 0)
            losses.append(float(((x - targets) ** 2).mean()))
            gradient = 2 * (x - targets) / x.size
            for name in reversed(names):
                x = inputs.pop()
                sums[name] += gradient.T @ x / period
                gradient = (gradient @ weights[name]) * (x > 0)
        history.append({name: value - rate * sums[name] for name, value in history[-1].items()})
    return losses, history[-1]


def test_bytes_are_the_predicted_ones(counted_ranks):
    """On the wire, inside stages, between them and in sums; what stages report of their boundaries exactly."""
    rng, cases = random.Random(6), []
    for name, options, recompute in (("1f1b", {}, True), ("chimera", {"concatenation": "halving"}, False)):
        stages = [random_plan(half, 2, 4, rng, recompute=recompute) for half in pieces_of(gpt(LARGE_GPT), ["h.1"])]
        schedule = generate(name, num_stages=2, num_micro_batches=2, width=2, **options)
        cases.append(gpt_case(schedule, stages, LARGE_GPT, rows=8, counts=True))
    layers = mlp(LARGE_MLP_WIDTHS).layers
    for name, options in (("gpipe", {"recompute": True}), ("zero-bubble", {})):
        stages = [random_plan(half, 2, 96, rng) for half in (layers[:2], layers[2:])]
        schedule = generate(name, num_stages=2, num_micro_batches=2, width=2, **options)
        cases.append(mlp_case(schedule, stages, LARGE_MLP_WIDTHS, rows=96, counts=True))

    def count() -> list[Sent]:
        found = []
        for case, (reports, _, sent) in zip(cases, run(counted_ranks, cases)):
            predicted = stage_traffic(
                case["schedule"], case["graph"], case["stages"], case["rows"], load_cluster("dgx-a100")
            )
            assert reports[-1].bytes_sent == sum(boundary.num_bytes for boundary in predicted.between)
            name, everything = case["schedule"].name, predicted.all
            found += [
                Sent(name, sent, everything.num_bytes, everything.num_messages, relative=0.01, num_readings=0),
                Sent(f"{name}, raw", sent, everything.num_bytes, num_readings=0),
            ]
        return found

    check_sent(4, count(), count)


def test_checkpoints_are_of_the_model(ranks, tmp_path):
    """Saved at one plan, gone on from at another one, on other cuts, with momentum: as without a break."""
    rng, layers = random.Random(7), mlp(MLP_WIDTHS).layers
    schedules = [generate(name, num_stages=2, num_micro_batches=2, width=2) for name in ("1f1b", "chimera")]
    cases = []
    for schedule, cut in zip(schedules, (2, 3)):
        stages = [random_plan(layers[:cut], 2, 12, rng), random_plan(layers[cut:], 2, 12, rng)]
        cases.append(mlp_case(schedule, stages, optimizer=("Adam", 0.01), frozen=("fc2",)))
    broken = ranks(4).run(f"{JOBS}:train_in_turn", cases, tmp_path, timeout_s=TIMEOUT_S)
    (wanted,) = ranks(1).run(f"{JOBS}:train_whole", {**plain(cases[0]), "num_micro_batches": 4}, timeout_s=TIMEOUT_S)
    assert {name for of_rank in broken for name in of_rank} == set(wanted[1])
    for of_rank in broken:
        for name, value in of_rank.items():
            assert np.linalg.norm(value - wanted[1][name]) / np.linalg.norm(wanted[1][name]) < 1e-5


def test_refusals(ranks):
    layers = mlp(MLP_WIDTHS).layers
    stages = [StagePlan({layer.name: on(1, 2, 1) for layer in half}) for half in (layers[:2], layers[2:])]
    schedule = generate("1f1b", num_stages=2, num_micro_batches=2, width=2)
    rows = [StagePlan({layer.name: on(2, 1, 1) for layer in half}) for half in (layers[:2], layers[2:])]
    cases = [
        mlp_case(generate("1f1b", num_stages=2, num_micro_batches=2, width=(1, 3)), stages),
        mlp_case(generate("1f1b", num_stages=4, num_micro_batches=2), stages),
        mlp_case(schedule, rows, rows=3),
        mlp_case(schedule, stages, optimizer=("LAMB", 0.1)),
        mlp_case(schedule, stages, sizes=(24, 48, 24, 48, 48)),
    ]
    wanted = [
        "stage 0 is planned for 2 rank(s), worker 0, which has it, is 1 rank(s) wide",
        "2 stages have plans, schedule 1f1b has 4 stages",
        "micro_batch_rows is 3, which does not divide into the 2 rank(s) of worker 0; give a multiple of 2",
        "LAMB takes norms of whole weights, of which a rank of a stage with a plan has a part; give SGD, Adam or AdamW",
        "the plan was made for another model: its fc4.weight has shape (24, 48), the model's (48, 48)",
    ]
    assert ranks(4).run(f"{JOBS}:refusals", cases, timeout_s=TIMEOUT_S) == [wanted] * 4
