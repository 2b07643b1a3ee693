"""Embeddings on a rank: a look-up in its part of the table, then a reduce-scatter over p2."""

from __future__ import annotations

from collections.abc import Sequence

from autoddl.costmodel.graph import Parameter

from ..statements import DATA, RANKS, Call, LayerContext, LayerProgram, Name, along, epilogue

__all__ = ["layouts", "program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of a lookup."""
    layer, layout = context.layer, context.layout
    options = {"vocabulary": layer.attributes["vocabulary"], "rows": layer.rows, **context.order}
    body = [
        *context.gathering(("weight",)),
        Call("lookup", (DATA, Name("weight"), layout, RANKS), options, computes=True),
        *(along("reduce_scatter", axis) for axis in reversed(layout.axes(2))),
    ]
    statements = [*context.recomputable(("weight",), body), *epilogue(context)]
    return LayerProgram(("weight",), tuple(statements), (context.fact("", "check_table"),))


def layouts(context: LayerContext, parameters: Sequence[Parameter]) -> Call:
    """Return the call that describes the layout of the table of an embedding."""
    (table,) = parameters
    attributes = context.layer.attributes
    return Call("table_layouts", (table.name, attributes["vocabulary"], attributes["features"], context.layout))
