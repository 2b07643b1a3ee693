"""The planners of the papers (DAPPLE, Chimera, WPipe), with their plans as configurations of the joint space.

The planners take a linear profile: the times of the units on one device for one sample, which are scaled by the number of samples.
Their stages are data parallel.  Their decisions (cut, devices per stage, micro-batch, recomputation, schedule) become
configurations, which are priced and simulated like all other plans and so can be compared with them.

DAPPLE may place the devices of a stage anywhere, but the workers of a configuration have rectangles (:mod:`.meshes`).  So DAPPLE
plans stages that take the devices in order:

- stages of equal widths, for every number of stages that divides the number of devices;
- stages of any widths, on clusters that are small enough for its exact search; of these plans, those with rectangles are kept.

A planner whose time limit is over returns the best plans so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.workload import Workload

from ..planners import Clock, ProfiledWorkload, StageConstraints, plan_chimera, plan_dapple, plan_wpipe
from ..planners.dapple_search import EXACT_UP_TO
from ..profile import Profile, ProfiledLayer
from .configuration import Configuration, PipelineSchedule, StageChoice
from .meshes import Division, Meshes, StageMesh
from .partition import ENTRY, Chain

__all__ = ["PLANNERS", "PaperPlan", "paper_plans", "profile_of"]

#: Name of every planner and its title in tables.
PLANNERS = {"dapple": "DAPPLE", "chimera": "Chimera", "wpipe": "WPipe"}


@dataclass(frozen=True)
class PaperPlan:
    """A plan of a paper's planner.

    Attributes:
        configuration: The plan as a configuration.
        planned_s: Its step by the planner's own model of the profile.
    """

    configuration: Configuration
    planned_s: float


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a planner beside the profile.

    Attributes:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        workload: Batch, precision and optimizer.
        micro_batch: Samples per micro-batch over all devices of a stage; None if the planner chooses it.
        clock: When the planner stops.
    """

    chain: Chain
    cluster: Cluster
    workload: Workload
    micro_batch: int | None
    clock: Clock


def profile_of(chain: Chain, cluster: Cluster, workload: Workload) -> Profile:
    """Return the linear profile of a model: the times and bytes of its units on one device for one sample."""
    device = StageMesh(1, 1).devices(cluster)
    one_sample = replace(workload, batch=1, micro_batch=1, recompute="none")
    strategy = data_parallel(device.level_sizes)
    rows = []
    for unit in range(chain.num_units):
        layers = chain.layers(unit, unit + 1)
        works = [
            layer_work(layer, strategy, one_sample, 1.0, chain.graph.place(layer.name, "none")) for layer in layers
        ]
        forward_s, backward_s = (
            sum(device.local_time(local, one_sample.precision) for local in locals_)
            for locals_ in ([work.forward_work for work in works], [work.backward_work for work in works])
        )
        rows.append(
            ProfiledLayer(
                name=layers[0].name if len(layers) == 1 else f"{layers[0].name} .. {layers[-1].name}",
                forward_s=forward_s,
                backward_s=backward_s,
                activation_bytes=layers[-1].output_elements * one_sample.itemsize,
                parameter_bytes=sum(work.parameter_bytes for work in works),
                stored_bytes=sum(work.kept_bytes for work in works),
            )
        )
    return Profile.chain(chain.graph.name, 1, rows)


