"""DAPPLE's planner: stages, replicas and devices for a profiled model on a cluster (Fan et al., "DAPPLE").

1. For every micro-batch size that divides the global batch, the dynamic programme of :mod:`.dapple_search` finds the plans of
   smallest estimated latency (:mod:`.latency`).
2. The best plan of each kind (widths of the stages, number of micro-batches) is simulated with DAPPLE's early-backward
   schedule: unequal stages, re-slicing between stages of different width, gradient all-reduce over the actual device groups
   under the last backward of each stage (:mod:`.overlap`), and as many micro-batches in flight as the policy allows and memory
   holds:

       policy A: K_i = min(S - i, memory);  policy B: K_i = min(2 (S - i) - 1, memory), for slow boundaries

   Estimates are lower bounds of simulated latencies, so the ranking stops at the first estimate that is above the best
   simulation so far: no later plan can be better. (This holds among the candidates: a plan that the search dropped because
   another one of its state has a better estimate is not simulated.)
3. The estimate does not see that a stage with more layers may hold too few micro-batches in flight. So pipelines of equal
   widths whose cuts balance the times of the stages are simulated too, and the best plans are refined: their cuts move by one
   layer as long as that makes the simulation shorter.

A stage's replicas do the same at the same time, so one worker of the simulated schedule stands for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from autoddl.costmodel.limits import MAX_PASSES
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.units import format_bytes

from ..generators import generate
from ..schedule import Schedule
from ..simulator import simulate
from ..times import Times
from .clock import Clock
from .dapple_search import DeviceStates, PlacedCut, StageConstraints, search
from .latency import StageCost, corrected_latency, latency
from .network import Network, Placement, place_append_first, place_fresh_first
from .overlap import exposed_s
from .workload import PlannerError, ProfiledWorkload

__all__ = ["DapplePlan", "DappleResult", "PlacedStage", "evaluate", "plan_dapple", "simulated_latency", "stage_costs"]

#: Candidates are kept up to this relative excess over the best estimate, since the simulation may rank them differently.
SLACK = 0.05
#: Upper bound of the number of simulated candidates.
MAX_SIMULATED = 48
#: Number of plans that are refined, and their largest relative excess over the best simulation.
MAX_REFINED = 4
REFINED_SLACK = 0.25
#: Relative gap between estimate and simulation above which plans with memory for a full warm-up are searched for as well.
GAP = 0.1


@dataclass(frozen=True)
class PlacedStage:
    """One stage: its layers, its devices and its cost on one of them.

    Attributes:
        first: first of its layers in the profile.
        stop: one past the last of its layers.
        placement: devices per machine.
        devices: device numbers, machine by machine; the first stage has the lowest.
        forward_s: forward of a micro-batch.
        backward_s: backward of a micro-batch.
        all_reduce_s: all-reduce of its gradients, per iteration.
        exposed_all_reduce_s: the part of it after the last backward.
        in_flight: K_i, the most micro-batches between their forward and their backward at any time.
        memory_bytes: of one device.
    """

    first: int
    stop: int
    placement: Placement
    devices: tuple[int, ...]
    forward_s: float
    backward_s: float
    all_reduce_s: float
    exposed_all_reduce_s: float
    in_flight: int
    memory_bytes: float

    @property
    def width(self) -> int:
        return len(self.devices)


@dataclass(frozen=True)
class DapplePlan:
    """A pipelined plan, its estimate and its simulation.

    Attributes:
        micro_batch: samples per micro-batch.
        num_micro_batches: per iteration.
        stages: first to last.
        policy: DAPPLE's early-backward policy, ``A`` or ``B``.
        latency_s: the planner's estimate of one iteration.
        corrected_latency_s: the paper's formula with corrected ends of the stages (:mod:`.latency`); the printed formula can
            be negative.
        simulated_s: time of one iteration by simulation.
    """

    micro_batch: int
    num_micro_batches: int
    stages: tuple[PlacedStage, ...]
    policy: str
    latency_s: float
    corrected_latency_s: float
    simulated_s: float

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(stage.width for stage in self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Positions of the layers before which the model is cut, with both ends."""
        return (*(stage.first for stage in self.stages), self.stages[-1].stop)

    @property
    def name(self) -> str:
        """``DP``, ``straight``, or the widths of the stages, such as ``8:8``."""
        if len(self.stages) == 1:
            return "DP"
        return "straight" if max(self.widths) == 1 else ":".join(map(str, self.widths))


