"""Stages with SBP plans on OneFlow ranks against one process: losses, parameters, checkpoints and bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.costmodel.graph import Layer
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines import Schedule, generate
from autoddl.pipelines.memory import peak_activations, peak_weight_versions
from autoddl.pipelines.runtime.pipeline.report import PipelineReport, combine
from autoddl.pipelines.runtime.pipeline.stage_traffic import stage_traffic
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.transformers import Transformer, gpt

from ..sent_bytes import Sent, check_sent
from .stage_plan_cases import FAMILIES, GPT, MLP_WIDTHS, cut_layers, random_plan, strategy_of

JOBS = Path(__file__).with_name("stage_plan_jobs.py")
TIMEOUT_S = 240
#: Runs of a schedule in tests that train for more than one run.
STEPS = 2

LARGE_MLP_WIDTHS = (256, 512, 256, 512, 256)
MLP8_WIDTHS = (24, 48, 24, 48, 24, 48, 24, 48, 24)
LARGE_GPT = Transformer("gpt", layers=2, width=128, heads=4, sequence=16, vocabulary=128)

Ranks = Callable[[int], RankPool]


def mlp_case(
    schedule: Schedule, stages: Sequence[StagePlan], widths: Sequence[int] = MLP_WIDTHS, **more: Any
) -> dict[str, Any]:
    """An MLP to train, as `stage_plan_jobs` takes it; ``more`` replaces or adds entries."""
    common = {"model": "mlp", "sizes": tuple(widths), "graph": mlp(widths), "stages": tuple(stages), "rows": 12}
    return {**common, "schedule": schedule, "optimizer": ("SGD", 20.0), **more}


def gpt_case(schedule: Schedule, stages: Sequence[StagePlan], sizes: Transformer = GPT, **more: Any) -> dict[str, Any]:
    """A GPT to train, as `stage_plan_jobs` takes it; ``more`` replaces or adds entries."""
    common = {"model": "gpt", "sizes": sizes, "graph": gpt(sizes), "stages": tuple(stages), "rows": 4}
    return {**common, "schedule": schedule, "optimizer": ("SGD", 0.1), **more}


def run(
    ranks: Ranks, cases: Sequence[Mapping[str, Any]]
) -> list[tuple[list[PipelineReport], list[dict[str, np.ndarray]], int]]:
    """For each case, the reports of its runs, each rank's parameters, and the bytes that all ranks sent in the last run."""
    results = ranks(sum(cases[0]["schedule"].widths)).run(f"{JOBS}:train", cases, timeout_s=TIMEOUT_S)
    found = []
    for i, case in enumerate(cases):
        reports = [combine(case["schedule"], of_one) for of_one in zip(*(result[i][0] for result in results))]
        found.append((reports, [result[i][1] for result in results], results[0][i][2]))
    return found


def plain(case: Mapping[str, Any]) -> dict[str, Any]:
    """The same training in one process, for `stage_plan_jobs.train_whole`."""
    schedule, runs = case["schedule"], case.get("runs", 1)
    wanted = {name: case[name] for name in ("model", "sizes", "rows", "optimizer", "frozen") if name in case}
    return {**wanted, "num_micro_batches": schedule.num_micro_batches * runs, "period": schedule.update_period}


def check(case: Mapping[str, Any], found: Any, losses: Sequence[float], wanted: Mapping[str, np.ndarray]) -> None:
    """Losses and parameters equal the reference on every rank; the peaks of activations and versions are the predicted ones."""
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
    """Compare with one process that trains on the same micro-batches, and check that training changes the parameters."""
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
    """One run of each family; other tests run some of them several times."""
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
    """Embedding and output projection share a weight and have different strategies; one stage recomputes its layers."""
    rng, cases = random.Random(3), []
    for name, options in (("1f1b", {}), ("chimera", {})):
        first, second = cut_layers(gpt(GPT), ["h.1"])
        stages = [
            random_plan(first, 2, 4, rng, recompute="layers" if name == "1f1b" else "none"),
            random_plan(second, 2, 4, rng),
        ]
        cases.append(
            gpt_case(generate(name, num_stages=2, num_micro_batches=2, width=2, **options), stages, runs=STEPS)
        )
    check_synchronous(ranks, cases)


def test_each_stage_recomputes_in_its_own_way(ranks):
    """Blocks, layers and dense attention, with several micro-batches in flight, and a backward pass in two parts."""
    rng, cases, sizes = random.Random(9), [], replace(GPT, layers=4)
    halves = cut_layers(gpt(sizes), ["h.2"])
    for name, ways in (
        ("1f1b", ("blocks", "layers")),
        ("gpipe", ("selective", "blocks")),
        ("chimera", ("blocks", "blocks")),
        ("zero-bubble", ("blocks", "none")),
    ):
        stages = [
            random_plan(half, 2, 4, rng, recompute=way, attention="dense" if way == "selective" else "fused")
            for half, way in zip(halves, ways)
        ]
        cases.append(gpt_case(generate(name, num_stages=2, num_micro_batches=4, width=2), stages, sizes, runs=STEPS))
    check_synchronous(ranks, cases)


