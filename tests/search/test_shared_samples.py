"""Plans whose ranks share samples or keys, against every assignment of strategies by hand."""

from __future__ import annotations

from itertools import product
from math import inf, prod

import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.kinds.attention import attention
from autoddl.costmodel.kinds.linear import linear
from autoddl.costmodel.layerwork import Place, layer_work
from autoddl.costmodel.pricing import PriceBook, edge_steps
from autoddl.costmodel.strategy import Strategy, enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import Transformer, llama, vgg
from autoddl.zoo.layers import GraphBuilder

POSITIONS, HEADS, KEYS, SIZE = 8, 4, 2, 8
WIDTH = (HEADS + 2 * KEYS) * SIZE


def toy(causal=True, kv_heads=KEYS):
    builder = GraphBuilder("toy", "sequence")
    width = (HEADS + 2 * kv_heads) * SIZE
    parts = [("q", HEADS * SIZE), ("k", kv_heads * SIZE), ("v", kv_heads * SIZE)]
    first = builder.add(linear("qkv", POSITIONS, 16, width, parts=parts))
    attend = attention("attend", POSITIONS, HEADS, SIZE, kv_heads=kv_heads, causal=causal)
    builder.chain(first, [attend, linear("out", POSITIONS, HEADS * SIZE, 16)])
    return builder.build()


