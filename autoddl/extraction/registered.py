"""Finds the modules that a kind of layer registered by the user takes for one layer."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.kinds.builtin import BUILT_IN
from autoddl.costmodel.kinds.registry import kind_of, kinds

from .operators import Operator, OperatorGraph

__all__ = ["RegisteredRegion", "find_registered"]


@dataclass(frozen=True)
class RegisteredRegion:
    """The operators of a module that a registered kind takes for one layer.

    Attributes:
        path: Path of the module.
        layer: Layer that the kind returns for the module.
        operators: All operators of the module, in execution order.
        sources: Tensors from outside that the module reads: active ones or, if it reads none, raw ones.
        output: The only tensor of the module that is read outside of it.
    """

    path: str
    layer: Layer
    operators: tuple[Operator, ...]
    sources: tuple[str, ...]
    output: str


def find_registered(graph: OperatorGraph) -> list[RegisteredRegion]:
    """Return the modules that registered kinds take for layers.

    A module inside of another such module is left out.  Modules that read no data, or whose operators pass on more than one
    tensor, are not offered to the kinds.

    Raises:
        UserError: If a kind returns a layer whose input or output shape differs from the module's.
    """
    built_in = {kind.name for kind in BUILT_IN}
    registered_kinds = [kind_of(name) for name in kinds() if name not in built_in]
    regions: list[RegisteredRegion] = []
    for path, module in graph.modules.items() if registered_kinds else ():
        if any(path.startswith(f"{region.path}.") for region in regions):
            continue
        operators = tuple(op for op in graph.operators if f"{op.path}.".startswith(f"{path}."))
        sources, outputs = _sources(graph, operators), graph.results_of(operators)
        if not sources or len(outputs) != 1:
            continue
        shapes = graph.sample_shape(sources[0]), graph.sample_shape(outputs[0])
        for kind in registered_kinds:
            layer = kind.layer_of(module, *shapes)
            if layer is None:
                continue
            if (layer.input_shape, layer.output_shape) != shapes:
                raise UserError(
                    f"{path}: kind {kind.name!r} returns a layer of shape {layer.input_shape} -> {layer.output_shape}, "
                    f"the module has the shape {shapes[0]} -> {shapes[1]}"
                )
            regions.append(RegisteredRegion(path, layer, operators, sources, outputs[0]))
            break
    return regions


def _sources(graph: OperatorGraph, operators: tuple[Operator, ...]) -> tuple[str, ...]:
    """Return the active tensors that operators read and do not compute; if there are none, the raw ones."""
    computed = {tensor for op in operators for tensor in op.outputs}
    read = dict.fromkeys(tensor for op in operators for tensor in op.inputs if tensor not in computed)
    return tuple(t for t in read if graph.is_active(t)) or tuple(t for t in read if graph.is_raw(t))
