"""A layer graph as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoddl.costmodel.graph import Layer, LayerGraph

from .layers import place, repeated
from .plans import notes_section
from .tables import Column, Table, Text

__all__ = ["graph_text"]


def graph_text(graph: LayerGraph) -> Text:
    """The layers, equal ones of repeated blocks once, and the notes."""
    title = (
        f"{graph.name}: {graph.num_parameters:,} parameters, {graph.flops / 1e9:,.4g} GFLOPs forward per {graph.sample}"
    )
    return Text(([title], [Table.of(_LAYERS, _grouped(graph.layers))], notes_section(graph.notes)))


@dataclass
class _Group:
    """Layers of one place in their blocks: the first of them, and how many they are."""

    name: str
    first: Layer
    count: int = 0


_LAYERS: tuple[Column[_Group], ...] = (
    Column("layer", lambda group: repeated(group.name, group.count)),
    Column("kind", lambda group: group.first.kind),
    Column("input", lambda group: _shape(group.first.input_shape), rank=1),
    Column("output", lambda group: _shape(group.first.output_shape)),
    Column("parameters", lambda group: _parameters(group.first), right=True),
    Column("GFLOPs", lambda group: f"{group.first.flops / 1e9:,.4g}" if group.first.flops else "", right=True, rank=2),
    Column("followed by", lambda group: ", ".join(group.first.epilogue), wraps=True, rank=3),
)


def _grouped(layers: Iterable[Layer]) -> Iterable[_Group]:
    groups: dict[str, _Group] = {}
    for layer in layers:
        name = place(layer)
        groups.setdefault(name, _Group(name, layer)).count += 1
    return groups.values()


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _parameters(layer: Layer) -> str:
    """Their number, and whose they are where they are another layer's."""
    ties = sorted({parameter.tied_to for parameter in layer.parameters if parameter.tied_to is not None})
    own = f"{layer.num_parameters:,}" if layer.num_parameters else ""
    return " + ".join(filter(None, [own, *(f"({tie}'s)" for tie in ties)]))
