"""Samples with known parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autoddl.calib.measurements import COLLECTIVES, Sample
from autoddl.costmodel.collectives import Collective

#: The collectives that calibration measures.
MEASURED = tuple(collective for collective in Collective if collective.value in COLLECTIVES)
SIZES = tuple(4**k for k in range(6, 13))


def samples_of(
    seconds: Callable[[Collective, int, int, int], float],
    seed: int = 0,
    *,
    jobs: Sequence[int] = (2, 4, 8),
    sizes: Sequence[int] = SIZES,
    cores: int = 0,
    noise: float = 0.05,
    outliers: float = 0.0,
    repetitions: int = 15,
    level: str = "intra-node",
) -> list[Sample]:
    """Repetitions of ``seconds(collective, group, bytes, ranks of the job)`` with relative noise, some of them grossly too slow."""
    rng = np.random.default_rng(seed)
    found = []
    for job in jobs:
        for group in (p for p in (2, 4, 8) if p <= job):
            for collective in MEASURED:
                for size in sizes:
                    times = seconds(collective, group, size, job) * (1 + noise * rng.standard_normal(repetitions))
                    slow = rng.random(repetitions) < outliers
                    times = np.where(slow, times * rng.uniform(2, 20, repetitions), times)
                    found += [
                        Sample(collective.value, level, group, size, i, float(max(t, 1e-9)), "host", "2026-01-02T03:04:05Z",
                               job, job, cores, 1)
                        for i, t in enumerate(times)
                    ]  # fmt: skip
    return found


def ring(alpha: float, beta: float) -> Callable[[Collective, int, int, int], float]:
    """The paper's formula with one (alpha, beta)."""

    def seconds(collective: Collective, group: int, nbytes: int, job: int) -> float:
        return collective.messages(group) * alpha + collective.sent_bytes(group, nbytes) * beta

    return seconds
