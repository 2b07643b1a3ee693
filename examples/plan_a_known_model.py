"""Plan a built-in model, and explain, save, report and export the plan.

    python examples/plan_a_known_model.py

Needs no OneFlow and no GPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import autoddl

# Plan GPT-2 XL on two nodes of eight A100, with 256 sequences per training step.
plan = autoddl.plan("gpt2-xl", cluster="dgx-a100", nodes=2, batch=256)
print(repr(plan), "\n")

# Print the whole plan, as the command `autoddl plan` does.
print(plan, "\n")

# Print the predicted step time, and what is proven.
print(f"a step takes {plan.step_s:.2f} s, {plan.samples_per_s:.0f} sequences per second")
print(f"proven optimal: {plan.optimal} (no plan is faster than {plan.lower_bound_s:.2f} s)\n")

# Print the costs of alternative strategies of a layer.
for alternative in plan.alternatives("h.*.mlp.c_fc"):
    print(f"{alternative.strategy}: {alternative.regret_s * 1e3:.1f} ms more, because of {alternative.limit}")

# Plan the same model on half as many devices.
smaller = autoddl.plan("gpt2-xl", cluster="dgx-a100", nodes=1, batch=256)
print(f"\non one node: {smaller.step_s / plan.step_s:.2f} times as long")

# Write the plan, its HTML report, and the model as OneFlow code.
folder = Path(tempfile.mkdtemp())
plan.save(folder / "plan.json")
plan.report(folder / "report.html")
plan.export(folder / "model.py")
print(f"written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
