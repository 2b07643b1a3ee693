"""The fit of a cluster to measurements, and the errors of a cluster file on other measurements, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.calib.clusterfile import BothLevels, Fit, both_levels, errors_of_cluster, quality_of
from autoddl.calib.device import DeviceFit, half_speed_of, product_term, work_term
from autoddl.calib.fit import UNDISTURBED, FormTrial, HeldOut, LevelFit
from autoddl.calib.forms import Key
from autoddl.calib.measurements import Sample
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_bytes, format_seconds

from .tables import Column, Section, Table, Text

__all__ = ["crowding_remarks", "errors_section", "errors_text", "fit_text"]


def fit_text(fit: Fit, cluster: Cluster | None = None) -> Text:
    """Return formulas tried, parameters and held-out errors for each network level, and the fit of the device if there is one.

    Args:
        fit: the fit.
        cluster: the fitted cluster, with which groups on both levels are compared; None: leave them out.
    """
    sections: list[Section] = []
    for level in fit.levels:
        errors = errors_section(f"Held-out message sizes, {level.level}", level.held_out)
        sections += [
            _forms(level),
            _parameters(level),
            [*errors, *crowding_remarks(level), *_disturbance(fit, level.level)],
        ]
    if cluster is not None and (both := both_levels(cluster, fit.samples)):
        sections.append(_both_levels(both))
    if fit.device is not None:
        sections.append(_device(fit.device))
        if fit.device.held_out:
            sections.append(_products(fit.device))
    return Text(tuple(sections))


def errors_text(cluster: Cluster, samples: Sequence[Sample]) -> Text:
    """Return the errors of a cluster file on samples that it was not fitted to.

    Raises:
        UserError: none of the samples is of a collective.
    """
    errors = errors_of_cluster(cluster, samples)
    if not errors:
        raise UserError("there are no samples of collectives to compare with")
    by_level: dict[str, list[HeldOut]] = {}
    for error in errors:
        by_level.setdefault(error.point.level, []).append(error)
    return Text(
        tuple(
            errors_section(f"{cluster.name} against these samples, {level}", level_errors)
            for level, level_errors in by_level.items()
        )
    )


# ---- Formulas and parameters -------------------------------------------------------------------------------------------------


def _forms(fit: LevelFit) -> Section:
    columns: tuple[Column[FormTrial], ...] = (
        Column("formula", lambda trial: trial.form.name),
        Column("parameters", lambda trial: str(trial.num_parameters), right=True),
        Column("held-out error", lambda trial: f"{trial.median_error:.1%}", right=True),
        Column("", lambda trial: "taken" if trial.form == fit.form else ""),
    )
    remark = "  median relative error on message sizes that were left out of the fit, one at a time"
    return [f"Formulas tried, {fit.level}", Table.of(columns, fit.choices), remark]


@dataclass(frozen=True)
class _ParameterRow:
    """A row of the table of parameters: the parameters of one collective and one size of groups.

    Attributes:
        fit: the fit of the network level.
        values: all parameters of the level.
        collective: name of the collective; empty for the parameters that all collectives share.
        group: number of ranks in a group; 0 for any number.
    """

    fit: LevelFit
    values: Mapping[Key, float]
    collective: str
    group: int

    def with_interval(self, term: str, show: Callable[[float], str]) -> str:
        """A parameter and its interval of confidence; ``-`` if the row does not have it."""
        key = next((key for key in self._keys() if key.term == term), None)
        if key is None:
            return "-"
        low, high = sorted(self.fit.interval(key), reverse=show is _rate)
        return f"{show(self.values[key])} [{show(low)}, {show(high)}]"

    def increments(self) -> str:
        """What is added to latency and time per byte, if ranks share cores (crowded) or pairs of ranks exchange."""
        terms = {key.term for key in self._keys()}
        found = []
        for kind in ("crowded", "exchanged"):
            shown = ((f"{kind} latency", format_seconds), (f"{kind} slowness", _per_byte))
            values = [self.with_interval(term, show) for term, show in shown if term in terms]
            if values:
                found.append(f"{kind}: {', '.join(values)}")
        return "; ".join(found)

    def _keys(self) -> list[Key]:
        return [key for key in self.values if (key.collective, key.group) == (self.collective, self.group)]


_PARAMETERS: tuple[Column[_ParameterRow], ...] = (
    Column("collective", lambda row: row.collective or ("all collectives" if row.fit.transfer else "all")),
    Column("ranks", lambda row: str(row.group) if row.group else "any", right=True),
    Column("latency [95 %]", lambda row: row.with_interval("latency", format_seconds), wraps=True),
    Column("bandwidth [95 %]", lambda row: row.with_interval("slowness", _rate), wraps=True),
    Column("copy", lambda row: row.with_interval("copy", _per_byte), rank=1),
    Column("increments: latency, per byte", lambda row: row.increments(), rank=2, name="increments"),
)


def _parameters(fit: LevelFit) -> Section:
    values = {**fit.parameters, **fit.transfer}
    groups = dict.fromkeys((key.collective, key.group) for key in values)
    rows = [_ParameterRow(fit, values, collective, group) for collective, group in groups]
    return [f"Parameters, {fit.level}", Table.of(_PARAMETERS, rows)]


def _rate(slowness: float) -> str:
    """The bandwidth of a slowness in seconds per byte."""
    return f"{1e-9 / slowness:.3g} GB/s" if slowness > 1e-18 else "unlimited"


def _per_byte(slowness: float) -> str:
    return f"{slowness * 1e12:.3g} ps/B"


# ---- Errors ------------------------------------------------------------------------------------------------------------------

#: Range of message sizes of the rows for all collectives [bytes].
_ALL_SIZES = (2**16, 2**24)
_ERRORS: tuple[Column[tuple[str, ...]], ...] = (
    Column("collective"),
    Column("ranks/node", right=True),
    Column("message sizes"),
    Column("points", right=True),
    Column("median error", right=True),
)


def errors_section(title: str, errors: Sequence[HeldOut]) -> Section:
    """Return a table of median errors: for each collective and range of message sizes, and for all collectives together.

    Args:
        title: title of the section.
        errors: the errors of one network level, at least one.
    """
    rows: list[tuple[str, ...]] = []
    level = errors[0].point.level
    for quality in quality_of(level, errors):
        sizes = f"{format_bytes(quality.smallest_bytes)} to {format_bytes(quality.largest_bytes)}"
        error = f"{quality.held_out_error:.1%}"
        rows.append((quality.collective, str(quality.ranks_per_node), sizes, str(quality.num_points), error))
    smallest, largest = _ALL_SIZES
    for ranks in sorted({error.point.ranks_per_node for error in errors}):
        points = [e for e in errors if e.point.ranks_per_node == ranks and smallest <= e.point.num_bytes <= largest]
        if points:
            median = f"{np.median([point.error for point in points]):.1%}"
            nbytes = [point.point.num_bytes for point in points]
            sizes = f"{format_bytes(min(nbytes))} to {format_bytes(max(nbytes))}"
            rows.append(("all of them", str(ranks), sizes, str(len(points)), median))
    return [title, Table(_ERRORS, tuple(rows))]


def crowding_remarks(fit: LevelFit) -> Iterable[str]:
    """Return a line for each number of ranks above the number of cores: how much slower communication is, and held-out errors."""
    uncrowded_s: dict[object, float] = {}
    for point in fit.points:
        if point.excess == 0:
            uncrowded_s[point.collective, point.ranks, point.num_bytes] = point.seconds
    crowded = sorted({(point.ranks_per_node, point.cores) for point in fit.points if point.excess > 0})
    for ranks, cores in crowded:
        slowdowns: dict[str, list[float]] = {}
        for point in fit.points:
            seconds = uncrowded_s.get((point.collective, point.ranks, point.num_bytes))
            if point.ranks_per_node == ranks and seconds is not None:
                slowdowns.setdefault(point.collective, []).append(point.seconds / seconds)
        text = f"  {ranks} ranks on {cores} cores"
        if slowdowns:
            parts = ", ".join(f"{name} {np.median(ratios):.2g}x" for name, ratios in slowdowns.items())
            text += f": the same groups and sizes take longer than with a core for each rank ({parts})"
        uncrowded_errors = [one.error for one in fit.held_out if one.point.excess <= 0]
        crowded_errors = [one.error for one in fit.held_out if one.point.excess > 0]
        if uncrowded_errors and crowded_errors:
            text += f"; held-out error {np.median(crowded_errors):.1%} against {np.median(uncrowded_errors):.1%}"
        yield text


def _disturbance(fit: Fit, level: str) -> Iterable[str]:
    """A line with the share of samples that other processes disturbed, if the share is at least 0.5 %."""
    foreign_shares = [sample.foreign for sample in fit.samples if sample.level == level]
    disturbed = float(np.mean([share > UNDISTURBED for share in foreign_shares]))
    if disturbed >= 0.005:
        yield f"  other processes used more than {UNDISTURBED:.0%} of the cores during {disturbed:.0%} of the samples"


def _both_levels(compared: Sequence[BothLevels]) -> Section:
    """Return a table of collectives over all ranks of several hosts: in one step as measured, and in steps as plans run them."""
    columns: tuple[Column[BothLevels], ...] = (
        Column("collective", lambda one: one.point.collective),
        Column("ranks", lambda one: str(one.point.ranks), right=True),
        Column("message size", lambda one: format_bytes(one.point.num_bytes), right=True),
        Column("at once", lambda one: format_seconds(one.point.seconds), right=True),
        Column("by level", lambda one: format_seconds(one.by_level_s), right=True),
    )
    remark = (
        "  at once: one collective over all ranks, measured; by level: the steps of plans, one level each, by this fit"
    )
    rows = sorted(compared, key=lambda one: (one.point.collective, one.point.num_bytes))
    return ["Both levels", Table.of(columns, rows), remark]


def _flops(work: float) -> str:
    """The rate of products of a time per FLOP."""
    return f"{1e-9 / work:.3g} GFLOP/s" if work else "unlimited"


# ---- The device --------------------------------------------------------------------------------------------------------------


def _device(fit: DeviceFit) -> Section:
    rows = []
    products = [
        (work_term(rate), f"products in {rate}" if len(fit.rates) > 1 else "products", _flops) for rate in fit.rates
    ]
    for term, name, show in (
        ("launch", "one operation", format_seconds),
        *products,
        ("memory", "memory", _rate),
        ("crowding", "each excess rank per core", lambda value: f"+{value:.0%}"),
    ):
        value = fit.parameters[term]
        interval = np.quantile(fit.draws[term], [0.025, 0.975])
        low, high = interval if term in ("launch", "crowding") else interval[::-1]  # the others are shown as rates
        rows.append((name, f"{show(value)} [{show(low)}, {show(high)}]"))
        rows += [
            _half_speed(fit, rate)
            for rate in fit.rates
            if term == work_term(rate) and fit.parameters[product_term(rate)]
        ]
    remark = f"  median relative error {fit.error:.1%} over {fit.num_points} products and element-wise operations"
    return ["Local work", Table((Column(), Column("fit [95 %]")), tuple(rows)), remark]


def _products(fit: DeviceFit) -> Section:
    """The prediction of each product from those of other shapes."""
    rows = [
        (
            " x ".join(map(str, one.sample.product)),
            one.sample.type,
            str(one.sample.ranks_per_node),
            format_seconds(one.seconds),
            format_seconds(one.predicted_s),
            f"{one.error:.1%}",
        )
        for one in sorted(fit.held_out, key=lambda one: (one.sample.type, one.sample.ranks_per_node, one.seconds))
    ]
    median = float(np.median([one.error for one in fit.held_out]))
    remark = f"  each shape predicted from the others; median relative error {median:.1%}"
    columns: tuple[Column[Any], ...] = (
        Column("m x k x n"),
        Column("precision"),
        *(Column(name, right=True) for name in ("ranks/node", "measured", "predicted", "error")),
    )
    return ["Held-out products", Table(columns, tuple(rows)), remark]


def _half_speed(fit: DeviceFit, rate: str) -> tuple[str, str]:
    """Name and value of the FLOPs at which products reach half of their rate."""
    value, draws = half_speed_of(fit, rate)
    low, high = np.quantile(draws, [0.025, 0.975])
    name = f"half of it in {rate} at" if len(fit.rates) > 1 else "half of it at"
    return name, f"{_flop(value)} [{_flop(low)}, {_flop(high)}]"


def _flop(value: float) -> str:
    return f"{value / 1e9:.3g} GFLOP" if value >= 1e9 else f"{value / 1e6:.3g} MFLOP"
