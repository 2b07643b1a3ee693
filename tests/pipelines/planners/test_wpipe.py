"""WPipe's planner: its space, its bound, its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.planners import PlannerError, ProfiledWorkload, plan_wpipe
from autoddl.pipelines.planners.transformer import transformer_profile
from autoddl.pipelines.profile import Profile, ProfiledLayer, load_profile

GIB = 2**30


def test_the_space_and_its_bound() -> None:
    """4 machines x 8 V100, half of the paper's: every configuration adds up, fits, and is not faster than its bound."""
    cluster = load_cluster("v100-a").resized(4)
    workload = ProfiledWorkload(load_profile("bert-48"), cluster, 128)
    result = plan_wpipe(workload)
    for found in result.configurations:
        assert found.depth * found.width == 32
        assert found.micro_batch * found.num_micro_batches * found.width == 128
        assert found.num_micro_batches >= found.depth
        assert found.memory_bytes <= 16 * GIB
        assert found.bound_s <= found.period_s * (1 + 1e-9)
        assert sorted(d for devices in found.devices for d in devices) == sorted([*range(32)] * 2)
    assert result.plan.period_s == min(c.period_s for c in result.configurations)


def test_without_communication_the_bound_is_reached() -> None:
    """Equal stages, nothing sent, nothing averaged: no bubble in the steady state."""
    layers = [ProfiledLayer(f"l{i}", 1.0, 2.0, 0.0, 0.0, 1.0) for i in range(8)]
    workload = ProfiledWorkload(Profile.chain("p", 1, layers), load_cluster("v100-b").resized(4), 16)
    result = plan_wpipe(workload)
    # 16 samples of 8 layers of 3 s on 4 devices.
    assert result.plan.period_s == pytest.approx(16 * 8 * 3 / 4)
    assert not result.plan.recompute


def test_tight_memory_is_met_by_recomputation() -> None:
    layers = [ProfiledLayer(f"l{i}", 1.0, 2.0, 1e3, 1e3, 1e9) for i in range(8)]
    workload = ProfiledWorkload(Profile.chain("p", 1, layers), load_cluster("v100-b").resized(2), 8, memory_bytes=9e9)
    tight = plan_wpipe(workload, depth=2, micro_batch=4).plan
    roomy = plan_wpipe(replace(workload, memory_bytes=64e9), depth=2, micro_batch=4).plan
    assert (tight.recompute, roomy.recompute) == (True, False)
    # Table 1: worker i keeps M S_a/(2N) of its first stage and (M - i) S_a/(2N) of its second; M = N = 2, i = 0, and
    # S_a/(2N) is 2 layers of 1 GB for each of 4 samples. With recomputation one stage is alive at a time.
    assert roomy.memory_bytes == pytest.approx((2 + 2) * 8e9, rel=0.01)
    assert tight.memory_bytes == pytest.approx(8e9, rel=0.01)


def test_placement_is_decided_by_what_is_heavier() -> None:
    cluster = load_cluster("v100-a")
    heavy_weights = [ProfiledLayer(f"l{i}", 0.1, 0.2, 1e3, 4e8, 1e3) for i in range(8)]
    heavy_activations = [ProfiledLayer(f"l{i}", 0.1, 0.2, 4e8, 1e3, 1e3) for i in range(8)]
    for layers, placement in ((heavy_weights, "B"), (heavy_activations, "A")):
        result = plan_wpipe(ProfiledWorkload(Profile.chain("p", 1, layers), cluster, 64), depth=2, micro_batch=1)
        assert result.plan.placement == placement


def test_priced_transformer() -> None:
    cluster = load_cluster("dgx-a100")
    profile = transformer_profile(cluster, 24, 1024, 512)
    assert profile.num_layers == 26
    assert profile.layers[1].backward_s == 2 * profile.layers[1].forward_s
    assert plan_wpipe(ProfiledWorkload(profile, cluster, 256)).plan.period_s > 0
    with pytest.raises(PlannerError, match="layers of a transformer is 0"):
        transformer_profile(cluster, 0, 1024, 512)


@pytest.mark.parametrize(
    ("options", "batch", "fault"),
    [
        ({"depth": 32}, 64, "64 stages (2 per worker) are more than the 53 layers of bert-48"),
        ({"depth": 3}, 64, "depth 3 for WPipe should divide the 16 devices of v100-a"),
        ({"micro_batch": 7}, 64, "micro-batch 7 does not divide the batch of 64"),
        ({"depth": 16}, 8, "with d = 16; the nearest batch that works is 16"),
    ],
)
def test_faults(options: dict[str, int], batch: int, fault: str) -> None:
    with pytest.raises(PlannerError) as error:
        plan_wpipe(ProfiledWorkload(load_profile("bert-48"), load_cluster("v100-a"), batch), **options)
    assert fault in str(error.value)
