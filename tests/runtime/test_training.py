"""A language model trained on real text at its optimal plan, beside one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.joint.result import unpipelined
from autoddl.planfile import plan_document, save_plan
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import Transformer, gpt

JOBS = Path(__file__).with_name("training_jobs.py")
TEXT = Path(__file__).with_name("sonnets.txt")
SIZES = Transformer("gpt", layers=1, width=64, heads=4, sequence=32, vocabulary=128)
NUM_STEPS, BATCH = 8, 16


def test_steps_on_sonnets_are_those_of_one_device(ranks, tmp_path):
    """Four ranks, since the optimal plan of two splits nothing but samples."""
    characters = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8).astype(np.int64)
    assert 2500 < len(characters) < 5000 and characters.max() < SIZES.vocabulary
    rng = np.random.default_rng(0)
    starts = rng.integers(len(characters) - SIZES.sequence, size=(NUM_STEPS, BATCH, 1))
    batches = list(characters[starts + np.arange(SIZES.sequence + 1)])
    path = tmp_path / "plan.json"
    options = Options(batch=BATCH, micro_batch=BATCH, precision="float32", recompute=False, objective="communication")
    planned = make_plan(gpt(SIZES), load_cluster("dgx-a100").resized(1, 4), options)
    assert planned.optimal and any(s.p1 * s.p2 > 1 for s in planned.strategies.values())
    save_plan(path, plan_document(unpipelined(planned)))
    results = ranks(4).run(f"{JOBS}:train_on_text", str(path), SIZES, batches)
    curves = {name: np.array(losses) for name, losses in {**results[1], **results[0]}.items()}
    for other in results[1:]:
        assert other["plan"] == results[0]["plan"]
    one = curves["one device"]
    assert one[0] > 4.5 and one[-3:].max() < 3.3  # it learns: 4.85 is a guess among 128
    # One device that sums in another order differs by rounding alone; so does the plan.
    noise = np.abs(curves["one device, halved"] / one - 1).max()
    difference = np.abs(curves["plan"] / one - 1)
    assert difference[0] < 1e-6
    assert difference.max() < max(10 * noise, 1e-5), (difference.max(), noise)
