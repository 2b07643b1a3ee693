"""A fit as people read it: tables, and a picture of measured points and fitted lines."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.cluster import LEVEL_NAMES, Cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.writing import write_atomically

from .clusterfile import Fit, quality_of
from .fit import UNDISTURBED, HeldOut, LevelFit, points_of, predict
from .forms import FORMS, Key, Point
from .measurements import Sample

__all__ = ["Table", "draw", "errors_of_cluster", "saved", "tables", "tables_against"]


@dataclass(frozen=True)
class Table:
    """A title, rows of cells (the first one is the heading), which columns are numbers, and remarks below."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()


def tables(fit: Fit) -> list[Table]:
    """Everything that a fit has to say."""
    result = []
    for level in fit.levels:
        result += [
            _forms(level),
            _parameters(level),
            _quality(f"Held-out message sizes, {level.level}", level.held_out),
        ]
        result[-1] = replace(result[-1], remarks=(*crowding_remarks(level), *_disturbance(fit, level.level)))
    if fit.device is not None:
        result.append(_device(fit))
    return result


def tables_against(cluster: Cluster, samples: Sequence[Sample]) -> list[Table]:
    """How well a cluster file predicts samples that it was not fitted to."""
    errors = errors_of_cluster(cluster, samples)
    if not errors:
        raise UserError("there are no samples of collectives to compare with")
    levels = dict.fromkeys(one.point.level for one in errors)
    return [
        _quality(f"{cluster.name} against these samples, {level}", [one for one in errors if one.point.level == level])
        for level in levels
    ]


def errors_of_cluster(cluster: Cluster, samples: Sequence[Sample]) -> list[HeldOut]:
    """What a cluster predicts of every point of some samples."""
    result = []
    sizes: dict[int, Cluster] = {}
    for index, level in enumerate(LEVEL_NAMES):
        for point in points_of(samples, level):
            # Crowding goes by the ranks of a node.
            resized = sizes.setdefault(point.ranks_per_node, cluster.resized(None, point.ranks_per_node))
            link = resized.links[index]
            if point.collective == TRANSFER:
                seconds = link.latency_s + point.num_bytes / link.bandwidth
            else:
                seconds = link.time(
                    Step(Collective(point.collective), Axis(point.ranks, point.stride), point.num_bytes)
                )
            result.append(HeldOut(point, seconds))
    return result


def _forms(fit: LevelFit) -> Table:
    rows = [("formula", "parameters", "held-out error", "")]
    for choice in fit.choices:
        taken = "taken" if choice.form == fit.form else ""
        rows.append((choice.form.name, str(choice.num_parameters), f"{choice.median_error:.1%}", taken))
    remark = "  median relative error on message sizes that were left out of the fit, one at a time"
    return Table(f"Formulas tried, {fit.level}", tuple(rows), (1, 2), (remark,))


def _parameters(fit: LevelFit) -> Table:
    rows = [("collective", "ranks", "latency [95 %]", "bandwidth [95 %]", "copy", "crowded: latency, per byte")]
    everything = {**fit.parameters, **fit.transfer}
    for collective, group in dict.fromkeys((key.collective, key.group) for key in everything):
        name = collective or ("all" if not fit.transfer else "all collectives")
        cells = {key.term: key for key in everything if (key.collective, key.group) == (collective, group)}
        rows.append(
            (
                name,
                str(group) if group else "any",
                _with_interval(fit, everything, cells.get("latency"), format_seconds),
                _with_interval(fit, everything, cells.get("slowness"), _rate),
                _with_interval(fit, everything, cells.get("copy"), _per_byte),
                ", ".join(
                    _with_interval(fit, everything, cells.get(f"crowded {term}"), show)
                    for term, show in (("latency", format_seconds), ("slowness", _per_byte))
                    if f"crowded {term}" in cells
                ),
            )
        )
    return Table(f"Parameters, {fit.level}", tuple(rows), (1,))


def _with_interval(fit: LevelFit, values: Any, key: Key | None, show: Any) -> str:
    if key is None:
        return "-"
    low, high = sorted(fit.interval(key), reverse=show is _rate)
    return f"{show(values[key])} [{show(low)}, {show(high)}]"


def _rate(slowness: float) -> str:
    return f"{1e-9 / slowness:.3g} GB/s" if slowness > 1e-18 else "unlimited"


def _per_byte(slowness: float) -> str:
    return f"{slowness * 1e12:.3g} ps/B"


