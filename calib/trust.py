"""How sure a choice among plans is, given how well the cluster's parameters are known.

A calibrated cluster carries K draws of its parameters (Bayesian bootstrap of the measurements).  A plan's cost is linear in them,

    cost_k = sum over (level, collective, group size) of  messages alpha_k + sent bytes beta_k + bytes gamma_k
             + (1 + e c_k) (launches l_k + FLOPs w_k + bytes m_k)

so all plans are priced under all draws at once.  From the matrix of costs (plans, draws):

    probability that a plan is best = how many draws it has the smallest cost in
    expected regret of the choice   = mean over draws of (its cost - the smallest) / the smallest

The rivals are plans that somebody might have chosen, and the optima under some of the draws: whatever the doubt could make best.
What would settle a tie: the doubt about the difference D between the choice and its strongest rival is split over the terms,
share = cov(term's difference, D) / var(D), and the measurement behind the largest share is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoddl.costmodel.assessment import Assessment
from autoddl.costmodel.calibration import TRANSFER, Calibration
from autoddl.costmodel.cluster import Cluster, Link
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.localwork import LocalWork
from autoddl.costmodel.units import format_bytes
from autoddl.costmodel.workload import Workload

__all__ = [
    "Candidate",
    "Measurement",
    "Trust",
    "Usage",
    "drawn_cluster",
    "outside_notes",
    "reference_peak",
    "trust",
    "usage_of",
]

#: A tie: the choice is best with less than this probability.
SURE = 0.95


@dataclass(frozen=True)
class Usage:
    """What one training step uses on each device.

    Attributes:
        rings: for each (level, collective, group size) the sums of messages, sent bytes and bytes n.
        sizes: and the n of each step, with how often it runs.
        launches, flops, memory_bytes: local work, as `autoddl.costmodel.cluster` prices it; FLOPs as the reference precision
            (float32, where the device has it) does them.
    """

    rings: Mapping[tuple[str, Collective, int], tuple[float, float, float]]
    sizes: Mapping[tuple[str, Collective, int], Mapping[float, float]]
    launches: float = 0.0
    flops: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A plan that could be chosen."""

    name: str
    usage: Usage


@dataclass(frozen=True)
class Measurement:
    """What to measure to tell two plans apart: ``share`` of the doubt about their difference would go with it.

    ``collective`` is "" for local work, with no level, ranks or size.
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
    """How sure a choice is.

    Attributes:
        probability: that it is the best of all candidates.
        expected_regret: how much more it costs than the best, relative, averaged over the draws.
        rivals: (name, probability of being best) of the others, likeliest first.
        measurement: what would settle a tie; None where there is none, or nothing would.
        num_draws: of the parameters.
    """

    probability: float
    expected_regret: float
    rivals: tuple[tuple[str, float], ...]
    measurement: Measurement | None
    num_draws: int


def usage_of(assessment: Assessment, cluster: Cluster, workload: Workload) -> Usage:
    """What a plan uses per training step."""
    sums: dict[tuple[str, Collective, int], np.ndarray] = {}
    sizes: dict[tuple[str, Collective, int], dict[float, float]] = {}
    names = [level.name for level in cluster.levels]
    for layer in assessment.layers:
        repeated = (*layer.forward_steps, *layer.backward_steps)
        for steps, times in ((repeated, workload.num_micro_batches), (layer.work.gradient, 1)):
            for step in steps:
                key = (names[step.axis.level], step.collective, step.axis.size)
                amounts = times * np.array([step.messages, step.sent_bytes, step.nbytes])
                sums[key] = sums.get(key, np.zeros(3)) + amounts
                counts = sizes.setdefault(key, {})
                counts[step.nbytes] = counts.get(step.nbytes, 0.0) + times
    rings = {key: (float(a), float(b), float(c)) for key, (a, b, c) in sums.items()}
    local = LocalWork()
    for layer in assessment.layers:
        local += workload.num_micro_batches * (layer.work.forward_work + layer.work.backward_work)
    relative = cluster.device.peak_flops[workload.precision] / reference_peak(cluster)
    return Usage(rings, sizes, local.launches, local.flops / relative, local.nbytes)


def trust(candidates: Sequence[Candidate], cluster: Cluster, communication_only: bool) -> Trust:
    """How sure the first of the candidates is; the cluster is calibrated."""
    parts = [_parts(candidate.usage, cluster, communication_only) for candidate in candidates]
    costs = np.stack([sum(own.values(), np.zeros(_num_draws(cluster))) for own in parts])
    best = costs.min(axis=0)
    # Equal costs, of equal plans say, are no doubt about the first of them.
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


def costs_of(usage: Usage, cluster: Cluster, communication_only: bool) -> np.ndarray:
    """Seconds per step under every draw."""
    return sum(_parts(usage, cluster, communication_only).values(), np.zeros(_num_draws(cluster)))


def outside_notes(usage: Usage, cluster: Cluster) -> list[str]:
    """Where a plan's group sizes or messages lie outside of what its cluster was calibrated for."""
    calibration = cluster.calibration
    assert calibration is not None
    notes = []
    for level, collective in dict.fromkeys((key[0], key[1]) for key in usage.rings):
        covered = calibration.coverage(level, collective.value)
        if covered is None:
            notes.append(f"{collective.value} on the {level} level was not calibrated")
            continue
        keys = [key for key in usage.rings if key[:2] == (level, collective)]
        groups = sorted(key[2] for key in keys if key[2] not in covered.groups)
        if groups:
            measured = ", ".join(map(str, covered.groups))
            notes.append(
                f"{collective.value} over {', '.join(map(str, groups))} {level} ranks lies outside of the calibrated group "
                f"sizes ({measured})"
            )
        sizes = [size for key in keys for size in usage.sizes[key]]
        outside = [size for size in sizes if not covered.smallest_bytes <= size <= covered.largest_bytes]
        if outside:
            where = f"{format_bytes(covered.smallest_bytes)} to {format_bytes(covered.largest_bytes)}"
            ends = format_bytes(min(outside))
            if max(outside) > min(outside):
                ends += f" to {format_bytes(max(outside))}"
            notes.append(f"{collective.value} of {ends} ({level}) lies outside of the calibrated sizes ({where})")
    return notes


