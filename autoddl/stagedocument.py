"""The members of a plan's document that describe its stages: written from an evaluation, read back as a configuration.

A plan without a pipeline has one stage, on one worker of all devices.  After reading, :mod:`autoddl.planfile` evaluates the
configuration again and compares the result with the members of the document.

=====================  =============================================================================================================
member                 content
=====================  =============================================================================================================
schedule               name, options, num_workers, num_stages, num_pipelines, groups, synchronous; tasks are generated from these
                       and the workload's number of micro-batches
workers                for each worker: mesh (nodes, devices_per_node), ranks (in the order of the mesh), stages, memory_bytes
stages                 for each stage: layers (names), num_units, recompute, workers, entry (the strategy of the tensor that enters
                       the stage; null for the first stage), in_flight for each worker; forward_s, backward_s, backward_input_s,
                       recompute_s (per micro-batch), all_reduce_s, update_s (per step), compute_s, communication_s (per
                       micro-batch), state_bytes, kept_bytes, input_bytes, buffer_bytes
                       (:class:`autoddl.pipelines.joint.stage_figures.StageFigures`)
boundaries             for each boundary: forward_s, backward_s and nbytes of a micro-batch
timeline               of the busiest worker its number (busiest), inner_communication_s, exposed_transfer_s, exposed_all_reduce_s
                       and bubble_s; of all workers the mean bubble_ratio
=====================  =============================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.documents import Fields, show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.recomputation import check_recomputation
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators.registry import FAMILIES
from autoddl.pipelines.joint.configuration import (
    RECOMPUTATIONS,
    Configuration,
    PipelineSchedule,
    StageChoice,
    recomputed_inside,
)
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.meshes import Division, Meshes, StageMesh
from autoddl.pipelines.joint.partition import ENTRY, Chain
from autoddl.pipelines.joint.stage_figures import StageFigures

__all__ = ["read_configuration", "read_strategy", "stage_facts"]

#: The attributes of an `Evaluation` that the member ``timeline`` holds.
_TIMELINE = (
    "inner_communication_s",
    "exposed_transfer_s",
    "exposed_all_reduce_s",
    "bubble_s",
    "busiest",
    "bubble_ratio",
)


def stage_facts(evaluation: Evaluation) -> dict[str, Any]:
    """Return the members of the module's docstring; all of them follow from the configuration of the evaluation."""
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
                "memory_bytes": evaluation.worker_memory_bytes[worker],
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
        "update_s": figures.update_s,
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
    """Read the configuration of a plan.

    Args:
        fields: the document.
        chain: the layers of the model as a chain of units.
        cluster, workload: what the plan is for.
        strategies: the strategy of every layer, by name.

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
    first_unit = 0
    for number, entry in enumerate(fields.objects("stages")):
        num_units, recompute = entry.integer("num_units", 1), entry.text("recompute")
        try:
            check_recomputation(recompute, RECOMPUTATIONS)
        except UserError as error:
            raise UserError(f"{entry.where}: {error}") from None
        if first_unit + num_units > chain.num_units:
            raise UserError(
                f"{entry.where}: num_units is {num_units}, the model has {chain.num_units - first_unit} left"
            )
        stage_names = names[chain.starts[first_unit] : chain.starts[first_unit + num_units]]
        if list(entry.texts("layers")) != stage_names:
            expected = f"the {len(stage_names)} from {stage_names[0]!r} to {stage_names[-1]!r}"
            raise UserError(f"{entry.where}: layers should be {expected}")
        chosen = {name: strategies[name] for name in stage_names}
        if number:
            chosen[ENTRY] = Strategy(read_splits(entry, "entry"))
        stages.append(StageChoice(num_units, recompute, chosen))
        first_unit += num_units
    if first_unit != chain.num_units or len(stages) != spec.num_stages:
        raise UserError(
            f"{where}: stages are {len(stages)} of {first_unit} units, should be {spec.num_stages} of {chain.num_units}"
        )
    if {recomputed_inside(stage.recompute) for stage in stages} != {workload.recompute} and (
        workload.recompute != "none" or len(stages) == 1
    ):
        raise UserError(f"{where}: workload: recompute is {show_json(workload.recompute)}, its stages' is other")
    return Configuration(mesh, spec, workload, tuple(stages))


def _meshes(fields: Fields) -> Meshes:
    """The meshes of the workers: one mesh if all are equal, else a division with a mesh for each worker."""
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


def read_strategy(entry: Fields) -> Strategy:
    """Read a strategy, the inverse of :meth:`.Strategy.document`; other members of ``entry`` are left to the caller.

    >>> print(read_strategy(Fields({"strategy": [[2, 1, 2]], "summa": True}, "plan.json")))
    (2,1,2) summa
    """
    splits = read_splits(entry, "strategy")
    words: dict[str, Any] = {name: entry.boolean(name) for name in ("summa", "hybrid", "regathers") if name in entry}
    zero = entry.integer("zero", 0) if "zero" in entry else 0
    if zero > 3:
        raise UserError(f"{entry.where}: zero is {zero}, should be 0 to 3")
    sequence = entry.text("sequence") if "sequence" in entry else ""
    words |= {
        name: _read_factors(entry, name, len(splits)) for name in ("experts", "positions", "columns", "key_copies")
    }
    return Strategy(splits, zero=zero, sequence=sequence, **words)


def _read_factors(entry: Fields, name: str, num_levels: int) -> tuple[int, ...]:
    """Read a number for each network level, if the document has them."""
    if name not in entry:
        return ()
    factors = entry.integers(name, 1)
    if len(factors) != num_levels:
        raise UserError(
            f"{entry.where}: {name} is {show_json(list(factors))}, should have a number for each of {num_levels} levels"
        )
    return factors


def read_splits(entry: Fields, name: str) -> tuple[tuple[int, int, int], ...]:
    """Read the splits (p0, p1, p2) of a strategy, one for each network level.

    >>> read_splits(Fields({"strategy": [[2, 1, 1], [1, 4, 2]]}, "plan.json"), "strategy")
    ((2, 1, 1), (1, 4, 2))
    """
    splits = []
    for split in entry.sequence(name):
        if not (isinstance(split, list) and len(split) == 3 and all(type(p) is int and 0 < p < 2**31 for p in split)):
            raise UserError(f"{entry.where}: {name} holds {show_json(split)}, should hold [p0, p1, p2]")
        splits.append((split[0], split[1], split[2]))
    return tuple(splits)
