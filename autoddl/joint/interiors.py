"""What happens inside a stage: the exact SBP search on the stage's graph over one worker's devices, and what it costs.

The objective is the stage's own share of a step, at N micro-batches:

    N (forward + backward [+ forward again, where the stage is recomputed]) + gradient all-reduce

For each way of recomputation a stage has an optimum without regard to memory, and one within its memory at the number of
micro-batches in flight of the most demanding stage of its shape.  A stage takes the best of these that fits.  All are
searched for once per shape of stage, mesh and micro-batch; stages of equal units share them, and repeated blocks inside a
stage share one choice.

**More blocks.** At fixed strategies a stage's cost is linear in how often it repeats a block, so its optimum, the least of
lines, is concave in it: where two numbers of repetitions have the same best strategies, all between have them too, without a
search.

**Memory.** A stage with K micro-batches in flight and v versions of its weights needs state + (v - 1) weights + K kept +
buffer; where the whole stage is recomputed state + (v - 1) weights + K input + kept + buffer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.layerwork import LayerWork, layer_work
from autoddl.costmodel.pricing import PriceBook, Problem, edge_steps
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.table import CostTable
from autoddl.costmodel.workload import Workload
from autoddl.search import smallest_memory, solve

from .cutting import ENTRY, Chain, Shape, StageGraph
from .meshes import StageMesh

__all__ = ["Interior", "Interiors", "LayerShare", "Need"]

#: By so much the samples are multiplied to tell bytes per sample from bytes that do not depend on samples.
_MANY = 2.0**20


@dataclass(frozen=True)
class Need:
    """What a schedule asks of a stage's memory: micro-batches in flight, weight versions, and the bytes that there are."""

    in_flight: float
    versions: int
    budget_bytes: float


@dataclass(frozen=True, eq=False)
class LayerShare:
    """What one layer takes of a micro-batch at its strategy, and of how many equal ones."""

    layer: Layer
    strategy: Strategy
    work: LayerWork
    forward_s: float
    backward_s: float
    gradient_s: float
    count: int


@dataclass(frozen=True, eq=False)
class Interior:
    """One way to run a stage: seconds and bytes of each device, per micro-batch.

    ``cost`` is the objective, per step; ``all_reduce_s`` is over the slices of the samples inside a worker.  ``strategies`` are
    in the order of the stage's graph (the entry first, where it has one), ``shares`` are its different layers.
    """

    recompute: str
    strategies: tuple[Strategy, ...]
    cost: float
    forward_s: float
    backward_s: float
    recompute_s: float
    all_reduce_s: float
    state_bytes: float
    weight_bytes: float
    kept_bytes: float
    input_bytes: float
    buffer_bytes: float
    shares: tuple[LayerShare, ...]

    @property
    def backward_input_s(self) -> float:
        """Without the weight part: one of the two products, half of what is computed for the first time."""
        again = self._forward_compute_s if self.recompute == "layers" else 0.0
        return self.backward_s - max(0.0, self._backward_compute_s - again) / 2

    @property
    def _forward_compute_s(self) -> float:
        return sum(one.count * one.work.forward_s for one in self.shares)

    @property
    def _backward_compute_s(self) -> float:
        return sum(one.count * one.work.backward_s for one in self.shares)

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s

    def memory(self, need: Need) -> float:
        """Bytes of each device (formula: module's docstring)."""
        fixed = self.state_bytes + (need.versions - 1) * self.weight_bytes + self.buffer_bytes
        if self.recompute == "stage":
            return fixed + need.in_flight * self.input_bytes + self.kept_bytes
        return fixed + need.in_flight * self.kept_bytes

    def fits(self, need: Need) -> bool:
        return self.memory(need) <= need.budget_bytes


@dataclass(frozen=True, eq=False)
class _Bytes:
    """Of a variable's options, all of them: state, and kept bytes per sample."""

    state: np.ndarray
    kept: np.ndarray
    p0: np.ndarray


