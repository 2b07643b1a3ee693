"""Plans with a pipeline on real ranks: verified, and what is said where something is off; trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoddl
from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import ENTRY, Configuration, PipelineSchedule, StageChoice, StageMesh, chain_of, evaluate
from autoddl.pipelines.joint.meshes import Division
from autoddl.pipelines.runtime.availability import Availability
from autoddl.pipelines.runtime.pipeline.problems import TextModel, shipped_text
from autoddl.pipelines.runtime.pipeline.report import combine
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions
from autoddl.pipelines.runtime.stage.plan import check_stages
from autoddl.planfile import PlanFile, load_plan, unpipelined_plan
from autoddl.search import solve
from autoddl.search.baselines import baselines
from autoddl.staging import schedule_of_plan, stage_plans
from autoddl.text.verification import verification_text
from autoddl.training import PlanProblem
from autoddl.verification import Limits, Verification, prediction, run, verification_document, verify
from autoddl.verification.fitting import chosen_workers, fit_plan
from autoddl.verification.result import ValueCheck
from autoddl.verification.scaling import needed_flops, needed_memory_bytes
from autoddl.zoo.builtin import BuiltIn, MLPSizes, recognise
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.transformers import Transformer, gpt

from .pipeline_plans import pipelined
from .sent_bytes import Sent, check_sent

MODEL = Transformer("gpt", layers=2, width=64, heads=4, sequence=16, vocabulary=256)


def plan_of(schedule: PipelineSchedule, recomputing: Sequence[str] = (), graph: LayerGraph | None = None) -> PlanFile:
    """Stages of two devices each, at their cheapest strategies but for one layer, so that something is sent inside too."""
    graph = graph or gpt(MODEL)
    cluster, mesh = load_cluster("dgx-a100").resized(1, 2 * schedule.num_workers), StageMesh(1, 2)
    again = recomputing[0] if schedule.num_stages == 1 and recomputing else "none"
    workload = Workload(4 * schedule.num_micro_batches, 4, "mixed", "adam", again)
    chain, choices = chain_of(graph), []
    first = 0
    for stage in range(schedule.num_stages):
        num_units = (stage + 1) * chain.num_units // schedule.num_stages - first
        prices = PriceBook(chain.stage(first, first + num_units).graph, mesh.devices(cluster), workload)
        problem = prices.problem(workload.batch, 4)
        strategies = dict(problem.strategies(solve(problem.table).choice))
        for name in strategies:
            if name.endswith(("mlp.c_fc", "fc2")):
                strategies[name] = replace(strategies[name], splits=((1, 2, 1),))
        choices.append(StageChoice(num_units, recomputing[stage] if recomputing else "none", strategies))
        first += num_units
    evaluation = evaluate(chain, cluster, Configuration(mesh, schedule, workload, tuple(choices)))
    strategies = {name: s for choice in choices for name, s in choice.strategies.items() if name != ENTRY}
    return PlanFile(graph, cluster, workload, strategies, {}, evaluation)


def delayed_plan(name: str, groups: int = 1) -> PlanFile:
    """Of a perceptron, none of whose weights is in two stages."""
    return plan_of(PipelineSchedule(name, 2, 2, groups=groups, synchronous=False), graph=mlp([64] * 9))


@pytest.fixture(scope="module")
def recomputing() -> PlanFile:
    return plan_of(PipelineSchedule("1f1b", 2, 2), ("blocks", "stage"))


@pytest.fixture(scope="module")
def verified(counted_ranks, recomputing) -> Verification:
    return verify(recomputing, 4, pool=counted_ranks(4))


def test_a_plan_with_a_pipeline_is_verified(counted_ranks, recomputing, verified):
    """Slow where bytes are counted again."""
    plan, found = recomputing, verified
    assert [stage.recompute for stage in stage_plans(plan)] == ["blocks", "none"]
    assert found.faults == () and found.is_right and found.changes == ()
    assert found.between.sent_bytes == found.between.predicted_bytes == 2 * 2 * 4 * 16 * 64 * 4
    assert [[layer.name for layer in stage.layers] for stage in found.stages] == [
        list(stage.strategies) for stage in stage_plans(plan)
    ]
    # Of a layer that is split over p1, forward and backward gather or scatter what it reads and gives, on the wire too.
    split = next(layer for layer in found.stages[0].layers if layer.name.endswith("mlp.c_fc"))
    for phase in split.phases.values():
        assert phase.predicted_bytes > 0 and (phase.missing, phase.unexpected) == ((), ())
    check_sent(4, sent_by(found), lambda: sent_by(verify(plan, 4, pool=counted_ranks(4))))
    names = {check.name for check in found.gradients}
    assert names == {check.name for check in found.parameters} >= {"wte.weight", "ln_f.weight", "h.1.mlp.c_fc.bias"}
    assert all(0 < check.error < 1e-5 for check in found.gradients if check.name.endswith("c_fc.weight"))
    document = verification_document(found)
    json.dumps(document, allow_nan=False)
    assert document["verdict"] == "right" and len(document["stages"]) == 2
    for number, stage in enumerate(document["stages"]):
        assert [layer["name"] for layer in document["layers"] if layer["stage"] == number] == stage["layers"]
    text = str(verification_text(found))
    assert (
        "gpt in 2 stages on 2 workers of 2 ranks, 1f1b, against one device" in text
        and "Right: the plan computes what" in text
    )


def test_a_pipeline_of_one_stage_is_verified(counted_ranks):
    """As the joint search has it where no pipeline is faster: the module that `autoddl.apply` makes runs it."""
    plan = plan_of(PipelineSchedule("1f1b", 1, 4), ("layers",), mlp([64] * 5))
    found = verify(plan, 2, pool=counted_ranks(2))
    assert found.faults == () and found.workload.recompute
    assert {tuple(layer.phases) for layer in found.layers} == {("forward", "backward", "gradient")}
    assert str(verification_text(found)).startswith("mlp:64,64,64,64,64 on 2 ranks (2 intra-node), against one device")


def sent_by(found: Verification) -> list[Sent]:
    """Of a run, and of the layer that is split; the headers are taken off already."""
    run = Sent("a run", found.step.sent_bytes, found.step.predicted_bytes, relative=0.02, num_readings=0)
    split = next(layer for layer in found.stages[0].layers if layer.name.endswith("mlp.c_fc"))
    return [run, *(Sent(n, p.sent_bytes, p.predicted_bytes, num_readings=0) for n, p in split.phases.items())]


def sent_in_a_run(found: Verification) -> list[Sent]:
    """Of a run."""
    return [Sent("a run", found.step.sent_bytes, found.step.predicted_bytes, num_readings=0)]


def test_exchanges_inside_a_stage_are_verified(counted_ranks):
    """In the stage of six ranks p0 goes from 1 to 3 and back: unequal pieces, whose bytes are counted on the wire."""
    built_in = BuiltIn("mlp", MLPSizes((48, 96, 144, 96, 24)))
    mesh = Division((StageMesh(1, 2), StageMesh(1, 6)))
    one = PipelineSchedule("1f1b", 2, 2, (("policy", "A"),))
    plan = pipelined(built_in, one, (1, 3), mesh, micro_batch=12, shape=(1, 8), seed=44)

    def run():
        return verify(plan, 8, pool=counted_ranks(8))

    def sent(found):
        return [Sent("a run", found.step.sent_bytes, found.step.predicted_bytes, relative=0.02, num_readings=0)]

    found = run()
    assert [str(layer.strategy) for layer in found.stages[1].layers] == ["(1,3,2)", "(3,1,2)", "(1,6,1)"]
    assert found.faults == () and found.is_right
    check_sent(8, sent(found), lambda: sent(run()))


def test_what_is_off_is_said(verified):
    found = verified
    split = next(layer for layer in found.stages[1].layers if layer.name.endswith("mlp.c_fc"))
    phases = {**split.phases, "forward": replace(split.phases["forward"], missing=("a step",), sent_bytes=1e6)}
    stages = tuple(
        replace(stage, layers=tuple(replace(x, phases=phases) if x is split else x for x in stage.layers))
        for stage in found.stages
    )
    off = replace(
        found,
        losses=((1.0, 1.1), *found.losses[1:]),
        gradients=(ValueCheck("ln_f.weight", 0.25, 3), *found.gradients),
        parameters=(ValueCheck("ln_f.weight", 0.5, 2), *found.parameters),
        stages=stages,
        between=replace(found.between, sent_bytes=0.5 * found.between.predicted_bytes),
        step=replace(found.step, sent_bytes=2 * found.step.predicted_bytes),
    )
    assert len(off.faults) == 8 and off.are_bytes_off and verification_document(off)["verdict"] == "off"
    for said in (
        "loss of step 1: 1.1, should be 1 (off by 1.0e-01)",
        "ln_f.weight: the gradient of step 1 on rank 3 is off by 2.5e-01",
        "ln_f.weight: the value after 3 steps on rank 2 is off by 5.0e-01",
        f"stage 1, {split.name}, forward: a step is priced but did not run",
    ):
        assert said in off.faults
    assert str(verification_text(off)).count("<- off") >= 2 and "Off in 8 places" in str(verification_text(off))


@pytest.mark.parametrize(("name", "groups", "delays"), [("pipedream-2bw", 1, (1, 1)), ("wpipe", 2, (1, 1, 0, 0))])
def test_asynchronous_schedules_equal_one_device_with_their_delays(counted_ranks, name, groups, delays):
    plan = delayed_plan(name, groups)
    found = verify(plan, 4, pool=counted_ranks(4))
    assert found.schedule.delays == delays and found.schedule.num_updates == 3
    assert found.faults == () and found.gradient_step == 3
    assert "those of stale weights" in str(verification_text(found))

    check_sent(4, sent_in_a_run(found), lambda: sent_in_a_run(verify(plan, 4, pool=counted_ranks(4))))


def test_a_schedule_that_updates_after_each_micro_batch_is_verified_after_whole_runs(counted_ranks):
    plan = plan_of(PipelineSchedule("pipedream", 2, 4, synchronous=False), graph=mlp([64] * 9))
    found = verify(plan, 4, pool=counted_ranks(4))
    assert found.faults == ()
    assert found.schedule.num_updates == len(found.losses) == found.gradient_step == 4


SCHEDULES = {
    "chimera, halving": PipelineSchedule("chimera", 2, 4, (("concatenation", "halving"),)),
    "zero-bubble": PipelineSchedule("zero-bubble", 2, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rank_runs_the_steps_of_its_schedule(counted_ranks, name):
    """Of all stages of its worker, as often as the schedule has them, with the sums of gradients; no more and no less.

    The plan's types are mixed, so the four ranks also agree whether its one update is skipped: an all-reduce of a flag of 4 bytes,
    of which each rank sends 2 x 3/4 x 4 B = 6 B.
    """
    plan = plan_of(SCHEDULES[name])
    found = verify(plan, 4, pool=counted_ranks(4))
    assert found.faults == ()
    parts = sum(stage.inside_bytes + stage.gradient_bytes for stage in found.stages)
    assert found.step.predicted_bytes == pytest.approx(parts + found.between.predicted_bytes + 4 * 6)


@pytest.mark.parametrize(
    ("schedule", "zero"), [("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zero-bubble", 1), ("chimera", 1)]
)
def test_stages_that_divide_a_weight_that_they_share_are_verified(counted_ranks, tmp_path, schedule, zero):
    """The workload's stage of ZeRO holds for all layers, as far as they can have it: for the shared weight it is 1 at most."""
    plan = autoddl.price(
        "gpt:2x64",
        **{"heads": 4, "sequence": 16, "vocabulary": 256, "cluster": "dgx-a100", "nodes": 1, "devices_per_node": 4},
        **{"tp": 1, "pp": 2, "dp": 2, "batch": 8, "micro_batch": 2, "schedule": schedule, "zero": zero},
    )
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.evaluation.step_s == plan.step_s
    first, last = stage_plans(loaded)
    assert first.strategies["wte"].zero == last.strategies["lm_head"].zero == 1
    assert first.strategies["h.0.mlp.c_fc"].zero == last.strategies["h.1.mlp.c_fc"].zero == zero
    found = verify(loaded, 4, pool=counted_ranks(4))
    assert found.faults == () and found.is_right
    assert "wte.weight" in {check.name for check in found.gradients}
    check_sent(4, sent_in_a_run(found), lambda: sent_in_a_run(verify(loaded, 4, pool=counted_ranks(4))))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_sum_of_gradients_that_is_not_priced_is_found(ranks, monkeypatch, num_stages):
    """A plan without a pipeline runs as a pipeline of one stage, whose gradients are summed as one vector."""

    def without_sums(*arguments):
        _, between_ranks = gradient_sums(*arguments)
        return (), between_ranks

    gradient_sums = prediction.gradient_sums
    monkeypatch.setattr(prediction, "gradient_sums", without_sums)
    monkeypatch.setattr(run, "namespace_available", lambda: Availability("not counted"))
    plan = plan_of(PipelineSchedule("1f1b", num_stages, 2))
    if num_stages == 1:
        plan = unpipelined_plan(
            plan.graph, plan.cluster, plan.workload, dict.fromkeys(plan.strategies, Strategy(((2, 1, 1),)))
        )
    found = verify(plan, 2 * num_stages, pool=ranks(2 * num_stages))
    (fault,) = found.faults
    assert fault.startswith("a whole step: ") and "ran but is not priced" in fault


