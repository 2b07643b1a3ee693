"""Training on a text: the same losses whatever the schedule, after a kill too; and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.pipelines import Times, generate, simulate
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.pipeline.report import measured_times
from autoddl.pipelines.runtime.pipeline.training import TextBatches, TrainingOptions, schedule_of, train

TEXT = "In the beginning was the pipe, and the pipe was without bubbles, and void. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


@pytest.fixture
def oneflow() -> None:
    available = is_available()
    if not available:
        pytest.skip(available.reason)


def options(text: Path, name: str = "1f1b", num_steps: int = 6, **more) -> TrainingOptions:
    schedule = schedule_of(name, more.pop("steps_per_run", num_steps), num_stages=2, num_micro_batches=2)
    return TrainingOptions(
        text, layers=2, width=16, heads=2, sequence=8, schedule=schedule, num_steps=num_steps, micro_batch=2, **more
    )


# ---- Without ranks -------------------------------------------------------------------------------------------------------


def test_batches_are_places_of_the_text(text):
    batches = TextBatches(text, micro_batch=3, sequence=10, seed=5)
    inputs, targets = batches(7)
    assert inputs.shape == targets.shape == (3, 10)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert all(bytes(row.astype(np.uint8)).decode() in TEXT for row in inputs)
    again = TextBatches(text, micro_batch=3, sequence=10, seed=5)
    assert (again(7)[0] == inputs).all() and (again(8)[0] != inputs).any()
    with pytest.raises(UserError, match="it takes more than a sequence of 5000"):
        TextBatches(text, 1, 5000, 0)


@pytest.mark.parametrize("name", ["1f1b", "chimera", "zero-bubble"])
def test_measured_times_give_the_same_simulation(name):
    times = Times.of(
        4, forward=(1, 2, 3, 1), backward=(2, 5, 3, 4), backward_input=(1, 2, 1, 3), recompute=0, update=0.5
    )
    schedule = generate(name, num_stages=4, num_micro_batches=6)
    timeline = simulate(schedule, times)
    assert simulate(schedule, measured_times(timeline)).makespan == pytest.approx(timeline.makespan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bert:2x16"], "model 'bert:2x16' should be gpt:LAYERSxWIDTH"),
        (["gpt:2x16", "--schedule", "chimera", "--stages", "3"], "chimera needs an even number of stages"),
        (["gpt:2x16", "--heads", "3"], "width 16 does not divide into 3 heads"),
        (["gpt:2x16", "--steps", "0"], "--steps is 0"),
        (["gpt:2x16", "--text", "nowhere"], "cannot be read: No such file"),
        (
            ["gpt:2x16", "--schedule", "wpipe", "--checkpoints", "c", "--steps", "15", "--every", "10"],
            "15 steps are not made up of runs of 10",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, words, text, capsys):
    assert main(["train", "--text", str(text), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


# ---- On ranks ------------------------------------------------------------------------------------------------------------


class KilledError(Exception):
    """In the middle of a job."""


@pytest.mark.parametrize("name", ["chimera", "wpipe"])
def test_a_killed_job_goes_on_with_the_same_losses(oneflow, text, tmp_path, name):
    more = {"tied": name != "wpipe", "steps_per_run": 2, "steps_per_checkpoint": 2}
    told = []
    whole = train(options(text, name, **more), told.append, start_timeout_s=120)
    assert [step.number for step in told] == [1, 2, 3, 4, 5, 6]
    assert tuple(step.loss for step in told) == whole.losses

    def kill(step):
        if step.number == 5:
            raise KilledError

    kept = {**more, "checkpoints": tmp_path / "checkpoints"}
    with pytest.raises(KilledError):
        train(options(text, name, **kept), kill)
    rest = train(options(text, name, **kept))
    assert rest.first_step == 4
    assert rest.losses == pytest.approx(whole.losses[4:], rel=1e-6)


def test_the_command(oneflow, text, capsys):
    command = ["train", "gpt:2x16", "--text", str(text), "--sequence", "8", "--steps", "3"]
    assert main([*command, "--schedule", "chimera", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schedule"], document["num_ranks"], len(document["losses"])) == ("chimera", 2, 3)
    assert main([*command, "--schedule", "gpipe", "--timeline"]) == 0
    printed = capsys.readouterr().out
    assert f"loss               {document['losses'][0]:.4f} to {document['losses'][-1]:.4f}" in printed
    assert "measured: " in printed and "simulated with the mean time of each task: " in printed
    assert printed.count("worker 1 ") == 2


def test_asynchronous_schedules_want_untied_weights(oneflow, text, capsys):
    assert main(["train", "gpt:4x16", "--text", str(text), "--schedule", "wpipe", "--steps", "2"]) == 2
    error = capsys.readouterr().err
    assert "stages 0 and 3 share weights, which schedule wpipe updates at different times; untie them" in error
