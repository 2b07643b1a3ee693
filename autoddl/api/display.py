"""A plan as tables: data first, then text or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.units import format_bytes, format_ranges, format_seconds

from ..report.markup import Markup, element
from ..text.tables import Column, Table, Text

if TYPE_CHECKING:
    from ..explain import PlanView
    from .figures import PlannedStage

__all__ = ["PlanTable", "html_of", "one_line", "tables_of", "text_of"]

#: Columns that explain a strategy, which stands beside them.
_LAYOUTS = frozenset({"input", "weight", "output"})
_STYLE = "border-collapse: collapse; margin: 0.5em 0"
_CELL = "padding: 0 0.8em 0 0; text-align: {}; white-space: nowrap"


@dataclass(frozen=True)
class PlanTable:
    """A title above rows of cells, the first of them the heading; columns in ``right`` are numbers."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()


def one_line(view: PlanView, num_stages: int) -> str:
    """What a plan is, in a line.

    ``gpt2 on dgx-a100: 2 nodes of 8 x A100-SXM4-80GB, 2 stages; 41.2 ms per step, proven optimal``
    """
    stages = f", {num_stages} stages" if num_stages > 1 else ""
    return f"{view.heading}{stages}; {format_seconds(view.step_s)} per step, {view.verdict}"


def tables_of(view: PlanView, stages: Sequence[PlannedStage]) -> list[PlanTable]:
    """The totals, the stages of a pipeline, the layers, and what the plan was compared with."""
    tables = [_totals(view)]
    if len(stages) > 1:
        tables.append(_stages(stages))
    tables += [
        _layers(view, i, f"Layers of {section.title}" if section.title else "Layers")
        for i, section in enumerate(view.sections)
    ]
    if view.rivals:
        tables.append(_rivals(view))
    return tables


def text_of(heading: str, tables: Sequence[PlanTable]) -> Text:
    """The tables as text; of rows that are too wide for a terminal the layouts are left out first."""

    def section(table: PlanTable) -> list[str | Table]:
        columns: tuple[Column[Any], ...] = tuple(
            Column(name, right=i in table.right, rank=1 if name in _LAYOUTS else 0)
            for i, name in enumerate(table.rows[0])
        )
        return [table.title, Table(columns, table.rows[1:])]

    return Text(([heading], *map(section, tables)))


def html_of(heading: str, tables: Sequence[PlanTable]) -> str:
    """The tables as HTML, for a notebook; everything in it is escaped."""
    return element("div", element("p", element("b", heading)), *map(_table, tables))


def _table(table: PlanTable) -> Markup:
    def row(tag: str, cells: Sequence[str]) -> Markup:
        styles = (_CELL.format("right" if i in table.right else "left") for i in range(len(cells)))
        return element("tr", *(element(tag, cell, style=style) for cell, style in zip(cells, styles)))

    head, body = table.rows[0], table.rows[1:]
    return element(
        "table",
        element("caption", table.title, style="caption-side: top; text-align: left"),
        element("thead", row("th", head)),
        element("tbody", *(row("td", cells) for cells in body)),
        style=_STYLE,
    )


def _totals(view: PlanView) -> PlanTable:
    sample = view.plan.graph.sample
    rows = (
        ("per step", "", ""),
        ("step", format_seconds(view.step_s), f"{view.rate:,.1f} {sample}s/s, {view.utilisation:.0%} of peak FLOP/s"),
        ("compute", format_seconds(view.compute_s), ""),
        (
            "communication",
            format_seconds(view.communication_s),
            f"each device sends {format_bytes(view.sent_bytes)}",
        ),
        ("memory", format_bytes(view.memory_bytes), f"of {format_bytes(view.memory_limit_bytes)} on each device"),
        ("recomputed", view.recomputation, ""),
    )
    return PlanTable("Totals", rows, right=(1,))


def _stages(stages: Sequence[PlannedStage]) -> PlanTable:
    rows = [("stage", "layers", "workers", "devices", "recomputed", "forward", "backward", "all-reduce", "memory")]
    rows += [
        (
            str(stage.number),
            f"{stage.layers[0]} to {stage.layers[-1]}",
            format_ranges(sorted(set(stage.workers))),
            str(stage.num_devices),
            stage.recompute,
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            format_seconds(stage.all_reduce_s),
            format_bytes(stage.memory_bytes),
        )
        for stage in stages
    ]
    return PlanTable("Stages (forward and backward of a micro-batch)", tuple(rows), right=(0, 3, 5, 6, 7, 8))


def _layers(view: PlanView, number: int, title: str) -> PlanTable:
    rows = [("layer", "(p0,p1,p2)", "input", "weight", "output", "compute", "communication")]
    rows += [
        (
            group.label,
            str(group.strategy),
            group.sbp["input"],
            group.sbp["weight"],
            group.sbp["output"],
            format_seconds(group.compute_s),
            format_seconds(group.communication_s),
        )
        for group in view.sections[number].groups
    ]
    return PlanTable(title, tuple(rows), right=(5, 6))


def _rivals(view: PlanView) -> PlanTable:
    rows = [("compared with", "step", "", "memory", "")]
    for rival in view.rivals:
        if rival.infeasible:
            rows.append((rival.name, "", "", "", rival.infeasible))
            continue
        ratio = f"{rival.step_s / view.step_s:.2f}x" if view.step_s else ""
        rows.append((rival.name, format_seconds(rival.step_s), ratio, format_bytes(rival.memory_bytes), rival.how))
    return PlanTable("Baselines", tuple(rows), right=(1, 2, 3))
