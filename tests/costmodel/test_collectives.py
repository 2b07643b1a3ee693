"""The ring formulas, by hand and against rings that are run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.cluster import Link
from autoddl.costmodel.collectives import ADJOINT, Collective, Step
from autoddl.costmodel.distribution import Axis

ALPHA, BANDWIDTH = 1e-5, 1e10  # 10 us, 10 GB/s: beta = 1e-10 s/byte


def seconds(collective: Collective, num_devices: int, nbytes: float) -> float:
    return Link(ALPHA, BANDWIDTH).time(Step(collective, Axis(num_devices, 1), nbytes))


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        # p = 4, n = 1 GB: 3 messages of 10 us; 3/4 GB at 10 GB/s = 75 ms.
        (Collective.ALL_GATHER, 3 * 10e-6 + 75e-3),
        (Collective.REDUCE_SCATTER, 3 * 10e-6 + 75e-3),
        (Collective.ALL_TO_ALL, 3 * 10e-6 + 75e-3),
        # Twice that.
        (Collective.ALL_REDUCE, 6 * 10e-6 + 150e-3),
    ],
)
def test_seconds_by_hand(collective, expected):
    assert seconds(collective, 4, 1e9) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("collective", Collective)
def test_one_device_is_free(collective):
    step = Step(collective, Axis(1, 1), 1e9)
    assert (step.messages, step.sent_bytes) == (0, 0) and seconds(collective, 1, 1e9) == 0


@given(st.sampled_from(list(Collective)), st.integers(1, 4096), st.floats(0, 1e15))
def test_price_is_what_is_sent(collective, num_devices, nbytes):
    step = Step(collective, Axis(num_devices, 1), nbytes)
    assert step.sent_bytes == collective.sent_bytes(num_devices, nbytes)
    assert seconds(collective, num_devices, nbytes) == step.messages * ALPHA + step.sent_bytes / BANDWIDTH


def run_ring(num_devices: int, chunk: int) -> tuple[int, int]:
    """Messages and bytes that each device sends when every chunk travels once around the ring to all the others."""
    held = [{device} for device in range(num_devices)]
    newest = list(range(num_devices))
    messages = sent = 0
    while any(len(chunks) < num_devices for chunks in held):
        arriving = [newest[device - 1] for device in range(num_devices)]
        for device, piece in enumerate(arriving):
            assert piece not in held[device]
            held[device].add(piece)
        newest = arriving
        messages, sent = messages + 1, sent + chunk
    return messages, sent


@pytest.mark.parametrize("num_devices", [2, 3, 4, 7, 16])
def test_formulas_are_those_of_a_ring_that_is_run(num_devices):
    chunk = 1000
    messages, sent = run_ring(num_devices, chunk)
    total = chunk * num_devices
    for collective, rounds in [(Collective.ALL_GATHER, 1), (Collective.REDUCE_SCATTER, 1), (Collective.ALL_REDUCE, 2)]:
        assert collective.messages(num_devices) == rounds * messages
        assert collective.sent_bytes(num_devices, total) == pytest.approx(rounds * sent, rel=1e-12)


def test_adjoints():
    assert ADJOINT[Collective.ALL_GATHER] is Collective.REDUCE_SCATTER
    for collective, adjoint in ADJOINT.items():
        assert ADJOINT[adjoint] is collective
        step = Step(collective, Axis(6, 2, 1), 600.0)
        assert step.adjoint().collective is adjoint
        assert (step.adjoint().sent_bytes, step.adjoint().messages) == (step.sent_bytes, step.messages)
        assert step.adjoint().adjoint() == step


def test_text():
    assert str(Step(Collective.ALL_GATHER, Axis(4, 2), 12345)) == "all-gather over 4 (stride 2), 12,345 bytes"


def test_a_calibrated_collective_has_its_own_link():
    link = Link(1e-6, 1e9, {Collective.ALL_TO_ALL: (5e-6, 5e8)})
    assert link.time(Step(Collective.ALL_TO_ALL, Axis(2, 1), 1000)) == pytest.approx(5e-6 + 500 / 5e8)
    assert link.time(Step(Collective.ALL_GATHER, Axis(2, 1), 1000)) == pytest.approx(1e-6 + 500 / 1e9)
