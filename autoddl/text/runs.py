"""Schedules, simulated and run, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autoddl.costmodel.units import counted, format_values
from autoddl.pipelines.draw import to_rows
from autoddl.pipelines.generators import ScheduleFamily
from autoddl.pipelines.runtime.pipeline.report import PipelineReport, measured_times
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, TrainingResult
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.timeline import Timeline

from .tables import Column, Grid, Section, Table, Text, facts

__all__ = ["families_text", "simulation_text", "timelines", "training_text"]

_FAMILIES: tuple[Column[ScheduleFamily], ...] = (
    Column("", lambda family: family.name),
    Column("", lambda family: family.summary, wraps=True),
)


def families_text(families: Iterable[ScheduleFamily]) -> Text:
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


def training_text(options: TrainingOptions, result: TrainingResult, timeline: bool = False) -> Text:
    """What a training did; with ``timeline`` its last run beside its simulation."""
    schedule, run = options.schedule, result.last_run
    resumed = [("resumed", f"after step {result.first_step}")] if result.first_step else []
    if run is None:
        return Text(([facts(resumed), "nothing left to do"],))
    figures = [
        *resumed,
        (
            "schedule",
            f"{schedule.name}: {counted(schedule.num_stages, 'stage')} on {counted(sum(schedule.widths), 'rank')}",
        ),
        ("steps", f"{result.first_step + 1} to {result.first_step + len(result.losses)}"),
        ("loss", f"{result.losses[0]:.4f} to {result.losses[-1]:.4f}"),
        (f"{options.problem.unit} per second", f"{result.units_per_s:,.0f}"),
        ("peak activations", f"{format_values(run.peak_activations)} (micro-batches, per worker)"),
        ("weight versions", f"{format_values(run.peak_versions)} (of one stage, per worker)"),
        ("between stages", _sent(options, run)),
    ]
    return Text(([facts(figures)], *(timelines(run.timeline) if timeline else ())))


def _sent(options: TrainingOptions, run: PipelineReport) -> str:
    """The bytes of a step, and what compression does to them."""
    num_steps = options.schedule.num_updates
    text = f"{run.bytes_sent / num_steps:,.0f} bytes a step"
    if not options.compress:
        return text
    full = (
        f"; {run.num_uncompressed / num_steps:,.3g} messages a step in full precision" if run.num_uncompressed else ""
    )
    return f"{text}, {run.bytes_saved / num_steps:,.0f} saved by compression{full}"
