"""The plan: what the planner found, as a JSON document that everything else works from.

A plan carries the hashes of the graph, the cluster and the options that it was made for; whoever applies it to something else
is told which of them differs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoddl.costmodel.assessment import Assessment, LayerAssessment, assess
from autoddl.costmodel.cluster import Cluster, Link
from autoddl.costmodel.cluster import from_document as cluster_from_document
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.documents import Fields, canonical_hash, check_document, load_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, graph_from_document
from autoddl.costmodel.reading import is_whole
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.costmodel.writing import write_document

from .joint.document import pipeline_fields, recompute_pipeline
from .joint.evaluation import Evaluation
from .joint.result import JointOptions, JointPlan
from .planner import BaselineFigures, Planned
from .trusting import PlanTrust, trust_document

__all__ = ["Plan", "joint_document", "load_plan", "plan_document", "save_plan"]

FORMAT = "autoddl-plan"
#: Of the documents that hold a pipeline.
PIPELINE_VERSION = 2


@dataclass(frozen=True)
class Plan:
    """A plan as read from its document: all that is needed to apply, verify or launch it.

    Attributes:
        graph, cluster, workload: what it was made for.
        strategies: of every layer, by name; over the devices of its stage where the plan is a pipeline.
        document: the whole JSON document.
        pipeline: the stages, their schedule and its simulation; None of a plan without its member ``pipeline``.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    strategies: Mapping[str, Strategy]
    document: dict[str, Any]
    pipeline: Evaluation | None = None

    @property
    def num_stages(self) -> int:
        """1 of a plan without a pipeline."""
        return 1 if self.pipeline is None else len(self.pipeline.stages)

    def check_graph(self, graph: LayerGraph) -> None:
        """Refuse a graph other than the one that the plan was made for.

        Raises:
            UserError: naming the first difference.
        """
        if graph.hash == self.graph.hash:
            return
        raise UserError(f"the plan was made for another model than {graph.name}: {_difference(self.graph, graph)}")


def _difference(planned: LayerGraph, given: LayerGraph) -> str:
    for mine, other in zip(planned.layers, given.layers):
        if mine != other or dict(mine.attributes) != dict(other.attributes):
            return f"it has {mine.describe()} where the model has {other.describe()}"
    if len(planned.layers) != len(given.layers):
        return f"it has {len(planned.layers)} layers, the model has {len(given.layers)}"
    return "their edges differ"


def plan_document(planned: Planned, trusted: PlanTrust | None = None) -> dict[str, Any]:
    """The JSON document of a planner's answer; ``trust`` is null where the cluster was not calibrated."""
    assessment, result = planned.assessment, planned.result
    return {
        "format": FORMAT,
        "version": 1,
        "model": planned.graph.name,
        "method": planned.options.method,
        "objective": planned.options.objective,
        "status": planned.status,
        "optimal": planned.optimal,
        "communication_s": assessment.communication_s,
        "compute_s": assessment.compute_s,
        "step_s": assessment.step_s,
        "lower_bound_s": planned.lower_bound,
        "gap": planned.gap,
        "search_s": planned.search_s,
        "space_size": result.space_size,
        "evaluations": planned.evaluations,
        "memory_bytes": assessment.memory_bytes,
        "memory_limit_bytes": planned.memory_limit_bytes,
        "sent_bytes": assessment.sent_bytes,
        "workload": planned.workload.document(),
        "levels": [{"name": level.name, "size": level.size} for level in planned.cluster.levels],
        "layers": [_layer_fields(layer) for layer in assessment.layers],
        "baselines": {figures.name: _baseline_fields(figures) for figures in planned.baselines},
        "candidates": [
            {
                "micro_batch": candidate.micro_batch,
                "recompute": candidate.recompute,
                "outcome": candidate.outcome,
                "lower_bound_s": _finite(candidate.lower_bound),
                "cost_s": _finite(candidate.cost),
            }
            for candidate in planned.candidates
        ],
        "trust": trust_document(trusted),
        "notes": [*planned.graph.notes, *(trusted.notes if trusted else ())],
        "graph_hash": planned.graph.hash,
        "cluster_hash": planned.cluster.hash,
        "options_hash": options_hash(planned),
        "graph": planned.graph.document(),
        "cluster": planned.cluster.document,
        "links": [_link_fields(link) for link in planned.cluster.links],
    }


