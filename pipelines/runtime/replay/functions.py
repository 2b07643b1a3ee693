"""The functions that statements of traced programs call on ranks. Exported files contain these definitions.

Variables of a program are split (a rank's own samples), whole (all samples) or fixed; see :mod:`autoddl.costmodel.program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Optional

import numpy as np

from autoddl.costmodel.distribution import Axis, flat_coordinate

from ..comm.layouts import Layout
from ..detaching import detached
from ..load import load_oneflow
from ..randomness import normal_at, uniform_at
from ..stepping import Ranks

flow = load_oneflow()
functional = flow.nn.functional
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = [
    "binary_entropies",
    "cast",
    "coins",
    "constant_tensor",
    "divide_nonzero",
    "drop",
    "expand",
    "filled",
    "first_of",
    "gather_samples",
    "given_tensor",
    "identity",
    "identity_matrix",
    "likelihoods",
    "mean_of_ranks",
    "model_data",
    "normal_numbers",
    "numbers",
    "one_hot",
    "own_samples",
    "packed",
    "packed_data",
    "repeat_elements",
    "scalar",
    "share_whole",
    "sparse_entropy",
    "stopped",
    "sum_samples",
    "take",
    "top_places",
    "uniform_integers",
    "uniform_numbers",
    "unpacked",
    "updated_slice",
    "whole_gradient",
]

Tensor = Any
#: The place of the samples in a tensor: their dimension, and the number of elements before them in it. None: it has no samples.
Place = Optional[Sequence[int]]


# ---- Sources and results ---------------------------------------------------------------------------------------------------


def model_data(array: np.ndarray, layout: Layout | None, ranks: Ranks) -> Tensor:
    """Return an input of the model: the rank's own samples, or all of them if there is no layout."""
    if layout is not None:
        parts = prod(axis.size for axis in layout.axes(0))
        own = len(array) // parts
        first = flat_coordinate(layout.axes(0), ranks.rank) * own
        array = array[first : first + own]
    return ranks.backend.activation(np.ascontiguousarray(array))


def given_tensor(value: np.ndarray, ranks: Ranks) -> Tensor:
    """Return a buffer of the model, on the device and in the types of the ranks."""
    return ranks.backend.activation(value)


def constant_tensor(values: Sequence[Any], shape: Sequence[int], dtype: str, ranks: Ranks) -> Tensor:
    """Return a tensor of given values."""
    return ranks.backend.activation(np.array(values, dtype=dtype).reshape(shape))


def unpacked(x: Tensor, shape: Sequence[int], outer: int = 1) -> Tensor:
    """Return an output of another layer as a tensor of the traced model.

    Args:
        x: The output, which begins with the samples.
        shape: Shape of the tensor.
        outer: Number of elements before the samples in the tensor.
    """
    if outer > 1:
        x = x.reshape(x.shape[0], outer, -1).transpose(0, 1)
    return x.reshape(*shape)


def packed(parts: Sequence[Tensor], outers: Sequence[int], samples: int, rows: int) -> Tensor:
    """Return tensors of the traced model as the output of a layer: (samples, rows, features).

    Args:
        parts: The tensors.
        outers: Number of elements before the samples in each.
        samples: Number of samples of this rank.
        rows: Rows per sample.
    """
    own = []
    for part, outer in zip(parts, outers):
        if outer > 1:
            part = part.reshape(outer, samples, -1).transpose(0, 1)
        own.append(part.reshape(samples, -1))
    x = own[0] if len(own) == 1 else flow.cat([part.to(own[0].dtype) for part in own], dim=1)
    return x.reshape(samples, rows, -1)


def packed_data(parts: Sequence[Tensor], outers: Sequence[int], samples: int, rows: int) -> np.ndarray:
    """Return the data of a layer for all samples, as an array; arguments as those of `packed`."""
    return np.asarray(packed(parts, outers, samples, rows).numpy())


