"""Makes the program (:mod:`autoddl.costmodel.program`) of a group of operators.

A program reads the active tensors of other layers. What depends on inputs of the model alone, or on parameters alone, is computed
in the program itself, as often as it is needed: masks, tables of positions, transposed weights. So is everything that belongs to
all samples together: it cannot be the output of a layer, of which every rank has its own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.program import Program, Result, Scaled, Source, TracedCall
from autoddl.pipelines.runtime.replay.operators import RANDOM, is_replayed

from .images import is_synchronised
from .operators import Operator, OperatorGraph, stream_of
from .samples import Samples
from .scales import attributes_of
from .score_changes import Change

__all__ = ["MadeProgram", "check_replayed", "frontier", "make_program", "make_score_program"]

#: Attributes that a program does not need.
_LEFT_OUT = frozenset({"nd_sbp", "seed", "has_seed", "pin_memory", "device_type", "device_id", "max_dim_size"})
#: Most elements of a constant that a program contains.
_MAX_CONSTANT = 1 << 16
#: Operators of which a call returns all results.
_SEVERAL_RESULTS = frozenset({"nll"})


@dataclass
class MadeProgram:
    """A program, and what it reads.

    Attributes:
        program: The program.
        reads: Active tensors of other layers, in the order of the program's sources of layers.
        firsts: The first of the tensors that are views of the output of one layer, for each layer.
        parameters: Variables of the trace, in the order of the program's parameters.
    """

    program: Program
    reads: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    firsts: tuple[str, ...] = ()


def check_replayed(graph: OperatorGraph, op: Operator, wheres: Callable[[Operator], str]) -> None:
    """Check that ranks can run an operator.

    Raises:
        UserError: They cannot; the message names the operator, its module and what to do.
    """
    if not is_replayed(op.kind):
        raise UserError(
            f"{wheres(op)}: ranks cannot run this operator; compute it in another way, or register a kind of layer for the module"
        )
    if op.kind == "normalization" and "channels" not in op.attributes and not op.path:
        raise UserError(f"{wheres(op)}: ranks run a batch norm only as a module nn.BatchNorm")
    used = [tensor for tensor in op.outputs[1:] if graph.consumers.get(tensor) or tensor in graph.outputs]
    if used and op.kind not in _SEVERAL_RESULTS:
        raise UserError(f"{wheres(op)}: ranks compute only its first result, and the model uses another one")


def frontier(graph: OperatorGraph, samples: Samples, tensors: Iterable[str], inside: frozenset[str]) -> list[str]:
    """Return the active split tensors that the computation of some tensors begins with, beyond the operators ``inside``."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    pending = list(tensors)[::-1]
    while pending:
        tensor = pending.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        op = graph.producer.get(tensor)
        if op is None or not graph.is_active(tensor):
            continue
        if samples.states[tensor].kind == "split" and op.name not in inside:
            found[tensor] = None
        else:
            pending += op.inputs[::-1]
    return list(found)


def make_program(
    graph: OperatorGraph,
    samples: Samples,
    operators: Iterable[Operator],
    results: Iterable[str],
    where: Callable[[Operator], str],
    *,
    is_loss: bool = False,
    context: str = "split",
) -> MadeProgram:
    """Return the program of some operators.

    Args:
        graph: The traced operators.
        samples: Where their samples are.
        operators: Operators that the program runs besides those that it needs for itself, in execution order.
        results: Tensors that it returns.
        where: Describes an operator for an error.
        is_loss: Whether the result is the loss of the model.
        context: The context of the results. A program of raw tensors alone may compute them for all samples, ``whole``.

    Raises:
        UserError: Ranks cannot run an operator.
    """
    builder = _Builder(graph, samples, frozenset(op.name for op in operators), where)
    made = []
    for tensor in results:
        name = builder.value(tensor, "whole" if is_loss else context)
        dims = graph.dims[tensor]
        has_samples = samples.states[tensor].dim >= 0
        made.append(Result(name, dims, samples.outer_of(tensor, dims) if has_samples else 0))
    program = Program(tuple(builder.sources), tuple(builder.calls), tuple(made), is_loss)
    return MadeProgram(program, tuple(builder.reads), tuple(builder.parameters))


