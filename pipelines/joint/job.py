"""The planning job: the user's options together with the values derived from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.localwork import LocalWork
from autoddl.costmodel.recomputation import block_limit
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.search.options import AUTO, base_workload, default_memory_limit, partial_recomputations, recomputations

from .explorer import Explorer
from .partition import Chain, chain_of
from .result import JointOptions
from .space import SOME_BLOCKS
from .stage_cost import Pricing
from .stage_search import MakeStages, StageSearch

__all__ = ["DEFAULT_TIME_LIMIT_S", "PlanningJob", "Report", "job_of", "no_report"]

#: Default time limit of the search of pipelines, in seconds of processor time.
DEFAULT_TIME_LIMIT_S = 30.0

#: Receives the progress of a search: the incumbent's cost [s], the least open bound [s] and the number of simulated plans.
Report = Callable[[float, float, int], None]


def no_report(best_s: float, bound_s: float, simulated: int) -> None:
    """Ignore the progress."""


@dataclass
class PlanningJob:
    """The inputs that all phases of the planner share.

    Attributes:
        graph: The model.
        cluster: The devices and their network.
        options: The user's options.
        chain: The model as a chain of units.
        workload: Batch, precision and optimizer.
        limit_bytes: Memory limit per device.
        report: Receives the progress.
        stop: Ends the planner early.
    """

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
        """The ways of recomputation that the options allow; :data:`.space.SOME_BLOCKS` for several of them."""
        base = self.options.base
        if base.recompute == "stage":
            return ("stage", "layers")  # the last stage is not recomputed as a whole
        ways = recomputations(base, self.graph)
        if partial_recomputations(base, self.graph):
            ways = (*ways, SOME_BLOCKS)
        return (*ways, "stage") if base.recompute is None or base.recompute is True else ways

    def tries(self, recompute: str) -> bool:
        """Whether a way of recomputation of a stage is in the space."""
        is_partial = block_limit(recompute) is not None and SOME_BLOCKS in self.recomputations
        return is_partial or recompute in self.recomputations

    @property
    def time_limit_s(self) -> float:
        """The time limit, by default :data:`DEFAULT_TIME_LIMIT_S`."""
        limit = self.options.base.time_limit_s
        return DEFAULT_TIME_LIMIT_S if limit is None else limit

    @property
    def pricing(self) -> Pricing:
        """The objective and the offered strategies."""
        base = self.options.base
        choices = base.choices
        if self.options.allow_stale:
            # Searches count older versions of weights as a part of the state, which ZeRO divides differently for each strategy.
            choices = replace(choices, shardings=(0,))
        return Pricing(base.objective, base.untied, base.summa, choices=choices)

    @cached_property
    def arithmetic_s(self) -> float:
        """Seconds of the arithmetic of a step, forward and backward, on all devices at full speed: a lower bound on every step.

        It has the FLOPs that the cost model prices, not those that a layer graph states: the backward pass of a layer that reads
        the data computes fewer, and fused causal attention does too.
        """
        one_device, workload = data_parallel((1,)), replace(self.workload, recompute="none")
        total = LocalWork()
        for layer in self.graph.layers:
            work = layer_work(layer, one_device, workload, workload.batch, self.graph.place(layer.name, "none"))
            total += work.forward_work + work.backward_work
        return float(self.cluster.local_times(total, workload.precision)[0] / self.cluster.num_devices)

    @cached_property
    def ideal_s(self) -> float:
        """Lower bound on every cost: the arithmetic; 0 if the objective is communication alone."""
        return self.arithmetic_s if self.options.base.objective == "step" else 0.0

    def tell(self, best_s: float, bound_s: float, simulated: int) -> None:
        """Report the progress; a bound that is not known yet is the ideal one.

        Args:
            best_s: Cost of the best plan so far.
            bound_s: Lower bound on the cost of all plans; 0 if there is none.
            simulated: Number of simulated plans.
        """
        self.report(best_s, min(best_s, max(bound_s, self.ideal_s)), simulated)

    def explorer(self, make_stages: MakeStages = StageSearch, share_with: Explorer | None = None) -> Explorer:
        """Make an explorer of this job.

        Args:
            make_stages: Constructor of the searches of stages; by default all strategies are offered.
            share_with: Another explorer of this job whose tables the new one may share.
        """
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
    """Make a planning job, with the default batch and memory limit if the options give none.

    Raises:
        UserError: the memory limit is out of range, the micro-batch does not divide the batch, or options exclude each other.
    """
    base = options.base
    limit = default_memory_limit(cluster) if base.memory_limit_bytes is None else base.memory_limit_bytes
    if not 0 < limit < math.inf:
        raise UserError(f"memory limit {limit / 2**30:g} GiB should be a finite number of more than 0")
    if base.zero not in (0, AUTO) and options.allow_stale:
        raise UserError(f"zero={base.zero} cannot be combined with allow_stale=True; leave out one of them")
    workload = base_workload(cluster, base)
    if base.micro_batch is not None:
        replace(workload, micro_batch=base.micro_batch)  # raises if the micro-batch does not divide the batch
    return PlanningJob(graph, cluster, options, chain_of(graph), workload, limit, report, stop or Stop())
