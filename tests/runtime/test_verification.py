"""``autoddl verify`` on real ranks: plans that keep their promises, plans that do not, and ranks that fail."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.result import unpipelined
from autoddl.pipelines.runtime.availability import Availability
from autoddl.pipelines.runtime.load import is_available
from autoddl.planfile import load_plan, plan_document, save_plan, unpipelined_plan
from autoddl.search.baselines import baselines
from autoddl.search.planner import Options, make_plan
from autoddl.verification import Limits, VerifyOptions, comparing, prediction, run, verify
from autoddl.verification.executors import executor_of
from autoddl.verification.prediction import PHASES
from autoddl.verification.task import ByteCounts
from autoddl.zoo import Transformer, gpt, llama, mlp

from ..processes import is_running
from .sent_bytes import Sent, check_sent

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)

GPT = Transformer("gpt", layers=1, width=128, heads=8, sequence=32, vocabulary=512)
FULL_SIZE = VerifyOptions(limits=Limits())


def cluster(level_sizes):
    sizes = (1, *level_sizes) if len(level_sizes) == 1 else level_sizes
    return load_cluster("dgx-a100").resized(*sizes)


def on(*splits, summa=False):
    return Strategy(splits, summa=summa)


def mlp_plan(strategies, batch=64, widths=(256, 512, 384, 256), **workload):
    """Strategies of one level, or of two."""
    graph = mlp(widths)
    levels = [prod(split) for split in strategies[0].splits]
    chosen = {layer.name: strategy for layer, strategy in zip(graph.layers, strategies)}
    asked = Workload(batch, workload.pop("micro_batch", batch), "float32", **workload)
    return unpipelined_plan(graph, cluster(levels), asked, chosen)


def gpt_plan(which, level_sizes, layers=1, **workload):
    graph, on_cluster = gpt(replace(GPT, layers=layers)), cluster(level_sizes)
    options = Options(batch=8, micro_batch=8, precision="mixed", recompute=False, objective="communication")
    planned = make_plan(graph, on_cluster, options)
    strategies = planned.strategies
    if which == "megatron":
        found = (b.strategies for b in baselines(graph, on_cluster.level_sizes) if b.name == "megatron")
        strategies = next(s for s in found if {x.p0 for x in s.values()} == {2})
    return unpipelined_plan(graph, on_cluster, Workload(8, 8, **workload), strategies)


# ---- Plans that keep their promises --------------------------------------------------------------------------------------------

RIGHT = {
    "mlp on 2": mlp_plan((on((2, 1, 1)), on((1, 2, 1)), on((1, 1, 2))), optimizer="sgd"),
    "mlp on 4": mlp_plan((on((4, 1, 1)), on((1, 2, 2)), on((2, 1, 2))), batch=128, micro_batch=64),
    "mlp on 4, summa": mlp_plan((on((2, 2, 1), summa=True), on((1, 2, 2)), on((2, 2, 1))), optimizer="momentum"),
    "mlp on 2 x 2": mlp_plan((on((2, 1, 1), (1, 2, 1)), on((1, 2, 1), (1, 1, 2)), on((1, 1, 2), (2, 1, 1)))),
    # From p0 = 1 to 3 of 6 ranks in unequal pieces, and back.
    "mlp on 6": mlp_plan((on((1, 2, 3)), on((3, 1, 2)), on((1, 6, 1))), 48, (192, 480, 576, 96), optimizer="sgd"),
    "gpt on 2, optimal": gpt_plan("optimal", (2,), layers=2),
    "gpt on 4, megatron": gpt_plan("megatron", (4,)),
    "gpt on 2 x 2, optimal": gpt_plan("optimal", (2, 2), recompute="blocks"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_loss_gradients_training_and_bytes_are_as_promised(counted_ranks, name):
    plan = RIGHT[name]
    num_ranks = plan.cluster.num_devices

    def run_plan():
        return verify(plan, num_ranks, options=FULL_SIZE, pool=counted_ranks(num_ranks))

    found = run_plan()
    assert found.faults == ()
    assert found.changes == () and found.not_counted_because == ""
    assert max(found.loss_errors) < 1e-5
    names = {p.name for layer in plan.graph.layers for p in layer.parameters if p.tied_to is None}
    for checks in (found.gradients, found.parameters):
        assert {check.name for check in checks} == names
        assert max(check.error for check in checks) < 1e-5
    expected = priced_bytes(plan)
    for layer in found.layers:
        assert tuple(layer.phases) == PHASES
        total = sum(expected[layer.name, phase] for phase in layer.phases)
        assert layer.total.predicted_bytes == pytest.approx(total)
    assert found.step.predicted_bytes > 1e6
    check_sent(num_ranks, sent_by(found), lambda: sent_by(run_plan()))


def sent_by(found):
    """The headers are taken off already."""
    layers = [(layer.name, layer.total) for layer in found.layers]
    step = Sent("a step", found.step.sent_bytes, found.step.predicted_bytes, num_readings=0)
    return [*(Sent(name, t.sent_bytes, t.predicted_bytes, num_readings=t.num_readings) for name, t in layers), step]


def priced_bytes(plan):
    """By layer and phase, as plans are priced."""
    device = replace(plan.cluster.device, peak_flops={"float32": 1e12})
    workload = replace(plan.workload, precision="float32")
    found = assess(plan.graph, replace(plan.cluster, device=device), workload, plan.strategies)
    return {
        (layer.layer.name, phase): plan.cluster.num_devices * sum(step.mean_sent_bytes for step in steps)
        for layer in found.layers
        for phase, steps in zip(PHASES, (layer.forward_steps, layer.backward_steps, layer.work.gradient))
    }


def test_a_model_too_large_is_scaled_down_with_its_strategies(counted_ranks, capsys, tmp_path, monkeypatch):
    sizes = Transformer(
        "big", 6, 2048, 32, 512, 32000, kv_heads=8, intermediate=5504, activation="silu", tied=False, qkv_bias=True
    )
    options = Options(batch=32, precision="mixed", objective="communication", memory_limit_bytes=1e12)
    planned = make_plan(llama(sizes), cluster((2,)), options)
    path = tmp_path / "plan.json"
    save_plan(path, plan_document(unpipelined(planned)))
    monkeypatch.setattr(run, "machine_limits", lambda num_ranks: Limits(5e7, 5e9))
    code, document = verified_json(capsys, monkeypatch, counted_ranks(2), path, 2)
    assert code == 0 and document["verdict"] == "right"
    scaled = {change["what"]: (change["before"], change["after"]) for change in document["scaled"]}
    assert scaled["blocks"] == ("6", "2") and int(scaled["width"][1]) < 2048
    assert document["notes"] == [
        "the plan is for GPUs; here CPU ranks run it",
        "mixed precision, float16 with float32 masters, runs as float32 with float64 masters, the types that CPU ranks have; bytes "
        "are priced for them",
    ]
    for layer in document["layers"]:
        assert layer["strategy"] == [list(split) for split in planned.strategies[layer["name"]].splits]


# ---- Through the command ---------------------------------------------------------------------------------------------------------


def verified(capsys, monkeypatch, pool, *arguments):
    """Exit code, stdout and stderr of the command on ranks that are there already."""
    if pool is not None:
        monkeypatch.setattr(run, "RankPool", lambda *_, **__: contextlib.nullcontext(pool))
    code = main(["verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def verified_json(capsys, monkeypatch, pool, path, num_ranks, *arguments):
    code, out, err = verified(capsys, monkeypatch, pool, path, "--ranks", num_ranks, "--json", *arguments)
    assert err == ""
    return code, json.loads(out)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """A plan for four devices whose messages are large enough to be judged."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    options = Options(batch=64, micro_batch=64, precision="float32", recompute=False, objective="communication")
    save_plan(path, plan_document(unpipelined(make_plan(mlp((256, 512, 256, 256)), cluster((4,)), options))))
    return path


