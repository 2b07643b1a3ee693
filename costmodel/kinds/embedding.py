"""Embeddings: lookup tables, priced as the product of one-hot rows with the table.

The input ids have no feature dimension, so they are not gathered.  The forward pass reduce-scatters the looked-up rows over p2,
with n = T d a / (P0 P1) bytes for T rows of d features of a bytes; the backward pass all-gathers their gradients.  The forward pass
reads and writes the output; the backward pass reads two tensors of that size and writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..collectives import gather_steps, scatter_steps
from ..layer import Layer, Parameter
from ..localwork import elementwise
from ..sbp import Broadcast, PartialSum, Split
from .kind import Body, LayerKind, LayerQuantities, Splitting, States, independent_rows

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Embedding", "embedding"]


class Embedding(LayerKind):
    """A table with one lookup per row."""

    name = "embedding"
    attributes = ("vocabulary", "features")
    splitting = Splitting.PRODUCT
    is_lookup = True
    gathers_weights = True
    colour = "#d9ead3"

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        return {"features": layer.output_shape[-1]}

    def shape_text(self, layer: Layer) -> str:
        return f"vocabulary {layer.attributes['vocabulary']}, {layer.attributes['features']} features"

    def shares_weights_with(self, other: LayerKind) -> bool:
        return other.name in ("linear", "embedding")

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        s = strategy.p1 * strategy.p2
        return not (layer.attributes["features"] % s or layer.attributes["vocabulary"] % strategy.p2)

    @property
    def states(self) -> tuple[States, States, States]:
        # Every rank looks up all ids of its samples, since ids have no feature dimension.
        read: States = (Split(0), Broadcast(), Broadcast())
        return read, (Broadcast(), Split(1), Split(0)), (Split(0), Split(1), PartialSum())

    def positions(self, layer: Layer) -> int:
        return independent_rows(layer)

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        output_bytes = quantities.rows * quantities.layer.attributes["features"] * quantities.itemsize / quantities.p1
        p2 = quantities.strategy.axes(2, embedding=True)
        return Body(
            forward=scatter_steps(p2, output_bytes),
            backward=gather_steps(p2, output_bytes),
            forward_work=elementwise(2 * output_bytes),
            backward_work=elementwise(3 * output_bytes),
            kept_bytes=0.0,
            buffer_bytes=output_bytes if p2 else 0.0,
        )


def embedding(name: str, rows: int, vocabulary: int, features: int) -> Layer:
    """Make an embedding layer with ``rows`` lookups per sample in a table of shape (vocabulary, features)."""
    return Layer(
        name=name,
        kind="embedding",
        input_shape=(rows,),
        output_shape=(rows, features),
        attributes={"vocabulary": vocabulary, "features": features},
        parameters=(Parameter(f"{name}.weight", (vocabulary, features)),),
        modules=(name,),
    )
