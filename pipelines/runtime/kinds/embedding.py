"""Embeddings on a rank: a look-up in its part of the table, then a reduce-scatter over p2."""

from __future__ import annotations

from ..statements import DATA, RANKS, Call, LayerContext, LayerProgram, Name, along, epilogue

__all__ = ["program"]


def program(frame: LayerContext) -> LayerProgram:
    layer, layout = frame.layer, frame.layout
    options = {"vocabulary": layer.attributes["vocabulary"], "rows": layer.rows}
    body = [
        Call("lookup", (DATA, Name("weight"), layout, RANKS), options, computes=True),
        *(along("reduce_scatter", axis) for axis in reversed(layout.axes(2))),
    ]
    statements = [*frame.recomputable(("weight",), body), *epilogue(frame)]
    return LayerProgram(("weight",), tuple(statements), (frame.fact("", "check_table"),))
