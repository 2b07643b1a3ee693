"""The plans of DAPPLE's, Chimera's and WPipe's planners as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoddl.costmodel.units import format_bytes, format_ranges, format_seconds

from .tables import Column, Section, Table, Text

__all__ = ["pipeline_plan_text"]

#: The document of a plan, or of a stage or an alternative in it.
_Fields = Mapping[str, Any]


def pipeline_plan_text(document: _Fields) -> Text:
    """Return the plan, a table of its stages, and a table of the alternatives that were simulated.

    Args:
        document: the plan's document (:mod:`autoddl.pipelines.planners.document`).
    """
    stages = Table.of(_STAGES, enumerate(document["stages"]), indent="")
    sections: list[Section] = [_heading(document), [stages]]
    if document["alternatives"]:
        # Alternatives that differ only in their devices have the same row, which is shown once.
        rows = tuple(dict.fromkeys(map(_alternative_cells, document["alternatives"])))
        sections.append([Table(_ALTERNATIVES, rows, indent="")])
    return Text(tuple(sections))


def _heading(document: _Fields) -> Section:
    speedup = document["speedup_over_dp"]
    compared = "data parallelism does not fit in memory" if speedup is None else f"{speedup:.2f} x data parallelism"
    return [
        f"{document['planner']} plan {document['plan']} for {document['profile']} on {document['cluster']} "
        f"({document['num_devices']} devices), batch {document['batch']}",
        f"  {document['num_micro_batches']} micro-batches of {document['micro_batch']}"
        + (", activations recomputed" if document["recompute"] else ""),
        f"  simulated {format_seconds(document['simulated_s'])}, estimated {format_seconds(document['latency_s'])}; "
        f"{document['samples_per_s']:.1f} samples/s; {compared}",
        f"  fullest device: {format_bytes(document['memory_bytes'])}",
        *(
            ["  interrupted: the best of the plans that were simulated until then"]
            if document["status"] == "interrupted"
            else []
        ),
    ]


def _name_range(names: list[str]) -> str:
    """The first and the last of the names."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


_STAGES: tuple[Column[tuple[int, _Fields]], ...] = (
    Column("stage", lambda row: str(row[0])),
    Column("layers", lambda row: str(len(row[1]["layers"]))),
    Column("", lambda row: _name_range(row[1]["layers"])),
    Column("devices", lambda row: format_ranges(row[1]["devices"]), wraps=True),
)
_ALTERNATIVES: tuple[Column[tuple[str, ...]], ...] = (
    Column("alternative", wraps=True),
    Column("micro-batch", rank=1),
    Column("micro-batches", rank=2),
    Column("estimated", rank=3),
    Column("simulated"),
)


def _alternative_cells(row: dict[str, Any]) -> tuple[str, ...]:
    details = [
        *(["-".join(map(str, row["split"])), f"policy {row['policy']}"] if "split" in row else []),
        *([row["concatenation"]] if "concatenation" in row else []),
        *(["recomputed"] if row.get("recompute") else []),
    ]
    return (
        row["plan"] + (f" ({', '.join(details)})" if details else ""),
        str(row["micro_batch"]),
        str(row["num_micro_batches"]),
        format_seconds(row["latency_s"]),
        format_seconds(row["simulated_s"]),
    )
