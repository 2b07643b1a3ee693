"""What is chosen and what it costs: variables with their options, and the problem of a search.

Layers that are tied share one :class:`Variable`.  A :class:`Problem` is the cost table of one micro-batch with what its numbers
stand for; :class:`Coefficients` and :class:`Phases` have the parts of which a pipeline's step is made.  All of them are made by a
:class:`autoddl.costmodel.pricing.PriceBook`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .cluster import Cluster
from .errors import UserError
from .graph import LayerGraph
from .layoutprices import Layout
from .strategy import Strategy, transposed
from .table import ByClass, CostTable, Edge
from .workload import Workload

__all__ = ["OBJECTIVES", "Coefficients", "Objective", "Offer", "PhaseEdge", "Phases", "Problem", "Variable"]

Objective = str
#: What a search minimises: the time of a step, or (as the paper does) of its communication alone.
OBJECTIVES = ("step", "communication")


@dataclass(frozen=True, eq=False)
class Offer:
    """The strategies that a variable's layers choose from; equal variables share one object."""

    options: tuple[Strategy, ...]

    @cached_property
    def index(self) -> dict[Strategy, int]:
        """Where each option stands."""
        return {strategy: i for i, strategy in enumerate(self.options)}

    @cached_property
    def p0(self) -> np.ndarray:
        """Into how many slices each option cuts the samples."""
        return np.array([strategy.p0 for strategy in self.options])

    @cached_property
    def summa(self) -> np.ndarray:
        """Which options are Summa meshes."""
        return np.array([strategy.summa for strategy in self.options])

    @cached_property
    def layouts(self) -> tuple[tuple[Layout, ...], np.ndarray]:
        """The distinct canonical layouts of the options, and which of them each option has."""
        number: dict[Layout, int] = {}
        of_option = [number.setdefault(strategy.rows_and_features, len(number)) for strategy in self.options]
        return tuple(number), np.array(of_option)


@dataclass(frozen=True)
class Variable:
    """Layers that share one choice.

    Attributes:
        name: of the block and role, or of the first layer.
        layers: names, in the order of the graph.
        offer: the strategies of the first layer.
        swapped: which of the layers take the transposed strategy.
    """

    name: str
    layers: tuple[str, ...]
    offer: Offer
    swapped: frozenset[str] = frozenset()

    @property
    def options(self) -> tuple[Strategy, ...]:
        """The strategies of the first layer."""
        return self.offer.options

    def strategy(self, layer: str, option: int) -> Strategy:
        """The strategy of one of the layers."""
        strategy = self.options[option]
        return transposed(strategy) if layer in self.swapped else strategy


@dataclass(frozen=True, eq=False)
class Problem:
    """A cost table together with what its numbers stand for.

    Attributes:
        graph, cluster, workload, objective: what it is the table of.
        variables: of the table, with the options on offer.
        alone: the table with redistributions for nothing: what the layers cost by themselves.
        edges: works out the redistributions.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    objective: Objective
    variables: tuple[Variable, ...]
    alone: CostTable
    edges: Callable[[], tuple[Edge, ...]] = field(repr=False)

    @cached_property
    def table(self) -> CostTable:
        """The layers and the redistributions between them.  These are worked out when they are first asked for: of most numbers of
        micro-batches nobody does, because what the layers cost by themselves is too much already."""
        return replace(self.alone, edges=self.edges())

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategy of every layer, in the order of the graph."""
        found = {
            layer: variable.strategy(layer, option)
            for variable, option in zip(self.variables, choice)
            for layer in variable.layers
        }
        return {layer.name: found[layer.name] for layer in self.graph.layers}

    def choice(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...]:
        """The options that give every layer, by name, its strategy.

        Raises:
            UserError: a layer cannot have it.
        """
        choice = []
        for variable in self.variables:
            first = variable.layers[0]
            wanted = strategies[first]
            if self.workload.micro_batch % wanted.p0:
                raise UserError(
                    f"a micro-batch of {self.workload.micro_batch} {self.graph.sample}s does not divide over the {wanted.p0} "
                    f"slices of {wanted}"
                )
            option = variable.offer.index.get(wanted)
            if option is None:
                raise UserError(f"{self.graph[first].describe()} does not divide by {wanted}")
            for name in variable.layers[1:]:
                mine = strategies[name]
                same = mine is wanted and name not in variable.swapped
                if not same and mine != variable.strategy(name, option):
                    raise UserError(f"{name} is tied to {first}: {mine} is not {variable.strategy(name, option)}")
            choice.append(option)
        return tuple(choice)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """A variable's options, for a micro-batch of b samples: seconds forward[0] + b forward[1], and so on.

    Attributes:
        forward, backward: shape (2, options): fixed, and per sample.
        gradient, state: seconds and bytes per step.
        kept: bytes per sample.
    """

    offer: Offer
    forward: np.ndarray
    backward: np.ndarray
    gradient: np.ndarray
    state: np.ndarray
    kept: np.ndarray


@dataclass(frozen=True, eq=False)
class PhaseEdge:
    """Redistributions between two variables, of one micro-batch: seconds forward and backward by classes of options."""

    source: int
    target: int
    forward: ByClass
    backward: ByClass


@dataclass(frozen=True, eq=False)
class Phases:
    """What every option does to the passes of one micro-batch, to the update and to memory; one array per variable.

    Where a :class:`Problem` has one cost of a step, this tells its parts: a pipeline's step depends on each of them.

    Attributes:
        forward, backward: seconds of one micro-batch.
        gradient: seconds per step of the gradients' all-reduce.
        state: bytes of parameters, gradients and optimizer.
        kept: bytes that one micro-batch keeps from its forward to its backward pass.
        buffer: bytes that exist only while a layer runs.
        edges: redistributions between variables.
    """

    variables: tuple[Variable, ...]
    forward: tuple[np.ndarray, ...]
    backward: tuple[np.ndarray, ...]
    gradient: tuple[np.ndarray, ...]
    state: tuple[np.ndarray, ...]
    kept: tuple[np.ndarray, ...]
    buffer: tuple[np.ndarray, ...]
    edges: tuple[PhaseEdge, ...]
