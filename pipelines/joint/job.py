"""What a user asks of the joint planner, with what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.workload import Workload
from autoddl.search.options import USABLE_MEMORY, base_workload

from .configuration import RECOMPUTATIONS
from .explorer import Explorer
from .partition import Chain, chain_of
from .result import JointOptions
from .stage_cost import Pricing
from .stage_search import MakeStages, StageSearch

__all__ = ["DEFAULT_TIME_LIMIT_S", "PlanningJob", "Report", "job_of", "no_report"]

#: Seconds of processor time for the search of pipelines where no limit is given.
DEFAULT_TIME_LIMIT_S = 30.0

#: Told the best step so far, the least open bound and the number of simulations.
Report = Callable[[float, float, int], None]


def no_report(best_s: float, bound_s: float, simulated: int) -> None:
    """No progress."""


@dataclass
class PlanningJob:
    """What all steps of the planner share."""

    graph: LayerGraph
    cluster: Cluster
    options: JointOptions
    chain: Chain
    workload: Workload
    limit_bytes: float
    report: Report
    stop: Stop = field(default_factory=Stop)

    @property
    def recomputations(self) -> tuple[str, ...]:
        wish = self.options.base.recompute
        return RECOMPUTATIONS if wish is None else RECOMPUTATIONS[1:] if wish else RECOMPUTATIONS[:1]

    @property
    def time_limit_s(self) -> float:
        limit = self.options.base.time_limit_s
        return DEFAULT_TIME_LIMIT_S if limit is None else limit

    @property
    def pricing(self) -> Pricing:
        base = self.options.base
        return Pricing(base.objective, base.untied, base.summa)

    def explorer(self, make_stages: MakeStages = StageSearch, share_with: Explorer | None = None) -> Explorer:
        """What searches share; with other ways to run stages, and the tables of another one, where these are given."""
        return Explorer(
            self.chain,
            self.cluster,
            self.workload,
            self.limit_bytes,
            self.recomputations,
            self.pricing,
            make_stages,
            share_with,
            self.stop,
        )


def job_of(
    graph: LayerGraph,
    cluster: Cluster,
    options: JointOptions,
    report: Report = no_report,
    stop: Stop | None = None,
) -> PlanningJob:
    """What a user asks for, with the batch and the memory limit that go without saying.

    Raises:
        UserError: the memory limit is out of range, or the micro-batch does not divide the batch.
    """
    base = options.base
    limit = USABLE_MEMORY * cluster.device.memory_bytes if base.memory_limit_bytes is None else base.memory_limit_bytes
    if not 0 < limit < math.inf:
        raise UserError(f"memory limit {limit / 2**30:g} GiB should be a finite number of more than 0")
    workload = base_workload(cluster, base, recompute=False)
    if base.micro_batch is not None:
        replace(workload, micro_batch=base.micro_batch)  # refuses one that does not divide
    return PlanningJob(graph, cluster, options, chain_of(graph), workload, limit, report, stop or Stop())
