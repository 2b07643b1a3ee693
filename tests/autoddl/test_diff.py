"""``autoddl diff``: what differs between two plans, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.strategy import Strategy
from autoddl.diffing import compare, difference_document
from autoddl.explain import view_of
from autoddl.pipelines.joint.evaluation import evaluate_unpipelined
from autoddl.pipelines.joint.partition import chain_of
from autoddl.plandocument import sealed
from autoddl.planfile import plan_from_document
from autoddl.text.difference import difference_text
from autoddl.zoo import mlp

from .sample_plans import gpt_plan, pipeline_plan, written


def viewed(document):
    return view_of(plan_from_document(Fields(document, "plan"), "plan"))


def changed(rows):
    return {row.what: (row.before, row.after) for row in rows}


@pytest.fixture(scope="module")
def small():
    return gpt_plan()


@pytest.fixture(scope="module")
def larger():
    return gpt_plan(batch=32, cluster="dgx-a100", optimizer="sgd")


@pytest.fixture(scope="module")
def piped():
    return pipeline_plan()


def test_a_plan_does_not_differ_from_itself(small):
    found = compare(viewed(small), viewed(json.loads(json.dumps(small))))
    assert found.is_empty
    assert "no difference" in str(difference_text(found, ("a", "b")))
    assert difference_document(found)["equal"] is True


def test_how_it_was_found_counts_but_not_how_long(small):
    assert compare(viewed(small), viewed(sealed({**small, "search_s": 99.0, "evaluations": 7}))).is_empty
    other = viewed(gpt_plan(method="coordinate-descent"))
    assert changed(compare(viewed(small), other).options)["method"] == ("exact", "coordinate-descent")


def test_cluster_and_options(small, larger):
    found = compare(viewed(small), viewed(larger))
    assert not found.is_empty and found.model == () and found.added == found.removed == ()
    options, cluster = changed(found.options), changed(found.cluster)
    assert options["batch"] == ("16", "32") and options["optimizer"] == ("adam", "sgd") and "precision" not in options
    assert cluster["name"] == ("gcp-a100", "dgx-a100") and "nodes" not in cluster


def test_layers_add_up_to_the_whole(small, larger):
    """Over all rows, changed or not, the differences are those of the totals."""
    found = compare(viewed(small), viewed(larger))
    figures = {figure.what: figure.after - figure.before for figure in found.figures}
    for what, field in (("compute", "compute_s"), ("communication", "communication_s"), ("sent", "sent_bytes")):
        assert sum(getattr(row, field) for row in found.layers) == pytest.approx(figures[what], rel=1e-9)
    names = [name for row in found.layers for name in row.layers]
    assert sorted(names) == sorted(layer["name"] for layer in small["layers"])


def test_layers_are_grouped_by_what_changes():
    """The same plan with another strategy at one place of every block."""
    document = gpt_plan(micro_batch=16, recompute=False)
    view = viewed(document)
    places = [name for name in view.plan.strategies if name.endswith("mlp.c_fc")]
    before, after = view.plan.strategies[places[0]], Strategy(((2, 1, 1), (1, 2, 1)))
    assert len(places) == 2 and before != after
    strategies = {**view.plan.strategies, **dict.fromkeys(places, after)}
    truth = evaluate_unpipelined(chain_of(view.plan.graph), view.plan.cluster, view.plan.workload, strategies)
    plan = replace(view.plan, strategies=strategies, evaluation=truth)
    names = ("communication_s", "compute_s", "step_s", "memory_bytes", "sent_bytes")
    figures = {name: getattr(truth, name) for name in names}
    found = compare(view, view_of(replace(plan, document={**document, **figures})))
    (row,) = (row for row in found.layers if not row.is_same)
    assert (row.name, row.layers) == ("h.*.mlp.c_fc", tuple(places))
    assert (row.before, row.after) == (str(before), str(after))
    text = str(difference_text(found, ("a", "b")))
    assert "h.*.mlp.c_fc x 2" in text and f"{len(strategies) - 2} layers keep their strategy" in text


def test_other_models(small):
    other = viewed(gpt_plan(mlp((64, 128, 64))))
    found = compare(viewed(small), other)
    assert changed(found.model)["name"] == ("small", "mlp:64,128,64")
    assert found.layers == () and "h.*.ln_1 x 2" in found.removed and len(found.added) == 2
    text = str(difference_text(found, ("a", "b")))
    assert "only before: h.*.ln_1 x 2" in text and "only after: " in text


def test_a_pipeline_against_none(small, piped):
    found = compare(viewed(small), viewed(piped))
    pipeline = changed(found.pipeline)
    assert pipeline["stages"] == ("none", "2") and pipeline["recomputation"] == ("none", "none stage")
    assert all(row.after.endswith(" in stage 0") for row in found.layers if row.layers[0].startswith("h."))
    assert "h.*.ln_1 x 2" in found.added  # those of stage 1
    assert any(figure.what == "pipeline bubble" and figure.before == 0 < figure.after for figure in found.figures)
    other = changed(compare(viewed(piped), viewed(pipeline_plan(recompute=("none", "none")))).pipeline)
    assert other == {"recomputation": ("none stage", "none none")}


def test_command(tmp_path, capsys, small, larger):
    a, b = written(tmp_path / "a.json", small), written(tmp_path / "b.json", larger)
    assert main(["diff", a, b]) == 0
    text = capsys.readouterr().out
    assert "Per step" in text and "Options" in text and "dgx-a100" in text
    assert main(["diff", a, b, "--json", "--exit-code"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["version"], document["equal"]) == ("autoddl-plan-difference", 1, False)
    assert document["options"]["batch"] == ["16", "32"]
    assert document["figures"]["step"] == {"unit": "s", "before": small["step_s"], "after": larger["step_s"]}
    assert main(["diff", a, a, "--exit-code"]) == 0
    assert "no difference" in capsys.readouterr().out


def test_what_users_get_wrong(tmp_path, capsys, small):
    path = written(tmp_path / "a.json", small)
    (tmp_path / "cut.json").write_text((tmp_path / "a.json").read_text()[:-100])
    edited = written(tmp_path / "edited.json", {**small, "step_s": 1.0})
    for other, what in (
        (tmp_path / "cut.json", "not a JSON"),
        (tmp_path / "none.json", "cannot be read"),
        (edited, "plan again"),
    ):
        for pair in ((path, str(other)), (str(other), path)):
            assert main(["diff", *pair]) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1 and what in err and str(other) in err
