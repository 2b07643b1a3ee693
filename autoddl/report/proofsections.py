"""The sections on the quality and the origin of a plan: baselines, certificate, trust, provenance."""

from __future__ import annotations

from collections.abc import Sequence

from autoddl.costmodel.documents import Fields
from autoddl.costmodel.graph_meshes import EAGER, LEFT_OUT
from autoddl.costmodel.units import format_bytes, format_count, format_seconds

from ..explain import PlanView, RivalFigures
from ..explain.searched import settings_of
from ..explain.view import batch_text
from ..plandocument import EDITED
from .charts import Segment, bar
from .markup import Content, Markup, element
from .sections import Cell, Section, collapsed, facts, nbytes, number, paragraph, scrolling, seconds, swatch, table

__all__ = ["baselines_section", "certificate_section", "provenance_section", "trust_section"]

#: Largest number of rows of the table of settings.
MAX_SETTINGS = 40


def baselines_section(view: PlanView) -> Section | None:
    """Return the section that compares the plan with baselines; None if the plan was not compared with any."""
    if not view.rivals:
        return None
    feasible = [rival for rival in view.rivals if not rival.infeasible]
    best = view.fastest_rival
    if best is None:
        finding = "No baseline fits in memory"
    elif best.step_s >= view.step_s * (1 + 5e-5):
        finding = f"{best.step_s / view.step_s:.2f}x as fast as {best.name}, the best of {len(feasible)} baselines"
    else:
        finding = f"{best.name}, the best of {len(feasible)} baselines, takes {best.step_s / view.step_s:.2f}x the time"
    this_plan = RivalFigures(
        "this plan",
        "",
        step_s=view.step_s,
        communication_s=view.communication_s,
        bubble_s=view.bubble_s,
        memory_bytes=view.memory_bytes,
    )
    shown = (this_plan, *feasible)
    longest = max(rival.step_s for rival in shown)
    rows = [_rival_row(rival, view.step_s, longest) for rival in shown]
    head = ("Plan", "Step", "", "", "Communication", "Memory", "How")
    has_bubbles = any(rival.bubble_s for rival in shown)
    legend = [
        element("li", swatch("work-1"), "computation"),
        element("li", swatch("talk-1"), "communication"),
        element("li", swatch("idle"), "bubble") if has_bubbles else None,
    ]
    content: list[Markup] = [
        element("ul", *legend, class_="legend"),
        scrolling(table(head, rows, numbers=(1, 2, 4, 5)), "baselines"),
    ]
    excluded = [rival for rival in view.rivals if rival.infeasible]
    if excluded:
        items = [
            element("li", element("span", rival.name, class_="strong"), f": {rival.infeasible}") for rival in excluded
        ]
        names = ", ".join(rival.name for rival in excluded[:6]) + (", ..." if len(excluded) > 6 else "")
        content.append(collapsed(f"Infeasible: {names}", element("ul", *items, class_="plain")))
    return Section("baselines", "Baselines", finding, tuple(content))


def _rival_row(rival: RivalFigures, step_s: float, longest: float) -> tuple[Cell, ...]:
    """Return the row of a plan in the table of baselines.

    Args:
        rival: figures of the plan.
        step_s: step time of this page's plan.
        longest: step time that the full width of the bar stands for.
    """
    segments = [
        Segment("computation", max(0.0, rival.step_s - rival.communication_s - rival.bubble_s), "work-1"),
        Segment("communication", rival.communication_s, "talk-1"),
        Segment("bubble", rival.bubble_s, "idle"),
    ]
    picture = bar(segments, longest, f"{rival.name}: {format_seconds(rival.step_s)}", format_seconds, height=12)
    return (
        element("span", rival.name, class_="strong nowrap"),
        seconds(rival.step_s),
        number(f"{rival.step_s / step_s:.2f}x", rival.step_s / step_s) if step_s else "",
        element("div", picture, class_="picture"),
        seconds(rival.communication_s),
        nbytes(rival.memory_bytes),
        element("div", rival.how, class_="how quiet small"),
    )


# ------------------------------------------------------------------------------------------------------------ certificate


