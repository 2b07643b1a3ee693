"""The operator graph of a traced model: plain data that needs no OneFlow.

Every tensor belongs to one of four classes, by what it is computed from:

=========  ==============  ==============  ===================================================
class      model inputs    parameters      examples
=========  ==============  ==============  ===================================================
raw        yes             no              token numbers, padding masks, images
learned    no              yes             a weight, its transpose, a table of positions
constant   no              no              a causal mask, the numbers 0 to S - 1
active     yes             yes             activations, logits, the loss
=========  ==============  ==============  ===================================================

A tensor is called *fixed* if it is learned or constant.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoddl.costmodel.program import Dims
from autoddl.pipelines.runtime.randomness import stream_name

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
    "is_free_name",
    "lookup_arguments",
    "stream_of",
]


def _names(table: str) -> frozenset[str]:
    return frozenset(table.split())


#: Element-wise operators of one tensor.
UNARY = _names(
    """
    abs cast celu clip_by_scalar clip_by_scalar_max clip_by_scalar_min copy cos dropout elu erf exp
    expm1 fast_gelu gelu hardshrink hardsigmoid hardswish hardtanh identity leaky_relu log log1p
    log_sigmoid mish negative quick_gelu reciprocal relu rsqrt scalar_add scalar_div scalar_mul
    scalar_pow scalar_reverse_pow selu sigmoid sigmoid_v2 silu sin softplus softshrink softsign sqrt
    square tanh threshold
    """
)
#: Element-wise sums and differences of several tensors.
SUMS = frozenset({"add_n", "broadcast_add", "broadcast_sub"})
#: Element-wise products of several tensors.
PRODUCTS = frozenset({"broadcast_mul"})
#: All element-wise operators.
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
#: Element-wise losses that are a single operator.
ELEMENTWISE_LOSSES = _names(
    """
    binary_cross_entropy binary_cross_entropy_with_logits binary_cross_entropy_with_logits_reduce_mean kl_div_loss
    smooth_l1_loss
    """
)
#: Cross entropies that are a single operator.
CROSS_ENTROPIES = frozenset({"sparse_softmax_cross_entropy", "sparse_cross_entropy"})
#: Lookups of table rows by index.  ``embedding`` has a padding row, which is not trained.
LOOKUPS = frozenset({"gather", "embedding"})
#: Operators that reshape, reorder or select elements and compute nothing.
VIEWS = frozenset({"expand", "expand_dims", "narrow", "reshape", "slice", "squeeze", "transpose"})
#: Reductions over some of a tensor's dimensions.
REDUCTIONS = frozenset({"reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "var"})
#: Names of the attribute that lists the reduced dimensions.
_REDUCED_DIMS_ATTRIBUTES = ("axis", "dim")


def is_free_name(name: str) -> bool:
    """Return whether OneFlow named a tensor that the model does not have."""
    return name.rpartition("-")[0].endswith("FreeEagerTensor")


@dataclass(frozen=True)
class ModelTensor:
    """A parameter, a buffer or another tensor that the model reads as a variable.

    Attributes:
        name: Module path and attribute name.
        shape: Shape of the whole tensor.
        trained: Whether the tensor is a parameter.  Otherwise it is a buffer, or a tensor that is not registered in the model.
        lower_triangular: For a buffer of square matrices: whether all elements above the diagonal are zero, or all elements on
            and below it, as in a causal mask.  None if unknown.
        constant: Values of a tensor that the forward pass makes of numbers, a numpy array.  None for other tensors.
        frozen: Whether it is a parameter that is not trained (``requires_grad`` is False).
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    lower_triangular: bool | None = None
    constant: Any = field(default=None, compare=False)
    frozen: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the model does not have it: it is neither a parameter nor a buffer nor an attribute of a module."""
        return is_free_name(self.name)


@dataclass(frozen=True)
class Operator:
    """One operator of the trace.

    Attributes:
        name: Unique name of the operator.
        kind: OneFlow's name of the operator type, such as ``matmul``.
        path: Path of the module that called the operator.
        arguments: Input tensors by OneFlow's argument name.
        results: Output tensors by OneFlow's result name.
        attributes: OneFlow's attributes of the operator, such as ``transpose_a``.
    """

    name: str
    kind: str
    path: str
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    results: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Input tensors, in alphabetical order of their argument names (``a`` before ``b``, ``x`` before ``y``)."""
        return tuple(tensor for key in sorted(self.arguments) for tensor in self.arguments[key])

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Output tensors; the main output comes first."""
        order = sorted(self.results, key=lambda key: (key not in ("out", "y", "z", "output"), key))
        return tuple(tensor for key in order for tensor in self.results[key])

    @property
    def output(self) -> str:
        """The main output tensor."""
        return self.outputs[0]


@dataclass(frozen=True)
class OperatorGraph:
    """The operators, tensors and modules of a traced model.

    Attributes:
        operators: Operators, in execution order.
        shapes: Shape of every tensor, by tensor name, for the whole example batch.
        inputs: Model inputs whose first dimension is the batch, and index tensors that count as such inputs.
        variables: Tensors that the model owns, by tensor name.
        outputs: Tensors that the model returns.
        batch: Number of samples in the example inputs.
        aliases: For each parameter, by tensor name: all its (module path, attribute) pairs.  Tied parameters have several.
        parameters: Names of all parameters of the model, including those that the trace does not read.
        containers: Paths of module lists and sequences, with the paths of their children in order.
        leaves: Paths of the modules that contain no other module.
        modules: Modules by path, without the model itself.
        model: The model.
        notes: Notes about the trace for the user.
        data: All inputs of the model, also those whose first dimension is not the batch.
        dims: Shape of every tensor as a function of the number of samples.
        scaled: By operator name, the attributes that change with the number of samples.
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
    model: Any = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    dims: Mapping[str, Dims] = field(default_factory=dict)
    scaled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def producer(self) -> Mapping[str, Operator]:
        """The operator that computes each tensor.  Model inputs and variables have none."""
        return {tensor: op for op in self.operators for tensor in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Operator, ...]]:
        """The operators that read each tensor, each operator once."""
        table: dict[str, list[Operator]] = {}
        for op in self.operators:
            for tensor in dict.fromkeys(op.inputs):
                table.setdefault(tensor, []).append(op)
        return {tensor: tuple(ops) for tensor, ops in table.items()}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of each operator in execution order, by operator name."""
        return {op.name: i for i, op in enumerate(self.operators)}

    @cached_property
    def _depend_on_inputs(self) -> frozenset[str]:
        return self._descendants(self.inputs)

    @cached_property
    def _depend_on_parameters(self) -> frozenset[str]:
        return self._descendants(tensor for tensor, variable in self.variables.items() if variable.trained)

    def _descendants(self, tensors: Iterable[str]) -> frozenset[str]:
        """Return the tensors and all tensors that are computed from them."""
        reached = set(tensors)
        for op in self.operators:
            if not reached.isdisjoint(op.inputs):
                reached.update(op.outputs)
        return frozenset(reached)

    def is_active(self, tensor: str) -> bool:
        """Return whether a tensor depends on model inputs and on parameters."""
        return tensor in self._depend_on_inputs and tensor in self._depend_on_parameters

    def is_raw(self, tensor: str) -> bool:
        """Return whether a tensor depends on model inputs but on no parameter."""
        return tensor in self._depend_on_inputs and tensor not in self._depend_on_parameters

    def is_learned(self, tensor: str) -> bool:
        """Return whether a tensor depends on parameters but on no model input."""
        return tensor in self._depend_on_parameters and tensor not in self._depend_on_inputs

    def is_fixed(self, tensor: str) -> bool:
        """Return whether a tensor depends on no model input: it is learned or constant."""
        return tensor not in self._depend_on_inputs

    def active_inputs(self, op: Operator) -> tuple[str, ...]:
        """Return the active inputs of an operator, each once."""
        return tuple(dict.fromkeys(tensor for tensor in op.inputs if self.is_active(tensor)))

    def data_inputs(self, op: Operator) -> tuple[str, ...]:
        """Return the active and raw inputs of an operator, each once."""
        return tuple(dict.fromkeys(tensor for tensor in op.inputs if not self.is_fixed(tensor)))

    def learned_inputs(self, op: Operator) -> tuple[str, ...]:
        """Return the learned inputs of an operator, each once."""
        return tuple(dict.fromkeys(tensor for tensor in op.inputs if self.is_learned(tensor)))

    def sole_consumer(self, tensor: str) -> Operator | None:
        """Return the only operator that reads a tensor.

        Returns:
            None if no operator or several operators read the tensor, or if the model returns it.
        """
        consumers = self.consumers.get(tensor, ())
        return consumers[0] if len(consumers) == 1 and tensor not in self.outputs else None

    def is_read_outside(self, tensor: str, names: Container[str]) -> bool:
        """Return whether the model returns a tensor, or an operator that is not in ``names`` reads it."""
        return tensor in self.outputs or any(reader.name not in names for reader in self.consumers.get(tensor, ()))

    def results_of(self, operators: Iterable[Operator]) -> list[str]:
        """Return the tensors that a group of operators computes and that are read outside of the group."""
        members = list(operators)
        names = {op.name for op in members}
        return [tensor for op in members for tensor in op.outputs if self.is_read_outside(tensor, names)]

    def ancestors(self, tensor: str) -> list[Operator]:
        """Return all operators that a tensor depends on, depth first, beginning with the tensor's producer."""
        ancestors: dict[str, Operator] = {}
        pending = [tensor]
        while pending:
            op = self.producer.get(pending.pop())
            if op is not None and op.name not in ancestors:
                ancestors[op.name] = op
                pending.extend(op.inputs)
        return list(ancestors.values())

    def trained_variables(self, tensor: str) -> list[str]:
        """Return the parameters that a learned tensor is computed from, in the order of their use."""
        tensors = [tensor, *(t for op in reversed(self.ancestors(tensor)) for t in op.inputs)]
        return list(dict.fromkeys(t for t in tensors if t in self.variables and self.variables[t].trained))

    def elements(self, tensor: str) -> int:
        """Return the number of elements of a tensor, for the whole batch."""
        return math.prod(self.shapes[tensor])

    def rows_and_features(self, tensor: str) -> tuple[int, int]:
        """Return the number of rows and of features of one sample; features are the last dimension of the tensor."""
        shape = self.shapes[tensor]
        features = shape[-1] if shape else 1
        return max(self.elements(tensor) // (self.batch * features), 1), features

    def sample_shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of one sample: (channels, height, width) if the tensor has four dimensions, else (rows, features)."""
        shape = self.shapes[tensor]
        if len(shape) > 3 and shape[0] == self.batch:
            return shape[1:]
        return self.rows_and_features(tensor)

    def has_batch(self, tensor: str) -> bool:
        """Return whether a tensor can be split into samples along its first dimension."""
        shape = self.shapes[tensor]
        return bool(shape) and shape[0] % self.batch == 0 and not self.is_fixed(tensor)

    def reduced_dims(self, op: Operator) -> tuple[int, ...]:
        """Return the dimensions that a reduction reduces, as numbers from 0 in ascending order."""
        num_dims = len(self.shapes[op.inputs[0]])
        for key in _REDUCED_DIMS_ATTRIBUTES:
            if key in op.attributes:
                return tuple(sorted(dim % num_dims for dim in op.attributes[key])) if num_dims else ()
        return tuple(range(num_dims))


#: Products of the matrices ``a`` and ``b``, or of equal batches of them.
_MATRIX_PRODUCTS = frozenset({"matmul", "batch_matmul", "broadcast_matmul"})
#: Convolutions: every element of the output is a product with one filter of the weight.
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "deform_conv2d"})
#: Transposed convolutions: every element of the input is multiplied with all that the weight holds for its channel.
_TRANSPOSED_CONVOLUTIONS = frozenset({"deconv1d", "deconv2d", "deconv3d"})
#: Products of rows with the matrices of the argument given, fused with what follows them.
_FUSED_PRODUCTS = {
    "cublas_fused_mlp": "weights",
    "fused_matmul_bias": "weight",
    "fused_matmul_bias_add_relu_dropout": "weights",
}


def flops(graph: OperatorGraph, op: Operator) -> float:
    """Return the forward FLOPs of a matrix product or a convolution on the whole batch; 0 for other operators.

    A multiply-add counts as two FLOPs.  Lookups, reductions and element-wise operators count none: memory traffic bounds them.
    Groups, also the single channels of a depthwise convolution, are in the shape of the weight: its second dimension is the
    number of input channels of a group (for transposed convolutions, of output channels).

    >>> product = Operator("fc-matmul-0", "matmul", "fc", {"a": ("x",), "b": ("w",)}, {"out": ("y",)})
    >>> shapes = {"x": (4, 8), "w": (8, 16), "y": (4, 16)}
    >>> graph = OperatorGraph((product,), shapes, inputs=("x",), variables={}, outputs=("y",), batch=4)
    >>> flops(graph, product)
    1024.0
    """
    shapes, elements, kind = graph.shapes, graph.elements, op.kind

    def argument(key: str) -> str:
        return op.arguments[key][0]

    if kind in _MATRIX_PRODUCTS:
        return 2.0 * elements(op.output) * shapes[argument("a")][-2 if op.attributes.get("transpose_a") else -1]
    if kind in _CONVOLUTIONS:
        weight = argument("weight")
        return 2.0 * elements(op.output) * elements(weight) / shapes[weight][0]
    if kind in _TRANSPOSED_CONVOLUTIONS:
        weight = argument("weight")
        return 2.0 * elements(argument("in")) * elements(weight) / shapes[weight][0]
    if kind in _FUSED_PRODUCTS:
        rows = elements(argument("x")) / shapes[argument("x")][-1]
        return 2.0 * rows * sum(elements(weight) for weight in op.arguments[_FUSED_PRODUCTS[kind]])
    if kind == "matrix_vector_product":
        return 2.0 * elements(argument("a"))
    if kind == "vector_matrix_product":
        return 2.0 * elements(argument("b"))
    if kind == "dot":
        return 2.0 * elements(argument("x"))
    if kind == "fused_cross_feature_interaction":
        return 2.0 * elements(op.results["matmul_result"][0]) * shapes[argument("x")][-1]
    if kind == "fused_dot_feature_interaction" and op.attributes.get("pooling") == "none":
        # The products of all pairs of features; a pooled sum of them is computed from sums and squares.
        batch, _, width = shapes[argument("features")]
        return 2.0 * batch * width * sum(shapes[tensor][1] for tensor in op.arguments["features"]) ** 2
    if kind == "fused_self_attention_query_mul_key_and_value":
        return 2.0 * elements(op.results["query_mul_key"][0]) * op.attributes["head_size"]
    return 0.0


def lookup_arguments(op: Operator) -> tuple[str, str]:
    """Return the table and the index tensor of a lookup."""
    table = "weight" if op.kind == "embedding" else "in"
    return op.arguments[table][0], op.arguments["indices"][0]


def stream_of(graph: OperatorGraph, op: Operator) -> str:
    """Return the name of the random numbers of an operator (:mod:`autoddl.pipelines.runtime.randomness`)."""
    alike = [other.name for other in graph.operators if (other.path, other.kind) == (op.path, op.kind)]
    return stream_name(op.path, op.kind, alike.index(op.name))
