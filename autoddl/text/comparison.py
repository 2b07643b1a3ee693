"""A comparison of baselines and search methods as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.search.planner import Planned

from ..explain.view import batch_text
from .tables import Column, Table, Text

__all__ = ["comparison_text"]

#: A plan's fields in the document of ``autoddl compare --json``.
Row = Mapping[str, Any]


def comparison_text(exact: Planned, rows: Sequence[Row]) -> Text:
    """Return a table of the feasible plans, and the reason why each other method or baseline has none.

    Args:
        exact: the plan of the exact method.
        rows: the plans of all methods and baselines.
    """
    cluster, bound = exact.cluster, format_seconds(exact.lower_bound)
    feasible = [row for row in rows if "infeasible" not in row]
    return Text(
        (
            [
                f"{exact.graph.name} on {cluster.name}, {cluster.num_devices} devices; lower bound {bound}",
                f"  {batch_text(exact.graph, exact.workload.batch)}",
                Table.of(_columns(exact), feasible),
                *(f"  {row['name']}: {row['infeasible']}" for row in rows if "infeasible" in row),
                *([f"  {exact.left_out}"] if exact.left_out else []),
                *(f"  {note}" for note in exact.notes),
            ],
        )
    )


def _columns(exact: Planned) -> tuple[Column[Row], ...]:
    field = "communication_s" if exact.options.objective == "communication" else "step_s"

    def to_the_best(row: Row) -> str:
        """Cost relative to the exact method's."""
        return f"{row[field] / exact.cost:.4g}x" if exact.cost else ""

    return (
        Column("plan", lambda row: row["name"]),
        Column("step", lambda row: format_seconds(row["step_s"]), right=True),
        Column("communication", lambda row: format_seconds(row["communication_s"]), right=True, rank=1),
        Column("memory", lambda row: format_bytes(row["memory_bytes"]), right=True, rank=2),
        Column("to the best", to_the_best, right=True),
        Column(
            "evaluations", lambda row: f"{row['evaluations']:,}" if "evaluations" in row else "", right=True, rank=4
        ),
        Column("search", lambda row: format_seconds(row["search_s"]) if "search_s" in row else "", right=True, rank=3),
        Column("", _remark, wraps=True),
    )


def _remark(row: Row) -> str:
    """What a search proved about its plan; the mesh of a baseline."""
    if "mesh" in row:
        return str(row["mesh"])
    interrupted = ", interrupted" if row["status"] == "interrupted" else ""
    taken_from = f", as {row['taken_from']}: nothing better was found" if "taken_from" in row else ""
    return "proven optimal" if row["optimal"] else f"gap {row['gap']:.2%}{interrupted}{taken_from}"
