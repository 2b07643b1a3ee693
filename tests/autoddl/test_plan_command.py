"""``autoddl plan`` and ``compare`` as a user meets them: what they print, what they write, what they say of bad input."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.distribution import Distribution
from autoddl.costmodel.errors import UserError
from autoddl.planfile import PlanFile, load_plan
from autoddl.search import METHODS
from autoddl.search.baselines import BASELINES
from autoddl.zoo import Transformer, gpt, mlp

SMALL = ["plan", "gpt:2x64", "--heads", "4", "--sequence", "32", "--vocabulary", "256", "--cluster", "gcp-a100"]
SMALL += ["--nodes", "2", "--devices-per-node", "2", "--quiet"]
FIELDS = {
    "method", "status", "optimal", "communication_s", "compute_s", "step_s", "lower_bound_s", "gap", "search_s",
    "space_size", "evaluations", "memory_bytes", "layers", "rivals", "graph_hash", "cluster_hash",
}  # fmt: skip
LAYER_FIELDS = {"name", "kind", "strategy", "sbp", "communication_s", "sent_bytes"}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a bad command is answered with."""
    code, out, err = run(capsys, *arguments)
    assert code == 2, (out, err)
    assert out == "" and err.startswith("autoddl: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err and "internal error" not in err
    return err


@pytest.fixture(scope="module")
def small_text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("small") / "plan.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*map(str, SMALL), "-o", str(path)]) == 0
    return path.read_text()


@pytest.fixture()
def small_plan(tmp_path, small_text) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(small_text)
    return path


# ------------------------------------------------------------------------------------------------------------ the document


def test_document_has_what_it_should(capsys):
    document = plan_json(capsys, *SMALL)
    assert set(document) >= FIELDS
    assert (document["format"], document["version"]) == ("autoddl-plan", 4)
    assert (document["method"], document["status"], document["optimal"]) == ("exact", "optimal", True)
    assert document["gap"] == 0 and document["lower_bound_s"] == pytest.approx(document["step_s"], rel=1e-9)
    assert document["step_s"] == pytest.approx(document["communication_s"] + document["compute_s"])
    assert document["communication_s"] == pytest.approx(sum(x["communication_s"] for x in document["layers"]))
    assert document["sent_bytes"] == pytest.approx(sum(x["sent_bytes"] for x in document["layers"]))
    assert document["memory_bytes"] <= document["memory_limit_bytes"]
    assert isinstance(document["space_size"], int) and document["search_s"] > 0
    assert 1 <= document["evaluations"] < document["space_size"]
    assert all(document[name].startswith("sha256:") for name in ("graph_hash", "cluster_hash", "options_hash"))
    assert {rival["name"] for rival in document["rivals"]} == set(BASELINES) - {"expert parallel"}
    for figures in document["rivals"]:
        assert set(figures) >= {"communication_s", "step_s", "memory_bytes"} or set(figures) == {"name", "infeasible"}
        assert figures.get("step_s", float("inf")) >= document["step_s"] * (1 - 1e-12)


def test_a_plan_without_a_pipeline_has_one_stage(small_plan):
    document, plan = json.loads(small_plan.read_text()), load_plan(small_plan)
    (stage,), (worker,) = document["stages"], document["workers"]
    assert stage["layers"] == [layer["name"] for layer in document["layers"]] and stage["workers"] == [0]
    assert worker["mesh"] == {"nodes": 2, "devices_per_node": 2} and worker["ranks"] == [0, 1, 2, 3]
    assert worker["memory_bytes"] == document["memory_bytes"] and document["timeline"]["bubble_s"] == 0
    assert document["boundaries"] == [] and (plan.num_stages, plan.has_pipeline) == (1, False)
    settled = document["search"]["ruled_out_by_memory"] + document["search"]["ruled_out_by_bound"]
    assert settled < document["search"]["settings"] == len(document["candidates"])


def test_millions_of_micro_batches_are_one_stage_like_few(capsys, tmp_path):
    """Its tasks are not made to be counted, nor its document longer."""
    path, one = tmp_path / "plan.json", ["--micro-batch", "1", "--devices-per-node", "1", "--nodes", "1", "--quiet"]
    where = ["plan", "mlp:64,32,16", "--cluster", "gcp-a100", *one, "-o", str(path)]
    sizes = {}
    for batch in (8, 2**22, 2**40):
        assert run(capsys, *where, "--batch", batch)[0] == 0
        plan, sizes[batch] = load_plan(path), path.stat().st_size
        assert plan.evaluation.schedule.num_tasks == 2 * batch + 2
        for command in (["explain", str(path)], ["diff", str(path), str(path)]):
            assert run(capsys, *command)[0] == 0
    assert sizes[2**40] < 1.2 * sizes[8]


def test_layers_of_the_document(capsys):
    document = plan_json(capsys, *SMALL)
    graph = gpt(Transformer("gpt:2x64", 2, 64, 4, 32, 256))
    assert [(layer["name"], layer["kind"]) for layer in document["layers"]] == [(x.name, x.kind) for x in graph.layers]
    for layer in document["layers"]:
        assert set(layer) >= LAYER_FIELDS
        assert len(layer["strategy"]) == 2  # nodes, then devices
        for p0, p1, p2 in layer["strategy"]:
            assert p0 * p1 * p2 == 2
        assert set(layer["sbp"]) == {"input", "weight", "output", "parameter", "gradient", "state"}
        for text in layer["sbp"].values():
            assert text is None or Distribution.parse(text).num_ranks == 4
        assert (layer["sbp"]["weight"] is None) == (not graph[layer["name"]].parameters)
    # Tied repetitions of a block have equal strategies.
    by_name = {layer["name"]: layer["strategy"] for layer in document["layers"]}
    assert all(by_name[f"h.1.{layer.role}"] == by_name[f"h.0.{layer.role}"] for layer in graph.layers if layer.block)


def test_the_same_command_makes_the_same_plan(capsys):
    timings = ("search_s", "hashes", "content_hash")
    for method in ("exact", "metropolis-hastings"):
        one, two = (plan_json(capsys, *SMALL, "--method", method, "--seed", "7") for _ in range(2))
        assert {k: v for k, v in one.items() if k not in timings} == {k: v for k, v in two.items() if k not in timings}


def test_options_reach_the_plan(capsys):
    usual = plan_json(capsys, *SMALL)
    assert usual["workload"] == {
        "batch": 32,
        "micro_batch": 32,
        "precision": "mixed",
        "optimizer": "adam",
        "recompute": "none",
    }
    other = plan_json(
        capsys, *SMALL, "--batch", "24", "--micro-batch", "8", "--precision", "float32", "--optimizer", "sgd",
        "--recompute", "always", "--communication-only", "--untied", "--memory-limit", "20",
    )  # fmt: skip
    assert other["workload"] == {
        "batch": 24,
        "micro_batch": 8,
        "precision": "float32",
        "optimizer": "sgd",
        "recompute": "layers",
    }
    assert other["objective"] == "communication"
    assert other["lower_bound_s"] == pytest.approx(other["communication_s"], rel=1e-9)
    assert other["memory_limit_bytes"] == 20 * 2**30
    assert other["space_size"] > usual["space_size"]
    assert other["options_hash"] != usual["options_hash"] and other["graph_hash"] == usual["graph_hash"]
    links = plan_json(capsys, *SMALL, "--latency", "3us", "--bandwidth", "16Gb/s")
    assert [(link["latency_s"], link["bandwidth"]) for link in links["links"]] == [(3e-6, 2e9)] * 2
    assert links["cluster_hash"] != usual["cluster_hash"]


@pytest.mark.parametrize(("text", "seconds"), [("2us", 2e-6), ("0.5 ms", 5e-4), ("1e-5", 1e-5), ("0", 0.0)])
def test_units_on_the_command_line(capsys, text, seconds):
    assert plan_json(capsys, *SMALL, "--latency", text)["links"][0]["latency_s"] == seconds


@pytest.mark.parametrize("method", METHODS)
def test_methods(capsys, method):
    arguments = ["plan", "mlp:64,32,16", "--cluster", "local-cpu", "--batch", "16", "--method", method, "--quiet"]
    document = plan_json(capsys, *arguments)
    exact = plan_json(capsys, *arguments[:-3], "--method", "exact", "--quiet")
    assert document["method"] == method
    assert document["lower_bound_s"] <= exact["step_s"] * (1 + 1e-9) and document["step_s"] >= exact["step_s"] * (
        1 - 1e-9
    )
    assert document["optimal"] == (document["gap"] == 0) == (document["status"] == "optimal")


# ---------------------------------------------------------------------------------------------------------------- the text


def test_text_shows_layers_totals_baselines_and_certificate(capsys):
    code, out, err = run(capsys, *SMALL)
    assert (code, err) == (0, "")
    for expected in (
        "h.*.mlp.c_fc x 2",
        "data parallel",
        "megatron",
        "summa",
        "Certificate",
        "proven",
        "communication",
    ):
        assert expected in out
    assert max(map(len, out.splitlines())) < 250


def test_text_of_a_method_without_proof(capsys):
    where = ["plan", "mlp:512,2048,512", "--cluster", "piz-daint", "--nodes", "8", "--batch", "64", "--quiet"]
    code, out, _ = run(capsys, *where, "--method", "random", "--evaluations", "3")
    assert code == 0 and "not proven" in out and "--method exact" in out
    assert "which found nothing better than megatron" in out


#: Little memory, so that Summa, which keeps nothing twice, is best.
TIGHT = ["mlp:64,128,64,64", "--cluster", "local-cpu", "--nodes", "1", "--devices-per-node", "4", "--batch", "64"]
TIGHT += ["--memory-limit", "0.0001155", "--quiet"]


def test_summa_is_offered_and_what_is_left_out_is_said(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    for wish in ([], ["--summa"]):
        code, out, _ = run(capsys, "plan", *TIGHT, *wish, "-o", path)
        assert code == 0 and "(2,2,1) summa" in out and "1.00x" in out and "left out" not in out
        assert all(layer.summa for layer in load_plan(path).strategies.values())
    code, out, _ = run(capsys, "plan", *TIGHT, "--no-summa", "-o", path)
    certificate = out.split("Certificate\n")[1].splitlines()[0]
    left_out = re.search(
        r"has a smaller step time; Summa meshes are left out, --summa includes them \(.*\)$", certificate
    )
    assert left_out is not None and re.search(r"the step of summa is [\d.]+% faster", certificate)
    assert not any(layer.summa for layer in load_plan(path).strategies.values())
    code, out, _ = run(capsys, "compare", *TIGHT, "--no-summa", "--methods", "exact")
    assert re.search(r"Summa meshes are left out, --summa includes them \(the step of summa is [\d.]+% faster\)", out)
    code, out, _ = run(capsys, "compare", *TIGHT, "--methods", "exact,random", "--evaluations", "1")
    assert "left out" not in out and "as summa: nothing better was found" in out


def test_a_constant_temperature(capsys):
    hot = ["plan", *SMALL[1:], "--method", "metropolis-hastings", "--evaluations", "40"]
    documents = [plan_json(capsys, *hot, *words) for words in ([], ["--temperature", "100s"], ["--temperature", "1e2"])]
    assert [one["options"]["temperature_s"] for one in documents] == [None, 100.0, 100.0]
    assert documents[1]["step_s"] == documents[2]["step_s"]
    where = ["mlp:64,32,16", "--cluster", "local-cpu", "--batch", "16", "--quiet", "--temperature", "1ms"]
    assert run(capsys, "compare", *where)[0] == 0
    code, _, err = run(capsys, "compare", *where, "--methods", "exact")
    assert code == 2 and "--temperature is for metropolis-hastings, which is not among the methods" in err


def test_a_plan_for_communication_says_whose_step_is_faster(capsys):
    code, out, _ = run(capsys, "plan", *TIGHT, "--communication-only")
    certificate = out.split("Certificate\n")[1].splitlines()[0]
    assert code == 0 and re.search(
        r"; the step of summa is [\d.]+% faster: leave out --communication-only$", certificate
    )


def test_compare(capsys):
    arguments = ["compare", "mlp:64,32,16", "--cluster", "local-cpu", "--batch", "16", "--quiet"]
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    for name in (*METHODS, "data parallel", "megatron"):
        assert name in out
    document = plan_json(capsys, *arguments)
    rows = {row["name"]: row for row in document["rows"]}
    assert set(rows) == {*METHODS, *BASELINES} - {"expert parallel"}
    assert rows["exact"]["optimal"] and rows["exhaustive"]["optimal"]
    assert all(row.get("step_s", 1e9) >= document["lower_bound_s"] * (1 - 1e-9) for row in rows.values())
    some = plan_json(capsys, *arguments, "--methods", "exact,random")
    assert [row["name"] for row in some["rows"]][:2] == ["exact", "random"]
    assert "method 'magic' is unknown; known are exact" in refused(capsys, *arguments, "--methods", "exact,magic")


# --------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gtp3-13b", "--cluster", "dgx-a100"], "model 'gtp3-13b' is unknown; did you mean 'gpt3-13b'"),
        (["plan", "gpt:24", "--cluster", "dgx-a100"], "should be gpt:LAYERSxWIDTH"),
        (["plan", "mlp:64,-3", "--cluster", "dgx-a100"], "width '-3' should be a whole number"),
        (["plan", "missing.json", "--cluster", "dgx-a100"], "missing.json: cannot be read"),
        (["plan", "mlp:64,32", "--cluster", "dgx-a10"], "cluster 'dgx-a10' is neither a file nor one of a800, b200"),
        (["plan", "mlp:64,32"], "the following arguments are required: --cluster"),
        (["plan"], "the following arguments are required: MODEL, --cluster"),
        (["plam"], "invalid choice: 'plam'"),
        ([], "the following arguments are required: COMMAND"),
        (["plan", "mlp:64,32", "--cluster", "dgx-a100", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["plan", "mlp:64,32", "--cluster", "dgx-a100", "--method", "magic"], "invalid choice: 'magic'"),
        (["plan", "gpt2", "--cluster", "dgx-a100", "--heads", "0"], "--heads 0 should be a whole number"),
        (["plan", "gpt2", "--cluster", "dgx-a100", "--heads", "7"], "does not divide into 7 heads"),
        (["plan", "mlp:64,32", "--cluster", "dgx-a100", "--heads", "8"], "--heads 8 does not apply to 'mlp:64,32'"),
    ],
)
def test_bad_commands(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bandwidth", "-1"], "bandwidth -1 bytes/s should be from 1"),
        (["--bandwidth", "-5GB/s"], "bandwidth -5e+09 bytes/s should be from 1"),
        (["--bandwidth=-5GB/s"], "bandwidth -5e+09 bytes/s should be from 1"),
        (["--bandwidth", "0"], "bandwidth 0 bytes/s should be"),
        (["--bandwidth", "fast"], "--bandwidth 'fast' is not a number with a unit, such as 10GB/s"),
        (["--bandwidth", "10 parsec"], "--bandwidth: unit 'parsec' is not a unit of rate"),
        (["--bandwidth", "1e999GB/s"], "--bandwidth '1e999GB/s' is not a number with a unit"),
        (["--bandwidth", "1.2.3"], "--bandwidth '1.2.3' is not a number"),
        (["--latency", "-2us"], "latency -2e-06 s should be from 0"),
        (["--latency", "5GB"], "--latency: unit 'GB' is not a unit of time"),
        (["--latency", "nan"], "--latency 'nan' is not a number"),
        (["--nodes", "0"], "autoddl: nodes 0 should be at least 1"),
        (["--nodes", "-4"], "autoddl: nodes -4 should be at least 1"),
        (["--nodes", "1000000000000"], "should be at most 1048576 devices"),
        (["--nodes", "two"], "argument --nodes: 'two' is not a whole number of at most 18 digits"),
        (["--devices-per-node", "0"], "devices per node 0 should be at least 1"),
        (["--batch", "0"], "batch 0 should be at least 1"),
        (["--batch", "-8"], "batch -8 should be at least 1"),
        (["--batch", "100000000000000000"], "batch 100000000000000000 should be at most"),
        (
            ["--batch", "1000000000000000000"],
            "argument --batch: '1000000000000000000' is not a whole number of at most 18 digits",
        ),
        (
            ["--batch", "8", "--micro-batch", "3"],
            "micro-batch 3 does not divide the batch of 8; the nearest micro-batches that work are 2 and 4",
        ),
        (["--memory-limit", "0"], "memory limit 0 GiB should be"),
        (["--memory-limit", "-3"], "memory limit -3 GiB should be"),
        (["--memory-limit", "nan"], "argument --memory-limit: 'nan' is not a number of at most 1e+18"),
        (["--memory-limit", "1e-6"], "the smallest memory that would do is"),
        (["--time-limit", "0"], "time limit 0 should be"),
        (["--time-limit", "inf"], "argument --time-limit: 'inf' is not a number of at most 1e+18"),
        (["--evaluations", "0", "--method", "random"], "evaluations 0 should be at least 1"),
        (["--seed", "-1", "--method", "random"], "seed -1 should be"),
        (["--temperature", "1ms"], "--temperature is for --method metropolis-hastings; exact has none"),
        (["--method", "metropolis-hastings", "--temperature", "0"], "temperature 0 should be a finite number"),
        (["--method", "metropolis-hastings", "--temperature", "1GB"], "unit 'GB' is not a unit of time"),
        (["--precision", "float16"], "argument --precision: invalid choice: 'float16'"),
        (["-o", "no/such/folder/plan.json"], "no/such/folder/plan.json: cannot be written (No such file or directory)"),
        (["-o", "."], ".: cannot be written"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_options(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *SMALL, *([] if "-o" in options else ["-o", "plan.json"]), *options)
    assert list(tmp_path.iterdir()) == []


def test_seven_devices_for_what_seven_cannot_split(capsys):
    line = refused(
        capsys, "plan", "mlp:64,32", "--cluster", "dgx-a100", "--nodes", "1", "--devices-per-node", "7", "--batch", "8"
    )
    assert "fc1 (linear, 64 -> 32)" in line and "7 devices" in line and "micro-batch of 8" in line


def test_the_smallest_memory_is_told_and_does(capsys):
    line = refused(capsys, *SMALL, "--memory-limit", "0.0001")
    least = float(line.split("--memory-limit ")[-1].split(")")[0])
    assert plan_json(capsys, *SMALL, "--memory-limit", f"{least}")["memory_bytes"] <= least * 2**30


def test_a_search_that_comes_back_with_empty_hands(capsys):
    """Random choices hardly ever fit a tight limit: that is no proof that nothing does."""
    line = refused(capsys, *SMALL, "--memory-limit", "0.0001")
    least = float(line.split("--memory-limit ")[-1].split(")")[0])
    code, _, err = run(capsys, *SMALL, "--method", "random", "--evaluations", "1", "--memory-limit", f"{least * 1.001}")
    if code:
        assert code == 2 and "--method exact" in err and "inf" not in err


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_truncated_files(capsys, tmp_path, small_plan, cut):
    graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.json"
    mlp([64, 32]).save(graph)
    graph.write_text(graph.read_text()[:cut])
    assert "graph.json: not a JSON document" in refused(capsys, "plan", graph, "--cluster", "dgx-a100")
    preset = resources.files("autoddl.costmodel.clusters").joinpath("dgx-a100.json").read_text()
    cluster.write_text(preset[:cut])
    assert "cluster.json: not a JSON document" in refused(capsys, "plan", "mlp:64,32", "--cluster", cluster)
    small_plan.write_text(small_plan.read_text()[:cut])
    with pytest.raises(UserError, match=r"plan\.json: not a JSON document"):
        load_plan(small_plan)


def test_files_of_another_kind(capsys, tmp_path, small_plan):
    assert "format 'autoddl-plan' should be 'autoddl-graph'" in refused(
        capsys, "plan", small_plan, "--cluster", "dgx-a100"
    )
    assert "format 'autoddl-plan' should be 'autoddl-cluster'" in refused(
        capsys, "plan", "mlp:64,32", "--cluster", small_plan
    )
    assert "cannot be read" in refused(capsys, "plan", "mlp:64,32", "--cluster", tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(capsys, "plan", tmp_path / "bytes.json", "--cluster", "dgx-a100")


def test_an_existing_plan_survives_a_failure(capsys, small_plan):
    before = small_plan.read_text()
    refused(capsys, *SMALL, "--memory-limit", "1e-6", "-o", small_plan)
    assert small_plan.read_text() == before
    assert os.listdir(small_plan.parent) == ["plan.json"]


def test_links_and_pipes_are_written_to_not_replaced(capsys, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        arguments = ["plan", "mlp:16,8", "--cluster", "local-cpu", "--batch", "8", "--quiet"]
        assert run(capsys, *arguments, "-o", pipe)[0] == 0
        assert pipe.is_fifo() and json.loads(os.read(reader, 2**16))["format"] == "autoddl-plan"
    finally:
        os.close(reader)
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert run(capsys, *SMALL, "-o", link)[0] == 0
    assert link.is_symlink() and load_plan(target).strategies == load_plan(link).strategies


def test_as_a_process(tmp_path):
    """The installed command: exit codes and streams; one line for a user's fault, a plan for a pipe."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autoddl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)

    good = call(*SMALL, "--json", "-o", "plan.json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout) == json.loads((tmp_path / "plan.json").read_text())
    bad = call("plan", "gpt2", "--cluster", "nowhere")
    assert (bad.returncode, bad.stdout) == (2, "") and bad.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------- plan files


def test_plans_round_trip(small_plan):
    plan = load_plan(small_plan)
    document = json.loads(small_plan.read_text())
    assert isinstance(plan, PlanFile) and plan.document == document
    assert plan.graph.hash == document["graph_hash"] and plan.cluster.hash == document["cluster_hash"]
    assert assess(plan.graph, plan.cluster, plan.workload, plan.strategies).step_s == pytest.approx(
        document["step_s"], rel=1e-12
    )
    plan.check_graph(gpt(Transformer("other name", 2, 64, 4, 32, 256)))
    with pytest.raises(UserError, match="made for another model than other: it has "):
        plan.check_graph(gpt(Transformer("other", 2, 128, 4, 32, 256)))
    with pytest.raises(UserError, match="it has ln_f "):
        plan.check_graph(gpt(Transformer("other", 3, 64, 4, 32, 256)))


def test_plans_for_replaced_links_round_trip(capsys, tmp_path):
    """Links from the command line, and links whose collectives were calibrated apart, with and without."""
    document = json.loads(resources.files("autoddl.costmodel.clusters").joinpath("dgx-a100.json").read_text())
    own = {
        "latency": {"value": 3, "unit": "us", "source": "measured"},
        "bandwidth": {"value": 80, "unit": "GB/s", "source": "measured"},
    }
    document["links"]["intra-node"]["collectives"] = {"all-reduce": own}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    plan = tmp_path / "plan.json"
    for options in ([], ["--latency", "1us"], ["--bandwidth", "1GB/s"], ["--nodes", "2", "--devices-per-node", "2"]):
        arguments = ["plan", "mlp:64,32,16", "--cluster", path, "--batch", "64", "--quiet", "-o", plan, *options]
        assert run(capsys, *arguments)[0] == 0
        read = load_plan(plan)
        assert read.cluster.hash == json.loads(plan.read_text())["cluster_hash"]
        assert bool(read.cluster.links[1].collectives) == (not {"--latency", "--bandwidth"} & set(map(str, options)))


def edited(document: dict, *path_and_value: object) -> dict:
    document = copy.deepcopy(document)
    *path, last, value = path_and_value
    place: object = document
    for key in path:
        place = place[key]  # type: ignore[index]
    place[last] = value  # type: ignore[index]
    return document


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("graph", "layers", 0, "kept_elements", 3), "graph was edited (graph_hash is"),
        (("graph_hash", "sha256:0"), 'graph_hash was edited (graph_hash is "sha256:0", should be'),
        (("cluster", "num_nodes", 3), "cluster was edited (mesh is 2 x 2, which does not tile 3 x 2 devices"),
        (("cluster", "device", "memory", "value", 41), "cluster was edited (cluster_hash is"),
        (("links", 0, "bandwidth", 1e9), "links was edited (links are not those of its cluster"),
        (("links", []), "links was edited (links are not those of its cluster"),
        (("workload", "batch", 64), "workload was edited (communication_s is"),
        (("workload", "micro_batch", 5), "micro-batch 5 does not divide"),
        (("workload", "optimizer", "sgd"), "workload was edited (compute_s is"),
        (("step_s", 1.0), "step_s was edited (step_s is 1.0, should be"),
        (("memory_bytes", 1.0), "memory_bytes was edited (memory_bytes is 1.0, should be"),
        (("layers", 3, "strategy", [[1, 1, 2], [1, 1, 2]]), "layers was edited (h.0.ln_1 (norm"),
        (("layers", 4, "strategy", [[1, 2, 1], [1, 1, 2]]), "layers was edited (layers[4]: sbp: "),
        (("layers", 4, "strategy", [[4, 1, 1]]), "for (4,) devices per level"),
        (("layers", 4, "strategy", [[2, 1], [1, 1, 2]]), "strategy holds [2, 1], should hold [p0, p1, p2]"),
        (("layers", 4, "strategy", [[2, 1, True], [1, 1, 2]]), "should hold [p0, p1, p2]"),
        (("layers", 4, "strategy", []), "for () devices per level"),
        (("layers", 4, "summa", True), "layers was edited (layers[4]: sbp: "),
        (("layers", 3, "summa", True), "does not divide its shape"),
        (("layers", 4, "name", "nobody"), "layers lacks"),
        (("layers", []), "layers lacks 'wte'"),
        (("version", 3), "version 3 is not supported, only 4 is; plan again"),
        (("format", "autoddl-graph"), "format 'autoddl-graph' should be 'autoddl-plan'"),
    ],
    ids=str,
)
def test_edited_plans_are_refused(small_plan, edit, message):
    document = json.loads(small_plan.read_text())
    small_plan.write_text(json.dumps(edited(document, *edit)))
    with pytest.raises(UserError) as error:
        load_plan(small_plan)
    assert "plan.json" in str(error.value) and "\n" not in str(error.value)
    assert message in str(error.value)


def test_layers_that_stand_twice_or_nowhere(small_plan):
    document = json.loads(small_plan.read_text())
    for layers, message in [
        ([*document["layers"], document["layers"][0]], "layers should hold each layer of its graph once"),
        (
            [*document["layers"], {**document["layers"][0], "name": "x"}],
            "layers holds 'x', which its graph does not have",
        ),
    ]:
        small_plan.write_text(json.dumps({**document, "layers": layers}))
        with pytest.raises(UserError, match=message):
            load_plan(small_plan)
