"""Search problems: variables with their options, and the cost table over them.

Tied layers share one :class:`Variable`.  A :class:`Problem` is the cost table of one batch and micro-batch together with the
meaning of its numbers.  :class:`Coefficients` and :class:`Phases` hold the components of the step time of a pipeline.  A
:class:`autoddl.costmodel.pricing.PriceBook` makes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from .cluster import Cluster
from .distribution import RowsAndFeatures
from .errors import UserError
from .graph import LayerGraph
from .strategy import Strategy, fitting, transposed
from .strategygroup import StrategyGroup, group_strategies
from .table import ClassCosts, CostTable, Edge
from .workload import Workload

__all__ = ["OBJECTIVES", "Coefficients", "Objective", "OptionSet", "PhaseEdge", "Phases", "Problem", "Variable"]

Objective = str
#: All that a strategy says besides how ranks share samples.
_WITHOUT_SHARING = attrgetter(
    *(one.name for one in fields(Strategy) if one.name not in ("sequence", "positions", "columns"))
)
#: What a search minimises: the time of a training step, or only of its communication (as the AutoDDL paper does).
OBJECTIVES = ("step", "communication")


@dataclass(frozen=True, eq=False)
class OptionSet:
    """The strategies that a variable's layers choose from; equal variables share one object.

    Attributes:
        options: the strategies.
        positions: number of positions of a sample of the layers that any number of ranks may share (:meth:`.LayerKind.positions`).
    """

    options: tuple[Strategy, ...]
    positions: int = 1

    @cached_property
    def index(self) -> dict[Strategy, int]:
        """The index of each strategy in ``options``."""
        return {strategy: i for i, strategy in enumerate(self.options)}

    @cached_property
    def groups(self) -> tuple[StrategyGroup, ...]:
        """The options in groups that run the same steps."""
        return tuple(group_strategies(self.options))

    @cached_property
    def p0(self) -> np.ndarray:
        """Number of slices of the samples, shape (options,)."""
        return np.array([strategy.p0 for strategy in self.options])

    @cached_property
    def ranks_per_sample(self) -> np.ndarray:
        """:attr:`.Strategy.ranks_per_sample` of each option, shape (options,)."""
        return np.array([strategy.ranks_per_sample for strategy in self.options])

    @cached_property
    def alike(self) -> np.ndarray:
        """A number for each option; options that differ only in how ranks share samples have the same; shape (options,)."""
        number: dict[tuple[Any, ...], int] = {}
        return np.array([number.setdefault(_WITHOUT_SHARING(strategy), len(number)) for strategy in self.options])

    def fits(self, samples: int, part: int | None = None) -> np.ndarray:
        """Whether each option divides ``samples`` samples or their positions (:func:`.strategy.fitting`), shape (options,).

        If some passes have ``part`` of the samples, an option has to divide these, without sharing a sample.
        """
        if part is not None and part != samples:
            return np.asarray((part % self.p0 == 0) & (self.ranks_per_sample == 1))
        return np.asarray(fitting(samples, self.p0, self.ranks_per_sample, self.positions))

    @cached_property
    def summa(self) -> np.ndarray:
        """Whether each option is a Summa mesh, shape (options,)."""
        return np.array([strategy.summa for strategy in self.options])

    @cached_property
    def layouts(self) -> tuple[tuple[RowsAndFeatures, ...], np.ndarray]:
        """The distinct canonical layouts of the options, and the index of each option's layout among them."""
        number: dict[RowsAndFeatures, int] = {}
        of_option = [number.setdefault(strategy.rows_and_features, len(number)) for strategy in self.options]
        return tuple(number), np.array(of_option)


@dataclass(frozen=True)
class Variable:
    """Layers that share one choice.

    Attributes:
        name: block and role, or name of the layer.
        layers: names of the layers, in the order of the graph.
        option_set: the strategies of the first layer.
        swapped: names of the layers that take the transposed strategy.
    """

    name: str
    layers: tuple[str, ...]
    option_set: OptionSet
    swapped: frozenset[str] = frozenset()

    @property
    def options(self) -> tuple[Strategy, ...]:
        """The strategies of the first layer."""
        return self.option_set.options

    def strategies(self, layer: str) -> tuple[Strategy, ...]:
        """The strategies of one of the layers, in the order of the options."""
        return tuple(map(transposed, self.options)) if layer in self.swapped else self.options

    def strategy(self, layer: str, option: int) -> Strategy:
        """The strategy of one of the layers under an option."""
        strategy = self.options[option]
        return transposed(strategy) if layer in self.swapped else strategy


