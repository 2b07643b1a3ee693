"""Traces of measured steps: what they hold, and that they agree with the price. No verdict depends on how long anything takes."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import autoddl
from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.spans import Communication, Span, with_waiting
from autoddl.steptrace import StepTrace
from autoddl.text.steptrace import trace_text

from .launches import PATIENCE_S, forget_jobs, launch_command
from .sample_plans import cpu_pipeline

ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)


def communication(start: float, end: float, size: int, stride: int) -> Span:
    what = Communication("all-reduce", size, stride, 100.0)
    return Span("communication", "fc", "backward", start, end, start, what)


def test_waiting_is_until_the_last_rank_of_the_group():
    """Ranks 0 2 and 1 3 sum along stride 2; then all four do. Rank 2 is late at first, rank 1 at last."""
    pairs = {0: (1.0, 4.0), 1: (1.0, 2.0), 2: (3.0, 4.0), 3: (1.5, 2.0)}
    all_four = {0: (5.0, 9.0), 1: (8.0, 9.0), 2: (5.0, 9.0), 3: (5.0, 9.0)}
    spans = {r: [communication(*pairs[r], 2, 2), communication(*all_four[r], 4, 1)] for r in range(4)}
    divided = with_waiting(spans)
    shown = {rank: [(span.kind, span.start, span.end) for span in own] for rank, own in divided.items()}
    assert shown == {
        0: [("waiting", 1, 3), ("communication", 3, 4), ("waiting", 5, 8), ("communication", 8, 9)],
        1: [("waiting", 1, 1.5), ("communication", 1.5, 2), ("communication", 8, 9)],
        2: [("communication", 3, 4), ("waiting", 5, 8), ("communication", 8, 9)],
        3: [("communication", 1.5, 2), ("waiting", 5, 8), ("communication", 8, 9)],
    }


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two micro-batches of a small transformer on 2 x 2 ranks: two groups share the samples, two ranks each layer (Megatron)."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    options = {
        "heads": 2,
        "sequence": 16,
        "vocabulary": 256,
        "nodes": 1,
        "devices_per_node": 4,
        "batch": 8,
        "micro_batch": 4,
    }
    autoddl.price("gpt:2x64", cluster="local-cpu", tp=2, dp=2, **options).save(path)
    return path


@pytest.fixture(scope="module")
def traced(plan_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[StepTrace, dict]:
    """The trace of a training, and its file."""
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    training = autoddl.train(plan_path, steps=4, trace=file, quiet=True)
    assert training.trace is not None
    return training.trace, json.loads(file.read_text())


@pytest.mark.ranks
@needs_oneflow
def test_spans_cover_the_step(traced):
    """On every rank one span follows another from the beginning of the step to its end."""
    trace, _ = traced
    assert len(trace.traced) == 4
    for each in trace.traced:
        spans, now = each.recorded.spans, 0.0
        for span in spans:
            assert 0 <= span.start - now <= 2.1e-6 and span.start <= span.launched <= span.end + 1e-9
            now = span.end
        assert now <= each.recorded.seconds
        assert {span.kind for span in spans} == {"computation", "communication", "waiting"}
    totals = trace.totals()
    assert sum(totals[kind] for kind in ("computation", "communication", "waiting")) <= trace.recorded_s
    assert 0 < totals["dispatch"] < trace.recorded_s and trace.step_s > 0


@pytest.mark.ranks
@needs_oneflow
def test_communication_sends_what_is_priced(traced):
    """Layer by layer and phase by phase, under the same names; only the mean loss is not priced."""
    trace, _ = traced
    rows = [row for row in trace.differences() if row.kind == "communication"]
    assert sum(row.predicted_bytes for row in rows) > 0
    for row in rows:
        unpriced = 2 * 4 if (row.layer, row.phase) == ("loss", "forward") else 0  # two micro-batches
        assert row.sent_bytes == pytest.approx(row.predicted_bytes + unpriced, abs=64), row


@pytest.mark.ranks
@needs_oneflow
def test_layers_compute_in_the_phases_that_are_priced(traced):
    trace, _ = traced
    names = [layer.name for layer in trace.plan.graph.layers]
    found = {(row.layer, row.phase) for row in trace.differences() if row.kind == "computation" and row.measured_s > 0}
    assert {(name, phase) for name in names for phase in ("forward", "backward")} - found <= {
        ("wte", "backward"),
        ("wpe", "backward"),
    }
    assert ("", "optimizer step") in found


@pytest.mark.ranks
@needs_oneflow
def test_the_file_has_both_timelines(traced, plan_path, tmp_path):
    """A process for each rank with its rows, and behind them the events of the exported prediction."""
    trace, document = traced
    events = document["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {**{rank: f"rank {rank}, measured" for rank in range(4)}, 4: "predicted"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] < 4}
    assert [rows[0, i] for i in range(4)] == ["computation", "communication", "waiting", "dispatch"]
    bars = [e for e in events if e["ph"] == "X"]
    seconds = defaultdict(float)
    for bar in bars:
        if bar["pid"] < 4 and bar["tid"] < 3:
            seconds[bar["pid"]] += bar["dur"] / 1e6
    for rank, total in seconds.items():
        assert total == pytest.approx(sum(span.seconds for span in trace.traced[rank].recorded.spans))
    exported = tmp_path / "exported.json"
    assert main(["export", str(plan_path), "--to", "chrome-trace", "-o", str(exported)]) == 0
    predicted = [
        (e["name"], e["ts"], e["dur"]) for e in json.loads(exported.read_text())["traceEvents"] if e["ph"] == "X"
    ]
    assert [(e["name"], e["ts"], e["dur"]) for e in bars if e["pid"] == 4] == predicted
    # The communication of layers has the names of the prediction.
    of_layers = {
        e["name"] for e in bars if e["pid"] < 4 and e["tid"] == 1 and e["args"]["layer"] and e["args"]["sent_bytes"] > 8
    }
    assert of_layers and of_layers <= {name for name, _, _ in predicted}


@pytest.mark.ranks
@needs_oneflow
def test_the_table_names_the_largest_differences(traced):
    trace, _ = traced
    rows = trace.differences()
    assert [abs(row.seconds) for row in rows] == sorted((abs(row.seconds) for row in rows), reverse=True)
    text = str(trace_text(trace))
    assert "step predicted" in text and (rows[0].layer or "all layers") in text


@pytest.mark.ranks
@needs_oneflow
def test_a_pipeline_is_traced(tmp_path):
    """Two stages of two ranks: each rank has the layers of its stage, and waits for the other stage."""
    cpu_pipeline(tmp_path / "plan.json")
    trace = autoddl.train(tmp_path / "plan.json", steps=3, trace=tmp_path / "trace.json", quiet=True).trace
    layers = [{span.layer for span in each.recorded.spans} - {""} for each in trace.traced]
    assert layers[0] == layers[1] and layers[2] == layers[3] and layers[0].isdisjoint(layers[2])
    assert "wte" in layers[0] and "loss" in layers[2]
    assert all(any(span.kind == "waiting" for span in each.recorded.spans) for each in trace.traced)
    predicted = {(row.layer, row.phase): row.predicted_s for row in trace.differences() if row.kind == "computation"}
    assert predicted["h.0.mlp.c_fc", "forward"] > 0 and predicted["h.3.mlp.c_fc", "backward"] > 0


SCRIPT = """
import numpy as np
import oneflow as flow

