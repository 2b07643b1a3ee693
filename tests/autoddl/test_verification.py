"""What ``autoddl verify`` does without ranks: recognising and scaling models, comparing steps, judging numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.generators import generate
from autoddl.pipelines.runtime.pipeline.stage_traffic import sent_messages
from autoddl.planfile import unpipelined_plan
from autoddl.search.baselines import baselines
from autoddl.search.planner import Options, make_plan
from autoddl.text.verification import verification_text
from autoddl.verification.documents import verification_document
from autoddl.verification.fitting import fit_plan
from autoddl.verification.prediction import missing_steps, predict
from autoddl.verification.result import LayerCheck, PhaseCheck, StageCheck, Tolerance, ValueCheck, Verification
from autoddl.verification.run import verify
from autoddl.verification.scaling import Limits, needed_flops, needed_memory_bytes, scale
from autoddl.zoo import Transformer, bert, gpt, known_models, llama, mlp, resolve_model, vgg
from autoddl.zoo.builtin import BuiltIn, MLPSizes, VGGSizes, recognise

# ---- Recognising -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*known_models(), "mlp:32,16,8", "gpt:2x64", "bert:2x128", "llama:2x128"])
def test_built_in_models_are_recognised_by_their_graphs(name):
    graph = resolve_model(name)
    found = recognise(graph)
    assert found is not None and found.graph().hash == graph.hash


def test_unusual_sizes_are_recognised_too():
    common = {"layers": 3, "width": 48, "heads": 4, "sequence": 10, "vocabulary": 96}
    sizes = [
        ("gpt", gpt(Transformer("x", **common, intermediate=100, positions=12, activation="relu", tied=False))),
        ("bert", bert(Transformer("x", **common, types=5, activation="quick_gelu"))),
        ("llama", llama(Transformer("x", **common, kv_heads=2, head_dim=8, activation="gelu", qkv_bias=True))),
        ("llama", llama(Transformer("x", **common, output_bias=True, mlp_bias=True, activation="silu"))),
    ]
    for family, graph in sizes:
        found = recognise(graph)
        assert found is not None and found.family == family and found.graph().hash == graph.hash
    assert recognise(vgg(13, image=64, classes=10, hidden=32)) == BuiltIn("vgg", VGGSizes(13, 64, 10, 32))
    assert recognise(mlp([4, 4])) == BuiltIn("mlp", MLPSizes((4, 4)))


def test_what_differs_in_a_detail_is_not_recognised():
    graph = gpt(Transformer("x", 2, 16, 2, 8, 32))
    assert recognise(replace(graph, layers=(replace(graph.layers[0], flops=1.0), *graph.layers[1:]))) is None
    assert recognise(replace(graph, name="another name")) is not None
    assert recognise(replace(graph, layers=graph.layers[:-1], edges=graph.edges[:-1])) is None


# ---- Scaling ---------------------------------------------------------------------------------------------------------------------


def planned(name, level_sizes, batch=64):
    sizes = (1, *level_sizes) if len(level_sizes) == 1 else level_sizes
    options = Options(batch=batch, objective="communication", memory_limit_bytes=1e15)
    return make_plan(resolve_model(name), load_cluster("dgx-a100").resized(*sizes), options, with_baselines=False)


def transitions(graph, strategies):
    """The pairs of neighbours, by role, with their strategies."""
    place = {layer.name: layer.role or layer.name for layer in graph.layers}
    return {(place[a], place[b], strategies[a], strategies[b]) for a, b in graph.edges}


@pytest.mark.parametrize(
    ("name", "level_sizes"),
    [
        ("gpt3-13b", (2, 4)),
        ("bert-large", (4,)),
        ("llama2-70b", (8,)),
        ("llama3-8b", (2, 2)),
        ("vgg16", (4,)),
        ("mlp:32768,16384,4096,2048,512", (4,)),
    ],
)
def test_models_are_made_small_with_their_strategies(name, level_sizes):
    plan = planned(name, level_sizes)
    limits = Limits(4e9, 4e11)
    scaled = scale(plan.graph, plan.strategies, plan.workload, limits, recognise(plan.graph))
    num_ranks = math.prod(level_sizes)
    assert needed_memory_bytes(scaled.graph, scaled.workload, num_ranks) <= limits.memory_bytes
    assert needed_flops(scaled.graph, scaled.workload) <= limits.flops
    assert scaled.changes and scaled.built_in.graph().hash == scaled.graph.hash
    for layer in scaled.graph.layers:
        strategy = scaled.strategies[layer.name]
        assert strategy == plan.strategies[layer.name] and strategy.divides(layer)
        assert scaled.workload.micro_batch % strategy.p0 == 0
    assert transitions(scaled.graph, scaled.strategies) == transitions(plan.graph, plan.strategies)
    loaded = unpipelined_plan(plan.graph, plan.cluster, plan.workload, plan.strategies)
    fitted = fit_plan(loaded, num_ranks, limits, recognise(plan.graph))
    assert (fitted.scaled.graph, fitted.scaled.strategies) == (scaled.graph, scaled.strategies)
    assert predict(fitted).workers[0].priced


def test_what_is_small_stays_as_it_is():
    plan = planned("gpt:2x64", (4,), batch=8)
    for limits in (Limits(), Limits(1e12, 1e15)):
        scaled = scale(plan.graph, plan.strategies, plan.workload, limits, recognise(plan.graph))
        assert scaled.changes == () and scaled.graph.hash == plan.graph.hash and scaled.workload == plan.workload


def test_of_runs_of_equal_blocks_two_are_kept():
    graph = gpt(Transformer("x", 9, 64, 4, 32, 256))
    column, data = Strategy(((2, 2, 1),)), Strategy(((4, 1, 1),))
    is_split = [True, True, True, True, False, True, False, False, False]
    strategies = {layer.name: column if layer.block and is_split[layer.block_index] else data for layer in graph.layers}
    limits = Limits(flops=0.8 * needed_flops(graph, Workload(8, 8)))
    scaled = scale(graph, strategies, Workload(8, 8), limits, recognise(graph))
    norms = [layer for layer in scaled.graph.layers if layer.role == "ln_1"]
    assert [scaled.strategies[layer.name] == column for layer in norms] == [True, True, False, True, False, False]
    assert [str(change) for change in scaled.changes] == ["blocks 9 -> 6"]
    assert transitions(scaled.graph, scaled.strategies) == transitions(graph, strategies)


@settings(max_examples=30, deadline=None)
@given(memory=st.floats(1e6, 1e12), flops=st.floats(1e6, 1e14), which=st.sampled_from(["megatron", "data parallel"]))
def test_any_limits_are_kept_or_refused(memory, flops, which):
    graph = llama(Transformer("x", 5, 1024, 16, 256, 4096, kv_heads=8, intermediate=2816, activation="silu"))
    member = next(b for b in baselines(graph, (2, 2)) if b.name == which)
    workload, limits = Workload(64, 16), Limits(memory, flops)
    try:
        scaled = scale(graph, member.strategies, workload, limits, recognise(graph))
    except UserError as error:
        assert "is too large to be verified here" in str(error)
        return
    assert needed_memory_bytes(scaled.graph, scaled.workload, 4) <= memory
    assert needed_flops(scaled.graph, scaled.workload) <= flops
    assert bool(scaled.changes) == ((scaled.graph.hash, scaled.workload) != (graph.hash, workload))
    for layer in scaled.graph.layers:
        assert scaled.strategies[layer.name].divides(layer)
    assert transitions(scaled.graph, scaled.strategies) == transitions(graph, member.strategies)


def test_a_model_that_cannot_be_resized_gets_a_smaller_batch_or_is_refused():
    plan = planned("gpt:2x64", (4,))
    need = needed_memory_bytes(plan.graph, plan.workload, 4)
    scaled = scale(plan.graph, plan.strategies, plan.workload, Limits(need / 4), None)
    assert scaled.graph is plan.graph and {change.what for change in scaled.changes} <= {"batch", "micro-batch"}
    with pytest.raises(UserError, match=r"let FILE\.py:FUNCTION return a smaller one, .*, or give full_size=True"):
        scale(plan.graph, plan.strategies, plan.workload, Limits(1e6), None)


# ---- Comparing and judging -----------------------------------------------------------------------------------------------------


def step(collective=Collective.ALL_GATHER, size=4, stride=1, nbytes=1024.0):
    return Step(collective, Axis(size, stride), nbytes)


def test_steps_are_compared_as_multisets_up_to_padding():
    ran = [step(), step(), step(Collective.ALL_REDUCE, nbytes=1000.0), step(size=1)]
    assert missing_steps([step(), step(), step(Collective.ALL_REDUCE, nbytes=994.0)], ran) == ([], [])
    missing, unexpected = missing_steps([step(stride=2), step(), step(Collective.ALL_REDUCE, nbytes=900.0)], ran)
    assert missing == [step(stride=2), step(Collective.ALL_REDUCE, nbytes=900.0)]
    assert unexpected == [step(), step(Collective.ALL_REDUCE, nbytes=1000.0)]
    # Two biases of 64 numbers over 3 ranks are shards of 22 numbers each: 528 bytes, where 512 have a price.
    divided = [step(Collective.REDUCE_SCATTER, size=3, nbytes=528.0)]
    assert missing_steps([step(Collective.REDUCE_SCATTER, size=3, nbytes=512.0)], divided, 2) == ([], [])
    assert missing_steps([step(Collective.REDUCE_SCATTER, size=3, nbytes=512.0)], divided) != ([], [])


def test_messages_of_sums_of_a_few_numbers():
    # One number around a ring of four: three hops to be summed, three to be told; 6 messages of 4 ranks together.
    assert 4 * sent_messages(step(Collective.ALL_REDUCE, nbytes=4)) == 6
    assert 4 * sent_messages(step(Collective.ALL_REDUCE, nbytes=8)) == 12
    assert 4 * sent_messages(step(Collective.ALL_REDUCE, nbytes=8), number_bytes=8) == 6  # a loss in double precision
    two_doubles = step(Collective.ALL_REDUCE, nbytes=16)
    assert 4 * sent_messages(two_doubles, number_bytes=8, element_bytes=8) == 12
    assert 4 * sent_messages(step(Collective.ALL_REDUCE, nbytes=1024)) == 24
    assert 4 * sent_messages(step(Collective.ALL_GATHER, nbytes=4)) == 12


def a_verification(sent=(1e6, 1e6, 1e6), gradient=1e-7, parameter=1e-7, loss=2.0, missing=(), whole=3e6):
    names = ("forward", "backward", "gradient")
    phases = {name: PhaseCheck(1e6, value) for name, value in zip(names, sent)}
    phases["forward"] = replace(phases["forward"], missing=missing)
    layers = tuple(
        LayerCheck(
            f"h.{i}.fc",
            "linear",
            "h",
            "fc",
            Strategy(((2, 1, 2),)),
            phases,
            (f"h.{i}.fc.weight",),
        )
        for i in range(2)
    )
    return Verification(
        model="model",
        levels=(("node", 4),),
        schedule=generate("1f1b", num_stages=1, num_micro_batches=1, width=(4,)),
        workload=Workload(8, 8),
        changes=(),
        tolerance=Tolerance(1e-5, 1600.0),
        losses=((2.0, loss),) * 3,
        gradient_step=1,
        stages=(StageCheck(layers, 2e6, 1e6),),
        gradients=tuple(ValueCheck(f"h.{i}.fc.weight", gradient, 3) for i in range(2)),
        parameters=tuple(ValueCheck(f"h.{i}.fc.weight", parameter, 1) for i in range(2)),
        between=PhaseCheck(0.0, 0.0),
        step=PhaseCheck(3e6, whole),
        not_counted_because="" if whole is not None else "no network",
        notes=(),
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("gradient", "precision", "repeats"),
    [
        (2e-5, "float32", True),
        (2e-5, "float64", False),
        (2e-3, "float32", False),
        (math.nan, "float32", False),
        (1e-6, "float32", False),
    ],
)
def test_errors_that_may_be_rounding_are_decided_in_double_precision(monkeypatch, gradient, precision, repeats):
    runs = []

    def once(*_, in_double):
        runs.append(in_double)
        found = a_verification(gradient=1e-12 if in_double else gradient)
        return replace(found, workload=Workload(8, 8, "float64" if in_double else precision))

    monkeypatch.setattr("autoddl.verification.run._verified", once)
    found = verify(None, 4)
    assert runs == [False, True][: 1 + repeats]
    assert found.is_right == (repeats or gradient < 1e-5)
    note = "repeated in float64, since values were off by 2.0e-05 in float32, which may be rounding"
    assert (note in found.notes) == repeats


def test_verdicts():
    assert a_verification().is_right
    # 3 % of a megabyte and 1600 bytes are 31,600.
    assert a_verification(sent=(1.0315e6, 1e6, 1e6)).is_right
    for wrong, words in (
        (
            a_verification(sent=(1.032e6, 1e6, 1e6)),
            "h.0.fc, forward: 1,032,000 bytes were sent, 1,000,000 are predicted",
        ),
        (a_verification(sent=(0.9e6, 1e6, 1e6)), "h.0.fc, forward: 900,000 bytes were sent"),
        (a_verification(gradient=2e-5), "h.1.fc.weight: the gradient of step 1 on rank 3 is off by 2.0e-05"),
        (a_verification(gradient=math.inf), "h.1.fc.weight: the gradient of step 1 on rank 3 is off by inf"),
        (a_verification(parameter=math.nan), "h.0.fc.weight: the value after 3 steps on rank 1 is off by nan"),
        (a_verification(loss=2.001), "loss of step 1: 2.001, should be 2 (off by 5.0e-04)"),
        (a_verification(loss=math.nan), "loss of step 3: nan, should be 2 (off by nan)"),
        (a_verification(missing=("all-gather",)), "h.0.fc, forward: all-gather is priced but did not run"),
        (a_verification(whole=3.2e6), "a whole step: 3,200,000 bytes were sent, 3,000,000 are predicted"),
    ):
        assert not wrong.is_right and any(fault.startswith(words) for fault in wrong.faults), wrong.faults
        text = str(verification_text(wrong))
        assert f"Off in {len(wrong.faults)} place" in text and words in text
        json.dumps(verification_document(wrong), allow_nan=False)


def test_the_document_of_a_plan_without_a_pipeline_has_one_stage():
    document = verification_document(a_verification())
    (stage,), (first, second) = document["stages"], document["layers"]
    assert stage == {"layers": ["h.0.fc", "h.1.fc"], "predicted_bytes": {"inside": 2e6, "gradients": 1e6}}
    assert (first["stage"], second["name"], second["strategy"]) == (0, "h.1.fc", [[2, 1, 2]])
    assert second["gradient"]["sent_bytes"] == 1e6 and second["parameters"][0]["rank"] == 1
    assert document["step"]["predicted_bytes"] == 3e6 and document["steps_per_run"] == 1
    assert document["largest_gradient_error"] == 1e-7 and document["num_ranks"] == 4
    assert document["between_stages"]["predicted_bytes"] == 0


def test_repeated_blocks_are_one_line_and_uncounted_bytes_are_said_to_be():
    text = str(verification_text(a_verification()))
    assert "  h.*.fc x 2  (2,1,2)     1.91 MiB  1.91 MiB  1.91 MiB     +0.0%    1.0e-07     1.0e-07" in text
    uncounted = replace(a_verification(sent=(None,) * 3, whole=None), not_counted_because="no namespaces")
    text = str(verification_text(uncounted))
    assert uncounted.is_right and "bytes were not counted: no namespaces" in text
    assert "takes the steps that it promised" in text
