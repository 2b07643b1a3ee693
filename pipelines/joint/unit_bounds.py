"""What the units of a model take at least on one rectangle, before any stage is searched: the first terms of the bounds.

A *weight* prices the vector of a stage (:data:`.stagetables.COMPONENTS`): seconds forward and backward of a micro-batch, of the
gradients' all-reduce, bytes of state, bytes that a micro-batch keeps.  With redistributions for nothing, and every layer at its own
cheapest strategy for that weight, the layers of a unit add up to no more than they do in any stage; and so do the units of a stage.

The options of all layers of all kinds of units stand behind each other in one array, so that a least value is few operations; of
those at one micro-batch only options stay that no other one of the layer is nowhere above.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.search.fronts import undominated

from .partition import ENTRY, Chain
from .stage_cost import COMPONENTS, Replicas, StageTables

__all__ = ["ROUNDING", "UnitBounds"]

#: Bounds are taken down by this, so that sums in another order do not exclude what is equal.
ROUNDING = 1 - 1e-9


@dataclass(frozen=True, eq=False)
class _Options:
    """The options of all layers of all kinds of units, one behind the other.

    Attributes:
        fixed, slope: the vectors of options are fixed + samples * slope; shape (components, options).
        p0: into how many slices they cut the samples.
        layers: where the options of each layer begin.
        kinds: where the layers of each kind begin.
    """

    fixed: np.ndarray
    slope: np.ndarray
    p0: np.ndarray
    layers: np.ndarray
    kinds: np.ndarray

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def at(self, micro_batch: int, part: int) -> _Offered | None:
        """What divides ``part`` samples of a micro-batch and is nowhere above another option of its layer; None where a layer
        has nothing."""
        vectors = np.maximum(self.fixed + micro_batch * self.slope, 0.0)
        layer = np.repeat(np.arange(self.num_layers), np.diff(np.append(self.layers, vectors.shape[1])))
        offered = np.flatnonzero((part % self.p0 == 0) & np.isfinite(vectors).all(axis=0))
        kept = offered[undominated(layer[offered], vectors[:, offered].T)]
        sizes = np.bincount(layer[kept], minlength=self.num_layers)
        if not sizes.all():
            return None
        return _Offered(vectors[:, kept], sizes, self.kinds)


@dataclass(frozen=True, eq=False)
class _Offered:
    """What is on offer at a micro-batch.

    Attributes:
        vectors: of options, those of one layer behind those of another; shape (components, options).
        sizes: options of each layer.
        kinds: where the layers of each kind begin.
    """

    vectors: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray

    @cached_property
    def layers(self) -> np.ndarray:
        """Where the options of each layer begin."""
        return np.cumsum(self.sizes) - self.sizes


class UnitBounds:
    """The least that every unit takes and keeps on one rectangle."""

    def __init__(self, chain: Chain, tables: StageTables):
        self.chain, self.tables = chain, tables
        self._first = [chain.kinds.index(kind) for kind in range(max(chain.kinds) + 1)]
        self._kinds = np.array(chain.kinds)
        self._options: dict[tuple[bool, Replicas], _Options | None] = {}
        self._offered: dict[tuple[bool, Replicas, int, int], _Offered | None] = {}

    def _of(self, layers_again: bool, replicas: Replicas) -> _Options | None:
        """None where some layer has no strategy on so many devices."""
        key = (layers_again, replicas)
        if key not in self._options:
            try:
                self._options[key] = self._collected(layers_again, replicas)
            except UserError:
                self._options[key] = None
        return self._options[key]

    def _collected(self, layers_again: bool, replicas: Replicas) -> _Options:
        fixed: list[np.ndarray] = []
        slope: list[np.ndarray] = []
        p0: list[np.ndarray] = []
        kinds: list[int] = []
        for unit in self._first:
            book = self.tables.book(unit, unit + 1, layers_again)
            stage = self.tables.graph(unit, unit + 1)
            kinds.append(len(fixed))
            for variable, each in zip(book.variables, book.coefficients(self.tables.pricing.objective)):
                if variable.layers == (ENTRY,):
                    continue
                none = np.zeros(len(each.state))
                gradient = each.gradient if replicas.count == 1 else self.tables.replicated(stage, variable, replicas)
                fixed.append(np.stack([each.forward[0], each.backward[0], gradient, each.state, none]))
                slope.append(np.stack([each.forward[1], each.backward[1], none, none, each.kept]))
                p0.append(each.option_set.p0)
        # Those that another one which cuts the samples as often is nowhere above, at any micro-batch.
        layer, cuts = np.repeat(np.arange(len(p0)), [len(one) for one in p0]), np.concatenate(p0)
        both = np.concatenate([np.concatenate(fixed, axis=1), np.concatenate(slope, axis=1)])
        finite = np.flatnonzero(np.isfinite(both).all(axis=0) & (both >= 0).all(axis=0))
        other = np.setdiff1d(np.arange(len(layer)), finite)
        alike = np.unique(np.column_stack([layer, cuts]), axis=0, return_inverse=True)[1].ravel()
        kept = np.sort(np.concatenate([finite[undominated(alike[finite], both[:, finite].T)], other]))
        num = len(COMPONENTS)
        sizes = np.bincount(layer[kept], minlength=len(p0))
        return _Options(both[:num, kept], both[num:, kept], cuts[kept], np.cumsum(sizes) - sizes, np.array(kinds))

    def least(
        self, layers_again: bool, replicas: Replicas, micro_batch: int, part: int, weights: np.ndarray
    ) -> np.ndarray | None:
        """For each weight the least of every unit, shape (weights, components) -> (weights, units).

        None where some layer has no strategy that divides ``part`` samples of the micro-batch.
        """
        offered = self._at(layers_again, replicas, micro_batch, part)
        if offered is None:
            return None
        of_layers = np.minimum.reduceat(weights @ offered.vectors, offered.layers, axis=1)
        of_kinds = np.add.reduceat(of_layers, offered.kinds, axis=1)
        return np.asarray(of_kinds[:, self._kinds])

    def vectors(
        self, layers_again: bool, replicas: Replicas, micro_batch: int, part: int, weights: np.ndarray
    ) -> np.ndarray | None:
        """For each weight the vector of every unit where its layers are at their least, shape (weights, components) -> (weights,
        units, components); None as :meth:`least`."""
        offered = self._at(layers_again, replicas, micro_batch, part)
        if offered is None:
            return None
        values = weights @ offered.vectors
        least = np.repeat(np.minimum.reduceat(values, offered.layers, axis=1), offered.sizes, axis=1)
        places = np.where(values <= least, np.arange(values.shape[1]), values.shape[1])
        chosen = np.minimum.reduceat(places, offered.layers, axis=1)
        of_kinds = np.add.reduceat(offered.vectors[:, chosen], offered.kinds, axis=2)
        return np.asarray(np.moveaxis(of_kinds[:, :, self._kinds], 0, 2))

    def _at(self, layers_again: bool, replicas: Replicas, micro_batch: int, part: int) -> _Offered | None:
        """What is on offer."""
        key = (layers_again, replicas, micro_batch, part)
        if key not in self._offered:
            options = self._of(layers_again, replicas)
            self._offered[key] = None if options is None else options.at(micro_batch, part)
        return self._offered[key]
