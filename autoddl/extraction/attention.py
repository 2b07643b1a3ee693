"""Finds attention cores: softmax(q k^T) v.

Each softmax is a starting point.  From there the operators of the core are collected in five steps:

1. Scores: upward from the softmax through masks and scales to the product q k^T.
2. Weighted values: downward from the softmax through dropout to the product with v.
3. Merged heads: downward from that product through views to the tensor (batch, rows, heads * head_dim).
4. Sources: upward from q, k and v through views and element-wise operators (split heads, rotary positions, repeated key-value
   heads) to the outputs of other layers.
5. Feeders: operators that compute masks or angles for the operators of steps 1 to 4 alone.

All these operators are one layer if nothing but its output is read elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .attention_checks import core_factor, core_order, is_plain, other_reason, turns_of
from .operators import ELEMENTWISE, UNARY, VIEWS, Operator, OperatorGraph
from .rotary import Turn
from .score_changes import ROLES_OF_OPERATORS, Change, CoreSizes, changes_between

__all__ = ["AttentionRegion", "find_attentions"]

#: Matrix products of two activations.
_MATMULS = frozenset({"batch_matmul", "broadcast_matmul", "matmul"})
#: Operators that apply a mask, a bias or a scale to the scores.
_MASKS = frozenset({*ROLES_OF_OPERATORS, "where"})
#: Operators between q, k or v and its source that rearrange elements: rotary positions join halves, or stack features of pairs.
_REARRANGEMENTS = VIEWS | frozenset({"concat", "repeat_elements", "stack"})


@dataclass(frozen=True)
class AttentionRegion:
    """One attention core.

    Attributes:
        operators: All operators of the core, in execution order.
        path: Path of the module that computes the softmax, without that of a module for the softmax alone.
        sources: Tensors that the core reads: those of q first, then k, then v.
        output: Output tensor of shape (batch, rows, heads * head_dim).
        rows: Query rows of one sample, those of all windows.
        heads: Query heads.
        head_dim: Features of one head.
        causal: Whether a constant mask hides the later rows from each row.  None if there is a constant mask of unknown values.
        dropout: Whether dropout is applied to the probabilities.
        is_interleaved: Whether the features of the only source are q, k and v of each head together, and not those of all heads.
        windows: Number of windows of successive rows that attend to themselves alone.
        key_rows: Rows of keys and values of one sample.
        changes: What happens to the scores before the softmax; None if nothing but a causal mask.
        rotary: The base of rotary positions (0: none), the number of turned features, and whether pairs are neighbours.
        reason: Why ranks cannot run the core as attention, as the end of a sentence.  "" if they can.
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
    reason: str = ""
    is_interleaved: bool = False
    windows: int = 1
    key_rows: int = 0
    changes: tuple[Change, ...] | None = None
    rotary: tuple[int, int, bool] = (0, 0, False)


def find_attentions(graph: OperatorGraph, ends: set[str], passable: set[str]) -> list[AttentionRegion]:
    """Return all attention cores of a graph.

    Args:
        graph: The traced operators.
        ends: Outputs of other layers, such as dense layers.  The upward search for sources ends at them.
        passable: Names of operators that belong to the core although they are neither views nor element-wise: the norms of
            single heads.
    """
    regions = (_region_around(graph, op, ends, passable) for op in graph.operators if op.kind == "softmax")
    return [region for region in regions if region is not None]


