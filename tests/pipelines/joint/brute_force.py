"""The best joint plan by brute force, which shares nothing with the search that it judges.

All of these are enumerated here, and nowhere pruned by a bound of the search:

- the divisions of the devices in bands of nodes and strips of bands, one rectangle for each worker;
- the synchronous schedules, the micro-batches that divide the batch, the cuts of the chain of units;
- per stage the recomputation, every strategy of every layer with all of its choices (:mod:`.brute_force_choices`), and every
  layout in which its input can arrive.

In common with the search are the prices of one layer, of one redistribution and of one message (:mod:`autoddl.costmodel`), and the
generators of schedules.  Sums of prices, all-reduces over replicas, crossings, memory and the times of tasks are written down anew
from the documentation, and :mod:`.test_joint_brute_force` compares them with ``evaluate`` and ``simulate``.

Two laws keep the enumeration small.  All orders of a schedule are fixed, so its makespan is a longest path, which grows with every
one of its times; memory is a sum, which grows with every one of its terms.  So

1.  of all ways to run some layers, with the same layouts where others look at them, those are enough that are not dominated: no
    other one is at most as long and large in everything (``filtered=False`` keeps all of them);
2.  a configuration whose busiest worker alone works as long as the best step found so far need not be timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product

import numpy as np

from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.crossing import crossing
from autoddl.costmodel.distribution import Axis, canonical
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.strategy import Strategy

from .brute_force_stages import (
    FIXED,
    FLYING,
    MODES,
    PASSING,
    REPEATED,
    RUNNING,
    W_AGAIN,
    W_ALL_REDUCE,
    W_BACKWARD,
    W_FORWARD,
    W_SHARED,
    W_UPDATE,
    Home,
    Job,
    Layout,
    Stages,
    Ways,
)
from .pipeline_program import Family, Program, TaskTimes, program_of

__all__ = ["BruteForce", "Found", "FoundStage", "Rectangle", "cuts_of", "divisions", "families"]

#: Choices of ways to run the stages of a cut that are looked at at once.
MAX_CHOICES = 2_000_000


# ---- The space, but for strategies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rectangle:
    """The devices of a worker: of the nodes from ``first_node`` on, as many of each."""

    first_node: int
    nodes: int
    devices: int

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices

    @property
    def shape(self) -> tuple[int, int]:
        return self.nodes, self.devices


def compositions(whole: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a sum, in any order."""
    return [
        tuple(b - a for a, b in zip((0, *places), (*places, whole)))
        for count in range(whole)
        for places in combinations(range(1, whole), count)
    ]


def divisions(num_nodes: int, devices_per_node: int) -> Iterator[tuple[Rectangle, ...]]:
    """Every tiling of the cluster by strips of bands, worker by worker."""
    for bands in compositions(num_nodes):
        first_nodes = [sum(bands[:band]) for band in range(len(bands))]
        for strips in product(compositions(devices_per_node), repeat=len(bands)):
            yield tuple(
                Rectangle(first, nodes, devices)
                for first, nodes, widths in zip(first_nodes, bands, strips)
                for devices in widths
            )


def families(depth: int, count: int, equal: bool) -> Iterator[Family]:
    """The synchronous schedules of 2 or more workers and ``count`` micro-batches."""
    yield Family("gpipe")
    for policy in "AB":
        yield Family("1f1b", (("policy", policy),))
    for policy in ("H1", "H2"):
        yield Family("zero-bubble", (("policy", policy),))
    for groups in (2, 4):
        yield Family("grouped-gpipe", (("groups", groups),), groups)
        if count % depth == 0:
            yield Family("interleaved-1f1b", (("groups", groups),), groups)
    if not equal:
        return
    if depth % 2 == 0 and count >= 2:
        yield Family("gems", num_pipelines=2)
    for pipelines in (2, 4):
        if depth % pipelines == 0 and count >= pipelines:
            least = {"direct": pipelines, "doubling": 2 * depth, "halving": depth + 1}
            for concatenation, enough in least.items():
                if count >= enough:
                    options = (("concatenation", concatenation), ("num_pipelines", pipelines))
                    yield Family("chimera", options, num_pipelines=pipelines)


