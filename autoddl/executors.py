"""The names of what can execute plans: AutoDDL's collectives in eager mode, or OneFlow's ``nn.Graph``."""

from __future__ import annotations

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph_meshes import EAGER, EXECUTORS, GRAPH
from autoddl.costmodel.workload import Workload

__all__ = ["EAGER", "EXECUTORS", "GRAPH", "check_executor", "check_workload"]

#: What is priced, and not executed on OneFlow ranks: the values of attributes of a workload that are.
_EXECUTED = {"gradients": "compute", "zero": 0, "activations": "kept"}


def check_workload(workload: Workload) -> None:
    """Check that ranks can execute the workload of a plan.

    Overlap only changes when communication runs: such plans are executed, by executors that do not overlap, and take longer.  FP8
    products are executed in bfloat16, since OneFlow 0.9.0 has no FP8.

    Raises:
        UserError: The plan was priced with gradients, optimizer states or activations that ranks do not have.

    >>> check_workload(Workload(8, 8, zero=1))
    Traceback (most recent call last):
        ...
    autoddl.costmodel.errors.UserError: the plan has zero=1, which is priced but not executed on ranks; plan with zero=0
    """
    for name, executed in _EXECUTED.items():
        if getattr(workload, name) != executed:
            asked = f"{name}={getattr(workload, name)!r}"
            raise UserError(
                f"the plan has {asked}, which is priced but not executed on ranks; plan with {name}={executed!r}"
            )


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
