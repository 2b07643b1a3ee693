"""What the cost model says that a plan sends, phase by phase.

    forward, backward   of one slot (a micro-batch, or half of one where the schedule works on halves), with the redistributions
                        of the layer's inputs
    gradient            once per update; of an applied module, which sums the gradients of each layer by themselves.  A stage of a
                        pipeline sums those of all its layers as one vector, which is a part of a run alone

Ranks run in float32 (CPU ranks have no half precision that communicates), so bytes are those of a plan in float32, whatever
precision it was made for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Collective, Step, all_reduce_steps
from autoddl.costmodel.distribution import Axis, Distribution
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.redistribution import steps as steps_of
from autoddl.costmodel.sbp import Broadcast
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch
from autoddl.pipelines.runtime.pipeline.stage_traffic import Sent, gradient_sums, layer_steps, passes, stage_traffic

from .fitting import FittedPlan

__all__ = [
    "ELEMENTWISE_LOSSES",
    "PHASES",
    "Prediction",
    "RankSteps",
    "Steps",
    "missing_steps",
    "output_steps",
    "predict",
    "unpriced_steps",
]

PHASES = ("forward", "backward", "gradient")
Steps = tuple[Step, ...]
#: Epilogues that end a model.
ELEMENTWISE_LOSSES = frozenset({"mse_loss", "l1_loss"})
_ITEMSIZE = 4


@dataclass(frozen=True)
class RankSteps:
    """The steps that each of some ranks takes part in, with a price and without."""

    priced: Steps = ()
    unpriced: Steps = ()

    def __add__(self, other: RankSteps) -> RankSteps:
        return RankSteps(self.priced + other.priced, self.unpriced + other.unpriced)

    def __mul__(self, times: int) -> RankSteps:
        return RankSteps(self.priced * times, self.unpriced * times)


@dataclass(frozen=True)
class Prediction:
    """What a plan sends.

    Attributes:
        sections: per layer and phase, by each rank of the layer's stage; no phase ``gradient`` in pipelines.
        inside, gradients: bytes of a run of the schedule per stage, on all its ranks: while it computes, and in sums.
        between: bytes of a run per boundary between stages, in both directions.
        workers: of a run, by each rank of each worker.
        apart: what goes from rank to rank besides these steps, in a run.
    """

    sections: Mapping[tuple[str, str], RankSteps]
    inside: tuple[float, ...]
    gradients: tuple[float, ...]
    between: tuple[float, ...]
    workers: tuple[RankSteps, ...]
    apart: Sent


def predict(fitted: FittedPlan, cluster: Cluster) -> Prediction:
    """What ranks send that run a plan.

    Args:
        cluster: any: only steps are asked for, which do not depend on how fast they are.
    """
    graph, stages, schedule, workload = fitted.scaled.graph, fitted.stages, fitted.schedule, fitted.scaled.workload
    sections = _sections(fitted, cluster)
    between = stage_traffic(schedule, graph, stages, workload.micro_batch, cluster).between
    inside, gradients = [0.0] * len(stages), [0.0] * len(stages)
    workers = [RankSteps()] * schedule.num_workers
    apart = sum(between, Sent())
    for worker in range(schedule.num_workers):
        for _, number in schedule.stages_on(worker):
            stage = stages[number]
            computing, summing, between_ranks = RankSteps(), RankSteps(), Sent()
            # Forward and backward, as often as the schedule has them here.
            slots = slots_per_micro_batch(schedule)
            counts = [round(slots * count) for count in passes(schedule, number, worker)]
            for layer in stage.layers(graph):
                for phase, count in zip(PHASES, counts):
                    computing += sections[layer.name, phase] * count
            # Sums of gradients, layer by layer or all as one.
            if fitted.is_applied:
                for layer in stage.layers(graph):
                    summing += sections[layer.name, "gradient"]
                outputs = output_steps(graph, fitted.scaled.strategies, workload)
                computing += RankSteps(unpriced=outputs) * workload.num_micro_batches
            else:
                steps, between_ranks = gradient_sums(graph, stages, number, schedule.num_pipelines)
                summing = RankSteps(_moving(steps)) * schedule.num_updates
            workers[worker] += computing + summing
            inside[number] += _sent_bytes(computing, stage.num_ranks)
            gradients[number] += _sent_bytes(summing, stage.num_ranks) + between_ranks.num_bytes * schedule.num_updates
            apart += between_ranks * schedule.num_updates
    between_bytes = tuple(sent.num_bytes for sent in between)
    return Prediction(sections, tuple(inside), tuple(gradients), between_bytes, tuple(workers), apart)


def _sections(fitted: FittedPlan, cluster: Cluster) -> dict[tuple[str, str], RankSteps]:
    graph, schedule, strategies = fitted.scaled.graph, fitted.schedule, fitted.scaled.strategies
    priced = layer_steps(schedule, graph, fitted.stages, fitted.scaled.workload.micro_batch, cluster)
    return {
        (name, phase): RankSteps(_moving(steps), unpriced_steps(graph[name], strategies[name], phase))
        for (name, phase), steps in priced.items()
        if phase != "gradient" or fitted.is_applied
    }


def _sent_bytes(steps: RankSteps, num_ranks: int) -> float:
    return num_ranks * sum(step.mean_sent_bytes for step in steps.priced)


def unpriced_steps(layer: Layer, strategy: Strategy, phase: str) -> Steps:
    """What runs though nobody prices it: the sum of the loss's mean, one number; the gradients of a Summa layer's biases."""
    if phase == "forward" and layer.kind == "loss":
        return _moving([Step(Collective.ALL_REDUCE, axis, _ITEMSIZE) for axis in strategy.axes(0)])
    if phase == "forward" and ELEMENTWISE_LOSSES & set(layer.epilogue):
        return _moving([Step(Collective.ALL_REDUCE, Axis(strategy.num_devices, 1), _ITEMSIZE)])
    if phase == "gradient" and strategy.summa:
        biases = sum(p.num_elements for p in layer.parameters if len(p.shape) == 1)
        return _moving(all_reduce_steps(strategy.axes(0), _ITEMSIZE * biases / strategy.p1)) if biases else ()
    return ()


def output_steps(graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload) -> Steps:
    """What brings the output of a model without a loss to every rank, which nobody prices: what is done with it is the user's."""
    last = graph.layers[-1]
    if last.kind == "loss" or ELEMENTWISE_LOSSES & set(last.epilogue):
        return ()
    lying = strategies[last.name].activations
    everywhere = Distribution(lying.axes, (Broadcast(),) * len(lying.axes))
    shape = edge_shape(last, workload.micro_batch)
    return _moving(
        steps_of(redistribute(lying, everywhere, shape), _ITEMSIZE * workload.micro_batch * last.output_elements)
    )


def missing_steps(expected: Sequence[Step], ran: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """(expected steps that did not run, steps that ran unexpectedly); steps are equal up to the padding of all-reduces."""
    counts, unmatched = Counter(_moving(ran)), []
    for step in expected:
        if counts[step]:
            counts[step] -= 1
        else:
            unmatched.append(step)
    left, missing = list(counts.elements()), []
    for step in unmatched:
        found = next((other for other in left if _alike(step, other)), None)
        if found is None:
            missing.append(step)
        else:
            left.remove(found)
    return missing, left


def _alike(step: Step, other: Step) -> bool:
    same = (step.collective, step.axis.size, step.axis.stride) == (other.collective, other.axis.size, other.axis.stride)
    # A vector that is summed over several levels is padded to a whole number of elements per rank.
    slack = _ITEMSIZE * step.axis.size
    return same and abs(step.nbytes - other.nbytes) <= slack and abs(step.sent_bytes - other.sent_bytes) <= 2 * slack


def _moving(steps: Sequence[Step]) -> Steps:
    return tuple(step for step in steps if step.axis.size > 1)
