"""Finds norms over the last dimension, whichever operators they are written with.

A norm reads one tensor x and computes *statistics* of each row: reductions over the last dimension that keep it with length 1.
The operators of a norm are found by growing a region, for each statistic:

1. Choose x.  The statistic may read x or a tensor computed from x: in ``mean(x * x)`` it reads a product.  The candidates for x
   are therefore the statistic's input and its element-wise ancestors, the nearest ones first.
2. Add, in execution order, every element-wise operator and every statistic that reads nothing but x and the region.
3. Stop when the region is *closed*: only one of its tensors is read outside of it, and this tensor has the shape of x.
   A region of a wrong x never closes.
4. Add the scale and the shift that follow: products and sums with learned vectors.

This finds layer norm (nine operators on CPU) and RMS norm in all their usual spellings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .operators import ELEMENTWISE, PRODUCTS, REDUCTIONS, SUMS, UNARY, Operator, OperatorGraph

__all__ = ["NormRegion", "find_norms"]

#: Operators of a norm without its scale and shift; a larger region is not a norm.
MAX_NORM_OPERATORS = 24
#: Operators after the first reader of x that are examined, those of other layers included.
MAX_EXAMINED_OPERATORS = 4 * MAX_NORM_OPERATORS
#: Element-wise operators between x and a statistic.
MAX_ELEMENTWISE_DEPTH = 3


@dataclass(frozen=True)
class NormRegion:
    """The operators of one norm.

    Attributes:
        operators: All operators of the norm.
        source: Tensor x that the norm reads.
        output: Tensor that the norm computes; it has the shape of x.
        learned: Learned vectors (scale and shift).
        statistics: Number of statistics of a row: 2 for layer norm, 1 for RMS norm.
    """

    operators: tuple[Operator, ...]
    source: str
    output: str
    learned: tuple[str, ...]
    statistics: int


def find_norms(graph: OperatorGraph) -> list[NormRegion]:
    """Return all norms of a graph; they share no operator.

    A norm of raw data is returned only if it has a learned scale or shift.
    """
    regions: list[NormRegion] = []
    taken: set[str] = set()
    for op in graph.operators:
        if op.kind == "layer_norm" and op.attributes.get("begin_norm_axis") == len(graph.shapes[op.output]) - 1:
            affine = (*op.arguments.get("gamma", ()), *op.arguments.get("beta", ()))
            regions.append(NormRegion((op,), op.arguments["x"][0], op.output, affine, 2))
            continue
        if op.name in taken or not _is_statistic(graph, op):
            continue
        candidates = (_grow(graph, op, source) for source in _possible_sources(graph, op))
        region = next((candidate for candidate in candidates if candidate is not None), None)
        if (
            region is not None
            and graph.is_active(region.output)
            and taken.isdisjoint(member.name for member in region.operators)
        ):
            regions.append(region)
            taken.update(member.name for member in region.operators)
    return _join_centered(graph, regions)


def _join_centered(graph: OperatorGraph, regions: list[NormRegion]) -> list[NormRegion]:
    """Join a region ``x - mean`` with the norm that reads its output: together they are a layer norm."""
    joined: list[NormRegion] = []
    for region in regions:
        before = joined[-1] if joined else None
        names = {op.name for op in region.operators}
        if (
            before is not None
            and before.output == region.source
            and before.operators[-1].kind == "broadcast_sub"
            and not before.learned
            and all(reader.name in names for reader in graph.consumers[before.output])
        ):
            joined[-1] = NormRegion(
                (*before.operators, *region.operators),
                before.source,
                region.output,
                region.learned,
                before.statistics + region.statistics,
            )
        else:
            joined.append(region)
    return joined


def _is_statistic(graph: OperatorGraph, op: Operator) -> bool:
    """Return whether an operator reduces a data-dependent tensor over its last dimension and keeps the dimension."""
    if op.kind not in REDUCTIONS or graph.is_fixed(op.inputs[0]):
        return False
    shape = graph.shapes[op.inputs[0]]
    return (
        len(shape) > 1
        and shape[-1] > 1
        and graph.reduced_dims(op) == (len(shape) - 1,)
        and graph.shapes[op.output] == (*shape[:-1], 1)
    )


def _possible_sources(graph: OperatorGraph, statistic: Operator) -> Iterator[str]:
    """Yield the candidates for x: the statistic's input and its element-wise ancestors, the nearest ones first."""
    source = statistic.inputs[0]
    for _ in range(MAX_ELEMENTWISE_DEPTH + 1):
        yield source
        op = graph.producer.get(source)
        if op is None or op.kind not in ELEMENTWISE:
            return
        data_inputs = graph.data_inputs(op)
        if len(data_inputs) != 1 or graph.shapes[data_inputs[0]] != graph.shapes[source]:
            return
        source = data_inputs[0]


