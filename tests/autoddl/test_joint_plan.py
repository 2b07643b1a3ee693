"""Joint plans and the rows that they are compared with; their document; the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.joint import (
    JointOptions,
    StageMesh,
)
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.executed import executed_step_s
from autoddl.pipelines.joint.job import job_of
from autoddl.pipelines.joint.megatron_trials import megatron_trials
from autoddl.pipelines.joint.meshes import Division
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.rivals import RECIPE
from autoddl.pipelines.planners import Clock
from autoddl.plandocument import notes_of
from autoddl.planfile import load_plan, plan_document, plan_from_document, save_plan
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import Transformer, gpt, mlp, resolve_model

from ..pipelines.joint.comparisons import without_rivals

GPT = gpt(Transformer("small", 4, 64, 4, 8, 128))
UNTIED = gpt(Transformer("untied", 4, 64, 4, 8, 128, tied=False))
LATENCY, BANDWIDTH = 2e-6, 1e8
MACHINE = load_cluster("gcp-a100").resized(1, 4).with_links(latency_s=LATENCY, bandwidth=BANDWIDTH)


# ---- Plans and the rows that they are compared with --------------------------------------------------------------------

ROWS = [
    *("pure SBP", "data parallel", "Megatron + 1F1B", "1F1B", "DAPPLE", "Chimera", "GPipe", "interleaved 1F1B"),
    *("GEMS", "PipeDream", "PipeDream-2BW", "WPipe"),
]
TWO_NODES = load_cluster("gcp-a100").resized(2, 2).with_links(latency_s=1e-6, bandwidth=5e7)
HEAVY = resolve_model("mlp:64,768,768,32")


@pytest.mark.parametrize(
    ("graph", "machine", "options", "stale"),
    [
        (UNTIED, MACHINE, Options(batch=8), False),
        (GPT, TWO_NODES, Options(batch=8, memory_limit_bytes=2.5e6), True),
        (UNTIED, TWO_NODES, Options(batch=4, untied=True), True),
        (HEAVY, MACHINE.resized(1, 3), Options(batch=12, recompute=True), False),
        (mlp((64, 64, 64, 64, 64, 64)), MACHINE, Options(batch=8, micro_batch=2), True),
    ],
    ids=["equal links", "shared weights", "untied", "three devices", "micro-batch"],
)
@pytest.mark.parametrize("seconds", [1e-3, 2.0])
def test_no_row_is_faster_than_the_plan(graph, machine, options, stale, seconds):
    """However short the time is; every row's bound holds, for what its paper's planner chooses too."""
    found = plan_jointly(graph, machine, JointOptions(replace(options, time_limit_s=seconds), "auto", stale))
    rows = {family.name: family for family in found.rivals}
    assert [name for name in rows if name != RECIPE] == ROWS
    assert 0 < found.lower_bound_s <= found.evaluation.step_s
    assert found.evaluation.memory_bytes <= found.memory_limit_bytes
    feasible = [row for row in rows.values() if row.infeasible is None]
    assert feasible
    for row in feasible:
        assert row.step_s >= found.evaluation.step_s * (1 - 1e-12), row
        assert row.step_s >= found.lower_bound_s * (1 - 1e-9) and row.memory_bytes <= found.memory_limit_bytes
        assert row.lower_bound_s <= row.step_s * (1 + 1e-12)
        assert row.paper_step_s is None or row.paper_step_s >= row.step_s
    if not stale:
        assert all(rows[name].infeasible == "asynchronous; offered with allow_stale=True" for name in ROWS[-3:])
    document = plan_document(found)
    assert plan_from_document(Fields(json.loads(json.dumps(document)), "plan"), "plan").is_claimed


@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_dapple_offers_all_that_1f1b_does(seconds):
    """However short the time is. Its workers may have unequal numbers of devices, and 1F1B those that Megatron's rule allows of
    data parallel ways."""
    found = plan_jointly(HEAVY, MACHINE.resized(1, 3), JointOptions(Options(batch=12, time_limit_s=seconds)))
    rows = {family.name: family for family in found.rivals}
    if rows["1F1B"].infeasible is None:
        assert rows["DAPPLE"].step_s <= rows["1F1B"].step_s
    if rows["DAPPLE"].paper_step_s is not None:
        assert rows["DAPPLE"].paper_step_s >= rows["DAPPLE"].step_s
    assert rows["Megatron + 1F1B"].paper_step_s is None


@pytest.fixture
def no_comparison() -> Iterator[None]:
    with without_rivals():
        yield


def test_a_wider_choice_is_no_slower(no_comparison):
    """A choice for every layer, Summa meshes and asynchronous schedules: what was there before is still there."""
    slow, base = MACHINE.with_links(bandwidth=2e7), Options(batch=8, memory_limit_bytes=4e6, summa=False)
    plain = plan_jointly(UNTIED, slow, JointOptions(base))
    assert plain.optimal
    for wider, stale in ((replace(base, untied=True), False), (replace(base, summa=True), False), (base, True)):
        found = plan_jointly(UNTIED, slow, JointOptions(wider, "auto", stale))
        assert found.evaluation.step_s <= plain.evaluation.step_s * (1 + 1e-9)
        assert found.lower_bound_s <= plain.lower_bound_s * (1 + 1e-9)


def test_summa_meshes_are_only_taken_where_they_are_on_offer(no_comparison):
    """Two x two devices of a node: a linear layer's (1, 2, 2) moves less than what else there is, if it may be taken."""
    graph, machine = mlp((2048, 2048, 2048, 2048)), MACHINE.resized(1, 4)
    found = {
        summa: plan_jointly(graph, machine, JointOptions(Options(batch=8, summa=summa, micro_batch=8)))
        for summa in (False, True)
    }
    assert not any(layer.strategy.summa for layer in found[False].evaluation.layers)
    assert found[True].evaluation.step_s <= found[False].evaluation.step_s * (1 + 1e-9)


