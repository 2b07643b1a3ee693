"""The work of a layer under a strategy, computed by hand.

Throughout: float32 (a = 4 bytes), T = rows of a micro-batch over all devices, s = P1 P2.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from autoddl.costmodel.affine import VARIABLE, parts_of
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.collectives import Collective, Step, all_reduce_steps, gather_steps, scatter_steps
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph, Place
from autoddl.costmodel.layerwork import LayerWork, layer_work
from autoddl.costmodel.recomputation import RECOMPUTATIONS
from autoddl.costmodel.strategy import Strategy, data_parallel, enumerate_strategies, transposed
from autoddl.costmodel.workload import Workload
from autoddl.zoo import Transformer, gpt, mlp
from autoddl.zoo.layers import add, attention, conv2d, embedding, linear, loss, norm, opaque, position


def cluster_of(*level_sizes: int) -> Cluster:
    preset = load_cluster("dgx-a100")
    return preset.resized(1, *level_sizes) if len(level_sizes) == 1 else preset.resized(*level_sizes)


def work(layer: Layer, *splits: tuple[int, int, int], samples: float = 8, first: bool = False, **options) -> LayerWork:
    """The layer's work with ``samples`` samples over the devices that the splits are for."""
    summa = options.pop("summa", False)
    workload = Workload(8, 8, options.pop("precision", "float32"), **options)
    return layer_work(layer, Strategy(splits, summa), workload, samples, Place(is_first=first))


def compute_s(done: LayerWork, cluster: Cluster) -> tuple[float, float]:
    """Seconds of local work in single precision, forward and backward."""
    forward, backward = (cluster.local_time(part, "float32") for part in (done.forward_work, done.backward_work))
    return forward, backward


def brief(steps: tuple[Step, ...]) -> list[tuple[str, int, float]]:
    return [(step.collective.value, step.axis.size, step.nbytes) for step in steps]


def sent(steps: tuple[Step, ...]) -> float:
    return sum(step.sent_bytes for step in steps)


# --------------------------------------------------------------------------------------------------------- linear layers


def test_linear_at_two_by_two_by_two():
    """T = 8, 64 -> 32, no bias. Input of a device gathered over p1: 8 * 64 * 4 / (2 * 2) = 512 bytes; its unreduced output:
    8 * 32 * 4 / (2 * 2) = 256; its part of the weight: 64 * 32 * 4 / (2 * 2) = 2048."""
    done = work(linear("fc", 1, 64, 32, bias=False), (2, 2, 2))
    assert brief(done.forward) == [("all-gather", 2, 512), ("reduce-scatter", 2, 256)]
    assert brief(done.backward) == [("all-gather", 2, 256), ("reduce-scatter", 2, 512)]
    assert brief(done.gradient) == [("all-reduce", 2, 2048)]
    assert [step.axis.stride for step in (*done.forward, *done.gradient)] == [2, 1, 4]
    assert sent(done.forward) == sent(done.backward) == 256 + 128
    assert sent(done.gradient) == 2048  # twice, one half each


def test_linear_with_unequal_splits_and_rows():
    """T = 8 samples * 16 rows = 128, 48 -> 96 with bias, (2, 3, 4): input 128 * 48 * 4 / (2 * 4) = 3072; output
    128 * 96 * 4 / (2 * 3) = 8192; parameters (48 * 96 + 96) * 4 / 12 = 1568."""
    done = work(linear("fc", 16, 48, 96), (2, 3, 4))
    assert brief(done.forward) == [("all-gather", 3, 3072), ("reduce-scatter", 4, 8192)]
    assert brief(done.backward) == [("all-gather", 4, 8192), ("reduce-scatter", 3, 3072)]
    assert brief(done.gradient) == [("all-reduce", 2, 1568)]


def test_first_layer_gathers_no_input():
    layer = linear("fc", 1, 64, 32, bias=False)
    done, usual = work(layer, (2, 2, 2), first=True), work(layer, (2, 2, 2))
    assert brief(done.forward) == [("reduce-scatter", 2, 256)]
    assert brief(done.backward) == [("all-gather", 2, 256)]
    # One of the two products of the backward pass is not needed.
    assert 2 * done.backward_work == usual.backward_work
    assert done.forward_work == usual.forward_work


