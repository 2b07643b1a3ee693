"""The operations that are timed.  This module imports OneFlow; only ranks import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oneflow as flow

from autoddl.costmodel.calibration import TRANSFER
from autoddl.pipelines.runtime.comm.collectives import all_gather, all_reduce, all_to_all, receive, reduce_scatter, send
from autoddl.pipelines.runtime.comm.mesh import RankAxis

from .settings import TimedSetting, rows_and_features

__all__ = ["operation"]


def operation(setting: TimedSetting) -> Callable[[], Any]:
    """A function that runs the operation of a setting once; its operands are allocated here."""
    if setting.collective == "matmul":
        m, k, n = setting.shape
        left, right = flow.ones(m, k), flow.ones(n, k)
        return lambda: flow.matmul(left, right, transpose_b=True)
    if setting.collective == "elementwise":
        x = flow.ones(max(1, setting.num_bytes // 8))  # one element is read and one is written
        return lambda: flow.relu(x)
    return _communication(setting)


def _communication(setting: TimedSetting) -> Callable[[], Any]:
    num_ranks, rank = flow.env.get_world_size(), flow.env.get_rank()
    axis = RankAxis(setting.ranks, setting.stride, num_ranks)
    if setting.collective == TRANSFER:
        mine, other = axis.index(rank), sum(axis.group(rank)) - rank
        x = flow.ones(max(1, setting.num_bytes // 4))
        return lambda: send(x, other) if mine == 0 else receive(tuple(x.shape), x.dtype, other)
    rows, features = rows_and_features(setting.num_bytes, setting.ranks)
    if setting.collective == "all-reduce":
        vector = flow.ones(rows * features)
        return lambda: all_reduce(vector, axis)
    if setting.collective == "all-gather":
        part = flow.ones(1, rows, features // setting.ranks)
        return lambda: all_gather(part, axis, 2)
    whole = flow.ones(1, rows, features)
    if setting.collective == "reduce-scatter":
        return lambda: reduce_scatter(whole, axis, 2)
    assert setting.collective == "all-to-all", setting
    matrix = whole.reshape(rows, features)
    return lambda: all_to_all(matrix, axis, 0, 1)
