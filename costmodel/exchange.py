"""Exchanges: all-to-alls of unequal pieces, in which every rank sends each other rank exactly the block that it needs.

An exchange goes between two even splits of a tensor over the same ranks.  The blocks are those of :mod:`.crossing`.  They may be
unequal, and ranks may send to different numbers of ranks.  Example: a 6 x 6 tensor on 6 ranks, from p0 = 1 (one column per rank;
the columns are on ranks 0, 3, 1, 4, 2, 5) to p0 = 3 (two rows by three columns per rank).  The table gives the number of elements
sent, of the 6 that a rank holds; those in brackets stay on the rank:

    ========  ========  ========  ========  ========  ========  ========
    from      to 0      to 1      to 2      to 3      to 4      to 5
    ========  ========  ========  ========  ========  ========  ========
    0         (2)                 2                   2
    1         2                   2                   2
    2                   2                   2                   2
    3         2                   2                   2
    4                   2                   2                   2
    5                   2                   2                   (2)
    ========  ========  ========  ========  ========  ========  ========

If neither of two meshes refines the other (p0 = 2 and p0 = 3 of 6 ranks), collectives along axes cannot redistribute directly
between them.  :mod:`.redistribution` says when an exchange is used instead.

**Price.**  A message between two ranks uses the outermost network level on which they differ.  Levels work one after another, and
all ranks of a level work in parallel.  With alpha and beta of the level's all-to-all:

    seconds = sum over levels:  most messages of a rank * alpha  +  most bytes of a rank * beta

The messages (bytes) of a rank are the maximum of those that it sends and those that it receives.  The backward pass is the
exchange from the target to the source, with the same blocks in the opposite direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

import numpy as np

from .collectives import Collective, Step
from .crossing import Piece, cuts_of, is_even_split, moving_pieces, overlaps
from .distribution import Axis, Distribution

__all__ = ["Exchange", "ExchangeStep", "exchange_between"]


@dataclass(frozen=True)
class Load:
    """The traffic of an exchange on one network level.  Bytes are fractions of the whole tensor.

    Attributes:
        axis: an axis that spans the whole level.
        most_messages, most_sent: messages and bytes of the busiest rank, sending or receiving.
        mean_messages, mean_sent: messages and bytes sent, mean over all ranks.
    """

    axis: Axis
    most_messages: int
    most_sent: float
    mean_messages: float
    mean_sent: float


@dataclass(frozen=True)
class ExchangeStep(Step):
    """The messages of an exchange on one network level: an all-to-all of unequal pieces along ``axis``, the whole level.

    Attributes:
        exchange: the exchange that this is a step of.
        load: the traffic on the level.
        tensor_bytes: bytes of the logical tensor.
    """

    exchange: Exchange
    load: Load
    tensor_bytes: float

    @property
    def sent_bytes(self) -> float:
        """Number of bytes that the busiest device sends or receives."""
        return self.load.most_sent * self.tensor_bytes

    @property
    def messages(self) -> float:
        """Number of messages that the busiest device sends or receives."""
        return self.load.most_messages

    @property
    def mean_sent_bytes(self) -> float:
        """Mean over the devices of the bytes that they send."""
        return self.load.mean_sent * self.tensor_bytes

    @property
    def mean_messages(self) -> float:
        """Mean over the devices of the messages that they send."""
        return self.load.mean_messages

    def adjoint(self) -> ExchangeStep:
        """The step on the gradient in the backward pass, which sends as many bytes."""
        return ExchangeStep(
            self.collective, self.axis, self.nbytes, self.exchange.reversed(), self.load, self.tensor_bytes
        )

    def __str__(self) -> str:
        return (
            f"{self.collective.value} of unequal pieces over {self.axis.size} (stride {self.axis.stride}), "
            f"up to {self.sent_bytes:,.0f} bytes"
        )


@dataclass(frozen=True)
class Exchange:
    """The exchange between two even splits of a tensor over the same ranks.

    Attributes:
        source, target: the two distributions.
        divisors: number that each dimension of the tensor must be divisible by.
        loads: traffic of the network levels, outermost first; levels without traffic are left out.
    """

    source: Distribution
    target: Distribution
    divisors: tuple[int, ...]
    loads: tuple[Load, ...]

    def steps(self, nbytes: float) -> tuple[ExchangeStep, ...]:
        """The steps that the cost model prices, for a tensor of ``nbytes``."""
        local = nbytes / self.source.num_ranks
        return tuple(ExchangeStep(Collective.ALL_TO_ALL, load.axis, local, self, load, nbytes) for load in self.loads)

    def pieces(self, shape: Sequence[int]) -> tuple[Piece, ...]:
        """The messages for a tensor of ``shape``, in the order in which all ranks send and receive them (:func:`moving_pieces`).

        Raises:
            UserError: the tensor does not divide at either end.
        """
        for end in (self.source, self.target):
            end.local_shape(shape)
        return moving_pieces(cuts_of(self.source, len(shape)), cuts_of(self.target, len(shape)), tuple(shape))

    def level_of(self, piece: Piece) -> int:
        """The network level that a message uses."""
        return next(
            level
            for level, stride in _level_strides(self.source)
            if piece.source // stride != piece.destination // stride
        )

    def reversed(self) -> Exchange:
        """The exchange from the target to the source, which is also that of the gradient."""
        return Exchange(self.target, self.source, self.divisors, self.loads)


@lru_cache(maxsize=1 << 16)
def exchange_between(source: Distribution, target: Distribution, num_dims: int) -> Exchange | None:
    """The exchange between two distributions over the same ranks; None if one of them is not an even split."""
    if not (is_even_split(source) and is_even_split(target)):
        return None
    if hash(source) > hash(target):  # both directions have the same traffic: compute and cache it once
        reverse = exchange_between(target, source, num_dims)
        assert reverse is not None
        return reverse.reversed()
    divisors = tuple(lcm(*sizes) for sizes in zip(source.split_sizes(num_dims), target.split_sizes(num_dims)))
    return Exchange(source, target, divisors, tuple(_loads(source, target, divisors)))


def _loads(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> list[Load]:
    found = overlaps(cuts_of(source, len(shape)), cuts_of(target, len(shape)), shape)
    num_ranks, outer = source.num_ranks, source.num_ranks
    sources, destinations = found.sources.ravel(), found.destinations.ravel()
    sizes = found.num_elements.ravel() / prod(shape)
    loads = []
    for level, stride in _level_strides(source):
        is_inside = sources // stride == destinations // stride
        if not is_inside.all():
            ends = sources[~is_inside], destinations[~is_inside]
            sent = [np.bincount(end, sizes[~is_inside], minlength=num_ranks) for end in ends]
            messages = [np.bincount(end, minlength=num_ranks) for end in ends]
            loads.append(
                Load(
                    axis=Axis(outer // stride, stride, level),
                    most_messages=int(np.max(messages)),
                    most_sent=float(np.max(sent)),
                    mean_messages=len(ends[0]) / num_ranks,
                    mean_sent=float(sent[0].sum()) / num_ranks,
                )
            )
            # The other messages use a level further inside.
            sources, destinations, sizes = sources[is_inside], destinations[is_inside], sizes[is_inside]
        outer = stride
    return loads


def _level_strides(distribution: Distribution) -> list[tuple[int, int]]:
    """(level, stride of its innermost axis) of the network levels of the mesh, outermost first."""
    strides: dict[int, int] = {}
    for axis in distribution.axes:
        strides[axis.level] = min(axis.stride, strides.get(axis.level, axis.stride))
    return sorted(strides.items())