@dataclass(frozen=True)
class DappleResult:
    """DAPPLE's result.

    Attributes:
        plan: the best plan.
        simulated: all simulated plans, best first.
        data_parallel: data parallelism for comparison; None if it does not fit in memory.
    """

    plan: DapplePlan
    simulated: tuple[DapplePlan, ...]
    data_parallel: DapplePlan | None

    @property
    def speedup_over_dp(self) -> float | None:
        """Simulated latency of data parallelism over the plan's."""
        return None if self.data_parallel is None else self.data_parallel.simulated_s / self.plan.simulated_s


@dataclass
class _Simulations:
    """Simulates the candidates of one workload.

    Attributes:
        workload: profile, cluster and batch.
        network: costs on the cluster.
        schedules: cache, by number of micro-batches, warm-up per stage, and whether stages are replicated.
    """

    workload: ProfiledWorkload
    network: Network
    schedules: dict[tuple[int, tuple[int, ...], bool], Schedule] = field(default_factory=dict)

    def plan(self, candidate: PlacedCut) -> DapplePlan:
        """The candidate under the better of the two policies."""
        plans = [self._under_policy(candidate, policy) for policy in ("A", "B")[: len(candidate.placements)]]
        return min(plans, key=lambda plan: (plan.simulated_s, plan.policy))

    def _under_policy(self, candidate: PlacedCut, policy: str) -> DapplePlan:
        stages = _stages(self.workload, self.network, candidate, policy)
        costs = stage_costs(self.workload, self.network, candidate)
        warm_up = tuple(stage.in_flight for stage in stages)
        replicated = any(stage.width > 1 for stage in stages)
        key = (candidate.num_micro_batches, warm_up, replicated)
        if key not in self.schedules:
            self.workload.check_passes(len(stages), candidate.num_micro_batches)
            self.schedules[key] = generate(
                "1f1b",
                num_stages=len(stages),
                num_micro_batches=candidate.num_micro_batches,
                warm_up=warm_up,
                width=2 if replicated else 1,
                all_reduce="eager",
            )
        return DapplePlan(
            micro_batch=self.workload.batch // candidate.num_micro_batches,
            num_micro_batches=candidate.num_micro_batches,
            stages=stages,
            policy=policy,
            latency_s=latency(costs, candidate.num_micro_batches),
            corrected_latency_s=corrected_latency(costs, candidate.num_micro_batches),
            simulated_s=simulated_latency(self.schedules[key], costs),
        )


def simulated_latency(schedule: Schedule, costs: Sequence[StageCost]) -> float:
    """Simulated latency [s] of a schedule.

    Args:
        costs: of the stages, alternating with the communication stages between them (:func:`stage_costs`).
    """
    compute, boundaries = costs[::2], costs[1::2]
    times = Times.of(
        len(compute),
        forward=[stage.forward_s for stage in compute],
        backward=[stage.backward_s for stage in compute],
        all_reduce=[stage.all_reduce_s for stage in compute],
        transfer=[boundary.forward_s for boundary in boundaries],
        transfer_backward=[boundary.backward_s for boundary in boundaries],
    )
    return simulate(schedule, times).makespan


