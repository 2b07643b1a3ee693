"""Learned position embeddings: a table whose first rows are added to every sample.

There is no communication.  Each pass moves the bytes of the output once.
"""

from __future__ import annotations

from ..layer import Layer, Parameter
from ..localwork import elementwise
from ..sbp import Broadcast, Split
from .kind import Body, LayerKind, LayerQuantities, States, independent_rows

__all__ = ["Position", "position"]


class Position(LayerKind):
    """A table added to every sample."""

    name = "position"
    attributes = ("positions", "features")
    reads_data = False
    is_between = True
    gathers_weights = True
    colour = "#d9ead3"

    def shape_text(self, layer: Layer) -> str:
        return f"{layer.attributes['positions']} positions, {layer.attributes['features']} features"

    @property
    def states(self) -> tuple[States, States, States]:
        read, _, written = super().states
        return read, (Broadcast(), Split(1), Broadcast()), written

    def positions(self, layer: Layer) -> int:
        return independent_rows(layer)

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        work = elementwise(quantities.output_bytes)
        return Body((), (), work, work, kept_bytes=0.0)


def position(name: str, rows: int, positions: int, features: int) -> Layer:
    """Make a position layer, which adds the first ``rows`` rows of a table of shape (positions, features) to every sample."""
    return Layer(
        name=name,
        kind="position",
        input_shape=(rows,),
        output_shape=(rows, features),
        attributes={"positions": positions, "features": features},
        parameters=(Parameter(f"{name}.weight", (positions, features)),),
        modules=(name,),
    )
