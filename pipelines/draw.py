"""Drawings of a timeline, predicted or measured: a text grid, an SVG picture, a Chrome trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from .schedule import Kind, Schedule, Task
from .timeline import Timeline

__all__ = ["to_rows", "to_svg", "to_text", "to_trace"]

#: Microseconds per second; traces hold microseconds.
MICROSECONDS = 1e6


class _Bar(NamedTuple):
    """A task on the time axis of a worker."""

    worker: int
    task: Task
    start: float
    end: float


def _bars(timeline: Timeline) -> Iterator[_Bar]:
    for worker, tasks in enumerate(timeline.schedule.workers):
        starts, ends = timeline.starts[worker].tolist(), timeline.ends[worker].tolist()
        for task, start, end in zip(tasks, starts, ends):
            yield _Bar(worker, task, start, end)


def _label(task: Task, with_stage: bool) -> str:
    """The task's text without its pipeline, and with the stage of a computation if ``with_stage``."""
    text = str(task).rpartition(":")[2]
    return text if with_stage or not task.kind.is_compute else text.lstrip("0123456789")


def _has_several_stages(schedule: Schedule) -> bool:
    """Whether any worker holds several stages of one pipeline."""
    return any(len(set(workers)) < len(workers) for workers in schedule.placement)


def to_rows(timeline: Timeline, tick: float | None = None, max_columns: int = 240) -> list[tuple[str, list[str]]]:
    """Return a row for each worker: its name and its cells, one cell for each tick of time.

    A cell holds a task's label where the task begins, ``=`` while it runs and ``.`` while the worker idles. A label is
    ``F3``, ``B3``, ... (kind and micro-batch), preceded by the stage if a worker has several stages of one pipeline. All
    cells are equally wide. All-reduces that take time have a row of their own, below that of their worker.

    Args:
        timeline: the timeline.
        tick: time per column, in the unit of the timeline. By default the duration of the shortest computation, or more if
            there would be more than ``max_columns`` columns.
        max_columns: largest number of columns if ``tick`` is not given.
    """
    schedule = timeline.schedule
    makespan = timeline.makespan
    bars = [bar for bar in _bars(timeline) if bar.end > bar.start]
    if not bars:
        return [(f"worker {worker}", []) for worker in range(schedule.num_workers)]
    if tick is None:
        shortest = min((bar.end - bar.start for bar in bars if bar.task.kind.is_compute), default=makespan)
        tick = max(shortest, makespan / max_columns)
    columns = max(1, math.ceil(makespan / tick - 1e-9))
    with_stage = _has_several_stages(schedule)
    compute = [["."] * columns for _ in schedule.workers]
    reduces = [[""] * columns for _ in schedule.workers]
    for bar in bars:
        row = (reduces if bar.task.kind is Kind.ALL_REDUCE else compute)[bar.worker]
        # A column shows the task that runs in its middle.
        first = math.ceil(bar.start / tick - 0.5 - 1e-9)
        last = math.ceil(bar.end / tick - 0.5 - 1e-9)
        for column in range(max(0, first), min(last, columns)):
            row[column] = _label(bar.task, with_stage) if column == first else "="
    width = max(len(cell) for rows in (compute, reduces) for row in rows for cell in row)
    name_width = len(f"worker {schedule.num_workers - 1}")
    named_rows = []
    for worker, row in enumerate(compute):
        for name, cells in ((f"worker {worker}", row), ("reduce", reduces[worker])):
            if any(cells):
                padded = [cell * width if cell == "=" else cell.center(width) for cell in cells]
                named_rows.append((name.rjust(name_width), padded))
    return named_rows


def to_text(timeline: Timeline, tick: float | None = None, max_columns: int = 240) -> str:
    """Return the rows of :func:`to_rows` as lines of text.

    >>> from autoddl.pipelines import generate
    >>> from autoddl.pipelines.simulator import simulate
    >>> from autoddl.pipelines.times import Times
    >>> print(to_text(simulate(generate("gpipe", num_stages=2, num_micro_batches=2), Times.of(2, forward=1, backward=1))))
    worker 0  F0 F1 .  .  B0 B1
    worker 1  .  F0 F1 B0 B1 .
    """
    rows = to_rows(timeline, tick, max_columns)
    return "\n".join(f"{name}  {' '.join(cells)}".rstrip() for name, cells in rows)


#: Heights of a row and of a bar in it, and margins around the rows [pixels].
ROW_HEIGHT, BAR_HEIGHT, LEFT, TOP, BOTTOM = 26, 20, 78, 46, 26
#: Size of the labels [pixels].
FONT = 11
#: Width of a character at this font size [pixels].
CHARACTER = 6.6
#: Largest width of a picture [pixels].
MAX_WIDTH = 16_000

#: Fill colours of forward passes, by pipeline.
_FORWARDS = ("#f6c344", "#8fc1e3", "#f2a07b", "#9ed39a", "#d5b3e5", "#f3d9a4", "#a9d8d1", "#e8a7b8")
#: Fill colours of tasks that have the same colour in all pipelines.
_FILLS = {
    Kind.RECOMPUTE: "#d9d9d9",
    Kind.ALL_REDUCE: "#555555",
    Kind.UPDATE: "#c0392b",
}
#: Factors that darken the colour of the pipeline for the other passes.
_DARKER = {Kind.BACKWARD: 0.72, Kind.BACKWARD_INPUT: 0.72, Kind.BACKWARD_WEIGHT: 0.56}


