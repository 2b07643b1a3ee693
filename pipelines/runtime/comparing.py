"""Checks that an applied module computes the same function as the user's module.

A layer graph may omit details of ``forward()``, for example that scores are divided by 3, or which half of a product is the gate.
So both modules run one forward and one backward pass on a few samples, without dropout, or with the same random numbers. Every rank
has the user's module, and compares its part of the loss (or output) and of the gradients. The ranks only exchange whether they have
found a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm, prod
from typing import Any

import numpy as np

from autoddl.costmodel.devices import GPU
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.nearest import divisors

from .backend import HOST
from .groupednorms import batch_norms_as_local
from .load import load_oneflow
from .replay.operators import RANDOM
from .seededrandom import has_named_random, random_places, seeded_random
from .stage.global_weights import GlobalWeights

flow: Any = load_oneflow()

__all__ = ["check_same_function"]

Tensor = Any
#: Largest relative differences of values and of gradients that count as equal. Differences by rounding were 1e-6 in all tested
#: models. Half precision has 11 bits (bfloat16 has 8), and errors add up over layers.
_TOLERANCES = (1e-4, 1e-3)
_TOLERANCES_OF_HALVES = (2e-2, 1e-1)


def check_same_function(
    applied: Any, weights: GlobalWeights, module: Any, batch: Sequence[Any], scale: float = 1.0
) -> None:
    """Compare an applied module with the user's module on the first samples of a batch. All ranks must call.

    The number of samples is the smallest that all layers can divide without sharing samples, if there is one. Gradients and
    training modes are restored afterwards.

    Args:
        applied: The applied module.
        weights: The weights of the applied module.
        module: The user's module.
        batch: Arguments of both modules, with all samples on every rank.
        scale: Factor that the gradients of the applied module contain.

    Raises:
        UserError: The modules differ on a rank. It is raised on every rank, and names the first difference.
    """
    stage = weights.stage
    # The graph is that of training. But statistics of batch norms depend on how samples are split, and on GPUs dropouts of layers
    # do not draw what one device draws: such models are compared in evaluation, unless they draw there, too.
    has_norms, draws = _has_batch_norms(applied.graph), _draws_in_training(applied.graph)
    if applied.training and has_norms and draws:
        return
    is_seeded = has_named_random(applied.graph) and not (
        stage.stepper.backend.device == GPU and any(layer.dropouts for layer in applied.graph.layers)
    )
    is_training = applied.training and not has_norms and (draws or is_seeded)
    # If ranks share samples in attention, its strategy fits a single number of samples.
    most = lcm(*(ready.strategy.p0 for ready in stage.layers))
    fitting = (n for n in divisors(most) if all(ready.strategy.fits(ready.layer, n) for ready in stage.layers))
    num = max(fitting, default=most)
    samples = [HOST.tensor(x[:num]) if isinstance(x, np.ndarray) else x[:num] for x in batch]
    parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    before = [(tensor, tensor.grad) for tensor in (*parameters.values(), *applied.parameters())]
    modes = module.training, applied.training
    try:
        for tensor, _ in before:
            tensor.grad = None
        module.train(is_training)
        applied.train(is_training)
        result = applied(*samples)
        result = flow.cat([part.reshape(-1) for part in result]) if isinstance(result, tuple) else result
        expected = _plain_output(module, applied.graph, samples, 1 if is_training else None)
        matching = None if expected is None else _matching_output(expected, result)
        difference = _compare(result, matching, weights, parameters, scale)
        is_different = HOST.tensor([float(difference is not None)])
        num_differing = stage.stepper.reduce(is_different, [Axis(stage.stepper.num_ranks, 1)]).numpy()[0]
    finally:
        module.train(modes[0])
        applied.train(modes[1])
        for tensor, gradient in before:
            tensor.grad = gradient
    if num_differing:
        raise UserError(
            f"the plan's graph does not compute what {type(module).__name__} does: "
            f"{difference or 'gradients differ on other ranks'} "
            "(the graph may omit details of forward(); check=False skips this comparison)"
        )


def _draws_in_training(graph: LayerGraph) -> bool:
    """Return whether a traced model draws random numbers other than for dropouts, perhaps in training alone."""
    programs = (program for layer in graph.layers for program in layer.programs)
    return any(call.kind in RANDOM - {"dropout"} for program in programs for call in program.calls)


def _has_batch_norms(graph: LayerGraph) -> bool:
    programs = (program for layer in graph.layers for program in layer.programs)
    in_programs = any(call.kind == "normalization" for program in programs for call in program.calls)
    return in_programs or any(layer.kind == "batch_norm" for layer in graph.layers)


def _plain_output(module: Any, graph: LayerGraph, samples: Sequence[Tensor], step: int | None) -> Any:
    """Return what the user's module returns; None if OneFlow cannot run it on this rank.

    Outside of the first rank, OneFlow 0.9.0 refuses recurrent modules: they mix tensors of ``cpu:0`` and of the rank's ``cpu:1``.
    """
    try:
        with batch_norms_as_local(), seeded_random(module, random_places(graph), [step]):
            return module(*samples)
    except RuntimeError as error:
        if flow.env.get_rank() and "to be on the same device" in str(error):
            return None
        raise


def _matching_output(returned: Any, result: Tensor) -> Tensor:
    """Return the tensor among the values that a module returned that has as many elements as ``result``."""
    values = _tensors_in(returned)
    for value in values:
        if value.numel() == result.numel():
            return value
    floating = [value for value in values if value.is_floating_point()]
    if sum(value.numel() for value in floating) == result.numel():
        return flow.cat([value.reshape(-1) for value in floating])
    raise UserError(
        f"the model returns no tensor with as many elements as the output {tuple(result.shape)} of the plan's graph, "
        "so the two cannot be compared (check=False skips this comparison)"
    )


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries, in order and each once."""
    if isinstance(value, flow.Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return list({id(tensor): tensor for part in parts for tensor in _tensors_in(part)}.values())


def _compare(
    result: Tensor, expected: Tensor | None, weights: GlobalWeights, parameters: Mapping[str, Tensor], scale: float
) -> str | None:
    """Run the backward passes; return a description of the first difference, or None if there is none."""
    shape, backend = tuple((result if expected is None else expected).shape), weights.stage.stepper.backend
    tolerances = _TOLERANCES_OF_HALVES if backend.compute in (flow.float16, flow.bfloat16) else _TOLERANCES
    # The backward pass of an output starts from a random linear combination of its elements.
    factors = np.random.default_rng(0).standard_normal(shape) if shape else None
    for value in (result.reshape(*shape) if shape else result, expected):
        if value is None:
            return None
        here = None if factors is None else flow.tensor(factors, dtype=value.dtype, device=value.device)
        (value if here is None else (value * here).sum()).backward()
    assert expected is not None
    actual_value, expected_value = result.detach().numpy().reshape(shape), expected.detach().numpy()
    name = "output" if shape else "loss"
    difference = float(np.abs(actual_value - expected_value).max()) / max(float(np.abs(expected_value).max()), 1e-30)
    if not difference < tolerances[0]:
        if shape:
            return f"its {name} is off by {difference:.1e}"
        return f"its {name} is {float(actual_value):.7g} in place of {float(expected_value):.7g}"
    return _compare_gradients(weights, parameters, scale, tolerances[1])


def _compare_gradients(
    weights: GlobalWeights, parameters: Mapping[str, Tensor], scale: float, tolerance: float
) -> str | None:
    """Return a description of the first gradient that differs on this rank, or None if there is none."""
    gradients = {name: tensor.grad.numpy() for name, tensor in parameters.items() if tensor.grad is not None}
    expected = [
        (stored, stored.layout.joined(gradients))
        for stored in weights.parameters.values()
        if all(name in gradients for name, _ in stored.layout.sources)
    ]
    largest = max((_root_mean_square(value) for _, value in expected), default=0.0)
    for stored, value in expected:
        if stored.tensor.grad is None:
            return f"{stored.layout.name} has no gradient"
        expected_part = stored.layout.stored(value, weights.stage.stepper.rank)
        error = _root_mean_square(stored.tensor.grad.to_local().numpy() / scale - expected_part)
        difference = error / max(_root_mean_square(expected_part), 1e-3 * largest, 1e-30)
        if not difference < tolerance:
            return f"its gradient of {stored.layout.name} is off by {difference:.1e}"
    return None


def _root_mean_square(value: np.ndarray) -> float:
    return float(np.linalg.norm(value)) / prod(value.shape) ** 0.5
