"""Exported OneFlow files on real ranks: the losses, values and bytes of the applied plan; and as scripts."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoddl
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.graph import Layer, LayerGraph, graph_from_document
from autoddl.costmodel.strategy import PLAIN, Choices, Strategy, enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.export.oneflow import oneflow_text
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.processes import is_listening, reserve_port
from autoddl.planfile import PlanFile, save_plan, unpipelined_plan
from autoddl.zoo.builtin import BuiltIn, MLPSizes, VGGSizes
from autoddl.zoo.transformers import Transformer

from .random_strategies import random_strategies
from .sent_bytes import Sent, check_sent

JOBS = Path(__file__).with_name("exported_jobs.py")
MODELS = Path(__file__).with_name("exported_models.py")
GPT = Transformer("gpt", layers=2, width=64, heads=8, sequence=16, vocabulary=128)
BERT = Transformer("bert", layers=1, width=64, heads=4, sequence=16, vocabulary=128)
LLAMA = replace(GPT, name="llama", layers=1, kv_heads=4, intermediate=128, activation="silu", tied=False)
VGG = VGGSizes(11, image=32, classes=16, hidden=64)


@dataclass(frozen=True)
class Case:
    """A built-in model at its strategies, on GPUs or on CPU ranks that shake hands before each exchange of two hosts."""

    built_in: BuiltIn
    strategies: Mapping[str, Strategy]
    workload: Workload
    shakes_hands: bool = False

    @property
    def graph(self) -> LayerGraph:
        return self.built_in.graph()

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return tuple(p0 * p1 * p2 for p0, p1, p2 in next(iter(self.strategies.values())).splits)

    @property
    def num_ranks(self) -> int:
        return next(iter(self.strategies.values())).num_devices

    def plan(self, graph: LayerGraph | None = None) -> PlanFile:
        sizes = self.level_sizes
        cluster = load_cluster("local-cpu" if self.shakes_hands else "dgx-a100")
        cluster = cluster.resized(*((1, *sizes) if len(sizes) == 1 else sizes))
        if self.shakes_hands:
            cluster = cluster.with_links(latency_s=1e-6, bandwidth=1e6)
        device = replace(cluster.device, peak_flops={"float32": 1e12})
        return unpipelined_plan(graph or self.graph, replace(cluster, device=device), self.workload, self.strategies)


def random_case(
    family: str,
    sizes: Any,
    level_sizes: tuple[int, ...],
    seed: int,
    summa: bool = False,
    tied: bool = True,
    batch: int = 16,
    micro_batch: int = 8,
    choices: Choices = PLAIN,
    **workload: Any,
) -> Case:
    """A random strategy for every layer that divides it: of each role of a block one, where ``tied``; shared weights transposed."""
    built_in = BuiltIn(family, sizes)

    def role_of(layer: Layer) -> object:
        return (layer.block, layer.role) if layer.block and tied else layer.name

    strategies = random_strategies(built_in.graph(), level_sizes, seed, summa, role_of, choices)
    return Case(built_in, strategies, Workload(batch, micro_batch, "float32", **workload))


def on(*splits: tuple[int, int, int], summa: bool = False) -> Strategy:
    return Strategy(splits, summa=summa)


def perceptron(
    *strategies: Strategy, batch: int = 16, widths: tuple[int, ...] = (64, 128, 96, 32), micro_batch: int = 8
) -> Case:
    built_in = BuiltIn("mlp", MLPSizes(widths))
    named = {f"fc{i + 1}": strategy for i, strategy in enumerate(strategies)}
    return Case(built_in, named, Workload(batch, micro_batch, "float32", optimizer="sgd"))


#: All divisions of parameters, and gathered inputs.
DIVIDED = Choices((0, 1, 2, 3), regathers=True)
CASES: dict[str, Callable[[], Case]] = {
    "mlp on 2": lambda: perceptron(on((2, 1, 1)), on((1, 2, 1)), on((1, 1, 2))),
    "mlp on 4": lambda: perceptron(on((4, 1, 1)), on((1, 2, 2)), on((2, 1, 2))),
    "mlp on 4, summa": lambda: perceptron(on((2, 2, 1), summa=True), on((1, 2, 2)), on((2, 2, 1), summa=True)),
    "mlp on 6": lambda: perceptron(
        on((1, 2, 3)), on((3, 1, 2)), on((1, 6, 1)), batch=24, widths=(48, 144, 96, 24), micro_batch=12
    ),
    "mlp on 2x2": lambda: perceptron(on((2, 1, 1), (1, 2, 1)), on((1, 1, 2), (1, 2, 1)), on((1, 2, 1), (2, 1, 1))),
    "mlp on 2x2, handshakes": lambda: replace(CASES["mlp on 2x2"](), shakes_hands=True),
    "gpt on 2": lambda: random_case("gpt", GPT, (2,), 2, tied=False),
    "gpt on 2, joint sums": lambda: random_case("gpt", GPT, (2,), 2, tied=False, bucket_bytes=40_000),
    "gpt on 2x2, joint sums, recomputed": lambda: random_case(
        "gpt", replace(GPT, layers=1), (2, 2), 3, batch=8, recompute="blocks", bucket_bytes=2**20
    ),
    "gpt on 2x2, recomputed": lambda: random_case(
        "gpt", replace(GPT, layers=1), (2, 2), 3, batch=8, recompute="blocks"
    ),
    "gpt on 4, summa": lambda: random_case("gpt", replace(GPT, layers=1), (4,), 4, summa=True, batch=8),
    "bert on 4": lambda: random_case("bert", BERT, (4,), 7, batch=8),
    "llama on 2, recomputed": lambda: random_case("llama", replace(LLAMA, layers=3), (2,), 10, recompute="blocks:2"),
    "gpt on 2x2, divided": lambda: random_case("gpt", GPT, (2, 2), 12, choices=DIVIDED),
    "llama on 4, divided and recomputed": lambda: random_case(
        "llama", LLAMA, (4,), 13, choices=DIVIDED, recompute="blocks"
    ),
    "vgg on 2": lambda: random_case("vgg", VGG, (2,), 11, batch=2, micro_batch=2, optimizer="sgd"),
}


def exported(case: Case, folder: Path) -> str:
    """The file of a case."""
    path = folder / "exported.py"
    path.write_text(oneflow_text(case.plan()))
    return str(path)


def check(run: Callable[[], list[dict[str, Any]]]) -> None:
    """Losses of all steps, initial and final values and bytes as of the applied plan."""
    results = run()
    for result in results:
        assert result["initial"] and not result["names"]
        assert result["losses"][1] == pytest.approx(result["losses"][0], rel=1e-5)
        errors = result["finals"]
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        assert len(set(result["losses"][1])) == len(result["losses"][1])  # it learns
    check_sent(len(results), sent_by(results), lambda: sent_by(run()))


def sent_by(results: list[dict[str, Any]]) -> list[Sent]:
    """The bytes of each step of the file, beside those of the applied plan."""
    steps = list(zip(*results[0]["bytes"]))
    assert all(theirs > 0 for theirs, _ in steps)
    return [Sent(f"step {i}", mine, theirs) for i, (theirs, mine) in enumerate(steps)]


@pytest.mark.parametrize("name", CASES)
def test_losses_values_and_bytes_are_those_of_the_applied_plan(counted_ranks, tmp_path, name):
    case = CASES[name]()
    arguments = case.built_in, case.graph, case.strategies, case.workload, exported(case, tmp_path), True
    text = Path(arguments[4]).read_text()
    assert ("exchange(x, RANKS, Layout((1, 2, 3)).cuts, Layout((3, 1, 2)).cuts)" in text) == (name == "mlp on 6")
    assert ("TYPES, handshake=Handshake(ranks_per_host=2, least_bytes=4))" in text) == case.shakes_hands
    check(lambda: counted_ranks(case.num_ranks).run(f"{JOBS}:train_both", *arguments))


# ---- Users' models -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def users_graphs() -> dict[str, LayerGraph]:
    """The graphs of the users' models."""
    return extracted("transformer", "pictures")


