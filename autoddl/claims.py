"""What is checked of a plan's document when it is read, so that an edited plan is not believed.

**Facts** (:mod:`autoddl.plandocument`) are compared with their recomputation, field by field.

**Claims** of the search would take the search to be made again.  Of them is checked what follows from the rest of the plan:

=====================  =============================================================================================================
member                 what is checked
=====================  =============================================================================================================
options, workload      the options give the workload, method, objective, memory limit and hash of the plan; its strategies are in
                       the space that they open
status, optimal, gap   they say the same: proven where the lower bound reaches the cost, and only there; the gap is theirs
lower_bound_s          not above the cost; without a pipeline the least bound of all candidates
space_size             counted again; with a pipeline equal to the search's own count
candidates             every setting of the options once, with a known outcome; none is cheaper than the plan, which is one of them
baselines              figures are computed again from mesh, micro-batch and recomputation; they fit the memory limit, and are not
                       below the lower bound
families               the parts of a step add up to it, its bound and its paper's are on either side; it fits the memory limit
trust                  there where the cluster is calibrated, with its date and number of draws; probabilities add up; its notes
notes                  those of the graph, and of trust; of a plan for the step one more, that a pipeline is faster
memory_limit_bytes     that of the options, or the usual part of the device's memory; the plan needs no more
=====================  =============================================================================================================

**What is left** is protected by the hashes alone, and a forger who makes the hashes anew can say what he wants of it: the seconds
and evaluations that a search took; the bounds of the single candidates, as far as they stay below their costs; why a baseline or
family is infeasible; the figures of families within their sums; the probabilities of trust within theirs; with a pipeline the lower
bound, the counts of the search, and notes; without one how much faster a pipeline is.  `autoddl plan` proves a bound again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.calib.trust import SURE, outside_notes, usage_of
from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.documents import Fields, canonical_hash, show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.pipelines.joint.glance import NOTE
from autoddl.pipelines.joint.paper_planners import PLANNERS
from autoddl.search import METHODS, Status
from autoddl.search.baselines import BASELINES, baselines
from autoddl.search.planner import USABLE_MEMORY, Options, base_workload, micro_batches

from .plandocument import (
    EDITED,
    MEMBERS,
    PIPELINE_CLAIMS,
    SEAL,
    baseline_figures,
    hashes_of,
    unclaimed_document,
)

if TYPE_CHECKING:
    from .planfile import Plan

__all__ = ["check_claims", "check_facts", "edited_member"]

#: Sums of the same floats in another order differ by less than this part.
_TOLERANCE = 1e-9
#: Figures that are differences of sums as large as the step: they keep the step's absolute precision.
_DIFFERENCES = frozenset(
    (
        "inner_communication_s",
        "exposed_transfer_s",
        "exposed_all_reduce_s",
        "bubble_s",
        "communication_s",
        "bubble_ratio",
    )
)
#: How a search ends that found a plan, and how a setting of it is settled.
_STATUSES = tuple(str(status) for status in Status if status is not Status.INFEASIBLE)
_NOT_BETTER, _NOT_FITTING = "cannot be better", "does not fit"


# ---- The seal ------------------------------------------------------------------------------------------------------------------


def edited_member(fields: Fields) -> str | None:
    """The member of a document that its hashes say was edited; None where they are right.

    Raises:
        UserError: the document has no hashes.
    """
    said, content = fields.object("hashes").value, fields.text("content_hash")
    try:
        hashes = hashes_of(fields.value)
    except (ValueError, RecursionError):  # numbers or nesting that no writer makes
        raise UserError(f"{fields.where}: its content has no hash; it was edited") from None
    if canonical_hash(said) != content:
        return "content_hash" if said == hashes else "hashes"
    return next((name for name in (*hashes, *said) if hashes.get(name) != said.get(name)), None)


# ---- Facts ---------------------------------------------------------------------------------------------------------------------


def check_facts(fields: Fields, facts: Mapping[str, Any], first: str | None = None) -> None:
    """Compare a document with what its inputs make it; the member ``first`` before all others.

    Raises:
        UserError: naming the first field that is missing, unknown, or something else.
    """
    known = [name for name in MEMBERS if name in facts or name not in ("pipeline", "stage_levels")]
    unknown = next((name for name in fields.value if name not in known), None)
    if unknown is not None:
        raise UserError(f"{fields.where}: unknown field {show_json(unknown)}; known ones are {', '.join(known)}")
    for name in known:
        fields.get(name)
    for name in sorted(facts, key=lambda name: name != first):
        given = fields.get(name)
        if name == "pipeline":
            given = {key: value for key, value in given.items() if key not in PIPELINE_CLAIMS}
        _compare(
            fields.where, name, given, facts[name], facts["step_s"] if name in ("pipeline", "communication_s") else 0
        )


def _compare(where: str, name: str, given: Any, expected: Any, scale: float) -> None:
    """Refuse a value that is not as expected, but for rounding; differences (above) to the precision of ``scale``."""
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
            raise UserError(f"{where}: {name} has {len(given)} entries, its plan makes it {len(expected)}")
        for i, (one, other) in enumerate(zip(given, expected)):
            _compare(where, f"{name}[{i}]", one, other, scale)
    elif not _is_equal(given, expected, scale if name in _DIFFERENCES else 0.0):
        raise UserError(f"{where}: {name} is {show_json(given)}, its plan makes it {show_json(expected)}")


def _is_equal(given: Any, expected: Any, scale: float) -> bool:
    if isinstance(expected, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        try:
            return math.isclose(given, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale)
        except OverflowError:
            return False
    return type(given) is type(expected) and given == expected


# ---- Claims --------------------------------------------------------------------------------------------------------------------


def check_claims(plan: Plan, fields: Fields, facts: Mapping[str, Any]) -> None:
    """Check what a search says of a plan whose facts are right (see the module's docstring).

    Raises:
        UserError: naming the field that cannot be.
    """
    objective = _one_of(fields, "objective", OBJECTIVES)
    limit = fields.number("memory_limit_bytes", exclusive=True)
    if fields.number("memory_bytes") > limit * (1 + _TOLERANCE):
        raise UserError(
            f"{fields.where}: memory_limit_bytes is {limit:g}, less than its memory_bytes {facts['memory_bytes']:g}"
        )
    if fields.get("status") == EDITED:
        _check_unclaimed(fields, facts, unclaimed_document(facts, objective, limit))
        return
    claims = _Claims(plan, fields, objective, limit)
    claims.check_certificate()
    if plan.pipeline is None:
        claims.check_options(fields.object("options"), fields.text("method"))
        claims.check_candidates()
        claims.check_baselines()
    else:
        claims.check_joint_options(fields.object("options"))
        claims.check_search(fields.object("pipeline"))
        claims.check_families(fields.object("pipeline"))
    claims.check_trust()


def _check_unclaimed(fields: Fields, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """A plan that was edited claims nothing."""
    for name, value in expected.items():
        if name not in facts and name not in SEAL:
            _compare(fields.where, name, fields.get(name), value, 0.0)
    if "pipeline" in facts:
        pipeline = fields.object("pipeline")
        for name in PIPELINE_CLAIMS:
            _compare(pipeline.where, name, pipeline.get(name), expected["pipeline"][name], 0.0)


class _Claims:
    """The claims of one document."""

    def __init__(self, plan: Plan, fields: Fields, objective: str, limit: float):
        self.plan, self.fields, self.objective, self.limit = plan, fields, objective, limit
        self.cost = fields.number("communication_s" if objective == "communication" else "step_s")
        if objective == "communication" and plan.pipeline is not None:
            # Of a pipeline that is a step in which nothing is computed.
            self.cost = plan.pipeline.cost(objective)
        self.lower_bound, self.optimal = fields.number("lower_bound_s"), fields.boolean("optimal")
        self.options = Options()
        #: As the search added it up: in its last digit it may differ from the cost, and it decided what is optimal.
        self.chosen_cost = self.cost

    def fault(self, text: str, where: str = "") -> UserError:
        return UserError(f"{where or self.fields.where}: {text}")

    def same(self, name: str, expected: Any, fields: Fields | None = None) -> None:
        """Refuse a field that is not as expected."""
        fields = fields or self.fields
        _compare(fields.where, name, fields.get(name), expected, 0.0)

    # ---- The certificate

    def check_certificate(self) -> None:
        """Status, optimality, bound and gap say the same; counts are numbers."""
        status = _one_of(self.fields, "status", _STATUSES)
        if self.lower_bound > self.cost:
            what = "communication_s" if self.objective == "communication" else "step_s"
            raise self.fault(f"lower_bound_s is {self.lower_bound!r}, more than its {what} {self.cost!r}")
        reached = self.lower_bound >= self.cost * (1 - _TOLERANCE)
        if self.optimal and not reached:
            raise self.fault(f"optimal is true, but lower_bound_s {self.lower_bound!r} is below its cost {self.cost!r}")
        if self.optimal != (status == "optimal"):
            raise self.fault(f"status is {status!r}, but optimal is {show_json(self.optimal)}")
        gap = 0.0 if self.optimal or not self.cost else (self.cost - self.lower_bound) / self.cost
        if abs(self.fields.number("gap") - gap) > _TOLERANCE:
            raise self.fault(f"gap is {self.fields.number('gap')!r}, its lower_bound_s makes it {gap!r}")
        self.fields.number("search_s")
        self.fields.integer("evaluations")

    # ---- The options

    def check_options(self, options: Fields, method: str) -> None:
        """The options of a plan without a pipeline."""
        self.options = _read_options(options)
        _one_of(options, "method", tuple(METHODS))
        for name, value in (("method", method), ("objective", self.objective)):
            self.same(name, value, options)
        recompute = self.plan.workload.recompute
        if self.options.recompute is not None and self.options.recompute != recompute:
            raise self.fault(
                f"recompute is {show_json(self.options.recompute)}, its workload's is other", options.where
            )
        self._check_asked(options)

    def check_joint_options(self, options: Fields) -> None:
        """The options of a plan with a pipeline."""
        base = options.object("base")
        self.options = _read_options(base)
        pipeline = _one_of(options, "pipeline", ("auto", *PLANNERS))
        options.boolean("allow_stale")
        options.finish()
        self.same("method", "joint" if pipeline == "auto" else pipeline)
        assert self.plan.pipeline is not None
        stages = self.plan.pipeline.configuration.stages
        if self.plan.workload.recompute and any(stage.recompute != "layers" for stage in stages):
            raise self.fault("workload: recompute is true, its stages' is other")
        for stage in stages:
            if self.options.recompute is not None and self.options.recompute != (stage.recompute != "none"):
                raise self.fault(f"recompute is {show_json(self.options.recompute)}, its stages' is other", base.where)
        if not self.plan.pipeline.configuration.schedule.synchronous and not options.boolean("allow_stale"):
            raise self.fault("allow_stale is false, its schedule is asynchronous", options.where)
        self._check_asked(base, by_paper=pipeline in PLANNERS)

    def _check_asked(self, options: Fields, by_paper: bool = False) -> None:
        """What both kinds of plans were asked for; ``by_paper`` of a plan that a paper's planner chose."""
        workload, cluster = self.plan.workload, self.plan.cluster
        asked = base_workload(cluster, self.options, workload.recompute)
        size = self.options.micro_batch
        # Papers count the samples of one of the replicas of a worker, which their plans decide the number of.
        if size is not None and (not by_paper or size < 1 or workload.micro_batch % size):
            self.same("micro_batch", workload.micro_batch, options)
        asked = replace(asked, micro_batch=workload.micro_batch)
        if asked != workload:
            raise self.fault(f"options ask for {asked}, its workload is {workload}")
        limit = self.options.memory_limit_bytes
        self.same("memory_limit_bytes", USABLE_MEMORY * cluster.device.memory_bytes if limit is None else limit)
        self.same("options_hash", canonical_hash(self.fields.get("options")))

    # ---- Candidates and space

    def check_candidates(self) -> None:
        """Every setting once; the plan is the best of them; their bounds are the plan's; the space is as large as it says."""
        plan, options = self.plan, self.options
        book = PriceBook(plan.graph, plan.cluster, plan.workload, options.untied, options.summa)
        _check_in_space(self, book)
        kept = [int(np.sum(plan.workload.micro_batch % v.offer.p0 == 0)) for v in book.variables]
        self.same("space_size", math.prod(kept))
        offers = list({id(v.offer): v.offer for v in book.variables}.values())
        whole = base_workload(plan.cluster, options, False)
        settings = {
            (size, recompute)
            for recompute in ((False, True) if options.recompute is None else (options.recompute,))
            for size in micro_batches(whole, options)
            if all(np.any(size % offer.p0 == 0) for offer in offers)
        }
        chosen, least = (plan.workload.micro_batch, plan.workload.recompute), math.inf
        for entry in self.fields.objects("candidates"):
            setting = (entry.integer("micro_batch", 1), entry.boolean("recompute"))
            if setting not in settings:
                raise self.fault(f"micro_batch {setting[0]} stands twice or is none of the options'", entry.where)
            settings.remove(setting)
            least = min(least, self._bound_of(entry, setting == chosen))
        if settings and self.fields.get("status") != "interrupted":
            raise self.fault(f"candidates lack micro_batch {min(settings)[0]}")
        if chosen in settings:
            raise self.fault(f"candidates lack the plan's own micro_batch {chosen[0]}")
        self.same("lower_bound_s", min(least, self.cost))
        self.same("optimal", least >= self.chosen_cost * (1 - _TOLERANCE))

    def _bound_of(self, entry: Fields, is_chosen: bool) -> float:
        """The lower bound of a candidate, once its entry is checked."""
        outcome = _one_of(entry, "outcome", (*_STATUSES, _NOT_BETTER, _NOT_FITTING))
        bound = math.inf if entry.get("lower_bound_s") is None else entry.number("lower_bound_s")
        cost = math.inf if entry.get("cost_s") is None else entry.number("cost_s")
        entry.finish()
        if is_chosen:
            self.same("cost_s", self.cost, entry)
            self.chosen_cost = cost
        if outcome == _NOT_FITTING and min(bound, cost) < math.inf:
            raise self.fault(f"outcome is {outcome!r}, but it has figures", entry.where)
        # Better than what: a plan that is known to exist, a baseline say, which is not always the one that was found.
        if outcome == _NOT_BETTER and not cost == math.inf > bound:
            raise self.fault(f"outcome is {outcome!r}, but it has a cost, or no bound", entry.where)
        if outcome == "optimal" and cost < math.inf and bound < cost * (1 - 2 * _TOLERANCE):
            raise self.fault(f"outcome is 'optimal', but lower_bound_s {bound!r} is below cost_s {cost!r}", entry.where)
        if cost < self.cost * (1 - _TOLERANCE):
            raise self.fault(f"cost_s is {cost!r}, less than the plan's", entry.where)
        if cost < math.inf and bound > cost * (1 + _TOLERANCE):
            raise self.fault(f"lower_bound_s is {bound!r}, more than its cost_s {cost!r}", entry.where)
        return bound

    # ---- Baselines and families

    def check_baselines(self) -> None:
        """Their figures are those of their meshes."""
        table = self.fields.object("baselines")
        if table.value and sorted(table.value) != sorted(BASELINES):
            raise self.fault(f"baselines are {show_json(list(table.value))}, should be {', '.join(BASELINES)}")
        plan = self.plan
        members = list(baselines(plan.graph, plan.cluster.level_sizes)) if table.value else []
        for name in table.value:
            entry = table.object(name)
            if "infeasible" in entry:
                entry.text("infeasible")
                entry.finish()
                continue
            mesh = entry.text("mesh")
            member = next((one for one in members if (one.name, one.mesh) == (name, mesh)), None)
            if member is None:
                raise self.fault(f"mesh {show_json(mesh)} is none of {name}", entry.where)
            size, recompute = entry.integer("micro_batch", 1), entry.boolean("recompute")
            asked = self.options.micro_batch, self.options.recompute
            if asked[0] not in (None, size) or asked[1] not in (None, recompute):
                raise self.fault("micro_batch or recompute is not what the options ask for", entry.where)
            try:
                workload = replace(plan.workload, micro_batch=size, recompute=recompute)
                truth = assess(plan.graph, plan.cluster, workload, member.strategies)
            except UserError as error:
                raise self.fault(str(error), entry.where) from None
            for figure, value in baseline_figures(truth).items():
                self.same(figure, value, entry)
            entry.finish()
            self._check_rival(entry, truth, name != "summa" or self.options.summa)

    def _check_rival(self, entry: Fields, truth: Assessment, is_in_space: bool) -> None:
        """It fits, and if the search could have chosen it, its cost is not below the bound."""
        if truth.memory_bytes > self.limit * (1 + _TOLERANCE):
            raise self.fault(f"memory_bytes is {truth.memory_bytes:g}, over the limit of {self.limit:g}", entry.where)
        if is_in_space and truth.cost(self.objective) < self.lower_bound * (1 - _TOLERANCE):
            raise self.fault(f"its cost is below the plan's lower_bound_s {self.lower_bound!r}", entry.where)

    def check_families(self, pipeline: Fields) -> None:
        """The parts of their steps add up."""
        self.same("baselines", {})
        self.same("candidates", [])
        seen: set[str] = set()
        for entry in pipeline.objects("families"):
            name = entry.text("name")
            if name in seen:
                raise self.fault(f"name {show_json(name)} stands twice", entry.where)
            seen.add(name)
            if "infeasible" in entry:
                entry.text("infeasible")
            else:
                self._check_family(entry)
            entry.finish()

    def _check_family(self, entry: Fields) -> None:
        entry.text("description")
        step_s = entry.number("step_s", exclusive=True)
        parts = [entry.number(part) for part in ("compute_s", "communication_s", "exposed_communication_s", "bubble_s")]
        # Of an asynchronous schedule the steady state is measured, and what exposed parts take from it may overlap.
        is_exact = entry.text("name") not in ("PipeDream", "PipeDream-2BW", PLANNERS["wpipe"])
        if sum(parts) < step_s * (1 - 1e-6) or (is_exact and sum(parts) > step_s * (1 + 1e-6)):
            raise self.fault(f"step_s is {step_s!r}, its parts make it {sum(parts)!r}", entry.where)
        bound, paper = entry.number("lower_bound_s"), entry.get("paper_step_s")
        if bound > step_s * (1 + _TOLERANCE):
            raise self.fault(f"lower_bound_s is {bound!r}, more than its step_s {step_s!r}", entry.where)
        if paper is not None and entry.number("paper_step_s") < step_s * (1 - _TOLERANCE):
            raise self.fault(f"paper_step_s is {paper!r}, less than its step_s {step_s!r}", entry.where)
        if entry.number("memory_bytes") > self.limit * (1 + _TOLERANCE):
            raise self.fault(
                f"memory_bytes is {entry.number('memory_bytes'):g}, over the limit of {self.limit:g}", entry.where
            )

    def check_search(self, pipeline: Fields) -> None:
        """The search's own member repeats the certificate."""
        search, options = pipeline.object("search"), self.fields.object("options")
        search.text("space")
        counts = {
            name: search.integer(name)
            for name in ("settings", "ruled_out_by_memory", "ruled_out_by_bound", "stage_searches")
        }
        for what in ("ruled_out_by_memory", "ruled_out_by_bound"):
            if counts[what] > counts["settings"]:
                raise self.fault(f"{what} is {counts[what]}, more than its settings {counts['settings']}", search.where)
        for name in ("lower_bound_s", "optimal", "gap"):
            self.same(name, self.fields.get(name), search)
        for name in ("pipeline", "allow_stale"):
            self.same(name, options.get(name), search)
        for name, total in (("configurations", "space_size"), ("simulated", "evaluations")):
            search.integer(name)
            self.same(name, self.fields.get(total), search)
        search.finish()
        self.same("optimal", options.text("pipeline") == "auto" and self.lower_bound >= self.cost * (1 - _TOLERANCE))
        notes = self.fields.texts("notes")
        if notes[: len(self.plan.graph.notes)] != tuple(self.plan.graph.notes):
            raise self.fault("notes do not begin with those of its graph")

    # ---- Trust

    def check_trust(self) -> None:
        """It is there where the cluster is calibrated, and of its calibration."""
        plan, calibration = self.plan, self.plan.cluster.calibration
        own: list[str] = []
        if self.fields.get("trust") is not None:
            trust = self.fields.object("trust")
            if calibration is None or not calibration.replicates or plan.pipeline is not None:
                raise self.fault("trust is given, but its cluster is not calibrated, or it has a pipeline")
            own = outside_notes(usage_of(self._assessment(), plan.cluster, plan.workload), plan.cluster)
            self.same("calibrated", calibration.date, trust)
            self.same("draws", len(calibration.replicates[0].values), trust)
            self.same("notes", own, trust)
            self._check_odds(trust)
            trust.finish()
        elif calibration is not None and calibration.replicates and plan.pipeline is None:
            raise self.fault("trust is null, but its cluster is calibrated")
        if plan.pipeline is None:
            given, own = self.fields.texts("notes"), [*plan.graph.notes, *own]
            if len(given) == len(own) + 1 and given[-1].startswith(NOTE) and self._may_be_faster:
                own.append(given[-1])
            self.same("notes", own)

    @property
    def _may_be_faster(self) -> bool:
        """Whether pipelines were looked at beside the plan without one."""
        is_asked = self.objective == "step" and self.options.method == "exact"
        return is_asked and self.plan.cluster.num_devices > 1

    def _assessment(self) -> Assessment:
        plan = self.plan
        return assess(plan.graph, plan.cluster, plan.workload, plan.strategies)

    def _check_odds(self, trust: Fields) -> None:
        """Probabilities are parts of a whole; what is to be measured concerns a rival."""
        probability, draws = trust.number("probability"), trust.integer("draws")
        trust.number("expected_regret")
        rivals = {}
        for rival in trust.objects("rivals"):
            rivals[rival.text("name")] = rival.number("probability")
            rival.finish()
        odds = [probability, *rivals.values()]
        if abs(sum(odds) - 1) > _TOLERANCE or len(rivals) != len(trust.objects("rivals")):
            raise self.fault("probabilities of the plan and its rivals should add up to 1", trust.where)
        missing = [
            name
            for name, entry in self.fields.object("baselines").value.items()
            if "mesh" in entry and name not in rivals
        ]
        if missing:
            raise self.fault(f"rivals lack {missing[0]}, a baseline", trust.where)
        if any(abs(one * draws - round(one * draws)) > 1e-6 for one in odds):
            raise self.fault(f"probabilities should be multiples of 1 / {draws}", trust.where)
        if trust.get("measurement") is None:
            return
        if probability >= SURE:
            raise self.fault(f"measurement is given, but its probability is {probability:g}", trust.where)
        best = trust.object("measurement")
        _one_of(best, "rival", tuple(rivals))
        _one_of(best, "level", ("device", *(level.name for level in self.plan.cluster.levels)))
        best.text("collective"), best.integer("ranks"), best.number("bytes"), best.number("share")
        best.finish()


def _check_in_space(claims: _Claims, book: PriceBook) -> None:
    """The options open a space that has the plan's strategies."""
    strategies = claims.plan.strategies
    for variable in book.variables:
        option = variable.offer.index.get(strategies[variable.layers[0]])
        for name in variable.layers:
            if option is None or variable.strategy(name, option) != strategies[name]:
                raise claims.fault(f"options do not offer {strategies[name]} to {name}")


def _one_of(fields: Fields, name: str, known: Iterable[str]) -> str:
    value, known = fields.text(name), tuple(known)
    if value not in known:
        raise UserError(f"{fields.where}: {name} is {show_json(value)}, should be one of {', '.join(known)}")
    return value


_READERS: dict[str, Callable[[Fields, str], Any]] = {
    "int": Fields.integer,
    "float": Fields.number,
    "str": Fields.text,
    "bool": Fields.boolean,
}


def _read_options(fields: Fields) -> Options:
    """The options as :func:`.plandocument.option_fields` wrote them."""
    values: dict[str, Any] = {}
    for option in dataclass_fields(Options):
        if option.name == "quiet":
            continue
        kind, _, may_be_null = str(option.type).partition(" | ")
        is_null = may_be_null == "None" and fields.get(option.name) is None
        values[option.name] = None if is_null else _READERS[kind](fields, option.name)
    fields.finish()
    return Options(**values)
