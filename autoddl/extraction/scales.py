"""Finds how shapes and attributes of operators depend on the number of samples, from two traces with different numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.program import Scaled

from .operators import Operator, OperatorGraph

__all__ = ["attributes_of", "with_scales"]

#: Powers of the number of samples that numbers may be multiples of: sizes, and factors of means over samples or pairs of them.
_POWERS = (1, -1, 2, -2)

#: Attributes that differ between two traces of the same model, whatever the number of samples.
_ARBITRARY = frozenset({"seed", "nd_sbp"})


def with_scales(graph: OperatorGraph, other: OperatorGraph) -> OperatorGraph:
    """Return the graph with shapes and attributes as functions of the number of samples.

    Args:
        graph: A trace.
        other: A trace of the same model with another number of samples.

    Raises:
        UserError: The traces have different operators, or a number is no multiple of the number of samples plus a constant.
    """
    batches = graph.batch, other.batch
    if len(graph.operators) != len(other.operators):
        raise UserError(
            f"the module runs {len(graph.operators)} operators with {graph.batch} samples and {len(other.operators)} with "
            f"{other.batch}; its forward pass should not depend on the number of samples"
        )
    dims: dict[str, Any] = {}
    scaled: dict[str, dict[str, Any]] = {}
    for a, b in zip((*graph.data, *graph.variables), (*other.data, *other.variables)):
        if a in graph.shapes:
            dims[a] = _scaled(graph.shapes[a], other.shapes[b], batches, a)
    for op, twin in zip(graph.operators, other.operators):
        where = f"operator {op.kind} of {op.path or 'the model'}"
        if op.kind != twin.kind:
            raise UserError(
                f"{where} is a {twin.kind} with {other.batch} samples; the forward pass should not depend on their number"
            )
        for a, b in zip(op.outputs, twin.outputs):
            dims[a] = _scaled(graph.shapes[a], other.shapes[b], batches, where)
        changed = {
            name: _scaled(value, twin.attributes[name], batches, where)
            for name, value in op.attributes.items()
            if name not in _ARBITRARY and value != twin.attributes[name]
        }
        if changed:
            scaled[op.name] = changed
    return replace(graph, dims=dims, scaled=scaled)


def _scaled(value: Any, other: Any, batches: tuple[int, int], where: str) -> Any:
    """Return the function of the number of samples that has the values of both traces."""
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other):
        return tuple(_scaled(a, b, batches, where) for a, b in zip(value, other))
    if value == other:
        return value
    if isinstance(value, (int, float)) and isinstance(other, (int, float)):
        for power in _POWERS:
            grown = value * (batches[1] / batches[0]) ** power
            if abs(grown - other) <= 1e-6 * abs(other):
                times = value / batches[0] ** power
                return Scaled(int(times) if isinstance(value, int) and times == int(times) else times, power=power)
        slope = (other - value) / (batches[1] - batches[0])
        if isinstance(value, int) and slope == int(slope):
            return Scaled(int(slope), value - int(slope) * batches[0])
    raise UserError(
        f"{where}: {value} with {batches[0]} samples and {other} with {batches[1]}; it should be the same, or grow with them"
    )


def attributes_of(graph: OperatorGraph, op: Operator) -> dict[str, Any]:
    """Return the attributes of an operator as functions of the number of samples."""
    return {**op.attributes, **graph.scaled.get(op.name, {})}
