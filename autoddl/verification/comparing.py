"""What ranks found, beside one device and beside the price; no OneFlow, no processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoddl.costmodel.collectives import Step
from autoddl.pipelines.runtime.pipeline.slots import RankMap
from autoddl.pipelines.runtime.pipeline.stage_traffic import Sent, sent_messages
from autoddl.pipelines.runtime.wire import MESSAGE_BYTES, NOISE_BYTES

from ..planfile import PlanFile
from .fitting import FittedPlan
from .prediction import PHASES, Prediction, RankSteps, missing_steps
from .result import LayerCheck, PhaseCheck, StageCheck, Tolerance, ValueCheck, Verification
from .task import Counted, Reference, Shard, gradient_step

__all__ = ["compare", "with_recount"]


def compare(
    plan: PlanFile,
    fitted: FittedPlan,
    predicted: Prediction,
    reference: Reference,
    shards: Sequence[Shard],
    *,
    tolerance: float,
    uncounted: str,
) -> Verification:
    """All numbers side by side.

    Args:
        plan, fitted: what was asked for, and what ran.
        predicted: what that should send.
        reference: one device; ``shards``: every rank.
        tolerance: of values.
        uncounted: why no bytes were counted.
    """
    schedule, ranks = fitted.schedule, RankMap(fitted.schedule.widths)
    workers = [
        _Ran(steps, [shards[rank].run_steps for rank in ranks.ranks_of(worker)])
        for worker, steps in enumerate(predicted.workers)
    ]
    return Verification(
        model=plan.graph.name,
        levels=tuple((level.name, level.size) for level in plan.cluster.levels),
        schedule=schedule,
        workload=fitted.scaled.workload,
        changes=fitted.scaled.changes,
        tolerance=Tolerance(tolerance, NOISE_BYTES * len(shards)),
        losses=_losses(reference.losses, shards),
        gradient_step=gradient_step(schedule) + 1,
        stages=tuple(_stage(fitted, predicted, number, shards) for number in range(len(fitted.stages))),
        gradients=_value_checks(reference.gradients, [shard.gradient_errors for shard in shards]),
        parameters=_value_checks(reference.parameters, [shard.parameter_errors for shard in shards]),
        between=PhaseCheck(sum(predicted.between), sum(shard.boundary_bytes for shard in shards)),
        step=_phase_check(workers, shards[0].run_bytes, predicted.apart),
        uncounted=uncounted,
        notes=_notes(plan, fitted),
    )


def with_recount(shards: Sequence[Shard], again: Counted) -> list[Shard]:
    """The shards with the smaller of both counts of each section, as the first rank read it: what else a machine does while bytes
    are counted adds to them."""
    result, first = list(shards), shards[0]
    sections = [
        replace(section, payload_bytes=_smaller(section.payload_bytes, counted))
        for section, counted in zip(first.sections, again.section_bytes)
    ]
    run_bytes = _smaller(first.run_bytes, again.run_bytes)
    result[0] = replace(first, sections=tuple(sections), run_bytes=run_bytes)
    return result


def _smaller(count: int | None, again: int) -> int | None:
    return None if count is None else min(count, again)


def _notes(plan: PlanFile, fitted: FittedPlan) -> tuple[str, ...]:
    """What the reader should know of how a plan is run, at its model's size here."""
    notes, delays = [], fitted.schedule.delays
    if plan.workload.precision != "float32":
        notes.append(
            f"the plan is for {plan.workload.precision} precision; CPU ranks run, and bytes are priced, in float32"
        )
    if any("dropout" in layer.epilogue for layer in fitted.scaled.graph.layers):
        notes.append("dropout is off: it draws at random")
    if not fitted.schedule.is_synchronous:
        old = delays[0] if len(set(delays)) == 1 else ", ".join(map(str, delays))
        notes.append(f"stages compute with weights that are {old} updates old; so does one device")
    return tuple(notes)


# ---- Values ------------------------------------------------------------------------------------------------------------------


