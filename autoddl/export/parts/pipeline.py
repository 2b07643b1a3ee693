"""The stages of a worker at work: instruction after instruction, in the order of the schedule.

Instructions of the same words on all workers stand in one order, so no two of them wait for each other.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow

from autoddl.costmodel.distribution import Axis
from autoddl.pipelines.runtime.layouts import Layout, ParameterLayout
from autoddl.pipelines.runtime.pipeline.shared_weights import weight_pieces

from .exchanges import held_by, pieces
from .given import JOB_RANK, RANKS, WORKER, WORKERS
from .parameters import all_parameters
from .training import load_plain_state, optimizer_of, plain_state

Tensor = Any

#: The schedule's own figures; a file has its own (see there).
PIPELINES: list[list[int]] = [[0]]
MICRO_BATCH, UPDATE_PERIOD, NUM_UPDATES, PARTS_PER_MICRO_BATCH = 1, 1, 1, 1
DELAYS: list[int] = [0]
JOINT_STAGES: set[int] = set()

#: Where all communication between stages, and of gradients, is issued: beside the computations.
COMMUNICATION = flow.asyncs.Thread()
WORD = re.compile(r"(?:(\d+):)?(\d+(?:&\d+)*)([FBIWRAUKD])(\d+)(?:([ab])|(\+)\d+)?(?:([<>])(\d+))?")
#: Inputs and targets of a micro-batch, by its number.
Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]


class Instruction(NamedTuple):
    """A word of a worker's list, such as ``2F5``, ``1:2B5a``, ``2F5>3`` or ``0&3A0``."""

    pipeline: int
    stages: tuple[int, ...]
    letter: str
    number: int
    half: str
    is_pair: bool
    arrow: str
    peer: int

    @property
    def stage(self) -> int:
        return self.stages[0]

    @property
    def task(self) -> Instruction:
        """Without the arrow: what makes the tensor that travels."""
        return self._replace(arrow="", peer=-1)

    @property
    def parts(self) -> range:
        """What it works on: micro-batches, or their halves where the schedule has halves."""
        first = self.number * PARTS_PER_MICRO_BATCH + (self.half == "b")
        return range(first, first + (1 if self.half else PARTS_PER_MICRO_BATCH * (1 + self.is_pair)))

    @property
    def consumer(self) -> tuple[bool, int, int]:
        """What takes its result: (whether it goes forward, its pipeline, its stage)."""
        is_forward = self.letter == "F"
        return is_forward, self.pipeline, self.stage + (1 if is_forward else -1)


def read_instructions(words: str) -> list[Instruction]:
    """The list that a text stands for."""
    found = []
    for word in words.split():
        match = WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no instruction")
        pipeline, stages, letter, number, half, pair, arrow, peer = match.groups()
        held = tuple(map(int, stages.split("&")))
        found.append(
            Instruction(
                int(pipeline or 0), held, letter, int(number), half or "", bool(pair), arrow or "", int(peer or -1)
            )
        )
    return found


class Boundary(NamedTuple):
    """What passes from a stage to the next one: (rows, features) of each sample, as they leave and as they arrive."""

    rows: int
    features: int
    leaving: Layout
    arriving: Layout


class SharedWeight(NamedTuple):
    """A weight that several stages hold: for each of them how it lies on its ranks."""

    name: str
    held: Mapping[int, ParameterLayout]


