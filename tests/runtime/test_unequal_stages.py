"""A joint plan whose stages have unequal numbers of devices, on real ranks: chosen, written, read, verified, trained."""

from __future__ import annotations

import math

from autoddl.__main__ import main
from autoddl.pipelines.joint.meshes import Division
from autoddl.pipelines.runtime.pipeline.problems import TextModel, shipped_text
from autoddl.pipelines.runtime.pipeline.report import combine
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions
from autoddl.planfile import load_plan
from autoddl.staging import schedule_of_plan, stage_plans
from autoddl.training import PlanProblem
from autoddl.verification import verify
from autoddl.zoo.builtin import recognise


def test_a_plan_of_unequal_stages_runs(counted_ranks, tmp_path, capsys):
    """The head of a large vocabulary is most of the work: three of four devices are for the last stage."""
    path = str(tmp_path / "plan.json")
    model = [
        "gpt:2x96",
        "--heads",
        "6",
        "--sequence",
        "64",
        "--vocabulary",
        "768",
        "--batch",
        "6",
        "--micro-batch",
        "3",
    ]
    where = ["--cluster", "local-cpu", "--nodes", "1", "--devices-per-node", "4", "--quiet"]
    assert main(["plan", *model, *where, "--pipeline", "auto", "-o", path]) == 0
    assert "1 x 1, 1 x 3 devices" in capsys.readouterr().out
    plan = load_plan(path)
    assert isinstance(plan.evaluation.configuration.mesh, Division)
    assert [worker["ranks"] for worker in plan.document["workers"]] == [[0], [1, 2, 3]]
    assert [stage.num_ranks for stage in stage_plans(plan)] == [1, 3]

    found = verify(plan, 4, pool=counted_ranks(4))
    assert found.faults == () and found.is_right

    data = TextModel(shipped_text(), "gpt", 2, 96, 6, 64)
    problem = PlanProblem(data, recognise(plan.graph), plan.graph, stage_plans(plan))
    problem.check()
    options = TrainingOptions(problem, schedule_of_plan(plan, 2), num_steps=2, micro_batch=3, learning_rate=1e-2)
    job = "autoddl.pipelines.runtime.pipeline.training_job:train_on_rank"
    report = combine(options.schedule, counted_ranks(4).run(job, options, timeout_s=120))
    assert len(report.losses) == 2 and report.losses[-1] < math.log(768)
