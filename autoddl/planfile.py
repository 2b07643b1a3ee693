"""Plans: read from a JSON document, checked, and written.  Applying, verifying, exporting and launching start from a plan.

**Checks.**  :func:`load_plan` compares the hashes in a document with its members, its figures with those computed from its
strategies, and its claims with each other and with the figures (:mod:`autoddl.claims`).  A plan that was edited is refused, or
loaded without its claims.

**Model.**  A plan holds its graph.  If the plan is applied to another model, the error names the first layer that differs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.cluster import from_document as cluster_from_document
from autoddl.costmodel.documents import Fields, load_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, graph_from_document
from autoddl.costmodel.graph_meshes import EAGER, NO_PIPELINE, why_not_executable
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.costmodel.writing import write_document
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate, evaluate_unpipelined
from autoddl.pipelines.joint.partition import chain_of

from .claims import check_claims, check_facts, edited_member
from .plandocument import (
    FORMAT,
    UNCLAIMED,
    VERSION,
    executor_of,
    facts_of,
    links_fields,
    plan_document,
    unclaimed_document,
)
from .stagedocument import read_configuration, read_strategy

__all__ = [
    "PlanFile",
    "load_plan",
    "plan_document",
    "plan_from_document",
    "save_plan",
    "unpipelined_plan",
]

#: The end of an error message: what to do with a plan that was edited.
_REMEDY = "plan again, or drop its claims with edited=True"


@dataclass(frozen=True, repr=False)
class PlanFile:
    """A plan, with all that is needed to apply, verify or launch it.

    Attributes:
        graph, cluster, workload: the model, the machine and the batch that the plan is for.
        strategies: the strategy of every layer, by name, over the devices of its stage.
        document: the checked JSON document; without claims if the plan was edited, empty if the plan has no document.
        evaluation: stages, schedule and all figures; a plan without a pipeline is a pipeline of one stage.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    strategies: Mapping[str, Strategy]
    document: dict[str, Any]
    evaluation: Evaluation

    def __repr__(self) -> str:
        return f"<Plan {self.graph.name} on {self.cluster.name}, {self.cluster.num_devices} devices>"

    @property
    def num_stages(self) -> int:
        """Number of stages; 1 for a plan without a pipeline."""
        return len(self.evaluation.stages)

    @property
    def has_pipeline(self) -> bool:
        """Whether the plan has more than one stage."""
        return self.evaluation.has_pipeline

    @property
    def executor(self) -> str:
        """What executes the plan, one of ``autoddl.costmodel.graph_meshes.EXECUTORS``."""
        return str(self.document.get("executor", EAGER))

    @property
    def is_claimed(self) -> bool:
        """Whether the plan has the claims of its search; False if it was edited, or priced without a search."""
        return self.document["status"] not in UNCLAIMED

    def check_graph(self, graph: LayerGraph) -> None:
        """Check that the plan was made for a graph.

        Raises:
            UserError: the graph is another one; the message names the first difference.
        """
        if graph.hash == self.graph.hash:
            return
        raise UserError(f"the plan was made for another model than {graph.name}: {_difference(self.graph, graph)}")


