"""Experts on real ranks: loss, gradients, steps and bytes of every way to divide them, with tokens that are dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.verification import verify
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.mixtures import Mixture, mixture

from . import test_exported as exports
from . import test_exported_pipelines as pipelines
from .pipeline_plans import pipelined
from .sent_bytes import Sent, check_sent
from .test_applied import Case, check_pass

SIZES = Mixture(
    "moe",
    layers=1,
    width=64,
    heads=8,
    sequence=16,
    vocabulary=128,
    kv_heads=8,
    intermediate=64,
    activation="silu",
    tied=False,
    experts=8,
    per_token=2,
    expert_width=32,
    capacity_factor=1.0,
)
#: Softmax shares that are not renormalised; a first dense block; shared experts.
DEEP = replace(SIZES, layers=2, dense_layers=1, shared_width=64, renormalises=False, experts=4)
#: Sigmoid shares, of two of four groups, times 2.5.
GROUPED = replace(SIZES, sigmoid=True, scaling=2500, groups=4, groups_per_token=2)

#: A gate of the shared experts, and biases.
GATED = replace(SIZES, shared_width=64, has_shared_gate=True, qkv_bias=True, renormalises=False)
#: Queries, keys and values from low ranks, with and without one for queries.
LATENT = replace(DEEP, kv_heads=0, head_dim=8, rotary_dim=4, value_dim=8, query_rank=32, latent_rank=16)
LITE = replace(LATENT, query_rank=0, value_dim=4)


def case_of(sizes, splits, experts=(), batch=8, zero=0, **workload):
    """All layers at the splits; the experts divided."""
    graph = mixture(sizes)
    strategies = dict.fromkeys((layer.name for layer in graph.layers), Strategy(splits))
    for layer in graph.layers:
        if layer.kind == "experts":
            strategies[layer.name] = Strategy(splits, experts=experts, zero=zero)
        assert strategies[layer.name].divides(layer), layer.name
    return Case("moe", sizes, graph, strategies, Workload(batch, batch, "float32", **workload))


CASES = {
    "1": case_of(DEEP, ((1, 1, 1),)),
    "2 copies": case_of(SIZES, ((2, 1, 1),)),
    "2 features": case_of(DEEP, ((1, 2, 1),)),
    "2 experts": case_of(SIZES, ((2, 1, 1),), (2,)),
    "4 experts": case_of(DEEP, ((4, 1, 1),), (4,)),
    "2 experts, 2 copies": case_of(GROUPED, ((4, 1, 1),), (2,)),
    "2 experts, 2 copies, zero 2": case_of(SIZES, ((4, 1, 1),), (2,), zero=2),
    "2 experts, 2 features": case_of(DEEP, ((2, 2, 1),), (2,)),
    "2 x 2 experts": case_of(SIZES, ((2, 1, 1), (2, 1, 1)), (2, 2)),
    "2 nodes of 2 experts": case_of(GROUPED, ((2, 1, 1), (2, 1, 1)), (1, 2)),
    "2 nodes of 2 features": case_of(SIZES, ((2, 1, 1), (1, 2, 1)), (2, 1)),
    "gated, 2 experts": case_of(GATED, ((2, 1, 1),), (2,)),
    "gated, 2 features": case_of(GATED, ((1, 2, 1),)),
    "latent, 2 experts, 2 features": case_of(LATENT, ((2, 2, 1),), (2,)),
    "latent, 2 features, recomputed": case_of(LITE, ((1, 2, 1),), recompute="layers"),
    "2 experts, recomputed": case_of(SIZES, ((2, 1, 1),), (2,), recompute="layers"),
    "2 experts, blocks recomputed": case_of(DEEP, ((2, 1, 1),), (2,), recompute="blocks"),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_at_every_division(ranks, name):
    check_pass(CASES[name], ranks)


def test_bytes_on_8_ranks(counted_ranks):
    sizes = replace(SIZES, sequence=64, width=128, expert_width=64)
    check_pass(case_of(sizes, ((4, 2, 1),), (2,)), counted_ranks, counts_pass=True)


# ---- Exported files and pipelines ----------------------------------------------------------------------------------------------

PAIR = StageMesh(1, 2)
ONE_F_ONE_B = PipelineSchedule("1f1b", 2, 2, (("policy", "A"),))
#: Two pipelines in opposite directions: each stage has two replicas, whose experts' gradients are summed.
CHIMERA = replace(PipelineSchedule("chimera", 2, 2), num_pipelines=2)


def test_the_exported_file_trains_like_the_plan(counted_ranks, tmp_path):
    case = exports.random_case("moe", DEEP, (2, 2), 6, batch=8)
    assert any(strategy.experts for strategy in case.strategies.values())
    arguments = case.built_in, case.graph, case.strategies, case.workload, exports.exported(case, tmp_path), True
    exports.check(lambda: counted_ranks(4).run(f"{exports.JOBS}:train_both", *arguments))


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_stages_with_experts_train_like_one_device(counted_ranks, tmp_path, name):
    """The runtime and the exported file, four ranks that take turns on a machine of few cores: that takes 10 s."""
    built_in = BuiltIn("moe", replace(SIZES, layers=2))
    plan = pipelined(built_in, ONE_F_ONE_B if name == "1f1b" else CHIMERA, (1, 1), PAIR, seed=6)
    divided = [s for stage in plan.evaluation.configuration.stages for s in stage.strategies.values() if s.experts]
    assert divided
    pool, arguments = counted_ranks(4), (built_in, plan, pipelines.exported(plan, tmp_path), 1)
    results = pool.run(f"{pipelines.JOBS}:train_both", *arguments)
    losses, values = pool.run(f"{pipelines.JOBS}:train_alone", built_in, plan, 1)[0]
    pipelines.check_against_one_device(results, losses, values)
    pipelines.check_against_runtime(plan, results)
    pipelines.check_bytes_of_a_run(pool, arguments, results)


def test_a_verified_pipeline_sends_what_it_is_priced(counted_ranks):
    """Two stages with divided experts: three steps, values, and bytes within 3 %."""
    plan = pipelined(BuiltIn("moe", replace(SIZES, layers=2)), ONE_F_ONE_B, (1, 1), PAIR, seed=6)

    def run():
        return verify(plan, 4, pool=counted_ranks(4))

    def sent(found):
        return [Sent("a run", found.step.sent_bytes, found.step.predicted_bytes, num_readings=0)]

    found = run()
    assert found.faults == () and found.is_right
    check_sent(4, sent(found), lambda: sent(run()))
