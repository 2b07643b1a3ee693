"""The fewest recomputed blocks with which a plan fits.

A plan whose stages recompute all their blocks often leaves memory free.  At the same strategies a stage s of B blocks that keeps
one more block needs, on each worker with K(s) micro-batches in flight,

    K(s) (kept without recomputation - kept with recomputation of all blocks) / B      more bytes

so that a stage can keep as many more blocks as fit into the memory that its fullest worker has left.  Stages whose blocks need
least get theirs first, since a block of any of them saves as much time.  If a worker holds several stages, their peaks are added
up, which may leave memory unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.recomputation import first_blocks, num_recomputed_blocks

from .configuration import StageChoice
from .evaluation import Evaluation, evaluate
from .partition import Chain
from .space import SOME_BLOCKS
from .stage_figures import workload_of_stage

__all__ = ["with_fewer_blocks"]


def with_fewer_blocks(chain: Chain, plan: Evaluation, limit_bytes: float, recomputations: Sequence[str]) -> Evaluation:
    """Return a plan that fits with fewer recomputed blocks, or the plan itself if it needs all of them or others are not allowed.

    Args:
        chain: The model as a chain of units.
        plan: The plan; its memory is within the limit.
        limit_bytes: Memory limit per device.
        recomputations: Allowed ways of recomputation.
    """
    if SOME_BLOCKS not in recomputations:
        return plan
    num_least = 0 if "none" in recomputations else 1
    free = [limit_bytes - nbytes for nbytes in plan.worker_memory_bytes]
    choices = list(plan.configuration.stages)
    known: dict[object, float] = {}
    needs = [_need(chain, plan, stage, known) for stage in range(len(choices))]
    for stage in sorted(range(len(choices)), key=lambda stage: (needs[stage] * max(plan.in_flight[stage]), stage)):
        choice, more = choices[stage], needs[stage]
        num_blocks = sum(plan.stages[stage].graph.graph.block_runs)
        recomputed = num_recomputed_blocks(choice.recompute, num_blocks)
        if not recomputed or num_blocks < 2:
            continue
        workers = [replica.worker for replica in plan.schedule.replicas_of(stage)]
        flights = plan.in_flight[stage]
        room = min(free[worker] / (count * more) if more > 0 else 0.0 for worker, count in zip(workers, flights))
        # Without any recomputed block the buffer of one would be free as well, which may leave memory unused.
        kept = max(0, min(int(room * (1 - 1e-9)), recomputed - num_least))
        if kept:
            choices[stage] = StageChoice(
                choice.num_units, first_blocks(recomputed - kept, num_blocks), choice.strategies
            )
            for worker, count in zip(workers, flights):
                free[worker] -= kept * count * more
    if choices == list(plan.configuration.stages):
        return plan
    ways = {choice.recompute for choice in choices}
    workload = replace(plan.configuration.workload, recompute=ways.pop() if len(ways) == 1 else "none")
    better = evaluate(chain, plan.cluster, replace(plan.configuration, workload=workload, stages=tuple(choices)))
    return better if better.memory_bytes <= limit_bytes and better.step_s < plan.step_s else plan


def _need(chain: Chain, plan: Evaluation, stage: int, known: dict[object, float]) -> float:
    """`_bytes_of_a_block`, or 0 for a stage without blocks; stages of one shape and with the same strategies are computed once."""
    graph, choice = plan.stages[stage].graph.graph, plan.configuration.stages[stage]
    num_blocks = sum(graph.block_runs)
    if not num_blocks:
        return 0.0
    shape = chain.shape(*plan.configuration.bounds[stage])
    key = shape, plan.configuration.mesh_of(stage), tuple(choice.strategies[layer.name] for layer in graph.layers)
    if key not in known:
        known[key] = _bytes_of_a_block(plan, stage, num_blocks)
    return known[key]


def _bytes_of_a_block(plan: Evaluation, stage: int, num_blocks: int) -> float:
    """Bytes that a micro-batch keeps more for each block of a stage that is not recomputed."""
    configuration, figures = plan.configuration, plan.stages[stage]
    devices = configuration.mesh_of(stage).devices(plan.cluster)
    kept = []
    for recompute in ("none", "blocks"):
        workload = workload_of_stage(configuration.workload, recompute)
        assessment = assess(figures.graph.graph, devices, workload, configuration.stages[stage].strategies)
        kept.append(sum(layer.work.kept_bytes for layer in assessment.layers))
    return (kept[0] - kept[1]) / num_blocks
