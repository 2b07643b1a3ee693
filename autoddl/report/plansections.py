"""The sections on the plan itself: time, layers and strategies, memory, alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoddl.costmodel.units import format_bytes, format_seconds

from ..explain import Alternative, Choice, DeviceMemory, Explanation, LayerGroup, PlanView, StageGroup
from ..text.explanation import memory_sentence, regret_text, saving_sentence, why_text
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

#: Largest number of rows of a layer graph on the page.
MAX_ROWS = 300


# ------------------------------------------------------------------------------------------------------------ time


def time_section(explained: Explanation) -> Section:
    """Return the section on the time of a step, by the resources that limit it."""
    view = explained.view
    segments = segments_of(view.parts)
    kinds = {part.name: part.kind for part in view.parts}
    sums = {kind: sum(p.seconds for p in view.parts if p.kind == kind) for kind in ("compute", "communication", "idle")}
    total = sum(sums.values())
    words = {"compute": "computation", "communication": "communication", "idle": "waiting in the pipeline"}
    shares = [f"{sums[kind] / total:.0%} {words[kind]}" for kind in sums if total and sums[kind] / total >= 0.005]
    if len(shares) > 1:
        finding = f"The step is {', '.join(shares[:-1])} and {shares[-1]}"
    else:
        finding = f"The step is {shares[0] if shares else 'empty'}"
    rows: list[tuple[Cell, ...]] = []
    for segment in segments:
        saves = "" if kinds[segment.name] == "idle" else seconds(segment.value / 2)
        share = number(f"{segment.value / total:.1%}", segment.value / total) if total else ""
        rows.append((join(swatch(segment.style), segment.name), seconds(segment.value), share, saves))
    note = (
        f"The time of worker {view.evaluation.busiest}, the busiest one: work inside its stages, and waiting."
        if view.has_pipeline
        else "The time of each operation is limited by one resource, so these parts add up to the step."
    )
    return Section(
        "time",
        "Where the time goes",
        finding,
        (
            element("div", bar(segments, total, "parts of the step", format_seconds, height=28), class_="breakdown"),
            scrolling(
                table(("Bound by", "Time", "Share", "2x faster saves"), rows, numbers=(1, 2, 3), class_="named"),
                "time by resource",
            ),
            paragraph(
                note,
                " Savings are for the same strategies; a new plan for a faster resource may save more.",
                class_="lead small",
            ),
        ),
    )


# ------------------------------------------------------------------------------------------------------------ layers


def graph_section(view: PlanView) -> Section:
    """Return the section on the layer graph and its strategies."""
    seconds_at: dict[str, float] = {}
    for stage_group in view.stage_groups:
        for group in stage_group.layers:
            strategy = str(group.strategy)
            seconds_at[strategy] = seconds_at.get(strategy, 0.0) + group.seconds * len(stage_group.stages)
    total = sum(seconds_at.values())
    main_strategy = max(seconds_at, key=seconds_at.__getitem__)
    if len(seconds_at) == 1:
        finding = f"Every layer has the strategy {main_strategy}"
    else:
        share = seconds_at[main_strategy] / total if total else 0
        finding = f"{share:.0%} of the layers' time is spent in layers with the strategy {main_strategy}"
    levels = view.evaluation.configuration.levels(view.plan.cluster)
    content = [
        paragraph(
            f"Strategy {meaning(levels)}. Equal layers of repeated blocks share a row; times and bytes are sums over "
            "them, per device and step. Lines are tensors.",
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
        content.append(_collapsible(stage_group.title, step_s, _graph(view, stage_group, longest), is_open=not place))
    return Section("layers", "Layers and strategies", finding, tuple(content))


def _collapsible(title: str, figure: str, content: Markup, is_open: bool) -> Markup:
    """Return the content under a title that collapses it; without a title (a plan of one stage), the content alone."""
    if not title:
        return content
    heading = join(element("h3", title[0].upper() + title[1:]), element("span", figure, class_="quiet small"))
    return collapsed(heading, content, is_open=is_open)


def _graph(view: PlanView, stage_group: StageGroup, longest: float) -> Markup:
    """Return the table of the layers of a stage, with the edges of the layer graph beside it."""
    groups = stage_group.layers[:MAX_ROWS]
    row_of = {name: row for row, group in enumerate(groups) for name in group.layers}
    edges = [
        (row_of[source], row_of[target])
        for source, target in view.plan.graph.edges
        if source in row_of and target in row_of
    ]
    gutters, num_lanes = graph_gutters(len(groups), edges)
    rows: list[Markup] = []
    block = ""
    for group, gutter in zip(groups, gutters):
        first = view.plan.graph[group.layers[0]]
        if first.block != block and first.block:
            layers = [view.plan.graph[name] for other in groups for name in other.layers]
            num_repetitions = len({layer.block_index for layer in layers if layer.block == first.block})
            rows.append(_block_row(f"{first.block}: block repeated {num_repetitions} times"))
        elif block and not first.block:
            rows.append(_block_row(f"after {block}"))
        block = first.block
        rows.append(_graph_row(group, first.kind, block, gutter, longest))
    num_omitted = len(stage_group.layers) - len(groups)
    head = ("", "Layer", "Strategy", "Layouts", "Time", "")
    layer_table = element(
        "table",
        element("thead", element("tr", *(element("th", name, scope="col") for name in head))),
        element("tbody", *rows),
        class_="graph sortable",
        style=f"--gutter:{gutter_width(num_lanes):g}px",
    )
    omitted = paragraph(f"{num_omitted} more rows are not shown; the plan document has them.") if num_omitted else None
    return join(scrolling(layer_table, "layer graph"), omitted)


def _block_row(text: str) -> Markup:
    """Return a row that separates blocks."""
    return element("tr", element("td", text, colspan="6"), class_="block")


def _graph_row(group: LayerGroup, kind: str, block: str, gutter: Markup, longest: float) -> Markup:
    """Return the row of a group of equal layers; ``longest`` seconds are the full width of its bar."""
    name = group.name.replace(f"{block}.*.", "", 1) if block else group.name
    count = f" x {len(group.layers)}" if len(group.layers) > 1 else ""
    segments = [
        Segment("computation", group.compute_s, "work-1"),
        Segment("communication", group.communication_s, "talk-1"),
    ]
    label = f"{group.name}: {format_seconds(group.compute_s)} computation, {format_seconds(group.communication_s)} communication"
    lines = [
        element("div", element("span", word, class_="which"), group.sbp[tensor], class_="nowrap")
        for tensor, word in (("input", "in"), ("parameter", "weight"), ("state", "states"), ("output", "out"))
        if group.sbp[tensor] and (tensor != "state" or group.strategy.zero)
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
        cell(_with_picture(bar(segments, longest, label, format_seconds, height=10), group.seconds), class_="time"),
        cell(seconds(group.seconds), class_="num total"),
    )


def _with_picture(picture: Markup, value: float) -> Quantity:
    """Return a time that is shown as a picture."""
    return replace(seconds(value), shown=picture)


# ------------------------------------------------------------------------------------------------------------ memory

#: Uses of memory and their style classes.
_MEMORY = (
    ("parameters", "work-1"),
    ("gradients", "work-2"),
    ("optimizer", "work-3"),
    ("activations", "talk-1"),
    ("buffer", "talk-3"),
)


def memory_section(explained: Explanation) -> Section:
    """Return the section on the memory of the devices, by use."""
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
                f"The line marks the limit; the full width of a bar is the device's {format_bytes(capacity)}. ",
                memory_sentence(explained)[0].upper() + memory_sentence(explained)[1:] + ".",
                class_="lead small",
            ),
            *(
                paragraph(f"Against the same plan without it: {saving_sentence(saving, view)}.", class_="lead small")
                for saving in view.savings
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
    """Return the section on the costs of other strategies; None if no layer has alternatives."""
    view = explained.view
    choices = [choice for section in explained.sections for choice in section.choices if choice.alternatives]
    if not choices:
        return None
    better = [choice.name for choice in choices if choice.alternatives[0].regret_s < 0]
    content: list[Markup] = [paragraph(explained.scope[0].upper() + explained.scope[1:] + ".", class_="lead")]
    if better:
        content.append(
            paragraph(f"The plan is not optimal: better strategies exist for {', '.join(better[:6])}.", class_="why")
        )
    for place, section in enumerate(explained.sections):
        bodies = [element("tbody", *_choice_rows(choice, view.cost_s)) for choice in section.choices]
        head = ("Layer", "Strategy", "Regret", "", "What it spends more on")
        headings = [
            element("th", name, scope="col", class_="num" if i in (2, 3) else None) for i, name in enumerate(head)
        ]
        choice_table = element("table", element("thead", element("tr", *headings)), *bodies, class_="choices sortable")
        count = f"{len(section.choices)} choices"
        content.append(_collapsible(section.title, count, scrolling(choice_table, "alternatives"), is_open=not place))
    return Section(
        "alternatives", "What other choices cost", _alternatives_finding(choices, view.cost_s), tuple(content)
    )


def _alternatives_finding(choices: Sequence[Choice], cost_s: float) -> str:
    """Return the heading of the section on alternatives: the most important regret of a nearest alternative."""

    def regret_of(choice: Choice) -> str:
        regret = abs(choice.alternatives[0].regret_s)
        return format_seconds(regret) + (f" ({regret / cost_s:.2%})" if cost_s else "")

    nearest = sorted(choices, key=lambda choice: choice.alternatives[0].regret_s)
    if nearest[0].alternatives[0].regret_s < 0:
        return f"The plan can be improved: another strategy for {nearest[0].name} saves {regret_of(nearest[0])}"
    if nearest[-1].alternatives[0].regret_s > 0:
        costliest = nearest[-1]
        return f"The choice that matters most is {costliest.name}: the next best strategy costs {regret_of(costliest)}"
    return "Every choice has an alternative that is as good"


def _choice_rows(choice: Choice, cost_s: float) -> list[Markup]:
    """Return the rows of a choice: the chosen strategy, then its alternatives."""
    rows = [
        element(
            "tr",
            element("td", choice.label, class_="strong nowrap"),
            element("td", str(choice.strategy), class_="code nowrap"),
            cell(_chosen_cell(choice), class_="num quiet"),
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
                element("td", "no other strategy is possible", class_="quiet", colspan="4"),
                class_="other",
            )
        )
    return rows


def _chosen_cell(choice: Choice) -> Cell:
    """Return the cell in the column of regrets for the chosen strategy; it is sorted by the regret of the nearest alternative."""
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
