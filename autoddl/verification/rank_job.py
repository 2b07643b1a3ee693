"""What ranks do for ``autoddl verify``; imported by ranks only, since it needs OneFlow.

`run_reference` runs on one rank, with plain local tensors: that is the one device.  Its initial values, gradients and final
parameters go to a file.  `run_plan` runs on all ranks at the plan's layouts and compares with that file, every rank what it
gathers itself: copies that differ are found on the rank that has them.  `count_again` counts bytes once more.

Dropout draws at random, so its probability is set to 0 on both sides.  Adam's epsilon is not the usual 1e-8 but a tenth of the
gradients' root mean square: else entries that are zero but for rounding (a key's bias) make steps of full length, with the sign of
the rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.collectives import Step
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import GPT, MLP, VGG, Bert, Llama, LlamaBiases, initialize
from autoddl.pipelines.runtime.rank import report
from autoddl.pipelines.runtime.samples import like
from autoddl.pipelines.runtime.wire import Meter

from ..zoo.builtin import BuiltIn, Perceptron, Pictures
from ..zoo.transformers import Transformer
from .prediction import ELEMENTWISE_LOSSES
from .task import NUM_STEPS, Counted, Reference, Section, Shard, Task

__all__ = [
    "build_module",
    "count_again",
    "load_reference",
    "make_batch",
    "make_model",
    "make_optimizer",
    "relative_errors",
    "run_plan",
    "run_reference",
    "step_data",
    "under",
]

flow: Any = load_oneflow()

Arrays = dict[str, np.ndarray]
Delays = Callable[[Any], Mapping[str, int]]


# ---- Jobs --------------------------------------------------------------------------------------------------------------------


def run_reference(task: Task, delays_of: Delays | None = None, gradient_step: int = 0) -> Reference | None:
    """One device, on the first rank; the others return at once.

    Args:
        delays_of: by how many updates the values that a step computes with lag behind, by the parameter's name: step t takes those
            that t less the delay updates have made (the initial ones at first), its gradients update the newest ones.
        gradient_step: the step whose gradients are kept.
    """
    if flow.env.get_rank():
        return None
    module, examples = make_model(task)
    history = _History(module, delays_of(module) if delays_of else {})
    values: Arrays = {f"initial/{name}": _copied(tensor) for name, tensor in module.state_dict().items()}
    optimizer, losses = None, []
    for step in range(NUM_STEPS):
        data = step_data(task, examples, step)
        history.go_back(step)
        loss = _loss(module(*map(flow.tensor, data)))
        loss.backward()
        history.go_on()
        gradients = {name: _copied(p.grad) for name, p in module.named_parameters() if p.grad is not None}
        if step == gradient_step:
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
    return Reference(tuple(losses))


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


def run_plan(task: Task) -> Shard:
    """The plan, on all ranks."""
    applied, examples, values = _applied(task)
    meter = Meter() if task.counts_bytes else None
    report("tracing steps" if meter is None else "counting bytes, layer by layer")
    sections = _sections(task, applied, examples, meter)
    optimizer = make_optimizer(task, applied.parameters(), float(values["epsilon"]))
    losses: list[float] = []
    gradient_errors: dict[str, float] = {}
    step_steps: tuple[Step, ...] = ()
    step_bytes = None
    for step in range(NUM_STEPS):
        report(f"step {step + 1} of {NUM_STEPS}")
        run = functools.partial(_train_step, applied, task, step_data(task, examples, step))
        if step == 0:
            with applied.stepper.logging() as log:
                loss, traffic = (run(), None) if meter is None else meter(run)
            step_steps, step_bytes = tuple(log), traffic.payload_bytes if traffic else None
            gradient_errors = relative_errors(applied.logical_gradients(), under("gradient", values))
        else:
            loss = run()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
    finals = {name: tensor.numpy() for name, tensor in applied.state_dict().items()}
    parameter_errors = relative_errors(finals, under("final", values))
    return Shard(tuple(losses), gradient_errors, parameter_errors, sections, step_steps, step_bytes)


def count_again(task: Task) -> Counted:
    """Bytes alone, once more, on all ranks."""
    applied, examples, _ = _applied(task)
    meter = Meter()
    sections = _sections(task, applied, examples, meter)
    _, traffic = meter(functools.partial(_train_step, applied, task, step_data(task, examples, 0)))
    _forget_gradients(applied)
    return Counted(tuple(section.payload_bytes or 0 for section in sections), traffic.payload_bytes)


def _applied(task: Task) -> tuple[Any, tuple[np.ndarray, ...], Arrays]:
    """The applied module at one device's initial values, example inputs, and what one device found."""
    values = load_reference(task)
    module, examples = make_model(task)
    module.load_state_dict({name: flow.tensor(value) for name, value in under("initial", values).items()})
    return AppliedModule(module, task.graph, task.strategies, task.workload), examples, values


