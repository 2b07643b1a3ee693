"""A kind of layer from outside of the package, planned and exported, and run on ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import autoddl
from autoddl.calib.replay import random_batch
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds import registry as planned
from autoddl.costmodel.kinds.add import add
from autoddl.costmodel.kinds.kind import Body, LayerKind, LayerQuantities, Splitting
from autoddl.costmodel.kinds.linear import Linear
from autoddl.costmodel.layer import Layer, Parameter
from autoddl.costmodel.localwork import elementwise
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.strategy import Strategy, data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.export.assembling import check_graph
from autoddl.export.drawings import dot_text
from autoddl.export.oneflow import oneflow_text
from autoddl.extraction.operators import Operator, OperatorGraph
from autoddl.extraction.registered import find_registered
from autoddl.pipelines.runtime.feeding import feeds_of
from autoddl.pipelines.runtime.kinds import linear as linear_on_ranks
from autoddl.pipelines.runtime.kinds import registry as run
from autoddl.pipelines.runtime.kinds.registry import parameter_layouts, register
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.statements import Call, LayerContext, LayerProgram, Name, X
from autoddl.search import solve
from autoddl.search.baselines import baselines
from autoddl.search.verify import Claim, verify
from autoddl.zoo.layers import GraphBuilder, linear

from . import own_kind


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kind is known in this test alone."""
    monkeypatch.setattr(planned, "_KINDS", dict(planned._KINDS))
    monkeypatch.setattr(run, "_RANK_KINDS", dict(run._RANK_KINDS))
    monkeypatch.setattr(run, "_FUNCTIONS", dict(run._FUNCTIONS))
    own_kind.known()
    yield


def test_it_runs_on_ranks_as_planned(ranks: Callable[[int], object], registered: None) -> None:
    """Pairs of features stay together on 4 ranks that split them; loss and gradients are one device's."""
    on = {"up": Strategy(((1, 2, 2),)), "glu": Strategy(((1, 4, 1),)), "down": Strategy(((2, 1, 2),))}
    place = f"{Path(own_kind.__file__)}:run_pass"
    for loss, reference, errors in ranks(4).run(place, on, Workload(8, 8, "float32")):  # type: ignore[attr-defined]
        assert loss == pytest.approx(reference, rel=1e-5)
        assert max(errors.values()) < 1e-5


def test_it_is_planned_and_exported(registered: None) -> None:
    """The file has the function's own source, and calls it."""
    plan = autoddl.plan(own_kind.graph(), cluster="local-cpu", devices_per_node=2, batch=8)
    assert {layer.name: layer.kind for layer in plan.layers}["glu"] == "glu"
    text = oneflow_text(plan, "gated.py:model")
    assert text.count("def glu(x: Any) -> Any:") == 1 and "= glu(" in text
    compile(text, "gated", "exec")


class Mixing(LayerKind):
    """The product of whole samples with a weight that every rank holds completely; not recomputed."""

    name = "mixing"
    splitting = Splitting.SAMPLES
    is_recomputed = False

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        work = elementwise(2 * quantities.output_bytes)
        return Body((), (), work, 2 * work, kept_bytes=quantities.input_bytes)


def mixing_program(context: LayerContext) -> LayerProgram:
    body = [Call("matmul", (X, Name("weight")), computes=True)]
    return LayerProgram(context.weights, tuple(context.recomputable(("x", "weight"), body)))


def mixing_graph() -> LayerGraph:
    """Two linear layers of 64 features around a layer of kind `Mixing`."""
    builder = GraphBuilder("mixed", "row")
    up = builder.add(linear("up", 1, 64, 64))
    weight = Parameter("mix.weight", (64, 64))
    mix = builder.add(Layer("mix", "mixing", (1, 64), (1, 64), parameters=(weight,), modules=("mix",)), up)
    builder.add(linear("down", 1, 64, 64, epilogue=("mse_loss",)), mix)
    return builder.build()


@pytest.fixture
def mixing(registered: None) -> None:
    """The kind `Mixing` is known in this test alone."""
    planned.register(Mixing())
    register("mixing", mixing_program)


def test_a_kind_split_along_samples_is_exported_with_whole_parameters(mixing: None) -> None:
    """The file states the layout that the runtime uses, although features do not divide."""
    graph = mixing_graph()
    plan = autoddl.plan(graph, cluster="local-cpu", devices_per_node=2, batch=8)
    text = oneflow_text(plan, "mixed.py:model")
    (stored,) = parameter_layouts(graph, graph["mix"], plan.strategies["mix"])
    assert stored.local_shape() == (64, 64)
    assert re.search(r"self\.mix = LayerParameters\(\s*whole_layouts\(", text)


