"""Batch norm: every channel is normalised with its mean and variance over samples and pixels.

Of which samples is stated by the layer, since it is a matter of the model's results, not only of their price:

- by default, of those of a rank alone, as data parallelism does everywhere ("ghost" batches; Hoffer et al., 2017).  Nothing is
  sent.  If ranks share images, a rank's samples are its rows of them.
- ``synchronised``: of all samples of a micro-batch (``nn.SyncBatchNorm``).  The forward pass all-reduces two sums of each channel
  over p0, and so does the backward pass, in the master type.

Channels are split over p1, and do not depend on each other.  The forward pass reads the input for the statistics, reads it again
and writes the output. The backward pass reads two tensors for the sums, reads them again and writes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..collectives import Collective, Step
from ..layer import Layer, Parameter
from ..localwork import elementwise
from .epilogue import kept_by_epilogue
from .kind import Body, LayerQuantities
from .sharing import ImageKind

__all__ = ["BatchNorm", "batch_norm", "batch_norm_note"]


class BatchNorm(ImageKind):
    """A norm over the samples and pixels of each channel."""

    name = "batch_norm"
    attributes = ("features", "synchronised")
    may_be_zero = frozenset({"synchronised"})
    colour = "#eeeeee"

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        attributes = quantities.layer.attributes
        sums = 2 * attributes["features"] / quantities.p1 * quantities.statistic_bytes
        axes = quantities.strategy.axes(0) if attributes["synchronised"] else ()
        steps = tuple(Step(Collective.ALL_REDUCE, axis, sums) for axis in reversed(axes))
        after, after_backward = quantities.epilogue()
        return Body(
            forward=steps,
            backward=steps,
            forward_work=elementwise(3 * quantities.output_bytes) + after,
            backward_work=elementwise(5 * quantities.output_bytes) + after_backward,
            kept_bytes=quantities.input_bytes + quantities.kept_bytes,
        )


def batch_norm(
    name: str, shape: tuple[int, ...], *, synchronised: bool = False, affine: bool = True, epilogue: Sequence[str] = ()
) -> Layer:
    """Make a batch norm.

    Args:
        name: of the layer and its module.
        shape: of a sample: (channels, height, width), or (1, features).
        synchronised: whether the statistics are those of the samples of all ranks.
        affine: whether it has a weight and a bias.
        epilogue: element-wise operations that follow.
    """
    features = shape[0] if len(shape) == 3 else shape[-1]
    names = ("weight", "bias") if affine else ()
    return Layer(
        name=name,
        kind="batch_norm",
        input_shape=shape,
        output_shape=shape,
        attributes={"features": features, "synchronised": int(synchronised)},
        parameters=tuple(Parameter(f"{name}.{parameter}", (features,)) for parameter in names),
        epilogue=tuple(epilogue),
        kept_elements=kept_by_epilogue(epilogue, prod(shape)),
        modules=(name,),
    )


def batch_norm_note(names: str) -> str:
    """Return the remark about batch norms that are not synchronised."""
    return f"{names}: each device normalises with the statistics of its own samples, as in data parallelism"
