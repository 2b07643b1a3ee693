"""Exports: graphs and traces hold the plan's figures and are read back; files are harmless, lint clean and self-contained."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.__main__ import main
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.export import FORMS, export
from autoddl.export.annotated import annotated_graph
from autoddl.export.drawings import _short, dot_text, graphml_text
from autoddl.export.library import known_names, library_text
from autoddl.export.source import Names, comment, literal, value_text
from autoddl.export.writing import folded
from autoddl.pipelines.joint.configuration import Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.schedule import Kind, parse_task
from autoddl.planfile import Plan, load_plan, plan_document, save_plan
from autoddl.search import solve
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import resolve_model

MODELS = {
    "gpt": ("gpt:2x64", {"heads": 8, "sequence": 16, "vocabulary": 256}),
    "bert": ("bert:2x64", {"heads": 4, "sequence": 16, "vocabulary": 256}),
    "llama": ("llama:2x64", {"heads": 4, "sequence": 16, "vocabulary": 256}),
    "mlp": ("mlp:64,128,32", {}),
    "vgg": ("vgg11", {}),
}


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a plan of a model on 2 x 4 devices, made once."""
    folder = tmp_path_factory.mktemp("plans")

    def make(name: str) -> Path:
        path = folder / f"{name}.json"
        if not path.exists():
            text, sizes = MODELS[name]
            options = Options(batch=32, micro_batch=16, objective="communication", recompute=name == "bert", quiet=True)
            planned = make_plan(resolve_model(text, **sizes), load_cluster("dgx-a100").resized(2, 4), options)
            save_plan(path, plan_document(planned))
        return path

    return make


def staged_plan(
    cuts: list[tuple[int, int, str]],
    devices: int,
    model: str = "gpt:4x512",
    nodes: int = 1,
    num: int = 4,
    schedule: PipelineSchedule | None = None,
) -> Plan:
    """A plan of stages (first unit, the one behind the last, recomputation) of so many devices on nodes of 4 devices."""
    graph, cluster = resolve_model(model), load_cluster("dgx-a100").resized(nodes, 4)
    chain, mesh, workload = chain_of(graph), StageMesh(1, devices), Workload(4 * num, 4, "mixed", "adam")
    stages = []
    for first, stop, recompute in cuts:
        problem = PriceBook(chain.stage(first, stop).graph, mesh.devices(cluster), workload).problem(16, 4)
        choice = solve(problem.table, memory_limit=70 * 2**30).choice
        stages.append(StageChoice(stop - first, recompute, problem.strategies(choice)))
    schedule = schedule or PipelineSchedule("1f1b", len(cuts), num, (("policy", "A"),))
    evaluation = evaluate(chain, cluster, Configuration(mesh, schedule, workload, tuple(stages)))
    strategies = {layer.layer.name: layer.strategy for layer in evaluation.layers}
    figures = ("step_s", "compute_s", "communication_s", "sent_bytes", "memory_bytes")
    document = {name: getattr(evaluation, name) for name in figures}
    return Plan(graph, cluster, workload, strategies, document, evaluation)


@pytest.fixture(scope="module")
def pipeline_plan() -> Plan:
    """Two stages."""
    return staged_plan([(0, 2, "none"), (2, 4, "stage")], 2)


def renamed(plan: Plan, name: str, notes: tuple[str, ...] = ()) -> Plan:
    return replace(plan, graph=replace(plan.graph, name=name, notes=notes))


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
    # What arrives at a layer is what its edges send: its own steps and these are all that it sends.
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
    (boundary,) = pipeline_plan.pipeline.boundaries
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
    """A reader of the dot language by its grammar: quoted or plain identifiers, attribute lists, subgraphs."""
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
    assert max(e["ts"] + e["dur"] for e in bars) == pytest.approx(1e6 * pipeline_plan.pipeline.step_s, rel=1e-6)
    layers = {e["args"]["stage"]: e["args"]["layers"] for e in bars if "stage" in e["args"]}
    assert layers == {0: "wte to h.1.add_2", 1: "h.2.ln_1 to loss"}


def test_a_trace_that_nobody_can_look_at_is_refused(plan_of):
    plan = load_plan(plan_of("gpt"))
    many = replace(plan, workload=replace(plan.workload, batch=2**20))
    with pytest.raises(UserError, match="bars, should have at most 200,000"):
        export(many, "chrome-trace")


