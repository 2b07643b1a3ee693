"""Training on local ranks: a plan, or a model with a schedule."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Union

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.pipeline.problems import (
    FAMILIES,
    TextModel,
    TextPerceptron,
    TrainingProblem,
    shipped_text,
)
from autoddl.pipelines.runtime.pipeline.saving import warn_on_stderr
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, TrainingResult, schedule_of
from autoddl.pipelines.runtime.pipeline.training import train as train_on_ranks

from .. import planfile
from ..training import FileProblem, problem_of_plan
from .options import takes
from .results import Result

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from autoddl.pipelines.runtime.pipeline.training import TrainingStep
    from autoddl.pipelines.schedule import Schedule

    from ..text.tables import Text
    from .schedules import Timeline

__all__ = ["SEQUENCE", "Training", "train"]

AnyPath = Union[str, "os.PathLike[str]"]

#: Bytes of a sample of a transformer that is trained without a plan.
SEQUENCE = 64
#: More than a stage's computation takes while another waits for it.
_STALL_TIMEOUT_S = 60.0
_TRANSFORMER = re.compile(rf"({'|'.join(FAMILIES)}):([0-9]{{1,4}})x([0-9]{{1,5}})")
_PERCEPTRON = re.compile(r"mlp:([0-9]{1,6}(?:,[0-9]{1,6})*)")


@dataclass(frozen=True, repr=False)
class Training(Result):
    """A training that is done.

    Attributes:
        found: what ranks reported.
        options: what was trained, and how.
    """

    found: TrainingResult
    options: TrainingOptions

    @property
    def losses(self) -> tuple[float, ...]:
        """Of each step from :attr:`first_step` on: the mean over its micro-batches."""
        return self.found.losses

    @property
    def first_step(self) -> int:
        """0, or the steps before the checkpoint that the training resumed from."""
        return self.found.first_step

    @property
    def timeline(self) -> Timeline | None:
        """When each task of the last run of the schedule ran [s]; None where nothing was left to do."""
        from .schedules import timeline_of

        return None if self.found.last_run is None else timeline_of(self.found.last_run.timeline)

    @property
    def document(self) -> dict[str, Any]:
        options, found = self.options, self.found
        document: dict[str, Any] = {
            "format": "autoddl-training",
            "version": 1,
            "schedule": options.schedule.name,
            "num_stages": options.schedule.num_stages,
            "num_ranks": sum(options.schedule.widths),
            "first_step": found.first_step,
            "losses": list(found.losses),
            f"{options.problem.unit}_per_s": found.units_per_s,
        }
        if found.last_run is not None:
            document["makespan_s"] = found.last_run.timeline.makespan
            document["peak_activations"] = list(found.last_run.peak_activations)
            document["weight_versions"] = list(found.last_run.peak_versions)
            document["bytes_between_stages"] = {
                "num_steps": options.schedule.num_updates,
                "sent": found.last_run.bytes_sent,
                "saved": found.last_run.bytes_saved,
                "uncompressed_messages": found.last_run.num_uncompressed,
            }
        return document

    @property
    def text(self) -> Text:
        from ..text.runs import training_text

        return training_text(self.options, self.found)

    def __repr__(self) -> str:
        name, first, last = self.options.schedule.name, self.first_step, self.first_step + len(self.losses)
        if not self.losses:
            return f"<Training with {name}: nothing left to do after step {first}>"
        return (
            f"<Training with {name}: steps {first + 1} to {last}, loss {self.losses[0]:.4f} to {self.losses[-1]:.4f}>"
        )


class ScheduleOptions(TypedDict, total=False):
    """Of a model without a plan: its sizes, and its schedule.

    Attributes:
        heads, sequence, untied: of a transformer: heads of attention (width / 32), bytes of a sample (64), and whether the head has
            weights of its own, which asynchronous schedules need.
        schedule: ``1f1b`` by default; :func:`autoddl.schedule_families` lists them.
        stages, micro_batches: of the schedule; 2, and as many as there are stages.
        micro_batch: samples in a micro-batch; 4 by default.
        width: ranks per worker, 1 by default; or those of each.
        sizes: layers per stage, embedding and head included; even by default.
        recompute: recompute activations before each backward.
        num_pipelines, concatenation, policy, groups: of the schedule's family.
    """

    heads: int | None
    sequence: int | None
    untied: bool
    schedule: str | None
    stages: int | None
    micro_batches: int | None
    micro_batch: int | None
    width: int | Sequence[int] | None
    sizes: Sequence[int] | None
    recompute: bool
    num_pipelines: int | None
    concatenation: str | None
    policy: str | None
    groups: int | None


@takes(ScheduleOptions, {"untied": False, "recompute": False})
def train(
    plan_or_model: AnyPath | planfile.PlanFile,
    *,
    model: str = "",
    edited: bool = False,
    text: AnyPath | None = None,
    compress_boundaries: bool = False,
    steps: int = 50,
    optimizer: str = "Adam",
    learning_rate: float = 1e-3,
    seed: int = 0,
    checkpoints: AnyPath | None = None,
    every: int = 10,
    quiet: bool = False,
    on_step: Callable[[TrainingStep], None] | None = None,
    **options: Unpack[ScheduleOptions],
) -> Training:
    """Train on CPU ranks of this machine: a plan, with a pipeline or without, or a model with a schedule; needs OneFlow.

    A plan says the model, its stages, strategies, schedule and micro-batch itself.  Without a plan each worker of the schedule is
    ``width`` ranks, which share the samples of every micro-batch.

    Args:
        plan_or_model: a plan or its file; or a model without one: ``gpt:``, ``bert:`` or ``llama:LAYERSxWIDTH``,
            ``mlp:WIDTH,WIDTH,...``, or ``FILE.py:FUNCTION``, where FUNCTION returns an ``nn.Sequential`` and (inputs, targets).
        model: of a plan, ``FILE.py:FUNCTION`` that makes its model where that is none that is built in. Its example inputs,
            (inputs, targets), are the samples to learn from; initial values are the model's own.
        edited: take a plan also if it was edited.
        text: what a built-in model learns, byte by byte; AutoDDL's license by default.
        compress_boundaries: send what goes between stages in half precision where no value is lost by that.
        steps: weight updates in all, those before a checkpoint included.
        optimizer, learning_rate: one of ``oneflow.optim``, and its rate.
        seed: of initial values of a built-in model, and of data.
        checkpoints: a folder; the training resumes from the newest whole checkpoint there.
        every: steps between checkpoints.
        quiet: no progress bar; without it there is one where stderr is a terminal.
        on_step: called with every step (``number``, ``loss``, ``units_per_s``) as soon as its loss is known.
        options: see `ScheduleOptions`.

    Raises:
        UserError: arguments do not fit each other, the plan is for another model, a file cannot be read, or OneFlow is not there.
        RankError: a rank failed; it is named, and none is left.

    >>> import autoddl
    >>> training = autoddl.train("mlp:16,32,8", schedule="gpipe", steps=3)
    >>> len(training.losses), training.losses[-1] < training.losses[0]
    (3, True)
    """
    _check_numbers(steps, every, seed)
    steps_per_run = min(steps, every) if checkpoints else steps
    source = None if text is None else _path("text", text)
    problem: TrainingProblem
    if isinstance(plan_or_model, planfile.PlanFile) or os.fspath(plan_or_model).endswith(".json"):
        _refuse(options, "is for models; a plan says it itself")
        plan = (
            plan_or_model if isinstance(plan_or_model, planfile.PlanFile) else planfile.load_plan(plan_or_model, edited)
        )
        problem, schedule, micro_batch = problem_of_plan(plan, model, source, steps_per_run)
    else:
        name = os.fspath(plan_or_model)
        _refuse({"edited": edited, "model": model}, f"is for plans, {name} is a model")
        problem, schedule = _problem(name, source, options), _schedule(steps_per_run, options)
        micro_batch = 4 if options["micro_batch"] is None else options["micro_batch"]
    sizes = options["sizes"]
    asked = TrainingOptions(
        problem,
        schedule,
        steps,
        micro_batch,
        optimizer,
        learning_rate,
        seed,
        None if sizes is None else tuple(sizes),
        compress_boundaries,
        _path("checkpoints", checkpoints) if checkpoints else None,
        every,
    )
    return Training(_run(asked, quiet, on_step), asked)


def _run(options: TrainingOptions, quiet: bool, on_step: Callable[[TrainingStep], None] | None) -> TrainingResult:
    """Train, with a line per step in the bar."""
    from tqdm import tqdm

    quiet = quiet or not sys.stderr.isatty()
    with tqdm(total=options.num_steps, desc="training", unit="step", disable=quiet, file=sys.stderr) as bar:

        def take(step: TrainingStep) -> None:
            bar.update(step.number - bar.n)
            bar.set_postfix_str(f"loss {step.loss:.4f}, {step.units_per_s:,.0f} {options.problem.unit}/s")
            if on_step is not None:
                on_step(step)

        def warn(text: str) -> None:
            with bar.external_write_mode(file=sys.stderr):  # above the bar, not in it
                warn_on_stderr(text)

        return train_on_ranks(options, take, on_warning=warn, stall_timeout_s=_STALL_TIMEOUT_S)


def _schedule(steps_per_run: int, options: ScheduleOptions) -> Schedule:
    """The schedule of one run."""
    name, width = options["schedule"], options["width"]
    stages = 2 if options["stages"] is None else options["stages"]
    micro_batches = stages if options["micro_batches"] is None else options["micro_batches"]
    widths = (width,) if isinstance(width, int) else (1,) if width is None else tuple(width)
    return schedule_of(
        "1f1b" if name is None else name,
        steps_per_run,
        num_stages=stages,
        num_micro_batches=micro_batches,
        width=widths[0] if len(widths) == 1 else widths,
        recompute=options["recompute"],
        num_pipelines=options["num_pipelines"],
        concatenation=options["concatenation"],
        policy=options["policy"],
        groups=options["groups"],
    )


def _problem(model: str, text: Path | None, options: ScheduleOptions) -> TrainingProblem:
    """What a model without a plan learns."""
    transformer, perceptron = _TRANSFORMER.fullmatch(model), _PERCEPTRON.fullmatch(model)
    heads, sequence, untied = options["heads"], options["sequence"], options["untied"]
    if transformer is None:
        _refuse({"heads": heads, "sequence": sequence, "untied": untied}, f"is for transformers, not for {model}")
    if text is not None and ".py:" in model:
        raise UserError(f"text={text} is for built-in models; {model} brings its own data")
    source = text or shipped_text()
    if transformer is not None:
        family, layers, width = transformer[1], int(transformer[2]), int(transformer[3])
        return TextModel(
            source,
            family,
            layers,
            width,
            heads=max(1, width // 32) if heads is None else heads,
            sequence=SEQUENCE if sequence is None else sequence,
            tied=family != "llama" and not untied,
        )
    if perceptron is not None:
        return TextPerceptron(source, tuple(map(int, perceptron[1].split(","))))
    if ".py:" not in model:
        raise UserError(
            f"model {model!r} should be gpt:, bert: or llama:LAYERSxWIDTH, such as gpt:6x64, mlp:WIDTH,WIDTH,... or "
            "FILE.py:FUNCTION, or a plan's file, PLAN.json"
        )
    return FileProblem(model)


def _refuse(arguments: Mapping[str, object], why: str) -> None:
    """Refuse arguments that were given."""
    for name, value in arguments.items():
        if value is not None and value is not False and value != "":
            shown = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else value
            raise UserError(f"{name}={shown} {why}")


def _check_numbers(steps: int, every: int, seed: int) -> None:
    for name, value in (("steps", steps), ("every", every)):
        if value < 1:
            raise UserError(f"{name} is {value}; give a whole number of at least 1")
    if seed < 0:
        raise UserError(f"seed is {seed}, should be 0 or more")


def _path(name: str, text: AnyPath) -> Path:
    try:
        return Path(text).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null character; links that lead in a circle
        shown = os.fspath(text)[:100]
        raise UserError(f"{name} {shown!r} is no path: {getattr(error, 'strerror', None) or error}") from None
