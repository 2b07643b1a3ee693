"""Stages as experts run them: one mesh of data and model parallelism for all layers, instead of the exact search."""

from __future__ import annotations

import math
from functools import partial

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import Problem
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import baselines

from .cutting import Chain
from .interiors import Interiors, Need
from .meshes import StageMesh

__all__ = ["FixedInteriors", "megatron"]


class FixedInteriors(Interiors):
    """Interiors that are members of the named baselines (:mod:`autoddl.search.baselines`), the best that fits.

    The least of finitely many lines is concave too, so what equal stages share holds here as well.
    """

    def __init__(
        self,
        chain: Chain,
        mesh: StageMesh,
        cluster: Cluster,
        workload: Workload,
        like: Interiors | None = None,
        *,
        names: tuple[str, ...],
    ):
        super().__init__(chain, mesh, cluster, workload, like)
        self._names = names

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
        graph = self.graph(first, stop).graph
        table, budget = problem.table, math.inf
        if need is not None:
            table, budget = self._limited(problem, first, stop, recompute, micro_batch, need)
        best: tuple[float, tuple[int, ...]] | None = None
        for member in baselines(graph, self.devices.level_sizes):
            if member.name not in self._names:
                continue
            try:
                choice = problem.choice(member.strategies)
            except UserError:
                continue
            cost = table.evaluate(choice)
            if math.isfinite(cost) and table.peak_memory(choice) <= budget and (best is None or cost < best[0]):
                best = (cost, choice)
        return None if best is None else tuple(problem.strategies(best[1]).values())


#: Megatron's tensor parallelism, down to pure data parallelism.
megatron = partial(FixedInteriors, names=("megatron", "data parallel"))
