"""Convolutions, poolings and batch norms of this rank's part of images.

Between layers an image is (samples, 1, all elements), channel by channel, so that a block of the features is a block of channels.
If ranks share images, each has some rows of pixels of all the channels that it has, or a tile of some rows and some columns:

    C = 2 channels, H = 4 rows, 2 ranks         rank 0: c0 r0 r1, c1 r0 r1        rank 1: c0 r2 r3, c1 r2 r3

To other numbers of ranks such images move as rows of pixels with channels as features (`pixel_rows`, `images_of`); from and to
tiles as (rows, channels, columns) (`tile_rows`, `images_of_tiles`).

Windows that reach over the boundary between two ranks read rows or columns of the other rank, the *halo* (`with_halo`):

    own rows  2 3        with a halo of one row on each side  1 2 3 4        at the ends of the image, padding in their place

Columns are exchanged after rows, and as long as the tile with its halo of rows, so that the corners arrive with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, flat_coordinate

from .backend import is_on_gpu
from .comm.layouts import Layout, gathered
from .detaching import detached
from .load import load_oneflow
from .rows import along_rows, row_sums
from .runningstats import RunningStatistics
from .stepping import Ranks

flow = load_oneflow()
functional = flow.nn.functional
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = [
    "add_to_channels",
    "convolve",
    "image_data",
    "images_of",
    "images_of_tiles",
    "normalise_batch",
    "pixel_rows",
    "pool_windows",
    "tile_rows",
]

Tensor = Any


# ---- Layouts ---------------------------------------------------------------------------------------------------------------


def pixel_rows(x: Tensor, channels: int) -> Tensor:
    """Return images (samples, 1, elements) with ``channels`` channels as rows of pixels: (samples x pixels, 1, channels)."""
    return x.reshape(x.shape[0], channels, -1).permute(0, 2, 1).reshape(-1, 1, channels)


def images_of(x: Tensor, samples: int) -> Tensor:
    """Return rows of pixels (samples x pixels, 1, channels) as images (samples, 1, elements): the inverse of `pixel_rows`."""
    return x.reshape(samples, -1, x.shape[2]).permute(0, 2, 1).reshape(samples, 1, -1)


def tile_rows(x: Tensor, channels: int, width: int) -> Tensor:
    """Return images or tiles (samples, 1, elements) of ``width`` columns as (samples x rows, channels, width)."""
    return x.reshape(x.shape[0], channels, -1, width).permute(0, 2, 1, 3).reshape(-1, channels, width)


def images_of_tiles(x: Tensor, samples: int) -> Tensor:
    """Return (samples x rows, channels, width) as images or tiles (samples, 1, elements): the inverse of `tile_rows`."""
    return x.reshape(samples, -1, *x.shape[1:]).permute(0, 2, 1, 3).reshape(samples, 1, -1)


def image_data(
    array: np.ndarray,
    layout: Layout,
    ranks: Ranks,
    halo: tuple[int, int] = (0, 0),
    rows: Sequence[Axis] = (),
    columns: Sequence[Axis] = (),
    is_gathered: bool = False,
    maximum: bool = False,
) -> Tensor:
    """Return this rank's part of images that the model reads, with the halo if ranks share them: (samples, 1, elements).

    Args:
        array: Images of all ranks, (samples, channels, height, width).
        layout: Distribution of the samples and channels.
        ranks: The ranks.
        halo: Rows and columns of the ranks before and behind that are read, too, if ranks share images.
        rows, columns: Mesh axes of the ranks that have tiles below each other, and side by side. If neither are given, ranks that
            are more than the samples share rows.
        is_gathered: Whether to return the channels that an all-gather over p1 would return, not only the rank's block.
        maximum: Whether the halo at the ends of an image is less than any element, and not zero.
    """
    samples, channels, *lengths = array.shape
    held = gathered(layout.blocks(channels), layout.axes(1) if is_gathered else ())[ranks.rank]
    parts = prod(axis.size for axis in layout.axes(0))
    place = flat_coordinate(layout.axes(0), ranks.rank)
    if parts <= samples:
        own = array[place * (samples // parts) : (place + 1) * (samples // parts), held]
    else:
        sharing, own = parts // samples, array[None, place * samples // parts, held]
        grid = [(prod(axis.size for axis in axes), flat_coordinate(axes, ranks.rank)) for axes in (rows, columns)]
        if not (rows or columns):
            grid[0] = sharing, place % sharing
        for dim, (length, (number, index)) in enumerate(zip(lengths, grid), start=2):
            if number > 1:
                padding = [(0, 0)] * dim + [halo] + [(0, 0)] * (3 - dim)
                padded = np.pad(own, padding, constant_values=-np.inf if maximum else 0)
                first = index * (length // number)
                own = np.take(padded, np.arange(first, first + length // number + sum(halo)), axis=dim)
    return ranks.backend.activation(np.ascontiguousarray(own).reshape(len(own), 1, -1))


# ---- Windows ---------------------------------------------------------------------------------------------------------------


def convolve(
    x: Tensor,
    width: int,
    weight: Tensor,
    bias: Tensor | None,
    options: Mapping[str, Any],
    halo: tuple[int, int] = (0, 0),
    rows: Sequence[Axis] = (),
    columns: Sequence[Axis] = (),
    ranks: Ranks | None = None,
    is_first: bool = False,
) -> Tensor:
    """Convolve this rank's images, or its tiles of them: (samples, 1, elements) in, the same out.

    Args:
        x: Images with the input channels of ``weight``.
        width: Pixels of a row of ``x``.
        weight: This rank's part of the weight, (output channels, input channels, kernel, kernel).
        bias: Its part of the bias; None if there is none, or if it is added later.
        options: Stride, padding and other options of the convolution.
        halo: Rows (and columns) of the ranks before and behind that the windows of this rank's outputs reach into.
        rows, columns: Mesh axes of the ranks that have tiles of an image below each other, and side by side, outermost first.
        ranks: The ranks; needed if they share images.
        is_first: Whether the images are data, which contain the halo already.
    """
    images = x.reshape(x.shape[0], weight.shape[1], -1, width)
    if not is_first:
        images = with_halos(images, halo, rows, columns, ranks)
    if rows or columns:
        padding = options["padding"]
        both = (padding, padding) if isinstance(padding, int) else padding
        options = {**options, "padding": (0 if rows else both[0], 0 if columns else both[1])}
    # On the host, the bias that the convolution itself would add takes longer than the convolution of a first layer (`rows`).
    is_added = bias is not None and not is_on_gpu(images)
    y = functional.conv2d(images, weight, None if is_added else bias, **options)
    y = y.reshape(y.shape[0], 1, -1)
    return add_to_channels(y, bias) if is_added else y


def pool_windows(
    x: Tensor,
    shape: tuple[int, int],
    kernel: int,
    stride: int,
    padding: int,
    maximum: bool,
    halo: tuple[int, int] = (0, 0),
    rows: Sequence[Axis] = (),
    columns: Sequence[Axis] = (),
    ranks: Ranks | None = None,
    is_first: bool = False,
) -> Tensor:
    """Return the largest or the mean element of each window of this rank's images, or of its tiles of them.

    Args:
        x: Images, (samples, 1, elements).
        shape: This rank's channels, and pixels of a row of ``x``.
        kernel, stride, padding: Of the windows.
        maximum: Whether the largest element is taken, not the mean.
        halo, rows, columns, ranks, is_first: As of `convolve`.
    """
    images = x.reshape(x.shape[0], shape[0], -1, shape[1])
    if not is_first:
        images = with_halos(images, halo, rows, columns, ranks, -float("inf") if maximum else 0.0)
    function = functional.max_pool2d if maximum else functional.avg_pool2d
    y = function(images, kernel, stride, (0 if rows else padding, 0 if columns else padding))
    return y.reshape(y.shape[0], 1, -1)


def add_to_channels(x: Tensor, bias: Tensor) -> Tensor:
    """Add a number to all pixels of each channel of images (samples, 1, elements)."""
    pixels = x.shape[2] // bias.shape[0]
    y = x.reshape(x.shape[0], bias.shape[0], pixels) + along_rows(bias.reshape(1, -1, 1), pixels)
    return y.reshape(*x.shape)


def with_halos(
    x: Tensor,
    halo: tuple[int, int],
    rows: Sequence[Axis],
    columns: Sequence[Axis],
    ranks: Any,
    fill: float = 0.0,
) -> Tensor:
    """Put the rows, and then the columns of neighbouring ranks around this rank's tile (samples, channels, height, width)."""
    x = with_halo(x, halo, rows, ranks, fill, 2) if rows and any(halo) else x
    return with_halo(x, halo, columns, ranks, fill, 3) if columns and any(halo) else x


