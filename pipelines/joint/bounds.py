"""Linear lower bounds on the step of a setting, valid for all its cuts and all ways to run their stages.

A *linear bound* has a weight w >= 0 for each term of the step (:class:`autoddl.pipelines.stepgraph.Terms`: forward, backward,
recomputation and all-reduce of each stage, forward and backward transfer over each boundary), such that the sum of weights times
seconds is at most the step of every plan of the setting.  :func:`least_over_cuts` minimises such a sum over all cuts, by dynamic
programming over stages and units.  A stage takes at least the sum of what each of its units takes at the bound's weights
(:mod:`.unit_bounds`).

**Balance.**  The step is at least the mean of all workers' loads, with any shares q(s) >= 0 of sum 1.  Let a pipeline have the
workers 0 to D - 1, one stage on each, and N micro-batches per step, and let F(s) and B(s) be the seconds of one forward and one
backward pass through stage s.  Worker s spends N (F(s) + B(s)) on its own stage.  Before its first task a micro-batch passes
forward through all stages t < s, and after its last task a gradient passes backward through them.  So in the mean of all workers
F(s) and B(s) have the weight

    w(s) = N q(s) + sum over t > s of q(t)                                                                                    (1)

The bound is best if a unit adds the same to it on every worker.  Its seconds are inversely proportional to the devices of the
worker, so w(s) = c devices(s) with a constant c, and from the last worker to the first

    q(s) = (c devices(s) - sum over t > s of q(t)) / N

For D workers of equal size, a step takes at least 1 / (1 - (1 - 1/N)^D) times the work of one micro-batch on the whole chain.

=====================================  =======================================================================================
schedule                               difference from (1)
=====================================  =======================================================================================
split backward passes                  weight parts may come last, so that only forward passes count before the first task
several pipelines                      q(s) is the worker's share of the devices; neither fill nor drain counts
several groups of stages               q(s) is the worker's share of the devices; fill and drain are those of the first group
GEMS                                   one micro-batch of each pipeline in flight: w(s) is the most micro-batches of a pipeline
=====================================  =======================================================================================

**Long paths.**  For any path of the schedule's graph, the weight of a term is how often the path passes it
(:mod:`autoddl.pipelines.stepgraph`).                                                                                         (2)

**Memory.**  For any prices mu >= 0 [s per byte], one per worker, (1) or (2) plus the sum over the workers of mu (bytes - limit) is
a lower bound on the steps of all plans within the memory limit.  Recomputation of a whole stage takes at least the sum of its
layers' forward passes, without redistributions.                                                                              (3)

**Exchange.**  The first and the last stage may share a weight of the model, whose gradient they exchange.  Both take as long as the
one of them with more bytes b of it, so that for any weights e(0), e(1) >= 0 with a sum of at most the weights of both all-reduces

    (e(0) + e(1)) exchange  >=  e(0) seconds of b(0) bytes  +  e(1) seconds of b(1) bytes                                     (4)

**Bottleneck.**  A cut takes at least the largest of the paths whose mean is (1).  :mod:`.bottleneck_bound` minimises this over all
cuts.

**Period.**  A step of an asynchronous schedule is at least N (F + B) of each stage, and so at least the mean of that over the
workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..generators.chimera import placements
from ..stepgraph import Terms
from .configuration import PipelineSchedule

__all__ = [
    "Bound",
    "balance_weights",
    "bound_class",
    "estimated_step_weights",
    "fill_and_drain",
    "homes",
    "least_over_cuts",
    "micro_batches_per_pipeline",
    "placement_of",
    "worker_loads",
    "worker_paths",
]


@dataclass(frozen=True, eq=False)
class Bound:
    """A linear lower bound on steps.

    Attributes:
        weights: One weight per term, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
        prices: Vectors of prices of a byte on the workers of each stage [s per byte], shape (stages,) each.  Empty: memory is free.
            With several vectors every arc takes, for each way of recomputation, the vector at which it costs the most; this is
            valid only if each worker has a single stage.
        exchange: The weights e(0), e(1) of (4).  None: those of the all-reduces of the first and of the last stage.
    """

    weights: np.ndarray
    prices: tuple[np.ndarray, ...] = ()
    exchange: tuple[float, float] | None = None

    def is_path(self, path: np.ndarray) -> bool:
        """Return whether the bound consists of this path alone, without prices of memory."""
        return not self.prices and np.array_equal(self.weights, path)


#: Assumed part of the forward pass in the work of a micro-batch.
_FORWARD_PART = 1 / 3


@lru_cache(maxsize=512)
def homes(num_workers: int, groups: int, num_pipelines: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the (pipeline, stage) pairs of each worker.

    >>> homes(2, 2, 1)  # two groups of stages
    (((0, 0), (0, 2)), ((0, 1), (0, 3)))
    >>> homes(2, 1, 2)  # two pipelines of opposite directions
    (((0, 0), (1, 1)), ((0, 1), (1, 0)))
    """
    placement = placement_of(num_workers, groups, num_pipelines)
    return tuple(
        tuple((p, s) for p, workers in enumerate(placement) for s, owner in enumerate(workers) if owner == worker)
        for worker in range(num_workers)
    )