class Replay:
    """In place of ranks: what they found once. It depends on neither the price nor the tolerance that it is compared with."""

    def __init__(self, reference, shards):
        first = shards[0]
        counted = ByteCounts(tuple(section.payload_bytes for section in first.sections), first.run_bytes)
        self._results = {"run_reference": [reference], "run_plan": shards, "count_again": [counted]}

    def run(self, job, *_arguments, **_options):
        return list(self._results[job.rpartition(":")[2]])


@pytest.fixture(scope="module")
def replay(counted_ranks, plan_file):
    """The plan as four ranks ran it, whose bytes, however often they had to be counted, are right."""
    found = []

    def compare(*arguments, **options):
        found[:] = arguments[-2:]
        return comparing.compare(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "executor_of", lambda name: replace(executor_of(name), compare=compare))
        assert verify(load_plan(plan_file), 4, options=FULL_SIZE, pool=counted_ranks(4)).is_right
    return Replay(*found)


def test_the_table_has_a_line_per_layer_and_a_verdict(replay, capsys, monkeypatch, plan_file):
    code, out, err = verified(capsys, monkeypatch, replay, plan_file, "--ranks", 4)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "mlp:256,512,256,256 on 4 ranks (4 intra-node), against one device"
    for name in ("fc1", "fc2", "fc3"):
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
    assert lines[-1].startswith("Right: the plan computes what one device computes, and sends what it promised (")
    assert max(map(len, lines)) < 140


