"""The stages of a worker at work: instruction after instruction, in the order of the schedule.

Instructions of the same words on all workers stand in one order, so no two of them wait for each other.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow

from autoddl.costmodel.distribution import Axis
from autoddl.pipelines.runtime.collectives import receive, send, sum_over
from autoddl.pipelines.runtime.detaching import detached
from autoddl.pipelines.runtime.layouts import Layout, ParameterLayout
from autoddl.pipelines.runtime.parameters import StoredParameter
from autoddl.pipelines.runtime.pipeline.actions import Run
from autoddl.pipelines.runtime.pipeline.data import LossPart
from autoddl.pipelines.runtime.pipeline.inbox import Inbox, part_of_each_slot
from autoddl.pipelines.runtime.pipeline.passes import StagePasses, some_slots
from autoddl.pipelines.runtime.pipeline.shared_weights import weight_pieces
from autoddl.pipelines.runtime.pipeline.weights import WeightVersions
from autoddl.pipelines.schedule import Kind, Task

from .exchanges import held_by, pieces
from .given import JOB_RANK, RANKS, WORKER, WORKERS
from .parameters import all_parameters
from .training import load_plain_state, optimizer_over, plain_state

Tensor = Any

#: The schedule's own figures; a file has its own (see there).
PIPELINES: list[list[int]] = [[0]]
MICRO_BATCH, UPDATE_PERIOD, NUM_UPDATES, PARTS_PER_MICRO_BATCH = 1, 1, 1, 1
DELAYS: list[int] = [0]
JOINT_STAGES: set[int] = set()

#: Where all communication between stages, and of gradients, is issued: beside the computations.
COMMUNICATION = flow.asyncs.Thread()
WORD = re.compile(r"(?:(\d+):)?(\d+(?:&\d+)*)([FBIWRAUKD])(\d+)(?:([ab])|(\+)\d+)?(?:([<>])(\d+))?")
#: The letters of passes, in the order of `Kind`.
PASSES = "FBIWR"
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


class Replica(NamedTuple):
    """A stage on this worker: its module, the parameters of that, and their versions and gradients."""

    module: Any
    stored: list[StoredParameter]
    weights: WeightVersions


def replica_of(module: Any, optimizer: str, learning_rate: float) -> Replica:
    """A stage with an optimizer."""
    stored = all_parameters(module)
    names = [one.layout.name for one in stored]
    return Replica(
        module, stored, WeightVersions(names, stored, lambda own: optimizer_over(own, optimizer, learning_rate))
    )


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
            (pipeline, stage): replica_of(stages[stage](), optimizer, learning_rate)
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
        weights = {key: replica.weights for key, replica in self.replicas.items()}
        recomputed = {one.stage for one in self.instructions if one.letter == "R"}
        self.passes = StagePasses(weights, self.evaluate, self.last_stage, recomputed)
        self.inbox = Inbox()
        self.leaving: dict[Instruction, Tensor] = {}
        self.part_samples = MICRO_BATCH // PARTS_PER_MICRO_BATCH
        self.batches: Batches = lambda number: (np.empty(0), np.empty(0))

    def run(self, batches: Batches) -> np.ndarray:
        """Carry out the schedule, once; the mean loss of each of its updates, on every rank. All ranks call."""
        self.batches = batches
        self.passes.losses.clear()
        for replica in self.replicas.values():
            replica.weights.begin()
        for one in self.instructions:
            self.carry_out(one)
        flow._oneflow_internal.eager.Sync()  # the last messages
        losses = np.zeros(NUM_UPDATES, np.float32)
        for number, loss in self.passes.losses.items():
            losses[number // UPDATE_PERIOD] += loss / UPDATE_PERIOD
        total = flow.tensor(losses)
        flow.comm.all_reduce(total)
        return total.numpy()

    def carry_out(self, one: Instruction) -> None:
        """One instruction."""
        if one.arrow == ">":
            self.send(one)
        elif one.arrow == "<":
            self.receive(one)
        elif one.letter in PASSES:
            self.compute(one)
        elif one.letter == "A":
            self.sum_gradients(one)
        elif one.letter in "UK":
            self.replicas[one.pipeline, one.stage].weights.update(one.number, keeps=one.letter == "K")
        else:  # D
            self.replicas[one.pipeline, one.stage].weights.drop(one.number)

    # ---- Computations ------------------------------------------------------------------------------------------------

    def compute(self, one: Instruction) -> None:
        """A forward or backward pass, or a part of one, and where its result goes."""
        x = None
        if (one.letter == "F" and one.stage) or (one.letter in "BI" and one.stage < self.last_stage):
            x = self.inbox.take((one.letter == "F", one.pipeline, one.stage), one.parts[0], len(one.parts))
        if one.stage in JOINT_STAGES:  # its ranks communicate meanwhile: nothing else may be under way
            flow._oneflow_internal.eager.Sync()
        result = self.passes.compute(self.run_of(one), x)
        if one.stage in JOINT_STAGES:
            flow._oneflow_internal.eager.Sync()
        _, pipeline, stage = one.consumer
        if result is None or not 0 <= stage <= self.last_stage:
            return
        if PIPELINES[pipeline][stage] == WORKER:
            self.inbox.put(one.consumer, one.parts[0], len(one.parts), 0, 0, result)
        else:
            self.leaving[one] = result

    def run_of(self, one: Instruction) -> Run:
        """A pass in the words of the runtime: parts are slots, which go forward in the pieces that they go back in."""
        task = Task(Kind(PASSES.index(one.letter)), one.pipeline, one.stage, one.number)
        pieces, first = [], one.parts[0]
        while first in one.parts:
            own = self.going_back[one.pipeline, one.stage, first] if one.letter == "F" else len(one.parts)
            pieces.append(own)
            first += own
        update = one.number // UPDATE_PERIOD
        return Run(task, one.parts[0], tuple(pieces), max(0, update - DELAYS[one.stage]), update)

    def evaluate(
        self, run: Run, x: Tensor, weights: Sequence[Tensor], first: int, count: int
    ) -> tuple[Tensor, list[LossPart]]:
        """A stage's output for some parts; in the last stage the loss's share of its update's."""
        replica = self.replicas[run.task.pipeline, run.task.stage]
        for stored, leaf in zip(replica.stored, weights):
            stored.leaf = leaf
        is_last = run.task.stage == self.last_stage
        outputs: list[Tensor] = []
        losses = []
        for part in range(first, first + count):
            number, half = divmod(part, PARTS_PER_MICRO_BATCH)
            rows = slice(half * self.part_samples, (half + 1) * self.part_samples)
            inputs, targets = (array[rows] for array in self.batches(number))
            y = replica.module(some_slots(x, count, part - first, 1), inputs, targets)
            if is_last:
                if RANKS.rank == 0:  # every rank of the stage knows it
                    share = 1 / PARTS_PER_MICRO_BATCH
                    losses.append(LossPart(number, float(y.detach().numpy()) * share, share))
                y = y / (UPDATE_PERIOD * PARTS_PER_MICRO_BATCH)
            outputs.append(y)
        if len(outputs) == 1:
            return outputs[0], losses
        return sum(outputs[1:], outputs[0]) if is_last else flow.cat(outputs, dim=0), losses

    # ---- Between stages ----------------------------------------------------------------------------------------------

    def send(self, one: Instruction) -> None:
        """This rank's share of a task's output, to the ranks that want it."""
        y = self.leaving.pop(one.task)
        boundary = self.boundaries[one.stage if one.letter == "F" else one.stage - 1]
        source, target = self.ends(one, boundary)
        samples, features = held_by(source, RANKS.rank, self.part_samples, boundary.features)
        for piece in pieces(source, target, self.part_samples, boundary.features):
            if piece.source == RANKS.rank:
                rows, columns = map(within, piece.block, (samples, features))
                part = part_of_each_slot(y, len(one.parts), rows, columns)
                with flow.asyncs.thread(COMMUNICATION):
                    send(detached(part), WORKERS[one.peer][piece.destination])

    def receive(self, one: Instruction) -> None:
        """What this rank needs of another worker's output."""
        boundary = self.boundaries[one.stage if one.letter == "F" else one.stage - 1]
        for piece in pieces(*self.ends(one, boundary), self.part_samples, boundary.features):
            if piece.destination == RANKS.rank:
                rows, columns = piece.block
                shape = (len(one.parts) * len(rows), boundary.rows, len(columns))
                with flow.asyncs.thread(COMMUNICATION):
                    x = receive(shape, flow.float32, WORKERS[one.peer][piece.source])
                self.inbox.put(one.consumer, one.parts[0], len(one.parts), rows.start, columns.start, x)

    def ends(self, one: Instruction, boundary: Boundary) -> tuple[Layout, Layout]:
        """The layouts that a task's output has, and is wanted in."""
        layouts = boundary.leaving, boundary.arriving
        return layouts if one.letter == "F" else layouts[::-1]

    # ---- Gradients ---------------------------------------------------------------------------------------------------

    def sum_gradients(self, one: Instruction) -> None:
        """Of the weights that exactly these stages have: over the ranks, over the pipelines, then over the stages."""
        vectors = {}
        for stage in one.stages:
            for (_, number), replica in self.replicas.items():
                if number == stage:
                    for axes, names in self.by_axes(replica, one.stages).items():
                        own = replica.weights.gradient(one.number, names)
                        vector = sum_over_workers(own, axes, peers_of(stage))
                        replica.weights.set_gradient(one.number, names, vector)
                    vectors[stage] = replica
        if len(one.stages) > 1:
            sum_over_stages(one, vectors, [weight for weight in self.shared if tuple(weight.held) == one.stages])

    def by_axes(self, replica: Replica, stages: tuple[int, ...]) -> dict[tuple[Axis, ...], list[str]]:
        """The names of these weights by the axes that their gradients are summed over."""
        sharing = {weight.name: tuple(weight.held) for weight in self.shared}
        found: dict[tuple[Axis, ...], list[str]] = {}
        for stored in replica.stored:
            if sharing.get(stored.layout.sources[0][0], stages[:1]) == stages:
                found.setdefault(stored.layout.reduced, []).append(stored.layout.name)
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