def with_halo(
    x: Tensor, halo: tuple[int, int], sharing: Sequence[Axis], ranks: Any, fill: float = 0.0, dim: int = 2
) -> Tensor:
    """Put the lines of the ranks before and behind around this rank's lines. The backward pass sends their gradients back.

    Args:
        x: This rank's tile of images, (samples, channels, height, width).
        halo: Number of lines of the rank before and of the rank behind.
        sharing: Mesh axes of the ranks whose tiles lie beside each other along ``dim``, outermost first.
        ranks: The ranks.
        fill: Value of the halo at the ends of an image.
        dim: Whether lines are rows (2) or columns (3).
    """
    before, behind = halo
    lines, place = x.shape[dim], flat_coordinate(sharing, ranks.rank)
    is_end = place == 0, place == prod(axis.size for axis in sharing) - 1

    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [detached(x)]
        if before:
            arrived = _passed_on(flow.narrow(x, dim, lines - before, before), sharing, ranks, False)
            parts.insert(0, flow.full_like(arrived, fill) if is_end[0] else arrived)
        if behind:
            arrived = _passed_on(flow.narrow(x, dim, 0, behind), sharing, ranks, True)
            parts.append(flow.full_like(arrived, fill) if is_end[1] else arrived)
        return flow.cat(parts, dim=dim)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        pieces = [flow.narrow(dy, dim, before, lines)]
        if before:  # the gradient of the halo before goes back, to the last lines of the rank before
            arrived = _passed_on(_unless(is_end[0], flow.narrow(dy, dim, 0, before)), sharing, ranks, True)
            pieces.append(_among(arrived, lines - before, 0, dim))
        if behind:
            own = flow.narrow(dy, dim, before + lines, behind)
            arrived = _passed_on(_unless(is_end[1], own), sharing, ranks, False)
            pieces.append(_among(arrived, 0, lines - behind, dim))
        return sum(pieces[1:], pieces[0])

    return _Function.apply("with_halo", forward, backward, x)


