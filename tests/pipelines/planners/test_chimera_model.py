"""Chimera's performance model: by hand, and how far it is from the simulation."""

from __future__ import annotations

import itertools
import random

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.generators import generate
from autoddl.pipelines.planners import ProfiledWorkload, plan_chimera
from autoddl.pipelines.planners.chimera import performance_model
from autoddl.pipelines.planners.transformer import transformer_profile
from autoddl.pipelines.profile import load_profile
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times


def test_equal_stages_by_hand() -> None:
    # N = D = 6: 6 forwards and 10 backwards on the critical path.
    schedule = generate("chimera", num_stages=6, num_micro_batches=6)
    assert performance_model(schedule, Times.of(6, forward=1, backward=2)) == 6 + 2 * 10
    # Recomputation before every backward of the path would be 6 + 3 x 10; those that wait for a gradient are done by then.
    recomputing = generate("chimera", num_stages=6, num_micro_batches=6, recompute=True)
    model = performance_model(recomputing, Times.of(6, forward=1, backward=2))
    assert 6 + 2 * 10 < model < 6 + 3 * 10


def test_messages_by_hand() -> None:
    # D = N = 2, worker 0: down's stage 0 forward, up's stage 1 forward and backward, down's stage 0 backward. Forwards of
    # stage 0 and backwards of stage 1 send: F + c, F, Bk + c, Bk.
    schedule = generate("chimera", num_stages=2, num_micro_batches=2)
    assert performance_model(schedule, Times.of(2, forward=1, backward=2, transfer=0.25)) == 2 * 1 + 2 * 2 + 2 * 0.25


def test_unequal_stages_by_hand() -> None:
    # The same schedule with a last stage of twice the work: 1 + 2 + 4 + 2 on both workers, not 2 (2 + 4).
    schedule = generate("chimera", num_stages=2, num_micro_batches=2)
    assert performance_model(schedule, Times.of(2, forward=[1, 2], backward=[2, 4])) == 9


def test_all_reduces_by_hand() -> None:
    # D = 4: worker 0 is "d . d u U u U D . D" (up is its stage 3): the last U ends at 7, stage 0 ends the compute at 10.
    schedule = generate("chimera", num_stages=4, num_micro_batches=4)

    def model(all_reduce: list[float], overlaps: bool) -> float:
        times = Times.of(4, forward=1, backward=1, all_reduce=all_reduce, all_reduce_overlaps_compute=overlaps)
        return performance_model(schedule, times)

    for overlaps in (False, True):
        assert model([0, 0, 0, 0], overlaps) == 10
        assert model([0.5, 0, 0, 0], overlaps) == 10.5
        assert model([0, 0, 0, 1], overlaps) == 10
    # In free regions only the idle slot before the last D hides 1 of it; otherwise the 3 slots from 7 on do.
    assert model([0, 0, 0, 2.5], overlaps=False) == 11.5
    assert model([0, 0, 0, 2.5], overlaps=True) == 10
    assert model([0, 0, 0, 4], overlaps=True) == 11


def test_without_messages_the_model_is_the_simulation() -> None:
    draw = random.Random(5)
    cases = ((8, "direct"), (24, "direct"), (3, "direct"), (16, "halving"), (16, "doubling"))
    for (count, concatenation), num_pipelines in itertools.product(cases, (2, 4)):
        for recompute in (False, True):
            schedule = generate(
                "chimera",
                num_stages=8,
                num_micro_batches=count,
                num_pipelines=num_pipelines,
                concatenation=concatenation,
                recompute=recompute,
                width=2,
            )
            forward = [draw.uniform(0.5, 2) for _ in range(8)]
            times = Times.of(
                8,
                forward=forward,
                backward=[2 * each for each in forward],
                all_reduce=[draw.uniform(0, 5) for _ in range(8)],
            )
            assert performance_model(schedule, times) == pytest.approx(simulate(schedule, times).makespan)


@pytest.mark.parametrize(
    ("most_message", "tolerance"), [(0.0, 1e-9), (0.1, 0.02), (0.33, 0.05), (1.0, 0.13), (3.0, 0.35)]
)
def test_how_far_messages_take_the_model_from_the_simulation(most_message: float, tolerance: float) -> None:
    """Over a grid of depths and micro-batches: messages as a share of the mean forward, drawn up to ``most_message``."""
    draw = random.Random(11)
    worst = 0.0
    for depth in (2, 4, 8, 16):
        for count in (1, depth // 2, depth, 2 * depth, 4 * depth):
            for recompute in (False, True):
                schedule = generate("chimera", num_stages=depth, num_micro_batches=count, recompute=recompute, width=2)
                forward = [draw.uniform(0.7, 1.3) for _ in range(depth)]
                times = Times.of(
                    depth,
                    forward=forward,
                    backward=[2 * each for each in forward],
                    transfer=[draw.uniform(0, most_message) for _ in range(depth - 1)],
                    all_reduce=[draw.uniform(0, 2) for _ in range(depth)],
                )
                error = performance_model(schedule, times) / simulate(schedule, times).makespan - 1
                assert error >= -1e-9
                worst = max(worst, error)
    assert worst <= tolerance


def grid() -> list[tuple[str, ProfiledWorkload]]:
    """Bert-48 and GPT-2 of the paper on Piz Daint, the public profiles on DAPPLE's clusters."""
    daint = load_cluster("piz-daint")
    found = []
    for nodes, batch in ((8, 64), (32, 256)):
        cluster = daint.resized(nodes)
        profile = transformer_profile(cluster, 48, 1024, 128)
        found.append((f"bert-48 {nodes}", ProfiledWorkload(profile, cluster, batch)))
    cluster = daint.resized(16)
    profile = transformer_profile(cluster, 64, 1312, 632, vocabulary=50257)
    found.append(("gpt-2 16", ProfiledWorkload(profile, cluster, 128)))
    for name in ("v100-a", "v100-b"):
        for model, batch in (("bert-48", 64), ("vgg-19", 2048), ("resnet-50", 2048)):
            found.append((f"{model} {name}", ProfiledWorkload(load_profile(model), load_cluster(name), batch)))
    return found


@pytest.mark.parametrize(("name", "workload"), grid(), ids=[name for name, _ in grid()])
def test_the_model_of_real_models_is_close_to_the_simulation(name: str, workload: ProfiledWorkload) -> None:
    """Transformers: within 4 %. Convolutional networks, whose stages may send longer than they compute: within 25 %."""
    errors = [found.model_s / found.simulated_s - 1 for found in plan_chimera(workload).configurations]
    assert min(errors) >= -1e-9 and max(errors) <= (0.04 if name.startswith(("bert", "gpt")) else 0.25)