def within(some: range, held: range) -> range:
    """Indices, counted from the first one held."""
    return range(some.start - held.start, some.stop - held.start)


def peers_of(stage: int) -> list[int]:
    """The ranks that hold what this one holds of a stage, in all pipelines."""
    return sorted(WORKERS[workers[stage]][RANKS.rank] for workers in PIPELINES)


def sum_over_workers(vector: Tensor, axes: Sequence[Axis], peers: Sequence[int]) -> Tensor:
    """Over some axes of a worker; where others have the stage too it is scattered inside, summed between them, gathered inside."""
    with flow.asyncs.thread(COMMUNICATION):
        if len(peers) == 1:
            return RANKS.reduce(vector, axes)
        return RANKS.reduce_between(vector, axes, lambda own: sum_over(own, tuple(peers)))


def sum_over_stages(one: Instruction, held: Mapping[int, Replica], shared: Sequence[SharedWeight]) -> None:
    """Stages tell each other the gradients of weights that they share, every rank what it holds; all come to the same sum."""
    own: dict[tuple[int, str], np.ndarray] = {}
    names = {weight.name for weight in shared}
    for stage, replica in held.items():
        for stored in replica.stored:
            if (name := stored.layout.sources[0][0]) in names:
                vector = replica.weights.gradient(one.number, [stored.layout.name])
                assert vector is not None  # of no names alone
                own[stage, name] = vector.numpy()
    told: dict[tuple[int, str], dict[int, np.ndarray]] = {}
    for workers in PIPELINES:
        for source in one.stages:
            for target in one.stages:
                for weight in shared if source != target else ():
                    ends = (source, WORKERS[workers[source]]), (target, WORKERS[workers[target]])
                    tell(weight, *ends, own, told)
    for stage, replica in held.items():
        for weight in shared:
            mine = own[stage, weight.name]
            terms = [mine if other == stage else told[stage, weight.name][other] for other in one.stages]
            (name,) = (s.layout.name for s in replica.stored if s.layout.sources[0][0] == weight.name)
            replica.weights.set_gradient(one.number, [name], flow.tensor(sum(terms[1:], terms[0])))


