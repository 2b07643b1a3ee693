"""Exchanges: every rank sends each other rank just what that one wants of it, and nothing else.

Between two even splits of a tensor over the same ranks a rank sends the blocks of its part that others want, and keeps what it
wants itself.  The blocks are those of :mod:`.crossing`; they may be unequal, and ranks may send to more or fewer others.  A 6 x 6
tensor on 6 ranks, from p0 = 1 (a column each: in the order of their columns ranks 0, 3, 1, 4, 2, 5) to p0 = 3 (two rows by three
columns each), in elements of the 6 that a rank holds; those in brackets stay:

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

Meshes of which neither refines the other (those of p0 = 2 and p0 = 3 of 6 ranks) have no digits in common that collectives along
axes could pass on; :mod:`.redistribution` says where exchanges take their place.

**Price.**  A network level carries the messages between ranks that differ in their place on it, and on no level outside of it.
Levels work one after another, on each all ranks at once, so that with the constants of the level's all-to-all

    seconds = sum over levels:  most messages of a rank * alpha  +  most bytes of a rank * beta

where a rank's messages and bytes are those that it sends or those that it receives, the larger.  The backward pass is the exchange
from the target to the source: of the same blocks, the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

import numpy as np

from .collectives import Collective, Step
from .crossing import Piece, crossing, is_even_split, overlaps
from .distribution import Axis, Distribution

__all__ = ["Exchange", "ExchangeStep", "exchange_between"]


@dataclass(frozen=True)
class Load:
    """What one network level carries; bytes are fractions of the tensor's.

    Attributes:
        axis: the whole level.
        most_messages, most_sent: of the busiest rank, sending or receiving.
        mean_messages, mean_sent: on average over all ranks.
    """

    axis: Axis
    most_messages: int
    most_sent: float
    mean_messages: float
    mean_sent: float


@dataclass(frozen=True)
class ExchangeStep(Step):
    """An exchange's messages on one network level: an all-to-all along ``axis``, the whole level, whose pieces are unequal.

    Attributes:
        exchange: what it is a step of.
        load: what the level carries.
        tensor_bytes: of the logical tensor.
    """

    exchange: Exchange
    load: Load
    tensor_bytes: float

    @property
    def sent_bytes(self) -> float:
        """The bytes that the busiest device sends or receives."""
        return self.load.most_sent * self.tensor_bytes

    @property
    def messages(self) -> int:
        """The messages that the busiest device sends or receives."""
        return self.load.most_messages

    @property
    def mean_sent_bytes(self) -> float:
        """The bytes that a device sends on average."""
        return self.load.mean_sent * self.tensor_bytes

    @property
    def mean_messages(self) -> float:
        """The messages that a device sends on average."""
        return self.load.mean_messages

    def adjoint(self) -> ExchangeStep:
        """The step that runs on the gradient in the backward pass: it sends as many bytes."""
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
    """How a tensor gets from one even split to another one over the same ranks.

    Attributes:
        source, target: the ends.
        divisors: what the dimensions of the tensor have to divide by.
        loads: what each network level carries, outermost first; levels that carry nothing are left out.
    """

    source: Distribution
    target: Distribution
    divisors: tuple[int, ...]
    loads: tuple[Load, ...]

    def steps(self, nbytes: float) -> tuple[ExchangeStep, ...]:
        """What is priced for a tensor of ``nbytes``."""
        local = nbytes / self.source.num_ranks
        return tuple(ExchangeStep(Collective.ALL_TO_ALL, load.axis, local, self, load, nbytes) for load in self.loads)

    def pieces(self, shape: Sequence[int]) -> tuple[Piece, ...]:
        """The messages for a tensor of ``shape``, in an order that all ranks keep to.

        In round k ranks r and r ^ k (bitwise) send to each other, the lower one first: no rank has two partners in a round, and
        none waits for another one in a circle.
        """
        moving = [piece for piece in crossing(self.source, self.target, shape) if piece.source != piece.destination]
        return tuple(sorted(moving, key=lambda piece: (piece.source ^ piece.destination, piece.source)))

    def level_of(self, piece: Piece) -> int:
        """The network level that a message takes."""
        return next(
            level
            for level, stride in _level_strides(self.source)
            if piece.source // stride != piece.destination // stride
        )

    def reversed(self) -> Exchange:
        """The way back, which is that of the gradient too."""
        return Exchange(self.target, self.source, self.divisors, self.loads)


@lru_cache(maxsize=1 << 16)
def exchange_between(source: Distribution, target: Distribution, num_dims: int) -> Exchange | None:
    """The exchange between two distributions over the same ranks; None where one of them is not an even split."""
    if not (is_even_split(source) and is_even_split(target)):
        return None
    if hash(source) > hash(target):  # the way there and the way back carry the same
        twin = exchange_between(target, source, num_dims)
        assert twin is not None
        return twin.reversed()
    divisors = tuple(lcm(*sizes) for sizes in zip(source.split_sizes(num_dims), target.split_sizes(num_dims)))
    return Exchange(source, target, divisors, tuple(_loads(source, target, divisors)))


def _loads(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> list[Load]:
    found = overlaps(source, target, shape)
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
            # What is left has a level further inside.
            sources, destinations, sizes = sources[is_inside], destinations[is_inside], sizes[is_inside]
        outer = stride
    return loads


def _level_strides(distribution: Distribution) -> list[tuple[int, int]]:
    """The network levels that the ranks spread over, outermost first, each with how far apart its neighbours are."""
    strides: dict[int, int] = {}
    for axis in distribution.axes:
        strides[axis.level] = min(axis.stride, strides.get(axis.level, axis.stride))
    return sorted(strides.items())
