"""Norms in traced models, however they are written: what they compute says which they are."""

from __future__ import annotations

from typing import Any

import pytest

from autoddl.costmodel.graph import load_graph
from autoddl.extraction import extract
from autoddl.pipelines.runtime.load import is_available, load_oneflow

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)


def mean(x: Any) -> Any:
    return x.mean(-1, keepdim=True)


def norm_of(forward: Any, **attributes: Any) -> Any:
    """The graph of two linear layers with a norm between them, and the layer of the norm, or None if it is a program."""
    flow: Any = load_oneflow()

    class Norm(flow.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = flow.nn.Parameter(flow.ones(16)), flow.nn.Parameter(flow.zeros(16))
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, x: Any) -> Any:
            return forward(self, x)

    class Model(flow.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = flow.nn.Linear(8, 16), Norm(), flow.nn.Linear(16, 4)

        def forward(self, x: Any) -> Any:
            return self.last(self.norm(self.first(x)))

    graph = extract(Model(), (flow.zeros(4, 6, 8),))
    return graph, next((layer for layer in graph.layers if layer.kind == "norm"), None)


@pytest.mark.parametrize(
    ("statistics", "eps", "forward"),
    [
        (2, 1e-3, lambda m, x: (x - mean(x)) / load_oneflow().sqrt(mean((x - mean(x)) ** 2) + 1e-3) * m.w + m.b),
        # The scale comes first, and the variance is that of x itself.
        (2, 1e-5, lambda m, x: m.w * (x - mean(x)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() + m.b),
        (2, 1e-12, lambda m, x: m.w * (x - mean(x)) * (mean(x * x) - mean(x) ** 2 + 1e-12).rsqrt() + m.b),
        (1, 1e-6, lambda m, x: x * load_oneflow().rsqrt(mean(x * x) + 1e-6) * m.w),
        (1, 1e-5, lambda m, x: m.w * (x / load_oneflow().sqrt(mean(x.pow(2)) + 1e-5))),
        (2, 1e-6, lambda m, x: load_oneflow().nn.functional.layer_norm(x, (16,), m.w, m.b, 1e-6)),
    ],
)
def test_norms_say_what_they_add(statistics, eps, forward):
    _, norm = norm_of(forward)
    assert norm is not None
    assert norm.attributes["statistics"] == statistics and norm.eps == pytest.approx(eps, rel=1e-2)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (
            m.w * (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-6) + m.b
        ),  # eps is added to an unbiased deviation
        lambda m, x: m.w * (x - mean(x)) / (x.var(-1, unbiased=True, keepdim=True) + 1e-5).sqrt() + m.b,
        lambda m, x: m.w * (x - mean(x)),
        lambda m, x: m.w * x / x.abs().sum(-1, keepdim=True),
        lambda m, x: x / load_oneflow().sqrt(mean(x * x) + 1e-6) * (1 + m.w),  # the scale is computed
    ],
)
def test_what_is_no_norm_is_a_program(forward):
    graph, norm = norm_of(forward, eps=1e-6)
    assert norm is None and len(graph.layers) == 3


def test_what_a_module_says_is_not_said_twice(tmp_path):
    """Unless it says something else than it does; a graph that was saved says the same."""

    def forward(m: Any, x: Any) -> Any:
        return x * load_oneflow().rsqrt(mean(x * x) + 1e-4) * m.w

    assert norm_of(forward, eps=1e-4)[1].eps is None
    graph, norm = norm_of(forward, eps=1e-6)
    assert norm.eps == pytest.approx(1e-4)
    graph.save(tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph
