"""Parameter counts of published configurations, to the last parameter.

Each count is the published one of the stated class: the number of elements in its checkpoint, shared tensors counted once.
No published count was found for falcon-7b and gpt-neo-1.3b: theirs are computed by hand alone.

The formulas repeat the arithmetic without the layer graphs: v, d, n, f, h are vocabulary, width, blocks, MLP width and heads.
"""

from __future__ import annotations

import pytest

from autoddl.zoo.huggingface import transformer_from_config
from autoddl.zoo.named import BUILDERS


def llama_like(v, d, n, f, q, kv, *, tied, qkv_bias=False, norms=2, qk_norm=0):
    """RMS norms, gated MLP; q and kv are the features of all queries, and of all keys."""
    block = 2 * d * q + 2 * d * kv + 3 * d * f + norms * d + 2 * qk_norm + (q + 2 * kv if qkv_bias else 0)
    return (1 if tied else 2) * v * d + n * block + d


def biased(v, d, n, f, norms, *, tables=0, ends=0):
    """Layer norms and biases; ``tables`` and ``ends`` are rows of d, and other elements, outside of the blocks."""
    block = (4 * d * d + 4 * d) + (2 * d * f + f + d) + norms * 2 * d
    return v * d + tables * d + n * block + ends


def t5(v, d, n, f, q, h, *, gated, tied):
    """q: features of all heads.  The tables of relative positions have 32 rows of h."""
    mlp = (3 if gated else 2) * d * f
    encoder, decoder = n * (4 * d * q + mlp + 2 * d), n * (8 * d * q + mlp + 3 * d)
    return (1 if tied else 2) * v * d + encoder + decoder + 2 * d + 2 * 32 * h


def vit(d, n, f):
    """Images of 224, patches of 16, 1000 classes: the tables are the class token, and 197 positions."""
    patches = 3 * 16 * 16 * d + d
    return biased(0, d, n, f, 2, tables=1 + 197, ends=patches + 2 * d + 1000 * d + 1000)


def config(kind, **fields):
    return {"model_type": kind, **fields}


def neox(d, n, h, vocabulary):
    return config(
        "gpt_neox",
        hidden_size=d,
        num_hidden_layers=n,
        num_attention_heads=h,
        intermediate_size=4 * d,
        vocab_size=vocabulary,
    )


def decoder_sizes(kind, d, f, n, h, kv, **fields):
    sizes = {"hidden_size": d, "intermediate_size": f, "num_hidden_layers": n, "num_attention_heads": h}
    return config(kind, **sizes, num_key_value_heads=kv, **fields)


LABELS = {"id2label": {str(i): f"label {i}" for i in range(1000)}}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
T5_11 = {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
VIT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}

