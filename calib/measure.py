"""Measuring on ranks: the runtime's collectives, transfers between two ranks, and local work.

Every rank of a job calls :func:`measure_job` and makes the same calls in the same order.  One repetition is

    wait for all ranks; t0; the operation; wait for this rank's pending operations; t1

and its time is that of the slowest rank.  Small collectives run several times in a repetition, one after the other, and the mean
counts, since waiting for all ranks would dominate the time of one.  Settings are visited in rounds, in *blocks* of a few
repetitions, in a new random order in each round.  So drift (temperature, other users of the machine) spreads over all settings, and
an interrupted run has samples of each.  Consecutive blocks form *stretches* of a quarter of a second, long enough to read from the
system's clocks how much CPU time other processes used.  If that is more than a twentieth of the cores, a repetition is kept but
counts as a third, so that the setting is visited again.

All groups along an axis communicate at the same time, as in a plan.  Tensors have the shapes of layers: features are gathered and
scattered along the last dimension, gradients are reduced as vectors.
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
from autoddl.pipelines.runtime.ranks.rank import report

from .measurements import Sample
from .settings import ITEM_BYTES, TimedSetting, rows_and_features

__all__ = ["Hosts", "MeasureOptions", "SharedClock", "hosts_of_job", "measure_job", "settings_of"]

#: A repetition is disturbed if other processes use more than this fraction of the cores.
DISTURBED = 0.05
#: Weight of a disturbed repetition.
DISTURBED_COUNTS = 1 / 3
_STRETCH_S = 0.25
#: Number of cores of a host that are distinguished.
_MAX_CORES = 1024


@dataclass(frozen=True)
class MeasureOptions:
    """Options of a measuring job.

    Attributes:
        settings: what to time.
        repetitions: total of each setting; whole blocks are measured, so there may be a few more.
        done: number of existing repetitions of each setting; disturbed ones count less.
        budget_s: time limit; None for no limit.
        block: number of repetitions of a block.
        seed: of the order.
    """

    settings: tuple[TimedSetting, ...]
    repetitions: int
    done: tuple[float, ...]
    budget_s: float | None
    block: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Hosts:
    """The hosts of the ranks of a job.

    Attributes:
        numbers: number of each rank's host.
        name: name of this rank's host.
    """

    numbers: tuple[int, ...]
    name: str

    @property
    def ranks_per_node(self) -> int:
        """Largest number of ranks of a host."""
        return max(self.numbers.count(number) for number in set(self.numbers))

    def level(self, ranks: int, stride: int) -> str | None:
        """The network level of the groups along an axis.

        It is ``intra-node`` if every group is on one host, ``inter-node`` if its ranks are all on different hosts, else None.
        """
        size, found = len(self.numbers), set()
        for first in range(size):
            if first // stride % ranks == 0:
                hosts = [self.numbers[first + k * stride] for k in range(ranks)]
                found.add("intra-node" if len(set(hosts)) == 1 else "inter-node" if len(set(hosts)) == ranks else None)
        return found.pop() if len(found) == 1 else None


def settings_of(num_ranks: int, sizes: Sequence[int], collectives: Sequence[str]) -> list[TimedSetting]:
    """Every collective on every axis of a mesh of ``num_ranks`` ranks, and transfers along axes of size 2."""
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
                found += [TimedSetting(collective, 2, stride, size) for ranks, stride in axes if ranks == 2]
            else:
                found += [TimedSetting(collective, ranks, stride, _rounded(size, ranks)) for ranks, stride in axes]
    return found


def work_settings(shapes: Sequence[tuple[int, int, int]], sizes: Sequence[int]) -> list[TimedSetting]:
    """Settings of local work: matmuls of shapes (m, k, n), and element-wise operations on numbers of bytes."""
    products = [TimedSetting("matmul", 1, 1, ITEM_BYTES * (m * k + k * n + m * n), (m, k, n)) for m, k, n in shapes]
    return products + [TimedSetting("elementwise", 1, 1, size) for size in sizes]


def _rounded(size: int, ranks: int) -> int:
    """About ``size`` bytes, rounded to a tensor that divides over the ranks."""
    rows, features = rows_and_features(size, ranks)
    return ITEM_BYTES * rows * features


# ---- On the ranks ------------------------------------------------------------------------------------------------------------


def hosts_of_job() -> Hosts:
    """The hosts of this job, from an exchange of host names; every rank calls."""
    name = os.uname().nodename
    digest = np.frombuffer(name.encode()[:64].ljust(64, b"\0"), dtype=np.int64)
    rows = [row.tobytes() for row in exchange(digest)]
    return Hosts(tuple(rows.index(row) for row in rows), name)


def cores_of_ranks(hosts: Hosts) -> int:
    """Number of cores that the ranks of this host share (the union of their CPU affinities); every rank calls."""
    mask = np.zeros(_MAX_CORES, dtype=np.int64)
    mask[[core for core in os.sched_getaffinity(0) if core < _MAX_CORES]] = 1
    own = hosts.numbers[load_oneflow().env.get_rank()]
    here = [number == own for number in hosts.numbers]
    return max(1, int(exchange(mask)[here].any(axis=0).sum()))


def measure_job(options: MeasureOptions, keep: Callable[[list[Sample]], None] = report) -> tuple[int, bool]:
    """Time all settings; every rank calls.  Rank 0 passes samples to ``keep`` as they are taken (by default to the launcher).

    Returns:
        The number of samples taken, and whether the budget ended the job.
    """
    from .operations import operation

    flow = load_oneflow()
    clock = SharedClock(hosts_of_job(), options.budget_s)
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
    clock: SharedClock,
    options: MeasureOptions,
    order: Sequence[int],
    operation: Callable[[TimedSetting], Callable[[], Any]],
) -> list[tuple[int, np.ndarray]]:
    """Time the first settings of ``order``, for a quarter of a second; returns (setting, seconds of its repetitions)."""
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
    setting: TimedSetting,
    level: str,
    repetition: int,
    seconds: float,
    foreign: float,
    num_ranks: int,
    clock: SharedClock,
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


class SharedClock:
    """A stopwatch that all ranks agree on.

    Args:
        hosts: the hosts of the ranks.
        budget_s: time limit; None for no limit.

    Attributes:
        hosts: the hosts of the ranks.
        num_cores: number of cores that the ranks of this host share.
        versions: of the software, as text.
        elapsed: seconds since the stretch began, on rank 0.
        is_over: whether the budget was used up, on rank 0.
    """

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
        """Begin a stretch; every rank calls."""
        self._start = self._last = exchange(self._readings())
        self.elapsed = 0.0

    def time(self, run: Callable[[], Any], repetitions: int) -> np.ndarray:
        """Seconds of the slowest rank for each repetition, after one warm-up; every rank calls."""
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
        """The element-wise maximum of ``times`` over all ranks; also updates ``elapsed`` and ``is_over``.  Every rank calls."""
        gathered = exchange(np.concatenate((times, self._readings())))
        self._last = gathered[:, len(times) :]
        self.elapsed = float(self._last[0, 0] - self._start[0, 0])
        self.is_over = self._budget_s is not None and bool(self._last[0, 0] > self._budget_s)
        return gathered[:, : len(times)].max(axis=0)

    @property
    def foreign(self) -> float:
        """The largest fraction of a host's cores that other processes used during the stretch."""
        wall, own, busy = (self._last - self._start).T
        shares = []
        for number in set(self.hosts.numbers):
            here = [i for i, other in enumerate(self.hosts.numbers) if other == number]
            if busy[here[0]] >= 0 and wall[here[0]] > 0:
                shares.append((busy[here[0]] - own[here].sum()) / (wall[here[0]] * self.num_cores))
        return float(min(1.0, max(0.0, *shares))) if shares else 0.0

    def _readings(self) -> np.ndarray:
        """(seconds since the start, CPU seconds of this process, CPU seconds of the whole host)."""
        return np.array([time.monotonic() - self._zero, time.process_time(), host_busy_s()])


def processor() -> str:
    """The name of the processor; of the architecture if the system does not give it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2] for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return " ".join(names[0].split()) if names else os.uname().machine


def host_busy_s() -> float:
    """Total busy seconds of all cores of this host, including time stolen by a hypervisor; 0 if unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, interrupts, soft, stolen, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def exchange(values: np.ndarray) -> np.ndarray:
    """The values of all ranks (8 bytes each), shape (ranks, values); every rank calls."""
    flow = load_oneflow()
    from autoddl.pipelines.runtime.comm.collectives import all_gather
    from autoddl.pipelines.runtime.comm.mesh import RankAxis

    num_ranks = flow.env.get_world_size()
    row = flow.tensor(np.ascontiguousarray(values).reshape(1, prod(values.shape)))
    return all_gather(row, RankAxis(num_ranks, 1, num_ranks), 0).numpy()
