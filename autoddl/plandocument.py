"""The JSON document of a plan: its members, and the hashes that seal it.

Every plan's document has the same members; a plan without a pipeline has one stage.  There are three kinds of members:

- **Inputs**: ``graph``, ``cluster``, ``links``, ``workload``, ``options`` and ``schedule``; the names and strategies in ``layers``;
  the meshes in ``workers``; the layers, the recomputation and the entry strategy in ``stages``; ``executor``, which is absent (here
  and in ``options``) if it is ``eager``, as in plans that were written before there was another one.
- **Facts**, which follow from the inputs: all other figures in ``layers``, ``workers`` and ``stages`` (:mod:`.stagedocument`),
  ``boundaries``, ``timeline``, the totals, the levels, and the hashes of graph, cluster and options.  :func:`facts_of` computes
  all but the hash of the options, to write a document and again to check a document that is read.
- **Claims** of the search: the certificate (``status``, ``optimal``, ``lower_bound_s``, ``gap``, ``space_size``, ``evaluations``,
  ``search``, ``candidates``), ``rivals`` and ``trust``.  :mod:`autoddl.claims` checks them as far as possible.

=====================  =============================================================================================================
claim                  content
=====================  =============================================================================================================
search                 space (in words), settings, ruled_out_by_memory, ruled_out_by_bound, stage_searches
                       (:class:`autoddl.pipelines.joint.result.Considered`); null if the plan was edited
candidates             for each setting micro_batch, recompute, outcome, lower_bound_s and cost_s; empty if pipelines were searched
rivals                 for each family its name, and either infeasible, or how, its figures, lower_bound_s and paper_step_s
                       (:class:`autoddl.pipelines.joint.result.Rival`); for a baseline also mesh, micro_batch and recompute, which
                       determine its figures
trust                  :func:`.trusting.trust_document`; null if the cluster is not calibrated
=====================  =============================================================================================================

``hashes`` holds the hash of every member, except ``hashes`` and ``content_hash``; so it shows which member was edited.
``content_hash`` is the hash of ``hashes``, and with it of the whole content.

Plans without a search have no claims: all claims are null or empty.  Their status is :data:`EDITED` if the claims of an edited plan
were dropped, and :data:`.result.PRICED` if the user gave the configuration, which was only priced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster, Level, Link
from autoddl.costmodel.documents import Fields, canonical_hash, show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, EXECUTORS
from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.result import PRICED, JointOptions, PlanResult, Rival
from autoddl.search.planner import Candidate

from .executors import pricing_notes
from .stagedocument import stage_facts
from .trusting import PlanTrust, trust_document

__all__ = [
    "EDITED",
    "FORMAT",
    "MEMBERS",
    "NOT_CLAIMED",
    "NOT_SEARCHED",
    "OPTIONAL",
    "RIVAL_FIGURES",
    "SEAL",
    "UNCLAIMED",
    "VERSION",
    "executor_of",
    "facts_of",
    "hashes_of",
    "links_fields",
    "method_of",
    "plan_document",
    "sealed",
    "too_large_note",
    "unclaimed_document",
]

FORMAT = "autoddl-plan"
VERSION = 4

#: The status of an edited plan whose claims were dropped.
EDITED = "edited"
#: Text that stands for the claims of such a plan.
NOT_CLAIMED = "not claimed: the plan was edited"
#: Text that stands for the claims of a plan that was priced without a search.
NOT_SEARCHED = "not searched: the configuration was given"
#: By the status of a plan without claims: its method, and the text that stands for its claims.
UNCLAIMED = {EDITED: ("by hand", NOT_CLAIMED), PRICED: ("given", NOT_SEARCHED)}

#: All members, in the order in which they are written.
MEMBERS = (
    "format", "version", "content_hash", "model", "method", "objective", "status", "optimal", "communication_s", "compute_s",
    "step_s", "lower_bound_s", "gap", "search_s", "space_size", "evaluations", "memory_bytes", "memory_limit_bytes",
    "sent_bytes", "workload", "executor", "options", "levels", "schedule", "workers", "stages", "boundaries", "timeline",
    "layers", "rivals", "search", "candidates", "trust", "notes", "graph_hash", "cluster_hash", "options_hash", "graph",
    "cluster", "links", "hashes",
)  # fmt: skip
#: The members that a document may lack.
OPTIONAL = ("executor",)
#: The members that hold the hashes of the others.
SEAL = ("hashes", "content_hash")
#: The figures of a rival that follow from the rival's plan.
RIVAL_FIGURES = ("step_s", "compute_s", "communication_s", "exposed_communication_s", "bubble_s", "memory_bytes")
#: The figures of the whole step.
_TOTALS = ("communication_s", "compute_s", "step_s", "memory_bytes", "sent_bytes")


# ---- The seal ------------------------------------------------------------------------------------------------------------------


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with its hashes, and with its members in the order of :data:`MEMBERS`."""
    hashes = hashes_of(document)
    members = {**document, "hashes": hashes, "content_hash": canonical_hash(hashes)}
    order = dict.fromkeys((*(name for name in MEMBERS if name in members), *members))
    return {name: members[name] for name in order}


