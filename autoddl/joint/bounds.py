"""Lower bounds on the step of a setting (mesh, micro-batch, schedule), for all its cuts at once, before any stage is
searched; from what its units take at least (:mod:`.units`), each on the mesh of its stage.

**Any schedule.** Let c(s) be the busy time of stage s for one micro-batch, F(s) + B(s) = c(s).  A worker that puts N(s)
micro-batches through its stages s works sum N(s) c(s).  It cannot begin before some micro-batch has come through all stages
before the first of its own, and after its last backward the gradient still has to go back through these.  So, a = its first
stage,

    step  >=  sum over its stages of N(s) c(s)  +  sum over s < a of c(s)                                           (1)

Whichever stage it finishes last is reduced after all that work: with ``whole`` in place of N(s) c(s) of one of its stages, the
one that this adds least to, and the forwards' share of the second sum alone, of which nothing is counted, the same holds.  (2)

Where backwards are of half a micro-batch (Chimera's halving), the last one goes back with half the work, F + B / 2 >= c / 2: half
of the second sum is counted.

Where the backward is split, c counts it as often as it is gone through, and weight parts may come after the last gradient has
gone: only the forwards' share of the second sum holds, and none of it is counted.  Asynchronous schedules have no beginning and no
end: their period is at least the work alone.

In GEMS a micro-batch's backward follows that of the one before through all the workers:

    step  >=  N sum over all s of B(s),   B >= c / 2                                                               (3)

**After the search** of a cut's stages, with their real F, B, recomputations R, c = F + B + R, and all-reduces A, the same is
taken with its parts (a recomputation need not wait for the gradient, so it is no part of the way back; the stage that a
worker finishes last is reduced after all its work, which may take longer than the way back), and for 1F1B with K(w) warm-up
forwards, since a worker can do no more than these and one recomputation before the first gradient is back,

    step  >=  before(w) + F(w) + sum over s > w of F(s) + B(s)  +  N c(w) - K(w) F(w) - R(w)  +  after(w)             (4)
    before(w) = sum over s < w of F(s),    after(w) = max over a <= w of ( sum over a <= s < w of B(s) + A(a) )

Transfers are left out everywhere.

**Under the memory limit.** For any price mu >= 0 of a byte, a worker's work (and what is reduced last) is at least

    sum over its layers of min over strategies, and ways of recomputation, of ( seconds + mu bytes )  -  mu limit     (5)

the Lagrangian dual of the least work that fits, layer by layer; it takes the place of the work in (1) and (2).  Recomputing a whole
stage takes at least what recomputing it layer by layer does, where redistributions are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from autoddl.pipelines.generators.chimera import placements

from .configuration import PipelineSchedule
from .interior import Interior
from .units import ROUNDING, Units

__all__ = [
    "bound_class",
    "bounds_of_cuts",
    "bounds_under_limit",
    "homes",
    "micro_batches_of",
    "refined_bound",
    "sums_of_cuts",
]

#: How much of the second sum of (1) counts, by the kind of a class.
_SHARES_OF_WAY = {"fill": 1.0, "halving": 0.5, "zero-bubble": 0.0, "gems": 0.0, "period": 0.0}


def bound_class(spec: PipelineSchedule) -> tuple[str, int, int]:
    """Schedules of one class have the same bounds before the search."""
    kind = "halving" if spec.halves_backwards else "fill"
    if spec.name in ("zero-bubble", "gems"):
        kind = spec.name
    elif not spec.synchronous:
        kind = "period"
    return (kind, spec.groups, spec.num_pipelines)


@lru_cache(maxsize=512)
def homes(num_workers: int, groups: int, num_pipelines: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per worker its (pipeline, stage) pairs."""
    straight = (tuple(range(num_workers)) * groups,)
    placement = placements(num_workers, num_pipelines) if num_pipelines > 1 else straight
    return tuple(
        tuple((p, s) for p, workers in enumerate(placement) for s, owner in enumerate(workers) if owner == worker)
        for worker in range(num_workers)
    )


def micro_batches_of(num_workers: int, num_micro_batches: int, num_pipelines: int) -> tuple[int, ...]:
    """How many micro-batches each pipeline gets: whole rounds evenly, and what is left over as evenly as can be."""
    left = num_micro_batches % num_workers if num_pipelines > 1 else num_micro_batches
    each, extra = divmod(left, num_pipelines)
    whole = (num_micro_batches - left) // num_pipelines
    return tuple(whole + each + (pipeline < extra) for pipeline in range(num_pipelines))


def sums_of_cuts(cuts: np.ndarray, of_stages: Sequence[np.ndarray]) -> np.ndarray:
    """What the units of every stage add up to; shape (cuts, stages).

    Args:
        cuts: units per stage, shape (cuts, stages).
        of_stages: per stage the values of all units, as they are where this stage is run.
    """
    stops = np.cumsum(cuts, axis=1)
    starts = stops - cuts
    if all(values is of_stages[0] for values in of_stages):
        sums = np.concatenate([[0.0], np.cumsum(of_stages[0])])
        return np.asarray(sums[stops] - sums[starts])
    found = np.empty(cuts.shape)
    for values in {id(values): values for values in of_stages}.values():
        stages = [s for s, mine in enumerate(of_stages) if mine is values]
        sums = np.concatenate([[0.0], np.cumsum(values)])
        found[:, stages] = sums[stops[:, stages]] - sums[starts[:, stages]]
    return found


