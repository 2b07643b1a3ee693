"""A plan as text: what a planner found.

A plan without a pipeline is a pipeline of one stage: stages, and what they wait for, are shown where there are several; the gap of
rivals, and what sets the plan apart from them, where pipelines were searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster, Level
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted, format_bytes, format_ranges, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import StageChoice
from autoddl.pipelines.joint.evaluation import Evaluation, StageFigures
from autoddl.pipelines.joint.families import describe
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.paper_planners import PLANNERS
from autoddl.pipelines.joint.result import PlanResult, Rival

from ..trusting import PlanTrust
from .layers import heading, layouts_of, legend, place, repeated
from .tables import Column, Section, Table, Text
from .trust import trust_section

__all__ = ["heading_section", "notes_section", "plan_text"]


def plan_text(found: PlanResult, trusted: PlanTrust | None = None) -> Text:
    """The whole plan: what it is for, stages, layers, totals, rivals, the certificate, and how far to trust it."""
    notes = [*found.graph.notes, *(trusted.notes if trusted else ()), *found.notes]
    return Text(
        (
            _heading(found),
            _stages(found.evaluation),
            _layers(found.evaluation),
            _totals(found),
            _compared(found),
            _why(found),
            _certificate(found),
            trust_section(trusted) if trusted else (),
            notes_section(notes),
        )
    )


def notes_section(notes: Iterable[str]) -> Section:
    """A line for each; nothing where there are none."""
    lines = [f"  {note}" for note in notes]
    return ["Notes", *lines] if lines else []


def _heading(found: PlanResult) -> Section:
    configuration = found.configuration
    spec, mesh = configuration.schedule, configuration.mesh
    if not found.evaluation.has_pipeline:
        again = "no recomputation" if configuration.stages[0].recompute == "none" else "activations recomputed"
        lines = heading_section(found.graph, found.cluster, configuration.workload, f", {again}")
        if found.options.pipeline is None:
            return lines
        return [*lines, f"  one stage on all {found.cluster.num_devices} devices: no pipeline"]
    shape = f"{mesh.num_devices} devices ({mesh})" if isinstance(mesh, StageMesh) else f"{mesh} devices"
    stages = f"{spec.num_stages} stages on {spec.num_workers} workers of {shape}; {spec.label}"
    return [*heading_section(found.graph, found.cluster, configuration.workload), f"  {stages}"]


def heading_section(graph: LayerGraph, cluster: Cluster, workload: Workload, more: str = "") -> Section:
    """What a plan is for: the model, the cluster and the batch; ``more`` on how it is trained."""
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    passes = f"{workload.num_micro_batches} micro-batches of {workload.micro_batch}"
    if workload.num_micro_batches == 1:
        passes = "one micro-batch"
    return [
        f"{graph.name} on {cluster.name}: {nodes} of {cluster.devices_per_node} x {cluster.device.name}",
        f"  {graph.num_parameters:,} parameters; {workload.precision} precision, {workload.optimizer}{more}",
        f"  {workload.batch} {graph.sample}s per step in {passes}",
    ]


# ---- Stages ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stages:
    """Equal neighbours: from stage ``first`` to stage ``last``."""

    first: int
    last: int
    evaluation: Evaluation

    @property
    def in_flight(self) -> str:
        alive = self.evaluation.in_flight
        least, most = max(alive[self.first]), max(alive[self.last])
        return f"{least:g}" if least == most else f"{least:g}-{most:g}"

    @property
    def memory_bytes(self) -> float:
        """Of their fullest worker."""
        replicas = self.evaluation.schedule.replicas_of
        workers = [replica.worker for stage in range(self.first, self.last + 1) for replica in replicas(stage)]
        return max(self.evaluation.memory[worker] for worker in workers)

    @property
    def choice(self) -> StageChoice:
        return self.evaluation.configuration.stages[self.first]

    @property
    def figures(self) -> StageFigures:
        return self.evaluation.stages[self.first]


_STAGES: tuple[Column[_Stages], ...] = (
    Column("stage", lambda row: format_ranges(range(row.first, row.last + 1))),
    Column("units", lambda row: str(row.choice.num_units), right=True, rank=4),
    Column("first layer", lambda row: row.figures.graph.layers[0].name, rank=2),
    Column("recompute", lambda row: row.choice.recompute, rank=1),
    Column("in flight", lambda row: row.in_flight, right=True, rank=3),
    Column("forward", lambda row: format_seconds(row.figures.forward_s), right=True),
    Column("backward", lambda row: format_seconds(row.figures.backward_s + row.figures.recompute_s), right=True),
    Column("all-reduce", lambda row: format_seconds(row.figures.all_reduce_s), right=True, rank=1),
    Column("memory", lambda row: format_bytes(row.memory_bytes), right=True),
)


def _stages(evaluation: Evaluation) -> Section:
    if not evaluation.has_pipeline:
        return []
    keys = [
        (choice.num_units, choice.recompute, round(one.forward_s, 12), round(one.backward_s, 12), one.state_bytes)
        for choice, one in zip(evaluation.configuration.stages, evaluation.stages)
    ]
    title = (
        "Stages (forward and backward of one micro-batch with the communication inside; all-reduce and memory per step)"
    )
    return [title, Table.of(_STAGES, (_Stages(first, last, evaluation) for first, last in _runs(keys)))]


def _runs(keys: Sequence[object]) -> Iterator[tuple[int, int]]:
    """First and last position of every run of equal keys."""
    first = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[first]:
            yield first, i - 1
            first = i


# ---- Layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Layers of one place in their blocks with equal strategies, and their stages."""

    place: str
    members: list[LayerAssessment]
    stages: set[int]

    @property
    def label(self) -> str:
        return self.members[0].layer.name if len(self.members) == 1 else repeated(self.place, len(self.members))

    @cached_property
    def layouts(self) -> dict[str, str]:
        return dict(layouts_of(self.members[0]))


