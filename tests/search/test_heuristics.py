"""Metropolis-Hastings: the paper's acceptance rule, at a constant temperature and annealed."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from autoddl.costmodel.table import CostTable, Edge
from autoddl.search import SearchError, metropolis_hastings, solve
from autoddl.search.heuristics import acceptance, chain
from autoddl.search.moves import Assignment

#: Two variables of 2 and 3 options with an edge, costs in seconds, memory in bytes.
TABLE = CostTable(
    names=("a", "b"),
    cost=(np.array([0.0, 1.0]), np.array([0.5, 0.0, 2.0])),
    memory=(np.array([1.0, 2.0]), np.array([1.0, 5.0, 1.0])),
    buffer=(np.zeros(2), np.zeros(3)),
    edges=(Edge(0, 1, np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]])),),
)
STEPS = 200_000


def test_the_acceptance_rule_is_the_papers() -> None:
    """P(S) ~ exp(-b Cost(S)), accepted with min(1, P(new) / P(old)); b = 1 / 2 s."""
    # From 3 s to 4 s: exp(-2) / exp(-1.5) = exp(-1/2) = 0.60653...
    assert acceptance(4.0 - 3.0, 2.0) == pytest.approx(math.exp(-2) / math.exp(-1.5)) == pytest.approx(0.6065306597)
    # From 4 s to 3 s: 1.6487... is more than 1; and equal costs are always accepted.
    assert acceptance(-1.0, 2.0) == acceptance(0.0, 2.0) == 1.0
    # Never to an infinite cost, always from one.
    assert acceptance(math.inf, 2.0) == 0.0 and acceptance(-math.inf, 2.0) == acceptance(math.nan, 2.0) == 1.0


def shares(temperature: float, memory_limit: float | None = None) -> dict[tuple[int, ...], float]:
    """The fraction of a long walk that each choice has."""
    current = Assignment(TABLE, (0, 0), memory_limit)
    walk = chain(current, random.Random(1), STEPS, temperature)
    counts = Counter(tuple(current.choice) for _ in walk)
    return {choice: count / STEPS for choice, count in counts.items()}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("memory_limit", [None, 4.0])
def test_the_walk_has_the_gibbs_distribution(temperature: float, memory_limit: float | None) -> None:
    """Within 0.01 of exp(-cost / T) / Z, over all choices within the limit: 200,000 steps are off by about 0.001 to 0.003."""
    choices = list(itertools.product(range(2), range(3)))
    allowed = [one for one in choices if memory_limit is None or TABLE.peak_memory(one) <= memory_limit]
    assert len(allowed) == (6 if memory_limit is None else 4)
    weights = np.exp([-TABLE.evaluate(one) / temperature for one in allowed])
    found = shares(temperature, memory_limit)
    assert set(found) <= set(allowed)
    assert [found.get(one, 0.0) for one in allowed] == pytest.approx(list(weights / weights.sum()), abs=0.01)


def test_the_seed_decides() -> None:
    rng = np.random.default_rng(0)
    sizes = (20, 20, 20, 20, 20)
    table = CostTable(
        names=tuple("abcde"),
        cost=tuple(rng.random(size) for size in sizes),
        memory=tuple(np.zeros(size) for size in sizes),
        buffer=tuple(np.zeros(size) for size in sizes),
        edges=tuple(Edge(i, j, 5 * rng.random((20, 20))) for i, j in itertools.combinations(range(5), 2)),
    )
    for temperature in (None, 0.5):
        found = [metropolis_hastings(table, evaluations=60, seed=seed, temperature=temperature) for seed in (1, 1, 2)]
        assert found[0].choice == found[1].choice != found[2].choice
        assert found[0].evaluations == 60
    # So hot that everything is accepted, against so cold that nothing worse is: other walks of one seed.
    hot, cold = (solve(table, method="metropolis-hastings", evaluations=300, temperature=t) for t in (1e9, 1e-9))
    assert hot.choice != cold.choice and cold.cost < hot.cost


def test_temperatures_out_of_range() -> None:
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SearchError, match=r"temperature .* should be a finite number of seconds of more than 0"):
            metropolis_hastings(TABLE, temperature=temperature)
    with pytest.raises(SearchError, match="temperature 1 is for metropolis-hastings; random has none"):
        solve(TABLE, method="random", temperature=1.0)
