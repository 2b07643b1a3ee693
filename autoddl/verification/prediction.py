"""What the cost model says that a plan sends, phase by phase.

    forward, backward   of one micro-batch, with the redistributions of the layer's inputs
    gradient            once per training step

Ranks run in float32 (CPU ranks have no half precision that communicates), so bytes are those of a plan in float32, whatever
precision it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoddl.costmodel.assessment import assess
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

__all__ = [
    "ELEMENTWISE_LOSSES",
    "PHASES",
    "Steps",
    "in_float32",
    "missing_steps",
    "output_steps",
    "predicted_steps",
    "sent_messages",
    "unpriced_steps",
]

PHASES = ("forward", "backward", "gradient")
Steps = tuple[Step, ...]
#: Epilogues that end a model.
ELEMENTWISE_LOSSES = frozenset({"mse_loss", "l1_loss"})
_ITEMSIZE = 4


def in_float32(workload: Workload) -> Workload:
    """The workload that runs on CPU ranks."""
    return replace(workload, precision="float32")


def predicted_steps(
    graph: LayerGraph, strategies: Mapping[str, Strategy], workload: Workload, cluster: Cluster
) -> dict[tuple[str, str], Steps]:
    """For each (layer, phase) the steps that every rank takes part in."""
    # Only steps are asked for: how fast the device would be is of no matter, but that it is described for the precision.
    device = replace(cluster.device, peak_flops={"float32": 1e12, **cluster.device.peak_flops})
    assessment = assess(graph, replace(cluster, device=device), in_float32(workload), strategies)
    return {
        (found.layer.name, phase): _moving(steps)
        for found in assessment.layers
        for phase, steps in zip(PHASES, (found.forward_steps, found.backward_steps, found.work.gradient))
    }


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


def sent_messages(step: Step) -> float:
    """The messages that a rank sends in a step, on average.

    A sum of fewer elements than ranks has fewer pieces to pass around: each makes one hop less than there are ranks, twice.
    """
    pieces = (
        min(step.axis.size, step.nbytes / _ITEMSIZE) if step.collective is Collective.ALL_REDUCE else step.axis.size
    )
    return step.mean_messages * pieces / step.axis.size


def missing_steps(expected: Sequence[Step], ran: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """(expected steps that did not run, steps that ran unexpectedly); steps are equal up to the padding of all-reduces."""
    left, missing = list(_moving(ran)), []
    for step in expected:
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