def placement_of(num_workers: int, groups: int, num_pipelines: int) -> tuple[tuple[int, ...], ...]:
    """Return the worker of each stage of each pipeline, ``[pipeline][stage]``, as the generators of schedules place them.

    >>> placement_of(2, 2, 1)
    ((0, 1, 0, 1),)
    """
    return placements(num_workers, num_pipelines) if num_pipelines > 1 else (tuple(range(num_workers)) * groups,)


def micro_batches_per_pipeline(num_workers: int, num_micro_batches: int, num_pipelines: int) -> tuple[int, ...]:
    """Return the number of micro-batches of each pipeline.

    Whole rounds of ``num_workers`` micro-batches are divided evenly; the rest is divided as evenly as possible.

    >>> micro_batches_per_pipeline(4, 9, 2)
    (5, 4)
    """
    rest = num_micro_batches % num_workers if num_pipelines > 1 else num_micro_batches
    each, extra = divmod(rest, num_pipelines)
    in_rounds = (num_micro_batches - rest) // num_pipelines
    return tuple(in_rounds + each + (pipeline < extra) for pipeline in range(num_pipelines))


def balance_weights(spec: PipelineSchedule, widths: Sequence[int]) -> np.ndarray:
    """Return the weights of the balance bound (1).

    Args:
        spec: The schedule.
        widths: Per stage the number of devices of its worker.

    Returns:
        One weight per term, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
    """
    terms, count, depth = Terms(spec.num_stages), spec.num_micro_batches, spec.num_workers
    weights = np.zeros(terms.count)
    if spec.name == "gems":
        rounds = max(micro_batches_per_pipeline(depth, count, spec.num_pipelines))
        for part in (terms.forward, terms.backward, terms.transfer_forward, terms.transfer_backward):
            weights[part] = rounds
        return weights
    share = np.array(widths) / sum(widths[:depth])
    # Per stage the sum of the shares of the workers behind it.
    behind = np.zeros(spec.num_stages)
    if spec.synchronous and spec.num_pipelines == 1:
        if spec.groups == 1:
            share = _balanced_shares(share, count, _FORWARD_PART if spec.splits_backward else 1.0)
        behind[:depth] = np.maximum(1.0 - np.cumsum(share[:depth]), 0.0)
        # A micro-batch on its way to a worker, and its gradient on the way back, cross all boundaries before the worker.
        weights[terms.transfer_forward][: depth - 1] = behind[: depth - 1]
        weights[terms.transfer_backward][: depth - 1] = 0.0 if spec.splits_backward else behind[: depth - 1]
    passes = np.array([spec.backward_passes(stage) for stage in range(spec.num_stages)])
    weights[terms.forward] = count * share + behind
    weights[terms.backward] = count * share * passes + (0.0 if spec.splits_backward else behind)
    # The stages that the last gradient passes can recompute before it arrives, so recomputation is not part of the drain.
    weights[terms.recompute] = count * share
    return weights


def _balanced_shares(devices: np.ndarray, count: int, part: float) -> np.ndarray:
    """Return the shares q of (1) at which a unit adds the same to the bound on every worker.

    Args:
        devices: Per worker its part of all devices.
        count: Number of micro-batches.
        part: Part of a stage's work that delays the first task of later workers, or follows their last task.
    """
    shares, behind = np.zeros(len(devices)), 0.0
    for worker in reversed(range(len(devices))):
        shares[worker] = max(0.0, devices[worker] - part * behind) / count
        behind += shares[worker]
    return np.asarray(shares / behind)


def fill_and_drain(spec: PipelineSchedule) -> np.ndarray:
    """Return what each stage adds to the load of a worker behind it, because the pipeline fills and drains through the stage.

    Returns:
        One weight per term, in the order of :class:`autoddl.pipelines.stepgraph.Terms`: one forward pass, and one backward pass
        unless backward passes are split.  If they take half a micro-batch, only half a pass follows the worker's last task.
    """
    terms = Terms(spec.num_stages)
    weights = np.zeros(terms.count)
    weights[terms.forward] = weights[terms.transfer_forward] = 1.0
    if not spec.splits_backward:
        weights[terms.backward] = weights[terms.transfer_backward] = 0.5 if spec.halves_backwards else 1.0
    return weights


