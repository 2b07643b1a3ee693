"""Measuring on ranks: the runtime's collectives, transfers between two ranks, and local work.

Every rank of a job calls :func:`measure_job` and makes the same calls in the same order.  One repetition is

    wait for this rank's device; wait for all ranks; sleep; t0; the operation; wait for this rank's device; t1

and its time is that of the slowest rank.  A collective counts from the last t0 of a group to its last t1, in the slowest group: the
next layer of a step communicates along another axis, whose groups have a rank of each and wait for it.  (How ranks wait for
devices: :mod:`autoddl.pipelines.runtime.timing`.)  On GPUs the operation is called several times, one call after the other, and the
mean counts: waiting would dominate the time of a small one, and a step launches kernels without waiting for each.

CPU ranks begin collectives apart, each after a random sleep, since they do so in a step, where each comes from its own computation.
It matters: the ranks of OneFlow request data over the connection that carries the data.  If two ranks exchange, and one has to send
before it could request, the two directions follow each other, and take up to twice as long as at once.  Since one call takes the
one or the other time, a repetition is the mean of several, each with sleeps of its own.  Before large exchanges there are
handshakes, as in a step (:mod:`autoddl.pipelines.runtime.comm.handshake`).  How large follows from the latency and bandwidth of
transfers, which the job times at first.

Before the first round the largest product runs until its times settle, which brings the clocks of devices up; each operation also
runs until its times settle before it is timed for the first time, and once before each later block.  Settings are visited in
rounds, in *blocks* of a few repetitions, in a new random order in each round; in the first one, the smallest and largest sizes of
each collective come first, so that a short run determines the fit, too.  So drift (clocks, temperature, other users of the
machine) spreads over all settings, and an interrupted run has samples of each.  Consecutive blocks form *stretches* of a quarter of
a second, long enough to read from the system's clocks how much CPU time other programs used (ranks of other hosts on the same
machine, as containers are, are not other ones).  If that is more than a twentieth of the cores of CPU ranks, a repetition is kept
but counts as a third, so that the setting is visited again.

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
from functools import partial
from typing import Any

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.devices import GPU
from autoddl.pipelines.runtime.comm.handshake import NO_HANDSHAKE, Handshake, worth_a_token
from autoddl.pipelines.runtime.comm.mesh import RankAxis
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.ranks.rank import report
from autoddl.pipelines.runtime.timing import span_of, warm_up

from .hosts import Hosts, cores_of_ranks, exchange, host_busy_s, hosts_of_job, processor
from .measurements import Sample
from .settings import TimedSetting

__all__ = ["MeasureOptions", "SharedClock", "measure_job"]

#: A repetition is disturbed if other processes use more than this fraction of the cores.
DISTURBED = 0.05
#: Weight of a disturbed repetition.
DISTURBED_COUNTS = 1 / 3
_STRETCH_S = 0.25
#: Turn of settings that have samples: after those that have none.
_MEASURED = 3
#: An operation that takes longer needs one call to warm up [s].
_LONG_S = 0.02
#: Sizes of the transfers that are timed at first [bytes], and how often.
_SMALL, _LARGE, _TIMES = 2**12, 2**18, 3
#: The longest sleep before a collective [s]: far beyond the latency of a network, and about how far ranks of a step are apart.
_APART_S = 0.01


@dataclass(frozen=True)
class MeasureOptions:
    """Options of a measuring job.

    Attributes:
        settings: what to time.
        repetitions: total of each setting; whole blocks are measured, so there may be a few more.
        done: number of existing repetitions of each setting; disturbed ones count less.
        budget_s: time limit; None for no limit.
        device: the type of device to measure on.
        block: number of repetitions of a block.
        seed: of the order.
    """

    settings: tuple[TimedSetting, ...]
    repetitions: int
    done: tuple[float, ...]
    budget_s: float | None
    device: str
    block: int = 3
    seed: int = 0


def measure_job(options: MeasureOptions, keep: Callable[[list[Sample]], None] = report) -> tuple[int, bool]:
    """Time all settings; every rank calls.  Rank 0 passes samples to ``keep`` as they are taken (by default to the launcher).

    Returns:
        The number of samples taken, and whether the budget ended the job.

    Raises:
        UserError: OneFlow finds no GPU, and the device to measure is one.
    """
    from autoddl.pipelines.runtime.backend import backend_of

    flow = load_oneflow()
    backend_of("float32", options.device)  # raises if there is no such device
    clock = SharedClock(hosts_of_job(options.device), options.budget_s, options.device)
    hosts, num_ranks = clock.hosts, flow.env.get_world_size()
    operations = _Operations(clock, options.device, _measured_handshake(clock, options.device))
    done = list(options.done)
    levels = [hosts.level(s.ranks, s.stride) if s.ranks > 1 else "device" for s in options.settings]
    numbers = [0] * len(levels)
    shuffler = random.Random(options.seed)
    precedence = _precedence(options.settings)
    operations.raise_clocks([options.settings[i] for i in range(len(levels)) if done[i] < options.repetitions])
    while True:
        order = [i for i, level in enumerate(levels) if level is not None and done[i] < options.repetitions]
        shuffler.shuffle(order)
        order.sort(key=lambda i: precedence[i] if not done[i] else _MEASURED)
        if not order:
            return sum(numbers), False
        while order:
            stretch = _stretch(clock, options, order, operations)
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


def _measured_handshake(clock: SharedClock, device: str) -> Handshake:
    """The handshake of the CPU ranks of this job, from the times of transfers between their hosts; every rank calls."""
    from .operations import operation

    num_ranks, stride = len(clock.hosts.numbers), clock.hosts.ranks_per_node
    if device == GPU or num_ranks % (2 * stride) or clock.hosts.level(2, stride) != "inter-node":
        return NO_HANDSHAKE
    groups = RankAxis(2, stride, num_ranks).groups()

    def seconds(num_bytes: int) -> float:
        run = operation(TimedSetting(TRANSFER, 2, stride, num_bytes), device)
        return float(np.median(clock.time(run, _TIMES, groups)))

    small_s, large_s = seconds(_SMALL), seconds(_LARGE)
    bandwidth = (_LARGE - _SMALL) / max(large_s - small_s, 1e-9)
    return Handshake(stride, worth_a_token(max(0.0, small_s - _SMALL / bandwidth), bandwidth))


def _precedence(settings: Sequence[TimedSetting]) -> list[int]:
    """When each setting has its turn among those that were not measured yet, the lowest first; all are less than `_MEASURED`.

    The smallest and the largest size of every collective come before those between them: they tell latency from bandwidth, if the
    budget is used up within the first round.
    """
    sizes: dict[tuple[str, int, int, str], list[int]] = {}
    for one in settings:
        sizes.setdefault((one.collective, one.ranks, one.stride, one.precision), []).append(one.num_bytes)
    result = []
    for one in settings:
        own = sorted(sizes[one.collective, one.ranks, one.stride, one.precision])
        extremes, middle = (own[0], own[-1]), own[len(own) // 2]
        result.append(0 if one.num_bytes in extremes else 1 if one.num_bytes == middle else 2)
    return result


class _Operations:
    """The operations of settings on this rank; each warms up before it is given out for the first time."""

    def __init__(self, clock: SharedClock, device: str, handshake: Handshake):
        self._clock, self._device, self._handshake = clock, device, handshake
        self._warm: set[TimedSetting] = set()

    def raise_clocks(self, settings: Sequence[TimedSetting]) -> None:
        """Run the largest product until its times settle; every rank calls."""
        products = [setting for setting in settings if setting.collective == "matmul"]
        if products:
            self.of(max(products, key=lambda setting: float(np.prod(setting.shape, dtype=float))))

    def of(self, setting: TimedSetting) -> Callable[[], Any]:
        """The operation of a setting; every rank calls."""
        from .operations import operation

        run = operation(setting, self._device, self._handshake)
        if setting not in self._warm:
            self._warm.add(setting)
            self._clock.warm_up(run)
        return run


def _repeat(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        run()


def _stretch(
    clock: SharedClock, options: MeasureOptions, order: Sequence[int], operations: _Operations
) -> list[tuple[int, np.ndarray]]:
    """Time the first settings of ``order``, for a quarter of a second; returns (setting, seconds of its repetitions)."""
    measured: list[tuple[int, np.ndarray]] = []
    clock.begin()
    for i in order:
        setting = options.settings[i]
        run, calls = operations.of(setting), setting.calls(options.device == GPU)
        axis = RankAxis(setting.ranks, setting.stride, len(clock.hosts.numbers))
        groups = axis.groups() if setting.ranks > 1 else None
        if setting.is_collective and options.device != GPU:
            seconds = clock.time(run, options.block, groups, calls, _APART_S)
        else:
            seconds = clock.time(partial(_repeat, run, calls), options.block, groups) / calls
        measured.append((i, seconds))
        if clock.elapsed > _STRETCH_S or clock.is_over:
            break
    return measured


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
        precision=setting.precision,
        device=clock.hosts.device_name,
        network=clock.hosts.network,
    )


class SharedClock:
    """A stopwatch that all ranks agree on.

    Args:
        hosts: the hosts of the ranks.
        budget_s: time limit; None for no limit.
        device: the type of device that the ranks use.

    Attributes:
        hosts: the hosts of the ranks.
        num_cores: number of cores that the ranks of this host share; 0 on GPUs, which ranks do not share.
        versions: of the software, as text.
        elapsed: seconds since the stretch began, on rank 0.
        is_over: whether the budget was used up, on rank 0.
    """

    def __init__(self, hosts: Hosts, budget_s: float | None, device: str):
        flow = load_oneflow()
        self.hosts = hosts
        self.num_cores = 0 if device == GPU else cores_of_ranks(hosts.numbers)
        self._machine_cores = 0 if device == GPU else cores_of_ranks(hosts.machines)
        self._device = device
        self.versions = f"oneflow {flow.__version__}; {os.uname().sysname} {os.uname().release}; {processor()}"
        self._budget_s = budget_s
        self._zero = time.monotonic()
        self._delays = random.Random(flow.env.get_rank())
        self._start = np.zeros((len(hosts.numbers), 3))
        self._last = self._start
        self.elapsed = 0.0
        self.is_over = False

    def begin(self) -> None:
        """Begin a stretch; every rank calls."""
        self._start = self._last = exchange(self._readings())
        self.elapsed = 0.0

    def time(
        self,
        run: Callable[[], Any],
        repetitions: int,
        groups: Sequence[Sequence[int]] | None = None,
        calls: int = 1,
        apart_s: float = 0.0,
    ) -> np.ndarray:
        """Seconds of each repetition, after a call that does not count; every rank calls.

        Args:
            run: what to time.
            repetitions: their number.
            groups: the ranks that communicate with each other; the slowest group of each call counts.  By default each rank is
                alone.
            calls: number of calls of a repetition, which is their mean.
            apart_s: in each call, each rank begins up to so much later than all have met.
        """
        spans = self._spans(run, repetitions * calls + 1, apart_s)[:, 1:]
        return self._seconds(spans, groups).max(axis=0).reshape(repetitions, calls).mean(axis=1)

    def warm_up(self, run: Callable[[], Any]) -> int:
        """Repeat until the times of the slowest rank settle; returns the number of windows.  Every rank calls.

        What takes long (a large message on a slow wire) is warm after one call.
        """
        if self._seconds(self._spans(run, 1)).max() >= _LONG_S:
            return 1
        return warm_up(lambda num: self._seconds(self._spans(run, num)).max(axis=0))

    def _spans(self, run: Callable[[], Any], repetitions: int, apart_s: float = 0.0) -> np.ndarray:
        """When each repetition begins and ends on this rank, after all ranks met [s]; shape (2, repetitions)."""
        join = load_oneflow()._oneflow_internal.eager.ClusterSync
        delays = [apart_s * self._delays.random() for _ in range(repetitions)]
        return np.array([span_of(run, self._device, join, delay) for delay in delays]).T

    def _seconds(self, spans: np.ndarray, groups: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """The seconds of each group in each repetition; also updates ``elapsed`` and ``is_over``.  Every rank calls."""
        gathered = exchange(np.concatenate((spans.ravel(), self._readings())))
        self._last = gathered[:, spans.size :]
        self.elapsed = float(self._last[0, 0] - self._start[0, 0])
        self.is_over = self._budget_s is not None and bool(self._last[0, 0] > self._budget_s)
        return seconds_of_groups(gathered[:, : spans.size].reshape(-1, *spans.shape), groups)

    @property
    def foreign(self) -> float:
        """The largest fraction of a machine's cores that other processes used during the stretch; 0 on GPUs."""
        return foreign_share(self._last - self._start, self.hosts.machines, self._machine_cores)

    def _readings(self) -> np.ndarray:
        """(Seconds since the start, CPU seconds of this process, those of all processes of the host), without the system's own."""
        return np.array([time.monotonic() - self._zero, os.times().user, host_busy_s()])


