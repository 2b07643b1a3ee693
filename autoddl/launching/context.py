"""The job of a launched script, as seen by the script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE
from autoddl.costmodel.errors import UserError

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.pipeline.data import BatchSource
    from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
    from autoddl.pipelines.runtime.pipeline.weights import OptimizerFactory

    from ..planfile import PlanFile

__all__ = ["Launched", "launched"]


@dataclass(frozen=True)
class Launched:
    """The job that this process is a rank of.

    Attributes:
        rank: of this process.
        num_ranks: of the job.
        local_rank: index of its device among those that it sees.
        plan_path: the plan that the job was launched with.
        restart: number of times that the job has been restarted.
        checkpoints: folder for checkpoints; None if the user gave none.
        is_edited: whether an edited plan is accepted.
        device: type of device that the ranks compute on, as OneFlow calls it.
    """

    rank: int
    num_ranks: int
    local_rank: int
    plan_path: Path
    restart: int
    checkpoints: Path | None
    is_edited: bool = False
    device: str = CPU

    def load_plan(self) -> PlanFile:
        """Load the plan of the job."""
        from ..planfile import load_plan

        return load_plan(self.plan_path, self.is_edited)

    def trainer(
        self, module: Any, make_optimizer: OptimizerFactory, batch: BatchSource, **options: Any
    ) -> PipelineTrainer:
        """A trainer of the model by the plan, with or without a pipeline; see :func:`autoddl.training.plan_trainer`.

        trainer = autoddl.launched().trainer(module, make_optimizer, batch)
        losses = trainer.run().losses
        """
        from ..training import plan_trainer

        return plan_trainer(module, self.load_plan(), make_optimizer, batch, **options)


def launched(environ: Mapping[str, str] | None = None) -> Launched:
    """The job that this process is a rank of.

        job = autoddl.launched()
        trained = autoddl.apply(module, job.load_plan())

    Args:
        environ: the environment; by default that of this process.

    Raises:
        UserError: the process was not started by ``autoddl launch``.

    >>> import autoddl
    >>> autoddl.launched({"AUTODDL_PLAN": "plan.json", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).num_ranks
    4
    """
    environ = os.environ if environ is None else environ
    if "AUTODDL_PLAN" not in environ:
        raise UserError(
            "this process is not a rank of a job (AUTODDL_PLAN is not set); start it with: autoddl launch PLAN SCRIPT"
        )
    checkpoints = environ.get("AUTODDL_CHECKPOINTS")
    return Launched(
        rank=int(environ["RANK"]),
        num_ranks=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        plan_path=Path(environ["AUTODDL_PLAN"]),
        restart=int(environ.get("AUTODDL_RESTART", "0")),
        checkpoints=Path(checkpoints) if checkpoints else None,
        is_edited="AUTODDL_EDITED" in environ,
        device=environ.get(DEVICE_VARIABLE, CPU),
    )
