"""Plans that were edited are not believed: no edit of a single field loads, forged hashes or not, but without its claims."""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import Cluster, from_document, load_cluster
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.errors import UserError
from autoddl.diffing import compare
from autoddl.explain import explain, explanation_document, view_of
from autoddl.export import export
from autoddl.pipelines.joint import JointOptions
from autoddl.pipelines.joint.megatron_trials import plan_alone
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.result import unpipelined
from autoddl.pipelines.runtime.load import is_available
from autoddl.plandocument import NOT_CLAIMED, sealed
from autoddl.planfile import PlanFile, plan_document, plan_from_document
from autoddl.report import report_page
from autoddl.search.planner import Options, make_plan
from autoddl.text.difference import difference_text
from autoddl.text.explanation import explanation_text
from autoddl.trusting import trust_of
from autoddl.zoo import mlp

from ..fuzz.mutations import places
from .sample_plans import gpt_plan, written

Document = dict[str, Any]
Path = tuple[Any, ...]

#: What hashes alone protect: inputs that say nothing of the plan's worth, and claims that only another search could compute
#: (see autoddl.claims). An entry that no forger needs is a failure, too.
NOT_RECOMPUTED = {
    "graph.sample": "a word",
    "cluster.name": "a word",
    "cluster.description": "a word",
    "cluster.device.name": "a word",
    "cluster.device.*.source": "words",
    "cluster.device.*.*.source": "words",
    "cluster.links.*.source": "words",
    "cluster.links.*.*.source": "words",
    "cluster.links.*.value": "what --latency and --bandwidth replaced in the plan's links",
    "cluster.calibration.*": "of measurements that a plan does not hold",
    "search_s": "of a clock",
    "evaluations": "of the search",
    "rivals": "whether they were asked for, and their order",
    "rivals.*.infeasible": "the reason why there is none",
    "candidates": "their order",
    "candidates.*.lower_bound_s": "of another setting; a plan's bound is the least of all",
    "candidates.*.outcome": "of another setting",
    "notes*": "how much faster which pipeline is, which only a search finds; not of what",
    "trust.expected_regret": "over rivals that only a search finds",
    "trust.rivals": "their order",
    "trust.measurement*": "concerns a rival that only a search finds",
    "search.space": "words",
}
#: And what the joint search says.
NOT_RECOMPUTED_JOINTLY = {
    "rivals*": "plans that the document does not hold; the parts of a step add up",
    "space_size": "of the search",
    "search.settings": "of the search",
    "search.ruled_out_by_*": "of the search",
    "search.stage_searches": "of the search",
}


def not_recomputed(document: Document) -> tuple[str, ...]:
    """The patterns of places that hashes alone protect."""
    is_joint = document["options"]["pipeline"] is not None
    return (*NOT_RECOMPUTED, *(NOT_RECOMPUTED_JOINTLY if is_joint else ()))


# ---- Plans ---------------------------------------------------------------------------------------------------------------------


def calibrated() -> Cluster:
    """Two ranks on a CPU, whose all-reduce was measured, with some doubt."""
    covered = {
        "level": "intra-node",
        "collective": "all-reduce",
        "groups": [2],
        "smallest_bytes": 1000,
        "largest_bytes": 10**6,
    }
    quality = {key: value for key, value in covered.items() if key != "groups"}
    quality |= {"ranks_per_node": 2, "held_out_error": 0.03, "num_points": 8}
    replicates = [
        {"level": "intra-node", "collective": name, "group": 0, "term": "slowness", "values": values}
        for name, values in (("all-reduce", [1e-10, 9e-9, 2e-9, 3e-9]), ("all-gather", [9e-9, 1e-10, 9e-9, 1e-10]))
    ]
    calibration = {
        "date": "2026-01-02T03:04:05",
        "machine": "here",
        "versions": "1",
        "num_samples": 10,
        "covered": [covered],
        "quality": [quality],
        "forms": [
            {"level": "intra-node", "form": "level", "num_parameters": 2, "held_out_error": 0.03, "is_taken": True}
        ],
        "replicates": replicates,
    }
    document = {**load_cluster("local-cpu").document, "calibration": calibration}
    return from_document(document, "mine").resized(1, 2)


def without_pipeline(cluster: Cluster, **options: Any) -> Document:
    planned = unpipelined(make_plan(mlp((64, 256, 64)), cluster, Options(batch=8, **options)))
    return plan_document(planned, trust_of(planned))


