"""What a joint search found, and what it says about how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.search.planner import Options, end_of

from .configuration import Configuration
from .evaluation import Evaluation

__all__ = ["Considered", "FamilyFigures", "JointOptions", "JointPlan"]


@dataclass(frozen=True)
class JointOptions:
    """What the user asks of the joint planner, beside the planner's options.

    Attributes:
        base: batch, micro-batch, precision, optimizer, recomputation, memory limit, time limit, objective, untied, Summa meshes.
        pipeline: ``auto``, or the planner of a paper: ``dapple``, ``chimera``, ``wpipe``.
        allow_stale: offer asynchronous schedules, whose weights lag behind.
        time_limit_s: of the whole search.
    """

    base: Options = field(default_factory=Options)
    pipeline: str = "auto"
    allow_stale: bool = False


@dataclass(frozen=True)
class Considered:
    """How many configurations there were, and what became of them.

    Attributes:
        space: what the configurations are, in words.
        configurations: (mesh, schedule, micro-batch, cut) in the space; cuts that differ in equal units count.
        settings: (mesh, schedule, micro-batch) with at least one cut.
        ruled_out_by_memory: settings without a strategy for some layer, or whose schedule does not exist for their numbers.
        ruled_out_by_bound: settings that cannot be better than the plan by their first bounds.
        simulated: plans that were worked out with all their figures.
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
class FamilyFigures:
    """The best plan of a family that people use, or why there is none.

    Attributes:
        name: of the family.
        description: stages, micro-batch and so on, in a few words.
        infeasible: why there is no plan; None where there is one.
        lower_bound_s: no plan of the family has a shorter step.
        paper_step_s: of what the planner of the family's paper chooses, where it has one.
        step_s, compute_s, communication_s, exposed_communication_s, bubble_s: of a step (see :class:`.evaluation.Evaluation`).
        memory_bytes: of the fullest device.
    """

    name: str
    description: str = ""
    infeasible: str | None = None
    step_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_communication_s: float = 0.0
    bubble_s: float = 0.0
    memory_bytes: float = 0.0
    lower_bound_s: float = 0.0
    paper_step_s: float | None = None


@dataclass(frozen=True)
class JointPlan:
    """The joint planner's answer.

    Attributes:
        lower_bound_s: no configuration of the space costs less.
        optimal: whether the plan reaches that bound.
        search_s: of everything.
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
    families: tuple[FamilyFigures, ...]
    search_s: float
    notes: tuple[str, ...] = ()
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    is_interrupted: bool = False

    @property
    def configuration(self) -> Configuration:
        return self.evaluation.configuration

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
        return 0.0 if self.optimal else max(0.0, 1 - self.lower_bound_s / self.cost)
