"""Chimera's planner: depth D, width W and micro-batch B of bidirectional pipelines (Li and Hoefler, "Chimera").

For every W D = P with D even, with recomputation and without, B is the largest micro-batch that fits the device memory
(greedily, as in the paper), and also the largest of those that leave at least D micro-batches per iteration, where the greedy one
leaves fewer. Each is judged twice.

*By the performance model:*

    T = sum over the tasks of a critical path (forward: F + c; backward: Bk + c, recomputation included)
        + max over workers ( all-reduce time not hidden in free regions )

with F, Bk of the slowest stage and c = alpha + beta L of the slowest boundary. A pair of micro-batches counts twice and a half
half, so that with whole ones this is (F + c) C_f + (Bk + c) C_b. The all-reduce of a stage over r = 2 f W replicas is
Rabenseifner's,

    2 log2(r) alpha + 2 (r - 1)/r beta L

A worker's all-reduces run one after another as its stages complete; the idle gaps until the next one completes (the *free
regions*) hide them.

*By simulation* of the same schedule with unequal stages, transfers beside compute, recomputations that start while the gradient
is still on its way, and eager-sync-opt all-reduces. This decides, and ``by_model`` tells what the model alone would have taken.

Pipelines lie inside machines as far as they can (:mod:`.network`); cuts balance the stages' times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.nearest import divisors

from ..critical import critical_path
from ..generators import generate
from ..memory import peak_activations, peak_stashed_inputs
from ..schedule import Kind, Schedule
from ..simulator import simulate
from ..timeline import Timeline, free_regions
from ..times import Times
from .clock import Clock
from .network import Grid, Network
from .workload import PlannerError, Workload

__all__ = ["ChimeraConfiguration", "ChimeraResult", "performance_model", "plan_chimera", "rabenseifner_s"]


@dataclass(frozen=True)
class ChimeraConfiguration:
    """One configuration that fits in memory, priced by the model and by simulation."""

    depth: int
    width: int
    num_pipelines: int
    """2f, in both directions together."""
    micro_batch: int
    num_micro_batches: int
    """N, per worker and iteration."""
    recompute: bool
    concatenation: str
    """How more than D micro-batches are strung together."""
    cuts: tuple[int, ...]
    placements: tuple[tuple[int, ...], ...]
    """Per stage the devices of all its replicas."""
    memory_bytes: float
    """Of the fullest worker."""
    model_s: float
    simulated_s: float

    @property
    def name(self) -> str:
        return f"W={self.width} D={self.depth}"


@dataclass(frozen=True)
class ChimeraResult:
    """The decision by simulation and by the model, and everything that was considered (best simulation first)."""

    plan: ChimeraConfiguration
    by_model: ChimeraConfiguration
    configurations: tuple[ChimeraConfiguration, ...]


def rabenseifner_s(num_replicas: int, nbytes: float, latency_s: float, seconds_per_byte: float) -> float:
    """An all-reduce of ``nbytes`` over ``num_replicas`` [s] (formula: module's text)."""
    rounds = 2 * math.log2(num_replicas)
    return rounds * latency_s + 2 * (num_replicas - 1) / num_replicas * seconds_per_byte * nbytes


def performance_model(schedule: Schedule, times: Times) -> float:
    """T [s] (formula: module's text) of a schedule, with the slowest stage's and boundary's times for all of them."""
    forward, backward = max(times.forward), max(times.backward)
    if any(task.kind is Kind.RECOMPUTE for task in schedule.workers[0]):
        backward += max(times.recompute)
    timeline = simulate(schedule, Times.of(schedule.num_stages, forward=forward, backward=backward, recompute=0.0))
    send = max(times.transfer_forward, default=0.0) + times.transfer_latency
    send_back = max(times.transfer_backward, default=0.0) + times.transfer_latency
    cost = {Kind.FORWARD: forward + send, Kind.BACKWARD: backward + send_back}
    total = sum(cost.get(task.kind, 0.0) * task.part.size for task in critical_path(timeline).tasks)
    return total + _exposed_all_reduce(timeline, times)


def _exposed_all_reduce(timeline: Timeline, times: Times) -> float:
    """The longest time that a worker's all-reduces go on after its compute."""
    worst = 0.0
    for worker, regions in enumerate(free_regions(timeline)):
        stages = [stage for _, stage in timeline.schedule.stages_on(worker)]
        # Larger free regions begin earlier. A replica without micro-batches has all the time there is.
        order = sorted(zip(regions, stages), reverse=True)
        pending = 0.0
        for (region, stage), following in zip(order, [*(r for r, _ in order[1:]), 0.0]):
            pending = max(0.0, pending + times.all_reduce[stage] - (region - following if following < region else 0.0))
        worst = max(worst, pending)
    return worst


def plan_chimera(
    workload: Workload,
    micro_batch: int | None = None,
    num_stages: int | None = None,
    num_pipelines: int = 2,
    clock: Clock | None = None,
) -> ChimeraResult:
    """The best depth, width and micro-batch on all devices of the cluster.

    Args:
        workload: whose ``recompute`` asks for recomputation; otherwise both are tried.
        micro_batch: B; by default greedily the largest that fits.
        num_stages: D; by default every even divisor of the number of devices.
        num_pipelines: 2f; depths that f does not allow are left out.
        clock: when to stop, with the best so far; by default when everything has been looked at.

    Raises:
        PlannerError: the wishes cannot be fulfilled, or nothing fits in memory, or nothing was found in time.
    """
    devices, layers = workload.cluster.num_devices, workload.num_layers
    if num_stages is not None and num_stages > layers:
        raise PlannerError(f"{num_stages} stages are more than the {layers} layers of {workload.profile.name}")
    if num_pipelines < 2 or num_pipelines % 2:
        raise PlannerError(f"pipelines of chimera are {num_pipelines}, should be an even number of at least 2")
    depths = [d for d in divisors(devices) if d % 2 == 0 and d <= layers and d % num_pipelines == 0]
    if num_stages is not None:
        depths = [d for d in depths if d == num_stages]
    if not depths:
        wanted = "no number of stages" if num_stages is None else f"{num_stages} stages"
        raise PlannerError(
            f"{wanted} for Chimera on {devices} devices of {workload.cluster.name}; D should be even, divide the devices, be a "
            f"multiple of the {num_pipelines} pipelines and at most the {layers} layers"
        )
    widths = [devices // depth for depth in depths]
    workload.require_division(
        f"divide over {' or '.join(map(str, widths))} replicas of a pipeline",
        lambda batch, size: any(batch % (width * size) == 0 for width in widths),
        micro_batch,
    )
    network, clock = Network(workload.cluster), clock or Clock()
    recomputations = (True,) if workload.recompute else (False, True)
    plain = replace(workload, recompute=False)
    found = [
        configuration
        for depth in depths
        for recompute in recomputations
        for configuration in _configurations(plain, network, depth, num_pipelines, recompute, micro_batch, clock)
    ]
    if not found:
        raise workload.nothing_found("Chimera configuration", clock)
    ranked = sorted(found, key=lambda c: (c.simulated_s, c.model_s, c.depth))
    return ChimeraResult(ranked[0], min(found, key=lambda c: (c.model_s, c.depth)), tuple(ranked))


def _configurations(
    workload: Workload,
    network: Network,
    depth: int,
    num_pipelines: int,
    recompute: bool,
    wanted: int | None,
    clock: Clock,
) -> Iterator[ChimeraConfiguration]:
    """One depth's configurations: at most two micro-batch sizes, every way to string them together."""
    width = workload.cluster.num_devices // depth
    if workload.batch % width:
        return
    share = workload.batch // width
    sizes = [wanted] if wanted is not None else divisors(share)[::-1]
    cuts = workload.balanced_cuts(depth)
    grid = network.grid(depth, width, pipelines_inside=True)
    greedy = False
    for size in sizes:
        if share % size:
            continue
        count = share // size
        if greedy and count < depth:
            continue
        fitting = False
        for concatenation in ("direct", "doubling", "halving") if count > depth else ("direct",):
            if concatenation == "doubling" and not recompute:
                continue
            if clock.is_over:
                return
            schedule = generate(
                "chimera",
                num_stages=depth,
                num_micro_batches=count,
                num_pipelines=num_pipelines,
                concatenation=concatenation,
                recompute=recompute,
                width=width,
            )
            memory = _memory_bytes(workload, schedule, cuts, size)
            if memory > workload.limit_bytes:
                continue
            fitting = True
            times = _times(workload, network, grid, schedule, cuts, size)
            yield ChimeraConfiguration(
                depth=depth,
                width=width,
                num_pipelines=num_pipelines,
                micro_batch=size,
                num_micro_batches=count,
                recompute=recompute,
                concatenation=concatenation,
                cuts=cuts,
                placements=_devices_of_stages(schedule, width),
                memory_bytes=memory,
                model_s=performance_model(schedule, times),
                simulated_s=simulate(schedule, times).makespan,
            )
        if fitting and count >= depth:
            return
        greedy = greedy or fitting


def _memory_bytes(workload: Workload, schedule: Schedule, cuts: tuple[int, ...], micro_batch: int) -> float:
    """Of the fullest worker: weights and optimizer state of all its stages, activations, inputs kept for recomputation."""
    stages = list(zip(cuts, cuts[1:]))
    stored = [workload.in_flight_bytes(first, stop, micro_batch) for first, stop in stages]
    inputs = [float(workload.cut_forward[first]) * micro_batch for first in cuts[:-1]]
    kept = zip(peak_activations(schedule, stored), peak_stashed_inputs(schedule, inputs))
    return max(
        activations
        + stashed
        + workload.state * sum(workload.parameter_bytes(*stages[s]) for _, s in schedule.stages_on(worker))
        for worker, (activations, stashed) in enumerate(kept)
    )


def _times(
    workload: Workload, network: Network, grid: Grid, schedule: Schedule, cuts: tuple[int, ...], micro_batch: int
) -> Times:
    """Of one pipeline's stages; transfers are those of all pipelines' replicas at once, side by side."""
    width = sum(grid.workers[0])
    down = schedule.placement[0]
    stages = list(zip(cuts, cuts[1:]))
    forwards, backwards = [], []
    for boundary in range(len(stages) - 1):
        here, there = grid.workers[down[boundary]], grid.workers[down[boundary + 1]]
        cut, samples = cuts[boundary + 1], micro_batch * width
        forwards.append(network.transfer(here, there).time(float(workload.cut_forward[cut]) * samples))
        backwards.append(network.transfer(there, here).time(float(workload.cut_backward[cut]) * samples))
    reduces = []
    for stage, layers in enumerate(stages):
        homes = [grid.workers[replica.worker] for replica in schedule.replicas_of(stage)]
        together = tuple(map(sum, zip(*homes)))
        beta = network.all_reduce(together, max(1, grid.sharing // len(homes))).seconds_per_byte
        # The line's slope is 2 (r - 1)/r beta already: over one level exactly, over two the hierarchical equivalent.
        replicas = sum(together)
        plain = rabenseifner_s(replicas, 0.0, network.latency_s, 0.0)
        reduces.append(plain + beta * workload.parameter_bytes(*layers))
    return Times.of(
        len(stages),
        forward=[workload.forward_s(*layers, micro_batch) for layers in stages],
        backward=[workload.backward_s(*layers, micro_batch) for layers in stages],
        all_reduce=reduces,
        transfer=forwards,
        transfer_backward=backwards,
    )


def _devices_of_stages(schedule: Schedule, width: int) -> tuple[tuple[int, ...], ...]:
    depth = schedule.num_stages
    return tuple(
        tuple(sorted(k * depth + replica.worker for k in range(width) for replica in schedule.replicas_of(stage)))
        for stage in range(depth)
    )
