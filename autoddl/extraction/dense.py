"""Finds dense layers (products with a learned matrix, and their biases), and groups of them that become one layer.

Horizontal fusion: the products of one tensor with several matrices are one product with the concatenated matrices.  Two cases
are fused:

- Projections: all products are read by one attention core alone (queries, keys, values).
- Gates: two products are multiplied with each other, one of them after an activation function (a gated MLP).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .activations import is_plain_activation
from .attention import AttentionRegion
from .operators import PRODUCTS, SUMS, UNARY, Operator, OperatorGraph

__all__ = ["Dense", "DenseGroup", "find_dense", "find_recurrent_calls", "fuse_gates", "fuse_projections"]

#: Operators that may be a product with a learned matrix.
_PRODUCT_KINDS = frozenset({"matmul", "broadcast_matmul", "fused_matmul_bias"})


@dataclass(frozen=True)
class Dense:
    """A product with a learned matrix, and the addition of its bias, if any.

    Attributes:
        product: The matrix product.
        operators: The product, and the addition of the bias unless the product includes it.
        source: Input tensor.
        output: Output tensor, including the bias.
        weight: Learned matrix.
        bias: Learned bias vector.  "" without a bias.
        in_features: Length of the last dimension of the source.
        out_features: Length of the last dimension of the output.
    """

    product: Operator
    operators: tuple[Operator, ...]
    source: str
    output: str
    weight: str
    bias: str
    in_features: int
    out_features: int

    @property
    def is_transposed(self) -> bool:
        """Whether the matrix is (in, out), as in GPT-2."""
        return self.product.kind != "fused_matmul_bias" and not self.product.attributes.get("transpose_b")


@dataclass(frozen=True)
class DenseGroup:
    """Dense layers with the same source that become one layer.

    Attributes:
        parts: The dense layers, in the order of their features.
        activations: For a gate: kinds of the activation functions, in order.
        gate: For a gate: operators between the outputs of the parts and their product, and the product.
        output: For a gate: output tensor of the product.  "" otherwise.
        operation: For a gate: ``mul``, or ``mul_last`` if the activation functions apply to the last half of one dense layer.
    """

    parts: tuple[Dense, ...]
    activations: tuple[str, ...] = ()
    gate: tuple[Operator, ...] = ()
    output: str = ""
    operation: str = "mul"


def find_dense(graph: OperatorGraph) -> list[Dense]:
    """Return all dense layers: products of an active or raw tensor with a learned matrix."""
    return [dense for op in graph.operators if (dense := _dense_of(graph, op)) is not None]


def _dense_of(graph: OperatorGraph, op: Operator) -> Dense | None:
    """Return the dense layer of a matrix product, or None if the operator is not a product with a learned matrix."""
    if op.kind not in _PRODUCT_KINDS:
        return None
    keys = ("x", "weight") if op.kind == "fused_matmul_bias" else ("a", "b")
    source, weight = (op.arguments[key][0] for key in keys)
    matrix, shape = graph.shapes[weight], graph.shapes[op.output]
    if not graph.is_learned(weight) or graph.is_fixed(source) or len(matrix) != 2 or op.attributes.get("transpose_a"):
        return None
    if graph.shapes[source][:-1] != shape[:-1]:
        return None
    operators: tuple[Operator, ...] = (op,)
    output, bias = op.output, ""
    if op.kind == "fused_matmul_bias":
        bias = op.arguments["bias"][0]
    else:
        consumer = graph.sole_consumer(output)
        added = _added_bias(graph, consumer, output) if consumer is not None else None
        if consumer is not None and added is not None:
            operators, output, bias = (op, consumer), consumer.output, added
    return Dense(op, operators, source, output, weight, bias, graph.shapes[source][-1], shape[-1])


def _added_bias(graph: OperatorGraph, op: Operator, output: str) -> str | None:
    """Return the learned vector that an operator adds to ``output``, or None if it does anything else."""
    others = [tensor for tensor in op.inputs if tensor != output]
    if op.kind not in (SUMS - {"broadcast_sub"}) | {"bias_add"} or len(others) != 1:
        return None
    is_vector = graph.is_learned(others[0]) and graph.elements(others[0]) == graph.shapes[output][-1]
    return others[0] if is_vector and graph.shapes[op.output] == graph.shapes[output] else None


def find_recurrent_calls(graph: OperatorGraph, dense: Iterable[Dense]) -> list[list[Operator]]:
    """Return the operators of each call of a recurrent module.

    A recurrent module contains no other module, and multiplies with the same matrix several times.  It also has operators other
    than the dense layers, which distinguishes it from a dense layer that is called twice in a row.
    """
    weights = {op.name: part.weight for part in dense for op in part.operators}
    loops = []
    for path, group in itertools.groupby(graph.operators, key=lambda op: op.path):
        operators = list(group)
        factors = [weights[op.name] for op in operators if op.kind in _PRODUCT_KINDS and op.name in weights]
        has_repeated_factor = len(set(factors)) < len(factors)
        if path in graph.leaves and has_repeated_factor and any(op.name not in weights for op in operators):
            loops.append(operators)
    return loops


def fuse_projections(
    graph: OperatorGraph, dense: Iterable[Dense], attentions: Sequence[AttentionRegion]
) -> list[DenseGroup]:
    """Return groups of dense layers that read the same tensor and are read by one attention core alone."""
    by_output = {part.output: part for part in dense}
    groups = []
    for region in attentions:
        names = {op.name for op in region.operators}
        by_source: dict[str, list[Dense]] = {}
        for tensor in region.sources:
            if tensor in by_output and not graph.is_read_outside(tensor, names):
                part = by_output[tensor]
                by_source.setdefault(part.source, []).append(part)
        # Keys and values of another sequence than the queries stay apart: attention reads three tensors then.
        if len(by_source) == 1 and len({part.is_transposed for parts in by_source.values() for part in parts}) == 1:
            groups += [DenseGroup(tuple(parts)) for parts in by_source.values() if len(parts) > 1]
    return groups


def fuse_gates(graph: OperatorGraph, dense: Iterable[Dense]) -> list[DenseGroup]:
    """Return groups of two dense layers (or of the two halves of one) whose results are multiplied with each other."""
    by_output = {part.output: part for part in dense}
    groups: list[DenseGroup] = []
    used: set[str] = set()
    for op in graph.operators:
        group = _gate_of(graph, op, by_output) if op.kind in PRODUCTS else None
        if group is not None and used.isdisjoint(part.output for part in group.parts):
            groups.append(group)
            used.update(part.output for part in group.parts)
    return groups


def _gate_of(graph: OperatorGraph, product: Operator, by_output: dict[str, Dense]) -> DenseGroup | None:
    """Return the gate that ends at an element-wise product, or None if the product is not the end of a gate."""
    factors = graph.active_inputs(product)
    if len(factors) != 2 or len(product.inputs) != 2:
        return None
    sides = [_side_of(graph, factor, by_output) for factor in factors]
    if sides[0] is None or sides[1] is None:
        return None
    # The gate is the side with the activation; if neither side has one, the first side.
    gate, up = sorted((sides[0], sides[1]), key=lambda side: (not side.activations, side.start or 0))
    operators, activations = (*gate.operators, *up.operators, product), gate.activations
    if up.activations or not all(is_plain_activation(op) for op in gate.operators if op.kind in UNARY):
        return None
    # The two halves of one dense layer.
    if gate.dense is up.dense:
        width = gate.dense.out_features // 2
        are_halves = {gate.start, up.start} == {0, width} and graph.shapes[product.output][-1] == width
        if not are_halves or graph.is_read_outside(gate.dense.output, {op.name for op in operators}):
            return None
        return DenseGroup((gate.dense,), activations, operators, product.output, "mul_last" if gate.start else "mul")
    # Two dense layers of the same source.
    are_whole = gate.start is None and up.start is None
    are_alike = gate.dense.source == up.dense.source and gate.dense.out_features == up.dense.out_features
    are_alike &= gate.dense.is_transposed == up.dense.is_transposed
    have_one_reader = all(graph.sole_consumer(side.dense.output) is not None for side in (gate, up))
    if not (are_whole and are_alike and have_one_reader):
        return None
    return DenseGroup((gate.dense, up.dense), activations, operators, product.output)


@dataclass(frozen=True)
class _Side:
    """One factor of a gate's product: a dense layer and the operators between it and the product.

    Attributes:
        dense: The dense layer.
        operators: Operators between the dense layer and the product, the last one first.
        activations: Kinds of the activation functions, in execution order.
        start: First feature of the slice of the dense layer's output.  None if the whole output is used.
    """

    dense: Dense
    operators: tuple[Operator, ...]
    activations: tuple[str, ...]
    start: int | None


def _side_of(graph: OperatorGraph, tensor: str, by_output: dict[str, Dense]) -> _Side | None:
    """Return the side of a gate that ends at ``tensor``, or None if other operators are on the way to a dense layer."""
    operators: list[Operator] = []
    activations: list[str] = []
    start = None
    while tensor not in by_output:
        op = graph.producer.get(tensor)
        if op is None or graph.sole_consumer(tensor) is None:
            return None
        if op.kind in UNARY:
            activations.append(op.kind)
        elif op.kind in ("narrow", "slice") and start is None:
            start = _first_feature(graph, op)
            if start is None:
                return None
        else:
            return None
        operators.append(op)
        tensor = op.inputs[0]
    return _Side(by_output[tensor], tuple(operators), tuple(reversed(activations)), start)


def _first_feature(graph: OperatorGraph, op: Operator) -> int | None:
    """Return the first feature of a slice of features; None if other dimensions are sliced, or the step is not 1."""
    whole, part = graph.shapes[op.inputs[0]], graph.shapes[op.output]
    if whole[:-1] != part[:-1]:
        return None
    if op.kind == "narrow":
        return int(op.attributes["start"])
    return int(op.attributes["start"][-1]) if op.attributes["step"][-1] == 1 else None
