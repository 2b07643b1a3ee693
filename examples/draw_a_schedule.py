"""Pipeline schedules: generated, simulated, compared and drawn.

    python examples/draw_a_schedule.py [PICTURE.svg]

Needs no OneFlow and no GPU.
"""

from __future__ import annotations

import sys

import autoddl

# All synchronous families at the same depth; a backward pass takes twice a forward pass.
for family in autoddl.schedule_families():
    if family.synchronous:
        run = autoddl.schedule(family.name, stages=4, micro_batches=8).simulate(forward=1, backward=2)
        print(f"{family.name:18} makespan {run.makespan:5.1f}, bubbles {run.bubble_ratio:6.1%}")

# Chimera runs two pipelines in opposite directions: the bubbles of one are filled by the other.
chimera = autoddl.schedule("chimera", stages=4, micro_batches=8)
timeline = chimera.simulate(forward=1, backward=2, transfer=0.1)
print(f"\n{chimera!r}\n{timeline}")

# A picture; every bar tells its task and its times when pointed at.
if len(sys.argv) > 1:
    timeline.to_svg(sys.argv[1])
