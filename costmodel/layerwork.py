"""Communication steps, compute time and memory of one layer under a strategy.

The modules of :mod:`autoddl.costmodel.kinds` hold what differs between kinds of layers.  This module holds the common part.

**Gradients.**  The gradients of parameters are all-reduced over p0, once per training step.  If a layer's states are divided
(ZeRO, :mod:`.strategy`), every device updates its part.  Let W, G and O be the bytes of a device's part (1 / (p1 p2)) of the
parameters, the gradients and the optimizer, r the ranks that divide weights and gradients (p0, or its part inside a node):

====  ======================  ================================  ============================================  =================
zero  forward, each           backward, each                    once per step                                 state [bytes]
====  ======================  ================================  ============================================  =================
0     -                       -                                 all-reduce G over p0                          W + G + O
1     -                       -                                 reduce-scatter G, all-gather W over p0        W + G + O/p0
2     -                       reduce-scatter G over r           reduce-scatter G/r over p0/r, all-gather W    W + G/r + O/p0
3     all-gather W over r     all-gather W, reduce-scatter G    reduce-scatter G/r, all-gather W/r over p0/r  (W + G)/r + O/p0
====  ======================  ================================  ============================================  =================

The whole gradient exists while a layer's backward pass runs, and with ``zero`` = 3 its weights do: a part of
the buffer.  Weights that the backward pass does not read (tables) are not gathered for it.  Vectors (biases, the weights of
norms) are never divided: with 3 they are treated as with 2.  The backward pass of a recomputed layer gathers the weights once, and
a recomputed block holds the gathered weights of all of its layers.  A weight that several layers share has at most 1.

**Buckets.**  With :attr:`.workload.Workload.bucket_bytes` of B > 0, the gradients of layers with n < B bytes, in graph order, are
concatenated to buckets, one kind for each p0, each of which is summed when it holds B bytes or more.  The price of a layer then has
min(1, n / B) of the messages of its sum.  So prices stay sums over layers.  The layers of a bucket of c bytes are charged c / B of
its messages, where c < B + n of its last layer.  So the price of a plan is, counted in sums, less than one for each kind of bucket
too low (the last bucket is not full), and less than n / B for each bucket too high; it is exact for larger layers.  Divided
gradients (ZeRO), and those that several workers of a pipeline sum, are priced layer by layer.

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
from .layer import Layer, Place, zero_of
from .localwork import LocalWork, elementwise
from .recomputation import word_of
from .strategy import Strategy
from .strategygroup import StrategyGroup
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
        held_bytes: the part of ``state_bytes`` that is gathered weights, which exist while one block is recomputed, divided by the
            number of blocks.
        gradient_bytes: bytes of the gradients of a device's part of the parameters, before they are divided.
        shared_gradient_bytes: bytes of the gradients that a device exchanges if another stage has the parameters, too: of its part,
            or of its shard of the part (:attr:`.Workload.exchanges_shards`).
        zero: what the devices with the same parameters divide, 0 to 3.
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
    held_bytes: Number = 0.0
    gradient_bytes: Number = 0.0
    shared_gradient_bytes: Number = 0.0
    zero: int = 0


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
    kind = kind_of(layer.kind)
    is_in_block = repeats_redistributions(workload, place)
    is_recomputed = is_in_block or is_recomputed_alone(kind, place, workload.recompute)
    quantities = LayerQuantities(layer, strategy, workload, samples, is_recomputed)
    body = kind.work(quantities, place.is_first)
    passes = _passes(kind, quantities, body, place)
    frozen = layer.num_frozen / quantities.parameter_parts * workload.itemsize
    if not layer.num_parameters:
        return LayerWork(
            **passes,
            overlaps=workload.overlap == "all" and kind.is_matmul,
            gradient=(),
            forward=body.forward,
            forward_work=body.forward_work,
            update_work=LocalWork(),
            parameter_bytes=frozen,
            state_bytes=frozen,
        )
    shares = _shares(layer, quantities, place, is_recomputed, is_in_block)
    passes["backward"] = (*shares.backward, *passes["backward"])
    passes["buffer_bytes"] = passes["buffer_bytes"] + shares.buffer_bytes
    own = layer.num_parameters / quantities.parameter_parts
    gradient_bytes = own * workload.gradient_itemsize
    return LayerWork(
        **passes,
        overlaps=workload.overlap == "all" and kind.is_matmul,
        gradient=shares.gradient,
        forward=(*shares.forward, *body.forward),
        forward_work=body.forward_work,
        update_work=elementwise(own * workload.update_bytes_per_parameter / shares.num_updating),
        parameter_bytes=shares.parameter_bytes + frozen,
        state_bytes=shares.state_bytes + frozen,
        held_bytes=shares.held_bytes,
        gradient_bytes=gradient_bytes,
        shared_gradient_bytes=gradient_bytes / (shares.num_updating if workload.exchanges_shards else 1),
        zero=shares.zero,
    )


@dataclass(frozen=True)
class _Shares:
    """What the parameters of a layer take on one device, and what communicates them; the table of the module's docstring.

    Attributes:
        forward, backward: steps per micro-batch.
        gradient: steps per training step.
        parameter_bytes: bytes of the parameters between the passes.
        state_bytes: bytes of parameters, gradients and optimizer states.
        held_bytes: as in :class:`LayerWork`.
        buffer_bytes: bytes that exist only while the layer runs.
        num_updating: number of devices that divide the update.
        zero: what they divide, 0 to 3.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    gradient: tuple[Step, ...]
    parameter_bytes: Number
    state_bytes: Number
    buffer_bytes: Number
    num_updating: Number
    zero: int = 0
    held_bytes: Number = 0.0


