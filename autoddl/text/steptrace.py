"""A measured training step beside the predicted one, as text."""

from __future__ import annotations

from autoddl.costmodel.units import format_bytes, format_seconds

from ..steptrace import Difference, StepTrace
from .tables import Column, Section, Table, Text, facts

__all__ = ["differences_section", "trace_text"]

#: Number of rows of the table of differences.
NUM_ROWS = 12


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def _bytes(row: Difference) -> str:
    if row.kind != "communication":
        return "-"
    sent, priced = format_bytes(row.sent_bytes), format_bytes(row.predicted_bytes)
    return sent if sent == priced else f"{sent} of {priced}"


_COLUMNS: tuple[Column[Difference], ...] = (
    Column("layer", lambda row: row.layer or "all layers"),
    Column("phase", lambda row: row.phase),
    Column("", lambda row: row.kind),
    Column("predicted", lambda row: format_seconds(row.predicted_s), right=True),
    Column("measured", lambda row: format_seconds(row.measured_s), right=True),
    Column("waiting", lambda row: format_seconds(row.waiting_s), right=True, rank=1),
    Column("dispatch", lambda row: format_seconds(row.dispatch_s), right=True, rank=1),
    Column("difference", lambda row: _signed(row.seconds), right=True),
    Column("sent", _bytes, right=True, rank=2),
)


def differences_section(trace: StepTrace, num_rows: int = NUM_ROWS) -> Section:
    """Return the largest differences between measured and predicted times by layer and phase."""
    rows = trace.differences()
    title = "Largest differences between the measured step and the predicted one (mean over ranks, per step)"
    table = Table.of(_COLUMNS, rows[:num_rows])
    if len(rows) <= num_rows:
        return [title, table]
    rest = sum(row.seconds for row in rows[num_rows:])
    return [title, table, f"  {len(rows) - num_rows} further rows, together {_signed(rest)}"]


def trace_text(trace: StepTrace) -> Text:
    """Return the times of a step, and the largest differences."""
    totals = trace.totals()
    undisturbed = "" if trace.step_s is None else f", {format_seconds(trace.step_s)} without recording"
    updates = trace.schedule.num_updates
    rows = [
        ("step predicted", format_seconds(trace.plan.evaluation.step_s * updates)),
        ("step measured", f"{format_seconds(trace.recorded_s)}{undisturbed}"),
        *((kind, format_seconds(totals[kind])) for kind in ("computation", "communication", "waiting")),
        ("dispatch", f"{format_seconds(totals['dispatch'])} of computation and communication"),
    ]
    return Text(([facts(rows)], differences_section(trace)))
