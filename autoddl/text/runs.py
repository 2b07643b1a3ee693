"""Schedules, simulated and run, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autoddl.costmodel.units import format_values
from autoddl.pipelines.draw import to_rows
from autoddl.pipelines.generators import Family
from autoddl.pipelines.runtime.pipeline.report import measured_times
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.timeline import Timeline

from .tables import Column, Grid, Section, Table, Text, facts

__all__ = ["families_text", "simulation_text", "timelines"]

_FAMILIES: tuple[Column[Family], ...] = (
    Column("", lambda family: family.name),
    Column("", lambda family: family.summary, wraps=True),
)


def families_text(families: Iterable[Family]) -> Text:
    """A line for each family of schedules."""
    return Text(([Table.of(_FAMILIES, families, indent="")],))


def simulation_text(timeline: Timeline, found: Mapping[str, Any]) -> Text:
    """A simulated schedule: what each worker does when, and the figures of the schedule's document (``found``)."""
    path = found["critical_path"]
    rows = [
        ("makespan", f"{found['makespan']:.6g}"),
        ("bubble ratio", f"{found['bubble_ratio']:.4f}"),
        ("critical path", f"{path['forward']} forwards, {path['backward']} backwards"),
        ("peak activations", f"{format_values(found['peak_activations'])} (micro-batches, per worker)"),
        ("weight versions", f"{format_values(found['weight_versions'])} (per worker)"),
        ("weight copies", f"{format_values(found['weight_copies'])} (versions over all stages of a worker)"),
    ]
    if "steady_state" in found:
        settled = found["steady_state"]
        rows.append(("steady state", f"{settled['period']:.6g} per update, bubble ratio {settled['bubble_ratio']:.4f}"))
    return Text(([Grid(tuple(to_rows(timeline)))], [facts(rows)]))


def timelines(measured: Timeline) -> tuple[Section, Section]:
    """A measured run, and what the simulator makes of its mean times."""
    simulated = simulate(measured.schedule, measured_times(measured))
    tick = max(measured.makespan, simulated.makespan) / 60

    def section(title: str, timeline: Timeline) -> Section:
        figures = f"{timeline.makespan:.4f} s, bubbles {timeline.bubble_ratio:.1%}"
        return [f"{title}: {figures}", Grid(tuple(to_rows(timeline, tick)))]

    return section("measured", measured), section("simulated with the mean time of each task", simulated)
