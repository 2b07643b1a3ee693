"""Uniform configurations near a given one, and the best one of all.

**Single changes** of a configuration move a factor of 2 between two of the degrees, double or halve its micro-batch or its
interleaving, or replace one of its words (recomputation, schedule, sequence parallelism, attention, ZeRO stage).

**The best uniform configuration** is searched over tensor parallel degree, stages, data parallel degree, micro-batch, interleaving
and recomputation.  Configurations are evaluated in the order of a lower bound on their step, until the bound is not below the best
step.  With t seconds of a micro-batch in one block, forward and backward, u(c) blocks in chunk c, and N micro-batches, worker s
begins after chunks 0 to s - 1 have made the first forward pass, and the last backward pass goes through them when it has ended:

    step >= N t (sum of u(c) over chunks c of worker s) + t (u(0) + ... + u(s - 1))     for every worker s

The first worker holds at least min(p, N) micro-batches of p stages.  If its blocks need more memory than there is, the
configuration is not evaluated.  If all blocks have to be recomputed for it to fit, the fewest per chunk with which it fits are
found by bisection; t is then that of a block that is not recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.recomputation import RECOMPUTATIONS, first_blocks, least_fitting
from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.workload import ACTIVATIONS, ATTENTIONS, Workload
from autoddl.search.baselines import megatron

from .evaluation import Evaluation, evaluate
from .job import PlanningJob
from .partition import Chain, StageGraph
from .space import MAX_PASSES, SOME_BLOCKS
from .uniform import INTERLEAVED, SCHEDULES, UniformLayout, expert_parts, uniform_configuration, uniform_cut

__all__ = ["BestUniform", "Change", "best_uniform", "single_changes"]

#: Attributes of a layout that a factor of 2 moves between.
_DEGREES = {"tp": "tensor_parallel", "pp": "num_stages", "dp": "data_parallel"}
#: Ways of recomputation of Megatron-LM.
_MEGATRON_RECOMPUTATIONS = ("none", "selective", "blocks")
#: Words of the workload, with all their values.
_WORDS: dict[str, tuple[Any, ...]] = {
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
                changed: dict[str, Any] = {word: choice}
                yield f"{word} {now} -> {choice}", layout, replace(workload, **changed)


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
    settled: set[tuple[UniformLayout, int]] = (
        set()
    )  # those of which a faster way of recomputation fits, or that do not divide
    for bound, layout, workload in sorted(_Bounds(job, deadline).configurations(), key=lambda one: one[0]):
        key = (layout, workload.micro_batch)
        if bound >= limit_s:
            break
        if deadline.is_over:
            is_finished = False
            break
        if key in settled:
            continue
        try:
            plan = _evaluated(job.chain, job.cluster, layout, workload)
        except UserError:  # it does not divide the model or the cluster
            plan = None
        if plan is None:
            settled.add(key)
            continue
        count += 1
        if plan.memory_bytes <= job.limit_bytes:
            settled.add(key)
            if workload.recompute == "blocks" and SOME_BLOCKS in job.recomputations:
                workload, plan = _with_fewest_blocks(job, layout, workload, plan)
            if plan.step_s < limit_s:
                best, limit_s = BestUniform(layout, workload, plan, count, True), plan.step_s
    is_finished = is_finished and not deadline.is_over
    return None if best is None else replace(best, num_evaluated=count, is_finished=is_finished)


def _with_fewest_blocks(
    job: PlanningJob, layout: UniformLayout, workload: Workload, plan: Evaluation
) -> tuple[Workload, Evaluation]:
    """The configuration with the fewest recomputed blocks, as many in each chunk, with which it fits."""
    known = {max(plan.configuration.cut): (workload, plan)}

    def fits(count: int) -> bool:
        words = replace(workload, recompute=first_blocks(count))
        found = _evaluated(job.chain, job.cluster, layout, words)
        assert found is not None  # with all blocks it can be evaluated
        known[count] = words, found
        return found.memory_bytes <= job.limit_bytes

    return known[least_fitting(range(1, max(known) + 1), fits)]


@dataclass(frozen=True)
class _Block:
    """The figures of one block on the devices of a stage, for one micro-batch.

    Attributes:
        seconds: forward and backward pass.
        state_bytes, kept_bytes: of parameters, gradients and optimizer; of activations.
    """

    seconds: float
    state_bytes: float
    kept_bytes: float


class _Bounds:
    """Bounds of uniform configurations (see the module's docstring).

    Args:
        job: the planning job.
        deadline: when to end.
    """

    def __init__(self, job: PlanningJob, deadline: Deadline):
        self.job, self.deadline = job, deadline
        chain = job.chain
        self.ways = [way for way in job.recomputations if way in _MEGATRON_RECOMPUTATIONS]
        #: A stage of one block; None if the units of the chain are not equal blocks.
        self.block: StageGraph | None = None
        if chain.num_units > 2 and chain.num_units == 1 + max(layer.block_index for layer in job.graph.layers):
            self.block = chain.stage(1, 2)
        self.figures: dict[tuple[int, int, int, int, str], _Block | None] = {}

    def configurations(self) -> Iterator[tuple[float, UniformLayout, Workload]]:
        """Bound on the step [s], layout and workload of all uniform configurations that may fit."""
        job = self.job
        devices, batch, most_units = job.cluster.num_devices, job.workload.batch, job.chain.num_units
        for stages in divisors(devices):
            for tensor_parallel in divisors(devices // stages):
                replicas = devices // stages // tensor_parallel
                if tensor_parallel > job.cluster.devices_per_node or batch % replicas or stages > most_units:
                    continue
                for each, chunks in product(divisors(batch // replicas), _INTERLEAVINGS):
                    count = batch // (each * replicas)
                    if stages * chunks > most_units or (chunks > 1 and (stages == 1 or count % stages)):
                        continue
                    if self.deadline.is_over:
                        return
                    for parts in expert_parts(job.graph, replicas):
                        layout = UniformLayout(tensor_parallel, stages, replicas, chunks, expert_parallel=parts)
                        yield from self._bounded(layout, each * replicas)

    def _bounded(self, layout: UniformLayout, micro_batch: int) -> Iterator[tuple[float, UniformLayout, Workload]]:
        """The configuration with each way of recomputation with which it may fit."""
        cut = uniform_cut(self.job.chain.num_units, layout.num_stages * layout.interleave)
        for recompute in self.ways:
            workload = replace(self.job.workload, micro_batch=micro_batch, recompute=recompute)
            block = self._block(layout, workload)
            if block is None:
                continue
            if recompute == "blocks" and SOME_BLOCKS in self.job.recomputations:
                # As few blocks as one may be recomputed.
                block = replace(block, seconds=self._seconds_of_block(layout, replace(workload, recompute="none")))
            count, of_first = workload.num_micro_batches, sum(cut[:: layout.num_stages])
            least_bytes = of_first * (block.state_bytes + min(count, layout.num_stages) * block.kept_bytes)
            if least_bytes <= self.job.limit_bytes:
                units = max(count * sum(cut[s :: layout.num_stages]) + sum(cut[:s]) for s in range(layout.num_stages))
                yield max(units * block.seconds, self.job.arithmetic_s), layout, workload

    def _seconds_of_block(self, layout: UniformLayout, workload: Workload) -> float:
        block = self._block(layout, workload)
        return 0.0 if block is None else block.seconds

    def _block(self, layout: UniformLayout, workload: Workload) -> _Block | None:
        """The figures of one block; None if the configuration divides neither the cluster nor the block."""
        if self.block is None:
            return _Block(0.0, 0.0, 0.0)
        parts = layout.expert_parallel
        key = (layout.tensor_parallel, layout.data_parallel, parts, workload.micro_batch, workload.recompute)
        if key not in self.figures:
            self.figures[key] = self._assessed(self.block, layout, workload)
        return self.figures[key]

    def _assessed(self, block: StageGraph, layout: UniformLayout, workload: Workload) -> _Block | None:
        cluster = self.job.cluster
        try:
            devices = layout.mesh(cluster).devices(cluster)
            strategies = megatron(block.graph, layout.degrees(cluster)).strategies
            layers = assess(block.graph, devices, workload, strategies).layers[1:]
        except UserError:
            return None
        return _Block(
            sum(
                layer.forward_compute_s
                + layer.backward_compute_s
                + layer.forward_communication_s
                + layer.backward_communication_s
                for layer in layers
            ),
            sum(layer.work.state_bytes for layer in layers),
            sum(layer.work.kept_bytes for layer in layers),
        )
