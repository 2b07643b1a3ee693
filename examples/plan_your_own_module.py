"""Plan a OneFlow module of one's own, and train it at the plan's layouts.

    python examples/plan_your_own_module.py                     # plans, and trains on one rank
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
    """Two linear layers and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = flow.nn.Linear(WIDTH, 4 * WIDTH), flow.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(flow.nn.functional.gelu(self.up(x)))


class Classifier(flow.nn.Module):
    """Returns the loss: then the plan covers it, and the applied module trains by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = flow.nn.Sequential(flow.nn.Linear(INPUTS, WIDTH), Residual(), Residual())
        self.head = flow.nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels):
        return flow.nn.functional.cross_entropy(self.head(self.body(x)), labels)


def samples():
    """A batch whose labels follow from its rows."""
    rows = flow.randn(BATCH, INPUTS)
    return rows, rows[:, :CLASSES].argmax(dim=1)


def planned(module, num_ranks):
    """The plan for so many ranks: AutoDDL looks at the module as it is."""
    return autoddl.plan(module, samples(), cluster="local-cpu", devices_per_node=num_ranks, batch=BATCH)


flow.manual_seed(0)  # the same initial values and data on every rank
module = Classifier()

if len(sys.argv) == 3:
    plan = planned(module, int(sys.argv[1]))
    plan.save(sys.argv[2])
    print(plan)
    sys.exit()

# On the ranks of a job the plan is the one that the job was launched with.
is_launched = "AUTODDL_PLAN" in os.environ
plan = autoddl.launched().load_plan() if is_launched else planned(module, 1)
trained = autoddl.apply(module, plan)
optimizer = flow.optim.SGD(trained.parameters(), lr=0.2)
for step in range(20):
    optimizer.zero_grad()
    loss = trained.train_step(*samples())
    optimizer.step()
    if step % 5 == 4 and int(os.environ.get("RANK", "0")) == 0:
        print(f"step {step + 1}: loss {float(loss):.3f}")