def _unless(is_zero: bool, x: Tensor) -> Tensor:
    return flow.zeros_like(x) if is_zero else x


def _among(x: Tensor, before: int, behind: int, dim: int) -> Tensor:
    """Put lines of zeros before and behind."""

    def zeros(lines: int) -> list[Tensor]:
        shape = [lines if place == dim else length for place, length in enumerate(x.shape)]
        return [flow.zeros(*shape, dtype=x.dtype, device=x.device)] if lines else []

    return flow.cat([*zeros(before), x, *zeros(behind)], dim=dim)


def _passed_on(x: Tensor, sharing: Sequence[Axis], ranks: Any, backwards: bool) -> Tensor:
    """Return the tensor of the rank before (or behind, if ``backwards``) among those along ``sharing``; the ends get any."""
    own = x = x.contiguous()
    is_carried = True  # whether what is needed has to come along the next outer axis, too
    for axis in reversed(sharing):
        arrived = ranks.shift(x, axis, backwards)
        own = arrived if is_carried else own
        is_carried = is_carried and axis.coordinate(ranks.rank) == (axis.size - 1 if backwards else 0)
        x = arrived
    return own


# ---- Batch norms -----------------------------------------------------------------------------------------------------------


def normalise_batch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: RunningStatistics,
    layout: Layout,
    ranks: Ranks,
    training: bool,
    synchronised: bool = False,
) -> Tensor:
    """Normalise every channel of images (samples, 1, elements), or every feature of rows (samples, 1, features).

    In training with the mean and variance of this rank's samples or, if ``synchronised``, of the samples of all ranks, and the
    running statistics are updated; in evaluation with the running ones.

    Args:
        x: This rank's part of the samples.
        weight, bias: This rank's part of the scale and shift of each channel; None without.
        statistics: Running statistics of all channels.
        layout: Distribution of the samples and channels.
        ranks: The ranks.
        training: Whether the pass is a training pass.
        synchronised: Whether the statistics are those of the samples of all ranks.
    """
    own = statistics.of_pass(layout, ranks, training)
    channels, wide = statistics.num_local(layout, ranks.rank), ranks.backend.master
    images = x.reshape(x.shape[0], channels, -1)
    uses_batch = training or own[0] is None
    if uses_batch and (synchronised or x.dtype != wide):
        axes = layout.axes(0) if synchronised else ()
        y = _normalise_with_batch(images, weight, bias, statistics, own, axes, ranks)
    else:
        y = flow._C.normalization(
            images.to(wide).unsqueeze(3),
            *own,
            flow.ones(channels, dtype=wide, device=x.device) if weight is None else weight.to(wide),
            flow.zeros(channels, dtype=wide, device=x.device) if bias is None else bias.to(wide),
            axis=1,
            epsilon=statistics.eps,
            momentum=statistics.momentum,
            is_training=uses_batch,
        ).to(x.dtype)
    return y.reshape(*x.shape)


