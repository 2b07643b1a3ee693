"""The statistics of rankings by hand, and the choice of strategies."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from autoddl.calib.candidates import spread_strategies
from autoddl.calib.ranked import RankSettings, rank_locally
from autoddl.calib.ranking import floor, pair_accuracy, regret, score, spearman
from autoddl.calib.replay import steps_of
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.search import solve
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.transformers import Transformer, gpt


def test_spearman_is_scipy_s():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 10, 30).astype(float), rng.integers(0, 10, 30).astype(float)
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert spearman(np.ones(5), np.arange(5.0)) == 0.0


def test_pairs_by_hand():
    """Measured 100, 105, 200, 400: (100, 105) is too close to count.  Of the others only (200, 400) is predicted wrong."""
    accuracy, count = pair_accuracy(np.array([1.0, 2.0, 4.0, 3.0]), np.array([100.0, 105.0, 200.0, 400.0]))
    assert count == 5 and accuracy == pytest.approx(4 / 5)
    assert pair_accuracy(np.array([1.0, 1.0]), np.array([1.0, 2.0])) == (0.5, 1)
    assert pair_accuracy(np.array([1.0, 2.0]), np.array([1.0, 1.05])) == (1.0, 0)


def test_regret_by_hand():
    """The predicted best takes 120, the best 100."""
    assert regret(np.array([3.0, 1.0, 2.0]), np.array([100.0, 120.0, 300.0])) == pytest.approx(0.2)
    assert regret(np.array([1.0, 2.0]), np.array([5.0, 6.0])) == 0.0


def test_score_of_rounds():
    truth = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    measured = np.stack([truth, truth * 1.1, truth * 0.9], axis=1)
    found = score(truth * 2, measured)
    assert (found.spearman, found.ceiling, found.pairs) == pytest.approx((1.0, 1.0, 1.0))
    assert found.regret == 0.0 and found.error == pytest.approx(1.0)
    # Odd rounds say the reverse of even ones: the measurement does not agree with itself.
    found = score(truth, np.stack([truth, truth[::-1]], axis=1))
    assert found.ceiling == pytest.approx(-1.0)
    assert np.isnan(score(truth, truth[:, None]).ceiling) and np.isnan(score(truth, truth[:, None]).floor)


def test_floor_by_hand():
    """The best of the odd rounds (0) takes 3 in the even one, where 2 is possible; their best (1) takes 1.5 in place of 1."""
    assert floor(np.array([[1.0, 3.0, 4.0], [1.5, 2.0, 9.0]])) == pytest.approx((0.5 + 0.5) / 2)
    assert floor(np.array([[1.0, 1.1], [2.0, 2.1]])) == 0.0


# ---- Strategies ----------------------------------------------------------------------------------------------------------------


def test_small_spaces_are_enumerated():
    """Three layers on 2 ranks have 3 strategies each: 27 in all, of which those of one layout can follow without redistribution."""
    graph, cluster = mlp([64, 256, 128, 32]), load_cluster("local-cpu").resized(1, 2)
    found = spread_strategies(graph, cluster, Workload(64, 64), 40)
    assert len(found) == 27
    assert len({tuple(own.strategies.values()) for own in found}) == 27


@pytest.mark.parametrize(
    "graph",
    [mlp([64, 256, 128, 32]), gpt(Transformer("small", layers=1, width=64, heads=4, sequence=16, vocabulary=128))],
    ids=["mlp", "gpt"],
)
def test_spread_over_the_predicted_range(graph):
    cluster, workload = load_cluster("local-cpu").resized(1, 4), Workload(64, 64)
    found = spread_strategies(graph, cluster, workload, 40)
    assert len(found) == 40
    assert len({tuple(own.strategies.values()) for own in found}) == 40
    names = " ".join(own.name for own in found)
    assert all(name in names for name in ("least communication", "data parallel", "megatron"))
    optimum = found[0]
    assert optimum.name == "least communication"
    assert optimum.communication_s == pytest.approx(min(own.communication_s for own in found))
    for own in found:
        again = assess(graph, cluster, workload, own.strategies)
        assert (own.communication_s, own.step_s) == (again.communication_s, again.step_s)
    # No gap between neighbours is half of the range.
    logs = np.sort(np.log([max(own.communication_s, 1e-9) for own in found]))
    assert np.diff(logs).max() < 0.5 * (logs[-1] - logs[0])
    assert found == spread_strategies(graph, cluster, workload, 40)


def test_the_optimum_is_the_search_s():
    from autoddl.costmodel.pricing import PriceBook

    graph, cluster, workload = mlp([64, 256, 128, 32]), load_cluster("local-cpu").resized(1, 4), Workload(64, 64)
    table = PriceBook(graph, cluster, workload, untied=True).problem(64, 64, "communication").table
    found = spread_strategies(graph, cluster, workload, 10)
    assert found[0].communication_s == pytest.approx(solve(table, method="exact").cost)


def test_one_strategy_cannot_be_ranked():
    with pytest.raises(UserError, match="1 strategies cannot be ranked; it takes at least 2"):
        spread_strategies(mlp([64, 64]), load_cluster("local-cpu"), Workload(64, 64), 1)


def test_invalid_arguments():
    with pytest.raises(UserError, match="budget -1 s should be more than 0 seconds"):
        RankSettings(budget_s=-1.0)
    with pytest.raises(UserError, match="ranks 1 should be at least 2"):
        rank_locally(mlp([64, 64]), load_cluster("local-cpu").resized(1, 1), Workload(8, 8), RankSettings())


def test_replayed_steps_are_those_that_are_priced():
    graph, cluster, workload = mlp([64, 256, 128, 32]), load_cluster("local-cpu").resized(1, 4), Workload(64, 16)
    for own in spread_strategies(graph, cluster, workload, 12):
        assessment = assess(graph, cluster, workload, own.strategies)
        steps = [step for _, step in steps_of(assessment, workload)]
        assert sum(cluster.time(step) for step in steps) == pytest.approx(assessment.communication_s)
        assert sum(step.sent_bytes for step in steps) == pytest.approx(assessment.sent_bytes)
    only_gradients = assess(graph, cluster, workload, {layer.name: data_parallel([4]) for layer in graph.layers})
    assert len(steps_of(only_gradients, workload)) == 3