def test_communication_alone_is_what_is_minimised():
    slow = MACHINE.with_links(bandwidth=2e7)
    options = Options(batch=8, memory_limit_bytes=4e6, objective="communication")
    found = plan_jointly(UNTIED, slow, JointOptions(options))
    evaluation = found.evaluation
    assert found.cost == evaluation.cost("communication") < evaluation.step_s and found.lower_bound_s <= found.cost
    quickest = plan_jointly(UNTIED, slow, JointOptions(replace(options, objective="step")))
    assert found.cost <= quickest.evaluation.cost("communication") * (1 + 1e-9)
    assert quickest.evaluation.step_s <= evaluation.step_s * (1 + 1e-9)


def test_workers_of_unequal_numbers_of_devices_can_be_better():
    """A layer of 768 x 768 between small ones on 3 devices: the first two take more than half of the work together."""
    found = plan_jointly(HEAVY, MACHINE.resized(1, 3), JointOptions(Options(batch=96, precision="mixed")))
    assert found.optimal and isinstance(found.configuration.mesh, Division)
    equal = [row.step_s for row in found.rivals if row.name in ("1F1B", "GPipe", "pure SBP")]
    assert found.evaluation.step_s < min(equal)


def test_reports_begin_with_a_trial_and_the_plan_without_a_pipeline_and_end_with_the_best():
    slow, base = MACHINE.with_links(bandwidth=2e7), Options(batch=8, memory_limit_bytes=4e6, precision="mixed")
    reports: list[tuple[float, float, int]] = []
    found = plan_jointly(UNTIED, slow, JointOptions(base), lambda *report: reports.append(report))
    steps = [best for best, _, _ in reports]
    job = job_of(UNTIED, slow, JointOptions(base))
    trial = megatron_trials(job, math.inf, Clock(60.0))
    trial = megatron_trials(job, trial.step_s, Clock(60.0)) or trial
    alone = make_plan(UNTIED, slow, base).cost
    assert steps[0] == pytest.approx(trial.step_s, rel=1e-9) and any(step <= alone * (1 + 1e-9) for step in steps[1:])
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1] >= found.cost
    assert all(0 <= bound <= found.cost * (1 + 1e-9) for _, bound, _ in reports)


