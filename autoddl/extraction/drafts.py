"""Drafts of layers, and the layer graph that is made from all drafts.

Three properties of a layer depend on the other layers, so they are set when all drafts exist: its unique name, whether its
parameters are tied to another layer's, and its epilogue (the element-wise operators that follow it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from autoddl.costmodel.graph import Layer, LayerGraph, Parameter
from autoddl.costmodel.kinds.epilogue import GATES
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.pipelines.runtime.comm.parameter_layouts import product_order

from ..zoo.layers import batch_norm_note, kept_by_epilogue
from .blocks import mark_blocks
from .operators import Operator, OperatorGraph
from .reasons import join_names

__all__ = ["LayerDraft", "MixedWeights", "build_layer_graph"]


@dataclass(eq=False)
class LayerDraft:
    """A layer whose unique name, tied parameters and epilogue are not known yet.

    Attributes:
        layer: The layer, without name, parameters and epilogue.
        name: Requested name.  If several drafts request the same name, numbers are appended.
        path: Path of the module that calls the layer's operators.
        sources: Active tensors that the layer reads, in order.
        variables: Pairs (tensor, parameter name) of the layer's parameters.
        epilogue: Pairs (operation, elements per sample) of the element-wise operators that follow.
        kinds: For an opaque layer: kinds of its operators.
        mixes_samples: Whether the result of one sample depends on the other samples of the batch.
        output: First output tensor of the layer, before its epilogue.  "" if the draft was added without one.
        further: Drafts of layers without sources that the layer reads after its sources: tables of positions.
        is_program: Whether the layer is a program of operators.
        operators: Of a program: the operators, in execution order.
        is_output: Whether a program has no operators at first, and returns what the model returns.
        is_loss: Whether a program returns the loss of the model.
        results: Of a program: tensors that it returns.
        feed: Raw tensor that a layer without sources reads.  "" if it reads none.
        reason: Why the layer can be split along the batch only.
        streams: Names of the random numbers of its dropouts.
    """

    layer: Layer
    name: str
    path: str
    sources: list[str] = field(default_factory=list)
    variables: list[tuple[str, str]] = field(default_factory=list)
    epilogue: list[tuple[str, int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    mixes_samples: bool = False
    output: str = ""
    further: list[LayerDraft] = field(default_factory=list)
    is_program: bool = False
    operators: list[Operator] = field(default_factory=list)
    is_output: bool = False
    is_loss: bool = False
    results: list[str] = field(default_factory=list)
    feed: str = ""
    reason: str = ""
    streams: list[str] = field(default_factory=list)

    def epilogue_has(self, operations: Iterable[str]) -> bool:
        """Return whether one of some operations is in the epilogue."""
        return not {name for name, _ in self.epilogue}.isdisjoint(operations)


class MixedWeights(Exception):  # noqa: N818 - not an error of the user
    """Layers share parameters that layers of their kinds cannot share.

    Attributes:
        variables: The parameters, by tensor name.
    """

    def __init__(self, variables: frozenset[str]) -> None:
        super().__init__(variables)
        self.variables = variables


def _check_sharing(drafts: Sequence[LayerDraft]) -> None:
    """Check that layers which share a parameter are programs, or of kinds that can share it.

    Raises:
        MixedWeights: They are not.
    """
    kinds_of: dict[str, set[tuple[str, int]]] = {}
    for draft in drafts:
        for variable, _ in draft.variables:
            form = draft.layer.kind, draft.layer.attributes.get("transposed", 0)
            kinds_of.setdefault(variable, set()).add(form)
    mixed = {
        variable
        for variable, forms in kinds_of.items()
        if not all(
            kind_of(a).shares_weights_with(kind_of(b)) and is_transposed == other
            for (a, is_transposed), (b, other) in permutations(sorted(forms), 2)
        )
    }
    if mixed:
        raise MixedWeights(frozenset(mixed))


def _check_orders(graph: LayerGraph, drafts: Mapping[str, LayerDraft]) -> None:
    """Check that linear layers with the same weight have their features in the same order, which depends on their readers.

    Raises:
        MixedWeights: They have not.
    """
    for layer in graph.layers:
        owners = {p.tied_to for p in layer.parameters if p.tied_to is not None}
        for owner in (graph[name] for name in owners):
            if layer.kind != "linear" or owner.kind != "linear":
                continue
            own, other = product_order(graph, layer), product_order(graph, owner)
            if (own.num_groups, own.section_widths) != (other.num_groups, other.section_widths):
                raise MixedWeights(frozenset(variable for variable, _ in drafts[layer.name].variables))


def build_layer_graph(
    drafts: Sequence[LayerDraft],
    producers: Mapping[int, Sequence[LayerDraft]],
    graph: OperatorGraph,
    name: str,
    notes: Sequence[str],
) -> LayerGraph:
    """Return the layer graph of drafts.

    A parameter that several layers use belongs to the first of them; the other layers have it as a tied parameter.

    Args:
        drafts: All layers, in topological order.
        producers: The layers that each layer reads, by the ``id`` of its draft.
        graph: The traced operators.
        name: Name of the layer graph.
        notes: Notes of the layer graph; notes about opaque layers and unused parameters are appended.

    Raises:
        MixedWeights: Layers share a parameter that layers of their kinds, or with their readers, cannot share.
    """
    _check_sharing(drafts)
    # Unique names.
    unique_names = _unique_names([draft.name for draft in drafts])
    name_of_draft = {id(draft): unique for draft, unique in zip(drafts, unique_names)}
    owners: dict[str, str] = {}
    layers, edges = [], []
    for draft in drafts:
        layer_name = name_of_draft[id(draft)]
        # Tied parameters.
        parameters = []
        for variable, parameter in dict(draft.variables).items():
            owner = owners.setdefault(variable, layer_name)
            tied_to = None if owner == layer_name else owner
            source = graph.variables[variable]
            parameters.append(Parameter(parameter, source.shape, tied_to, source.frozen))
        # Epilogue.
        epilogue = draft.epilogue
        followers = (*(operation for operation, _ in epilogue[1:]), "")
        # The activation of a gate is computed again from the gate, as in `kept_by_epilogue`.
        kept = sum(
            kept_by_epilogue((operation,), elements)
            for (operation, elements), follower in zip(epilogue, followers)
            if follower not in GATES
        )
        layers.append(
            replace(
                draft.layer,
                name=layer_name,
                parameters=tuple(parameters),
                dropouts=tuple(draft.streams),
                epilogue=tuple(operation for operation, _ in epilogue),
                kept_elements=draft.layer.kept_elements + kept,
            )
        )
        edges += [(name_of_draft[id(source)], layer_name) for source in producers[id(draft)]]
    layers = mark_blocks(layers, edges, graph.containers)
    used = {graph.variables[tensor].name for tensor in owners}
    unused = tuple(name for name in graph.parameters if name not in used)
    all_notes = [*notes, *_opaque_notes(drafts, name_of_draft)]
    all_notes += [f"parameters that no layer uses: {join_names(unused)}"] if unused else []
    result = LayerGraph(name, _sample_name(drafts, graph), tuple(layers), tuple(edges), tuple(all_notes), unused)
    _check_orders(result, {name_of_draft[id(draft)]: draft for draft in drafts})
    return result


def _opaque_notes(drafts: Sequence[LayerDraft], name_of_draft: dict[int, str]) -> list[str]:
    """Return notes that name the opaque layers and the layers that mix the samples of a batch."""
    opaque_layers: dict[tuple[str, str], list[str]] = {}
    for draft in drafts:
        if draft.layer.kind == "opaque" and not (draft.is_output and not draft.kinds):
            key = "+".join(dict.fromkeys(draft.kinds)), draft.reason
            opaque_layers.setdefault(key, []).append(name_of_draft[id(draft)])
    notes = [
        f"{kinds} ({join_names(names)}): can be split along the batch only, since {reason}"
        for (kinds, reason), names in opaque_layers.items()
    ]
    normalised = [
        name_of_draft[id(draft)]
        for draft in drafts
        if draft.layer.kind == "batch_norm" and not draft.layer.attributes["synchronised"]
    ]
    if normalised:
        notes.append(batch_norm_note(join_names(normalised)))
    mixing = [name_of_draft[id(draft)] for draft in drafts if draft.mixes_samples]
    if mixing:
        notes.append(
            f"{join_names(mixing)}: mix the samples of a batch; if the batch is split, each part is mixed by itself"
        )
    return notes


def _sample_name(drafts: Sequence[LayerDraft], graph: OperatorGraph) -> str:
    """Return what one sample of the model is called: ``image``, ``sequence`` or ``row``."""
    kinds = {draft.layer.kind for draft in drafts}
    if "conv2d" in kinds:
        return "image"
    num_dims = len(graph.shapes[graph.inputs[0]]) if graph.inputs else 0
    return "sequence" if "embedding" in kinds or num_dims > 2 else "row"


def _unique_names(requested: Sequence[str]) -> list[str]:
    """Append numbers to names that are requested more than once.

    >>> _unique_names(["add", "fc", "add", "norm", "fc"])
    ['add_1', 'fc', 'add_2', 'norm', 'fc_2']
    """
    has_duplicates = len(set(requested)) < len(requested)
    counts = {name: requested.count(name) for name in set(requested)} if has_duplicates else {}
    num_used: dict[str, int] = {}
    taken = set(requested)
    names = []
    for name in requested:
        if counts.get(name, 1) == 1:
            names.append(name)
            continue
        number = num_used[name] = num_used.get(name, 0) + 1
        is_functional = name.rpartition(".")[2] in ("add", "embed")  # not the name of a module
        unique = name if number == 1 and not is_functional else f"{name}_{number}"
        while unique in taken and unique != name:
            unique += "_"
        taken.add(unique)
        names.append(unique)
    return names