def _grow(graph: OperatorGraph, statistic: Operator, source: str) -> NormRegion | None:
    """Return the norm of ``source`` that contains a statistic, or None if the region does not close."""
    members: dict[str, Operator] = {}
    inside = {source}
    start = graph.position[graph.consumers[source][0].name]
    shape = graph.shapes[source]
    statistic_shape = (*shape[:-1], 1)
    for op in graph.operators[start : start + MAX_EXAMINED_OPERATORS]:
        data_inputs = graph.data_inputs(op)
        if not data_inputs or not inside.issuperset(data_inputs):
            continue
        if not (_is_statistic(graph, op) or op.kind in ELEMENTWISE):
            continue
        # An element-wise operator that reads x alone is part of the norm only if a statistic is taken of its result.
        if set(data_inputs) == {source} and not _is_statistic(graph, op) and not _leads_to_statistic(graph, op):
            continue
        if graph.shapes[op.output] not in (shape, statistic_shape):
            continue
        # A learned tensor is a vector; if it has several dimensions, it has one element for each feature.
        if any(len(graph.shapes[t]) > 1 and graph.elements(t) != shape[-1] for t in graph.learned_inputs(op)):
            continue
        members[op.name] = op
        inside.update(op.outputs)
        if len(members) > MAX_NORM_OPERATORS:
            return None
        results = graph.results_of(members.values())
        is_closed = len(results) == 1 and graph.shapes[results[0]] == shape
        if is_closed and statistic.name in members:
            return _with_affine(graph, members, source, results[0])
    return None


def _leads_to_statistic(graph: OperatorGraph, op: Operator) -> bool:
    """Return whether only statistics read an element-wise operator, directly or through a chain of element-wise operators."""
    for _ in range(MAX_ELEMENTWISE_DEPTH):
        readers = graph.consumers.get(op.output, ())
        if len(readers) != 1:
            return bool(readers) and all(_is_statistic(graph, reader) for reader in readers)
        if _is_statistic(graph, readers[0]):
            return True
        if readers[0].kind not in UNARY:
            return False
        op = readers[0]
    return False


def _with_affine(graph: OperatorGraph, members: dict[str, Operator], source: str, output: str) -> NormRegion:
    """Return the norm of a closed region, including the scale and the shift that follow the region."""
    features = graph.shapes[source][-1]
    while True:
        op = graph.sole_consumer(output)
        if op is None or op.kind not in PRODUCTS | SUMS | {"cast"} or graph.data_inputs(op) != (output,):
            break
        others = [tensor for tensor in op.inputs if tensor != output]
        if any(not graph.is_learned(t) or graph.elements(t) != features for t in others):
            break
        if graph.shapes[op.output] != graph.shapes[source]:
            break
        members[op.name] = op
        output = op.output
    learned = dict.fromkeys(tensor for op in members.values() for tensor in graph.learned_inputs(op))
    statistics = sum(_is_statistic(graph, op) for op in members.values())
    return NormRegion(tuple(members.values()), source, output, tuple(learned), statistics)
