"""What a collective sends and how long it takes: bandwidth-optimal rings in the alpha-beta model.

``p`` devices, ``alpha`` = latency of one message [s], ``beta`` = seconds per byte:

==================  =======================================  ==========================================
collective          seconds                                  ``n`` bytes are
==================  =======================================  ==========================================
all-reduce          2 (p-1) alpha + 2 (p-1)/p n beta         the tensor that each device holds
all-gather          (p-1) alpha + (p-1)/p n beta             the gathered output
reduce-scatter      (p-1) alpha + (p-1)/p n beta             the input
all-to-all          (p-1) alpha + (p-1)/p n beta             the output (as large as the input)
==================  =======================================  ==========================================

The factor of alpha is the number of messages that a device sends, the factor of beta the bytes that it sends: what is
priced is what is sent.  Reduction arithmetic is taken as overlapped.  (AutoDDL, Section 3; Thakur et al. 2005.)

**Several network levels.**  A collective over axes of several levels runs along one after the other: an all-gather the outer level
first, while the tensor is small, a reduce-scatter the inner level first; an all-reduce is a reduce-scatter inside the nodes, an
all-reduce between them, and an all-gather inside.  In all each device sends the bytes of one ring over all devices, but of p
devices in a node only 1/p of them cross the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

from .distribution import Axis

__all__ = ["Collective", "Step", "all_reduce_steps", "gather_steps", "scatter_steps"]


class Collective(Enum):
    """The communication steps that redistributions are made of."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"

    @property
    def rounds(self) -> int:
        """How often a ring passes all its data around: twice for an all-reduce."""
        return 2 if self is Collective.ALL_REDUCE else 1

    def messages(self, num_devices: int) -> int:
        """How many messages each device sends."""
        return self.rounds * (num_devices - 1)

    def sent_bytes(self, num_devices: int, nbytes: float) -> float:
        """How many bytes each device sends; ``nbytes`` as in the module's table."""
        return self.rounds * (num_devices - 1) / num_devices * nbytes


#: What runs in the backward pass where a collective ran in the forward pass.
ADJOINT = {
    Collective.ALL_REDUCE: Collective.ALL_REDUCE,
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
    Collective.ALL_TO_ALL: Collective.ALL_TO_ALL,
}


@dataclass(frozen=True)
class Step:
    """One collective along one mesh axis on ``nbytes`` (as in the module's table) per device."""

    collective: Collective
    axis: Axis
    nbytes: float

    @property
    def sent_bytes(self) -> float:
        """The bytes that each device sends."""
        return self.collective.sent_bytes(self.axis.size, self.nbytes)

    @property
    def messages(self) -> int:
        """The messages that each device sends."""
        return self.collective.messages(self.axis.size)

    @property
    def mean_sent_bytes(self) -> float:
        """The bytes that a device sends on average: as many as each of them, in a collective."""
        return self.sent_bytes

    @property
    def mean_messages(self) -> float:
        """The messages that a device sends on average."""
        return self.messages

    def adjoint(self) -> Step:
        """The step that runs on the gradient in the backward pass: it sends as many bytes."""
        return replace(self, collective=ADJOINT[self.collective])

    def __str__(self) -> str:
        return f"{self.collective.value} over {self.axis.size} (stride {self.axis.stride}), {self.nbytes:,.0f} bytes"


def gather_steps(axes: Sequence[Axis], nbytes: Any) -> tuple[Step, ...]:
    """All-gather to ``nbytes`` along one axis per level: the outermost first, while the tensor is small."""
    steps = []
    for position, axis in enumerate(axes):
        inner = prod(other.size for other in axes[position + 1 :])
        steps.append(Step(Collective.ALL_GATHER, axis, nbytes / inner))
    return tuple(steps)


def scatter_steps(axes: Sequence[Axis], nbytes: Any) -> tuple[Step, ...]:
    """Reduce-scatter of ``nbytes`` along one axis per level: the innermost first."""
    return tuple(step.adjoint() for step in reversed(gather_steps(axes, nbytes)))


def all_reduce_steps(axes: Sequence[Axis], nbytes: Any) -> tuple[Step, ...]:
    """All-reduce of ``nbytes``: reduced and gathered inside the inner levels, all-reduced at the outermost."""
    if not axes:
        return ()
    inner = axes[1:]
    middle = Step(Collective.ALL_REDUCE, axes[0], nbytes / prod(axis.size for axis in inner))
    return (*scatter_steps(inner, nbytes), middle, *gather_steps(inner, nbytes))