def _losses(expected: Sequence[float], shards: Sequence[Shard]) -> tuple[tuple[float, float], ...]:
    pairs = []
    for step, value in enumerate(expected):
        found = max((shard.losses[step] for shard in shards), key=lambda loss: _distance(loss, value))
        pairs.append((value, found))
    return tuple(pairs)


def _distance(found: float, expected: float) -> float:
    distance = abs(found - expected)
    return distance if distance == distance else math.inf


def _value_checks(names: Sequence[str], errors: Sequence[Mapping[str, float]]) -> tuple[ValueCheck, ...]:
    """The worst rank for each parameter, of ``names`` and of all that ranks hold; one that no rank holds is infinitely far off."""
    checks = []
    for name in dict.fromkeys((*names, *(name for found in errors for name in found))):
        held = {rank: found[name] for rank, found in enumerate(errors) if name in found} or {0: math.inf}
        rank = max(held, key=lambda rank: held[rank])
        checks.append(ValueCheck(name, held[rank], rank))
    return tuple(checks)


# ---- Bytes and steps -----------------------------------------------------------------------------------------------------------


def _stage(fitted: FittedPlan, predicted: Prediction, number: int, shards: Sequence[Shard]) -> StageCheck:
    """A stage, as the ranks of the first pipeline ran it by itself."""
    graph, stage = fitted.scaled.graph, fitted.stages[number]
    ranks = RankMap(fitted.schedule.widths).ranks_of(fitted.schedule.placement[0][number])
    ran: list[dict[tuple[str, str], list[Step]]] = []
    for rank in ranks:
        ran.append({})
        for section in shards[rank].sections:
            ran[-1].setdefault((section.layer, section.phase), []).extend(section.steps)
    sent: dict[tuple[str, str], int] = {}
    for section in shards[0].sections:
        sent[section.layer, section.phase] = sent.get((section.layer, section.phase), 0) + (section.payload_bytes or 0)
    is_counted = shards[0].run_bytes is not None
    layers = []
    for layer in stage.layers(graph):
        phases = {}
        for phase in PHASES:
            key = (layer.name, phase)
            if key in predicted.sections:
                parts = [_Ran(predicted.sections[key], [steps.get(key, []) for steps in ran])]
                phases[phase] = _phase_check(parts, sent.get(key, 0) if is_counted else None)
        own = tuple(parameter.name for parameter in layer.parameters if parameter.tied_to is None)
        strategy = stage.strategies[layer.name]
        layers.append(LayerCheck(layer.name, layer.kind, layer.block, layer.role, strategy, phases, own))
    return StageCheck(tuple(layers), predicted.inside[number], predicted.gradients[number])


@dataclass(frozen=True)
class _Ran:
    """Ranks that should all run the same steps, and what each of them ran."""

    expected: RankSteps
    ran: Sequence[Sequence[Step]]


def _phase_check(parts: Sequence[_Ran], payload_bytes: float | None, apart: Sent | None = None) -> PhaseCheck:
    """Steps and bytes of one phase, or of a whole run.

    Args:
        parts: of all ranks that take part.
        payload_bytes: what all of them sent; None where it was not counted.
        apart: what they send from rank to rank besides steps.
    """
    apart = apart or Sent()
    missing: list[str] = []
    unexpected: list[str] = []
    predicted, beside = apart.num_bytes, MESSAGE_BYTES * apart.num_messages
    for part in parts:
        expected = part.expected
        for steps in part.ran:
            lacking, beyond = missing_steps((*expected.priced, *expected.unpriced), steps)
            missing += [str(step) for step in lacking if str(step) not in missing]
            unexpected += [str(step) for step in beyond if str(step) not in unexpected]
        predicted += len(part.ran) * sum(step.mean_sent_bytes for step in expected.priced)
        beside += MESSAGE_BYTES * sum(sent_messages(step) for steps in part.ran for step in steps)
        beside += len(part.ran) * sum(step.mean_sent_bytes for step in expected.unpriced)
    sent = None if payload_bytes is None else payload_bytes - beside
    return PhaseCheck(predicted, sent, tuple(missing), tuple(unexpected))
