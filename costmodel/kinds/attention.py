"""Attention: softmax(q k^T) v on whole heads of whole sequences.

Heads are split, into at most as many parts as there are key-value heads; there is no communication.

The work is two batched products over all (sample, head) pairs, q k^T and its softmax times v: 4 S S head_dim FLOPs per head for
sequence length S, and twice as many in the backward pass.  Causal attention counts in full, since dense kernels compute all of
it.  The softmax reads or writes the S S scores three times in each pass.  The probabilities, S S elements per head, are kept for
the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layer import Layer
from ..localwork import elementwise
from .kind import Body, LayerKind, LayerQuantities

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Attention", "attention", "head_sections"]


class Attention(LayerKind):
    """The core of attention, without its projections."""

    name = "attention"
    attributes = ("heads", "kv_heads", "head_dim", "causal")
    may_be_zero = frozenset({"causal"})
    colour = "#fce5cd"

    def shape_text(self, layer: Layer) -> str:
        return f"{layer.attributes['heads']} heads of {layer.attributes['head_dim']}"

    def input_groups(self, layer: Layer) -> tuple[int, tuple[int, ...]]:
        return head_sections(layer)

    def drops_elements(self, layer: Layer) -> bool:
        # With dropout, the backward pass keeps more than the probabilities.
        return layer.kept_elements > layer.attributes["heads"] * layer.rows**2

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        return layer.attributes["kv_heads"] % (strategy.p1 * strategy.p2) == 0

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        attributes, length = quantities.layer.attributes, quantities.layer.rows
        pairs = quantities.samples * attributes["heads"] / quantities.devices
        scores = quantities.matmul(length, attributes["head_dim"], length, count=pairs)
        softmax = pairs * length * length * quantities.itemsize
        return Body(
            forward=(),
            backward=(),
            forward_work=2 * scores + elementwise(3 * softmax),
            backward_work=4 * scores + elementwise(3 * softmax),
            kept_bytes=quantities.input_bytes + quantities.kept_bytes,
        )


def head_sections(layer: Layer) -> tuple[int, tuple[int, int, int]]:
    """Return (number of key-value heads, (features of q, of k, of v)) of an attention layer.

    Each group of :meth:`LayerKind.input_groups` is a key-value head with its query heads.
    """
    attributes = layer.attributes
    keys = attributes["kv_heads"] * attributes["head_dim"]
    return attributes["kv_heads"], (attributes["heads"] * attributes["head_dim"], keys, keys)


def attention(
    name: str, sequence: int, heads: int, head_dim: int, *, kv_heads: int | None = None, causal: bool, module: str = ""
) -> Layer:
    """Make an attention layer, softmax(q k^T) v.

    Its input is the concatenation of q, k and v, of shape (sequence, (heads + 2 kv_heads) head_dim); its output has shape
    (sequence, heads head_dim).

    Args:
        name: of the layer.
        sequence: sequence length.
        heads, head_dim: number of query heads and features of each.
        kv_heads: number of key-value heads; None for as many as query heads.
        causal: whether a position attends only to earlier ones.
        module: the module path, if it differs from the name.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    return Layer(
        name=name,
        kind="attention",
        input_shape=(sequence, (heads + 2 * kv_heads) * head_dim),
        output_shape=(sequence, heads * head_dim),
        attributes={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "causal": int(causal)},
        flops=4.0 * sequence * sequence * heads * head_dim,
        kept_elements=heads * sequence * sequence,
        modules=(module or name,),
    )
