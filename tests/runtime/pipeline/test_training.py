"""Training on a text: the same losses whatever the schedule, after a kill too; and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.pipelines import Times, generate, simulate
from autoddl.pipelines.runtime.pipeline.problems import TextModel, TextPerceptron, shipped_text
from autoddl.pipelines.runtime.pipeline.report import combine, measured_times
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, schedule_of, train
from autoddl.training import FileProblem

JOBS = Path(__file__).with_name("pipeline_jobs.py")
TEXT = "In the beginning was the pipe, and the pipe was without bubbles, and void. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def options(text: Path, name: str = "1f1b", num_steps: int = 4, **more) -> TrainingOptions:
    schedule = schedule_of(name, more.pop("steps_per_run", num_steps), num_stages=2, num_micro_batches=2)
    problem = TextModel(text, "gpt", layers=2, width=16, heads=2, sequence=8, tied=schedule.is_synchronous)
    return TrainingOptions(problem, schedule, num_steps, micro_batch=2, **more)


# ---- Without ranks -------------------------------------------------------------------------------------------------------


def model(text: Path, family: str = "gpt", sequence: int = 10) -> TextModel:
    return TextModel(text, family, layers=1, width=8, heads=2, sequence=sequence)


def test_samples_are_places_of_the_text(text):
    draw = model(text).batches(3, seed=5)
    inputs, targets = draw(7)
    assert inputs.shape == targets.shape == (3, 10)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert all(bytes(row.astype(np.uint8)).decode() in TEXT for row in inputs)
    again, other = (draw(number)[0] for number in (7, 8))
    assert (again == inputs).all() and (other != inputs).any()


def test_masked_samples_are_places_of_the_text(text):
    """15 % of each row are asked for: 80 % of these show the mask, 10 % another byte; all other bytes are shown."""
    inputs, targets = model(text, "bert", 100).batches(400, seed=5)(7)
    asked = targets != -100
    assert (asked.sum(axis=1) == 15).all()
    shown = np.where(asked, targets, inputs)
    assert all(bytes(row.astype(np.uint8)).decode() in TEXT for row in shown)
    masked, changed = inputs[asked] == 256, (inputs[asked] != 256) & (inputs[asked] != targets[asked])
    assert masked.mean() == pytest.approx(0.8, abs=0.02) and changed.mean() == pytest.approx(0.1, abs=0.02)
    assert not (inputs[~asked] == 256).any()


def test_what_cannot_be_learned(text):
    with pytest.raises(UserError, match="has 1500 bytes; a sample takes 5001"):
        model(text, sequence=5000).check()
    with pytest.raises(UserError, match="width 8 does not divide into 3 heads"):
        TextModel(text, "gpt", layers=1, width=8, heads=3, sequence=8).check()
    with pytest.raises(UserError, match="width 12 does not divide into 4 heads of even width"):
        TextModel(text, "llama", layers=1, width=12, heads=4, sequence=8).check()
    with pytest.raises(UserError, match="widths of a perceptron are 8; give at least two"):
        TextPerceptron(text, (8,)).check()
    TextPerceptron(shipped_text(), (64, 8)).check()


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
        (["vgg:11"], "model 'vgg:11' should be gpt:, bert: or llama:LAYERSxWIDTH"),
        (["mlp:8,8", "--heads", "2"], "--heads 2 is for transformers, not for mlp:8,8"),
        (["own.py:make"], " is for built-in models; own.py:make brings its own data"),
        (
            ["gpt:2x16", "--schedule", "chimera", "--stages", "3"],
            "--stages is 3; chimera needs an even number of stages",
        ),
        (["gpt:2x16", "--micro-batches", "0"], "--micro-batches is 0; give a whole number of at least 1"),
        (["gpt:2x16", "--heads", "3"], "width 16 does not divide into 3 heads"),
        (["gpt:2x16", "--steps", "0"], "--steps is 0"),
        (["gpt:2x16", "--text", "nowhere"], "cannot be read (No such file"),
        (
            ["gpt:2x16", "--schedule", "wpipe", "--checkpoints", "c", "--steps", "15", "--every", "10"],
            "15 steps do not divide into runs of 10",
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


@pytest.mark.parametrize(("name", "is_killed"), [("chimera", False), ("wpipe", True)])
def test_a_job_goes_on_with_the_same_losses(lent_ranks, text, tmp_path, name, is_killed):
    """From its last checkpoint: one that ended, and one that was killed a step later (which takes the ranks with it)."""
    more = {"steps_per_run": 2, "steps_per_checkpoint": 2}
    told = []
    whole = train(options(text, name, **more), told.append)
    assert [step.number for step in told] == [1, 2, 3, 4]
    assert tuple(step.loss for step in told) == whole.losses

    def kill(step):
        if step.number == 3:
            raise KilledError

    kept = {**more, "checkpoints": tmp_path / "checkpoints"}
    if is_killed:
        with pytest.raises(KilledError):
            train(options(text, name, **kept), kill)
    else:
        train(options(text, name, 2, **kept))
    rest = train(options(text, name, **kept))
    assert rest.first_step == 2
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-6)


def test_the_command(lent_ranks, text, capsys):
    command = ["train", "gpt:2x16", "--text", str(text), "--sequence", "8", "--steps", "3"]
    assert main([*command, "--schedule", "chimera", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schedule"], document["num_ranks"], len(document["losses"])) == ("chimera", 2, 3)
    assert document["tokens_per_s"] > 0
    # Two processes with OneFlow, each of which takes more than 50 MiB to load.
    assert len(document["peak_memory_bytes"]) == 2 and min(document["peak_memory_bytes"]) > 50 * 2**20
    in_full = document["bytes_between_stages"]
    assert (in_full["num_steps"], in_full["saved"]) == (1, 0)
    assert main([*command, "--schedule", "gpipe", "--timeline", "--compress-boundaries"]) == 0
    printed = capsys.readouterr().out
    assert f"loss               {document['losses'][0]:.4f} to " in printed
    assert "measured: " in printed and "simulated with the mean time of each task: " in printed
    assert printed.count("worker 1 ") == 2
    sent, saved = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:bytes a step|saved)", printed))
    assert sent + saved == in_full["sent"] and sent == pytest.approx(in_full["sent"] / 2, rel=0.02)


OWN_MODEL = """
import numpy as np
import oneflow as flow
from oneflow import nn

