"""Rows of stages: coarse ones, those without memory, and filters by what a stage exchanges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.arc_rows import Arc, CoarseArc, coarse
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.stage_cost import Pricing, Replicas
from autoddl.pipelines.joint.stage_search import Passes, RowFilter, StageDemand, StageFront, StageSearch
from autoddl.zoo import Transformer, gpt

PASSES, DEMAND, LIMIT = Passes(8, 8, Replicas()), StageDemand(2.0, 1), 1e12
#: Every row is within it.
ANY = RowFilter((0.0,) * 5, 0.0)


@pytest.fixture(scope="module")
def search() -> StageSearch:
    chain, cluster = chain_of(gpt(Transformer("small", 3, 64, 4, 8, 128))), load_cluster("dgx-a100").resized(1, 4)
    return StageSearch(chain, StageMesh(1, 4), cluster, Workload(8, 8, "mixed", "adam"), Pricing())


def figures_of(rows: StageFront) -> np.ndarray:
    """Seconds, bytes, buffer and shared bytes of each row."""
    return np.column_stack([rows.times, rows.memory, rows.buffer, rows.shared])


@given(st.integers(0, 2**32 - 1), st.integers(61, 300), st.integers(1, 5))
def test_coarse_rows_are_no_larger_than_those_that_they_stand_for(seed: int, count: int, num_layouts: int) -> None:
    """Each row has a coarse one of the same layouts that is at most as large in everything, until they are the rows themselves."""
    dice = np.random.default_rng(seed)
    entry, exit_ = dice.integers(-1, num_layouts, (2, count))
    choices = np.arange(count)[:, None]
    rows = StageFront(
        dice.exponential(1.0, (count, 4)),
        dice.exponential(1e9, count),
        dice.exponential(1e6, count),
        dice.integers(0, 3, (count, 1)).astype(float),
        entry,
        exit_,
        ((None, "none", choices[: count // 2]), (None, "stage", choices[count // 2 :])),  # type: ignore[arg-type]
    )
    every, weights = Arc(rows, entry, exit_), np.array([4.0, 4.0, 4.0, 1.0, 1e-9])
    arc = coarse(every, weights)
    sizes = []
    while isinstance(arc, CoarseArc):
        sizes.append(len(arc.rows))
        for row, figures in enumerate(figures_of(rows)):
            same = (arc.entry == entry[row]) & (arc.exit == exit_[row])
            assert (figures_of(arc.rows)[same] <= figures).all(axis=1).any()
        # A coarse row is executed as one of the rows that it stands for: of its layouts, and no smaller.
        executed = np.concatenate([group[2][:, 0] for group in arc.rows.origin])
        assert (entry[executed] == arc.entry).all() and (exit_[executed] == arc.exit).all()
        assert (figures_of(arc.rows) <= figures_of(rows)[executed]).all()
        arc = arc.finer()
    assert arc is every and arc.finer() is None
    assert sizes == sorted(set(sizes)) and sizes[0] == len({*zip(entry.tolist(), exit_.tolist())})


def test_without_memory_rows_are_the_fastest_of_all(search: StageSearch) -> None:
    """Each row is at least as slow as one without memory, which counts with the least memory of the stage."""
    with_memory = search.rows(1, 3, "none", PASSES, DEMAND, (ANY,), LIMIT, is_shared=True)
    without = search.rows(1, 3, "none", PASSES, DEMAND, (ANY,), LIMIT, is_shared=True, has_memory=False)
    assert with_memory is not None and without is not None and len(without) < len(with_memory)
    assert (without.memory == with_memory.memory.min()).all() and not without.buffer.any()
    for times, entry, exit_ in zip(with_memory.times, with_memory.entry, with_memory.exit):
        same = (without.entry == entry) & (without.exit == exit_)
        assert (without.times[same] <= times * (1 + 1e-12)).all(axis=1).any()


@pytest.mark.parametrize("unit", (0, 2))
def test_filters_count_what_a_stage_exchanges(search: StageSearch, unit: int) -> None:
    """The first and the last unit share the embeddings: rows with many of their bytes are left out."""
    rows = search.rows(unit, unit + 1, "none", PASSES, DEMAND, (ANY,), LIMIT, is_shared=True)
    assert rows is not None
    weights, exchange = (1.0, 1.0, 0.0, 1.0, 0.0), 1e-9
    costs = rows.times @ weights[:4] + exchange * rows.shared[:, 0]
    most = float(np.median(costs))
    chosen = RowFilter(weights, most, exchange)
    within = search.rows(unit, unit + 1, "none", PASSES, DEMAND, (chosen,), LIMIT, is_shared=True)
    assert within is not None and 0 < len(within) < len(rows)
    assert len(within) == (costs <= most * (1 + 1e-12)).sum()
    assert len(set(rows.shared[:, 0].tolist())) > 1
