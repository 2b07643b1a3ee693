"""What stands in a plan's document, and the hashes that seal it.

A document has three kinds of members:

- **Inputs**: ``graph``, ``cluster``, ``links``, ``workload``, ``options``; of ``layers`` the names and strategies; of ``pipeline``
  the mesh, the schedule and the stages.
- **Facts**, which follow from the inputs: all other figures of ``layers`` and ``pipeline``, the totals, the levels, the hashes of
  graph, cluster and options.  :func:`facts_of` makes them, for the writer and for the reader, who compares them.
- **Claims** of the search: the certificate (``status``, ``optimal``, ``lower_bound_s``, ``gap``), ``baselines``, ``candidates``,
  ``trust``, and of ``pipeline`` ``search`` and ``families``.  :mod:`autoddl.claims` says what is checked of them.

``hashes`` holds a hash of every other member, and ``content_hash`` is the hash of those: the hash of the whole content, which
also tells which member was edited.  A plan whose claims were dropped has the status :data:`EDITED` and null in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Union

from autoddl.costmodel.assessment import Assessment, LayerAssessment
from autoddl.costmodel.cluster import Cluster, Level, Link
from autoddl.costmodel.documents import canonical_hash
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.result import JointOptions, JointPlan
from autoddl.search.planner import BaselineFigures, Candidate, Options, Planned

from .pipelinedocument import family_fields, pipeline_facts, search_fields
from .trusting import PlanTrust, trust_document

__all__ = [
    "EDITED",
    "FORMAT",
    "MEMBERS",
    "NOT_CLAIMED",
    "PIPELINE_CLAIMS",
    "SEAL",
    "VERSION",
    "baseline_figures",
    "facts_of",
    "hashes_of",
    "joint_document",
    "links_fields",
    "plan_document",
    "sealed",
    "unclaimed_document",
]

FORMAT = "autoddl-plan"
VERSION = 3

#: The status of a plan that was edited and loaded all the same, its claims dropped; and what people read in their place.
EDITED = "edited"
NOT_CLAIMED = "not claimed: the plan was edited"
#: The method that such a plan was made with.
BY_HAND = "by hand"

#: All members, in the order in which they are written; ``stage_levels`` and ``pipeline`` of plans with a pipeline alone.
MEMBERS = (
    "format", "version", "content_hash", "model", "method", "objective", "status", "optimal", "communication_s", "compute_s",
    "step_s", "lower_bound_s", "gap", "search_s", "space_size", "evaluations", "memory_bytes", "memory_limit_bytes",
    "sent_bytes", "workload", "options", "levels", "stage_levels", "pipeline", "layers", "baselines", "candidates", "trust",
    "notes", "graph_hash", "cluster_hash", "options_hash", "graph", "cluster", "links", "hashes",
)  # fmt: skip
#: The members of the member ``pipeline`` that are claims.
PIPELINE_CLAIMS = ("search", "families")
#: The members that seal the others.
SEAL = ("hashes", "content_hash")
_TOTALS = ("communication_s", "compute_s", "step_s", "memory_bytes", "sent_bytes")

Truth = Union[Assessment, Evaluation]


# ---- The seal ------------------------------------------------------------------------------------------------------------------


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the hashes of its members and of its whole content, its members in their order."""
    hashes = hashes_of(document)
    members = {**document, "hashes": hashes, "content_hash": canonical_hash(hashes)}
    order = dict.fromkeys((*(name for name in MEMBERS if name in members), *members))
    return {name: members[name] for name in order}


def hashes_of(document: Mapping[str, Any]) -> dict[str, str]:
    """The hash of every member but the seal's own."""
    return {name: canonical_hash(value) for name, value in document.items() if name not in SEAL}


# ---- Facts ---------------------------------------------------------------------------------------------------------------------


def facts_of(graph: LayerGraph, cluster: Cluster, workload: Workload, truth: Truth) -> dict[str, Any]:
    """The members that follow from a plan's inputs, and the inputs as they are written; of ``pipeline`` without its claims."""
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "model": graph.name,
        **{name: getattr(truth, name) for name in _TOTALS},
        "workload": workload.document(),
        "levels": _level_fields(cluster.levels),
        "layers": _layers_fields(truth),
        "graph_hash": graph.hash,
        "cluster_hash": cluster.hash,
        "graph": graph.document(),
        "cluster": cluster.document,
        "links": links_fields(cluster),
    }
    if isinstance(truth, Evaluation):
        facts["stage_levels"] = _level_fields(truth.configuration.mesh_of(0).devices(cluster).levels)
        facts["pipeline"] = pipeline_facts(truth)
    return facts


def _level_fields(levels: tuple[Level, ...]) -> list[dict[str, Any]]:
    return [{"name": level.name, "size": level.size} for level in levels]


def _layers_fields(truth: Truth) -> list[dict[str, Any]]:
    if isinstance(truth, Assessment):
        return [_layer_fields(layer) for layer in truth.layers]
    return [
        {**_layer_fields(layer), "stage": number}
        for number, stage in enumerate(truth.stages)
        for layer in stage.assessment.layers
    ]


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


