"""Pages of OneFlow code for ``nn.Graph``: they train the same model on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoddl.export import export

from .graph_plans import plan_of

pytestmark = pytest.mark.usefixtures("ranks_of_graphs")
JOBS = Path(__file__).with_name("graph_jobs.py")

#: (samples, model) parts at each level.
SPLITS = {"2": ((1, 2),), "2 x 2": ((2, 1), (1, 2))}


@pytest.mark.parametrize("name", ["mlp", "gpt of two blocks", "vgg"])
def test_pages_compute_the_same_on_one_rank_and_on_several(ranks, tmp_path, name):
    """A page on one rank sends nothing: its losses are the reference. Slow: nn.Graph compiles for several seconds on each."""
    losses = {}
    for label, levels in {"1": ((1, 1),), **SPLITS}.items():
        plan = plan_of(name, *levels)
        page = tmp_path / f"page {label}.py"
        page.write_text(export(plan, "oneflow-graph"))
        num_ranks = plan.cluster.num_devices
        (losses[label], *others) = ranks(num_ranks).run(f"{JOBS}:train_page", str(page), 3)
        assert all(other == losses[label] for other in others)
    assert len(set(losses["1"])) == 3  # it trains
    for label in SPLITS:
        assert losses[label] == pytest.approx(losses["1"], rel=1e-5)


def test_a_page_is_short_and_repeats_no_block():
    """Four blocks are one class; half of the page are the classes of layers."""
    plan = plan_of("gpt of two blocks", (2, 2))
    page = export(plan, "oneflow-graph")
    assert page.count("class Block") == 1 and "nn.ModuleList([Block() for _ in range(2)])" in page
    assert len(page.splitlines()) < 450
    assert not re.search("autoddl[.]|import autoddl", page)
