"""``autoddl train``: train a model with a pipeline schedule, on local ranks.

The exit code is 1 if a rank failed, and 2 if the last checkpoint could not be written: the result is printed all the same, since
the training is done, but what it learned is not saved.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import counted, format_values

from ._options import add_edited, add_wide, by_option, show, whole_option

if TYPE_CHECKING:
    from ..text.tables import Text

__all__ = ["add_parser", "run"]

_STALL_TIMEOUT_S = 60.0
"""More than a stage's computation takes while another waits for it."""
_FAMILY_OPTIONS = ("num_pipelines", "concatenation", "policy", "groups")
_SEQUENCE = 64
#: Options that a plan leaves no choice of, with their defaults.
_OF_A_PLAN = {
    **dict.fromkeys(("heads", "sequence", "micro_batches", "sizes", *_FAMILY_OPTIONS)),
    "untied": False,
    "recompute": False,
    "schedule": "1f1b",
    "stages": 2,
    "width": (1,),
    "micro_batch": 4,
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model with a pipeline schedule, on local ranks (needs OneFlow)",
        description="Train a built-in model on the bytes of a text, or a model of your own on its data, with any pipeline "
        "schedule: each stage on a CPU rank of its own, or on several that split the micro-batches. The exit code is 1 when a rank "
        "fails, and 2 when the last checkpoint cannot be written.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="gpt:, bert: or llama:LAYERSxWIDTH, such as gpt:6x64; mlp:WIDTH,WIDTH,...; or FILE.py:FUNCTION, where FUNCTION "
        "returns an nn.Sequential and (inputs, targets), the samples to learn from; or PLAN.json, what `autoddl plan -o` "
        "wrote: its model, stages, strategies, schedule and micro-batch",
    )
    parser.add_argument("--text", metavar="FILE", help="what a built-in model learns, byte by byte (our license)")
    parser.add_argument("--heads", type=int, help="of a transformer's attention (width / 32, at least 1)")
    parser.add_argument("--sequence", type=int, metavar="BYTES", help=f"of a transformer ({_SEQUENCE})")
    parser.add_argument(
        "--untied", action="store_true", help="a head of its own for gpt and bert, which asynchronous schedules need"
    )
    shape = parser.add_argument_group("schedule, as for `autoddl schedule`")
    shape.add_argument("--schedule", default="1f1b", metavar="NAME", help="see `autoddl schedule list` (%(default)s)")
    shape.add_argument("--stages", type=int, default=2, metavar="D", help="workers (%(default)s)")
    shape.add_argument("--micro-batches", type=int, metavar="N", help="per weight update (D)")
    shape.add_argument("--pipelines", dest="num_pipelines", type=int, metavar="2f", help="of chimera")
    shape.add_argument("--concatenation", metavar="HOW", help="of chimera: direct, doubling or halving")
    shape.add_argument("--policy", metavar="P", help="of 1f1b: A or B; of zero-bubble: H1 or H2")
    shape.add_argument("--groups", type=int, metavar="G", help="of grouped and interleaved schedules")
    shape.add_argument("--width", type=_whole_numbers, default=(1,), metavar="W", help="ranks per worker: W, or W,...")
    shape.add_argument(
        "--sizes", type=_whole_numbers, metavar="L,...", help="layers per stage, embedding and head included"
    )
    shape.add_argument("--recompute", action="store_true", help="recompute activations before each backward")
    shape.add_argument(
        "--compress-boundaries",
        action="store_true",
        help="send what goes between stages in half precision, scaled, where no value is lost by that",
    )
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=int, default=50, help="weight updates (%(default)s)")
    how.add_argument("--micro-batch", type=int, default=4, metavar="B", help="samples in a micro-batch (%(default)s)")
    how.add_argument("--optimizer", default="Adam", metavar="NAME", help="one of oneflow.optim (%(default)s)")
    how.add_argument("--learning-rate", type=float, default=1e-3, metavar="LR", help="(%(default)g)")
    how.add_argument("--seed", type=int, default=0, help="of initial values and data (%(default)s)")
    how.add_argument("--checkpoints", metavar="DIR", help="save there, and go on from the newest whole one there")
    how.add_argument("--every", type=int, default=10, metavar="STEPS", help="between checkpoints (%(default)s)")
    add_edited(parser)
    parser.add_argument("--timeline", action="store_true", help="show the last run beside its simulation")
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Train, with a line per step in the bar; print the result."""
    from tqdm import tqdm

    from autoddl.pipelines.runtime.pipeline.saving import warn_on_stderr
    from autoddl.pipelines.runtime.pipeline.training import train

    options = _options(arguments)
    quiet = arguments.quiet or not sys.stderr.isatty()
    with tqdm(total=options.num_steps, desc="training", unit="step", disable=quiet, file=sys.stderr) as bar:

        def on_step(step: Any) -> None:
            bar.update(step.number - bar.n)
            bar.set_postfix_str(f"loss {step.loss:.4f}, {step.units_per_s:,.0f} {options.problem.unit}/s")

        def warn(text: str) -> None:
            with bar.external_write_mode(file=sys.stderr):  # above the bar, not in it
                warn_on_stderr(text)

        with by_option():
            result = train(options, on_step, on_warning=warn, stall_timeout_s=_STALL_TIMEOUT_S)
    if arguments.json:
        print(_document(options, result))
    else:
        show(_text(options, result, arguments.timeline), arguments)
    if result.unsaved:
        raise UserError(
            f"the last checkpoint could not be written: {result.unsaved}; steps after step {result.last_saved} are not saved"
        )
    return 0


def _options(arguments: argparse.Namespace) -> Any:
    from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, schedule_of

    for option in ("steps", "every"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option} is {getattr(arguments, option)}; give a whole number of at least 1")
    if arguments.seed < 0:
        raise UserError(f"--seed is {arguments.seed}, should be 0 or more")
    steps_per_run = min(arguments.steps, arguments.every) if arguments.checkpoints else arguments.steps
    if arguments.model.endswith(".json"):
        problem, schedule, micro_batch = _planned(arguments, steps_per_run)
        return TrainingOptions(problem, schedule, micro_batch=micro_batch, **_common(arguments))
    problem = _problem(arguments)
    with by_option():
        schedule = schedule_of(
            arguments.schedule,
            steps_per_run,
            num_stages=arguments.stages,
            num_micro_batches=arguments.stages if arguments.micro_batches is None else arguments.micro_batches,
            width=arguments.width[0] if len(arguments.width) == 1 else arguments.width,
            recompute=arguments.recompute,
            **{name: getattr(arguments, name) for name in _FAMILY_OPTIONS},
        )
    return TrainingOptions(
        problem, schedule, micro_batch=arguments.micro_batch, sizes=arguments.sizes, **_common(arguments)
    )


def _common(arguments: argparse.Namespace) -> dict[str, Any]:
    """What does not depend on the model."""
    return {
        "num_steps": arguments.steps,
        "compress": arguments.compress_boundaries,
        "optimizer": arguments.optimizer,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
        "checkpoints": _path("--checkpoints", arguments.checkpoints) if arguments.checkpoints else None,
        "steps_per_checkpoint": arguments.every,
    }


def _path(option: str, text: str) -> Path:
    try:
        return Path(text).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null character; links that lead in a circle
        raise UserError(f"{option} {text[:100]!r} is no path: {getattr(error, 'strerror', None) or error}") from None


def _planned(arguments: argparse.Namespace, steps_per_run: int) -> tuple[Any, Any, int]:
    """The problem, the schedule and the micro-batch of a plan."""
    from autoddl.pipelines.runtime.pipeline.problems import FAMILIES, TextModel, shipped_text

    from ..planfile import load_plan
    from ..staging import schedule_of_plan, stage_plans
    from ..training import PlanProblem
    from ..zoo.builtin import recognise
    from ..zoo.transformers import Transformer

    for option, default in _OF_A_PLAN.items():
        if getattr(arguments, option) != default:
            name = {"num_pipelines": "pipelines"}.get(option, option.replace("_", "-"))
            raise UserError(f"--{name} is for models; a plan says it itself")
    plan = load_plan(arguments.model, arguments.edited)
    stages, schedule = stage_plans(plan), schedule_of_plan(plan, steps_per_run)
    built_in = recognise(plan.graph)
    if built_in is None or built_in.family not in FAMILIES or not isinstance(built_in.sizes, Transformer):
        raise UserError(f"the plan's model {plan.graph.name} is not one that learns a text: {', '.join(FAMILIES)}")
    sizes = built_in.sizes
    text = _path("--text", arguments.text) if arguments.text else shipped_text()
    data = TextModel(text, built_in.family, sizes.layers, sizes.width, sizes.heads, sizes.sequence, sizes.tied)
    return PlanProblem(data, built_in, plan.graph, stages), schedule, plan.workload.micro_batch


def _problem(arguments: argparse.Namespace) -> Any:
    """What MODEL and its options say."""
    if arguments.edited:
        raise UserError(f"--edited is for plans, {arguments.model} is a model")
    from autoddl.pipelines.runtime.pipeline.problems import FAMILIES, TextModel, TextPerceptron, shipped_text

    from ..training import FileProblem

    text = _path("--text", arguments.text) if arguments.text else shipped_text()
    transformer = re.fullmatch(rf"({'|'.join(FAMILIES)}):([0-9]{{1,4}})x([0-9]{{1,5}})", arguments.model)
    if transformer is not None:
        family, layers, width = transformer[1], int(transformer[2]), int(transformer[3])
        return TextModel(
            text,
            family,
            layers,
            width,
            heads=max(1, width // 32) if arguments.heads is None else arguments.heads,
            sequence=_SEQUENCE if arguments.sequence is None else arguments.sequence,
            tied=family != "llama" and not arguments.untied,
        )
    for option in ("heads", "sequence", "untied"):
        if getattr(arguments, option) not in (None, False):
            raise UserError(f"--{option} is for transformers, not for {arguments.model}")
    perceptron = re.fullmatch(r"mlp:([0-9]{1,6}(?:,[0-9]{1,6})*)", arguments.model)
    if perceptron is not None:
        return TextPerceptron(text, tuple(map(int, perceptron[1].split(","))))
    if ".py:" not in arguments.model:
        raise UserError(
            f"model {arguments.model!r} should be gpt:, bert: or llama:LAYERSxWIDTH, such as gpt:6x64, mlp:WIDTH,WIDTH,... or "
            "FILE.py:FUNCTION"
        )
    if arguments.text:
        raise UserError(f"--text is for built-in models; {arguments.model} brings its own data")
    return FileProblem(arguments.model)


def _text(options: Any, result: Any, timeline: bool) -> Text:
    from ..text.runs import timelines
    from ..text.tables import Text, facts

    schedule, run = options.schedule, result.last_run
    resumed = [("resumed", f"after step {result.first_step}")] if result.first_step else []
    if run is None:
        return Text(([facts(resumed), "nothing left to do"],))
    figures = [
        *resumed,
        (
            "schedule",
            f"{schedule.name}: {counted(schedule.num_stages, 'stage')} on {counted(sum(schedule.widths), 'rank')}",
        ),
        ("steps", f"{result.first_step + 1} to {result.first_step + len(result.losses)}"),
        ("loss", f"{result.losses[0]:.4f} to {result.losses[-1]:.4f}"),
        (f"{options.problem.unit} per second", f"{result.units_per_s:,.0f}"),
        ("peak activations", f"{format_values(run.peak_activations)} (micro-batches, per worker)"),
        ("weight versions", f"{format_values(run.peak_versions)} (of one stage, per worker)"),
        ("between stages", _sent(options, run)),
    ]
    return Text(([facts(figures)], *(timelines(run.timeline) if timeline else ())))


def _sent(options: Any, run: Any) -> str:
    """The bytes of a step, and what compression does to them."""
    num_steps = options.schedule.num_updates
    text = f"{run.bytes_sent / num_steps:,.0f} bytes a step"
    if not options.compress:
        return text
    full = (
        f"; {run.num_uncompressed / num_steps:,.3g} messages a step in full precision" if run.num_uncompressed else ""
    )
    return f"{text}, {run.bytes_saved / num_steps:,.0f} saved by compression{full}"


def _document(options: Any, result: Any) -> str:
    document = {
        "format": "autoddl-training",
        "version": 1,
        "schedule": options.schedule.name,
        "num_stages": options.schedule.num_stages,
        "num_ranks": sum(options.schedule.widths),
        "first_step": result.first_step,
        "losses": list(result.losses),
        f"{options.problem.unit}_per_s": result.units_per_s,
    }
    if result.last_run is not None:
        document["makespan_s"] = result.last_run.timeline.makespan
        document["peak_activations"] = list(result.last_run.peak_activations)
        document["weight_versions"] = list(result.last_run.peak_versions)
        document["bytes_between_stages"] = {
            "num_steps": options.schedule.num_updates,
            "sent": result.last_run.bytes_sent,
            "saved": result.last_run.bytes_saved,
            "uncompressed_messages": result.last_run.num_uncompressed,
        }
    return json.dumps(document, indent=1, allow_nan=False)


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(whole_option, text.split(",")))
