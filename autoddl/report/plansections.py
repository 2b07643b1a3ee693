"""The sections on the plan itself: time, layers, memory, alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoddl.costmodel.units import format_bytes, format_seconds

from ..explain import Alternative, Choice, DeviceMemory, Explanation, LayerGroup, PlanView, StageGroup
from ..text.explanation import memory_sentence, regret_text, why_text
from ..text.layers import meaning
from .charts import Segment, bar, graph_gutters, gutter_width
from .markup import Markup, element, join
from .sections import (
    Cell,
    Quantity,
    Section,
    cell,
    collapsed,
    nbytes,
    number,
    paragraph,
    scrolling,
    seconds,
    segments_of,
    swatch,
    table,
)

__all__ = ["alternatives_section", "graph_section", "memory_section", "time_section"]

#: Rows of one layer graph; more are only in the plan itself.
MAX_ROWS = 300


# ------------------------------------------------------------------------------------------------------------ time


def time_section(explained: Explanation) -> Section:
    """Where the time of a step goes."""
    view = explained.view
    segments = segments_of(view.parts)
    kinds = {part.name: part.kind for part in view.parts}
    sums = {kind: sum(p.seconds for p in view.parts if p.kind == kind) for kind in ("compute", "communication", "idle")}
    whole = sum(sums.values())
    words = {"compute": "computation", "communication": "communication", "idle": "waiting in the pipeline"}
    named = [f"{sums[k] / whole:.0%} {words[k]}" for k in sums if whole and sums[k] / whole >= 0.005]
    finding = (
        "The step is " + (", ".join(named[:-1]) + " and " if len(named) > 1 else "") + (named[-1] if named else "empty")
    )
    rows: list[tuple[Cell, ...]] = []
    for segment in segments:
        saves = "" if kinds[segment.name] == "idle" else seconds(segment.value / 2)
        share = number(f"{segment.value / whole:.1%}", segment.value / whole) if whole else ""
        rows.append((join(swatch(segment.style), segment.name), seconds(segment.value), share, saves))
    note = (
        f"Of worker {view.evaluation.busiest}, the busiest: its work inside its stages, and what it waits for."
        if view.has_pipeline
        else "Every price is bound by one resource, so the step divides exactly into these parts."
    )
    return Section(
        "time",
        "Where the time goes",
        finding,
        (
            element("div", bar(segments, whole, "parts of the step", format_seconds, height=28), class_="breakdown"),
            scrolling(
                table(("Bound by", "Time", "Share", "2x faster saves"), rows, numbers=(1, 2, 3), class_="named"),
                "time by resource",
            ),
            paragraph(
                note,
                " What a faster resource saves holds for these strategies; a new plan may save more.",
                class_="lead small",
            ),
        ),
    )


# ------------------------------------------------------------------------------------------------------------ layers


def graph_section(view: PlanView) -> Section:
    """The layer graph with the strategies."""
    spent: dict[str, float] = {}
    for stage_group in view.stage_groups:
        for group in stage_group.layers:
            spent[str(group.strategy)] = spent.get(str(group.strategy), 0.0) + group.seconds * len(stage_group.stages)
    whole = sum(spent.values())
    commonest = max(spent, key=spent.__getitem__)
    if len(spent) == 1:
        finding = f"Every layer is spread as {commonest}"
    else:
        finding = f"{spent[commonest] / whole if whole else 0:.0%} of the layers' time is spent at {commonest}"
    levels = view.evaluation.configuration.levels(view.plan.cluster)
    content = [
        paragraph(
            f"Strategy {meaning(levels)}. Equal layers of repeated blocks share a row; times and bytes are those "
            "of all of them, for each device and step. Lines are tensors.",
            class_="lead",
        ),
        element(
            "ul",
            element("li", swatch("work-1"), "computation"),
            element("li", swatch("talk-1"), "communication"),
            class_="legend",
        ),
    ]
    longest = max((group.seconds for stage_group in view.stage_groups for group in stage_group.layers), default=0.0)
    for place, stage_group in enumerate(view.stage_groups):
        step_s = format_seconds(sum(group.seconds for group in stage_group.layers))
        content.append(_titled(stage_group.title, step_s, _graph(view, stage_group, longest), is_open=not place))
    return Section("layers", "Layers and strategies", finding, tuple(content))


def _titled(title: str, figure: str, content: Markup, is_open: bool) -> Markup:
    """The table of equal stages under their title; where there is one stage the table alone."""
    if not title:
        return content
    heading = join(element("h3", title[0].upper() + title[1:]), element("span", figure, class_="quiet small"))
    return collapsed(heading, content, is_open=is_open)


def _graph(view: PlanView, stage_group: StageGroup, longest: float) -> Markup:
    groups = stage_group.layers[:MAX_ROWS]
    row_of = {name: row for row, group in enumerate(groups) for name in group.layers}
    edges = [(row_of[a], row_of[b]) for a, b in view.plan.graph.edges if a in row_of and b in row_of]
    gutters, lanes = graph_gutters(len(groups), edges)
    rows: list[Markup] = []
    block = ""
    for group, gutter in zip(groups, gutters):
        first = view.plan.graph[group.layers[0]]
        if first.block != block and first.block:
            times = len(
                {
                    view.plan.graph[name].block_index
                    for g in groups
                    for name in g.layers
                    if view.plan.graph[name].block == first.block
                }
            )
            rows.append(
                element(
                    "tr", element("td", f"{first.block}: block repeated {times} times", colspan="6"), class_="block"
                )
            )
        elif block and not first.block:
            rows.append(element("tr", element("td", f"after {block}", colspan="6"), class_="block"))
        block = first.block
        rows.append(_graph_row(group, first.kind, block, gutter, longest))
    left = len(stage_group.layers) - len(groups)
    head = ("", "Layer", "Strategy", "Layouts", "Time", "")
    built = element(
        "table",
        element("thead", element("tr", *(element("th", name, scope="col") for name in head))),
        element("tbody", *rows),
        class_="graph sortable",
        style=f"--gutter:{gutter_width(lanes):g}px",
    )
    return join(scrolling(built, "layer graph"), paragraph(f"{left} more rows stand in the plan.") if left else None)


def _graph_row(group: LayerGroup, kind: str, block: str, gutter: Markup, longest: float) -> Markup:
    name = group.name.replace(f"{block}.*.", "", 1) if block else group.name
    count = f" x {len(group.layers)}" if len(group.layers) > 1 else ""
    segments = [
        Segment("computation", group.compute_s, "work-1"),
        Segment("communication", group.communication_s, "talk-1"),
    ]
    label = f"{group.name}: {format_seconds(group.compute_s)} computation, {format_seconds(group.communication_s)} communication"
    lines = [
        element("div", element("span", word, class_="which"), group.sbp[what], class_="nowrap")
        for what, word in (("input", "in"), ("weight", "weight"), ("output", "out"))
        if group.sbp[what]
    ]
    return element(
        "tr",
        element("td", gutter, element("span", class_="node"), class_="gutter"),
        element(
            "td",
            element("span", group.name.removesuffix(name) or None, class_="of"),
            name,
            element("span", f"{kind}{count}", class_="kind"),
            class_="layer",
        ),
        element("td", str(group.strategy), class_="strategy code nowrap"),
        element("td", *lines, class_="detail code quiet small"),
        cell(_drawn(bar(segments, longest, label, format_seconds, height=10), group.seconds), class_="time"),
        cell(seconds(group.seconds), class_="num total"),
    )


def _drawn(picture: Markup, value: float) -> Quantity:
    """A picture of a time."""
    return replace(seconds(value), shown=picture)


# ------------------------------------------------------------------------------------------------------------ memory

_MEMORY = (
    ("parameters", "work-1"),
    ("gradients", "work-2"),
    ("optimizer", "work-3"),
    ("activations", "talk-1"),
    ("buffer", "talk-3"),
)


def memory_section(explained: Explanation) -> Section:
    """What fills the devices."""
    view = explained.view
    limit, fullest = view.memory_limit_bytes, max(view.memory, key=lambda memory: memory.total)
    capacity = max(view.plan.cluster.device.memory_bytes, limit, fullest.total)
    largest = max((name for name, _ in _MEMORY), key=lambda name: getattr(fullest, name))
    finding = (
        f"{format_bytes(view.memory_bytes)} of {format_bytes(limit)} are in use, "
        f"{getattr(fullest, largest) / fullest.total if fullest.total else 0:.0%} of it {largest}"
    )
    bars = []
    for memory in view.memory:
        segments = [Segment(name, getattr(memory, name), style) for name, style in _MEMORY]
        devices = "1 device" if memory.num_devices == 1 else f"{memory.num_devices} devices"
        title = f"{memory.title} ({devices}): {format_bytes(memory.total)}"
        bars.append(
            element(
                "div",
                paragraph(title, class_="kicker"),
                bar(segments, capacity, title, format_bytes, marks=(("limit", limit),)),
                class_="breakdown",
            )
        )
    return Section(
        "memory",
        "Memory per device",
        finding,
        (
            *bars,
            scrolling(_memory_table(view.memory, limit), "memory by use"),
            paragraph(
                f"The line marks the limit; the bar's end is the device's {format_bytes(capacity)}. ",
                memory_sentence(explained)[0].upper() + memory_sentence(explained)[1:] + ".",
                class_="lead small",
            ),
        ),
    )


def _memory_table(memory: Sequence[DeviceMemory], limit: float) -> Markup:
    head = ("Devices", *(name for name, _ in _MEMORY), "total", "left of the limit")
    rows: list[tuple[Cell, ...]] = [
        (
            f"{row.title} ({row.num_devices})",
            *(nbytes(getattr(row, name)) for name, _ in _MEMORY),
            replace(nbytes(row.total), shown=element("span", format_bytes(row.total), class_="strong")),
            nbytes(limit - row.total),
        )
        for row in memory
    ]
    labelled = [head[0], *(join(swatch(style), name) for name, style in _MEMORY), *head[-2:]]
    return table(labelled, rows, numbers=range(1, len(head)), class_="named")


# ------------------------------------------------------------------------------------------------------------ alternatives


def alternatives_section(explained: Explanation) -> Section | None:
    """What every other choice would cost."""
    view = explained.view
    choices = [choice for section in explained.sections for choice in section.choices if choice.alternatives]
    if not choices:
        return None
    better = [choice.name for choice in choices if choice.alternatives[0].regret_s < 0]
    content: list[Markup] = [paragraph(explained.scope[0].upper() + explained.scope[1:] + ".", class_="lead")]
    if better:
        content.append(
            paragraph(f"Better than the plan, which is not optimal in this: {', '.join(better[:6])}.", class_="why")
        )
    for place, section in enumerate(explained.sections):
        bodies = [element("tbody", *_choice_rows(choice, view.cost_s)) for choice in section.choices]
        head = ("Layer", "Strategy", "Regret", "", "What it spends more on")
        built = element(
            "table",
            element(
                "thead",
                element(
                    "tr",
                    *(
                        element("th", name, scope="col", class_="num" if i in (2, 3) else None)
                        for i, name in enumerate(head)
                    ),
                ),
            ),
            *bodies,
            class_="choices sortable",
        )
        count = f"{len(section.choices)} choices"
        content.append(_titled(section.title, count, scrolling(built, "alternatives"), is_open=not place))
    return Section("alternatives", "What other choices cost", _worth(choices, view.cost_s), tuple(content))


def _worth(choices: Sequence[Choice], cost_s: float) -> str:
    """What the nearest alternatives say of the plan."""

    def said(choice: Choice) -> str:
        regret = abs(choice.alternatives[0].regret_s)
        return format_seconds(regret) + (f" ({regret / cost_s:.2%})" if cost_s else "")

    nearest = sorted(choices, key=lambda choice: choice.alternatives[0].regret_s)
    if nearest[0].alternatives[0].regret_s < 0:
        return f"The plan can be improved: another strategy for {nearest[0].name} saves {said(nearest[0])}"
    if nearest[-1].alternatives[0].regret_s > 0:
        dearest = nearest[-1]
        return f"The choice that matters most is {dearest.name}: the next best strategy costs {said(dearest)}"
    return "Every choice has an alternative that is as good"


def _choice_rows(choice: Choice, cost_s: float) -> list[Markup]:
    rows = [
        element(
            "tr",
            element("td", choice.label, class_="strong nowrap"),
            element("td", str(choice.strategy), class_="code nowrap"),
            cell(_nearest(choice), class_="num quiet"),
            element("td", ""),
            element(
                "td",
                f"{format_seconds(choice.seconds)}, mostly {choice.limit}" if choice.limit else "takes no time",
                class_="quiet",
            ),
            class_="chosen",
        )
    ]
    rows += [_alternative_row(alternative, cost_s) for alternative in choice.alternatives]
    if choice.num_options == 1:
        rows.append(
            element(
                "tr",
                element("td", ""),
                element("td", "no other strategy divides it", class_="quiet", colspan="4"),
                class_="other",
            )
        )
    return rows


def _nearest(choice: Choice) -> Cell:
    """Of the chosen strategy; what it is sorted by is the regret of its nearest alternative."""
    if not choice.alternatives:
        return "chosen"
    regret_s = choice.alternatives[0].regret_s
    return Quantity("chosen", regret_s, f"regret of the nearest alternative: {regret_s:.9g} s")


def _alternative_row(alternative: Alternative, cost_s: float) -> Markup:
    regret, relative = regret_text(alternative, cost_s)
    return element(
        "tr",
        element("td", ""),
        element("td", str(alternative.strategy), class_="code nowrap"),
        cell(replace(seconds(alternative.regret_s), shown=regret), class_="num"),
        element("td", relative, class_="num"),
        element("td", why_text(alternative), class_="quiet small"),
        class_="other",
    )
