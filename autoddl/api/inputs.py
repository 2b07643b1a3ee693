"""Resolves models and clusters that users give as a name, as a file or as an object."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol, Union

from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

__all__ = ["ClusterLike", "ModelLike", "OneFlowModule", "cluster_of", "extract", "graph_of"]


class OneFlowModule(Protocol):
    """A ``oneflow.nn.Module``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the module."""

    def parameters(self, recurse: bool = True) -> Any:
        """Return the parameters of the module."""


#: A name (``gpt2-xl``), sizes (``gpt:24x1024``), a ``config.json``, a saved graph, ``FILE.py:FUNCTION``, a graph or a module.
ModelLike = Union[str, "os.PathLike[str]", LayerGraph, OneFlowModule]
#: The name of a built-in cluster, a cluster file or a :class:`Cluster`.
ClusterLike = Union[str, "os.PathLike[str]", Cluster]


def graph_of(
    model: ModelLike,
    inputs: Any = None,
    *,
    heads: int | None = None,
    sequence: int | None = None,
    vocabulary: int | None = None,
    dropout: bool = False,
    capacity_factor: float | None = None,
    batch_norm: str | None = None,
) -> LayerGraph:
    """Return the layer graph of a model (see :func:`autoddl.plan` for the arguments).

    Raises:
        UserError: If the name is unknown, a file is malformed, an argument does not apply to this model, or the inputs of a module
            are missing.
    """
    from ..zoo import resolve_model, with_batch_norms

    sizes = {"heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    if isinstance(model, (str, os.PathLike)):
        if inputs is not None:
            raise UserError(f"inputs are for modules; model {os.fspath(model)!r} has its own")
        words = {"capacity_factor": capacity_factor, "batch_norm": batch_norm}
        return resolve_model(os.fspath(model), **sizes, dropout=dropout, **words)  # type: ignore[arg-type]
    for size, value in {**sizes, "capacity_factor": capacity_factor}.items():
        if value is not None:
            raise UserError(f"{size} {value} is for built-in transformers, not for a {type(model).__name__}")
    if dropout:
        raise UserError(f"dropout is for built-in transformers, not for a {type(model).__name__}")
    if isinstance(model, LayerGraph):
        if inputs is not None:
            raise UserError(f"inputs are for modules; the graph {model.name} needs none")
        return model if batch_norm is None else with_batch_norms(model, batch_norm)
    graph = extract(model, inputs)
    return graph if batch_norm is None else with_batch_norms(graph, batch_norm)


def cluster_of(
    cluster: ClusterLike,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    latency_s: float | None = None,
    bandwidth: float | None = None,
) -> Cluster:
    """Return a cluster, with the given size and links (see :func:`autoddl.plan` for the arguments).

    Raises:
        UserError: If the cluster is unknown, its file is malformed, or a number is out of range.
    """
    resolved = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if nodes is not None or devices_per_node is not None:
        if resolved.resized().links != resolved.links:
            raise UserError(
                f"the links of {resolved.name} were changed, so the cluster cannot be resized; resize it before changing its links"
            )
        resolved = resolved.resized(nodes, devices_per_node)
    return resolved.with_links(latency_s, bandwidth)


def extract(model: OneFlowModule | str | os.PathLike[str], inputs: Any = None, *, name: str = "") -> LayerGraph:
    """Extract the layer graph of an unmodified OneFlow model.  Requires OneFlow.

    :func:`autoddl.plan` accepts the graph as a model.  ``graph.save("graph.json")`` saves the graph, so that machines without
    OneFlow can plan it.

    Args:
        model: A ``oneflow.nn.Module``, or ``FILE.py:FUNCTION``, where FUNCTION returns a module and its example inputs.
        inputs: Example inputs of a module: a tensor or a sequence of tensors, with the batch as the first dimension.
        name: Name of the graph; by default the class name of the module.

    Raises:
        UserError: If OneFlow is not installed, the model cannot be traced, or the inputs of a module are missing.

    >>> import autoddl
    >>> autoddl.extract("gpt2-xl")
    Traceback (most recent call last):
        ...
    autoddl.costmodel.errors.UserError: 'gpt2-xl' should be FILE.py:FUNCTION
    """
    from ..extraction import extract, extract_from_file

    if isinstance(model, (str, os.PathLike)):
        return extract_from_file(os.fspath(model))
    _check_module(model)
    if inputs is None:
        raise UserError(
            f"{type(model).__name__} needs inputs: example tensors, with the batch as their first dimension"
        )
    examples: Sequence[Any] = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    return extract(model, examples, name=name)


def _check_module(model: object) -> None:
    """Check that ``model`` is a ``oneflow.nn.Module``, without importing OneFlow: whoever has a module has imported it."""
    oneflow: Any = sys.modules.get("oneflow")
    if oneflow is None or not isinstance(model, oneflow.nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}, should be a name, the path of a file, a layer graph or a oneflow.nn.Module"
        )
