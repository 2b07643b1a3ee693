"""A cluster from measurements: fit it, test it, plan on it.

    python examples/fit_a_cluster.py

Measurements are times of collectives: those that `autoddl calibrate` takes, the output of nccl-tests, or any CSV like the one
that is written here.  Needs no OneFlow and no GPU.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import autoddl

# What a benchmark might have said: an all-reduce takes 2 (n - 1) messages of 4 us and sends 2 (n - 1) / n of its bytes at 90 GB/s,
# give or take 3 %.
random.seed(0)
rows = ["collective,ranks,bytes,seconds"]
for ranks in (2, 4, 8):
    for size in (4**k for k in range(6, 14)):
        seconds = 2 * (ranks - 1) * (4e-6 + size / ranks / 90e9)
        rows += [f"all-reduce,{ranks},{size},{seconds * random.uniform(0.97, 1.03):.9g}" for _ in range(3)]
folder = Path(tempfile.mkdtemp())
measured = folder / "measured.csv"
measured.write_text("\n".join(rows))

# Everything that was not measured (memory, arithmetic, the network between nodes) is a DGX A100's.
found = autoddl.fit(measured, base="dgx-a100", name="ours")
print(found)
found.save(folder / "ours.json")

# How well does it predict what was measured, and how well does the datasheet?
print(f"\n{autoddl.predict(measured, cluster=found.cluster)}")
print(f"\n{autoddl.predict(measured, cluster='dgx-a100')}")

# A plan on a calibrated cluster says how far it can be trusted.
plan = autoddl.plan("gpt2", cluster=found.cluster, nodes=1, batch=32)
assert plan.trust is not None
print(f"\n{plan!r}\nthe best plan with probability {plan.trust.trust.probability:.0%}, given what was measured")