def test_weights_that_are_not_as_old_as_they_should_be_are_found(ranks, monkeypatch):
    """One device that has no delays does something else from the second step on."""
    monkeypatch.setattr("autoddl.verification.run._JOBS", f"{Path(__file__).with_name('undelayed_job.py')}")
    plan = delayed_plan("pipedream-2bw")
    found = verify(plan, 4, pool=ranks(4))
    assert found.loss_errors[0] < 1e-5 < min(found.loss_errors[1:])
    assert max(check.error for check in found.gradients) > 1e-4


# ---- Fewer ranks, a smaller model -----------------------------------------------------------------------------------------


def deep_plan(num_blocks: int = 8, num_micro_batches: int = 16, **sizes) -> PlanFile:
    """Four stages of two ranks, with as many blocks each."""
    graph = gpt(replace(MODEL, layers=num_blocks, **sizes))
    return plan_of(PipelineSchedule("1f1b", 4, num_micro_batches), ("none", "layers", "blocks:3", "none"), graph)


def test_a_plan_of_a_large_model_is_scaled_down_with_its_stages_and_strategies():
    plan = deep_plan(width=2048, heads=16, sequence=1024, vocabulary=50304, num_blocks=16)
    limits = Limits(2e9, 4e11)
    fitted = fit_plan(plan, 8, limits, recognise(plan.graph))
    scaled, planned = fitted.scaled, stage_plans(plan)
    assert needed_memory_bytes(scaled.graph, scaled.workload, 8) <= limits.memory_bytes
    assert needed_flops(scaled.graph, scaled.workload) <= limits.flops
    check_stages(scaled.graph, fitted.stages)
    assert fitted.schedule.widths == plan.evaluation.schedule.widths and fitted.schedule.num_micro_batches == 8
    assert scaled.workload.num_micro_batches == 8
    for stage, before in zip(fitted.stages, planned):
        assert stage.entry == before.entry
        # Three of the four blocks of a stage, which keeps one block of them.
        (num_blocks,) = {one.num_blocks(scaled.graph) for one in fitted.stages}
        is_partial = before.recompute == "blocks:3"
        assert stage.recompute == (
            ["blocks", "blocks:1", "blocks:2"][num_blocks - 1] if is_partial else before.recompute
        )
        chosen = {(role(plan.graph[name]), strategy) for name, strategy in before.strategies.items()}
        assert {(role(scaled.graph[name]), strategy) for name, strategy in stage.strategies.items()} == chosen
    assert {change.what for change in scaled.changes} >= {"blocks", "width", "vocabulary", "micro-batches"}


