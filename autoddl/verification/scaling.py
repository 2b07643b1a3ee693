"""Reduces the sizes of a planned model to the limits of the machine, with unchanged strategies.

Every layer keeps its (p0, p1, p2) for each network level, and every pair of strategies of two adjacent layers in the plan remains.
Sizes are reduced one after the other, in the order of this table, each only as far as necessary:

==================  =================================================  ========  =========================================
size                reduction                                          saves     lower limit
==================  =================================================  ========  =========================================
repeated blocks     two of every run of blocks with equal strategies   memory    none
vocabulary          half, rounded to a multiple of the number of       memory    128 entries
                    devices
heads, head size    half the heads, then half the head size; the       memory    8 features per head; the strategies
                    widths of the model and of its MLP follow                    divide the layers
micro-batches       two                                                time      none
samples             half                                               time      every p0 divides the samples
sequence            half                                               time      16 tokens
==================  =================================================  ========  =========================================

If the time is still too long, the first three sizes are reduced further.  Of a perceptron, the widest layers are halved; of a VGG,
the image and the dense layers.  A model that is not built in keeps its sizes: only its batch is reduced.

In a pipeline (`PipelineConstraints`), a run of equal blocks ends at the end of a stage, so that every stage keeps some blocks.  The
layouts of the stages' inputs also have to divide their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes
from autoddl.costmodel.workload import Workload

from ..zoo.builtin import BuiltIn, MLPSizes, ResNetSizes, VGGSizes
from ..zoo.mixtures import Mixture
from ..zoo.transformers import Transformer

__all__ = [
    "Change",
    "Limits",
    "PipelineConstraints",
    "ScaledModel",
    "needed_flops",
    "needed_memory_bytes",
    "scale",
    "without_stages",
]

_Sizes = Union[Transformer, MLPSizes, VGGSizes, ResNetSizes]

#: Micro-batches of a step after the reduction.
REDUCED_MICRO_BATCHES = 2
#: Blocks that remain of a run of blocks with equal strategies.
REDUCED_RUN_LENGTH = 2
#: Tokens of the shortest sequence.
MIN_SEQUENCE = 16
#: Entries of the smallest vocabulary.
MIN_VOCABULARY = 128
#: Features of the smallest head.
MIN_HEAD_DIM = 8
#: Pixels of the shortest side of an image; sides are multiples of it.
MIN_IMAGE = 32
#: Copies of all parameters on every rank: the module, the gradients, the expected values of both, and the gathered values of both.
COPIES_PER_RANK = 6
#: Forward and backward passes over a batch, those of the plan and of the reference together.
NUM_PASSES = 9
#: Bytes of one element of a tensor in single precision.
_ITEMSIZE = 4


@dataclass(frozen=True)
class Limits:
    """The resources that all ranks together may use.

    Attributes:
        memory_bytes: Bytes of memory.
        flops: FLOPs of the whole verification.
    """

    memory_bytes: float = math.inf
    flops: float = math.inf


@dataclass(frozen=True)
class Change:
    """A size that was reduced.

    Attributes:
        what: Name of the size.
        before: Value in the plan.
        after: Value in the verification.
    """

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what} {self.before} -> {self.after}"


@dataclass(frozen=True)
class PipelineConstraints:
    """The constraints of a pipeline on the sizes of its model.

    Attributes:
        stage_of: Stage of each layer, by layer name.  Stages ascend in the order of layers.
        entries: Strategy whose layout the input of a stage has, by stage.  Stages without an entry use the layout of their first
            layer.
        num_ranks: Number of ranks of all stages and replicas.
        num_sample_parts: A micro-batch is a multiple of the least common multiple of all p0, times this number.
        min_micro_batches: Smallest number of micro-batches of a step.
    """

    stage_of: Mapping[str, int]
    entries: Mapping[int, Strategy]
    num_ranks: int
    num_sample_parts: int = 1
    min_micro_batches: int = REDUCED_MICRO_BATCHES


@dataclass(frozen=True)
class ScaledModel:
    """A model with its strategies and its workload, after the reduction of its sizes.

    Attributes:
        graph: Layer graph of the model.
        strategies: Strategies, by layer name.
        workload: Workload of one update.
        built_in: The built-in model.  None if a user's function returns the model.
        changes: Sizes that were reduced.
        stage_of: Stage of each layer, by layer name; 0 for all layers without a pipeline.
    """

    graph: LayerGraph
    strategies: Mapping[str, Strategy]
    workload: Workload
    built_in: BuiltIn | None
    changes: tuple[Change, ...] = ()
    stage_of: Mapping[str, int] = field(default_factory=dict)


def needed_memory_bytes(graph: LayerGraph, workload: Workload, num_ranks: int) -> float:
    """Estimate the memory of a verification: the parameters of ``num_ranks`` ranks, and the activations of plan and reference."""
    kept = sum(layer.kept_elements + layer.input_elements for layer in graph.layers)
    return _ITEMSIZE * (COPIES_PER_RANK * num_ranks * graph.num_parameters + 2 * workload.batch * kept)


def needed_flops(graph: LayerGraph, workload: Workload) -> float:
    """Estimate the FLOPs of a verification; a backward pass counts as two forward passes."""
    return 3 * NUM_PASSES * graph.flops * workload.batch


def scale(
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    limits: Limits,
    built_in: BuiltIn | None,
    constraints: PipelineConstraints | None = None,
) -> ScaledModel:
    """Reduce the sizes of a model until it is within the limits.

    Args:
        graph: Layer graph of the model.
        strategies: Strategies, by layer name.
        workload: Workload of one update.
        limits: Memory and FLOPs that all ranks together may use.
        built_in: The built-in model of the graph (see :func:`autoddl.zoo.builtin.recognise`).  None if its sizes cannot be
            changed.
        constraints: Constraints of the pipeline; None without a pipeline.

    Raises:
        UserError: If the model is not within the limits even with the smallest sizes.
    """
    original = model = _model(graph, strategies, workload, built_in, constraints)
    for smaller in _reductions(model, limits):
        model = smaller
    if not model.fits(limits):
        memory = needed_memory_bytes(model.graph, model.workload, model.num_ranks)
        changes = ", ".join(map(str, _changes(original, model)))
        remedy = (
            "plan for fewer devices"
            if built_in
            else "only the batch of your own model is scaled down: let FILE.py:FUNCTION return a smaller one, plan it and verify it"
        )
        raise UserError(
            f"{graph.name} is too large to be verified here{f', also scaled down ({changes})' if changes else ''}: "
            f"{model.num_ranks} ranks need about {format_bytes(memory)} ({format_bytes(limits.memory_bytes)} are available) and "
            f"{needed_flops(model.graph, model.workload):.2g} FLOPs ({limits.flops:.2g} are allowed); {remedy}, "
            "or give full_size=True to run it as it is"
        )
    return model.scaled(_changes(original, model))


def without_stages(
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    built_in: BuiltIn,
    constraints: PipelineConstraints,
    remaining: Sequence[int],
) -> ScaledModel | None:
    """Remove the blocks of some stages from a transformer.

    Args:
        graph: Layer graph of the model.
        strategies: Strategies, by layer name.
        workload: Workload of one update.
        built_in: The built-in model of the graph.
        constraints: Constraints of all stages of the pipeline.
        remaining: Numbers of the remaining stages, including the first and the last one.  They are numbered from 0 in the result.

    Returns:
        None if a removed stage consists of anything but whole blocks of a transformer.
    """
    model = _model(graph, strategies, workload, built_in, constraints)
    sizes = _transformer_sizes(model)
    is_removed = {layer.name: constraints.stage_of[layer.name] not in remaining for layer in graph.layers}
    removed_blocks = {layer.block_index for layer in graph.layers if is_removed[layer.name]}
    # All layers of a removed block are removed, and no layer outside of blocks.
    if sizes is None or any(
        is_removed[layer.name] != (layer.block_index in removed_blocks) for layer in graph.layers if layer.block
    ):
        return None
    if any(is_removed[layer.name] for layer in graph.layers if not layer.block):
        return None
    blocks = tuple(index for index in range(sizes.layers) if index not in removed_blocks)
    # Number the remaining stages from 0.
    new_number = {stage: number for number, stage in enumerate(remaining)}
    entries = {new_number[stage]: entry for stage, entry in constraints.entries.items() if stage in new_number}
    stage_of = {name: new_number.get(stage, -1) for name, stage in constraints.stage_of.items()}
    model = replace(model, constraints=replace(constraints, stage_of=stage_of, entries=entries))
    smaller = model.resized(replace(sizes, layers=len(blocks)), blocks)
    return None if smaller is None else smaller.scaled(())


def _model(
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    workload: Workload,
    built_in: BuiltIn | None,
    constraints: PipelineConstraints | None,
) -> _Model:
    if constraints is None:
        num_ranks = next(iter(strategies.values())).num_devices
        constraints = PipelineConstraints({layer.name: 0 for layer in graph.layers}, {}, num_ranks)
    return _Model(graph, dict(strategies), workload, built_in, constraints)


@dataclass(frozen=True)
class _Model:
    """A model between two reductions of its sizes; see `ScaledModel` and `PipelineConstraints` for the attributes."""

    graph: LayerGraph
    strategies: dict[str, Strategy]
    workload: Workload
    built_in: BuiltIn | None
    constraints: PipelineConstraints

    @property
    def num_ranks(self) -> int:
        return self.constraints.num_ranks

    @property
    def num_parts(self) -> int:
        """Reduced sizes are multiples of this number, so that every strategy divides them."""
        return math.lcm(*{strategy.num_devices for strategy in self.strategies.values()})

    def scaled(self, changes: tuple[Change, ...]) -> ScaledModel:
        """Return the model as the result of the reductions."""
        stage_of = self.constraints.stage_of
        return ScaledModel(self.graph, self.strategies, self.workload, self.built_in, changes, stage_of)

    def parameters_fit(self, limits: Limits) -> bool:
        """Return whether the parameters use at most half of the memory; the other half is for activations."""
        return _ITEMSIZE * COPIES_PER_RANK * self.num_ranks * self.graph.num_parameters <= limits.memory_bytes / 2

    def fits(self, limits: Limits) -> bool:
        """Return whether the memory and the FLOPs are within the limits."""
        memory_bytes = needed_memory_bytes(self.graph, self.workload, self.num_ranks)
        return memory_bytes <= limits.memory_bytes and needed_flops(self.graph, self.workload) <= limits.flops

    def resized(self, sizes: _Sizes, blocks: tuple[int, ...] | None = None) -> _Model | None:
        """Return the model with other sizes.

        Args:
            sizes: The new sizes of the built-in model.
            blocks: Index in this model of each block of the new model.  None: all blocks remain.

        Returns:
            None if the sizes are invalid, or if a strategy or an entry of a stage does not divide them.
        """
        assert self.built_in is not None
        built_in = replace(self.built_in, sizes=sizes)
        try:
            graph = built_in.graph()
        except UserError:
            return None
        names = {(layer.block, layer.block_index, layer.role): layer.name for layer in self.graph.layers if layer.block}
        strategies, stage_of = {}, {}
        for layer in graph.layers:
            index = layer.block_index if blocks is None else blocks[layer.block_index]
            name = names[layer.block, index, layer.role] if layer.block else layer.name
            strategies[layer.name], stage_of[layer.name] = self.strategies[name], self.constraints.stage_of[name]
            strategy = self.strategies[name]
            is_shared = strategy.fits(self.graph[name], self.workload.micro_batch)
            if not strategy.divides(layer) or (is_shared and not strategy.fits(layer, self.workload.micro_batch)):
                return None
        constraints = replace(self.constraints, stage_of=stage_of)
        if not _entries_divide(graph, constraints):
            return None
        return _Model(graph, strategies, self.workload, built_in, constraints)


def _entries_divide(graph: LayerGraph, constraints: PipelineConstraints) -> bool:
    """Return whether the entry of every stage divides the features of the tensor that enters the stage."""
    for before, layer in zip(graph.layers, graph.layers[1:]):
        entry = constraints.entries.get(constraints.stage_of[layer.name])
        if entry is not None and constraints.stage_of[before.name] != constraints.stage_of[layer.name]:
            num_parts = math.prod(features for _, features, *_ in entry.rows_and_features)
            if edge_shape(before, 1)[1] % num_parts:
                return False
    return True


def _reductions(model: _Model, limits: Limits) -> Iterator[_Model]:
    """Yield smaller and smaller models; the last one is the first that is within the limits, or the smallest one."""
    parameter_reductions = (_fewer_blocks, _smaller_vocabulary, _narrower)
    pass_reductions = (_fewer_micro_batches, _fewer_blocks, _fewer_samples, _shorter_sequence)
    # Reduce the parameters to half of the memory.
    for reduce in parameter_reductions:
        while not model.parameters_fit(limits) and (smaller := reduce(model)) is not None:
            model = smaller
            yield model
    # Reduce the activations and the FLOPs; if that does not suffice, the parameters again.
    for reduce in (*pass_reductions, *parameter_reductions):
        while not model.fits(limits) and (smaller := reduce(model)) is not None:
            model = smaller
            yield model


# ---- Reductions: each returns None if it is not possible --------------------------------------------------------------------


def _fewer_micro_batches(model: _Model) -> _Model | None:
    workload, num_micro_batches = model.workload, model.constraints.min_micro_batches
    if workload.num_micro_batches <= num_micro_batches:
        return None
    return replace(model, workload=replace(workload, batch=num_micro_batches * workload.micro_batch))


def _fewer_samples(model: _Model) -> _Model | None:
    """Halve the micro-batch, rounded to a multiple of the parts that it is divided into."""
    workload, constraints = model.workload, model.constraints
    p0s = (strategy.p0 for strategy in (*model.strategies.values(), *constraints.entries.values()))
    num_parts = math.lcm(*p0s) * constraints.num_sample_parts
    samples_per_part = workload.micro_batch // num_parts // 2
    if not samples_per_part:
        return None
    micro_batch = samples_per_part * num_parts
    smaller = replace(workload, micro_batch=micro_batch, batch=micro_batch * workload.num_micro_batches)
    return replace(model, workload=smaller)


def _fewer_blocks(model: _Model) -> _Model | None:
    """Keep the first `REDUCED_RUN_LENGTH` blocks of every run of blocks with equal strategies in one stage."""
    sizes = _transformer_sizes(model)
    if sizes is None:
        return None
    # Stage and strategy of each role, by block.
    by_role: list[dict[str, tuple[int, Strategy]]] = [{} for _ in range(sizes.layers)]
    for layer in model.graph.layers:
        if layer.block:
            stage = model.constraints.stage_of[layer.name]
            by_role[layer.block_index][layer.role] = stage, model.strategies[layer.name]
    blocks: list[int] = []
    for index, own in enumerate(by_role):
        if [by_role[before] for before in blocks[-REDUCED_RUN_LENGTH:]] != [own] * REDUCED_RUN_LENGTH:
            blocks.append(index)
    if len(blocks) == sizes.layers:
        return None
    fewer: dict[str, Any] = {"layers": len(blocks)}
    if isinstance(sizes, Mixture):
        fewer["dense_layers"] = sum(index < sizes.dense_layers for index in blocks)
    return model.resized(replace(sizes, **fewer), tuple(blocks))


def _shorter_sequence(model: _Model) -> _Model | None:
    sizes = _transformer_sizes(model)
    if sizes is None or sizes.sequence // 2 < MIN_SEQUENCE:
        return None
    return model.resized(replace(sizes, sequence=sizes.sequence // 2, positions=sizes.positions // 2))


def _smaller_vocabulary(model: _Model) -> _Model | None:
    sizes = _transformer_sizes(model)
    if sizes is None:
        return None
    vocabulary = _half(sizes.vocabulary, model.num_parts)
    if vocabulary < min(MIN_VOCABULARY, sizes.vocabulary):
        return None
    return model.resized(replace(sizes, vocabulary=vocabulary))


def _narrower(model: _Model) -> _Model | None:
    """Return the first narrower model that the strategies divide."""
    if model.built_in is None:
        return None
    sizes = model.built_in.sizes
    candidates: Iterator[_Sizes]
    if isinstance(sizes, Transformer):
        candidates = _narrower_transformers(sizes, model.num_parts)
    elif isinstance(sizes, MLPSizes):
        candidates = _narrower_perceptrons(sizes, model.num_parts)
    else:
        candidates = _smaller_images(sizes, model.num_parts)
    resized_models = (model.resized(candidate) for candidate in candidates)
    return next((resized for resized in resized_models if resized is not None), None)


def _narrower_transformers(sizes: Transformer, num_parts: int) -> Iterator[Transformer]:
    """Yield transformers of at most half the width: with fewer heads first, then with smaller heads."""
    kv_heads, head_dim = sizes.kv_heads or sizes.heads, sizes.head_dim or sizes.width // sizes.heads
    heads_per_group = sizes.heads // kv_heads
    heads_width = sizes.heads * head_dim

    def resized(kv_heads: int, head_dim: int) -> Transformer:
        heads = kv_heads * heads_per_group
        width = heads * head_dim
        factor = width / heads_width
        if sizes.width != heads_width:  # the width of the model is not that of its heads
            width = _rounded(sizes.width * factor, num_parts)
        inside: dict[str, Any] = {}
        if isinstance(sizes, Mixture):
            inside = {"expert_width": _rounded(sizes.expert_width * factor, num_parts)}
            if sizes.shared_width:
                inside["shared_width"] = _rounded(sizes.shared_width * factor, num_parts)
        return replace(
            sizes,
            **inside,
            width=width,
            heads=heads,
            kv_heads=kv_heads if sizes.kv_heads else 0,
            head_dim=head_dim if sizes.head_dim else 0,
            intermediate=_rounded(sizes.mlp_width * factor, num_parts),
        )

    for fewer in range(kv_heads // 2, 0, -1):
        yield resized(fewer, head_dim)
    while head_dim // 2 >= MIN_HEAD_DIM:
        head_dim //= 2
        yield resized(kv_heads, head_dim)


def _narrower_perceptrons(sizes: MLPSizes, num_parts: int) -> Iterator[MLPSizes]:
    """Yield perceptrons in which all layers of one width are halved, beginning with the largest width."""
    for width in sorted(set(sizes.widths), reverse=True):
        half = _half(width, num_parts)
        if half >= num_parts:
            yield MLPSizes(tuple(half if other == width else other for other in sizes.widths))


def _smaller_images(sizes: VGGSizes | ResNetSizes, num_parts: int) -> Iterator[VGGSizes | ResNetSizes]:
    """Yield models of smaller images, then with fewer channels or narrower dense layers."""
    image = sizes.image // 2 // MIN_IMAGE * MIN_IMAGE
    if image:
        yield replace(sizes, image=image)
    if isinstance(sizes, ResNetSizes):
        if _half(sizes.width, num_parts):
            yield replace(sizes, width=_half(sizes.width, num_parts))
    elif _half(sizes.hidden, num_parts):
        yield replace(sizes, hidden=_half(sizes.hidden, num_parts))


def _half(size: int, multiple: int) -> int:
    """Return half of a size, rounded down to a multiple; may be 0."""
    return size // 2 // multiple * multiple


def _rounded(size: float, multiple: int) -> int:
    """Return the multiple that is nearest to a size; at least one times."""
    return max(1, round(size / multiple)) * multiple


def _transformer_sizes(model: _Model) -> Transformer | None:
    sizes = model.built_in.sizes if model.built_in else None
    return sizes if isinstance(sizes, Transformer) else None


# ---- Changes -----------------------------------------------------------------------------------------------------------------


def _changes(before: _Model, after: _Model) -> tuple[Change, ...]:
    pairs = zip(_named_sizes(before), _named_sizes(after))
    return tuple(Change(name, old, new) for (name, old), (_, new) in pairs if old != new)


def _named_sizes(model: _Model) -> list[tuple[str, str]]:
    """Return the sizes of a model and of its workload, with the names that users see."""
    workload, sizes = model.workload, model.built_in.sizes if model.built_in else None
    named: list[tuple[str, object]] = []
    if isinstance(sizes, Transformer):
        named += [("blocks", sizes.layers), ("width", sizes.width), ("MLP width", sizes.mlp_width)]
        named += [("heads", sizes.heads), *([("key-value heads", sizes.kv_heads)] if sizes.kv_heads else [])]
        named += [("head size", sizes.head_dim or sizes.width // sizes.heads)]
        if isinstance(sizes, Mixture):
            named += [("expert width", sizes.expert_width), ("shared width", sizes.shared_width)]
            named += [("slots of an expert", sizes.capacity)]
        named += [("sequence", sizes.sequence), ("positions", sizes.num_positions), ("vocabulary", sizes.vocabulary)]
    elif isinstance(sizes, MLPSizes):
        named += [("widths", ",".join(map(str, sizes.widths)))]
    elif isinstance(sizes, VGGSizes):
        named += [("image", sizes.image), ("dense width", sizes.hidden)]
    elif isinstance(sizes, ResNetSizes):
        named += [("image", sizes.image), ("channels", sizes.width)]
    named += [("batch", workload.batch), ("micro-batch", workload.micro_batch)]
    return [(name, str(value)) for name, value in named]
