"""Formats a plan as one line and as tables, and renders any text as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoddl.costmodel.graph_meshes import EAGER
from autoddl.costmodel.units import format_bytes, format_ranges, format_seconds

from ..report.markup import Markup, element
from ..text.tables import Block, Column, Section, Table, Text

if TYPE_CHECKING:
    from ..explain import LayerGroup, PlanView, RivalFigures
    from .figures import PlannedStage

__all__ = ["html_of", "one_line", "summary_of"]

#: CSS of tables, and of cells with an alignment.
_TABLE = "border-collapse: collapse; margin: 0.3em 0"
_CELL = "padding: 0 0.8em 0 0; text-align: {}; white-space: nowrap"

#: Columns of the table of stages, and of the table of layers.
_STAGES: tuple[Column[PlannedStage], ...] = (
    Column("stage", lambda stage: str(stage.number), right=True),
    Column("layers", lambda stage: f"{stage.layers[0]} to {stage.layers[-1]}"),
    Column("workers", lambda stage: format_ranges(sorted(set(stage.workers))), rank=2),
    Column("devices", lambda stage: str(stage.num_devices), right=True, rank=2),
    Column("recomputed", lambda stage: stage.recompute, rank=1),
    Column("forward", lambda stage: format_seconds(stage.forward_s), right=True),
    Column("backward", lambda stage: format_seconds(stage.backward_s), right=True),
    Column("all-reduce", lambda stage: format_seconds(stage.all_reduce_s), right=True, rank=1),
    Column("memory", lambda stage: format_bytes(stage.memory_bytes), right=True),
)
_LAYERS: tuple[Column[LayerGroup], ...] = (
    Column("layer", lambda group: group.label),
    Column("(p0,p1,p2)", lambda group: str(group.strategy)),
    Column("input", lambda group: group.sbp["input"], rank=1),
    Column("weight", lambda group: group.sbp["parameter"], rank=1),
    Column("states", lambda group: group.sbp["state"], rank=2),
    Column("output", lambda group: group.sbp["output"], rank=1),
    Column("compute", lambda group: format_seconds(group.compute_s), right=True),
    Column("communication", lambda group: format_seconds(group.communication_s), right=True),
)


def one_line(view: PlanView, num_stages: int) -> str:
    """Return the model, the cluster, the step time and the proof of a plan in one line.

    ``gpt2 on dgx-a100: 2 nodes of 8 x NVIDIA A100 SXM4 80 GB, 2 stages; 41.2 ms per step, proven optimal``
    """
    stages = f", {num_stages} stages" if num_stages > 1 else ""
    return f"{view.heading}{stages}; {format_seconds(view.step_s)} per step, {view.verdict}"


def summary_of(view: PlanView, stages: Sequence[PlannedStage]) -> Text:
    """Return the tables of a plan: totals, stages of a pipeline, layers, and the rivals that the plan was compared with."""
    sections: list[Section] = [[one_line(view, len(stages))], ["Per step", _totals(view)]]
    if len(stages) > 1:
        sections.append(["Stages (forward and backward of a micro-batch)", Table.of(_STAGES, stages)])
    for group in view.stage_groups:
        title = f"Layers of {group.title}" if group.title else "Layers"
        sections.append([title, Table.of(_LAYERS, group.layers)])
    if view.rivals:
        sections.append(["Compared with", _rivals(view)])
    return Text(tuple(sections))


def _totals(view: PlanView) -> Table:
    sample = view.plan.graph.sample
    rows = (
        ("step", format_seconds(view.step_s), f"{view.rate:,.1f} {sample}s/s, {view.utilisation:.0%} of peak FLOP/s"),
        ("compute", format_seconds(view.compute_s), ""),
        ("communication", format_seconds(view.communication_s), f"each device sends {format_bytes(view.sent_bytes)}"),
        ("memory", format_bytes(view.memory_bytes), f"of {format_bytes(view.memory_limit_bytes)} on each device"),
        ("recomputed", view.recomputation, ""),
        *([] if view.plan.executor == EAGER else [("executor", view.plan.executor, "")]),
    )
    return Table((Column(), Column(right=True), Column(wraps=True)), rows)


def _rivals(view: PlanView) -> Table:
    def ratio(rival: RivalFigures) -> str:
        return f"{rival.step_s / view.step_s:.2f}x" if view.step_s and not rival.infeasible else ""

    columns: tuple[Column[RivalFigures], ...] = (
        Column("plan", lambda rival: rival.name),
        Column("step", lambda rival: "" if rival.infeasible else format_seconds(rival.step_s), right=True),
        Column("", ratio, right=True),
        Column("memory", lambda rival: "" if rival.infeasible else format_bytes(rival.memory_bytes), right=True),
        Column("", lambda rival: rival.infeasible or rival.how, wraps=True),
    )
    return Table.of(columns, view.rivals)


# ---- HTML --------------------------------------------------------------------------------------------------------------


def html_of(text: Text) -> str:
    """Return a text as HTML for notebooks.  Tables become HTML tables; all characters are escaped."""
    return element("div", *(_block(block) for section in text.sections for block in section))


def _block(block: Block) -> Markup:
    if isinstance(block, str):
        return element("p", block, style="margin: 0.3em 0")
    if isinstance(block, Table):
        return _table(block)
    return element("pre", "\n".join(block.lines()))


def _table(table: Table) -> Markup:
    def row(tag: str, cells: Sequence[str]) -> Markup:
        styles = (_CELL.format("right" if column.right else "left") for column in table.columns)
        return element("tr", *(element(tag, cell, style=style) for cell, style in zip(cells, styles)))

    headings = [column.heading for column in table.columns]
    head = element("thead", row("th", headings)) if any(headings) else None
    return element("table", head, element("tbody", *(row("td", cells) for cells in table.rows)), style=_TABLE)
