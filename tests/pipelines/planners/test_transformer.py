"""Transformers that are priced for the device: at each number of samples, not scaled from one."""

from __future__ import annotations

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.planners import ProfiledWorkload, plan_chimera, plan_dapple, plan_wpipe
from autoddl.pipelines.planners.transformer import transformer_profile

CLUSTER = load_cluster("piz-daint").resized(4)


def layer_times(samples: int) -> list[tuple[float, float]]:
    layers = transformer_profile(CLUSTER, 6, 256, 64, micro_batch=samples).layers
    return [(layer.forward_s, layer.backward_s) for layer in layers]


def test_a_layer_by_hand() -> None:
    """b = 2, s = 64, h = 256, a = 4 heads: 128 tokens through six products and nine element-wise kernels."""
    layer = transformer_profile(CLUSTER, 1, 256, 64, micro_batch=2).layers[1]

    def product(k: int, n: int) -> float:
        return CLUSTER.matmul_time(128, k, n, "float32", 4)

    products = product(256, 768) + product(256, 256) + product(256, 1024) + product(1024, 256) + 2 * product(256, 64)
    # Numbers per token: 2 a s twice, 2 h, 3 h and 2 h twice, 8 h.
    numbers = [512, 512, *[512, 768, 512] * 2, 2048]
    kernels = sum(CLUSTER.elementwise_time(4 * 128 * each) for each in numbers)
    assert layer.forward_s == pytest.approx(products + kernels)
    assert layer.backward_s == 2 * layer.forward_s
    # Kept in fp32: s b h (66 + 9 a s / h).
    assert layer.stored_bytes == 128 * 256 * (66 + 9 * 4 * 64 / 256)


def test_the_profile_is_priced_at_each_micro_batch() -> None:
    profile = transformer_profile(CLUSTER, 6, 256, 64)
    assert profile.micro_batch == 1
    for samples in (1, 2, 8, 32):
        assert profile.times(samples) == layer_times(samples)
    # Launches and small products do not grow with the batch, so linear scaling from 1 would be too slow.
    assert profile.times(32)[1][0] < 0.8 * 32 * profile.times(1)[1][0]


def test_planners_take_the_price_at_the_samples_of_a_device() -> None:
    workload = ProfiledWorkload(transformer_profile(CLUSTER, 6, 256, 64), CLUSTER, 64)
    found = plan_dapple(workload).plan
    for stage in found.stages:
        priced = layer_times(-(-found.micro_batch // stage.width))[stage.first : stage.stop]
        assert stage.forward_s == pytest.approx(sum(forward for forward, _ in priced))
        assert stage.backward_s == pytest.approx(sum(backward for _, backward in priced))
    # One micro-batch of 64: all tasks one after another, messages and all-reduces. Scaled from 1 the tasks alone take longer.
    chimera = plan_chimera(workload, micro_batch=64, num_stages=4).plan
    tasks = sum(forward + backward for forward, backward in layer_times(64))
    scaled = 64 * sum(forward + backward for forward, backward in layer_times(1))
    assert tasks < chimera.simulated_s < scaled
    wpipe = min(plan_wpipe(workload, micro_batch=16, depth=1).configurations, key=lambda c: c.period_s)
    assert wpipe.times.forward == pytest.approx(
        [sum(forward for forward, _ in layer_times(16)[a:b]) for a, b in zip(wpipe.cuts, wpipe.cuts[1:])]
    )
