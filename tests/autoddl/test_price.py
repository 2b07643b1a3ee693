"""``autoddl price``: configurations that the user gives, against arithmetic by hand, Megatron-LM's flags, and the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autoddl
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.workload import Workload
from autoddl.megatronflags import megatron_flags, read_megatron_flags
from autoddl.pipelines.joint.uniform import UniformLayout
from autoddl.plandocument import NOT_SEARCHED

from .test_plan_command import refused, run

#: A model that is priced in milliseconds, and its sizes.
SIZES = {"heads": 4, "sequence": 32, "vocabulary": 256}
SMALL = {"cluster": "gcp-a100", "nodes": 2, "devices_per_node": 4, "batch": 16, **SIZES}
COMMAND = ["price", "gpt:4x64", "--heads", "4", "--sequence", "32", "--vocabulary", "256", "--cluster", "gcp-a100"]
COMMAND += ["--nodes", "2", "--devices-per-node", "4", "--batch", "16"]
FLAGS = """
# A run of Megatron-LM on 4 nodes
GPUS=8
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \\
    --vocab-size 50257 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \\
    --num-layers-per-virtual-pipeline-stage 6 --micro-batch-size 2 --global-batch-size 64 \\
    --recompute-activations --sequence-parallel --use-distributed-optimizer --fp16 --lr 1e-4 --log-interval 10
