"""What every file defines itself, in the place of what stands here: for linters and type checkers."""

from __future__ import annotations

import oneflow as flow

from autoddl.pipelines.runtime.stepping import Ranks

#: The ranks of the model or, in a pipeline, of this rank's worker.
RANKS = Ranks(flow.env.get_world_size())
#: The ranks of each worker, this rank's worker, and its number in the job.
WORKERS: list[range] = [range(1)]
WORKER = 0
JOB_RANK = flow.env.get_rank()
