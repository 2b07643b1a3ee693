"""Schedules on OneFlow ranks against one process: values, losses, activations, weight versions, bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.pipelines import Schedule, Times, generate, simulate
from autoddl.pipelines.communication import boundary_crossings
from autoddl.pipelines.draw import to_text
from autoddl.pipelines.memory import peak_activations, peak_weight_versions
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.pipeline.lowering import lower
from autoddl.pipelines.runtime.pipeline.report import PipelineReport, combine
from autoddl.pipelines.runtime.ranks.failures import RankError
from autoddl.pipelines.runtime.ranks.launcher import RankPool

from ...communicated import communication_bytes
from ..sent_bytes import Sent, check_sent

JOBS = Path(__file__).with_name("pipeline_jobs.py")
TIMEOUT_S = 240
STEPS = 2

Ranks = Callable[[int], RankPool]


def run(
    ranks: Ranks, cases: Sequence[dict[str, Any]]
) -> list[tuple[list[PipelineReport], list[dict[str, np.ndarray]]]]:
    """For each case the reports of its runs, and each rank's parameters."""
    num_ranks = sum(cases[0]["schedule"].widths)
    results = ranks(num_ranks).run(f"{JOBS}:train", cases, timeout_s=TIMEOUT_S)
    return [
        (
            [combine(case["schedule"], reports) for reports in zip(*(result[i][0] for result in results))],
            [result[i][1] for result in results],
        )
        for i, case in enumerate(cases)
    ]


