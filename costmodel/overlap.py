"""Overlap of the gradients' all-reduces with the backward pass, and its linear lower bounds.

Gradients are reduced in k = :data:`NUM_BUCKETS` equal buckets, one after the other.  A bucket begins when a k-th of the last
backward pass B has made it.  So of an all-reduce A the part

    max(A / k, A - (1 - 1/k) B)

comes after the backward pass.  Searches minimise sums over layers, and this is none; but any mean of its two arguments, with the
share s of the first one, is, and bounds it from below:

    s A / k + (1 - s) (A - (1 - 1/k) B)      (:class:`Exposure`)

With s = 1 it is exact for every plan whose all-reduce is not longer than the backward pass, with s = 0 for all others.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NUM_BUCKETS", "OVERLAPS", "WHOLE", "Exposure", "exposed_s"]

#: Which communication runs beside computation.  ``gradients``: all-reduces of gradients, in buckets, under the backward pass of the
#: last micro-batch.  ``all``: also the communication of linear layers, under their products.
OVERLAPS = ("none", "gradients", "all")
#: Number of buckets of gradients, if their all-reduces overlap the backward pass.
NUM_BUCKETS = 8


def exposed_s(all_reduce_s: float, backward_s: float, overlap: str) -> float:
    """Return the seconds of an all-reduce of gradients that come after the last backward pass (formula: module docstring).

    Args:
        all_reduce_s: Seconds of the all-reduce.
        backward_s: Seconds of the backward pass of one micro-batch.
        overlap: One of :data:`OVERLAPS`.

    >>> exposed_s(8.0, 100.0, "gradients"), exposed_s(8.0, 4.0, "gradients"), exposed_s(8.0, 4.0, "none")
    (1.0, 4.5, 8.0)
    """
    if overlap == "none":
        return all_reduce_s
    return max(all_reduce_s / NUM_BUCKETS, all_reduce_s - (1 - 1 / NUM_BUCKETS) * backward_s)


@dataclass(frozen=True)
class Exposure:
    """The part of all-reduces A that a linear cost counts: ``gradient * A - backward * B``, for backward passes B.

    Attributes:
        gradient, backward: the two factors.
    """

    gradient: float = 1.0
    backward: float = 0.0

    @classmethod
    def at(cls, share: float) -> Exposure:
        """The lower bound with a share of the first argument, from 0 to 1 (module docstring).

        >>> Exposure.at(1.0), Exposure.at(0.0)
        (Exposure(gradient=0.125, backward=0.0), Exposure(gradient=1.0, backward=0.875))
        """
        part = 1 / NUM_BUCKETS
        return cls(share * part + (1 - share), (1 - share) * (1 - part))


#: The whole all-reduce, without overlap.
WHOLE = Exposure()
