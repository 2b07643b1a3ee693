"""A traced model as a graph of operators: plain data, free of OneFlow.

A tensor is one of

- *raw*: made from the model's inputs alone (token numbers, masks, images);
- *learned*: made from parameters and constants alone (a weight, its transpose, a table of positions);
- *constant*: made from neither (a causal mask, the numbers 0 to S - 1);
- *active*: made from inputs and parameters: what flows through the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

__all__ = [
    "CROSS_ENTROPIES",
    "ELEMENTWISE",
    "ELEMENTWISE_LOSSES",
    "LOOKUPS",
    "PRODUCTS",
    "REDUCTIONS",
    "SUMS",
    "UNARY",
    "VIEWS",
    "ModelTensor",
    "Operator",
    "OperatorGraph",
    "flops",
    "lookup_arguments",
]


def _names(table: str) -> frozenset[str]:
    return frozenset(table.split())


#: Element by element, of one tensor.
UNARY = _names(
    """
    abs cast celu clip_by_scalar clip_by_scalar_max clip_by_scalar_min copy cos dropout elu erf exp
    expm1 fast_gelu gelu hardshrink hardsigmoid hardswish hardtanh identity leaky_relu log log1p
    log_sigmoid mish negative quick_gelu reciprocal relu rsqrt scalar_add scalar_div scalar_mul
    scalar_pow scalar_reverse_pow selu sigmoid sigmoid_v2 silu sin softplus softshrink softsign sqrt
    square tanh threshold
    """
)
#: Element by element, of several tensors, where the result grows and shrinks with each of them.
SUMS = frozenset({"add_n", "broadcast_add", "broadcast_sub"})
PRODUCTS = frozenset({"broadcast_mul"})
ELEMENTWISE = (
    UNARY
    | SUMS
    | PRODUCTS
    | _names(
        """
    bias_add broadcast_div broadcast_maximum broadcast_minimum broadcast_pow masked_fill prelu
    scalar_logical_equal scalar_logical_greater scalar_logical_less where xdivy
        """
    )
)
#: Losses element by element, in one operator.
ELEMENTWISE_LOSSES = _names(
    """
    binary_cross_entropy binary_cross_entropy_with_logits binary_cross_entropy_with_logits_reduce_mean kl_div_loss
    smooth_l1_loss
    """
)
#: Cross entropy in one operator.
CROSS_ENTROPIES = frozenset({"sparse_softmax_cross_entropy", "sparse_cross_entropy"})
#: Rows of a table by their numbers (with a row for padding, which is not trained: the latter).
LOOKUPS = frozenset({"gather", "embedding"})
#: The same elements in another shape or order, or some of them.
VIEWS = frozenset({"expand", "expand_dims", "narrow", "reshape", "slice", "squeeze", "transpose"})
REDUCTIONS = frozenset({"reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "var"})
#: Where their operators' attributes hold the dimensions.
_REDUCED = ("axis", "dim")


@dataclass(frozen=True)
class ModelTensor:
    """A tensor that the model owns.

    Attributes:
        name: module path and attribute.
        shape: of the whole tensor.
        trained: a parameter; otherwise a buffer, or a tensor that the model does not know of.
        lower_triangular: whether what is not zero lies on and below the diagonal; None where that is not known.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    lower_triangular: bool | None = None


@dataclass(frozen=True)
class Operator:
    """One operator: its kind is OneFlow's name of it, its path that of the module that called it."""

    name: str
    kind: str
    path: str
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    results: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that it reads; those called a, in, x (and so on) before b, y."""
        return tuple(tensor for key in sorted(self.arguments) for tensor in self.arguments[key])

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Tensors that it makes, the main one first."""
        order = sorted(self.results, key=lambda key: (key not in ("out", "y", "z", "output"), key))
        return tuple(tensor for key in order for tensor in self.results[key])

    @property
    def output(self) -> str:
        """The main result."""
        return self.outputs[0]


