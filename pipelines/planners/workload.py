"""What a planner plans for: a profile on a cluster with a global batch, and what a stage of it costs.

A stage is a run of layers [first, stop) on r devices. Of a micro-batch of b samples each replica takes an even slice of at most
ceil(b / r) samples; times, activations and what is kept grow linearly with the slice (see :mod:`autoddl.pipelines.profile`).

Memory of one device of a stage that has K micro-batches in flight:

    state * P + K * kept * slice                          P = parameter bytes, kept = stored bytes per sample
    state * P + (K * input + kept) * slice                with recomputation: inputs of K, everything of one

``state`` = bytes per parameter byte: 4 for Adam (fp32: weight, gradient, two moments; 16 bytes per parameter).
Recomputation runs the stage's forward once more as part of its backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.nearest import divisors, nearest_batches, nearest_that_work
from autoddl.costmodel.units import format_bytes

from ..profile import Profile
from .clock import Clock

__all__ = ["PlannerError", "Workload"]

ADAM_STATE = 4.0


class PlannerError(UserError):
    """A wish that no plan can fulfil."""


@dataclass(frozen=True)
class Workload:
    """Profile, cluster and global batch; with per-sample sums over layers, ready for any stage.

    Raises:
        PlannerError: the batch is below 1, or the memory limit or the state factor make no sense.
    """

    profile: Profile
    cluster: Cluster
    batch: int
    """Samples per iteration over all devices."""
    recompute: bool = False
    state: float = ADAM_STATE
    """Bytes of weights, gradients and optimizer state per byte of parameters."""
    memory_bytes: float | None = None
    """Limit per device; None: the device's memory."""
    forward: np.ndarray = field(init=False, repr=False, compare=False)
    """``forward[i]``: seconds of one sample through the layers before i, so that stages are differences."""
    backward: np.ndarray = field(init=False, repr=False, compare=False)
    parameters: np.ndarray = field(init=False, repr=False, compare=False)
    stored: np.ndarray = field(init=False, repr=False, compare=False)
    cut_forward: np.ndarray = field(init=False, repr=False, compare=False)
    """``cut_forward[i]``: bytes of one sample that cross the cut before layer i."""
    cut_backward: np.ndarray = field(init=False, repr=False, compare=False)

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
        forward = _running_sums([layer.forward_s / samples for layer in layers])
        backward = _running_sums([layer.backward_s / samples for layer in layers])
        cuts = self.profile.cuts()
        for name, values in {
            "forward": forward,
            "backward": backward + forward if self.recompute else backward,
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

    def forward_s(self, first: int, stop: int, slice_size: float) -> float:
        return float(self.forward[stop] - self.forward[first]) * slice_size

    def backward_s(self, first: int, stop: int, slice_size: float) -> float:
        """Including the repeated forward, if activations are recomputed."""
        return float(self.backward[stop] - self.backward[first]) * slice_size

    def parameter_bytes(self, first: int, stop: int) -> float:
        return float(self.parameters[stop] - self.parameters[first])

    def fixed_bytes(self, first: int, stop: int, slice_size: float) -> float:
        """Memory that does not depend on how many micro-batches are in flight."""
        fixed = self.state * self.parameter_bytes(first, stop)
        return fixed + float(self.stored[stop] - self.stored[first]) * slice_size * self.recompute

    def in_flight_bytes(self, first: int, stop: int, slice_size: float) -> float:
        """Memory of each micro-batch in flight."""
        if self.recompute:
            return float(self.cut_forward[first]) * slice_size
        return float(self.stored[stop] - self.stored[first]) * slice_size

    def stage_bytes(self, first: int, stop: int, slice_size: float, in_flight: float) -> float:
        """Memory of one device (formula: module's text)."""
        each = self.in_flight_bytes(first, stop, slice_size)
        return self.fixed_bytes(first, stop, slice_size) + in_flight * each

    def most_in_flight(self, first: int, stop: int, slice_size: float, wanted: int) -> int:
        """How many micro-batches fit in memory, at most ``wanted``; 0 if not even one does."""
        room = self.limit_bytes - self.fixed_bytes(first, stop, slice_size)
        each = self.in_flight_bytes(first, stop, slice_size)
        if room < each or room < 0:
            return 0
        return wanted if each * wanted <= room else int(room // each)

    def micro_batches(self, given: int | None = None) -> list[int]:
        """Micro-batch sizes to consider, ascending: the divisors of the batch from the profile's micro-batch on.

        Smaller ones are left out because times measured at the profile's say too little of them; they can be given.

        Raises:
            PlannerError: the given one does not divide the batch.
        """
        if given is not None:
            self.require_division("divide into micro-batches", lambda batch, size: batch % size == 0, given)
            return [given]
        least = min(self.profile.micro_batch, self.batch)
        return [size for size in divisors(self.batch) if size >= least]

    def require_division(self, how: str, works: Callable[[int, int], bool], micro_batch: int | None) -> None:
        """Refuse a batch, or the micro-batch that is given of it, by naming the nearest ones that work.

        Args:
            how: what they have to do.
            works: whether a batch in micro-batches of a size, one sample where none is given, does it; multiples of the devices
                do in some.

        Raises:
            PlannerError: they do not.
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
        if not batches:  # in no micro-batches of that size
            batches = nearest_batches(batch, lambda other: any(works(other, each) for each in divisors(other)), reach)
        raise PlannerError(f"{fault}; {nearest_that_work('batch', batch, batches)}")

    def balanced_cuts(self, num_stages: int) -> tuple[int, ...]:
        """Where to cut (with both ends) so that the slowest of ``num_stages`` stages is as fast as can be.

        By dynamic programming over the last cut, O(stages layers^2).

        Raises:
            PlannerError: there are fewer layers.
        """
        count = self.num_layers
        if not 1 <= num_stages <= count:
            raise PlannerError(
                f"{num_stages} stages; {self.profile.name} has {count} layers, so 1 to {count} are possible"
            )
        work = self.forward + self.backward
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

    def nothing_found(self, what: str, clock: Clock) -> PlannerError:
        """The error that nothing fits, or that nothing was found in time.

        Raises:
            StopRequestedError: it was neither, but a stop was requested.
        """
        clock.stop.check()
        if clock.stopped:
            return PlannerError(
                f"no {what} of {self.profile.name} was found within {clock.limit_s:g} s; give it more time"
            )
        return self.does_not_fit(what)

    def does_not_fit(self, what: str) -> PlannerError:
        """The error that nothing fits."""
        return PlannerError(
            f"no {what} of {self.profile.name} at batch {self.batch} fits {format_bytes(self.limit_bytes)} per device of "
            f"{self.cluster.name}; allow recomputation, smaller micro-batches or more devices"
        )


def _running_sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])
