"""What ranks do to verify a plan with a pipeline; imported by ranks only, since it needs OneFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.pipeline.planned_model import PlannedModel
from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
from autoddl.pipelines.runtime.wire import Meter

from .pipelines import PipelineShard, PipelineTask
from .rank_job import load_reference, make_model, make_optimizer, relative_errors, step_data, under
from .task import NUM_STEPS

__all__ = ["run_pipeline"]

flow: Any = load_oneflow()


def run_pipeline(pipeline: PipelineTask) -> PipelineShard:
    """Some steps with the plan's schedule, on all ranks; the bytes of the last one are counted."""
    task = pipeline.task
    values = load_reference(task)
    module, examples = make_model(task)
    module.load_state_dict({name: flow.tensor(value) for name, value in under("initial", values).items()})
    size, per_step = task.workload.micro_batch, task.workload.num_micro_batches

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        step, place = divmod(number, per_step)
        inputs, targets = step_data(task, examples, step)
        return inputs[place * size : (place + 1) * size], targets[place * size : (place + 1) * size]

    trainer = PipelineTrainer(
        PlannedModel(module, task.graph, pipeline.stages),
        pipeline.schedule,
        lambda parameters: make_optimizer(task, parameters, float(values["epsilon"])),
        batch,
    )
    meter = Meter() if task.counts_bytes else None
    losses, boundary_bytes, sent = [], 0, None
    for _ in range(NUM_STEPS):
        if meter is None:
            report = trainer.run()
        else:
            report, traffic = meter(trainer.run)
            sent = traffic.payload_bytes
        losses.append(sum(report.losses.values()) / per_step)
        boundary_bytes = report.bytes_sent
    found = trainer.parameters()
    expected = under("final", values)
    errors = relative_errors(found, expected)
    return PipelineShard(tuple(losses), {name: errors[name] for name in found}, boundary_bytes, sent)