def test_data_parallel_sends_only_gradients():
    done = work(linear("fc", 1, 64, 32), (8, 1, 1))
    assert done.forward == done.backward == ()
    assert brief(done.gradient) == [("all-reduce", 8, (64 * 32 + 32) * 4)]


def test_replicated_by_p0_alone_sends_no_gradient():
    assert work(linear("fc", 1, 64, 32), (1, 4, 2)).gradient == ()


def test_mixed_precision_halves_the_bytes():
    layer = linear("fc", 1, 64, 32)
    half, full = work(layer, (2, 2, 2), precision="mixed"), work(layer, (2, 2, 2))
    assert [2 * n for *_, n in brief((*half.forward, *half.gradient))] == [
        n for *_, n in brief((*full.forward, *full.gradient))
    ]


def test_small_gradients_share_the_messages_of_a_bucket():
    """4 KiB of gradients (64 * 32 * 4 / 2) in a bucket of 16 KiB have a quarter of its messages, and all of their bytes."""
    layer, strategy = linear("fc", 16, 64, 32, bias=False), (4, 1, 2)
    alone, shared, whole = (work(layer, strategy, bucket_bytes=n).gradient for n in (0, 2**14, 2**12))
    assert [step.messages for step in alone] == [2 * 3] == [step.messages for step in whole]
    assert [step.messages for step in shared] == [2 * 3 / 4]
    assert [step.sent_bytes for step in alone] == [step.sent_bytes for step in shared]
    divided = work(layer, strategy, bucket_bytes=10**9, zero=1).gradient
    assert sum(step.messages for step in divided) == 2 * 3


def test_compute_of_a_product():
    """Local product (T/P0 x d_in/P2) by (d_in/P2 x d_out/P1); backward twice; gelu reads and writes, then reads two and writes."""
    cluster = cluster_of(8)
    done = work(linear("fc", 16, 64, 32, epilogue=("gelu",)), (2, 2, 2))
    product = cluster.matmul_time(128 / 2, 64 / 2, 32 / 2, "float32", 4)
    output = 128 * 32 * 4 / 8
    forward_s, backward_s = compute_s(done, cluster)
    assert forward_s == pytest.approx(product + cluster.elementwise_time(2 * output))
    assert backward_s == pytest.approx(2 * product + cluster.elementwise_time(3 * output))


# ------------------------------------------------------------------------------------------------------------- two levels


@pytest.mark.parametrize("sizes", [(8,), (4, 8), (3, 5), (2, 3, 4)])
def test_levels_send_the_bytes_of_one_flat_ring(sizes):
    """The total bytes are those of a flat ring; only 1 / (devices inside) of them cross the outer level."""
    p, n = prod(sizes), 1000.0 * prod(sizes)
    axes, stride = [], p
    for level, size in enumerate(sizes):
        stride //= size
        axes.append(Axis(size, stride, level))
    gather = gather_steps(axes, n)
    assert sent(gather) == pytest.approx((p - 1) / p * n)
    assert sent(scatter_steps(axes, n)) == pytest.approx((p - 1) / p * n)
    assert sent(all_reduce_steps(axes, n)) == pytest.approx(2 * (p - 1) / p * n)
    assert gather[0].axis.level == 0
    inner = prod(sizes[1:])
    assert gather[0].sent_bytes == pytest.approx((sizes[0] - 1) / sizes[0] * n / inner)
    # The mirror image.
    assert [step.axis for step in scatter_steps(axes, n)] == [step.axis for step in reversed(gather)]


