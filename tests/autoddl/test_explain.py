"""``autoddl explain``: where time goes, and regrets against brute force over the cost model itself."""

from __future__ import annotations

import copy
import doctest
import itertools
import json
import math
from dataclasses import replace
from importlib import import_module

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.errors import UserError
from autoddl.explain import explain, explanation_document, view_of
from autoddl.explain.resources import ResourceBook
from autoddl.explain.searched import StrategySpace
from autoddl.explain.stagetable import stage_table
from autoddl.explain.steptime import step_parts
from autoddl.pipelines.joint.configuration import Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.planfile import plan_from_document
from autoddl.text.explanation import explanation_text
from autoddl.zoo import mlp

from .sample_plans import gpt_plan, pipeline_plan, written


def viewed(document):
    return view_of(plan_from_document(Fields(document, "plan"), "plan"))


def refused(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("autoddl: ") and err.count("\n") == 1 and "internal error" not in err
    return err


@pytest.fixture(scope="module")
def small():
    return gpt_plan()


@pytest.fixture(scope="module")
def piped():
    return pipeline_plan()


# ------------------------------------------------------------------------------------------------------------ time


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_add_up_to_the_step(recompute):
    view = viewed(gpt_plan(recompute=recompute))
    assert sum(part.seconds for part in view.parts) == pytest.approx(view.step_s, rel=1e-12)
    by_kind = {kind: sum(p.seconds for p in view.parts if p.kind == kind) for kind in ("compute", "communication")}
    assert by_kind == pytest.approx({"compute": view.compute_s, "communication": view.communication_s}, rel=1e-12)


def faster(cluster, resource):
    """The cluster with one resource twice as fast."""
    device, (inter, intra) = cluster.device, cluster.links
    if resource == "arithmetic":
        return replace(cluster, device=replace(device, peak_flops={k: 2 * v for k, v in device.peak_flops.items()}))
    if resource == "memory bandwidth":
        return replace(cluster, device=replace(device, memory_bandwidth=2 * device.memory_bandwidth))
    if resource == "kernel launches":
        return replace(cluster, device=replace(device, launch_s=device.launch_s / 2))
    level, what = resource.rsplit(" ", 1)

    def better(link):
        own = replace(link, collectives={}, groups={}, copies={})
        if what == "latency":
            return replace(own, latency_s=link.latency_s / 2)
        return replace(own, bandwidth=2 * link.bandwidth)

    links = (better(inter), intra) if level == "inter-node" else (inter, better(intra))
    return replace(cluster, links=links)


def test_a_resource_twice_as_fast_saves_half_of_its_part(small):
    view = viewed(small)
    plan = view.plan
    assert {part.name for part in view.parts} >= {"arithmetic", "memory bandwidth", "kernel launches"}
    for part in view.parts:
        step_s = assess(plan.graph, faster(plan.cluster, part.name), plan.workload, plan.strategies).step_s
        assert view.step_s - step_s == pytest.approx(part.seconds / 2, rel=1e-9), part.name


def test_layers_of_a_resource_book_are_those_of_the_assessment(small):
    plan = viewed(small).plan
    seconds = ResourceBook(plan.graph, plan.cluster, plan.workload).seconds(plan.strategies)
    for layer in plan.evaluation.layers:
        assert seconds[layer.layer.name].sum() == pytest.approx(layer.compute_s + layer.communication_s, rel=1e-12)


def test_one_device_has_no_links():
    view = viewed(gpt_plan(nodes=1, devices=1))
    assert {part.kind for part in view.parts} == {"compute"}


# ------------------------------------------------------------------------------------------------------------ regrets


@pytest.mark.parametrize("is_tight", [False, True])
def test_regrets_are_those_of_brute_force(is_tight):
    """All plans of a perceptron, priced one by one from the layer graph."""
    graph, options = mlp((64, 256, 32)), dict(nodes=1, devices=4, batch=64, micro_batch=64)
    document = gpt_plan(graph, **options)
    if is_tight:  # the plan without a limit does not fit any more
        document = gpt_plan(graph, **options, memory_limit_bytes=document["memory_bytes"] - 1)
    view = viewed(document)
    plan = view.plan
    problem = stage_table(plan.evaluation, 0, "step", view.memory_limit_bytes, view.strategy_space).problem
    best: dict[tuple[int, int], float] = {}
    for choice in itertools.product(*(range(len(variable.options)) for variable in problem.variables)):
        found = assess(graph, plan.cluster, plan.workload, problem.strategies(choice))
        if found.memory_bytes <= view.memory_limit_bytes:
            for key in enumerate(choice):
                best[key] = min(best.get(key, math.inf), found.step_s)
    explained = explain(view, count=1000)
    choices = explained.sections[0].choices
    assert [choice.name for choice in choices] == [variable.name for variable in problem.variables]
    for i, (choice, variable) in enumerate(zip(choices, problem.variables)):
        expected = {
            variable.options[option]: best[i, option] - view.step_s
            for option in range(len(variable.options))
            if (i, option) in best and variable.options[option] != choice.strategy
        }
        mine = {alternative.strategy: alternative.regret_s for alternative in choice.alternatives}
        assert mine == pytest.approx(expected, rel=1e-6, abs=1e-9 * view.step_s)
        assert list(mine.values()) == sorted(mine.values())
        for alternative in choice.alternatives:
            assert alternative.is_exact and alternative.memory_bytes <= view.memory_limit_bytes
            # What it spends more on is its regret.
            assert sum(alternative.deltas_s.values()) == pytest.approx(alternative.regret_s, rel=1e-6, abs=1e-12)
    assert explained.memory_price.unlimited_s <= view.step_s * (1 + 1e-9)


def test_a_plan_that_is_not_optimal_is_told_so(small):
    graph = mlp((64, 256, 32))
    document = gpt_plan(graph, nodes=1, devices=4, batch=64, micro_batch=64, method="random", evaluations=1, seed=3)
    optimum = gpt_plan(graph, nodes=1, devices=4, batch=64, micro_batch=64)["step_s"]
    assert not document["optimal"] and document["step_s"] > optimum * (1 + 1e-6)
    explained = explain(viewed(document), count=3)
    least = min(c.alternatives[0].regret_s for c in explained.sections[0].choices if c.alternatives)
    assert least == pytest.approx(optimum - document["step_s"])
    assert "better than the plan" in str(explanation_text(explained))


def test_what_memory_costs():
    free = gpt_plan(micro_batch=16, recompute=False)
    tight = gpt_plan(micro_batch=16, recompute=False, memory_limit_bytes=free["memory_bytes"] * 0.93)
    assert tight["step_s"] > free["step_s"], "the limit should bind"
    price = explain(viewed(tight), count=0).memory_price
    assert price.is_exact and price.unlimited_s == pytest.approx(free["step_s"], rel=1e-9)
    assert price.seconds_per_byte > 0
    assert "without the limit" in str(explanation_text(explain(viewed(tight), count=0)))
    assert explain(viewed(free), count=0).memory_price.seconds_per_byte == 0


@pytest.mark.parametrize("untied, summa", [(False, False), (True, False), (False, True), (True, True)])
def test_alternatives_are_of_the_space_that_the_plan_was_chosen_from(untied, summa):
    document = gpt_plan(untied=untied, summa=summa, micro_batch=16)
    view = viewed(document)
    plan = view.plan
    table = stage_table(plan.evaluation, 0, "step", view.memory_limit_bytes, view.strategy_space)
    assert table.is_exact and table.problem.table.space_size == document["space_size"]
    assert table.problem.strategies(table.chosen) == dict(plan.strategies)
    if untied and not summa:
        (section,) = explain(view, count=1).sections
        norms = next(choice for choice in section.choices if choice.name.endswith("ln_1"))
        assert norms.layers[0] == "h.0.ln_1" and len(norms.held) == 1


def test_a_plan_that_was_edited_is_explained_in_the_smallest_space_that_has_it(small):
    """Its document has no options."""
    document = copy.deepcopy(small)
    second = next(layer for layer in document["layers"] if layer["name"] == "h.1.ln_1")
    first = next(layer for layer in document["layers"] if layer["name"] == "h.0.ln_1")
    second["strategy"] = next(splits for splits in ([[1, 2, 1]] * 2, [[2, 1, 1]] * 2) if splits != first["strategy"])
    view = view_of(plan_from_document(Fields(document, "plan"), "plan", edited=True))
    assert view.strategy_space is None and first["strategy"] != second["strategy"]
    table = stage_table(view.evaluation, 0, "step", view.memory_limit_bytes, view.strategy_space)
    assert all(len(variable.layers) == 1 or " = " in variable.name for variable in table.problem.variables)
    assert not any(option.summa for variable in table.problem.variables for option in variable.options)
    with pytest.raises(UserError, match=r"h\.1\.ln_1 is tied to h\.0\.ln_1"):
        stage_table(view.evaluation, 0, "step", view.memory_limit_bytes, StrategySpace(untied=False, summa=True))


def test_communication_alone():
    view = viewed(gpt_plan(objective="communication"))
    explained = explain(view, count=1)
    assert explained.view.cost_s == pytest.approx(view.communication_s, rel=1e-12)
    assert all(a.regret_s >= 0 for c in explained.sections[0].choices for a in c.alternatives)


# ------------------------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize("name, options", [("1f1b", {"policy": "A"}), ("chimera", {"concatenation": "direct"})])
def test_a_pipeline_adds_up(name, options):
    view = viewed(pipeline_plan(name, **options))
    assert sum(part.seconds for part in view.parts) == pytest.approx(view.step_s, rel=1e-9)
    pipeline = view.evaluation
    fullest = max(view.memory, key=lambda memory: memory.total)
    assert fullest.total == pytest.approx(max(pipeline.worker_memory_bytes), rel=1e-9)
    assert sum(memory.num_devices for memory in view.memory) == 4
    compute = sum(part.seconds for part in view.parts if part.kind == "compute")
    assert compute == pytest.approx(pipeline.compute_s, rel=1e-9)


def test_a_stage_s_table_is_the_stage(piped):
    """Time and memory of the chosen strategies are those that the schedule was simulated with."""
    pipeline = viewed(piped).evaluation
    for number, stage in enumerate(pipeline.stages):
        table = stage_table(pipeline, number, "step", piped["memory_limit_bytes"])
        problem, chosen = table.problem, table.chosen
        assert not table.is_exact
        once = sum(layer.gradient_communication_s + layer.update_s for layer in stage.assessment.layers)
        passes = pipeline.configuration.schedule.num_micro_batches * (stage.forward_s + stage.backward_s)
        entry = 0.0 if number == 0 else problem.table.cost[0][chosen[0]]
        assert problem.table.evaluate(chosen) - entry == pytest.approx(passes + once, rel=1e-9)
        kept = 1 if stage.recompute_s else pipeline.in_flight[number][0]
        memory = stage.state_bytes + kept * stage.kept_bytes + stage.recomputed_bytes + stage.buffer_bytes
        assert problem.table.peak_memory(chosen) == pytest.approx(memory, abs=64)


def test_regrets_of_a_pipeline_are_differences_of_its_simulated_step(piped):
    view = viewed(piped)
    explained = explain(view, count=2)
    assert [section.title for section in explained.sections] == ["stage 0", "stage 1, recomputed"]
    assert explained.memory_price is None and "simulated" in explained.scope
    some = 0
    for section in explained.sections:
        for choice in section.choices:
            for alternative in choice.alternatives:
                some += 1
                assert not alternative.is_exact and alternative.least_regret_s is None
                assert sum(alternative.deltas_s.values()) == pytest.approx(alternative.regret_s, abs=1e-9 * view.step_s)
    assert some > 20


@pytest.mark.parametrize("objective", ["step", "communication"])
def test_a_regret_is_that_of_the_plan_with_this_choice(piped, objective):
    """Where no other layer changes along, the plan with the alternative is evaluated here too."""
    plan = plan_from_document(Fields(piped, "plan"), "plan")
    view = view_of(replace(plan, document={**piped, "objective": objective}))
    evaluation, chain, checked = view.evaluation, chain_of(plan.graph), 0
    assert view.cost_s == evaluation.cost(objective)
    for section in explain(view, count=3).sections:
        (stage,) = section.stages
        for choice in section.choices:
            for alternative in choice.alternatives:
                if alternative.moved or choice.name == "tensor that arrives" or len(choice.layers) > 1:
                    continue
                stages = list(evaluation.configuration.stages)
                strategies = {**stages[stage].strategies, choice.layers[0]: alternative.strategy}
                stages[stage] = replace(stages[stage], strategies=strategies)
                after = evaluate(chain, plan.cluster, replace(evaluation.configuration, stages=tuple(stages)))
                regret = after.cost(objective) - view.cost_s
                assert alternative.regret_s == pytest.approx(regret, rel=1e-9, abs=1e-9 * view.cost_s)
                checked += 1
    assert checked


@pytest.mark.parametrize("untied, summa", [(False, False), (True, False), (False, True)])
def test_alternatives_in_a_pipeline_are_of_the_space_that_the_plan_was_chosen_from(untied, summa):
    cluster = load_cluster("dgx-a100").resized(1, 8)
    plan = plan_from_document(Fields(pipeline_plan(cluster=cluster, mesh=StageMesh(1, 4)), "plan"), "plan")
    options = {**plan.document["options"], "untied": untied, "summa": summa}
    view = view_of(replace(plan, document={**plan.document, "options": options}))
    assert view.strategy_space == StrategySpace(untied, summa)
    (section,) = explain(view, count=1000, layer="h.*.mlp.c_fc").sections[:1]
    (choice,) = section.choices
    assert len(choice.layers) == 2 and len(choice.held) == (1 if untied else 2)
    assert any(alternative.strategy.summa for alternative in choice.alternatives) == summa


def test_a_layer_of_any_of_equal_stages():
    view = viewed(pipeline_plan(recompute=("none",) * 4))
    assert [section.title for section in view.stage_groups] == ["stage 0", "stages 1-2", "stage 3"]
    explained = [explain(view, count=1, layer=f"h.{block}.mlp.c_fc") for block in (2, 4)]
    choices = [one.sections[0].choices for one in explained]
    assert all(one.sections[0].stages == (1, 2) and len(one.sections) == 1 for one in explained)
    assert choices[0] == choices[1] and "h.2.mlp.c_fc" in choices[0][0].layers


@pytest.mark.parametrize("recompute", ["none", "layers", "stage"])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_table_of_a_single_stage_is_the_step(name, recompute):
    """Whatever its schedule, unless it runs forward twice; where it says that it is not exact it would be wrong."""
    plan = viewed(gpt_plan(micro_batch=4)).plan
    stages = (StageChoice(chain_of(plan.graph).num_units, recompute, plan.strategies),)
    configuration = Configuration(
        StageMesh.whole(plan.cluster), PipelineSchedule(name, 1, 4), replace(plan.workload, recompute="none"), stages
    )
    evaluation = evaluate(chain_of(plan.graph), plan.cluster, configuration)
    table = stage_table(evaluation, 0, "step", 2.0**36)
    assert table.is_exact == (recompute != "stage")
    step_s = table.problem.table.evaluate(table.chosen)
    assert (step_s == pytest.approx(evaluation.step_s, rel=1e-9)) == table.is_exact
    assert table.problem.table.peak_memory(table.chosen) == pytest.approx(evaluation.memory_bytes, abs=64)
    assert sum(part.seconds for part in step_parts(evaluation)) == pytest.approx(evaluation.step_s, rel=1e-12)


def test_without_time_regrets_are_intervals_and_nothing_is_simulated(small, piped):
    exact, simulated = (explain(viewed(document), count=2, time_limit_s=1e-9) for document in (small, piped))
    alternatives = [one for choice in exact.sections[0].choices for one in choice.alternatives]
    assert alternatives and all(one.least_regret_s <= one.regret_s for one in alternatives)
    choices = [choice for section in simulated.sections for choice in section.choices]
    assert len(choices) > 20 and not any(choice.alternatives for choice in choices)


def test_a_layer_of_one_stage(piped):
    explained = explain(viewed(piped), count=1, layer="lm_head")
    assert [section.stages for section in explained.sections] == [(1,)]
    with pytest.raises(UserError, match="no layer 'nowhere'"):
        explain(viewed(piped), layer="nowhere")


# ------------------------------------------------------------------------------------------------------------ the examples


@pytest.mark.parametrize(
    "name", ["explain." + name for name in ("devicememory", "explanation", "groups", "stagetable", "steptime", "view")]
    + ["diffing", "stagedocument", "staging", "export.annotated", "export.drawings", "export.traces"],
)  # fmt: skip
def test_doctests(name):
    result = doctest.testmod(import_module(f"autoddl.{name}"))
    assert result.failed == 0 < result.attempted


# ------------------------------------------------------------------------------------------------------------ the command


def test_command(tmp_path, capsys, small):
    path = written(tmp_path / "plan.json", small)
    assert main(["explain", path]) == 0
    text = capsys.readouterr().out
    assert "proven optimal" in text and "What limits the step" in text and "h.*.mlp.c_fc x 2" in text
    assert main(["explain", path, "--json", "--alternatives", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["version"]) == ("autoddl-explanation", 1)
    assert document == explanation_document(explain(viewed(small), count=2))
    assert main(["explain", path, "--layer", "h.1.mlp.c_fc", "--json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    assert [choice["name"] for choice in section["choices"]] == ["h.*.mlp.c_fc"]
    assert len(section["choices"][0]["alternatives"]) == 3


def test_command_on_a_pipeline(tmp_path, capsys, piped):
    assert main(["explain", written(tmp_path / "plan.json", piped), "--alternatives", "1"]) == 0
    text = capsys.readouterr().out
    assert "pipeline bubble" in text and "stage 1, recomputed" in text and "tensor that arrives" in text
    error = refused(capsys, "explain", str(tmp_path / "plan.json"), "--layer", "nowhere")
    assert "has no layer 'nowhere'; its layers are wte, wpe, embed, " in error


def test_what_users_get_wrong(tmp_path, capsys, small):
    path = written(tmp_path / "plan.json", small)
    assert "has no layer 'nowhere'; its layers are wte, wpe, " in refused(capsys, "explain", path, "--layer", "nowhere")
    assert "alternatives is -1" in refused(capsys, "explain", path, "--alternatives", "-1")
    assert "time limit 0" in refused(capsys, "explain", path, "--time-limit", "0")
    assert "--time-limit: 'nan' is not a number" in refused(capsys, "explain", path, "--time-limit", "nan")
    assert "cannot be read" in refused(capsys, "explain", tmp_path / "none.json")
    (tmp_path / "cut.json").write_text((tmp_path / "plan.json").read_text()[:500])
    assert "not a JSON document" in refused(capsys, "explain", tmp_path / "cut.json")
    cluster = load_cluster("gcp-a100").document
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    assert "should be 'autoddl-plan'" in refused(capsys, "explain", tmp_path / "cluster.json")
    for field in ("rivals", "notes", "gap", "space_size", "optimal"):
        broken = {name: value for name, value in small.items() if name != field}
        assert field in refused(capsys, "explain", written(tmp_path / "broken.json", broken))
