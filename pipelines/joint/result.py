"""The result of a planner: one class for all plans, with or without a pipeline, and the certificate of the plan.

A plan without a pipeline is represented as a pipeline of one stage.  The planner of :mod:`autoddl.search.planner` has no stages and
a result class of its own, which :func:`unpipelined` converts; the joint planner returns this class directly.

A :class:`PlanResult` holds

- the inputs: graph, cluster, options, memory limit;
- the plan: an :class:`.evaluation.Evaluation` with all its figures;
- the certificate: lower bound, optimality, gap, status; the space in words and numbers (:class:`Considered`), the settings of a
  plan without a pipeline, and the plans that the options exclude;
- the rivals (:class:`Rival`): the best plans of the families that people use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, LEFT_OUT
from autoddl.costmodel.recomputation import block_limit
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted
from autoddl.costmodel.workload import Workload
from autoddl.search.options import memory_limit_of
from autoddl.search.planner import Candidate, Options, Planned, end_of
from autoddl.search.sweep import NOT_BETTER, NOT_FITTING

from .configuration import Configuration
from .evaluation import Evaluation, evaluate, evaluate_unpipelined
from .executed import execution_note
from .partition import Chain, chain_of
from .uniform import UniformLayout, uniform_configuration

__all__ = [
    "PRICED",
    "Considered",
    "JointOptions",
    "PlanResult",
    "Rival",
    "baseline_how",
    "priced",
    "recomputed_text",
    "unpipelined",
]

#: Attributes of workloads that are options of the planner, too; besides precision and optimizer.
WORKLOAD_WORDS = ("recompute", "attention", "gradients", "zero", "activations", "overlap", "bucket_bytes")
#: Status of a plan that the user gave: it was priced, nothing was searched, and nothing is claimed about other plans.
PRICED = "priced"


@dataclass(frozen=True)
class JointOptions:
    """The user's options: those of the planner without pipelines, and those of pipelines.

    Attributes:
        base: Batch, micro-batch, precision, optimizer, recomputation, memory limit, time limit, objective, untied, Summa meshes.
        pipeline: ``auto``, or the planner of a paper: ``dapple``, ``chimera``, ``wpipe``; None for a plan without a pipeline.
        allow_stale: Whether to offer asynchronous schedules, which compute some passes with older weights.
    """

    base: Options = field(default_factory=Options)
    pipeline: str | None = "auto"
    allow_stale: bool = False


@dataclass(frozen=True)
class Considered:
    """The size of the space, and how its settings were decided.

    Attributes:
        space: Description of the configurations in words.
        configurations: Number of (mesh, schedule, micro-batch, cut) in the space; cuts of equal units count as different.  Without
            a pipeline: number of assignments of strategies.
        settings: Number of (mesh, schedule, micro-batch) with at least one cut.  Without a pipeline: number of (micro-batch,
            recomputation).
        ruled_out_by_memory: Number of settings in which some layer has no strategy.  Without a pipeline: number of settings none of
            whose plans fits the memory limit.
        ruled_out_by_bound: Number of other settings that were not searched, because their first bounds exclude a better plan, or
            because the time limit came first.
        simulated: Number of plans that were evaluated with all figures.  Without a pipeline: number of assignments priced by the
            search.
        stage_searches: Number of searches for the best strategies of a stage.
    """

    space: str
    configurations: int
    settings: int
    ruled_out_by_memory: int
    ruled_out_by_bound: int
    simulated: int
    stage_searches: int


@dataclass(frozen=True)
class Rival:
    """The best plan of a family that people use, or the reason why there is none.

    Attributes:
        name: Name of the family.
        how: Short description of the plan: mesh or stages, micro-batch, recomputation.
        infeasible: Reason why there is no plan; None if there is one.
        step_s: Seconds per step.
        compute_s: Compute seconds of the busiest worker per step.
        communication_s: Communication seconds that the step waits for, inside stages and exposed.
        exposed_communication_s: The part of ``communication_s`` that is not inside stages.
        bubble_s: Idle seconds of the busiest worker per step.
        memory_bytes: Peak memory of the fullest device.
        lower_bound_s: Lower bound on the steps of all plans of the family; None if no bound is known.
        paper_step_s: Step of the plan that the planner of the family's paper chooses; None if there is no such plan.
        mesh: Mesh of a baseline (:mod:`autoddl.search.baselines`), which with micro-batch and recomputation determines its figures;
            None for all other families.
        configuration: The plan itself; not written to documents.
    """

    name: str
    how: str = ""
    infeasible: str | None = None
    step_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_communication_s: float = 0.0
    bubble_s: float = 0.0
    memory_bytes: float = 0.0
    lower_bound_s: float | None = None
    paper_step_s: float | None = None
    mesh: str | None = None
    configuration: Configuration | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        name: str,
        evaluation: Evaluation,
        how: str,
        *,
        lower_bound_s: float | None = None,
        paper_step_s: float | None = None,
        mesh: str | None = None,
    ) -> Rival:
        """The rival whose figures are those of ``evaluation``; the other arguments are attributes."""
        return cls(
            name=name,
            how=how,
            step_s=evaluation.step_s,
            compute_s=evaluation.compute_s,
            communication_s=evaluation.communication_s,
            exposed_communication_s=evaluation.exposed_communication_s,
            bubble_s=evaluation.bubble_s,
            memory_bytes=evaluation.memory_bytes,
            lower_bound_s=lower_bound_s,
            paper_step_s=paper_step_s,
            mesh=mesh,
            configuration=evaluation.configuration,
        )

    @property
    def inner_communication_s(self) -> float:
        """Communication seconds inside stages that the step waits for."""
        return max(0.0, self.communication_s - self.exposed_communication_s)


@dataclass(frozen=True)
class PlanResult:
    """The result of a planner: the plan, its certificate, and the plans that it is compared with.

    Attributes:
        graph: The model.
        cluster: The devices and their network.
        options: The user's options.
        memory_limit_bytes: Memory limit per device.
        evaluation: The plan with its figures.
        lower_bound_s: Lower bound on the cost of all configurations of the space.
        optimal: Whether the plan's cost is equal to the lower bound.
        considered: The space, and how its settings were decided.
        rivals: The plans that this plan is compared with.
        search_s: Seconds that planning took.
        candidates: Every setting of a plan without a pipeline, and how it was decided; empty for plans with a pipeline.
        taken_from: Name of the baseline whose plan this is; empty if the search found the plan.
        left_out: Plans that the options exclude and that could be better, with the option that includes them; empty if there are
            none.
        notes: Notes for the reader, in addition to those of the graph.
        is_interrupted: Whether a stop ended the search early.
        layout: The degrees of a configuration that the user gave, which was priced without a search; None for all other plans.
    """

    graph: LayerGraph
    cluster: Cluster
    options: JointOptions
    memory_limit_bytes: float
    evaluation: Evaluation
    lower_bound_s: float
    optimal: bool
    considered: Considered
    rivals: tuple[Rival, ...]
    search_s: float
    candidates: tuple[Candidate, ...] = ()
    taken_from: str = ""
    left_out: str = ""
    notes: tuple[str, ...] = ()
    is_interrupted: bool = False
    layout: UniformLayout | None = None

    @property
    def configuration(self) -> Configuration:
        return self.evaluation.configuration

    @property
    def workload(self) -> Workload:
        return self.configuration.workload

    @cached_property
    def execution_note(self) -> str:
        """What :func:`.executed.execution_note` says; its simulations take some seconds for long schedules."""
        return execution_note(self)

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Strategy of every layer over the devices of its stage, by layer name."""
        return {layer.layer.name: layer.strategy for layer in self.evaluation.layers}

    @property
    def status(self) -> str:
        """How the search ended, as written to plan documents."""
        return PRICED if self.layout is not None else str(end_of(self.optimal, self.is_interrupted))

    @property
    def cost(self) -> float:
        """The value of the objective, in seconds per step."""
        return self.evaluation.cost(self.options.base.objective)

    @property
    def gap(self) -> float:
        """Upper bound on the relative improvement that another configuration of the space could bring."""
        return 0.0 if self.optimal or not self.cost else max(0.0, 1 - self.lower_bound_s / self.cost)


