"""The cluster document of a fit: parameters with their intervals, and the ``calibration`` record.

Values that were not measured are taken from the base cluster: memory, peak rates, network levels without samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np

from autoddl.costmodel.calibration import TRANSFER, Coverage, FormTried, Quality
from autoddl.costmodel.cluster import LEVEL_NAMES, Cluster, Device, from_document
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import counted

from .device import DeviceFit, fit_device, half_speed_of, product_term, work_term
from .fit import HeldOut, LevelFit, fit_level, fit_parameters, points_of
from .forms import FORMS, Form, Key, MeasuredPoint, is_exchange
from .measurements import BOTH_LEVELS, Sample
from .trust import reference_peak

__all__ = ["BothLevels", "Fit", "both_levels", "calibrated_document", "errors_of_cluster", "fit_samples", "quality_of"]

#: Ranges of message sizes [bytes] with separate errors: dominated by latency, typical of layers, and large.
SIZE_RANGES = ((1, 2**16 - 1), (2**16, 2**24), (2**24 + 1, 2**63))


@dataclass(frozen=True)
class Fit:
    """The fit of all samples.

    Attributes:
        levels: the fit of each network level that was measured.
        device: the fit of the device; None if it was not measured.
        samples: all samples.
    """

    levels: tuple[LevelFit, ...]
    device: DeviceFit | None
    samples: tuple[Sample, ...]


def fit_samples(samples: Sequence[Sample], seed: int = 0) -> Fit:
    """Fit all network levels and the device.

    Raises:
        UserError: no collectives were measured, or one was measured at a single message size.
    """
    fits = []
    for level in LEVEL_NAMES:
        points = points_of(samples, level)
        if points:
            fits.append(fit_level(points, level, seed))
    if not fits:
        raise UserError(
            "there are no samples of collectives; measure all-reduce, all-gather, reduce-scatter or all-to-all"
        )
    return Fit(tuple(fits), fit_device(samples, seed), tuple(samples))


def calibrated_document(fit: Fit, base: Cluster, name: str) -> dict[str, Any]:
    """The document of the calibrated cluster.

    Args:
        fit: the fit.
        base: the cluster whose values are used if they were not measured.
        name: of the calibrated cluster.

    Raises:
        UserError: the document is not a valid cluster.
    """
    document: dict[str, Any] = {key: value for key, value in base.document.items() if key != "calibration"}
    date = _date(fit.samples)
    document["name"] = name
    document["description"] = _description(fit.samples, base, date)
    document["links"] = dict(document["links"])
    rings = [point for level in fit.levels for point in level.points]
    document["num_nodes"] = max(1 + any(level.level == "inter-node" for level in fit.levels), _num_nodes(fit.samples))
    document["devices_per_node"] = max(point.ranks_per_node for point in rings)
    cores = {sample.cores for sample in fit.samples if sample.cores}
    document.pop("cores_per_node", None)
    if cores:
        document["cores_per_node"] = max(cores)
    for level in fit.levels:
        document["links"][level.level] = _link(level, f"measured {date[:10]}")
    if fit.device is not None and set(fit.device.rates) & set(base.device.peak_flops):
        document["device"] = _device(fit.device, base, f"measured {date[:10]}")
    else:
        fit = replace(fit, device=None)
    calibrated = from_document(document, name)
    document["calibration"] = _calibration(fit, date, calibrated.device)
    from_document(document, name)
    return document


def _description(samples: Sequence[Sample], base: Cluster, date: str) -> str:
    """What was measured, of the largest job; of samples that do not say it, what the base is, if that can be."""
    largest = max(samples, key=lambda sample: (sample.num_nodes, sample.job_ranks, bool(sample.network)))
    where = measured_on(largest)
    if not where:
        return f"{base.document['description']}; calibrated {date[:10]}"
    return f"{where}; calibrated {date[:10]}; what was not measured is that of {base.name}"


def measured_on(sample: Sample) -> str:
    """The hosts, devices and network of the job of a sample; empty if it was one host, and neither device nor network are known.

    >>> job = Sample("all-reduce", "inter-node", 4, 4096, 0, 1e-3, job_ranks=8, ranks_per_node=2, device="CPU", network="eth0")
    >>> measured_on(job)
    '4 hosts x 2 CPU ranks over eth0'
    >>> measured_on(replace(job, job_ranks=16, ranks_per_node=8, device="NVIDIA A100-SXM4-80GB", network="NCCL"))
    '2 nodes x 8 NVIDIA A100-SXM4-80GB, NCCL'
    """
    nodes, size = sample.num_nodes, sample.ranks_per_node
    if nodes == 1 and not (sample.device or sample.network):
        return ""
    if sample.device in ("", "CPU"):
        over = f" over {sample.network}" if sample.network else ""
        kind = f"{sample.device} rank".strip()
        return f"{counted(nodes, 'host')} x {counted(size, kind)}{over}"
    return f"{counted(nodes, 'node')} x {size} {sample.device}{f', {sample.network}' if sample.network else ''}"


def _num_nodes(samples: Sequence[Sample]) -> int:
    """The hosts of the largest job that measured the network between hosts, by samples that say what it is."""
    return max((s.num_nodes for s in samples if s.level == "inter-node" and s.network), default=1)


def _quantity(value: float, unit: str, factor: float, source: str, draws: np.ndarray | None = None) -> dict[str, Any]:
    """A quantity of a cluster document: the SI value divided by ``factor``, which is its value in ``unit``."""
    entry: dict[str, Any] = {"value": _digits(value / factor), "unit": unit, "source": source}
    if draws is not None:
        low, high = np.quantile(draws / factor, [0.025, 0.975])
        entry["interval"] = [_digits(low), _digits(high)]
    return entry


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


#: Bandwidth [bytes/s] of a link without time per byte: the largest that a cluster file allows.
_FASTEST = 1e18


def _terms(
    parameters: Mapping[Key, float],
    draws: Mapping[Key, np.ndarray],
    scope: tuple[str, int],
    source: str,
    is_exchanged: bool = False,
) -> dict[str, Any]:
    """Latency and bandwidth of a scope (collective, group size), and copy and crowding if they are parameters."""

    def value(term: str) -> float:
        return float(sum(parameters.get(Key(*scope, one), 0.0) for one in parts(term)))

    def drawn(term: str) -> np.ndarray | None:
        found = [draws[Key(*scope, one)] for one in parts(term) if Key(*scope, one) in draws]
        return sum(found[1:], found[0]) if found else None

    def parts(term: str) -> tuple[str, ...]:
        return (term, f"exchanged {term}") if is_exchanged else (term,)

    slowness = drawn("slowness")
    inverse = None if slowness is None else 1.0 / np.maximum(slowness, 1.0 / _FASTEST)
    entry: dict[str, Any] = {
        "latency": _quantity(value("latency"), "us", 1e-6, source, drawn("latency")),
        "bandwidth": _quantity(1.0 / max(value("slowness"), 1.0 / _FASTEST), "GB/s", 1e9, source, inverse),
    }
    if Key(*scope, "copy") in parameters:
        entry["copy"] = _quantity(value("copy"), "ps/B", 1e-12, source, drawn("copy"))
    if any(Key(*scope, f"crowded {term}") in parameters for term in ("latency", "slowness")):
        entry["crowding"] = {
            "latency": _quantity(value("crowded latency"), "us", 1e-6, source, drawn("crowded latency")),
            "slowness": _quantity(value("crowded slowness"), "ps/B", 1e-12, source, drawn("crowded slowness")),
        }
    return entry


def _link(fit: LevelFit, source: str) -> dict[str, Any]:
    """The fields of a link; its own (alpha, beta) are those of transfers if they were measured, else of all collectives."""
    form = fit.form
    rings = [point for point in fit.points if point.collective != TRANSFER]
    if fit.transfer:
        own = {Key("", 0, key.term): value for key, value in fit.transfer.items()}
        own_draws = {Key("", 0, key.term): draws for key, draws in fit.transfer_draws.items()}
        link = _terms(own, own_draws, ("", 0), f"{source}, point-to-point transfers")
    else:
        level = FORMS[1] if form.crowding else FORMS[0]
        link = _terms(fit_parameters(level, rings), {}, ("", 0), f"{source}, all collectives together")
    link["per"] = "device"
    names = sorted({point.collective for point in rings})
    if not form.by_collective:
        terms = partial(_terms, fit.parameters, fit.draws, ("", 0), f"{source}, all collectives together")
        shared, exchanged = terms(), terms(is_exchanged=True)
        if not fit.transfer:
            link.update(shared)
        if form.exchange:
            in_rings = {**shared, "groups": {"2": exchanged}}
            link["collectives"] = {name: exchanged if is_exchange(name) else in_rings for name in names}
        elif fit.transfer:
            link["collectives"] = dict.fromkeys(names, shared)
        return link
    if not form.by_group:
        link["collectives"] = {name: _terms(fit.parameters, fit.draws, (name, 0), source) for name in names}
        return link
    # Group sizes that were not measured use the fit to all measured group sizes.
    anywhere = fit_parameters(Form("", crowding=form.crowding), rings)
    link["collectives"] = {}
    for name in names:
        entry = _terms(anywhere, {}, (name, 0), f"{source}, all group sizes together")
        sizes = sorted({point.ranks for point in rings if point.collective == name})
        entry["groups"] = {str(size): _terms(fit.parameters, fit.draws, (name, size), source) for size in sizes}
        link["collectives"][name] = entry
    return link


def _device(fit: DeviceFit, base: Cluster, source: str) -> dict[str, Any]:
    """The device of the document.

    A device has one efficiency.  It is that of the *anchor*, the device's default precision or else the first that was measured,
    against the base's peak.  The peaks of other measured precisions become measured rate / efficiency, so that efficiency times
    peak is what products reach in every precision.
    """
    document = dict(base.document["device"])
    document["peak"] = dict(document["peak"])
    anchor = _anchor(fit, base.device)
    works = {rate: np.maximum(fit.draws[work_term(rate)], 1e-18) for rate in fit.rates}
    reached = {rate: 1.0 / max(fit.parameters[work_term(rate)], 1e-18) for rate in fit.rates}
    peak = base.device.peak_flops[anchor]
    if reached[anchor] > peak:
        peak = reached[anchor]
        document["peak"][anchor] = _quantity(peak, "GFLOP/s", 1e9, f"{source}: what large products reach")
    efficiency = min(1.0, reached[anchor] / peak)
    document["efficiency"] = _quantity(efficiency, "1", 1.0, source, np.minimum(1.0, 1.0 / works[anchor] / peak))
    for rate in fit.rates:
        if rate != anchor:
            text = f"{source}: large products reach {reached[rate] / 1e9:.6g} GFLOP/s, which is the efficiency times this peak"
            document["peak"][rate] = _quantity(
                reached[rate] / efficiency, "GFLOP/s", 1e9, text, 1.0 / works[rate] / efficiency
            )
    half_speed = {rate: half_speed_of(fit, rate) for rate in fit.rates if fit.parameters[product_term(rate)]}
    document.pop("half_speed", None)
    if half_speed:
        text = f"{source}: a product takes as long as if it had so many FLOPs more"
        document["half_speed"] = {
            rate: _quantity(value, "GFLOP", 1e9, text, draws) for rate, (value, draws) in half_speed.items()
        }
    document["launch"] = _quantity(fit.parameters["launch"], "us", 1e-6, source, fit.draws["launch"])
    memory = 1.0 / np.maximum(fit.draws["memory"], 1.0 / _FASTEST)
    document["memory_bandwidth"] = _quantity(
        1.0 / max(fit.parameters["memory"], 1.0 / _FASTEST), "GB/s", 1e9, source, memory
    )
    document.pop("crowding", None)
    if fit.parameters["crowding"]:
        document["crowding"] = _quantity(fit.parameters["crowding"], "1", 1.0, source, fit.draws["crowding"])
    return document


def _anchor(fit: DeviceFit, device: Device) -> str:
    """The measured precision whose efficiency the document gives."""
    return next(rate for rate in device.peak_flops if rate in fit.rates)


# ---- The calibration field ------------------------------------------------------------------------------------------------


def _calibration(fit: Fit, date: str, device: Device) -> dict[str, Any]:
    versions = sorted({sample.versions for sample in fit.samples if sample.versions})
    hosts = sorted({sample.host for sample in fit.samples if sample.host})
    cores = sorted({sample.cores for sample in fit.samples if sample.cores})
    machine = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    if cores:
        machine += f" ({'/'.join(map(str, cores))} cores)"
    return {
        "date": date,
        "machine": machine or "an unknown machine",
        "versions": " | ".join(versions[:4]) or "unknown versions",
        "num_samples": len(fit.samples),
        "covered": [_listed(asdict(covered)) for level in fit.levels for covered in _covered(level)],
        "quality": [asdict(quality) for level in fit.levels for quality in quality_of(level.level, level.held_out)],
        "forms": [asdict(tried) for level in fit.levels for tried in _forms(level)],
        "replicates": [*_level_replicates(fit.levels), *_device_replicates(fit.device, device)],
    }


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _date(samples: Iterable[Sample]) -> str:
    """The time of the last sample; the current time if samples have no times."""
    times = [sample.time for sample in samples if sample.time]
    return max(times) if times else datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _covered(fit: LevelFit) -> Iterable[Coverage]:
    for collective in dict.fromkeys(point.collective for point in fit.points):
        points = [point for point in fit.points if point.collective == collective]
        sizes = [point.num_bytes for point in points]
        groups = tuple(sorted({point.ranks for point in points}))
        yield Coverage(fit.level, collective, groups, min(sizes), max(sizes))


def quality_of(level: str, held_out: Sequence[HeldOut]) -> list[Quality]:
    """Median errors by collective, ranks per node and range of message sizes."""
    groups: dict[tuple[str, int, tuple[int, int]], list[HeldOut]] = {}
    for one in held_out:
        point = one.point
        sizes = next(r for r in SIZE_RANGES if r[0] <= point.num_bytes <= r[1])
        groups.setdefault((point.collective, point.ranks_per_node, sizes), []).append(one)
    result = []
    for (collective, ranks, _), members in sorted(groups.items()):
        measured = [one.point.num_bytes for one in members]
        error = float(np.median([one.error for one in members]))
        result.append(Quality(level, collective, ranks, min(measured), max(measured), _digits(error), len(members)))
    return result


def _forms(fit: LevelFit) -> Iterable[FormTried]:
    for choice in fit.choices:
        is_taken = choice.form == fit.form
        yield FormTried(fit.level, choice.form.name, choice.num_parameters, _digits(choice.median_error), is_taken)


def _level_replicates(levels: Sequence[LevelFit]) -> Iterable[dict[str, Any]]:
    for fit in levels:
        draws = {**fit.draws, **{Key(TRANSFER, 0, key.term): values for key, values in fit.transfer_draws.items()}}
        for key, values in draws.items():
            yield _replicates(fit.level, key, values)


def _device_replicates(fit: DeviceFit | None, device: Device) -> Iterable[dict[str, Any]]:
    """The draws of the device.

    Plans count FLOPs in the reference precision (:func:`autoddl.calib.trust.reference_peak`), so the draws of work are those of the
    anchor, converted to it: the time of products in the default precision then has its own uncertainty.
    """
    if fit is None:
        return
    anchor = _anchor(fit, device)
    to_reference = device.peak_flops[anchor] / reference_peak(device)
    yield _replicates("device", Key("", 0, "launch"), fit.draws["launch"])
    yield _replicates("device", Key("", 0, "work"), fit.draws[work_term(anchor)] * to_reference)
    for term in ("memory", "crowding"):
        yield _replicates("device", Key("", 0, term), fit.draws[term])


def _replicates(level: str, key: Key, values: np.ndarray) -> dict[str, Any]:
    return {
        "level": level,
        "collective": key.collective,
        "group": key.group,
        "term": key.term,
        "values": [float(f"{value:.4g}") for value in values],
    }


@dataclass(frozen=True)
class BothLevels:
    """A collective over all ranks of several hosts at once, against the same in steps of one level each, as plans run it.

    Attributes:
        point: the measured point of the single collective.
        by_level_s: predicted seconds of the steps.
    """

    point: MeasuredPoint
    by_level_s: float


def both_levels(cluster: Cluster, samples: Sequence[Sample]) -> list[BothLevels]:
    """Compare what was measured on both levels at once with the steps of a cluster, by `steps_by_level`."""
    found = []
    for point in points_of(samples, BOTH_LEVELS):
        inside = point.ranks_per_node
        steps = steps_by_level(Collective(point.collective), point.ranks // inside, inside, point.num_bytes)
        resized = cluster.resized(None, inside)
        found.append(BothLevels(point, sum(resized.links[level].time(step) for level, step in steps)))
    return found


def steps_by_level(collective: Collective, nodes: int, inside: int, nbytes: float) -> list[tuple[int, Step]]:
    """The steps of a collective over ``inside`` devices of each of some nodes, with the index of the level of each.

    A gather of n bytes runs between nodes first, on n / inside bytes, and then inside.  A scatter is its reverse.  An all-reduce
    scatters inside, reduces between nodes, and gathers inside.  An all-to-all exchanges the whole tensor on each level.

    >>> [(level, str(step.collective.value), step.nbytes) for level, step in steps_by_level(Collective.ALL_REDUCE, 2, 4, 1024.0)]
    [(1, 'reduce-scatter', 1024.0), (0, 'all-reduce', 256.0), (1, 'all-gather', 1024.0)]
    """

    def step(level: int, own: Collective, size: float) -> tuple[int, Step]:
        return level, Step(own, Axis(inside if level else nodes, 1 if level else inside), size)

    part = nbytes / inside
    if collective is Collective.ALL_REDUCE:
        scatter, gather = Collective.REDUCE_SCATTER, Collective.ALL_GATHER
        return [step(1, scatter, nbytes), step(0, collective, part), step(1, gather, nbytes)]
    if collective is Collective.ALL_TO_ALL:
        return [step(0, collective, nbytes), step(1, collective, nbytes)]
    gathers = [step(0, collective, part), step(1, collective, nbytes)]
    return gathers if collective is Collective.ALL_GATHER else gathers[::-1]


def errors_of_cluster(cluster: Cluster, samples: Sequence[Sample]) -> list[HeldOut]:
    """The predictions of a cluster for every point of some samples."""
    result = []
    sizes: dict[int, Cluster] = {}
    for index, level in enumerate(LEVEL_NAMES):
        for point in points_of(samples, level):
            # Crowding depends on the number of ranks per node.
            resized = sizes.setdefault(point.ranks_per_node, cluster.resized(None, point.ranks_per_node))
            link = resized.links[index]
            if point.collective == TRANSFER:
                seconds = link.message_time(1, point.num_bytes)
            else:
                seconds = link.time(
                    Step(Collective(point.collective), Axis(point.ranks, point.stride), point.num_bytes)
                )
            result.append(HeldOut(point, seconds))
    return result
