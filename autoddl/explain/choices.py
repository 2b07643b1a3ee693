"""The choices of a plan with their alternatives, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.costmodel.strategy import Strategy

__all__ = ["Alternative", "Choice", "MemoryPrice", "StageChoices"]


@dataclass(frozen=True)
class Alternative:
    """A strategy that a layer could have had.

    Attributes:
        strategy: of the first of the layers that are tied together.
        regret_s: how much more the best plan with it costs [s] (of what the plan minimises); less than 0 where the plan is not
            optimal.
        least_regret_s: a proven lower bound; equal where ``is_exact``; None where none is known.
        deltas_s: what the step spends more on each resource [s].
        memory_bytes: of that plan, on each device.
        moved: the choices, by name, that change along with it.
        limit: what speaks against it: the resource that grows the most; ``memory`` where it would be as good without the memory
            limit; empty where nothing does.
    """

    strategy: Strategy
    regret_s: float
    least_regret_s: float | None
    is_exact: bool
    deltas_s: Mapping[str, float]
    memory_bytes: float
    moved: tuple[str, ...]
    limit: str


@dataclass(frozen=True)
class Choice:
    """One choice of the plan: layers that are tied together, or equal ones of which one stands for all.

    Attributes:
        name: of the block and role, or of the first layer.
        layers: all of them, by name.
        held: those that an alternative moves (one, where every repetition has a choice of its own).
        strategy: of the first.
        resources_s: seconds per step of each resource, of all layers.
        num_options, num_fitting: strategies on offer, and those with which anything fits the memory limit.
        alternatives: the nearest ones, ascending.
    """

    name: str
    layers: tuple[str, ...]
    held: tuple[str, ...]
    strategy: Strategy
    resources_s: Mapping[str, float]
    num_options: int
    num_fitting: int
    alternatives: tuple[Alternative, ...]

    @property
    def seconds(self) -> float:
        """Of all its layers, per step."""
        return sum(self.resources_s.values())

    @property
    def label(self) -> str:
        """With the number of layers, where the name does not tell them."""
        return f"{self.name} x {len(self.layers)}" if len(self.layers) > 1 and " = " not in self.name else self.name

    @property
    def limit(self) -> str:
        """The resource that takes the largest part of its time; empty where it takes none."""
        return max(self.resources_s, key=self.resources_s.__getitem__) if self.seconds else ""


@dataclass(frozen=True)
class MemoryPrice:
    """What the memory limit costs, at the plan's micro-batch and recomputation.

    Attributes:
        unlimited_s: a lower bound on the cost [s] without the limit; the optimum then where ``is_exact``.
        seconds_per_byte: how much a byte more would save, to first order; 0 where the limit does not bind.
    """

    unlimited_s: float
    is_exact: bool
    seconds_per_byte: float


@dataclass(frozen=True)
class StageChoices:
    """The choices of equal stages (see :class:`.groups.StageGroup`).

    Attributes:
        memory_price: what the memory limit costs; None where it is not that of one stage.
    """

    title: str
    stages: tuple[int, ...]
    choices: tuple[Choice, ...]
    memory_price: MemoryPrice | None
