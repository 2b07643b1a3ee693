"""What every rank does in `bench_cluster`: ways to train one model take turns, each some steps in each round.

Short steps vary more, since all ranks share few cores: a way with short steps makes more of them in its turn.

``autoddl launch PLAN cluster_job.py -- SPECIFICATION RESULT``; both are pickled files, which `bench_cluster` writes and reads.

================  ================================================================================================================
runtime           how a way runs
================  ================================================================================================================
autoddl           its strategies, by AutoDDL's runtime (:func:`autoddl.apply`)
graph             its strategies, by OneFlow's ``nn.Graph`` with global tensors (the graph executor)
auto-parallel     OneFlow's own search, ``enable_auto_parallel``, in ``nn.Graph``
================  ================================================================================================================

A step is forward pass, backward pass and the update by SGD. Its time is that of the slowest rank, from a barrier until all of its
work is done.
"""

from __future__ import annotations

import math
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import autoddl
from autoddl.costmodel.devices import CPU
from autoddl.costmodel.errors import without_colors
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.zoo.builtin import BuiltIn

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Way:
    """A way to train a model.

    Attributes:
        name: in tables.
        runtime: see the module's docstring.
        strategies: of each layer; empty for auto-parallel.
        workload: batch and micro-batch.
    """

    name: str
    runtime: str
    workload: Workload
    strategies: Mapping[str, Strategy] = field(default_factory=dict)


@dataclass(frozen=True)
class Specification:
    """What to run.

    Attributes:
        built_in: the model.
        ways: the ways to train it.
        rounds, steps: in each round every way makes at least so many steps.
        turn_s: how long the turn of a way is at least [s].
        warm_up: steps of each way before the first round.
    """

    built_in: BuiltIn
    ways: tuple[Way, ...]
    rounds: int
    steps: int
    turn_s: float = 3.0
    warm_up: int = 2


@dataclass
class Result:
    """How a way went.

    Attributes:
        losses: of the first steps.
        seconds: of each step of the slowest rank, by round.
        fault: why the way cannot run; "" if it can.
    """

    losses: list[float]
    seconds: list[list[float]]
    fault: str = ""

    @property
    def median_s(self) -> float:
        """Median duration of a step [s]."""
        return statistics.median(second for seconds in self.seconds for second in seconds)


def main() -> None:
    """Run all ways; rank 0 writes the fields of a `Result` for each."""
    from autoddl.calib.hosts import exchange
    from autoddl.pipelines.runtime.load import load_oneflow

    flow: Any = load_oneflow()
    specification: Specification = pickle.loads(Path(sys.argv[1]).read_bytes())
    steps: dict[str, Callable[[], float]] = {}
    nums: dict[str, int] = {}
    results = {way.name: Result([], []) for way in specification.ways}
    data = _batch(specification)
    for way in specification.ways:
        try:
            step = _MAKERS[way.runtime](specification.built_in, way, data)
            for _ in range(specification.warm_up):
                begun = time.monotonic()
                results[way.name].losses.append(step())
                seconds = time.monotonic() - begun
            steps[way.name] = step
            slowest = float(exchange(np.array([seconds])).max())
            nums[way.name] = max(specification.steps, math.ceil(specification.turn_s / slowest))
        except Exception as error:
            results[way.name].fault = without_colors(f"{type(error).__name__}: {error}").splitlines()[0]
    join, wait = flow._oneflow_internal.eager.ClusterSync, flow._oneflow_internal.eager.Sync
    for number in range(specification.rounds):
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            own = []
            for _ in range(nums[name]):
                join()
                begun = time.monotonic()
                steps[name]()
                wait()
                own.append(time.monotonic() - begun)
            results[name].seconds.append(exchange(np.array(own)).max(axis=0).tolist())
            if flow.env.get_rank() == 0:
                print(f"round {number + 1}, {name}: {np.median(results[name].seconds[-1]):.3f} s", flush=True)
    if flow.env.get_rank() == 0:
        Path(sys.argv[2]).write_bytes(pickle.dumps({name: vars(result) for name, result in results.items()}))


def _batch(specification: Specification) -> tuple[np.ndarray, ...]:
    from autoddl.zoo.modules import make_batch

    return make_batch(specification.built_in, specification.ways[0].workload.batch, np.random.default_rng(0))


def _module(built_in: BuiltIn) -> Any:
    from autoddl.pipelines.runtime.models import initialize
    from autoddl.zoo.modules import build_module

    return initialize(build_module(built_in), 0)


def _by_autoddl(built_in: BuiltIn, way: Way, data: tuple[np.ndarray, ...]) -> Callable[[], float]:
    import oneflow as flow

    from autoddl.pipelines.runtime.applied import AppliedModule
    from autoddl.pipelines.runtime.backend import backend_of

    plan = autoddl.launched().load_plan()
    backend = backend_of(way.workload.precision, CPU, plan.cluster)
    module = AppliedModule(_module(built_in), built_in.graph(), way.strategies, way.workload, backend=backend)
    optimizer = flow.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        loss = module.train_step(*data)
        module.step(optimizer)
        return loss

    return step


def _by_graph(built_in: BuiltIn, way: Way, data: tuple[np.ndarray, ...]) -> Callable[[], float]:
    import oneflow as flow

    from autoddl.pipelines.runtime.backend import HOST
    from autoddl.pipelines.runtime.graph.executor import GraphExecutor

    executor = GraphExecutor(
        _module(built_in),
        built_in.graph(),
        way.strategies,
        way.workload,
        HOST,
        None,
        lambda parameters: flow.optim.SGD(parameters, lr=LEARNING_RATE),
        None,
    )
    return lambda: executor.train_step(*data)


def _by_auto_parallel(built_in: BuiltIn, way: Way, data: tuple[np.ndarray, ...]) -> Callable[[], float]:
    import oneflow as flow

    from autoddl.pipelines.runtime.graph.kept import KeptGraph

    everyone = flow.placement("cpu", list(range(flow.env.get_world_size())))
    model = _module(built_in).to_global(placement=everyone, sbp=flow.sbp.broadcast)
    has_loss = built_in.graph().layers[-1].is_loss

    class Training(KeptGraph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(flow.optim.SGD(model.parameters(), lr=LEARNING_RATE))
            self.config.enable_auto_parallel(True)
            self.config.enable_auto_parallel_ignore_user_sbp_config(True)

        def build(self, *tensors: Any) -> Any:
            loss = self.model(*tensors)
            assert has_loss
            loss.backward()
            return loss

    graph = Training()
    tensors = [flow.tensor(array).to_global(placement=everyone, sbp=flow.sbp.broadcast) for array in data]

    def step() -> float:
        loss = graph(*tensors)
        return float(loss.to_global(sbp=flow.sbp.broadcast).to_local().numpy())

    return step


_MAKERS = {"autoddl": _by_autoddl, "graph": _by_graph, "auto-parallel": _by_auto_parallel}

if __name__ == "__main__":
    sys.modules["cluster_job"] = sys.modules["__main__"]  # by which the specification was pickled
    main()
