"""The jobs that the ranks of a verification execute.  Only ranks import this module, since it imports OneFlow.

- `run_reference` trains the model with local tensors on one rank: this is the single-device reference.  It saves the initial
  values, the gradients and the final parameters in a file.
- `run_plan` executes the plan on all ranks and compares the results with this file.  Every rank compares the tensors that it holds
  itself, so that copies which differ are attributed to the rank that holds them.
- `count_again` only counts the bytes of the plan again.

**Asynchronous schedules.**  A stage with delay d computes step t with the parameters that its first max(0, t - d) updates have
produced, and its gradients update the newest parameters.  The reference does the same.  This describes an asynchronous schedule
completely, since all micro-batches of one update use the same version; how weights are stashed, and in which order the stages
compute, makes no difference to the values.

**Randomness.**  Random numbers of a traced model depend on the element and on the pass, so that the reference draws those of the
ranks.  If the graph has dropouts without names, their probability is set to 0 in the reference and in the plan.

**Adam.**  Epsilon is a tenth of the root mean square of all gradients instead of the usual 1e-8.  Some gradients are zero up to
rounding (that of a key's bias, for example).  With the usual epsilon they would cause updates of full length, with the sign of the
rounding error.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.graph import LayerGraph
from autoddl.pipelines.runtime.backend import HOST
from autoddl.pipelines.runtime.groupednorms import group_batch_norms
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import initialize
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch
from autoddl.pipelines.runtime.ranks.rank import report
from autoddl.pipelines.runtime.ranks.wire import Meter
from autoddl.pipelines.runtime.samples import like
from autoddl.pipelines.runtime.seededrandom import has_named_random, random_places, seeded_random
from autoddl.pipelines.runtime.stage.model import PlannedModel

from ..zoo.modules import build_module, make_batch
from .running import Arrays, PlanRun, loss_of, make_optimizer
from .task import ByteCounts, MeasuredSection, RankResult, ReferenceResult, VerificationTask, gradient_step, num_steps

__all__ = [
    "count_again",
    "load_reference",
    "make_model",
    "relative_errors",
    "run_plan",
    "run_reference",
    "step_data",
    "with_prefix",
]

flow: Any = load_oneflow()


# ---- Jobs --------------------------------------------------------------------------------------------------------------------


def run_reference(task: VerificationTask) -> ReferenceResult | None:
    """Train the single-device reference on rank 0 and save its results; the other ranks return None at once."""
    if flow.env.get_rank():
        return None
    module, examples = make_model(task)
    pass_samples = task.workload.micro_batch // slots_per_micro_batch(task.schedule)
    group_batch_norms(module, task.graph, task.strategies, pass_samples)
    is_random, places = task.built_in is None and module.training, random_places(task.graph)
    versions = _ParameterVersions(module, _delays(task, module))
    values: Arrays = {f"initial/{name}": _to_array(tensor) for name, tensor in module.state_dict().items()}
    optimizer, losses = None, []
    for step in range(num_steps(task.schedule)):
        data = step_data(task, examples, step)
        # Forward and backward with delayed parameters, update of the newest parameters.
        versions.load_delayed(step)
        passes = task.workload.batch // pass_samples
        numbers = range(step * passes + 1, (step + 1) * passes + 1)
        total = 0.0
        for part in _parts_of_step(task.graph, data, numbers):
            drawing = seeded_random(module, places, part.numbers) if is_random else contextlib.nullcontext()
            with drawing:
                loss = loss_of(module(*map(HOST.tensor, part.arguments))) * part.share
            loss.backward()
            total += float(loss.numpy())
        versions.load_newest()
        gradients = {name: _to_array(p.grad) for name, p in module.named_parameters() if p.grad is not None}
        if step == gradient_step(task.schedule):
            values.update({f"gradient/{name}": value for name, value in gradients.items()})
        if optimizer is None:
            values["epsilon"] = np.array(_adam_epsilon(gradients))
            optimizer = make_optimizer(task, module.parameters(), float(values["epsilon"]))
        optimizer.step()
        versions.save()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    stored = ((name, tensor) for name, tensor in module.named_parameters() if name not in task.graph.unused)
    values.update({f"final/{name}": _to_array(tensor) for name, tensor in stored})
    np.savez(_reference_file(task), **values)
    return ReferenceResult(
        losses=tuple(losses),
        gradients=tuple(with_prefix("gradient", values)),
        parameters=tuple(with_prefix("final", values)),
    )


class _StepPart(NamedTuple):
    """Samples of a step that one device computes together.

    Attributes:
        arguments: Arguments of the model.
        numbers: Numbers of the training passes that the samples belong to.
        share: Their share of the loss of the step.
    """

    arguments: Sequence[np.ndarray]
    numbers: range
    share: float


def _parts_of_step(graph: LayerGraph, data: Sequence[np.ndarray], numbers: range) -> list[_StepPart]:
    """Divide the data of a step into the samples that one device computes together.

    These are all of them if the loss is the mean of those of the samples. A traced loss may be any function of the samples of a
    pass, such as a ratio of sums, and the loss of a step is the mean of those of its passes.
    """
    program = graph.layers[-1].program
    if program is None or not program.is_loss:
        return [_StepPart(data, numbers, 1.0)]
    parts = zip(*(np.split(array, len(numbers)) for array in data))
    return [_StepPart(part, numbers[i : i + 1], 1 / len(numbers)) for i, part in enumerate(parts)]


def _delays(task: VerificationTask, module: Any) -> dict[str, int]:
    """Return the delay of each parameter in updates, by parameter name; empty if the schedule has no delays."""
    if not any(task.schedule.delays):
        return {}
    holders = PlannedModel(module, task.graph, task.stages).holders()
    return {name: task.schedule.delays[stages[0]] for name, stages in holders.items()}


class _ParameterVersions:
    """All versions of the parameters that have a delay; version t is the result of t updates."""

    def __init__(self, module: Any, delays: Mapping[str, int]) -> None:
        self._delays = {name: delay for name, delay in delays.items() if delay}
        self._parameters = {name: p for name, p in module.named_parameters() if name in self._delays}
        self._versions = {name: [p.detach().clone()] for name, p in self._parameters.items()}

    def load_delayed(self, step: int) -> None:
        """Set the parameters to the versions that a step computes with."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._versions[name][max(0, step - self._delays[name])])

    def load_newest(self) -> None:
        """Set the parameters to their newest versions."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._versions[name][-1])

    def save(self) -> None:
        """Save the parameters as a new version, after an update."""
        for name, parameter in self._parameters.items():
            self._versions[name].append(parameter.detach().clone())


def run_plan(task: VerificationTask) -> RankResult:
    """Execute the plan on all ranks, compare it with the reference, and count the bytes of the first run."""
    reference, run = _load_reference_and_plan(task)
    meter = Meter() if task.counts_bytes else None
    # One slot, layer by layer.
    report("tracing steps" if meter is None else "counting bytes, layer by layer")
    sections = _measure_sections(run, meter)
    # Whole runs of the schedule.
    total, losses = num_steps(task.schedule), list[float]()
    gradient_errors: dict[str, float] = {}
    run_steps: tuple[Step, ...] = ()
    run_bytes, boundary_bytes = None, 0
    while len(losses) < total:
        report(f"step {len(losses) + 1} of {total}")
        if losses:
            run.run()
        else:
            with run.logging() as log:
                if meter is None:
                    run.run()
                else:
                    run_bytes = meter(run.run)[1].payload_bytes
            run_steps, boundary_bytes = tuple(log), run.boundary_bytes
        for update, loss in enumerate(run.losses()):
            if len(losses) == gradient_step(task.schedule):
                gradient_errors = _errors_of_held(run.gradients(update), with_prefix("gradient", reference))
            losses.append(loss)
    parameter_errors = _errors_of_held(run.parameters(), with_prefix("final", reference))
    return RankResult(tuple(losses), gradient_errors, parameter_errors, sections, run_steps, boundary_bytes, run_bytes)


def count_again(task: VerificationTask) -> ByteCounts:
    """Count the bytes of all sections and of one run again, on all ranks."""
    _, run = _load_reference_and_plan(task)
    meter = Meter()
    sections = _measure_sections(run, meter)
    _, traffic = meter(run.run)
    return ByteCounts(tuple(section.payload_bytes or 0 for section in sections), traffic.payload_bytes)


def load_reference(task: VerificationTask) -> Arrays:
    """Return the saved values of the reference."""
    with np.load(_reference_file(task)) as file:
        return {name: file[name] for name in file.files}


def _load_reference_and_plan(task: VerificationTask) -> tuple[Arrays, PlanRun]:
    """Return the saved values of the reference, and the plan with the same initial values."""
    reference = load_reference(task)
    module, examples = make_model(task)
    initial = with_prefix("initial", reference)
    module.load_state_dict({name: HOST.tensor(value) for name, value in initial.items()})
    data = functools.partial(step_data, task, examples)
    return reference, PlanRun(task, module, data, float(reference["epsilon"]))


def _measure_sections(run: PlanRun, meter: Meter | None) -> tuple[MeasuredSection, ...]:
    return tuple(
        MeasuredSection(s.layer, s.phase, s.steps, None if s.traffic is None else s.traffic.payload_bytes)
        for s in run.trace(meter)
    )


def _errors_of_held(held: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the relative errors of the tensors that this rank holds.

    A parameter that the loss does not depend on has no gradient in the reference; zero is expected.
    """
    zeros = {name: np.zeros_like(value) for name, value in held.items()}
    errors = relative_errors(held, {**zeros, **expected})
    return {name: errors[name] for name in held}


