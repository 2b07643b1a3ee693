"""Placeholders for the constants that every exported file defines itself; linters and type checkers need them."""

from __future__ import annotations

import oneflow as flow

from autoddl.pipelines.runtime.backend import HOST
from autoddl.pipelines.runtime.stepping import Ranks

#: Device and types.
BACKEND = HOST
#: The ranks of the model; in a pipeline, the ranks of this rank's worker.
RANKS = Ranks(flow.env.get_world_size(), BACKEND)
#: The ranks of each worker of a pipeline.
WORKERS: list[range] = [range(1)]
#: The number of this rank's worker.
WORKER = 0
#: The number of this rank among all ranks of the job.
JOB_RANK = flow.env.get_rank()
