"""Making a planned model small enough for the machine at hand, with the strategies kept.

Nothing that a strategy decides changes: every layer keeps its (p0, p1, p2) per level, and every pair of neighbours that the plan
has is still there.  What shrinks are lengths, one after the other, each only as far as it is needed:

==================  =================================================  ================  =================================
length              becomes                                            for the sake of   as long as
==================  =================================================  ================  =================================
repeated blocks     two of every run of blocks with equal strategies   memory
vocabulary          half, a multiple of the number of devices          memory            it has 128 entries
heads, head size    half as many, then half as wide; the width of the  memory            the strategies divide
                    model and of its MLP follow
micro-batches       two                                                time
samples             half as many                                       time              every p0 divides them
sequence            half as long                                       time              it has 16 tokens
==================  =================================================  ================  =================================

(Where that does not save time enough, the first three are shortened once more.)  Of a perceptron the widest layers are halved, of
VGG the images and the dense layers.  Models that are not built in keep their sizes: only the batch shrinks.

In a pipeline (`Staging`) a run of equal blocks ends where its stage does, so that every stage keeps some, and what stages take in
has to divide like everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes
from autoddl.costmodel.workload import Workload

from ..zoo.builtin import BuiltIn, MLPSizes, VGGSizes
from ..zoo.transformers import Transformer

__all__ = ["Change", "Limits", "Scaled", "Staging", "needed_flops", "needed_memory_bytes", "scale", "without_stages"]

MAX_MICRO_BATCHES = 2
LONGEST_RUN = 2
MIN_SEQUENCE = 16
MIN_VOCABULARY = 128
MIN_HEAD = 8
MIN_IMAGE = 32
#: Copies of all parameters on every rank: the module, its gradients, what they are compared with, what was gathered for it.
COPIES_PER_RANK = 6
#: Passes over a batch, forward and backward, on all ranks and on one device together.
NUM_PASSES = 9
_FLOAT32 = 4


@dataclass(frozen=True)
class Limits:
    """What all ranks together may take: bytes of memory, FLOPs of the whole verification."""

    memory_bytes: float = math.inf
    flops: float = math.inf


@dataclass(frozen=True)
class Change:
    """One length that was changed."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what} {self.before} -> {self.after}"


@dataclass(frozen=True)
class Staging:
    """What a pipeline says of how a model may be made smaller.

    Attributes:
        stage_of: the stage of each layer, by name; ascending in the order of layers.
        entries: the layout, as a strategy, of what a stage takes in, by stage; those without follow their layers.
        num_ranks: of all stages and replicas.
        row_parts: every micro-batch is divided in a multiple of so many parts, besides what strategies say.
        num_micro_batches: that a step has at least.
    """

    stage_of: Mapping[str, int]
    entries: Mapping[int, Strategy]
    num_ranks: int
    row_parts: int = 1
    num_micro_batches: int = MAX_MICRO_BATCHES


@dataclass(frozen=True)
class Scaled:
    """A model, its strategies and its workload, perhaps made smaller.

    Attributes:
        built_in: how the model is built; None where a user's function makes it.
        changes: what was changed; empty where nothing was.
        stage_of: the stage of each layer; all in the first one without a pipeline.
    """

    graph: LayerGraph
    strategies: Mapping[str, Strategy]
    workload: Workload
    built_in: BuiltIn | None
    changes: tuple[Change, ...] = ()
    stage_of: Mapping[str, int] = field(default_factory=dict)


def needed_memory_bytes(graph: LayerGraph, workload: Workload, num_ranks: int) -> float:
    """About how much memory ``num_ranks`` ranks and one device take to be compared."""
    kept = sum(layer.kept_elements + layer.input_elements for layer in graph.layers)
    return _FLOAT32 * (COPIES_PER_RANK * num_ranks * graph.num_parameters + 2 * workload.batch * kept)


def needed_flops(graph: LayerGraph, workload: Workload) -> float:
    """About how many FLOPs that takes."""
    return 3 * NUM_PASSES * graph.flops * workload.batch