def _fill(task: Task) -> str:
    base = _FILLS.get(task.kind, _FORWARDS[task.pipeline % len(_FORWARDS)])
    factor = _DARKER.get(task.kind, 1.0)
    channels = (int(base[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel * factor):02x}" for channel in channels)


def to_svg(timeline: Timeline, title: str | None = None) -> str:
    """Return an SVG picture: a row for each worker, a colour for each pipeline, bright forwards, dark backwards, thin all-reduces.

    The picture is as wide as the labels need, at most 16,000 pixels. Labels that do not fit are omitted; a tooltip on
    every bar shows the task and its times.

    Args:
        timeline: the timeline.
        title: title of the picture; by default name and size of the schedule.
    """
    schedule = timeline.schedule
    makespan = timeline.makespan or 1.0
    with_stage = _has_several_stages(schedule)
    bars = list(_bars(timeline))
    # Pixels per unit of time that each label needs.
    needed_scales = [
        (len(_label(bar.task, with_stage)) + 1) * CHARACTER / (bar.end - bar.start)
        for bar in bars
        if bar.task.kind.is_compute and bar.end > bar.start
    ]
    # The scale at which 90 % of the labels fit: a few very short tasks should not stretch the whole picture.
    scale = float(np.quantile(needed_scales, 0.9)) if needed_scales else 1.0
    scale = min(max(scale, 480 / makespan), MAX_WIDTH / makespan)
    width, height = LEFT + makespan * scale + 20, TOP + ROW_HEIGHT * schedule.num_workers + BOTTOM
    title = title or f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="{FONT}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="8" y="36" fill="#666">makespan {makespan:.6g}, bubbles {timeline.bubble_ratio:.1%}; '
        "bright: forward, dark: backward; a colour per pipeline; thin: all-reduce, update</text>",
    ]
    for worker in range(schedule.num_workers):
        y = TOP + ROW_HEIGHT * worker
        parts.append(f'<text x="8" y="{y + 14}">worker {worker}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{makespan * scale:.1f}" height="{BAR_HEIGHT}" fill="#f4f4f4"/>')
    for bar in bars:
        parts.append(_svg_bar(bar, scale, with_stage))
    parts += _svg_axis(makespan, scale, TOP + ROW_HEIGHT * schedule.num_workers)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _svg_bar(bar: _Bar, scale: float, with_stage: bool) -> str:
    x, y = LEFT + bar.start * scale, TOP + ROW_HEIGHT * bar.worker
    width = (bar.end - bar.start) * scale
    top, thickness = y, BAR_HEIGHT
    if not bar.task.kind.is_compute:
        top, thickness, width = y + BAR_HEIGHT, 3, max(width, 1.5)
    label = _label(bar.task, with_stage)
    tip = escape(f"{bar.task} on worker {bar.worker}: {bar.start:.6g} to {bar.end:.6g}")
    text = ""
    if bar.task.kind.is_compute and len(label) * CHARACTER <= width:
        text = f'<text x="{x + width / 2:.2f}" y="{y + 14}" text-anchor="middle">{label}</text>'
    return (
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{thickness}" '
        f'fill="{_fill(bar.task)}" stroke="white" stroke-width="0.6"/>{text}</g>'
    )


def _svg_axis(makespan: float, scale: float, y: int) -> list[str]:
    """Labels of the time axis, at round distances of at least 60 pixels."""
    step = 10 ** math.ceil(math.log10(60 / scale))
    for finer in (0.2, 0.5):
        if step * finer * scale >= 60:
            step *= finer
            break
    return [
        f'<text x="{LEFT + i * step * scale:.1f}" y="{y + 16}" fill="#666" text-anchor="middle">{i * step:.6g}</text>'
        for i in range(int(makespan / step + 1e-9) + 1)
    ]


def to_trace(timeline: Timeline) -> str:
    """Return JSON for chrome://tracing and Perfetto: threads for each worker, for its all-reduces, and for each link that is used.

    The times of the timeline are taken as seconds.
    """
    schedule = timeline.schedule
    events: list[dict[str, object]] = []
    threads: dict[str, int] = {}

    def thread(name: str) -> int:
        if name not in threads:
            threads[name] = len(threads)
        return threads[name]

    def add(name: str, category: str, row: str, start: float, end: float, arguments: dict[str, object]) -> None:
        events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": start * MICROSECONDS,
                "dur": (end - start) * MICROSECONDS,
                "pid": 0,
                "tid": thread(row),
                "args": arguments,
            }
        )

    for worker in range(schedule.num_workers):
        thread(f"worker {worker}")
    for bar in _bars(timeline):
        task = bar.task
        row = f"worker {bar.worker}" + (" all-reduce" if task.kind is Kind.ALL_REDUCE else "")
        arguments: dict[str, object] = {"pipeline": task.pipeline, "stage": task.stage}
        arguments["micro_batch" if task.kind.is_compute else "update"] = task.micro_batch
        add(str(task), task.kind.name.lower(), row, bar.start, bar.end, arguments)
    if timeline.departures is not None and timeline.arrivals is not None:
        for worker, tasks in enumerate(schedule.workers):
            for task, departure, arrival in zip(
                tasks, timeline.departures[worker].tolist(), timeline.arrivals[worker].tolist()
            ):
                destination = schedule.destination_of(task)
                if destination is not None and arrival > departure:
                    add(str(task), "transfer", f"link {worker} to {destination}", departure, arrival, {})
    for name, number in threads.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": number, "args": {"sort_index": number}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
