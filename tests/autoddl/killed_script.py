"""What the ranks run in the test of kills: they train the plan, a checkpoint after each step, and one dies as it is told.

    killed_script.py STEPS ["[damage ]RANK:SAVE:PART" ...]

Of attempt n the nth word says which rank kills itself, and when: in the attempt's save of that number, from 1, once it has done
this part of the calls that the save before it took, of the functions below, which change the disk. Where the word begins with
``damage``, rank 0 shortens a part of the newest checkpoint first.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import oneflow as flow
from plan_training import run_steps, trainer_of

import autoddl

JOB = autoddl.launched()
NUM_STEPS, WORDS = int(sys.argv[1]), sys.argv[2:]
word = WORDS[JOB.restart] if JOB.restart < len(WORDS) else "-1:0:0"
rank, number, part = map(float, word.split()[-1].split(":"))
saves = [0]  # calls in each


def watched(function):
    def call(*arguments, **options):
        if rank == JOB.rank and number == len(saves) and saves[-1] == int(part * saves[-2]):
            os.kill(os.getpid(), signal.SIGKILL)
        saves[-1] += 1
        return function(*arguments, **options)

    return call


def save():
    assert trainer.save(JOB.checkpoints)
    saves.append(0)


if word.startswith("damage") and JOB.rank == 0:
    newest = max(JOB.checkpoints.glob("step-*"))
    os.truncate(newest / "rank-1.npz", 1000)
    print("damaged", newest.name, flush=True)
flow.comm.barrier()

plan = JOB.load_plan()
trainer = trainer_of(plan, JOB.trainer)
trainer.restore(JOB.checkpoints)
for module, names in ((os, ("fsync", "rename", "mkdir", "unlink", "rmdir")), (np.lib.format, ("write_array",))):
    for name in names:
        setattr(module, name, watched(getattr(module, name)))
run_steps(trainer, plan, NUM_STEPS, save)
print("left", *sorted(path.name for path in Path(JOB.checkpoints).iterdir()), flush=True)