def seconds_of_groups(spans: np.ndarray, groups: Sequence[Sequence[int]] | None = None) -> np.ndarray:
    """Return how long each group takes, from the start of its last rank [s]; shape (groups, repetitions).

    Args:
        spans: when each rank begins and ends [s]; shape (ranks, 2, repetitions).
        groups: the ranks of each group; by default each rank is alone.

    >>> together, apart = [[0.0], [1.0]], [[0.5], [1.25]]
    >>> [seconds_of_groups(np.array([together, apart]), groups).tolist() for groups in (None, [(0, 1)])]
    [[[1.0], [0.75]], [[0.75]]]
    """
    alone = [(rank,) for rank in range(len(spans))]
    ends, begins = ([spans[list(group), k].max(axis=0) for group in groups or alone] for k in (1, 0))
    return np.array(ends) - np.array(begins)


def foreign_share(readings: np.ndarray, machines: Sequence[int], num_cores: int) -> float:
    """Return the largest fraction of a machine's cores that other processes than ranks used.

    Ranks of all hosts of a machine (containers that share its kernel) are own ones: its clock counts them all.

    Args:
        readings: of each rank, seconds that passed, CPU seconds of the rank, and those of all programs of its machine; shape
            (ranks, 3).
        machines: number of each rank's machine.
        num_cores: number of cores that the ranks of a machine share; 0 if they are not measured.

    >>> alone, beside_another = [1.0, 0.5, 1.1], [1.0, 0.5, 1.5]
    >>> [round(foreign_share(np.array([each, each]), (0, 0), 2), 2) for each in (alone, beside_another)]
    [0.05, 0.25]
    """
    if not num_cores:
        return 0.0
    shares = [0.0]
    for machine in set(machines):
        here = [rank for rank, other in enumerate(machines) if other == machine]
        passed, _, busy = readings[here[0]]
        if busy >= 0 and passed > 0:
            shares.append((busy - readings[here, 1].sum()) / (passed * num_cores))
    return float(min(1.0, max(shares)))
