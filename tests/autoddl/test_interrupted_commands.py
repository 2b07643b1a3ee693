"""Ctrl-C, or SIGTERM, while a command plans: the best plan until then is printed and written, and the exit code says it."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from autoddl.__main__ import main
from autoddl.planfile import load_plan

#: Each test starts a command.
pytestmark = pytest.mark.slow

COMMAND = Path(__file__).with_name("interrupted_command.py")
GPT = ["gpt:4x64", "--heads", "4", "--sequence", "32", "--vocabulary", "256", "--cluster", "gcp-a100"]
GPT += ["--nodes", "2", "--devices-per-node", "2", "--batch", "8", "--quiet"]
MLP = ["mlp:32768,16384,8192,4096,2048,1024,512,10", "--cluster", "piz-daint", "--nodes", "128", "--batch", "1024"]
UNTIED = ["mlp:64,768,768,768,768,32", "--cluster", "gcp-a100", "--nodes", "2", "--devices-per-node", "2"]
UNTIED += ["--batch", "8", "--quiet"]
#: The first looks at the whole space, when the plan without a pipeline is known; its search; and that of the first family.
BEGINNING = ("autoddl.pipelines.joint.search:Search.find_incumbent", 1)
WHOLE_SPACE = ("autoddl.pipelines.joint.search:Search.resume", 1)
FAMILY = ("autoddl.pipelines.joint.rivals:explore", 1)


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float


def interrupted(
    place: tuple[str, int],
    arguments: Sequence[str],
    number: int = signal.SIGINT,
    twice: bool = False,
    cwd: Path | None = None,
) -> Ended:
    """Run a command, send it a signal when its search is there (``twice``: and another one); what it printed afterwards."""
    command = [sys.executable, str(COMMAND), place[0], f"{place[1]}{'+' if twice else ''}", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=cwd, start_new_session=True
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == "searching\n", said + process.stderr.read()
        start = time.perf_counter()
        process.send_signal(number)
        if twice:
            assert process.stderr.readline() == "stopping\n"
            process.send_signal(number)
        out, err = process.communicate(timeout=120)
        return Ended(process.returncode, out, err, time.perf_counter() - start)
    finally:
        process.kill()
        process.wait()


def one_line(ended: Ended) -> str:
    assert ended.err.startswith("autoddl: interrupted") and ended.err.count("\n") == 1, ended.err
    assert "Traceback" not in ended.out + ended.err
    return ended.err


def check_plan(path: Path, status: str = "interrupted") -> None:
    """What was written loads, is consistent, and says that it was interrupted."""
    document = load_plan(path).document
    assert document["status"] == status and document["optimal"] == (status == "optimal")
    assert 0 <= document["lower_bound_s"] <= document["step_s"]
    assert document["gap"] == pytest.approx(1 - document["lower_bound_s"] / document["step_s"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["explain", str(path)]) == 0
    assert err.getvalue() == ""


@pytest.mark.fault(
    "search",
    "Ctrl-C during `autoddl plan`",
    "the best plan so far and its gap are printed and written, `interrupted` is said in all of them",
    exit_code=130,
)
def test_an_interrupted_plan_is_printed_and_written(tmp_path, record_property):
    path = tmp_path / "plan.json"
    arguments = ["plan", *MLP, "--quiet", "--method", "exhaustive", "--time-limit", "10000", "-o", str(path)]
    ended = interrupted(("autoddl.search.sweep:solve", 1), arguments)
    assert ended.code == 130, ended
    assert "the best one may be up to" in one_line(ended)
    assert (
        "not proven: interrupted, the best assignment may be up to" in ended.out and f"Written to {path}" in ended.out
    )
    check_plan(path)
    record_property("seconds", ended.seconds)


@pytest.mark.fault(
    "search",
    "Ctrl-C while `autoddl plan` looks whether a pipeline would be faster",
    "the plan, which is proven by then, is printed and written without a word on pipelines",
    exit_code=130,
)
def test_a_plan_whose_trials_of_pipelines_are_interrupted_is_whole(tmp_path, record_property):
    """Of this model on slow links a pipeline is faster: without an interrupt the plan has a note."""
    path = tmp_path / "plan.json"
    arguments = ["plan", "mlp:256,256,256", "--cluster", "gcp-a100", "--nodes", "1", "--devices-per-node", "2"]
    arguments += ["--bandwidth", "2e7", "--batch", "4", "--micro-batch", "1", "--quiet", "-o", str(path)]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(arguments) == 0
    assert "a pipeline takes" in shown.getvalue()
    ended = interrupted(("autoddl.pipelines.joint.megatron_trials:megatron_trials", 1), arguments)
    assert ended.code == 130, ended
    assert "this is the best plan found so far, it is proven optimal" in one_line(ended)
    assert "proven: none of" in ended.out and "a pipeline takes" not in ended.out
    check_plan(path, "optimal")
    record_property("seconds", ended.seconds)


@pytest.mark.fault(
    "search",
    "Ctrl-C during `autoddl plan --pipeline auto`",
    "the best plan so far, with or without a pipeline, and its gap are printed and written",
    exit_code=130,
)
@pytest.mark.parametrize("place", [BEGINNING, WHOLE_SPACE, FAMILY], ids=["beginning", "whole space", "family"])
def test_an_interrupted_joint_plan_is_printed_and_written(tmp_path, record_property, place):
    path = tmp_path / "plan.json"
    arguments = ["plan", *GPT, "--memory-limit", "0.004", "--pipeline", "auto", "-o", str(path)]
    ended = interrupted(place, arguments)
    assert ended.code == 130, ended
    one_line(ended)
    assert "none was found before the search was interrupted" in ended.out
    # The families are searched last: by then this small plan is proven.
    is_proven = place == FAMILY
    assert ("not proven: interrupted, the best configuration may be up to" in ended.out) != is_proven
    check_plan(path, "optimal" if is_proven else "interrupted")
    record_property("seconds", ended.seconds)


@pytest.mark.fault(
    "search",
    "Ctrl-C during `autoddl plan --pipeline dapple`, `chimera` or `wpipe`",
    "the best plan that the paper's planner has found so far is printed and written",
    exit_code=130,
)
@pytest.mark.parametrize("name", ["dapple", "chimera", "wpipe"])
def test_an_interrupted_plan_of_a_paper_is_printed_and_written(tmp_path, record_property, name):
    path = tmp_path / "plan.json"
    model = UNTIED if name == "wpipe" else GPT  # which no layers may share a weight for
    arguments = ["plan", *model, "--pipeline", name, "--allow-stale", "--json", "-o", str(path)]
    # The plan itself is there, what it is compared with is not.
    ended = interrupted(("autoddl.pipelines.joint.planner:plan_rivals", 1), arguments)
    assert ended.code == 130, ended
    one_line(ended)
    assert json.loads(ended.out) == json.loads(path.read_text(encoding="utf-8"))
    check_plan(path)
    record_property("seconds", ended.seconds)


@pytest.mark.fault(
    "search",
    "Ctrl-C during `autoddl compare`",
    "the table has the baselines and the methods so far, and says which was interrupted and which did not begin",
    exit_code=130,
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_an_interrupted_comparison_has_what_is_known(record_property, form):
    methods = "exact,exhaustive,random"
    arguments = ["compare", *MLP, "--quiet", "--methods", methods, *(["--json"] if form == "json" else [])]
    # The second search is the exhaustive one: exact has settled its settings before.
    ended = interrupted(("autoddl.search.exhaustive:check_limits", 1), [*arguments, "--time-limit", "10000"])
    assert ended.code == 130, ended
    one_line(ended)
    if form == "json":
        document = json.loads(ended.out)
        rows = {row["name"]: row for row in document["rows"]}
        assert document["status"] == "interrupted" and set(rows) >= {"exact", "exhaustive", "random", "data parallel"}
        assert rows["exact"]["status"] == "optimal" and rows["exhaustive"]["status"] == "interrupted"
        assert rows["random"] == {"name": "random", "infeasible": "interrupted before a plan was found"}
    else:
        assert "random: interrupted before a plan was found" in ended.out and "proven optimal" in ended.out
        assert ", interrupted\n" in ended.out
    record_property("seconds", ended.seconds)


PLANNERS = {
    "dapple": ("autoddl.pipelines.planners.dapple:_ranked", 1),
    "chimera": ("autoddl.pipelines.planners.chimera:simulate", 2),
    "wpipe": ("autoddl.pipelines.planners.wpipe:simulate", 2),
}


@pytest.mark.fault(
    "search",
    "Ctrl-C during `autoddl pipeline`",
    "the best pipeline so far is printed, with the status `interrupted`",
    exit_code=130,
)
@pytest.mark.parametrize("name", PLANNERS)
def test_an_interrupted_pipeline_is_printed(record_property, name):
    arguments = ["pipeline", "--profile", "bert-48", "--cluster", "v100-a", "--batch", "64", "--planner", name]
    ended = interrupted(PLANNERS[name], arguments)
    assert ended.code == 130, ended
    one_line(ended)
    assert (
        ended.out.startswith(f"{name} plan ")
        and "  interrupted: the best of the plans that were simulated" in ended.out
    )
    record_property("seconds", ended.seconds)


def test_an_interrupted_pipeline_says_so_as_json_too():
    arguments = ["pipeline", "--profile", "bert-48", "--cluster", "v100-a", "--batch", "64", "--planner", "wpipe"]
    document = json.loads(interrupted(PLANNERS["wpipe"], [*arguments, "--json"]).out)
    assert document["status"] == "interrupted" and document["simulated_s"] > 0


@pytest.mark.fault(
    "search",
    "SIGTERM or SIGHUP while planning",
    "the same as Ctrl-C",
    exit_code="143, 129",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_scheduler_that_ends_the_command_gets_the_plan(tmp_path, record_property, number):
    path = tmp_path / "plan.json"
    ended = interrupted(WHOLE_SPACE, ["plan", *GPT, "--pipeline", "auto", "-o", str(path)], number)
    assert ended.code == 128 + number and f"Written to {path}" in ended.out
    one_line(ended)
    check_plan(path)
    record_property("seconds", ended.seconds)


@pytest.mark.fault(
    "search",
    "Ctrl-C before any plan is known",
    "one line says so; nothing is printed or written",
    exit_code=130,
)
@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        (("autoddl.search.planner:baseline_figures", 1), ["plan", *GPT, "-o", "plan.json"]),
        (("autoddl.pipelines.joint.planner:_trial", 1), ["plan", *GPT, "--pipeline", "auto", "-o", "plan.json"]),
        (("autoddl.pipelines.joint.planner:paper_plan", 1), ["plan", *GPT, "--pipeline", "chimera", "-o", "plan.json"]),
        (("autoddl.search.planner:baseline_figures", 1), ["compare", *GPT]),
        (
            ("autoddl.pipelines.planners.chimera:_configurations", 1),
            ["pipeline", "--profile", "bert-48", "--cluster", "v100-a", "--batch", "64", "--planner", "chimera"],
        ),
    ],
    ids=["plan", "joint", "paper", "compare", "pipeline"],
)
def test_an_interrupt_before_there_is_a_plan_is_one_line(tmp_path, record_property, place, arguments):
    ended = interrupted(place, arguments, cwd=tmp_path)
    assert (ended.code, ended.out) == (130, "")
    assert one_line(ended) == "autoddl: interrupted before a plan was found\n"
    assert list(tmp_path.iterdir()) == []
    record_property("seconds", ended.seconds)


@pytest.mark.fault(
    "search",
    "a second Ctrl-C while the plan so far is being finished",
    "the command ends at once with one line",
    exit_code=130,
)
def test_the_second_interrupt_ends_it_at_once(tmp_path, record_property):
    path = tmp_path / "plan.json"
    ended = interrupted(("autoddl.search.planner:verify", 1), ["plan", *GPT, "-o", str(path)], twice=True)
    assert (ended.code, ended.out, ended.err) == (130, "", "autoddl: interrupted\n")
    assert not path.exists()
    record_property("seconds", ended.seconds)