def cuts_of(num_units: int, num_stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every cut as the first and the behind-the-last unit of every stage."""
    for places in combinations(range(1, num_units), num_stages - 1):
        yield tuple(zip((0, *places), (*places, num_units)))


# ---- Configurations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundStage:
    """Units ``first`` to ``stop - 1``, and the strategies of the layers, with the entry's where it is not the first stage."""

    first: int
    stop: int
    recompute: str
    strategies: dict[str, Strategy]


@dataclass(frozen=True)
class Found:
    """A configuration with its step, the bytes of its fullest device, and those that have to be free there.

    The search adds up the peaks of the stages of a worker, which may be at different moments: so many bytes have to be free.
    """

    step_s: float
    memory_bytes: float
    demand_bytes: float
    rectangles: tuple[Rectangle, ...]
    family: Family
    micro_batch: int
    stages: tuple[FoundStage, ...]

    def __str__(self) -> str:
        shapes = ", ".join(f"{one.nodes} x {one.devices}" for one in self.rectangles)
        stages = "; ".join(
            f"{one.stop - one.first} units, recompute {one.recompute}: "
            + ", ".join(f"{name} {strategy}" for name, strategy in one.strategies.items())
            for one in self.stages
        )
        options = dict(self.family.options)
        return (
            f"{self.step_s * 1e6:.6g} us, {self.memory_bytes:.6g} bytes: {self.family.name} {options} on {shapes}, "
            f"micro-batch {self.micro_batch}: {stages}"
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """All configurations of one cut, or those of some: per stage the ways that they take."""

    bounds: tuple[tuple[int, int], ...]
    homes: tuple[Home, ...]
    ways: tuple[Ways, ...]
    taken: tuple[np.ndarray, ...]

    def column(self, stage: int, column: int) -> np.ndarray:
        return self.ways[stage].rows[self.taken[stage], column]

    def only(self, kept: np.ndarray) -> Batch:
        return Batch(self.bounds, self.homes, self.ways, tuple(rows[kept] for rows in self.taken))


class BruteForce:
    """The best configuration of a job under any memory limit.

    Args:
        filtered: leave out ways to run a stage that are dominated by others.
    """

    def __init__(self, job: Job, filtered: bool = True):
        self.job, self.stages = job, Stages(job, filtered)
        self.num_units = len(self.stages.starts) - 1
        self._fitting = cache(self._that_fit)
        self._crossing_s = cache(self._crossing_seconds)

    def best(self, limit: float = math.inf, pipelines: bool = True, at_once: bool = True) -> Found | None:
        """The configuration of the least step of all that fit so many bytes per device, or of those without a pipeline.

        Args:
            at_once: the peaks of a worker's stages have to fit at once, as in the search, not only each at its moment.
        """
        best: Found | None = None
        for rectangles, family, size in self.settings():
            if family is None:
                best = self._alone(rectangles, size, limit, best)
            elif pipelines:
                best = self._of_schedule(rectangles, family, size, limit, best, at_once)
        return best

    def least_memory(self) -> float:
        """The bytes of a device that have to be free for some configuration, and for none less."""
        least = math.inf
        for rectangles, family, size in self.settings():
            if family is None:
                ways = self.stages.ways(
                    0, self.num_units, self._home(rectangles[0].shape, size), self.job.batch // size, True
                )
                rows = np.zeros((0, 11)) if ways is None else ways.rows
                least = min(least, rows[:, FIXED:].sum(axis=1).min(initial=math.inf))
                continue
            program = self.program(rectangles, family, size)
            for batch in self.batches(rectangles, family, program, size, None):
                least = min(least, self.demand(program, batch).min(initial=math.inf))
        return least

    def settings(self) -> Iterator[tuple[tuple[Rectangle, ...], Family | None, int]]:
        """Devices of the workers, schedule (None: without a pipeline) and micro-batch."""
        for rectangles in divisions(self.job.cluster.num_nodes, self.job.cluster.devices_per_node):
            depth, equal = len(rectangles), len({one.shape for one in rectangles}) == 1
            for size in self.job.micro_batches:
                if depth == 1:
                    yield rectangles, None, size
                    continue
                for family in families(depth, self.job.batch // size, equal):
                    if depth * family.groups <= self.num_units:
                        yield rectangles, family, size

    def program(self, rectangles: tuple[Rectangle, ...], family: Family, size: int) -> Program:
        replicated = tuple(one.num_devices > 1 for one in rectangles)
        return program_of(family, len(rectangles), self.job.batch // size, replicated)

    # ------------------------------------------------------------------------------------------------ without a pipeline

    def _alone(self, rectangles: tuple[Rectangle, ...], size: int, limit: float, best: Found | None) -> Found | None:
        """Nothing overlaps: step = N (forward + backward) + all-reduce + optimizer step."""
        home, count = self._home(rectangles[0].shape, size), self.job.batch // size
        ways = self.stages.ways(0, self.num_units, home, count, limit < math.inf)
        if ways is None:
            return best
        rows = ways.rows
        steps = count * (rows[:, W_FORWARD] + rows[:, W_BACKWARD]) + rows[:, W_ALL_REDUCE] + rows[:, W_UPDATE]
        memory = rows[:, FIXED:].sum(axis=1)
        steps = np.where(memory <= limit, steps, math.inf)
        row = int(steps.argmin())
        if steps[row] >= (math.inf if best is None else best.step_s):
            return best
        strategies = self.stages.strategies(ways, row, 0, self.num_units, home)
        stage = FoundStage(0, self.num_units, MODES[ways.modes[row]], strategies)
        taken_bytes = float(memory[row])
        return Found(float(steps[row]), taken_bytes, taken_bytes, rectangles, Family("1f1b"), size, (stage,))

    # --------------------------------------------------------------------------------------------------------- pipelines

    def _of_schedule(
        self,
        rectangles: tuple[Rectangle, ...],
        family: Family,
        size: int,
        limit: float,
        best: Found | None,
        at_once: bool,
    ) -> Found | None:
        program = self.program(rectangles, family, size)
        known_s = math.inf if best is None else best.step_s
        for batch in self.batches(rectangles, family, program, size, limit):
            # The busiest worker alone.
            kept = self.busy_s(family, program, batch) < known_s
            if limit < math.inf:
                kept &= (self.demand if at_once else self.memory)(program, batch) <= limit
            if not kept.any():
                continue
            left = batch.only(np.flatnonzero(kept))
            steps = program.makespans(self.times(rectangles, family, program, left))
            row = int(np.argmin(np.broadcast_to(steps, left.taken[0].shape)))
            if steps[row] < known_s:
                known_s = float(steps[row])
                best = self.found(rectangles, family, program, size, left, row, known_s)
        return best

    def batches(
        self, rectangles: tuple[Rectangle, ...], family: Family, program: Program, size: int, limit: float | None
    ) -> Iterator[Batch]:
        """Cut by cut all choices of ways to run the stages, those left out that do not fit by themselves.

        Args:
            limit: bytes of a device; None: all ways, also those that are of use for nothing but their few bytes.
        """
        placement, num_stages = program.schedule.placement, program.schedule.num_stages
        homes, most, running, lone = [], [], [], []
        for stage in range(num_stages):
            workers = [of_pipeline[stage] for of_pipeline in placement]
            level = int(len({rectangles[worker].first_node for worker in workers}) == 1)
            homes.append(self._home(rectangles[workers[0]].shape, size, family, len(workers), level))
            most.append(max(program.most_in_flight[worker][p, stage] for p, worker in enumerate(workers)))
            running.append(
                max(moment[p, stage][1] for p, worker in enumerate(workers) for moment in program.moments[worker])
            )
            lone.append(all(len(program.most_in_flight[worker]) == 1 for worker in workers))
        for bounds in cuts_of(self.num_units, num_stages):
            offered = [
                self._fitting(*ends, home, *rest, limit)
                for ends, home, *rest in zip(bounds, homes, most, running, lone)
            ]
            ways = tuple(one for one in offered if one is not None)
            if len(ways) < num_stages:
                continue
            sizes = [len(one.rows) for one in ways]
            assert math.prod(sizes) <= MAX_CHOICES, f"{sizes} ways are too many for brute force"
            yield Batch(bounds, tuple(homes), ways, np.unravel_index(np.arange(math.prod(sizes)), sizes))

    def _home(
        self, shape: tuple[int, int], size: int, family: Family | None = None, replicas: int = 1, level: int = 1
    ) -> Home:
        """Gradients are divided in every pass back (zero 2 and 3) only where each micro-batch has a single one."""
        most_zero = 3 if self.job.zero == "auto" else 0
        if family is None:
            return Home(shape, size, most_zero=most_zero)
        if family.halves or family.splits_backwards:
            most_zero = min(most_zero, 1)
        return Home(shape, size, family.halves, replicas, level, most_zero)

    def _that_fit(
        self, first: int, stop: int, home: Home, flying: float, running: float, is_lone: bool, limit: float | None
    ) -> Ways | None:
        """Those that fit by themselves: of a stage that has its workers to itself that is all there is to say of memory."""
        ways = self.stages.ways(first, stop, home, 0, limit != math.inf)
        if ways is None or limit is None or limit == math.inf:
            return ways
        rows = ways.rows
        own = rows[:, FIXED] + flying * rows[:, FLYING] + running * rows[:, RUNNING] + rows[:, REPEATED:].sum(axis=1)
        kept = own <= limit
        if not kept.any():
            return None
        return self.stages.best_of(ways.only(np.flatnonzero(kept)), 0, limited=not is_lone)

    def demand(self, program: Program, batch: Batch, counted: Sequence[bool] | None = None) -> np.ndarray:
        """Bytes that have to be free on a device of the fullest worker (formula: :mod:`autoddl.pipelines.joint.stage_search`).

        Args:
            counted: which workers count; None: all.
        """
        fullest = np.zeros(1)
        for worker, (held, moments) in enumerate(zip(program.most_in_flight, program.moments)):
            if counted is not None and not counted[worker]:
                continue
            resident, passing = np.zeros(1), np.zeros(1)
            for key, flying in held.items():
                column = partial(batch.column, key[1])
                running = max(moment[key][1] for moment in moments)
                activations = flying * column(FLYING) + running * column(RUNNING) + column(REPEATED)
                resident = resident + column(FIXED) + activations
                passing = np.maximum(passing, column(PASSING))
            fullest = np.maximum(fullest, resident + passing)
        return fullest

    def memory(self, program: Program, batch: Batch) -> np.ndarray:
        """Bytes of a device of the fullest worker (formula: :mod:`autoddl.pipelines.joint.worker_memory`)."""
        fullest = np.zeros(1)
        alone = [len(held) == 1 for held in program.most_in_flight]
        if any(alone):
            fullest = self.demand(program, batch, alone)
        for held, moments in zip(program.most_in_flight, program.moments):
            if len(held) == 1:
                continue
            columns = {key: partial(batch.column, key[1]) for key in held}
            activations = np.zeros(1)
            for moment in moments:
                alive = sum(
                    flying * columns[key](FLYING) + running * columns[key](RUNNING)
                    for key, (flying, running) in moment.items()
                )
                activations = np.maximum(activations, alive)
            for column in (REPEATED, PASSING):
                activations = activations + np.max([columns[key](column) for key in held], axis=0)
            fullest = np.maximum(fullest, activations + sum(columns[key](FIXED) for key in held))
        return fullest

    def busy_s(self, family: Family, program: Program, batch: Batch) -> np.ndarray:
        """Seconds that the busiest worker computes, and communicates inside its stages."""
        busiest = np.zeros(1)
        for held in program.micro_batches:
            busy = np.zeros(1)
            for stage, count in held.items():
                passes = 2 if family.splits_backwards and stage else 1
                seconds = batch.column(stage, W_FORWARD) + batch.column(stage, W_AGAIN)
                busy = busy + count * (seconds + passes * batch.column(stage, W_BACKWARD))
            busiest = np.maximum(busiest, busy)
        return busiest

    def times(self, rectangles: tuple[Rectangle, ...], family: Family, program: Program, batch: Batch) -> TaskTimes:
        """Of each stage and boundary, in every configuration.

        Ranks go back through a whole stage for each part of a split backward pass; of the first stage, whose input wants no
        gradient, only the part of the weights has anything to do.
        """
        stages = range(len(batch.bounds))
        once = [batch.column(stage, W_BACKWARD) for stage in stages]
        whole = [one * (2 if family.splits_backwards and stage else 1) for stage, one in enumerate(once)]
        crossings = [self._boundary(rectangles, program, batch, stage) for stage in stages[:-1]]
        return TaskTimes(
            forward=[batch.column(stage, W_FORWARD) for stage in stages],
            backward=whole,
            backward_input=[one if stage else 0 * one for stage, one in enumerate(once)],
            again=[batch.column(stage, W_AGAIN) for stage in stages],
            all_reduce=[
                batch.column(stage, W_ALL_REDUCE) + self._shared_s(rectangles, program, batch, stage)
                for stage in stages
            ],
            update=[batch.column(stage, W_UPDATE) for stage in stages],
            there=[there for there, _ in crossings],
            back=[back for _, back in crossings],
        )

    def _shared_s(
        self, rectangles: tuple[Rectangle, ...], program: Program, batch: Batch, stage: int
    ) -> np.ndarray | float:
        """Gradients of a weight that another stage has, too, are all-reduced between both workers."""
        homes = [
            next(s for s, (first, stop) in enumerate(batch.bounds) if name in self._names(first, stop))
            for name in self.stages.tie
        ]
        if stage not in homes or homes[0] == homes[1]:
            return 0.0
        workers = [program.schedule.placement[0][one] for one in homes]
        if workers[0] == workers[1]:
            return 0.0
        level = int(rectangles[workers[0]].first_node == rectangles[workers[1]].first_node)
        link = self.job.cluster.links[level]
        nbytes = np.maximum(*(batch.column(one, W_SHARED) for one in homes))
        known = {one: link.time(Step(Collective.ALL_REDUCE, Axis(2, 1), one)) for one in np.unique(nbytes).tolist()}
        return np.array([known[one] for one in nbytes.tolist()])

    def _names(self, first: int, stop: int) -> set[str]:
        return {layer.name for layer in self.stages.members(first, stop)}

    def _boundary(
        self, rectangles: tuple[Rectangle, ...], program: Program, batch: Batch, stage: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of what one micro-batch sends to the next stage, and of the gradient back."""
        placement = program.schedule.placement
        pairs = [(rectangles[workers[stage]], rectangles[workers[stage + 1]]) for workers in placement]
        together = all(a.first_node == b.first_node for a, b in pairs)
        here, there = pairs[0]
        exits = batch.ways[stage].exits[batch.taken[stage]]
        entries = batch.ways[stage + 1].entries[batch.taken[stage + 1]]
        layouts = list(self.stages.layouts)
        name = self.stages.members(*batch.bounds[stage])[-1].name
        seconds = np.full((2, len(layouts), len(layouts)), math.nan)
        for a, b in np.unique(np.column_stack([exits, entries]), axis=0).tolist():
            ends, size = (layouts[a], layouts[b]), batch.homes[stage].micro_batch
            seconds[0, a, b] = self._crossing_s(name, size, here.shape, there.shape, together, *ends)
            seconds[1, a, b] = self._crossing_s(name, size, there.shape, here.shape, together, *ends[::-1])
        return seconds[0, exits, entries], seconds[1, exits, entries]

    def _crossing_seconds(
        self,
        name: str,
        size: int,
        sender: tuple[int, int],
        receiver: tuple[int, int],
        together: bool,
        source: Layout,
        target: Layout,
    ) -> float:
        """Of the busiest rank at either end, on either level: alpha * its messages + its bytes * beta."""
        layer, itemsize = self.job.graph[name], self.stages.workload(size).itemsize
        shape = edge_shape(layer, size)
        if (
            max(math.prod(p0 for p0, _ in layout) for layout in (source, target)) > size
        ):  # ranks share samples: rows are sent
            shape = (size * layer.output_shape[0], layer.output_shape[1])
        element = size * layer.output_elements * itemsize / math.prod(shape)
        inter, intra = self.job.cluster.links
        totals: dict[tuple[bool, str, int], float] = {}
        for piece in crossing(canonical(source), canonical(target), shape):
            inside = together and piece.source // sender[1] == piece.destination // receiver[1]
            link = intra if inside else inter
            seconds = link.latency_s + piece.num_elements * element / link.bandwidth
            for end in ((inside, "sends", piece.source), (inside, "receives", piece.destination)):
                totals[end] = totals.get(end, 0.0) + seconds
        return max(totals.values())

    def found(
        self,
        rectangles: tuple[Rectangle, ...],
        family: Family,
        program: Program,
        size: int,
        batch: Batch,
        row: int,
        step_s: float,
    ) -> Found:
        """One of the configurations with its strategies."""
        memory, demand = (
            np.broadcast_to(count(program, batch), batch.taken[0].shape) for count in (self.memory, self.demand)
        )
        stages = []
        for (first, stop), home, ways, taken in zip(batch.bounds, batch.homes, batch.ways, batch.taken):
            strategies = self.stages.strategies(ways, taken[row], first, stop, home)
            stages.append(FoundStage(first, stop, MODES[ways.modes[taken[row]]], strategies))
        return Found(step_s, float(memory[row]), float(demand[row]), rectangles, family, size, tuple(stages))
