"""From a OneFlow module to its operators, by tracing it lazily: nothing executes, no activation is allocated."""

from __future__ import annotations

import contextlib
import io
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import load_oneflow

from .operators import ELEMENTWISE, LOOKUPS, VIEWS, ModelTensor, Operator, OperatorGraph, lookup_arguments

__all__ = ["trace"]

#: The traced module's attribute in the graph: every module path begins with it.
_ROOT = "traced"
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_HIDDEN_VALUE = re.compile(r"not allowed to be called in nn\.Graph|Only eager scalar tensor")
_NOT_USERS = re.compile(r"[/\\](site-packages|dist-packages|extraction)[/\\]|^<")


def trace(module: Any, inputs: Sequence[Any]) -> OperatorGraph:
    """The operators of ``module(*inputs)``.

    Args:
        module: any ``oneflow.nn.Module``; its mode (training or evaluation) is kept.
        inputs: example tensors, the batch as their first dimension.

    Raises:
        UserError: the first input has no dimension, or the module cannot be traced (its forward raises, or looks at values).
    """
    if not inputs or not inputs[0].shape:
        raise UserError("the example inputs should begin with a tensor whose first dimension is the batch")
    with _tensors_as_buffers(module):
        return _with_constant_lookups(_operators(module, inputs))


