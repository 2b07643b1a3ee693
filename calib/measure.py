"""What ranks do to be measured: the runtime's own collectives, transfers between two ranks, and local work.

Every rank of a job calls :func:`measure_job` and makes the same calls in the same order.  One repetition is

    wait for all ranks; t0; the operation; wait for this rank's pending operations; t1

and takes as long as the slowest rank. Small collectives are done several times in a repetition, one after the other, and the
mean counts: so plans do them, and to wait for all ranks would weigh more than they do. Settings are visited in rounds, a
*block* of a few repetitions each, in an order that is shuffled anew in every round: what drifts (the machine's temperature,
its other users) spreads over all of them, and an interrupted run has measured everything some times. Blocks are gathered to
*stretches* of a quarter of a second, long enough for the system's clocks to tell what other processes used meanwhile. Where
that is more than a twentieth of the cores, a repetition is kept but counts for a third only: the setting is visited again.

All groups along an axis communicate at the same time, as they do in a plan.  Tensors have the shapes that layers give them:
features are gathered and scattered along the last dimension, gradients are reduced as vectors.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.rank import report

from .measurements import Sample
from .settings import ITEM_BYTES, Setting, rows_and_features

__all__ = ["Clock", "Hosts", "MeasureOptions", "hosts_of_job", "measure_job", "settings_of"]

#: Other processes disturb where they use more than this part of the cores.
DISTURBED = 0.05
#: For how much a disturbed repetition counts.
DISTURBED_COUNTS = 1 / 3
_STRETCH_S = 0.25
#: Cores beyond this one of a host are not told apart.
_MOST_CORES = 1024


@dataclass(frozen=True)
class MeasureOptions:
    """How a job measures.

    Attributes:
        settings: what to time.
        repetitions: of each setting, in all; whole blocks are measured, so there may be a few more.
        done: for each setting how many of them there are already, disturbed ones counting less.
        budget_s: after how long to stop; None for never.
        block: repetitions at a time.
        seed: of the order.
    """

    settings: tuple[Setting, ...]
    repetitions: int
    done: tuple[float, ...]
    budget_s: float | None
    block: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of a job are: the host of each, by number, and this rank's name of its own."""

    numbers: tuple[int, ...]
    name: str

    @property
    def ranks_per_node(self) -> int:
        """Of the fullest host."""
        return max(self.numbers.count(number) for number in set(self.numbers))

    def level(self, ranks: int, stride: int) -> str | None:
        """Which level groups of an axis communicate on: inside hosts, one rank of each; None where groups mix the two."""
        size, found = len(self.numbers), set()
        for first in range(size):
            if first // stride % ranks == 0:
                hosts = [self.numbers[first + k * stride] for k in range(ranks)]
                found.add("intra-node" if len(set(hosts)) == 1 else "inter-node" if len(set(hosts)) == ranks else None)
        return found.pop() if len(found) == 1 else None


def settings_of(num_ranks: int, sizes: Sequence[int], collectives: Sequence[str]) -> list[Setting]:
    """Every collective on every axis that the mesh of a plan on ``num_ranks`` ranks can have; transfers between halves too."""
    axes = [
        (ranks, stride)
        for ranks in range(2, num_ranks + 1)
        for stride in range(1, num_ranks + 1)
        if num_ranks % (ranks * stride) == 0
    ]
    found = []
    for size in sizes:
        for collective in collectives:
            if collective == TRANSFER:
                found += [Setting(collective, 2, stride, size) for ranks, stride in axes if ranks == 2]
            else:
                found += [Setting(collective, ranks, stride, _rounded(size, ranks)) for ranks, stride in axes]
    return found


def work_settings(shapes: Sequence[tuple[int, int, int]], sizes: Sequence[int]) -> list[Setting]:
    """Matmuls of some shapes, and element-wise operations on some sizes."""
    products = [Setting("matmul", 1, 1, ITEM_BYTES * (m * k + k * n + m * n), (m, k, n)) for m, k, n in shapes]
    return products + [Setting("elementwise", 1, 1, size) for size in sizes]


def _rounded(size: int, ranks: int) -> int:
    """Bytes of a whole number of rows whose features divide over the ranks."""
    rows, features = rows_and_features(size, ranks)
    return ITEM_BYTES * rows * features


# ---- On the ranks ------------------------------------------------------------------------------------------------------------


def hosts_of_job() -> Hosts:
    """Found out by exchanging names; every rank calls."""
    name = os.uname().nodename
    digest = np.frombuffer(name.encode()[:64].ljust(64, b"\0"), dtype=np.int64)
    rows = [row.tobytes() for row in exchange(digest)]
    return Hosts(tuple(rows.index(row) for row in rows), name)


def cores_of_ranks(hosts: Hosts) -> int:
    """How many cores the ranks of this host share, some of them bound to a part; every rank calls."""
    mask = np.zeros(_MOST_CORES, dtype=np.int64)
    mask[[core for core in os.sched_getaffinity(0) if core < _MOST_CORES]] = 1
    own = hosts.numbers[load_oneflow().env.get_rank()]
    here = [number == own for number in hosts.numbers]
    return max(1, int(exchange(mask)[here].any(axis=0).sum()))


