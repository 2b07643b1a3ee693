"""The document of a planner's result: its figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.pipelines.planners import PlannerError, ProfiledWorkload, plan_chimera, plan_dapple, plan_wpipe
from autoddl.pipelines.planners.document import document_of
from autoddl.pipelines.profile import Profile, ProfiledLayer

CLUSTERS = [load_cluster(name).resized(*sizes) for name in ("v100-a", "v100-c") for sizes in ((1, 1), (2, 1), (2, 2))]
figures = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A few layers, some of which cost nothing, send nothing or have no parameters."""
    rows = draw(st.lists(st.tuples(*[figures] * 5), min_size=1, max_size=5))
    layers = [
        ProfiledLayer(f"layer {i}", forward, backward, *(1e6 * size for size in sizes))
        for i, (forward, backward, *sizes) in enumerate(rows)
    ]
    layers.append(ProfiledLayer("last", 1e-3, draw(figures), 0.0, 1.0, 1.0))
    return Profile.chain("drawn", draw(st.sampled_from([1, 4])), layers)


def numbers(document: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a document, and where it stands."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from numbers(value, f"{where}/{name}")
    elif isinstance(document, list):
        for position, value in enumerate(document):
            yield from numbers(value, f"{where}/{position}")
    elif isinstance(document, (int, float)):
        yield where, document


@settings(max_examples=100, deadline=None)
@given(profiles(), st.sampled_from(CLUSTERS), st.sampled_from([1, 2, 8]), st.booleans())
@pytest.mark.parametrize("plan", [plan_dapple, plan_chimera, plan_wpipe])
def test_no_figure_is_negative(plan: Any, profile: Profile, cluster: Cluster, batch: int, recompute: bool) -> None:
    workload = ProfiledWorkload(profile, cluster, batch, recompute=recompute)
    try:
        document = document_of(plan(workload), workload)
    except PlannerError:
        return
    found = dict(numbers(document))
    assert {where for where, value in found.items() if not 0 <= value < float("inf")} == set()
    assert found["/simulated_s"] > 0 and found["/latency_s"] > 0


def test_the_papers_formula_of_one_micro_batch_on_one_device() -> None:
    """F = 1, B = 5, no all-reduce: as printed it says 0 * 6 + 1 - 5 = -4 s, with the ends of a timeline 6 s."""
    profile = Profile.chain("one", 1, [ProfiledLayer("only", 1.0, 5.0, 0.0, 4.0, 4.0)])
    workload = ProfiledWorkload(profile, CLUSTERS[0], 1)
    document = document_of(plan_dapple(workload), workload)
    assert document["corrected_latency_s"] == document["latency_s"] == document["simulated_s"] == 6.0
