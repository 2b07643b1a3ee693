"""Random durations of tasks and transfers, for property tests of schedules."""

from __future__ import annotations

from random import Random

from autoddl.pipelines import Times

__all__ = ["random_times"]


def random_times(num_stages: int, generator: Random) -> Times:
    """Durations between 0.05 and 3, and a latency of at most 0.2."""

    def some(count: int) -> list[float]:
        return [generator.uniform(0.05, 3) for _ in range(count)]

    return Times.of(
        num_stages,
        forward=some(num_stages),
        backward=some(num_stages),
        all_reduce=some(num_stages),
        update=some(num_stages),
        transfer=some(num_stages - 1),
        transfer_backward=some(num_stages - 1),
        transfer_latency=generator.uniform(0, 0.2),
    )
