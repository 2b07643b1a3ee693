"""What stages with plans send, predicted by the price list: the steps of layers and edges, the messages between stages, the sums.

Everything is counted over all ranks, for a whole schedule, in single precision (CPU ranks have no half precision). Not counted is
what nobody prices: the sum of a loss's mean over the ranks, one number. Needs no OneFlow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Collective, Step, all_reduce_steps, gather_steps, scatter_steps
from autoddl.costmodel.crossing import crossing
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.graph import Layer, LayerGraph, Parameter
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.workload import Workload

from ...communication import boundary_crossings
from ...schedule import Kind, Schedule
from ..stage.plan import StagePlan, strategies_of
from .slots import slots_per_micro_batch
from .stage_plans import stage_layouts

__all__ = ["Sent", "StageTraffic", "gradient_sums", "layer_steps", "passes", "sent_messages", "stage_traffic"]

_ITEMSIZE = 4


@dataclass(frozen=True)
class Sent:
    """Bytes, in so many messages."""

    num_bytes: float = 0.0
    num_messages: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.num_bytes + other.num_bytes, self.num_messages + other.num_messages)

    def __mul__(self, factor: float) -> Sent:
        return Sent(self.num_bytes * factor, self.num_messages * factor)


@dataclass(frozen=True)
class StageTraffic:
    """What all ranks send in one run of a schedule.

    Attributes:
        inside: per stage, while it computes.
        between: per boundary between two stages, in both directions.
        gradients: per stage, in sums over its ranks, over its replicas, and with stages that share its weights.
    """

    inside: tuple[Sent, ...]
    between: tuple[Sent, ...]
    gradients: tuple[Sent, ...]

    @property
    def all(self) -> Sent:
        return sum((*self.inside, *self.between, *self.gradients), Sent())


def stage_traffic(
    schedule: Schedule, graph: LayerGraph, stages: Sequence[StagePlan], micro_batch_rows: int, cluster: Cluster
) -> StageTraffic:
    """The prediction.

    Args:
        micro_batch_rows: samples in a micro-batch.
        cluster: any: only steps are asked for, which do not depend on how fast they are.

    Raises:
        UserError: stages do not fit the graph.
    """
    layouts = stage_layouts(graph, stages)
    per_micro_batch = slots_per_micro_batch(schedule)
    rows = micro_batch_rows // per_micro_batch
    steps = layer_steps(schedule, graph, stages, micro_batch_rows, cluster)
    num_passes = [passes(schedule, stage) for stage in range(schedule.num_stages)]
    inside, gradients, between = [], [], []
    for number in range(len(stages)):
        names = [layer.name for layer in stages[number].layers(graph)]
        forward, backward = ([s for name in names for s in steps[name, phase]] for phase in ("forward", "backward"))
        num_forward, num_backward = (per_micro_batch * count for count in num_passes[number])
        inside.append(_sent(forward, stages[number]) * num_forward + _sent(backward, stages[number]) * num_backward)
        steps_of_sums, between_ranks = gradient_sums(graph, stages, number, schedule.num_pipelines)
        summed = _sent(steps_of_sums, stages[number]) + between_ranks
        gradients.append(summed * (schedule.num_pipelines * schedule.num_updates))
    for boundary, counts in enumerate(boundary_crossings(schedule)):
        layer = stages[boundary].layers(graph)[-1]
        ends = layouts[boundary].leaving, layouts[boundary + 1].arriving
        sent = Sent()
        for (source, target), count in zip((ends, ends[::-1]), counts):
            pieces = crossing(source, target, (rows, layouts[boundary].columns))
            num_bytes = rows * layer.output_elements * _ITEMSIZE * per_micro_batch
            sent += Sent(num_bytes, len(pieces)) * count
        between.append(sent)
    return StageTraffic(tuple(inside), tuple(between), tuple(gradients))


def passes(schedule: Schedule, stage: int, worker: int | None = None) -> tuple[float, float]:
    """Micro-batches that go forward and back through a stage (on one of its workers), each time that they do: recomputations go
    forward again, and the two parts of a backward each go back (but the first stage's input has no gradient)."""
    forward = backward = 0.0
    for number, _, task in schedule.tasks():
        if task.stage == stage and worker in (None, number):
            if task.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                forward += task.part.size
            elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) or (task.kind is Kind.BACKWARD_INPUT and stage):
                backward += task.part.size
    return forward, backward


