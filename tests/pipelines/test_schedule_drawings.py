"""Text grid, SVG and Chrome trace of a timeline."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from autoddl.pipelines.draw import to_svg, to_text, to_trace
from autoddl.pipelines.generators import families, generate
from autoddl.pipelines.schedule import Kind
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.timeline import Timeline
from autoddl.pipelines.times import Times

SVG = "{http://www.w3.org/2000/svg}"


def drawn(name, forward=1, backward=1, **options):
    extra = {key: options.pop(key) for key in ("all_reduce_time", "transfer") if key in options}
    schedule = generate(name, **options)
    times = Times.of(
        schedule.num_stages,
        forward=forward,
        backward=backward,
        all_reduce=extra.get("all_reduce_time", 0),
        transfer=extra.get("transfer", 0),
    )
    return simulate(schedule, times)


def rows(text):
    return [line.split()[2:] for line in text.splitlines()]


def test_text_of_chimera():
    text = to_text(drawn("chimera", num_stages=4, num_micro_batches=4))
    assert text.splitlines() == [
        "worker 0  F0 F1 .  F2 B2 F3 B3 B0 .  B1",
        "worker 1  .  F0 F2 F1 F3 B2 B0 B3 B1 .",
        "worker 2  .  F2 F0 F3 F1 B0 B2 B1 B3 .",
        "worker 3  F2 F3 .  F0 B0 F1 B1 B2 .  B3",
    ]


def test_longer_tasks_take_more_columns():
    """F = 1, Bk = 3 on one worker."""
    assert rows(to_text(drawn("gpipe", 1, 3, num_stages=1, num_micro_batches=2))) == [
        ["F0", "F1", "B0", "==", "==", "B1", "==", "=="]
    ]


def test_stages_are_named_where_a_worker_has_several():
    first = rows(to_text(drawn("wpipe", num_stages=2, num_micro_batches=2, iterations=1)))[0]
    assert first[:5] == ["0F0", "0F1", "2F0", "2F1", "."]


def test_all_reduces_have_a_row_of_their_own():
    text = to_text(drawn("chimera", num_stages=4, num_micro_batches=4, all_reduce_time=1))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == ["worker", "reduce"] * 4
    # Stage 3 is complete at 7 on workers 0 and 3, stage 0 at 10.
    assert lines[1].split() == ["reduce", "3A0", "0A0"]


def test_very_long_timelines_are_cut_to_size():
    text = to_text(drawn("1f1b", num_stages=4, num_micro_batches=500), max_columns=100)
    assert all(len(row) <= 100 for row in rows(text))


@pytest.mark.parametrize("family", [family.name for family in families()])
def test_svg_shows_every_task_where_it_is(family):
    timeline = drawn(family, num_stages=4, num_micro_batches=4, backward=2, all_reduce_time=0.5)
    root = ElementTree.fromstring(to_svg(timeline, title='<"&">'))
    assert '<"&">' in [element.text for element in root.iter(f"{SVG}text")]
    bars = {}
    for group in root.iter(f"{SVG}g"):
        rectangle = group.find(f"{SVG}rect")
        bars[group.find(f"{SVG}title").text] = rectangle
    assert len(bars) == timeline.schedule.num_tasks
    # Bars of one worker do not overlap, and lengths are proportional to times.
    for worker, tasks in enumerate(timeline.schedule.workers):
        compute = [(index, task) for index, task in enumerate(tasks) if task.kind.is_compute]
        found = sorted(
            (float(rectangle.get("x")), float(rectangle.get("width")))
            for tip, rectangle in bars.items()
            if f"on worker {worker}:" in tip and rectangle.get("height") == "20"
        )
        assert len(found) == len(compute)
        assert all(x + width <= after + 0.02 for (x, width), (after, _) in zip(found, found[1:]))
        scale = found[0][1] / (timeline.ends[worker][compute[0][0]] - timeline.starts[worker][compute[0][0]])
        for (_, width), (index, _) in zip(found, compute):
            length = timeline.ends[worker][index] - timeline.starts[worker][index]
            assert width == pytest.approx(scale * length, abs=0.02)


def test_svg_of_32_workers_is_legible():
    """Labels of 11 pixels fit in their bars, rows do not overlap, and nine labels of ten are there."""
    timeline = drawn("chimera", num_stages=32, num_micro_batches=64, backward=2)
    root = ElementTree.fromstring(to_svg(timeline))
    assert float(root.get("width")) <= 16_000 and float(root.get("height")) < 1000
    labels = [group.find(f"{SVG}text") for group in root.iter(f"{SVG}g")]
    compute = sum(task.kind.is_compute for _, _, task in timeline.schedule.tasks())
    assert sum(label is not None for label in labels) >= 0.9 * compute
    heights = sorted({float(e.get("y")) for e in root.iter(f"{SVG}rect") if e.get("fill") == "#f4f4f4"})
    assert min(np.diff(heights)) >= 20


def test_trace_has_every_task_and_every_transfer():
    timeline = drawn("chimera", num_stages=4, num_micro_batches=4, all_reduce_time=0.5, transfer=0.25)
    document = json.loads(to_trace(timeline))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    transfers = [event for event in events if event["cat"] == "transfer"]
    assert len(transfers) == 2 * 3 * 4
    assert len(events) - len(transfers) == timeline.schedule.num_tasks
    assert {names[event["tid"]] for event in transfers} == {
        f"link {a} to {b}" for a, b in ((0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2))
    }
    for worker, index, task in timeline.schedule.tasks():
        row = f"worker {worker}" + (" all-reduce" if task.kind is Kind.ALL_REDUCE else "")
        (event,) = [e for e in events if e["name"] == str(task) and names[e["tid"]] == row]
        assert event["ts"] == pytest.approx(timeline.starts[worker][index] * 1e6)
        assert event["dur"] == pytest.approx((timeline.ends[worker][index] - timeline.starts[worker][index]) * 1e6)


def test_a_measured_timeline_draws_the_same_way():
    """Starts and ends alone, as a runtime measures them; no record of transfers."""
    simulated = drawn("1f1b", num_stages=2, num_micro_batches=2)
    measured = Timeline(simulated.schedule, simulated.starts, simulated.ends)
    assert to_text(measured) == to_text(simulated)
    assert to_svg(measured) == to_svg(simulated)
    assert "transfer" not in to_trace(measured)
    assert measured.makespan == simulated.makespan


def test_an_empty_timeline_draws():
    timeline = drawn("gpipe", 0, 0, num_stages=2, num_micro_batches=1)
    assert to_text(timeline) == "worker 0\nworker 1"
    ElementTree.fromstring(to_svg(timeline))
    json.loads(to_trace(timeline))
