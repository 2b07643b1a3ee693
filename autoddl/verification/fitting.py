"""Fits a plan to the given number of ranks and to the limits of the machine.

The strategies, the recomputation and the width of every remaining stage stay as they are.  Three things change, in this order:

1. **Stages.**  If there are fewer ranks than devices in the plan, middle stages are removed with their blocks, as few as possible.
   The first and the last stage remain, with all layers that are in no block.  A plan without a pipeline has a single stage, so it
   needs as many ranks as devices.
2. **Schedule.**  The schedule is generated again for the remaining workers.  If the limits require it, it also has fewer
   micro-batches: the smallest divisor of the plan's number that is at least twice the number of workers (or two, for a single
   worker).
3. **Sizes.**  The sizes of the model are reduced to the limits (`scaling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.graph_meshes import EAGER, GRAPH
from autoddl.costmodel.recomputation import block_limit, first_blocks
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.pipelines.schedule import Schedule

from ..planfile import PlanFile
from ..staging import make_schedule, schedule_arguments, stage_plans
from ..zoo.builtin import BuiltIn
from .scaling import Change, Limits, PipelineConstraints, ScaledModel, scale, without_stages
from .task import MIN_STEPS

__all__ = ["FittedPlan", "chosen_workers", "fit_plan"]


@dataclass(frozen=True)
class FittedPlan:
    """A plan that fits the ranks and the limits.

    Attributes:
        scaled: The model, its strategies, and the workload of one update.
        stages: The stages, in order.
        schedule: The schedule: of a single update if it is synchronous, else of at least `MIN_STEPS` updates.
    """

    scaled: ScaledModel
    stages: tuple[StagePlan, ...]
    schedule: Schedule


@dataclass(frozen=True)
class _RemainingWorkers:
    """The stages and workers of a plan that fit the ranks.

    Attributes:
        stages: Numbers of the remaining stages in the plan.
        spec: Specification of the schedule of these stages.
        widths: Number of ranks of each worker.
        recomputing: Whether each stage recomputes its activations.
    """

    stages: tuple[int, ...]
    spec: PipelineSchedule
    widths: tuple[int, ...]
    recomputing: tuple[bool, ...]

    def schedule(self, num_micro_batches: int) -> Schedule:
        """Return the schedule: of one update if it is synchronous, else of at least `MIN_STEPS` updates."""
        spec = replace(self.spec, num_micro_batches=num_micro_batches)
        schedule = make_schedule(spec, self.widths, self.recomputing, 1)
        if schedule.is_synchronous or schedule.num_updates >= MIN_STEPS:
            return schedule
        return make_schedule(spec, self.widths, self.recomputing, MIN_STEPS)


def fit_plan(
    plan: PlanFile,
    num_ranks: int,
    limits: Limits,
    built_in: BuiltIn | None,
    executor: str = EAGER,
    in_double: bool = False,
) -> FittedPlan:
    """Return a plan that fits the number of ranks and the limits.

    Args:
        plan: The plan.
        num_ranks: Number of ranks.
        limits: Memory and FLOPs that all ranks together may use.
        built_in: The plan's model if it is a built-in one; None if a user's function returns it.
        executor: What executes the plan. nn.Graph on CPU ranks computes in single precision, and a batch at a time.
        in_double: Whether to compute in double precision in any case.

    Raises:
        UserError: If the plan cannot be executed on this number of ranks with its strategies, or is too large for the limits.
    """
    # 1. Stages.
    stages, workers = stage_plans(plan, executor), _remaining_workers(plan, num_ranks)
    # 2. Schedule: with the plan's number of micro-batches, and with the smallest one.
    num_micro_batches = 1 if executor == GRAPH else workers.spec.num_micro_batches
    smaller_numbers = _smaller_numbers_of_micro_batches(num_micro_batches, len(workers.widths))
    schedule = _first_schedule(workers, (num_micro_batches, *smaller_numbers))
    if schedule is None:
        raise _cannot_fit(plan, num_ranks, f"{workers.spec.name} has no schedule of {len(workers.widths)} workers")
    short_schedule = _first_schedule(workers, smaller_numbers) or schedule
    # 3. Sizes of the model of the remaining stages.
    graph, strategies, built_in, stage_of = _remaining_model(plan, stages, workers, num_ranks, built_in)
    size = plan.workload.micro_batch
    ways = {stage.recompute for stage in stages}
    recompute = ways.pop() if len(ways) == 1 else "none"
    precision = "float32" if executor == GRAPH else plan.workload.types.on_cpu().name
    if in_double or any(map(_amplifies_rounding, graph.layers)):
        # They amplify rounding errors: OneFlow's own gradients of a ResNet-50 in float32 are off by 10 % at random weights.
        precision = "float64"
    batch = size * schedule.update_period
    workload = replace(plan.workload, precision=precision, batch=batch, recompute=recompute)
    constraints = PipelineConstraints(
        stage_of,
        _entries(stages, workers.stages),
        num_ranks,
        max(slots_per_micro_batch(schedule), slots_per_micro_batch(short_schedule)),
        min(short_schedule.update_period, schedule.update_period),
    )
    scaled = scale(graph, strategies, workload, limits, built_in, constraints)
    if scaled.workload.num_micro_batches != schedule.update_period:
        schedule = short_schedule
    # What has changed, relative to the plan.
    changes = list(scaled.changes)
    if len(workers.stages) < len(stages):
        changes.insert(0, Change("stages", str(len(stages)), str(len(workers.stages))))
        blocks = [len({layer.block_index for layer in g.layers if layer.block}) for g in (plan.graph, scaled.graph)]
        changes = [change for change in changes if change.what != "blocks"]
        changes.insert(1, Change("blocks", *map(str, blocks)))
    if schedule.update_period != plan.workload.num_micro_batches:
        before, after = plan.workload.num_micro_batches, schedule.update_period
        changes.append(Change("micro-batches", str(before), str(after)))
    return FittedPlan(
        replace(scaled, changes=tuple(changes)),
        _scaled_stages(scaled, plan.graph, [stages[number] for number in workers.stages]),
        schedule,
    )


# ---- Stages ----------------------------------------------------------------------------------------------------------------


def _remaining_workers(plan: PlanFile, num_ranks: int) -> _RemainingWorkers:
    """Return all workers of a plan, or those that the ranks suffice for.

    Raises:
        UserError: If no part of the plan's workers has this number of ranks.
    """
    spec, widths, recomputing = schedule_arguments(plan)
    if sum(widths) == num_ranks:
        return _RemainingWorkers(tuple(range(spec.num_stages)), spec, widths, recomputing)
    if len(widths) == 1 or not 0 < num_ranks <= sum(widths):
        nodes, per_node = plan.cluster.num_nodes, plan.cluster.devices_per_node
        raise UserError(
            f"the plan is for {counted(sum(widths), 'device')} ({counted(nodes, 'node')} of {per_node}), "
            f"not for ranks={num_ranks}; give ranks={sum(widths)}, or plan for fewer devices"
        )
    chosen = chosen_workers(widths, num_ranks)
    if chosen is None:
        smallest = widths[0] + widths[-1]
        reason = (
            f"the smallest part, two of its {len(widths)} workers, needs {smallest}" if smallest > num_ranks else ""
        )
        raise _cannot_fit(plan, num_ranks, reason)
    if spec.groups > 1 or spec.num_pipelines > 1:
        # Each worker has several stages of its own width.
        if len(set(widths)) > 1:
            raise _cannot_fit(plan, num_ranks, "its workers have different widths and several stages each")
        stages = _evenly_spaced(spec.num_stages, spec.groups * len(chosen))
    else:
        stages = chosen
    return _RemainingWorkers(
        stages=stages,
        spec=replace(spec, num_workers=len(chosen)),
        widths=tuple(widths[worker] for worker in chosen),
        recomputing=tuple(recomputing[stage] for stage in stages),
    )


def chosen_workers(widths: tuple[int, ...], num_ranks: int) -> tuple[int, ...] | None:
    """Return the largest set of workers with ``num_ranks`` ranks that includes the first and the last worker.

    >>> chosen_workers((2, 2, 2, 2), 6)
    (0, 1, 3)
    >>> chosen_workers((1, 4, 2, 1), 4)
    (0, 2, 3)

    Args:
        widths: Number of ranks of each worker.
        num_ranks: Number of ranks of all chosen workers together.

    Returns:
        Indices of the workers; None if there is no such set.  Workers of equal widths are evenly spaced.
    """
    if len(widths) < 2:
        return None
    if len(set(widths)) == 1:
        count, rest = divmod(num_ranks, widths[0])
        return _evenly_spaced(len(widths), count) if 2 <= count <= len(widths) and not rest else None
    # Dynamic program over the middle workers: the largest set for each sum of widths.
    largest: dict[int, tuple[int, ...]] = {widths[0] + widths[-1]: ()}
    for worker in range(1, len(widths) - 1):
        for total, members in list(largest.items()):
            longer = (*members, worker)
            if len(largest.get(total + widths[worker], ())) < len(longer):
                largest[total + widths[worker]] = longer
    return (0, *largest[num_ranks], len(widths) - 1) if num_ranks in largest else None


def _evenly_spaced(count: int, num_chosen: int) -> tuple[int, ...]:
    """Return ``num_chosen`` evenly spaced numbers from 0 to ``count - 1``, including both."""
    return tuple(i * (count - 1) // (num_chosen - 1) for i in range(num_chosen))


def _remaining_model(
    plan: PlanFile, stages: tuple[StagePlan, ...], workers: _RemainingWorkers, num_ranks: int, built_in: BuiltIn | None
) -> tuple[LayerGraph, Mapping[str, Strategy], BuiltIn | None, Mapping[str, int]]:
    """Return the model of the remaining stages: its graph, its strategies, the built-in model, and the stage of each layer.

    Raises:
        UserError: If the layers of the other stages are not whole blocks of a built-in transformer.
    """
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.strategies}
    strategies = {name: strategy for stage in stages for name, strategy in stage.strategies.items()}
    if len(workers.stages) == len(stages):
        return plan.graph, strategies, built_in, stage_of
    constraints = PipelineConstraints(stage_of, _entries(stages, range(len(stages))), num_ranks)
    smaller = built_in and without_stages(plan.graph, strategies, plan.workload, built_in, constraints, workers.stages)
    if not smaller:
        reason = "a stage can be removed only if it consists of whole blocks of a built-in transformer"
        raise _cannot_fit(plan, num_ranks, reason)
    return smaller.graph, smaller.strategies, smaller.built_in, smaller.stage_of


def _cannot_fit(plan: PlanFile, num_ranks: int, reason: str) -> UserError:
    widths = schedule_arguments(plan)[1]
    workers = f"{len(widths)} workers of {', '.join(map(str, sorted(set(widths))))}"
    because = f" ({reason})" if reason else ""
    return UserError(
        f"the plan's pipeline has {counted(sum(widths), 'device')} in {workers}; it cannot be reduced to {num_ranks} ranks with "
        f"the same strategies{because}; give ranks={sum(widths)}, or plan for fewer devices"
    )


# ---- Schedule and sizes --------------------------------------------------------------------------------------------------------


def _smaller_numbers_of_micro_batches(num_micro_batches: int, num_workers: int) -> tuple[int, ...]:
    """Return the divisors of the number of micro-batches that are at least twice the number of workers, in ascending order.

    For a single worker, return 2 (or 1 if there is a single micro-batch).
    """
    if num_workers == 1:
        return (min(2, num_micro_batches),)
    return tuple(n for n in range(2 * num_workers, num_micro_batches + 1) if num_micro_batches % n == 0)


def _amplifies_rounding(layer: Layer) -> bool:
    """Return whether a layer is a batch norm or a max pooling, or a program with one."""
    calls = () if layer.program is None else layer.program.calls
    kinds = {call.kind for call in calls}
    in_program = "normalization" in kinds or any("max_pool" in kind for kind in kinds)
    return layer.kind == "batch_norm" or bool(layer.attributes.get("maximum")) or in_program


def _first_schedule(workers: _RemainingWorkers, numbers_of_micro_batches: Iterable[int]) -> Schedule | None:
    """Return the schedule of the first number of micro-batches that the schedule's generator accepts, or None."""
    for number in numbers_of_micro_batches:
        try:
            return workers.schedule(number)
        except UserError:
            continue
    return None


