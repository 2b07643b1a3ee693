"""The member ``pipeline`` of a plan's document: written from an evaluation, read back as a configuration.

The reader evaluates the configuration anew; :mod:`autoddl.planfile` compares the member that this makes with the one that it read.

=====================  =============================================================================================================
field                  what it is
=====================  =============================================================================================================
schedule               name, options, num_workers, num_stages, num_micro_batches, num_pipelines, groups, synchronous: all that
                       ``generate`` needs; ``width`` = devices per worker, one number or one for each; ``recomputing``: stages with
                       tasks ``R``
mesh                   nodes and devices_per_node of every worker (``StageMesh`` of :mod:`autoddl.pipelines.joint.meshes`); left
                       out where workers are unequal (``Division``)
data_parallel          the slices of the samples that all layers of the plan have in common
micro_batch            samples of one pass, over all devices of a stage
workers                per worker: mesh (nodes, devices_per_node), ranks (in the order of its mesh), stages, memory_bytes
stages                 per stage: layers (names), num_units, recompute, workers, entry (strategy of the tensor that arrives; null
                       for the first), in_flight per worker; forward_s, backward_s, backward_input_s, recompute_s (per
                       micro-batch), all_reduce_s (per step), compute_s, communication_s (per micro-batch), state_bytes,
                       kept_bytes, input_bytes, buffer_bytes (:class:`.evaluation.StageFigures`)
boundaries             per boundary: forward_s, backward_s, nbytes of a micro-batch
timeline               step_s, compute_s, inner_communication_s, exposed_transfer_s, exposed_all_reduce_s, bubble_s (of the busiest
                       worker), busiest (its number), bubble_ratio (mean of all)
search                 space, counts, lower_bound_s, optimal, gap (:class:`.result.Considered`); pipeline, allow_stale as they were
                       asked for; null where the plan was edited
families               per family: name, description, infeasible or its figures
=====================  =============================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import reduce
from typing import Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.documents import Fields, show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators.registry import FAMILIES
from autoddl.pipelines.joint.configuration import RECOMPUTATIONS, Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import Evaluation, StageFigures, evaluate
from autoddl.pipelines.joint.meshes import Division, Meshes, StageMesh
from autoddl.pipelines.joint.partition import ENTRY, Chain, chain_of
from autoddl.pipelines.joint.result import Considered, FamilyFigures, JointOptions

__all__ = [
    "family_fields",
    "pipeline_facts",
    "read_configuration",
    "read_splits",
    "recompute_pipeline",
    "search_fields",
]

#: The figures of the timeline that are an evaluation's own.
_TIMELINE = (
    "step_s",
    "compute_s",
    "inner_communication_s",
    "exposed_transfer_s",
    "exposed_all_reduce_s",
    "bubble_s",
)


def data_parallel_width(evaluation: Evaluation) -> int:
    """The slices of the samples that all layers have in common, times the pipelines that share the workers."""
    common = reduce(math.gcd, (layer.strategy.p0 for layer in evaluation.layers))
    return common


def pipeline_facts(evaluation: Evaluation) -> dict[str, Any]:
    """The document's member without ``search`` and ``families``: what follows from a configuration (module's docstring)."""
    configuration, schedule = evaluation.configuration, evaluation.schedule
    spec, mesh, cluster, widths = configuration.schedule, configuration.mesh, evaluation.cluster, configuration.widths
    return {
        "schedule": {
            "name": spec.name,
            "options": dict(spec.options),
            "num_workers": spec.num_workers,
            "num_stages": spec.num_stages,
            "num_micro_batches": spec.num_micro_batches,
            "num_pipelines": schedule.num_pipelines,
            "groups": spec.groups,
            "synchronous": spec.synchronous,
            "width": widths if isinstance(widths, int) else list(widths),
            "recomputing": [s for s, stage in enumerate(configuration.stages) if stage.recompute == "stage"],
        },
        **({"mesh": asdict(mesh)} if isinstance(mesh, StageMesh) else {}),
        "data_parallel": data_parallel_width(evaluation),
        "micro_batch": configuration.workload.micro_batch,
        "workers": [
            {
                "mesh": asdict(mesh.mesh_of(worker)),
                "ranks": list(mesh.ranks(cluster, worker)),
                "stages": [stage for _, stage in schedule.stages_on(worker)],
                "memory_bytes": evaluation.memory[worker],
            }
            for worker in range(schedule.num_workers)
        ],
        "stages": [_stage_fields(evaluation, s, figures) for s, figures in enumerate(evaluation.stages)],
        "boundaries": [asdict(boundary) for boundary in evaluation.boundaries],
        "timeline": {
            **{name: getattr(evaluation, name) for name in _TIMELINE},
            "busiest": evaluation.busiest,
            "bubble_ratio": evaluation.timeline.bubble_ratio,
        },
    }


def search_fields(considered: Considered, certificate: Mapping[str, Any], options: JointOptions) -> dict[str, Any]:
    """The member's ``search``; ``certificate`` holds lower_bound_s, optimal and gap."""
    return {
        **asdict(considered),
        **certificate,
        "pipeline": options.pipeline,
        "allow_stale": options.allow_stale,
    }