# ---- Without a pipeline ------------------------------------------------------------------------------------------------


def unpipelined(planned: Planned) -> PlanResult:
    """Convert the result of the planner without pipelines: its plan and its baselines become pipelines of one stage."""
    chain, options = chain_of(planned.graph), planned.options
    evaluation = evaluate_unpipelined(chain, planned.cluster, planned.workload, planned.strategies)
    outcomes = [candidate.outcome for candidate in planned.candidates]
    layers = "every layer" if options.untied else "every group of equal layers"
    summa = ", Summa meshes too" if options.summa else ""
    if options.executor != EAGER:
        summa = f" without {LEFT_OUT}"
    sizes = "every micro-batch" if options.micro_batch is None else "the given micro-batch"
    words: dict[bool | str | None, str] = {None: "or not", True: "always", False: "never"}
    recomputation = words.get(options.recompute, str(options.recompute))
    considered = Considered(
        space=f"strategies of {layers}{summa}; {sizes}; recomputation {recomputation}",
        configurations=planned.result.space_size,
        settings=len(outcomes),
        ruled_out_by_memory=outcomes.count(NOT_FITTING),
        ruled_out_by_bound=outcomes.count(NOT_BETTER),
        simulated=planned.evaluations,
        stage_searches=0,
    )
    rivals = []
    for baseline in planned.baselines:
        if baseline.workload is None:
            rivals.append(Rival(baseline.name, infeasible=baseline.infeasible))
            continue
        figures = evaluate_unpipelined(chain, planned.cluster, baseline.workload, baseline.strategies)
        how = baseline_how(baseline.mesh, baseline.workload)
        rivals.append(Rival.of(baseline.name, figures, how, mesh=baseline.mesh))
    return PlanResult(
        graph=planned.graph,
        cluster=planned.cluster,
        options=JointOptions(options, pipeline=None),
        memory_limit_bytes=planned.memory_limit_bytes,
        evaluation=evaluation,
        # The two costs add the same terms in different orders; rounding must not lift the bound above the printed cost.
        lower_bound_s=min(planned.lower_bound, evaluation.cost(options.objective)),
        optimal=planned.optimal,
        considered=considered,
        rivals=tuple(rivals),
        search_s=planned.search_s,
        candidates=planned.candidates,
        taken_from=planned.taken_from,
        left_out=planned.left_out,
        notes=planned.notes,
        is_interrupted=planned.is_interrupted,
    )


