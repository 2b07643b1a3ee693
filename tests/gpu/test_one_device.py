"""One GPU: the functions of layers, dropout, optimizers and overflow in every precision. On CPU ranks with wider types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoddl.costmodel.devices import CPU
from autoddl.costmodel.precision import PRECISIONS, Precision, precision_of

from .references import CASES, projected_gradients, relative_error

pytestmark = pytest.mark.gpu(1)
JOBS = Path(__file__).with_name("statement_jobs.py")
TIMEOUT_S = 240
#: Half of the distance from 1 to the next number.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
#: Roundings on the way from inputs to outputs, and back to gradients, in an error that is relative to the whole tensor.
NUM_ROUNDINGS, NUM_GRADIENT_ROUNDINGS = 16, 64


def types_of(precision: str, device: str) -> Precision:
    """The types of a precision on a device."""
    types = precision_of(precision)
    return types.on_cpu() if device == CPU else types


@pytest.mark.on_cpu(precision=("mixed",))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_function_of_layers(on, device, name, precision):
    """Its values against numpy in double precision, its gradients against finite differences."""
    types = types_of(precision, device)
    (found,) = on(1).run(f"{JOBS}:evaluate", name, precision, device, timeout_s=TIMEOUT_S)
    is_loss = CASES[name].shapes and found["output"].ndim == 0
    assert found["type"] == (types.master if is_loss else types.compute)
    rounding = max(ROUNDING[types.compute], 1e-8)
    expected = CASES[name].function(*found["inputs"])
    assert found["output"].shape == expected.shape
    assert relative_error(found["output"], expected) < NUM_ROUNDINGS * rounding
    if CASES[name].shapes:
        assert found["gradient types"] == [types.compute]
        gradients = projected_gradients(name, found["inputs"], found["weights"], found["gradients"])
        assert relative_error(*gradients) < NUM_GRADIENT_ROUNDINGS * rounding


def test_every_function_of_layers_has_a_case(on, device):
    """But those of dropout, which have a test below, and those of experts, divided parameters and programs, which have theirs on
    ranks."""
    dropouts, divided = ["apply_dropout", "bind_dropout"], ["gather_weights", "lean_product"]
    experts = ["attend_latent", "collect", "dispatch", "expert_products", "gate_tokens", "route"]
    assert on(1).run(f"{JOBS}:untested", timeout_s=TIMEOUT_S) == [(sorted(dropouts + divided + experts), [])]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dropout(on, device, precision):
    (found,) = on(1).run(f"{JOBS}:drop", 0.25, precision, device, timeout_s=TIMEOUT_S)
    kept, rounding = found["first"] != 0, ROUNDING[types_of(precision, device).compute]
    assert 0.2 < 1 - kept.mean() < 0.3  # 4096 elements: more than six standard deviations
    np.testing.assert_allclose(found["first"][kept], 2 / 0.75, rtol=2 * rounding)
    np.testing.assert_allclose(found["gradient"], np.where(kept, 1 / 0.75, 0), rtol=2 * rounding)
    np.testing.assert_array_equal(found["again"], found["first"])
    assert (found["next"] != found["first"]).any()
    np.testing.assert_array_equal(found["evaluation"], np.full_like(kept, 2.0, dtype=float))


OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3}),
    "adamw": ("AdamW", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}),
}


def optimized(name: str, value: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """The weight after the steps of an optimizer, by the textbook."""
    kind, options = OPTIMIZERS[name]
    rate, first, second = options["lr"], np.zeros_like(value), np.zeros_like(value)
    for step, gradient in enumerate(gradients, 1):
        if kind == "SGD":
            first = options.get("momentum", 0.0) * first + gradient
            value = value - rate * first
            continue
        (beta1, beta2), eps = options["betas"], options["eps"]
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        mean, spread = first / (1 - beta1**step), np.sqrt(second / (1 - beta2**step)) + eps
        value = value - rate * (mean / spread + options.get("weight_decay", 0.0) * value)
    return value


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_an_optimizer(on, device, name, precision):
    """On masters, with scaled gradients of the compute type; a matrix, a vector, and one element."""
    rng, shapes = np.random.default_rng(1), ((40, 30), (7,), (1,))
    values = [rng.standard_normal(shape) for shape in shapes]
    gradients = [[rng.standard_normal(shape) for shape in shapes] for _ in range(4)]
    kind, options = OPTIMIZERS[name]
    arguments = kind, options, values, gradients, 256.0, (precision, device)
    (found,) = on(1).run(f"{JOBS}:optimize", *arguments, timeout_s=TIMEOUT_S)
    assert found["types"] == [types_of(precision, device).master]
    for i, value in enumerate(values):
        expected = optimized(name, value, [of_step[i] for of_step in found["gradients"]])
        # Kernels of GPUs may update doubles with single-precision constants; float32 masters allow no more than this anyway.
        np.testing.assert_allclose(found["values"][i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_overflow_is_noticed(on, device, precision):
    """Also one element among many, and sums that overflow although their elements do not."""
    largest = {"float16": 65504.0, "bfloat16": 3e38, "float32": 3e38}[types_of(precision, device).compute]
    rows = [
        [float("inf")], [float("-inf"), float("inf")], [float("nan")], [1.0] * 4095 + [float("nan")],
        [0.0], [largest] * 64, [-largest, largest],
    ]  # fmt: skip
    found = on(1).run(f"{JOBS}:finite", rows, precision, device, timeout_s=TIMEOUT_S)
    assert found == [[False, False, False, False, True, True, True]]
