"""Layers, the nodes of layer graphs, and their parameters.

Shapes are *per sample* (a sequence, an image, a row): ``output_shape`` is (rows, features) of the tensor that the layer hands on;
for images (channels, height, width).  The batch belongs to the plan, not to the model.  Element-wise operations (activation
functions, dropout, bias) belong to the layer they follow: its ``epilogue``.

``flops`` counts the forward pass of one sample, a multiply-add as two; only matrix products count, since all else is bound by
memory bandwidth. ``kept_elements`` counts the elements per sample that the backward pass keeps besides the layer's input
(activation functions' arguments, attention probabilities): split like the output.

A fused layer stands for several modules that read the same tensor: attention's query, key and value projections, or gate and up
projection of a gated MLP.  Its features are ordered by group (a group is a key-value head with its query heads; gate and up
alternate), so that an even split of the features gives whole heads, and pairs of gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .kinds.registry import kind_of

__all__ = ["Layer", "Parameter"]


@dataclass(frozen=True)
class Parameter:
    """A trained tensor.  ``tied_to`` names the layer whose parameter this one is (same storage)."""

    name: str
    shape: tuple[int, ...]
    tied_to: str | None = None

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Layer:
    """One node of a layer graph.

    Attributes:
        name: unique in the graph; the module path where there is one.
        kind: a registered one (:mod:`autoddl.costmodel.kinds`).
        input_shape, output_shape: per sample.
        attributes: whole numbers, as the kind demands.
        parameters: trained tensors, in the order of the module.
        epilogue: element-wise operations that follow, such as ("gelu",).
        flops: forward FLOPs per sample.
        kept_elements: elements per sample that the backward pass keeps besides the input.
        block: the repeated block that the layer belongs to, such as "blocks"; empty outside of one.
        block_index: which repetition.
        role: the layer's place inside its block, such as "mlp.fc1": equal over the repetitions.
        modules: the module paths that the layer stands for (more than one where layers were fused).
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

    @property
    def num_parameters(self) -> int:
        """Trained elements, those tied to another layer not counted."""
        return sum(p.num_elements for p in self.parameters if p.tied_to is None)

    @property
    def rows(self) -> int:
        """Rows per sample: the sequence length of a transformer, 1 of a perceptron."""
        rows = 1
        for length in self.output_shape[:-1]:
            rows *= length
        return rows

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
        count = 1
        for length in self.input_shape:
            count *= length
        return count

    def signature(self) -> tuple[Any, ...]:
        """What two layers have in common that can be given the same strategy at the same cost."""
        return (
            self.kind,
            self.input_shape,
            self.output_shape,
            tuple(sorted(self.attributes.items())),
            tuple((p.shape, p.tied_to is None) for p in self.parameters),
            self.epilogue,
            self.flops,
            self.kept_elements,
        )

    def describe(self) -> str:
        """Name, kind and shapes, for errors and reports."""
        return f"{self.name} ({self.kind}, {kind_of(self.kind).shape_text(self)})"
