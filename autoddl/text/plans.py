"""A plan as text: stages, layers, totals, rivals, certificate, trust and notes.

A plan without a pipeline is a pipeline of one stage.  Its text has no table of stages, and shows for each layer computation,
communication and bytes sent.  If pipelines were searched, the text also shows the gap of each rival, and which parts of the step
make the difference to the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster, Level
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import counted, format_bytes, format_count, format_ranges, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import StageChoice
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.meshes import StageMesh
from autoddl.pipelines.joint.paper_planners import PLANNERS
from autoddl.pipelines.joint.result import PlanResult, Rival, recomputed_text
from autoddl.pipelines.joint.rivals import describe
from autoddl.pipelines.joint.stage_figures import StageFigures

from ..explain.view import batch_text, peak_share, plan_heading
from ..plandocument import notes_of
from ..trusting import PlanTrust
from .layers import heading, layouts_of, legend, place, repeated
from .prices import priced_sections
from .tables import Column, Section, Table, Text
from .trust import trust_section

__all__ = ["heading_section", "notes_section", "plan_text"]


def plan_text(result: PlanResult, trusted: PlanTrust | None = None) -> Text:
    """Return the text of a planner's result.

    Args:
        result: the result.
        trusted: how far the plan can be trusted on its calibrated cluster; None if the cluster is not calibrated.
    """
    notes = notes_of(result, trusted)
    tables = (_heading(result), _stages(result.evaluation), _layers(result.evaluation), _totals(result))
    if result.layout is not None:
        return Text((*tables, *priced_sections(result), notes_section(notes)))
    return Text(
        (
            *tables,
            _rivals(result),
            _differences(result),
            _certificate(result),
            trust_section(trusted) if trusted else (),
            notes_section(notes),
        )
    )


def notes_section(notes: Iterable[str]) -> Section:
    """Return a section with a line for each note; an empty section if there are none."""
    lines = [f"  {note}" for note in notes]
    return ["Notes", *lines] if lines else []


def _heading(result: PlanResult) -> Section:
    configuration = result.configuration
    spec, mesh = configuration.schedule, configuration.mesh
    if not result.evaluation.has_pipeline:
        recomputed = recomputed_text(configuration.stages[0].recompute)[2:] or "no recomputation"
        executor = result.options.base.executor
        executed = "" if executor == EAGER else f", executor {executor}"
        lines = heading_section(result.graph, result.cluster, configuration.workload, f", {recomputed}{executed}")
        if result.options.pipeline is None:
            return lines
        return [*lines, f"  one stage on all {result.cluster.num_devices} devices: no pipeline"]
    shape = f"{mesh.num_devices} devices ({mesh})" if isinstance(mesh, StageMesh) else f"{mesh} devices"
    stages = f"{spec.num_stages} stages on {spec.num_workers} workers of {shape}; {spec.label}"
    return [*heading_section(result.graph, result.cluster, configuration.workload), f"  {stages}"]


def heading_section(graph: LayerGraph, cluster: Cluster, workload: Workload, more: str = "") -> Section:
    """Return a section with the model, the cluster, precision and optimizer, and the batch.

    Args:
        graph, cluster, workload: what the plan is for.
        more: text to append to precision and optimizer.
    """
    passes = f"{workload.num_micro_batches} micro-batches of {workload.micro_batch}"
    if workload.num_micro_batches == 1:
        passes = "one micro-batch"
    return [
        plan_heading(graph.name, cluster),
        f"  {graph.num_parameters:,} parameters; {workload.precision} precision, {workload.optimizer}{more}",
        f"  {batch_text(graph, workload.batch)} in {passes}",
    ]


# ---- Stages ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StageRow:
    """A row of the table of stages: the equal stages from ``first`` to ``last``."""

    first: int
    last: int
    evaluation: Evaluation

    @property
    def in_flight(self) -> str:
        """Most micro-batches in flight at the first and at the last of the stages."""
        first, last = max(self.evaluation.in_flight[self.first]), max(self.evaluation.in_flight[self.last])
        return f"{first:g}" if first == last else f"{first:g}-{last:g}"

    @property
    def memory_bytes(self) -> float:
        """Peak memory of a device of the stages' fullest worker."""
        replicas = self.evaluation.schedule.replicas_of
        workers = [replica.worker for stage in range(self.first, self.last + 1) for replica in replicas(stage)]
        return max(self.evaluation.worker_memory_bytes[worker] for worker in workers)

    @property
    def choice(self) -> StageChoice:
        return self.evaluation.configuration.stages[self.first]

    @property
    def figures(self) -> StageFigures:
        return self.evaluation.stages[self.first]


