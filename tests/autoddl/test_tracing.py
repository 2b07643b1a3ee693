"""What a trace says of a module: its own classes, lists of parameters, and where gradients end."""

from __future__ import annotations

from typing import Any

import pytest

from autoddl.extraction import extract
from autoddl.pipelines.runtime.load import is_available, load_oneflow

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)


def module_of(forward: Any, **parts: Any) -> Any:
    """A module with these parts."""
    flow: Any = load_oneflow()

    class Model(flow.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x: Any) -> Any:
            return forward(self, x)

    return Model()


def test_parts_are_instances_of_their_classes():
    """A forward pass that looks at the classes of its parts, as HRNet does, and the classes are as before afterwards."""
    nn: Any = load_oneflow().nn
    seen = []

    def forward(model, x):
        seen.append([isinstance(part, nn.Linear) for part in (model.first, model.last)])
        return model.first(x) if isinstance(model.last, nn.Identity) else model.last(x)

    model = module_of(forward, first=nn.Linear(8, 4), last=nn.Identity())
    assert [layer.name for layer in extract(model, (load_oneflow().zeros(4, 8),)).layers] == ["first"]
    assert seen and all(kinds == [True, False] for kinds in seen)
    assert type(model.last) is nn.Identity


def test_lists_of_parameters_are_tensors():
    flow: Any = load_oneflow()

    def forward(model, x):
        for weight in model.weights:
            x = x + flow.matmul(x, weight)
        return x

    model = module_of(forward, weights=flow.nn.ParameterList([flow.nn.Parameter(flow.randn(8, 8)) for _ in range(2)]))
    graph = extract(model, (flow.zeros(4, 8),))
    assert {p.name for layer in graph.layers for p in layer.parameters} == {"weights.0", "weights.1"}


def test_parts_in_plain_lists_are_those_of_the_model():
    """Parts that a module keeps in a list, and registers, too: OneFlow replaces the registered ones alone (GENet)."""
    flow: Any = load_oneflow()
    layers = [flow.nn.Linear(8, 8), flow.nn.Linear(8, 4)]
    model = module_of(
        lambda model, x: model.layers[1](model.layers[0](x)), kept=flow.nn.ModuleList(layers), layers=layers
    )
    graph = extract(model, (flow.zeros(4, 8),))
    assert [(layer.name, layer.kind) for layer in graph.layers] == [("kept.0", "linear"), ("kept.1", "linear")]
    assert model.layers[0](flow.zeros(4, 8)).is_lazy is False  # calls are as they were


def test_sequences_have_slices():
    nn: Any = load_oneflow().nn
    model = module_of(
        lambda model, x: model.parts[2:](model.parts[:2](x)) + sum(part(x) for part in model.list[1:]),
        parts=nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)),
        list=nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]),
    )
    layers = extract(model, (load_oneflow().zeros(4, 8),)).layers
    assert [layer.name for layer in layers if layer.kind == "linear"] == ["parts.0", "parts.2", "list.1", "list.2"]


def test_norms_of_whole_tensors_are_sums_of_squares():
    """OneFlow has an operator of its own for them where there are no gradients."""
    flow: Any = load_oneflow()

    def forward(model, x):
        with flow.no_grad():
            norm = (2 * model.layer.weight).norm()
        return model.layer(x).mean() * norm

    (loss,) = extract(module_of(forward, layer=flow.nn.Linear(8, 4)), (flow.zeros(4, 8),)).layers
    kinds = [call.kind for call in loss.program.calls]
    assert "square" in kinds and "sqrt" in kinds and "sqrt_square_sum" not in kinds


def test_a_program_reads_a_layer_once():
    """Of an output and a view of it, which two parts of a loss read, one layout is changed, and it is sent once."""
    flow: Any = load_oneflow()

    def forward(model, x):
        y = model.layer(x)
        return flow.log_softmax(y.reshape(-1, 2), dim=-1).mean() + y.std(dim=1).mean()

    graph = extract(module_of(forward, layer=flow.nn.Linear(8, 4)), (flow.zeros(4, 8),))
    (loss,) = (layer for layer in graph.layers if layer.kind == "opaque")
    assert graph.inputs(loss.name) == ("layer",)
    assert {source.index for source in loss.program.sources if source.origin == "layer"} == {0}


@pytest.mark.parametrize("is_named", [False, True])
def test_a_forward_pass_may_go_through_its_parameters(is_named):
    """A penalty on all weights, also on those of parts and of lists; the reason of the products is that they are read twice."""
    flow: Any = load_oneflow()

    def forward(model, x):
        listed = [p for n, p in model.named_parameters() if "weight" in n] if is_named else list(model.parameters())
        return model.last(model.first(x)).mean() + sum((p * p).sum() for p in listed)

    parts = {
        "first": flow.nn.Linear(8, 8),
        "last": flow.nn.Sequential(flow.nn.ReLU(), flow.nn.Linear(8, 4, bias=False)),
    }
    others = flow.nn.ParameterList([flow.nn.Parameter(flow.ones(4))])
    graph = extract(module_of(forward, **parts, others=others), (flow.zeros(4, 8),))
    read = {p.name for layer in graph.layers for p in layer.parameters if p.tied_to is None}
    assert read == {"first.weight", "last.1.weight", "first.bias", *(() if is_named else ("others.0",))}
    assert any("its weight is read by another part of the model, too" in note for note in graph.notes)


def test_gradients_end_where_a_model_ends_them():
    """At ``detach()``, and at the results of ``no_grad()`` that are read outside; integers have no gradients."""
    flow: Any = load_oneflow()

    def forward(model, x):
        y = model.layer(x)
        with flow.no_grad():
            scale = (y * y).sum(dim=1, keepdim=True)
            inside = scale + 1
        places = y.argmax(dim=1).detach()
        return (y / inside + y.detach()) * places.unsqueeze(1)

    graph = extract(module_of(forward, layer=flow.nn.Linear(8, 8)), (flow.zeros(4, 8),))
    kinds = [call.kind for layer in graph.layers if layer.program for call in layer.program.calls]
    assert kinds.count("detach") == 2 and "hardtanh" not in kinds and "constant" not in kinds
    assert flow.ones(2, requires_grad=True).detach().requires_grad is False  # OneFlow is as it was
    with flow.no_grad():
        assert not (2 * flow.ones(2, requires_grad=True)).requires_grad


def test_weights_may_be_stored_in_either_order():
    """(in, out) is a linear layer, too; products with a matrix and with its transposition share no layer's weight."""
    flow: Any = load_oneflow()

    def forward(model, x):
        return flow.matmul(flow.relu(flow.matmul(x, model.first) + model.bias), model.last.t())

    parts = {name: flow.nn.Parameter(flow.randn(8, 16)) for name in ("first", "last")}
    graph = extract(module_of(forward, **parts, bias=flow.nn.Parameter(flow.zeros(16))), (flow.zeros(4, 8),))
    assert [(layer.kind, layer.attributes.get("transposed", 0)) for layer in graph.layers] == [
        ("linear", 1),
        ("linear", 0),
    ]
    assert [[p.shape for p in layer.parameters] for layer in graph.layers] == [[(8, 16), (16,)], [(8, 16)]]

    shared = module_of(lambda m, x: flow.matmul(flow.relu(flow.matmul(x, m.first)), m.first.t()), first=parts["first"])
    assert {layer.kind for layer in extract(shared, (flow.zeros(4, 8),)).layers} == {"opaque"}
