"""Redistributions as statements: the moves of :mod:`autoddl.costmodel.redistribution` with concrete dimensions. Needs no OneFlow.

A local tensor is viewed with one dimension per digit,

    dimension d of length L  ->  (n_0, n_1, ..., n_k, rest)        rest = L / (n_0 ... n_k)

where a digit that a mesh axis owns has length 1, because the rank's coordinate on the axis is its value. A move of neighbouring
axes runs one collective. The collective splits the digits that the axes take, and concatenates the digits that the axes release.
The outermost axis takes the most significant digit, because ranks are numbered in this order. If the digits are the outermost
digits of a dimension, the collective works on this dimension, as in ``all_to_all(x, axis, split_dim=2, concat_dim=0)``. Other
digits are given by their positions in a view of the tensor (:func:`moving.exchange_digits`).

An exchange, which is the other kind of part of a route, has no digits. It is one statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.exchange import Exchange
from autoddl.costmodel.redistribution import Digit, Holding, Move, Redistribution, Route
from autoddl.costmodel.sbp import Broadcast, PartialSum

from ..statements import RANKS, Call, X

__all__ = ["move_calls"]


def move_calls(route: Route, shape: Sequence[int], dims: Sequence[int] = (0, 2)) -> tuple[Call, ...]:
    """Return the statements that redistribute a rank's part of a tensor. They hold for any length of its first dimension.

    Args:
        route: Redistributions and exchanges, in order.
        shape: Shape of the rank's part before the route.
        dims: Dimension of the tensor for each dimension of the distributions, ascending. The other dimensions are never split.
    """
    calls: list[Call] = []
    shape = tuple(shape)
    for part in route:
        if isinstance(part, Exchange):
            calls.append(Call("exchange", (X, RANKS, part), num_steps=len(part.steps(1.0))))
            parts = zip(dims, part.source.split_sizes(len(dims)), part.target.split_sizes(len(dims)))
            lengths = list(shape)
            for dim, before, after in parts:
                lengths[dim] = lengths[dim] * before // after
            shape = tuple(lengths)
            continue
        view = _View(part, shape, dims)
        for move in part.moves:
            calls += view.calls(move)
        calls += view.restored()
        shape = view.shape
    return tuple(calls)


class _View:
    """The view of a tensor with one dimension per digit, updated by each move of one redistribution."""

    def __init__(self, part: Redistribution, shape: tuple[int, ...], dims: Sequence[int]):
        owned = {holding for _, holding in part.holdings if isinstance(holding, Digit)}
        # Position of each digit in the view, and the lengths of the view.
        self.places: dict[Digit, int] = {}
        self.lengths: list[int] = []
        # The dimensions of the view that make up each dimension of the tensor.
        self.spans: list[range] = []
        for dim, length in enumerate(shape):
            start = len(self.lengths)
            if dim in dims:
                which = list(dims).index(dim)
                for index, size in enumerate(part.digits[which]):
                    self.places[Digit(which, index)] = len(self.lengths)
                    self.lengths.append(1 if Digit(which, index) in owned else size)
            self.lengths.append(length // prod(self.lengths[start:]))
            self.spans.append(range(start, len(self.lengths)))
        # Whether the tensor currently has another shape than its dimensions.
        self.is_reshaped = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Current shape of the tensor."""
        return tuple(prod(self.lengths[i] for i in span) for span in self.spans)

    def restored(self) -> list[Call]:
        """Return the statement that restores the tensor's dimensions, if it is reshaped."""
        if not self.is_reshaped:
            return []
        self.is_reshaped = False
        return [Call("reshape", (X, (-1, *self.shape[1:])))]

    def calls(self, move: Move) -> list[Call]:
        """Return the statements of one move."""
        if move.collective is None:
            return [self._local(atom, before, after) for atom, before, after in move.parts]
        if move.collective is Collective.ALL_REDUCE:
            return [Call("ranks.all_reduce", (X,), {"axis": move.axis}, num_steps=1)]
        taken = [self.places[after] for _, _, after in move.parts if isinstance(after, Digit)]
        given = [self.places[before] for _, before, _ in move.parts if isinstance(before, Digit)]
        sizes = [atom.size for atom, _, _ in move.parts] if given else []
        calls = self._on_dims(move, self._whole_dim(taken), self._whole_dim(given)) or [
            self._on_digits(move.axis, taken, given, sizes)
        ]
        for place in taken:
            self.lengths[place] = 1
        for place, size in zip(given, sizes):
            self.lengths[place] = size
        return calls

    def _on_dims(self, move: Move, split: int | None, concat: int | None) -> list[Call]:
        """Return the statements of a collective along whole dimensions; none if the move does not consist of whole dimensions."""
        name, axis = f"ranks.{move.collective.value.replace('-', '_')}", {"axis": move.axis}  # type: ignore[union-attr]
        if move.collective is Collective.ALL_GATHER and concat is not None:
            return [*self.restored(), Call(name, (X,), {**axis, "dim": concat}, num_steps=1)]
        if move.collective is Collective.REDUCE_SCATTER and split is not None:
            return [*self.restored(), Call(name, (X,), {**axis, "dim": split}, num_steps=1)]
        if split is not None and concat is not None and split != concat:
            return [*self.restored(), Call(name, (X,), {**axis, "split_dim": split, "concat_dim": concat}, num_steps=1)]
        return []

    def _on_digits(self, axis: Axis, taken: list[int], given: list[int], sizes: list[int]) -> Call:
        first = self.spans[0][-1]  # has the length of the first dimension, which is not known
        kept = [i for i, length in enumerate(self.lengths) if length > 1 or i in (*taken, *given, first)]
        self.is_reshaped = True
        options = {
            "axis": axis,
            "view": [-1 if i == first else self.lengths[i] for i in kept],
            "split": [kept.index(i) for i in taken],
            "concat": [kept.index(i) for i in given],
            "sizes": sizes,
        }
        return Call("exchange_digits", (X, RANKS), options, num_steps=1)

    def _local(self, atom: Axis, before: Holding, after: Holding) -> Call:
        if isinstance(before, Broadcast) and isinstance(after, Digit):
            return self._on_one_digit("take_digit", atom, self.places[after], 1)
        assert isinstance(after, PartialSum), (before, after)
        if isinstance(before, Digit):
            return self._on_one_digit("pad_digit", atom, self.places[before], atom.size)
        return Call("keep_first_copy", (X, RANKS), {"axis": atom})

    def _on_one_digit(self, function: str, axis: Axis, place: int, length: int) -> Call:
        """Return a local operation on one digit, in the view (dimensions before the digit, the digit, dimensions after it)."""
        before, behind = prod(self.lengths[:place]), prod(self.lengths[place + 1 :])
        is_first = place in self.spans[0]
        view = (before, self.lengths[place], -1) if is_first else (-1, self.lengths[place], behind)
        self.lengths[place] = length
        self.is_reshaped = True
        return Call(function, (X, RANKS), {"axis": axis, "view": view})

    def _whole_dim(self, places: Sequence[int]) -> int | None:
        """Return the dimension of the tensor whose outermost digits are ``places``, in order; None if there is none."""
        dim = next((dim for dim, span in enumerate(self.spans) if places and places[0] in span), None)
        if dim is None:
            return None
        span = self.spans[dim]
        if any(place not in span for place in places) or list(places) != sorted(places):
            return None
        others = [i for i in range(span[0], places[-1] + 1) if i not in places]
        return dim if all(self.lengths[i] == 1 for i in others) else None
