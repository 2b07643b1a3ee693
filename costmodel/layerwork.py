"""What one layer does at a strategy: its communication steps, its compute time, its memory.

Symbols: T rows of one micro-batch, P0, P1, P2 = products of p0, p1, p2 over the network levels, s = P1 P2, p = P0 s devices,
a = bytes of an activation element.  Sizes n as in :mod:`autoddl.costmodel.collectives`.

**Linear**, d_in -> d_out (AutoDDL, Section 3)

===========  ================================  =============================  ==========================
phase        step                              axis                           n [bytes]
===========  ================================  =============================  ==========================
forward      all-gather the input              p1                             T d_in a / (P0 P2)
forward      reduce-scatter the output         p2                             T d_out a / (P0 P1)
backward     all-gather the output's gradient  p2                             T d_out a / (P0 P1)
backward     reduce-scatter the input's        p1                             T d_in a / (P0 P2)
once         all-reduce the weight's           p0                             d_in d_out a / (P1 P2)
===========  ================================  =============================  ==========================

The first layer of a model reads its data where it needs them: it gathers no input and returns no gradient for it.  The bias is
added to the evenly split output; its gradient travels with the weight's.

**Several network levels.**  A step over (p1, p1') runs along one level after the other: an all-gather the outer level first,
while the tensor is small, a reduce-scatter the inner level first; an all-reduce is a reduce-scatter inside the nodes, an
all-reduce between them, and an all-gather inside.  In all each device sends the bytes of one ring over all p1 p1' devices, but
only 1/p1' of them cross the nodes.

**Others.**  Embedding: the same as a linear layer whose input needs no gather.  Norm on split features: all-reduce of the
statistics of each row (forward) and of as many sums of the gradient (backward), in float32.  Loss on split vocabulary:
all-gather of each row's maxima, all-reduce of its sum of exponentials and its target logit; backward local.  Attention (whole
heads, whole sequences), sums, convolutions (whole images): nothing.  All: all-reduce of the parameters' gradients over p0.

**Summa**, mesh r x c: each of the three products O = I W, dI = dO W', dW = I' dO communicates two operands along rows or
columns, in rank-k steps with the volume of an all-gather or reduce-scatter each; weights travel for every micro-batch.

**Compute.**  Products by ``Cluster.matmul_time``; backward: one product for each of input and weight.  Everything else is bound
by memory: bytes read and written per element, as noted at each kind.

**Memory.**  Kept for the backward pass: the gathered input of a product (so that it is not gathered twice), whatever the layer
keeps besides (``kept_elements``); with recomputation only the evenly split input.  The buffer is what exists while the layer runs:
gathered input and unreduced output, and with recomputation all that it would have kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from .cluster import Cluster
from .collectives import Collective, Step
from .distribution import Axis
from .graph import Layer
from .strategy import Alike, Strategy
from .workload import Workload

__all__ = ["LayerWork", "all_reduce_steps", "gather_steps", "layer_work", "scatter_steps"]

#: A float, or an array of floats: what the formulas of this module hold for.
Number = Any

#: Bytes of a statistic (norms and losses accumulate in float32).
_STATISTIC = 4


@dataclass(frozen=True)
class LayerWork:
    """One layer on one device, for one micro-batch (``gradient``: once per step).

    Attributes:
        forward, backward: communication steps of one micro-batch.
        gradient: communication steps after the last micro-batch.
        forward_s, backward_s: compute time [s] of one micro-batch (recomputation included in the backward pass).
        state_bytes: parameters, gradients and optimizer states.
        kept_bytes: activations kept from the forward to the backward pass.
        buffer_bytes: what exists only while the layer runs.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    gradient: tuple[Step, ...]
    forward_s: Number
    backward_s: Number
    state_bytes: Number
    kept_bytes: Number
    buffer_bytes: Number


