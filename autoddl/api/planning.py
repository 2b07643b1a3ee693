"""Plans models, reads plans from files, and compares search methods."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, EXECUTORS, NO_PIPELINE
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.costmodel.suggestions import unknown
from autoddl.costmodel.workload import OPTIMIZERS
from autoddl.search import METHODS
from autoddl.search.planner import Options

from .. import planfile
from .files import FilePath
from .inputs import ClusterLike, ModelLike, cluster_of, graph_of
from .options import PLANNING_DEFAULTS, PlanningOptions, takes
from .plans import Plan
from .results import Comparison

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from autoddl.costmodel.assessment import Assessment
    from autoddl.pipelines.joint.result import PlanResult
    from autoddl.pipelines.joint.start import Start
    from autoddl.search.planner import BaselineFigures, Planned

__all__ = ["MAX_ENUMERATION", "compare", "load", "load_plan", "plan", "plan_of_result"]

#: Maximum number of assignments that `compare` enumerates if the method ``exhaustive`` is not named.
MAX_ENUMERATION = 10**9


@takes(PlanningOptions, PLANNING_DEFAULTS)
def plan(
    model: ModelLike,
    inputs: Any = None,
    *,
    cluster: ClusterLike,
    pipeline: str | None = None,
    allow_stale: bool = False,
    method: str = "exact",
    start: Plan | FilePath | None = None,
    **options: Unpack[PlanningOptions],
) -> Plan:
    """Find the best plan to train a model on a cluster, and prove that it is the best.

    A plan assigns an SBP strategy to every layer.  With ``pipeline``, it also divides the model into stages and schedules their
    micro-batches.

    Args:
        model: A name (such as ``gpt3-13b``; :func:`autoddl.models` lists them), sizes (``gpt:24x1024``, ``mlp:4096,1024,10``), a
            HuggingFace ``config.json``, a saved graph, ``FILE.py:FUNCTION``, a layer graph, or a ``oneflow.nn.Module``.
        inputs: Example inputs of a module: a tensor or a sequence of tensors, with the batch as the first dimension.
        cluster: A name (:func:`autoddl.clusters` lists them), a cluster file, or a :class:`Cluster`.
        pipeline: ``auto`` searches stages, schedule, micro-batch, recomputation and strategies together; ``dapple``, ``chimera``
            and ``wpipe`` use the planner of the paper of that name; None plans without a pipeline.
        allow_stale: With a pipeline, also offer asynchronous schedules, which compute with weights of earlier updates.
        method: Search method without a pipeline, one of ``autoddl.search.METHODS``.
        start: A plan, or the file of one, that the search starts from: the result is not slower, if the plan is in the space of the
            search.  A note says how long its step is, or why it is not in the space.
        options: see `PlanningOptions`.

    Raises:
        InfeasibleError: If no plan fits into the memory limit.  The message names the smallest sufficient limit.
        UserError: If a name is unknown, a value is out of range, or the model cannot be divided over the cluster.
        StopRequestedError: If the stop was requested before a plan was found.

    >>> import autoddl
    >>> plan = autoddl.plan("gpt2", cluster="dgx-a100", nodes=2, batch=64)
    >>> plan
    <Plan gpt2 on dgx-a100: 2 nodes of 8 x NVIDIA A100 SXM4 80 GB; 34.7 ms per step, proven optimal>
    >>> len(plan.layers), plan.layers[0].name, plan.layers[0].kind
    (114, 'wte', 'embedding')

    A plan with a pipeline is used in the same way:

    >>> autoddl.plan("gpt:4x256", cluster="v100-c", nodes=2, batch=8, sequence=128, vocabulary=1024, pipeline="auto")
    <Plan gpt:4x256 on v100-c: 2 nodes of 1 x NVIDIA V100 16 GB, 2 stages; 4.46 ms per step, proven optimal>
    """
    planner_options = _planner_options(method, options)
    if pipeline is None and allow_stale:
        raise UserError("allow_stale is for pipelines; give pipeline='auto', or leave it out")
    if pipeline is not None and planner_options.executor != EAGER:
        raise UserError(f"executor={planner_options.executor!r} is for plans without a pipeline: {NO_PIPELINE}")
    if start is not None and pipeline not in (None, "auto"):
        raise UserError(
            f"start is for searches; pipeline={pipeline!r} takes the plan that the planner of a paper makes"
        )
    graph, devices = _graph_and_cluster(model, inputs, cluster, options)
    first = None if start is None else _start_of(start)
    with _naming_the_sequence(graph):
        if pipeline is None:
            return _plan_without_pipeline(graph, devices, planner_options, options["stop"], first)
        return _plan_with_pipeline(graph, devices, planner_options, pipeline, allow_stale, options["stop"], first)


def _start_of(start: Plan | FilePath) -> Start:
    """Return the plan that a search starts from."""
    from autoddl.pipelines.joint.start import Start

    plan = start if isinstance(start, Plan) else load(start)
    return Start(plan.where, plan.graph, plan.cluster, plan.evaluation.configuration)


def _graph_and_cluster(
    model: ModelLike, inputs: Any, cluster: ClusterLike, options: PlanningOptions
) -> tuple[LayerGraph, Cluster]:
    graph = graph_of(
        model,
        inputs,
        heads=options["heads"],
        sequence=options["sequence"],
        vocabulary=options["vocabulary"],
        dropout=options["dropout"],
        capacity_factor=options["capacity_factor"],
        batch_norm=options["batch_norm"],
    )
    sizes = options["nodes"], options["devices_per_node"], options["latency_s"], options["bandwidth"]
    return graph, cluster_of(cluster, *sizes)


@contextlib.contextmanager
def _naming_the_sequence(graph: LayerGraph) -> Iterator[None]:
    """If no plan fits, add to the error that the sequence is the longest of a configuration, not one that the user gave."""
    from autoddl.pipelines.planners import PlannerError
    from autoddl.search.planner import InfeasibleError, NothingFoundError

    from ..zoo.huggingface import sequence_note_of

    try:
        yield
    except (InfeasibleError, NothingFoundError, PlannerError) as error:
        note = sequence_note_of(graph)
        if note is not None:
            error.args = (f"{error}; {note}",)
        raise


def _planner_options(method: str, options: PlanningOptions) -> Options:
    """Return the options of the planner.  Names are checked here; numbers are checked by the planner."""
    values: dict[str, Any] = {**options, "method": method}
    choices = {
        "method": tuple(METHODS),
        "objective": OBJECTIVES,
        "optimizer": tuple(OPTIMIZERS),
        "executor": EXECUTORS,
    }
    for name, known in choices.items():
        if values[name] not in known:
            raise unknown(name, values[name], known)
    return Options(**{field.name: values[field.name] for field in fields(Options)})


def _plan_without_pipeline(
    graph: LayerGraph, cluster: Cluster, options: Options, stop: Stop | None, start: Start | None
) -> Plan:
    from autoddl.pipelines.joint.megatron_trials import plan_alone

    return _searched_plan(plan_alone(graph, cluster, options, stop, start), stop)


def _plan_with_pipeline(
    graph: LayerGraph,
    cluster: Cluster,
    options: Options,
    pipeline: str,
    allow_stale: bool,
    stop: Stop | None,
    start: Start | None,
) -> Plan:
    from autoddl.pipelines.joint.planner import plan_jointly
    from autoddl.pipelines.joint.result import JointOptions
    from autoddl.search import progress_bar

    joint_options = JointOptions(options, pipeline, allow_stale)
    with progress_bar("pipelines", disable=True if options.quiet else None) as progress:
        result = plan_jointly(graph, cluster, joint_options, progress, stop, start)
    return _searched_plan(result, stop)


def _searched_plan(result: PlanResult, stop: Stop | None) -> Plan:
    """Return the plan that a planner found, with its document and its trust."""
    from ..trusting import trust_of

    trust = trust_of(result, stop)
    return _plan_of(result, planfile.plan_document(result, trust), search=result, trust=trust)


def plan_of_result(result: PlanResult) -> Plan:
    """Return the plan of a planner's result, or of a priced configuration, without its trust."""
    return _plan_of(result, planfile.plan_document(result), search=result)


