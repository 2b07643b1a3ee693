"""Gradient all-reduces of a replicated stage under its last backward.

The gradients of a stage's layers [first, stop) are summed over its replicas once per iteration. They are complete layer by
layer during the backward of the *last* micro-batch, which goes from the last layer to the first. Layers are gathered into
*buckets* in that order: a bucket is closed by the layer with which it has at least 25 MiB, the default of PyTorch's
DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020). Bucket k = 1..K holds n_k bytes, and its lowest layer
with parameters is l_k. Its all-reduce begins when that layer's backward has ended and the network is free (one all-reduce at a
time). With g the backward without repeated forwards, on one device, and a + b n the all-reduce of n bytes, the k-th all-reduce
ends at

    e_k = max(e_{k-1}, -r_k) + a + b n_k,          r_k = sum of g over the layers first .. l_k - 1,          e_0 = -infinity

seconds after the end of the last backward. So the all-reduce lengthens the iteration of its stage by the *exposed* time

    max(0, e_K) = max(0, max over k of ( sum over j >= k of (a + b n_j)  -  r_k ))

instead of a + b n. A data-parallel plan is the case of one stage. Not modelled: that the all-reduce shares the network with the
activations and gradients sent between stages, and that it may slow down the computing.

The second form, with G and P the running sums of g and of the parameter bytes and u_k the layer above bucket k (u_1 = stop,
u_{k+1} = the lowest layer of bucket k), is

    e_K = G[first] - b P[first] + (K + 1) a + max over k of ( b P[u_k] - G[l_k] - k a )

Of the buckets of [first, stop) all but the last one are the same for every ``first``. The search evaluates it for all of them
at once (:func:`exposed_for_all`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .network import AlphaBeta
from .workload import ProfiledWorkload

__all__ = ["BUCKET_BYTES", "exposed_for_all", "exposed_s"]

#: Gradients that a bucket holds at least, except the last one of a stage.
BUCKET_BYTES = 25 * 2**20


def exposed_s(workload: ProfiledWorkload, first: int, stop: int, slice_size: float, all_reduce: AlphaBeta) -> float:
    """Seconds by which the all-reduces of layers [first, stop) last longer than their backward (module's docstring).

    Args:
        workload: parameters and times of the layers.
        first: first layer of the stage.
        stop: one past its last layer.
        slice_size: samples of a micro-batch on one device.
        all_reduce: cost over the replicas of the stage.
    """
    gradients = workload.times(slice_size).gradients
    end, pending, lowest = -np.inf, 0.0, stop
    for layer in range(stop - 1, first - 1, -1):
        nbytes = workload.parameter_bytes(layer, layer + 1)
        if nbytes:
            pending, lowest = pending + nbytes, layer
        if pending >= BUCKET_BYTES or (layer == first and pending):
            end = max(end, float(gradients[first] - gradients[lowest])) + all_reduce.time(pending)
            pending = 0.0
    return max(0.0, end)


def exposed_for_all(
    workload: ProfiledWorkload, stop: int, slices: Sequence[int], all_reduces: Sequence[AlphaBeta]
) -> np.ndarray:
    """:func:`exposed_s` of the stages that end before layer ``stop``, for several groups of replicas.

    Args:
        workload: parameters and times of the layers.
        stop: one past the last layer of the stages.
        slices: per group, samples of a micro-batch on one of its devices.
        all_reduces: per group, cost over its devices.

    Returns:
        Seconds, of shape (groups, stop); column ``first`` is of the stage [first, stop).
    """
    parameters = workload.parameters
    gradients = np.array([workload.times(size).gradients for size in slices])
    alpha, beta = (np.array(column)[:, None] for column in zip(*all_reduces))
    lowest, above = _closed_buckets(workload, stop)
    # closed[:, k]: the largest term of the first k closed buckets.
    numbers = np.arange(1, len(lowest) + 1)
    terms = beta * parameters[above] - gradients[:, lowest] - numbers * alpha
    closed = np.concatenate([np.full((len(slices), 1), -np.inf), np.maximum.accumulate(terms, axis=1)], axis=1)
    first = np.arange(stop)
    count = np.searchsorted(-lowest, -first, side="right")  # closed buckets in [first, stop)
    rest_above = np.concatenate([[stop], lowest])[count]
    has_rest = parameters[rest_above] > parameters[first]
    # The lowest layer with parameters from each first layer on: the first position at which the running sum grows.
    grows = np.searchsorted(parameters, parameters[first], side="right") - 1
    rest_lowest = np.minimum(grows, stop)
    rest = beta * parameters[rest_above] - gradients[:, rest_lowest] - (count + 1) * alpha
    largest = np.maximum(closed[:, count], np.where(has_rest, rest, -np.inf))
    ends = gradients[:, first] - beta * parameters[first] + (count + has_rest + 1) * alpha + largest
    return np.maximum(ends, 0.0)


def _closed_buckets(workload: ProfiledWorkload, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """The lowest layer of every bucket that is closed by its size, and the layer above it, from ``stop`` downwards."""
    lowest: list[int] = []
    above = [stop]
    for layer in range(stop - 1, -1, -1):
        if workload.parameter_bytes(layer, above[-1]) >= BUCKET_BYTES:
            lowest.append(layer)
            above.append(layer)
    return np.array(lowest, dtype=np.int64), np.array(above[:-1], dtype=np.int64)
