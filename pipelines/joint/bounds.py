"""Lower bounds on the step of a setting, over all its cuts and all ways to run their stages; cheap ones first.

Every bound is a *linear* one: numbers w >= 0 per stage for its forward, backward, recomputation and all-reduce, and per
boundary for its transfers, such that no plan's step is less than their sum of products.  The least of such a sum over all cuts
is found by dynamic programming over stages and units, where every stage takes at least what its units do at its weights
(:mod:`.unit_bounds`).

**Balance.**  Some worker has at least the mean of all work.  Let worker s of D put N micro-batches through its stages (whatever is
done by which replica): N (F + B).  In a scheme of one pipeline its first micro-batch has come through the stages t < s before, and
its last one's gradient goes back through them behind.  A mean over all workers, of shares q >= 0 that sum to 1:

    N q(s) + sum of q(t) over the workers t > s, where s < D      for F(s) and B(s)                                            (1)

It is highest where a unit counts as much on every worker.  From the last worker on, with a constant c,

    q(s) = (c devices(s) - sum of q(t) over t > s) / N

so that D equal workers take at least 1 / (1 - (1 - 1/N)^D) times the whole chain's work of one micro-batch.  Where weight parts may
come last the way back does not count, nor do ways in and out in schemes of several pipelines.  With several groups of stages the
ways in are those of the first group alone, and q is the share of the devices.  GEMS has one micro-batch of each pipeline under way:
as many whole ways there and back as it has in one.

**Long paths.**  A path of the schedule's graph (:mod:`autoddl.pipelines.stepgraph`): how often it passes each term.           (2)

**Memory.**  For any prices mu >= 0 of a byte on each worker, the sum of (1) or (2) and of mu (bytes - limit) over all workers is a
bound, too: what does not fit costs.  Recomputing a whole stage takes at least what it does without redistributions.          (3)

**Level.**  A cut takes the greatest of the paths of which (1) is the mean; the least of that over all cuts is in :mod:`.levels`.

**Period.**  Of an asynchronous schedule: N (F + B) of a stage, the mean over the workers: N / D as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..generators.chimera import placements
from ..stepgraph import Terms
from .configuration import PipelineSchedule

__all__ = [
    "balance",
    "bound_class",
    "homes",
    "least_of_cuts",
    "loads",
    "micro_batches_of",
    "placement_of",
    "promise",
    "way_in",
]

#: About what the forward pass is of all work.
_FORWARD = 1 / 3


@lru_cache(maxsize=512)
def homes(num_workers: int, groups: int, num_pipelines: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per worker its (pipeline, stage) pairs."""
    placement = placement_of(num_workers, groups, num_pipelines)
    return tuple(
        tuple((p, s) for p, workers in enumerate(placement) for s, owner in enumerate(workers) if owner == worker)
        for worker in range(num_workers)
    )


def placement_of(num_workers: int, groups: int, num_pipelines: int) -> tuple[tuple[int, ...], ...]:
    """``[pipeline][stage] -> worker``, as the generators have it."""
    return placements(num_workers, num_pipelines) if num_pipelines > 1 else (tuple(range(num_workers)) * groups,)


def micro_batches_of(num_workers: int, num_micro_batches: int, num_pipelines: int) -> tuple[int, ...]:
    """How many micro-batches each pipeline gets: whole rounds evenly, and what is left over as evenly as can be."""
    left = num_micro_batches % num_workers if num_pipelines > 1 else num_micro_batches
    each, extra = divmod(left, num_pipelines)
    whole = (num_micro_batches - left) // num_pipelines
    return tuple(whole + each + (pipeline < extra) for pipeline in range(num_pipelines))


def balance(spec: PipelineSchedule, widths: Sequence[int]) -> np.ndarray:
    """The weights of (1) in the order of :class:`autoddl.pipelines.stepgraph.Terms`.

    Args:
        widths: devices of every stage's worker.
    """
    terms, count, depth = Terms(spec.num_stages), spec.num_micro_batches, spec.num_workers
    weights = np.zeros(terms.count)
    if spec.name == "gems":
        rounds = max(micro_batches_of(depth, count, spec.num_pipelines))
        for part in (terms.forward, terms.backward, terms.transfer_forward, terms.transfer_backward):
            weights[part] = rounds
        return weights
    share = np.array(widths) / sum(widths[:depth])
    before = np.zeros(spec.num_stages)
    if spec.synchronous and spec.num_pipelines == 1:
        if spec.groups == 1:
            share = _levelled(share, count, _FORWARD if spec.splits_backward else 1.0)
        before[:depth] = np.maximum(1.0 - np.cumsum(share[:depth]), 0.0)
        # On the way to a worker the boundary behind each stage before it is crossed, and back.
        weights[terms.transfer_forward][: depth - 1] = before[: depth - 1]
        weights[terms.transfer_backward][: depth - 1] = 0.0 if spec.splits_backward else before[: depth - 1]
    passes = np.array([spec.backward_passes(stage) for stage in range(spec.num_stages)])
    weights[terms.forward] = count * share + before
    weights[terms.backward] = count * share * passes + (0.0 if spec.splits_backward else before)
    # The way back of the last micro-batch may do without recomputation: that need not wait for the gradient.
    weights[terms.recompute] = count * share
    return weights


