"""WPipe's planner: recomputation, depth, width, placement and accumulation of 2GW (Yang et al., "WPipe").

The planner chooses the configuration with the best throughput over

    recomputation {no, yes}  x  H(d:w), d w = devices, each in placement A and B  x  M >= d,  global batch = B M w

Placement A keeps pipeline neighbours inside a machine and has data-parallel groups across machines, B the reverse
(:mod:`.network`). The model is cut into 2 d stages of balanced time; worker s has stages s and s + d.

The throughput is that of the simulated steady state: one update period, whose length cannot be less than

    max over workers of ( M (F + Bk [+ recomputation]) of its two stages,  the all-reduces of both )

Configurations are simulated in ascending order of this bound until it exceeds the best period found.

Memory of worker s: weights and optimizer state of both stages, one more copy of the weights of stage s (the first group
has two versions), and the activations that the schedule keeps alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.nearest import divisors

from ..generators import generate
from ..memory import peak_activations, peak_stashed_inputs, weight_versions
from ..schedule import Schedule
from ..simulator import simulate
from ..timeline import steady_state
from ..times import Times
from .clock import Clock
from .network import Network, PipelinePlacement
from .workload import PlannerError, ProfiledWorkload

__all__ = ["WPipeConfiguration", "WPipeLayout", "WPipeResult", "plan_wpipe"]

#: Number of simulated update periods; the middle third of them is the steady state.
PERIODS = 6


@dataclass(frozen=True)
class WPipeLayout:
    """A configuration before its simulation.

    Attributes:
        depth: d, number of workers per pipeline, each with two stages.
        width: w, number of pipelines.
        placement: ``A``: pipelines inside machines; ``B``: replicas inside machines.
        recompute: whether activations are recomputed.
        micro_batch: B, in samples.
        num_micro_batches: M, per pipeline and update period.
        cuts: positions of the layers before which the model is cut, with both ends.
        times: of the tasks of each stage, for one pipeline.
        bound_s: lower bound [s] of the period (see the module's docstring).
    """

    depth: int
    width: int
    placement: str
    recompute: bool
    micro_batch: int
    num_micro_batches: int
    cuts: tuple[int, ...]
    times: Times
    bound_s: float

    @property
    def name(self) -> str:
        """Depth, width and placement, such as ``4:2 A``."""
        return f"{self.depth}:{self.width} {self.placement}"

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of all replicas of each stage."""
        depth, width = self.depth, self.width
        return tuple(
            tuple(
                sorted(
                    k * depth + stage % depth if self.placement == "A" else (stage % depth) * width + k
                    for k in range(width)
                )
            )
            for stage in range(2 * depth)
        )


@dataclass(frozen=True)
class WPipeConfiguration(WPipeLayout):
    """A simulated configuration.

    Attributes:
        memory_bytes: memory of the fullest worker.
        period_s: simulated time between two updates, in which one batch is computed.
    """

    memory_bytes: float
    period_s: float


@dataclass(frozen=True)
class WPipeResult:
    """WPipe's result.

    Attributes:
        plan: the best configuration.
        configurations: all simulated configurations, best first.
    """

    plan: WPipeConfiguration
    configurations: tuple[WPipeConfiguration, ...]


def plan_wpipe(
    workload: ProfiledWorkload, micro_batch: int | None = None, depth: int | None = None, clock: Clock | None = None
) -> WPipeResult:
    """The configuration of best throughput on all devices of the cluster.

    Args:
        workload: profile, cluster and batch. With ``workload.recompute`` only recomputation is considered, otherwise both.
        micro_batch: B; by default every one for which M >= d.
        depth: d, workers per pipeline, each with two stages; by default every divisor of the number of devices.
        clock: time limit, after which the best configuration so far is returned; by default none.

    Raises:
        PlannerError: the constraints cannot be satisfied, nothing fits in memory, or nothing was found in time.
    """
    devices, layers = workload.cluster.num_devices, workload.num_layers
    if depth is not None and 2 * depth > layers:
        raise PlannerError(
            f"{2 * depth} stages (2 per worker) are more than the {layers} layers of {workload.profile.name}"
        )
    depths = [d for d in divisors(devices) if 2 * d <= layers and depth in (None, d)]
    if not depths:
        raise PlannerError(f"depth {depth} for WPipe should divide the {devices} devices of {workload.cluster.name}")
    workload.require_division(
        f"be micro-batch * M * w with M >= d, for some d w = {devices} with d = {' or '.join(map(str, depths))}",
        lambda batch, size: any(_num_micro_batches(batch, devices // d, size) >= d for d in depths),
        micro_batch,
    )
    network, clock = Network(workload.cluster), clock or Clock()
    plain = replace(workload, recompute=False)
    recomputations = (True,) if workload.recompute else (False, True)
    layouts = [
        layout
        for d in depths
        for recompute in recomputations
        for layout in _layouts(plain, network, d, recompute, micro_batch)
    ]
    found = _simulated(plain, layouts, clock)
    if not found:
        raise workload.not_found_error("WPipe configuration", clock)
    ranked = sorted(found, key=lambda c: (c.period_s, c.recompute, c.depth, c.placement))
    return WPipeResult(ranked[0], tuple(ranked))


def _num_micro_batches(batch: int, width: int, size: int) -> int:
    """M of each of ``width`` pipelines; 0 if the batch does not divide into such micro-batches."""
    return 0 if batch % (width * size) else batch // (width * size)


def _layouts(
    workload: ProfiledWorkload, network: Network, depth: int, recompute: bool, wanted: int | None
) -> Iterator[WPipeLayout]:
    width = workload.cluster.num_devices // depth
    if workload.batch % width:
        return
    share = workload.batch // width
    for placement in ("A", "B"):
        grid = network.grid(depth, width, pipelines_inside=placement == "A")
        if placement == "B" and grid == network.grid(depth, width, pipelines_inside=True):
            continue
        for size in divisors(share) if wanted is None else [wanted]:
            count = _num_micro_batches(workload.batch, width, size)
            cuts = workload.balanced_cuts(2 * depth, size)
            if count < depth or workload.least_memory_bytes(cuts, size) > workload.limit_bytes:
                continue
            times = _times(workload, network, grid, cuts, size)
            bound = max(
                max(
                    count
                    * sum(times.forward[s] * (1 + recompute) + times.backward[s] for s in (worker, worker + depth)),
                    times.all_reduce[worker] + times.all_reduce[worker + depth],
                )
                for worker in range(depth)
            )
            yield WPipeLayout(depth, width, placement, recompute, size, count, cuts, times, bound)


def _times(
    workload: ProfiledWorkload, network: Network, grid: PipelinePlacement, cuts: tuple[int, ...], micro_batch: int
) -> Times:
    """Times of one pipeline's stages. A transfer is that of all pipelines at the same time."""
    depth, width = len(grid.workers), sum(grid.workers[0])
    stages = list(zip(cuts, cuts[1:]))
    forwards, backwards = [], []
    for boundary in range(len(stages) - 1):
        here, there = grid.workers[boundary % depth], grid.workers[(boundary + 1) % depth]
        cut, samples = cuts[boundary + 1], micro_batch * width
        forwards.append(network.transfer(here, there).time(float(workload.cut_forward[cut]) * samples))
        backwards.append(network.transfer(there, here).time(float(workload.cut_backward[cut]) * samples))
    return Times.of(
        len(stages),
        forward=[workload.forward_s(*layers, micro_batch) for layers in stages],
        backward=[workload.backward_s(*layers, micro_batch) for layers in stages],
        all_reduce=[
            network.all_reduce(grid.workers[stage % depth], grid.sharing).time(workload.parameter_bytes(*layers))
            for stage, layers in enumerate(stages)
        ],
        transfer=forwards,
        transfer_backward=backwards,
    )


def _simulated(workload: ProfiledWorkload, layouts: Sequence[WPipeLayout], clock: Clock) -> list[WPipeConfiguration]:
    """Simulate by ascending bound until no later layout can be better."""
    schedules: dict[tuple[int, int, int, bool], Schedule] = {}
    found: list[WPipeConfiguration] = []
    best = float("inf")
    for layout in sorted(layouts, key=lambda c: (c.bound_s, c.num_micro_batches)):
        if layout.bound_s >= best or clock.is_over:
            break
        key = (layout.depth, layout.width, layout.num_micro_batches, layout.recompute)
        if key not in schedules:
            workload.check_passes(layout.depth, layout.num_micro_batches, PERIODS)
            schedules[key] = generate(
                "wpipe",
                num_stages=layout.depth,
                num_micro_batches=layout.num_micro_batches,
                iterations=PERIODS,
                recompute=layout.recompute,
                width=layout.width,
            )
        schedule = schedules[key]
        memory = _memory_bytes(workload, schedule, layout)
        if memory > workload.limit_bytes:
            continue
        period = steady_state(simulate(schedule, layout.times)).period
        best = min(best, period)
        found.append(WPipeConfiguration(**vars(layout), memory_bytes=memory, period_s=period))
    return found


def _memory_bytes(workload: ProfiledWorkload, schedule: Schedule, layout: WPipeLayout) -> float:
    stages = list(zip(layout.cuts, layout.cuts[1:]))
    stored = [workload.in_flight_bytes(*layers, layout.micro_batch) for layers in stages]
    inputs = [float(workload.cut_forward[first]) * layout.micro_batch for first in layout.cuts[:-1]]
    versions = weight_versions(schedule)
    kept = zip(peak_activations(schedule, stored), peak_stashed_inputs(schedule, inputs))
    return max(
        activations
        + stashed
        + sum(
            (workload.state + versions[0, stage] - 1) * workload.parameter_bytes(*stages[stage])
            for stage in (worker, worker + layout.depth)
        )
        for worker, (activations, stashed) in enumerate(kept)
    )
