"""Training a model with a schedule, on one rank of all those that do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.schedule import Schedule
from autoddl.pipelines.times import Times

from ..load import load_oneflow
from .chain import Chain, boundaries, cut, even_sizes, tied_stages
from .engine import execute
from .lowering import Lowered, lower
from .report import RankReport
from .weights import OptimizerFactory
from .work import BatchSource, ModelWork

flow: Any = load_oneflow()

__all__ = ["PipelineTrainer"]


class PipelineTrainer:
    """One rank's part in training a chain with a schedule; every rank of the job makes one, with the same arguments.

    Worker w of the schedule is ``schedule.widths[w]`` ranks, from rank 0 on in the order of workers. A run carries out the whole
    schedule. A synchronous one can be run again and again; an asynchronous one empties the pipeline at its end, and begins the next
    run without delayed weights.

    Args:
        chain: the model; every rank has it with the same values, and keeps its own stages.
        schedule: of one iteration or many.
        make_optimizer: for each replica of a stage here, of its parameters.
        batch: inputs and targets of a micro-batch by its number in the run; arrays whose rows are the samples.
        sizes: layers per stage; even by default.
        times: of the stages, to order the communication by (see `lower`).

    Raises:
        UserError: the job has another number of ranks than the schedule, the sizes do not fit the chain, or see `lower`.
    """

    def __init__(
        self,
        chain: Chain,
        schedule: Schedule,
        make_optimizer: OptimizerFactory,
        batch: BatchSource,
        *,
        sizes: Sequence[int] | None = None,
        times: Times | None = None,
    ) -> None:
        if flow.env.get_world_size() != sum(schedule.widths):
            raise UserError(
                f"the job has {flow.env.get_world_size()} ranks; schedule {schedule.name} takes {sum(schedule.widths)}"
            )
        inputs, _ = batch(0)
        stages = cut(chain, even_sizes(len(chain.layers), schedule.num_stages) if sizes is None else sizes)
        if len(stages) != schedule.num_stages:
            raise UserError(
                f"{len(stages)} sizes were given, schedule {schedule.name} has {schedule.num_stages} stages"
            )
        between = boundaries(stages, flow.tensor(np.ascontiguousarray(inputs[:1])))
        tied = set(tied_stages(stages).values())
        self.lowered: Lowered = lower(schedule, len(inputs), times=times, tied=tied)
        self.rank: int = flow.env.get_rank()
        self._work = ModelWork(self.lowered, self.rank, stages, between, make_optimizer, batch)

    def run(self, batch: BatchSource | None = None) -> RankReport:
        """Carry out the schedule once; all ranks call.

        Args:
            batch: other data from now on.
        """
        if batch is not None:
            self._work.batch = batch
        return execute(self.lowered, self.rank, self._work)

    def parameters(self) -> dict[str, np.ndarray]:
        """The newest values of the parameters here, by their names in the model."""
        return {
            name: np.array(parameter.numpy())
            for replica in self._work.replicas.values()
            for name, parameter in zip(replica.names, replica.parameters)
        }