@dataclass(frozen=True)
class OperatorGraph:
    """A traced model.

    Attributes:
        operators: in the order of execution.
        shapes: of every tensor, for the whole example batch.
        inputs: the model's inputs, as far as they have the batch in front.
        variables: tensors that the model owns.
        outputs: what the model returns.
        batch: samples in the example.
        aliases: all names of each parameter, (module path, attribute), by the name of its variable.
        parameters: names of all parameters of the model, traced or not.
        containers: paths of module lists, with the paths of their children in order.
        leaves: paths of modules without modules in them.
        modules: the model's modules by their paths, without the model itself.
        notes: what users should know about the trace.
    """

    operators: tuple[Operator, ...]
    shapes: Mapping[str, tuple[int, ...]]
    inputs: tuple[str, ...]
    variables: Mapping[str, ModelTensor]
    outputs: tuple[str, ...]
    batch: int
    aliases: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    containers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    leaves: frozenset[str] = frozenset()
    modules: Mapping[str, Any] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = ()

    @cached_property
    def producer(self) -> Mapping[str, Operator]:
        """Who makes a tensor; inputs and variables are nobody's."""
        return {tensor: op for op in self.operators for tensor in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Operator, ...]]:
        """Who reads a tensor (each reader once)."""
        table: dict[str, list[Operator]] = {}
        for op in self.operators:
            for tensor in dict.fromkeys(op.inputs):
                table.setdefault(tensor, []).append(op)
        return {tensor: tuple(ops) for tensor, ops in table.items()}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Place of an operator in the order of execution, by name."""
        return {op.name: i for i, op in enumerate(self.operators)}

    @cached_property
    def _from_data(self) -> frozenset[str]:
        return self._reached(self.inputs)

    @cached_property
    def _from_parameters(self) -> frozenset[str]:
        return self._reached(tensor for tensor, variable in self.variables.items() if variable.trained)

    def _reached(self, tensors: Iterable[str]) -> frozenset[str]:
        reached = set(tensors)
        for op in self.operators:
            if not reached.isdisjoint(op.inputs):
                reached.update(op.outputs)
        return frozenset(reached)

    def is_active(self, tensor: str) -> bool:
        """Made from inputs and parameters."""
        return tensor in self._from_data and tensor in self._from_parameters

    def is_raw(self, tensor: str) -> bool:
        """Made from inputs alone."""
        return tensor in self._from_data and tensor not in self._from_parameters

    def is_learned(self, tensor: str) -> bool:
        """Made from parameters, and from no input."""
        return tensor in self._from_parameters and tensor not in self._from_data

    def is_fixed(self, tensor: str) -> bool:
        """Made from no input: learned, or constant."""
        return tensor not in self._from_data

    def active_inputs(self, op: Operator) -> tuple[str, ...]:
        """Those of an operator's inputs that are active, each once."""
        return tuple(dict.fromkeys(tensor for tensor in op.inputs if self.is_active(tensor)))

    def data_inputs(self, op: Operator) -> tuple[str, ...]:
        """Those of an operator's inputs that are active or raw, each once."""
        return tuple(dict.fromkeys(tensor for tensor in op.inputs if not self.is_fixed(tensor)))

    def learned_inputs(self, op: Operator) -> tuple[str, ...]:
        """Those of an operator's inputs that are learned, each once."""
        return tuple(dict.fromkeys(tensor for tensor in op.inputs if self.is_learned(tensor)))

    def sole_consumer(self, tensor: str) -> Operator | None:
        """The one reader of a tensor that is not an output of the model; None where there are none or more."""
        readers = self.consumers.get(tensor, ())
        return readers[0] if len(readers) == 1 and tensor not in self.outputs else None

    def ancestors(self, tensor: str) -> list[Operator]:
        """All operators that a tensor is made by."""
        found: dict[str, Operator] = {}
        todo = [tensor]
        while todo:
            op = self.producer.get(todo.pop())
            if op is not None and op.name not in found:
                found[op.name] = op
                todo.extend(op.inputs)
        return list(found.values())

    def trained_variables(self, tensor: str) -> list[str]:
        """The parameters that a learned tensor is made from, in the order of their use."""
        tensors = [tensor, *(t for op in reversed(self.ancestors(tensor)) for t in op.inputs)]
        return list(dict.fromkeys(t for t in tensors if t in self.variables and self.variables[t].trained))

    def elements(self, tensor: str) -> int:
        """Elements of a tensor, the whole batch."""
        return math.prod(self.shapes[tensor])

    def rows_and_features(self, tensor: str) -> tuple[int, int]:
        """Of one sample, its features being the last dimension."""
        shape = self.shapes[tensor]
        features = shape[-1] if shape else 1
        return max(self.elements(tensor) // (self.batch * features), 1), features

    def sample_shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of one sample's share: (rows, features), or (channels, height, width) where there are four dimensions."""
        shape = self.shapes[tensor]
        if len(shape) > 3 and shape[0] == self.batch:
            return shape[1:]
        return self.rows_and_features(tensor)

    def has_batch(self, tensor: str) -> bool:
        """Whether a tensor can be cut into samples."""
        shape = self.shapes[tensor]
        return bool(shape) and shape[0] % self.batch == 0 and not self.is_fixed(tensor)

    def reduced_dims(self, op: Operator) -> tuple[int, ...]:
        """The dimensions that a reduction sums over, counted from the front."""
        rank = len(self.shapes[op.inputs[0]])
        for key in _REDUCED:
            if key in op.attributes:
                return tuple(sorted(dim % rank for dim in op.attributes[key])) if rank else ()
        return tuple(range(rank))


def flops(graph: OperatorGraph, op: Operator) -> float:
    """Forward FLOPs of an operator on the whole batch, as far as it is a product (a multiply-add counts as two)."""
    if op.kind in ("matmul", "batch_matmul", "broadcast_matmul"):
        left = graph.shapes[op.arguments["a"][0]]
        return 2.0 * graph.elements(op.output) * left[-2 if op.attributes.get("transpose_a") else -1]
    if op.kind in ("conv1d", "conv2d", "conv3d"):
        weight = graph.shapes[op.arguments["weight"][0]]
        return 2.0 * graph.elements(op.output) * graph.elements(op.arguments["weight"][0]) / weight[0]
    if op.kind in ("deconv1d", "deconv2d", "deconv3d"):
        weight = graph.shapes[op.arguments["weight"][0]]
        return 2.0 * graph.elements(op.arguments["in"][0]) * graph.elements(op.arguments["weight"][0]) / weight[0]
    return 0.0


def lookup_arguments(op: Operator) -> tuple[str, str]:
    """The table and the indices of a lookup."""
    table = "weight" if op.kind == "embedding" else "in"
    return op.arguments[table][0], op.arguments["indices"][0]
