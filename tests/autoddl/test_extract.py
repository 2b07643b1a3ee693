"""Layer graphs of OneFlow modules: the built-in families come out as built in, everything else whole and in one piece."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, load_graph
from autoddl.pipelines.runtime.load import is_available, load_oneflow
from autoddl.zoo import Transformer, bert, gpt, llama, mlp, resolve_model, vgg

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)

MODELS = Path(__file__).with_name("user_models.py")
WHOLE = [  # everything in user_models.py that is a model
    *(
        "nano",
        "trunk",
        "einsum",
        "one_head",
        "biased",
        "cross",
        "cross_of_unequal_lengths",
        "resnet",
        "vision_transformer",
    ),
    *(
        "odd_convolutions",
        "auto_encoder",
        "shared",
        "branches",
        "unknown",
        "mixer",
        "recurrent",
        "gated",
        "norms_by_hand",
    ),
    *("parallel_branches", "across_samples", "low_rank", "bag", "two_losses", "single"),
    *("lstm", "deep_lstm", "projected_lstm", "gru", "rnn"),
]


UNUSED = {"biased": ("q.", "k.", "v.")}


@functools.cache
def loaded(name: str) -> tuple[Any, tuple[Any, ...], LayerGraph]:
    """A module of user_models.py, its example inputs, and what is extracted from them."""
    from autoddl.extraction import extract
    from autoddl.extraction.userfile import load_model

    module, inputs = load_model(f"{MODELS}:{name}")
    return module, inputs, extract(module, inputs)


def extracted(name: str) -> LayerGraph:
    return loaded(name)[2]


def tokens(batch: int, sequence: int):
    return load_oneflow().zeros(batch, sequence, dtype=load_oneflow().int64)


def check_same(module, inputs, built: LayerGraph) -> None:
    """Layers (names, kinds, shapes, parameters, FLOPs, ties, epilogues, blocks, modules) and edges, one by one."""
    from autoddl.extraction import extract

    graph = extract(module, inputs, name=built.name)
    assert [layer.name for layer in graph.layers] == [layer.name for layer in built.layers]
    for found, expected in zip(graph.layers, built.layers):
        assert found == expected and dict(found.attributes) == dict(expected.attributes)
    assert graph.edges == built.edges
    assert graph.sample == built.sample
    assert graph.hash == built.hash


# ---- The built-in families --------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 2, 8]),
    sequence=st.integers(2, 9),
    vocabulary=st.integers(2, 40),
    batch=st.integers(1, 3),
    inner=st.sampled_from([0, 24]),
    tied=st.booleans(),
)
def test_gpt_and_bert_are_as_built_in(layers, heads, head_dim, sequence, vocabulary, batch, inner, tied):
    from autoddl.pipelines.runtime.models import GPT, Bert

    width = 2 * heads * head_dim
    model = Transformer(
        "x", layers, width, heads, sequence, vocabulary, positions=sequence + 3, intermediate=inner, tied=tied
    )
    sizes = (layers, width, heads, vocabulary, sequence + 3)
    inputs = (tokens(batch, sequence), tokens(batch, sequence))
    check_same(GPT(*sizes, inner=inner or None, tied=tied), inputs, gpt(model))
    check_same(Bert(*sizes, inner=inner or None, tied=tied), inputs, bert(model))


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    half=st.integers(1, 4),
    inner=st.integers(2, 40),
    sequence=st.integers(2, 9),
    batch=st.integers(1, 3),
    tied=st.booleans(),
)
def test_llama_is_as_built_in(layers, kv_heads, groups, half, inner, sequence, batch, tied):
    from autoddl.pipelines.runtime.models import Llama

    heads = kv_heads * groups
    model = Transformer(
        *("x", layers, 2 * half * heads, heads, sequence, 48),
        intermediate=inner,
        kv_heads=kv_heads,
        activation="silu",
        tied=tied,
    )
    module = Llama(layers, model.width, heads, 48, inner, kv_heads=kv_heads, tied=tied)
    check_same(module, (tokens(batch, sequence), tokens(batch, sequence)), llama(model))


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(widths=st.lists(st.integers(1, 40), min_size=2, max_size=5), batch=st.integers(1, 3))
def test_perceptron_is_as_built_in(widths, batch):
    from autoddl.pipelines.runtime.models import MLP

    zeros = load_oneflow().zeros
    check_same(MLP(widths), (zeros(batch, widths[0]), zeros(batch, widths[-1])), mlp(widths))


@pytest.mark.parametrize(("depth", "image"), [(11, 32), (13, 64), (19, 224)])
def test_vgg_is_as_built_in(depth, image):
    from autoddl.extraction.memory import untouched_parameters
    from autoddl.pipelines.runtime.models import VGG

    with untouched_parameters():
        module = VGG(depth, image)
    flow = load_oneflow()
    check_same(module, (flow.zeros(1, 3, image, image), flow.zeros(1, dtype=flow.int64)), vgg(depth, image=image))


# ---- Laws that hold for whatever is extracted -----------------------------------------------------------------------------


def products(module, inputs) -> float:
    """FLOPs of one sample by the operators themselves: every matrix product and convolution that the trace holds."""
    from autoddl.extraction.trace import trace

    traced = trace(module, inputs)
    total = 0
    for op in traced.operators:
        shapes = {key: traced.shapes[tensors[0]] for key, tensors in op.arguments.items()}
        if traced.is_fixed(op.output) and traced.shapes[op.output][0] != traced.batch:
            continue  # made once, however many samples there are
        made = math.prod(traced.shapes[op.output])
        if "matmul" in op.kind:
            total += 2 * made * shapes["a"][-1]
        elif op.kind == "conv2d":
            total += 2 * made * math.prod(shapes["weight"][1:])
        elif op.kind == "deconv2d":
            total += 2 * math.prod(shapes["in"]) * math.prod(shapes["weight"][1:])
    return total / traced.batch


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_nothing_is_lost(name):
    """All FLOPs and all parameters of the module are in the graph, each once; what is not used is named."""
    module, inputs, graph = loaded(name)
    if name != "across_samples":  # its second output is not a part of the loss
        assert graph.flops == pytest.approx(products(module, inputs))
    of_graph = [p for layer in graph.layers for p in layer.parameters if p.tied_to is None]
    of_module = dict(module.named_parameters())
    unused = {n for n in of_module if n.startswith(UNUSED.get(name, ("never.",)))}
    assert sorted(p.name for p in of_graph) == sorted(set(of_module) - unused)
    assert {p.name: p.shape for p in of_graph} == {n: tuple(of_module[n].shape) for n in set(of_module) - unused}
    assert bool(unused) == any("that no layer uses" in note and min(unused) in note for note in graph.notes)


def names_in(note: str) -> set[str]:
    """The layers in the brackets of a note, whose numbers may be ranges."""
    names = set()
    for form in re.findall(r"(?:[^,{}]|{[^}]*})+", note[note.index("(") + 1 : note.index("):")]):
        choices = []
        for part in re.split(r"({[^}]*})", form.strip()):
            runs = [run.split("..") for run in part.strip("{}").split(",")]
            is_range = part.startswith("{")
            choices.append(
                [str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)] if is_range else [part]
            )
        names.update(map("".join, itertools.product(*choices)))
    return names


@pytest.mark.parametrize("name", WHOLE)
def test_graphs_are_sound(name, tmp_path):
    """In one piece, with every opaque layer named in a note, and the same after saving."""
    graph = extracted(name)
    assert nx.is_weakly_connected(graph.networkx())
    noted = {
        name for note in graph.notes if ": can be split along the batch only, since " in note for name in names_in(note)
    }
    opaque = [layer for layer in graph.layers if layer.kind == "opaque"]
    # The last program may do nothing but to return what the model returns.
    assert (
        {layer.name for layer in opaque if layer is not graph.layers[-1]} <= noted <= {layer.name for layer in opaque}
    )
    shown = " ".join(graph.notes)
    for kind in {"roll", "cumsum", "concat", "normalization", "max_pool_2d", "deconv2d", "recurrent module"}:
        layers = [layer.name for layer in graph.layers if layer.kind == "opaque" and kind in layer.name]
        assert not layers or kind in shown
    graph.save(tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph


def test_every_model_is_tested():
    functions = {node.name for node in ast.parse(MODELS.read_text()).body if isinstance(node, ast.FunctionDef)}
    faults = {name for name, _ in FAULTS}
    assert functions - {"tokens", "heads", "mask_in_list", "stacked"} == set(WHOLE) | faults - {
        "not_callable",
        "absent",
    }


# ---- What comes of models that are not built in -------------------------------------------------------------------------------


def test_gpt_in_another_style():
    graph = extracted("nano")
    block = [layer for layer in graph.layers if layer.block and layer.block_index == 2]
    assert [(layer.role, layer.kind, layer.epilogue) for layer in block] == [
        ("ln_1", "norm", ()),
        ("attn.c_attn", "linear", ()),
        ("attn", "attention", ()),
        ("attn.c_proj", "linear", ("dropout",)),
        ("add_1", "add", ()),
        ("ln_2", "norm", ()),
        ("mlp.0", "linear", ("gelu",)),
        ("mlp.2", "linear", ("dropout",)),
        ("add_2", "add", ()),
    ]
    assert {layer.block for layer in block} == {"blocks"}
    assert graph["blocks.0.attn"].attributes == {"heads": 4, "kv_heads": 4, "head_dim": 8, "causal": 1}
    probabilities = 4 * 6 * 6  # kept before and after dropout, and a mask of bytes
    assert graph["blocks.0.attn"].kept_elements == 2 * probabilities
    assert graph["pos"].kind == "position" and graph["pos"].attributes == {"positions": 8, "features": 32}
    assert graph.inputs("embed") == ("wte", "pos") and graph["embed"].epilogue == ("dropout",)
    assert graph["loss"].input_shape == (6, 50) and graph.notes == ()


def test_evaluation_mode_has_no_dropout():
    from autoddl.extraction import extract
    from autoddl.extraction.userfile import load_model

    module, inputs = load_model(f"{MODELS}:nano")
    graph = extract(module.eval(), inputs)
    assert not any("dropout" in layer.epilogue for layer in graph.layers)
    assert graph["blocks.0.attn"].kept_elements == 4 * 6 * 6


def test_blocks_on_raw_data():
    """The first block, which reads no layer, is like the others; sums with data are sums."""
    graph = extracted("trunk")
    assert graph.inputs("blocks.0.ln_1") == () and graph.inputs("blocks.0.add_n") == ("blocks.0.attn.c_proj",)
    assert graph["blocks.0.add_n"].program.reads_data  # a sum with the model's input
    assert graph.inputs("blocks.1.add_1") == ("blocks.0.add", "blocks.1.attn.c_proj")


@pytest.mark.parametrize(("name", "heads"), [("einsum", 4), ("one_head", 1)])
def test_attention_written_otherwise(name, heads):
    graph = extracted(name)
    assert [layer.name for layer in graph.layers] == ["e", "q+k+v", "attention", "o"]
    assert graph["attention"].attributes["heads"] == heads and graph["attention"].attributes["causal"] == 0
    assert graph["q+k+v"].modules == ("q", "k", "v") and graph["q+k+v"].attributes["out_features"] == 96
    assert [p.name for p in graph["q+k+v"].parameters][:3] == ["q.weight", "q.bias", "k.weight"]


def test_attention_with_learned_bias_and_padding():
    """Its bias has no column for each head, so a program computes it, and a note says why."""
    graph = extracted("biased")
    assert [layer.name for layer in graph.layers if layer.kind == "linear"] == ["w", "o"]
    assert [(p.name, p.shape) for p in graph["bias"].parameters] == [("bias", (1, 4, 6, 6))]
    assert any(layer.program.reads_data for layer in graph.layers if layer.kind == "opaque")
    reason = "since its attention has a learned bias of which no single column belongs to each head"
    assert any(reason in note for note in graph.notes)
    assert "parameters that no layer uses: q.weight, q.bias, k.weight, k.bias, v.weight, v.bias" in graph.notes


def test_attention_between_sequences():
    graph = extracted("cross")
    assert graph.layers[-2].kind == "opaque" and graph.inputs(graph.layers[-2].name) == ("norm", "k", "v")
    assert graph.inputs("k") == ("e_2",) and graph.inputs("q") == ("e",)
    assert graph["e_2"].parameters[0].tied_to == "e"
    unequal = extracted("cross_of_unequal_lengths")
    assert not any(layer.kind == "attention" for layer in unequal.layers)
    assert sum(layer.flops == 2 * 2 * 4 * 6 * 7 * 8 for layer in unequal.layers if layer.kind == "opaque") == 1


def test_residual_network():
    graph = extracted("resnet")
    assert graph.sample == "image"
    assert graph["bn"].kind == "batch_norm" and graph["bn"].num_parameters == 16 and graph["bn"].epilogue == ("relu",)
    assert graph["pool"].attributes == {"kernel_size": 3, "stride": 2, "padding": 1, "maximum": 1}
    assert graph.inputs("layers.1.add") == ("layers.1.bn2", "layers.0.add")
    assert graph.inputs("layers.2.add") == ("layers.2.bn2", "layers.2.down.1")
    assert {layer.block for layer in graph.layers} == {"", "layers[0:2]", "layers[3:5]"}
    assert graph["layers.4.conv1"].block_index == 1 and graph["layers.4.conv1"].role == "conv1"
    assert graph["fc"].attributes == {"in_features": 16, "out_features": 10}
    assert any("of its own samples" in note and "bn" in note for note in graph.notes)


def test_vision_transformer():
    graph = extracted("vision_transformer")
    assert graph["patch"].output_shape == (32, 2, 2)
    assert graph.inputs("concat") == ("patch",) and graph["concat"].kind == "opaque"
    assert graph["concat"].output_shape == (5, 32) and [p.name for p in graph["concat"].parameters] == ["cls"]
    assert graph.inputs("add") == ("concat", "pos") and graph["pos"].kind == "position"
    assert graph["blocks.1.attn"].block == "blocks" and graph["head"].input_shape == (1, 32)


def test_convolutions_that_are_not_understood():
    graph = extracted("odd_convolutions")
    (layer,) = graph.layers
    dilated, depthwise, up = (8 * 12 * 12) * (3 * 9), (4 * 11 * 11) * 9, (8 * 12 * 12) * (4 * 4)
    assert layer.kind == "opaque" and layer.flops >= 2 * (dilated + depthwise + up)
    assert {"conv2d", "deconv2d", "prelu"} <= {call.kind for call in layer.program.calls}


def test_elementwise_losses_belong_to_the_last_layer():
    auto_encoder = extracted("auto_encoder")  # its target is its input
    assert auto_encoder["out"].epilogue == () and auto_encoder.layers[-1].program.is_loss
    bag = extracted("bag")
    assert bag["o"].epilogue == () and bag.has_loss and not bag.reads_targets  # a program computes the loss
    assert "binary_cross_entropy_with_logits_reduce_mean" in {call.kind for call in bag.layers[-1].program.calls}


def test_module_called_twice():
    graph = extracted("shared")
    assert [layer.name for layer in graph.layers] == ["fc", "fc_2", "out"]
    assert [p.tied_to for p in graph["fc_2"].parameters] == ["fc", "fc"] and graph["fc_2"].num_parameters == 0
    assert graph["fc_2"].flops == graph["fc"].flops


def test_parallel_branches():
    graph = extracted("branches")
    assert set(graph.inputs("broadcast_mul")) == {"a", "b"} and graph["b"].epilogue == ("tanh",)
    assert graph.inputs("concat") == ("c", "a") and graph["concat"].output_shape == (1, 16)
    sums = extracted("parallel_branches")
    assert set(sums.inputs("blocks.0.add")) == {"e", "blocks.0.attn.c_proj", "blocks.0.fc"}
    assert sums["linear"].parameters[0].tied_to == "e" and sums["linear"].num_parameters == 0


def test_unknown_operators_are_named():
    graph = extracted("unknown")
    kinds = {call.kind for layer in graph.layers if layer.kind == "opaque" for call in layer.program.calls}
    assert {"cumsum", "roll", "broadcast_matmul"} <= kinds
    assert [p.name for p in graph["a"].parameters] == ["a.weight", "a.bias"] and graph["a"].epilogue == ()
    notes = " ".join(graph.notes)
    assert (
        "cumsum" in notes and "roll" in notes and "example input 1 of shape (6, 8)" in notes and "never.weight" in notes
    )


def test_features_that_turn_into_rows():
    graph = extracted("mixer")
    assert graph["ln"].kind == "norm" and graph.inputs("rows") == ("transpose",)
    assert graph["rows"].input_shape == (8, 6) and graph["transpose"].kind == "opaque"
    assert graph["head"].input_shape == (1, 8)


def test_recurrent_module_is_one_layer():
    graph = extracted("recurrent")
    assert [(layer.name, layer.kind) for layer in graph.layers] == [
        ("e", "embedding"),
        ("lstm", "opaque"),
        ("o", "linear"),
    ]
    assert graph["lstm"].output_shape == (6, 8) and graph["lstm"].flops == 6 * 2 * 4 * 8 * (8 + 8)
    # Each of the 6 time steps multiplies its input and the hidden features with a matrix.
    assert graph["lstm"].attributes["products"] == 12
    assert (graph.sequence_length, graph.reads_tokens) == (6, True)


@pytest.mark.parametrize(
    ("name", "flops", "products"),
    [
        # 5 time steps; 4 gates of 16 features, from 8 inputs and 16 hidden features.
        ("lstm", 5 * 2 * 4 * 16 * (8 + 16), 10),
        # 2 directions; the second layer reads the 32 features of both.
        ("deep_lstm", 5 * 2 * 2 * 4 * 16 * ((8 + 16) + (32 + 16)), 40),
        # The 16 hidden features are projected to 6, which are the hidden input.
        ("projected_lstm", 5 * 2 * (4 * 16 * (8 + 6) + 16 * 6), 15),
        ("gru", 5 * 2 * 3 * 16 * (8 + 16), 10),
        ("rnn", 5 * 2 * 16 * (8 + 16), 10),
    ],
)
def test_flops_of_recurrent_modules(name, flops, products):
    graph = extracted(name)
    (layer,) = (layer for layer in graph.layers if layer.kind == "opaque")
    assert layer.flops == flops and layer.attributes["products"] == products
    assert graph.flops - layer.flops == 5 * 2 * 8 * 8  # the linear layer


def test_gate_in_one_matrix():
    graph = extracted("gated")
    assert graph["wi"].epilogue == ("gelu", "mul_last") and graph["wi"].output_shape == (6, 16)
    assert graph["wi"].attributes["out_features"] == 32 and graph.inputs("add_n") == ("wo",)


def test_norms_by_hand():
    """What is added to the variance is known from what the norm does; norms without a scale are a program."""
    graph = extracted("norms_by_hand")
    assert [layer.kind for layer in graph.layers] == ["linear", "norm", "opaque"]
    norm = graph.layers[1]
    assert [p.name for p in norm.parameters] == ["w"] and norm.attributes["statistics"] == 1 and norm.eps == 1e-6


def test_samples_that_are_mixed():
    """The sums over samples of the loss are sums over ranks."""
    graph = extracted("across_samples")
    crossings = [call.kind for call in graph.layers[-1].program.crossings]
    assert crossings.count("sum_samples") == 2 and "share_whole" in crossings


def test_two_losses():
    graph = extracted("two_losses")
    loss = graph.layers[-1]
    assert graph.inputs("loss") == ("head", "sentence") and loss.program.is_loss
    assert [call.kind for call in loss.program.calls].count("nll") == 2
    assert graph["pooler"].input_shape == (1, 32) and graph["attn"].attributes["causal"] == 1
    assert "bias" not in loaded("two_losses")[0].attn._buffers  # as it was before


def test_mask_of_unknown_values():
    """Nobody knows whether it is causal, so ranks apply it as the model does."""
    graph = resolve_model(f"{MODELS}:mask_in_list")
    assert graph["attn"].attributes["causal"] == 0 and graph.notes == ()
    (change,) = graph["attn"].scores.results
    assert (change.role, change.value, change.shape[-2:]) == ("fill", -math.inf, (6, 6))


def test_computed_weights():
    graph = extracted("low_rank")
    (layer,) = graph.layers
    assert {(p.name, p.frozen) for p in layer.parameters} == {
        *[("l.weight", True), ("b", False), ("a", False), ("l.bias", False)]
    }
    assert layer.num_parameters == 16 * 2 + 2 * 16 + 16 and layer.num_frozen == 16 * 16


# ---- Far larger than memory ---------------------------------------------------------------------------------------------------

LARGE = """
import oneflow as flow
from autoddl.pipelines.runtime.models import GPT