def test_a_kind_that_is_not_recomputed_is_exported_so(mixing: None) -> None:
    """Recomputation repeats the linear layers, and not this one, as on ranks."""
    plan = autoddl.plan(mixing_graph(), cluster="local-cpu", devices_per_node=2, batch=8, recompute=True)
    text = oneflow_text(plan, "mixed.py:model")
    assert "checkpoint(compute_up," in text and "compute_mix" not in text


def test_a_registered_kind_has_a_colour_in_drawings(registered: None) -> None:
    plan = autoddl.plan(own_kind.graph(), cluster="local-cpu", devices_per_node=2, batch=8)
    boxes = {line.split('"')[1]: line for line in dot_text(plan).splitlines() if "fillcolor" in line}
    assert f'fillcolor="{own_kind.Glu.colour}"' in boxes["glu"]
    assert f'fillcolor="{Linear.colour}"' in boxes["up"]


def test_baselines_split_only_what_can_be_split(mixing: None) -> None:
    """Megatron and Summa split the samples of such a layer over all devices."""
    graph = mixing_graph()
    for baseline in baselines(graph, (4,)):
        assert baseline.strategies["mix"] == data_parallel((4,))
        assert baseline.strategies["mix"].divides(graph["mix"])


class Product(Linear):
    """A matrix product like that of linear layers, with another name."""

    name = "product"


def test_a_kind_states_once_how_its_parameters_are_stored(registered: None) -> None:
    """Ranks and exported files use the statement of the registered kind; baselines treat it as the product that it is."""
    planned.register(Product())
    register("product", linear_on_ranks.program, layouts=linear_on_ranks.layouts)
    graph = own_kind.graph()
    layers = tuple(replace(layer, kind="product" if layer.kind == "linear" else layer.kind) for layer in graph.layers)
    renamed = replace(graph, layers=layers)
    for strategy in (Strategy(((1, 2, 2),)), Strategy(((2, 2, 1),), summa=True)):
        (weight, bias), (same, same_bias) = (parameter_layouts(g, g["up"], strategy) for g in (graph, renamed))
        assert (weight.axes, bias.axes) == (same.axes, same_bias.axes)
        assert [list(rows) for rows in weight.indices[0]] == [list(rows) for rows in same.indices[0]]
    texts = [
        oneflow_text(autoddl.plan(g, cluster="local-cpu", devices_per_node=4, batch=8), "gated.py:model")
        for g in (graph, renamed)
    ]
    calls = [re.findall(r"=LayerParameters\(linear_layouts\(.*?RANKS", "".join(text.split())) for text in texts]
    assert len(calls[0]) == 2 and calls[0] == calls[1]
    of_linear, of_product = ([one.strategies for one in baselines(g, (4,))] for g in (graph, renamed))
    assert of_linear == of_product


def test_products_of_two_kinds_share_a_weight_with_one_strategy(registered: None) -> None:
    """Only a lookup has the transposed weight: baselines and the verifier give both products the same strategy."""
    planned.register(Product())
    builder = GraphBuilder("shared", "row")
    first = builder.add(linear("first", 1, 1024, 4096, bias=False))
    tied = linear("second", 1, 4096, 1024, bias=False, tied_to="first", epilogue=("mse_loss",))
    builder.add(replace(tied, kind="product"), first)
    graph = builder.build()
    for baseline in baselines(graph, (4,)):
        assert baseline.strategies["first"] == baseline.strategies["second"]
    # At few samples, two products in turn over p1 and p2 would cost less than any common strategy.
    cluster, workload = load_cluster("dgx-a100").resized(1, 4), Workload(8, 8, "float32")
    problem = PriceBook(graph, cluster, workload, untied=True).problem(8, 8)
    choice = solve(problem.table).choice
    assert choice is not None
    done = assess(graph, cluster, workload, problem.strategies(choice))
    claim = Claim(problem.strategies(choice), done.step_s, done.step_s, done.memory_bytes, True, None, "step", True)
    assert verify(graph, cluster, workload, claim) == done


class Guess(LayerKind):
    """A loss over classes."""

    name = "guess"
    attributes = ("vocabulary",)
    is_loss = True

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        return Body((), (), elementwise(quantities.input_bytes), elementwise(quantities.input_bytes), kept_bytes=0.0)


class Constant(LayerKind):
    """A table that does not depend on the data."""

    name = "constant"
    reads_data = False

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        return Body((), (), elementwise(quantities.output_bytes), elementwise(0.0), kept_bytes=0.0)