"""


# ---- The figures -------------------------------------------------------------------------------------------------------------


def test_model_flops_by_hand():
    """GPT-3 175B by the formula of Narayanan et al. without recomputation: 72 B s l h^2 (1 + s / 6 h + V / 12 l h)."""
    plan = autoddl.price(
        "gpt3-175b", cluster="dgx-a100", nodes=48, batch=1536, micro_batch=4, tp=8, pp=12, dp=4, recompute="full"
    )
    # 72 x 1536 x 2048 x 96 x 12288^2 = 3.2832e18; 2048 / 73728 = 0.027778; 50304 / (12 x 96 x 12288) = 0.003554.
    model_flops = 3.2832e18 * (1 + 0.027778 + 0.003554)
    assert plan.model_flops_utilisation == pytest.approx(model_flops / (plan.step_s * 384 * 312e12), rel=1e-4)
    assert plan.tokens_per_s_per_device == pytest.approx(1536 * 2048 / plan.step_s / 384)
    # As the paper reports it (its table 2: 153 TFLOP/s per GPU and 76.8 s), with 4/3 for recomputation: 8.33e18 / 384.
    assert 4 / 3 * model_flops / 384 / 76.8 == pytest.approx(153e12, rel=0.01)


@pytest.mark.parametrize("degrees", [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 2}, {"tp": 4, "pp": 2}, {"tp": 2, "pp": 1}])
def test_hardware_flops_by_hand(degrees):
    """Dense attention computes what the formula counts; recomputed blocks add their forward passes."""
    plans = {
        way: autoddl.price("gpt:4x64", recompute=way, attention="dense", **degrees, **SMALL)
        for way in ("none", "full", "selective")
    }
    flops = {way: plan.hardware_flops_utilisation * plan.step_s * 8 * 312e12 for way, plan in plans.items()}
    model = plans["none"].model_flops_utilisation * plans["none"].step_s * 8 * 312e12
    # Forward pass of a block: 24 s h^2 in products with weights, 4 s^2 h in attention.
    with_weights, attention = 16 * 4 * 24 * 32 * 64**2, 16 * 4 * 4 * 32**2 * 64
    assert model == pytest.approx(3 * (with_weights + attention + 16 * 2 * 32 * 64 * 256))
    assert flops["none"] == pytest.approx(model)
    assert flops["full"] - model == pytest.approx(with_weights + attention)
    assert flops["selective"] - model == pytest.approx(attention)


def test_micro_batches_are_counted_per_replica():
    plan = autoddl.price("gpt:4x64", tp=2, pp=2, micro_batch=4, **SMALL)
    assert (plan.workload.micro_batch, plan.workload.num_micro_batches) == (8, 2)  # dp 2


def test_words_and_degrees_become_the_workload():
    plan = autoddl.price(
        "gpt:4x64", tp=2, pp=2, interleave=2, recompute="full", sequence_parallel=False, zero=1, overlap="all", **SMALL
    )
    words = plan.workload
    assert (words.recompute, words.activations, words.zero, words.overlap) == ("blocks", "copied", 1, "all")
    assert plan.num_stages == 4 and plan.evaluation.configuration.schedule.name == "interleaved-1f1b"
    gathered = autoddl.price("gpt:4x64", tp=2, pp=2, sequence_parallel=True, **SMALL)
    assert gathered.workload.activations == "regathered"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "chimera"])
def test_every_schedule_is_priced(schedule):
    plan = autoddl.price("gpt:4x64", pp=2, schedule=schedule, **SMALL)
    assert plan.evaluation.configuration.schedule.name == schedule and plan.step_s > 0


def test_nodes_follow_from_the_degrees():
    options = {key: value for key, value in SMALL.items() if key not in ("nodes", "devices_per_node")}
    plan = autoddl.price("gpt:4x64", tp=2, pp=2, dp=8, **options)
    assert (plan.cluster.num_nodes, plan.cluster.devices_per_node) == (2, 16)
    plan = autoddl.price("gpt:4x64", tp=2, pp=1, dp=2, **options)
    assert (plan.cluster.num_nodes, plan.cluster.devices_per_node) == (1, 4)


# ---- The result is a plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 1}, {"tp": 2, "pp": 2}, {"tp": 1, "pp": 2, "interleave": 2}])
def test_a_priced_plan_is_saved_loaded_and_used(degrees, tmp_path: Path, capsys):
    """Over 10 s on a busy machine: it is explained and exported, by the library and by commands."""
    plan = autoddl.price("gpt:4x64", **degrees, **SMALL)
    assert (plan.status, plan.optimal, plan.lower_bound_s, plan.gap) == ("priced", False, None, None)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autoddl.load(path)
    assert loaded.document == plan.document and loaded.step_s == plan.step_s and not loaded.is_claimed
    assert loaded.model_flops_utilisation == plan.model_flops_utilisation
    assert NOT_SEARCHED in str(loaded.explain(count=1)) and NOT_SEARCHED in str(loaded)
    assert NOT_SEARCHED in repr(plan) and NOT_SEARCHED in str(plan)
    other = autoddl.price("gpt:4x64", tp=4, pp=1, **SMALL)
    assert not loaded.diff(other).is_empty and loaded.diff(plan).is_empty
    assert NOT_SEARCHED.capitalize() in loaded.report(count=0)
    assert "class" in loaded.export(tmp_path / "trained.py")
    for command in (
        ["explain", path],
        ["diff", path, path],
        ["export", path, "--to", "dot", "-o", tmp_path / "plan.dot"],
    ):
        code, out, err = run(capsys, *command)
        assert (code, err) == (0, ""), out


@pytest.mark.parametrize(
    "member, value", [("optimal", True), ("lower_bound_s", 0.0), ("status", "optimal"), ("notes", ["x"])]
)
def test_claims_cannot_be_added_to_a_priced_plan(member, value, tmp_path: Path):
    from autoddl.plandocument import sealed

    document = autoddl.price("gpt:4x64", tp=2, **SMALL).document
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(sealed({**document, member: value})), encoding="utf-8")
    with pytest.raises(UserError):
        autoddl.load(path)


def test_a_configuration_that_does_not_fit_is_priced_with_a_note(tmp_path: Path, capsys):
    path = tmp_path / "plan.json"
    code, out, _ = run(capsys, *COMMAND, "--tp", "2", "--memory-limit", "0.0001", "-o", path)
    assert code == 0 and "it does not fit: a device needs" in out
    loaded = autoddl.load(path)
    assert loaded.memory_bytes > loaded.memory_limit_bytes and loaded.notes[-1].startswith("it does not fit")
    assert loaded.explain(count=1).choices


@pytest.mark.ranks
@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}])
def test_a_priced_plan_runs_as_predicted(degrees):
    """Ranks import OneFlow, which takes seconds."""
    pytest.importorskip("oneflow")
    options = {"cluster": "local-cpu", "devices_per_node": 2, "batch": 8, **SIZES}
    plan = autoddl.price("gpt:2x64", micro_batch=4, recompute="full", **degrees, **options)
    assert "right" in repr(plan.verify())


# ---- The start of a search ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [{"tp": 4, "pp": 1}, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 4}, {"tp": 1, "pp": 1}])
def test_a_search_is_never_slower_than_its_start(degrees):
    start = autoddl.price("gpt:4x64", **degrees, **SMALL)
    found = autoddl.plan("gpt:4x64", pipeline="auto", start=start, time_limit_s=0.2, quiet=True, **SMALL)
    assert found.step_s <= start.step_s * (1 + 1e-9)
    assert any(note.startswith("the start the plan takes") for note in found.notes)


def test_a_random_search_starts_from_the_optimum(tmp_path: Path):
    """Five random assignments find nothing like it: what is returned is the start."""
    best = autoddl.plan("gpt:4x64", **SMALL)
    path = tmp_path / "best.json"
    best.save(path)
    random = autoddl.plan("gpt:4x64", method="random", evaluations=5, micro_batch=best.workload.micro_batch, **SMALL)
    started = autoddl.plan(
        "gpt:4x64", method="random", evaluations=5, micro_batch=best.workload.micro_batch, start=path, **SMALL
    )
    assert started.step_s == pytest.approx(best.step_s) and started.step_s <= random.step_s
    if random.step_s > best.step_s * (1 + 1e-9):
        assert started.search.taken_from == str(path)
    started.save(path)
    assert autoddl.load(path).step_s == started.step_s


@pytest.mark.parametrize(
    "changed, pipeline, why",
    [
        ({"batch": 32}, "auto", "its batch is 16, not 32"),
        ({"micro_batch": 16}, "auto", "its micro-batch is 2, not 16"),
        ({"nodes": 1}, "auto", "it is for 2 nodes of 4 devices, not 1 of 4"),
        ({"recompute": True}, "auto", "recomputation none is not tried"),
        ({"vocabulary": 512}, None, "its model is"),
        ({}, None, "it has a pipeline, which pipeline='auto' searches"),
    ],
)
def test_a_start_outside_of_the_space_is_said_in_one_line(changed, pipeline, why):
    start = autoddl.price("gpt:4x64", tp=2, pp=2, **SMALL)
    found = autoddl.plan(
        "gpt:4x64", pipeline=pipeline, start=start, time_limit_s=1.0, quiet=True, **{**SMALL, **changed}
    )
    (note,) = [note for note in found.notes if note.startswith("the start")]
    assert f"is not in the space of the search: {why}" in note and "\n" not in note


# ---- The best plan -----------------------------------------------------------------------------------------------------------


def test_the_distance_to_the_best_plan_and_the_best_change():
    plan = autoddl.price("gpt:4x64", tp=4, pp=2, micro_batch=1, **SMALL)
    found = autoddl.distance(plan, time_limit_s=5.0, quiet=True)
    assert found.excess == pytest.approx(plan.step_s / found.best.step_s - 1) and found.excess >= 0
    assert found.best_change is not None
    # The change is a configuration of its own: pricing it gives its step.
    layout, workload = found.best_change.layout, found.best_change.workload
    changed = autoddl.price(
        "gpt:4x64",
        tp=layout.tensor_parallel,
        pp=layout.num_stages,
        dp=layout.data_parallel,
        interleave=layout.interleave,
        schedule=layout.schedule,
        micro_batch=workload.micro_batch // layout.data_parallel,
        recompute=workload.recompute,
        attention=workload.attention,
        zero=workload.zero,
        sequence_parallel={"kept": None, "regathered": True, "copied": False}[workload.activations],
        **SMALL,
    )
    assert changed.step_s == pytest.approx(found.best_change.step_s) and changed.step_s < plan.step_s
    assert all(change.memory_bytes <= plan.memory_limit_bytes for change in found.changes)
    with pytest.raises(UserError, match="price the configuration again"):
        autoddl.distance(found.best)


def test_the_nearest_uniform_configuration_is_the_best_of_all():
    """Against all of them, priced one by one."""
    plan = autoddl.plan("gpt:4x64", **SMALL)
    found = autoddl.nearest_uniform(plan)
    steps = []
    for tp, pp in [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 8]:
        for size in (1, 2, 4, 8, 16):
            for interleave in (1, 2, 4):
                for way in ("none", "full"):
                    try:
                        one = autoddl.price(
                            "gpt:4x64", tp=tp, pp=pp, micro_batch=size, interleave=interleave, recompute=way, **SMALL
                        )
                    except UserError:
                        continue
                    steps.append(one.step_s)
    assert found.is_finished and found.uniform is not None
    assert len(steps) > 50 and found.uniform.step_s == pytest.approx(min(steps))


# ---- Megatron-LM's flags -----------------------------------------------------------------------------------------------------


def test_flags_of_megatron_are_priced_as_options_are(tmp_path: Path):
    path = tmp_path / "args.txt"
    path.write_text(FLAGS, encoding="utf-8")
    plan = autoddl.price(from_megatron=path, cluster="dgx-a100", nodes=4)
    (note,) = plan.search.notes
    assert note == "flags that do not matter for the price are ignored: --lr, --log-interval"
    # 50257 is padded to a multiple of 128 x 4: 99 x 512 = 50688.
    same = autoddl.price(
        *("gpt:24x2048",),
        **{"cluster": "dgx-a100", "nodes": 4, "batch": 64, "vocabulary": 50688, "tp": 4, "pp": 2, "dp": 4},
        **{"interleave": 2, "micro_batch": 2, "recompute": "selective", "sequence_parallel": True, "zero": 1},
        **{"attention": "dense", "gradients": "master"},
    )
    assert plan.document["workload"] == same.document["workload"]
    assert plan.graph.hash == same.graph.hash and plan.step_s == same.step_s


@pytest.mark.parametrize(
    "model, options",
    [
        ("gpt:4x64", {"heads": 4, "sequence": 32, "vocabulary": 256}),
        ("gpt2", {"sequence": 256}),
        ("llama:4x256", {"sequence": 64}),
        ("llama3-1b", {"sequence": 128}),
    ],
)
@pytest.mark.parametrize(
    "words", [{"zero": 1, "overlap": "gradients"}, {"attention": "dense", "activations": "copied"}]
)
def test_flags_that_are_printed_are_read_back(model, options, words, tmp_path: Path):
    words = {"gradients": "master", "activations": "regathered", **words}
    plan = autoddl.plan(model, cluster="dgx-a100", nodes=1, batch=32, **words, **options)
    found = autoddl.nearest_uniform(plan)
    path = tmp_path / "args.txt"
    path.write_text(" \\\n".join(found.flags), encoding="utf-8")
    read = autoddl.price(from_megatron=path, cluster="dgx-a100", nodes=1)
    assert found.uniform is not None and read.search.layout == found.uniform.search.layout
    expected = {**found.uniform.document["workload"]}
    if read.search.layout.tensor_parallel == 1:  # sequence parallelism makes no difference
        read_words, expected = {**read.document["workload"]}, {**expected}
        read_words.pop("activations"), expected.pop("activations")
        assert read_words == expected
    else:
        assert read.document["workload"] == expected
    assert read.graph.hash == plan.graph.hash
    assert read.step_s == pytest.approx(found.uniform.step_s) == pytest.approx(found.megatron_step_s)


@pytest.mark.parametrize(
    "old, new, error",
    [
        ("--num-layers 24", "", "lacks --num-layers"),
        ("--num-layers 24", "--num-layers many", "--num-layers is 'many', should be a whole number of at least 1"),
        ("--lr 1e-4", "--context-parallel-size 2", "--context-parallel-size 2 cannot be priced"),
        ("--lr 1e-4", "--num-experts 8", "--num-experts 8 cannot be priced"),
        ("--lr 1e-4", "--moe-router-topk 2", "--moe-router-topk cannot be priced"),
        (
            "--recompute-activations",
            "--recompute-granularity full --recompute-num-layers 2",
            "--recompute-num-layers 2 cannot",
        ),
        (
            "--recompute-activations",
            "--recompute-granularity fully",
            "--recompute-granularity is 'fully', should be one of",
        ),
        (
            "pipeline-stage 6",
            "pipeline-stage 5",
            "--num-layers-per-virtual-pipeline-stage 5 does not divide the 24 layers",
        ),
        ("--num-attention-heads 16", "--num-attention-heads 15", "does not divide into 15 heads"),
        ("--fp16", "--fp16 yes", "--fp16 is a switch, but is followed by 'yes'"),
        ("--lr 1e-4", "--lr '1e-4", "cannot be read as words of a shell (no closing quotation)"),
    ],
)
def test_faulty_flags_are_answered_in_one_line(old, new, error, tmp_path: Path, capsys):
    path = tmp_path / "args.txt"
    path.write_text(FLAGS.replace(old, new), encoding="utf-8")
    assert error in refused(capsys, "price", "--from-megatron", str(path), "--cluster", "dgx-a100", "--nodes", "4")


def test_recomputation_of_the_first_layers_of_a_stage(tmp_path: Path):
    """Of 6 layers of a stage the first 2; the flags of the plan say so again."""
    path = tmp_path / "args.txt"
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    path.write_text(FLAGS.replace("--recompute-activations", flags), encoding="utf-8")
    found = read_megatron_flags(path)
    assert found.words["recompute"] == "blocks:2"
    plan = autoddl.price(from_megatron=path, cluster="dgx-a100", nodes=4)
    assert {stage.recompute for stage in plan.stages} == {"blocks:2"}
    layout = UniformLayout(found.tensor_parallel, found.num_stages, 2, found.interleave)
    workload = Workload(found.batch, 2 * found.micro_batch, **found.words)
    assert flags in " ".join(megatron_flags(found.graph(), layout, workload))


def test_recomputation_of_whole_stages_by_either_method(tmp_path: Path):
    path = tmp_path / "args.txt"
    for method in ("uniform --recompute-num-layers 1", "block --recompute-num-layers 6"):
        flags = f"--recompute-granularity full --recompute-method {method}"
        path.write_text(FLAGS.replace("--recompute-activations", flags), encoding="utf-8")
        assert read_megatron_flags(path).words["recompute"] == "blocks"


# ---- The command -------------------------------------------------------------------------------------------------------------


def test_the_command_prints_what_plan_prints_and_more(capsys):
    code, out, err = run(capsys, *COMMAND, "--tp", "2", "--pp", "2", "--recompute", "full", "--sequence-parallel")
    assert (code, err) == (0, "")
    for title in ("Stages", "Per layer", "Per step", "Throughput", "Memory of a device", "Certificate"):
        assert f"\n{title}" in out
    assert "model FLOP/s utilisation" in out and "hardware FLOP/s utilisation" in out
    assert "not searched: the configuration was given (tp 2, pp 2, dp 2, micro-batch 1 per replica)" in out


def test_the_json_document_has_the_plan_and_the_distance(capsys):
    code, out, _ = run(capsys, *COMMAND, "--tp", "2", "--best", "--time-limit", "2", "--json", "--quiet")
    document = json.loads(out)
    assert code == 0 and document["format"] == "autoddl-price"
    assert document["plan"]["status"] == "priced" and 0 < document["model_flops_utilisation"] < 1
    assert document["best"]["excess"] >= 0 and document["best"]["changes"]


def test_plan_prints_the_flags_of_the_nearest_uniform_configuration(capsys, tmp_path: Path):
    path = tmp_path / "start.json"
    assert run(capsys, *COMMAND, "--tp", "2", "-o", path)[0] == 0
    more = ["--pipeline", "auto", "--like", "megatron", "--start", path, "--quiet"]
    code, out, _ = run(capsys, "plan", *COMMAND[1:], *more)
    assert code == 0 and "--tensor-model-parallel-size" in out and "uniformity costs" in out
    assert f"the start {path} takes" in out


@pytest.mark.parametrize(
    "more, error",
    [
        (["--tp", "3"], "tp 3 x pp 1 does not divide the 8 devices of gcp-a100"),
        (["--tp", "0"], "tp 0 x pp 1 does not divide"),
        (["--tp", "2", "--dp", "2"], "tp 2 x pp 1 x dp 2 is 4 devices, gcp-a100 has 8"),
        (["--pp", "8"], "8 chunks (pp x interleave) should be at most the 4 blocks of the model"),
        (["--interleave", "2"], "interleave 2 needs a pipeline"),
        (
            ["--pp", "2", "--interleave", "2", "--micro-batch", "4"],
            "interleave 2 needs micro-batches in multiples of pp 2",
        ),
        (["--pp", "2", "--interleave", "2", "--schedule", "chimera"], "interleave 2 is for schedules 1f1b and gpipe"),
        (["--micro-batch", "3"], "batch 16 does not divide into micro-batches of 3 for each of 8 replicas"),
        (["--micro-batch", "0"], "micro-batch 0 should be at least 1"),
        (["--recompute", "selectiv"], "did you mean 'selective'?"),
        (["--schedule", "1f1c"], "did you mean '1f1b'?"),
        (["--sequence-paralel"], "did you mean '--sequence-parallel'?"),
        (["--fit"], "--fit is for --runs RUNS.csv"),
        (["--time-limit", "3"], "--time-limit is for --best"),
        (["--runs", "published"], "MODEL is for one configuration, leave it out with --runs"),
        (["--tp", "8"], "tp 8 x pp 1 x dp 1 cannot be priced: h.0.attn (attention, 4 heads of 16)"),
        (["--from-megatron", "args.txt"], "leave out the model: the flags of Megatron-LM describe it"),
    ],
)
def test_bad_configurations_are_answered_in_one_line(more, error, capsys):
    assert error in refused(capsys, *COMMAND, *more)


@pytest.mark.parametrize(
    "words, error",
    [
        (["price", "gpt2"], "--cluster is missing"),
        (
            ["price", "--cluster", "dgx-a100"],
            "give MODEL, Megatron-LM's flags (--from-megatron FILE), or measured runs",
        ),
        (["price", "gpt2", "--cluster", "dgx-a10"], "did you mean"),
        (["price", "--runs", "published", "--tp", "2"], "--tp is for one configuration"),
        (["price", "--runs", "published", "--best"], "--best is for one configuration"),
        (["price", "--from-megatron", "absent.txt", "--cluster", "dgx-a100"], "absent.txt"),
        *(
            (
                ["price", "--from-megatron", "a.txt", "--cluster", "dgx-a100", option, value],
                f"leave out {option} {value}: the flags",
            )
            for option, value in (("--tp", "2"), ("--micro-batch", "4"), ("--recompute", "full"), ("--batch", "8"))
        ),
        (
            ["plan", "gpt2", "--cluster", "dgx-a100", "--pipeline", "dapple", "--start", "x.json"],
            "--start is for searches",
        ),
        (["plan", "gpt2", "--cluster", "dgx-a100", "--start", "absent.json"], "absent.json"),
    ],
)
def test_what_is_missing_is_said_in_one_line(words, error, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error in refused(capsys, *words)
