"""Calibration runs: what to measure, on which ranks, into which file.

``measure_locally`` starts ranks on this machine, with a job for each number of ranks.  ``measure_in_job`` is called by every rank
of a job that something else has started.  Both continue an existing file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.devices import CPU
from autoddl.costmodel.errors import UserError

from .devices import elementwise_on, shapes_on, sizes_on
from .measurements import COLLECTIVES, Sample, SampleFile
from .settings import TimedSetting, settings_of, work_settings

__all__ = ["CampaignOptions", "counts_in", "measure_in_job", "measure_locally", "missing", "read_request", "request_of"]

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
        precisions: precisions in whose compute types local work is measured.
        device: the type of device to measure on.
        repetitions: number of repetitions of each setting.
        budget_s: time limit of the whole run, including the start of ranks; None for no limit.
        seed: of the order of settings.
        quiet: show no progress bar.
    """

    ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = sizes_on(CPU)
    collectives: tuple[str, ...] = COLLECTIVES
    shapes: tuple[tuple[int, int, int], ...] = shapes_on(CPU)
    elementwise: tuple[int, ...] = elementwise_on(CPU)
    precisions: tuple[str, ...] = ("float32",)
    device: str = CPU
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
                asked = measure.MeasureOptions(
                    settings, options.repetitions, done, budget, options.device, seed=options.seed
                )

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


def counts_in(samples: Sequence[Sample], options: CampaignOptions, num_ranks: int) -> tuple[float, ...]:
    """The number of samples of each setting of a job of ``num_ranks`` ranks, of those that there are; disturbed ones count less."""
    return _done(samples, _settings(options, num_ranks), num_ranks)


def request_of(options: CampaignOptions, counts: Sequence[float] | None) -> str:
    """What a rank is asked to measure, as JSON: the arguments of :func:`measure_in_job`."""
    return json.dumps({"options": asdict(options), "counts": counts})


def read_request(text: str) -> tuple[CampaignOptions, Sequence[float] | None]:
    """Read a request of :func:`request_of`.

    >>> asked = CampaignOptions(sizes=(4096, 65536), shapes=((2, 3, 4),))
    >>> read_request(request_of(asked, None)) == (asked, None)
    True
    """
    document = json.loads(text)
    fields = {name: _tuples(value) for name, value in document["options"].items()}
    return CampaignOptions(**fields), document["counts"]


def _tuples(value: Any) -> Any:
    """Lists as tuples, also inside."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def measure_in_job(
    options: CampaignOptions, counts: Sequence[float] | None, keep: Callable[[list[Sample]], None]
) -> int:
    """Measure on the ranks of this job; every rank calls.

    Args:
        options: what to measure, the same on all ranks.
        counts: on rank 0, the number of existing samples of each setting (:func:`counts_in`); None: none exist.
        keep: takes samples, on rank 0, as soon as they are measured.

    Returns:
        The number of samples taken.
    """
    from autoddl.pipelines.runtime.load import load_oneflow

    from . import measure
    from .hosts import exchange

    settings = tuple(_settings(options, load_oneflow().env.get_world_size()))
    # Rank 0 has the counts, and sends them to all ranks.
    done = tuple(map(float, exchange(np.array(counts or [0.0] * len(settings), dtype=np.float64))[0]))
    asked = measure.MeasureOptions(
        settings, options.repetitions, done, options.budget_s, options.device, seed=options.seed
    )
    return measure.measure_job(asked, keep)[0]


def missing(samples: Sequence[Sample], options: CampaignOptions, num_ranks: int) -> int:
    """The number of samples that a job of ``num_ranks`` ranks has yet to take."""
    return round(sum(max(0.0, options.repetitions - count) for count in counts_in(samples, options, num_ranks)))


def _settings(options: CampaignOptions, num_ranks: int) -> list[TimedSetting]:
    found = settings_of(num_ranks, options.sizes, options.collectives)
    return list(dict.fromkeys(found + work_settings(options.shapes, options.elementwise, options.precisions)))


def _done(samples: Sequence[Sample], settings: Sequence[TimedSetting], num_ranks: int) -> tuple[float, ...]:
    """The number of samples of each setting from jobs of ``num_ranks`` ranks; disturbed ones count less."""
    from .measure import DISTURBED, DISTURBED_COUNTS

    counts: dict[object, float] = {}
    for sample in samples:
        if sample.job_ranks == num_ranks:
            key = (sample.collective, sample.ranks, sample.stride, sample.bytes, sample.shape, sample.type)
            counts[key] = counts.get(key, 0.0) + (1.0 if sample.foreign <= DISTURBED else DISTURBED_COUNTS)
    keys = [(s.collective, s.ranks, s.stride, s.num_bytes, "x".join(map(str, s.shape)), s.precision) for s in settings]
    return tuple(counts.get(key, 0.0) for key in keys)


def progress(what: str, total: int, quiet: bool, unit: str = "sample") -> Any:
    """A progress bar on stderr; it is not shown if stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, disable=True if quiet else None)
