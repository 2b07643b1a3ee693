"""The planners of the papers on the same model, cluster and batch, and their plans as configurations of the joint space.

The papers plan for a profile: units priced on one device, at one sample, everything linear in the samples.  A stage is data
parallel.  Their decisions (cut, devices per stage, micro-batch, recomputation, schedule) are then priced and simulated as all
other plans are, so that they stand in one table.  DAPPLE may place a stage's devices anywhere; configurations have rectangles
(:mod:`.meshes`), so it is asked for stages that take the devices in order: for each number of stages that divides the devices,
of equal widths; and on as few devices as its search is exact for, of any, whose best plans are taken where they are rectangles.

Where a planner's time is over, its plans are the best until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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

#: The planners by name, and as the table calls them.
PLANNERS = {"dapple": "DAPPLE", "chimera": "Chimera", "wpipe": "WPipe"}


@dataclass(frozen=True)
class PaperPlan:
    """What a paper's planner decided.

    Attributes:
        planned_s: the step by its own simulation of the profile.
    """

    configuration: Configuration
    planned_s: float


@dataclass(frozen=True)
class _Wish:
    """What a plan is for, and when its planner should stop."""

    chain: Chain
    cluster: Cluster
    workload: Workload
    micro_batch: int | None
    clock: Clock


def profile_of(chain: Chain, cluster: Cluster, workload: Workload) -> Profile:
    """The units on one device at one sample."""
    device = StageMesh(1, 1).devices(cluster)
    alone = Workload(1, 1, workload.precision, workload.optimizer)
    strategy = data_parallel(device.level_sizes)
    rows = []
    for unit in range(chain.num_units):
        layers = chain.layers(unit, unit + 1)
        works = [layer_work(one, strategy, device, alone, 1.0, not chain.graph.inputs(one.name)) for one in layers]
        state = sum(work.state_bytes for work in works)
        rows.append(
            ProfiledLayer(
                name=layers[0].name if len(layers) == 1 else f"{layers[0].name} .. {layers[-1].name}",
                forward_s=sum(work.forward_s for work in works),
                backward_s=sum(work.backward_s for work in works),
                activation_bytes=layers[-1].output_elements * alone.itemsize,
                parameter_bytes=state * alone.itemsize / alone.bytes_per_parameter,
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
    recompute: bool | None,
    micro_batch: int | None,
    clock: Clock,
) -> list[PaperPlan]:
    """What one of :data:`PLANNERS` finds, its best first.

    Args:
        recompute: always (True), never (False), or whatever is better (None).
        micro_batch: over all devices of a stage, where it is given.
        clock: when to stop, with the plans until then.

    Raises:
        UserError: there is no such plan for these numbers, or none fits in memory, or none was found in time.
        StopRequestedError: a stop was requested before one was found.
    """
    profile = profile_of(chain, cluster, workload)
    state = workload.bytes_per_parameter / workload.itemsize

    def profiled(again: bool) -> ProfiledWorkload:
        return ProfiledWorkload(profile, cluster, workload.batch, again, state, limit_bytes)

    wish = _Wish(chain, cluster, workload, micro_batch, clock)
    plans: list[PaperPlan] = []
    fault: UserError | None = None
    for again in (False, True) if recompute is None else (recompute,):
        try:
            plans += _PLANS[name](wish, profiled(again))
        except UserError as error:
            fault = fault or error
    if recompute is False:
        plans = [plan for plan in plans if all(stage.recompute == "none" for stage in plan.configuration.stages)]
    if not plans:
        clock.stop.check()
        raise fault or UserError(f"no {PLANNERS[name]} plan of {chain.graph.name} goes without recomputation")
    return sorted(plans, key=lambda plan: plan.planned_s)


def _dapple(wish: _Wish, profiled: ProfiledWorkload) -> Iterator[PaperPlan]:
    devices, fault, found = wish.cluster.num_devices, None, False
    shapes = []
    for count in divisors(devices):
        # Of several stages one has at least an even share of the parameters.
        state = profiled.state * profiled.profile.parameter_bytes / count
        if count <= wish.chain.num_units and state <= profiled.limit_bytes:
            shapes.append(StageConstraints(widths=(devices // count,) * count, in_order=True))
    if devices <= EXACT_UP_TO:
        shapes.append(StageConstraints(in_order=True))
    for shape in shapes:
        try:
            plans = plan_dapple(profiled, wish.micro_batch, shape, wish.clock).simulated
        except UserError as error:
            fault = fault or error
            continue
        for plan in plans:
            mesh = _in_order(wish.cluster, plan.widths)
            count = len(plan.stages)
            wanted = [count - i if plan.policy == "A" else 2 * (count - i) - 1 for i in range(count)]
            short = any(one.in_flight < min(want, plan.num_micro_batches) for one, want in zip(plan.stages, wanted))
            # A warm-up that memory cuts short is none of the policies'; slices of unequal sizes are no split.
            if mesh is None or short or any(plan.micro_batch % width for width in plan.widths):
                continue
            spec = PipelineSchedule("1f1b", count, plan.num_micro_batches, (("policy", plan.policy),) * (count > 1))
            cut, again = _sizes(plan.cuts), "stage" if profiled.recompute else "none"
            configuration = _configuration(wish, mesh, spec, plan.micro_batch, cut, again)
            found = True
            yield PaperPlan(configuration, plan.simulated_s)
    if not found:
        widths = [devices // count for count in divisors(devices) if count <= wish.chain.num_units]
        given = wish.micro_batch is not None
        profiled.require_division(
            f"divide over stages of {' or '.join(map(str, widths))} devices",
            lambda batch, size: batch % size == 0 and any((size if given else batch) % width == 0 for width in widths),
            wish.micro_batch,
        )
        raise fault or profiled.memory_error("DAPPLE plan of rectangles of devices")


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [stop - first for first, stop in zip(cuts, cuts[1:])]


def _chimera(wish: _Wish, profiled: ProfiledWorkload) -> Iterator[PaperPlan]:
    if profiled.recompute:
        return  # the planner tries both by itself
    for plan in plan_chimera(profiled, wish.micro_batch, clock=wish.clock).configurations:
        mesh = _pipelines_inside(wish.cluster, plan.depth)
        if mesh is None:
            continue
        options = (("concatenation", plan.concatenation), ("num_pipelines", plan.num_pipelines))
        spec = PipelineSchedule(
            "chimera", plan.depth, plan.num_micro_batches, options, num_pipelines=plan.num_pipelines
        )
        cut = _sizes(plan.cuts)
        recompute, size = "stage" if plan.recompute else "none", plan.micro_batch * plan.width
        yield PaperPlan(_configuration(wish, mesh, spec, size, cut, recompute), plan.simulated_s)


def _wpipe(wish: _Wish, profiled: ProfiledWorkload) -> Iterator[PaperPlan]:
    if profiled.recompute:
        return
    for plan in plan_wpipe(profiled, wish.micro_batch, clock=wish.clock).configurations:
        inside = plan.placement == "A"
        mesh = _pipelines_inside(wish.cluster, plan.depth) if inside else _contiguous(wish.cluster, plan.width)
        if mesh is None:
            continue
        spec = PipelineSchedule("wpipe", plan.depth, plan.num_micro_batches, groups=2, synchronous=False)
        cut = _sizes(plan.cuts)
        recompute, size = "stage" if plan.recompute else "none", plan.micro_batch * plan.width
        yield PaperPlan(_configuration(wish, mesh, spec, size, cut, recompute), plan.period_s)


_PLANS = {"dapple": _dapple, "chimera": _chimera, "wpipe": _wpipe}


def _contiguous(cluster: Cluster, count: int) -> StageMesh | None:
    """The mesh of ``count`` devices that lie as close together as they can."""
    inside = cluster.devices_per_node
    if count <= inside:
        return StageMesh(1, count) if inside % count == 0 else None
    nodes, rest = divmod(count, inside)
    return StageMesh(nodes, inside) if not rest and cluster.num_nodes % nodes == 0 else None


def _in_order(cluster: Cluster, widths: Sequence[int]) -> Meshes | None:
    """The rectangles of workers that take the devices one after another; None where some are none."""
    if len(set(widths)) == 1:
        return _contiguous(cluster, widths[0])
    inside = cluster.devices_per_node
    if any(width > inside and width % inside for width in widths):
        return None
    meshes = (StageMesh(1, width) if width < inside else StageMesh(width // inside, inside) for width in widths)
    division = Division(tuple(meshes))
    return division if division.tiles(cluster) else None


def _pipelines_inside(cluster: Cluster, depth: int) -> StageMesh | None:
    """The mesh of workers whose pipelines lie inside nodes as far as they can."""
    inside = cluster.devices_per_node
    if depth <= inside:
        return StageMesh(cluster.num_nodes, inside // depth) if inside % depth == 0 else None
    groups, rest = divmod(depth, inside)
    return StageMesh(cluster.num_nodes // groups, 1) if not rest and cluster.num_nodes % groups == 0 else None


def _configuration(
    wish: _Wish, mesh: Meshes, spec: PipelineSchedule, micro_batch: int, cut: list[int], recompute: str
) -> Configuration:
    """Data-parallel stages."""
    stages, first = [], 0
    for number, count in enumerate(cut):
        strategy = data_parallel(mesh.mesh_of(spec.worker_of(number)).devices(wish.cluster).level_sizes)
        strategies = {layer.name: strategy for layer in wish.chain.layers(first, first + count)}
        if first:
            strategies[ENTRY] = strategy
        stages.append(StageChoice(count, recompute, strategies))
        first += count
    workload = wish.workload
    own = Workload(workload.batch, micro_batch, workload.precision, workload.optimizer)
    return Configuration(mesh, spec, own, tuple(stages))
