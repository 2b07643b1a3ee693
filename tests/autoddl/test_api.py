"""The Python interface: what `autoddl` offers, that its doctests run, and that it says the same as the command line."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

import autoddl
from autoddl.__main__ import main
from autoddl.launching.joining import SharedError
from autoddl.launching.slurm import StepError
from autoddl.pipelines.runtime.load import is_available

from . import doctests
from .sample_plans import pipeline_plan, written

#: Names whose doctests start ranks, or import OneFlow, which no process of the tests should hold.
WITH_ONEFLOW = ("Plan", "Ranking", "apply", "calibrate", "load_oneflow", "rank", "train")
FUNCTIONS = [name for name in autoddl.__all__ if inspect.isfunction(getattr(autoddl, name))]
CLASSES = [name for name in autoddl.__all__ if inspect.isclass(getattr(autoddl, name))]
SMALL = {"cluster": "gcp-a100", "nodes": 2, "devices_per_node": 2, "batch": 16, "quiet": True}
SMALL_WORDS = ["--cluster", "gcp-a100", "--nodes", "2", "--devices-per-node", "2", "--batch", "16", "--quiet"]
SIZES = {"heads": 4, "sequence": 32, "vocabulary": 256}
SIZES_WORDS = ["--heads", "4", "--sequence", "32", "--vocabulary", "256"]


@pytest.fixture(scope="module")
def small() -> autoddl.Plan:
    return autoddl.plan("gpt:2x64", **SMALL, **SIZES)


@pytest.fixture(scope="module")
def joint() -> autoddl.Plan:
    options = dict(batch=8, sequence=128, vocabulary=1024, pipeline="auto", quiet=True)
    return autoddl.plan("gpt:4x256", cluster="v100-c", nodes=2, **options)


# ---- Names -------------------------------------------------------------------------------------------------------------


def test_every_name_is_there_and_no_module_hides_it():
    assert set(autoddl.__all__) <= set(dir(autoddl)) and len(set(autoddl.__all__)) == len(autoddl.__all__)
    assert set(FUNCTIONS) >= {
        "plan",
        "load",
        "compare",
        "schedule",
        "extract",
        "fit",
        "calibrate",
        "launch",
        "models",
        "price",
    }
    modules = {module.name for module in pkgutil.iter_modules(autoddl.__path__)}
    assert not modules & set(autoddl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'paln'"):
        autoddl.paln  # noqa: B018


def test_importing_it_imports_nothing():
    listed = "sorted(name for name in sys.modules if name.startswith('autoddl.'))"
    code = f"import sys, autoddl; print(*{listed}, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False"]


def test_version(capsys):
    assert autoddl.__version__ == importlib.metadata.version("autoddl")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"autoddl {autoddl.__version__}\n"


# ---- Doctests ----------------------------------------------------------------------------------------------------------


def test_every_function_has_a_doctest():
    assert [name for name in FUNCTIONS if not doctests.examples_of(name)] == []


@pytest.mark.parametrize(
    "name", [name for name in CLASSES if getattr(autoddl, name).__module__.startswith("autoddl.api.")]
)
def test_every_method_of_a_result_has_a_doctest(name):
    """Properties and inherited methods need none."""
    members = vars(getattr(autoddl, name)).items()
    kinds = (FunctionType, classmethod, staticmethod)
    methods = {key for key, value in members if isinstance(value, kinds) and not key.startswith("_")}
    tested = {test.name for test in doctests.examples_of(name)}
    assert {f"{name}.{method}" for method in methods} - tested == set()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS + CLASSES if name not in WITH_ONEFLOW])
def test_doctests(name):
    """Over 10 s on a busy machine: that of `plan` searches pipelines."""
    assert doctests.failures_of(name) == ""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ONEFLOW)
def test_doctests_that_run_on_oneflow(name, tmp_path):
    """Over 10 s on a busy machine: a process that starts ranks of its own."""
    if not (available := is_available()):
        pytest.skip(available.reason)
    script = Path(doctests.__file__)
    done = subprocess.run([sys.executable, script, name], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Options that functions share ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan", "compare", "price", "launch", "train"])
def test_options_are_in_the_signature_and_in_the_docstring(name):
    """Each of them, with its default; one that is unknown is refused by a name that is like it."""
    function = getattr(autoddl, name)
    parameters = inspect.signature(function).parameters.values()
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters)
    documented = {word for line in function.__doc__.splitlines() for word in line.partition(":")[0].strip().split(", ")}
    assert {each.name for each in parameters} <= documented and "options" not in documented
    last = list(parameters)[-1].name
    with pytest.raises(TypeError, match=rf"{name}\(\) got .* '{last}x'; did you mean '{last}'\?"):
        function("plan.json", **{f"{last}x": 1})


def test_shared_options_have_the_planners_defaults():
    parameters = inspect.signature(autoddl.plan).parameters
    assert (parameters["optimizer"].default, parameters["summa"].default) == ("adam", True)
    assert (parameters["quiet"].default, parameters["nodes"].default, parameters["stop"].default) == (False, None, None)


# ---- The same as the command line --------------------------------------------------------------------------------------


def test_a_plan_is_the_one_of_the_command(small, capsys, tmp_path):
    assert main(["plan", "gpt:2x64", *SIZES_WORDS, *SMALL_WORDS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    timed = ("search_s", "hashes", "content_hash")
    assert {k: v for k, v in document.items() if k not in timed} == json.loads(
        json.dumps({k: v for k, v in small.document.items() if k not in timed})
    )
    assert main(["plan", "gpt:2x64", *SIZES_WORDS, *SMALL_WORDS]) == 0
    assert str(small).split("Certificate")[0] == capsys.readouterr().out.split("Certificate")[0]


def test_explain_diff_report_and_export_are_those_of_the_commands(small, capsys, tmp_path):
    other = autoddl.plan("gpt:2x64", **{**SMALL, "batch": 32}, **SIZES)
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    small.save(one)
    other.save(two)

    def said(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    assert said("explain", one) == f"{small.explain()}\n"
    assert json.loads(said("explain", one, "--json")) == json.loads(json.dumps(small.explain().document))
    assert said("diff", one, two) == f"{autoddl.load(one).diff(autoddl.load(two))}\n"
    assert said("export", one, "--to", "graphml") == small.export(form="graphml")
    said("report", one, "-o", str(tmp_path / "command.html"))
    page = small.report(tmp_path / "function.html")
    assert page == (tmp_path / "command.html").read_text() == (tmp_path / "function.html").read_text()


def test_comparison(capsys):
    wishes = {"cluster": "local-cpu", "batch": 16, "quiet": True}
    found = autoddl.compare("mlp:64,32,16", methods=["exact", "random"], **wishes)
    words = [
        "compare",
        "mlp:64,32,16",
        "--cluster",
        "local-cpu",
        "--batch",
        "16",
        "--quiet",
        "--methods",
        "exact,random",
    ]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    timed = [{k: v for k, v in row.items() if k != "search_s"} for row in document["rows"]]
    assert timed == [{k: v for k, v in row.items() if k != "search_s"} for row in found.rows]
    assert document["lower_bound_s"] == found.lower_bound_s and "proven optimal" in str(found)
    assert list(found.to_frame()["name"]) == [row["name"] for row in found.rows]
    with pytest.raises(KeyError):
        found["magic"]
    assert {row["name"] for row in autoddl.compare("mlp:64,32,16", **wishes).rows} > {"exhaustive"}


def test_schedules(capsys, tmp_path):
    run = autoddl.schedule("1f1b", stages=3, micro_batches=4, policy="B").simulate(backward=1)
    assert main(["schedule", "1f1b", "--stages", "3", "--micro-batches", "4", "--policy", "B", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == run.document
    path = tmp_path / "schedule.csv"
    path.write_text(run.schedule.to_csv())
    assert autoddl.schedule(str(path)).workers == run.schedule.workers
    assert run.to_svg(tmp_path / "run.svg") == (tmp_path / "run.svg").read_text()
    assert "<svg" in run._repr_html_() and json.loads(run.to_trace())
    with pytest.raises(autoddl.UserError, match="micro_batches is missing"):
        autoddl.schedule("1f1b", stages=2)


# ---- Plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["small", "joint"])
def test_a_plan_shows_itself_in_a_line_a_page_and_tables(which, request, tmp_path):
    """Over 10 s on a busy machine: the second one is a search of pipelines."""
    plan = request.getfixturevalue(which)
    plan.save(tmp_path / "plan.json")
    loaded = autoddl.load(tmp_path / "plan.json")
    assert repr(plan) == repr(loaded) and len(repr(plan)) < 200 and "\n" not in repr(plan)
    assert plan == loaded and plan.layers == loaded.layers and plan.stages == loaded.stages
    assert loaded.search is None and plan.search is not None
    for text in (str(plan), str(loaded), plan._repr_html_()):
        assert "h.*.mlp.c_fc" in text and "megatron" in text.lower()
    assert plan._repr_html_() == loaded._repr_html_()
    assert len(repr(plan.graph)) < 200


def test_figures_of_layers_and_stages_add_up(small, joint):
    assert sum(layer.compute_s for layer in small.layers) == pytest.approx(small.compute_s)
    assert sum(layer.communication_s for layer in small.layers) == pytest.approx(small.communication_s)
    (stage,) = small.stages
    passes = (
        small.workload.num_micro_batches * (stage.forward_s + stage.backward_s) + stage.all_reduce_s + stage.update_s
    )
    assert passes == pytest.approx(small.step_s)
    assert small.gap == 0 and small.lower_bound_s == pytest.approx(small.step_s)
    assert small.samples_per_s == pytest.approx(16 / small.step_s)
    assert [name for one in joint.stages for name in one.layers] == [layer.name for layer in joint.layers]
    assert joint.num_stages == len(joint.stages) == 2 and {layer.stage for layer in joint.layers} == {0, 1}
    assert max(one.memory_bytes for one in joint.stages) == joint.memory_bytes


def test_a_timeline_without_a_pipeline(small):
    """It takes the step; there is none for millions of micro-batches, which would take gigabytes."""
    assert small.timeline.makespan == pytest.approx(small.step_s)
    assert small.timeline.schedule.num_micro_batches == small.workload.num_micro_batches
    long = {"cluster": "local-cpu", "devices_per_node": 1, "micro_batch": 1, "quiet": True}
    assert autoddl.plan("mlp:64,64", batch=2**17 + 1, **long).timeline is None


def test_alternatives_by_group_and_by_layer(small):
    group = small.alternatives("h.*.mlp.c_fc", count=2)
    assert group == small.alternatives("h.1.mlp.c_fc", count=2) and len(group) == 2
    assert 0 <= group[0].regret_s <= group[1].regret_s
    with pytest.raises(autoddl.UserError, match=r"has no layer 'h\.9'"):
        small.alternatives("h.9")


def test_frames(small):
    frame = small.to_frame()
    assert list(frame.columns) == list(autoddl.PlannedLayer.columns())
    assert list(frame["name"]) == [layer.name for layer in small.layers]
    assert np.isclose(frame["compute_s"].sum(), small.compute_s)


def test_frames_without_pandas(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(autoddl.MissingPackageError, match="pip install pandas; or use layers") as error:
        small.to_frame()
    assert isinstance(error.value, ImportError) and isinstance(error.value, autoddl.UserError)


def test_a_pipeline_has_the_same_face(tmp_path):
    path = written(tmp_path / "plan.json", pipeline_plan())
    plan = autoddl.load(path)
    assert plan.num_stages == 2 and plan.optimal is False and plan.gap == pytest.approx(0.1)
    assert plan.explain(count=0).choices and plan.diff(plan).is_empty
    assert plan.report(count=0).startswith("<!DOCTYPE html>")
    assert json.loads(plan.export(tmp_path / "again.json")) == plan.document
    assert plan.export(form="chrome-trace").startswith("{")


@pytest.mark.parametrize(
    ("suffix", "beginning"), [("dot", "digraph"), ("graphml", "<?xml"), ("py", '"""'), ("json", "{")]
)
def test_the_suffix_says_the_form(small, tmp_path, suffix, beginning):
    path = tmp_path / f"plan.{suffix}"
    assert small.export(path) == path.read_text() and path.read_text().startswith(beginning)