class Reference:
    """What one process gives for a case; each asked for once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(self, case: dict[str, Any], job: str = "train_whole", **more: Any) -> Any:
        schedule = case["schedule"]
        num = schedule.num_micro_batches * case.get("runs", 1)
        plain = {"num_micro_batches": num, "period": schedule.update_period, **more}
        plain.update({name: case[name] for name in ("model", "rows", "optimizer")})
        key = (job, *map(str, plain.items()))
        if key not in self._known:
            self._known[key] = self._ranks(1).run(f"{JOBS}:{job}", plain, timeout_s=TIMEOUT_S)[0]
        return self._known[key]


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Reference:
    return Reference(ranks)


def relative_error(value: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64)))


def check(
    reports: Sequence[PipelineReport],
    parameters: Sequence[dict[str, np.ndarray]],
    losses: Sequence[float],
    wanted: dict[str, np.ndarray],
) -> None:
    """Losses and all replicas of all parameters equal the reference; activations and versions the predicted ones."""
    assert [loss for report in reports for loss in report.losses] == pytest.approx(losses, rel=1e-5)
    assert {name for of_rank in parameters for name in of_rank} == set(wanted)
    for of_rank in parameters:
        for name, value in of_rank.items():
            if np.linalg.norm(wanted[name]) > 0:
                assert relative_error(value, wanted[name]) < 1e-5, name
    for report in reports:
        assert report.peak_activations == peak_activations(report.timeline.schedule)
        assert report.peak_versions == peak_weight_versions(report.timeline.schedule)


def test_chains_are_the_models(ranks):
    (results,) = ranks(1).run(f"{JOBS}:chains_and_models", timeout_s=TIMEOUT_S)
    for wanted, found, covered, _ in results:
        assert found == pytest.approx(wanted, rel=1e-6) and covered
    assert [tied for _, _, _, tied in results] == [
        {"wte.weight": (0, 2)},
        {"embeddings.word_embeddings.weight": (0, 2)},
        {},
        {},
    ]


# ---- Synchronous schedules ---------------------------------------------------------------------------------------------


def case(model: str, schedule: Schedule, **more: Any) -> dict[str, Any]:
    """Adam where every parameter's gradient is more than rounding errors (in attention that of the keys' bias is none)."""
    optimizer = ("SGD", 0.05) if model.startswith("gpt") else ("Adam", 0.01)
    return {"model": model, "schedule": schedule, "rows": 4, "optimizer": optimizer, **more}


def synchronous(num_stages: int) -> dict[str, dict[str, Any]]:
    """Every family on two and on four ranks; its options on one of them, with fewer, as many and more micro-batches than stages."""
    cases: dict[str, dict[str, Any]] = {}

    def add(name: str, num_micro_batches: int, model: str = "sequential", **options: Any) -> None:
        label = "-".join([name, str(num_micro_batches), model, *map(str, options.values())])
        iterations = options.pop("iterations", STEPS if num_stages == 2 else 1)
        sizes = options.pop("sizes", None)
        schedule = generate(
            name, num_stages=num_stages, num_micro_batches=num_micro_batches, iterations=iterations, **options
        )
        cases[label] = case(model, schedule, sizes=sizes)
        if iterations == 1:  # a first step of Adam is that of any gradient with these signs
            cases[label]["optimizer"] = ("SGD", 0.25)

    d = num_stages
    add("gpipe", d, recompute=True)
    add("1f1b", d + 1, "gpt" if d == 2 else "sequential", iterations=STEPS)
    add("gems", 3)
    add("chimera", d, "gpt", iterations=STEPS)
    add("grouped-gpipe", d)
    add("interleaved-1f1b", d, recompute=True)
    add("zero-bubble", d + 1, "gpt" if d == 2 else "sequential", iterations=STEPS)
    if d == 2:
        add("gpipe", 2)
        add("1f1b", 4, policy="B")
        add("1f1b", 2, "gpt", sizes=(3, 1))
        add("1f1b", 2, "gpt", sizes=(1, 3), recompute=True)
        add("chimera", 2, "mlp", sizes=(1, 7))
        add("chimera", 2, recompute=True, all_reduce="eager")
        add("chimera", 1)
        add("chimera", 4, "gpt", concatenation="doubling", recompute=True)
        add("chimera", 4, concatenation="halving")
        add("zero-bubble", 2, policy="H2", recompute=True)
    if d == 4:
        add("1f1b", 4, sizes=(1, 5, 1, 1))
        add("chimera", 3, all_reduce="none", iterations=STEPS)
        add("chimera", 9)
        add("chimera", 12, concatenation="doubling")
        add("chimera", 4, num_pipelines=4, iterations=STEPS)
        add("chimera", 6, num_pipelines=4)
    return cases


@pytest.mark.parametrize("num_stages", [2, 4])
def test_synchronous_schedules_equal_one_device(ranks, reference, num_stages):
    """Every family and option, for some updates each."""
    cases = synchronous(num_stages)
    for (label, one), (reports, parameters) in zip(cases.items(), run(ranks, list(cases.values()))):
        try:
            check(reports, parameters, *reference(one))
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


def test_runs_go_on_from_each_other(ranks, reference):
    """A schedule of one iteration, run again and again."""
    one = case("sequential", generate("chimera", num_stages=2, num_micro_batches=2), runs=3)
    ((reports, parameters),) = run(ranks, [one])
    check(reports, parameters, *reference(one))


@pytest.mark.parametrize("widths", [(2, 2), (1, 3), (3, 1)])
def test_replicated_stages_split_their_micro_batches(ranks, reference, widths):
    """Two stages on four ranks, of equal and unequal widths: split, concatenation, and sums over replicas."""
    families = [
        ("chimera", "sequential", 2, {}),
        ("chimera", "sequential", 4, {"concatenation": "halving"}),
        ("gpipe", "sequential", 2, {"recompute": True}),
    ]
    if widths != (3, 1):
        families.append(("1f1b", "gpt", 3, {}))
    cases = [
        case(
            model, generate(name, num_stages=2, num_micro_batches=n, width=widths, iterations=STEPS, **options), rows=12
        )
        for name, model, n, options in families
    ]
    for one, (reports, parameters) in zip(cases, run(ranks, cases)):
        check(reports, parameters, *reference(one))


# ---- Asynchronous schedules --------------------------------------------------------------------------------------------

Rule = Callable[[int, int, int, int], int]
"""The version of a stage's weights that a micro-batch sees, of (stage, number of stages, micro-batch, update period)."""


def pipedream(stage: int, num_stages: int, number: int, period: int) -> int:
    """Stage s has seen the updates of all micro-batches but the S - 1 - s before this one, which are on their way."""
    return max(0, number - (num_stages - 1 - stage))


