"""The joint planner: chooses a pipeline and the strategies inside its stages together.

With ``pipeline="auto"``, :func:`plan_jointly` works in four phases:

1.  **First plans.**  Trials by Megatron's rule (:mod:`.megatron_trials`) give a plan at once, and trials of published recipes
    (:mod:`.recipe_trials`), without Chimera's schedules and with them, other ones.  One of them is improved by a search of its
    setting, and of settings near it (:mod:`.near_plans`).  Then the planner without pipelines
    (:mod:`autoddl.search.planner`) finds the best plan of one stage, or that none can be better than what is known.  All are
    members of the joint space.  The best of them is the first incumbent, unless the user gives a better plan (:mod:`.start`).
2.  **Early incumbent.**  The most promising settings of the space give a good plan early.
3.  **The whole space** is searched for a better plan (:mod:`.search`).
4.  **Families.**  The families of schedules that people use are planned, each on its own (:mod:`.rivals`); before phase 3 if no
    plan is known.  Their plans are members of the space, too: a better one becomes the incumbent, and phase 3 goes on.  So no plan
    is slower than a row of its own table.  If the proof is finished, the row without a pipeline is searched to its end, too.

With the name of a paper, the plan is the one that the paper's planner chooses (:mod:`.paper_planners`); the other plans are
computed for comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, NO_PIPELINE
from autoddl.costmodel.stopping import Stop, StopRequestedError, TimedStop
from autoddl.costmodel.units import counted, format_bytes, format_memory_limit
from autoddl.search.options import AUTO
from autoddl.search.planner import InfeasibleError, NothingFoundError, Planned, StartPlan, make_plan

from ..planners import Clock
from .evaluation import Evaluation, evaluate_unpipelined
from .explorer import Explorer, setting_of
from .first_bounds import estimate_by_simulation
from .job import DEFAULT_TIME_LIMIT_S, PlanningJob, Report, job_of, no_report
from .least_memory import least_memory
from .megatron_trials import megatron_trials
from .meshes import has_all_divisions
from .near_plans import improve_near, near_settings, regrouped_settings
from .paper_planners import PLANNERS
from .recipe_trials import recipe_trials
from .result import Considered, JointOptions, PlanResult, Rival
from .rivals import RECIPE, RIVAL_FAMILIES, SHARE_OF_FAMILIES, cheaper, describe_stop, paper_plan, plan_rivals
from .search import Explored, Search
from .space import MAX_PASSES
from .start import Start, start_note, start_problem, started

__all__ = ["DEFAULT_TIME_LIMIT_S", "plan_jointly"]

#: Share of the time limit for the plan without a pipeline.
_SHARE_WITHOUT_PIPELINE = 0.2
#: Share of the time that is left after the proof for a better plan without a pipeline, which only the table shows.
_SHARE_OF_BETTER = 0.3
#: Share of the time limit for the trials by Megatron's rule, and the seconds of processor time that they get at least.
_SHARE_OF_TRIALS = 0.01
_LEAST_TIME_OF_TRIALS_S = 0.5
#: Share of the time limit for recipes.
_SHARE_OF_RECIPES = 0.12
#: Share of the time limit for the search near the best trial or recipe until it finds a better plan, the seconds of processor time
#: after which it ends if it has found one, and those that each setting gets at least.
_SHARE_NEAR, _MOST_TIME_NEAR_S, _LEAST_TIME_NEAR_S = 0.35, 6.0, 1.0
#: Part of its cost by which the first plan must become better for the search near it to go on: it is not the last one.
_LEAST_GAIN_NEAR = 0.005
#: Share of the time limit for the early incumbent of the whole space.
_SHARE_OF_INCUMBENT = 0.1
#: Share of the time limit for the least sufficient memory, if no plan fits.
_SHARE_OF_LEAST_MEMORY = 0.5


def plan_jointly(
    graph: LayerGraph,
    cluster: Cluster,
    options: JointOptions,
    report: Report = no_report,
    stop: Stop | None = None,
    start: Start | None = None,
) -> PlanResult:
    """Plan the pipeline and the strategies inside its stages together.

    Args:
        graph: The model.
        cluster: The devices and their network.
        options: Batch, limits, objective, and which pipelines are offered.
        report: Called with the incumbent's cost, the least open bound and the number of simulated plans.
        stop: Ends the search early with the best plan so far (see :func:`autoddl.search.planner.make_plan`).
        start: A plan of the user, which is the first incumbent if it is in the space; else a note says why it is not.

    Returns:
        The best plan, its lower bound, and the best plan of every family for comparison.

    Raises:
        StopRequestedError: the stop was requested before any plan was known.
        InfeasibleError: no plan fits the memory limit.
        UserError: an option is out of range, or does not apply to joint plans.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> from autoddl.search.planner import Options
    >>> from autoddl.zoo import resolve_model
    >>> graph, cluster = resolve_model("mlp:64,64"), load_cluster("gcp-a100").resized(1, 2)
    >>> result = plan_jointly(graph, cluster, JointOptions(Options(batch=8, micro_batch=8)))
    >>> result.status, result.configuration.schedule.num_stages
    ('optimal', 1)
    """
    began = time.perf_counter()
    _check(options)
    job = job_of(graph, cluster, options, report, stop)
    clock = Clock(job.time_limit_s, job.stop)
    first = None if start is None else started(job, start)
    is_alone = start is not None and not start.has_pipeline and not start_problem(start, graph, cluster)
    trial = near = recipe = None
    explorer = job.explorer()
    if options.pipeline == "auto":
        trial = _trial(job)
        recipe = _recipe(job)
        known = cheaper(trial, recipe, options.base.objective)
        with_chimera = _recipe(job, known, with_chimera=True)
        if known is not None or with_chimera is not None:
            near = cheaper(_near(job, explorer, known, with_chimera), with_chimera, options.base.objective)
    own = start.without_pipeline if start is not None and is_alone else None
    known_s = min((_cost(job, plan) for plan in (trial, near, recipe) if plan is not None), default=math.inf)
    unpipelined, error = _plan_without_pipeline(job, own, known_s)
    if options.pipeline != "auto":
        return _plan_by_paper(job, unpipelined, error, began)
    given = None if first is None else first.evaluation
    found = _plan_by_search(job, explorer, (trial, near, recipe, given), unpipelined, error, clock, began)
    if start is None or first is None:
        return found
    step_s = None if first.evaluation is None else first.evaluation.step_s
    return replace(found, notes=(start_note(start.name, first.fault, step_s), *found.notes))


def _check(options: JointOptions) -> None:
    base = options.base
    if options.pipeline != "auto" and options.pipeline not in PLANNERS:
        raise UserError(f"pipeline {options.pipeline!r} is not one of auto, {', '.join(PLANNERS)}")
    if options.pipeline == "wpipe" and not options.allow_stale:
        raise UserError(
            "pipeline wpipe is asynchronous: its first stages compute with older weights; add allow_stale=True"
        )
    if base.method != "exact":
        raise UserError(f"method {base.method!r} is for plans without a pipeline; joint plans are searched by exact")
    if base.executor != EAGER:
        raise UserError(f"executor={base.executor!r} is for plans without a pipeline: {NO_PIPELINE}")


# ---- First plans -------------------------------------------------------------------------------------------------------


def _trial(job: PlanningJob) -> Evaluation | None:
    """The best plan of the trials by Megatron's rule; None if none fits, or if plans are not compared by their steps."""
    if job.options.base.objective != "step":
        return None
    clock = Clock(max(_SHARE_OF_TRIALS * job.time_limit_s, _LEAST_TIME_OF_TRIALS_S), job.stop)
    first = megatron_trials(job, math.inf, clock)  # ends with the first plan that fits
    best = first and (megatron_trials(job, first.step_s, clock) or first)
    if best is not None:
        job.tell(best.step_s, 0.0, 1)
    return best


