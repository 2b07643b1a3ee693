"""Modules that are layers of kinds from outside of the package: what their kinds make of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.kinds.builtin import BUILT_IN
from autoddl.costmodel.kinds.registry import kind_of, kinds

from .operators import Operator, OperatorGraph

__all__ = ["RegisteredRegion", "find_registered"]


@dataclass(frozen=True)
class RegisteredRegion:
    """The operators of a module that a registered kind takes for a layer.

    Attributes:
        path: of the module.
        layer: what the kind makes of it.
        operators: all of the module, in the order of execution.
        sources: the tensors that it reads and that depend on the model's inputs.
        output: the tensor that others read.
    """

    path: str
    layer: Layer
    operators: tuple[Operator, ...]
    sources: tuple[str, ...]
    output: str


def find_registered(graph: OperatorGraph) -> list[RegisteredRegion]:
    """The modules that registered kinds take for layers, outermost ones first.

    Raises:
        UserError: a kind makes a layer of a module that has not the module's shapes.
    """
    built_in = {kind.name for kind in BUILT_IN}
    own = [kind_of(name) for name in kinds() if name not in built_in]
    found: list[RegisteredRegion] = []
    for path, module in graph.modules.items() if own else ():
        if any(path.startswith(f"{region.path}.") for region in found):
            continue
        operators = tuple(op for op in graph.operators if f"{op.path}.".startswith(f"{path}."))
        sources, outputs = tuple(_entering(graph, operators)), tuple(_leaving(graph, operators))
        if not sources or len(outputs) != 1:
            continue
        shapes = graph.sample_shape(sources[0]), graph.sample_shape(outputs[0])
        for kind in own:
            layer = kind.layer_of(module, *shapes)
            if layer is None:
                continue
            if (layer.input_shape, layer.output_shape) != shapes:
                raise UserError(
                    f"{path}: kind {kind.name!r} makes a layer of {layer.input_shape} -> {layer.output_shape} of it, "
                    f"the module is {shapes[0]} -> {shapes[1]}"
                )
            found.append(RegisteredRegion(path, layer, operators, sources, outputs[0]))
            break
    return found


def _entering(graph: OperatorGraph, operators: tuple[Operator, ...]) -> list[str]:
    """The tensors from outside that other layers make; where there are none, those of the data."""
    inside = {tensor for op in operators for tensor in op.outputs}
    read = dict.fromkeys(tensor for op in operators for tensor in op.inputs if tensor not in inside)
    return [t for t in read if graph.is_active(t)] or [t for t in read if graph.is_raw(t)]


def _leaving(graph: OperatorGraph, operators: tuple[Operator, ...]) -> Iterator[str]:
    """The tensors that other operators read, or that the model returns."""
    names = {op.name for op in operators}
    for op in operators:
        for tensor in op.outputs:
            readers = graph.consumers.get(tensor, ())
            if tensor in graph.outputs or any(reader.name not in names for reader in readers):
                yield tensor
