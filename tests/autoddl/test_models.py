"""Built-in models against published parameter counts and hand arithmetic."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, load_graph
from autoddl.zoo import (
    Transformer,
    bert,
    gpt,
    is_oneflow_model,
    known_models,
    llama,
    mlp,
    pad_vocabulary,
    resnet,
    resolve_model,
    vgg,
)
from autoddl.zoo.layers import kept_by_epilogue, linear
from autoddl.zoo.named import TRANSFORMERS

FAMILIES = {"gpt": gpt, "bert": bert, "llama": llama}
#: What the graph of BERT leaves out: the pooler, and the next-sentence head.
POOLER_1024, NEXT_SENTENCE_1024 = 1024 * 1024 + 1024, 2 * 1024 + 2


def published(name: str) -> LayerGraph:
    """A model as published: its vocabulary not padded."""
    family, model = TRANSFORMERS[name]
    return FAMILIES[family](model)


# ---- Parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt2-64", 1_389_327_360),  # the figure of Chimera's paper
        ("bert-base", 109_514_298),  # BertForMaskedLM
        ("bert-large", 335_174_458),  # BertForMaskedLM
        ("bert-48", 669_790_012 - POOLER_1024 - NEXT_SENTENCE_1024),  # the figure of Chimera's paper
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-33b", 32_528_943_616),
        ("llama-65b", 65_285_660_672),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
    ],
)
def test_parameters_of_published_transformers(name, parameters):
    assert published(name).num_parameters == parameters


@pytest.mark.parametrize(
    ("depth", "millions"), [(11, 132.863336), (13, 133.047848), (16, 138.357544), (19, 143.667240)]
)
def test_parameters_of_vgg(depth, millions):
    assert vgg(depth).num_parameters == round(millions * 1e6)


def test_parameters_of_gpt3_by_hand():
    """Blocks of 12 d^2 + 13 d, two norms' worth at the end, token and position tables."""
    width, vocabulary = 12288, 50304
    block = 4 * width**2 + 4 * width + 8 * width**2 + 5 * width + 4 * width
    assert block == 12 * width**2 + 13 * width
    graph = resolve_model("gpt3-175b")
    assert graph.num_parameters == 96 * block + 2 * width + vocabulary * width + 2048 * width
    assert 174.5e9 < graph.num_parameters < 174.7e9


def test_parameters_of_the_perceptron():
    graph = resolve_model("mlp:32768,16384,4096,2048,512")
    assert graph.num_parameters == 32768 * 16384 + 16384 * 4096 + 4096 * 2048 + 2048 * 512
    assert [layer.kind for layer in graph.layers] == ["linear"] * 4
    assert [layer.epilogue for layer in graph.layers] == [("relu",)] * 3 + [("mse_loss",)]
    assert all(layer.rows == 1 and len(layer.parameters) == 1 for layer in graph.layers)


def test_a_text_too_long_for_a_file_name_is_still_a_model():
    assert len(resolve_model("mlp:" + ",".join(["64"] * 1500)).layers) == 1499
    with pytest.raises(UserError, match="is unknown"):
        resolve_model("x" * 5000)
    with pytest.raises(UserError, match="cannot be read"):
        resolve_model("x" * 5000 + ".json")


def test_names_pad_the_vocabulary_and_say_so():
    graph = resolve_model("gpt2")
    assert graph.num_parameters == 124_439_808 + (50304 - 50257) * 768
    assert any("50257" in note and "50304" in note for note in graph.notes)
    assert resolve_model("gpt2", vocabulary=1000)["wte"].attributes["vocabulary"] == 1024
    exact = resolve_model("gpt2", vocabulary=1024)
    assert exact["loss"].attributes["vocabulary"] == 1024 and exact.notes == ()
    assert [pad_vocabulary(v) for v in (1, 128, 129, 50257)] == [128, 128, 256, 50304]


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def test_flops_of_gpt_by_hand():
    """24 S d^2 + 4 S^2 d per block and 2 S d V for the logits (Narayanan et al. 2021, its forward pass)."""
    layers, width, length, vocabulary = 24, 1024, 2048, 50304
    block = 24 * length * width**2 + 4 * length**2 * width
    graph = resolve_model("gpt:24x1024")
    assert graph.flops == layers * block + 2 * length * width * vocabulary
    assert graph["h.3.attn"].flops == 4 * 2048**2 * 16 * 64


