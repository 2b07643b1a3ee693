"""The ranks of a pipeline: those of each worker are counted from 0, and are the mesh of the stages that lie on it.

In files of pipelines this takes the place of what :mod:`.ranks` and :mod:`.blocks` have of the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import oneflow as flow

from .blocks import Weight
from .ranks import Axis, Tensor

#: The ranks of each worker; the file has its own.
WORKERS: list[range] = [range(1)]

JOB_RANK = flow.env.get_rank()
WORKER = next(worker for worker, ranks in enumerate(WORKERS) if JOB_RANK in ranks)
#: From here on ranks are counted within the worker.
NUM_RANKS = len(WORKERS[WORKER])
RANK = JOB_RANK - WORKERS[WORKER][0]


def rank_in_job(rank: int) -> int:
    """The number of one of the worker's ranks among all ranks."""
    return WORKERS[WORKER][rank]


def mesh(*lengths: int) -> Any:
    """The worker's ranks in their order, on axes of these lengths."""
    return flow.placement("cpu", np.array(WORKERS[WORKER]).reshape(lengths or (NUM_RANKS,)).tolist())


@functools.cache
def placement_of(group: tuple[int, ...]) -> Any:
    """Some of the worker's ranks in a row; they have to ascend."""
    return flow.placement("cpu", [WORKERS[WORKER][rank] for rank in group])


def blocks_of(weights: Sequence[Weight], sum_over: Sequence[Axis]) -> tuple[Tensor, ...]:
    """This rank's blocks, to compute with: of the version that is in use.

    They collect gradients, which are summed over the axes ``sum_over`` when the schedule says so.
    """
    for weight in weights:
        weight.sum_over = tuple(sum_over)
    return tuple(weight.leaf for weight in weights)