def model():
    tokens = flow.zeros(1, 1024, dtype=flow.int64)
    module = GPT(20, 8192, 32, 50304, 1024)
    for parameter in module.parameters():
        flow.nn.init.normal_(parameter, 0.0, 0.02)
        parameter.data.mul_(2.0)
        parameter.data[...] = 3.0
    return module, (tokens, tokens)
"""
MEASURE = """
import resource, sys
from autoddl.zoo import resolve_model
graph = resolve_model(sys.argv[1])
graph.save(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_gpt_of_16_billion_parameters_needs_little_memory(tmp_path):
    """Takes 13 s, since a norm of 1024 rows of 8192 features is run on numbers."""
    (tmp_path / "large.py").write_text(LARGE)
    saved = tmp_path / "graph.json"
    arguments = [sys.executable, "-c", MEASURE, f"{tmp_path / 'large.py'}:model", str(saved)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    graph = load_graph(saved)
    assert graph.num_parameters == 20 * (12 * 8192**2 + 13 * 8192) + 2 * 8192 + (50304 + 1024) * 8192
    assert graph.hash == resolve_model("gpt:20x8192", heads=32, sequence=1024).hash
    assert int(done.stdout) * 1024 < 2e9


def test_replaced_functions_are_put_back():
    from autoddl.extraction.memory import untouched_parameters

    flow = load_oneflow()
    before = (flow.empty, flow.randn, flow.nn.init.normal_, flow.Tensor.fill_, type(flow.Tensor).__call__)
    with untouched_parameters():
        assert flow.empty is not before[0]
        mask, large = flow.tril(flow.ones(300, 300)), flow.nn.Linear(1000, 1000)
        small = flow.nn.Linear(3, 3)
        half = flow.randn(1000, 1000).half()
        kept = flow.empty
    assert before == (flow.empty, flow.randn, flow.nn.init.normal_, flow.Tensor.fill_, type(flow.Tensor).__call__)
    assert mask.sum().item() == 300 * 301 / 2 and tuple(large.weight.shape) == (1000, 1000)
    assert half.dtype == flow.float16 and isinstance(small.weight, flow.Tensor)
    assert tuple(kept(500, 500).fill_(2.0).shape) == (500, 500) and kept(500, 500).fill_(2.0).mean().item() == 2.0


# ---- What users get wrong -----------------------------------------------------------------------------------------------------

FAULTS = [
    ("looks_at_values", "the module reads the value of a tensor"),
    ("looks_at_arrays", "the module reads the value of a tensor"),
    ("raises_in_forward", "KeyError: 'first"),
    ("returns_no_tensor", "returns no tensor"),
    ("wrong_shape", "(9 vs 8) in InferTensorDesc4Matmul"),
    ("too_few_inputs", "missing 1 required positional argument"),
    ("no_batch", "first dimension is the batch"),
    ("no_parameters", "nothing to plan"),
    ("no_module", "a tuple of Tensor, Tensor"),
    ("no_inputs", "no example inputs"),
    ("only_a_module", "returns a Linear"),
    ("nothing", "returns nothing"),
    ("an_array", "example input 0 is a list"),
    ("raises", "RuntimeError: no such (user_models.py, line"),
    ("leaves", "SystemExit: 3"),
    ("wants_arguments", "requires the arguments width"),
    ("not_callable", "there is no function 'not_callable'"),
    ("absent", "there is no function 'absent'; there are"),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_faults_of_users_are_one_line(name, fault, capsys):
    with pytest.raises(UserError) as caught:
        resolve_model(f"{MODELS}:{name}")
    assert fault in str(caught.value)
    assert main(["extract", f"{MODELS}:{name}"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("autoddl: ")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def model(:\n", "line 1: invalid syntax"),
        ("import does_not_exist\n", "ModuleNotFoundError: No module named 'does_not_exist' (broken.py, line 1)"),
        ("x = 1 / 0\n", "ZeroDivisionError: division by zero (broken.py, line 1)"),
    ],
)
def test_broken_files_are_one_line(text, fault, tmp_path):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UserError) as caught:
        resolve_model(f"{tmp_path / 'broken.py'}:model")
    assert fault in str(caught.value) and "\n" not in str(caught.value)


def test_there_is_no_such_file(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        resolve_model(f"{tmp_path / 'none.py'}:model")


def test_options_do_not_apply():
    with pytest.raises(UserError, match="heads=2 does not apply"):
        resolve_model(f"{MODELS}:nano", heads=2)


def test_neighbours_of_the_file_are_importable(tmp_path):
    (tmp_path / "parts.py").write_text("import oneflow.nn as nn\nclass Part(nn.Linear):\n    pass\n")
    (tmp_path / "model.py").write_text(
        "import oneflow as flow\nfrom parts import Part\nprint('hello')\n"
        "def model():\n    print('there')\n    return Part(4, 2), flow.zeros(3, 4)\n"
    )
    before = list(sys.path)
    graph = resolve_model(f"{tmp_path / 'model.py'}:model")
    assert graph.name == "Part" and sys.path == before


# ---- The command --------------------------------------------------------------------------------------------------------------


def test_command_writes_a_graph_that_can_be_planned(tmp_path, capsys):
    graph = tmp_path / "graph.json"
    assert main(["extract", f"{MODELS}:nano", "-o", str(graph)]) == 0
    text = capsys.readouterr().out
    assert "blocks.*.attn.c_attn x 3" in text and f"Written to {graph}" in text and "41,394 parameters" not in text
    assert resolve_model(str(graph)) == extracted("nano")


def test_command_prints_json_and_nothing_else(tmp_path, capfd):
    (tmp_path / "model.py").write_text(
        "import oneflow as flow\nprint('said by the file')\n"
        "def model():\n    print('said by the function')\n    return flow.nn.Linear(4, 2), flow.zeros(3, 4)\n"
    )
    assert main(["extract", f"{tmp_path / 'model.py'}:model", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["layers"][0]["kind"] == "linear"
    assert "said by the file" in said.err and "said by the function" in said.err


# ---- Errors -------------------------------------------------------------------------------------------------------------------


def test_global_tensors_are_refused_with_what_to_do():
    from autoddl.extraction import extract

    flow: Any = load_oneflow()
    module = flow.nn.Sequential(flow.nn.Linear(4, 4))
    module.to_global(placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
    with pytest.raises(
        UserError, match=r"0.weight is a global tensor .*: AutoDDL chooses both itself; build the model of plain"
    ):
        extract(module, flow.zeros(2, 4))


def test_errors_name_the_module_that_raises():
    from autoddl.extraction import extract

    flow: Any = load_oneflow()
    module = flow.nn.Sequential(flow.nn.Linear(4, 5), flow.nn.Sequential(flow.nn.Linear(6, 3)))
    with pytest.raises(UserError, match=r"the module cannot be traced: .*5 vs 6.* in module '1\.0'$"):
        extract(module, flow.zeros(2, 4))


def test_imports_that_fail_name_the_file(tmp_path):
    package = tmp_path / "site-packages"  # an installed package that needs another one
    package.mkdir()
    (package / "layers_of_others.py").write_text("\nimport nothing_of_this_name\n")
    (tmp_path / "model.py").write_text(f"import sys\nsys.path.insert(0, {str(package)!r})\nimport layers_of_others\n")
    with pytest.raises(
        UserError, match=r"nothing_of_this_name.* \(imported in .*layers_of_others\.py, line 2\) \(line 3\)"
    ):
        resolve_model(f"{tmp_path}/model.py:model")


def test_models_that_depend_on_the_number_of_samples_are_refused():
    from autoddl.extraction import extract

    flow: Any = load_oneflow()

    class Odd(flow.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = flow.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            for _ in range(x.shape[0]):
                y = flow.relu(y)
            return y

    with pytest.raises(UserError, match="operators with 2 samples and 6 with 4; its forward pass should not depend"):
        extract(Odd(), flow.zeros(2, 4))
