"""The built-in models and clusters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoddl.costmodel.cluster import Cluster, load_cluster, preset_names
from autoddl.costmodel.graph import LayerGraph

from ..zoo import FORMS, known_models, resolve_model

__all__ = ["BuiltInModel", "clusters", "clusters_document", "models", "models_document"]


@dataclass(frozen=True)
class BuiltInModel:
    """A built-in model.

    Attributes:
        name: The name of the model, as :func:`autoddl.plan` accepts it.
    """

    name: str

    @cached_property
    def graph(self) -> LayerGraph:
        """The layer graph of the model."""
        return resolve_model(self.name)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters, with the vocabulary padded as in the layer graph."""
        return self.graph.num_parameters

    def record(self) -> dict[str, Any]:
        """Return the entry of the model in ``autoddl models --json``; ``flops`` counts the forward pass of one sample.

        >>> import autoddl
        >>> autoddl.models()[0].record()["num_parameters"]
        124475904
        """
        graph = self.graph
        return {
            "name": self.name,
            "num_parameters": graph.num_parameters,
            "num_layers": len(graph.layers),
            "sample": graph.sample,
            "sample_shape": list(graph.layers[0].input_shape),
            "flops": graph.flops,
        }


def models() -> tuple[BuiltInModel, ...]:
    """Return the built-in models.

    :func:`autoddl.plan` takes their names.  It also takes models of other sizes, written as ``gpt:LAYERSxWIDTH``,
    ``bert:LAYERSxWIDTH``, ``llama:LAYERSxWIDTH`` or ``mlp:WIDTH,WIDTH,...``.

    >>> import autoddl
    >>> [model.name for model in autoddl.models() if model.name.startswith("gpt2")]
    ['gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', 'gpt2-64']
    >>> autoddl.models()[0].graph
    <LayerGraph gpt2: 114 layers, 124,475,904 parameters>
    """
    return tuple(map(BuiltInModel, known_models()))


def models_document() -> dict[str, Any]:
    """Return the document that ``autoddl models --json`` prints: the built-in models, and how to write models of other sizes.

    >>> from autoddl.api.catalogue import models_document
    >>> document = models_document()
    >>> document["models"][0]["name"], document["forms"][0]
    ('gpt2', 'gpt:LAYERSxWIDTH')
    """
    records = [model.record() for model in models()]
    return {"format": "autoddl-models", "version": 1, "models": records, "forms": list(FORMS)}


def clusters() -> tuple[Cluster, ...]:
    """Return the built-in clusters.

    :func:`autoddl.plan` takes their names, and can change the number of nodes and of devices per node.

    >>> import autoddl
    >>> {cluster.name: cluster.device.name for cluster in autoddl.clusters()}["dgx-a100"]
    'NVIDIA A100 SXM4 80 GB'
    """
    return tuple(map(load_cluster, preset_names()))


def clusters_document() -> dict[str, Any]:
    """Return the document that ``autoddl clusters --json`` prints: the built-in clusters with their devices and links.

    >>> from autoddl.api.catalogue import clusters_document
    >>> {entry["name"]: entry["intra_node"]["bandwidth"] for entry in clusters_document()["clusters"]}["dgx-a100"]
    300000000000.0
    """
    return {"format": "autoddl-clusters", "version": 1, "clusters": list(map(_cluster_record, clusters()))}


def _cluster_record(cluster: Cluster) -> dict[str, Any]:
    """Return the entry of a cluster in the document; bandwidths are per device."""
    device = cluster.device
    inter, intra = cluster.links
    return {
        "name": cluster.name,
        "description": cluster.document["description"],
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "peak_flops": dict(device.peak_flops),
        "inter_node": {"latency_s": inter.latency_s, "bandwidth": inter.bandwidth},
        "intra_node": {"latency_s": intra.latency_s, "bandwidth": intra.bandwidth},
    }
