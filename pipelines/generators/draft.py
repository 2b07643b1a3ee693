"""What a family produces: the compute tasks alone. Passes add the rest; the door makes a validated schedule of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoddl.costmodel.errors import UserError

from ..schedule import Kind, Part, Task

__all__ = ["Draft", "Family", "GeneratorError", "at_least", "backward", "forward", "straight"]


_ITERATIONS = "iterations"


class GeneratorError(UserError):
    """Numbers that a family of schedules cannot be generated for."""


@dataclass(frozen=True)
class Draft:
    """Compute tasks per worker; fields as in :class:`~autoddl.pipelines.schedule.Schedule`."""

    num_stages: int
    num_micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    workers: tuple[list[Task], ...]
    update_period: int
    delays: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """A family of schedules."""

    name: str
    summary: str
    """One line for ``autoddl schedule list``."""
    build: Callable[..., Draft]
    """``build(num_stages, num_micro_batches, **options)``; an asynchronous family also takes ``iterations``."""
    synchronous: bool = True
    options: dict[str, str] = field(default_factory=dict)
    """The options that ``build`` knows beside the common ones, each with a line of explanation."""

    def draft(self, num_stages: int, num_micro_batches: int, options: dict[str, Any]) -> Draft:
        for option in options:
            if option not in self.options and option != _ITERATIONS:
                known = ", ".join(sorted(self.options)) or "none of its own"
                raise GeneratorError(f"schedule {self.name} has no option {option}; it has {known}")
        return self.build(num_stages, num_micro_batches, **options)


def at_least(what: str, value: int, least: int, reason: str = "") -> None:
    """Refuse a number that is too small (or no whole number)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise GeneratorError(f"{what} is {value}; give a whole number of at least {least}{reason}")


def forward(stage: int, micro_batch: int, pipeline: int = 0, part: Part = Part.WHOLE) -> Task:
    return Task(Kind.FORWARD, pipeline, stage, micro_batch, part)


def backward(stage: int, micro_batch: int, pipeline: int = 0, part: Part = Part.WHOLE) -> Task:
    return Task(Kind.BACKWARD, pipeline, stage, micro_batch, part)


def straight(num_workers: int, groups: int = 1) -> tuple[int, ...]:
    """The placement that hands stages to workers in turn, ``groups`` times."""
    return tuple(range(num_workers)) * groups