def _shares(layer: Layer, quantities: LayerQuantities, place: Place, is_recomputed: bool, is_in_block: bool) -> _Shares:
    """The shares of a layer with parameters."""
    workload, strategy, kind = quantities.workload, quantities.strategy, kind_of(layer.kind)
    own = layer.num_parameters / quantities.parameter_parts
    weights, gradients = own * workload.itemsize, own * workload.gradient_itemsize
    states = own * workload.optimizer_bytes_per_parameter
    if strategy.summa:
        return _Shares((), (), (), weights, weights + gradients + states, 0.0, 1)
    axes = strategy.copy_axes(kind.is_lookup)
    zero = zero_of(layer, strategy.zero, place, workload.zero)
    if not zero:
        gradient = all_reduce_steps(axes, gradients, workload.share_of_sum(gradients))
        return _Shares((), (), gradient, weights, weights + gradients + states, 0.0, 1)
    p0 = strategy.copies
    if zero == 1:
        gradient = (*scatter_steps(axes, gradients), *gather_steps(axes, weights))
        return _Shares((), (), gradient, weights, weights + gradients + states / p0, 0.0, p0, zero)
    inner, outer = strategy.shard_axes(kind.is_lookup)
    ranks: Number = 1
    for axis in inner:
        ranks = ranks * axis.size
    # The weights of products and tables can be divided, vectors cannot.
    matrices = sum(p.num_elements for p in layer.parameters if len(p.shape) > 1 and p.tied_to is None and not p.frozen)
    divided = weights * (matrices / layer.num_parameters) if zero == 3 else 0.0 * weights
    whole = weights - divided
    gather = gather_steps(inner, divided)
    is_gathered_again = kind.reads_weights_again or is_recomputed
    # Matrices and vectors are not moved together.
    parts = [part * (workload.gradient_itemsize / workload.itemsize) for part in (divided, whole)]
    scatter = tuple(step for part in parts for step in scatter_steps(inner, part))
    once = (
        *(step for part in parts for step in scatter_steps(outer, part / ranks)),
        *gather_steps(outer, divided / ranks),
        *gather_steps(axes, whole),
    )
    resident = divided / ranks + whole
    # The gathered weights of all layers of one block, divided by the number of blocks.
    held = divided / place.repetitions if is_in_block else 0.0 * divided
    return _Shares(
        forward=_moving(gather),
        backward=(*_moving(gather if is_gathered_again else ()), *_moving(scatter)),
        gradient=_moving(once),
        parameter_bytes=resident,
        state_bytes=resident + gradients / ranks + states / p0 + held,
        held_bytes=held,
        buffer_bytes=gradients + divided,
        num_updating=p0,
        zero=zero,
    )


def _moving(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps that send anything, of steps of one group of strategies: all of them have the same ones."""
    return tuple(step for step in steps if _is_positive(step.nbytes))


def _is_positive(nbytes: Number) -> bool:
    return bool(nbytes.max() > 0) if hasattr(nbytes, "max") else nbytes > 0


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
