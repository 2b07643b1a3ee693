"""Compares the results of the ranks with the single-device reference and with the predicted traffic.

This module needs neither OneFlow nor processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.precision import Precision
from autoddl.pipelines.runtime.pipeline.slots import RankMap
from autoddl.pipelines.runtime.pipeline.stage_traffic import Sent, sent_messages
from autoddl.pipelines.runtime.ranks.wire import MESSAGE_BYTES, NOISE_BYTES

from ..executors import EAGER, execution_notes
from ..planfile import PlanFile
from .fitting import FittedPlan
from .prediction import PHASES, Prediction, RankSteps, missing_steps
from .result import LayerCheck, PhaseCheck, StageCheck, Tolerance, ValueCheck, Verification
from .task import ByteCounts, RankResult, ReferenceResult, gradient_step

__all__ = ["compare", "with_recount"]


def compare(
    plan: PlanFile,
    fitted: FittedPlan,
    prediction: Prediction,
    reference: ReferenceResult,
    results: Sequence[RankResult],
    *,
    tolerance: float,
    not_counted_because: str,
    executor: str = EAGER,
) -> Verification:
    """Return the verification of a plan.

    Args:
        plan: The plan that the user gave.
        fitted: The plan that the ranks executed.
        prediction: Predicted steps and bytes of the fitted plan.
        reference: Results of the single-device reference.
        results: Results of all ranks, by rank.
        tolerance: Largest allowed relative error of losses, gradients and parameters.
        not_counted_because: Why bytes were not counted; "" if they were.
        executor: What executed the plan.
    """
    schedule, ranks = fitted.schedule, RankMap(fitted.schedule.widths)
    types = fitted.scaled.workload.types
    workers = [
        _RankGroup(steps, [results[rank].run_steps for rank in ranks.ranks_of(worker)])
        for worker, steps in enumerate(prediction.workers)
    ]
    return Verification(
        model=plan.graph.name,
        levels=tuple((level.name, level.size) for level in plan.cluster.levels),
        schedule=schedule,
        workload=fitted.scaled.workload,
        changes=fitted.scaled.changes,
        tolerance=Tolerance(tolerance, NOISE_BYTES * len(results)),
        losses=_losses(reference.losses, results),
        gradient_step=gradient_step(schedule) + 1,
        stages=tuple(_stage(fitted, prediction, number, results) for number in range(len(fitted.stages))),
        gradients=_value_checks(reference.gradients, [result.gradient_errors for result in results]),
        parameters=_value_checks(reference.parameters, [result.parameter_errors for result in results]),
        between=PhaseCheck(sum(prediction.between), sum(result.boundary_bytes for result in results)),
        step=_phase_check(workers, results[0].run_bytes, types, prediction.transfers),
        not_counted_because=not_counted_because,
        notes=_notes(plan, fitted, executor),
    )


def with_recount(results: Sequence[RankResult], recount: ByteCounts) -> list[RankResult]:
    """Return the results with the smaller of two counts of each section and of the run.

    Other traffic of the machine can only increase a count.  Rank 0's counts are the ones that are compared.
    """
    new_results, first = list(results), results[0]
    sections = [
        replace(section, payload_bytes=_smaller(section.payload_bytes, num_bytes))
        for section, num_bytes in zip(first.sections, recount.section_bytes)
    ]
    run_bytes = _smaller(first.run_bytes, recount.run_bytes)
    new_results[0] = replace(first, sections=tuple(sections), run_bytes=run_bytes)
    return new_results


def _smaller(count: int | None, recount: int) -> int | None:
    return None if count is None else min(count, recount)


def _notes(plan: PlanFile, fitted: FittedPlan, executor: str) -> tuple[str, ...]:
    """Return the differences between the plan and its execution that the user should know of."""
    notes, delays = list(execution_notes(plan.graph, plan.workload, executor)), fitted.schedule.delays
    if plan.cluster.has_gpus:
        notes.append("the plan is for GPUs; here CPU ranks run it")
    types, here = plan.workload.types, fitted.scaled.workload.types
    if here.name == "float64":
        notes.append(
            f"{types.name} precision runs in {here.compute}, since batch norms and max poolings amplify rounding errors; "
            "bytes are priced for it"
        )
    elif here != types and not here.has_masters:
        notes.append(
            f"{types.name} precision runs in {here.compute} inside nn.Graph on CPU ranks; bytes are priced for it"
        )
    elif here != types:
        notes.append(
            f"{types.name} precision, {types.compute} with {types.master} masters, runs as {here.compute} with {here.master} "
            "masters, the types that CPU ranks have; bytes are priced for them"
        )
    dropping = [layer for layer in fitted.scaled.graph.layers if "dropout" in layer.epilogue]
    if any(not layer.dropouts for layer in dropping):
        notes.append("dropout is off, since it is random")
    elif dropping:
        notes.append("dropouts drop the elements that one device drops")
    if not fitted.schedule.is_synchronous:
        ages = delays[0] if len(set(delays)) == 1 else ", ".join(map(str, delays))
        notes.append(f"stages compute with weights that are {ages} updates old; so does one device")
    return tuple(notes)


# ---- Values ------------------------------------------------------------------------------------------------------------------


def _losses(expected: Sequence[float], results: Sequence[RankResult]) -> tuple[tuple[float, float], ...]:
    """Return for each step the expected loss and, of the losses of all ranks, the one that is farthest from it."""
    pairs = []
    for step, loss in enumerate(expected):
        farthest = max((result.losses[step] for result in results), key=lambda value: _distance(value, loss))
        pairs.append((loss, farthest))
    return tuple(pairs)


def _distance(value: float, expected: float) -> float:
    """Return |value - expected|, or infinity if the value is not a number."""
    distance = abs(value - expected)
    return math.inf if math.isnan(distance) else distance


def _value_checks(names: Sequence[str], errors: Sequence[Mapping[str, float]]) -> tuple[ValueCheck, ...]:
    """Return the largest error of each parameter, and the rank that has it.

    Args:
        names: Parameters of the reference.  The error of a parameter that no rank holds is infinite.
        errors: Relative errors of the parameters that each rank holds, by rank and by name.
    """
    checks = []
    held_names = (name for rank_errors in errors for name in rank_errors)
    for name in dict.fromkeys((*names, *held_names)):
        error_of_rank = {rank: rank_errors[name] for rank, rank_errors in enumerate(errors) if name in rank_errors}
        error_of_rank = error_of_rank or {0: math.inf}
        worst_rank = max(error_of_rank, key=lambda rank: error_of_rank[rank])
        checks.append(ValueCheck(name, error_of_rank[worst_rank], worst_rank))
    return tuple(checks)


# ---- Bytes and steps -----------------------------------------------------------------------------------------------------------


def _stage(fitted: FittedPlan, prediction: Prediction, number: int, results: Sequence[RankResult]) -> StageCheck:
    """Compare the steps and bytes of one slot of a stage, on the ranks of the first pipeline."""
    graph, stage = fitted.scaled.graph, fitted.stages[number]
    ranks = RankMap(fitted.schedule.widths).ranks_of(fitted.schedule.placement[0][number])
    # The steps of each rank, and the bytes of all ranks, by layer and phase.
    executed_steps: list[dict[tuple[str, str], list[Step]]] = []
    for rank in ranks:
        executed_steps.append({})
        for section in results[rank].sections:
            executed_steps[-1].setdefault((section.layer, section.phase), []).extend(section.steps)
    payload_bytes: dict[tuple[str, str], int] = {}
    for section in results[0].sections:
        key = (section.layer, section.phase)
        payload_bytes[key] = payload_bytes.get(key, 0) + (section.payload_bytes or 0)
    is_counted = results[0].run_bytes is not None
    types = fitted.scaled.workload.types
    layers = []
    for layer in stage.layers(graph):
        phases = {}
        for phase in PHASES:
            key = (layer.name, phase)
            if key in prediction.sections:
                group = _RankGroup(prediction.sections[key], [steps.get(key, []) for steps in executed_steps])
                phases[phase] = _phase_check([group], payload_bytes.get(key, 0) if is_counted else None, types)
        own_parameters = tuple(parameter.name for parameter in layer.parameters if parameter.tied_to is None)
        strategy = stage.strategies[layer.name]
        layers.append(LayerCheck(layer.name, layer.kind, layer.block, layer.role, strategy, phases, own_parameters))
    return StageCheck(tuple(layers), prediction.inside[number], prediction.gradients[number])


@dataclass(frozen=True)
class _RankGroup:
    """Ranks that should all execute the same steps.

    Attributes:
        expected: Steps that each rank should execute.
        executed: Steps that each rank executed, by rank.
    """

    expected: RankSteps
    executed: Sequence[Sequence[Step]]


def _phase_check(
    groups: Sequence[_RankGroup], payload_bytes: float | None, types: Precision, transfers: Sent | None = None
) -> PhaseCheck:
    """Compare the steps and the bytes of one phase, or of a whole run.

    Args:
        groups: All ranks that take part.
        payload_bytes: Bytes that all ranks sent, without the headers of packets.  None if bytes were not counted.
        types: The types in which the ranks compute and send.
        transfers: Predicted point-to-point transfers, which are no communication steps.
    """
    transfers = transfers or Sent()
    missing: list[str] = []
    unexpected: list[str] = []
    predicted_bytes = transfers.num_bytes
    # Bytes without a price: OneFlow's own bytes in each message, and the steps that the cost model leaves out.
    unpriced_bytes = MESSAGE_BYTES * transfers.num_messages
    for group in groups:
        expected = group.expected
        for steps in group.executed:
            steps_of_rank = (*expected.priced, *expected.unpriced)
            not_executed, not_expected = missing_steps(
                steps_of_rank, steps, expected.num_tensors, max(types.communication_itemsize, 4)
            )
            missing += [str(step) for step in not_executed if str(step) not in missing]
            unexpected += [str(step) for step in not_expected if str(step) not in unexpected]
        predicted_bytes += len(group.executed) * sum(step.mean_sent_bytes for step in expected.priced)
        sizes = types.master_itemsize, min(types.itemsize, types.communication_itemsize)
        num_messages = sum(sent_messages(step, *sizes) for steps in group.executed for step in steps)
        unpriced_bytes += MESSAGE_BYTES * num_messages
        unpriced_bytes += len(group.executed) * sum(step.mean_sent_bytes for step in expected.unpriced)
    sent_bytes = None if payload_bytes is None else payload_bytes - unpriced_bytes
    return PhaseCheck(predicted_bytes, sent_bytes, tuple(missing), tuple(unexpected))