def gather_steps(axes: Sequence[Axis], nbytes: Number) -> tuple[Step, ...]:
    """All-gather to ``nbytes`` along one axis per level: the outermost first, while the tensor is small."""
    steps = []
    for position, axis in enumerate(axes):
        inner = prod(other.size for other in axes[position + 1 :])
        steps.append(Step(Collective.ALL_GATHER, axis, nbytes / inner))
    return tuple(steps)


def scatter_steps(axes: Sequence[Axis], nbytes: Number) -> tuple[Step, ...]:
    """Reduce-scatter of ``nbytes`` along one axis per level: the innermost first."""
    return tuple(step.adjoint() for step in reversed(gather_steps(axes, nbytes)))


def all_reduce_steps(axes: Sequence[Axis], nbytes: Number) -> tuple[Step, ...]:
    """All-reduce of ``nbytes``: reduced and gathered inside the inner levels, all-reduced at the outermost."""
    if not axes:
        return ()
    inner = axes[1:]
    middle = Step(Collective.ALL_REDUCE, axes[0], nbytes / prod(axis.size for axis in inner))
    return (*scatter_steps(inner, nbytes), middle, *gather_steps(inner, nbytes))


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
    frame = _Frame(layer, strategy, cluster, workload, samples)
    body = (_summa if strategy.summa else _BODIES[layer.kind])(frame, is_first)
    forward, backward = body.forward, body.backward
    backward_s, kept, buffer = body.backward_s, body.kept_bytes, body.buffer_bytes
    if workload.recompute and layer.kind != "loss":
        # The loss is the last thing that runs forward and the first that runs backward: nothing is gained there.
        forward_again = body.forward_steps_to_repeat if body.forward_steps_to_repeat is not None else forward
        backward = (*forward_again, *backward)
        backward_s += body.forward_s
        evenly_split = frame.input_bytes * (body.kept_bytes > 0)
        buffer = body.buffer_bytes + body.kept_bytes
        kept = evenly_split
    own = layer.num_parameters / frame.parameter_parts
    gradient_axes = () if strategy.summa else strategy.axes(0, layer.kind == "embedding")
    gradient = all_reduce_steps(gradient_axes, own * workload.itemsize) if layer.num_parameters else ()
    return LayerWork(
        forward=forward,
        backward=backward,
        gradient=gradient,
        forward_s=body.forward_s,
        backward_s=backward_s,
        state_bytes=own * workload.bytes_per_parameter,
        kept_bytes=kept,
        buffer_bytes=buffer,
    )


class _Frame:
    """The quantities that every kind of layer starts from (per device)."""

    def __init__(self, layer: Layer, strategy: Strategy | Alike, cluster: Cluster, workload: Workload, samples: Number):
        self.layer = layer
        self.strategy = strategy
        self.cluster = cluster
        self.precision = workload.precision
        self.itemsize = workload.itemsize
        self.samples = samples
        self.p0 = strategy.p0
        self.p1 = strategy.p1
        self.p2 = strategy.p2
        self.devices = self.p0 * self.p1 * self.p2
        #: Rows of this device's samples (all features of them).
        self.rows = samples * layer.rows / self.p0
        self.input_bytes = samples * layer.input_elements * self.itemsize / self.devices
        self.output_bytes = samples * layer.output_elements * self.itemsize / self.devices
        self.kept_bytes = samples * layer.kept_elements * self.itemsize / self.devices
        #: Into how many parts the parameters are cut.
        self.parameter_parts = self.devices if strategy.summa else self.p1 * self.p2

    def elementwise(self, nbytes: Number) -> Number:
        return self.cluster.elementwise_time(nbytes)

    def matmul(self, m: Number, k: Number, n: Number, count: Number = 1) -> Number:
        return self.cluster.matmul_time(m, k, n, self.precision, self.itemsize, count)

    def epilogue(self) -> tuple[Number, Number]:
        """(forward, backward) seconds of the element-wise operations behind the layer: read and write, and read two and write."""
        count = len(self.layer.epilogue)
        return count * self.elementwise(2 * self.output_bytes), count * self.elementwise(3 * self.output_bytes)


