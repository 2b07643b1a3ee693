"""The OneFlow modules of the built-in families, against numpy and against the layer graphs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from autoddl.pipelines.runtime.load import is_available, load_oneflow
from autoddl.zoo import Transformer, bert, gpt, llama, mlp, vgg

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 2, 16, 4, 32, 6, 3
SIZES = (LAYERS, WIDTH, HEADS, VOCABULARY)


def made(name: str) -> tuple[Any, Any]:
    """A small module with initial values from seed 1, and the built-in graph of the same sizes."""
    from autoddl.pipelines.runtime import models

    transformer = Transformer("x", LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY)
    if name == "gpt":
        pair = models.GPT(*SIZES, LENGTH), gpt(transformer)
    elif name == "bert":
        pair = models.Bert(*SIZES, LENGTH), bert(transformer)
    elif name == "llama":
        sizes = Transformer(
            *("x", LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY), intermediate=24, kv_heads=2, activation="silu", tied=False
        )
        pair = models.Llama(*SIZES, 24, kv_heads=2), llama(sizes)
    elif name == "vgg":
        pair = models.VGG(11, image=32, classes=10, hidden=4096), vgg(11, image=32, classes=10)
    else:
        pair = models.MLP([12, 8, 4]), mlp([12, 8, 4])
    return models.initialize(pair[0], seed=1), pair[1]


def sample(name: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    if name == "vgg":
        return random.standard_normal((BATCH, 3, 32, 32)).astype(np.float32), random.integers(10, size=BATCH)
    if name == "mlp":
        return tuple(random.standard_normal((BATCH, width)).astype(np.float32) for width in (12, 4))
    return tuple(random.integers(VOCABULARY, size=(BATCH, LENGTH)) for _ in range(2))


def loss_of(module: Any, name: str) -> Any:
    return module(*map(load_oneflow().from_numpy, sample(name)))


# ---- The same in numpy, in double precision ---------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x):
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def layer_norm(x, p, name):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def rms_norm(x, p, name):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}.weight"]


def dense(x, p, name):
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)


def attention(q, k, v, heads, kv_heads, causal, turn=lambda x: x):
    """One head after the other."""
    size = q.shape[-1] // heads
    outputs = []
    for head in range(heads):
        group = head * kv_heads // heads
        cut, kv_cut = np.s_[..., head * size : (head + 1) * size], np.s_[..., group * size : (group + 1) * size]
        scores = turn(q[cut]) @ turn(k[kv_cut]).swapaxes(-1, -2) / np.sqrt(size)
        if causal:
            scores = np.where(np.arange(LENGTH)[:, None] >= np.arange(LENGTH), scores, -np.inf)
        outputs.append(softmax(scores) @ v[kv_cut])
    return np.concatenate(outputs, -1)


def cross_entropy(logits, targets):
    return -np.log(softmax(logits))[(*np.indices(targets.shape), targets)].mean()


def gpt_loss(p, tokens, targets):
    x = p["wte.weight"][tokens] + p["wpe.weight"]
    for i in range(LAYERS):
        q, k, v = np.split(dense(layer_norm(x, p, f"h.{i}.ln_1"), p, f"h.{i}.attn.c_attn"), 3, -1)
        x = x + dense(attention(q, k, v, HEADS, HEADS, causal=True), p, f"h.{i}.attn.c_proj")
        x = x + dense(gelu(dense(layer_norm(x, p, f"h.{i}.ln_2"), p, f"h.{i}.mlp.c_fc")), p, f"h.{i}.mlp.c_proj")
    return cross_entropy(layer_norm(x, p, "ln_f") @ p["wte.weight"].T, targets)


def bert_loss(p, tokens, targets):
    tables = [p[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type", "position")]
    x = layer_norm(tables[0][tokens] + tables[1][0] + tables[2], p, "embeddings.LayerNorm")
    for i in range(LAYERS):
        block = f"encoder.layer.{i}"
        parts = (dense(x, p, f"{block}.attention.self.{name}") for name in ("query", "key", "value"))
        y = dense(attention(*parts, HEADS, HEADS, causal=False), p, f"{block}.attention.output.dense")
        x = layer_norm(x + y, p, f"{block}.attention.output.LayerNorm")
        y = dense(gelu(dense(x, p, f"{block}.intermediate.dense")), p, f"{block}.output.dense")
        x = layer_norm(x + y, p, f"{block}.output.LayerNorm")
    head = "cls.predictions"
    x = layer_norm(gelu(dense(x, p, f"{head}.transform.dense")), p, f"{head}.transform.LayerNorm")
    return cross_entropy(x @ tables[0].T + p[f"{head}.decoder.bias"], targets)


def llama_loss(p, tokens, targets):
    def turn(x):
        """Complex numbers, turned by their angle."""
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(half) / half))
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    x = p["embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        y = rms_norm(x, p, f"layers.{i}.input_layernorm")
        parts = (dense(y, p, f"layers.{i}.self_attn.{name}_proj") for name in "qkv")
        x = x + dense(attention(*parts, HEADS, 2, causal=True, turn=turn), p, f"layers.{i}.self_attn.o_proj")
        y = rms_norm(x, p, f"layers.{i}.post_attention_layernorm")
        gate, up = (dense(y, p, f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
        x = x + dense(gate / (1 + np.exp(-gate)) * up, p, f"layers.{i}.mlp.down_proj")
    return cross_entropy(dense(rms_norm(x, p, "norm"), p, "lm_head"), targets)


def vgg_loss(p, images, targets):
    x, module = images, 0
    for entry in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
        if entry == "M":
            n, c, height, width = x.shape
            x = x.reshape(n, c, height // 2, 2, width // 2, 2).max((3, 5))
            module += 1
            continue
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        bias = p[f"features.{module}.bias"][:, None, None]
        x = np.maximum(np.einsum("nchwij,ocij->nohw", windows, p[f"features.{module}.weight"], optimize=True) + bias, 0)
        module += 2
    x = x.reshape(len(x), -1)
    for i in (0, 3):
        x = np.maximum(dense(x, p, f"classifier.{i}"), 0)
    return cross_entropy(dense(x, p, "classifier.6"), targets)


def mlp_loss(p, rows, targets):
    return ((dense(np.maximum(dense(rows, p, "fc1"), 0), p, "fc2") - targets) ** 2).mean()


REFERENCES = {"gpt": gpt_loss, "bert": bert_loss, "llama": llama_loss, "vgg": vgg_loss, "mlp": mlp_loss}


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_loss_is_that_of_numpy(name):
    module, _ = made(name)
    parameters = {key: value.numpy().astype(np.float64) for key, value in module.named_parameters()}
    expected = REFERENCES[name](parameters, *sample(name))
    assert loss_of(module, name).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_parameters_are_those_of_the_graph_and_all_are_trained(name):
    module, graph = made(name)
    parameters = dict(module.named_parameters())
    of_graph = {p.name: p.shape for layer in graph.layers for p in layer.parameters if p.tied_to is None}
    assert of_graph == {key: tuple(value.shape) for key, value in parameters.items()}
    loss_of(module, name).backward()
    for key, parameter in parameters.items():
        gradient = parameter.grad.numpy()
        assert np.isfinite(gradient).all(), key
        if not key.endswith(("k_proj.bias", "key.bias")):  # softmax does not see a constant added to all scores
            assert np.abs(gradient).max() > 0, key


# ---- Initial values ---------------------------------------------------------------------------------------------------------


def test_initial_values_depend_on_the_seed_and_the_name_alone():
    from autoddl.pipelines.runtime.models import GPT, initialize

    def values(layers: int, seed: int) -> dict[str, np.ndarray]:
        module = initialize(GPT(layers, WIDTH, HEADS, VOCABULARY, LENGTH), seed)
        return {name: parameter.numpy() for name, parameter in module.named_parameters()}

    one, same, other, deeper = values(2, 5), values(2, 5), values(2, 6), values(3, 5)
    for name, value in one.items():
        assert np.array_equal(value, same[name]) and np.array_equal(value, deeper[name])
        assert value.ndim == 1 or not np.array_equal(value, other[name])
    assert not np.array_equal(one["h.0.mlp.c_fc.weight"], one["h.1.mlp.c_fc.weight"])
    assert np.all(one["ln_f.weight"] == 1) and np.all(one["ln_f.bias"] == 0)
    assert one["h.0.mlp.c_proj.weight"].std() == pytest.approx(1 / np.sqrt(4 * WIDTH), rel=0.1)


def test_initial_values_are_the_same_in_every_process():
    code = (
        "from autoddl.pipelines.runtime.models import MLP, initialize\n"
        "print(initialize(MLP([5, 3]), 7).fc1.weight.numpy().tobytes().hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    from autoddl.pipelines.runtime.models import MLP, initialize

    assert done.stdout.strip() == initialize(MLP([5, 3]), 7).fc1.weight.numpy().tobytes().hex()
