"""Plans on one, two and four GPUs: values against one device in single precision, steps, overflow, memory. Also on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoddl.costmodel.devices import CPU
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.precision import PRECISIONS, precision_of
from autoddl.verification.comparing import compare
from autoddl.verification.fitting import FittedPlan
from autoddl.verification.prediction import predict
from autoddl.verification.task import VerificationTask
from autoddl.zoo.builtin import BuiltIn, MLPSizes

from ..runtime.pipeline.stage_plan_cases import strategy_of
from .plan_cases import MESHES, MODELS, plan_like, planned, planned_pipeline

JOBS = Path(__file__).with_name("device_jobs.py")
REFERENCE = "autoddl.verification.rank_job:run_reference"
TIMEOUT_S = 280
#: Relative errors against one device in single precision, by compute type: of losses, gradients, and parameters after three steps.
TOLERANCES = {
    "float32": (1e-5, 1e-4, 1e-4),
    "float16": (5e-3, 3e-2, 3e-3),
    "bfloat16": (3e-2, 2e-1, 2e-2),
}
#: Gradients that are smaller than this fraction of the largest one are compared with it: their errors are those of larger ones.
SMALL_GRADIENT = 0.05
#: Scales of the loss: gradients of this model overflow at one of them, and are representable at the other.
TOO_LARGE, SAFE = {"float16": 2.0**40, "float32": 2.0**134}, 2.0**8
#: Of the memory that a rank needs on a GPU: what kernels take besides the plan, and how closely blocks are allocated.
WORKSPACE_BYTES, SLACK = 768 * 2**20, 1.25

Ranks = Callable[[int], Any]


def compute_type(precision: str, device: str) -> str:
    types = precision_of(precision)
    return (types.on_cpu() if device == CPU else types).compute


def task_of(fitted: FittedPlan, device: str, folder: Path) -> tuple[FittedPlan, VerificationTask]:
    """The plan in the types of the device, and the task of its ranks."""
    scaled = fitted.scaled
    types = scaled.workload.types.on_cpu() if device == CPU else scaled.workload.types
    scaled = replace(scaled, workload=replace(scaled.workload, precision=types.name))
    fitted = replace(fitted, scaled=scaled)
    task = VerificationTask(
        graph=scaled.graph,
        workload=scaled.workload,
        stages=fitted.stages,
        schedule=fitted.schedule,
        built_in=scaled.built_in,
        function="",
        seed=2,
        folder=str(folder),
        counts_bytes=False,
        device=device,
    )
    return fitted, task


def check(on: Ranks, device: str, fitted: FittedPlan, folder: Path, note: Callable[[str], None]) -> None:
    """Run a plan and a single device, and compare values and steps."""
    fitted, task = task_of(fitted, device, folder)
    num_ranks, built_in = sum(fitted.schedule.widths), fitted.scaled.built_in
    assert built_in is not None
    reference = on(num_ranks).run(REFERENCE, task, timeout_s=TIMEOUT_S)[0]
    results = on(num_ranks).run(f"{JOBS}:run_plan", task, SAFE, timeout_s=TIMEOUT_S)
    found = compare(
        plan_like(fitted), fitted, predict(fitted), reference, results, tolerance=1.0, not_counted_because="GPUs"
    )
    # The steps that ran are those that were priced, with the bytes of their tensors.
    assert (found.step.missing, found.step.unexpected) == ((), ())
    for layer in found.layers:
        for name, phase in layer.phases.items():
            assert (phase.missing, phase.unexpected) == ((), ()), f"{layer.name}, {name}"
    assert found.between.predicted_bytes == found.between.sent_bytes
    # Values.
    of_loss, of_gradient, of_parameter = TOLERANCES[compute_type(fitted.scaled.workload.precision, device)]
    loss = max(abs(got - wanted) / abs(wanted) for wanted, got in found.losses)
    with np.load(folder / "reference.npz") as file:
        norms = {name[9:]: float(np.linalg.norm(file[name])) for name in file.files if name.startswith("gradient/")}
    largest, errors = max(norms.values()), {}
    for one in found.gradients:
        norm = norms.get(one.name, 0.0)
        errors[one.name] = one.error * max(norm, 1e-3 * largest) / max(norm, SMALL_GRADIENT * largest)
    worst, parameter = max(errors, key=errors.__getitem__), max(found.parameters, key=lambda one: one.error)
    note(f"errors of losses {loss:.1e}, gradients {errors[worst]:.1e}, parameters {parameter.error:.1e}")
    assert loss < of_loss
    assert errors[worst] < of_gradient, worst
    # Behind relu and max-pooling rounding errors decide, in the later steps of a VGG, which way some pixels take.
    assert parameter.error < of_parameter or built_in.family == "vgg", parameter.name


@pytest.mark.gpu(1)
@pytest.mark.on_cpu(precision=("mixed",), family=("gpt", "mlp"))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", MODELS)
def test_a_model_on_one_device(on, device, tmp_path, note, family, precision):
    """On CPU ranks a VGG, whose smallest images have 32 pixels, takes half a minute; a usual run leaves it out there."""
    check(on, device, planned(family, (1,), precision), tmp_path, note)


ON_MESHES = [
    pytest.param(name, marks=pytest.mark.gpu(int(np.prod(level_sizes))), id=name)
    for name, level_sizes in MESHES.items()
]


@pytest.mark.on_cpu(precision=("mixed",), family=("gpt",), mesh=("2 x 2",))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("mesh", ON_MESHES)
def test_a_plan_on_several_devices(on, device, tmp_path, note, mesh, family, precision):
    """On CPU ranks a VGG takes half a minute, as above."""
    check(on, device, planned(family, MESHES[mesh], precision), tmp_path, note)


BY_NUMBER = [pytest.param(n, marks=pytest.mark.gpu(n), id=f"{n} devices") for n in (2, 4)]
BY_NUMBER_FROM_ONE = [pytest.param(1, marks=pytest.mark.gpu(1), id="1 device"), *BY_NUMBER]


@pytest.mark.on_cpu(precision=("mixed",), num=(4,), schedule=("1f1b",))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera", "zero-bubble"])
@pytest.mark.parametrize("num", BY_NUMBER)
def test_a_pipeline_of_two_stages(on, device, tmp_path, note, num, schedule, precision):
    check(on, device, planned_pipeline(schedule, num, precision), tmp_path, note)


@pytest.mark.on_cpu(num=(4,), is_pipeline=(True,))
@pytest.mark.parametrize("is_pipeline", [False, True], ids=["one stage", "two stages"])
@pytest.mark.parametrize("num", BY_NUMBER_FROM_ONE)
def test_steps_that_overflow_are_skipped(on, device, tmp_path, num, is_pipeline):
    """By all ranks. With the data again, training comes to the weights of one whose scale does not overflow."""
    if is_pipeline and num == 1:
        pytest.skip("a pipeline needs two devices")
    fitted = planned_pipeline("1f1b", num, "mixed") if is_pipeline else planned("gpt", (num,), "mixed")
    fitted, task = task_of(fitted, device, tmp_path)
    too_large = TOO_LARGE[compute_type("mixed", device)]
    job = f"{JOBS}:train_with_overflow"
    skipping = on(num).run(job, task, [too_large, too_large, SAFE, SAFE], 2, timeout_s=TIMEOUT_S)
    others = on(num).run(job, task, [SAFE, SAFE], 0, timeout_s=TIMEOUT_S)
    for found, other in zip(skipping, others):
        assert found["scales"] == [too_large / 2, too_large / 2, SAFE, SAFE]
        assert (found["skipped"], other["skipped"]) == (2, 0)
        for name, value in found["parameters"].items():
            assert value.dtype == np.dtype(fitted.scaled.workload.types.master)
            # GPUs add rows of embeddings in any order.
            np.testing.assert_allclose(value, other["parameters"][name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.on_cpu(precision=("mixed",), num=(2,))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num", BY_NUMBER_FROM_ONE)
def test_memory_is_that_of_the_plan(on, device, tmp_path, note, num, precision):
    """Weights, gradients and optimizer states of a perceptron, in which activations are small; at most the plan's memory."""
    width = 64 if device == CPU else 4096
    built_in = BuiltIn("mlp", MLPSizes((width,) * 7))
    fitted = planned("mlp", (num,), precision)
    strategies = {layer.name: strategy_of(1, num, 1) for layer in built_in.graph().layers}
    scaled = replace(fitted.scaled, graph=built_in.graph(), built_in=built_in, strategies=strategies)
    stages = (replace(fitted.stages[0], strategies=strategies),)
    fitted, task = task_of(replace(fitted, scaled=scaled, stages=stages), device, tmp_path)
    workload, state, others = fitted.scaled.workload, 0.0, 0.0
    for layer in scaled.graph.layers:
        work = layer_work(
            layer, strategies[layer.name], workload, workload.micro_batch, scaled.graph.place(layer.name, "none")
        )
        state += work.state_bytes
        others += work.kept_bytes + work.recomputed_bytes + work.buffer_bytes
    found = on(num).run(f"{JOBS}:memory", task, 3, timeout_s=TIMEOUT_S)
    assert all(np.isfinite(losses).all() for _, losses in found) and any(losses for _, losses in found)
    parameters = sum(layer.num_parameters for layer in scaled.graph.layers)
    assert state == parameters / num * workload.bytes_per_parameter
    if device == CPU:
        pytest.skip("trained, but CPU ranks have no memory of a device that could be read")
    for rank, (used, _) in enumerate(found):
        assert used is not None, "neither OneFlow nor nvidia-smi says how much memory is used"
        note(f"rank {rank} uses {used / 2**20:.0f} MiB, {used / (state + others):.2f} of the plan's")
        assert 0.9 * state < used < SLACK * (state + others) + WORKSPACE_BYTES