def test_edited_plans_say_so(small, tmp_path):
    document = json.loads(json.dumps(small.document))
    document["step_s"] *= 2
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(autoddl.UserError, match="step_s was edited"):
        autoddl.load(tmp_path / "plan.json")
    plan = autoddl.load(tmp_path / "plan.json", edited=True)
    assert plan.step_s == small.step_s and plan.optimal is False and plan.gap is None and plan.lower_bound_s is None
    assert "not claimed" in repr(plan)


# ---- What users get wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"model": "gpt2-xll"}, "model 'gpt2-xll' is unknown; did you mean 'gpt2-xl'?"),
        ({"model": "gtp:2x64"}, "did you mean 'gpt:2x64'?"),
        ({"cluster": "dgx-a10"}, "did you mean 'dgx-a100'?"),
        ({"method": "exat"}, "method 'exat' is unknown; did you mean 'exact'?"),
        ({"objective": "time"}, "objective 'time' is unknown; known are step, communication"),
        ({"optimizer": "adamw"}, "optimizer 'adamw' is unknown; did you mean 'adam'?"),
        ({"precision": "half"}, "precision"),
        ({"pipeline": "atuo"}, "pipeline 'atuo' is not one of auto"),
        ({"allow_stale": True}, "allow_stale is for pipelines"),
        ({"temperature_s": 1.0}, "temperature_s is for method='metropolis-hastings'; exact has none"),
        ({"batch": 0}, "batch 0 should be at least 1"),
        ({"memory_limit_bytes": 1000.0}, "the smallest memory that would do is"),
        ({"model": object()}, "model is a object, should be a name"),
        ({"inputs": [1]}, "inputs are for modules"),
        ({"heads": 7}, "does not divide into 7 heads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(wishes, message):
    with pytest.raises(autoddl.UserError) as error:
        autoddl.plan(**{"model": "gpt2", "cluster": "dgx-a100", "nodes": 1, "quiet": True, **wishes})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_objects_in_place_of_names(small):
    graph = autoddl.models()[0].graph
    cluster = next(cluster for cluster in autoddl.clusters() if cluster.name == "dgx-a100")
    plan = autoddl.plan(graph, cluster=cluster, nodes=1, batch=16)
    named = autoddl.plan("gpt2", cluster="dgx-a100", nodes=1, batch=16)
    assert (plan.strategies, plan.step_s) == (named.strategies, named.step_s)
    relinked = cluster.with_links(latency_s=1e-6)
    assert autoddl.plan(graph, cluster=relinked, batch=64).cluster.links == relinked.links
    with pytest.raises(autoddl.UserError, match=r"links of .* were changed"):
        autoddl.plan(graph, cluster=relinked, nodes=1)
    with pytest.raises(autoddl.UserError, match="heads 4 is for built-in transformers"):
        autoddl.plan(graph, cluster=cluster, heads=4)


def test_a_stop_ends_a_search():
    stop = autoddl.Stop()
    stop.request()
    with pytest.raises(autoddl.StopRequestedError):
        autoddl.plan("mlp:64,64", cluster="local-cpu", batch=8, stop=stop)


# ---- Launching ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks("launches")
def test_launch_runs_a_script_on_all_ranks(tmp_path, outside_of_jobs):
    plan = autoddl.plan("mlp:64,64", cluster="local-cpu", devices_per_node=2, batch=8, quiet=True)
    plan.save("plan.json")
    Path("script.py").write_text(
        "import sys, autoddl\n"
        "job = autoddl.launched()\n"
        "print(f'{job.rank} of {job.num_ranks}, {job.load_plan().graph.name}, {sys.argv[1:]}', flush=True)\n"
    )
    lines: list[str] = []
    text = autoddl.launch("plan.json", "script.py", ["--steps", "3"], with_oneflow=False, show=lines.append)
    assert sorted(lines) == [f"[rank {rank}] {rank} of 2, mlp:64,64, ['--steps', '3']" for rank in range(2)]
    assert text.startswith("2 ranks of ")
    assert {path.name for path in (tmp_path / "autoddl-logs").glob("*/*")} >= {"rank0.log", "rank1.log"}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"script": "missing.py"}, "script missing.py does not exist"),
        ({"max_restarts": -1}, "max_restarts is -1, should be from 0"),
        ({"grace_s": 0.0}, "grace is 0, should be more than 0"),
        ({"ssh": ""}, "ssh is empty, should be a command"),
        ({"hosts": ["a", "b", "c"]}, "the plan is for 1 node of 2 devices, found 3 nodes: a, b, c"),
        ({"hosts": ["a"], "slurm": True}, "hosts and slurm exclude each other"),
        ({"slurm_options": ["--time=5"]}, "slurm_options is for slurm=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_launched(outside_of_jobs, wishes, message):
    autoddl.plan("mlp:64,64", cluster="local-cpu", devices_per_node=2, batch=8, quiet=True).save("plan.json")
    Path("script.py").write_text("")
    with pytest.raises(autoddl.UserError, match=message):
        autoddl.launch(**{"plan": "plan.json", "script": "script.py", "dry_run": True, **wishes})


def test_launch_in_jobs_of_other_launchers(outside_of_jobs, monkeypatch):
    """As a rank, and in an allocation of Slurm; `local` ignores both."""
    autoddl.plan("mlp:64,64", cluster="local-cpu", devices_per_node=2, batch=8, quiet=True).save("plan.json")
    Path("script.py").write_text("")
    wishes = {"plan": "plan.json", "script": "script.py", "dry_run": True}
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert autoddl.launch(**wishes).startswith("srun --nodes=1 --ntasks=2 ")
    monkeypatch.setenv("PATH", str(Path.cwd()))
    Path("srun").write_text("#!/bin/sh\nexit 3\n")
    Path("srun").chmod(0o755)
    with pytest.raises(StepError, match="the step of Slurm ended with code 1"):
        autoddl.launch(**{**wishes, "dry_run": False})
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert autoddl.launch(**wishes) == ""  # rank 0 describes the job
    assert autoddl.launch(**wishes, local=True).startswith("2 ranks of ")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "ranks 0" in autoddl.launch(**wishes)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SharedError, match="the plan is for 2 ranks, the environment started 4"):
        autoddl.launch(**wishes)
