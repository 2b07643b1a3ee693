"""Samples whose positions several ranks share: the numbers of ranks that may, and windows that reach over their boundaries.

If q ranks share an image of H x W pixels, r of them lie below each other and c side by side, q = r c, and each has a *tile* of
H / r rows and W / c columns (:mod:`autoddl.costmodel.strategy`).  A convolution or pooling with kernel k, stride s and padding p
computes row j of its output from the rows j s - p to j s - p + k - 1 of its input, and column j from the same columns.  If the
input has s times as many rows (columns) as the output, a rank needs besides its own

    p  of the rank before it,    k - s - p (at least 0)  of the rank behind it:

its *halo*.  At the ends of the image the halo is padding.  The halo of a 3 x 3 convolution is one row on each side, that of the
7 x 7 convolution with stride 2 of a ResNet three before and two behind.  Columns are exchanged after rows, and contain the rows
that have arrived: so the corners of tiles come from the ranks across without messages of their own.

Strips (c = 1) have the fewest messages, tiles the shortest boundaries: with a halo of one pixel, a rank among 16 that share a
square image sends 2 W elements of each channel in strips, and W + 4 in tiles of W / 4 x W / 4.  A search is offered strips and,
if their boundaries are shorter than those of strips or if strips do not divide the rows, the tiles with the shortest boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING

from ..collectives import Collective, Step
from ..layer import Layer
from ..nearest import divisors
from .kind import LayerKind, LayerQuantities, Number, image_rows

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["HALO", "TILES", "ImageKind", "halo_of", "halo_steps", "position_factors"]

#: Values of :attr:`.Strategy.sequence`: of layers whose ranks exchange halos, and of others whose ranks have tiles of images.
HALO, TILES = "halo", "tiles"


@cache
def position_factors(p0s: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return every :attr:`.Strategy.positions` of strategies with these p0: the innermost ranks share a sample.

    Of these positions, again, the innermost ranks have tiles side by side (:attr:`.Strategy.columns`).

    >>> position_factors((2, 4))
    ((1, 2), (1, 4), (2, 4))
    """
    found = []
    for level in reversed(range(len(p0s))):
        found += [(1,) * level + (ranks,) + p0s[level + 1 :] for ranks in divisors(p0s[level]) if ranks > 1]
    return tuple(found)


def halo_of(layer: Layer, dim: int = 1) -> tuple[int, int] | None:
    """Return the rows of the ranks before and behind it that a rank needs, if ranks share the rows of an image.

    None if the ranks' rows of input and output do not lie beside each other: the input has not stride times as many.

    Args:
        layer: a layer that reads and writes images; without windows its halo is (0, 0).
        dim: 1 for rows, 2 for columns.

    >>> from .conv2d import conv2d
    >>> [halo_of(conv2d("conv", (3, 8, 8), 4, kernel_size=k, stride=s, padding=p)) for k, s, p in ((3, 1, 1), (1, 1, 0), (3, 1, 0))]
    [(1, 1), (0, 0), None]
    """
    if "kernel_size" not in layer.attributes:
        return 0, 0
    kernel, stride, padding = (layer.attributes[name] for name in ("kernel_size", "stride", "padding"))
    if layer.input_shape[dim] != stride * layer.output_shape[dim]:
        return None
    return padding, max(kernel - stride - padding, 0)


def halo_steps(quantities: LayerQuantities, input_bytes: Number) -> tuple[tuple[Step, ...], Number]:
    """Return the shifts that bring every rank its halo, and the bytes of the halo; the backward pass has the same shifts.

    Along several axes, what arrives along the inner ones is passed on along the outer ones: the first rank of a node needs rows of
    the last rank of the node before it.

    Args:
        quantities: the layer, and the strategy whose ranks share images; nothing is sent without.
        input_bytes: bytes of the input on each rank, without the halo.
    """
    layer, strategy, halo = quantities.layer, quantities.strategy, halo_of(quantities.layer)
    if not strategy.positions or halo is None:
        return (), 0.0
    shape, steps = list(layer.input_shape[1:]), []
    shape = [length // ranks for length, ranks in zip(shape, strategy.tiles)]
    pixel_bytes, num_pixels = input_bytes / prod(shape), prod(shape)
    for dim, axes in enumerate((strategy.row_axes, strategy.column_axes)):
        if axes:
            line_bytes = pixel_bytes * shape[1 - dim]
            steps += [
                Step(Collective.SHIFT, axis, line_bytes * lines) for lines in halo if lines for axis in reversed(axes)
            ]
            shape[dim] += sum(halo)
    return tuple(steps), pixel_bytes * (prod(shape) - num_pixels)


class ImageKind(LayerKind):
    """A kind of layers that read and write images which ranks can share.

    Layers whose outputs depend on windows of the input have the attributes ``kernel_size``, ``stride`` and ``padding``.
    """

    def positions(self, layer: Layer) -> int:
        if "kernel_size" not in layer.attributes:
            return image_rows(layer)
        # Windows that reach over no boundary: any number of ranks may share an image, without a word about it.
        return layer.output_shape[1] if halo_of(layer) == (0, 0) else 1

    def variants(self, layer: Layer, strategy: Strategy) -> Iterator[Strategy]:
        yield strategy
        halo = halo_of(layer) if layer.is_image else None
        if halo is None:
            return
        for positions in position_factors(tuple(p0 for p0, _, _ in strategy.splits)):
            if any(halo):
                yield replace(strategy, sequence=HALO, positions=positions)
            if columns := _best_columns(layer, positions):
                yield replace(strategy, sequence=HALO if any(halo) else TILES, positions=positions, columns=columns)

    def offers_choices(self, layer: Layer, strategy: Strategy) -> bool:
        if not strategy.positions:
            return super().offers_choices(layer, strategy) and not strategy.columns
        halo = halo_of(layer) if layer.is_image else None
        if halo is None or strategy.experts or strategy.key_copies:
            return False
        # Rows alone are shared without a word if windows reach over no boundary.
        if strategy.sequence != (HALO if any(halo) else TILES) or not (any(halo) or strategy.columns):
            return False
        is_factor = strategy.positions in position_factors(tuple(p0 for p0, _, _ in strategy.splits)) and (
            not strategy.columns or strategy.columns in position_factors(strategy.positions)
        )
        return is_factor and _has_tiles(layer, strategy.tiles)


def _best_columns(layer: Layer, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the columns of the tiles with the shortest boundaries; () if these are strips, or if no tiles divide the image."""

    def boundary(columns: tuple[int, ...]) -> tuple[float, int]:
        across = prod(columns)
        tiles = down, _ = prod(positions) // across, across
        if not _has_tiles(layer, tiles):
            return inf, across
        _, height, width = layer.output_shape
        return (width / across if down > 1 else 0) + (height / down if across > 1 else 0), across

    return min(((), *position_factors(positions)), key=boundary)


def _has_tiles(layer: Layer, tiles: tuple[int, int]) -> bool:
    """Whether the images of a layer divide into (tiles below each other, tiles side by side): halos are lines of one neighbour."""
    for dim, ranks in enumerate(tiles, start=1):
        halo, (lines, rest) = halo_of(layer, dim), divmod(layer.output_shape[dim], ranks)
        if ranks > 1 and (halo is None or rest or max(halo) > lines * layer.attributes.get("stride", 1)):
            return False
    return True