def _layer_columns(levels: Sequence[Level], has_pipeline: bool) -> tuple[Column[_Group], ...]:
    """Of a pipeline without figures, which are those of its stages; its layouts are left out before the stages are."""
    stages: Column[_Group] = Column("stages", lambda group: format_ranges(sorted(group.stages)))
    first = 1 if has_pipeline else 3
    columns: tuple[Column[_Group], ...] = (
        Column("layer", lambda group: group.label),
        *([stages] if has_pipeline else []),
        Column(heading(levels), lambda group: str(group.members[0].strategy), name="strategy"),
        Column("input", lambda group: group.layouts["input"], rank=first + 1),
        Column("weight", lambda group: group.layouts["weight"], rank=first + 2),
        Column("output", lambda group: group.layouts["output"], rank=first),
    )
    if has_pipeline:
        return columns
    return (
        *columns,
        Column("compute", lambda group: format_seconds(sum(m.compute_s for m in group.members)), right=True, rank=1),
        Column(
            "communication", lambda group: format_seconds(sum(m.communication_s for m in group.members)), right=True
        ),
        Column("sent", lambda group: format_bytes(sum(m.sent_bytes for m in group.members)), right=True, rank=2),
    )


def _layers(evaluation: Evaluation) -> Section:
    levels, has_pipeline = evaluation.configuration.levels(evaluation.cluster), evaluation.has_pipeline
    title = "Per layer (time and bytes sent by each device per step)"
    if has_pipeline:
        title = "Per layer, over the devices of its stage"
    return [title, Table.of(_layer_columns(levels, has_pipeline), _grouped(evaluation)), legend(levels)]


def _grouped(evaluation: Evaluation) -> Iterable[_Group]:
    """In the order of their first layers."""
    groups: dict[tuple[str, Strategy], _Group] = {}
    for number, stage in enumerate(evaluation.stages):
        for assessed in stage.assessment.layers:
            name = place(assessed.layer)
            group = groups.setdefault((name, assessed.strategy), _Group(name, [], set()))
            group.members.append(assessed)
            group.stages.add(number)
    return groups.values()


# ---- Totals ------------------------------------------------------------------------------------------------------------------

_TOTALS: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(), Column(wraps=True))
#: With the part of the step, or of the memory limit.
_SHARED: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(right=True), Column(right=True), Column(wraps=True))


def _totals(found: PlanResult) -> Section:
    workload, cluster, step_s = found.configuration.workload, found.cluster, found.evaluation.step_s
    rate = workload.batch / step_s
    peak = cluster.num_devices * cluster.device.peak_flops[workload.precision]
    utilisation = 3 * found.graph.flops * rate / peak
    said = f"{rate:,.1f} {found.graph.sample}s/s, {utilisation:.0%} of peak FLOP/s"
    if not found.evaluation.has_pipeline:
        return ["Per step", Table(_TOTALS, (("step", format_seconds(step_s), said), *_totals_of_all(found)))]
    rows = [("step", format_seconds(step_s), "", said), *_totals_of_the_busiest(found)]
    if found.options.base.objective != "step":
        rows.insert(1, ("minimised", format_seconds(found.cost), "", "a step in which nothing is computed"))
    return ["Per step", Table(_SHARED, tuple(rows))]


