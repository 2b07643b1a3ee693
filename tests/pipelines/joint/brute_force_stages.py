"""All ways to run a stage of a pipeline, for the brute force of :mod:`.brute_force`: every strategy of every layer.

Prices of the body of one layer and of one redistribution come from :mod:`autoddl.costmodel`; their sums, the layers that share a
choice, the layers that are recomputed, recomputation of blocks, the all-reduces over replicas and the memory are written down anew,
and what layers may choose and how their parameters are divided in :mod:`.brute_force_choices`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph, Place
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.pricing import edge_steps
from autoddl.costmodel.strategy import Strategy, transposed
from autoddl.costmodel.workload import Workload

from .brute_force_choices import (
    Shares,
    divides,
    most_divided,
    plain,
    scattered,
    shares_of,
    strategies_of,
    updated_bytes,
)

__all__ = ["ENTRY", "MODES", "Home", "Job", "Layout", "Stages", "Ways", "unit_starts"]

Layout = tuple[tuple[int, int], ...]
#: The name of what stands for the tensor that enters a stage.
ENTRY = "(entry)"
#: Rows that differ by no more than this are the same but for the order of their sums.
ROUNDING = 1e-12
#: More choices than this are filtered before others are combined with them.
MANY = 60
#: Columns of what layers cost: seconds per micro-batch and per step, then bytes; all add up but for the last one, a maximum.
#: ``SHARED`` are gradients that a layer of another stage has, too; ``BLOCK`` are the activations of the first block, and ``HELD``
#: its weights that are gathered.
FORWARD, BACKWARD, ALL_REDUCE, UPDATE, SHARED, STATE, KEPT, BLOCK, HELD, BUFFER = range(10)
#: Columns of a way to run a stage: ``W_AGAIN`` are seconds of the forward pass that is run again; ``FIXED``, ``FLYING``,
#: ``RUNNING``, ``REPEATED`` and ``PASSING`` are bytes in any case, for every micro-batch in flight, for every micro-batch of which
#: the whole stage is run again, while a block is run again, and while a layer runs.
W_FORWARD, W_BACKWARD, W_AGAIN, W_ALL_REDUCE, W_UPDATE, W_SHARED, FIXED, FLYING, RUNNING, REPEATED, PASSING = range(11)
#: Ways of recomputation; ``blocks:K`` runs the first K blocks of a stage again, one by one.
MODES = ("none", "selective", "layers", "blocks", "stage", *(f"blocks:{number}" for number in range(1, 8)))


@dataclass(frozen=True)
class Job:
    """A model on a cluster; options as of :class:`autoddl.search.planner.Options`."""

    graph: LayerGraph
    cluster: Cluster
    batch: int
    micro_batch: int | None = None
    recompute: bool | str | None = None
    untied: bool = False
    summa: bool = False
    precision: str = "mixed"
    attention: str = "fused"
    overlap: str = "none"
    zero: int | str = 0
    activations: str = "kept"

    @property
    def micro_batches(self) -> list[int]:
        if self.micro_batch is not None:
            return [self.micro_batch]
        return [size for size in range(1, self.batch + 1) if self.batch % size == 0]

    @property
    def recomputations(self) -> tuple[str, ...]:
        if isinstance(self.recompute, str):
            return (self.recompute,)
        if self.recompute is False:
            return ("none",)
        found = [] if self.recompute else ["none"]
        if self.attention == "dense" and any(layer.kind == "attention" for layer in self.graph.layers):
            found.append("selective")
        found.append("layers")
        if self.has_blocks and not self.untied:
            found.append("blocks")
        return (*found, "stage")

    @property
    def has_blocks(self) -> bool:
        return any(layer.block for layer in self.graph.layers)

    @property
    def reads_order(self) -> bool:
        """Whether layers need the positions of samples in their order, which ranks that share causal attention change."""
        return any(layer.kind == "experts" for layer in self.graph.layers)

    def is_run_again(self, layer: Layer) -> bool:
        """Whether a layer is recomputed: inside of blocks, or without blocks before the end of the model."""
        if self.has_blocks:
            return layer.block != ""
        readers = [self.graph[target] for source, target in self.graph.edges if source == layer.name]
        ends = [layer.kind == "loss", "mse_loss" in layer.epilogue, *(reader.kind == "loss" for reader in readers)]
        return not any(ends)


def unit_starts(graph: LayerGraph) -> tuple[int, ...]:
    """Where the units begin, and the number of layers.

    A cut is where one tensor alone crosses; in a model of repeated blocks where a repetition follows another one.
    """
    layers = graph.layers
    position = {layer.name: place for place, layer in enumerate(layers)}
    repeats = any(layer.block and layer.block_index for layer in layers)
    starts = [0]
    for place in range(1, len(layers)):
        before, after = layers[place - 1], layers[place]
        crossing_ones = {source for source, target in graph.edges if position[source] < place <= position[target]}
        begins = bool(before.block and after.block) and before.block_index != after.block_index
        if len(crossing_ones) == 1 and (begins or not repeats):
            starts.append(place)
    return (*starts, len(layers))


def _repetition(layer: Layer) -> tuple[str, int]:
    return layer.block, layer.block_index


def undominated(rows: np.ndarray) -> np.ndarray:
    """Which rows are not at least as large as some other one in every column (of equal ones the first)."""
    left = np.lexsort(rows.T[::-1])
    found = []
    while len(left):
        found.append(left[0])
        left = left[(rows[left] < rows[left[0]] * (1 - ROUNDING)).any(axis=1)]
    return np.array(found, dtype=np.int64)


@dataclass(frozen=True)
class Home:
    """What stages of one kind of worker have in common.

    Attributes:
        shape: nodes, and devices of each.
        micro_batch: samples.
        halves: whether samples are gone back through by halves, too.
        replicas: workers that hold a stage.
        level: of the link between these (1: they are in the same nodes).
        most_zero: the highest stage of ZeRO; passes back that are halved or in two parts divide no gradients, which is 1.
    """

    shape: tuple[int, int]
    micro_batch: int
    halves: bool = False
    replicas: int = 1
    level: int = 1
    most_zero: int = 0


@dataclass(frozen=True, eq=False)
class Variable:
    """Layers that share a choice.

    Attributes:
        options: the strategies of its layers by name.
        layouts: the different ones of activations.
        layout: per option which of these.
        costs: per option a row of the first set of columns.
    """

    options: tuple[dict[str, Strategy], ...]
    layouts: tuple[Layout, ...]
    layout: np.ndarray
    costs: np.ndarray

    @staticmethod
    def of(options: Sequence[dict[str, Strategy]], costs: np.ndarray) -> Variable:
        own = [next(iter(option.values())).rows_and_features for option in options]
        layouts = tuple(dict.fromkeys(own))
        return Variable(tuple(options), layouts, np.array([layouts.index(one) for one in own], dtype=np.int64), costs)


@dataclass(frozen=True, eq=False)
class Ways:
    """Ways to run a stage, one per row.

    Attributes:
        rows: of the second set of columns.
        modes: of recomputation, as positions in :data:`MODES`.
        entries, exits: layouts of what enters (None: nothing does) and leaves.
        choices: per variable the option.
    """

    rows: np.ndarray
    modes: np.ndarray
    entries: np.ndarray
    exits: np.ndarray
    choices: np.ndarray

    def only(self, kept: np.ndarray) -> Ways:
        return Ways(self.rows[kept], self.modes[kept], self.entries[kept], self.exits[kept], self.choices[kept])

    @staticmethod
    def together(parts: Sequence[Ways]) -> Ways:
        names = ("rows", "modes", "entries", "exits", "choices")
        return Ways(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class Stages:
    """Ways to run every stage of a job.

    Args:
        filtered: leave out those that are dominated.
    """

    def __init__(self, job: Job, filtered: bool):
        self.job, self.filtered = job, filtered
        self.starts = unit_starts(job.graph)
        ties = [(p.tied_to, layer.name) for layer in job.graph.layers for p in layer.parameters if p.tied_to]
        assert len(ties) <= 1, "shared gradients have one column"
        self.tie = ties[0] if ties else ()
        self.fed = {target for _, target in job.graph.edges}
        self.layouts: dict[Layout, int] = {}
        self.devices = cache(self._devices)
        self.variables = cache(self._variables)
        self.ways = cache(self._ways)
        self._work = cache(self._work_of)
        self._moves = cache(self._moves_of)

    def _devices(self, shape: tuple[int, int]) -> Cluster:
        return replace(self.job.cluster, num_nodes=shape[0], devices_per_node=shape[1])

    def workload(self, micro_batch: int, mode: str = "none") -> Workload:
        again = mode if mode in ("selective", "layers") else "none"
        return Workload(self.job.batch, micro_batch, self.job.precision, recompute=again, attention=self.job.attention)

    def number(self, layout: Layout) -> int:
        return self.layouts.setdefault(layout, len(self.layouts))

    # ------------------------------------------------------------------------------------------------- layers and edges

    def _work_of(self, name: str, is_copy: bool, strategy: Strategy, home: Home, mode: str) -> np.ndarray:
        """The costs of one layer, all-reduces over replicas included (formula: :mod:`autoddl.pipelines.joint.boundary`)."""
        layer, devices = self.layer(name, is_copy), self.devices(home.shape)
        workload, is_again = self.workload(home.micro_batch, mode), self.job.is_run_again(self.job.graph[name])
        place = Place(is_first=name not in self.fed, is_recomputed=is_again)
        work = layer_work(layer, plain(strategy), workload, home.micro_batch, place)
        is_in_block, is_again = mode == "blocks" and is_again, mode in ("layers", "blocks") and is_again
        shares = shares_of(layer, strategy, workload, layer.kind == "linear" or is_again, is_in_block)
        forward = devices.local_time(work.forward_work, workload.precision) + sum(map(devices.time, work.forward))
        backward = devices.local_time(work.backward_work, workload.precision) + sum(map(devices.time, work.backward))
        kept, block, parts = work.kept_bytes, 0.0, home.shape[0] * home.shape[1]
        inputs = home.micro_batch * layer.input_elements * workload.itemsize / parts
        if is_in_block:
            backward += forward
            block, kept = kept, inputs if self.begins_block(name) else 0.0
        elif strategy.regathers and not is_again and not place.is_first:
            # Of the gathered input the own part is kept, and the whole is gathered once more.
            whole = inputs * strategy.p1
            kept -= whole - inputs
            backward += sum(map(devices.time, scattered(strategy.axes(1), whole)))
        update = 0.0
        if shares.updated:
            nbytes = shares.updated * updated_bytes(workload)
            update = devices.device.launch_s + nbytes / devices.device.memory_bandwidth
        return np.array(
            [
                forward + sum(map(devices.time, shares.forward)),
                backward + sum(map(devices.time, shares.backward)),
                self._once(layer, strategy, shares, home),
                update,
                shares.gradient_bytes / (shares.slices if strategy.zero else 1) if name in self.tie else 0.0,
                shares.state_bytes,
                kept,
                block,
                shares.held_bytes,
                work.buffer_bytes + shares.running_bytes,
            ],
            dtype=float,
        )

    def _once(self, layer: Layer, strategy: Strategy, shares: Shares, home: Home) -> float:
        """Seconds of the steps after the last micro-batch: in a worker, and between those that hold the layer."""
        devices, nbytes = self.devices(home.shape), shares.gradient_bytes
        if not nbytes:
            return 0.0
        between = 0.0
        if home.replicas > 1:
            part = nbytes / shares.slices
            between = self.job.cluster.links[home.level].time(Step(Collective.ALL_REDUCE, Axis(home.replicas, 1), part))
        if strategy.zero:
            return between + sum(map(devices.time, shares.once))
        # Scattered inside the worker, all-reduced between workers or along the outermost axis, gathered inside.
        axes = () if strategy.summa else strategy.copy_axes(layer.kind == "embedding")
        steps = list(scattered(axes, nbytes))
        if steps and home.replicas == 1:
            outermost = steps.pop()
            between = devices.time(replace(outermost, collective=Collective.ALL_REDUCE))
        back = [replace(step, collective=Collective.ALL_GATHER) for step in steps]
        return between + sum(map(devices.time, (*steps, *back)))

    def begins_block(self, name: str) -> bool:
        """Whether a layer is the first one of a repetition of a block."""
        layer = self.job.graph[name]
        return next(one for one in self.job.graph.layers if _repetition(one) == _repetition(layer)) is layer

    def layer(self, name: str, is_copy: bool) -> Layer:
        """A layer of the model, or one with its own copy of a shared weight."""
        layer = self.job.graph[name]
        return (
            replace(layer, parameters=tuple(replace(p, tied_to=None) for p in layer.parameters)) if is_copy else layer
        )

    def _moves_of(
        self, producer: str, sources: tuple[Layout, ...], targets: tuple[Layout, ...], shape: tuple[int, int], size: int
    ) -> np.ndarray:
        """Seconds forward and backward of a layer's output from every layout to every other one; nan where there is no way."""
        devices, workload = self.devices(shape), self.workload(size)
        found = np.full((len(sources), len(targets), 2), math.nan)
        for (i, source), (j, target) in product(enumerate(sources), enumerate(targets)):
            ends = [Strategy(tuple((rows, features, 1) for rows, features in end)) for end in (source, target)]
            with contextlib.suppress(UserError):
                steps = edge_steps(self.job.graph[producer], ends[0], ends[1], workload, size)
                found[i, j, 0] = sum(map(devices.time, steps))
                found[i, j, 1] = sum(devices.time(step.adjoint()) for step in steps)
        return found

    # -------------------------------------------------------------------------------------------------------- variables

    def members(self, first: int, stop: int) -> tuple[Layer, ...]:
        """The layers of units ``first`` to ``stop - 1``."""
        return self.job.graph.layers[self.starts[first] : self.starts[stop]]

    def entering(self, first: int) -> Layer:
        """The layer whose output the stage takes that begins with unit ``first``."""
        place = {layer.name: i for i, layer in enumerate(self.job.graph.layers)}
        start = self.starts[first]
        (name,) = {source for source, target in self.job.graph.edges if place[source] < start <= place[target]}
        return self.job.graph[name]

    def _variables(self, first: int, stop: int, home: Home, mode: str) -> tuple[Variable, ...]:
        """What is chosen in a stage, the entry first."""
        names = {layer.name for layer in self.members(first, stop)}
        groups: dict[object, list[Layer]] = {}
        owner: dict[str, object] = {}
        for member in self.members(first, stop):
            tied_to = next((p.tied_to for p in member.parameters if p.tied_to), None)
            layer = self.layer(member.name, tied_to is not None and tied_to not in names)
            key: object = layer.name
            if tied_to is not None and tied_to in names:
                key = owner[tied_to]
            elif layer.block and not self.job.untied:
                key = (layer.block, layer.role, layer.signature())
            owner[layer.name] = key
            groups.setdefault(key, []).append(layer)
        first_block = min((layer.block_index for layer in self.members(first, stop) if layer.block), default=0)
        found = [self._variable(layers, home, mode, first_block) for layers in groups.values()]
        if first:
            made = self.entering(first).output_shape
            offered = self._offered(Layer(ENTRY, "add", input_shape=made, output_shape=made), home)
            found.insert(0, Variable.of([{ENTRY: one} for one in offered], np.zeros((len(offered), 10))))
        return tuple(found)

    def _offered(self, layer: Layer, home: Home, most_zero: int = 0, regathers: bool = False) -> list[Strategy]:
        """The strategies that divide the shape of a layer and the samples, or halves of them."""
        samples, odd = divmod(home.micro_batch, 2) if home.halves else (home.micro_batch, 0)
        sizes = self.devices(home.shape).level_sizes
        every = strategies_of(layer, sizes, most_zero, regathers, self.job.summa)
        if home.halves:
            return (
                [] if odd else [strategy for strategy in every if samples % strategy.p0 == 0 and not strategy.positions]
            )
        is_ordered = self.job.reads_order and layer.attributes.get("causal")
        return [one for one in every if divides(layer, one, samples) and not (is_ordered and one.positions)]

    def _most_zero(self, layer: Layer, home: Home) -> int:
        """The highest stage of ZeRO of a layer in a stage."""
        most = min(most_divided(layer), home.most_zero)
        if layer.name in self.tie:  # shared inside of the stage, or with another one
            most = min(most, 1)
        return most

    def _variable(self, layers: Sequence[Layer], home: Home, mode: str, first_block: int) -> Variable:
        turned = [(layer.kind == "embedding") != (layers[0].kind == "embedding") for layer in layers]
        offered = [set(self._offered(layer, home)) for layer in layers]
        # The first of the layers that share a weight has it, and decides how it is divided.
        is_alone = len({layer.signature() for layer in layers}) == 1
        regathers = is_alone and self.job.activations == "auto"
        options = []
        for strategy in self._offered(layers[0], home, self._most_zero(layers[0], home), regathers):
            own = [transposed(strategy) if turn else strategy for turn in turned]
            if all(plain(one) in every for one, every in zip(own, offered)):
                options.append(dict(zip((layer.name for layer in layers), own)))
        costs = np.zeros((len(options), 10))
        for row, option in zip(costs, options):
            for layer, strategy in zip(layers, option.values()):
                is_copy = layer.parameters != self.job.graph[layer.name].parameters
                work = self._work(layer.name, is_copy, strategy, home, self._mode_of(layer, mode, first_block))
                if layer.block_index != first_block:  # blocks are alike, and run again one by one
                    work = np.where(np.isin(np.arange(10), (BLOCK, HELD)), 0.0, work)
                row[:] = (*(row + work)[:BUFFER], max(row[BUFFER], work[BUFFER]))
        found = Variable.of(options, costs)
        kept = self._enough(costs, [found.layout]) if options else []
        return Variable.of([options[number] for number in kept], costs[kept])

    @staticmethod
    def _mode_of(layer: Layer, mode: str, first_block: int) -> str:
        """The mode of a layer in a stage whose first block has a number: with ``blocks:K`` some are run again, others are not."""
        word, _, number = mode.partition(":")
        return "none" if number and layer.block_index >= first_block + int(number) else word

    # ------------------------------------------------------------------------------------------------------------- ways

    def _ways(self, first: int, stop: int, home: Home, alone: int, limited: bool) -> Ways | None:
        """All ways to run a stage; None where some layer has no strategy.

        Args:
            alone: the number of micro-batches where it is the whole model: one column of seconds is enough then.
            limited: whether bytes count.
        """
        ends = stop == len(self.starts) - 1
        modes = [mode for mode in self.job.recomputations if not (ends and mode == "stage")]
        if "blocks" in modes and len(modes) > 1:  # the first of them alone
            blocks = {layer.block_index for layer in self.members(first, stop) if layer.block}
            modes += [f"blocks:{number}" for number in range(1, len(blocks))]
        known: dict[str, Ways | None] = {}
        for mode in modes:
            inside = "none" if mode == "stage" else mode
            if inside not in known:
                known[inside] = self._combined(first, stop, home, inside, alone, limited)
        found = [
            self._in_mode(mode, ways, first, home)
            for mode in modes
            if (ways := known["none" if mode == "stage" else mode]) is not None
        ]
        return self.best_of(Ways.together(found), alone, limited) if found else None

    def _in_mode(self, mode: str, ways: Ways, first: int, home: Home) -> Ways:
        """Ways in a mode of recomputation; ``rows`` were those of the layers."""
        costs, rows = ways.rows, np.zeros((len(ways.rows), 11))
        same = [W_FORWARD, W_BACKWARD, W_ALL_REDUCE, W_UPDATE, W_SHARED, FIXED, FLYING, REPEATED, PASSING]
        rows[:, same] = costs[:, [FORWARD, BACKWARD, ALL_REDUCE, UPDATE, SHARED, STATE, KEPT, BLOCK, BUFFER]]
        rows[:, FIXED] += costs[:, HELD]
        if self.job.overlap != "none":
            # Eight buckets, each of which is there when an eighth of the backward pass is over; no weight is shared.
            assert not self.tie
            whole, backward = costs[:, ALL_REDUCE], costs[:, BACKWARD]
            rows[:, W_ALL_REDUCE] = np.maximum(whole / 8, whole - backward * 7 / 8)
        if mode == "stage":
            entering = self.entering(first).output_elements if first else 0
            itemsize, num_devices = self.workload(home.micro_batch).itemsize, home.shape[0] * home.shape[1]
            rows[:, W_AGAIN] = costs[:, FORWARD]
            rows[:, RUNNING] = costs[:, KEPT]
            rows[:, FLYING] = home.micro_batch * entering * itemsize / num_devices
        return replace(ways, rows=rows, modes=np.full(len(rows), MODES.index(mode)))

    def best_of(self, ways: Ways, alone: int, limited: bool) -> Ways:
        """Those that are not dominated by one with the same layouts at both ends."""
        rows = ways.rows
        if alone:
            seconds = alone * (rows[:, W_FORWARD] + rows[:, W_BACKWARD]) + rows[:, W_ALL_REDUCE] + rows[:, W_UPDATE]
            columns = np.column_stack([seconds, rows[:, FIXED:]] if limited else [seconds])
            return ways.only(self._enough(columns, []))
        return ways.only(self._enough(rows if limited else rows[:, :FIXED], [ways.entries, ways.exits]))

    def _enough(self, columns: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
        """The undominated rows of every group with equal keys; all where nothing is left out."""
        if not self.filtered:
            return np.arange(len(columns))
        number = np.zeros(len(columns), dtype=np.int64)
        for key in keys:
            number = number * (1 + key.max(initial=0) - key.min(initial=0)) + key - key.min(initial=0)
        groups = [np.flatnonzero(number == one) for one in set(number.tolist())]
        return np.concatenate([rows[undominated(columns[rows])] for rows in groups])

    def _combined(self, first: int, stop: int, home: Home, mode: str, alone: int, limited: bool) -> Ways | None:
        """All strategies of a stage, with what the layers cost; None where a layer has none.

        Variables are added one by one.  Layouts of those before count where a variable that is still to come looks at them.
        """
        variables = self.variables(first, stop, home, mode)
        if not all(one.options for one in variables):
            return None
        of_layer = {name: v for v, one in enumerate(variables) for name in one.options[0]}
        exit_ = of_layer[self.members(first, stop)[-1].name]
        edges = self._edges(first, stop, of_layer)
        first_block = min((layer.block_index for layer in self.members(first, stop) if layer.block), default=0)
        last_use = [
            max((other for pair in edges if v in pair for other in pair), default=v) for v in range(len(variables))
        ]
        for end in (0, exit_) if first else (exit_,):
            last_use[end] = len(variables)

        costs, choices = np.zeros((1, 10)), np.zeros((1, 0), dtype=np.int64)
        for v, variable in enumerate(variables):
            before = np.repeat(np.arange(len(costs)), len(variable.options))
            options = np.tile(np.arange(len(variable.options)), len(costs))
            largest = np.maximum(costs[before, BUFFER], variable.costs[options, BUFFER])
            costs, choices = costs[before] + variable.costs[options], np.column_stack([choices[before], options])
            costs[:, BUFFER] = largest
            for (source, target), producers in edges.items():
                if max(source, target) == v:
                    ends = variables[source], variables[target]
                    rows, columns = (end.layout[choices[:, u]] for end, u in zip(ends, (source, target)))
                    for producer, reader in producers:
                        moves = self._moves(producer, ends[0].layouts, ends[1].layouts, home.shape, home.micro_batch)
                        costs[:, [FORWARD, BACKWARD]] += moves[rows, columns]
                        if reader.block and self._mode_of(reader, mode, first_block) == "blocks":
                            costs[:, BACKWARD] += moves[rows, columns, 0]
            kept = np.flatnonzero(~np.isnan(costs[:, FORWARD]))
            if len(costs) > MANY:
                open_ones = [variables[u].layout[choices[kept, u]] for u in range(v + 1) if last_use[u] > v]
                kept = kept[self._enough(self._dominance(costs[kept], alone, limited), open_ones)]
            costs, choices = costs[kept], choices[kept]
        numbers = [np.array([self.number(layout) for layout in one.layouts]) for one in variables]
        entries, exits = (numbers[u][variables[u].layout[choices[:, u]]] for u in (0, exit_))
        return Ways(costs, np.zeros(len(costs)), entries if first else np.full(len(costs), -1), exits, choices)

    def _dominance(self, costs: np.ndarray, alone: int, limited: bool) -> np.ndarray:
        """The columns in which one choice has to be as good as another one to make it needless."""
        if not alone or self.job.overlap != "none":
            return costs if limited else costs[:, :STATE]
        seconds = alone * (costs[:, FORWARD] + costs[:, BACKWARD]) + costs[:, ALL_REDUCE] + costs[:, UPDATE]
        bytes_ = [costs[:, STATE] + costs[:, KEPT] + costs[:, BLOCK] + costs[:, HELD], costs[:, BUFFER]]
        return np.column_stack([seconds, *bytes_] if limited else [seconds])

    def _edges(self, first: int, stop: int, of_layer: dict[str, int]) -> dict[tuple[int, int], list[tuple[str, Layer]]]:
        """Per pair of variables the layers whose outputs go from one to the other, and their readers."""
        names = {layer.name for layer in self.members(first, stop)}
        found: dict[tuple[int, int], list[tuple[str, Layer]]] = {}
        for source, target in self.job.graph.edges:
            if target in names:
                pair = of_layer.get(source, 0), of_layer[target]
                if pair[0] != pair[1]:
                    found.setdefault(pair, []).append((source, self.job.graph[target]))
        return found

    def strategies(self, ways: Ways, row: int, first: int, stop: int, home: Home) -> dict[str, Strategy]:
        """Of the layers by name, with the entry's."""
        found: dict[str, Strategy] = {}
        mode = MODES[ways.modes[row]]
        variables = self.variables(first, stop, home, "none" if mode == "stage" else mode)
        for variable, option in zip(variables, ways.choices[row].tolist()):
            found.update(variable.options[option])
        names = [ENTRY] * bool(first) + [layer.name for layer in self.members(first, stop)]
        return {name: found[name] for name in names}