def joint_document(planned: JointPlan) -> dict[str, Any]:
    """The JSON document of the joint planner's answer: a plan's, with the member ``pipeline`` (:mod:`autoddl.joint.document`).

    Version 2: strategies are over the devices of a stage, and the figures are those of the pipeline.
    """
    evaluation, options = planned.evaluation, planned.options
    configuration = evaluation.configuration
    layers = []
    for number, stage in enumerate(evaluation.stages):
        layers += [{**_layer_fields(layer), "stage": number} for layer in stage.assessment.layers]
    search = {
        "lower_bound_s": planned.lower_bound_s,
        "optimal": planned.optimal,
        "gap": planned.gap,
        "pipeline": options.pipeline,
        "allow_stale": options.allow_stale,
    }
    return {
        "format": FORMAT,
        "version": PIPELINE_VERSION,
        "model": planned.graph.name,
        "method": "joint" if options.pipeline == "auto" else options.pipeline,
        "objective": "step",
        "status": planned.status,
        "optimal": planned.optimal,
        "communication_s": evaluation.communication_s,
        "compute_s": evaluation.compute_s,
        "step_s": evaluation.step_s,
        "lower_bound_s": planned.lower_bound_s,
        "gap": planned.gap,
        "search_s": planned.search_s,
        "space_size": planned.considered.configurations,
        "evaluations": planned.considered.simulated,
        "memory_bytes": evaluation.memory_bytes,
        "memory_limit_bytes": planned.memory_limit_bytes,
        "sent_bytes": evaluation.sent_bytes,
        "workload": configuration.workload.document(),
        "levels": [{"name": level.name, "size": level.size} for level in planned.cluster.levels],
        "stage_levels": [
            {"name": level.name, "size": level.size}
            for level in configuration.mesh_of(0).devices(planned.cluster).levels
        ],
        "pipeline": pipeline_fields(evaluation, planned.considered, planned.families, search),
        "layers": layers,
        "baselines": {},
        "candidates": [],
        "trust": None,
        "notes": [*planned.graph.notes, *planned.notes],
        "graph_hash": planned.graph.hash,
        "cluster_hash": planned.cluster.hash,
        "options_hash": canonical_hash(_options_fields(options)),
        "graph": planned.graph.document(),
        "cluster": planned.cluster.document,
        "links": [_link_fields(link) for link in planned.cluster.links],
    }


def _options_fields(options: JointOptions) -> dict[str, Any]:
    fields = asdict(options)
    del fields["base"]["quiet"]
    return fields


def _link_fields(link: Link) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "latency_s": link.latency_s,
        "bandwidth": link.bandwidth,
        "collectives": {
            collective.value: {"latency_s": latency_s, "bandwidth": bandwidth}
            for collective, (latency_s, bandwidth) in link.collectives.items()
        },
    }
    for (collective, size), (latency_s, bandwidth) in link.groups.items():
        groups = fields["collectives"][collective.value].setdefault("groups", {})
        groups[str(size)] = {"latency_s": latency_s, "bandwidth": bandwidth}
    for collective, copy in link.copies.items():
        fields["collectives"][collective.value]["copy_s_per_byte"] = copy
    return fields


def _link(fields: Fields) -> Link:
    table = fields.object("collectives")
    known = {collective.value: collective for collective in Collective}
    link = Link(*_pair(fields))
    for name in table.value:
        if name not in known:
            raise UserError(f"{table.where}: unknown collective {name!r}; known ones are {', '.join(known)}")
        own = table.object(name)
        link.collectives[known[name]] = _pair(own)
        if "copy_s_per_byte" in own:
            link.copies[known[name]] = own.number("copy_s_per_byte")
        groups = own.object("groups") if "groups" in own else None
        for size in groups.value if groups else ():
            assert groups is not None
            if not is_whole(size):
                raise UserError(f"{groups.where}: {size!r} should be the number of devices of a group")
            link.groups[known[name], int(size)] = _pair(groups.object(size))
    return link


def _pair(fields: Fields) -> tuple[float, float]:
    return fields.number("latency_s"), fields.number("bandwidth", exclusive=True)


def options_hash(planned: Planned) -> str:
    """A hash of what the user asked for (but how it was shown)."""
    fields = asdict(planned.options)
    del fields["quiet"]
    return canonical_hash(fields)


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _layer_fields(layer: LayerAssessment) -> dict[str, Any]:
    return {
        "name": layer.layer.name,
        "kind": layer.layer.kind,
        "strategy": [list(split) for split in layer.strategy.splits],
        **({"summa": True} if layer.strategy.summa else {}),
        "sbp": {name: layout and str(layout) for name, layout in layer.strategy.sbp(layer.layer).items()},
        "communication_s": layer.communication_s,
        "compute_s": layer.compute_s,
        "sent_bytes": layer.sent_bytes,
        "memory_bytes": layer.work.state_bytes + layer.work.kept_bytes,
    }


