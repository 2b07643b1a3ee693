"""Divides the time of a step by resource of the machine.

**Resources.**  A device has three: arithmetic, memory bandwidth and kernel launches.  A network level has two: bandwidth and
latency.  Every price of the cost model is a sum of terms, and each term is bound by one resource.  So the time of a layer divides
exactly into one part per resource.  A resource that is twice as fast saves half of its part, if the strategies do not change.

**Parts.**  :class:`autoddl.costmodel.cluster.Cluster` gives the parts: ``local_times`` of local work, ``times`` of communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Step
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.layerwork import layer_work, repeats_redistributions
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

__all__ = ["ResourceBook", "resource_names"]

#: The resources of a device; they come first in all arrays.
LOCAL = ("arithmetic", "memory bandwidth", "kernel launches")


def resource_names(cluster: Cluster) -> tuple[str, ...]:
    """Names of the resources: those of the device, then bandwidth and latency of each network level with more than one member."""
    links = (f"{level.name} {term}" for level in cluster.levels if level.size > 1 for term in ("bandwidth", "latency"))
    return (*LOCAL, *links)


class ResourceBook:
    """Time per resource, for any strategies of a graph on a cluster.  Results are cached, and shared by equal layers.

    Args:
        graph, cluster: the model and the machine.
        workload: batch, micro-batch, precision and recomputation.
    """

    def __init__(self, graph: LayerGraph, cluster: Cluster, workload: Workload):
        self.graph, self.cluster, self.workload = graph, cluster, workload
        self.names = resource_names(cluster)
        self._places = {layer.name: graph.place(layer.name, workload.recompute) for layer in graph.layers}
        self._signatures = {layer.name: (layer.signature(), self._places[layer.name]) for layer in graph.layers}
        self._layers: dict[object, np.ndarray] = {}
        self._edges: dict[object, np.ndarray] = {}

    def passes(self, strategies: Mapping[str, Strategy]) -> dict[str, np.ndarray]:
        """Return for every layer, by name, its time on each resource, of shape (3, resources) [s].

        The rows are the forward pass and the backward pass of one micro-batch, and once per step the gradients' all-reduce with the
        optimizer step.  A redistribution between two layers counts for its consumer.
        """
        return {layer.name: self._layer_passes(layer, strategies) for layer in self.graph.layers}

    def seconds(self, strategies: Mapping[str, Strategy]) -> dict[str, np.ndarray]:
        """Return for every layer, by name, its time per step on each resource [s]."""
        num = self.workload.num_micro_batches
        weights = np.array([num, num, 1.0])
        return {name: weights @ passes for name, passes in self.passes(strategies).items()}

    def total(self, strategies: Mapping[str, Strategy]) -> np.ndarray:
        """Return the time per step on each resource, summed over all layers [s]."""
        return np.sum(list(self.seconds(strategies).values()), axis=0)

    def _layer_passes(self, layer: Layer, strategies: Mapping[str, Strategy]) -> np.ndarray:
        strategy = strategies[layer.name]
        key = (self._signatures[layer.name], strategy)
        if key not in self._layers:
            self._layers[key] = self._layer_alone(layer, strategy)
        total = self._layers[key]
        for producer in self.graph.inputs(layer.name):
            forward, backward, once = self._edge(self.graph[producer], strategies[producer], strategy)
            if repeats_redistributions(self.workload, self._places[layer.name]):
                backward = backward + forward
            total = total + np.stack([forward, backward, once])
        return total

    def _layer_alone(self, layer: Layer, strategy: Strategy) -> np.ndarray:
        """The passes of a layer without the redistribution of its inputs."""
        workload = self.workload
        work = layer_work(layer, strategy, workload, workload.micro_batch, self._places[layer.name])
        passes = np.stack([self._on_links(steps) for steps in (work.forward, work.backward, work.gradient)])
        passes[:2] *= self.cluster.exposed_part(work)
        for row, local in zip(passes, (work.forward_work, work.backward_work, work.update_work)):
            row[: len(LOCAL)] = self.cluster.local_times(local, workload.precision)
        return passes

    def _edge(self, producer: Layer, source: Strategy, target: Strategy) -> np.ndarray:
        """The passes of the redistribution of a layer's output for a consumer."""
        key = (self._signatures[producer.name], source.rows_and_features, target.rows_and_features)
        if key not in self._edges:
            forward = edge_steps(producer, source, target, self.workload, self.workload.micro_batch)
            backward = [step.adjoint() for step in forward]
            self._edges[key] = np.stack([self._on_links(forward), self._on_links(backward), self._on_links(())])
        return self._edges[key]

    def _on_links(self, steps: Sequence[Step]) -> np.ndarray:
        """The time of communication steps on each resource [s]."""
        seconds = np.zeros(len(self.names))
        for step in steps:
            latency_s, transfer_s = self.cluster.times(step)
            position = len(LOCAL) + 2 * step.axis.level
            seconds[position : position + 2] += (transfer_s, latency_s)
        return seconds
