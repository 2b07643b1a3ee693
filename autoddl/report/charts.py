"""The pictures of the report, as inline SVG that takes its colours from the page's style sheet."""

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

#: Units of a picture's width; the page stretches it.
WIDTH = 1000.0


@dataclass(frozen=True)
class Segment:
    """A part of a bar: its name, its size in any unit, and the style class of its colour."""

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
    """A stacked bar whose full width is ``whole``, with named lines at ``marks``; stretched to its container's width.

    Args:
        show: a value as text; a segment shows its name, value and share of all segments where it is pointed at.
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
        at = min(WIDTH - 1, WIDTH * mark / whole) if whole > 0 else 0.0
        tip = element("title", f"{name}: {show(mark)}")
        ends = {"x1": at, "x2": at, "y1": 0, "y2": height}
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

_SPINE, _LANE = 9.0, 11.0
#: More lines beside each other than this are drawn on the last one.
MAX_LANES = 5


def gutter_width(num_lanes: int) -> float:
    """Pixels for a spine and so many lines beside it."""
    return 2 * _SPINE + _LANE * num_lanes


def graph_gutters(num_rows: int, edges: Sequence[tuple[int, int]]) -> tuple[list[Markup], int]:
    """For each row of a layer graph the picture of the edges at it, and the number of lines beside the spine.

    Rows are in topological order and lie on one spine: an edge to the next row is a piece of it.  What a row hands to later ones
    runs on a line of its own beside it, as far as its last consumer; a line is free for the next after that.
    """
    targets: dict[int, list[int]] = {}
    for source, target in sorted(set(edges)):
        if source < target:
            targets.setdefault(source, []).append(target)
    far = {source: [t for t in found if t > source + 1] for source, found in targets.items()}
    lane_of: dict[int, int] = {}
    free_at = [0] * MAX_LANES
    for source in sorted(source for source, found in far.items() if found):
        lane = next((k for k, row in enumerate(free_at) if row <= source), MAX_LANES - 1)
        lane_of[source] = lane
        free_at[lane] = max(free_at[lane], far[source][-1])
    lanes = max(lane_of.values(), default=-1) + 1
    width = gutter_width(lanes)
    pictures = []
    for row in range(num_rows):
        paths = []
        if row + 1 in targets.get(row, ()):
            paths.append(f"M{_SPINE:g} 50V100")
        if row in targets.get(row - 1, ()):
            paths.append(f"M{_SPINE:g} 0V50")
        for source, lane in lane_of.items():
            x, last = _SPINE + _LANE * (lane + 1), far[source][-1]
            if row == source:
                paths.append(f"M{_SPINE:g} 50C{x:g} 50 {x:g} 70 {x:g} 100")
            elif source < row <= last:
                if row in far[source]:
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
    return pictures, lanes


# ------------------------------------------------------------------------------------------------------------ the timeline

ROW, BAR, LEFT, TOP = 26.0, 20.0, 70.0, 6.0
#: Bars that one picture may hold; of longer schedules the beginning and the end are drawn.
MAX_BARS = 640
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
    """The whole step, or its beginning and its end where it has very many tasks; each with a caption."""
    makespan = timeline.makespan
    if timeline.schedule.num_tasks <= MAX_BARS:
        return [("", _window(timeline, 0.0, makespan))]
    starts, ends = np.concatenate(timeline.starts), np.concatenate(timeline.ends)
    half = MAX_BARS // 2
    head = float(np.partition(starts, half)[half])
    tail = float(np.partition(ends, len(ends) - half)[len(ends) - half])
    return [
        (f"the first {format_seconds(head)}", _window(timeline, 0.0, head)),
        (f"the last {format_seconds(makespan - tail)}", _window(timeline, tail, makespan)),
    ]


def _window(timeline: Timeline, begin: float, end: float) -> Markup:
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
    style = _STYLES[task.kind] + (" other" if task.pipeline % 2 else "")
    tip = element("title", f"{task} on worker {worker}: {format_seconds(start)} to {format_seconds(stop)}")
    if not task.kind.is_compute:
        return element("rect", tip, class_=style, x=x, y=y + BAR, width=max(width, 1.5), height=3)
    several = len(schedule.stages_on(worker)) > 1
    label = f"{task.stage}.{task.micro_batch}" if several else f"{task.micro_batch}"
    box = element("rect", tip, class_=style, x=x, y=y, width=width, height=BAR)
    if width < 6.5 * len(label) + 4:
        return box
    text = element("text", label, class_=f"on-{style.split()[0]}", x=x + width / 2, y=y + 14, text_anchor="middle")
    return join(box, text)


def _ticks(begin: float, end: float, scale: float, y: float) -> list[Markup]:
    """At round distances of at least 90 units."""
    step = 10 ** math.ceil(math.log10(90 / scale))
    step = next((step * finer for finer in (0.2, 0.5) if step * finer * scale >= 90), step)
    first = math.ceil(begin / step - 1e-9)
    ticks = []
    for k in range(first, int(end / step + 1e-9) + 1):
        x = LEFT + (k * step - begin) * scale
        anchor = "end" if x > WIDTH - 40 else "middle"
        ticks.append(element("text", format_seconds(k * step), class_="tick", x=x, y=y + 14, text_anchor=anchor))
    return ticks
