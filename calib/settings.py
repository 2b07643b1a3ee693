"""What is timed: collectives, transfers and local work of given sizes."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.calibration import TRANSFER

__all__ = ["ITEM_BYTES", "Setting", "rows_and_features"]

#: Of a float32.
ITEM_BYTES = 4
#: A repetition goes on with a collective until this many bytes have been exchanged, or it has been done this often.
_BYTES_OF_REPETITION = 2**20
_MOST_CALLS = 8
#: Features of the tensors that are gathered and scattered.
_FEATURES = 512


@dataclass(frozen=True)
class Setting:
    """One thing to be timed.

    ``ranks`` in a group, ``stride`` ranks apart, exchange ``num_bytes``; or local work: ``shape`` is (m, k, n) of a matmul, and
    empty for an element-wise operation on ``num_bytes``.
    """

    collective: str
    ranks: int
    stride: int
    num_bytes: int
    shape: tuple[int, ...] = ()

    @property
    def calls(self) -> int:
        """How often it is done in a repetition; transfers once, for stages wait for each of them."""
        if self.ranks == 1 or self.collective == TRANSFER:
            return 1
        return max(1, min(_MOST_CALLS, _BYTES_OF_REPETITION // self.num_bytes))


def rows_and_features(size: int, ranks: int) -> tuple[int, int]:
    """The shape of a tensor of about ``size`` bytes that divides over ranks in both dimensions."""
    elements = max(1, size // ITEM_BYTES)
    # All-to-alls cut both dimensions.
    features = max(1, min(_FEATURES, elements // ranks) // ranks) * ranks
    rows = max(1, elements // features // ranks) * ranks
    return rows, features
