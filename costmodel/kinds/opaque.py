"""Opaque layers: everything that is no layer of another kind.

They are split along the samples only.  The forward pass reads the input and writes the output once, and its products take
``flops / p0`` FLOPs per sample of the micro-batch; the backward pass takes twice as long, as that of a linear layer: one product
each for the gradients of input and weight.

The FLOPs are those of several kernels if the layer is a loop: an LSTM of S time steps, i input features and h hidden ones computes
two products per time step, (1 x i)(i x 4h) and (1 x h)(h x 4h) for one sample.  So it has 2 S products of 2 S 4h (i + h) FLOPs in
total.  Small products reach a smaller part of the peak FLOP/s than large ones (:mod:`autoddl.costmodel.cluster`), which is why
their number counts.

The operators of a traced model are known: such a layer has a :class:`autoddl.costmodel.program.Program`. Its attribute ``traffic``
is the number of elements per sample that the operators read and write, ``launches`` the number of their kernels. Where samples
meet, ranks communicate (:func:`crossing_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..collectives import Collective, Step, gather_steps
from ..layer import Layer, Parameter
from ..localwork import LocalWork
from ..program import Program, at
from .kind import Body, LayerKind, LayerQuantities, Number, Splitting

if TYPE_CHECKING:
    from ..distribution import Axis

__all__ = ["Opaque", "crossing_steps", "opaque"]


class Opaque(LayerKind):
    """A layer that is split along the samples only."""

    name = "opaque"
    optional_attributes = frozenset({"products", "traffic", "launches"})
    splitting = Splitting.SAMPLES
    is_opaque = True
    colour = "#ead1dc"

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        layer = quantities.layer
        after, after_backward = quantities.epilogue()
        products = layer.attributes.get("products", 1) if layer.flops else 0
        traffic = layer.attributes.get("traffic", layer.input_elements + layer.output_elements)
        program = layer.program
        work = LocalWork(
            launches=max(products, layer.attributes.get("launches", 1)),
            flops=quantities.samples * layer.flops / quantities.p0,
            nbytes=quantities.samples * traffic * quantities.itemsize / quantities.p0,
            products=products,
        )
        kept = quantities.input_bytes + quantities.kept_bytes
        forward, backward = (
            ((), ())
            if program is None
            else crossing_steps(
                program,
                quantities.strategy.axes(0),
                quantities.samples,
                quantities.itemsize,
                quantities.statistic_bytes,
            )
        )
        return Body(forward, backward, work + after, 2 * work + after_backward, kept_bytes=kept)


def crossing_steps(
    program: Program, axes: Sequence[Axis], samples: Number, itemsize: Number, statistic_bytes: Number
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the communication steps of a program's crossings and synchronised norms, of the forward and of the backward pass.

    Args:
        program: the program.
        axes: the mesh axes that split the samples.
        samples: number of samples per micro-batch over all devices.
        itemsize: bytes of an element.
        statistic_bytes: bytes of a statistic of a norm.
    """
    forward: list[Step] = []
    backward: list[Step] = []
    for call in program.crossings:
        if call.is_synchronised:
            nbytes = 2 * call.attributes["channels"] * statistic_bytes
            sums = [Step(Collective.ALL_REDUCE, axis, nbytes) for axis in reversed(axes)]
            forward += sums
            backward[:0] = sums
            continue
        nbytes = at(call.attributes["elements"], samples) * itemsize
        sums = [Step(Collective.ALL_REDUCE, axis, nbytes) for axis in reversed(axes)]
        if call.kind == "gather_samples":
            forward += gather_steps(axes, nbytes)
        elif call.kind == "sum_samples":
            forward += sums
        elif call.attributes["is_trained"]:
            backward[:0] = sums if call.kind == "share_whole" else gather_steps(axes, nbytes)
    return tuple(forward), tuple(backward)


def opaque(
    name: str,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    *,
    parameters: Sequence[Parameter] = (),
    flops: float = 0.0,
    products: int = 0,
    kept_elements: int = 0,
    modules: Sequence[str] | None = None,
    traffic: int = 0,
    launches: int = 0,
    program: Program | None = None,
) -> Layer:
    """Make an opaque layer.

    Args:
        name: of the layer.
        input_shape, output_shape: per sample.
        parameters: trained tensors.
        flops: forward FLOPs per sample, of matrix products.
        products: number of kernels in the forward pass that compute them; 0: one, or none if there are no FLOPs.
        kept_elements: elements per sample that are kept for the backward pass besides the input.
        modules: the module paths that it stands for; by default its name.
        traffic: elements per sample that the operators of a program read and write.
        launches: number of kernels of a program in the forward pass.
        program: its operators, if they are known.
    """
    counts = {"products": products, "traffic": traffic, "launches": launches}
    return Layer(
        name=name,
        kind="opaque",
        input_shape=input_shape,
        output_shape=output_shape,
        attributes={attribute: count for attribute, count in counts.items() if count},
        parameters=tuple(parameters),
        flops=flops,
        kept_elements=kept_elements,
        modules=(name,) if modules is None else tuple(modules),
        program=program,
    )
