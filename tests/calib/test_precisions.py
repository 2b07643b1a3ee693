"""Calibration in several precisions: synthetic samples of two types, files of earlier versions, the choice of the device."""

from __future__ import annotations

import doctest
import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

from autoddl.calib.clusterfile import calibrated_document, fit_samples
from autoddl.calib.device import fit_device
from autoddl.calib.devices import device_type, elementwise_on, precisions_on, shapes_on, sizes_on
from autoddl.calib.measurements import COLUMNS, Sample, SampleFile, read_samples
from autoddl.calib.settings import work_settings
from autoddl.calib.trust import drawn_cluster
from autoddl.costmodel.cluster import from_document, load_cluster
from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE, GPU
from autoddl.costmodel.errors import UserError
from autoddl.text.fits import fit_text

from .synthetic import ring, samples_of

A100, LOCAL = load_cluster("dgx-a100"), load_cluster("local-cpu")
LAUNCH_S, MEMORY = 6e-6, 1.5e12
#: FLOP/s that products reach, and bytes of an element.
RATES = {"mixed": (200e12, 2), "float32": (15e12, 4)}


def work_samples(precisions=("mixed", "float32"), noise: float = 0.0) -> list[Sample]:
    """Products and element-wise operations of a GPU by the formula, by hand."""
    rng, found = np.random.default_rng(1), []
    for name in precisions:
        rate, item = RATES[name]
        for m, k, n in ((256, 512, 512), (1024, 1024, 1024), (4096, 4096, 4096), (128, 4096, 4096), (8192, 8192, 8192)):
            nbytes = item * (m * k + k * n + m * n)
            seconds = LAUNCH_S + 2 * m * k * n / rate + nbytes / MEMORY
            found += [("matmul", nbytes, seconds, f"{m}x{k}x{n}", name)]
        found += [("elementwise", size, LAUNCH_S + size / MEMORY, "", name) for size in (2**16, 2**24, 2**28)]
    return [
        Sample(kind, "device", 1, nbytes, i, seconds * (1 + noise * rng.standard_normal()), shape=shape, precision=name,
               device="NVIDIA A100", network="NCCL", job_ranks=16, ranks_per_node=8)
        for kind, nbytes, seconds, shape, name in found for i in range(5)
    ]  # fmt: skip


def rings() -> list[Sample]:
    return samples_of(ring(5e-6, 1e-11), noise=0.0, repetitions=1, jobs=(2, 4, 8))


def test_rates_of_two_precisions():
    fit = fit_device(work_samples(noise=0.01))
    assert fit is not None and fit.rates == ("float32", "mixed") and fit.error < 0.02
    true = {
        "launch": LAUNCH_S,
        "work float32": 1 / 15e12,
        "work mixed": 1 / 200e12,
        "product float32": 0.0,
        "product mixed": 0.0,
        "memory": 1 / MEMORY,
        "crowding": 0.0,
    }
    assert dict(fit.parameters) == pytest.approx(true, rel=0.03)
    # bfloat16 has the rate of float16 on the tensor cores: clusters give one speed for both.
    both = [
        replace(s, precision="bfloat16") if s.precision == "mixed" and s.repetition % 2 else s for s in work_samples()
    ]
    pooled = fit_device(both)
    assert pooled is not None and pooled.rates == fit.rates
    assert pooled.parameters["work mixed"] == pytest.approx(1 / 200e12, rel=1e-3)


def test_a_cluster_reaches_both_rates():
    """Of 312 TFLOP/s products reach 200 in mixed precision: an efficiency of 0.641.  At this efficiency the peak of float32 is
    15 / 0.641 = 23.4 TFLOP/s, and not the 19.5 of the datasheet, so that products reach the 15 that were measured."""
    document = calibrated_document(fit_samples([*rings(), *work_samples()]), A100, "ours")
    cluster = from_document(document, "ours")
    device = cluster.device
    assert device.efficiency == pytest.approx(200 / 312, rel=1e-3)
    assert device.peak("mixed") == 312e12 and device.peak("float32") == pytest.approx(23.4e12, rel=1e-3)
    source = document["device"]["peak"]["float32"]["source"]
    assert "measured" in source and "reach 15000 GFLOP/s" in source
    assert document["device"]["peak"]["mixed"] == A100.document["device"]["peak"]["mixed"]
    assert cluster.has_gpus and cluster.default_precision == "mixed"
    assert A100.device.half_speed and not device.half_speed  # products were measured: the base's does not count
    for name, (rate, item) in RATES.items():
        by_hand = LAUNCH_S + 2 * 512**3 / rate + item * 3 * 512**2 / MEMORY
        assert cluster.matmul_time(512, 512, 512, name, item) == pytest.approx(by_hand, rel=1e-3)
    assert document["description"].startswith("2 nodes x 8 NVIDIA A100, NCCL; calibrated ")


def test_draws_are_of_the_default_precision():
    """The draws of a cluster price products in mixed precision around their own uncertainty."""
    cluster = from_document(
        calibrated_document(fit_samples([*rings(), *work_samples(noise=0.05)]), A100, "ours"), "ours"
    )
    fit = fit_device(work_samples(noise=0.05))
    assert fit is not None
    drawn = [drawn_cluster(cluster, k).device for k in range(10)]
    reached = [device.efficiency * device.peak("mixed") for device in drawn]
    assert reached == pytest.approx(list(1 / fit.draws["work mixed"][:10]), rel=1e-2)