@dataclass(frozen=True)
class _Body:
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_s: Number
    backward_s: Number
    kept_bytes: Number
    buffer_bytes: Number = 0.0
    #: What recomputation has to send again, where that is not the whole forward pass.
    forward_steps_to_repeat: tuple[Step, ...] | None = None


def _linear(frame: _Frame, is_first: bool) -> _Body:
    attributes, strategy = frame.layer.attributes, frame.strategy
    d_in, d_out = attributes["in_features"], attributes["out_features"]
    input_bytes = frame.rows * d_in * frame.itemsize / frame.p2
    output_bytes = frame.rows * d_out * frame.itemsize / frame.p1
    p1, p2 = strategy.axes(1), strategy.axes(2)
    gather = () if is_first else gather_steps(p1, input_bytes)
    scatter = scatter_steps(p2, output_bytes)
    gather_gradient = gather_steps(p2, output_bytes)
    scatter_gradient = () if is_first else scatter_steps(p1, input_bytes)
    product = frame.matmul(frame.rows, d_in / frame.p2, d_out / frame.p1)
    after, after_backward = frame.epilogue()
    return _Body(
        forward=(*gather, *scatter),
        backward=(*gather_gradient, *scatter_gradient),
        forward_s=product + after,
        backward_s=(1 if is_first else 2) * product + after_backward,
        kept_bytes=input_bytes + frame.kept_bytes,
        buffer_bytes=(input_bytes if p1 else 0.0) + (output_bytes if p2 else 0.0),
        # The product's own value is needed again only where something behind it keeps it.
        forward_steps_to_repeat=None if frame.layer.kept_elements else gather,
    )


def _summa(frame: _Frame, is_first: bool) -> _Body:
    attributes, strategy = frame.layer.attributes, frame.strategy
    d_in, d_out = attributes["in_features"], attributes["out_features"]
    rows, columns = strategy.axes(0), strategy.axes(1)
    c = frame.p1
    input_bytes = frame.rows * d_in * frame.itemsize
    output_bytes = frame.rows * d_out * frame.itemsize
    weight_bytes = d_in * d_out * frame.itemsize / c
    gather_input, gather_weight = gather_steps(columns, input_bytes), gather_steps(rows, weight_bytes)
    product = frame.matmul(frame.rows, d_in, d_out / c)
    after, after_backward = frame.epilogue()
    for_input = () if is_first else (*gather_weight, *scatter_steps(columns, input_bytes))
    return _Body(
        forward=(*gather_input, *gather_weight),
        backward=(*for_input, *gather_input, *scatter_steps(rows, weight_bytes)),
        forward_s=product + after,
        backward_s=(1 if is_first else 2) * product + after_backward,
        kept_bytes=frame.input_bytes + frame.kept_bytes,
        # Panels of one step, not whole operands: 1/r of the input and 1/c of the weight at a time.
        buffer_bytes=input_bytes / strategy.panels + weight_bytes / strategy.panels + output_bytes / c,
        forward_steps_to_repeat=None if frame.layer.kept_elements else (),
    )


def _embedding(frame: _Frame, is_first: bool) -> _Body:
    output_bytes = frame.rows * frame.layer.attributes["features"] * frame.itemsize / frame.p1
    p2 = frame.strategy.axes(2, embedding=True)
    return _Body(
        forward=scatter_steps(p2, output_bytes),
        backward=gather_steps(p2, output_bytes),
        forward_s=frame.elementwise(2 * output_bytes),
        backward_s=frame.elementwise(3 * output_bytes),
        kept_bytes=0.0,
        buffer_bytes=output_bytes if p2 else 0.0,
    )


def _position(frame: _Frame, is_first: bool) -> _Body:
    return _Body((), (), frame.elementwise(frame.output_bytes), frame.elementwise(frame.output_bytes), kept_bytes=0.0)


