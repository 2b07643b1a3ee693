"""Anything else: split along the samples alone, bound by the memory bandwidth of its input and output; backward twice that."""

from __future__ import annotations

from collections.abc import Sequence

from ..layer import Layer, Parameter
from ..localwork import elementwise
from .kind import Body, Frame, LayerKind, Splitting

__all__ = ["Opaque", "opaque"]


class Opaque(LayerKind):
    """A layer of which nothing is known but its shapes."""

    name = "opaque"
    splitting = Splitting.SAMPLES

    def work(self, frame: Frame, is_first: bool) -> Body:
        after, after_backward = frame.epilogue()
        work = elementwise(frame.input_bytes + frame.output_bytes)
        kept = frame.input_bytes + frame.kept_bytes
        return Body((), (), work + after, 2 * work + after_backward, kept_bytes=kept)


def opaque(
    name: str,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    *,
    parameters: Sequence[Parameter] = (),
    flops: float = 0.0,
    kept_elements: int = 0,
    modules: Sequence[str] | None = None,
) -> Layer:
    """Anything else."""
    return Layer(
        name=name,
        kind="opaque",
        input_shape=input_shape,
        output_shape=output_shape,
        parameters=tuple(parameters),
        flops=flops,
        kept_elements=kept_elements,
        modules=(name,) if modules is None else tuple(modules),
    )
