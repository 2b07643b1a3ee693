"""The planners of the papers as sources of joint plans."""

from __future__ import annotations

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.joint import JointOptions
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.search.planner import Options
from autoddl.zoo import Transformer, gpt

GPT = gpt(Transformer("untied", 4, 64, 4, 8, 128, tied=False))
MACHINE = load_cluster("gcp-a100").resized(1, 4)


@pytest.mark.parametrize("planner", ["dapple", "chimera", "wpipe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_planner_recomputes_as_it_is_told(planner, recompute):
    options = JointOptions(Options(batch=16, recompute=recompute), planner, allow_stale=planner == "wpipe")
    stages = plan_jointly(GPT, MACHINE, options).evaluation.configuration.stages
    assert {stage.recompute for stage in stages} == {"stage" if recompute else "none"}
