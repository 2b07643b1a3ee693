"""The layer graph of a model: one node per layer that a strategy is chosen for.

An edge is the producer's output.  :mod:`autoddl.costmodel.layer` describes the nodes.  The kinds of layers and their attributes:

===========  ====================================================================================================
kind         attributes
===========  ====================================================================================================
linear       in_features, out_features (of the product; the output may be narrower after a gated epilogue); transposed = 1
             if the model stores its weights as (in, out)
embedding    vocabulary, features: a lookup table
position     positions, features: a table added to every sample
attention    heads, kv_heads, head_dim, causal, and optionally window: softmax(q k^T) v on whole heads of whole sequences;
             with key_rows, cross attention, which reads q, and k and v of as many rows; interleaved = 1 if its input has
             q, k and v of each head together, not those of all heads; windows: successive rows that attend to themselves
             alone; changes: number of tensors that change the scores (the layer's ``scores`` computes them); rotary_base:
             base of rotary positions (0: none; without it, the attribute rope_theta of the module), rotary_features: how
             many features of a head they turn if not all, rotary_neighbours = 1: the pairs (2 i, 2 i + 1), not the halves
norm         features, statistics (2 for layer norm: mean and variance; 1 for RMS norm)
add          none: element-wise sum of its inputs (residual)
conv2d       in_channels, out_channels, kernel_size, stride, padding
batch_norm   features, synchronised (whether the statistics are those of the samples of all ranks)
pool         kernel_size, stride, padding, maximum (whether it takes the largest element of a window, not the mean)
loss         vocabulary: cross entropy of logits that may be split along the vocabulary
opaque       optionally products (number of kernels that compute its FLOPs): any other layer; it can be split along the
             batch only
===========  ====================================================================================================

Further kinds can be registered (:mod:`autoddl.costmodel.kinds`).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from .documents import Fields, canonical_hash, check_document, load_document
from .errors import UserError, quote, shortened
from .kinds.builtin import BUILT_IN
from .kinds.registry import kind_of
from .layer import Layer, Parameter, Place
from .limits import MAX_DIMS, MAX_FLOPS, MAX_LAYERS, MAX_TENSOR
from .program import program_from_fields
from .recomputation import block_limit
from .writing import write_document

if TYPE_CHECKING:
    import networkx

    from .strategy import Strategy

__all__ = ["Layer", "LayerGraph", "Parameter", "Place", "load_graph", "places_of", "tied_parameter"]

assert BUILT_IN  # the import registers the built-in kinds

FORMAT = "autoddl-graph"


@dataclass(frozen=True, repr=False)
class LayerGraph:
    """A DAG of layers.

    Attributes:
        name: of the model.
        sample: what one sample is ("sequence", "image", "row").
        layers: in topological order.
        edges: (producer, consumer) by name; the edges of a consumer are in the order of its inputs.
        notes: remarks of the extraction for the user, such as operations that were ignored.
        unused: names of the model's parameters that no layer reads; they have no gradients, and ranks do not store them.
        part_of: the model that this is a stage of; it decides which layers are recomputed. It is not a part of the document.
    """

    name: str
    sample: str
    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    part_of: LayerGraph | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.part_of is None:  # the layers of a stage are those of a valid model
            _validate(self)

    def __repr__(self) -> str:
        return f"<LayerGraph {self.name}: {len(self.layers)} layers, {self.num_parameters:,} parameters>"

    def __getitem__(self, name: str) -> Layer:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def _inputs(self) -> dict[str, tuple[str, ...]]:
        table: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for source, target in self.edges:
            table[target].append(source)
        return {name: tuple(sources) for name, sources in table.items()}

    def inputs(self, name: str) -> tuple[str, ...]:
        """The producers of a layer's inputs, in order; empty if the layer reads the data itself."""
        return self._inputs[name]

    @cached_property
    def reads_order(self) -> bool:
        """Whether a layer of the model needs the positions of a sample in order.

        Then ranks do not share samples of causal attention.
        """
        layers = self.layers if self.part_of is None else self.part_of.layers
        return any(kind_of(layer.kind).reads_order or layer.scores is not None for layer in layers)

    def offers(self, name: str, strategy: Strategy) -> bool:
        """Whether a layer has a strategy that divides it in this graph.

        Images enter and leave a stage as rows of pixels, not as tiles.
        """
        if strategy.columns and name in self.at_boundaries:
            return False
        return not (strategy.positions and self.reads_order and self[name].attributes.get("causal"))

    @cached_property
    def at_boundaries(self) -> frozenset[str]:
        """The layers of a stage that stand for its input, or whose output leaves it."""
        if self.part_of is None:
            return frozenset()
        entering = (layer.name for layer in self.layers if layer.name not in self.part_of)
        leaving = (source for source, target in self.part_of.edges if source in self and target not in self)
        return frozenset((*entering, *leaving))

    def place(self, name: str, recompute: str) -> Place:
        """The place of a layer: what recomputation and the cost of the layer depend on besides the layer itself.

        Args:
            name: The layer.
            recompute: A way of recomputation (:mod:`.recomputation`). The places depend on the number of recomputed blocks alone.
        """
        blocks = block_limit(recompute)
        if blocks not in self._places:
            places = places_of(self.layers, self.edges, self.part_of, recompute)
            self._places[blocks] = dict(zip((layer.name for layer in self.layers), places))
        return self._places[blocks][name]

    @cached_property
    def _places(self) -> dict[int | None, dict[str, Place]]:
        return {}

    @cached_property
    def block_runs(self) -> tuple[int, ...]:
        """The numbers of repeated blocks, by runs of blocks of one kind that follow each other; empty if there are none.

        >>> from autoddl.zoo import resolve_model
        >>> resolve_model("gpt:4x64").block_runs, resolve_model("mlp:8,8").block_runs
        ((4,), ())
        """
        blocks = dict.fromkeys((layer.block, layer.block_index) for layer in self.layers if layer.block)
        return tuple(len(list(run)) for _, run in groupby(blocks, key=lambda block: block[0]))

    @cached_property
    def partial_block_counts(self) -> tuple[range, ...]:
        """The numbers K of the first blocks, at least one but not all, in ranges that end with the blocks of one kind.

        >>> from autoddl.zoo import resolve_model
        >>> resolve_model("gpt:4x64").partial_block_counts
        (range(1, 4),)
        """
        ends = list(accumulate(self.block_runs))
        ranges = (range(first + 1, min(end, ends[-1] - 1) + 1) for first, end in zip([0, *ends], ends))
        return tuple(counts for counts in ranges if counts)

    @property
    def has_loss(self) -> bool:
        """Whether the last layer computes a loss."""
        return self.layers[-1].is_loss

    @property
    def reads_targets(self) -> bool:
        """Whether the last layer reads the last argument of the model as targets, and not as one of its inputs."""
        return self.has_loss and not (self.layers[-1].program is not None and self.layers[-1].program.is_loss)

    @property
    def data_readers(self) -> tuple[Layer, ...]:
        """The layers that read an input of the model, in topological order."""
        return tuple(layer for layer in self.layers if not self.inputs(layer.name) and kind_of(layer.kind).reads_data)

    @property
    def sequence_length(self) -> int | None:
        """Rows of one sample in the data; None if samples are no sequences, or if inputs of several lengths are read.

        Tables of positions do not count, since they may be longer than the sequence.

        >>> from autoddl.zoo import resolve_model
        >>> resolve_model("gpt2", sequence=512).sequence_length, resolve_model("vgg13").sequence_length
        (512, None)
        """
        lengths = {
            layer.rows if kind_of(layer.kind).is_lookup else math.prod(layer.input_shape[:-1])
            for layer in self.data_readers
        }
        return lengths.pop() if self.sample == "sequence" and len(lengths) == 1 else None

    @property
    def reads_tokens(self) -> bool:
        """Whether the data are numbers of rows of tables alone, such as tokens."""
        return all(kind_of(layer.kind).is_lookup for layer in self.data_readers)

    @property
    def num_parameters(self) -> int:
        """Number of trained elements of the model; shared weights count once."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Forward FLOPs of one sample."""
        return sum(layer.flops for layer in self.layers)

    def networkx(self) -> networkx.DiGraph:
        """The graph as a networkx graph; the node attribute ``layer`` is its :class:`Layer`."""
        import networkx as nx  # imported lazily: it takes 0.2 s, and planning does not need it

        graph = nx.DiGraph(name=self.name)
        graph.add_nodes_from((layer.name, {"layer": layer}) for layer in self.layers)
        graph.add_edges_from(self.edges)
        return graph

    def document(self) -> dict[str, Any]:
        """The graph as a JSON document."""
        return {
            "format": FORMAT,
            "version": 1,
            "name": self.name,
            "sample": self.sample,
            "notes": list(self.notes),
            "layers": [_layer_document(layer) for layer in self.layers],
            "edges": [list(edge) for edge in self.edges],
            **({"unused": list(self.unused)} if self.unused else {}),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document, atomically."""
        write_document(path, self.document())

    @cached_property
    def hash(self) -> str:
        """Hash of layers and edges, without name, notes and unused parameters; a plan records it."""
        document = self.document()
        return canonical_hash({"layers": document["layers"], "edges": document["edges"]})


def tied_parameter(graph: LayerGraph, parameter: Parameter) -> Parameter:
    """Return the parameter that a tied one shares its storage with, of the layer that it is tied to.

    Of several of its size, like scale and shift of a norm, it is the one with its name, or else with its attribute's name.
    """
    assert parameter.tied_to is not None
    alike = [p for p in graph[parameter.tied_to].parameters if p.num_elements == parameter.num_elements]

    def likeness(other: Parameter) -> tuple[bool, bool]:
        attributes = other.name.rpartition(".")[2], parameter.name.rpartition(".")[2]
        return other.name == parameter.name, attributes[0] == attributes[1]

    return max(alike, key=likeness)  # the first one of equals


def places_of(
    layers: Sequence[Layer], edges: Sequence[tuple[str, str]], whole: LayerGraph | None, recompute: str
) -> tuple[Place, ...]:
    """Return the places of layers in their graph, or in a part of it.

    Args:
        layers: the layers, in topological order.
        edges: (producer, consumer) by name.
        whole: the model that the layers are a stage of. It decides which of them are recomputed, so that this does not depend on
            the stages that the model is cut into; None if the layers are a model.
        recompute: a way of recomputation (:mod:`.recomputation`); with ``blocks:K`` only layers of the first K blocks are
            recomputed.
    """
    blocks = dict.fromkeys((layer.block, layer.block_index) for layer in layers if layer.block)
    recomputed = set(list(blocks)[: block_limit(recompute)])
    repetitions = Counter(block for block, _ in recomputed)
    by_name = {layer.name: layer for layer in layers}
    fed = {target for _, target in edges}
    feeding_loss = {source for source, target in edges if kind_of(by_name[target].kind).is_loss}
    tied = _tied_layers(layers if whole is None else whole.layers)
    begun: set[tuple[str, int]] = set()
    places = []
    for layer in layers:
        zero = 1 if layer.name in tied else 3
        key = (layer.block, layer.block_index)
        if whole is not None and layer.name in whole:
            is_recomputed = whole.place(layer.name, "none").is_recomputed
        else:
            ends = layer.is_loss or layer.name in feeding_loss
            is_recomputed = (bool(layer.block) if blocks else not ends) and kind_of(layer.kind).is_recomputed
        if layer.block and key not in recomputed:
            places.append(Place(is_first=layer.name not in fed, is_recomputed=False, largest_zero=zero))
            continue
        places.append(
            Place(
                is_first=layer.name not in fed,
                is_recomputed=is_recomputed,
                begins_block=bool(layer.block) and key not in begun,
                repetitions=repetitions[layer.block],
                largest_zero=zero,
            )
        )
        begun.add(key)
    return tuple(places)


def _tied_layers(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the layers that share a weight with another layer."""
    return {
        name
        for layer in layers
        for parameter in layer.parameters
        if parameter.tied_to is not None
        for name in (layer.name, parameter.tied_to)
    }


def _layer_document(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "input_shape": list(layer.input_shape),
        "output_shape": list(layer.output_shape),
        "attributes": dict(layer.attributes),
        "parameters": [
            {
                **{"name": p.name, "shape": list(p.shape)},
                **({"tied_to": p.tied_to} if p.tied_to else {}),
                **({"frozen": True} if p.frozen else {}),
            }
            for p in layer.parameters
        ],
        "epilogue": list(layer.epilogue),
        "flops": layer.flops,
        "kept_elements": layer.kept_elements,
        "block": layer.block,
        "block_index": layer.block_index,
        "role": layer.role,
        "modules": list(layer.modules),
        **({"dropouts": list(layer.dropouts)} if layer.dropouts else {}),
        **({} if layer.program is None else {"program": layer.program.document()}),
        **({} if layer.scores is None else {"scores": layer.scores.document()}),
        **({} if layer.eps is None else {"eps": layer.eps}),
    }


def load_graph(path: str | os.PathLike[str]) -> LayerGraph:
    """Read a layer graph that :meth:`LayerGraph.save` or ``autoddl extract -o`` wrote.

    Args:
        path: the JSON file.

    Raises:
        UserError: the file cannot be read, or is not a valid graph.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     autoddl.models()[0].graph.save(os.path.join(folder, "graph.json"))
    ...     autoddl.load_graph(os.path.join(folder, "graph.json"))
    <LayerGraph gpt2: 114 layers, 124,475,904 parameters>
    """
    return graph_from_document(load_document(path, FORMAT).value, os.fspath(path))


def graph_from_document(value: Any, where: str) -> LayerGraph:
    """Read a graph from its parsed JSON document.

    Raises:
        UserError: a field is missing, unknown or out of range, or the graph is not a DAG.
    """
    fields = check_document(value, FORMAT, 1, where)
    edges = []
    for i, edge in enumerate(fields.sequence("edges")):
        if not (isinstance(edge, list) and len(edge) == 2 and all(isinstance(end, str) for end in edge)):
            raise UserError(f"{where}: edges[{i}] should be a pair of layer names")
        edges.append((edge[0], edge[1]))
    layers = tuple(_layer(entry) for entry in fields.objects("layers"))
    name, sample, notes = fields.text("name"), fields.text("sample"), fields.texts("notes")
    unused = fields.texts("unused") if "unused" in fields else ()
    fields.finish()
    try:
        return LayerGraph(name, sample, layers, tuple(edges), notes, unused)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _layer(fields: Fields) -> Layer:
    parameters = []
    for entry in fields.objects("parameters"):
        tied = entry.text("tied_to") if "tied_to" in entry else None
        is_frozen = entry.boolean("frozen") if "frozen" in entry else False
        parameters.append(Parameter(entry.text("name"), entry.integers("shape", 1), tied, is_frozen))
        entry.finish()
    attributes = fields.object("attributes")
    layer = Layer(
        name=fields.text("name"),
        kind=fields.text("kind"),
        input_shape=fields.integers("input_shape", 1),
        output_shape=fields.integers("output_shape", 1),
        attributes={name: attributes.integer(name) for name in attributes.value},
        parameters=tuple(parameters),
        epilogue=fields.texts("epilogue"),
        flops=fields.number("flops"),
        kept_elements=fields.integer("kept_elements"),
        block=fields.text("block"),
        block_index=fields.integer("block_index"),
        role=fields.text("role"),
        modules=fields.texts("modules"),
        dropouts=fields.texts("dropouts") if "dropouts" in fields else (),
        program=program_from_fields(fields.object("program")) if "program" in fields else None,
        scores=program_from_fields(fields.object("scores"), is_of_scores=True) if "scores" in fields else None,
        eps=fields.number("eps") if "eps" in fields else None,
    )
    fields.finish()
    return layer


def _validate(graph: LayerGraph) -> None:
    if not graph.layers:
        raise UserError(f"graph {graph.name!r} has no layers, should have at least one")
    if len(graph.layers) > MAX_LAYERS:
        raise UserError(
            f"graph {quote(graph.name)} has {len(graph.layers):,} layers, should have at most {MAX_LAYERS:,}"
        )
    position: dict[str, int] = {}
    for layer in graph.layers:
        if layer.name in position:
            raise UserError(f"layer {layer.name!r} appears twice, names should be unique")
        position[layer.name] = len(position)
        _validate_layer(layer)
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.tied_to is not None:
                _validate_tie(graph, position, layer, parameter)
    for source, target in graph.edges:
        for end in (source, target):
            if end not in position:
                raise UserError(f"edge {source!r} -> {target!r} names unknown layer {end!r}")
        if position[source] >= position[target]:
            raise UserError(f"edge {source!r} -> {target!r} runs backwards, layers should be in topological order")


def _validate_tie(graph: LayerGraph, position: Mapping[str, int], layer: Layer, parameter: Parameter) -> None:
    """Check that a weight is tied to an earlier layer of the same kind, or ties an embedding and a linear layer."""
    what = f"layer {layer.name!r}: {parameter.name} is tied to"
    if parameter.tied_to is None or parameter.tied_to not in position:
        raise UserError(f"{what} unknown layer {parameter.tied_to!r}")
    owner = graph.layers[position[parameter.tied_to]]
    if position[owner.name] >= position[layer.name]:
        raise UserError(f"{what} {owner.name!r}, which should come before it")
    if not kind_of(layer.kind).shares_weights_with(kind_of(owner.kind)):
        raise UserError(
            f"{what} {owner.name!r}, a {owner.kind} layer; it should be of the same kind as this {layer.kind}"
        )
    if parameter.num_elements not in {other.num_elements for other in owner.parameters}:
        raise UserError(f"{what} {owner.name!r}, which has no parameter of {parameter.num_elements} elements")


def _validate_layer(layer: Layer) -> None:
    try:
        kind = kind_of(layer.kind)
    except UserError as error:
        raise UserError(f"layer {layer.name!r}: {error}") from None
    expected, given = set(kind.attributes), set(layer.attributes)
    if expected != given - kind.optional_attributes:
        raise UserError(
            f"layer {layer.name!r}: attributes of a {layer.kind} are {sorted(expected)}, not {shortened(str(sorted(given)))}"
        )
    for name, value in layer.attributes.items():
        if value < 1 and name not in kind.may_be_zero:
            raise UserError(f"layer {layer.name!r}: {name} is {value}, should be at least 1")
    if not layer.input_shape or not layer.output_shape:
        raise UserError(f"layer {layer.name!r}: its input and output shape should have at least one dimension")
    for shape in (layer.input_shape, layer.output_shape, *(parameter.shape for parameter in layer.parameters)):
        if len(shape) > MAX_DIMS:
            raise UserError(
                f"layer {layer.name!r}: a shape has {len(shape)} dimensions, should have at most {MAX_DIMS}"
            )
        if math.prod(shape) > MAX_TENSOR:
            raise UserError(f"layer {layer.name!r}: shape {shape} should have at most {MAX_TENSOR} elements")
    if layer.flops > MAX_FLOPS:
        raise UserError(f"layer {layer.name!r}: flops is {layer.flops:g}, should be at most {MAX_FLOPS:g}")
    for name, length in kind.lengths(layer).items():
        if layer.attributes.get(name) != length:
            raise UserError(f"layer {layer.name!r}: {name} is {layer.attributes.get(name)}, its shapes say {length}")
    if layer.block_index and not layer.block:
        raise UserError(f"layer {layer.name!r}: block_index {layer.block_index} without a block")
