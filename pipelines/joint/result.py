"""What a planner found: one form for every plan, with a pipeline or without, and what is proven of it.

A plan without a pipeline is a pipeline of one stage.  The planner of :mod:`autoddl.search.planner`, which knows no stages, has a
result of its own, which :func:`unpipelined` turns into this one; the joint planner makes this one.

A :class:`PlanResult` holds

- what was asked for: graph, cluster, options, memory limit;
- the plan: an :class:`.evaluation.Evaluation`, with all its figures;
- the certificate: lower bound, optimality, gap, status; the space in words and in numbers (:class:`Considered`), the settings of
  a plan without a pipeline, and what the options left out;
- the rivals (:class:`Rival`): the best plans of the families that people use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search.planner import Candidate, Options, Planned, end_of
from autoddl.search.sweep import NOT_BETTER, NOT_FITTING

from .configuration import Configuration
from .evaluation import Evaluation, evaluate_unpipelined
from .partition import chain_of

__all__ = ["Considered", "JointOptions", "PlanResult", "Rival", "baseline_how", "unpipelined"]


@dataclass(frozen=True)
class JointOptions:
    """What the user asks for: the planner's options, and the pipeline.

    Attributes:
        base: batch, micro-batch, precision, optimizer, recomputation, memory limit, time limit, objective, untied, Summa meshes.
        pipeline: ``auto``, or the planner of a paper: ``dapple``, ``chimera``, ``wpipe``; None for a plan without one.
        allow_stale: offer asynchronous schedules, whose weights lag behind.
    """

    base: Options = field(default_factory=Options)
    pipeline: str | None = "auto"
    allow_stale: bool = False


@dataclass(frozen=True)
class Considered:
    """How many configurations there were, and what became of them.

    Attributes:
        space: what the configurations are, in words.
        configurations: (mesh, schedule, micro-batch, cut) in the space; cuts that differ in equal units count.  Without a pipeline
            assignments of strategies.
        settings: (mesh, schedule, micro-batch) with at least one cut; without a pipeline (micro-batch, recomputation).
        ruled_out_by_memory: settings without a strategy for some layer, or whose schedule does not exist for their numbers.
        ruled_out_by_bound: settings that cannot be better than the plan by their first bounds.
        simulated: plans that were worked out with all their figures; without a pipeline assignments that the search priced.
        stage_searches: searches of a stage for its best ways to be run.
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
    """The best plan of a family that people use, or why there is none.

    Attributes:
        name: of the family.
        how: mesh or stages, micro-batch and so on, in a few words.
        infeasible: why there is no plan; None where there is one.
        step_s, compute_s, bubble_s: of a step (see :class:`.evaluation.Evaluation`).
        communication_s: all that a step waits for; ``exposed_communication_s`` of it is not inside stages.
        memory_bytes: of the fullest device.
        lower_bound_s: no plan of the family has a shorter step; None where that is not known.
        paper_step_s: of what the planner of the family's paper chooses, where it has one.
        mesh: of a baseline (:mod:`autoddl.search.baselines`), whose figures follow from it, the micro-batch and recomputation.
        configuration: the plan itself, without its schedule, which may be long; not written.
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
        """With the figures of its plan."""
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
        """Inside stages."""
        return max(0.0, self.communication_s - self.exposed_communication_s)


@dataclass(frozen=True)
class PlanResult:
    """A planner's answer.

    Attributes:
        lower_bound_s: no configuration of the space costs less.
        optimal: whether the plan reaches that bound.
        considered: the space, and what became of it.
        rivals: what the plan is compared with.
        search_s: what the search took.
        candidates: of a plan without a pipeline every setting, and how it was settled.
        taken_from: the rival whose plan it is, where the search found none better; empty where it did.
        left_out: what the options left out that could be better, and the option that includes it; empty where there is nothing.
        notes: for the reader, beside those of the graph.
        is_interrupted: a stop was requested, so that something may have been left out.
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

    @property
    def configuration(self) -> Configuration:
        return self.evaluation.configuration

    @property
    def workload(self) -> Workload:
        return self.configuration.workload

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Of every layer, by name; over the devices of its stage."""
        return {layer.layer.name: layer.strategy for layer in self.evaluation.layers}

    @property
    def status(self) -> str:
        """How the search ended, in the words of its document."""
        return str(end_of(self.optimal, self.is_interrupted))

    @property
    def cost(self) -> float:
        """What was minimised, in seconds per step."""
        return self.evaluation.cost(self.options.base.objective)

    @property
    def gap(self) -> float:
        """How much better another configuration of the space could be at most, relative to this one."""
        return 0.0 if self.optimal or not self.cost else max(0.0, 1 - self.lower_bound_s / self.cost)


# ---- Without a pipeline ------------------------------------------------------------------------------------------------


def unpipelined(planned: Planned) -> PlanResult:
    """The answer of the planner without pipelines, its plan and its baselines as pipelines of one stage."""
    chain, options = chain_of(planned.graph), planned.options
    evaluation = evaluate_unpipelined(chain, planned.cluster, planned.workload, planned.strategies)
    outcomes = [candidate.outcome for candidate in planned.candidates]
    layers = "every layer" if options.untied else "every group of equal layers"
    summa = ", Summa meshes too" if options.summa else ""
    sizes = "every micro-batch" if options.micro_batch is None else "the given micro-batch"
    again = "or not" if options.recompute is None else "always" if options.recompute else "never"
    considered = Considered(
        space=f"strategies of {layers}{summa}; {sizes}; recomputation {again}",
        configurations=planned.result.space_size,
        settings=len(outcomes),
        ruled_out_by_memory=outcomes.count(NOT_FITTING),
        ruled_out_by_bound=outcomes.count(NOT_BETTER),
        simulated=planned.evaluations,
        stage_searches=0,
    )
    rivals = []
    for one in planned.baselines:
        if one.workload is None:
            rivals.append(Rival(one.name, infeasible=one.infeasible))
            continue
        found = evaluate_unpipelined(chain, planned.cluster, one.workload, one.strategies)
        rivals.append(Rival.of(one.name, found, baseline_how(one.mesh, one.workload), mesh=one.mesh))
    return PlanResult(
        graph=planned.graph,
        cluster=planned.cluster,
        options=JointOptions(options, pipeline=None),
        memory_limit_bytes=planned.memory_limit_bytes,
        evaluation=evaluation,
        # The same sum in another order may differ in its last digit: a bound is never above the figure that is printed.
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


def baseline_how(mesh: str, workload: Workload) -> str:
    """``dp 8, micro-batch 16, recomputed``: how a baseline is made."""
    return f"{mesh}, micro-batch {workload.micro_batch}{', recomputed' if workload.recompute else ''}"
