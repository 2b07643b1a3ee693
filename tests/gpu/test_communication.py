"""Collectives, exchanges and transfers of two and four GPUs in every type that they allow. Also on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoddl.costmodel.devices import CPU

from ..runtime.rank_meshes import RankMesh
from ..runtime.test_collectives import MEANING, by_group, calls_along, expected_gradients
from .plan_cases import MESHES

JOBS = Path(__file__).with_name("device_jobs.py")
TIMEOUT_S = 240
#: Types that can be summed, of which those of floating-point numbers have gradients, and types that can only be sent.
SUMMABLE, FLOATING, ONLY_SENT = ("int32", "int64"), ("float32", "float64"), ("int8", "bool")
HALVES = ("float16", "bfloat16")
MOVING = ("all_gather", "all_to_all")
ON_MESHES = [
    pytest.param(name, marks=pytest.mark.gpu(int(np.prod(level_sizes))), id=name)
    for name, level_sizes in MESHES.items()
]
BY_NUMBER = [pytest.param(n, marks=pytest.mark.gpu(n), id=f"{n} devices") for n in (2, 4)]
TYPES = (*FLOATING, *HALVES, *SUMMABLE, *ONLY_SENT)


def type_on(device: str, dtype: str) -> str:
    """The type that a device communicates in place of one of half precision: CPU ranks have none."""
    return "float32" if device == CPU and dtype in HALVES else dtype


@pytest.mark.on_cpu(mesh=("2 x 2",), dtype=("float16", "int8"))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mesh", ON_MESHES)
def test_a_collective_along_every_axis(on, device, mesh, dtype):
    """Forward and backward, along every dimension, with whole numbers, whose sums every type holds exactly."""
    dtype = type_on(device, dtype)
    for axis in RankMesh(MESHES[mesh]).axes:
        calls = [
            (operation, axis, dims, inputs, gradients if dtype in FLOATING + HALVES else None)
            for operation, axis, dims, inputs, gradients in calls_along(axis, np.random.default_rng(0))
            if dtype not in ONLY_SENT or operation in MOVING
        ]
        if dtype == "bool":
            calls = [
                (operation, axis, dims, [x > 0 for x in inputs], None) for operation, axis, dims, inputs, _ in calls
            ]
        results = on(axis.num_ranks).run(f"{JOBS}:collect", calls, dtype, device, timeout_s=TIMEOUT_S)
        assert calls
        for number, (operation, _, dims, inputs, output_gradients) in enumerate(calls):
            for group, xs in by_group(axis, inputs):
                outputs = MEANING[operation](xs, *dims)
                gradients = [None] * len(group)
                if output_gradients is not None:
                    of_group = [output_gradients[rank] for rank in group]
                    gradients = expected_gradients(operation, dims, xs[0].shape, of_group)
                for rank, output, gradient in zip(group, outputs, gradients):
                    got_output, got_gradient = results[rank][number]
                    what = f"{operation}{dims} of {dtype}, rank {rank}"
                    np.testing.assert_array_equal(got_output, output, err_msg=what)
                    if gradient is not None:
                        np.testing.assert_array_equal(got_gradient, gradient, err_msg=f"gradient of {what}")


@pytest.mark.on_cpu(num=(4,), dtype=("bfloat16",))
@pytest.mark.parametrize("dtype", FLOATING + HALVES)
@pytest.mark.parametrize("num", BY_NUMBER)
def test_an_exchange_of_unequal_pieces(on, device, num, dtype):
    """From rows to columns: forward every rank has its columns, backward its rows."""
    rng = np.random.default_rng(1)
    value, gradient = (rng.integers(-9, 10, (2 * num, 3 * num)).astype(float) for _ in range(2))
    dtype = type_on(device, dtype)
    found = on(num).run(f"{JOBS}:exchange_ends", value, gradient, dtype, device, timeout_s=TIMEOUT_S)
    for rank, (output, back) in enumerate(found):
        np.testing.assert_array_equal(output, np.split(value, num, axis=1)[rank])
        np.testing.assert_array_equal(back, np.split(gradient, num, axis=0)[rank])


@pytest.mark.on_cpu(num=(4,), dtype=("float16",))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num", BY_NUMBER)
def test_a_transfer_from_rank_to_rank(on, device, num, dtype):
    rng = np.random.default_rng(2)
    values = [rng.integers(-9, 10, (5, 3)) for _ in range(num)]
    if dtype == "bool":
        values = [value > 0 for value in values]
    arguments = values, type_on(device, dtype), device
    for rank, got in enumerate(on(num).run(f"{JOBS}:pass_around", *arguments, timeout_s=TIMEOUT_S)):
        np.testing.assert_array_equal(got, values[rank - 1])


#: Bytes that each rank sends in a collective of n bytes over p ranks, as a multiple of n.
SENT = {
    "all-reduce": lambda p: 2 * (p - 1) / p,
    "all-gather": lambda p: (p - 1) / p,
    "reduce-scatter": lambda p: (p - 1) / p,
    "all-to-all": lambda p: (p - 1) / p**2,
}
#: A collective whose bus bandwidth is a smaller fraction of that of all-reduce is worth a look.
CONSPICUOUS = 1 / 3


@pytest.mark.on_cpu(num=(2,), dtype=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num", BY_NUMBER)
def test_bus_bandwidths(on, device, note, num, dtype):
    """For reading, not for a verdict: NCCL counts no bytes, so a collective that sent too many would only show by its time.

    The bus bandwidth is the bytes that a rank has to send, by the time; all collectives reach about the same on a good network.
    """
    num_bytes = 2**20 if device == CPU else 64 * 2**20
    arguments = num_bytes, type_on(device, dtype), device, 5 if device == CPU else 20
    found = on(num).run(f"{JOBS}:seconds", *arguments, timeout_s=TIMEOUT_S)
    assert all(set(times) == set(SENT) for times in found)
    rates = {name: num_bytes * SENT[name](num) / max(times[name] for times in found) for name in SENT}
    for name, rate in rates.items():
        remark = " (conspicuously slow)" if rate < CONSPICUOUS * rates["all-reduce"] else ""
        note(f"{name} of {num_bytes / 2**20:g} MiB: {rate / 1e9:.2f} GB/s{remark}")