_STAGES: tuple[Column[_StageRow], ...] = (
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
        (
            choice.num_units,
            choice.recompute,
            round(figures.forward_s, 12),
            round(figures.backward_s, 12),
            figures.state_bytes,
        )
        for choice, figures in zip(evaluation.configuration.stages, evaluation.stages)
    ]
    title = (
        "Stages (forward and backward of one micro-batch with the communication inside; all-reduce and memory per step)"
    )
    return [title, Table.of(_STAGES, (_StageRow(first, last, evaluation) for first, last in _runs(keys)))]


def _runs(keys: Sequence[object]) -> Iterator[tuple[int, int]]:
    """First and last position of each run of equal keys."""
    first = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[first]:
            yield first, i - 1
            first = i


# ---- Layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LayerRow:
    """A row of the table of layers: the repetitions of a layer with equal strategies.

    Attributes:
        place: block and role of the layer (``h.*.mlp.c_fc``), or its name.
        members: the repetitions.
        stages: numbers of their stages.
    """

    place: str
    members: list[LayerAssessment]
    stages: set[int]

    @property
    def label(self) -> str:
        """Name of a single layer, or place and number of several."""
        return self.members[0].layer.name if len(self.members) == 1 else repeated(self.place, len(self.members))

    @cached_property
    def layouts(self) -> dict[str, str]:
        return dict(layouts_of(self.members[0]))


def _layer_columns(levels: Sequence[Level], has_pipeline: bool, divides_states: bool) -> tuple[Column[_LayerRow], ...]:
    """Columns of the table of layers.  With a pipeline there are no times and bytes, which the table of stages shows.

    The layouts of weights and optimizer states are those in which they are stored.
    """
    stages: Column[_LayerRow] = Column("stages", lambda row: format_ranges(sorted(row.stages)))
    # Layouts are left out before times and bytes.
    first_rank = 1 if has_pipeline else 3
    states: Column[_LayerRow] = Column("states", lambda row: row.layouts["state"], rank=first_rank + 3)
    columns: tuple[Column[_LayerRow], ...] = (
        Column("layer", lambda row: row.label),
        *([stages] if has_pipeline else []),
        Column(heading(levels), lambda row: str(row.members[0].strategy), name="strategy"),
        Column("input", lambda row: row.layouts["input"], rank=first_rank + 1),
        Column("weight", lambda row: row.layouts["parameter"], rank=first_rank + 2),
        *([states] if divides_states else []),
        Column("output", lambda row: row.layouts["output"], rank=first_rank),
    )
    if has_pipeline:
        return columns
    return (
        *columns,
        Column("compute", lambda row: format_seconds(sum(m.compute_s for m in row.members)), right=True, rank=1),
        Column("communication", lambda row: format_seconds(sum(m.communication_s for m in row.members)), right=True),
        Column("sent", lambda row: format_bytes(sum(m.sent_bytes for m in row.members)), right=True, rank=2),
    )


def _layers(evaluation: Evaluation) -> Section:
    levels, has_pipeline = evaluation.configuration.levels(evaluation.cluster), evaluation.has_pipeline
    title = "Per layer (time and bytes sent by each device per step)"
    if has_pipeline:
        title = "Per layer, over the devices of its stage"
    strategies = [layer.strategy for layer in evaluation.layers]
    divides_states = any(strategy.zero for strategy in strategies)
    table = Table.of(_layer_columns(levels, has_pipeline, divides_states), _layer_rows(evaluation))
    return [title, table, legend(levels, strategies)]


