"""Planning, reading plans, and comparing methods."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.costmodel.suggestions import unknown
from autoddl.costmodel.workload import OPTIMIZERS
from autoddl.search import METHODS
from autoddl.search.planner import Options

from .. import planfile
from .inputs import ClusterLike, ModelLike, cluster_of, graph_of
from .options import PLANNING_DEFAULTS, PlanningOptions, takes
from .plans import Plan
from .results import Comparison

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from autoddl.pipelines.joint.result import PlanResult
    from autoddl.search.planner import BaselineFigures, Planned

__all__ = ["MAX_ENUMERATION", "compare", "load", "load_plan", "plan"]

#: Larger spaces are not enumerated unless that is asked for by name.
MAX_ENUMERATION = 10**9
_OBJECTIVES = ("step", "communication")


@takes(PlanningOptions, PLANNING_DEFAULTS)
def plan(
    model: ModelLike,
    inputs: Any = None,
    *,
    cluster: ClusterLike,
    pipeline: str | None = None,
    allow_stale: bool = False,
    method: str = "exact",
    **options: Unpack[PlanningOptions],
) -> Plan:
    """The best way to train a model on a cluster: a strategy for every layer, proven; with ``pipeline`` also stages and a schedule.

    Args:
        model: a name (``gpt3-13b``; :func:`autoddl.models` lists them), sizes (``gpt:24x1024``, ``mlp:4096,1024,10``), a
            HuggingFace ``config.json``, a saved graph, ``FILE.py:FUNCTION``, a layer graph, or a ``oneflow.nn.Module``.
        inputs: of a module: example tensors (or one), with the batch as their first dimension.
        cluster: a name (:func:`autoddl.clusters` lists them), a file, or a cluster.
        pipeline: ``auto`` searches stages, cut, schedule, micro-batch, recomputation and strategies together; ``dapple``,
            ``chimera`` and ``wpipe`` take the plan of that paper's planner; None plans without a pipeline.
        allow_stale: with a pipeline, whether to offer asynchronous schedules, whose weights lag behind.
        method: of the search without a pipeline: one of ``autoddl.search.METHODS``.
        options: see `PlanningOptions`.

    Raises:
        InfeasibleError: nothing fits the memory limit; the message gives the smallest one that would do.
        UserError: a name is unknown, a value is out of range, or the model does not divide over the cluster.
        StopRequestedError: the stop was requested before there was a plan.

    >>> import autoddl
    >>> plan = autoddl.plan("gpt2", cluster="dgx-a100", nodes=2, batch=64)
    >>> plan
    <Plan gpt2 on dgx-a100: 2 nodes of 8 x NVIDIA A100 SXM4 80 GB; 39.1 ms per step, proven optimal>
    >>> len(plan.layers), plan.layers[0].name, plan.layers[0].kind
    (114, 'wte', 'embedding')

    With a pipeline the plan has the same face:

    >>> autoddl.plan("gpt:4x256", cluster="v100-c", nodes=2, batch=8, sequence=128, pipeline="auto")
    <Plan gpt:4x256 on v100-c: 2 nodes of 1 x NVIDIA V100 16 GB, 2 stages; 11.6 ms per step, proven optimal>
    """
    asked = _options(method, options)
    if pipeline is None and allow_stale:
        raise UserError("allow_stale is for pipelines; give a pipeline too, such as 'auto'")
    graph, devices = _graph_and_cluster(model, inputs, cluster, options)
    if pipeline is None:
        return _without_pipeline(graph, devices, asked, options["stop"])
    return _with_pipeline(graph, devices, asked, pipeline, allow_stale, options["stop"])


def _graph_and_cluster(
    model: ModelLike, inputs: Any, cluster: ClusterLike, options: PlanningOptions
) -> tuple[LayerGraph, Cluster]:
    graph = graph_of(
        model, inputs, heads=options["heads"], sequence=options["sequence"], vocabulary=options["vocabulary"]
    )
    sizes = options["nodes"], options["devices_per_node"], options["latency_s"], options["bandwidth"]
    return graph, cluster_of(cluster, *sizes)


def _options(method: str, options: PlanningOptions) -> Options:
    """The planner's options; what is one of a few words is checked here, the numbers are checked by the planner."""
    asked: dict[str, Any] = {**options, "method": method}
    for name, known in (("method", tuple(METHODS)), ("objective", _OBJECTIVES), ("optimizer", tuple(OPTIMIZERS))):
        if asked[name] not in known:
            raise unknown(name, asked[name], known)
    return Options(**{field.name: asked[field.name] for field in fields(Options)})


def _without_pipeline(graph: LayerGraph, cluster: Cluster, options: Options, stop: Stop | None) -> Plan:
    from autoddl.pipelines.joint.megatron_trials import plan_alone

    return _plan_of(plan_alone(graph, cluster, options, stop), stop)


def _with_pipeline(
    graph: LayerGraph, cluster: Cluster, options: Options, pipeline: str, allow_stale: bool, stop: Stop | None
) -> Plan:
    from autoddl.pipelines.joint.planner import plan_jointly
    from autoddl.pipelines.joint.result import JointOptions
    from autoddl.search import progress_bar

    asked = JointOptions(options, pipeline, allow_stale)
    with progress_bar("pipelines", disable=True if options.quiet else None) as progress:
        found = plan_jointly(graph, cluster, asked, progress, stop)
    return _plan_of(found, stop)


