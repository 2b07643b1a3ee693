"""What is priced and not executed on ranks is refused before anything starts; what is executed in another way has a note."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import autoddl
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.workload import Workload
from autoddl.executors import EAGER, GRAPH, check_workload, execution_notes, pricing_notes
from autoddl.export import export
from autoddl.staging import planned_model
from autoddl.verification.run import verify
from autoddl.zoo import resolve_model

#: Options of plans that ranks do not execute, and what is said.
REFUSED = {
    "gradients": (
        "master",
        "the plan has gradients='master', which is priced but not executed on ranks; plan with gradients='compute'",
    ),
    "activations": (
        "regathered",
        "the plan has activations='regathered', which is priced but not executed on ranks; plan with activations='kept'",
    ),
}


def plan_with(**options):
    return autoddl.plan("gpt:2x64", cluster="local-cpu", devices_per_node=2, batch=8, sequence=16, **options)


@pytest.mark.parametrize("option", REFUSED)
def test_every_way_to_ranks_refuses_what_ranks_do_not_execute(option, tmp_path, monkeypatch):
    value, said = REFUSED[option]
    plan, path, script = plan_with(**{option: value}), tmp_path / "plan.json", tmp_path / "train.py"
    plan.save(path)
    script.write_text("print('started')")
    loaded = autoddl.load_plan(path)
    # Whatever starts a process, or draws initial values, would fail.
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    for run in (
        lambda: autoddl.apply(None, loaded),
        lambda: planned_model(None, loaded),
        lambda: autoddl.train(path, steps=1),
        lambda: verify(loaded, 2),
        lambda: autoddl.launch(path, script, local=True, dry_run=True),
        lambda: export(loaded, "oneflow"),
        lambda: export(loaded, "oneflow-graph"),
    ):
        with pytest.raises(UserError) as refusal:
            run()
        assert str(refusal.value) == said
    assert export(loaded, "json") and export(loaded, "chrome-trace")  # need no ranks


@pytest.mark.parametrize("executor", [EAGER, GRAPH])
def test_a_plan_of_default_options_is_executed_by_both_executors(executor):
    check_workload(Workload(8, 8), executor)
    for way in ("none", "selective", "layers"):
        check_workload(Workload(8, 8, recompute=way), executor)


def test_the_graph_executor_recomputes_single_layers():
    blocks = Workload(8, 8, recompute="blocks")
    check_workload(blocks, EAGER)
    with pytest.raises(
        UserError, match=r"^the plan has recompute='blocks', which is priced but not executed by the graph "
    ):
        check_workload(blocks, GRAPH)


def test_notes_say_what_is_executed_in_another_way():
    workload, graph = Workload(8, 8, precision="float32"), resolve_model("gpt:2x64")
    assert execution_notes(graph, workload) == pricing_notes(graph, workload) == ()
    (overlap,) = execution_notes(graph, replace(workload, overlap="gradients"))
    assert overlap.startswith("overlap=gradients is priced, but the eager executor does not overlap")
    (precision,) = execution_notes(graph, replace(workload, precision="fp8"))
    assert precision.startswith("precision fp8 is executed as bfloat16")
    (attention,) = execution_notes(graph, workload, GRAPH)
    assert attention.startswith("attention is priced as fused, but the graph executor computes it dense")
    assert execution_notes(graph, replace(workload, attention="dense"), GRAPH) == ()
    assert execution_notes(resolve_model("mlp:8,8"), workload, GRAPH) == ()
    refused = pricing_notes(graph, replace(workload, activations="copied", overlap="all"))
    assert [note.split(" is priced")[0] for note in refused] == ["activations=copied", "overlap=all"]
    assert pricing_notes(graph, replace(workload, zero=1)) == ()


def test_exported_files_have_the_notes_and_the_way_of_recomputation():
    plan = plan_with(overlap="all", recompute="blocks")
    text = export(plan, "oneflow")
    heading = text.partition("import")[0]
    assert "# Note     overlap=all is priced, but the eager executor does not overlap" in heading
    assert ", blocks recomputed" in heading
    assert "x = checkpoint_block(block, x, sync)" in text
    assert "def checkpoint_block(" in text and "def checkpoint(" in text and "def attend_blockwise(" in text
    with pytest.raises(
        UserError, match=r"^the plan is for recompute=blocks, which form='oneflow-graph' does not write"
    ):
        export(plan, "oneflow-graph")
    without = export(plan_with(attention="dense"), "oneflow")
    assert "checkpoint_block" not in without and "is_fused=True" not in without


def test_a_refusal_is_one_line_that_names_the_option(tmp_path):
    path = tmp_path / "plan.json"
    plan_with(gradients="master").save(path)
    command = [
        sys.executable,
        "-m",
        "autoddl",
        "export",
        str(path),
        "--to",
        "oneflow",
        "-o",
        str(tmp_path / "model.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "autoddl: the plan has --gradients master, which is priced but not executed on ranks; plan with --gradients compute"
    ]
    assert not (tmp_path / "model.py").exists()
