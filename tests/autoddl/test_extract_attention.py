"""Attention in traced models: what changes its scores is found, and what ranks cannot do is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoddl.costmodel.program import Scaled
from autoddl.extraction import extract
from autoddl.pipelines.runtime.load import is_available, load_oneflow
from autoddl.zoo import resolve_model

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)

ZOO = Path(__file__).parents[1] / "bench" / "zoo_models.py"


@pytest.mark.parametrize(
    ("name", "layer", "sizes", "changes"),
    [
        (
            "swin",
            "model.layers.0.blocks.1.attn",
            {"windows": 16},
            [("add", (1, 1, 2, 16, 16)), ("add", (1, 16, 1, 16, 16))],
        ),
        (
            "t5",
            "decoder.1.attention",
            {},
            [("multiply", (1,) * 5), ("add", (1, 1, 4, 12, 12)), ("fill", ("n", 1, 4, 12, 12))],
        ),
        ("t5", "decoder.1.cross", {}, [("multiply", (1,) * 5)]),
        (
            *("bert_with_mask", "layers.1.attention", {"interleaved": 1}),
            [("multiply", ("n", 1, 1, 16, 16)), ("subtract", ("n", 1, 1, 16, 16))],
        ),
    ],
)
def test_what_changes_scores_is_found(name, layer, sizes, changes):
    """Biases of relative positions, masks of shifted windows, of padding and of later positions; factors other than a root."""
    if name == "swin":
        pytest.importorskip("flowvision")
    found = resolve_model(f"{ZOO}:{name}")[layer]
    assert (
        found.kind == "attention"
        and found.attributes.items() >= {"changes": len(changes), "causal": 0, **sizes}.items()
    )
    shapes = [tuple("n" if isinstance(length, Scaled) else length for length in r.shape) for r in found.scores.results]
    assert list(zip([r.role for r in found.scores.results], shapes)) == changes
    assert len(found.parameters) == sum(role == "add" and shape[2] > 1 for role, shape in changes)


class Attention:
    """Makes models of one attention, given what happens to queries, scores and probabilities."""

    def __init__(self) -> None:
        self.flow: Any = load_oneflow()

    def __call__(self, **changed: Any) -> Any:
        flow = self.flow

        class Model(flow.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.q, self.k, self.v, self.o = (flow.nn.Linear(32, 32) for _ in range(4))
                self.rows, self.heads = flow.nn.Parameter(flow.ones(6, 6)), flow.nn.Parameter(flow.ones(3, 4))
                self.scale = flow.nn.Parameter(flow.ones(4, 1, 1))

            def forward(self, x: Any) -> Any:
                def change(part: str, y: Any) -> Any:
                    return changed[part](self, y) if part in changed else y

                q, k, v = (p(x).reshape(-1, 6, 4, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
                scores = flow.matmul(change("query", q), k.transpose(-2, -1)) / 8**0.5
                probabilities = change("probabilities", flow.softmax(change("scores", scores), dim=-1))
                return self.o(flow.matmul(probabilities, v).transpose(1, 2).reshape(-1, 6, 32))

        return extract(Model(), (flow.zeros(4, 6, 32),))


def test_gates_know_which_half_they_are():
    """Of two halves one has the activation; if both have one, or the half is scaled, it is no gate of a layer."""
    flow: Any = load_oneflow()

    def graph_of(function):
        class Model(flow.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = flow.nn.Linear(8, 32), flow.nn.Linear(16, 8)

            def forward(self, x: Any) -> Any:
                return self.down(function(*self.up(x).chunk(2, dim=-1)))

        return extract(Model(), (flow.zeros(4, 8),))

    gelu, silu = flow.nn.functional.gelu, flow.nn.functional.silu
    assert graph_of(lambda a, b: silu(a) * b)["up"].epilogue == ("silu", "mul")
    assert graph_of(lambda a, b: a * gelu(b))["up"].epilogue == ("gelu", "mul_last")
    assert graph_of(lambda a, b: a * b)["up"].epilogue == ("mul",)
    for function in (lambda a, b: a.tanh() * b.sigmoid(), lambda a, b: a * (3 * b)):
        graph = graph_of(function)
        assert graph["up"].epilogue == () and any(layer.kind == "opaque" for layer in graph.layers)


def test_plain_attention_changes_nothing():
    graph = Attention()()
    (layer,) = (layer for layer in graph.layers if layer.kind == "attention")
    assert layer.scores is None and "changes" not in layer.attributes


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("query", lambda m, q: q * m.scale, "scales or shifts its queries, keys or values by learned tensors"),
        (
            "query",
            lambda m, q: q.exp(),
            "computes its queries or keys from their rows in another way than by rotary positions",
        ),
        ("scores", lambda m, s: s + m.rows, "a learned bias of which no single column belongs to each head"),
        # Columns of the table are mixed before they are added to heads.
        (
            *("scores", lambda m, s: s + m.heads.sum(0).reshape(2, 2).transpose(0, 1).reshape(4, 1, 1)),
            "a learned bias of which no single column belongs to each head",
        ),
        ("scores", lambda m, s: s.exp(), "its attention applies exp to scores"),
        ("probabilities", lambda m, p: p * 2, "its attention applies scalar_mul to probabilities"),
        ("probabilities", lambda m, p: p.transpose(-2, -1), "its attention rearranges probabilities"),
    ],
)
def test_what_ranks_cannot_do_is_said(part, change, reason):
    """A program computes such attention, and a note says why."""
    graph = Attention()(**{part: change})
    assert not any(layer.kind == "attention" for layer in graph.layers)
    assert any(reason in note for note in graph.notes), graph.notes
