"""Turns the drafts of layers into a layer graph: joins programs, adds what the model returns, and makes the programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.program import at

from ..zoo import layers as make
from .assembly import Assembly
from .clusters import cluster
from .drafts import LayerDraft, build_layer_graph
from .operators import VIEWS, Operator, OperatorGraph, flops
from .programs import MadeProgram, check_replayed, frontier, make_program
from .reasons import program_reason

__all__ = ["finish"]

#: Kinds of layers that read images.
_IMAGE_KINDS = frozenset({"conv2d", "pool", "batch_norm", "add"})


def finish(assembly: Assembly, name: str, notes: Sequence[str]) -> LayerGraph:
    """Return the layer graph of drafts.

    Args:
        assembly: The drafts, and the tensors that they compute.
        name: Name of the layer graph.
        notes: Its notes so far.

    Raises:
        UserError: Ranks cannot run an operator.
    """
    graph, samples = assembly.graph, assembly.samples
    notes = list(notes)
    returned = _add_output(assembly, notes)

    def reads(draft: LayerDraft) -> list[str]:
        if not draft.is_program:
            return draft.sources
        inside = frozenset(op.name for op in draft.operators)
        return frontier(graph, samples, draft.results, inside)

    _remove_unread(assembly, reads, returned)
    scopes = _Scopes(assembly)
    drafts = cluster(assembly.drafts, reads, assembly.owners, returned, scopes.of)
    for draft in drafts:
        draft.operators.sort(key=lambda op: graph.position[op.name])
    images = _image_tensors(assembly, drafts)
    first = next((draft for draft in drafts if not draft.sources and draft.feed), None)
    made = {id(draft): _made(assembly, draft, draft is first) for draft in drafts}
    producers: dict[int, list[LayerDraft]] = {}
    for draft in drafts:
        program = made[id(draft)]
        tensors = draft.sources if program is None or not draft.is_program else program.reads
        owners = [_final(assembly.owners[tensor], drafts) for tensor in tensors]
        # Programs have no further drafts.
        producers[id(draft)] = [*{id(owner): owner for owner in owners}.values(), *draft.further]
        if draft.is_program:
            draft.reason = program_reason(draft.operators, graph, samples, assembly.reasons, draft.is_loss)
        if program is not None and draft.is_program:
            _describe_program(assembly, draft, _read_once(program, owners), images)
        elif program is not None:
            draft.layer = replace(draft.layer, program=program.program)
    return build_layer_graph(drafts, producers, graph, name, notes)


def _read_once(made: MadeProgram, owners: Sequence[LayerDraft]) -> MadeProgram:
    """Return a program that reads each layer once: several of the tensors that it reads may be views of one output.

    Args:
        made: The program.
        owners: The drafts that compute what it reads.
    """
    places: dict[int, int] = {}
    numbers = [places.setdefault(id(owner), len(places)) for owner in owners]
    sources = tuple(
        replace(source, index=numbers[source.index]) if source.origin == "layer" else source
        for source in made.program.sources
    )
    firsts = tuple(made.reads[numbers.index(number)] for number in range(len(places)))
    return replace(made, program=replace(made.program, sources=sources), firsts=firsts)


def _remove_unread(assembly: Assembly, reads: Callable[[LayerDraft], Sequence[str]], returned: Sequence[str]) -> None:
    """Remove programs whose results nothing reads, like a transposition that is undone."""
    read = {id(assembly.owners[tensor]) for tensor in returned}
    for draft in reversed(assembly.drafts):
        if not draft.is_program or draft.is_output or id(draft) in read:
            read.update(id(assembly.owners[tensor]) for tensor in reads(draft))
            read.add(id(draft))
    assembly.drafts = [draft for draft in assembly.drafts if id(draft) in read]


def _final(draft: LayerDraft, drafts: Sequence[LayerDraft]) -> LayerDraft:
    assert any(draft is other for other in drafts), draft.name
    return draft


def _add_output(assembly: Assembly, notes: list[str]) -> list[str]:
    """Add the layer that returns the loss or the outputs, unless the last layer does; return the tensors of the output."""
    graph, samples = assembly.graph, assembly.samples
    losses = [tensor for tensor in graph.outputs if graph.elements(tensor) == 1 and graph.is_active(tensor)]
    outputs = losses[:1] or [tensor for tensor in dict.fromkeys(graph.outputs) if graph.is_active(tensor)]
    if not outputs:
        raise UserError("the model returns nothing that depends on both its inputs and its parameters")
    if losses and len(graph.outputs) > 1:
        notes.append("the model returns several tensors; the first single number among them is its loss")
    owner = assembly.owners.get(outputs[0])
    if len(outputs) == 1 and owner is not None and owner is assembly.drafts[-1]:
        return outputs
    if not losses:
        for tensor in outputs:
            if samples.states[tensor].kind != "split" or samples.states[tensor].dim < 0:
                op = graph.producer[tensor]
                check_replayed(graph, op, where)
                raise UserError(
                    f"{where(op)}: the model returns its result of shape {graph.shapes[tensor]}, which is of no single sample; "
                    "it should return its loss, or a result for each sample"
                )
    op = graph.producer[outputs[0]]
    name = "loss" if losses else "output"
    draft = LayerDraft(
        layer=make.opaque("", (1,), (1,), modules=()),
        name=assembly._join(op.path, name) if losses else name,
        path=op.path,
        is_program=True,
        is_output=True,
        output=outputs[0],
        results=list(outputs),
        is_loss=bool(losses),
    )
    assembly.drafts.append(draft)
    return []


class _Scopes:
    """The innermost repeated module, with modules inside, that a path lies in.

    Args:
        assembly: The traced operators.
    """

    def __init__(self, assembly: Assembly):
        graph = assembly.graph
        children = {child for paths in graph.containers.values() for child in paths}
        self._scopes = {child for child in children if child not in graph.leaves}

    def of(self, path: str) -> str:
        parts = path.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in self._scopes), "")


def where(op: Operator) -> str:
    """Describe an operator of the user's model for an error."""
    return f"operator {op.kind} of module {op.path!r}" if op.path else f"operator {op.kind} of the model"


