"""Stages with plans of their own, on this rank: local tensors at the layouts of their layers, and the priced steps between ranks.

A slot is carried through a stage as a micro-batch is through an applied plan (`..sequence`), on the ranks of the stage's worker.
Weights are this rank's shards, in the blocked layouts of `..layouts`: to versions and optimizers they are tensors like others, so
an optimizer has to work element by element.

**Gradients** are summed over the axes that split samples, by the priced steps; where a stage has replicas in other pipelines, those
are scattered inside, summed between the replicas shard by shard, and gathered inside. Of weights that several stages share, the
stages of a pipeline then tell each other their sums, every rank what it holds (`shared_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.pricing import edge_shape

from ..feeding import feeds_of, inputs_of
from ..load import load_oneflow
from ..sequence import LayerSequence, ReadyLayer
from ..setting import Batch
from ..stepping import Stepper, num_bytes
from ..tracing import LayerTracer, Measure, TracedSection
from ..userparameters import find_parameter
from .actions import Reduce, Run
from .chain import Boundary
from .checkpoint import Entry
from .data import BatchSource, LossPart, SlotData
from .lowering import Lowered
from .planned_model import PlannedModel, StageWeights, Stored
from .shared_weights import WeightPiece, weight_pieces
from .stage_plans import entry_strategy
from .transport import Transport
from .weights import ReplicaWeights

flow: Any = load_oneflow()

__all__ = ["PlannedStages"]

Tensor = Any


@dataclass(frozen=True)
class _Exchange:
    """A part of a weight's gradient that a rank of one stage tells a rank of another stage of the same pipeline."""

    source_stage: int
    destination_stage: int
    sources: tuple[tuple[str, int], ...]
    """Of the `Stored`."""
    ranks: tuple[int, int]
    piece: WeightPiece


class _Part:
    """One stage on this rank.

    Attributes:
        given: the layer that the stage before gives; None in the first one.
        layers: ready to run.
        feeds: which input layers read.
        weights: what is stored.
    """

    def __init__(self, model: PlannedModel, number: int, weights: StageWeights, stepper: Stepper) -> None:
        plan, graph = model.stages[number], model.graph
        strategies = dict(plan.strategies)
        self.given = model.stages[number - 1].layers(graph)[-1].name if number else None
        if self.given is not None:
            strategies[self.given] = entry_strategy(graph, model.stages, number)
        self.sequence = LayerSequence(model.module, graph, strategies, stepper, plan.recompute)
        self.layers: tuple[ReadyLayer, ...] = tuple(self.sequence.ready(layer) for layer in plan.layers(graph))
        self.feeds = {name: which for name, which in feeds_of(graph, model.feeds).items() if name in plan.strategies}
        self.weights = weights


