"""Plans inside OneFlow's ``nn.Graph``: they compute what one device computes, send what is priced, and others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import erf, expit

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph_meshes import graph_mesh, is_simple_change
from autoddl.costmodel.strategy import Strategy
from autoddl.export import export
from autoddl.pipelines.runtime.graph.meshes import check_graph_plan
from autoddl.pipelines.runtime.ranks.failures import RankError, RankUserError
from autoddl.search.planner import Options, make_plan
from autoddl.verification import Limits, VerifyOptions, executors, run, verify
from autoddl.zoo.builtin import recognise

from .graph_plans import MODELS, plan_of

pytestmark = pytest.mark.usefixtures("ranks_of_graphs")
JOBS = Path(__file__).with_name("graph_jobs.py")

OPTIONS = VerifyOptions(limits=Limits(), executor="graph")
#: Ranks, and (samples, model) parts at each level.
LEVELS = {"2": ((1, 2),), "4": ((2, 2),), "2 x 2": ((2, 1), (1, 2))}


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        *((name, levels) for name in ("mlp", "gpt") for levels in LEVELS),
        *((n, "2 x 2") for n in ("bert", "llama", "vgg")),
    ],
)
def test_families_compute_and_send_as_promised(counted_ranks, name, levels):
    """On 2, 4 and 2 x 2 ranks. Slow: nn.Graph compiles two graphs for each, for several seconds."""
    plan = plan_of(name, *LEVELS[levels], batch=16 if name in ("mlp", "vgg") else 8)
    num_ranks = plan.cluster.num_devices
    found = verify(plan, num_ranks, options=OPTIONS, pool=counted_ranks(num_ranks))
    assert found.faults == ()
    assert found.executor == "graph" and found.step.sent_bytes is not None
    assert max(found.loss_errors) < 1e-5
    names = {p.name for layer in plan.graph.layers for p in layer.parameters if p.tied_to is None}
    for checks in (found.gradients, found.parameters):
        assert {check.name for check in checks} == names


def test_a_crash_inside_a_graph_is_repeated_once(counted_ranks, monkeypatch):
    """And a note says so. Slow: two ranks are started anew, twice."""
    plan = plan_of("mlp", (1, 2), batch=16)

    def verify_with(job):
        graph = replace(executors.executor_of("graph"), run_job=f"{JOBS}:{job}")
        monkeypatch.setattr(run, "executor_of", lambda name: graph)
        return verify(plan, 2, options=OPTIONS, pool=counted_ranks(2))

    found = verify_with("crash_once")
    assert found.faults == () and found.step.sent_bytes is not None
    assert found.notes[-1].startswith("repeated, since rank 1 of 2 crashed with SIGSEGV")
    with pytest.raises(RankError, match="rank 1 of 2 crashed with SIGSEGV"):
        verify_with("crash")


def test_attention_of_one_head(counted_ranks):
    """Its q, k and v are one group, whose sections are modules as those of several groups. Slow: nn.Graph compiles."""
    plan = plan_of("gpt of one head", (2, 1))
    found = verify(plan, 2, options=OPTIONS, pool=counted_ranks(2))
    assert found.faults == ()
    assert "_query = Linear(" in export(plan, "oneflow-graph")


def test_recomputation(counted_ranks):
    """Recomputed layers gather again. Slow: nn.Graph compiles for several seconds."""
    plan = plan_of("mlp", (1, 2), batch=16, recompute="layers")
    found = verify(plan, 2, options=OPTIONS, pool=counted_ranks(2))
    assert found.faults == ()


def test_micro_batches_are_verified_one_at_a_time(counted_ranks):
    """On CPU ranks nn.Graph accumulates unreliably, so the batch is one micro-batch. Slow: it compiles for several seconds."""
    plan = plan_of("mlp", (1, 2), batch=16, micro_batch=4)
    found = verify(plan, 2, options=OPTIONS, pool=counted_ranks(2))
    assert found.faults == ()
    assert [(change.what, change.before, change.after) for change in found.changes] == [("micro-batches", "4", "1")]


def test_accumulation_is_refused_on_cpu_ranks(ranks):
    plan = plan_of("gpt", (1, 2), micro_batch=4)
    with pytest.raises(RankUserError, match=r"the plan has 2 micro-batches, whose gradients nn\.Graph accumulates"):
        ranks(2).run(f"{JOBS}:train_applied", plan, 2)


#: Strategies of the three layers of the perceptron on 4 ranks, between which one mesh axis changes.
CHANGES = {
    "samples to both and back": ((4, 1, 1), (2, 2, 1), (4, 1, 1)),
    "samples to features and back": ((4, 1, 1), (1, 1, 4), (4, 1, 1)),
    "columns to columns": ((1, 4, 1), (1, 4, 1), (1, 1, 4)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_layout_send_their_price(counted_ranks, name):
    """Slow: nn.Graph compiles for several seconds."""
    given = {layer.name: Strategy((split,)) for layer, split in zip(MODELS["mlp"].layers, CHANGES[name])}
    plan = plan_of("mlp", (1, 4), batch=128, given=given, optimizer="sgd")
    found = verify(plan, 4, options=OPTIONS, pool=counted_ranks(4))
    assert found.faults == ()
    assert found.step.deviation is not None and abs(found.step.deviation) < 0.03


def test_an_applied_model_trains_in_a_graph(ranks):
    """`apply` starts from the user's values, and reads and writes plain states. Slow: it compiles."""
    plan = plan_of("gpt", (1, 2))
    for losses, expected, difference, repeated in ranks(2).run(f"{JOBS}:train_applied", plan, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert difference < 1e-5
        assert repeated == pytest.approx(losses[0], rel=1e-6)


def test_epilogues_are_their_formulas(ranks):
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    gelu = x * (1 + erf(x / np.sqrt(2))) / 2
    tanh_gelu = x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
    selu = 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))
    expected = {
        "relu": np.maximum(x, 0),
        "gelu": gelu,
        "fast_gelu": tanh_gelu,
        "gelu_tanh": tanh_gelu,
        "quick_gelu": x * expit(1.702 * x),
        "silu": x * expit(x),
        "sigmoid": expit(x),
        "sigmoid_v2": expit(x),
        "tanh": np.tanh(x),
        "elu": np.where(x > 0, x, np.expm1(x)),
        "selu": selu,
        "mish": x * np.tanh(np.log1p(np.exp(x))),
        "softplus": np.log1p(np.exp(x)),
        "square": x**2,
        "abs": np.abs(x),
        "exp": np.exp(x),
    }
    (found,) = ranks(1).run(f"{JOBS}:epilogues", x)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name], abs=1e-5, rel=1e-5), name


