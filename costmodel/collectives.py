"""Collectives: messages, bytes and time of bandwidth-optimal rings in the alpha-beta model.

``p`` is the number of devices, ``alpha`` the latency of one message [s], ``beta`` the seconds per byte:

==================  =======================================  ==========================================
collective          seconds                                  ``n`` bytes are
==================  =======================================  ==========================================
all-reduce          2 (p-1) alpha + 2 (p-1)/p n beta         the tensor that each device holds
all-gather          (p-1) alpha + (p-1)/p n beta             the gathered output
reduce-scatter      (p-1) alpha + (p-1)/p n beta             the input
all-to-all          (p-1) alpha + (p-1)/p n beta             the output (as large as the input)
shift               alpha + n beta                           the tensor that each device passes on
==================  =======================================  ==========================================

In a shift, every device of a ring sends its tensor to the next one.

The factor of alpha is the number of messages that a device sends; the factor of beta is the number of bytes that it sends.
The arithmetic of reductions is assumed to overlap with communication.  (AutoDDL, Section 3; Thakur et al. 2005.)

**Several network levels.**  A collective over axes of several levels runs along one axis after the other.  An all-gather starts
at the outermost level, while the tensor is small; a reduce-scatter starts at the innermost.  An all-reduce is a reduce-scatter
inside the nodes, an all-reduce between nodes, and an all-gather inside the nodes.  Each device sends as many bytes as in one
ring over all devices, but with p devices per node only 1/p of them cross nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

from .distribution import Axis

__all__ = ["Collective", "SharedStep", "Step", "all_reduce_steps", "gather_steps", "scatter_steps"]


class Collective(Enum):
    """The communication steps that redistributions are made of."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SHIFT = "shift"

    @property
    def rounds(self) -> int:
        """Number of rounds of the ring: 2 for an all-reduce, else 1."""
        return 2 if self is Collective.ALL_REDUCE else 1

    def messages(self, num_devices: int) -> int:
        """Number of messages that each device sends."""
        return min(num_devices - 1, 1) if self is Collective.SHIFT else self.rounds * (num_devices - 1)

    def sent_bytes(self, num_devices: int, nbytes: float) -> float:
        """Number of bytes that each device sends; ``nbytes`` is n of the module's table.

        >>> Collective.ALL_REDUCE.sent_bytes(4, 1024)
        1536.0
        """
        if self is Collective.SHIFT:
            return nbytes if num_devices > 1 else 0.0
        return self.rounds * (num_devices - 1) / num_devices * nbytes


#: The collective of the backward pass for each collective of the forward pass.
ADJOINT = {
    Collective.ALL_REDUCE: Collective.ALL_REDUCE,
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
    Collective.ALL_TO_ALL: Collective.ALL_TO_ALL,
    Collective.SHIFT: Collective.SHIFT,
}


@dataclass(frozen=True)
class Step:
    """One collective along one mesh axis.

    Attributes:
        collective: which one.
        axis: the mesh axis.
        nbytes: bytes per device, n of the module's table.
    """

    collective: Collective
    axis: Axis
    nbytes: float

    @property
    def sent_bytes(self) -> float:
        """Number of bytes that each device sends."""
        return self.collective.sent_bytes(self.axis.size, self.nbytes)

    @property
    def messages(self) -> float:
        """Number of messages that each device sends."""
        return self.collective.messages(self.axis.size)

    @property
    def mean_sent_bytes(self) -> float:
        """Mean over the devices of the bytes that they send; equal to :attr:`sent_bytes` for a collective."""
        return self.sent_bytes

    @property
    def mean_messages(self) -> float:
        """Mean over the devices of the messages that they send."""
        return self.messages

    def adjoint(self) -> Step:
        """The step on the gradient in the backward pass, which sends as many bytes."""
        return replace(self, collective=ADJOINT[self.collective])

    def __str__(self) -> str:
        return f"{self.collective.value} over {self.axis.size} (stride {self.axis.stride}), {self.nbytes:,.0f} bytes"


@dataclass(frozen=True)
class SharedStep(Step):
    """A step whose messages also carry the data of others (:attr:`.workload.Workload.bucket_bytes`).

    Attributes:
        share: the part of the messages that counts as this step's, at most 1.
    """

    share: float

    @property
    def messages(self) -> float:
        """Number of messages that each device sends, times the share."""
        return self.share * self.collective.messages(self.axis.size)


def gather_steps(axes: Sequence[Axis], nbytes: Any) -> tuple[Step, ...]:
    """Steps of an all-gather of ``nbytes`` (the output) along ``axes``, one per level, outermost first."""
    steps = []
    for position, axis in enumerate(axes):
        inner = prod(other.size for other in axes[position + 1 :])
        steps.append(Step(Collective.ALL_GATHER, axis, nbytes / inner))
    return tuple(steps)


def scatter_steps(axes: Sequence[Axis], nbytes: Any) -> tuple[Step, ...]:
    """Steps of a reduce-scatter of ``nbytes`` (the input) along ``axes``; they run innermost first."""
    return tuple(step.adjoint() for step in reversed(gather_steps(axes, nbytes)))


def all_reduce_steps(axes: Sequence[Axis], nbytes: Any, share: Any = None) -> tuple[Step, ...]:
    """Steps of an all-reduce of ``nbytes``: reduce-scatter along the inner axes, all-reduce along the outermost, all-gather.

    ``share``: the part of their messages that counts (:class:`SharedStep`); None for all.
    """
    if not axes:
        return ()
    inner = axes[1:]
    middle = Step(Collective.ALL_REDUCE, axes[0], nbytes / prod(axis.size for axis in inner))
    steps = (*scatter_steps(inner, nbytes), middle, *gather_steps(inner, nbytes))
    return steps if share is None else tuple(SharedStep(s.collective, s.axis, s.nbytes, share) for s in steps)