def _normalise_with_batch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: RunningStatistics,
    running: tuple[Tensor | None, Tensor | None],
    axes: Sequence[Axis],
    ranks: Ranks,
) -> Tensor:
    """Normalise (samples, channels, pixels) with the statistics of the samples of all ranks along ``axes``, of this one without.

    The input is kept in its own type, statistics are computed in the master type.  With z = (x - mean) r,
    r = 1 / sqrt(variance + eps) and n elements of a channel on all ranks, the backward pass is

        dx = r weight (dy - sum(dy) / n - z sum(dy z) / n)      dweight = sum(dy z)      dbias = sum(dy)

    The gradients of weight and bias are the sums of this rank, since those of all parameters are summed over the ranks later.
    """
    wide, pixels = ranks.backend.master, x.shape[2]
    count = x.shape[0] * pixels * prod(axis.size for axis in axes)
    saved: list[Tensor] = []

    def forward(ctx: Any, x: Tensor, *own: Tensor) -> Tensor:
        images = x.to(wide)
        sums = flow.stack([_channel_sums(images), _channel_sums(images * images)])
        mean, square = ranks.sum(sums, axes) / count
        variance = square - mean * mean
        statistics.move(running, (mean, variance * (count / max(count - 1, 1))))
        scale = flow.rsqrt(variance + statistics.eps)
        saved[:] = [detached(x), mean, scale]
        y = (images - _per_pixel(mean, pixels)) * _per_pixel(scale, pixels)
        if own:
            y = y * _per_pixel(detached(own[0]).to(wide), pixels) + _per_pixel(detached(own[1]).to(wide), pixels)
        return y.to(x.dtype)

    def backward(ctx: Any, dy: Tensor) -> Any:
        x, mean, scale = saved
        gradient = dy.to(wide)
        z = (x.to(wide) - _per_pixel(mean, pixels)) * _per_pixel(scale, pixels)
        sums = flow.stack([_channel_sums(gradient), _channel_sums(gradient * z)])
        total, product = ranks.sum(sums, axes) / count
        factor = scale if weight is None else scale * detached(weight).to(wide)
        dx = (gradient - _per_pixel(total, pixels) - z * _per_pixel(product, pixels)) * _per_pixel(factor, pixels)
        if weight is None or bias is None:
            return dx.to(dy.dtype)
        return dx.to(dy.dtype), sums[1].to(weight.dtype), sums[0].to(bias.dtype)

    return _Function.apply("normalise_batch", forward, backward, x, *([] if weight is None else [weight, bias]))


def _channel_sums(x: Tensor) -> Tensor:
    """Sum (samples, channels, pixels) over samples and pixels."""
    return row_sums(x).reshape(x.shape[0], x.shape[1]).sum(dim=0)


def _per_pixel(values: Tensor, pixels: int) -> Tensor:
    """Return one value for each channel as (1, channels, pixels), or as (1, channels, 1) where that is broadcast fast."""
    return along_rows(values.reshape(1, -1, 1), pixels)
