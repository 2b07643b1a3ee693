"""Trust: the probability that a plan is the best one, given the uncertainty of the cluster's parameters.

A calibrated cluster has K draws of its parameters (Bayesian bootstrap of the measurements).  The cost of a plan is linear in them,

    cost_k = sum over (level, collective, group size) of  messages alpha_k + sent bytes beta_k + bytes gamma_k
             + (1 + e c_k) (launches l_k + FLOPs w_k + bytes m_k)

so all plans are priced under all draws at once.  From the matrix of costs, shape (plans, draws):

    probability that a plan is best = fraction of the draws in which it has the smallest cost
    expected regret of the choice   = mean over draws of (its cost - the smallest) / the smallest

The rivals are alternative plans, and the optima under some of the draws.  If the choice is not certain, a measurement is proposed:
the variance of the difference D between the costs of the choice and of its strongest rival is divided among the terms,
share = cov(difference of the term, D) / var(D), and the term of the largest share is to be measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from autoddl.costmodel.calibration import TRANSFER, Calibration
from autoddl.costmodel.cluster import Cluster, Device, Link
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.localwork import LocalWork
from autoddl.costmodel.units import format_bytes

from .forms import is_exchange

__all__ = [
    "Measurement",
    "RivalPlan",
    "Trust",
    "Usage",
    "UsageSum",
    "drawn_cluster",
    "outside_notes",
    "reference_peak",
    "trust",
]

#: Level, collective (None: messages from one device to another) and group size.
Key = tuple[str, Optional[Collective], int]

#: Probability from which on a choice counts as certain; below it there is a tie.
SURE = 0.95


@dataclass(frozen=True)
class Usage:
    """Counts of one training step on each device.

    Attributes:
        rings: for each (level, collective, group size) the sums of messages, sent bytes and bytes n.
        sizes: for each (level, collective, group size) the n of its steps, each with the number of times that it runs.
        launches, flops, memory_bytes: local work, as `autoddl.costmodel.cluster` prices it.  FLOPs are those of large products in
            the reference precision (float32 if the device has it) that take as long.
    """

    rings: Mapping[Key, tuple[float, float, float]]
    sizes: Mapping[Key, Mapping[float, float]]
    launches: float = 0.0
    flops: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True)
class RivalPlan:
    """A plan that could be chosen.

    Attributes:
        name: of the plan.
        usage: its counts.
    """

    name: str
    usage: Usage


@dataclass(frozen=True)
class Measurement:
    """A measurement that would help to distinguish two plans.

    Attributes:
        rival: name of the other plan.
        collective: what to measure; "" for local work, which has no level, ranks and size.
        level, ranks, num_bytes: network level, group size and message size to measure.
        share: share of the variance of the plans' difference that is due to this term.
    """

    rival: str
    collective: str
    level: str
    ranks: int
    num_bytes: float
    share: float

    def __str__(self) -> str:
        if not self.collective:
            return "products and element-wise operations on one device"
        return f"{self.collective} over {self.ranks} {self.level} ranks, around {format_bytes(self.num_bytes)}"


@dataclass(frozen=True)
class Trust:
    """The certainty of a choice.

    Attributes:
        probability: probability that the choice is the best of all candidates.
        expected_regret: relative excess of its cost over the best, mean over the draws.
        rivals: (name, probability of being best) of the other candidates, most probable first.
        measurement: a measurement that would help to settle a tie; None if there is no tie, or none would help.
        num_draws: number of draws of the parameters.
    """

    probability: float
    expected_regret: float
    rivals: tuple[tuple[str, float], ...]
    measurement: Measurement | None
    num_draws: int


class UsageSum:
    """Adds up what a step uses, on devices of a cluster that train in ``precision``."""

    def __init__(self, cluster: Cluster, precision: str):
        self._device, self._precision = cluster.device, precision
        self._rings: dict[Key, np.ndarray] = {}
        self._sizes: dict[Key, dict[float, float]] = {}
        self._work = LocalWork()

    def add_steps(self, steps: Iterable[Step], names: Sequence[str], times: float) -> None:
        """Steps of collectives, so many times; ``names`` are those of the levels that their axes count in."""
        for step in steps:
            key = (names[step.axis.level], step.collective, step.axis.size)
            self._add(key, np.array([step.messages, step.sent_bytes, step.nbytes]), step.nbytes, times)

    def add_messages(self, level: str, messages: float, nbytes: float, times: float) -> None:
        """Messages from one device to another, ``nbytes`` together."""
        self._add((level, None, 2), np.array([messages, nbytes, 0.0]), nbytes / messages, times)

    def add_work(self, work: LocalWork, times: float) -> None:
        """Local work, so many times."""
        self._work += times * work

    def _add(self, key: Key, amounts: np.ndarray, size: float, times: float) -> None:
        if times:
            self._rings[key] = self._rings.get(key, np.zeros(3)) + times * amounts
            counts = self._sizes.setdefault(key, {})
            counts[size] = counts.get(size, 0.0) + times

    @property
    def usage(self) -> Usage:
        """The sums."""
        rings = {key: (float(a), float(b), float(c)) for key, (a, b, c) in self._rings.items()}
        work, device = self._work, self._device
        flops = device.arithmetic_s(work, self._precision) * device.efficiency * reference_peak(device)
        return Usage(rings, self._sizes, work.launches, flops, work.nbytes)


def trust(candidates: Sequence[RivalPlan], cluster: Cluster, communication_only: bool) -> Trust:
    """The certainty of the first of the candidates.

    Args:
        candidates: the choice and its rivals.
        cluster: a calibrated cluster.
        communication_only: whether cost is communication only.
    """
    parts = [_parts(candidate.usage, cluster, communication_only) for candidate in candidates]
    costs = np.stack([sum(own.values(), np.zeros(_num_draws(cluster))) for own in parts])
    best = costs.min(axis=0)
    # Draws in which others cost as much count for the choice.
    is_best = np.argmin(costs, axis=0)
    ties = costs[0] <= best * (1 + 1e-9)
    is_best[ties] = 0
    shares = np.bincount(is_best, minlength=len(candidates)) / costs.shape[1]
    regret = float(np.mean((costs[0] - best) / np.maximum(best, 1e-300)))
    order = sorted(range(1, len(candidates)), key=lambda i: (-shares[i], float(costs[i].mean())))
    measurement = None
    if order and shares[0] < SURE:
        measurement = _settling(candidates[0], candidates[order[0]], parts[0], parts[order[0]])
    rivals = tuple((candidates[i].name, float(shares[i])) for i in order)
    return Trust(float(shares[0]), regret, rivals, measurement, costs.shape[1])


def outside_notes(usage: Usage, cluster: Cluster) -> list[str]:
    """Notes about group sizes and messages of a plan that are outside the calibrated range of its cluster."""
    calibration = cluster.calibration
    assert calibration is not None
    notes = []
    for level, collective in dict.fromkeys((key[0], key[1]) for key in usage.rings):
        name = _name_of(collective)
        covered = calibration.coverage(level, name)
        if covered is None:
            notes.append(f"{name} on the {level} level was not calibrated")
            continue
        keys = [key for key in usage.rings if key[:2] == (level, collective)]
        groups = sorted(key[2] for key in keys if key[2] not in covered.groups)
        if groups:
            measured = ", ".join(map(str, covered.groups))
            notes.append(
                f"{name} over {', '.join(map(str, groups))} {level} ranks is outside the calibrated group "
                f"sizes ({measured})"
            )
        sizes = [size for key in keys for size in usage.sizes[key]]
        outside = [size for size in sizes if not covered.smallest_bytes <= size <= covered.largest_bytes]
        if outside:
            where = f"{format_bytes(covered.smallest_bytes)} to {format_bytes(covered.largest_bytes)}"
            ends = format_bytes(min(outside))
            if max(outside) > min(outside):
                ends += f" to {format_bytes(max(outside))}"
            notes.append(f"{name} of {ends} ({level}) is outside the calibrated sizes ({where})")
    return notes


def drawn_cluster(cluster: Cluster, k: int) -> Cluster:
    """The cluster with the parameters of the k-th draw."""
    draws = _Draws(cluster)
    links = []
    for name, link in zip(("inter-node", "intra-node"), cluster.links):
        latency, slowness, _ = (float(values[k]) for values in draws.terms(name, None, 0))
        drawn = Link(latency, 1.0 / max(slowness, 1e-18))
        for collective in link.collectives:
            latency, slowness, copy = (float(values[k]) for values in draws.terms(name, collective, 0))
            drawn.collectives[collective] = (latency, 1.0 / max(slowness, 1e-18))
            if copy:
                drawn.copies[collective] = copy
        for collective, size in link.groups:
            latency, slowness, _ = (float(values[k]) for values in draws.terms(name, collective, size))
            drawn.groups[collective, size] = (latency, 1.0 / max(slowness, 1e-18))
        links.append(drawn)
    launch, work, memory = (float(values[k]) for values in draws.device())
    known = cluster.device
    efficiency = 1.0 / max(work, 1e-30) / reference_peak(known)
    # The products inside attention are as uncertain as others.
    core = None if known.core_efficiency is None else known.core_efficiency * efficiency / known.efficiency
    device = replace(
        known,
        launch_s=launch,
        efficiency=efficiency,
        core_efficiency=core,
        memory_bandwidth=1.0 / max(memory, 1e-18),
    )
    return replace(cluster, links=(links[0], links[1]), device=device)


class _Draws:
    """The terms of a calibrated cluster under all draws; terms that were not measured are equal in all draws."""

    def __init__(self, cluster: Cluster):
        assert cluster.calibration is not None
        self.cluster = cluster
        self.num = _num_draws(cluster)
        self._values: dict[tuple[str, str, int], dict[str, np.ndarray]] = {}
        for replicates in cluster.calibration.replicates:
            place = (replicates.level, replicates.collective, replicates.group)
            self._values.setdefault(place, {})[replicates.term] = np.array(replicates.values)

    @property
    def has_device(self) -> bool:
        return ("device", "", 0) in self._values

    def terms(self, level: str, collective: Collective | None, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(alpha, beta, gamma) of a collective in groups of ``size`` (0 for any), or of the link itself; each of shape (draws,)."""
        link = self.cluster.links[0 if level == "inter-node" else 1]
        if collective is None:
            places: list[tuple[str, str, int]] = [(level, TRANSFER, 0), (level, "", 0)]
            known: tuple[float, float] = (link.latency_s, link.bandwidth)
            copy = 0.0
        else:
            places = [(level, collective.value, 0), (level, "", 0)]
            known = link.collectives.get(collective, (link.latency_s, link.bandwidth))
            copy = link.copies.get(collective, 0.0)
            if (collective, size) in link.groups:
                places = [(level, collective.value, size), (level, "", 0)]
                known, copy = link.groups[collective, size], 0.0
        found = next((self._values[place] for place in places if place in self._values), None)
        if found is None:
            return np.full(self.num, known[0]), np.full(self.num, 1.0 / known[1]), np.full(self.num, copy)
        zero, excess = np.zeros(self.num), self.cluster.excess
        is_exchanged = collective is not None and is_exchange(collective.value, size)
        latency, slowness = (
            found.get(term, zero)
            + excess * found.get(f"crowded {term}", zero)
            + is_exchanged * found.get(f"exchanged {term}", zero)
            for term in ("latency", "slowness")
        )
        return latency, slowness, found.get("copy", zero)

    def device(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds per launch, per FLOP and per byte, each of shape (draws,)."""
        device = self.cluster.device
        if not self.has_device:
            rate = device.efficiency * reference_peak(self.cluster.device)
            ones = np.ones(self.num)
            return device.launch_s * ones, ones / rate, ones / device.memory_bandwidth
        found = self._values["device", "", 0]
        zero = np.zeros(self.num)
        slower = 1.0 + self.cluster.excess * found.get("crowding", zero)
        launch, work, memory = (slower * found.get(term, zero) for term in ("launch", "work", "memory"))
        return launch, work, memory


def reference_peak(device: Device) -> float:
    """Peak FLOP/s of the precision that efficiencies are measured in: float32 if the device has it."""
    peaks = device.peak_flops
    return peaks.get("float32", next(iter(peaks.values())))


def _name_of(collective: Collective | None) -> str:
    return TRANSFER if collective is None else collective.value


def _num_draws(cluster: Cluster) -> int:
    calibration: Calibration | None = cluster.calibration
    return len(calibration.replicates[0].values) if calibration and calibration.replicates else 1


def _parts(usage: Usage, cluster: Cluster, communication_only: bool) -> dict[Any, np.ndarray]:
    """The cost of a plan by term, each of shape (draws,)."""
    draws = _Draws(cluster)
    parts: dict[Any, np.ndarray] = {}
    for (level, collective, size), (messages, sent, nbytes) in usage.rings.items():
        alpha, beta, gamma = draws.terms(level, collective, size)
        parts[level, collective, size] = messages * alpha + sent * beta + nbytes * gamma
    if not communication_only:
        launch, work, memory = draws.device()
        parts["local work"] = usage.launches * launch + usage.flops * work + usage.memory_bytes * memory
    return parts


def _settling(
    chosen: RivalPlan, rival: RivalPlan, mine: dict[Any, np.ndarray], theirs: dict[Any, np.ndarray]
) -> Measurement | None:
    """The measurement with the largest share of the variance of the difference; None if there is no variance."""
    keys = list(dict.fromkeys((*mine, *theirs)))
    zero = np.zeros_like(next(iter((mine or theirs).values())))
    differences = np.stack([mine.get(key, zero) - theirs.get(key, zero) for key in keys])
    total = differences.sum(axis=0)
    variance = float(np.var(total))
    if variance <= 1e-18 * float(np.mean(total)) ** 2 or variance == 0.0:
        return None
    shares = (differences * (total - total.mean())).mean(axis=1) / variance
    i = int(np.argmax(shares))
    if keys[i] == "local work":
        return Measurement(rival.name, "", "", 0, 0.0, float(shares[i]))
    level, collective, size = keys[i]
    counts: dict[float, float] = {}
    for usage in (chosen.usage, rival.usage):
        for nbytes, times in usage.sizes.get(keys[i], {}).items():
            counts[nbytes] = counts.get(nbytes, 0.0) + times
    # The mean message size, weighted by bytes.
    weight = sum(nbytes * times for nbytes, times in counts.items())
    typical = sum(nbytes * nbytes * times for nbytes, times in counts.items()) / weight if weight else 0.0
    return Measurement(rival.name, _name_of(collective), level, size, typical, float(shares[i]))