def measure_job(options: MeasureOptions, keep: Callable[[list[Sample]], None] = report) -> tuple[int, bool]:
    """Time everything.  Rank 0 gives lists of samples to ``keep`` as they are taken (by default to the launcher).

    Returns:
        how many samples were taken, and whether the budget ended it.
    """
    from .operations import operation

    flow = load_oneflow()
    clock = Clock(hosts_of_job(), options.budget_s)
    hosts, num_ranks = clock.hosts, flow.env.get_world_size()
    done = list(options.done)
    levels = [hosts.level(s.ranks, s.stride) if s.ranks > 1 else "device" for s in options.settings]
    numbers = [0] * len(levels)
    shuffler = random.Random(options.seed)
    while True:
        order = [i for i, level in enumerate(levels) if level is not None and done[i] < options.repetitions]
        shuffler.shuffle(order)
        if not order:
            return sum(numbers), False
        while order:
            stretch = _stretch(clock, options, order, operation)
            del order[: len(stretch)]
            foreign, samples = clock.foreign, []
            for i, seconds in stretch:
                for second in seconds:
                    setting, level = options.settings[i], levels[i]
                    assert level is not None
                    samples.append(_sample(setting, level, numbers[i], second, foreign, num_ranks, clock))
                    numbers[i] += 1
                done[i] += len(seconds) * (1.0 if foreign <= DISTURBED else DISTURBED_COUNTS)
            if flow.env.get_rank() == 0:
                keep(samples)
            if clock.is_over:
                return sum(numbers), True


def _stretch(
    clock: Clock, options: MeasureOptions, order: Sequence[int], operation: Callable[[Setting], Callable[[], Any]]
) -> list[tuple[int, np.ndarray]]:
    """The first settings of ``order``, as many as take a quarter of a second."""
    measured: list[tuple[int, np.ndarray]] = []
    clock.begin()
    for i in order:
        setting = options.settings[i]
        measured.append((i, clock.time(_repeated(operation(setting), setting.calls), options.block) / setting.calls))
        if clock.elapsed > _STRETCH_S or clock.is_over:
            break
    return measured


def _repeated(run: Callable[[], Any], times: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(times):
            run()

    return several


def _sample(
    setting: Setting, level: str, repetition: int, seconds: float, foreign: float, num_ranks: int, clock: Clock
) -> Sample:
    return Sample(
        collective=setting.collective,
        level=level,
        ranks=setting.ranks,
        bytes=setting.num_bytes,
        repetition=repetition,
        seconds=float(seconds),
        host=clock.hosts.name,
        time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        job_ranks=num_ranks,
        ranks_per_node=clock.hosts.ranks_per_node,
        cores=clock.num_cores,
        stride=setting.stride,
        shape="x".join(map(str, setting.shape)),
        foreign=round(foreign, 4),
        versions=clock.versions,
    )


class Clock:
    """What all ranks agree on: the time that has passed on rank 0, and what other processes used."""

    def __init__(self, hosts: Hosts, budget_s: float | None):
        flow = load_oneflow()
        self.hosts = hosts
        self.num_cores = cores_of_ranks(hosts)
        self.versions = f"oneflow {flow.__version__}; {os.uname().sysname} {os.uname().release}; {processor()}"
        self._budget_s = budget_s
        self._zero = time.monotonic()
        self._start = np.zeros((len(hosts.numbers), 3))
        self._last = self._start
        self.elapsed = 0.0
        self.is_over = False

    def begin(self) -> None:
        """A stretch begins."""
        self._start = self._last = exchange(self._readings())
        self.elapsed = 0.0

    def time(self, run: Callable[[], Any], repetitions: int) -> np.ndarray:
        """Seconds of the slowest rank, for each repetition; one before them warms up."""
        eager = load_oneflow()._oneflow_internal.eager
        times = np.empty(repetitions + 1)
        for i in range(len(times)):
            eager.Sync()
            eager.ClusterSync()
            start = time.perf_counter()
            run()
            eager.Sync()
            times[i] = time.perf_counter() - start
        return self.slowest(times[1:])

    def slowest(self, times: np.ndarray) -> np.ndarray:
        """The largest times of all ranks; brings all clocks up to date."""
        gathered = exchange(np.concatenate((times, self._readings())))
        self._last = gathered[:, len(times) :]
        self.elapsed = float(self._last[0, 0] - self._start[0, 0])
        self.is_over = self._budget_s is not None and bool(self._last[0, 0] > self._budget_s)
        return gathered[:, : len(times)].max(axis=0)

    @property
    def foreign(self) -> float:
        """The largest fraction of a host's cores that others used during the stretch."""
        wall, own, busy = (self._last - self._start).T
        shares = []
        for number in set(self.hosts.numbers):
            here = [i for i, other in enumerate(self.hosts.numbers) if other == number]
            if busy[here[0]] >= 0 and wall[here[0]] > 0:
                shares.append((busy[here[0]] - own[here].sum()) / (wall[here[0]] * self.num_cores))
        return float(min(1.0, max(0.0, *shares))) if shares else 0.0

    def _readings(self) -> np.ndarray:
        """Seconds since the start, of this process on CPUs, and of the whole host."""
        return np.array([time.monotonic() - self._zero, time.process_time(), host_busy_s()])


def processor() -> str:
    """The processor's name, where the system says it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2] for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return " ".join(names[0].split()) if names else os.uname().machine


def host_busy_s() -> float:
    """Seconds that all cores of this host were busy, the time that a hypervisor took away included; 0 where it is not known."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, interrupts, soft, stolen, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def exchange(values: np.ndarray) -> np.ndarray:
    """Everybody's values (of 8 bytes each), shape (ranks, values); every rank calls."""
    flow = load_oneflow()
    from autoddl.pipelines.runtime.collectives import all_gather
    from autoddl.pipelines.runtime.mesh import RankAxis

    num_ranks = flow.env.get_world_size()
    row = flow.tensor(np.ascontiguousarray(values).reshape(1, prod(values.shape)))
    return all_gather(row, RankAxis(num_ranks, 1, num_ranks), 0).numpy()