def classes():
    x = np.random.randn(64, 6).astype(np.float32)
    y = (x[:, 0] > x[:, 1]).astype(np.int64)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), (flow.tensor(x), flow.tensor(y))

def no_chain():
    return nn.Linear(2, 2), (flow.ones(4, 2), flow.ones(4, 2))

def no_targets():
    return nn.Sequential(nn.Linear(2, 2)), flow.ones(4, 2)
"""


def mean_losses(schedule, losses):
    """The mean loss over the micro-batches of each update."""
    updates = (schedule.micro_batches_of(update) for update in range(schedule.num_updates))
    return tuple(sum(losses[number] for number in numbers) / len(numbers) for numbers in updates)


def test_other_families_and_models_of_ones_own(ranks, tmp_path):
    """All learn: the losses of the last three steps are less than those of the first three, and do not depend on the schedule."""
    (tmp_path / "own.py").write_text(OWN_MODEL)
    own = FileProblem(f"{tmp_path}/own.py:classes")
    sizes = {"layers": 1, "width": 16, "heads": 2, "sequence": 8}
    cases = [
        (problem, generate(name, num_stages=2, num_micro_batches=2, iterations=8))
        for problem, name in (
            (TextModel(shipped_text(), "bert", **sizes), "gpipe"),
            (TextModel(shipped_text(), "llama", **sizes, tied=False), "1f1b"),
            (TextPerceptron(shipped_text(), (32, 16, 16, 8)), "chimera"),
            (own, "1f1b"),
            (own, "chimera"),
        )
    ]
    options = [
        TrainingOptions(problem, schedule, schedule.num_updates, learning_rate=0.05) for problem, schedule in cases
    ]
    results = ranks(2).run(f"{JOBS}:learn", options, timeout_s=120)
    losses = [
        mean_losses(schedule, combine(schedule, reports).losses)
        for (_, schedule), reports in zip(cases, zip(*(reports for reports in results)))
    ]
    for (problem, _), of_one in zip(cases, losses):
        assert sum(of_one[-3:]) < 0.9 * sum(of_one[:3]), problem
    assert losses[-1] == pytest.approx(losses[-2], rel=1e-4)
    faulty = [FileProblem(f"{tmp_path}/own.py:{function}") for function in ("no_chain", "no_targets", "nothing")]
    (messages,) = ranks(1).run(f"{JOBS}:what_is_wrong_with", faulty, timeout_s=60)
    words = (
        "a Linear is not a chain of layers; give an nn.Sequential or a ModuleChain",
        "no_targets returns tensors of 4x2; to train",
        "there is no function 'nothing'",
    )
    assert all(word in message for word, message in zip(words, messages)) and len(messages) == 3


def test_asynchronous_schedules_want_untied_weights(lent_ranks, text, capsys):
    assert main(["train", "gpt:4x16", "--text", str(text), "--schedule", "wpipe", "--steps", "2"]) == 2
    error = capsys.readouterr().err
    assert "stages 0 and 3 share weights, which schedule wpipe updates at different times; untie them" in error