def drawn_cluster(cluster: Cluster, k: int) -> Cluster:
    """The cluster as the k-th draw has it."""
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
    device = replace(
        cluster.device,
        launch_s=launch,
        efficiency=1.0 / max(work, 1e-30) / reference_peak(cluster),
        memory_bandwidth=1.0 / max(memory, 1e-18),
    )
    return replace(cluster, links=(links[0], links[1]), device=device)


class _Draws:
    """The terms of a calibrated cluster under all draws; what was not measured is the same in all of them."""

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
        """(alpha, beta, gamma) of a collective in groups of ``size`` (0: of any), or of the link itself."""
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
                places, known, copy = [(level, collective.value, size)], link.groups[collective, size], 0.0
        found = next((self._values[place] for place in places if place in self._values), None)
        if found is None:
            return np.full(self.num, known[0]), np.full(self.num, 1.0 / known[1]), np.full(self.num, copy)
        zero, excess = np.zeros(self.num), self.cluster.excess
        return (
            found.get("latency", zero) + excess * found.get("crowded latency", zero),
            found.get("slowness", zero) + excess * found.get("crowded slowness", zero),
            found.get("copy", zero),
        )

    def device(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds per launch, per FLOP and per byte."""
        device = self.cluster.device
        if not self.has_device:
            rate = device.efficiency * reference_peak(self.cluster)
            ones = np.ones(self.num)
            return device.launch_s * ones, ones / rate, ones / device.memory_bandwidth
        found = self._values["device", "", 0]
        zero = np.zeros(self.num)
        slower = 1.0 + self.cluster.excess * found.get("crowding", zero)
        launch, work, memory = (slower * found.get(term, zero) for term in ("launch", "work", "memory"))
        return launch, work, memory


def reference_peak(cluster: Cluster) -> float:
    """The peak FLOP/s of the precision that efficiencies are measured in: float32, where the device has it."""
    peaks = cluster.device.peak_flops
    return peaks.get("float32", next(iter(peaks.values())))


def _num_draws(cluster: Cluster) -> int:
    calibration: Calibration | None = cluster.calibration
    return len(calibration.replicates[0].values) if calibration and calibration.replicates else 1


def _parts(usage: Usage, cluster: Cluster, communication_only: bool) -> dict[Any, np.ndarray]:
    """A plan's cost under all draws, term by term."""
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
    chosen: Candidate, rival: Candidate, mine: dict[Any, np.ndarray], theirs: dict[Any, np.ndarray]
) -> Measurement | None:
    """The measurement whose doubt is the largest part of that about the difference."""
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
    # Where most of the bytes are.
    weight = sum(nbytes * times for nbytes, times in counts.items())
    typical = sum(nbytes * nbytes * times for nbytes, times in counts.items()) / weight if weight else 0.0
    return Measurement(rival.name, collective.value, level, size, typical, float(shares[i]))
