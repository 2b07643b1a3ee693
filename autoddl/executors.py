"""The names of what can execute plans: AutoDDL's collectives in eager mode, or OneFlow's ``nn.Graph``."""

from __future__ import annotations

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph_meshes import EAGER, EXECUTORS, GRAPH

__all__ = ["EAGER", "EXECUTORS", "GRAPH", "check_executor"]


def check_executor(name: str, num_stages: int = 1) -> None:
    """Check that an executor can run plans with this number of stages.

    Raises:
        UserError: There is no such executor, or it does not run pipelines and the plan is one.
    """
    if name not in EXECUTORS:
        raise UserError(f"executor {name!r} is not one of {', '.join(EXECUTORS)}")
    if name == GRAPH and num_stages > 1:
        raise UserError(
            f"the plan is a pipeline of {num_stages} stages, which the graph executor does not run: nn.Graph chooses the schedule "
            "of stages itself, and computed wrong gradients with 4 stages; the eager executor runs it"
        )