def two_buffered(stage: int, num_stages: int, number: int, period: int) -> int:
    """w(t+1) = w(t) - lr grad f(w(t-1)), and f(w(0)) in the first period."""
    return max(0, number // period - 1)


def double_grouped(stage: int, num_stages: int, number: int, period: int) -> int:
    """w_Gi(t+1) = w_Gi(t) - lr grad f(w_Gi(t-1+i)): the second half of the stages has no delay."""
    return number // period if stage >= num_stages // 2 else max(0, number // period - 1)


def asynchronous(num_stages: int) -> list[tuple[Rule, Schedule]]:
    """Every family at every depth, with the rule for its weight versions."""
    d = num_stages
    families: list[tuple[Rule, str, int, dict[str, Any]]] = [
        (pipedream, "pipedream", 1, {"recompute": True}),
        (two_buffered, "pipedream-2bw", d + 1, {}),
        (double_grouped, "wpipe", d, {}),
    ]
    if d == 2:
        families += [
            (pipedream, "pipedream", 1, {}),
            (two_buffered, "pipedream-2bw", 2, {"width": 2}),
            (double_grouped, "wpipe", 3, {"recompute": True}),
        ]
    result = []
    for rule, name, n, options in families:
        # Weights of the first stage are as many updates old in pipedream as there are stages behind it, one in the others.
        updates = d + 2 if name == "pipedream" else 3
        schedule = generate(name, num_stages=d, num_micro_batches=n, iterations=updates, **options)
        result.append((rule, schedule))
    return result


@pytest.mark.parametrize("num_stages", [2, 4])
def test_asynchronous_schedules_have_their_update_semantics(ranks, reference, num_stages):
    cases, versions = [], []
    for rule, schedule in asynchronous(num_stages):
        depth = schedule.num_stages
        cases.append(case("sequential", schedule, optimizer=("SGD", 0.25)))
        versions.append(
            [
                [rule(stage, depth, number, schedule.update_period) for stage in range(depth)]
                for number in range(schedule.num_micro_batches)
            ]
        )
    for num_ranks in sorted({sum(one["schedule"].widths) for one in cases}):
        some = [i for i, one in enumerate(cases) if sum(one["schedule"].widths) == num_ranks]
        for i, (reports, parameters) in zip(some, run(ranks, [cases[i] for i in some])):
            losses, wanted, synchronous = reference(cases[i], "train_delayed", versions=versions[i])
            check(reports, parameters, losses, wanted)
            # The delay shows: without it the weights would be others.
            assert max(relative_error(synchronous[name], value) for name, value in wanted.items()) > 1e-3


# ---- What is sent, and what is reported ----------------------------------------------------------------------------------


def test_reports(ranks):
    """Tasks in their order, none before what it needs has ended; losses by update."""
    schedule = generate("chimera", num_stages=2, num_micro_batches=2, iterations=2)
    (((report,), _),) = run(ranks, [case("sequential", schedule)])
    ends = {}
    for worker, tasks in enumerate(schedule.workers):
        starts, stops = report.timeline.starts[worker], report.timeline.ends[worker]
        assert (stops >= starts).all()
        compute = [i for i, task in enumerate(tasks) if task.kind.is_compute]
        assert (starts[compute][1:] >= stops[compute][:-1]).all()
        ends.update({str(task): (start, stop) for task, start, stop in zip(tasks, starts, stops)})
    for first, then in (("0F0", "1F0"), ("1F0", "1B0"), ("1B0", "0B0"), ("1:0F1", "1:1F1"), ("1:1B1", "1:0B1")):
        assert ends[first][1] <= ends[then][0], (first, then)
    assert ends["0B0"][1] <= ends["0U0"][0] and ends["0A0"][1] <= ends["0U0"][0] <= ends["0F2"][0]
    assert min(starts[0] for starts in report.timeline.starts) == 0


def test_as_many_graphs_alive_as_the_simulator_says(ranks):
    """Counted by objects that live as long as autograd holds them: nothing is freed late, and nothing is left."""
    schedules = [
        generate(name, num_stages=4, num_micro_batches=8, **options)
        for name, options in (
            ("gpipe", {}),
            ("1f1b", {}),
            ("1f1b", {"policy": "B"}),
            ("gems", {}),
            ("chimera", {}),
            ("chimera", {"num_pipelines": 4}),
            ("chimera", {"concatenation": "doubling"}),
            ("interleaved-1f1b", {}),
            ("zero-bubble", {}),
            ("wpipe", {"iterations": 2}),
            ("pipedream", {"iterations": 1}),
        )
    ]
    results = ranks(4).run(f"{JOBS}:count_alive", schedules, timeout_s=TIMEOUT_S)
    for schedule, by_rank in zip(schedules, zip(*results)):
        predicted = peak_activations(schedule)
        assert [reported for reported, _, _ in by_rank] == list(predicted), schedule.name
        assert [counted for _, counted, _ in by_rank] == list(predicted), schedule.name
        assert [left for _, _, left in by_rank] == [0] * 4, schedule.name


def test_recomputed_stages_keep_one_graph(ranks):
    schedules = [
        generate(name, num_stages=4, num_micro_batches=4, recompute=True, **options)
        for name, options in (("gpipe", {}), ("wpipe", {"iterations": 2}))
    ]
    for by_rank in zip(*ranks(4).run(f"{JOBS}:count_alive", schedules, timeout_s=TIMEOUT_S)):
        assert set(by_rank) == {(1, 1, 0)}


def test_bytes_on_the_wire(counted_ranks):
    """Boundaries and sums of gradients: what the ranks really sent, within 3 % of the prediction."""
    width, rows = 128, 64
    boundary_bytes, gradient_bytes = 4 * width * rows, 4 * width * width
    schedules = [
        generate(name, num_stages=4, num_micro_batches=4, **options)
        for name, options in (
            ("1f1b", {}),
            ("chimera", {}),
            ("interleaved-1f1b", {}),
            ("zero-bubble", {}),
            ("wpipe", {"iterations": 2}),
        )
    ]
    schedules.append(generate("1f1b", num_stages=2, num_micro_batches=4, width=2))
    schedules.append(generate("gpipe", num_stages=2, num_micro_batches=4, width=(1, 3), recompute=True))

    def count() -> list[Sent]:
        results = counted_ranks(4).run(f"{JOBS}:count_bytes", schedules, width, 3 * rows, timeout_s=TIMEOUT_S)
        found = []
        for number, (schedule, by_rank) in enumerate(zip(schedules, zip(*results))):
            stages = schedule.num_stages
            between, reduced = communication_bytes(
                schedule, [3 * boundary_bytes] * (stages - 1), [gradient_bytes] * stages
            )
            assert sum(sent for _, sent, _ in by_rank) == between, schedule.name
            found.append(Sent(f"{number}: {schedule.name}", by_rank[0][0], between + reduced, num_readings=0))
        return found

    check_sent(4, count(), count)


# ---- Compression -------------------------------------------------------------------------------------------------------


def test_compressed_boundaries_give_nearly_the_same_parameters(ranks, reference):
    """Other values, since they are rounded on their way, but not far from one device's."""
    cases = [
        case(model, generate(name, num_stages=num_stages, num_micro_batches=2, iterations=STEPS, **options), rows=12)
        for name, model, num_stages, options in (
            ("chimera", "gpt", 4, {"concatenation": "halving"}),
            ("zero-bubble", "sequential", 4, {"recompute": True}),
            ("1f1b", "sequential", 2, {"width": (1, 3)}),
        )
    ]
    for one, ((report,), parameters) in zip(cases, run(ranks, [{**one, "compress": True} for one in cases])):
        losses, wanted = reference(one)
        name = one["schedule"].name
        in_full = report.bytes_sent + report.bytes_saved
        assert report.num_uncompressed == 0 and 0.5 < report.bytes_sent / in_full < 0.52, name
        assert report.losses == pytest.approx(losses, rel=2e-3), name
        errors = [relative_error(value, wanted[key]) for of_rank in parameters for key, value in of_rank.items()]
        assert max(errors) < 5e-3 and 1e-6 < np.median(errors) < 1e-3, name


def test_what_cannot_be_compressed_arrives_as_it_was(ranks):
    """Activations in full precision, in their two parts; gradients compressed."""
    schedule = generate("1f1b", num_stages=4, num_micro_batches=4)
    one = case("wide-range", schedule)
    ((full,), _), ((report,), _) = run(ranks, [one, {**one, "compress": True}])
    assert report.losses == full.losses
    assert report.num_uncompressed == 3 * 4 and full.num_uncompressed == 0
    num_messages = 2 * 3 * 4
    assert report.bytes_sent == full.bytes_sent * 3 // 4 + 4 * num_messages


def test_compressed_bytes_on_the_wire(counted_ranks):
    """Half the bytes between stages, within 3 %; all of them for activations that need full precision."""
    width, rows = 256, 96
    boundary_bytes, gradient_bytes = 4 * width * rows, 4 * width * width
    cases = []
    for name, is_wide, options in (
        ("1f1b", False, {}),
        ("1f1b", True, {}),
        ("chimera", False, {"concatenation": "halving"}),
        ("gpipe", True, {"width": (1, 3)}),
    ):
        num_stages = len(options.get("width", range(4)))
        cases.append((generate(name, num_stages=num_stages, num_micro_batches=4, **options), is_wide))

    def count() -> list[Sent]:
        results = counted_ranks(4).run(f"{JOBS}:count_compressed_bytes", cases, width, rows, timeout_s=TIMEOUT_S)
        found = []
        for number, ((schedule, is_wide), by_rank) in enumerate(zip(cases, zip(*results))):
            stages = schedule.num_stages
            between, reduced = communication_bytes(schedule, [boundary_bytes] * (stages - 1), [gradient_bytes] * stages)
            forward, backward = (boundary_bytes * sum(both) for both in zip(*boundary_crossings(schedule)))
            expected = (forward if is_wide else forward / 2) + backward / 2
            assert sum(sent for _, sent, _, _ in by_rank) == pytest.approx(expected, rel=1e-3), schedule.name
            assert sum(sent + saved for _, sent, saved, _ in by_rank) == between
            assert (sum(full for _, _, _, full in by_rank) > 0) == is_wide
            found.append(Sent(f"{number}: {schedule.name}", by_rank[0][0], expected + reduced, num_readings=0))
        return found

    check_sent(4, count(), count)


def test_a_sleeping_schedule_takes_its_time(ranks):
    """Stages that sleep, communication that is real: not faster than the simulation, nor stalled. (How much slower depends on what
    else the machine does.)"""
    schedule = generate("chimera", num_stages=4, num_micro_batches=4, width=1)
    times = Times.of(4, forward=0.03, backward=0.06, update=0.01)
    lowered = lower(schedule, 2, times=Times.of(4, forward=0.03, backward=0.06, transfer=1e-3))
    job = "autoddl.pipelines.runtime.pipeline.sleeping:sleep_through"
    reports = ranks(4).run(job, lowered, times, [64] * 3, [64] * 4, 1, timeout_s=TIMEOUT_S)
    timeline = combine(schedule, [report for (report,) in reports]).timeline
    simulated = simulate(schedule, times)
    assert simulated.makespan * 0.999 < timeline.makespan < 50 * simulated.makespan
    assert all(slept >= 0.999 * wanted for slept, wanted in zip(timeline.busy, simulated.busy))
    for row, drawn in enumerate(line for line in to_text(timeline).splitlines() if line.startswith("worker")):
        assert all(f"F{number}" in drawn and f"B{number}" in drawn for number in range(4)), row


@pytest.mark.ranks
def test_a_killed_rank_is_named(tmp_path):
    available = is_available()
    if not available:
        pytest.skip(available.reason)
    one = case("sequential", generate("chimera", num_stages=2, num_micro_batches=8))
    with RankPool(2, log_dir=tmp_path) as pool:
        begin = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
            pool.run(f"{JOBS}:be_killed", one, 1, timeout_s=60)
        assert time.monotonic() - begin < 60
        assert not pool.is_open


def test_refusals(ranks):
    synchronous = generate("1f1b", num_stages=2, num_micro_batches=2)
    asynchronous = generate("pipedream", num_stages=2, num_micro_batches=2)
    wide = generate("1f1b", num_stages=2, num_micro_batches=2, width=2)
    cases = [
        case("mlp", synchronous, sizes=(7, 2)),
        case("mlp", synchronous, sizes=(4, 2, 2)),
        case("gpt", asynchronous),
        case("mlp", wide),
    ]
    for messages in ranks(2).run(f"{JOBS}:refusals", cases, timeout_s=TIMEOUT_S):
        assert messages == [
            "stages of 7, 2 layers do not make up the 8 layers of the model",
            "3 sizes were given, schedule 1f1b has 2 stages",
            "stages 0 and 1 share weights, which schedule pipedream updates at different times; untie them, or take a "
            "synchronous schedule",
            "the job has 2 ranks; schedule 1f1b takes 4",
        ]


# ---- Checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [("Adam", 0.01), ("SGD", 0.05)])
def test_resuming_gives_the_same_losses(ranks, reference, tmp_path, optimizer):
    """Also with other schedules, of other widths and cuts, on another number of ranks."""
    first = case("sequential", generate("1f1b", num_stages=2, num_micro_batches=4), optimizer=optimizer)
    second = case("sequential", generate("chimera", num_stages=4, num_micro_batches=4), optimizer=optimizer)
    third = case("sequential", generate("zero-bubble", num_stages=2, num_micro_batches=4, width=2), optimizer=optimizer)
    losses: list[float] = []
    for one, num_runs, before in ((first, 2, 0), (second, 2, 2), (third, 1, 4)):
        schedule = one["schedule"]
        job = f"{JOBS}:train_with_checkpoints"
        results = ranks(sum(schedule.widths)).run(job, one, tmp_path, num_runs, before > 0, timeout_s=TIMEOUT_S)
        assert [number for number, _ in results] == [before] * len(results)
        for reports in zip(*(reports for _, reports in results)):
            losses += combine(schedule, reports).losses
    wanted, _ = reference({**first, "runs": 5})
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