def _attention(frame: _Frame, is_first: bool) -> _Body:
    attributes = frame.layer.attributes
    length = frame.layer.rows
    # Two batched products over all (sample, head) pairs of this device: q k' and its softmax times v.
    pairs = frame.samples * attributes["heads"] / frame.devices
    scores = frame.matmul(length, attributes["head_dim"], length, count=pairs)
    softmax = pairs * length * length * frame.itemsize
    return _Body(
        forward=(),
        backward=(),
        forward_s=2 * scores + frame.elementwise(3 * softmax),
        backward_s=4 * scores + frame.elementwise(3 * softmax),
        kept_bytes=frame.input_bytes + frame.kept_bytes,
    )


def _norm(frame: _Frame, is_first: bool) -> _Body:
    statistics = frame.rows * frame.layer.attributes["statistics"] * _STATISTIC
    steps: tuple[Step, ...] = ()
    for axis in reversed(frame.strategy.axes(1)):
        steps += (Step(Collective.ALL_REDUCE, axis, statistics),)
    # Forward: read for the statistics, read and write; backward: two reads for the sums, two reads and a write.
    return _Body(
        forward=steps,
        backward=steps,
        forward_s=frame.elementwise(3 * frame.output_bytes),
        backward_s=frame.elementwise(5 * frame.output_bytes),
        kept_bytes=frame.input_bytes,
    )


def _add(frame: _Frame, is_first: bool) -> _Body:
    after, after_backward = frame.epilogue()
    # The gradients of its inputs' other uses are added up in the backward pass.
    time = frame.elementwise(3 * frame.output_bytes)
    return _Body((), (), time + after, time + after_backward, kept_bytes=frame.kept_bytes)


def _conv2d(frame: _Frame, is_first: bool) -> _Body:
    layer = frame.layer
    # The product that a convolution is: (pixels) x (in * k * k) by (in * k * k) x (out).
    attributes = layer.attributes
    taps = attributes["in_channels"] * attributes["kernel_size"] ** 2
    pixels = frame.samples * layer.output_elements / attributes["out_channels"] / frame.p0
    product = frame.matmul(pixels, taps, attributes["out_channels"])
    after, after_backward = frame.epilogue()
    return _Body(
        forward=(),
        backward=(),
        forward_s=product + after,
        backward_s=(1 if is_first else 2) * product + after_backward,
        kept_bytes=frame.input_bytes + frame.kept_bytes,
    )


def _loss(frame: _Frame, is_first: bool) -> _Body:
    axes = frame.strategy.axes(1)
    s = prod(axis.size for axis in axes)
    maxima = gather_steps(axes, frame.rows * s * _STATISTIC)
    sums: tuple[Step, ...] = ()
    for axis in reversed(axes):
        sums += (Step(Collective.ALL_REDUCE, axis, frame.rows * 2 * _STATISTIC),)
    return _Body(
        forward=(*maxima, *sums),
        backward=(),
        forward_s=frame.elementwise(3 * frame.input_bytes),
        backward_s=frame.elementwise(2 * frame.input_bytes),
        kept_bytes=frame.input_bytes,
    )


def _opaque(frame: _Frame, is_first: bool) -> _Body:
    after, after_backward = frame.epilogue()
    time = frame.elementwise(frame.input_bytes + frame.output_bytes)
    return _Body((), (), time + after, 2 * time + after_backward, kept_bytes=frame.input_bytes + frame.kept_bytes)


_BODIES = {
    "linear": _linear,
    "embedding": _embedding,
    "position": _position,
    "attention": _attention,
    "norm": _norm,
    "add": _add,
    "conv2d": _conv2d,
    "loss": _loss,
    "opaque": _opaque,
}


@lru_cache(maxsize=1)
def kinds_with_work() -> frozenset[str]:
    """The kinds of layers that can be priced (all of them; a test holds the two lists together)."""
    return frozenset(_BODIES)
