"""Plots of measured points and fitted curves."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.writing import write_atomically

from .clusterfile import Fit
from .fit import LevelFit, predict
from .forms import FORMS, MeasuredPoint

__all__ = ["draw", "saved"]


@contextlib.contextmanager
def saved(path: str | os.PathLike[str], num_rows: int, num_columns: int) -> Iterator[Any]:
    """A context with a grid of matplotlib axes, which are saved at its end.

    Args:
        path: of the file; its suffix gives the format.
        num_rows, num_columns: size of the grid.

    Raises:
        UserError: matplotlib is not installed, the format is unknown, or the file cannot be written.
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
        raise UserError(f"{path}: format {ending!r} is not supported, should be one of {', '.join(sorted(known))}")
    return ending


def draw(fit: Fit, path: str | os.PathLike[str]) -> None:
    """Plot measured points and fitted curves, one panel per collective and level.

    Raises:
        UserError: as for `saved`.
    """
    panels = [(level, name) for level in fit.levels for name in dict.fromkeys(p.collective for p in level.points)]
    columns = min(3, len(panels))
    with saved(path, -(-len(panels) // columns), columns) as axes:
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (level, name) in zip(axes.flat, panels):
            _panel(axis, level, [point for point in level.points if point.collective == name])
            axis.set_title(f"{name}, {level.level}")


def _panel(axis: Any, fit: LevelFit, points: Sequence[MeasuredPoint]) -> None:
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
