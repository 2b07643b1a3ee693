"""What a plan without a pipeline says of pipelines: a note of one that is faster, an error that names one that fits, or nothing."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.stopping import Deadline, Stop
from autoddl.costmodel.units import format_seconds
from autoddl.pipelines.joint import JointOptions, evaluate
from autoddl.pipelines.joint.job import job_of
from autoddl.pipelines.joint.megatron_trials import NOTE, _balanced_cut, megatron_trials, plan_alone
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.plandocument import sealed
from autoddl.planfile import load_plan, plan_document, save_plan
from autoddl.search.baselines import baselines
from autoddl.search.planner import InfeasibleError, Options, make_plan
from autoddl.text.plans import plan_text
from autoddl.zoo import Transformer, gpt, mlp

from ..stops import StopAfter

#: A pipeline is the best plan of this model on this cluster.
UNTIED = gpt(Transformer("untied", 3, 64, 4, 8, 128, tied=False))
SLOW = load_cluster("gcp-a100").resized(1, 4).with_links(latency_s=2e-6, bandwidth=2e7)
ASKED = Options(batch=8, memory_limit_bytes=4e6, precision="mixed")
#: A model whose widths divide by nothing, so that without a pipeline each device holds all of it.
PRIME = mlp((509, 509, 509))
PAIR = load_cluster("gcp-a100").resized(1, 2)


def document_of(**options) -> dict:
    return plan_document(plan_alone(UNTIED, SLOW, replace(ASKED, **options)))


# ---- A faster one ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_faster_pipeline_is_noted_and_the_joint_search_is_at_least_as_good():
    """The search of all pipelines until its proof may take over 10 s on a busy machine."""
    planned = plan_alone(UNTIED, SLOW, ASKED)
    plain = make_plan(UNTIED, SLOW, ASKED)
    assert plain.notes == () and planned.strategies == plain.strategies
    assert planned.cost == pytest.approx(plain.cost, rel=1e-12)
    (note,) = planned.notes
    said = re.fullmatch(
        r"a pipeline takes (.+ m?s), (.+)% less, at least \(Megatron \+ 1F1B, (.+)\); pipeline='auto' searches all of them",
        note,
    )
    assert said and re.match(r"1f1b \(A\), \d stages of 1 x \d, micro-batch \d+", said[3]), note
    found = megatron_trials(job_of(UNTIED, SLOW, JointOptions(ASKED)), plain.cost, Deadline())
    assert found is not None and said[1] == format_seconds(found.step_s)
    assert float(said[2]) == pytest.approx(100 * (1 - found.step_s / plain.cost), abs=0.5)
    optimum = plan_jointly(UNTIED, SLOW, JointOptions(replace(ASKED, time_limit_s=60.0)))
    assert optimum.optimal and optimum.cost <= found.step_s * (1 + 1e-9) < plain.cost
    assert f"Notes\n  {note}" in str(plan_text(planned))


def test_the_note_of_a_large_model_at_the_command(capsys):
    """GPT-3 175B on 1,024 A100: stages of 4-way split layers reach half of the peak, plans without a pipeline a third."""
    command = ["plan", "gpt3-175b", "--cluster", "dgx-a100", "--nodes", "128", "--batch", "1536", "--json", "--quiet"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    note = document["notes"][-1]
    said = re.match(rf"{NOTE}([\d.]+) s, (\d+)% less, at least .*\d+ stages of \d+ x 8, .*dp \d+ x mp [48]", note)
    assert said, note
    assert float(said[1]) == pytest.approx(document["step_s"] * (1 - int(said[2]) / 100), rel=0.02)
    # 12 * 12,288^2 weights in each of 96 blocks, 6 FLOPs for each and each of 1,536 * 2,048 tokens, at 312 TFLOP/s: 10.3 s.
    weights = 96 * 12 * 12288**2
    ideal_s = 6 * weights * 2048 * 1536 / (1024 * 312e12)
    assert 0.4 < ideal_s / float(said[1]) < 0.6


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_what_the_trials_find_is_a_plan_of_the_family(data):
    """It fits, is faster than what was known, costs what an evaluation from the layer graph says, follows one Megatron mesh."""
    widths = data.draw(st.lists(st.sampled_from((8, 24, 48, 509)), min_size=3, max_size=6))
    cluster = load_cluster("gcp-a100").resized(*data.draw(st.sampled_from(((1, 2), (1, 4), (2, 2), (4, 1)))))
    cluster = cluster.with_links(latency_s=1e-6, bandwidth=data.draw(st.sampled_from((1e6, 1e9))))
    base = Options(
        batch=data.draw(st.sampled_from((4, 12, 64))),
        recompute=data.draw(st.sampled_from((None, True, False))),
        memory_limit_bytes=data.draw(st.sampled_from((1e5, 4e6, 1e9))),
    )
    base = replace(base, micro_batch=data.draw(st.sampled_from((None, 1, 4))))
    job = job_of(mlp(widths), cluster, JointOptions(base))
    known_s = data.draw(st.sampled_from((math.inf, 1.0, 1e-2)))
    found = megatron_trials(job, known_s, Deadline())
    assume(found is not None)
    configuration = found.configuration
    truth = evaluate(job.chain, cluster, configuration)
    assert truth.step_s == found.step_s < known_s and truth.memory_bytes <= base.memory_limit_bytes
    assert base.micro_batch in (None, configuration.workload.micro_batch) and len(configuration.stages) > 1
    assert {stage.recompute for stage in configuration.stages} <= set(job.recomputations)
    meshes = set()
    for number, ((first, stop), stage) in enumerate(zip(configuration.bounds, configuration.stages)):
        graph = job.chain.stage(first, stop).graph
        sizes = configuration.mesh_of(number).devices(cluster).level_sizes
        alike = {
            one.mesh for one in baselines(graph, sizes) if one.name != "summa" and one.strategies == stage.strategies
        }
        assert alike and (ENTRY in stage.strategies) == (number > 0)
        meshes |= {next(iter(alike))}
    assert len(meshes) <= 2  # of a stage whose layers do not split, the data-parallel one is the same


# ---- None --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        (SLOW.resized(1, 1), {"memory_limit_bytes": 2**30}),
        (SLOW, {"objective": "communication"}),
        (SLOW, {"method": "random", "evaluations": 50}),
        (load_cluster("gcp-a100").resized(1, 4), {"memory_limit_bytes": 2**30}),
    ],
    ids=["one device", "communication", "another method", "none is faster"],
)
def test_nothing_is_said_where_there_is_nothing_to_say(cluster, options):
    asked = replace(ASKED, **options)
    assert plan_alone(UNTIED, cluster, asked).notes == ()


def test_interrupted_trials_leave_the_plan_as_it_is():
    plain, counter = make_plan(UNTIED, SLOW, ASKED), StopAfter(10**9)
    make_plan(UNTIED, SLOW, ASKED, stop=counter)
    asks, stops = 10**9 - counter.left, []
    while not stops or stops[-1].has_fired:
        stops.append(StopAfter(asks))
        asks += 2
        planned = plan_alone(UNTIED, SLOW, ASKED, stops[-1])
        assert planned.optimal and planned.strategies == plain.strategies
        assert bool(planned.notes) == (not stops[-1].has_fired)
    assert len(stops) > 3, "some fired while pipelines were looked at"


def test_a_stop_before_leaves_the_trials_out(monkeypatch):
    monkeypatch.setattr(
        "autoddl.pipelines.joint.megatron_trials.evaluate", lambda *_: pytest.fail("a pipeline was worked out")
    )
    stop = Stop()
    planned = make_plan(UNTIED, SLOW, ASKED)
    monkeypatch.setattr("autoddl.pipelines.joint.megatron_trials.make_plan", lambda *_, **__: stop.request() or planned)
    found = plan_alone(UNTIED, SLOW, ASKED, stop)
    assert found.strategies == planned.strategies and not found.notes


# ---- Where nothing fits ------------------------------------------------------------------------------------------------


def test_that_a_pipeline_fits_is_said():
    """Each of 2 layers has 509 * 509 parameters; a pipeline has one of them on each device, other plans both on each."""
    parameters = 509 * 509
    assert PRIME.num_parameters == 2 * parameters
    # In float32, parameter, gradient and Adam's two moments: 16 bytes of each.
    asked = Options(batch=4, precision="float32", memory_limit_bytes=1.5 * 16 * parameters)
    with pytest.raises(InfeasibleError) as plain:
        make_plan(PRIME, PAIR, asked)
    with pytest.raises(InfeasibleError) as told:
        plan_alone(PRIME, PAIR, asked)
    assert str(told.value) == f"{plain.value}; with a pipeline it fits: pipeline='auto'"
    assert "\n" not in str(told.value)
    assert plan_jointly(PRIME, PAIR, JointOptions(asked)).evaluation.memory_bytes <= asked.memory_limit_bytes
    # Where not even one layer fits, no pipeline does.
    asked = replace(asked, memory_limit_bytes=0.9 * 16 * parameters)
    with pytest.raises(InfeasibleError, match="the smallest memory that would do") as told:
        plan_alone(PRIME, PAIR, asked)
    assert "pipeline" not in str(told.value)


# ---- Cuts --------------------------------------------------------------------------------------------------------------


def chain(flops):
    """As much of a chain as a cut looks at: a layer for each unit."""
    return SimpleNamespace(num_units=len(flops), layers=lambda first, stop: [SimpleNamespace(flops=flops[first])])


def test_cuts_by_hand():
    assert _balanced_cut(chain([3, 1, 1, 3]), 2) == [2, 2]
    assert _balanced_cut(chain([9, 1, 1, 1]), 2) == [1, 3]
    assert _balanced_cut(chain([1, 1, 1, 9]), 3) == [
        2,
        1,
        1,
    ]  # 4 of 12 and 8 of 12 are nearest to 3 and to what is left
    assert _balanced_cut(chain([0, 0, 0]), 3) == [1, 1, 1]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_every_stage_has_units_and_equal_units_are_shared_equally(flops, data):
    count = data.draw(st.integers(1, len(flops)))
    cut = _balanced_cut(chain(flops), count)
    assert len(cut) == count and sum(cut) == len(flops) and min(cut) >= 1
    assert _balanced_cut(chain([7] * (3 * count)), count) == [3] * count


# ---- The document ------------------------------------------------------------------------------------------------------


def test_a_plan_with_its_note_loads_and_others_notes_do_not(tmp_path):
    document = document_of()
    assert document["notes"][-1].startswith(NOTE)
    save_plan(tmp_path / "plan.json", document)
    assert load_plan(tmp_path / "plan.json").document == document
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert shown.getvalue()
    save_plan(tmp_path / "none.json", sealed({**document, "notes": document["notes"][:-1]}))
    load_plan(tmp_path / "none.json")
    communication = document_of(objective="communication")
    for forged in (
        {**document, "notes": [*document["notes"], document["notes"][-1]]},
        {**document, "notes": [*document["notes"][:-1], "no pipeline is faster"]},
        {**communication, "notes": [*communication["notes"], document["notes"][-1]]},
    ):
        save_plan(tmp_path / "forged.json", sealed(forged))
        with pytest.raises(UserError, match="notes"):
            load_plan(tmp_path / "forged.json")