def _entries(stages: tuple[StagePlan, ...], remaining: Iterable[int]) -> dict[int, Strategy]:
    """Return `PipelineConstraints.entries` of the remaining stages, which are numbered from 0."""
    entries = {index: stages[number].entry for index, number in enumerate(remaining)}
    return {index: entry for index, entry in entries.items() if entry is not None}


def _scaled_stages(scaled: ScaledModel, graph: LayerGraph, planned: list[StagePlan]) -> tuple[StagePlan, ...]:
    """Return the stages with the layers of the scaled model; of fewer blocks the same part is recomputed.

    Args:
        scaled: The scaled model.
        graph: The plan's model.
        planned: The plan's stages.
    """
    strategies: list[dict[str, Strategy]] = [{} for _ in planned]
    for layer in scaled.graph.layers:
        strategies[scaled.stage_of[layer.name]][layer.name] = scaled.strategies[layer.name]
    stages = []
    for stage, own in zip(planned, strategies):
        smaller = replace(stage, strategies=own)
        count, before, after = block_limit(stage.recompute), stage.num_blocks(graph), smaller.num_blocks(scaled.graph)
        if count is not None and 0 < after < before:
            part = max(1, min(round(count * after / before), after - (count < before)))
            smaller = replace(smaller, recompute=first_blocks(part, after))
        stages.append(smaller)
    return tuple(stages)