def scale(
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    limits: Limits,
    built_in: BuiltIn | None,
    staging: Staging | None = None,
) -> Scaled:
    """The model within the limits, as large as halving allows.

    Args:
        built_in: the model that the graph is of (see :func:`autoddl.zoo.builtin.recognise`); None where it cannot be resized.
        staging: of a pipeline.

    Raises:
        UserError: the smallest that can be made of it is still too large.
    """
    given = shape = _shape(graph, strategies, workload, built_in, staging)
    for candidate in _smaller_ones(shape, limits):
        shape = candidate
    if not shape.fits(limits):
        memory = needed_memory_bytes(shape.graph, shape.workload, shape.num_ranks)
        raise UserError(
            f"{graph.name} is too large to be verified here: {shape.num_ranks} ranks need about {format_bytes(memory)} "
            f"(there are {format_bytes(limits.memory_bytes)}) and {needed_flops(shape.graph, shape.workload):.2g} FLOPs "
            f"(allowed are {limits.flops:.2g}); "
            + ("plan for fewer devices" if built_in else "only built-in models can be scaled down: plan a smaller one")
        )
    return Scaled(
        shape.graph, shape.strategies, shape.workload, shape.built_in, _changes(given, shape), shape.staging.stage_of
    )


def without_stages(
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    built_in: BuiltIn,
    staging: Staging,
    kept: Sequence[int],
) -> Scaled | None:
    """The model with the blocks of some stages alone, the first and the last one among them; they are numbered anew, from 0 on.

    None where the other stages have something else than whole blocks of a transformer.
    """
    shape = _shape(graph, strategies, workload, built_in, staging)
    sizes = _transformer(shape)
    is_lost = {layer.name: staging.stage_of[layer.name] not in kept for layer in graph.layers}
    blocks = {layer.block_index for layer in graph.layers if is_lost[layer.name]}
    if sizes is None or any(
        is_lost[layer.name] != (layer.block_index in blocks) for layer in graph.layers if layer.block
    ):
        return None
    if any(is_lost[layer.name] for layer in graph.layers if not layer.block):
        return None
    kept_blocks = tuple(index for index in range(sizes.layers) if index not in blocks)
    entries = {kept.index(stage): entry for stage, entry in staging.entries.items() if stage in kept}
    stage_of = {name: (kept.index(stage) if stage in kept else -1) for name, stage in staging.stage_of.items()}
    shape = replace(shape, staging=replace(staging, stage_of=stage_of, entries=entries))
    found = shape.rebuilt(_with(shape, replace(sizes, layers=len(kept_blocks))), kept_blocks)
    if found is None:
        return None
    return Scaled(found.graph, found.strategies, found.workload, found.built_in, (), found.staging.stage_of)


def _shape(
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    built_in: BuiltIn | None,
    staging: Staging | None,
) -> _Shape:
    if staging is None:
        num_ranks = next(iter(strategies.values())).num_devices
        staging = Staging({layer.name: 0 for layer in graph.layers}, {}, num_ranks)
    return _Shape(graph, dict(strategies), workload, built_in, staging)


@dataclass(frozen=True)
class _Shape:
    """A state on the way down."""

    graph: LayerGraph
    strategies: dict[str, Strategy]
    workload: Workload
    built_in: BuiltIn | None
    staging: Staging

    @property
    def num_ranks(self) -> int:
        return self.staging.num_ranks

    @property
    def num_parts(self) -> int:
        """What lengths are multiples of: as many parts as any layer may be cut in."""
        return math.lcm(*{strategy.num_devices for strategy in self.strategies.values()})

    def parameters_fit(self, limits: Limits) -> bool:
        """Whether they take half of the memory at most: the rest is for activations."""
        return _FLOAT32 * COPIES_PER_RANK * self.num_ranks * self.graph.num_parameters <= limits.memory_bytes / 2

    def fits(self, limits: Limits) -> bool:
        """Whether everything is within the limits."""
        memory_bytes = needed_memory_bytes(self.graph, self.workload, self.num_ranks)
        return memory_bytes <= limits.memory_bytes and needed_flops(self.graph, self.workload) <= limits.flops

    def rebuilt(self, built_in: BuiltIn, kept_blocks: tuple[int, ...] | None = None) -> _Shape | None:
        """With other sizes; None where a strategy would not divide them.  ``kept_blocks``: which blocks are left."""
        try:
            graph = built_in.graph()
        except UserError:
            return None
        sources = {
            (layer.block, layer.block_index, layer.role): layer.name for layer in self.graph.layers if layer.block
        }
        strategies, stage_of = {}, {}
        for layer in graph.layers:
            index = layer.block_index if kept_blocks is None else kept_blocks[layer.block_index]
            name = sources[layer.block, index, layer.role] if layer.block else layer.name
            strategies[layer.name], stage_of[layer.name] = self.strategies[name], self.staging.stage_of[name]
            if not self.strategies[name].divides(layer):
                return None
        staging = replace(self.staging, stage_of=stage_of)
        if not _entries_divide(graph, staging):
            return None
        return _Shape(graph, strategies, self.workload, built_in, staging)


