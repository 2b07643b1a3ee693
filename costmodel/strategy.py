"""Strategies: the parallelisation of one layer over the devices.

At each network level the devices form a mesh (p0, p1, p2), p2 innermost.  For a matrix product O = I W (AutoDDL, Section 3):

======================  ==========  ==========  ==========
tensor                  axis p0     axis p1     axis p2
======================  ==========  ==========  ==========
input I                 S0          B           S1
weight W                B           S1          S0
output O                S0          S1          P
======================  ==========  ==========  ==========

Around the product the activations are *canonical* (:mod:`autoddl.costmodel.distribution`): rows over p0, features over the
other s = p1 p2 ranks.  So a layer gathers its input over p1, multiplies, and reduce-scatters its output over p2.  Layers
without a product (norms, attention, sums, losses) work on the canonical layout itself; their strategy is (p0, s, 1).

An embedding is the product of one-hot rows with its table.  Its axes are in the order (p0, p2, p1).  So its table at (p0, p1, p2)
has the same layout as the transposed matrix of a linear layer at (p0, p2, p1), and tied weights are stored once.

**Sharding of parameters** (ZeRO; Rajbhandari et al., SC 2020).  The p0 ranks that hold the same part of a weight can divide what
belongs to it.  ``zero`` says what is divided: 1 the optimizer states and the master copy, 2 also the gradients, 3 also the weights
of products and tables.  With ``hybrid``, gradients and weights are divided inside the nodes only, and the states over all ranks.

**Gathered inputs.**  A product that gathers its input over p1 keeps the gathered input for the backward pass, or only its own part
of it and gathers it again (``regathers``; Megatron-LM's sequence parallelism).

**Experts.**  A layer of experts (:mod:`.kinds.experts`) divides its experts over the innermost e of the p0 ranks of each level
(``experts``).  The other p0 / e ranks hold copies: they sum the gradients, and divide states with ZeRO.

Summa distributes a product over a mesh of r x c ranks per level.  Input, weight and output are all split S0 over r and S1 over c;
nothing is replicated.  The mesh (r, c) is written as (r, c, 1) with ``summa`` set.

**Positions.**  A micro-batch of b samples of S positions has b S rows.  If p0 divides b, every rank has whole samples.  If b
divides p0, q = p0 / b ranks share the positions of a sample: rank i has the rows from i b S / p0 on.  Layers whose rows are
independent of each other do not notice.  Attention has to exchange keys and values among the q ranks, so that its price depends on
q.  So q is a choice of its strategy: ``positions`` gives the factor of q on each level, the innermost part of p0 there, and
``sequence`` the way of the exchange (:mod:`autoddl.costmodel.kinds.attention`).

The positions of an image are its pixels, row by row, so that each of q ranks has some rows of pixels.  With ``columns``, c of the q
ranks lie side by side: each has a *tile*, H c / q rows by W / c columns (:mod:`autoddl.costmodel.kinds.sharing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np

from .distribution import Axis, Distribution, RowsAndFeatures, canonical
from .kinds.kind import Splitting
from .kinds.registry import kind_of
from .layer import Layer, Place, zero_of
from .nearest import divisors
from .sbp import Broadcast, SBPState, Split

__all__ = [
    "PLAIN",
    "PRODUCT",
    "Choices",
    "Strategy",
    "copy_axes",
    "data_parallel",
    "enumerate_strategies",
    "expert_axes",
    "fitting",
    "layout_levels",
    "mesh_axes",
    "shard_axes",
    "transposed",
]

Split3 = tuple[int, int, int]
#: The names in :meth:`Strategy.sbp` of the tensors of the product; the others are stored.
PRODUCT = ("input", "weight", "output")


@dataclass(frozen=True)
class Strategy:
    """The strategy of one layer (see the module's docstring).

    Attributes:
        splits: (p0, p1, p2) for each network level, outermost first.
        summa: whether the product is a Summa product on the mesh (p0, p1).
        zero: what the p0 ranks with the same part of a weight divide: 0 nothing, 1 the optimizer states, 2 also the gradients,
            3 also the weights (see the module's docstring).
        hybrid: whether gradients and weights are divided inside the nodes only; needs ``zero`` of at least 2.
        regathers: whether the backward pass gathers the input again, in place of keeping it.
        experts: for each level, the part of p0 that the experts of a layer are divided over; empty if all of them are 1.
        sequence: how attention exchanges keys and values among the ranks that share the positions of a sample, one of
            :data:`autoddl.costmodel.kinds.attention.SEQUENCE_WAYS`; empty if every rank has whole samples.
        positions: for each level, the number of ranks that share the positions of a sample; empty if every rank has whole samples.
        columns: for each level, the number of those ranks that have tiles of an image side by side, the innermost part of
            ``positions`` there; empty if every rank has whole rows of pixels.
        key_copies: for each level, the number of ranks that use the same key and value head; empty if no ranks do.

    All attributes but ``splits`` are *choices*: :attr:`choices` gives them, tables print them, and plan documents contain those
    that differ from their default.

    >>> strategy = Strategy(((2, 1, 1), (1, 4, 2)))
    >>> print(strategy, strategy.num_devices, strategy.activations)
    (2,1,1) | (1,4,2) 16 (S0:2@8 | S1:2@1, S1:2@2, S1:2@4)
    """

    splits: tuple[Split3, ...]
    summa: bool = False
    zero: int = 0
    hybrid: bool = False
    regathers: bool = False
    experts: tuple[int, ...] = ()
    sequence: str = ""
    positions: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    key_copies: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join((" | ".join(f"({p0},{p1},{p2})" for p0, p1, p2 in self.splits), *self.words))

    @property
    def words(self) -> tuple[str, ...]:
        """What is printed of the choices, a word each; nothing of those that are the default."""
        words = (
            (self.summa, "summa"),
            (self.zero > 0, f"zero{self.zero}"),
            (self.hybrid, "hybrid"),
            (self.regathers, "regathers"),
            (bool(self.experts), f"experts {'x'.join(map(str, self.experts))}"),
            (bool(self.positions), f"{self.sequence}:{self._grid}"),
            (bool(self.key_copies), f"copies:{prod(self.key_copies)}"),
        )
        return tuple(word for is_chosen, word in words if is_chosen)

    @cached_property
    def choices(self) -> Strategy:
        """The strategy without its splits."""
        return replace(self, splits=())

    @cached_property
    def plain(self) -> Strategy:
        """The strategy without the :class:`Choices` of a search."""
        return replace(self, zero=0, hybrid=False, regathers=False)

    def document(self) -> dict[str, Any]:
        """The members that describe the strategy in JSON documents: ``strategy`` with the splits, and the other choices.

        >>> Strategy(((2, 1, 2),), summa=True).document()
        {'strategy': [[2, 1, 2]], 'summa': True}
        """
        chosen = {name: getattr(self, name) for name in _CHOICES}
        return {
            "strategy": [list(split) for split in self.splits],
            **{
                name: list(value) if isinstance(value, tuple) else value
                for name, value in chosen.items()
                if value != _CHOICES[name]
            },
        }

    @property
    def p0(self) -> int:
        """Number of slices of the samples: the product of p0 over the levels."""
        return prod(split[0] for split in self.splits)

    @property
    def p1(self) -> int:
        """The product of p1 over the levels."""
        return prod(split[1] for split in self.splits)

    @property
    def p2(self) -> int:
        """The product of p2 over the levels."""
        return prod(split[2] for split in self.splits)

    @property
    def expert_parts(self) -> int:
        """Number of parts that the experts of a layer are divided into."""
        return prod(self.experts)

    @property
    def copies(self) -> int:
        """Number of devices that hold the same part of the parameters."""
        return self.p0 // self.expert_parts

    @property
    def panels(self) -> int:
        """Number of panels that a Summa product cuts its operands into."""
        return max(self.p0, self.p1)

    @cached_property
    def ranks_per_sample(self) -> int:
        """Number of ranks that share the positions of a sample in attention; 1 if every rank has whole samples."""
        return prod(self.positions)

    @property
    def position_axes(self) -> tuple[Axis, ...]:
        """The mesh axes along which ranks share the positions of a sample, outermost first: the innermost parts of those of p0."""
        return _position_axes(self.axes(0), self.positions)

    @property
    def column_axes(self) -> tuple[Axis, ...]:
        """The innermost parts of :attr:`position_axes`: ranks along them have tiles of an image side by side."""
        return _position_axes(self.axes(0), self.columns)

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """The rest of :attr:`position_axes`: ranks along them have tiles, or rows of pixels, one below the other."""
        return _position_axes(self.axes(0), self.positions, self.columns)

    @property
    def tiles(self) -> tuple[int, int]:
        """The numbers of ranks that have tiles, or rows, of one image below each other, and side by side."""
        across = prod(self.columns)
        return self.ranks_per_sample // across, across

    @property
    def _grid(self) -> str:
        """The ranks that share a sample: ``4``, or ``2x2`` for tiles in two rows and two columns."""
        return "x".join(map(str, self.tiles)) if self.columns else str(self.ranks_per_sample)

    @property
    def key_copy_axes(self) -> tuple[Axis, ...]:
        """The mesh axes along which ranks use the same key and value head, outermost first.

        Between layers the features of the ranks of such an axis follow each other, innermost axis first
        (:mod:`autoddl.costmodel.distribution`).  So the axis is the outermost part of the axis of p1.
        """
        return tuple(
            Axis(copies, axis.stride * (axis.size // copies), axis.level)
            for axis in self.axes(1)
            for copies in self.key_copies[axis.level : axis.level + 1]
            if copies > 1
        )

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.p0 * self.p1 * self.p2

    @cached_property
    def rows_and_features(self) -> RowsAndFeatures:
        """(p0, s) for each level: the layout of the activations around the layer; (p0, s, c) if images are cut into tiles."""
        return layout_levels(self.splits, self.columns)

    @property
    def activations(self) -> Distribution:
        """The canonical layout of the activations around the layer."""
        return canonical(self.rows_and_features)

    def axes(self, which: int, embedding: bool = False) -> tuple[Axis, ...]:
        """The mesh axes of p0, p1 or p2 (``which`` = 0, 1 or 2), outermost first; axes of size 1 are left out."""
        return mesh_axes(self.splits, embedding)[which]

    def expert_axes(self) -> tuple[Axis, ...]:
        """The parts of the axes of p0 that experts are divided over, outermost first."""
        return expert_axes(self.axes(0), self.experts)

    def copy_axes(self, embedding: bool = False) -> tuple[Axis, ...]:
        """The axes of p0 whose devices hold the same part of the parameters, outermost first."""
        return copy_axes(self.axes(0, embedding), self.experts)

    def shard_axes(self, embedding: bool = False) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """The axes of p0 that divide (gradients and weights inside a training step, the optimizer states only)."""
        return shard_axes(self.copy_axes(embedding), self.hybrid)

    def sbp(self, layer: Layer) -> dict[str, Distribution | None]:
        """The distributions of ``input``, ``weight`` and ``output`` of the product, as in the table of the module's docstring, and
        of what is stored: of the ``parameter`` between the passes, of its ``gradient`` and of its optimizer ``state``.

        The axes are in the order (p0, p1, p2) for every kind of layer, including axes of size 1, so that the entries match the
        printed strategy.  ``weight`` and what is stored are None for a layer without weights.  What p0 devices divide of it
        (``zero``) is shown as S0 on their axis, although shards divide the elements of a tensor as one vector; experts are a part
        of p0 of their own.  The result is for display.  :meth:`axes` gives the
        actual order of ranks (p2 is outside p1 for an embedding), and :attr:`activations` the layout between layers.
        """
        input_states, weight_states, output_states = kind_of(layer.kind).states
        if self.summa:
            input_states = weight_states = output_states = (Split(0), Split(1), Broadcast())
        stored = {"parameter": 3, "gradient": 2, "state": 1}
        return {
            "input": self._on_mesh(input_states),
            "weight": self._on_mesh(weight_states) if layer.parameters else None,
            "output": self._on_mesh(output_states),
            **{
                name: self._stored(weight_states, self.zero >= zero, self.hybrid and zero > 1)
                if layer.parameters
                else None
                for name, zero in stored.items()
            },
        }

    def divides(self, layer: Layer) -> bool:
        """Whether the layer's shape allows the strategy.

        Features (for attention, whole heads) must divide, images are not split, and only products are split over p2.
        """
        kind = kind_of(layer.kind)
        if self.p2 > 1 and (self.summa or kind.splitting is not Splitting.PRODUCT):
            return False
        if self.summa and not kind.offers_summa(layer, self):
            return False
        if not kind.offers_choices(layer, self):
            return False
        if self.p1 * self.p2 == 1:
            return True
        return kind.splitting is not Splitting.SAMPLES and kind.divides(layer, self)

    def fits(self, layer: Layer, samples: int) -> bool:
        """Whether the micro-batch of ``samples`` divides over p0: its samples, or the positions of the layer's samples.

        >>> from autoddl.costmodel.kinds.linear import linear
        >>> layer = linear("linear", rows=6, in_features=8, out_features=8)
        >>> [data_parallel((8,)).fits(layer, samples) for samples in (8, 4, 2, 1)]
        [True, True, False, False]
        """
        return bool(fitting(samples, self.p0, self.ranks_per_sample, kind_of(layer.kind).positions(layer)))

    def _stored(self, states: Sequence[SBPState], is_divided: bool, inside_nodes: bool) -> Distribution:
        """The distribution of what is stored of a weight with these states, and may be divided over its copies along p0."""
        levels: list[list[tuple[int, SBPState]]] = []
        for level, split in enumerate(self.splits):
            parts = self.experts[level] if self.experts else 1
            divides = is_divided and not (inside_nodes and level == 0)
            of_experts: list[tuple[int, SBPState]] = [(parts, Split(0))] if self.experts else []
            copies = (split[0] // parts, Split(0) if divides else states[0])
            levels.append([copies, *of_experts, *zip(split[1:], states[1:])])
        return Distribution.on_mesh(levels)

    def _on_mesh(self, states: Sequence[SBPState]) -> Distribution:
        levels = [list(zip(split, states)) for split in self.splits]
        for entries, across in zip(levels, self.columns):
            p0, state = entries[0]
            if state == Split(0):
                # Samples and rows of pixels are shown as one dimension, columns as dimension 3 of images.
                entries[:1] = [(p0 // across, state), (across, Split(3))]
        return Distribution.on_mesh(levels)


#: The attributes of a strategy besides its splits, with their defaults.
_CHOICES: Mapping[str, Any] = {field.name: field.default for field in fields(Strategy) if field.name != "splits"}


@dataclass(frozen=True)
class Choices:
    """What a search may choose for a layer besides its splits.

    Attributes:
        shardings: the values of ``zero``; a layer is offered the nearest that it can have (:func:`.layer.zero_of`).
        regathers: whether products may gather their inputs again.
    """

    shardings: tuple[int, ...] = (0,)
    regathers: bool = False


#: Nothing is divided, and gathered inputs are kept.
PLAIN = Choices()


def fitting(samples: int, p0: Any, ranks_per_sample: Any, positions: Any) -> Any:
    """Whether ``samples`` samples divide over p0 slices, of whole samples or of their positions.

    Args:
        samples: samples of a micro-batch.
        p0: number of slices, or an array.
        ranks_per_sample: number of ranks that the strategy lets share a sample, or an array; 1 if it says nothing of that.
        positions: number of positions of a sample that any number of ranks may share (:meth:`.LayerKind.positions`), or an array.
    """
    # One of the two numbers divides the other, and the ranks of a sample divide its positions.
    shared = np.maximum(p0 // samples, 1)
    shares_positions = (shared * samples == p0) & (positions % shared == 0)
    return np.where(
        np.asarray(ranks_per_sample) > 1, samples * ranks_per_sample == p0, (samples % p0 == 0) | shares_positions
    )


def _position_axes(axes: Sequence[Axis], positions: Sequence[int], inside: Sequence[int] = ()) -> tuple[Axis, ...]:
    """The innermost parts of the axes with ``positions`` ranks on each level, without their own innermost parts ``inside``."""
    inside = inside or (1,) * len(positions)
    return tuple(
        Axis(ranks // inner, axis.stride * inner, axis.level)
        for axis in axes
        for ranks, inner in zip(positions[axis.level : axis.level + 1], inside[axis.level : axis.level + 1])
        if ranks > inner
    )


def layout_levels(splits: Sequence[Split3], columns: Sequence[int]) -> RowsAndFeatures:
    """The layout of activations around a layer, as :attr:`Strategy.rows_and_features`."""
    levels = tuple((p0, p1 * p2) for p0, p1, p2 in splits)
    return tuple((*level, across) for level, across in zip(levels, columns)) if columns else levels


@cache
def mesh_axes(splits: tuple[Split3, ...], embedding: bool) -> tuple[tuple[Axis, ...], ...]:
    """The axes of p0, of p1 and of p2, each outermost first; axes of size 1 are left out."""
    order = (0, 2, 1) if embedding else (0, 1, 2)
    stride = prod(prod(split) for split in splits)
    axes: tuple[list[Axis], ...] = ([], [], [])
    for level, split in enumerate(splits):
        for which in order:
            stride //= split[which]
            if split[which] > 1:
                axes[which].append(Axis(split[which], stride, level))
    return tuple(tuple(of_one) for of_one in axes)


def expert_axes(axes: Sequence[Axis], experts: Sequence[int]) -> tuple[Axis, ...]:
    """The innermost parts of the axes of p0 that divide experts, as :meth:`Strategy.expert_axes` does."""
    return tuple(replace(axis, size=experts[axis.level]) for axis in axes if experts and experts[axis.level] > 1)


def copy_axes(axes: Sequence[Axis], experts: Sequence[int]) -> tuple[Axis, ...]:
    """The rest of the axes of p0, as :meth:`Strategy.copy_axes` does.

    >>> copy_axes([Axis(8, 2, 0)], [4])
    (Axis(size=2, stride=8, level=0),)
    """
    if not experts:
        return tuple(axes)
    parts = [(axis, experts[axis.level]) for axis in axes]
    return tuple(
        replace(axis, size=axis.size // part, stride=axis.stride * part)
        for axis, part in parts
        if part == 1 or np.max(axis.size) > part
    )


def shard_axes(axes: Sequence[Axis], hybrid: bool) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Divide the axes of p0, outermost first, as :meth:`Strategy.shard_axes` does."""
    outer = tuple(axis for axis in axes if hybrid and axis.level == 0)
    return tuple(axes[len(outer) :]), outer


def transposed(strategy: Strategy) -> Strategy:
    """The strategy of a layer with the transposed weight: p1 and p2 are swapped.

    >>> print(transposed(Strategy(((2, 4, 1),))))
    (2,1,4)
    """
    return replace(strategy, splits=tuple((p0, p2, p1) for p0, p1, p2 in strategy.splits))


def data_parallel(level_sizes: Sequence[int]) -> Strategy:
    """The data-parallel strategy: (p, 1, 1) at every level."""
    return Strategy(tuple((size, 1, 1) for size in level_sizes))


@cache
def _splits(size: int) -> tuple[Split3, ...]:
    """All ordered factorisations of ``size`` into three factors."""
    return tuple((p0, p1, size // p0 // p1) for p0 in divisors(size) for p1 in divisors(size // p0))


def _sharded(strategy: Strategy, layer: Layer, shardings: Sequence[int]) -> Iterator[Strategy]:
    """The strategy with each sharding of the layer's parameters that makes a difference."""
    if strategy.copies == 1 or not layer.num_parameters or layer.num_frozen:
        yield strategy
        return
    is_hybrid = len(strategy.copy_axes()) > 1
    for zero in shardings:
        yield replace(strategy, zero=zero)
        if zero > 1 and is_hybrid:
            yield replace(strategy, zero=zero, hybrid=True)


@cache
def _all(level_sizes: tuple[int, ...], splitting: Splitting) -> tuple[Strategy, ...]:
    """All strategies of layers with this ``splitting``, regardless of shapes."""
    if splitting is Splitting.SAMPLES:
        return (data_parallel(level_sizes),)
    per_level = [_splits(size) for size in level_sizes]
    strategies = (Strategy(splits) for splits in product(*per_level))
    if splitting is Splitting.PRODUCT:
        return tuple(strategies)
    return tuple(s for s in strategies if s.p2 == 1)


def enumerate_strategies(
    layer: Layer,
    level_sizes: Sequence[int],
    summa: bool = False,
    choices: Choices = PLAIN,
    place: Place | None = None,
) -> Iterator[Strategy]:
    """The strategies of a layer that divide its features and heads.  The samples are not considered.

    Args:
        layer: the layer.
        level_sizes: number of devices at each network level, outermost first.
        summa: include Summa meshes (r, c > 1) for linear layers.
        choices: what is offered besides splits.
        place: the place of the layer in its graph; by default it shares no weights.
    """
    sizes, kind = tuple(level_sizes), kind_of(layer.kind)
    shardings = sorted({zero_of(layer, zero, place or Place()) for zero in choices.shardings})
    for splits in _all(sizes, kind.splitting):
        for strategy in kind.variants(layer, splits):
            if not strategy.divides(layer):
                continue
            for sharded in _sharded(strategy, layer, shardings):
                yield sharded
                if choices.regathers and strategy.p1 > 1 and kind.gathers_inputs:
                    yield replace(sharded, regathers=True)
    if summa and kind.splitting is Splitting.PRODUCT and not any(p.tied_to for p in layer.parameters):
        for strategy in _all(sizes, Splitting.ROWS_AND_FEATURES):
            if strategy.p0 > 1 and strategy.p1 > 1:
                candidate = Strategy(strategy.splits, summa=True)
                if candidate.divides(layer):
                    yield candidate
