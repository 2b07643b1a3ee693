"""Models and clusters as users name them: by name, by file, or as objects."""

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
        """The module's output."""

    def parameters(self, recurse: bool = True) -> Any:
        """The module's parameters."""


#: A name (``gpt2-xl``), sizes (``gpt:24x1024``), a ``config.json``, a saved graph, ``FILE.py:FUNCTION``; a graph; a module.
ModelLike = Union[str, "os.PathLike[str]", LayerGraph, OneFlowModule]
#: The name of a built-in cluster, a cluster file, or a cluster.
ClusterLike = Union[str, "os.PathLike[str]", Cluster]


def graph_of(
    model: ModelLike,
    inputs: Any = None,
    *,
    heads: int | None = None,
    sequence: int | None = None,
    vocabulary: int | None = None,
) -> LayerGraph:
    """The layer graph of what a user calls a model (the arguments: :func:`autoddl.plan`).

    Raises:
        UserError: nothing is known under that name, a file is malformed, an argument does not apply, a module has no inputs.
    """
    from ..zoo import resolve_model

    sizes = {"heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    if isinstance(model, (str, os.PathLike)):
        if inputs is not None:
            raise UserError(f"inputs are for modules; model {os.fspath(model)!r} has its own")
        return resolve_model(os.fspath(model), **sizes)
    for name, value in sizes.items():
        if value is not None:
            raise UserError(f"{name} {value} is for built-in transformers, not for a {type(model).__name__}")
    if isinstance(model, LayerGraph):
        if inputs is not None:
            raise UserError(f"inputs are for modules; the graph {model.name} needs none")
        return model
    return extract(model, inputs)


def cluster_of(
    cluster: ClusterLike,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    latency_s: float | None = None,
    bandwidth: float | None = None,
) -> Cluster:
    """The cluster that a user names, resized and with other links where these are given (:func:`autoddl.plan`).

    Raises:
        UserError: there is no such cluster, its file is malformed, or a number is out of range.
    """
    found = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if nodes is not None or devices_per_node is not None:
        if found.resized().links != found.links:
            raise UserError(f"{found.name} has other links than its file, so it cannot be resized; resize it first")
        found = found.resized(nodes, devices_per_node)
    return found.with_links(latency_s, bandwidth)


def extract(model: OneFlowModule | str | os.PathLike[str], inputs: Any = None, *, name: str = "") -> LayerGraph:
    """The layer graph of an unmodified OneFlow model; needs OneFlow.

    The graph is what :func:`autoddl.plan` plans for, and ``graph.save("graph.json")`` keeps it for machines without OneFlow.

    Args:
        model: a ``oneflow.nn.Module``, or ``FILE.py:FUNCTION``, where FUNCTION returns the module and its example inputs.
        inputs: of a module: its example tensors (or one), with the batch as their first dimension.
        name: of the graph; by default the class of the module.

    Raises:
        UserError: OneFlow is not there, the model cannot be traced, or a module has no inputs.

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
    """Refuse what is no module of OneFlow's; it is not imported for that: without it nobody has one."""
    oneflow: Any = sys.modules.get("oneflow")
    if oneflow is None or not isinstance(model, oneflow.nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}, should be a name, the path of a file, a layer graph or a oneflow.nn.Module"
        )