def _baseline_fields(figures: BaselineFigures) -> dict[str, Any]:
    if figures.assessment is None or figures.workload is None:
        return {"infeasible": figures.infeasible}
    return {
        "communication_s": figures.assessment.communication_s,
        "step_s": figures.assessment.step_s,
        "memory_bytes": figures.assessment.memory_bytes,
        "mesh": figures.mesh,
        "micro_batch": figures.workload.micro_batch,
        "recompute": figures.workload.recompute,
    }


def save_plan(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write a plan, atomically."""
    write_document(path, document)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan.

    Raises:
        UserError: it cannot be read, a field is malformed, or its hashes are not those of what it holds.
    """
    value = load_json(path)
    has_pipeline = isinstance(value, dict) and "pipeline" in value
    fields = check_document(value, FORMAT, PIPELINE_VERSION if has_pipeline else 1, os.fspath(path))
    return plan_from_document(fields, os.fspath(path))


def plan_from_document(fields: Fields, where: str) -> Plan:
    """A plan from the fields of its document.

    Raises:
        UserError: as :func:`load_plan`.
    """
    graph = graph_from_document(fields.get("graph"), f"{where}: graph")
    cluster = cluster_from_document(fields.get("cluster"), f"{where}: cluster")
    workload = Workload.from_fields(fields.object("workload"))
    if graph.hash != fields.text("graph_hash"):
        raise UserError(f"{where}: graph_hash is not the hash of its graph; the file was edited, plan again")
    strategies = {}
    for layer in fields.objects("layers"):
        splits = []
        for split in layer.sequence("strategy"):
            if not (isinstance(split, list) and len(split) == 3 and all(type(p) is int and p > 0 for p in split)):
                raise UserError(f"{layer.where}: strategy holds {split!r}, should hold [p0, p1, p2]")
            splits.append((split[0], split[1], split[2]))
        summa = "summa" in layer and layer.boolean("summa")
        strategies[layer.text("name")] = Strategy(tuple(splits), summa)
    missing = [layer.name for layer in graph.layers if layer.name not in strategies]
    if missing:
        raise UserError(f"{where}: layers lacks {missing[0]!r}")
    links = fields.objects("links")
    if len(links) != 2:
        raise UserError(f"{where}: links should hold two levels")
    # Links that the command line replaced are not in the cluster's own document.
    cluster = replace(cluster, links=(_link(links[0]), _link(links[1])))
    if cluster.hash != fields.text("cluster_hash"):
        raise UserError(f"{where}: cluster_hash is not the hash of its cluster; the file was edited, plan again")
    unknown = sorted(set(strategies) - {layer.name for layer in graph.layers})
    if unknown:
        raise UserError(f"{where}: layers holds {unknown[0]!r}, which its graph does not have")
    if len(fields.sequence("layers")) != len(strategies):
        raise UserError(f"{where}: layers should hold each layer of its graph once")
    if "pipeline" in fields:
        pipeline = recompute_pipeline(fields.object("pipeline"), graph, cluster, workload, strategies)
        plan = Plan(graph, cluster, workload, strategies, fields.value, pipeline)
    else:
        plan = Plan(graph, cluster, workload, strategies, fields.value)
    _check_figures(plan, fields, where)
    return plan


def _check_figures(plan: Plan, fields: Fields, where: str) -> None:
    """A plan says of its strategies what they cost: figures that are not theirs mean that it was edited."""
    truth: Assessment | Evaluation
    try:
        truth = assessment_of(plan) if plan.pipeline is None else plan.pipeline
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    for name in ("communication_s", "compute_s", "step_s", "memory_bytes", "sent_bytes"):
        value = getattr(truth, name)
        if not math.isclose(fields.number(name), value, rel_tol=1e-9):
            raise UserError(f"{where}: {name} is {fields.number(name)!r}, its strategies make it {value!r}; plan again")


def assessment_of(plan: Plan) -> Assessment:
    """The figures of a plan without a pipeline, computed anew.

    Raises:
        UserError: the plan is a pipeline, whose figures are ``plan.pipeline``.
    """
    if plan.num_stages > 1:
        raise UserError("the plan is a pipeline; its figures are those of its schedule")
    return assess(plan.graph, plan.cluster, plan.workload, plan.strategies)