def _recipe(job: PlanningJob, other: Evaluation | None = None, with_chimera: bool = False) -> Evaluation | None:
    """The best recipe, with Chimera's schedules or without, if it is faster than the other one; None as for trials."""
    if job.options.base.objective != "step":
        return None
    clock = Clock(_SHARE_OF_RECIPES * job.time_limit_s, job.stop)
    best = recipe_trials(job, math.inf if other is None else other.step_s, clock, with_chimera)
    if best is not None:
        job.tell(best.step_s, 0.0, 1)
    return best


def _near(
    job: PlanningJob, explorer: Explorer, known: Evaluation | None, with_chimera: Evaluation | None
) -> Evaluation:
    """The best plan that is found near a first plan: in its setting, and in settings that differ from it in one respect.

    Args:
        job: The planning job.
        explorer: An explorer of the job.
        known, with_chimera: The best first plans without Chimera's schedules, and a faster one with them.  If there are both,
            better plans are expected near the one in whose setting an even cut is faster.
    """
    plans = [plan for plan in (known, with_chimera) if plan is not None]
    least_s = min(_cost(job, plan) for plan in plans)
    settings = [setting_of(plan.configuration) for plan in plans]
    estimates = [0.0] if len(plans) == 1 else [estimate_by_simulation(explorer, one, 0.0, least_s) for one in settings]
    plan = plans[estimates.index(min(estimates))]
    until_first_s = _SHARE_NEAR * job.time_limit_s
    return improve_near(
        explorer,
        plan,
        Clock(min(until_first_s, _MOST_TIME_NEAR_S), job.stop),
        _LEAST_TIME_NEAR_S,
        until_first_s,
        lambda better_s: job.tell(better_s, 0.0, 1),
        _LEAST_GAIN_NEAR,
        partial(near_settings, explorer, job.options.base.micro_batch is None),
        partial(regrouped_settings, explorer),
    )


