"""Executing redistributions: the moves of :mod:`autoddl.costmodel.redistribution` on local tensors.

A local tensor is thought of as having one dimension per digit,

    dimension d of length L  ->  (n_0, n_1, ..., n_k, rest)        rest = L / (n_0 ... n_k)

where a digit that a mesh axis owns has length 1 here: this rank's value of it is its coordinate on that axis.  A move of some
neighbouring axes brings the digits that they take to the front as one dimension (the outermost axis most significant, as ranks
are counted), runs one collective along it, and leaves the digits that they give up in their places.

Parts of a route that are exchanges have no digits: `exchanging` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.exchange import Exchange
from autoddl.costmodel.redistribution import Digit, Holding, Move, Redistribution, Route
from autoddl.costmodel.sbp import Broadcast, PartialSum

from .collectives import pad_shard, take_shard
from .exchanging import exchange_tensor
from .stepping import Ranks, Stepper

__all__ = ["exchange_digits", "move_tensor"]

Tensor = Any


def move_tensor(x: Tensor, route: Route, stepper: Stepper, dims: Sequence[int]) -> Tensor:
    """This rank's part of a tensor after the redistributions of ``route``; differentiable.

    Args:
        x: its part before.
        stepper: the ranks.
        dims: which dimension of ``x`` each dimension of the distributions is, ascending; others are whole everywhere.
    """
    for part in route:
        if isinstance(part, Exchange):
            x = exchange_tensor(x, part, stepper, dims)
        else:
            x = _Digits(part, tuple(x.shape), dims, stepper).run(x)
    return x


class _Digits:
    """The dimension-per-digit view of one redistribution.

    OneFlow's kernels end at eight dimensions, so the view exists as a list of lengths only: tensors are reshaped to what an
    operation needs of it, three dimensions at most.
    """

    def __init__(self, part: Redistribution, shape: tuple[int, ...], dims: Sequence[int], stepper: Stepper):
        self.part = part
        self.stepper = stepper
        owned = {holding for _, holding in part.holdings if isinstance(holding, Digit)}
        #: Where a digit is in the view, and the lengths of the view.
        self.places: dict[Digit, int] = {}
        self.view: list[int] = []
        #: The dimensions of the view that make up each dimension of the tensor.
        self.spans: list[range] = []
        for dim, length in enumerate(shape):
            start = len(self.view)
            if dim in dims:
                which = list(dims).index(dim)
                for index, size in enumerate(part.digits[which]):
                    digit = Digit(which, index)
                    self.places[digit] = len(self.view)
                    self.view.append(1 if digit in owned else size)
            self.view.append(length // prod(self.view[start:]))
            self.spans.append(range(start, len(self.view)))

    def run(self, x: Tensor) -> Tensor:
        for move in self.part.moves:
            x = self._local(x, move) if move.collective is None else self._collective(x, move, move.collective)
        return x.reshape(*(prod(self.view[i] for i in span) for span in self.spans))

    def _local(self, x: Tensor, move: Move) -> Tensor:
        for atom, before, after in move.parts:
            x = self._local_change(x, atom, before, after)
        return x

    def _local_change(self, x: Tensor, atom: Axis, before: Holding, after: Holding) -> Tensor:
        axis = self.stepper.axis(atom)
        if isinstance(before, Broadcast) and isinstance(after, Digit):
            x = take_shard(self._around(x, self.places[after]), axis, 1)
            self.view[self.places[after]] = 1
            return x
        assert isinstance(after, PartialSum), (before, after)
        if isinstance(before, Digit):
            x = pad_shard(self._around(x, self.places[before]), axis, 1)
            self.view[self.places[before]] = atom.size
            return x
        # A copy becomes a summand: the first rank keeps it.
        return x * (1.0 if atom.coordinate(self.stepper.rank) == 0 else 0.0)

    def _around(self, x: Tensor, place: int) -> Tensor:
        """(what is before a digit, the digit, what is behind it)."""
        return x.reshape(prod(self.view[:place]), self.view[place], prod(self.view[place + 1 :]))

    def _collective(self, x: Tensor, move: Move, collective: Collective) -> Tensor:
        if collective is Collective.ALL_REDUCE:
            return self.stepper.all_reduce(x, move.axis)
        taken = [self.places[after] for _, _, after in move.parts if isinstance(after, Digit)]
        given = [self.places[before] for _, before, _ in move.parts if isinstance(before, Digit)]
        sizes = [atom.size for atom, _, _ in move.parts] if given else []
        x = exchange_digits(x, self.stepper, move.axis, self.view, taken, given, sizes)
        for place in taken:
            self.view[place] = 1
        for place, size in zip(given, sizes):
            self.view[place] = size
        return x


def exchange_digits(
    x: Tensor,
    ranks: Ranks,
    axis: Axis,
    view: Sequence[int],
    split: Sequence[int],
    concat: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """A collective that cuts or joins parts of the dimensions of ``x``: digits. It is an all-gather where it cuts none, a
    reduce-scatter where it joins none, else an all-to-all.

    OneFlow's kernels end at eight dimensions, so ``x`` is reshaped to three at most; the result is left in such a shape.

    Args:
        view: the lengths of the digits that the dimensions of ``x`` consist of; -1 for what is left of the samples.
        split: the digits to be cut, as places in ``view``, that of the axis's slowest ranks first.
        concat: those to become whole; they have length 1 here and ``sizes`` afterwards.
    """
    lengths = [x.numel() // -prod(view) if length == -1 else length for length in view]
    blocks, cut, moved = _blocks_to_front([*split, *concat], len(lengths)), len(split), len(split) + len(concat)
    for start, stop in blocks:
        x = _swap(x, lengths, start, stop)
    # (digits to be cut, digits that become whole, everything else)
    x = x.reshape(prod(lengths[:cut]), prod(lengths[cut:moved]), -1)
    if not concat:
        x = ranks.reduce_scatter(x, axis, 0)
    elif not split:
        x = ranks.all_gather(x, axis, 1)
    else:
        x = ranks.all_to_all(x, axis, split_dim=0, concat_dim=1)
    lengths[:moved] = [*(1 for _ in split), *sizes]
    for start, stop in reversed(blocks):
        x = _swap(x, lengths, stop - start, stop)
    return x


def _blocks_to_front(front: Sequence[int], count: int) -> list[tuple[int, int]]:
    """The blocks (start, stop) of dimensions to move to the front, one after the other, so that ``front`` come first."""
    order, blocks = list(range(count)), []
    runs: list[list[int]] = []
    for place in front:
        if runs and runs[-1][-1] + 1 == place:
            runs[-1].append(place)
        else:
            runs.append([place])
    for run in reversed(runs):
        start = order.index(run[0])
        blocks.append((start, start + len(run)))
        order[: start + len(run)] = run + order[:start]
    return blocks


def _swap(x: Tensor, lengths: list[int], middle: int, end: int) -> Tensor:
    """Let the first ``middle`` dimensions and those from there to ``end`` change places, in ``lengths`` too."""
    shape = (prod(lengths[:middle]), prod(lengths[middle:end]), prod(lengths[end:]))
    lengths[:end] = lengths[middle:end] + lengths[:middle]
    if shape[0] == 1 or shape[1] == 1:
        return x  # nothing moves in memory
    return x.reshape(*shape).permute(1, 0, 2)
