"""Reports of a run of a schedule, by one rank and by all ranks together. Needs no OneFlow.

The report of all ranks contains a `Timeline`, as simulations do, so that measured and simulated runs can be compared and drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...schedule import Kind, Schedule
from ...timeline import Timeline
from ...times import Times
from .slots import RankMap

__all__ = ["PipelineReport", "RankReport", "combine", "measured_times"]


@dataclass(frozen=True)
class RankReport:
    """Measurements of one rank in one run of a schedule.

    Attributes:
        rank: Number of the rank in the job.
        spans: (start, end) of each task [s] on the machine's monotonic clock, by the text of the task. An all-reduce starts when
            it is issued, and ends when it has finished or, if later, when its update waits for it.
        losses: This rank's part of the mean loss of each micro-batch.
        peak_activations: Largest number of micro-batches whose activations were in memory at once.
        peak_versions: Largest number of versions of any one stage's weights in memory at once.
        bytes_sent: Bytes sent to neighbouring stages.
        bytes_reduced: Bytes of the vectors that were all-reduced (not the bytes sent for that).
        bytes_saved: Bytes that compression saved in messages to neighbouring stages.
        num_uncompressed: Number of messages that compression had to leave in full precision.
        num_skipped: Number of updates in all runs so far that were skipped, since gradients overflowed.
    """

    rank: int
    spans: Mapping[str, tuple[float, float]]
    losses: Mapping[int, float]
    peak_activations: float
    peak_versions: int
    bytes_sent: int
    bytes_reduced: int
    bytes_saved: int = 0
    num_uncompressed: int = 0
    num_skipped: int = 0


@dataclass(frozen=True)
class PipelineReport:
    """Measurements of all ranks in one run of a schedule.

    Attributes:
        timeline: Measured start and end of each task [s], from the start of the first task. A worker of several ranks is busy
            while any of its ranks is.
        losses: Mean loss of each micro-batch.
        peak_activations: For each worker, the largest number of micro-batches with activations in memory, counted as by
            :func:`autoddl.pipelines.memory.peak_activations`.
        peak_versions: For each worker, the largest number of versions of any one stage's weights, counted as by
            :func:`autoddl.pipelines.memory.peak_weight_versions`.
        bytes_sent: Bytes sent between stages by all ranks.
        bytes_saved: Bytes that compression saved in these messages.
        num_uncompressed: Number of messages that compression had to leave in full precision.
        num_skipped: Number of updates in all runs so far that were skipped, since gradients overflowed.
    """

    timeline: Timeline
    losses: tuple[float, ...]
    peak_activations: tuple[float, ...]
    peak_versions: tuple[int, ...]
    bytes_sent: int
    bytes_saved: int = 0
    num_uncompressed: int = 0
    num_skipped: int = 0


def combine(schedule: Schedule, reports: Sequence[RankReport]) -> PipelineReport:
    """Combine the reports of all ranks, in the order of the ranks, into one."""
    ranks = RankMap(schedule.widths)
    by_worker = [[reports[rank] for rank in ranks.ranks_of(worker)] for worker in range(schedule.num_workers)]
    origin = min(start for report in reports for start, _ in report.spans.values())
    starts, ends = [], []
    for tasks, members in zip(schedule.workers, by_worker):
        task_starts: list[float] = []
        task_ends: list[float] = []
        for task in tasks:
            text = str(task)
            spans = [report.spans[text] for report in members if text in report.spans]
            if not spans:  # the all-reduce of a stage without weights
                assert task.kind is Kind.ALL_REDUCE, task
                moment = max(task_ends, default=0.0)
                spans = [(moment + origin, moment + origin)]
            task_starts.append(min(start for start, _ in spans) - origin)
            task_ends.append(max(end for _, end in spans) - origin)
        starts.append(np.array(task_starts))
        ends.append(np.array(task_ends))
    losses = [0.0] * schedule.num_micro_batches
    for report in reports:
        for number, part in report.losses.items():
            losses[number] += part
    return PipelineReport(
        timeline=Timeline(schedule, tuple(starts), tuple(ends)),
        losses=tuple(losses),
        peak_activations=tuple(max(report.peak_activations for report in members) for members in by_worker),
        peak_versions=tuple(max(report.peak_versions for report in members) for members in by_worker),
        bytes_sent=sum(report.bytes_sent for report in reports),
        bytes_saved=sum(report.bytes_saved for report in reports),
        num_uncompressed=sum(report.num_uncompressed for report in reports),
        num_skipped=max(report.num_skipped for report in reports),
    )


def measured_times(timeline: Timeline) -> Times:
    """Return the mean durations of the tasks in a measured timeline, by which the same run can be simulated.

    A split backward pass is the sum of its parts. Transfers have a duration of zero: a simulation with these times shows the run
    without communication between stages.
    """
    schedule = timeline.schedule
    # (total duration, number of micro-batches or tasks) by kind and stage.
    sums = np.zeros((len(Kind), schedule.num_stages, 2))
    for tasks, starts, ends in zip(schedule.workers, timeline.starts, timeline.ends):
        for task, start, end in zip(tasks, starts.tolist(), ends.tolist()):
            sums[task.kind, task.stage] += (end - start, task.part.size if task.kind.is_compute else 1.0)
    mean = np.divide(sums[..., 0], sums[..., 1], out=np.zeros_like(sums[..., 0]), where=sums[..., 1] > 0)
    return Times.of(
        schedule.num_stages,
        forward=mean[Kind.FORWARD].tolist(),
        backward=(mean[Kind.BACKWARD] + mean[Kind.BACKWARD_INPUT] + mean[Kind.BACKWARD_WEIGHT]).tolist(),
        backward_input=(mean[Kind.BACKWARD_INPUT]).tolist(),
        recompute=mean[Kind.RECOMPUTE].tolist(),
        update=mean[Kind.UPDATE].tolist(),
    )
