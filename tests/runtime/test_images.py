"""Convolutions, poolings and batch norms on ranks: channels, rows and tiles of images, and their halos against one device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.strategy import PLAIN, Choices, enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.meshes import Division, StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.planfile import unpipelined_plan
from autoddl.search.planner import Options, make_plan
from autoddl.staging import stage_plans
from autoddl.verification import Limits, VerifyOptions, verify
from autoddl.zoo.builtin import BuiltIn, ResNetSizes, VGGSizes
from autoddl.zoo.residual import resnet

from . import test_exported, test_exported_pipelines
from .pipeline_plans import pipelined
from .random_strategies import random_strategies, tilings
from .test_applied import JOBS, Case, check_pass, cluster_of

VGG = VGGSizes(11, image=32, classes=16, hidden=64)
RESNET = ResNetSizes(18, image=64, classes=8, width=8)
BOTTLENECKS = ResNetSizes(50, image=64, classes=8, width=8)
TOGETHER = replace(RESNET, synchronised=True)


def case_of(sizes, level_sizes, seed, samples=8, shares=False, across=1, choices=PLAIN, **workload):
    """Strategies at random; as many ranks as possible share the images of each layer if ``shares``, ``across`` of them side by
    side (0: any number)."""
    family = "vgg" if isinstance(sizes, VGGSizes) else "resnet"
    graph = BuiltIn(family, sizes).graph()
    strategies = random_strategies(graph, level_sizes, seed, choices=choices, samples=samples)
    for layer in graph.layers if shares else ():
        offered = [s for s in enumerate_strategies(layer, level_sizes) if s.fits(layer, samples)]
        most = max((s for s in offered if not s.columns), key=lambda s: s.p0)
        if layer.is_image and most.p0 > samples:
            tiled = [s for s in tilings(layer, most, samples) if across in (0, s.tiles[1])]
            strategies[layer.name] = random.Random(f"{seed} {layer.name}").choice(tiled or [most])
    # Batch norms and largest elements amplify rounding errors.
    return Case(family, sizes, graph, strategies, Workload(samples, samples, "float64", **workload))


CASES = {
    "vgg's channels on 2x2, recomputed": lambda: case_of(VGG, (2, 2), 3, samples=4, recompute="layers"),
    "vgg's rows on 2": lambda: case_of(VGG, (2,), 4, samples=1, shares=True),
    "resnet's channels on 4": lambda: case_of(RESNET, (4,), 7),
    "resnet's channels on 2x2, divided": lambda: case_of(BOTTLENECKS, (2, 2), 8, choices=Choices((1, 2))),
    "resnet's rows on 4": lambda: case_of(RESNET, (4,), 9, samples=2, shares=True),
    "resnet's rows on 4, recomputed": lambda: case_of(RESNET, (4,), 6, samples=1, shares=True, recompute="layers"),
    "resnet's rows on 2x2": lambda: case_of(BOTTLENECKS, (2, 2), 10, samples=2, shares=True),
    "vgg's columns on 2": lambda: case_of(VGG, (2,), 4, samples=1, shares=True, across=2),
    "vgg's tiles on 4": lambda: case_of(VGG, (4,), 4, samples=1, shares=True, across=2),
    "resnet's tiles on 2x2, recomputed": lambda: case_of(
        RESNET, (2, 2), 6, samples=1, shares=True, across=2, recompute="layers"
    ),
    "resnet's rows, columns and tiles on 4": lambda: case_of(BOTTLENECKS, (4,), 3, samples=1, shares=True, across=0),
    "resnet's tiles on 2x4": lambda: case_of(RESNET, (2, 4), 6, samples=1, shares=True, across=4),
    "resnet together on 4": lambda: case_of(TOGETHER, (4,), 11),
    "resnet together, rows on 2x2, blocks recomputed": lambda: case_of(
        TOGETHER, (2, 2), 12, samples=2, shares=True, recompute="blocks"
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_values_and_steps(ranks, name):
    check_pass(CASES[name](), ranks)


# ---- Training, bytes, exported files -------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["resnet's channels on 4", "resnet together, rows on 2x2, blocks recomputed"])
def test_losses_parameters_and_running_statistics_after_three_steps(ranks, name):
    """Slow: the whole model and the plan train side by side. The state dict has the means of the ranks' running statistics."""
    case = CASES[name]()
    case = replace(case, workload=replace(case.workload, batch=2 * case.workload.batch))
    for result in ranks(case.num_ranks).run(f"{JOBS}:train", *case.arguments, ["momentum"], 3):
        for errors in result.values():
            assert "layer1.0.bn1.running_var" in errors and "bn1.num_batches_tracked" in errors
            assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.ranks
def test_evaluation_has_the_same_running_statistics_on_all_ranks(ranks):
    """After training steps the plan and one device with its state dict give the same loss in evaluation, in both directions."""
    case = CASES["resnet's channels on 4"]()
    for losses in ranks(4).run(f"{JOBS}:evaluate", *case.arguments):
        assert losses["applied"] == pytest.approx(losses["plain"], rel=1e-9)
        assert losses["loaded"] == pytest.approx(losses["plain"], rel=1e-9)
        assert losses["before"] != pytest.approx(losses["plain"], rel=1e-2)