def _totals_of_all(found: PlanResult) -> Iterator[tuple[str, str, str]]:
    """Of every device, where all do the same."""
    evaluation, (stage,) = found.evaluation, found.evaluation.stages
    yield "compute", format_seconds(evaluation.compute_s), ""
    sent = f"each device sends {format_bytes(evaluation.sent_bytes)}"
    yield "communication", format_seconds(evaluation.communication_s), sent
    filled = (
        f"of {format_bytes(found.memory_limit_bytes)}: {format_bytes(stage.state_bytes)} parameters, gradients and "
        f"optimizer, {format_bytes(stage.kept_bytes)} activations, {format_bytes(stage.buffer_bytes)} buffer"
    )
    yield "memory", format_bytes(evaluation.memory_bytes), filled


def _totals_of_the_busiest(found: PlanResult) -> Iterator[tuple[str, str, str, str]]:
    """Of the worker that is busy the longest, and the memory of the fullest device."""
    evaluation, limit = found.evaluation, found.memory_limit_bytes
    exposed = (
        f"{format_seconds(evaluation.exposed_transfer_s)} between stages, "
        f"{format_seconds(evaluation.exposed_all_reduce_s)} of gradients"
    )
    for name, seconds, said in (
        ("compute", evaluation.compute_s, f"of the busiest worker ({evaluation.busiest})"),
        ("communication", evaluation.inner_communication_s, "inside its stages"),
        ("exposed", evaluation.exposed_communication_s, exposed),
        ("bubble", evaluation.bubble_s, "it waits for other stages"),
    ):
        yield name, format_seconds(seconds), f"{seconds / evaluation.step_s:.1%}", said
    filled = (
        f"of the {format_bytes(limit)} of the fullest device; the emptiest has {format_bytes(min(evaluation.memory))}"
    )
    yield "memory", format_bytes(evaluation.memory_bytes), f"{evaluation.memory_bytes / limit:.0%}", filled


# ---- Rivals ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A plan beside ours, or ours."""

    figures: Rival
    ours: Rival

    def ratio(self, name: str) -> str:
        """Of a figure to ours; nothing in our own row."""
        theirs, ours = getattr(self.figures, name), getattr(self.ours, name)
        return f"{theirs / ours:.2f}x" if self.figures is not self.ours and ours > 0 else ""

    @property
    def step_ratio(self) -> str:
        """Of the step; nothing where the plan is ours."""
        return "" if self.figures.step_s == self.ours.step_s else self.ratio("step_s")

    @property
    def gap(self) -> str:
        """By how much another plan of the family may be faster."""
        if self.figures.lower_bound_s is None:
            return ""
        gap = 1 - self.figures.lower_bound_s / self.figures.step_s
        return "proven" if gap <= 1e-9 else f"{gap:.1%}"

    @property
    def how(self) -> str:
        text, paper_s = self.figures.how, self.figures.paper_step_s
        return text if paper_s is None else f"{text}; its paper's planner takes {format_seconds(paper_s)}"


def _seconds(heading: str, name: str, rank: int = 0) -> Column[_Row]:
    return Column(heading, lambda row: format_seconds(getattr(row.figures, name)), right=True, rank=rank)


_NAME: Column[_Row] = Column("plan", lambda row: row.figures.name)
#: Beside a plan for which no pipelines were searched: nothing waits for stages.
_BASELINES: tuple[Column[_Row], ...] = (
    _NAME,
    _seconds("step", "step_s"),
    Column("", lambda row: row.ratio("step_s"), right=True),
    _seconds("communication", "communication_s", 3),
    Column("", lambda row: row.ratio("communication_s"), right=True, rank=4, name="ratio of communication"),
    Column("memory", lambda row: format_bytes(row.figures.memory_bytes), right=True, rank=2),
    Column("", lambda row: row.how, name="how", wraps=True, rank=1),
)
_FAMILIES: tuple[Column[_Row], ...] = (
    _NAME,
    _seconds("step", "step_s"),
    Column("", lambda row: row.step_ratio, right=True),
    _seconds("compute", "compute_s", 4),
    _seconds("communication", "inner_communication_s", 5),
    _seconds("exposed", "exposed_communication_s", 3),
    _seconds("bubble", "bubble_s", 2),
    Column("memory", lambda row: format_bytes(row.figures.memory_bytes), right=True, rank=1),
    Column("gap", lambda row: row.gap, right=True),
    Column("", lambda row: row.how, name="how", wraps=True),
)


def _own(found: PlanResult) -> Rival:
    """The plan as a row of the table."""
    pipeline, evaluation = found.options.pipeline, found.evaluation
    name = f"this plan ({PLANNERS[pipeline]})" if pipeline in PLANNERS else "AutoDDL"
    if pipeline is None:
        return Rival.of(name, evaluation, "")
    return Rival.of(name, evaluation, describe(evaluation), lower_bound_s=(1 - found.gap) * evaluation.step_s)


