"""What every search returns: one frozen `Result`, whatever the algorithm."""

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
    """A search was asked for something it cannot do: the message names the option, its value and what would be right."""


class Status(enum.Enum):
    """How a search ended; the value is a full sentence with the remedy, where one is needed."""

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
    """``(cost - lower_bound) / |cost|``: 0 where the bound reaches the cost, ``inf`` where either is not finite."""
    if cost <= lower_bound:
        return 0.0
    if not (math.isfinite(cost) and math.isfinite(lower_bound)) or cost == 0:
        return math.inf
    return (cost - lower_bound) / abs(cost)


@dataclass(frozen=True)
class Result:
    """The outcome of one search.

    ``choice`` holds one option index per variable of the table, or is ``None`` where no choice was found; then ``cost`` is
    ``inf`` and ``memory_bytes`` is ``nan``.  ``cost`` and ``lower_bound`` are seconds per training step: no choice within the
    memory limit costs less than ``lower_bound`` (to a relative 1e-9, the tolerance of proofs; ``inf`` where infeasible).
    ``smallest_memory_bytes`` is given exactly where the status is INFEASIBLE: the smallest limit that some choice fits;
    ``inf`` where every choice has infinite cost.  ``evaluations`` counts the choices whose cost was looked at; each method
    says in its docstring what that is.  ``statistics`` holds the method's own counters (labels, nodes, width, ...).
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
        """One sentence or two for a person: what happened, and what would help."""
        if self.status is Status.INFEASIBLE and self.smallest_memory_bytes == math.inf:
            return "No choice has a finite cost at any memory limit: some layers have no redistribution between them."
        if self.status is Status.INFEASIBLE and self.smallest_memory_bytes is not None:
            return (
                f"No choice fits the memory limit of {self.memory_limit_bytes:.0f} bytes. "
                f"The smallest memory that would do is {self.smallest_memory_bytes:.0f} bytes."
            )
        return self.status.value