class Replica:
    """A stage on this worker: its module, and the versions and gradients of its weights."""

    def __init__(self, module: Any, optimizer: str, learning_rate: float):
        self.module = module
        self.weights = all_parameters(module)
        self.optimizer = optimizer_of(module, optimizer, learning_rate) if self.weights else None
        self.versions: dict[int, list[Tensor]] = {}
        self.gradients: dict[int, list[Tensor]] = {}

    def begin(self) -> None:
        """The weights as they are now are version 0."""
        self.versions, self.gradients = {0: [weight.leaf for weight in self.weights]}, {}

    def use(self, version: int) -> None:
        """Compute with this version from now on."""
        for weight, leaf in zip(self.weights, self.versions[version]):
            weight.leaf = leaf

    def collect(self, version: int, update: int) -> None:
        """Add the gradients that a backward pass left at a version's leaves to those of an update."""
        sums = self.gradients.setdefault(update, [None] * len(self.weights))
        for i, leaf in enumerate(self.versions[version]):
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                sums[i] = gradient if sums[i] is None else sums[i].add_(gradient)

    def gradient(self, update: int, which: Sequence[int]) -> Tensor:
        """Some weights' gradients as one vector."""
        sums = self.gradients.setdefault(update, [None] * len(self.weights))
        own = [flow.zeros_like(self.weights[i].local()) if sums[i] is None else sums[i] for i in which]
        return flow.cat([gradient.reshape(-1) for gradient in own], dim=0)

    def set_gradient(self, update: int, which: Sequence[int], vector: Tensor) -> None:
        """Put a sum over ranks in their place."""
        start = 0
        for i in which:
            own = self.weights[i].local()
            self.gradients[update][i] = flow.narrow(vector, 0, start, own.numel()).reshape(*own.shape)
            start += own.numel()

    def update(self, number: int, keep: bool) -> None:
        """Version ``number`` becomes the next one; with ``keep`` it stays as it is, and the next one lies elsewhere."""
        for weight, gradient in zip(self.weights, self.gradients.pop(number, ())):
            if keep:
                weight.tensor.data = weight.with_gradient(weight.local() + 0)
            weight.tensor.grad = None if gradient is None else weight.with_gradient(gradient)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        leaves = [weight.local().requires_grad_(True) for weight in self.weights]
        self.versions[number + 1] = leaves if keep else self.versions.pop(number)
        self.use(number + 1)


