"""What ranks do to time strategies: their communication alone, and whole training steps.

*Communication* is the plan's list of steps, forward, backward and for the gradients, run one after the other on tensors of the
right sizes with nothing between them: the very functions that the plan's layers call.  *Step* is the applied model: forward and
backward passes of a batch, gradients summed.  Strategies are visited in rounds, in an order that is shuffled anew in each, and
a visit that other processes disturbed is repeated.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.exchange import ExchangeStep
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.rank import report

from .measure import DISTURBED, Clock, Hosts, exchange, hosts_of_job

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.stepping import Stepper

#: How often a visit is tried that other processes disturb.
MOST_ATTEMPTS = 3
#: What takes less than this in all is repeated more often.
_ENOUGH_S = 0.05

__all__ = ["RankOptions", "Visit", "rank_job", "steps_alone", "steps_of"]


@dataclass(frozen=True)
class RankOptions:
    """What to time.

    Attributes:
        graph, cluster, workload: the model, and what it was priced for.
        strategies: of every layer, for each candidate.
        rounds: visits of each.
        repetitions: timed in a visit, at least, after one that warms up; their median counts.
        budget_s: begin no more rounds after this time.
        with_steps: whether to run whole training steps too.
        seed: of the order, the parameters and the data.
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


@dataclass(frozen=True)
class Visit:
    """One candidate timed once: seconds of the slowest rank.  ``step_s`` is None where steps were not run, ``refused`` says why a
    candidate cannot be run at all."""

    candidate: int
    round: int
    communication_s: float
    step_s: float | None
    foreign: float
    refused: str | None = None


def rank_job(options: RankOptions) -> int:
    """Visit all candidates in rounds; rank 0 reports every `Visit`.  Returns how many rounds were completed."""
    flow = load_oneflow()
    graph = _without_dropout(options.graph)
    clock = Clock(hosts_of_job(), options.budget_s)
    assessments = [assess(graph, options.cluster, options.workload, chosen) for chosen in options.strategies]
    step_of = _Steps(graph, options, _fit(assessments, clock.hosts)) if options.with_steps else None
    shuffler = random.Random(options.seed)
    refused: set[int] = set()
    for number in range(options.rounds):
        order = [i for i in range(len(assessments)) if i not in refused]
        shuffler.shuffle(order)
        for i in order:
            run = step_of(i) if step_of is not None else None
            if isinstance(run, str):
                refused.add(i)
                visit = Visit(i, number, 0.0, None, 0.0, run)
            else:
                visit = _visit(i, number, steps_of(assessments[i], options.workload), run, options.repetitions, clock)
            if flow.env.get_rank() == 0:
                report(visit)
        if clock.is_over:
            return number + 1
    return options.rounds


def _visit(
    candidate: int,
    number: int,
    steps: Sequence[tuple[Layer | None, Step]],
    run: Callable[[], Any] | None,
    repetitions: int,
    clock: Clock,
) -> Visit:
    best: Visit | None = None
    communicate = steps_alone(steps)
    for _ in range(MOST_ATTEMPTS):
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


def _median(run: Callable[[], Any], repetitions: int, clock: Clock) -> float:
    """Of at least so many repetitions, and of more where they are short: all ranks see the same times, and so agree how many."""
    times = clock.time(run, repetitions)
    more = int(min(100.0, _ENOUGH_S / np.median(times))) - repetitions
    if more > 0:
        times = np.concatenate((times, clock.time(run, more)))
    return float(np.median(times))


# ---- Communication alone ---------------------------------------------------------------------------------------------------


def steps_of(assessment: Assessment, workload: Workload) -> list[tuple[Layer | None, Step]]:
    """All steps of a training step, in the order in which they run, with the layer whose rows and features they move."""
    forward = [(layer.layer, step) for layer in assessment.layers for step in layer.forward_steps]
    backward = [(layer.layer, step) for layer in reversed(assessment.layers) for step in layer.backward_steps]
    # Gradients are reduced as vectors.
    gradient: list[tuple[Layer | None, Step]] = [
        (None, step) for layer in reversed(assessment.layers) for step in layer.work.gradient
    ]
    return [*forward, *backward] * workload.num_micro_batches + gradient


def steps_alone(steps: Sequence[tuple[Layer | None, Step]]) -> Callable[[], None]:
    """A function that runs steps, without what is computed between them; the tensors exist before."""
    calls = [_call(layer, step) for layer, step in steps]

    def run() -> None:
        for call in calls:
            call()

    return run