def certificate_section(view: PlanView) -> Section:
    """Return the section on the certificate: lower bound, gap, size of the search space."""
    objective = "communication time" if view.objective == "communication" else "step time"
    proof = view.certificate
    if proof is None:
        lead = (
            "The plan was edited after the search. Its figures on this page are computed for the edited plan; the search's bounds, "
            "baselines and trust do not apply to it."
        )
        if view.fields.text("status") != EDITED:
            lead = "The configuration was given and priced; whether others are better was not searched."
        return Section("certificate", "Certificate", view.verdict.capitalize(), (paragraph(lead, class_="lead"),))
    size = format_count(proof.space_size)
    if not proof.space_size:
        size = "not counted"
        finding = f"Not proven: {view.method}'s planner chose this plan; pipeline='auto' searches for the best one"
    elif proof.optimal:
        finding = f"Proven: none of the {size} plans that fit has a smaller {objective}"
    else:
        finding = f"Not proven: the best of {size} plans may be up to {proof.gap:.2%} better"
    content = [
        facts(
            [
                ("Search", f"{view.method}, {format_seconds(proof.search_s)}"),
                (objective[0].upper() + objective[1:], format_seconds(view.cost_s)),
                ("Lower bound", format_seconds(proof.lower_bound_s)),
                ("Space", f"{size} plans" if proof.space_size else size),
                *_excluded_options(view),
            ]
        )
    ]
    if settings := settings_of(view.fields):
        content.append(_settings_table(settings))
    else:
        content += _pipeline_search(view.fields.object("search"), proof.space_size, view.fields.integer("evaluations"))
    return Section("certificate", "Certificate", finding, tuple(content))


def _excluded_options(view: PlanView) -> list[tuple[str, str]]:
    """Return the fact on strategies that the options of the search excluded, if there are any."""
    space = view.strategy_space
    if space is not None and space.executor != EAGER:
        return [("Excluded", f"{LEFT_OUT}; executor={EAGER!r} includes them")]
    return [] if space is None or space.summa else [("Excluded", "Summa meshes; summa=True includes them")]


def _settings_table(settings: Sequence[Fields]) -> Markup:
    """Return the collapsed table of the settings of micro-batch and recomputation that were searched."""
    rows: list[tuple[Cell, ...]] = []
    for entry in settings[:MAX_SETTINGS]:
        cost_s = None if entry.get("cost_s") is None else entry.number("cost_s")
        bound_s = None if entry.get("lower_bound_s") is None else entry.number("lower_bound_s")
        rows.append(
            (
                number(f"{entry.integer('micro_batch'):,}", entry.integer("micro_batch")),
                entry.text("recompute"),
                element("div", entry.text("outcome"), class_="outcome"),
                "" if cost_s is None else seconds(cost_s),
                "no plan fits" if bound_s is None else seconds(bound_s),
            )
        )
    head = ("Micro-batch", "Recomputed", "Outcome", "Cost", "Lower bound")
    num_omitted = len(settings) - len(rows)
    omitted = (
        paragraph(f"{num_omitted} more settings are not shown; the plan document has them.") if num_omitted else None
    )
    return collapsed(
        f"{len(settings)} settings and their outcomes",
        scrolling(table(head, rows, numbers=(3, 4)), "settings"),
        omitted,
    )


def _pipeline_search(search: Fields, num_configurations: int, num_simulated: int) -> list[Markup]:
    """Return the description and the counts of the search for a pipeline."""
    counts = [
        ("Settings of mesh, schedule, micro-batch", "settings"),
        ("Ruled out by memory", "ruled_out_by_memory"),
        ("Ruled out by the bound", "ruled_out_by_bound"),
        ("Stage searches", "stage_searches"),
    ]
    rows = [("Configurations", f"{num_configurations:,}")]
    rows += [(title, f"{search.integer(name):,}") for title, name in counts]
    rows.append(("Simulated", f"{num_simulated:,}"))
    return [paragraph(f"Space: {search.text('space')}", class_="lead"), facts(rows)]


# ------------------------------------------------------------------------------------------------------------ trust


