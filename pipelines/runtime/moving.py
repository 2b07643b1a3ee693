"""Executing redistributions: the statements of :mod:`moves` on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.redistribution import Route

from .collectives import pad_shard, take_shard
from .exchanging import exchange_tensor
from .moves import move_calls
from .statements import Call
from .stepping import Ranks, Stepper

__all__ = ["exchange_digits", "keep_on_first", "move_tensor", "moved", "pad_digit", "take_digit"]

Tensor = Any


def move_tensor(x: Tensor, route: Route, stepper: Stepper, dims: Sequence[int]) -> Tensor:
    """This rank's part of a tensor after the redistributions of ``route``; differentiable.

    Args:
        x: its part before.
        stepper: the ranks.
        dims: which dimension of ``x`` each dimension of the distributions is, ascending; others are whole everywhere.
    """
    return moved(x, move_calls(route, tuple(x.shape), dims), stepper, dims)


def moved(x: Tensor, calls: Sequence[Call], stepper: Stepper, dims: Sequence[int] = (0, 2)) -> Tensor:
    """The same, after the statements of a route."""
    for call in calls:
        if call.function == "reshape":
            x = x.reshape(*call.arguments[1])
        elif call.function == "exchange":
            x = exchange_tensor(x, call.arguments[2], stepper, dims)
        elif call.function.startswith("ranks."):
            x = getattr(stepper, call.function[len("ranks.") :])(x, **call.options)
        else:
            x = _FUNCTIONS[call.function](x, stepper, **call.options)
    return x


def exchange_digits(
    x: Tensor,
    ranks: Ranks,
    axis: Axis,
    view: Sequence[int],
    split: Sequence[int] = (),
    concat: Sequence[int] = (),
    sizes: Sequence[int] = (),
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
    blocks, cut, end = _blocks_to_front([*split, *concat], len(lengths)), len(split), len(split) + len(concat)
    for start, stop in blocks:
        x = _swap(x, lengths, start, stop)
    # (digits to be cut, digits that become whole, everything else)
    x = x.reshape(prod(lengths[:cut]), prod(lengths[cut:end]), -1)
    if not concat:
        x = ranks.reduce_scatter(x, axis, 0)
    elif not split:
        x = ranks.all_gather(x, axis, 1)
    else:
        x = ranks.all_to_all(x, axis, split_dim=0, concat_dim=1)
    lengths[:end] = [*(1 for _ in split), *sizes]
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


def take_digit(x: Tensor, ranks: Ranks, axis: Axis, view: tuple[int, int, int]) -> Tensor:
    """B -> S of a digit, the middle one of ``view``: nothing is sent."""
    return take_shard(x.reshape(*view), ranks.axis(axis), 1)


def pad_digit(x: Tensor, ranks: Ranks, axis: Axis, view: tuple[int, int, int]) -> Tensor:
    """S -> P of a digit, the middle one of ``view``: nothing is sent."""
    return pad_shard(x.reshape(*view), ranks.axis(axis), 1)


def keep_on_first(x: Tensor, ranks: Ranks, axis: Axis) -> Tensor:
    """B -> P: the copy of the first rank on the axis becomes the only summand."""
    return x * (1.0 if axis.coordinate(ranks.rank) == 0 else 0.0)


_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "exchange_digits": exchange_digits,
    "keep_on_first": keep_on_first,
    "pad_digit": pad_digit,
    "take_digit": take_digit,
}
