"""Layers in the making: what names them, ties their parameters and counts what follows them when all are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoddl.costmodel.graph import Layer, LayerGraph, Parameter

from ..zoo.layers import kept_by_epilogue
from .blocks import mark_blocks
from .operators import OperatorGraph

__all__ = ["LayerDraft", "View", "finish", "listed"]

#: What a difference, and what is made of it, is as a loss.
LOSSES_OF_DIFFERENCES = {"square": "mse_loss", "abs": "l1_loss"}
#: How many names a note lists.
SHOWN = 4


@dataclass(eq=False)
class LayerDraft:
    """A layer in the making: its name, its ties and its readers' epilogues are known at the end only.

    Attributes:
        layer: without name, parameters and epilogue.
        name: wanted; a number is appended where several layers want it.
        path: of the module that made it.
        inputs: what it reads.
        variables: (tensor, parameter name) of its parameters.
        epilogue: (operation, elements per sample) of what follows.
        kinds: operators of an opaque layer.
        mixes: whether a sample's result depends on the other samples of the batch.
        output: the tensor that it made first (before any epilogue).
    """

    layer: Layer
    name: str
    path: str
    inputs: list[LayerDraft] = field(default_factory=list)
    variables: list[tuple[str, str]] = field(default_factory=list)
    epilogue: list[tuple[str, int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    mixes: bool = False
    output: str = ""


@dataclass(frozen=True)
class View:
    """Where a tensor's elements are: in a layer's output, its features last, or in some other order.

    Attributes:
        draft: the layer; None for raw data.
        dims: the order of dimensions, compared with a tensor that has its features last; None where it is unknown.
    """

    draft: LayerDraft | None
    dims: tuple[int, ...] | None

    @property
    def is_plain(self) -> bool:
        """Whether the features come last (or there is but one number)."""
        return self.draft is None or self.dims == () or (self.dims is not None and self.dims[-1] == len(self.dims) - 1)


def finish(drafts: Sequence[LayerDraft], graph: OperatorGraph, name: str, notes: Sequence[str]) -> LayerGraph:
    """The layer graph of drafts in topological order.

    A parameter belongs to the first layer that has it; to the others it is tied.
    """
    names = _unique_names([draft.name for draft in drafts])
    named = {id(draft): unique for draft, unique in zip(drafts, names)}
    owners: dict[str, str] = {}
    layers, edges = [], []
    for draft in drafts:
        own = named[id(draft)]
        parameters = []
        for variable, parameter in dict(draft.variables).items():
            owner = owners.setdefault(variable, own)
            parameters.append(Parameter(parameter, graph.variables[variable].shape, None if owner == own else owner))
        epilogue = _with_losses(draft.epilogue)
        kept = sum(kept_by_epilogue((operation,), elements) for operation, elements in epilogue)
        layers.append(
            replace(
                draft.layer,
                name=own,
                parameters=tuple(parameters),
                epilogue=tuple(operation for operation, _ in epilogue),
                kept_elements=draft.layer.kept_elements + kept,
            )
        )
        edges += [(named[id(source)], own) for source in draft.inputs]
    layers = mark_blocks(layers, edges, graph.containers)
    all_notes = [*notes, *_opaque_notes(drafts, named), *_unused_notes(graph, owners)]
    return LayerGraph(name, _sample_name(drafts, graph), tuple(layers), tuple(edges), tuple(all_notes))


def _opaque_notes(drafts: Sequence[LayerDraft], named: dict[int, str]) -> list[str]:
    places: dict[str, list[str]] = {}
    for draft in drafts:
        if draft.layer.kind == "opaque":
            places.setdefault("+".join(dict.fromkeys(draft.kinds)), []).append(named[id(draft)])
    notes = [f"{kinds} ({listed(layers)}): can be split along the batch only" for kinds, layers in places.items()]
    mixing = [named[id(draft)] for draft in drafts if draft.mixes]
    if mixing:
        notes.append(f"{listed(mixing)}: mix the samples of a batch, so that they see a part of it where it is split")
    return notes


def _unused_notes(graph: OperatorGraph, owners: dict[str, str]) -> list[str]:
    used = {graph.variables[tensor].name for tensor in owners}
    unused = [name for name in graph.parameters if name not in used]
    return [f"parameters that no layer uses: {listed(unused)}"] if unused else []


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _sample_name(drafts: Sequence[LayerDraft], graph: OperatorGraph) -> str:
    kinds = {draft.layer.kind for draft in drafts}
    if "conv2d" in kinds:
        return "image"
    rank = len(graph.shapes[graph.inputs[0]]) if graph.inputs else 0
    return "sequence" if "embedding" in kinds or rank > 2 else "row"


def _unique_names(wanted: Sequence[str]) -> list[str]:
    """Numbers appended to names that occur more than once: ``add_1``, ``add_2``; to modules called again: ``fc``, ``fc_2``."""
    counts = {name: wanted.count(name) for name in set(wanted)} if len(set(wanted)) < len(wanted) else {}
    seen: dict[str, int] = {}
    taken = set(wanted)
    names = []
    for name in wanted:
        if counts.get(name, 1) == 1:
            names.append(name)
            continue
        number = seen[name] = seen.get(name, 0) + 1
        is_functional = name.rpartition(".")[2] in ("add", "embed")
        unique = name if number == 1 and not is_functional else f"{name}_{number}"
        while unique in taken and unique != name:
            unique += "_"
        taken.add(unique)
        names.append(unique)
    return names


def _with_losses(epilogue: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """An epilogue in which a difference's square (or absolute value) and its mean are the loss that they are."""
    named = list(epilogue)
    for i in range(len(named) - 1):
        operation, following = named[i][0], named[i + 1][0]
        if operation == "sub" and following in LOSSES_OF_DIFFERENCES:
            rest = [name for name, _ in named[i + 2 :]]
            if all(name in ("reduce_sum", "scalar_mul", "scalar_div") for name in rest):
                return [*named[:i], (LOSSES_OF_DIFFERENCES[following], named[i][1])]
    return named
