"""Timing strategies on ranks: their communication alone, and whole training steps.

*Communication* is the plan's list of steps (forward, backward, gradients).  The functions that the plan's layers call run one after
the other on tensors of the right sizes, without computation in between.  *Step* is a training step of the applied model: forward
and backward passes of a batch, and the reduction of gradients.  Strategies are visited in rounds, in a new random order in each.
A visit that other processes disturbed is repeated.  On its first visit a strategy runs until its times settle, before it is timed.
How ranks wait for their devices: :mod:`autoddl.pipelines.runtime.timing`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.devices import CPU
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.exchange import ExchangeStep
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.kinds.registry import plain_module
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.peakmemory import PeakMemory
from autoddl.pipelines.runtime.ranks.rank import report

from .hosts import Hosts, exchange, hosts_of_job
from .measure import DISTURBED, SharedClock

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.backend import Backend
    from autoddl.pipelines.runtime.stepping import Stepper

#: Largest number of attempts of a visit that other processes disturb.
MAX_ATTEMPTS = 3
#: Total time of the repetitions of a visit; short operations are repeated more often to reach it.
_ENOUGH_S = 0.05

__all__ = ["ReplayOptions", "Visit", "rank_job", "steps_alone", "steps_of"]


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a ranking job.

    Attributes:
        graph, cluster, workload: the model, and what it was priced for.
        strategies: for each candidate the strategy of every layer, by name.
        rounds: number of visits of each candidate.
        repetitions: least number of timed repetitions of a visit, after a warm-up; their median counts.
        budget_s: time after which no round begins; None for no limit.
        with_steps: whether to run whole training steps besides communication.
        seed: of the order, the parameters and the data.
        device: the type of device to run on.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    strategies: tuple[Mapping[str, Strategy], ...]
    rounds: int
    repetitions: int = 3
    budget_s: float | None = None
    with_steps: bool = True
    seed: int = 0
    device: str = CPU


@dataclass(frozen=True)
class Visit:
    """One visit of a candidate; times are those of the slowest rank.

    Attributes:
        candidate: its number.
        round: number of the round.
        communication_s: seconds of communication.
        step_s: seconds of a training step; None if steps did not run.
        foreign: fraction of the cores' time that other processes used.
        peak_memory_bytes: peak memory of the rank that needed most so far; None if unknown.
        refused: the reason why the runtime cannot run the candidate; None if it can.
    """

    candidate: int
    round: int
    communication_s: float
    step_s: float | None
    foreign: float
    peak_memory_bytes: int | None = None
    refused: str | None = None


def rank_job(options: ReplayOptions) -> int:
    """Visit all candidates in rounds; rank 0 reports every `Visit`.  Returns the number of completed rounds."""
    from autoddl.pipelines.runtime.backend import backend_of

    flow = load_oneflow()
    backend = backend_of(options.workload.precision, options.device, options.cluster)
    memory = PeakMemory(options.device)
    graph = _without_dropout(options.graph)
    clock = SharedClock(hosts_of_job(options.device), options.budget_s, options.device)
    assessments = [assess(graph, options.cluster, options.workload, chosen) for chosen in options.strategies]
    step_of = _Steps(graph, options, backend, _fit(assessments, clock.hosts)) if options.with_steps else None
    shuffler = random.Random(options.seed)
    refused: set[int] = set()
    for number in range(options.rounds):
        order = [i for i in range(len(assessments)) if i not in refused]
        shuffler.shuffle(order)
        for i in order:
            run = step_of(i) if step_of is not None else None
            if isinstance(run, str):
                refused.add(i)
                visit = Visit(i, number, 0.0, None, 0.0, refused=run)
            else:
                communicate = steps_alone(steps_of(assessments[i], options.workload), backend)
                visit = _visit(i, number, communicate, run, options.repetitions, clock)
                visit = replace(visit, peak_memory_bytes=_largest(memory.read()))
            if flow.env.get_rank() == 0:
                report(visit)
        if clock.is_over:
            return number + 1
    return options.rounds


def _visit(
    candidate: int,
    number: int,
    communicate: Callable[[], Any],
    run: Callable[[], Any] | None,
    repetitions: int,
    clock: SharedClock,
) -> Visit:
    best: Visit | None = None
    if number == 0:
        for each in (communicate, run):
            if each is not None:
                clock.warm_up(each)
    for _ in range(MAX_ATTEMPTS):
        clock.begin()
        communication = _median(communicate, repetitions, clock)
        step = _median(run, repetitions, clock) if run is not None else None
        visit = Visit(candidate, number, communication, step, clock.foreign)
        if best is None or visit.foreign < best.foreign:
            best = visit
        if best.foreign <= DISTURBED:
            break
    assert best is not None
    return best


def _largest(memory: int | None) -> int | None:
    """The largest peak memory of all ranks; None if one does not know its own.  Every rank calls."""
    known = exchange(np.array([-1 if memory is None else memory], dtype=np.int64))
    return None if known.min() < 0 else int(known.max())


def _median(run: Callable[[], Any], repetitions: int, clock: SharedClock) -> float:
    """The median of at least ``repetitions`` times, and of more if they are short.  All ranks see the same times."""
    times = clock.time(run, repetitions)
    more = int(min(100.0, _ENOUGH_S / np.median(times))) - repetitions
    if more > 0:
        times = np.concatenate((times, clock.time(run, more)))
    return float(np.median(times))


# ---- Communication alone ---------------------------------------------------------------------------------------------------


def steps_of(assessment: Assessment, workload: Workload) -> list[tuple[Layer | None, Step]]:
    """All communication steps of a training step, in order, with the layer whose tensors they move (None for gradients)."""
    forward = [(layer.layer, step) for layer in assessment.layers for step in layer.forward_steps]
    backward = [(layer.layer, step) for layer in reversed(assessment.layers) for step in layer.backward_steps]
    # Gradients are reduced as vectors.
    gradient: list[tuple[Layer | None, Step]] = [
        (None, step) for layer in reversed(assessment.layers) for step in layer.work.gradient
    ]
    return [*forward, *backward] * workload.num_micro_batches + gradient


def steps_alone(steps: Sequence[tuple[Layer | None, Step]], backend: Backend) -> Callable[[], None]:
    """A function that runs communication steps without the computation in between; their tensors are allocated here."""
    calls = [_call(layer, step, backend) for layer, step in steps]

    def run() -> None:
        for call in calls:
            call()

    return run


def _call(layer: Layer | None, step: Step, backend: Backend) -> Callable[[], Any]:
    from autoddl.pipelines.runtime.stepping import Stepper

    from .operations import itemsize

    flow = load_oneflow()
    ones = partial(flow.ones, dtype=backend.compute, device=backend.device)
    stepper = Stepper(flow.env.get_world_size(), backend)
    if isinstance(step, ExchangeStep):
        return _exchange_call(step, stepper)
    size = step.axis.size
    elements = max(1, round(step.nbytes / itemsize(backend)))
    if step.collective is Collective.ALL_REDUCE:
        vector = ones(elements)
        return lambda: stepper.run(vector, step)
    if layer is None or step.collective is Collective.ALL_TO_ALL:
        rows = size
    else:
        # The tensor is (rows of some samples, features); features are gathered and scattered.
        rows = layer.rows
        while rows * size < elements and elements % (2 * rows * size) == 0 and elements // rows > 1024:
            rows *= 2
        if elements % (rows * size):
            rows = 1
    features = max(size, elements // rows // size * size)
    if step.collective is Collective.ALL_TO_ALL:
        matrix = ones(rows, features)
        return lambda: stepper.all_to_all(matrix, step.axis, 0, 1)
    if layer is None:
        flat = ones(rows * features // (size if step.collective is Collective.ALL_GATHER else 1))
        return lambda: stepper.run(flat, step, 0)
    width = features // size if step.collective is Collective.ALL_GATHER else features
    x = ones(1, rows, width)
    return lambda: stepper.run(x, step, 2)


def _exchange_call(step: ExchangeStep, stepper: Stepper) -> Callable[[], Any]:
    """What an exchange sends on one network level, of a tensor (samples, features, rows) of its size."""
    from autoddl.costmodel.crossing import cuts_of, held_by
    from autoddl.pipelines.runtime.comm.exchanging import send_pieces

    from .operations import itemsize

    backend, shape = stepper.backend, step.exchange.divisors
    pieces = [piece for piece in step.exchange.pieces(shape) if step.exchange.level_of(piece) == step.axis.level]
    mine = held_by(cuts_of(step.exchange.source, len(shape)), stepper.rank, shape)
    rows = max(1, round(step.tensor_bytes / itemsize(backend) / np.prod(shape)))
    x = load_oneflow().ones(*map(len, mine), rows, dtype=backend.compute, device=backend.device)
    return lambda: send_pieces(x, pieces, stepper, mine, (0, 1))


# ---- Whole steps --------------------------------------------------------------------------------------------------------------


class _Steps:
    """Functions that run a training step under a candidate's strategies, by number of the candidate.

    Calling the object returns the function, or the reason why the candidate cannot run.

    Args:
        graph, options: the model and the candidates.
        backend: where tensors lie, and in which types ranks compute.
        keeps: whether to keep the applied models between visits, since making one takes as long as several steps.
    """

    def __init__(self, graph: LayerGraph, options: ReplayOptions, backend: Backend, keeps: bool) -> None:
        self._graph, self._options, self._backend, self._keeps = graph, options, backend, keeps
        self._module = skeleton(graph, options.seed)
        self._batch = random_batch(graph, options.workload.batch, options.seed)
        self._made: dict[int, Callable[[], Any] | str] = {}

    def __call__(self, i: int) -> Callable[[], Any] | str:
        made = self._made.get(i) or self._make(i)
        if self._keeps:
            self._made[i] = made
        return made

    def _make(self, i: int) -> Callable[[], Any] | str:
        from autoddl.pipelines.runtime.applied import AppliedModule

        options = self._options
        try:
            applied = AppliedModule(
                self._module, self._graph, options.strategies[i], options.workload, backend=self._backend
            )
        except UserError as error:
            return str(error)

        def run() -> None:
            applied.zero_grad(set_to_none=True)
            applied.train_step(*self._batch)

        return run


def _fit(assessments: Sequence[Assessment], hosts: Hosts) -> bool:
    """Whether parameters and gradients of all candidates fit into a quarter of the free memory of every host."""
    needed = sum(layer.work.state_bytes for assessment in assessments for layer in assessment.layers)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return bool(needed * hosts.ranks_per_node <= 0.25 * exchange(np.array([float(free)])).min())


def skeleton(graph: LayerGraph, seed: int) -> Any:
    """A module on the host with the parameters of a graph at their paths, with small random values, and without a forward method.

    Raises:
        UserError: a layer is opaque, so that its code is not known.
    """
    from autoddl.pipelines.runtime.backend import HOST

    flow = load_oneflow()
    rng = np.random.default_rng(seed)
    root = flow.nn.Module()
    for layer in graph.layers:
        if kind_of(layer.kind).is_opaque:
            raise UserError(f"{layer.describe()}: its code is not part of the graph, so the model cannot run")
        for path in layer.modules or (layer.name,):
            _at(root, path, plain_module(layer))
        for parameter in layer.parameters:
            parent, _, name = parameter.name.rpartition(".")
            tied = parameter.tied_to and next(
                p for p in graph[parameter.tied_to].parameters if p.shape == parameter.shape
            )
            if tied:
                other, _, own = tied.name.rpartition(".")
                value = _at(root, other)._parameters[own]
            else:
                drawn = rng.standard_normal(parameter.shape, dtype=np.float32) / np.sqrt(max(parameter.shape))
                value = flow.nn.Parameter(HOST.tensor(drawn.astype(np.float32)))
            _at(root, parent).register_parameter(name, value)
    return root


def _at(root: Any, path: str, made: Any = None) -> Any:
    """The submodule at a path; missing modules on the path are made."""
    *parents, last = path.split(".") if path else [""]
    if not last:
        return root
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, load_oneflow().nn.Module())
        root = root._modules[parent]
    if last not in root._modules:
        root.add_module(last, made if made is not None else load_oneflow().nn.Module())
    return root._modules[last]


def random_batch(graph: LayerGraph, samples: int, seed: int) -> tuple[np.ndarray, ...]:
    """Random inputs and targets of a batch.

    Raises:
        UserError: the last layer is not a loss.
    """
    rng = np.random.default_rng(seed)
    first, last = graph.layers[0], graph.layers[-1]
    inputs: np.ndarray
    if kind_of(first.kind).is_lookup:
        inputs = rng.integers(0, first.attributes["vocabulary"], (samples, first.rows))
    else:
        inputs = rng.standard_normal((samples, *first.input_shape), dtype=np.float32)
    if kind_of(last.kind).is_loss:
        shape = (samples, last.rows) if last.rows > 1 else (samples,)
        return inputs, rng.integers(0, last.attributes["vocabulary"], shape)
    if last.is_loss:
        return inputs, rng.standard_normal((samples, *last.output_shape), dtype=np.float32)
    raise UserError(f"{graph.name}: its last layer, {last.describe()}, should be a loss")


def _without_dropout(graph: LayerGraph) -> LayerGraph:
    """The graph without dropout, whose cost is negligible."""
    layers = tuple(
        replace(layer, epilogue=tuple(operation for operation in layer.epilogue if operation != "dropout"))
        for layer in graph.layers
    )
    return replace(graph, layers=layers)
