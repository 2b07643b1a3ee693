"""Which elements each rank holds: products computed shard by shard in numpy, free of OneFlow."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy, enumerate_strategies, transposed
from autoddl.pipelines.runtime.comm.layouts import (
    Layout,
    gathered,
    group,
    layout_of,
    matrix_indices,
    scattered,
    table_indices,
)
from autoddl.pipelines.runtime.comm.parameter_layouts import are_stored_separately, product_order
from autoddl.pipelines.runtime.kinds.registry import parameter_layouts
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.layers import GraphBuilder, attention, embedding, linear
from autoddl.zoo.transformers import Transformer, gpt, llama

LEVELS = [(2,), (4,), (6,), (8,), (12,), (2, 2), (2, 4), (4, 2), (3, 4), (2, 2, 2)]


def weight_indices(layer, strategy):
    """The indices of the weight of a linear layer or of the table of an embedding on each rank, without product order."""
    layout, attributes = layout_of(layer, strategy), layer.attributes
    if layer.kind == "embedding":
        return table_indices(attributes["vocabulary"], attributes["features"], layout)
    return matrix_indices(attributes["out_features"], attributes["in_features"], layout)


def strategies_of(layer, summa=False):
    """Every (level sizes, strategy) that divides a layer, drawn from."""
    choices = [
        [strategy for strategy in enumerate_strategies(layer, levels, summa) if strategy.summa == summa]
        for levels in LEVELS
    ]
    return st.sampled_from([some for some in choices if some]).flatmap(st.sampled_from)


WIDE = mlp((48, 96)).layers[0]


def reduce_scatter(values, axes):
    """Along the last dimension, over axes of several levels, the innermost first: what the runtime does, in numpy."""
    for axis in reversed(axes):
        summed = [sum(values[other] for other in group(axis, rank)) for rank in range(len(values))]
        values = [np.split(s, axis.size, axis=-1)[axis.coordinate(rank)] for rank, s in enumerate(summed)]
    return values


def all_gather(values, axes, dim):
    for axis in axes:
        values = [np.concatenate([values[other] for other in group(axis, r)], axis=dim) for r in range(len(values))]
    return values


@settings(deadline=None, max_examples=150)
@given(strategies_of(WIDE))
def test_a_product_from_canonical_input_to_canonical_output(strategy):
    rng = np.random.default_rng(0)
    samples = 2 * strategy.p0
    x, w = rng.standard_normal((samples, 48)), rng.standard_normal((96, 48))
    lying, n = strategy.activations, strategy.num_devices
    held = weight_indices(WIDE, strategy)
    local = all_gather([x[lying.slices(r, x.shape)] for r in range(n)], strategy.axes(1), 1)
    partial = [local[r] @ w[np.ix_(held.rows[r], held.columns[r])].T for r in range(n)]
    for r, y in enumerate(reduce_scatter(partial, strategy.axes(2))):
        np.testing.assert_allclose(y, (x @ w.T)[lying.slices(r, (samples, 96))], atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(strategies_of(WIDE, summa=True))
def test_summa_gathers_both_operands(strategy):
    rng = np.random.default_rng(0)
    samples = 2 * strategy.p0
    x, w = rng.standard_normal((samples, 48)), rng.standard_normal((96, 48))
    lying, n = strategy.activations, strategy.num_devices
    held = weight_indices(WIDE, strategy)
    local = all_gather([x[lying.slices(r, x.shape)] for r in range(n)], strategy.axes(1), 1)
    shards = [w[np.ix_(held.rows[r], held.columns[r])] for r in range(n)]
    assert {shard.size for shard in shards} == {w.size // n}  # nothing is held twice
    whole = all_gather(shards, strategy.axes(0), 1)
    for r in range(n):
        np.testing.assert_allclose(local[r] @ whole[r].T, (x @ w.T)[lying.slices(r, (samples, 96))], atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_an_embedding_is_a_product_of_one_hot_rows_and_lies_like_the_transposed_layer(data):
    table, head = embedding("wte", 4, 96, 48), linear("lm_head", 4, 48, 96)
    strategy = data.draw(strategies_of(table).filter(lambda s: transposed(s).divides(head)))
    held, other = weight_indices(table, strategy), weight_indices(head, transposed(strategy))
    for r in range(strategy.num_devices):
        assert np.array_equal(held.rows[r], other.rows[r]) and np.array_equal(held.columns[r], other.columns[r])
    w = np.random.default_rng(0).standard_normal((96, 48))
    tokens = np.arange(2 * strategy.p0) * 37 % 96
    lying, n = strategy.activations, strategy.num_devices
    one_hot = np.eye(96)[tokens]
    rows = [lying.slices(r, (len(tokens), 48))[0] for r in range(n)]
    partial = [one_hot[rows[r]][:, held.rows[r]] @ w[np.ix_(held.rows[r], held.columns[r])] for r in range(n)]
    for r, y in enumerate(reduce_scatter(partial, strategy.axes(2, embedding=True))):
        np.testing.assert_allclose(y, w[tokens][lying.slices(r, (len(tokens), 48))], atol=1e-12)


def test_a_small_vocabulary_is_cut_over_p2_alone():
    held = weight_indices(embedding("types", 4, 2, 48), Strategy(((1, 4, 2),)))
    assert [list(rows) for rows in held.rows] == [[0]] * 4 + [[1]] * 4


def test_scattered_undoes_gathered():
    axes = (Axis(2, 6), Axis(3, 2))
    held = tuple(np.array([rank]) for rank in range(12))
    assert list(gathered(held, axes)[0]) == [0, 6, 2, 8, 4, 10]
    assert [list(indices) for indices in scattered(gathered(held, axes), axes)] == [[rank] for rank in range(12)]


def test_blocks_of_a_length_that_does_not_divide():
    with pytest.raises(UserError, match="length 10 does not divide into 4 slices"):
        Layout((1, 4, 1)).blocks(10)


# ---- Product order -------------------------------------------------------------------------------------------------------


def test_heads_of_query_key_and_value_stand_together():
    builder = GraphBuilder("toy", "sequence")
    builder.chain(
        builder.add(linear("qkv", 3, 8, 16, parts=[("q", 8), ("k", 4), ("v", 4)])),
        [attention("attend", 3, heads=4, head_dim=2, kv_heads=2, causal=True)],
    )
    graph = builder.build()
    order = product_order(graph, graph["qkv"])
    # Query heads 0 and 1 with a half each of key and value 0, query heads 2 and 3 with a half each of 1.
    assert list(order.rows) == [0, 1, 8, 12, 2, 3, 9, 13, 4, 5, 10, 14, 6, 7, 11, 15]
    assert order.num_groups == 4
    # On up to four ranks every module keeps its own weight; on eight a block is half a group, and they are stored as one.
    assert are_stored_separately(order, Strategy(((1, 4, 1),))) and not are_stored_separately(
        order, Strategy(((1, 8, 1),))
    )
    apart = parameter_layouts(graph, graph["qkv"], Strategy(((1, 2, 1),)))
    assert [layout.name for layout in apart] == ["q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias"]
    assert [list(layout.indices[0][1]) for layout in apart[:3]] == [[4, 5, 6, 7], [2, 3], [2, 3]]
    one = parameter_layouts(graph, graph["qkv"], Strategy(((1, 8, 1),)))
    assert [layout.name for layout in one] == ["q+k+v.weight", "q+k+v.bias"]
    assert one[0].sources == (("q.weight", 8), ("k.weight", 4), ("v.weight", 4))
    # Eight ranks have the blocks 0, 4, 2, 6, 1, 5, 3, 7 of product order: the innermost axis takes the first digit.
    blocks = [[0, 1], [4, 5], [2, 3], [6, 7], [8, 12], [10, 14], [9, 13], [11, 15]]
    assert [list(rows) for rows in one[0].indices[0]] == blocks


def test_gate_and_up_alternate():
    graph = llama(Transformer("llama", 1, 8, 2, 4, 16, intermediate=4, activation="silu", tied=False))
    order = product_order(graph, graph["layers.0.mlp.gate_proj+up_proj"])
    assert list(order.rows) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_attention_shares_its_input_with_nobody():
    builder = GraphBuilder("toy", "sequence")
    builder.add(linear("qkv", 3, 8, 24))
    builder.add(attention("attend", 3, heads=4, head_dim=2, causal=True), "qkv")
    builder.add(linear("other", 3, 24, 8), "qkv")
    graph = builder.build()
    with pytest.raises(UserError, match=r"qkv \(linear, 8 -> 24\): attention and 1 other layers read it"):
        product_order(graph, graph["qkv"])


# ---- Parameters ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_element_of_every_parameter_is_held_as_often_as_priced(data):
    graph = gpt(Transformer("gpt", 1, 48, 4, 8, 96))
    layer = data.draw(st.sampled_from([layer for layer in graph.layers if layer.parameters]))
    strategy = data.draw(strategies_of(layer))
    for layout in parameter_layouts(graph, layer, strategy):
        count = np.zeros(layout.shape, int)
        for rank in range(strategy.num_devices):
            value = np.zeros(layout.shape)
            layout.put(value, np.ones(layout.local_shape()), rank)
            count += value.astype(int)
        assert set(np.unique(count)) == {strategy.p0}
        axes = Counter(axis for of_dim in layout.axes for axis in of_dim)
        assert (
            max(axes.values(), default=1) == 1
            and prod(axis.size for axis in axes) == strategy.num_devices // strategy.p0
        )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_values_come_back_from_shards(data):
    graph = gpt(Transformer("gpt", 1, 48, 4, 8, 96))
    layer = data.draw(st.sampled_from([layer for layer in graph.layers if layer.parameters]))
    strategy = data.draw(strategies_of(layer))
    for layout in parameter_layouts(graph, layer, strategy):
        value = np.arange(prod(layout.shape)).reshape(layout.shape)
        shards = [layout.take(value, rank) for rank in range(strategy.num_devices)]
        for dim, axes in enumerate(layout.axes):
            shards = all_gather(shards, axes, dim)
        for rank, shard in enumerate(shards):
            found = np.empty_like(value)
            layout.gathered().put(found, shard, rank)
            assert np.array_equal(found, value)