def _quality(title: str, errors: Sequence[HeldOut]) -> Table:
    rows = [("collective", "ranks/node", "message sizes", "points", "median error")]
    level = errors[0].point.level
    for quality in quality_of(level, errors):
        sizes = f"{format_bytes(quality.smallest_bytes)} to {format_bytes(quality.largest_bytes)}"
        error = f"{quality.held_out_error:.1%}"
        rows.append((quality.collective, str(quality.ranks_per_node), sizes, str(quality.num_points), error))
    for ranks in sorted({one.point.ranks_per_node for one in errors}):
        mine = [one for one in errors if one.point.ranks_per_node == ranks and 2**16 <= one.point.num_bytes <= 2**24]
        if mine:
            error = f"{np.median([one.error for one in mine]):.1%}"
            rows.append(("all of them", str(ranks), "64 KiB to 16 MiB", str(len(mine)), error))
    return Table(title, tuple(rows), (1, 3, 4))


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


def _device(fit: Fit) -> Table:
    assert fit.device is not None
    rows = [("", "fit [95 %]")]
    for term, name, show in (
        ("launch", "one operation", format_seconds),
        ("work", "products", lambda value: f"{1e-9 / value:.3g} GFLOP/s" if value else "unlimited"),
        ("memory", "memory", _rate),
        ("crowding", "each excess rank per core", lambda value: f"+{value:.0%}"),
    ):
        value = fit.device.parameters[term]
        ends = np.quantile(fit.device.draws[term], [0.025, 0.975])
        low, high = ends if term in ("launch", "crowding") else ends[::-1]
        rows.append((name, f"{show(value)} [{show(low)}, {show(high)}]"))
    remark = f"  median relative error {fit.device.error:.1%} over {fit.device.num_points} products and element-wise operations"
    return Table("Local work", tuple(rows), (), (remark,))


# ---- The picture -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def saved(path: str | os.PathLike[str], num_rows: int, num_columns: int) -> Iterator[Any]:
    """A grid of panels to be drawn in, which is then written; the ending of ``path`` says in which format.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'autoddl[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4.6 * num_columns, 3.6 * num_rows)
    figure, axes = pyplot.subplots(num_rows, num_columns, figsize=size, squeeze=False)
    try:
        yield axes
        figure.tight_layout()
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=120, format=_format(path, figure.canvas.get_supported_filetypes()))
    finally:
        pyplot.close(figure)
    write_atomically(path, drawn.getvalue())


def _format(path: str | os.PathLike[str], known: Iterable[str]) -> str:
    ending = Path(path).suffix.lstrip(".").lower() or "png"
    if ending not in known:
        raise UserError(
            f"{path}: no picture can be written as {ending!r}; known endings are {', '.join(sorted(known))}"
        )
    return ending


def draw(fit: Fit, path: str | os.PathLike[str]) -> None:
    """Measured points and fitted lines, one panel per collective.

    Raises:
        UserError: as `saved`.
    """
    panels = [(level, name) for level in fit.levels for name in dict.fromkeys(p.collective for p in level.points)]
    columns = min(3, len(panels))
    with saved(path, -(-len(panels) // columns), columns) as axes:
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (level, name) in zip(axes.flat, panels):
            _panel(axis, level, [point for point in level.points if point.collective == name])
            axis.set_title(f"{name}, {level.level}")


def _panel(axis: Any, fit: LevelFit, points: Sequence[Point]) -> None:
    is_transfer = points[0].collective == TRANSFER
    form = (FORMS[1] if fit.form.crowding else FORMS[0]) if is_transfer else fit.form
    parameters = fit.transfer if is_transfer else fit.parameters
    for ranks, per_node in sorted({(point.ranks, point.ranks_per_node) for point in points}):
        mine = sorted(
            (p for p in points if (p.ranks, p.ranks_per_node) == (ranks, per_node)), key=lambda p: p.num_bytes
        )
        dots = axis.plot(
            [p.num_bytes for p in mine],
            [p.seconds for p in mine],
            "o",
            markersize=4,
            label=f"{ranks} ranks" + (f" of {per_node} in a node" if per_node > ranks else ""),
        )
        sizes = np.geomspace(mine[0].num_bytes, mine[-1].num_bytes, 50).astype(int)
        seconds = predict(parameters, form, [replace(mine[0], num_bytes=int(size)) for size in sizes])
        axis.plot(sizes, seconds, "-", color=dots[0].get_color(), linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
