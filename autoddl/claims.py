"""Checks a plan's document when it is loaded, so that changes to it are detected.

**Facts** (see :mod:`autoddl.plandocument`) are computed again from the plan and compared field by field.

**Claims** of the search cannot be computed again without repeating the search.  They are compared with the rest of the plan:

=====================  =============================================================================================================
member                 checks
=====================  =============================================================================================================
options, workload      The options result in the workload, method, objective, executor, memory limit and hash of the plan.
                       Without a pipeline, the plan's strategies are in the search space of the options.
status, optimal, gap   The plan is optimal if and only if its status says so; its lower bound then equals its cost.  The gap
                       follows from the cost and the lower bound.
lower_bound_s          It is at most the cost.  Without a pipeline, it is the smallest lower bound of all candidates.
space_size             Without a pipeline, it is counted again.
candidates             Without a pipeline, every setting of the options occurs once, with a known outcome.  None has a lower cost
                       than the plan, and the setting of the plan is one of them.
search                 At most as many settings are ruled out as there are.  Without a pipeline, the counts are those of the
                       candidates.
rivals                 The parts of a step add up to the step.  The lower bound is at most the step, and the step of the plan of
                       the paper's own planner is at least the step.  The plan is within the memory limit.  The figures of
                       baselines are computed again from mesh, micro-batch and recomputation; their cost is at least the plan's
                       lower bound.
trust                  It is present if and only if the cluster is calibrated.  Its date, its number of draws and its notes are
                       those of the calibration.  The probabilities add up to 1.
notes                  They are those of the graph and of the trust.  For a search for the step without pipelines, one more note
                       may follow: that a pipeline is faster.  For another executor than the default, one more note follows: what
                       this executor costs.
memory_limit_bytes     It is that of the options, or the default part of the device's memory; the plan needs at most this memory.
=====================  =============================================================================================================

**Not checked** are the following members; only the hashes protect them, so somebody who also computes new hashes can change them:
the seconds and evaluations of the search; the lower bounds of single candidates, as long as they are at most the costs; the
reason why a rival is infeasible; the figures of rivals other than baselines, as long as their sums are right; the probabilities
of the trust, as long as they add up to 1; the description of the search space; for plans with a pipeline the lower bound, the
counts of the search, and the notes; for plans without one, how much faster a pipeline is, and what the executor costs.
`autoddl plan` proves the bound again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoddl.calib.trust import SURE
from autoddl.costmodel.documents import Fields, canonical_hash, show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph_meshes import EAGER, families_of, family_of
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.costmodel.recomputation import contains, text_of, without
from autoddl.pipelines.joint.evaluation import evaluate_unpipelined
from autoddl.pipelines.joint.megatron_trials import NOTE
from autoddl.pipelines.joint.paper_planners import PLANNERS
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.result import PRICED, JointOptions, baseline_how
from autoddl.pipelines.joint.start import START_NOTE
from autoddl.search import METHODS, Status
from autoddl.search.baselines import Baseline, baselines, family_names
from autoddl.search.executorcost import executor_note_start
from autoddl.search.options import (
    base_workload,
    default_memory_limit,
    micro_batches,
    partial_recomputations,
    recomputations,
)
from autoddl.search.planner import Options
from autoddl.search.sweep import NOT_BETTER, NOT_FITTING, is_offered

from .executors import pricing_notes
from .plandocument import (
    EDITED,
    MEMBERS,
    OPTIONAL,
    RIVAL_FIGURES,
    SEAL,
    executor_of,
    hashes_of,
    method_of,
    unclaimed_document,
)
from .trusting import trust_notes

if TYPE_CHECKING:
    from .planfile import PlanFile

__all__ = ["check_claims", "check_facts", "edited_member"]

#: Allowed relative error of recomputed numbers: sums of the same floats in another order differ by less.
_TOLERANCE = 1e-9
#: Figures that are differences of two sums as large as the step.  The step's absolute precision applies to them.
_DIFFERENCES = frozenset(("exposed_transfer_s", "exposed_all_reduce_s", "bubble_s", "bubble_ratio"))
#: Statuses of a search that found a plan.
_STATUSES = tuple(str(status) for status in Status if status is not Status.INFEASIBLE)


# ---- Hashes --------------------------------------------------------------------------------------------------------------------


def edited_member(fields: Fields) -> str | None:
    """Return the first member of a document whose hash differs from the recorded one, or None if all hashes are right.

    Raises:
        UserError: If the document has no hashes, or if its content cannot be hashed.
    """
    recorded, content_hash = fields.object("hashes").value, fields.text("content_hash")
    try:
        hashes = hashes_of(fields.value)
    except (ValueError, RecursionError):  # numbers or nesting that `autoddl` never writes
        raise UserError(f"{fields.where}: its content has no hash; it was edited") from None
    if canonical_hash(recorded) != content_hash:
        return "content_hash" if recorded == hashes else "hashes"
    return next((name for name in (*hashes, *recorded) if hashes.get(name) != recorded.get(name)), None)


# ---- Facts ---------------------------------------------------------------------------------------------------------------------


def check_facts(fields: Fields, facts: Mapping[str, Any], first: str | None = None) -> None:
    """Compare the facts of a document with recomputed ones.

    Args:
        fields: The document.
        facts: The recomputed facts, by member.
        first: Member to compare first, so that an error names it.

    Raises:
        UserError: If a field is missing, unknown or different; the error names the first such field.
    """
    unknown = next((name for name in fields.value if name not in MEMBERS), None)
    if unknown is not None:
        raise UserError(f"{fields.where}: unknown field {show_json(unknown)}; known ones are {', '.join(MEMBERS)}")
    for name in MEMBERS:
        if name not in OPTIONAL:
            fields.get(name)
    for name in sorted(facts, key=lambda name: name != first):
        _compare(fields.where, name, fields.get(name), facts[name], facts["step_s"])


def _compare(where: str, name: str, given: Any, expected: Any, scale: float) -> None:
    """Raise a UserError if a value differs from the expected one by more than rounding errors.

    Args:
        where: Name of the document, for errors.
        name: Name of the field.
        given: Value in the document.
        expected: Recomputed value.
        scale: The absolute error of figures in `_DIFFERENCES` may be `_TOLERANCE` times this value.
    """
    inner = f"{where}: {name}"
    if isinstance(expected, dict) and isinstance(given, dict):
        for key in given:
            if key not in expected:
                raise UserError(f"{inner}: unknown field {show_json(key)}; known ones are {', '.join(expected)}")
        for key, value in expected.items():
            if key not in given:
                raise UserError(f"{inner}: field {key!r} is missing")
            _compare(inner, key, given[key], value, scale)
    elif isinstance(expected, (list, tuple)) and isinstance(given, list):
        if len(given) != len(expected):
            raise UserError(f"{where}: {name} has {len(given)} entries, should have {len(expected)}")
        for i, (given_entry, expected_entry) in enumerate(zip(given, expected)):
            _compare(where, f"{name}[{i}]", given_entry, expected_entry, scale)
    elif not _is_equal(given, expected, scale if name in _DIFFERENCES else 0.0):
        raise UserError(f"{where}: {name} is {show_json(given)}, should be {show_json(expected)}")


def _is_equal(given: Any, expected: Any, scale: float) -> bool:
    """Return whether two values are equal: floats up to `_TOLERANCE`, relative or times ``scale``; others in type and value."""
    if isinstance(expected, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        try:
            return math.isclose(given, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale)
        except OverflowError:
            return False
    return type(given) is type(expected) and given == expected


# ---- Claims --------------------------------------------------------------------------------------------------------------------


def check_claims(plan: PlanFile, fields: Fields, facts: Mapping[str, Any]) -> None:
    """Check the claims of a document whose facts are right (see the module's docstring).

    Raises:
        UserError: If a claim contradicts the rest of the document; the error names the field.
    """
    objective = _read_choice(fields, "objective", OBJECTIVES)
    limit = fields.number("memory_limit_bytes", exclusive=True)
    status = fields.get("status")
    if fields.number("memory_bytes") > limit * (1 + _TOLERANCE) and status != PRICED:
        raise UserError(
            f"{fields.where}: memory_limit_bytes is {limit:g}, less than its memory_bytes {facts['memory_bytes']:g}"
        )
    if status in (EDITED, PRICED):
        _check_without_claims(fields, facts, unclaimed_document(facts, objective, limit, str(status)))
        return
    claims = _Claims(plan, fields, objective, limit)
    claims.check_certificate()
    claims.check_options()
    claims.check_search()
    claims.check_rivals()
    claims.check_trust()


def _check_without_claims(fields: Fields, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that the document of a plan that was edited, or priced without a search, contains no claims."""
    for name, value in expected.items():
        if name not in facts and name not in SEAL:
            _compare(fields.where, name, fields.get(name), value, 0.0)


class _Claims:
    """The claims of one document.

    Attributes:
        plan: The plan of the document.
        fields: The document.
        objective: ``step`` or ``communication``.
        limit: Memory limit in bytes.
        cost: Cost of the plan for the objective, in seconds.
        lower_bound: Recorded lower bound, in seconds.
        optimal: Whether the document says that the plan is optimal.
        joint_options: Recorded options of the search.
        candidate_cost: Cost of the plan's own candidate.  It may differ from ``cost`` by rounding errors, since the search added it
            up in another order, and the search decided by it whether the plan is optimal.
    """

    def __init__(self, plan: PlanFile, fields: Fields, objective: str, limit: float):
        self.plan, self.fields, self.objective, self.limit = plan, fields, objective, limit
        self.cost = plan.evaluation.cost(objective)
        self.lower_bound, self.optimal = fields.number("lower_bound_s"), fields.boolean("optimal")
        options = fields.object("options")
        self.joint_options = _read_options(options)
        self.candidate_cost = self.cost

    @property
    def options(self) -> Options:
        return self.joint_options.base

    def fault(self, text: str, where: str = "") -> UserError:
        """Return an error about the document, or about a part of it."""
        return UserError(f"{where or self.fields.where}: {text}")

    def check_field(self, name: str, expected: Any, fields: Fields | None = None) -> None:
        """Raise a UserError if a field differs from the expected value."""
        fields = fields or self.fields
        _compare(fields.where, name, fields.get(name), expected, 0.0)

    # ---- The certificate

    def check_certificate(self) -> None:
        """Check the status, the lower bound and the gap, and that counts are numbers."""
        status = _read_choice(self.fields, "status", _STATUSES)
        if self.lower_bound > self.cost * (1 + _TOLERANCE):
            cost_name = "communication_s" if self.objective == "communication" else "step_s"
            raise self.fault(f"lower_bound_s is {self.lower_bound!r}, more than its {cost_name} {self.cost!r}")
        reached = self.lower_bound >= self.cost * (1 - _TOLERANCE)
        if self.optimal and not reached:
            raise self.fault(f"optimal is true, but lower_bound_s {self.lower_bound!r} is below its cost {self.cost!r}")
        if self.optimal != (status == "optimal"):
            raise self.fault(f"status is {status!r}, but optimal is {show_json(self.optimal)}")
        gap = 0.0 if self.optimal or not self.cost else (self.cost - self.lower_bound) / self.cost
        if abs(self.fields.number("gap") - gap) > _TOLERANCE:
            raise self.fault(f"gap is {self.fields.number('gap')!r}, should be {gap!r} with its lower_bound_s")
        self.fields.number("search_s")
        self.fields.integer("evaluations")

    # ---- The options

    def check_options(self) -> None:
        """Check that the options agree with the plan, its workload and its memory limit."""
        plan, joint_options, options = self.plan, self.joint_options, self.fields.object("options")
        stages = plan.evaluation.configuration.stages
        _read_choice(options, "method", tuple(METHODS))
        if joint_options.pipeline is not None:
            _read_choice(options, "pipeline", ("auto", *PLANNERS))
        elif plan.has_pipeline or joint_options.allow_stale:
            raise self.fault("pipeline is null, but the plan has a pipeline, or allow_stale is true", options.where)
        self.check_field("method", method_of(joint_options))
        self.check_field("objective", self.objective, options)
        if self.options.executor != plan.executor:
            raise self.fault(
                f"executor is {self.options.executor!r}, but the plan's is {plan.executor!r}", options.where
            )
        if joint_options.pipeline is None and stages[0].recompute == "stage":
            raise self.fault("stages: recompute is 'stage', which requires a plan with a pipeline")
        for stage in stages:
            if not _is_allowed(stage.recompute, joint_options.base.recompute):
                recompute = show_json(joint_options.base.recompute)
                raise self.fault(f"recompute is {recompute}, which differs from that of its stages", options.where)
        if not plan.evaluation.configuration.schedule.synchronous and not joint_options.allow_stale:
            raise self.fault("allow_stale is false, but the schedule is asynchronous", options.where)
        self._check_workload(options, by_paper_planner=joint_options.pipeline in PLANNERS)

    def _check_workload(self, options: Fields, by_paper_planner: bool) -> None:
        """Check the workload, the memory limit and the hash of the options.

        Args:
            options: The recorded options.
            by_paper_planner: Whether the planner of a paper chose the plan.
        """
        workload, cluster = self.plan.workload, self.plan.cluster
        requested = base_workload(cluster, self.options, workload.recompute)
        size = self.options.micro_batch
        # The micro-batch of a paper's planner is that of one replica of a worker; the planner chooses the number of replicas.
        if size is not None and (not by_paper_planner or size < 1 or workload.micro_batch % size):
            self.check_field("micro_batch", workload.micro_batch, options)
        requested = replace(requested, micro_batch=workload.micro_batch)
        if requested != workload:
            raise self.fault(f"options ask for {requested}, its workload is {workload}")
        limit = self.options.memory_limit_bytes
        self.check_field("memory_limit_bytes", default_memory_limit(cluster) if limit is None else limit)
        self.check_field("options_hash", canonical_hash(self.fields.get("options")))

    # ---- Search space and candidates

    def check_search(self) -> None:
        """Check the counts of the search, the candidates and the size of the search space."""
        search = self.fields.object("search")
        search.text("space")
        num_settings = search.integer("settings")
        for name in ("ruled_out_by_memory", "ruled_out_by_bound"):
            count = search.integer(name)
            if count > num_settings:
                raise self.fault(f"{name} is {count}, more than its settings {num_settings}", search.where)
        search.integer("stage_searches")
        search.finish()
        if self.joint_options.pipeline is None:
            self._check_candidates()
            outcomes = [entry.text("outcome") for entry in self.fields.objects("candidates")]
            self.check_field("settings", len(outcomes), search)
            self.check_field("ruled_out_by_memory", outcomes.count(NOT_FITTING), search)
            self.check_field("ruled_out_by_bound", outcomes.count(NOT_BETTER), search)
            self.check_field("stage_searches", 0, search)
            return
        self.check_field("candidates", [])
        size = self.fields.get("space_size")
        if type(size) is not int or size < 0:
            raise self.fault(f"space_size is {show_json(size)}, should be a whole number of at least 0")
        reached = self.lower_bound >= self.cost * (1 - _TOLERANCE)
        self.check_field("optimal", self.joint_options.pipeline == "auto" and reached)

    def _check_candidates(self) -> None:
        """Check the size of the search space, that every setting is a candidate once, and the lower bound of all candidates."""
        plan, options = self.plan, self.options
        # Search space.
        books = _books_of_families(plan, options)
        own = family_of(options.executor, plan.strategies.values(), plan.cluster.num_devices)
        if own in books:
            _check_in_space(self, books[own])
        self.check_field("space_size", sum(book.space_size(plan.workload.micro_batch) for book in books.values()))
        # Settings of the search: micro-batches that every option set has an option for, with each way of recomputation.
        whole_workload = base_workload(plan.cluster, options)
        partial = [text_of(counts) for counts in partial_recomputations(options, plan.graph)]
        missing = {
            (size, recompute)
            for recompute in (*recomputations(options, plan.graph), *partial)
            for size in micro_batches(whole_workload, options)
            if any(book.space_size(size) for book in books.values())
        }
        # Each setting is a candidate, alone or with other numbers of recomputed blocks.
        chosen, lower_bound = (plan.workload.micro_batch, plan.workload.recompute), math.inf
        is_own_listed = False
        for entry in self.fields.objects("candidates"):
            setting = (entry.integer("micro_batch", 1), entry.text("recompute"))
            whole = next((one for one in missing if one[0] == setting[0] and contains(one[1], setting[1])), None)
            if whole is None:
                raise self.fault(f"micro_batch {setting[0]} occurs twice or is not one of the options'", entry.where)
            missing.remove(whole)
            missing.update((whole[0], way) for way in without(whole[1], setting[1]))
            is_own_listed |= setting == chosen
            lower_bound = min(lower_bound, self._candidate_bound(entry, setting == chosen))
        if missing and self.fields.get("status") != "interrupted":
            raise self.fault(f"candidates lack micro_batch {min(missing)[0]}")
        if not is_own_listed:
            raise self.fault(f"candidates lack the plan's own micro_batch {chosen[0]}")
        self.check_field("lower_bound_s", min(lower_bound, self.cost))
        self.check_field("optimal", lower_bound >= self.candidate_cost * (1 - _TOLERANCE))

    def _candidate_bound(self, entry: Fields, is_chosen: bool) -> float:
        """Check the entry of a candidate and return its lower bound; ``is_chosen``: whether it is the setting of the plan."""
        outcome = _read_choice(entry, "outcome", (*_STATUSES, NOT_BETTER, NOT_FITTING))
        bound = math.inf if entry.get("lower_bound_s") is None else entry.number("lower_bound_s")
        cost = math.inf if entry.get("cost_s") is None else entry.number("cost_s")
        entry.finish()
        if is_chosen:
            self.check_field("cost_s", self.cost, entry)
            self.candidate_cost = cost
        if outcome == NOT_FITTING and min(bound, cost) < math.inf:
            raise self.fault(f"outcome is {outcome!r}, but it has a cost or a lower bound", entry.where)
        # The setting has no plan better than a known one (a baseline, for example).  The known plan need not be the document's, so
        # the lower bound is not compared with the plan's cost.
        if outcome == NOT_BETTER and not cost == math.inf > bound:
            raise self.fault(f"outcome is {outcome!r}, but it has a cost, or no lower bound", entry.where)
        if outcome == "optimal" and cost < math.inf and bound < cost * (1 - 2 * _TOLERANCE):
            raise self.fault(f"outcome is 'optimal', but lower_bound_s {bound!r} is below cost_s {cost!r}", entry.where)
        if cost < self.cost * (1 - _TOLERANCE):
            raise self.fault(f"cost_s is {cost!r}, less than the plan's", entry.where)
        if cost < math.inf and bound > cost * (1 + _TOLERANCE):
            raise self.fault(f"lower_bound_s is {bound!r}, more than its cost_s {cost!r}", entry.where)
        return bound

    # ---- Rivals

    def check_rivals(self) -> None:
        """Check that rivals differ, that the figures of baselines are right, and that those of other rivals add up."""
        entries = self.fields.objects("rivals")
        names = [entry.text("name") for entry in entries]
        duplicate = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if duplicate is not None:
            raise self.fault(f"rivals: name {show_json(duplicate)} occurs twice")
        members = list(baselines(self.plan.graph, self.plan.cluster.level_sizes, self.options.choices))
        families = family_names(members)
        if self.joint_options.pipeline is None and names and sorted(names) != sorted(families):
            raise self.fault(f"rivals are {show_json(names)}, should be {', '.join(families)}")
        for name, entry in zip(names, entries):
            if "infeasible" in entry:
                entry.text("infeasible")
            else:
                if self.joint_options.pipeline is None:
                    self._check_baseline(name, entry, members)
                self._check_figures(entry)
            entry.finish()

    def _check_baseline(self, name: str, entry: Fields, members: Sequence[Baseline]) -> None:
        """Check that the figures of a baseline follow from its mesh, and that its cost is at least the plan's lower bound."""
        mesh, size, recompute = entry.text("mesh"), entry.integer("micro_batch", 1), entry.text("recompute")
        member = next((member for member in members if (member.name, member.mesh) == (name, mesh)), None)
        if member is None:
            raise self.fault(f"mesh {show_json(mesh)} is not a mesh of {name}", entry.where)
        if self.options.micro_batch not in (None, size) or not _is_allowed(recompute, self.options.recompute):
            raise self.fault("micro_batch or recompute is not what the options ask for", entry.where)
        workload = replace(self.plan.workload, micro_batch=size, recompute=recompute)
        try:
            evaluation = evaluate_unpipelined(chain_of(self.plan.graph), self.plan.cluster, workload, member.strategies)
        except UserError as error:
            raise self.fault(str(error), entry.where) from None
        for figure in RIVAL_FIGURES:
            _compare(entry.where, figure, entry.get(figure), getattr(evaluation, figure), evaluation.step_s)
        for figure, value in (("how", baseline_how(mesh, workload)), ("lower_bound_s", None), ("paper_step_s", None)):
            self.check_field(figure, value, entry)
        is_in_space = is_offered(name, member.strategies, self.plan.graph, self.options)
        if is_in_space and evaluation.cost(self.objective) < self.lower_bound * (1 - _TOLERANCE):
            raise self.fault(f"its cost is below the plan's lower_bound_s {self.lower_bound!r}", entry.where)

    def _check_figures(self, entry: Fields) -> None:
        """Check that the parts of a rival's step add up to it, its bounds, and its memory."""
        entry.text("how")
        step_s = entry.number("step_s")
        parts = [entry.number(part) for part in ("compute_s", "communication_s", "bubble_s")]
        # The step of an asynchronous schedule is that of its steady state, in which the parts may overlap.
        is_synchronous = entry.text("name") not in ("PipeDream", "PipeDream-2BW", PLANNERS["wpipe"])
        if sum(parts) < step_s * (1 - 1e-6) or (is_synchronous and sum(parts) > step_s * (1 + 1e-6)):
            raise self.fault(f"step_s is {step_s!r}, but its parts add up to {sum(parts)!r}", entry.where)
        if entry.number("exposed_communication_s") > parts[1] + _TOLERANCE * step_s:
            raise self.fault(f"exposed_communication_s is more than its communication_s {parts[1]!r}", entry.where)
        bound, paper = entry.get("lower_bound_s"), entry.get("paper_step_s")
        if bound is not None and entry.number("lower_bound_s") > step_s * (1 + _TOLERANCE):
            raise self.fault(f"lower_bound_s is {bound!r}, more than its step_s {step_s!r}", entry.where)
        if paper is not None and entry.number("paper_step_s") < step_s * (1 - _TOLERANCE):
            raise self.fault(f"paper_step_s is {paper!r}, less than its step_s {step_s!r}", entry.where)
        memory = entry.number("memory_bytes")
        if memory > self.limit * (1 + _TOLERANCE):
            raise self.fault(f"memory_bytes is {memory:g}, over the limit of {self.limit:g}", entry.where)

    # ---- Trust

    def check_trust(self) -> None:
        """Check that trust is present if and only if the cluster is calibrated, and check its figures and all notes."""
        plan, calibration = self.plan, self.plan.cluster.calibration
        of_trust: list[str] = []
        if self.fields.get("trust") is not None:
            trust = self.fields.object("trust")
            if calibration is None or not calibration.replicates:
                raise self.fault("trust is given, but its cluster is not calibrated")
            of_trust = list(trust_notes(plan.evaluation))
            self.check_field("calibrated", calibration.date, trust)
            self.check_field("draws", len(calibration.replicates[0].values), trust)
            self.check_field("notes", of_trust, trust)
            self._check_probabilities(trust)
            trust.finish()
        elif calibration is not None and calibration.replicates:
            raise self.fault("trust is null, but its cluster is calibrated")
        notes, expected = self.fields.texts("notes"), [*plan.graph.notes, *of_trust]
        expected += pricing_notes(plan.graph, plan.workload, plan.executor)
        if list(notes[: len(expected)]) != expected:
            raise self.fault(f"notes are {show_json(list(notes))}, should begin with {show_json(expected)}")
        more = [note for note in notes[len(expected) :] if not note.startswith(START_NOTE)]
        if self.plan.executor != EAGER:
            if len(more) != 1 or not more[0].startswith(executor_note_start(self.plan.executor)):
                raise self.fault(f"notes are {show_json(list(notes))}, should end with what its executor costs")
        elif self.joint_options.pipeline is None and more and not (len(more) == 1 and self._is_pipeline_note(more[0])):
            raise self.fault(f"notes contain {show_json(more[0])}, which is neither of its graph nor of its trust")

    def _is_pipeline_note(self, note: str) -> bool:
        """Return whether a note says that a pipeline is faster; a search without pipelines adds it after trying some of them."""
        tries_pipelines = self.objective == "step" and self.options.method == "exact"
        return tries_pipelines and self.plan.cluster.num_devices > 1 and note.startswith(NOTE)

    def _check_probabilities(self, trust: Fields) -> None:
        """Check that the probabilities are fractions of the draws and add up to 1, and that a measurement concerns a rival."""
        probability, draws = trust.number("probability"), trust.integer("draws")
        trust.number("expected_regret")
        rivals = {}
        for rival in trust.objects("rivals"):
            rivals[rival.text("name")] = rival.number("probability")
            rival.finish()
        probabilities = [probability, *rivals.values()]
        if abs(sum(probabilities) - 1) > _TOLERANCE or len(rivals) != len(trust.objects("rivals")):
            raise self.fault("probabilities of the plan and its rivals should add up to 1", trust.where)
        compared = [entry.text("name") for entry in self.fields.objects("rivals") if "infeasible" not in entry]
        missing = [name for name in compared if name not in rivals]
        if missing:
            raise self.fault(f"rivals lack {missing[0]}, which the plan is compared with", trust.where)
        if any(abs(value * draws - round(value * draws)) > 1e-6 for value in probabilities):
            raise self.fault(f"probabilities should be multiples of 1 / {draws}", trust.where)
        if trust.get("measurement") is None:
            return
        if probability >= SURE:
            raise self.fault(f"measurement is given, but its probability is {probability:g}", trust.where)
        measurement = trust.object("measurement")
        _read_choice(measurement, "rival", tuple(rivals))
        _read_choice(measurement, "level", ("device", *(level.name for level in self.plan.cluster.levels)))
        measurement.text("collective")
        measurement.integer("ranks")
        measurement.number("bytes")
        measurement.number("share")
        measurement.finish()


def _books_of_families(plan: PlanFile, options: Options) -> dict[str, PriceBook]:
    """The price book of every family of meshes in which every layer has a strategy; an eager executor has a single family."""
    books = {}
    for executor in families_of(options.executor, plan.cluster.num_devices):
        with contextlib.suppress(UserError):
            books[executor] = PriceBook(
                plan.graph,
                plan.cluster,
                plan.workload,
                options.untied,
                options.summa,
                executor=executor,
                choices=options.choices,
            )
    return books


def _check_in_space(claims: _Claims, book: PriceBook) -> None:
    """Check that the search space of the options contains the plan's strategies."""
    strategies = claims.plan.strategies
    for variable in book.variables:
        option = variable.option_set.index.get(strategies[variable.layers[0]])
        for name in variable.layers:
            if option is None or variable.strategy(name, option) != strategies[name]:
                raise claims.fault(f"options do not offer {strategies[name]} to {name}")


def _read_choice(fields: Fields, name: str, choices: Iterable[str]) -> str:
    """Return a text field, which must be one of some choices."""
    value, choices = fields.text(name), tuple(choices)
    if value not in choices:
        raise UserError(f"{fields.where}: {name} is {show_json(value)}, should be one of {', '.join(choices)}")
    return value


#: Methods that read a field of a type, by the type's annotation.
_READERS: dict[str, Callable[[Fields, str], Any]] = {
    "int": Fields.integer,
    "float": Fields.number,
    "str": Fields.text,
    "bool": Fields.boolean,
}


def _read_options(fields: Fields) -> JointOptions:
    """Return the options that :func:`.plandocument.option_fields` has written."""
    values: dict[str, Any] = {}
    for option in dataclass_fields(Options):
        if option.name == "quiet":
            continue
        if option.name == "executor":
            values["executor"] = executor_of(fields)
            continue
        kinds, value = str(option.type).split(" | "), fields.get(option.name)
        if value is None and "None" in kinds:
            values[option.name] = None
        else:
            kind = "str" if isinstance(value, str) and "str" in kinds else kinds[0]
            values[option.name] = _READERS[kind](fields, option.name)
    pipeline = None if fields.get("pipeline") is None else fields.text("pipeline")
    allow_stale = fields.boolean("allow_stale")
    fields.finish()
    return JointOptions(Options(**values), pipeline, allow_stale)


def _is_allowed(recompute: str, option: bool | str | None) -> bool:
    """Whether the option ``recompute`` allows a way of recomputation."""
    if option is None:
        return True
    if option == "stage":
        return recompute in ("stage", "layers")  # the last stage is not recomputed as a whole
    return recompute == option if isinstance(option, str) else option == (recompute != "none")
