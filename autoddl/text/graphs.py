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
    """Return a table of the layers, with one row for all repetitions of a layer, and the notes.

    >>> from autoddl.zoo import mlp
    >>> print(graph_text(mlp((256, 1024, 256))))
    mlp:256,1024,256: 524,288 parameters, 0.001049 GFLOPs forward per row
    <BLANKLINE>
      layer  kind    input     output    parameters     GFLOPs  followed by
      fc1    linear  1 x 256   1 x 1024     262,144  0.0005243  relu
      fc2    linear  1 x 1024  1 x 256      262,144  0.0005243  mse_loss
    """
    title = (
        f"{graph.name}: {graph.num_parameters:,} parameters, {graph.flops / 1e9:,.4g} GFLOPs forward per {graph.sample}"
    )
    return Text(([title], [Table.of(_LAYERS, _rows(graph.layers))], notes_section(graph.notes)))


@dataclass
class _LayerRow:
    """A row of the table: the repetitions of a layer in their blocks.

    Attributes:
        name: block and role of the layer (``h.*.mlp.c_fc``), or its name.
        first: the first repetition.
        count: number of repetitions.
    """

    name: str
    first: Layer
    count: int = 0


_LAYERS: tuple[Column[_LayerRow], ...] = (
    Column("layer", lambda row: repeated(row.name, row.count)),
    Column("kind", lambda row: row.first.kind),
    Column("input", lambda row: _shape(row.first.input_shape), rank=1),
    Column("output", lambda row: _shape(row.first.output_shape)),
    Column("parameters", lambda row: _parameters(row.first), right=True),
    Column("GFLOPs", lambda row: f"{row.first.flops / 1e9:,.4g}" if row.first.flops else "", right=True, rank=2),
    Column("followed by", lambda row: ", ".join(row.first.epilogue), wraps=True, rank=3),
)


def _rows(layers: Iterable[Layer]) -> Iterable[_LayerRow]:
    rows: dict[str, _LayerRow] = {}
    for layer in layers:
        name = place(layer)
        rows.setdefault(name, _LayerRow(name, layer)).count += 1
    return rows.values()


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _parameters(layer: Layer) -> str:
    """The number of the layer's own parameters, and the layers whose parameters it shares."""
    owners = sorted({parameter.tied_to for parameter in layer.parameters if parameter.tied_to is not None})
    own = f"{layer.num_parameters:,}" if layer.num_parameters else ""
    return " + ".join(filter(None, [own, *(f"({owner}'s)" for owner in owners)]))
