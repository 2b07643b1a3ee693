"""Layer graphs: their documents, and invalid graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph, Parameter, graph_from_document, load_graph, tied_parameter
from autoddl.costmodel.kinds.registry import kinds
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.workload import Workload
from autoddl.zoo import Transformer, bert, gpt, llama, mlp, resnet, vgg
from autoddl.zoo.layers import GraphBuilder, add, conv2d, embedding, linear, loss, norm
from autoddl.zoo.mixtures import Mixture, mixture

MODELS = {
    "mlp": mlp([8, 4, 2]),
    "gpt": gpt(Transformer("gpt", 2, 16, 2, 8, 32)),
    "gpt untied": gpt(Transformer("gpt", 2, 16, 2, 8, 32, tied=False)),
    "bert": bert(Transformer("bert", 2, 16, 2, 8, 32)),
    "llama": llama(Transformer("llama", 2, 16, 4, 8, 32, kv_heads=2)),
    "vgg": vgg(11),
    "resnet": resnet(18),
    "mixture": mixture(
        Mixture(
            "mixture",
            2,
            16,
            4,
            8,
            32,
            head_dim=4,
            intermediate=32,
            expert_width=8,
            shared_width=8,
            has_shared_gate=True,
        )
    ),
    "latent": mixture(
        Mixture(
            "latent",
            1,
            16,
            4,
            8,
            32,
            head_dim=4,
            intermediate=32,
            expert_width=8,
            latent_rank=8,
            rotary_dim=2,
            value_dim=4,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tmp_path):
    graph = MODELS[name]
    assert graph_from_document(graph.document(), "x") == graph
    graph.save(tmp_path / "graph.json")
    read = load_graph(tmp_path / "graph.json")
    assert read == graph and read.hash == graph.hash
    assert [read[layer.name].attributes for layer in graph.layers] == [layer.attributes for layer in graph.layers]


def test_hash_ignores_descriptions():
    graph = MODELS["gpt"]
    assert replace(graph, name="other", notes=("prose",)).hash == graph.hash
    assert len({model.hash for model in MODELS.values()}) == len(MODELS)
    first = graph.layers[0]
    for change in ({"flops": 1.0}, {"kept_elements": 3}, {"epilogue": ("relu",)}, {"modules": ("x",)}):
        assert replace(graph, layers=(replace(first, **change), *graph.layers[1:])).hash != graph.hash
    assert replace(graph, edges=graph.edges[:-1]).hash != graph.hash


def test_networkx():
    graph = MODELS["bert"]
    known = graph.networkx()
    assert list(known.nodes) == [layer.name for layer in graph.layers]
    assert set(known.edges) == set(graph.edges)
    assert all(known.nodes[layer.name]["layer"] is layer for layer in graph.layers)


def test_shapes_of_layers():
    image = conv2d("c", (3, 32, 16), 8, kernel_size=3, padding=1)
    assert (image.rows, image.features, image.output_elements, image.input_elements) == (8 * 32, 16, 8 * 32 * 16, 1536)
    matrix = linear("fc", 5, 7, 11)
    assert (matrix.rows, matrix.features, matrix.num_parameters) == (5, 11, 7 * 11 + 11)
    tied = linear("head", 5, 7, 11, tied_to="wte")
    assert tied.num_parameters == 11  # the bias is its own
    assert matrix.describe() == "fc (linear, 7 -> 11)"


def test_inputs_are_in_order():
    graph = MODELS["gpt"]
    assert graph.inputs("wte") == ()
    assert graph.inputs("embed") == ("wte", "wpe")
    assert graph.inputs("h.1.add_1") == ("h.0.add_2", "h.1.attn.c_proj")


def test_equal_layers_have_equal_signatures():
    graph = MODELS["gpt"]
    assert graph["h.0.mlp.c_fc"].signature() == graph["h.1.mlp.c_fc"].signature()
    assert graph["h.0.mlp.c_fc"].signature() != graph["h.0.mlp.c_proj"].signature()
    assert linear("a", 1, 2, 3).signature() != linear("a", 1, 2, 3, tied_to="b").signature()


# ------------------------------------------------------------------------------------------------------- what is refused


def graph_of(*layers: Layer, edges: tuple[tuple[str, str], ...] = ()) -> LayerGraph:
    return LayerGraph("g", "row", layers, edges)


FC = linear("fc", 1, 4, 6)
TABLE = embedding("wte", 2, 8, 4)


@pytest.mark.parametrize(
    ("layers", "edges", "message"),
    [
        ((), (), "graph 'g' has no layers"),
        ((FC, FC), (), "layer 'fc' appears twice"),
        ((FC,), (("fc", "x"),), "edge 'fc' -> 'x' names unknown layer 'x'"),
        ((FC, replace(FC, name="b")), (("b", "fc"),), "edge 'b' -> 'fc' runs backwards"),
        ((FC,), (("fc", "fc"),), "edge 'fc' -> 'fc' runs backwards"),
        ((replace(FC, kind="dense"),), (), "kind 'dense' is not one of linear, embedding"),
        ((replace(FC, attributes={}),), (), "attributes of a linear are ['in_features', 'out_features'], not []"),
        (
            (replace(FC, attributes={"in_features": 4, "out_features": 0}),),
            (),
            "out_features is 0, should be at least 1",
        ),
        ((replace(FC, input_shape=(1, 5)),), (), "in_features is 4, its shapes say 5"),
        ((replace(loss("l", 2, 8), input_shape=(2, 9)),), (), "vocabulary is 8, its shapes say 9"),
        ((replace(TABLE, output_shape=(2, 5)),), (), "features is 4, its shapes say 5"),
        ((replace(FC, output_shape=()),), (), "should have at least one dimension"),
        ((replace(FC, block_index=3),), (), "block_index 3 without a block"),
        ((add("a", (2**40, 2**40)),), (), "should have at most 4611686018427387904 elements"),
        ((replace(FC, flops=1e31),), (), "flops is 1e+31, should be at most 1e+30"),
        ((replace(FC, parameters=(Parameter("w", (2**62, 2**62)),)),), (), "should have at most"),
        ((linear("a", 1, 4, 8, tied_to="b"),), (), "a.weight is tied to unknown layer 'b'"),
        ((linear("a", 1, 4, 8, tied_to="wte"), TABLE), (), "tied to 'wte', which should come before it"),
        ((linear("a", 1, 4, 8, tied_to="a"),), (), "tied to 'a', which should come before it"),
        ((TABLE, linear("a", 1, 4, 9, tied_to="wte")), (), "'wte', which has no parameter of 36 elements"),
        ((norm("n", 1, 4), linear("a", 1, 2, 2, tied_to="n")), (), "'n', a norm layer; it should be of the same kind"),
    ],
)
def test_invalid_graphs(layers, edges, message):
    with pytest.raises(UserError) as error:
        graph_of(*layers, edges=edges)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_weight_is_shared_with_the_one_of_its_name():
    """Scale and shift have one size: names tell them apart, or the names of their attributes, or else the first is meant."""
    first = norm("n", 1, 4)
    weight, bias = first.parameters

    def tied(name: str) -> Parameter:
        return tied_parameter(graph_of(first), Parameter(name, (4,), "n"))

    assert [tied(name) for name in ("n.weight", "n.bias")] == [weight, bias]
    assert [tied(name) for name in ("again.weight", "again.bias", "again.scale")] == [weight, bias, weight]


def test_layers_that_share_weights_with_several_others_have_one_choice():
    """The third product has the weight of the first and the bias of the second; the fourth has nothing of them."""
    a, b, other = (linear(name, 1, 8, 8) for name in ("a", "b", "other"))
    both = (Parameter("c.weight", (8, 8), "a"), Parameter("c.bias", (8,), "b"))
    c = replace(linear("c", 1, 8, 8), parameters=both)
    graph = graph_of(a, b, c, other, edges=[("a", "b"), ("b", "c"), ("c", "other")])
    cluster = load_cluster("dgx-a100").resized(1, 4)
    variables = PriceBook(graph, cluster, Workload(8, 8)).variables
    assert [variable.layers for variable in variables] == [("a", "b", "c"), ("other",)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("layers"), "g.json: field 'layers' is missing"),
        (lambda d: d.update(layers={}), "g.json: layers is {}, should be a list"),
        (lambda d: d.update(edges=[["wte"]]), "g.json: edges[0] should be a pair of layer names"),
        (lambda d: d.update(edges=[["wte", 3]]), "g.json: edges[0] should be a pair of layer names"),
        (lambda d: d.update(colour="red"), 'g.json: unknown field "colour"'),
        (lambda d: d.update(version="1"), 'g.json: version is "1", should be a whole number'),
        (lambda d: d["layers"][0].pop("kind"), "g.json: layers[0]: field 'kind' is missing"),
        (lambda d: d["layers"][0].update(kept_elements=-1), "layers[0]: kept_elements is -1, should be a whole number"),
        (
            lambda d: d["layers"][0].update(flops=float("inf")),
            "layers[0]: flops is Infinity, should be a finite number",
        ),
        (
            lambda d: d["layers"][0].update(output_shape=[8, 0]),
            "output_shape holds 0, should hold whole numbers of at least 1",
        ),
        (lambda d: d["layers"][0].update(output_shape=[True]), "output_shape holds true"),
        (lambda d: d["layers"][0].update(name="two\nlines"), "should be a string of one line"),
        (lambda d: d["layers"][0].update(name="half \ud800"), "should be a string of one line"),
        (lambda d: d["layers"][0].update(epilogue=[1]), "epilogue holds 1, should hold strings"),
        (lambda d: d["layers"][0]["parameters"][0].update(shape="x"), 'parameters[0]: shape is "x", should be a list'),
        (lambda d: d["layers"][0]["attributes"].update(vocabulary=1.5), "attributes: vocabulary is 1.5"),
    ],
)
def test_invalid_documents(change, message):
    document = MODELS["gpt"].document()
    change(document)
    with pytest.raises(UserError) as error:
        graph_from_document(document, "g.json")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_kind_is_built_somewhere():
    built = {layer.kind for model in MODELS.values() for layer in model.layers}
    assert built | {"opaque"} == set(kinds())  # opaque layers are only extracted


def test_blocks():
    builder = GraphBuilder("g", "row")
    start = builder.add(linear("in", 1, 4, 4))
    builder.repeat("h", 3, [(linear("fc", 1, 4, 4), [""]), (add("sum", (1, 4)), ["", "fc"])], start)
    graph = builder.build()
    assert [(layer.block, layer.block_index, layer.role) for layer in graph.layers[1:3]] == [
        ("h", 0, "fc"),
        ("h", 0, "sum"),
    ]
    assert graph.inputs("h.2.sum") == ("h.1.sum", "h.2.fc")
