"""Plan a model that is built in, and look at the plan from all sides.

    python examples/plan_a_known_model.py

Needs no OneFlow and no GPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import autoddl

# GPT-2 XL on two nodes of eight A100: 256 sequences per training step.
plan = autoddl.plan("gpt2-xl", cluster="dgx-a100", nodes=2, batch=256)
print(repr(plan), "\n")

# The whole plan, as the command `autoddl plan` prints it.
print(plan, "\n")

# How fast is it, and what is proven?
print(f"a step takes {plan.step_s:.2f} s, {plan.samples_per_s:.0f} sequences per second")
print(f"proven optimal: {plan.optimal} (no plan is faster than {plan.lower_bound_s:.2f} s)\n")

# What would other strategies of a layer cost?
for alternative in plan.alternatives("h.*.mlp.c_fc"):
    print(f"{alternative.strategy}: {alternative.regret_s * 1e3:.1f} ms more, because of {alternative.limit}")

# What do half as many devices make of it?
smaller = autoddl.plan("gpt2-xl", cluster="dgx-a100", nodes=1, batch=256)
print(f"\non one node: {smaller.step_s / plan.step_s:.2f} times as long")

# Keep the plan, its report, and the model written out at its layouts.
folder = Path(tempfile.mkdtemp())
plan.save(folder / "plan.json")
plan.report(folder / "report.html")
plan.export(folder / "model.py")
print(f"written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
