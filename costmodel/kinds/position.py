"""Learned positions: a table whose first rows are added to every sample.  Nothing is sent; the output is read once each way."""

from __future__ import annotations

from ..layer import Layer, Parameter
from ..localwork import elementwise
from ..sbp import Broadcast, Split
from .kind import Body, Frame, LayerKind, States

__all__ = ["Position", "position"]


class Position(LayerKind):
    """A table that is added to every sample."""

    name = "position"
    attributes = ("positions", "features")

    def shape_text(self, layer: Layer) -> str:
        return f"{layer.attributes['positions']} positions, {layer.attributes['features']} features"

    @property
    def states(self) -> tuple[States, States, States]:
        read, _, written = super().states
        return read, (Broadcast(), Split(1), Broadcast()), written

    def work(self, frame: Frame, is_first: bool) -> Body:
        work = elementwise(frame.output_bytes)
        return Body((), (), work, work, kept_bytes=0.0)


def position(name: str, rows: int, positions: int, features: int) -> Layer:
    """A table whose first ``rows`` rows go to every sample."""
    return Layer(
        name=name,
        kind="position",
        input_shape=(rows,),
        output_shape=(rows, features),
        attributes={"positions": positions, "features": features},
        parameters=(Parameter(f"{name}.weight", (positions, features)),),
        modules=(name,),
    )
