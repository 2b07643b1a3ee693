"""Finds what a traced model does to the scores of an attention core before the softmax: biases, masks and factors.

Ranks run a core for some heads and samples (:mod:`autoddl.pipelines.runtime.changed_scores`). So every tensor that changes the
scores gets a shape of 5 dimensions, (samples, windows, heads, queries, keys), each 1 where all have the same. The scores of a model
have the same dimensions in this order, some of them joined: (samples * windows, heads, queries, keys) in the windows of Swin. A
tensor is aligned with the last dimensions of the scores that it changes, so its own dimensions tell where it is the same.

**Learned biases** are divided with the heads, so column h of their table may change the scores of head h alone. Its place is
followed through lookups of rows, views and element-wise operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from autoddl.costmodel.program import Dims, Scaled, at

from .operators import LOOKUPS, UNARY, Operator, OperatorGraph, lookup_arguments
from .scales import attributes_of

__all__ = [
    "NEUTRAL",
    "ROLES_OF_OPERATORS",
    "SCALES",
    "Change",
    "CoreSizes",
    "changes_between",
    "keeps_order",
    "number_of",
]

#: Operators that multiply by a number, with its power.
SCALES = {"scalar_mul": 1, "scalar_div": -1}
#: Operators that change no value.
NEUTRAL = frozenset({"cast", "identity", "to_contiguous"})
#: Operators that change scores by a tensor: the role of the tensor, and the name of its argument ("": the other one).
ROLES_OF_OPERATORS = {
    "add_n": ("add", ""),
    "broadcast_add": ("add", ""),
    "broadcast_sub": ("subtract", "y"),
    "broadcast_mul": ("multiply", ""),
    "masked_fill": ("fill", "mask"),
    "where_scalar_x": ("fill", "condition"),
    "where_scalar_y": ("keep", "condition"),
}
_RESHAPES = frozenset({"reshape", "expand_dims", "squeeze", "flatten"})


class CoreSizes(NamedTuple):
    """Sizes of an attention core, per sample.

    Attributes:
        windows: Windows of rows that attend to themselves alone.
        rows: Rows of queries of a window.
        keys: Rows of keys of a window.
        heads: Query heads.
        head_dim: Features of a head.
    """

    windows: int
    rows: int
    keys: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Change:
    """One change of the scores.

    Attributes:
        role: One of :data:`autoddl.costmodel.program.ROLES`.
        tensor: The tensor; "" for a number.
        value: The value of the role, or the factor if there is no tensor.
        shape: The 5 dimensions of the tensor.
    """

    role: str
    tensor: str
    value: float = 0.0
    shape: Dims = (1, 1, 1, 1, 1)


def changes_between(
    graph: OperatorGraph, scores: Operator, softmax: Operator, sizes: CoreSizes, factor: float
) -> tuple[Change, ...] | str:
    """Return what happens to scores between the product q k^T and the softmax, or why ranks cannot do that.

    Args:
        graph: The traced operators.
        scores: The product.
        softmax: The softmax.
        sizes: Sizes of the core.
        factor: The factor of the scores before, including that of the product.
    """
    chain: list[Operator] = []
    tensor = softmax.inputs[0]
    while (op := graph.producer[tensor]) is not scores:
        chain.append(op)
        tensor = graph.active_inputs(op)[0]
    changes: list[Change] = []
    # Ranks divide scores by the root of the head's size first.
    factor *= math.sqrt(sizes.head_dim)
    for op in reversed(chain):
        before = graph.active_inputs(op)[0]
        if op.kind in SCALES:
            factor *= number_of(op) ** SCALES[op.kind]
        elif op.kind in ROLES_OF_OPERATORS:
            changes += _factor(factor)
            factor = 1.0
            change = _change(graph, op, before, sizes)
            if isinstance(change, str):
                return change
            changes.append(change)
        elif op.kind not in NEUTRAL and not keeps_order(graph, op):
            return f"its attention applies {op.kind} to scores"
    return (*changes, *_factor(factor))


def keeps_order(graph: OperatorGraph, op: Operator) -> bool:
    """Return whether an operator is a view that keeps the order of the elements."""
    dims = graph.dims[op.inputs[0]]
    if op.kind == "transpose":
        order = [dim for dim in op.attributes["perm"] if dims[dim] != 1]
        return order == sorted(order)
    return op.kind in _RESHAPES or (op.kind == "expand" and dims == graph.dims[op.output])


def _factor(factor: float) -> list[Change]:
    return [] if math.isclose(factor, 1.0, rel_tol=1e-4) else [Change("multiply", "", factor)]


def number_of(op: Operator) -> float:
    """Return the number of an operator with a tensor and a number."""
    attributes = op.attributes
    is_float = attributes.get("has_float_operand", "float_operand" in attributes)
    return float(attributes["float_operand" if is_float else "int_operand"])


def _change(graph: OperatorGraph, op: Operator, before: str, sizes: CoreSizes) -> Change | str:
    """Return the change of one operator, or why ranks cannot do that."""
    role, key = ROLES_OF_OPERATORS[op.kind]
    others = [tensor for tensor in op.inputs if tensor != before] if not key else [op.arguments[key][0]]
    if len(others) != 1:
        return f"its attention applies {op.kind} of several tensors to scores"
    (tensor,) = others
    if tensor == before:
        return f"its attention applies {op.kind} to scores in another order"
    groups = _groups(graph.dims[before], sizes)
    if groups is None:
        return "its attention has scores in another order than samples, heads, queries, keys"
    shape = _shape(graph.dims[tensor], graph.dims[before], groups, sizes)
    if shape is None or graph.dims[op.output] != graph.dims[before]:
        return "its attention has a mask of another shape than its scores"
    if not all(_is_by_head(graph, variable, tensor, shape) for variable in graph.trained_variables(tensor)):
        return "its attention has a learned bias of which no single column belongs to each head"
    return Change(role, tensor, number_of(op) if role in ("fill", "keep") else 0.0, shape)


def _factors(sizes: CoreSizes) -> Dims:
    return (Scaled(1), sizes.windows, sizes.heads, sizes.rows, sizes.keys)


def _groups(dims: Dims, sizes: CoreSizes) -> list[list[int]] | None:
    """Return which of the 5 dimensions are joined in each dimension of scores; None if they have another order.

    >>> _groups((Scaled(4), 2, 7, 7), CoreSizes(4, 7, 7, 2, 8)), _groups((2, Scaled(4), 7, 7), CoreSizes(4, 7, 7, 2, 8))
    ([[0, 1], [2], [3], [4]], None)
    """
    factors, groups, place = _factors(sizes), [], 0
    for length in dims:
        wanted = at(length, 1), isinstance(length, Scaled)
        group: list[int] = []
        found = 1, False
        while found != wanted and place < len(factors):
            factor = factors[place]
            found = found[0] * at(factor, 1), found[1] or isinstance(factor, Scaled)
            group.append(place)
            place += 1
        if found != wanted:
            return None
        groups.append(group)
    return groups if all(factor == 1 for factor in factors[place:]) else None


def _shape(dims: Dims, scores: Dims, groups: Sequence[Sequence[int]], sizes: CoreSizes) -> Dims | None:
    """Return the 5 dimensions of a tensor that is aligned with scores; None if it does not fit."""
    aligned = (*(1,) * (len(scores) - len(dims)), *dims)
    factors, shape = _factors(sizes), cast("list[int | Scaled]", [1, 1, 1, 1, 1])
    for length, full, group in zip(aligned, scores, groups):
        if length == full:
            for place in group:
                shape[place] = factors[place]
        elif length != 1:
            return None
    return tuple(shape) if len(aligned) == len(scores) else None


def _is_by_head(graph: OperatorGraph, variable: str, tensor: str, shape: Dims) -> bool:
    """Return whether column h of a learned table is read for head h alone, to compute a tensor with these 5 dimensions."""
    heads = shape[2]
    if heads == 1 or len(graph.shapes[variable]) != 2 or graph.shapes[variable][-1] != heads:
        return False
    #: The dimension of the heads, in all tensors that depend on the table.
    places = {variable: 1}
    for op in sorted(graph.ancestors(tensor), key=lambda op: graph.position[op.name]):
        read = [name for name in op.inputs if name in places]
        if not read:
            continue
        place = _place_after(graph, op, read, places, heads)
        if place is None:
            return False
        places[op.output] = place
    return math.prod(at(graph.dims[tensor][places[tensor] + 1 :], 1)) == math.prod(at(shape[3:], 1))


def _place_after(
    graph: OperatorGraph, op: Operator, read: Sequence[str], places: dict[str, int], heads: int | Scaled
) -> int | None:
    """Return the dimension of the heads in the result of an operator; None if it mixes heads, or if that is not known."""
    before, after = graph.dims[read[0]], graph.dims[op.output]
    place = places[read[0]]
    if op.kind in LOOKUPS or op.kind == "gather_nd":
        table, indices = (
            lookup_arguments(op) if op.kind in LOOKUPS else (op.arguments["params"][0], op.arguments["indices"][0])
        )
        # Rows are looked up; the last dimension of indices of gather_nd is that of a place in the table.
        depth = int(at(graph.dims[indices][-1:], 1)[0]) if op.kind == "gather_nd" else 1
        if [table] != list(read) or op.attributes.get("axis", 0) != 0 or place == 0 or depth != 1:
            return None
        return place + len(graph.dims[indices]) - (2 if op.kind == "gather_nd" else 1)
    if op.kind in _RESHAPES:
        behind = math.prod(at(before[place + 1 :], 1))
        found = [i for i, length in enumerate(after) if length == heads and math.prod(at(after[i + 1 :], 1)) == behind]
        return found[0] if found else None
    if op.kind == "transpose":
        return list(op.attributes["perm"]).index(place)
    if op.kind == "narrow":
        return None if attributes_of(graph, op)["dim"] == place else place
    if op.kind in ("slice", "expand"):
        return place if len(before) == len(after) and before[place] == after[place] else None
    if op.kind in UNARY | NEUTRAL or op.kind in SCALES or op.kind in ("add_n", "broadcast_add", "broadcast_mul"):
        found_places = {len(after) - len(graph.dims[tensor]) + places[tensor] for tensor in read}
        return found_places.pop() if len(found_places) == 1 and after[place - len(before)] == heads else None
    return None
