"""The operations that are timed.  This module imports OneFlow; only ranks import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oneflow as flow

from autoddl.costmodel.calibration import TRANSFER
from autoddl.pipelines.runtime.backend import Backend, backend_of
from autoddl.pipelines.runtime.comm.collectives import all_gather, all_reduce, all_to_all, receive, reduce_scatter, send
from autoddl.pipelines.runtime.comm.handshake import NO_HANDSHAKE, Handshake
from autoddl.pipelines.runtime.comm.mesh import RankAxis

from .settings import TimedSetting, rows_and_features

__all__ = ["itemsize", "operation"]

#: The precision of what ranks exchange, which is measured in bytes.
_EXCHANGED = "float32"


def operation(setting: TimedSetting, device: str, handshake: Handshake = NO_HANDSHAKE) -> Callable[[], Any]:
    """A function that runs the operation of a setting once on a type of device; its operands are allocated here.

    Args:
        setting: what to run.
        device: the type of device.
        handshake: before which exchanges of two ranks there is a handshake.
    """
    backend = replace(backend_of(setting.precision or _EXCHANGED, device), handshake=handshake)
    if setting.collective == "matmul":
        m, k, n = setting.shape
        left, right = _ones(backend, m, k), _ones(backend, n, k)
        return lambda: flow.matmul(left, right, transpose_b=True)
    if setting.collective == "elementwise":
        x = _ones(
            backend, max(1, setting.num_bytes // (2 * itemsize(backend)))
        )  # each element is read once and written once
        return lambda: flow.relu(x)
    return _communication(setting, backend)


def itemsize(backend: Backend) -> int:
    """Bytes of an element of the compute type."""
    return int(_ones(backend, 1).element_size())


def _ones(backend: Backend, *shape: int) -> Any:
    return flow.ones(*shape, dtype=backend.compute, device=backend.device)


def _communication(setting: TimedSetting, backend: Backend) -> Callable[[], Any]:
    num_ranks, rank = flow.env.get_world_size(), flow.env.get_rank()
    axis = RankAxis(setting.ranks, setting.stride, num_ranks, handshake=backend.handshake)
    if setting.collective == TRANSFER:
        mine, other = axis.index(rank), sum(axis.group(rank)) - rank
        x = _ones(backend, max(1, setting.num_bytes // 4))
        return lambda: send(x, other) if mine == 0 else receive(tuple(x.shape), x.dtype, other, backend.device)
    rows, features = rows_and_features(setting.num_bytes, setting.ranks)
    if setting.collective == "all-reduce":
        vector = _ones(backend, rows * features)
        return lambda: all_reduce(vector, axis)
    if setting.collective == "all-gather":
        part = _ones(backend, 1, rows, features // setting.ranks)
        return lambda: all_gather(part, axis, 2)
    whole = _ones(backend, 1, rows, features)
    if setting.collective == "reduce-scatter":
        return lambda: reduce_scatter(whole, axis, 2)
    assert setting.collective == "all-to-all", setting
    matrix = whole.reshape(rows, features)
    return lambda: all_to_all(matrix, axis, 0, 1)
