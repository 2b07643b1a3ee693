"""Spans of a measured training step: what each rank did when.  Needs no OneFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import Any

from autoddl.costmodel.collectives import Step

__all__ = ["KINDS", "Communication", "Recorded", "Span", "with_waiting"]

#: What a rank does in a span.
KINDS = ("computation", "communication", "waiting")


@dataclass(frozen=True)
class Communication:
    """What the ranks of a group communicate with each other in a span.

    Attributes:
        collective: name of the collective.
        size, stride: number of ranks in the group, and difference between neighbouring ones.
        sent_bytes: bytes that each rank sends; in an exchange of unequal pieces, the busiest one.
    """

    collective: str
    size: int
    stride: int
    sent_bytes: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Communication:
        """The communication of one step, or of the steps of an exchange, of which there is one for each network level."""
        return cls(
            steps[0].collective.value,
            prod(step.axis.size for step in steps),
            min(step.axis.stride for step in steps),
            sum(step.sent_bytes for step in steps),
        )

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks with which a rank communicates, itself included.

        >>> Communication("all-reduce", 2, 2, 0.0).group_of(3)
        (1, 3)
        """
        first = rank - rank // self.stride % self.size * self.stride
        return tuple(first + k * self.stride for k in range(self.size))


@dataclass(frozen=True)
class Span:
    """What a rank did for some time.

    Attributes:
        kind: one of :data:`KINDS`.
        layer: name of the layer; "" for what belongs to no single layer, such as the sum of a stage's gradients.
        phase: ``forward``, ``backward``, ``recomputation``, ``gradient`` or ``optimizer step``.
        start, end: times [s].
        launched: time at which Python had launched all operations of the span; until then it was busy (dispatch).
        what: what was communicated; None for other kinds.
    """

    kind: str
    layer: str
    phase: str
    start: float
    end: float
    launched: float
    what: Communication | None = None

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

    def document(self) -> dict[str, Any]:
        """The step as a JSON object, for other ranks of the same job."""
        return {"spans": [astuple(span) for span in self.spans], "seconds": self.seconds}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Recorded:
        """Read the result of :meth:`document`.

        >>> recorded = Recorded((Span("computation", "fc", "forward", 0.0, 1.0, 0.5),), 2.0)
        >>> Recorded.of(recorded.document()) == recorded
        True
        """
        spans = tuple(
            Span(kind, layer, phase, start, end, launched, Communication(*what) if what else None)
            for kind, layer, phase, start, end, launched, what in document["spans"]
        )
        return cls(spans, document["seconds"])


def with_waiting(ranks: Mapping[int, Sequence[Span]]) -> dict[int, list[Span]]:
    """Divide each communication span into waiting for the last rank of the group, and the communication itself.

    The k-th communication of a rank in a group is one with the k-th ones of the other ranks of the group.

    Args:
        ranks: the spans of all ranks of a stage, by rank within the stage, on one clock.
    """
    last_starts: dict[tuple[tuple[int, ...], int], float] = {}
    for rank, spans in ranks.items():
        for span, key in _numbered(rank, spans):
            if key is not None:
                last_starts[key] = max(span.start, last_starts.get(key, span.start))
    result: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for rank, spans in ranks.items():
        for span, key in _numbered(rank, spans):
            if key is None:
                result[rank].append(span)
                continue
            begins = min(span.end, last_starts[key])
            if begins > span.start:
                result[rank].append(replace(span, kind="waiting", end=begins, what=None))
            result[rank].append(replace(span, start=begins, launched=max(begins, span.launched)))
    return result


def _numbered(rank: int, spans: Sequence[Span]) -> Iterator[tuple[Span, tuple[tuple[int, ...], int] | None]]:
    """Yield each span with (its group, its number among the communications of the group); with None if it is none."""
    counts: dict[tuple[int, ...], int] = {}
    for span in spans:
        if span.what is None:
            yield span, None
            continue
        group = span.what.group_of(rank)
        number = counts[group] = counts.get(group, -1) + 1
        yield span, (group, number)
