"""What a device computes by itself, counted: kernels, FLOPs and bytes of its memory.

One kernel multiplies an (m x k) by a (k x n) matrix in 2 m k n FLOPs, and reads and writes (m k + k n + m n) elements; an
element-wise kernel only reads and writes.  What they cost is said in :meth:`autoddl.costmodel.cluster.Cluster.local_time`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["LocalWork", "elementwise", "matmul"]


@dataclass(frozen=True)
class LocalWork:
    """Counts, which are numbers or arrays of numbers.

    Attributes:
        launches: of kernels.
        flops: a multiply-add is two.
        nbytes: read from and written to the device's memory.
    """

    launches: Any = 0
    flops: Any = 0.0
    nbytes: Any = 0.0

    def __add__(self, other: LocalWork) -> LocalWork:
        return LocalWork(self.launches + other.launches, self.flops + other.flops, self.nbytes + other.nbytes)

    def __rmul__(self, times: Any) -> LocalWork:
        return LocalWork(times * self.launches, times * self.flops, times * self.nbytes)


def matmul(m: Any, k: Any, n: Any, itemsize: int, count: Any = 1) -> LocalWork:
    """``count`` products (m x k) by (k x n) in one kernel."""
    return LocalWork(1, count * 2.0 * m * k * n, count * (m * k + k * n + m * n) * itemsize)


def elementwise(nbytes: Any) -> LocalWork:
    """A kernel that reads and writes ``nbytes`` in all."""
    return LocalWork(1, 0.0, nbytes)
