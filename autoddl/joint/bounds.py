"""Lower bounds on the step of a setting (mesh, micro-batch, schedule), for all its cuts at once, before any stage is
searched.

**Units.** At a mesh and a micro-batch every layer, at its own cheapest strategy and with redistributions for nothing, takes
at least some time per micro-batch (``busy``), and at least some time per step with its gradient's all-reduce (``whole`` = N
busy + once).  Both add up over the layers of a stage, whatever its strategies are, with recomputation or without.

**Any schedule.** Let c(s) be the busy time of stage s for one micro-batch, F(s) + B(s) = c(s).  A worker that puts N(s)
micro-batches through its stages s works sum N(s) c(s).  It cannot begin before some micro-batch has come through all stages
before the first of its own, and after its last backward the gradient still has to go back through these.  So, a = its first
stage,

    step  >=  sum over its stages of N(s) c(s)  +  sum over s < a of c(s)                                           (1)

Whichever stage it finishes last is reduced after all that work: with ``whole`` in place of N(s) c(s) of one of its stages, the
one that this adds least to, and the forwards' share of the second sum alone, of which nothing is counted, the same holds.  (2)

Where the backward is split, weight parts may come after the last gradient has gone: only the forwards' share of the second
sum holds, and none of it is counted.  Asynchronous schedules have no beginning and no end: their period is at least the work
alone.

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

**Memory.** What a stage keeps is at least what its layers keep, each at the strategy that keeps the least, at the best of the
ways of recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoddl.pipelines.generators.chimera import placements

from .configuration import PipelineSchedule
from .cutting import ENTRY, Chain
from .interiors import Interior, Interiors

__all__ = [
    "UnitCosts",
    "UnitDuals",
    "UnitMemory",
    "bound_class",
    "bounds_of_cuts",
    "homes",
    "micro_batches_of",
    "refined_bound",
]

#: Bounds are taken down by this, so that sums in another order do not exclude what is equal.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True, eq=False)
class _Column:
    """Of one layer's options: seconds = fixed + samples * slope per micro-batch, and once per step."""

    fixed: np.ndarray
    slope: np.ndarray
    once: np.ndarray
    p0: np.ndarray


def unit_columns(interiors: Interiors, unit: int, layers_again: bool) -> list[_Column]:
    """Of the layers of a unit, the entry left out."""
    few = interiors.mesh.num_devices
    book = interiors.book(unit, unit + 1, layers_again)
    # Affine in samples and micro-batches: three points tell all (see autoddl.costmodel.pricing).
    one, two, larger = (
        book.problem(batch, micro).table.cost for batch, micro in ((few, few), (2 * few, few), (2 * few, 2 * few))
    )
    columns = []
    for variable, a, b, c in zip(book.variables, one, two, larger):
        if variable.layers == (ENTRY,):
            continue
        each, slope = b - a, (c - a) / few
        p0 = np.array([strategy.p0 for strategy in variable.options])
        columns.append(_Column(each - few * slope, slope, np.maximum(a - each, 0.0), p0))
    return columns


