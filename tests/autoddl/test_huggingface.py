"""HuggingFace configurations: as published, with defaults, of other shapes, and broken."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.errors import UserError
from autoddl.zoo import bert, gpt, llama, resolve_model
from autoddl.zoo.huggingface import HUGGINGFACE_TYPES, transformer_from_config
from autoddl.zoo.mixtures import Mixture
from autoddl.zoo.named import BUILDERS

GPT2_XL = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 1600,
    "n_head": 25,
    "n_layer": 48,
    "n_positions": 1024,
    "output_past": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
BERT_LARGE = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
ROBERTA_BASE = {
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN2_HALF = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
PUBLISHED = [
    (GPT2_XL, 1_557_611_200),
    (BERT_LARGE, 335_174_458),
    (ROBERTA_BASE, 124_697_433),
    (LLAMA3_8B, 8_030_261_248),
    (MISTRAL_7B, 7_241_732_096),
    (QWEN2_HALF, 494_032_768),
]


def write(path, value) -> str:
    file = path / "config.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(file)


def fault(value) -> str:
    with pytest.raises(UserError) as caught:
        transformer_from_config(value, "here.json")
    message = str(caught.value)
    assert message.startswith("here.json: ") and "\n" not in message
    return message


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED, ids=[c["model_type"] for c, _ in PUBLISHED])
def test_parameters_as_published(config, parameters):
    family, model, *_ = transformer_from_config(config, "x/config.json")
    assert BUILDERS[family](model).num_parameters == parameters


@pytest.mark.parametrize(
    ("config", "name"), [(GPT2_XL, "gpt2-xl"), (BERT_LARGE, "bert-large"), (LLAMA3_8B, "llama3-8b")]
)
def test_same_graph_as_by_name(config, name, tmp_path):
    """The file, its folder and the built-in name are one model, and take the same options."""
    file = write(tmp_path, config)
    assert resolve_model(file).hash == resolve_model(name).hash
    assert resolve_model(str(tmp_path)).hash == resolve_model(name).hash
    assert resolve_model(file, sequence=64).hash == resolve_model(name, sequence=64).hash
    assert resolve_model(file).name == tmp_path.name


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("gpt2", 124_439_808), ("bert", 109_514_298), ("llama", 6_738_415_616), ("mistral", 7_241_732_096)],
)
def test_defaults_are_those_of_huggingface(kind, parameters):
    """A configuration class called without arguments makes gpt2, bert-base, LLaMA 7B, Mistral 7B."""
    family, model, *_ = transformer_from_config({"model_type": kind}, "config.json")
    assert BUILDERS[family](model).num_parameters == parameters


def test_fields_that_change_shapes():
    _, gpt2, *_ = transformer_from_config(
        {"model_type": "gpt2", "n_inner": 5, "tie_word_embeddings": False}, "config.json"
    )
    graph = gpt(gpt2)
    assert graph["h.0.mlp.c_fc"].attributes["out_features"] == 5
    assert graph["lm_head"].num_parameters == 50257 * 768
    _, alias, *_ = transformer_from_config(
        {"model_type": "gpt2", "hidden_size": 24, "num_hidden_layers": 3}, "config.json"
    )
    assert (alias.width, alias.layers) == (24, 3)
    biased = {**LLAMA3_8B, "attention_bias": True, "mlp_bias": True, "head_dim": 64, "num_hidden_layers": 1}
    graph = llama(transformer_from_config(biased, "config.json")[1])
    assert graph["layers.0.self_attn"].attributes["head_dim"] == 64
    assert [p.shape for p in graph["layers.0.self_attn.o_proj"].parameters] == [(4096, 32 * 64), (4096,)]
    assert len(graph["layers.0.mlp.gate_proj+up_proj"].parameters) == 4
    qwen = llama(transformer_from_config(QWEN2_HALF, "config.json")[1])
    assert len(qwen["layers.0.self_attn.q_proj+k_proj+v_proj"].parameters) == 6
    assert len(qwen["layers.0.self_attn.o_proj"].parameters) == 1
    relu = bert(transformer_from_config({**BERT_LARGE, "hidden_act": "relu"}, "config.json")[1])
    assert relu["encoder.layer.0.intermediate.dense"].epilogue == ("relu",)
    roberta = bert(transformer_from_config(ROBERTA_BASE, "config.json")[1])
    assert roberta["loss"].rows == 512 and roberta["embeddings.position_embeddings"].attributes["positions"] == 514


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "'model_type' is missing, should be one of gpt2, llama"),
        ([], "should be an object"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": 7}, "model_type is 7"),
        ({"model_type": "mamba"}, "should be one of gpt2"),
        ({"model_type": "t5", "feed_forward_proj": "gated"}, 'feed_forward_proj is "gated", should be one of gelu'),
        ({"model_type": "vit", "patch_size": 300}, "patch_size is 300, should be at most image_size, 224"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim is 512, should be 768"),
        ({"model_type": "stablelm", "use_parallel_residual": True}, "use_parallel_residual is true, should be false"),
        ({"model_type": "gpt2", "n_layer": "12"}, 'n_layer is "12", should be a whole number from 1 to 4096'),
        ({"model_type": "gpt2", "n_layer": True}, "n_layer is true"),
        ({"model_type": "gpt2", "n_layer": None}, "n_layer is null"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer is 0"),
        ({"model_type": "gpt2", "n_layer": 10**30}, "should be a whole number"),
        ({"model_type": "gpt2", "n_embd": 770}, "width 770 does not divide into 12 heads"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is true, should be false"),
        ({"model_type": "gpt2", "activation_function": "gelo"}, "should be one of gelu"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, 'should be "absolute"'),
        ({"model_type": "bert", "is_decoder": 0}, "is_decoder is 0"),
        ({"model_type": "roberta", "max_position_embeddings": 2}, "at least 3"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "divisor of the heads, such as 4"),
        ({"model_type": "llama", "tie_word_embeddings": "no"}, "should be true or false"),
    ],
)
def test_what_is_wrong_is_named(config, expected):
    assert expected in fault(config)


@pytest.mark.parametrize(
    "kind", ["olmo", "qwen3_moe", "gpt_neo2", "deepseek_vl", "phi4", "qwen2_vl", "gemma3", "mt5", "starcoder2"]
)
def test_other_architectures_are_no_typing_errors(kind):
    assert "did you mean" not in fault({"model_type": kind})


@pytest.mark.parametrize(
    "text", ["", "{", "[1,", '{"model_type": "gpt2", "n_layer": NaN}', "\0{}", "\u00b2", "[" * 100_000]
)
def test_broken_files(text, tmp_path):
    with pytest.raises(UserError, match=r"config\.json: (not a JSON document|cannot be read .* is a NUL)"):
        resolve_model(write(tmp_path, text))


def test_a_byte_order_mark_is_passed_over(tmp_path):
    with pytest.raises(UserError, match="neither a 'format'"):
        resolve_model(write(tmp_path, "\ufeff{}"))


def test_files_of_neither_kind(tmp_path):
    with pytest.raises(UserError, match="neither a 'format'"):
        resolve_model(write(tmp_path, {"n_layer": 3}))
    with pytest.raises(UserError, match="holds no JSON object"):
        resolve_model(write(tmp_path, "[]"))
    with pytest.raises(UserError, match="should be 'autoddl-graph'"):
        resolve_model(write(tmp_path, {"format": "autoddl-cluster", "version": 1}))
    graph = resolve_model("mlp:4,2")
    graph.save(tmp_path / "graph.json")
    with pytest.raises(UserError, match="heads=2 does not apply"):
        resolve_model(str(tmp_path / "graph.json"), heads=2)


LETTERS = 'ab1,{}[]"\n\x00é'
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 200),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(LETTERS, max_size=4),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(LETTERS, max_size=2), st.integers(0, 3), max_size=2),
)


def mutated(kind: str) -> st.SearchStrategy:
    fields = [*HUGGINGFACE_TYPES[kind].defaults, "model_type"]
    return st.dictionaries(st.sampled_from(fields), JUNK, max_size=4).map(lambda junk: {"model_type": kind, **junk})


@given(config=st.sampled_from(sorted(HUGGINGFACE_TYPES)).flatmap(mutated))
def test_mutated_configurations_give_a_model_or_a_user_error(config):
    """Any values in any fields: a graph that is consistent, or one line about the fault."""
    try:
        family, model, *_ = transformer_from_config(config, "here.json")
        if isinstance(model, Mixture):
            model = replace(model, dense_layers=min(model.dense_layers, model.layers - 1, 1))
        graph = BUILDERS[family](replace(model, layers=min(model.layers, 2)))
    except UserError as error:
        message = str(error)
        assert message.startswith("here.json: ") and "\n" not in message and len(message) < 400
    else:
        assert graph.num_parameters > 0 and graph.flops > 0


@given(cut=st.integers(0, 300), junk=st.text(LETTERS, max_size=3), at=st.integers(0, 300))
def test_damaged_files_give_a_model_or_a_user_error(tmp_path_factory, cut, junk, at):
    text = json.dumps(GPT2_XL)
    text = text[:at] + junk + text[at + cut % 5 :] if cut % 2 else text[:cut]
    path = tmp_path_factory.mktemp("damaged")
    try:
        graph = resolve_model(write(path, text.encode("utf-8", "replace").decode()))
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert graph.num_parameters > 0
