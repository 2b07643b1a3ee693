"""Communication steps, compute time and memory of one layer under a strategy.

The modules of :mod:`autoddl.costmodel.kinds` hold what differs between kinds of layers.  This module holds the common part.

**Gradients.**  The gradients of parameters are all-reduced over p0, once per training step.  If optimizer states are divided
over p0 (ZeRO, stage 1), the gradients are reduce-scattered, every device updates its part, and the parameters are all-gathered.

**Optimizer step.**  Once per training step: bytes per parameter (:attr:`.workload.Workload.update_bytes_per_parameter`) over the
memory bandwidth.

**Counts.**  All figures are counts: steps with their bytes, kernels, FLOPs and bytes of memory traffic.  They need no cluster.
:class:`autoddl.costmodel.cluster.Cluster` converts them to seconds: ``time`` a step, ``local_time`` local work.

**Memory.**  Per micro-batch in flight, a layer keeps the activations of its body.  With recomputation it keeps less, and the
backward pass begins with the forward pass of the layer (:mod:`.recomputation`):

=============  ==================================  ==========================  ==================================================
recompute      layers that are recomputed          kept per micro-batch        once, while a layer or block is recomputed
=============  ==================================  ==========================  ==================================================
none           none                                activations of the body     -
selective      cores of attention                  evenly split input          activations of the body, as a part of the buffer
layers         all (:class:`.layer.Place`)         evenly split input          activations of the body, as a part of the buffer
blocks         all in repeated blocks              the input of each block     the activations of all layers of one block
blocks:K       all in the first K blocks           the input of each of them   the activations of all layers of one block
=============  ==================================  ==========================  ==================================================

The buffer exists only while the layer runs: gathered input and unreduced output, and with recomputation of the layer the recomputed
activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .collectives import Step, all_reduce_steps, gather_steps, scatter_steps
from .kinds.kind import Body, LayerKind, LayerQuantities, Number
from .kinds.registry import kind_of
from .layer import Layer, Place
from .localwork import LocalWork, elementwise
from .recomputation import word_of
from .strategy import Strategy, StrategyGroup
from .workload import Workload

__all__ = ["LayerWork", "is_in_recomputed_block", "is_recomputed_alone", "layer_work", "repeats_redistributions"]


@dataclass(frozen=True)
class LayerWork:
    """Work and memory of one layer on one device.

    Attributes:
        forward, backward: communication steps of one micro-batch.
        gradient: communication steps after the last micro-batch, once per training step.
        forward_work, backward_work: computation of one micro-batch (the backward pass includes recomputation).
        update_work: computation of the optimizer step, once per training step.
        parameter_bytes: bytes of parameters alone.
        state_bytes: bytes of parameters, gradients and optimizer states.
        kept_bytes: bytes of activations kept from the forward to the backward pass of one micro-batch.
        recomputed_bytes: bytes of activations that exist while one block is recomputed, divided by the number of blocks: so the
            sum over all layers is that of one block.
        buffer_bytes: bytes that exist only while the layer runs.
        overlaps: whether the communication of the passes runs under the products of the layer.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    gradient: tuple[Step, ...]
    forward_work: LocalWork
    backward_work: LocalWork
    update_work: LocalWork
    parameter_bytes: Number
    state_bytes: Number
    kept_bytes: Number
    recomputed_bytes: Number
    buffer_bytes: Number
    overlaps: bool = False


def layer_work(
    layer: Layer,
    strategy: Strategy | StrategyGroup,
    workload: Workload,
    samples: Number,
    place: Place,
) -> LayerWork:
    """Work and memory of ``layer`` under ``strategy``.

    Args:
        strategy: one strategy, or a group of strategies that run the same steps.  For a group, the numbers of the result are
            arrays of shape (strategies,).
        samples: samples per micro-batch over all devices, a number >= 0.  All figures are affine in it:
            :data:`autoddl.costmodel.affine.VARIABLE` gives each figure that depends on it as an
            :class:`autoddl.costmodel.affine.Affine`.
        place: the place of the layer in its graph, for the workload's way of recomputation.
    """
    kind, quantities = kind_of(layer.kind), LayerQuantities(layer, strategy, workload, samples)
    body = kind.work(quantities, place.is_first)
    own = layer.num_parameters / quantities.parameter_parts
    gradient: tuple[Step, ...] = ()
    replicas: Number = 1
    if layer.num_parameters:
        axes = () if strategy.summa else strategy.axes(0, kind.is_lookup)
        nbytes = own * workload.gradient_itemsize
        if workload.zero and not strategy.summa:
            gradient = (*scatter_steps(axes, nbytes), *gather_steps(axes, own * workload.itemsize))
            replicas = quantities.p0
        else:
            gradient = all_reduce_steps(axes, nbytes)
    passes = _passes(kind, quantities, body, place)
    return LayerWork(
        **passes,
        overlaps=workload.overlap == "all" and kind.is_matmul,
        gradient=gradient,
        forward=body.forward,
        forward_work=body.forward_work,
        update_work=elementwise(own * workload.update_bytes_per_parameter / replicas)
        if layer.num_parameters
        else LocalWork(),
        parameter_bytes=own * workload.itemsize,
        state_bytes=own * (workload.itemsize + workload.gradient_itemsize)
        + own * workload.optimizer_bytes_per_parameter / replicas,
    )


def repeats_redistributions(workload: Workload, place: Place) -> bool:
    """Return whether the backward pass of a layer repeats the redistributions of its inputs: its whole block is recomputed."""
    return is_in_recomputed_block(place, workload.recompute)


def is_in_recomputed_block(place: Place, recompute: str) -> bool:
    """Return whether the backward pass runs the block of a layer again as a whole.

    Args:
        place: The place of the layer in its graph, for this way of recomputation.
        recompute: A way of recomputation.
    """
    return word_of(recompute) == "blocks" and place.is_recomputed and place.repetitions > 0


def is_recomputed_alone(kind: LayerKind, place: Place, recompute: str) -> bool:
    """Return whether the backward pass of a layer repeats its forward pass, from its own evenly split input.

    Args:
        kind: The kind of the layer.
        place: The place of the layer in its graph.
        recompute: A way of recomputation.
    """
    return place.is_recomputed and (recompute == "layers" or (recompute == "selective" and kind.is_selected))


def _passes(kind: LayerKind, quantities: LayerQuantities, body: Body, place: Place) -> dict[str, Any]:
    """The members of :class:`LayerWork` that depend on recomputation."""
    is_in_block = repeats_redistributions(quantities.workload, place)
    if not is_in_block and not is_recomputed_alone(kind, place, quantities.workload.recompute):
        return {
            "backward": body.backward,
            "backward_work": body.backward_work,
            "kept_bytes": body.kept_bytes,
            "recomputed_bytes": 0.0,
            "buffer_bytes": body.buffer_bytes,
        }
    backward_work = body.backward_work + body.forward_work
    if is_in_block:
        return {
            "backward": (*body.forward, *body.backward),
            "backward_work": backward_work,
            "kept_bytes": quantities.block_input_bytes if place.begins_block else 0.0,
            "recomputed_bytes": body.kept_bytes / place.repetitions,
            "buffer_bytes": body.buffer_bytes,
        }
    steps = body.forward if body.forward_steps_to_repeat is None else body.forward_steps_to_repeat
    return {
        "backward": (*steps, *body.backward),
        "backward_work": backward_work,
        "kept_bytes": quantities.input_bytes * (body.kept_bytes > 0),
        "recomputed_bytes": 0.0,
        "buffer_bytes": body.buffer_bytes + body.kept_bytes,
    }
