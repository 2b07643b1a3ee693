"""Executes the statements of layers (:mod:`statements`).

A layer becomes a function ``body(inputs, weights, batch) -> output``, with the weights in the order of ``parameter_layouts``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy

from . import facts
from .attending import attend
from .changed_scores import among_zeros, attend_changed, own_heads
from .comm.layouts import layout_of
from .dropouts import apply_dropout, bind_dropout, dropout_of
from .images import add_to_channels, convolve, image_data, normalise_batch, pool_windows
from .kinds.registry import layer_program, registered_functions
from .latent import attend_latent
from .load import load_oneflow
from .losses import cross_entropy, mean_error
from .norms import normalise
from .operations import (
    checkpoint,
    concat_grouped,
    concat_heads,
    data,
    elu,
    lookup,
    matmul,
    positions,
    quick_gelu,
    run_module,
    split_gate,
    summa_product,
    tanh_gelu,
)
from .replay import functions as replayed
from .replay.statements import feed_calls
from .routing import collect, dispatch, expert_products, gate_tokens, route
from .runningstats import RunningStatistics, running_statistics
from .setting import Batch, LayerSetting
from .shards import gather_weights, lean_product
from .statements import Call, Fact, Name, Size, Statement
from .stepping import Stepper

flow = load_oneflow()

__all__ = ["Body", "Feed", "build_body", "build_feed"]

Tensor = Any
Weights = Sequence[Tensor]
Body = Callable[[Sequence[Tensor], Weights, Batch], Tensor]
Variables = dict[str, Any]

#: The functions of statements, by name.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda *terms: functools.reduce(operator.add, terms),
    "multiply": operator.mul,
    **{name: getattr(replayed, name) for name in replayed.__all__},
    **{
        function.__name__: function
        for function in (
            add_to_channels,
            among_zeros,
            apply_dropout,
            attend,
            attend_changed,
            attend_latent,
            bind_dropout,
            collect,
            concat_grouped,
            concat_heads,
            convolve,
            cross_entropy,
            data,
            dispatch,
            elu,
            expert_products,
            gate_tokens,
            gather_weights,
            image_data,
            lean_product,
            lookup,
            matmul,
            mean_error,
            normalise,
            normalise_batch,
            own_heads,
            pool_windows,
            positions,
            quick_gelu,
            route,
            run_module,
            split_gate,
            summa_product,
            tanh_gelu,
        )
    },
}


#: Functions of facts that are not in :mod:`facts`, by name.
_FACTS: Mapping[str, Callable[..., Any]] = {"dropout_of": dropout_of, "running_statistics": running_statistics}


def build_body(setting: LayerSetting) -> Body:
    """Return the function that runs a layer.

    Raises:
        UserError: The layer or its module cannot be run under its strategy. The message names the layer.
    """
    layer = setting.layer
    options = setting.recompute, setting.attention, setting.is_in_block, setting.is_mirrored
    program = layer_program(setting.graph, layer, setting.strategy, *options)
    try:
        for check in program.checks:
            _read_fact(check, setting)
        compiled = [_compile(statement, setting) for statement in program.statements]
    except UserError as error:
        raise UserError(f"{layer.describe()}: {error}") from error

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        if batch.targets is None and needs_targets:
            raise UserError(f"{layer.describe()}: it needs targets; the last argument should be the targets")
        variables = {
            "ranks": setting.stepper,
            "data": batch.inputs.get(layer.name),
            "targets": batch.targets,
            **{f"argument_{i}": array for i, array in enumerate(batch.arguments)},
            "num_samples": batch.num_samples,
            "own_samples_count": max(batch.num_samples // setting.strategy.p0, 1),
            "step": batch.step,
            "training": batch.step is not None,
            **{f"input_{i}" if i else "x": x for i, x in enumerate(inputs)},
            **dict(zip(program.weights, weights)),
        }
        try:
            for execute in compiled:
                execute(variables)
        except UserError as error:
            raise UserError(f"{layer.describe()}: {error}") from error
        return variables["x"]

    needs_targets = any("targets" in _names_in(statement) for statement in program.statements)
    return body


Feed = Callable[[Sequence[np.ndarray], int, Optional[int]], np.ndarray]


def build_feed(layer: Layer, stepper: Stepper, module: Any) -> Feed:
    """Return the function that computes the data of a layer from the arguments of the model, a number of samples and the pass.

    Args:
        layer: A layer with a program of its data.
        stepper: The ranks.
        module: The user's model.
    """
    assert layer.program is not None
    calls = feed_calls(layer.program)
    layer = replace(layer, parameters=())
    graph = LayerGraph(layer.name, "row", (layer,), ())
    setting = LayerSetting(graph, layer, Strategy(((1, 1, 1),)), stepper, module, False, "dense")
    compiled = [_compile_call(call, setting) for call in calls]

    def feed(arguments: Sequence[np.ndarray], num_samples: int, step: int | None) -> np.ndarray:
        variables: Variables = {
            **{f"argument_{i}": array for i, array in enumerate(arguments)},
            **{"num_samples": num_samples, "ranks": stepper, "step": step, "training": step is not None},
        }
        with flow.no_grad():
            for execute in compiled:
                execute(variables)
        data: np.ndarray = variables["data"]
        return data

    return feed


def _compile(statement: Statement, setting: LayerSetting) -> Callable[[Variables], None]:
    """Return a function that executes a statement on a dictionary of variables."""
    if isinstance(statement, Call):
        return _compile_call(statement, setting)
    body = [_compile_call(call, setting) for call in statement.body]
    tensors = statement.tensors
    other_names = set().union(*map(_names_in, statement.body)) - set(tensors)

    def run(variables: Variables) -> None:
        # Capture only the variables that the body reads: the backward pass keeps them alive.
        captured = {name: variables[name] for name in other_names if name in variables}

        def recompute(*values: Tensor) -> Tensor:
            local_variables = {**captured, **dict(zip(tensors, values))}
            for call in body:
                call(local_variables)
            return local_variables["x"]

        variables["x"] = checkpoint(recompute, *(variables[name] for name in tensors))

    return run


def _compile_call(call: Call, setting: LayerSetting) -> Callable[[Variables], None]:
    function = _function(call.function, setting)
    arguments = _read_facts(list(call.arguments), setting)
    options = {name: _read_facts(value, setting) for name, value in call.options.items()}

    def run(variables: Variables) -> None:
        result = function(
            *(_substitute(value, variables) for value in arguments),
            **{name: _substitute(value, variables) for name, value in options.items()},
        )
        variables.update(zip(call.result, result) if len(call.result) > 1 else [(call.result[0], result)])

    return run


def _function(name: str, setting: LayerSetting) -> Callable[..., Any]:
    """Return the function that a statement names."""
    owner, _, attribute = name.rpartition(".")
    owners = {"ranks": setting.stepper, "flow": flow, "functional": flow.nn.functional, "flow._C": flow._C}
    if owner:
        return getattr(owners[owner], attribute)  # type: ignore[no-any-return]
    return _FUNCTIONS.get(name) or registered_functions()[name]


def _read_fact(fact: Fact, setting: LayerSetting) -> Any:
    function = _FACTS.get(fact.function) or getattr(facts, fact.function)
    value = function(setting.module, fact.path, *fact.arguments)
    if isinstance(value, RunningStatistics):
        setting.statistics[fact.path] = value, layout_of(setting.layer, setting.strategy)
    return value


def _read_facts(value: Any, setting: LayerSetting) -> Any:
    """Replace facts by their values, also inside lists."""
    if isinstance(value, list):
        return [_read_facts(part, setting) for part in value]
    return _read_fact(value, setting) if isinstance(value, Fact) else value


def _substitute(value: Any, variables: Variables) -> Any:
    """Replace names by the values of their variables, also inside lists."""
    if isinstance(value, Name):
        return variables[value.text]
    if isinstance(value, Size):
        return value.number.of(variables[value.samples.text])
    return [_substitute(part, variables) for part in value] if isinstance(value, list) else value


def _names_in(value: Any) -> set[str]:
    """Return the variables that a statement reads or assigns."""
    if isinstance(value, Name):
        return {value.text}
    if isinstance(value, Size):
        return {value.samples.text}
    if isinstance(value, Call):
        return _names_in([*value.arguments, *value.options.values()]) | set(value.result)
    parts = value if isinstance(value, list) else list(getattr(value, "body", ()))
    return set().union(*map(_names_in, parts)) if parts else set()
