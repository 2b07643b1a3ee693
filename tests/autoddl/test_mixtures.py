"""Mixtures of experts: numbers of parameters, against published ones and against formulas written by hand; configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autoddl
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.megatronflags import megatron_flags
from autoddl.pipelines.joint.uniform import UniformLayout
from autoddl.verification.scaling import Limits, scale
from autoddl.zoo import resolve_model
from autoddl.zoo.builtin import BuiltIn, recognise
from autoddl.zoo.huggingface import transformer_from_config
from autoddl.zoo.mixtures import MIXTURES, mixture

#: Totals that the model hub reads from the headers of the published weights ("safetensors": {"total": ...}).  DeepSeek-V3 has
#: 671,026,419,200 without its layer of multi-token prediction (README_WEIGHTS.md).  58 x 256 of them are biases that balance the
#: load, which no gradient trains.
PUBLISHED = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


def llama_attention(d, heads, kv_heads, bias=False):
    head = d // heads
    return 2 * d * d + 2 * d * kv_heads * head + (d + 2 * kv_heads * head if bias else 0)


def latent(d, heads, query_rank):
    """Projections and norms: 512 latent features, 64 rotated ones, heads of 128 + 64 and values of 128."""
    queries = d * query_rank + query_rank + query_rank * heads * 192 if query_rank else d * heads * 192
    return queries + d * (512 + 64) + 512 + 512 * heads * (128 + 128) + heads * 128 * d


def total(layers, d, vocabulary, attention, experts, inner, shared=0, gate=0, dense=0, dense_inner=0):
    """Two tables; per block attention and two norms; a router and experts, or a dense MLP; a last norm."""
    sparse = d * experts + 3 * d * inner * experts + 3 * d * shared + gate
    return (
        2 * vocabulary * d + layers * (attention + 2 * d) + (layers - dense) * sparse + dense * 3 * d * dense_inner + d
    )


BY_HAND = {
    "mixtral-8x7b": total(32, 4096, 32000, llama_attention(4096, 32, 8), 8, 14336),
    "mixtral-8x22b": total(56, 6144, 32000, llama_attention(6144, 48, 8), 8, 16384),
    "qwen1.5-moe-a2.7b": total(24, 2048, 151936, llama_attention(2048, 16, 16, True), 60, 1408, 5632, 2048),
    "qwen2-57b-a14b": total(28, 3584, 151936, llama_attention(3584, 28, 4, True), 64, 2560, 20480, 3584),
    "deepseek-moe-16b": total(28, 2048, 102400, llama_attention(2048, 16, 16), 64, 1408, 2 * 1408, 0, 1, 10944),
    "deepseek-v2-lite": total(27, 2048, 102400, latent(2048, 16, 0), 64, 1408, 2 * 1408, 0, 1, 10944),
    "deepseek-v2": total(60, 5120, 102400, latent(5120, 128, 1536), 160, 1536, 2 * 1536, 0, 1, 12288),
    "deepseek-v3": total(61, 7168, 129280, latent(7168, 128, 1536), 256, 2048, 2048, 0, 3, 18432),
}


@pytest.mark.parametrize("name", [model.name for model in MIXTURES])
def test_models_have_the_published_parameters(name):
    graph = resolve_model(name)
    assert graph.num_parameters == PUBLISHED[name] == BY_HAND[name]
    found = recognise(graph)
    assert found is not None and found.graph().hash == graph.hash


CONFIGS = {
    "mixtral-8x7b": {"model_type": "mixtral", "max_position_embeddings": 32768},
    "qwen1.5-moe-a2.7b": {"model_type": "qwen2_moe", "max_position_embeddings": 8192},
    "deepseek-moe-16b": {
        "model_type": "deepseek",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 28,
        "num_key_value_heads": 16,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "deepseek-v3": {"model_type": "deepseek_v3", "max_position_embeddings": 163840, "routed_scaling_factor": 2.5},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_give_the_models(name):
    model = next(model for model in MIXTURES if model.name == name)
    family, found, *_ = transformer_from_config(CONFIGS[name], "config.json")
    assert family == "moe"
    assert found.sequence == CONFIGS[name]["max_position_embeddings"]
    assert mixture(replace(found, sequence=4096)).hash == mixture(model).hash


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model_type": "deepseek"}, "num_experts_per_tok is null"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 2}, "decoder_sparse_step is 2, should be 1"),
        ({"model_type": "deepseek_v3", "routed_scaling_factor": "2"}, 'routed_scaling_factor is "2"'),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "a token chooses 9 of 8 experts"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 3}, "3 of 3 blocks are dense"),
    ],
)
def test_what_is_no_mixture_is_refused(changes, fault):
    with pytest.raises(UserError, match=fault):
        transformer_from_config(changes, "config.json")


def test_scaled_down_mixtures_keep_their_kinds_of_blocks():
    """61 blocks of which 3 are dense: two of each kind are kept, and experts are narrower, with the strategies of the plan."""
    model = replace(next(m for m in MIXTURES if m.name == "deepseek-v3"), sequence=256)
    graph = mixture(model)
    whole = Strategy(((1, 1, 1), (4, 1, 1)))
    divided = replace(whole, experts=(1, 4))
    strategies = {layer.name: divided if layer.kind == "experts" else whole for layer in graph.layers}
    built_in = BuiltIn("moe", model)
    found = scale(graph, strategies, Workload(8, 4, "float32"), Limits(memory_bytes=2**34), built_in)
    assert found.built_in is not None
    sizes = found.built_in.sizes
    assert (sizes.layers, sizes.dense_layers, sizes.experts) == (4, 2, 256)
    assert sizes.expert_width < 2048 and sizes.shared_width < 2048
    assert found.graph.hash == mixture(sizes).hash
    assert {name for name, strategy in found.strategies.items() if strategy.experts} == {
        "layers.2.mlp.experts",
        "layers.3.mlp.experts",
    }


def test_megatron_flags_of_a_mixture():
    """8 experts of 14336 features, 2 for each token, 1280 slots for 4096 tokens: 1280 x 8 / (2 x 4096) = 1.25."""
    layout = UniformLayout(2, 1, 8, expert_parallel=4)
    lines = megatron_flags(resolve_model("mixtral-8x7b"), layout, Workload(64, 8, "mixed"))
    flags = " ".join(lines)
    for part in (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336",
        "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4",
        "--num-query-groups 8",
    ):
        assert part in flags
    # Latent attention is not Megatron-LM's plain attention: only the degrees are written.
    assert not any(
        "num-layers" in line for line in megatron_flags(resolve_model("deepseek-v3"), layout, Workload(64, 8, "mixed"))
    )


def test_experts_of_a_priced_configuration_are_divided_over_replicas():
    plan = autoddl.price("mixtral-8x7b", cluster="dgx-h100", nodes=2, tp=2, ep=8, batch=64, sequence=1024)
    experts = [s for name, s in plan.strategies.items() if plan.graph[name].kind == "experts"]
    assert {(s.splits, s.experts) for s in experts} == {(((2, 1, 1), (4, 2, 1)), (2, 4))}
    with pytest.raises(UserError, match="ep 3 does not divide the dp 8 replicas"):
        autoddl.price("mixtral-8x7b", cluster="dgx-h100", nodes=2, tp=2, ep=3)
    with pytest.raises(UserError, match="ep 2: the model gpt2 has no experts"):
        autoddl.price("gpt2", cluster="dgx-h100", nodes=1, ep=2)


def test_the_capacity_can_be_chosen():
    """4096 tokens choose 2 of 8 experts: 1024 slots in a balanced load."""
    for factor, slots in ((1.0, 1024), (2.0, 2048), (4.0, 4096), (9.0, 4096)):
        graph = resolve_model("mixtral-8x7b", capacity_factor=factor)
        assert {layer.attributes["capacity"] for layer in graph.layers if layer.kind == "experts"} == {slots}
    with pytest.raises(UserError, match="capacity_factor=0 should be more than 0"):
        resolve_model("mixtral-8x7b", capacity_factor=0.0)
    with pytest.raises(UserError, match="does not apply to gpt2"):
        resolve_model("gpt2", capacity_factor=2.0)