def _plan_of(found: PlanResult, stop: Stop | None) -> Plan:
    """What a planner found, with its document and how far to trust it."""
    from ..trusting import trust_of

    trust = trust_of(found, stop)
    document = planfile.plan_document(found, trust)
    return Plan(
        found.graph,
        found.cluster,
        found.workload,
        found.strategies,
        document,
        found.evaluation,
        search=found,
        trust=trust,
    )


def load(path: str | os.PathLike[str], *, edited: bool = False) -> Plan:
    """Read a plan that `Plan.save` or ``autoddl plan -o`` wrote; its figures and claims are checked.

    Args:
        edited: take a plan also if it was edited: its figures are computed anew, and what was claimed of it (optimality, bounds,
            baselines, trust) is dropped.

    Raises:
        UserError: the file cannot be read, a field is malformed, or the plan was edited; the message names the field.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "plan.json")
    ...     autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64).save(path)
    ...     plan = autoddl.load(path)
    >>> plan.optimal, plan.layers[0].name
    (True, 'fc1')
    """
    found = planfile.load_plan(path, edited)
    return Plan(
        found.graph,
        found.cluster,
        found.workload,
        found.strategies,
        found.document,
        found.evaluation,
        where=os.fspath(path),
    )


#: The same, as it has always been called.
load_plan = load


# ---- Comparing ---------------------------------------------------------------------------------------------------------


@takes(PlanningOptions, PLANNING_DEFAULTS)
def compare(
    model: ModelLike,
    inputs: Any = None,
    *,
    cluster: ClusterLike,
    methods: Sequence[str] | None = None,
    **options: Unpack[PlanningOptions],
) -> Comparison:
    """Baselines and search methods side by side, without a pipeline.

    Args:
        model, inputs, cluster: as of :func:`autoddl.plan`.
        methods: of ``autoddl.search.METHODS``; by default all, exhaustive only where the space has at most 10^9 assignments.
            The temperature is for metropolis-hastings alone.
        options: see `PlanningOptions`.

    Raises:
        UserError, InfeasibleError, StopRequestedError: as of :func:`autoddl.plan`.

    >>> import autoddl
    >>> found = autoddl.compare("mlp:64,32,16", cluster="local-cpu", batch=16, methods=["exact", "random"])
    >>> [row["name"] for row in found.rows]
    ['exact', 'random', 'data parallel', 'megatron', 'summa']
    >>> found["random"]["step_s"] >= found["exact"]["step_s"]
    True
    """
    names = tuple(METHODS) if methods is None else tuple(methods)
    for name in names:
        if name not in METHODS:
            raise unknown("method", name, tuple(METHODS))
    if options["temperature_s"] is not None and "metropolis-hastings" not in names:
        raise UserError("temperature is for metropolis-hastings, which is not among the methods")

    def options_of(method: str) -> Options:
        asked = _options(method, options)
        return asked if method == "metropolis-hastings" else replace(asked, temperature_s=None)

    from autoddl.search.planner import make_plan

    graph, devices = _graph_and_cluster(model, inputs, cluster, options)
    stop = options["stop"] or Stop()
    exact = make_plan(graph, devices, options_of("exact"), stop=stop)
    rows: list[Mapping[str, Any]] = []
    for name in names:
        if name == "exact":
            rows.append(_search_row(name, exact))
        elif name == "exhaustive" and methods is None and exact.result.space_size > MAX_ENUMERATION:
            too_many = f"{exact.result.space_size:.1e} assignments are too many to enumerate"
            rows.append({"name": name, "infeasible": too_many})
        else:
            rows.append(_row_of(name, graph, devices, options_of(name), exact.baselines, stop))
    rows += map(_baseline_row, exact.baselines)
    return Comparison(tuple(rows), exact, stop.is_requested)


def _row_of(
    method: str,
    graph: LayerGraph,
    cluster: Cluster,
    options: Options,
    baselines: Sequence[BaselineFigures],
    stop: Stop,
) -> dict[str, Any]:
    """What a method other than exact finds, of its own or, where that is not better, of a baseline's."""
    from autoddl.search.planner import make_plan

    found = None
    if not stop.is_requested:
        with contextlib.suppress(StopRequestedError):
            found = make_plan(graph, cluster, options, stop=stop, known=baselines)
    if found is None or (found.is_interrupted and not found.evaluations):
        return {"name": method, "infeasible": "interrupted before it had a plan"}
    return _search_row(method, found)


def _search_row(method: str, planned: Planned) -> dict[str, Any]:
    return {
        "name": method,
        "step_s": planned.assessment.step_s,
        "communication_s": planned.assessment.communication_s,
        "memory_bytes": planned.assessment.memory_bytes,
        "status": planned.status,
        "gap": planned.gap,
        "optimal": planned.optimal,
        "evaluations": planned.evaluations,
        "search_s": planned.search_s,
        **({"taken_from": planned.taken_from} if planned.taken_from else {}),
    }


def _baseline_row(figures: BaselineFigures) -> dict[str, Any]:
    if figures.assessment is None:
        return {"name": figures.name, "infeasible": figures.infeasible}
    return {
        "name": figures.name,
        "step_s": figures.assessment.step_s,
        "communication_s": figures.assessment.communication_s,
        "memory_bytes": figures.assessment.memory_bytes,
        "mesh": figures.mesh,
    }
