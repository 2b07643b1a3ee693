"""Attention: softmax(q k^T) v, found from its softmax.

From the softmax up through masks and scales to the product q k^T, down through dropout to the product with v; then up
from q, k and v through views and element-wise operators (heads split, rotary positions, repeated key-value heads) to
where they come from, and down through views to the tensor with the heads side by side.  All of it is one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from .operators import ELEMENTWISE, UNARY, VIEWS, Operator, OperatorGraph

__all__ = ["AttentionRegion", "find_attentions"]

_MATMULS = frozenset({"batch_matmul", "broadcast_matmul", "matmul"})
_MASKS = frozenset({"masked_fill", "where", "add_n", "broadcast_add", "broadcast_mul"})
_MERGES = VIEWS | frozenset({"concat"})


@dataclass(frozen=True)
class AttentionRegion:
    """An attention core.

    Attributes:
        operators: all that belong to it.
        path: of the module that calls the softmax.
        sources: tensors that it reads, those of q first, then k, then v.
        output: (batch, rows, heads * head_dim).
        rows, heads, head_dim: of the queries.
        causal: whether a mask that comes from no input leaves out what lies ahead; None where there is a mask of unknown values.
        dropout: whether probabilities are dropped.
    """

    operators: tuple[Operator, ...]
    path: str
    sources: tuple[str, ...]
    output: str
    rows: int
    heads: int
    head_dim: int
    causal: bool | None
    dropout: bool


def find_attentions(graph: OperatorGraph, ends: set[str], passable: set[str]) -> list[AttentionRegion]:
    """All attention cores.

    Args:
        graph: the operators.
        ends: outputs of other layers, such as dense ones: where the way up ends.
        passable: names of operators that the way up goes through though they are no views and not element-wise: norms of heads.
    """
    found = (_around(graph, op, ends, passable) for op in graph.operators if op.kind == "softmax")
    return [region for region in found if region is not None]


def _around(graph: OperatorGraph, softmax: Operator, ends: set[str], passable: set[str]) -> AttentionRegion | None:
    members: dict[str, Operator] = {softmax.name: softmax}
    scores, masks = _up_to_scores(graph, softmax, members)
    weighted, dropout = _down_to_values(graph, softmax, members)
    if scores is None or weighted is None:
        return None
    query, key = scores.arguments["a"][0], scores.arguments["b"][0]
    value = weighted.arguments["b"][0]
    sizes = _sizes(graph, scores, weighted)
    if sizes is None:
        return None
    rows, heads, head_dim = sizes
    output = _merge_heads(graph, weighted, rows, heads * head_dim, members)
    if output is None:
        return None
    sources: dict[str, None] = {}
    for tensor in (query, key, value):
        found, between = _up_to_sources(graph, tensor, ends, passable)
        sources.update(dict.fromkeys(found))
        members.update(between)
    _add_feeders(graph, members)
    if not _closed(graph, members, output):
        return None
    return AttentionRegion(
        operators=tuple(sorted(members.values(), key=lambda op: graph.position[op.name])),
        path=softmax.path,
        sources=tuple(sources),
        output=output,
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        causal=_is_causal(graph, masks, rows),
        dropout=dropout,
    )


def _up_to_scores(
    graph: OperatorGraph, softmax: Operator, members: dict[str, Operator]
) -> tuple[Operator | None, list[str]]:
    """The product q k^T, and the masks on the way to it."""
    masks: list[str] = []
    tensor = softmax.inputs[0]
    while True:
        op = graph.producer.get(tensor)
        if op is None:
            return None, masks
        members[op.name] = op
        active = graph.active_inputs(op)
        if op.kind in _MATMULS:
            return (op if len(active) == 2 else None), masks
        if op.kind not in _MASKS | UNARY | VIEWS | {"broadcast_div"} or len(active) != 1:
            return None, masks
        if op.kind in _MASKS:
            masks.extend(t for t in op.inputs if t != active[0])
        tensor = active[0]


def _down_to_values(
    graph: OperatorGraph, softmax: Operator, members: dict[str, Operator]
) -> tuple[Operator | None, bool]:
    """The product with v, and whether a dropout comes before it."""
    tensor, dropout = softmax.output, False
    while True:
        op = graph.sole_consumer(tensor)
        if op is None:
            return None, dropout
        members[op.name] = op
        if op.kind in _MATMULS:
            is_weighted = op.arguments["a"] == (tensor,) and graph.is_active(op.arguments["b"][0])
            return (op if is_weighted else None), dropout
        if op.kind not in UNARY | VIEWS | _MASKS or graph.active_inputs(op) != (tensor,):
            return None, dropout
        dropout |= op.kind == "dropout"
        tensor = op.output


def _sizes(graph: OperatorGraph, scores: Operator, weighted: Operator) -> tuple[int, int, int] | None:
    """Rows, heads and features per head; None where queries and keys differ in number, or samples are not in front."""
    *front, rows, columns = graph.shapes[scores.output]
    *others, weighted_rows, head_dim = graph.shapes[weighted.output]
    count = 1
    for length in front:
        count *= length
    if rows != columns or front != others or weighted_rows != rows or count % graph.batch:
        return None
    if front and front[0] % graph.batch:
        return None
    return rows, count // graph.batch, head_dim


def _merge_heads(
    graph: OperatorGraph, weighted: Operator, rows: int, features: int, members: dict[str, Operator]
) -> str | None:
    """Down through views to the tensor that has the heads side by side."""
    tensor = weighted.output
    wanted = graph.batch * rows
    while True:
        shape = graph.shapes[tensor]
        one_head = weighted.output == tensor and features == shape[-1] and graph.elements(tensor) == wanted * features
        op = graph.sole_consumer(tensor)
        if op is None or op.kind not in VIEWS:
            return tensor if one_head else None
        if one_head and op.kind == "reshape" and graph.shapes[op.output][-1] != features:
            return tensor
        members[op.name] = op
        tensor = op.output
        if op.kind == "reshape" and graph.shapes[tensor][-1] == features:
            return tensor


def _up_to_sources(
    graph: OperatorGraph, tensor: str, ends: set[str], passable: set[str]
) -> tuple[list[str], dict[str, Operator]]:
    """Where an operand comes from, and the operators on the way.

    Where the ways from several layers meet (a residual, say), their meeting place is the source.
    """
    op = graph.producer.get(tensor)
    active = graph.active_inputs(op) if op is not None else ()
    if op is None or not active or tensor in ends or not (op.kind in _MERGES | ELEMENTWISE or op.name in passable):
        return [tensor], {}
    sources: dict[str, None] = {}
    members = {op.name: op}
    for other in active:
        found, between = _up_to_sources(graph, other, ends, passable)
        sources.update(dict.fromkeys(found))
        members.update(between)
    return (list(sources), members) if len(sources) == 1 else ([tensor], {})


def _add_feeders(graph: OperatorGraph, members: dict[str, Operator]) -> None:
    """Add operators that only make masks, angles of rotary positions and the like for the region."""
    todo = [tensor for op in members.values() for tensor in op.inputs if not graph.is_active(tensor)]
    while todo:
        op = graph.producer.get(todo.pop())
        if op is None or op.name in members:
            continue
        if all(reader.name in members for tensor in op.outputs for reader in graph.consumers.get(tensor, ())):
            members[op.name] = op
            todo.extend(op.inputs)


def _closed(graph: OperatorGraph, members: dict[str, Operator], output: str) -> bool:
    """Whether nobody outside reads anything of it but the output."""
    for op in members.values():
        for tensor in op.outputs:
            if tensor != output and graph.is_active(tensor):
                readers = graph.consumers.get(tensor, ())
                if tensor in graph.outputs or any(reader.name not in members for reader in readers):
                    return False
    return True


def _is_causal(graph: OperatorGraph, masks: list[str], rows: int) -> bool | None:
    """Whether one of the masks leaves out what lies ahead."""
    verdicts: list[bool | None] = []
    for mask in masks:
        if not graph.is_fixed(mask) or graph.is_learned(mask) or graph.elements(mask) < rows * rows:
            continue  # a mask of padding comes from the inputs, a bias is learned, a scale has one element
        kinds = {op.kind for op in graph.ancestors(mask)}
        held = [graph.variables[t].lower_triangular for t in _leaves(graph, mask) if t in graph.variables]
        if kinds & {"tril", "triu", "fused_tril"} or True in held:
            return True
        verdicts.append(None if None in held or not held else False)
    return None if None in verdicts else False


def _leaves(graph: OperatorGraph, tensor: str) -> set[str]:
    return {t for op in graph.ancestors(tensor) for t in op.inputs if t not in graph.producer} | {tensor}