class Pipeline:
    """This worker's stages, and its list of instructions.

    Args:
        stages: the modules of all stages; those that are here are made.
        words: what each worker does.
        boundaries: between the stages.
        shared: weights that several stages have.
        optimizer, learning_rate: of each stage's weights.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[], Any]],
        words: Sequence[str],
        boundaries: Sequence[Boundary],
        shared: Sequence[SharedWeight],
        optimizer: str,
        learning_rate: float,
    ):
        self.replicas = {
            (pipeline, stage): Replica(stages[stage](), optimizer, learning_rate)
            for pipeline, workers in enumerate(PIPELINES)
            for stage, worker in enumerate(workers)
            if worker == WORKER
        }
        self.instructions = read_instructions(words[WORKER])
        self.boundaries, self.shared = boundaries, shared
        self.last_stage = len(stages) - 1
        #: How many parts go back at once, by (pipeline, stage, first part): forward passes are cut so.
        self.going_back = {
            (one.pipeline, one.stage, one.parts[0]): len(one.parts)
            for one in self.instructions
            if one.letter in "BW" and not one.arrow
        }
        self.recomputed = {(one.pipeline, one.stage) for one in self.instructions if one.letter == "R"}
        self.part_samples = MICRO_BATCH // PARTS_PER_MICRO_BATCH
        self.inputs: dict[tuple[int, int, int], Tensor] = {}
        self.alive: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.arrived: dict[tuple[tuple[bool, int, int], int], list[tuple[int, int, Tensor]]] = {}
        self.leaving: dict[Instruction, Tensor] = {}
        self.batches: Batches = lambda number: (np.empty(0), np.empty(0))
        self.losses = np.zeros(NUM_UPDATES, np.float32)

    def run(self, batches: Batches) -> np.ndarray:
        """Carry out the schedule, once; the mean loss of each of its updates, on every rank. All ranks call."""
        self.batches, self.losses = batches, np.zeros(NUM_UPDATES, np.float32)
        for replica in self.replicas.values():
            replica.begin()
        for one in self.instructions:
            self.carry_out(one)
        flow._oneflow_internal.eager.Sync()  # the last messages
        losses = flow.tensor(self.losses)
        flow.comm.all_reduce(losses)
        return losses.numpy()

    def carry_out(self, one: Instruction) -> None:
        """One instruction."""
        if one.arrow == ">":
            self.send(one)
        elif one.arrow == "<":
            self.receive(one)
        elif one.letter in "FBIWR":
            self.compute(one)
        elif one.letter == "A":
            self.sum_gradients(one)
        elif one.letter in "UK":
            self.replicas[one.pipeline, one.stage].update(one.number, keep=one.letter == "K")
        else:  # D
            del self.replicas[one.pipeline, one.stage].versions[one.number]

    # ---- Computations ------------------------------------------------------------------------------------------------

    def compute(self, one: Instruction) -> None:
        """A forward or backward pass, or a part of one, and where its result goes."""
        if one.stage in JOINT_STAGES:  # its ranks communicate meanwhile: nothing else may be under way
            flow._oneflow_internal.eager.Sync()
        update = one.number // UPDATE_PERIOD
        version = max(0, update - DELAYS[one.stage])
        self.replicas[one.pipeline, one.stage].use(version)
        if one.letter == "F":
            result = self.forward(one)
        elif one.letter == "R":
            key = (one.pipeline, one.stage, one.parts[0])
            result = self.evaluate(one, key, self.inputs.pop(key), one.parts)
        else:
            result = self.backward(one, version, update)
        if one.stage in JOINT_STAGES:
            flow._oneflow_internal.eager.Sync()
        _, pipeline, stage = one.consumer
        if result is None or one.letter in "RW" or not 0 <= stage <= self.last_stage:
            return
        if PIPELINES[pipeline][stage] == WORKER:
            self.put(one, 0, 0, result)
        else:
            self.leaving[one] = result

    def forward(self, one: Instruction) -> Tensor:
        """What the next stage takes, of parts that go back together one after the other; without autograd where it will be
        recomputed."""
        x = self.take(one) if one.stage else None
        is_recomputed = (one.pipeline, one.stage) in self.recomputed
        outputs, first = [], one.parts[0]
        if is_recomputed:
            with flow.no_grad():
                outputs.append(self.evaluate(one, None, x, one.parts))
        while first in one.parts:
            key = (one.pipeline, one.stage, first)
            some = range(first, first + self.going_back[key])
            own = x if x is None else some_parts(x, one.parts, some)
            if is_recomputed:
                self.inputs[key] = own
            else:
                outputs.append(self.evaluate(one, key, own, some))
            first = some.stop
        if one.stage == self.last_stage:
            return None
        return outputs[0] if len(outputs) == 1 else flow.cat(outputs, dim=0)

    def evaluate(self, one: Instruction, key: tuple[int, int, int] | None, x: Tensor, parts: range) -> Tensor:
        """The output, whose history is kept under ``key``; in the last stage the losses' share of their update's."""
        if x is not None:
            x = x.detach().requires_grad_(key is not None)
        module, is_last, outputs = self.replicas[one.pipeline, one.stage].module, one.stage == self.last_stage, []
        for part in parts:
            number, half = divmod(part, PARTS_PER_MICRO_BATCH)
            rows = slice(half * self.part_samples, (half + 1) * self.part_samples)
            inputs, targets = (array[rows] for array in self.batches(number))
            y = module(x if x is None else some_parts(x, parts, range(part, part + 1)), inputs, targets)
            if is_last:
                y = y / (UPDATE_PERIOD * PARTS_PER_MICRO_BATCH)
                if RANKS.rank == 0 and one.letter == "F":  # every rank of the stage knows it
                    self.losses[number // UPDATE_PERIOD] += float(y.detach().numpy())
            outputs.append(y)
        y = outputs[0] if len(outputs) == 1 else sum(outputs) if is_last else flow.cat(outputs, dim=0)
        if key is not None:
            self.alive[key] = (x, y, None)
        return y.detach()

    def backward(self, one: Instruction, version: int, update: int) -> Tensor:
        """The gradient of the input: from both products (B), from the first one (I); nothing from the second one (W)."""
        key = (one.pipeline, one.stage, one.parts[0])
        x, y, kept = self.alive.pop(key)
        gradient = kept if one.letter == "W" else self.take(one) if one.stage < self.last_stage else None
        if one.letter == "I":
            self.alive[key] = (x, y, gradient)
            seed = flow.ones_like(y) if gradient is None else gradient
            return None if x is None else flow.autograd.grad(y, [x], seed, retain_graph=True)[0]
        flow.autograd.backward(y, gradient)
        self.replicas[one.pipeline, one.stage].collect(version, update)
        return None if x is None else x.grad

    # ---- Between stages ----------------------------------------------------------------------------------------------

    def send(self, one: Instruction) -> None:
        """This rank's share of a task's output, to the ranks that want it."""
        y = self.leaving.pop(one.task)
        boundary = self.boundaries[one.stage if one.letter == "F" else one.stage - 1]
        source, target = self.ends(one, boundary)
        samples, features = held_by(source, RANKS.rank, self.part_samples, boundary.features)
        for piece in pieces(source, target, self.part_samples, boundary.features):
            if piece.source == RANKS.rank:
                apart = y.reshape(len(one.parts), -1, *y.shape[1:])
                apart = flow.narrow(apart, 1, piece.samples.start - samples.start, len(piece.samples))
                apart = flow.narrow(apart, 3, piece.features.start - features.start, len(piece.features))
                with flow.asyncs.thread(COMMUNICATION):
                    flow.comm.send(apart.contiguous(), WORKERS[one.peer][piece.destination], send_meta=False)

    def receive(self, one: Instruction) -> None:
        """What this rank needs of another worker's output."""
        boundary = self.boundaries[one.stage if one.letter == "F" else one.stage - 1]
        for piece in pieces(*self.ends(one, boundary), self.part_samples, boundary.features):
            if piece.destination == RANKS.rank:
                shape = flow.Size((len(one.parts), len(piece.samples), boundary.rows, len(piece.features)))
                with flow.asyncs.thread(COMMUNICATION):
                    x = flow.comm.recv(
                        WORKERS[one.peer][piece.source], shape=shape, dtype=flow.float32, device=flow.device("cpu")
                    )
                self.put(one, piece.samples.start, piece.features.start, x.reshape(-1, *shape[2:]))

    def ends(self, one: Instruction, boundary: Boundary) -> tuple[Layout, Layout]:
        """The layouts that a task's output has, and is wanted in."""
        layouts = boundary.leaving, boundary.arriving
        return layouts if one.letter == "F" else layouts[::-1]

    def put(self, one: Instruction, sample: int, feature: int, x: Tensor) -> None:
        """Keep what has come for the task that wants it: of each part a block that begins at a sample and a feature."""
        for part in one.parts:
            own = some_parts(x, one.parts, range(part, part + 1))
            self.arrived.setdefault((one.consumer, part), []).append((sample, feature, own))

    def take(self, one: Instruction) -> Tensor:
        """All blocks of what a task takes in, as one tensor."""
        key = (one.letter == "F", one.pipeline, one.stage)
        rows = []
        for part in one.parts:
            blocks = sorted(self.arrived.pop((key, part)), key=lambda found: found[:2])
            for _, side_by_side in groupby(blocks, key=lambda found: found[0]):
                own = [x for *_, x in side_by_side]
                rows.append(own[0] if len(own) == 1 else flow.cat(own, dim=2))
        return rows[0] if len(rows) == 1 else flow.cat(rows, dim=0)

    # ---- Gradients ---------------------------------------------------------------------------------------------------

    def sum_gradients(self, one: Instruction) -> None:
        """Of the weights that exactly these stages have: over the ranks, over the pipelines, then over the stages."""
        vectors = {}
        for stage in one.stages:
            for (_, number), replica in self.replicas.items():
                if number == stage:
                    for axes, which in self.by_axes(replica, one.stages).items():
                        vector = sum_over_workers(replica.gradient(one.number, which), axes, peers_of(stage))
                        replica.set_gradient(one.number, which, vector)
                    vectors[stage] = replica
        if len(one.stages) > 1:
            sum_over_stages(one, vectors, [weight for weight in self.shared if tuple(weight.held) == one.stages])

    def by_axes(self, replica: Replica, stages: tuple[int, ...]) -> dict[tuple[Axis, ...], list[int]]:
        """The places of these weights by the axes that their gradients are summed over."""
        sharing = {weight.name: tuple(weight.held) for weight in self.shared}
        found: dict[tuple[Axis, ...], list[int]] = {}
        for i, weight in enumerate(replica.weights):
            holders = sharing.get(weight.layout.sources[0][0], stages[:1])
            if holders == stages and weight.tensor.requires_grad:
                found.setdefault(weight.layout.reduced, []).append(i)
        return found


