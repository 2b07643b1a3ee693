"""The settings of measurements: collectives, transfers and local work of given sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.precision import precision_of

__all__ = ["ITEM_BYTES", "TimedSetting", "rows_and_features", "settings_of", "work_settings"]

#: Bytes of an element of the tensors that ranks exchange, which are of float32.
ITEM_BYTES = 4
#: Calls of a collective in a repetition on CPU ranks; on GPUs as many as exchange so many bytes, but at least and at most these.
_CALLS_ON_CPU = 2
_BYTES_OF_REPETITION = 2**20
_MIN_CALLS, _MAX_CALLS = 2, 8
#: Calls of local work in a repetition on a GPU.
_CALLS_ON_GPU = 8
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
        precision: the precision in whose compute type local work is done; empty for what is exchanged.
    """

    collective: str
    ranks: int
    stride: int
    num_bytes: int
    shape: tuple[int, ...] = ()
    precision: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether it is neither local work nor a transfer."""
        return self.ranks > 1 and self.collective != TRANSFER

    def calls(self, on_gpus: bool) -> int:
        """Number of calls in a repetition; 1 for transfers, since pipeline stages wait for each of them."""
        if self.collective == TRANSFER:
            return 1
        if self.ranks == 1:
            return _CALLS_ON_GPU if on_gpus else 1
        if not on_gpus:
            return _CALLS_ON_CPU
        return max(_MIN_CALLS, min(_MAX_CALLS, _BYTES_OF_REPETITION // self.num_bytes))


def settings_of(num_ranks: int, sizes: Sequence[int], collectives: Sequence[str]) -> list[TimedSetting]:
    """Every collective on every axis of a mesh of ``num_ranks`` ranks, and transfers along axes of size 2."""
    axes = [
        (ranks, stride)
        for ranks in range(2, num_ranks + 1)
        for stride in range(1, num_ranks + 1)
        if num_ranks % (ranks * stride) == 0
    ]
    found = []
    for size in sizes:
        for collective in collectives:
            if collective == TRANSFER:
                found += [TimedSetting(collective, 2, stride, size) for ranks, stride in axes if ranks == 2]
            else:
                found += [TimedSetting(collective, ranks, stride, _rounded(size, ranks)) for ranks, stride in axes]
    return found


def work_settings(
    shapes: Sequence[tuple[int, int, int]], sizes: Sequence[int], precisions: Sequence[str]
) -> list[TimedSetting]:
    """Settings of local work in each precision: matmuls of shapes (m, k, n), and element-wise operations on numbers of bytes."""
    found = []
    for name in precisions:
        item = precision_of(name).itemsize
        found += [TimedSetting("matmul", 1, 1, item * (m * k + k * n + m * n), (m, k, n), name) for m, k, n in shapes]
        found += [TimedSetting("elementwise", 1, 1, size, (), name) for size in sizes]
    return found


def _rounded(size: int, ranks: int) -> int:
    """About ``size`` bytes, rounded to a tensor that divides over the ranks."""
    rows, features = rows_and_features(size, ranks)
    return ITEM_BYTES * rows * features


def rows_and_features(size: int, ranks: int) -> tuple[int, int]:
    """The shape (rows, features) of a tensor of about ``size`` bytes whose dimensions are both divisible by ``ranks``."""
    elements = max(1, size // ITEM_BYTES)
    # All-to-alls split both dimensions.
    features = max(1, min(_FEATURES, elements // ranks) // ranks) * ranks
    rows = max(1, elements // features // ranks) * ranks
    return rows, features
