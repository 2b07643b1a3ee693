"""The report of a run of a schedule: of each rank, and of all ranks in the simulator's form. Needs no OneFlow."""

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
    """One rank's report.

    Attributes:
        rank: of the job.
        spans: per task (its text) its start and end, in seconds of the machine's monotonic clock. An all-reduce starts when it
            is issued and ends when its update finds it done.
        losses: per micro-batch, this rank's part of its mean loss.
        peak_activations: the most micro-batches whose activations were alive at once.
        peak_versions: the most versions of any one stage's weights alive at once.
        bytes_sent: to neighbouring stages.
        bytes_reduced: in all-reduces: the size of the vectors, not the bytes on the wire.
        bytes_saved: by compression, of those to neighbouring stages.
        num_uncompressed: messages that compression had to leave in full precision.
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


@dataclass(frozen=True)
class PipelineReport:
    """The report of a run of a schedule.

    Attributes:
        timeline: measured, in seconds from the start of the first task. A worker of several ranks is busy while any of them is.
        losses: the mean loss of each micro-batch.
        peak_activations: per worker, in micro-batches, as :func:`autoddl.pipelines.memory.peak_activations` counts them.
        peak_versions: per worker, the most versions of any one stage's weights, as
            :func:`autoddl.pipelines.memory.peak_weight_versions`.
        bytes_sent: between stages, by all ranks.
        bytes_saved: by compression.
        num_uncompressed: messages that compression had to leave in full precision.
    """

    timeline: Timeline
    losses: tuple[float, ...]
    peak_activations: tuple[float, ...]
    peak_versions: tuple[int, ...]
    bytes_sent: int
    bytes_saved: int = 0
    num_uncompressed: int = 0

    def mean_losses(self) -> tuple[float, ...]:
        """The mean loss of each update's micro-batches."""
        schedule = self.timeline.schedule
        updates = (schedule.micro_batches_of(update) for update in range(schedule.num_updates))
        return tuple(sum(self.losses[number] for number in numbers) / len(numbers) for numbers in updates)


def combine(schedule: Schedule, reports: Sequence[RankReport]) -> PipelineReport:
    """Combine the reports of all ranks, in the order of the ranks, into one."""
    ranks = RankMap(schedule.widths)
    by_worker = [[reports[rank] for rank in ranks.ranks_of(worker)] for worker in range(schedule.num_workers)]
    origin = min(start for report in reports for start, _ in report.spans.values())
    starts, ends = [], []
    for tasks, members in zip(schedule.workers, by_worker):
        begun: list[float] = []
        ended: list[float] = []
        for task in tasks:
            text = str(task)
            spans = [report.spans[text] for report in members if text in report.spans]
            if not spans:  # the all-reduce of a stage without weights
                assert task.kind is Kind.ALL_REDUCE, task
                moment = max(ended, default=0.0)
                spans = [(moment + origin, moment + origin)]
            begun.append(min(start for start, _ in spans) - origin)
            ended.append(max(end for _, end in spans) - origin)
        starts.append(np.array(begun))
        ends.append(np.array(ended))
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
    )


def measured_times(timeline: Timeline) -> Times:
    """Mean durations of the tasks of a measured timeline, with which the same run can be simulated.

    The parts of a split backward are added. Transfers take no time: they are what the simulation then lacks.
    """
    schedule = timeline.schedule
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
