"""The FLOPs of a product that reaches half of the rate, fitted to products of several shapes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoddl
from autoddl.calib.clusterfile import calibrated_document, fit_samples
from autoddl.calib.device import fit_device, half_speed_of
from autoddl.calib.devices import elementwise_on, shapes_on
from autoddl.calib.measurements import Sample
from autoddl.costmodel.cluster import from_document, load_cluster
from autoddl.costmodel.devices import GPU
from autoddl.text.fits import fit_text

from .synthetic import ring, samples_of

A100 = load_cluster("dgx-a100")
LAUNCH_S, MEMORY, ITEM = 5e-6, 1.5e12, 2


def measured(
    rate: float,
    half_speed: float,
    noise: float = 0.0,
    repetitions: int = 5,
    disturbed: float = 0.0,
    seed: int = 0,
    shapes: Sequence[tuple[int, int, int]] = shapes_on(GPU),
) -> list[Sample]:
    """Products, by default of the shapes of a calibration on GPUs, and element-wise operations, by the formula.

    Args:
        rate: FLOP/s.
        half_speed: FLOPs.
        noise: relative deviation of a repetition.
        repetitions: of each operation.
        disturbed: part of the repetitions that take five times as long.
        seed: of the noise.
        shapes: (m, k, n) of the products.
    """
    rng, found = np.random.default_rng(seed), []
    for m, k, n in shapes:
        nbytes = ITEM * (m * k + k * n + m * n)
        seconds = LAUNCH_S + (2 * m * k * n + half_speed) / rate + nbytes / MEMORY
        found.append(("matmul", nbytes, seconds, f"{m}x{k}x{n}"))
    found += [("elementwise", size, LAUNCH_S + size / MEMORY, "") for size in elementwise_on(GPU)]
    return [
        Sample(kind, "device", 1, nbytes, i, seconds * (1 + noise * rng.standard_normal()) * (5 if rng.random() < disturbed else 1),
               shape=shape, precision="mixed", device="NVIDIA A100", network="NCCL", job_ranks=16, ranks_per_node=8)
        for kind, nbytes, seconds, shape in found for i in range(repetitions)
    ]  # fmt: skip


@given(st.floats(1e12, 1e15), st.floats(1e9, 2e10))
@settings(max_examples=6, deadline=None)
def test_constants_are_found_again(rate: float, half_speed: float) -> None:
    """Where F0 takes at least a fifth of the launch; below it is hardly seen among products of a microsecond and more."""
    half_speed = max(half_speed, 0.2 * LAUNCH_S * rate)
    fit = fit_device(measured(rate, half_speed))
    assert fit is not None
    value, draws = half_speed_of(fit, "mixed")
    assert value == pytest.approx(half_speed, rel=1e-3) and draws == pytest.approx(value, rel=1e-2)
    assert fit.parameters["launch"] == pytest.approx(LAUNCH_S, rel=1e-3)
    assert 1 / fit.parameters["work mixed"] == pytest.approx(rate, rel=1e-3)
    assert max(one.error for one in fit.held_out) < 1e-3


def test_noise_and_other_processes_are_borne() -> None:
    """3 % of noise, and every tenth repetition takes five times as long."""
    fit = fit_device(measured(200e12, 2e9, noise=0.03, repetitions=15, disturbed=0.1))
    assert fit is not None and fit.error < 0.03
    value, draws = half_speed_of(fit, "mixed")
    low, high = np.quantile(draws, [0.005, 0.995])
    assert value == pytest.approx(2e9, rel=0.15) and low <= 2e9 <= high
    assert len(fit.held_out) == len(shapes_on(GPU)) and np.median([one.error for one in fit.held_out]) < 0.05


def test_what_is_not_seen_is_not_fitted() -> None:
    """No F0: products follow from launch and rate alone.  Or nothing tells it from the launch.  Or there are too few shapes."""
    without = fit_device(measured(200e12, 0.0, noise=0.03))
    assert without is not None and half_speed_of(without, "mixed")[0] == 0.0
    products = [sample for sample in measured(200e12, 2e9) if sample.collective == "matmul"]
    alone = fit_device(products)
    assert alone is not None and half_speed_of(alone, "mixed")[0] == 0.0
    assert alone.parameters["launch"] == pytest.approx(LAUNCH_S + 2e9 / 200e12, rel=1e-3)  # both together
    shapes = list(dict.fromkeys(sample.shape for sample in products))[:3]
    few = fit_device([one for one in measured(200e12, 2e9) if one.collective == "elementwise" or one.shape in shapes])
    assert few is not None and not few.held_out and half_speed_of(few, "mixed")[0] == 0.0


TINY = ((8, 8, 8), (8, 16, 8), (16, 8, 8), (16, 16, 8), (4, 8, 8), (4, 4, 8))


def test_tiny_products_have_none() -> None:
    """Products of at most 4096 FLOPs do not show a rate of 200 TFLOP/s, nor at how many FLOPs half of it is reached."""
    fit = fit_device(measured(200e12, 2e9, noise=0.05, shapes=TINY))
    assert fit is not None and half_speed_of(fit, "mixed")[0] == 0.0
    assert fit.parameters["work mixed"] > 0  # the rate is finite


def test_the_cluster_file_has_it_and_prices_use_it() -> None:
    """2 GFLOP at 200 TFLOP/s: a product of 512^3 takes 5 us of launch + (0.27 + 2) / 200000 s + 1 us of memory."""
    samples = [*samples_of(ring(5e-6, 1e-11), noise=0.0, repetitions=1, jobs=(2, 4, 8)), *measured(200e12, 2e9)]
    fit = fit_samples(samples)
    document = calibrated_document(fit, A100, "ours")
    entry = document["device"]["half_speed"]["mixed"]
    assert (entry["unit"], entry["value"]) == ("GFLOP", pytest.approx(2.0, rel=1e-3))
    assert "measured" in entry["source"] and entry["interval"] == pytest.approx([2.0, 2.0], rel=1e-2)
    assert set(document["device"]["half_speed"]) == {"mixed"}
    cluster = from_document(document, "ours")
    assert cluster.device.half_speed == {"mixed": pytest.approx(2e9, rel=1e-3)}
    by_hand = LAUNCH_S + (2 * 512**3 + 2e9) / 200e12 + ITEM * 3 * 512**2 / MEMORY
    assert cluster.matmul_time(512, 512, 512, "mixed", ITEM) == pytest.approx(by_hand, rel=1e-3)
    # Files of earlier versions have none.
    earlier = deepcopy(document)
    del earlier["device"]["half_speed"]
    without = from_document(earlier, "ours")
    assert without.device.half_speed == {}
    # A step of a perceptron of two layers has 2 + 3 products, since the input needs no gradient.  Each takes 2 GFLOP longer.
    step_s, shorter_s = (
        autoddl.price("mlp:512,512,512", cluster=own, nodes=1, devices_per_node=1, batch=512, micro_batch=512).step_s
        for own in (cluster, without)
    )
    assert step_s - shorter_s == pytest.approx(5 * 2e9 / 200e12, rel=1e-3)
    text = str(fit_text(fit))
    assert "half of it at" in text and "2 GFLOP [2 GFLOP, 2 GFLOP]" in text and "Held-out products" in text
    assert "256 x 512 x 512" in text and "each shape predicted from the others" in text


def test_every_precision_has_its_own() -> None:
    both = [*measured(200e12, 2e9), *(replace(one, precision="float32") for one in measured(15e12, 1e8))]
    fit = fit_device(both)
    assert fit is not None and fit.rates == ("float32", "mixed")
    found = {rate: half_speed_of(fit, rate)[0] for rate in fit.rates}
    assert found == {"float32": pytest.approx(1e8, rel=0.02), "mixed": pytest.approx(2e9, rel=0.02)}


def test_a_precision_may_have_none() -> None:
    """With this noise, a fit of F0 in both precisions finds 2 MFLOP where there is none."""
    single = measured(15e12, 0.0, noise=0.03, repetitions=15, seed=2)
    both = [
        *measured(200e12, 2e9, noise=0.03, repetitions=15, seed=102),
        *(replace(one, precision="float32") for one in single),
    ]
    fit = fit_device(both)
    assert fit is not None
    assert half_speed_of(fit, "mixed")[0] == pytest.approx(2e9, rel=0.15) and half_speed_of(fit, "float32")[0] == 0.0
