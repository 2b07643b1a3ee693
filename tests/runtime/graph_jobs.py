"""What the ranks do in test_graph_executor.py and test_graph_pages.py."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

import numpy as np

import autoddl
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import initialize
from autoddl.pipelines.runtime.ranks.wire import synchronize
from autoddl.pipelines.runtime.statements import EPILOGUES
from autoddl.verification.graph_job import run_graph
from autoddl.zoo.builtin import recognise
from autoddl.zoo.modules import build_module, make_batch

flow = load_oneflow()

#: Graphs of pages live as long as their rank, for the reason that `KeptGraph` gives.
_KEPT = []


def train_applied(plan, num_steps):
    """Train a built-in model with `autoddl.apply` and on this rank alone.

    Returns:
        The losses of both, the largest difference of the final parameters, and whether a reloaded state computes the same loss.
    """
    built_in = recognise(plan.graph)
    module = initialize(build_module(built_in), 3)

    def optimizer(parameters):
        return flow.optim.SGD(parameters, lr=0.125)

    applied = autoddl.apply(module, plan, executor="graph", optimizer=optimizer)
    initial = {name: value.numpy() for name, value in applied.state_dict().items()}
    batches = [make_batch(built_in, plan.workload.batch, np.random.default_rng(step)) for step in range(num_steps)]
    losses = [applied.train_step(*batch) for batch in batches]
    trained = applied.state_dict()
    own, expected = optimizer(module.parameters()), []
    for batch in batches:
        loss = module(*map(flow.tensor, batch))
        loss.backward()
        own.step()
        own.zero_grad(set_to_none=True)
        expected.append(float(loss.numpy()))
    difference = max(
        float(np.abs(trained[name].numpy() - value.numpy()).max()) for name, value in module.state_dict().items()
    )
    applied.load_state_dict(initial)
    return losses, expected, difference, applied.train_step(*batches[0])


def crash_once(task):
    """As `run_graph`, but the first attempt ends as `crash` does."""
    if Path(task.folder, "crashed").exists():
        return run_graph(task)
    return crash(task)


def crash(task):
    """Rank 1 crashes as compiled code does, while the others wait for it."""
    if flow.env.get_rank() == 1:
        Path(task.folder, "crashed").touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    synchronize()


def epilogues(x):
    """The values of every element-wise operation after a layer, by its name, as the graph executor computes it."""
    from autoddl.pipelines.runtime.graph.model import _function

    return {name: _function(called)(flow.tensor(x)).numpy() for name, called in EPILOGUES.items() if called}


def train_page(path, num_steps):
    """Train the model of an exported page; return the losses."""
    page = runpy.run_path(path, run_name="page")
    model = page["Model"]()
    page["initialize"](model, 0)
    graph = page["TrainingGraph"](model, flow.optim.SGD(model.parameters(), lr=0.125))
    _KEPT.append(graph)
    return [float(graph(*page["batch"](0, step)).to_local().numpy().mean()) for step in range(num_steps)]
