"""Runs a part of a traced model on numbers, to recognise what it computes however it is written.

The operators between some *free* tensors and a result run on one sample, in single precision and in this process. The caller
chooses the values of the free tensors, and compares the result with the formula that a kind of layer has. Buffers and constants
have the values of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.layer import Layer
from autoddl.costmodel.program import Program, Result, Source, TracedCall, at
from autoddl.pipelines.runtime.facts import buffer_of
from autoddl.pipelines.runtime.replay.operators import RANDOM, is_replayed

from .operators import Operator, OperatorGraph
from .scales import attributes_of

__all__ = ["Part", "part_between"]


class _Array(NamedTuple):
    """An array that can be compared."""

    content: bytes
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A part of a model that can be run. Parts of like layers are equal.

    Attributes:
        program: Its operators; the data are the free tensors, then the ``arrays``.
        arrays: Buffers and constants.
    """

    program: Program
    arrays: tuple[_Array, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the first free tensor."""
        return self.program.sources[0].sample_elements

    def run(self, *values: np.ndarray) -> np.ndarray:
        """Return the result for values of the free tensors, which may have other shapes with as many elements."""
        # The runtime needs OneFlow, which only models of OneFlow need.
        from autoddl.pipelines.runtime.backend import backend_of
        from autoddl.pipelines.runtime.layers import build_feed
        from autoddl.pipelines.runtime.stepping import Stepper

        shapes = [at(source.shape, 1) for source in self.program.sources]
        given = [value.reshape(shape).astype(np.float32) for value, shape in zip(values, shapes)]
        given += [np.frombuffer(array.content, array.dtype).reshape(array.shape) for array in self.arrays]
        layer = Layer("part", "opaque", (1,), (1,), program=self.program)
        result = build_feed(layer, Stepper(1, backend_of("float32", "cpu")), None)(given, 1, None)
        return result.reshape(at(self.program.results[0].shape, 1)).astype(np.float64)


def part_between(graph: OperatorGraph, free: Sequence[str], tensor: str) -> Part | str:
    """Return the part of a model that computes a tensor from free ones.

    Returns:
        Why it cannot be run, as what it does: "applies flip".
    """
    needed: dict[str, Operator] = {}
    variables: dict[str, None] = {}
    pending = [tensor]
    while pending:
        name = pending.pop()
        if name in free:
            continue
        if name in graph.variables:
            variable = graph.variables[name]
            if variable.constant is None and variable.is_free:
                return "reads a tensor that is no part of its module"
            variables[name] = None
            continue
        op = graph.producer.get(name)
        if op is None:
            return "reads inputs of the model"
        if not is_replayed(op.kind) or op.kind in RANDOM:
            return f"applies {op.kind}"
        if op.name not in needed:
            needed[op.name] = op
            pending += op.inputs
    operators = sorted(needed.values(), key=lambda op: graph.position[op.name])
    # Names that do not depend on the layer.
    names = {name: f"t{i}" for i, name in enumerate((*free, *variables, *(op.output for op in operators)))}
    shapes = [*(at(graph.dims[name], 1) for name in free), *(graph.variables[name].shape for name in variables)]
    sources = tuple(Source(f"t{i}", "data", i, shape=shape) for i, shape in enumerate(shapes))
    calls = tuple(
        TracedCall(
            op.kind,
            {key: tuple(names[name] for name in read) for key, read in op.arguments.items()},
            {"out": (names[op.output],)},
            {name: at(value, 1) for name, value in attributes_of(graph, op).items()},
        )
        for op in operators
    )
    program = Program(sources, calls, (Result(names[tensor], at(graph.dims[tensor], 1)),))
    return Part(program, tuple(_array_of(graph, name) for name in variables))


def _array_of(graph: OperatorGraph, name: str) -> _Array:
    variable = graph.variables[name]
    owner, _, attribute = variable.name.rpartition(".")
    values = buffer_of(graph.model, owner, attribute) if variable.constant is None else np.asarray(variable.constant)
    return _Array(values.tobytes(), values.dtype, values.shape)
