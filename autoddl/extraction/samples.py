"""Finds where the samples lie in every tensor of a trace, and where an operator mixes them.

A tensor is *fixed* (it has no samples), *split* (ranks that split the samples have a part each), or *whole* (it belongs to all
samples together, like the mean of a batch); see :mod:`autoddl.costmodel.program`. The samples of a tensor lie in one dimension of
length ``outer * n * inner``, in this order: ``outer`` is 1 if they come first, as in the (n * windows, rows, features) of window
attention, and 3 if three tensors of n samples each were concatenated.

An operator is *split* if a part of the samples of its inputs is enough for the same part of its output. The rules are below, by
the type of the operator. A sum over the samples is split as well, and its partial results are summed. Every other operator that
mixes samples, or whose type has no rule, is *whole*: it reads all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Optional

from autoddl.costmodel.program import Scaled, at

from .operators import ELEMENTWISE, ELEMENTWISE_LOSSES, LOOKUPS, Operator, OperatorGraph
from .scales import attributes_of

__all__ = ["FIXED", "Samples", "State", "find_samples"]


@dataclass(frozen=True)
class State:
    """Where the samples of a tensor lie.

    Attributes:
        kind: ``fixed``, ``split`` or ``whole``.
        dim: The dimension with the samples; -1 if there is none, or if it is not known.
        outer: Number of elements before the samples inside this dimension.
    """

    kind: str
    dim: int = -1
    outer: int = 1


FIXED = State("fixed")
#: A dimension and ``outer``; None if no rule applies.
Place = Optional[tuple[int, int]]


@dataclass
class Samples:
    """The samples in a trace.

    Attributes:
        states: The state of every tensor.
        contexts: By operator name, whether it is ``fixed``, ``split`` or ``whole``.
        summed: Names of the split operators whose results are partial: ``sum``, or ``mean`` if they are means.
    """

    states: dict[str, State] = field(default_factory=dict)
    contexts: dict[str, str] = field(default_factory=dict)
    summed: dict[str, str] = field(default_factory=dict)

    def outer_of(self, tensor: str, dims: tuple[int | Scaled, ...]) -> int:
        """Return the number of elements of a split tensor before its samples."""
        state = self.states[tensor]
        return prod(at(dims[: state.dim], 1)) * state.outer


def find_samples(graph: OperatorGraph) -> Samples:
    """Return where the samples lie in all tensors of a graph."""
    found = Samples()
    for tensor in (*graph.data, *graph.inputs):
        is_batched = tensor in graph.inputs and tensor in graph.dims and _varying(graph, tensor) == 0
        found.states[tensor] = State("split", 0, 1) if is_batched else FIXED
    found.states.update((tensor, FIXED) for tensor in graph.variables)
    for op in graph.operators:
        _add(graph, op, found)
    return found


def _varying(graph: OperatorGraph, tensor: str) -> int | None:
    """Return the only dimension of a tensor that grows with the samples; None if there is none, or if there are several."""
    dims = [i for i, length in enumerate(graph.dims[tensor]) if isinstance(length, Scaled)]
    return dims[0] if len(dims) == 1 else None


def _times(graph: OperatorGraph, tensor: str, dim: int) -> int:
    """Return the length of a dimension per sample."""
    length = graph.dims[tensor][dim]
    return int(length.times) if isinstance(length, Scaled) else 0


def _add(graph: OperatorGraph, op: Operator, found: Samples) -> None:
    """Set the context of an operator and the states of its outputs."""
    inputs = {tensor: found.states[tensor] for tensor in op.inputs}
    kinds = {state.kind for state in inputs.values()}
    outputs = op.outputs
    if kinds <= {"fixed"}:
        places = [_varying(graph, tensor) for tensor in outputs]
        grows = op.name in graph.scaled or any(
            isinstance(length, Scaled) for tensor in outputs for length in graph.dims[tensor]
        )
        if not grows:
            context, states = "fixed", [FIXED] * len(outputs)
        elif op.kind in _UNIFORM and all(place is not None for place in places):
            context, states = "split", [State("split", place, 1) for place in places if place is not None]
        else:
            context, states = "whole", [_whole(graph, tensor) for tensor in outputs]
    else:
        # Whole tensors with samples can be split; those without are like fixed ones.
        split = {tensor: state for tensor, state in inputs.items() if state.dim >= 0}
        rule = _RULES.get(op.kind)
        is_allowed = "split" in kinds and all(
            state.kind != "whole" or state.dim >= 0 or not _grows(graph, tensor) for tensor, state in inputs.items()
        )
        place = rule(graph, op, split) if rule is not None and split else None
        if place is not None:
            context = "split" if is_allowed else "whole"
            states = [_placed(graph, tensor, place, context) for tensor in outputs]
        elif is_allowed and op.kind in _PARTIAL and _is_partial(graph, op, split):
            context, states = "split", [State("whole") for _ in outputs]
            found.summed[op.name] = "mean" if op.kind in _MEANS else "sum"
        else:
            context, states = "whole", [_whole(graph, tensor) for tensor in outputs]
    found.contexts[op.name] = context
    found.states.update(zip(outputs, states))


def _grows(graph: OperatorGraph, tensor: str) -> bool:
    return any(isinstance(length, Scaled) for length in graph.dims[tensor])


def _whole(graph: OperatorGraph, tensor: str) -> State:
    """Return the state of a whole tensor: its samples are known if a dimension has their very number."""
    dim = _varying(graph, tensor)
    return State("whole", dim, 1) if dim is not None and graph.dims[tensor][dim] == Scaled(1) else State("whole")


def _placed(graph: OperatorGraph, tensor: str, place: tuple[int, int], context: str) -> State:
    """Return the state of an output; further outputs of an operator may have another number of dimensions."""
    dim = _varying(graph, tensor)
    if dim is None:
        return State("whole" if context == "whole" else "split", place[0], place[1])
    return State(context, dim, place[1])


# ---- Rules by operator type ------------------------------------------------------------------------------------------------

Split = Mapping[str, State]
Rule = Callable[[OperatorGraph, Operator, Split], Place]


def _main(op: Operator, *keys: str) -> str:
    """Return the first argument with one of the given names."""
    return next(op.arguments[key][0] for key in keys if key in op.arguments)


def _elementwise(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """Aligned from the last dimension, all inputs have their samples in the same place."""
    rank = len(graph.dims[op.output])
    places = {(rank - len(graph.dims[tensor]) + state.dim, state.outer) for tensor, state in split.items()}
    return places.pop() if len(places) == 1 else None


def _reshape(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """The number of elements before the samples stays as it is."""
    (tensor, state), *others = split.items()
    dim = _varying(graph, op.output)
    if others or dim is None:
        return None
    before = prod(at(graph.dims[tensor][: state.dim], 1)) * state.outer
    outer, rest = divmod(before, prod(at(graph.dims[op.output][:dim], 1)))
    return (dim, outer) if outer and not rest and _times(graph, op.output, dim) % outer == 0 else None


def _transpose(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    ((_, state),) = split.items()
    return op.attributes["perm"].index(state.dim), state.outer


def _cut(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """Samples are not cut, or whole copies of them are: one of the tensors that were concatenated."""
    tensor = _main(op, "in", "x", "ref")
    if tensor not in split:
        return None
    state, attributes = split[tensor], attributes_of(graph, op)
    if op.kind == "narrow":
        if attributes["dim"] != state.dim:
            return state.dim, state.outer
        first, length = attributes["start"], attributes["length"]
    else:
        first, stop, step = (attributes[key][state.dim] for key in ("start", "stop", "step"))
        if step != 1:
            return None
        times = [value.times if isinstance(value, Scaled) else None for value in (first, stop)]
        length = Scaled(times[1] - (times[0] or 0)) if times[1] is not None else stop
    if op.kind == "slice_update":
        return (state.dim, state.outer) if first == 0 and length == graph.dims[tensor][state.dim] else None
    begin = first.times if isinstance(first, Scaled) and not first.plus else None if first else 0
    if begin is None or not isinstance(length, Scaled) or length.plus:
        return None
    inner = _times(graph, tensor, state.dim) // state.outer
    return (state.dim, int(length.times) // inner) if begin % inner == 0 == length.times % inner else None


def _concat(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    axis, states = op.attributes["axis"], [split.get(tensor) for tensor in op.arguments["in"]]
    if any(state is None for state in states):
        return None
    places = {(state.dim, state.outer) for state in states if state is not None}
    dim = next(iter(places))[0]
    if op.kind == "stack":
        (place,) = places if len(places) == 1 else [(-1, 0)]
        return None if place[0] < 0 else (dim + (axis <= dim), place[1])
    if axis != dim:
        return places.pop() if len(places) == 1 else None
    inner = {_times(graph, t, dim) // split[t].outer for t in op.arguments["in"]}
    if len(inner) > 1 or len({place[0] for place in places}) > 1:
        return None
    return dim, sum(split[t].outer for t in op.arguments["in"])


def _product(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """The samples are rows of the first factor, columns of the second, or one matrix each."""
    a, b = (op.arguments[key][0] for key in ("a", "b"))
    rank, places = len(graph.dims[op.output]), set()
    for tensor, is_transposed, outside in ((a, "transpose_a", -2), (b, "transpose_b", -1)):
        if tensor not in split:
            continue
        dim, length = split[tensor].dim, len(graph.dims[tensor])
        own = (-3 - outside if op.attributes.get(is_transposed) else outside) + length
        if dim >= length - 2:
            if dim != own or len(split) > 1:
                return None
            places.add((rank + outside, split[tensor].outer))
        else:
            places.add((rank - length + dim, split[tensor].outer))
    return places.pop() if len(places) == 1 else None


def _first_dim(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """The samples are the first dimension of all inputs that have them."""
    places = {(state.dim, state.outer) for state in split.values()}
    return places.pop() if len(places) == 1 and next(iter(places))[0] == 0 else None


def _image(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """The samples are the first dimension of the input, and weights have none."""
    return _first_dim(graph, op, split) if set(split) == {_main(op, "in", "x", "input")} else None


def _reduction(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    ((_, state),) = split.items()
    dims = graph.reduced_dims(op)
    if state.dim in dims:
        return None
    keeps = op.attributes.get("keepdims", op.attributes.get("keepdim"))
    return (state.dim if keeps else state.dim - sum(dim < state.dim for dim in dims)), state.outer


def _along(*keys: str) -> Rule:
    """The rule of operators that mix elements along the dimension of an attribute; by default the last one."""

    def rule(graph: OperatorGraph, op: Operator, split: Split) -> Place:
        places = {(state.dim, state.outer) for state in split.values()}
        rank = len(graph.dims[next(iter(split))])
        mixed = next((op.attributes[key] for key in keys if key in op.attributes), -1)
        dims = {dim % rank for dim in (mixed if isinstance(mixed, tuple) else (mixed,))}
        return places.pop() if len(places) == 1 and next(iter(places))[0] not in dims else None

    return rule


def _matrices(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """Operators of the last two dimensions."""
    ((tensor, state),) = split.items()
    return (state.dim, state.outer) if state.dim < len(graph.dims[tensor]) - 2 else None


def _gather(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    """A lookup in a fixed table, or of fixed places along another dimension than that of the samples."""
    table, indices = (_main(op, "weight", "in", "params"), op.arguments["indices"][0])
    if len(split) > 1 and table != indices:
        return None
    axis = op.attributes.get("axis", 0)
    if indices in split:
        state = split[indices]
        if op.kind == "gather_nd":
            return (state.dim, state.outer) if state.dim < len(graph.dims[indices]) - 1 else None
        return axis + state.dim, state.outer
    state, rank = split[table], len(graph.dims[indices])
    if op.kind == "gather_nd":
        depth = int(graph.dims[indices][-1])  # type: ignore[arg-type]
        return (state.dim - depth + rank - 1, state.outer) if state.dim >= depth else None
    if state.dim == axis:
        return None
    return (state.dim if state.dim < axis else state.dim + rank - 1), state.outer


def _pad(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    ((_, state),) = split.items()
    is_padded = op.attributes["padding_before"][state.dim] or op.attributes["padding_after"][state.dim]
    return None if is_padded else (state.dim, state.outer)


def _ctc(graph: OperatorGraph, op: Operator, split: Split) -> Place:
    scores = split.get(op.arguments["log_probs"][0])
    return (0, scores.outer) if scores is not None and scores.dim == 1 and len(split) > 1 else None


def _names(table: str) -> frozenset[str]:
    return frozenset(table.split())


#: Operators without samples in their inputs whose results are alike for all samples, or random.
_UNIFORM = _names("constant empty expand normal uniform uniform_int zeros_like ones_like bernoulli")
#: Element-wise operators besides those of `ELEMENTWISE`.
_MORE_ELEMENTWISE = _names(
    """
    detach bernoulli broadcast_equal broadcast_fmod broadcast_greater broadcast_greater_equal broadcast_less broadcast_less_equal
    broadcast_logical_and broadcast_logical_or broadcast_logical_xor broadcast_not_equal ceil elementwise_maximum
    elementwise_minimum expand floor logical_not one_hot ones_like pow round scalar_floordiv scalar_fmod
    scalar_logical_greater_equal scalar_logical_less_equal scalar_logical_not_equal scalar_logical_and scalar_logical_or sign
    sinh cosh tan where_scalar_x where_scalar_y where_scalar_xy zeros_like atan asin acos erfc log2 rint isnan isinf
    floordiv broadcast_floor_mod fused_bias_add_gelu scalar_mul_by_tensor scalar_add_by_tensor scalar_sub_by_tensor
    scalar_div_by_tensor to_contiguous
    """
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, *_MORE_ELEMENTWISE), _elementwise),
    **dict.fromkeys(ELEMENTWISE_LOSSES - {"binary_cross_entropy_with_logits_reduce_mean"}, _elementwise),
    **dict.fromkeys(_names("reshape squeeze expand_dims flatten"), _reshape),
    **dict.fromkeys(_names("narrow slice slice_update"), _cut),
    **dict.fromkeys(_names("concat stack"), _concat),
    **dict.fromkeys(_names("matmul batch_matmul broadcast_matmul"), _product),
    **dict.fromkeys(
        _names(
            """
            conv1d conv2d conv3d deconv1d deconv2d deconv3d max_pool_1d max_pool_2d max_pool_3d avg_pool_1d avg_pool_2d
            avg_pool_3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
            adaptive_max_pool3d upsample_nearest_1d upsample_nearest_2d upsample_nearest_3d upsample_linear_1d
            upsample_bilinear_2d upsample_bicubic_2d upsample_trilinear_3d reflection_pad1d reflection_pad2d
            replication_pad1d replication_pad2d normalization normalization_add_relu unfold fold
            """
        ),
        _image,
    ),
    **dict.fromkeys(_names("nll affine_grid grid_sample"), _first_dim),
    **dict.fromkeys(
        _names("reduce_sum reduce_mean reduce_max reduce_min reduce_prod reduce_any reduce_all var"), _reduction
    ),
    **dict.fromkeys(
        _names(
            """
            softmax log_softmax l2_normalize layer_norm cumsum cumprod arg_sort sort top_k argmax dim_gather roll flip
            repeat_elements sparse_softmax_cross_entropy sparse_cross_entropy rms_norm
            """
        ),
        _along("axis", "dim", "dims", "begin_norm_axis"),
    ),
    **dict.fromkeys(_names("tril triu fused_tril diagonal"), _matrices),
    **dict.fromkeys((*LOOKUPS, "gather_nd"), _gather),
    "transpose": _transpose,
    "pad": _pad,
    "ctc_loss": _ctc,
}
#: Operators whose partial results over the samples can be summed.
_PARTIAL = _names("reduce_sum matmul batch_matmul broadcast_matmul binary_cross_entropy_with_logits_reduce_mean")
_MEANS = frozenset({"binary_cross_entropy_with_logits_reduce_mean"})


def _is_partial(graph: OperatorGraph, op: Operator, split: Split) -> bool:
    """Return whether partial results of an operator that mixes samples sum up to its result."""
    if op.kind == "reduce_sum":
        return True
    if op.kind in _MEANS:
        return len({(state.dim, state.outer) for state in split.values()}) == 1
    a, b = (op.arguments[key][0] for key in ("a", "b"))
    if a not in split or b not in split or split[a].outer != split[b].outer:
        return False
    inner_a = len(graph.dims[a]) - (2 if op.attributes.get("transpose_a") else 1)
    inner_b = len(graph.dims[b]) - (1 if op.attributes.get("transpose_b") else 2)
    return split[a].dim == inner_a and split[b].dim == inner_b
