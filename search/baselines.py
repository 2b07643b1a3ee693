"""The plans that experts use today, each tuned over its own freedom (AutoDDL, Section 5).

==============  ==================================================  ======================================
baseline        every layer                                         freedom
==============  ==================================================  ======================================
data parallel   (p, 1, 1)                                           -
megatron        one (dp, mp) mesh for the whole network; matrices   dp and mp per network level
                alternate column-parallel (dp, mp, 1) and
                row-parallel (dp, 1, mp), anew in every block
summa           one r x c mesh; input, weight and output of every   r and c per network level, both > 1
                matrix split over both
==============  ==================================================  ======================================

All are tuned over micro-batch and recomputation too, by the caller.  What has no matrix follows the mesh: samples over dp (r),
features, heads or vocabulary over mp (c); convolutions and unknown operations stay data parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy, data_parallel, transposed

__all__ = ["BASELINES", "Baseline", "baselines", "megatron"]

#: Names, in the order in which they are reported.
BASELINES = ("data parallel", "megatron", "summa")


@dataclass(frozen=True)
class Baseline:
    """One member of a baseline's family: a name, its mesh as text, and the strategy of each layer by name."""

    name: str
    mesh: str
    strategies: dict[str, Strategy]


def baselines(graph: LayerGraph, level_sizes: tuple[int, ...]) -> Iterator[Baseline]:
    """All members of all families; whether one divides the layers is for the caller to see."""
    everything = data_parallel(level_sizes)
    yield Baseline("data parallel", f"dp {everything.p0}", {layer.name: everything for layer in graph.layers})
    for mesh in _meshes(level_sizes):
        if any(mp > 1 for _, mp in mesh):
            yield megatron(graph, mesh)
    for mesh in _meshes(level_sizes):
        if any(r > 1 for r, _ in mesh) and any(c > 1 for _, c in mesh):
            yield _summa(graph, mesh, everything)


def _meshes(level_sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    per_level = [[(size // d, d) for d in range(1, size + 1) if size % d == 0] for size in level_sizes]
    return product(*per_level)


def _text(mesh: tuple[tuple[int, int], ...], names: tuple[str, str]) -> str:
    return " | ".join(f"{names[0]} {a} x {names[1]} {b}" for a, b in mesh)


def megatron(graph: LayerGraph, mesh: tuple[tuple[int, int], ...]) -> Baseline:
    """The member of its family of one mesh: (dp, mp) per network level; data parallel where no mp is more than 1."""
    everything = data_parallel(tuple(dp * mp for dp, mp in mesh))
    column = Strategy(tuple((dp, mp, 1) for dp, mp in mesh))
    row = Strategy(tuple((dp, 1, mp) for dp, mp in mesh))
    alternating: dict[str, Strategy] = {}
    seen: dict[tuple[str, int], int] = {}
    for layer in graph.layers:
        if layer.kind == "linear":
            place = (layer.block, layer.block_index)
            alternating[layer.name] = (column, row)[seen.get(place, 0) % 2]
            seen[place] = seen.get(place, 0) + 1

    def strategy(layer: Layer) -> Strategy:
        # The canonical layout is column's: features over mp.  An embedding splits its vocabulary, as the paper does; a table of
        # few rows (the two token types of BERT) its features.
        return row if layer.kind == "embedding" and row.divides(layer) else column

    return Baseline("megatron", _text(mesh, ("dp", "mp")), _assign(graph, alternating, strategy, everything))


def _summa(graph: LayerGraph, mesh: tuple[tuple[int, int], ...], everything: Strategy) -> Baseline:
    canonical = Strategy(tuple((r, c, 1) for r, c in mesh))
    on_mesh = Strategy(canonical.splits, summa=True)
    tied = {p.tied_to for layer in graph.layers for p in layer.parameters} | {
        layer.name for layer in graph.layers if any(p.tied_to for p in layer.parameters)
    }
    # A weight that is shared with an embedding keeps the embedding's layout.
    matrices = {layer.name: on_mesh for layer in graph.layers if layer.kind == "linear" and layer.name not in tied}
    return Baseline("summa", _text(mesh, ("r", "c")), _assign(graph, matrices, lambda layer: canonical, everything))


def _assign(
    graph: LayerGraph, matrices: dict[str, Strategy], otherwise: Callable[[Layer], Strategy], everything: Strategy
) -> dict[str, Strategy]:
    strategies: dict[str, Strategy] = {}
    for layer in graph.layers:
        if layer.kind in ("conv2d", "opaque"):
            strategies[layer.name] = everything
        else:
            strategies[layer.name] = matrices.get(layer.name) or otherwise(layer)
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.tied_to is not None:
                partner = strategies[parameter.tied_to]
                same_kind = graph[parameter.tied_to].kind == layer.kind
                strategies[layer.name] = partner if same_kind else transposed(partner)
    return strategies