def test_flops_of_llama_with_grouped_heads_by_hand():
    graph = resolve_model("llama2-70b")
    rows, width, inner = 4096, 8192, 28672
    assert graph["layers.0.self_attn.q_proj+k_proj+v_proj"].flops == 2 * rows * width * (64 + 2 * 8) * 128
    assert graph["layers.0.mlp.gate_proj+up_proj"].flops == 2 * rows * width * 2 * inner
    assert graph["layers.0.mlp.down_proj"].flops == 2 * rows * width * inner
    assert graph["layers.0.self_attn"].flops == 4 * rows * rows * 64 * 128


@pytest.mark.parametrize(("depth", "multiply_adds"), [(11, 7.609e9), (13, 11.308e9), (16, 15.470e9), (19, 19.632e9)])
def test_flops_of_vgg(depth, multiply_adds):
    """Multiply-adds of torchvision's models at 224 x 224, as the model zoos give them."""
    assert vgg(depth).flops == pytest.approx(2 * multiply_adds, rel=2e-3)


def test_flops_of_one_convolution_by_hand():
    layer = vgg(13)["features.5"]
    assert layer.input_shape == (64, 112, 112) and layer.output_shape == (128, 112, 112)
    assert layer.flops == 2 * (128 * 112 * 112) * (64 * 9)


def test_scale_of_flops_is_twice_the_parameters_per_token():
    """2 FLOPs per weight and token, but for attention; the table is not multiplied with (but as the output)."""
    graph = resolve_model("llama-7b", sequence=16)
    weights = graph.num_parameters - graph["embed_tokens"].num_parameters
    assert graph.flops / 16 == pytest.approx(2 * weights, rel=1e-3)


# ---- Structure ------------------------------------------------------------------------------------------------------


def test_block_of_gpt():
    graph = resolve_model("gpt2")
    block = [layer for layer in graph.layers if layer.block == "h" and layer.block_index == 7]
    assert [(layer.role, layer.kind) for layer in block] == [
        ("ln_1", "norm"),
        ("attn.c_attn", "linear"),
        ("attn", "attention"),
        ("attn.c_proj", "linear"),
        ("add_1", "add"),
        ("ln_2", "norm"),
        ("mlp.c_fc", "linear"),
        ("mlp.c_proj", "linear"),
        ("add_2", "add"),
    ]
    assert graph.inputs("h.7.add_1") == ("h.6.add_2", "h.7.attn.c_proj")
    assert graph.inputs("h.7.add_2") == ("h.7.add_1", "h.7.mlp.c_proj")
    assert graph.inputs("h.0.ln_1") == ("embed",) and graph.inputs("embed") == ("wte", "wpe")
    assert graph["h.7.attn"].input_shape == (1024, 3 * 768)
    assert graph["h.7.attn"].kept_elements == 12 * 1024 * 1024
    assert graph["h.7.mlp.c_fc"].epilogue == ("gelu",) and graph["h.7.mlp.c_fc"].kept_elements == 1024 * 4 * 768
    assert graph["lm_head"].parameters[0].tied_to == "wte" and graph["lm_head"].num_parameters == 0
    assert graph["lm_head"].attributes == {"in_features": 768, "out_features": 50304}


def test_block_of_llama():
    graph = resolve_model("llama3-8b")
    qkv = graph["layers.5.self_attn.q_proj+k_proj+v_proj"]
    assert qkv.modules == tuple(f"layers.5.self_attn.{p}_proj" for p in "qkv")
    assert [p.shape for p in qkv.parameters] == [(4096, 4096), (1024, 4096), (1024, 4096)]
    assert qkv.parameters[1].name == "layers.5.self_attn.k_proj.weight"
    gate_up = graph["layers.5.mlp.gate_proj+up_proj"]
    assert gate_up.attributes["out_features"] == 2 * 14336 and gate_up.output_shape == (8192, 14336)
    assert gate_up.epilogue == ("silu", "mul") and gate_up.kept_elements == 2 * 8192 * 14336
    assert graph["layers.5.self_attn"].attributes == {"heads": 32, "kv_heads": 8, "head_dim": 128, "causal": 1}
    assert graph["norm"].attributes["statistics"] == 1 and len(graph["norm"].parameters) == 1
    assert graph["lm_head"].parameters[0].tied_to is None
    assert resolve_model("llama3-1b")["lm_head"].parameters[0].tied_to == "embed_tokens"