# ---- Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("splits", "summa", "reason"),
    [
        (((1, 2, 2),), False, "only one of p1 and p2 may be above 1"),
        (((2, 2, 1),), True, "Summa"),
        (((2, 2, 1), (2, 2, 1)), False, "at most 2 axes"),
    ],
)
def test_strategies_outside_of_the_boundary_are_refused(splits, summa, reason):
    graph = MODELS["mlp"]
    strategy = Strategy(splits, summa=summa)
    assert graph_mesh(strategy) is None
    with pytest.raises(UserError, match=reason) as refused:
        check_graph_plan(graph, dict.fromkeys((layer.name for layer in graph.layers), strategy))
    assert "fc1" in str(refused.value) and "\n" not in str(refused.value)


def test_changes_of_several_axes_are_refused():
    graph = MODELS["mlp"]
    splits = [((2, 2, 1),), ((1, 4, 1),), ((1, 4, 1),)]
    chosen = {layer.name: Strategy(split) for layer, split in zip(graph.layers, splits)}
    with pytest.raises(UserError, match=r"fc2 .*\(samples:2, features:2\) to \(features:4\)"):
        check_graph_plan(graph, chosen)


def test_levels_of_one_role_are_one_axis():
    merged = graph_mesh(Strategy(((2, 1, 1), (2, 1, 1))))
    assert merged is not None and str(merged) == "(samples:4)"
    both = graph_mesh(Strategy(((2, 1, 1), (2, 2, 1))))
    assert both is not None and str(both) == "(samples:4, features:2)"
    assert not is_simple_change(both, graph_mesh(Strategy(((2, 1, 1), (1, 4, 1)))))


def test_models_are_built_in():
    assert all(recognise(graph) is not None for graph in MODELS.values())


def test_a_plan_of_the_search_with_several_meshes(counted_ranks):
    """Layers change between (samples:4) and (samples:2, features:2). Slow: nn.Graph compiles two graphs for several seconds."""
    graph = MODELS["gpt"]
    options = Options(batch=16, micro_batch=16, precision="float32", recompute=False, objective="communication")
    cluster = load_cluster("dgx-a100").resized(1, 4).with_links(latency_s=2e-6, bandwidth=300e9)
    planned = make_plan(graph, cluster, options)
    meshes = check_graph_plan(graph, planned.strategies)
    assert {str(mesh) for mesh in meshes.values()} == {"(samples:4)", "(samples:2, features:2)"}
    plan = plan_of("gpt", (1, 4), batch=16, given=planned.strategies)
    found = verify(plan, 4, options=OPTIONS, pool=counted_ranks(4))
    assert found.faults == ()
