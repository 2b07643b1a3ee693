"""Communication steps, compute time and memory of one layer under a strategy.

The modules of :mod:`autoddl.costmodel.kinds` hold what differs between kinds of layers.  This module holds the common part.

**Gradients.**  The gradients of parameters are all-reduced over p0, once per training step.

**Counts.**  All figures are counts: steps with their bytes, kernels, FLOPs and bytes of memory traffic.  They need no cluster.
:class:`autoddl.costmodel.cluster.Cluster` converts them to seconds: ``time`` a step, ``local_time`` local work.

**Memory.**  The kept activations are those of the layer's body; with recomputation only the evenly split input.  The buffer
exists only while the layer runs: gathered input and unreduced output, and with recomputation the recomputed activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import Step, all_reduce_steps
from .kinds.kind import LayerQuantities, Number
from .kinds.registry import kind_of
from .layer import Layer
from .localwork import LocalWork
from .strategy import Strategy, StrategyGroup
from .workload import Workload

__all__ = ["LayerWork", "layer_work"]


@dataclass(frozen=True)
class LayerWork:
    """Work and memory of one layer on one device.

    Attributes:
        forward, backward: communication steps of one micro-batch.
        gradient: communication steps after the last micro-batch, once per training step.
        forward_work, backward_work: computation of one micro-batch (the backward pass includes recomputation).
        state_bytes: bytes of parameters, gradients and optimizer states.
        kept_bytes: bytes of activations kept from the forward to the backward pass of one micro-batch.
        buffer_bytes: bytes that exist only while the layer runs.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    gradient: tuple[Step, ...]
    forward_work: LocalWork
    backward_work: LocalWork
    state_bytes: Number
    kept_bytes: Number
    buffer_bytes: Number


def layer_work(
    layer: Layer,
    strategy: Strategy | StrategyGroup,
    workload: Workload,
    samples: Number,
    is_first: bool,
) -> LayerWork:
    """Work and memory of ``layer`` under ``strategy``.

    Args:
        strategy: one strategy, or a group of strategies that run the same steps.  For a group, the numbers of the result are
            arrays of shape (strategies,).
        samples: samples per micro-batch over all devices, a number >= 0.  All figures are affine in it:
            :data:`autoddl.costmodel.affine.VARIABLE` gives each figure that depends on it as an
            :class:`autoddl.costmodel.affine.Affine`.
        is_first: whether the layer reads the data itself; then it gathers no input and computes no gradient for it.
    """
    kind, quantities = kind_of(layer.kind), LayerQuantities(layer, strategy, workload, samples)
    body = kind.work(quantities, is_first)
    forward, backward = body.forward, body.backward
    backward_work, kept, buffer = body.backward_work, body.kept_bytes, body.buffer_bytes
    if workload.recompute and kind.is_recomputed:
        forward_again = body.forward_steps_to_repeat if body.forward_steps_to_repeat is not None else forward
        backward = (*forward_again, *backward)
        backward_work = backward_work + body.forward_work
        evenly_split = quantities.input_bytes * (body.kept_bytes > 0)
        buffer = body.buffer_bytes + body.kept_bytes
        kept = evenly_split
    own = layer.num_parameters / quantities.parameter_parts
    gradient_axes = () if strategy.summa else strategy.axes(0, kind.is_lookup)
    gradient = (
        all_reduce_steps(gradient_axes, own * workload.types.communication_itemsize) if layer.num_parameters else ()
    )
    return LayerWork(
        forward=forward,
        backward=backward,
        gradient=gradient,
        forward_work=body.forward_work,
        backward_work=backward_work,
        state_bytes=own * workload.bytes_per_parameter,
        kept_bytes=kept,
        buffer_bytes=buffer,
    )