def estimated_step_weights(spec: PipelineSchedule, widths: Sequence[int]) -> np.ndarray:
    """Return weights that estimate the step of a plan whose workers have equal loads; they are no bound.

    The estimate is the work of one worker, and its idle time while a schedule of this kind fills and drains.

    Args:
        spec: The schedule.
        widths: Per stage the number of devices of its worker.

    Returns:
        One weight per term, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
    """
    terms, count, depth = Terms(spec.num_stages), spec.num_micro_batches, spec.num_workers
    # Idle time of a worker, as a number of micro-batches.
    idle = (depth - 1) / spec.groups
    if spec.num_pipelines > 1:
        idle = depth / spec.num_pipelines - 1
    if spec.name == "gems":
        idle = count * (depth / 2 - 1)
    elif spec.splits_backward:
        idle /= 2
    elif spec.groups > 1:
        # With fewer micro-batches than workers the pipeline fills anew for each group of stages.
        idle += max(0, depth - count) * (1 - 1 / spec.groups)
    share = np.array(widths) / sum(widths[:depth])
    weights = np.zeros(terms.count)
    for part in (terms.forward, terms.backward, terms.recompute):
        weights[part] = (count + idle) * share
    weights[terms.backward] *= [spec.backward_passes(stage) for stage in range(spec.num_stages)]
    weights[terms.all_reduce] = share
    return weights


def worker_loads(spec: PipelineSchedule) -> list[np.ndarray]:
    """Return the compute load of each worker, the simplest path of (2): all passes through its stages.

    Returns:
        Per worker one weight per term, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
    """
    terms, loads = Terms(spec.num_stages), []
    counts = micro_batches_per_pipeline(spec.num_workers, spec.num_micro_batches, spec.num_pipelines)
    for held in homes(spec.num_workers, spec.groups, spec.num_pipelines):
        weights = np.zeros(terms.count)
        for pipeline, stage in held:
            weights[terms.forward.start + stage] += counts[pipeline]
            weights[terms.backward.start + stage] += counts[pipeline] * spec.backward_passes(stage)
            weights[terms.recompute.start + stage] += counts[pipeline]
        loads.append(weights)
    return loads


def worker_paths(spec: PipelineSchedule) -> list[np.ndarray]:
    """Return the load of each worker of a synchronous schedule with fill and drain through the stages before its first one.

    Before a worker's first task a micro-batch passes forward through these stages, and after its last task a gradient passes
    backward through them.

    Returns:
        Per worker one weight per term, in the order of :class:`autoddl.pipelines.stepgraph.Terms`.
    """
    terms, through = Terms(spec.num_stages), fill_and_drain(spec)
    paths = [load for load in worker_loads(spec) if load.any()]
    for path in paths:
        first = int(path[terms.forward].nonzero()[0][0])
        for part in (terms.forward, terms.backward, terms.transfer_forward, terms.transfer_backward):
            path[part][:first] += through[part][:first]
    return paths


def bound_class(spec: PipelineSchedule) -> tuple[object, ...]:
    """Return a key of the kind of schedule.

    :func:`balance_weights` depends only on the key, the number of micro-batches and the numbers of devices.
    """
    return spec.name == "gems", spec.synchronous, spec.splits_backward, spec.groups, spec.num_pipelines


def least_over_cuts(of_units: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the least sum over all cuts of a chain in stages of one unit or more.

    The dynamic programme over stages and units takes O(stages * units) steps for each element of the leading dimensions.

    Args:
        of_units: What each unit adds to each stage, shape (..., stages, units).
        after: What the boundary behind each stage but the last adds, by the first unit behind the boundary; shape
            (stages - 1, units + 1).

    Returns:
        The least sums, shape (...).

    >>> of_units = np.array([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])  # two stages, three units
    >>> float(least_over_cuts(of_units, np.array([[0.0, 3.0, 0.5, 0.0]])))  # units 0 and 1 in the first stage: 3 + 0.5 + 1
    4.5
    """
    num_stages, num_units = of_units.shape[-2:]
    sums = np.zeros((*of_units.shape[:-1], num_units + 1))
    np.cumsum(of_units, axis=-1, out=sums[..., 1:])
    # best[j]: the least sum of the stages so far with the units 0 to j - 1, and of the boundaries behind them.
    best = np.full((*of_units.shape[:-2], num_units + 1), np.inf)
    best[..., 0] = 0.0
    for stage in range(num_stages):
        own = sums[..., stage, :]
        # A stage with the units i to j - 1 adds own[j] - own[i]; the minimum over i < j is a running one.
        begun = np.minimum.accumulate(best - own, axis=-1)
        best[..., 1:] = begun[..., :-1] + own[..., 1:]
        best[..., 0] = np.inf
        if stage < num_stages - 1:
            best += after[stage]
    return np.asarray(best[..., -1])
