"""What ranks found, beside one device and beside the price; no OneFlow, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autoddl.costmodel.collectives import Step
from autoddl.pipelines.runtime.wire import MESSAGE_BYTES, NOISE_BYTES

from ..planfile import Plan
from .pipeline_result import PipelineShard
from .prediction import PHASES, Steps, missing_steps, output_steps, sent_messages, unpriced_steps
from .result import LayerCheck, PhaseCheck, Tolerance, ValueCheck, Verification
from .scaling import Scaled
from .task import Counted, Reference, Shard

__all__ = ["compare", "phase_check", "value_checks", "with_recount"]


def compare(
    plan: Plan,
    scaled: Scaled,
    priced: Mapping[tuple[str, str], Steps],
    reference: Reference,
    shards: Sequence[Shard],
    *,
    tolerance: float,
    uncounted: str,
    notes: tuple[str, ...],
) -> Verification:
    """All numbers side by side.

    Args:
        plan, scaled: what was asked for, and what ran.
        priced: the steps of each (layer, phase).
        reference: one device; ``shards``: every rank.
        tolerance: of values.
        uncounted: why no bytes were counted.
        notes: for the reader.
    """
    return Verification(
        model=plan.graph.name,
        levels=tuple((level.name, level.size) for level in plan.cluster.levels),
        workload=scaled.workload,
        changes=scaled.changes,
        tolerance=Tolerance(tolerance, NOISE_BYTES * len(shards)),
        losses=_losses(reference.losses, shards),
        layers=_layers(scaled, priced, shards),
        step=_whole_step(scaled, priced, shards),
        uncounted=uncounted,
        notes=notes,
    )


AnyShard = TypeVar("AnyShard", Shard, PipelineShard)


def with_recount(shards: Sequence[AnyShard], again: Counted) -> list[AnyShard]:
    """The shards with the smaller of both counts of each section, as the first rank read it: what else a machine does while bytes
    are counted adds to them."""
    result, first = list(shards), shards[0]
    sections = [
        replace(section, payload_bytes=_smaller(section.payload_bytes, counted))
        for section, counted in zip(first.sections, again.section_bytes)
    ]
    step_bytes = _smaller(first.step_bytes, again.step_bytes)
    result[0] = replace(first, sections=tuple(sections), step_bytes=step_bytes)
    return result


def _smaller(count: int | None, again: int) -> int | None:
    return None if count is None else min(count, again)


def _losses(expected: Sequence[float], shards: Sequence[Shard]) -> tuple[tuple[float, float], ...]:
    pairs = []
    for step, value in enumerate(expected):
        found = max((shard.losses[step] for shard in shards), key=lambda loss: _distance(loss, value))
        pairs.append((value, found))
    return tuple(pairs)


def _distance(found: float, expected: float) -> float:
    distance = abs(found - expected)
    return distance if distance == distance else float("inf")


def _layers(scaled: Scaled, priced: Mapping[tuple[str, str], Steps], shards: Sequence[Shard]) -> tuple[LayerCheck, ...]:
    found = []
    for layer in scaled.graph.layers:
        strategy = scaled.strategies[layer.name]
        phases = {}
        for phase in PHASES:
            sections = [[s for s in shard.sections if (s.layer, s.phase) == (layer.name, phase)] for shard in shards]
            phases[phase] = phase_check(
                priced[layer.name, phase],
                unpriced_steps(layer, strategy, phase),
                [[step for section in own for step in section.steps] for own in sections],
                None if shards[0].step_bytes is None else sum(section.payload_bytes or 0 for section in sections[0]),
            )
        own = [parameter.name for parameter in layer.parameters if parameter.tied_to is None]
        found.append(
            LayerCheck(
                layer.name,
                layer.kind,
                layer.block,
                layer.role,
                strategy,
                phases,
                value_checks(own, [shard.gradient_errors for shard in shards]),
                value_checks(own, [shard.parameter_errors for shard in shards]),
            )
        )
    return tuple(found)


def _whole_step(scaled: Scaled, priced: Mapping[tuple[str, str], Steps], shards: Sequence[Shard]) -> PhaseCheck:
    """All micro-batches and the gradients, as one."""
    expected: list[Step] = []
    unpriced: list[Step] = []
    for (name, phase), steps in priced.items():
        times = 1 if phase == "gradient" else scaled.workload.num_micro_batches
        expected += steps * times
        unpriced += unpriced_steps(scaled.graph[name], scaled.strategies[name], phase) * times
    unpriced += output_steps(scaled.graph, scaled.strategies, scaled.workload) * scaled.workload.num_micro_batches
    return phase_check(expected, unpriced, [shard.step_steps for shard in shards], shards[0].step_bytes)


def phase_check(
    expected: Sequence[Step], unpriced: Sequence[Step], ran: Sequence[Sequence[Step]], payload_bytes: float | None
) -> PhaseCheck:
    """Steps and bytes of one phase.

    Args:
        expected, unpriced: that each rank should run, with and without a price.
        ran: the steps of every rank.
        payload_bytes: what all of them sent; None where it was not counted.
    """
    missing: list[str] = []
    unexpected: list[str] = []
    for steps in ran:
        lacking, beyond = missing_steps((*expected, *unpriced), steps)
        missing += [str(step) for step in lacking if str(step) not in missing]
        unexpected += [str(step) for step in beyond if str(step) not in unexpected]
    sent = None
    if payload_bytes is not None:
        headers = MESSAGE_BYTES * sum(sent_messages(step) for steps in ran for step in steps)
        sent = payload_bytes - headers - len(ran) * sum(step.mean_sent_bytes for step in unpriced)
    predicted = len(ran) * sum(step.mean_sent_bytes for step in expected)
    return PhaseCheck(predicted, sent, tuple(missing), tuple(unexpected))


def value_checks(names: Sequence[str], errors: Sequence[Mapping[str, float]]) -> tuple[ValueCheck, ...]:
    """The worst rank for each parameter."""
    checks = []
    for name in names:
        rank = max(range(len(errors)), key=lambda rank: errors[rank].get(name, 0.0))
        if any(name in found for found in errors):
            checks.append(ValueCheck(name, errors[rank].get(name, 0.0), rank))
    return tuple(checks)