#: Name, class, configuration, published count, and the same by hand.
PUBLISHED = [
    ("gpt2", "GPT2LMHeadModel", config("gpt2"), 124_439_808, biased(50257, 768, 12, 3072, 2, tables=1024 + 2)),
    (
        "llama-2-7b",
        "LlamaForCausalLM",
        config("llama"),
        6_738_415_616,
        llama_like(32000, 4096, 32, 11008, 4096, 4096, tied=False),
    ),
    (
        "mistral-7b",
        "MistralForCausalLM",
        config("mistral"),
        7_241_732_096,
        llama_like(32000, 4096, 32, 14336, 4096, 1024, tied=False),
    ),
    (
        "qwen2-7b",
        "Qwen2ForCausalLM",
        decoder_sizes("qwen2", 3584, 18944, 28, 28, 4, vocab_size=152064),
        7_615_616_512,
        llama_like(152064, 3584, 28, 18944, 3584, 512, tied=False, qkv_bias=True),
    ),
    (
        "qwen3-0.6b",
        "Qwen3ForCausalLM",
        decoder_sizes("qwen3", 1024, 3072, 28, 16, 8, tie_word_embeddings=True),
        596_049_920,
        llama_like(151936, 1024, 28, 3072, 2048, 1024, tied=True, qk_norm=128),
    ),
    (
        "gemma-2b",
        "GemmaForCausalLM",
        decoder_sizes("gemma", 2048, 16384, 18, 8, 1),
        2_506_172_416,
        llama_like(256000, 2048, 18, 16384, 2048, 256, tied=True),
    ),
    (
        "gemma-7b",
        "GemmaForCausalLM",
        config("gemma"),
        8_537_680_896,
        llama_like(256000, 3072, 28, 24576, 4096, 4096, tied=True),
    ),
    (
        "gemma-2-9b",
        "Gemma2ForCausalLM",
        decoder_sizes("gemma2", 3584, 14336, 42, 16, 8),
        9_241_705_984,
        llama_like(256000, 3584, 42, 14336, 4096, 2048, tied=True, norms=4),
    ),
    (
        "gemma-3-1b",
        "Gemma3ForCausalLM",
        decoder_sizes("gemma3_text", 1152, 6912, 26, 4, 1, vocab_size=262144),
        999_885_952,
        llama_like(262144, 1152, 26, 6912, 1024, 256, tied=True, norms=4, qk_norm=256),
    ),
    (
        "phi-3-mini",
        "Phi3ForCausalLM",
        config("phi3"),
        3_821_079_552,
        llama_like(32064, 3072, 32, 8192, 3072, 3072, tied=False),
    ),
    (
        "phi-2",
        "PhiForCausalLM",
        decoder_sizes("phi", 2560, 10240, 32, 32, 32),
        2_779_683_840,
        biased(51200, 2560, 32, 10240, 1, tables=51200 + 2, ends=51200),
    ),
    (
        "pythia-70m",
        "GPTNeoXForCausalLM",
        neox(512, 6, 8, 50304),
        70_426_624,
        biased(50304, 512, 6, 2048, 2, tables=50304 + 2),
    ),
    (
        "pythia-1b",
        "GPTNeoXForCausalLM",
        neox(2048, 16, 8, 50304),
        1_011_781_632,
        biased(50304, 2048, 16, 8192, 2, tables=50304 + 2),
    ),
    (
        "pythia-6.9b",
        "GPTNeoXForCausalLM",
        neox(4096, 32, 32, 50432),
        6_857_302_016,
        biased(50432, 4096, 32, 16384, 2, tables=50432 + 2),
    ),
    (
        "gpt-neox-20b",
        "GPTNeoXForCausalLM",
        config("gpt_neox"),
        20_554_567_680,
        biased(50432, 6144, 44, 24576, 2, tables=50432 + 2),
    ),
    (
        "gpt-j-6b",
        "GPTJForCausalLM",
        config("gptj"),
        6_050_882_784,
        # no biases of the four projections of attention
        biased(50400, 4096, 28, 16384, 1, tables=50400 + 2, ends=50400) - 28 * 4 * 4096,
    ),
    (
        "gpt-neo-1.3b",
        "GPTNeoForCausalLM",
        config("gpt_neo"),
        1_315_575_808,
        # no biases of queries, keys and values
        biased(50257, 2048, 24, 8192, 2, tables=2048 + 2) - 24 * 3 * 2048,
    ),
    ("opt-125m", "OPTForCausalLM", config("opt"), 125_239_296, biased(50272, 768, 12, 3072, 2, tables=2050 + 2)),
    (
        "bloom-560m",
        "BloomForCausalLM",
        config("bloom", hidden_size=1024, n_layer=24, n_head=16),
        559_214_592,
        biased(250880, 1024, 24, 4096, 2, tables=2 + 2),
    ),
    (
        "falcon-7b",
        "FalconForCausalLM",
        config("falcon"),
        6_921_720_704,
        65024 * 4544 + 32 * (4544 * (4544 + 2 * 64) + 4544 * 4544 + 2 * 4 * 4544 * 4544 + 2 * 4544) + 2 * 4544,
    ),
    (
        "distilbert-base-uncased",
        "DistilBertForMaskedLM",
        config("distilbert"),
        66_985_530,
        # the norm of the embeddings; the head: a projection, its norm, and a bias for each token
        biased(30522, 768, 6, 3072, 2, tables=512 + 2, ends=768 * 768 + 3 * 768 + 30522),
    ),
    (
        "t5-small",
        "T5ForConditionalGeneration",
        config("t5"),
        60_506_624,
        t5(32128, 512, 6, 2048, 512, 8, gated=False, tied=True),
    ),
    (
        "t5-base",
        "T5ForConditionalGeneration",
        config("t5", **T5_BASE),
        222_903_552,
        t5(32128, 768, 12, 3072, 768, 12, gated=False, tied=True),
    ),
    (
        "flan-t5-small",
        "T5ForConditionalGeneration",
        config("t5", **T5_11, tie_word_embeddings=False),
        76_961_152,
        t5(32128, 512, 8, 1024, 384, 6, gated=True, tied=False),
    ),
    ("vit-base-patch16-224", "ViTForImageClassification", config("vit", **LABELS), 86_567_656, vit(768, 12, 3072)),
    (
        "vit-large-patch16-224",
        "ViTForImageClassification",
        config("vit", **LABELS, **VIT_LARGE),
        304_326_632,
        vit(1024, 24, 4096),
    ),
]


@pytest.mark.parametrize(
    ("fields", "published", "by_hand"),
    [entry[2:] for entry in PUBLISHED],
    ids=[f"{entry[0]}-{entry[1]}" for entry in PUBLISHED],
)
def test_parameters_equal_the_published_count(fields, published, by_hand):
    model = transformer_from_config(fields, "config.json")
    assert BUILDERS[model.family](model.sizes).num_parameters == by_hand == published
