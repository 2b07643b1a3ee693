"""Plans with a pipeline on real ranks: verified, and what is said where something is off; trained."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import autoddl
from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.workload import Workload
from autoddl.joint import ENTRY, Configuration, PipelineSchedule, StageChoice, StageMesh, chain_of, evaluate
from autoddl.models.builtin import recognise
from autoddl.models.transformers import Transformer, gpt
from autoddl.pipelines.runtime.pipeline.problems import TextModel, shipped_text
from autoddl.pipelines.runtime.pipeline.report import combine
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions
from autoddl.plan import Plan
from autoddl.search import solve
from autoddl.staging import schedule_of_plan, stage_plans
from autoddl.training import PlanProblem
from autoddl.verification.pipelines import verify_pipeline

MODEL = Transformer("gpt", layers=2, width=64, heads=4, sequence=16, vocabulary=256)


def plan_of(schedule: PipelineSchedule, recomputing: tuple[str, str] = ("none", "none")) -> Plan:
    """Two stages of two devices each, each at its cheapest strategies but for one layer, so that something is sent inside too."""
    graph = gpt(MODEL)
    cluster, mesh, workload = load_cluster("dgx-a100").resized(1, 4), StageMesh(1, 2), Workload(16, 4, "mixed", "adam")
    chain = chain_of(graph)
    choices = []
    for first, recompute in enumerate(recomputing):
        prices = PriceBook(chain.stage(first, first + 1).graph, mesh.devices(cluster), workload).problem(16, 4)
        result = solve(prices.table)
        strategies = dict(prices.strategies(result.choice))
        for name in strategies:
            if name.endswith("mlp.c_fc"):
                strategies[name] = replace(strategies[name], splits=((1, 2, 1),))
        choices.append(StageChoice(1, recompute, strategies))
    evaluation = evaluate(chain, cluster, Configuration(mesh, schedule, workload, tuple(choices)))
    strategies = {name: s for choice in choices for name, s in choice.strategies.items() if name != ENTRY}
    return Plan(graph, cluster, workload, strategies, {}, evaluation)


def test_a_plan_with_a_pipeline_is_verified(counted_ranks):
    plan = plan_of(PipelineSchedule("1f1b", 2, 4), ("layers", "stage"))
    assert [stage.recompute for stage in stage_plans(plan)] == [True, False]
    found = verify_pipeline(plan, 4, pool=counted_ranks(4))
    assert found.faults == () and found.is_right
    assert found.boundary_bytes == found.predicted_boundary_bytes == 2 * 4 * 4 * 16 * 64 * 4
    assert found.step_bytes == pytest.approx(found.traffic.all.num_bytes, rel=0.02)
    assert sum(sent.num_bytes for sent in found.traffic.inside) > 0
    json.dumps(found.document(), allow_nan=False)
    text = found.text()
    assert (
        "gpt in 2 stages of 2, 2 ranks, 1f1b with 4 micro-batches, against one device" in text and "right, in" in text
    )

    off = replace(
        found,
        losses=(found.losses[0] * 1.1, *found.losses[1:]),
        errors={**found.errors, "ln_f.weight": 0.5},
        step_bytes=2 * found.traffic.all.num_bytes,
        boundary_bytes=found.boundary_bytes // 2,
    )
    assert len(off.faults) == 4 and "NOT right" in off.text()
    assert "a loss differs from one device's by 1.0e-01" in off.faults
    assert "ln_f.weight differs from one device's by 5.0e-01 after 3 steps" in off.faults


def test_what_cannot_be_verified_or_applied():
    plan = plan_of(PipelineSchedule("pipedream-2bw", 2, 4, synchronous=False))
    with pytest.raises(UserError, match="schedule pipedream-2bw trains with weights of earlier steps"):
        verify_pipeline(plan, 4)
    synchronous = plan_of(PipelineSchedule("1f1b", 2, 4))
    with pytest.raises(UserError, match=r"the plan is for 4 devices .*, --ranks is 2"):
        verify_pipeline(synchronous, 2)
    with pytest.raises(UserError, match="the plan is a pipeline of 2 stages, which no single module runs"):
        autoddl.apply(None, synchronous)
    with pytest.raises(UserError, match="the plan has no pipeline"):
        stage_plans(replace(synchronous, pipeline=None))
    with pytest.raises(UserError, match="the plan has no pipeline"):
        schedule_of_plan(replace(synchronous, pipeline=None))


def test_a_plan_with_a_pipeline_is_trained(ranks):
    """It learns more of a text than that all bytes are equally likely."""
    plan = plan_of(PipelineSchedule("chimera", 2, 4))
    data = TextModel(shipped_text(), "gpt", MODEL.layers, MODEL.width, MODEL.heads, MODEL.sequence)
    problem = PlanProblem(data, recognise(plan.graph), plan.graph, stage_plans(plan))
    problem.check()
    options = TrainingOptions(problem, schedule_of_plan(plan, 8), num_steps=8, micro_batch=4, learning_rate=1e-2)
    job = "autoddl.pipelines.runtime.pipeline.training_job:train_on_rank"
    report = combine(options.schedule, ranks(4).run(job, options, timeout_s=240))
    assert all(0 < loss < math.log(256) for loss in report.losses)


def test_schedules_of_plans():
    synchronous = plan_of(PipelineSchedule("1f1b", 2, 4), ("none", "stage"))
    assert schedule_of_plan(synchronous, 7) == synchronous.pipeline.schedule
    delayed = plan_of(PipelineSchedule("pipedream-2bw", 2, 4, synchronous=False), ("none", "stage"))
    schedule = schedule_of_plan(delayed, 7)
    assert schedule.num_updates == 7 and schedule.widths == (2, 2)
    assert {task.stage for _, _, task in schedule.tasks() if task.kind.letter == "R"} == {1}


def test_what_train_says_of_plans(capsys, tmp_path):
    where = ["--cluster", "gcp-a100", "--nodes", "1", "--devices-per-node", "2", "--batch", "8", "--quiet"]
    path = str(tmp_path / "plan.json")
    assert main(["plan", "mlp:64,64,64", *where, "--pipeline", "auto", "-o", path]) == 0
    assert main(["plan", "mlp:64,64,64", *where, "-o", str(tmp_path / "plain.json")]) == 0
    capsys.readouterr()
    for arguments, said in (
        ([path], "the plan's model mlp:64,64,64 is not one that learns a text: gpt, bert, llama"),
        ([path, "--stages", "3"], "--stages is for models; a plan says it itself"),
        ([str(tmp_path / "plain.json")], "the plan has no pipeline; plan with --pipeline auto"),
        ([str(tmp_path / "none.json")], "none.json"),
    ):
        assert main(["train", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
