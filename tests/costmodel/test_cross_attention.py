"""Cross attention: its pairs, FLOPs and sizes by hand."""

from __future__ import annotations

from autoddl.costmodel.kinds.attention import attention, pairs_of


def test_pairs_are_rows_times_key_rows():
    """3 queries, 5 keys: 15 pairs. 2 heads of 4: 2 products of 2 * 4 FLOPs per pair and head, 15 * 2 * 16 = 480."""
    layer = attention("attend", 3, 2, 4, causal=False, key_rows=5)
    assert pairs_of(layer) == 15 and layer.flops == 480
    # q: 3 rows of 8; k and v: 5 rows of 8 each
    assert layer.input_elements == 3 * 8 + 2 * 5 * 8 and layer.output_shape == (3, 8)
    assert layer.kept_elements == 2 * 15


def test_equal_rows_cost_what_attention_costs():
    cross, plain = attention("a", 4, 2, 8, causal=False, key_rows=4), attention("a", 4, 2, 8, causal=False)
    assert (pairs_of(cross), cross.flops, cross.input_elements) == (pairs_of(plain), plain.flops, plain.input_elements)