import autoddl
from autoddl.pipelines.runtime.models import initialize
from autoddl.zoo.builtin import recognise
from autoddl.zoo.modules import build_module, make_batch

job = autoddl.launched()
plan = job.load_plan()
built_in = recognise(plan.graph)
trained = autoddl.apply(initialize(build_module(built_in), 0), plan)
optimizer = flow.optim.SGD(trained.parameters(), lr=1e-3)
data = make_batch(built_in, plan.workload.batch, np.random.default_rng(0))
for _ in range(4):
    loss = trained.train_step(*data)
    trained.step(optimizer)
"""


@pytest.mark.ranks("launches")
@needs_oneflow
def test_a_launched_script_is_traced(plan_path, tmp_path, monkeypatch):
    """Rank 0 writes the file, and says what differs most."""
    monkeypatch.chdir(tmp_path)
    forget_jobs(monkeypatch)
    Path("script.py").write_text(SCRIPT)
    command = launch_command(plan_path, "--trace", "trace.json", script=Path("script.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[rank 0] Largest differences between the measured step and the predicted one" in done.stdout
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    sent = {
        rank: sum(
            e["args"].get("sent_bytes", 0) for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] == 1
        )
        for rank in range(4)
    }
    priced = sum(e["args"].get("sent_bytes", 0) for e in events if e["ph"] == "X" and e["pid"] == 4)
    assert priced > 0 and all(np.isclose(total, priced, rtol=0.01, atol=64) for total in sent.values()), (sent, priced)


def test_models_without_a_price_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"trace=.*trace\.json is for plans, mlp:16,8 is a model"):
        autoddl.train("mlp:16,8", trace=tmp_path / "trace.json")


@needs_oneflow
def test_a_file_that_cannot_be_written_is_noticed_before_the_training(plan_path, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        autoddl.train(plan_path, steps=1, trace=tmp_path / "nowhere" / "trace.json", quiet=True)
