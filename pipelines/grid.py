"""Schedules as text: a CSV grid with a row per worker, and the excerpt that shows where a schedule is invalid.

The CSV begins with header lines. Then each row holds the tasks of a worker (several tasks in a cell are separated by
spaces). Empty cells have no meaning: they are printed where a worker idles in unit times, so that the columns line up as
a picture::

    # schedule,1f1b
    # micro-batches,2
    # update-period,2
    # pipeline,0 1
    worker 0,0F0,0F1,,0B0,,0B1 0U0
    worker 1,,1F0,1B0,1F1,1B1 1U0,

Header lines for delays, widths and activation limits are written unless they are 0, 1 and unbounded everywhere.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from autoddl.costmodel.errors import quote
from autoddl.costmodel.limits import MAX_FIGURE, MAX_PASSES, MAX_SHOWN_EACH, MAX_STAGES, MAX_TASKS
from autoddl.costmodel.reading import csv_rows, is_whole, parse_figure

from .schedule import Kind, Part, Schedule, ScheduleTextError, Task, parse_task
from .simulator import execute
from .tasktable import tabulate
from .times import Times

__all__ = ["excerpt", "from_csv", "to_csv"]

_MARK = "# "
_ROW = "worker "


def to_csv(schedule: Schedule) -> str:
    """The schedule as a CSV grid; :func:`from_csv` reads it back."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_MARK + "schedule", schedule.name])
    writer.writerow([_MARK + "micro-batches", schedule.num_micro_batches])
    writer.writerow([_MARK + "update-period", schedule.update_period])
    for workers in schedule.placement:
        writer.writerow([_MARK + "pipeline", _joined(workers)])
    if any(schedule.delays):
        writer.writerow([_MARK + "delays", _joined(schedule.delays)])
    if any(width != 1 for width in schedule.widths):
        writer.writerow([_MARK + "widths", _joined(schedule.widths)])
    if schedule.activation_limits is not None:
        writer.writerow([_MARK + "activation-limits", _joined(schedule.activation_limits)])
    columns = _columns(schedule)
    width = 1 + max((max(row, default=0) for row in columns), default=0)
    for worker, (tasks, row) in enumerate(zip(schedule.workers, columns)):
        cells = [""] * width
        for task, column in zip(tasks, row):
            cells[column] = f"{cells[column]} {task}" if cells[column] else str(task)
        writer.writerow([f"{_ROW}{worker}", *cells])
    return out.getvalue()


def from_csv(text: str) -> Schedule:
    """Read a schedule from its CSV grid, without validating it.

    Raises:
        UserError: naming the line that cannot be read, the header that is missing, or the limit that is exceeded.
    """
    header: dict[str, str] = {}
    pipelines: list[tuple[int, ...]] = []
    rows: list[tuple[Task, ...]] = []
    num_tasks = 0
    for line, cells in csv_rows(text, "schedule"):
        if not any(cells):
            continue
        head = cells[0]
        if head.startswith(_MARK):
            key, value = head[len(_MARK) :], cells[1] if len(cells) > 1 else ""
            if key == "pipeline":
                pipelines.append(tuple(_whole(line, key, word) for word in value.split()))
            elif key in _KEYS:
                header[key] = value
            else:
                raise ScheduleTextError(f"line {line}: {quote(key)} is unknown; known are pipeline, {', '.join(_KEYS)}")
        elif head == f"{_ROW}{len(rows)}":
            try:
                rows.append(tuple(parse_task(word) for cell in cells[1:] for word in cell.split()))
                num_tasks += len(rows[-1])
                if num_tasks > MAX_TASKS:
                    raise ScheduleTextError(f"a schedule should have at most {MAX_TASKS:,} tasks")
            except ScheduleTextError as error:
                raise ScheduleTextError(f"line {line}: {error}") from None
        else:
            raise ScheduleTextError(f"line {line} begins with {quote(head)}; '{_ROW}{len(rows)}' is expected")
    return _assemble(header, pipelines, rows)


_KEYS = ("schedule", "micro-batches", "update-period", "delays", "widths", "activation-limits")


