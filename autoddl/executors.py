"""The names of what can execute plans: AutoDDL's collectives in eager mode, or OneFlow's ``nn.Graph``."""

from __future__ import annotations

from collections.abc import Mapping

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, EXECUTORS, GRAPH
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.workload import Workload

__all__ = ["EAGER", "EXECUTORS", "GRAPH", "check_executor", "check_workload", "execution_notes", "pricing_notes"]

#: What is priced, and not always executed on ranks: the values of attributes of a workload that each executor executes.
_EXECUTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    EAGER: {"gradients": ("compute",), "activations": ("kept",)},
    GRAPH: {
        "gradients": ("compute",),
        "zero": (0,),
        "activations": ("kept",),
        "recompute": ("layers", "selective", "none"),
    },
}


def check_workload(workload: Workload, executor: str = EAGER) -> None:
    """Check that ranks can execute the workload of a plan, or of one of its stages.

    Args:
        workload: The workload.
        executor: What executes it, one of `EXECUTORS`.

    Raises:
        UserError: The plan was priced with gradients, optimizer states, activations or recomputation that ranks do not have.

    >>> check_workload(Workload(8, 8, zero=1))
    Traceback (most recent call last):
        ...
    autoddl.costmodel.errors.UserError: the plan has zero=1, which is priced but not executed on ranks; plan with zero=0
    """
    for name, executed in _EXECUTED[executor].items():
        value = getattr(workload, name)
        if value not in executed:
            where = "on ranks" if name in _EXECUTED[EAGER] else f"by the {executor} executor"
            known = " or ".join(f"{name}={one!r}" for one in executed)
            raise UserError(
                f"the plan has {name}={value!r}, which is priced but not executed {where}; plan with {known}"
            )


def pricing_notes(graph: LayerGraph, workload: Workload, executor: str = EAGER) -> tuple[str, ...]:
    """Return what a plan is priced for and an executor does not do, or does in another way: sentences without a period.

    >>> from autoddl.zoo import resolve_model
    >>> pricing_notes(resolve_model("mlp:8,8"), Workload(8, 8, zero=1))
    ('zero=1 is priced, but not executed on ranks',)
    """
    refused = (name for name, executed in _EXECUTED[EAGER].items() if getattr(workload, name) not in executed)
    notes = (f"{name}={getattr(workload, name)} is priced, but not executed on ranks" for name in refused)
    return (*notes, *execution_notes(graph, workload, executor))


def execution_notes(graph: LayerGraph, workload: Workload, executor: str = EAGER) -> tuple[str, ...]:
    """Return what ranks do in another way than it is priced, although the values are right: sentences without a period.

    >>> from autoddl.zoo import resolve_model
    >>> execution_notes(resolve_model("mlp:8,8"), Workload(8, 8, overlap="all"))
    ('overlap=all is priced, but the eager executor does not overlap communication with computation',)
    """
    notes = []
    if workload.overlap != "none" and executor == EAGER:
        notes.append(
            f"overlap={workload.overlap} is priced, but the eager executor does not overlap communication with computation"
        )
    if workload.bucket_bytes and executor == GRAPH:
        notes.append(
            f"bucket_bytes={workload.bucket_bytes} is priced, but the graph executor leaves sums of gradients to OneFlow"
        )
    if workload.types.rate == "fp8":
        notes.append("precision fp8 is executed as bfloat16: OneFlow 0.9.0 has no 8-bit types")
    has_attention = any(kind_of(layer.kind).is_selected for layer in graph.layers)
    if workload.attention == "fused" and executor == GRAPH and has_attention:
        notes.append("attention is priced as fused, but the graph executor computes it dense, which keeps more memory")
    return tuple(notes)


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
