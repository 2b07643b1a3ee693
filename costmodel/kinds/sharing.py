"""Samples whose positions several ranks share: the numbers of ranks that may, and windows that reach over their boundaries.

If q ranks share an image of H rows of pixels, each has H / q of them (:mod:`autoddl.costmodel.strategy`).  A convolution or pooling
with kernel k, stride s and padding p computes row j of its output from the rows j s - p to j s - p + k - 1 of its input.  If the
input has s times as many rows as the output, a rank needs besides its own rows

    p  of the rank before it,    k - s - p (at least 0)  of the rank behind it:

its *halo*.  At the ends of the image the halo is padding.  The halo of a 3 x 3 convolution is one row on each side, that of the
7 x 7 convolution with stride 2 of a ResNet three before and two behind.

Only rows are divided: squares instead of strips would have shorter boundaries from nine ranks per image on, but each rank would
have eight neighbours in place of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ..collectives import Collective, Step
from ..distribution import Axis
from ..layer import Layer
from ..nearest import divisors
from .kind import LayerKind, Number

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["HALO", "WindowKind", "halo_of", "halo_steps", "position_factors"]

#: The value of :attr:`.Strategy.sequence` of layers whose ranks exchange halos.
HALO = "halo"


@cache
def position_factors(p0s: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return every :attr:`.Strategy.positions` of strategies with these p0: the innermost ranks share a sample.

    >>> position_factors((2, 4))
    ((1, 2), (1, 4), (2, 4))
    """
    found = []
    for level in reversed(range(len(p0s))):
        found += [(1,) * level + (ranks,) + p0s[level + 1 :] for ranks in divisors(p0s[level]) if ranks > 1]
    return tuple(found)


def halo_of(layer: Layer) -> tuple[int, int] | None:
    """Return the rows of the ranks before and behind it that a rank needs, if ranks share the rows of an image.

    None if the ranks' rows of input and output do not lie beside each other: the input has not stride times as many.

    >>> from .conv2d import conv2d
    >>> [halo_of(conv2d("conv", (3, 8, 8), 4, kernel_size=k, stride=s, padding=p)) for k, s, p in ((3, 1, 1), (1, 1, 0), (3, 1, 0))]
    [(1, 1), (0, 0), None]
    """
    kernel, stride, padding = (layer.attributes[name] for name in ("kernel_size", "stride", "padding"))
    if layer.input_shape[1] != stride * layer.output_shape[1]:
        return None
    return padding, max(kernel - stride - padding, 0)


def halo_steps(axes: Sequence[Axis], halo: tuple[int, int], row_bytes: Number) -> tuple[Step, ...]:
    """Return the shifts that bring every rank its halo; those of the gradients in the backward pass are as many.

    Along several axes, what arrives along the inner ones is passed on along the outer ones: the first rank of a node needs rows of
    the last rank of the node before it.

    Args:
        axes: mesh axes of the ranks that share an image, outermost first.
        halo: number of rows of the ranks before and behind.
        row_bytes: bytes of one row of the input on each rank, of all its images.
    """
    return tuple(Step(Collective.SHIFT, axis, row_bytes * rows) for rows in halo if rows for axis in reversed(axes))


class WindowKind(LayerKind):
    """A kind of layers on images whose outputs depend on windows of the input.

    Such layers have the attributes ``kernel_size``, ``stride`` and ``padding``.
    """

    def positions(self, layer: Layer) -> int:
        # Windows that reach over no boundary: any number of ranks may share an image, without a word about it.
        return layer.output_shape[1] if halo_of(layer) == (0, 0) else 1

    def variants(self, layer: Layer, strategy: Strategy) -> Iterator[Strategy]:
        yield strategy
        if halo_of(layer) not in (None, (0, 0)):
            for positions in position_factors(tuple(p0 for p0, _, _ in strategy.splits)):
                yield replace(strategy, sequence=HALO, positions=positions)

    def offers_choices(self, layer: Layer, strategy: Strategy) -> bool:
        if not strategy.positions:
            return super().offers_choices(layer, strategy)
        halo, q = halo_of(layer), strategy.ranks_per_sample
        if strategy.sequence != HALO or strategy.experts or strategy.key_copies or halo in (None, (0, 0)):
            return False
        is_factor = strategy.positions in position_factors(tuple(p0 for p0, _, _ in strategy.splits))
        # A halo consists of rows of one neighbour.
        rows, rest = divmod(layer.output_shape[1], q)
        return is_factor and not rest and max(halo) <= rows * layer.attributes["stride"]  # type: ignore[type-var]
