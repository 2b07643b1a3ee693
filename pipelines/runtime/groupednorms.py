"""Batch norms of one device with the statistics that the ranks of a plan have: what a plan is compared with.

Every rank normalises its own samples, so the result of a model with batch norms depends on their number. One device computes the
same if it normalises the samples of each rank by themselves, one pass and one rank after the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy

from .facts import module_at
from .load import load_oneflow
from .stage.plan import norm_parts

flow = load_oneflow()

__all__ = ["batch_norms_as_local", "group_batch_norms", "group_norms"]

Tensor = Any


@contextlib.contextmanager
def batch_norms_as_local() -> Iterator[None]:
    """Let synchronised batch norms compute what others do while the context is active; OneFlow runs them on GPUs only."""
    nn = flow.nn
    forward = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = nn.BatchNorm2d.forward
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = forward


def group_batch_norms(module: Any, graph: LayerGraph, strategies: Mapping[str, Strategy], pass_samples: int) -> None:
    """Let the batch norms of a module on one device have the statistics that the ranks of a plan have. Changes the module.

    Running statistics are the means of those of the ranks.

    Args:
        module: The user's model.
        graph: The layer graph.
        strategies: Strategies of all layers, by name.
        pass_samples: Samples of a forward pass of all ranks.
    """
    group_norms(module, norm_parts(graph, strategies), pass_samples)


def group_norms(module: Any, parts: Mapping[str, tuple[int, int]], pass_samples: int) -> None:
    """Let batch norms have the statistics of parts of the samples, see `stage.plan.norm_parts`. Changes the module."""
    for path, (num_parts, across) in parts.items():
        own = module_at(module, path)
        own.forward = functools.partial(_grouped_forward, own, num_parts, across, pass_samples)


def _grouped_forward(norm: Any, num_parts: int, across: int, pass_samples: int, x: Tensor) -> Tensor:
    if not norm.training:
        return flow.nn.BatchNorm2d.forward(norm, x)
    passes = [x[first : first + pass_samples] for first in range(0, x.shape[0], pass_samples)]
    return _put_together([_grouped_pass(norm, num_parts, across, samples) for samples in passes], 0)


def _parts_along(x: Tensor, count: int, dim: int) -> list[Tensor]:
    return list(flow.chunk(x, count, dim=dim)) if count > 1 else [x]


def _put_together(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else flow.cat(parts, dim=dim)


def _grouped_pass(norm: Any, num_parts: int, across: int, x: Tensor) -> Tensor:
    """Normalise the samples of a pass in ``num_parts`` parts: whole samples, or tiles of each image, ``across`` side by side."""
    sharing = max(num_parts // x.shape[0], 1)
    num_groups = num_parts // sharing
    running = [value for value in (norm.running_mean, norm.running_var) if value is not None]
    moved: list[list[Tensor]] = [[] for _ in running]

    def normalised(part: Tensor) -> Tensor:
        own = [value.clone() for value in running]
        for values, value in zip(moved, own):
            values.append(value)
        mean, variance = own or (None, None)
        return flow._C.normalization(
            part.contiguous(), mean, variance, norm.weight, norm.bias, 1, norm.eps, norm.momentum, is_training=True
        )

    result = []
    for samples in flow.chunk(x, num_groups, dim=0):
        strips = []
        for strip in _parts_along(samples, sharing // across, 2):
            strips.append(_put_together([normalised(tile) for tile in _parts_along(strip, across, 3)], 3))
        result.append(_put_together(strips, 2))
    for value, values in zip(running, moved):
        value.copy_(sum(values[1:], values[0]) * (1.0 / len(values)))
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    return flow.cat(result, dim=0)
