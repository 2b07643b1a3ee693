"""Attention on one rank, dense and block by block, against numpy in double precision and against each other."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.kinds.attention import attention, pairs_of
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.runtime.kinds.registry import layer_program
from autoddl.pipelines.runtime.load import is_available
from autoddl.zoo.layers import GraphBuilder, linear

pytestmark = pytest.mark.skipif(not is_available(), reason="OneFlow is not installed")


def expected(x: np.ndarray, dy: np.ndarray, heads: tuple[int, int, int], causal: bool, window: int | None) -> Any:
    """Attention and the gradient of its input by their definition, the number of pairs, and the largest score.

    The heads are (groups, query heads of each, features).
    """
    groups, group_heads, head_dim = heads
    samples, sequence, _ = x.shape
    x = x.astype(np.float64).reshape(samples, sequence, groups, group_heads + 2, head_dim)
    dy = dy.astype(np.float64).reshape(samples, sequence, groups, group_heads, head_dim)
    position = np.arange(sequence)
    distance = position[:, None] - position
    seen = np.ones_like(distance, dtype=bool) if not causal else distance >= 0
    if window is not None:
        seen &= distance < window
    y, dx, scale, largest = np.zeros_like(dy), np.zeros_like(x), 1 / math.sqrt(head_dim), 0.0
    for group in range(groups):
        k, v = x[:, :, group, group_heads], x[:, :, group, group_heads + 1]
        for head in range(group_heads):
            q, g = x[:, :, group, head], dy[:, :, group, head]
            scores = np.where(seen, np.einsum("sid,sjd->sij", q, k) * scale, -np.inf)
            largest = max(largest, float(np.abs(scores[:, seen]).max()))
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            y[:, :, group, head] = p @ v
            dp = np.einsum("sid,sjd->sij", g, v)
            ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
            dx[:, :, group, head] = ds @ k * scale
            dx[:, :, group, group_heads] += ds.transpose(0, 2, 1) @ q * scale
            dx[:, :, group, group_heads + 1] += p.transpose(0, 2, 1) @ g
    return y.reshape(samples, sequence, -1), dx.reshape(samples, sequence, -1), int(seen.sum()), largest


def attended(x: np.ndarray, dy: np.ndarray, heads: tuple[int, int, int], wide: str = "float32", **options: Any) -> Any:
    """The same by `attend`."""
    from autoddl.pipelines.runtime.attending import attend
    from autoddl.pipelines.runtime.load import load_oneflow

    flow: Any = load_oneflow()
    leaf = flow.tensor(x, requires_grad=True)
    ranks: Any = SimpleNamespace(backend=SimpleNamespace(master=getattr(flow, wide)))
    y = attend(leaf, ranks, *heads, **options)
    y.backward(flow.tensor(dy))
    return y.numpy(), leaf.grad.numpy()


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def sample(seed: int, samples: int, sequence: int, heads: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    groups, group_heads, head_dim = heads
    rng = np.random.default_rng(seed)
    sizes = groups * (group_heads + 2) * head_dim, groups * group_heads * head_dim
    x, dy = (rng.standard_normal((samples, sequence, size)).astype(np.float32) for size in sizes)
    return x * np.float32(rng.choice([0.3, 1.0, 4.0])), dy


@settings(max_examples=30)  # OneFlow takes a quarter of a second for each
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 3),
    sequence=st.integers(1, 40),
    block=st.integers(1, 48),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 8])),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 48),
    wide=st.sampled_from(["float32", "float64"]),
)
def test_blocks_of_any_size_give_attention_and_its_gradient(
    seed, samples, sequence, block, heads, causal, window, wide
):
    """Also where a block has rows without any pair, and with wider statistics, as on CPU ranks in mixed precision."""
    from autoddl.pipelines.runtime import attending, blockwise

    window = window if causal else None
    x, dy = sample(seed, samples, sequence, heads)
    wanted_y, wanted_dx, num_pairs, largest = expected(x, dy, heads, causal, window)
    options = {} if window is None else {"window": window}
    assert num_pairs == pairs_of(attention("a", sequence, heads[0] * heads[1], heads[2], causal=causal, **options))

    def in_blocks(*arguments):
        return blockwise.attend_blockwise(*arguments, block=block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attending, "attend_blockwise", in_blocks)
        for fused in (False, True):
            y, dx = attended(x, dy, heads, wide, causal=causal, window=window, is_fused=fused)
            # Single precision rounds a score of 1 by 6e-8, and the exponential of a score has that error relatively.
            assert error(y, wanted_y) < 2e-6 + 4e-7 * largest, fused
            assert error(dx, wanted_dx) < 4e-6 + 4e-7 * largest, fused


def test_blocks_that_the_mask_discards_are_not_visited():
    """Of 4 x 4 blocks of a causal mask 10; of them 7 with a window of one block and a position."""
    from autoddl.pipelines.runtime.blockwise import _blocks, _visited

    blocks = _blocks(((0, 16),), 4)

    def visited(causal, window):
        return [[other.start for other in _visited(one, blocks, causal, window)] for one in blocks]

    assert visited(True, None) == [[0], [4, 0], [8, 4, 0], [12, 8, 4, 0]]
    assert visited(True, 5) == [[0], [4, 0], [8, 4], [12, 8]]
    # With 6, the first query of a block sees 5 positions before it, those of two blocks; with 1, none.
    assert visited(True, 1) == [[0], [4], [8], [12]]
    assert visited(True, 6) == [[0], [4, 0], [8, 4, 0], [12, 8, 4]]
    assert visited(False, None) == [[0, 4, 8, 12]] * 4


def test_both_forms_are_equal_in_single_precision_at_usual_scores():
    """Blocks of 256 of 600 positions, with and without a window."""
    heads = (2, 2, 16)
    x, dy = (np.random.default_rng(5).standard_normal((2, 600, size)).astype(np.float32) for size in (128, 64))
    for options in ({"causal": True}, {"causal": True, "window": 300}, {"causal": False}):
        dense, fused = (attended(x, dy, heads, is_fused=is_fused, **options) for is_fused in (False, True))
        assert error(fused[0], dense[0]) < 1e-6
        assert error(fused[1], dense[1]) < 1e-6


def test_rotary_positions_and_scores_of_great_size():
    """Scores of some hundreds overflow exponentials that are not shifted; both forms shift them."""
    heads = (2, 2, 8)
    x, dy = sample(3, 2, 300, heads)
    dense, fused = (
        attended(12 * x, dy, heads, causal=True, theta=1e4, is_fused=is_fused) for is_fused in (False, True)
    )
    for found, wanted in zip(fused, dense):
        assert np.isfinite(found).all()
        assert error(found, wanted) < 1e-5


@pytest.mark.parametrize(
    ("word", "dropout", "fused"), [("fused", False, True), ("dense", False, False), ("fused", True, False)]
)
def test_the_word_of_the_workload_and_dropout_decide(word, dropout, fused):
    builder = GraphBuilder("attends", "row")
    qkv = builder.add(linear("qkv", 8, 16, 48))
    builder.add(attention("attend", 8, 2, 8, causal=True, window=3, dropout=dropout), qkv)
    graph = builder.build()
    program = layer_program(graph, graph["attend"], Strategy(((1, 1, 1),)), False, word)
    (call,) = [statement for statement in program.statements if statement.function == "attend"]
    assert call.options.get("is_fused", False) is fused
    assert ("drop" in call.options) is dropout
    assert call.options["window"] == 3
    # An exported file has functions and variables in one place.
    from autoddl.pipelines.runtime.replay import functions

    variables = {name for statement in program.statements for name in statement.result}
    assert variables.isdisjoint(functions.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "least", "most"), [("blocks", 0.5, 2.5), ("none", 0.8, 1.5)])
def test_a_block_keeps_about_what_is_priced(way, least, most):
    """Each of 6 further blocks of a GPT: 2 MiB of its input alone, or 32 MiB. Slow: a process for each number of blocks."""
    kept, priced = [], []
    for number in (2, 8):
        # Freed memory is returned to the system at once.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, str(Path(__file__).with_name("kept_memory_job.py")), way, str(number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
        found, of_price = map(float, done.stdout.split())
        kept.append(found)
        priced.append(of_price)
    ratio = (kept[1] - kept[0]) / (priced[1] - priced[0])
    assert least < ratio < most, (way, kept, priced)
