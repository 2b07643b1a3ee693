"""A kind of layer from outside of the package, planned and exported, and run on ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import autoddl
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.kinds import registry as planned
from autoddl.costmodel.layer import Layer
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.export.oneflow import oneflow_text
from autoddl.extraction.operators import Operator, OperatorGraph
from autoddl.extraction.registered import find_registered
from autoddl.pipelines.runtime.kinds import registry as run
from autoddl.pipelines.runtime.kinds.registry import register
from autoddl.pipelines.runtime.load import is_available

from . import own_kind


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kind is known in this test alone."""
    monkeypatch.setattr(planned, "_KINDS", dict(planned._KINDS))
    monkeypatch.setattr(run, "_PROGRAMS", dict(run._PROGRAMS))
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
    del run._PROGRAMS["glu"]
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
