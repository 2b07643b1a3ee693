"""Pipeline schedules: generated, simulated, drawn."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.reading import read_text
from autoddl.costmodel.writing import write_atomically
from autoddl.pipelines import draw, grid, timeline
from autoddl.pipelines import schedule as schedules
from autoddl.pipelines.generators import ScheduleFamily, families, generate
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times
from autoddl.pipelines.validate import validate

__all__ = ["Schedule", "Timeline", "schedule", "schedule_families", "timeline_of"]

Path = Union[str, "os.PathLike[str]"]
PerStage = Union[float, Sequence[float]]


@dataclass(frozen=True, repr=False)
class Schedule(schedules.Schedule):
    """A valid pipeline schedule: what each worker does, in which order, with which weights (:mod:`autoddl.pipelines.schedule`).

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
        """When each task starts and ends.  Times are in any one unit: one number, or one for each stage (boundary).

        Args:
            forward, backward: of a micro-batch at a stage.
            backward_input: the part of ``backward`` that yields the gradient of the input; half of it by default.
            recompute: of a stage's forward pass again; ``forward`` by default.
            all_reduce, update: of a stage's gradients and weights, once per update.
            transfer: of a micro-batch over a boundary; ``transfer_latency`` is added to each.
            overlap_transfers: whether workers compute while they send.
            all_reduce_overlaps_compute: whether they compute while gradients are reduced.

        Raises:
            UserError: a time is negative or not finite, or there are not as many as stages.

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
        """The schedule as a table: a row per worker, a cell per task; :func:`autoddl.schedule` reads such files."""
        return grid.to_csv(self)

    def __repr__(self) -> str:
        where = f"{self.num_stages} stages on {self.num_workers} workers"
        return f"<Schedule {self.name}: {where}, {self.num_micro_batches} micro-batches>"


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(timeline.Timeline):
    """When each task of a schedule ran; ``makespan``, ``bubble_ratio`` (the mean over the workers) and ``bubble_ratios``.

    ``print(timeline)`` draws it; in a notebook it is a picture.

    >>> import autoddl
    >>> print(autoddl.schedule("1f1b", stages=2, micro_batches=2).simulate())
    worker 0  F0 F1 .  .  B0 == .  B1 ==
    worker 1  .  F0 B0 == F1 B1 == .  .
    """

    def to_svg(self, path: Path | None = None) -> str:
        """A picture, a row per worker; written to ``path`` where that is given."""
        return _written(draw.to_svg(self), path)

    def to_trace(self, path: Path | None = None) -> str:
        """JSON for chrome://tracing and Perfetto, the unit taken for seconds; written to ``path`` where that is given."""
        return _written(draw.to_trace(self), path)

    @property
    def document(self) -> dict[str, Any]:
        """The schedule and what the simulation shows, as JSON: what ``autoddl schedule --json`` prints."""
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
    """A validated pipeline schedule: of a family, or read from a CSV file.

    Args:
        name: a family of :func:`autoddl.schedule_families`, such as ``1f1b``, ``chimera`` or ``zero-bubble``; or a ``FILE.csv``,
            which says everything itself.
        stages: the depth of the pipeline, which is its number of workers.
        micro_batches: per worker and iteration; of asynchronous schedules per weight update.
        iterations: 1 by default; 4 of asynchronous schedules, which settle only then.
        width: devices of each worker: one number, or one for each.
        recompute: recompute activations before each backward.
        all_reduce: when gradients are reduced: ``none``, ``eager``, or ``eager-sync-opt``, the default.
        activation_limit: the most micro-batches whose activations a worker may hold.
        options: of the family, such as ``num_pipelines`` of chimera or ``policy`` of zero-bubble.

    Raises:
        UserError: the family is unknown, a number does not fit, or the file holds no valid schedule.

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
        found = grid.from_csv(read_text(name, "schedule"))
        validate(found)
        return Schedule(**_members(found))
    for what, number in (("stages", stages), ("micro_batches", micro_batches)):
        if number is None:
            raise UserError(f"{what} is missing; give a whole number of at least 1")
    assert stages is not None and micro_batches is not None
    if all_reduce is not None:
        options["all_reduce"] = all_reduce
    made = generate(
        name,
        num_stages=stages,
        num_micro_batches=micro_batches,
        iterations=iterations,
        width=width,
        recompute=recompute,
        activation_limit=activation_limit,
        **options,
    )
    return Schedule(**_members(made))


def schedule_families() -> tuple[ScheduleFamily, ...]:
    """All families of schedules: name, summary, options, and whether their weights are up to date (``synchronous``).

    >>> import autoddl
    >>> [family.name for family in autoddl.schedule_families() if not family.synchronous]
    ['pipedream', 'pipedream-2bw', 'wpipe']
    """
    return families()


def timeline_of(run: timeline.Timeline) -> Timeline:
    """A timeline that shows itself."""
    return Timeline(**_members(run))


def schedule_document(run: timeline.Timeline) -> dict[str, Any]:
    """The schedule and what its simulation shows, as JSON."""
    from autoddl.pipelines import memory
    from autoddl.pipelines.communication import boundary_crossings
    from autoddl.pipelines.critical import critical_path

    of = run.schedule
    path = critical_path(run)
    facts: dict[str, Any] = {
        "format": "autoddl-schedule",
        "version": 1,
        "name": of.name,
        "num_stages": of.num_stages,
        "num_micro_batches": of.num_micro_batches,
        "placement": [list(workers) for workers in of.placement],
        "widths": list(of.widths),
        "update_period": of.update_period,
        "delays": list(of.delays),
        "synchronous": of.is_synchronous,
        "valid": True,  # whatever gets here has passed the validator
        "makespan": run.makespan,
        "bubble_ratio": run.bubble_ratio,
        "bubble_ratios": list(run.bubble_ratios),
        "critical_path": {
            "forward": path.forward,
            "backward": path.backward,
            "tasks": [str(task) for task in path.tasks],
        },
        "peak_activations": list(memory.peak_activations(of)),
        "stashed_inputs": list(memory.peak_stashed_inputs(of)),
        "weight_versions": list(memory.peak_weight_versions(of)),
        "weight_copies": list(memory.peak_weight_copies(of)),
        "boundary_crossings": [sum(both) for both in boundary_crossings(of)],
    }
    if not of.is_synchronous and of.num_updates >= 3:
        settled = timeline.steady_state(run)
        facts["steady_state"] = {"period": settled.period, "bubble_ratio": settled.bubble_ratio}
    facts["workers"] = [[str(task) for task in tasks] for tasks in of.workers]
    facts["starts"] = [starts.tolist() for starts in run.starts]
    facts["ends"] = [ends.tolist() for ends in run.ends]
    return facts


def _members(of: Any) -> dict[str, Any]:
    """The fields of a dataclass, not copied."""
    return {each.name: getattr(of, each.name) for each in fields(of)}


def _written(text: str, path: Path | None) -> str:
    if path is not None:
        write_atomically(path, text)
    return text
