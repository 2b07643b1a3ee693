"""`autoddl launch` on this machine: what ranks are given, and how they fail, start again, are interrupted and end."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

import autoddl
from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.launching import session

from .launches import NASTY, SCRIPT, shown, wait_until_gone

pytestmark = [pytest.mark.ranks("launches"), pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")]


@pytest.fixture(autouse=True)
def _here(outside_of_jobs: None) -> None:
    """All tests."""


def launch(plan: Path, *words: str) -> int:
    """The command, in this process."""
    return main(["launch", str(plan), str(SCRIPT), "--without-oneflow", "--log-dir", "logs", *words])


# ---- What ranks are given -----------------------------------------------------------------------------------------------


def test_ranks_get_arguments_environment_and_folder(mlp_plan, capsys, tmp_path, monkeypatch):
    """A folder called autoddl there hides nothing."""
    Path("autoddl").mkdir()
    Path("autoddl", "__init__.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.setenv("COLOUR", "mauve")
    assert launch(mlp_plan(1, 2), "--env", "COLOUR", "--chdir", ".", "--", "say", *NASTY) == 0
    lines = shown(capsys.readouterr().out)
    assert sorted(lines) == [0, 1]
    for rank in range(2):
        (line,) = lines[rank]
        said = json.loads(line)
        assert said["words"] == NASTY
        assert (said["RANK"], said["LOCAL_RANK"], said["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (said["LOCAL_WORLD_SIZE"], said["OMP_NUM_THREADS"], said["COLOUR"]) == ("2", "1", "mauve")
        assert (said["cwd"], said["AUTODDL_PLAN"]) == (str(tmp_path), str(mlp_plan(1, 2)))
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text() == line + "\n"
    assert not Path("x").exists()
    wait_until_gone(str(mlp_plan(1, 2)))


def test_what_scripts_are_told(monkeypatch):
    with pytest.raises(UserError, match="start it with: autoddl launch"):
        autoddl.launched()
    names = {"AUTODDL_PLAN": "/p", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "AUTODDL_RESTART": "2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    job = autoddl.launched()
    assert (job.rank, job.num_ranks, job.local_rank, job.restart) == (3, 4, 1, 2)
    assert (job.plan_path, job.checkpoints) == (Path("/p"), None)


# ---- Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "launch",
    "a rank raises, exits, is killed, or refuses what the user gave",
    "all ranks are ended; one line names the rank, its error and its log; a refusal is not tried again",
    exit_code="1; 2 where it refused",
)
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "autoddl: rank 1 of 2 raised ValueError: 17 is not even (its output: "),
        ("exit", 1, "launched_script.py exited with 3"),
        ("SIGKILL", 1, "autoddl: rank 1 of 2 was killed by SIGKILL"),
        ("refuse", 2, "autoddl: rank 1 of 2 refused: batch 17 is odd; take an even one"),
    ],
)
def test_one_rank_fails(mlp_plan, capsys, tmp_path, monkeypatch, how, code, words):
    monkeypatch.setattr(session, "_SETTLE_SECONDS", 0.1)  # no other rank fails, for which to wait
    begun = time.monotonic()
    assert launch(mlp_plan(1, 2), "--max-restarts", "3" if how == "refuse" else "0", "--", "fail", "1", how) == code
    assert time.monotonic() - begun < 60
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1
    assert "in trouble" in shown(captured.out)[1]
    assert str(tmp_path / "logs" / "rank1.log") in captured.err
    if how == "raise":  # what the user wrote, and nothing of what led there
        trace = (tmp_path / "logs" / "rank1.log").read_text()
        assert re.findall(r'File "(.*)"', trace) == [str(SCRIPT)] * 2
    wait_until_gone(str(mlp_plan(1, 2)))


def test_a_job_goes_on_from_its_checkpoint(mlp_plan, capsys):
    """That more failures than restarts end it is shown in test_launch_faults.py."""
    assert launch(mlp_plan(1, 2), "--max-restarts", "2", "--checkpoints", "saved", "--", "recover", "1") == 0
    captured = capsys.readouterr()
    lines = [line for line in shown(captured.out)[1] if line.startswith(("attempt", "done"))]
    assert lines == ["attempt 0 begins at 0", "attempt 1 begins at 3", "done"]
    assert re.sub(r" \(its output: [^)]*\)", "", captured.err) == (
        "autoddl: rank 1 of 2 raised RuntimeError: lost at step 3; starting again (1 of 2)\n"
    )


# ---- Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "a,b"], "the plan is for 1 node of 2 devices, found 2 nodes: a, b"),
        (["--hosts", "a,a"], "hosts: host 'a' is given twice"),
        (["--hosts=-oProxyCommand=x"], "'-oProxyCommand=x' is not the name of a host"),
        (["--hosts", "a;b"], "'a;b' is not the name of a host"),
        (["--hosts", "a:1"], "the plan is for 2 devices per node, host a has 1 slots"),
        (["--hostfile", "none"], "hostfile none cannot be read"),
        (["--max-restarts", "-1"], "--max-restarts is -1, should be from 0 to 1000000"),
        (["--grace", "nan"], "--grace: 'nan' is not a number of at most"),
        (["--env", "1=2"], "--env '1=2' should be NAME=VALUE"),
        (["--env", "NOT_SET_AT_ALL"], "--env NOT_SET_AT_ALL: the variable is not set in this environment"),
        (["--checkpoints", __file__], f"--checkpoints {__file__} is a file, should be a folder"),
        (["--slurm-option=--partition=x"], "--slurm-option is for --slurm"),
        (["--ssh", ""], "--ssh is empty, should be a command"),
        (["--ssh", "ssh '"], "cannot be read: No closing quotation"),
        (["--force", "--hosts", "a", "--ssh", "/no/ssh"], "/no/ssh, which connects to a, cannot be run: No such file"),
        (["--lr", "1"], "'--lr' is not an option of launch; the script's own arguments come after --"),
        (["--chdir", "/nowhere"], "host localhost has no directory /nowhere"),
        (["--slurm", "--hosts", "a"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_launched(mlp_plan, capsys, words, message):
    try:
        code = launch(mlp_plan(1, 2), *words, "--", "say")
    except SystemExit as leaving:  # argparse
        code = leaving.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_missing_script_or_an_edited_plan(mlp_plan, capsys, tmp_path):
    assert main(["launch", str(mlp_plan(1, 2)), "none.py"]) == 2
    assert "script none.py does not exist" in capsys.readouterr().err
    document = json.loads(mlp_plan(1, 2).read_text())
    document["graph"]["layers"][0]["name"] = "other"
    (tmp_path / "edited.json").write_text(json.dumps(document))
    assert main(["launch", "edited.json", str(SCRIPT)]) == 2
    assert "edited.json" in capsys.readouterr().err


def test_a_script_that_was_exported_from_another_plan(mlp_plan, capsys, tmp_path):
    """What `autoddl export` wrote says of which plan; that plan's devices do, too."""
    assert main(["export", str(mlp_plan(1, 2)), "--to", "oneflow", "-o", "model.py"]) == 0
    assert main(["launch", str(mlp_plan(1, 2)), "model.py", "--dry-run"]) == 0
    capsys.readouterr()
    assert main(["launch", str(mlp_plan(2, 2)), "model.py", "--dry-run", "--hosts", "a,b"]) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith("autoddl: model.py was exported from a plan of another cluster (sha256:")
        and err.count("\n") == 1
    )


def test_a_hosts_shape_can_be_forced(mlp_plan, capsys):
    assert launch(mlp_plan(2, 1), "--", "say") == 2
    assert "the plan is for 2 nodes of 1 device, found 1 node: this host only" in capsys.readouterr().err
    assert launch(mlp_plan(2, 1), "--force", "--", "say") == 0
    lines = shown(capsys.readouterr().out)
    assert [json.loads(lines[rank][0])["LOCAL_RANK"] for rank in range(2)] == ["0", "1"]


# ---- Dry runs -------------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_run(mlp_plan, capsys):
    words = ["--hosts", "me@h1,h2", "--ssh", "ssh -p 2222", "--env", "A=b c", "--dry-run", "--", "say", "$(x)"]
    assert launch(mlp_plan(2, 2), *words) == 0
    out = capsys.readouterr().out
    assert f"4 ranks of {SCRIPT} say '$(x)'" in out
    assert "host me@h1: ranks 0-1\n  ssh -p 2222 -o BatchMode=yes " in out and "host h2: ranks 2-3\n" in out
    assert "with A='b c'" in out
    assert not Path("logs").exists()
