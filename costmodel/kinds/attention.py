"""Attention: softmax(q k^T) v on whole heads of whole sequences.

Heads are split, into at most as many parts as there are key-value heads; there is no communication.

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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layer import Layer
from ..localwork import LocalWork, attention_core, elementwise
from .kind import Body, LayerKind, LayerQuantities, Number

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Attention", "attention", "head_sections", "pairs_of"]


class Attention(LayerKind):
    """The core of attention, without its projections."""

    name = "attention"
    attributes = ("heads", "kv_heads", "head_dim", "causal")
    may_be_zero = frozenset({"causal"})
    optional_attributes = frozenset({"window", "key_rows"})
    is_selected = True
    colour = "#fce5cd"

    def shape_text(self, layer: Layer) -> str:
        return f"{layer.attributes['heads']} heads of {layer.attributes['head_dim']}"

    def input_groups(self, layer: Layer) -> tuple[int, tuple[int, ...]]:
        return head_sections(layer)

    def dropped_elements(self, layer: Layer) -> int:
        # With dropout, the backward pass keeps the probabilities before and after it.
        scores: int = layer.attributes["heads"] * layer.rows * _key_rows(layer)
        return scores if layer.kept_elements > scores else 0

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        return layer.attributes["kv_heads"] % (strategy.p1 * strategy.p2) == 0

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        is_fused = quantities.workload.attention == "fused"
        forward, backward, kept_bytes = _fused(quantities) if is_fused else _dense(quantities)
        return Body((), (), forward, backward, kept_bytes=quantities.input_bytes + kept_bytes)


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
    """The rows of keys and values: those of the queries, except in cross attention."""
    return layer.attributes.get("key_rows", layer.rows)


def _fused(quantities: LayerQuantities) -> tuple[LocalWork, LocalWork, Number]:
    """Work forward and backward, and kept bytes besides the input."""
    layer = quantities.layer
    heads = quantities.samples * layer.attributes["heads"] / quantities.devices
    flops = heads * (4.0 * pairs_of(layer) * layer.attributes["head_dim"])
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
    nbytes = heads * ((length + keys) * head_dim * quantities.itemsize) + scores_bytes
    product = attention_core(heads * (2.0 * length * keys * head_dim), nbytes)
    softmax = elementwise(3 * scores_bytes)
    if quantities.layer.mask_bytes:
        softmax = softmax + elementwise(2 * scores_bytes)
    return 2 * product + softmax, 4 * product + softmax, quantities.kept_bytes


def head_sections(layer: Layer) -> tuple[int, tuple[int, int, int]]:
    """Return (number of key-value heads, (features of q, of k, of v)) of an attention layer.

    Each group of :meth:`LayerKind.input_groups` is a key-value head with its query heads.
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
        },
        flops=4.0 * sequence * keys * heads * head_dim,
        kept_elements=(2 if dropout else 1) * heads * sequence * keys,
        modules=(module or name,),
    )