# ---- Where samples meet ------------------------------------------------------------------------------------------------------


def scalar(x: Tensor) -> Tensor:
    """Return a loss without dimensions."""
    return x.reshape(())


def gather_samples(x: Tensor, axes: Sequence[Axis], dim: int, outer: int, ranks: Ranks) -> Tensor:
    """Gather the samples of all ranks. In the backward pass each rank takes the gradient of its own ones."""
    if not axes:
        return x
    parts, shape = prod(axis.size for axis in axes), list(x.shape)
    before = prod(shape[:dim]) * outer
    whole_shape = [length * parts if i == dim else length for i, length in enumerate(shape)]

    def forward(ctx: Any, own: Tensor) -> Tensor:
        whole = ranks.gather(own.reshape(before, -1).transpose(0, 1).contiguous(), axes, 0)
        return whole.transpose(0, 1).reshape(*whole_shape)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _own_part(dy, axes, dim, outer, ranks)

    return _Function.apply("gather_samples", forward, backward, x)


def _own_part(x: Tensor, axes: Sequence[Axis], dim: int, outer: int, ranks: Ranks) -> Tensor:
    """Return the part of a whole tensor that belongs to this rank's samples."""
    parts, shape = prod(axis.size for axis in axes), list(x.shape)
    before, width = prod(shape[:dim]) * outer, prod(shape) // (prod(shape[:dim]) * outer * parts)
    own = flow.narrow(x.reshape(before, -1), 1, flat_coordinate(axes, ranks.rank) * width, width)
    return own.reshape(*(length // parts if i == dim else length for i, length in enumerate(shape)))


def own_samples(x: Tensor, axes: Sequence[Axis], dim: int, outer: int, ranks: Ranks) -> Tensor:
    """Take this rank's samples of a whole tensor. The backward pass gathers the gradients of all ranks."""
    if not axes:
        return x

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return gather_samples(dy, axes, dim, outer, ranks)

    return _Function.apply("own_samples", lambda ctx, t: _own_part(t, axes, dim, outer, ranks).clone(), backward, x)


def _sum_over(x: Tensor, axes: Sequence[Axis], ranks: Ranks) -> Tensor:
    """Sum a tensor of any shape over the ranks."""
    return ranks.sum(x.reshape(-1), axes).reshape(*x.shape)


def sum_samples(x: Tensor, axes: Sequence[Axis], ranks: Ranks) -> Tensor:
    """Sum partial results over the ranks. Every rank has the gradient of the sum already."""
    if not axes:
        return x
    return _Function.apply("sum_samples", lambda ctx, t: _sum_over(t, axes, ranks), lambda ctx, dy: dy.clone(), x)


def mean_of_ranks(x: Tensor, axes: Sequence[Axis], ranks: Ranks) -> Tensor:
    """Return the mean of the means of equally many samples of each rank."""
    return sum_samples(x * (1.0 / prod(axis.size for axis in axes)), axes, ranks)


def share_whole(x: Tensor, axes: Sequence[Axis], ranks: Ranks) -> Tensor:
    """Use a whole tensor with the samples of each rank. The backward pass sums the gradients of all ranks."""
    if not axes:
        return x
    return _Function.apply("share_whole", lambda ctx, t: t.clone(), lambda ctx, dy: _sum_over(dy, axes, ranks), x)


def whole_gradient(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Use a parameter with all samples on every rank. Its gradients, equal on all ranks, become summands of one gradient."""
    parts = prod(axis.size for axis in axes)
    if parts == 1 or not x.requires_grad:
        return x
    return _Function.apply("whole_gradient", lambda ctx, t: t.clone(), lambda ctx, dy: dy * (1.0 / parts), x)


# ---- Types and new tensors ---------------------------------------------------------------------------------------------------


def _type(name: str, ranks: Ranks) -> Any:
    """Return OneFlow's type; the type in which ranks compute in place of every floating-point type."""
    return ranks.backend.compute if "float" in name else getattr(flow, name)


def cast(x: Tensor, dtype: str, ranks: Ranks) -> Tensor:
    """Convert a tensor; floating-point types to the type in which ranks compute."""
    return x.to(_type(dtype, ranks))


def filled(shape: Sequence[int], value: float, dtype: str, ranks: Ranks) -> Tensor:
    """Return a tensor of equal numbers."""
    return flow.full(tuple(shape), value, dtype=_type(dtype, ranks), device=ranks.backend.device)


def numbers(start: float, stop: float, step: float, dtype: str, ranks: Ranks) -> Tensor:
    """Return numbers at equal distances, without ``stop``."""
    return flow.arange(start, stop, step, dtype=_type(dtype, ranks), device=ranks.backend.device)


def identity_matrix(rows: int, columns: int, dtype: str, ranks: Ranks) -> Tensor:
    """Return a matrix with ones on the diagonal."""
    return flow.eye(rows, columns, device=ranks.backend.device).to(_type(dtype, ranks))


def one_hot(x: Tensor, depth: int, on: float, off: float, dtype: str, ranks: Ranks) -> Tensor:
    """Return a vector of ``depth`` numbers for each index: ``on`` at the index, ``off`` elsewhere."""
    return functional.one_hot(x, depth, on, off).to(_type(dtype, ranks))


# ---- Operators that no single function computes ------------------------------------------------------------------------------


def identity(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


def stopped(x: Tensor) -> Tensor:
    """Return a tensor whose gradient is zero."""
    if not x.requires_grad:
        return x
    return _Function.apply("stopped", lambda ctx, t: t.clone(), lambda ctx, dy: flow.zeros_like(dy), x)


def repeat_elements(x: Tensor, repeats: int, dim: int) -> Tensor:
    """Repeat each element of a dimension."""
    shape = list(x.shape)
    wide = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], repeats, *shape[dim + 1 :])
    return wide.reshape(*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat a tensor along dimensions of length 1."""
    return flow.expand(x, *shape)


def first_of(function: str, x: Tensor, **options: Any) -> Tensor:
    """Return the maxima of a pooling, without their places."""
    if function.startswith("adaptive"):
        result = getattr(flow._C, function)(x, **options)
    else:
        result = getattr(functional, function)(x, **options)
    return result[0] if isinstance(result, (tuple, list)) or not isinstance(result, flow.Tensor) else result


def take(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Return the elements at some indices along a dimension."""
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return flow._C.gather(x, indices.reshape(-1), axis).reshape(*shape)


def top_places(x: Tensor, k: int) -> Tensor:
    """Return the places of the k largest elements along the last dimension."""
    return flow.topk(x, k, dim=-1)[1]


def updated_slice(x: Tensor, value: Tensor, start: Sequence[int], stop: Sequence[int], step: Sequence[int]) -> Tensor:
    """Return ``x`` with a slice replaced."""
    return flow._C.slice_update(x.clone(), value, list(start), list(stop), list(step))


def divide_nonzero(x: Tensor, y: Tensor) -> Tensor:
    """x / y, and 0 where x is 0."""
    return flow.where(x == 0, flow.zeros_like(x), x / flow.where(x == 0, flow.ones_like(y), y))


def sparse_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of each row of logits."""
    return flow._C.sparse_softmax_cross_entropy(logits, labels)


def binary_entropies(x: Tensor, y: Tensor, weight: Tensor | None, positive_weight: Tensor | None) -> Tensor:
    """Return the binary cross entropy of each logit."""
    return functional.binary_cross_entropy_with_logits(
        x, y, weight=weight, reduction="none", pos_weight=positive_weight
    )


def likelihoods(scores: Tensor, targets: Tensor, weight: Tensor | None, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the negative score of the target of each row, and its weight; both are 0 for ignored targets.

    Args:
        scores: (rows, classes).
        targets: (rows,).
        weight: Weight of each class.
        ignored: The target that is ignored.
    """
    counts = targets != ignored
    place = flow.where(counts, targets, flow.zeros_like(targets)).to(flow.int64)
    weights = counts.to(scores.dtype)
    if weight is not None:
        weights = weights * functional.embedding(place, weight.reshape(-1, 1)).reshape(*place.shape)
    return -flow.gather(scores, 1, place.reshape(-1, 1)).reshape(*place.shape) * weights, weights


# ---- Random numbers ----------------------------------------------------------------------------------------------------------


def _places(shape: Sequence[int], place: Place, axes: Sequence[Axis], ranks: Ranks) -> np.ndarray:
    """Return the index of each element of this rank's part of a tensor in the tensor of all samples.

    Args:
        shape: Shape of the part.
        place: Where the samples lie; None if the tensor has none.
        axes: Mesh axes that split the samples; none if the tensor is whole.
        ranks: The ranks.
    """
    if place is None or not axes:
        return np.arange(prod(shape)).reshape(shape)
    dim, outer = place
    parts, before = prod(axis.size for axis in axes), prod(shape[:dim]) * outer
    width = prod(shape) // before
    first = flat_coordinate(axes, ranks.rank) * width
    own = np.arange(before)[:, None] * (width * parts) + np.arange(first, first + width)
    return own.reshape(shape)


def drop(
    x: Tensor,
    rate: float,
    stream: str,
    step: int | None,
    ranks: Ranks,
    place: Place = None,
    axes: Sequence[Axis] = (),
) -> Tensor:
    """Set elements to zero with a probability, and divide the others by 1 - probability; nothing outside of training."""
    if step is None or rate == 0:
        return x
    kept = uniform_at(_places(tuple(x.shape), place, axes, ranks), stream, step) >= rate
    return x * ranks.backend.tensor(kept.astype(np.float32) * (1.0 / (1.0 - rate)), x.dtype)


def coins(
    x: Tensor, p: float, stream: str, step: int | None, ranks: Ranks, place: Place = None, axes: Sequence[Axis] = ()
) -> Tensor:
    """Return 1 with the probability ``p``, or with the probabilities in ``x`` if it is negative, and 0 otherwise."""
    drawn = uniform_at(_places(tuple(x.shape), place, axes, ranks), stream, step)
    drawn = ranks.backend.tensor(drawn, x.dtype)
    return (drawn < (p if p >= 0 else detached(x))).to(x.dtype)


def normal_numbers(
    shape: Sequence[int],
    mean: float,
    std: float,
    dtype: str,
    ranks: Ranks,
    stream: str,
    step: int | None,
    place: Place = None,
    axes: Sequence[Axis] = (),
) -> Tensor:
    """Return normal random numbers."""
    return ranks.backend.tensor(
        mean + std * normal_at(_places(tuple(shape), place, axes, ranks), stream, step), _type(dtype, ranks)
    )


def uniform_numbers(
    shape: Sequence[int],
    low: float,
    high: float,
    dtype: str,
    ranks: Ranks,
    stream: str,
    step: int | None,
    place: Place = None,
    axes: Sequence[Axis] = (),
) -> Tensor:
    """Return random numbers from [low, high)."""
    drawn = low + (high - low) * uniform_at(_places(tuple(shape), place, axes, ranks), stream, step)
    return ranks.backend.tensor(drawn, _type(dtype, ranks))


def uniform_integers(
    shape: Sequence[int],
    low: int,
    high: int,
    dtype: str,
    ranks: Ranks,
    stream: str,
    step: int | None,
    place: Place = None,
    axes: Sequence[Axis] = (),
) -> Tensor:
    """Return random integers from low to high - 1."""
    drawn = np.floor(low + (high - low) * uniform_at(_places(tuple(shape), place, axes, ranks), stream, step))
    return ranks.backend.tensor(drawn.astype(np.int64)).to(getattr(flow, dtype))