def _region_around(
    graph: OperatorGraph, softmax: Operator, ends: set[str], passable: set[str]
) -> AttentionRegion | None:
    """Return the attention core of a softmax, or None if the softmax is not part of one."""
    members: dict[str, Operator] = {softmax.name: softmax}
    # 1. Scores.
    scores, masks = _find_scores(graph, softmax, members)
    # 2. Weighted values.
    weighted, dropout = _find_weighted_values(graph, softmax, members)
    if scores is None or weighted is None:
        return None
    # 3. Merged heads.
    found = (
        (sizes, merged)
        for sizes in _possible_sizes(graph, scores, weighted)
        if (merged := _merge_heads(graph, weighted, sizes)) is not None
    )
    sizes, merged = next(found, (None, None))
    if sizes is None or merged is None:
        return None
    output, views = merged
    members.update(views)
    # 4. Sources.
    query, key = scores.arguments["a"][0], scores.arguments["b"][0]
    value = weighted.arguments["b"][0]
    sources: dict[str, None] = {}
    paths: list[tuple[str, list[Operator]]] = []
    for tensor in (query, key, value):
        tensor_sources, operators = _find_sources(graph, tensor, ends, passable)
        sources.update(dict.fromkeys(tensor_sources))
        members.update(operators)
        paths.append((tensor_sources[0], list(operators.values())))
    # 5. Feeders.
    _add_feeders(graph, members)
    if not _is_closed(graph, members, output):
        return None
    causal = _is_causal(graph, masks, sizes.rows)
    reason, changes = other_reason(graph, softmax, weighted, members, masks), None
    turns: Mapping[str, Turn] = {}
    if not reason:
        (of_query, before_query), (of_key, before_key), _ = paths
        before = {"a": before_query, "b": before_key}
        found_turns = turns_of(graph, scores, before, (of_query, of_key), sizes)
        reason, turns = (found_turns, {}) if isinstance(found_turns, str) else ("", found_turns)
    factor = core_factor(graph, scores, tuple(sources), turns)
    if not reason and not is_plain(graph, softmax, scores, masks, factor, sizes, causal):
        known = sizes.head_dim**-0.5 if factor is None else factor
        changed = changes_between(graph, scores, softmax, sizes, known)
        reason, changes = (changed, None) if isinstance(changed, str) else ("", changed)
    order = core_order(graph, scores, weighted, tuple(sources), output, sizes, turns)
    if order == "other" and not reason:
        reason = "the features of its queries, keys and values are in another order"
    return AttentionRegion(
        operators=tuple(sorted(members.values(), key=lambda op: graph.position[op.name])),
        # A module for the softmax alone is part of the attention around it.
        path=softmax.path.rpartition(".")[0] if softmax.path in graph.leaves else softmax.path,
        sources=tuple(sources),
        output=output,
        rows=sizes.windows * sizes.rows,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        causal=causal if changes is None else False,
        dropout=dropout,
        reason=reason,
        is_interleaved=order == "interleaved",
        windows=sizes.windows,
        key_rows=sizes.windows * sizes.keys,
        changes=changes,
        rotary=turns["a"].angles if turns else (0, 0, False),
    )


def _find_scores(
    graph: OperatorGraph, softmax: Operator, members: dict[str, Operator]
) -> tuple[Operator | None, list[str]]:
    """Return the product q k^T (None if there is none) and the masks and scales between it and the softmax.

    The operators between them are added to ``members``.
    """
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


def _find_weighted_values(
    graph: OperatorGraph, softmax: Operator, members: dict[str, Operator]
) -> tuple[Operator | None, bool]:
    """Return the product with v (None if there is none), and whether a dropout precedes it.

    The operators between the softmax and the product are added to ``members``.
    """
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