def _stage_fields(evaluation: Evaluation, number: int, figures: StageFigures) -> dict[str, Any]:
    choice = evaluation.configuration.stages[number]
    entry = choice.strategies.get(ENTRY) if figures.graph.has_entry else None
    return {
        "layers": [layer.name for layer in figures.graph.layers],
        "num_units": choice.num_units,
        "recompute": choice.recompute,
        "workers": [replica.worker for replica in evaluation.schedule.replicas_of(number)],
        "entry": None if entry is None else [list(split) for split in entry.splits],
        "in_flight": list(evaluation.in_flight[number]),
        "forward_s": figures.forward_s,
        "backward_s": figures.backward_s,
        "backward_input_s": figures.backward_input_s,
        "recompute_s": figures.recompute_s,
        "all_reduce_s": figures.all_reduce_s,
        "compute_s": figures.compute_s,
        "communication_s": figures.communication_s,
        "state_bytes": figures.state_bytes,
        "kept_bytes": figures.kept_bytes,
        "input_bytes": figures.input_bytes,
        "buffer_bytes": figures.buffer_bytes,
    }


def family_fields(figures: FamilyFigures) -> dict[str, Any]:
    """An entry of the member's ``families``."""
    if figures.infeasible is not None:
        return {"name": figures.name, "infeasible": figures.infeasible}
    fields = asdict(figures)
    del fields["infeasible"]
    return fields


def read_configuration(
    fields: Fields, chain: Chain, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> Configuration:
    """The configuration that a document's member describes.

    Raises:
        UserError: a field is malformed, or does not fit the graph or the cluster.
    """
    where = fields.where
    mesh = _meshes(fields)
    if not mesh.tiles(cluster):
        raise UserError(
            f"{where}: mesh is {mesh}, which does not tile {cluster.num_nodes} x {cluster.devices_per_node} devices"
        )
    spec = _schedule(fields.object("schedule"))
    if spec.num_micro_batches != workload.num_micro_batches:
        raise UserError(
            f"{where}: schedule has {spec.num_micro_batches} micro-batches, the workload has {workload.num_micro_batches}"
        )
    if spec.num_workers != mesh.num_workers(cluster):
        raise UserError(
            f"{where}: schedule has {spec.num_workers} workers, mesh {mesh} makes {mesh.num_workers(cluster)}"
        )
    stages = []
    names = [layer.name for layer in chain.graph.layers]
    first = 0
    for number, entry in enumerate(fields.objects("stages")):
        num_units, recompute = entry.integer("num_units", 1), entry.text("recompute")
        if recompute not in RECOMPUTATIONS:
            raise UserError(f"{entry.where}: recompute is {recompute!r}, should be one of {', '.join(RECOMPUTATIONS)}")
        if first + num_units > chain.num_units:
            raise UserError(f"{entry.where}: num_units is {num_units}, the model has {chain.num_units - first} left")
        own = names[chain.starts[first] : chain.starts[first + num_units]]
        if list(entry.texts("layers")) != own:
            raise UserError(f"{entry.where}: layers should be the {len(own)} from {own[0]!r} to {own[-1]!r}")
        chosen = {name: strategies[name] for name in own}
        if number:
            chosen[ENTRY] = Strategy(read_splits(entry, "entry"))
        stages.append(StageChoice(num_units, recompute, chosen))
        first += num_units
    if first != chain.num_units or len(stages) != spec.num_stages:
        raise UserError(
            f"{where}: stages are {len(stages)} of {first} units, should be {spec.num_stages} of {chain.num_units}"
        )
    return Configuration(mesh, spec, workload, tuple(stages))


def _meshes(fields: Fields) -> Meshes:
    """The rectangles of the workers: one for all, or one of each."""
    if "mesh" in fields:
        return _mesh(fields.object("mesh"))
    return Division(tuple(_mesh(worker.object("mesh")) for worker in fields.objects("workers")))


def _mesh(fields: Fields) -> StageMesh:
    return StageMesh(fields.integer("nodes", 1), fields.integer("devices_per_node", 1))


def _schedule(fields: Fields) -> PipelineSchedule:
    name = fields.text("name")
    if name not in FAMILIES:
        raise UserError(f"{fields.where}: name {name!r} is not one of {', '.join(FAMILIES)}")
    options = fields.object("options").value
    for option, value in options.items():
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            raise UserError(f"{fields.where}: option {option} is {value!r}, should be a whole number or a word")
    return PipelineSchedule(
        name=name,
        num_workers=fields.integer("num_workers", 1),
        num_micro_batches=fields.integer("num_micro_batches", 1),
        options=tuple(sorted(options.items())),
        groups=fields.integer("groups", 1),
        synchronous=FAMILIES[name].synchronous,
        num_pipelines=fields.integer("num_pipelines", 1),
    )


def read_splits(entry: Fields, name: str) -> tuple[tuple[int, int, int], ...]:
    """The [p0, p1, p2] of a strategy, one for each network level."""
    splits = []
    for split in entry.sequence(name):
        if not (isinstance(split, list) and len(split) == 3 and all(type(p) is int and 0 < p < 2**31 for p in split)):
            raise UserError(f"{entry.where}: {name} holds {show_json(split)}, should hold [p0, p1, p2]")
        splits.append((split[0], split[1], split[2]))
    return tuple(splits)


def recompute_pipeline(
    fields: Fields, graph: LayerGraph, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> Evaluation:
    """Read a document's member and compute its figures.

    Raises:
        UserError: a field is malformed, or the configuration cannot be.
    """
    chain = chain_of(graph)
    configuration = read_configuration(fields, chain, cluster, workload, strategies)
    try:
        return evaluate(chain, cluster, configuration)
    except UserError as error:
        raise UserError(f"{fields.where}: {error}") from None
