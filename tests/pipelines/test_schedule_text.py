"""Tasks and schedules print and parse back; the golden grids are what the generators produce."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.pipelines.generators import families, generate
from autoddl.pipelines.grid import from_csv, to_csv
from autoddl.pipelines.schedule import Kind, Part, ScheduleTextError, Task, parse_task
from autoddl.pipelines.validate import validate

GOLDEN = Path(__file__).parent / "golden"

tasks = st.builds(
    Task,
    kind=st.sampled_from(Kind),
    pipeline=st.integers(0, 300),
    stage=st.integers(0, 300),
    micro_batch=st.integers(0, 10_000),
    part=st.sampled_from(Part),
).map(lambda task: task if task.kind.is_compute else task._replace(part=Part.WHOLE))


@given(tasks)
def test_a_task_parses_as_it_prints(task):
    assert parse_task(str(task)) == task


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("2F5", Task(Kind.FORWARD, 0, 2, 5)),
        ("1:2F4+5", Task(Kind.FORWARD, 1, 2, 4, Part.PAIR)),
        ("2B5a", Task(Kind.BACKWARD, 0, 2, 5, Part.FIRST_HALF)),
        ("2B5b", Task(Kind.BACKWARD, 0, 2, 5, Part.SECOND_HALF)),
        ("12I0", Task(Kind.BACKWARD_INPUT, 0, 12, 0)),
        ("0W10", Task(Kind.BACKWARD_WEIGHT, 0, 0, 10)),
        ("3:0R1", Task(Kind.RECOMPUTE, 3, 0, 1)),
        ("2A3", Task(Kind.ALL_REDUCE, 0, 2, 3)),
        ("2U3", Task(Kind.UPDATE, 0, 2, 3)),
    ],
)
def test_the_texts_of_tasks(text, task):
    assert parse_task(text) == task
    assert str(task) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F5", "'F5' is not a task"),
        ("2X5", "'2X5' is not a task"),
        ("2F5c", "is not a task"),
        ("2F-1", "is not a task"),
        ("2F4+6", "a pair is two consecutive micro-batches"),
        ("2U3a", "an update has a number only, as in 2U0"),
    ],
)
def test_what_is_not_a_task(text, message):
    with pytest.raises(ScheduleTextError, match=message):
        parse_task(text)


SCHEDULES = {
    "gpipe": dict(num_stages=4, num_micro_batches=4),
    "grouped-gpipe": dict(num_stages=2, num_micro_batches=2),
    "1f1b": dict(num_stages=4, num_micro_batches=8),
    "1f1b-b": dict(num_stages=4, num_micro_batches=8, policy="B", max_in_flight=4),
    "gems": dict(num_stages=2, num_micro_batches=2),
    "pipedream": dict(num_stages=3, num_micro_batches=4, iterations=1),
    "pipedream-2bw": dict(num_stages=2, num_micro_batches=2, iterations=3),
    "chimera": dict(num_stages=4, num_micro_batches=4),
    "chimera-f2": dict(num_stages=8, num_micro_batches=8, num_pipelines=4),
    "chimera-direct": dict(num_stages=4, num_micro_batches=8),
    "chimera-doubling": dict(num_stages=4, num_micro_batches=8, concatenation="doubling", recompute=True),
    "chimera-halving": dict(num_stages=4, num_micro_batches=4, concatenation="halving"),
    "wpipe": dict(num_stages=2, num_micro_batches=2, iterations=3),
    "interleaved-1f1b": dict(num_stages=2, num_micro_batches=4),
    "zero-bubble": dict(num_stages=4, num_micro_batches=6),
    "zero-bubble-h2": dict(num_stages=3, num_micro_batches=6, policy="H2"),
}


def family_of(name: str) -> str:
    return max((family.name for family in families() if name.startswith(family.name)), key=len)


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_schedules(name):
    text = (GOLDEN / f"{name}.csv").read_text()
    schedule = generate(family_of(name), **SCHEDULES[name])
    assert to_csv(schedule) == text
    golden = from_csv(text)
    validate(golden)
    assert golden == schedule


def test_there_is_a_golden_schedule_of_every_family():
    assert {family_of(name) for name in SCHEDULES} == {family.name for family in families()}
    assert {path.stem for path in GOLDEN.glob("*.csv")} == set(SCHEDULES)


def test_the_papers_picture_of_chimera():
    """D = 4, N = 4: d, u = forward of down, up; capitals backward. Read back from the golden grid, cell by cell.

    The picture spreads the first forwards over two slots each; a worker that is free does not wait, so a dot may stand
    earlier.
    """
    picture = ["d . d u U u U D . D", ". d u d u U D U D .", ". u d u d D U D U .", "u . u d D d D U . U"]
    rows = []
    for line in (GOLDEN / "chimera.csv").read_text().splitlines():
        if not line.startswith("worker"):
            continue
        cells = []
        for cell in line.split(",")[1:]:
            compute = [task for task in map(parse_task, cell.split()) if task.kind.is_compute]
            letters = ["du"[task.pipeline] for task in compute]
            cells += [x.upper() if t.kind is Kind.BACKWARD else x for x, t in zip(letters, compute)] or ["."]
        rows.append(cells)
    assert [sorted(row) for row in rows] == [sorted(row.split()) for row in picture]
    assert [[x for x in row if x != "."] for row in rows] == [row.replace(".", "").split() for row in picture]


def test_everything_survives_the_grid():
    schedule = generate("wpipe", num_stages=2, num_micro_batches=3, width=(2, 3), activation_limit=6.5)
    again = from_csv(to_csv(schedule))
    assert again == schedule
    assert again.widths == (2, 3)
    assert again.activation_limits == (6.5, 6.5)
    assert again.delays == (1, 1, 0, 0)


def test_a_schedule_that_cannot_be_executed_prints_all_the_same():
    schedule = generate("gpipe", num_stages=2, num_micro_batches=2)
    workers = (schedule.workers[0][::-1], schedule.workers[1][:1])
    broken = replace(schedule, workers=workers)
    assert from_csv(to_csv(broken)) == broken
    out_of_range = replace(schedule, workers=((Task(Kind.FORWARD, 0, 7, 99),), ()))
    assert from_csv(to_csv(out_of_range)).workers == out_of_range.workers


HEADER = "# schedule,x\n# micro-batches,1\n# update-period,1\n# pipeline,0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the line '# schedule,...' is missing"),
        ("# schedule,x\n", "the line '# micro-batches,...' is missing"),
        (
            "# schedule,x\n# micro-batches,1\n# update-period,1\n",
            "the line '# pipeline,...' or the row 'worker 0,...' is missing",
        ),
        (HEADER, "or the row 'worker 0,...' is missing"),
        (HEADER + "# colour,blue\n", "line 5: 'colour' is unknown; known are pipeline"),
        (HEADER + "worker 1,0F0\n", "line 5 begins with 'worker 1'; 'worker 0' is expected"),
        (HEADER + "worker 0,0F0,zap\n", "line 5: 'zap' is not a task"),
        (
            "# schedule,x\n# micro-batches,many\n# update-period,1\n# pipeline,0\nworker 0,0F0",
            "micro-batches has 'many'",
        ),
        ("# pipeline,0 x\n", "line 1: pipeline has 'x'; whole numbers are expected"),
        (
            HEADER + "# activation-limits,lots\nworker 0,0F0",
            "activation-limits are 'lots'; numbers of at least 0 are expected",
        ),
    ],
)
def test_grids_that_cannot_be_read(text, message):
    with pytest.raises(ScheduleTextError, match=message.replace("(", r"\(").replace("...", r"\.\.\.")):
        from_csv(text)