@pytest.mark.parametrize("bandwidth", [1e10, 3e6])
def test_a_plan_that_is_slower_as_executed_says_so(bandwidth):
    """On fast links messages hardly wait for each other; on slow ones they do, and a row may take less."""
    found = plan_jointly(
        UNTIED, MACHINE.with_links(latency_s=LATENCY, bandwidth=bandwidth), JointOptions(Options(batch=8))
    )
    seconds, chain = executed_step_s(found.evaluation), chain_of(UNTIED)
    notes = [note for note in notes_of(found, None) if note.startswith("as executed, ")]
    more = seconds / found.evaluation.step_s - 1
    if bandwidth > 1e9:
        assert 0 <= more < 0.01 and not notes
        return
    (note,) = notes
    assert more > 1 and note.startswith(f"as executed, a step takes {seconds * 1e3:.1f} ms, {more:.1%} more: ")
    rows = [row for row in found.rivals if row.configuration is not None]
    executed = {row.name: executed_step_s(evaluate(chain, found.cluster, row.configuration)) for row in rows}
    least_s = min(executed.values())
    assert least_s < seconds
    assert any(
        note.endswith(f"; {name} takes {least_s * 1e3:.1f} ms") for name in executed if executed[name] == least_s
    )


# ---- The document and the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned():
    slow = MACHINE.with_links(bandwidth=2e7)
    return plan_jointly(UNTIED, slow, JointOptions(Options(batch=8, memory_limit_bytes=4e6, precision="mixed")))


def test_a_plan_reads_back_as_it_was(planned, tmp_path):
    save_plan(tmp_path / "plan.json", plan_document(planned))
    plan = load_plan(tmp_path / "plan.json")
    assert plan.num_stages == len(planned.evaluation.stages) > 1
    assert plan.evaluation.step_s == planned.evaluation.step_s
    assert plan.evaluation.configuration == planned.configuration
    assert plan.evaluation.configuration.stages[-1].strategies == planned.configuration.stages[-1].strategies
    document = plan.document
    assert document["version"] == 4 and document["optimal"]
    assert sorted(rank for worker in document["workers"] for rank in worker["ranks"]) == [0, 1, 2, 3]
    assert [layer["name"] for layer in document["layers"]] == [layer.name for layer in UNTIED.layers]


def test_a_plan_of_unequal_stages_reads_back(tmp_path):
    machine = load_cluster("gcp-a100").resized(1, 3).with_links(latency_s=LATENCY, bandwidth=BANDWIDTH)
    options = JointOptions(Options(batch=12, micro_batch=4, precision="mixed"))
    planned = plan_jointly(resolve_model("mlp:64,768,768,32"), machine, options)
    assert planned.configuration.mesh == Division((StageMesh(1, 2), StageMesh(1, 1)))
    document = plan_document(planned)
    save_plan(tmp_path / "plan.json", document)
    plan = load_plan(tmp_path / "plan.json")
    assert (
        plan.evaluation.configuration == planned.configuration and plan.evaluation.step_s == planned.evaluation.step_s
    )
    assert [worker["mesh"]["devices_per_node"] for worker in document["workers"]] == [2, 1]
    assert [worker["ranks"] for worker in document["workers"]] == [[0, 1], [2]]
    document["workers"][0]["mesh"]["devices_per_node"] = 1
    save_plan(tmp_path / "plan.json", document)
    with pytest.raises(UserError, match="schedule has 2 workers, mesh 1 x 1 makes 3"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("step_s",), 1.0, "step_s is 1.0"),
        (("timeline", "bubble_s"), 9.0, "bubble_s is 9.0"),
        (("stages", 0, "forward_s"), 5.0, "forward_s is 5.0"),
        (("stages", 0, "num_units"), 9, "num_units is 9, the model has 4 left"),
        (("stages", 1, "recompute"), "some", "is not one of none, selective, layers, blocks, stage, or blocks:K"),
        (("workers", 1, "ranks"), [3], r"workers\[1\]: ranks"),
        (("workers", 0, "mesh", "nodes"), 3, "does not tile 1 x 4 devices"),
        (("schedule", "name"), "magic", "'magic' is not one of gpipe"),
        (("graph_hash",), "sha256:0", "graph_hash was edited"),
        (("version",), 3, "version 3 is not supported, only 4 is; plan again"),
    ],
)
def test_an_edited_plan_is_refused(planned, tmp_path, path, value, said):
    document = json.loads(json.dumps(plan_document(planned)))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    save_plan(tmp_path / "plan.json", document)
    with pytest.raises(UserError, match=said):
        load_plan(tmp_path / "plan.json")


