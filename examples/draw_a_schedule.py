"""Generate, simulate, compare and draw pipeline schedules.

    python examples/draw_a_schedule.py [PICTURE.svg]

Needs no OneFlow and no GPU.
"""

from __future__ import annotations

import sys

import autoddl

# Compare all synchronous families on 4 stages. A backward pass takes twice as long as a forward pass.
for family in autoddl.schedule_families():
    if family.synchronous:
        run = autoddl.schedule(family.name, stages=4, micro_batches=8).simulate(forward=1, backward=2)
        print(f"{family.name:18} makespan {run.makespan:5.1f}, bubbles {run.bubble_ratio:6.1%}")

# Chimera runs two pipelines in opposite directions. Each pipeline fills bubbles of the other one.
chimera = autoddl.schedule("chimera", stages=4, micro_batches=8)
timeline = chimera.simulate(forward=1, backward=2, transfer=0.1)
print(f"\n{chimera!r}\n{timeline}")

# Draw the timeline. The picture shows the task and the times of a bar when the mouse points at the bar.
if len(sys.argv) > 1:
    timeline.to_svg(sys.argv[1])