def bounds_of_cuts(
    busy: np.ndarray,
    wholes: Mapping[int, np.ndarray],
    num_micro_batches: int,
    num_workers: int,
    of: tuple[str, int, int],
) -> np.ndarray:
    """(1), (2) and (3) for every cut; shape (cuts,).

    Args:
        busy: of every cut and stage, shape (cuts, stages).
        wholes: likewise, for each number of micro-batches that a pipeline gets.
    """
    kind, groups, num_pipelines = of
    bound = np.zeros(len(busy))
    if not len(busy):
        return bound
    before = _SHARES_OF_WAY[kind] * (np.cumsum(busy, axis=1) - busy)
    counts = micro_batches_of(num_workers, num_micro_batches, num_pipelines)
    for held in homes(num_workers, groups, num_pipelines):
        parts = [busy[:, s] * counts[pipeline] for pipeline, s in held]
        work = sum(parts)
        np.maximum(bound, work + before[:, min(s for _, s in held)], out=bound)
        if kind != "period":
            reduced = [work - part + wholes[counts[pipeline]][:, s] for part, (pipeline, s) in zip(parts, held)]
            np.maximum(bound, np.minimum.reduce(reduced), out=bound)
    if kind == "gems":
        np.maximum(bound, num_micro_batches * busy.sum(axis=1) / 2, out=bound)
    return bound * ROUNDING


def bounds_under_limit(
    cuts: np.ndarray,
    spec: PipelineSchedule,
    units: Sequence[Units],
    micro_batch: int,
    needs: Sequence[tuple[float, int]],
    held: Sequence[Sequence[tuple[int, int]]],
    recomputations: Sequence[str],
    limit_bytes: float,
    price: float,
    busy: np.ndarray,
) -> np.ndarray:
    """(5) in place of the work of (1) and (2), for every cut.

    Args:
        units: per stage those of its mesh.
        needs: per stage (micro-batches in flight, weight versions).
        held: per worker its (pipeline, stage) pairs.
        busy: of every cut and stage.
    """
    counts = micro_batches_of(spec.num_workers, spec.num_micro_batches, spec.num_pipelines)
    stops = np.cumsum(cuts, axis=1)
    starts = stops - cuts
    known: dict[object, tuple[np.ndarray, np.ndarray]] = {}

    def stage(s: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        plain = whole = np.full(len(cuts), np.inf)
        passes = spec.backward_passes(s)
        for recompute in recomputations:
            key = (id(units[s]), count, passes, needs[s], recompute)
            if key not in known:
                both = units[s].priced(micro_batch, count, passes, needs[s], price, recompute)
                known[key] = tuple(np.concatenate([[0.0], np.cumsum(one)]) for one in both)  # type: ignore[assignment]
            extra = 0.0
            if recompute == "stage":
                extra = price * needs[s][0] * micro_batch * units[s].entering[starts[:, s]]
            plain = np.minimum(plain, known[key][0][stops[:, s]] - known[key][0][starts[:, s]] + extra)
            whole = np.minimum(whole, known[key][1][stops[:, s]] - known[key][1][starts[:, s]] + extra)
        return plain, whole

    before = _SHARES_OF_WAY[bound_class(spec)[0]] * (np.cumsum(busy, axis=1) - busy)
    bound = np.zeros(len(cuts))
    done: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    for pairs in held:
        for pipeline, s in pairs:
            if (s, counts[pipeline]) not in done:
                done[s, counts[pipeline]] = stage(s, counts[pipeline])
        parts = [done[s, counts[pipeline]] for pipeline, s in pairs]
        work = sum(plain for plain, _ in parts) - price * limit_bytes
        filled = work + before[:, min(s for _, s in pairs)]
        reduced = np.minimum.reduce([work - plain + whole for plain, whole in parts])
        bound = np.maximum(bound, np.maximum(filled, reduced))
    return bound * ROUNDING


def refined_bound(spec: PipelineSchedule, interiors: Sequence[Interior], flights: Sequence[float]) -> float:
    """(1) to (4) with what the stages of a cut really take.

    Args:
        flights: per stage the most micro-batches in flight.
    """
    count = spec.num_micro_batches
    forward = np.array([one.forward_s for one in interiors])
    backward = np.array([spec.backward_passes(s) * one.backward_s for s, one in enumerate(interiors)])
    again = np.array([one.recompute_s for one in interiors])
    busy = forward + backward + again
    reduce = np.array([one.all_reduce_s for one in interiors])
    before = np.concatenate([[0.0], np.cumsum(forward)])[:-1]
    trips = np.concatenate([[0.0], np.cumsum(forward + backward)])
    kind, groups, num_pipelines = bound_class(spec)
    counts = micro_batches_of(spec.num_workers, count, num_pipelines)
    bound = 0.0
    for held in homes(spec.num_workers, groups, num_pipelines):
        stages = [s for _, s in held]
        first = min(stages)
        work = float(sum(counts[pipeline] * busy[s] for pipeline, s in held))
        if kind != "period":
            # Whichever of its stages a worker finishes last is reduced after all its work.
            back = _SHARES_OF_WAY[kind] * float(trips[first] - before[first])
            work += float(before[first]) + max(back, float(reduce[stages].min()))
        bound = max(bound, work)
    if kind == "gems":
        bound = max(bound, count * float(backward.sum()))
    if spec.name == "1f1b":
        back = np.concatenate([[0.0], np.cumsum(backward)])[:-1]
        after = back + np.maximum.accumulate(reduce - back)
        behind = trips[-1] - trips[1:]
        warm = np.minimum(np.array(flights), count)
        steady = count * busy - warm * forward - again
        bound = max(bound, float((before + forward + behind + steady + after).max()))
    return bound * ROUNDING
