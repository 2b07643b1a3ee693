"""Exported OneFlow files of plans without a pipeline: they pass the linter, do not import AutoDDL, and execute no text of plans."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.__main__ import main
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.export import FORMS, export
from autoddl.export.library import known_names, library_text
from autoddl.export.source import Names, comment, literal, value_text
from autoddl.export.writing import folded
from autoddl.pipelines.runtime.stage.plan import check_input_shape
from autoddl.planfile import load_plan, unpipelined_plan
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import resolve_model

from .export_plans import MODELS, renamed


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


def test_every_step_of_the_plan_stands_in_the_file_with_its_price(plan_of):
    """The steps of repeated blocks stand in the file once for each class."""
    plan = load_plan(plan_of("llama"))
    whole, split = Strategy(((2, 1, 1), (1, 4, 1))), Strategy(((1, 2, 1), (1, 2, 2)))
    products = ("linear", "embedding")
    strategies = {x.name: split if x.kind in products else whole for x in plan.graph.layers}
    other = unpipelined_plan(plan.graph, plan.cluster, plan.workload, strategies)
    plan = replace(other, document=plan.document)
    text = export(plan, "oneflow")
    tree = ast.parse(text)
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and re.fullmatch(r"Model|Block\d?", n.name)]
    calls = [ast.unparse(n.func) for c in classes for n in ast.walk(c) if isinstance(n, ast.Call)]
    calls = [name.replace("RANKS.", "") for name in calls]
    found = {name: calls.count(name) for name in ("all_gather", "reduce_scatter", "all_to_all", "exchange_digits")}
    found["all_to_all"] += found.pop("exchange_digits")
    expected = dict.fromkeys(found, 0)
    num_blocks = sum(c.name.startswith("Block") for c in classes)  # the first block may have a class of its own
    assert num_blocks in (1, 2)
    for layer in assess(plan.graph, plan.cluster, plan.workload, plan.strategies).layers:
        if layer.layer.block_index >= num_blocks:
            continue
        # The steps of the loss are in the library function that computes it.
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
    plan = unpipelined_plan(graph, planned.cluster, planned.workload, planned.strategies)
    text = export(plan, "oneflow")
    assert 'nn.ModuleList([*(Block(f"h.{i}") for i in range(40))])' in text or "Block2" in text
    assert text.count("class Block") <= 2
    model, _, library = text.partition("# ==== The library")
    # Two classes of 130 lines each, the plan and the model; 40 blocks would be 5,000 lines.
    assert len(model.splitlines()) < 700 and library


def test_only_helpers_that_are_used_are_in_a_file(plan_of):
    perceptron = export(load_plan(plan_of("mlp")), "oneflow")
    assert not any(f"def {name}(" in perceptron for name in ("attend", "cross_entropy", "table_layouts"))
    assert "def attend" in export(load_plan(plan_of("gpt")), "oneflow")
    text = library_text({"prime_factors"}, (), ())
    assert [title for title, _ in text.sections] == ["Mesh axes"]
    assert text.sections[0][1].startswith("@cache\ndef prime_factors") and "class" not in text.sections[0][1]


# ---- Nothing of a document is executed -------------------------------------------------------------------------------------

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
    assert ast.dump(ast.parse(hostile)) == expected  # the files differ in comments only
    hostile.encode()
    for form in set(FORMS) - {"oneflow"}:
        if "\ud800" not in text or form in ("dot", "graphml"):
            export(renamed(plain, text, (text,)), form).encode("utf-8")


def hostile_graph(text: str) -> tuple[LayerGraph, dict[str, str]]:
    """Return a perceptron whose layers have a hostile text in their names, and the names of its layers by the usual names."""
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
    """Layer names of a user's model occur in string literals and comments; identifiers are made from them."""
    plain = load_plan(plan_of("mlp"))
    graph, names = hostile_graph(text)
    strategies = {names[name]: strategy for name, strategy in plain.strategies.items()}
    other = unpipelined_plan(graph, plain.cluster, plain.workload, strategies)
    found = export(replace(other, document=plain.document), "oneflow", model="folder/file.py:make")
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
        "socket",
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


def test_what_cannot_be_written_for_oneflow_is_named(plan_of, pipeline_plan):
    plan = load_plan(plan_of("gpt"))
    with pytest.raises(UserError, match=r"model 'a.py' should be FILE.py:FUNCTION"):
        export(pipeline_plan, "oneflow", model="a.py")
    other = replace(
        plan, graph=replace(plan.graph, layers=(*plan.graph.layers[:-1], replace(plan.graph.layers[-1], flops=1.0)))
    )
    with pytest.raises(UserError, match=r"is not a built-in one; give model=FILE.py:FUNCTION, which makes it"):
        export(other, "oneflow")
    fc = next(layer for layer in plan.graph.layers if layer.role == "mlp.c_fc")
    dropping = [replace(layer, epilogue=("gelu", "dropout")) if layer is fc else layer for layer in plan.graph.layers]
    with pytest.raises(
        UserError, match=r"h.0.mlp.c_fc .*it has dropout, which form='oneflow' writes for traced models"
    ):
        with_dropout = replace(plan.graph, layers=tuple(dropping))
        export(unpipelined_plan(with_dropout, plan.cluster, plan.workload, plan.strategies), "oneflow", model="a.py:f")
    perceptron = load_plan(plan_of("mlp"))
    first, *rest = perceptron.graph.layers
    reshaping = replace(perceptron.graph, layers=(replace(first, output_shape=(2, 64)), *rest))
    split = {layer.name: Strategy(((2, 1, 1), (1, 4, 1))) for layer in reshaping.layers}
    with pytest.raises(UserError, match=r"fc2 .*it reshapes \(2, 64\) of 'fc1' to \(1, 128\), which is not supported"):
        check_input_shape(reshaping, reshaping.layers[1], split["fc2"])
    with pytest.raises(UserError, match=r"which is not supported if features are split$"):
        export(unpipelined_plan(reshaping, perceptron.cluster, perceptron.workload, split), "oneflow", model="a.py:f")
    headless = replace(plan.graph, layers=plan.graph.layers[:-1], edges=plan.graph.edges[:-1])
    with pytest.raises(UserError, match=r"ends in lm_head .* without a loss"):
        export(replace(plan, graph=headless), "oneflow", model="a.py:f")
    with pytest.raises(UserError, match="form 'onnx' is not one of oneflow, oneflow-graph, json"):
        export(plan, "onnx")


def test_pipelines_are_not_written_for_a_graph(pipeline_plan):
    with pytest.raises(
        UserError, match=r"a pipeline of \d stages, which the graph executor does not run: nn.Graph chooses"
    ):
        export(pipeline_plan, "oneflow-graph")


def test_layers_called_like_variables_have_names():
    from autoddl.export.source import Names

    names = Names()
    assert names.of("input") == "input_layer" and names.of("input.") == "input_layer_2"
