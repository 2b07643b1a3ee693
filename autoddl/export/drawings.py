"""Writes the annotated layer graph of a plan as GraphML and as Graphviz dot.

networkx writes GraphML. Dot is written here, since networkx needs another package for it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.units import format_bytes, format_seconds

from .annotated import annotated_graph

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["dot_text", "graphml_text"]

#: Characters that are not allowed in XML 1.0.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def graphml_text(plan: PlanFile) -> str:
    """Return the layer graph as GraphML, which yEd, Gephi, Cytoscape and ``networkx.read_graphml`` read.

    >>> import autoddl, networkx
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> list(networkx.parse_graphml(graphml_text(plan)))
    ['fc1', 'fc2']
    """
    import networkx as nx

    graph = annotated_graph(plan)
    graph = nx.relabel_nodes(graph, {name: _xml_text(name) for name in graph})
    tables = [graph.graph]
    tables += [data for _, data in graph.nodes(data=True)]
    tables += [data for _, _, data in graph.edges(data=True)]
    for attributes in tables:
        attributes.update({name: _xml_text(value) for name, value in attributes.items() if isinstance(value, str)})
    buffer = io.BytesIO()
    nx.write_graphml_xml(graph, buffer)
    return buffer.getvalue().decode("utf-8") + "\n"


def dot_text(plan: PlanFile) -> str:
    """Return the layer graph in Graphviz's dot language.

    Each layer is a box with its strategy, layouts and price. If the plan has several stages, each stage is a cluster.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> print(dot_text(plan).splitlines()[0])
    digraph "mlp:256,1024,256" {
    """
    graph = annotated_graph(plan)
    summary = (
        f"{plan.graph.name}: {format_seconds(graph.graph['step_s'])} per step on {graph.graph['num_ranks']} devices"
    )
    lines = [
        f"digraph {_quoted(plan.graph.name)} {{",
        _graph_statement(graph.graph, summary),
        '  node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=10];',
        '  edge [fontname="sans-serif", fontsize=8];',
    ]
    for stage in range(plan.num_stages):
        boxes = [_node_statement(name, data) for name, data in graph.nodes(data=True) if data["stage"] == stage]
        if plan.num_stages > 1:
            boxes = [f"subgraph cluster_{stage} {{", f'  label="stage {stage}";', *(f"  {box}" for box in boxes), "}"]
        lines += [f"  {line}" for line in boxes]
    for source, target, data in graph.edges(data=True):
        options = {**({"label": _edge_label(data)} if data["communication_s"] else {}), **data}
        lines.append(f"  {_quoted(source)} -> {_quoted(target)} [{_options(options)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _graph_statement(attributes: Mapping[str, Any], summary: str) -> str:
    others = {name: value for name, value in attributes.items() if name != "name"}
    return f"  graph [{_options({'label': summary, 'labelloc': 't', **others})}];"


def _node_statement(name: str, data: Mapping[str, Any]) -> str:
    options = {"label": _node_label(name, data), "fillcolor": kind_of(data["kind"]).colour, **data}
    return f"{_quoted(name)} [{_options(options)}];"


def _node_label(name: str, data: Mapping[str, Any]) -> str:
    layouts = f"{_short(data['sbp_input'])} -> {_short(data['sbp_output'])}"
    weight = f"\nweight {_short(data['sbp_weight'])}" if data["sbp_weight"] else ""
    price = f"{format_seconds(data['compute_s'])} + {format_seconds(data['communication_s'])}"
    sent, memory = format_bytes(data["sent_bytes"]), format_bytes(data["memory_bytes"])
    return f"{name} ({data['kind']})\n{data['strategy']}\n{layouts}{weight}\n{price}, {sent} sent, {memory}"


def _short(layout: str) -> str:
    """Return a printed layout without its axes of size 1."""
    levels = layout[1:-1].split(" | ")
    shown = [", ".join(item for item in level.split(", ") if not item.endswith(":1")) for level in levels]
    return f"({' | '.join(filter(None, shown)) or 'whole'})"


def _edge_label(data: Mapping[str, Any]) -> str:
    sent = f", {format_bytes(data['sent_bytes'])}" if "sent_bytes" in data else ""
    return f"{format_seconds(data['communication_s'])}{sent}"


def _options(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_quoted(_value_text(value))}" for name, value in values.items())


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def _quoted(text: str) -> str:
    r"""Return a quoted identifier of dot. Quotes and backslashes are escaped: a backslash begins an escape (``\n``, ``\N``)."""
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    shown = shown.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{shown}"'


def _xml_text(text: str) -> str:
    """Replace characters that XML does not allow."""
    return _NOT_XML.sub("?", text)
