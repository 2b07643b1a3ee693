"""As the job that verifies a pipeline, but one device knows of no delays."""

from __future__ import annotations

from autoddl.verification.pipeline_job import count_pipeline, run_pipeline
from autoddl.verification.rank_job import run_reference

__all__ = ["count_pipeline", "run_one_device", "run_pipeline"]


def run_one_device(pipeline):
    return run_reference(pipeline.task, gradient_step=pipeline.gradient_step)