def layer_steps(
    schedule: Schedule, graph: LayerGraph, stages: Sequence[StagePlan], micro_batch_rows: int, cluster: Cluster
) -> dict[tuple[str, str], tuple[Step, ...]]:
    """Per layer and phase what each rank of the layer's stage takes part in: ``forward`` and ``backward``, with the redistributions
    of its inputs, for one slot (a micro-batch, or half of one where the schedule works on halves); ``gradient``, for one update,
    where the gradients of each layer are summed by themselves (`gradient_sums`: where not). Arguments as of `stage_traffic`."""
    rows = micro_batch_rows // slots_per_micro_batch(schedule)
    cluster = replace(cluster, device=replace(cluster.device, peak_flops={"float32": 1e12}))
    found: dict[tuple[str, str], tuple[Step, ...]] = {}
    for number, plan in enumerate(stages):
        workload = Workload(rows, rows, "float32", "sgd", recompute=plan.recompute)
        strategies = strategies_of(graph, stages, number)
        for layer in plan.layers(graph):
            strategy, producers = strategies[layer.name], graph.inputs(layer.name)
            work = layer_work(layer, strategy, cluster, workload, rows, not producers)
            moves = [
                step
                for name in producers
                for step in edge_steps(graph[name], strategies[name], strategy, workload, rows)
            ]
            found[layer.name, "forward"] = (*moves, *work.forward)
            found[layer.name, "backward"] = (*work.backward, *(step.adjoint() for step in moves))
            found[layer.name, "gradient"] = tuple(work.gradient)
    return found


def gradient_sums(
    graph: LayerGraph, stages: Sequence[StagePlan], number: int, num_replicas: int
) -> tuple[tuple[Step, ...], Sent]:
    """What one replica of a stage sends for one update: the steps that each of its ranks takes part in inside the stage, and what
    all of its ranks send to ranks of replicas, and of other stages that have the same weights.

    Weights that the same stages have, and that are summed over the same axes, are summed as one vector.
    """
    plan = stages[number]
    apart = Sent()
    holders = _holders(graph, stages)
    vectors: dict[tuple[frozenset[int], tuple[Axis, ...]], float] = {}
    """Bytes of a rank's weights, by the stages that have them and the axes that they are summed over."""
    for layer in plan.layers(graph):
        strategy = plan.strategies[layer.name]
        for parameter in layer.parameters:
            sharing = holders.pop(_owner(graph, layer, parameter), None)
            if sharing is None:
                continue  # stored once
            axes = strategy.axes(0, kind_of(layer.kind).is_lookup)
            parts = strategy.p1 if strategy.summa else strategy.p1 * strategy.p2
            if strategy.summa and len(parameter.shape) > 1:
                axes, parts = (), strategy.num_devices
            shard = parameter.num_elements / parts * _ITEMSIZE
            vectors[frozenset(sharing), axes] = vectors.get((frozenset(sharing), axes), 0.0) + shard
            apart += Sent(shard, 1) * ((len(sharing) - 1) * plan.num_ranks)
    inside: list[Step] = []
    for (_, axes), nbytes in vectors.items():
        if num_replicas == 1:
            inside += all_reduce_steps(axes, nbytes)
            continue
        slices = prod(axis.size for axis in axes)
        inside += (*scatter_steps(axes, nbytes), *gather_steps(axes, nbytes))
        apart += _sent([Step(Collective.ALL_REDUCE, Axis(num_replicas, 1), nbytes / slices)], plan)
    return tuple(inside), apart


def _owner(graph: LayerGraph, layer: Layer, parameter: Parameter) -> str:
    """The layer whose parameter it is in the end."""
    while parameter.tied_to is not None:
        layer = graph[parameter.tied_to]
        size = parameter.num_elements
        parameter = next(other for other in layer.parameters if other.num_elements == size)
    return f"{layer.name}/{parameter.name}"


def _holders(graph: LayerGraph, stages: Sequence[StagePlan]) -> dict[str, set[int]]:
    """The stages that have a parameter, by its owner."""
    holders: dict[str, set[int]] = {}
    for number, plan in enumerate(stages):
        for layer in plan.layers(graph):
            for parameter in layer.parameters:
                holders.setdefault(_owner(graph, layer, parameter), set()).add(number)
    return holders


def _sent(steps: Iterable[Step], plan: StagePlan) -> Sent:
    """What the stage's ranks send in steps that each of them takes part in."""
    moving = [step for step in steps if step.axis.size > 1]
    return Sent(sum(s.mean_sent_bytes for s in moving), sum(sent_messages(s) for s in moving)) * plan.num_ranks


def sent_messages(step: Step) -> float:
    """The messages that a rank sends in a step, on average.

    A sum of fewer elements than ranks has fewer pieces to pass around: each makes one hop less than there are ranks, twice.
    """
    pieces: float = step.axis.size
    if step.collective is Collective.ALL_REDUCE:
        pieces = min(pieces, step.nbytes / _ITEMSIZE)
    return step.mean_messages * pieces / step.axis.size
