"""What a user asks of the joint planner, with what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.workload import Workload

from .configuration import RECOMPUTATIONS
from .cutting import Chain
from .explorer import Explorer
from .result import JointOptions
from .stages import MakeStages, Stages
from .stagetables import Pricing

__all__ = ["DEFAULT_TIME_LIMIT_S", "Job", "Report", "no_report"]

#: Seconds of processor time for the search of pipelines where no limit is given.
DEFAULT_TIME_LIMIT_S = 30.0

#: Told the best step so far, the least open bound and the number of simulations.
Report = Callable[[float, float, int], None]


def no_report(best_s: float, bound_s: float, simulated: int) -> None:
    """No progress."""


@dataclass
class Job:
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

    def explorer(self, make_stages: MakeStages = Stages, like: Explorer | None = None) -> Explorer:
        """What searches share; with other ways to run stages, and the tables of another one, where these are given."""
        return Explorer(
            self.chain,
            self.cluster,
            self.workload,
            self.limit_bytes,
            self.recomputations,
            self.pricing,
            make_stages,
            like,
            self.stop,
        )