def _plan_without_pipeline(
    job: PlanningJob, start: StartPlan | None, known_s: float
) -> tuple[Planned | None, UserError | None]:
    """The best plan without a pipeline, or the error that says why there is none.

    It may not be the best one if none can be better than the plan with a pipeline (:func:`_better_without_pipeline`).

    Args:
        job: The planning job.
        start: A plan of the user without a pipeline; None if there is none.
        known_s: Cost of the best known plan with a pipeline; infinite if none is known.

    Raises:
        StopRequestedError: The stop was requested before any plan was known.
    """
    stop = TimedStop(Clock(_SHARE_WITHOUT_PIPELINE * job.time_limit_s, job.stop))
    make = partial(make_plan, job.graph, job.cluster, job.options.base, stop=stop, start=start)
    try:
        try:
            return make(rival=known_s), None
        except NothingFoundError:
            return make(), None
    except StopRequestedError:
        if math.isinf(known_s):
            job.stop.check()
        return None, NothingFoundError("no plan was found within its share of the time limit")
    except UserError as error:
        return None, error


def _better_without_pipeline(job: PlanningJob, planned: Planned, known_s: float, clock: Clock) -> Planned:
    """The best plan without a pipeline, if the search for it ended because a plan of cost ``known_s`` is better; else the plan that
    it has found."""
    if planned.optimal or planned.lower_bound < known_s or job.stop.is_requested:
        return planned
    seconds = min(_SHARE_WITHOUT_PIPELINE * job.time_limit_s, _SHARE_OF_BETTER * clock.left_s)
    try:
        stop = TimedStop(Clock(seconds, job.stop))
        better = make_plan(job.graph, job.cluster, job.options.base, stop=stop, known=planned.baselines)
    except (StopRequestedError, UserError):
        return planned
    if better.result.cost > planned.result.cost:
        return planned
    return replace(better, lower_bound=max(better.lower_bound, min(planned.lower_bound, better.result.cost)))


def _as_one_stage(job: PlanningJob, planned: Planned | None) -> Evaluation | None:
    """The plan without a pipeline as a pipeline of one stage."""
    if planned is None:
        return None
    return evaluate_unpipelined(job.chain, job.cluster, planned.workload, planned.strategies)


# ---- The whole space ---------------------------------------------------------------------------------------------------