def hashes_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of every member, except those of :data:`SEAL`."""
    return {name: canonical_hash(value) for name, value in document.items() if name not in SEAL}


# ---- Facts ---------------------------------------------------------------------------------------------------------------------


def facts_of(graph: LayerGraph, evaluation: Evaluation, executor: str = EAGER) -> dict[str, Any]:
    """Return the inputs and facts of a plan's document (see the module's docstring), except its options."""
    cluster = evaluation.cluster
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": graph.name,
        **{name: getattr(evaluation, name) for name in _TOTALS},
        "workload": evaluation.configuration.workload.document(),
        **({} if executor == EAGER else {"executor": executor}),
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
        **layer.strategy.document(),
        "sbp": {name: layout and str(layout) for name, layout in layer.strategy.sbp(layer.layer).items()},
        "communication_s": layer.communication_s,
        "compute_s": layer.compute_s,
        "sent_bytes": layer.sent_bytes,
        "memory_bytes": layer.work.state_bytes + layer.work.kept_bytes,
    }


def links_fields(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the member ``links``: the links of both network levels.

    They differ from those in the cluster's document if the user gave another latency or bandwidth.
    """
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


def plan_document(result: PlanResult, trusted: PlanTrust | None = None) -> dict[str, Any]:
    """Return the JSON document of a planner's result.

    Args:
        result: the result.
        trusted: how far the plan can be trusted; None if the cluster is not calibrated.
    """
    if result.layout is not None:
        facts = facts_of(result.graph, result.evaluation)
        return unclaimed_document(facts, result.options.base.objective, result.memory_limit_bytes, PRICED)
    options, considered = option_fields(result.options), result.considered
    claims = {
        "method": method_of(result.options),
        "objective": result.options.base.objective,
        "status": result.status,
        "optimal": result.optimal,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "search_s": result.search_s,
        "space_size": considered.configurations,
        "evaluations": considered.simulated,
        "memory_limit_bytes": result.memory_limit_bytes,
        "options": options,
        "options_hash": canonical_hash(options),
        "rivals": [_rival_fields(rival) for rival in result.rivals],
        "search": {
            "space": considered.space,
            "settings": considered.settings,
            "ruled_out_by_memory": considered.ruled_out_by_memory,
            "ruled_out_by_bound": considered.ruled_out_by_bound,
            "stage_searches": considered.stage_searches,
        },
        "candidates": [_candidate_fields(candidate) for candidate in result.candidates],
        "trust": trust_document(trusted),
        "notes": notes_of(result, trusted),
    }
    return sealed({**facts_of(result.graph, result.evaluation, result.options.base.executor), **claims})


def unclaimed_document(
    facts: Mapping[str, Any], objective: str, memory_limit_bytes: float, status: str = EDITED
) -> dict[str, Any]:
    """Return the document of a plan without a search: its facts, without claims.

    Args:
        facts: the inputs and facts of the plan, from :func:`facts_of`.
        objective: what the search minimised before the plan was edited; ``step`` for a plan that was priced.
        memory_limit_bytes: the memory limit.
        status: why there are no claims, one of :data:`UNCLAIMED`.
    """
    dropped = ("optimal", "lower_bound_s", "gap", "search_s", "space_size", "evaluations", "options", "search", "trust")
    return sealed(
        {
            **facts,
            **dict.fromkeys(dropped),
            "method": UNCLAIMED[status][0],
            "objective": objective,
            "status": status,
            "memory_limit_bytes": memory_limit_bytes,
            "options_hash": canonical_hash(None),
            "rivals": [],
            "candidates": [],
            "notes": [*facts["graph"]["notes"], *too_large_note(facts["memory_bytes"], memory_limit_bytes)],
        }
    )


def too_large_note(memory_bytes: float, limit_bytes: float) -> tuple[str, ...]:
    """Return the note that a plan does not fit in memory; none if it does.

    >>> too_large_note(3 * 2**30, 2**31)
    ('it does not fit: a device needs 3 GiB, the limit is 2 GiB',)
    """
    if memory_bytes <= limit_bytes:
        return ()
    needed, limit = format_bytes(memory_bytes), format_bytes(limit_bytes)
    return (f"it does not fit: a device needs {needed}, the limit is {limit}",)


def method_of(options: JointOptions) -> str:
    """Return the name of the search: one of ``METHODS`` without a pipeline, else ``joint`` or the planner of a paper."""
    return {None: options.base.method, "auto": "joint"}.get(options.pipeline, str(options.pipeline))


def option_fields(options: JointOptions) -> dict[str, Any]:
    """The member ``options``: all options of the user but ``quiet``, which does not change the plan, and ``executor`` if eager."""
    fields = {**asdict(options.base), "pipeline": options.pipeline, "allow_stale": options.allow_stale}
    del fields["quiet"]
    if fields["executor"] == EAGER:
        del fields["executor"]
    return fields


def executor_of(fields: Fields) -> str:
    """Read the executor of a plan's document or of its options.

    Raises:
        UserError: there is no such executor.
    """
    if "executor" not in fields:
        return EAGER
    executor = fields.text("executor")
    if executor not in EXECUTORS:
        raise UserError(f"{fields.where}: executor is {show_json(executor)}, should be one of {', '.join(EXECUTORS)}")
    return executor


def notes_of(result: PlanResult, trusted: PlanTrust | None) -> list[str]:
    """Return the remarks on a plan for the reader: on its model, its calibration, its execution, and its search."""
    executed = pricing_notes(result.graph, result.workload, result.options.base.executor)
    of_execution = [*executed, *([result.execution_note] if result.execution_note else [])]
    return [*result.graph.notes, *(trusted.notes if trusted else ()), *of_execution, *result.notes]


def _candidate_fields(candidate: Candidate) -> dict[str, Any]:
    return {
        "micro_batch": candidate.micro_batch,
        "recompute": candidate.recompute,
        "outcome": candidate.outcome,
        "lower_bound_s": _finite(candidate.lower_bound),
        "cost_s": _finite(candidate.cost),
    }


def _finite(value: float) -> float | None:
    """The value; None instead of infinity, which JSON does not have."""
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
