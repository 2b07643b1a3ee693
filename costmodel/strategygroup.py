"""Groups of strategies that run the same steps along axes of different sizes, priced in one go.

A group has the interface of one :class:`.Strategy`, with arrays in place of numbers, so that the formulas of the kinds of layers
price all strategies of a group at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from .distribution import Axis
from .strategy import Strategy, copy_axes, expert_axes, shard_axes

__all__ = ["StrategyGroup", "group_strategies"]


@dataclass(frozen=True, eq=False)
class StrategyGroup:
    """Strategies that run the same steps along axes of different sizes.

    A group has the interface of one :class:`Strategy`, with arrays of shape (strategies,) in place of numbers.

    Attributes:
        indices: indices of the strategies in the sequence that was grouped, shape (strategies,).
        splits: (p0, p1, p2) per strategy and level, shape (strategies, levels, 3).
        choices: the attributes of all of them but the splits (:attr:`Strategy.choices`).
    """

    indices: np.ndarray
    splits: np.ndarray
    choices: Strategy

    @property
    def summa(self) -> bool:
        """As of one :class:`Strategy`."""
        return self.choices.summa

    @property
    def zero(self) -> int:
        """As of one :class:`Strategy`."""
        return self.choices.zero

    @property
    def regathers(self) -> bool:
        """As of one :class:`Strategy`."""
        return self.choices.regathers

    @property
    def expert_parts(self) -> int:
        """As of one :class:`Strategy`: the same for all of them."""
        return self.choices.expert_parts

    @property
    def copies(self) -> np.ndarray:
        """As of one :class:`Strategy`; shape (strategies,)."""
        return self.p0 // self.expert_parts

    def expert_axes(self) -> tuple[Axis, ...]:
        """As of one :class:`Strategy`."""
        return expert_axes(self.axes(0), self.choices.experts)

    def copy_axes(self, embedding: bool = False) -> tuple[Axis, ...]:
        """As of one :class:`Strategy`."""
        return copy_axes(self.axes(0, embedding), self.choices.experts)

    def shard_axes(self, embedding: bool = False) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """As of one :class:`Strategy`."""
        return shard_axes(self.copy_axes(embedding), self.choices.hybrid)

    @property
    def sequence(self) -> str:
        """As of one :class:`Strategy`."""
        return self.choices.sequence

    @property
    def positions(self) -> tuple[int, ...]:
        """As of one :class:`Strategy`."""
        return self.choices.positions

    @property
    def columns(self) -> tuple[int, ...]:
        """As of one :class:`Strategy`."""
        return self.choices.columns

    @property
    def key_copies(self) -> tuple[int, ...]:
        """As of one :class:`Strategy`."""
        return self.choices.key_copies

    @property
    def ranks_per_sample(self) -> int:
        """As of one :class:`Strategy`."""
        return self.choices.ranks_per_sample

    @property
    def tiles(self) -> tuple[int, int]:
        """As of one :class:`Strategy`."""
        return self.choices.tiles

    @property
    def position_axes(self) -> tuple[Axis, ...]:
        """Like :attr:`Strategy.position_axes`; strides are undefined."""
        return _axes_of(self.positions)

    @property
    def column_axes(self) -> tuple[Axis, ...]:
        """Like :attr:`Strategy.column_axes`; strides are undefined."""
        return _axes_of(self.columns)

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """Like :attr:`Strategy.row_axes`; strides are undefined."""
        columns = self.columns or (1,) * len(self.positions)
        return _axes_of([ranks // across for ranks, across in zip(self.positions, columns)])

    @property
    def key_copy_axes(self) -> tuple[Axis, ...]:
        """Like :attr:`Strategy.key_copy_axes`; strides are undefined."""
        return _axes_of(self.key_copies)

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
        """Like :meth:`Strategy.axes`; sizes are arrays.  Strides are undefined."""
        sizes = self.splits[:, :, which]
        return tuple(
            Axis(cast(int, sizes[:, level]), 0, level) for level in range(sizes.shape[1]) if sizes[0, level] > 1
        )


def _axes_of(sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Axes with one size for each level, without strides."""
    return tuple(Axis(size, 0, level) for level, size in enumerate(sizes) if size > 1)


def group_strategies(strategies: Sequence[Strategy]) -> Iterator[StrategyGroup]:
    """Group strategies that run the same steps: the same of their axes are longer than 1, and they have the same choices.

    Args:
        strategies: all on the same number of levels.
    """
    splits = np.array([strategy.splits for strategy in strategies])
    pattern = (splits > 1).reshape(len(strategies), -1)
    groups: dict[tuple[bytes, Strategy, tuple[bool, ...]], list[int]] = {}
    for index, row in enumerate(pattern):
        strategy = strategies[index]
        has_copies = tuple(split[0] > part for split, part in zip(strategy.splits, strategy.experts))
        groups.setdefault((row.tobytes(), strategy.choices, has_copies), []).append(index)
    for (_, choices, _), members in groups.items():
        indices = np.array(members)
        yield StrategyGroup(indices, splits[indices], choices)