def test_frozen_parameters(ranks):
    """Frozen: a weight that both stages share; all of the first stage; one layer of it. With recomputation too."""
    rng, cases = random.Random(8), []
    first, second = cut_layers(gpt(GPT), ["h.1"])
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
    stages = [StagePlan({layer.name: strategy_of(1, 2, 1) for layer in half}) for half in (layers[:2], layers[2:])]
    check_synchronous(
        ranks, [mlp_case(generate("1f1b", num_stages=2, num_micro_batches=2, width=2), stages, differing=1)]
    )


def test_eight_ranks(ranks):
    """Chimera on two stages of 2 x 2 ranks, and on four of 2; three stages of 2, 4 and 2."""
    rng, cases = random.Random(4), []
    first, second = cut_layers(gpt(GPT), ["h.1"])
    both = [StagePlan({layer.name: two_by_two(layer) for layer in half}) for half in (first, second)]
    cases.append(gpt_case(generate("chimera", num_stages=2, num_micro_batches=2, width=4), both))
    layers = mlp(MLP_WIDTHS).layers
    three = [random_plan(part, p, 12, rng) for part, p in zip((layers[:1], layers[1:3], layers[3:]), (2, 4, 2))]
    cases.append(mlp_case(generate("1f1b", num_stages=3, num_micro_batches=4, width=(2, 4, 2)), three))
    four = [random_plan([layer], 2, 12, rng) for layer in layers]
    cases.append(mlp_case(generate("chimera", num_stages=4, num_micro_batches=4, width=2), four))
    check_synchronous(ranks, cases)


def two_by_two(layer: Layer) -> Strategy:
    """A strategy with p0 = 2 and features split 2 ways: some layers reduce-scatter their outputs, the others gather inputs."""
    if layer.kind in ("linear", "embedding") and layer.name.endswith(("c_proj", "wte")):
        return strategy_of(2, 1, 2)
    return strategy_of(2, 2, 1)


def pipedream(stage: int, depth: int, number: int, period: int) -> int:
    """PipeDream: stage s of D uses the weights of D - 1 - s updates before."""
    return max(0, number - (depth - 1 - stage))


def two_buffered(stage: int, depth: int, number: int, period: int) -> int:
    """PipeDream-2BW: the weights of all stages are one update late."""
    return max(0, number // period - 1)


def double_grouped(stage: int, depth: int, number: int, period: int) -> int:
    """WPipe: the weights are one update late in the first half of the stages only."""
    return max(0, number // period - (stage < depth // 2))


def test_asynchronous_schedules_have_their_update_semantics(ranks):
    """Compare with the papers' equations in numpy: w(t+1) = w(t) - rate * (mean gradient of period t), with their versions of w."""
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
    """Train an MLP with a mean squared error and delayed weights, in numpy.

    Args:
        versions: For each micro-batch, the version of each stage's weights that it uses.

    Returns:
        The loss of each micro-batch, and the final weights.
    """
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
    """Bytes on the wire are the predicted sum of those inside stages, between stages and of gradient sums.

    The bytes that the ranks report for the boundaries equal the prediction exactly.
    """
    rng, cases = random.Random(6), []
    for name, options, recompute in (
        ("1f1b", {}, ("blocks", "layers")),
        ("chimera", {"concatenation": "halving"}, ("none", "blocks")),
    ):
        halves = cut_layers(gpt(LARGE_GPT), ["h.1"])
        stages = [random_plan(half, 2, 4, rng, recompute=way) for half, way in zip(halves, recompute)]
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
            predicted = stage_traffic(case["schedule"], case["graph"], case["stages"], case["rows"])
            assert reports[-1].bytes_sent == sum(boundary.num_bytes for boundary in predicted.between)
            name, everything = case["schedule"].name, predicted.all
            found += [
                Sent(name, sent, everything.num_bytes, everything.num_messages, relative=0.01, num_readings=0),
                Sent(f"{name}, raw", sent, everything.num_bytes, num_readings=0),
            ]
        return found

    check_sent(4, count(), count)


def test_checkpoints_are_of_the_model(ranks, tmp_path):
    """A training that is saved with one plan and resumed with another one equals one without interruption, with Adam."""
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
    stages = [StagePlan({layer.name: strategy_of(1, 2, 1) for layer in half}) for half in (layers[:2], layers[2:])]
    schedule = generate("1f1b", num_stages=2, num_micro_batches=2, width=2)
    rows = [StagePlan({layer.name: strategy_of(2, 1, 1) for layer in half}) for half in (layers[:2], layers[2:])]
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
        "LAMB needs norms of whole weights, but each rank of a planned stage holds only a part; give SGD, Adam or AdamW",
        "the plan was made for another model: parameter fc4.weight has shape (24, 48) in the plan, and (48, 48) in the model",
    ]
    assert ranks(4).run(f"{JOBS}:refusals", cases, timeout_s=TIMEOUT_S) == [wanted] * 4
