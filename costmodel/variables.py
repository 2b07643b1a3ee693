"""The variables of a search, and the strategies that each is offered.

Tied layers share one variable: the same layer of every repetition of a block (unless ``untied``), and layers that share a weight.
If an embedding and a linear layer share a weight, the strategy of one is the transpose of the other's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .cluster import Cluster
from .errors import UserError
from .graph import Layer, LayerGraph, Place
from .graph_meshes import EAGER, executes, shared_positions
from .kinds.registry import kind_of
from .problem import OptionSet, Variable
from .strategy import Choices, Strategy, enumerate_strategies, transposed

__all__ = ["Offer", "executed_by", "no_strategy", "variables_of"]


@dataclass(frozen=True)
class Offer:
    """The strategies that layers are offered, of those that divide them.

    Attributes:
        summa: whether Summa meshes are among them.
        allowed: the allowed strategies; None allows all.
        executor: what executes them.
        choices: what is offered besides splits.
    """

    summa: bool
    allowed: frozenset[Strategy] | None
    executor: str
    choices: Choices


def executed_by(executor: str) -> str:
    """The part of a message that says which strategies an executor leaves out; empty if it executes all."""
    name = executor.split("|")[0]
    return "" if name == EAGER else f" and that executor={name!r} can execute"


def no_strategy(layer: Layer, cluster: Cluster, why: str) -> str:
    """The beginning of a message about a layer without a strategy."""
    shape = " x ".join(map(str, cluster.level_sizes))
    devices = f"{cluster.num_devices} devices" + (f" ({shape})" if len(cluster.level_sizes) > 1 else "")
    return f"{layer.describe()} has no strategy on {devices} {why}"


def variables_of(
    graph: LayerGraph, cluster: Cluster, untied: bool, offer: Offer, known: dict[object, OptionSet]
) -> tuple[Variable, ...]:
    """Group the layers; see the module's docstring.

    Args:
        graph: the model, or a stage of it.
        cluster: the devices.
        untied: whether every repetition of a block has a choice of its own.
        offer: the strategies that layers are offered.
        known: option sets for the same cluster and offer, which are shared; new ones are added.

    Raises:
        UserError: a layer has no strategy.
    """
    groups: dict[object, list[str]] = {}
    key_of: dict[str, object] = {}
    position = {layer.name: number for number, layer in enumerate(graph.layers)}
    for layer in graph.layers:
        tied = {key_of[p.tied_to]: None for p in layer.parameters if p.tied_to in key_of}
        if tied:
            # A layer may share its weights with several others: they all have one choice.
            key, *others = tied
            for other in others:
                joined = groups.pop(other)
                key_of |= dict.fromkeys(joined, key)
                groups[key] = sorted([*groups[key], *joined], key=position.__getitem__)
        elif layer.block and not untied:
            key = (layer.block, layer.role, layer.signature(), not graph.inputs(layer.name))
        else:
            key = layer.name
        key_of[layer.name] = key
        groups.setdefault(key, []).append(layer.name)
    return tuple(_variable(graph, tuple(names), cluster, known, offer) for names in groups.values())


def _variable(
    graph: LayerGraph,
    names: tuple[str, ...],
    cluster: Cluster,
    known: dict[object, OptionSet],
    offer: Offer,
) -> Variable:
    first = graph[names[0]]
    swapped = frozenset(n for n in names if kind_of(graph[n].kind).is_lookup != kind_of(first.kind).is_lookup)
    place = graph.place(first.name, "none")
    outer = next((name for name in names if name in graph.at_boundaries), None)
    traits = place.largest_zero, graph.reads_order, outer is None
    key = (*traits, *{(graph[name].signature(), name in swapped): None for name in names})
    if key not in known:
        members = {graph[name].signature(): graph[name] for name in names}
        options = _common_options(list(members.values()), swapped, cluster, place, offer)
        known[key] = OptionSet(
            tuple(
                s
                for s in options
                if graph.offers(outer or first.name, s) and (offer.allowed is None or s.plain in offer.allowed)
            ),
            math.gcd(*(shared_positions(offer.executor, member) for member in members.values())),
        )
    if not known[key].options:
        why = f"that divides its shape{executed_by(offer.executor)}"
        raise UserError(f"{no_strategy(first, cluster, why)}; try another number of devices")
    if len(names) == 1:
        name = names[0]
    elif first.block:
        name = f"{first.block}.*.{first.role}"
    else:
        name = " = ".join(names)
    return Variable(name, names, known[key], swapped)


def _common_options(
    members: list[Layer], swapped: frozenset[str], cluster: Cluster, place: Place, offer: Offer
) -> tuple[Strategy, ...]:
    is_alone = len(members) == 1
    choices = offer.choices if is_alone else replace(offer.choices, regathers=False)
    every = enumerate_strategies(members[0], cluster.level_sizes, offer.summa and is_alone, choices, place)
    options = [strategy for strategy in every if executes(offer.executor, members[0], strategy)]
    for layer in members[1:]:
        # The first layer owns the weight that they share, and decides how its states are divided.
        every = enumerate_strategies(layer, cluster.level_sizes)
        offered = {strategy.splits for strategy in every if executes(offer.executor, layer, strategy)}
        options = [s for s in options if (transposed(s) if layer.name in swapped else s).splits in offered]
    return tuple(options)
