"""The settings of measurements: collectives, transfers and local work of given sizes."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.calibration import TRANSFER

__all__ = ["ITEM_BYTES", "TimedSetting", "rows_and_features"]

#: Bytes of a float32.
ITEM_BYTES = 4
#: A repetition repeats a collective until this many bytes are exchanged, but at most this many times.
_BYTES_OF_REPETITION = 2**20
_MAX_CALLS = 8
#: Features of the tensors that are gathered and scattered.
_FEATURES = 512


@dataclass(frozen=True)
class TimedSetting:
    """One operation to time.

    Attributes:
        collective: name of the operation, as in samples.
        ranks, stride: size of a group, and difference between its neighbouring ranks; 1 for local work.
        num_bytes: n of :mod:`autoddl.costmodel.collectives`; bytes read and written by local work.
        shape: (m, k, n) of a matmul; else empty.
    """

    collective: str
    ranks: int
    stride: int
    num_bytes: int
    shape: tuple[int, ...] = ()

    @property
    def calls(self) -> int:
        """Number of calls in a repetition; 1 for transfers, since pipeline stages wait for each of them."""
        if self.ranks == 1 or self.collective == TRANSFER:
            return 1
        return max(1, min(_MAX_CALLS, _BYTES_OF_REPETITION // self.num_bytes))


def rows_and_features(size: int, ranks: int) -> tuple[int, int]:
    """The shape (rows, features) of a tensor of about ``size`` bytes whose dimensions are both divisible by ``ranks``."""
    elements = max(1, size // ITEM_BYTES)
    # All-to-alls split both dimensions.
    features = max(1, min(_FEATURES, elements // ranks) // ranks) * ranks
    rows = max(1, elements // features // ranks) * ranks
    return rows, features