def test_a_wrong_price_is_found(replay, capsys, monkeypatch, plan_file):
    def falsified(*arguments):
        steps = layer_steps(*arguments)
        key = next(key for key, found in steps.items() if key[0] == "fc2" and found)
        steps[key] = tuple(replace(step, nbytes=1.1 * step.nbytes) for step in steps[key])
        return steps

    layer_steps = prediction.layer_steps
    monkeypatch.setattr(prediction, "layer_steps", falsified)
    code, document = verified_json(capsys, monkeypatch, replay, plan_file, 4)
    assert code == 1 and document["verdict"] == "off"
    assert any("is priced but did not run" in fault for fault in document["faults"])
    assert any("ran but is not priced" in fault for fault in document["faults"])
    assert any("bytes were sent" in fault for fault in document["faults"])
    assert all(fault.startswith(("fc2", "a whole step")) for fault in document["faults"])
    # Bytes alone, had the log of steps been as wrong as the price:
    monkeypatch.setattr(comparing, "missing_steps", lambda *arguments: ([], []))
    code, out, _ = verified(capsys, monkeypatch, replay, plan_file, "--ranks", 4)
    assert code == 1 and "<- off" in out and "Off in " in out


class NoisyRanks:
    """Ranks in whose first counts of a step somebody else sent something."""

    def __init__(self, pool, num_noisy):
        self.pool, self.num_noisy, self.num_recounts = pool, num_noisy, 0

    def run(self, job, *arguments, **options):
        results = self.pool.run(job, *arguments, **options)
        if job.endswith((":run_plan", ":count_again")):
            self.num_recounts += job.endswith(":count_again")
            if self.num_noisy > 0:
                results[0] = replace(results[0], run_bytes=results[0].run_bytes + 10**6)
            self.num_noisy -= 1
        return results


@pytest.mark.parametrize(("num_noisy", "num_recounts"), [(3, 3), (5, 4)])
def test_bytes_are_counted_again_before_they_are_called_off(replay, plan_file, num_noisy, num_recounts):
    noisy = NoisyRanks(replay, num_noisy)
    found = verify(load_plan(plan_file), 4, options=FULL_SIZE, pool=noisy)
    assert noisy.num_recounts == num_recounts
    assert found.are_bytes_off == (num_noisy > num_recounts) == (not found.is_right)


