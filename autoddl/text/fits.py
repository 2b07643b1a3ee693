"""What a fit found, and how well a cluster file predicts measurements, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.calib.clusterfile import Fit, errors_of_cluster, quality_of
from autoddl.calib.device import DeviceFit
from autoddl.calib.fit import UNDISTURBED, FormTrial, HeldOut, LevelFit
from autoddl.calib.forms import Key
from autoddl.calib.measurements import Sample
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_bytes, format_seconds

from .tables import Column, Section, Table, Text

__all__ = ["crowding_remarks", "errors_section", "errors_text", "fit_text"]


def fit_text(fit: Fit) -> Text:
    """The formulas that were tried, the parameters, how well each level is predicted, and the device."""
    sections: list[Section] = []
    for level in fit.levels:
        errors = errors_section(f"Held-out message sizes, {level.level}", level.held_out)
        sections += [
            _forms(level),
            _parameters(level),
            [*errors, *crowding_remarks(level), *_disturbance(fit, level.level)],
        ]
    if fit.device is not None:
        sections.append(_device(fit.device))
    return Text(tuple(sections))


def errors_text(cluster: Cluster, samples: Sequence[Sample]) -> Text:
    """How well a cluster file predicts samples that it was not fitted to.

    Raises:
        UserError: none of the samples is of a collective.
    """
    errors = errors_of_cluster(cluster, samples)
    if not errors:
        raise UserError("there are no samples of collectives to compare with")
    levels = dict.fromkeys(one.point.level for one in errors)
    return Text(
        tuple(
            errors_section(
                f"{cluster.name} against these samples, {level}", [one for one in errors if one.point.level == level]
            )
            for level in levels
        )
    )


# ---- Formulas and parameters -------------------------------------------------------------------------------------------------


def _forms(fit: LevelFit) -> Section:
    columns: tuple[Column[FormTrial], ...] = (
        Column("formula", lambda choice: choice.form.name),
        Column("parameters", lambda choice: str(choice.num_parameters), right=True),
        Column("held-out error", lambda choice: f"{choice.median_error:.1%}", right=True),
        Column("", lambda choice: "taken" if choice.form == fit.form else ""),
    )
    remark = "  median relative error on message sizes that were left out of the fit, one at a time"
    return [f"Formulas tried, {fit.level}", Table.of(columns, fit.choices), remark]


@dataclass(frozen=True)
class _Terms:
    """The parameters of a collective, or of all, for groups of ``group`` ranks (0: any), by their terms."""

    fit: LevelFit
    everything: Any
    collective: str
    group: int

    def with_interval(self, term: str, show: Any) -> str:
        """A parameter and its interval; ``-`` where it has none."""
        key = next((key for key in self.everything if self._is_of(key) and key.term == term), None)
        return _with_interval(self.fit, self.everything, key, show)

    def crowded(self) -> str:
        """What is added where there are more ranks than cores."""
        terms = (("crowded latency", format_seconds), ("crowded slowness", _per_byte))
        known = {key.term for key in self.everything if self._is_of(key)}
        return ", ".join(self.with_interval(term, show) for term, show in terms if term in known)

    def _is_of(self, key: Key) -> bool:
        return (key.collective, key.group) == (self.collective, self.group)


_PARAMETERS: tuple[Column[_Terms], ...] = (
    Column("collective", lambda own: own.collective or ("all collectives" if own.fit.transfer else "all")),
    Column("ranks", lambda own: str(own.group) if own.group else "any", right=True),
    Column("latency [95 %]", lambda own: own.with_interval("latency", format_seconds), wraps=True),
    Column("bandwidth [95 %]", lambda own: own.with_interval("slowness", _rate), wraps=True),
    Column("copy", lambda own: own.with_interval("copy", _per_byte), rank=1),
    Column("crowded: latency, per byte", lambda own: own.crowded(), rank=2, name="crowded"),
)


def _parameters(fit: LevelFit) -> Section:
    everything = {**fit.parameters, **fit.transfer}
    rows = [_Terms(fit, everything, *own) for own in dict.fromkeys((key.collective, key.group) for key in everything)]
    return [f"Parameters, {fit.level}", Table.of(_PARAMETERS, rows)]


def _with_interval(fit: LevelFit, values: Any, key: Key | None, show: Any) -> str:
    if key is None:
        return "-"
    low, high = sorted(fit.interval(key), reverse=show is _rate)
    return f"{show(values[key])} [{show(low)}, {show(high)}]"


def _rate(slowness: float) -> str:
    return f"{1e-9 / slowness:.3g} GB/s" if slowness > 1e-18 else "unlimited"


def _per_byte(slowness: float) -> str:
    return f"{slowness * 1e12:.3g} ps/B"


# ---- Errors ------------------------------------------------------------------------------------------------------------------

_ERRORS: tuple[Column[tuple[str, ...]], ...] = (
    Column("collective"),
    Column("ranks/node", right=True),
    Column("message sizes"),
    Column("points", right=True),
    Column("median error", right=True),
)


def errors_section(title: str, errors: Sequence[HeldOut]) -> Section:
    """The median errors of predictions: of each collective in each range of message sizes, and of all."""
    rows: list[tuple[str, ...]] = []
    level = errors[0].point.level
    for quality in quality_of(level, errors):
        sizes = f"{format_bytes(quality.smallest_bytes)} to {format_bytes(quality.largest_bytes)}"
        error = f"{quality.held_out_error:.1%}"
        rows.append((quality.collective, str(quality.ranks_per_node), sizes, str(quality.num_points), error))
    for ranks in sorted({one.point.ranks_per_node for one in errors}):
        mine = [one for one in errors if one.point.ranks_per_node == ranks and 2**16 <= one.point.num_bytes <= 2**24]
        if mine:
            error = f"{np.median([one.error for one in mine]):.1%}"
            nbytes = [one.point.num_bytes for one in mine]
            sizes = f"{format_bytes(min(nbytes))} to {format_bytes(max(nbytes))}"
            rows.append(("all of them", str(ranks), sizes, str(len(mine)), error))
    return [title, Table(_ERRORS, tuple(rows))]


def crowding_remarks(fit: LevelFit) -> Iterable[str]:
    """Where more ranks than cores make communication slower, and harder to predict, and by how much."""
    alone: dict[object, float] = {}
    for point in fit.points:
        if point.excess == 0:
            alone[point.collective, point.ranks, point.num_bytes] = point.seconds
    crowded = sorted({(point.ranks_per_node, point.cores) for point in fit.points if point.excess > 0})
    for ranks, cores in crowded:
        slower: dict[str, list[float]] = {}
        for point in fit.points:
            before = alone.get((point.collective, point.ranks, point.num_bytes))
            if point.ranks_per_node == ranks and before is not None:
                slower.setdefault(point.collective, []).append(point.seconds / before)
        text = f"  {ranks} ranks on {cores} cores"
        if slower:
            parts = ", ".join(f"{name} {np.median(ratios):.2g}x" for name, ratios in slower.items())
            text += f": the same groups and sizes take longer than with a core for each rank ({parts})"
        errors = [[o.error for o in fit.held_out if (o.point.excess > 0) == is_crowded] for is_crowded in (False, True)]
        if all(errors):
            text += f"; held-out error {np.median(errors[1]):.1%} against {np.median(errors[0]):.1%}"
        yield text


def _disturbance(fit: Fit, level: str) -> Iterable[str]:
    foreign = [sample.foreign for sample in fit.samples if sample.level == level]
    disturbed = float(np.mean([share > UNDISTURBED for share in foreign]))
    if disturbed >= 0.005:
        yield f"  other processes used more than {UNDISTURBED:.0%} of the cores during {disturbed:.0%} of the samples"


# ---- The device --------------------------------------------------------------------------------------------------------------


def _device(fit: DeviceFit) -> Section:
    rows = []
    for term, name, show in (
        ("launch", "one operation", format_seconds),
        ("work", "products", lambda value: f"{1e-9 / value:.3g} GFLOP/s" if value else "unlimited"),
        ("memory", "memory", _rate),
        ("crowding", "each excess rank per core", lambda value: f"+{value:.0%}"),
    ):
        value = fit.parameters[term]
        ends = np.quantile(fit.draws[term], [0.025, 0.975])
        low, high = ends if term in ("launch", "crowding") else ends[::-1]
        rows.append((name, f"{show(value)} [{show(low)}, {show(high)}]"))
    remark = f"  median relative error {fit.error:.1%} over {fit.num_points} products and element-wise operations"
    return ["Local work", Table((Column(), Column("fit [95 %]")), tuple(rows)), remark]
