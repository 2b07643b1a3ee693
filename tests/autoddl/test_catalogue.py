"""``autoddl models``, ``clusters``, ``completion``, and what is said of names that are unknown."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

import autoddl
from autoddl.__main__ import main


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a bad command is answered with."""
    try:
        code = main(list(words))
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("autoddl: ")
    return err


def test_models(capsys):
    assert main(["models", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document["models"]] == [model.name for model in autoddl.models()]
    sizes = {entry["name"]: entry["num_parameters"] for entry in document["models"]}
    assert sizes["gpt2-xl"] == 1_557_686_400 and sizes["vgg13"] == 133_047_848
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert "gpt2-xl" in text and "1,557,686,400" in text and "gpt:LAYERSxWIDTH" in text


def test_clusters(capsys):
    assert main(["clusters", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["clusters"]}
    assert list(entries) == [cluster.name for cluster in autoddl.clusters()]
    assert entries["dgx-a100"]["inter_node"] == {"latency_s": 5e-6, "bandwidth": 24e9}
    assert entries["v100-b"]["devices_per_node"] == 1
    assert main(["clusters"]) == 0
    assert "230 GB/s, 3.4 us" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plam"], "invalid choice: 'plam'; did you mean 'plan'?"),
        (["shedule"], "did you mean 'schedule'?"),
        (["plan", "gtp2-xl", "--cluster", "dgx-a100"], "did you mean 'gpt2-xl'?"),
        (["plan", "gpt2", "--cluster", "dgxa100"], "did you mean 'dgx-a100'?"),
        (["plan", "gpt2", "--clutser", "dgx-a100"], "--clutser; did you mean '--cluster'? (see autoddl plan --help)"),
        (["plan", "gpt2", "--cluster", "dgx-a100", "--bacth", "8"], "--bacth 8; did you mean '--batch'?"),
        (["plan", "gpt2", "--cluster", "dgx-a100", "--colour", "red"], "unrecognized arguments: --colour red (see"),
        (
            ["plan", "gpt2", "--cluster", "dgx-a100", "--method", "exat"],
            "invalid choice: 'exat'; did you mean 'exact'?",
        ),
        (["compare", "gpt2", "--cluster", "dgx-a100", "--methods", "exat"], "did you mean 'exact'?"),
        (["schedule", "chimra", "--stages", "2", "--micro-batches", "2"], "did you mean 'chimera'?"),
        (["launch", "p.json", "s.py", "--max-restart-s", "1"], "did you mean '--max-restarts'?"),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (["--verison"], "did you mean '--version'?"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_did_you_mean(capsys, words, message):
    assert message in refused(capsys, *words)


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_autoddl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["pl"], ["plan"]),
        (["plan", "gpt2-x"], ["gpt2-xl"]),
        (["plan", "gpt2", "--clu"], ["--cluster"]),
        (["plan", "gpt2", "--cluster", "dgx"], ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-v100"]),
        (["plan", "gpt2", "--method", "ex"], ["exact", "exhaustive"]),
        (["explain", "made"], ["made.json"]),
    ],
    ids=" ".join,
)
def test_completion_in_bash(capsys, tmp_path, words, completions):
    if not (bash := shutil.which("bash")):
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "made.json").write_text("{}")
    command = [bash, "--norc", "-c", COMPLETE, "bash", "./completion", "autoddl", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert sorted(set(done.stdout.split())) == completions, done.stderr


def test_completion_in_zsh(capsys, tmp_path):
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef autoddl") and "_autoddl_cluster" in text and "gpt2-xl" in text
    if zsh := shutil.which("zsh"):
        (tmp_path / "_autoddl").write_text(text)
        assert subprocess.run([zsh, "-n", str(tmp_path / "_autoddl")], timeout=60).returncode == 0
