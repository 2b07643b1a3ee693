"""The sequence length of a model: in the headers of texts, and where it comes from if the user gave none."""

from __future__ import annotations

import json

import pytest

import autoddl
from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, load_graph
from autoddl.explain.view import batch_text
from autoddl.search.planner import InfeasibleError
from autoddl.zoo import resolve_model
from autoddl.zoo.layers import GraphBuilder, add, embedding, linear, opaque

#: Qwen2's fields, of a small model.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 131072,
    "model_type": "qwen2",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
NOTE = "the sequence is 131,072 tokens, max_position_embeddings of its configuration; sequence=N changes it"
SAID = NOTE.replace("sequence=N", "--sequence N")


@pytest.fixture()
def qwen2(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN2))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*words]) == 0
    return capsys.readouterr().out.splitlines()


# ---- Headers -----------------------------------------------------------------------------------------------------------


SMALL = ["gpt:2x64", "--sequence", "32", "--vocabulary", "256", "--cluster", "gcp-a100", "--nodes", "2"]
SMALL += ["--devices-per-node", "1", "--batch", "8", "--recompute", "never", "--quiet"]
#: 8 * 32 = 256.
HEADER = "  8 sequences of 32 tokens per step (256 tokens)"


def test_headers_have_sequence_and_tokens(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    assert printed(capsys, "plan", *SMALL, "--micro-batch", "4", "-o", path)[2] == f"{HEADER} in 2 micro-batches of 4"
    assert printed(capsys, "compare", *SMALL)[1] == HEADER
    assert printed(capsys, "explain", path)[1] == HEADER


def test_pipelines_and_reports_have_sequence_and_tokens(capsys, tmp_path):
    path, page = str(tmp_path / "plan.json"), tmp_path / "plan.html"
    words = ["--micro-batch", "4", "--pipeline", "auto", "-o", path]
    assert printed(capsys, "plan", *SMALL, *words)[2] == f"{HEADER} in 2 micro-batches of 4"
    printed(capsys, "report", path, "-o", str(page))
    assert page.read_text().count(HEADER.strip()) == 2  # in the title and in the table of the workload


def two_lengths(second: int) -> LayerGraph:
    """A source and a target of tokens, the target of ``second`` tokens."""
    builder = GraphBuilder("translation", "sequence")
    source = builder.add(embedding("source", 6, 100, 8))
    builder.add(opaque("cross", (6, 8), (second, 8)), source, builder.add(embedding("target", second, 100, 8)))
    return builder.build()


def frames(sample: str) -> LayerGraph:
    """80 features of 1,500 frames of speech."""
    builder = GraphBuilder("speech", sample)
    builder.chain(builder.add(linear("in", 1500, 80, 8)), [add("again", (1500, 8))])
    return builder.build()


@pytest.mark.parametrize(
    ("graph", "batch", "text"),
    [
        # Positions of a table beyond the sequence do not count: the table of gpt2 has 1,024.
        (resolve_model("gpt2", sequence=128), 1, "1 sequence of 128 tokens per step (128 tokens)"),
        (resolve_model("llama2-7b"), 1024, "1,024 sequences of 4,096 tokens per step (4,194,304 tokens)"),
        (resolve_model("bert-large"), 2, "2 sequences of 512 tokens per step (1,024 tokens)"),
        (resolve_model("vgg11"), 4096, "4,096 images per step"),
        (resolve_model("mlp:8,4"), 3, "3 rows per step"),
        (frames("sequence"), 2, "2 sequences of 1,500 rows per step (3,000 rows)"),
        (frames("image"), 2, "2 images per step"),
        (two_lengths(6), 2, "2 sequences of 6 tokens per step (12 tokens)"),
        # No one length is that of both.
        (two_lengths(7), 2, "2 sequences per step"),
    ],
    ids=lambda value: value.name if isinstance(value, LayerGraph) else None,
)
def test_samples_in_words(graph, batch, text):
    assert batch_text(graph, batch) == text


# ---- Where the sequence comes from -------------------------------------------------------------------------------------


def test_sequence_of_a_configuration_is_noted(qwen2, capsys):
    assert resolve_model(qwen2).notes == (NOTE,) and resolve_model(qwen2)["embed_tokens"].rows == 131072
    given = resolve_model(qwen2, sequence=64)
    assert given.notes == () and given["embed_tokens"].rows == 64
    words = ["plan", qwen2, "--cluster", "dgx-a100", "--nodes", "1", "--batch", "8", "--wide", "--quiet"]
    assert f"  {SAID}" in printed(capsys, *words)
    assert not any("max_position_embeddings" in line for line in printed(capsys, *words, "--sequence", "4096"))


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"model_type": "gpt2", "n_positions": 512}, "512 tokens, n_positions of its configuration;"),
        (
            {"model_type": "gpt2", "max_position_embeddings": 512},
            "512 tokens, max_position_embeddings of its configuration;",
        ),
        ({"model_type": "gpt2"}, "1,024 tokens, n_positions of gpt2 by default;"),
        ({"model_type": "llama"}, "2,048 tokens, max_position_embeddings of llama by default;"),
        ({"model_type": "bert"}, "512 tokens, max_position_embeddings of bert by default;"),
        (
            {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1},
            "512 tokens, max_position_embeddings of its configuration (514) less 2;",
        ),
    ],
)
def test_field_of_the_sequence_is_named(config, note, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    notes = [text for text in resolve_model(str(path)).notes if text.startswith("the sequence is ")]
    assert len(notes) == 1 and note in notes[0]


LIMIT = {"cluster": "dgx-a100", "nodes": 1, "batch": 8, "memory_limit_bytes": 2.0**26, "quiet": True}


@pytest.mark.parametrize("pipeline", [None, "auto", "dapple", "chimera"])
def test_an_error_that_nothing_fits_names_the_sequence(qwen2, pipeline):
    with pytest.raises(UserError) as caught:
        autoddl.plan(qwen2, pipeline=pipeline, time_limit_s=2.0, **LIMIT)
    assert str(caught.value).endswith(f"; {NOTE}") and str(caught.value).count(NOTE) == 1
    with pytest.raises(UserError) as caught:
        autoddl.plan(qwen2, pipeline=pipeline, sequence=131072, time_limit_s=2.0, **LIMIT)
    assert "max_position_embeddings" not in str(caught.value)


def test_error_of_a_comparison_and_of_the_command_name_it(qwen2, capsys):
    with pytest.raises(InfeasibleError) as caught:
        autoddl.compare(qwen2, **LIMIT)
    assert NOTE in str(caught.value) and caught.value.least_bytes > 2**26
    words = ["plan", qwen2, "--cluster", "dgx-a100", "--nodes", "1", "--batch", "8", "--memory-limit", "0.05"]
    assert main([*words, "--quiet"]) == 2
    assert capsys.readouterr().err.rstrip().endswith(SAID)


def test_other_errors_do_not_name_the_sequence(qwen2):
    with pytest.raises(UserError) as caught:
        autoddl.plan(qwen2, cluster="dgx-a100", nodes=1, batch=8, micro_batch=3, quiet=True)
    assert "max_position_embeddings" not in str(caught.value)


def test_saved_graph_keeps_the_note(qwen2, tmp_path):
    path = tmp_path / "graph.json"
    resolve_model(qwen2).save(path)
    assert load_graph(path).notes == (NOTE,)
