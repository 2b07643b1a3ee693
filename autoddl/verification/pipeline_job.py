"""What ranks do to verify a plan with a pipeline; imported by ranks only, since it needs OneFlow.

One device runs the same updates with the same delays: where a schedule is asynchronous, the parameters of a stage with delay d
take part in step t as they were d updates before, and the gradients update the newest values.  That is all of an asynchronous
schedule's semantics, since the micro-batches of one update share their versions; how the pipeline stashes weights and in which
order it computes is its own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.pipeline.planned_model import PlannedModel
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.rank import report
from autoddl.pipelines.runtime.wire import Meter

from .pipeline_result import PipelineShard
from .rank_job import load_reference, make_model, make_optimizer, relative_errors, run_reference, step_data, under
from .task import NUM_STEPS, Counted, PipelineTask, Reference, Section

__all__ = ["count_pipeline", "run_one_device", "run_pipeline"]

flow: Any = load_oneflow()


def run_one_device(pipeline: PipelineTask) -> Reference | None:
    """The reference, on the first rank; the others return at once."""

    def delays_of(module: Any) -> Mapping[str, int]:
        holders = PlannedModel(module, pipeline.task.graph, pipeline.stages).holders()
        return {name: pipeline.schedule.delays[stages[0]] for name, stages in holders.items()}

    return run_reference(pipeline.task, delays_of, pipeline.gradient_step)


def run_pipeline(pipeline: PipelineTask) -> PipelineShard:
    """Some steps with the plan's schedule, on all ranks; the bytes of the last run are counted."""
    task, schedule = pipeline.task, pipeline.schedule
    values, trainer = _trainer(pipeline)
    meter = Meter() if task.counts_bytes else None
    report("tracing steps" if meter is None else "counting bytes, layer by layer")
    sections = _sections(trainer, meter)
    losses: list[float] = []
    gradient_errors: dict[str, float] = {}
    while len(losses) < NUM_STEPS:
        report(f"step {len(losses) + 1} of {NUM_STEPS}")
        ran, traffic = (trainer.run(), None) if meter is None else meter(trainer.run)
        for update in range(schedule.num_updates):
            if len(losses) == pipeline.gradient_step:
                gradient_errors = _errors(trainer.gradients(update), under("gradient", values))
            numbers = schedule.micro_batches_of(update)
            losses.append(sum(ran.losses.get(number, 0.0) for number in numbers) / len(numbers))
    return PipelineShard(
        tuple(losses),
        gradient_errors,
        _errors(trainer.parameters(), under("final", values)),
        sections,
        ran.bytes_sent,
        traffic.payload_bytes if traffic else None,
    )


def count_pipeline(pipeline: PipelineTask) -> Counted:
    """Bytes alone, once more, on all ranks."""
    _, trainer = _trainer(pipeline)
    meter = Meter()
    sections = _sections(trainer, meter)
    _, traffic = meter(trainer.run)
    return Counted(tuple(section.payload_bytes or 0 for section in sections), traffic.payload_bytes)


def _trainer(pipeline: PipelineTask) -> tuple[dict[str, np.ndarray], PipelineTrainer]:
    """What one device found, and the pipeline at its initial values."""
    task = pipeline.task
    values = load_reference(task)
    module, examples = make_model(task)
    module.load_state_dict({name: flow.tensor(value) for name, value in under("initial", values).items()})
    size, per_step = task.workload.micro_batch, task.workload.num_micro_batches

    @functools.lru_cache(maxsize=2)
    def data_of(step: int) -> tuple[np.ndarray, ...]:
        return step_data(task, examples, step)

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        step, place = divmod(number, per_step)
        inputs, targets = data_of(step)
        return inputs[place * size : (place + 1) * size], targets[place * size : (place + 1) * size]

    trainer = PipelineTrainer(
        PlannedModel(module, task.graph, pipeline.stages),
        pipeline.schedule,
        lambda parameters: make_optimizer(task, parameters, float(values["epsilon"])),
        batch,
        keep_gradients=True,
    )
    return values, trainer


def _sections(trainer: PipelineTrainer, meter: Meter | None) -> tuple[Section, ...]:
    return tuple(
        Section(s.layer, s.phase, s.steps, None if s.traffic is None else s.traffic.payload_bytes)
        for s in trainer.trace(meter)
    )


def _errors(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of the parameters of this rank's stages; those that nothing reaches have a gradient of zero."""
    whole = {**{name: np.zeros_like(value) for name, value in found.items()}, **expected}
    errors = relative_errors(found, whole)
    return {name: errors[name] for name in found}