def _image_tensors(assembly: Assembly, drafts: Sequence[LayerDraft]) -> set[str]:
    """Return the tensors that layers of images read."""
    return {
        tensor
        for draft in drafts
        if draft.layer.kind in _IMAGE_KINDS and len(draft.layer.input_shape) == 3
        for tensor in draft.sources
    }


def _made(assembly: Assembly, draft: LayerDraft, is_first: bool) -> MadeProgram | None:
    """Return the program of a draft, or the program of its data; None if it has neither.

    By default the first layer that reads data reads the first input of the model, and further lookups read zeros.
    """
    graph, samples = assembly.graph, assembly.samples
    if draft.is_program:
        return make_program(graph, samples, draft.operators, draft.results, where, is_loss=draft.is_loss)
    if not draft.feed or (is_first and draft.feed == graph.data[0]):
        return None
    if not is_first and draft.layer.kind == "embedding" and _is_zero(graph, draft.feed):
        return None
    return make_program(graph, samples, (), [draft.feed], where, context="whole")


def _is_zero(graph: OperatorGraph, tensor: str) -> bool:
    """Return whether all elements of a tensor are the constant 0."""
    constants = [op for op in graph.ancestors(tensor) if op.kind == "constant"]
    others = [op for op in graph.ancestors(tensor) if op.kind not in (*VIEWS, "cast", "constant")]
    is_zero = all(not op.attributes["integer_value"] and not op.attributes["floating_value"] for op in constants)
    return bool(constants) and not others and is_zero


