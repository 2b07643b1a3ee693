"""Layers, the nodes of layer graphs, and their parameters.

Shapes are *per sample* (a sequence, an image, a row): ``output_shape`` is (rows, features) of the layer's output; for images
(channels, height, width).  The batch belongs to the plan, not to the model.  Element-wise operations (activation functions,
dropout, bias) belong to the layer that they follow and form its ``epilogue``.

``flops`` counts the forward pass of one sample, a multiply-add as two.  Only matrix products count, since all other operations
are bound by memory bandwidth.  ``kept_elements`` counts the elements per sample that are kept for the backward pass besides the
layer's input (arguments of activation functions, attention probabilities), without the masks of dropouts.  They are split like the
output.

A fused layer stands for several modules that read the same tensor: the query, key and value projections of attention, or the
gate and up projections of a gated MLP.  Its features are ordered by group: a group is a key-value head with its query heads, or
one feature of gate and one of up.  So an even split of the features cuts no group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from .kinds.epilogue import LOSSES
from .kinds.registry import kind_of
from .program import Program

__all__ = ["Layer", "Parameter", "Place", "zero_of"]


@dataclass(frozen=True)
class Place:
    """What the place of a layer in its graph says about its work.

    Attributes:
        is_first: Whether the layer reads the data itself; then it gathers no input and computes no gradient for it.
        is_recomputed: Whether recomputation runs the layer again: it is in a repeated block, or its model has no blocks and it
            neither computes the loss nor is followed by the loss alone.  The backward pass of the layers at the end of a model
            follows their forward pass directly, so that recomputation would save nothing.
        begins_block: Whether it is the first layer of a repetition of a block that recomputation runs again.
        repetitions: Number of repetitions of its block in the graph that recomputation runs again; 0 outside of them.
        largest_zero: The most that the layer's parameters can be divided (ZeRO, :mod:`.strategy`): 1 if it shares a weight with
            another layer of the model, of its stage or of another one, otherwise 3.
    """

    is_first: bool = False
    is_recomputed: bool = True
    begins_block: bool = False
    repetitions: int = 0
    largest_zero: int = 3


@dataclass(frozen=True)
class Parameter:
    """A trained tensor, or a frozen one.

    Attributes:
        name: qualified name in the module, such as "blocks.0.mlp.fc1.weight".
        shape: its shape.
        tied_to: name of the earlier layer whose parameter has the same storage; None if the parameter is not shared.
        frozen: whether it is not trained: it has no gradient and no states of an optimizer.
    """

    name: str
    shape: tuple[int, ...]
    tied_to: str | None = None
    frozen: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layer:
    """One node of a layer graph.

    Attributes:
        name: unique in the graph; the module path if there is one.
        kind: name of a registered kind (:mod:`autoddl.costmodel.kinds`).
        input_shape, output_shape: per sample.
        attributes: integers, as the kind requires.
        parameters: trained tensors, in the order of the module.
        epilogue: element-wise operations that follow, such as ("gelu",).
        flops: forward FLOPs per sample.
        kept_elements: elements per sample that are kept for the backward pass besides the input and the masks of dropouts.
        block: the repeated block that the layer belongs to, such as "blocks"; empty if none.
        block_index: index of the repetition.
        role: name of the layer inside its block, such as "mlp.fc1"; equal in all repetitions.
        modules: the module paths that the layer stands for; several for a fused layer.
        dropouts: names of the random numbers of its dropouts in a traced model, those of the epilogue first.
        program: the operators of an opaque layer of a traced model. Of another layer without producers: what computes its data
            from the inputs of the model; None if it reads the first of them as it is.
        eps: what a norm of a traced model adds to the variance; None if its module says it.
        scores: what attention of a traced model does to its scores before the softmax; None if nothing but a causal mask.
    """

    name: str
    kind: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    attributes: Mapping[str, int] = field(default_factory=dict, hash=False)
    parameters: tuple[Parameter, ...] = ()
    epilogue: tuple[str, ...] = ()
    flops: float = 0.0
    kept_elements: int = 0
    block: str = ""
    block_index: int = 0
    role: str = ""
    modules: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    program: Program | None = None
    scores: Program | None = None
    eps: float | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that run with the layer."""
        return tuple(program for program in (self.program, self.scores) if program is not None)

    @property
    def num_parameters(self) -> int:
        """Number of trained elements, without those tied to another layer."""
        return sum(p.num_elements for p in self.parameters if p.tied_to is None and not p.frozen)

    @property
    def num_frozen(self) -> int:
        """Number of elements that are not trained, without those tied to another layer."""
        return sum(p.num_elements for p in self.parameters if p.tied_to is None and p.frozen)

    @property
    def is_image(self) -> bool:
        """Whether the layer reads and writes images: (channels, height, width)."""
        return len(self.input_shape) == len(self.output_shape) == 3

    @property
    def rows(self) -> int:
        """Rows per sample: the sequence length of a transformer, 1 for a perceptron."""
        return prod(self.output_shape[:-1])

    @property
    def features(self) -> int:
        """The last dimension of the output."""
        return self.output_shape[-1] if self.output_shape else 1

    @property
    def output_elements(self) -> int:
        """Elements of the output per sample."""
        return self.rows * self.features

    @property
    def input_elements(self) -> int:
        """Elements of the input per sample."""
        return prod(self.input_shape)

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks of dropouts per sample, which are kept for the backward pass: one per element in every precision."""
        own = kind_of(self.kind).dropped_elements(self)
        return self.epilogue.count("dropout") * self.output_elements + own

    @property
    def keeps_own(self) -> bool:
        """Whether the layer keeps anything for the backward pass besides its input."""
        return self.kept_elements > 0 or self.mask_bytes > 0

    @property
    def is_loss(self) -> bool:
        """Whether the layer computes a loss: its kind is a loss, or its epilogue has an element-wise loss."""
        computes_loss = self.program is not None and self.program.is_loss
        return kind_of(self.kind).is_loss or not LOSSES.isdisjoint(self.epilogue) or computes_loss

    def signature(self) -> tuple[Any, ...]:
        """A key: layers with equal signatures have the same strategies at the same costs."""
        return self._signature

    @cached_property
    def _signature(self) -> tuple[Any, ...]:
        return (
            self.kind,
            self.input_shape,
            self.output_shape,
            tuple(sorted(self.attributes.items())),
            tuple((p.shape, p.tied_to is None, p.frozen) for p in self.parameters),
            self.epilogue,
            self.flops,
            self.kept_elements,
            None if self.program is None else tuple(map(repr, self.program.crossings)),
        )

    def describe(self) -> str:
        """Name, kind and shape, for errors and reports."""
        return f"{self.name} ({self.kind}, {kind_of(self.kind).shape_text(self)})"


def zero_of(layer: Layer, zero: int, place: Place, floor: int = 0) -> int:
    """The stage of ZeRO that a layer has if ``zero`` is wanted: as much as its kind and weights that layers share allow.

    Args:
        layer: The layer.
        zero: The stage that its strategy has.
        place: The place of the layer in its graph.
        floor: The stage that the workload wants of all layers.

    >>> from .kinds.norm import norm
    >>> zero_of(norm("norm", 4, 8), 3, Place())
    2
    """
    if layer.num_frozen:
        return 0
    return min(max(zero, floor), place.largest_zero, 3 if kind_of(layer.kind).gathers_weights else 2)
