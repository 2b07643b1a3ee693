"""The planners of the papers as sources of joint plans."""

from __future__ import annotations

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.joint import JointOptions
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.search import Explored
from autoddl.pipelines.planners import Clock
from autoddl.search.planner import Options
from autoddl.text.plans import plan_text
from autoddl.zoo import Transformer, gpt, resolve_model
from autoddl.zoo.layers import GraphBuilder, opaque

GPT = gpt(Transformer("untied", 4, 64, 4, 8, 128, tied=False))
MACHINE = load_cluster("gcp-a100").resized(1, 4).with_links(latency_s=2e-6, bandwidth=1e8)


@pytest.mark.parametrize("planner", ["dapple", "chimera", "wpipe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_planner_recomputes_as_it_is_told(planner, recompute):
    options = JointOptions(Options(batch=16, recompute=recompute), planner, allow_stale=planner == "wpipe")
    *others, last = plan_jointly(GPT, MACHINE, options).evaluation.configuration.stages
    assert {stage.recompute for stage in others} == {"stage" if recompute else "none"}
    # The backward pass of the last stage directly follows: as a whole it is not recomputed, or the loss would be computed twice.
    assert last.recompute == ("blocks" if recompute else "none")


def test_zero_excludes_older_versions_of_weights():
    with pytest.raises(UserError, match="zero=1 cannot be combined with allow_stale=True"):
        plan_jointly(GPT, MACHINE, JointOptions(Options(batch=16, zero=1), allow_stale=True))


def test_papers_plans_are_those_of_their_planners():
    graph = resolve_model("gpt:8x256", heads=4, sequence=64, vocabulary=512)
    options = JointOptions(Options(batch=32), "chimera")
    found = plan_jointly(graph, MACHINE, options)
    spec = found.configuration.schedule
    assert spec.name == "chimera" and spec.num_pipelines == 2 and not found.optimal
    assert all(layer.strategy.p0 == layer.strategy.num_devices for layer in found.evaluation.layers)
    assert found.lower_bound_s < found.evaluation.step_s
    rows = {family.name: family for family in found.rivals}
    assert rows["Chimera"].paper_step_s == pytest.approx(found.evaluation.step_s)
    assert rows["Chimera"].step_s <= found.evaluation.step_s
    assert rows["WPipe"].infeasible == "asynchronous; offered with allow_stale=True"


def test_a_family_is_at_least_as_fast_as_the_plan_with_replicated_stages(monkeypatch):
    """Though the searches of the families find nothing: Chimera's plan is a member of Chimera's family, and of no other."""
    graph = resolve_model("gpt:8x256", heads=4, sequence=64, vocabulary=512)

    def no_plan(*_):
        raise UserError("no plan")

    monkeypatch.setattr("autoddl.pipelines.joint.rivals.explore", lambda *_, **__: Explored(is_finished=False))
    monkeypatch.setattr("autoddl.pipelines.joint.rivals.paper_plan", no_plan)
    found = plan_jointly(graph, MACHINE, JointOptions(Options(batch=32), "chimera"))
    rows = {family.name: family for family in found.rivals}
    assert rows["Chimera"].step_s == found.evaluation.step_s
    assert rows["GPipe"].infeasible == rows["DAPPLE"].infeasible == "none was found within the time limit"


def test_the_bound_has_the_flops_of_opaque_layers():
    """4 layers of 1e15 FLOPs per sample and 16 samples: 3 * 4 * 16 * 1e15 = 1.92e17 FLOPs of a step, on 4 devices."""
    layers = [opaque(f"o{i}", (64, 32), (64, 32), flops=1e15) for i in range(4)]
    builder = GraphBuilder("opaque", "row")
    last = None
    for layer in layers:
        last = builder.add(layer, *(() if last is None else (last,)))
    found = plan_jointly(builder.build(), MACHINE, JointOptions(Options(batch=16), "dapple"))
    device = MACHINE.device
    ideal_s = 1.92e17 / 4 / (device.efficiency * device.peak("mixed"))
    assert found.lower_bound_s == pytest.approx(ideal_s, rel=1e-6)
    assert found.lower_bound_s < found.evaluation.step_s and not found.optimal


@pytest.mark.slow
def test_a_papers_planner_stops_in_time_and_says_so(monkeypatch):
    """Its clock is over after some questions; the plan until then is taken, and named for what it is."""
    asked = []

    class Short(Clock):
        @property
        def is_over(self):
            asked.append(self)
            self.stopped = self.stopped or asked.count(self) > 3
            return self.stopped

    monkeypatch.setattr("autoddl.pipelines.joint.planner.Clock", Short)
    graph = resolve_model("gpt:8x256", heads=4, sequence=64, vocabulary=512)
    found = plan_jointly(graph, MACHINE, JointOptions(Options(batch=32, time_limit_s=7.0), "chimera"))
    assert found.notes == ("the plan is the best that Chimera's planner found; its planner stopped after 7 s",)
    assert "stopped after 7 s" in str(plan_text(found))
    monkeypatch.undo()
    monkeypatch.setattr("autoddl.pipelines.joint.rivals.Clock", Short)
    other = plan_jointly(graph, MACHINE, JointOptions(Options(batch=32, time_limit_s=50.0), "dapple"))
    rows = {family.name: family for family in other.rivals}
    assert rows["Chimera"].how.endswith("; its planner stopped after 1 s") and other.notes == ()
