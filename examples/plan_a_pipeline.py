"""Plan a pipeline: one search chooses the stages, their schedule, and the strategies of their layers.

    python examples/plan_a_pipeline.py

Needs no OneFlow and no GPU.
"""

from __future__ import annotations

import autoddl

# Single-GPU servers with slow links between them: a pipeline sends far less than data parallelism.
servers = next(cluster for cluster in autoddl.clusters() if cluster.name == "v100-c").resized(num_nodes=2)

alone = autoddl.plan("gpt:4x256", cluster=servers, batch=8, sequence=128, vocabulary=1024)
plan = autoddl.plan("gpt:4x256", cluster=servers, batch=8, sequence=128, vocabulary=1024, pipeline="auto")
print(repr(plan))
print(f"without a pipeline a step takes {alone.step_s / plan.step_s:.2f} times as long\n")

# Print the layers of every stage, and its times for one micro-batch.
for stage in plan.stages:
    first, last = stage.layers[0], stage.layers[-1]
    passes = f"{stage.forward_s * 1e3:.2f} ms forward, {stage.backward_s * 1e3:.2f} ms backward"
    print(f"stage {stage.number}: {first} to {last}, {passes}")

# Print the schedule: a row per worker with the forward and backward passes of the micro-batches.
print(f"\n{plan.timeline}\n")

# Print how the busiest worker spends its time.
for part in plan.view.parts:
    print(f"{part.name:26} {part.seconds / plan.step_s:6.1%}")

# Print the differences from the plan without a pipeline.
print(f"\n{alone.diff(plan)}")
