"""Chimera: pipelines in both directions over the same workers (Li and Hoefler, SC 2021).

f *down* and f *up* pipelines, each with all D stages. Down pipeline i maps stage s to worker (s + i D/f) mod D; up
pipeline i is its exact reverse: stage s is where down pipeline i has stage D - 1 - s. Pipelines are numbered down 0, up 0,
down 1, up 1, ... One *unit* is D micro-batches, D/(2f) in each pipeline. In unit times its tasks occupy the slots

    forward  of the j-th micro-batch at stage s:  s + 2 j
    backward of the j-th micro-batch at stage s:  2 D - 1 - s + 2 j

No two pipelines use the same slot on a worker, and modulo 2 D all slots are different, so the next unit follows 2 D slots
later (*direct* concatenation: its forwards fill the previous unit's final bubbles). Each worker executes its tasks in the
order of slots.

For f = 1 and N = D that order has five phases on worker w. With h = D/2, a = h - w if w < h else w - h + 1, b = h - a,
near = down if w < h else up, far = the other (:func:`phases` counts them):

1. a x forward(near)
2. b x [forward(far), forward(near)]
3. a x [forward(far), backward(far)]
4. b x [backward(near), backward(far)]
5. a x backward(near)

D = 4 (d, u = forward of down, up; capitals backward)::

    worker 0:  d . d u U u U D . D
    worker 1:  . d u d u U D U D .
    worker 2:  . u d u d D U D U .
    worker 3:  u . u d D d D U . U

The other concatenations balance a backward of twice the forward's time. *Forward doubling*: a unit of 2 D micro-batches,
with two micro-batches per forward and one per backward. *Backward halving*: a unit of D micro-batches, with half a
micro-batch per backward. In both, each forward has two backwards of the forward's duration, and a unit takes 3 D slots.
With n = D/(2f) forwards per pipeline, the q-th backward (q = 2 j + half) is at slot 2 D - 1 - s + 2 q for q < n, and for
q >= n another D - 2 n slots later, behind the slots of the plain unit's backwards. The remainder of N modulo 2 D follows as
plain units.

A unit of fewer than D micro-batches (N < D, or the remainder of N) is split over the pipelines as evenly as possible, in
their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np

from ..schedule import Part, Task
from .draft import GeneratorError, ScheduleDraft, ScheduleFamily, backward, forward

__all__ = ["CHIMERA", "flights", "phases", "placements"]

CONCATENATIONS = ("direct", "doubling", "halving")


def phases(num_stages: int, worker: int) -> tuple[int, int]:
    """The counts (a, b) of a worker's five phases for f = 1 and N = D (see the module's docstring).

    >>> [phases(4, worker) for worker in range(4)]
    [(2, 0), (1, 1), (1, 1), (2, 0)]
    """
    half = num_stages // 2
    near_count = half - worker if worker < half else worker - half + 1
    return near_count, half - near_count


def placements(num_stages: int, num_pipelines: int) -> tuple[tuple[int, ...], ...]:
    """``[pipeline][stage] -> worker`` of down 0, up 0, down 1, up 1, ...

    >>> placements(4, 2)
    ((0, 1, 2, 3), (3, 2, 1, 0))
    """
    shift = 2 * num_stages // num_pipelines
    result: list[tuple[int, ...]] = []
    for index in range(num_pipelines // 2):
        down = tuple((stage + index * shift) % num_stages for stage in range(num_stages))
        result += (down, down[::-1])
    return tuple(result)


def _check(num_stages: int, num_pipelines: int, concatenation: str) -> None:
    if num_stages % 2:
        raise GeneratorError(f"num_stages is {num_stages}; chimera needs an even number of stages")
    if num_pipelines < 2 or num_pipelines % 2 or num_stages % num_pipelines:
        fitting = [2 * f for f in range(1, num_stages // 2 + 1) if num_stages % (2 * f) == 0]
        raise GeneratorError(
            f"num_pipelines is {num_pipelines}; with {num_stages} stages chimera takes 2f pipelines where f divides "
            f"{num_stages // 2}: one of {', '.join(map(str, fitting))}"
        )
    if concatenation not in CONCATENATIONS:
        raise GeneratorError(f"concatenation is {concatenation!r}; give one of {', '.join(CONCATENATIONS)}")


class _Shape(Enum):
    """How many micro-batches each forward and each backward of a unit works on."""

    PLAIN = "one micro-batch each"
    DOUBLED = "forwards of two micro-batches, backwards of one"
    HALVED = "forwards of one micro-batch, backwards of half of one"


class _Unit(NamedTuple):
    """Consecutive micro-batches whose slots are computed together.

    Attributes:
        first: its first micro-batch.
        size: its number of micro-batches, over all pipelines.
        shape: micro-batches per forward and backward.
    """

    first: int
    size: int
    shape: _Shape


def _units(num_stages: int, num_micro_batches: int, concatenation: str) -> Iterator[_Unit]:
    """The units that the N micro-batches are divided into."""
    first = 0
    while first < num_micro_batches:
        left = num_micro_batches - first
        size, shape = min(left, num_stages), _Shape.PLAIN
        if concatenation == "doubling" and left >= 2 * num_stages:
            size, shape = 2 * num_stages, _Shape.DOUBLED
        elif concatenation == "halving":
            shape = _Shape.HALVED
        yield _Unit(first, size, shape)
        first += size


def _pieces(first: int, count: int, shape: _Shape) -> Iterator[tuple[int, Part, tuple[tuple[int, Part], ...]]]:
    """The forwards of one pipeline in a unit, each with the backwards of its micro-batches: (micro-batch, part) each."""
    if shape is _Shape.DOUBLED:
        for micro_batch in range(first, first + count, 2):
            yield micro_batch, Part.PAIR, ((micro_batch, Part.WHOLE), (micro_batch + 1, Part.WHOLE))
        return
    for micro_batch in range(first, first + count):
        if shape is _Shape.HALVED:
            answers = ((micro_batch, Part.FIRST_HALF), (micro_batch, Part.SECOND_HALF))
            yield micro_batch, Part.WHOLE, answers
        else:
            yield micro_batch, Part.WHOLE, ((micro_batch, Part.WHOLE),)


class _Pass(NamedTuple):
    """A forward of one pipeline, with the backwards of its micro-batches, at stage 0.

    At stage s the forward is s slots later, and the backwards are s slots earlier.

    Attributes:
        pipeline: its pipeline.
        slot, micro_batch, part: the slot of the forward, and what it works on.
        answers: slot, micro-batch and part of each backward.
    """

    pipeline: int
    slot: int
    micro_batch: int
    part: Part
    answers: tuple[tuple[int, int, Part], ...]


def _passes(num_stages: int, num_micro_batches: int, num_pipelines: int, concatenation: str) -> Iterator[_Pass]:
    """All forwards, of each pipeline in the order of their slots, with their backwards."""
    per_pipeline = num_stages // num_pipelines
    gap = num_stages - 2 * per_pipeline
    base = 0
    for unit in _units(num_stages, num_micro_batches, concatenation):
        each, extra = divmod(unit.size, num_pipelines)
        first = unit.first
        for pipeline in range(num_pipelines):
            count = each + (pipeline < extra)
            for j, (micro_batch, part, answers) in enumerate(_pieces(first, count, unit.shape)):
                of_answers = tuple(
                    (base + 2 * num_stages - 1 + 2 * answer + (answer >= per_pipeline) * gap, *answered)
                    for answer, answered in enumerate(answers, start=j * len(answers))
                )
                yield _Pass(pipeline, base + 2 * j, micro_batch, part, of_answers)
            first += count
        base += (2 if unit.shape is _Shape.PLAIN else 3) * num_stages


def _chimera(
    num_stages: int, num_micro_batches: int, num_pipelines: int = 2, concatenation: str = "direct"
) -> ScheduleDraft:
    _check(num_stages, num_pipelines, concatenation)
    placement = placements(num_stages, num_pipelines)
    slotted: list[list[tuple[int, Task]]] = [[] for _ in range(num_stages)]
    for pipeline, slot, micro_batch, part, answers in _passes(
        num_stages, num_micro_batches, num_pipelines, concatenation
    ):
        for stage, worker in enumerate(placement[pipeline]):
            row = slotted[worker]
            row.append((slot + stage, forward(stage, micro_batch, pipeline, part)))
            for back, answered, answer_part in answers:
                row.append((back - stage, backward(stage, answered, pipeline, answer_part)))
    for row in slotted:
        row.sort(key=_slot)
    return ScheduleDraft(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        placement=placement,
        workers=tuple([task for _, task in row] for row in slotted),
        update_period=num_micro_batches,
        delays=(0,) * num_stages,
    )


def flights(
    num_stages: int, num_micro_batches: int, num_pipelines: int = 2, concatenation: str = "direct"
) -> tuple[list[float], float]:
    """The most micro-batches in flight at each stage of any pipeline, and the largest forward, in micro-batches.

    In flight is what the slots before a forward have taken and not freed; other stages of the worker do not matter.

    Raises:
        GeneratorError: there is no such schedule.

    >>> flights(4, 4)
    ([2.0, 2.0, 2.0, 1.0], 1.0)
    """
    _check(num_stages, num_pipelines, concatenation)
    of_pipelines: list[list[_Pass]] = [[] for _ in range(num_pipelines)]
    for one in _passes(num_stages, num_micro_batches, num_pipelines, concatenation):
        of_pipelines[one.pipeline].append(one)
    most, largest = np.zeros(num_stages), 0.0
    for passes in filter(None, of_pipelines):
        taken = np.array([one.part.size for one in passes], dtype=float)
        backs = [(slot, float(part.size)) for one in passes for slot, _, part in one.answers]
        begins, freed = np.array([one.slot for one in passes]), np.cumsum([0.0, *(size for _, size in backs)])
        # Backwards of stage s are before a forward if, at stage 0, they are less than 2 s slots behind it.
        shift = 2 * np.arange(num_stages)[:, None]
        num_freed = np.searchsorted([slot for slot, _ in backs], begins + shift)
        most = np.maximum(most, (np.cumsum(taken) - freed[num_freed]).max(axis=1))
        largest = max(largest, float(taken.max()))
    return most.tolist(), largest


def _slot(entry: tuple[int, Task]) -> int:
    return entry[0]


CHIMERA = ScheduleFamily(
    "chimera",
    "f pipelines down and f up over the same workers; bubble (D-2f)/(2fN+D-2f) at N = D, 2f copies of weights",
    _chimera,
    options={
        "num_pipelines": "2f, f down and f up; f divides D/2 (default 2)",
        "concatenation": "for N > D: direct, doubling (forwards of two) or halving (backwards of half a micro-batch)",
    },
)
