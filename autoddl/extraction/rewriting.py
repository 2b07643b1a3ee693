"""What a trace does not say by itself: where gradients end, and operators that OneFlow writes in a roundabout way.

A lazy graph has no gradients, so ``detach()`` and ``no_grad()`` leave no trace of their own. While a module is traced they leave
marks, operators with numbers that no model has; `rewritten` turns them into operators of kind ``detach``.

Also rewritten: products with the transposed view of a matrix (``matmul(x, table.weight.t())``), which are products with the matrix
itself; lookups of places that ``repeat_interleave`` makes, which repeat elements; and the norm of a whole tensor, which is a root
of a sum of squares.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from autoddl.pipelines.runtime.load import load_oneflow

from .operators import Operator

__all__ = ["marked_gradients", "rewritten"]

#: Bounds of the marks of ``detach()``.
_DETACH = 3.0e38
#: The numbers of the marks of the beginning and the end of ``no_grad()``.
_BEGIN, _END = 3.0e33, 4.0e33


@contextlib.contextmanager
def marked_gradients() -> Iterator[None]:
    """Let ``detach()`` and ``no_grad()`` leave marks in the trace while the context is active."""
    flow: Any = load_oneflow()
    modes = sys.modules[flow.no_grad.__module__]
    places = ((flow.Tensor, "detach"), (flow.no_grad, "__enter__"), (flow.no_grad, "__exit__"), (modes, "AutoGradMode"))
    originals = {(owner, name): getattr(owner, name) for owner, name in places}
    detach, enter, leave, grad_mode = originals.values()

    def detached(x: Any) -> Any:
        return flow._C.hardtanh(x, min_val=-_DETACH, max_val=_DETACH) if x.is_floating_point() else detach(x)

    def begin(self: Any) -> Any:
        flow.full((1,), _BEGIN)
        return enter(self)

    def end(self: Any, *error: Any) -> Any:
        self.grad_mode = None  # OneFlow enables gradients again when this object is deleted
        flow.full((1,), _END)
        return leave(self, *error)

    class Mode:
        """What decorated functions enter; `no_grad` itself only holds it."""

        def __init__(self, is_enabled: bool) -> None:
            self.mode, self.is_enabled = grad_mode(is_enabled), is_enabled

        def __enter__(self) -> None:
            if not self.is_enabled:
                flow.full((1,), _BEGIN)
            self.mode.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.mode.__exit__(*error)
            if not self.is_enabled:
                flow.full((1,), _END)

    for (owner, name), changed in zip(places, (detached, begin, end, Mode)):
        setattr(owner, name, changed)
    try:
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


def rewritten(
    operators: Sequence[Operator], shapes: MutableMapping[str, tuple[int, ...]], returned: Sequence[str]
) -> tuple[list[Operator], list[str]]:
    """Return the operators of a trace rewritten, and the tensors that they return.

    Args:
        operators: The operators, in execution order.
        shapes: Shapes of all tensors; those of new ones are added.
        returned: Tensors that the model returns.
    """
    producers = {tensor: op for op in operators for tensor in op.outputs}
    changed = [
        _detached_of_mark(_with_own_matrix(_repeated(part, producers), producers))
        for op in operators
        for part in _written_out(op, shapes)
    ]
    return _without_gradients(changed, shapes, returned)


def _written_out(op: Operator, shapes: MutableMapping[str, tuple[int, ...]]) -> list[Operator]:
    """Return an operator as it is, or those that compute the norm of a whole tensor."""
    if op.kind != "sqrt_square_sum":
        return [op]
    (x,) = op.inputs
    squares, total = f"{op.name}/squares", f"{op.name}/sum"
    shapes.update({squares: shapes[x], total: ()})
    every = {"axis": tuple(range(len(shapes[x]))), "keepdims": False}
    return [
        Operator(squares, "square", op.path, {"x": (x,)}, {"y": (squares,)}),
        Operator(total, "reduce_sum", op.path, {"input_tensor": (squares,)}, {"output_tensor": (total,)}, every),
        Operator(op.name, "sqrt", op.path, {"x": (total,)}, {"y": (op.output,)}),
    ]


def _detached_of_mark(op: Operator) -> Operator:
    is_mark = op.kind == "hardtanh" and op.attributes.get("max_val", 0.0) > 0.9 * _DETACH
    return replace(op, kind="detach", attributes={}) if is_mark else op


def _with_own_matrix(op: Operator, producers: Mapping[str, Operator]) -> Operator:
    """Return a product with the matrix that its second factor is a transposed view of."""
    if op.kind not in ("matmul", "broadcast_matmul") or "transpose_b" not in op.attributes:
        return op
    view = producers.get(op.arguments["b"][0])
    if view is None or view.kind != "transpose" or tuple(view.attributes["perm"]) != (1, 0):
        return op
    attributes = {**op.attributes, "transpose_b": not op.attributes["transpose_b"]}
    return replace(op, arguments={**op.arguments, "b": (view.inputs[0],)}, attributes=attributes)


def _repeated(op: Operator, producers: Mapping[str, Operator]) -> Operator:
    """Return a lookup of places that repeat each element equally often as an operator ``repeat_elements``."""
    places = producers.get(op.arguments["indices"][0]) if op.kind == "gather" else None
    if places is None or places.kind != "repeat_interleave":
        return op
    repeats = producers.get(places.inputs[-1])
    while repeats is not None and repeats.kind in ("expand", "cast", "reshape"):
        repeats = producers.get(repeats.inputs[0])
    if repeats is None or repeats.kind != "constant":
        return op
    attributes = {"dim": op.attributes["axis"], "repeats": repeats.attributes["integer_value"]}
    return replace(op, kind="repeat_elements", arguments={"in": op.arguments["in"]}, attributes=attributes)


def _without_gradients(
    operators: Sequence[Operator], shapes: MutableMapping[str, tuple[int, ...]], returned: Sequence[str]
) -> tuple[list[Operator], list[str]]:
    """Replace the marks of ``no_grad()`` by operators ``detach``, where results of the operators between are read outside."""
    depth, inside = 0, set[str]()
    made: dict[str, str] = {}
    result: list[Operator] = []

    def outside(tensor: str, path: str) -> str:
        if tensor not in inside:
            return tensor
        if tensor not in made:
            made[tensor] = f"{tensor}/detached"
            shapes[made[tensor]] = shapes[tensor]
            result.append(Operator(made[tensor], "detach", path, {"in": (tensor,)}, {"out": (made[tensor],)}))
        return made[tensor]

    for op in operators:
        mark = op.attributes.get("floating_value", 0.0) if op.kind == "constant" else 0.0
        if 0.9 * _BEGIN < mark < 1.1 * _END:
            depth += 1 if mark < 1.1 * _BEGIN else -1
            continue
        if depth:
            inside.update(op.outputs)
            result.append(op)
            continue
        arguments = {key: tuple(outside(name, op.path) for name in names) for key, names in op.arguments.items()}
        result.append(replace(op, arguments=arguments))
    return result, [outside(tensor, "") for tensor in returned]