def test_block_of_bert():
    graph = resolve_model("bert-large")
    assert graph.inputs("embeddings.embed") == tuple(
        f"embeddings.{t}_embeddings" for t in ("word", "token_type", "position")
    )
    prefix = "encoder.layer.3"
    assert graph.inputs(f"{prefix}.output.add") == (f"{prefix}.output.dense", f"{prefix}.attention.output.LayerNorm")
    assert graph.inputs(f"{prefix}.attention.self.query+key+value") == ("encoder.layer.2.output.LayerNorm",)
    assert len(graph[f"{prefix}.attention.self.query+key+value"].parameters) == 6
    assert graph["embeddings.token_type_embeddings"].attributes == {"vocabulary": 2, "features": 1024}
    decoder = graph["cls.predictions.decoder"]
    assert decoder.parameters[0].tied_to == "embeddings.word_embeddings" and decoder.num_parameters == 30592
    assert any("pooler" in note for note in graph.notes)


def test_chain_of_vgg():
    graph = vgg(13)
    assert nx.is_path(graph.networkx(), [layer.name for layer in graph.layers])
    assert [layer.kind for layer in graph.layers].count("conv2d") == 10
    pool = graph["features.24"]
    assert pool.kind == "pool" and pool.output_shape == (512, 7, 7) and pool.num_parameters == 0
    assert graph["classifier.0"].attributes == {"in_features": 25088, "out_features": 4096}
    assert graph["classifier.6"].epilogue == () and graph["loss"].input_shape == (1, 1000)
    assert graph["loss"].rows == 1 and graph.sample == "image"


@pytest.mark.parametrize("name", ["gpt:6x256", "bert:5x128", "llama:4x256"])
def test_repetitions_of_a_block_are_alike(name):
    graph = resolve_model(name)
    blocks = {}
    for layer in graph.layers:
        if layer.block:
            blocks.setdefault(layer.block_index, []).append((layer.role, layer.signature()))
    assert len(blocks) == int(name.partition(":")[2].partition("x")[0])
    for one, other in itertools.combinations(blocks.values(), 2):
        assert one == other


@pytest.mark.parametrize("name", [*known_models(), "mlp:8,8,8", "gpt:2x64", "bert:2x64", "llama:2x64"])
def test_every_graph_is_consistent(name):
    """Shapes fit along the edges, each layer but the tables is fed, only the loss has no reader, parameters have one name."""
    graph = resolve_model(name)
    read = {source for source, _ in graph.edges}
    for layer in graph.layers[:-1]:
        assert layer.name in read
    names = [p.name for layer in graph.layers for p in layer.parameters]
    assert len(names) == len(set(names))
    for layer in graph.layers:
        inputs = [graph[source] for source in graph.inputs(layer.name)]
        assert inputs or layer.kind in ("embedding", "position") or layer is graph.layers[0]
        if layer.kind in (
            "experts",
            "latent_attention",
            "token_gate",
        ):  # they read several tensors of different meaning
            assert sum(source.output_elements for source in inputs) == layer.input_elements
            continue
        for source in inputs:
            assert source.output_elements == layer.input_elements
        if layer.kind == "linear":
            assert layer.input_shape[-1] == layer.attributes["in_features"]
            weights = [p for p in layer.parameters if len(p.shape) == 2]
            assert sum(p.shape[0] for p in weights) == layer.attributes["out_features"]
            assert all(p.shape[1] == layer.attributes["in_features"] for p in weights)


@pytest.mark.parametrize("name", ["gpt2", "bert-48", "vgg16", "llama3-1b", "mlp:16,8,4"])
def test_round_trip(name, tmp_path):
    graph = resolve_model(name)
    graph.save(tmp_path / "graph.json")
    again = load_graph(tmp_path / "graph.json")
    assert again == graph and again.hash == graph.hash
    assert resolve_model(str(tmp_path / "graph.json")) == graph


def test_what_activations_keep():
    assert kept_by_epilogue(("gelu",), 10) == 10
    assert kept_by_epilogue(("relu",), 10) == 0
    assert kept_by_epilogue(("silu", "mul"), 10) == 20  # gate and factor: silu is computed again
    assert kept_by_epilogue(("gelu", "dropout"), 10) == 10  # the mask of bytes is counted apart
    assert kept_by_epilogue(("whatever",), 10) == 10
    assert linear("x", 4, 8, 32, epilogue=("silu", "mul")).output_shape == (4, 16)


# ---- What users ask for ---------------------------------------------------------------------------------------------


def test_default_heads():
    heads = {
        text: resolve_model(text).layers[5].attributes["heads"] for text in ("gpt:1x1024", "gpt:1x4096", "gpt:1x2112")
    }
    assert heads == {"gpt:1x1024": 16, "gpt:1x4096": 32, "gpt:1x2112": 33}
    assert resolve_model("gpt:1x4096", heads=64)["h.0.attn"].attributes["head_dim"] == 64
    assert resolve_model("gpt:1x100", heads=4)["h.0.attn"].attributes["head_dim"] == 25
    assert resolve_model("gpt:1x32")["h.0.attn"].attributes["heads"] == 1


