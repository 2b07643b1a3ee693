"""The core of multi-head latent attention (DeepSeek-V2, 2024): queries and keys of other sizes than values.

Each query head has n features without position and r rotated ones.  Its key has n features of its own and the r rotated features
that all heads share; its value has v.  The layer reads queries, h (n + r) features; keys and values, h (n + v), a head after the
other; and the shared r features:

    softmax(q k^T / sqrt(n + r)) v

Heads are split over p1, and the shared features are all-gathered over p1.  With P pairs as in :mod:`.attention`, a head takes
2 P (n + r + v) FLOPs in the forward pass and 2.5 times as many in the backward pass.  The low ranks of queries, keys and values are
linear layers and norms in front of this layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..collectives import gather_steps
from ..layer import Layer
from ..localwork import attention_core
from .attention import pairs_of
from .kind import Body, LayerKind, LayerQuantities

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["LatentAttention", "latent_attention"]


class LatentAttention(LayerKind):
    """The core of latent attention, without its projections; always fused."""

    name = "latent_attention"
    reads_order = True
    attributes = ("heads", "head_dim", "rotary_dim", "value_dim", "causal")
    may_be_zero = frozenset({"causal"})
    is_selected = True
    reads_data = False
    colour = "#fce5cd"

    def shape_text(self, layer: Layer) -> str:
        attributes = layer.attributes
        rotary, head_dim = attributes["rotary_dim"], attributes["head_dim"]
        return f"{attributes['heads']} heads of {head_dim}+{rotary}, values of {attributes['value_dim']}"

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        parts = strategy.p1 * strategy.p2
        return not (layer.attributes["heads"] % parts or layer.attributes["rotary_dim"] % parts)

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        attributes = quantities.layer.attributes
        heads = quantities.samples * attributes["heads"] / quantities.devices
        query_dim = attributes["head_dim"] + attributes["rotary_dim"]
        shared_bytes = quantities.rows * (attributes["rotary_dim"] * quantities.itemsize)
        gather = gather_steps(quantities.strategy.axes(1), shared_bytes)
        flops = heads * (2.0 * pairs_of(quantities.layer) * (query_dim + attributes["value_dim"]))
        nbytes = quantities.input_bytes + quantities.output_bytes + shared_bytes
        return Body(
            forward=gather,
            backward=tuple(step.adjoint() for step in reversed(gather)),
            forward_work=attention_core(flops, nbytes),
            backward_work=attention_core(2.5 * flops, 2 * nbytes),
            # Every head has a copy of the shared features in its key.
            kept_bytes=quantities.input_bytes
            + heads * (quantities.layer.rows * (attributes["rotary_dim"] * quantities.itemsize))
            + heads * (quantities.layer.rows * quantities.statistic_bytes),
        )


def latent_attention(name: str, rows: int, heads: int, *, head_dim: int, rotary_dim: int, value_dim: int) -> Layer:
    """Make the core of causal latent attention.

    Args:
        name: of the layer and its module.
        rows: tokens per sample.
        heads: number of heads.
        head_dim: features of a query without position; as many of its key.
        rotary_dim: rotated features of a query, and of the key that all heads share.
        value_dim: features of a value.
    """
    query_dim = head_dim + rotary_dim
    return Layer(
        name=name,
        kind="latent_attention",
        input_shape=(rows, heads * (query_dim + head_dim + value_dim) + rotary_dim),
        output_shape=(rows, heads * value_dim),
        attributes={
            "heads": heads,
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "value_dim": value_dim,
            "causal": 1,
        },
        flops=2.0 * rows * rows * heads * (query_dim + value_dim),
        kept_elements=heads * rows * rotary_dim,
        modules=(name,),
    )
