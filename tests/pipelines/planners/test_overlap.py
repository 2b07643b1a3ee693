"""All-reduces under the last backward: by hand, and the search's table against single stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.planners import ProfiledWorkload
from autoddl.pipelines.planners.network import AlphaBeta
from autoddl.pipelines.planners.overlap import BUCKET_BYTES, exposed_for_all, exposed_s
from autoddl.pipelines.profile import Profile, ProfiledLayer

CLUSTER = load_cluster("v100-b")
#: Bytes of three quarters of a bucket.
PART = 0.75 * BUCKET_BYTES


def workload(*layers: tuple[float, float], recompute: bool = False) -> ProfiledWorkload:
    """Layers of (seconds of the backward, bytes of the parameters) of one sample."""
    rows = [ProfiledLayer(f"l{i}", 1.0, backward, 8.0, nbytes) for i, (backward, nbytes) in enumerate(layers)]
    return ProfiledWorkload(Profile.chain("p", 1, rows), CLUSTER, 16, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_by_hand(recompute: bool) -> None:
    # Backward of 6 s, from the last layer: layer 3 is complete after 1 s, 2 after 2 s, 1 after 4 s and 0 after 6 s.
    stage = workload((2.0, PART), (2.0, 2 * BUCKET_BYTES), (1.0, PART), (1.0, PART), recompute=recompute)
    second = AlphaBeta(0.0, 1 / BUCKET_BYTES)  # per bucket of 25 MiB
    # Layers 3 and 2 (1.5 s from 2 s on, until 3.5), layer 1 (2 s from 4 s on, until 6), layer 0 (0.75 s from 6 s on).
    assert exposed_s(stage, 0, 4, 1, second) == pytest.approx(0.75)
    # Half a second per all-reduce: the second one ends at 6.5 s, the third at 7.75 s.
    assert exposed_s(stage, 0, 4, 1, AlphaBeta(0.5, 1 / BUCKET_BYTES)) == pytest.approx(1.75)
    # Without layer 0: until 6 s, and the backward ends at 4 s.
    assert exposed_s(stage, 1, 4, 1, second) == pytest.approx(2.0)
    # A slow network: 1 + 4 x (1.5 + 2 + 0.75) s after the start of the first one at 2 s.
    assert exposed_s(stage, 0, 4, 1, AlphaBeta(0.0, 4 / BUCKET_BYTES)) == pytest.approx(2 + 4 * 4.25 - 6)
    # Two samples take twice as long: the whole of the last bucket is exposed, as it is complete at the end.
    assert exposed_s(stage, 0, 4, 2, second) == pytest.approx(0.75)


def test_layers_without_parameters_hide_more() -> None:
    # The last bucket is complete after 1 s, and the backward goes on for 5 s more.
    stage = workload((5.0, 0.0), (1.0, BUCKET_BYTES))
    assert exposed_s(stage, 0, 2, 1, AlphaBeta(0.0, 4 / BUCKET_BYTES)) == 0
    assert exposed_s(stage, 0, 2, 1, AlphaBeta(0.0, 7 / BUCKET_BYTES)) == pytest.approx(2.0)
    assert exposed_s(stage, 0, 1, 1, AlphaBeta(1.0, 1.0)) == 0  # nothing to sum
    assert exposed_s(stage, 0, 2, 1, AlphaBeta(0.0, 0.0)) == 0  # one device


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.sampled_from([0.0, 0.4, 0.75, 1.0, 3.0])), min_size=1, max_size=9
    ).filter(lambda layers: any(backward for backward, _ in layers)),
    st.lists(st.tuples(st.integers(1, 4), st.floats(0.0, 1.0), st.floats(0.0, 4.0)), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_table_of_the_search_is_that_of_single_stages(layers, groups, recompute) -> None:
    stages = workload(*((backward, share * BUCKET_BYTES) for backward, share in layers), recompute=recompute)
    slices = [size for size, _, _ in groups]
    costs = [AlphaBeta(latency, seconds / BUCKET_BYTES) for _, latency, seconds in groups]
    for stop in range(1, len(layers) + 1):
        table = exposed_for_all(stages, stop, slices, costs)
        for group, (size, cost) in enumerate(zip(slices, costs)):
            for first in range(stop):
                single = exposed_s(stages, first, stop, size, cost)
                assert table[group, first] == pytest.approx(single, abs=1e-9)
                # Between nothing and everything after the backward, bucket by bucket.
                whole = cost.seconds_per_byte * stages.parameter_bytes(first, stop) + cost.latency_s * (stop - first)
                assert 0 <= single <= whole * (1 + 1e-9)
