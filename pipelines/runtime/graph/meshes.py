"""Checks that ``nn.Graph`` executes a plan at its price (:mod:`autoddl.costmodel.graph_meshes`). Needs no OneFlow."""

from __future__ import annotations

from collections.abc import Mapping

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.graph_meshes import GRAPH, GraphMesh, graph_mesh, why_not_executable
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy

__all__ = ["COLUMNS", "ROWS", "check_graph_plan", "weight_split"]

#: How the weight of a product is split over the features' axis.
COLUMNS, ROWS = "columns", "rows"


def weight_split(strategy: Strategy) -> str:
    """Return how the weight of a product is split over the features' axis, `COLUMNS` or `ROWS`; "" if there is no such axis."""
    return COLUMNS if strategy.p1 > 1 else ROWS if strategy.p2 > 1 else ""


def check_graph_plan(graph: LayerGraph, strategies: Mapping[str, Strategy]) -> dict[str, GraphMesh]:
    """Return the mesh of every layer.

    Raises:
        UserError: The graph executor cannot run the plan. The message names the layer and the reason.
    """
    refused = why_not_executable(GRAPH, graph, strategies)
    if refused:
        raise UserError(refused)
    meshes = {layer.name: graph_mesh(strategies[layer.name]) for layer in graph.layers}
    found = {name: mesh for name, mesh in meshes.items() if mesh is not None}
    _check_shared_weights(graph, strategies, found)
    return found


def _check_shared_weights(
    graph: LayerGraph, strategies: Mapping[str, Strategy], meshes: Mapping[str, GraphMesh]
) -> None:
    """Check that layers that share a weight store it in the same layout.

    Raises:
        UserError: Two layers store it differently.
    """
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.tied_to is None:
                continue
            owner = graph[parameter.tied_to]
            if meshes[owner.name] != meshes[layer.name] or _table_dim(owner, strategies) != _table_dim(
                layer, strategies
            ):
                raise UserError(
                    f"{layer.describe()}: its weight is shared with {owner.name}, which stores it differently: "
                    f"{strategies[owner.name]} and {strategies[layer.name]}"
                )


def _table_dim(layer: Layer, strategies: Mapping[str, Strategy]) -> int | None:
    """Return the dimension of the stored weight, (out, in) or (vocabulary, features), that the features' axis splits."""
    split = weight_split(strategies[layer.name])
    if not split:
        return None
    # The columns of a product are rows of the stored (out, in) matrix; those of a table are its columns.
    return int((split == ROWS) != kind_of(layer.kind).is_lookup)
