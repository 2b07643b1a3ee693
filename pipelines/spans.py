"""Spans of a measured training step: what each rank did when.  Needs no OneFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.collectives import Step

__all__ = ["KINDS", "Recorded", "Span", "with_waiting"]

#: What a rank does in a span.
KINDS = ("computation", "communication", "waiting")


@dataclass(frozen=True)
class Span:
    """What a rank did for some time.

    Attributes:
        kind: one of :data:`KINDS`.
        layer: name of the layer; "" for what belongs to no single layer, such as the sum of a stage's gradients.
        phase: ``forward``, ``backward``, ``recomputation``, ``gradient`` or ``optimizer step``.
        start, end: times [s].
        launched: time at which Python had launched all operations of the span; until then it was busy (dispatch).
        step: communication step; None for other kinds.
    """

    kind: str
    layer: str
    phase: str
    start: float
    end: float
    launched: float
    step: Step | None = None

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start

    @property
    def dispatch_s(self) -> float:
        """Seconds in which Python launched operations."""
        return min(self.launched, self.end) - self.start

    def since(self, zero: float) -> Span:
        """The span with times since ``zero``."""
        return replace(self, start=self.start - zero, end=self.end - zero, launched=self.launched - zero)


@dataclass(frozen=True)
class Recorded:
    """A training step as one rank recorded it.

    Attributes:
        spans: what the rank did, in order; times are since the beginning of the step.
        seconds: duration of the step.
    """

    spans: tuple[Span, ...]
    seconds: float


def with_waiting(ranks: Mapping[int, Sequence[Span]]) -> dict[int, list[Span]]:
    """Divide each communication span into waiting for the last rank of the group, and the communication itself.

    The k-th step of a rank along an axis is one with the k-th steps of the other ranks of its group.

    Args:
        ranks: the spans of all ranks of a stage, by rank within the stage, on one clock.
    """
    starts: dict[tuple[int, ...], list[list[float]]] = {}
    for rank in sorted(ranks):
        counts: dict[tuple[int, ...], int] = {}
        for span in ranks[rank]:
            if span.step is not None:
                group = _group(rank, span.step)
                number = counts[group] = counts.get(group, -1) + 1
                known = starts.setdefault(group, [])
                if number == len(known):
                    known.append([])
                known[number].append(span.start)
    result: dict[int, list[Span]] = {}
    for rank, spans in ranks.items():
        numbers: dict[tuple[int, ...], int] = {}
        result[rank] = []
        for span in spans:
            if span.step is None:
                result[rank].append(span)
                continue
            group = _group(rank, span.step)
            number = numbers[group] = numbers.get(group, -1) + 1
            begins = min(span.end, max(starts[group][number]))
            if begins > span.start:
                result[rank].append(replace(span, kind="waiting", end=begins, step=None))
            result[rank].append(replace(span, start=begins, launched=max(begins, span.launched)))
    return result


def _group(rank: int, step: Step) -> tuple[int, ...]:
    """The ranks with which a rank runs a step."""
    size, stride = step.axis.size, step.axis.stride
    first = rank - rank // stride % size * stride
    return tuple(first + k * stride for k in range(size))