def _assemble(header: dict[str, str], pipelines: list[tuple[int, ...]], rows: list[tuple[Task, ...]]) -> Schedule:
    for key in ("schedule", "micro-batches", "update-period"):
        if key not in header:
            raise ScheduleTextError(f"the line '{_MARK}{key},...' is missing")
    if len(header["schedule"]) > MAX_SHOWN_EACH:  # every message about the schedule begins with its name
        raise ScheduleTextError(
            f"the name {quote(header['schedule'])} is too long; give at most {MAX_SHOWN_EACH} characters"
        )
    if not pipelines or not rows:
        raise ScheduleTextError(f"the line '{_MARK}pipeline,...' or the row '{_ROW}0,...' is missing")
    num_stages = len(pipelines[0])
    for what, count in (("stages", num_stages), ("pipelines", len(pipelines)), ("workers", len(rows))):
        if count > MAX_STAGES:
            raise ScheduleTextError(f"there are {count:,} {what}; give at most {MAX_STAGES:,}")
    num_micro_batches = _whole(0, "micro-batches", header["micro-batches"])
    if num_micro_batches * num_stages > MAX_PASSES:
        raise ScheduleTextError(
            f"micro-batches x stages is {num_micro_batches * num_stages:,}; give at most {MAX_PASSES:,}"
        )

    def numbers(key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(_whole(0, key, word) for word in header[key].split()) if key in header else default

    limits = header.get("activation-limits")
    activation_limits = None if limits is None else tuple(map(parse_figure, limits.split()))
    if activation_limits is not None and not all(0 <= limit <= MAX_FIGURE for limit in activation_limits):
        raise ScheduleTextError(f"activation-limits are {quote(limits)}; numbers of at least 0 are expected")
    return Schedule(
        name=header["schedule"],
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        placement=tuple(pipelines),
        workers=tuple(rows),
        update_period=_whole(0, "update-period", header["update-period"]),
        delays=numbers("delays", (0,) * num_stages),
        widths=numbers("widths", (1,) * len(rows)),
        activation_limits=activation_limits,
    )


def _whole(line: int, key: str, text: str) -> int:
    if not is_whole(text):
        where = f"line {line}: " if line else ""
        raise ScheduleTextError(f"{where}{key} has {quote(text)}; whole numbers are expected")
    return int(text)


def _joined(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _columns(schedule: Schedule) -> list[list[int]]:
    """Per worker, the column of each task: its start in unit times, or its index if the schedule cannot be executed."""
    num_stages = schedule.num_stages
    kinds = {task.kind for tasks in schedule.workers for task in tasks}
    parts = {task.part for tasks in schedule.workers for task in tasks}
    split = Kind.BACKWARD_INPUT in kinds or Part.FIRST_HALF in parts
    forward = 0.5 if Part.PAIR in parts else 1.0
    unit = Times.of(num_stages, forward=forward, backward=2 if split else 1, recompute=1)
    fits = all(
        0 <= task.stage < num_stages and 0 <= task.pipeline < schedule.num_pipelines for _, _, task in schedule.tasks()
    )
    table = tabulate(schedule)
    stops = table.offsets[1:].tolist()
    try:
        outcome = execute(schedule, table, unit) if fits else None
    except IndexError:  # micro-batches out of range or missing: the schedule cannot be executed
        outcome = None
    result: list[list[int]] = []
    for worker, tasks in enumerate(schedule.workers):
        if outcome is None or outcome.cursors != stops:
            result.append(list(range(len(tasks))))
            continue
        row: list[int] = []
        begin = stops[worker] - len(tasks)
        for index, task in enumerate(tasks):
            before = row[-1] if row else 0
            row.append(max(before, int(outcome.starts[begin + index])) if task.kind.is_compute else before)
        result.append(row)
    return result


_EXCERPT_COLUMNS = 6
_EXCERPT_ROWS = 8


def excerpt(schedule: Schedule, cells: Sequence[tuple[int, int]]) -> str:
    """The neighbourhood of some tasks (worker, index in its list), with the tasks themselves marked as ``>2F0<``.

    Columns are list indices, not times. The excerpt shows rows up to 8 from that of the first task, and in each row the
    tasks up to 6 from the marked one (in rows without a mark, from the first marked index). An index past the end of a
    worker's list is shown as ``>?<``: a task is missing there.
    """
    focus_worker, focus_index = cells[0]
    marked = set(cells)
    rows = range(max(0, focus_worker - _EXCERPT_ROWS), min(schedule.num_workers, focus_worker + _EXCERPT_ROWS + 1))
    lines = []
    for worker in rows:
        tasks = schedule.workers[worker]
        centre = next((index for row, index in cells if row == worker), min(focus_index, len(tasks) - 1))
        low, high = max(0, centre - _EXCERPT_COLUMNS), min(len(tasks), centre + _EXCERPT_COLUMNS + 1)
        shown = [f">{tasks[i]}<" if (worker, i) in marked else f" {tasks[i]} " for i in range(low, high)]
        if (worker, len(tasks)) in marked:
            shown.append(">?<")
        before, after = "... " if low else "", " ..." if high < len(tasks) else ""
        lines.append((f"worker {worker}", low, before, shown, after))
    width = max((len(cell) for _, _, _, shown, _ in lines for cell in shown), default=0)
    head = max(len(name) for name, *_ in lines)
    return "\n".join(
        f"{name:>{head}} [{low:>4}] {before:4}{' '.join(cell.center(width) for cell in shown)}{after}".rstrip()
        for name, low, before, shown, after in lines
    )
