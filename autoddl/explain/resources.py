"""Where the time of a step goes: how long each resource of the machine is busy.

Every price is a sum of terms that are each bound by one resource: a kernel's launch, its arithmetic, the bytes that it moves in
the device's memory; and on each network level the latency of messages and the bytes sent.  So the seconds of a layer divide
exactly into one part per resource, and a resource twice as fast saves half of its part (strategies unchanged).

Local work counts FLOPs, bytes and launches apart; of a communication step the latency is what it takes for no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Step
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

__all__ = ["ResourceBook", "resource_names"]

LOCAL = ("arithmetic", "memory bandwidth", "kernel launches")


def resource_names(cluster: Cluster) -> tuple[str, ...]:
    """The resources that a step's time divides into: those of the device, then two for each network level."""
    links = (f"{level.name} {term}" for level in cluster.levels if level.size > 1 for term in ("bandwidth", "latency"))
    return (*LOCAL, *links)


class ResourceBook:
    """Seconds per resource, for any strategies of one graph on one cluster; equal layers are worked out once."""

    def __init__(self, graph: LayerGraph, cluster: Cluster, workload: Workload):
        self.graph, self.cluster, self.workload = graph, cluster, workload
        self.names = resource_names(cluster)
        self._signatures = {layer.name: (layer.signature(), not graph.inputs(layer.name)) for layer in graph.layers}
        self._layers: dict[object, np.ndarray] = {}
        self._edges: dict[object, np.ndarray] = {}

    def passes(self, strategies: Mapping[str, Strategy]) -> dict[str, np.ndarray]:
        """For every layer, by name, the seconds of each resource (columns) in the forward pass and the backward pass of one
        micro-batch, and once per step (rows).  Redistributions count at the consumer."""
        return {layer.name: self._of(layer, strategies) for layer in self.graph.layers}

    def seconds(self, strategies: Mapping[str, Strategy]) -> dict[str, np.ndarray]:
        """For every layer, by name, the seconds per step of each resource."""
        num = self.workload.num_micro_batches
        weights = np.array([num, num, 1.0])
        return {name: weights @ passes for name, passes in self.passes(strategies).items()}

    def total(self, strategies: Mapping[str, Strategy]) -> np.ndarray:
        """The sum over all layers, per step."""
        return np.sum(list(self.seconds(strategies).values()), axis=0)

    def _of(self, layer: Layer, strategies: Mapping[str, Strategy]) -> np.ndarray:
        strategy = strategies[layer.name]
        key = (self._signatures[layer.name], strategy)
        if key not in self._layers:
            self._layers[key] = self._own(layer, strategy)
        total = self._layers[key]
        for producer in self.graph.inputs(layer.name):
            total = total + self._arriving(self.graph[producer], strategies[producer], strategy)
        return total

    def _own(self, layer: Layer, strategy: Strategy) -> np.ndarray:
        workload, is_first = self.workload, not self.graph.inputs(layer.name)
        work = layer_work(layer, strategy, self.cluster, workload, workload.micro_batch, is_first)
        passes = np.stack([self._on_links(steps) for steps in (work.forward, work.backward, work.gradient)])
        for row, local in zip(passes, (work.forward_work, work.backward_work)):
            row[: len(LOCAL)] = self.cluster.local_times(local, workload.precision)
        return passes

    def _arriving(self, producer: Layer, source: Strategy, target: Strategy) -> np.ndarray:
        key = (self._signatures[producer.name], source.rows_and_features, target.rows_and_features)
        if key not in self._edges:
            forward = edge_steps(producer, source, target, self.workload, self.workload.micro_batch)
            backward = [step.adjoint() for step in forward]
            self._edges[key] = np.stack([self._on_links(forward), self._on_links(backward), self._on_links(())])
        return self._edges[key]

    def _on_links(self, steps: Sequence[Step]) -> np.ndarray:
        seconds = np.zeros(len(self.names))
        for step in steps:
            latency_s = self.cluster.time(replace(step, nbytes=0.0))
            at = len(LOCAL) + 2 * step.axis.level
            seconds[at : at + 2] += (self.cluster.time(step) - latency_s, latency_s)
        return seconds