class ForgetfulRanks:
    """Ranks none of which holds ``fc1.weight``."""

    def __init__(self, pool):
        self.pool = pool

    def run(self, job, *arguments, **options):
        results = self.pool.run(job, *arguments, **options)
        if job.endswith(":run_plan"):
            for shard in results:
                held = {name: error for name, error in shard.gradient_errors.items() if name != "fc1.weight"}
                results[results.index(shard)] = replace(shard, gradient_errors=held)
        return results


def test_a_parameter_that_no_rank_holds_is_off(replay, plan_file):
    found = verify(load_plan(plan_file), 4, options=FULL_SIZE, pool=ForgetfulRanks(replay))
    assert found.faults == ("fc1.weight: the gradient of step 1 on rank 0 is off by inf",)


def test_ranks_count_again(counted_ranks):
    noisy = NoisyRanks(counted_ranks(2), num_noisy=1)
    assert verify(RIGHT["mlp on 2"], 2, options=FULL_SIZE, pool=noisy).is_right
    assert noisy.num_recounts >= 1


def test_values_beyond_the_tolerance_are_named(replay, capsys, monkeypatch, plan_file):
    code, document = verified_json(capsys, monkeypatch, replay, plan_file, 4, "--tolerance", "1e-12")
    assert code == 1
    assert any(fault.startswith("fc1.weight: the gradient of step 1 on rank ") for fault in document["faults"])


def test_where_bytes_cannot_be_counted_the_reason_is_given(ranks, capsys, monkeypatch, plan_file):
    monkeypatch.setattr(run, "namespace_available", lambda: Availability("there are no namespaces here"))
    code, out, _ = verified(capsys, monkeypatch, ranks(4), plan_file, "--ranks", 4)
    assert code == 0
    assert "bytes were not counted: there are no namespaces here" in out
    assert "takes the steps that it promised" in out


# ---- Models of users -------------------------------------------------------------------------------------------------------------

USERS_MODEL = """
import os, time
import oneflow as flow
from oneflow import nn

HERE = os.path.dirname(__file__)

relu = flow.relu

def swirl(x):
    open(os.path.join(HERE, f"pid-{os.getpid()}"), "w").close()
    if os.environ["RANK"] == "1":
        open(os.path.join(HERE, "since"), "a").write(f"{time.time()}\\n")
        MISBEHAVIOUR
    return relu(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 64)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(64, 8)

    def forward(self, x):
        return self.last(flow.cumsum(flow.relu(self.drop(self.first(x))), dim=1))

def make():
    if "RANK" in os.environ and flow.env.get_world_size() > 1:
        flow.relu = swirl  # ranks run operators, not the model's code
    return Net(), (flow.randn(4, 24),)
"""


@pytest.fixture(scope="module")
def users_plan(tmp_path_factory) -> Path:
    """A plan for two devices of the user's model, however that behaves on ranks."""
    folder = tmp_path_factory.mktemp("users")
    model, path = users_model(folder), folder / "plan.json"
    command = [
        "plan",
        model,
        "--cluster",
        "dgx-a100",
        "--nodes",
        "1",
        "--devices-per-node",
        "2",
        "--batch",
        "8",
        "--micro-batch",
        "4",
    ]
    assert main([*command, "--precision", "float32", "-o", str(path), "--quiet"]) == 0
    return path


def users_model(folder: Path, misbehaviour: str = "pass") -> str:
    """What makes the model."""
    file = folder / "net.py"
    file.write_text(USERS_MODEL.replace("MISBEHAVIOUR", misbehaviour))
    return f"{file}:make"


