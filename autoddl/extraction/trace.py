"""Traces a OneFlow module lazily into an operator graph: no operator executes, no activation is allocated."""

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

from autoddl.costmodel.errors import UserError, without_colors
from autoddl.pipelines.runtime.load import load_oneflow

from .operators import ELEMENTWISE, LOOKUPS, VIEWS, ModelTensor, Operator, OperatorGraph, is_free_name, lookup_arguments
from .rewriting import marked_gradients, rewritten
from .scales import with_scales
from .standins import stand_ins_as_modules, stand_ins_called

__all__ = ["trace"]

#: Attribute of the lazy graph that holds the traced module.  OneFlow's module paths begin with this name.
_ROOT = "traced"
#: OneFlow's messages for a forward pass that reads the value of a tensor, which does not exist during lazy tracing.
_VALUE_READ = re.compile(r"not allowed to be called in nn\.Graph|Only eager scalar tensor")
#: Files that are not the user's code: installed packages, this package, and code that is in no file.
_FOREIGN_FILE = re.compile(r"[/\\](site-packages|dist-packages|extraction)[/\\]|^<")
#: Characters of OneFlow's message that an error quotes.
_MAX_MESSAGE_LENGTH = 200


def trace(module: Any, inputs: Sequence[Any]) -> OperatorGraph:
    """Return the operator graph of ``module(*inputs)``.

    Args:
        module: Any ``oneflow.nn.Module``.  Its mode (training or evaluation) is not changed.
        inputs: Example tensors; their first dimension is the batch.

    Raises:
        UserError: If the first input has no dimension, or if the module cannot be traced because its forward pass raises an
            exception or reads the values of tensors.
    """
    if not inputs or not inputs[0].shape:
        raise UserError("the example inputs should begin with a tensor whose first dimension is the batch")
    _check_local(module)
    batch = int(inputs[0].shape[0])
    # A batch of one is often treated like a dimension that can be left out, so such a model is traced with two samples.
    first = max(batch, 2)
    with _tensors_as_buffers(module):
        graph = _trace_operators(module, _with_batch(inputs, batch, first))
        other = _trace_operators(module, _with_batch(inputs, batch, 2 * first))
        return _with_constant_indices_as_inputs(with_scales(graph, other))