def tell(
    weight: SharedWeight,
    source: tuple[int, range],
    target: tuple[int, range],
    own: Mapping[tuple[int, str], np.ndarray],
    told: dict[tuple[int, str], dict[int, np.ndarray]],
) -> None:
    """One stage tells another one its gradient; ranks that hold the same take turns."""
    (there, sources), (here, targets) = source, target
    mine, theirs = weight.held[here], weight.held[there]
    for piece in weight_pieces(theirs, mine):
        teller, listener = sources[piece.source], targets[piece.destination]
        if teller == JOB_RANK:
            x = own[there, weight.name].reshape(theirs.local_shape())[np.ix_(*piece.places_there)]
            if teller == listener:
                arrived = x
            else:
                with flow.asyncs.thread(COMMUNICATION):
                    send(flow.tensor(np.ascontiguousarray(x)), listener)
        if listener == JOB_RANK:
            if teller != listener:
                with flow.asyncs.thread(COMMUNICATION):
                    arrived = receive(piece.shape, flow.float32, teller)
                arrived = arrived.numpy()
            of_stage = told.setdefault((here, weight.name), {})
            vector = of_stage.setdefault(there, np.zeros(mine.local_shape(), np.float32).reshape(-1))
            vector.reshape(mine.local_shape())[np.ix_(*piece.places_here)] = arrived
