"""The planned stages of a pipeline on this rank: stages whose layers have strategies of their own.

A slot passes through a stage as a micro-batch passes through an applied plan (`..stage`), on the ranks of the stage's worker.
Weights are this rank's shards, in the blocked layouts of `..comm.layouts`. Weight versions and optimizers treat them as ordinary
tensors, so the optimizer has to be element-wise. Gradients are summed by `.gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.pricing import edge_shape, row_features

from ..backend import HOST, Backend
from ..comm.parameter_layouts import ParameterLayout
from ..load import load_oneflow
from ..parameters import whole_value
from ..runningstats import running_shapes
from ..setting import Batch
from ..shards import readable_weights
from ..stage.model import PlannedModel, StageWeights, StoredWeight
from ..stage.output import whole_output
from ..stage.stage import Stage, rows_of
from ..stage.tracing import Measure, StageTracer, TracedSection
from ..stepping import Stepper
from ..userparameters import values_of
from .actions import BoundaryTensor, Run
from .checkpoint import Entry
from .data import BatchSource, SlotData
from .gradients import GradientSums, StageWeight, shared_layouts
from .lowering import Lowered
from .slot_stages import SlotStages
from .weights import ReplicaWeights

flow: Any = load_oneflow()

__all__ = ["PlannedStages"]

Tensor = Any


class PlannedStages(SlotStages):
    """The planned stages of this rank's worker; implements `work.TrainableStages`.

    Args:
        lowered: The lowered schedule.
        rank: This rank, counted over the job.
        model: The whole model with the plans of its stages.
        batch: Source of the micro-batches.
        loss_of: Returns the mean loss of a micro-batch, given the whole output of a model that does not end in a loss.
        backend: Device and types.

    Raises:
        UserError: The model does not end in a loss and ``loss_of`` is not given, or its layers cannot be run at their strategies.
    """

    def __init__(
        self,
        lowered: Lowered,
        rank: int,
        model: PlannedModel,
        batch: BatchSource,
        loss_of: Callable[[Tensor], Tensor] | None = None,
        backend: Backend = HOST,
    ) -> None:
        schedule, ranks = lowered.schedule, lowered.ranks
        if not model.has_loss and loss_of is None:
            last = model.graph.layers[-1].describe()
            raise UserError(f"the model ends in {last}; to be trained in a pipeline it should end in a loss")
        weights = model.weights()
        worker = ranks.worker_of(rank)
        members = ranks.ranks_of(worker)
        self._backend = backend
        self._rank, self._rank_in_worker = rank, ranks.index_of(rank)
        self._stepper = Stepper(len(members), backend, members.start)
        self._model = model
        self._loss_of = None if model.has_loss else loss_of
        self._slot_rows = lowered.slot_rows
        self._holding, self._worker = lowered.holding, worker
        own_stages = sorted({stage for _, stage in schedule.stages_on(worker)})
        self._stages = {stage: Stage(model, stage, weights, self._stepper) for stage in own_stages}
        self._initial_values = values_of(model.module, Stepper(flow.env.get_world_size(), HOST))
        self._frozen = {stage: self._initial_shards(stage, are_trained=False) for stage in own_stages}
        self._are_divided = [any(w.layout.zero for w in _trained_weights(stage_weights)) for stage_weights in weights]
        self._shapes = [stage_weights.shapes() for stage_weights in weights]
        sums = GradientSums(
            self._stepper,
            [[ranks.ranks_of(worker) for worker in workers] for workers in schedule.placement],
            {s: [StageWeight(w.layout, w.stages) for w in _trained_weights(weights[s])] for s in own_stages},
            shared_layouts(_shared_weights(weights)),
        )
        boundaries = [
            _boundary_tensor(
                stage.layers(model.graph)[-1], lowered.holding.shape(number)[0] // lowered.slot_rows, backend
            )
            for number, stage in enumerate(model.stages[:-1])
        ]
        data = SlotData(lowered.schedule, lowered.slots_per_micro_batch, lowered.slot_rows, batch)
        super().__init__(boundaries, data, sums, reports=self._rank_in_worker == 0)

    @property
    def stepper(self) -> Stepper:
        """The ranks of this rank's worker, with the log of the steps that they ran."""
        return self._stepper

    # ---- Computing ---------------------------------------------------------------------------------------------------

    def stage_function(self, run: Run, weights: Sequence[Tensor]) -> Callable[[Any, int], Tensor]:
        stage = self._stages[run.task.stage]
        is_last = run.task.stage == len(self._model.stages) - 1
        weights = self._with_frozen(run.task.stage, weights)

        def evaluate(x: Tensor | None, slot: int) -> Tensor:
            y = stage.run(x, weights, self._batch(stage, slot))
            if not is_last:
                y = self._as_sent(y, run.task.stage)
            if is_last and self._loss_of is not None:
                y = self._loss_of(whole_output(y, stage, self._slot_rows).to(self._backend.master))
            if flow.is_grad_enabled() and not y.requires_grad:
                y.requires_grad_(True)  # a frozen first stage: its backward pass ends at this tensor
            return y

        return evaluate

    def _as_sent(self, y: Tensor, number: int) -> Tensor:
        """Return the output of a stage as rows of the boundary's matrix: of samples, or those of samples that ranks share."""
        stage = self._model.stages[number]
        layer = stage.layers(self._model.graph)[-1]
        if self._holding.shape(number)[0] > self._slot_rows:
            return rows_of(y, layer, stage.strategies[layer.name])
        return y.reshape(-1, self.boundaries[number].row_shape[0], y.shape[2])

    def _batch(self, stage: Stage, slot: int) -> Batch:
        """Return the data of a slot that the stage reads."""
        arrays = self.data.arrays(slot) if stage.reads_arguments else []
        step = self.data.global_number(slot) + 1 if self._model.module.training else None
        return stage.batch(arrays, self._slot_rows, step)

    def _with_frozen(self, stage: int, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return all weights of a stage in their stored order, given the trained ones."""
        if not self._frozen[stage]:
            return weights
        trained = iter(weights)
        stored = self._stages[stage].weights.stored
        return [next(trained) if weight.is_trained else self._frozen[stage][name] for name, weight in stored.items()]

    def layouts(self, stage: int) -> dict[str, ParameterLayout]:
        """Return the layouts of the weights that the ranks of a stage store, by name."""
        return {name: weight.layout for name, weight in self._stages[stage].weights.stored.items()}

    def trace(self, measure: Measure | None) -> list[TracedSection]:
        """Run one slot forward and backward through each stage in turn, layer by layer, on the ranks of the first pipeline.

        Every stage reads random numbers in place of the previous stage's output, so that it can be measured separately. If there is
        one stage, its gradients are then summed over the ranks, layer by layer, as they are priced. (In a pipeline, replicas and
        other stages take part in the sums.) Gradients are discarded.

        Args:
            measure: Called once for every section, on all ranks of the job in the same order. Ranks outside of the section's stage
                call it with an empty function.
        """
        sections: list[TracedSection] = []
        for number, (stage, worker) in enumerate(zip(self._model.stages, self._holding.schedule.placement[0])):
            names = [layer.name for layer in stage.layers(self._model.graph)]
            if worker == self._worker:
                sections += self._trace_stage(number, measure)
                continue
            if measure is not None and self._are_divided[number]:
                measure(lambda: None)
            for phase, order in (("forward", names), ("backward", names[::-1])):
                for name in order:
                    traffic = None if measure is None else measure(lambda: None)[1]
                    sections.append(TracedSection(name, phase, (), traffic))
        return sections

    def _trace_stage(self, number: int, measure: Measure | None) -> list[TracedSection]:
        stage, x = self._stages[number], None
        compute = self._backend.compute
        values = self.initial_values(number)
        leaves = [value.to(compute).detach().requires_grad_(True) for value in values.values()]
        layouts = [stage.weights.stored[name].layout for name in values]

        def gather() -> list[Any]:
            return readable_weights(leaves, layouts, self._stepper)

        # What divided weights send to be gathered belongs to no section.
        weights = measure(gather)[0] if measure is not None and self._are_divided[number] else gather()
        if stage.source is not None:
            block = self._holding.block(self._rank, number, is_leaving=False)
            shape = (len(block.rows), *self.boundaries[number - 1].row_shape[:-1], len(block.columns))
            x = self._backend.activation(np.random.default_rng(self._rank).standard_normal(shape, dtype=np.float32))
        tracer = StageTracer(stage, self._with_frozen(number, weights), measure)
        tracer.run(x, self._batch(stage, 0))
        if len(self._model.stages) == 1:
            tracer.sum_gradients()
        return tracer.sections

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        return self._initial_shards(stage, are_trained=True)

    def _initial_shards(self, stage: int, are_trained: bool) -> dict[str, Tensor]:
        """Return this rank's initial shards of a stage's trained or frozen weights, by name."""
        shards = {}
        for name, weight in self._stages[stage].weights.stored.items():
            if weight.is_trained == are_trained:
                whole = weight.layout.joined(self._initial_values)
                # Trained weights have the master type, of which replicas make copies to compute with.
                dtype = self._backend.master if are_trained else self._backend.compute
                shards[name] = self._backend.tensor(weight.layout.stored(whole, self._rank_in_worker), dtype)
        return shards

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        buffers = {
            f"{layer.modules[0]}.{name}": shape
            for layer in self._model.stages[stage].layers(self._model.graph)
            if layer.kind == "batch_norm"
            for name, shape in running_shapes(self._model.module, layer.modules[0]).items()
        }
        return {**self._shapes[stage], **buffers}

    def buffers(self, stage: int) -> dict[str, Entry]:
        """Return the running statistics of a stage, named as in `shapes`; all ranks of the stage call."""
        return {
            f"{path}.{name}": {"value": value}
            for path, (running, layout) in self._stages[stage].statistics.items()
            for name, value in running.whole(layout, self._stepper).items()
        }

    def frozen(self, stage: int) -> dict[str, Entry]:
        """Return this rank's shards of a stage's frozen weights, by the names of the stored weights."""
        return {name: {"value": np.array(shard.numpy())} for name, shard in self._frozen[stage].items()}

    def whole(self, stage: int, kept: Mapping[str, Entry]) -> dict[str, Entry]:
        result: dict[str, Entry] = {}
        for name, entry in kept.items():
            layout = self._stages[stage].weights.stored[name].layout
            for key, value in entry.items():
                if value.shape == entry["value"].shape:
                    parts = layout.parts(whole_value(layout, self._backend.tensor(value), self._stepper))
                else:  # optimizer state that is not element-wise, such as a step count
                    parts = {source: value for source, _ in layout.sources}
                for source, part in parts.items():
                    result.setdefault(source, {})[key] = part
        return result

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        shards: dict[str, Entry] = {}
        for name, weight in self._stages[stage].weights.stored.items():
            parts = {source: entries[source] for source, _ in weight.sources}
            first = next(iter(parts.values()))
            shards[name] = dict(first)
            for key, value in first.items():
                if value.shape == first["value"].shape:
                    whole = weight.layout.joined({source: part[key] for source, part in parts.items()})
                    shards[name][key] = weight.layout.stored(whole, self._rank_in_worker)
        for path, (running, _) in self._stages[stage].statistics.items():
            names = running_shapes(self._model.module, path)
            running.load({name: entries[f"{path}.{name}"]["value"] for name in names})
        compute = self._backend.compute
        self._frozen[stage] = {n: self._backend.tensor(shards[n]["value"], compute) for n in self._frozen[stage]}
        replica.restore(shards)


def _trained_weights(weights: StageWeights) -> list[StoredWeight]:
    return [weight for weight in weights.stored.values() if weight.is_trained]


def _shared_weights(weights: Sequence[StageWeights]) -> list[dict[int, ParameterLayout]]:
    """Return the trained weights that several stages share: the layout of each in every stage that has it, by stage."""
    shared: dict[tuple[tuple[str, int], ...], dict[int, ParameterLayout]] = {}
    stages_of: dict[tuple[tuple[str, int], ...], tuple[int, ...]] = {}
    for number, stage_weights in enumerate(weights):
        for weight in _trained_weights(stage_weights):
            if len(weight.stages) > 1:
                shared.setdefault(weight.sources, {})[number] = weight.layout
                stages_of[weight.sources] = weight.stages
    for sources, layouts in shared.items():
        if tuple(layouts) != (stages := stages_of[sources]):
            name = next(iter(layouts.values())).name
            raise UserError(
                f"{name} is shared by the stages {stages}, but not stored together with the same parameters in all of them"
            )
    return list(shared.values())


def _boundary_tensor(layer: Layer, rows_per_sample: int, backend: Backend) -> BoundaryTensor:
    """Return the shape and type of a layer's output for one sample, or for one of ``rows_per_sample`` rows: (rows, features)."""
    features = edge_shape(layer, 1)[1] if rows_per_sample == 1 else row_features(layer)
    return BoundaryTensor((layer.output_elements // features // rows_per_sample, features), backend.compute)
