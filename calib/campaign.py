"""Calibration runs: what to measure, on which ranks, into which file.

``measure_locally`` starts ranks on this machine.  ``measure_in_job`` is called by every rank of a job that a cluster's launcher
started.  Both continue an existing file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError

from .measurements import COLLECTIVES, Sample, SampleFile

__all__ = ["CampaignOptions", "is_in_job", "measure_in_job", "measure_locally"]

#: (m, k, n) of matrix products: square, thin and flat, from 0.1 ms to some 10 ms on one core.
SHAPES = (
    (16, 256, 256),
    (16, 1024, 1024),
    (16, 4096, 1024),
    (64, 64, 512),
    (64, 256, 1024),
    (64, 1024, 4096),
    (128, 512, 64),
    (256, 256, 256),
    (256, 1024, 256),
    (256, 1024, 1024),
    (512, 512, 2048),
)
ELEMENTWISE_BYTES = (1 << 14, 1 << 18, 1 << 21, 1 << 24)
#: Stall timeout [s] of ranks; ranks of a busy machine may be later than the launcher's default allows.
STALL_S = 60.0


@dataclass(frozen=True)
class CampaignOptions:
    """What to measure.

    Attributes:
        ranks: numbers of ranks, with one job for each (local runs only).
        sizes: message sizes in bytes.
        collectives: the collectives, out of :data:`COLLECTIVES`.
        shapes: (m, k, n) of the matrix products.
        elementwise: sizes in bytes of the element-wise operations.
        repetitions: number of repetitions of each setting.
        budget_s: time limit of the whole run, including the start of ranks; None for no limit.
        seed: of the order of settings.
        quiet: show no progress bar.
    """

    ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = tuple(4**k for k in range(6, 13))
    collectives: tuple[str, ...] = COLLECTIVES
    shapes: tuple[tuple[int, int, int], ...] = SHAPES
    elementwise: tuple[int, ...] = ELEMENTWISE_BYTES
    repetitions: int = 100
    budget_s: float | None = None
    seed: int = 0
    quiet: bool = True

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 2:
            raise UserError(f"ranks {list(self.ranks)} should be numbers of at least 2")
        if len(set(self.sizes)) < 2:
            raise UserError(f"sizes {list(self.sizes)} should be at least two, to separate latency from bandwidth")
        if min(self.sizes) < 1 or max(self.sizes) > 2**32:
            raise UserError(f"sizes {min(self.sizes)} to {max(self.sizes)} should be from 1 byte to 4 GiB")
        if self.repetitions < 1:
            raise UserError(f"repetitions {self.repetitions} should be at least 1")
        if self.budget_s is not None and not self.budget_s > 0:
            raise UserError(f"budget {self.budget_s:g} s should be more than 0 seconds")
        unknown = sorted(set(self.collectives) - set(COLLECTIVES))
        if unknown:
            raise UserError(f"collective {unknown[0]!r} is not one of {', '.join(COLLECTIVES)}")


def is_in_job() -> bool:
    """Whether a launcher started this process as one rank of several."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 and "RANK" in os.environ


def measure_locally(options: CampaignOptions, file: SampleFile) -> int:
    """Measure on ranks of this machine, with a job for each number of ranks.

    Returns:
        The number of samples taken.

    Raises:
        UserError: ranks cannot be started, or a sample cannot be written.
        RankError: a rank failed.  The samples taken before an error are in the file.
    """
    from autoddl.pipelines.runtime.ranks.failures import RankError
    from autoddl.pipelines.runtime.ranks.launcher import RankPool
    from autoddl.pipelines.runtime.ranks.network import namespace_available

    from . import measure

    before, start = file.num_written, time.monotonic()
    is_private = bool(namespace_available())  # if possible, keep others from OneFlow's ports
    for position, num_ranks in enumerate(options.ranks):
        settings = tuple(_settings(options, num_ranks))
        done = _done(file.samples, settings, num_ranks)
        if min(done) >= options.repetitions:
            continue
        budget = None
        if options.budget_s is not None:
            # Share the remaining budget evenly among the remaining jobs.
            left = options.budget_s - (time.monotonic() - start)
            budget = left / (len(options.ranks) - position)
            if budget <= 0:
                break
        total = round(sum(max(0, options.repetitions - count) for count in done))
        with progress(f"{num_ranks} ranks", total, options.quiet) as bar:
            begun = time.monotonic()
            with RankPool(num_ranks, private_network=is_private, stall_timeout_s=STALL_S) as pool:
                if budget is not None:
                    budget = max(1.0, budget - (time.monotonic() - begun))
                asked = measure.MeasureOptions(settings, options.repetitions, done, budget, seed=options.seed)

                def keep(rank: int, samples: list[Sample], bar: Any = bar) -> None:
                    file.append(samples)
                    bar.update(len(samples))

                try:
                    pool.run(measure.measure_job, asked, on_report=keep)
                except RankError as error:
                    kept = (
                        f"the {len(file.samples)} samples in {file.path} are kept, and the same command continues them"
                    )
                    raise type(error)(f"{error}; {kept}", error.rank, error.log) from error
    return file.num_written - before


def measure_in_job(options: CampaignOptions, path: str) -> int | None:
    """Measure on the ranks of this job; every rank calls.

    Returns:
        The number of samples taken on rank 0; None on the other ranks.

    Raises:
        UserError: rank 0 cannot write a sample.
    """
    from autoddl.pipelines.runtime.load import load_oneflow

    from . import measure

    flow = load_oneflow()
    num_ranks, rank = flow.env.get_world_size(), flow.env.get_rank()
    settings = tuple(_settings(options, num_ranks))
    file = SampleFile(path) if rank == 0 else None
    done = _done(file.samples, settings, num_ranks) if file else (0.0,) * len(settings)
    # Rank 0 has the file, and sends the counts to all ranks.
    done = tuple(map(float, measure.exchange(np.array(done))[0]))
    asked = measure.MeasureOptions(settings, options.repetitions, done, options.budget_s, seed=options.seed)
    if file is None:
        measure.measure_job(asked)
        return None
    total = round(sum(max(0, options.repetitions - count) for count in done))
    with progress(f"{num_ranks} ranks", total, options.quiet) as bar:

        def keep(samples: list[Sample]) -> None:
            file.append(samples)
            bar.update(len(samples))

        return measure.measure_job(asked, keep)[0]


def _settings(options: CampaignOptions, num_ranks: int) -> list[Any]:
    from . import measure

    found = measure.settings_of(num_ranks, options.sizes, options.collectives)
    return list(dict.fromkeys(found + measure.work_settings(options.shapes, options.elementwise)))


def _done(samples: Sequence[Sample], settings: Sequence[Any], num_ranks: int) -> tuple[float, ...]:
    """The number of samples of each setting from jobs of ``num_ranks`` ranks; disturbed ones count less."""
    from .measure import DISTURBED, DISTURBED_COUNTS

    counts: dict[object, float] = {}
    for sample in samples:
        if sample.job_ranks == num_ranks:
            key = (sample.collective, sample.ranks, sample.stride, sample.bytes, sample.shape)
            counts[key] = counts.get(key, 0.0) + (1.0 if sample.foreign <= DISTURBED else DISTURBED_COUNTS)
    keys = [(s.collective, s.ranks, s.stride, s.num_bytes, "x".join(map(str, s.shape))) for s in settings]
    return tuple(counts.get(key, 0.0) for key in keys)


def progress(what: str, total: int, quiet: bool, unit: str = "sample") -> Any:
    """A progress bar on stderr; it is not shown if stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, disable=True if quiet else None)
