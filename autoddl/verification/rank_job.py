"""What ranks do for ``autoddl verify``; imported by ranks only, since it needs OneFlow.

`run_reference` runs on one rank, with plain local tensors: that is the one device.  Its initial values, gradients and final
parameters go to a file.  `run_plan` runs on all ranks at the plan's layouts and compares with that file, every rank what it
gathers itself: copies that differ are found on the rank that has them.  `count_again` counts bytes once more.

One device has the schedule's delays: where that is asynchronous, the parameters of a stage with delay d take part in step t as
they were d updates before, and the gradients update the newest values.  That is all of an asynchronous schedule's semantics, since
the micro-batches of one update share their versions; how weights are stashed and in which order stages compute is not compared.

Dropout draws at random, so its probability is set to 0 on both sides.  Adam's epsilon is not the usual 1e-8 but a tenth of the
gradients' root mean square: else entries that are zero but for rounding (a key's bias) make steps of full length, with the sign of
the rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import GPT, MLP, VGG, Bert, Llama, LlamaBiases, initialize
from autoddl.pipelines.runtime.rank import report
from autoddl.pipelines.runtime.samples import like
from autoddl.pipelines.runtime.stage.model import PlannedModel
from autoddl.pipelines.runtime.wire import Meter

from ..zoo.builtin import BuiltIn, MLPSizes, VGGSizes
from ..zoo.transformers import Transformer
from .running import Arrays, PlanRun, loss_of, make_optimizer, start_run
from .task import Counted, MeasuredSection, Reference, Shard, VerificationTask, gradient_step, num_steps

__all__ = ["build_module", "count_again", "make_batch", "relative_errors", "run_plan", "run_reference"]

flow: Any = load_oneflow()


# ---- Jobs --------------------------------------------------------------------------------------------------------------------


def run_reference(task: VerificationTask) -> Reference | None:
    """One device, on the first rank; the others return at once."""
    if flow.env.get_rank():
        return None
    module, examples = make_model(task)
    history = _History(module, _delays(task, module))
    values: Arrays = {f"initial/{name}": _copied(tensor) for name, tensor in module.state_dict().items()}
    optimizer, losses = None, []
    for step in range(num_steps(task.schedule)):
        data = step_data(task, examples, step)
        history.go_back(step)
        loss = loss_of(module(*map(flow.tensor, data)))
        loss.backward()
        history.go_on()
        gradients = {name: _copied(p.grad) for name, p in module.named_parameters() if p.grad is not None}
        if step == gradient_step(task.schedule):
            values.update({f"gradient/{name}": value for name, value in gradients.items()})
        if optimizer is None:
            values["epsilon"] = np.array(_epsilon(gradients))
            optimizer = make_optimizer(task, module.parameters(), float(values["epsilon"]))
        optimizer.step()
        history.add()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.numpy()))
    values.update({f"final/{name}": _copied(tensor) for name, tensor in module.named_parameters()})
    np.savez(_file(task), **values)
    return Reference(tuple(losses), tuple(_under("gradient", values)), tuple(_under("final", values)))


def _delays(task: VerificationTask, module: Any) -> dict[str, int]:
    """By how many updates the values that a step computes with lag behind, by the parameter's name: step t takes those that t less
    the delay updates have made (the initial ones at first)."""
    if not any(task.schedule.delays):
        return {}
    holders = PlannedModel(module, task.graph, task.stages).holders()
    return {name: task.schedule.delays[stages[0]] for name, stages in holders.items()}


class _History:
    """The values that each update has made of the parameters that are read with a delay."""

    def __init__(self, module: Any, delays: Mapping[str, int]) -> None:
        self._delays = {name: delay for name, delay in delays.items() if delay}
        self._parameters = {name: p for name, p in module.named_parameters() if name in self._delays}
        self._versions = {name: [p.detach().clone()] for name, p in self._parameters.items()}

    def go_back(self, step: int) -> None:
        """To what a step computes with."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._versions[name][max(0, step - self._delays[name])])

    def go_on(self) -> None:
        """To the newest values."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._versions[name][-1])

    def add(self) -> None:
        """An update has been made."""
        for name, parameter in self._parameters.items():
            self._versions[name].append(parameter.detach().clone())


def run_plan(task: VerificationTask) -> Shard:
    """The plan, on all ranks; the bytes of the first run are counted."""
    values, run = _started(task)
    meter = Meter() if task.counts_bytes else None
    report("tracing steps" if meter is None else "counting bytes, layer by layer")
    sections = _sections(run, meter)
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
                gradient_errors = _errors(run.gradients(update), _under("gradient", values))
            losses.append(loss)
    parameter_errors = _errors(run.parameters(), _under("final", values))
    return Shard(tuple(losses), gradient_errors, parameter_errors, sections, run_steps, boundary_bytes, run_bytes)


def count_again(task: VerificationTask) -> Counted:
    """Bytes alone, once more, on all ranks."""
    _, run = _started(task)
    meter = Meter()
    sections = _sections(run, meter)
    _, traffic = meter(run.run)
    return Counted(tuple(section.payload_bytes or 0 for section in sections), traffic.payload_bytes)


def _started(task: VerificationTask) -> tuple[Arrays, PlanRun]:
    """What one device found, and the plan at its initial values."""
    with np.load(_file(task)) as file:
        values = {name: file[name] for name in file.files}
    module, examples = make_model(task)
    module.load_state_dict({name: flow.tensor(value) for name, value in _under("initial", values).items()})
    return values, start_run(task, module, functools.partial(step_data, task, examples), float(values["epsilon"]))


def _sections(run: PlanRun, meter: Meter | None) -> tuple[MeasuredSection, ...]:
    return tuple(
        MeasuredSection(s.layer, s.phase, s.steps, None if s.traffic is None else s.traffic.payload_bytes)
        for s in run.trace(meter)
    )


def _errors(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of the tensors that a rank holds; parameters that nothing reaches have a gradient of zero."""
    zeros = {name: np.zeros_like(value) for name, value in found.items()}
    errors = relative_errors(found, {**zeros, **expected})
    return {name: errors[name] for name in found}