def _call(layer: Layer | None, step: Step) -> Callable[[], Any]:
    from autoddl.pipelines.runtime.stepping import Stepper

    flow = load_oneflow()
    stepper = Stepper(flow.env.get_world_size())
    if isinstance(step, ExchangeStep):
        return _exchange_call(step, stepper)
    size = step.axis.size
    elements = max(1, round(step.nbytes / 4))
    if step.collective is Collective.ALL_REDUCE:
        vector = flow.ones(elements)
        return lambda: stepper.run(vector, step)
    if layer is None or step.collective is Collective.ALL_TO_ALL:
        rows = size
    else:
        # (rows of some samples, features): features are gathered and scattered.
        rows = layer.rows
        while rows * size < elements and elements % (2 * rows * size) == 0 and elements // rows > 1024:
            rows *= 2
        if elements % (rows * size):
            rows = 1
    features = max(size, elements // rows // size * size)
    if step.collective is Collective.ALL_TO_ALL:
        matrix = flow.ones(rows, features)
        return lambda: stepper.all_to_all(matrix, step.axis, 0, 1)
    if layer is None:
        flat = flow.ones(rows * features // (size if step.collective is Collective.ALL_GATHER else 1))
        return lambda: stepper.run(flat, step, 0)
    width = features // size if step.collective is Collective.ALL_GATHER else features
    x = flow.ones(1, rows, width)
    return lambda: stepper.run(x, step, 2)


def _exchange_call(step: ExchangeStep, stepper: Stepper) -> Callable[[], Any]:
    """What an exchange sends on one network level, of a tensor (samples, features, rows) of its size."""
    from autoddl.pipelines.runtime.exchanging import held_by, send_pieces

    shape = step.exchange.divisors
    pieces = [piece for piece in step.exchange.pieces(shape) if step.exchange.level_of(piece) == step.axis.level]
    mine = held_by(step.exchange.source, stepper.rank, shape)
    rows = max(1, round(step.tensor_bytes / 4 / np.prod(shape)))
    x = load_oneflow().ones(*map(len, mine), rows)
    return lambda: send_pieces(x, pieces, stepper, mine, (0, 1))


# ---- Whole steps --------------------------------------------------------------------------------------------------------------


class _Steps:
    """What trains one step at a candidate's strategies, by the candidate's number; the reason where it cannot be run.

    Kept from visit to visit (``keeps``), where all of them fit in the memory: to make one takes as long as some steps.
    """

    def __init__(self, graph: LayerGraph, options: RankOptions, keeps: bool) -> None:
        self._graph, self._options, self._keeps = graph, options, keeps
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
            applied = AppliedModule(self._module, self._graph, options.strategies[i], options.workload)
        except UserError as error:
            return str(error)

        def run() -> None:
            applied.zero_grad(set_to_none=True)
            applied.train_step(*self._batch)

        return run


def _fit(assessments: Sequence[Assessment], hosts: Hosts) -> bool:
    """Whether parameters and gradients of all candidates fit in a quarter of the memory that every host has free."""
    needed = sum(layer.work.state_bytes for assessment in assessments for layer in assessment.layers)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return bool(needed * hosts.ranks_per_node <= 0.25 * exchange(np.array([float(free)])).min())


def skeleton(graph: LayerGraph, seed: int) -> Any:
    """A module that has the parameters of a graph, with small random values, at their paths, and nothing to call.

    Raises:
        UserError: a layer is the user's own code.
    """
    flow = load_oneflow()
    rng = np.random.default_rng(seed)
    root = flow.nn.Module()
    for layer in graph.layers:
        if layer.kind == "opaque":
            raise UserError(
                f"{layer.describe()}: it is code of the model's own, which cannot be run from its graph alone"
            )
        for path in layer.modules or (layer.name,):
            owner = _at(root, path, _convolution(layer) if layer.kind == "conv2d" else None)
            if layer.kind == "norm":
                owner.eps = 1e-5
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
                value = flow.nn.Parameter(flow.tensor(drawn.astype(np.float32)))
            _at(root, parent).register_parameter(name, value)
    return root


def _convolution(layer: Layer) -> Any:
    attributes = layer.attributes
    size, stride = attributes["kernel_size"], attributes.get("stride", 1)
    return load_oneflow().nn.Conv2d(
        attributes["in_channels"], attributes["out_channels"], size, stride=stride, padding=attributes.get("padding", 0)
    )


def _at(root: Any, path: str, made: Any = None) -> Any:
    """The submodule at a path, plain ones made on the way."""
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
    """Inputs and targets of a batch."""
    rng = np.random.default_rng(seed)
    first, last = graph.layers[0], graph.layers[-1]
    inputs: np.ndarray
    if first.kind == "embedding":
        inputs = rng.integers(0, first.attributes["vocabulary"], (samples, first.rows))
    else:
        inputs = rng.standard_normal((samples, *first.input_shape), dtype=np.float32)
    if last.kind == "loss":
        shape = (samples, last.rows) if last.rows > 1 else (samples,)
        return inputs, rng.integers(0, last.attributes["vocabulary"], shape)
    if any(operation.endswith("_loss") for operation in last.epilogue):
        return inputs, rng.standard_normal((samples, *last.output_shape), dtype=np.float32)
    raise UserError(f"{graph.name}: its last layer, {last.describe()}, is no loss; a training step ends in one")


def _without_dropout(graph: LayerGraph) -> LayerGraph:
    """Dropout neither communicates nor computes anything to speak of."""
    layers = tuple(
        replace(layer, epilogue=tuple(operation for operation in layer.epilogue if operation != "dropout"))
        for layer in graph.layers
    )
    return replace(graph, layers=layers)
