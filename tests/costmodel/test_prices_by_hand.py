"""Attention, optimizer steps, speeds of products, masks and the loss by hand; numbers of pairs by counting them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.cluster import Device, load_cluster
from autoddl.costmodel.graph import Layer, Place
from autoddl.costmodel.kinds.attention import pairs_of
from autoddl.costmodel.layerwork import LayerWork, layer_work
from autoddl.costmodel.localwork import attention_core, elementwise, matmul
from autoddl.costmodel.precision import PRECISIONS
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import OPTIMIZERS, Workload
from autoddl.zoo.layers import add, attention, linear, loss, norm


def work(layer: Layer, *splits: tuple[int, int, int], samples: int = 8, **options: object) -> LayerWork:
    """The work of a layer in the middle of a model, with ``samples`` samples over all devices."""
    options = {"precision": "mixed", **options}
    return layer_work(layer, Strategy(splits), Workload(samples, samples, **options), samples, Place())


# ---- Attention -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.booleans(), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_are_those_that_a_loop_counts(length: int, causal: bool, window: int | None) -> None:
    window = window if causal else None
    layer = attention("t", length, 1, 4, causal=causal, window=window)
    counted = 0
    for query in range(length):
        for key in range(length):
            is_seen = not causal or (key <= query and (window is None or query - key < window))
            counted += is_seen
    assert pairs_of(layer) == counted


@pytest.mark.parametrize(
    ("causal", "window", "pairs"),
    [(False, None, 16 * 16), (True, None, 16 * 17 // 2), (True, 4, 1 + 2 + 3 + 13 * 4), (True, 99, 16 * 17 // 2)],
)
def test_fused_attention_computes_pairs_and_keeps_logarithms(causal, window, pairs):
    """8 samples of 8 heads of 4 features over 8 devices: 8 heads of 16 positions on each; (2, 4, 1) has as many as (8, 1, 1)."""
    layer = attention("t", 16, 8, 4, causal=causal, window=window)
    for split in ((2, 4, 1), (8, 1, 1)):
        done = work(layer, split)
        # Two products of 2 * 4 FLOPs for each pair; five of them in the backward pass.
        assert done.forward_work.core_flops == 8 * pairs * 2 * (2 * 4)
        assert done.backward_work.core_flops == 8 * pairs * 5 * (2 * 4)
        assert done.forward_work.flops == done.backward_work.flops == 0
        # q, k and v are read, the result is written, 2 bytes per element; the same and the gradients in the backward pass.
        assert done.forward_work.nbytes == 8 * 16 * (3 + 1) * 4 * 2
        assert done.backward_work.nbytes == 2 * done.forward_work.nbytes
        # q, k and v, and for each row the logarithm of a sum, of 4 bytes.
        assert done.kept_bytes == 8 * 16 * 3 * 4 * 2 + 8 * 16 * 4


def test_fewer_key_value_heads_are_read_and_kept():
    """8 query heads and 2 key-value heads of 4 features: rows of (8 + 2 * 2) * 4 = 48 features."""
    done = work(attention("t", 16, 8, 4, kv_heads=2, causal=True), (4, 2, 1))
    assert done.kept_bytes == 8 * 16 * 48 * 2 / 8 + 8 * 8 * 16 * 4 / 8
    assert done.forward_work.core_flops == 8 * (16 * 17 / 2) * 4 * 4


def test_dense_attention_ignores_the_mask_and_keeps_the_probabilities():
    """All 16 x 16 scores of 8 heads, whatever the mask: 8 * 256 * 2 * (2 * 4) FLOPs; 2 bytes per probability."""
    for causal, window in ((False, None), (True, None), (True, 4)):
        done = work(attention("t", 16, 8, 4, causal=causal, window=window), (2, 4, 1), attention="dense")
        assert done.forward_work.core_flops == 8 * 256 * 2 * 2 * 4
        assert done.backward_work.core_flops == 2 * done.forward_work.core_flops
        assert done.kept_bytes == 8 * 16 * 3 * 4 * 2 + 8 * 256 * 2


def test_changed_scores_are_dense_and_those_of_windows_are_few():
    """4 windows of 4 of 16 rows: 8 heads of 4 * 4 * 4 = 64 scores of 2 bytes. The softmax reads or writes them 3 times, and two
    changes twice each. Products read and write 16 + 16 rows of 4 features, and the scores."""
    layer = attention("t", 16, 8, 4, causal=False, windows=4, changes=2)
    for attend in ("fused", "dense"):
        done = work(layer, (2, 4, 1), attention=attend)
        assert done.forward_work.core_flops == 8 * 64 * 2 * 2 * 4
        product, softmax, changes = 8 * (32 * 4 + 64) * 2, 3 * 8 * 64 * 2, 2 * 2 * 8 * 64 * 2
        assert done.forward_work.nbytes == 2 * product + softmax + changes
        assert done.kept_bytes == 8 * 16 * 3 * 4 * 2 + 8 * 64 * 2
    assert layer.flops == 2 * 2 * 8 * 64 * 4


@given(st.integers(1, 64), st.integers(1, 8), st.booleans())
def test_dense_attention_is_never_cheaper_forward(length: int, head_dim: int, causal: bool) -> None:
    layer, cluster = attention("t", length, 8, head_dim, causal=causal), load_cluster("dgx-a100").resized(1, 8)
    fused, dense = (work(layer, (8, 1, 1), attention=attend) for attend in ("fused", "dense"))
    assert cluster.local_time(fused.forward_work, "mixed") <= cluster.local_time(dense.forward_work, "mixed")
    if length >= 2:  # below, logarithms of 4 bytes are more than probabilities of 2
        assert fused.kept_bytes <= dense.kept_bytes


# ---- Masks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "itemsize"), [("float32", 4), ("mixed", 2), ("bfloat16", 2)])
def test_masks_have_one_byte_per_element_in_every_precision(precision, itemsize):
    rows, width = 8 * 16 / 8, 64
    dropped = ("dropout",)
    # A linear layer keeps its input, a sum nothing of its own, gelu its argument.
    done = work(linear("fc", 16, width, width, epilogue=dropped), (8, 1, 1), precision=precision)
    assert done.kept_bytes == rows * width * (itemsize + 1)
    done = work(linear("fc", 16, width, width, epilogue=("gelu", "dropout")), (8, 1, 1), precision=precision)
    assert done.kept_bytes == rows * width * (2 * itemsize + 1)
    assert work(add("a", (16, width), epilogue=dropped), (8, 1, 1), precision=precision).kept_bytes == rows * width
    # Dense attention: q, k and v; of each score the probability, the mask and what is left of it.
    layer = attention("t", 16, 8, 4, causal=True, dropout=True)
    done = work(layer, (8, 1, 1), precision=precision, attention="dense")
    assert done.kept_bytes == 8 * 16 * 3 * 4 * itemsize + 8 * 256 * (2 * itemsize + 1)
    # Fused kernels draw the mask again.
    plain = attention("t", 16, 8, 4, causal=True)
    assert work(layer, (8, 1, 1), precision=precision) == work(plain, (8, 1, 1), precision=precision)


# ---- Optimizer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "optimizer", "gradients", "nbytes"),
    [
        # The gradient is read; parameter or master copy, and states, are read and written; a copy in half precision is written.
        ("float32", "sgd", "compute", 4 + 2 * 4),
        ("float32", "momentum", "compute", 4 + 2 * (4 + 4)),
        ("float32", "adam", "compute", 4 + 2 * (4 + 8)),
        ("float32", "adam", "master", 4 + 2 * (4 + 8)),
        ("mixed", "sgd", "compute", 2 + 2 * 4 + 2),
        ("mixed", "momentum", "compute", 2 + 2 * (4 + 4) + 2),
        ("mixed", "adam", "compute", 28),
        ("mixed", "adam", "master", 4 + 26),
        ("bfloat16", "adam", "master", 30),
        ("fp8", "adam", "compute", 28),
    ],
)
def test_bytes_of_an_optimizer_step(precision, optimizer, gradients, nbytes):
    options = {"precision": precision, "optimizer": optimizer, "gradients": gradients}
    parameters = 64 * 32 + 32
    for split, parts in (((8, 1, 1), 1), ((2, 2, 2), 4), ((1, 4, 2), 8)):
        done = work(linear("fc", 1, 64, 32), split, **options)
        assert done.update_work == elementwise(nbytes * parameters / parts)
        # ZeRO: every device updates its part of the p0 that hold the same parameters.
        divided = work(linear("fc", 1, 64, 32), split, **options, zero=1)
        assert divided.update_work == elementwise(nbytes * parameters / parts / split[0])
    assert work(add("a", (1, 64)), (8, 1, 1), **options).update_work.launches == 0


@pytest.mark.parametrize("split", [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_bytes_of_state_with_wide_gradients_and_zero(split):
    """Adam in half precision: 2 of the parameter, 2 or 4 of the gradient, 4 of the master copy and 8 of states; ZeRO divides 12."""
    own = (64 * 32 + 32) / (split[1] * split[2])
    layer = linear("fc", 1, 64, 32)
    assert work(layer, split, gradients="master").state_bytes == 18 * own
    assert work(layer, split, gradients="master", zero=1).state_bytes == pytest.approx((6 + 12 / split[0]) * own)
    assert work(layer, split, zero=1).state_bytes == pytest.approx((4 + 12 / split[0]) * own)
    assert work(layer, split, zero=1).parameter_bytes == 2 * own


def test_zero_scatters_gradients_and_gathers_parameters():
    """p0 = 8: an all-reduce sends 2 (7/8) n bytes, so do a reduce-scatter of gradients and an all-gather of parameters."""
    layer, parameters = linear("fc", 1, 64, 32), 64 * 32 + 32
    plain, zero = (work(layer, (8, 1, 1), zero=number).gradient for number in (0, 1))
    assert [step.collective.value for step in zero] == ["reduce-scatter", "all-gather"]
    assert sum(s.sent_bytes for s in zero) == sum(s.sent_bytes for s in plain) == 2 * 7 / 8 * 2 * parameters
    wide = work(layer, (8, 1, 1), zero=1, gradients="master").gradient
    assert [step.sent_bytes for step in wide] == [7 / 8 * 4 * parameters, 7 / 8 * 2 * parameters]


@given(st.sampled_from(list(PRECISIONS)), st.sampled_from(list(OPTIMIZERS)), st.sampled_from(["compute", "master"]))
def test_what_is_updated_is_stored(precision: str, optimizer: str, gradients: str) -> None:
    """A step reads all of the state but a copy in half precision, which it writes, and writes all but the gradient."""
    workload = Workload(1, 1, precision, optimizer, gradients=gradients)
    copy = workload.itemsize if workload.types.has_masters else 0
    read = workload.bytes_per_parameter - copy
    written = workload.bytes_per_parameter - workload.gradient_itemsize
    assert workload.update_bytes_per_parameter == read + written


# ---- Products ------------------------------------------------------------------------------------------------------------


def device_with(**figures: object) -> Device:
    peaks = {"float32": 1e12, "mixed": 10e12, "fp8": 20e12}
    return replace(load_cluster("dgx-a100").device, peak_flops=peaks, efficiency=0.8, **figures)


@given(st.integers(1, 10**4), st.integers(1, 10**4), st.integers(1, 10**4), st.floats(0, 1e12))
def test_products_reach_half_of_the_efficiency_at_their_size(m: int, k: int, n: int, half: float) -> None:
    """The arithmetic of F FLOPs runs at E F / (F + F0) of the peak."""
    device = device_with(half_speed={"mixed": half}, core_efficiency=None)
    product, flops = matmul(m, k, n, 2), 2.0 * m * k * n
    assert flops / device.arithmetic_s(product, "mixed") / 10e12 == pytest.approx(0.8 * flops / (flops + half))
    # Two kernels, two times; a rate without a size has full speed at once.
    assert device.arithmetic_s(product + product, "mixed") == pytest.approx(2 * device.arithmetic_s(product, "mixed"))
    assert device.arithmetic_s(product, "float32") == pytest.approx(flops / 0.8e12)


def test_half_of_the_efficiency_by_hand():
    """2 * 1000^3 = 2e9 FLOPs at F0 = 2e9: (2e9 + 2e9) / (0.8 * 10e12) = 0.5 ms, twice 2e9 / 8e12 = 0.25 ms."""
    product = matmul(1000, 1000, 1000, 2)
    assert device_with(half_speed={"mixed": 2e9}).arithmetic_s(product, "mixed") == pytest.approx(0.5e-3)
    assert device_with(half_speed={}).arithmetic_s(product, "mixed") == pytest.approx(0.25e-3)


def test_attention_has_an_efficiency_of_its_own_and_is_never_rounded():
    """8e9 FLOPs inside attention at 0.4 of 10 TFLOP/s take 2 ms, in FP8 too; products of 8e9 FLOPs 1 ms, in FP8 0.5 ms."""
    device = device_with(half_speed={"mixed": 0.0}, core_efficiency=0.4)
    core, product = attention_core(8e9, 0.0), matmul(1000, 1000, 4000, 2)
    for precision, seconds in (("mixed", 1e-3), ("fp8", 0.5e-3)):
        assert device.arithmetic_s(core, precision) == pytest.approx(2e-3)
        assert device.arithmetic_s(product, precision) == pytest.approx(seconds)
        assert device.arithmetic_s(core + product, precision) == pytest.approx(2e-3 + seconds)
    # Without an efficiency of its own it has that of products, and their size at half speed does not slow it down.
    same = device_with(half_speed={"mixed": 1e15}, core_efficiency=None)
    assert same.arithmetic_s(core, "mixed") == pytest.approx(1e-3)


def test_fp8_keeps_rounded_factors_and_rounds_them():
    """16 rows of 64 features per device: 2048 bytes are read, and 2 x 1024 written; 1024 are kept, instead of 2048."""
    done, half = (work(linear("fc", 16, 64, 32), (8, 1, 1), precision=name) for name in ("fp8", "bfloat16"))
    assert (done.kept_bytes, half.kept_bytes) == (16 * 64, 16 * 64 * 2)
    assert done.forward_work == half.forward_work + elementwise(16 * 64 * (2 + 2))
    assert done.backward_work == half.backward_work + elementwise(16 * 32 * (2 + 2))
    # The next layer does not keep the result of attention, so fused attention does.
    layer = attention("t", 16, 8, 4, causal=True)
    done, half = (work(layer, (8, 1, 1), precision=name) for name in ("fp8", "bfloat16"))
    assert done.kept_bytes == half.kept_bytes + 8 * 16 * 4 * 2


# ---- Loss ----------------------------------------------------------------------------------------------------------------


def test_the_loss_has_three_tensors_of_logits():
    """16 rows of 64 classes per device: logits, probabilities in float32, and while it runs the gradient of the logits."""
    logits = 16 * 64
    done = work(loss("l", 16, 64), (8, 1, 1), precision="float32")
    assert done.kept_bytes + done.buffer_bytes == 3 * 4 * logits
    done = work(loss("l", 16, 64), (8, 1, 1), precision="mixed")
    assert (done.kept_bytes, done.buffer_bytes) == ((2 + 4) * logits, 2 * logits)
    assert work(loss("l", 16, 64), (2, 4, 1), precision="mixed").kept_bytes == (2 + 4) * logits


# ---- Activations between layers ------------------------------------------------------------------------------------------


def test_gathered_inputs_are_kept_gathered_again_or_copied():
    """8 samples of 16 rows, 64 -> 32 at (2, 4, 1): the input of 64 rows is 8192 bytes, a fourth of it on each device."""
    layer, split = linear("fc", 16, 64, 32), (2, 4, 1)
    kept, again, copied = (work(layer, split, activations=how) for how in ("kept", "regathered", "copied"))
    assert (kept.kept_bytes, again.kept_bytes, copied.kept_bytes) == (8192, 2048, 8192)
    assert again.backward == (*kept.forward, *kept.backward) and copied.backward == kept.backward
    # A norm has a part of the features or rows, or everything: only features need statistics of other devices.
    layers = [work(norm("n", 16, 64), split, activations=how) for how in ("kept", "regathered", "copied")]
    assert [done.kept_bytes for done in layers] == [2048, 2048, 8192]
    assert [len(done.forward) for done in layers] == [1, 0, 0]
