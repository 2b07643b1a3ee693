"""Norms over the last dimension, whatever they are written with.

A norm reads one tensor x and takes *statistics* of each row: reductions over the last dimension that keep it (length 1).  Its
operators are found by growing a region: from a first reduction up to x, then, in the order of execution, every element-wise
operator or reduction that reads nothing but x and the region, until all that the region hands on is one tensor of x's
shape; then the scale and the shift, products and sums with learned vectors.  Layer norm (nine operators on CPU) and RMS norm
come out alike, in any of the ways in which people write them.

Where x begins is not known beforehand: in ``mean(x * x)`` the reduction reads a product.  So the reduction's input and its
element-wise ancestors are tried, nearest first; a wrong one never closes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .operators import ELEMENTWISE, PRODUCTS, REDUCTIONS, SUMS, UNARY, Operator, OperatorGraph

__all__ = ["NormRegion", "find_norms"]

#: Operators that a norm may have between its first and its last; longer regions are something else.
LONGEST = 24
#: Element-wise steps from x to what the first statistic is taken of.
DEEPEST = 3


@dataclass(frozen=True)
class NormRegion:
    """A norm: the operators, what it reads and makes, its learned vectors and how many statistics it takes of a row."""

    operators: tuple[Operator, ...]
    source: str
    output: str
    learned: tuple[str, ...]
    statistics: int


def find_norms(graph: OperatorGraph) -> list[NormRegion]:
    """All norms (but of raw data without learned scales), none sharing an operator with another."""
    regions: list[NormRegion] = []
    taken: set[str] = set()
    for op in graph.operators:
        if op.kind == "layer_norm" and op.attributes.get("begin_norm_axis") == len(graph.shapes[op.output]) - 1:
            affine = (*op.arguments.get("gamma", ()), *op.arguments.get("beta", ()))
            regions.append(NormRegion((op,), op.arguments["x"][0], op.output, affine, 2))
            continue
        if op.name in taken or not _is_statistic(graph, op):
            continue
        region = next(filter(None, (_grow(graph, op, source) for source in _sources(graph, op))), None)
        if (
            region is not None
            and graph.is_active(region.output)
            and taken.isdisjoint(member.name for member in region.operators)
        ):
            regions.append(region)
            taken.update(member.name for member in region.operators)
    return _with_centring(graph, regions)


def _with_centring(graph: OperatorGraph, regions: list[NormRegion]) -> list[NormRegion]:
    """Join ``x - mean`` with the norm of it that follows: together they are a layer norm written by hand."""
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
    """A reduction of a tensor made from data over its last dimension, which it keeps."""
    if op.kind not in REDUCTIONS or graph.is_fixed(op.inputs[0]):
        return False
    shape = graph.shapes[op.inputs[0]]
    kept = (*shape[:-1], 1)
    return (
        len(shape) > 1
        and shape[-1] > 1
        and graph.reduced_dims(op) == (len(shape) - 1,)
        and graph.shapes[op.output] == kept
    )


def _sources(graph: OperatorGraph, statistic: Operator) -> Iterator[str]:
    """What x may be: the statistic's input, and what that is made from, element by element."""
    source = statistic.inputs[0]
    for _ in range(DEEPEST + 1):
        yield source
        op = graph.producer.get(source)
        if op is None or op.kind not in ELEMENTWISE:
            return
        active = graph.data_inputs(op)
        if len(active) != 1 or graph.shapes[active[0]] != graph.shapes[source]:
            return
        source = active[0]


def _grow(graph: OperatorGraph, statistic: Operator, source: str) -> NormRegion | None:
    """The region of a norm of ``source`` that contains the statistic; None where it does not close."""
    members: dict[str, Operator] = {}
    inside = {source}
    start = graph.position[graph.consumers[source][0].name]
    shape = graph.shapes[source]
    small = (*shape[:-1], 1)
    for op in graph.operators[start : start + 4 * LONGEST]:
        active = graph.data_inputs(op)
        # What reads x alone belongs here where a statistic comes of it; it is taken in when that is met.
        if not active or not inside.issuperset(active) or not (_is_statistic(graph, op) or op.kind in ELEMENTWISE):
            continue
        if set(active) == {source} and not _is_statistic(graph, op) and not _leads_to_statistic(graph, op):
            continue
        if graph.shapes[op.output] not in (shape, small):
            continue
        if any(len(graph.shapes[t]) > 1 and graph.elements(t) != shape[-1] for t in graph.learned_inputs(op)):
            continue
        members[op.name] = op
        inside.update(op.outputs)
        if len(members) > LONGEST:
            return None
        output = _closed(graph, members, shape)
        if output is not None and statistic.name in members:
            return _with_affine(graph, members, source, output)
    return None


def _leads_to_statistic(graph: OperatorGraph, op: Operator) -> bool:
    """Whether every reader of an element-wise operator takes statistics of it (through further element-wise ones)."""
    for _ in range(DEEPEST):
        readers = graph.consumers.get(op.output, ())
        if len(readers) != 1:
            return bool(readers) and all(_is_statistic(graph, reader) for reader in readers)
        if _is_statistic(graph, readers[0]):
            return True
        if readers[0].kind not in UNARY:
            return False
        op = readers[0]
    return False


def _closed(graph: OperatorGraph, members: dict[str, Operator], shape: tuple[int, ...]) -> str | None:
    """The one tensor that a region hands on, of x's shape; None where there are others, or none."""
    live = [
        tensor
        for op in members.values()
        for tensor in op.outputs
        if tensor in graph.outputs or any(r.name not in members for r in graph.consumers.get(tensor, ()))
    ]
    if len(live) == 1 and graph.shapes[live[0]] == shape:
        return live[0]
    return None


def _with_affine(graph: OperatorGraph, members: dict[str, Operator], source: str, output: str) -> NormRegion:
    """The region with the scale and the shift that follow it."""
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
