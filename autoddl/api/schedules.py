"""Generates, simulates and draws pipeline schedules."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.reading import read_text
from autoddl.pipelines import draw, grid, timeline
from autoddl.pipelines import schedule as schedules
from autoddl.pipelines.generators import ScheduleFamily, families, generate
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times
from autoddl.pipelines.validate import validate

from .files import FilePath, write_if_path

__all__ = ["Schedule", "Timeline", "families_document", "schedule", "schedule_families", "timeline_of"]

#: One number for all stages (or boundaries between stages), or one number for each.
PerStage = Union[float, Sequence[float]]


@dataclass(frozen=True, repr=False)
class Schedule(schedules.Schedule):
    """A validated pipeline schedule: the tasks of each worker in order, with the weights that each task uses.

    The base class, in :mod:`autoddl.pipelines.schedule`, describes the attributes.

    >>> import autoddl
    >>> autoddl.schedule("1f1b", stages=2, micro_batches=2)
    <Schedule 1f1b: 2 stages on 2 workers, 2 micro-batches>
    """

    def simulate(
        self,
        *,
        forward: PerStage = 1.0,
        backward: PerStage = 2.0,
        backward_input: PerStage | None = None,
        recompute: PerStage | None = None,
        all_reduce: PerStage = 0.0,
        update: PerStage = 0.0,
        transfer: PerStage = 0.0,
        transfer_latency: float = 0.0,
        overlap_transfers: bool = True,
        all_reduce_overlaps_compute: bool = True,
    ) -> Timeline:
        """Simulate the schedule and return the start and end time of each task.

        All times are in the same, arbitrary unit.  A time of stages is one number, or a sequence with one number per stage; a time
        of transfers is one number, or a sequence with one number per boundary between stages.

        Args:
            forward, backward: Forward and backward pass of one micro-batch at a stage.
            backward_input: The part of ``backward`` that computes the gradient of the input; by default half of ``backward``.
            recompute: Recomputation of a stage's forward pass; by default ``forward``.
            all_reduce: All-reduce of a stage's gradients, once per weight update.
            update: Update of a stage's weights.
            transfer: Transfer of one micro-batch over a boundary.
            transfer_latency: Latency that is added to every transfer.
            overlap_transfers: Whether workers compute while they send.
            all_reduce_overlaps_compute: Whether all-reduces progress while workers compute; otherwise only while they are idle.

        Raises:
            UserError: If a time is negative or not finite, or a sequence has the wrong length.

        >>> import autoddl
        >>> timeline = autoddl.schedule("chimera", stages=4, micro_batches=4).simulate(forward=1, backward=2)
        >>> timeline.makespan, round(timeline.bubble_ratio, 3)
        (16.0, 0.25)
        """
        times = Times.of(
            self.num_stages,
            forward=forward,
            backward=backward,
            backward_input=backward_input,
            recompute=recompute,
            all_reduce=all_reduce,
            update=update,
            transfer=transfer,
            transfer_latency=transfer_latency,
            overlap_transfers=overlap_transfers,
            all_reduce_overlaps_compute=all_reduce_overlaps_compute,
        )
        return timeline_of(simulate(self, times))

    def to_csv(self) -> str:
        """Return the schedule as CSV, a row per worker and a cell per task; :func:`autoddl.schedule` reads such files.

        >>> import autoddl
        >>> print(autoddl.schedule("1f1b", stages=2, micro_batches=1).to_csv(), end="")
        # schedule,1f1b
        # micro-batches,1
        # update-period,1
        # pipeline,0 1
        worker 0,0F0,,,0B0 0U0
        worker 1,,1F0,1B0 1U0,
        """
        return grid.to_csv(self)

    def __repr__(self) -> str:
        where = f"{self.num_stages} stages on {self.num_workers} workers"
        return f"<Schedule {self.name}: {where}, {self.num_micro_batches} micro-batches>"


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(timeline.Timeline):
    """Start and end time of each task of a schedule.

    ``makespan`` is the time of the whole schedule, ``bubble_ratios`` the idle fraction of each worker, and ``bubble_ratio`` their
    mean.  ``print(timeline)`` draws the timeline as text; notebooks show it as a picture.

    >>> import autoddl
    >>> print(autoddl.schedule("1f1b", stages=2, micro_batches=2).simulate())
    worker 0  F0 F1 .  .  B0 == .  B1 ==
    worker 1  .  F0 B0 == F1 B1 == .  .
    """

    def to_svg(self, path: FilePath | None = None) -> str:
        """Return a picture with one row per worker, and write it to ``path`` if given.

        >>> import autoddl
        >>> timeline = autoddl.schedule("1f1b", stages=2, micro_batches=2).simulate()
        >>> timeline.to_svg().startswith("<svg")
        True
        """
        return write_if_path(draw.to_svg(self), path)

    def to_trace(self, path: FilePath | None = None) -> str:
        """Return JSON for chrome://tracing and Perfetto, with times as seconds, and write it to ``path`` if given.

        >>> import autoddl, json
        >>> timeline = autoddl.schedule("1f1b", stages=2, micro_batches=2).simulate()
        >>> [event["name"] for event in json.loads(timeline.to_trace())["traceEvents"]][:3]
        ['0F0', '0F1', '0B0']
        """
        return write_if_path(draw.to_trace(self), path)

    @property
    def document(self) -> dict[str, Any]:
        """The schedule and the results of its simulation, as ``autoddl schedule --json`` prints them."""
        return schedule_document(self)

    def __str__(self) -> str:
        return draw.to_text(self)

    def __repr__(self) -> str:
        return f"<Timeline of {self.schedule.name}: makespan {self.makespan:g}, bubble ratio {self.bubble_ratio:.1%}>"

    def _repr_html_(self) -> str:
        title = html.escape(repr(self))
        return f'<div style="overflow-x: auto"><p>{title}</p>{self.to_svg()}</div>'


def schedule(
    name: str,
    *,
    stages: int | None = None,
    micro_batches: int | None = None,
    iterations: int | None = None,
    width: int | Sequence[int] = 1,
    recompute: bool = False,
    all_reduce: str | None = None,
    activation_limit: float | None = None,
    **options: Any,
) -> Schedule:
    """Generate a pipeline schedule of a family, or read one from a CSV file, and validate it.

    Args:
        name: A family from :func:`autoddl.schedule_families`, such as ``1f1b``, ``chimera`` or ``zero-bubble``; or a CSV file,
            which describes the whole schedule and needs no other argument.
        stages: Depth of the pipeline, which is also its number of workers.
        micro_batches: Micro-batches per worker and iteration; for asynchronous schedules, per weight update.
        iterations: Number of iterations; by default 1, or 4 for asynchronous schedules, which reach their steady state only then.
        width: Devices per worker: one number, or one number for each worker.
        recompute: Recompute activations before each backward pass.
        all_reduce: When gradients are reduced: ``none``, ``eager`` or ``eager-sync-opt`` (default).
        activation_limit: Maximum number of micro-batches whose activations a worker may hold.
        options: Options of the family, such as ``num_pipelines`` of ``chimera`` or ``policy`` of ``zero-bubble``.

    Raises:
        UserError: If the family is unknown, a number is out of range, or the file contains no valid schedule.

    >>> import autoddl
    >>> chimera = autoddl.schedule("chimera", stages=4, micro_batches=8)
    >>> chimera.num_pipelines, round(chimera.simulate().bubble_ratio, 3)
    (2, 0.2)
    >>> autoddl.schedule("chimra", stages=4, micro_batches=8)
    Traceback (most recent call last):
        ...
    autoddl.pipelines.generators.draft.GeneratorError: schedule 'chimra' is unknown; did you mean 'chimera'? known are gpipe, ...
    """
    if name.endswith(".csv"):
        read = grid.from_csv(read_text(name, "schedule"))
        validate(read)
        return Schedule(**_fields_of(read))
    for argument, number in (("stages", stages), ("micro_batches", micro_batches)):
        if number is None:
            raise UserError(f"{argument} is missing; give a whole number of at least 1")
    assert stages is not None and micro_batches is not None
    if all_reduce is not None:
        options["all_reduce"] = all_reduce
    generated = generate(
        name,
        num_stages=stages,
        num_micro_batches=micro_batches,
        iterations=iterations,
        width=width,
        recompute=recompute,
        activation_limit=activation_limit,
        **options,
    )
    return Schedule(**_fields_of(generated))


def schedule_families() -> tuple[ScheduleFamily, ...]:
    """Return all families of schedules.

    Each has a ``name``, a ``summary``, ``options``, and the flag ``synchronous``, which is False if the schedule computes with
    weights of earlier updates.

    >>> import autoddl
    >>> [family.name for family in autoddl.schedule_families() if not family.synchronous]
    ['pipedream', 'pipedream-2bw', 'wpipe']
    """
    return families()


def families_document() -> dict[str, Any]:
    """Return the document that ``autoddl schedule list --json`` prints: all families of schedules with their options.

    >>> from autoddl.api.schedules import families_document
    >>> {entry["name"]: entry["options"] for entry in families_document()["families"]}["gpipe"]
    {}
    """
    entries = [
        {
            "name": family.name,
            "summary": family.summary,
            "synchronous": family.synchronous,
            "options": dict(family.options),
        }
        for family in families()
    ]
    return {"format": "autoddl-schedule-families", "version": 1, "families": entries}


def timeline_of(run: timeline.Timeline) -> Timeline:
    """Return a `Timeline` of the library as one that can be printed and shown in notebooks."""
    return Timeline(**_fields_of(run))


def schedule_document(run: timeline.Timeline) -> dict[str, Any]:
    """Return a schedule and the results of its simulation as a JSON document."""
    from autoddl.pipelines import memory
    from autoddl.pipelines.communication import boundary_crossings
    from autoddl.pipelines.critical import critical_path

    simulated = run.schedule
    path = critical_path(run)
    document: dict[str, Any] = {
        "format": "autoddl-schedule",
        "version": 1,
        "name": simulated.name,
        "num_stages": simulated.num_stages,
        "num_micro_batches": simulated.num_micro_batches,
        "placement": [list(workers) for workers in simulated.placement],
        "widths": list(simulated.widths),
        "update_period": simulated.update_period,
        "delays": list(simulated.delays),
        "synchronous": simulated.is_synchronous,
        "valid": True,  # only validated schedules are simulated
        "makespan": run.makespan,
        "bubble_ratio": run.bubble_ratio,
        "bubble_ratios": list(run.bubble_ratios),
        "critical_path": {
            "forward": path.forward,
            "backward": path.backward,
            "tasks": [str(task) for task in path.tasks],
        },
        "peak_activations": list(memory.peak_activations(simulated)),
        "stashed_inputs": list(memory.peak_stashed_inputs(simulated)),
        "weight_versions": list(memory.peak_weight_versions(simulated)),
        "weight_copies": list(memory.peak_weight_copies(simulated)),
        "boundary_crossings": [sum(both) for both in boundary_crossings(simulated)],
    }
    if not simulated.is_synchronous and simulated.num_updates >= 3:
        steady = timeline.steady_state(run)
        document["steady_state"] = {"period": steady.period, "bubble_ratio": steady.bubble_ratio}
    document["workers"] = [[str(task) for task in tasks] for tasks in simulated.workers]
    document["starts"] = [starts.tolist() for starts in run.starts]
    document["ends"] = [ends.tolist() for ends in run.ends]
    return document


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying their values."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
