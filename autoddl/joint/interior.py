"""One way to run a stage, and what it costs: from strategies to seconds and bytes, layer by layer.

**Memory.** A stage with K micro-batches in flight and v versions of its weights needs state + (v - 1) weights + K kept +
buffer; where the whole stage is recomputed state + (v - 1) weights + K input + kept + buffer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.layerwork import LayerWork, layer_work
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from .cutting import ENTRY, Shape
from .stagetables import StageTables

__all__ = ["Interior", "LayerShare", "Need", "Pricer"]


@dataclass(frozen=True)
class Need:
    """What a schedule asks of a stage's memory: micro-batches in flight, weight versions, and the bytes that there are."""

    in_flight: float
    versions: int
    budget_bytes: float


@dataclass(frozen=True, eq=False)
class LayerShare:
    """What one layer takes of a micro-batch at its strategy, and of how many equal ones."""

    layer: Layer
    strategy: Strategy
    work: LayerWork
    forward_s: float
    backward_s: float
    gradient_s: float
    count: int


@dataclass(frozen=True, eq=False)
class Interior:
    """One way to run a stage: seconds and bytes of each device, per micro-batch.

    ``cost`` is the objective, per step; ``all_reduce_s`` is over the slices of the samples inside a worker.  ``strategies`` are
    in the order of the stage's graph (the entry first, where it has one), ``shares`` are its different layers.
    """

    recompute: str
    strategies: tuple[Strategy, ...]
    cost: float
    forward_s: float
    backward_s: float
    recompute_s: float
    all_reduce_s: float
    state_bytes: float
    weight_bytes: float
    kept_bytes: float
    input_bytes: float
    buffer_bytes: float
    shares: tuple[LayerShare, ...]

    def memory(self, need: Need) -> float:
        """Bytes of each device (formula: module's docstring)."""
        fixed = self.state_bytes + (need.versions - 1) * self.weight_bytes + self.buffer_bytes
        if self.recompute == "stage":
            return fixed + need.in_flight * self.input_bytes + self.kept_bytes
        return fixed + need.in_flight * self.kept_bytes

    def fits(self, need: Need) -> bool:
        return self.memory(need) <= need.budget_bytes


@dataclass(frozen=True, eq=False)
class _Plain:
    """A layer of a stage's graph: its place, a number that equal layers share, and (number, place) of what it reads."""

    layer: Layer
    position: int
    kind: int
    inputs: tuple[tuple[int, int], ...]


class Pricer:
    """Makes interiors of one model on one mesh; equal layers at equal strategies are priced once."""

    def __init__(self, tables: StageTables):
        self.tables = tables
        self._plain: dict[Shape, tuple[_Plain, ...]] = {}
        self._shares: dict[object, LayerShare] = {}
        self._kinds: dict[Hashable, int] = {}

    def interior(
        self, first: int, stop: int, recompute: str, micro_batch: int, strategies: tuple[Strategy, ...]
    ) -> Interior:
        """The figures of strategies, in the order of the stage's graph."""
        workload = replace(self.tables.workload, micro_batch=micro_batch, recompute=recompute == "layers")
        counts: dict[object, int] = {}
        shares: dict[object, LayerShare] = {}
        for plain in self._plain_layers(first, stop):
            if plain.layer.name == ENTRY:
                continue
            strategy = strategies[plain.position]
            senders = tuple((kind, strategies[position]) for kind, position in plain.inputs)
            key = (plain.kind, strategy, senders, micro_batch, workload.recompute)
            counts[key] = counts.get(key, 0) + 1
            if key not in self._shares:
                graph = self.tables.graph(first, stop).graph
                sources = [(graph.layers[position], strategies[position]) for _, position in plain.inputs]
                self._shares[key] = _share(plain.layer, strategy, sources, self.tables.devices, workload)
            shares[key] = self._shares[key]
        own = tuple(replace(share, count=counts[key]) for key, share in shares.items())
        forward = sum(one.count * (one.work.forward_s + one.forward_s) for one in own)
        backward = sum(one.count * (one.work.backward_s + one.backward_s) for one in own)
        again = forward if recompute == "stage" else 0.0
        reduce = sum(one.count * one.gradient_s for one in own)
        state = sum(one.count * one.work.state_bytes for one in own)
        return Interior(
            recompute=recompute,
            strategies=strategies,
            cost=workload.num_micro_batches * (forward + backward + again) + reduce,
            forward_s=forward,
            backward_s=backward,
            recompute_s=again,
            all_reduce_s=reduce,
            state_bytes=state,
            weight_bytes=state * workload.itemsize / workload.bytes_per_parameter,
            kept_bytes=sum(one.count * one.work.kept_bytes for one in own),
            input_bytes=self.tables.input_bytes(first, stop, micro_batch),
            buffer_bytes=max(one.work.buffer_bytes for one in own),
            shares=own,
        )

    def _plain_layers(self, first: int, stop: int) -> tuple[_Plain, ...]:
        """The layers of a stage's graph with numbers that equal ones share."""
        shape = self.tables.chain.shape(first, stop)
        if shape not in self._plain:
            graph = self.tables.graph(first, stop).graph
            position = {layer.name: i for i, layer in enumerate(graph.layers)}
            kinds, found = [], []
            for i, layer in enumerate(graph.layers):
                names = graph.inputs(layer.name)
                kinds.append(self._kinds.setdefault((layer.signature(), not names), len(self._kinds)))
                inputs = tuple((kinds[position[name]], position[name]) for name in names)
                found.append(_Plain(layer, i, kinds[i], inputs))
            self._plain[shape] = tuple(found)
        return self._plain[shape]


def _share(
    layer: Layer,
    strategy: Strategy,
    sources: list[tuple[Layer, Strategy]],
    devices: Cluster,
    workload: Workload,
) -> LayerShare:
    """As :func:`autoddl.costmodel.assessment.assess` prices a layer; equal layers are priced once."""
    samples = workload.micro_batch
    work = layer_work(layer, strategy, devices, workload, samples, not sources)
    arriving = [step for sender, layout in sources for step in edge_steps(sender, layout, strategy, workload, samples)]
    return LayerShare(
        layer=layer,
        strategy=strategy,
        work=work,
        forward_s=sum(devices.time(step) for step in (*arriving, *work.forward)),
        backward_s=sum(devices.time(step) for step in (*work.backward, *(step.adjoint() for step in arriving))),
        gradient_s=sum(devices.time(step) for step in work.gradient),
        count=1,
    )