def role(layer):
    return layer.role or layer.name


def test_inner_stages_are_left_out_where_there_are_fewer_ranks(counted_ranks):
    plan = deep_plan()
    assert sum(plan.evaluation.schedule.widths) == 8
    fitted = fit_plan(plan, 6, Limits(), recognise(plan.graph))
    assert fitted.schedule.widths == (2, 2, 2) and [change.what for change in fitted.scaled.changes][:2] == [
        "stages",
        "blocks",
    ]
    planned = stage_plans(plan)
    assert [stage.recompute for stage in fitted.stages] == [planned[i].recompute for i in (0, 1, 3)]
    found = verify(deep_plan(4, 2), 4, pool=counted_ranks(4))
    assert found.faults == () and found.schedule.num_stages == 2
    assert [str(change) for change in found.changes][:2] == ["stages 4 -> 2", "blocks 4 -> 2"]


def test_plans_that_cannot_be_brought_to_so_many_ranks_say_so():
    plan = deep_plan()
    for num_ranks, said in (
        (16, "the plan is for 8 devices (1 node of 8), not for ranks=16; give ranks=8, or plan for fewer devices"),
        (0, "the plan is for 8 devices (1 node of 8), not for ranks=0; give ranks=8"),
        (7, "8 devices in 4 workers of 2; it cannot be reduced to 7 ranks with the same strategies; give ranks=8"),
        (2, "the same strategies (the smallest part, two of its 4 workers, needs 4); give ranks=8"),
    ):
        with pytest.raises(UserError) as refused:
            fit_plan(plan, num_ranks, Limits(), recognise(plan.graph))
        assert said in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(UserError, match="whole blocks of a built-in transformer"):
        fit_plan(plan, 4, Limits(), None)
    with pytest.raises(UserError) as refused:
        fit_plan(plan, 8, Limits(1e6, 1e6), recognise(plan.graph))
    said = str(refused.value)
    assert "is too large to be verified here, also scaled down (" in said and " -> " in said
    assert said.endswith("plan for fewer devices, or give full_size=True to run it as it is")