def slower_than_a_pipeline() -> Document:
    slow = load_cluster("gcp-a100").resized(1, 2).with_links(1e-6, 2e7)
    planned = plan_alone(mlp((256, 256, 256)), slow, Options(batch=4, micro_batch=1))
    assert planned.notes
    return plan_document(planned)


def with_pipeline() -> Document:
    slow = load_cluster("gcp-a100").resized(1, 2).with_links(1e-6, 2e7)
    planned = plan_jointly(mlp((256, 256, 256)), slow, JointOptions(Options(batch=4, micro_batch=1)))
    assert len(planned.evaluation.stages) == 2
    return plan_document(planned)


def calibrated_pipeline() -> Document:
    planned = plan_jointly(mlp((256, 256, 256)), calibrated(), JointOptions(Options(batch=4, micro_batch=1)))
    assert planned.evaluation.has_pipeline
    return plan_document(planned, trust_of(planned))


PLANS = {
    "step": lambda: without_pipeline(load_cluster("gcp-a100").resized(2, 2)),
    "communication": lambda: without_pipeline(
        load_cluster("gcp-a100").resized(2, 2).with_links(latency_s=1e-6),
        objective="communication", untied=True, summa=True, method="random", evaluations=20,
    ),
    "calibrated": lambda: without_pipeline(calibrated()),
    "graph": lambda: without_pipeline(load_cluster("gcp-a100").resized(2, 2), executor="graph"),
    "slower": slower_than_a_pipeline,
    "pipeline": with_pipeline,
    "calibrated pipeline": calibrated_pipeline,
}  # fmt: skip


@pytest.fixture(scope="module", params=list(PLANS))
def document(request) -> Document:
    return json.loads(json.dumps(PLANS[request.param]()))


def loaded(document: Document, edited: bool = False) -> PlanFile:
    return plan_from_document(Fields(document, "plan"), "plan", edited)


# ---- Edits ---------------------------------------------------------------------------------------------------------------------


def replacements(value: Any) -> list[Any]:
    """Of the same type and of others; none that means the same."""
    if isinstance(value, bool):
        return [not value, None, int(value)]
    if isinstance(value, (int, float)):
        return [value * 2 + 1, value / 2 - 1, -5, str(value), None, 10**400]
    if isinstance(value, str):
        return [value + "x", "optimal", "", 0, None]
    if value is None:
        return [0, 0.5, "x", [], {}]
    return [None, 0, [], {}]


def container(document: Any, path: Path) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def edits(document: Document, number: float = math.inf) -> Iterator[tuple[Path, str]]:
    """Edits the document in place at every place, one at a time and undone after; of all edits about ``number``, evenly."""
    count, share = itertools.count(), max(1, round(7 * len(places(document)) / number))
    for path in places(document)[1:]:
        holder, key = container(document, path), path[-1]
        whole = dict(holder) if isinstance(holder, dict) else list(holder)
        value = whole[key]
        choices: list[tuple[str, Any]] = [
            ("replaced", other) for other in replacements(value) if not same(other, value)
        ]
        choices += [("deleted", None), ("added", None)]
        if isinstance(holder, list) and len(holder) > 1 and not same(holder[0], holder[key]):
            choices.append(("swapped", None))
        for what, other in choices:
            if next(count) % share:
                continue
            if what == "replaced":
                holder[key] = other
            elif what == "deleted":
                del holder[key]
            elif what == "swapped":
                holder[0], holder[key] = holder[key], holder[0]
            elif isinstance(holder, list):
                holder.append(copy.deepcopy(value))
            else:
                holder["extra"] = value
            # An addition or a swap is an edit of what it is in.
            if what in ("added", "swapped"):
                yield path[:-1] or ("extra",), what
            else:
                yield path, what
            if isinstance(holder, dict):
                holder.clear()
                holder.update(whole)
            else:
                holder[:] = whole