def stage_costs(workload: ProfiledWorkload, network: Network, candidate: PlacedCut) -> list[StageCost]:
    """Costs of the candidate's computation stages, with the communication stages between them."""
    micro_batch = workload.batch // candidate.num_micro_batches
    costs: list[StageCost] = []
    before: Placement | None = None
    for first, stop, placement in zip(candidate.cuts, candidate.cuts[1:], candidate.placements):
        if before is not None:
            forward = network.transfer(before, placement).time(float(workload.cut_forward[first]) * micro_batch)
            backward = network.transfer(placement, before).time(float(workload.cut_backward[first]) * micro_batch)
            costs.append(StageCost(forward, backward, duplex=True))
        slice_size = -(-micro_batch // sum(placement))
        costs.append(
            StageCost(
                workload.forward_s(first, stop, slice_size),
                workload.backward_s(first, stop, slice_size),
                exposed_s(workload, first, stop, slice_size, network.all_reduce(placement)),
            )
        )
        before = placement
    return costs


def _stages(workload: ProfiledWorkload, network: Network, candidate: PlacedCut, policy: str) -> tuple[PlacedStage, ...]:
    micro_batch = workload.batch // candidate.num_micro_batches
    costs = stage_costs(workload, network, candidate)[::2]
    count = len(costs)
    stages = []
    in_flight = candidate.num_micro_batches
    for i, (first, stop, devices) in enumerate(
        zip(candidate.cuts, candidate.cuts[1:], _device_numbers(network, candidate))
    ):
        slice_size = -(-micro_batch // len(devices))
        wanted = count - i if policy == "A" else 2 * (count - i) - 1
        # A stage with more warm-up forwards than the previous one would wait for forwards that never run.
        in_flight = workload.most_in_flight(first, stop, slice_size, min(wanted, in_flight))
        if not in_flight:
            raise PlannerError(
                f"stage {i} (layers {first} to {stop - 1} on {len(devices)} devices, {slice_size} samples each) does not fit "
                f"{format_bytes(workload.limit_bytes)} per device; use more stages, smaller micro-batches or recomputation"
            )
        stages.append(
            PlacedStage(
                first=first,
                stop=stop,
                placement=candidate.placements[i],
                devices=devices,
                forward_s=costs[i].forward_s,
                backward_s=costs[i].backward_s,
                all_reduce_s=network.all_reduce(candidate.placements[i]).time(workload.parameter_bytes(first, stop)),
                exposed_all_reduce_s=costs[i].all_reduce_s,
                in_flight=in_flight,
                memory_bytes=workload.stage_bytes(first, stop, slice_size, in_flight),
            )
        )
    return tuple(stages)


def _device_numbers(network: Network, candidate: PlacedCut) -> list[tuple[int, ...]]:
    """Per stage, its device numbers.

    The search places the last stage first, from machine 0 on. Numbering from the other end gives the first stage device 0.
    """
    capacity = network.devices_per_machine
    last = network.num_machines * capacity - 1
    used = [0] * network.num_machines
    numbers = []
    for placement in reversed(candidate.placements):
        taken = [last - machine * capacity - used[machine] - k for machine, n in enumerate(placement) for k in range(n)]
        used = [a + b for a, b in zip(used, placement)]
        numbers.append(tuple(sorted(taken)))
    return numbers[::-1]


def plan_dapple(
    workload: ProfiledWorkload,
    micro_batch: int | None = None,
    shape: StageConstraints | None = None,
    clock: Clock | None = None,
) -> DappleResult:
    """The best plan of a workload.

    Args:
        workload: profile, cluster and batch.
        micro_batch: samples per micro-batch; by default all sizes of :meth:`.ProfiledWorkload.micro_batches` are tried.
        shape: constraints on the number and the widths of the stages; by default none.
        clock: time limit, after which the best plan so far is returned; by default none.

    Raises:
        PlannerError: the constraints cannot be satisfied, nothing fits in memory, or nothing was found in time.
    """
    shape = shape or StageConstraints()
    sizes = workload.micro_batches(micro_batch)
    _check_shape(workload, shape)
    network, clock = Network(workload.cluster), clock or Clock()
    simulations = _Simulations(workload, network)
    # Data parallelism and even pipelines are found quickly; their best latency bounds the search.
    single = _candidates(workload, network, sizes, StageConstraints(num_stages=1), clock)
    data_parallel = min((simulations.plan(c) for c in single), key=_by_simulation, default=None)
    seeds = _seeds(workload, network, sizes, shape, single, clock)
    bound = min((c.latency_s for c in seeds), default=float("inf"))
    # Search by estimate, then rank by simulation.
    found = _best_of_each_kind([*seeds, *_candidates(workload, network, sizes, shape, clock, bound * (1 + SLACK))])
    plans = _ranked(simulations, found, clock)
    if plans and plans[0].simulated_s > (1 + GAP) * found[0].latency_s:
        # The estimate ignores bubbles of stages whose memory limits their warm-up: add plans with a full warm-up.
        full = _candidates(workload, network, sizes, shape, clock, plans[0].simulated_s, full_warm_up=True)
        plans = sorted([*plans, *_ranked(simulations, full, clock, plans[0].simulated_s)], key=_by_simulation)
    if not plans:
        raise workload.not_found_error("plan" if shape == StageConstraints() else "plan of that shape", clock)
    even = _balanced(workload, network, sizes, shape)
    plans = sorted([*plans, *_ranked(simulations, even, clock, plans[0].simulated_s)], key=_by_simulation)
    worth = [plan for plan in plans[:MAX_REFINED] if plan.simulated_s <= (1 + REFINED_SLACK) * plans[0].simulated_s]
    refined = [_refined(simulations, plan, clock) for plan in worth]
    # Refinements may end in the same plan.
    different = {(p.cuts, tuple(stage.placement for stage in p.stages), p.num_micro_batches): p for p in refined}
    plans = sorted([*different.values(), *plans[len(worth) :]], key=_by_simulation)
    return DappleResult(plans[0], tuple(plans), data_parallel)


def _seeds(
    workload: ProfiledWorkload,
    network: Network,
    sizes: list[int],
    shape: StageConstraints,
    single: list[PlacedCut],
    clock: Clock,
) -> list[PlacedCut]:
    """Data parallelism and even pipelines. They are found quickly, and their best latency bounds the search."""
    found = list(single) if shape.length is None else []
    for even in _even_widths(workload, shape):
        bound = min((c.latency_s for c in found), default=float("inf"))
        found += _candidates(
            workload, network, sizes, StageConstraints(widths=even, in_order=shape.in_order), clock, bound
        )
    return found


def _even_widths(workload: ProfiledWorkload, shape: StageConstraints) -> Iterator[tuple[int, ...]]:
    """Widths that are as equal as possible, for each number of stages that the constraints allow; one stage only if they ask."""
    if shape.widths is not None:
        return
    devices = workload.cluster.num_devices
    for number in [n for n in divisors(devices) if n > 1] if shape.num_stages is None else [shape.num_stages]:
        if number <= workload.num_layers:
            each, extra = divmod(devices, number)
            yield tuple(each + (stage < extra) for stage in range(number))


def _balanced(
    workload: ProfiledWorkload, network: Network, sizes: Iterable[int], shape: StageConstraints
) -> list[PlacedCut]:
    """Pipelines of equal widths whose cuts balance the times of the stages and which fit in memory, best estimate first."""
    found = []
    for widths in _even_widths(workload, shape):
        if len(set(widths)) > 1:
            continue
        placements = _placed(network, widths, place_append_first if shape.in_order else place_fresh_first)
        for size in sizes:
            slice_size = -(-size // widths[0])
            cuts = workload.balanced_cuts(len(widths), slice_size)
            if len(widths) * (workload.batch // size) > MAX_PASSES:  # too long to simulate
                continue
            if all(workload.most_in_flight(*layers, slice_size, 1) for layers in zip(cuts, cuts[1:])):
                plain = PlacedCut(workload.batch // size, cuts, placements, 0.0)
                estimate = latency(stage_costs(workload, network, plain), plain.num_micro_batches)
                found.append(replace(plain, latency_s=estimate))
    return sorted(found, key=lambda candidate: candidate.latency_s)


def _placed(
    network: Network, widths: Sequence[int], policy: Callable[[Placement, int, int], Placement]
) -> tuple[Placement, ...]:
    """The placements of stages of these widths, the last stage placed first."""
    used: Placement = (0,) * network.num_machines
    placements: list[Placement] = []
    for width in reversed(widths):
        placements.append(policy(used, width, network.devices_per_machine))
        used = tuple(a + b for a, b in zip(used, placements[-1]))
    return tuple(reversed(placements))


def _candidates(
    workload: ProfiledWorkload,
    network: Network,
    sizes: Iterable[int],
    shape: StageConstraints,
    clock: Clock,
    bound: float = float("inf"),
    full_warm_up: bool = False,
) -> list[PlacedCut]:
    """The best candidates of each kind over all micro-batch sizes, by estimate.

    Args:
        workload: profile, cluster and batch.
        network: costs on the cluster.
        sizes: micro-batch sizes.
        shape: constraints on the stages.
        clock: time limit.
        bound: upper bound of the latency [s].
        full_warm_up: only plans whose stages can hold as many micro-batches as policy A has in flight.
    """
    devices = DeviceStates(network, shape, count_stages=full_warm_up)
    found: list[PlacedCut] = []
    for size in sorted(sizes, reverse=True):
        these = search(workload, devices, workload.batch // size, bound, clock)
        if these:
            bound = min(bound, these[0].latency_s * (1 + SLACK))
        found += these
    return _best_of_each_kind(found)


def _best_of_each_kind(found: Iterable[PlacedCut]) -> list[PlacedCut]:
    """The best candidate by estimate for each (widths, number of micro-batches), best first."""
    best: dict[tuple[tuple[int, ...], int], PlacedCut] = {}
    for candidate in sorted(found, key=lambda c: (c.latency_s, len(c.placements), c.num_micro_batches)):
        best.setdefault((candidate.widths, candidate.num_micro_batches), candidate)
    return list(best.values())


def _ranked(
    simulations: _Simulations, candidates: Iterable[PlacedCut], clock: Clock, best: float = float("inf")
) -> list[DapplePlan]:
    """Simulate by ascending estimate until no later candidate can be better than ``best`` [s] or the best one simulated.

    After a requested stop only the first candidate is simulated, so that there is a plan. Returns the plans, best first.
    """
    plans: list[DapplePlan] = []
    for candidate in candidates:
        if candidate.latency_s >= best or len(plans) == MAX_SIMULATED or (plans and clock.stop.is_requested):
            break
        plans.append(simulations.plan(candidate))
        best = min(best, plans[-1].simulated_s)
    return sorted(plans, key=_by_simulation)


def _refined(simulations: _Simulations, plan: DapplePlan, clock: Clock) -> DapplePlan:
    """Move single cuts by one layer as long as the simulation gets shorter, the best move first."""
    placements = tuple(stage.placement for stage in plan.stages)
    while not clock.is_over:
        moved = []
        for number, step in product(range(1, len(plan.stages)), (-1, 1)):
            cuts = (*plan.cuts[:number], plan.cuts[number] + step, *plan.cuts[number + 1 :])
            if not cuts[number - 1] < cuts[number] < cuts[number + 1]:
                continue
            if clock.is_over:
                break
            try:
                moved.append(simulations.plan(PlacedCut(plan.num_micro_batches, cuts, placements, 0.0)))
            except PlannerError:  # a stage no longer fits in memory
                continue
        best = min([plan, *moved], key=_by_simulation)
        if best is plan:
            break
        plan = best
    return plan


def _by_simulation(plan: DapplePlan) -> tuple[float, int, int]:
    """Sorts by simulation; among equals, fewer stages and fewer micro-batches first."""
    return (plan.simulated_s, len(plan.stages), plan.num_micro_batches)


def _check_shape(workload: ProfiledWorkload, shape: StageConstraints) -> None:
    count, devices, layers = shape.length, workload.cluster.num_devices, workload.num_layers
    if count is None:
        return
    if count < 1:
        raise PlannerError(f"{count} stages; there should be at least 1")
    if count > layers:
        raise PlannerError(f"{count} stages are more than the {layers} layers of {workload.profile.name}")
    if count > devices:
        raise PlannerError(f"{count} stages are more than the {devices} devices of {workload.cluster.name}")
    if shape.widths is not None and (min(shape.widths) < 1 or sum(shape.widths) != devices):
        raise PlannerError(
            f"stages on {':'.join(map(str, shape.widths))} devices; each should have at least 1 and all together "
            f"the {devices} of {workload.cluster.name}"
        )


def evaluate(
    workload: ProfiledWorkload, cuts: Sequence[int], widths: Sequence[int], micro_batch: int | None = None
) -> DapplePlan:
    """Simulate a given plan, at the micro-batch size with the smallest latency.

    Args:
        workload: profile, cluster and batch.
        cuts: positions of the layers before which the model is cut, without the ends.
        widths: number of devices of each stage; they are placed fresh first.
        micro_batch: samples per micro-batch; by default all sizes of :meth:`.ProfiledWorkload.micro_batches` are tried.

    Raises:
        PlannerError: the plan does not match the workload, or does not fit in memory at any micro-batch size.
    """
    network = Network(workload.cluster)
    whole = (0, *cuts, workload.num_layers)
    _check_shape(workload, StageConstraints(widths=tuple(widths)))
    if len(whole) != len(widths) + 1 or any(a >= b for a, b in zip(whole, whole[1:])):
        raise PlannerError(
            f"cuts {tuple(cuts)} should be {len(widths) - 1} ascending positions between 1 and {workload.num_layers - 1}"
        )
    simulations = _Simulations(workload, network)
    blank = PlacedCut(1, whole, _placed(network, widths, place_fresh_first), 0.0)
    plans = []
    fault: PlannerError | None = None
    for size in workload.micro_batches(micro_batch):
        try:
            plans.append(simulations.plan(replace(blank, num_micro_batches=workload.batch // size)))
        except PlannerError as error:
            fault = fault or error
    if not plans:
        assert fault is not None
        raise fault
    return min(plans, key=_by_simulation)
