"""Lower bounds on the step of a setting, over all its cuts and all ways to run their stages; cheap ones first.

Every bound is a *linear* one: numbers w >= 0 per stage for its forward, backward, recomputation and all-reduce, and per
boundary for its transfers, such that no plan's step is less than their sum of products.  The least of such a sum over all cuts
is found by dynamic programming over stages and units, where every stage takes at least what its units do at its weights
(:mod:`.units`).

**Balance.**  Some worker has at least the mean of all work.  Let worker s put N micro-batches through its stage (whatever is
done by which replica): N (F + B), and before its first forward N micro-batches' first comes through all stages before it, whose
backward has to follow its last.  The mean over all s of D workers of a scheme of one pipeline with one stage each, that goes
back at once:

    w(s) = ( N + D - 1 - s ) / D    for F(s) and B(s)                                                                       (1)

since stage s is before D - 1 - s others.  Of workers of different widths every one counts by its devices: of the mean over all
devices N share(s) + sum of share(t) over t > s.  Where a worker has several stages, or weight parts may come last: N / D alone.

**Long paths.**  A path of the schedule's graph (:mod:`autoddl.pipelines.stepgraph`): how often it passes each term.           (2)

**Memory.**  For any prices mu >= 0 of a byte on each worker, the sum of (1) or (2) and of mu (bytes - limit) over all workers is a
bound, too: what does not fit costs.  Recomputing a whole stage takes at least what it does without redistributions.
(3)

**Period.**  Of an asynchronous schedule: N (F + B) of a stage, the mean over the workers: N / D as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autoddl.pipelines.generators.chimera import placements
from autoddl.pipelines.stepgraph import Terms

from .configuration import PipelineSchedule

__all__ = ["balance", "bound_class", "homes", "least_of_cuts", "loads", "micro_batches_of", "placement_of"]


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
    terms, count = Terms(spec.num_stages), spec.num_micro_batches
    share = np.array(widths) / sum(widths[: spec.num_workers])
    before = np.zeros(spec.num_stages)
    if bound_class(spec) == (True, 1):
        before = 1.0 - np.cumsum(share)
    passes = np.array([spec.backward_passes(stage) for stage in range(spec.num_stages)])
    weights = np.zeros(terms.count)
    weights[terms.forward] = count * share + before
    weights[terms.backward] = count * share * passes + before
    # The way back of the last micro-batch may do without recomputation: that need not wait for the gradient.
    weights[terms.recompute] = count * share
    return np.maximum(weights, 0.0)


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


def bound_class(spec: PipelineSchedule) -> tuple[bool, int]:
    """Schedules of one class, of as many micro-batches, have the same :func:`balance`."""
    has_way = spec.synchronous and spec.num_pipelines == 1 and not spec.splits_backward
    return has_way, -1 if spec.splits_backward else spec.groups


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
