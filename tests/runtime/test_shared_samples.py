"""Ranks that share the positions of samples: values, steps and bytes against one device and the price list."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.costmodel.strategy import enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.meshes import Division, StageMesh
from autoddl.verification import verify
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.transformers import Transformer, bert, gpt, llama

from . import test_exported, test_exported_pipelines
from .pipeline_plans import pipelined
from .random_strategies import random_strategies
from .test_applied import JOBS, Case, check_pass

GPT = Transformer("gpt", layers=2, width=64, heads=8, sequence=32, vocabulary=128)
BERT = Transformer("bert", layers=1, width=64, heads=4, sequence=32, vocabulary=128)
LLAMA = Transformer(
    "llama",
    1,
    width=64,
    heads=8,
    sequence=32,
    vocabulary=128,
    kv_heads=4,
    intermediate=128,
    activation="silu",
    tied=False,
)
MODELS = {"gpt": (gpt, GPT), "bert": (bert, BERT), "llama": (llama, LLAMA)}


def case_of(model, level_sizes, way, samples=1, seed=0, sizes=None, **workload):
    """Every attention shares samples over as many ranks as possible, half of them if ``samples`` is 2; other layers at random."""
    make, sizes = MODELS[model][0], sizes or MODELS[model][1]
    graph = make(sizes)
    strategies = random_strategies(graph, level_sizes, seed, samples=samples)
    for layer in graph.layers:
        if layer.kind == "attention":
            offered = enumerate_strategies(layer, level_sizes)
            sharing = [s for s in offered if s.sequence == way and s.fits(layer, samples)]
            strategies[layer.name] = max(sharing, key=lambda s: s.ranks_per_sample)
    return Case(model, sizes, graph, strategies, Workload(samples, samples, "float32", **workload))


CASES = {
    "gpt gathers on 2": case_of("gpt", (2,), "gather"),
    "gpt in a ring on 2": case_of("gpt", (2,), "ring"),
    "bert gathers on 2": case_of("bert", (2,), "gather"),
    "bert in a ring on 4": case_of("bert", (4,), "ring"),
    "llama gathers on 4": case_of("llama", (4,), "gather", seed=1),
    "llama in a ring on 4": case_of("llama", (4,), "ring", seed=2),
    "two samples of llama in rings of 2": case_of("llama", (4,), "ring", samples=2, seed=3),
    "gpt gathers on 2x2": case_of("gpt", (2, 2), "gather", seed=4),
    "gpt gathers on 2x2, layers recomputed": case_of("gpt", (2, 2), "gather", seed=5, recompute="layers"),
    "llama in a ring on 2x2, blocks recomputed": case_of("llama", (2, 2), "ring", seed=6, recompute="blocks"),
    "gpt gathers on 4, dense": case_of("gpt", (4,), "gather", seed=7, attention="dense"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_values_and_steps(ranks, name):
    check_pass(CASES[name], ranks)


def copies_case(kv_heads, level_sizes, splits, samples=2, **workload):
    """Attention over more ranks than it has heads of keys; other layers at random."""
    sizes = replace(LLAMA, kv_heads=kv_heads)
    graph = llama(sizes)
    strategies = random_strategies(graph, level_sizes, 3, samples=samples)
    for layer in graph.layers:
        if layer.kind == "attention":
            offered = enumerate_strategies(layer, level_sizes)
            fitting = [s for s in offered if s.splits == splits and s.key_copies and s.fits(layer, samples)]
            strategies[layer.name] = fitting[-1]
    return Case("llama", sizes, graph, strategies, Workload(samples, samples, "float32", **workload))


COPIES = {
    "1 key on 2": copies_case(1, (2,), ((1, 2, 1),)),
    "2 keys on 4": copies_case(2, (4,), ((1, 4, 1),), recompute="layers"),
    "1 key on 4": copies_case(1, (4,), ((1, 4, 1),)),
    "1 key on 2x2": copies_case(1, (2, 2), ((1, 2, 1), (1, 2, 1)), attention="dense"),
    "2 keys on 2x2": copies_case(2, (2, 2), ((1, 2, 1), (1, 2, 1))),
    "1 key on 2 of 4, which share samples": copies_case(1, (4,), ((2, 2, 1),), samples=1),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_keys(ranks, name):
    case = COPIES[name]
    assert any(strategy.key_copies for strategy in case.strategies.values())
    check_pass(case, ranks)


# ---- Training, bytes, exported files -------------------------------------------------------------------------------------------

#: Large enough that what a pass sends is far more than the messages' overhead.
WIDE = replace(LLAMA, width=128, sequence=128, vocabulary=256)
COUNTED = {
    "gathers on 2": ("gather", (2,)),
    "in a ring on 4": ("ring", (4,)),
    "gathers on 2x2": ("gather", (2, 2)),
    "in rings of 4 on 2x4": ("ring", (2, 4)),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", COUNTED)
def test_bytes_of_a_pass(counted_ranks, name):
    """Slow: eight ranks are started on two cores."""
    way, level_sizes = COUNTED[name]
    case = case_of(
        "llama", level_sizes, way, seed=8, samples=2 if len(level_sizes) == 2 and way == "ring" else 1, sizes=WIDE
    )
    check_pass(case, counted_ranks, counts_pass=True)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama in a ring on 4", "gpt gathers on 2x2, layers recomputed"])
def test_losses_and_parameters_after_three_steps(ranks, name):
    """Slow: the whole model and the plan train side by side, in double precision, since Adam divides by small gradients."""
    case = replace(CASES[name], workload=replace(CASES[name].workload, batch=2, precision="float64"))
    for result in ranks(case.num_ranks).run(f"{JOBS}:train", *case.arguments, ["adamw"], 3):
        for errors in result.values():
            assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama in a ring on 4", "gpt gathers on 2x2, layers recomputed", "1 key on 2x2"])
def test_exported_files(counted_ranks, tmp_path, name):
    """Slow: ranks import the file, and train beside the applied plan."""
    case = {**CASES, **COPIES}[name]
    case = replace(case, workload=replace(case.workload, batch=2 * case.workload.batch))
    exported = test_exported.Case(BuiltIn(case.model, case.sizes), case.strategies, case.workload)
    path = test_exported.exported(exported, tmp_path)
    arguments = exported.built_in, exported.graph, exported.strategies, exported.workload, path, True
    test_exported.check(lambda: counted_ranks(case.num_ranks).run(f"{test_exported.JOBS}:train_both", *arguments))


# ---- Pipelines -----------------------------------------------------------------------------------------------------------------

SMALL_GPT, SMALL_LLAMA = BuiltIn("gpt", GPT), BuiltIn("llama", replace(LLAMA, layers=2))
ONE_AND_TWO = Division((StageMesh(1, 2), StageMesh(1, 1)))


def pipeline(model, mesh, seed, micro_batch=1, **options):
    schedule = test_exported_pipelines.schedule("1f1b", 2, policy="A")
    return pipelined(model, schedule, (1, 1), mesh, micro_batch=micro_batch, seed=seed, shares=True, **options)


#: From ranks that share samples to others, to ranks with features of whole samples, and to a single rank.
PIPELINES = {
    "gpt on 2 x 2": lambda: pipeline(SMALL_GPT, StageMesh(1, 2), 1),
    "llama on 2 x 2, layers recomputed": lambda: pipeline(
        SMALL_LLAMA, StageMesh(1, 2), 5, recompute=("layers", "none")
    ),
    "gpt on 2 + 1": lambda: pipeline(SMALL_GPT, ONE_AND_TWO, 3),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_are_verified(counted_ranks, name):
    """Slow: all sections of all stages are counted."""
    plan = PIPELINES[name]()
    assert any(strategy.positions for strategy in plan.strategies.values())
    num_ranks = sum(plan.evaluation.schedule.widths)
    verification = verify(plan, num_ranks, pool=counted_ranks(num_ranks))
    assert verification.is_right


@pytest.mark.ranks
def test_an_exported_pipeline(counted_ranks, tmp_path):
    """Slow: ranks import the file, and train beside the runtime."""
    plan = PIPELINES["gpt on 2 x 2"]()
    arguments = SMALL_GPT, plan, test_exported_pipelines.exported(plan, tmp_path), 1
    results = counted_ranks(4).run(f"{test_exported_pipelines.JOBS}:train_both", *arguments)
    test_exported_pipelines.check_against_runtime(plan, results)
    test_exported_pipelines.check_bytes_of_a_run(counted_ranks(4), arguments, results)
