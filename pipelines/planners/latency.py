"""DAPPLE's estimate of the latency of one synchronous pipelined iteration.

M micro-batches run through a chain of stages. *Communication stages* alternate with the computation stages: their F is the time
of sending an activation, their B that of sending its gradient. F_s, B_s are times per micro-batch, AR_s is what remains of the
all-reduce of stage s's gradients over its replicas after the stage's last backward (0 for communication stages), and x_s = F_s
+ B_s. The paper takes the whole all-reduce for AR_s; the planner takes the part that does not fit under the last backward
(:mod:`.overlap`).

**As printed** (Fan et al., "DAPPLE", equations of Section 4), with pivot stage Q:

    T_w = sum_{a <= Q} F_a
    T_s = (M - 1) x_Q
    T_e = max_s ( AR_s + ( - sum_{Q <= a <= s} B_a  if s >= Q ;  + sum_{s <= a <= Q} B_a  if s < Q ) )
    L   = T_w + T_s + T_e

    Q = S - 1; for s = S - 2 .. 0: move Q to s when (M - 1) x_s > (M - 1) x_Q + sum_{s < a < Q} x_a

:func:`printed_pivot` and :func:`printed_latency` implement these. **Correction:** T_w + T_s is when the pivot *starts* its last
backward. So a stage s behind it ends its last backward at T_w + T_s - sum_{Q < a < s} B_a at the latest, stage Q itself at
T_w + T_s + B_Q, and a stage s before it at T_w + T_s + sum_{s <= a <= Q} B_a. At s = Q the printed formula subtracts what must be
added, and for s > Q it subtracts B_Q and B_s too much. A single stage shows the error: M x + AR is correct, (M - 1) x + F - B + AR
is printed, which is negative for one micro-batch with B > F + AR. :func:`corrected_latency` keeps the printed pivot and uses the
corrected ends; it is at least T_w + T_s + B_Q.

**The planner's estimate**, :func:`latency`, uses the corrected ends of the stages up to the pivot, and the pivot that maximises L:

    L = max_{s <= Q} ( sum_{a < s} F_a + sum_{s <= a <= Q} x_a + (M - 1) y_Q + AR_s )

with y_Q = x_Q if forwards and backwards share one worker (a computation stage) and y_Q = max(F_Q, B_Q) if they overlap (a
full-duplex link). The printed rule approximates the same maximum without the all-reduces (an exact rule would compare with
M x_Q instead of (M - 1) x_Q on its right). Every term is the length of a chain of dependent tasks of *any* 1F1B timeline:
micro-batch 0's forwards up to Q, Q's work on the other micro-batches, the last backwards down to s, its all-reduce. Hence L never
exceeds the simulated latency, which lets the ranking by simulation stop early. L ignores bubbles inside the pivot stage (too few
micro-batches in flight for the round trip behind it, above all if memory limits their number).

L can be computed from the last stage to the first. With V and W of the stages from s on,

    V = x_s + max(V', (M - 1) y_s)        the longest chain from the start of F_s to the end of stage s's last backward
    W = max(F_s + W', AR_s + V)           the same to the end of any of their all-reduces; L = W of stage 0

Both grow with V' and W'. So of two suffixes that start at the same layer and leave the same devices, one with both V and W larger
can be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StageCost", "corrected_latency", "latency", "printed_latency", "printed_pivot"]


@dataclass(frozen=True)
class StageCost:
    """Cost of one computation or communication stage.

    Attributes:
        forward_s: forward of a micro-batch.
        backward_s: backward of a micro-batch.
        all_reduce_s: time that the all-reduce of its gradients takes after its last backward, per iteration.
        duplex: whether forwards and backwards overlap, as on a full-duplex link.
    """

    forward_s: float
    backward_s: float
    all_reduce_s: float = 0.0
    duplex: bool = False

    @property
    def both_s(self) -> float:
        """x: time of a forward and a backward of one micro-batch."""
        return self.forward_s + self.backward_s

    @property
    def steady_s(self) -> float:
        """y: time between consecutive micro-batches if this stage is the bottleneck."""
        return max(self.forward_s, self.backward_s) if self.duplex else self.both_s


def latency(stages: Sequence[StageCost], num_micro_batches: int) -> float:
    """The planner's estimate [s], a lower bound of the simulated latency (formula: module's docstring).

    >>> latency([StageCost(1.0, 2.0), StageCost(1.0, 2.0)], num_micro_batches=4)
    15.0
    """
    chain = longest = 0.0
    for stage in reversed(stages):
        chain = stage.both_s + max(chain, (num_micro_batches - 1) * stage.steady_s)
        longest = max(stage.forward_s + longest, stage.all_reduce_s + chain)
    return longest


def printed_pivot(stages: Sequence[StageCost], num_micro_batches: int) -> int:
    """The paper's pivot: the stage with the fewest bubbles."""
    rounds = num_micro_batches - 1
    pivot = len(stages) - 1
    between = 0.0
    for s in range(len(stages) - 2, -1, -1):
        if rounds * stages[s].both_s > rounds * stages[pivot].both_s + between:
            pivot, between = s, 0.0
        else:
            between += stages[s].both_s
    return pivot


def printed_latency(stages: Sequence[StageCost], num_micro_batches: int) -> float:
    """The paper's L [s] as printed, which can be negative; for comparison (formula: module's docstring)."""
    pivot = printed_pivot(stages, num_micro_batches)
    ends = []
    for s, stage in enumerate(stages):
        if s >= pivot:
            ends.append(stage.all_reduce_s - sum(a.backward_s for a in stages[pivot : s + 1]))
        else:
            ends.append(stage.all_reduce_s + sum(a.backward_s for a in stages[s : pivot + 1]))
    return _until_last_backward(stages, num_micro_batches, pivot) + max(ends)


def corrected_latency(stages: Sequence[StageCost], num_micro_batches: int) -> float:
    """The paper's L [s] with corrected ends and the printed pivot (formula: module's docstring)."""
    pivot = printed_pivot(stages, num_micro_batches)
    ends = []
    for s, stage in enumerate(stages):
        if s > pivot:
            ends.append(stage.all_reduce_s - sum(a.backward_s for a in stages[pivot + 1 : s]))
        else:
            ends.append(stage.all_reduce_s + sum(a.backward_s for a in stages[s : pivot + 1]))
    return _until_last_backward(stages, num_micro_batches, pivot) + max(ends)


def _until_last_backward(stages: Sequence[StageCost], num_micro_batches: int, pivot: int) -> float:
    """T_w + T_s [s]."""
    warm_up = sum(stage.forward_s for stage in stages[: pivot + 1])
    return warm_up + (num_micro_batches - 1) * stages[pivot].both_s
