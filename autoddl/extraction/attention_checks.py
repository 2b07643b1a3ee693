"""Checks that a found attention core computes what ranks compute for a layer of kind ``attention``.

Plain attention is softmax(q k^T / sqrt(head_dim)) v, with a causal mask or none; what else may happen to its scores is found by
:mod:`.score_changes`. The features of the input are q, k and v of all heads one after the other, or those of each head together.
Views between the input and q, k and v are followed element by element, on an array of indices.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

import numpy as np

from autoddl.costmodel.program import at

from .operators import Operator, OperatorGraph
from .rotary import Turn, turn_of
from .scales import attributes_of
from .score_changes import NEUTRAL, SCALES, CoreSizes, keeps_order, number_of

__all__ = ["core_factor", "core_order", "is_plain", "other_reason", "turns_of"]

#: Most elements whose places are followed; larger inputs are taken to have their features in the usual order.
_MAX_FOLLOWED = 1 << 25
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})
#: Operators of scores that ranks apply too: masks.
_OF_SCORES = frozenset({"add_n", "broadcast_add", "masked_fill", "where", *NEUTRAL})
#: Operators that rearrange elements, and are followed.
_FOLLOWED = frozenset({*_VIEWS, "transpose", "narrow", "slice", "expand", "repeat_elements", *NEUTRAL, *SCALES})


def other_reason(
    graph: OperatorGraph, softmax: Operator, weighted: Operator, members: dict[str, Operator], masks: Sequence[str]
) -> str:
    """Return why ranks cannot run a core as attention, whatever happens to its scores; "" if they can.

    Args:
        graph: The traced operators.
        softmax: The softmax.
        weighted: The product with v.
        members: All operators of the core.
        masks: Tensors that change the scores.
    """
    for op in members.values():
        if graph.active_inputs(op) and any(tensor not in masks for tensor in graph.learned_inputs(op)):
            return "its attention scales or shifts its queries, keys or values by learned tensors"
    tensor = softmax.output
    while (reader := graph.sole_consumer(tensor)) is not None and reader is not weighted:
        op = reader
        if op.kind not in {"dropout", "transpose", *NEUTRAL, *_VIEWS}:
            return f"its attention applies {op.kind} to probabilities"
        if op.kind == "dropout" and not _is_in_order(graph, tensor, softmax.output):
            return "its attention rearranges probabilities"
        tensor = op.output
    return "" if _is_in_order(graph, tensor, softmax.output) else "its attention rearranges probabilities"


def _is_in_order(graph: OperatorGraph, tensor: str, source: str) -> bool:
    """Return whether a tensor has the elements of another one in the same order, perhaps with some dropped."""
    followed = _followed(graph, tensor, (source,), {*_FOLLOWED, "dropout"})
    return followed is not None and np.array_equal(followed[1].reshape(-1), np.arange(followed[1].size))


def turns_of(
    graph: OperatorGraph,
    scores: Operator,
    operators: Mapping[str, Sequence[Operator]],
    sources: Sequence[str],
    sizes: CoreSizes,
) -> dict[str, Turn] | str:
    """Return how queries and keys are turned by their positions, by argument of the product; or why ranks cannot do that.

    Args:
        graph: The traced operators.
        scores: The product q k^T.
        operators: By argument of the product, the operators between it and its source.
        sources: By argument, the source.
        sizes: Sizes of the core.

    Returns:
        Nothing if all operators are followed views and factors.
    """
    if all(op.kind in _FOLLOWED for ops in operators.values() for op in ops):
        return {}
    if sizes.windows > 1:
        return "its attention turns the queries or keys of windows by their positions"
    turns: dict[str, Turn] = {}
    for (key, source), length in zip(zip(operators, sources), (sizes.rows, sizes.keys)):
        is_transposed = key == "b" and not scores.attributes.get("transpose_b")
        turn = turn_of(graph, scores.arguments[key][0], source, length, sizes.head_dim, is_transposed=is_transposed)
        if isinstance(turn, str):
            return turn
        turns[key] = turn
    if turns["a"].angles != turns["b"].angles:
        return "its attention turns queries in another way than keys by their positions"
    return turns


def core_factor(
    graph: OperatorGraph, scores: Operator, sources: Sequence[str], turns: Mapping[str, Turn]
) -> float | None:
    """Return the factor of the product q k^T, and of q and k before; None if it is not known.

    Args:
        graph: The traced operators.
        scores: The product.
        sources: Tensors of q, k and v, or the only one of them all.
        turns: How queries and keys are turned (`turns_of`).
    """
    factor, is_known = float(scores.attributes.get("alpha", 1.0)), True
    for key in ("a", "b"):
        if key in turns:
            factor *= turns[key].factor
            continue
        path, reached = _path_from(graph, scores.arguments[key][0], sources)
        is_known &= reached
        for op in path:
            factor *= number_of(op) ** SCALES[op.kind] if op.kind in SCALES else 1.0
    return factor if is_known else None


def is_plain(
    graph: OperatorGraph,
    softmax: Operator,
    scores: Operator,
    masks: Sequence[str],
    factor: float | None,
    sizes: CoreSizes,
    causal: bool | None,
) -> bool:
    """Return whether a core is plain attention, which divides its scores by a root and has at most a causal mask.

    Args:
        graph: The traced operators.
        softmax: The softmax.
        scores: The product q k^T.
        masks: Tensors that change the scores.
        factor: The factor of the product, if it is known (`core_factor`).
        sizes: Sizes of the core.
        causal: Whether one of the masks is causal, if that is known.
    """
    if (
        sizes.windows > 1
        or sizes.keys != sizes.rows
        or causal is None
        or not all(graph.is_fixed(m) and not graph.is_learned(m) for m in masks)
    ):
        return False
    after, tensor = 1.0, softmax.inputs[0]
    while (op := graph.producer[tensor]) is not scores:
        if op.kind in SCALES:
            after *= number_of(op) ** SCALES[op.kind]
        elif op.kind not in _OF_SCORES and not keeps_order(graph, op):
            return False
        tensor = graph.active_inputs(op)[0]
    return factor is None or math.isclose(factor * after, sizes.head_dim**-0.5, rel_tol=1e-4)


def _path_from(graph: OperatorGraph, tensor: str, sources: Sequence[str]) -> tuple[list[Operator], bool]:
    """Return the operators from a source to a tensor in execution order, and whether all of them are followed."""
    path: list[Operator] = []
    while tensor not in sources:
        op = graph.producer.get(tensor)
        if op is None or op.kind not in _FOLLOWED:
            return path[::-1], False
        path.append(op)
        tensor = graph.active_inputs(op)[0]
    return path[::-1], True


def core_order(
    graph: OperatorGraph,
    scores: Operator,
    weighted: Operator,
    sources: Sequence[str],
    output: str,
    sizes: CoreSizes,
    turns: Mapping[str, Turn],
) -> str:
    """Return the order of the input's features: ``plain``, ``interleaved`` (q, k and v of each head together) or ``other``.

    It is ``plain`` if it is not known.

    Args:
        graph: The traced operators.
        scores: The product q k^T.
        weighted: The product with v.
        sources: Tensors of q, k and v, or the only one of them all.
        output: Output of the core.
        sizes: Sizes of the core.
        turns: How queries and keys are turned (`turns_of`).
    """
    windows, heads, head_dim = sizes.windows, sizes.heads, sizes.head_dim
    if sum(graph.elements(tensor) for tensor in sources) // graph.batch > _MAX_FOLLOWED:
        return "plain"
    lengths = [sizes.rows, *(sizes.keys for _ in sources[1:])]
    features = [graph.elements(tensor) // (graph.batch * windows * length) for tensor, length in zip(sources, lengths)]
    places: list[tuple[int, np.ndarray]] = []
    for op, key in ((scores, "a"), (scores, "b"), (weighted, "b")):
        tensor = op.arguments[key][0]
        if op is scores and key in turns:
            places.append((len(places) if len(sources) > 1 else 0, turns[key].places))
            continue
        followed = _followed(graph, tensor, sources)
        if followed is None:
            return "plain"
        number, index = followed
        is_transposed = op is scores and key == "b" and not op.attributes.get("transpose_b")
        index = index.reshape(-1, *index.shape[-2:])
        index = np.swapaxes(index, 1, 2) if is_transposed else index
        length = sizes.rows if op is scores and key == "a" else sizes.keys
        rows = windows * length
        if index.shape[1:] != (length, head_dim) or windows * heads % len(index):
            return "other"
        if windows > 1:  # the windows of a head are its rows, one after the other
            index = index.reshape(windows, -1, length, head_dim).swapaxes(0, 1).reshape(-1, rows, head_dim)
        first = index[:, :1, :].copy()
        if first.max() >= features[number] or not np.array_equal(
            index, first + np.arange(rows, dtype=np.int32)[None, :, None] * features[number]
        ):
            return "other"  # a row has features of other rows
        places.append((number, first[:, 0, :]))
    back = _followed(graph, output, (weighted.output,))
    if back is not None:
        shape = (windows, heads, sizes.rows, head_dim)
        expected = np.swapaxes(np.arange(math.prod(shape), dtype=np.int32).reshape(shape), 1, 2)
        if not np.array_equal(back[1].reshape(-1), expected.reshape(-1)):
            return "other"
    return _order_of(places, features, heads, head_dim)


def _order_of(places: Sequence[tuple[int, np.ndarray]], features: Sequence[int], heads: int, head_dim: int) -> str:
    """Return the order of the features, given those of q, k and v: arrays of shape (heads, head_dim)."""
    (_, query), (_, key), (_, value) = places
    if len(features) == 1:
        kv_heads = (features[0] // head_dim - heads) // 2
        begins = (0, heads * head_dim, (heads + kv_heads) * head_dim)
        counts = (heads, kv_heads, kv_heads)
    else:
        begins, counts = (0, 0, 0), (heads, features[1] // head_dim, features[-1] // head_dim)
    within = np.arange(head_dim)

    def is_plain(found: np.ndarray, begin: int, count: int) -> bool:
        groups = np.arange(len(found)) // max(len(found) // count, 1)
        return np.array_equal(found, begin + groups[:, None] * head_dim + within)

    if all(map(is_plain, (query, key, value), begins, counts)):
        return "plain"
    every = np.arange(heads)[:, None] * 3 * head_dim + within
    is_interleaved = all(np.array_equal(found, every + i * head_dim) for i, found in enumerate((query, key, value)))
    return "interleaved" if len(features) == 1 and is_interleaved else "other"


def _followed(
    graph: OperatorGraph, tensor: str, sources: Sequence[str], kinds: Container[str] = _FOLLOWED
) -> tuple[int, np.ndarray] | None:
    """Return the source that a tensor is a view of, and the index there of each of its elements, of one sample.

    Args:
        graph: The traced operators.
        tensor: The tensor.
        sources: Tensors that it may be a view of.
        kinds: Operators between them.

    Returns:
        None if it is no view.
    """
    path: list[Operator] = []
    start = tensor
    while start not in sources:
        op = graph.producer.get(start)
        if op is None or op.kind not in kinds:
            return None
        path.append(op)
        start = graph.active_inputs(op)[0]
    shape = at(graph.dims[start], 1)
    index = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    for op in reversed(path):
        attributes = {name: at(value, 1) for name, value in attributes_of(graph, op).items()}
        if op.kind == "transpose":
            index = index.transpose(attributes["perm"])
        elif op.kind == "narrow":
            first = attributes["start"]
            index = np.take(index, range(first, first + attributes["length"]), axis=attributes["dim"])
        elif op.kind == "slice":
            bounds = zip(attributes["start"], attributes["stop"], attributes["step"])
            index = index[tuple(slice(*bound) for bound in bounds)]
        elif op.kind == "repeat_elements":
            index = np.repeat(index, attributes["repeats"], axis=attributes["dim"])
        elif op.kind == "expand":
            index = np.broadcast_to(index, at(graph.dims[op.output], 1))
        else:
            index = index.reshape(at(graph.dims[op.output], 1))
    return list(sources).index(start), index
