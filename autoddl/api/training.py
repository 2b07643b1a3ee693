"""Training on ranks of this machine: a plan, or a model with a pipeline schedule."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from autoddl.costmodel.devices import check_device_type
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.precision import precision_of
from autoddl.costmodel.writing import write_document
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
from autoddl.pipelines.runtime.ranks.gpus import present_device

from .. import planfile
from ..steptrace import StepTrace
from ..training import FileProblem, check_no_text, problem_of_plan
from .files import FilePath
from .options import takes
from .results import Result

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from autoddl.pipelines.runtime.pipeline.training import TrainingStep
    from autoddl.pipelines.schedule import Schedule

    from ..text.tables import Text
    from .schedules import Timeline

__all__ = ["SEQUENCE", "Training", "train"]


#: Default number of bytes in a sample, for transformers that are trained without a plan.
SEQUENCE = 64
#: Default number of samples in a micro-batch, for models that are trained without a plan.
_MICRO_BATCH = 4
#: Seconds without progress after which a training is ended; longer than any stage computes while another one waits for it.
_STALL_TIMEOUT_S = 60.0
#: A built-in transformer: (family, number of layers, width).
_TRANSFORMER = re.compile(rf"({'|'.join(FAMILIES)}):([0-9]{{1,4}})x([0-9]{{1,5}})")
#: A built-in perceptron: (widths).
_PERCEPTRON = re.compile(r"mlp:([0-9]{1,6}(?:,[0-9]{1,6})*)")


@dataclass(frozen=True, repr=False)
class Training(Result):
    """The result of a training.

    Attributes:
        result: Losses, throughput and measurements that the ranks reported.
        options: Problem, schedule and options of the training.
        trace: Where the time of the last step went, beside where the plan's price expects it; None if it was not recorded.
    """

    result: TrainingResult
    options: TrainingOptions
    trace: StepTrace | None = None

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each step after :attr:`first_step`: the mean over the micro-batches of the step."""
        return self.result.losses

    @property
    def first_step(self) -> int:
        """Number of steps before the checkpoint from which the training resumed; 0 without a checkpoint."""
        return self.result.first_step

    @property
    def timeline(self) -> Timeline | None:
        """Measured start and end of each task in the last run of the schedule [s]; None if no step was left to run."""
        from .schedules import timeline_of

        return None if self.result.last_run is None else timeline_of(self.result.last_run.timeline)

    @property
    def document(self) -> dict[str, Any]:
        options, found = self.options, self.result
        document: dict[str, Any] = {
            "format": "autoddl-training",
            "version": 1,
            "schedule": options.schedule.name,
            "num_stages": options.schedule.num_stages,
            "num_ranks": sum(options.schedule.widths),
            "first_step": found.first_step,
            "losses": list(found.losses),
            f"{options.problem.unit}_per_s": found.units_per_s,
            "peak_memory_bytes": list(found.peak_memory_bytes),
        }
        if found.last_run is not None:
            document["device"] = found.device
            document["types"] = dict(zip(("compute", "master"), found.types))
            document["skipped_steps"] = found.last_run.num_skipped
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

        return training_text(self.options, self.result, trace=self.trace)

    def __repr__(self) -> str:
        name, first, last = self.options.schedule.name, self.first_step, self.first_step + len(self.losses)
        if not self.losses:
            return f"<Training with {name}: nothing left to do after step {first}>"
        return (
            f"<Training with {name}: steps {first + 1} to {last}, loss {self.losses[0]:.4f} to {self.losses[-1]:.4f}>"
        )


