"""Stages as experts run them: one mesh of data and model parallelism for all layers, instead of the exact search."""

from __future__ import annotations

import math
from functools import partial

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import Problem
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.table import CostTable
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import baselines

from .cutting import Chain
from .interiors import Interiors
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
        stop: Stop | None = None,
        *,
        names: tuple[str, ...],
    ):
        super().__init__(chain, mesh, cluster, workload, like, stop)
        self._names = names

    def _choice(
        self, problem: Problem, table: CostTable, budget: float | None, cutoff: float
    ) -> tuple[int, ...] | None:
        best: tuple[float, tuple[int, ...]] | None = None
        for member in baselines(problem.graph, self.tables.devices.level_sizes):
            if member.name not in self._names:
                continue
            try:
                choice = problem.choice(member.strategies)
            except UserError:
                continue
            cost = table.evaluate(choice)
            fits = budget is None or table.peak_memory(choice) <= budget
            if math.isfinite(cost) and fits and (best is None or cost < best[0]):
                best = (cost, choice)
        return None if best is None else best[1]


#: Megatron's tensor parallelism, down to pure data parallelism.
megatron = partial(FixedInteriors, names=("megatron", "data parallel"))