def test_linear_on_two_levels():
    """(2,2,1) between nodes, (1,2,2) inside: T = 8, 64 -> 32; gathered input 8 * 64 * 4 / (2 * 2) = 512, over nodes 256 of it."""
    done = work(linear("fc", 1, 64, 32, bias=False), (2, 2, 1), (1, 2, 2))
    assert [(step.collective.value, step.axis.level, step.nbytes) for step in done.forward] == [
        ("all-gather", 0, 256),
        ("all-gather", 1, 512),
        ("reduce-scatter", 1, 8 * 32 * 4 / (2 * 4)),
    ]
    assert [(step.collective.value, step.axis.level, step.nbytes) for step in done.gradient] == [
        ("all-reduce", 0, 64 * 32 * 4 / (4 * 2))
    ]


def test_gradients_are_reduced_inside_the_nodes_first():
    done = work(linear("fc", 1, 64, 32, bias=False), (4, 1, 1), (2, 1, 1))
    whole = 64 * 32 * 4
    assert [(step.collective.value, step.axis.level, step.nbytes) for step in done.gradient] == [
        ("reduce-scatter", 1, whole),
        ("all-reduce", 0, whole / 2),
        ("all-gather", 1, whole),
    ]


# ------------------------------------------------------------------------------------------------------------ whole models


def test_data_parallel_step_is_one_all_reduce_of_all_parameters():
    graph = gpt(Transformer("gpt", 3, 16, 2, 8, 64))
    cluster = cluster_of(8)
    everything = dict.fromkeys((layer.name for layer in graph.layers), data_parallel((8,)))
    done = assess(graph, cluster, Workload(16, 8), everything)
    assert done.sent_bytes == pytest.approx(2 * 7 / 8 * graph.num_parameters * 4)


@pytest.mark.parametrize(("dp", "mp"), [(1, 4), (2, 4), (4, 2)])
def test_megatron_block_has_the_volume_of_four_all_reduces(dp, mp):
    """Forward: one all-reduce of T/dp * d behind attention, one behind the MLP (each as an all-gather and a reduce-scatter);
    backward as much.  (Shoeybi et al. 2019.)  Nothing moves between the layers."""
    graph = gpt(Transformer("gpt", 1, 16, 4, 8, 64))
    columns, rows = Strategy(((dp, mp, 1),)), Strategy(((dp, 1, mp),))
    strategies = dict.fromkeys((layer.name for layer in graph.layers), columns)
    strategies.update({"h.0.attn.c_proj": rows, "h.0.mlp.c_proj": rows, "wte": rows})
    done = assess(graph, cluster_of(dp * mp), Workload(8, 8), strategies)
    block = [layer for layer in done.layers if layer.layer.kind == "linear" and layer.layer.block]
    assert len(block) == 4 and all(layer.arriving == () for layer in done.layers)
    volume = sum(sent(layer.work.forward) + sent(layer.work.backward) for layer in block)
    assert volume == pytest.approx(4 * 2 * (mp - 1) / mp * (8 * 8 / dp * 16 * 4))


def test_bytes_per_device_fall_with_the_cube_root():
    """n x n products, p0 = p1 = p2 = p^(1/3): Theta(n^2 / p^(2/3)), below any two-dimensional split."""
    n = 4096
    layer = linear("fc", 1, n, n, bias=False)

    def volume(split: tuple[int, int, int]) -> float:
        done = work(layer, split, samples=n)
        return sent(done.forward) + sent(done.backward) + sent(done.gradient)

    # Forward and backward over p1 and p2, and the gradient over p0, each 2 (q - 1)/q n^2 a / q^2.
    for q in (2, 4, 8):
        assert volume((q, q, q)) == pytest.approx(3 * 2 * (q - 1) / q * n * n * 4 / q**2)
    assert volume((4, 4, 4)) < min(volume((8, 8, 1)), volume((8, 1, 8)), volume((64, 1, 1)), volume((1, 8, 8)))


# ------------------------------------------------------------------------------------------------------------ other kinds


