"""Stages with plans of their own, on this rank: local tensors at the layouts of their layers, and the priced steps between ranks.

A slot is carried through a stage as a micro-batch is through an applied plan (`..sequence`), on the ranks of the stage's worker.
Weights are this rank's shards, in the blocked layouts of `..layouts`: to versions and optimizers they are tensors like others, so
an optimizer has to work element by element.

**Gradients** of a stage's own weights are summed over the axes that split samples, by the priced steps, and then over the stage's
replicas in other pipelines, shard by shard. Those of weights that several stages share, which cut them differently, are summed
whole: every rank puts what it has where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import edge_shape

from ..dropouts import check_dropouts
from ..epilogues import LOSSES
from ..feeding import feeds_of, inputs_of
from ..layouts import ParameterLayout, parameter_layouts
from ..load import load_oneflow
from ..sequence import LayerSequence, ReadyLayer
from ..setting import Batch
from ..stepping import Stepper
from ..userparameters import check_parameters, find_parameter
from .actions import Reduce, Run
from .chain import Boundary, first_names
from .checkpoint import Entry
from .data import BatchSource, LossPart, SlotData
from .lowering import Lowered
from .stage_plans import StagePlan, entry_strategy
from .transport import Transport
from .weights import ReplicaWeights

flow: Any = load_oneflow()

__all__ = ["PlannedModel", "PlannedStages"]

Tensor = Any


@dataclass(frozen=True)
class PlannedModel:
    """A model cut in stages that have plans of their own.

    Attributes:
        module: the whole model, with the same values on every rank; it is read, not changed.
        graph: its layers; they end in a loss.
        stages: all layers of the graph in their order, each stage at strategies on its own ranks.
        feeds: which input layers read, see `autoddl.apply`.
    """

    module: Any
    graph: LayerGraph
    stages: tuple[StagePlan, ...]
    feeds: Mapping[str, int | None] = field(default_factory=dict)

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Per parameter, by its first name in the module, the stages that use it.

        Raises:
            UserError: the module is not the graph's.
        """
        strategies = {name: strategy for stage in self.stages for name, strategy in stage.strategies.items()}
        check_parameters(self.module, self.graph, strategies, self.stages[0].num_ranks)
        check_dropouts(self.module, self.graph)
        last = self.graph.layers[-1]
        if last.kind != "loss" and not LOSSES & set(last.epilogue):
            raise UserError(
                f"{last.describe()}: the model ends in it, should end in a loss to be trained in a pipeline"
            )
        names = first_names(self.module)
        holders: dict[str, list[int]] = {}
        for number, stage in enumerate(self.stages):
            for layer in stage.layers(self.graph):
                for parameter in layer.parameters:
                    stages = holders.setdefault(names[id(find_parameter(self.module, parameter.name))], [])
                    if number not in stages:
                        stages.append(number)
        return {name: tuple(stages) for name, stages in holders.items()}


@dataclass(frozen=True)
class _Stored:
    """A tensor that a rank keeps: a parameter's shard, or one of several side by side.

    Attributes:
        layout: how it lies on the ranks of the stage.
        sources: (first name in the module, rows) of the parameters that it holds.
        stages: the stages that use it.
    """

    layout: ParameterLayout
    sources: tuple[tuple[str, int], ...]
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return prod(self.layout.local_shape())


class _Part:
    """One stage on this rank.

    Attributes:
        layers: ready to run.
        stored: its weights by name.
        places: per layer the places of its weights among all of them.
    """

    def __init__(
        self, model: PlannedModel, holders: Mapping[str, tuple[int, ...]], number: int, stepper: Stepper
    ) -> None:
        plan, graph = model.stages[number], model.graph
        layers = plan.layers(graph)
        strategies = dict(plan.strategies)
        self.given = model.stages[number - 1].layers(graph)[-1].name if number else None
        if self.given is not None:
            strategies[self.given] = entry_strategy(graph, model.stages, number)
        self.sequence = LayerSequence(model.module, graph, strategies, stepper, plan.recompute)
        self.layers: tuple[ReadyLayer, ...] = tuple(self.sequence.ready(layer) for layer in layers)
        self.feeds = {name: which for name, which in feeds_of(graph, model.feeds).items() if name in plan.strategies}
        self.stored: dict[str, _Stored] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        names = first_names(model.module)
        by_sources: dict[tuple[str, ...], str] = {}
        for ready in self.layers:
            places = []
            for layout in parameter_layouts(graph, ready.layer, ready.strategy):
                sources = tuple((names[id(find_parameter(model.module, name))], rows) for name, rows in layout.sources)
                key = tuple(name for name, _ in sources)
                if key not in by_sources:
                    by_sources[key] = layout.name
                    stages = {holders[name] for name in key}
                    if len(stages) > 1:
                        raise UserError(
                            f"{ready.layer.describe()}: only a part of {layout.name} is shared with other stages"
                        )
                    self.stored[layout.name] = _Stored(layout, sources, stages.pop())
                known = self.stored[by_sources[key]]
                _check_alike(ready, layout, known.layout)
                places.append(list(self.stored).index(known.name))
            self.places[ready.name] = tuple(places)


