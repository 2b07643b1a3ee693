"""Kinds of layers: a kind that a user registers is planned like a built-in one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import graph_from_document
from autoddl.costmodel.kinds import registry
from autoddl.costmodel.kinds.kind import Body, LayerKind, LayerQuantities
from autoddl.costmodel.kinds.linear import Linear, linear
from autoddl.costmodel.kinds.loss import loss
from autoddl.costmodel.layer import Layer
from autoddl.costmodel.localwork import elementwise
from autoddl.costmodel.strategy import Strategy, enumerate_strategies
from autoddl.search.planner import Options, make_plan
from autoddl.zoo.layers import GraphBuilder


class Gate(LayerKind):
    """The product of the two halves of each row's features, which alternate."""

    name = "gate"
    attributes = ("features",)

    def lengths(self, layer: Layer) -> dict[str, int]:
        return {"features": layer.output_shape[-1]}

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        forward, backward = elementwise(3 * quantities.output_bytes), elementwise(5 * quantities.output_bytes)
        return Body((), (), forward, backward, kept_bytes=quantities.input_bytes)


def gate(name: str, rows: int, features: int) -> Layer:
    return Layer(name, "gate", (rows, 2 * features), (rows, features), {"features": features}, modules=(name,))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    registry.register(Gate())
    yield


def gated_model() -> GraphBuilder:
    builder = GraphBuilder("gated", "row")
    up = builder.add(linear("up", 1, 512, 1024))
    down = builder.add(linear("down", 1, 512, 512), builder.add(gate("gate", 1, 512), up))
    builder.add(loss("loss", 1, 512), down)
    return builder


def test_a_registered_kind_is_planned(registered: None) -> None:
    """Its work is in the plan: 3 and 5 times the bytes of its output, at the bandwidth of the memory, and a launch each."""
    graph, cluster = gated_model().build(), load_cluster("dgx-a100").resized(1, 4)
    planned = make_plan(graph, cluster, Options(batch=4096, micro_batch=4096))
    assessed = next(one for one in planned.assessment.layers if one.layer.kind == "gate")
    output_bytes = 4096 * 512 * 2 / 4
    by_hand = sum(cluster.elementwise_time(times * output_bytes) for times in (3, 5))
    assert assessed.compute_s == pytest.approx(by_hand)
    assert graph_from_document(graph.document(), "g.json").hash == graph.hash


def test_a_kind_says_how_it_may_be_split(registered: None) -> None:
    """Rows and features of a gate; never over p2, as it reduces nothing."""
    offered = {strategy.splits[0] for strategy in enumerate_strategies(gate("g", 1, 6), (4,))}
    assert offered == {(4, 1, 1), (2, 2, 1)}
    assert not Strategy(((1, 1, 2),)).divides(gate("g", 1, 6))
    assert not Strategy(((2, 2, 1),), summa=True).divides(gate("g", 1, 6))


def test_an_unregistered_kind() -> None:
    with pytest.raises(UserError, match="layer 'gate': kind 'gate' is not one of linear, embedding"):
        gated_model().build()


def test_attributes_are_checked_as_the_kind_says(registered: None) -> None:
    wrong = Layer("gate", "gate", (1, 12), (1, 6), {"features": 7})
    with pytest.raises(UserError, match="features is 7, its shapes say 6"):
        builder = GraphBuilder("wrong", "row")
        builder.add(wrong)
        builder.build()


def test_a_name_belongs_to_one_kind(registered: None) -> None:
    class Other(Linear):
        """Another layer with a name that is taken."""

    registry.register(Gate())
    with pytest.raises(UserError, match="a kind of layer called 'linear' is registered"):
        registry.register(Other())
