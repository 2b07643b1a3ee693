"""Trials of recipes: the uniform pipelines that people publish, as first plans of a search.

A recipe has one tensor parallel degree t inside nodes, p stages of v chunks, d replicas and, for a mixture, e parts of its experts
(:mod:`.uniform`), with optimizer states divided among replicas and inputs gathered again, if these are on offer (Megatron-LM's
distributed optimizer and sequence parallelism).  Nothing is recomputed if that fits, else as few blocks as possible.  All recipes
are members of the joint space.

The same degrees with v = 1 also make recipes with Chimera's schedules, of f pipelines and every concatenation.

Recipes are estimated (:mod:`.recipe_estimates`) in the order of about the least that their steps take,

    arithmetic of a step x (1 + (p - 1) / (v N))        for N micro-batches, with Chimera p / f - 1 in place of (p - 1) / v,

as long as this is near the best estimate, and evaluated in the order of their estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import Deadline

from .configuration import Configuration, PipelineSchedule, StageChoice
from .evaluation import Evaluation, evaluate
from .fewer_blocks import with_fewer_blocks
from .job import PlanningJob
from .recipe_estimates import RecipeEstimates, with_choices
from .space import NUM_GROUPS, SOME_BLOCKS, chimera_schedules
from .uniform import UniformLayout, expert_parts, uniform_configuration

__all__ = ["recipe_trials"]

#: Largest number of evaluated plans.
_MAX_PLANS = 24
#: Largest number of passes of micro-batches through chunks of an evaluated plan, which limits the time of its simulation.
_MAX_PASSES = 8192
#: Micro-batches of a replica.
_MICRO_BATCHES = (1, 2, 4, 8)
#: Part of the time for the estimates.
_SHARE_OF_ESTIMATES = 0.5
#: Recipes are estimated, and evaluated, as long as their bounds, and estimates, are below this multiple of the best one.
_NEAR = 1.05
#: Recipes are evaluated if their estimated memory is below this multiple of the limit.
_MEMORY_NEAR = 1.05


@dataclass(frozen=True)
class _Recipe:
    """A recipe.

    Attributes:
        layout: Its degrees.
        micro_batch: Samples of a pass over all replicas.
        num_micro_batches: Number of passes of a step.
        ideal_s: About the least that its step takes [s].
        chimera: Its schedule, if that is one of Chimera's; None for that of the layout.
    """

    layout: UniformLayout
    micro_batch: int
    num_micro_batches: int
    ideal_s: float
    chimera: PipelineSchedule | None = None


@dataclass(frozen=True)
class _Trial:
    """A recipe with one way of recomputation, and the estimate of its step [s]."""

    recipe: _Recipe
    recompute: str
    regathers: bool
    step_s: float


def recipe_trials(
    job: PlanningJob, known_s: float, deadline: Deadline, with_chimera: bool = False
) -> Evaluation | None:
    """Evaluate recipes, and return the best plan that fits the memory limit and is faster than ``known_s``; None without.

    Args:
        job: The planning job.
        known_s: Step of the best plan known so far; infinite if none is known.
        deadline: When to end the trials.
        with_chimera: Whether the recipes are those with Chimera's schedules, or those without.
    """
    best: Evaluation | None = None
    num_plans = 0
    finished: set[_Recipe] = set()
    for trial in _trials(job, known_s, deadline.part(_SHARE_OF_ESTIMATES), with_chimera):
        if deadline.is_over or num_plans >= _MAX_PLANS or trial.step_s >= _NEAR * known_s:
            break
        if trial.recipe in finished:
            continue
        try:
            plan = evaluate(job.chain, job.cluster, _configuration(job, trial))
        except UserError:  # the schedule does not exist
            finished.add(trial.recipe)
            continue
        num_plans += 1
        if plan.memory_bytes > job.limit_bytes:
            continue
        if trial.recompute == "blocks":
            plan = _with_fewest_blocks(job, plan)
        elif not trial.regathers:
            finished.add(trial.recipe)  # all other ways are slower
        if plan.step_s < known_s:
            best, known_s = plan, plan.step_s
    return best


def _trials(job: PlanningJob, known_s: float, deadline: Deadline, with_chimera: bool) -> list[_Trial]:
    """The recipes that may be faster than ``known_s``, with all ways of recomputation that may fit, the fastest first.

    Args:
        job: The planning job.
        known_s: Step of the best plan known so far.
        deadline: When to end the estimates.
        with_chimera: As of :func:`recipe_trials`.
    """
    recipes = _with_chimera(_recipes(job, (1,))) if with_chimera else _recipes(job, (1, *NUM_GROUPS))
    estimates, trials, least_s = RecipeEstimates(job), list[_Trial](), known_s
    for recipe in sorted(recipes, key=lambda one: one.ideal_s):
        if deadline.is_over or recipe.ideal_s >= min(known_s, _NEAR * least_s):
            break
        try:
            ways = [
                way for regathers in _ways(job, recipe.layout) for way in _estimated(job, estimates, recipe, regathers)
            ]
        except UserError:  # the degrees do not divide some layer
            continue
        trials += ways
        least_s = min([least_s, *(trial.step_s for trial in ways)])
    return sorted(trials, key=lambda trial: trial.step_s)


def _estimated(job: PlanningJob, estimates: RecipeEstimates, recipe: _Recipe, regathers: bool) -> list[_Trial]:
    """A recipe without recomputation, and with as many recomputed blocks as the memory asks for, as far as these may fit.

    Raises:
        UserError: the degrees do not fit the model or the cluster.
    """
    trials, limit, workload = list[_Trial](), job.limit_bytes, replace(job.workload, micro_batch=recipe.micro_batch)
    estimate = partial(estimates.estimate, recipe.layout, regathers=regathers, chimera=recipe.chimera)
    none = estimate(replace(workload, recompute="none"))
    if "none" in job.recomputations and none.memory_bytes < _MEMORY_NEAR * limit:
        trials.append(_Trial(recipe, "none", regathers, none.step_s))
    is_needed = "none" not in job.recomputations or none.memory_bytes * _MEMORY_NEAR > limit
    if not is_needed or not job.tries("blocks"):
        return trials
    blocks = estimate(replace(workload, recompute="blocks"))
    if blocks.memory_bytes < _MEMORY_NEAR * limit:
        part = 1.0
        if SOME_BLOCKS in job.recomputations:
            saved_bytes = none.memory_bytes - blocks.memory_bytes
            part = min(1.0, max(0.0, none.memory_bytes - limit) / saved_bytes) if saved_bytes > 0 else 0.0
        trials.append(_Trial(recipe, "blocks", regathers, none.step_s + part * (blocks.step_s - none.step_s)))
    return trials


def _with_fewest_blocks(job: PlanningJob, plan: Evaluation) -> Evaluation:
    """The plan with fewer recomputed blocks, until no fewer fit: one pass leaves memory of workers with several stages unused."""
    while (better := with_fewer_blocks(job.chain, plan, job.limit_bytes, job.recomputations)) is not plan:
        plan = better
    return plan


def _with_chimera(recipes: Iterable[_Recipe]) -> Iterator[_Recipe]:
    """The recipes with Chimera's schedules for those of one chunk per stage."""
    for recipe in recipes:
        depth, replicas = recipe.layout.num_stages, recipe.layout.data_parallel
        count = recipe.num_micro_batches
        for spec in chimera_schedules(depth, count):
            if dict(spec.options)["concatenation"] == "halving" and recipe.micro_batch // replicas % 2:
                continue  # halved passes are of whole samples
            idle, chimera_idle = depth - 1, depth / spec.num_pipelines - 1
            ideal_s = recipe.ideal_s * (count + chimera_idle) / (count + idle)
            yield replace(recipe, ideal_s=ideal_s, chimera=spec)


