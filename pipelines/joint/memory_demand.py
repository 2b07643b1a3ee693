"""What a schedule asks of its stages, from its numbers: micro-batches in flight and weight versions.

=================  =======================================================================================
schedule           most micro-batches of stage s in flight, of N and D workers
=================  =======================================================================================
gpipe, grouped     N
1f1b               min(D - s, N) under policy A, min(2 (D - s) - 1, N) under B
zero-bubble        min(D, N) for H1, min(2 D - 1, N) for H2: warm-up and lag of the weight parts together
gems               1
others             read off the schedule; a long one repeats itself, so a short one of the same kind does
=================  =======================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..memory import weight_versions
from ..planners.inflight import in_flight
from ..schedule import Schedule
from .bounds import homes
from .configuration import PipelineSchedule

__all__ = ["MemoryDemand", "memory_demand_of"]

#: Micro-batches per worker after which a schedule repeats itself.
_UNITS = 2


@dataclass(frozen=True)
class MemoryDemand:
    """What a schedule asks of every stage, whatever the cut, over all its replicas.

    Attributes:
        homes: per worker its (pipeline, stage) pairs.
        in_flight: per stage the most micro-batches in flight.
        versions: per stage the most weight versions at a time.
    """

    homes: tuple[tuple[tuple[int, int], ...], ...]
    in_flight: tuple[float, ...]
    versions: tuple[int, ...]


def memory_demand_of(spec: PipelineSchedule) -> MemoryDemand:
    """Of a schedule.

    Raises:
        GeneratorError: it cannot be generated for its numbers.
    """
    depth, count, num_stages = spec.num_workers, spec.num_micro_batches, spec.num_stages
    options = dict(spec.options)
    flights: list[int] | None = None
    if spec.name in ("gpipe", "grouped-gpipe"):
        flights = [count] * num_stages
    elif spec.name == "1f1b":
        wide = options.get("policy") == "B"
        flights = [min(2 * (depth - s) - 1 if wide else depth - s, count) for s in range(depth)]
    elif spec.name == "zero-bubble":
        flights = [min(2 * depth - 1 if options["policy"] == "H2" else depth, count)] * depth
    elif spec.name == "gems":
        flights = [1] * num_stages
    if flights is not None:
        of_workers = homes(depth, spec.groups, spec.num_pipelines)
        return MemoryDemand(of_workers, tuple(map(float, flights)), (1,) * num_stages)
    return _of_short(_shortened(spec))


def _shortened(spec: PipelineSchedule) -> PipelineSchedule:
    """A schedule with so few micro-batches that nothing new comes after them, and as many left over in the last unit."""
    unit = 2 * spec.num_workers * spec.groups
    extra = spec.num_micro_batches - _UNITS * unit
    if not spec.synchronous or extra <= 0:
        return spec
    return replace(spec, num_micro_batches=_UNITS * unit + extra % unit)


@lru_cache(maxsize=256)
def _of_short(spec: PipelineSchedule) -> MemoryDemand:
    return read_off(spec.schedule(1, (False,) * spec.num_stages))


def read_off(schedule: Schedule) -> MemoryDemand:
    """Of a generated schedule."""
    versions = {} if schedule.is_synchronous else weight_versions(schedule)
    most, copies = [0.0] * schedule.num_stages, [1] * schedule.num_stages
    for of_worker in in_flight(schedule):
        for (pipeline, stage), count in of_worker.items():
            most[stage] = max(most[stage], count)
            copies[stage] = max(copies[stage], versions.get((pipeline, stage), 1))
    of_workers = tuple(schedule.stages_on(worker) for worker in range(schedule.num_workers))
    return MemoryDemand(of_workers, tuple(most), tuple(copies))
