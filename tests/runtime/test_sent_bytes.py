"""The helper that judges counted bytes: it counts again, and only where it has to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.pipelines.runtime.ranks.wire import MESSAGE_BYTES, NOISE_BYTES

from .sent_bytes import NUM_RECOUNTS, Sent, check_sent

RIGHT = Sent("a gather", 1_000_000 + 12 * MESSAGE_BYTES, 1_000_000, 12)
LARGER = replace(RIGHT, counted=1.06 * RIGHT.counted)
SMALLER = replace(RIGHT, counted=0.94 * RIGHT.counted)
OTHER = Sent("nothing", 0, 0)


class Counts:
    """One count after the other."""

    def __init__(self, *counts: list[Sent]):
        self.counts, self.number = counts, 0

    def __call__(self) -> list[Sent]:
        self.number += 1
        return self.counts[(self.number - 1) % len(self.counts)]


def test_what_is_right_is_not_counted_again():
    again = Counts()
    check_sent(4, [RIGHT, OTHER], again)
    assert again.number == 0


def test_noise_of_another_process_is_counted_again():
    """Each section is right in some count, none of which is right everywhere."""
    noisy = replace(OTHER, counted=1e5)
    again = Counts([LARGER, OTHER], [SMALLER, noisy], [RIGHT, noisy])
    check_sent(4, [LARGER, noisy], again)
    assert again.number == 3


@pytest.mark.parametrize("wrong", [LARGER, SMALLER, replace(OTHER, counted=1e5)], ids=["more", "less", "unpredicted"])
def test_what_is_off_in_every_count_is_wrong(wrong):
    again = Counts([OTHER, wrong])
    with pytest.raises(AssertionError, match="off in each of 5 counts"):
        check_sent(4, [OTHER, wrong], again)
    assert again.number == NUM_RECOUNTS == 4


def test_tolerances():
    edge = 0.03 * 1_000_000 + 4 * NOISE_BYTES
    assert replace(RIGHT, counted=RIGHT.counted + edge).is_right(4)
    assert not replace(RIGHT, counted=RIGHT.counted + edge + 1).is_right(4)
    assert not replace(RIGHT, counted=RIGHT.counted + 30_001, num_readings=0).is_right(4)
    assert not replace(RIGHT, counted=RIGHT.counted + 4 * NOISE_BYTES + 1, relative=0.0).is_right(4)
    assert replace(RIGHT, num_messages=0, num_readings=0).is_right(4)