def _plan_of(source: PlanResult | planfile.PlanFile, document: dict[str, Any], **more: Any) -> Plan:
    """Return a `Plan` of a planner's result or of a plan file; ``more`` are the attributes that only `Plan` has."""
    return Plan(source.graph, source.cluster, source.workload, source.strategies, document, source.evaluation, **more)


def load(path: FilePath, *, edited: bool = False) -> Plan:
    """Read a plan that `Plan.save` or ``autoddl plan -o`` wrote, and check its figures and claims.

    Args:
        path: The plan file.
        edited: Accept a plan that was edited after planning.  Its figures are then computed anew, and the claims of the search
            (optimality, bounds, baselines, trust) are dropped.

    Raises:
        UserError: If the file cannot be read, a field is malformed, or the plan was edited.  The message names the field.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "plan.json")
    ...     autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64).save(path)
    ...     plan = autoddl.load(path)
    >>> plan.optimal, plan.layers[0].name
    (True, 'fc1')
    """
    plan_file = planfile.load_plan(path, edited)
    return _plan_of(plan_file, plan_file.document, where=os.fspath(path))


#: Another name of :func:`load`.
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
    """Compare search methods and baselines on a model and a cluster, without a pipeline.

    Args:
        model, inputs, cluster: As in :func:`autoddl.plan`.
        methods: Names from ``autoddl.search.METHODS``; by default all, but ``exhaustive`` only if the space has at most 10^9
            assignments.
        options: see `PlanningOptions`.

    Raises:
        UserError, InfeasibleError, StopRequestedError: As in :func:`autoddl.plan`.

    >>> import autoddl
    >>> comparison = autoddl.compare("mlp:64,32,16", cluster="local-cpu", batch=16, methods=["exact", "random"])
    >>> [row["name"] for row in comparison.rows]
    ['exact', 'random', 'data parallel', 'zero-1', 'zero-2', 'fsdp', 'megatron', 'summa']
    >>> comparison["random"]["step_s"] >= comparison["exact"]["step_s"]
    True
    """
    names = tuple(METHODS) if methods is None else tuple(methods)
    for name in names:
        if name not in METHODS:
            raise unknown("method", name, tuple(METHODS))
    if options["temperature_s"] is not None and "metropolis-hastings" not in names:
        raise UserError("temperature_s is for metropolis-hastings, which is not among the methods")

    def options_of(method: str) -> Options:
        planner_options = _planner_options(method, options)
        return planner_options if method == "metropolis-hastings" else replace(planner_options, temperature_s=None)

    from autoddl.search.planner import make_plan

    graph, devices = _graph_and_cluster(model, inputs, cluster, options)
    stop = options["stop"] or Stop()
    with _naming_the_sequence(graph):
        exact = make_plan(graph, devices, options_of("exact"), stop=stop)
    rows: list[Mapping[str, Any]] = []
    for name in names:
        if name == "exact":
            rows.append(_planned_row(name, exact))
        elif name == "exhaustive" and methods is None and exact.result.space_size > MAX_ENUMERATION:
            too_many = f"{exact.result.space_size:.1e} assignments are too many to enumerate"
            rows.append({"name": name, "infeasible": too_many})
        else:
            rows.append(_method_row(name, graph, devices, options_of(name), exact.baselines, stop))
    rows += map(_baseline_row, exact.baselines)
    return Comparison(tuple(rows), exact, stop.is_requested)