def _operators(module: Any, inputs: Sequence[Any]) -> OperatorGraph:
    graph = _lazy_graph(module, inputs)
    forward, full = graph._forward_job_proto, graph._full_job_proto
    shapes = {name: tuple(blob.shape.dim) for name, blob in full.helper.lbn2logical_blob_desc.items()}
    operators, data, returned, variables = [], [], [], {}
    for conf in forward.net.op:
        kind = conf.WhichOneof("op_type")
        if kind == "user_conf":
            operators.append(_operator(conf))
        elif kind == "input_conf":
            data.append(f"{conf.name}/{conf.input_conf.out}")
        elif kind == "output_conf":
            returned.append(getattr(conf.output_conf, "in"))
        elif kind == "variable_conf":
            variables[f"{conf.name}/{conf.variable_conf.out}"] = conf.name
        else:
            raise UserError(f"the trace holds a {kind} operator ({conf.name}), which is not understood")
    operators, outputs = _without_wrapper(operators, returned)
    operators = _without_dead(operators, outputs)
    _complete_shapes(operators, shapes)
    batch = int(inputs[0].shape[0])
    notes = []
    batched = []
    for i, tensor in enumerate(data):
        if shapes[tensor] and shapes[tensor][0] == batch:
            batched.append(tensor)
        else:
            notes.append(
                f"example input {i} of shape {shapes[tensor]} does not begin with the batch of {batch}: taken as a constant"
            )
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if frozen:
        notes.append(f"{len(frozen)} frozen parameters ({frozen[0]}, ...) are counted as trained ones")
    return OperatorGraph(
        operators=tuple(operators),
        shapes=shapes,
        inputs=tuple(batched),
        variables=_variables(module, variables, shapes),
        outputs=tuple(outputs),
        batch=batch,
        aliases=_aliases(module, variables),
        parameters=tuple(name for name, _ in module.named_parameters()),
        containers=_containers(module),
        leaves=frozenset(path for path, part in module.named_modules() if not list(part.children())),
        modules={path: part for path, part in module.named_modules() if path},
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _tensors_as_buffers(module: Any) -> Iterator[None]:
    """Register tensors that are plain attributes (masks, tables of angles) as buffers, for as long as the context lasts.

    Otherwise their values could not be looked at, and OneFlow aborts the process where a second graph meets them.
    """
    flow: Any = load_oneflow()
    found = [
        (part, name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, flow.Tensor)
    ]
    for part, name, value in found:
        del part.__dict__[name]
        part.register_buffer(name, value)
    try:
        yield
    finally:
        for part, name, value in found:
            del part._buffers[name]
            part.__dict__[name] = value


def _with_constant_lookups(graph: OperatorGraph) -> OperatorGraph:
    """Count indices as data where a table is looked up at the same place for all tokens of the batch.

    Token types that are not given are such zeros.  (Positions, which count up, are none.)
    """
    constant = []
    for op in graph.operators:
        if op.kind in LOOKUPS and graph.is_fixed(lookup_arguments(op)[1]):
            _, indices = lookup_arguments(op)
            shape = graph.shapes[indices]
            makers = {maker.kind for maker in graph.ancestors(indices)}
            if (
                len(shape) > 1
                and shape[0] == graph.batch
                and "constant" in makers
                and makers <= {"constant", *VIEWS, "cast"}
            ):
                constant.append(indices)
    return replace(graph, inputs=(*graph.inputs, *constant))


def _lazy_graph(module: Any, inputs: Sequence[Any]) -> Any:
    flow: Any = load_oneflow()

    class Traced(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, _ROOT, module)

        def build(self, *args: Any) -> Any:
            # Outputs are allocated: a number stands for each.
            outputs = list(_tensors(getattr(self, _ROOT)(*args), flow))
            if not outputs:
                raise UserError("the module returns no tensor, it should return its loss or its output")
            return tuple(flow.sum(output.to(flow.float32)) for output in outputs)

    with _quiet():
        graph = Traced()
        try:
            graph.build_graph(*inputs)
        except UserError:
            raise
        except Exception as error:  # whatever a user's forward raises
            raise UserError(f"the module cannot be traced: {describe(error)}") from error
    return graph


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """OneFlow prints its view of an error, and warns of modules that it has not met before."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def describe(error: BaseException) -> str:
    """An exception as one line: its type and message, and the line of the user's code that led to it.

    OneFlow's messages are the fault, its own stack, and the type of the error; the fault is often told by two numbers alone,
    so that the function which found it is told with them.
    """
    lines = [_COLOURS.sub("", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line]
    text = lines[0].removeprefix("Error: ")[:200] if lines else ""
    if _HIDDEN_VALUE.search(text):
        text = f"a tensor's value is looked at, which a plan cannot depend on ({text})"
    functions = [line.rpartition(", in ")[2] for line in lines[1:] if line.startswith("File ") and ", in " in line]
    if functions:
        text = f"{text} in {functions[-1]}"
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _NOT_USERS.search(f.filename)]
    return f"{message} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else message


def _tensors(value: Any, flow: Any) -> Iterator[Any]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, flow.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, flow)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part, flow)


def _operator(conf: Any) -> Operator:
    user = conf.user_conf
    pieces = conf.name.rsplit("-", 2)
    path = pieces[0] if len(pieces) == 3 else ""
    return Operator(
        name=conf.name,
        kind=user.op_type_name,
        path=_relative(path),
        arguments={key: tuple(value.s) for key, value in user.input.items()},
        results={key: tuple(value.s) for key, value in user.output.items()},
        attributes={key: _attribute(value) for key, value in user.attr.items()},
    )


def _attribute(value: Any) -> Any:
    kind = value.WhichOneof("value")
    held = getattr(value, kind)
    if kind.startswith("at_list"):
        return tuple(held.val)
    return tuple(held.dim) if kind == "at_shape" else held


def _relative(path: str) -> str:
    """A module path, seen from the traced module."""
    return path[len(_ROOT) + 1 :] if path.startswith(f"{_ROOT}.") else ""


def _without_wrapper(operators: list[Operator], returned: Sequence[str]) -> tuple[list[Operator], list[str]]:
    """The model's own operators and outputs, without the sums (and casts) that stand for them."""
    producer = {tensor: op for op in operators for tensor in op.outputs}
    wrapper, outputs = set(), []
    for tensor in returned:
        while tensor in producer and not producer[tensor].name.startswith(_ROOT):
            wrapper.add(producer[tensor].name)
            tensor = producer[tensor].inputs[0]
        # A sum over a sole number can be left away by OneFlow, and stands in the module's name where it is not.
        outputs.append(tensor)
    return [op for op in operators if op.name not in wrapper], outputs


def _without_dead(operators: Sequence[Operator], outputs: Sequence[str]) -> list[Operator]:
    """The operators that some output is made of."""
    live = set(outputs)
    kept = []
    for op in reversed(operators):
        if not live.isdisjoint(op.outputs):
            kept.append(op)
            live.update(op.inputs)
    return kept[::-1]


def _complete_shapes(operators: Sequence[Operator], shapes: dict[str, tuple[int, ...]]) -> None:
    """Add shapes that OneFlow has no more: it joins sums of sums, and forgets the inner ones.

    Raises:
        UserError: another tensor has no shape.
    """
    for op in operators:
        for tensor in op.outputs:
            if tensor in shapes:
                continue
            if op.kind not in ELEMENTWISE:
                raise UserError(f"the shape of what {op.name} makes is not known to OneFlow")
            shapes[tensor] = tuple(np.broadcast_shapes(*(shapes[source] for source in op.inputs)))


def _variables(module: Any, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> dict[str, ModelTensor]:
    parameters = {name for name, _ in module.named_parameters()}
    buffers = dict(module.named_buffers())
    found = {}
    for tensor, name in names.items():
        own = _relative(name)
        found[tensor] = ModelTensor(
            name=own or name,
            shape=shapes[tensor],
            trained=own in parameters,
            lower_triangular=_lower_triangular(buffers[own]) if own in buffers else None,
        )
    return found


def _lower_triangular(buffer: Any) -> bool | None:
    value = buffer.numpy()
    if value.ndim < 2 or value.shape[-1] != value.shape[-2]:
        return None
    matrix = value.reshape(-1, *value.shape[-2:])[0]
    return bool((np.triu(matrix, 1) == 0).all() or (np.tril(matrix) == 0).all())


def _aliases(module: Any, names: dict[str, str]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Every (module path, attribute) under which a parameter is known, by its tensor in the trace."""
    holders: dict[int, list[tuple[str, str]]] = {}
    identity: dict[str, int] = {}
    for path, part in module.named_modules():
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((path, attribute))
                identity[f"{path}.{attribute}".lstrip(".")] = id(parameter)
    return {
        tensor: tuple(holders[identity[_relative(name)]])
        for tensor, name in names.items()
        if _relative(name) in identity
    }


def _containers(module: Any) -> dict[str, tuple[str, ...]]:
    """Module lists and sequences with their children."""
    flow: Any = load_oneflow()
    kinds = (flow.nn.ModuleList, flow.nn.Sequential)
    return {
        path: tuple(f"{path}.{name}".lstrip(".") for name, _ in part.named_children())
        for path, part in module.named_modules()
        if isinstance(part, kinds)
    }