@given(widths=st.lists(st.integers(1, 4), min_size=2, max_size=7), num_ranks=st.integers(2, 28))
def test_workers_are_chosen_wherever_some_make_up_the_ranks(widths, num_ranks):
    possible = [
        (0, *inner, len(widths) - 1)
        for count in range(len(widths) - 1)
        for inner in combinations(range(1, len(widths) - 1), count)
        if widths[0] + widths[-1] + sum(widths[i] for i in inner) == num_ranks
    ]
    chosen = chosen_workers(tuple(widths), num_ranks)
    if not possible:
        assert chosen is None
    else:
        assert chosen in possible and len(chosen) == max(map(len, possible))


def test_pipelines_of_several_stages_cannot_be_applied():
    with pytest.raises(UserError, match="the plan is a pipeline of 2 stages, which no single module runs"):
        autoddl.apply(None, plan_of(PipelineSchedule("1f1b", 2, 4)))


def data_parallel(graph: LayerGraph) -> Mapping[str, Strategy]:
    """On four devices."""
    return next(baseline.strategies for baseline in baselines(graph, (4,)) if baseline.name == "data parallel")


def test_a_plan_without_a_pipeline_is_a_pipeline_of_one_stage():
    staged = plan_of(PipelineSchedule("1f1b", 2, 4))
    workload = replace(staged.workload, recompute="layers")
    plan = unpipelined_plan(staged.graph, staged.cluster, workload, data_parallel(staged.graph))
    (stage,), schedule = stage_plans(plan), schedule_of_plan(plan)
    assert (stage.strategies, stage.recompute, stage.entry) == (plan.strategies, "layers", None)
    assert (schedule.num_stages, schedule.widths, schedule.num_micro_batches) == (1, (4,), 4)
    assert [str(task) for task in schedule.workers[0][:4]] == ["0F0", "0B0", "0F1", "0B1"]


