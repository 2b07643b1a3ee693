"""Draws the pictures of the report as inline SVG: stacked bars, edges of the layer graph, timelines.

Colours are style classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.units import format_seconds
from autoddl.pipelines.schedule import Kind, Schedule, Task
from autoddl.pipelines.timeline import Timeline

from .markup import Markup, element, join

__all__ = ["Segment", "bar", "graph_gutters", "gutter_width", "timeline_pictures"]

#: Width of a picture, in the units of its coordinates; the page scales it.
WIDTH = 1000.0


@dataclass(frozen=True)
class Segment:
    """A part of a bar.

    Attributes:
        name: its name.
        value: its size, in any unit.
        style: style class of its colour.
    """

    name: str
    value: float
    style: str


def bar(
    segments: Sequence[Segment],
    whole: float,
    label: str,
    show: Callable[[float], str],
    height: float = 24.0,
    marks: Sequence[tuple[str, float]] = (),
) -> Markup:
    """Return a stacked bar. When the pointer is over a segment, its name, value and share are shown.

    Args:
        segments: parts of the bar, from left to right.
        whole: value that the full width of the bar stands for.
        label: description of the bar.
        show: function that turns a value into text.
        height: height of the bar in pixels; its width is that of its container.
        marks: names and values of vertical lines.
    """
    parts = [element("title", label), element("rect", class_="track", x=0, y=0, width=WIDTH, height=height)]
    total = sum(segment.value for segment in segments)
    x = 0.0
    for segment in segments:
        width = WIDTH * segment.value / whole if whole > 0 else 0.0
        if width > 0:
            share = f" ({segment.value / total:.1%})" if len(segments) > 1 else ""
            tip = element("title", f"{segment.name}: {show(segment.value)}{share}")
            parts.append(element("rect", tip, class_=segment.style, x=x, y=0, width=width, height=height))
        x += width
    for name, mark in marks:
        mark_x = min(WIDTH - 1, WIDTH * mark / whole) if whole > 0 else 0.0
        tip = element("title", f"{name}: {show(mark)}")
        ends = {"x1": mark_x, "x2": mark_x, "y1": 0, "y2": height}
        parts.append(element("line", tip, class_="mark", vector_effect="non-scaling-stroke", **ends))
    return element(
        "svg",
        *parts,
        class_="bar",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        height=height,
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


# ------------------------------------------------------------------------------------------------------------ the layer graph

#: Distance of the spine from the left, and of the lanes from each other, in pixels.
_SPINE, _LANE = 9.0, 11.0
#: Largest number of lanes. Further lines share the last lane.
MAX_LANES = 5


def gutter_width(num_lanes: int) -> float:
    """Return the width in pixels of the spine and the lanes beside it."""
    return 2 * _SPINE + _LANE * num_lanes


def graph_gutters(num_rows: int, edges: Sequence[tuple[int, int]]) -> tuple[list[Markup], int]:
    """Draw the edges of a layer graph whose rows are in topological order.

    All rows lie on one vertical line, the spine. An edge to the next row is a piece of the spine. If a row has edges to later rows,
    one line leads from it to the last of them, in a lane beside the spine, and branches back to the spine at each of them. At the
    last of them the lane is free for another line.

    Args:
        num_rows: number of rows.
        edges: pairs of rows.

    Returns:
        A picture for each row, and the number of lanes.
    """
    targets: dict[int, list[int]] = {}
    for source, target in sorted(set(edges)):
        if source < target:
            targets.setdefault(source, []).append(target)
    far_targets = {source: [row for row in rows if row > source + 1] for source, rows in targets.items()}
    # Give each source of far edges the first lane that is free.
    lane_of: dict[int, int] = {}
    lane_end = [0] * MAX_LANES
    for source in sorted(source for source, rows in far_targets.items() if rows):
        lane = next((lane for lane, end in enumerate(lane_end) if end <= source), MAX_LANES - 1)
        lane_of[source] = lane
        lane_end[lane] = max(lane_end[lane], far_targets[source][-1])
    num_lanes = max(lane_of.values(), default=-1) + 1
    width = gutter_width(num_lanes)
    pictures = []
    for row in range(num_rows):
        paths = []
        if row + 1 in targets.get(row, ()):
            paths.append(f"M{_SPINE:g} 50V100")
        if row in targets.get(row - 1, ()):
            paths.append(f"M{_SPINE:g} 0V50")
        for source, lane in lane_of.items():
            x, last = _SPINE + _LANE * (lane + 1), far_targets[source][-1]
            if row == source:
                paths.append(f"M{_SPINE:g} 50C{x:g} 50 {x:g} 70 {x:g} 100")
            elif source < row <= last:
                if row in far_targets[source]:
                    paths.append(f"M{x:g} 0C{x:g} 30 {x:g} 50 {_SPINE:g} 50")
                if row < last:
                    paths.append(f"M{x:g} 0V100")
        lines = [element("path", d=path, vector_effect="non-scaling-stroke") for path in paths]
        pictures.append(
            element(
                "svg",
                *lines,
                class_="edges",
                viewBox=f"0 0 {width:g} 100",
                preserveAspectRatio="none",
                aria_hidden="true",
            )
        )
    return pictures, num_lanes


# ------------------------------------------------------------------------------------------------------------ the timeline

#: Distance between rows, height of a bar, and margins on the left and at the top.
ROW, BAR, LEFT, TOP = 26.0, 20.0, 70.0, 6.0
#: Largest number of tasks in one picture. Of schedules with more tasks, the beginning and the end are drawn.
MAX_BARS = 640
#: Style classes of tasks.
_STYLES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "weight",
    Kind.RECOMPUTE: "again",
    Kind.ALL_REDUCE: "reduce",
    Kind.UPDATE: "reduce",
}


def timeline_pictures(timeline: Timeline) -> list[tuple[str, Markup]]:
    """Draw a step, or its beginning and its end if it has more than `MAX_BARS` tasks; return captions and pictures."""
    makespan = timeline.makespan
    if timeline.schedule.num_tasks <= MAX_BARS:
        return [("", _window(timeline, 0.0, makespan))]
    starts, ends = np.concatenate(timeline.starts), np.concatenate(timeline.ends)
    half = MAX_BARS // 2
    head_end = float(np.partition(starts, half)[half])
    tail_start = float(np.partition(ends, len(ends) - half)[len(ends) - half])
    return [
        (f"the first {format_seconds(head_end)}", _window(timeline, 0.0, head_end)),
        (f"the last {format_seconds(makespan - tail_start)}", _window(timeline, tail_start, makespan)),
    ]


def _window(timeline: Timeline, begin: float, end: float) -> Markup:
    """Draw the part of a timeline between two times, in seconds."""
    schedule = timeline.schedule
    span = end - begin or 1.0
    scale = (WIDTH - LEFT - 10) / span
    height = TOP + ROW * schedule.num_workers + 20
    parts = [
        element(
            "title", f"{schedule.name}: what each worker does from {format_seconds(begin)} to {format_seconds(end)}"
        )
    ]
    for worker, tasks in enumerate(schedule.workers):
        y = TOP + ROW * worker
        parts.append(element("text", f"worker {worker}", class_="name", x=0, y=y + 14))
        parts.append(element("rect", class_="track", x=LEFT, y=y, width=WIDTH - LEFT - 10, height=BAR))
        starts, ends = timeline.starts[worker].tolist(), timeline.ends[worker].tolist()
        for task, start, stop in zip(tasks, starts, ends):
            if stop > begin and start < end:
                x = LEFT + (max(start, begin) - begin) * scale
                width = (min(stop, end) - max(start, begin)) * scale
                parts.append(_task(schedule, task, worker, x, y, width, start, stop))
    parts += _ticks(begin, end, scale, TOP + ROW * schedule.num_workers)
    return element(
        "svg",
        *parts,
        class_="timeline",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label="pipeline timeline",
    )


def _task(
    schedule: Schedule, task: Task, worker: int, x: float, y: float, width: float, start: float, stop: float
) -> Markup:
    """Draw a task; all-reduces and updates are thin lines below the bars."""
    style = _STYLES[task.kind] + (" other" if task.pipeline % 2 else "")
    tip = element("title", f"{task} on worker {worker}: {format_seconds(start)} to {format_seconds(stop)}")
    if not task.kind.is_compute:
        return element("rect", tip, class_=style, x=x, y=y + BAR, width=max(width, 1.5), height=3)
    has_several_stages = len(schedule.stages_on(worker)) > 1
    label = f"{task.stage}.{task.micro_batch}" if has_several_stages else f"{task.micro_batch}"
    box = element("rect", tip, class_=style, x=x, y=y, width=width, height=BAR)
    if width < 6.5 * len(label) + 4:
        return box
    text = element("text", label, class_=f"on-{style.split()[0]}", x=x + width / 2, y=y + 14, text_anchor="middle")
    return join(box, text)


def _ticks(begin: float, end: float, scale: float, y: float) -> list[Markup]:
    """Draw the times below a timeline, at round distances of at least 90 units."""
    step = 10 ** math.ceil(math.log10(90 / scale))
    step = next((step * finer for finer in (0.2, 0.5) if step * finer * scale >= 90), step)
    first = math.ceil(begin / step - 1e-9)
    ticks = []
    for k in range(first, int(end / step + 1e-9) + 1):
        x = LEFT + (k * step - begin) * scale
        anchor = "end" if x > WIDTH - 40 else "middle"
        ticks.append(element("text", format_seconds(k * step), class_="tick", x=x, y=y + 14, text_anchor=anchor))
    return ticks