class PlannedStages:
    """See `work.Stages`."""

    def __init__(self, lowered: Lowered, rank: int, model: PlannedModel, batch: BatchSource) -> None:
        schedule, ranks = lowered.schedule, lowered.ranks
        graph, holders = model.graph, model.holders()
        weights = [StageWeights(model, holders, stage) for stage in range(schedule.num_stages)]
        worker = ranks.worker_of(rank)
        members = ranks.ranks_of(worker)
        self._rank, self._index = rank, ranks.index_of(rank)
        self._stepper = Stepper(len(members), members.start)
        self._model = model
        self._data = SlotData(lowered, batch)
        self._slot_rows = lowered.slot_rows
        self._holding, self._worker = lowered.holding, worker
        held = sorted({stage for _, stage in schedule.stages_on(worker)})
        self._parts = {stage: _Part(model, stage, weights[stage], self._stepper) for stage in held}
        self._peers = {
            stage: tuple(sorted(ranks.ranks_of(replica.worker)[self._index] for replica in schedule.replicas_of(stage)))
            for stage in self._parts
        }
        shared = {stages for stages in holders.values() if len(stages) > 1}
        self._exchanges = {stages: _exchanges(lowered, weights, stages) for stages in shared}
        self._names = [[name for name in holders if stage in holders[name]] for stage in range(schedule.num_stages)]
        self.boundaries: Sequence[Boundary] = [_boundary(stage.layers(graph)[-1]) for stage in model.stages[:-1]]

    @property
    def stepper(self) -> Stepper:
        """The ranks of this rank's worker, and the log of steps."""
        return self._stepper

    @property
    def first_micro_batch(self) -> int:
        return self._data.first_micro_batch

    @first_micro_batch.setter
    def first_micro_batch(self, number: int) -> None:
        self._data.first_micro_batch = number

    # ---- Computing ---------------------------------------------------------------------------------------------------

    def run(
        self, run: Run, x: Tensor | None, weights: Sequence[Tensor], first_slot: int, num_slots: int
    ) -> tuple[Tensor, list[LossPart]]:
        part = self._parts[run.task.stage]
        is_last = run.task.stage == len(self._model.stages) - 1
        share = self._data.share_of_micro_batch(self._slot_rows)
        outputs, losses = [], []
        for position in range(num_slots):
            slot = first_slot + position
            values = {}
            if part.given is not None:
                rows = x.shape[0] // num_slots  # type: ignore[union-attr]
                values[part.given] = x if num_slots == 1 else flow.narrow(x, 0, position * rows, rows)
            y = part.sequence.run(
                part.layers,
                values,
                lambda ready: [weights[place] for place in part.weights.places[ready.name]],
                self._batch(part, slot, is_last),
            )
            if is_last:
                if self._index == 0:  # every rank knows the mean over all rows
                    losses.append(LossPart(self._data.micro_batch(slot), float(y.detach().numpy()) * share, share))
                y = y * self._data.share_of_update(self._slot_rows, run.update)
            outputs.append(y)
        if len(outputs) == 1:
            return outputs[0], losses
        return sum(outputs[1:], outputs[0]) if is_last else flow.cat(outputs, dim=0), losses

    def _batch(self, part: _Part, slot: int, is_last: bool) -> Batch:
        inputs = {}
        if part.feeds:
            inputs = inputs_of(self._model.graph, part.feeds, [self._data.rows(slot, 0)])
        step = self._data.number(slot) + 1 if self._model.module.training else None
        return Batch(inputs, self._data.rows(slot, 1) if is_last else None, self._slot_rows, step)

    def trace(self, measure: Measure | None) -> list[TracedSection]:
        """One slot forward and backward through one stage after the other, on the ranks of the first pipeline, layer by layer.

        What stages take in are numbers of no matter, so that each is measured by itself; gradients are dropped.

        Args:
            measure: called with every section, on all ranks of the job in the same order; where others compute with an empty one.
        """
        sections: list[TracedSection] = []
        for number, (stage, worker) in enumerate(zip(self._model.stages, self._holding.schedule.placement[0])):
            names = [layer.name for layer in stage.layers(self._model.graph)]
            if worker == self._worker:
                sections += self._traced(number, measure)
                continue
            for phase, order in (("forward", names), ("backward", names[::-1])):
                for name in order:
                    traffic = None if measure is None else measure(lambda: None)[1]
                    sections.append(TracedSection(name, phase, (), traffic))
        return sections

    def _traced(self, number: int, measure: Measure | None) -> list[TracedSection]:
        part, given = self._parts[number], {}
        weights = [value.detach().requires_grad_(True) for value in self.initial_values(number).values()]
        if part.given is not None:
            block = self._holding.block(self._rank, number, is_leaving=False)
            shape = (len(block.rows), *self.boundaries[number - 1].row_shape[:-1], len(block.columns))
            values = np.random.default_rng(self._rank).standard_normal(shape, dtype=np.float32)
            given[part.given] = flow.tensor(values)
        tracer = LayerTracer(
            part.sequence, part.layers, lambda ready: [weights[i] for i in part.weights.places[ready.name]], measure
        )
        tracer.forward(given, self._batch(part, 0, number == len(self._model.stages) - 1))
        tracer.backward()
        return tracer.sections

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        values = {}
        for name, stored in self._parts[stage].weights.stored.items():
            sources = [find_parameter(self._model.module, source) for source, _ in stored.sources]
            whole = np.concatenate([source.detach().numpy() for source in sources])
            values[name] = flow.tensor(stored.layout.take(whole, self._index))
        return values

    def total(self, action: Reduce, replicas: Mapping[int, ReplicaWeights], transport: Transport) -> Tensor | None:
        sums = []
        for stage, replica in sorted(replicas.items()):
            for axes, group in self._groups(action, stage).items():
                vector = replica.gradient(action.update, [stored.name for stored in group])
                sums.append(self._summed(vector, axes, self._peers[stage], transport))
        if not sums:
            return None
        with transport.thread():
            vector = flow.cat(sums, dim=0)
        return vector if len(action.stages) == 1 else self._exchanged(action, sorted(replicas), vector, transport)

    def set_gradient(self, stage: int, action: Reduce, replica: ReplicaWeights, total: Tensor) -> None:
        start = 0
        for held in sorted(set(action.stages) & set(self._parts)):
            groups = self._groups(action, held).values()
            size = sum(stored.size for group in groups for stored in group)
            if held == stage:
                names = [stored.name for group in groups for stored in group]
                replica.set_gradient(action.update, names, flow.narrow(total, 0, start, size))
            start += size

    def _groups(self, action: Reduce, stage: int) -> dict[tuple[Axis, ...], list[Stored]]:
        """The weights that exactly an action's stages have, as one of them has them, by the axes that gradients are summed over."""
        groups: dict[tuple[Axis, ...], list[Stored]] = {}
        stored = self._parts[stage].weights.stored.values()
        for one in sorted(stored, key=lambda one: one.sources):
            if one.stages == action.stages:
                groups.setdefault(one.layout.reduced, []).append(one)
        return groups

    def _summed(self, vector: Tensor, axes: tuple[Axis, ...], peers: tuple[int, ...], transport: Transport) -> Tensor:
        """Over some axes of the stage, and over its replicas: scattered inside, summed between them, gathered inside."""
        if axes:
            transport.bytes_reduced += num_bytes(vector)
        with transport.thread():
            if len(peers) == 1:
                return self._stepper.reduce(vector, axes)
            return self._stepper.reduce_between(vector, axes, lambda own: transport.all_reduce(own, peers))

    def _exchanged(self, action: Reduce, held: Sequence[int], vector: Tensor, transport: Transport) -> Tensor:
        """The sum over stages, of what each has summed over its own ranks; for the stages held here, one behind the other."""
        shards = self._shards(action, held, vector.numpy())
        parts: dict[tuple[int, int, tuple[tuple[str, int], ...]], np.ndarray] = {}
        for exchange in self._exchanges[action.stages]:
            key = (exchange.source_stage, exchange.destination_stage, exchange.sources)
            piece, (source, destination) = exchange.piece, exchange.ranks
            if self._rank == source:
                sent = shards[exchange.source_stage, exchange.sources][np.ix_(*piece.places_there)]
                arrived = sent
                if source != destination:
                    transport.send_sum(flow.tensor(np.ascontiguousarray(sent)), destination)
            if self._rank == destination:
                if source != destination:
                    arrived = transport.receive_sum(piece.shape, flow.float32, source).numpy()
                if key not in parts:
                    parts[key] = np.zeros_like(shards[exchange.destination_stage, exchange.sources])
                parts[key][np.ix_(*piece.places_here)] = arrived
        sums = []
        for (stage, sources), shard in shards.items():
            # In the order of stages everywhere, so that all of them come to the same sum.
            terms = [shard if other == stage else parts[other, stage, sources] for other in action.stages]
            sums.append(sum(terms[1:], terms[0]).reshape(-1))
        return flow.tensor(np.concatenate(sums))

    def _shards(
        self, action: Reduce, held: Sequence[int], vector: np.ndarray
    ) -> dict[tuple[int, tuple[tuple[str, int], ...]], np.ndarray]:
        """What a vector of all stages held here consists of, by stage and what the weight is made of."""
        shards, start = {}, 0
        for stage in held:
            for group in self._groups(action, stage).values():
                for stored in group:
                    part = vector[start : start + stored.size]
                    shards[stage, stored.sources] = part.reshape(stored.layout.local_shape())
                    start += stored.size
        return shards

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(find_parameter(self._model.module, name).shape) for name in self._names[stage]}

    def whole(self, stage: int, kept: Mapping[str, Entry]) -> dict[str, Entry]:
        result: dict[str, Entry] = {}
        for name, stored in self._parts[stage].weights.stored.items():
            shape = stored.layout.local_shape()
            whole = {
                key: self._whole(stored, value) if value.shape == shape else value for key, value in kept[name].items()
            }
            start = 0
            for source, rows in stored.sources:
                cut = slice(start, start + rows)
                start += rows
                result[source] = {key: v[cut] if kept[name][key].shape == shape else v for key, v in whole.items()}
        return result

    def _whole(self, stored: Stored, shard: np.ndarray) -> np.ndarray:
        """What all ranks of the stage hold together."""
        layout, local = stored.layout, flow.tensor(shard)
        for dim, axes in enumerate(layout.axes):
            local = self._stepper.gather(local, axes, dim)
        whole = np.empty(layout.shape, shard.dtype)
        layout.gathered().put(whole, local.numpy(), self._index)
        return whole

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        own: dict[str, Entry] = {}
        for name, stored in self._parts[stage].weights.stored.items():
            parts = [entries[source] for source, _ in stored.sources]
            own[name] = {}
            for key, value in parts[0].items():
                if value.shape == parts[0]["value"].shape:
                    value = stored.layout.take(np.concatenate([part[key] for part in parts]), self._index)
                own[name][key] = value
        replica.restore(own)


def _exchanges(lowered: Lowered, weights: Sequence[StageWeights], stages: tuple[int, ...]) -> list[_Exchange]:
    """Everything that is told about the weights of exactly these stages, in the order in which it is sent."""
    result = []
    by_stage = [
        {one.sources: one for one in weights[stage].stored.values() if one.stages == stages} for stage in stages
    ]
    for workers in lowered.schedule.placement:
        for (source, theirs), (destination, mine) in permutations(zip(stages, by_stage), 2):
            ranks = [lowered.ranks.ranks_of(workers[stage]) for stage in (source, destination)]
            for sources in sorted(theirs):
                if sources not in mine:
                    raise UserError(f"{theirs[sources].name} is stored otherwise in the stages {stages} that share it")
                for piece in weight_pieces(theirs[sources].layout, mine[sources].layout):
                    ends = (ranks[0][piece.source], ranks[1][piece.destination])
                    result.append(_Exchange(source, destination, sources, ends, piece))
    return result


def _boundary(layer: Layer) -> Boundary:
    """What a layer gives, of one sample: rows by features (images: all elements of one)."""
    features = edge_shape(layer, 1)[1]
    return Boundary((layer.output_elements // features, features), flow.float32)
