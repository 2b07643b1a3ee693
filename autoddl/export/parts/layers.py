"""What layers compute on one rank; activations are (samples, rows, features), images (samples, 1, all elements)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import pi, prod, sqrt
from typing import Any

import numpy as np
import oneflow as flow
from oneflow.nn import functional

from .blocks import Embedding, Layout, block
from .ranks import NUM_RANKS, RANK, AutogradFunction, Axis, Tensor, all_gather, all_reduce, reduce_scatter

#: Targets that do not count.
IGNORED = -100


def data(array: np.ndarray, layout: Layout, rows: int, columns: np.ndarray | None = None) -> Tensor:
    """This rank's samples and features of what the model is fed with, or targets."""
    own = layout.samples(array).reshape(-1, rows, array.size // len(array) // rows)
    columns = layout.block_of(own.shape[-1])(RANK) if columns is None else columns
    return flow.tensor(np.ascontiguousarray(own[..., columns]))


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x W', W being (out, in)."""
    return flow.matmul(x, weight, transpose_b=True)


def side_by_side(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """The rows of several weights (or biases) as one: a group of each in turn, ``widths`` rows."""
    others = parts[0].shape[1:]
    grouped = [part.reshape(part.shape[0] // width, width, *others) for part, width in zip(parts, widths)]
    return flow.cat(grouped, dim=1).reshape(-1, *others)


def summa(x: Tensor, weight: Tensor, rows: Sequence[Axis], columns: Sequence[Axis], is_first: bool) -> Tensor:
    """x W', both operands gathered (x over the axes ``columns``, W over ``rows``), and nothing but their shards kept."""

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        return matmul(gather(x.detach(), columns, 2), gather(weight.detach(), rows, 1))

    def backward(ctx: Any, dy: Tensor) -> Any:
        gradients = []
        if not is_first:
            gradients.append(scatter(flow.matmul(dy, gather(weight.detach(), rows, 1)), columns, 2))
        whole = gather(x.detach(), columns, 2)
        outer = flow.matmul(dy.reshape(-1, dy.shape[-1]), whole.reshape(-1, whole.shape[-1]), transpose_a=True)
        gradients.append(scatter(outer, rows, 1))
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    return AutogradFunction.apply("summa", forward, backward, *([] if is_first else [x]), weight)


def gather(x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
    """All-gathers over an axis of each network level, outermost first."""
    for axis in axes:
        x = all_gather(x, axis, dim)
    return x


def scatter(x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
    """Reduce-scatters over an axis of each network level, innermost first."""
    for axis in reversed(axes):
        x = reduce_scatter(x, axis, dim)
    return x


def lookup(tokens: np.ndarray, table: Tensor, embedding: Embedding, layout: Layout, rows: int) -> Tensor:
    """The rows of this rank's samples' tokens; zeros where another rank has them."""
    own = layout.samples(tokens).reshape(-1, rows)
    if own.size and not 0 <= own.min() <= own.max() < len(embedding.places):
        raise ValueError(f"tokens are from {own.min()} to {own.max()}, the table has {len(embedding.places)} rows")
    places = embedding.places[own]
    x = functional.embedding(flow.tensor(np.maximum(places, 0)), table)
    if (embedding.places < 0).any():
        x = x * flow.tensor((places >= 0).astype(np.float32)).unsqueeze(-1)
    return x


def positions(table: Tensor, samples: int, rows: int) -> Tensor:
    """The first ``rows`` rows of the table, for every sample."""
    table = table.reshape(-1, table.shape[-1])[:rows].unsqueeze(0)
    return table.expand(samples, rows, table.shape[2])


def attend(
    x: Tensor,
    groups: int,
    group_heads: int,
    head_dim: int,
    causal: bool,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(q k' / sqrt(head_dim)) v on the heads of this rank.

    ``x`` has, for each of ``groups`` key-value heads, its query heads, its key and its value.
    """
    samples, rows, _ = x.shape
    x = x.reshape(samples, rows, groups, group_heads + 2, head_dim).permute(0, 2, 3, 1, 4)
    query, key, value = x[:, :, :group_heads], x[:, :, group_heads : group_heads + 1], x[:, :, group_heads + 1 :]
    if angles is not None:
        query, key = rotate(query, *angles), rotate(key, *angles)
    # All query heads of a group look at the same key: their rows stand one below the other.
    query = query.reshape(samples, groups, group_heads * rows, head_dim)
    key, value = (t.reshape(samples, groups, rows, head_dim) for t in (key, value))
    scores = flow.matmul(query, key.transpose(-2, -1)) * (1.0 / sqrt(head_dim))
    if causal:
        mask = flow.tril(flow.ones(rows, rows)).repeat(group_heads, 1)
        scores = scores.masked_fill(mask == 0, float("-inf"))
    out = flow.matmul(flow.softmax(scores, dim=-1), value)
    out = out.reshape(samples, groups, group_heads, rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(samples, rows, groups * group_heads * head_dim)


def heads_together(parts: Sequence[Tensor], groups: int) -> Tensor:
    """q, k and v of several tensors as `attend` wants them: group by group."""
    x = flow.cat([part.reshape(*part.shape[:2], groups, -1) for part in parts], dim=3)
    return x.reshape(*x.shape[:2], -1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pairs (i, i + head_dim / 2) of the last dimension turned by their angles."""
    half = x.shape[-1] // 2
    turned = flow.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + turned * sine


@functools.cache
def rotary_angles(rows: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of theta^(-2 i / head_dim) * position, (rows, head_dim)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(rows), np.concatenate([frequencies, frequencies]))
    return flow.tensor(np.cos(angles).astype(np.float32)), flow.tensor(np.sin(angles).astype(np.float32))


def sums_of_rows(x: Tensor, centred: bool) -> Tensor:
    """Over the features of this rank: of x (for a layer norm) and of its square."""
    sums = [x.sum(dim=-1, keepdim=True)] if centred else []
    sums.append((x * x).sum(dim=-1, keepdim=True))
    return flow.cat(sums, dim=-1) if centred else sums[0]


def normalised(x: Tensor, means: Tensor, centred: bool, eps: float) -> Tensor:
    """(x - mean) / deviation, or x / root mean square; ``means`` are those of `sums_of_rows` over all features."""
    if not centred:
        return x * flow.rsqrt(means + eps)
    mean, square = means[..., :1], means[..., 1:]
    return (x - mean) * flow.rsqrt(square - mean * mean + eps)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by way of tanh."""
    return 0.5 * x * (1.0 + flow.tanh(sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)))


def gate_and_factor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Features alternate: what goes through the gate, and what it is multiplied with."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return pairs[..., 0], pairs[..., 1]


def convolve(
    x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, **options: Any
) -> Tensor:
    """A convolution of this rank's images of ``shape``."""
    y = functional.conv2d(x.reshape(-1, *shape), weight, bias, stride, padding, **options)
    return y.reshape(y.shape[0], 1, -1)


def max_pool(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The largest of every 2 x 2 pixels of this rank's images of ``shape``."""
    y = functional.max_pool2d(x.reshape(-1, *shape), kernel_size=2, stride=2)
    return y.reshape(y.shape[0], 1, -1)


def cross_entropy(
    logits: Tensor,
    targets: np.ndarray,
    layout: Layout,
    split_over: Sequence[Axis],
    samples_over: Sequence[Axis],
) -> Tensor:
    """The mean over all targets of the micro-batch, the logits' vocabulary split over the axes ``split_over``.

    With m the row's maximum: log(sum_j exp(x_j - m)) - (x_target - m). The maxima are all-gathered, the sums all-reduced, and so is
    the mean; the backward pass sends nothing.
    """
    own = layout.samples(targets).reshape(-1)
    logits = logits.reshape(len(own), -1)
    width = logits.shape[1]
    local = flow.tensor(np.ascontiguousarray(own)) - block(layout.features, RANK) * width
    is_here = flow.logical_and(local >= 0, local < width)
    here = is_here.to(logits.dtype).reshape(-1, 1)
    place = flow.where(is_here, local, flow.zeros_like(local)).reshape(-1, 1)
    counts, count = flow.tensor((own != IGNORED).astype(np.float32)), max(int((targets != IGNORED).sum()), 1)
    probabilities: list[Tensor] = []

    def forward(ctx: Any, x: Tensor) -> Tensor:
        maxima = gather(flow.amax(x, dim=1, keepdim=True), split_over, 1)
        maxima = flow.amax(maxima, dim=1, keepdim=True)
        exponentials = flow.exp(x - maxima)
        at_target = (flow.gather(x, 1, place) - maxima) * here
        sums = flow.cat([exponentials.sum(dim=1, keepdim=True), at_target], dim=1)
        for axis in reversed(split_over):
            sums = all_reduce(sums, axis)
        totals = sums[:, :1].contiguous()
        probabilities.append(exponentials / totals)
        rows = flow.log(totals) - sums[:, 1:]
        return everywhere((rows.reshape(-1) * counts).sum() / count, samples_over)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        scale = (counts * (dy / count)).reshape(-1, 1)
        # One more is left of the logit's own probability.
        return flow.scatter_add(probabilities[0] * scale, 1, place, -here * scale)

    return AutogradFunction.apply("cross_entropy", forward, backward, logits)


def mean_difference(x: Tensor, targets: Tensor, squared: bool) -> Tensor:
    """The mean over all ranks of the squared (or absolute) differences to the targets; the backward pass sends nothing."""
    difference, count = x.detach() - targets, x.numel() * NUM_RANKS

    def forward(ctx: Any, _: Tensor) -> Tensor:
        each = difference * difference if squared else flow.abs(difference)
        return everywhere(each.sum() / count, [Axis(NUM_RANKS, 1)] if NUM_RANKS > 1 else [])

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return (2.0 * difference if squared else flow.sign(difference)) * (dy / count)

    return AutogradFunction.apply("mean_difference", forward, backward, x)


def everywhere(part: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The sum over ranks of one number, inner levels first."""
    total = part.reshape(1)
    for axis in reversed(axes):
        total = all_reduce(total, axis)
    return total.reshape(())


def checkpoint(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, of which only the tensors are kept: the backward pass runs it again first."""
    needed = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not needed or not flow.is_grad_enabled():
        return function(*tensors)
    kept = [tensor.detach() for tensor in tensors]

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        return function(*kept)

    def backward(ctx: Any, dy: Tensor) -> Any:
        with flow.enable_grad():
            leaves = [tensor.detach().requires_grad_(i in needed) for i, tensor in enumerate(kept)]
            y = function(*leaves)
        gradients = flow.autograd.grad([y], [leaves[i] for i in needed], [dy])
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    return AutogradFunction.apply("checkpoint", forward, backward, *(tensors[i] for i in needed))


def rows_of(x: Tensor, rows: int) -> Tensor:
    """(samples, rows, features) with as many rows."""
    return x.reshape(x.shape[0], rows, prod(x.shape[1:]) // rows)
