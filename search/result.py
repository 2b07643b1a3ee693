"""The result type of all search algorithms."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from autoddl.costmodel.errors import UserError

__all__ = ["PROOF_TOLERANCE", "Result", "SearchError", "Status", "relative_gap"]

#: A cost within this relative distance of a valid lower bound counts as proven optimal.
PROOF_TOLERANCE = 1e-9


class SearchError(UserError):
    """An argument of a search is invalid; the message names the argument, its value and what would be valid."""


class Status(enum.Enum):
    """How a search ended; the value is a full sentence, with the remedy if one is needed."""

    OPTIMAL = "The choice is proven optimal."
    LIMIT_REACHED = (
        "The search stopped without a proof; the gap says how much better another choice could be at most. "
        "Raise the limit on evaluations or time, or use the exact method."
    )
    INTERRUPTED = (
        "The search was interrupted before it had a proof; the gap says how much better another choice could be at most. "
        "Let it run on for a better choice, or a proof."
    )
    INFEASIBLE = (
        "No choice fits the memory limit. Raise the limit to the smallest memory that would do, or use more devices."
    )

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


def relative_gap(cost: float, lower_bound: float) -> float:
    """``(cost - lower_bound) / |cost|``; 0 if the bound reaches the cost, ``inf`` if either is not finite.

    >>> relative_gap(2.0, 1.5)
    0.25
    """
    if cost <= lower_bound:
        return 0.0
    if not (math.isfinite(cost) and math.isfinite(lower_bound)) or cost == 0:
        return math.inf
    return (cost - lower_bound) / abs(cost)


@dataclass(frozen=True)
class Result:
    """The outcome of one search.

    Attributes:
        method: name of the method.
        status: how the search ended.
        choice: an option index per variable of the table; None if no choice was found.
        cost: seconds per training step; ``inf`` without a choice.
        lower_bound: seconds per training step; no choice within the memory limit costs less, to a relative 1e-9.  ``inf`` if
            infeasible.
        memory_bytes: peak memory of the choice; ``nan`` without a choice.
        space_size: number of assignments of the table.
        evaluations: number of choices whose cost was computed; the docstring of each method says what it counts.
        seconds: duration of the search.
        memory_limit_bytes: the limit on peak memory; None for no limit.
        smallest_memory_bytes: the smallest limit that some choice fits, given if and only if the status is INFEASIBLE; ``inf`` if
            every choice has infinite cost.
        statistics: counters of the method (labels, nodes, ...).
    """

    method: str
    status: Status
    choice: tuple[int, ...] | None
    cost: float
    lower_bound: float
    memory_bytes: float
    space_size: int
    evaluations: int
    seconds: float
    memory_limit_bytes: float | None = None
    smallest_memory_bytes: float | None = None
    statistics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def gap(self) -> float:
        """``(cost - lower_bound) / cost``; 0 when proven optimal, ``inf`` without a choice."""
        return relative_gap(self.cost, self.lower_bound)

    @property
    def optimal(self) -> bool:
        return self.status is Status.OPTIMAL

    @property
    def message(self) -> str:
        """How the search ended, and the remedy, in one or two sentences."""
        if self.status is Status.INFEASIBLE and self.smallest_memory_bytes == math.inf:
            return "No choice has a finite cost at any memory limit: some layers have no redistribution between them."
        if self.status is Status.INFEASIBLE and self.smallest_memory_bytes is not None:
            return (
                f"No choice fits the memory limit of {self.memory_limit_bytes:.0f} bytes. "
                f"The smallest memory that would do is {self.smallest_memory_bytes:.0f} bytes."
            )
        return self.status.value