def unpipelined_plan(
    graph: LayerGraph, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> PlanFile:
    """Make a plan of one stage from strategies, without a search.  The plan has no document.

    Raises:
        UserError: a strategy does not fit its layer, the cluster or the micro-batch.
    """
    return PlanFile(
        graph, cluster, workload, strategies, {}, evaluate_unpipelined(chain_of(graph), cluster, workload, strategies)
    )


def _difference(planned: LayerGraph, given: LayerGraph) -> str:
    """The first difference between the graph of a plan and another graph, for an error message."""
    for layer, other in zip(planned.layers, given.layers):
        if layer != other or dict(layer.attributes) != dict(other.attributes):
            return f"it has {layer.describe()} where the model has {other.describe()}"
    if len(planned.layers) != len(given.layers):
        return f"it has {len(planned.layers)} layers, the model has {len(given.layers)}"
    return "their edges differ"


def save_plan(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write the document of a plan to a file, atomically.

    Raises:
        UserError: the path cannot be written to.
    """
    write_document(path, document)


def load_plan(path: str | os.PathLike[str], edited: bool = False) -> PlanFile:
    """Read a plan from a file.

    Args:
        path: of the file.
        edited: accept a plan that was edited.  Its graph, cluster, workload, strategies, meshes and schedule are read, its figures
            are computed again, and the claims of the search (optimality, bounds, rivals, trust) are dropped.

    Raises:
        UserError: the file cannot be read, a field is malformed, or the plan was edited; the message names the member or the field.
    """
    where = os.fspath(path)
    return plan_from_document(Fields(load_json(path), where), where, edited)


def plan_from_document(fields: Fields, where: str, edited: bool = False) -> PlanFile:
    """Make a plan from the fields of its document.

    Args:
        fields: the document.
        where: what to call the document in errors, such as its path.
        edited: accept a plan that was edited, as in :func:`load_plan`.

    Raises:
        UserError: as for :func:`load_plan`.
    """
    if fields.text("format") != FORMAT:
        raise UserError(f"{where}: format {fields.value['format']!r} should be {FORMAT!r}")
    if fields.integer("version") != VERSION:
        raise UserError(f"{where}: version {fields.value['version']} is not supported, only {VERSION} is; plan again")
    try:
        return _checked(fields, where)
    except UserError:
        if not edited:
            raise
    return _unclaimed(fields, where)


def _checked(fields: Fields, where: str) -> PlanFile:
    """The plan of a document that was not edited.

    Raises:
        UserError: the document was edited, or no plan has such a document.
    """
    changed = edited_member(fields)
    try:
        plan = _inputs(fields, where)
        facts = facts_of(plan.graph, plan.evaluation, plan.executor)
        check_facts(fields, facts, changed)
        check_claims(plan, fields, facts)
    except UserError as error:
        detail = str(error)
        if changed is None:
            raise UserError(f"{detail}; {_REMEDY}") from None
        detail = detail[len(where) + 2 :] if detail.startswith(f"{where}: ") else detail
        raise UserError(f"{where}: {changed} was edited ({detail}); {_REMEDY}") from None
    if changed is not None:
        raise UserError(f"{where}: {changed} was edited (its hash is another one); {_REMEDY}")
    return plan


def _unclaimed(fields: Fields, where: str) -> PlanFile:
    """The plan of a document that was edited, without the claims of the search."""
    plan = _inputs(fields, where)
    needed = plan.evaluation.memory_bytes
    objective, limit = fields.text("objective"), fields.number("memory_limit_bytes", exclusive=True)
    if objective not in OBJECTIVES:
        raise UserError(f"{where}: objective is {objective!r}, should be one of {', '.join(OBJECTIVES)}")
    if needed > limit:
        raise UserError(f"{where}: memory_limit_bytes is {limit:g}, its strategies need {needed:g}")
    facts = facts_of(plan.graph, plan.evaluation, plan.executor)
    return replace(plan, document=unclaimed_document(facts, objective, limit))


def _inputs(fields: Fields, where: str) -> PlanFile:
    """The plan that the inputs of a document describe; its facts and claims are not checked."""
    graph = graph_from_document(fields.get("graph"), f"{where}: graph")
    cluster = cluster_from_document(fields.get("cluster"), f"{where}: cluster")
    if "links" in fields:
        cluster = _with_links(cluster, fields)
    workload = Workload.from_fields(fields.object("workload"))
    try:
        cluster.device.peak(workload.precision)
    except UserError as error:
        raise UserError(f"{where}: workload: {error}") from None
    strategies = _strategies(fields, graph, where)
    chain = chain_of(graph)
    configuration = read_configuration(fields, chain, cluster, workload, strategies)
    try:
        evaluation = evaluate(chain, cluster, configuration)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    plan = PlanFile(graph, cluster, workload, strategies, fields.value, evaluation)
    executor = executor_of(fields)
    refused = why_not_executable(executor, graph, strategies)
    if refused:
        raise UserError(f"{where}: layers: {refused}")
    if executor != EAGER and plan.has_pipeline:
        raise UserError(f"{where}: executor is {executor!r}, but the plan has a pipeline: {NO_PIPELINE}")
    return plan


def _with_links(cluster: Cluster, fields: Fields) -> Cluster:
    """The cluster with the links of the document: its own, or with the latency or bandwidth that the user gave for both levels."""
    first = next(iter(fields.objects("links")), None)
    if first is not None:
        latency_s, bandwidth = first.number("latency_s"), first.number("bandwidth", exclusive=True)
        for replacement in ((None, None), (latency_s, None), (None, bandwidth), (latency_s, bandwidth)):
            replaced = cluster.with_links(*replacement)
            if links_fields(replaced) == fields.value["links"]:
                return replaced
    raise UserError(f"{fields.where}: links are not those of its cluster, nor one latency or bandwidth for both levels")


def _strategies(fields: Fields, graph: LayerGraph, where: str) -> dict[str, Strategy]:
    """The strategies in the document; every layer of the graph must have exactly one."""
    strategies = {}
    layers = fields.objects("layers")
    for layer in layers:
        strategies[layer.text("name")] = read_strategy(layer)
    known = [layer.name for layer in graph.layers]
    missing = [name for name in known if name not in strategies]
    if missing:
        raise UserError(f"{where}: layers lacks {missing[0]!r}")
    unknown = sorted(set(strategies) - set(known))
    if unknown:
        raise UserError(f"{where}: layers holds {unknown[0]!r}, which its graph does not have")
    if len(layers) != len(strategies):
        raise UserError(f"{where}: layers should hold each layer of its graph once")
    return strategies
