"""What stands in a plan's document, and the hashes that seal it.

A document has the same members for every plan; one without a pipeline has one stage.  There are three kinds of them:

- **Inputs**: ``graph``, ``cluster``, ``links``, ``workload``, ``options``; of ``layers`` the names and strategies; the
  ``schedule``; of ``workers`` the meshes; of ``stages`` the layers, recomputation and entry.
- **Facts**, which follow from the inputs: all other figures of ``layers``, ``workers`` and ``stages`` (:mod:`.stagedocument`),
  ``boundaries``, ``timeline``, the totals, the levels, the hashes of graph, cluster and options.  :func:`facts_of` makes them, for
  the writer and for the reader, who compares them.
- **Claims** of the search: the certificate (``status``, ``optimal``, ``lower_bound_s``, ``gap``, ``space_size``, ``evaluations``,
  ``search``, ``candidates``), ``rivals`` and ``trust``.  :mod:`autoddl.claims` says what is checked of them.

=====================  =============================================================================================================
claim                  what it is
=====================  =============================================================================================================
search                 space (in words), settings, ruled_out_by_memory, ruled_out_by_bound, stage_searches
                       (:class:`.result.Considered`); null where the plan was edited
candidates             of a plan without a pipeline per setting: micro_batch, recompute, outcome, lower_bound_s, cost_s
rivals                 per family: name, and infeasible or how, its figures, lower_bound_s, paper_step_s
                       (:class:`.result.Rival`); of a baseline also mesh, micro_batch and recompute, which its figures follow from
trust                  :func:`.trusting.trust_document`; null where the cluster is not calibrated
=====================  =============================================================================================================

``hashes`` holds a hash of every other member, and ``content_hash`` is the hash of those: the hash of the whole content, which
also tells which member was edited.  A plan whose claims were dropped has the status :data:`EDITED` and null in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster, Level, Link
from autoddl.costmodel.documents import canonical_hash
from autoddl.costmodel.graph import LayerGraph
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.result import JointOptions, PlanResult, Rival
from autoddl.search.planner import Candidate

from .stagedocument import stage_facts
from .trusting import PlanTrust, trust_document

__all__ = [
    "EDITED",
    "FORMAT",
    "MEMBERS",
    "NOT_CLAIMED",
    "RIVAL_FIGURES",
    "SEAL",
    "VERSION",
    "facts_of",
    "hashes_of",
    "links_fields",
    "method_of",
    "plan_document",
    "sealed",
    "unclaimed_document",
]

FORMAT = "autoddl-plan"
VERSION = 4

#: The status of a plan that was edited and loaded all the same, its claims dropped; and what people read in their place.
EDITED = "edited"
NOT_CLAIMED = "not claimed: the plan was edited"
#: The method that such a plan was made with.
BY_HAND = "by hand"

#: All members, in the order in which they are written.
MEMBERS = (
    "format", "version", "content_hash", "model", "method", "objective", "status", "optimal", "communication_s", "compute_s",
    "step_s", "lower_bound_s", "gap", "search_s", "space_size", "evaluations", "memory_bytes", "memory_limit_bytes",
    "sent_bytes", "workload", "options", "levels", "schedule", "workers", "stages", "boundaries", "timeline", "layers", "rivals",
    "search", "candidates", "trust", "notes", "graph_hash", "cluster_hash", "options_hash", "graph", "cluster", "links", "hashes",
)  # fmt: skip
#: The members that seal the others.
SEAL = ("hashes", "content_hash")
#: The figures of a rival that follow from its plan.
RIVAL_FIGURES = ("step_s", "compute_s", "communication_s", "exposed_communication_s", "bubble_s", "memory_bytes")
_TOTALS = ("communication_s", "compute_s", "step_s", "memory_bytes", "sent_bytes")


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


def facts_of(graph: LayerGraph, evaluation: Evaluation) -> dict[str, Any]:
    """The members that follow from a plan's inputs, and the inputs as they are written."""
    cluster = evaluation.cluster
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": graph.name,
        **{name: getattr(evaluation, name) for name in _TOTALS},
        "workload": evaluation.configuration.workload.document(),
        "levels": _level_fields(cluster.levels),
        **stage_facts(evaluation),
        "layers": [
            {**_layer_fields(layer), "stage": number}
            for number, stage in enumerate(evaluation.stages)
            for layer in stage.assessment.layers
        ],
        "graph_hash": graph.hash,
        "cluster_hash": cluster.hash,
        "graph": graph.document(),
        "cluster": cluster.document,
        "links": links_fields(cluster),
    }


