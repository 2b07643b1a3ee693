"""A plan with a pipeline as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Level
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted, format_bytes, format_ranges, format_seconds
from autoddl.pipelines.joint.configuration import StageChoice
from autoddl.pipelines.joint.evaluation import Evaluation, StageFigures
from autoddl.pipelines.joint.families import describe, figures_of
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.paper_planners import PLANNERS
from autoddl.pipelines.joint.result import FamilyFigures, JointPlan

from .layers import heading, layouts_of, legend, place, repeated
from .plans import heading_section, notes_section
from .tables import Column, Section, Table, Text

__all__ = ["joint_text"]


def joint_text(planned: JointPlan) -> Text:
    """The whole plan: what it is for, the stages, their layers, the totals, the runner-ups, what was considered, what is proven."""
    evaluation = planned.evaluation
    return Text(
        (
            _heading(planned),
            _stages(evaluation),
            _layers(evaluation),
            _totals(planned),
            _compared(planned),
            _why(planned),
            _certificate(planned),
            notes_section([*planned.graph.notes, *planned.notes]),
        )
    )


def _heading(planned: JointPlan) -> Section:
    configuration = planned.evaluation.configuration
    spec, mesh = configuration.schedule, configuration.mesh
    shape = f"{mesh.num_devices} devices ({mesh})" if isinstance(mesh, StageMesh) else f"{mesh} devices"
    stages = (
        f"one stage on all {planned.cluster.num_devices} devices: no pipeline"
        if spec.num_workers == 1
        else f"{spec.num_stages} stages on {spec.num_workers} workers of {shape}; {spec.label}"
    )
    return [*heading_section(planned.graph, planned.cluster, configuration.workload), f"  {stages}"]


# ---- Stages and layers -------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _Group:
    """Layers of one place in their blocks with equal strategies: their names and stages, and the first one's assessment."""

    place: str
    assessed: LayerAssessment
    names: list[str]
    stages: set[int]

    @property
    def label(self) -> str:
        return self.names[0] if len(self.names) == 1 else repeated(self.place, len(self.names))


def _layer_columns(levels: Sequence[Level]) -> tuple[Column[_Group], ...]:
    return (
        Column("layer", lambda group: group.label),
        Column("stages", lambda group: format_ranges(sorted(group.stages))),
        Column(heading(levels), lambda group: str(group.assessed.strategy), name="strategy"),
        Column("input", lambda group: layouts_of(group.assessed)["input"], rank=2),
        Column("weight", lambda group: layouts_of(group.assessed)["weight"], rank=3),
        Column("output", lambda group: layouts_of(group.assessed)["output"], rank=1),
    )


def _layers(evaluation: Evaluation) -> Section:
    groups: dict[tuple[str, Strategy], _Group] = {}
    for number, stage in enumerate(evaluation.stages):
        for assessed in stage.assessment.layers:
            name = place(assessed.layer)
            group = groups.setdefault((name, assessed.strategy), _Group(name, assessed, [], set()))
            group.names.append(assessed.layer.name)
            group.stages.add(number)
    levels = evaluation.configuration.levels(evaluation.cluster)
    return [
        "Per layer, over the devices of its stage",
        Table.of(_layer_columns(levels), groups.values()),
        legend(levels),
    ]


# ---- Totals and runner-ups ---------------------------------------------------------------------------------------------------

_TOTALS: tuple[Column[tuple[str, ...]], ...] = (Column(), Column(right=True), Column(right=True), Column(wraps=True))


def _totals(planned: JointPlan) -> Section:
    evaluation = planned.evaluation
    workload, cluster = evaluation.configuration.workload, planned.cluster
    rate = workload.batch / evaluation.step_s
    peak = cluster.num_devices * cluster.device.peak_flops[workload.precision]
    utilisation = 3 * planned.graph.flops * rate / peak

    def share(seconds: float) -> str:
        return f"{seconds / evaluation.step_s:.1%}"

    exposed = (
        f"{format_seconds(evaluation.exposed_transfer_s)} between stages, "
        f"{format_seconds(evaluation.exposed_all_reduce_s)} of gradients"
    )
    busiest = f"of the busiest worker ({evaluation.busiest})"
    step, compute, inner = evaluation.step_s, evaluation.compute_s, evaluation.inner_communication_s
    rows = [
        ("step", format_seconds(step), "", f"{rate:,.1f} {planned.graph.sample}s/s, {utilisation:.0%} of peak FLOP/s"),
        ("compute", format_seconds(compute), share(compute), busiest),
        ("communication", format_seconds(inner), share(inner), "inside its stages"),
        (
            "exposed",
            format_seconds(evaluation.exposed_communication_s),
            share(evaluation.exposed_communication_s),
            exposed,
        ),
        ("bubble", format_seconds(evaluation.bubble_s), share(evaluation.bubble_s), "it waits for other stages"),
        (
            "memory",
            format_bytes(evaluation.memory_bytes),
            f"{evaluation.memory_bytes / planned.memory_limit_bytes:.0%}",
            f"of the {format_bytes(planned.memory_limit_bytes)} of the fullest device; the emptiest has "
            f"{format_bytes(min(evaluation.memory))}",
        ),
    ]
    if planned.options.base.objective != "step":
        rows.insert(1, ("minimised", format_seconds(planned.cost), "", "a step in which nothing is computed"))
    return ["Per step", Table(_TOTALS, tuple(rows))]