def test_embedding_is_the_product_of_one_hot_rows():
    """T = 8 * 16 = 128 rows, table 32 x 64, (2, 2, 2): unreduced output 128 * 64 * 4 / (2 * 2); table 32 * 64 * 4 / 4."""
    done = work(embedding("wte", 16, 32, 64), (2, 2, 2), first=True)
    assert brief(done.forward) == [("reduce-scatter", 2, 8192)]
    assert brief(done.backward) == [("all-gather", 2, 8192)]
    assert brief(done.gradient) == [("all-reduce", 2, 2048)]
    # In the mesh its p2 has the place of the p1 of the transposed matrix.
    assert done.forward[0].axis.stride == 2


def test_tied_output_projection_stores_and_reduces_nothing_of_its_own():
    done = work(linear("head", 16, 64, 32, bias=False, tied_to="wte"), (2, 2, 2))
    assert done.gradient == () and done.state_bytes == 0
    assert len(done.forward) == len(done.backward) == 2


def test_norm_all_reduces_its_statistics():
    """T / P0 = 64 rows, 2 statistics of 4 bytes."""
    done = work(norm("n", 16, 64), (2, 4, 1), precision="mixed")
    assert brief(done.forward) == brief(done.backward) == [("all-reduce", 4, 64 * 2 * 4)]
    assert brief(done.gradient) == [("all-reduce", 2, 2 * 64 / 4 * 2)]
    rms = work(norm("n", 16, 64, statistics=1), (2, 4, 1))
    assert brief(rms.forward) == [("all-reduce", 4, 64 * 4)]
    assert work(norm("n", 16, 64), (8, 1, 1)).forward == ()


def test_loss_on_split_vocabulary():
    """T / P0 = 64 rows: maxima of 4 ranks gathered, sum of exponentials and target logit all-reduced; backward local."""
    done = work(loss("l", 16, 64), (2, 4, 1))
    assert brief(done.forward) == [("all-gather", 4, 64 * 4 * 4), ("all-reduce", 4, 64 * 2 * 4)]
    assert done.backward == ()


