"""A kind of layer from outside of the package, planned and exported, and run on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import autoddl
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.kinds import registry as planned
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.export.oneflow import oneflow_text
from autoddl.pipelines.runtime.kinds import registry as run
from autoddl.pipelines.runtime.kinds.registry import register

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


def test_a_kind_without_a_program_is_refused(registered: None) -> None:
    del run._PROGRAMS["glu"]
    with pytest.raises(
        UserError, match=r"glu \(glu, 1x64\): nothing is registered that runs layers of this kind on ranks"
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
