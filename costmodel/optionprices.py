"""Affine prices of the options of a variable: see :mod:`.pricing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from .affine import VARIABLE, parts_of
from .cluster import Cluster
from .graph import Layer, Place
from .layerwork import layer_work
from .layoutprices import communication_time
from .overlap import Exposure
from .problem import Coefficients, Objective, OptionSet
from .strategy import Strategy
from .strategygroup import group_strategies
from .workload import Workload

__all__ = ["OptionPrices", "price_layer"]


@dataclass(frozen=True, eq=False)
class OptionPrices:
    """Affine prices of a variable's options.

    Attributes:
        times: (fixed, slope) in seconds per micro-batch of forward communication, backward communication, forward compute and
            backward compute; shape (8, options).
        gradient: seconds per training step of the gradients' all-reduce, shape (options,).
        update: seconds per training step of the optimizer step, shape (options,).
        state_bytes: bytes of parameters, gradients and optimizer states, shape (options,).
        held_bytes: the part of ``state_bytes`` that is gathered weights of one recomputed block, shape (options,).
        kept_bytes: kept bytes per sample, shape (options,).
        recomputed_bytes: bytes per sample that exist while a block is recomputed, shape (options,).
        buffer_fixed, buffer_slope: buffer bytes, shape (different layers, options).  Each layer has a row, since the maximum of
            affine functions is not affine.
    """

    times: np.ndarray
    gradient: np.ndarray
    update: np.ndarray
    state_bytes: np.ndarray
    held_bytes: np.ndarray
    kept_bytes: np.ndarray
    recomputed_bytes: np.ndarray
    buffer_fixed: np.ndarray
    buffer_slope: np.ndarray

    def scaled(self, count: int) -> OptionPrices:
        """The prices of ``count`` equal layers.  Buffers are transient and not added up."""
        return OptionPrices(
            self.times * count,
            self.gradient * count,
            self.update * count,
            self.state_bytes * count,
            self.held_bytes * count,
            self.kept_bytes * count,
            self.recomputed_bytes * count,
            self.buffer_fixed,
            self.buffer_slope,
        )

    def plus(self, other: OptionPrices) -> OptionPrices:
        """The prices of two groups of layers that share one choice."""
        return OptionPrices(
            self.times + other.times,
            self.gradient + other.gradient,
            self.update + other.update,
            self.state_bytes + other.state_bytes,
            self.held_bytes + other.held_bytes,
            self.kept_bytes + other.kept_bytes,
            self.recomputed_bytes + other.recomputed_bytes,
            np.concatenate((self.buffer_fixed, other.buffer_fixed)),
            np.concatenate((self.buffer_slope, other.buffer_slope)),
        )

    def of_options(self, selected: slice) -> OptionPrices:
        """The prices of some of the options."""
        return OptionPrices(**{field.name: getattr(self, field.name)[..., selected] for field in fields(self)})

    def of_one_block(self, num_blocks: int) -> OptionPrices:
        """The prices of a layer whose activations and gathered weights exist for one of ``num_blocks`` blocks at a time."""
        held_bytes = self.held_bytes / num_blocks
        return replace(
            self,
            state_bytes=self.state_bytes - self.held_bytes + held_bytes,
            held_bytes=held_bytes,
            recomputed_bytes=self.recomputed_bytes / num_blocks,
        )

    def cost(self, num_micro_batches: int, batch: int, objective: Objective, exposure: Exposure) -> np.ndarray:
        """Seconds per training step, shape (options,)."""
        rows = np.split(self.times, 2)[: 1 if objective == "communication" else 2]
        each = sum(num_micro_batches * (fixed + more) + batch * (slope + steep) for fixed, slope, more, steep in rows)
        if exposure.backward:
            each -= exposure.backward * sum(more + batch / num_micro_batches * steep for _, _, more, steep in rows)
        gradient = exposure.gradient * self.gradient
        return np.asarray(each + (gradient if objective == "communication" else gradient + self.update))

    def coefficients(self, option_set: OptionSet, objective: Objective) -> Coefficients:
        """The costs as functions of the samples of a micro-batch."""
        forward, backward = self.times[0:2], self.times[2:4]
        update = self.update
        if objective == "communication":
            update = np.zeros_like(update)
        else:
            forward, backward = forward + self.times[4:6], backward + self.times[6:8]
        memory = self.state_bytes, self.kept_bytes, self.recomputed_bytes
        return Coefficients(option_set, forward, backward, self.gradient, update, *memory)

    def memory(self, micro_batch: int) -> np.ndarray:
        """Resident bytes, shape (options,)."""
        return np.ceil(self.state_bytes + micro_batch * (self.kept_bytes + self.recomputed_bytes))

    def buffer(self, micro_batch: int) -> np.ndarray:
        """Bytes of the largest buffer of any layer, shape (options,)."""
        return np.ceil(self.buffer_fixed + micro_batch * self.buffer_slope).max(axis=0)


def price_layer(
    layer: Layer, strategies: Sequence[Strategy], cluster: Cluster, workload: Workload, place: Place
) -> OptionPrices:
    """The prices of a layer at each of some strategies.

    Args:
        layer: the layer.
        strategies: the options.
        cluster: the machine.
        workload: precision, optimizer and recomputation; its batch does not matter.
        place: the place of the layer in its graph.
    """
    precision = workload.precision
    columns = np.zeros((16, len(strategies)))
    for group in group_strategies(strategies):
        work = layer_work(layer, group, workload, VARIABLE, place)
        times = (
            cluster.exposed_part(work) * communication_time(cluster, work.forward),
            cluster.exposed_part(work) * communication_time(cluster, work.backward),
            cluster.local_time(work.forward_work, precision),
            cluster.local_time(work.backward_work, precision),
        )
        for row, seconds in enumerate(times):
            columns[2 * row, group.indices], columns[2 * row + 1, group.indices] = parts_of(seconds)
        columns[8, group.indices] = communication_time(cluster, work.gradient)
        columns[9, group.indices] = work.state_bytes
        columns[10, group.indices] = parts_of(work.kept_bytes)[1]
        columns[11, group.indices], columns[12, group.indices] = parts_of(work.buffer_bytes)
        columns[13, group.indices] = cluster.local_time(work.update_work, precision)
        columns[14, group.indices] = parts_of(work.recomputed_bytes)[1]
        columns[15, group.indices] = work.held_bytes
    return OptionPrices(
        times=columns[:8],
        gradient=columns[8],
        update=columns[13],
        state_bytes=columns[9],
        held_bytes=columns[15],
        kept_bytes=columns[10],
        recomputed_bytes=columns[14],
        buffer_fixed=columns[11:12],
        buffer_slope=columns[12:13],
    )