def extracted(*names: str) -> dict[str, LayerGraph]:
    """The graphs of users' models, extracted in a process of its own."""
    if not (available := is_available()):
        pytest.skip(available.reason)
    code = "import sys; from autoddl.__main__ import main; sys.exit(any([main(['extract', m, '--json']) for m in sys.argv[1:]]))"
    command = [sys.executable, "-c", code, *(f"{MODELS}:{name}" for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    graphs, rest = {}, done.stdout
    for name in names:
        document, end = json.JSONDecoder().raw_decode(rest)
        graphs[name], rest = graph_from_document(document, name), rest[end:].lstrip()
    return graphs


def users_case(graph: LayerGraph, level_sizes: tuple[int, ...], seed: int, **workload: Any) -> Case:
    """One of the users' models at random strategies."""
    rng, strategies = random.Random(seed), {}
    for layer in graph.layers:
        options = [s for s in enumerate_strategies(layer, level_sizes) if s.fits(layer, 8)]
        strategies[layer.name] = rng.choice(options)
    return Case(BuiltIn("", MLPSizes(())), strategies, Workload(16, 8, "float32", **workload))


@pytest.mark.parametrize(
    ("name", "level_sizes", "seed", "recompute"), [("transformer", (2,), 2, "none"), ("pictures", (2, 2), 3, "layers")]
)
def test_users_models_are_wrapped(counted_ranks, users_graphs, tmp_path, name, level_sizes, seed, recompute):
    graph = users_graphs[name]
    case = users_case(graph, level_sizes, seed, optimizer="sgd", recompute=recompute)
    path = tmp_path / "exported.py"
    path.write_text(oneflow_text(case.plan(graph), f"{MODELS}:{name}"))
    arguments = f"{MODELS}:{name}", graph, case.strategies, case.workload, str(path), True
    check(lambda: counted_ranks(case.num_ranks).run(f"{JOBS}:train_users", *arguments))


def test_a_model_that_computes_something_else_is_noticed(ranks, users_graphs, tmp_path):
    """The plan is for other scores than the model's: the file says so before it trains."""
    graph = users_graphs["transformer"]
    path = tmp_path / "exported.py"
    path.write_text(oneflow_text(users_case(graph, (2,), 1).plan(graph), f"{MODELS}:transformer"))
    said = ranks(2).run(f"{JOBS}:check_users", f"{MODELS}:transformer", f"{MODELS}:scaled", str(path))
    for of_rank in said:
        assert of_rank[0] is None
        assert re.fullmatch(r"the annotated model's loss is [\d.]+, the plain one's [\d.]+: they differ", of_rank[1])


# ---- Files as scripts ----------------------------------------------------------------------------------------------------------


def run_script(
    path: Path, num_ranks: int, *arguments: str, fails_alone: int | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """The script on ranks started by hand: with the variables that any launcher sets, isolated from what is installed by users.

    Where one rank ``fails_alone``, the others are killed then: they would wait for it until OneFlow gives up.
    """
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, "-I", str(path), *arguments]
    processes = []
    for rank in range(num_ranks):
        environment = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        deadline = time.monotonic() + 60
        while rank == 0 and not is_listening(processes[0].pid, port) and time.monotonic() < deadline:
            time.sleep(0.05)
    try:
        if fails_alone is not None:
            processes[fails_alone].wait()
            for process in processes:
                process.kill()
        return [
            subprocess.CompletedProcess(command, process.wait(), *process.communicate(timeout=90))
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.ranks
def test_a_file_is_a_script_that_trains_and_saves(tmp_path):
    if not (available := is_available()):
        pytest.skip(available.reason)
    case = perceptron(on((2, 1, 1)), on((1, 2, 1)), on((1, 1, 2)))
    path, state = Path(exported(case, tmp_path)), tmp_path / "state.npz"
    first, second = run_script(path, 2, "--steps", "4", "--save", str(state))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    losses = [float(line.split("loss ")[1]) for line in first.stdout.splitlines()]
    assert len(losses) == 4 and len(set(losses)) == 4 and second.stdout == ""
    with np.load(state) as file:
        shapes = {name: file[name].shape for name in file.files}
    assert shapes == {"fc1.weight": (128, 64), "fc2.weight": (96, 128), "fc3.weight": (32, 96)}
    alone = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, timeout=60)
    assert alone.returncode == 1 and alone.stderr == "this model is for 2 ranks, WORLD_SIZE is 1\n"
    failed = run_script(path, 2, "--load", str(tmp_path / "missing.npz"))
    assert [done.returncode for done in failed] == [1, 1]
    assert all("missing.npz" in done.stderr for done in failed)


@pytest.mark.ranks
def test_a_file_of_a_users_model_is_a_script(users_graphs, tmp_path):
    graph, path = users_graphs["transformer"], tmp_path / "exported.py"
    path.write_text(oneflow_text(users_case(graph, (2,), 2).plan(graph), f"{MODELS}:transformer"))
    done = run_script(path, 2, "--steps", "2")
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    losses = [float(line.split("loss ")[1]) for line in done[0].stdout.splitlines()]
    assert len(set(losses)) == 2 and done[1].stdout == ""


@pytest.mark.ranks
def test_a_file_of_one_stage_learns_what_autoddl_train_learns(tmp_path):
    """BERT predicts masked bytes of a text; both begin with the same values and draw the same micro-batches."""
    if not (available := is_available()):
        pytest.skip(available.reason)
    plan_path, text = tmp_path / "plan.json", Path(__file__).with_name("sonnets.txt")
    sizes = {"heads": 4, "sequence": 16, "vocabulary": 320}
    cluster = {"cluster": "local-cpu", "nodes": 1, "devices_per_node": 2}
    plan = autoddl.plan("bert:1x64", **sizes, **cluster, batch=8, micro_batch=4, precision="float32")
    save_plan(plan_path, plan.document)
    path = tmp_path / "exported.py"
    path.write_text(oneflow_text(plan))
    done = run_script(path, 2, "--steps", "3", "--text", str(text))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    losses = [float(line.split("loss ")[1]) for line in done[0].stdout.splitlines()]
    command = [sys.executable, "-m", "autoddl", "train", str(plan_path), "--steps", "3", "--text", str(text), "--json"]
    trained = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert trained.returncode == 0, trained.stderr
    assert losses == pytest.approx(json.loads(trained.stdout)["losses"], rel=1e-5)


def test_states_of_plain_models_are_taken_and_given(ranks, tmp_path):
    case = CASES["bert on 4"]()
    for found in ranks(4).run(f"{JOBS}:load_state", exported(case, tmp_path), 1):
        assert found["same"]
        first = found["first"]
        assert found["lacks"] == f"the state_dict lacks {first!r}"
        assert f"the state_dict's {first} has shape (3, 3), should have" in found["shape"]