def _check_local(module: Any) -> None:
    """Check that a module has local tensors.

    Raises:
        UserError: One of its tensors is global.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_global:
            raise UserError(
                f"{name} is a global tensor (placement and SBP): AutoDDL chooses both itself; build the model of plain oneflow.nn "
                "layers without placement and sbp, and without to_global in forward()"
            )


def _with_batch(inputs: Sequence[Any], batch: int, samples: int) -> list[Any]:
    """Return inputs with another number of samples; those whose first dimension is not the batch are returned as they are."""
    flow: Any = load_oneflow()
    return [
        flow.zeros(samples, *x.shape[1:], dtype=x.dtype) if samples != batch and x.ndim and x.shape[0] == batch else x
        for x in inputs
    ]


def _trace_operators(module: Any, inputs: Sequence[Any]) -> OperatorGraph:
    """Build the lazy graph of a module and read its operators, tensors and variables from OneFlow's job description."""
    graph, created = _lazy_graph(module, inputs)
    forward, full = graph._forward_job_proto, graph._full_job_proto
    shapes = {name: tuple(blob.shape.dim) for name, blob in full.helper.lbn2logical_blob_desc.items()}
    # Sort the operators of the job by their type.
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
            raise UserError(f"the trace contains the operator {conf.name} of type {kind}, which is not supported")
    # Remove operators that are not part of the model or whose results are not used.
    operators, outputs = _without_wrapper(operators, returned)
    operators, outputs = rewritten(operators, shapes, outputs)
    operators = _without_unused(operators, outputs)
    _infer_missing_shapes(operators, shapes)
    # Inputs without the batch dimension are constants.
    batch = int(inputs[0].shape[0])
    notes = []
    batched = []
    for i, tensor in enumerate(data):
        if shapes[tensor] and shapes[tensor][0] == batch:
            batched.append(tensor)
        elif tensor in shapes:
            notes.append(
                f"example input {i} of shape {shapes[tensor]}: its first dimension is not the batch of {batch}; "
                "it is taken as a constant"
            )
    return OperatorGraph(
        operators=tuple(operators),
        shapes=shapes,
        inputs=tuple(batched),
        data=tuple(data),
        variables=_variables(module, variables, shapes, created),
        outputs=tuple(outputs),
        batch=batch,
        aliases=_aliases(module, variables),
        parameters=tuple(name for name, _ in module.named_parameters()),
        containers=_containers(module),
        leaves=frozenset(path for path, part in module.named_modules() if not list(part.children())),
        modules={path: part for path, part in module.named_modules() if path},
        model=module,
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _tensors_as_buffers(module: Any) -> Iterator[None]:
    """Register tensors that are plain attributes (masks, tables of angles) as buffers while the context is active.

    Values of tensors that are not registered cannot be read, and OneFlow aborts the process when a second graph uses them.
    """
    flow: Any = load_oneflow()
    attributes = [
        (part, name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, flow.Tensor)
    ]
    for part, name, value in attributes:
        del part.__dict__[name]
        part.register_buffer(name, value)
    try:
        yield
    finally:
        for part, name, value in attributes:
            del part._buffers[name]
            part.__dict__[name] = value


def _with_constant_indices_as_inputs(graph: OperatorGraph) -> OperatorGraph:
    """Add index tensors that hold one constant for all tokens of the batch to the inputs of the graph.

    A model makes such indices for token types that the caller does not pass, for example.  The lookup then is an embedding
    layer like that of indices which are passed.  Positions count up, so they are no such indices.
    """
    constant_indices = []
    for op in graph.operators:
        if op.kind in LOOKUPS and graph.is_fixed(lookup_arguments(op)[1]):
            _, indices = lookup_arguments(op)
            shape = graph.shapes[indices]
            ancestor_kinds = {ancestor.kind for ancestor in graph.ancestors(indices)}
            if (
                len(shape) > 1
                and shape[0] == graph.batch
                and "constant" in ancestor_kinds
                and ancestor_kinds <= {"constant", *VIEWS, "cast"}
            ):
                constant_indices.append(indices)
    return replace(graph, inputs=(*graph.inputs, *constant_indices))


@contextlib.contextmanager
def _created_tensors() -> Iterator[list[Any]]:
    """Return a list to which tensors that the module makes of numbers are appended while the context is active.

    They are variables of the trace, whose values OneFlow's description does not contain.
    """
    flow: Any = load_oneflow()
    created: list[Any] = []
    makers = {name: getattr(flow, name) for name in ("tensor", "from_numpy", "as_tensor") if hasattr(flow, name)}

    def recording(maker: Any) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            value = maker(*args, **options)
            created.append(value)
            return value

        return make

    for name, maker in makers.items():
        setattr(flow, name, recording(maker))
    try:
        yield created
    finally:
        for name, maker in makers.items():
            setattr(flow, name, maker)


@contextlib.contextmanager
def _copied_lists(module: Any) -> Iterator[list[Any]]:
    """Replace tensors in lists and dictionaries of modules by copies while the context is active; return the copies.

    OneFlow aborts the process when a second graph uses a tensor that is neither a parameter nor a buffer.
    """
    flow: Any = load_oneflow()
    copies: list[Any] = []

    def copied(value: Any) -> Any:
        if isinstance(value, flow.Tensor):
            copies.append(flow.from_numpy(value.numpy().copy()))
            return copies[-1]
        if isinstance(value, dict):
            return {key: copied(part) for key, part in value.items()}
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value

    held = [
        (part, name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if not name.startswith("_")
    ]
    lists = [(part, name, value) for part, name, value in held if isinstance(value, (list, tuple, dict))]
    for part, name, value in lists:
        part.__dict__[name] = copied(value)
    try:
        yield copies
    finally:
        for part, name, value in lists:
            part.__dict__[name] = value


def _lazy_graph(module: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Build a ``flow.nn.Graph`` that calls the module; also return the tensors that the module makes of numbers.

    Raises:
        UserError: If the module cannot be traced.
    """
    from autoddl.pipelines.runtime.groupednorms import batch_norms_as_local

    flow: Any = load_oneflow()

    class Traced(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, _ROOT, module)

        def build(self, *args: Any) -> Any:
            # OneFlow allocates the outputs of a graph, so the graph returns one sum for each output of the module.
            outputs = list(_tensors(getattr(self, _ROOT)(*args), flow))
            if not outputs:
                raise UserError("the module returns no tensor; it should return its loss or its output")
            return tuple(flow.sum(output.to(flow.float32)) for output in outputs)

    with (
        _silenced(),
        batch_norms_as_local(),
        marked_gradients(),
        stand_ins_as_modules(),
        _created_tensors() as created,
        _copied_lists(module) as copies,
    ):
        created += copies
        graph = Traced()
        try:
            with stand_ins_called(getattr(graph, _ROOT)):
                graph.build_graph(*inputs)
        except UserError:
            raise
        except Exception as error:  # whatever a user's forward raises
            raise UserError(f"the module cannot be traced: {describe(error)}{_module_of(error, module)}") from error
    return graph, created


def _module_of(error: BaseException, module: Any) -> str:
    """Return where in a module an exception was raised, as the end of a message; "" if it was in its own forward pass."""
    paths = {id(part): path for path, part in module.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        # A lazy graph calls the forward passes of modules on objects that stand for them.
        for candidate in (owner, getattr(owner, "__dict__", {}).get("_oneflow_internal_origin__")):
            found = paths.get(id(candidate), found)
    return f" in module {found!r}" if found else ""


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard what OneFlow prints about errors, and its warnings about unknown modules."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type, its message, and the last line of the user's code in its traceback.

    The first line of an OneFlow message states the fault, often with nothing but two numbers.  The lines of OneFlow's own stack
    follow.  The name of the innermost function on this stack is therefore added to the message.
    """
    lines = [line.strip() for line in without_colors(str(error)).splitlines()]
    lines = [line for line in lines if line]
    text = lines[0].removeprefix("Error: ")[:_MAX_MESSAGE_LENGTH] if lines else ""
    if _VALUE_READ.search(text):
        text = f"the module reads the value of a tensor, which a plan cannot depend on ({text})"
    functions = [line.rpartition(", in ")[2] for line in lines[1:] if line.startswith("File ") and ", in " in line]
    if functions:
        text = f"{text} in {functions[-1]}"
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _FOREIGN_FILE.search(f.filename)]
    if isinstance(error, ImportError):
        # The file whose import failed, whoever wrote it.
        every = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
        if every and _FOREIGN_FILE.search(every[-1].filename):
            return f"{message} (imported in {every[-1].filename}, line {every[-1].lineno})"
    return f"{message} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else message


def _tensors(value: Any, flow: Any) -> Iterator[Any]:
    """Yield all tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, flow.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, flow)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part, flow)


def _operator(conf: Any) -> Operator:
    """Return the operator that OneFlow describes by ``conf``; its name is ``<module path>-<operator type>-<number>``."""
    user = conf.user_conf
    pieces = conf.name.rsplit("-", 2)
    path = pieces[0] if len(pieces) == 3 else ""
    return Operator(
        name=conf.name,
        kind=user.op_type_name,
        path=_relative(path),
        # Sorted, since the order in OneFlow's description differs from run to run.
        arguments={key: tuple(value.s) for key, value in sorted(user.input.items())},
        results={key: tuple(value.s) for key, value in sorted(user.output.items())},
        attributes={key: _attribute(value) for key, value in sorted(user.attr.items())},
    )


def _attribute(value: Any) -> Any:
    kind = value.WhichOneof("value")
    held = getattr(value, kind)
    if kind.startswith("at_list"):
        return tuple(held.val)
    return tuple(held.dim) if kind == "at_shape" else held


def _relative(path: str) -> str:
    """Return a module path relative to the traced module."""
    return path[len(_ROOT) + 1 :] if path.startswith(f"{_ROOT}.") else ""


def _without_wrapper(operators: list[Operator], returned: Sequence[str]) -> tuple[list[Operator], list[str]]:
    """Return the model's operators and outputs without the casts and sums that `_lazy_graph` adds to each output."""
    producer = {tensor: op for op in operators for tensor in op.outputs}
    wrapper, outputs = set(), []
    for tensor in returned:
        while tensor in producer and not producer[tensor].name.startswith(_ROOT):
            wrapper.add(producer[tensor].name)
            tensor = producer[tensor].inputs[0]
        # OneFlow may omit the sum of a single number.  If it does not, the name of the sum begins with the module's path.
        outputs.append(tensor)
    return [op for op in operators if op.name not in wrapper], outputs


def _without_unused(operators: Sequence[Operator], outputs: Sequence[str]) -> list[Operator]:
    """Return the operators that at least one output depends on."""
    used_tensors = set(outputs)
    used_operators = []
    for op in reversed(operators):
        if not used_tensors.isdisjoint(op.outputs):
            used_operators.append(op)
            used_tensors.update(op.inputs)
    return used_operators[::-1]


def _infer_missing_shapes(operators: Sequence[Operator], shapes: dict[str, tuple[int, ...]]) -> None:
    """Add the shapes of the inner tensors of nested sums, which OneFlow merges into one sum.

    Raises:
        UserError: If the output of an operator that is not element-wise has no shape.
    """
    for op in operators:
        for tensor in op.outputs:
            if tensor in shapes:
                continue
            if op.kind not in ELEMENTWISE:
                raise UserError(f"OneFlow does not know the shape of the output of {op.name}")
            shapes[tensor] = tuple(np.broadcast_shapes(*(shapes[source] for source in op.inputs)))


def _variables(
    module: Any, names: dict[str, str], shapes: dict[str, tuple[int, ...]], created: Sequence[Any]
) -> dict[str, ModelTensor]:
    """Return the variables of the trace by tensor name.

    Args:
        module: The traced module.
        names: OneFlow's name of each variable, by tensor name.
        shapes: Shapes of all tensors.
        created: Tensors that the module made of numbers.
    """
    parameters = {name for name, _ in module.named_parameters()}
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    buffers = dict(module.named_buffers())
    variables = {}
    free = [value for value in created if not value.is_global]
    for tensor, name in names.items():
        relative = _relative(name)
        constant = None
        if is_free_name(name) and shapes.get(tensor) is not None:
            # OneFlow numbers these tensors in the order of their use, which is mostly that of their creation.
            constant = next((value for value in free if tuple(value.shape) == shapes[tensor]), None)
            free = [value for value in free if value is not constant]
        variables[tensor] = ModelTensor(
            name=relative or name,
            shape=shapes[tensor],
            trained=relative in parameters,
            lower_triangular=_is_lower_triangular(buffers[relative]) if relative in buffers else None,
            constant=None if constant is None else constant.numpy(),
            frozen=relative in frozen,
        )
    return variables


def _is_lower_triangular(buffer: Any) -> bool | None:
    """Return `ModelTensor.lower_triangular` of a buffer; of several matrices the first one counts."""
    value = buffer.numpy()
    if value.ndim < 2 or value.shape[-1] != value.shape[-2]:
        return None
    matrix = value.reshape(-1, *value.shape[-2:])[0]
    return bool((np.triu(matrix, 1) == 0).all() or (np.tril(matrix) == 0).all())


def _aliases(module: Any, names: dict[str, str]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return all (module path, attribute) pairs of each parameter, by tensor name."""
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
    """Return the paths of module lists and sequences, with the paths of their children in order."""
    flow: Any = load_oneflow()
    kinds = (flow.nn.ModuleList, flow.nn.Sequential)
    return {
        path: tuple(f"{path}.{name}".lstrip(".") for name, _ in part.named_children())
        for path, part in module.named_modules()
        if isinstance(part, kinds)
    }