def _plan_by_search(
    job: PlanningJob,
    explorer: Explorer,
    first_plans: tuple[Evaluation | None, Evaluation | None, Evaluation | None, Evaluation | None],
    unpipelined: Planned | None,
    error: UserError | None,
    clock: Clock,
    began: float,
) -> PlanResult:
    """The best plan of the whole space.

    Args:
        job: The planning job.
        explorer: An explorer of the job.
        first_plans: The best plan of the trials by Megatron's rule, the best one near it, the best recipe, and a plan of the user
            that is in the space; None for those that do not exist.
        unpipelined: The plan without a pipeline, if there is one.
        error: Why there is no plan without a pipeline.
        clock: The time limit of the whole search.
        began: When planning began, in seconds of ``time.perf_counter``.
    """
    one_stage = _as_one_stage(job, unpipelined)
    # Phase 1: the best one of the first plans is the first incumbent.
    trial, _, recipe, _ = first_plans
    first = [plan for plan in (one_stage, *first_plans) if plan is not None]
    best = min(first, key=partial(_cost, job), default=None)
    if best is not None:
        job.tell(_cost(job, best), 0.0, 0)
    # Phase 2: an early incumbent, by the most promising settings.
    settings = explorer.settings(
        job.options.base.micro_batch, job.options.allow_stale, lambda spec: spec.num_workers > 1
    )
    known = None if best is None else setting_of(best.configuration)
    search = Search(explorer, settings, math.inf if best is None else _cost(job, best), job.tell, known=known)
    is_good = best is not None and best is not trial
    best = search.find_incumbent(clock, _SHARE_OF_INCUMBENT, is_good) or best
    plan_families = partial(_plan_families, job, error, explorer, (trial, recipe), clock)
    rivals: list[Rival] | None = None
    if best is None:
        # A family may have a plan where the whole space has too many settings to find one.
        rivals, best = plan_families(unpipelined, one_stage, None, 0.0)
    if best is None:
        # Perhaps no plan fits.  The least memory of a plan proves that sooner than a search for plans.
        least_bytes, is_proven = _least_memory(job, explorer)
        if least_bytes > job.limit_bytes * (1 + 1e-9) and is_proven:
            raise _infeasible(job, least_bytes, is_proven, error)
    # Phase 3: the whole space, with time left for the families.
    of_families_s = 0.0 if rivals is not None else SHARE_OF_FAMILIES * job.time_limit_s
    known_s = math.inf if best is None else _cost(job, best)
    explored = search.resume(known_s, Clock(clock.left_s - of_families_s, job.stop))
    best = cheaper(best, explored.best, job.options.base.objective)
    # Phase 4: the best plan of every family.
    if rivals is None:
        known_s = math.inf if best is None else _cost(job, best)
        if unpipelined is not None and explored.is_finished:
            unpipelined = _better_without_pipeline(job, unpipelined, known_s, clock)
            one_stage = _as_one_stage(job, unpipelined)
        job.tell(known_s, _lower_bound(job, known_s, explored, unpipelined, error), explored.num_simulated)
        rivals, best = plan_families(unpipelined, one_stage, best, explored.lower_bound_s)
        if best is not None and _cost(job, best) < known_s:
            explored = search.resume(_cost(job, best), clock)
            best = cheaper(best, explored.best, job.options.base.objective)
    if best is None:
        job.stop.check()
        raise _nothing_found(job, explorer, explored, clock, error)
    return _result(job, explorer, best, explored, unpipelined, error, rivals, began)


def _result(
    job: PlanningJob,
    explorer: Explorer,
    best: Evaluation,
    explored: Explored,
    unpipelined: Planned | None,
    error: UserError | None,
    rivals: Sequence[Rival],
    began: float,
) -> PlanResult:
    """The best plan of the whole space with its bound; arguments as of :func:`_plan_by_search`.

    Args:
        best: The best plan.
        explored: What is known of plans with a pipeline.
        rivals: The best plans of the families.
    """
    cost = _cost(job, best)
    lower = _lower_bound(job, cost, explored, unpipelined, error)
    optimal = lower >= cost * (1 - 1e-9)
    notes: tuple[str, ...] = ()
    if job.options.allow_stale and job.chain.shares_weights:
        notes = ("layers share a weight, so asynchronous schedules are left out",)
    return PlanResult(
        graph=job.graph,
        cluster=job.cluster,
        options=job.options,
        memory_limit_bytes=job.limit_bytes,
        evaluation=best,
        lower_bound_s=cost if optimal else lower,
        optimal=optimal,
        considered=_considered(job, explored, explorer, unpipelined),
        rivals=tuple(_with_bound_of_space(job, rival, explored) for rival in rivals),
        search_s=time.perf_counter() - began,
        notes=notes,
        is_interrupted=job.stop.is_requested,
    )