@pytest.mark.ranks
def test_a_users_model_without_a_loss(capsys, monkeypatch, users_plan, tmp_path):
    """On ranks of its own, whose ``relu`` the model replaces."""
    path, model = users_plan, users_model(tmp_path)
    code, document = verified_json(capsys, monkeypatch, None, path, 2, "--model", model)
    assert code == 0 and document["verdict"] == "right"
    assert (document["workload"]["batch"], document["workload"]["micro_batch"]) == (8, 4)
    assert "dropouts drop the elements that one device drops" in document["notes"]
    assert {layer["name"] for layer in document["layers"]} >= {"first", "last"}
    wanted = "is not a built-in one; give --model FILE.py:FUNCTION, which makes it"
    assert wanted in refused(capsys, path, "--ranks", 2)
    (tmp_path / "net.py").write_text((tmp_path / "net.py").read_text().replace("64, 8", "64, 16"))
    said = refused(capsys, path, "--ranks", 2, "--model", model)
    assert "the plan was made for another model than Net: it has last (linear, 64 -> 8)" in said


@pytest.mark.ranks
def test_a_rank_that_computes_something_else_is_found(capsys, monkeypatch, users_plan, tmp_path):
    """On ranks of its own, whose ``relu`` the model replaces."""
    model = users_model(tmp_path, "x = 1.001 * x")
    code, out, err = verified(capsys, monkeypatch, None, users_plan, "--ranks", 2, "--model", model)
    assert (code, err) == (1, "")
    assert "first.weight: the gradient of step 1 on rank " in out and "Off in " in out


#: Of a rank that is killed, see `test_exit_codes`.
FAILURES = {
    "raises": ("raise ArithmeticError('swirled too much')", "rank 1 of 2 raised ArithmeticError: swirled too much"),
    "stalls": ("time.sleep(1000)", "rank 1 is at"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_is_named_soon_and_nothing_is_left(capsys, monkeypatch, users_plan, tmp_path, failure):
    """Slow where a rank stalls: the others wait for it."""
    assert run.STALL_SECONDS + 3 < 20
    monkeypatch.setattr(run, "STALL_SECONDS", 6.0)
    misbehaviour, words = FAILURES[failure]
    model = users_model(tmp_path, misbehaviour)
    code, out, err = verified(capsys, monkeypatch, None, users_plan, "--ranks", 2, "--model", model, "--json")
    ended = time.time()
    assert code == 1, (out, err)
    assert words in err and err.count("\n") == 1
    if failure == "stalls":
        assert "net.py" in err
    since = float((tmp_path / "since").read_text().splitlines()[0])
    assert ended - since < 60
    document = json.loads(out)
    assert document["verdict"] == "failed" and words in document["error"]
    pids = [int(file.name[4:]) for file in tmp_path.glob("pid-*")]
    assert pids and not [pid for pid in pids if is_running(pid)]


# ---- Refusals --------------------------------------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    code = main(["verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.count("\n") == 1
    return err


def test_plans_for_something_else_are_refused(capsys, monkeypatch, plan_file, tmp_path):
    assert (
        "the plan is for 4 devices (1 node of 4), not for --ranks 3; give --ranks 4, or plan for fewer devices"
        in refused(capsys, plan_file, "--ranks", 3)
    )
    assert "it has fc3 (linear, 256 -> 256) where the model has fc3 (linear, 256 -> 128)" in refused(
        capsys, plan_file, "--ranks", 4, "--model", "mlp:256,512,256,128"
    )
    document = json.loads(plan_file.read_text())
    document["graph"]["layers"][0]["flops"] += 1  # as an older version counted them
    (tmp_path / "edited.json").write_text(json.dumps(document))
    assert "graph was edited" in refused(capsys, tmp_path / "edited.json", "--ranks", 4)
    assert "--tolerance is 0, should be a positive number" in refused(
        capsys, plan_file, "--ranks", 4, "--tolerance", "0"
    )
    monkeypatch.setattr(run, "is_available", lambda: Availability("OneFlow is not installed"))
    assert "cannot verify: OneFlow is not installed" in refused(capsys, plan_file, "--ranks", 4)


def test_the_environment_of_the_ranks_is_not_left_behind():
    assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ
