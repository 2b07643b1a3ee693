"""DAPPLE's search: the pipelines of smallest estimated latency, for one number of micro-batches.

The search space: the layers are cut into stages, the stages use all devices, and each stage's devices are placed by one of the
three policies (:mod:`.network`). It includes data parallelism (one stage) and straight pipelines (one device per stage).

The dynamic programme builds plans from the last stage to the first; the stages built so far are a *suffix*. A state is (first
layer of the suffix, devices used per machine, placement of the suffix's first stage): the used devices determine what the
policies place next, the placement determines the cost of the boundary. Per state it keeps the suffixes that no other one
dominates in both V and W (see :mod:`.latency`). A suffix that is worse in both is worse under every prefix, so the smallest
latency over the search space is found exactly. (The paper builds from the first stage and keeps one best plan per state, with
the remaining layers taken as one stage, which is not exact. All machines are equal, so placing from the other end gives the
same space mirrored.)

A suffix is dropped if even the best conceivable prefix, the remaining layers' work spread evenly over the remaining devices
without communication, makes the plan longer than ``bound``:

    L >= max( V + X/m,  M X/m,  W + F/m )          X, F = time of the remaining layers on one device, m devices

X and F are the micro-batch times the least time per sample at any slice that a device can get.

With n layers, c device states and e continuations of each there are O(n^2 c e) extensions; numpy evaluates them for one first
layer at a time. Above 16 devices there are too many states: widths are limited to powers of two, whole machines and all
remaining devices, and per first layer only the suffixes of the smallest such bounds are kept (``BEAM``). This is a beam search
and no longer exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .clock import Clock
from .network import AlphaBeta, Network, Placement, place_append_first, place_fresh_first, place_scatter_first
from .overlap import exposed_for_all
from .workload import ProfiledWorkload, RunningTimes

__all__ = ["EXACT_UP_TO", "PlacedCut", "StageConstraints", "search"]

POLICIES: tuple[Callable[[Placement, int, int], Placement], ...] = (
    place_fresh_first,
    place_append_first,
    place_scatter_first,
)
#: Largest number of devices for which stages of every width are considered and the search is exact.
EXACT_UP_TO = 16
#: Suffixes kept per first layer above that.
BEAM = 100


@dataclass(frozen=True)
class StageConstraints:
    """Constraints on the stages.

    Attributes:
        num_stages: their number; None: any.
        widths: number of devices of each, the first stage first; None: any.
        in_order: whether stages take the devices one after another, machine by machine, instead of as any policy places them.
    """

    num_stages: int | None = None
    widths: tuple[int, ...] | None = None
    in_order: bool = False

    @property
    def length(self) -> int | None:
        """The number of stages; None: any."""
        return self.num_stages if self.widths is None else len(self.widths)


@dataclass(frozen=True)
class PlacedCut:
    """A plan found by the search.

    Attributes:
        num_micro_batches: M.
        cuts: stage s has the layers ``cuts[s]`` to ``cuts[s + 1] - 1``.
        placements: devices per machine of each stage.
        latency_s: its estimated latency.
    """

    num_micro_batches: int
    cuts: tuple[int, ...]
    placements: tuple[Placement, ...]
    latency_s: float

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(map(sum, self.placements))


@dataclass
class _Devices:
    """A state of the devices.

    Attributes:
        used: devices used per machine.
        head: placement of the suffix's first stage; None: there is no stage yet.
        num_stages: number of stages of the suffix; 0 if they are not counted.
        edges: the continuations, once they have been computed.
    """

    used: Placement
    head: Placement | None
    num_stages: int
    edges: _Edges | None = None


@dataclass(frozen=True)
class _Edges:
    """The possible placements of one more stage before the suffix, as arrays with one entry each.

    Attributes:
        state: number of the resulting state.
        width: number of devices of the stage.
        left: number of devices left after it.
        behind: number of stages behind it, if they are counted.
        group: number of its group of replicas in :attr:`DeviceStates.groups`.
        forward: the same of the transfer to the stage behind it.
        backward: the same of the transfer from the stage behind it.
    """

    state: np.ndarray
    width: np.ndarray
    left: np.ndarray
    behind: np.ndarray
    group: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


@dataclass
class DeviceStates:
    """The reachable states of the devices, computed on demand and shared by the searches on one cluster.

    Attributes:
        network: costs on the cluster.
        shape: constraints on the stages.
        count_stages: whether states include the number of stages; they always do if ``shape`` constrains it.
        states: by number.
        index: number of each (used, head, number of stages).
        groups: the groups of replicas, as (number of devices, cost of an all-reduce).
        group_index: number of each of them.
    """

    network: Network
    shape: StageConstraints
    count_stages: bool = False
    states: list[_Devices] = field(default_factory=list)
    index: dict[tuple[Placement, Placement | None, int], int] = field(default_factory=dict)
    groups: list[tuple[int, AlphaBeta]] = field(default_factory=list)
    group_index: dict[tuple[int, AlphaBeta], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number_of((0,) * self.network.num_machines, None, 0)

    @property
    def num_devices(self) -> int:
        return self.network.num_machines * self.network.devices_per_machine

    def number_of(self, used: Placement, head: Placement | None, num_stages: int) -> int:
        """The number of a state, which is added if it is new."""
        counted = num_stages if self.count_stages or self.shape.length is not None else 0
        key = (used, head, counted)
        if key not in self.index:
            self.index[key] = len(self.states)
            self.states.append(_Devices(used, head, counted))
        return self.index[key]

    def group_of(self, placement: Placement) -> int:
        """The number of a group of replicas, which is added if it is new."""
        key = (sum(placement), self.network.all_reduce(placement))
        if key not in self.group_index:
            self.group_index[key] = len(self.groups)
            self.groups.append(key)
        return self.group_index[key]

    def edges(self, number: int) -> _Edges:
        """The continuations of a state."""
        state = self.states[number]
        if state.edges is None:
            state.edges = self._edges(state)
        return state.edges

    def _edges(self, state: _Devices) -> _Edges:
        capacity = self.network.devices_per_machine
        left = self.num_devices - sum(state.used)
        found: dict[Placement, int] = {}
        for width in self._widths(left, state.num_stages):
            for policy in (place_append_first,) if self.shape.in_order else POLICIES:
                placement = policy(state.used, width, capacity)
                if placement not in found:
                    used = tuple(a + b for a, b in zip(state.used, placement))
                    found[placement] = self.number_of(used, placement, state.num_stages + 1)
        nothing = AlphaBeta(0.0, 0.0)
        placements = list(found)
        widths = np.array([sum(placement) for placement in placements], dtype=np.int64)
        return _Edges(
            state=np.array([found[placement] for placement in placements], dtype=np.int64),
            width=widths,
            left=left - widths,
            behind=np.full(len(widths), state.num_stages),
            group=np.array([self.group_of(placement) for placement in placements], dtype=np.int64),
            forward=_as_array([self.network.transfer(p, state.head) if state.head else nothing for p in placements]),
            backward=_as_array([self.network.transfer(state.head, p) if state.head else nothing for p in placements]),
        )

    def _widths(self, left: int, num_stages: int) -> list[int]:
        """Possible widths of a stage before ``num_stages`` stages, with ``left`` devices left."""
        shape = self.shape
        if shape.widths is not None:
            wanted = shape.widths[len(shape.widths) - 1 - num_stages] if num_stages < len(shape.widths) else 0
            return [wanted] if 1 <= wanted <= left else []
        if shape.num_stages is not None:
            missing = shape.num_stages - num_stages - 1
            if missing < 0:
                return []
            if missing == 0:
                return [left] if left else []
            left -= missing
        if self.num_devices <= EXACT_UP_TO:
            return list(range(1, left + 1))
        # On larger clusters: powers of two, whole machines, and all remaining devices.
        capacity = self.network.devices_per_machine
        return [w for w in range(1, left + 1) if w & (w - 1) == 0 or w % capacity == 0 or w == left]


def _as_array(costs: Sequence[AlphaBeta]) -> np.ndarray:
    return np.array(costs, dtype=float).reshape(-1, 2)


def _seconds(costs: np.ndarray, nbytes: float) -> np.ndarray:
    return costs[:, 0] + costs[:, 1] * nbytes if nbytes else np.zeros(len(costs))


@dataclass
class _Labels:
    """Suffixes that start at one layer: lists of arrays that are concatenated by :meth:`undominated`.

    Attributes:
        state: number of the state of the devices.
        chain: V.
        longest: W.
        parent: label of the suffix without its first stage.
        least: lower bound of the latency of any plan with this suffix.
    """

    state: list[np.ndarray] = field(default_factory=list)
    chain: list[np.ndarray] = field(default_factory=list)
    longest: list[np.ndarray] = field(default_factory=list)
    parent: list[np.ndarray] = field(default_factory=list)
    least: list[np.ndarray] = field(default_factory=list)

    def undominated(self, most: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """State, V, W and parent of the undominated labels: at most ``most``, those with the smallest bounds."""
        state, chain, longest = (np.concatenate(part) for part in (self.state, self.chain, self.longest))
        keep = _undominated(state, chain, longest)
        if most is not None and len(keep) > most:
            least = np.concatenate(self.least)[keep]
            keep = np.sort(keep[np.argpartition(least, most)[:most]])
        return state[keep], chain[keep], longest[keep], np.concatenate(self.parent)[keep]


def search(
    workload: ProfiledWorkload,
    devices: DeviceStates,
    num_micro_batches: int,
    bound: float = float("inf"),
    clock: Clock | None = None,
) -> list[PlacedCut]:
    """Plans by estimated latency, best first: per final state of the devices, all that are undominated in V and W.

    Every stage fits in memory with one micro-batch in flight; if stages are counted, with as many as policy A has in flight.

    Args:
        workload: profile, cluster and batch.
        devices: reachable states of the devices.
        num_micro_batches: M.
        bound: plans of a larger latency [s] may be dropped.
        clock: time limit, after which the result is empty.
    """
    num_layers = workload.num_layers
    micro_batch = workload.batch // num_micro_batches
    rates = workload.least_rates({-(-micro_batch // width) for width in range(1, devices.num_devices + 1)})
    waiting = [_Labels() for _ in range(num_layers + 1)]
    nothing = np.zeros(1)
    waiting[num_layers] = _Labels([np.zeros(1, dtype=np.int64)], [nothing], [nothing], [np.full(1, -1)], [nothing])
    most_labels = None if devices.num_devices <= EXACT_UP_TO else BEAM
    # Per layer with labels: their states, their parents, and the number of its first label.
    trail: list[tuple[np.ndarray, np.ndarray, int]] = []
    starts: dict[int, int] = {}
    total = 0
    for layer in range(num_layers, -1, -1):
        if not waiting[layer].state:
            continue
        if clock is not None and clock.is_over:
            return []
        state, chain, longest, parent = waiting[layer].undominated(most_labels)
        starts[layer] = len(trail)
        trail.append((state, parent, total))
        if layer:
            _extend(workload, devices, num_micro_batches, bound, layer, (state, chain, longest), total, waiting, rates)
        total += len(state)
    if 0 not in starts:
        return []
    order = np.argsort(longest, kind="stable")
    layers = sorted(starts, key=lambda layer: starts[layer])
    return [_trace(devices, trail, layers, int(number), num_micro_batches, float(longest[number])) for number in order]


def _undominated(state: np.ndarray, chain: np.ndarray, longest: np.ndarray) -> np.ndarray:
    """Numbers of the labels that no other one of the same state dominates in both values."""
    order = np.lexsort((longest, chain, state))
    keep = []
    current, best = -1, 0.0
    for number, where, value in zip(order.tolist(), state[order].tolist(), longest[order].tolist()):
        if where != current or value < best:
            keep.append(number)
            current, best = where, value
    return np.array(keep, dtype=np.int64)


def _extend(
    workload: ProfiledWorkload,
    devices: DeviceStates,
    num_micro_batches: int,
    bound: float,
    stop: int,
    labels: tuple[np.ndarray, np.ndarray, np.ndarray],
    offset: int,
    waiting: list[_Labels],
    rates: RunningTimes,
) -> None:
    """Put every possible stage that ends before layer ``stop`` in front of the suffixes that start there."""
    micro_batch = workload.batch // num_micro_batches
    rounds = num_micro_batches - 1
    edges = [devices.edges(number) for number in labels[0].tolist()]
    counts = [len(e.state) for e in edges]
    label = np.repeat(np.arange(len(edges)), counts)
    if not len(label):
        return
    width = np.concatenate([e.width for e in edges])
    left = np.concatenate([e.left for e in edges])
    # Stages of one group of replicas have the same times: one row of the tables below.
    groups, group = np.unique(np.concatenate([e.group for e in edges]), return_inverse=True)
    slice_sizes = [-(-micro_batch // devices.groups[number][0]) for number in groups]
    times = [workload.times(size) for size in slice_sizes]
    forward = np.array([each.forward[stop] - each.forward[:stop] for each in times])
    both = np.array([each.both[stop] - each.both[:stop] for each in times])
    exposed = exposed_for_all(workload, stop, slice_sizes, [devices.groups[number][1] for number in groups])
    send = _seconds(np.concatenate([e.forward for e in edges]), workload.cut_forward[stop] * micro_batch)
    send_back = _seconds(np.concatenate([e.backward for e in edges]), workload.cut_backward[stop] * micro_batch)
    slices = -(-micro_batch // width)

    # The communication stage behind the new stage. Columns below are the new stage's first layer.
    chain = send + send_back + np.maximum(labels[1][label], rounds * np.maximum(send, send_back))
    longest = send + labels[2][label]
    parameters = workload.parameters[stop] - workload.parameters[:stop]
    stored = workload.stored[stop] - workload.stored[:stop]
    in_flight = np.ones(len(width))
    if devices.count_stages:
        in_flight = np.minimum(num_micro_batches, np.concatenate([e.behind for e in edges]) + 1)
    # As Workload.stage_bytes, for one sample.
    kept = (
        stored + in_flight[:, None] * workload.cut_forward[:stop] if workload.recompute else in_flight[:, None] * stored
    )
    work = rates.both[:stop]

    # Rows are (label, edge) pairs: keep the stages that fit in memory and leave devices for the remaining layers.
    column = np.arange(stop)
    fits = workload.state * parameters + slices[:, None] * kept <= workload.limit_bytes
    possible = fits & ((left[:, None] > 0) == (column > 0)) & (left[:, None] >= 0)
    row, first = np.nonzero(possible & (num_micro_batches * both[group] <= bound))
    if not len(row):
        return
    # V and W of the new suffixes, and the lower bound of any plan with them.
    x = both[group[row], first]
    new_chain = x + np.maximum(chain[row], rounds * x)
    new_longest = np.maximum(forward[group[row], first] + longest[row], exposed[group[row], first] + new_chain)
    share = micro_batch / np.maximum(left[row], 1)
    least = np.maximum(new_chain + share * work[first], num_micro_batches * share * work[first])
    least = np.maximum(least, new_longest + share * rates.forward[first])
    chosen = np.flatnonzero(least <= bound)
    chosen = chosen[np.argsort(first[chosen], kind="stable")]
    row, first = row[chosen], first[chosen]
    state = np.concatenate([e.state for e in edges])[row]
    borders = np.searchsorted(first, np.arange(stop + 1))
    for place in np.unique(first).tolist():
        part = slice(borders[place], borders[place + 1])
        waiting[place].state.append(state[part])
        waiting[place].chain.append(new_chain[chosen][part])
        waiting[place].longest.append(new_longest[chosen][part])
        waiting[place].parent.append(offset + label[row[part]])
        waiting[place].least.append(least[chosen][part])


def _trace(
    devices: DeviceStates,
    trail: list[tuple[np.ndarray, np.ndarray, int]],
    layers: list[int],
    number: int,
    num_micro_batches: int,
    latency_s: float,
) -> PlacedCut:
    """Follow the parents of a label of layer 0, the last one in ``trail``."""
    offsets = [offset for _, _, offset in trail]
    cuts, placements = [], []
    label = offsets[-1] + number
    while label >= 0:
        group = int(np.searchsorted(offsets, label, side="right")) - 1
        state, parent, offset = trail[group]
        head = devices.states[int(state[label - offset])].head
        cuts.append(layers[group])
        if head is not None:
            placements.append(head)
        label = int(parent[label - offset])
    return PlacedCut(num_micro_batches, tuple(cuts), tuple(placements), latency_s)
