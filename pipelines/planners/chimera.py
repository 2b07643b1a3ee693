"""Chimera's planner: depth D, width W and micro-batch B of bidirectional pipelines (Li and Hoefler, "Chimera").

For every W D = P with D even, with and without recomputation, B is the largest micro-batch that fits the device memory
(greedily, as in the paper). If that leaves fewer than D micro-batches per iteration, the largest B that leaves at least D is
considered as well. Each configuration is evaluated twice.

*By the performance model* (Section 3.4 of the paper),

    T = (F + c) C_f + (Bk + c) C_b + max over workers ( all-reduce time that is not hidden )

for stages of equal times, with C_f forwards and C_b backwards on the critical path, c = alpha + beta L of one boundary message
and the all-reduce of a stage over r = 2 f W replicas by Rabenseifner's algorithm,

    2 log2(r) alpha + 2 (r - 1)/r beta L

Stages of real models are not equal: an embedding, a head, layers that do not divide by D. So every task on the critical path is
counted with the time of *its* stage, and with the c of the boundary that its output crosses (none behind the last stage's
forward and the first stage's backward):

    T = max over workers i of max( E_i, end of the last all-reduce on i )

where E_i is the end of i's computing on the timeline in which a task takes F_s + c_s or Bk_s + c_s. For equal stages E is the
sum of the formula above. A recomputation is a task of its own on this timeline: it delays only where it is on the critical
path. An all-reduce starts when all members have launched it and the previous one of each member's stream has ended. If
all-reduces overlap computing (``Times.all_reduce_overlaps_compute``) it then takes its time; otherwise it proceeds only in the
*free regions* of the paper, the idle gaps of a worker.

How far the model is off: it counts every message as time of its sender, where a simulation with overlap lets the sender go on.
So it is never below the simulation, and exact without messages. If no message takes longer than a tenth of a forward it is at
most 2 % above the simulation; a third of a forward, 5 %; a whole forward, 13 %; three forwards, 35 %. For the transformers of
the papers that is at most 4 %, for convolutional networks on slow links up to 25 %
(``tests/pipelines/planners/test_chimera_model.py``). The formula for equal stages is 12 to 34 % above the simulation for
Bert-48 on 32 nodes of Piz Daint if it is given the times of the slowest stage and of the slowest boundary for all, and if
all-reduces proceed in free regions only; and 19 to 54 % above it if every backward on the critical path is preceded by its
recomputation.

*By simulation* of the same schedule with unequal stages, transfers that overlap compute, recomputations that start before the
gradient has arrived, and eager-sync-opt all-reduces. The simulation decides; ``by_model`` is the choice of the model alone.

Pipelines lie inside machines as far as possible (:mod:`.network`); cuts balance the stages' times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.nearest import divisors

from ..generators import generate
from ..memory import peak_activations, peak_stashed_inputs
from ..schedule import Kind, Schedule
from ..simulator import simulate
from ..timeline import Timeline, free_regions
from ..times import Times
from .clock import Clock
from .network import Network, PipelinePlacement
from .workload import PlannerError, ProfiledWorkload

__all__ = ["ChimeraConfiguration", "ChimeraResult", "performance_model", "plan_chimera", "rabenseifner_s"]


@dataclass(frozen=True)
class ChimeraConfiguration:
    """One configuration that fits in memory, evaluated by the model and by simulation.

    Attributes:
        depth: D, number of stages and of workers per pipeline.
        width: W, number of data-parallel copies of the pipelines.
        num_pipelines: 2f, in both directions together.
        micro_batch: B, in samples.
        num_micro_batches: N, per worker and iteration.
        recompute: whether activations are recomputed.
        concatenation: how units of D micro-batches follow each other (:mod:`autoddl.pipelines.generators.chimera`).
        cuts: positions of the layers before which the model is cut, with both ends.
        placements: per stage, the devices of all its replicas.
        memory_bytes: of the fullest worker.
        model_s: time of an iteration by the performance model.
        simulated_s: time of an iteration by simulation.
    """

    depth: int
    width: int
    num_pipelines: int
    micro_batch: int
    num_micro_batches: int
    recompute: bool
    concatenation: str
    cuts: tuple[int, ...]
    placements: tuple[tuple[int, ...], ...]
    memory_bytes: float
    model_s: float
    simulated_s: float

    @property
    def name(self) -> str:
        return f"W={self.width} D={self.depth}"


@dataclass(frozen=True)
class ChimeraResult:
    """Chimera's result.

    Attributes:
        plan: the best configuration by simulation.
        by_model: the best configuration by the performance model.
        configurations: all configurations, best simulation first.
    """

    plan: ChimeraConfiguration
    by_model: ChimeraConfiguration
    configurations: tuple[ChimeraConfiguration, ...]


def rabenseifner_s(num_replicas: int, nbytes: float, latency_s: float, seconds_per_byte: float) -> float:
    """Time of an all-reduce of ``nbytes`` over ``num_replicas`` [s] (formula: module's docstring)."""
    rounds = 2 * math.log2(num_replicas)
    return rounds * latency_s + 2 * (num_replicas - 1) / num_replicas * seconds_per_byte * nbytes


def performance_model(schedule: Schedule, times: Times) -> float:
    """T [s] of a schedule (formula: module's docstring)."""
    # A send that blocks its worker is a task that takes F + c.
    alone = replace(times, all_reduce=(0.0,) * times.num_stages, overlap_transfers=False)
    timeline = simulate(schedule, alone)
    if times.all_reduce_overlaps_compute:
        return max(timeline.makespan, _last_all_reduce(timeline, times))
    return max(end + exposed for end, exposed in zip(_ends(timeline), _exposed(timeline, times)))


def _ends(timeline: Timeline) -> list[float]:
    """Per worker, the end [s] of its computing."""
    tasks = zip(timeline.schedule.workers, timeline.ends)
    return [
        max((end for task, end in zip(own, ends.tolist()) if task.kind < Kind.ALL_REDUCE), default=0.0)
        for own, ends in tasks
    ]


def _last_all_reduce(timeline: Timeline, times: Times) -> float:
    """The end [s] of the last all-reduce, if all-reduces overlap computing; 0 if there is none."""
    launched: dict[int, float] = {}
    queues: list[list[int]] = []
    for tasks, starts in zip(timeline.schedule.workers, timeline.starts):
        queues.append([task.stage for task in tasks if task.kind is Kind.ALL_REDUCE])
        for task, start in zip(tasks, starts.tolist()):
            if task.kind is Kind.ALL_REDUCE:
                launched[task.stage] = max(start, launched.get(task.stage, 0.0))
    members = {stage: [worker for worker, queue in enumerate(queues) if stage in queue] for stage in launched}
    free = [0.0] * len(queues)
    while any(queues):
        # All workers launch in one global order of the stages, so some stage is the next one of all its members.
        heads = {queue[0] for queue in queues if queue}
        stage = next(s for s in sorted(heads) if all(queues[worker][0] == s for worker in members[s]))
        end = max(launched[stage], *(free[worker] for worker in members[stage])) + times.all_reduce[stage]
        for worker in members[stage]:
            free[worker] = end
            queues[worker].pop(0)
    return max(free, default=0.0)


def _exposed(timeline: Timeline, times: Times) -> list[float]:
    """Per worker, the time [s] that its all-reduces continue after its computing, if only free regions hide them."""
    exposed = []
    for worker, regions in enumerate(free_regions(timeline)):
        stages = [stage for _, stage in timeline.schedule.stages_on(worker)]
        # Larger free regions begin earlier. A replica without micro-batches has an infinite free region.
        order = sorted(zip(regions, stages), reverse=True)
        pending = 0.0
        for (region, stage), following in zip(order, [*(r for r, _ in order[1:]), 0.0]):
            pending = max(0.0, pending + times.all_reduce[stage] - (region - following if following < region else 0.0))
        exposed.append(pending)
    return exposed


def plan_chimera(
    workload: ProfiledWorkload,
    micro_batch: int | None = None,
    num_stages: int | None = None,
    num_pipelines: int = 2,
    clock: Clock | None = None,
) -> ChimeraResult:
    """The best depth, width and micro-batch on all devices of the cluster.

    Args:
        workload: profile, cluster and batch. With ``workload.recompute`` only recomputation is considered, otherwise both.
        micro_batch: B; by default the largest that fits.
        num_stages: D; by default every even divisor of the number of devices.
        num_pipelines: 2f; depths that are not a multiple of it are skipped.
        clock: time limit, after which the best configuration so far is returned; by default none.

    Raises:
        PlannerError: the constraints cannot be satisfied, nothing fits in memory, or nothing was found in time.
    """
    devices, layers = workload.cluster.num_devices, workload.num_layers
    if num_stages is not None and num_stages > layers:
        raise PlannerError(f"{num_stages} stages are more than the {layers} layers of {workload.profile.name}")
    if num_pipelines < 2 or num_pipelines % 2:
        raise PlannerError(f"num_pipelines of chimera is {num_pipelines}, should be an even number of at least 2")
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
        raise workload.not_found_error("Chimera configuration", clock)
    ranked = sorted(found, key=lambda c: (c.simulated_s, c.model_s, c.depth))
    return ChimeraResult(ranked[0], min(found, key=lambda c: (c.model_s, c.depth)), tuple(ranked))


def _configurations(
    workload: ProfiledWorkload,
    network: Network,
    depth: int,
    num_pipelines: int,
    recompute: bool,
    wanted: int | None,
    clock: Clock,
) -> Iterator[ChimeraConfiguration]:
    """One depth's configurations: at most two micro-batch sizes, with every concatenation of units."""
    width = workload.cluster.num_devices // depth
    if workload.batch % width:
        return
    share = workload.batch // width
    sizes = [wanted] if wanted is not None else divisors(share)[::-1]
    grid = network.grid(depth, width, pipelines_inside=True)
    greedy = False
    for size in sizes:
        if share % size:
            continue
        count = share // size
        cuts = workload.balanced_cuts(depth, size)
        if (greedy and count < depth) or workload.least_memory_bytes(cuts, size) > workload.limit_bytes:
            continue
        workload.check_passes(depth, count)
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
            times = _times(workload, network, grid, schedule, cuts, size, concatenation)
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


def _memory_bytes(workload: ProfiledWorkload, schedule: Schedule, cuts: tuple[int, ...], micro_batch: int) -> float:
    """Memory of the fullest worker: weights and optimizer state of all its stages, activations, inputs kept for recomputation."""
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
    workload: ProfiledWorkload,
    network: Network,
    grid: PipelinePlacement,
    schedule: Schedule,
    cuts: tuple[int, ...],
    micro_batch: int,
    concatenation: str,
) -> Times:
    """Times of one pipeline's stages. A transfer is that of the replicas of all pipelines at the same time."""
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
        # The seconds per byte include 2 (r - 1)/r beta: exactly over one level, its hierarchical equivalent over two.
        replicas = sum(together)
        plain = rabenseifner_s(replicas, 0.0, network.latency_s, 0.0)
        reduces.append(plain + beta * workload.parameter_bytes(*layers))
    # Under halving all backwards and recomputations are of half a micro-batch; a whole one counts as two of them.
    parts = 2 if concatenation == "halving" else 1
    return Times.of(
        len(stages),
        forward=[workload.forward_s(*layers, micro_batch) for layers in stages],
        backward=[parts * workload.backward_s(*layers, micro_batch / parts) for layers in stages],
        recompute=[parts * workload.forward_s(*layers, micro_batch / parts) for layers in stages],
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
