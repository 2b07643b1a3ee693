"""The memory demand of schedules: micro-batches in flight and weight versions of every stage.

======================  ===================================================================================
schedule                largest number of micro-batches of stage s in flight, of N, with D workers
======================  ===================================================================================
gpipe, grouped-gpipe    N
1f1b                    min(D - s, N) under policy A, min(2 (D - s) - 1, N) under policy B
zero-bubble             min(D, N) for H1, min(2 D - 1, N) for H2: warm-up and delayed weight parts together
gems                    1
chimera                 counted from the slots of its passes (:func:`.generators.chimera.flights`)
others                  read off a generated schedule; a long schedule is periodic, so a short one suffices
======================  ===================================================================================

If a stage is recomputed as a whole, it keeps its activations from the second forward pass to the end of the backward pass: those
of a single pass, since the backward pass directly follows.  In zero-bubble schedules the weight part of the backward pass is
delayed, so that stage s keeps the activations of min(s + 1, N) micro-batches under H1, and of min(2 s + 1, N) under H2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..generators import chimera
from ..memory import weight_versions
from ..planners.inflight import in_flight
from ..schedule import Kind, Schedule
from .bounds import homes
from .configuration import PipelineSchedule

__all__ = ["MemoryDemand", "approximate_demand_of", "memory_demand_of"]

#: Number of periods after which no worker has more micro-batches in flight than before.
_NUM_PERIODS = 2


@dataclass(frozen=True)
class MemoryDemand:
    """The memory demand of a schedule, which is the same for all cuts.

    Attributes:
        homes: Per worker, its (pipeline, stage) pairs.
        in_flight: Per stage, the largest number of micro-batches in flight on any worker.
        versions: Per stage, the largest number of weight versions at a time on any worker.
        running: Per stage, the largest number of micro-batches whose activations it keeps if the whole stage is recomputed: those
            in a forward pass, and those between the second forward pass and the end of the backward pass.
    """

    homes: tuple[tuple[tuple[int, int], ...], ...]
    in_flight: tuple[float, ...]
    versions: tuple[int, ...]
    running: tuple[float, ...]


def memory_demand_of(spec: PipelineSchedule) -> MemoryDemand:
    """Return the memory demand of a schedule.

    Raises:
        GeneratorError: the family has no schedule for these numbers.

    >>> memory_demand_of(PipelineSchedule("1f1b", 4, 8, (("policy", "A"),))).in_flight
    (4.0, 3.0, 2.0, 1.0)
    """
    return _known_demand(spec) or _generated_demand(_shortened(spec))


def approximate_demand_of(spec: PipelineSchedule) -> MemoryDemand:
    """Return about the memory demand of a schedule, without generating the schedule if it is synchronous.

    Raises:
        GeneratorError: as of :func:`memory_demand_of`.
    """
    known = _known_demand(spec)
    if known is not None or not spec.synchronous:
        return known or memory_demand_of(spec)
    # Workers begin with as many passes through one of their stages as there are stages before the first gradient arrives.
    depth, groups, count = spec.num_workers, spec.groups, spec.num_micro_batches
    behind = [depth - 1 - stage % depth for stage in range(spec.num_stages)]
    flights = [min((2 * rest + (groups - 1) * depth + 1) / groups, count) for rest in behind]
    stages_of_workers = homes(depth, groups, spec.num_pipelines)
    ones = (1,) * spec.num_stages
    return MemoryDemand(stages_of_workers, tuple(flights), ones, tuple(map(float, ones)))


@lru_cache(maxsize=256)
def _known_demand(spec: PipelineSchedule) -> MemoryDemand | None:
    """The demand of a schedule that need not be generated for it; None for others.

    Raises:
        GeneratorError: as of :func:`memory_demand_of`.
    """
    depth, count, num_stages = spec.num_workers, spec.num_micro_batches, spec.num_stages
    options: dict[str, Any] = dict(spec.options)
    flights: Sequence[float] | None = None
    largest_pass = 1.0
    if spec.name in ("gpipe", "grouped-gpipe"):
        flights = [count] * num_stages
    elif spec.name == "1f1b":
        is_policy_b = options.get("policy") == "B"
        flights = [min(2 * (depth - s) - 1 if is_policy_b else depth - s, count) for s in range(depth)]
    elif spec.name == "zero-bubble":
        flights = [min(2 * depth - 1 if options["policy"] == "H2" else depth, count)] * depth
    elif spec.name == "gems":
        flights = [1] * num_stages
    elif spec.name == "chimera":
        flights, largest_pass = chimera.flights(depth, _shortened(spec).num_micro_batches, **options)
    if flights is None:
        return None
    stages_of_workers = homes(depth, spec.groups, spec.num_pipelines)
    running = [largest_pass] * num_stages
    if spec.name == "zero-bubble":
        running = [min(2 * s + 1 if options["policy"] == "H2" else s + 1, count) for s in range(depth)]
    return MemoryDemand(stages_of_workers, tuple(map(float, flights)), (1,) * num_stages, tuple(map(float, running)))


def _shortened(spec: PipelineSchedule) -> PipelineSchedule:
    """A schedule with the same memory demand, and with fewer micro-batches by a whole number of periods."""
    extra = spec.num_micro_batches - _NUM_PERIODS * spec.period
    if not spec.synchronous or extra <= 0:
        return spec
    return replace(spec, num_micro_batches=_NUM_PERIODS * spec.period + extra % spec.period)


@lru_cache(maxsize=256)
def _generated_demand(spec: PipelineSchedule) -> MemoryDemand:
    return demand_of_schedule(spec.schedule(1, (False,) * spec.num_stages, validates=False))


def demand_of_schedule(schedule: Schedule) -> MemoryDemand:
    """Return the memory demand of a generated schedule whose backward passes are not split."""
    versions = {} if schedule.is_synchronous else weight_versions(schedule)
    most_in_flight, most_versions = [0.0] * schedule.num_stages, [1] * schedule.num_stages
    for counts in in_flight(schedule):
        for (pipeline, stage), count in counts.items():
            most_in_flight[stage] = max(most_in_flight[stage], count)
            most_versions[stage] = max(most_versions[stage], versions.get((pipeline, stage), 1))
    stages_of_workers = tuple(schedule.stages_on(worker) for worker in range(schedule.num_workers))
    largest_pass = max(float(task.part.size) for _, _, task in schedule.tasks() if task.kind is Kind.FORWARD)
    running = (largest_pass,) * schedule.num_stages
    return MemoryDemand(stages_of_workers, tuple(most_in_flight), tuple(most_versions), running)