def same(one: Any, other: Any) -> bool:
    """Whether a document says the same with either: 0 and 0.0 are the same number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other


def assert_names(error: UserError, path: Path, what: str) -> None:
    text = str(error)
    assert text.isprintable() and text.startswith("plan: ") and len(text) < 1000, text
    assert ("hash" if path[0] in ("hashes", "content_hash") else str(path[0])) in text, (path, what, text)


@pytest.mark.slow
@pytest.mark.fault(
    "documents",
    "a plan is edited in a single field",
    "it is refused in one line that names the field or its member; no field can be edited",
)
def test_no_single_edit_loads(document):
    """Every place: values of the same type and of others, deletions, additions, swaps; some 400 plans of each kind are read,
    which takes over 10 s on a busy machine."""
    loaded(document)
    number = 0
    for path, what in edits(document, 400):
        number += 1
        with pytest.raises(UserError) as caught:
            loaded(document)
            pytest.fail(f"{path} {what} loads")
        assert_names(caught.value, path, what)
    assert number > 250
    loaded(document)


def is_forged(document: Document) -> bool:
    """Whether a document with new hashes is believed."""
    try:
        loaded(sealed(document))
    except UserError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
        return False
    return True


@pytest.mark.slow
@pytest.mark.fault(
    "documents",
    "a plan is edited in a single field, and its hashes are forged",
    "it is refused, all but what only another search could tell, which the test lists",
)
def test_forged_hashes_hide_nothing_that_can_be_computed(document):
    """What is believed is in the list above, field by field; some 400 plans of each kind are read, which takes over 10 s on a
    busy machine."""
    seal, patterns = ("hashes", "content_hash"), not_recomputed(document)  # the seal is the forger's own
    believed = {path for path, _ in edits(document, 400) if path[0] not in seal and is_forged(document)}
    unknown = [path for path in believed if not any(fits(path, pattern) for pattern in patterns)]
    assert unknown == []


def fits(path: Path, pattern: str) -> bool:
    return fnmatch.fnmatchcase(".".join(map(str, path)), pattern)


@pytest.mark.slow
def test_the_list_has_no_more_than_forgers_need():
    """Every entry is believed of some plan: what is checked one day is taken off the list.  All places are tried, over 10 s on a
    busy machine."""
    needed: set[str] = set()
    for make in PLANS.values():
        document = json.loads(json.dumps(make()))
        known = not_recomputed(document)
        for path, _ in edits(document):
            patterns = {pattern for pattern in known if fits(path, pattern)} - needed
            if patterns and is_forged(document):
                needed |= patterns
    assert sorted({*NOT_RECOMPUTED, *NOT_RECOMPUTED_JOINTLY} - needed) == []


@pytest.mark.fault(
    "documents",
    "a plan with a gap is edited into a proven one, and its hashes are forged",
    "it is refused: the bounds of its candidates say otherwise",
)
def test_a_gap_cannot_be_edited_away():
    document = gpt_plan(method="random", evaluations=3, memory_limit_bytes=2e6)
    assert document["gap"] > 0.005 and not document["optimal"]
    proven = {"status": "optimal", "optimal": True, "gap": 0.0, "lower_bound_s": document["step_s"]}
    with pytest.raises(UserError, match=r"lower_bound_s is .*, should be"):
        loaded(sealed({**document, **proven}))
    for name, value in (("lower_bound_s", 2 * document["step_s"]), ("gap", 0.0), ("optimal", True)):
        with pytest.raises(UserError, match=name):
            loaded(sealed({**document, name: value}))


# ---- Without its claims --------------------------------------------------------------------------------------------------------

CLAIMS = ("optimal", "lower_bound_s", "gap", "search_s", "space_size", "evaluations", "trust", "options")


def test_an_edited_plan_loads_without_its_claims(document):
    intact = loaded(document, edited=True)
    assert intact.is_claimed and intact.document == document
    plan = loaded({**document, "gap": 0.5, "step_s": 1e-9, "extra": 1}, edited=True)
    assert not plan.is_claimed and plan.strategies == intact.strategies
    assert all(plan.document[name] is None for name in CLAIMS)
    assert plan.document["rivals"] == [] and plan.document["candidates"] == [] and plan.document["search"] is None
    assert "extra" not in plan.document
    for name in ("step_s", "communication_s", "memory_bytes", "layers", "memory_limit_bytes", "objective"):
        assert plan.document[name] == document[name]


def test_what_is_left_of_it_is_a_plan_again_but_claims_nothing(document):
    left = json.loads(export(loaded({**document, "gap": 0.5}, edited=True), "json"))
    assert not loaded(left).is_claimed
    for name in ("optimal", "lower_bound_s", "gap", "status", "search_s", "space_size", "rivals", "candidates"):
        with pytest.raises(UserError, match="lower_bound_s is null" if name == "status" else name):
            loaded(sealed({**left, name: document[name] if document[name] != left[name] else {"x": 1}}))


def test_strategies_that_were_edited_are_priced_anew():
    document = without_pipeline(load_cluster("gcp-a100").resized(1, 2), micro_batch=8, recompute="none")
    where = next(i for i, layer in enumerate(document["layers"]) if layer["kind"] == "linear")
    layer = document["layers"][where]
    layer["strategy"] = [[1, 1, 2]] if layer["strategy"] != [[1, 1, 2]] else [[1, 2, 1]]
    with pytest.raises(UserError, match="layers was edited"):
        loaded(document)
    plan = loaded(document, edited=True)
    assert plan.strategies[layer["name"]].splits == tuple(map(tuple, layer["strategy"]))
    assert plan.document["step_s"] == plan.evaluation.stages[0].assessment.step_s > document["step_s"]
    document["memory_limit_bytes"] = plan.document["memory_bytes"] / 2
    with pytest.raises(UserError, match=r"memory_limit_bytes is .*, its strategies need"):
        loaded(document, edited=True)


def test_readers_show_that_nothing_is_claimed(document):
    before, after = view_of(loaded(document)), view_of(loaded({**document, "optimal": None}, edited=True))
    explained = explain(after, count=1)
    assert NOT_CLAIMED in str(explanation_text(explained)) and explanation_document(explained)["optimal"] is None
    page = report_page(explained)
    assert NOT_CLAIMED.capitalize() in page and "Proven" not in page and 'id="baselines"' not in page
    found = compare(before, after)
    assert NOT_CLAIMED in str(difference_text(found, ("a", "b")))
    assert {row.what for row in found.options} == {"certificate", "method", "plans to choose from"}
    for form in ("graphml", "chrome-trace"):
        assert export(after.plan, form)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.fault(
    "documents",
    "a plan is edited: `optimal` is set",
    "every command refuses it in one line that names the field; with --edited its claims are dropped",
    exit_code=2,
)
def test_commands_refuse_an_edited_plan_or_drop_its_claims(tmp_path, capsys, monkeypatch):
    """Over 10 s: every command that reads plans, among them one that trains on ranks."""
    monkeypatch.chdir(tmp_path)
    document = gpt_plan(method="random", evaluations=3, memory_limit_bytes=2e6)
    plan = written(tmp_path / "plan.json", {**document, "optimal": True})
    (tmp_path / "train.py").write_text("")
    commands = {
        "explain": ["explain", plan],
        "diff": ["diff", plan, plan],
        "report": ["report", plan, "-o", "page.html"],
        "export": ["export", plan, "--to", "json"],
        "verify": ["verify", plan, "--ranks", "3"],
        "launch": ["launch", plan, "train.py", "--hosts", "a,b", "--dry-run"],
        "train": ["train", plan, "--steps", "1"],
    }
    for name, command in commands.items():
        assert main(command) == 2, name
        error = capsys.readouterr().err
        assert "plan.json: optimal was edited" in error and "--edited" in error and error.count("\n") == 1
        code = main([*command, "--edited"])
        out, error = capsys.readouterr()
        assert "was edited (" not in error, name
        assert code == 0 or name == "verify" or (name == "train" and not is_available()), (name, error)
        assert name != "launch" or "AUTODDL_EDITED" in out
    assert main(["launch", plan, "train.py", "--slurm", "--dry-run", "--edited"]) == 0
    assert "--edited" in capsys.readouterr().out


@pytest.mark.parametrize("planner", ["dapple", "chimera"])
def test_plans_of_papers_planners_are_read(planner):
    """Their micro-batch is that of a replica, the workload's that of all of a worker."""
    options = JointOptions(Options(batch=16, micro_batch=4, time_limit_s=5.0), planner)
    planned = plan_jointly(mlp((64, 64, 64, 64)), load_cluster("dgx-a100").resized(1, 4), options)
    assert loaded(json.loads(json.dumps(plan_document(planned)))).is_claimed


def test_plans_of_older_versions_are_refused(document):
    with pytest.raises(UserError, match="version 3 is not supported, only 4 is; plan again"):
        loaded({**document, "version": 3}, edited=True)


@pytest.mark.fault(
    "documents",
    "a plan says a million times as many micro-batches",
    "it is refused at once in one line, its hashes forged or not",
)
def test_a_million_times_as_many_micro_batches():
    document = with_pipeline()
    document["workload"]["batch"] *= 10**6
    for refused, edited in ((document, False), (sealed(document), False), (document, True)):
        with pytest.raises(UserError, match="num_micro_batches"):
            loaded(refused, edited)
