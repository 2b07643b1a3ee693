"""``autoddl price --runs`` and ``fit --runs``: files of measured runs, their figures and their faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autoddl
from autoddl.measuredruns import read_runs

from .test_plan_command import refused, run

COLUMNS = (
    "id,group,hardware,family,layers,hidden,heads,kv_heads,intermediate,seq,vocab,tied,"
    "gpus,tp,pp,vp,dp,mbs,gbs,recompute,seq_parallel,zero,flash,measured_s,memory_gib"
)
RUN = "one,ours,dgx-a100,gpt,24,2304,24,0,0,2048,51200,True,32,1,1,1,32,16,512,full,False,0,False,3.53,52"
OTHER = "two,ours,dgx-a100,gpt,24,2304,24,0,0,2048,51200,True,32,2,1,1,16,16,512,full,True,1,True,3.2,"


def written(folder: Path, *rows: str, columns: str = COLUMNS) -> str:
    """Write a file of runs and return its path."""
    path = folder / "runs.csv"
    path.write_text("\n".join((columns, *rows)) + "\n", encoding="utf-8")
    return str(path)


def test_json_has_the_runs_and_the_groups(capsys, tmp_path: Path):
    code, out, err = run(capsys, "price", "--runs", written(tmp_path, RUN, OTHER), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["format"], document["version"], document["fitted"]) == ("autoddl-runs", 1, False)
    one, two = document["rows"]
    assert [row["id"] for row in (one, two)] == ["one", "two"] and one["group"] == "ours"
    assert one["error"] == pytest.approx(one["predicted_s"] / 3.53 - 1)
    assert one["measured_memory_bytes"] == 52 * 2**30 and two["measured_memory_bytes"] is None
    assert one["fits"] and two["fits"] and "fault" not in one
    (group,) = document["groups"]
    assert group["name"] == "ours" and group["runs"] == 2 and 0 < group["efficiency"] < 1
    assert document["mean_abs_error"] == pytest.approx((abs(one["error"]) + abs(two["error"])) / 2)
    assert document["median_memory_error"] == pytest.approx(abs(one["memory_bytes"] / (52 * 2**30) - 1))


def test_a_run_is_priced_as_its_configuration_is(tmp_path: Path):
    """The same figures by `autoddl.price`, whose memory has no share of the framework."""
    predicted = autoddl.price_runs(written(tmp_path, OTHER)).result.runs[0]
    plan = autoddl.price(
        *("gpt:24x2304",),
        **{"cluster": "dgx-a100", "heads": 24, "vocabulary": 51200, "nodes": 4, "batch": 512, "tp": 2, "dp": 16},
        **{"micro_batch": 16, "recompute": "full", "sequence_parallel": True, "zero": 1, "gradients": "master"},
    )
    assert predicted.predicted_s == pytest.approx(plan.step_s)
    assert predicted.memory_bytes == pytest.approx(plan.memory_bytes + plan.cluster.device.framework_bytes)


def test_a_fit_makes_a_single_run_exact(capsys, tmp_path: Path):
    code, out, _ = run(capsys, "price", "--runs", written(tmp_path, RUN), "--fit", "--json")
    document = json.loads(out)
    assert code == 0 and document["fitted"]
    assert document["rows"][0]["predicted_s"] == pytest.approx(3.53, rel=1e-3)


def test_runs_that_cannot_be_priced_say_why_and_leave_the_others(capsys, tmp_path: Path):
    path = written(tmp_path, RUN, RUN.replace("one,", "odd,").replace(",32,1,1,1,32,", ",32,1,1,1,16,"))
    code, out, _ = run(capsys, "price", "--runs", path, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and rows[0]["predicted_s"] > 0
    assert rows[1]["predicted_s"] is None and rows[1]["fits"] is None
    assert "tp 1 x pp 1 x dp 16 is 16 devices" in rows[1]["fault"]


def test_fp8_is_a_suffix_of_the_hardware(tmp_path: Path):
    (eight,) = read_runs(written(tmp_path, RUN.replace("dgx-a100", "dgx-h100-fp8")))
    assert (eight.hardware, eight.workload.precision, eight.workload.overlap) == ("dgx-h100", "fp8", "all")
    (half,) = read_runs(written(tmp_path, RUN.replace("dgx-a100", "dgx-h100")))
    assert (half.hardware, half.workload.precision, half.workload.overlap) == ("dgx-h100", "mixed", "none")
    steps = [autoddl.price_runs(written(tmp_path, RUN.replace("dgx-a100", name))).result.runs[0].predicted_s for name in (
        "dgx-h100-fp8", "dgx-h100",
    )]  # fmt: skip
    assert steps[0] < steps[1]


def test_a_cluster_is_fitted_to_runs(capsys, tmp_path: Path):
    path, cluster = written(tmp_path, RUN), tmp_path / "ours.json"
    code, out, _ = run(capsys, "fit", "--runs", path, "-o", str(cluster))
    assert code == 0 and f"cluster: {cluster}" in out
    # The same run on the fitted cluster takes as long as it was measured to.
    again = autoddl.price_runs(written(tmp_path, RUN.replace("dgx-a100", str(cluster)))).result.runs[0]
    assert again.predicted_s == pytest.approx(3.53, rel=1e-2)
    code, out, _ = run(capsys, "fit", "--runs", path, "--name", "mine", "--json")
    assert code == 0 and json.loads(out)["name"] == "mine"


@pytest.mark.parametrize(
    "old, new, error",
    [
        ("gpt,24,", "gpt,many,", "line 2: layers is 'many', should be a whole number of at least 1"),
        ("gpt,", "vgg,", "line 2: family is 'vgg', should be one of gpt, bert, llama"),
        (",full,", ",all,", "line 2: recompute is 'all', should be one of none, selective, full"),
        (",True,32", ",maybe,32", "line 2: tied is 'maybe', should be True or False"),
        (",3.53,", ",0,", "line 2: measured_s is '0', should be a number of more than 0"),
        (",3.53,52", ",3.53", "line 2 has 24 values, the header has 25 columns"),
        (",24,0,0,", ",23,0,0,", "does not divide into 23 heads"),
        (",16,512,", ",17,512,", "line 2: micro-batch 544 does not divide the batch of 512"),
        (",1,1,1,32,", ",0,1,1,32,", "line 2: tp is '0', should be a whole number of at least 1"),
    ],
)
def test_faulty_runs_are_answered_in_one_line(old, new, error, capsys, tmp_path: Path):
    assert RUN.count(old) >= 1
    assert error in refused(capsys, "price", "--runs", written(tmp_path, RUN.replace(old, new, 1)))


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "lacks the columns"),
        ("id,group\n", "lacks the columns hardware"),
        (COLUMNS + "\n", "has no runs, should have a row for each"),
    ],
)
def test_files_without_runs_are_answered_in_one_line(text, error, capsys, tmp_path: Path):
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    assert error in refused(capsys, "price", "--runs", str(path))
    assert error in refused(capsys, "fit", "--runs", str(path))


def test_runs_of_different_hardware_are_not_fitted_to_one_cluster(capsys, tmp_path: Path):
    path = written(tmp_path, RUN, OTHER.replace("dgx-a100", "dgx-h100"))
    assert "the runs are on dgx-a100, dgx-h100" in refused(capsys, "fit", "--runs", path)
    assert "give either measurements" in refused(capsys, "fit", "--runs", path, "other.csv")
