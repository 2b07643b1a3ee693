"""What the ranks do in the tests of applied plans; run by ranks, never collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.backend import backend_of
from autoddl.pipelines.runtime.groupednorms import group_batch_norms
from autoddl.pipelines.runtime.load import load_oneflow

flow = load_oneflow()
nn = flow.nn


# ---- Models and data ---------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """What no layer kind fits."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(flow.ones(width))

    def forward(self, x: Any) -> Any:
        return flow.tanh(x) * self.weight


class Pictures(nn.Module):
    """Convolutions, pooling, something unknown, dense layers; its graph is in the test."""

    def __init__(self, classes: int, dropout: float = 0.0):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.scale = Scale(8)
        self.classifier = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, classes))

    def logits(self, x: Any) -> Any:
        return self.classifier(flow.flatten(self.scale(self.features(x)), start_dim=1))

    def forward(self, inputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(self.logits(inputs), targets)


class Classifier(Pictures):
    """The same without a loss."""

    def forward(self, inputs: Any) -> Any:
        return self.logits(inputs)


class OtherPerceptron(nn.Module):
    """The layers of a perceptron, used otherwise."""

    def forward(self, inputs: Any, targets: Any) -> Any:
        x = flow.relu(self.fc2(flow.relu(1.01 * self.fc1(inputs))))
        return nn.functional.mse_loss(self.fc3(x), targets)


def module_of(model: str, sizes: Any, seed: int = 1) -> Any:
    from autoddl.pipelines.runtime import models

    if model == "pictures":
        return models.initialize(Pictures(*sizes), seed)
    if model == "mlp":
        return models.initialize(models.MLP(sizes), seed)
    if model in ("moe", "vgg", "resnet"):
        from autoddl.zoo.builtin import BuiltIn
        from autoddl.zoo.modules import build_module

        return models.initialize(build_module(BuiltIn(model, sizes)), seed)
    common = {"inner": sizes.mlp_width, "tied": sizes.tied}
    shape = (sizes.layers, sizes.width, sizes.heads, sizes.vocabulary)
    if model == "gpt":
        module = models.GPT(*shape, sizes.num_positions, **common)
    elif model == "bert":
        module = models.Bert(*shape, sizes.num_positions, **common)
    else:
        module = models.Llama(*shape, kv_heads=sizes.kv_heads or None, **common)
    return models.initialize(module, seed)


def batch_of(model: str, sizes: Any, num_samples: int, seed: int = 7) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    if model == "mlp":
        return tuple(rng.standard_normal((num_samples, width)).astype(np.float32) for width in (sizes[0], sizes[-1]))
    if model in ("vgg", "resnet"):
        images = rng.standard_normal((num_samples, 3, sizes.image, sizes.image)).astype(np.float32)
        return images, rng.integers(0, sizes.classes, num_samples)
    if model == "pictures":
        images = rng.standard_normal((num_samples, 3, 16, 16)).astype(np.float32)
        return images, rng.integers(0, sizes[0], num_samples)
    tokens = rng.integers(0, sizes.vocabulary, (2, num_samples, sizes.sequence))
    tokens[1, 0, :3] = -100  # what the loss ignores
    return tokens[0], tokens[1]


def applied_module(
    module: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload, **options: Any
) -> Any:
    from autoddl.pipelines.runtime.applied import AppliedModule

    return AppliedModule(module, graph, strategies, workload, **options)


def in_type(workload: Workload, module: Any, data: tuple[np.ndarray, ...]) -> tuple[Any, tuple[np.ndarray, ...]]:
    """A plain module and data in double precision, if ranks compute in it."""
    if workload.precision != "float64":
        return module, data
    return module.double(), tuple(x.astype(np.float64) if x.dtype == np.float32 else x for x in data)


def on_host(data: tuple[np.ndarray, ...]) -> list[Any]:
    return [flow.tensor(x) for x in data]


def relative_errors(found: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of whole tensors, by norm; a tensor counts as a thousandth of the largest one at least (some gradients are zero, but
    for rounding: that of a key's bias)."""
    norms = {name: float(np.linalg.norm(value.astype(np.float64))) for name, value in values.items()}
    floor = 1e-3 * max(norms.values())
    return {
        name: float(np.linalg.norm(found[name].astype(np.float64) - value)) / max(norms[name], floor)
        for name, value in values.items()
    }


# ---- Jobs ----------------------------------------------------------------------------------------------------------------


def run_pass(
    model: str,
    sizes: Any,
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    counts_sections: bool = False,
    counts_pass: bool = False,
) -> dict[str, Any]:
    """One forward and backward pass, at once and traced, against the plain module in this process."""
    from autoddl.pipelines.runtime.ranks.wire import measure, measure_baseline

    module = module_of(model, sizes)
    data = batch_of(model, sizes, workload.micro_batch)
    applied = applied_module(module, graph, strategies, workload, backend=backend_of(workload.precision, "cpu"))
    module, data = in_type(workload, module, data)
    group_batch_norms(module, graph, strategies, workload.micro_batch)
    reference = module(*on_host(data))
    reference.backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters()}
    baseline = measure_baseline() if counts_sections or counts_pass else None

    def whole_pass() -> float:
        loss = applied(*data)
        loss.backward()
        return float(loss.numpy())

    with applied.stepper.logging() as steps:
        loss, traffic = measure(whole_pass, baseline) if counts_pass else (whole_pass(), None)
    found = applied.logical_gradients()
    for parameter in applied.parameters():
        parameter.grad = None
    traced_loss, sections = applied.trace(
        *data, measure=(lambda run: measure(run, baseline)) if counts_sections else None
    )
    return {
        "loss": loss,
        "traced_loss": float(traced_loss.numpy()),
        "reference": float(reference.numpy()),
        "errors": relative_errors(found, gradients),
        "traced_errors": relative_errors(applied.logical_gradients(), gradients),
        "names": [name for name, _ in applied.named_parameters()],
        "layouts": {name: (tuple(map(str, p.sbp)), tuple(p.shape)) for name, p in applied.named_parameters()},
        "messages": sum(step.messages for step in steps),
        "payload": traffic.payload_bytes if traffic else None,
        "sections": [
            {
                "layer": s.layer,
                "phase": s.phase,
                "steps": Counter(
                    (step.collective.value, step.axis.size, step.axis.stride, step.nbytes) for step in s.steps
                ),
                "messages": sum(step.messages for step in s.steps),
                "payload": s.traffic.payload_bytes if s.traffic else None,
            }
            for s in sections
        ],
    }


def optimizer_of(name: str, parameters: Any) -> Any:
    optim = flow.optim
    return {
        "sgd": lambda: optim.SGD(parameters, lr=0.05),
        "momentum": lambda: optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
        "adam": lambda: optim.Adam(parameters, lr=1e-3),
        "adamw": lambda: optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
    }[name]()


def train(
    model: str,
    sizes: Any,
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    optimizers: list[str],
    num_steps: int = 2,
) -> dict[str, dict[str, float]]:
    """For each optimizer the relative errors of losses and parameters after some steps in micro-batches.

    The gradients' norm is clipped: by OneFlow's function on the plain module, by the applied module's own on the other.
    """
    results = {}
    for name in optimizers:
        backend = backend_of(workload.precision, "cpu")
        plain, _ = in_type(workload, module_of(model, sizes), ())
        group_batch_norms(plain, graph, strategies, workload.micro_batch)
        applied = applied_module(module_of(model, sizes), graph, strategies, workload, backend=backend)
        mine, theirs = optimizer_of(name, applied.parameters()), optimizer_of(name, plain.parameters())
        errors, largest = {}, {}
        for step in range(num_steps):
            data = batch_of(model, sizes, workload.batch, seed=step)
            if data[1].dtype == np.int64:
                data[1][data[1] < 0] = 0  # means of micro-batches are the batch's where equally many count
            _, data = in_type(workload, plain, data)
            loss = applied.train_step(*data)
            reference = plain(*on_host(data))
            reference.backward()
            for key, parameter in plain.named_parameters():
                largest[key] = np.maximum(largest.get(key, 0.0), np.abs(parameter.grad.numpy()))
            norm = applied.clip_grad_norm_(0.5)
            plain_norm = float(nn.utils.clip_grad_norm_(list(plain.parameters()), 0.5).numpy())
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
            errors[f"loss {step}"] = abs(loss / float(reference.numpy()) - 1)
            errors[f"norm {step}"] = abs(norm / plain_norm - 1)
        values = {name: value.numpy() for name, value in applied.state_dict().items()}
        expected = {name: p.numpy() for name, p in plain.state_dict().items()}
        # Where a gradient is zero but for rounding (a key's bias), Adam makes a step of full length in either direction.
        for key, size in largest.items():
            values[key] = np.where(size > 1e-7, values[key], expected[key])
        errors.update(relative_errors(values, expected))
        results[name] = errors
    return results


def train_groups(
    model: str, sizes: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload, frozen: str
) -> dict[str, Any]:
    """Steps of optimizers with three groups of parameters of the user's module, one of them frozen, against one device.

    Returns:
        For each optimizer the relative errors of the parameters after three steps, and the errors that wrong groups have.
    """
    results: dict[str, Any] = {}
    for name in ("adamw", "momentum"):
        plain, _ = in_type(workload, module_of(model, sizes), ())
        module = module_of(model, sizes)
        for one in (plain, module):
            dict(one.named_parameters())[frozen].requires_grad_(False)
        backend = backend_of(workload.precision, "cpu")
        applied = applied_module(module, graph, strategies, workload, backend=backend)
        theirs = optimizer_of(name, groups_of(plain, frozen))
        mine = optimizer_of(name, applied.parameter_groups(groups_of(module, frozen)))
        for step in range(3):
            data = batch_of(model, sizes, workload.batch, seed=step)
            data[1][data[1] < 0] = 0
            applied.train_step(*data)
            applied.step(mine)
            plain(*on_host(data)).backward()
            theirs.step()
            theirs.zero_grad()
        values = {name: value.numpy() for name, value in applied.state_dict().items()}
        results[name] = relative_errors(values, {name: p.numpy() for name, p in plain.state_dict().items()})
    first, second, *_ = (name for name, _ in module.named_parameters())
    results["twice"] = message(lambda: applied.parameter_groups([{"params": [first]}, {"params": [first]}]))
    results["unknown"] = message(lambda: applied.parameter_groups([{"params": ["nothing"]}]))
    results["foreign"] = message(lambda: applied.parameter_groups([{"params": list(plain.parameters())}]))
    results["plain"] = message(lambda: applied.step(theirs))
    results["names"] = len(applied.parameter_groups([{"params": [first, second], "lr": 0.1}])[0]["params"])
    return results


def groups_of(module: Any, frozen: str) -> list[dict[str, Any]]:
    """Weights, with decay; vectors, at a higher rate; and a frozen parameter."""
    named = {name: p for name, p in module.named_parameters() if name != frozen}
    return [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
        {"params": [dict(module.named_parameters())[frozen]], "weight_decay": 0.5},
    ]


def evaluate(
    model: str, sizes: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload
) -> dict[str, float]:
    """Losses in evaluation after two training steps: of the plan, of the plain module with its state dict, of a plan that loads it,
    and of a plan without the steps."""
    backend = backend_of(workload.precision, "cpu")
    applied, loaded = (
        applied_module(module_of(model, sizes), graph, strategies, workload, backend=backend) for _ in range(2)
    )
    optimizer = optimizer_of("sgd", applied.parameters())
    plain, data = in_type(workload, module_of(model, sizes), batch_of(model, sizes, workload.batch))
    for _ in range(2):
        applied.train_step(*data)
        optimizer.step()
        optimizer.zero_grad()
    for module in (plain, applied, loaded):
        module.eval()
    before = float(loaded(*data).numpy())
    values = applied.state_dict()
    plain.load_state_dict(values)
    loaded.load_state_dict(values)
    losses = {"applied": applied(*data), "plain": plain(*on_host(data)), "loaded": loaded(*data)}
    return {"before": before, **{name: float(loss.numpy()) for name, loss in losses.items()}}


def save_and_restore(model: str, sizes: Any, plans: list[Any], directory: Path) -> list[dict[str, np.ndarray]]:
    """Train a step at the first plan and save it; a trainer of every plan restores it. Returns the running statistics of each."""
    from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
    from autoddl.pipelines.runtime.stage.model import PlannedModel

    found = []
    for number, (graph, stages, schedule, workload) in enumerate([plans[0], *plans]):
        data = batch_of(model, sizes, workload.batch)
        size = workload.micro_batch
        trainer = PipelineTrainer(
            PlannedModel(module_of(model, sizes, seed=number), graph, stages),
            schedule,
            lambda parameters: optimizer_of("sgd", parameters),
            lambda index, data=data, size=size: tuple(x[index * size : (index + 1) * size] for x in data),
            backend=backend_of(workload.precision, "cpu"),
        )
        if number:
            assert trainer.restore(directory)
        else:
            trainer.run()
            assert trainer.save(directory)
        own = {stage for _, stage in trainer._replicas}
        buffers = [trainer._stages.buffers(stage) for stage in sorted(own)]
        found.append({name: entry["value"] for of_stage in buffers for name, entry in of_stage.items()})
    return found


def move_between_plans(model: str, sizes: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> dict[str, Any]:
    """A step at one plan (graph, strategies, workload), its state_dict taken over by another one, a step there."""
    plain = module_of(model, sizes)
    initial = {name: value.numpy().copy() for name, value in plain.state_dict().items()}
    one = applied_module(plain, *first)
    before = {name: value.numpy() for name, value in one.state_dict().items()}
    two = applied_module(module_of(model, sizes, seed=99), *second)
    data = batch_of(model, sizes, first[2].batch)
    for applied in (one, two):
        if applied is two:
            two.load_state_dict(one.state_dict())
        optimizer = optimizer_of("sgd", applied.parameters())
        applied.train_step(*data)
        optimizer.step()
    optimizer = optimizer_of("sgd", plain.parameters())
    for _ in range(2):
        plain(*on_host(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = two.state_dict()
    again = module_of(model, sizes, seed=5)
    again.load_state_dict(values)  # the plain module takes it as its own
    expected = {name: p.numpy() for name, p in plain.state_dict().items()}
    return {
        "names": (list(values), list(expected)),
        "unchanged": all(np.array_equal(before[name], initial[name]) for name in initial),
        "errors": relative_errors({name: p.numpy() for name, p in again.state_dict().items()}, expected),
        "lacks": message(lambda: two.load_state_dict({k: v for k, v in values.items() if k != next(iter(values))})),
        "unknown": message(lambda: two.load_state_dict({**values, "nonsense": values[next(iter(values))]})),
        "shape": message(lambda: two.load_state_dict({**values, next(iter(values)): np.zeros((3, 3), np.float32)})),
    }


def message(action: Any) -> str:
    """The message of the UserError that is raised."""
    from autoddl.costmodel.errors import UserError

    try:
        action()
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def micro_batches(
    model: str, sizes: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload
) -> dict[str, Any]:
    """The steps of a whole training step in micro-batches, and its gradients; passes that are summed each by itself too."""
    module = module_of(model, sizes)
    data = batch_of(model, sizes, workload.batch)
    applied = applied_module(module, graph, strategies, workload, backend=backend_of(workload.precision, "cpu"))
    module, data = in_type(workload, module, data)
    group_batch_norms(module, graph, strategies, workload.micro_batch)
    reference = module(*on_host(data))
    reference.backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters()}
    with applied.stepper.logging() as steps:
        applied.train_step(*data)
    once = relative_errors(applied.logical_gradients(), gradients)
    for parameter in applied.parameters():
        parameter.grad = None
    num, width = workload.num_micro_batches, workload.micro_batch
    for i in range(num):  # a sum after every pass: more bytes, the same gradients
        loss = applied(*(x[i * width : (i + 1) * width] for x in on_host(data))) / num
        loss.backward()
    return {
        "steps": Counter((step.collective.value, step.axis.size, step.axis.stride, step.nbytes) for step in steps),
        "once": once,
        "each": relative_errors(applied.logical_gradients(), gradients),
    }


def outputs(sizes: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload) -> dict[str, Any]:
    """A model without a loss: its output on every rank, and gradients of a loss that every rank computes."""
    module = module_of("pictures", sizes)
    module.__class__ = Classifier
    images, classes = batch_of("pictures", sizes, workload.batch)
    expected = module(flow.tensor(images))
    nn.functional.cross_entropy(expected, flow.tensor(classes)).backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters()}
    applied = applied_module(module, graph, strategies, workload, check=True)
    with flow.no_grad():  # the comparison needs gradients all the same
        first = applied(images)
        quiet = applied(images)
    kept = all(np.array_equal(p.grad.numpy(), gradients[name]) for name, p in module.named_parameters())
    found = applied(images)
    nn.functional.cross_entropy(found, flow.tensor(classes)).backward()
    errors = relative_errors(applied.logical_gradients(), gradients)
    for parameter in (*applied.parameters(), *module.parameters()):
        parameter.grad = None
    module.logits(flow.tensor(images)).sum().backward()
    summed = {name: p.grad.numpy() for name, p in module.named_parameters()}
    applied.trace(images)
    return {
        "error": float(np.abs(found.numpy() - expected.numpy()).max()),
        "checked": float(np.abs(first.numpy() - expected.numpy()).max()),
        "kept": kept and module.training and applied.training,
        "no_grad": float(np.abs(quiet.numpy() - expected.numpy()).max()),
        "errors": errors,
        "traced_errors": relative_errors(applied.logical_gradients(), summed),
    }


def drop(sizes: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload) -> dict[str, Any]:
    """Dropout: its recomputed masks are those of the forward pass; outside of training there is none."""
    from dataclasses import replace

    module = module_of("pictures", sizes)
    data = batch_of("pictures", sizes, workload.batch)
    losses, gradients = [], []
    for recompute in ("none", "layers", "blocks"):
        applied = applied_module(module, graph, strategies, replace(workload, recompute=recompute))
        loss = applied(*data)
        loss.backward()
        losses.append([float(loss.numpy()), float(applied(*data).numpy())])
        gradients.append(applied.logical_gradients())
    module.eval()
    applied.eval()
    return {
        "losses": losses,
        "errors": [relative_errors(again, gradients[0]) for again in gradients[1:]],
        "eval": (float(applied(*data).numpy()), float(module(*on_host(data)).numpy())),
    }


def own_initial_values(
    sizes: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload
) -> list[np.ndarray]:
    """The state of a module that each rank initialised by itself, and this rank's own values; the first tensor."""
    module = module_of("mlp", sizes, seed=flow.env.get_rank())
    applied = applied_module(module, graph, strategies, workload)
    name = next(iter(module.state_dict()))
    return [applied.state_dict()[name].numpy(), module.state_dict()[name].numpy()]


def refusals(sizes: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload) -> dict[str, str]:
    """What is said where a plan does not fit."""
    from dataclasses import replace

    import autoddl
    from autoddl.applying import apply
    from autoddl.costmodel.cluster import load_cluster
    from autoddl.planfile import unpipelined_plan

    assert autoddl.apply is apply
    cluster = load_cluster("dgx-a100")
    plan = unpipelined_plan(graph, cluster.resized(1, flow.env.get_world_size()), workload, strategies)
    module = module_of("mlp", sizes)
    narrow = module_of("mlp", (*sizes[:-1], sizes[-1] * 2))
    deeper = module_of("mlp", (*sizes, sizes[-1]))
    data = batch_of("mlp", sizes, 6)
    biased = module_of("mlp", sizes)
    biased.fc1.bias = nn.Parameter(flow.zeros(sizes[1]))
    tied = module_of("mlp", sizes)
    tied.fc2.weight = tied.fc3.weight
    halves = {name: Strategy(((1, 1, 2),)) for name in strategies}
    unknown = replace(graph, layers=(replace(graph.layers[0], epilogue=("swirl",)), *graph.layers[1:]))
    halved = unpipelined_plan(graph, cluster.resized(1, 2), workload, halves)
    older = replace(graph, layers=(*graph.layers[:-1], replace(graph.layers[-1], flops=1.0)))
    inside = nn.Dropout(0.5)
    dropping = module_of("mlp", sizes)
    dropping.add_module("drop", inside)
    applied = apply(module, plan)
    other = module_of("mlp", sizes)
    other.__class__ = OtherPerceptron

    class InGraph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.module = applied

        def build(self, x: Any, y: Any) -> Any:
            return self.module(x, y)

    return {
        "shape": message(lambda: apply(narrow, plan)),
        "more": message(lambda: apply(deeper, plan)),
        "extra": message(lambda: apply(biased, plan)),
        "shared": message(lambda: apply(tied, plan)),
        "ranks": message(lambda: apply(module, halved)),
        "older": message(lambda: apply(module, plan, graph=older)),
        "epilogue": message(lambda: apply(module, replace(plan, graph=unknown))),
        "dropout": message(lambda: apply(dropping, plan)),
        "function": message(lambda: apply(other, plan)(*batch_of("mlp", sizes, 8))),
        "samples": message(lambda: applied(*data)),
        "arguments": message(lambda: applied(data[0])),
        "feeds": message(lambda: apply(module, plan, feeds={"fc2": 0})),
        "graph": message(lambda: InGraph()(*on_host(batch_of("mlp", sizes, 8)))),
    }