# ---- OneFlow files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_files_are_clean_and_need_nothing_of_autoddl(plan_of, tmp_path, name):
    path = tmp_path / "model.py"
    assert main(["export", str(plan_of(name)), "--to", "oneflow", "-o", str(path)]) == 0
    tree = ast.parse(path.read_text())
    modules = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    if sys.version_info >= (3, 10):
        assert modules - set(sys.stdlib_module_names) == {"oneflow", "numpy"}
    assert "autoddl" not in modules
    compile(path.read_text(), str(path), "exec")
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed beside this Python")
    done = subprocess.run([ruff, "check", "--isolated", "--no-cache", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def instructions_of(text: str) -> list[list[str]]:
    """The words of each worker."""
    (found,) = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INSTRUCTIONS"
    ]
    return [words.split() for words in ast.literal_eval(found)]


def check_that_they_get_through(plan: Plan, programs: list[list[str]]) -> None:
    """With messages that block both ends, and sums that block all; no task is before what it needs, and each is there once."""
    schedule = plan.pipeline.schedule
    holders = [{replica.worker for replica in schedule.replicas_of(s)} for s in range(schedule.num_stages)]
    waiting, done, given = [list(words) for words in programs], set(), [set() for _ in programs]

    def partners(worker: int, word: str) -> list[tuple[int, str]]:
        if match := re.fullmatch(r"(.+)([<>])(\d+)", word):
            return [(int(match[3]), f"{match[1]}{'><'['><'.index(match[2]) - 1]}{worker}")]
        if match := re.fullmatch(r"([\d&]+)A\d+", word):
            held = set().union(*(holders[int(stage)] for stage in match[1].split("&")))
            return [(other, word) for other in held - {worker}]
        return []

    while any(waiting):
        heads = [(worker, words[0]) for worker, words in enumerate(waiting) if words]
        ready = [
            (worker, word)
            for worker, word in heads
            if all(waiting[other][:1] == [theirs] for other, theirs in partners(worker, word))
        ]
        assert ready, f"standstill: {heads}"
        for worker, word in ready:
            if ">" in word:
                assert word.partition(">")[0] in done
            elif "<" in word:
                given[worker].add(word.partition("<")[0])
            elif word[-2:] and "A" not in word:
                task = parse_task(word)
                neighbour = task._replace(stage=task.stage + (-1 if task.kind is Kind.FORWARD else 1))
                if schedule.source_of(task) is not None:
                    assert str(neighbour) in (done if schedule.source_of(task) == worker else given[worker]), word
                done.add(word)
            waiting[worker].pop(0)
    every = {str(task) for _, _, task in schedule.tasks() if task.kind is not Kind.ALL_REDUCE}
    assert done == every


@pytest.mark.parametrize("model", ["gpt", pytest.param("gpt3-13b", marks=pytest.mark.slow)])
def test_a_pipeline_is_clean_and_its_instructions_get_through(tmp_path, model):
    """A plan of every day, and both directions of a small one."""
    if model == "gpt":
        both = replace(PipelineSchedule("chimera", 2, 4), num_pipelines=2)
        plan = staged_plan([(0, 2, "layers"), (2, 4, "stage")], 2, schedule=both)
    else:
        plan = staged_plan([(10 * s, 10 * s + 10, "none") for s in range(4)], 4, model, nodes=4, num=32)
    text = export(plan, "oneflow")
    path = tmp_path / "model.py"
    path.write_text(text)
    compile(text, str(path), "exec")
    assert re.findall(r"^class (Stage\d+)", text, re.M) == [f"Stage{s}" for s in range(plan.num_stages)]
    tree = ast.parse(text)
    modules = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "autoddl" not in modules
    check_that_they_get_through(plan, instructions_of(text))
    assert text.count('SharedWeight("wte.weight"') == 1
    for boundary in plan.pipeline.boundaries:
        assert f"{format_bytes(boundary.nbytes)}, forward {format_seconds(boundary.forward_s)}" in text
    if model == "gpt3-13b":  # blocks that look alike are one class, in all stages
        assert len(re.findall(r"^class Block", text, re.M)) <= 2 and text.count('Block(f"h.{i}", placement)') == 4
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed beside this Python")
    done = subprocess.run([ruff, "check", "--isolated", "--no-cache", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_a_pipeline_of_one_stage_is_a_plan_without_one(recompute):
    staged = staged_plan([(0, 4, recompute)], 4)
    workload = replace(staged.workload, recompute=recompute == "layers")
    found, expected = (export(plan, "oneflow") for plan in (staged, replace(staged, pipeline=None, workload=workload)))
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(expected))
    with pytest.raises(UserError, match="recomputes its stage as a whole"):
        export(staged_plan([(0, 4, "stage")], 4), "oneflow")


def test_every_step_of_the_plan_stands_in_the_file_with_its_price(plan_of):
    """Those of a block once for each class."""
    plan = load_plan(plan_of("llama"))
    whole, split = Strategy(((2, 1, 1), (1, 4, 1))), Strategy(((1, 2, 1), (1, 2, 2)))
    products = ("linear", "embedding")
    plan = replace(plan, strategies={x.name: split if x.kind in products else whole for x in plan.graph.layers})
    text = export(plan, "oneflow")
    tree = ast.parse(text)
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and re.fullmatch(r"Model|Block\d?", n.name)]
    calls = [ast.unparse(n.func) for c in classes for n in ast.walk(c) if isinstance(n, ast.Call)]
    calls = [name.replace("RANKS.", "") for name in calls]
    found = {name: calls.count(name) for name in ("all_gather", "reduce_scatter", "all_to_all", "exchange_digits")}
    found["all_to_all"] += found.pop("exchange_digits")
    expected = dict.fromkeys(found, 0)
    num_blocks = sum(c.name.startswith("Block") for c in classes)  # a first one that is entered otherwise has its own
    assert num_blocks in (1, 2)
    for layer in assess(plan.graph, plan.cluster, plan.workload, plan.strategies).layers:
        if layer.layer.block_index >= num_blocks:
            continue
        # The loss's own steps are in its function.
        for step in layer.arriving if layer.layer.kind == "loss" else layer.forward_steps:
            name = step.collective.value.replace("-", "_")
            if name in expected:
                expected[name] += 1
    assert found == expected and all(expected.values())
    for line in text.splitlines():
        if re.match(r"\s+x = RANKS\.(all_gather|reduce_scatter|all_to_all)\(x, axis=\w+, \w+=\d(, \w+=\d)?\)", line):
            assert re.search(r"#.* (ns|us|ms|s), [\d.]+ (B|KiB|MiB|GiB)$", line), line


@pytest.mark.slow
def test_a_block_is_written_once_however_often_it_is_repeated():
    graph = resolve_model("gpt3-13b")
    planned = make_plan(graph, load_cluster("dgx-a100").resized(2, 4), Options(batch=64, quiet=True))
    plan = Plan(graph, planned.cluster, planned.workload, planned.strategies, {})
    text = export(plan, "oneflow")
    assert 'nn.ModuleList([*(Block(f"h.{i}") for i in range(40))])' in text or "Block2" in text
    assert text.count("class Block") <= 2
    model, _, library = text.partition("# ==== The library")
    assert len(model.splitlines()) < 500 and library


def test_only_helpers_that_are_used_are_in_a_file(plan_of):
    perceptron = export(load_plan(plan_of("mlp")), "oneflow")
    assert not any(f"def {name}(" in perceptron for name in ("attend", "cross_entropy", "table_layouts"))
    assert "def attend" in export(load_plan(plan_of("gpt")), "oneflow")
    text = library_text({"prime_factors"}, (), ())
    assert [title for title, _ in text.sections] == ["Mesh axes"]
    assert text.sections[0][1].startswith("@cache\ndef prime_factors") and "class" not in text.sections[0][1]


# ---- Nothing of a document is executed ---------------------------------------------------------------------------------------

HOSTILE = [
    '"""; import os; os.abort() #',
    "'''\nimport os\nos.abort()\n'''",
    "x\\",
    "\u202e# reversed \u2028 new line \u2029\x0c\x85",
    "{x} @ranks@ @class@ f{path}",
    "\ud800 half a character",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_names_and_notes_of_a_document_are_harmless(plan_of, text):
    plain = load_plan(plan_of("gpt"))
    expected = ast.dump(ast.parse(export(plain, "oneflow")))
    hostile = export(renamed(plain, text, (text,)), "oneflow")
    assert ast.dump(ast.parse(hostile)) == expected  # comments are all that differs
    hostile.encode()
    for form in set(FORMS) - {"oneflow"}:
        if "\ud800" not in text or form in ("dot", "graphml"):
            export(renamed(plain, text, (text,)), form).encode("utf-8")


def hostile_graph(text: str) -> tuple[LayerGraph, dict[str, str]]:
    """A perceptron whose layers are called something that Python could read."""
    graph = resolve_model("mlp:64,128,32")
    names = {layer.name: f"{text}{i}" for i, layer in enumerate(graph.layers)}
    layers = tuple(
        replace(
            layer,
            name=names[layer.name],
            modules=(names[layer.name],),
            parameters=tuple(replace(p, name=f"{names[layer.name]}.weight") for p in layer.parameters),
        )
        for layer in graph.layers
    )
    edges = tuple((names[s], names[t]) for s, t in graph.edges)
    return replace(graph, layers=layers, edges=edges), names


@pytest.mark.parametrize("text", HOSTILE)
def test_names_of_layers_are_harmless(plan_of, text):
    """In a user's model; they are in literals, comments and identifiers of another make."""
    plain = load_plan(plan_of("mlp"))
    graph, names = hostile_graph(text)
    strategies = {names[name]: strategy for name, strategy in plain.strategies.items()}
    found = export(replace(plain, graph=graph, strategies=strategies), "oneflow", model="folder/file.py:make")
    tree = ast.parse(found)
    literals = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert {f"{name}.weight" for name in names.values()} <= literals
    allowed = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert allowed <= {
        "argparse",
        "copy",
        "ctypes",
        "functools",
        "importlib.util",
        "math",
        "os",
        "sys",
        "traceback",
        "zlib",
        "numpy",
        "oneflow",
    }
    assert not any(isinstance(n, ast.Attribute) and n.attr == "abort" for n in ast.walk(tree))


@given(st.text())
def test_comments_are_of_one_line_and_literals_read_back(text):
    assert len(comment(text).splitlines()) == 1 and comment(text).startswith("#")
    assert ast.literal_eval(literal(text)) == text and literal(text).isascii()
    assert ast.literal_eval(value_text({text: [1, (2.5, None), (True,)]})) == {text: [1, (2.5, None), (True,)]}


@given(
    st.lists(st.one_of(st.text(), st.text("""()[]{},"'\\ =""")), max_size=12),
    st.sampled_from(["", ".reshape(-1)", " * f(x)"]),
)
def test_folding_changes_nothing(texts, rest):
    line = f"x = call({', '.join(map(value_text, [*texts, {'a (': texts}]))}){rest}"
    lines = folded(line)
    assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(line))
    assert len(line) <= 110 or rest or len(lines) > 1


@given(st.lists(st.text(), max_size=20))
def test_names_are_identifiers_of_their_own(texts):
    names = Names(["x"])
    found = {text: names.of(text) for text in texts}
    assert len(set(found.values())) == len(found)
    assert all(name.isidentifier() and name.isascii() for name in found.values())
    assert not set(found.values()) & ({"x", "class", "print"} | known_names())
    assert found == {text: names.of(text) for text in texts}


def test_layers_do_not_take_the_variables_of_statements():
    names = Names()
    assert [names.of(text) for text in ("weight_0", "input_1", "weights_0")] == ["weight_0_2", "input_1_2", "weights_0"]


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
        (["PLAN", "--to", "dot", "--model", "a.py:f"], "--model is for --to oneflow, not for --to dot"),
        (["PLAN", "--to", "oneflow", "--model", "a.py"], "--model 'a.py' should be FILE.py:FUNCTION"),
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


def test_what_cannot_be_written_for_oneflow_is_named(plan_of, pipeline_plan):
    plan = load_plan(plan_of("gpt"))
    with pytest.raises(UserError, match=r"a pipeline of 2 stages of a.py:f, .* writes pipelines of built-in models"):
        export(pipeline_plan, "oneflow", model="a.py:f")
    other = replace(
        plan, graph=replace(plan.graph, layers=(*plan.graph.layers[:-1], replace(plan.graph.layers[-1], flops=1.0)))
    )
    with pytest.raises(
        UserError, match=r"none that can be built in the file; say what makes it: --model FILE.py:FUNCTION"
    ):
        export(other, "oneflow")
    fc = next(layer for layer in plan.graph.layers if layer.role == "mlp.c_fc")
    dropping = [replace(layer, epilogue=("gelu", "dropout")) if layer is fc else layer for layer in plan.graph.layers]
    with pytest.raises(UserError, match=r"h.0.mlp.c_fc .*drops at random, which --to oneflow cannot write"):
        export(replace(plan, graph=replace(plan.graph, layers=tuple(dropping))), "oneflow", model="a.py:f")
    headless = replace(plan.graph, layers=plan.graph.layers[:-1], edges=plan.graph.edges[:-1])
    with pytest.raises(UserError, match=r"ends in lm_head .* without a loss"):
        export(replace(plan, graph=headless), "oneflow", model="a.py:f")
    with pytest.raises(UserError, match="form 'onnx' is not one of oneflow, json"):
        export(plan, "onnx")
