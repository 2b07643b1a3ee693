"""Layers out of operators: small graphs of operators written by hand. Norms alone need OneFlow, which runs them on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.program import Scaled
from autoddl.extraction.blocks import mark_blocks
from autoddl.extraction.gather import gather
from autoddl.extraction.norms import find_norms
from autoddl.extraction.operators import ModelTensor, Operator, OperatorGraph, flops
from autoddl.pipelines.runtime.load import is_available
from autoddl.zoo.layers import add, linear, norm

NEEDS_ONEFLOW = pytest.mark.skipif(not is_available(), reason=is_available().reason)
BATCH = 2


class Tape:
    """Operators written down one after the other."""

    def __init__(self, **inputs: tuple[int, ...]):
        self.operators: list[Operator] = []
        self.shapes = dict(inputs)
        self.inputs = tuple(inputs)
        self.variables: dict[str, ModelTensor] = {}
        self.aliases: dict[str, tuple[tuple[str, str], ...]] = {}

    def parameter(self, path: str, shape: tuple[int, ...], trained: bool = True) -> str:
        name = f"{path}/out"
        self.variables[name] = ModelTensor(path, shape, trained)
        self.aliases[name] = (tuple(path.rsplit(".", 1)),)
        self.shapes[name] = shape
        return name

    def op(self, kind: str, shape: tuple[int, ...], path: str = "", *, attributes=None, **arguments: str) -> str:
        name = f"{path}-{kind}-{len(self.operators)}"
        self.operators.append(
            Operator(name, kind, path, {k: (v,) for k, v in arguments.items()}, {"out": (name,)}, attributes or {})
        )
        self.shapes[name] = shape
        return name

    def graph(self, *outputs: str, leaves: Sequence[str] = ()) -> OperatorGraph:
        # The first dimension of everything but parameters is the batch.
        dims = {
            name: shape if name in self.variables else (Scaled(shape[0] // BATCH), *shape[1:])
            for name, shape in self.shapes.items()
        }
        return OperatorGraph(
            data=self.inputs,
            dims=dims,
            operators=tuple(self.operators),
            shapes=self.shapes,
            inputs=self.inputs,
            variables=self.variables,
            outputs=outputs,
            batch=BATCH,
            aliases=self.aliases,
            parameters=tuple(variable.name for variable in self.variables.values() if variable.trained),
            leaves=frozenset(leaves),
        )


def test_bias_and_activation_belong_to_the_product():
    tape = Tape(x=(BATCH, 3, 8))
    weight = tape.parameter("fc.weight", (4, 8))
    h = tape.op("broadcast_matmul", (BATCH, 3, 4), "fc", a="x", b=weight, attributes={"transpose_b": True})
    h = tape.op("broadcast_add", (BATCH, 3, 4), "fc", x=h, y=tape.parameter("fc.bias", (4,)))
    h = tape.op("gelu", (BATCH, 3, 4), x=h)
    graph = gather(tape.graph(h, leaves=["fc"]), "model")
    assert graph.layers == (linear("fc", 3, 8, 4, epilogue=("gelu",)),)
    assert graph.sample == "sequence" and graph.notes == ()


def test_operators_on_data_alone_are_no_layers():
    tape = Tape(x=(BATCH, 8))
    scaled = tape.op("scalar_mul", (BATCH, 8), x="x")
    weight = tape.parameter("fc.weight", (4, 8))
    h = tape.op("matmul", (BATCH, 4), "fc", a=scaled, b=weight, attributes={"transpose_b": True})
    graph = gather(tape.graph(h, leaves=["fc"]), "model")
    (layer,) = graph.layers
    assert replace(layer, program=None) == linear("fc", 1, 8, 4, bias=False) and graph.sample == "row"
    assert [call.kind for call in layer.program.calls] == ["scalar_mul"]  # what it reads


def test_nothing_to_plan_is_refused():
    tape = Tape(x=(BATCH, 8))
    with pytest.raises(UserError, match="no operator of model depends on both"):
        gather(tape.graph(tape.op("relu", (BATCH, 8), x="x")), "model")


def test_unknown_operators_of_one_module_are_one_opaque_layer():
    tape = Tape(x=(BATCH, 8))
    weight = tape.parameter("fc.weight", (8, 8))
    h = tape.op("matmul", (BATCH, 8), "fc", a="x", b=weight, attributes={"transpose_b": True})
    h = tape.op("narrow", (BATCH, 5), "odd", x=h, attributes={"dim": 1, "start": 0, "length": 5})
    h = tape.op("roll", (BATCH, 5), "odd", x=h, attributes={"dims": (1,), "shifts": (1,)})
    h = tape.op("broadcast_mul", (BATCH, 5), "odd", x=h, y=tape.parameter("odd.p", (5,)))
    graph = gather(tape.graph(h, leaves=["fc", "odd"]), "model")
    assert [(layer.name, layer.kind) for layer in graph.layers] == [("fc", "linear"), ("odd", "opaque")]
    odd = graph["odd"]
    assert odd.input_shape == (1, 8) and odd.output_shape == (1, 5) and odd.kept_elements == 5
    assert [p.name for p in odd.parameters] == ["odd.p"]
    reason = "it cuts, joins or shifts features"
    assert graph.notes == (f"narrow+roll+broadcast_mul (odd): can be split along the batch only, since {reason}",)


def test_operators_that_ranks_cannot_run_are_named():
    tape = Tape(x=(BATCH, 8))
    h = tape.op("broadcast_mul", (BATCH, 8), "a.b", x="x", y=tape.parameter("a.p", (8,)))
    h = tape.op("fft", (BATCH, 8), "a.b", x=h)
    with pytest.raises(UserError, match=r"operator fft of module 'a.b': ranks cannot run this operator; compute it"):
        gather(tape.graph(h, leaves=["a.b"]), "model")


def test_products_of_an_opaque_layer_are_counted():
    """Two products in one module, (1 x 8)(8 x 6) and (1 x 6)(6 x 5) per sample: 96 and 60 FLOPs in 2 kernels."""
    tape = Tape(x=(BATCH, 1, 8))
    h = "x"
    for number, (before, after) in enumerate([(8, 6), (6, 5)]):
        # The weights of a linear layer would have two dimensions.
        weight = tape.parameter(f"odd.w{number}", (1, before, after))
        h = tape.op("broadcast_matmul", (BATCH, 1, after), "odd", a=h, b=weight)
    (odd,) = gather(tape.graph(h, leaves=["odd"]), "model").layers
    assert odd.kind == "opaque" and odd.flops == 96 + 60 and odd.attributes["products"] == 2
    traffic = (8 + 8 * 6 / BATCH + 6) + (6 + 6 * 5 / BATCH + 5)  # both read their weights, for all samples at once
    assert odd.attributes["traffic"] == traffic and odd.attributes["launches"] == 2


#: Kind of an operator, the shapes of its arguments and results, its attributes, and its FLOPs on the whole batch of 2.
OPERATORS = {
    # 2 * 3 rows of (1 x 8)(8 x 5)
    "broadcast_matmul": ({"a": (2, 3, 8), "b": (8, 5)}, {"out": (2, 3, 5)}, {}, 2 * 3 * 2 * 8 * 5),
    "batch_matmul": ({"a": (2, 8, 3), "b": (2, 8, 5)}, {"out": (2, 3, 5)}, {"transpose_a": True}, 2 * 3 * 2 * 8 * 5),
    "matrix_vector_product": ({"a": (2, 8), "b": (8,)}, {"out": (2,)}, {}, 2 * 2 * 8),
    "vector_matrix_product": ({"a": (8,), "b": (8, 2)}, {"out": (2,)}, {}, 2 * 8 * 2),
    "dot": ({"x": (16,), "y": (16,)}, {"out": ()}, {}, 2 * 16),
    "fused_matmul_bias": ({"x": (2, 3, 8), "weight": (5, 8), "bias": (5,)}, {"out": (2, 3, 5)}, {}, 2 * 3 * 2 * 8 * 5),
    # 8 -> 4 -> 6
    "cublas_fused_mlp": ({"x": (2, 8), "weights": [(4, 8), (6, 4)]}, {"out": (2, 6)}, {}, 2 * 2 * (8 * 4 + 4 * 6)),
    # 4 groups of 2 channels each, 3 taps: every element of the output has 6 multiply-adds.
    "conv1d": ({"in": (2, 8, 10), "weight": (16, 2, 3)}, {"out": (2, 16, 8)}, {"groups": 4}, 2 * 2 * 16 * 8 * 2 * 3),
    # Depthwise: every channel by itself, 3 x 3 taps.
    "conv2d": ({"in": (2, 4, 9, 9), "weight": (4, 1, 3, 3)}, {"out": (2, 4, 7, 7)}, {"groups": 4}, 2 * 2 * 4 * 49 * 9),
    "conv3d": (
        {"in": (2, 4, 6, 6, 6), "weight": (6, 4, 3, 3, 3)},
        {"out": (2, 6, 4, 4, 4)},
        {},
        2 * 2 * 6 * 64 * 4 * 27,
    ),
    # 2 groups, 8 channels to 16: every element of the input is multiplied with 8 channels of 2 x 2 taps.
    "deconv2d": ({"in": (2, 8, 5, 5), "weight": (8, 8, 2, 2)}, {"out": (2, 16, 10, 10)}, {}, 2 * 2 * 8 * 25 * 8 * 4),
    "deform_conv2d": (
        {"input": (2, 4, 9, 9), "weight": (6, 4, 3, 3)},
        {"output": (2, 6, 7, 7)},
        {},
        2 * 2 * 6 * 49 * 4 * 9,
    ),
    # All pairs of 3 + 1 features of length 8.
    "fused_dot_feature_interaction": (
        {"features": [(2, 3, 8), (2, 1, 8)]},
        {"out": (2, 6)},
        {"pooling": "none"},
        2 * 4 * 4 * 2 * 8,
    ),
    # (1 x 8)(8 x 8)
    "fused_cross_feature_interaction": (
        {"x": (2, 8), "weight": (8, 8), "x0": (2, 8), "bias": (8,)},
        {"out": (2, 8), "matmul_result": (2, 8)},
        {"interaction_mode": "matrix"},
        2 * 2 * 8 * 8,
    ),
    # 2 samples of 5 positions and 3 heads of 4 features: 25 products of length 4 for each head.
    "fused_self_attention_query_mul_key_and_value": (
        {"hidden_states": (5, 2, 36)},
        {"query_mul_key": (2, 3, 5, 5), "value": (2, 3, 5, 4)},
        {"head_size": 4},
        2 * 2 * 3 * 25 * 4,
    ),
    # A bag of embeddings: a lookup and a sum compute no products.
    "gather": ({"in": (100, 8), "indices": (2, 3)}, {"out": (2, 3, 8)}, {}, 0),
    "reduce_sum": ({"input_tensor": (2, 3, 8)}, {"output_tensor": (2, 8)}, {"axis": (1,)}, 0),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_flops_of_operators(kind):
    arguments, results, attributes, expected = OPERATORS[kind]
    shapes: dict[str, tuple[int, ...]] = {}

    def named(table) -> dict[str, tuple[str, ...]]:
        names = {}
        for key, value in table.items():
            several = value if isinstance(value, list) else [value]
            names[key] = tuple(f"{key}{i}" for i in range(len(several)))
            shapes.update(zip(names[key], several))
        return names

    op = Operator("op", kind, "", named(arguments), named(results), attributes)
    assert flops(OperatorGraph((op,), shapes, (), {}, (), BATCH), op) == expected


def norm_tape(statistic_of_product: bool, centred: bool) -> tuple[Tape, str]:
    """x / sqrt(mean(x x)) or (x - mean(x)) / sqrt(var(x))."""
    tape = Tape(x=(BATCH, 3, 8))
    x = tape.op("broadcast_matmul", (BATCH, 3, 8), "fc", a="x", b=tape.parameter("fc.weight", (8, 8)))
    over = {"axis": (2,), "keepdims": True}
    h, source = x, x
    if centred:
        mean = tape.op("reduce_mean", (BATCH, 3, 1), in_=x, attributes=over)
        h = tape.op("broadcast_sub", (BATCH, 3, 8), x=x, y=mean)
        source = h
    if statistic_of_product:
        source = tape.op("broadcast_mul", (BATCH, 3, 8), x=source, y=source)
    kind, of_var = "reduce_mean" if statistic_of_product else "var", {"dim": (2,), "unbiased": False, "keepdim": True}
    size = tape.op(kind, (BATCH, 3, 1), in_=source, attributes=over if statistic_of_product else of_var)
    size = tape.op("rsqrt", (BATCH, 3, 1), in_=size)
    return tape, tape.op("broadcast_mul", (BATCH, 3, 8), x=h, y=size)


@NEEDS_ONEFLOW
@pytest.mark.parametrize(("product", "centred", "statistics"), [(True, False, 1), (False, True, 2), (True, True, 2)])
def test_norms_in_any_form(product, centred, statistics):
    tape, end = norm_tape(product, centred)
    end = tape.op("broadcast_mul", (BATCH, 3, 8), x=end, y=tape.parameter("scale.weight", (8,)))
    end = tape.op("gelu", (BATCH, 3, 8), x=end)
    (region,) = find_norms(tape.graph(end))
    assert region.statistics == statistics and region.source == "fc-broadcast_matmul-0"
    assert region.learned == ("scale.weight/out",)
    # No module says what is added to the variance: it is what the operators do.
    fc, found = gather(tape.graph(end, leaves=["fc"]), "model").layers
    assert (fc.kind, found.kind, found.eps, found.epilogue) == ("linear", "norm", 0.0, ("gelu",))
    assert fc.attributes["transposed"] == 1 and found.attributes["statistics"] == statistics


@NEEDS_ONEFLOW
def test_no_norm_where_the_statistic_is_used_elsewhere():
    tape, end = norm_tape(True, False)
    size = next(op.output for op in tape.operators if op.kind == "rsqrt")
    graph = tape.graph(end, tape.op("exp", (BATCH, 3, 1), x=size))
    assert find_norms(graph) == []
    assert gather(graph, "model").layers[-1].output_shape == (1, 3 * 8 + 3)  # both outputs, one after the other


def layers_of(*children: str, width: int = 4) -> list[Layer]:
    """Two layers a child, named after its kind: a norm and a product."""
    layers = []
    for i, kind in enumerate(children):
        layers.append(norm(f"stack.{i}.norm", 2, width))
        layers.append(linear(f"stack.{i}.fc", 2, width, width, bias=kind == "b"))
    return layers


@pytest.mark.parametrize(
    ("children", "blocks"),
    [
        ("aaa", {"stack": 3}),
        ("a", {"stack": 1}),
        ("ab", {}),
        ("aab", {"stack": 2}),
        ("aabb", {"stack[0:2]": 2, "stack[2:4]": 2}),
        ("aba", {}),
    ],
)
def test_runs_of_equal_children_are_blocks(children, blocks):
    layers = layers_of(*children)
    edges = [(one.name, other.name) for one, other in zip(layers, layers[1:])]
    marked = mark_blocks(layers, edges, {"stack": [f"stack.{i}" for i in range(len(children))]})
    found: dict[str, set[int]] = {}
    for layer in marked:
        if layer.block:
            found.setdefault(layer.block, set()).add(layer.block_index)
            assert layer.role == layer.name.split(".", 2)[2]
    assert found == {name: set(range(count)) for name, count in blocks.items()}
    LayerGraph("x", "row", tuple(marked), tuple(edges))


def test_single_layers_and_other_wirings_are_no_blocks():
    layers = [linear(f"stack.{i}.fc", 2, 4, 4) for i in range(3)]
    assert mark_blocks(layers, [], {"stack": [f"stack.{i}" for i in range(3)]}) == layers
    layers = layers_of("a", "a")
    edges = [("stack.0.norm", "stack.0.fc"), ("stack.0.fc", "stack.1.norm"), ("stack.0.fc", "stack.1.fc")]
    assert mark_blocks(layers, edges, {"stack": ["stack.0", "stack.1"]}) == layers


def test_outer_blocks_count():
    layers = []
    for i in range(2):
        for j in range(2):
            layers += [
                replace(layer, name=f"outer.{i}.inner.{j}.{layer.name}")
                for layer in (norm("n", 2, 4), add("s", (2, 4)))
            ]
    containers = {f"outer.{i}.inner": [f"outer.{i}.inner.{j}" for j in range(2)] for i in range(2)}
    marked = mark_blocks(layers, [], {**containers, "outer": ["outer.0", "outer.1"]})
    assert {layer.block for layer in marked} == {"outer"}
    assert [layer.role for layer in marked[:4]] == ["inner.0.n", "inner.0.s", "inner.1.n", "inner.1.s"]
