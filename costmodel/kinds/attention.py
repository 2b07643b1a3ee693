"""Attention: softmax(q k^T) v on whole heads of whole sequences.

Heads are split over s ranks.  If there are fewer key-value heads than ranks, s / kv_heads ranks use the same key and value; each
has its part of their features, and all-gathers the others (``copies``).  Otherwise there is no communication, as long as every
rank has whole samples.

**Shared samples.**  If q ranks share the positions of a sample (:mod:`autoddl.costmodel.strategy`), each has all its heads of S / q
positions.  With n the bytes of its keys and values, the ways are

======  ===========================  ================================================================
way     forward                      backward
======  ===========================  ================================================================
gather  all-gather of n to q n       the same, then reduce-scatter of the gradients of keys and values
ring    q - 1 shifts of n            q - 1 shifts of n, q - 1 of the gradients of keys and values
======  ===========================  ================================================================

Gather and ring keep the keys and values of their own positions only; dense attention keeps the gathered ones, and gathers them
once.  A ring (Liu et al., Ring Attention, 2023) needs fused attention, and axes of a single network level.  The third way, heads in
place of positions (Jacobs et al., DeepSpeed Ulysses, 2023), needs no choice: it is a change of layout before attention, from p0 to
whole samples and more parts of the features, and another one after it.

**Causal work** of contiguous positions would be unbalanced: the last rank would have (2 q - 1) / q^2 of the pairs.  So if ranks
share the samples of causal attention, the positions of every sample of the model are in *mirrored* order, 0, S-1, 1, S-2, ...:
whatever q is, rank i then has as many early positions as late ones (i S / 2q to (i+1) S / 2q - 1, and as many from the end;
"zig-zag"), and 1 / q of the pairs.  With a window the rank of the middle positions has the most pairs.

**Pairs.**  Position i attends to n(i) positions: to all S, to the i + 1 up to itself if attention is causal, and to at most the
last W of them with a sliding window.  So the pairs of a sequence are

    P = sum over i of n(i)  =  S S,     S (S + 1) / 2  if causal,     W S - W (W - 1) / 2  if causal with a window W <= S

**Cross attention** reads queries of S rows, and keys and values of R rows of another tensor: two producers.  P is S R.

**Fused** attention computes the two products of each pair, q k^T and its softmax times v: 4 P head_dim FLOPs per head.  The
backward pass computes the scores again, and four further products: 2.5 times as many (Dao et al., FlashAttention, NeurIPS
2022).  Memory is read and written for q, k, v and the result alone.  Besides q, k and v it keeps the logarithm of each row's
sum, in the master type; the result is the input of the layer that follows.

**Dense** attention computes all S S pairs whatever the mask, and twice as many FLOPs in the backward pass.  The softmax reads or
writes the scores three times in each pass.  The probabilities, S S elements per head, are kept for the backward pass.  With
dropout of the probabilities, they are read and written once more in each pass; the result of the dropout and its mask are kept,
too.

**Changed scores.** A traced model may do more to its scores: add a learned bias, mask what the input says, multiply by another
factor (:attr:`.layer.Layer.scores`). Each tensor that changes them reads and writes them once, and once more in the backward pass.
Its first two dimensions are samples and *windows*: a sample's rows may be divided into windows that attend to themselves alone, as
in Swin (Liu et al., 2021). Then P is S S / windows. Such attention is dense, and no ranks share its samples. Learned biases have
the heads as their last dimension, and are divided with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import gcd, prod
from typing import TYPE_CHECKING

import numpy as np

from ..collectives import Collective, Step, gather_steps, scatter_steps
from ..distribution import prime_factors
from ..layer import Layer
from ..localwork import LocalWork, attention_core, elementwise
from ..sbp import Broadcast, Split
from .kind import Body, LayerKind, LayerQuantities, Number, States
from .sharing import position_factors

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = [
    "GATHER",
    "RING",
    "SEQUENCE_WAYS",
    "Attention",
    "attention",
    "head_sections",
    "is_blockwise",
    "is_changed",
    "key_slices",
    "pairs_of",
]

#: The ways in which ranks that share the positions of a sample exchange keys and values; see the module's docstring.
SEQUENCE_WAYS = GATHER, RING = "gather", "ring"


class Attention(LayerKind):
    """The core of attention, without its projections."""

    name = "attention"
    attributes = ("heads", "kv_heads", "head_dim", "causal")
    may_be_zero = frozenset({"causal", "changes", "rotary_base"})
    optional_attributes = frozenset(
        {
            "window",
            "key_rows",
            "interleaved",
            "windows",
            "changes",
            "rotary_base",
            "rotary_features",
            "rotary_neighbours",
        }
    )
    is_selected = True
    colour = "#fce5cd"

    def shape_text(self, layer: Layer) -> str:
        return f"{layer.attributes['heads']} heads of {layer.attributes['head_dim']}"

    @property
    def states(self) -> tuple[States, States, States]:
        canonical, _, output = super().states
        return canonical, (Broadcast(), Split(1), Broadcast()), output  # tables of biases: (rows, heads)

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        return {} if layer.scores is None else {"changes": len(layer.scores.results)}

    def input_groups(self, layer: Layer) -> tuple[int, tuple[int, ...]]:
        kv_heads, sections = head_sections(layer)
        return kv_heads * key_slices(layer), sections

    def dropped_elements(self, layer: Layer) -> int:
        # With dropout, the backward pass keeps the probabilities before and after it.
        scores: int = layer.attributes["heads"] * layer.rows * _key_rows(layer)
        return scores if layer.kept_elements > scores else 0

    def variants(self, layer: Layer, strategy: Strategy) -> Iterator[Strategy]:
        copies = _copies(layer, strategy)
        if copies is None:
            return
        yield (whole := replace(strategy, key_copies=copies))
        if is_changed(layer):
            return
        for positions in position_factors(tuple(p0 for p0, _, _ in strategy.splits)):
            for way in SEQUENCE_WAYS:
                yield replace(whole, sequence=way, positions=positions)

    def offers_choices(self, layer: Layer, strategy: Strategy) -> bool:
        if _copies(layer, strategy) != strategy.key_copies:
            return False
        positions, attributes = strategy.positions, layer.attributes
        if strategy.experts or not positions:
            return not (strategy.experts or strategy.sequence)
        q = strategy.ranks_per_sample
        if "key_rows" in attributes or is_changed(layer) or layer.rows % (2 * q if attributes["causal"] else q):
            return False
        if positions not in position_factors(tuple(p0 for p0, _, _ in strategy.splits)):
            return False
        if strategy.sequence == RING:
            return not self.drops_elements(layer) and sum(ranks > 1 for ranks in positions) == 1
        return strategy.sequence == GATHER

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        return _copies(layer, strategy) is not None

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        is_fused = quantities.workload.attention == "fused" and not is_changed(quantities.layer)
        forward, backward, kept_bytes = _fused(quantities) if is_fused else _dense(quantities)
        own = Body((), (), forward, backward, kept_bytes=quantities.input_bytes + kept_bytes)
        return (
            _with_exchanges(quantities, own) if quantities.strategy.key_copies or quantities.strategy.positions else own
        )


def is_blockwise(layer: Layer, attention: str) -> bool:
    """Return whether ranks compute a layer block by block: with fused attention (`Workload.attention`), without dropout and with
    scores that nothing changes."""
    return attention == "fused" and not is_changed(layer) and not Attention().drops_elements(layer)


def is_changed(layer: Layer) -> bool:
    """Return whether an attention layer does more to its scores than a causal mask."""
    return "changes" in layer.attributes


def _copies(layer: Layer, strategy: Strategy) -> tuple[int, ...] | None:
    """Return :attr:`.Strategy.key_copies` of a strategy; None if the heads do not divide over its ranks."""
    attributes, s = layer.attributes, strategy.p1 * strategy.p2
    heads, kv_heads = attributes["heads"], attributes["kv_heads"]
    if kv_heads % s == 0:
        return ()
    left = s // kv_heads
    # Each rank has whole query heads, each with a slice of its key and value, which come with the queries.
    if s % kv_heads or heads % s or key_slices(layer) == 1 or "key_rows" in attributes:
        return None
    copies = []
    for _, p1, _ in reversed(strategy.splits):  # neighbours share heads
        copies.append(gcd(left, p1))
        left //= copies[-1]
        # The ranks of a level hold the features in the order of its prime factors, the largest one innermost.
        primes = prime_factors(p1)
        is_first = copies[-1] in (prod(primes[:number]) for number in range(len(primes) + 1))
        if not is_first or (left > 1 and copies[-1] != p1):
            return None
    return tuple(reversed(copies)) if left == 1 else None


def _with_exchanges(quantities: LayerQuantities, own: Body) -> Body:
    """Return the body of attention with the exchanges of keys and values, given its body without them."""
    strategy, attributes, layer = quantities.strategy, quantities.layer.attributes, quantities.layer
    q, copies = strategy.ranks_per_sample, prod(strategy.key_copies)
    of_head = 2 * layer.rows * attributes["head_dim"] * quantities.itemsize
    kv_bytes = quantities.samples * (of_head * (attributes["kv_heads"] * copies / quantities.devices))
    kept_bytes, buffer_bytes = own.kept_bytes, 0.0
    forward = copying = gather_steps(strategy.key_copy_axes, kv_bytes)
    backward: tuple[Step, ...] = ()
    if copying:
        kept_bytes = kept_bytes + kv_bytes * (1 - 1 / copies)
    axes, blockwise = strategy.position_axes, is_blockwise(layer, quantities.workload.attention)
    if strategy.sequence == GATHER:
        gather, scatter = gather_steps(axes, kv_bytes * q), scatter_steps(axes, kv_bytes * q)
        forward, backward = (*forward, *gather), (*(gather if blockwise else ()), *scatter)
        if blockwise:
            buffer_bytes = kv_bytes * (2 * q)  # the gathered keys and values, and their gradients
        else:
            kept_bytes = kept_bytes + kv_bytes * q
    elif strategy.sequence == RING:
        shifts = (Step(Collective.SHIFT, axes[0], kv_bytes),) * (q - 1)
        forward, backward = (*forward, *shifts), (*shifts, *shifts)
        buffer_bytes = kv_bytes * 4  # keys and values, and their gradients, of two other ranks
    return replace(
        own,
        forward=forward,
        backward=(*backward, *scatter_steps(strategy.key_copy_axes, kv_bytes)),
        kept_bytes=kept_bytes,
        buffer_bytes=buffer_bytes,
    )


def pairs_of(layer: Layer) -> int:
    """Return the number of pairs (position, position that it attends to) of one head of a sample.

    >>> pairs_of(attention("attend", 4, 1, 8, causal=True)), pairs_of(attention("attend", 4, 1, 8, causal=True, window=2))
    (10, 7)
    """
    length, attributes = layer.rows, layer.attributes
    if not attributes["causal"]:
        return length * _key_rows(layer)
    window = min(attributes.get("window", length), length)
    return window * length - window * (window - 1) // 2


def _key_rows(layer: Layer) -> int:
    """The rows of keys and values that a query is compared with: as many as its window has queries, except in cross attention."""
    return layer.attributes.get("key_rows", layer.rows // layer.attributes.get("windows", 1))


@cache
def _imbalance(length: int, window: int, q: int) -> float:
    """Return the most pairs of a rank, divided by their mean, if q ranks share sequences of ``length`` in mirrored order.

    >>> _imbalance(16, 16, 4), _imbalance(16, 4, 4)
    (1.0, 1.103448275862069)
    """
    pairs = np.minimum(np.arange(length) + 1, window)
    of_ranks = (pairs + pairs[::-1])[: length // 2].reshape(q, -1).sum(axis=1)
    return float(of_ranks.max() / of_ranks.mean())


def _fused(quantities: LayerQuantities) -> tuple[LocalWork, LocalWork, Number]:
    """Work forward and backward, and kept bytes besides the input."""
    layer, attributes = quantities.layer, quantities.layer.attributes
    heads = quantities.samples * attributes["heads"] / quantities.devices
    flops = heads * (4.0 * pairs_of(layer) * attributes["head_dim"])
    if quantities.strategy.positions and attributes.get("window"):
        window = min(attributes["window"], layer.rows)
        flops = flops * _imbalance(layer.rows, window, quantities.strategy.ranks_per_sample)
    nbytes = quantities.input_bytes + quantities.output_bytes
    kept = heads * (layer.rows * quantities.statistic_bytes)
    if quantities.workload.types.rate == "fp8":
        kept = kept + quantities.output_bytes  # the next layer keeps a rounded copy only
    return attention_core(flops, nbytes), attention_core(2.5 * flops, 2 * nbytes), kept


def _dense(quantities: LayerQuantities) -> tuple[LocalWork, LocalWork, Number]:
    """Work forward and backward, and kept bytes besides the input."""
    attributes, length, keys = quantities.layer.attributes, quantities.layer.rows, _key_rows(quantities.layer)
    heads, head_dim = quantities.samples * attributes["heads"] / quantities.devices, attributes["head_dim"]
    scores_bytes = heads * (length * keys * quantities.itemsize)
    # Each of the two products of the forward pass reads two tensors and writes one, as the four of the backward pass.
    all_keys = keys * attributes.get("windows", 1)
    nbytes = heads * ((length + all_keys) * head_dim * quantities.itemsize) + scores_bytes
    product = attention_core(heads * (2.0 * length * keys * head_dim), nbytes)
    softmax = elementwise(3 * scores_bytes)
    if quantities.layer.mask_bytes:
        softmax = softmax + elementwise(2 * scores_bytes)
    softmax = softmax + attributes.get("changes", 0) * elementwise(2 * scores_bytes)
    return 2 * product + softmax, 4 * product + softmax, quantities.kept_bytes


def key_slices(layer: Layer) -> int:
    """Return the number of slices that the features of a key are divided into, of which each of its query heads has one.

    The slices lie beside the query heads, so that any split into whole query heads splits keys and values, too. It is 1 if the
    features do not divide: then the key as a whole lies behind its query heads.

    >>> key_slices(attention("attend", 4, heads=8, head_dim=64, kv_heads=2, causal=True))
    4
    """
    heads_per_key = layer.attributes["heads"] // layer.attributes["kv_heads"]
    return heads_per_key if layer.attributes["head_dim"] % heads_per_key == 0 else 1


def head_sections(layer: Layer) -> tuple[int, tuple[int, int, int]]:
    """Return (number of key-value heads, (features of q, of k, of v)) of an attention layer.

    Each group of :meth:`LayerKind.input_groups` is a query head with its slices of key and value (:func:`key_slices`), or a
    key-value head with its query heads.
    """
    attributes = layer.attributes
    keys = attributes["kv_heads"] * attributes["head_dim"]
    return attributes["kv_heads"], (attributes["heads"] * attributes["head_dim"], keys, keys)


def attention(
    name: str,
    sequence: int,
    heads: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    causal: bool,
    window: int | None = None,
    key_rows: int | None = None,
    windows: int = 1,
    changes: int | None = None,
    dropout: bool = False,
    module: str = "",
) -> Layer:
    """Make an attention layer, softmax(q k^T) v.

    Its input is the concatenation of q, k and v, of shape (sequence, (heads + 2 kv_heads) head_dim); its output has shape
    (sequence, heads head_dim).

    Args:
        name: of the layer.
        sequence: sequence length.
        heads, head_dim: number of query heads and features of each.
        kv_heads: number of key-value heads; None for as many as query heads.
        causal: whether a position attends only to itself and to earlier ones.
        window: number of positions that a position of causal attention attends to, itself included; None for all of them.
        key_rows: for cross attention, whose two inputs are q of shape (sequence, heads head_dim), and k and v of shape
            (key_rows, 2 kv_heads head_dim). None: q, k and v are of the same rows.
        windows: number of windows of successive rows that attend to themselves alone; more than 1 only with ``changes``.
        changes: number of tensors that change the scores; None if nothing but a causal mask does.
        dropout: whether probabilities are dropped.
        module: the module path, if it differs from the name.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    keys = sequence if key_rows is None else key_rows
    # The elements of two tensors of different numbers of rows form one row.
    is_cross, elements = key_rows is not None, (sequence * heads + keys * 2 * kv_heads) * head_dim
    return Layer(
        name=name,
        kind="attention",
        input_shape=(elements,) if is_cross else (sequence, (heads + 2 * kv_heads) * head_dim),
        output_shape=(sequence, heads * head_dim),
        attributes={
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "causal": int(causal),
            **({} if window is None else {"window": window}),
            **({} if key_rows is None else {"key_rows": key_rows}),
            **({} if windows == 1 else {"windows": windows}),
            **({} if changes is None else {"changes": changes}),
        },
        flops=4.0 * sequence * keys // windows * heads * head_dim,
        kept_elements=(2 if dropout else 1) * heads * sequence * keys // windows,
        modules=(module or name,),
    )
