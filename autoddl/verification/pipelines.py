"""Verifying a plan with a pipeline: one device, then the ranks with the plan's schedule, then the comparison.

Of a synchronous schedule the gradients of the first step are compared, as without a pipeline. An asynchronous one runs its steps in
one go, against one device that computes with weights as old as the schedule says; its last step's gradients are compared, which
are those of stale weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.launcher import RankPool
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.pipeline.slots import slots_per_micro_batch
from autoddl.pipelines.runtime.pipeline.stage_traffic import layer_steps, passes, stage_traffic
from autoddl.pipelines.runtime.wire import MESSAGE_BYTES, NOISE_BYTES
from autoddl.pipelines.runtime.workfolders import WorkFolder

from ..planfile import Plan
from ..staging import stage_plans
from .comparing import phase_check, value_checks, with_recount
from .fitting import FittedPipeline, fit_pipeline
from .pipeline_result import PipelineShard, PipelineVerification
from .prediction import sent_messages, unpriced_steps
from .result import LayerCheck, PhaseCheck, Tolerance
from .run import (
    NUM_RECOUNTS,
    Deadline,
    VerifyOptions,
    built_in_or_function,
    machine_limits,
    notes_of,
    started,
    task_of,
    why_uncounted,
)
from .task import NUM_STEPS, PipelineTask, Reference

__all__ = ["verify_pipeline"]

_JOB = "autoddl.verification.pipeline_job"


def verify_pipeline(
    plan: Plan,
    num_ranks: int,
    *,
    model: str = "",
    options: VerifyOptions | None = None,
    pool: RankPool | None = None,
    progress: Callable[[str], None] | None = None,
) -> PipelineVerification:
    """Run a plan with a pipeline on local ranks, and compare it with one device and with its prediction.

    Args:
        num_ranks: as many as the plan has devices, or fewer: stages in the middle are left out then (see `fitting`).
        others: as of :func:`autoddl.verification.verify`.

    Raises:
        UserError: as there; or the plan cannot be brought to so many ranks.
        RankError: a rank failed; it is named, and none is left.
    """
    options = options or VerifyOptions()
    deadline = Deadline(options.timeout_s)
    say = progress or (lambda text: None)
    stage_plans(plan)  # refuses plans without a pipeline
    if not (available := is_available()):
        raise UserError(f"cannot verify: {available.reason}")
    built_in, function = built_in_or_function(plan, model)
    fitted = fit_pipeline(plan, num_ranks, options.limits or machine_limits(num_ranks), built_in)
    scaled = fitted.scaled
    uncounted = why_uncounted(num_ranks)
    with WorkFolder("verify") as folder:
        task = task_of(scaled, function, options.seed, str(folder), uncounted)
        gradient_step = 0 if fitted.schedule.is_synchronous else NUM_STEPS - 1
        pipeline = PipelineTask(task, fitted.schedule, fitted.stages, gradient_step)
        say(f"starting {num_ranks} ranks")
        with contextlib.nullcontext(pool) if pool else started(num_ranks, not uncounted, deadline) as ranks:
            say("running on one device")
            reference = ranks.run(f"{_JOB}:run_one_device", pipeline, timeout_s=deadline.left_s)[0]

            def on_report(rank: int, value: str) -> None:
                if rank == 0:
                    say(value)

            say(f"running on {num_ranks} ranks")
            shards = ranks.run(f"{_JOB}:run_pipeline", pipeline, timeout_s=deadline.left_s, on_report=on_report)
            found = _compare(plan, fitted, gradient_step, reference, shards, options.tolerance, uncounted)
            for _ in range(NUM_RECOUNTS):
                if not found.are_bytes_off:
                    break
                say("counting bytes again")
                again = ranks.run(f"{_JOB}:count_pipeline", pipeline, timeout_s=deadline.left_s)[0]
                shards = with_recount(shards, again)
                found = _compare(plan, fitted, gradient_step, reference, shards, options.tolerance, uncounted)
    return replace(found, seconds=deadline.passed_s)


def _compare(
    plan: Plan,
    fitted: FittedPipeline,
    gradient_step: int,
    reference: Reference,
    shards: Sequence[PipelineShard],
    tolerance: float,
    uncounted: str,
) -> PipelineVerification:
    """All numbers side by side."""
    schedule, scaled = fitted.schedule, fitted.scaled
    traffic = stage_traffic(schedule, scaled.graph, fitted.stages, scaled.workload.micro_batch, plan.cluster)
    losses = [sum(parts) for parts in zip(*(shard.losses for shard in shards))]
    names = sorted({name for shard in shards for name in shard.parameter_errors})
    run_bytes = shards[0].step_bytes
    notes = list(notes_of(plan, scaled.graph))
    if not schedule.is_synchronous:
        notes.append(f"stages compute with weights that are {_delays(schedule.delays)} updates old; so does one device")
    between = sum(sent.num_bytes for sent in traffic.between)
    overhead = MESSAGE_BYTES * traffic.all.num_messages + _unpriced_bytes(fitted)
    return PipelineVerification(
        model=plan.graph.name,
        schedule=schedule,
        stages=fitted.stages,
        workload=scaled.workload,
        changes=scaled.changes,
        tolerance=Tolerance(tolerance, NOISE_BYTES * len(shards)),
        losses=tuple(zip(reference.losses, losses)),
        gradient_step=gradient_step + 1,
        layers=_layers(plan, fitted, shards),
        gradients=value_checks(names, [shard.gradient_errors for shard in shards]),
        parameters=value_checks(names, [shard.parameter_errors for shard in shards]),
        traffic=traffic,
        between=PhaseCheck(between, sum(shard.boundary_bytes for shard in shards)),
        run=PhaseCheck(traffic.all.num_bytes, None if run_bytes is None else run_bytes - overhead),
        uncounted=uncounted,
        notes=tuple(notes),
    )


def _delays(delays: Sequence[int]) -> str:
    return f"{delays[0]}" if len(set(delays)) == 1 else ", ".join(map(str, delays))


def _layers(plan: Plan, fitted: FittedPipeline, shards: Sequence[PipelineShard]) -> tuple[tuple[LayerCheck, ...], ...]:
    graph, schedule = fitted.scaled.graph, fitted.schedule
    micro_batch = fitted.scaled.workload.micro_batch
    priced = layer_steps(schedule, graph, fitted.stages, micro_batch, plan.cluster)
    sent = {(section.layer, section.phase): section.payload_bytes for section in shards[0].sections}
    found = []
    for number, stage in enumerate(fitted.stages):
        first = sum(schedule.widths[: schedule.placement[0][number]])
        members = shards[first : first + stage.num_ranks]
        ran = [{(section.layer, section.phase): section.steps for section in shard.sections} for shard in members]
        checks = []
        for layer in stage.layers(graph):
            strategy = stage.strategies[layer.name]
            phases = {
                phase: phase_check(
                    priced[layer.name, phase],
                    unpriced_steps(layer, strategy, phase),
                    [steps[layer.name, phase] for steps in ran],
                    sent[layer.name, phase],
                )
                for phase in ("forward", "backward")
            }
            own = [parameter.name for parameter in layer.parameters if parameter.tied_to is None]
            gradients, parameters = (
                value_checks(own, [errors_of(shard) for shard in shards])
                for errors_of in (_gradient_errors, _parameter_errors)
            )
            checks.append(
                LayerCheck(layer.name, layer.kind, layer.block, layer.role, strategy, phases, gradients, parameters)
            )
        found.append(tuple(checks))
    return tuple(found)


def _gradient_errors(shard: PipelineShard) -> Mapping[str, float]:
    return shard.gradient_errors


def _parameter_errors(shard: PipelineShard) -> Mapping[str, float]:
    return shard.parameter_errors


def _unpriced_bytes(fitted: FittedPipeline) -> float:
    """What a run sends for the mean of the loss, with what OneFlow adds to each message."""
    schedule, last = fitted.schedule, fitted.scaled.graph.layers[-1]
    strategy = fitted.scaled.strategies[last.name]
    steps: Sequence[Step] = unpriced_steps(last, strategy, "forward")
    forwards = passes(schedule, schedule.num_stages - 1)[0] * slots_per_micro_batch(schedule)
    per_rank = sum(step.mean_sent_bytes + MESSAGE_BYTES * sent_messages(step) for step in steps)
    return forwards * strategy.num_devices * per_rank
