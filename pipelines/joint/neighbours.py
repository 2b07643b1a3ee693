"""Uniform configurations near a given one, and the best one of all.

**Single changes** of a configuration move a factor of 2 between two of the degrees, double or halve its micro-batch or its
interleaving, or replace one of its words (recomputation, schedule, sequence parallelism, attention, ZeRO stage).

**The best uniform configuration** is searched over tensor parallel degree, stages, data parallel degree, micro-batch, interleaving
and recomputation.  Layouts are evaluated in the order of a lower bound on their step, arithmetic and bubble,

    arithmetic (1 + (p - 1) / (v N))     for p stages, v chunks per stage and N micro-batches,

until the bound is not below the best step; of each layout, ways of recomputation in the order of their time, until one fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.workload import ACTIVATIONS, ATTENTIONS, RECOMPUTATIONS, Workload

from .evaluation import Evaluation, evaluate
from .job import PlanningJob
from .partition import Chain
from .space import MAX_PASSES
from .uniform import INTERLEAVED, SCHEDULES, UniformLayout, uniform_configuration

__all__ = ["BestUniform", "Change", "best_uniform", "single_changes"]

#: Attributes of a layout that a factor of 2 moves between.
_DEGREES = {"tp": "tensor_parallel", "pp": "num_stages", "dp": "data_parallel"}
#: Ways of recomputation of Megatron-LM.
_MEGATRON_RECOMPUTATIONS = ("none", "selective", "blocks")
_WORDS = {
    "recompute": RECOMPUTATIONS,
    "activations": ACTIVATIONS,
    "attention": ATTENTIONS,
    "zero": (0, 1),
}
#: Chunks per stage that are tried.
_INTERLEAVINGS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Change:
    """A single change of a uniform configuration.

    Attributes:
        name: what changes, such as ``pp 12 -> 6, dp 4 -> 8``.
        layout, workload: the changed configuration.
        step_s: seconds per step.
        memory_bytes: peak memory of the fullest device.
    """

    name: str
    layout: UniformLayout
    workload: Workload
    step_s: float
    memory_bytes: float


def single_changes(
    chain: Chain, cluster: Cluster, layout: UniformLayout, workload: Workload, limit_bytes: float
) -> tuple[Change, ...]:
    """Return the single changes of a configuration with which it fits in memory, the fastest first.

    Args:
        chain: The model as a chain of units.
        cluster: The devices and their network.
        layout, workload: The configuration; the micro-batch is that over all replicas.
        limit_bytes: Memory limit per device.
    """
    changes = []
    for name, changed, words in _changes(layout, workload):
        try:
            plan = _evaluated(chain, cluster, changed, words)
        except UserError:  # it does not divide the model, the cluster or the batch
            continue
        if plan is not None and plan.memory_bytes <= limit_bytes:
            changes.append(Change(name, changed, words, plan.step_s, plan.memory_bytes))
    return tuple(sorted(changes, key=lambda change: change.step_s))


def _evaluated(chain: Chain, cluster: Cluster, layout: UniformLayout, workload: Workload) -> Evaluation | None:
    """The configuration with its figures; None if its schedule has too many passes to be simulated."""
    if layout.num_stages * layout.interleave * workload.num_micro_batches > MAX_PASSES:
        return None
    return evaluate(chain, cluster, uniform_configuration(chain, cluster, layout, workload))


def _changes(layout: UniformLayout, workload: Workload) -> Iterator[tuple[str, UniformLayout, Workload]]:
    """Name, layout and workload of every single change that is not refused at once."""
    each = workload.micro_batch // layout.data_parallel  # samples per replica
    for source, target in permutations(_DEGREES, 2):
        before, after = getattr(layout, _DEGREES[source]), getattr(layout, _DEGREES[target])
        if before % 2 == 0:
            name = f"{source} {before} -> {before // 2}, {target} {after} -> {2 * after}"
            degrees = {_DEGREES[source]: before // 2, _DEGREES[target]: 2 * after}
            yield from _valid(name, layout, workload, each, **degrees)
    for size in (2 * each, each // 2):
        if size and (size > each or each % 2 == 0):
            yield from _valid(f"micro-batch {each} -> {size}", layout, workload, size)
    chunks = layout.interleave
    for count in (2 * chunks, chunks // 2):
        if count and (count > chunks or chunks % 2 == 0):
            yield from _valid(f"interleave {chunks} -> {count}", layout, workload, each, interleave=count)
    for schedule in SCHEDULES if layout.num_stages > 1 else ():
        if schedule != layout.schedule and (chunks == 1 or schedule in INTERLEAVED):
            yield from _valid(f"schedule {layout.schedule} -> {schedule}", layout, workload, each, schedule=schedule)
    for word, choices in _WORDS.items():
        now = getattr(workload, word)
        for choice in choices:
            if choice != now and not (word == "activations" and layout.tensor_parallel == 1):
                yield f"{word} {now} -> {choice}", layout, replace(workload, **{word: choice})


def _valid(
    name: str, layout: UniformLayout, workload: Workload, each: int, **changed: int | str
) -> Iterator[tuple[str, UniformLayout, Workload]]:
    """The changed layout with micro-batches of ``each`` samples per replica; nothing if these do not divide the batch."""
    try:
        moved = replace(layout, **changed)  # type: ignore[arg-type]
        yield name, moved, replace(workload, micro_batch=each * moved.data_parallel)
    except UserError:
        return


# ---- The best uniform configuration -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BestUniform:
    """The best uniform configuration that was found.

    Attributes:
        layout, workload: the configuration; with the way of recomputation in the workload.
        evaluation: its figures.
        num_evaluated: number of configurations that were evaluated.
        is_finished: whether no other uniform configuration can be faster; False if the time limit ended the search.
    """

    layout: UniformLayout
    workload: Workload
    evaluation: Evaluation
    num_evaluated: int
    is_finished: bool


def best_uniform(job: PlanningJob, deadline: Deadline) -> BestUniform | None:
    """Search for the best uniform configuration that fits (see the module's docstring).

    Args:
        job: The planning job: model, cluster, workload and memory limit.
        deadline: When to end with the best configuration so far.

    Returns:
        The best configuration; None if none fits, or none was found in time.
    """
    best: BestUniform | None = None
    limit_s, count, is_finished = math.inf, 0, True
    ways = [way for way in job.recomputations if way in _MEGATRON_RECOMPUTATIONS]
    for bound, layout, workload in sorted(_layouts(job), key=lambda one: one[0]):
        if bound >= limit_s:
            break
        if deadline.is_over:
            is_finished = False
            break
        for recompute in ways:
            words = replace(workload, recompute=recompute)
            try:
                plan = _evaluated(job.chain, job.cluster, layout, words)
            except UserError:  # it does not divide the model or the cluster
                break
            if plan is None:
                break
            count += 1
            if plan.memory_bytes <= job.limit_bytes:
                if plan.step_s < limit_s:
                    best, limit_s = BestUniform(layout, words, plan, count, True), plan.step_s
                break
    return None if best is None else replace(best, num_evaluated=count, is_finished=is_finished)


def _layouts(job: PlanningJob) -> Iterator[tuple[float, UniformLayout, Workload]]:
    """Bound on the step [s], layout and workload of all uniform configurations whose states may fit; recomputation is open."""
    devices, batch = job.cluster.num_devices, job.workload.batch
    per_parameter = job.workload.itemsize + job.workload.gradient_itemsize if job.workload.zero else job.workload.bytes_per_parameter
    state_bytes = job.graph.num_parameters * per_parameter
    for model_parallel in divisors(devices):
        if state_bytes > job.limit_bytes * model_parallel or batch % (devices // model_parallel):
            continue
        data_parallel = devices // model_parallel
        for tensor_parallel in divisors(model_parallel):
            if tensor_parallel > job.cluster.devices_per_node:
                continue
            stages = model_parallel // tensor_parallel
            for chunks in _INTERLEAVINGS:
                if stages * chunks > job.chain.num_units or (chunks > 1 and stages == 1):
                    continue
                layout = UniformLayout(tensor_parallel, stages, data_parallel, chunks)
                for each in divisors(batch // data_parallel):
                    workload = replace(job.workload, micro_batch=each * data_parallel)
                    count = workload.num_micro_batches
                    if chunks == 1 or count % stages == 0:
                        yield job.arithmetic_s * (1 + (stages - 1) / (chunks * count)), layout, workload
