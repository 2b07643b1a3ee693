"""Writes the page: head, title, key figures, navigation and sections."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from importlib.metadata import PackageNotFoundError, version

from autoddl.costmodel.units import format_bytes, format_seconds

from ..explain import Explanation, PlanView
from .markup import Markup, element
from .pipelinesection import pipeline_section
from .plansections import alternatives_section, graph_section, memory_section, time_section
from .proofsections import baselines_section, certificate_section, provenance_section, trust_section
from .sections import Section

__all__ = ["report_page"]

#: Content-Security-Policy of the page, without the digest of its script: nothing is fetched, and no other script runs, whatever
#: texts a plan contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{}'"


def report_page(explained: Explanation) -> str:
    """Return the page of a plan as HTML.

    Args:
        explained: the explanation of the plan, from ``autoddl.explain.explain``.

    Raises:
        UserError: the plan's document lacks a field that only the report reads, or the field is malformed.
    """
    view = explained.view
    sections = [
        baselines_section(view),
        time_section(explained),
        graph_section(view),
        pipeline_section(view) if view.has_pipeline else None,
        memory_section(explained),
        alternatives_section(explained),
        certificate_section(view),
        trust_section(view),
        provenance_section(view),
    ]
    present = [section for section in sections if section is not None]
    script = Markup("\n" + _packaged_text("sort.js"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY.format(_digest(script))),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{view.model}: plan report"),
        element("link", rel="icon", href="data:,"),
        element("style", Markup("\n" + _packaged_text("style.css"))),
    )
    body = element(
        "body",
        _header(view, present),
        element("main", *map(_section_element, present)),
        element(
            "footer",
            element("p", f"Made by autoddl {_version()} from a plan document; times and bytes are predictions."),
        ),
        element("script", script),
    )
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _packaged_text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """Return the SHA-256 digest of a script, as a Content-Security-Policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _version() -> str:
    try:
        return version("autoddl")
    except PackageNotFoundError:
        return ""


def _section_element(section: Section) -> Markup:
    return element(
        "section",
        element("p", section.topic, class_="kicker"),
        element("h2", section.finding, id=f"{section.anchor}-title"),
        *section.content,
        id=section.anchor,
        aria_labelledby=f"{section.anchor}-title",
    )


def _header(view: PlanView, sections: list[Section]) -> Markup:
    cluster = view.plan.cluster
    devices = "1 device" if cluster.num_devices == 1 else f"{cluster.num_devices:,} devices"
    links = [element("li", element("a", section.topic, href=f"#{section.anchor}")) for section in sections]
    return element(
        "header",
        element("p", "AutoDDL plan", class_="eyebrow"),
        element("h1", f"{view.model} trains a step in {format_seconds(view.step_s)} on {devices}"),
        element("p", view.heading, class_="lead"),
        element("dl", *_figures(view), class_="figures"),
        element("nav", element("ul", *links), aria_label="Sections"),
    )


def _certificate_figure(view: PlanView) -> tuple[str, str]:
    """Return the figure for the certificate, and its note."""
    proof = view.certificate
    if proof is None:
        return ("none", view.verdict.partition(": ")[2])
    return ("optimal", "proven") if proof.optimal else (f"{proof.gap:.2%}", "gap at most")


def _figures(view: PlanView) -> list[Markup]:
    """Return the key figures below the title."""
    sample = view.plan.graph.sample
    share = view.communication_s / view.step_s if view.step_s else 0.0
    rival = view.fastest_rival
    figures = [
        ("Step", format_seconds(view.step_s), f"{view.plan.workload.batch:,} {sample}s"),
        ("Throughput", f"{view.rate:,.3g} /s" if view.rate < 100 else f"{view.rate:,.0f} /s", f"{sample}s"),
        ("Of peak FLOP/s", f"{view.utilisation:.0%}", "used"),
        ("Communication", f"{share:.1%}", f"{format_seconds(view.communication_s)} of the step"),
        ("Memory", format_bytes(view.memory_bytes), f"of {format_bytes(view.memory_limit_bytes)} per device"),
        ("Certificate", *_certificate_figure(view)),
    ]
    if rival is not None and view.step_s:
        ratio = rival.step_s / view.step_s
        figures.append(("Best rival", f"{ratio:.2f}x", f"the time: {rival.name}"))
    return [
        element(
            "div",
            element("dt", name),
            element("dd", element("div", value, class_="value"), element("div", note or None, class_="note")),
        )
        for name, value, note in figures
    ]
