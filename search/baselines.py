"""Baselines: the expert-designed families of plans (AutoDDL, Section 5).

==============  ==================================================  ======================================
baseline        strategy of every layer                             tuned parameters
==============  ==================================================  ======================================
data parallel   (p, 1, 1)                                           none
zero-1, zero-2  (p, 1, 1); optimizer states, and also gradients,    none; gradients over all devices or inside nodes
                divided among all devices (ZeRO)
fsdp            (p, 1, 1); also parameters divided                  over all devices or inside nodes
megatron        one (dp, mp) mesh for the whole network; matrices   dp and mp per network level
                alternate column-parallel (dp, mp, 1) and
                row-parallel (dp, 1, mp), restarted in each block;
                optimizer states divided over dp, if that is on
                offer ("distributed optimizer")
expert          megatron, with the experts divided over ep of the   dp, mp (inside nodes), and ep
parallel        dp devices; for models with experts
summa           one r x c mesh; input, weight and output of every   r and c per network level, both > 1
                matrix split over both
==============  ==================================================  ======================================

The caller also tunes micro-batch and recomputation.  Layers without a matrix are split over the same mesh: samples over dp (r),
and features, heads or vocabulary over mp (c).  Convolutions and opaque layers stay data parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.kind import Splitting
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layer import zero_of
from autoddl.costmodel.nearest import divisors
from autoddl.costmodel.strategy import PLAIN, Choices, Strategy, data_parallel, transposed

__all__ = ["BASELINES", "OF_CHOICES", "Baseline", "baselines", "divided", "family_names", "megatron", "with_experts"]

#: Names, in the order in which they are reported.
BASELINES = ("data parallel", "zero-1", "zero-2", "fsdp", "megatron", "expert parallel", "summa")
#: Data parallel families that divide parameters, with their stage of ZeRO; there are none unless that is on offer.
OF_CHOICES = {"zero-1": 1, "zero-2": 2, "fsdp": 3}
#: Families that only some models have, or only with some choices.
_CONDITIONAL = {*OF_CHOICES, "expert parallel"}


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


def baselines(graph: LayerGraph, level_sizes: tuple[int, ...], choices: Choices = PLAIN) -> Iterator[Baseline]:
    """All members of all families.  The caller checks whether a member divides the layers.

    Args:
        graph: the layers.
        level_sizes: number of devices at each network level, outermost first.
        choices: what may be divided.
    """
    everything = data_parallel(level_sizes)
    whole = {layer.name: everything for layer in graph.layers}
    yield Baseline("data parallel", f"dp {everything.p0}", whole)
    for name, zero in OF_CHOICES.items():
        if zero in choices.shardings and everything.p0 > 1:
            yield Baseline(name, f"dp {everything.p0}", divided(graph, whole, zero))
            if zero > 1 and len(everything.axes(0)) > 1:
                inside = divided(graph, whole, zero, hybrid=True)
                yield Baseline(name, f"dp {everything.p0}, divided inside nodes", inside)
    for mesh in _meshes(level_sizes):
        if any(mp > 1 for _, mp in mesh):
            plain = megatron(graph, mesh)
            is_divided = 1 in choices.shardings and any(dp > 1 for dp, _ in mesh)
            yield replace(plain, strategies=divided(graph, plain.strategies, 1)) if is_divided else plain
    yield from _expert_parallel(graph, level_sizes, 1 in choices.shardings)
    for mesh in _meshes(level_sizes):
        if any(r > 1 for r, _ in mesh) and any(c > 1 for _, c in mesh):
            yield _summa(graph, mesh, everything)


def _expert_parallel(graph: LayerGraph, level_sizes: tuple[int, ...], divides_states: bool) -> Iterator[Baseline]:
    """The members of expert parallelism: one (dp, mp) mesh with mp inside nodes, and each number of parts of the experts."""
    counts = {layer.attributes["experts"] for layer in graph.layers if layer.kind == "experts"}
    for mp in divisors(level_sizes[-1]) if counts else ():
        mesh = (*((size, 1) for size in level_sizes[:-1]), (level_sizes[-1] // mp, mp))
        plain = megatron(graph, mesh).strategies
        for parts in divisors(gcd(*counts)):
            strategies = with_experts(graph, plain, parts)
            if parts > 1 and strategies is not None:
                if divides_states:
                    strategies = divided(graph, strategies, 1)
                yield Baseline("expert parallel", f"{_text(mesh, ('dp', 'mp'))}, ep {parts}", strategies)


def with_experts(graph: LayerGraph, strategies: Mapping[str, Strategy], parts: int) -> dict[str, Strategy] | None:
    """The strategies with the experts divided over so many neighbours among the p0 devices.

    Args:
        graph: the layers.
        strategies: the strategy of each layer, by name.
        parts: number of parts of the experts.

    Returns:
        None if the p0 devices of a layer of experts do not divide so.
    """
    result = dict(strategies)
    for layer in graph.layers:
        if layer.kind == "experts" and parts > 1:
            per_level, left = [], parts
            for p0, _, _ in reversed(strategies[layer.name].splits):  # neighbours inside a node first
                per_level.append(gcd(p0, left))
                left //= per_level[-1]
            if left > 1:
                return None
            result[layer.name] = replace(strategies[layer.name], experts=tuple(reversed(per_level)))
    return result


def family_names(members: Iterable[Baseline]) -> tuple[str, ...]:
    """The families that a plan is compared with: all but those that divide parameters or experts and have no member."""
    found = {member.name for member in members}
    return tuple(name for name in BASELINES if name in found or name not in _CONDITIONAL)


def divided(
    graph: LayerGraph, strategies: Mapping[str, Strategy], zero: int, hybrid: bool = False
) -> dict[str, Strategy]:
    """The strategies with parameters divided up to a stage of ZeRO, as far as each layer can (:func:`.layer.zero_of`).

    Args:
        graph: the layers.
        strategies: the strategy of each layer, by name.
        zero: the stage.
        hybrid: whether gradients and weights are divided inside nodes only.
    """
    result: dict[str, Strategy] = {}
    for layer in graph.layers:
        strategy = strategies[layer.name]
        owner = next((p.tied_to for p in layer.parameters if p.tied_to in result), None)
        if owner is not None:
            strategy = replace(strategy, zero=result[owner].zero)  # the shared weight is divided once
        elif layer.num_parameters and strategy.copies > 1 and not strategy.summa:
            own = zero_of(layer, zero, graph.place(layer.name, "none"))
            strategy = replace(strategy, zero=own, hybrid=hybrid and own > 1 and len(strategy.copy_axes()) > 1)
        result[layer.name] = strategy
    return result


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
        if kind_of(layer.kind).is_matmul and not layer.is_image:
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
        # The published systems split images along the samples.
        if layer.is_image or kind_of(layer.kind).splitting is Splitting.SAMPLES:
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
