"""Simulated schedules and training runs as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autoddl.costmodel.devices import GPU
from autoddl.costmodel.units import counted, format_values
from autoddl.pipelines.draw import to_rows
from autoddl.pipelines.generators import ScheduleFamily
from autoddl.pipelines.runtime.pipeline.report import PipelineReport, measured_times
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, TrainingResult
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.timeline import Timeline

from ..steptrace import StepTrace
from .steptrace import trace_text
from .tables import Column, Grid, Section, Table, Text, facts

__all__ = ["families_text", "simulation_text", "timelines", "training_text"]

_FAMILIES: tuple[Column[ScheduleFamily], ...] = (
    Column("", lambda family: family.name),
    Column("", lambda family: family.summary, wraps=True),
)


def families_text(families: Iterable[ScheduleFamily]) -> Text:
    """Return a line for each family of schedules."""
    return Text(([Table.of(_FAMILIES, families, indent="")],))


def simulation_text(timeline: Timeline, document: Mapping[str, Any]) -> Text:
    """Return a simulated schedule: a grid of the workers' tasks, and figures.

    Args:
        timeline: the simulated timeline.
        document: the document of ``autoddl schedule --json``.
    """
    path = document["critical_path"]
    rows = [
        ("makespan", f"{document['makespan']:.6g}"),
        ("bubble ratio", f"{document['bubble_ratio']:.4f}"),
        ("critical path", f"{path['forward']} forwards, {path['backward']} backwards"),
        ("peak activations", f"{format_values(document['peak_activations'])} (micro-batches, per worker)"),
        ("weight versions", f"{format_values(document['weight_versions'])} (per worker)"),
        ("weight copies", f"{format_values(document['weight_copies'])} (versions over all stages of a worker)"),
    ]
    if "steady_state" in document:
        steady = document["steady_state"]
        rows.append(("steady state", f"{steady['period']:.6g} per update, bubble ratio {steady['bubble_ratio']:.4f}"))
    return Text(([Grid(tuple(to_rows(timeline)))], [facts(rows)]))


def timelines(measured: Timeline) -> tuple[Section, Section]:
    """Return two sections: the timeline of a run, and that of its simulation with the mean measured time of each task."""
    simulated = simulate(measured.schedule, measured_times(measured))
    tick = max(measured.makespan, simulated.makespan) / 60

    def section(title: str, timeline: Timeline) -> Section:
        figures = f"{timeline.makespan:.4f} s, bubbles {timeline.bubble_ratio:.1%}"
        return [f"{title}: {figures}", Grid(tuple(to_rows(timeline, tick)))]

    return section("measured", measured), section("simulated with the mean time of each task", simulated)


def training_text(
    options: TrainingOptions, result: TrainingResult, timeline: bool = False, trace: StepTrace | None = None
) -> Text:
    """Return the figures of a training.

    Args:
        options: the options of the training.
        result: its result.
        timeline: also show the timeline of the last run, and of its simulation.
        trace: also show where the time of the last run went, and where it differs most from the prediction.
    """
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
        ("computed", _computed(result)),
        ("steps", f"{result.first_step + 1} to {result.first_step + len(result.losses)}"),
        *([("skipped", f"{run.num_skipped} steps, whose gradients overflowed")] if run.num_skipped else []),
        ("loss", f"{result.losses[0]:.4f} to {result.losses[-1]:.4f}"),
        (f"{options.problem.unit} per second", f"{result.units_per_s:,.0f}"),
        ("peak activations", f"{format_values(run.peak_activations)} (micro-batches, per worker)"),
        ("weight versions", f"{format_values(run.peak_versions)} (of one stage, per worker)"),
        ("between stages", _sent(options, run)),
    ]
    traced = () if trace is None else trace_text(trace).sections
    return Text(([facts(figures)], *(timelines(run.timeline) if timeline else ()), *traced))


def _computed(result: TrainingResult) -> str:
    """Where the ranks ran, and in which types."""
    compute, master = result.types
    types = compute if compute == master else f"{compute} with {master} masters"
    return f"on {'GPUs' if result.device == GPU else 'CPU ranks'}, in {types}"


def _sent(options: TrainingOptions, run: PipelineReport) -> str:
    """The bytes that a step sends between stages, and the bytes that compression saves."""
    num_steps = options.schedule.num_updates
    text = f"{run.bytes_sent / num_steps:,.0f} bytes a step"
    if not options.compress:
        return text
    text += f", {run.bytes_saved / num_steps:,.0f} saved by compression"
    if run.num_uncompressed:
        text += f"; {run.num_uncompressed / num_steps:,.3g} messages a step in full precision"
    return text