class PlannedStages:
    """See `work.Stages`."""

    def __init__(self, lowered: Lowered, rank: int, model: PlannedModel, batch: BatchSource) -> None:
        schedule, ranks = lowered.schedule, lowered.ranks
        graph, holders = model.graph, model.holders()
        worker = ranks.worker_of(rank)
        members = ranks.ranks_of(worker)
        self._index = ranks.index_of(rank)
        self._stepper = Stepper(len(members), members.start)
        self._model = model
        self._data = SlotData(lowered, batch)
        self._slot_rows = lowered.slot_rows
        self._parts = {stage: _Part(model, holders, stage, self._stepper) for _, stage in schedule.stages_on(worker)}
        self._peers = {
            stage: tuple(sorted(ranks.ranks_of(replica.worker)[self._index] for replica in schedule.replicas_of(stage)))
            for stage in self._parts
        }
        self._names = [[name for name in holders if stage in holders[name]] for stage in range(schedule.num_stages)]
        self.boundaries = [_boundary(stage.layers(graph)[-1]) for stage in model.stages[:-1]]

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
                lambda ready: [weights[place] for place in part.places[ready.name]],
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

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        values = {}
        for name, stored in self._parts[stage].stored.items():
            sources = [find_parameter(self._model.module, source) for source, _ in stored.sources]
            whole = np.concatenate([source.detach().numpy() for source in sources])
            values[name] = flow.tensor(stored.layout.take(whole, self._index))
        return values

    def total(self, action: Reduce, replicas: Mapping[int, ReplicaWeights], transport: Transport) -> Tensor | None:
        if len(action.stages) > 1:
            return self._shared_total(action, replicas, transport)
        (stage,) = action.stages
        sums = []
        for axes, group in self._groups(stage).items():
            vector = replicas[stage].gradient(action.update, [stored.name for stored in group])
            with transport.thread():
                sums.append(self._stepper.reduce(vector, axes) if axes else vector)
        if not sums:
            return None
        with transport.thread():
            vector = flow.cat(sums, dim=0)
        return transport.all_reduce(vector, self._peers[stage])

    def _groups(self, stage: int) -> dict[tuple[Axis, ...], list[_Stored]]:
        """A stage's own weights by the axes that their gradients are summed over."""
        groups: dict[tuple[Axis, ...], list[_Stored]] = {}
        for stored in self._parts[stage].stored.values():
            if len(stored.stages) == 1:
                groups.setdefault(stored.layout.reduced, []).append(stored)
        return groups

    def _shared_total(
        self, action: Reduce, replicas: Mapping[int, ReplicaWeights], transport: Transport
    ) -> Tensor | None:
        """Of weights that several stages share: whole, in the order of their names."""
        sums: dict[tuple[tuple[str, int], ...], np.ndarray] = {}
        for stage, replica in replicas.items():
            for stored in self._shared(action, stage):
                whole = np.zeros(stored.layout.shape, np.float32)
                local = replica.gradient(action.update, [stored.name])
                stored.layout.put(whole, local.numpy().reshape(stored.layout.local_shape()), self._index)
                sums[stored.sources] = sums[stored.sources] + whole if stored.sources in sums else whole
        if not sums:
            return None
        vector = np.concatenate([sums[sources].reshape(-1) for sources in sorted(sums)])
        return transport.all_reduce(flow.tensor(vector), action.ranks)

    def _shared(self, action: Reduce, stage: int) -> list[_Stored]:
        """What is shared by exactly an action's stages, in the order of the names of what it holds."""
        stored = self._parts[stage].stored.values()
        return sorted((one for one in stored if one.stages == action.stages), key=lambda one: one.sources)

    def set_gradient(self, stage: int, action: Reduce, replica: ReplicaWeights, total: Tensor) -> None:
        if len(action.stages) == 1:
            names = [stored.name for group in self._groups(stage).values() for stored in group]
            replica.set_gradient(action.update, names, total)
            return
        vector, position = total.numpy(), 0
        for stored in self._shared(action, stage):
            shape = stored.layout.shape
            whole = vector[position : position + prod(shape)].reshape(shape)
            position += prod(shape)
            own = stored.layout.take(whole, self._index)
            replica.set_gradient(action.update, [stored.name], flow.tensor(own.reshape(-1)))

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def names(self, stage: int) -> tuple[str, ...]:
        return tuple(self._names[stage])

    def entries(self, stage: int, replica: ReplicaWeights) -> dict[str, Entry]:
        kept = replica.entries()
        result: dict[str, Entry] = {}
        for name, stored in self._parts[stage].stored.items():
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

    def _whole(self, stored: _Stored, shard: np.ndarray) -> np.ndarray:
        """What all ranks of the stage hold together."""
        layout, local = stored.layout, flow.tensor(shard)
        for dim, axes in enumerate(layout.axes):
            local = self._stepper.gather(local, axes, dim)
        whole = np.empty(layout.shape, shard.dtype)
        layout.gathered().put(whole, local.numpy(), self._index)
        return whole

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        own: dict[str, Entry] = {}
        for name, stored in self._parts[stage].stored.items():
            parts = [entries[source] for source, _ in stored.sources]
            own[name] = {}
            for key, value in parts[0].items():
                if value.shape == parts[0]["value"].shape:
                    value = stored.layout.take(np.concatenate([part[key] for part in parts]), self._index)
                own[name][key] = value
        replica.restore(own)


def _boundary(layer: Layer) -> Boundary:
    """What a layer gives, of one sample: rows by features (images: all elements of one)."""
    features = edge_shape(layer, 1)[1]
    return Boundary((layer.output_elements // features, features), flow.float32)


def _check_alike(ready: ReadyLayer, layout: ParameterLayout, known: ParameterLayout) -> None:
    """A weight that layers of a stage share is stored once: it has to lie alike in all of them."""
    for mine, theirs in zip(layout.indices, known.indices):
        if not all(np.array_equal(a, b) for a, b in zip(mine, theirs)):
            raise UserError(
                f"{ready.layer.describe()}: {ready.strategy} puts {layout.name} elsewhere than it is as {known.name}, whose "
                "weight it shares"
            )