def make_score_program(
    graph: OperatorGraph, samples: Samples, changes: Iterable[Change], where: Callable[[Operator], str]
) -> MadeProgram:
    """Return the program that computes what changes the scores of attention.

    Args:
        graph: The traced operators.
        samples: Where their samples are.
        changes: The changes, in order.
        where: Describes an operator for an error.

    Raises:
        UserError: Ranks cannot run an operator.
    """
    builder = _Builder(graph, samples, frozenset(), where)
    made = []
    for change in changes:
        has_samples = isinstance(change.shape[0], Scaled)
        if change.tensor:
            name, value = builder.value(change.tensor, "split"), change.value
        else:
            name, value = builder.number(change.value), 0.0
        made.append(Result(name, change.shape, int(has_samples), change.role, value))
    program = Program(tuple(builder.sources), tuple(builder.calls), tuple(made))
    return MadeProgram(program, tuple(builder.reads), tuple(builder.parameters))


@dataclass
class _Builder:
    """Collects sources and calls while the results are computed backwards.

    Attributes:
        graph, samples, inside, where: See `make_program`.
        names: Variables by tensor and context.
    """

    graph: OperatorGraph
    samples: Samples
    inside: frozenset[str]
    where: Callable[[Operator], str]
    sources: list[Source] = field(default_factory=list)
    calls: list[TracedCall] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    count: int = 0

    def value(self, tensor: str, context: str) -> str:
        """Return the variable of a tensor in a context, ``split`` or ``whole``; its computation is appended."""
        # Without recursion, since a recurrent layer can be thousands of operators deep.
        stack = [(tensor, context)]
        while stack:
            key = stack[-1]
            if key in self.names:
                stack.pop()
                continue
            missing = [needed for needed in self._needs(*key) if needed not in self.names]
            if missing:
                stack += reversed(missing)
            else:
                self.names[key] = self._emit(*key)
                stack.pop()
        return self.names[tensor, context]

    def number(self, value: float) -> str:
        """Return a variable with one number."""
        name = self._new()
        self.sources.append(Source(name, "constant", shape=(1,), outer=0, values=(value,), dtype="float32"))
        return name

    # ---- What a tensor is computed from --------------------------------------------------------------------------------

    def _way(self, tensor: str, context: str) -> str:
        """Return how a tensor is computed in a context.

        ``source``; ``operator`` of its producer in this context; or by a crossing from its variable in the other context.
        """
        graph, state = self.graph, self.samples.states[tensor]
        op = graph.producer.get(tensor)
        if state.kind == "fixed":
            if context == "whole" and graph.is_learned(tensor):
                return "whole_gradient"
            return "source" if op is None else "operator"
        if op is None:
            return "source"
        natural = self.samples.contexts[op.name]
        if op.name in self.samples.summed:
            return "sum_samples" if context == "whole" else self._to_split(tensor)
        if natural == "whole":
            return "operator" if context == "whole" else self._to_split(tensor)
        if graph.is_active(tensor) and op.name not in self.inside:
            return "source" if context == "split" else "gather_samples"
        if context == "split":
            return "operator"
        # Every rank has all inputs of the model, so tensors that depend on them alone are computed for all samples.
        return "gather_samples" if graph.is_active(tensor) else "operator"

    def _to_split(self, tensor: str) -> str:
        has_samples = any(isinstance(length, Scaled) for length in self.graph.dims[tensor])
        if has_samples and self.samples.states[tensor].dim < 0:
            op = self.graph.producer[tensor]
            raise UserError(
                f"{self.where(op)}: its result of shape {self.graph.shapes[tensor]} mixes samples, and is used for single ones; "
                "it is not clear which elements belong to which sample"
            )
        return "own_samples" if has_samples else "share_whole"

    def _needs(self, tensor: str, context: str) -> list[tuple[str, str]]:
        """Return the tensors and contexts that have to be computed before."""
        way = self._way(tensor, context)
        if way == "source":
            return []
        if way in ("own_samples", "share_whole"):
            return [(tensor, "whole")]
        if way in ("gather_samples", "whole_gradient"):
            return [(tensor, "split")]
        op = self.graph.producer[tensor]
        inputs = op.arguments.items()
        context = "split" if way == "sum_samples" else context
        if way == "operator" and self.samples.states[tensor].kind == "fixed":
            context = "split"
        return [(name, context) for key, names in inputs for name in names if not self._is_left_out(op, key)]

    @staticmethod
    def _is_left_out(op: Operator, key: str) -> bool:
        """Whether the call of an operator does not read an argument: running statistics are those of the module."""
        return op.kind == "normalization" and key in ("moving_mean", "moving_variance")

    # ---- Sources and calls ----------------------------------------------------------------------------------------------

    def _new(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def _emit(self, tensor: str, context: str) -> str:
        way = self._way(tensor, context)
        if way == "source":
            return self._source(tensor, context)
        if way == "operator":
            return self._operator(tensor, context)
        if way == "sum_samples":
            return self._crossing(way, self._operator(tensor, "split"), tensor)
        return self._crossing(
            way, self.names[tensor, "split" if way in ("gather_samples", "whole_gradient") else "whole"], tensor
        )

    def _source(self, tensor: str, context: str) -> str:
        graph, dims = self.graph, self.graph.dims.get(tensor, ())
        variable = graph.variables.get(tensor)
        if variable is None:
            name = self._new()
            if tensor in graph.data:
                is_split = self.samples.states[tensor].kind == "split"
                index = graph.data.index(tensor)
                self.sources.append(
                    Source(name, "data", index, shape=dims, outer=int(is_split), is_whole=context == "whole")
                )
            else:
                self.sources.append(
                    Source(name, "layer", len(self.reads), shape=dims, outer=self.samples.outer_of(tensor, dims))
                )
                self.reads.append(tensor)
            return name
        if variable.trained:
            index = len(self.parameters)
            self.parameters.append(tensor)
            self.sources.append(Source(f"weight_{index}", "parameter", index, shape=dims, outer=0))
            name = f"weight_{index}"
        elif variable.constant is not None:
            name = self._new()
            values = variable.constant
            if values.size > _MAX_CONSTANT:
                raise UserError(
                    f"a tensor of {values.size:,} numbers is made in the forward pass; register it as a buffer of its module"
                )
            listed = tuple(values.reshape(-1).tolist())
            self.sources.append(
                Source(name, "constant", shape=values.shape, outer=0, values=listed, dtype=str(values.dtype))
            )
        elif variable.is_free:
            raise UserError(
                f"the forward pass uses a tensor of shape {variable.shape} that is neither a parameter nor a buffer nor an "
                "attribute of a module; register it as a buffer"
            )
        else:
            name = self._new()
            self.sources.append(Source(name, "buffer", name=variable.name, shape=dims, outer=0))
        return name

    def _operator(self, tensor: str, context: str) -> str:
        graph, op = self.graph, self.graph.producer[tensor]
        check_replayed(graph, op, self.where)
        is_whole = context == "whole" and self.samples.contexts[op.name] != "fixed"
        inner = "whole" if is_whole else "split"
        arguments = {
            key: tuple(self.names[name, inner] for name in names)
            for key, names in op.arguments.items()
            if not self._is_left_out(op, key)
        }
        outputs = [name for name in op.outputs] if op.kind in _SEVERAL_RESULTS else [op.output]
        new = {output: self._new() for output in outputs}
        is_summed = op.name in self.samples.summed and not is_whole
        for output, name in new.items():
            if output != tensor and not is_summed:
                self.names[output, context] = name
        attributes = self._attributes(op)
        self.calls.append(TracedCall(op.kind, arguments, {"out": tuple(new.values())}, attributes, is_whole, op.path))
        return new[tensor]

    def _attributes(self, op: Operator) -> dict[str, Any]:
        attributes = {name: value for name, value in attributes_of(self.graph, op).items() if name not in _LEFT_OUT}
        if op.kind in RANDOM:
            state = self.samples.states[op.output]
            attributes["place"] = (state.dim, state.outer) if state.dim >= 0 else ()
            attributes["stream"] = stream_of(self.graph, op)
        if op.kind == "normalization":
            attributes["channels"] = self.graph.shapes[op.arguments["x"][0]][op.attributes["axis"]]
            is_split = self.samples.contexts[op.name] == "split"
            if is_split and op.attributes.get("training") and is_synchronised(self.graph.modules.get(op.path)):
                attributes["synchronised"] = True
        return attributes

    def _crossing(self, kind: str, variable: str, tensor: str) -> str:
        graph, dims = self.graph, self.graph.dims[tensor]
        state = self.samples.states[tensor]
        times, fixed = 1, 1
        is_scaled = False
        for length in dims:
            if isinstance(length, Scaled):
                is_scaled, times = True, times * int(length.times)
            else:
                fixed *= length
        elements = Scaled(times * fixed) if is_scaled else fixed
        attributes: dict[str, Any] = {
            "elements": elements,
            "is_trained": graph.is_active(tensor) or graph.is_learned(tensor),
        }
        if kind in ("gather_samples", "own_samples"):
            attributes |= {"dim": state.dim, "outer": state.outer}
        if self.samples.summed.get(graph.producer[tensor].name if tensor in graph.producer else "") == "mean":
            attributes["is_mean"] = True
        name = self._new()
        path = graph.producer[tensor].path if tensor in graph.producer else ""
        self.calls.append(
            TracedCall(kind, {"x": (variable,)}, {"out": (name,)}, attributes, kind != "own_samples", path)
        )
        return name
