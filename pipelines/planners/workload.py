"""The input of a planner: a profile on a cluster with a global batch, and the costs of its stages.

A stage is a run of layers [first, stop) on r devices. Each replica takes an even slice of at most ceil(b / r) samples of a
micro-batch of b samples. Activations and kept bytes grow linearly with the slice; the times are those of the profile for the
slice (:meth:`.Profile.times`). So the floor for small batches applies to the slice of a device, not to the micro-batch.

Memory of one device of a stage that has K micro-batches in flight:

    state * P + K * kept * slice                          P = parameter bytes, kept = stored bytes per sample
    state * P + (K * input + kept) * slice                with recomputation: inputs of K, everything of one

``state`` is the bytes per parameter byte: 4 for Adam (fp32: weight, gradient, two moments; 16 bytes per parameter).
Recomputation runs the stage's forward once more as part of its backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_PASSES
from autoddl.costmodel.nearest import divisors, nearest_batches, nearest_that_work
from autoddl.costmodel.units import format_bytes

from ..profile import Profile
from .clock import Clock

__all__ = ["PlannerError", "ProfiledWorkload", "RunningTimes"]

#: Bytes of weight, gradient and two moments per byte of parameters.
ADAM_STATE = 4.0


class PlannerError(UserError):
    """Constraints that no plan satisfies."""


class RunningTimes(NamedTuple):
    """Running sums of the layers' times on one device, so that the times of stages are differences.

    Attributes:
        forward: ``forward[i]``: seconds of a forward through the layers before i, shape (layers + 1,).
        backward: the same of the backward, including the repeated forward if activations are recomputed.
        gradients: the same of the backward alone, from whose end on the gradients of a layer are complete.
    """

    forward: np.ndarray
    backward: np.ndarray
    gradients: np.ndarray

    @property
    def both(self) -> np.ndarray:
        """The same of a forward and a backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class ProfiledWorkload:
    """Profile, cluster and global batch, with running sums over the layers.

    Attributes:
        profile: the model.
        cluster: the devices.
        batch: samples per iteration over all devices.
        recompute: whether activations are recomputed.
        state: bytes of weights, gradients and optimizer state per byte of parameters.
        memory_bytes: limit per device; None: the device's memory.
        parameters: ``parameters[i]``: bytes of parameters of the layers before i, so that stages are differences.
        stored: bytes that the layers before i keep of one sample.
        cut_forward: ``cut_forward[i]``: bytes of one sample's activations that cross the cut before layer i.
        cut_backward: the same of the gradients.

    Raises:
        PlannerError: the batch is below 1, or the memory limit or the state factor is out of range.
    """

    profile: Profile
    cluster: Cluster
    batch: int
    recompute: bool = False
    state: float = ADAM_STATE
    memory_bytes: float | None = None
    parameters: np.ndarray = field(init=False, repr=False, compare=False)
    stored: np.ndarray = field(init=False, repr=False, compare=False)
    cut_forward: np.ndarray = field(init=False, repr=False, compare=False)
    cut_backward: np.ndarray = field(init=False, repr=False, compare=False)
    _times: dict[float, RunningTimes] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlannerError(f"batch {self.batch} should be at least 1")
        if not 1 <= self.state < math.inf:
            raise PlannerError(
                f"state factor {self.state:g} should be a finite number of at least 1 (the weights themselves)"
            )
        if self.memory_bytes is not None and not 0 < self.memory_bytes < math.inf:
            raise PlannerError(
                f"memory limit {self.memory_bytes / 2**30:g} GiB should be a finite number of more than 0"
            )
        layers, samples = self.profile.layers, self.profile.micro_batch
        cuts = self.profile.cuts()
        for name, values in {
            "parameters": _running_sums([layer.parameter_bytes for layer in layers]),
            "stored": _running_sums([layer.kept_bytes / samples for layer in layers]),
            "cut_forward": np.array([cut.forward_bytes / samples for cut in cuts]),
            "cut_backward": np.array([cut.backward_bytes / samples for cut in cuts]),
        }.items():
            object.__setattr__(self, name, values)

    @property
    def num_layers(self) -> int:
        return self.profile.num_layers

    @property
    def limit_bytes(self) -> float:
        """Memory of one device."""
        return self.cluster.device.memory_bytes if self.memory_bytes is None else self.memory_bytes

    def times(self, slice_size: float) -> RunningTimes:
        """The times of ``slice_size`` samples on one device."""
        if slice_size not in self._times:
            forward, gradients = map(_running_sums, zip(*self.profile.times(slice_size)))
            self._times[slice_size] = RunningTimes(
                forward, gradients + forward if self.recompute else gradients, gradients
            )
        return self._times[slice_size]

    def least_rates(self, slices: Iterable[float]) -> RunningTimes:
        """Lower bounds of the times per sample, for slices of these sizes: the least of each layer over the sizes."""
        rates = np.min([np.array(self.profile.times(size)) / size for size in slices], axis=0)
        forward, gradients = _running_sums(rates[:, 0]), _running_sums(rates[:, 1])
        return RunningTimes(forward, gradients + forward if self.recompute else gradients, gradients)

    def forward_s(self, first: int, stop: int, slice_size: float) -> float:
        """Seconds of a stage's forward."""
        forward = self.times(slice_size).forward
        return float(forward[stop] - forward[first])

    def backward_s(self, first: int, stop: int, slice_size: float) -> float:
        """Seconds of a stage's backward, including the repeated forward if activations are recomputed."""
        backward = self.times(slice_size).backward
        return float(backward[stop] - backward[first])

    def parameter_bytes(self, first: int, stop: int) -> float:
        """Bytes of a stage's parameters."""
        return float(self.parameters[stop] - self.parameters[first])

    def fixed_bytes(self, first: int, stop: int, slice_size: float) -> float:
        """Memory that does not depend on the number of micro-batches in flight."""
        fixed = self.state * self.parameter_bytes(first, stop)
        return fixed + float(self.stored[stop] - self.stored[first]) * slice_size * self.recompute

    def in_flight_bytes(self, first: int, stop: int, slice_size: float) -> float:
        """Memory per micro-batch in flight."""
        if self.recompute:
            return float(self.cut_forward[first]) * slice_size
        return float(self.stored[stop] - self.stored[first]) * slice_size

    def stage_bytes(self, first: int, stop: int, slice_size: float, in_flight: float) -> float:
        """Memory of one device (formula: module's docstring)."""
        each = self.in_flight_bytes(first, stop, slice_size)
        return self.fixed_bytes(first, stop, slice_size) + in_flight * each

    def most_in_flight(self, first: int, stop: int, slice_size: float, wanted: int) -> int:
        """The number of micro-batches that fit in memory, at most ``wanted``; 0 if not even one fits."""
        room = self.limit_bytes - self.fixed_bytes(first, stop, slice_size)
        each = self.in_flight_bytes(first, stop, slice_size)
        if room < each or room < 0:
            return 0
        return wanted if each * wanted <= room else int(room // each)

    def micro_batches(self, given: int | None = None) -> list[int]:
        """Micro-batch sizes to consider, ascending: the divisors of the batch from the least micro-batch of the profile on.

        Smaller ones take as long as that one (:meth:`.Profile.times`) and are skipped; they can be requested.

        Raises:
            PlannerError: the requested size does not divide the batch.
        """
        if given is not None:
            self.require_division("divide into micro-batches", lambda batch, size: batch % size == 0, given)
            return [given]
        least = min(self.profile.least_micro_batch, self.batch)
        return [size for size in divisors(self.batch) if size >= least]

    def require_division(self, how: str, works: Callable[[int, int], bool], micro_batch: int | None) -> None:
        """Check the batch and the requested micro-batch.

        Args:
            how: the requirement, for the message: "batch ... should {how}".
            works: whether a batch, in micro-batches of a size, satisfies it (size 1 if none is requested). Some multiple of the
                number of devices must.
            micro_batch: the requested size.

        Raises:
            PlannerError: they do not satisfy it; the message names the nearest ones that do.
        """
        batch, size = self.batch, 1 if micro_batch is None else micro_batch
        if size > 0 and batch % size == 0 and works(batch, size):
            return
        fault = f"batch {batch} in micro-batches of {size}" if size > 1 else f"batch {batch}"
        fault += f" should {how}"
        if size < 1 or batch % size:
            fault = f"micro-batch {size} does not divide the batch of {batch}"
        sizes = [each for each in divisors(batch) if micro_batch is not None and works(batch, each)]
        if sizes:
            raise PlannerError(f"{fault}; {nearest_that_work('micro-batch', size, sizes)}")
        size, reach = max(size, 1), self.cluster.num_devices
        batches = nearest_batches(batch, lambda other: works(other, size), reach, size)
        if not batches:  # no batch works with that micro-batch
            batches = nearest_batches(batch, lambda other: any(works(other, each) for each in divisors(other)), reach)
        raise PlannerError(f"{fault}; {nearest_that_work('batch', batch, batches)}")

    def least_memory_bytes(self, cuts: Sequence[int], micro_batch: int) -> float:
        """Lower bound on the memory [bytes] of the fullest worker under any schedule.

        A worker holds the weights and optimizer states of a stage, and the activations of at least half a micro-batch, the smallest
        unit of work of a schedule.  Configurations above the memory limit by this bound need no schedule to be ruled out.
        """
        return max(
            self.in_flight_bytes(*layers, micro_batch) / 2 + self.state * self.parameter_bytes(*layers)
            for layers in zip(cuts, cuts[1:])
        )

    def check_passes(self, num_stages: int, num_micro_batches: int, iterations: int = 1) -> None:
        """Refuse schedules that are too long to simulate.

        Raises:
            PlannerError: the number of passes of micro-batches through stages is above the limit.
        """
        passes = num_stages * num_micro_batches * iterations
        if passes > MAX_PASSES:
            raise PlannerError(
                f"batch {self.batch} in {num_micro_batches:,} micro-batches takes {passes:,} passes through stages, should take at "
                f"most {MAX_PASSES:,}: give a smaller batch (a schedule repeats its pattern long before)"
            )

    def balanced_cuts(self, num_stages: int, slice_size: float) -> tuple[int, ...]:
        """Cuts (with both ends) that minimise the time of the slowest of ``num_stages`` stages at ``slice_size`` samples.

        Dynamic programming over the last cut, O(stages layers^2).

        Raises:
            PlannerError: there are fewer layers than stages.
        """
        count = self.num_layers
        if not 1 <= num_stages <= count:
            raise PlannerError(
                f"{num_stages} stages; {self.profile.name} has {count} layers, so 1 to {count} are possible"
            )
        work = self.times(slice_size).both
        slowest = work.copy()
        slowest[0] = np.inf
        choices = []
        for _ in range(num_stages - 1):
            # [stop, cut]: stages up to the cut, and one more from there to stop.
            options = np.maximum(slowest[None, :], work[:, None] - work[None, :])
            options[np.triu_indices(count + 1)] = np.inf
            choices.append(options.argmin(axis=1))
            slowest = options.min(axis=1)
        cuts = [count]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return (0, *reversed(cuts)) if num_stages > 1 else (0, count)

    def not_found_error(self, what: str, clock: Clock) -> PlannerError:
        """The error for a search without a result: nothing fits in memory, or the time limit was reached.

        Raises:
            StopRequestedError: the search ended because a stop was requested.
        """
        clock.stop.check()
        if clock.stopped:
            return PlannerError(
                f"no {what} of {self.profile.name} was found within {clock.limit_s:g} s; give it more time"
            )
        return self.memory_error(what)

    def memory_error(self, what: str) -> PlannerError:
        """The error for a search space in which nothing fits in memory."""
        return PlannerError(
            f"no {what} of {self.profile.name} at batch {self.batch} fits {format_bytes(self.limit_bytes)} per device of "
            f"{self.cluster.name}; allow recomputation, smaller micro-batches or more devices"
        )


def _running_sums(values: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])