def test_one_precision_leaves_the_other_peaks():
    document = calibrated_document(fit_samples([*rings(), *work_samples(["float32"])]), A100, "ours")
    assert document["device"]["peak"] == A100.document["device"]["peak"]
    assert document["device"]["efficiency"]["value"] == pytest.approx(15 / 19.5, rel=1e-3)
    only = calibrated_document(fit_samples([*rings(), *work_samples(["mixed"])]), A100, "ours")
    assert only["device"]["efficiency"]["value"] == pytest.approx(200 / 312, rel=1e-3)


def test_local_work_is_listed_by_precision():
    """Two fits, each with a hundred resamples of all points."""

    def names(samples):
        (section,) = [s for s in fit_text(fit_samples(samples)).sections if s[0] == "Local work"]
        return [row[0] for row in section[1].rows]

    two = names([*rings(), *work_samples()])
    assert two == ["one operation", "products in float32", "products in mixed", "memory", "each excess rank per core"]
    assert names([*rings(), *work_samples(["float32"])])[1] == "products"


def test_settings_of_each_precision():
    """Bytes are those of the elements of the compute type."""
    settings = work_settings([(2, 3, 4)], [4096], ["mixed", "float32"])
    assert [(s.collective, s.num_bytes, s.precision) for s in settings] == [
        ("matmul", 52, "mixed"), ("elementwise", 4096, "mixed"), ("matmul", 104, "float32"), ("elementwise", 4096, "float32"),
    ]  # fmt: skip


# ---- Files of earlier versions ---------------------------------------------------------------------------------------------------

EARLIER = (
    "collective,level,ranks,bytes,repetition,seconds,host,time,job_ranks,ranks_per_node,cores,stride,shape,foreign,versions\n"
    "matmul,device,1,104,0,0.001,h,2026-01-02T03:04:05Z,2,2,2,1,2x3x4,0,oneflow 0.9.0\n"
    "all-reduce,intra-node,2,4096,0,0.002,h,2026-01-02T03:04:05Z,2,2,2,1,,0.25,oneflow 0.9.0\n"
)


def test_files_without_types_are_read_and_continued(tmp_path):
    path = tmp_path / "earlier.csv"
    path.write_text(EARLIER + "all-gather,intra")  # cut off
    earlier = read_samples(_copy(path, EARLIER))
    assert [(s.type, s.precision, s.device, s.network) for s in earlier] == [("float32", "", "", ""), ("", "", "", "")]
    file = SampleFile(path)
    assert file.samples == earlier
    added = replace(earlier[0], precision="mixed", device="NVIDIA A100", network="NCCL")
    file.append([added])
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert SampleFile(path).samples == [*earlier, added]
    # Another type is another setting.
    assert [s.repetition for s in read_samples(path)] == [0, 0, 0]
    with pytest.raises(UserError, match="precision is 'half', should be one of float32, mixed, bfloat16"):
        read_samples(_copy(path, path.read_text().replace(",mixed,", ",half,")))


def _copy(path, text):
    other = path.with_name("copy.csv")
    other.write_text(text)
    return other


# ---- The device ------------------------------------------------------------------------------------------------------------------


def test_gpus_are_taken_where_they_are(monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, CPU)
    assert device_type(None, A100, lambda: True) == CPU  # as the user has set it
    monkeypatch.delenv(DEVICE_VARIABLE)

    def never() -> bool:
        raise AssertionError("a cluster of CPU ranks needs no look at GPUs")

    assert device_type(None, LOCAL, never) == device_type(CPU, LOCAL, never) == device_type(CPU, A100, never) == CPU
    assert (device_type(None, A100, lambda: True), device_type(None, A100, lambda: False)) == (GPU, CPU)
    assert device_type(GPU, A100, never) == GPU
    with pytest.raises(UserError, match="device='cuda' needs a base cluster of GPUs, local-cpu has one CPU rank"):
        device_type(GPU, LOCAL, never)
    with pytest.raises(UserError, match="device 'tpu' is not one of cuda, cpu"):
        device_type("tpu", A100, never)


def test_precisions_are_those_of_the_base():
    assert precisions_on(GPU, A100, None) == ("mixed", "float32") and precisions_on(CPU, LOCAL, None) == ("float32",)
    assert precisions_on(GPU, A100, ["bfloat16", "float32"]) == ("bfloat16", "float32")
    assert precisions_on(CPU, A100, ["mixed"]) == ("mixed-cpu",)  # float32 stands in
    with pytest.raises(UserError, match="precision 'mixed' is not defined for one CPU rank"):
        precisions_on(CPU, LOCAL, ["mixed"])


def test_sizes_suit_the_device():
    """The largest product takes some 10 ms: at 40 GFLOP/s on one core, at 100 TFLOP/s on a GPU."""
    largest = {
        device: max(2 * float(np.prod(shape, dtype=float)) for shape in shapes_on(device)) for device in (CPU, GPU)
    }
    assert 0.01 < largest[CPU] / 40e9 < 0.1 and 0.01 < largest[GPU] / 100e12 < 0.1
    assert max(elementwise_on(GPU)) > max(elementwise_on(CPU)) and max(sizes_on(GPU)) == 2**28


@pytest.mark.parametrize(
    "module",
    ["calib.clusterfile", "calib.devices", "calib.hosts", "calib.campaign", "pipelines.runtime.timing",
     "pipelines.runtime.peakmemory", "api.measuredjobs"],
)  # fmt: skip
def test_examples(module):
    results = doctest.testmod(importlib.import_module(f"autoddl.{module}"))
    assert results.failed == 0 < results.attempted


def test_documents_of_two_precisions_are_json():
    document = calibrated_document(fit_samples([*rings(), *work_samples()]), A100, "ours")
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    terms = {r["term"] for r in document["calibration"]["replicates"] if r["level"] == "device"}
    assert terms == {"launch", "work", "memory", "crowding"}  # those that earlier versions read