class Interiors:
    """The stages of one model on one mesh; everything is worked out once, when it is asked for.

    Args:
        workload: batch, precision and optimizer.
        like: others of the same model, mesh and workload, whose tables these may share.
    """

    def __init__(
        self, chain: Chain, mesh: StageMesh, cluster: Cluster, workload: Workload, like: Interiors | None = None
    ):
        self.chain, self.mesh, self.workload = chain, mesh, workload
        self.devices = mesh.devices(cluster)
        self.num_searches = 0
        self._graphs: dict[Shape, StageGraph] = like._graphs if like else {}
        self._books: dict[tuple[Shape, bool], PriceBook] = like._books if like else {}
        self._bytes: dict[tuple[Shape, bool], tuple[_Bytes, ...]] = like._bytes if like else {}
        self._problems: dict[tuple[Shape, bool, int], Problem] = like._problems if like else {}
        self._found: dict[object, Interior | None] = {}
        self._repeated: dict[object, dict[int, _Roles]] = {}
        self._plain: dict[Shape, tuple[_Plain, ...]] = {}
        self._shares: dict[object, LayerShare] = {}
        self._refused: dict[object, float] = {}
        self._hopeless: dict[object, list[tuple[int, float]]] = {}
        self._kinds: dict[Hashable, int] = {}

    @cached_property
    def _seed(self) -> PriceBook:
        """A book that all others share their prices with."""
        graph = self.chain.stage(0, 1).graph
        return PriceBook(graph, self.devices, replace(self.workload, recompute=False))

    def graph(self, first: int, stop: int) -> StageGraph:
        """Of the first stage of this shape that was asked for."""
        shape = self.chain.shape(first, stop)
        if shape not in self._graphs:
            self._graphs[shape] = self.chain.stage(first, stop)
        return self._graphs[shape]

    def book(self, first: int, stop: int, layers_again: bool) -> PriceBook:
        key = (self.chain.shape(first, stop), layers_again)
        if key not in self._books:
            workload = replace(self.workload, recompute=layers_again)
            graph = self.graph(first, stop).graph
            self._books[key] = PriceBook(graph, self.devices, workload, like=self._seed)
        return self._books[key]

    def problem(self, first: int, stop: int, layers_again: bool, micro_batch: int) -> Problem:
        """The cost table of the whole batch in micro-batches.

        Raises:
            UserError: the micro-batch does not divide over any strategy of some layer.
        """
        key = (self.chain.shape(first, stop), layers_again, micro_batch)
        if key not in self._problems:
            book = self.book(first, stop, layers_again)
            self._problems[key] = book.problem(self.workload.batch, micro_batch)
        return self._problems[key]

    def bytes_of(self, first: int, stop: int, layers_again: bool) -> tuple[_Bytes, ...]:
        """Per variable and option the state and what a sample keeps."""
        key = (self.chain.shape(first, stop), layers_again)
        if key not in self._bytes:
            book, few = self.book(first, stop, layers_again), self.mesh.num_devices
            many = int(few * _MANY)
            # Memory is affine in the samples; every strategy divides a sample for each device.
            low, high = (book.problem(number, number).table.memory for number in (few, many))
            found = []
            for variable, small, large in zip(book.variables, low, high):
                kept = (large - small) / (many - few)
                p0 = np.array([strategy.p0 for strategy in variable.options])
                found.append(_Bytes(small - few * kept, kept, p0))
            self._bytes[key] = tuple(found)
        return self._bytes[key]

    def limited_table(
        self, first: int, stop: int, layers_again: bool, micro_batch: int, alive: float, versions: int
    ) -> CostTable:
        """The cost table with the memory of ``alive`` micro-batches in flight and ``versions`` of the weights."""
        table = self.problem(first, stop, layers_again, micro_batch).table
        extra = (versions - 1) * self.workload.itemsize / self.workload.bytes_per_parameter
        memory: dict[tuple[int, int], np.ndarray] = {}
        columns = []
        for of_one, costs in zip(self.bytes_of(first, stop, layers_again), table.cost):
            kept = micro_batch % of_one.p0 == 0
            key = (id(costs), id(of_one.state))
            if key not in memory:
                state = of_one.state[kept] * (1 + extra)
                memory[key] = np.ceil(state + alive * micro_batch * of_one.kept[kept] - 1e-6)
            assert len(memory[key]) == len(costs)
            columns.append(memory[key])
        return replace(table, memory=tuple(columns))

    def free(self, first: int, stop: int, recompute: str, micro_batch: int) -> Interior | None:
        """The optimum without regard to memory; None where the micro-batch does not divide."""
        key = (self.chain.shape(first, stop), recompute, micro_batch)
        if key not in self._found:
            self._found[key] = self._search(first, stop, recompute, micro_batch, None)
        return self._found[key]

    def within(
        self, first: int, stop: int, recompute: str, micro_batch: int, need: Need, cutoff: float = math.inf
    ) -> Interior | None:
        """The optimum that fits; None where none does, or none of less cost than ``cutoff``."""
        key = (self.chain.shape(first, stop), recompute, micro_batch, need)
        if self._refused.get(key, -math.inf) >= cutoff:
            return None
        if key not in self._found or (self._found[key] is None and self._refused.get(key, math.inf) < cutoff):
            free = self.free(first, stop, recompute, micro_batch)
            if free is None or free.fits(need):
                self._found[key] = free
            else:
                self._found[key] = self._search(first, stop, recompute, micro_batch, need, cutoff)
                if self._found[key] is None:
                    self._refused[key] = cutoff
        return self._found[key]

    def _search(
        self, first: int, stop: int, recompute: str, micro_batch: int, need: Need | None, cutoff: float = math.inf
    ) -> Interior | None:
        layers_again = recompute == "layers"
        if need is None:
            if recompute == "stage":
                # Without a limit those with nothing recomputed: running them again does not change what is best.
                none = self.free(first, stop, "none", micro_batch)
                return none and self._interior(first, stop, recompute, micro_batch, none.strategies)
            for ends in self._anchors(first, stop):
                self.free(*ends, recompute, micro_batch)
            known = self._between(first, stop, recompute, micro_batch)
            if known is not None:
                return known
        try:
            problem = self.problem(first, stop, layers_again, micro_batch)
        except UserError:
            return None
        strategies = self._solve(problem, first, stop, recompute, micro_batch, need, cutoff)
        if strategies is None:
            return None
        if need is None:
            self._remember(first, stop, recompute, micro_batch, strategies)
        return self._interior(first, stop, recompute, micro_batch, strategies)

    def _solve(
        self,
        problem: Problem,
        first: int,
        stop: int,
        recompute: str,
        micro_batch: int,
        need: Need | None,
        cutoff: float,
    ) -> tuple[Strategy, ...] | None:
        """The strategies of least cost that fit, in the order of the stage's graph."""
        table, budget = problem.table, None
        if need is not None:
            table, budget = self._limited(problem, first, stop, recompute, micro_batch, need)
        choice = self._choice(problem, table, budget, cutoff)
        return None if choice is None else tuple(problem.strategies(choice).values())

    def _choice(
        self, problem: Problem, table: CostTable, budget: float | None, cutoff: float
    ) -> tuple[int, ...] | None:
        """The option of each variable, for the least cost within the budget of bytes; None where nothing fits."""
        self.num_searches += 1
        if budget is not None and budget <= 0:
            return None
        result = solve(table, memory_limit=budget, cutoff=cutoff + _entry_cost(problem))
        return result.choice if math.isfinite(result.cost) else None

    def _limited(
        self, problem: Problem, first: int, stop: int, recompute: str, micro_batch: int, need: Need
    ) -> tuple[CostTable, float]:
        """The table with the memory of what is in flight, and the bytes that there are for it."""
        alive, budget = need.in_flight, need.budget_bytes
        if recompute == "stage":
            alive, budget = 1.0, budget - need.in_flight * self._input_bytes(first, stop, micro_batch)
        return self.limited_table(first, stop, recompute == "layers", micro_batch, alive, need.versions), budget

    # ------------------------------------------------------------------------------------------------ repeated blocks

    def _anchors(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Stages that repeat the same block a power of two times: the next fewer and the next more times, where there are such.

        Two searches for all numbers between, where these have the same optimum.
        """
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is None or pattern[1] & (pattern[1] - 1) == 0:
            return
        for count in (1 << (pattern[1].bit_length() - 1), 1 << pattern[1].bit_length()):
            more = count - pattern[1]
            ends = (first - more, stop) if stop == self.chain.num_units else (first, stop + more)
            if first and stop < self.chain.num_units and ends[1] >= self.chain.num_units:
                ends = (self.chain.num_units - 1 - (stop - first) - more, self.chain.num_units - 1)
            if not (0 <= ends[0] < ends[1] <= self.chain.num_units):
                continue
            other = self.chain.shape(*ends).pattern()
            if other is not None and other == (pattern[0], count):
                yield ends

    def _between(self, first: int, stop: int, recompute: str, micro_batch: int) -> Interior | None:
        """The optimum where fewer and more repetitions have the same one (see the module's docstring)."""
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is None:
            return None
        known = self._repeated.get((pattern[0], recompute, micro_batch), {})
        fewer = [count for count in known if count < pattern[1]]
        more = [count for count in known if count > pattern[1]]
        if not fewer or not more or known[max(fewer)] != known[min(more)]:
            return None
        roles = known[min(more)]
        strategies = tuple(roles[_role(layer)] for layer in self.graph(first, stop).graph.layers)
        return self._interior(first, stop, recompute, micro_batch, strategies)

    def _remember(
        self, first: int, stop: int, recompute: str, micro_batch: int, strategies: tuple[Strategy, ...]
    ) -> None:
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is not None:
            layers = self.graph(first, stop).graph.layers
            roles = {_role(layer): strategy for layer, strategy in zip(layers, strategies)}
            self._repeated.setdefault((pattern[0], recompute, micro_batch), {})[pattern[1]] = roles

    # --------------------------------------------------------------------------------------------------------- figures

    def _input_bytes(self, first: int, stop: int, micro_batch: int) -> float:
        entry = self.graph(first, stop).entry
        elements = 0 if entry is None else entry.output_elements
        return micro_batch * elements * self.workload.itemsize / self.mesh.num_devices

    def _interior(
        self, first: int, stop: int, recompute: str, micro_batch: int, strategies: tuple[Strategy, ...]
    ) -> Interior:
        workload = replace(self.workload, micro_batch=micro_batch, recompute=recompute == "layers")
        counts: dict[object, int] = {}
        shares: dict[object, LayerShare] = {}
        for plain in self._plain_layers(first, stop):
            if plain.layer.name == ENTRY:
                continue
            strategy = strategies[plain.position]
            senders = tuple((kind, strategies[position]) for kind, position in plain.inputs)
            key = (plain.kind, strategy, senders, micro_batch, workload.recompute)
            counts[key] = counts.get(key, 0) + 1
            if key not in self._shares:
                graph = self.graph(first, stop).graph
                sources = [(graph.layers[position], strategies[position]) for _, position in plain.inputs]
                self._shares[key] = _share(plain.layer, strategy, sources, self.devices, workload)
            shares[key] = self._shares[key]
        own = tuple(replace(share, count=counts[key]) for key, share in shares.items())
        forward = sum(one.count * (one.work.forward_s + one.forward_s) for one in own)
        backward = sum(one.count * (one.work.backward_s + one.backward_s) for one in own)
        again = forward if recompute == "stage" else 0.0
        reduce = sum(one.count * one.gradient_s for one in own)
        state = sum(one.count * one.work.state_bytes for one in own)
        return Interior(
            recompute=recompute,
            strategies=strategies,
            cost=workload.num_micro_batches * (forward + backward + again) + reduce,
            forward_s=forward,
            backward_s=backward,
            recompute_s=again,
            all_reduce_s=reduce,
            state_bytes=state,
            weight_bytes=state * workload.itemsize / workload.bytes_per_parameter,
            kept_bytes=sum(one.count * one.work.kept_bytes for one in own),
            input_bytes=self._input_bytes(first, stop, micro_batch),
            buffer_bytes=max(one.work.buffer_bytes for one in own),
            shares=own,
        )

    def _plain_layers(self, first: int, stop: int) -> tuple[_Plain, ...]:
        """The layers of a stage's graph with numbers that equal ones share."""
        shape = self.chain.shape(first, stop)
        if shape not in self._plain:
            graph = self.graph(first, stop).graph
            position = {layer.name: i for i, layer in enumerate(graph.layers)}
            kinds, found = [], []
            for i, layer in enumerate(graph.layers):
                names = graph.inputs(layer.name)
                kinds.append(self._kinds.setdefault((layer.signature(), not names), len(self._kinds)))
                inputs = tuple((kinds[position[name]], position[name]) for name in names)
                found.append(_Plain(layer, i, kinds[i], inputs))
            self._plain[shape] = tuple(found)
        return self._plain[shape]

    def choose(
        self,
        first: int,
        stop: int,
        micro_batch: int,
        need: Need,
        most: Need,
        recomputations: tuple[str, ...],
        cutoff: float = math.inf,
    ) -> Interior | None:
        """The best way to run a stage that fits ``need`` (see the module's docstring); None where none does.

        Args:
            most: the need of the most demanding stage of its shape.
            cutoff: what costs as much is as good as nothing.
        """
        if self.is_hopeless(first, stop, micro_batch, most, recomputations, cutoff):
            return None
        best = self._choose(first, stop, micro_batch, need, most, recomputations, cutoff)
        pattern = self.chain.shape(first, stop).pattern()
        if best is None and pattern is not None and need == most:
            key = (pattern[0], micro_batch, most, recomputations)
            self._hopeless.setdefault(key, []).append((pattern[1], cutoff))
        return best

    def is_hopeless(
        self, first: int, stop: int, micro_batch: int, most: Need, recomputations: tuple[str, ...], cutoff: float
    ) -> bool:
        """Whether fewer repetitions of the same block were too many: more need more memory and time."""
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is None:
            return False
        failed = self._hopeless.get((pattern[0], micro_batch, most, recomputations), ())
        return any(pattern[1] >= count and cutoff <= limit for count, limit in failed)

    def _choose(
        self,
        first: int,
        stop: int,
        micro_batch: int,
        need: Need,
        most: Need,
        recomputations: tuple[str, ...],
        cutoff: float,
    ) -> Interior | None:
        free = []
        for recompute in recomputations:
            lone = self.free(first, stop, recompute, micro_batch)
            if lone is None:
                return None
            free.append(lone)
            if recompute == "none" and lone.fits(need):
                return lone  # nothing costs less than what neither recomputes nor makes room
        best = min((lone for lone in free if lone.fits(need)), key=lambda lone: lone.cost, default=None)
        for lone in sorted(free, key=lambda lone: lone.cost):
            least = cutoff if best is None else min(cutoff, best.cost)
            if lone.cost >= least:
                break
            if lone.fits(need):
                continue
            found = self.within(first, stop, lone.recompute, micro_batch, most, least)
            if found is not None and found.fits(need) and found.cost < least:
                best = found
        return best

    def smallest_memory(self, first: int, stop: int, micro_batch: int, need: Need, recompute: str) -> float:
        """The least bytes per device that a stage can be run with."""
        layers_again, alive, extra = recompute == "layers", need.in_flight, 0.0
        if recompute == "stage":
            alive, extra = 1.0, need.in_flight * self._input_bytes(first, stop, micro_batch)
        try:
            table = self.limited_table(first, stop, layers_again, micro_batch, alive, need.versions)
        except UserError:
            return math.inf
        return smallest_memory(table)[0] + extra


@dataclass(frozen=True, eq=False)
class _Plain:
    """A layer of a stage's graph: its place, a number that equal layers share, and (number, place) of what it reads."""

    layer: Layer
    position: int
    kind: int
    inputs: tuple[tuple[int, int], ...]


_Roles = dict


def _entry_cost(problem: Problem) -> float:
    """What the table counts for the layer that stands for the tensor that arrives: equally much in every layout."""
    for variable, costs in zip(problem.variables, problem.table.cost):
        if variable.layers == (ENTRY,):
            return float(costs[0])
    return 0.0


def _role(layer: Layer) -> tuple[str, str]:
    return (layer.block, layer.role) if layer.block else ("", layer.name)


def _share(
    layer: Layer,
    strategy: Strategy,
    sources: list[tuple[Layer, Strategy]],
    devices: Cluster,
    workload: Workload,
) -> LayerShare:
    """As :func:`autoddl.costmodel.assessment.assess` prices a layer; equal layers are priced once."""
    samples = workload.micro_batch
    work = layer_work(layer, strategy, devices, workload, samples, not sources)
    arriving = [step for sender, layout in sources for step in edge_steps(sender, layout, strategy, workload, samples)]
    return LayerShare(
        layer=layer,
        strategy=strategy,
        work=work,
        forward_s=sum(devices.time(step) for step in (*arriving, *work.forward)),
        backward_s=sum(devices.time(step) for step in (*work.backward, *(step.adjoint() for step in arriving))),
        gradient_s=sum(devices.time(step) for step in work.gradient),
        count=1,
    )
