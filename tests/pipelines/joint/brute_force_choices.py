"""What each layer of a stage may choose, and what its parameters take there, for the brute force of :mod:`.brute_force_stages`.

The strategies are enumerated anew: the splits of each network level, and beside them Summa meshes, divided experts, shared
positions, copied keys, divided parameters (ZeRO), dividing inside nodes only, and gathering inputs again.  In common with the
search is the question whether a layer's shape allows a strategy (``Strategy.divides``).

The steps and bytes of divided parameters are written down anew, too.  Let W, G and O be the bytes of a device's part of weights,
gradients and optimizer states, and let p ranks have the same part, of which r are in a node (``hybrid``) or r = p:

====  ===========================  =====================================  ==============================================
zero  every micro-batch            once per step                          bytes
====  ===========================  =====================================  ==============================================
0     -                            all-reduce G over p                    W + G + O
1     -                            reduce-scatter G, all-gather W over p  W + G + O / p
2     reduce-scatter G over r      reduce-scatter G / r over p / r,       W + G / r + O / p, and G while the layer runs
                                   all-gather W over p
3     all-gather W over r (again   reduce-scatter G / r, all-gather W /   (W + G) / r + O / p, and G + W while the layer
      to go back if that reads     r over p / r                           runs; W of one block while a block is run again
      it), reduce-scatter G
====  ===========================  =====================================  ==============================================

Vectors (biases, weights of norms) are not divided: with zero 3 theirs is the row of 2, in messages of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

__all__ = ["Shares", "divides", "most_divided", "plain", "scattered", "shares_of", "strategies_of", "updated_bytes"]

#: Kinds of layers that are products, and those with weights that ranks can divide.
PRODUCTS, WEIGHTS = ("linear", "embedding"), ("linear", "embedding", "position")
#: Kinds of layers whose samples ranks do not share, but for attention that says how.
UNSHARED = ("conv2d", "opaque", "experts")


# ---- Strategies --------------------------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def plain(strategy: Strategy) -> Strategy:
    """A strategy without divided parameters and regathered inputs."""
    return replace(strategy, zero=0, hybrid=False, regathers=False)


def most_divided(layer: Layer) -> int:
    """The highest stage of ZeRO of a layer that shares no weight; 0 without parameters of its own."""
    if all(parameter.tied_to for parameter in layer.parameters):
        return 0
    return 3 if layer.kind in WEIGHTS else 2


@cache
def strategies_of(
    layer: Layer, sizes: tuple[int, ...], highest_zero: int, regathers: bool, summa: bool
) -> tuple[Strategy, ...]:
    """All strategies of a layer on levels of these sizes, whatever the samples.

    Args:
        highest_zero: the stages of ZeRO that it has are those up to this one.
        regathers: whether products may gather their inputs again.
        summa: whether products may be Summa products.
    """
    triples = [
        [(a, b, size // a // b) for a in divisors(size) for b in divisors(size // a)]  # (p0, p1, p2)
        for size in sizes
    ]
    found = []
    for splits in product(*triples):
        if layer.kind not in PRODUCTS and any(p2 > 1 for _, _, p2 in splits):
            continue
        for strategy in _variants(layer, Strategy(splits)):
            if strategy.divides(layer):
                again = (False, True) if regathers and layer.kind == "linear" and strategy.p1 > 1 else (False,)
                for (zero, hybrid), is_again in product(_shardings(strategy, highest_zero), again):
                    found.append(replace(strategy, zero=zero, hybrid=hybrid, regathers=is_again))
    if summa and layer.kind == "linear" and not any(parameter.tied_to for parameter in layer.parameters):
        for splits in product(*triples):
            mesh = Strategy(splits, summa=True)
            if mesh.p2 == 1 and mesh.p0 > 1 and mesh.p1 > 1 and mesh.divides(layer):
                found.append(mesh)
    return tuple(found)


def _variants(layer: Layer, strategy: Strategy) -> Iterator[Strategy]:
    """A strategy with all choices that only some kinds of layers have, possible or not."""
    parts = list(product(*(divisors(p0) for p0, _, _ in strategy.splits)))
    copies = product(*(divisors(p1) for _, p1, _ in strategy.splits))
    none: list[tuple[int, ...]] = [()]
    if layer.kind == "experts":
        for experts in [*none, *(one for one in parts if math.prod(one) > 1)]:
            yield replace(strategy, experts=experts)
    elif layer.kind == "attention":
        for key_copies in [*none, *(one for one in copies if math.prod(one) > 1)]:
            yield replace(strategy, key_copies=key_copies)
            for positions, way in product(parts, ("gather", "ring")):
                if math.prod(positions) > 1:
                    yield replace(strategy, key_copies=key_copies, positions=positions, sequence=way)
    else:
        yield strategy


def _shardings(strategy: Strategy, highest_zero: int) -> Iterator[tuple[int, bool]]:
    """The stages of ZeRO, and whether gradients and weights are divided inside the nodes only."""
    yield 0, False
    parts = strategy.experts or (1,) * len(strategy.splits)
    copies = [p0 // part for (p0, _, _), part in zip(strategy.splits, parts)]
    if math.prod(copies) > 1:
        for zero in range(1, highest_zero + 1):
            yield zero, False
            if zero > 1 and sum(number > 1 for number in copies) > 1:
                yield zero, True


def divides(layer: Layer, strategy: Strategy, samples: int) -> bool:
    """Whether the ranks of p0 have whole samples, or as many of them share each sample as divide its positions."""
    if samples % strategy.p0 == 0 and not strategy.positions:
        return True
    sharing, rest = divmod(strategy.p0, samples)
    if rest or layer.kind in UNSHARED:
        return False
    if layer.kind == "attention":
        return sharing > 1 and math.prod(strategy.positions) == sharing
    return len(layer.output_shape) == 2 and layer.output_shape[0] % sharing == 0


# ---- Parameters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """What the parameters of a layer take on each device.

    Attributes:
        forward, backward: steps of every micro-batch.
        once: steps after the last micro-batch, but for an all-reduce with zero 0.
        gradient_bytes: of the whole gradient of a device's part.
        state_bytes: of weights, gradients and states between the passes.
        held_bytes: of weights that are together gathered while a block is run again.
        running_bytes: of what exists only while the layer runs.
        updated: number of parameters that a device updates.
        slices: number of ranks that have the same part.
    """

    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    once: tuple[Step, ...] = ()
    gradient_bytes: float = 0.0
    state_bytes: float = 0.0
    held_bytes: float = 0.0
    running_bytes: float = 0.0
    updated: float = 0.0
    slices: int = 1


def scattered(axes: Sequence[Axis], nbytes: float) -> tuple[Step, ...]:
    """A reduce-scatter, the inner ranks first; nothing of no bytes."""
    found = []
    for axis in reversed(axes):
        found.append(Step(Collective.REDUCE_SCATTER, axis, nbytes))
        nbytes /= axis.size
    return tuple(found) if nbytes else ()


def _gathered(axes: Sequence[Axis], nbytes: float) -> tuple[Step, ...]:
    """An all-gather is a reduce-scatter backwards."""
    return tuple(replace(step, collective=Collective.ALL_GATHER) for step in scattered(axes, nbytes)[::-1])


def updated_bytes(workload: Workload) -> int:
    """Bytes per parameter of an optimizer step of Adam: the gradient read, master and two states read and written, and in mixed
    precision the parameter written."""
    return 2 + 3 * 2 * 4 + 2 if workload.precision == "mixed" else 4 + 3 * 2 * 4


def shares_of(
    layer: Layer, strategy: Strategy, workload: Workload, is_gathered_again: bool, is_in_block: bool
) -> Shares:
    """What the parameters of a layer take (table: the module's docstring).

    Args:
        is_gathered_again: whether the backward pass reads the weights.
        is_in_block: whether it runs the layer again as a part of its block.
    """
    own = [parameter for parameter in layer.parameters if parameter.tied_to is None]
    if not own:
        return Shares()
    parts = strategy.num_devices if strategy.summa else strategy.p1 * strategy.p2 * math.prod(strategy.experts)
    numbers = [math.prod(parameter.shape) / parts for parameter in own]
    matrices = sum(number for number, parameter in zip(numbers, own) if len(parameter.shape) > 1)
    number, itemsize = sum(numbers), 2 if workload.precision == "mixed" else 4
    size, states = number * itemsize, number * (12 if workload.precision == "mixed" else 8)
    axes = () if strategy.summa else strategy.copy_axes(layer.kind == "embedding")
    ranks, zero = math.prod(axis.size for axis in axes), strategy.zero
    if not zero:
        return Shares(gradient_bytes=size, state_bytes=2 * size + states, updated=number, slices=ranks)
    if zero == 1:
        return Shares(
            once=(*scattered(axes, size), *_gathered(axes, size)),
            gradient_bytes=size,
            state_bytes=2 * size + states / ranks,
            updated=number / ranks,
            slices=ranks,
        )
    inner = [axis for axis in axes if axis.level == 1] if strategy.hybrid else list(axes)
    outer = [axis for axis in axes if axis not in inner]
    within = math.prod(axis.size for axis in inner)
    divided = matrices * itemsize if zero == 3 else 0.0
    whole = size - divided
    gather = _gathered(inner, divided)
    return Shares(
        forward=gather,
        backward=(*(gather if is_gathered_again else ()), *scattered(inner, divided), *scattered(inner, whole)),
        once=(
            *scattered(outer, divided / within),
            *scattered(outer, whole / within),
            *_gathered(outer, divided / within),
            *_gathered(axes, whole),
        ),
        gradient_bytes=size,
        state_bytes=divided / within + whole + size / within + states / ranks,
        held_bytes=divided if is_in_block else 0.0,
        running_bytes=size + divided,
        updated=number / ranks,
        slices=ranks,
    )