def test_a_kind_can_be_a_loss_and_can_read_no_data(registered: None) -> None:
    """The graph says which layers read inputs and whether it ends in a loss, for feeds and for exports."""
    planned.register(Guess())
    planned.register(Constant())
    builder = GraphBuilder("guessing", "row")
    up = builder.add(linear("up", 1, 64, 64))
    constant = builder.add(Layer("constant", "constant", (1, 64), (1, 64)))
    both = builder.add(add("both", (1, 64)), up, constant)
    builder.add(Layer("guess", "guess", (1, 64), (1, 1), {"vocabulary": 64}), both)
    graph = builder.build()
    assert graph.has_loss and [layer.name for layer in graph.data_readers] == ["up"]
    assert feeds_of(graph, {}) == {"up": 0}
    check_graph(graph)
    inputs, targets = random_batch(graph, 4, seed=1)
    assert inputs.shape == (4, 1, 64) and targets.shape == (4,) and targets.max() < 64


@pytest.mark.ranks
@pytest.mark.slow
def test_it_is_found_in_a_module_and_goes_wherever_others_go(tmp_path: Path) -> None:
    """Over 10 s: seven commands in processes of their own, two of which start ranks."""
    if not (available := is_available()):
        pytest.skip(available.reason)
    (tmp_path / "kinds.py").write_text(Path(own_kind.__file__).read_text() + "\n\nknown()\n")
    model = f"{tmp_path / 'kinds.py'}:gated"
    where = ("--cluster", "local-cpu", "--nodes", "1", "--devices-per-node", "2", "--batch", "8", "--quiet")

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autoddl", *words]
        return subprocess.run(
            command, cwd=tmp_path, text=True, capture_output=True, timeout=200, env={**os.environ, **environment}
        )

    def done(*words: str) -> str:
        found = run(*words, AUTODDL_KINDS="kinds.py")
        assert found.returncode == 0, found.stderr
        return found.stdout

    assert re.search(r"^  glu +glu +1 x 128 +1 x 64 *$", done("extract", model), re.MULTILINE)
    done("plan", model, *where, "-o", "plan.json")
    done("plan", model, *where, "--pipeline", "auto", "--time-limit", "3", "-o", "pipeline.json")
    assert "\nRight: " in done("verify", "plan.json", "--ranks", "2", "--model", model)
    done("export", "pipeline.json", "--to", "oneflow", "--model", model, "-o", "model.py")
    assert "def glu(x: Any) -> Any:" in (tmp_path / "model.py").read_text()
    assert "loss" in done("train", "pipeline.json", "--model", model, "--steps", "2", "--quiet")
    unknown = run("explain", "plan.json", AUTODDL_KINDS="")
    assert unknown.returncode == 2 and "AUTODDL_KINDS can name files that register others" in unknown.stderr


def test_a_kind_has_the_shapes_of_its_module() -> None:
    """A kind that makes something else of a module is named."""

    class Wrong(own_kind.Glu):
        name = "wrong"

        def layer_of(self, module: object, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Layer:
            return Layer("", "wrong", input_shape, (1, 3), {"features": 3})

    operator = Operator("unit-tanh-0", "tanh", "unit", {"x": ("x",)}, {"y": ("y",)}, {})
    traced = OperatorGraph((operator,), {"x": (2, 4), "y": (2, 4)}, ("x",), {}, ("y",), 2, modules={"unit": object()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "_KINDS", dict(planned._KINDS))
        assert find_registered(traced) == []
        planned.register(Wrong())
        with pytest.raises(UserError, match=r"unit: kind 'wrong' returns a layer of shape \(1, 4\) -> \(1, 3\)"):
            find_registered(traced)


def test_files_of_kinds_are_imported_when_a_kind_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_KINDS", dict(planned._KINDS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for text, said in (("1 / 0", "raises ZeroDivisionError"), (None, "which is no Python file")):
        path = tmp_path / f"faulty_{text is None}.py"
        if text:
            path.write_text(text)
        monkeypatch.setenv("AUTODDL_KINDS", str(path))
        with pytest.raises(UserError, match=said):
            planned.kind_of("swish")


def test_a_kind_without_a_program_is_refused(registered: None) -> None:
    del run._RANK_KINDS["glu"]
    with pytest.raises(
        UserError, match=r"glu \(glu, 1x64\): no program is registered that runs layers of this kind on ranks"
    ):
        graph = own_kind.graph()
        run.layer_program(graph, graph["glu"], Strategy(((2, 1, 1),)), False)


def test_names_are_taken_once(registered: None) -> None:
    def glu() -> None:
        """Another one."""

    with pytest.raises(UserError, match="kind 'glu': another function is called 'glu'"):
        register("glu", own_kind.program, [glu])
    with pytest.raises(UserError, match="kind 'swish' is not one of"):
        register("swish", own_kind.program)
