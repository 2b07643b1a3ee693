"""``autoddl extract``: the layer graph of an unmodified OneFlow model."""

from __future__ import annotations

import argparse
import json

from autoddl.costmodel.graph import Layer, LayerGraph

from ..tables import aligned

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "extract", help="make a layer graph of a OneFlow model (needs OneFlow)", description=__doc__
    )
    parser.add_argument(
        "model",
        metavar="FILE.py:FUNCTION",
        help="FUNCTION, called without arguments, returns a oneflow.nn.Module and its example inputs, the batch in front",
    )
    parser.add_argument("-o", "--output", metavar="GRAPH.json", help="write the graph, for `autoddl plan GRAPH.json`")
    parser.add_argument("--json", action="store_true", help="print the graph as one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Extract, write, print."""
    from ..api.inputs import extract

    graph = extract(arguments.model)
    if arguments.output:
        graph.save(arguments.output)
    if arguments.json:
        print(json.dumps(graph.document(), indent=1, allow_nan=False))
        return 0
    print(graph_text(graph))
    if arguments.output:
        print(f"\nWritten to {arguments.output}")
    return 0


def graph_text(graph: LayerGraph) -> str:
    """The layers, equal ones of repeated blocks once, and the notes."""
    lines = [
        f"{graph.name}: {graph.num_parameters:,} parameters, {graph.flops / 1e9:,.4g} GFLOPs forward per {graph.sample}",
        "",
        *aligned(_rows(graph), right=(4, 5)),
    ]
    if graph.notes:
        lines += ["", "Notes", *(f"  {note}" for note in graph.notes)]
    return "\n".join(lines)


def _rows(graph: LayerGraph) -> list[tuple[str, ...]]:
    counts: dict[str, int] = {}
    first: dict[str, Layer] = {}
    for layer in graph.layers:
        name = f"{layer.block}.*.{layer.role}" if layer.block else layer.name
        counts[name] = counts.get(name, 0) + 1
        first.setdefault(name, layer)
    rows: list[tuple[str, ...]] = [("layer", "kind", "input", "output", "parameters", "GFLOPs", "followed by")]
    for name, layer in first.items():
        rows.append(
            (
                f"{name} x {counts[name]}" if counts[name] > 1 else name,
                layer.kind,
                _shape(layer.input_shape),
                _shape(layer.output_shape),
                _parameters(layer),
                f"{layer.flops / 1e9:,.4g}" if layer.flops else "",
                ", ".join(layer.epilogue),
            )
        )
    return rows


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _parameters(layer: Layer) -> str:
    """Their number, and whose they are where they are another layer's."""
    ties = sorted({parameter.tied_to for parameter in layer.parameters if parameter.tied_to is not None})
    own = f"{layer.num_parameters:,}" if layer.num_parameters else ""
    return " + ".join(filter(None, [own, *(f"({tie}'s)" for tie in ties)]))
