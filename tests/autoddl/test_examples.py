"""The scripts and the notebook in ``examples/`` run, and say what they should."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoddl
from autoddl.pipelines.runtime.load import is_available

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOK = EXAMPLES / "tour.ipynb"


def said(folder: Path, name: str, *words: str) -> str:
    """What a script prints, run in a folder of its own."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_is_tested():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {
        *("plan_a_known_model.py", "plan_your_own_module.py", "plan_a_pipeline.py", "draw_a_schedule.py"),
        *("fit_a_cluster.py", "tour.ipynb"),
    }


def test_a_known_model(tmp_path):
    out = said(tmp_path, "plan_a_known_model.py")
    assert out.startswith("<Plan gpt2-xl on dgx-a100: 2 nodes of 8") and "proven optimal: True" in out
    folder = re.search(r"written to (\S+): model\.py, plan\.json, report\.html", out)
    assert folder is not None
    ast.parse(Path(folder[1], "model.py").read_text())
    assert autoddl.load(Path(folder[1], "plan.json")).optimal


def test_a_pipeline(tmp_path):
    out = said(tmp_path, "plan_a_pipeline.py")
    assert "2 stages" in out and "stage 1: " in out and "worker 1" in out
    assert float(re.search(r"takes (\S+) times as long", out)[1]) > 1
    assert sum(map(float, re.findall(r"(\S+)%$", out, re.MULTILINE))) == pytest.approx(100, abs=0.5)


def test_a_schedule(tmp_path):
    out = said(tmp_path, "draw_a_schedule.py", "chimera.svg")
    bubbles = {name: float(share) for name, share in re.findall(r"^(\S+) +makespan.* ([0-9.]+)%$", out, re.MULTILINE)}
    assert bubbles["chimera"] == 20.0 and bubbles["1f1b"] == 27.3 and len(bubbles) == 7
    assert (tmp_path / "chimera.svg").read_text().startswith("<svg")


def test_a_cluster(tmp_path):
    out = said(tmp_path, "fit_a_cluster.py")
    assert float(re.search(r"(\S+) GB/s", out)[1]) == pytest.approx(90, rel=0.02)
    assert "ours against these samples" in out and "the best plan with probability" in out


@pytest.mark.ranks("launches")
@pytest.mark.slow
def test_your_own_module(tmp_path):
    """Over 10 s: planned and trained in one process, planned for two ranks, and launched on them."""
    if not (available := is_available()):
        pytest.skip(available.reason)
    alone = said(tmp_path, "plan_your_own_module.py")
    assert "<Plan" not in alone and "proven" in said(tmp_path, "plan_your_own_module.py", "2", "plan.json")
    script = str(EXAMPLES / "plan_your_own_module.py")
    command = [sys.executable, "-m", "autoddl", "launch", "plan.json", script, "--local"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for out in (alone, done.stdout):
        losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", out)]
        assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]


# ---- The notebook ------------------------------------------------------------------------------------------------------


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its code cells one after the other, without jupyter; what a cell ends with is shown as a notebook shows it."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    shown = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    out = capsys.readouterr().out
    assert any("h.*.mlp.c_fc" in text and "<table" in text for text in shown) and any("<svg" in text for text in shown)
    assert "did you mean 'gpt2-xl'" in out and "proven optimal" in out
    assert max(map(len, shown)) < 100_000


def test_the_notebook_is_as_it_is_written():
    """No outputs, no counts: they would differ with each run."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | (
            {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        )


# ---- Types -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scripts_that_use_the_face_pass_mypy_strict(tmp_path):
    """Over 10 s on a busy machine: mypy looks at the whole package.

    The scripts that bring a OneFlow model are left out: OneFlow has no types.
    """
    root = EXAMPLES.parent
    types = tmp_path / "types" / "autoddl"
    types.mkdir(parents=True)
    for path in [
        *(root / "autoddl").iterdir(),
        *(root / name for name in ("costmodel", "search", "pipelines", "calib")),
    ]:
        (types / path.name).symlink_to(path)
    scripts = [path for path in sorted(EXAMPLES.glob("*.py")) if "load_oneflow" not in path.read_text()]
    assert len(scripts) == 4
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--follow-imports=silent"]
    for script in scripts:
        done = subprocess.run(
            [*command, "--cache-dir", str(tmp_path / "cache"), str(script)],
            cwd=tmp_path,
            env={**os.environ, "MYPYPATH": str(tmp_path / "types")},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stdout + done.stderr