def _layer_rows(evaluation: Evaluation) -> Iterable[_LayerRow]:
    """The rows in the order of their first layers."""
    rows: dict[tuple[str, Strategy], _LayerRow] = {}
    for number, stage in enumerate(evaluation.stages):
        for assessed in stage.assessment.layers:
            name = place(assessed.layer)
            row = rows.setdefault((name, assessed.strategy), _LayerRow(name, [], set()))
            row.members.append(assessed)
            row.stages.add(number)
    return rows.values()


# ---- Totals ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Total:
    """A row of the table of totals.

    Attributes:
        name: what is totalled.
        value: the time or the memory.
        share: its share of the step or of the memory limit; shown with a pipeline.
        remark: what the value is of, or what it consists of.
    """

    name: str
    value: str
    share: str
    remark: str


def _total_columns(has_pipeline: bool) -> tuple[Column[_Total], ...]:
    """Columns of the table of totals.  With a pipeline the values have shares, and are compared with each other."""
    shares: Column[_Total] = Column("", lambda row: row.share, right=True)
    return (
        Column("", lambda row: row.name),
        Column("", lambda row: row.value, right=has_pipeline),
        *([shares] if has_pipeline else []),
        Column("", lambda row: row.remark, wraps=True),
    )


def _totals(result: PlanResult) -> Section:
    """The totals of a step: times of the busiest worker, and memory of the fullest device."""
    evaluation, workload = result.evaluation, result.configuration.workload
    rate = workload.batch / evaluation.step_s
    utilisation = peak_share(result.graph, result.cluster, workload, rate)
    speed = f"{rate:,.1f} {result.graph.sample}s/s, {utilisation:.0%} of peak FLOP/s"
    rows = [_Total("step", format_seconds(evaluation.step_s), "", speed)]
    if evaluation.has_pipeline and result.options.base.objective != "step":
        rows.append(_Total("minimised", format_seconds(result.cost), "", "a step in which nothing is computed"))
    for name, seconds, remark in _parts_of_step(evaluation):
        rows.append(_Total(name, format_seconds(seconds), f"{seconds / evaluation.step_s:.1%}", remark))
    share = f"{evaluation.memory_bytes / result.memory_limit_bytes:.0%}"
    rows.append(_Total("memory", format_bytes(evaluation.memory_bytes), share, _memory_remark(result)))
    return ["Per step", Table.of(_total_columns(evaluation.has_pipeline), rows)]


def _parts_of_step(evaluation: Evaluation) -> Iterator[tuple[str, float, str]]:
    """Name, seconds and remark of each part of the step.  Without a pipeline all devices take the same, and none waits."""
    if not evaluation.has_pipeline:
        yield "compute", evaluation.compute_s, ""
        yield "communication", evaluation.communication_s, f"each device sends {format_bytes(evaluation.sent_bytes)}"
        return
    yield "compute", evaluation.compute_s, f"of the busiest worker ({evaluation.busiest})"
    yield "communication", evaluation.inner_communication_s, "inside its stages"
    exposed = (
        f"{format_seconds(evaluation.exposed_transfer_s)} between stages, "
        f"{format_seconds(evaluation.exposed_all_reduce_s)} of gradients"
    )
    yield "exposed", evaluation.exposed_communication_s, exposed
    yield "bubble", evaluation.bubble_s, "it waits for other stages"


def _memory_remark(result: PlanResult) -> str:
    """What the memory consists of, or, with a pipeline, the memory of the emptiest device."""
    evaluation, limit = result.evaluation, format_bytes(result.memory_limit_bytes)
    if evaluation.has_pipeline:
        least = format_bytes(min(evaluation.worker_memory_bytes))
        return f"of the {limit} of the fullest device; the emptiest has {least}"
    (stage,) = evaluation.stages
    return (
        f"of {limit}: {format_bytes(stage.state_bytes)} parameters, gradients and "
        f"optimizer, {format_bytes(stage.kept_bytes)} activations, {format_bytes(stage.buffer_bytes)} buffer"
    )