def load_values(pipeline: Pipeline, paths: Sequence[str]) -> None:
    """Take the values of a plain model's ``state_dict``, saved as a file or several; each has some of them."""
    state = ChainMap(*map(np.load, paths))
    for replica in pipeline.replicas.values():
        load_plain_state(replica.module, state)


def save_values(pipeline: Pipeline, name: str) -> None:
    """Write the values by the plain model's names, a file for each stage; all ranks call."""
    for (number, stage), replica in pipeline.replicas.items():
        if number == 0:
            state = plain_state(replica.module, {})
            if RANKS.rank == 0:
                np.savez(f"{name}.stage{stage}.npz", **state)


def some_parts(x: Tensor, parts: range, some: range) -> Tensor:
    """Of a tensor that holds parts one below the other those in ``some``."""
    if len(some) == len(parts):
        return x
    rows = x.shape[0] // len(parts)
    # A copy: a view that is detached and reshaped begins elsewhere in OneFlow 0.9.0.
    return flow.narrow(x, 0, (some.start - parts.start) * rows, len(some) * rows).clone()


def peers_of(stage: int) -> list[int]:
    """The ranks that hold what this one holds of a stage, in all pipelines."""
    return sorted(WORKERS[workers[stage]][RANKS.rank] for workers in PIPELINES)


