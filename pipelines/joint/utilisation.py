"""How much of the devices' peak FLOP/s a plan uses.

**Model FLOPs** of a step, by the usual formula: 3 times the FLOPs of the products of the forward pass (the backward pass has two
products for each one of the forward pass), attention and output projection included, times the batch.  Attention counts in full:
the scores that a causal mask discards are not left out.  Recomputation does not count.

**Hardware FLOPs** of a step are those that the devices compute: with recomputation, without the scores that fused kernels skip,
without gradients that nothing reads, and with everything that several devices compute alike.

A utilisation is FLOPs / (step x devices x peak), with the peak FLOP/s of the plan's precision.  Model FLOPs of a GPT with l blocks
of width h, sequences of s tokens, a vocabulary of V and a batch of B are (Narayanan et al., SC'21, without recomputation)

    72 B s l h^2 (1 + s / (6 h) + V / (12 l h))
"""

from __future__ import annotations

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import LayerGraph

from .evaluation import Evaluation

__all__ = ["hardware_flops", "model_flops", "peak_flops", "tokens_per_s_per_device"]


def model_flops(graph: LayerGraph, batch: int) -> float:
    """Return the model FLOPs of a step (formula: module docstring).

    >>> from autoddl.zoo import resolve_model
    >>> graph = resolve_model("gpt:2x64", sequence=128, vocabulary=256)
    >>> model_flops(graph, 4) == 72 * 4 * 128 * 2 * 64**2 * (1 + 128 / (6 * 64) + 256 / (12 * 2 * 64))
    True
    """
    return 3.0 * graph.flops * batch


def hardware_flops(evaluation: Evaluation) -> float:
    """Return the FLOPs that all devices compute in a step, with recomputation."""
    configuration, total = evaluation.configuration, 0.0
    for number, stage in enumerate(evaluation.stages):
        per_device = sum(
            stage.forward_passes * layer.work.forward_work.all_flops
            + stage.backward_passes * layer.work.backward_work.all_flops
            for layer in stage.assessment.layers
        )
        total += configuration.mesh_of(number).num_devices * per_device
    return float(total * configuration.schedule.num_micro_batches)


def peak_flops(cluster: Cluster, precision: str) -> float:
    """Return the peak FLOP/s of all devices of a cluster in a precision."""
    return cluster.num_devices * cluster.device.peak(precision)


def tokens_per_s_per_device(graph: LayerGraph, evaluation: Evaluation) -> float | None:
    """Return the tokens per second and device; None if samples are not sequences of tokens."""
    if graph.sequence_length is None or not evaluation.step_s:
        return None
    tokens = evaluation.configuration.workload.batch * graph.sequence_length
    return tokens / evaluation.step_s / evaluation.cluster.num_devices
