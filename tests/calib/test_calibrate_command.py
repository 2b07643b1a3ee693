"""The commands, on real ranks and on files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from autoddl.__main__ import main
from autoddl.calib.campaign import CampaignOptions, measure_locally
from autoddl.calib.devices import shapes_on
from autoddl.calib.hosts import Hosts
from autoddl.calib.measure import SharedClock, _precedence, foreign_share, seconds_of_groups
from autoddl.calib.measurements import Sample, SampleFile, read_samples
from autoddl.calib.settings import TimedSetting, settings_of
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.devices import CPU
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.ranks.processes import is_listening, reserve_port

from ..processes import is_running
from .synthetic import ring, samples_of

needs_oneflow = pytest.mark.skipif(not is_available(), reason="OneFlow is not available")


# ---- Which level a group communicates on -----------------------------------------------------------------------------------


def test_groups_inside_and_between_hosts():
    """Ranks 0 to 3 on two hosts of two, in blocks: neighbours share a host, ranks two apart do not, all four mix."""
    hosts = Hosts((0, 0, 2, 2), "a")
    assert (hosts.level(2, 1), hosts.level(2, 2), hosts.level(4, 1)) == ("intra-node", "inter-node", "both")
    assert hosts.ranks_per_node == 2
    # Dealt out round robin it is the other way round; on one host everything is inside.
    assert [Hosts((0, 1, 0, 1), "a").level(2, stride) for stride in (1, 2)] == ["inter-node", "intra-node"]
    assert Hosts((0,) * 4, "a").level(4, 1) == "intra-node"
    assert Hosts((0, 0, 0, 3), "a").level(2, 1) is None


def test_ranks_of_containers_on_one_kernel_are_own():
    """Four hosts of a rank each; the clock of their machine counts the CPU time of all of them, and of another process."""
    hosts = Hosts((0, 1, 2, 3), "a", kernels=(0, 0, 0, 0))
    readings = np.array([[2.0, 0.9, 4.0]] * 4)
    assert hosts.machines == (0, 0, 0, 0) and hosts.num_hosts == 4
    assert foreign_share(readings, hosts.machines, num_cores=2) == pytest.approx(0.4 / (2.0 * 2))
    # Hosts with kernels of their own, on which another process used more than on the others.
    readings = np.array([[2.0, 0.9, 1.0], [2.0, 0.9, 1.9]])
    assert foreign_share(readings, Hosts((0, 1), "a").machines, num_cores=2) == pytest.approx(1.0 / (2.0 * 2))


def test_a_repetition_takes_from_the_last_start_of_a_group_to_its_last_end():
    """Groups (0, 2) and (1, 3): 9 - 4 = 5 and 8 - 2 = 6, then 3 - 1 = 2 and 7 - 6 = 1.

    Each rank alone: 9 - 0, 7 - 2, 9 - 4 and 8 - 1, then 3 - 0, 7 - 6, 3 - 1 and 7 - 0.
    """
    begins = np.array([[0.0, 0.0], [2.0, 6.0], [4.0, 1.0], [1.0, 0.0]])
    ends = np.array([[9.0, 3.0], [7.0, 7.0], [9.0, 3.0], [8.0, 7.0]])
    spans = np.stack((begins, ends), axis=1)
    assert seconds_of_groups(spans, [(0, 2), (1, 3)]).tolist() == [[5.0, 2.0], [6.0, 1.0]]
    assert seconds_of_groups(spans).tolist() == [[9.0, 3.0], [5.0, 1.0], [5.0, 2.0], [7.0, 7.0]]


class _ClockOfSpans(SharedClock):
    """A clock of four ranks that read given spans, in place of timing anything."""

    def __init__(self, begins: np.ndarray, ends: np.ndarray):
        self._all = np.stack((begins, ends), axis=1)

    def _spans(self, run, repetitions, apart_s=0.0):
        assert self._all.shape[2] == repetitions
        return self._all[0]

    def _seconds(self, spans, groups=None):
        return seconds_of_groups(self._all[:, :, -spans.shape[1] :], groups)


def test_the_slowest_group_of_each_call_counts():
    """Two repetitions of two calls, after one that does not count: groups (0, 2) and (1, 3) take 2, 4, 5, 3 and 3, 3, 1, 1.

    The slowest ones take 3, 4, 5, 3, whose means are 3.5 and 4.  If each rank is alone, too: they begin at 0.
    """
    in_groups = np.array([[9.0, 2.0, 4.0, 5.0, 3.0], [9.0, 3.0, 3.0, 1.0, 1.0]])
    clock = _ClockOfSpans(np.zeros((4, 5)), in_groups[[0, 1, 0, 1]])
    assert clock.time(lambda: None, 2, [(0, 2), (1, 3)], calls=2).tolist() == [3.5, 4.0]
    assert clock.time(lambda: None, 2, calls=2).tolist() == [3.5, 4.0]


def test_settings_cover_every_axis():
    settings = settings_of(4, [4096, 65536], ["all-gather", "point-to-point"])
    assert {(s.collective, s.ranks, s.stride) for s in settings} == {
        ("all-gather", 2, 1), ("all-gather", 2, 2), ("all-gather", 4, 1), ("point-to-point", 2, 1), ("point-to-point", 2, 2),
    }  # fmt: skip
    assert {s.num_bytes for s in settings} == {4096, 65536}
    # Three ranks share whole rows: as many bytes as possible below the size that was asked for.
    (odd,) = settings_of(3, [65536], ["reduce-scatter"])
    assert odd.num_bytes % 9 == 0 and 0.9 * 65536 < odd.num_bytes <= 65536


def test_a_short_run_determines_the_fit():
    """In the first round the smallest and the largest size of every collective come first, then those in the middle."""
    settings = settings_of(4, [4**k for k in range(6, 11)], ["all-gather", "point-to-point"])
    ranks = {(s.collective, s.ranks, s.stride): {} for s in settings}
    for setting, place in zip(settings, _precedence(settings)):
        ranks[setting.collective, setting.ranks, setting.stride][setting.num_bytes] = place
    for places in ranks.values():
        assert [places[size] for size in sorted(places)] == [0, 2, 1, 2, 0]


def test_a_repetition_has_several_calls():
    """On GPUs until they have exchanged 1 MiB, at least twice and at most 8 times; transfers are called once."""
    calls = {size: TimedSetting("all-reduce", 2, 1, size).calls(on_gpus=True) for size in (4096, 2**18, 2**20, 2**24)}
    assert calls == {4096: 8, 2**18: 4, 2**20: 2, 2**24: 2}
    assert TimedSetting("all-reduce", 2, 1, 4096).calls(on_gpus=False) == 2
    transfer, product = TimedSetting("point-to-point", 2, 1, 4096), TimedSetting("matmul", 1, 1, 4096, (8, 8, 8))
    assert [one.calls(on_gpus=False) for one in (transfer, product)] == [1, 1]
    # On GPUs kernels are launched without waiting for each.
    assert [one.calls(on_gpus=True) for one in (transfer, product)] == [1, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": (1,)}, r"ranks \[1\] should be numbers of at least 2"),
        ({"sizes": (4096,)}, r"sizes \[4096\] should be at least two"),
        ({"sizes": (0, 4096)}, "sizes 0 to 4096 should be from 1 byte"),
        ({"repetitions": 0}, "repetitions 0 should be at least 1"),
        ({"budget_s": 0.0}, "budget 0 s should be more than 0"),
        ({"collectives": ("broadcast",)}, "collective 'broadcast' is not one of"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(UserError, match=message):
        CampaignOptions(**options)


# ---- Real ranks ------------------------------------------------------------------------------------------------------------------


def test_calibrate_then_plan(lent_ranks, tmp_path, capsys):
    """A few sizes on 2 ranks; the cluster file that comes of it; what is missing of more repetitions; a plan with its trust.

    How many samples are disturbed depends on what else the machine does. So the file is given some that are and some that are not.
    """
    output, samples = tmp_path / "mine.json", tmp_path / "mine.csv"
    small = ["calibrate", "--ranks", "2", "--sizes", "16KiB,256KiB", "--quiet", "-o", str(output)]
    assert main([*small, "--repetitions", "1"]) == 0
    said = capsys.readouterr().out
    assert "Formulas tried, intra-node" in said and "Local work" in said
    products = said.split("Held-out products")[1]
    assert all(" x ".join(map(str, shape)) in products for shape in shapes_on(CPU))
    first = read_samples(samples)
    assert {s.collective for s in first} == {
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point", "matmul", "elementwise",
    }  # fmt: skip
    assert set(Counter(s.setting for s in first).values()) == {
        3
    }  # a block; one that is disturbed counts as one repetition
    assert all(s.seconds > 1e-6 and s.versions.startswith("oneflow 0.9") and s.cores >= 1 for s in first)
    cluster = load_cluster(output)
    assert cluster.calibration is not None and cluster.calibration.num_samples == len(first)
    # What is there is kept, and only what is missing is measured: all all-gathers, and a block of the disturbed all-reduces.
    foreign = {"all-reduce": 0.5}
    kept = [replace(s, foreign=foreign.get(s.collective, 0.0)) for s in first if s.collective != "all-gather"]
    samples.unlink()
    SampleFile(samples).append(kept)
    assert main([*small, "--repetitions", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    second = read_samples(samples)
    assert second[: len(kept)] == kept
    counts: dict[str, set[int]] = {}
    for (collective, *_), count in Counter(s.setting for s in second).items():
        counts.setdefault(str(collective), set()).add(count)
    assert counts.pop("all-reduce") == {6}
    assert counts.pop("all-gather") <= {3, 6}  # where the block is disturbed, one more
    assert set(map(frozenset, counts.values())) == {frozenset({3})} and len(counts) == 5
    assert document["calibration"]["num_samples"] == len(second)
    plan = ["plan", "mlp:256,512,256", "--cluster", str(output), "--devices-per-node", "2"]
    assert main([*plan, "--json", "--quiet"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 0 <= plan["trust"]["probability"] <= 1 and plan["trust"]["draws"] == 100


@pytest.mark.ranks
@needs_oneflow
def test_a_rank_that_dies_leaves_the_samples(tmp_path, capsys, monkeypatch):
    """A rank is killed as soon as there are samples: one line on stderr, and whole lines in the file, which can be continued."""
    path, append, run_each = tmp_path / "samples.csv", SampleFile.append, RankPool.run_each
    killed: list[int] = []
    pools: list[RankPool] = []

    def run_known(self, *arguments, **options):
        pools.append(self)
        return run_each(self, *arguments, **options)

    def append_and_kill(self, samples):
        append(self, samples)
        if len(self.samples) >= 20 and not killed:
            killed.append(pools[0].pids[1])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(RankPool, "run_each", run_known)
    monkeypatch.setattr(SampleFile, "append", append_and_kill)
    assert main(["calibrate", "--ranks", "2", "--sizes", "4KiB,16KiB", "--samples", str(path), "--quiet"]) == 1
    assert killed and not any(is_running(pid) for pid in pools[0].pids)
    out, errors = capsys.readouterr()
    kept = len(read_samples(path))
    assert out == "" and errors.count("\n") == 1 and "SIGKILL" in errors
    assert f"the {kept} samples in {path} are kept, and the same command continues them" in errors
    assert kept >= 20
    assert len(SampleFile(path).samples) == kept


def test_samples_that_cannot_be_written_end_the_run(tmp_path, monkeypatch):
    """The error is passed on as it is. (That it ends the ranks, whatever it is: see `test_launcher`.)"""

    class Full(SampleFile):
        def append(self, samples):
            raise UserError("samples.csv: cannot be written (No space left on device); the 7 samples in it are kept")

    class Reporting:
        def run(self, job, options, on_report):
            on_report(0, [])

    monkeypatch.setattr("autoddl.pipelines.runtime.ranks.launcher.RankPool", lambda *_, **__: nullcontext(Reporting()))
    with pytest.raises(UserError, match=r"^samples.csv: .* \(No space left on device\); the 7 samples in it are kept$"):
        measure_locally(CampaignOptions(ranks=(2,), sizes=(1024, 4096), repetitions=3), Full(tmp_path / "samples.csv"))


def test_rank_runs_strategies(lent_ranks, capsys):
    small = ["--ranks", "2", "--strategies", "3", "--rounds", "2", "--repetitions", "1"]
    assert main(["rank", "mlp:64,128,32", *small, "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["scores"]) == {"communication", "step"} and not document["refused"]
    assert len(document["strategies"]) == 3
    for strategy in document["strategies"]:
        assert len(strategy["communication_s"]) == len(strategy["step_s"]) == 2
        assert min(strategy["step_s"]) > 0
    assert -1 <= document["scores"]["step"]["spearman"] <= 1


JOB = """
import sys
from autoddl.__main__ import main
sys.exit(main(["calibrate", "--samples", sys.argv[1], "-o", sys.argv[2], "--sizes", "4KiB,64KiB", "--repetitions", "1",
               "--communication-only", "--quiet"]))
