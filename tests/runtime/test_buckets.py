"""Gradients of several layers are summed in few vectors, and messages between ranks leave at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.load import is_available
from autoddl.zoo.builtin import BuiltIn, MLPSizes

AVAILABLE = is_available()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)]
JOBS = Path(__file__).with_name("bucket_jobs.py")
MODEL = BuiltIn("mlp", MLPSizes((64, 64, 64, 64, 64)))
#: Bytes of the weight of a layer on every rank; there are no biases.
LAYER_BYTES = 4 * 64 * 64


def test_layers_share_sums(ranks):
    """Data parallel layers: a sum for each layer, for two of them, or for all; bytes and values are the same."""
    strategies = {layer.name: Strategy(((2, 1, 1),)) for layer in MODEL.graph().layers}
    results = {
        size: ranks(2).run(f"{JOBS}:sums_of_gradients", MODEL, strategies, 8, size)
        for size in (0, LAYER_BYTES, LAYER_BYTES + 1, 10 * LAYER_BYTES)
    }
    counts = {size: result[0]["counts"]["all-reduce"] for size, result in results.items()}
    assert counts == {0: 4, LAYER_BYTES: 4, LAYER_BYTES + 1: 2, 10 * LAYER_BYTES: 1}
    expected = results[0][0]
    for result in results.values():
        for own in result:
            assert own["sent"] == pytest.approx(expected["sent"], abs=16) and own["loss"] == expected["loss"]
            assert own["gradients"].keys() == expected["gradients"].keys()
            for name, gradient in own["gradients"].items():
                np.testing.assert_allclose(gradient, expected["gradients"][name], rtol=1e-6, atol=1e-9)


def test_layers_that_are_summed_over_other_ranks_have_buckets_of_their_own(ranks):
    """On 2 x 2 ranks every second layer divides its features over two ranks, and is summed over the two others."""
    whole, divided = Strategy(((4, 1, 1),)), Strategy(((2, 2, 1),))
    names = [layer.name for layer in MODEL.graph().layers]
    strategies = {name: divided if number % 2 else whole for number, name in enumerate(names)}
    separate, together = (
        ranks(4).run(f"{JOBS}:sums_of_gradients", MODEL, strategies, 8, size) for size in (0, 10 * LAYER_BYTES)
    )
    saved = separate[0]["counts"]["all-reduce"] - together[0]["counts"]["all-reduce"]
    assert saved == 2  # two pairs of layers
    for own, other in zip(separate, together):
        assert own["sent"] == pytest.approx(other["sent"], abs=64)
        for name, gradient in own["gradients"].items():
            np.testing.assert_allclose(gradient, other["gradients"][name], rtol=1e-5, atol=1e-8)


def priced_messages(strategies, bucket_bytes):
    """Messages of the sums of gradients, as the layers are priced."""
    graph, workload = MODEL.graph(), Workload(8, 8, bucket_bytes=bucket_bytes)
    priced = assess(graph, load_cluster("local-cpu").resized(1, 2), workload, strategies)
    return sum(step.messages for layer in priced.layers for step in layer.work.gradient)


@pytest.mark.parametrize("bucket_bytes", [LAYER_BYTES // 2, 2 * LAYER_BYTES, 3 * LAYER_BYTES, 5 * LAYER_BYTES])
def test_priced_messages_are_sent(ranks, bucket_bytes):
    """Exactly, or less than a sum too low for the last bucket, and a layer's share too high for each bucket that overflows."""
    strategies = {layer.name: Strategy(((2, 1, 1),)) for layer in MODEL.graph().layers}
    sent = ranks(2).run(f"{JOBS}:sums_of_gradients", MODEL, strategies, 8, bucket_bytes)[0]["messages"]
    messages_of_a_sum, messages_of_the_loss = 2, 1
    sums = (sent - messages_of_the_loss) / messages_of_a_sum
    priced = priced_messages(strategies, bucket_bytes) / messages_of_a_sum
    share = min(1, LAYER_BYTES / bucket_bytes)
    assert priced == pytest.approx(4 * share)
    assert -1 < priced - sums < sums * share
    if 4 % max(1, bucket_bytes // LAYER_BYTES) == 0:
        assert priced == pytest.approx(sums)


def test_connections_between_ranks_wait_for_no_acknowledgement(ranks):
    """Both ends: OneFlow itself sets the option on the rank that connects, and not on the one that accepts."""
    options = ranks(4).run(f"{JOBS}:connections")
    assert all(len(own) >= 3 and set(own) == {1} for own in options), options