@pytest.mark.parametrize(
    ("layer", "split"),
    [
        (attention("t", 16, 8, 4, causal=True), (2, 4, 1)),
        (add("a", (16, 64)), (2, 4, 1)),
        (conv2d("c", (4, 8, 8), 8, kernel_size=3), (8, 1, 1)),
        (opaque("o", (4, 8), (4, 8)), (8, 1, 1)),
        (position("p", 16, 16, 64), (2, 4, 1)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_other_layers_communicate_only_gradients(layer, split):
    done = work(layer, split)
    assert done.forward == done.backward == ()
    expected = [("all-reduce", split[0], layer.num_parameters * 4 / (split[1] * split[2]))] if layer.parameters else []
    assert brief(done.gradient) == expected


def test_convolution_is_a_product_of_pixels_and_taps():
    cluster = cluster_of(8)
    done = work(conv2d("c", (4, 8, 8), 16, kernel_size=3, padding=1), (8, 1, 1))
    assert compute_s(done, cluster)[0] == pytest.approx(cluster.matmul_time(8 * 64 / 8, 4 * 9, 16, "float32", 4))


def test_dense_attention_computes_two_products_per_head():
    """8 samples of 8 heads over 8 devices: 8 pairs; (16 x 4)(4 x 16) and (16 x 16)(16 x 4)."""
    cluster = cluster_of(8)
    cluster = replace(cluster, device=replace(cluster.device, core_efficiency=None, half_speed={}))
    done = work(attention("t", 16, 8, 4, causal=True), (2, 4, 1), attention="dense")
    product = cluster.matmul_time(16, 4, 16, "float32", 4, count=8)
    assert compute_s(done, cluster)[0] == pytest.approx(2 * product + cluster.elementwise_time(3 * 8 * 16 * 16 * 4))


def test_summa_has_the_volume_of_two_operands_per_product():
    """r x c = 2 x 4, T = 8, 64 -> 32: rows of I gathered over c: 8 * 64 * 4 / 2 = 1024; columns of W over r:
    64 * 32 * 4 / 4 = 2048.  dI: columns of W again, its summands reduced over c; dW: rows of I again, summands over r."""
    done = work(linear("fc", 1, 64, 32, bias=False), (2, 4, 1), summa=True)
    assert brief(done.forward) == [("all-gather", 4, 1024), ("all-gather", 2, 2048)]
    assert brief(done.backward) == [
        ("all-gather", 2, 2048),
        ("reduce-scatter", 4, 1024),
        ("all-gather", 4, 1024),
        ("reduce-scatter", 2, 2048),
    ]
    assert done.gradient == ()  # nothing is stored twice
    assert done.state_bytes == 64 * 32 * 16 / 8
    first = work(linear("fc", 1, 64, 32, bias=False), (2, 4, 1), summa=True, first=True)
    assert brief(first.backward) == [("all-gather", 4, 1024), ("reduce-scatter", 2, 2048)]


# ----------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("float32", "sgd", 8),
        ("float32", "momentum", 12),
        ("float32", "adam", 16),
        ("mixed", "sgd", 8),
        ("mixed", "momentum", 12),
        ("mixed", "adam", 16),
    ],
)
def test_bytes_per_parameter(precision, optimizer, per_parameter):
    layer = linear("fc", 1, 64, 32)
    for split in [(8, 1, 1), (2, 2, 2), (1, 4, 2)]:
        done = work(layer, split, precision=precision, optimizer=optimizer)
        assert done.state_bytes == per_parameter * (64 * 32 + 32) / (split[1] * split[2])


def test_activations_kept():
    """T = 128, 64 -> 32 with gelu, (2, 2, 2): the gathered input, 128 * 64 * 4 / (2 * 2) = 8192 bytes, and gelu's argument,
    128 * 32 * 4 / 8 = 2048.  While it runs: gathered input and unreduced output, 8192 + 128 * 32 * 4 / 4."""
    done = work(linear("fc", 16, 64, 32, epilogue=("gelu",)), (2, 2, 2))
    assert (done.kept_bytes, done.buffer_bytes) == (8192 + 2048, 8192 + 4096)
    assert work(linear("fc", 16, 64, 32), (8, 1, 1)).buffer_bytes == 0
    # Attention: q, k and v, and the probabilities of 8 pairs of sample and head.
    kept = work(attention("t", 16, 8, 4, causal=True), (2, 4, 1), attention="dense").kept_bytes
    assert kept == 8 * 3 * 16 * 4 * 4 + 8 * 16 * 16 * 4


def test_recomputation_keeps_the_evenly_split_input_and_repeats_the_rest():
    layer = linear("fc", 16, 64, 32, epilogue=("gelu",))
    plain, again = work(layer, (2, 2, 2)), work(layer, (2, 2, 2), recompute="layers")
    assert again.kept_bytes == 128 * 64 * 4 / 8
    assert again.buffer_bytes == plain.buffer_bytes + plain.kept_bytes
    assert again.backward == (*plain.forward, *plain.backward)
    assert again.backward_work == plain.backward_work + plain.forward_work
    unchanged = (plain.forward, plain.forward_work, plain.gradient)
    assert (again.forward, again.forward_work, again.gradient) == unchanged
    # No later operation keeps the product: only its input is gathered again.
    bare = work(linear("fc", 16, 64, 32), (2, 2, 2), recompute="layers")
    assert brief(bare.backward)[0] == ("all-gather", 2, 8192)
    assert len(bare.backward) == 3
    # The loss runs its backward pass at once.
    assert not GPT.place("loss", "none").is_recomputed


#: Two blocks between embedding and head.
GPT = gpt(Transformer("gpt", 2, 16, 4, 8, 64))
#: Inside of a block, as its first layer, and behind the blocks.
PLACES = {
    "inner": Place(repetitions=2),
    "begins": Place(begins_block=True, repetitions=2),
    "first": Place(is_first=True, begins_block=True, repetitions=2),
    "end": Place(is_recomputed=False),
}

LAYERS = [
    linear("fc", 16, 64, 32, epilogue=("gelu",)),
    linear("bare", 16, 64, 32, bias=False),
    embedding("wte", 16, 32, 64),
    position("wpe", 16, 16, 64),
    attention("t", 16, 8, 4, causal=True),
    norm("n", 16, 64),
    add("a", (16, 64)),
    conv2d("c", (4, 8, 8), 8, kernel_size=3, epilogue=("relu",)),
    loss("l", 16, 64),
    opaque("o", (4, 8), (4, 8), flops=10.0, kept_elements=3),
]


@pytest.mark.parametrize(
    ("layer", "attend"),
    [*((layer, "fused") for layer in LAYERS), *((layer, "dense") for layer in LAYERS if layer.kind == "attention")],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("place", PLACES)
def test_everything_is_affine_in_the_samples(layer, attend, place):
    """The price book relies on it.  More micro-batches, or more recomputation, never make a step cheaper."""
    cluster = cluster_of(2, 4)

    def figures(done: LayerWork) -> list[float]:
        steps = [sum(cluster.time(step) for step in part) for part in (done.forward, done.backward, done.gradient)]
        update_s = cluster.local_time(done.update_work, "float32")
        nbytes = [done.state_bytes, done.kept_bytes, done.recomputed_bytes, done.buffer_bytes]
        return [*steps, *compute_s(done, cluster), update_s, *nbytes]

    for strategy in enumerate_strategies(layer, (2, 4), summa=True):
        before = None
        for recompute in RECOMPUTATIONS:
            workload = Workload(64, 64, "float32", recompute=recompute, attention=attend)
            at = {b: layer_work(layer, strategy, workload, b, PLACES[place]) for b in (0, 8, 64)}
            zero, few, many = figures(at[0]), figures(at[8]), figures(at[64])
            assert [z + 8 * (f - z) for z, f in zip(zero, few)] == pytest.approx(many, rel=1e-9)
            assert all(0 <= z <= f <= m for z, f, m in zip(zero, few, many))
            assert at[0].kept_bytes == at[0].recomputed_bytes == 0
            # The coefficients are those of the two figures.
            fixed, slopes = zip(*map(parts_of, figures(layer_work(layer, strategy, workload, VARIABLE, PLACES[place]))))
            assert fixed == pytest.approx(zero, rel=1e-12)
            assert [z + 64 * slope for z, slope in zip(fixed, slopes)] == pytest.approx(many, rel=1e-12)
            if before is not None:
                assert all(a <= b for a, b in zip(before[:6], many[:6]))
            before = many


@pytest.mark.parametrize("recompute", RECOMPUTATIONS[1:])
@pytest.mark.parametrize("attend", ["fused", "dense"])
def test_a_layer_at_the_end_is_not_recomputed(recompute, attend):
    for layer in LAYERS:
        for strategy in enumerate_strategies(layer, (2, 4), summa=True):
            both = (
                layer_work(layer, strategy, Workload(64, 64, recompute=how, attention=attend), 64, PLACES["end"])
                for how in ("none", recompute)
            )
            assert next(both) == next(both)


# ------------------------------------------------------------------------------------------------------------- assessment


def test_micro_batches_communicate_activations_each_and_gradients_once():
    graph = mlp([64, 32, 16])
    strategies = {"fc1": Strategy(((2, 2, 2),)), "fc2": Strategy(((4, 1, 2),))}
    one, four = (assess(graph, cluster_of(8), Workload(64, 64 // num), strategies) for num in (1, 4))
    for a, b in zip(one.layers, four.layers):
        assert sent(a.work.gradient) == sent(b.work.gradient)
        assert a.sent_bytes == pytest.approx(b.sent_bytes)  # as many bytes in all ...
        assert b.communication_s > a.communication_s  # ... in more messages
        assert b.work.kept_bytes == a.work.kept_bytes / 4
        assert a.work.state_bytes == b.work.state_bytes
    assert one.sent_bytes == pytest.approx(four.sent_bytes)


def test_redistribution_counts_at_the_consumer_both_ways():
    """(2, 4) -> (4, 2): one all-to-all over 2 of 64 * 32 * 4 / 8 = 1024 bytes; there and back."""
    graph = mlp([64, 32, 16])
    strategies = {"fc1": Strategy(((2, 2, 2),)), "fc2": Strategy(((4, 1, 2),))}
    done = assess(graph, cluster_of(8), Workload(64, 64), strategies)
    assert brief(done.layers[1].arriving) == [("all-to-all", 2, 1024)]
    assert done.layers[1].forward_steps[0] == done.layers[1].backward_steps[-1]
    own = sum(map(sent, (done.layers[1].work.forward, done.layers[1].work.backward, done.layers[1].work.gradient)))
    assert done.layers[1].sent_bytes == pytest.approx(own + 2 * 512)


def test_backward_steps_have_the_terms_of_their_own_collective():
    """An all-gather forward is a reduce-scatter backward; calibrated clusters price them differently."""
    cluster = cluster_of(2, 2)
    slow = replace(cluster.links[1], collectives={Collective.REDUCE_SCATTER: (1.0, 1e6)}, groups={})
    cluster = replace(cluster, links=(cluster.links[0], slow))
    graph = LayerGraph("g", "row", (add("a", (1, 2)), add("b", (1, 2))), (("a", "b"),))
    # Without a spare digit, nodes and devices swap their digits through copies.
    strategies = {"a": Strategy(((1, 2, 1), (2, 1, 1))), "b": Strategy(((2, 1, 1), (1, 2, 1)))}
    done = assess(graph, cluster, Workload(2, 2), strategies).layers[1]
    assert brief(done.arriving) == [("all-gather", 2, 2 * 4), ("all-to-all", 2, 2 * 4)]
    there = sum(cluster.time(step) for step in done.arriving)
    back = sum(cluster.time(step.adjoint()) for step in done.arriving)
    assert back > 1 > 0.1 > there  # a message of a second
    assert done.communication_s == pytest.approx(there + back)


def test_memory_is_resident_memory_and_the_largest_buffer():
    graph = mlp([64, 32, 16])
    strategies = {"fc1": Strategy(((2, 2, 2),)), "fc2": Strategy(((4, 1, 2),))}
    done = assess(graph, cluster_of(8), Workload(64, 64), strategies)
    works = [layer.work for layer in done.layers]
    stays = sum(w.state_bytes + w.kept_bytes for w in works)
    assert done.memory_bytes == stays + max(w.buffer_bytes for w in works)
    assert works[0].buffer_bytes != works[1].buffer_bytes


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("wte", None, "layer 'wte' has no strategy"),
        ("wte", Strategy(((2, 2, 1),)), "is for (4,) devices per level, the cluster has (8,)"),
        ("wte", Strategy(((8, 1, 1),)), "does not fit (8,1,1) of wte, whose weight it shares"),
        ("h.0.attn", Strategy(((1, 8, 1),)), "h.0.attn (attention, 4 heads of 4): (1,8,1) does not divide its shape"),
        ("h.0.ln_1", Strategy(((2, 1, 4),)), "(2,1,4) does not divide its shape"),
        ("h.0.ln_1", Strategy(((2, 4, 1),), summa=True), "(2,4,1) summa does not divide its shape"),
        ("lm_head", Strategy(((2, 4, 1),)), "does not fit (2,4,1) of wte"),
        ("loss", Strategy(((2, 4, 1), (1, 1, 1))), "is for (8, 1) devices per level"),
    ],
)
def test_strategies_that_do_not_fit(name, strategy, message):
    graph = gpt(Transformer("gpt", 1, 16, 4, 8, 64))
    strategies = dict.fromkeys((layer.name for layer in graph.layers), Strategy(((2, 4, 1),)))
    strategies["lm_head"] = transposed(strategies["wte"])
    assess(graph, cluster_of(8), Workload(8, 8), strategies)
    strategies[name] = strategy
    with pytest.raises(UserError) as error:
        assess(graph, cluster_of(8), Workload(8, 8), strategies)
    assert message in str(error.value)
    with pytest.raises(UserError, match="does not divide a micro-batch of 3"):
        assess(graph, cluster_of(8), Workload(6, 3), dict.fromkeys(strategies, Strategy(((2, 4, 1),))))