# ---- Without a search --------------------------------------------------------------------------------------------------


def priced(
    chain: Chain,
    cluster: Cluster,
    layout: UniformLayout,
    workload: Workload,
    memory_limit_bytes: float | None = None,
    notes: tuple[str, ...] = (),
) -> PlanResult:
    """Price a uniform configuration that the user gives.  Nothing is searched.

    Args:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        layout: The degrees.
        workload: Batch, micro-batch over all replicas, recomputation, precision and so on.
        memory_limit_bytes: Memory limit per device; None for :func:`autoddl.search.options.default_memory_limit`.  A configuration
            that needs more is priced, too.
        notes: Notes for the reader.

    Raises:
        UserError: the configuration does not fit the model, the cluster or the batch.
    """
    options = Options(
        batch=workload.batch,
        micro_batch=workload.micro_batch,
        memory_limit_bytes=memory_limit_bytes,
        **{name: getattr(workload, name) for name in ("precision", "optimizer", *WORKLOAD_WORDS)},
    )
    limit = memory_limit_of(cluster, options)
    start = time.perf_counter()
    configuration = uniform_configuration(chain, cluster, layout, workload)
    try:
        evaluation = evaluate(chain, cluster, configuration)
    except UserError as error:
        degrees = f"tp {layout.tensor_parallel} x pp {layout.num_stages} x dp {layout.data_parallel}"
        raise UserError(f"{degrees} cannot be priced: {error}") from None
    return PlanResult(
        graph=chain.graph,
        cluster=cluster,
        options=JointOptions(options, pipeline="auto" if layout.num_stages > 1 else None),
        memory_limit_bytes=limit,
        evaluation=evaluation,
        lower_bound_s=0.0,
        optimal=False,
        considered=Considered("the given configuration", 1, 1, 0, 0, 1, 0),
        rivals=(),
        search_s=time.perf_counter() - start,
        notes=notes,
        layout=layout,
    )


def baseline_how(mesh: str, workload: Workload) -> str:
    """Describe the plan of a baseline, such as ``dp 8, micro-batch 16, layers recomputed``."""
    return f"{mesh}, micro-batch {workload.micro_batch}{recomputed_text(workload.recompute)}"


def recomputed_text(recompute: str) -> str:
    """Describe a way of recomputation at the end of a list: ``, blocks recomputed``; empty for none.

    >>> recomputed_text("blocks"), recomputed_text("blocks:3"), recomputed_text("selective"), recomputed_text("none")
    (', blocks recomputed', ', first 3 blocks recomputed', ', attention recomputed', '')
    """
    count = block_limit(recompute)
    if count is not None:
        return f", first {counted(count, 'block')} recomputed" if count > 1 else ", first block recomputed"
    what = {"none": "", "selective": "attention"}.get(recompute, recompute)
    return f", {what} recomputed" if what else ""
