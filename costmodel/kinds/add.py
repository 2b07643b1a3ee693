"""Element-wise sums, as of residuals: two reads and a write each way, nothing sent.

Backward the gradients of its inputs' other uses are added up.
"""

from __future__ import annotations

from ..layer import Layer
from ..localwork import elementwise
from .kind import Body, Frame, LayerKind

__all__ = ["Add", "add"]


class Add(LayerKind):
    """The element-wise sum of its inputs."""

    name = "add"

    def work(self, frame: Frame, is_first: bool) -> Body:
        after, after_backward = frame.epilogue()
        work = elementwise(3 * frame.output_bytes)
        return Body((), (), work + after, work + after_backward, kept_bytes=frame.kept_bytes)


def add(name: str, shape: tuple[int, ...]) -> Layer:
    """The element-wise sum of two or more tensors of one shape."""
    return Layer(name=name, kind="add", input_shape=shape, output_shape=shape)
