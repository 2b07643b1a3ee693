"""Joint plans as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_ranges, format_seconds

from ..tables import aligned, counted
from .evaluation import Evaluation
from .families import describe, figures_of
from .meshes import StageMesh
from .papers import PLANNERS
from .result import FamilyFigures, JointPlan

__all__ = ["joint_text"]


def joint_text(planned: JointPlan) -> str:
    """The whole plan: what it is for, the stages, their layers, the totals, the runner-ups, what was considered, what is proven."""
    evaluation = planned.evaluation
    sections = [
        _heading(planned),
        _stages(evaluation),
        _layers(evaluation),
        _totals(planned),
        _compared(planned),
        _why(planned),
        _certificate(planned),
    ]
    notes = [*planned.graph.notes, *planned.notes]
    if notes:
        sections.append(["Notes", *(f"  {note}" for note in notes)])
    return "\n\n".join("\n".join(section) for section in sections if section)


def _heading(planned: JointPlan) -> list[str]:
    cluster, evaluation = planned.cluster, planned.evaluation
    configuration = evaluation.configuration
    workload, spec = configuration.workload, configuration.schedule
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    mesh = configuration.mesh
    shape = f"{mesh.num_devices} devices ({mesh})" if isinstance(mesh, StageMesh) else f"{mesh} devices"
    passes = f"{workload.num_micro_batches} micro-batches of {workload.micro_batch}"
    if workload.num_micro_batches == 1:
        passes = "one micro-batch"
    stages = (
        f"one stage on all {cluster.num_devices} devices: no pipeline"
        if spec.num_workers == 1
        else f"{spec.num_stages} stages on {spec.num_workers} workers of {shape}; {spec.label}"
    )
    return [
        f"{planned.graph.name} on {cluster.name}: {nodes} of {cluster.devices_per_node} x {cluster.device.name}",
        f"  {planned.graph.num_parameters:,} parameters; {workload.precision} precision, {workload.optimizer}",
        f"  {workload.batch} {planned.graph.sample}s per step in {passes}",
        f"  {stages}",
    ]


def _runs(keys: Sequence[object]) -> Iterator[tuple[int, int]]:
    """First and last position of every run of equal keys."""
    first = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[first]:
            yield first, i - 1
            first = i


def _stages(evaluation: Evaluation) -> list[str]:
    """Equal neighbours share a row."""
    choices, figures = evaluation.configuration.stages, evaluation.stages
    rows = [("stage", "units", "first layer", "recompute", "in flight", "forward", "backward", "all-reduce", "memory")]
    keys = [
        (choice.num_units, choice.recompute, round(one.forward_s, 12), round(one.backward_s, 12), one.state_bytes)
        for choice, one in zip(choices, figures)
    ]
    for first, last in _runs(keys):
        one, choice = figures[first], choices[first]
        flights = [max(evaluation.in_flight[s]) for s in range(first, last + 1)]
        workers = [replica.worker for s in range(first, last + 1) for replica in evaluation.schedule.replicas_of(s)]
        fullest = max(evaluation.memory[worker] for worker in workers)
        flight = f"{flights[0]:g}" if flights[0] == flights[-1] else f"{flights[0]:g}-{flights[-1]:g}"
        rows.append(
            (
                format_ranges(range(first, last + 1)),
                str(choice.num_units),
                one.graph.layers[0].name,
                choice.recompute,
                flight,
                format_seconds(one.forward_s),
                format_seconds(one.backward_s + one.recompute_s),
                format_seconds(one.all_reduce_s),
                format_bytes(fullest),
            )
        )
    title = (
        "Stages (forward and backward of one micro-batch with the communication inside; all-reduce and memory per step)"
    )
    return [title, *aligned(rows, right=(1, 4, 5, 6, 7, 8))]


def _layers(evaluation: Evaluation) -> list[str]:
    """Equal layers with equal strategies share a row."""
    groups: dict[tuple[str, Strategy], list[tuple[int, str]]] = {}
    first: dict[tuple[str, Strategy], LayerAssessment] = {}
    for number, stage in enumerate(evaluation.stages):
        for assessed in stage.assessment.layers:
            layer = assessed.layer
            name = f"{layer.block}.*.{layer.role}" if layer.block else layer.name
            key = (name, assessed.strategy)
            groups.setdefault(key, []).append((number, layer.name))
            first.setdefault(key, assessed)
    levels = " | ".join(level.name for level in evaluation.configuration.levels(evaluation.cluster))
    rows = [("layer", "stages", f"(p0,p1,p2) {levels}", "input", "weight", "output")]
    for group, members in groups.items():
        assessed = first[group]
        layouts = assessed.strategy.sbp(assessed.layer)
        sbp = {name: str(layout.without_unit_axes()) if layout else "-" for name, layout in layouts.items()}
        stages = sorted({number for number, _ in members})
        name = members[0][1] if len(members) == 1 else f"{group[0]} x {len(members)}"
        rows.append((name, format_ranges(stages), str(assessed.strategy), sbp["input"], sbp["weight"], sbp["output"]))
    return ["Per layer, over the devices of its stage", *aligned(rows)]


def _totals(planned: JointPlan) -> list[str]:
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
    return ["Per step", *aligned(rows, right=(1, 2))]


def _row(name: str, figures: FamilyFigures, ours: float) -> tuple[str, ...]:
    return (
        name,
        format_seconds(figures.step_s),
        "" if figures.step_s == ours else f"{figures.step_s / ours:.2f}x",
        format_seconds(figures.compute_s),
        format_seconds(figures.communication_s),
        format_seconds(figures.exposed_communication_s),
        format_seconds(figures.bubble_s),
        format_bytes(figures.memory_bytes),
        _gap(figures),
        _description(figures),
    )


def _own(planned: JointPlan) -> FamilyFigures:
    return figures_of(
        _title(planned), planned.evaluation, describe(planned.evaluation), (1 - planned.gap) * planned.evaluation.step_s
    )


def _gap(figures: FamilyFigures) -> str:
    """By how much another plan of the family may be faster."""
    gap = 1 - figures.lower_bound_s / figures.step_s
    return "proven" if gap <= 1e-9 else f"{gap:.1%}"


def _description(figures: FamilyFigures) -> str:
    if figures.paper_step_s is None:
        return figures.description
    return f"{figures.description}; its paper's planner takes {format_seconds(figures.paper_step_s)}"


def _title(planned: JointPlan) -> str:
    pipeline = planned.options.pipeline
    return "AutoDDL" if pipeline == "auto" else f"this plan ({PLANNERS[pipeline]})"


def _compared(planned: JointPlan) -> list[str]:
    ours = planned.evaluation.step_s
    heads = ("plan", "step", "", "compute", "communication", "exposed", "bubble", "memory", "gap", "")
    rows: list[tuple[str, ...]] = [heads]
    rows.append(_row(_title(planned), _own(planned), ours))
    why = []
    for figures in planned.families:
        if figures.infeasible is not None:
            why.append(f"  {figures.name}: infeasible, {figures.infeasible}")
        else:
            rows.append(_row(figures.name, figures, ours))
    return ["Compared with the best of each family", *aligned(rows, right=(1, 2, 3, 4, 5, 6, 7, 8)), *why]


_PARTS = (
    ("compute", "compute_s"),
    ("communication inside stages", "communication_s"),
    ("exposed communication", "exposed_communication_s"),
    ("bubble", "bubble_s"),
)


def _why(planned: JointPlan) -> list[str]:
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


def _count(number: int) -> str:
    """A number of configurations; the large ones by their power of ten."""
    return f"{number:,}" if number < 10**9 else f"{number:.1e}"


def _certificate(planned: JointPlan) -> list[str]:
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
