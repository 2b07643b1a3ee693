"""Baselines: the expert-designed families of plans (AutoDDL, Section 5).

==============  ==================================================  ======================================
baseline        strategy of every layer                             tuned parameters
==============  ==================================================  ======================================
data parallel   (p, 1, 1)                                           none
megatron        one (dp, mp) mesh for the whole network; matrices   dp and mp per network level
                alternate column-parallel (dp, mp, 1) and
                row-parallel (dp, 1, mp), restarted in each block
summa           one r x c mesh; input, weight and output of every   r and c per network level, both > 1
                matrix split over both
==============  ==================================================  ======================================

The caller also tunes micro-batch and recomputation.  Layers without a matrix are split over the same mesh: samples over dp (r),
and features, heads or vocabulary over mp (c).  Convolutions and opaque layers stay data parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.kind import Splitting
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.strategy import Strategy, data_parallel, transposed

__all__ = ["BASELINES", "Baseline", "baselines", "megatron"]

#: Names, in the order in which they are reported.
BASELINES = ("data parallel", "megatron", "summa")


@dataclass(frozen=True)
class Baseline:
    """One member of a baseline's family.

    Attributes:
        name: of the family, one of :data:`BASELINES`.
        mesh: the mesh as text.
        strategies: the strategy of each layer, by name.
    """

    name: str
    mesh: str
    strategies: dict[str, Strategy]


def baselines(graph: LayerGraph, level_sizes: tuple[int, ...]) -> Iterator[Baseline]:
    """All members of all families.  The caller checks whether a member divides the layers."""
    everything = data_parallel(level_sizes)
    yield Baseline("data parallel", f"dp {everything.p0}", {layer.name: everything for layer in graph.layers})
    for mesh in _meshes(level_sizes):
        if any(mp > 1 for _, mp in mesh):
            yield megatron(graph, mesh)
    for mesh in _meshes(level_sizes):
        if any(r > 1 for r, _ in mesh) and any(c > 1 for _, c in mesh):
            yield _summa(graph, mesh, everything)


def _meshes(level_sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    per_level = [[(size // d, d) for d in divisors(size)] for size in level_sizes]
    return product(*per_level)


def _text(mesh: tuple[tuple[int, int], ...], names: tuple[str, str]) -> str:
    return " | ".join(f"{names[0]} {a} x {names[1]} {b}" for a, b in mesh)


def megatron(graph: LayerGraph, mesh: tuple[tuple[int, int], ...]) -> Baseline:
    """The Megatron baseline of one mesh of (dp, mp) per network level; data parallel if all mp are 1."""
    everything = data_parallel(tuple(dp * mp for dp, mp in mesh))
    column = Strategy(tuple((dp, mp, 1) for dp, mp in mesh))
    row = Strategy(tuple((dp, 1, mp) for dp, mp in mesh))
    alternating: dict[str, Strategy] = {}
    seen: dict[tuple[str, int], int] = {}
    for layer in graph.layers:
        if kind_of(layer.kind).is_matmul:
            place = (layer.block, layer.block_index)
            alternating[layer.name] = (column, row)[seen.get(place, 0) % 2]
            seen[place] = seen.get(place, 0) + 1

    def strategy(layer: Layer) -> Strategy:
        # Column-parallel is the canonical layout, features over mp.  An embedding splits its vocabulary, as in the paper; a table
        # whose few rows do not divide (the two token types of BERT) splits its features.
        return row if kind_of(layer.kind).is_lookup and row.divides(layer) else column

    return Baseline("megatron", _text(mesh, ("dp", "mp")), _assign(graph, alternating, strategy, everything))


def _summa(graph: LayerGraph, mesh: tuple[tuple[int, int], ...], everything: Strategy) -> Baseline:
    canonical = Strategy(tuple((r, c, 1) for r, c in mesh))
    on_mesh = Strategy(canonical.splits, summa=True)
    tied = {p.tied_to for layer in graph.layers for p in layer.parameters} | {
        layer.name for layer in graph.layers if any(p.tied_to for p in layer.parameters)
    }
    # A weight shared with an embedding keeps the layout of the embedding.
    matrices = {
        layer.name: on_mesh for layer in graph.layers if kind_of(layer.kind).has_summa and layer.name not in tied
    }
    return Baseline("summa", _text(mesh, ("r", "c")), _assign(graph, matrices, lambda layer: canonical, everything))


def _assign(
    graph: LayerGraph, matrices: dict[str, Strategy], otherwise: Callable[[Layer], Strategy], everything: Strategy
) -> dict[str, Strategy]:
    strategies: dict[str, Strategy] = {}
    for layer in graph.layers:
        if kind_of(layer.kind).splitting is Splitting.SAMPLES:
            strategies[layer.name] = everything
        else:
            strategies[layer.name] = matrices.get(layer.name) or otherwise(layer)
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.tied_to is not None:
                partner = strategies[parameter.tied_to]
                owner, own = kind_of(graph[parameter.tied_to].kind), kind_of(layer.kind)
                # The table of a lookup is the transposed weight of a product.
                strategies[layer.name] = partner if owner.is_lookup == own.is_lookup else transposed(partner)
    return strategies
