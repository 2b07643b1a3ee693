"""Trials of recipes: uniform pipelines, and the memory that fewer recomputed blocks leave."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.explorer import setting_of
from autoddl.pipelines.joint.job import job_of
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.recipe_trials import recipe_trials
from autoddl.pipelines.joint.result import JointOptions, priced
from autoddl.pipelines.joint.rivals import RECIPE
from autoddl.pipelines.joint.uniform import UniformLayout, uniform_configuration
from autoddl.pipelines.planners import Clock
from autoddl.search.planner import Options
from autoddl.zoo import resolve_model

GPT = resolve_model("gpt:8x1024", heads=16, sequence=512, vocabulary=1024)
CLUSTER = load_cluster("dgx-a100").resized(2, 4)


def job(graph=GPT, **options):
    chosen = {"batch": 32, "zero": "auto", "activations": "auto", **options}
    return job_of(graph, CLUSTER, JointOptions(Options(**chosen), pipeline="auto"))


def test_a_recipe_is_as_fast_as_every_uniform_pipeline_of_its_kind():
    """Every tensor and pipeline parallel degree, interleaved or not, priced by itself, with divided states."""
    asked = job()
    found = recipe_trials(asked, math.inf, Clock(60.0))
    assert found is not None and found.memory_bytes <= asked.limit_bytes
    assert recipe_trials(asked, found.step_s, Clock(60.0)) is None
    steps = []
    for layout in (
        UniformLayout(t, p, 8 // t // p, v) for t in (1, 2, 4) for p in (2, 4) for v in (1, 2) if t * p <= 8
    ):
        size = layout.data_parallel
        workload = asked.workload.__class__(32, size, asked.workload.precision, zero=1)
        steps.append(priced(asked.chain, CLUSTER, layout, workload, None, ()).evaluation.step_s)
    assert found.step_s <= min(steps) * (1 + 1e-9)


def test_a_recipe_with_chimera_is_as_fast_as_every_uniform_one():
    """Every degree, number of pipelines and concatenation, priced by itself, with divided states; and it is in the space."""
    asked = job()
    found = recipe_trials(asked, math.inf, Clock(60.0), with_chimera=True)
    assert found is not None and found.memory_bytes <= asked.limit_bytes
    assert recipe_trials(asked, found.step_s, Clock(60.0), with_chimera=True) is None
    offered = asked.explorer().settings(None, False, lambda spec: spec.name == "chimera")
    assert setting_of(found.configuration) in list(offered)
    num_better = num_priced = 0
    for t, p, b, f in product((1, 2, 4), (2, 4, 8), (1, 2, 4), (2, 4)):
        d = 8 // t // p
        for concatenation in ("direct", "doubling", "halving") if t * p <= 8 and f <= p else ():
            options = (("concatenation", concatenation), ("num_pipelines", f))
            workload = replace(asked.workload, micro_batch=b * d)
            uniform = uniform_configuration(asked.chain, CLUSTER, UniformLayout(t, p, d), workload)
            stages = tuple(
                replace(
                    stage,
                    strategies={
                        name: replace(one, zero=1) if one.copies > 1 else one for name, one in stage.strategies.items()
                    },
                )
                for stage in uniform.stages
            )
            spec = PipelineSchedule("chimera", p, 32 // (b * d), options, num_pipelines=f)
            if concatenation == "halving" and (b % 2 or spec.num_micro_batches <= p):
                continue
            try:
                other = evaluate(asked.chain, CLUSTER, replace(uniform, schedule=spec, stages=stages))
            except UserError:
                continue
            num_priced += 1
            num_better += other.step_s < found.step_s * (1 - 1e-9) and other.memory_bytes <= asked.limit_bytes
    assert num_priced > 30 and not num_better


def test_recipes_recompute_as_few_blocks_as_the_memory_asks_for():
    free = recipe_trials(job(), math.inf, Clock(60.0))
    limit = 0.6 * free.memory_bytes
    tight = job(memory_limit_bytes=limit)
    found = recipe_trials(tight, math.inf, Clock(60.0))
    assert found is not None and found.memory_bytes <= limit and found.step_s >= free.step_s
    ways = {choice.recompute for choice in found.configuration.stages}
    splits = {s for choice in found.configuration.stages for s in choice.strategies.values()}
    assert ways != {"none"} or any(strategy.regathers for strategy in splits) or found.step_s > free.step_s


def test_recipes_of_mixtures_divide_experts_and_those_of_choices_divide_states():
    graph = resolve_model("moe:4x256", heads=4, sequence=256, vocabulary=512)
    found = recipe_trials(job(graph), math.inf, Clock(60.0))
    strategies = {name: s for choice in found.configuration.stages for name, s in choice.strategies.items()}
    experts = [s for name, s in strategies.items() if name in graph and graph[name].kind == "experts"]
    assert all(s.experts or s.p0 == 1 for s in experts)
    products = [s for name, s in strategies.items() if name in graph and kind_of(graph[name].kind).is_matmul]
    assert all(s.zero == 1 for s in products if s.copies > 1)
    plain = recipe_trials(job(graph, zero=0), math.inf, Clock(60.0))
    assert not any(s.zero for choice in plain.configuration.stages for s in choice.strategies.values())


def test_a_joint_plan_is_never_slower_than_a_recipe():
    options = JointOptions(Options(batch=32, zero="auto", activations="auto", time_limit_s=2.0), pipeline="auto")
    planned = plan_jointly(GPT, CLUSTER, options)
    (row,) = (rival for rival in planned.rivals if rival.name == RECIPE)
    assert row.configuration is not None and row.lower_bound_s <= row.step_s
    assert planned.evaluation.step_s <= row.step_s * (1 + 1e-9)


@pytest.mark.parametrize("recompute", [True, "blocks", None])
def test_no_way_of_recomputation_that_the_options_exclude(recompute):
    """Where the options ask for recomputed blocks, memory that is left does not undo it."""
    asked = job(recompute=recompute)
    found = recipe_trials(asked, math.inf, Clock(60.0))
    assert found is not None
    ways = {choice.recompute for choice in found.configuration.stages}
    assert all(asked.tries(way) for way in ways)
    assert ("none" in ways) == (recompute is None)
