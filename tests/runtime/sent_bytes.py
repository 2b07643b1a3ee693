"""The one place in which tests judge bytes on the wire.

Whatever else a machine does while bytes are counted only adds to them: what TCP sends again, barriers that take several rounds. And
it adds to the empty section that is subtracted (`wire.Meter`), so that a count may be too small as well. So a count that is off
is repeated, and of several counts of one section the one nearest to the prediction is judged, which is the least of those that
are too large. A run that really sends something else does so in every count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoddl.pipelines.runtime.ranks.wire import BYTES_TOLERANCE, MESSAGE_BYTES, NOISE_BYTES

__all__ = ["NUM_RECOUNTS", "Sent", "check_sent"]

#: How often bytes are counted again before a run is called wrong.
NUM_RECOUNTS = 4


@dataclass(frozen=True)
class Sent:
    """What all ranks sent in one section.

    Attributes:
        what: the section.
        counted: the payload in bytes, as `wire` counts it.
        predicted: the bytes of the tensors.
        num_messages: of OneFlow's, each with `MESSAGE_BYTES` of its own, which are taken off; 0 judges the payload as it is.
        relative: how far off it may be, of what is predicted.
        num_readings: how many readings of the counters were added up; each has its noise.  0 allows for none.
    """

    what: str
    counted: float
    predicted: float
    num_messages: int = 0
    relative: float = BYTES_TOLERANCE
    num_readings: int = 1

    @property
    def excess(self) -> float:
        """What was sent beyond the prediction, in bytes."""
        return self.counted - MESSAGE_BYTES * self.num_messages - self.predicted

    def is_right(self, num_ranks: int) -> bool:
        """Whether the bytes count as those that are predicted."""
        return abs(self.excess) <= self.relative * self.predicted + NOISE_BYTES * num_ranks * self.num_readings


def check_sent(num_ranks: int, found: Sequence[Sent], count_again: Callable[[], Sequence[Sent]]) -> None:
    """Assert that each section sent what is predicted; where one did not, count all again.

    Args:
        num_ranks: of the job.
        found: the first count.
        count_again: runs the same sections again, and gives them in the same order.
    """
    assert found
    nearest = list(found)
    for _ in range(NUM_RECOUNTS):
        if all(section.is_right(num_ranks) for section in nearest):
            return
        again = count_again()
        assert [section.what for section in again] == [section.what for section in nearest]
        nearest = [min(pair, key=lambda section: abs(section.excess)) for pair in zip(nearest, again)]
    wrong = [section for section in nearest if not section.is_right(num_ranks)]
    assert not wrong, f"off in each of {NUM_RECOUNTS + 1} counts: {wrong}"