class UnitCosts:
    """The least that every unit takes on one mesh, for any micro-batch."""

    def __init__(self, chain: Chain, interiors: Interiors):
        self.chain, self.batch = chain, interiors.workload.batch
        first = {kind: unit for unit, kind in reversed(list(enumerate(chain.kinds)))}
        self._columns = {kind: unit_columns(interiors, unit, False) for kind, unit in first.items()}

    def at(self, micro_batch: int, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(busy per micro-batch, whole of ``count`` of them) of every unit; None where one does not divide over some layer."""
        of_kind: dict[int, tuple[float, float]] = {}
        for kind, columns in self._columns.items():
            busy = whole = 0.0
            for column in columns:
                offered = micro_batch % column.p0 == 0
                if not offered.any():
                    return None
                each = (column.fixed + micro_batch * column.slope)[offered]
                busy += float(each.min())
                whole += float((count * each + column.once[offered]).min())
            of_kind[kind] = (max(busy, 0.0), max(whole, 0.0))
        rows = np.array([of_kind[kind] for kind in self.chain.kinds])
        return rows[:, 0], rows[:, 1]


class UnitMemory:
    """The least bytes per device that every unit needs on one mesh."""

    def __init__(self, chain: Chain, interiors: Interiors):
        self.chain, self.interiors = chain, interiors
        layers = chain.graph.layers
        itemsize, devices = interiors.workload.itemsize, interiors.mesh.num_devices
        entries = [0.0] + [layers[start - 1].output_elements * itemsize / devices for start in chain.starts[1:-1]]
        #: Of one sample of what enters a stage that begins with a unit.
        self.entering = np.array(entries)
        workload = interiors.workload
        self._extra = workload.itemsize / workload.bytes_per_parameter
        self._known: dict[object, np.ndarray] = {}

    def _of_units(self, micro_batch: int, alive: float, versions: int, layers_again: bool) -> np.ndarray:
        key = (micro_batch, alive, versions, layers_again)
        if key not in self._known:
            of_kind: dict[int, float] = {}
            for unit, kind in enumerate(self.chain.kinds):
                if kind not in of_kind:
                    total = 0.0
                    for column in self.interiors.bytes_of(unit, unit + 1, layers_again):
                        offered = micro_batch % column.p0 == 0
                        state = column.state * (1 + (versions - 1) * self._extra)
                        total += float((state + alive * micro_batch * column.kept)[offered].min(initial=np.inf))
                    of_kind[kind] = total
            self._known[key] = np.array([of_kind[kind] for kind in self.chain.kinds])
        return self._known[key]

    def of_stage(
        self,
        starts: np.ndarray,
        stops: np.ndarray,
        micro_batch: int,
        in_flight: float,
        versions: int,
        recomputations: Sequence[str],
    ) -> np.ndarray:
        """The least bytes of stages of units ``starts`` to ``stops``."""
        least = np.full(len(starts), np.inf)
        for recompute in recomputations:
            alive = 1.0 if recompute == "stage" else in_flight
            units = self._of_units(micro_batch, alive, versions, recompute == "layers")
            sums = np.concatenate([[0.0], np.cumsum(units)])
            needed = sums[stops] - sums[starts]
            if recompute == "stage":
                needed = needed + in_flight * micro_batch * self.entering[starts]
            least = np.minimum(least, needed)
        return least * _ROUNDING


class UnitDuals:
    """The terms of (5) for every unit of one mesh."""

    def __init__(self, chain: Chain, interiors: Interiors, memory: UnitMemory):
        self.chain, self.interiors, self.memory = chain, interiors, memory
        self._extra = interiors.workload.itemsize / interiors.workload.bytes_per_parameter
        self._first = {kind: unit for unit, kind in reversed(list(enumerate(chain.kinds)))}
        self._known: dict[tuple[int, bool], list[tuple[_Column, np.ndarray, np.ndarray]]] = {}

    def _columns(self, kind: int, layers_again: bool) -> list[tuple[_Column, np.ndarray, np.ndarray]]:
        """Per layer its times, its state and what it keeps of a sample."""
        if (kind, layers_again) not in self._known:
            unit = self._first[kind]
            book = self.interiors.book(unit, unit + 1, layers_again)
            every = zip(book.variables, self.interiors.bytes_of(unit, unit + 1, layers_again))
            kept = [column for variable, column in every if variable.layers != (ENTRY,)]
            times = unit_columns(self.interiors, unit, layers_again)
            self._known[kind, layers_again] = [(a, b.state, b.kept) for a, b in zip(times, kept)]
        return self._known[kind, layers_again]

    def of_units(
        self, micro_batch: int, count: int, in_flight: float, versions: int, price: float, recompute: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(without, with the all-reduce) of every unit, for ``count`` micro-batches."""
        found: dict[int, tuple[float, float]] = {}
        alive = 1.0 if recompute == "stage" else in_flight
        for kind in self._first:
            plain = whole = 0.0
            times = self._columns(kind, recompute != "none")
            kept = self._columns(kind, recompute == "layers")
            for (column, _, _), (_, state, each_kept) in zip(times, kept):
                offered = micro_batch % column.p0 == 0
                nbytes = state * (1 + (versions - 1) * self._extra) + alive * micro_batch * each_kept
                seconds = count * (column.fixed + micro_batch * column.slope) + price * nbytes
                plain += float(seconds[offered].min(initial=np.inf))
                whole += float((seconds + column.once)[offered].min(initial=np.inf))
            found[kind] = (plain, whole)
        rows = np.array([found[kind] for kind in self.chain.kinds])
        return rows[:, 0], rows[:, 1]

    def bounds_of_cuts(
        self,
        cuts: np.ndarray,
        micro_batch: int,
        counts: Sequence[int],
        held: Sequence[Sequence[tuple[int, int]]],
        needs: Sequence[tuple[float, int]],
        recomputations: Sequence[str],
        limit_bytes: float,
        price: float,
        before: np.ndarray | None,
    ) -> np.ndarray:
        """(5) in place of the work of (1) and (2), for every cut.

        Args:
            counts: micro-batches of every pipeline.
            held: per worker its (pipeline, stage) pairs.
            needs: per stage (micro-batches in flight, weight versions).
            before: per cut and stage the least time before it, where that counts; None where not.
        """
        stops = np.cumsum(cuts, axis=1)
        starts = stops - cuts
        known: dict[object, tuple[np.ndarray, np.ndarray]] = {}

        def stage(s: int, count: int) -> tuple[np.ndarray, np.ndarray]:
            plain = whole = np.full(len(cuts), np.inf)
            for recompute in recomputations:
                key = (count, needs[s], recompute)
                if key not in known:
                    units = self.of_units(micro_batch, count, *needs[s], price, recompute)
                    known[key] = tuple(np.concatenate([[0.0], np.cumsum(one)]) for one in units)  # type: ignore[assignment]
                extra = 0.0
                if recompute == "stage":
                    extra = price * needs[s][0] * micro_batch * self.memory.entering[starts[:, s]]
                plain = np.minimum(plain, known[key][0][stops[:, s]] - known[key][0][starts[:, s]] + extra)
                whole = np.minimum(whole, known[key][1][stops[:, s]] - known[key][1][starts[:, s]] + extra)
            return plain, whole

        bound = np.zeros(len(cuts))
        done: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        for pairs in held:
            for pipeline, s in pairs:
                if (s, counts[pipeline]) not in done:
                    done[s, counts[pipeline]] = stage(s, counts[pipeline])
            parts = [done[s, counts[pipeline]] for pipeline, s in pairs]
            work = sum(plain for plain, _ in parts) - price * limit_bytes
            filled = work if before is None else work + before[:, min(s for _, s in pairs)]
            reduced = np.minimum.reduce([work - plain + whole for plain, whole in parts])
            bound = np.maximum(bound, np.maximum(filled, reduced))
        return bound * _ROUNDING


def bound_class(spec: PipelineSchedule) -> tuple[str, int, int]:
    """Schedules of one class have the same bounds before the search."""
    kind = "fill"
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


def bounds_of_cuts(
    cuts: np.ndarray,
    busy: np.ndarray,
    wholes: Mapping[int, np.ndarray],
    num_micro_batches: int,
    num_workers: int,
    of: tuple[str, int, int],
) -> np.ndarray:
    """(1), (2) and (3) for every cut; shape (cuts,).

    Args:
        cuts: units per stage, shape (cuts, stages).
        busy: of every unit.
        wholes: of every unit, for each number of micro-batches that a pipeline gets.
    """
    kind, groups, num_pipelines = of
    stops = np.cumsum(cuts, axis=1)
    starts = stops - cuts
    sums = np.concatenate([[0.0], np.cumsum(busy)])
    stage = sums[stops] - sums[starts]
    before = sums[starts]
    bound = np.zeros(len(cuts))
    counts = micro_batches_of(num_workers, num_micro_batches, num_pipelines)
    whole_stage = {}
    for count, whole in wholes.items():
        totals = np.concatenate([[0.0], np.cumsum(whole)])
        whole_stage[count] = totals[stops] - totals[starts]
    for held in homes(num_workers, groups, num_pipelines):
        parts = {s: stage[:, s] * counts[pipeline] for pipeline, s in held}
        work = sum(parts.values())
        filled = work + before[:, min(parts)] if kind == "fill" else work
        np.maximum(bound, filled, out=bound)
        if kind != "period":
            reduced = [work - parts[s] + whole_stage[counts[pipeline]][:, s] for pipeline, s in held]
            np.maximum(bound, np.minimum.reduce(reduced), out=bound)
    if kind == "gems":
        np.maximum(bound, num_micro_batches * sums[-1] / 2, out=bound)
    return bound * _ROUNDING


def refined_bound(spec: PipelineSchedule, interiors: Sequence[Interior], flights: Sequence[float]) -> float:
    """(1) to (4) with what the stages of a cut really take.

    Args:
        flights: per stage the most micro-batches in flight.
    """
    count = spec.num_micro_batches
    forward = np.array([one.forward_s for one in interiors])
    busy = np.array([one.busy_s for one in interiors])
    backward = np.array([one.backward_s for one in interiors])
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
            back = float(trips[first] - before[first]) if kind == "fill" else 0.0
            work += float(before[first]) + max(back, float(reduce[stages].min()))
        bound = max(bound, work)
    if kind == "gems":
        bound = max(bound, count * float(backward.sum()))
    if spec.name == "1f1b":
        back = np.concatenate([[0.0], np.cumsum(backward)])[:-1]
        after = back + np.maximum.accumulate(reduce - back)
        behind = trips[-1] - trips[1:]
        warm = np.minimum(np.array(flights), count)
        again = busy - forward - backward
        steady = count * busy - warm * forward - again
        bound = max(bound, float((before + forward + behind + steady + after).max()))
    return bound * _ROUNDING
