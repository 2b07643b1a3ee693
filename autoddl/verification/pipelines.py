"""Verifying a plan with a pipeline: one device, then the ranks with the plan's schedule, then the comparison.

Compared are losses and parameters after some steps, the bytes that pass between stages, and all bytes of a step. Nothing is scaled
down: a model has to fit the machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.runtime.launcher import RankPool
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.network import namespace_available
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan
from autoddl.pipelines.runtime.pipeline.stage_traffic import StageTraffic, stage_traffic
from autoddl.pipelines.runtime.wire import MESSAGE_BYTES
from autoddl.pipelines.schedule import Schedule

from ..models.builtin import recognise
from ..plan import Plan
from ..staging import schedule_of_plan, stage_plans
from ..tables import aligned
from .prediction import in_float32
from .run import Deadline, VerifyOptions, check_ranks, machine_limits, module_function, started
from .scaling import needed_flops, needed_memory_bytes
from .task import NUM_STEPS, Task

__all__ = ["PipelineTask", "PipelineVerification", "verify_pipeline"]

_JOBS = "autoddl.verification.rank_job"
_PIPELINE_JOB = "autoddl.verification.pipeline_job:run_pipeline"
#: Of bytes, relative to the prediction.
BYTES_TOLERANCE = 0.03
FORMAT = "autoddl-pipeline-verification"


@dataclass(frozen=True)
class PipelineTask:
    """What ranks are given: how model and data are made, and the pipeline."""

    task: Task
    schedule: Schedule
    stages: tuple[StagePlan, ...]


@dataclass(frozen=True)
class PipelineShard:
    """One rank's findings.

    Attributes:
        losses: this rank's parts of each step's mean loss.
        errors: of its stages' parameters after the last step, relative to one device's.
        boundary_bytes: that it sent to other stages in a step.
        step_bytes: what all ranks sent in a step; None where nothing was counted.
    """

    losses: tuple[float, ...]
    errors: Mapping[str, float]
    boundary_bytes: int
    step_bytes: int | None


@dataclass(frozen=True)
class PipelineVerification:
    """What came of it.

    Attributes:
        losses, expected: of each step, on the ranks and on one device.
        errors: the worst of any rank of every parameter.
        traffic: what a step is predicted to send.
        boundary_bytes, step_bytes: what it sent, between stages and in all (less what OneFlow sends with every message).
        uncounted: why bytes were not counted; "" where they were.
    """

    model: str
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    losses: tuple[float, ...]
    expected: tuple[float, ...]
    errors: Mapping[str, float]
    traffic: StageTraffic
    boundary_bytes: int
    step_bytes: float | None
    tolerance: float
    uncounted: str
    seconds: float = 0.0

    @property
    def loss_error(self) -> float:
        """The worst of all steps, relative."""
        return max(abs(found / wanted - 1) for found, wanted in zip(self.losses, self.expected))

    @property
    def predicted_boundary_bytes(self) -> float:
        return sum(sent.num_bytes for sent in self.traffic.between)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is off, a line each."""
        faults = []
        if not self.loss_error <= self.tolerance:
            faults.append(f"a loss differs from one device's by {self.loss_error:.1e}")
        for name, error in self.errors.items():
            if not error <= self.tolerance:
                faults.append(f"{name} differs from one device's by {error:.1e} after {NUM_STEPS} steps")
        for what, found, wanted in self._bytes():
            if abs(found - wanted) > BYTES_TOLERANCE * wanted + 1024 * sum(self.schedule.widths):
                faults.append(f"{what}: {format_bytes(found)} sent, {format_bytes(wanted)} predicted")
        return tuple(faults)

    @property
    def is_right(self) -> bool:
        return not self.faults

    def _bytes(self) -> list[tuple[str, float, float]]:
        rows: list[tuple[str, float, float]] = [
            ("between stages", self.boundary_bytes, self.predicted_boundary_bytes),
        ]
        if self.step_bytes is not None:
            rows.append(("a step in all", self.step_bytes, self.traffic.all.num_bytes))
        return rows

    def text(self) -> str:
        """As people read it."""
        schedule = self.schedule
        widths = ", ".join(map(str, (schedule.widths[worker] for worker in schedule.placement[0])))
        lines = [
            f"{self.model} in {schedule.num_stages} stages of {widths} ranks, {schedule.name} with "
            f"{schedule.num_micro_batches} micro-batches, against one device",
            "",
        ]
        rows: list[tuple[str, ...]] = [("stage", "layers", "inside, predicted", "gradients, predicted")]
        for number, (inside, gradients) in enumerate(zip(self.traffic.inside, self.traffic.gradients)):
            sent = (format_bytes(inside.num_bytes), format_bytes(gradients.num_bytes))
            rows.append((str(number), str(len(self.stages[number].strategies)), *sent))
        lines += aligned(rows, right=(1, 2, 3))
        lines.append("")
        rows = [("bytes", "sent", "predicted", "")]
        for what, found, wanted in self._bytes():
            ratio = f"x {found / wanted:.4f}" if wanted else ""
            rows.append((what, format_bytes(found), format_bytes(wanted), ratio))
        lines += aligned(rows, right=(1, 2))
        if self.uncounted:
            lines.append(f"other bytes were not counted: {self.uncounted}")
        worst = max(self.errors, key=lambda name: self.errors[name])
        lines += [
            "",
            f"losses of {NUM_STEPS} steps within {self.loss_error:.1e}, parameters after them within "
            f"{self.errors[worst]:.1e} ({worst}) of one device",
            *(f"off: {fault}" for fault in self.faults),
            f"{'right' if self.is_right else 'NOT right'}, in {self.seconds:.1f} s",
        ]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """As programs read it."""
        return {
            "format": FORMAT,
            "version": 1,
            "model": self.model,
            "verdict": "right" if self.is_right else "off",
            "schedule": self.schedule.name,
            "num_stages": self.schedule.num_stages,
            "num_ranks": sum(self.schedule.widths),
            "losses": list(self.losses),
            "expected_losses": list(self.expected),
            "parameter_errors": {name: min(error, 1e300) for name, error in self.errors.items()},
            "boundary_bytes": self.boundary_bytes,
            "predicted_boundary_bytes": self.predicted_boundary_bytes,
            "step_bytes": self.step_bytes,
            "predicted_step_bytes": self.traffic.all.num_bytes,
            "faults": list(self.faults),
            "seconds": self.seconds,
        }


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
        as of :func:`autoddl.verification.verify`.

    Raises:
        UserError: as there; or the model is too large, or the schedule asynchronous, which no single device repeats.
        RankError: a rank failed; it is named, and none is left.
    """
    options = options or VerifyOptions()
    deadline = Deadline(options.timeout_s)
    say = progress or (lambda text: None)
    stages, schedule = stage_plans(plan), schedule_of_plan(plan)
    check_ranks(plan, num_ranks)
    if sum(schedule.widths) != num_ranks:
        raise UserError(
            f"the plan's pipeline uses {sum(schedule.widths)} of {num_ranks} ranks, which cannot be verified"
        )
    if not schedule.is_synchronous:
        raise UserError(
            f"schedule {schedule.name} trains with weights of earlier steps, as no single device does; verify a plan with a "
            "synchronous one"
        )
    if not (available := is_available()):
        raise UserError(f"cannot verify: {available.reason}")
    uncounted = namespace_available().reason if num_ranks > 1 else "one rank sends nothing"
    micro_batch = plan.workload.micro_batch
    traffic = stage_traffic(schedule, plan.graph, stages, micro_batch, plan.cluster)
    with tempfile.TemporaryDirectory(prefix="autoddl-verify-") as folder:
        task = PipelineTask(_task(plan, model, options, folder, not uncounted), schedule, stages)
        say(f"starting {num_ranks} ranks")
        with contextlib.nullcontext(pool) if pool else started(num_ranks, not uncounted, deadline) as ranks:
            say("running on one device")
            reference = ranks.run(f"{_JOBS}:run_reference", task.task, timeout_s=deadline.left_s)[0]
            say(f"running on {num_ranks} ranks")
            shards: Sequence[PipelineShard] = ranks.run(_PIPELINE_JOB, task, timeout_s=deadline.left_s)
    errors: dict[str, float] = {}
    for shard in shards:
        for name, error in shard.errors.items():
            errors[name] = max(error, errors.get(name, 0.0))
    sent = shards[0].step_bytes
    found = PipelineVerification(
        plan.graph.name,
        schedule,
        stages,
        tuple(sum(parts) for parts in zip(*(shard.losses for shard in shards))),
        reference.losses,
        errors,
        traffic,
        sum(shard.boundary_bytes for shard in shards),
        None if sent is None else sent - MESSAGE_BYTES * traffic.all.num_messages,
        options.tolerance,
        uncounted,
    )
    return replace(found, seconds=deadline.passed_s)


def _task(plan: Plan, model: str, options: VerifyOptions, folder: str, counts_bytes: bool) -> Task:
    """The model and its data, as large as planned.

    Raises:
        UserError: the model cannot be made, or is too large for this machine.
    """
    function = module_function(plan, model)
    built_in = None if function else recognise(plan.graph)
    if built_in is None and not function:
        raise UserError(
            f"the plan's model {plan.graph.name} is none that can be built here; say what makes it: --model FILE.py:FUNCTION"
        )
    workload = in_float32(plan.workload)
    num_ranks = sum(schedule_of_plan(plan).widths)
    limits = options.limits or machine_limits(num_ranks)
    memory, flops = needed_memory_bytes(plan.graph, workload, num_ranks), needed_flops(plan.graph, workload)
    if memory > limits.memory_bytes or flops > limits.flops:
        raise UserError(
            f"{plan.graph.name} is too large to be verified here: {num_ranks} ranks need about {format_bytes(memory)} (there are "
            f"{format_bytes(limits.memory_bytes)}) and {flops:.2g} FLOPs (allowed are {limits.flops:.2g}); plans with a pipeline "
            "are not scaled down: plan a smaller model or batch, or give --full-size"
        )
    return Task(plan.graph, dict(plan.strategies), workload, built_in, function, options.seed, folder, counts_bytes)
