"""The stages of a plan in its document: written from an evaluation, read back as a configuration.

A plan without a pipeline has one stage on one worker of all devices.  The reader evaluates the configuration anew;
:mod:`autoddl.planfile` compares the members that this makes with those that it read.

=====================  =============================================================================================================
member                 what it is
=====================  =============================================================================================================
schedule               name, options, num_workers, num_stages, num_pipelines, groups, synchronous: what its tasks are generated
                       from, with the workload's number of micro-batches
workers                per worker: mesh (nodes, devices_per_node), ranks (in the order of its mesh), stages, memory_bytes
stages                 per stage: layers (names), num_units, recompute, workers, entry (strategy of the tensor that arrives; null
                       for the first), in_flight per worker; forward_s, backward_s, backward_input_s, recompute_s (per
                       micro-batch), all_reduce_s (per step), compute_s, communication_s (per micro-batch), state_bytes,
                       kept_bytes, input_bytes, buffer_bytes (:class:`.evaluation.StageFigures`)
boundaries             per boundary: forward_s, backward_s, nbytes of a micro-batch
timeline               inner_communication_s, exposed_transfer_s, exposed_all_reduce_s, bubble_s (of the busiest worker), busiest
                       (its number), bubble_ratio (mean of all)
=====================  =============================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.documents import Fields, show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators.registry import FAMILIES
from autoddl.pipelines.joint.configuration import RECOMPUTATIONS, Configuration, PipelineSchedule, StageChoice
from autoddl.pipelines.joint.evaluation import Evaluation, StageFigures
from autoddl.pipelines.joint.meshes import Division, Meshes, StageMesh
from autoddl.pipelines.joint.partition import ENTRY, Chain

__all__ = ["read_configuration", "read_splits", "stage_facts"]

#: The figures of the timeline, an evaluation's own.
_TIMELINE = (
    "inner_communication_s",
    "exposed_transfer_s",
    "exposed_all_reduce_s",
    "bubble_s",
    "busiest",
    "bubble_ratio",
)


def stage_facts(evaluation: Evaluation) -> dict[str, Any]:
    """The members of the module's docstring, all of which follow from a configuration."""
    configuration, schedule = evaluation.configuration, evaluation.schedule
    spec, mesh, cluster = configuration.schedule, configuration.mesh, evaluation.cluster
    return {
        "schedule": {
            "name": spec.name,
            "options": dict(spec.options),
            "num_workers": spec.num_workers,
            "num_stages": spec.num_stages,
            "num_pipelines": schedule.num_pipelines,
            "groups": spec.groups,
            "synchronous": spec.synchronous,
        },
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
        "boundaries": [
            {name: getattr(boundary, name) for name in ("forward_s", "backward_s", "nbytes")}
            for boundary in evaluation.boundaries
        ],
        "timeline": {name: getattr(evaluation, name) for name in _TIMELINE},
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


def read_configuration(
    fields: Fields, chain: Chain, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]
) -> Configuration:
    """The configuration that a document describes.

    Raises:
        UserError: a field is malformed, or does not fit the graph or the cluster.
    """
    where = fields.where
    mesh = _meshes(fields)
    if not mesh.tiles(cluster):
        raise UserError(
            f"{where}: mesh is {mesh}, which does not tile {cluster.num_nodes} x {cluster.devices_per_node} devices"
        )
    spec = _schedule(fields.object("schedule"), workload.num_micro_batches)
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
    layer_by_layer = [stage.recompute == "layers" for stage in stages]
    if (workload.recompute and not all(layer_by_layer)) or (layer_by_layer == [True] and not workload.recompute):
        raise UserError(f"{where}: workload: recompute is {show_json(workload.recompute)}, its stages' is other")
    return Configuration(mesh, spec, workload, tuple(stages))


def _meshes(fields: Fields) -> Meshes:
    """The rectangles of the workers: one for all, or one of each."""
    meshes = tuple(_mesh(worker.object("mesh")) for worker in fields.objects("workers"))
    return meshes[0] if len(set(meshes)) == 1 else Division(meshes)


def _mesh(fields: Fields) -> StageMesh:
    return StageMesh(fields.integer("nodes", 1), fields.integer("devices_per_node", 1))


def _schedule(fields: Fields, num_micro_batches: int) -> PipelineSchedule:
    name = fields.text("name")
    if name not in FAMILIES:
        raise UserError(f"{fields.where}: name {name!r} is not one of {', '.join(FAMILIES)}")
    options = fields.object("options").value
    for option, value in options.items():
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            raise UserError(f"{fields.where}: option {option} is {value!r}, should be a whole number or a word")
    spec = PipelineSchedule(
        name=name,
        num_workers=fields.integer("num_workers", 1),
        num_micro_batches=num_micro_batches,
        options=tuple(sorted(options.items())),
        groups=fields.integer("groups", 1),
        synchronous=FAMILIES[name].synchronous,
        num_pipelines=fields.integer("num_pipelines", 1),
    )
    if spec.num_stages == 1 and (name, spec.options) != ("1f1b", ()):
        raise UserError(f"{fields.where}: name is {spec.label!r}, of one stage it should be '1f1b'")
    return spec


def read_splits(entry: Fields, name: str) -> tuple[tuple[int, int, int], ...]:
    """The [p0, p1, p2] of a strategy, one for each network level."""
    splits = []
    for split in entry.sequence(name):
        if not (isinstance(split, list) and len(split) == 3 and all(type(p) is int and 0 < p < 2**31 for p in split)):
            raise UserError(f"{entry.where}: {name} holds {show_json(split)}, should hold [p0, p1, p2]")
        splits.append((split[0], split[1], split[2]))
    return tuple(splits)
