"""The option ``--executor`` of the commands, and plans that record an executor: their documents, texts and edits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autoddl
from autoddl.__main__ import main
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph_meshes import LEFT_OUT, why_not_executable
from autoddl.diffing import compare
from autoddl.explain import explain, explanation_document, view_of
from autoddl.plandocument import sealed
from autoddl.planfile import PlanFile, plan_from_document
from autoddl.report import report_page
from autoddl.text.difference import difference_text
from autoddl.text.explanation import explanation_text

#: The fastest plan of all strategies has meshes of three axes.
SIZES = ["mlp:256,256,256", "--cluster", "dgx-a100", "--nodes", "2", "--devices-per-node", "4", "--batch", "256"]
FIXED = [
    *SIZES,
    "--bandwidth",
    "1GB/s",
    "--latency",
    "0.1us",
    "--micro-batch",
    "256",
    "--recompute",
    "never",
    "--quiet",
]
OPTIONS = {
    "cluster": "dgx-a100", "nodes": 2, "devices_per_node": 4, "batch": 256, "bandwidth": 1e9, "latency_s": 1e-7,
    "micro_batch": 256, "recompute": False, "quiet": True,
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    try:
        code = main(list(arguments))
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def plans() -> dict[str, autoddl.Plan]:
    return {executor: autoddl.plan("mlp:256,256,256", **OPTIONS, executor=executor) for executor in ("eager", "graph")}


def document_of(plan: autoddl.Plan) -> dict:
    return json.loads(json.dumps(plan.document))


def loaded(document: dict, edited: bool = False) -> PlanFile:
    return plan_from_document(Fields(document, "plan"), "plan", edited)


# ---- Commands ------------------------------------------------------------------------------------------------------------------


def test_the_plan_says_what_its_executor_left_out_and_costs(capsys, tmp_path, plans):
    path = tmp_path / "plan.json"
    code, out, err = run(capsys, "plan", *FIXED, "--executor", "graph", "-o", str(path))
    assert (code, err) == (0, "")
    assert ", no recomputation, executor graph\n" in out
    certificate = out.split("Certificate\n")[1].splitlines()[0]
    assert certificate.startswith("  proven: none of the ") and certificate.endswith(f"; left out are {LEFT_OUT}")
    cost = plans["graph"].step_s / plans["eager"].step_s - 1
    assert cost > 0.01
    (note,) = (line for line in out.splitlines() if line.startswith("  executor graph"))
    assert note.startswith(f"  executor graph costs {cost:.1%} against all strategies (")
    assert json.loads(path.read_text())["executor"] == "graph" and autoddl.load(path).executor == "graph"


def test_compare_takes_it_for_all_methods(capsys):
    code, out, _ = run(capsys, "compare", *FIXED, "--executor", "graph", "--methods", "exact,coordinate-descent")
    assert code == 0 and LEFT_OUT in out and out.count("executor graph costs ") == 1
    comparison = autoddl.compare("mlp:256,256,256", **OPTIONS, executor="graph", methods=["exact", "random"])
    assert comparison["random"]["step_s"] >= comparison["exact"]["step_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--executor", "graph", "--pipeline", "auto"],
            "--executor graph is for plans without a pipeline: nn.Graph orders",
        ),
        (
            ["--executor", "graph", "--pipeline", "dapple"],
            "--executor graph is for plans without a pipeline: nn.Graph orders",
        ),
        (["--executor", "grap"], "did you mean 'graph'?"),
        (["--executor", "graph", "--memory-limit", "1e-5"], "no plan of mlp:256,256,256 fits 10.5 KiB per device"),
    ],
)
def test_errors_of_the_command(capsys, words, message):
    code, out, err = run(capsys, "plan", *FIXED, *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err, err


def test_errors_of_the_library():
    with pytest.raises(UserError, match=r"executor 'grahp' .*did you mean 'graph'"):
        autoddl.plan("mlp:64,64", cluster="local-cpu", executor="grahp")
    with pytest.raises(UserError, match=r"^executor='graph' is for plans without a pipeline: nn\.Graph orders"):
        autoddl.plan("mlp:64,64", cluster="local-cpu", executor="graph", pipeline="auto")


def test_where_only_other_plans_fit_the_command_says_so(capsys):
    small = ["mlp:64,64,64", "--cluster", "local-cpu", "--nodes", "1", "--devices-per-node", "4", "--batch", "256"]
    small += ["--micro-batch", "256", "--recompute", "never", "--memory-limit", str(130000 / 2**30), "--quiet"]
    code, out, err = run(capsys, "plan", *small, "--executor", "graph")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.endswith("with --executor graph, but a plan of all strategies fits: leave out --executor graph\n")
    assert run(capsys, "plan", *small)[0] == 0


# ---- Documents -----------------------------------------------------------------------------------------------------------------


def test_a_plan_without_the_field_is_eager(plans):
    document = document_of(plans["eager"])
    assert "executor" not in document and "executor" not in document["options"]
    assert loaded(document).executor == plans["eager"].executor == "eager"
    assert loaded(sealed({**document, "executor": "eager"})).executor == "eager"


def test_a_plan_is_read_again_with_its_executor(plans):
    document = document_of(plans["graph"])
    plan = loaded(document)
    assert plan.executor == document["executor"] == document["options"]["executor"] == "graph"
    assert plan.strategies == plans["graph"].strategies and plan.is_claimed
    assert why_not_executable("graph", plan.graph, plan.strategies) == ""
    edited = loaded({**document, "gap": 0.5}, edited=True)
    assert edited.executor == "graph" and not edited.is_claimed
    assert loaded(json.loads(json.dumps(edited.document))).executor == "graph"


@pytest.mark.parametrize(
    ("executor", "in_options", "message"),
    [
        ("eager", "graph", "options: executor is 'graph', but the plan's is 'eager'"),
        ("graph", "eager", "options: executor is 'eager', but the plan's is 'graph'"),
        ("lazy", "graph", 'executor is "lazy", should be one of eager, graph'),
        (1, "graph", "executor"),
    ],
)
def test_forged_executors(plans, executor, in_options, message):
    document = document_of(plans["graph"])
    document |= {"executor": executor, "options": {**document["options"], "executor": in_options}}
    with pytest.raises(UserError, match=message):
        loaded(sealed(document))


def test_another_note_than_that_of_the_executor_is_refused(plans):
    document = document_of(plans["graph"])
    for notes in ([], ["executor graph costs nothing", "and more"], ["a pipeline takes 1 ms, 50% less, at least"]):
        with pytest.raises(UserError, match=r"notes are .*, should end with what its executor costs"):
            loaded(sealed({**document, "notes": notes}))


def test_strategies_that_the_executor_cannot_execute_are_refused_by_name(plans):
    """Whether claims are dropped or not; without the executor they are a plan."""
    document = document_of(plans["graph"])
    document["layers"][1]["strategy"] = [[2, 1, 1], [1, 2, 2]]
    message = r"plan: .*executor 'graph' cannot execute fc2 at \(2,1,1\) \| \(1,2,2\): its weight is split by columns"
    for edited in (False, True):
        with pytest.raises(UserError, match=message) as error:
            loaded(document, edited)
        assert "\n" not in str(error.value)
    del document["executor"]
    assert loaded(document, edited=True).executor == "eager"


def test_an_executor_of_a_pipeline_is_refused():
    slow = {
        "cluster": "gcp-a100",
        "nodes": 1,
        "devices_per_node": 2,
        "latency_s": 1e-6,
        "bandwidth": 2e7,
        "quiet": True,
    }
    plan = autoddl.plan("mlp:256,256,256", **slow, batch=4, micro_batch=1, pipeline="auto")
    assert plan.has_pipeline
    with pytest.raises(UserError, match=r"executor is 'graph', but the plan has a pipeline: nn\.Graph orders"):
        loaded({**document_of(plan), "executor": "graph"}, edited=True)


# ---- Explain, diff, report -----------------------------------------------------------------------------------------------------


def test_explain_offers_what_the_executor_can_execute(plans):
    view = view_of(plans["graph"])
    explained = explain(view, count=1000)
    choices = [choice for section in explained.sections for choice in section.choices]
    offered = {str(one.strategy) for choice in choices for one in choice.alternatives}
    assert len(offered) > 2
    for choice in choices:
        for one in choice.alternatives:
            strategies = {**plans["graph"].strategies, choice.layers[0]: one.strategy}
            assert why_not_executable("graph", plans["graph"].graph, strategies) == ""
            assert one.regret_s >= 0
    assert "proven optimal, executor graph" in str(explanation_text(explained))
    assert explanation_document(explained)["executor"] == "graph"
    of_all = explain(view_of(plans["eager"]), count=1000)
    assert sum(len(c.alternatives) for s in of_all.sections for c in s.choices) > sum(
        len(c.alternatives) for c in choices
    )


def test_an_edited_plan_is_explained_with_its_executor(plans):
    document = document_of(plans["graph"])
    view = view_of(loaded({**document, "gap": 0.5}, edited=True))
    choices = [choice for section in explain(view, count=1000).sections for choice in section.choices]
    for choice in choices:
        for one in choice.alternatives:
            strategies = {**plans["graph"].strategies, choice.layers[0]: one.strategy}
            assert why_not_executable("graph", plans["graph"].graph, strategies) == ""


def loaded_plan(plan: autoddl.Plan, folder: Path) -> autoddl.Plan:
    """The plan after it was saved."""
    plan.save(folder / "plan.json")
    return autoddl.load(folder / "plan.json")


def test_diff_report_and_tables_show_it(plans, tmp_path):
    difference = compare(view_of(plans["eager"]), view_of(plans["graph"]))
    assert ("executor", "eager", "graph") in {(row.what, row.before, row.after) for row in difference.options}
    assert ["executor", "eager", "graph"] in [
        line.split() for line in str(difference_text(difference, ("a", "b"))).splitlines()
    ]
    read = loaded_plan(plans["graph"], tmp_path)
    assert ["executor", "graph"] in [line.split() for line in str(read.text).splitlines()]
    assert "executor" not in str(loaded_plan(plans["eager"], tmp_path).text)
    page = report_page(explain(view_of(plans["graph"]), count=1))
    assert LEFT_OUT in page
