"""DAPPLE's estimate of the latency of one synchronous pipelined iteration.

M micro-batches run through a chain of stages, in which *communication stages* stand between the computation stages: their F is the
time of sending an activation, their B that of its gradient. F_s, B_s per micro-batch, AR_s the all-reduce of stage s's
gradients over its replicas (0 for communication stages), x_s = F_s + B_s.

**As printed** (Fan et al., "DAPPLE", equations of Section 4), with pivot stage Q:

    T_w = sum_{a <= Q} F_a
    T_s = (M - 1) x_Q
    T_e = max_s ( AR_s + ( - sum_{Q <= a <= s} B_a  if s >= Q ;  + sum_{s <= a <= Q} B_a  if s < Q ) )
    L   = T_w + T_s + T_e

    Q = S - 1; for s = S - 2 .. 0: move Q to s when (M - 1) x_s > (M - 1) x_Q + sum_{s < a < Q} x_a

:func:`printed_pivot` and :func:`printed_latency` are these. **What a timeline shows instead:** T_w + T_s is when the pivot *starts*
its last backward. So a stage behind it ends its last one at T_w + T_s - sum_{Q < a < s} B_a at the latest, stage Q itself
at T_w + T_s + B_Q, a stage before it B_a later for each stage between: at s = Q the printed formula subtracts what must be
added, and for s > Q it subtracts B_Q and B_s too much. A single stage shows it: M x + AR is right, (M - 1) x + F - B + AR is
printed, which is below 0 for one micro-batch with B > F + AR: no latency. :func:`corrected_latency` keeps the printed pivot and has
these ends; it is at least T_w + T_s + B_Q.

**The planner's estimate**, :func:`latency`, keeps the ends of the stages up to the pivot and takes the pivot that makes it longest:

    L = max_{s <= Q} ( sum_{a < s} F_a + sum_{s <= a <= Q} x_a + (M - 1) y_Q + AR_s )

with y_Q = x_Q where forwards and backwards take turns on one worker (a computation stage) and y_Q = max(F_Q, B_Q) where
they pass each other (a full-duplex link). The printed rule aims at the same maximum without the all-reduces (exactly it would
compare M x_Q instead of (M - 1) x_Q on its right). Every term is the length of a chain of tasks that follow each other in *any*
1F1B timeline: micro-batch 0's forwards up to Q, Q's work on the rest, the last backwards down to s, its all-reduce. Hence L
never exceeds the simulated latency, which lets the ranking by simulation stop early. What it leaves out are bubbles inside
the pivot stage (too few micro-batches in flight for the round trip behind it, above all with few of them in memory).

It also lends itself to dynamic programming from the last stage to the first: with V and W of the stages from s on,

    V = x_s + max(V', (M - 1) y_s)        the longest chain from the start of F_s to the end of stage s's last backward
    W = max(F_s + W', AR_s + V)           the same to the end of any of their all-reduces; L = W of stage 0

both of which grow with V' and W', so of two rests that start at the same layer and leave the same devices, one with both
V and W larger can be forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StageCost", "corrected_latency", "latency", "printed_latency", "printed_pivot"]


@dataclass(frozen=True)
class StageCost:
    """Seconds per micro-batch of one computation or communication stage, and its all-reduce per iteration."""

    forward_s: float
    backward_s: float
    all_reduce_s: float = 0.0
    duplex: bool = False
    """Whether forwards and backwards do not hinder each other, as on a full-duplex link."""

    @property
    def both_s(self) -> float:
        """x: a forward and a backward."""
        return self.forward_s + self.backward_s

    @property
    def steady_s(self) -> float:
        """y: how far apart micro-batches are while this stage is the bottleneck."""
        return max(self.forward_s, self.backward_s) if self.duplex else self.both_s


def latency(stages: Sequence[StageCost], num_micro_batches: int) -> float:
    """The planner's estimate [s], a lower bound of the simulated latency (module's text)."""
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
    """The paper's L as it is printed, which can be below 0; for comparison (module's text)."""
    pivot = printed_pivot(stages, num_micro_batches)
    ends = []
    for s, stage in enumerate(stages):
        if s >= pivot:
            ends.append(stage.all_reduce_s - sum(a.backward_s for a in stages[pivot : s + 1]))
        else:
            ends.append(stage.all_reduce_s + sum(a.backward_s for a in stages[s : pivot + 1]))
    return _until_last_backward(stages, num_micro_batches, pivot) + max(ends)


def corrected_latency(stages: Sequence[StageCost], num_micro_batches: int) -> float:
    """The paper's L with the ends that a timeline shows, its pivot kept (module's text)."""
    pivot = printed_pivot(stages, num_micro_batches)
    ends = []
    for s, stage in enumerate(stages):
        if s > pivot:
            ends.append(stage.all_reduce_s - sum(a.backward_s for a in stages[pivot + 1 : s]))
        else:
            ends.append(stage.all_reduce_s + sum(a.backward_s for a in stages[s : pivot + 1]))
    return _until_last_backward(stages, num_micro_batches, pivot) + max(ends)


def _until_last_backward(stages: Sequence[StageCost], num_micro_batches: int, pivot: int) -> float:
    """T_w + T_s."""
    warm_up = sum(stage.forward_s for stage in stages[: pivot + 1])
    return warm_up + (num_micro_batches - 1) * stages[pivot].both_s
