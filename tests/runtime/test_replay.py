"""Traced programs on ranks: every operator, and models with everything that is no layer of a known kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import is_available

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)

JOBS = Path(__file__).with_name("traced_jobs.py")
ZOO = Path(__file__).parents[1] / "bench" / "zoo_models.py"
#: Models of the benchmark that need little time, each for something else.
MODELS = {
    "block_stack": "the first sum reads the model's input",
    "gru_classifier": "a recurrent layer in both directions, a table with padding, means over masked rows",
    "bert_with_mask": "five inputs, a padding mask, a loss that divides sums over all samples",
    "gpt_interleaved": "q, k and v of each head together; a table read twice",
    "gpt2": "weights stored as (in, out)",
    "t5": "biases by relative position, shared by layers; attention to another sequence",
    "deepfm": "offsets of indices in a buffer, batch norm of rows",
    "dcgan_generator": "transposed convolutions",
    "vae": "several sums over all samples",
    "autoencoder": "one weight, and its transpose; no targets",
    "clip": "all pairs of samples",
    "siamese": "three batches in one tensor, a frozen table",
    "outputs_of_several_kinds": "a dictionary of outputs, no loss",
    "weighted_norm": "weights that are computed, and a penalty on them",
    "random_parts": "noise that is there in evaluation, too",
    "mixed_sharing": "a weight that a product and a penalty read, and a parameter that nothing reads",
    "two_heads": "something else in evaluation",
    "sync_norms": "statistics of all samples, in layers and in a program",
    "swin": "windows",
    "ties": "weights of one layer, biases of another",
    "stacked_gru": "a dropout between recurrent layers",
    "norms_by_hand": "norms of different formulas, whose module says nothing of them",
    "row_norms": "a batch norm whose rows are several of each sample",
    "gated": "gates first and last, and products that look like gates",
    "convnext": "permuted products",
}


#: Models whose attention changes its scores, or turns queries and keys by their positions in an unusual way.
ATTENTIONS = [
    *("t5", "swin", "bert_with_mask", "gpt_interleaved", "windows_with_dropout", "key_groups", "across"),
    *("turned", "turned_with_mask", "gpt2"),
]


@pytest.mark.ranks
def test_models_compute_what_one_device_computes(ranks: Any) -> None:
    """All models in one job, split along the batch. Takes 15 s, since ranks trace every model twice."""
    for differences in ranks(2).run(f"{JOBS}:compared", list(MODELS)):
        assert differences == dict.fromkeys(MODELS, "")


@pytest.mark.ranks
def test_heads_are_divided_whatever_happens_to_their_scores(ranks: Any) -> None:
    """Learned biases, masks of inputs and tables, factors, windows, dropout, turned pairs: a rank has half the heads."""
    for differences in ranks(2).run(f"{JOBS}:compared", ATTENTIONS, True):
        assert differences == dict.fromkeys(ATTENTIONS, "")


def cases() -> list[tuple[str, str]]:
    if not available:
        return []
    from . import operator_cases

    return [(table, name) for table in ("ROWS", "IMAGES") for name in getattr(operator_cases, table)]


@pytest.fixture(scope="module")
def differences() -> Any:
    """What differs in each case, from a process of its own: tracing unusual operators can end in an abort of OneFlow."""
    done = subprocess.run([sys.executable, str(JOBS)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("table", "name"), cases())
def test_operators_are_replayed(differences: Any, table: str, name: str) -> None:
    """Loss and gradient of one rank are those of the module; its graph was traced with another number of samples."""
    assert differences[f"{table} {name}"] == ""


def test_values_are_compared() -> None:
    """The comparison of `test_operators_are_replayed` finds a wrong operator."""
    from .traced_jobs import flow, replayed

    def changing(x: Any, i: Any) -> Any:
        changing.factor += 1.0  # type: ignore[attr-defined]
        return x * changing.factor  # type: ignore[attr-defined]

    changing.factor = 1.0  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="it should be the same, or grow with them"):
        replayed(changing, (6, 8))
    calls: list[int] = []

    def other(x: Any, i: Any) -> Any:
        calls.append(0)
        return flow.sin(x) if len(calls) > 2 else flow.cos(x)  # after both traces

    assert "in place of" in replayed(other, (6, 8))


def test_arrays_of_another_size_are_refused() -> None:
    from .traced_jobs import flow, np, refusals

    model = flow.nn.Linear(8, 5)

    class Classifier(flow.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Any, y: Any) -> Any:
            return flow.nn.functional.cross_entropy(self.layer(x), y)

    module, examples = Classifier(), (flow.zeros(4, 8), flow.zeros(4, dtype=flow.int64))
    inputs, labels = np.zeros((4, 8), np.float32), np.zeros(4, np.int64)
    words = refusals(module, examples, [(inputs, labels[:1]), (inputs[:, :6], labels)])
    assert words[0] == "loss (loss, 1x1): targets of shape (1,), should have 4 samples of 1 elements"
    assert words[1] == "layer (linear, 8 -> 5): input of shape (4, 6), should have 4 samples of 1 x 8 elements"


@pytest.mark.ranks
def test_synchronised_norms_have_the_statistics_of_all_samples(tmp_path: Path) -> None:
    """In training, in layers and in a program, against one device; and their sums are among the bytes that are sent."""
    model, plan = f"{ZOO}:sync_norms", str(tmp_path / "plan.json")
    size = ["--cluster", "local-cpu", "--devices-per-node", "2", "--batch", "8"]
    for command in (["plan", model, *size, "-o", plan], ["verify", plan, "--ranks", "2", "--model", model]):
        done = subprocess.run([sys.executable, "-m", "autoddl", *command], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Right: the plan computes what one device computes")
