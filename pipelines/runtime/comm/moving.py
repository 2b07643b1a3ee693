"""Executes redistributions: runs the statements of :mod:`moves` on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.redistribution import Route

from ..statements import Call
from ..stepping import Ranks, Stepper
from .collectives import pad_shard, take_shard
from .exchanging import exchange_tensor
from .moves import move_calls

__all__ = ["exchange_digits", "keep_first_copy", "move_tensor", "pad_digit", "run_moves", "take_digit"]

Tensor = Any


def move_tensor(x: Tensor, route: Route, stepper: Stepper, dims: Sequence[int]) -> Tensor:
    """Redistribute a tensor along a route. The function is differentiable.

    Args:
        x: This rank's part of the tensor before.
        route: The redistributions and exchanges.
        stepper: The ranks.
        dims: Dimension of ``x`` for each dimension of the distributions, ascending. The other dimensions are never split.

    Returns:
        This rank's part of the tensor after the route.
    """
    return run_moves(x, move_calls(route, tuple(x.shape), dims), stepper, dims)


def run_moves(x: Tensor, calls: Sequence[Call], stepper: Stepper, dims: Sequence[int] = (0, 2)) -> Tensor:
    """Redistribute a tensor as in `move_tensor`, given the statements of the route (:func:`moves.move_calls`)."""
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
    """Run a collective that splits or concatenates digits, which are parts of the dimensions of ``x``.

    The collective is an all-gather if no digits are split, a reduce-scatter if no digits are concatenated, and an all-to-all
    otherwise. OneFlow's kernels support at most eight dimensions, so ``x`` is reshaped to at most three dimensions. The result
    also has such a shape.

    Args:
        x: This rank's part of the tensor.
        ranks: The ranks.
        axis: Axis along which the groups communicate.
        view: Lengths of all digits of the dimensions of ``x``; -1 for the digit that depends on the number of samples.
        split: Positions in ``view`` of the digits to split, the most significant digit of the ranks' order first.
        concat: Positions in ``view`` of the digits to concatenate. They have length 1 before, and ``sizes`` after.
        sizes: Lengths of the digits ``concat`` after the collective.
    """
    lengths = [x.numel() // -prod(view) if length == -1 else length for length in view]
    blocks, cut, end = _moves_to_front([*split, *concat], len(lengths)), len(split), len(split) + len(concat)
    for start, stop in blocks:
        x = _swap(x, lengths, start, stop)
    # (digits to split, digits to concatenate, everything else)
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


def _moves_to_front(front: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the blocks (start, stop) of dimensions that, moved to the front one after the other, bring ``front`` to the front."""
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
    """Swap the first ``middle`` dimensions with the dimensions from ``middle`` to ``end``. Updates ``lengths``."""
    shape = (prod(lengths[:middle]), prod(lengths[middle:end]), prod(lengths[end:]))
    lengths[:end] = lengths[middle:end] + lengths[:middle]
    if shape[0] == 1 or shape[1] == 1:
        return x  # the order of the elements in memory does not change
    return x.reshape(*shape).permute(1, 0, 2)


def take_digit(x: Tensor, ranks: Ranks, axis: Axis, view: tuple[int, int, int]) -> Tensor:
    """Change a digit, the middle dimension of ``view``, from B to S. Nothing is sent."""
    return take_shard(x.reshape(*view), ranks.axis(axis), 1)


def pad_digit(x: Tensor, ranks: Ranks, axis: Axis, view: tuple[int, int, int]) -> Tensor:
    """Change a digit, the middle dimension of ``view``, from S to P. Nothing is sent."""
    return pad_shard(x.reshape(*view), ranks.axis(axis), 1)


def keep_first_copy(x: Tensor, ranks: Ranks, axis: Axis) -> Tensor:
    """Change from B to P: the first rank on the axis keeps its copy as a summand, and the other ranks have zeros."""
    return x * (1.0 if axis.coordinate(ranks.rank) == 0 else 0.0)


_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "exchange_digits": exchange_digits,
    "keep_first_copy": keep_first_copy,
    "pad_digit": pad_digit,
    "take_digit": take_digit,
}