def _nothing_found(
    job: PlanningJob, explorer: Explorer, explored: Explored, clock: Clock, error: UserError | None
) -> UserError:
    """The error that says why there is no plan; arguments as those of :func:`_plan_by_search`."""
    if explored.is_finished:
        return _infeasible(job, *_least_memory(job, explorer), error)
    reason = "; some settings stay undecided: raise memory_limit_bytes"
    if clock.is_over:
        reason = f" within {job.time_limit_s:g} s; raise time_limit_s"
    return NothingFoundError(f"no plan of {job.graph.name} that fits was found{reason}")


def _plan_families(
    job: PlanningJob,
    error: UserError | None,
    explorer: Explorer,
    tried: tuple[Evaluation | None, Evaluation | None],
    clock: Clock,
    unpipelined: Planned | None,
    one_stage: Evaluation | None,
    best: Evaluation | None,
    bound_s: float,
) -> tuple[list[Rival], Evaluation | None]:
    """The rows of all families, and the best plan of these and of ``best``.

    The whole space has the lower bound ``bound_s``; the other arguments are those of :func:`.rivals.plan_rivals`.
    """
    rivals: list[Rival] = []
    for rival, plan in plan_rivals(job, unpipelined, one_stage, error, explorer, tried, clock, best):
        rivals.append(rival)
        if plan is not None and (best is None or _cost(job, plan) < _cost(job, best)):
            best = plan
            job.tell(_cost(job, best), bound_s, len(rivals))
    return rivals, best


def _with_bound_of_space(job: PlanningJob, rival: Rival, explored: Explored) -> Rival:
    """The rival with the bound of the whole space, if that is greater than its own.  A family is part of the space, so the bound
    holds for the family."""
    titles = {RECIPE, *(family.title for family in RIVAL_FAMILIES)}
    is_pipeline = rival.name in titles and rival.infeasible is None
    if not is_pipeline or job.options.base.objective != "step":
        return rival
    return replace(rival, lower_bound_s=max(rival.lower_bound_s or 0.0, min(explored.lower_bound_s, rival.step_s)))


def _cost(job: PlanningJob, plan: Evaluation) -> float:
    return plan.cost(job.options.base.objective)


def _lower_bound(
    job: PlanningJob, cost: float, explored: Explored, unpipelined: Planned | None, error: UserError | None
) -> float:
    """Lower bound on the cost of all plans, at most ``cost``; the other arguments are those of :func:`_plan_by_search`."""
    lower = min(explored.lower_bound_s, _bound_without_pipeline(unpipelined, error))
    # A search that was stopped early may have no bound of its own; the compute time alone is one.
    return min(cost, max(lower, job.ideal_s))


def _bound_without_pipeline(unpipelined: Planned | None, error: UserError | None) -> float:
    """Lower bound on the cost of all plans without a pipeline; infinite if there is no such plan."""
    if unpipelined is not None:
        return unpipelined.lower_bound
    return 0.0 if isinstance(error, NothingFoundError) else math.inf


def _considered(job: PlanningJob, explored: Explored, explorer: Explorer, unpipelined: Planned | None) -> Considered:
    base = job.options.base
    sizes = "every micro-batch" if base.micro_batch is None else "the given micro-batch"
    schedules = "every schedule, asynchronous ones too" if job.options.allow_stale else "every synchronous schedule"
    devices = "workers of equal rectangles of devices, or of any that tile the cluster"
    if not has_all_divisions(job.cluster):
        devices = "workers of equal rectangles of devices, or equal but for the first and the last"
    recomputations = " / ".join(job.recomputations)
    summa = ", Summa meshes too" if base.summa else " without Summa meshes (summa=True includes them)"
    tied = (
        "a choice for every layer"
        if base.untied
        else "one choice for equal layers of a stage (untied=True: one for each)"
    )
    images = "; images pass between stages as whole rows" if any(layer.is_image for layer in job.graph.layers) else ""
    num_unpipelined = 0 if unpipelined is None else len(unpipelined.candidates)
    return Considered(
        space=f"{devices} (bidirectional schedules: equal); {schedules} of up to {MAX_PASSES:,} passes, {sizes}, "
        f"every cut, recomputation {recomputations}, exact SBP inside each stage (of whole samples where passes are halved{images})"
        f"{summa}, {_zero_text(job)}{tied}",
        configurations=explored.num_configurations + num_unpipelined,
        settings=explored.num_settings + num_unpipelined,
        ruled_out_by_memory=explored.num_impossible,
        ruled_out_by_bound=explored.num_settings - explored.num_impossible - len(explored.attempted),
        simulated=explored.num_simulated,
        stage_searches=explorer.num_searches,
    )