def _entries_divide(graph: LayerGraph, staging: Staging) -> bool:
    """Whether what passes between stages can lie as they want it."""
    for before, layer in zip(graph.layers, graph.layers[1:]):
        entry = staging.entries.get(staging.stage_of[layer.name])
        if entry is not None and staging.stage_of[before.name] != staging.stage_of[layer.name]:
            parts = math.prod(features for _, features in entry.rows_and_features)
            if edge_shape(before, 1)[1] % parts:
                return False
    return True


def _smaller_ones(shape: _Shape, limits: Limits) -> Iterator[_Shape]:
    """Ever smaller shapes, ending with the first that is within the limits (or the smallest)."""
    of_parameters = (_fewer_blocks, _smaller_vocabulary, _narrower)
    of_passes = (_fewer_micro_batches, _fewer_blocks, _fewer_samples, _shorter_sequence)
    for reduce in of_parameters:
        while not shape.parameters_fit(limits) and (smaller := reduce(shape)) is not None:
            shape = smaller
            yield shape
    for reduce in (*of_passes, *of_parameters):
        while not shape.fits(limits) and (smaller := reduce(shape)) is not None:
            shape = smaller
            yield shape


# ---- One length after the other ------------------------------------------------------------------------------------------


def _fewer_micro_batches(shape: _Shape) -> _Shape | None:
    workload = shape.workload
    if workload.num_micro_batches <= shape.staging.num_micro_batches:
        return None
    fewer = replace(workload, batch=shape.staging.num_micro_batches * workload.micro_batch)
    return replace(shape, workload=fewer)


def _fewer_samples(shape: _Shape) -> _Shape | None:
    workload = shape.workload
    entries = shape.staging.entries.values()
    slices = math.lcm(*(strategy.p0 for strategy in (*shape.strategies.values(), *entries))) * shape.staging.row_parts
    per_slice = workload.micro_batch // slices // 2
    if not per_slice:
        return None
    micro_batch = per_slice * slices
    smaller = replace(workload, micro_batch=micro_batch, batch=micro_batch * workload.num_micro_batches)
    return replace(shape, workload=smaller)


def _fewer_blocks(shape: _Shape) -> _Shape | None:
    sizes = _transformer(shape)
    if sizes is None:
        return None
    chosen: list[dict[str, tuple[int, Strategy]]] = [{} for _ in range(sizes.layers)]
    for layer in shape.graph.layers:
        if layer.block:
            chosen[layer.block_index][layer.role] = shape.staging.stage_of[layer.name], shape.strategies[layer.name]
    kept: list[int] = []
    for index, strategies in enumerate(chosen):
        if [chosen[before] for before in kept[-LONGEST_RUN:]] != [strategies] * LONGEST_RUN:
            kept.append(index)
    if len(kept) == sizes.layers:
        return None
    return shape.rebuilt(_with(shape, replace(sizes, layers=len(kept))), tuple(kept))


