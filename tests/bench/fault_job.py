"""What every rank does in the experiment "faults": trains so many steps, and saves a checkpoint after each second one."""

from __future__ import annotations

import os
import sys

import numpy as np
import oneflow as flow

import autoddl
from autoddl.pipelines.runtime.models import initialize
from autoddl.zoo.builtin import recognise
from autoddl.zoo.modules import build_module, make_batch


def main() -> None:
    """Train, from the latest checkpoint on."""
    job = autoddl.launched()
    plan = job.load_plan()
    print(f"pid {os.getpid()}", flush=True)
    built_in = recognise(plan.graph)
    assert built_in is not None and job.checkpoints is not None

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        return make_batch(built_in, plan.workload.micro_batch, np.random.default_rng(number))

    module = initialize(build_module(built_in), 0)
    trainer = job.trainer(module, lambda parameters: flow.optim.Adam(parameters, lr=1e-3), batch)
    trainer.restore(job.checkpoints)
    while trainer.num_updates < int(sys.argv[1]):
        losses = trainer.run().losses
        if losses:
            print(f"step {trainer.num_updates}: {sum(losses.values()) / len(losses):.7f}", flush=True)
        if trainer.num_updates % 2 == 0:
            trainer.save(job.checkpoints)


if __name__ == "__main__":
    main()
