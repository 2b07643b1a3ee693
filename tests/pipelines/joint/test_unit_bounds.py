"""Lower bounds of units, beside all choices of strategies for a unit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.stage_cost import COMPONENTS, Pricing, Replicas
from autoddl.pipelines.joint.stage_search import Passes, StageSearch
from autoddl.zoo import Transformer, gpt

#: A small GPT on two devices: few enough strategies to try all choices for a unit.
PASSES = Passes(8, 8, Replicas())
WAYS = ("none", "layers", "blocks")


@pytest.fixture(scope="module")
def search() -> StageSearch:
    chain, cluster = chain_of(gpt(Transformer("small", 3, 64, 4, 8, 128))), load_cluster("dgx-a100").resized(1, 2)
    return StageSearch(chain, StageMesh(1, 2), cluster, Workload(8, 8, "mixed", "adam"), Pricing())


def all_sums(search: StageSearch, unit: int, way: str) -> np.ndarray:
    """The sums of all choices for a unit, shape (choices, components), without what a stage does not add up."""
    own, plain = (search.table(unit, unit + 1, name, PASSES) for name in (way, "none"))
    assert own is not None and plain is not None
    choices = np.array(list(product(*(range(len(one)) for one in own.table.sums))), dtype=np.intp)
    sums = own.table.evaluate(choices)[0][:, : len(COMPONENTS)]
    without = replace(plain.table, edges=()).evaluate(choices)[0]
    sums[:, COMPONENTS.index("state")] = without[:, COMPONENTS.index("state")]
    sums[:, COMPONENTS.index("recomputed")] = 0.0
    return sums


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(WAYS))
def test_tight_bounds_are_the_least_of_all_choices(search: StageSearch, seed: int, way: str) -> None:
    """Seconds weighted as in a step of milliseconds, bytes as beside a limit of megabytes."""
    dice = np.random.default_rng(seed)
    weights = dice.exponential(1.0, (3, len(COMPONENTS))) * (1.0, 1.0, 1.0, 1e-9, 1e-9, 1e-9)
    arguments = (way, PASSES.replicas, PASSES.micro_batch, PASSES.smallest_pass, weights)
    rough = search.unit_bounds.least(*arguments)
    tight = search.unit_bounds.least(*arguments, is_tight=True)
    vectors = search.unit_bounds.least_vectors(*arguments, is_tight=True)
    assert rough is not None and tight is not None and vectors is not None
    assert (rough <= tight).all()
    assert np.einsum("wuc,wc->wu", vectors[..., :-1], weights) == pytest.approx(tight, rel=1e-9)
    for unit in range(search.chain.num_units):
        least = (all_sums(search, unit, way) @ weights.T).min(axis=0)
        assert tight[:, unit] == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("unit", (0, -1))
def test_gradients_of_shared_weights_are_exchanged(search: StageSearch, unit: int) -> None:
    """The first and the last unit of the GPT share its embeddings."""
    exchange, unit = 1e-9 * np.array([0.0, 0.2, 1.0, 3.0]), unit % search.chain.num_units
    weights = np.array([[1.0, 1.0, share, 1e-13, 1e-13, 0.0] for share in (0.1, 0.3, 1.0, 3.0)])
    arguments = ("none", PASSES.replicas, PASSES.micro_batch, PASSES.smallest_pass, weights)
    tight = search.unit_bounds.least(*arguments, is_tight=True, exchange=exchange)
    vectors = search.unit_bounds.least_vectors(*arguments, is_tight=True, exchange=exchange)
    rough = search.unit_bounds.least(*arguments, exchange=exchange)
    stage = search.table(unit, unit + 1, "none", PASSES)
    assert tight is not None and rough is not None and vectors is not None and stage is not None
    choices = np.array(list(product(*(range(len(one)) for one in stage.table.sums))), dtype=np.intp)
    shared = stage.table.evaluate(choices)[0][:, len(COMPONENTS) :].sum(axis=1)
    assert shared.max() > shared.min() > 0
    sums = all_sums(search, unit, "none") @ weights.T + shared[:, None] * exchange
    assert tight[:, unit] == pytest.approx(sums.min(axis=0), rel=1e-9)
    all_weights = np.column_stack([weights, exchange])
    assert np.einsum("wc,wc->w", vectors[:, unit], all_weights) == pytest.approx(tight[:, unit], rel=1e-9)
    assert (rough <= tight * (1 + 1e-12)).all()


def test_redistributions_inside_a_unit_count_in_tight_bounds_only(search: StageSearch) -> None:
    # Where bytes have a price, parameters are rather divided, and samples elsewhere.
    weights = np.array([[1.0, 1.0, 0.0, price, price, 0.0] for price in np.logspace(-14, -8, 13)])
    arguments = ("none", PASSES.replicas, PASSES.micro_batch, PASSES.smallest_pass, weights)
    rough = search.unit_bounds.least(*arguments)
    tight = search.unit_bounds.least(*arguments, is_tight=True)
    assert rough is not None and tight is not None
    assert (tight > rough * (1 + 1e-6)).any()


@pytest.mark.parametrize("is_tight", (False, True))
def test_the_cheapest_way_is_the_least_of_all_ways(search: StageSearch, is_tight: bool) -> None:
    """Ways that are not looked at closely are no cheaper."""
    dice = np.random.default_rng(1)
    size = PASSES.replicas, PASSES.micro_batch, PASSES.smallest_pass
    weights = {way: dice.exponential(1.0, (40, len(COMPONENTS))) * (1, 1, 1, 1e-9, 1e-7, 1e-9) for way in WAYS}
    factors = {way: np.ones((40, 3)) for way in WAYS}
    found = search.unit_bounds.cheapest_ways(*size, weights, factors, is_tight)
    each = [search.unit_bounds.least(way, *size, rows, is_tight) for way, rows in weights.items()]
    assert found is not None
    assert found[0] == pytest.approx(np.minimum.reduce([one for one in each if one is not None]), rel=1e-9)


def test_redistributions_count_for_the_units_that_are_asked_for(search: StageSearch) -> None:
    """Each weight asks for units; units of one kind count alike."""
    dice = np.random.default_rng(2)
    size, kinds = (PASSES.replicas, PASSES.micro_batch, PASSES.smallest_pass), np.array(search.chain.kinds)
    weights = {way: dice.exponential(1.0, (40, len(COMPONENTS))) * (1, 1, 1, 1e-9, 1e-7, 1e-9) for way in WAYS}
    factors = {way: np.ones((40, 3)) for way in WAYS}
    asked = dice.random((40, search.chain.num_units)) < 0.3
    counts = np.stack([asked[:, kinds == kind].any(axis=1) for kind in kinds], axis=1)
    assert counts.any() and not counts.all()
    some, all_, none = (
        search.unit_bounds.cheapest_ways(*size, weights, factors, is_tight) for is_tight in (asked, True, False)
    )
    assert some is not None and all_ is not None and none is not None
    assert some[0][counts] == pytest.approx(all_[0][counts], rel=1e-9)
    assert some[0][~counts] == pytest.approx(none[0][~counts], rel=1e-9)
    for way, rows in weights.items():
        least = [search.unit_bounds.least(way, *size, rows, is_tight) for is_tight in (asked, True, False)]
        assert least[0] == pytest.approx(np.where(counts, *least[1:]), rel=1e-9)