def _shorter_sequence(shape: _Shape) -> _Shape | None:
    sizes = _transformer(shape)
    if sizes is None or sizes.sequence // 2 < MIN_SEQUENCE:
        return None
    sequence = sizes.sequence // 2
    return shape.rebuilt(_with(shape, replace(sizes, sequence=sequence, positions=sizes.positions // 2)))


def _smaller_vocabulary(shape: _Shape) -> _Shape | None:
    sizes = _transformer(shape)
    if sizes is None:
        return None
    vocabulary = _half(sizes.vocabulary, shape.num_parts)
    if vocabulary < min(MIN_VOCABULARY, sizes.vocabulary):
        return None
    return shape.rebuilt(_with(shape, replace(sizes, vocabulary=vocabulary)))


def _narrower(shape: _Shape) -> _Shape | None:
    candidates: Iterator[Transformer | MLPSizes | VGGSizes] = iter(())
    if shape.built_in is not None:
        sizes = shape.built_in.sizes
        if isinstance(sizes, Transformer):
            candidates = _narrower_transformers(sizes, shape.num_parts)
        elif isinstance(sizes, MLPSizes):
            candidates = _narrower_perceptrons(sizes, shape.num_parts)
        else:
            candidates = _smaller_pictures(sizes, shape.num_parts)
    return next((found for sizes in candidates if (found := shape.rebuilt(_with(shape, sizes)))), None)


def _narrower_transformers(sizes: Transformer, num_parts: int) -> Iterator[Transformer]:
    """At most half as wide, by fewer heads first."""
    kv_heads, head_dim = sizes.kv_heads or sizes.heads, sizes.head_dim or sizes.width // sizes.heads
    group = sizes.heads // kv_heads

    def resized(kv_heads: int, head_dim: int) -> Transformer:
        heads = kv_heads * group
        factor = heads * head_dim / (sizes.heads * (sizes.head_dim or sizes.width // sizes.heads))
        width = heads * head_dim
        if sizes.width != sizes.heads * (sizes.head_dim or sizes.width // sizes.heads):
            width = _multiple(sizes.width * factor, num_parts)  # heads that do not make up the width
        return replace(
            sizes,
            width=width,
            heads=heads,
            kv_heads=kv_heads if sizes.kv_heads else 0,
            head_dim=head_dim if sizes.head_dim else 0,
            intermediate=_multiple(sizes.mlp_width * factor, num_parts),
        )

    for fewer in range(kv_heads // 2, 0, -1):
        yield resized(fewer, head_dim)
    while head_dim // 2 >= MIN_HEAD:
        head_dim //= 2
        yield resized(kv_heads, head_dim)


def _narrower_perceptrons(sizes: MLPSizes, num_parts: int) -> Iterator[MLPSizes]:
    """With every layer of the largest width halved."""
    for width in sorted(set(sizes.widths), reverse=True):
        half = _half(width, num_parts)
        if half >= num_parts:
            yield MLPSizes(tuple(half if other == width else other for other in sizes.widths))


def _smaller_pictures(sizes: VGGSizes, num_parts: int) -> Iterator[VGGSizes]:
    image = sizes.image // 2 // MIN_IMAGE * MIN_IMAGE
    if image:
        yield replace(sizes, image=image)
    if _half(sizes.hidden, num_parts):
        yield replace(sizes, hidden=_half(sizes.hidden, num_parts))


def _half(length: int, multiple: int) -> int:
    return length // 2 // multiple * multiple


def _multiple(length: float, multiple: int) -> int:
    return max(1, round(length / multiple)) * multiple


def _transformer(shape: _Shape) -> Transformer | None:
    sizes = shape.built_in.sizes if shape.built_in else None
    return sizes if isinstance(sizes, Transformer) else None


def _with(shape: _Shape, sizes: Transformer | MLPSizes | VGGSizes) -> BuiltIn:
    assert shape.built_in is not None
    return replace(shape.built_in, sizes=sizes)


# ---- What was changed --------------------------------------------------------------------------------------------------------


def _changes(before: _Shape, after: _Shape) -> tuple[Change, ...]:
    lengths = zip(_lengths(before), _lengths(after))
    return tuple(Change(what, old, new) for (what, old), (_, new) in lengths if old != new)


def _lengths(shape: _Shape) -> list[tuple[str, str]]:
    workload, sizes = shape.workload, shape.built_in.sizes if shape.built_in else None
    found: list[tuple[str, object]] = []
    if isinstance(sizes, Transformer):
        found += [("blocks", sizes.layers), ("width", sizes.width), ("MLP width", sizes.mlp_width)]
        found += [("heads", sizes.heads), *([("key-value heads", sizes.kv_heads)] if sizes.kv_heads else [])]
        found += [("head size", sizes.head_dim or sizes.width // sizes.heads)]
        found += [("sequence", sizes.sequence), ("positions", sizes.num_positions), ("vocabulary", sizes.vocabulary)]
    elif isinstance(sizes, MLPSizes):
        found += [("widths", ",".join(map(str, sizes.widths)))]
    elif isinstance(sizes, VGGSizes):
        found += [("image", sizes.image), ("dense width", sizes.hidden)]
    found += [("batch", workload.batch), ("micro-batch", workload.micro_batch)]
    return [(what, str(value)) for what, value in found]
