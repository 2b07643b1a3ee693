"""The plan: what the planner found, as a JSON document that everything else works from.

Nothing in a document is believed (:func:`load_plan`): its hashes are compared with its members, its figures with what its
strategies make them, and its claims with each other and with the figures (:mod:`autoddl.claims`).  A plan that was edited is
refused, or loaded without its claims.  A plan also carries the hashes of the graph and the cluster that it was made for; whoever
applies it to something else is told which of them differs.
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
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.costmodel.writing import write_document
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate, evaluate_unpipelined
from autoddl.pipelines.joint.partition import chain_of

from .claims import check_claims, check_facts, edited_member
from .plandocument import (
    EDITED,
    FORMAT,
    VERSION,
    facts_of,
    links_fields,
    plan_document,
    unclaimed_document,
)
from .stagedocument import read_configuration, read_splits

__all__ = [
    "PlanFile",
    "load_plan",
    "plan_document",
    "plan_from_document",
    "save_plan",
    "unpipelined_plan",
]

#: What to do with a plan that was edited.
_REMEDY = "plan again, or drop its claims with edited=True"


@dataclass(frozen=True, repr=False)
class PlanFile:
    """A plan as read from its document: all that is needed to apply, verify or launch it.

    Attributes:
        graph, cluster, workload: what it was made for.
        strategies: of every layer, by name; over the devices of its stage.
        document: the whole JSON document, its figures checked; of a plan that was edited the one that is left of it.
        evaluation: its stages, their schedule and all figures; a plan without a pipeline is a pipeline of one stage.
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
        """1 of a plan without a pipeline."""
        return len(self.evaluation.stages)

    @property
    def has_pipeline(self) -> bool:
        """Whether it has more than one stage."""
        return self.evaluation.has_pipeline

    @property
    def is_claimed(self) -> bool:
        """Whether the search's claims are there: False of a plan that was edited and loaded all the same."""
        return self.document["status"] != EDITED

    def check_graph(self, graph: LayerGraph) -> None:
        """Refuse a graph other than the one that the plan was made for.

        Raises:
            UserError: naming the first difference.
        """
        if graph.hash == self.graph.hash:
            return
        raise UserError(f"the plan was made for another model than {graph.name}: {_difference(self.graph, graph)}")


def unpipelined_plan(
    graph: LayerGraph, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> PlanFile:
    """A plan of one stage with these strategies, which no planner made: it has no document.

    Raises:
        UserError: a strategy does not fit its layer, the cluster or the micro-batch.
    """
    return PlanFile(
        graph, cluster, workload, strategies, {}, evaluate_unpipelined(chain_of(graph), cluster, workload, strategies)
    )


def _difference(planned: LayerGraph, given: LayerGraph) -> str:
    for mine, other in zip(planned.layers, given.layers):
        if mine != other or dict(mine.attributes) != dict(other.attributes):
            return f"it has {mine.describe()} where the model has {other.describe()}"
    if len(planned.layers) != len(given.layers):
        return f"it has {len(planned.layers)} layers, the model has {len(given.layers)}"
    return "their edges differ"


def save_plan(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write a plan, atomically."""
    write_document(path, document)


def load_plan(path: str | os.PathLike[str], edited: bool = False) -> PlanFile:
    """Read a plan.

    Args:
        edited: take a plan also if it was edited: its graph, cluster, workload, strategies, meshes and schedule; its figures are
            then computed anew, and what the search claimed of it (optimality, bounds, rivals, trust) is dropped.

    Raises:
        UserError: it cannot be read, a field is malformed, or it was edited; the message names the member or the field.
    """
    where = os.fspath(path)
    return plan_from_document(Fields(load_json(path), where), where, edited)


def plan_from_document(fields: Fields, where: str, edited: bool = False) -> PlanFile:
    """A plan from the fields of its document.

    Raises:
        UserError: as :func:`load_plan`.
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
    """A plan that is as it was written.

    Raises:
        UserError: it was edited, or cannot be.
    """
    changed = edited_member(fields)
    try:
        plan = _inputs(fields, where)
        facts = facts_of(plan.graph, plan.evaluation)
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
    """What is left of a plan that was edited."""
    plan = _inputs(fields, where)
    needed = plan.evaluation.memory_bytes
    objective, limit = fields.text("objective"), fields.number("memory_limit_bytes", exclusive=True)
    if objective not in OBJECTIVES:
        raise UserError(f"{where}: objective is {objective!r}, should be one of {', '.join(OBJECTIVES)}")
    if needed > limit:
        raise UserError(f"{where}: memory_limit_bytes is {limit:g}, its strategies need {needed:g}")
    facts = facts_of(plan.graph, plan.evaluation)
    return replace(plan, document=unclaimed_document(facts, objective, limit))


def _inputs(fields: Fields, where: str) -> PlanFile:
    """What the figures of a plan follow from."""
    graph = graph_from_document(fields.get("graph"), f"{where}: graph")
    cluster = cluster_from_document(fields.get("cluster"), f"{where}: cluster")
    if "links" in fields:
        cluster = _with_links(cluster, fields)
    workload = Workload.from_fields(fields.object("workload"))
    if workload.precision not in cluster.device.peak_flops:
        known = ", ".join(cluster.device.peak_flops)
        raise UserError(f"{where}: workload: precision is {workload.precision!r}, its cluster's devices have {known}")
    strategies = _strategies(fields, graph, where)
    chain = chain_of(graph)
    configuration = read_configuration(fields, chain, cluster, workload, strategies)
    try:
        evaluation = evaluate(chain, cluster, configuration)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return PlanFile(graph, cluster, workload, strategies, fields.value, evaluation)


def _with_links(cluster: Cluster, fields: Fields) -> Cluster:
    """The cluster with the links that the plan was made for: its own, or those that replace them on the command line."""
    first = next(iter(fields.objects("links")), None)
    if first is not None:
        latency_s, bandwidth = first.number("latency_s"), first.number("bandwidth", exclusive=True)
        for given in ((None, None), (latency_s, None), (None, bandwidth), (latency_s, bandwidth)):
            replaced = cluster.with_links(*given)
            if links_fields(replaced) == fields.value["links"]:
                return replaced
    raise UserError(f"{fields.where}: links are not those of its cluster, nor one latency or bandwidth for both levels")


def _strategies(fields: Fields, graph: LayerGraph, where: str) -> dict[str, Strategy]:
    """The strategy of every layer of the graph, once."""
    strategies = {}
    layers = fields.objects("layers")
    for layer in layers:
        summa = "summa" in layer and layer.boolean("summa")
        strategies[layer.text("name")] = Strategy(read_splits(layer, "strategy"), summa)
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
