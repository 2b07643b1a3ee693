"""What one layer does at a strategy: its communication steps, its compute time, its memory.

What is special to a kind of layer is in its module of :mod:`autoddl.costmodel.kinds`; here is what all have in common.

**Gradients.**  Those of a layer's parameters are all-reduced over p0, once per step.

**Compute.**  Each kind counts its kernels, FLOPs and bytes of memory traffic; ``Cluster.local_time`` makes seconds of them.

**Memory.**  Kept for the backward pass: what the body of the layer keeps; with recomputation only the evenly split input.  The
buffer is what exists while the layer runs: gathered input and unreduced output, and with recomputation all that it would have kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cluster import Cluster
from .collectives import Step, all_reduce_steps
from .kinds.kind import Frame, Number
from .kinds.registry import kind_of
from .layer import Layer
from .localwork import LocalWork
from .strategy import Alike, Strategy
from .workload import Workload

__all__ = ["LayerWork", "layer_work"]


@dataclass(frozen=True)
class LayerWork:
    """One layer on one device, for one micro-batch (``gradient``: once per step).

    Attributes:
        forward, backward: communication steps of one micro-batch.
        gradient: communication steps after the last micro-batch.
        forward_work, backward_work: computation of one micro-batch (recomputation included in the backward pass).
        forward_s, backward_s: the seconds that it takes.
        state_bytes: parameters, gradients and optimizer states.
        kept_bytes: activations kept from the forward to the backward pass.
        buffer_bytes: what exists only while the layer runs.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    gradient: tuple[Step, ...]
    forward_work: LocalWork
    backward_work: LocalWork
    forward_s: Number
    backward_s: Number
    state_bytes: Number
    kept_bytes: Number
    buffer_bytes: Number


def layer_work(
    layer: Layer, strategy: Strategy | Alike, cluster: Cluster, workload: Workload, samples: Number, is_first: bool
) -> LayerWork:
    """What ``layer`` does at ``strategy`` with ``samples`` samples per micro-batch over all devices.

    Args:
        strategy: one, or many that run the same steps: then the numbers of the answer are arrays, as they are where ``samples``
            is one.  (They are broadcast: samples of shape (2, 1) give numbers of shape (2, strategies) or less.)
        samples: any number from 0 on: all costs are affine in it, and the tables make use of that.
        is_first: whether the layer reads the data itself (no gathered input, no gradient for it).
    """
    kind, frame = kind_of(layer.kind), Frame(layer, strategy, workload, samples)
    body = kind.work(frame, is_first)
    forward, backward = body.forward, body.backward
    backward_work, kept, buffer = body.backward_work, body.kept_bytes, body.buffer_bytes
    if workload.recompute and kind.is_recomputed:
        forward_again = body.forward_steps_to_repeat if body.forward_steps_to_repeat is not None else forward
        backward = (*forward_again, *backward)
        backward_work = backward_work + body.forward_work
        evenly_split = frame.input_bytes * (body.kept_bytes > 0)
        buffer = body.buffer_bytes + body.kept_bytes
        kept = evenly_split
    own = layer.num_parameters / frame.parameter_parts
    gradient_axes = () if strategy.summa else strategy.axes(0, kind.is_lookup)
    gradient = all_reduce_steps(gradient_axes, own * workload.itemsize) if layer.num_parameters else ()
    return LayerWork(
        forward=forward,
        backward=backward,
        gradient=gradient,
        forward_work=body.forward_work,
        backward_work=backward_work,
        forward_s=cluster.local_time(body.forward_work, workload.precision),
        backward_s=cluster.local_time(backward_work, workload.precision),
        state_bytes=own * workload.bytes_per_parameter,
        kept_bytes=kept,
        buffer_bytes=buffer,
    )