def _method_row(
    method: str,
    graph: LayerGraph,
    cluster: Cluster,
    options: Options,
    baselines: Sequence[BaselineFigures],
    stop: Stop,
) -> dict[str, Any]:
    """Run a search method and return its row; the plan is that of a baseline if the search finds none better."""
    from autoddl.search.planner import make_plan

    planned = None
    if not stop.is_requested:
        with contextlib.suppress(StopRequestedError):
            planned = make_plan(graph, cluster, options, stop=stop, known=baselines)
    if planned is None or (planned.is_interrupted and not planned.evaluations):
        return {"name": method, "infeasible": "interrupted before a plan was found"}
    return _planned_row(method, planned)


def _planned_row(method: str, planned: Planned) -> dict[str, Any]:
    return {
        "name": method,
        **_figures(planned.assessment),
        "status": planned.status,
        "gap": planned.gap,
        "optimal": planned.optimal,
        "evaluations": planned.evaluations,
        "search_s": planned.search_s,
        **({"taken_from": planned.taken_from} if planned.taken_from else {}),
    }


def _baseline_row(baseline: BaselineFigures) -> dict[str, Any]:
    if baseline.assessment is None:
        return {"name": baseline.name, "infeasible": baseline.infeasible}
    return {"name": baseline.name, **_figures(baseline.assessment), "mesh": baseline.mesh}


def _figures(assessment: Assessment) -> dict[str, float]:
    return {
        "step_s": assessment.step_s,
        "communication_s": assessment.communication_s,
        "memory_bytes": assessment.memory_bytes,
    }