def links_fields(cluster: Cluster) -> list[dict[str, Any]]:
    """The member ``links``: of both levels, which the command line may have replaced in the cluster's own document."""
    return [_link_fields(link) for link in cluster.links]


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


# ---- Claims --------------------------------------------------------------------------------------------------------------------


def plan_document(planned: Planned, trusted: PlanTrust | None = None) -> dict[str, Any]:
    """The JSON document of a planner's answer; ``trust`` is null where the cluster was not calibrated."""
    options = option_fields(planned.options)
    claims = {
        "method": planned.options.method,
        "objective": planned.options.objective,
        "status": planned.status,
        "optimal": planned.optimal,
        "lower_bound_s": planned.lower_bound,
        "gap": planned.gap,
        "search_s": planned.search_s,
        "space_size": planned.result.space_size,
        "evaluations": planned.evaluations,
        "memory_limit_bytes": planned.memory_limit_bytes,
        "options": options,
        "options_hash": canonical_hash(options),
        "baselines": {figures.name: _baseline_fields(figures) for figures in planned.baselines},
        "candidates": [_candidate_fields(candidate) for candidate in planned.candidates],
        "trust": trust_document(trusted),
        "notes": [*planned.graph.notes, *(trusted.notes if trusted else ()), *planned.notes],
    }
    return sealed({**facts_of(planned.graph, planned.cluster, planned.workload, planned.assessment), **claims})


def joint_document(planned: JointPlan) -> dict[str, Any]:
    """The JSON document of the joint planner's answer: a plan's, with the member ``pipeline`` (:mod:`autoddl.pipelinedocument`).

    Strategies are over the devices of a stage, and the figures are those of the pipeline.
    """
    evaluation, options = planned.evaluation, joint_option_fields(planned.options)
    certificate = {"lower_bound_s": planned.lower_bound_s, "optimal": planned.optimal, "gap": planned.gap}
    facts = facts_of(planned.graph, planned.cluster, planned.configuration.workload, evaluation)
    facts["pipeline"] |= {
        "search": search_fields(planned.considered, certificate, planned.options),
        "families": [family_fields(figures) for figures in planned.families],
    }
    claims = {
        "method": "joint" if planned.options.pipeline == "auto" else planned.options.pipeline,
        "objective": planned.options.base.objective,
        "status": planned.status,
        **certificate,
        "search_s": planned.search_s,
        "space_size": planned.considered.configurations,
        "evaluations": planned.considered.simulated,
        "memory_limit_bytes": planned.memory_limit_bytes,
        "options": options,
        "options_hash": canonical_hash(options),
        "baselines": {},
        "candidates": [],
        "trust": None,
        "notes": [*planned.graph.notes, *planned.notes],
    }
    return sealed({**facts, **claims})


def unclaimed_document(facts: Mapping[str, Any], objective: str, memory_limit_bytes: float) -> dict[str, Any]:
    """The document of a plan that was edited: its facts computed anew, and nothing claimed.

    Args:
        facts: of :func:`facts_of`.
        objective, memory_limit_bytes: what was minimised under which limit, before the plan was edited.
    """
    nothing = ("optimal", "lower_bound_s", "gap", "search_s", "space_size", "evaluations", "options", "trust")
    document = {
        **facts,
        **dict.fromkeys(nothing),
        "method": BY_HAND,
        "objective": objective,
        "status": EDITED,
        "memory_limit_bytes": memory_limit_bytes,
        "options_hash": canonical_hash(None),
        "baselines": {},
        "candidates": [],
        "notes": list(facts["graph"]["notes"]),
    }
    if "pipeline" in facts:
        document["pipeline"] = {**facts["pipeline"], "search": None, "families": []}
    return sealed(document)


def option_fields(options: Options) -> dict[str, Any]:
    """What the user asked for (but how it was shown)."""
    fields = asdict(options)
    del fields["quiet"]
    return fields


def joint_option_fields(options: JointOptions) -> dict[str, Any]:
    """What the user asked of the joint planner (but how it was shown)."""
    fields = asdict(options)
    fields["base"] = option_fields(options.base)
    return fields


def _candidate_fields(candidate: Candidate) -> dict[str, Any]:
    return {
        "micro_batch": candidate.micro_batch,
        "recompute": candidate.recompute,
        "outcome": candidate.outcome,
        "lower_bound_s": _finite(candidate.lower_bound),
        "cost_s": _finite(candidate.cost),
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _baseline_fields(figures: BaselineFigures) -> dict[str, Any]:
    if figures.assessment is None or figures.workload is None:
        return {"infeasible": figures.infeasible}
    return {
        **baseline_figures(figures.assessment),
        "mesh": figures.mesh,
        "micro_batch": figures.workload.micro_batch,
        "recompute": figures.workload.recompute,
    }


def baseline_figures(assessment: Assessment) -> dict[str, float]:
    """The figures of a baseline that follow from its mesh, micro-batch and recomputation."""
    return {name: getattr(assessment, name) for name in ("communication_s", "step_s", "memory_bytes")}