"""


@pytest.mark.ranks
@needs_oneflow
def test_inside_a_launcher_s_job(tmp_path):
    """Ranks of a job that a launcher started measure together; the first writes the file, the others print nothing."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    with reserve_port() as holder:
        port = holder.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    for rank in range(2):
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank),
                       "LOCAL_RANK": str(rank), "ONEFLOW_TIMEOUT_SECONDS": "60"}  # fmt: skip
        arguments = [sys.executable, str(script), str(tmp_path / "samples.csv"), str(tmp_path / "mine.json")]
        processes.append(
            subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        deadline = time.monotonic() + 60
        while not is_listening(processes[0].pid, port) and time.monotonic() < deadline:
            time.sleep(0.05)
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "Held-out message sizes" in outputs[0][0] and outputs[1][0] == ""
    samples = read_samples(tmp_path / "samples.csv")
    assert {s.job_ranks for s in samples} == {2} and {s.bytes for s in samples} == {4096, 65536}
    assert load_cluster(tmp_path / "mine.json").calibration is not None


# ---- Files ---------------------------------------------------------------------------------------------------------------------


def test_fit_and_compare_with_a_later_session(tmp_path, capsys):
    first, later = tmp_path / "first.csv", tmp_path / "later.csv"
    SampleFile(first).append(samples_of(ring(50e-6, 1e-9), jobs=(2, 4), noise=0.01, repetitions=3))
    slower = samples_of(lambda *what: 1.25 * ring(50e-6, 1e-9)(*what), 1, jobs=(2, 4), noise=0.01, repetitions=3)
    SampleFile(later).append(slower)
    output = tmp_path / "mine.json"
    assert main(["fit", str(first), "-o", str(output)]) == 0
    assert "taken" in capsys.readouterr().out
    assert load_cluster(output).links[1].latency_s == pytest.approx(50e-6, rel=0.01)
    assert main(["fit", str(later), "--against", str(output)]) == 0
    assert "20." in capsys.readouterr().out
    # Both sessions together are one fit.
    assert main(["fit", str(first), str(later), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["num_samples"] == 2 * len(read_samples(first))


def test_picture_of_a_fit(tmp_path):
    samples, picture = tmp_path / "mine.csv", tmp_path / "mine.svg"
    measured = samples_of(ring(50e-6, 1e-9), jobs=(2,), repetitions=1)
    SampleFile(samples).append(s for s in measured if s.collective in ("all-reduce", "all-gather"))
    assert main(["fit", str(samples), "--picture", str(picture)]) == 0
    assert picture.read_text().count("<svg") == 1


def test_fit_of_invalid_files(tmp_path, capsys):
    path = tmp_path / "bad.csv"
    path.write_text("collective,ranks,bytes,seconds\nall-reduce,2,10,-1\n")
    assert main(["fit", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"autoddl: {path}: line 2: seconds is '-1', should be a time of more than 0 and at most 1e+09 seconds\n"
    )
    SampleFile(tmp_path / "one.csv").append([Sample("all-reduce", "intra-node", 2, 4096, i, 1e-3) for i in range(5)])
    assert main(["fit", str(tmp_path / "one.csv")]) == 2
    assert "one message size (4096 bytes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "4KiB"], "sizes [4096] should be at least two"),
        (["--sizes", "1MiB:4KiB"], "--sizes '1MiB:4KiB': 1 MiB should be at most 4 KiB"),
        (["--sizes", "4parsec"], "--sizes: unit 'parsec' is not a unit of size"),
        (["--ranks", "two"], "--ranks is 'two', should be a whole number"),
        (["--base", "nowhere"], "cluster 'nowhere' is neither a file nor one of"),
    ],
)
def test_calibrate_with_wrong_arguments(arguments, message, capsys):
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err
