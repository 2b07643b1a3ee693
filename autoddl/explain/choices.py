"""The values of an explanation: the choices of a plan and their alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.costmodel.strategy import Strategy

__all__ = ["Alternative", "Choice", "MemoryPrice", "StageChoices"]


@dataclass(frozen=True)
class Alternative:
    """Another strategy for a layer, and the plan with it.

    Attributes:
        strategy: the other strategy; of tied layers the strategy of the first.
        regret_s: cost of the best known plan with this strategy, minus the cost of the plan [s].  The cost is the step or the
            communication, as in the plan's objective.  Negative if the plan is not optimal.
        least_regret_s: a proven lower bound on the regret [s], equal to the regret if ``is_exact``; None if no bound is known.
        is_exact: whether no plan with this strategy has a smaller regret.
        deltas_s: time per step on each resource with the alternative, minus the time in the plan [s], by resource.
        memory_bytes: memory of the fullest device with the alternative.
        moved: names of the other choices that change along with this one.
        limit: what the alternative costs: the resource whose time grows the most; ``memory`` if the alternative would be as good
            without the memory limit; empty if no resource's time grows.
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
    """The choice of one strategy: for tied layers, or for equal layers with equal strategies, of which one stands for all.

    Attributes:
        name: block and role of repeated layers (``h.*.mlp.c_fc``), or the name of the variable in the cost table.
        layers: names of all layers of the choice.
        held: names of the layers that an alternative changes: the tied layers, or one layer if repetitions are not tied.
        strategy: the strategy in the plan; of tied layers the strategy of the first.
        resources_s: time per step on each resource, summed over ``layers`` [s], by resource.
        num_options: number of strategies to choose from.
        num_fitting: number of those strategies with which some assignment of the stage may fit in memory.
        alternatives: the alternatives of least regret, in ascending order of regret.
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
        """Time of all layers per step [s]."""
        return sum(self.resources_s.values())

    @property
    def label(self) -> str:
        """The name, followed by the number of layers if the name does not list them."""
        return f"{self.name} x {len(self.layers)}" if len(self.layers) > 1 and " = " not in self.name else self.name

    @property
    def limit(self) -> str:
        """The resource with the largest time; empty if the layers take no time."""
        return max(self.resources_s, key=self.resources_s.__getitem__) if self.seconds else ""


@dataclass(frozen=True)
class MemoryPrice:
    """What the memory limit costs at the plan's micro-batch and recomputation.

    Attributes:
        unlimited_s: a lower bound on the cost without the limit [s]; the optimal cost without the limit if ``is_exact``.
        is_exact: whether ``unlimited_s`` is the optimal cost without the limit.
        seconds_per_byte: time that one more byte of memory would save, to first order; 0 if the limit does not bind.
    """

    unlimited_s: float
    is_exact: bool
    seconds_per_byte: float


@dataclass(frozen=True)
class StageChoices:
    """The choices of a group of equal stages (see :class:`.groups.StageGroup`).

    Attributes:
        title: title of the group.
        stages: numbers of the stages.
        choices: choices in the order of the graph.
        memory_price: what the memory limit costs; None if the stage's table is not exact (see :mod:`.stagetable`).
    """

    title: str
    stages: tuple[int, ...]
    choices: tuple[Choice, ...]
    memory_price: MemoryPrice | None