def _describe_program(assembly: Assembly, draft: LayerDraft, made: MadeProgram, images: set[str]) -> None:
    """Set the layer of a program: shapes, work, memory and parameters."""
    graph = assembly.graph
    operators = _operators_of(assembly, draft, made)
    products = [count for op in operators if (count := flops(graph, op))]
    split = [t for op in operators for t in op.outputs[:1] if graph.is_active(t) and t not in draft.results]
    kept = sum(
        graph.elements(tensor)
        for op in operators
        if op.kind not in VIEWS
        for tensor in op.outputs[:1]
        if tensor in split
    )
    further = sum(graph.elements(tensor) for tensor in made.firsts[1:])
    traffic = sum(
        graph.elements(tensor)
        for op in operators
        if op.kind not in VIEWS or op.kind == "transpose"
        for tensor in (*op.inputs, *op.outputs[:1])
    )
    result = draft.results[0]
    shape: tuple[int, ...]
    if draft.is_loss:
        shape = (1, 1)
    elif len(draft.results) > 1:
        shape = (1, sum(graph.elements(tensor) for tensor in draft.results) // graph.batch)
    elif result in images:
        shape = tuple(graph.shapes[result][1:])
    else:
        shape = _rows_of(assembly, result)
    raw = [source.shape for source in made.program.sources if source.origin == "data"]
    if made.reads:
        owner = assembly.owners[made.reads[0]]
        read = owner.layer.output_shape
        if prod(read) * graph.batch != graph.elements(made.reads[0]) or len(made.firsts) > 1:
            read = _rows_of(assembly, made.reads[0])
    else:
        read = tuple(int(length) for length in at(raw[0][1:], 1)) if raw and len(raw[0]) > 1 else (1,)
    common = _common_path([op.path for op in draft.operators])
    is_module = bool(common) and common in graph.leaves
    if is_module and len({op.path for op in draft.operators}) == 1:
        draft.name = common
    draft.variables = [(variable, assembly._parameter_name(variable, common)) for variable in made.parameters]
    draft.layer = make.opaque(
        "",
        read,
        shape,
        flops=sum(products) / graph.batch,
        products=len(products),
        kept_elements=(kept + further) // graph.batch,
        modules=tuple(dict.fromkeys(op.path for op in draft.operators if op.path in graph.leaves)),
        traffic=max(traffic // graph.batch, 1),
        launches=max(sum(op.kind not in VIEWS or op.kind == "transpose" for op in operators), 1),
        program=made.program,
    )


def _operators_of(assembly: Assembly, draft: LayerDraft, made: MadeProgram) -> list[Operator]:
    """Return the operators with samples that a program runs; those of fixed tensors do not grow with the batch."""
    inside = {op.name for op in draft.operators}
    graph, contexts = assembly.graph, assembly.samples.contexts
    pending, seen = list(draft.results), set(made.reads)
    found: dict[str, Operator] = {}
    while pending:
        tensor = pending.pop()
        op = graph.producer.get(tensor)
        if tensor in seen or op is None or contexts[op.name] == "fixed":
            continue
        seen.add(tensor)
        found[op.name] = op
        pending += op.inputs
    found.update((op.name, op) for op in draft.operators if op.name in inside)
    return sorted(found.values(), key=lambda op: graph.position[op.name])


def _rows_of(assembly: Assembly, tensor: str) -> tuple[int, ...]:
    """Return the shape of a sample as rows of features."""
    graph = assembly.graph
    state, dims = assembly.samples.states[tensor], graph.dims[tensor]
    if state.dim == len(dims) - 1:
        return 1, graph.elements(tensor) // graph.batch
    return graph.rows_and_features(tensor)


def _common_path(paths: Sequence[str]) -> str:
    """Return the innermost module that contains all paths.

    >>> _common_path(["h.0.attn", "h.0.mlp.fc"]), _common_path(["h.0.attn"])
    ('h.0', 'h.0.attn')
    """
    parts = [path.split(".") for path in paths] or [[]]
    common = []
    for names in zip(*parts):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