@dataclass(frozen=True, eq=False)
class Problem:
    """A search problem: a cost table together with the meaning of its numbers.

    Attributes:
        graph, cluster, workload, objective: the model, the machine, the training step and what to minimise.
        variables: the variables of the table, with their options.
        layer_table: the table without edges, as if redistributions were free.
        edges: computes the edges of the table.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    objective: Objective
    variables: tuple[Variable, ...]
    layer_table: CostTable
    edges: Callable[[], tuple[Edge, ...]] = field(repr=False)

    @cached_property
    def table(self) -> CostTable:
        """The table with layers and redistributions.

        The edges are computed on first use: for most numbers of micro-batches the layers alone already cost too much.
        """
        return replace(self.layer_table, edges=self.edges())

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategy of every layer under a choice (an option index per variable), in the order of the graph."""
        found = {
            layer: variable.strategy(layer, option)
            for variable, option in zip(self.variables, choice)
            for layer in variable.layers
        }
        return {layer.name: found[layer.name] for layer in self.graph.layers}

    def choice(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...]:
        """The choice (an option index per variable) that gives every layer its strategy; inverse of :meth:`strategies`.

        Raises:
            UserError: a layer does not have the strategy, or tied layers differ.
        """
        choice = []
        for variable in self.variables:
            first = variable.layers[0]
            wanted = strategies[first]
            option = variable.option_set.index.get(wanted)
            if not wanted.fits(self.graph[first], self.workload.micro_batch):
                raise UserError(
                    f"a micro-batch of {self.workload.micro_batch} {self.graph.sample}s does not divide over the {wanted.p0} "
                    f"slices of {wanted}"
                )
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
    """Costs of a variable's options as affine functions of the samples b of a micro-batch: forward[0] + b forward[1] seconds.

    Attributes:
        option_set: the options.
        forward, backward: seconds per micro-batch: fixed part and slope per sample, shape (2, options).
        gradient: seconds per training step of the gradients' all-reduce, shape (options,).
        update: seconds per training step of the optimizer step, shape (options,).
        state: bytes of parameters, gradients and optimizer states, shape (options,).
        kept: kept bytes per sample, shape (options,).
        recomputed: bytes per sample that exist while a block is recomputed, shape (options,).
    """

    option_set: OptionSet
    forward: np.ndarray
    backward: np.ndarray
    gradient: np.ndarray
    update: np.ndarray
    state: np.ndarray
    kept: np.ndarray
    recomputed: np.ndarray


@dataclass(frozen=True, eq=False)
class PhaseEdge:
    """Redistributions between two variables, for one micro-batch.

    Attributes:
        source, target: indices of the two variables.
        forward, backward: seconds per micro-batch, by layouts of the options.
    """

    source: int
    target: int
    forward: ClassCosts
    backward: ClassCosts


@dataclass(frozen=True, eq=False)
class Phases:
    """Components of the cost of one micro-batch; each array has shape (options,), and there is one per variable.

    A :class:`Problem` has only their sum over a training step.  The step time of a pipeline depends on each of them.

    Attributes:
        variables: the variables, with their options.
        forward, backward: seconds per micro-batch.
        gradient: seconds per training step of the gradients' all-reduce.
        update: seconds per training step of the optimizer step.
        state: bytes of parameters, gradients and optimizer states.
        kept: bytes kept from the forward to the backward pass of one micro-batch.
        recomputed: bytes that exist while a block is recomputed.
        buffer: bytes that exist only while a layer runs.
        edges: redistributions between variables.
    """

    variables: tuple[Variable, ...]
    forward: tuple[np.ndarray, ...]
    backward: tuple[np.ndarray, ...]
    gradient: tuple[np.ndarray, ...]
    update: tuple[np.ndarray, ...]
    state: tuple[np.ndarray, ...]
    kept: tuple[np.ndarray, ...]
    recomputed: tuple[np.ndarray, ...]
    buffer: tuple[np.ndarray, ...]
    edges: tuple[PhaseEdge, ...]
