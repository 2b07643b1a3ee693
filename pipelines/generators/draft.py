"""The result of a family's generator: compute tasks only. Passes (:mod:`.passes`) turn it into a complete schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoddl.costmodel.errors import UserError

from ..schedule import Kind, Part, Task

__all__ = ["GeneratorError", "ScheduleDraft", "ScheduleFamily", "backward", "check_at_least", "forward", "round_robin"]


_ITERATIONS = "iterations"


class GeneratorError(UserError):
    """Arguments that a family of schedules cannot be generated for."""


@dataclass(frozen=True)
class ScheduleDraft:
    """Compute tasks per worker; fields as in :class:`~autoddl.pipelines.schedule.Schedule`."""

    num_stages: int
    num_micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    workers: tuple[list[Task], ...]
    update_period: int
    delays: tuple[int, ...]


@dataclass(frozen=True)
class ScheduleFamily:
    """A family of schedules.

    Attributes:
        name: used by ``generate`` and on the command line.
        summary: one line for ``autoddl schedule list``.
        build: ``build(num_stages, num_micro_batches, **options)``; an asynchronous family also takes ``iterations``.
        synchronous: whether all micro-batches of an iteration use the same weights.
        options: the options of ``build`` in addition to the common ones, each with a one-line description.
    """

    name: str
    summary: str
    build: Callable[..., ScheduleDraft]
    synchronous: bool = True
    options: dict[str, str] = field(default_factory=dict)

    def draft(self, num_stages: int, num_micro_batches: int, options: dict[str, Any]) -> ScheduleDraft:
        """Build a draft.

        Raises:
            GeneratorError: an option is unknown, or a number does not fit the family.
        """
        for option in options:
            if option not in self.options and option != _ITERATIONS:
                known = ", ".join(sorted(self.options)) or "none of its own"
                raise GeneratorError(f"schedule {self.name} has no option {option}; it has {known}")
        return self.build(num_stages, num_micro_batches, **options)


def check_at_least(what: str, value: int, least: int, reason: str = "") -> None:
    """Raise :class:`GeneratorError` unless ``value`` is an ``int`` of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise GeneratorError(f"{what} is {value}; give a whole number of at least {least}{reason}")


def forward(stage: int, micro_batch: int, pipeline: int = 0, part: Part = Part.WHOLE) -> Task:
    return Task(Kind.FORWARD, pipeline, stage, micro_batch, part)


def backward(stage: int, micro_batch: int, pipeline: int = 0, part: Part = Part.WHOLE) -> Task:
    return Task(Kind.BACKWARD, pipeline, stage, micro_batch, part)


def round_robin(num_workers: int, groups: int = 1) -> tuple[int, ...]:
    """The placement of ``groups * num_workers`` stages on the workers in turn.

    >>> round_robin(3, groups=2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_workers)) * groups
