"""What a search knows of its settings before it attempts one: prices of units on all rectangles, and estimates of steps."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from autoddl.costmodel import pricing
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.strategy import Choices
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.explorer import Explorer
from autoddl.pipelines.joint.job import job_of
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.result import JointOptions
from autoddl.pipelines.joint.setting_search import SettingSearch
from autoddl.pipelines.joint.stage_cost import Pricing
from autoddl.search.planner import Options
from autoddl.zoo import Transformer, gpt, resolve_model

#: Rectangles of one node, of one device per node, and of several of both.
RECTANGLES = [StageMesh(1, 6), StageMesh(1, 2), StageMesh(4, 1), StageMesh(2, 1), StageMesh(2, 3), StageMesh(4, 3)]


def explorer_of_gpt() -> Explorer:
    """Of a model with a shared weight, whose layers have many choices."""
    chain = chain_of(gpt(Transformer("small", 3, 48, 6, 12, 96, tied=True)))
    choices = Choices(shardings=(0, 1, 2, 3), regathers=True)
    workload = Workload(24, 24, "mixed", "adam")
    return Explorer(chain, load_cluster("dgx-a100").resized(4, 6), workload, np.inf, pricing=Pricing(choices=choices))


@pytest.mark.parametrize("runs_whole_passes", [True, False])
@pytest.mark.parametrize("recompute", ["none", "blocks", "layers"])
def test_units_priced_together_cost_what_they_cost_alone(
    recompute: str, runs_whole_passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    price_layer = pricing.price_layer
    monkeypatch.setattr(pricing, "price_layer", lambda *args: calls.append(len(args[1])) or price_layer(*args))
    together, alone = explorer_of_gpt(), explorer_of_gpt()
    together.price_units(recompute, runs_whole_passes)
    num_together = len(calls)
    compared = 0
    for mesh in RECTANGLES:
        pairs = zip(
            *(one.stage_search(mesh).unit_bounds.books(recompute, runs_whole_passes) for one in (together, alone))
        )
        for ours, theirs in pairs:
            for mine, other in zip(ours.coefficients(), theirs.coefficients()):
                assert mine.option_set.options == other.option_set.options
                for field in fields(mine):
                    if field.name != "option_set":
                        assert np.array_equal(getattr(mine, field.name), getattr(other, field.name)), field.name
                compared += len(mine.state)
    # A layer is priced once for each of three pairs of levels, and alone once for each rectangle.
    assert compared > 1000 and len(calls) - num_together > 1.5 * num_together


def test_an_estimate_is_near_a_good_plan() -> None:
    """Units of images differ, so it takes several rounds to find the best fractional cut; the setting has a plan of 0.3565 s."""
    graph, cluster = resolve_model("vgg16"), load_cluster("v100-c").resized(8, 1)
    explorer = job_of(graph, cluster, JointOptions(Options(batch=256))).explorer()
    kind = "grouped-gpipe", 2, 4
    offered = explorer.settings(
        16, False, lambda spec: (spec.name, spec.num_workers, spec.groups) == kind, uneven=False
    )
    search = SettingSearch(explorer, next(offered), 0.4, Deadline())
    assert 0.34 < search.estimated_step_s() < 0.37