def _compared(found: PlanResult) -> Section:
    ours = _own(found)
    rows = [_Row(ours, ours)]
    why = []
    for rival in found.rivals:
        if rival.infeasible is None:
            rows.append(_Row(rival, ours))
        else:
            why.append(f"  {rival.name}: infeasible, {rival.infeasible}")
    if found.options.pipeline is None:
        return ["Compared with", Table.of(_BASELINES, rows), *why]
    return ["Compared with the best of each family", Table.of(_FAMILIES, rows), *why]


_PARTS = (
    ("compute", "compute_s"),
    ("communication inside stages", "inner_communication_s"),
    ("exposed communication", "exposed_communication_s"),
    ("bubble", "bubble_s"),
)


def _why(found: PlanResult) -> Section:
    """What sets the plan apart from each runner-up: the parts add up to the difference of the steps."""
    if found.options.pipeline is None:
        return []
    own, lines = _own(found), []
    for other in sorted((one for one in found.rivals if one.infeasible is None), key=lambda one: one.step_s):
        difference = other.step_s - own.step_s
        if abs(difference) <= 1e-9 * own.step_s:
            lines.append(f"  {other.name}: the same plan, or one as fast")
            continue
        parts = sorted(
            ((getattr(other, field) - getattr(own, field), name) for name, field in _PARTS), key=lambda p: -abs(p[0])
        )
        said = ", ".join(f"{_signed(value)} {name}" for value, name in parts if abs(value) > 1e-3 * abs(difference))
        lines.append(f"  {other.name} takes {_signed(difference)}: {said}")
    return ["Why", *lines] if lines else []


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


# ---- The certificate ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Words:
    """What is proven of plans with or without a pipeline, in words.

    Attributes:
        member, members: of the space, and how many of them there are.
        less: what none of them has.
        better: what the best of them may be.
    """

    member: str
    members: str
    less: str
    better: str


def _words(found: PlanResult) -> _Words:
    objective, size = found.options.base.objective, found.considered.configurations
    if found.options.pipeline is None:
        count = f"{size:,}" if size < 10**9 else f"10^{len(str(size)) - 1}"
        what = "communication time" if objective == "communication" else "step time"
        return _Words("assignment", f"{count} assignments", f"of strategies that fit has a smaller {what}", "better")
    count = f"{size:,}" if size < 10**9 else f"{size:.1e}"
    less = "a shorter step" if objective == "step" else f"less communication than {format_seconds(found.cost)}"
    return _Words("configuration", f"{count} configurations", f"that fit has {less}", "faster")


def _certificate(found: PlanResult) -> Section:
    """What is proven, and how."""
    pipeline, words = found.options.pipeline, _words(found)
    why, remedy = ("interrupted, ", "") if found.is_interrupted else ("", f"; {_remedy(found)}")
    if pipeline in PLANNERS:
        said = f"not proven: {why}the plan of {PLANNERS[pipeline]}'s planner; pipeline='auto' searches more"
        return ["Certificate", f"  {said}"]
    if found.optimal:
        verdict = f"proven: none of the {words.members} {words.less}"
    else:
        verdict = (
            f"not proven: {why}the best {words.member} may be up to {found.gap:.2%} {words.better} "
            f"(lower bound {format_seconds(found.lower_bound_s)}; {words.members}){remedy}"
        )
    if found.left_out:
        verdict += f"; {found.left_out}"
    return ["Certificate", f"  {verdict}", *_search(found)]


def _remedy(found: PlanResult) -> str:
    return "raise time_limit_s" if found.options.base.method in ("exact", "exhaustive") else "use method='exact'"


def _search(found: PlanResult) -> Iterator[str]:
    """What the search looked at."""
    considered, took = found.considered, format_seconds(found.search_s)
    if found.options.pipeline is None:
        settings = counted(considered.settings, "micro-batch setting")
        taken_from = f", which found nothing better than {found.taken_from}" if found.taken_from else ""
        yield (
            f"  {found.options.base.method} search, {took}, {settings}{taken_from}; "
            "cost and memory recomputed from the layer graph"
        )
        return
    yield f"  space: {considered.space}"
    yield (
        f"  {considered.settings:,} settings of mesh, schedule and micro-batch: {considered.ruled_out_by_bound:,} ruled out by "
        f"their first bounds, {considered.ruled_out_by_memory:,} impossible"
    )
    yield (
        f"  {considered.stage_searches:,} searches of stages, {counted(considered.simulated, 'plan')} worked out, {took}"
    )