def test_default_sequences():
    assert resolve_model("gpt:1x64")["wpe"].output_shape == (2048, 64)
    assert resolve_model("gpt2")["wpe"].output_shape == (1024, 768)
    assert resolve_model("gpt2-64")["wpe"].output_shape == (632, 1280)
    assert resolve_model("bert-48")["loss"].rows == 128
    assert resolve_model("bert:1x64", sequence=1024)["loss"].rows == 1024
    assert resolve_model("llama3-8b", sequence=100)["loss"].rows == 100
    assert resolve_model("gpt2", sequence=100)["wpe"].attributes["positions"] == 1024


def test_default_width_of_llama():
    """The widths that LLaMA's own models have come out of its rule."""
    for name in ("llama-7b", "llama-13b", "llama-33b", "llama-65b"):
        own = resolve_model(name)
        layers, width = sum(layer.role == "add_2" for layer in own.layers), own["norm"].features
        assert resolve_model(f"llama:{layers}x{width}").hash == own.hash


def test_functions_of_files_are_recognised():
    assert is_oneflow_model("model.py:make") and is_oneflow_model("some/where/model.py:make")
    assert not any(map(is_oneflow_model, ("model.py", "gpt:2x4", "model.py:", "graph.json", "model.py:a b")))


@pytest.mark.parametrize(
    ("text", "options", "fault"),
    [
        ("gpt2-xxl", {}, "did you mean 'gpt2-xl'"),
        ("VGG13", {}, "did you mean 'vgg13'"),
        ("vgg12", {}, "vgg11, vgg13"),
        ("", {}, "known are gpt2"),
        ("gpt:2", {}, "LAYERSxWIDTH"),
        ("gpt:0x64", {}, "LAYERSxWIDTH"),
        ("gpt:-1x64", {}, "LAYERSxWIDTH"),
        ("gpt:99999999x64", {}, "layers is 99999999, should be at most 4096"),
        ("gpt:2x100", {}, "multiple of 64"),
        ("gpt:2x64", {"heads": 5}, "such as 4"),
        ("gpt:2x64", {"sequence": 0}, "sequence=0 should be"),
        ("gpt:2x64", {"vocabulary": -3}, "vocabulary=-3 should be"),
        ("gpt2", {"sequence": 2000}, "at most 1024"),
        ("llama3-8b", {"heads": 12, "sequence": 64}, "divisor"),
        ("mlp:5", {}, "at least two"),
        ("mlp:5,0", {}, "'0'"),
        ("mlp:5,x", {}, "'x'"),
        ("mlp:", {}, "''"),
        ("mlp:5,4", {"heads": 2}, "heads=2 does not apply"),
        ("vgg13", {"sequence": 2}, "sequence=2 does not apply"),
        ("nowhere.json", {}, "cannot be read"),
        ("./nowhere", {}, "cannot be read"),
    ],
)
def test_what_is_refused(text, options, fault):
    with pytest.raises(UserError) as caught:
        resolve_model(text, **options)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_are_checked_where_they_enter():
    with pytest.raises(UserError, match="intermediate is -1"):
        Transformer("x", 1, 64, 1, 8, 128, intermediate=-1)
    with pytest.raises(UserError, match="at least two"):
        mlp([3])
    with pytest.raises(UserError, match="width 0"):
        mlp([3, 0])
    with pytest.raises(UserError, match="vgg12 is unknown"):
        vgg(12)
    with pytest.raises(UserError, match="16 pixels"):
        vgg(11, image=16)


def test_resnets_have_the_published_numbers_of_parameters():
    """Those of torchvision's models, from its documentation."""
    published = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
    assert {depth: resnet(depth).num_parameters for depth in published} == published
    assert resnet(50, image=64)["avgpool"].attributes["kernel_size"] == 2
    with pytest.raises(UserError, match="images of 100 pixels should be a multiple of 32 wide"):
        resnet(50, image=100)


def test_batch_norms_use_the_samples_that_are_asked_for():
    local, every = (resolve_model("resnet18", batch_norm=samples) for samples in ("local", "all"))
    assert local.hash == resnet(18).hash and every.hash == resnet(18, synchronised=True).hash
    assert local.notes == resnet(18).notes and not every.notes
    with pytest.raises(UserError, match="batch_norm='some' should be one of local, all"):
        resolve_model("resnet18", batch_norm="some")
    with pytest.raises(UserError, match="batch_norm=all: gpt2 has no batch norm"):
        resolve_model("gpt2", batch_norm="all")