@pytest.mark.parametrize("has_pipeline", [True, False])
def test_plans_are_trained(ranks, has_pipeline):
    """They learn more of a text than that all bytes are equally likely."""
    plan = plan_of(PipelineSchedule("chimera", 2, 2))
    if not has_pipeline:
        plan = unpipelined_plan(plan.graph, plan.cluster, plan.workload, data_parallel(plan.graph))
    data = TextModel(shipped_text(), "gpt", MODEL.layers, MODEL.width, MODEL.heads, MODEL.sequence)
    problem = PlanProblem(data, recognise(plan.graph), plan.graph, stage_plans(plan))
    problem.check()
    options = TrainingOptions(problem, schedule_of_plan(plan, 4), num_steps=4, micro_batch=4, learning_rate=1e-2)
    job = "autoddl.pipelines.runtime.pipeline.training_job:train_on_rank"
    report = combine(options.schedule, ranks(4).run(job, options, timeout_s=240))
    assert all(0 < loss < math.log(256) for loss in report.losses)


def test_schedules_of_plans():
    synchronous = plan_of(PipelineSchedule("1f1b", 2, 4), ("none", "stage"))
    assert schedule_of_plan(synchronous, 7) == synchronous.evaluation.schedule
    delayed = plan_of(PipelineSchedule("pipedream-2bw", 2, 4, synchronous=False), ("none", "stage"))
    schedule = schedule_of_plan(delayed, 7)
    assert schedule.num_updates == 7 and schedule.widths == (2, 2)
    assert {task.stage for _, _, task in schedule.tasks() if task.kind.letter == "R"} == {1}


def test_what_train_says_of_plans(capsys, tmp_path):
    where = ["--cluster", "gcp-a100", "--nodes", "1", "--devices-per-node", "2", "--batch", "8", "--quiet"]
    path = str(tmp_path / "plan.json")
    assert main(["plan", "mlp:64,64,64", *where, "--pipeline", "auto", "-o", path]) == 0
    capsys.readouterr()
    for arguments, said in (
        ([path], "the plan's model mlp:64,64,64 is not one that learns a text: gpt, bert, llama"),
        ([path, "--stages", "3"], "--stages 3 is for models; a plan says it itself"),
        ([str(tmp_path / "none.json")], "none.json"),
    ):
        assert main(["train", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
