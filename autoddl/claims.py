"""What is checked of a plan's document when it is read, so that an edited plan is not believed.

**Facts** (:mod:`autoddl.plandocument`) are compared with their recomputation, field by field.

**Claims** of the search would take the search to be made again.  Of them is checked what follows from the rest of the plan:

=====================  =============================================================================================================
member                 what is checked
=====================  =============================================================================================================
options, workload      the options give the workload, method, objective, memory limit and hash of the plan; without a pipeline its
                       strategies are in the space that they open
status, optimal, gap   they say the same: proven where the lower bound reaches the cost, and only there; the gap is theirs
lower_bound_s          not above the cost; without a pipeline the least bound of all candidates
space_size             without a pipeline counted again
candidates             without a pipeline every setting of the options once, with a known outcome; none is cheaper than the plan,
                       which is one of them
search                 no more settings are ruled out than there are; without a pipeline they are those of the candidates
rivals                 the parts of a step add up to it, its bound and its paper's are on either side; it fits the memory limit;
                       figures of baselines are computed again from mesh, micro-batch and recomputation, and are not below the
                       plan's lower bound
trust                  there where the cluster is calibrated, with its date and number of draws; probabilities add up; its notes
notes                  those of the graph, and of trust; without a pipeline of a plan for the step one more, that one is faster
memory_limit_bytes     that of the options, or the usual part of the device's memory; the plan needs no more
=====================  =============================================================================================================

**What is left** is protected by the hashes alone, and a forger who makes the hashes anew can say what he wants of it: the seconds
and evaluations that a search took; the bounds of the single candidates, as far as they stay below their costs; why a rival is
infeasible; the figures of rivals that are no baselines within their sums; the probabilities of trust within theirs; the space in
words; with a pipeline the lower bound, the counts of the search, and notes; without one how much faster a pipeline is.  `autoddl
plan` proves a bound again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.calib.trust import SURE
from autoddl.costmodel.documents import Fields, canonical_hash, show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import OBJECTIVES
from autoddl.pipelines.joint.evaluation import evaluate_unpipelined
from autoddl.pipelines.joint.megatron_trials import NOTE
from autoddl.pipelines.joint.paper_planners import PLANNERS
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.result import JointOptions, baseline_how
from autoddl.search import METHODS, Status
from autoddl.search.baselines import BASELINES, Baseline, baselines
from autoddl.search.options import USABLE_MEMORY, base_workload, micro_batches
from autoddl.search.planner import Options
from autoddl.search.sweep import NOT_BETTER, NOT_FITTING

from .plandocument import EDITED, MEMBERS, RIVAL_FIGURES, SEAL, hashes_of, method_of, unclaimed_document
from .trusting import trust_notes

if TYPE_CHECKING:
    from .planfile import PlanFile

__all__ = ["check_claims", "check_facts", "edited_member"]

#: Sums of the same floats in another order differ by less than this part.
_TOLERANCE = 1e-9
#: Figures that are differences of sums as large as the step: they keep the step's absolute precision.
_DIFFERENCES = frozenset(("exposed_transfer_s", "exposed_all_reduce_s", "bubble_s", "bubble_ratio"))
#: How a search ends that found a plan.
_STATUSES = tuple(str(status) for status in Status if status is not Status.INFEASIBLE)


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
    unknown = next((name for name in fields.value if name not in MEMBERS), None)
    if unknown is not None:
        raise UserError(f"{fields.where}: unknown field {show_json(unknown)}; known ones are {', '.join(MEMBERS)}")
    for name in MEMBERS:
        fields.get(name)
    for name in sorted(facts, key=lambda name: name != first):
        _compare(fields.where, name, fields.get(name), facts[name], facts["step_s"])


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


def check_claims(plan: PlanFile, fields: Fields, facts: Mapping[str, Any]) -> None:
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
    claims.check_options()
    claims.check_search()
    claims.check_rivals()
    claims.check_trust()


def _check_unclaimed(fields: Fields, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """A plan that was edited claims nothing."""
    for name, value in expected.items():
        if name not in facts and name not in SEAL:
            _compare(fields.where, name, fields.get(name), value, 0.0)


class _Claims:
    """The claims of one document."""

    def __init__(self, plan: PlanFile, fields: Fields, objective: str, limit: float):
        self.plan, self.fields, self.objective, self.limit = plan, fields, objective, limit
        self.cost = plan.evaluation.cost(objective)
        self.lower_bound, self.optimal = fields.number("lower_bound_s"), fields.boolean("optimal")
        options = fields.object("options")
        self.asked = _read_options(options)
        #: As the search added it up: in its last digit it may differ from the cost, and it decided what is optimal.
        self.chosen_cost = self.cost

    @property
    def options(self) -> Options:
        return self.asked.base

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
        if self.lower_bound > self.cost * (1 + _TOLERANCE):
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

    def check_options(self) -> None:
        """They are what the plan was made for."""
        plan, asked, options = self.plan, self.asked, self.fields.object("options")
        stages = plan.evaluation.configuration.stages
        _one_of(options, "method", tuple(METHODS))
        if asked.pipeline is not None:
            _one_of(options, "pipeline", ("auto", *PLANNERS))
        elif plan.has_pipeline or asked.allow_stale:
            raise self.fault("pipeline is null, but its plan has one, or allow_stale is true", options.where)
        self.same("method", method_of(asked))
        self.same("objective", self.objective, options)
        if asked.pipeline is None and stages[0].recompute == "stage":
            raise self.fault("stages: recompute is 'stage', which is of plans with a pipeline")
        for stage in stages:
            if asked.base.recompute is not None and asked.base.recompute != (stage.recompute != "none"):
                said = show_json(asked.base.recompute)
                raise self.fault(f"recompute is {said}, its stages' is other", options.where)
        if not plan.evaluation.configuration.schedule.synchronous and not asked.allow_stale:
            raise self.fault("allow_stale is false, its schedule is asynchronous", options.where)
        self._check_asked(options, by_paper=asked.pipeline in PLANNERS)

    def _check_asked(self, options: Fields, by_paper: bool = False) -> None:
        """The workload and the memory limit; ``by_paper`` of a plan that a paper's planner chose."""
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

    # ---- Space and candidates

    def check_search(self) -> None:
        """The counts are of settings; what can be counted again is."""
        search = self.fields.object("search")
        search.text("space")
        settings, misfits, ruled_out, _ = (
            search.integer(name) for name in ("settings", "ruled_out_by_memory", "ruled_out_by_bound", "stage_searches")
        )
        for what, count in (("ruled_out_by_memory", misfits), ("ruled_out_by_bound", ruled_out)):
            if count > settings:
                raise self.fault(f"{what} is {count}, more than its settings {settings}", search.where)
        search.finish()
        if self.asked.pipeline is None:
            self._check_candidates()
            outcomes = [entry.text("outcome") for entry in self.fields.objects("candidates")]
            self.same("settings", len(outcomes), search)
            self.same("ruled_out_by_memory", outcomes.count(NOT_FITTING), search)
            self.same("ruled_out_by_bound", outcomes.count(NOT_BETTER), search)
            self.same("stage_searches", 0, search)
            return
        self.same("candidates", [])
        size = self.fields.get("space_size")
        if type(size) is not int or size < 0:
            raise self.fault(f"space_size is {show_json(size)}, should be a whole number of at least 0")
        reached = self.lower_bound >= self.cost * (1 - _TOLERANCE)
        self.same("optimal", self.asked.pipeline == "auto" and reached)

    def _check_candidates(self) -> None:
        """Every setting once; the plan is the best of them; their bounds are the plan's; the space is as large as it says."""
        plan, options = self.plan, self.options
        book = PriceBook(plan.graph, plan.cluster, plan.workload, options.untied, options.summa)
        _check_in_space(self, book)
        kept = [int(np.sum(plan.workload.micro_batch % v.option_set.p0 == 0)) for v in book.variables]
        self.same("space_size", math.prod(kept))
        offers = list({id(v.option_set): v.option_set for v in book.variables}.values())
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
        outcome = _one_of(entry, "outcome", (*_STATUSES, NOT_BETTER, NOT_FITTING))
        bound = math.inf if entry.get("lower_bound_s") is None else entry.number("lower_bound_s")
        cost = math.inf if entry.get("cost_s") is None else entry.number("cost_s")
        entry.finish()
        if is_chosen:
            self.same("cost_s", self.cost, entry)
            self.chosen_cost = cost
        if outcome == NOT_FITTING and min(bound, cost) < math.inf:
            raise self.fault(f"outcome is {outcome!r}, but it has figures", entry.where)
        # Better than what: a plan that is known to exist, a baseline say, which is not always the one that was found.
        if outcome == NOT_BETTER and not cost == math.inf > bound:
            raise self.fault(f"outcome is {outcome!r}, but it has a cost, or no bound", entry.where)
        if outcome == "optimal" and cost < math.inf and bound < cost * (1 - 2 * _TOLERANCE):
            raise self.fault(f"outcome is 'optimal', but lower_bound_s {bound!r} is below cost_s {cost!r}", entry.where)
        if cost < self.cost * (1 - _TOLERANCE):
            raise self.fault(f"cost_s is {cost!r}, less than the plan's", entry.where)
        if cost < math.inf and bound > cost * (1 + _TOLERANCE):
            raise self.fault(f"lower_bound_s is {bound!r}, more than its cost_s {cost!r}", entry.where)
        return bound

    # ---- Rivals

    def check_rivals(self) -> None:
        """Each once; figures of baselines are those of their meshes, of others the parts of their steps add up."""
        entries = self.fields.objects("rivals")
        names = [entry.text("name") for entry in entries]
        twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if twice is not None:
            raise self.fault(f"rivals: name {show_json(twice)} stands twice")
        if self.asked.pipeline is None and names and sorted(names) != sorted(BASELINES):
            raise self.fault(f"rivals are {show_json(names)}, should be {', '.join(BASELINES)}")
        members = list(baselines(self.plan.graph, self.plan.cluster.level_sizes)) if names else []
        for name, entry in zip(names, entries):
            if "infeasible" in entry:
                entry.text("infeasible")
            else:
                if self.asked.pipeline is None:
                    self._check_baseline(name, entry, members)
                self._check_figures(entry)
            entry.finish()

    def _check_baseline(self, name: str, entry: Fields, members: Sequence[Baseline]) -> None:
        """Its figures follow from its mesh, and what the search could have chosen does not cost less than the bound."""
        mesh, size, recompute = entry.text("mesh"), entry.integer("micro_batch", 1), entry.boolean("recompute")
        member = next((one for one in members if (one.name, one.mesh) == (name, mesh)), None)
        if member is None:
            raise self.fault(f"mesh {show_json(mesh)} is none of {name}", entry.where)
        if self.options.micro_batch not in (None, size) or self.options.recompute not in (None, recompute):
            raise self.fault("micro_batch or recompute is not what the options ask for", entry.where)
        workload = replace(self.plan.workload, micro_batch=size, recompute=recompute)
        try:
            truth = evaluate_unpipelined(chain_of(self.plan.graph), self.plan.cluster, workload, member.strategies)
        except UserError as error:
            raise self.fault(str(error), entry.where) from None
        for figure in RIVAL_FIGURES:
            _compare(entry.where, figure, entry.get(figure), getattr(truth, figure), truth.step_s)
        for figure, value in (("how", baseline_how(mesh, workload)), ("lower_bound_s", None), ("paper_step_s", None)):
            self.same(figure, value, entry)
        is_in_space = name != "summa" or self.options.summa
        if is_in_space and truth.cost(self.objective) < self.lower_bound * (1 - _TOLERANCE):
            raise self.fault(f"its cost is below the plan's lower_bound_s {self.lower_bound!r}", entry.where)

    def _check_figures(self, entry: Fields) -> None:
        entry.text("how")
        step_s = entry.number("step_s")
        parts = [entry.number(part) for part in ("compute_s", "communication_s", "bubble_s")]
        # Of an asynchronous schedule the steady state is measured, and what exposed parts take from it may overlap.
        is_exact = entry.text("name") not in ("PipeDream", "PipeDream-2BW", PLANNERS["wpipe"])
        if sum(parts) < step_s * (1 - 1e-6) or (is_exact and sum(parts) > step_s * (1 + 1e-6)):
            raise self.fault(f"step_s is {step_s!r}, its parts make it {sum(parts)!r}", entry.where)
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
        """It is there where the cluster is calibrated, and of its calibration; the notes are its, and the graph's."""
        plan, calibration = self.plan, self.plan.cluster.calibration
        own: list[str] = []
        if self.fields.get("trust") is not None:
            trust = self.fields.object("trust")
            if calibration is None or not calibration.replicates:
                raise self.fault("trust is given, but its cluster is not calibrated")
            own = list(trust_notes(plan.evaluation))
            self.same("calibrated", calibration.date, trust)
            self.same("draws", len(calibration.replicates[0].values), trust)
            self.same("notes", own, trust)
            self._check_odds(trust)
            trust.finish()
        elif calibration is not None and calibration.replicates:
            raise self.fault("trust is null, but its cluster is calibrated")
        given, own = self.fields.texts("notes"), [*plan.graph.notes, *own]
        if list(given[: len(own)]) != own:
            raise self.fault(f"notes are {show_json(list(given))}, should begin with {show_json(own)}")
        more = given[len(own) :]
        if self.asked.pipeline is None and more and not (len(more) == 1 and self._is_of_a_glance(more[0])):
            raise self.fault(f"notes hold {show_json(more[0])}, which is neither of its graph nor of its trust")

    def _is_of_a_glance(self, note: str) -> bool:
        """Whether a note is what is found when pipelines are looked at beside the plan without one."""
        is_asked = self.objective == "step" and self.options.method == "exact"
        return is_asked and self.plan.cluster.num_devices > 1 and note.startswith(NOTE)

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
        compared = [entry.text("name") for entry in self.fields.objects("rivals") if "infeasible" not in entry]
        missing = [name for name in compared if name not in rivals]
        if missing:
            raise self.fault(f"rivals lack {missing[0]}, which the plan is compared with", trust.where)
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
        option = variable.option_set.index.get(strategies[variable.layers[0]])
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


def _read_options(fields: Fields) -> JointOptions:
    """The options as :func:`.plandocument.option_fields` wrote them."""
    values: dict[str, Any] = {}
    for option in dataclass_fields(Options):
        if option.name == "quiet":
            continue
        kind, _, may_be_null = str(option.type).partition(" | ")
        is_null = may_be_null == "None" and fields.get(option.name) is None
        values[option.name] = None if is_null else _READERS[kind](fields, option.name)
    pipeline = None if fields.get("pipeline") is None else fields.text("pipeline")
    allow_stale = fields.boolean("allow_stale")
    fields.finish()
    return JointOptions(Options(**values), pipeline, allow_stale)