def test_the_command_prints_one_document(capsys, tmp_path):
    where = ["mlp:256,128,64,16", "--cluster", "gcp-a100", "--nodes", "1", "--devices-per-node", "2", "--batch", "8"]
    assert main(["plan", *where, "--pipeline", "auto", "--json", "--quiet", "-o", str(tmp_path / "p.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "p.json").read_text())
    families = {rival["name"] for rival in document["rivals"]}
    assert families - {RECIPE} == set(ROWS)
    assert load_plan(tmp_path / "p.json").evaluation.step_s == document["step_s"]
    assert main(["plan", *where, "--pipeline", "dapple", "--quiet"]) == 0
    text = capsys.readouterr().out
    for section in ("Per layer", "Per step", "Compared with", "Why", "Certificate"):
        assert f"\n{section}" in text
    assert "one stage on all 2 devices: no pipeline" in text and "\nStages" not in text
    assert "this plan (DAPPLE)" in text and "not proven" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pipeline", "wpipe"], "add --allow-stale"),
        (["--allow-stale"], "--allow-stale is for pipelines"),
        (["--pipeline", "auto", "--method", "random"], "method 'random' is for plans without a pipeline"),
        (["--pipeline", "auto", "--micro-batch", "3"], "micro-batch 3 does not divide the batch of 8; the nearest"),
        (
            ["--pipeline", "dapple", "--nodes", "16", "--batch", "97"],
            "batch 97 should divide over stages of 16 or 8 devices; the nearest batches that work are 96 and 104",
        ),
        (["--pipeline", "auto", "--memory-limit", "0.00001"], "the smallest memory that would do is"),
        (["--pipeline", "auto", "--memory-limit", "-1"], "memory limit -1 GiB should be"),
        (["--pipeline", "chimera", "--nodes", "3"], "D should be even"),
    ],
)
def test_faults_are_one_line(capsys, arguments, said):
    where = ["mlp:256,128,64,16", "--cluster", "gcp-a100", "--nodes", "1", "--devices-per-node", "1", "--batch", "8"]
    assert main(["plan", *where, "--quiet", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "devices", "options"),
    [
        (UNTIED, 4, Options(batch=4)),
        (mlp((31, 97, 13, 7, 5)), 4, Options(batch=6)),  # no weight can be split
        (resolve_model("gpt:4x64", heads=4, sequence=512, vocabulary=256), 3, Options(batch=8, micro_batch=2)),
        (mlp((64, 64, 64, 64, 64, 64)), 2, Options(batch=4, recompute=True)),
    ],
)
def test_the_memory_that_would_do_does_and_less_does_not(no_comparison, graph, devices, options):
    """Three searches each, of which two have to show that nothing fits."""
    machine = MACHINE.resized(1, devices)
    with pytest.raises(UserError, match="would do") as caught:
        plan_jointly(graph, machine, JointOptions(replace(options, memory_limit_bytes=1e3)))
    said = float(re.search(r"memory_limit_bytes=([\d.e+]+)", str(caught.value))[1])
    found = plan_jointly(graph, machine, JointOptions(replace(options, memory_limit_bytes=said)))
    assert 0.998 * said < found.evaluation.memory_bytes <= said
    with pytest.raises(UserError, match="would do"):
        plan_jointly(graph, machine, JointOptions(replace(options, memory_limit_bytes=0.998 * said)))
