"""Stages with plans of their own, on this rank: local tensors at the layouts of their layers, and the priced steps between ranks.

A slot is carried through a stage as a micro-batch is through an applied plan (`..stage`), on the ranks of the stage's worker.
Weights are this rank's shards, in the blocked layouts of `..layouts`: to versions and optimizers they are tensors like others, so
an optimizer has to work element by element. Their gradients are summed as `.gradients` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.pricing import edge_shape

from ..load import load_oneflow
from ..parameters import whole_value
from ..setting import Batch
from ..stage.model import PlannedModel, StageWeights, Stored
from ..stage.stage import Stage
from ..stage.tracing import Measure, StageTracer, TracedSection
from ..stepping import Stepper
from ..userparameters import values_of
from .actions import BoundaryTensor, Reduce, Run
from .checkpoint import Entry
from .data import BatchSource, LossPart, SlotData
from .gradients import GradientSums, SharedLayouts, StageWeight
from .lowering import Lowered
from .passes import evaluate_slots
from .transport import Transport
from .weights import ReplicaWeights, WeightVersions

flow: Any = load_oneflow()

__all__ = ["PlannedStages"]

Tensor = Any


class PlannedStages:
    """See `work.Stages`."""

    def __init__(self, lowered: Lowered, rank: int, model: PlannedModel, batch: BatchSource) -> None:
        schedule, ranks = lowered.schedule, lowered.ranks
        if not model.has_loss:
            last = model.graph.layers[-1].describe()
            raise UserError(f"{last}: the model ends in it, should end in a loss to be trained in a pipeline")
        weights = model.weights()
        worker = ranks.worker_of(rank)
        members = ranks.ranks_of(worker)
        self._rank, self._index = rank, ranks.index_of(rank)
        self._stepper = Stepper(len(members), members.start)
        self._model = model
        self._data = SlotData(lowered.schedule, lowered.slots_per_micro_batch, lowered.slot_rows, batch)
        self._slot_rows = lowered.slot_rows
        self._holding, self._worker = lowered.holding, worker
        held = sorted({stage for _, stage in schedule.stages_on(worker)})
        self._parts = {stage: Stage(model, stage, weights, self._stepper) for stage in held}
        self._values = values_of(model.module, Stepper(flow.env.get_world_size()))
        self._frozen = {stage: self._initial_shards(stage, are_trained=False) for stage in held}
        self._sums = GradientSums(
            self._stepper,
            [[ranks.ranks_of(worker) for worker in workers] for workers in schedule.placement],
            {s: [StageWeight(w.layout, w.sources, w.stages) for w in _trained(weights[s])] for s in held},
            {stages: _shared_layouts(weights, stages) for stages in model.tied()},
        )
        self._shapes = [of_stage.shapes() for of_stage in weights]
        self.boundaries: Sequence[BoundaryTensor] = [
            _boundary(stage.layers(model.graph)[-1]) for stage in model.stages[:-1]
        ]

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
        weights = self._with_frozen(run.task.stage, weights)

        def evaluate(x: Tensor | None, slot: int) -> Tensor:
            y = part.run(x, weights, self._batch(part, slot, is_last))
            if flow.is_grad_enabled() and not y.requires_grad:
                y.requires_grad_(True)  # in a first stage that is frozen: its backward pass ends here
            return y

        slots = range(first_slot, first_slot + num_slots)
        return evaluate_slots(evaluate, x, slots, run.update, self._data, is_last, reports=self._index == 0)

    def _batch(self, part: Stage, slot: int, is_last: bool) -> Batch:
        inputs = [self._data.rows(slot, 0)] if part.feeds else []
        step = self._data.number(slot) + 1 if self._model.module.training else None
        return part.batch(inputs, self._data.rows(slot, 1) if is_last else None, self._slot_rows, step)

    def _with_frozen(self, stage: int, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """All weights of a stage in their order, of those that are trained."""
        if not self._frozen[stage]:
            return weights
        trained = iter(weights)
        stored = self._parts[stage].weights.stored
        return [next(trained) if one.is_trained else self._frozen[stage][name] for name, one in stored.items()]

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
        part, x = self._parts[number], None
        weights = [value.detach().requires_grad_(True) for value in self.initial_values(number).values()]
        if part.given is not None:
            block = self._holding.block(self._rank, number, is_leaving=False)
            shape = (len(block.rows), *self.boundaries[number - 1].row_shape[:-1], len(block.columns))
            x = flow.tensor(np.random.default_rng(self._rank).standard_normal(shape, dtype=np.float32))
        tracer = StageTracer(part, self._with_frozen(number, weights), measure)
        tracer.run(x, self._batch(part, 0, number == len(self._model.stages) - 1))
        return tracer.sections

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        return self._initial_shards(stage, are_trained=True)

    def _initial_shards(self, stage: int, are_trained: bool) -> dict[str, Tensor]:
        values = {}
        for name, one in self._parts[stage].weights.stored.items():
            if one.is_trained == are_trained:
                values[name] = flow.tensor(one.layout.take(one.layout.joined(self._values), self._index))
        return values

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        return self._sums.total(action, replicas, transport)

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        self._sums.set_gradient(stage, action, replica, total)

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        return self._shapes[stage]

    def frozen(self, stage: int) -> dict[str, Entry]:
        """This rank's shards of the weights that are not trained, by the names under which it keeps them."""
        return {name: {"value": np.array(shard.numpy())} for name, shard in self._frozen[stage].items()}

    def whole(self, stage: int, kept: Mapping[str, Entry]) -> dict[str, Entry]:
        result: dict[str, Entry] = {}
        for name, entry in kept.items():
            layout = self._parts[stage].weights.stored[name].layout
            for key, value in entry.items():
                if value.shape == layout.local_shape():
                    parts = layout.parts(whole_value(layout, flow.tensor(value), self._stepper))
                else:
                    parts = {source: value for source, _ in layout.sources}
                for source, part in parts.items():
                    result.setdefault(source, {})[key] = part
        return result

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        own: dict[str, Entry] = {}
        for name, stored in self._parts[stage].weights.stored.items():
            parts = {source: entries[source] for source, _ in stored.sources}
            first = next(iter(parts.values()))
            own[name] = dict(first)
            for key, value in first.items():
                if value.shape == first["value"].shape:
                    whole = stored.layout.joined({source: part[key] for source, part in parts.items()})
                    own[name][key] = stored.layout.take(whole, self._index)
        self._frozen[stage] = {name: flow.tensor(own[name]["value"]) for name in self._frozen[stage]}
        replica.restore(own)


def _trained(weights: StageWeights) -> list[Stored]:
    return [one for one in weights.stored.values() if one.is_trained]


def _shared_layouts(weights: Sequence[StageWeights], stages: tuple[int, ...]) -> SharedLayouts:
    """How stages hold the weights that exactly they share."""
    held = {
        stage: {one.sources: one.layout for one in _trained(weights[stage]) if one.stages == stages} for stage in stages
    }
    for sources, layout in held[stages[0]].items():
        if any(sources not in others for others in held.values()):
            raise UserError(f"{layout.name} is stored otherwise in the stages {stages} that share it")
    return held


def _boundary(layer: Layer) -> BoundaryTensor:
    """What a layer gives, of one sample: rows by features (images: all elements of one)."""
    features = edge_shape(layer, 1)[1]
    return BoundaryTensor((layer.output_elements // features, features), flow.float32)