def trust_section(view: PlanView) -> Section:
    """Return the section on the probability that the plan is the best one, given the uncertainty of the calibration."""
    calibration = view.plan.cluster.calibration
    if view.fields.get("trust") is None:
        if not view.plan.is_claimed:
            finding = view.verdict.capitalize()
            text = "Plan again to learn how probable it is that this plan is the best one."
        elif calibration is None:
            finding = f"{view.plan.cluster.name} is not calibrated: the uncertainty of its figures is unknown"
            text = (
                "Calibrate the cluster (autoddl calibrate) to learn how probable it is that this plan is the best one."
            )
        else:
            finding = "The cluster is calibrated, but the uncertainty of this plan was not computed"
            text = f"Calibrated {calibration.date[:10]} on {calibration.machine}, {calibration.num_samples:,} samples."
        return Section("trust", "Trust", finding, (paragraph(text, class_="lead"),))
    trust = view.fields.object("trust")
    probability = trust.number("probability")
    rivals = [(rival.text("name"), rival.number("probability")) for rival in trust.objects("rivals")]
    regret = trust.number("expected_regret")
    finding = f"This plan is the best with probability {probability:.0%}; its expected regret is {regret:.2%}"
    rows: list[tuple[Cell, ...]] = []
    for name, chance in [("this plan", probability), *(rival for rival in rivals if rival[1] > 0)]:
        style = "talk-1" if name == "this plan" else "work-2"
        picture = bar([Segment(name, chance, style)], 1.0, f"{name}: {chance:.0%}", "{:.1%}".format, height=12)
        rows.append((name, element("div", picture, class_="picture"), number(f"{chance:.0%}", chance)))
    content = [
        paragraph(
            f"{trust.integer('draws'):,} draws of the cluster's parameters, within the uncertainty of the measurements of "
            f"{trust.text('calibrated')[:10]}; {len(rivals) + 1} plans.",
            class_="lead",
        ),
        scrolling(table(("Best plan", "", "Probability"), rows, numbers=(2,)), "rivals"),
    ]
    if trust.get("measurement") is not None:
        content.append(_measurement(trust.object("measurement")))
    return Section("trust", "Trust", finding, (*content, *_notes(trust.texts("notes"))))


def _measurement(best: Fields) -> Markup:
    """Return the advice on the measurement that would tell the plan and a rival apart best."""
    return paragraph(
        f"To compare this plan with {best.text('rival')} more reliably, measure {best.text('collective')} on "
        f"{best.text('level')} with {best.integer('ranks')} ranks and {format_bytes(best.number('bytes'))}: "
        f"{best.number('share'):.0%} of the uncertainty."
    )


def _notes(notes: tuple[str, ...]) -> list[Markup]:
    return [element("ul", *(element("li", note) for note in notes), class_="plain")] if notes else []


# ------------------------------------------------------------------------------------------------------------ provenance


def provenance_section(view: PlanView) -> Section:
    """Return the section on what the plan was made for: model, workload, cluster, and their hashes."""
    plan = view.plan
    workload, cluster, device = plan.workload, plan.cluster, plan.cluster.device
    rows: list[tuple[str, Content]] = [
        ("Parameters", f"{plan.graph.num_parameters:,}"),
        ("Layers", f"{len(plan.graph.layers):,}"),
        ("Batch", batch_text(plan.graph, workload.batch)),
        ("Micro-batch", f"{workload.micro_batch:,}, {workload.num_micro_batches:,} per step"),
        ("Precision, optimizer", f"{workload.precision}, {workload.optimizer}"),
        ("Recomputation", view.recomputation),
        ("Executor", view.plan.executor),
        ("Device", f"{device.name}, {format_bytes(device.memory_bytes)}"),
        ("Peak", f"{device.peak(workload.precision) / 1e12:,.4g} TFLOP/s, {device.efficiency:.0%} reached"),
        ("Memory bandwidth", f"{device.memory_bandwidth / 1e9:,.4g} GB/s"),
    ]
    for level in cluster.levels:
        link = f"{format_seconds(level.link.latency_s)}, {level.link.bandwidth / 1e9:,.4g} GB/s per device"
        rows.append((f"{level.name[0].upper()}{level.name[1:]} x {level.size}", link))
    hashes = [
        (name, element("code", view.fields.text(field)))
        for name, field in (("Graph", "graph_hash"), ("Cluster", "cluster_hash"), ("Options", "options_hash"))
    ]
    notes = [note for note in view.notes if note]
    return Section(
        "provenance",
        "Workload and cluster",
        f"{batch_text(plan.graph, workload.batch)} on {view.plan.cluster.name}",
        (facts(rows), *_notes(tuple(notes)), facts(hashes)),
    )
