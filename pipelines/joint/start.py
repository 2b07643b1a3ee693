"""The plan that the user gives as the first incumbent of a search.

It is evaluated with the model, the cluster and the training options of the search, so a plan that was made for other figures of the
cluster may be a start, too.  A plan that is not in the space of the search is left out, and :class:`Started` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import counted, format_bytes, format_seconds
from autoddl.search.options import base_workload
from autoddl.search.planner import StartPlan

from .configuration import Configuration
from .evaluation import Evaluation, evaluate
from .job import PlanningJob
from .meshes import StageMesh
from .space import schedules

__all__ = ["START_NOTE", "Start", "Started", "start_note", "start_problem", "started"]

#: The beginning of the note on the start.
START_NOTE = "the start "


@dataclass(frozen=True)
class Start:
    """A plan from which a search starts.

    Attributes:
        name: what to call it, such as the path of its file.
        graph, cluster: the model and the devices that it was made for.
        configuration: the plan.
    """

    name: str
    graph: LayerGraph
    cluster: Cluster
    configuration: Configuration

    @property
    def has_pipeline(self) -> bool:
        """Whether it has more than one stage."""
        return len(self.configuration.stages) > 1

    @property
    def without_pipeline(self) -> StartPlan:
        """The plan for the search without pipelines; it has one stage."""
        (stage,) = self.configuration.stages
        return StartPlan(self.name, self.configuration.workload, stage.strategies)


@dataclass(frozen=True)
class Started:
    """The start of a search.

    Attributes:
        evaluation: its figures; None if it is not in the space.
        fault: why it is not in the space; empty if it is.
    """

    evaluation: Evaluation | None
    fault: str = ""


def start_note(name: str, fault: str, step_s: float | None) -> str:
    """Return the note on a start.

    >>> start_note("plan.json", "its batch is 8, not 16", None)
    'the start plan.json is not in the space of the search: its batch is 8, not 16'
    >>> start_note("plan.json", "", 0.25)
    'the start plan.json takes 250 ms'
    """
    if fault or step_s is None:
        return f"{START_NOTE}{name} is not in the space of the search: {fault}"
    return f"{START_NOTE}{name} takes {format_seconds(step_s)}"


def start_problem(start: Start, graph: LayerGraph, cluster: Cluster) -> str:
    """Return why a plan cannot be evaluated for a model and a cluster; empty if it can."""
    if start.graph.hash != graph.hash:
        return f"its model is {start.graph.name}, or has other layers than {graph.name}"
    own, sizes = start.cluster, (cluster.num_nodes, cluster.devices_per_node)
    if (own.num_nodes, own.devices_per_node) != sizes:
        return f"it is for {counted(own.num_nodes, 'node')} of {own.devices_per_node} devices, not {sizes[0]} of {sizes[1]}"
    return ""


def started(job: PlanningJob, start: Start) -> Started:
    """Evaluate a start with the model, the cluster and the options of a job."""
    fault = start_problem(start, job.graph, job.cluster) or _outside(job, start.configuration)
    if fault:
        return Started(None, fault)
    own = start.configuration.workload
    workload = replace(base_workload(job.cluster, job.options.base, own.recompute), micro_batch=own.micro_batch)
    try:
        evaluation = evaluate(job.chain, job.cluster, replace(start.configuration, workload=workload))
    except UserError as error:
        return Started(None, str(error))
    if evaluation.memory_bytes > job.limit_bytes:
        needed, limit = format_bytes(evaluation.memory_bytes), format_bytes(job.limit_bytes)
        return Started(None, f"it needs {needed} per device, the limit is {limit}")
    return Started(evaluation)


def _outside(job: PlanningJob, configuration: Configuration) -> str:
    """Why a configuration is not in the space of a job, apart from its memory; empty if it is."""
    base, spec, own = job.options.base, configuration.schedule, configuration.workload
    if own.batch != job.workload.batch:
        return f"its batch is {own.batch}, not {job.workload.batch}"
    if base.micro_batch not in (None, own.micro_batch):
        return f"its micro-batch is {own.micro_batch}, not {base.micro_batch}"
    for stage in configuration.stages:
        if not job.tries(stage.recompute):
            return f"recomputation {stage.recompute} is not tried"
        if not base.summa and any(strategy.summa for strategy in stage.strategies.values()):
            return "it has Summa meshes, and summa=False"
    is_equal = isinstance(configuration.mesh, StageMesh)
    offered = schedules(
        spec.num_workers, spec.num_micro_batches, job.chain.num_units, job.options.allow_stale, is_equal
    )
    if spec not in offered:
        return f"its schedule {spec.label} is not tried"
    if not base.untied:
        return _untied(job, configuration)
    return ""


def _untied(job: PlanningJob, configuration: Configuration) -> str:
    """Which layer has another strategy than an equal layer of its stage; empty if none has."""
    for stage in configuration.stages:
        chosen: dict[tuple[str, str], object] = {}
        for name, strategy in stage.strategies.items():
            if name not in job.graph or not job.graph[name].block:
                continue
            layer = job.graph[name]
            if chosen.setdefault((layer.block, layer.role), strategy) != strategy:
                return f"{name} has another strategy than equal layers of its stage, untied=True offers that"
    return ""