def sum_over_workers(vector: Tensor, axes: Sequence[Axis], peers: Sequence[int]) -> Tensor:
    """Over some axes of a worker; where others have the stage too it is scattered inside, summed between them, gathered inside."""
    with flow.asyncs.thread(COMMUNICATION):
        if len(peers) == 1:
            return RANKS.reduce(vector, axes)
        length = vector.numel()
        padding = -length % int(np.prod([axis.size for axis in axes], dtype=int))
        if padding:
            vector = flow.cat([vector, flow.zeros(padding)], dim=0)
        own = RANKS.scatter(vector, axes, 0)
        whole = flow.empty(own.numel(), placement=flow.placement("cpu", list(peers)), sbp=flow.sbp.partial_sum)
        flow._C.assign_local_tensor(whole.to_local(), own)
        total = whole.to_global(sbp=flow.sbp.broadcast).to_local()
        return flow.narrow(RANKS.gather(total, axes, 0), 0, 0, length)


def sum_over_stages(one: Instruction, held: Mapping[int, Replica], shared: Sequence[SharedWeight]) -> None:
    """Stages tell each other the gradients of weights that they share, every rank what it holds; all come to the same sum."""
    own: dict[tuple[int, str], tuple[int, np.ndarray]] = {}
    names = {weight.name for weight in shared}
    for stage, replica in held.items():
        for i, stored in enumerate(replica.weights):
            if (name := stored.layout.sources[0][0]) in names:
                own[stage, name] = (i, replica.gradient(one.number, [i]).numpy())
    told: dict[tuple[int, str], dict[int, np.ndarray]] = {}
    for workers in PIPELINES:
        for source in one.stages:
            for target in one.stages:
                for weight in shared if source != target else ():
                    ends = (source, WORKERS[workers[source]]), (target, WORKERS[workers[target]])
                    tell(weight, *ends, own, told)
    for stage, replica in held.items():
        for weight in shared:
            i, mine = own[stage, weight.name]
            terms = [mine if other == stage else told[stage, weight.name][other] for other in one.stages]
            replica.set_gradient(one.number, [i], flow.tensor(sum(terms[1:], terms[0])))


def tell(
    weight: SharedWeight,
    source: tuple[int, range],
    target: tuple[int, range],
    own: Mapping[tuple[int, str], tuple[int, np.ndarray]],
    told: dict[tuple[int, str], dict[int, np.ndarray]],
) -> None:
    """One stage tells another one its gradient; ranks that hold the same take turns."""
    (there, sources), (here, targets) = source, target
    mine, theirs = weight.held[here], weight.held[there]
    for piece in weight_pieces(theirs, mine):
        teller, listener = sources[piece.source], targets[piece.destination]
        if teller == JOB_RANK:
            x = own[there, weight.name][1].reshape(theirs.local_shape())[np.ix_(*piece.places_there)]
            if teller == listener:
                arrived = x
            else:
                with flow.asyncs.thread(COMMUNICATION):
                    flow.comm.send(flow.tensor(np.ascontiguousarray(x)), listener, send_meta=False)
        if listener == JOB_RANK:
            if teller != listener:
                size = flow.Size(piece.shape)
                with flow.asyncs.thread(COMMUNICATION):
                    arrived = flow.comm.recv(teller, shape=size, dtype=flow.float32, device=flow.device("cpu"))
                arrived = arrived.numpy()
            of_stage = told.setdefault((here, weight.name), {})
            vector = of_stage.setdefault(there, np.zeros(mine.local_shape(), np.float32).reshape(-1))
            vector.reshape(mine.local_shape())[np.ix_(*piece.places_here)] = arrived
