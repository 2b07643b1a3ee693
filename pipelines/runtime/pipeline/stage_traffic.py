"""Prediction of the bytes and messages that the ranks of planned stages send in one run of a schedule. Needs no OneFlow.

Three kinds of traffic are counted, by the steps that the cost model prices:

- inside a stage: collectives of its layers, and redistributions between them;
- between stages: activations and their gradients;
- gradients of weights: sums over the ranks of a stage, over its replicas, and over stages that share weights.

Counts are totals over all ranks. The gathering of the mean loss, one number of each rank, is not counted: it has no price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from autoddl.costmodel.collectives import Collective, Step, all_reduce_steps, gather_steps, scatter_steps
from autoddl.costmodel.crossing import crossing
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.graph import Layer, LayerGraph, Parameter, tied_parameter
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layer import zero_of
from autoddl.costmodel.layerwork import layer_work, repeats_redistributions
from autoddl.costmodel.precision import PRECISIONS, Precision
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.strategy import shard_axes
from autoddl.costmodel.workload import Workload

from ...communication import boundary_crossings
from ...schedule import Kind, Schedule
from ..stage.plan import StagePlan, strategies_of
from .slots import slots_per_micro_batch
from .stage_plans import stage_layouts

__all__ = [
    "Sent",
    "StageTraffic",
    "agreements",
    "gradient_sums",
    "layer_steps",
    "passes",
    "sent_messages",
    "stage_traffic",
]

#: The default of functions of this module.
_SINGLE = PRECISIONS["float32"]
#: Bytes of a rank's vote on a decision, and of the count of those that skip an update.
_FLAG_BYTES, _COUNT_BYTES = 4, 8
#: Bytes of the smallest element that is summed.
_MIN_ITEMSIZE = 4


@dataclass(frozen=True)
class Sent:
    """An amount of traffic: bytes, and the number of messages that carry them.

    >>> Sent(100, 1) + Sent(20, 2) * 3
    Sent(num_bytes=160, num_messages=7)
    """

    num_bytes: float = 0.0
    num_messages: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.num_bytes + other.num_bytes, self.num_messages + other.num_messages)

    def __mul__(self, factor: float) -> Sent:
        return Sent(self.num_bytes * factor, self.num_messages * factor)


@dataclass(frozen=True)
class StageTraffic:
    """The traffic of all ranks in one run of a schedule.

    Attributes:
        inside: For each stage, the traffic of its forward and backward passes.
        between: For each boundary between two stages, the traffic in both directions.
        gradients: For each stage, the traffic of gradient sums over its ranks, over its replicas, and with stages that share its
            weights.
    """

    inside: tuple[Sent, ...]
    between: tuple[Sent, ...]
    gradients: tuple[Sent, ...]

    @property
    def all(self) -> Sent:
        """Total traffic."""
        return sum((*self.inside, *self.between, *self.gradients), Sent())


def stage_traffic(
    schedule: Schedule,
    graph: LayerGraph,
    stages: Sequence[StagePlan],
    micro_batch_rows: int,
    precision: Precision = _SINGLE,
) -> StageTraffic:
    """Predict the traffic of one run of a schedule.

    Args:
        schedule: Schedule that is run.
        graph: Layer graph of the model.
        stages: Plans of the stages.
        micro_batch_rows: Samples in a micro-batch.
        precision: Types of activations and of gradient sums.

    Raises:
        UserError: The stages do not fit the graph.
    """
    per_micro_batch = slots_per_micro_batch(schedule)
    rows = micro_batch_rows // per_micro_batch
    layouts = stage_layouts(graph, stages, rows)
    steps = layer_steps(schedule, graph, stages, micro_batch_rows, precision)
    num_passes = [passes(schedule, stage) for stage in range(schedule.num_stages)]
    inside, gradients, between = [], [], []
    for number in range(len(stages)):
        names = [layer.name for layer in stages[number].layers(graph)]
        forward = [step for name in names for step in steps[name, "forward"]]
        backward = [step for name in names for step in steps[name, "backward"]]
        num_forward, num_backward = (per_micro_batch * count for count in num_passes[number])
        inside.append(
            _sent_by_stage(forward, stages[number]) * num_forward
            + _sent_by_stage(backward, stages[number]) * num_backward
        )
        steps_of_sums, between_ranks = gradient_sums(graph, stages, number, schedule.num_pipelines, precision)
        summed = _sent_by_stage(steps_of_sums, stages[number]) + between_ranks
        gradients.append(summed * (schedule.num_pipelines * schedule.num_updates))
    for boundary, counts in enumerate(boundary_crossings(schedule)):
        layer = stages[boundary].layers(graph)[-1]
        ends = layouts[boundary].leaving, layouts[boundary + 1].arriving
        num_bytes = rows * layer.output_elements * precision.itemsize * per_micro_batch
        sent = Sent()
        # Activations go forward, gradients backward.
        for (source, target), count in zip((ends, ends[::-1]), counts):
            pieces = crossing(source, target, (rows * layouts[boundary].rows_per_sample, layouts[boundary].columns))
            sent += Sent(num_bytes, len(pieces)) * count
        between.append(sent)
    return StageTraffic(tuple(inside), tuple(between), tuple(gradients))


def passes(schedule: Schedule, stage: int, worker: int | None = None) -> tuple[float, float]:
    """Count the forward and backward passes of a stage in one run of a schedule, in micro-batches.

    A recomputation counts as a forward pass. Of a split backward pass each part counts as one, except the input part in the first
    stage, whose input has no gradient.

    Args:
        schedule: The schedule.
        stage: Number of the stage.
        worker: Count the passes on this worker only; None: on all workers.

    Returns:
        (forward passes, backward passes); a task on half a micro-batch counts 0.5.
    """
    forward = backward = 0.0
    for number, _, task in schedule.tasks():
        if task.stage == stage and worker in (None, number):
            if task.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                forward += task.part.size
            elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) or (task.kind is Kind.BACKWARD_INPUT and stage):
                backward += task.part.size
    return forward, backward


def layer_steps(
    schedule: Schedule,
    graph: LayerGraph,
    stages: Sequence[StagePlan],
    micro_batch_rows: int,
    precision: Precision = _SINGLE,
) -> dict[tuple[str, str], tuple[Step, ...]]:
    """Return the communication steps of each layer and phase, in which each rank of the layer's stage takes part.

    The arguments are those of `stage_traffic`.

    Returns:
        Steps by (layer name, phase). ``forward`` and ``backward`` are of one slot: a micro-batch, or half of one if the schedule
        works on halves. They include the redistributions of the layer's inputs. ``gradient`` is of one update, with the gradients
        of each layer summed separately; see `gradient_sums` for the pipeline, which sums those of several layers together.
    """
    rows = micro_batch_rows // slots_per_micro_batch(schedule)
    steps: dict[tuple[str, str], tuple[Step, ...]] = {}
    for number, plan in enumerate(stages):
        workload = Workload(rows, rows, precision.name, "sgd", recompute=plan.recompute, attention=plan.attention)
        strategies, places = strategies_of(graph, stages, number), plan.places(graph)
        for layer in plan.layers(graph):
            strategy, producers = strategies[layer.name], graph.inputs(layer.name)
            work = layer_work(layer, strategy, workload, rows, places[layer.name])
            moves = [
                step
                for name in producers
                for step in edge_steps(graph[name], strategies[name], strategy, workload, rows)
            ]
            steps[layer.name, "forward"] = (*moves, *work.forward)
            repeated = moves if repeats_redistributions(workload, places[layer.name]) else []
            steps[layer.name, "backward"] = (*repeated, *work.backward, *(step.adjoint() for step in moves))
            steps[layer.name, "gradient"] = tuple(work.gradient)
    return steps


def gradient_sums(
    graph: LayerGraph, stages: Sequence[StagePlan], number: int, num_replicas: int, precision: Precision = _SINGLE
) -> tuple[tuple[Step, ...], Sent]:
    """Return the traffic of the gradient sums of one replica of a stage, for one update.

    Gradients that are summed over the same axes, of weights that the same stages share, are concatenated and summed as one vector.
    Weights that are divided along the same axes are gathered as one vector, whatever stages share them.

    Args:
        graph: Layer graph of the model.
        stages: Plans of all stages.
        number: Number of the stage.
        num_replicas: Replicas of each stage.
        precision: Types of gradient sums.

    Returns:
        (steps inside the stage, in which each of its ranks takes part; traffic of all its ranks to other replicas, and to other
        stages that share its weights).
    """
    plan = stages[number]
    to_others = Sent()
    holders = _holders(graph, stages)
    # Bytes of one rank's gradients, by the stages that share the weights and the axes over which the gradients are summed.
    vectors: dict[tuple[frozenset[int], tuple[Axis, ...], int, bool], float] = {}
    places = plan.places(graph)
    for layer in plan.layers(graph):
        strategy = plan.strategies[layer.name]
        for parameter in layer.parameters:
            sharing = holders.pop(_owner(graph, layer, parameter), None)
            if sharing is None or parameter.frozen:
                continue  # it has no gradient, or an earlier layer of the stage shares the parameter, which is stored once
            axes = strategy.copy_axes(kind_of(layer.kind).is_lookup)
            parts = strategy.p1 if strategy.summa else strategy.p1 * strategy.p2 * strategy.expert_parts
            if strategy.summa and len(parameter.shape) > 1:
                axes, parts = (), strategy.num_devices
            shard = parameter.num_elements / parts * precision.communication_itemsize
            # Vectors are not divided inside a training step.
            zero = (
                zero_of(layer, min(strategy.zero, 3 if len(parameter.shape) > 1 else 2), places[layer.name])
                if axes
                else 0
            )
            key = (frozenset(sharing), axes, zero, strategy.hybrid)
            vectors[key] = vectors.get(key, 0.0) + shard
            # Of a weight that other stages have too, each rank gets their sums for the elements that it updates.
            updated = shard / prod(axis.size for axis in axes) if zero else shard
            to_others += Sent(updated, 1) * ((len(sharing) - 1) * plan.num_ranks)
    inside: list[Step] = []
    # Bytes of the weights that are gathered together after the update.
    divided: dict[tuple[tuple[Axis, ...], int, bool], float] = {}
    for (_, axes, zero, hybrid), nbytes in vectors.items():
        num_slices = prod(axis.size for axis in axes)
        if zero:
            inner, outer = shard_axes(axes, hybrid) if zero > 1 else ((), axes)
            inside += scatter_steps(outer, nbytes / prod(axis.size for axis in inner))
            divided[axes, zero, hybrid] = divided.get((axes, zero, hybrid), 0.0) + nbytes
        elif num_replicas == 1:
            inside += all_reduce_steps(axes, nbytes)
        else:
            # Scatter inside the stage, all-reduce each slice over the replicas, gather inside the stage.
            inside += (*scatter_steps(axes, nbytes), *gather_steps(axes, nbytes))
        if num_replicas == 1:
            continue
        to_others += _sent_by_stage([Step(Collective.ALL_REDUCE, Axis(num_replicas, 1), nbytes / num_slices)], plan)
    for (axes, zero, hybrid), nbytes in divided.items():
        if zero == 3:  # each layer gathers the rest
            inner, axes = shard_axes(axes, hybrid)
            nbytes /= prod(axis.size for axis in inner)
        inside += gather_steps(axes, nbytes)
    return tuple(inside), to_others


def agreements(schedule: Schedule, precision: Precision) -> Sent:
    """Return the traffic of the decisions in one run whether updates are skipped (see `order`); none if losses are not scaled."""
    if not precision.scales_losses:
        return Sent()
    num_ranks = sum(schedule.widths)
    if schedule.is_synchronous:
        return _all_reduced(num_ranks, _FLAG_BYTES) * schedule.num_updates
    # The ranks of a worker decide for each stage; at last all ranks tell each other which updates were skipped.
    sent = _all_reduced(num_ranks, _COUNT_BYTES * schedule.num_updates)
    for worker, width in enumerate(schedule.widths):
        sent += _all_reduced(width, _FLAG_BYTES) * (len(schedule.stages_on(worker)) * schedule.num_updates)
    return sent


def _all_reduced(num_ranks: int, nbytes: float) -> Sent:
    """Return the traffic of an all-reduce over so many ranks."""
    step = Step(Collective.ALL_REDUCE, Axis(num_ranks, 1), nbytes)
    return Sent(step.mean_sent_bytes, sent_messages(step)) * num_ranks if num_ranks > 1 else Sent()


def _owner(graph: LayerGraph, layer: Layer, parameter: Parameter) -> str:
    """Return the name of the parameter that a parameter is tied to, directly or through others: ``LAYER/PARAMETER``."""
    while parameter.tied_to is not None:
        layer, parameter = graph[parameter.tied_to], tied_parameter(graph, parameter)
    return f"{layer.name}/{parameter.name}"


def _holders(graph: LayerGraph, stages: Sequence[StagePlan]) -> dict[str, set[int]]:
    """Return the stages that use each parameter, by the name that `_owner` returns."""
    holders: dict[str, set[int]] = {}
    for number, plan in enumerate(stages):
        for layer in plan.layers(graph):
            for parameter in layer.parameters:
                holders.setdefault(_owner(graph, layer, parameter), set()).add(number)
    return holders


def _sent_by_stage(steps: Iterable[Step], plan: StagePlan) -> Sent:
    """Return the traffic of all ranks of a stage in steps that each of them takes part in."""
    moving = [step for step in steps if step.axis.size > 1]
    return Sent(sum(s.mean_sent_bytes for s in moving), sum(sent_messages(s) for s in moving)) * plan.num_ranks


def sent_messages(step: Step, number_bytes: int = _MIN_ITEMSIZE, element_bytes: int = _MIN_ITEMSIZE) -> float:
    """Return the mean number of messages that a rank sends in a step.

    An all-reduce is a ring in which each of p pieces makes p - 1 hops twice. A vector of fewer than p elements has fewer pieces.

    Args:
        step: The step.
        number_bytes: Bytes of a single number, such as a loss; in mixed precision it has the master type.
        element_bytes: Bytes of an element of a vector.
    """
    pieces: float = step.axis.size
    if step.collective is Collective.ALL_REDUCE:
        pieces = 1 if step.nbytes == number_bytes else min(pieces, step.nbytes / element_bytes)
    return step.mean_messages * pieces / step.axis.size
