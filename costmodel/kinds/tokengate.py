"""Token gates: a tensor times the sigmoid of one number for each row, y sigmoid(x w).

The layer reads x and y, whose features are split over p1.  So the numbers, sums over features of x, are all-reduced over p1: the
forward pass one per row, the backward pass their gradients.
"""

from __future__ import annotations

from ..collectives import Collective, Step
from ..layer import Layer, Parameter
from ..localwork import elementwise
from .kind import Body, LayerKind, LayerQuantities

__all__ = ["TokenGate", "token_gate"]


class TokenGate(LayerKind):
    """One sigmoid for each row."""

    name = "token_gate"
    attributes = ("features",)
    reads_data = False

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        nbytes = quantities.rows * quantities.itemsize
        steps = tuple(Step(Collective.ALL_REDUCE, axis, nbytes) for axis in reversed(quantities.strategy.axes(1)))
        return Body(
            forward=steps,
            backward=steps,
            forward_work=elementwise(3 * quantities.output_bytes),
            backward_work=elementwise(6 * quantities.output_bytes),
            kept_bytes=2 * quantities.output_bytes + 2 * nbytes,
        )


def token_gate(name: str, rows: int, features: int) -> Layer:
    """Make a layer that multiplies its second input by the sigmoid of a number, which it computes from its first input."""
    return Layer(
        name=name,
        kind="token_gate",
        input_shape=(rows, 2 * features),
        output_shape=(rows, features),
        attributes={"features": features},
        parameters=(Parameter(f"{name}.weight", (1, features)),),
        kept_elements=rows * features,
        modules=(name,),
    )
