"""Plan your own OneFlow module, and train it with the layouts of the plan.

    python examples/plan_your_own_module.py                     # plans for one rank, and trains
    python examples/plan_your_own_module.py 2 plan.json         # plans for two ranks ...
    autoddl launch plan.json examples/plan_your_own_module.py   # ... and trains on them

Needs OneFlow (Linux, Python 3.10); ranks are processes on CPUs.
"""

from __future__ import annotations

import os
import sys

import autoddl

flow = autoddl.load_oneflow()

INPUTS, WIDTH, CLASSES, BATCH = 32, 64, 10, 64


class Residual(flow.nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = flow.nn.Linear(WIDTH, 4 * WIDTH), flow.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(flow.nn.functional.gelu(self.up(x)))


class Classifier(flow.nn.Module):
    """A classifier that returns its loss, so that the plan includes the loss and the applied module can train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = flow.nn.Sequential(flow.nn.Linear(INPUTS, WIDTH), Residual(), Residual())
        self.head = flow.nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels):
        return flow.nn.functional.cross_entropy(self.head(self.body(x)), labels)


def samples():
    """Return a random batch, with labels that depend on its rows."""
    rows = flow.randn(BATCH, INPUTS)
    return rows, rows[:, :CLASSES].argmax(dim=1)


def planned(module, num_ranks):
    """Return the plan of the module for `num_ranks` ranks."""
    return autoddl.plan(module, samples(), cluster="local-cpu", devices_per_node=num_ranks, batch=BATCH)


flow.manual_seed(0)  # the same initial values and data on every rank
module = Classifier()

if len(sys.argv) == 3:
    plan = planned(module, int(sys.argv[1]))
    plan.save(sys.argv[2])
    print(plan)
    sys.exit()

# In a launched job, load the plan that the job was launched with.
is_launched = "AUTODDL_PLAN" in os.environ
plan = autoddl.launched().load_plan() if is_launched else planned(module, 1)
trained = autoddl.apply(module, plan)
optimizer = flow.optim.SGD(trained.parameters(), lr=0.2)
for step in range(20):
    loss = trained.train_step(*samples())
    trained.step(optimizer)
    if step % 5 == 4 and int(os.environ.get("RANK", "0")) == 0:
        print(f"step {step + 1}: loss {float(loss):.3f}")
