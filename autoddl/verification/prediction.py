"""Predicts the communication steps and the bytes of a plan with the cost model.

A layer has up to three phases:

==================  =================================================================================================
phase               traffic
==================  =================================================================================================
forward, backward   the steps of one slot (a micro-batch, or half of one if the schedule divides micro-batches into
                    halves), including the redistributions of the layer's inputs
gradient            the sum of the layer's gradients, once per update.  Only a plan of one stage has this phase: in a
                    pipeline, replicas and other stages take part in the sums, outside of the layers
==================  =================================================================================================

In a run of the schedule, a stage sums the gradients of all its layers as one vector.

All bytes are those of the types in which CPU ranks run the plan: they cannot communicate tensors of half precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autoddl.costmodel.collectives import Step, all_reduce_steps, gather_steps
from autoddl.costmodel.distribution import Axis, Distribution
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.precision import Precision
from autoddl.costmodel.pricing import moved_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.redistribution import steps as steps_of
from autoddl.costmodel.sbp import Broadcast
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch
from autoddl.pipelines.runtime.pipeline.stage_traffic import (
    Sent,
    agreements,
    gradient_sums,
    layer_steps,
    passes,
    stage_traffic,
)

from .fitting import FittedPlan

__all__ = [
    "PHASES",
    "Prediction",
    "RankSteps",
    "Steps",
    "missing_steps",
    "output_steps",
    "predict",
    "unpriced_steps",
]

#: Phases of a layer, in the order of execution.
PHASES = ("forward", "backward", "gradient")
Steps = tuple[Step, ...]
#: Bytes of an element of gradient sums: CPU ranks sum gradients in single precision, or in double precision.
_SUMMED_ITEMSIZE = 4


@dataclass(frozen=True)
class RankSteps:
    """The communication steps that a rank takes part in.

    Attributes:
        priced: Steps that the cost model predicts.
        unpriced: Steps that the ranks execute but the cost model leaves out.
        num_tensors: Largest number of tensors that a vector of gradients consists of; each has its own padding.
    """

    priced: Steps = ()
    unpriced: Steps = ()
    num_tensors: int = 1

    def __add__(self, other: RankSteps) -> RankSteps:
        num_tensors = max(self.num_tensors, other.num_tensors)
        return RankSteps(self.priced + other.priced, self.unpriced + other.unpriced, num_tensors)

    def __mul__(self, times: int) -> RankSteps:
        return RankSteps(self.priced * times, self.unpriced * times, self.num_tensors)


@dataclass(frozen=True)
class Prediction:
    """The predicted traffic of a plan.

    Attributes:
        sections: Steps of each rank of a layer's stage, by (layer, phase), for one slot or one update.  Only a plan of one stage
            has the phase ``gradient``.
        inside: Bytes that all ranks of each stage send in forward and backward passes during one run of the schedule.
        gradients: Bytes that all ranks of each stage send to sum gradients during one run.
        between: Bytes that cross each boundary between stages during one run, in both directions.
        workers: Steps of each rank of each worker during one run.
        transfers: Further transfers of one run: those between stages, those of gradient sums, and decisions on skipped updates.
    """

    sections: Mapping[tuple[str, str], RankSteps]
    inside: tuple[float, ...]
    gradients: tuple[float, ...]
    between: tuple[float, ...]
    workers: tuple[RankSteps, ...]
    transfers: Sent


def predict(fitted: FittedPlan) -> Prediction:
    """Predict the traffic of a fitted plan.

    Args:
        fitted: The plan that the ranks execute.
    """
    graph, stages, schedule, workload = fitted.scaled.graph, fitted.stages, fitted.schedule, fitted.scaled.workload
    sections = _sections(fitted)
    types = workload.types
    between = stage_traffic(schedule, graph, stages, workload.micro_batch, types).between
    inside, gradients = [0.0] * len(stages), [0.0] * len(stages)
    workers = [RankSteps()] * schedule.num_workers
    transfers = sum(between, agreements(schedule, types))
    slots = slots_per_micro_batch(schedule)
    outputs = RankSteps(unpriced=output_steps(graph, fitted.scaled.strategies, workload.micro_batch // slots, types))
    for worker in range(schedule.num_workers):
        for _, number in schedule.stages_on(worker):
            stage = stages[number]
            pass_steps = RankSteps()
            # Forward and backward passes, as many as the schedule has for this stage on this worker.
            counts = [round(slots * count) for count in passes(schedule, number, worker)]
            for layer in stage.layers(graph):
                for phase, count in zip(PHASES, counts):
                    pass_steps += sections[layer.name, phase] * count
            if number == len(stages) - 1:
                pass_steps += outputs * counts[0]  # the loss of a model without one is computed from its whole output
            # Sums of gradients: one for the whole stage.
            steps, update_transfers = gradient_sums(graph, stages, number, schedule.num_pipelines, types)
            num_tensors = sum(len(layer.parameters) for layer in stage.layers(graph))
            gradient_steps = RankSteps(_without_idle(steps), num_tensors=num_tensors) * schedule.num_updates
            gradient_transfers = update_transfers * schedule.num_updates
            workers[worker] += pass_steps + gradient_steps
            inside[number] += _sent_bytes(pass_steps, stage.num_ranks)
            gradients[number] += _sent_bytes(gradient_steps, stage.num_ranks) + gradient_transfers.num_bytes
            transfers += gradient_transfers
    between_bytes = tuple(sent.num_bytes for sent in between)
    return Prediction(sections, tuple(inside), tuple(gradients), between_bytes, tuple(workers), transfers)


def _sections(fitted: FittedPlan) -> dict[tuple[str, str], RankSteps]:
    """Return `Prediction.sections`."""
    graph, schedule, strategies = fitted.scaled.graph, fitted.schedule, fitted.scaled.strategies
    workload = fitted.scaled.workload
    priced = layer_steps(schedule, graph, fitted.stages, workload.micro_batch, workload.types)
    return {
        (name, phase): RankSteps(
            _without_idle(steps),
            unpriced_steps(graph[name], strategies[name], phase, workload.types),
            max(len(graph[name].parameters), 1),
        )
        for (name, phase), steps in priced.items()
        if phase != "gradient" or len(fitted.stages) == 1
    }


def _sent_bytes(steps: RankSteps, num_ranks: int) -> float:
    """Return the priced bytes that ``num_ranks`` ranks send together."""
    return num_ranks * sum(step.mean_sent_bytes for step in steps.priced)


def unpriced_steps(layer: Layer, strategy: Strategy, phase: str, types: Precision) -> Steps:
    """Return the steps of a layer's phase that the cost model leaves out.

    These are the gathering of the mean loss, a single number of each rank, and the gradients of the biases of a Summa layer.
    """
    if phase == "forward" and kind_of(layer.kind).is_loss:
        return _gathered_numbers(strategy.axes(0), types)
    if phase == "forward" and layer.is_loss and layer.program is None:
        return _gathered_numbers([axis for which in range(3) for axis in strategy.axes(which)], types)
    if phase == "gradient" and strategy.summa:
        biases = sum(p.num_elements for p in layer.parameters if len(p.shape) == 1)
        nbytes = types.communication_itemsize * biases / strategy.p1
        return _without_idle(all_reduce_steps(strategy.axes(0), nbytes)) if biases else ()
    return ()


def _gathered_numbers(axes: Sequence[Axis], types: Precision) -> Steps:
    """Return the steps that gather one number of each rank along the axes."""
    return _without_idle(gather_steps(axes, types.master_itemsize * prod(axis.size for axis in axes)))


def output_steps(graph: LayerGraph, strategies: Mapping[str, Strategy], num_samples: int, types: Precision) -> Steps:
    """Return the steps that gather the output of a model without a loss on every rank of its last stage, for one slot.

    The cost model leaves these steps out, since the use of the output is not part of the plan.
    """
    last = graph.layers[-1]
    if last.is_loss:
        return ()
    strategy = strategies[last.name]
    layout = strategy.activations
    gathered = Distribution(layout.axes, (Broadcast(),) * len(layout.axes))
    shape = moved_shape(last, [strategy.rows_and_features], num_samples)
    num_bytes = types.itemsize * num_samples * last.output_elements
    return _without_idle(steps_of(redistribute(layout, gathered, shape), num_bytes))


def missing_steps(
    expected: Sequence[Step], ran: Sequence[Step], num_tensors: int = 1, itemsize: float = _SUMMED_ITEMSIZE
) -> tuple[list[Step], list[Step]]:
    """Match expected steps with the steps that ran; the order of the steps does not matter.

    Args:
        expected, ran: The steps.
        num_tensors: Largest number of tensors that a vector of gradients consists of.
        itemsize: Bytes of an element of such a vector.

    Returns:
        The expected steps that did not run, and the steps that ran but were not expected.
    """
    # 1. Equal steps.
    num_unmatched, unmatched = Counter(_without_idle(ran)), []
    for step in expected:
        if num_unmatched[step]:
            num_unmatched[step] -= 1
        else:
            unmatched.append(step)
    # 2. Steps that are equal up to the padding of a vector.
    unexpected, missing = list(num_unmatched.elements()), []
    for step in unmatched:
        match = next((other for other in unexpected if _equal_up_to_padding(step, other, num_tensors, itemsize)), None)
        if match is None:
            missing.append(step)
        else:
            unexpected.remove(match)
    return missing, unexpected


def _equal_up_to_padding(step: Step, other: Step, num_tensors: int, itemsize: float) -> bool:
    if (step.collective, step.axis.size, step.axis.stride) != (other.collective, other.axis.size, other.axis.stride):
        return False
    # A vector that is summed over several levels is padded to a whole number of elements per rank, and so is each of its tensors
    # if ranks divide them.
    padding_bytes = itemsize * step.axis.size * num_tensors
    return (
        abs(step.nbytes - other.nbytes) <= padding_bytes
        and abs(step.sent_bytes - other.sent_bytes) <= 2 * padding_bytes
    )


def _without_idle(steps: Sequence[Step]) -> Steps:
    """Return the steps along axes with more than one rank; the others send nothing."""
    return tuple(step for step in steps if step.axis.size > 1)
