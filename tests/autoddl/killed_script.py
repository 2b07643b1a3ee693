"""What the ranks run in the test of kills: they train the plan, a checkpoint after each step, and one dies as it is told.

    killed_script.py STEPS ["[damage ]RANK:EVENT" ...]

Of attempt n the nth word says which rank kills itself, and when: before the call of that number, from 0, of the functions below,
which change the disk. Where the word begins with ``damage``, rank 0 shortens a part of the newest checkpoint first.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import oneflow as flow

import autoddl
from autoddl.models.builtin import recognise
from autoddl.pipelines.runtime.models import initialize
from autoddl.verification.rank_job import build_module, make_batch

JOB = autoddl.launched()
NUM_STEPS, WORDS = int(sys.argv[1]), sys.argv[2:]
num_events = 0


def pass_by():
    global num_events
    if word.split()[-1:] == [f"{JOB.rank}:{num_events}"]:
        os.kill(os.getpid(), signal.SIGKILL)
    num_events += 1


def watched(function):
    def call(*arguments, **options):
        pass_by()
        return function(*arguments, **options)

    return call


word = WORDS[JOB.restart] if JOB.restart < len(WORDS) else ""
for module, names in ((os, ("fsync", "rename", "mkdir", "unlink", "rmdir")), (np.lib.format, ("write_array",))):
    for name in names:
        setattr(module, name, watched(getattr(module, name)))
if word.startswith("damage") and JOB.rank == 0:
    newest = max(JOB.checkpoints.glob("step-*"))
    os.truncate(newest / "rank-1.npz", 1000)
    print("damaged", newest.name, flush=True)
flow.comm.barrier()

plan = JOB.load_plan()
built_in = recognise(plan.graph)
trainer = JOB.trainer(
    initialize(build_module(built_in), 1),
    lambda weights: flow.optim.Adam(weights, lr=0.01, eps=1e-3),
    lambda number: make_batch(built_in, plan.workload.micro_batch, np.random.default_rng([3, number])),
)
trainer.restore(JOB.checkpoints)
while trainer.num_updates < NUM_STEPS:
    losses = trainer.run().losses
    if losses:
        mean = sum(losses.values()) / plan.workload.num_micro_batches
        print("step", trainer.num_updates, f"{mean:.7f}", flush=True)
    assert trainer.save(JOB.checkpoints)
print("events", num_events, *sorted(path.name for path in Path(JOB.checkpoints).iterdir()), flush=True)