def relative_errors(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """|found - expected| / |expected| of every tensor, in the Euclidean norm; infinite where one is missing or not finite.

    A norm counts as a thousandth of the largest one at least: some gradients are zero but for rounding.
    """
    norms = {name: float(np.linalg.norm(value.astype(np.float64))) for name, value in expected.items()}
    floor = 1e-3 * max(norms.values(), default=0.0)
    errors = {}
    for name, value in expected.items():
        if name not in found:
            errors[name] = math.inf
            continue
        difference = float(np.linalg.norm(found[name].astype(np.float64) - value))
        scale = max(norms[name], floor)
        error = difference / scale if scale else difference
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def _epsilon(gradients: Mapping[str, np.ndarray]) -> float:
    count = sum(value.size for value in gradients.values())
    square = sum(float(np.square(value, dtype=np.float64).sum()) for value in gradients.values())
    return 0.1 * math.sqrt(square / max(count, 1)) or 1e-8


# ---- Models and data -------------------------------------------------------------------------------------------------------


def make_model(task: VerificationTask) -> tuple[Any, tuple[np.ndarray, ...]]:
    """The module, and the example inputs that a user's function gave."""
    if task.built_in is not None:
        return initialize(build_module(task.built_in), task.seed), ()
    from ..extraction.userfile import load_model

    flow.manual_seed(task.seed)
    module, examples = load_model(task.function, with_values=True)
    for part in module.modules():
        if isinstance(part, flow.nn.Dropout):
            part.p = 0.0
    return module, tuple(tensor.numpy() for tensor in examples)


def build_module(built_in: BuiltIn) -> Any:
    """The OneFlow module of a built-in model."""
    sizes = built_in.sizes
    if isinstance(sizes, MLPSizes):
        return MLP(sizes.widths)
    if isinstance(sizes, VGGSizes):
        return VGG(sizes.depth, sizes.image, sizes.classes, sizes.hidden)
    common: dict[str, Any] = {"inner": sizes.mlp_width, "activation": sizes.activation, "tied": sizes.tied}
    shape = (sizes.layers, sizes.width, sizes.heads, sizes.vocabulary)
    if built_in.family == "gpt":
        return GPT(*shape, sizes.num_positions, **common)
    if built_in.family == "bert":
        return Bert(*shape, sizes.num_positions, types=sizes.types, **common)
    biases = LlamaBiases(sizes.qkv_bias, sizes.output_bias, sizes.mlp_bias)
    return Llama(*shape, kv_heads=sizes.kv_heads or None, head_dim=sizes.head_dim or None, biases=biases, **common)


def step_data(task: VerificationTask, examples: tuple[np.ndarray, ...], step: int) -> tuple[np.ndarray, ...]:
    """The data of a step, the same on every rank."""
    rng = np.random.default_rng([task.seed, step])
    if task.built_in is not None:
        return make_batch(task.built_in, task.workload.batch, rng)
    return tuple(like(example, task.workload.batch, rng) for example in examples)


def make_batch(built_in: BuiltIn, num_samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and targets."""
    sizes = built_in.sizes
    if isinstance(sizes, Transformer):
        tokens = rng.integers(sizes.vocabulary, size=(2, num_samples, sizes.sequence))
        return tokens[0], tokens[1]
    if isinstance(sizes, VGGSizes):
        images = rng.standard_normal((num_samples, 3, sizes.image, sizes.image), dtype=np.float32)
        return images, rng.integers(sizes.classes, size=num_samples)
    first, last = (
        rng.standard_normal((num_samples, width), dtype=np.float32) for width in (sizes.widths[0], sizes.widths[-1])
    )
    return first, last


def _under(prefix: str, values: Mapping[str, np.ndarray]) -> Arrays:
    """The values of one kind, by their own names."""
    return {name[len(prefix) + 1 :]: value for name, value in values.items() if name.startswith(f"{prefix}/")}


def _copied(tensor: Any) -> np.ndarray:
    return tensor.detach().numpy().copy()


def _file(task: VerificationTask) -> Path:
    return Path(task.folder) / "reference.npz"