def relative_errors(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return |actual - expected| / max(|expected|, m / 1000) for every expected tensor.

    |.| is the Euclidean norm, and m is the largest norm of all expected tensors.  The lower limit of the denominator is for
    gradients that are zero up to rounding.  The error of a tensor that is missing or not finite is infinite.
    """
    norms = {name: float(np.linalg.norm(value.astype(np.float64))) for name, value in expected.items()}
    min_norm = 1e-3 * max(norms.values(), default=0.0)
    errors = {}
    for name, value in expected.items():
        if name not in actual:
            errors[name] = math.inf
            continue
        difference = float(np.linalg.norm(actual[name].astype(np.float64) - value))
        norm = max(norms[name], min_norm)
        error = difference / norm if norm else difference
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def _adam_epsilon(gradients: Mapping[str, np.ndarray]) -> float:
    """Return a tenth of the root mean square of all gradients, or 1e-8 if all of them are zero."""
    num_elements = sum(value.size for value in gradients.values())
    sum_of_squares = sum(float(np.square(value, dtype=np.float64).sum()) for value in gradients.values())
    return 0.1 * math.sqrt(sum_of_squares / max(num_elements, 1)) or 1e-8


# ---- Models and data -------------------------------------------------------------------------------------------------------


def make_model(task: VerificationTask) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return the model and the example inputs of the user's function (none for a built-in model)."""
    if task.built_in is not None:
        return _in_type(task, initialize(build_module(task.built_in), task.seed)), ()
    from ..extraction.userfile import load_model

    flow.manual_seed(task.seed)
    module, examples = load_model(task.function, with_values=True)
    if not has_named_random(task.graph):
        for part in module.modules():
            if isinstance(part, flow.nn.Dropout):
                part.p = 0.0
    return _in_type(task, module), tuple(tensor.numpy() for tensor in examples)


def _in_type(task: VerificationTask, module: Any) -> Any:
    """Return the module in double precision if the ranks compute in it."""
    return module.double() if task.workload.precision == "float64" else module


def step_data(task: VerificationTask, examples: tuple[np.ndarray, ...], step: int) -> tuple[np.ndarray, ...]:
    """Return the inputs (and targets) of a step, which are the same on every rank."""
    rng = np.random.default_rng([task.seed, step])
    arrays: tuple[np.ndarray, ...]
    if task.built_in is not None:
        arrays = make_batch(task.built_in, task.workload.batch, rng)
    else:
        arrays = tuple(like(example, task.workload.batch, rng) for example in examples)
    if task.workload.precision != "float64":
        return arrays
    return tuple(x.astype(np.float64) if x.dtype == np.float32 else x for x in arrays)


def with_prefix(prefix: str, values: Mapping[str, np.ndarray]) -> Arrays:
    """Return the values whose names begin with ``prefix/``, by the rest of their names."""
    return {name[len(prefix) + 1 :]: value for name, value in values.items() if name.startswith(f"{prefix}/")}


def _to_array(tensor: Any) -> np.ndarray:
    return tensor.detach().numpy().copy()


def _reference_file(task: VerificationTask) -> Path:
    return Path(task.folder) / "reference.npz"