@dataclass(frozen=True)
class _Row:
    """The best plan of a family beside ours."""

    figures: FamilyFigures
    ours_s: float

    @property
    def ratio(self) -> str:
        return "" if self.figures.step_s == self.ours_s else f"{self.figures.step_s / self.ours_s:.2f}x"

    @property
    def gap(self) -> str:
        """By how much another plan of the family may be faster."""
        gap = 1 - self.figures.lower_bound_s / self.figures.step_s
        return "proven" if gap <= 1e-9 else f"{gap:.1%}"

    @property
    def description(self) -> str:
        text, paper_s = self.figures.description, self.figures.paper_step_s
        return text if paper_s is None else f"{text}; its paper's planner takes {format_seconds(paper_s)}"


_FAMILIES: tuple[Column[_Row], ...] = (
    Column("plan", lambda row: row.figures.name),
    Column("step", lambda row: format_seconds(row.figures.step_s), right=True),
    Column("", lambda row: row.ratio, right=True),
    Column("compute", lambda row: format_seconds(row.figures.compute_s), right=True, rank=4),
    Column("communication", lambda row: format_seconds(row.figures.communication_s), right=True, rank=5),
    Column("exposed", lambda row: format_seconds(row.figures.exposed_communication_s), right=True, rank=3),
    Column("bubble", lambda row: format_seconds(row.figures.bubble_s), right=True, rank=2),
    Column("memory", lambda row: format_bytes(row.figures.memory_bytes), right=True, rank=1),
    Column("gap", lambda row: row.gap, right=True),
    Column("", lambda row: row.description, name="how", wraps=True),
)


def _own(planned: JointPlan) -> FamilyFigures:
    return figures_of(
        _title(planned), planned.evaluation, describe(planned.evaluation), (1 - planned.gap) * planned.evaluation.step_s
    )


def _title(planned: JointPlan) -> str:
    pipeline = planned.options.pipeline
    return "AutoDDL" if pipeline == "auto" else f"this plan ({PLANNERS[pipeline]})"


def _compared(planned: JointPlan) -> Section:
    ours_s = planned.evaluation.step_s
    feasible = [_own(planned), *(figures for figures in planned.families if figures.infeasible is None)]
    why = [
        f"  {figures.name}: infeasible, {figures.infeasible}"
        for figures in planned.families
        if figures.infeasible is not None
    ]
    table = Table.of(_FAMILIES, (_Row(figures, ours_s) for figures in feasible))
    return ["Compared with the best of each family", table, *why]


_PARTS = (
    ("compute", "compute_s"),
    ("communication inside stages", "communication_s"),
    ("exposed communication", "exposed_communication_s"),
    ("bubble", "bubble_s"),
)


def _why(planned: JointPlan) -> Section:
    """What sets the plan apart from each runner-up: the parts add up to the difference of the steps."""
    own = _own(planned)
    others = sorted((one for one in planned.families if one.infeasible is None), key=lambda one: one.step_s)
    lines = []
    for other in others:
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


def _count(number: int) -> str:
    """A number of configurations; the large ones by their power of ten."""
    return f"{number:,}" if number < 10**9 else f"{number:.1e}"


def _certificate(planned: JointPlan) -> Section:
    considered = planned.considered
    why, remedy = ("interrupted, ", "") if planned.is_interrupted else ("", "; raise --time-limit")
    if planned.options.pipeline != "auto":
        return [
            "Certificate",
            f"  not proven: {why}the plan of {PLANNERS[planned.options.pipeline]}'s planner; --pipeline auto searches more",
        ]
    if planned.options.base.objective != "step":
        less = f"less communication than {format_seconds(planned.cost)}"
    else:
        less = "a shorter step"
    if planned.optimal:
        verdict = f"proven: none of the {_count(considered.configurations)} configurations that fit has {less}"
    else:
        verdict = (
            f"not proven: {why}the best configuration may be up to {planned.gap:.2%} faster (lower bound "
            f"{format_seconds(planned.lower_bound_s)}; {_count(considered.configurations)} configurations){remedy}"
        )
    return [
        "Certificate",
        f"  {verdict}",
        f"  space: {considered.space}",
        f"  {considered.settings:,} settings of mesh, schedule and micro-batch: {considered.ruled_out_by_bound:,} ruled out by "
        f"their first bounds, {considered.ruled_out_by_memory:,} impossible",
        f"  {considered.stage_searches:,} searches of stages, {counted(considered.simulated, 'plan')} worked out, "
        f"{format_seconds(planned.search_s)}",
    ]