class ScheduleOptions(TypedDict, total=False):
    """Options of a model that is trained without a plan: its sizes, and its schedule.

    Attributes:
        heads: Attention heads of a transformer. Default: width / 32.
        sequence: Bytes in a sample of a transformer. Default: 64.
        untied: Whether the head of a transformer has a weight of its own, as asynchronous schedules require. Default: False.
        schedule: Family of the schedule; :func:`autoddl.schedule_families` lists them. Default: ``1f1b``.
        stages: Number of stages. Default: 2.
        micro_batches: Micro-batches per training step. Default: the number of stages.
        micro_batch: Samples in a micro-batch. Default: 4.
        width: Ranks per worker: one number for all workers, or one for each. Default: 1.
        sizes: Layers per stage; the embedding and the head count as one layer each. Default: an even division.
        recompute: Whether activations are recomputed before each backward pass. Default: False.
        num_pipelines, concatenation, policy, groups: Options of particular schedule families; see :func:`autoddl.schedule`.
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
    plan_or_model: FilePath | planfile.PlanFile,
    *,
    model: str = "",
    edited: bool = False,
    text: FilePath | None = None,
    compress_boundaries: bool = False,
    steps: int = 50,
    optimizer: str = "Adam",
    learning_rate: float = 1e-3,
    seed: int = 0,
    checkpoints: FilePath | None = None,
    every: int = 10,
    device: str | None = None,
    precision: str | None = None,
    trace: FilePath | None = None,
    quiet: bool = False,
    on_step: Callable[[TrainingStep], None] | None = None,
    **options: Unpack[ScheduleOptions],
) -> Training:
    """Train a plan, or a model with a pipeline schedule, on ranks of this machine; needs OneFlow.

    A plan, with a pipeline or without, determines the model, its stages, strategies, schedule and micro-batch.  Without a plan each
    worker of the schedule has ``width`` ranks, which share the samples of every micro-batch.

    Args:
        plan_or_model: A plan or its file; or a model to train without a plan: ``gpt:``, ``bert:`` or ``llama:LAYERSxWIDTH``,
            ``mlp:WIDTH,WIDTH,...``, or ``FILE.py:FUNCTION``, where FUNCTION returns an ``nn.Sequential`` and (inputs, targets).
        model: ``FILE.py:FUNCTION`` that returns the module of a plan, if the plan's model is not built in. The example inputs,
            (inputs, targets), are the samples to learn from. The module keeps its own initial values.
        edited: Accept a plan that was edited.
        text: Text that a built-in model learns, byte by byte. Default: AutoDDL's license.
        compress_boundaries: Send the tensors between stages in half precision if no value is lost by that.
        steps: Total number of weight updates, including those before a checkpoint.
        optimizer: Name of an optimizer in ``oneflow.optim``.
        learning_rate: Learning rate of the optimizer.
        seed: Seed of the data, and of the initial values of a built-in model.
        checkpoints: Folder of checkpoints; the training resumes from the newest intact one there.
        every: Steps between checkpoints.
        device: ``cuda`` or ``cpu``. Default: GPUs if this machine has any, one for each rank, and CPU ranks if not. CPU ranks have
            no half-precision kernels: there, mixed precision runs with float32 in place of float16 and float64 masters.
        precision: Precision of a model without a plan: ``float32``, ``mixed`` or ``bfloat16``. Default: ``float32``.
        trace: With a plan: record where the time of the last step goes on every rank, and write it to this file beside the
            predicted step, as a Chrome trace (JSON, for Perfetto).
        quiet: Show no progress bar. Otherwise there is one if stderr is a terminal.
        on_step: Called with every step (``number``, ``loss``, ``units_per_s``) as soon as its loss is known.
        options: See `ScheduleOptions`.

    Raises:
        UserError: Arguments are inconsistent, the plan is for another model, a file cannot be read, or OneFlow is not installed.
        RankError: A rank failed. The message names it; all other ranks have been ended.

    >>> import autoddl
    >>> training = autoddl.train("mlp:16,32,8", schedule="gpipe", steps=3)
    >>> len(training.losses), training.losses[-1] < training.losses[0]
    (3, True)
    """
    _check_numbers(steps, every, seed)
    steps_per_run = min(steps, every) if checkpoints else steps
    source = None if text is None else _path("text", text)
    problem: TrainingProblem
    plan: planfile.PlanFile | None = None
    if isinstance(plan_or_model, planfile.PlanFile) or os.fspath(plan_or_model).endswith(".json"):
        _refuse_given(options, "is for models; a plan says it itself")
        plan = (
            plan_or_model if isinstance(plan_or_model, planfile.PlanFile) else planfile.load_plan(plan_or_model, edited)
        )
        _refuse_given({"precision": precision}, "is for models; a plan says it itself")
        problem, schedule, micro_batch = problem_of_plan(plan, model, source, steps_per_run)
        precision = plan.workload.precision
    else:
        name = os.fspath(plan_or_model)
        unpriced = f"is for plans, {name} is a model"
        _refuse_given({"edited": edited, "model": model, "trace": trace}, unpriced)
        problem, schedule = _problem_of_model(name, source, options), _schedule_of_run(steps_per_run, options)
        micro_batch = _MICRO_BATCH if options["micro_batch"] is None else options["micro_batch"]
    sizes = options["sizes"]
    training_options = TrainingOptions(
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
        precision_of(precision or "float32").name,
        _device(device),
        traces=trace is not None,
    )
    trace_path = None if trace is None else _path("trace", trace)
    if trace_path is not None:
        write_document(trace_path, {"traceEvents": []})  # the folder may not exist: better now than after the training
    result = _train_with_bar(training_options, quiet, on_step)
    if plan is None or trace_path is None or not result.traced:
        return Training(result, training_options)
    step = StepTrace(plan, schedule, result.traced)
    write_document(trace_path, step.document())
    return Training(result, training_options, step)


def _train_with_bar(
    options: TrainingOptions, quiet: bool, on_step: Callable[[TrainingStep], None] | None
) -> TrainingResult:
    """Train on local ranks and show each step in a progress bar."""
    from tqdm import tqdm

    quiet = quiet or not sys.stderr.isatty()
    with tqdm(total=options.num_steps, desc="training", unit="step", disable=quiet, file=sys.stderr) as bar:

        def show_step(step: TrainingStep) -> None:
            bar.update(step.number - bar.n)
            bar.set_postfix_str(f"loss {step.loss:.4f}, {step.units_per_s:,.0f} {options.problem.unit}/s")
            if on_step is not None:
                on_step(step)

        def warn(text: str) -> None:
            with bar.external_write_mode(file=sys.stderr):  # writes the line above the bar
                warn_on_stderr(text)

        return train_on_ranks(options, show_step, on_warning=warn, stall_timeout_s=_STALL_TIMEOUT_S)


def _schedule_of_run(steps_per_run: int, options: ScheduleOptions) -> Schedule:
    """Return the schedule of one run for a model without a plan."""
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


def _problem_of_model(model: str, text: Path | None, options: ScheduleOptions) -> TrainingProblem:
    """Return the training problem of a model without a plan."""
    transformer, perceptron = _TRANSFORMER.fullmatch(model), _PERCEPTRON.fullmatch(model)
    heads, sequence, untied = options["heads"], options["sequence"], options["untied"]
    if transformer is None:
        _refuse_given({"heads": heads, "sequence": sequence, "untied": untied}, f"is for transformers, not for {model}")
    if ".py:" in model:
        check_no_text(text, model)
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


def _refuse_given(arguments: Mapping[str, object], why: str) -> None:
    """Raise UserError for the first argument that was given: its value is not None, False or empty."""
    for name, value in arguments.items():
        if value is not None and value is not False and value != "":
            shown = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else value
            raise UserError(f"{name}={shown} {why}")


def _device(given: str | None) -> str:
    """Return the given type of device; None: GPUs if this machine has any, and CPU ranks if not."""
    device = given or present_device()
    check_device_type(device)
    return device


def _check_numbers(steps: int, every: int, seed: int) -> None:
    for name, value in (("steps", steps), ("every", every)):
        if value < 1:
            raise UserError(f"{name} is {value}; give a whole number of at least 1")
    if seed < 0:
        raise UserError(f"seed is {seed}, should be 0 or more")


def _path(name: str, text: FilePath) -> Path:
    """Return an argument as an absolute path; raise UserError if it is not a path."""
    try:
        return Path(text).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null character, or a cycle of links
        shown = os.fspath(text)[:100]
        raise UserError(f"{name} {shown!r} is no path: {getattr(error, 'strerror', None) or error}") from None
