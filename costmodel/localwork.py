"""Local work of a device: counts of kernels, products, FLOPs and bytes of memory traffic.

A matrix product of (m x k) by (k x n) is one kernel with 2 m k n FLOPs, which reads and writes (m k + k n + m n) elements.  An
element-wise kernel only reads and writes.  The products inside attention (:func:`attention_core`) are counted apart: they run at
another speed, in the compute type even if the products of linear layers are rounded to 8 bits.
:meth:`autoddl.costmodel.cluster.Cluster.local_time` converts the counts to seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["LocalWork", "attention_core", "elementwise", "matmul"]


@dataclass(frozen=True)
class LocalWork:
    """Counts of local work: numbers, or arrays of numbers.

    Attributes:
        launches: number of kernels.
        flops: number of FLOPs of products; a multiply-add counts as two.
        nbytes: bytes read from and written to the device's memory.
        products: number of kernels that compute these products.
        core_flops: number of FLOPs of the products inside attention.
    """

    launches: Any = 0
    flops: Any = 0.0
    nbytes: Any = 0.0
    products: Any = 0
    core_flops: Any = 0.0

    def __add__(self, other: LocalWork) -> LocalWork:
        return LocalWork(
            self.launches + other.launches,
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.products + other.products,
            self.core_flops + other.core_flops,
        )

    def __rmul__(self, times: Any) -> LocalWork:
        return LocalWork(
            times * self.launches,
            times * self.flops,
            times * self.nbytes,
            times * self.products,
            times * self.core_flops,
        )

    @property
    def all_flops(self) -> Any:
        """Number of FLOPs of all products."""
        return self.flops + self.core_flops


def matmul(m: Any, k: Any, n: Any, itemsize: int, count: Any = 1) -> LocalWork:
    """Work of ``count`` products (m x k) by (k x n) in one kernel, with ``itemsize`` bytes per element.

    >>> matmul(2, 3, 4, itemsize=4)
    LocalWork(launches=1, flops=48.0, nbytes=104, products=1, core_flops=0.0)
    """
    return LocalWork(1, count * 2.0 * m * k * n, count * (m * k + k * n + m * n) * itemsize, 1)


def attention_core(flops: Any, nbytes: Any, launches: int = 1) -> LocalWork:
    """Work of kernels of attention with ``flops`` FLOPs, which read and write ``nbytes`` in total."""
    return LocalWork(launches, 0.0, nbytes, 0, flops)


def elementwise(nbytes: Any) -> LocalWork:
    """Work of an element-wise kernel that reads and writes ``nbytes`` in total."""
    return LocalWork(1, 0.0, nbytes)