def by_hand(levels, samples):
    """Every strategy of the three layers: (linear layers, attention)."""
    per_level = [[s for s in product(range(1, size + 1), repeat=3) if prod(s) == size] for size in levels]
    products, attending = [], []
    for splits in product(*per_level):
        p0, s = prod(one[0] for one in splits), prod(one[1] * one[2] for one in splits)
        # Whole samples, or samples that divide p0 while their ranks divide the positions.
        sharing = 1 if samples % p0 == 0 else p0 // samples if p0 % samples == 0 else 0
        if not sharing or POSITIONS % sharing:
            continue
        if 16 % s == 0 and WIDTH % s == 0:
            products.append(Strategy(splits))
        if any(one[2] > 1 for one in splits) or HEADS % s:
            continue
        copies = ()
        if s > KEYS:  # neighbours: inside the innermost level first
            inner = min(s // KEYS, splits[-1][1])
            copies = (inner,) if len(levels) == 1 else (s // KEYS // inner, inner)
        if sharing == 1:
            attending.append(Strategy(splits, key_copies=copies))
        elif POSITIONS % (2 * sharing) == 0:
            inner = min(sharing, splits[-1][0])
            positions = (inner,) if len(levels) == 1 else (sharing // inner, inner)
            ways = ("gather", "ring") if min(positions, default=1) == 1 or len(levels) == 1 else ("gather",)
            attending += [Strategy(splits, sequence=way, positions=positions, key_copies=copies) for way in ways]
    return products, attending


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("levels", [(4,), (2, 2), (8,), (2, 4)])
def test_the_plan_is_the_best_of_all_assignments(levels, samples):
    graph, cluster = toy(), load_cluster("gcp-a100").resized(*((1, *levels) if len(levels) == 1 else levels))
    products, attending = by_hand(levels, samples)
    workload = Workload(samples, samples, cluster.default_precision)
    assert PriceBook(graph, cluster, workload).space_size(samples) == len(products) ** 2 * len(attending)
    least = inf
    for one, attend, other in product(products, attending, products):
        strategies = {"qkv": one, "attend": attend, "out": other}
        least = min(least, assess(graph, cluster, workload, strategies).step_s)
    planned = make_plan(graph, cluster, Options(batch=samples, micro_batch=samples, recompute=False))
    assert planned.optimal and planned.cost == pytest.approx(least, rel=1e-9)


def test_a_sequence_of_128k_tokens_has_a_plan_on_64_devices():
    graph = llama(Transformer("long", 1, 4096, 32, 131072, 32000, kv_heads=8, tied=False))
    cluster = load_cluster("dgx-h100").resized(8, 8)
    planned = make_plan(graph, cluster, Options(batch=1))
    assert planned.optimal and planned.strategies["layers.0.self_attn"].num_devices == 64
    # The three channels of the first layer are whole on every rank, so 64 ranks share an image of 32 x 32 pixels, in tiles.
    pictures = vgg(11, image=32, classes=64, hidden=64)
    assert make_plan(pictures, cluster, Options(batch=1)).strategies["features.0"].tiles == (8, 8)
    assert make_plan(pictures, cluster, Options(batch=2)).strategies["features.0"].tiles == (32, 1)
    # 64 features of the classifier do not divide over 2,048 ranks, or over half of them.
    with pytest.raises(UserError, match="the nearest batch that works is 32"):
        make_plan(pictures, load_cluster("dgx-h100").resized(256, 8), Options(batch=1))


# ---- Prices by hand ------------------------------------------------------------------------------------------------------------


def work_of(strategy, samples=1, attention_="fused", **changes):
    layer = attention("attend", **{"sequence": 8, "heads": 4, "head_dim": 8, "kv_heads": 2, "causal": True, **changes})
    assert strategy in set(enumerate_strategies(layer, [prod(s) for s in strategy.splits]))
    workload = Workload(samples, samples, "float32", attention=attention_)
    return layer_work(layer, strategy, workload, samples, Place())


def test_what_gathering_sends_and_keeps():
    """4 ranks of 2 positions: keys and values of 2 heads of 8 float32 are 2 x 2 x 2 x 8 x 4 = 256 bytes, of all ranks 1,024."""
    strategy = Strategy(((4, 1, 1),), sequence="gather", positions=(4,))
    axis = Axis(4, 1)
    gather, scatter = Step(Collective.ALL_GATHER, axis, 1024.0), Step(Collective.REDUCE_SCATTER, axis, 1024.0)
    work = work_of(strategy)
    assert (work.forward, work.backward) == ((gather,), (gather, scatter))
    assert work.buffer_bytes == 2 * 1024
    # q, k and v of 2 positions, and a logarithm for each of 4 heads: 2 x 64 x 4 + 2 x 4 x 4 bytes.
    assert work.kept_bytes == 512 + 32
    # A quarter of the 36 pairs of 4 heads, each of 2 products of 8 features: 9 x 4 x 2 x 2 x 8 FLOPs.
    assert work.forward_work.core_flops == 1152
    dense = work_of(strategy, attention_="dense")
    assert (dense.forward, dense.backward) == ((gather,), (scatter,)) and dense.buffer_bytes == 0


def test_what_a_ring_sends():
    """Three shifts of 256 bytes forward; as many of keys and values backward, and of their gradients."""
    work = work_of(Strategy(((4, 1, 1),), sequence="ring", positions=(4,)))
    shift = Step(Collective.SHIFT, Axis(4, 1), 256.0)
    assert (work.forward, work.backward) == ((shift,) * 3, (shift,) * 6)
    assert shift.sent_bytes == 256 and shift.messages == 1 and shift.adjoint() == shift
    # On two levels the innermost ranks share samples: 2 samples, each on 4 ranks of a node.
    (step, *_) = work_of(Strategy(((2, 1, 1), (4, 1, 1)), sequence="ring", positions=(1, 4)), samples=2).forward
    assert step == Step(Collective.SHIFT, Axis(4, 1, 1), 256.0)


def test_what_copies_of_keys_send():
    """4 ranks, 2 keys: two ranks share a key and a value of 8 positions x 8 x 4 = 256 bytes each."""
    work = work_of(Strategy(((1, 4, 1),), key_copies=(2,)))
    axis = Axis(2, 2)  # features are cut innermost first
    assert work.forward == (Step(Collective.ALL_GATHER, axis, 512.0),)
    assert work.backward == (Step(Collective.REDUCE_SCATTER, axis, 512.0),)
    # A quarter of the input, and the half of key and value that the other rank had.
    assert work.kept_bytes == 8 * 64 * 4 / 4 + 8 * 4 + 256


def test_the_rank_with_the_most_pairs_counts():
    """With a window of 2 of 8 positions, 2 ranks: 1 + 2 + 2 + 2 pairs of positions 0, 1, 6, 7; 2 each of 2, 3, 4, 5."""
    shared = Strategy(((2, 1, 1),), sequence="gather", positions=(2,))
    assert work_of(shared, window=2).forward_work.core_flops == pytest.approx(8 * 4 * 4 * 8)
    assert work_of(Strategy(((1, 2, 1),)), window=2).forward_work.core_flops == 15 / 2 * 4 * 4 * 8


def test_rows_are_redistributed_where_ranks_share_samples():
    """One sample of 6 rows x 4 features of 4 bytes, from 2 ranks with 3 rows each to 2 with 2 features: half of 48 bytes move."""
    layer = linear("made", 6, 4, 4)
    workload = Workload(1, 1, "float32")
    (step,) = edge_steps(layer, Strategy(((2, 1, 1),)), Strategy(((1, 2, 1),)), workload, 1)
    assert (step.collective, step.sent_bytes) == (Collective.ALL_TO_ALL, 24)