# ---- Rivals ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RivalRow:
    """A row of the table of rivals.

    Attributes:
        figures: the figures of the rival, or of the plan itself in the first row.
        plan: the figures of the plan.
    """

    figures: Rival
    plan: Rival

    def ratio(self, name: str) -> str:
        """The ratio of a figure to that of the plan; empty in the row of the plan."""
        value, reference = getattr(self.figures, name), getattr(self.plan, name)
        return f"{value / reference:.2f}x" if self.figures is not self.plan and reference > 0 else ""

    @property
    def step_ratio(self) -> str:
        """The ratio of the steps; empty if they are equal."""
        return "" if self.figures.step_s == self.plan.step_s else self.ratio("step_s")

    @property
    def gap(self) -> str:
        """By how much another plan of the rival's family may be faster; empty if no bound is known."""
        if self.figures.lower_bound_s is None:
            return ""
        gap = 1 - self.figures.lower_bound_s / self.figures.step_s
        return "proven" if gap <= 1e-9 else f"{gap:.1%}"

    @property
    def how(self) -> str:
        """How the rival is laid out, and the step of the plan that its paper's planner chooses."""
        text, paper_s = self.figures.how, self.figures.paper_step_s
        return text if paper_s is None else f"{text}; its paper's planner takes {format_seconds(paper_s)}"


def _seconds(heading: str, name: str, rank: int = 0) -> Column[_RivalRow]:
    return Column(heading, lambda row: format_seconds(getattr(row.figures, name)), right=True, rank=rank)