def paper_plans(
    name: str,
    chain: Chain,
    cluster: Cluster,
    workload: Workload,
    limit_bytes: float,
    recompute: bool | str | None,
    micro_batch: int | None,
    clock: Clock,
) -> list[PaperPlan]:
    """Return the plans that a paper's planner finds, the best first.

    Args:
        name: Name of the planner in :data:`PLANNERS`.
        chain: The model as a chain of units.
        cluster: The devices and their network.
        workload: Batch, precision and optimizer.
        limit_bytes: Memory limit per device.
        recompute: Whether to recompute stages, or a way of recomputation; None to try both.
        micro_batch: Samples per micro-batch over all devices of a stage; None if the planner chooses it.
        clock: When the planner stops with the plans it has found so far.

    Raises:
        UserError: the planner has no plan for these numbers, no plan fits in memory, or none was found in time.
        StopRequestedError: a stop was requested before a plan was found.
    """
    if isinstance(recompute, str):
        recompute = recompute != "none"
    profile = profile_of(chain, cluster, workload)
    state_per_weight = workload.bytes_per_parameter / workload.itemsize
    inputs = _Inputs(chain, cluster, workload, micro_batch, clock)
    plans: list[PaperPlan] = []
    first_error: UserError | None = None
    if recompute is not None:
        settings: tuple[bool, ...] = (recompute,)
    else:
        settings = (False,) if name in _TRY_RECOMPUTATION else (False, True)
    for recomputes in settings:
        profiled = ProfiledWorkload(profile, cluster, workload.batch, recomputes, state_per_weight, limit_bytes)
        try:
            plans += _PLANS[name](inputs, profiled)
        except UserError as error:
            first_error = first_error or error
    if recompute is False:
        plans = [plan for plan in plans if all(stage.recompute == "none" for stage in plan.configuration.stages)]
    if not plans:
        clock.stop.check()
        raise first_error or UserError(f"no {PLANNERS[name]} plan of {chain.graph.name} goes without recomputation")
    return sorted(plans, key=lambda plan: plan.planned_s)


# ---- The plans of each planner as configurations -----------------------------------------------------------------------


