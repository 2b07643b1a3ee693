"""Exported pipelines on real ranks: the losses, values and bytes of the same plan run by the runtime, and of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.costmodel.strategy import Choices
from autoddl.export.oneflow import oneflow_text
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.meshes import Division, StageMesh
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.runtime.load import is_available
from autoddl.planfile import PlanFile
from autoddl.zoo.builtin import BuiltIn, MLPSizes

from .pipeline_plans import pipelined
from .sent_bytes import Sent, check_sent
from .test_exported import BERT, DIVIDED, GPT, LLAMA, MODELS, extracted, run_script

JOBS = Path(__file__).with_name("exported_pipeline_jobs.py")
PAIR = StageMesh(1, 2)
#: Optimizer states are divided (ZeRO 1), of whatever has copies.
STATES = Choices((1,))
MLP = BuiltIn("mlp", MLPSizes((64, 128, 96, 64, 32)))


def gpt(**changes: Any) -> BuiltIn:
    return BuiltIn("gpt", replace(GPT, **changes))


def bert(layers: int) -> BuiltIn:
    return BuiltIn("bert", replace(BERT, layers=layers))


def llama(layers: int) -> BuiltIn:
    return BuiltIn("llama", replace(LLAMA, layers=layers))


def schedule(name: str, num: int, num_workers: int = 2, **options: Any) -> PipelineSchedule:
    return PipelineSchedule(name, num_workers, num, tuple(options.items()))


def chimera(num: int, **options: Any) -> PipelineSchedule:
    return replace(schedule("chimera", num, **options), num_pipelines=2)


#: The model, and its plan: tied weights between stages, splits inside them, unequal stages and workers, recomputation.
SYNCHRONOUS: dict[str, tuple[BuiltIn, Callable[[BuiltIn], PlanFile]]] = {
    "1f1b": (gpt(), lambda m: pipelined(m, schedule("1f1b", 2, policy="A"), (1, 1), PAIR)),
    "1f1b, 1 and 3 ranks": (
        MLP,
        lambda m: pipelined(
            m, schedule("1f1b", 2, policy="A"), (1, 3), Division((StageMesh(1, 1), StageMesh(1, 3))), micro_batch=6
        ),
    ),
    # In the second stage p0 goes from 1 to 3 and back, by exchanges of unequal pieces.
    "1f1b, 2 and 6 ranks": (
        BuiltIn("mlp", MLPSizes((48, 96, 144, 96, 24))),
        lambda m: pipelined(
            m,
            schedule("1f1b", 2, policy="A"),
            (1, 3),
            Division((StageMesh(1, 2), StageMesh(1, 6))),
            micro_batch=12,
            shape=(1, 8),
            seed=44,
        ),
    ),
    "chimera": (bert(2), lambda m: pipelined(m, chimera(2), (1, 1), PAIR, recompute=("layers", "none"))),
    "1f1b, blocks": (
        gpt(layers=4),
        lambda m: pipelined(m, schedule("1f1b", 2, policy="A"), (2, 2), PAIR, recompute=("blocks:1", "layers")),
    ),
    "zero-bubble, blocks": (
        gpt(layers=4),
        lambda m: pipelined(m, schedule("zero-bubble", 4, policy="H1"), (2, 2), PAIR, recompute=("blocks", "blocks")),
    ),
    "zero-bubble": (MLP, lambda m: pipelined(m, schedule("zero-bubble", 4, policy="H1"), (2, 2), PAIR)),
    "interleaved": (
        MLP,
        lambda m: pipelined(
            m, replace(schedule("interleaved-1f1b", 4, groups=2), groups=2), (1, 1, 1, 1), StageMesh(2, 1), shape=(2, 2)
        ),
    ),
    "1f1b, divided": (
        gpt(layers=4),
        lambda m: pipelined(
            m,
            schedule("1f1b", 2, policy="A"),
            (2, 2),
            PAIR,
            recompute=("blocks:1", "none"),
            choices=DIVIDED,
            seed=5,
        ),
    ),
    # Stages divide the states of the weight that they share.
    "1f1b, shared": (gpt(), lambda m: pipelined(m, schedule("1f1b", 2, policy="A"), (1, 1), PAIR, choices=STATES)),
    "chimera, shared": (gpt(), lambda m: pipelined(m, chimera(2), (1, 1), PAIR, choices=STATES)),
    "chimera, divided": (llama(2), lambda m: pipelined(m, chimera(2), (1, 1), PAIR, choices=DIVIDED, seed=6)),
    # Passes of several micro-batches at once, or of halves.
    "chimera, pairs": (
        llama(2),
        lambda m: pipelined(m, chimera(4, concatenation="doubling"), (1, 1), PAIR, recompute=("stage", "layers")),
    ),
    "chimera, halves": (
        MLP,
        lambda m: pipelined(m, chimera(2, concatenation="halving"), (2, 2), PAIR, micro_batch=8),
    ),
}
STALE: dict[str, tuple[BuiltIn, Callable[[BuiltIn], PlanFile]]] = {
    "wpipe": (
        MLP,
        lambda m: pipelined(m, replace(schedule("wpipe", 2), groups=2, synchronous=False), (1, 1, 1, 1), PAIR),
    ),
    # A block that is run again needs the weights of its forward pass, not the newest.
    "pipedream, blocks": (
        gpt(layers=2, tied=False),
        lambda m: pipelined(
            m, replace(schedule("pipedream", 2), synchronous=False), (1, 1), PAIR, recompute=("blocks", "blocks")
        ),
    ),
    "pipedream": (
        MLP,
        lambda m: pipelined(m, replace(schedule("pipedream", 4, 4), synchronous=False), (1, 1, 1, 1), StageMesh(1, 1)),
    ),
}
#: Of those that communicate much a run is enough.
ONE_RUN = ("1f1b", "1f1b, blocks", "1f1b, divided", "chimera", "chimera, pairs", "pipedream, blocks", "wpipe")


def exported(plan: PlanFile, folder: Path) -> str:
    path = folder / "exported.py"
    path.write_text(oneflow_text(plan))
    return str(path)


def check_against_runtime(plan: PlanFile, results: list[dict[str, Any]]) -> None:
    """Losses of all updates, and final values."""
    period = plan.evaluation.schedule.update_period
    for run in range(len(results[0]["losses"][1])):
        by_micro_batch = sum(np.array(found["losses"][0][run]) for found in results)
        expected = by_micro_batch.reshape(-1, period).mean(axis=1)
        for found in results:
            assert found["losses"][1][run] == pytest.approx(expected, rel=1e-6)
    for found in results:
        assert not found["names"]
        assert max(found["errors"].values()) < 1e-5, max(found["errors"].items(), key=lambda item: item[1])


def check_bytes_of_a_run(pool: Any, arguments: tuple[Any, ...], results: list[dict[str, Any]]) -> None:
    """The file's steps send what the runtime's do; what else is sent meanwhile only adds to a run's.

    A file's run, and not the runtime's, ends with an all-reduce of two float32 per update (`Pipeline.run`): in a ring of R ranks
    each of the at most R parts that are not empty is sent 2 (R - 1) times.
    """
    num_values = 2 * arguments[1].evaluation.schedule.num_updates
    num_hops = 2 * (len(results) - 1)
    num_messages = num_hops * min(len(results), num_values)

    def sent_by(results: list[dict[str, Any]]) -> list[Sent]:
        theirs, mine = map(min, results[0]["bytes"])
        assert theirs > 0
        predicted = theirs + num_hops * num_values * 4
        return [Sent("a run", mine, predicted, num_messages, num_readings=2)]  # the prediction is a count as well

    check_sent(len(results), sent_by(results), lambda: sent_by(pool.run(f"{JOBS}:train_both", *arguments)))


def check_against_one_device(results: list[dict[str, Any]], losses: list[float], values: dict[str, np.ndarray]) -> None:
    found = results[0]["losses"][1]
    assert [loss for (loss,) in found] == pytest.approx(losses, rel=1e-6)
    assert len(set(losses)) == len(losses)  # it learns
    seen = set()
    for of_rank in results:
        for name, value in of_rank["values"].items():
            assert np.linalg.norm(value - values[name]) <= 1e-5 * np.linalg.norm(values[name]) + 1e-6, name
            seen.add(name)
    assert seen == set(values)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_losses_values_and_bytes_are_those_of_the_plan_and_of_one_device(counted_ranks, tmp_path, name):
    """Eight ranks, which two and six make, take turns on a machine of few cores: that takes 10 s."""
    built_in, make = SYNCHRONOUS[name]
    plan, num_runs = make(built_in), 1 if name in ONE_RUN else 2
    num_ranks = plan.cluster.num_devices
    pool = counted_ranks(num_ranks)
    assert ("exchange(x, " in oneflow_text(plan)) == (name == "1f1b, 2 and 6 ranks")
    arguments = built_in, plan, exported(plan, tmp_path), num_runs
    results = pool.run(f"{JOBS}:train_both", *arguments)
    losses, values = pool.run(f"{JOBS}:train_alone", built_in, plan, num_runs)[0]
    check_against_one_device(results, losses, values)
    check_against_runtime(plan, results)
    check_bytes_of_a_run(pool, arguments, results)


@pytest.mark.parametrize("name", STALE)
def test_delayed_weights_are_those_of_the_runtime(counted_ranks, tmp_path, name):
    """Four ranks run many small steps of both, and take turns on a machine of few cores: that takes 10 to 20 s."""
    built_in, make = STALE[name]
    plan = make(built_in)
    text = oneflow_text(plan)
    assert "K" in text.split("INSTRUCTIONS = [")[1].split("\n]\n")[0]  # some version is kept
    pool, arguments = counted_ranks(4), (built_in, plan, exported(plan, tmp_path), 1 if name in ONE_RUN else 2)
    results = pool.run(f"{JOBS}:train_both", *arguments)
    check_against_runtime(plan, results)
    check_bytes_of_a_run(pool, arguments, results)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("transformer", ()), ("pictures", ()), ("noisy", ("layers", "none")), ("noisy", ("blocks", "stage"))],
)
def test_a_users_model_is_trained_in_stages(ranks, tmp_path, name, recompute):
    """Norms with an eps of their own, a frozen bias, random numbers, and the model's own initial values."""
    graph = extracted(name)[name]
    count = chain_of(graph).num_units
    plan = pipelined(
        graph, schedule("1f1b", 2, policy="A"), (count // 2, count - count // 2), PAIR, recompute=recompute
    )
    path = tmp_path / "exported.py"
    path.write_text(oneflow_text(plan, f"{MODELS}:{name}"))
    results = ranks(4).run(f"{JOBS}:train_users_stages", f"{MODELS}:{name}", plan, str(path))
    of_runtime = sum(found["of_runtime"] for found in results)
    for found in results:
        assert found["losses"] == [pytest.approx(found["of_plain"], rel=1e-5)]
        assert found["losses"] == [pytest.approx(of_runtime, rel=1e-5)]
        assert found["errors"] and max(found["errors"].values()) < 1e-5 and not found["names"]


def test_users_models_that_compute_something_else_are_noticed(ranks, tmp_path):
    """The plan does not know of other scores, which show in the first loss."""
    plan = pipelined(
        extracted("trained")["trained"], schedule("1f1b", 2, policy="A"), (1, 1), StageMesh(1, 1), shape=(1, 2)
    )
    path = tmp_path / "exported.py"
    path.write_text(oneflow_text(plan, f"{MODELS}:scaled"))
    (_, error), (_, other) = ranks(2).run(f"{JOBS}:run_as_script", str(path), ("--steps", "1"))
    assert ": they differ" in error + other


def test_a_file_of_a_model_with_random_numbers_checks_its_first_loss(ranks, tmp_path):
    """Before it trains, as a script: the plain model draws the numbers of the pipeline."""
    graph = extracted("noisy")["noisy"]
    plan = pipelined(graph, schedule("1f1b", 2, policy="A"), (1, 1), StageMesh(1, 1), shape=(1, 2))
    path = tmp_path / "exported.py"
    path.write_text(oneflow_text(plan, f"{MODELS}:noisy"))
    (output, error), (other, other_error) = ranks(2).run(f"{JOBS}:run_as_script", str(path), ("--steps", "2"))
    assert len(set(losses_in(output + other))) == 2 and not error + other_error
    path.write_text(path.read_text().replace("PASSES.step = self.first_slot + slot + 1", "PASSES.step = slot + 2"))
    (_, error), (_, other_error) = ranks(2).run(f"{JOBS}:run_as_script", str(path), ("--steps", "2"))
    assert ": they differ" in error + other_error


def script_plan() -> PlanFile:
    return pipelined(MLP, schedule("1f1b", 2, policy="A"), (2, 2), StageMesh(1, 1), shape=(1, 2))


@pytest.mark.ranks
def test_a_pipeline_is_a_script_that_trains_and_saves(tmp_path):
    """And ends at once where a rank fails, in saving here: the other one would wait for it."""
    if not (available := is_available()):
        pytest.skip(available.reason)
    path = Path(exported(script_plan(), tmp_path))
    done = run_script(path, 2, "--steps", "4", "--save", str(tmp_path / "state"))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    losses = losses_in(done[0].stdout)
    assert len(losses) == 4 and len(set(losses)) == 4 and done[1].stdout == ""
    shapes = {}
    for stage in (0, 1):
        with np.load(tmp_path / f"state.stage{stage}.npz") as saved:
            shapes.update({name: saved[name].shape for name in saved.files})
    assert shapes == {
        "fc1.weight": (128, 64),
        "fc2.weight": (96, 128),
        "fc3.weight": (64, 96),
        "fc4.weight": (32, 64),
    }
    (tmp_path / "other.stage1.npz").mkdir()
    failed = run_script(path, 2, "--steps", "1", "--save", str(tmp_path / "other"), fails_alone=1)
    assert failed[1].returncode == 1 and "IsADirectoryError" in failed[1].stderr


def test_a_pipeline_loads_what_it_saved(ranks, tmp_path):
    path, state = exported(script_plan(), tmp_path), tmp_path / "state"
    files = [str(tmp_path / f"state.stage{stage}.npz") for stage in (0, 1)]

    def run(*arguments: str) -> list[tuple[str, str]]:
        return ranks(2).run(f"{JOBS}:run_as_script", path, arguments)

    (first, _), _ = run("--steps", "2", "--save", str(state))
    (again, error), other = run("--steps", "1", "--load", *files)
    assert error == "" and other == ("", "")
    (loaded,), losses = losses_in(again), losses_in(first)
    assert loaded < losses[0] and loaded not in losses
    assert run("--steps", "0", "--load", files[0])[1] == ("", "the state_dict lacks 'fc3.weight'")


def losses_in(output: str) -> list[float]:
    return [float(line.split("loss ")[1]) for line in output.splitlines()]
