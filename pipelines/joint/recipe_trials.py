"""Trials of recipes: the uniform pipelines that people publish, as first plans of a search.

A recipe has one tensor parallel degree t inside nodes, p stages of v chunks, d replicas and, for a mixture, e parts of its experts
(:mod:`.uniform`), with optimizer states divided among replicas and inputs gathered again, if these are on offer (Megatron-LM's
distributed optimizer and sequence parallelism).  Recipes are evaluated in the order of a bound on their steps:

    arithmetic of a step x (1 + (p - 1) / (v N))        for N micro-batches, with a little more for each doubling of t

Nothing is recomputed if that fits, else as few blocks as possible.  All recipes are members of the joint space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.strategy import Strategy
from autoddl.search.baselines import divided

from .configuration import Configuration, StageChoice
from .evaluation import Evaluation, evaluate
from .fewer_blocks import with_fewer_blocks
from .job import PlanningJob
from .partition import Chain
from .space import NUM_GROUPS, SOME_BLOCKS
from .uniform import UniformLayout, expert_parts, uniform_configuration

__all__ = ["recipe_trials"]

#: Largest number of evaluated plans.
_MAX_PLANS = 160
#: Largest number of passes of micro-batches through chunks of an evaluated plan, which limits the time of its simulation.
_MAX_PASSES = 8192
#: Micro-batches of a replica.
_MICRO_BATCHES = (1, 2, 4, 8)
#: By how much a doubling of the tensor parallel degree is taken to lengthen a step, to order the trials.
_COST_OF_DOUBLING = 0.03


@dataclass(frozen=True)
class _Recipe:
    """A recipe.

    Attributes:
        layout: Its degrees.
        micro_batch: Samples of a pass over all replicas.
        ideal_s: Bound on its step [s].
        order: Recipes of lower order are tried first.
    """

    layout: UniformLayout
    micro_batch: int
    ideal_s: float
    order: float


def recipe_trials(job: PlanningJob, known_s: float, deadline: Deadline) -> Evaluation | None:
    """Evaluate recipes, and return the best plan that fits the memory limit and is faster than ``known_s``; None without.

    Args:
        job: The planning job.
        known_s: Step of the best plan known so far; infinite if none is known.
        deadline: When to end the trials.
    """
    best: Evaluation | None = None
    num_plans = 0
    # Per layout the micro-batch that does not fit in any way; larger ones need at least as much memory.
    too_large: dict[UniformLayout, int] = {}
    for recipe in sorted(_recipes(job), key=lambda one: one.order):
        if deadline.is_over or num_plans >= _MAX_PLANS:
            break
        if recipe.ideal_s >= known_s or recipe.micro_batch > too_large.get(recipe.layout, recipe.micro_batch):
            continue
        is_too_large = True
        for recompute, regathers in _ways(job, recipe.layout):
            num_plans += 1
            try:
                plan = evaluate(job.chain, job.cluster, _configuration(job, recipe, recompute, regathers))
            except UserError:  # the degrees do not divide some layer
                is_too_large = False
                break
            if plan.memory_bytes > job.limit_bytes:
                continue
            is_too_large = False
            if recompute == "blocks":
                plan = _with_fewest_blocks(job, plan)
            if plan.step_s < known_s:
                best, known_s = plan, plan.step_s
            if recompute == "none":
                break
        if is_too_large:
            too_large[recipe.layout] = recipe.micro_batch
    return best


def _with_fewest_blocks(job: PlanningJob, plan: Evaluation) -> Evaluation:
    """The plan with fewer recomputed blocks, until no fewer fit: one pass leaves memory of workers with several stages unused."""
    while (better := with_fewer_blocks(job.chain, plan, job.limit_bytes, job.recomputations)) is not plan:
        plan = better
    return plan


def _recipes(job: PlanningJob) -> Iterator[_Recipe]:
    """All recipes of the cluster and the batch."""
    cluster, batch, given = job.cluster, job.workload.batch, job.options.base.micro_batch
    for t in divisors(cluster.devices_per_node):
        for p in divisors(cluster.num_devices // t) if cluster.num_devices % t == 0 else ():
            d = cluster.num_devices // (t * p)
            parts = expert_parts(job.graph, d)
            for v in (1, *NUM_GROUPS):
                if p == 1 or p * v > job.chain.num_units:
                    continue
                for b in _MICRO_BATCHES:
                    count, rest = divmod(batch, b * d)
                    is_whole = not rest and (v == 1 or count % p == 0) and count * p * v <= _MAX_PASSES
                    if not is_whole or given not in (None, b * d):
                        continue
                    ideal_s = job.arithmetic_s * (1 + (p - 1) / (v * count))
                    order = ideal_s * (1 + _COST_OF_DOUBLING * math.log2(t))
                    for e in parts[1:] or parts:  # undivided experts are not a recipe
                        layout = UniformLayout(t, p, d, v, expert_parallel=e)
                        yield _Recipe(layout, b * d, ideal_s, order)


def _ways(job: PlanningJob, layout: UniformLayout) -> Iterator[tuple[str, bool]]:
    """Ways of recomputation, with whether inputs are gathered again, the fastest first."""
    regathers = job.pricing.choices.regathers and layout.tensor_parallel > 1
    if "none" in job.recomputations:
        yield "none", False
        if regathers:
            yield "none", True
    if SOME_BLOCKS in job.recomputations or "blocks" in job.recomputations:
        yield "blocks", False
        if regathers:
            yield "blocks", True


def _configuration(job: PlanningJob, recipe: _Recipe, recompute: str, regathers: bool) -> Configuration:
    workload = replace(job.workload, micro_batch=recipe.micro_batch, recompute=recompute)
    configuration = uniform_configuration(job.chain, job.cluster, recipe.layout, workload)
    first, stages = 0, []
    for choice in configuration.stages:
        stages.append(_with_choices(job.chain, first, choice, 1 in job.pricing.choices.shardings, regathers))
        first += choice.num_units
    return replace(configuration, workload=replace(workload, recompute="none"), stages=tuple(stages))


def _with_choices(chain: Chain, first: int, choice: StageChoice, divides_states: bool, regathers: bool) -> StageChoice:
    """A stage, which begins with unit ``first``, with divided states and inputs that are gathered again."""
    graph = chain.stage(first, first + choice.num_units).graph
    strategies = divided(graph, choice.strategies, 1) if divides_states else dict(choice.strategies)

    def with_regathering(name: str, strategy: Strategy) -> Strategy:
        is_split = strategy.p1 > 1 and kind_of(graph[name].kind).gathers_inputs
        return replace(strategy, regathers=True) if regathers and is_split else strategy

    return replace(choice, strategies={name: with_regathering(name, one) for name, one in strategies.items()})