def _dapple(inputs: _Inputs, profiled: ProfiledWorkload) -> Iterator[PaperPlan]:
    num_devices, first_error, has_plan = inputs.cluster.num_devices, None, False
    constraints = []
    for num_stages in divisors(num_devices):
        # Some stage has at least an even share of the parameters: leave out numbers of stages for which that does not fit.
        state_bytes = profiled.state * profiled.profile.parameter_bytes / num_stages
        if num_stages <= inputs.chain.num_units and state_bytes <= profiled.limit_bytes:
            constraints.append(StageConstraints(widths=(num_devices // num_stages,) * num_stages, in_order=True))
    if num_devices <= EXACT_UP_TO:
        constraints.append(StageConstraints(in_order=True))
    for constraint in constraints:
        try:
            plans = plan_dapple(profiled, inputs.micro_batch, constraint, inputs.clock).simulated
        except UserError as error:
            first_error = first_error or error
            continue
        for plan in plans:
            mesh = _meshes_in_order(inputs.cluster, plan.widths)
            num_stages = len(plan.stages)
            # Configurations do not support devices that are no rectangles, warm-ups that the memory limit makes shorter than the
            # policy's, and micro-batches that do not divide into equal slices.
            warm_ups = [num_stages - s if plan.policy == "A" else 2 * (num_stages - s) - 1 for s in range(num_stages)]
            is_shortened = any(
                stage.in_flight < min(warm_up, plan.num_micro_batches) for stage, warm_up in zip(plan.stages, warm_ups)
            )
            if mesh is None or is_shortened or any(plan.micro_batch % width for width in plan.widths):
                continue
            options = (("policy", plan.policy),) if num_stages > 1 else ()
            spec = PipelineSchedule("1f1b", num_stages, plan.num_micro_batches, options)
            cut, recompute = _units_per_stage(plan.cuts), "stage" if profiled.recompute else "none"
            configuration = _data_parallel_stages(inputs, mesh, spec, plan.micro_batch, cut, recompute)
            has_plan = True
            yield PaperPlan(configuration, plan.simulated_s)
    if not has_plan:
        widths = [num_devices // count for count in divisors(num_devices) if count <= inputs.chain.num_units]
        given = inputs.micro_batch is not None
        profiled.require_division(
            f"divide over stages of {' or '.join(map(str, widths))} devices",
            lambda batch, size: batch % size == 0 and any((size if given else batch) % width == 0 for width in widths),
            inputs.micro_batch,
        )
        raise first_error or profiled.memory_error("DAPPLE plan of rectangles of devices")


def _units_per_stage(cuts: Sequence[int]) -> list[int]:
    return [stop - first for first, stop in zip(cuts, cuts[1:])]


def _chimera(inputs: _Inputs, profiled: ProfiledWorkload) -> Iterator[PaperPlan]:
    for plan in plan_chimera(profiled, inputs.micro_batch, clock=inputs.clock).configurations:
        mesh = _mesh_of_inner_pipelines(inputs.cluster, plan.depth)
        if mesh is None:
            continue
        options = (("concatenation", plan.concatenation), ("num_pipelines", plan.num_pipelines))
        spec = PipelineSchedule(
            "chimera", plan.depth, plan.num_micro_batches, options, num_pipelines=plan.num_pipelines
        )
        cut = _units_per_stage(plan.cuts)
        recompute, size = "stage" if plan.recompute else "none", plan.micro_batch * plan.width
        yield PaperPlan(_data_parallel_stages(inputs, mesh, spec, size, cut, recompute), plan.simulated_s)


def _wpipe(inputs: _Inputs, profiled: ProfiledWorkload) -> Iterator[PaperPlan]:
    for plan in plan_wpipe(profiled, inputs.micro_batch, clock=inputs.clock).configurations:
        if plan.placement == "A":
            mesh = _mesh_of_inner_pipelines(inputs.cluster, plan.depth)
        else:
            mesh = _mesh_of_inner_stages(inputs.cluster, plan.width)
        if mesh is None:
            continue
        spec = PipelineSchedule("wpipe", plan.depth, plan.num_micro_batches, groups=2, synchronous=False)
        cut = _units_per_stage(plan.cuts)
        recompute, size = "stage" if plan.recompute else "none", plan.micro_batch * plan.width
        yield PaperPlan(_data_parallel_stages(inputs, mesh, spec, size, cut, recompute), plan.period_s)


#: Planners that try recomputation too, unless the workload demands it.
_TRY_RECOMPUTATION = ("chimera", "wpipe")
_PLANS = {"dapple": _dapple, "chimera": _chimera, "wpipe": _wpipe}


# ---- Rectangles of devices ---------------------------------------------------------------------------------------------


def _mesh_of_inner_stages(cluster: Cluster, num_devices: int) -> StageMesh | None:
    """The rectangle of workers that lie inside nodes, or have whole nodes; None if such rectangles do not tile the cluster."""
    per_node = cluster.devices_per_node
    if num_devices <= per_node:
        return StageMesh(1, num_devices) if per_node % num_devices == 0 else None
    nodes, rest = divmod(num_devices, per_node)
    return StageMesh(nodes, per_node) if not rest and cluster.num_nodes % nodes == 0 else None


def _meshes_in_order(cluster: Cluster, widths: Sequence[int]) -> Meshes | None:
    """The rectangles of workers that take the devices in order; None if some worker has no rectangle."""
    if len(set(widths)) == 1:
        return _mesh_of_inner_stages(cluster, widths[0])
    per_node = cluster.devices_per_node
    if any(width > per_node and width % per_node for width in widths):
        return None
    meshes = (StageMesh(1, width) if width < per_node else StageMesh(width // per_node, per_node) for width in widths)
    division = Division(tuple(meshes))
    return division if division.tiles(cluster) else None


def _mesh_of_inner_pipelines(cluster: Cluster, depth: int) -> StageMesh | None:
    """The rectangle of workers whose pipelines lie inside nodes, or take whole nodes; None if such rectangles do not tile the
    cluster."""
    per_node = cluster.devices_per_node
    if depth <= per_node:
        return StageMesh(cluster.num_nodes, per_node // depth) if per_node % depth == 0 else None
    nodes, rest = divmod(depth, per_node)
    return StageMesh(cluster.num_nodes // nodes, 1) if not rest and cluster.num_nodes % nodes == 0 else None


def _data_parallel_stages(
    inputs: _Inputs, mesh: Meshes, spec: PipelineSchedule, micro_batch: int, cut: list[int], recompute: str
) -> Configuration:
    """The configuration of data-parallel stages with ``cut[s]`` units each.

    The last stage is not recomputed as a whole but in parts, so that the loss is not computed twice.
    """
    in_parts = "blocks" if any(layer.block for layer in inputs.chain.graph.layers) else "layers"
    stages, first = [], 0
    for number, num_units in enumerate(cut):
        strategy = data_parallel(mesh.mesh_of(spec.worker_of(number)).devices(inputs.cluster).level_sizes)
        strategies = {layer.name: strategy for layer in inputs.chain.layers(first, first + num_units)}
        if first:
            strategies[ENTRY] = strategy
        is_last = number == len(cut) - 1
        stages.append(StageChoice(num_units, in_parts if is_last and recompute == "stage" else recompute, strategies))
        first += num_units
    workload = replace(inputs.workload, micro_batch=micro_batch, recompute="none")
    return Configuration(mesh, spec, workload, tuple(stages))
