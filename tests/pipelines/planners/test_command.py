"""``autoddl pipeline``: what it prints, and one line for every fault."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from autoddl.cli import pipeline
from autoddl.cli._options import in_options
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.planners import ProfiledWorkload, evaluate
from autoddl.pipelines.profile import load_profile


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    pipeline.add_parser(parser.add_subparsers(dest="command"))
    return pipeline.run(parser.parse_args(["pipeline", *words]))


BERT = ("--profile", "bert-48", "--cluster", "v100-a", "--batch", "64")


@pytest.mark.parametrize("planner", ["dapple", "chimera", "wpipe"])
def test_one_document_for_all_planners(planner: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*BERT, "--planner", planner, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["planner"] == planner
    assert (document["profile"], document["cluster"], document["num_devices"]) == ("bert-48", "v100-a", 16)
    assert document["samples_per_s"] == pytest.approx(64 / document["simulated_s"])
    data_parallel = evaluate(ProfiledWorkload(load_profile("bert-48"), load_cluster("v100-a"), 64), (), (16,))
    assert document["speedup_over_dp"] == pytest.approx(data_parallel.simulated_s / document["simulated_s"])
    assert document["latency_s"] > 0
    names = [name for stage in document["stages"] for name in stage["layers"]]
    assert len(names) == 53
    assert names[0] == "input_ids"
    assert names[-1] == "pooler"
    assert {device for stage in document["stages"] for device in stage["devices"]} == set(range(16))
    if planner == "dapple":
        assert document["plan"] == "8:8"
        assert document["speedup_over_dp"] > 1
        assert all(0 <= stage["exposed_all_reduce_s"] < stage["all_reduce_s"] for stage in document["stages"])
        assert document["split"] == [len(stage["layers"]) for stage in document["stages"]]
    for other in document["alternatives"]:
        assert other["simulated_s"] >= document["simulated_s"]


def test_the_table_names_stages_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*BERT) == 0
    text = capsys.readouterr().out
    assert "dapple plan 8:8 for bert-48 on v100-a (16 devices), batch 64" in text
    assert "input_ids .. layer_" in text
    assert "0-7" in text
    assert "8-15" in text
    assert "x data parallelism" in text


def test_alternatives_are_shown_once_and_say_how_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", "vgg-19", "--cluster", "v100-c", "--batch", "1024")
    for planner, how in (("dapple", "policy A"), ("chimera", "(direct, recomputed)"), ("wpipe", "recomputed")):
        assert run(*words, "--planner", planner) == 0
        rows = capsys.readouterr().out.split("\nalternative ")[1].splitlines()[1:]
        assert rows and len(rows) == len(set(rows))
        assert any(how in row for row in rows), (planner, rows)


def test_a_priced_transformer_and_data_parallelism_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", "transformer:48x1024x128", "--cluster", "piz-daint", "--nodes", "8", "--batch", "64")
    assert run(*words, "--planner", "chimera", "--memory-limit", "6") == 0
    assert "data parallelism does not fit in memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--stages", "54"), "54 stages are more than the 53 layers of bert-48"),
        (
            ("--micro-batch", "5"),
            "micro-batch 5 does not divide the batch of 64; the nearest micro-batches that work are 4 and 8",
        ),
        (("--batch", "0"), "batch 0 should be at least 1"),
        (("--cluster", "v100-z"), "v100-z"),
        (("--profile", "bert-47"), "is neither a file nor one of bert-48, resnet-50, vgg-19 nor transformer:LAYERS"),
        (("--profile", "transformer:48"), "should read transformer:LAYERSxHIDDENxSEQUENCE"),
        (("--widths", "8-8"), "should be numbers of devices, such as 8:8"),
        (("--widths", "8:8", "--stages", "3"), "--widths 8:8 has 2 stages, should have 3"),
        (("--widths", "8:8", "--planner", "chimera"), "is for the dapple planner"),
        (("--stages", "5", "--planner", "chimera"), "5 stages for Chimera"),
        (("--stages", "5", "--planner", "wpipe"), "should be even"),
        (("--profile", "vgg19"), "; did you mean 'vgg-19'?"),
        (("--profile-batch", "7"), "--profile-batch 7 does not apply to bert-48; it is for text graphs"),
        (("--memory-limit", "-1"), "memory limit -1 GiB should be a finite number of more than 0"),
        (("--memory-limit", "nan"), "memory limit nan GiB should be a finite number of more than 0"),
        (("--state-factor", "nan"), "state factor nan should be a finite number of at least 1"),
        (("--memory-limit", "0.1"), "fits"),
        (("--nodes", "0"), "should be at least 1"),
    ],
)
def test_faults_are_one_line(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(UserError) as error:
        run(*BERT, *words)
    assert fault in in_options(str(error.value))
    assert "\n" not in str(error.value)


def test_a_malformed_profile_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "model-pbs-4.txt"
    path.write_text("node1 -- conv -- forward_compute_time=1, backward_compute_time=2, activation_size=3\n")
    with pytest.raises(UserError, match=r"model-pbs-4\.txt, line 1: parameter_size is missing"):
        run("--profile", str(path), "--cluster", "v100-a", "--batch", "64")
