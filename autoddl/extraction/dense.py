"""Dense layers: products with a learned matrix, their biases, and which of them are one layer.

Horizontal fusion: products of one tensor with several matrices are one product with the matrices side by side.  It is done
where all results go into one attention core (queries, keys, values), and where two results are multiplied with each other,
one of them through an activation function (a gated MLP).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .attention import AttentionRegion
from .operators import PRODUCTS, SUMS, UNARY, Operator, OperatorGraph

__all__ = ["Dense", "DenseGroup", "find_dense", "find_loops", "fuse_gates", "fuse_projections"]

_KINDS = frozenset({"matmul", "broadcast_matmul", "fused_matmul_bias"})


@dataclass(frozen=True)
class Dense:
    """A product with a learned matrix and, where there is one, the addition of its bias.

    Attributes:
        product: the matrix product.
        operators: product and bias.
        source: what it reads.
        output: what it makes, bias added.
        weight, bias: learned tensors; no bias: empty.
        in_features, out_features: of the product.
    """

    product: Operator
    operators: tuple[Operator, ...]
    source: str
    output: str
    weight: str
    bias: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class DenseGroup:
    """Dense layers of one source that make one layer.

    Attributes:
        parts: in the order of their features.
        activations: of a gate, in order; empty without one.
        gate: the operators from the parts' outputs up to their product; empty without one.
        output: of the gate; empty without one.
    """

    parts: tuple[Dense, ...]
    activations: tuple[str, ...] = ()
    gate: tuple[Operator, ...] = ()
    output: str = ""


def find_dense(graph: OperatorGraph) -> list[Dense]:
    """All products of an active or raw tensor with a learned matrix."""
    return [dense for op in graph.operators if (dense := _dense(graph, op)) is not None]


def _dense(graph: OperatorGraph, op: Operator) -> Dense | None:
    if op.kind not in _KINDS:
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
        follower = graph.sole_consumer(output)
        found = _bias(graph, follower, output) if follower is not None else None
        if follower is not None and found is not None:
            operators, output, bias = (op, follower), follower.output, found
    return Dense(op, operators, source, output, weight, bias, graph.shapes[source][-1], shape[-1])


def _bias(graph: OperatorGraph, op: Operator, output: str) -> str | None:
    """The vector that an operator adds to a product; None where it does something else."""
    others = [tensor for tensor in op.inputs if tensor != output]
    if op.kind not in (SUMS - {"broadcast_sub"}) | {"bias_add"} or len(others) != 1:
        return None
    is_vector = graph.is_learned(others[0]) and graph.elements(others[0]) == graph.shapes[output][-1]
    return others[0] if is_vector and graph.shapes[op.output] == graph.shapes[output] else None


def find_loops(graph: OperatorGraph, dense: Iterable[Dense]) -> list[list[Operator]]:
    """Calls of modules without modules in them that multiply with one matrix again and again: recurrent ones.

    (A dense layer that is called twice in a row does nothing but that.)
    """
    weights = {op.name: part.weight for part in dense for op in part.operators}
    loops = []
    for path, group in itertools.groupby(graph.operators, key=lambda op: op.path):
        run = list(group)
        products = [weights[op.name] for op in run if op.kind in _KINDS and op.name in weights]
        if path in graph.leaves and len(set(products)) < len(products) and any(op.name not in weights for op in run):
            loops.append(run)
    return loops


def fuse_projections(
    graph: OperatorGraph, dense: Iterable[Dense], attentions: Sequence[AttentionRegion]
) -> list[DenseGroup]:
    """Groups of dense layers that read one tensor and feed nothing but one attention core."""
    by_output = {part.output: part for part in dense}
    groups = []
    for region in attentions:
        inside = {op.name for op in region.operators}
        by_source: dict[str, list[Dense]] = {}
        for tensor in region.sources:
            readers = graph.consumers.get(tensor, ())
            if tensor in by_output and tensor not in graph.outputs and all(op.name in inside for op in readers):
                part = by_output[tensor]
                by_source.setdefault(part.source, []).append(part)
        groups += [DenseGroup(tuple(parts)) for parts in by_source.values() if len(parts) > 1]
    return groups


def fuse_gates(graph: OperatorGraph, dense: Iterable[Dense]) -> list[DenseGroup]:
    """Groups of two dense layers (or the halves of one) whose results are multiplied with each other."""
    by_output = {part.output: part for part in dense}
    groups: list[DenseGroup] = []
    used: set[str] = set()
    for op in graph.operators:
        group = _gate(graph, op, by_output) if op.kind in PRODUCTS else None
        if group is not None and used.isdisjoint(part.output for part in group.parts):
            groups.append(group)
            used.update(part.output for part in group.parts)
    return groups


def _gate(graph: OperatorGraph, product: Operator, by_output: dict[str, Dense]) -> DenseGroup | None:
    factors = graph.active_inputs(product)
    if len(factors) != 2 or len(product.inputs) != 2:
        return None
    sides = [_up_to_dense(graph, factor, by_output) for factor in factors]
    if sides[0] is None or sides[1] is None:
        return None
    # The gate is the side with the activation; where neither or both have one, the first side.
    gate, up = sorted((sides[0], sides[1]), key=lambda side: not side.activations)
    operators = (*gate.operators, *up.operators, product)
    activations = (*gate.activations, *up.activations)
    if gate.dense is up.dense:
        width = gate.dense.out_features // 2
        halves = {gate.start, up.start} == {0, width} and graph.shapes[product.output][-1] == width
        readers = {op.name for op in graph.consumers[gate.dense.output]}
        if not halves or not readers <= {op.name for op in operators} or gate.dense.output in graph.outputs:
            return None
        return DenseGroup((gate.dense,), activations, operators, product.output)
    whole = gate.start is None and up.start is None
    same = gate.dense.source == up.dense.source and gate.dense.out_features == up.dense.out_features
    alone = all(graph.sole_consumer(side.dense.output) is not None for side in (gate, up))
    if not (whole and same and alone):
        return None
    return DenseGroup((gate.dense, up.dense), activations, operators, product.output)


@dataclass(frozen=True)
class _Side:
    """The way from a dense layer to a product: activations, and where a slice of its features begins."""

    dense: Dense
    operators: tuple[Operator, ...]
    activations: tuple[str, ...]
    start: int | None


def _up_to_dense(graph: OperatorGraph, tensor: str, by_output: dict[str, Dense]) -> _Side | None:
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
            start = _start_of_features(graph, op)
            if start is None:
                return None
        else:
            return None
        operators.append(op)
        tensor = op.inputs[0]
    return _Side(by_output[tensor], tuple(operators), tuple(reversed(activations)), start)


def _start_of_features(graph: OperatorGraph, op: Operator) -> int | None:
    """Where a slice of the last dimension begins; None where other dimensions are cut, or elements are left out."""
    whole, part = graph.shapes[op.inputs[0]], graph.shapes[op.output]
    if whole[:-1] != part[:-1]:
        return None
    if op.kind == "narrow":
        return int(op.attributes["start"])
    return int(op.attributes["start"][-1]) if op.attributes["step"][-1] == 1 else None