def _level_fields(levels: tuple[Level, ...]) -> list[dict[str, Any]]:
    return [{"name": level.name, "size": level.size} for level in levels]


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


def plan_document(found: PlanResult, trusted: PlanTrust | None = None) -> dict[str, Any]:
    """The JSON document of a planner's answer; ``trust`` is null where the cluster was not calibrated."""
    options, considered = option_fields(found.options), found.considered
    claims = {
        "method": method_of(found.options),
        "objective": found.options.base.objective,
        "status": found.status,
        "optimal": found.optimal,
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "search_s": found.search_s,
        "space_size": considered.configurations,
        "evaluations": considered.simulated,
        "memory_limit_bytes": found.memory_limit_bytes,
        "options": options,
        "options_hash": canonical_hash(options),
        "rivals": [_rival_fields(rival) for rival in found.rivals],
        "search": {
            "space": considered.space,
            "settings": considered.settings,
            "ruled_out_by_memory": considered.ruled_out_by_memory,
            "ruled_out_by_bound": considered.ruled_out_by_bound,
            "stage_searches": considered.stage_searches,
        },
        "candidates": [_candidate_fields(candidate) for candidate in found.candidates],
        "trust": trust_document(trusted),
        "notes": [*found.graph.notes, *(trusted.notes if trusted else ()), *found.notes],
    }
    return sealed({**facts_of(found.graph, found.evaluation), **claims})


def unclaimed_document(facts: Mapping[str, Any], objective: str, memory_limit_bytes: float) -> dict[str, Any]:
    """The document of a plan that was edited: its facts computed anew, and nothing claimed.

    Args:
        facts: of :func:`facts_of`.
        objective, memory_limit_bytes: what was minimised under which limit, before the plan was edited.
    """
    nothing = ("optimal", "lower_bound_s", "gap", "search_s", "space_size", "evaluations", "options", "search", "trust")
    return sealed(
        {
            **facts,
            **dict.fromkeys(nothing),
            "method": BY_HAND,
            "objective": objective,
            "status": EDITED,
            "memory_limit_bytes": memory_limit_bytes,
            "options_hash": canonical_hash(None),
            "rivals": [],
            "candidates": [],
            "notes": list(facts["graph"]["notes"]),
        }
    )


def method_of(options: JointOptions) -> str:
    """The search that made a plan: of ``METHODS`` without a pipeline; ``joint``, or a paper's planner."""
    return {None: options.base.method, "auto": "joint"}.get(options.pipeline, str(options.pipeline))


def option_fields(options: JointOptions) -> dict[str, Any]:
    """What the user asked for (but how it was shown)."""
    fields = {**asdict(options.base), "pipeline": options.pipeline, "allow_stale": options.allow_stale}
    del fields["quiet"]
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


def _rival_fields(rival: Rival) -> dict[str, Any]:
    if rival.infeasible is not None:
        return {"name": rival.name, "infeasible": rival.infeasible}
    fields: dict[str, Any] = {
        "name": rival.name,
        "how": rival.how,
        **{name: getattr(rival, name) for name in RIVAL_FIGURES},
    }
    fields |= {"lower_bound_s": rival.lower_bound_s, "paper_step_s": rival.paper_step_s}
    if rival.mesh is not None and rival.configuration is not None:
        workload = rival.configuration.workload
        fields |= {"mesh": rival.mesh, "micro_batch": workload.micro_batch, "recompute": workload.recompute}
    return fields
