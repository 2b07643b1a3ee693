"""Fit the cost model of a cluster to measurements, test the fit, and plan with it.

    python examples/fit_a_cluster.py

Measurements are times of collectives: the samples of `autoddl calibrate`, the output of nccl-tests, or a CSV file like the one that
this script writes. Needs no OneFlow and no GPU.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import autoddl

# Synthetic measurements of an all-reduce over n ranks: 2 (n - 1) messages of 4 us each, and 2 (n - 1) / n of the bytes sent at
# 90 GB/s, with random errors of up to 3 %.
random.seed(0)
rows = ["collective,ranks,bytes,seconds"]
for ranks in (2, 4, 8):
    for size in (4**k for k in range(6, 14)):
        seconds = 2 * (ranks - 1) * (4e-6 + size / ranks / 90e9)
        rows += [f"all-reduce,{ranks},{size},{seconds * random.uniform(0.97, 1.03):.9g}" for _ in range(3)]
folder = Path(tempfile.mkdtemp())
measured = folder / "measured.csv"
measured.write_text("\n".join(rows))

# Figures that were not measured (memory, FLOP/s, the network between nodes) are copied from the built-in cluster dgx-a100.
found = autoddl.fit(measured, base="dgx-a100", name="ours")
print(found)
found.save(folder / "ours.json")

# Compare the predictions of the fitted cluster, and those of the datasheet, with the measurements.
print(f"\n{autoddl.predict(measured, cluster=found.cluster)}")
print(f"\n{autoddl.predict(measured, cluster='dgx-a100')}")

# A plan for a calibrated cluster has the probability that it is the best plan.
plan = autoddl.plan("gpt2", cluster=found.cluster, nodes=1, batch=32)
assert plan.trust is not None
print(f"\n{plan!r}\nthe best plan with probability {plan.trust.trust.probability:.0%}, given what was measured")
