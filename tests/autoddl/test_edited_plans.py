"""Plans that were edited are not believed: no edit of a single field loads, forged hashes or not, but without its claims."""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import Cluster, from_document, load_cluster
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.errors import UserError
from autoddl.diffing import compare, difference_text
from autoddl.explain import explain, explanation_document, explanation_text, view_of
from autoddl.export import export
from autoddl.joint import JointOptions
from autoddl.joint.planner import plan_jointly
from autoddl.models import mlp
from autoddl.plan import Plan, joint_document, load_plan, plan_document, plan_from_document, save_plan
from autoddl.plandocument import NOT_CLAIMED, sealed
from autoddl.planner import Options, make_plan
from autoddl.report import report_page
from autoddl.trusting import trust_of

from ..costmodel.mutations import places
from .sample_plans import gpt_plan, pipeline_plan, written

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
    "baselines": "whether they were asked for",
    "baselines.*.infeasible": "the reason why there is none",
    "candidates": "their order",
    "candidates.*.lower_bound_s": "of another setting; a plan's bound is the least of all",
    "candidates.*.cost_s": "of another setting; no less than the plan's",
    "candidates.*.outcome": "of another setting",
    "trust.expected_regret": "over rivals that only a search finds",
    "trust.rivals.*.name": "of rivals that only a search finds",
    "trust.rivals": "their order",
    "trust.rivals.*": "of no probability, that only a search finds",
    "trust.measurement*": "concerns a rival that only a search finds",
    "lower_bound_s": "of a plan with a pipeline; never above the step",
    "space_size": "of a plan with a pipeline",
    "notes*": "of the joint planner, behind the graph's",
    "pipeline.families*": "plans that the document does not hold; the parts of a step add up",
    "pipeline.search.space": "words",
    "pipeline.search.settings": "of the search",
    "pipeline.search.ruled_out_by_*": "of the search",
    "pipeline.search.stage_searches": "of the search",
}


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
        for name, values in (("all-reduce", [1e-9, 5e-9, 2e-9, 3e-9]), ("all-gather", [3e-9, 1e-9, 2e-9, 1e-9]))
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
    planned = make_plan(mlp((64, 256, 64)), cluster, Options(batch=8, **options))
    return plan_document(planned, trust_of(planned))


def with_pipeline() -> Document:
    slow = load_cluster("gcp-a100").resized(1, 2).with_links(1e-6, 2e7)
    planned = plan_jointly(mlp((256, 256, 256)), slow, JointOptions(Options(batch=4, micro_batch=1)))
    assert len(planned.evaluation.stages) == 2
    return joint_document(planned)


PLANS = {
    "step": lambda: without_pipeline(load_cluster("gcp-a100").resized(2, 2)),
    "communication": lambda: without_pipeline(
        load_cluster("gcp-a100").resized(2, 2).with_links(latency_s=1e-6),
        objective="communication", untied=True, summa=True, micro_batch=4, recompute=False,
    ),
    "calibrated": lambda: without_pipeline(calibrated()),
    "pipeline": with_pipeline,
}  # fmt: skip


@pytest.fixture(scope="module", params=list(PLANS))
def document(request) -> Document:
    return json.loads(json.dumps(PLANS[request.param]()))


def loaded(document: Document, edited: bool = False) -> Plan:
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


def edits(document: Document, share: int) -> Iterator[tuple[Path, str]]:
    """Edits the document in place at every place, one at a time and undone after; of all edits every ``share``-th."""
    count = itertools.count()
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


@pytest.mark.fault(
    "documents",
    "a plan is edited in a single field",
    "it is refused in one line that names the field or its member; no field can be edited",
)
def test_no_single_edit_loads(document, record_property):
    """Every place: values of the same type and of others, deletions, additions, swaps."""
    loaded(document)
    number = 0
    for path, what in edits(document, share=3):
        number += 1
        with pytest.raises(UserError) as caught:
            loaded(document)
            pytest.fail(f"{path} {what} loads")
        assert_names(caught.value, path, what)
    assert number > 300
    loaded(document)
    record_property("seconds", 0.0)


def is_forged(document: Document) -> bool:
    """Whether a document with new hashes is believed."""
    try:
        loaded(sealed(document))
    except UserError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
        return False
    return True


@pytest.mark.fault(
    "documents",
    "a plan is edited in a single field, and its hashes are forged",
    "it is refused, all but what only another search could tell, which the test lists",
)
def test_forged_hashes_hide_nothing_that_can_be_computed(document):
    """What is believed is in the list above, field by field."""
    seal = ("hashes", "content_hash")  # which is the forger's own
    believed = {path for path, _ in edits(document, share=3) if path[0] not in seal and is_forged(document)}
    unknown = [path for path in believed if not any(fits(path, pattern) for pattern in allowed(document))]
    assert unknown == []


def fits(path: Path, pattern: str) -> bool:
    return fnmatch.fnmatchcase(".".join(map(str, path)), pattern)


def allowed(document: Document) -> list[str]:
    """The entries of the list that concern a plan of this kind."""
    of_pipelines = {"lower_bound_s", "space_size", "notes*"}
    return [pattern for pattern in NOT_RECOMPUTED if "pipeline" in document or pattern not in of_pipelines]
