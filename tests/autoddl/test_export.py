"""Exports: graphs and traces contain the figures of the plan and can be read back; the command ``autoddl export``."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import networkx as nx
import pytest

from autoddl.__main__ import main
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.errors import UserError
from autoddl.export import FORMS, export
from autoddl.export.annotated import annotated_graph
from autoddl.export.drawings import _short, dot_text, graphml_text
from autoddl.pipelines.runtime.load import is_available
from autoddl.planfile import load_plan, unpipelined_plan

from .export_plans import MODELS, renamed

# ---- The examples in docstrings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "export",
        *(f"export.{name}" for name in ("assembling", "library", "scene", "source", "writing")),
        "report.markup",
    ],
)
def test_doctests(name):
    result = doctest.testmod(import_module(f"autoddl.{name}"))
    assert result.failed == 0 < result.attempted


# ---- The annotated graph -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_annotated_graph_holds_the_figures_of_the_plan(plan_of, name):
    plan = load_plan(plan_of(name))
    graph = annotated_graph(plan)
    assessed = {
        found.layer.name: found for found in assess(plan.graph, plan.cluster, plan.workload, plan.strategies).layers
    }
    assert list(graph) == [layer.name for layer in plan.graph.layers]
    assert set(graph.edges) == set(plan.graph.edges)
    assert nx.is_directed_acyclic_graph(graph)
    for layer in plan.document["layers"]:
        data = graph.nodes[layer["name"]]
        for field in ("compute_s", "communication_s", "sent_bytes", "memory_bytes"):
            assert data[field] == pytest.approx(layer[field], rel=1e-12)
        assert data["sbp_output"] == layer["sbp"]["output"]
        assert data["strategy"] == str(plan.strategies[layer["name"]])
    # The bytes that a layer sends are those of its own steps and those of its incoming edges.
    num = plan.workload.num_micro_batches
    for target, found in assessed.items():
        own = num * sum(s.sent_bytes for s in (*found.work.forward, *found.work.backward))
        own += sum(s.sent_bytes for s in found.work.gradient)
        arriving = sum(data["sent_bytes"] for _, _, data in graph.in_edges(target, data=True))
        assert own + arriving == pytest.approx(found.sent_bytes, rel=1e-9)
    total = sum(data["compute_s"] + data["communication_s"] for _, data in graph.nodes(data=True))
    assert total == pytest.approx(graph.graph["step_s"], rel=1e-9)


def test_stages_are_on_the_graph_of_a_pipeline(pipeline_plan):
    graph = annotated_graph(pipeline_plan)
    stages = nx.get_node_attributes(graph, "stage")
    assert stages["wte"] == 0 and stages["lm_head"] == 1
    assert {stages[f"h.{i}.ln_1"] for i in (0, 1)} == {0} and {stages[f"h.{i}.ln_1"] for i in (2, 3)} == {1}
    crossing = {(s, t) for s, t, data in graph.edges(data=True) if data["crosses"]}
    assert crossing == {("h.1.add_2", "h.2.ln_1"), ("h.1.add_2", "h.2.add_1")}
    (boundary,) = pipeline_plan.evaluation.boundaries
    for edge in crossing:
        expected = pipeline_plan.workload.num_micro_batches * (boundary.forward_s + boundary.backward_s)
        assert graph.edges[edge]["communication_s"] == pytest.approx(expected)
    assert graph.graph["num_stages"] == 2


@pytest.mark.parametrize("name", ["gpt", "vgg"])
def test_graphml_is_read_back_by_networkx(plan_of, name):
    plan = renamed(load_plan(plan_of(name)), 'a "<&\x07> \u2028 model')
    expected, found = annotated_graph(plan), nx.parse_graphml(graphml_text(plan))
    assert dict(found.nodes(data=True)) == dict(expected.nodes(data=True))
    assert {(s, t): d for s, t, d in found.edges(data=True)} == {(s, t): d for s, t, d in expected.edges(data=True)}
    assert found.graph["step_s"] == expected.graph["step_s"]
    assert found.graph["name"] == 'a "<&?> \u2028 model'


def parsed_dot(text: str) -> tuple[dict[str, Any], dict[str, dict[str, str]], dict[tuple[str, str], dict[str, str]]]:
    """Parse the dot language: quoted or plain identifiers, attribute lists, subgraphs. Returns graph, nodes and edges."""
    token = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[{}\[\];,=]|[A-Za-z_0-9#.]+)', re.S)
    tokens, position = [], 0
    while position < len(text.rstrip()):
        match = token.match(text, position)
        assert match, text[position : position + 40]
        tokens.append(match[1])
        position = match.end()
    words = iter(range(len(tokens)))
    nodes: dict[str, dict[str, str]] = {}
    edges: dict[tuple[str, str], dict[str, str]] = {}
    graph: dict[str, Any] = {"clusters": {}}
    cluster: list[str] = []
    i = 0

    def plain(word: str) -> str:
        return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], word[1:-1]) if word[0] == '"' else word

    def options(i: int) -> tuple[dict[str, str], int]:
        found = {}
        if tokens[i] != "[":
            return found, i
        i += 1
        while tokens[i] != "]":
            assert tokens[i + 1] == "="
            found[plain(tokens[i])] = plain(tokens[i + 2])
            i += 3 + (tokens[i + 3] == ",")
        return found, i + 1

    assert tokens[0] == "digraph" and tokens[2] == "{" and words
    graph["name"], i = plain(tokens[1]), 3
    while i < len(tokens):
        word = tokens[i]
        if word == "}":
            cluster, i = [], i + 1
        elif word == "subgraph":
            cluster = graph["clusters"].setdefault(tokens[i + 1], [])
            i += 3
        elif tokens[i + 1] == "=":
            i += 4
        elif tokens[i + 1] == "->":
            key = (plain(word), plain(tokens[i + 2]))
            edges[key], i = options(i + 3)
            i += 1
        else:
            found, i = options(i + 1)
            i += 1
            if word in ("graph", "node", "edge"):
                graph[word] = found
            else:
                nodes[plain(word)] = found
                cluster.append(plain(word))
    return graph, nodes, edges


def as_texts(data: dict[str, Any]) -> dict[str, str]:
    return {
        k: str(v).lower() if isinstance(v, bool) else repr(v) if isinstance(v, float) else str(v)
        for k, v in data.items()
    }


def test_dot_is_read_back(plan_of):
    plan = renamed(load_plan(plan_of("gpt")), 'odd "name\\" ]; x -> y; \n {')
    graph, nodes, edges = parsed_dot(dot_text(plan))
    expected = annotated_graph(plan)
    assert graph["name"] == plan.graph.name
    assert list(nodes) == list(expected) and set(edges) == set(expected.edges)
    for name, data in expected.nodes(data=True):
        assert as_texts(data).items() <= nodes[name].items()
        label = nodes[name]["label"].split("\n")
        assert label[0] == f"{name} ({data['kind']})" and label[1] == data["strategy"]
    for source, target, data in expected.edges(data=True):
        assert as_texts(data).items() <= edges[source, target].items()


@pytest.mark.parametrize(
    ("layout", "short"),
    [("(S0:2, B:1 | S0:1, S1:4)", "(S0:2 | S1:4)"), ("(B:1 | P:1)", "(whole)"), ("(S0:16, B:11)", "(S0:16, B:11)")],
)
def test_labels_leave_out_axes_of_one(layout, short):
    assert _short(layout) == short


def test_stages_are_clusters_in_dot(pipeline_plan):
    graph, nodes, _ = parsed_dot(dot_text(pipeline_plan))
    stages = nx.get_node_attributes(annotated_graph(pipeline_plan), "stage")
    assert graph["clusters"] == {f"cluster_{s}": [n for n in nodes if stages[n] == s] for s in (0, 1)}


# ---- Traces ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "bert", "mlp"])
def test_a_trace_is_the_predicted_step(plan_of, name):
    plan = load_plan(plan_of(name))
    events = json.loads(export(plan, "chrome-trace"))["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"])
    total = bars[-1]["ts"] + bars[-1]["dur"]
    assert total == pytest.approx(1e6 * plan.document["step_s"], rel=1e-9)
    for before, after in zip(bars, bars[1:]):  # nothing is taken as overlapped
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-6 * total)
    computing = sum(e["dur"] for e in bars if rows[e["tid"]] == "compute")
    assert computing == pytest.approx(1e6 * plan.document["compute_s"], rel=1e-9)
    sent = sum(e["args"].get("sent_bytes", 0.0) for e in bars)
    assert sent == pytest.approx(plan.document["sent_bytes"], rel=1e-9)
    assert set(rows.values()) == {"compute", "inter-node", "intra-node"}


def test_a_trace_of_a_pipeline_is_its_timeline(pipeline_plan):
    events = json.loads(export(pipeline_plan, "chrome-trace"))["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"worker 0", "worker 1"} <= names
    assert max(e["ts"] + e["dur"] for e in bars) == pytest.approx(1e6 * pipeline_plan.evaluation.step_s, rel=1e-6)
    layers = {e["args"]["stage"]: e["args"]["layers"] for e in bars if "stage" in e["args"]}
    assert layers == {0: "wte to h.1.add_2", 1: "h.2.ln_1 to loss"}


def test_layers_are_drawn_inside_the_tasks_of_a_pipeline(pipeline_plan, monkeypatch):
    """The layers of a task fill its bar, and take as long as the cost model says."""
    events = json.loads(export(pipeline_plan, "chrome-trace"))["traceEvents"]
    tasks = [e for e in events if "stage" in e.get("args", {}) and e["cat"] in ("forward", "backward", "recompute")]
    inner = [e for e in events if "layer" in e.get("args", {})]
    assert {e["cat"] for e in tasks} == {"forward", "backward", "recompute"}
    assert {e["cat"] for e in inner} >= {"forward", "forward communication", "recomputation", "backward"}
    for task in tasks:
        start, end = task["ts"], task["ts"] + task["dur"]
        own = [e for e in inner if e["tid"] == task["tid"] and start - 1e-6 <= e["ts"] < end - 1e-6]
        assert sum(e["dur"] for e in own) == pytest.approx(task["dur"])
        assert max(e["ts"] + e["dur"] for e in own) == pytest.approx(end)
        assert {e["args"]["micro_batch"] for e in own} == {task["args"]["micro_batch"]}
    (fc,) = (a for a in pipeline_plan.evaluation.stages[0].assessment.layers if a.layer.name == "h.0.mlp.c_fc")
    found = {e["dur"] for e in inner if e["name"] == "h.0.mlp.c_fc forward"}
    assert sorted(found) == pytest.approx([1e6 * fc.forward_compute_s] * len(found), rel=1e-6)
    monkeypatch.setattr("autoddl.export.traces.MAX_EVENTS", len(events) - 1)
    fewer = json.loads(export(pipeline_plan, "chrome-trace"))["traceEvents"]
    assert len(fewer) == len(events) - len(inner)  # too many bars: the tasks alone


def test_a_trace_that_nobody_can_look_at_is_refused(plan_of):
    plan = load_plan(plan_of("gpt"))
    workload = replace(plan.workload, batch=2**20)
    many = unpipelined_plan(plan.graph, plan.cluster, workload, plan.strategies)
    with pytest.raises(UserError, match="bars, should have at most 200,000"):
        export(many, "chrome-trace")


# ---- The command -------------------------------------------------------------------------------------------------------------


def test_json_is_the_document(plan_of, capsys):
    assert main(["export", str(plan_of("gpt")), "--to", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plan_of("gpt").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_files_are_written_whole(plan_of, tmp_path, capsys, form):
    path = tmp_path / "out"
    assert main(["export", str(plan_of("gpt")), "--to", form, "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"Written to {path}\n"
    assert path.read_text() == export(load_plan(plan_of("gpt")), form)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--to", "dot"], "missing.json: cannot be read (No such file or directory)"),
        (["PLAN", "--to", "dot", "-o", "no/such/folder/out"], "no/such/folder/out: cannot be written (No such file"),
        (["PLAN", "--to", "dot", "--model", "a.py:f"], "--model a.py:f is for --to oneflow, not for --to dot"),
        (["PLAN", "--to", "oneflow", "--model", "a.py"], "model 'a.py' should be FILE.py:FUNCTION"),
    ],
)
def test_faults_are_one_line(plan_of, capsys, arguments, message):
    named = [str(plan_of("gpt")) if argument == "PLAN" else argument for argument in arguments]
    assert main(["export", *named]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"autoddl: {message}")


def test_a_model_that_is_not_there_is_noticed_where_it_can_be(plan_of, tmp_path, capsys):
    if not (available := is_available()):
        pytest.skip(available.reason)
    arguments = [str(plan_of("gpt")), "--to", "oneflow", "--model", "missing.py:f", "-o", str(tmp_path / "out.py")]
    assert main(["export", *arguments]) == 2
    assert capsys.readouterr().err == "autoddl: missing.py: there is no such file\n"
    assert not list(tmp_path.iterdir())
