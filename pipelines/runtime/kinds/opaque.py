"""Opaque layers on a rank, on whole samples: the operators of a traced program, or a module of the user."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autoddl.costmodel.errors import UserError

from ..replay.statements import program_calls, weight_name
from ..statements import Call, LayerContext, LayerProgram, Name, epilogue

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a traced program or a module of the user.

    Raises:
        UserError: The layer has no program, and stands for several modules, or it has parameters of another module.
    """
    return _traced(context) if context.layer.program is not None else _module(context)


def _traced(context: LayerContext) -> LayerProgram:
    layer = context.layer
    assert layer.program is not None
    weights = tuple(weight_name(i) for i in range(len(layer.parameters)))
    inputs = ("x", *(f"input_{i}" for i in range(1, len(context.producers)))) if context.producers else ()
    body = program_calls(context, layer.program, prod(layer.output_shape[:-1]) if len(layer.output_shape) <= 2 else 1)
    body[-1] = replace(body[-1], computes=True)
    statements = context.recomputable((*inputs, *weights), [*body, *epilogue(context)])
    return LayerProgram(weights, tuple(statements))


def _module(context: LayerContext) -> LayerProgram:
    layer, graph = context.layer, context.graph
    if len(layer.modules) > 1:
        raise UserError(
            f"{layer.describe()}: its modules are {', '.join(layer.modules)}; only a single module of the model can be run"
        )
    for parameter in layer.parameters:
        if not parameter.name.startswith(f"{context.path}."):
            raise UserError(
                f"{layer.describe()}: its parameter {parameter.name} does not belong to module {context.path!r}"
            )
    names = [parameter.name[len(context.path) + 1 :] for parameter in layer.parameters]
    weights = tuple(f"weight_{i}" for i in range(len(names)))
    inputs = ("x", *(f"input_{i}" for i in range(1, len(context.producers))))
    shapes = [graph[producer].output_shape for producer in context.producers]
    shapes = [layer.input_shape] if len(shapes) <= 1 else shapes
    # Outside of sequences the single row of a sample is the sample itself.
    shapes = [shape[1:] if len(shape) == 2 and shape[0] == 1 else shape for shape in shapes]
    own = context.fact("module", "own_module", names, context.strategy.p0)
    arguments = (own, list(map(Name, inputs)), shapes, list(map(Name, weights)))
    body = [
        Call("run_module", arguments, {"training": Name("training")}, computes=True),
        *epilogue(context),
    ]
    return LayerProgram(weights, (*context.input_data(1), *context.recomputable((*inputs, *weights), body)))
