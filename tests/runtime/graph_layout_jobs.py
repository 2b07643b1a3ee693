"""What the ranks do in test_graph_layouts.py."""

from __future__ import annotations

import numpy as np

from autoddl.pipelines.runtime.backend import CPU
from autoddl.pipelines.runtime.graph.kept import KeptGraph
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.ranks.wire import Meter

flow = load_oneflow()


class Change(KeptGraph):
    """A graph that only changes a layout."""

    def __init__(self, placement, sbp):
        super().__init__()
        self.placement, self.sbp = placement, sbp

    def build(self, x):
        return x.to_global(placement=self.placement, sbp=self.sbp)


def count_changes(changes, length):
    """For each change ((mesh, states), (mesh, states)): the bytes that all ranks send, and whether the values are right.

    A state is "B", "P" or the number of a dimension. The tensor is a square matrix of float32.
    """
    values = np.random.default_rng(0).random((length, length), dtype=np.float32)
    meter, results = Meter(), []
    everywhere = [flow.sbp.broadcast]
    world = flow.env.get_world_size()
    idle = _count(meter, Change(*_layout(((world,), "0"))), _made(values, ((world,), "0")))[0]
    for source, target in changes:
        graph, x = Change(*_layout(target)), _made(values, source)
        sent, y = _count(meter, graph, x)
        whole = y.to_global(placement=flow.placement(CPU, list(range(world))), sbp=everywhere).to_local().numpy()
        results.append((sent - idle, bool(np.allclose(whole, values, rtol=1e-5))))
    return results


def _count(meter, graph, x):
    y = graph(x)  # compiles
    y.to_local().numpy()
    meter(lambda: None)
    # The least of several counts: on a busy machine the kernel counts what it sends again.
    counts = [meter(lambda: graph(x).to_local().numpy())[1].payload_bytes for _ in range(3)]
    return min(counts), y


def _made(values, layout):
    placement, sbp = _layout(layout)
    return flow.tensor(values, placement=placement, sbp=[flow.sbp.broadcast] * len(sbp)).to_global(sbp=sbp)


def _layout(layout):
    mesh, states = layout
    named = {"B": flow.sbp.broadcast, "P": flow.sbp.partial_sum}
    ranks = np.arange(np.prod(mesh)).reshape(mesh).tolist()
    return flow.placement(CPU, ranks), [named.get(state) or flow.sbp.split(int(state)) for state in states]