_NAME: Column[_RivalRow] = Column("plan", lambda row: row.figures.name)
#: Columns if no pipelines were searched; no plan of the table waits for other stages.
_BASELINES: tuple[Column[_RivalRow], ...] = (
    _NAME,
    _seconds("step", "step_s"),
    Column("", lambda row: row.ratio("step_s"), right=True),
    _seconds("communication", "communication_s", 3),
    Column("", lambda row: row.ratio("communication_s"), right=True, rank=4, name="ratio of communication"),
    Column("memory", lambda row: format_bytes(row.figures.memory_bytes), right=True, rank=2),
    Column("", lambda row: row.how, name="how", wraps=True, rank=1),
)
#: Columns if pipelines were searched.
_FAMILIES: tuple[Column[_RivalRow], ...] = (
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


def _plan_figures(result: PlanResult) -> Rival:
    """The figures of the plan, for the first row of the table of rivals."""
    pipeline, evaluation = result.options.pipeline, result.evaluation
    name = f"this plan ({PLANNERS[pipeline]})" if pipeline in PLANNERS else "AutoDDL"
    if pipeline is None:
        return Rival.of(name, evaluation, "")
    return Rival.of(name, evaluation, describe(evaluation), lower_bound_s=(1 - result.gap) * evaluation.step_s)


def _rivals(result: PlanResult) -> Section:
    plan = _plan_figures(result)
    rows = [_RivalRow(plan, plan)]
    infeasible = []
    for rival in result.rivals:
        if rival.infeasible is None:
            rows.append(_RivalRow(rival, plan))
        else:
            infeasible.append(f"  {rival.name}: infeasible, {rival.infeasible}")
    if result.options.pipeline is None:
        return ["Compared with", Table.of(_BASELINES, rows), *infeasible]
    return ["Compared with the best of each family", Table.of(_FAMILIES, rows), *infeasible]


#: The parts of a step, and the fields that hold them.
_PARTS = (
    ("compute", "compute_s"),
    ("communication inside stages", "inner_communication_s"),
    ("exposed communication", "exposed_communication_s"),
    ("bubble", "bubble_s"),
)


def _differences(result: PlanResult) -> Section:
    """A line for each rival, the fastest first: by which parts its step differs from the plan's."""
    if result.options.pipeline is None:
        return []
    plan, lines = _plan_figures(result), []
    feasible = [rival for rival in result.rivals if rival.infeasible is None]
    for rival in sorted(feasible, key=lambda rival: rival.step_s):
        difference = rival.step_s - plan.step_s
        if abs(difference) <= 1e-9 * plan.step_s:
            lines.append(f"  {rival.name}: the same plan, or one as fast")
            continue
        parts = [(getattr(rival, field) - getattr(plan, field), name) for name, field in _PARTS]
        parts.sort(key=lambda part: -abs(part[0]))
        # Parts below a thousandth of the difference are not named.
        named = [f"{_signed(seconds)} {name}" for seconds, name in parts if abs(seconds) > 1e-3 * abs(difference)]
        lines.append(f"  {rival.name} takes {_signed(difference)}: {', '.join(named)}")
    return ["Why", *lines] if lines else []


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


# ---- The certificate ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Phrases:
    """The phrases of a certificate that depend on the kind of plan and on the objective.

    Attributes:
        member: a member of the space that was searched.
        members: the members of the space, with their number.
        smaller_cost: "... has a smaller cost", of the members that fit in memory.
        better: "better" or "faster".
    """

    member: str
    members: str
    smaller_cost: str
    better: str


def _phrases(result: PlanResult) -> _Phrases:
    objective, size = result.options.base.objective, result.considered.configurations
    if result.options.pipeline is None:
        count = format_count(size)
        what = "communication time" if objective == "communication" else "step time"
        return _Phrases("assignment", f"{count} assignments", f"of strategies that fit has a smaller {what}", "better")
    count = f"{size:,}" if size < 10**9 else f"{size:.1e}"
    smaller = "a shorter step" if objective == "step" else f"less communication than {format_seconds(result.cost)}"
    return _Phrases("configuration", f"{count} configurations", f"that fit has {smaller}", "faster")


def _certificate(result: PlanResult) -> Section:
    """What is proven about the plan, and what was searched."""
    pipeline, phrases = result.options.pipeline, _phrases(result)
    interrupted, remedy = ("interrupted, ", "") if result.is_interrupted else ("", f"; {_remedy(result)}")
    if pipeline in PLANNERS:
        verdict = f"not proven: {interrupted}the plan of {PLANNERS[pipeline]}'s planner; pipeline='auto' searches more"
        return ["Certificate", f"  {verdict}"]
    if result.optimal:
        verdict = f"proven: none of the {phrases.members} {phrases.smaller_cost}"
    else:
        verdict = (
            f"not proven: {interrupted}the best {phrases.member} may be up to {result.gap:.2%} {phrases.better} "
            f"(lower bound {format_seconds(result.lower_bound_s)}; {phrases.members}){remedy}"
        )
    if result.left_out:
        verdict += f"; {result.left_out}"
    return ["Certificate", f"  {verdict}", *_search(result)]


def _remedy(result: PlanResult) -> str:
    """How to get a proof."""
    return "raise time_limit_s" if result.options.base.method in ("exact", "exhaustive") else "use method='exact'"


def _search(result: PlanResult) -> Iterator[str]:
    """What was searched, and how long it took."""
    considered, duration = result.considered, format_seconds(result.search_s)
    if result.options.pipeline is None:
        settings = counted(considered.settings, "micro-batch setting")
        taken_from = f", which found nothing better than {result.taken_from}" if result.taken_from else ""
        yield (
            f"  {result.options.base.method} search, {duration}, {settings}{taken_from}; "
            "cost and memory recomputed from the layer graph"
        )
        return
    yield f"  space: {considered.space}"
    yield (
        f"  {considered.settings:,} settings of mesh, schedule and micro-batch: {considered.ruled_out_by_bound:,} ruled out by "
        f"their first bounds, {considered.ruled_out_by_memory:,} impossible"
    )
    yield (
        f"  {considered.stage_searches:,} searches of stages, {counted(considered.simulated, 'plan')} worked out, {duration}"
    )
