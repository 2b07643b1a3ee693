"""Rotary positions in traced models, however they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autoddl.extraction import extract
from autoddl.pipelines.runtime.load import is_available, load_oneflow

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)

ROWS, HEADS, SIZE = 12, 4, 8
Turn = Callable[[Any, Any, Any], Any]


def angles(base: float, features: int = SIZE) -> Any:
    """The angles of all positions and pairs."""
    flow: Any = load_oneflow()
    frequencies = base ** (-flow.arange(0, features, 2).float() / features)
    return flow.arange(ROWS).float().unsqueeze(1) * frequencies


def attention_of(turn: Turn, base: float = 10000.0, features: int = SIZE, **attributes: Any) -> Any:
    """Extract a model of one attention; ``turn`` gets its module, the queries or keys of all heads, and whether they are keys.

    Returns:
        The attributes of the layer, or the notes if there is none.
    """
    flow: Any = load_oneflow()

    class Model(flow.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (flow.nn.Linear(32, 32) for _ in range(4))
            self.register_buffer("angles", angles(base, features))
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, x: Any) -> Any:
            q, k, v = (p(x).reshape(-1, ROWS, HEADS, SIZE).transpose(1, 2) for p in (self.q, self.k, self.v))
            scores = flow.matmul(turn(self, q, False), turn(self, k, True).transpose(-2, -1)) / SIZE**0.5
            return self.o(flow.matmul(flow.softmax(scores, dim=-1), v).transpose(1, 2).reshape(-1, ROWS, 32))

    graph = extract(Model(), (flow.zeros(4, ROWS, 32),))
    found = [layer for layer in graph.layers if layer.kind == "attention"]
    return dict(found[0].attributes) if found else " ".join(graph.notes)


def halves(model: Any, x: Any, is_key: bool) -> Any:
    """Halves exchanged, with tables of both halves."""
    flow: Any = load_oneflow()
    table = flow.cat([model.angles, model.angles], dim=-1)
    half = x.shape[-1] // 2
    return x * table.cos() + flow.cat([-x[..., half:], x[..., :half]], dim=-1) * table.sin()


def joined_halves(model: Any, x: Any, is_key: bool) -> Any:
    flow: Any = load_oneflow()
    a, b = x.chunk(2, dim=-1)
    cosine, sine = model.angles.cos(), model.angles.sin()
    return flow.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def stacked_neighbours(model: Any, x: Any, is_key: bool) -> Any:
    flow: Any = load_oneflow()
    table = flow.repeat_interleave(model.angles, 2, dim=1)
    other = flow.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).reshape(*x.shape)
    return x * table.cos() + other * table.sin()


def complex_numbers(model: Any, x: Any, is_key: bool) -> Any:
    """The pairs of neighbours as complex numbers."""
    flow: Any = load_oneflow()
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    cosine, sine = model.angles.cos(), model.angles.sin()
    return flow.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1).reshape(*x.shape)


def of_first_features(turn: Turn) -> Turn:
    """The first half of the features of a head alone is turned."""

    def turned(model: Any, x: Any, is_key: bool) -> Any:
        return load_oneflow().cat([turn(model, x[..., :4], is_key), x[..., 4:]], dim=-1)

    return turned


def scaled(turn: Turn) -> Turn:
    return lambda model, x, is_key: turn(model, x, is_key) * SIZE**-0.25


@pytest.mark.parametrize(
    ("turn", "base", "features", "expected"),
    [
        (halves, 10000, SIZE, {}),
        (halves, 500, SIZE, {}),
        (halves, 1000000, SIZE, {}),
        (joined_halves, 10000, SIZE, {}),
        (stacked_neighbours, 10000, SIZE, {"rotary_neighbours": 1}),
        (complex_numbers, 700, SIZE, {"rotary_neighbours": 1}),
        (of_first_features(halves), 10000, 4, {"rotary_features": 4}),
        (of_first_features(complex_numbers), 300, 4, {"rotary_features": 4, "rotary_neighbours": 1}),
    ],
)
def test_rotary_positions_are_found_by_what_they_do(turn, base, features, expected):
    found = attention_of(turn, base, features)
    plain = {"heads": HEADS, "kv_heads": HEADS, "head_dim": SIZE, "causal": 0}
    assert found == {**plain, "rotary_base": base, **expected}


def test_factors_of_turned_queries_are_factors_of_scores():
    """SIZE^-1/4 twice, and once more SIZE^-1/2: not the root that attention divides by."""
    assert attention_of(scaled(halves))["changes"] == 1
    assert "changes" not in attention_of(halves)


def test_a_base_that_the_module_says_is_not_said_twice():
    assert "rotary_base" not in attention_of(halves, 500.0, rope_theta=500.0)
    assert attention_of(halves, 500.0, rope_theta=10000.0)["rotary_base"] == 500
    assert attention_of(lambda model, x, is_key: x, rope_theta=10000.0)["rotary_base"] == 0


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (lambda m, x, is_key: halves(m, x, is_key) if is_key else x, "turns queries in another way than keys"),
        (lambda m, x, is_key: x * m.angles[:, :1], "computes its queries or keys from their rows in another way"),
        (lambda m, x, is_key: x.exp(), "computes its queries or keys from their rows in another way"),
    ],
)
def test_what_turns_in_another_way_is_said(turn, reason):
    found = attention_of(turn)
    assert isinstance(found, str) and reason in found, found


@pytest.mark.parametrize("change", [lambda a: a + 1.0, lambda a: a * a, lambda a: a / 2.0])
def test_angles_are_those_of_the_formula(change):
    """Positions that begin elsewhere, angles of squared positions, and positions that are divided by a number."""

    def turn(model: Any, x: Any, is_key: bool) -> Any:
        model.angles = change(angles(10000.0))
        return joined_halves(model, x, is_key)

    found = attention_of(turn)
    assert isinstance(found, str) and "in another way than by rotary positions" in found, found