def _possible_sizes(graph: OperatorGraph, scores: Operator, weighted: Operator) -> list[CoreSizes]:
    """Return the sizes that a core may have: all its matrices are of heads, or the first dimension has windows of the samples.

    Returns:
        Nothing if the first dimension does not begin with the batch.
    """
    *leading, rows, columns = graph.shapes[scores.output]
    *weighted_leading, weighted_rows, head_dim = graph.shapes[weighted.output]
    num_matrices = math.prod(leading)
    if leading != weighted_leading or weighted_rows != rows or num_matrices % graph.batch:
        return []
    if leading and leading[0] % graph.batch:
        return []
    heads = num_matrices // graph.batch
    windows = leading[0] // graph.batch if len(leading) > 1 else 1
    counts = {1: heads, windows: heads // windows}
    return [CoreSizes(number, rows, columns, of_each, head_dim) for number, of_each in counts.items()]


def _merge_heads(graph: OperatorGraph, weighted: Operator, sizes: CoreSizes) -> tuple[str, dict[str, Operator]] | None:
    """Return the tensor that holds the features of all heads in its last dimension, or None if there is none.

    The second value are the views between the product with v and this tensor.  A single head needs no view.
    """
    tensor, members = weighted.output, dict[str, Operator]()
    features = sizes.heads * sizes.head_dim
    num_elements = graph.batch * sizes.windows * sizes.rows * features
    while True:
        shape = graph.shapes[tensor]
        is_single_head = tensor == weighted.output and shape[-1] == features and graph.elements(tensor) == num_elements
        op = graph.sole_consumer(tensor)
        if op is None or op.kind not in VIEWS:
            return (tensor, members) if is_single_head else None
        if is_single_head and op.kind == "reshape" and graph.shapes[op.output][-1] != features:
            return tensor, members
        members[op.name] = op
        tensor = op.output
        if op.kind == "reshape" and graph.shapes[tensor][-1] == features:
            return tensor, members


def _find_sources(
    graph: OperatorGraph, tensor: str, ends: set[str], passable: set[str]
) -> tuple[list[str], dict[str, Operator]]:
    """Return the tensors that q, k or v is computed from, and the operators between them.

    If an operator joins several sources (a residual sum, for example), its output is taken as the source.
    """
    op = graph.producer.get(tensor)
    active = graph.active_inputs(op) if op is not None else ()
    if (
        op is None
        or not active
        or tensor in ends
        or not (op.kind in _REARRANGEMENTS | ELEMENTWISE or op.name in passable)
    ):
        return [tensor], {}
    sources: dict[str, None] = {}
    members = {op.name: op}
    for other in active:
        other_sources, operators = _find_sources(graph, other, ends, passable)
        sources.update(dict.fromkeys(other_sources))
        members.update(operators)
    return (list(sources), members) if len(sources) == 1 else ([tensor], {})


def _add_feeders(graph: OperatorGraph, members: dict[str, Operator]) -> None:
    """Add operators that compute masks, angles of rotary positions and the like for ``members`` alone."""
    pending = [tensor for op in members.values() for tensor in op.inputs if not graph.is_active(tensor)]
    while pending:
        op = graph.producer.get(pending.pop())
        if op is None or op.name in members:
            continue
        if all(reader.name in members for tensor in op.outputs for reader in graph.consumers.get(tensor, ())):
            members[op.name] = op
            pending.extend(op.inputs)


def _is_closed(graph: OperatorGraph, members: dict[str, Operator], output: str) -> bool:
    """Return whether ``output`` is the only active tensor of ``members`` that is read outside of ``members``."""
    tensors = (tensor for op in members.values() for tensor in op.outputs)
    return not any(
        tensor != output and graph.is_active(tensor) and graph.is_read_outside(tensor, members) for tensor in tensors
    )


def _is_causal(graph: OperatorGraph, masks: list[str], rows: int) -> bool | None:
    """Return whether one of the masks is causal; None if none is, but the values of at least one mask are unknown."""
    is_unknown = False
    for mask in masks:
        # A padding mask depends on the inputs, an additive bias is learned, and a scale has a single element.
        if not graph.is_fixed(mask) or graph.is_learned(mask) or graph.elements(mask) < rows * rows:
            continue
        kinds = {op.kind for op in graph.ancestors(mask)}
        triangular = [graph.variables[t].lower_triangular for t in _roots(graph, mask) if t in graph.variables]
        if kinds & {"tril", "triu", "fused_tril"} or True in triangular:
            return True
        is_unknown |= None in triangular or not triangular
    return None if is_unknown else False


def _roots(graph: OperatorGraph, tensor: str) -> set[str]:
    """Return the tensors without a producer that a tensor depends on; the tensor itself is always among them."""
    return {t for op in graph.ancestors(tensor) for t in op.inputs if t not in graph.producer} | {tensor}
