"""Strategies: how one layer is spread over the devices.

At each network level the devices form a mesh (p0, p1, p2), p2 innermost.  For a matrix product O = I W (AutoDDL, Section 3):

======================  ==========  ==========  ==========
tensor                  axis p0     axis p1     axis p2
======================  ==========  ==========  ==========
input I                 S0          B           S1
weight W                B           S1          S0
output O                S0          S1          P
======================  ==========  ==========  ==========

Around the product the activations are *canonical* (:mod:`autoddl.costmodel.distribution`): rows over p0, features over the
other s = p1 p2 ranks.  So a layer gathers its input over p1, multiplies, and reduce-scatters its output over p2.  Layers
without a product (norms, attention, sums, losses) work on the canonical layout itself: their strategy is (p0, s, 1).

An embedding is the product of one-hot rows with its table.  Its axes stand in the order (p0, p2, p1), so that its table at
(p0, p1, p2) lies exactly like the transposed matrix of a linear layer at (p0, p2, p1): tied weights are stored once.

Summa spreads a product over a mesh of r x c ranks per level; input, weight and output are all split S0 over r and S1 over c,
nothing is replicated: (r, c) is written as (r, c, 1) with ``summa`` set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from .distribution import Axis, Distribution, canonical
from .kinds.kind import Splitting
from .kinds.registry import kind_of
from .layer import Layer
from .sbp import Broadcast, SBPState, Split

__all__ = ["Alike", "Strategy", "alike", "data_parallel", "enumerate_strategies", "mesh_axes", "transposed"]

Split3 = tuple[int, int, int]


@dataclass(frozen=True)
class Strategy:
    """(p0, p1, p2) for each network level, outermost first (see the module's docstring)."""

    splits: tuple[Split3, ...]
    summa: bool = False

    def __str__(self) -> str:
        return " | ".join(f"({p0},{p1},{p2})" for p0, p1, p2 in self.splits) + (" summa" if self.summa else "")

    @property
    def p0(self) -> int:
        """Into how many slices the samples are cut."""
        return prod(split[0] for split in self.splits)

    @property
    def p1(self) -> int:
        """The product of p1 over the levels."""
        return prod(split[1] for split in self.splits)

    @property
    def p2(self) -> int:
        """The product of p2 over the levels."""
        return prod(split[2] for split in self.splits)

    @property
    def panels(self) -> int:
        """Into how many panels a Summa product cuts its operands."""
        return max(self.p0, self.p1)

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.p0 * self.p1 * self.p2

    @cached_property
    def rows_and_features(self) -> tuple[tuple[int, int], ...]:
        """(p0, s) for each level: the layout of the activations around the layer."""
        return tuple((p0, p1 * p2) for p0, p1, p2 in self.splits)

    @property
    def activations(self) -> Distribution:
        """The canonical layout of the activations around the layer."""
        return canonical(self.rows_and_features)

    def axes(self, which: int, embedding: bool = False) -> tuple[Axis, ...]:
        """The mesh axes of p0 (0), p1 (1) or p2 (2), one per level where it is longer than 1, outermost first."""
        return mesh_axes(self.splits, embedding)[which]

    def sbp(self, layer: Layer) -> dict[str, Distribution | None]:
        """What every axis does to input, weight and output around the product, as in the table of the module's docstring.

        The axes are listed as (p0, p1, p2) for every kind of layer, so that an entry stands beside the number of the strategy
        that it belongs to; axes of size 1 are kept, and a layer without weights has None for ``weight``.  This is a table for
        readers: where an axis's ranks lie is what :meth:`axes` says (for an embedding p2 lies outside p1), and the activations
        between layers are :attr:`activations`.
        """
        input_states, weight_states, output_states = kind_of(layer.kind).states
        if self.summa:
            input_states = weight_states = output_states = (Split(0), Split(1), Broadcast())
        return {
            "input": self._on_mesh(input_states),
            "weight": self._on_mesh(weight_states) if layer.parameters else None,
            "output": self._on_mesh(output_states),
        }

    def divides(self, layer: Layer) -> bool:
        """Whether the layer can be spread so: features (whole heads, where it has heads) divide, images stay whole, and what
        has no product is not split over p2."""
        kind = kind_of(layer.kind)
        if self.p2 > 1 and (self.summa or kind.splitting is not Splitting.PRODUCT):
            return False
        if self.summa and not kind.offers_summa(layer, self):
            return False
        if self.p1 * self.p2 == 1:
            return True
        return kind.splitting is not Splitting.SAMPLES and kind.divides(layer, self)

    def _on_mesh(self, states: Sequence[SBPState]) -> Distribution:
        return Distribution.on_mesh([list(zip(split, states)) for split in self.splits])


@dataclass(frozen=True, eq=False)
class Alike:
    """Strategies that run the same steps along axes of other sizes: to arithmetic they are one, whose numbers are arrays.

    Attributes:
        indices: where they stand in the sequence that they were taken from, shape (strategies,).
        splits: shape (strategies, levels, 3).
        summa: of all of them.
        sized: the network levels on which all have the same splits.
    """

    indices: np.ndarray
    splits: np.ndarray
    summa: bool
    sized: tuple[bool, ...]

    @cached_property
    def _products(self) -> np.ndarray:
        return self.splits.prod(axis=1)

    @property
    def p0(self) -> np.ndarray:
        """As of one :class:`Strategy`; shape (strategies,)."""
        return self._products[:, 0]

    @property
    def p1(self) -> np.ndarray:
        """As of one :class:`Strategy`; shape (strategies,)."""
        return self._products[:, 1]

    @property
    def p2(self) -> np.ndarray:
        """As of one :class:`Strategy`; shape (strategies,)."""
        return self._products[:, 2]

    @property
    def panels(self) -> np.ndarray:
        """As of one :class:`Strategy`; shape (strategies,)."""
        return np.maximum(self.p0, self.p1)

    def axes(self, which: int, embedding: bool = False) -> tuple[Axis, ...]:
        """As of one :class:`Strategy`; sizes are arrays, or one number on a level that is ``sized``.  Strides mean nothing."""
        axes: list[Any] = []
        for level, is_sized in enumerate(self.sized):
            sizes = self.splits[:, level, which]
            if sizes[0] > 1:
                axes.append(Axis(cast(int, int(sizes[0]) if is_sized else sizes), 0, level))
        return tuple(axes)


def alike(strategies: Sequence[Strategy], sized: tuple[bool, ...]) -> Iterator[Alike]:
    """Strategies in groups that run the same steps: axes longer than 1 in the same places, of the same size on levels that are
    ``sized`` (where the price of a step is not the same formula for all sizes)."""
    splits = np.array([strategy.splits for strategy in strategies])
    summa = np.array([strategy.summa for strategy in strategies])
    pattern = np.where(np.array(sized)[None, :, None], splits, splits > 1).reshape(len(strategies), -1)
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(np.column_stack((pattern, summa))):
        groups.setdefault(row.tobytes(), []).append(index)
    for members in groups.values():
        indices = np.array(members)
        yield Alike(indices, splits[indices], bool(summa[indices[0]]), sized)


@cache
def mesh_axes(splits: tuple[Split3, ...], embedding: bool) -> tuple[tuple[Axis, ...], ...]:
    """The axes of p0, p1 and p2, one per level where it is longer than 1, outermost first."""
    order = (0, 2, 1) if embedding else (0, 1, 2)
    stride = prod(prod(split) for split in splits)
    axes: tuple[list[Axis], ...] = ([], [], [])
    for level, split in enumerate(splits):
        for which in order:
            stride //= split[which]
            if split[which] > 1:
                axes[which].append(Axis(split[which], stride, level))
    return tuple(tuple(of_one) for of_one in axes)


def transposed(strategy: Strategy) -> Strategy:
    """The strategy of a layer whose weight is the transpose of this one's: p1 and p2 change places."""
    return Strategy(tuple((p0, p2, p1) for p0, p1, p2 in strategy.splits))


def data_parallel(level_sizes: Sequence[int]) -> Strategy:
    """Everything on the samples: (p, 1, 1) at every level."""
    return Strategy(tuple((size, 1, 1) for size in level_sizes))


@cache
def _splits(size: int) -> tuple[Split3, ...]:
    """All ordered factorisations of ``size`` into three."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return tuple((p0, p1, size // p0 // p1) for p0 in divisors for p1 in divisors if (size // p0) % p1 == 0)


@cache
def _all(level_sizes: tuple[int, ...], splitting: Splitting) -> tuple[Strategy, ...]:
    """Every strategy of layers that are split so, before shapes are looked at."""
    if splitting is Splitting.SAMPLES:
        return (data_parallel(level_sizes),)
    per_level = [_splits(size) for size in level_sizes]
    strategies = (Strategy(splits) for splits in product(*per_level))
    if splitting is Splitting.PRODUCT:
        return tuple(strategies)
    return tuple(s for s in strategies if s.p2 == 1)


def enumerate_strategies(layer: Layer, level_sizes: Sequence[int], summa: bool = False) -> Iterator[Strategy]:
    """The strategies of a layer that divide its features and heads (whether the samples divide is up to the micro-batch).

    Args:
        level_sizes: devices of each network level, outermost first.
        summa: offer Summa meshes (r, c > 1) to linear layers too.
    """
    sizes, kind = tuple(level_sizes), kind_of(layer.kind)
    for strategy in _all(sizes, kind.splitting):
        if strategy.divides(layer):
            yield strategy
    if summa and kind.splitting is Splitting.PRODUCT and not any(p.tied_to for p in layer.parameters):
        for strategy in _all(sizes, Splitting.ROWS_AND_FEATURES):
            if strategy.p0 > 1 and strategy.p1 > 1:
                candidate = Strategy(strategy.splits, summa=True)
                if candidate.divides(layer):
                    yield candidate