#: Large enough that what a pass sends is far more than the messages' overhead.
WIDE = replace(RESNET, image=128, width=16)
COUNTED = {
    "channels on 2": lambda: case_of(VGG, (2,), 1),
    "channels and divided states on 2x2": lambda: case_of(WIDE, (2, 2), 3, choices=Choices((1, 2))),
    "rows on 4": lambda: case_of(WIDE, (4,), 5, samples=2, shares=True),
    "rows on 2x4": lambda: case_of(WIDE, (2, 4), 6, samples=1, shares=True),
    "tiles on 4": lambda: case_of(WIDE, (4,), 7, samples=1, shares=True, across=2),
    "rows, columns and tiles on 2x4": lambda: case_of(WIDE, (2, 4), 6, samples=1, shares=True, across=0),
    "batch norms together on 4": lambda: case_of(replace(WIDE, synchronised=True), (4,), 11),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", COUNTED)
def test_bytes_of_a_pass(counted_ranks, name):
    """Slow: up to eight ranks are started on two cores."""
    check_pass(COUNTED[name](), counted_ranks, counts_pass=True)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["vgg's rows on 2", "resnet's tiles on 2x2, recomputed", "resnet's rows, columns and tiles on 4"]
)
def test_exported_files(counted_ranks, tmp_path, name):
    """Slow: ranks import the file, and train beside the applied plan."""
    case = CASES[name]()
    workload = replace(case.workload, batch=2 * case.workload.batch, precision="float32")
    exported = test_exported.Case(BuiltIn(case.model, case.sizes), case.strategies, workload)
    path = test_exported.exported(exported, tmp_path)
    arguments = exported.built_in, exported.graph, exported.strategies, exported.workload, path, True
    test_exported.check(lambda: counted_ranks(case.num_ranks).run(f"{test_exported.JOBS}:train_both", *arguments))


# ---- Plans -------------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_plan_of_a_resnet_is_verified(counted_ranks):
    """Slow: all sections are counted. Images and channels are scaled down."""
    planned = make_plan(resnet(18), load_cluster("piz-daint").resized(4, 1), Options(batch=4))
    plan = unpipelined_plan(planned.graph, planned.cluster, planned.workload, planned.strategies)
    assert any(strategy.p1 * strategy.p2 > 1 for name, strategy in plan.strategies.items() if plan.graph[name].is_image)
    limits = Limits(memory_bytes=4e9, flops=4e10)
    verification = verify(plan, 4, options=VerifyOptions(limits=limits), pool=counted_ranks(4))
    assert verification.is_right, verification.faults
    assert any(change.what == "image" for change in verification.changes)
    assert any("float64" in note for note in verification.notes)


# ---- Pipelines -----------------------------------------------------------------------------------------------------------------


def images_in_a_pipeline(built_in, mesh, seed, **options):
    schedule, num_units = test_exported_pipelines.schedule("1f1b", 2, policy="A"), chain_of(built_in.graph()).num_units
    return pipelined(
        built_in, schedule, (num_units // 3, num_units - num_units // 3), mesh, seed=seed, shares=True, **options
    )


#: Batch norms of two pixels of 64 x 64 images would amplify rounding errors of double precision beyond the tolerance.
SMALL_VGG, SMALL_RESNET = BuiltIn("vgg", VGG), BuiltIn("resnet", replace(RESNET, image=128))
#: From ranks that share images to others, to ranks with channels of whole images, and to a single rank.
PIPELINES = {
    "vgg's tiles on 2 x 2": lambda: images_in_a_pipeline(SMALL_VGG, StageMesh(1, 2), 2, micro_batch=1, tiles=True),
    "resnet on 2 x 2": lambda: images_in_a_pipeline(SMALL_RESNET, StageMesh(1, 2), 1, micro_batch=1),
    "vgg on 2 + 1": lambda: images_in_a_pipeline(
        SMALL_VGG, Division((StageMesh(1, 2), StageMesh(1, 1))), 3, micro_batch=1
    ),
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
def test_checkpoints_have_running_statistics(ranks, tmp_path):
    """A pipeline's statistics are restored in it, and in a plan of one stage on as many ranks."""
    pipeline = PIPELINES["resnet on 2 x 2"]()
    case = case_of(SMALL_RESNET.sizes, (4,), 7, samples=4)
    alone = unpipelined_plan(case.graph, cluster_of(case.strategies), case.workload, case.strategies)
    plans = [(plan.graph, stage_plans(plan), plan.evaluation.schedule, plan.workload) for plan in (pipeline, alone)]
    results = ranks(4).run(f"{JOBS}:save_and_restore", "resnet", SMALL_RESNET.sizes, plans, tmp_path)
    for trained, again, other in results:
        assert any("running_mean" in name and abs(value).max() > 0 for name, value in trained.items())
        for name, value in trained.items():
            assert (again[name] == value).all() and (other[name] == value).all(), name


@pytest.mark.ranks
def test_an_exported_pipeline(counted_ranks, tmp_path):
    """Slow: ranks import the file, and train beside the runtime."""
    plan = PIPELINES["vgg on 2 + 1"]()
    arguments = SMALL_VGG, plan, test_exported_pipelines.exported(plan, tmp_path), 1
    results = counted_ranks(3).run(f"{test_exported_pipelines.JOBS}:train_both", *arguments)
    test_exported_pipelines.check_against_runtime(plan, results)
    test_exported_pipelines.check_bytes_of_a_run(counted_ranks(3), arguments, results)