def _recipes(job: PlanningJob, chunks: Sequence[int]) -> Iterator[_Recipe]:
    """All recipes of the cluster and the batch, without Chimera, with these numbers of chunks per stage."""
    cluster, batch, given = job.cluster, job.workload.batch, job.options.base.micro_batch
    for t in divisors(cluster.devices_per_node):
        for p in divisors(cluster.num_devices // t) if cluster.num_devices % t == 0 else ():
            d = cluster.num_devices // (t * p)
            parts = expert_parts(job.graph, d)
            for v in chunks:
                if p == 1 or p * v > job.chain.num_units:
                    continue
                for b in _MICRO_BATCHES:
                    count, rest = divmod(batch, b * d)
                    is_whole = not rest and (v == 1 or count % p == 0) and count * p * v <= _MAX_PASSES
                    if not is_whole or given not in (None, b * d):
                        continue
                    ideal_s = job.arithmetic_s * (1 + (p - 1) / (v * count))
                    for e in parts[1:] or parts:  # undivided experts are not a recipe
                        layout = UniformLayout(t, p, d, v, expert_parallel=e)
                        yield _Recipe(layout, b * d, count, ideal_s)


def _ways(job: PlanningJob, layout: UniformLayout) -> tuple[bool, ...]:
    """Whether inputs are gathered again, the faster way first."""
    return (False, True) if job.pricing.choices.regathers and layout.tensor_parallel > 1 else (False,)


def _configuration(job: PlanningJob, trial: _Trial) -> Configuration:
    workload = replace(job.workload, micro_batch=trial.recipe.micro_batch, recompute=trial.recompute)
    configuration = uniform_configuration(job.chain, job.cluster, trial.recipe.layout, workload)
    first, stages = 0, list[StageChoice]()
    for choice in configuration.stages:
        graph = job.chain.stage(first, first + choice.num_units).graph
        stages.append(replace(choice, strategies=with_choices(job, graph, dict(choice.strategies), trial.regathers)))
        first += choice.num_units
    schedule = trial.recipe.chimera or configuration.schedule
    unchanged = replace(workload, recompute="none")
    return replace(configuration, schedule=schedule, workload=unchanged, stages=tuple(stages))
