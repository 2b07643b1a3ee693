"""Exported OneFlow files of pipelines: they pass the linter, import nothing of AutoDDL, and their instructions have no deadlock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.export import export
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.schedule import Kind, parse_task
from autoddl.planfile import PlanFile, unpipelined_plan

from .export_plans import staged_plan


def instructions_of(text: str) -> list[list[str]]:
    """Return the instructions of each worker."""
    (found,) = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INSTRUCTIONS"
    ]
    return [words.split() for words in ast.literal_eval(found)]


def check_instructions(plan: PlanFile, programs: list[list[str]]) -> None:
    """Check that instructions run to the end, that each task runs after those that it needs, and that all tasks run once.

    Messages block both workers, sums of gradients block all workers that take part.
    """
    schedule = plan.evaluation.schedule
    holders = [{replica.worker for replica in schedule.replicas_of(s)} for s in range(schedule.num_stages)]
    waiting, done, received = [list(words) for words in programs], set(), [set() for _ in programs]

    def partners(worker: int, word: str) -> list[tuple[int, str]]:
        if match := re.fullmatch(r"(.+)([<>])(\d+)", word):
            return [(int(match[3]), f"{match[1]}{'><'['><'.index(match[2]) - 1]}{worker}")]
        if re.fullmatch(r"V\d+", word):
            return [(other, word) for other in range(len(waiting)) if other != worker]
        if match := re.fullmatch(r"([\d&]+)A\d+", word):
            held = set().union(*(holders[int(stage)] for stage in match[1].split("&")))
            return [(other, word) for other in held - {worker}]
        return []

    while any(waiting):
        heads = [(worker, words[0]) for worker, words in enumerate(waiting) if words]
        ready = [
            (worker, word)
            for worker, word in heads
            if all(waiting[other][:1] == [theirs] for other, theirs in partners(worker, word))
        ]
        assert ready, f"deadlock: {heads}"
        for worker, word in ready:
            if ">" in word:
                assert word.partition(">")[0] in done
            elif "<" in word:
                received[worker].add(word.partition("<")[0])
            elif word[0] == "V":  # all workers decide together, before any of them updates
                assert not any("U" in other for other in done)
            elif word[-2:] and "A" not in word:
                task = parse_task(word)
                neighbour = task._replace(stage=task.stage + (-1 if task.kind is Kind.FORWARD else 1))
                if schedule.source_of(task) is not None:
                    assert str(neighbour) in (done if schedule.source_of(task) == worker else received[worker]), word
                done.add(word)
            waiting[worker].pop(0)
    all_tasks = {str(task) for _, _, task in schedule.tasks() if task.kind is not Kind.ALL_REDUCE}
    assert done == all_tasks


@pytest.mark.parametrize("model", ["gpt", pytest.param("gpt3-13b", marks=pytest.mark.slow)])
def test_a_pipeline_is_clean_and_its_instructions_get_through(tmp_path, model):
    """A small plan with both directions, and a large plan."""
    if model == "gpt":
        both = replace(PipelineSchedule("chimera", 2, 4), num_pipelines=2)
        plan = staged_plan([(0, 2, "layers"), (2, 4, "stage")], 2, schedule=both)
    else:
        plan = staged_plan([(10 * s, 10 * s + 10, "none") for s in range(4)], 4, model, nodes=4, num=32)
    text = export(plan, "oneflow")
    path = tmp_path / "model.py"
    path.write_text(text)
    compile(text, str(path), "exec")
    assert re.findall(r"^class (Stage\d+)", text, re.M) == [f"Stage{s}" for s in range(plan.num_stages)]
    tree = ast.parse(text)
    modules = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "autoddl" not in modules
    check_instructions(plan, instructions_of(text))
    assert text.count('SharedWeight("wte.weight"') == 1
    for boundary in plan.evaluation.boundaries:
        assert f"{format_bytes(boundary.nbytes)}, forward {format_seconds(boundary.forward_s)}" in text
    if model == "gpt3-13b":  # blocks with the same text share a class in all stages
        assert len(re.findall(r"^class Block", text, re.M)) <= 2 and text.count('Block(f"h.{i}", placement)') == 4
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed beside this Python")
    done = subprocess.run([ruff, "check", "--isolated", "--no-cache", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_a_pipeline_of_one_stage_is_a_plan_without_one(recompute):
    staged = staged_plan([(0, 4, recompute)], 4)
    workload = replace(staged.workload, recompute=recompute)
    alone = unpipelined_plan(staged.graph, staged.cluster, workload, staged.strategies)
    found, expected = (export(plan, "oneflow") for plan in (staged, replace(alone, document=staged.document)))
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(expected))
    with pytest.raises(UserError, match="recomputes its stage as a whole"):
        export(staged_plan([(0, 4, "stage")], 4), "oneflow")


@pytest.mark.parametrize(("family", "samples"), [("bert", "masked_bytes"), ("gpt", "following_bytes")])
def test_a_model_learns_the_same_with_and_without_a_pipeline(family, samples):
    """Both files have the same function for data, which draws the samples that `autoddl train` draws."""
    texts = [
        export(staged_plan(cuts, 4 // len(cuts), f"{family}:4x512"), "oneflow")
        for cuts in ([(0, 4, "none")], [(0, 2, "none"), (2, 4, "none")])
    ]
    functions = [ast.get_source_segment(text, definitions_of(text)["batch"]) for text in texts]
    assert functions[0] == functions[1]
    assert f"return {samples}(" in functions[0] and all(f"def {samples}(" in text for text in texts)


def definitions_of(text: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file by name."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_the_library_of_a_pipeline_is_the_runtimes_own_text(pipeline_plan):
    """The file contains the source of the engine, of its computations, of gradient sums and of the reader of instructions."""
    _, _, library = export(pipeline_plan, "oneflow").partition("# ==== The library")
    for module, name in (
        ("engine", "_Engine"),
        ("work", "ModelWork"),
        ("passes", "StagePasses"),
        ("transport", "Transport"),
        ("gradients", "GradientSums"),
        ("words", "WorkerWords"),
        ("actions", "Program"),
    ):
        spec = find_spec(f"autoddl.pipelines.runtime.pipeline.{module}")  # importing some of them takes OneFlow
        text = Path(spec.origin).read_text()
        (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
        assert ast.get_source_segment(text, node) in library, name
    assert "class Work(" not in library and "\nWork = Any\n" in library  # interfaces are for type checkers
    assert "class CompressingTransport" not in library