def load_reference(task: Task) -> Arrays:
    """What one device found, and its initial values."""
    with np.load(_file(task)) as file:
        return {name: file[name] for name in file.files}


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


# ---- Steps -------------------------------------------------------------------------------------------------------------------


def _sections(task: Task, applied: Any, examples: tuple[np.ndarray, ...], meter: Meter | None) -> tuple[Section, ...]:
    """One micro-batch, phase by phase; without a meter nothing is counted."""
    part = tuple(array[: task.workload.micro_batch] for array in step_data(task, examples, 0))
    _, sections = applied.trace(*part, measure=meter)
    _forget_gradients(applied)
    return tuple(
        Section(s.layer, s.phase, s.steps, None if s.traffic is None else s.traffic.payload_bytes) for s in sections
    )


def _forget_gradients(applied: Any) -> None:
    for parameter in applied.parameters():
        parameter.grad = None


def _train_step(applied: Any, task: Task, data: tuple[np.ndarray, ...]) -> float:
    if _ends_in_a_loss(task):
        return applied.train_step(*data)
    num, width = task.workload.num_micro_batches, task.workload.micro_batch
    total = 0.0
    for i in range(num):
        part = [array[i * width : (i + 1) * width] for array in data]
        if i < num - 1:
            with applied.no_sync():
                loss = _loss(applied(*part)) / num
        else:
            loss = _loss(applied(*part)) / num
        loss.backward()
        total += float(loss.numpy())
    return total


def _loss(output: Any) -> Any:
    """The model's own loss; of a model without one the mean square of its output."""
    return output if output.ndim == 0 else (output * output).mean()


def _ends_in_a_loss(task: Task) -> bool:
    last = task.graph.layers[-1]
    return last.kind == "loss" or bool(ELEMENTWISE_LOSSES & set(last.epilogue))


def make_optimizer(task: Task, parameters: Any, epsilon: float) -> Any:
    """The workload's."""
    trained = [p for p in parameters if p.requires_grad]
    if task.workload.optimizer == "adam":
        return flow.optim.Adam(trained, lr=1e-3, eps=epsilon)
    return flow.optim.SGD(trained, lr=0.01, momentum=0.9 if task.workload.optimizer == "momentum" else 0.0)


def _epsilon(gradients: Mapping[str, np.ndarray]) -> float:
    count = sum(value.size for value in gradients.values())
    square = sum(float(np.square(value, dtype=np.float64).sum()) for value in gradients.values())
    return 0.1 * math.sqrt(square / max(count, 1)) or 1e-8


# ---- Models and data -------------------------------------------------------------------------------------------------------


def make_model(task: Task) -> tuple[Any, tuple[np.ndarray, ...]]:
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
    if isinstance(sizes, Perceptron):
        return MLP(sizes.widths)
    if isinstance(sizes, Pictures):
        return VGG(sizes.depth, sizes.image, sizes.classes, sizes.hidden)
    common: dict[str, Any] = {"inner": sizes.mlp_width, "activation": sizes.activation, "tied": sizes.tied}
    shape = (sizes.layers, sizes.width, sizes.heads, sizes.vocabulary)
    if built_in.family == "gpt":
        return GPT(*shape, sizes.num_positions, **common)
    if built_in.family == "bert":
        return Bert(*shape, sizes.num_positions, types=sizes.types, **common)
    biases = LlamaBiases(sizes.qkv_bias, sizes.output_bias, sizes.mlp_bias)
    return Llama(*shape, kv_heads=sizes.kv_heads or None, head_dim=sizes.head_dim or None, biases=biases, **common)


def step_data(task: Task, examples: tuple[np.ndarray, ...], step: int) -> tuple[np.ndarray, ...]:
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
    if isinstance(sizes, Pictures):
        images = rng.standard_normal((num_samples, 3, sizes.image, sizes.image), dtype=np.float32)
        return images, rng.integers(sizes.classes, size=num_samples)
    first, last = (
        rng.standard_normal((num_samples, width), dtype=np.float32) for width in (sizes.widths[0], sizes.widths[-1])
    )
    return first, last


def under(prefix: str, values: Mapping[str, np.ndarray]) -> Arrays:
    """The values of one kind, by their own names."""
    return {name[len(prefix) + 1 :]: value for name, value in values.items() if name.startswith(f"{prefix}/")}


def _copied(tensor: Any) -> np.ndarray:
    return tensor.detach().numpy().copy()


def _file(task: Task) -> Path:
    return Path(task.folder) / "reference.npz"