def _levelled(devices: np.ndarray, count: int, part: float) -> np.ndarray:
    """The shares of (1) where every unit counts as much on each worker; ``part`` of the work counts on the way to a worker."""
    shares, behind = np.zeros(len(devices)), 0.0
    for worker in reversed(range(len(devices))):
        shares[worker] = max(0.0, devices[worker] - part * behind) / count
        behind += shares[worker]
    return np.asarray(shares / behind)


def way_in(spec: PipelineSchedule) -> np.ndarray:
    """What a stage adds to the path of one behind it in (1): passes of one micro-batch; weights as :func:`balance`."""
    terms = Terms(spec.num_stages)
    weights = np.zeros(terms.count)
    weights[terms.forward] = weights[terms.transfer_forward] = 1.0
    if not spec.splits_backward:
        weights[terms.backward] = weights[terms.transfer_backward] = 1.0
    return weights


def promise(spec: PipelineSchedule, widths: Sequence[int]) -> np.ndarray:
    """About what plans of a setting take where workers are level, no bound: weights as :func:`balance`, with what schedules of the
    kind have to wait while the pipeline fills and drains."""
    terms, count, depth = Terms(spec.num_stages), spec.num_micro_batches, spec.num_workers
    waiting = (depth - 1) / spec.groups
    if spec.num_pipelines > 1:
        waiting = depth / spec.num_pipelines - 1
    if spec.name == "gems":
        waiting = count * (depth / 2 - 1)
    elif spec.splits_backward:
        waiting /= 2
    elif spec.groups > 1:
        # Of fewer micro-batches than workers each group of stages begins anew.
        waiting += max(0, depth - count) * (1 - 1 / spec.groups)
    share = np.array(widths) / sum(widths[:depth])
    weights = np.zeros(terms.count)
    for part in (terms.forward, terms.backward, terms.recompute):
        weights[part] = (count + waiting) * share
    weights[terms.backward] *= [spec.backward_passes(stage) for stage in range(spec.num_stages)]
    weights[terms.all_reduce] = share
    return weights


def loads(spec: PipelineSchedule) -> list[np.ndarray]:
    """What each worker puts through its stages: the simplest of (2); in the order of :class:`autoddl.pipelines.stepgraph.Terms`."""
    terms, found = Terms(spec.num_stages), []
    counts = micro_batches_of(spec.num_workers, spec.num_micro_batches, spec.num_pipelines)
    for held in homes(spec.num_workers, spec.groups, spec.num_pipelines):
        weights = np.zeros(terms.count)
        for pipeline, stage in held:
            weights[terms.forward.start + stage] += counts[pipeline]
            weights[terms.backward.start + stage] += counts[pipeline] * spec.backward_passes(stage)
            weights[terms.recompute.start + stage] += counts[pipeline]
        found.append(weights)
    return found


def bound_class(spec: PipelineSchedule) -> tuple[object, ...]:
    """Schedules of one class, of as many micro-batches, have the same :func:`balance`."""
    return spec.name == "gems", spec.synchronous, spec.splits_backward, spec.groups, spec.num_pipelines


def least_of_cuts(of_units: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The least sum over all cuts of a chain in stages of one unit or more.

    Args:
        of_units: what each unit would add to every stage; shape (..., stages, units).
        after: what the boundary behind each stage but the last adds where the next one begins with a unit; shape
            (stages - 1, units + 1).

    Returns:
        shape (...).
    """
    num_stages, num_units = of_units.shape[-2:]
    sums = np.zeros((*of_units.shape[:-1], num_units + 1))
    np.cumsum(of_units, axis=-1, out=sums[..., 1:])
    best = np.full((*of_units.shape[:-2], num_units + 1), np.inf)
    best[..., 0] = 0.0
    for stage in range(num_stages):
        own = sums[..., stage, :]
        begun = np.minimum.accumulate(best - own, axis=-1)
        best[..., 1:] = begun[..., :-1] + own[..., 1:]
        best[..., 0] = np.inf
        if stage < num_stages - 1:
            best += after[stage]
    return np.asarray(best[..., -1])