def _zero_text(job: PlanningJob) -> str:
    """The stages of ZeRO in the space, and what is left out of them; empty if all layers divide the same."""
    floor = job.options.base.zero
    shared = "of weights that layers share" if job.chain.shares_weights else ""
    if floor == AUTO:
        if not any(job.pricing.choices.shardings):
            return "no ZeRO in pipelines, "
        at_most = f"{shared}, and " if shared else ""
        return f"ZeRO 0 to 3 for every layer (at most 1 {at_most}where backward passes are split or halved), "
    if floor in (0, 1):
        return ""
    at_most = f"1 {shared}; " if shared else ""
    return f"ZeRO {floor} ({at_most}without schedules that split or halve backward passes), "


def _least_memory(job: PlanningJob, explorer: Explorer) -> tuple[float, bool]:
    """Bytes per device that some plan needs at most, and whether no plan needs less."""
    settings = explorer.settings(job.options.base.micro_batch, job.options.allow_stale, lambda spec: True)
    return least_memory(explorer, settings, Clock(_SHARE_OF_LEAST_MEMORY * job.time_limit_s, job.stop))


def _infeasible(job: PlanningJob, least_bytes: float, is_proven: bool, error: UserError | None) -> UserError:
    """The error that no plan fits, with the least memory limit under which a plan would fit."""
    if not math.isfinite(least_bytes):
        return error or UserError(f"no stage of {job.graph.name} divides over the devices of {job.cluster.name}")
    limit = format_memory_limit(least_bytes)
    sufficient = f"the smallest memory that would do is {limit}" if is_proven else f"{limit} would do"
    return InfeasibleError(
        f"no plan of {job.graph.name} fits {format_bytes(job.limit_bytes)} per device on "
        f"{counted(job.cluster.num_devices, 'device')}, with a pipeline or without; {sufficient}"
    )


# ---- The planners of papers --------------------------------------------------------------------------------------------


def _plan_by_paper(job: PlanningJob, unpipelined: Planned | None, error: UserError | None, began: float) -> PlanResult:
    """The plan that a paper's planner chooses; the arguments are those of :func:`_plan_by_search`."""
    name, clock = job.options.pipeline, Clock(job.time_limit_s, job.stop)
    assert name is not None
    try:
        best = paper_plan(job, name, clock)
    except UserError as fault:
        raise type(fault)(f"{PLANNERS[name]}'s planner: {fault}") from None
    one_stage = _as_one_stage(job, unpipelined)
    considered = Considered(
        space=f"what {PLANNERS[name]}'s planner chooses from: data-parallel stages",
        configurations=0,
        settings=0,
        ruled_out_by_memory=0,
        ruled_out_by_bound=0,
        simulated=1,
        stage_searches=0,
    )
    families = plan_rivals(job, unpipelined, one_stage, error, job.explorer(), (None, None), clock, best)
    return PlanResult(
        graph=job.graph,
        cluster=job.cluster,
        options=job.options,
        memory_limit_bytes=job.limit_bytes,
        evaluation=best,
        lower_bound_s=min(job.ideal_s, _cost(job, best)),
        optimal=False,
        considered=considered,
        rivals=tuple(rival for rival, _ in families),
        search_s=time.perf_counter() - began,
        notes=(f"the plan is the best that {PLANNERS[name]}'s planner found{describe_stop(clock)}",)
        if clock.stopped
        else (),
        is_interrupted=job.stop.is_requested,
    )
