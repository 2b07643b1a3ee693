"""Embeddings: a table that is looked up, the product of one-hot rows with it.

Ids have no features to be split: nothing is gathered. Forward, the looked-up rows are reduce-scattered over p2, with n = T d a
/ (P0 P1) bytes; backward their gradients are all-gathered. It reads and writes its output forward; backward it reads two
tensors and writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..collectives import gather_steps, scatter_steps
from ..layer import Layer, Parameter
from ..localwork import elementwise
from ..sbp import Broadcast, PartialSum, Split
from .kind import Body, Frame, LayerKind, Splitting, States

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Embedding", "embedding"]


class Embedding(LayerKind):
    """A table that is looked up, once per row."""

    name = "embedding"
    attributes = ("vocabulary", "features")
    splitting = Splitting.PRODUCT
    is_lookup = True

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
        # Ids have no feature dimension: every rank looks up all ids of its samples.
        read: States = (Split(0), Broadcast(), Broadcast())
        return read, (Broadcast(), Split(1), Split(0)), (Split(0), Split(1), PartialSum())

    def work(self, frame: Frame, is_first: bool) -> Body:
        output_bytes = frame.rows * frame.layer.attributes["features"] * frame.itemsize / frame.p1
        p2 = frame.strategy.axes(2, embedding=True)
        return Body(
            forward=scatter_steps(p2, output_bytes),
            backward=gather_steps(p2, output_bytes),
            forward_work=elementwise(2 * output_bytes),
            backward_work=elementwise(3 * output_bytes),
            kept_bytes=0.0,
            buffer_bytes=output_bytes if p2 else 0.0,
        )


def embedding(name: str, rows: int, vocabulary: int, features: int) -> Layer:
    """A table that is looked up, once per row."""
    return Layer(
        name=name,
        kind="embedding",
        input_shape=(rows,),
        output_shape=(rows, features),
        attributes={"vocabulary": vocabulary, "features": features},
        parameters=(Parameter(f"{name}.weight", (vocabulary, features)),),
        modules=(name,),
    )
